"""Attention over packed rows without logits of length² in memory: kernels with the meaning of train.py's `attention`.

    o = shardops.local(
        'B/d L Q K/t D, B/d S K/t D, B/d S K/t D, B/d L -> B/d L Q K/t D', KERNELS["blockwise"], q, k, v, segment
    )

| name         | runs on                              | in memory besides operands, result and their gradients      |
| ------------ | ------------------------------------ | ----------------------------------------------------------- |
| blockwise    | everything                           | logits of a block; a sum in float32 for each of the results |
| cudnn_masked | NVIDIA from Ampere on, 16-bit types  | a mask, 2 bytes for each pair of positions of a row         |
| splash       | TPU                                  | 512 bytes a head and position                               |

Each is a function (q, k, v, segment, window=None, cap=None) -> o, with a gradient of its own:

    q        'B L Q K D'; query head (Q, K) reads key head K. The logits are q·k: no factor.
    k, v     'B L K D'
    segment  int32 'B L': a position sees those before it, and itself, that are next to each other with its number;
             blockwise also takes a part of a row, as `places` of blockwise.forward
    window   positions that a query sees, its own included: an int, or a scalar array, as `able` says
    cap      logits are cap · tanh(logits / cap)
    o        'B L Q K D' in q's type

For the backward pass each keeps o and the logits' log-sum-exp, 2 Q K D + 4 Q K bytes a token in bfloat16,
under the name of `save_for_backward`: a layer with `explicit_activation_checkpointing` runs the kernel once.
The caller does not save o again, it would be kept twice.
"""

import functools
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from kernels import blockwise, cudnn, splash

_SAVED = "save_for_backward"  # the name that jax_extra.save_for_backward uses


def _with_gradient(forward, backward):
    """A kernel of its two halves; the name under which it keeps what lies between them is the policy's."""

    def result(q, k, v, segment, window, cap):
        o, log_sum_exp = forward(q, k, v, segment, window, cap)
        return o.astype(q.dtype), log_sum_exp

    @functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
    def attention(q, k, v, segment, window=None, cap=None):
        return result(q, k, v, segment, window, cap)[0]

    def keep(q, k, v, segment, window, cap):
        o, log_sum_exp = (checkpoint_name(x, _SAVED) for x in result(q, k, v, segment, window, cap))
        return o, (q, k, v, segment, o, log_sum_exp, window)

    def give_back(cap, kept, gradient):
        *operands, window = kept
        changes = backward(*operands, gradient, window, cap)
        return *(change.astype(operand.dtype) for change, operand in zip(changes, operands)), None, None

    attention.defvjp(keep, give_back)
    return attention


KERNELS = {
    "blockwise": _with_gradient(blockwise.forward, blockwise.backward),
    "cudnn_masked": _with_gradient(cudnn.forward, cudnn.backward),
    "splash": functools.partial(splash.attention, save_as=_SAVED),
}
KernelName = Literal["auto", "einsum", "blockwise", "cudnn_masked", "splash"]  # einsum: train.py's own, of no kernel
NEEDS = {
    "cudnn_masked": "an NVIDIA GPU from Ampere on, 16-bit numbers, heads of a multiple of 8 up to 128 (Hopper: 256)",
    "splash": "a TPU",
}


def chosen(name: str, dtype, d_head: int) -> str:
    """The name of the kernel that `model.attention` says: for 'auto' the one suited to the device at hand.

    Args: as of `suited`.
    """
    if name != "auto":
        return name
    device = jax.local_devices()[0]
    return suited(device.platform, float(getattr(device, "compute_capability", 0)), dtype, d_head)


def able(kernel: str, window, cap) -> str:
    """The kernel, or blockwise for what it lacks: cuDNN a cap, splash a window that is an array, one for each layer."""
    lacks = {"cudnn_masked": cap is not None, "splash": not isinstance(window, int | None)}
    return "blockwise" if lacks.get(kernel) else kernel


class KernelError(Exception):
    """A kernel that was asked for by name cannot run on this device. The program ends with the message alone."""


def usable(name: str, dtype, d_head: int) -> str:
    """`chosen`, for a program that is about to run it here.

    Raises:
      KernelError: the device, the type or the size is none of that kernel's.
    """
    kernel, here = chosen(name, dtype, d_head), chosen("auto", dtype, d_head)
    if kernel in NEEDS and kernel != here:
        raise KernelError(f"model.attention = {kernel} needs {NEEDS[kernel]}; auto is {here} here")
    return kernel


def suited(platform: str, capability: float, dtype, d_head: int) -> str:
    """The name of the kernel for a device.

    Args:
      platform: JAX's word: 'cpu', 'gpu', 'tpu'.
      capability: of an NVIDIA GPU, its compute capability; 0 of all others.
      dtype: of the activations.
      d_head: D.
    """
    if platform == "tpu":
        return "splash"
    widest = 256 if capability >= 9 else 128
    if capability < 8 or jax.numpy.dtype(dtype).itemsize != 2 or d_head % 8 or d_head > widest:
        return "blockwise"
    return "cudnn_masked"
