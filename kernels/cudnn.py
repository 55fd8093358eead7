"""cuDNN's fused attention on NVIDIA GPUs, forward and backward, for packed rows.

Two ways to keep segments apart, since cuDNN has no segment ids:

- `packed`, from Hopper on: each segment is a sequence of its own, given by its offset and length. Nothing of length² is
  in memory, and what lies between segments is never computed. cuDNN wants to know beforehand how many segments there
  are at most: one for each SEGMENT positions of the device's rows and one for each row. A batch with more (documents
  shorter than SEGMENT on average) goes the other way, mask and all, with the same result.
- `masked`, from Ampere on: a mask is added to the logits, in memory 2 bytes for each pair of positions of a row, the
  same for all heads. Every pair of the causal half is computed.

`auto` takes `masked`, which does the same for every batch. `packed` computes less where documents are short beside a row, but

- asks on the device which way a batch goes, and XLA's host thread waits for the answer, in each layer and pass;
- has, by cuDNN-frontend's source, a float32 sum for q's gradient of the size of all sequences at their longest: SEGMENT
  positions of a row make one, so 4 L / SEGMENT bytes for each element of q, and not 4. For 32,768 positions of 16 heads of
  128 that is 69 GB. XLA counts it only on the device;
- has too many segments wherever rows are filled up with padding (`sequence_packing=false`), each of which is one.

XLA's own names for these kernels are called as foreign functions, since `jax.nn.dot_product_attention` knows no offsets,
computes a gradient of its mask, and keeps what its backward pass needs under no name, so that a checkpointed layer
would run the kernel twice. Operands and settings are those with which JAX calls them.
"""

import json

import jax
import jax.numpy as jnp
from jax import lax

from kernels import declared

SEGMENT = 128

# Which dims of q, k, v ('B L H D'), of the probabilities ('B H L L') and of their gradients the products contract and
# share: (left's, right's, left's shared, right's shared).
_FORWARD = {"bmm1": (3, 3, (0, 2), (0, 2)), "bmm2": (3, 1, (0, 1), (0, 2))}
_BACKWARD = {
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
}


def packed_forward(q, k, v, segment):
    """Returns o, 'B L Q K D', and the logits' log-sum-exp as cuDNN keeps it: 'P (K Q) L', a row for each segment."""
    sequences = _Sequences(segment)

    def fits(q, k, v, segment):
        return _forward(q, k, v, (), sequences.operands(q, k), "PADDING_CAUSAL", sequences.most_a_row)

    def too_many(q, k, v, segment):
        with declared.fallback():
            # The mask waits for q: else JAX makes it before the loop over layers, from the segments alone, in both branches.
            q, segment = lax.optimization_barrier((q, segment))
            o, log_sum_exp = masked_forward(q, k, v, segment)
            rows = sequences.most_a_row * segment.shape[0] - len(log_sum_exp)
            return o, jnp.pad(log_sum_exp, ((0, rows), (0, 0), (0, 0)))

    return lax.cond(sequences.fit, fits, too_many, q, k, v, segment)


def packed_backward(q, k, v, segment, o, log_sum_exp, gradient):
    """The gradients of q, k and v."""
    sequences = _Sequences(segment)

    def fits(q, k, v, segment, o, log_sum_exp, gradient):
        operands = sequences.operands(q, k)
        return _backward(q, k, v, (), operands, o, log_sum_exp, gradient, "PADDING_CAUSAL", sequences.most_a_row)

    def too_many(q, k, v, segment, o, log_sum_exp, gradient):
        with declared.fallback():
            return masked_backward(q, k, v, segment, o, log_sum_exp[: len(segment)], gradient)

    return lax.cond(sequences.fit, fits, too_many, q, k, v, segment, o, log_sum_exp, gradient)


def masked_forward(q, k, v, segment):
    """Returns o, 'B L Q K D', and the logits' log-sum-exp in float32, 'B (K Q) L'."""
    return _forward(q, k, v, (_mask(segment, q.dtype),), (), "CAUSAL", 1)


def masked_backward(q, k, v, segment, o, log_sum_exp, gradient):
    """The gradients of q, k and v."""
    return _backward(q, k, v, (_mask(segment, q.dtype),), (), o, log_sum_exp, gradient, "CAUSAL", 1)


def _mask(segment, dtype):
    """'B 1 L L': what is added to the logits. -2⁴¹ is what JAX adds: two of it do not overflow inside of cuDNN."""
    different = (segment[:, :, None] != segment[:, None, :])[:, None]
    return different.astype(dtype) * -(2.0**41)


