"""Decoding with any family of models/: prompts into a cache, then one token after another, the same on any mesh.

    generator = Generator(family, model, weights, ends=[2])        # under `with jax.set_mesh(mesh):`
    for burst in generator.draw([[1, 5, 7]], [Drawing(tokens=100, temperature=0.8, seed=3)]):
        print(burst[0].tokens)
    generator.search([[1, 5, 7]], tokens=100, beams=4, length_penalty=1.0)

A prompt is read into a cache of keys and values, a chunk of tokens at a time; then each token is drawn and read in
turn. The layers are those of training, with weights that are gathered over d once. What is drawn depends on the row's
seed, its tokens and the position, not on the mesh or other rows.

Legend as in train.py; S slots of the cache, one a position; L new tokens; N tokens that are drawn, or candidates (C
in programs, where N may be T5's buckets); R tokens that an encoder reads.
"""

import functools
import inspect
import itertools
import math
import os
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Float32, Int32, Int64, UInt32

from models import layers
from models.context import ALONE, attention_where
from models.layers import act
from models.mesh import placed
from runtime.config.keys import Count, Fraction, NotNegative, Positive, Seed, Steps
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.mesh import current_mesh
from shardlib.products import Quantized
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, ArrayType, bool_, f32, i8, i32, map_type, narrowed, pytree_dataclass, u32
from shardlib.spec import expanded
from shardlib.typed import typed

CHUNK = 256  # most tokens of a prompt that are read at once, else the power of two that holds the rest of it
SMALLEST_CHUNK = 16  # so that few programs are compiled
SHORTEST_BURST, BURST = 4, 32  # tokens that are drawn before the host looks at them
SLOTS = 128  # a cache's length is rounded up to a multiple of it, so that few programs are compiled
# XLA:CPU has no products of bfloat16 with results in float32 (jax 0.10.2): there attention widens what it reads, but
# not in the plan of another machine, which sets this.
is_planned = False
FILTERS = ('repetition_penalty', 'temperature', 'top_k', 'top_p', 'min_p')


# == What is asked for, and what comes =================================================================================
@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How a row's tokens are drawn. Filters apply in this order, as in transformers."""

    tokens: Count = 256  # how many at most
    seed: Seed = 0  # the same seed draws the same tokens
    repetition_penalty: Positive = 1.0  # divides the logits above 0 of tokens that are there already; multiplies others
    temperature: NotNegative = 0.8  # 0: always the likeliest token
    top_k: Steps = 0  # only the k likeliest; 0: all
    top_p: Fraction = 1.0  # only the likeliest that have this much probability together
    min_p: Fraction = 0.0  # only those at least this likely, relative to the likeliest


@dataclass(frozen=True)
class Drawn:
    """Tokens that were drawn, and their log probabilities by the model."""

    tokens: list[int]
    log_probs: list[float]


# One device's part of a cache's keys or values, and places in it.
OfCache, Places = Float[jax.Array, 'layers B K S D'], Int32[jax.Array, 'N']

NO_TEXT = Drawing(tokens=1, temperature=0.0)  # for an empty row


# == Weights and cache =================================================================================================
@pytree_dataclass
class Cache:
    """Keys and values of the tokens that were read: 4KD/t bytes a layer and slot in bfloat16."""

    k: act['layers B/b K/t S D']
    v: act['layers B/b K/t S D']
    length: i32['B/b']  # filled slots
    memory: act['layers 2 B/b R K/t D'] | None = None  # keys and values of the encoder's R results
    read: i32['B/b'] | None = None  # how many of the R there are


def columns_of(family: Any, layer: Any) -> dict[str, tuple[ArrayType, str]]:
    """The matrices that int8 rounds, by name: array type and column dims. `layer`: a gathered layer's array types."""
    matrices = {}
    for name, contracted in family.TABLE.contracted.items():
        if (array := getattr(layer, name)) is not None:
            matrices[name] = array, ' '.join(str(dim) for dim in array.spec.dims if dim.name not in contracted)
    return matrices


def quantized_type(family: Any, layer: Any) -> Any:
    """The type of a gathered layer, a tree of array types, with its matrices in 8 bits."""
    matrices = columns_of(family, layer).items()
    return replace(layer, **{name: Quantized(i8[str(w.spec)], f32[columns]) for name, (w, columns) in matrices})


def quantized(family: Any, layer: Any, type_: Any) -> Any:
    """A gathered layer with matrices of a byte an element: each column is divided by its largest magnitude / 127 and
    rounded. A column that is split over t sends 4 bytes."""

    def rounded(w, array, columns):
        largest = shardops.pmax(f"{array.spec} -> {columns}", jnp.abs(w.astype(jnp.float32)))
        scale = jnp.maximum(largest, 1e-30) / 127
        axes = [axis for axis, dim in enumerate(array.spec.dims) if str(dim) not in columns.split()]
        return Quantized(jnp.round(w.astype(jnp.float32) / jnp.expand_dims(scale, axes)).astype(jnp.int8), scale)

    matrices = columns_of(family, type_).items()
    return replace(layer, **{name: rounded(getattr(layer, name), *dims) for name, dims in matrices})


def split(family: Any) -> SimpleNamespace:
    """The family with layers whose weights stay divided over w: each is gathered when its turn comes."""

    def layer(model: Any, x: Any, w: Any, *others: Any) -> Any:
        return family.layer(model, x, family.gather_layer(w), *others)

    return SimpleNamespace(**vars(family) | {"layer": layer})


