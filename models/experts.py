"""Mixtures of experts, once for all families and meshes: experts are split over e, their matrices over t.

    y, routing = mixture(model, x, router, (w_gate, w_up, w_down), M)         # act['B/b L/c M/t']

Either no token is dropped, or each expert has slots for some tokens of a row and computes an array of fixed size.
Legend: E experts, X of them chosen by a token, C an expert's slots in a row, H d_ff of one expert.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Float32, Int8, Int32

from jax_extra import save_for_backward
from models.layers import act, reduce_residual, with_dropout
from shardlib import shardops
from shardlib.products import Adapted, Quantized, product
from shardlib.shardtypes import f32, i32, pytree_dataclass
from shardlib.typed import typed


@pytree_dataclass
class Routing:
    """A layer's router losses and loads on a microbatch."""

    balance: f32['+b +c']  # 1 where all experts get as many tokens
    z: f32['+b +c']  # the mean square of log sum exp of a token's logits
    load: f32['E']  # each expert's share of the tokens' choices; they add up to 1
    dropped: f32['+b +c']  # the share of choices without a slot


PARTS = 4  # blocks of an average expert's group

Choices = tuple[act['B/b L/c X'], i32['B/b L/c X']]  # each token's experts: their weights and numbers
Experts = tuple[act['E/e M H/t'], act['E/e M H/t'], act['E/e M H/t']]  # w_gate, w_up and w_down of each

# One device's part: what its tokens have and chose, and the matrices of the experts that it holds.
Tokens, OfChoices, Numbers = Float[jax.Array, 'B L M'], Float[jax.Array, 'B L X'], Int32[jax.Array, 'B L X']
Matrix = Float[jax.Array, 'held M H'] | Adapted | Quantized
Chunk = tuple[Int32[jax.Array, 'blocks'], Int32[jax.Array, 'blocks rows'], Bool[jax.Array, 'blocks rows']]
Chunks = tuple[
    Int32[jax.Array, 'chunks blocks'], Int32[jax.Array, 'chunks blocks rows'], Bool[jax.Array, 'chunks blocks rows']
]


@typed
def route(model, x: act['B/b L/c M'], router: f32['M E']) -> tuple[Choices, Routing]:
    """Chooses each token's experts: their weights, their numbers, and the losses of the choice. Sends E numbers of
    float32, all-reduced over r, d, c and e.
    """
    E = router.shape[1]
    logits = shardops.einsum_unreduced('B/b L/c M, M E -> B/b L/c E', x.astype(jnp.float32), router)
    probs = jax.nn.softmax(logits)
    weight, choice = lax.top_k(probs, model.experts_per_token)
    if model.weights_add_to_one:
        weight = weight / shardops.sum_unreduced('B/b L/c X -> B/b L/c', weight)[..., None]

    tokens = x.shape[0] * x.shape[1] * shardops.axis_size('b') * shardops.axis_size('c')
    took = jax.nn.one_hot(choice, E, dtype=jnp.float32)
    load = shardops.sum_unreduced('B/b L/c X E -> E +b +c', took) / (tokens * model.experts_per_token)
    load = shardops.psum('E +b +c -> E', load)
    load = save_for_backward(load)  # 4E bytes, spares the sum over all devices
    # Load balance (Fedus et al. 2021, equations 4 to 6): an expert's share and mean probability, of all tokens.
    mean = shardops.sum_unreduced('B/b L/c E -> E +b +c', probs) / tokens
    balance = shardops.sum_unreduced('E +b +c -> +b +c', mean * load) * E
    square = jax.nn.logsumexp(logits, axis=-1) ** 2  # Zoph et al. 2022, equation 5
    z = shardops.sum_unreduced('B/b L/c -> +b +c', square) / tokens
    routing = Routing(balance=balance, z=z, load=load, dropped=shardops.zeros('+b +c', f32))
    return (weight.astype(act.dtype), choice), routing


