"""Decoding with any family of models/: prompts into a cache, then tokens after tokens, on any mesh the same ones.

    generator = Generator(family, model, weights, ends=[2])        # under `with jax.set_mesh(mesh):`
    for burst in generator.draw([[1, 5, 7]], [Drawing(tokens=100, temperature=0.8, seed=3)]):
        print(burst[0].tokens)
    generator.search([[1, 5, 7]], tokens=100, beams=4, length_penalty=1.0)

A prompt is read into a cache of keys and values, a chunk of tokens at a time; then each token is drawn and read in its
turn. The layers are those of training, with weights that are gathered over d once. What is drawn depends on the row's
seed, its tokens and the place of the draw, and not on the mesh or on other rows.

Legend as in train.py; S slots of the cache, one a position; L new tokens; N tokens that are drawn, or candidates (C
in programs, where N may be T5's buckets); R tokens that an encoder reads.
"""

import functools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models import layers
from models.context import ALONE, attention_where
from models.layers import act
from runtime.config.keys import Count, Fraction, NotNegative, Positive, Seed, Steps
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.mesh import current_mesh
from shardlib.products import Quantized
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import (
    Array,
    ArrayType,
    bool_,
    f32,
    i8,
    i32,
    make_shardings,
    map_type,
    narrowed,
    pytree_dataclass,
    u32,
)
from shardlib.spec import expanded
from shardlib.typed import typed

CHUNK = 256  # tokens of a prompt that are read at once, at most: the power of two that holds what is left of it
SMALLEST_CHUNK = 16  # so that few programs are compiled
BURST = 16  # tokens that are drawn between two looks of the host
SLOTS = 128  # caches have a multiple of it, so that few programs are compiled
# XLA:CPU has no products of bfloat16 with results in float32 (jax 0.10.2): there attention widens what it reads, but
# not in the plan of another machine, which sets this.
is_planned = False
FILTERS = ('repetition_penalty', 'temperature', 'top_k', 'top_p', 'min_p')


# == What is asked for, and what comes =================================================================================
@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How the tokens of a row are drawn. Filters apply in this order, as in transformers."""

    tokens: Count = 256  # that are drawn at most
    seed: Seed = 0  # of what is drawn
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


# == Weights and cache =================================================================================================
@pytree_dataclass
class Cache:
    """Keys and values of the tokens that were read: 4KD/t bytes a layer and slot in bfloat16."""

    k: act['layers B/b K/t S D']
    v: act['layers B/b K/t S D']
    length: i32['B/b']  # slots that are filled
    memory: act['layers 2 B/b R K/t D'] | None = None  # keys and values of what an encoder wrote of R tokens
    read: i32['B/b'] | None = None  # how many of these there are


# What a layer multiplies with by `product`; the experts of some families do not.
INTO_LAYER = ("w_q", "w_k", "w_v", "w_gate", "w_up", "cross_q", "cross_k", "cross_v")
OUT_OF_LAYER = ("w_o", "w_down", "cross_o")  # whose columns are along M


def columns_of(name: str, array: ArrayType) -> str | None:
    """The dims that a matrix of a layer keeps in its product; None of what is none."""
    first, *others = array.spec.dims
    if first.name != 'M' or name not in INTO_LAYER + OUT_OF_LAYER:
        return None
    return str(first) if name in OUT_OF_LAYER else ' '.join(map(str, others))


def quantized_type(layer: Any) -> Any:
    """The type of a gathered layer, a tree of array types, with its matrices in 8 bits."""
    found = {
        name: Quantized(i8[str(array.spec)], f32[columns])
        for name, array in vars(layer).items()
        if array is not None and (columns := columns_of(name, array))
    }
    return replace(layer, **found)


def quantized(layer: Any, type_: Any) -> Any:
    """A gathered layer whose matrices have a byte an element: each column is divided by its largest magnitude / 127 and
    rounded. A column that is split over t sends 4 bytes."""

    def of(w, array, columns):
        largest = shardops.pmax(f"{array.spec} -> {columns}", jnp.abs(w.astype(jnp.float32)))
        scale = jnp.maximum(largest, 1e-30) / 127
        axes = [axis for axis, dim in enumerate(array.spec.dims) if str(dim) not in columns.split()]
        return Quantized(jnp.round(w.astype(jnp.float32) / jnp.expand_dims(scale, axes)).astype(jnp.int8), scale)

    found = {name: (getattr(layer, name), array) for name, array in vars(type_).items() if array is not None}
    return replace(
        layer,
        **{name: of(*each, columns) for name, each in found.items() if (columns := columns_of(name, each[1]))},
    )


class Split:
    """A family whose layers' weights stay divided over w: each is gathered when its turn comes."""

    def __init__(self, family: Any):
        self.family = family

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def layer(self, model: Any, x: Any, w: Any, *others: Any) -> Any:
        return self.family.layer(model, x, self.family.gather_layer(w), *others)


