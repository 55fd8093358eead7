"""Attention over rows whose positions lie on several devices, 'B/b L/c', for all families.

    along_c = context_of(config.mesh, model.n_kv)
    x = layers.hidden(family, model, weights, *inputs, along_c=along_c)

There are three ways, and the config's mesh decides: heads of whole rows are dealt out over c; keys are gathered; or
keys are passed from device to device. Each has windows and caps. With one device along c nothing is sent, and the
program is that of whole rows. Legend as in train.py; 'K/h' are heads that are split over t and c.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32, Shaped

from jax_extra import save_for_backward
from kernels import blockwise
from kernels.attention import KERNELS, able, chosen
from kernels.blockwise import KeyPosition, Keys, OfRows, Position, Queries
from kernels.ring import ring
from models.dropout import Drop
from models.mesh import Mesh
from shardlib import shardops
from shardlib.shardtypes import bool_, f32, i32, pytree_dataclass, u32
from shardlib.typed import typed
from train import act

ALL = 2**30  # a window that hides nothing

OfPositions = Shaped[jax.Array | np.ndarray, '*B L']  # what whole rows have at each position
OfKeys, Window = Int32[jax.Array, 'B S'], Int32[jax.Array, '']  # one device's part: segments of keys; a window


@pytree_dataclass
class TokenBatch:
    targets: u32['B/b L']
    is_seq_start: bool_['B/b L']
    is_target: bool_['B/b L']  # the position counts in the loss


@pytree_dataclass
class WeightedBatch(TokenBatch):
    """A batch whose loss divides by the sum of weights. A data set without weights gives 1 for each target."""

    weight: f32['B/b L']  # 0 where is_target is False


@dataclass(frozen=True)
class Context:
    """How a row's positions on several devices attend to each other; the mesh decides which way."""

    devices: int = 1  # along c
    way: Literal['deal', 'gather', 'ring'] = 'deal'

    def in_order(self, whole: OfPositions) -> OfPositions:
        """Rows in the order in which their positions lie on the devices. Where keys come to queries, each device has
        positions from the front and from the end; else the last one would have nearly all pairs."""
        return whole if self.way == 'deal' else whole[..., blockwise.dealt(whole.shape[-1], self.devices)]

    @typed
    def part(self, whole: jax.Array) -> jax.Array:
        """Each device's positions, from rows that all devices along c hold."""
        return shardops.slice('L -> L/c' if whole.ndim == 1 else 'B/b L -> B/b L/c', self.in_order(whole))


ALONE = Context()  # each row lies on one device


def context_of(mesh: Mesh, n_kv: int, asked: Literal['auto', 'ring'] = 'auto') -> Context:
    """Deals out heads if there are enough of them; else gathers keys, or passes them on if asked to."""
    if mesh.c == 1 or (asked == 'auto' and n_kv % (mesh.t * mesh.c) == 0):
        return Context(mesh.c, 'deal')
    return Context(mesh.c, 'ring' if asked == 'ring' else 'gather')


@typed
def deal_heads(
    attention: Callable, q: act['B/b L/c Q K/t D'], k: act['B/b S/c K/t D'], v: act['B/b S/c K/t D'], *,
    is_saved: bool = True,
) -> act['B/b L/c Q K/t D']:  # fmt: skip
    """`attention(q, k, v)` on some heads of whole rows, 'B/b L Q K/h D', instead of all heads of some positions.

    Sends (c - 1) / c of q, k, v and o, all-to-all over c; backward as much of their gradients.
    """
    q = shardops.all_to_all('B/b L/c Q K/t D -> B/b L Q K/h D', q)
    k = shardops.all_to_all('B/b S/c K/t D -> B/b S K/h D', k)
    v = shardops.all_to_all('B/b S/c K/t D -> B/b S K/h D', v)
    if is_saved:
        q = save_for_backward(q)  # 2QKD/t bytes a token, spares a product with w_q, and sending it
        k = save_for_backward(k)  # 2KD/t bytes a token, spares the product with w_k, and sending it
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v, and sending it
    return shardops.all_to_all('B/b L Q K/h D -> B/b L/c Q K/t D', attention(q, k, v))


