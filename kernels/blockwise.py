"""Causal attention within segments, a block of queries by a block of keys at a time: nothing of length² is in memory.

The softmax is put together over blocks of keys by rescaling what was summed so far (Rabe and Staats 2021, section 2;
Dao et al. 2022, algorithm 1). The backward pass makes each block's probabilities again from the logits' log-sum-exp
(Dao et al. 2022, algorithm 4), the only thing that is kept besides the result. Blocks of keys that are later than a
block of queries are never computed. Plain JAX: it runs everywhere, and a row no longer than a block is one product.

Arrays of blocks: n blocks of a row, B rows, K key heads, R = Q · block queries, S = block keys, D.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels import declared

# Positions of a block, at most; more where a row would have more than MOST blocks, since pairs go one after another.
# On two CPU cores a row of 1024 takes with 128, 256 and 512: 155, 186, 279 ms of CPU time forward and backward
# (8 heads of 64, bfloat16, jax 0.10.2, 2026-11-21).
BLOCK = 128
MOST = 64


def forward(q, k, v, segment, window=None, cap=None):
    """Returns o, 'B L Q K D', and the logits' log-sum-exp in float32, 'B (K Q) L'.

    A window, an int or a scalar array, hides what lies further back; blocks that it hides are computed all the same.
    """
    # Without the barrier JAX takes the masks of all pairs of blocks, which are the same for each layer, out of the loop
    # over layers and keeps them: length² bytes a head.
    q, segment = lax.optimization_barrier((q, segment))
    length, groups = q.shape[1], q.shape[2]
    blocks, _ = _blocks(length)
    queries, keys, values = _split(q, blocks), _split(k, blocks), _split(v, blocks)
    segments = _split_segment(segment, blocks)
    with _share(length):
        # The blocks on the diagonal, all at once, and then each pair of blocks below it: no query is without a key.
        allowed = _allowed(segments, segments, groups, window)
        logits = jnp.where(allowed, _capped(_dot("Rd,Sd->RS", queries, keys), cap), -1e30)
        largest = jnp.max(logits, axis=-1)
        e = jnp.exp(logits - largest[..., None])
        sums = largest, jnp.sum(e, axis=-1), _dot("RS,Sd->Rd", e.astype(v.dtype), values)

        def add(sums, pair):
            row, column = pair
            largest, total, o = (x[row] for x in sums)
            logits = _capped(_dot("Rd,Sd->RS", queries[row], keys[column]), cap)
            allowed = _allowed(segments[row], segments[column], groups, window, row - column)
            logits = jnp.where(allowed, logits, -1e30)
            larger = jnp.maximum(largest, jnp.max(logits, axis=-1))
            e, rescale = jnp.exp(logits - larger[..., None]), jnp.exp(largest - larger)
            total = total * rescale + jnp.sum(e, axis=-1)
            o = o * rescale[..., None] + _dot("RS,Sd->Rd", e.astype(v.dtype), values[column])
            return tuple(x.at[row].set(new) for x, new in zip(sums, (larger, total, o), strict=True)), None

        largest, total, o = _over_pairs(add, sums, blocks)
    o = _join(o / total[..., None], groups, length).astype(q.dtype)
    return o, _join_rows(largest + jnp.log(total), groups, length)


def backward(q, k, v, segment, o, log_sum_exp, gradient, window=None, cap=None):
    """The gradients of q, k and v, from what `forward` returned and the gradient of its o."""
    o, segment = lax.optimization_barrier((o, segment))  # as in `forward`
    length, groups = q.shape[1], q.shape[2]
    blocks, _ = _blocks(length)
    queries, keys, values = _split(q, blocks), _split(k, blocks), _split(v, blocks)
    segments, gradients = _split_segment(segment, blocks), _split(gradient, blocks)
    by_row = jnp.sum(gradient.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)  # Σ_s p_s · dp_s of each query
    by_row, log_sum_exp = _split_rows(jnp.moveaxis(by_row, 1, 3), blocks), _unjoin_rows(log_sum_exp, groups, blocks)

    with _share(length):
        diagonal = _allowed(segments, segments, groups, window)
        sums = _of_pair(queries, keys, values, gradients, diagonal, log_sum_exp, by_row, cap)

        def add(sums, pair):
            row, column = pair
            allowed = _allowed(segments[row], segments[column], groups, window, row - column)
            dq, dk, dv = _of_pair(
                queries[row], keys[column], values[column], gradients[row], allowed, log_sum_exp[row], by_row[row], cap
            )
            return (sums[0].at[row].add(dq), sums[1].at[column].add(dk), sums[2].at[column].add(dv)), None

        dq, dk, dv = _over_pairs(add, sums, blocks)
    dk, dv = (_join(x, 1, length)[:, :, 0] for x in (dk, dv))
    return _join(dq, groups, length).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _of_pair(q, k, v, do, allowed, log_sum_exp, by_row, cap=None):
    """The gradients of q, k and v by a pair of blocks."""
    with declared.recomputed():
        logits = _capped(_dot("Rd,Sd->RS", q, k), cap)
    p = jnp.exp(jnp.where(allowed, logits, -1e30) - log_sum_exp[..., None])
    dv = _dot("RS,Rd->Sd", p.astype(v.dtype), do)
    dlogits = p * (_dot("Rd,Sd->RS", do, v) - by_row[..., None])
    dlogits = (dlogits if cap is None else dlogits * (1 - (logits / cap) ** 2)).astype(q.dtype)
    return _dot("RS,Sd->Rd", dlogits, k), _dot("RS,Rd->Sd", dlogits, q), dv


# -- Of some positions of a row, with all its keys or some ------------------------------------------------------------
def dealt(length: int, devices: int) -> np.ndarray:
    """The positions of a row in the order in which its parts lie on so many devices: of twice as many chunks each has
    one from the front and one from the end, so that all have as many pairs of a query and an earlier key (zigzag;
    Llama Team 2024, section 3.3.2)."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[: devices - 1 : -1]], axis=1).reshape(-1)