@pytree_dataclass
class Rows:
    """Where each row is, and how its tokens are drawn."""

    token: u32['B/b']  # the last one, which is not in the cache yet
    drawn: i32['B/b']  # tokens that were drawn
    left: i32['B/b']  # that may still be; 0: the row has ended
    seen: bool_['B/b V/t']  # the tokens that are in the row
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
    """Over the slots that are filled and, causally, the new tokens; a bias is added to the logits of both."""
    if jax.default_backend() == 'cpu' and not is_planned:
        q, old_k, old_v, k, v = [each.astype(jnp.float32) for each in (q, old_k, old_v, k, v)]
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


def write(old, new, length):
    """One device's cache, `layers B K S D`, with the keys or values of new tokens, `layers B L K D`, from each row's
    length on."""
    place = functools.partial(lax.dynamic_update_slice_in_dim, axis=2)
    return jax.vmap(place, (1, 1, 0), 1)(old, jnp.swapaxes(new, 2, 3), length)


# == Drawing from a split vocabulary ===================================================================================
def noise(key, number, ids):
    """A Gumbel variable for each row and token: a function of the row's key, the draw's number and the token's id."""

    def one(key, number, id):
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), number), id))

    return jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))(key, number, ids)


@typed
def bound(logits: f32['B/b V/t'], weight: f32['B/b V/t'], enough: f32['B/b']) -> f32['B/b']:
    """The largest number such that the logits at or above it weigh enough, within 100 of the largest, by bisection: 32
    sums over t, 4 bytes a row each."""
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
    """The devices among which rows are divided."""
    return math.prod(current_mesh().shape[axis] for axis in expanded("b"))


# Where tokens are drawn a row lies on one device: c is 1, and these send nothing.
@typed
def whole(x: act['B/b L/c Q K/t D']) -> act['B/b L Q K/t D']:
    return shardops.all_gather('B/b L/c Q K/t D -> B/b L Q K/t D', x)


@typed
def part(x: act['B/b L Q K/t D']) -> act['B/b L/c Q K/t D']:
    return shardops.slice('B/b L Q K/t D -> B/b L/c Q K/t D', x)


# == Programs =========================================================================================================
@typed
def empty(model, *, count: int, slots: int, read: int | None = None) -> Cache:
    """A cache in which nothing is; `read`: with room for so many tokens that an encoder reads."""
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
    """The encoder reads the first `count` tokens of the new rows; what the decoder's layers make of it is kept."""
    segment = (jnp.arange(tokens.shape[1])[None] < count[:, None]).astype(jnp.int32)
    memory = family.memory(weights, family.encode(model, weights, tokens, segment))
    memory = jnp.where(is_new[None, None, :, None, None, None], memory, cache.memory)
    return replace(cache, memory=memory, read=jnp.where(is_new, count, cache.read))