class Rows:
    """The rows of a batch; each device along c holds some of their positions."""

    @typed
    def __init__(self, context: Context, segment: i32['B/b L']):
        self.context, self.segment = context, segment
        self.place = jnp.arange(segment.shape[1], dtype=jnp.int32)

    def attention(self, by: str, q, k, v, window=None, cap: float | None = None, drop: Drop | None = None):
        """Causal attention within segments. q is 'B/b L/c Q K/t D', k and v 'B/b S/c K/t D'.

        Args:
          by: a name of kernels/attention.py.
          window: positions that a query sees, its own included: an int, or a scalar array.
          cap: logits are cap · tanh(logits / cap).
          drop: the probabilities' dropout; attention is then computed as written out. A ring takes none.
        """
        if self.context.way == 'deal':
            whole = functools.partial(attention, by, segment=self.segment, window=window, cap=cap, drop=drop)
            return deal_heads(whole, q, k, v)
        q = save_for_backward(q)  # 2QKD/t bytes a token, spares a product with w_q
        k = save_for_backward(k)  # 2KD/t bytes a token, spares the product with w_k
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v
        of_queries = self.context.part(self.place), self.context.part(self.segment)
        with jax.named_scope('causal'):
            if self.context.way == 'ring':
                return in_a_ring(q, k, v, *of_queries, window, cap)
            of_keys = self.context.in_order(self.place), self.context.in_order(self.segment)
            return of_gathered_keys(by, q, k, v, of_queries, of_keys, window, cap, drop)

    def both_ways(self, q, k, v, drop: Drop | None = None):
        """Attention for queries that see all of their segment, without a kernel; heads are distributed over axis c."""
        allowed = self.segment[:, :, None] == self.segment[:, None, :]
        return deal_heads(functools.partial(attention_where, allowed=allowed, drop=drop), q, k, v)


def forward(
    cap: float | None, q: Queries, k: Keys, v: Keys, position: Position, key_position: KeyPosition, segment: OfRows,
    key_segment: OfKeys, window: Window,
) -> tuple[Float32[jax.Array, 'B L Q K D'], Float32[jax.Array, 'B L Q K']]:  # fmt: skip
    """`ring`'s: a device's positions, and the keys of one device."""
    return blockwise.forward(q, k, v, (position, key_position, segment, key_segment), window, cap)


def backward(
    cap: float | None, q: Queries, k: Keys, v: Keys, position: Position, key_position: KeyPosition, segment: OfRows,
    key_segment: OfKeys, window: Window, o: Queries, log_sum_exp: Float32[jax.Array, 'B L Q K'], gradient: Queries,
) -> tuple[Float32[jax.Array, 'B L Q K D'], Float32[jax.Array, 'B S K D'], Float32[jax.Array, 'B S K D']]:  # fmt: skip
    """`ring`'s, of the same."""
    places = position, key_position, segment, key_segment
    return blockwise.backward(q, k, v, places, o, log_sum_exp, gradient, window, cap)


def by_blocks(
    cap: float | None, q: Queries, k: Keys, v: Keys, position: Position, key_position: KeyPosition, segment: OfRows,
    key_segment: OfKeys, window: Window,
) -> Queries:  # fmt: skip
    """A device's positions, and the keys of whole rows."""
    return KERNELS['blockwise'](q, k, v, (position, key_position, segment, key_segment), window, cap)


@typed
def in_a_ring(
    q: act['B/b L/c Q K/t D'], k: act['B/b S/c K/t D'], v: act['B/b S/c K/t D'], position: i32['L/c'],
    segment: i32['B/b L/c'], window, cap: float | None,
) -> act['B/b L/c Q K/t D']:  # fmt: skip
    """Attention of a device's positions to keys that are passed from device to device (Liu et al. 2023), in blocks: two
    parts of the keys are in memory at a time, and no turn is kept.

    Sends 4KD/t bytes a token of a part in each of c - 1 turns; backward that again, and 8KD/t of gradients in c turns.
    """
    kept, passed = 'B/b L/c Q K/t D', 'B/b [S/c] K/t D'
    types = f'{kept}, {passed}, {passed}, L/c, [S/c], B/b L/c, B/b [S/c],  -> {kept}'

    both = functools.partial(forward, cap), functools.partial(backward, cap)
    window = jnp.int32(ALL if window is None else window)
    return ring(types, *both, q, k, v, position, position, segment, segment, window)