def forward_of_part(q, k, v, position, key_position, segment, key_segment, window=None, cap=None):
    """`forward` for the queries of one device's part of rows that are `dealt`, with the keys of all parts or of one.

    Args:
      q: 'B l Q K D'. k, v: 'B s K D'. position: int32 'l'. key_position: int32 's'. segment: int32 'B l'. key_segment:
        int32 'B s'. window, cap: as of `forward`.
    Returns o and the logits' log-sum-exp, 'B l Q K', both in float32. Of a query that no key is for the log-sum-exp is
    about -1e30, and its o means nothing.
    """
    # As in `forward`; positions come from outside of the loop over layers too.
    q, position, key_position, segment = lax.optimization_barrier((q, position, key_position, segment))
    length, groups = q.shape[1], q.shape[2]
    rows, columns = _blocks_of_part(length, k.shape[1])
    queries, keys, values = _split(q, rows), _split(k, columns), _split(v, columns)
    allowed = _allowed_of_part(position, key_position, segment, key_segment, rows, columns, groups, window)
    o = jnp.zeros(queries.shape, jnp.float32)
    sums = jnp.full(queries.shape[:-1], -1e30), jnp.zeros(queries.shape[:-1], jnp.float32), o

    def add(sums, pair):
        row, column = pair
        largest, total, o = (x[row] for x in sums)
        logits = _capped(_dot("Rd,Sd->RS", queries[row], keys[column]), cap)
        logits = jnp.where(allowed(row, column), logits, -1e30)
        larger = jnp.maximum(largest, jnp.max(logits, axis=-1))
        # Where no key was allowed yet, what is summed up here is of no key: the first that is makes it zero.
        e, rescale = jnp.exp(logits - larger[..., None]), jnp.exp(largest - larger)
        total = total * rescale + jnp.sum(e, axis=-1)
        o = o * rescale[..., None] + _dot("RS,Sd->Rd", e.astype(v.dtype), values[column])
        return tuple(x.at[row].set(new) for x, new in zip(sums, (larger, total, o), strict=True)), None

    with _share_of_part(length, k.shape[1]):
        (largest, total, o), _ = lax.scan(add, sums, _pairs_of_part(position, key_position, rows, columns))
    total = jnp.maximum(total, 1e-30)  # of blocks of queries that are before all keys nothing was summed up
    log_sum_exp = _join((largest + jnp.log(total))[..., None], groups, length)[..., 0]
    return _join(o / total[..., None], groups, length), log_sum_exp