@typed
def extend(
    family, model, ends, stack, cache: Cache, tokens: u32['B/b L'], count: i32['B/b']
) -> tuple[Cache, act['B/b L/c M']]:
    """Reads the first `count` of each row's tokens into the cache; returns the hidden states of all.

    Args:
      family: a module of models/.
      ends, stack: its `Ends` and its stacked `Gathered`.
    """
    mask = family.mask(model)
    position = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    own = ALONE.part(position)
    x, bias = family.embed(model, ends, ALONE.part(tokens), own, 'M'), None
    if cache.memory is not None:  # of a family whose layers know distances, and attend to what an encoder wrote
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
        x, kept, _ = family.layer(model, x, w, attend, own if memory is None else cross, 'M')
        return x, kept

    x, (k, v) = lax.scan(layer, x, (stack, cache.k, cache.v, cache.memory, mask.by_layer()))
    into = functools.partial(shardops.local, 'layers B/b K/t S D, layers B/b L K/t D, B/b -> layers B/b K/t S D', write)
    k, v = into(cache.k, k, cache.length), into(cache.v, v, cache.length)
    return replace(cache, k=k, v=v, length=cache.length + count), x


@typed
def extend_some(
    family, model, ends, stack, cache: Cache, tokens: u32['N/b L'], count: i32['N/b'], place: i32['N/b']
) -> Cache:
    """`extend` of some of each device's rows, by their different places there, of a family that has no encoder."""

    def take(spec, old, axis):
        def of_device(old, place):
            return jnp.take(old, place, axis=axis)

        return shardops.local(f'{spec}, N/b -> {spec.replace("B", "N")}', of_device, old, place)

    def put(spec, old, new, axis):
        def of_device(old, new, place):
            return old.at[:, place].set(new) if axis else old.at[place].set(new)

        return shardops.local(f'{spec}, {spec.replace("B", "N")}, N/b -> {spec}', of_device, old, new, place)

    kv = 'layers B/b K/t S D'
    some = Cache(take(kv, cache.k, 1), take(kv, cache.v, 1), take('B/b', cache.length, 0))
    some, _ = extend(family, model, ends, stack, some, tokens, count)
    length = put('B/b', cache.length, some.length, 0)
    return Cache(put(kv, cache.k, some.k, 1), put(kv, cache.v, some.v, 1), length)


@typed
def logits_after(family, model, ends, x: act['B/b L/c M']) -> f32['B/b V/t']:
    """Of each row's first token."""
    logits = layers.logits_of(ends.unembed, family.final(model, ends, x, 'M'), family.mask(model).logits_cap)
    return shardops.all_gather('B/b L/c V/t -> B/b L V/t', logits)[:, 0]


@typed
def step(
    family, model, ends, stack, cache: Cache, rows: Rows, ids: i32['V/t'], count: i32['B/b'], is_drawn: bool,
    is_filtered: bool,
) -> tuple[Cache, u32['B/b'], f32['B/b']]:  # fmt: skip
    """Reads the last token of the rows whose count is 1; a next token for each, and its log probability."""
    cache, x = extend(family, model, ends, stack, cache, rows.token[:, None], count)
    return cache, *choose(logits_after(family, model, ends, x), ids, rows, is_drawn, is_filtered)


@typed
def decode(
    family, model, ends, stack, cache: Cache, rows: Rows, ids: i32['V/t'], stops: u32['ends'], *,
    is_drawn: bool, is_filtered: bool,
) -> tuple[Cache, Rows, u32['B/b N'], f32['B/b N']]:  # fmt: skip
    """Draws BURST tokens for each row, fewer when all have ended; with their log probabilities."""

    def goes_on(carry):
        number, _, rows, _, _ = carry
        return (number < BURST) & shardops.any('B/b -> ', rows.left > 0)

    def one(carry):
        number, cache, rows, tokens, log_probs = carry
        count = (rows.left > 0).astype(jnp.int32)
        cache, token, log_prob = step(family, model, ends, stack, cache, rows, ids, count, is_drawn, is_filtered)
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
    return cache, rows, tokens, log_probs


