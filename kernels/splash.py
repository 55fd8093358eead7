"""JAX's splash attention on TPUs: a Pallas kernel with segment ids, which skips what the causal mask leaves out."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from kernels import declared

LANES = 128  # rows are padded to a multiple
BLOCK = 512


def attention(
    q: Float[jax.Array, "B L Q K D"], k: Float[jax.Array, "B L K D"], v: Float[jax.Array, "B L K D"],
    segment: Int32[jax.Array, "B L"], window: int | None = None, cap: float | None = None, *, save_as: str,
    interpret: bool = False,
) -> Float[jax.Array, "B L Q K D"]:  # fmt: skip
    """With the kernel's own gradient; its result and the logits' log-sum-exp are kept under `save_as`.

    `interpret` runs the kernel's body as plain JAX, on any device, slowly: for tests.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention  # here: it takes a fifth of a second

    batch, length, groups, heads, dim = q.shape
    padded = -(-length // LANES) * LANES
    queries, keys, values = (_by_head(x, padded) for x in (q, k[:, :, None], v[:, :, None]))
    segment = jnp.pad(segment, ((0, 0), (0, padded - length)), constant_values=-1)  # a segment of its own

    block = math.gcd(padded, BLOCK)
    names = "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq block_kv_dq"
    seen = splash_attention.CausalMask((padded, padded))
    if window is not None:
        seen = splash_attention.LocalMask((padded, padded), (window - 1, 0), 0)
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([seen] * (heads * groups)),
        block_sizes=splash_attention.BlockSizes(**dict.fromkeys(names.split(), block)),
        residual_checkpoint_name=save_as,
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )
    # Half of the pairs of positions are masked; pairs that only a window masks count too. Each of the two
    # kernels of the backward pass recomputes the logits.
    product = q.size * length  # 2 · B L (K Q) D · L / 2
    fwd, dq, dkv = (2 * product, 2 * product), (3 * product, product), (4 * product, 3 * product)
    kind = "segmented_no_residuals"
    flops = {"splash_mha_fwd_segmented_residuals": fwd, f"splash_mha_fwd_{kind}": fwd}
    flops |= {f"splash_mha_dq_{kind}": dq, f"splash_mha_dkv_{kind}": dkv}
    # Besides its kernels it has a product, of o and its gradient, that is no product of the model's.
    with declared.share(0, 1), declared.kernel_flops(**flops):
        ids = splash_attention.SegmentIds(segment, segment)
        o = jax.vmap(kernel)(queries, keys, values, segment_ids=ids)
    return o.reshape(batch, heads, groups, padded, dim).transpose(0, 3, 2, 1, 4)[:, :length]


def _by_head(x, length: int):
    """'B L Q K D' -> 'B (K Q) L D', padded to `length`."""
    x = jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *(((0, 0),) * 3)))
    return x.transpose(0, 3, 2, 1, 4).reshape(x.shape[0], -1, length, x.shape[-1])