@pytree_dataclass
class Rows:
    """The state of each row, and how its tokens are drawn."""

    token: u32['B/b']  # the last one, not in the cache yet
    drawn: i32['B/b']  # tokens drawn so far
    left: i32['B/b']  # tokens that may still be drawn; 0: the row has ended
    seen: bool_['B/b V/t']  # tokens that occur in the row
    key: u32['B/b 2']
    repetition_penalty: f32['B/b']
    temperature: f32['B/b']
    top_k: f32['B/b']
    top_p: f32['B/b']
    min_p: f32['B/b']


@typed
def attention(
    q: act['B/b L Q K/t D'], old_k: act['B/b K/t S D'], old_v: act['B/b K/t S D'], k: act['B/b N K/t D'],
    v: act['B/b N K/t D'], length: i32['B/b'], window, cap: float | None,
    bias: tuple[f32['B/b K/t L S'], f32['B/b K/t L N']] | None = None,
) -> act['B/b L Q K/t D']:  # fmt: skip
    """Attention over the filled slots and, causally, the new tokens; a bias is added to the logits of both."""
    if jax.default_backend() == 'cpu' and not is_planned:
        q, old_k, old_v, k, v = [x.astype(jnp.float32) for x in (q, old_k, old_v, k, v)]
    product = functools.partial(shardops.einsum_unreduced, preferred_element_type=jnp.float32)
    slot, new, window = jnp.arange(old_k.shape[2]), jnp.arange(q.shape[1]), layers.ALL if window is None else window
    position = length[:, None] + new[None]
    is_filled = (slot[None] < length[:, None])[:, None] & (position[:, :, None] - slot[None, None] < window)
    distance = new[:, None] - new[None]
    is_before = (distance >= 0) & (distance < window)

    def masked(logits, allowed, bias):
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return jnp.where(allowed, logits if bias is None else logits + bias[:, :, None], -1e30)

    of_old, of_new = bias or (None, None)
    before = product('B/b L Q K/t D, B/b K/t S D -> B/b K/t Q L S', q, old_k)
    before = masked(before, is_filled[:, None, None], of_old)
    among = product('B/b L Q K/t D, B/b N K/t D -> B/b K/t Q L N', q, k)
    among = masked(among, is_before[None, None, None], of_new)
    probs = jax.nn.softmax(jnp.concatenate([before, among], axis=-1), axis=-1).astype(v.dtype)
    slots = len(slot)
    o = product('B/b K/t Q L S, B/b K/t S D -> B/b L Q K/t D', probs[..., :slots], old_v)
    o = o + product('B/b K/t Q L N, B/b N K/t D -> B/b L Q K/t D', probs[..., slots:], v)
    return o.astype(act.dtype)


def write(old: OfCache, new: Float[jax.Array, 'layers B L K D'], length: Int32[jax.Array, 'B']) -> OfCache:
    """One device's cache with new tokens' keys or values from rows' lengths."""
    place = functools.partial(lax.dynamic_update_slice_in_dim, axis=2)
    return jax.vmap(place, (1, 1, 0), 1)(old, jnp.swapaxes(new, 2, 3), length)


# == Drawing from a split vocabulary ===================================================================================
def noise(
    key: UInt32[jax.Array, 'B 2'], number: Int32[jax.Array, 'B'], ids: Int32[jax.Array, 'V']
) -> Float32[jax.Array, 'B V']:
    """A Gumbel variable for each row and token: a function of the row's key, the draw's number and the token's id."""

    def one(key, number, id):
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), number), id))

    return jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))(key, number, ids)


@typed
def bound(logits: f32['B/b V/t'], weight: f32['B/b V/t'], enough: f32['B/b']) -> f32['B/b']:
    """The largest threshold for which the logits at or above it weigh `enough`, down to 100 below the largest logit, by
    bisection: 32 sums over t, 4 bytes a row each."""
    largest = shardops.pmax('B/b V/t -> B/b', logits)

    def halve(bounds: tuple[f32['B/b'], f32['B/b']], _) -> tuple[tuple[f32['B/b'], f32['B/b']], None]:
        low, high = bounds
        middle = (low + high) / 2
        weighs = shardops.sum_unreduced('B/b V/t -> B/b +t', jnp.where(logits >= middle[:, None], weight, 0.0))
        is_enough = shardops.psum('B/b +t -> B/b', weighs) >= enough
        return (jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)), None

    return lax.scan(halve, (largest - 100, largest + 1), None, length=32)[0][0]


@typed
def log_normalizer(logits: f32['B/b V/t']) -> f32['B/b']:
    largest = shardops.pmax('B/b V/t -> B/b', logits)
    total = shardops.sum_unreduced('B/b V/t -> B/b +t', jnp.exp(logits - largest[:, None]))
    return largest + jnp.log(shardops.psum('B/b +t -> B/b', total))