def backward_of_part(
    q, k, v, position, key_position, segment, key_segment, o, log_sum_exp, gradient, window=None, cap=None
):
    """The gradients of q, k and v by these queries and keys, in float32, from the o and log-sum-exp of all keys."""
    o, position, key_position, segment = lax.optimization_barrier((o, position, key_position, segment))
    length, groups = q.shape[1], q.shape[2]
    rows, columns = _blocks_of_part(length, k.shape[1])
    queries, keys, values = _split(q, rows), _split(k, columns), _split(v, columns)
    allowed = _allowed_of_part(position, key_position, segment, key_segment, rows, columns, groups, window)
    gradients = _split(gradient, rows)
    by_row = jnp.sum(gradient.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)
    by_row, log_sum_exp = (_split(x[..., None], rows)[..., 0] for x in (by_row, log_sum_exp))

    def add(sums, pair):
        row, column = pair
        given = queries[row], keys[column], values[column], gradients[row], allowed(row, column)
        dq, dk, dv = _of_pair(*given, log_sum_exp[row], by_row[row], cap)
        return (sums[0].at[row].add(dq), sums[1].at[column].add(dk), sums[2].at[column].add(dv)), None

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries, keys, values))
    with _share_of_part(length, k.shape[1]):
        (dq, dk, dv), _ = lax.scan(add, sums, _pairs_of_part(position, key_position, rows, columns))
    return _join(dq, groups, length), *(_join(x, 1, k.shape[1])[:, :, 0] for x in (dk, dv))


