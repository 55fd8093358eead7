"""cuDNN's fused attention on NVIDIA GPUs, forward and backward, for packed rows.

cuDNN has no segment ids, so a mask keeps segments apart: it is added to the logits, in memory 2 bytes for each pair of
positions of a row, the same for all heads. Every pair of the causal half is computed.

XLA's own names for these kernels are called as foreign functions, since `jax.nn.dot_product_attention`
computes a gradient of its mask and keeps what its backward pass needs under no name, so that a checkpointed layer
would run the kernel twice. Operands and settings are those with which JAX calls them.
"""

import json

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from kernels import declared

Queries, Keys = Float[jax.Array, "B L Q K D"], Float[jax.Array, "B L K D"]
OfHeads = Float32[jax.Array, "B H L"]  # H = (K Q)
Segment = Int32[jax.Array, "B L"]

_NAME = "__cudnn$fmhaScaleBiasSoftmax"  # the foreign function's name

# The dims of q, k, v ('B L H D'), the probabilities ('B H L L') and their gradients that the products contract and
# share: (left's, right's, left's shared, right's shared).
_FORWARD = {"bmm1": (3, 3, (0, 2), (0, 2)), "bmm2": (3, 1, (0, 1), (0, 2))}
_BACKWARD = {
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
}


def forward(q: Queries, k: Keys, v: Keys, segment: Segment, window=None, cap: None = None) -> tuple[Queries, OfHeads]:
    """Returns o and the logits' log-sum-exp. A window is in the mask."""
    assert cap is None, "kernels.attention.able gives such logits to another kernel"
    batch, length, groups, heads, dim = q.shape
    o = jax.ShapeDtypeStruct((batch, heads * groups, length, dim), q.dtype)
    log_sum_exp = jax.ShapeDtypeStruct((batch, heads * groups, length), jnp.float32)
    call = _call(_NAME, [o, log_sum_exp], 1, _settings(q, _FORWARD))
    with _flops(_NAME, q, products=2, needed=2):
        o, log_sum_exp, _ = call(_by_key_head(q), k, v, _mask(segment, q.dtype, window))
    return _by_group(o.swapaxes(1, 2), groups), log_sum_exp


def backward(
    q: Queries, k: Keys, v: Keys, segment: Segment, o: Queries, log_sum_exp: OfHeads, gradient: Queries, window=None,
    cap: None = None,
) -> tuple[Queries, Keys, Keys]:  # fmt: skip
    """The gradients of q, k and v."""
    batch, length, groups, heads, dim = q.shape
    name = f"{_NAME}Backward"
    dq = jax.ShapeDtypeStruct((batch, heads * groups, length, dim), q.dtype)
    dk = jax.ShapeDtypeStruct((batch, heads, length, dim), k.dtype)
    call = _call(name, [dq, dk, dk], 3, _settings(q, _BACKWARD))
    mask = _mask(segment, q.dtype, window)
    q, gradient, o = _by_key_head(q), _by_key_head(gradient), _by_key_head(o)
    with _flops(name, q, products=5, needed=4):
        dq, dk, dv, _ = call(q, k, v, log_sum_exp, gradient, mask, o)
    return _by_group(dq.swapaxes(1, 2), groups), dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def _mask(segment, dtype, window):
    """'B 1 L L': what is added to the logits. -2⁴¹ is what JAX adds: two of it do not overflow inside of cuDNN."""
    hidden = segment[:, :, None] != segment[:, None, :]
    if window is not None:
        position = jnp.arange(segment.shape[1])
        hidden = hidden | (position[:, None] - position[None] >= window)[None]
    return hidden[:, None].astype(dtype) * -(2.0**41)


def _by_key_head(x):
    """'B L Q K D' -> 'B L (K Q) D': cuDNN wants the query heads of a key head next to each other."""
    return x.swapaxes(2, 3).reshape(*x.shape[:2], -1, x.shape[-1])


def _by_group(x, groups: int):
    """'B L (K Q) D' -> 'B L Q K D'."""
    return x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).swapaxes(2, 3)


def _flops(name: str, q, products: int, needed: int):
    """Half of the pairs of positions are masked; those in different segments count, as they do without a kernel."""
    flops = q.size * q.shape[1]  # 2 · B L (K Q) D · L / 2
    return declared.kernel_flops(**{name: (products * flops, needed * flops)})


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


def _settings(q, products: dict) -> str:
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
        "mask_type": "CAUSAL",
    }
    for name, (left, right, *shared) in products.items():
        settings[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(dim) for dim in shared[0]],
            "rhs_batch_dimensions": [str(dim) for dim in shared[1]],
        }
    settings |= {"dropout_rate": 0.0, "seed": 42, "sliding_window_length": 0}
    settings |= {"max_seg_per_batch": 1, "is_paged_attention": False}
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": settings})