@typed
def choose(
    logits: f32['B/b V/t'], ids: i32['V/t'], rows: Rows, is_drawn: bool, is_filtered: bool
) -> tuple[u32['B/b'], f32['B/b']]:
    """A token of each row, and its log probability by the model.

    The largest of logits + temperature · noise, where the noise is a token's own, is a draw from the softmax of logits
    over temperature. All sums are in float32, so that the mesh does not decide which token it is.
    """
    penalty = rows.repetition_penalty[:, None]
    penalized = jnp.where(rows.seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    score = penalized
    if is_filtered:
        hot = penalized / jnp.maximum(rows.temperature, 1e-6)[:, None]
        largest = shardops.pmax('B/b V/t -> B/b', hot)
        at_least = bound(hot, jnp.ones_like(hot), jnp.where(rows.top_k > 0, rows.top_k, jnp.inf))
        at_least = jnp.where(rows.top_k > 0, at_least, largest - 1e30)
        p = jnp.where(hot >= at_least[:, None], jnp.exp(hot - largest[:, None]), 0.0)
        total = shardops.psum('B/b +t -> B/b', shardops.sum_unreduced('B/b V/t -> B/b +t', p))
        at_least = jnp.maximum(at_least, jnp.where(rows.top_p < 1, bound(hot, p, rows.top_p * total), at_least))
        at_least = jnp.maximum(at_least, largest + jnp.log(rows.min_p))
        score = jnp.where(hot >= jnp.minimum(at_least, largest)[:, None], score, -jnp.inf)
    if is_drawn:
        drawn = shardops.local('B/b 2, B/b, V/t -> B/b V/t', noise, rows.key, rows.drawn, ids)
        score = score + rows.temperature[:, None] * drawn
    best = shardops.argmax('B/b V/t -> B/b', score)  # the lowest id of several
    is_best = best[:, None] == ids[None]
    chosen = shardops.sum_unreduced('B/b V/t -> B/b +t', jnp.where(is_best, logits, 0.0))
    return best.astype(jnp.uint32), shardops.psum('B/b +t -> B/b', chosen) - log_normalizer(logits)


def devices_of_rows() -> int:
    return math.prod(current_mesh().shape[axis] for axis in expanded("b"))


def with_whole_rows(mesh: Any) -> jax.sharding.Mesh:
    """The mesh whose c is a part of d, so that a row lies on one device, as where tokens are drawn. What is split over
    both lies the same."""
    sizes = {**mesh.shape, 'd': mesh.shape['d'] * mesh.shape['c'], 'c': 1}
    return jax.sharding.Mesh(mesh.devices.reshape(*sizes.values()), mesh.axis_names, axis_types=mesh.axis_types)


def on_mesh(mesh: jax.sharding.Mesh, array: Any) -> jax.Array:
    """The array on `with_whole_rows` of its mesh, without a copy."""
    parts = [shard.data for shard in array.addressable_shards]
    sharding = jax.sharding.NamedSharding(mesh, array.sharding.spec)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


# Where tokens are drawn a row lies on one device: c is 1, and these send nothing.
@typed
def whole(x: act['B/b L/c Q K/t D']) -> act['B/b L Q K/t D']:
    return shardops.all_gather('B/b L/c Q K/t D -> B/b L Q K/t D', x)


@typed
def part(x: act['B/b L Q K/t D']) -> act['B/b L/c Q K/t D']:
    return shardops.slice('B/b L Q K/t D -> B/b L/c Q K/t D', x)


# == Programs =========================================================================================================
@typed
def empty(family, model, *, count: int, slots: int, read: int | None = None) -> Cache:
    """An empty cache. read: room for so many tokens of an encoder."""
    sizes = dict(layers=model.layers, B=count, K=model.n_kv, D=model.d_head)
    k = shardops.zeros('layers B/b K/t S D', act, S=slots, **sizes)
    length = shardops.zeros('B/b', i32, B=count)
    if read is None:
        return Cache(k, k, length)
    return Cache(k, k, length, shardops.zeros('layers 2 B/b R K/t D', act, R=read, **sizes), length)


@typed
def encode(
    family, model, weights, cache: Cache, tokens: u32['B/b R'], count: i32['B/b'], is_new: bool_['B/b']
) -> Cache:
    """The encoder reads `count` tokens of new rows; the cache gets the decoder's keys and values of its results."""
    segment = (jnp.arange(tokens.shape[1])[None] < count[:, None]).astype(jnp.int32)
    memory = family.memory(weights, family.encode(model, weights, tokens, segment))
    memory = jnp.where(is_new[None, None, :, None, None, None], memory, cache.memory)
    return replace(cache, memory=memory, read=jnp.where(is_new, count, cache.read))


@typed
def extend(
    family, model, ends, stack, cache: Cache, tokens: u32['B/b L'], count: i32['B/b']
) -> tuple[Cache, act['B/b L/c M']]:
    """Reads the first `count` of each row's tokens into the cache; returns the hidden states of all. stack: the
    family's `Gathered`, of all layers."""
    mask = family.mask(model)
    position = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    place = ALONE.part(position)
    x, bias = family.embed(model, ends, ALONE.part(tokens), place, 'M'), None
    if cache.memory is not None:  # T5: layers know distances, and attend to the encoder's results
        slot, here = jnp.arange(cache.k.shape[3], dtype=jnp.int32), position[:, :, None]
        bias = tuple(
            family.decoding_bias(model, ends, distance)
            for distance in (here - slot[None, None], here - position[:, None, :])
        )
        is_read = jnp.arange(cache.memory.shape[3])[None] < cache.read[:, None]
        is_read = jnp.broadcast_to(is_read[:, None], (*tokens.shape, is_read.shape[1]))

    def layer(x: act['B/b L/c M'], of_layer):
        w, old_k, old_v, memory, window = of_layer

        def attend(q, k, v):
            q, k, v = whole(q), whole(k[:, :, None])[:, :, 0], whole(v[:, :, None])[:, :, 0]
            return part(attention(q, old_k, old_v, k, v, cache.length, attend.window, mask.cap, bias)), (k, v)

        def cross(q, project):
            return part(attention_where(whole(q), memory[0], memory[1], is_read, K='K/t'))

        attend.window = mask.of_layer(window)
        x, kept, _ = family.layer(model, x, w, attend, place if memory is None else cross, 'M')
        return x, kept

    x, (k, v) = lax.scan(layer, x, (stack, cache.k, cache.v, cache.memory, mask.by_layer()))
    into = functools.partial(shardops.local, 'layers B/b K/t S D, layers B/b L K/t D, B/b -> layers B/b K/t S D', write)
    k, v = into(cache.k, k, cache.length), into(cache.v, v, cache.length)
    return replace(cache, k=k, v=v, length=cache.length + count), x


def taken(cache: Cache, used: int | None, place: jax.Array | None = None) -> Cache:
    """The cache's first `used` slots, since empty ones cost as much; None: all. place: where rows are on a device."""
    if used is None and place is None:
        return cache
    rows, of_place, place = ('B/b', '', ()) if place is None else ('N/b', ', N/b', (place,))

    def of_device(old: OfCache, place: Places | None = None) -> Float[jax.Array, 'layers N K P D']:
        return old[:, slice(None) if place is None else place, :, :used]

    spec = f'layers B/b K/t S D{of_place} -> layers {rows} K/t P D'
    k, v = [shardops.local(spec, of_device, cached, *place, P=used or cached.shape[3]) for cached in (cache.k, cache.v)]
    if not place:
        return replace(cache, k=k, v=v)
    return Cache(k, v, shardops.local('B/b, N/b -> N/b', lambda old, place: old[place], cache.length, *place))


def put_back(cache: Cache, part: Cache, place: jax.Array | None = None) -> Cache:
    """The cache with what `taken` took from it."""
    if place is None:
        if part.k.shape == cache.k.shape:
            return part
        spec = 'layers B/b K/t S D, layers B/b K/t P D -> layers B/b K/t S D'
        into = functools.partial(shardops.local, spec, lambda old, new: lax.dynamic_update_slice(old, new, (0,) * 5))
        return replace(part, k=into(cache.k, part.k), v=into(cache.v, part.v))

    def of_device(old: OfCache, new: Float[jax.Array, 'layers N K P D'], place: Places) -> OfCache:
        return old.at[:, place, :, : new.shape[3]].set(new)

    spec = 'layers B/b K/t S D, layers N/b K/t P D, N/b -> layers B/b K/t S D'
    k, v = [shardops.local(spec, of_device, *pair, place) for pair in ((cache.k, part.k), (cache.v, part.v))]
    spec = 'B/b, N/b, N/b -> B/b'
    length = shardops.local(spec, lambda old, new, place: old.at[place].set(new), cache.length, part.length, place)
    return Cache(k, v, length)


@typed
def read(
    family, model, ends, stack, cache: Cache, tokens: u32['N/b L'], count: i32['N/b'],
    place: i32['N/b'] | None = None, *, used: int | None = None,
) -> Cache:  # fmt: skip
    """Reads tokens into the cache: for all rows, or (no encoder) those at `place` on a device. used: as in `taken`."""
    part, _ = extend(family, model, ends, stack, taken(cache, used, place), tokens, count)
    return put_back(cache, part, place)


@typed
def logits_after(family, model, ends, x: act['B/b L/c M']) -> f32['B/b V/t']:
    """The logits after each row's first token."""
    logits = layers.logits_of(ends.unembed, family.final(model, ends, x, 'M'), family.mask(model).logits_cap)
    return shardops.all_gather('B/b L/c V/t -> B/b L V/t', logits)[:, 0]


@typed
def step(
    family, model, ends, stack, cache: Cache, rows: Rows, ids: i32['V/t'], count: i32['B/b'], *,
    is_drawn: bool, is_filtered: bool,
) -> tuple[Cache, u32['B/b'], f32['B/b']]:  # fmt: skip
    """Reads the last token of the rows whose count is 1. Returns the next token of each, and its log probability."""
    cache, x = extend(family, model, ends, stack, cache, rows.token[:, None], count)
    return cache, *choose(logits_after(family, model, ends, x), ids, rows, is_drawn, is_filtered)


@typed
def decode(
    family, model, ends, stack, cache: Cache, rows: Rows, ids: i32['V/t'], stops: u32['ends'], burst: i32[''], *,
    is_drawn: bool, is_filtered: bool, used: int | None = None,
) -> tuple[Cache, Rows, u32['B C'], f32['B C'], i32['B']]:  # fmt: skip
    """Draws `burst` tokens for each row, at most BURST, fewer when all have ended. All devices get the tokens, their
    log probabilities, and how many each row may still have: 8C + 4 bytes a row are sent.

    Args:
      used: as in `taken`.
    """
    whole, cache = cache, taken(cache, used)

    def goes_on(carry):
        number, _, rows, _, _ = carry
        return (number < burst) & shardops.any('B/b -> ', rows.left > 0)

    def one(carry):
        number, cache, rows, tokens, log_probs = carry
        count = (rows.left > 0).astype(jnp.int32)
        cache, token, log_prob = step(
            family, model, ends, stack, cache, rows, ids, count, is_drawn=is_drawn, is_filtered=is_filtered
        )
        tokens = lax.dynamic_update_slice_in_dim(tokens, token[:, None], number, axis=1)
        log_probs = lax.dynamic_update_slice_in_dim(log_probs, log_prob[:, None], number, axis=1)
        is_end = jnp.any(token[:, None] == stops[None], axis=1)
        rows = replace(
            rows,
            token=token,
            drawn=rows.drawn + 1,
            left=jnp.where(is_end, 0, jnp.maximum(rows.left - 1, 0)),
            seen=rows.seen | (token[:, None].astype(jnp.int32) == ids[None]),
        )
        return number + 1, cache, rows, tokens, log_probs

    tokens = jnp.zeros((rows.token.shape[0], BURST), jnp.uint32) + 0 * rows.token[:, None]
    log_probs = 0.0 * tokens.astype(jnp.float32)
    carry = jnp.int32(0), cache, rows, tokens, log_probs
    _, cache, rows, tokens, log_probs = lax.while_loop(goes_on, one, carry)
    tokens = shardops.all_gather('B/b C -> B C', tokens)
    log_probs = shardops.all_gather('B/b C -> B C', log_probs)
    left = shardops.all_gather('B/b -> B', rows.left)
    return put_back(whole, cache), rows, tokens, log_probs, left


def largest(
    count: int, values: Float32[jax.Array, 'B V'], ids: Int32[jax.Array, 'V']
) -> tuple[Float32[jax.Array, 'B 1 N'], Int32[jax.Array, 'B 1 N']]:
    """The likeliest tokens of one device's part of the vocabulary."""
    top, place = lax.top_k(values, count)
    return top[:, None], jnp.take(ids, place)[:, None]


@typed
def candidates(
    family, model, ends, stack, cache: Cache, token: u32['B/b'], parent: i32['B/b'], ids: i32['V/t'], *, N: int
) -> tuple[Cache, f32['B t C'], i32['B t C']]:
    """Replaces the rows' caches by those of their parents, on the same device. Then all devices get the N likeliest
    tokens after `token` of each part of the vocabulary, and their log probabilities: 8tN bytes a row."""
    spec = 'layers B/b K/t S D, B/b -> layers B/b K/t S D'
    of_parents = functools.partial(shardops.local, spec, lambda old, parent: jnp.take(old, parent, axis=1))
    cache = replace(cache, k=of_parents(cache.k, parent), v=of_parents(cache.v, parent))
    cache, x = extend(family, model, ends, stack, cache, token[:, None], jnp.ones_like(cache.length))
    values = logits_after(family, model, ends, x)
    values = values - log_normalizer(values)[:, None]
    of_device = functools.partial(largest, N)
    best, names = shardops.local('B/b V/t, V/t -> B/b t/t N, B/b t/t N', of_device, values, ids, N=N)
    return cache, *(shardops.all_gather('B/b t/t N -> B t N', x) for x in (best, names))


@typed
def admit(family, model, cache: Cache, rows: Rows, new: Rows, is_new: bool_['B/b']) -> tuple[Cache, Rows]:
    """Puts new rows where others were, of which nothing is read any more."""

    def one(new, old):
        return jnp.where(is_new.reshape(is_new.shape + (1,) * (new.ndim - 1)), new, old)

    return replace(cache, length=jnp.where(is_new, 0, cache.length)), jax.tree.map(one, new, rows)


@typed
def gather(family, model, weights, *, stack: str, kept: str | None, layer):
    """The ends of the model, and its layers as `kept` says. layer: the type of a gathered layer."""

    def gather_layer(_, w):
        if kept == "split":
            return None, w
        gathered = family.gather_layer(w)
        return None, quantized(family, gathered, layer) if kept == "int8" else gathered

    return family.gather_ends(weights), lax.scan(gather_layer, None, getattr(weights, stack))[1]


def shapes_of(type_: Any, **sizes: int) -> Any:
    """The global shapes of a tree of this type, by the letters of its dims."""

    def shape(array):
        dims = (sizes[dim.name] if dim.name in sizes else int(dim.name) for dim in array.spec.dims)
        return jax.ShapeDtypeStruct(tuple(dims), array.element.dtype)

    return map_type(shape, type_)


def cache_sizes(prompt: int, length: int, has_encoder: bool) -> tuple[int, dict[str, int]]:
    """The most tokens of a prompt that are read at once, and a row's sizes in a cache. Arguments are as in `Slots`.

    cache_sizes(100, 128, has_encoder=False)   # (128, {"slots": 256})
    cache_sizes(100, 128, has_encoder=True)    # (16, {"slots": 256, "read": 128})
    """
    read = {"read": -(-prompt // SLOTS) * SLOTS} if has_encoder else {}
    prompt = 1 if has_encoder else prompt
    # A chunk is written as a whole, behind each row, although a prompt may end in it.
    chunk = min(CHUNK, max(1 << max(prompt - 2, 0).bit_length(), SMALLEST_CHUNK))
    return chunk, {"slots": -(-(length + chunk) // SLOTS) * SLOTS, **read}


def traced_step(programs: 'Programs', weights: Any, count: int, sizes: Mapping[str, int]) -> jax.stages.Traced:
    """A step of `count` rows without filters, on the current mesh, for the ledger, which knows weights by this name.

    Args:
      weights: the shapes of the model's.
      sizes: as of `cache_sizes`.
    """
    ends, stack = jax.eval_shape(programs.mapped("gather"), weights)
    cache = jax.eval_shape(programs.mapped("empty", count=count, **sizes))
    rows, ids, counts = shapes_of(tuple[Rows, i32['V/t'], i32['B/b']], B=count, V=programs.model.vocab)
    program = programs.mapped("step", is_drawn=True, is_filtered=False)

    def step(held, *others):
        ends, stack = held["weights"]
        return program(with_unembed(ends), stack, *others)

    held = {"weights": (replace(ends, unembed=None) if is_tied(weights) else ends, stack)}
    return jax.jit(step, donate_argnums=1).trace(held, cache, rows, ids, counts)


def is_tied(weights: Any) -> bool:
    return getattr(weights, "unembed", None) is None


def with_unembed(ends: Any) -> Any:
    """The ends, with the embedding as the unembedding if there is none."""
    return replace(ends, unembed=ends.embed) if ends.unembed is None else ends


FUNCTIONS = {
    function.__name__: function for function in (gather, empty, encode, admit, read, step, decode, candidates)
}  # all begin with (family, model)


class Programs:
    """The functions above for one model: a type that differs between models is a value here.

        programs = Programs(family, model, weights)
        cache = programs("empty", count=8, slots=256)()
        cache = programs("read")(ends, stack, cache, tokens, counts)

    Args:
      weights: the shapes of the model's weights.
      kept: how the layers' weights are stored: None, gathered over w; 'int8', gathered and rounded by `quantized`;
        'split', as in `split`.
    """

    def __init__(self, family: Any, model: Any, weights: Any, kept: str | None = None):
        name = "decoder" if family.KIND == "both" else "transformer"
        self.family, self.model = split(family) if kept == "split" else family, model
        layer = narrowed(family.Gathered, getattr(weights, name))
        at_rest = narrowed(family.Layer, getattr(weights, name))
        stacks = {None: layer, "int8": quantized_type(family, layer), "split": at_rest}
        self.settings = {"gather": {"stack": name, "kept": kept, "layer": layer}}
        # Argument types by name.
        self.types = {
            "weights": narrowed(family.Weights, weights),
            "ends": family.Ends,
            "stack": Array['layers', stacks[kept]],
            "cache": narrowed(Cache, Cache(0, 0, 0, *((0, 0) if name == "decoder" else ()))),
            "place": i32['N/b'],
        }
        self.compiled = functools.cache(self._compiled)

    def mapped(self, which: str, **settings: Any) -> typed_shard_map:
        """A program over the mesh with these settings."""
        settings = {**self.settings.get(which, {}), **settings}
        program = functools.partial(FUNCTIONS[which], self.family, self.model, **settings)
        signature = inspect.signature(FUNCTIONS[which], eval_str=True)
        _, _, *arguments = (item for item in signature.parameters.values() if item.name not in settings)
        ends, stack, cache = (self.types[name] for name in ("ends", "stack", "cache"))
        result = signature.return_annotation
        if which == "gather":
            result = tuple[ends, stack]
        elif result is Cache:
            result = cache
        else:
            result = tuple[cache, *typing.get_args(result)[1:]]
        program.__signature__ = signature.replace(
            parameters=[item.replace(annotation=self.types.get(item.name, item.annotation)) for item in arguments],
            return_annotation=result,
        )
        return typed_shard_map(program)

    def _compiled(self, which: str, **settings: Any) -> Callable:
        """`mapped`, compiled. It also takes host arrays, equal on every process; it donates cache and rows."""
        mapped = self.mapped(which, **settings)
        types = {name: parameter.annotation for name, parameter in mapped.signature.parameters.items()}
        given_up = [place for place, name in enumerate(types) if name in ("cache", "rows")]
        program = jax.jit(mapped, donate_argnums=given_up)
        return lambda *values: program(*(placed(x, type_) for x, type_ in zip(values, types.values())))


class Generator:
    """Draws tokens after prompts.

    Args:
      ends: tokens that end a text.
      start: the token that the decoder begins with, where an encoder reads the prompt.
      kept: as in `Programs`.
    """

    def __init__(
        self, family: Any, model: Any, weights: Any, ends: Sequence[int] = (), start: int | None = None,
        kept: str | None = None,
    ):  # fmt: skip
        self.programs, self.vocab = Programs(family, model, weights, kept), model.vocab
        self.start = start
        self.take(weights)
        self.ids = placed(np.arange(self.vocab, dtype=np.int32), i32['V/t'])
        # A program needs one to compare with; a vocabulary has no such token.
        self.ends = np.asarray(list(ends) or [2**32 - 1], np.uint32)

    def take(self, weights: Any) -> None:
        """Replaces the weights; None: holds none until the next call."""
        self.of_encoder, self.weights = None if self.start is None else weights, None
        if weights is not None:
            ends, stack = self.programs.compiled("gather")(weights)
            if is_tied(weights):  # jit would return two copies of the one table
                ends = with_unembed(replace(ends, unembed=None))
            self.weights = ends, stack

    def begun(self, prompt: Sequence[int]) -> Sequence[int]:
        """The tokens before the first one that is drawn."""
        return prompt if self.start is None else [self.start]

    def draw(self, prompts: Sequence[Sequence[int]], drawings: Sequence[Drawing]) -> Iterator[list[Drawn]]:
        """Yields each row's new tokens and their log probabilities, until all rows have ended."""
        count = -(-len(prompts) // devices_of_rows()) * devices_of_rows()
        length = max(len(self.begun(prompt)) + drawing.tokens for prompt, drawing in zip(prompts, drawings))
        slots = Slots(self, count, max(map(len, prompts)), length)
        slots.admit(dict(enumerate(zip(prompts, drawings))))
        while slots.left.any():
            yield slots.advance()[: len(prompts)]

    def search(self, prompts: Sequence[Sequence[int]], tokens: int, beams: int, length_penalty: float) -> list[Drawn]:
        """The best text after each prompt that beam search finds, as transformers does."""
        result, at_once = [], devices_of_rows()
        for start in range(0, len(prompts), at_once):
            batch = prompts[start : start + at_once]
            padded = [*batch, *[batch[0]] * (at_once - len(batch))]
            result += self._search(padded, tokens, beams, length_penalty)[: len(batch)]
        return result

    def _search(self, prompts: Sequence[Sequence[int]], tokens: int, beams: int, length_penalty: float) -> list[Drawn]:
        """One prompt for each device along b, whose beams are its rows."""
        texts = [Beams(beams, tokens, length_penalty, self.ends) for _ in prompts]
        longest = max(map(len, prompts))
        slots = Slots(self, len(prompts) * beams, longest, len(self.begun([0] * longest)) + tokens)
        rows = [(prompt, Drawing(tokens=tokens)) for prompt in prompts for _ in range(beams)]
        slots.admit(dict(enumerate(rows)))
        cache, count = slots.cache, min((1 + len(self.ends)) * beams, self.vocab // current_mesh().shape['t'])
        candidates = self.programs.compiled("candidates", N=count)
        token = np.repeat([self.begun(prompt)[-1] for prompt in prompts], beams).astype(np.uint32)
        parent = np.tile(np.arange(beams, dtype=np.int32), len(prompts))
        while not all(text.is_over for text in texts):
            cache, values, ids = candidates(*self.weights, cache, token, parent, self.ids)
            by_text = [np.asarray(array).reshape(len(prompts), beams, -1) for array in (values, ids)]
            parent, token = np.hstack([text.advance(*of_text) for text, *of_text in zip(texts, *by_text)])
            parent, token = parent.astype(np.int32), token.astype(np.uint32)
        return [text.best() for text in texts]


def require_room(cache: Cache) -> None:
    """Raises RunError if a cache of these shapes is larger than the memory, which the devices of a CPU share."""
    size = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache))
    of_device = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    has = of_device * current_mesh().size if of_device else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > has:
        rows, slots = cache.k.shape[1], cache.k.shape[3]
        text = f"{rows} rows of {slots} tokens take {size / 1e9:,.0f} GB, and there are {has / 1e9:,.0f}"
        raise RunError(f"{text}: lower rows, or tokens (in a server length)")


class Slots:
    """Rows of one cache; texts come and go while others are drawn.

    Args:
      count: the number of rows, a multiple of the devices along b.
      prompt: tokens of the longest prompt.
      length: most tokens of a prompt and its text together; with an encoder, most tokens that the decoder reads.
    """

    def __init__(self, generator: Generator, count: int, prompt: int, length: int):
        self.generator, self.left, self.burst = generator, np.zeros(count, np.int32), SHORTEST_BURST
        self.filled = np.zeros(count, np.int32)  # slots of each row, at most
        self.chunk, sizes = cache_sizes(prompt, length, has_encoder=generator.start is not None)
        require_room(jax.eval_shape(generator.programs.mapped("empty", count=count, **sizes)))
        self.cache = generator.programs.compiled("empty", count=count, **sizes)()
        self.drawings = [NO_TEXT] * count
        self.rows = placed(self._rows({}), Rows)

    def admit(self, texts: Mapping[int, tuple[Sequence[int], Drawing]]) -> None:
        """Puts a prompt into each of these rows, replacing what was there."""
        generator, is_new = self.generator, np.isin(np.arange(len(self.left)), list(texts))
        if generator.start is not None:
            self._encode({row: prompt for row, (prompt, _) in texts.items()}, is_new)
        texts = {row: (generator.begun(prompt), drawing) for row, (prompt, drawing) in texts.items()}
        admit = generator.programs.compiled("admit")
        self.cache, self.rows = admit(self.cache, self.rows, self._rows(texts), is_new)
        for row, (_, drawing) in texts.items():
            self.drawings[row], self.left[row], self.filled[row] = drawing, drawing.tokens, 0
        self.burst = SHORTEST_BURST
        rows, places = self._read_with(texts)
        prompts: list[Sequence[int]] = [texts[n][0] if n in texts else [0] for n in rows]
        lengths, start = np.array([len(prompt) - 1 for prompt in prompts]), 0
        while (left := int(lengths.max()) - start) > 0:
            size = min(self.chunk, max(1 << (left - 1).bit_length(), SMALLEST_CHUNK))
            tokens = np.zeros((len(prompts), size), np.uint32)
            counts = np.clip(lengths - start, 0, size).astype(np.int32)
            for row, prompt, count in zip(tokens, prompts, counts):
                row[:count] = prompt[start : start + count]
            read = generator.programs.compiled("read", used=self._used(size))
            self.cache = read(*generator.weights, self.cache, tokens, counts, *places)
            self.filled[list(texts)] += size
            start += size
        for row, (prompt, _) in texts.items():
            self.filled[row] = len(prompt) - 1

    def _used(self, more: int) -> int | None:
        """Slots for rows that go on for so many tokens: few sizes, so that few programs are compiled; None: all."""
        need, room = int(self.filled[self.left > 0].max(initial=0)) + more, self.cache.k.shape[3]
        sizes = itertools.takewhile(lambda size: size < room, (4**n * SLOTS for n in itertools.count(1)))
        return next((size for size in sizes if size >= need), None)

    def _read_with(self, new: Collection[int]) -> tuple[Sequence[int], list[Int32[np.ndarray, 'rows']]]:
        """The rows that are read together with these, on each device the same power of two: their numbers, and their
        places on their devices; no places if these are all rows."""
        of_device = len(self.left) // devices_of_rows()
        by_device = np.zeros((devices_of_rows(), of_device), bool)
        by_device.reshape(-1)[list(new)] = True
        count = 1 << (max(int(by_device.sum(axis=1).max()), 1) - 1).bit_length()
        if count >= of_device:
            return range(len(self.left)), []
        places = np.argsort(~by_device, axis=1, kind="stable")[:, :count]
        rows = places + of_device * np.arange(len(places))[:, None]
        return rows.reshape(-1).tolist(), [places.reshape(-1).astype(np.int32)]

    def _encode(self, prompts: Mapping[int, Sequence[int]], is_new: Bool[np.ndarray, 'rows']) -> None:
        tokens = np.zeros((len(self.left), self.cache.memory.shape[3]), np.uint32)
        counts = np.zeros(len(self.left), np.int32)
        for row, prompt in prompts.items():
            tokens[row, : len(prompt)], counts[row] = prompt, len(prompt)
        encode = self.generator.programs.compiled("encode")
        self.cache = encode(self.generator.of_encoder, self.cache, tokens, counts, is_new)

    def drop(self, rows: Collection[int]) -> None:
        self.left = np.where(np.isin(np.arange(len(self.left)), list(rows)), 0, self.left).astype(np.int32)
        self.rows = replace(self.rows, left=placed(self.left, i32['B/b']))

    def advance(self) -> list[Drawn]:
        """Draws more tokens for rows that have not ended: twice as many as last time, up to BURST."""
        generator, before = self.generator, self.left
        # The likeliest token passes all filters, so rows that take it need no program with them.
        random = [drawing for drawing, left in zip(self.drawings, before) if left and drawing.temperature > 0]
        decode = generator.programs.compiled(
            "decode",
            is_drawn=bool(random),
            is_filtered=any(drawing.top_k or drawing.top_p < 1 or drawing.min_p for drawing in random),
            used=self._used(self.burst),
        )
        self.cache, self.rows, *drawn = decode(
            *generator.weights, self.cache, self.rows, generator.ids, generator.ends, np.asarray(self.burst, np.int32)
        )
        tokens, log_probs, self.left = map(np.array, drawn)
        self.filled += self.burst
        self.burst = min(2 * self.burst, BURST)
        of_rows = zip(before - self.left, before, self.left, tokens, log_probs)
        return [self._new(*of_row) for of_row in of_rows]

    def _new(
        self, spent: int, before: int, left: int, tokens: UInt32[np.ndarray, 'L'], log_probs: Float32[np.ndarray, 'L']
    ) -> Drawn:
        """A row's tokens of a burst, up to its end."""
        ended = np.flatnonzero(np.isin(tokens[:before], self.generator.ends)) if before and not left else []
        count = ended[0] + 1 if len(ended) else spent
        return Drawn(tokens[:count].tolist(), log_probs[:count].tolist())

    def _rows(self, texts: Mapping[int, tuple[Sequence[int], Drawing]]) -> Rows:
        count = len(self.left)
        of_rows = [texts.get(n, ([0], NO_TEXT)) for n in range(count)]
        drawings = [drawing for _, drawing in of_rows]
        seen = np.zeros((count, self.generator.vocab), bool)
        for row, (prompt, _) in zip(seen, of_rows):
            row[np.asarray(prompt)] = True
        return Rows(
            token=np.array([prompt[-1] for prompt, _ in of_rows], np.uint32),
            drawn=np.zeros(count, np.int32),
            left=np.array([drawing.tokens if n in texts else 0 for n, drawing in enumerate(drawings)], np.int32),
            seen=seen,
            key=np.array([(0, drawing.seed) for drawing in drawings], np.uint32),  # the data of jax.random.key(seed)
            **{name: np.array([getattr(drawing, name) for drawing in drawings], np.float32) for name in FILTERS},
        )


class Beams:
    """The running and the finished texts of one prompt (as `_beam_search` of transformers 5, early_stopping=False)."""

    def __init__(self, beams: int, tokens: int, length_penalty: float, ends: UInt32[np.ndarray, 'ends']):
        self.beams, self.most, self.length_penalty, self.ends = beams, tokens, length_penalty, ends
        # At first all beams hold the same text, so only the first one may continue.
        self.running: Sequence[Drawn] = [Drawn([], [])] + [Drawn([], [-1e9])] * (beams - 1)
        self.finished: list[tuple[float, Drawn]] = []
        self.is_over = False

    def advance(
        self, values: Float32[np.ndarray, 'rows N'], ids: Int32[np.ndarray, 'rows N']
    ) -> tuple[Int64[np.ndarray, 'rows'], Int64[np.ndarray, 'rows']]:
        """Takes each beam's likeliest tokens; returns each next beam's parent and its token."""
        stays = np.arange(self.beams), np.zeros(self.beams, int)
        if self.is_over:
            return stays
        scores = values + np.array([[sum(text.log_probs)] for text in self.running], np.float32)
        order = np.argsort(-scores, axis=None, kind="stable")[: (1 + len(self.ends)) * self.beams]
        candidates = [(i // values.shape[1], int(ids.flat[i]), float(values.flat[i])) for i in order.tolist()]
        length = len(self.running[0].tokens) + 1
        is_last, going_on = length == self.most, []
        for rank, (parent, token, log_prob) in enumerate(candidates):
            before = self.running[parent]
            text = Drawn([*before.tokens, token], [*before.log_probs, log_prob])
            if not is_last and token not in self.ends:
                going_on.append((parent, text))
            elif rank < self.beams:
                self.finished.append((sum(text.log_probs) / length**self.length_penalty, text))
        self.finished = sorted(self.finished, key=lambda scored: -scored[0])[: self.beams]
        going_on = going_on[: self.beams]
        self.is_over = is_last or not going_on
        if self.is_over:
            return stays
        parents, self.running = zip(*going_on)
        attainable = sum(self.running[0].log_probs) / length**self.length_penalty
        self.is_over = len(self.finished) == self.beams and attainable <= self.finished[-1][0]
        return np.array(parents), np.array([text.tokens[-1] for text in self.running])

    def best(self) -> Drawn:
        return self.finished[0][1]