@typed
def candidates(
    family, model, ends, stack, cache: Cache, token: u32['B/b'], parent: i32['B/b'], ids: i32['V/t'], *, N: int
) -> tuple[Cache, f32['B/b N'], i32['B/b N']]:
    """The rows' caches are replaced by those of their parents, on the same device; then the N likeliest tokens
    after `token`, and their log probabilities."""

    def of_parent(old, parent):
        return jnp.take(old, parent, axis=1)

    k, v = [
        shardops.local('layers B/b K/t S D, B/b -> layers B/b K/t S D', of_parent, each, parent)
        for each in (cache.k, cache.v)
    ]
    cache = replace(cache, k=k, v=v)
    cache, x = extend(family, model, ends, stack, cache, token[:, None], jnp.ones_like(cache.length))
    values = logits_after(family, model, ends, x)
    values = values - log_normalizer(values)[:, None]

    def largest(values, ids):
        top, place = lax.top_k(values, N)
        return top[:, None], jnp.take(ids, place)[:, None]

    # The likeliest of each device of t, of which it has a row; gathered, 8N bytes a row and device.
    some, names = shardops.local('B/b V/t, V/t -> B/b t/t N, B/b t/t N', largest, values, ids, N=N)
    some, names = [shardops.all_gather('B/b t/t N -> B/b t N', each) for each in (some, names)]

    def of_all(values, names):
        top, place = lax.top_k(values.reshape(len(values), -1), N)
        return top, jnp.take_along_axis(names.reshape(len(names), -1), place, axis=1)

    return cache, *shardops.local('B/b t N, B/b t N -> B/b N, B/b N', of_all, some, names)


@typed
def admit(cache: Cache, rows: Rows, new: Rows, is_new: bool_['B/b']) -> tuple[Cache, Rows]:
    """New rows in the place of others, of which nothing is read any more."""

    def one(new, old):
        return jnp.where(is_new.reshape(is_new.shape + (1,) * (new.ndim - 1)), new, old)

    return replace(cache, length=jnp.where(is_new, 0, cache.length)), jax.tree.map(one, new, rows)


def shapes_of(type_: Any, **sizes: int) -> Any:
    """The global shapes of a tree of this type, by the letters of its dims."""

    def shape(array):
        dims = (sizes[dim.name] if dim.name in sizes else int(dim.name) for dim in array.spec.dims)
        return jax.ShapeDtypeStruct(tuple(dims), array.element.dtype)

    return map_type(shape, type_)


def traced_step(programs: 'Programs', model: Any, weights: Any, count: int, slots: int) -> jax.stages.Traced:
    """A step of `count` rows in a cache of so many slots, none of which has filters, on the current mesh, for the
    ledger.

    Args:
      weights: the shapes of the model's.
    """
    sizes = {} if programs.stack == "transformer" else {"read": slots}
    held = programs.Held(jax.eval_shape(programs.mapped("gather"), weights))
    cache = jax.eval_shape(programs.mapped("empty", count=count, slots=slots, **sizes))
    rows, ids, counts = shapes_of(tuple[Rows, i32['V/t'], i32['B/b']], B=count, V=model.vocab)
    program = programs.mapped("step", is_drawn=True, is_filtered=False)

    def step(held, *others):
        ends, stack = held.weights
        return program(programs.Held((with_unembed(ends), stack)), *others)

    ends, stack = held.weights
    held = programs.Held((replace(ends, unembed=None) if is_tied(weights) else ends, stack))
    return jax.jit(step, donate_argnums=1).trace(held, cache, rows, ids, counts)


def is_tied(weights: Any) -> bool:
    """Whether one table is at both ends."""
    return getattr(weights, "unembed", None) is None


def with_unembed(ends: Any) -> Any:
    """With the embedding as the unembedding, where there is none."""
    return replace(ends, unembed=ends.embed) if ends.unembed is None else ends


