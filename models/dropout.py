"""Dropout, and the random numbers that it takes: a function of an element's place in the whole array, so that they are
the same on any mesh.

    bits = random_bits(seed, parse('M/w F/t').dims, w.shape)          # u32['M/w F/t']
    dropout = Dropout(0.1, seed, rows, along_c.in_order)              # for layers.hidden

`jax.random` under `shard_map` gives each device the numbers of its own part. A key for each element, as
models/decoding.py has for each token, would take some 120 integer operations; this takes 9.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardlib import shardops
from shardlib.spec import Dim, parse


def mixed(seed: jax.Array, number: jax.Array) -> jax.Array:
    """A seed for the number, all uint32: its step of a Weyl sequence (Steele et al. 2014, section 3), and then
    MurmurHash3's finalizer (Appleby 2011), by which each bit depends on all bits."""
    x = seed + number * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def random_bits(
    seed: jax.Array, dims: Sequence[Dim], shape: Sequence[int], in_order: Callable[[jax.Array], jax.Array] | None = None
) -> jax.Array:
    """Uniform numbers, uint32, for the elements of an array: a function of the seed and of the place in the whole.

    Args:
      seed: uint32; a scalar, or an array whose dims come before the others: a seed for each of its elements.
      dims, shape: the dims to make, and their sizes on a device.
      in_order: puts positions, the dims L and S, in their order in memory (`Context.in_order`); None: as they are.
    """
    for dim, size in zip(dims, shape, strict=True):
        place = jnp.arange(size * math.prod(map(shardops.axis_size, dim.axes)), dtype=jnp.uint32)
        place = in_order(place) if in_order and dim.name in ('L', 'S') else place
        if dim.axes:
            place = shardops.slice(f'{dim.name} -> {dim}', place)
        seed = mixed(seed[..., None], jnp.expand_dims(place, range(seed.ndim)))
    return seed


@dataclass(frozen=True)
class Dropout:
    """Sets some elements to zero and divides the others by 1 - rate (Srivastava et al. 2014, section 10), in what
    attention and feed-forward add to the residual, and in attention's probabilities. Which ones is a function of the
    seed, the row's number, the layer and the position in the row."""

    rate: float  # the part that becomes zero
    seed: jax.Array  # u32[''], another at each step
    rows: jax.Array  # u32['B/b'], the row's number in the whole batch
    in_order: Callable[[jax.Array], jax.Array] | None = None  # as in `random_bits`

    def of_layer(self, number: jax.Array) -> 'Drop':
        return Drop(self, mixed(self.seed, number))


class Drop:
    """`drop('B/b L/c M/t', x)`, in one layer; each call has another mask."""

    def __init__(self, dropout: Dropout, seed: jax.Array):
        self.dropout, self.seed, self.calls = dropout, seed, itertools.count(1)

    def __call__(self, spec: str, x: jax.Array) -> jax.Array:
        rate, seed = self.dropout.rate, mixed(self.seed, jnp.uint32(next(self.calls)))
        seed = mixed(seed, self.dropout.rows)
        bits = random_bits(seed, parse(spec).dims[1:], x.shape[1:], self.dropout.in_order)
        return jnp.where(bits >= np.uint32(rate * 2**32), x / (1 - rate), jnp.zeros((), x.dtype))


class Residual(str):
    """'M/t', the residual's layout, with dropout: `layers.with_dropout` drops elements of what is added."""

    drop: Drop

    def __new__(cls, drop: Drop):
        made = super().__new__(cls, 'M/t')
        made.drop = drop
        return made
