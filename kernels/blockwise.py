"""Causal attention within segments, a block of queries by a block of keys at a time: nothing of length² is in memory.

The softmax is put together over blocks of keys by rescaling the sums so far (Rabe and Staats 2021, section 2; Dao et
al. 2022, algorithm 1). The backward pass computes each block's probabilities again from the logits' log-sum-exp (Dao et
al. 2022, algorithm 4), which is all that is kept besides the result. Blocks of keys that are later than a block of
queries are not computed. It is plain JAX and runs everywhere.

Arrays of blocks: n blocks of a row, B rows, K key heads, R = Q · block queries, S = block keys, D.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Float32, Int32

from kernels import declared

Queries, Keys = Float[jax.Array, "B L Q K D"], Float[jax.Array, "B S K D"]
OfRows = Int32[jax.Array, "B L"]  # segments of whole rows
Position, KeyPosition = Int32[jax.Array, "L"], Int32[jax.Array | np.ndarray, "S"]
OfParts = tuple[Position, KeyPosition, Int32[jax.Array, "B L"], Int32[jax.Array, "B S"]]

# Positions of a block, at most; more where a row would have more than MOST blocks, since pairs go one after another.
# On two CPU cores a row of 1024 takes with 128, 256 and 512: 155, 186, 279 ms of CPU time forward and backward
# (8 heads of 64, bfloat16, jax 0.10.2, 2026-11-21).
BLOCK = 128
MOST = 64
ALL = slice(None)  # blocks


def forward(
    q: Queries, k: Keys, v: Keys, places: OfRows | OfParts, window=None, cap: float | None = None
) -> tuple[Float32[jax.Array, "B L Q K D"], Float32[jax.Array, "B L Q K"]]:
    """Returns o and the logits' log-sum-exp.

    A query without keys gets a log-sum-exp of about -1e30; ignore its o.

    Args:
      places: for whole rows their segments. For one device's part of rows in zigzag order (`dealt`), with the keys of
        all parts or of one: positions of queries and of keys, and their segments.
      window: positions that a query sees, its own included: an int or a scalar array. It masks; blocks that it hides
        are computed all the same.
      cap: logits are cap · tanh(logits / cap).
    """
    # Without the barrier JAX takes the masks of all pairs of blocks, which are the same for each layer, out of the loop
    # over layers and keeps them: length² bytes a head.
    q, places = lax.optimization_barrier((q, places))
    length, groups = q.shape[1], q.shape[2]
    blocks = _blocks_of(places, window)
    queries, keys, values = _split(q, blocks.rows), _split(k, blocks.columns), _split(v, blocks.columns)

    def logits_of(row, column):
        logits = _capped(_dot("Rd,Sd->RS", queries[row], keys[column]), cap)
        return jnp.where(blocks.allowed(row, column, groups), logits, -1e30)

    def add(sums, pair):
        row, column = pair
        largest, total, o = (x[row] for x in sums)
        logits = logits_of(row, column)
        larger = jnp.maximum(largest, jnp.max(logits, axis=-1))
        # Before the first key that is allowed the sums are of no key: it makes them zero.
        e, rescale = jnp.exp(logits - larger[..., None]), jnp.exp(largest - larger)
        total = total * rescale + jnp.sum(e, axis=-1)
        o = o * rescale[..., None] + _dot("RS,Sd->Rd", e.astype(v.dtype), values[column])
        return tuple(x.at[row].set(new) for x, new in zip(sums, (larger, total, o), strict=True)), None

    with blocks.share(length, k.shape[1]):
        if blocks.diagonal:
            logits = logits_of(ALL, ALL)
            largest = jnp.max(logits, axis=-1)
            e = jnp.exp(logits - largest[..., None])
            sums = largest, jnp.sum(e, axis=-1), _dot("RS,Sd->Rd", e.astype(v.dtype), values)
        else:
            zeros = jnp.zeros(queries.shape, jnp.float32)
            sums = zeros[..., 0] - 1e30, zeros[..., 0], zeros
        largest, total, o = _over_pairs(add, sums, blocks.pairs)
    total = jnp.maximum(total, 1e-30)  # it is 0 for a block of queries that come before all keys
    log_sum_exp = _join((largest + jnp.log(total))[..., None], groups, length)[..., 0]
    return _join(o / total[..., None], groups, length), log_sum_exp


def backward(
    q: Queries, k: Keys, v: Keys, places: OfRows | OfParts, o: Queries, log_sum_exp: Float32[jax.Array, "B L Q K"],
    gradient: Queries, window=None, cap: float | None = None,
) -> tuple[Float32[jax.Array, "B L Q K D"], Float32[jax.Array, "B S K D"], Float32[jax.Array, "B S K D"]]:  # fmt: skip
    """The gradients of q, k and v, from the o and log-sum-exp of all keys and the gradient of that o."""
    o, places = lax.optimization_barrier((o, places))  # for the reason given in `forward`
    length, groups = q.shape[1], q.shape[2]
    blocks = _blocks_of(places, window)
    queries, keys, values = _split(q, blocks.rows), _split(k, blocks.columns), _split(v, blocks.columns)
    gradients = _split(gradient, blocks.rows)
    by_row = jnp.sum(gradient.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)  # Σ_s p_s · dp_s of each query
    by_row, log_sum_exp = (_split(x[..., None], blocks.rows)[..., 0] for x in (by_row, log_sum_exp))

    def of_pair(row, column):
        q, k, v, do = queries[row], keys[column], values[column], gradients[row]
        with declared.recomputed():
            logits = _capped(_dot("Rd,Sd->RS", q, k), cap)
        allowed = blocks.allowed(row, column, groups)
        p = jnp.exp(jnp.where(allowed, logits, -1e30) - log_sum_exp[row][..., None])
        dv = _dot("RS,Rd->Sd", p.astype(v.dtype), do)
        dlogits = p * (_dot("Rd,Sd->RS", do, v) - by_row[row][..., None])
        dlogits = (dlogits if cap is None else dlogits * (1 - (logits / cap) ** 2)).astype(q.dtype)
        return _dot("RS,Sd->Rd", dlogits, k), _dot("RS,Rd->Sd", dlogits, q), dv

    def add(sums, pair):
        row, column = pair
        dq, dk, dv = of_pair(row, column)
        return (sums[0].at[row].add(dq), sums[1].at[column].add(dk), sums[2].at[column].add(dv)), None

    with blocks.share(length, k.shape[1]):
        if blocks.diagonal:
            sums = of_pair(ALL, ALL)
        else:
            sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries, keys, values))
        dq, dk, dv = _over_pairs(add, sums, blocks.pairs)
    return _join(dq, groups, length), *(_join(x, 1, k.shape[1])[:, :, 0] for x in (dk, dv))


def dealt(length: int, devices: int) -> np.ndarray:
    """The positions of a row in zigzag order: of twice as many chunks as devices each device has one from the front and
    one from the end, so that all have as many pairs of a query and an earlier key (Llama Team 2024, section 3.3.2)."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[: devices - 1 : -1]], axis=1).reshape(-1)