class _Sequences:
    """The segments of all rows, one after another, as cuDNN wants them: offsets and lengths, filled up with empty
    ones."""

    def __init__(self, segment):
        rows, length = segment.shape
        self.tokens, self.shape = rows * length, segment.shape
        self.most_a_row = max(2, length // SEGMENT + 1)  # one would mean to XLA that rows are not packed
        starts = (segment != jnp.roll(segment, 1, axis=1)).at[:, 0].set(True).reshape(-1)
        self.fit = jnp.sum(starts, dtype=jnp.int32) <= rows * self.most_a_row
        (offsets,) = jnp.nonzero(starts, size=rows * self.most_a_row, fill_value=self.tokens)
        self.offsets = jnp.append(offsets.astype(jnp.int32), jnp.int32(self.tokens))
        self.lengths = jnp.diff(self.offsets).reshape(rows, -1)

    def operands(self, q, k):
        """Lengths of queries' and keys' sequences, 'B P', and their offsets in elements, 'B P+1'."""
        rows = self.shape[0]
        # A row has one offset more than it has segments; those to spare are at the very end.
        offsets = jnp.pad(self.offsets, (0, rows - 1), constant_values=self.tokens).reshape(rows, -1)
        return self.lengths, self.lengths, *(offsets * jnp.int32(x.size // self.tokens) for x in (q, k))


def _forward(q, k, v, bias, sequences, mask, most_a_row):
    batch, length, groups, heads, dim = q.shape
    name = "__cudnn$fmhaScaleBiasSoftmax" if bias else "__cudnn$fmhaSoftmax"
    o = jax.ShapeDtypeStruct((batch, heads * groups, length, dim), q.dtype)
    log_sum_exp = jax.ShapeDtypeStruct((batch * most_a_row, heads * groups, length), jnp.float32)
    call = _call(name, [o, log_sum_exp], 1, _settings(q, mask, most_a_row, _FORWARD))
    with _flops(name, q, products=2, needed=2):
        o, log_sum_exp, _ = call(_by_key_head(q), k, v, *bias, *sequences)
    return _by_group(o.swapaxes(1, 2), groups), log_sum_exp


def _backward(q, k, v, bias, sequences, o, log_sum_exp, gradient, mask, most_a_row):
    batch, length, groups, heads, dim = q.shape
    name = "__cudnn$fmhaScaleBiasSoftmaxBackward" if bias else "__cudnn$fmhaSoftmaxBackward"
    dq = jax.ShapeDtypeStruct((batch, heads * groups, length, dim), q.dtype)
    dk = jax.ShapeDtypeStruct((batch, heads, length, dim), k.dtype)
    call = _call(name, [dq, dk, dk], 3, _settings(q, mask, most_a_row, _BACKWARD))
    q, gradient, o = _by_key_head(q), _by_key_head(gradient), _by_key_head(o)
    with _flops(name, q, products=5, needed=4):
        dq, dk, dv, _ = call(q, k, v, log_sum_exp, gradient, *bias, o, *sequences)
    return _by_group(dq.swapaxes(1, 2), groups), dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def _by_key_head(x):
    """'B L Q K D' -> 'B L (K Q) D': cuDNN wants the query heads of a key head next to each other."""
    return x.swapaxes(2, 3).reshape(*x.shape[:2], -1, x.shape[-1])


def _by_group(x, groups: int):
    """'B L (K Q) D' -> 'B L Q K D'."""
    return x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).swapaxes(2, 3)


def _flops(name: str, q, products: int, needed: int):
    """Half of the pairs of positions are masked; those in different segments count, as they do without a kernel."""
    each = q.size * q.shape[1]  # 2 · B L (K Q) D · L / 2
    return declared.kernel_flops(**{name: (products * each, needed * each)})


def _call(name: str, results: list, transposed: int, settings: str):
    """The foreign function. The first results are 'B H L D' whose memory is that of 'B L H D'; the last its scratch."""
    ranks = [4, 3] if transposed == 1 else [4, 4, 4]
    layouts = [(0, 2, 1, 3) if position < transposed else tuple(range(rank)) for position, rank in enumerate(ranks)]
    return jax.ffi.ffi_call(
        name,
        [*results, jax.ShapeDtypeStruct((0,), jnp.uint8)],
        output_layouts=[*layouts, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=settings,
    )


def _settings(q, mask: str, most_a_row: int, products: dict) -> str:
    batch, length, groups, heads, _ = q.shape
    logits = {
        "dim_level_types": [],
        "dim_unique": [],
        "dim_ordered": [],
        "minor_to_major": ["3", "2", "1", "0"],
        "tiles": [],
        "element_size_in_bits": "0",
        "memory_space": "0",
        "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "dynamic_shape_metadata_prefix_bytes": "0",
    }
    settings = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": 1.0,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[q.dtype.name],
            "dimensions": [str(size) for size in (batch, heads * groups, length, length)],
            "tuple_shapes": [],
            "layout": logits,
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": mask,
    }
    for name, (left, right, *shared) in products.items():
        settings[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(dim) for dim in shared[0]],
            "rhs_batch_dimensions": [str(dim) for dim in shared[1]],
        }
    settings |= {"dropout_rate": 0.0, "seed": 42, "sliding_window_length": 0}
    settings |= {"max_seg_per_batch": most_a_row, "is_paged_attention": False}
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": settings})