class Programs:
    """The functions above for one model, with the types of its weights.

    Args:
      weights: the shapes of the model's.
      kept: how the layers' weights are: gathered over w; 'int8', gathered, as `quantized` makes them; or 'split', as
        `Split`.
    """

    def __init__(self, family: Any, model: Any, weights: Any, kept: str | None = None):
        self.stack = name = "decoder" if family.KIND == "both" else "transformer"
        family = Split(family) if kept == "split" else family
        Ends, Layer = family.Ends, narrowed(family.Gathered, getattr(weights, name))
        Layers = Array['layers', quantized_type(Layer) if kept == "int8" else Layer]
        if kept == "split":
            Layers = narrowed(Array['layers', family.Layer], getattr(weights, name))
        Weights, of_encoder = narrowed(family.Weights, weights), (0, 0) if name == "decoder" else ()
        KeysValues = narrowed(Cache, Cache(0, 0, 0, *of_encoder))

        @typed
        def gather(weights: Weights) -> tuple[Ends, Layers]:
            def gather_layer(_, w):
                if kept == "split":
                    return None, w
                gathered = family.gather_layer(w)
                return None, quantized(gathered, Layer) if kept == "int8" else gathered

            return family.gather_ends(weights), lax.scan(gather_layer, None, getattr(weights, name))[1]

        @typed
        def nothing(**sizes) -> KeysValues:
            return empty(model, **sizes)

        @typed
        def read_source(
            weights: Weights, cache: KeysValues, tokens: u32['B/b R'], count: i32['B/b'], is_new: bool_['B/b']
        ) -> KeysValues:
            return encode(family, model, weights, cache, tokens, count, is_new)

        @typed
        def new_rows(cache: KeysValues, rows: Rows, new: Rows, is_new: bool_['B/b']) -> tuple[KeysValues, Rows]:
            return admit(cache, rows, new, is_new)

        @typed
        def read(ends: Ends, stack: Layers, cache: KeysValues, tokens: u32['B/b L'], count: i32['B/b']) -> KeysValues:
            return extend(family, model, ends, stack, cache, tokens, count)[0]

        @typed
        def read_some(
            ends: Ends, stack: Layers, cache: KeysValues, tokens: u32['N/b L'], count: i32['N/b'], place: i32['N/b']
        ) -> KeysValues:
            return extend_some(family, model, ends, stack, cache, tokens, count, place)

        @pytree_dataclass
        class Held:  # by this name the ledger knows weights
            weights: tuple[Ends, Layers]

        @typed
        def one(
            held: Held, cache: KeysValues, rows: Rows, ids: i32['V/t'], count: i32['B/b'], **settings
        ) -> tuple[KeysValues, u32['B/b'], f32['B/b']]:
            return step(family, model, *held.weights, cache, rows, ids, count, **settings)

        @typed
        def draw(
            ends: Ends, stack: Layers, cache: KeysValues, rows: Rows, ids: i32['V/t'], stops: u32['ends'], **settings
        ) -> tuple[KeysValues, Rows, u32['B/b C'], f32['B/b C']]:
            return decode(family, model, ends, stack, cache, rows, ids, stops, **settings)

        @typed
        def search(
            ends: Ends, stack: Layers, cache: KeysValues, token: u32['B/b'], parent: i32['B/b'], ids: i32['V/t'], *,
            N: int,
        ) -> tuple[KeysValues, f32['B/b C'], i32['B/b C']]:  # fmt: skip
            return candidates(family, model, ends, stack, cache, token, parent, ids, N=N)

        self._functions = {
            "gather": gather, "empty": nothing, "encode": read_source, "admit": new_rows, "read": read,
            "read_some": read_some, "step": one, "decode": draw, "search": search,
        }  # fmt: skip
        self.Held = Held
        self.compiled = functools.cache(self._compiled)

    def mapped(self, which: str, **settings: Any) -> typed_shard_map:
        """A program over the mesh; those of other settings are others."""
        return typed_shard_map(functools.partial(self._functions[which], **settings))

    def _compiled(self, which: str, **settings: Any) -> Any:
        """The same, compiled; a cache is given up, and so are rows."""
        given_up = {"encode": 1, "admit": (0, 1), "step": 1, "decode": (2, 3), "read": 2, "read_some": 2, "search": 2}
        return jax.jit(self.mapped(which, **settings), donate_argnums=given_up.get(which, ()))


