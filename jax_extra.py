"""Small additions to JAX: which values a layer keeps for its backward pass, and named random keys."""

import zlib

import jax
from jax.ad_checkpoint import checkpoint_name

_SAVED = "save_for_backward"


def explicit_activation_checkpointing(function, names=(_SAVED,), on_host=False):
    """Keeps for the backward pass the inputs that it needs and the values under `save_for_backward`; the rest is
    computed again.

    Args:
      names: those under which values are kept; the others are computed again too.
      on_host: they are kept in the host's memory, and copied there and back. A CPU has but one memory.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    if on_host:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=names,
            offload_src='device',
            offload_dst='pinned_host',
        )
    return jax.checkpoint(function, policy=policy)


def save_for_backward(x, name=_SAVED):
    """Keeps `x` for the backward pass of the enclosing `explicit_activation_checkpointing`; returns it."""
    return checkpoint_name(x, name)


def fold_in_str(key, string: str):
    """A random key for each name: `jax.random.fold_in` with the string's CRC-32, the same in every process."""
    return jax.random.fold_in(key, zlib.crc32(string.encode()))