@typed
def of_gathered_keys(
    by: str, q: act['B/b L/c Q K/t D'], k: act['B/b S/c K/t D'], v: act['B/b S/c K/t D'],
    of_queries: tuple[i32['L/c'], i32['B/b L/c']], of_keys: tuple[i32['S'], i32['B/b S']], window, cap: float | None,
    drop: Drop | None,
) -> act['B/b L/c Q K/t D']:  # fmt: skip
    """Attention of a device's positions to all keys of its rows (Llama Team 2024, 3.3.2), which backward gathers again.
    Uses 'einsum' if that is asked for, else blocks: all other kernels assume consecutive positions.

    Sends 4KD/t bytes for each position of other devices; backward the same and a reduce-scatter.
    """
    k = shardops.all_gather('B/b S/c K/t D -> B/b S K/t D', k)
    v = shardops.all_gather('B/b S/c K/t D -> B/b S K/t D', v)
    if by != 'einsum' and drop is None:
        types = 'B/b L/c Q K/t D, B/b S K/t D, B/b S K/t D, L/c, S, B/b L/c, B/b S, '
        places = of_queries[0], of_keys[0], of_queries[1], of_keys[1]
        window = jnp.int32(ALL if window is None else window)
        of_device = functools.partial(by_blocks, cap)
        return shardops.local(f'{types} -> B/b L/c Q K/t D', of_device, q, k, v, *places, window)
    distance = of_queries[0][:, None] - of_keys[0][None]
    allowed = (of_queries[1][:, :, None] == of_keys[1][:, None, :]) & (distance >= 0)[None]
    allowed = allowed if window is None else allowed & (distance < window)[None]
    return attention_where(q, k, v, allowed, cap, drop=drop, L='L/c', K='K/t')


# == Attention =========================================================================================================
@jax.named_scope('causal')
@typed
def attention(
    by: str, q: act['B/b L Q K/h D'], k: act['B/b S K/h D'], v: act['B/b S K/h D'], segment: i32['B/b L'],
    window: int | jax.Array | None = None, cap: float | None = None, drop: Drop | None = None,
) -> act['B/b L Q K/h D']:  # fmt: skip
    """train.py's attention on whole rows, kernels included, with a window and a cap; with dropout as written out."""
    window = None if isinstance(window, int) and window >= segment.shape[1] else window
    if by != 'einsum' and drop is None:
        kernel = KERNELS[able(chosen(by, act.dtype, q.shape[-1]), window, cap)]
        types, arrays = 'B/b L Q K/h D, B/b S K/h D, B/b S K/h D, B/b L', (q, k, v, segment)
        if isinstance(window, jax.Array):  # a scanned layer's, which differs between stages
            return shardops.local(f'{types},  -> B/b L Q K/h D', lambda *x: kernel(*x, cap), *arrays, window)
        return shardops.local(f'{types} -> B/b L Q K/h D', lambda *x: kernel(*x, window, cap), *arrays)
    position = jnp.arange(segment.shape[1])
    distance = position[:, None] - position[None]
    allowed = (segment[:, :, None] == segment[:, None, :]) & (distance >= 0)[None]
    allowed = allowed if window is None else allowed & (distance < window)[None]
    return attention_where(q, k, v, allowed, cap, drop=drop)


@typed
def attention_where(
    q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, cap: float | None = None,
    bias: jax.Array | None = None, drop: Drop | None = None, L: str = 'L', K: str = 'K/h',
) -> jax.Array:  # fmt: skip
    """Attention where a query sees the keys that are allowed.

    Args:
      q, k, v: act['B/b L Q K/h D'], act['B/b S K/h D'] twice.
      allowed: bool_['B/b L S'].
      bias: f32['K/h L S'], added to the logits.
      L, K: how queries and heads lie, where not so: 'L/c' and 'K/t', 'L' and 'K/t'.
    """
    q: act[f'B/b {L} Q {K} D'] = q
    logits = shardops.einsum_unreduced(
        f'B/b {L} Q {K} D, B/b S {K} D -> B/b Q {K} {L} S', q, k, preferred_element_type=jnp.float32
    )
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    logits = logits if bias is None else logits + bias[None, None]
    # jnp.where would broadcast only where a device holds several rows or heads: to the check, two different programs.
    logits = jnp.where(lax.broadcast_in_dim(allowed, logits.shape, (0, 3, 4)), logits, -1e30)
    largest = shardops.pmax(f'B/b Q {K} {L} S -> B/b Q {K} {L}', lax.stop_gradient(logits))
    e = jnp.exp(logits - largest[..., None])
    total = shardops.sum_unreduced(f'B/b Q {K} {L} S -> B/b Q {K} {L}', e)
    probs: act[f'B/b Q {K} {L} S'] = (e / total[..., None]).astype(act.dtype)
    probs = probs if drop is None else drop(f'B/b Q {K} {L} S', probs)
    o = shardops.einsum_unreduced(f'B/b Q {K} {L} S, B/b S {K} D -> B/b {L} Q {K} D', probs, v)
    return save_for_backward(o)  # 2QKD/t bytes a token, spares the product of probabilities and v