class Generator:
    """Draws tokens after prompts.

    Args:
      ends: tokens that end a text.
      start: of a family with an encoder, which reads the prompt: the token that the decoder begins with.
      kept: as of `Programs`.
    """

    def __init__(
        self, family: Any, model: Any, weights: Any, ends: Sequence[int] = (), start: int | None = None,
        kept: str | None = None,
    ):  # fmt: skip
        self.programs, self.vocab = Programs(family, model, weights, kept), model.vocab
        self.start = start
        self.take(weights)
        self.ids = jax.device_put(np.arange(self.vocab, dtype=np.int32), make_shardings(i32['V/t']))
        # A program needs one to compare with; a vocabulary has no such token.
        self.ends = np.asarray(list(ends) or [2**32 - 1], np.uint32)

    def take(self, weights: Any) -> None:
        """Puts other weights in the place of its own; None: it holds none until then."""
        self.of_encoder, self.weights = None if self.start is None else weights, None
        if weights is not None:
            ends, stack = self.programs.compiled("gather")(weights)
            if is_tied(weights):  # of one table jit makes two
                ends = with_unembed(replace(ends, unembed=None))
            self.weights = ends, stack

    def begun(self, prompt: Sequence[int]) -> Sequence[int]:
        """What stands before the first token that is drawn."""
        return prompt if self.start is None else [self.start]

    def draw(self, prompts: Sequence[Sequence[int]], drawings: Sequence[Drawing]) -> Iterator[list[Drawn]]:
        """Yields what is new of each row, until all have ended: tokens and their log probabilities."""
        count = -(-len(prompts) // devices_of_rows()) * devices_of_rows()
        slots = Slots(self, count, max(map(len, prompts)), max(each.tokens for each in drawings))
        slots.admit(dict(enumerate(zip(prompts, drawings))))
        while slots.left.any():
            yield slots.advance()[: len(prompts)]

    def search(self, prompts: Sequence[Sequence[int]], tokens: int, beams: int, length_penalty: float) -> list[Drawn]:
        """The best text after each prompt that beam search finds, as transformers does."""
        found = []
        for start in range(0, len(prompts), devices_of_rows()):
            some = list(prompts[start : start + devices_of_rows()])
            found += self._search([*some, *[some[0]] * (devices_of_rows() - len(some))], tokens, beams, length_penalty)[
                : len(some)
            ]
        return found

    def _search(self, prompts: Sequence[Sequence[int]], tokens: int, beams: int, length_penalty: float) -> list[Drawn]:
        """One prompt for each device along b, whose beams are its rows."""
        texts = [Beams(beams, tokens, length_penalty, self.ends) for _ in prompts]
        slots = Slots(self, len(prompts) * beams, max(map(len, prompts)), tokens)
        rows = [(prompt, Drawing(tokens=tokens)) for prompt in prompts for _ in range(beams)]
        slots.admit(dict(enumerate(rows)))
        cache = slots.cache
        search = self.programs.compiled(
            "search", N=min((1 + len(self.ends)) * beams, self.vocab // current_mesh().shape['t'])
        )
        token = np.repeat([self.begun(prompt)[-1] for prompt in prompts], beams).astype(np.uint32)
        parent = np.tile(np.arange(beams, dtype=np.int32), len(prompts))
        while not all(each.is_over for each in texts):
            cache, values, ids = search(*self.weights, cache, token, parent, self.ids)
            by_text = [np.asarray(each).reshape(len(prompts), beams, -1) for each in (values, ids)]
            moves = [each.advance(*of_text) for each, *of_text in zip(texts, *by_text)]
            parent, token = (np.concatenate(each) for each in zip(*moves))
        return [each.best() for each in texts]


def require_room(cache: Cache) -> None:
    """Raises RunError where a cache of these shapes is larger than the memory, which the devices of a CPU share."""
    size = sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(cache))
    of_device = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    has = of_device * current_mesh().size if of_device else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > has:
        rows, slots = cache.k.shape[1], cache.k.shape[3]
        text = f"{rows} rows of {slots} tokens take {size / 1e9:,.0f} GB, and there are {has / 1e9:,.0f}"
        raise RunError(f"{text}: lower rows, or tokens (in a server length)")


class Slots:
    """Rows of one cache, into which texts come and from which they go while others are drawn.

    Args:
      count: of the rows, a multiple of the devices along b.
      prompt, tokens: the longest prompt, and the most tokens after it.
    """

    def __init__(self, generator: Generator, count: int, prompt: int, tokens: int):
        self.generator, self.left = generator, np.zeros(count, np.int32)
        sizes = {} if generator.start is None else {"read": -(-prompt // SLOTS) * SLOTS}
        prompt = prompt if generator.start is None else 1
        # A chunk is written as a whole, although a prompt may end in it.
        self.chunk = min(CHUNK, max(1 << max(prompt - 2, 0).bit_length(), SMALLEST_CHUNK))
        room = -(-(prompt + max(tokens, self.chunk)) // SLOTS) * SLOTS
        require_room(jax.eval_shape(generator.programs.mapped("empty", count=count, slots=room, **sizes)))
        self.cache = generator.programs.compiled("empty", count=count, slots=room, **sizes)()
        self.drawings = [Drawing(tokens=1, temperature=0.0)] * count
        self.rows = self._rows({})

    def admit(self, texts: Mapping[int, tuple[Sequence[int], Drawing]]) -> None:
        """Puts a prompt into each of these rows, in the place of what was there."""
        is_new = jax.device_put(np.isin(np.arange(len(self.left)), list(texts)), make_shardings(bool_['B/b']))
        if self.generator.start is not None:
            self._encode({row: prompt for row, (prompt, _) in texts.items()}, is_new)
        texts = {row: (self.generator.begun(prompt), drawing) for row, (prompt, drawing) in texts.items()}
        self.cache, self.rows = self.generator.programs.compiled("admit")(
            self.cache, self.rows, self._rows(texts), is_new
        )
        for row, (_, drawing) in texts.items():
            self.drawings[row], self.left[row] = drawing, drawing.tokens
        rows, places = self._read_with(texts)
        prompts: list[Sequence[int]] = [texts[n][0] if n in texts else [0] for n in rows]
        lengths, start = np.array([len(prompt) - 1 for prompt in prompts]), 0
        read = self.generator.programs.compiled("read_some" if places else "read")
        while (left := int(lengths.max()) - start) > 0:
            size = min(self.chunk, max(1 << (left - 1).bit_length(), SMALLEST_CHUNK))
            tokens = np.zeros((len(prompts), size), np.uint32)
            counts = np.clip(lengths - start, 0, size).astype(np.int32)
            for row, prompt, count in zip(tokens, prompts, counts):
                row[:count] = prompt[start : start + count]
            self.cache = read(*self.generator.weights, self.cache, tokens, counts, *places)
            start += size

    def _read_with(self, new: Collection[int]) -> tuple[Sequence[int], list[np.ndarray]]:
        """The rows that are read together with these, as many on each device, a power of two: their numbers, and their
        places on their devices. All rows have none."""
        of_device = len(self.left) // devices_of_rows()
        by_device = np.zeros((devices_of_rows(), of_device), bool)
        by_device.reshape(-1)[list(new)] = True
        count = 1 << (max(int(by_device.sum(axis=1).max()), 1) - 1).bit_length()
        if count >= of_device:
            return range(len(self.left)), []
        places = np.argsort(~by_device, axis=1, kind="stable")[:, :count]
        rows = places + of_device * np.arange(len(places))[:, None]
        return rows.reshape(-1).tolist(), [places.reshape(-1).astype(np.int32)]

    def _encode(self, prompts: Mapping[int, Sequence[int]], is_new: jax.Array) -> None:
        """Lets the encoder read these rows' prompts."""
        tokens = np.zeros((len(self.left), self.cache.memory.shape[3]), np.uint32)
        counts = np.zeros(len(self.left), np.int32)
        for row, prompt in prompts.items():
            tokens[row, : len(prompt)], counts[row] = prompt, len(prompt)
        encode = self.generator.programs.compiled("encode")
        self.cache = encode(self.generator.of_encoder, self.cache, tokens, counts, is_new)

    def drop(self, rows: Collection[int]) -> None:
        """Ends these rows."""
        left = np.where(np.isin(np.arange(len(self.left)), list(rows)), 0, self.left).astype(np.int32)
        self.left, self.rows = left, replace(self.rows, left=jax.device_put(left, make_shardings(i32['B/b'])))

    def advance(self) -> list[Drawn]:
        """Up to BURST tokens more of each row that has not ended."""
        going_on = [each for each, left in zip(self.drawings, self.left) if left]
        decode = self.generator.programs.compiled(
            "decode",
            is_drawn=any(each.temperature > 0 for each in going_on),
            is_filtered=any(each.top_k or each.top_p < 1 or each.min_p for each in going_on),
        )
        generator, before = self.generator, self.left
        self.cache, self.rows, tokens, log_probs = decode(
            *generator.weights, self.cache, self.rows, generator.ids, generator.ends
        )
        self.left = np.array(self.rows.left)
        drawn = zip(before - self.left, before, self.left, np.asarray(tokens), np.asarray(log_probs))
        return [self._new(*each) for each in drawn]

    def _new(self, spent: int, before: int, left: int, tokens: np.ndarray, log_probs: np.ndarray) -> Drawn:
        """What a row drew of a burst: all that it spent, unless an end came before."""
        ended = np.flatnonzero(np.isin(tokens[:before], self.generator.ends)) if before and not left else []
        count = ended[0] + 1 if len(ended) else spent
        return Drawn(tokens[:count].tolist(), log_probs[:count].tolist())

    def _rows(self, texts: Mapping[int, tuple[Sequence[int], Drawing]]) -> Rows:
        count = len(self.left)
        given = [texts.get(n, ([0], Drawing(tokens=1, temperature=0.0))) for n in range(count)]
        seen = np.zeros((count, self.generator.vocab), bool)
        for row, (prompt, _) in zip(seen, given):
            row[np.asarray(prompt)] = True
        rows = Rows(
            token=np.array([prompt[-1] for prompt, _ in given], np.uint32),
            drawn=np.zeros(count, np.int32),
            left=np.array([drawing.tokens if n in texts else 0 for n, (_, drawing) in enumerate(given)], np.int32),
            seen=seen,
            key=np.stack([np.asarray(jax.random.key_data(jax.random.key(drawing.seed))) for _, drawing in given]),
            **{name: np.array([getattr(drawing, name) for _, drawing in given], np.float32) for name in FILTERS},
        )
        return jax.device_put(rows, make_shardings(Rows))


class Beams:
    """The running and the finished texts of one prompt (as `_beam_search` of transformers 5, early_stopping=False)."""

    def __init__(self, beams: int, tokens: int, length_penalty: float, ends: np.ndarray):
        self.beams, self.most, self.length_penalty, self.ends = beams, tokens, length_penalty, ends
        self.running = [Drawn([], [])] + [Drawn([], [-1e9])] * (beams - 1)  # so that the first beam alone goes on
        self.finished: list[tuple[float, Drawn]] = []
        self.is_over = False

    def advance(self, values: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each beam the likeliest tokens; returns each next beam's parent and its token."""
        if self.is_over:
            return np.arange(self.beams, dtype=np.int32), np.zeros(self.beams, np.uint32)
        scores = values + np.array([[sum(each.log_probs)] for each in self.running], np.float32)
        order = np.argsort(-scores, axis=None, kind="stable")[: values.shape[1]]
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
        self.finished = sorted(self.finished, key=lambda each: -each[0])[: self.beams]
        going_on = going_on[: self.beams]
        if is_last or not going_on:
            self.is_over = True
            return np.arange(self.beams, dtype=np.int32), np.zeros(self.beams, np.uint32)
        self.running = [text for _, text in going_on]
        attainable = sum(self.running[0].log_probs) / length**self.length_penalty
        self.is_over = len(self.finished) == self.beams and attainable <= self.finished[-1][0]
        return np.array([parent for parent, _ in going_on], np.int32), np.array(
            [t.tokens[-1] for _, t in going_on], np.uint32
        )

    def best(self) -> Drawn:
        return self.finished[0][1]