# -- Blocks ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Blocks:
    """How queries and keys are cut into blocks, and the pairs of blocks that are computed."""

    rows: int  # blocks of queries
    columns: int  # blocks of keys
    pairs: tuple[Any, Any]  # numbers of the blocks of queries, and of the blocks of keys
    position: Any  # 'rows block'
    key_position: Any  # 'columns block'
    segment: Any  # 'rows B block'; padding is a segment of its own, -1
    key_segment: Any  # 'columns B block'
    window: Any
    diagonal: bool  # pairs of a block with itself are computed first, all at once; `pairs` lists the others

    def allowed(self, row, column, groups: int):
        """bool 'B 1 R S' of a pair of blocks (diagonal: a dim in front): same segment, not later, within the window."""
        allowed = self.segment[row][..., :, None] == self.key_segment[column][..., None, :]
        if self.diagonal and row is not ALL and self.window is None:  # all keys are earlier
            return jnp.concatenate([allowed] * groups, axis=-2)[..., None, :, :]
        distance = self.position[row][..., :, None] - self.key_position[column][..., None, :]
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        return jnp.concatenate([allowed & seen[..., None, :, :]] * groups, axis=-2)[..., None, :, :]

    def share(self, length: int, key_length: int):
        """The share of the computed pairs that the model needs: half of all pairs of positions."""
        pairs = self.pairs[0].size + self.diagonal * self.rows
        run = pairs * self.position.shape[1] * self.key_position.shape[1]
        return declared.share(length * key_length, 2 * run)


