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


def forward(q, k, v, segment):
    """Returns o, 'B L Q K D', and the logits' log-sum-exp in float32, 'B (K Q) L'."""
    # Without the barrier JAX takes the masks of all pairs of blocks, which are the same for each layer, out of the loop
    # over layers and keeps them: length² bytes a head.
    q, segment = lax.optimization_barrier((q, segment))
    length, groups = q.shape[1], q.shape[2]
    blocks, _ = _blocks(length)
    queries, keys, values = _split(q, blocks), _split(k, blocks), _split(v, blocks)
    segments = _split_segment(segment, blocks)
    with _share(length):
        # The blocks on the diagonal, all at once, and then each pair of blocks below it: no query is without a key.
        logits = jnp.where(_allowed(segments, segments, groups, causal=True), _dot("Rd,Sd->RS", queries, keys), -1e30)
        largest = jnp.max(logits, axis=-1)
        e = jnp.exp(logits - largest[..., None])
        sums = largest, jnp.sum(e, axis=-1), _dot("RS,Sd->Rd", e.astype(v.dtype), values)

        def add(sums, pair):
            row, column = pair
            largest, total, o = (x[row] for x in sums)
            logits = _dot("Rd,Sd->RS", queries[row], keys[column])
            logits = jnp.where(_allowed(segments[row], segments[column], groups), logits, -1e30)
            larger = jnp.maximum(largest, jnp.max(logits, axis=-1))
            e, rescale = jnp.exp(logits - larger[..., None]), jnp.exp(largest - larger)
            total = total * rescale + jnp.sum(e, axis=-1)
            o = o * rescale[..., None] + _dot("RS,Sd->Rd", e.astype(v.dtype), values[column])
            return tuple(x.at[row].set(new) for x, new in zip(sums, (larger, total, o), strict=True)), None

        largest, total, o = _over_pairs(add, sums, blocks)
    o = _join(o / total[..., None], groups, length).astype(q.dtype)
    return o, _join_rows(largest + jnp.log(total), groups, length)


def backward(q, k, v, segment, o, log_sum_exp, gradient):
    """The gradients of q, k and v, from what `forward` returned and the gradient of its o."""
    o, segment = lax.optimization_barrier((o, segment))  # as in `forward`
    length, groups = q.shape[1], q.shape[2]
    blocks, _ = _blocks(length)
    queries, keys, values = _split(q, blocks), _split(k, blocks), _split(v, blocks)
    segments, gradients = _split_segment(segment, blocks), _split(gradient, blocks)
    by_row = jnp.sum(gradient.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)  # Σ_s p_s · dp_s of each query
    by_row, log_sum_exp = _split_rows(jnp.moveaxis(by_row, 1, 3), blocks), _unjoin_rows(log_sum_exp, groups, blocks)

    def of_pair(q, k, v, do, allowed, log_sum_exp, by_row):
        with declared.recomputed():
            logits = _dot("Rd,Sd->RS", q, k)
        p = jnp.exp(jnp.where(allowed, logits, -1e30) - log_sum_exp[..., None])
        dv = _dot("RS,Rd->Sd", p.astype(v.dtype), do)
        dlogits = (p * (_dot("Rd,Sd->RS", do, v) - by_row[..., None])).astype(q.dtype)
        return _dot("RS,Sd->Rd", dlogits, k), _dot("RS,Rd->Sd", dlogits, q), dv

    with _share(length):
        diagonal = _allowed(segments, segments, groups, causal=True)
        sums = of_pair(queries, keys, values, gradients, diagonal, log_sum_exp, by_row)

        def add(sums, pair):
            row, column = pair
            allowed = _allowed(segments[row], segments[column], groups)
            dq, dk, dv = of_pair(
                queries[row], keys[column], values[column], gradients[row], allowed, log_sum_exp[row], by_row[row]
            )
            return (sums[0].at[row].add(dq), sums[1].at[column].add(dk), sums[2].at[column].add(dv)), None

        dq, dk, dv = _over_pairs(add, sums, blocks)
    dk, dv = (_join(x, 1, length)[:, :, 0] for x in (dk, dv))
    return _join(dq, groups, length).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


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


def _allowed(queries, keys, groups: int, causal: bool = False):
    """bool '... B 1 R S': of the same segment and, on the diagonal, not later."""
    allowed = queries[..., :, None] == keys[..., None, :]
    if causal:
        position = jnp.arange(queries.shape[-1])
        later = position[:, None] < position[None]
        allowed = allowed & ~jnp.expand_dims(later, tuple(range(allowed.ndim - 2)))
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