def slots(choice: Numbers, E: int, C: int, parts: int) -> tuple[Numbers, Float32[jax.Array, 'B L X']]:
    """Part by part: the slot of each (token, choice), out of E·C, or the one past the last if its expert has none left;
    and whether it has none.

    Each of the row's parts has C / parts slots of an expert. Its earlier tokens come first, so that no token is dropped
    for one that follows it.
    """
    pairs, per_part = choice.reshape(choice.shape[0], parts, -1), C // parts
    one_hot = jax.nn.one_hot(pairs, E, dtype=jnp.int32)
    place = jnp.sum(jnp.cumsum(one_hot, axis=2) * one_hot, axis=-1) - 1
    slot = pairs * C + jnp.arange(parts)[None, :, None] * per_part + place
    slot, lost = jnp.where(place < per_part, slot, E * C), place >= per_part
    return slot.reshape(choice.shape), lost.astype(jnp.float32).reshape(choice.shape)


def dispatch(x: Tokens, slot: Numbers, E: int, C: int) -> Float[jax.Array, '{E} B {C} M']:
    """Part by part: the tokens in their slots; zero in slots that are free."""
    rows, top, M = x.shape[0], slot.shape[-1], x.shape[-1]
    taken = jnp.zeros((rows, E * C + 1, M), x.dtype)
    fill = jax.vmap(lambda taken, slot, tokens: taken.at[slot].set(tokens))
    taken = fill(taken, slot.reshape(rows, -1), jnp.repeat(x, top, axis=1))
    return jnp.moveaxis(taken[:, :-1].reshape(rows, E, C, M), 1, 0)


def combine(y: Float[jax.Array, 'E B C M'], weight: OfChoices, slot: Numbers) -> Tokens:
    """Part by part: the slots' results, weighted, back at their tokens."""
    y = jnp.moveaxis(y, 0, 1).reshape(slot.shape[0], -1, y.shape[-1])
    y = jnp.pad(y, ((0, 0), (0, 1), (0, 0)))
    y = jnp.take_along_axis(y, slot.reshape(slot.shape[0], -1)[..., None], axis=1).reshape(*slot.shape, y.shape[-1])
    return jnp.sum(y * weight[..., None], axis=2)