def _blocks_of(places, window) -> Blocks:
    """Args: as of `forward`."""
    if not isinstance(places, tuple):
        count, block = _cut(places.shape[1])
        position = jnp.arange(count * block, dtype=jnp.int32).reshape(count, block)
        position, places = lax.optimization_barrier((position, places))
        segment, pairs = _split_segment(places, count), np.tril_indices(count, -1)
        pairs = tuple(jnp.asarray(numbers, jnp.int32) for numbers in pairs)
        return Blocks(count, count, pairs, position, position, segment, segment, window, diagonal=True)
    position, key_position, *segments = places
    part, length = len(position), len(key_position)
    # A chunk, half of a part, has whole blocks.
    in_chunk = min(range(1, part // 2 + 1), key=lambda n: ((part // 2) % n > 0, part // 2 > n * BLOCK, n))
    rows, columns = 2 * in_chunk, 2 * in_chunk * (length // part)
    position, key_position = position.reshape(rows, -1), key_position.reshape(columns, -1)
    # Each block of queries with each block of keys that is not later; where the keys are of another part, some pairs
    # more, which the positions mask: as many on every device and in every turn. A device's two chunks have together
    # 2 · devices + 1 chunks of keys in all, three in its own part, two in another.
    later = position[:, -1:] < key_position[None, :, 0]
    pairs = jnp.argsort(later.reshape(-1), stable=True)[: rows * (columns + 1) // 2].astype(jnp.int32)
    segment, key_segment = (_split_segment(of_tokens, count) for of_tokens, count in zip(segments, (rows, columns)))
    every = pairs // columns, pairs % columns
    return Blocks(rows, columns, every, position, key_position, segment, key_segment, window, diagonal=False)


def _cut(length: int) -> tuple[int, int]:
    """The fewest blocks of nearly equal size, and that size; padding is less than one position a block."""
    blocks = min(-(-length // BLOCK), MOST)
    return blocks, -(-length // blocks)


def _over_pairs(add, sums, pairs):
    return lax.scan(add, sums, pairs)[0] if len(pairs[0]) else sums


def _dot(formula: str, a, b):
    """A product of each row and key head; its sum stays float32."""
    left, right, out = formula.replace("->", ",").split(",")
    return jnp.einsum(f"...{left},...{right}->...{out}", a, b, preferred_element_type=jnp.float32)


def _capped(logits, cap):
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _pad(x, blocks: int):
    """'B L ...', with L a multiple of the number of blocks."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % blocks), *[(0, 0)] * (x.ndim - 2)], constant_values=-1)


def _split_segment(segment, blocks: int):
    """'B L' -> 'n B block'."""
    return _pad(segment, blocks).reshape(segment.shape[0], blocks, -1).swapaxes(0, 1)


def _split(x, blocks: int):
    """'B L Q K D' or 'B L K D' -> 'n B K R D', R = (Q block)."""
    x = _pad(x if x.ndim == 5 else x[:, :, None], blocks)
    batch, length, groups, heads, dim = x.shape
    x = x.reshape(batch, blocks, length // blocks, groups, heads, dim)
    return x.transpose(1, 0, 4, 3, 2, 5).reshape(blocks, batch, heads, -1, dim)


def _join(x, groups: int, length: int):
    """'n B K R D' -> 'B L Q K D'."""
    blocks, batch, heads, rows, dim = x.shape
    x = x.reshape(blocks, batch, heads, groups, rows // groups, dim).transpose(1, 0, 4, 3, 2, 5)
    return x.reshape(batch, -1, groups, heads, dim)[:, :length]