def _blocks_of_part(part: int, length: int) -> tuple[int, int]:
    """Numbers of blocks of a part's queries and of the keys: a chunk, half of a part, has whole blocks."""
    in_chunk = min(range(1, part // 2 + 1), key=lambda n: ((part // 2) % n > 0, part // 2 > n * BLOCK, n))
    return 2 * in_chunk, 2 * in_chunk * (length // part)


def _pairs_of_part(position, key_position, rows: int, columns: int):
    """Each block of queries with each block of keys that is not later; where the keys are of another part, some pairs
    more, which the positions mask: as many on every device and in every turn. A device's two chunks have together
    2 · devices + 1 chunks of keys in all, three in its own part, two in another. Returns the indices of both."""
    ends, starts = position.reshape(rows, -1)[:, -1], key_position.reshape(columns, -1)[:, 0]
    later = ends[:, None] < starts[None]
    pairs = jnp.argsort(later.reshape(-1), stable=True)[: rows * (columns + 1) // 2].astype(jnp.int32)
    return pairs // columns, pairs % columns


def _allowed_of_part(position, key_position, segment, key_segment, rows: int, columns: int, groups: int, window):
    """The function from a pair of blocks to bool 'B 1 R S': of the same segment, not later and within the window."""
    at, key_at = position.reshape(rows, -1), key_position.reshape(columns, -1)
    queries, keys = _split_segment(segment, rows), _split_segment(key_segment, columns)

    def allowed(row, column):
        same = queries[row][..., :, None] == keys[column][..., None, :]
        distance = at[row][:, None] - key_at[column][None]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        both = same & seen[None]
        return jnp.concatenate([both] * groups, axis=-2)[:, None]

    return allowed


def _share_of_part(part: int, length: int):
    """Of part · length pairs of positions the model needs half."""
    rows, columns = _blocks_of_part(part, length)
    return declared.share(part * length, rows * (columns + 1) * (part // rows) ** 2)


# -- Blocks ------------------------------------------------------------------------------------------------------------
def _blocks(length: int) -> tuple[int, int]:
    """Number and length of a row's blocks: as few as may be, as alike as may be, so that a row is padded by less than
    their number."""
    blocks = min(-(-length // BLOCK), MOST)
    return blocks, -(-length // blocks)


def _share(length: int):
    """Of length² pairs of positions the model needs half; blocks · (blocks + 1) / 2 pairs of blocks run."""
    blocks, block = _blocks(length)
    return declared.share(length**2, blocks * (blocks + 1) * block**2)


def _over_pairs(add, sums, blocks: int):
    """Scans over the pairs (block of queries, earlier block of keys)."""
    rows, columns = np.tril_indices(blocks, -1)
    if not len(rows):
        return sums
    return lax.scan(add, sums, (jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)))[0]


def _dot(formula: str, a, b):
    """A product of each row, key head and, on the diagonal, block; its sum stays float32."""
    left, right, out = formula.replace("->", ",").split(",")
    return jnp.einsum(f"...{left},...{right}->...{out}", a, b, preferred_element_type=jnp.float32)


def _capped(logits, cap):
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _allowed(queries, keys, groups: int, window, apart=0):
    """bool '... B 1 R S': of the same segment, not later and within the window; the keys' block is the `apart`-th
    before the queries'."""
    allowed = queries[..., :, None] == keys[..., None, :]
    on_diagonal = isinstance(apart, int)
    if on_diagonal or window is not None:  # else all keys are earlier
        position = jnp.arange(queries.shape[-1])
        distance = position[:, None] - position[None] + apart * queries.shape[-1]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        allowed = allowed & jnp.expand_dims(seen, tuple(range(allowed.ndim - 2)))
    return jnp.concatenate([allowed] * groups, axis=-2)[..., None, :, :]


def _pad(x, axis: int, blocks: int):
    missing = -x.shape[axis] % blocks
    return jnp.pad(x, [(0, missing if dim == axis else 0) for dim in range(x.ndim)], constant_values=-1)


def _split_segment(segment, blocks: int):
    """'B L' -> 'n B block'. Padding is a segment of its own, -1."""
    padded = _pad(segment, 1, blocks)
    return padded.reshape(segment.shape[0], blocks, -1).swapaxes(0, 1)


def _split(x, blocks: int):
    """'B L Q K D' or 'B L K D' -> 'n B K R D', R = (Q block)."""
    x = _pad(x if x.ndim == 5 else x[:, :, None], 1, blocks)
    batch, length, groups, heads, dim = x.shape
    x = x.reshape(batch, blocks, length // blocks, groups, heads, dim)
    return x.transpose(1, 0, 4, 3, 2, 5).reshape(blocks, batch, heads, -1, dim)


def _join(x, groups: int, length: int):
    """'n B K R D' -> 'B L Q K D'."""
    blocks, batch, heads, rows, dim = x.shape
    x = x.reshape(blocks, batch, heads, groups, rows // groups, dim).transpose(1, 0, 4, 3, 2, 5)
    return x.reshape(batch, -1, groups, heads, dim)[:, :length]


def _split_rows(x, blocks: int):
    """'B Q K L' -> 'n B K R'."""
    x = _pad(x, 3, blocks)
    batch, groups, heads, length = x.shape
    x = x.reshape(batch, groups, heads, blocks, length // blocks)
    return x.transpose(3, 0, 2, 1, 4).reshape(blocks, batch, heads, -1)


def _unjoin_rows(x, groups: int, blocks: int):
    """'B (K Q) L' -> 'n B K R'."""
    batch, heads, length = x.shape
    return _split_rows(x.reshape(batch, heads // groups, groups, length).swapaxes(1, 2), blocks)


def _join_rows(x, groups: int, length: int):
    """'n B K R' -> 'B (K Q) L'."""
    blocks, batch, heads, rows = x.shape
    x = x.reshape(blocks, batch, heads, groups, rows // groups).transpose(1, 2, 3, 0, 4)
    return x.reshape(batch, heads * groups, -1)[:, :, :length]