@typed
def experts_with_capacity(
    model, x: act['B/b L/c M'], choices: Choices, experts: Experts
) -> tuple[act['B/b L/c M/t'], f32['+b +c']]:
    """The chosen experts' results, weighted; and the share of choices that were dropped (Lepikhin et al. 2020, 2.2).

    Each of a row's capacity_parts has as many slots of each expert, on every mesh: a device has whole parts, which are
    as many as divide the row. Sends all-to-all over e, of the tokens' M there, 2·capacity·X·M bytes a token, and of M/t
    back; as much backward.
    """
    (weight, choice), (w_gate, w_up, w_down) = choices, experts
    E, length, devices = model.experts, x.shape[1] * shardops.axis_size('c'), int(shardops.axis_size('c'))
    parts = math.gcd(model.capacity_parts, length)
    average = length // parts * model.experts_per_token / E
    C = parts * math.ceil(min(model.capacity * average, length // parts))
    slots_here = C // devices
    into = functools.partial(slots, E=E, C=slots_here, parts=parts // devices)
    slot, lost = shardops.local('B/b L/c X -> B/b L/c X, B/b L/c X', into, choice)
    into = functools.partial(dispatch, E=E, C=slots_here)
    sent = shardops.local('B/b L/c M, B/b L/c X -> E B/b C/c M', into, x, slot, E=E, C=C)
    there = shardops.all_to_all('E B/b C/c M -> E/e B/g C/c M', sent)
    there = save_for_backward(there)  # 2·capacity·XM bytes a token, spares sending it again
    gate = product('E/e B/g C/c M, E/e M H/t -> E/e B/g C/c H/t', there, w_gate)
    gate = save_for_backward(gate)  # 2·capacity·XH/t bytes a token, spares a product with w_gate
    up = product('E/e B/g C/c M, E/e M H/t -> E/e B/g C/c H/t', there, w_up)
    up = save_for_backward(up)  # 2·capacity·XH/t bytes a token, spares a product with w_up
    hidden = jax.nn.silu(gate) * up
    y = product('E/e B/g C/c H/t, E/e M H/t -> E/e B/g C/c M +t', hidden, w_down)
    y = shardops.psum_scatter('E/e B/g C/c M +t -> E/e B/g C/c M/t', y)
    back = shardops.all_to_all('E/e B/g C/c M/t -> E B/b C/c M/t', y)
    back = save_for_backward(back)  # 2·capacity·XM/t bytes a token, spares the product with w_down, and sending it
    types = 'E B/b C/c M/t, B/b L/c X, B/b L/c X -> B/b L/c M/t'
    y = shardops.local(types, combine, back, weight, slot)
    lost = shardops.sum_unreduced('B/b L/c X -> +b +c', lost)
    choices = x.shape[0] * length * model.experts_per_token * shardops.axis_size('b')
    return y, lost / choices


def blocks(expert: Int32[jax.Array, 'pairs'], count: int, E: int) -> Chunks:
    """Part by part: the (token, choice) pairs of each expert in blocks of as many rows, of which the last one is filled
    up; `PARTS` of them are an average group of pairs, so that at most 1 / PARTS more is multiplied.

    Args:
      expert: the number of each pair's expert, out of the `count` of E that the device has; `count` for all others.
    Returns:
      of each block its expert; of its rows the pair, and whether there is one.
    """
    pairs, chunks = expert.shape[0], E // count
    rows = -(-pairs // (PARTS * E))
    sizes = jnp.bincount(expert, length=count).astype(jnp.int32)
    of_each = -(-sizes // rows)
    most = (pairs + min(count, pairs) * (rows - 1)) // rows
    block = jnp.arange(-(-most // chunks) * chunks, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(jnp.cumsum(of_each), block, side="right"), count - 1)
    before = jnp.cumsum(of_each) - of_each
    row = (block - before[owner])[:, None] * rows + jnp.arange(rows, dtype=jnp.int32)[None]
    place = (jnp.cumsum(sizes) - sizes)[owner][:, None] + row
    pair, is_there = jnp.argsort(expert)[jnp.minimum(place, pairs - 1)], row < sizes[owner][:, None]
    return owner.reshape(chunks, -1), pair.reshape(chunks, -1, rows), is_there.reshape(chunks, -1, rows)


def products(
    x: Float[jax.Array, 'blocks rows i'], w: Matrix, owner: Int32[jax.Array, 'blocks'], dims: str, t: int
) -> Float[jax.Array, 'blocks rows o']:
    """Multiplies part by part: each block of rows by its expert's matrix.

    Args:
      dims: an einsum with a matrix a block; i is M and o is H, or the other way round.
      t: the number of devices that H is split over.
    """

    def product(
        x: Float[jax.Array, 'blocks rows i'], w: Float[jax.Array, 'held _ _'] | Int8[jax.Array, 'held _ _'], dims: str
    ) -> Float[jax.Array, 'blocks rows o']:
        alike = 1 if 'H' in dims else t  # devices whose products are alike
        with jax.named_scope(f'busy=1:{alike}'):  # for the ledger
            # The matrices are taken in float32, so that the gradients of an expert's blocks are added in float32.
            return jnp.einsum(dims, x, w.astype(jnp.float32)[owner].astype(x.dtype))

    if isinstance(w, Adapted):
        i, o = dims[2], dims[-1]
        low = product(product(x, w.a, f'nb{i}, n{i}r -> nbr'), w.b, f'nbr, nr{o} -> nb{o}')
        return products(x, w.base, owner, dims, t) + w.scale * low
    if isinstance(w, Quantized):
        return (product(x, w.values, dims).astype(jnp.float32) * w.scale[owner][:, None]).astype(x.dtype)
    return product(x, w, dims)


def multiplied(
    matrices: Callable[[Sequence[jax.Array]], tuple[Matrix, Matrix, Matrix]], E: int, t: int, x: Tokens,
    weight: OfChoices, choice: Numbers, held: Int32[jax.Array, 'held'], *parts: jax.Array,
) -> Tokens:  # fmt: skip
    """Part by part: the weighted results of the experts that a device holds, numbers `held` out of E, for each token
    of x.

    One batched product multiplies blocks of pairs, each with its expert's matrix. lax.ragged_dot would multiply each
    pair with all experts on CPUs and GPUs (jax 0.12; on an H200 it asked for 64 GB for matrices of 0.4).

    Args:
      matrices: makes w_gate, w_up and w_down of `parts`.
      t: as of `products`.
    """
    w_gate, w_up, w_down = matrices(parts)
    top, count = choice.shape[-1], held.shape[0]
    expert = choice.reshape(-1) - held[0]
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)
    tokens = x.reshape(-1, x.shape[-1])

    def add(y: Float[jax.Array, 'tokens M'], chunk: Chunk) -> Float[jax.Array, 'tokens M']:
        owner, pair, is_there = chunk
        there = tokens[pair // top]
        gate, up = [products(there, w, owner, 'nbM, nMH -> nbH', t) for w in (w_gate, w_up)]
        down = products(jax.nn.silu(gate) * up, w_down, owner, 'nbH, nMH -> nbM', t)
        down = jnp.where(is_there[..., None], down * weight.reshape(-1)[pair][..., None], 0)
        return y.at[pair // top].add(down)

    def add_if_any(y: Float[jax.Array, 'tokens M'], chunk: Chunk) -> tuple[Float[jax.Array, 'tokens M'], None]:
        return lax.cond(jnp.any(chunk[-1]), add, lambda y, _: y, y, chunk), None

    # A device may hold all pairs; on average it holds count / E of them, so the other chunks are skipped.
    chunks, y = blocks(expert, count, E), jnp.zeros_like(tokens)
    needed = f'busy={expert.size}:{chunks[-1].size}'  # for the ledger: rows that do not fill up a block
    with jax.named_scope(f'{needed}/taken={count}:{E}'):
        if E == count:
            y = add(y, jax.tree.map(lambda part: part[0], chunks))
        else:
            y, _ = lax.scan(add_if_any, y, chunks)
    return y.reshape(x.shape)


@typed
def experts_without_loss(model, x: act['B/b L/c M'], choices: Choices, experts: Experts) -> act['B/b L/c M +t']:
    """The chosen experts' results, weighted; no token is dropped. Each device has the tokens of all devices along e,
    2M bytes a token, and multiplies those of its experts; one reduce-scatter adds the results."""
    x = shardops.all_gather('B/b L/c M -> B/g L/c M', x)
    weight = shardops.all_gather('B/b L/c X -> B/g L/c X', choices[0])
    choice = shardops.all_gather('B/b L/c X -> B/g L/c X', choices[1])
    held = shardops.slice('E -> E/e', jnp.arange(model.experts, dtype=jnp.int32))
    types = 'B/g L/c M, B/g L/c X, B/g L/c X, E/e'
    for w, (summed, kept) in zip(experts, (('M', 'H/t'), ('M', 'H/t'), ('H/t', 'M'))):
        types += ', E/e M H/t'
        types += f', E/e {summed} N, E/e N {kept}' if isinstance(w, Adapted) else ''
        types += f', E/e {kept}' if isinstance(w, Quantized) else ''
    parts, structure = jax.tree.flatten(experts)
    matrices, t = functools.partial(jax.tree.unflatten, structure), int(shardops.axis_size('t'))
    multiply = functools.partial(multiplied, matrices, model.experts, t)
    y = shardops.local(f'{types} -> B/g L/c M +e +t', multiply, x, weight, choice, held, *parts)
    return shardops.psum_scatter('B/g L/c M +e +t -> B/b L/c M +t', y)


def mixture(model, x, router, experts: tuple, M: str):
    """The result of a layer's experts, laid out like the residual, and what its router did."""
    choices, routing = route(model, x, router)
    if model.capacity is None:
        return reduce_residual(experts_without_loss(model, x, choices, experts), M), routing
    y, dropped = experts_with_capacity(model, x, choices, experts)
    y = shardops.all_gather('B/b L/c M/t -> B/b L/c M', y) if M == 'M' else y
    return with_dropout(y, M), replace(routing, dropped=dropped)
