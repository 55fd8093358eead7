"""Shared by the families in models/: norms, rotary, attention with its mask, halves of a layer, embedding, loss.

    ends = llama.gather_ends(weights)
    x, routing = layers.hidden(llama, model, weights, inputs, segment, position, ends=ends)       # 'B/b L/c M'
    loss = layers.loss_sum(ends.unembed, x, batch)                   # as train.py's, pending over all axes

A family is a module with `KIND`: 'decoder', 'encoder' or 'both'; `Model`, `embed`, `layer`, `final`, `mask`, and a
table of its weights (models/weights.py), from which `Layer`, `Weights`, `Gathered`, `Ends`, `init`, `gather_layer`,
`gather_ends` and `published` follow; and `model_of` and `config_of`, from a config.json and to one
(models/huggingface.py). Its layer is written once, for training, for reading a prompt and for decoding: it multiplies
with weights that are gathered over w, and does not know what attention is over, `attend(q, k, v) -> (o, kept)`, nor how
the residual lies: 'B/b L/c M/t' in training, 'B/b L/c M' in decoding, which sends half as often. It returns x, what
`attend` wants kept, and what a router did. `attend.window` is the layer's window: Gemma 3's rotary base goes with it.
Legend as in train.py and models/mesh.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import train
from jax_extra import explicit_activation_checkpointing, save_for_backward
from models.config import RopeScaling
from models.context import ALL as ALL  # by this name for families
from models.context import ALONE, Context, Rows, TokenBatch
from models.context import WeightedBatch as WeightedBatch
from models.dropout import Dropout, Residual
from models.weights import Biased
from models.weights import stored as stored  # by this name for who sets it
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.products import product
from shardlib.shardtypes import f32, i32, u32
from shardlib.typed import typed
from train import act


# == How the residual lies =============================================================================================
def gather_residual(x, M: str):
    """The residual, 'B/b L/c M/t' or 'B/b L/c M' by M, whole on each device along t."""
    return x if M == 'M' else shardops.all_gather('B/b L/c M/t -> B/b L/c M', x)


def reduce_residual(y, M: str):
    """The sum over t of what the devices computed, laid out like the residual."""
    if M == 'M':
        return shardops.psum('B/b L/c M +t -> B/b L/c M', y)
    return with_dropout(shardops.psum_scatter('B/b L/c M +t -> B/b L/c M/t', y), M)


def with_dropout(y, M: str):
    """What is added to the residual, laid out like it, by M without some elements."""
    return M.drop('B/b L/c M/t', y) if isinstance(M, Residual) else y


def part(vector, M: str):
    """A device's part of a vector 'M', such as a bias, laid out like the residual."""
    return vector if M == 'M' else shardops.slice('M -> M/t', vector)


# == Norms =============================================================================================================
@typed
def norm(x: jax.Array, scale: jax.Array, eps: float, M: str = 'M') -> jax.Array:
    """A norm in float32: with f32['M'] RMSNorm, x / sqrt(mean(x²) + eps) · scale (Zhang and Sennrich 2019, section 4);
    with a scale and a bias, f32['2 M'], layer norm, which subtracts the mean from x first (Ba et al. 2016). x lies as
    'B/b L/c' with M: where M is split, each mean is summed over t, 4 bytes a token."""
    whole: act[f'B/b L/c {M}'] = x
    x, size = whole.astype(jnp.float32), scale.shape[-1]

    def mean(values):
        if M == 'M':
            return shardops.sum_unreduced('B/b L/c M -> B/b L/c', values) / size
        return (
            shardops.psum('B/b L/c +t -> B/b L/c', shardops.sum_unreduced('B/b L/c M/t -> B/b L/c +t', values)) / size
        )

    if scale.ndim == 2:
        x = x - mean(x)[:, :, None]
    x = x * lax.rsqrt(mean(x * x) + eps)[:, :, None]
    if scale.ndim == 1:
        return (x * part(scale, M)[None, None]).astype(act.dtype)
    return (x * part(scale[0], M)[None, None] + part(scale[1], M)[None, None]).astype(act.dtype)


@typed
def head_norm(x: act['B/b L/c Q K/t D'], scale: f32['D'], eps: float) -> act['B/b L/c Q K/t D']:
    """RMSNorm per head."""
    x = x.astype(jnp.float32)
    mean_square = shardops.sum_unreduced('B/b L/c Q K/t D -> B/b L/c Q K/t', x * x) / x.shape[-1]
    return (x * lax.rsqrt(mean_square + eps)[..., None] * scale[None, None, None, None]).astype(act.dtype)


@typed
def heads_norm(x: act['B/b L/c Q K/t D'], scale: f32['Q K/t D'], eps: float) -> act['B/b L/c Q K/t D']:
    """RMSNorm of all heads together: 4 bytes a token are summed over t."""
    x = x.astype(jnp.float32)
    square = shardops.psum('B/b L/c +t -> B/b L/c', shardops.sum_unreduced('B/b L/c Q K/t D -> B/b L/c +t', x * x))
    mean_square = square / (math.prod(x.shape[2:]) * shardops.axis_size('t'))
    return (x * lax.rsqrt(mean_square + eps)[:, :, None, None, None] * scale[None, None]).astype(act.dtype)


# == Rotary ============================================================================================================
def frequencies(d_head: int, base: float, scaling: RopeScaling | None):
    """The angle between neighbouring positions, of each pair of dims."""
    half = d_head // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency
    if scaling.kind == 'linear':
        return frequency / scaling.factor
    if scaling.kind == 'llama3':
        turns = scaling.original_length * frequency / (2 * math.pi)
        unscaled = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:  # Peng et al. 2023, section 3.2; linear in the number of the pair, which is rounded outwards
        # The number of the pair that turns so many times within the original length.
        pairs = [
            half * math.log(scaling.original_length / (2 * math.pi * n), base) for n in (scaling.high, scaling.low)
        ]
        first, last = max(math.floor(pairs[0]), 0), min(math.ceil(pairs[1]), d_head - 1)
        unscaled = 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / max(last - first, 0.001), 0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling.factor)


@typed
def rotary(
    x: act['B/b L/c Q K/t D'], position: i32['B/b L/c'], frequency: f32['H'], factor: float = 1.0
) -> act['B/b L/c Q K/t D']:
    """Rotates dims i and i + D/2 by position · frequency[i] (Su et al. 2021, 3.2.2), times factor; in float32."""
    half = x.shape[-1] // 2
    angle = position.astype(jnp.float32)[:, :, None] * frequency[None, None]
    sin, cos = jnp.sin(angle)[:, :, None, None], jnp.cos(angle)[:, :, None, None]
    sin, cos = (sin, cos) if factor == 1 else (sin * factor, cos * factor)
    x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(act.dtype)


Turns = tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]  # what q and k become


def rotations(model: Any, position: jax.Array, frequency: jax.Array | None = None) -> Turns:
    """The rotations of q, times the logits' scale, and of k. frequency: None means the model's."""
    if frequency is None:
        frequency = frequencies(model.d_head, model.rope_max_timescale, model.rope_scaling)
    factor = 1.0 if model.rope_scaling is None else model.rope_scaling.attention_factor
    turn = functools.partial(rotary, position=position, frequency=frequency)
    return functools.partial(turn, factor=factor * model.logits_scale), functools.partial(turn, factor=factor)


def without_rotations(model: Any) -> Turns:
    """No rotations, in a model whose positions are learned."""
    return (lambda q: q * model.d_head**-0.5), (lambda k: k)


# == Attention =========================================================================================================
@dataclass(frozen=True)
class Mask:
    """The keys that a query sees, and caps of logits; `attend` applies them to q that is already scaled."""

    window: int | tuple[int, ...] | None = None  # positions that a query sees, with its own; a tuple: by layer
    cap: float | None = None  # attention's logits are cap · tanh(logits / cap)
    logits_cap: float | None = None  # soft cap of the tokens' logits
    is_causal: bool = True  # else a query sees all of its segment, without window or cap

    def by_layer(self) -> jax.Array | None:
        """The windows, to be scanned with the layers; None if all layers have the same."""
        return jnp.asarray(self.window, jnp.int32) if isinstance(self.window, tuple) else None

    def of_layer(self, scanned: jax.Array | None) -> int | jax.Array | None:
        """A layer's window, given its part of `by_layer`."""
        return self.window if scanned is None else scanned


def causal(model: Any) -> Mask:
    """The mask of a model that has no window and no cap."""
    return Mask()


# == Halves of a layer =================================================================================================
# An optional weight is used if it is there: biases, norms of q and k, the gate. `norms` are the scales of the norms
# before a half and behind it.
Norms = tuple[jax.Array | None, jax.Array | None]


def there(w: Any, name: str) -> Any:
    """One of a layer's weights; None if the family or the model does not have it."""
    return getattr(w, name, None)


@typed
def attention_half(
    model: Any, x: jax.Array, w: Any, attend: Callable, turns: Turns, norms: Norms, M: str
) -> tuple[jax.Array, Any]:
    """The attention half's output, to be added to x, and what `attend` returns besides. x has the dims 'B/b L/c' and M.

    Args:
      attend: `attend(q, k, v)` returns o and what a cache keeps of k and v. It saves what backward needs. q is scaled
        already.
      turns: functions of q and of k before attention, such as `rotations`.
    """
    x: act[f'B/b L/c {M}'] = x
    with jax.named_scope('attention'):
        gathered = save_for_backward(gather_residual(x, M))  # 2M bytes a token, in the place of the input's 2M/t
        normed = gathered if norms[0] is None else norm(gathered, norms[0], model.norm_eps)
        q, k, v = projected(model, normed, w)
        o, kept = attend(turns[0](q), turns[1](k)[:, :, 0], v)
        return behind(model, reduce_residual(joined(o, w), M), there(w, 'b_o'), norms[1], M), kept


@typed
def projected(
    model: Any, x: act['B/b L/c M'], w: Any
) -> tuple[act['B/b L/c Q K/t D'], act['B/b L/c P K/t D'], act['B/b L/c K/t D']]:
    """q, k and v. k has a dim P of 1 instead of Q, and so has q if no heads share keys."""
    q = product(f'B/b L/c M, M {w.heads} -> B/b L/c {w.heads}', x, w.w_q)
    k = product('B/b L/c M, M K/t D -> B/b L/c K/t D', x, w.w_k)[:, :, None]
    v = product('B/b L/c M, M K/t D -> B/b L/c K/t D', x, w.w_v)
    q = q[:, :, None] if w.heads == 'K/t D' else q
    if there(w, 'b_q') is not None:
        q, k, v = q + w.b_q[None, None], k + w.b_kv[0][None, None, None], v + w.b_kv[1][None, None]
    if there(w, 'b_qkv') is not None:
        q, k, v = q + w.b_qkv[0][None, None, None], k + w.b_qkv[1][None, None, None], v + w.b_qkv[2][None, None]
    if there(w, 'q_norm') is not None:
        q, k = head_norm(q, w.q_norm, model.norm_eps), head_norm(k, w.k_norm, model.norm_eps)
    if there(w, 'q_norm_all') is not None:
        q, k = heads_norm(q, w.q_norm_all, model.norm_eps), heads_norm(k, w.k_norm_all[None], model.norm_eps)
    return q, k, v


@typed
def joined(o: act['B/b L/c Q K/t D'], w: Any) -> act['B/b L/c M +t']:
    """The results of all heads, times w_o."""
    o = o[:, :, 0] if w.heads == 'K/t D' else o
    return product(f'B/b L/c {w.heads}, M {w.heads} -> B/b L/c M +t', o, w.w_o)


@typed
def feed_forward_half(model: Any, x: jax.Array, w: Any, activation: Callable, norms: Norms, M: str) -> jax.Array:
    """The feed-forward half's output, to be added to x, which has the dims 'B/b L/c' and M."""
    with jax.named_scope('ffn'):
        gathered = save_for_backward(gather_residual(x, M))  # 2M bytes a token, spares w_o's product, its sum, gather
        normed = gathered if norms[0] is None else norm(gathered, norms[0], model.norm_eps)
        return behind(model, reduce_residual(feed_forward(normed, w, activation), M), there(w, 'b_down'), norms[1], M)


def behind(model: Any, y: jax.Array, bias: jax.Array | None, scale: jax.Array | None, M: str) -> jax.Array:
    """A half's output y, with the bias and norm after it, if any."""
    y = y if bias is None else y + part(bias, M)[None, None]
    if scale is None:
        return y
    y = save_for_backward(y)  # 2M/t bytes a token, spares the half's last product and its sum
    return norm(y, scale, model.norm_eps, M)


@typed
def feed_forward(x: act['B/b L/c M'], w: Any, activation: Callable) -> act['B/b L/c M +t']:
    """activation(x·w_up + b_up) · w_down; with a gate (activation(x·w_gate) * (x·w_up)) · w_down. b_down is the
    caller's to add, once the sum over t is taken."""
    gate = there(w, 'w_gate')
    if gate is not None:
        gate = product('B/b L/c M, M F/t -> B/b L/c F/t', x, gate)
        gate = save_for_backward(gate)  # 2F/t bytes a token, spares a product with w_gate
    up = product('B/b L/c M, M F/t -> B/b L/c F/t', x, w.w_up)
    up = up if there(w, 'b_up') is None else up + w.b_up[None, None]
    up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
    hidden = activation(up) if gate is None else activation(gate) * up
    return product('B/b L/c F/t, M F/t -> B/b L/c M +t', hidden, w.w_down)


# == How a step runs the layers ========================================================================================
@dataclass(frozen=True, kw_only=True)
class Options:
    """The defaults are those of a forward pass alone, FORWARD."""

    reduce_dtype: str = 'float32'  # type in which gradients are sent: training.gradient_reduce_dtype
    # A layer keeps for the backward pass (training.save_for_backward): 'everything' on `save_for_backward` lines,
    # on the device; those values 'on_host', copied there and back; or only its 'inputs'.
    kept: str = 'everything'
    unroll: bool = False
    fp8: bool = False  # matrices are gathered and multiplied as 8-bit numbers (`products.Float8`)
    dropout: Dropout | None = None  # on the output of each half of a layer, before its bias and norm; in training only
    adapt: Callable = lambda w, low: w  # adapt(gathered layer, one layer of `low`) puts adapters (`Adapted`) in
    low: Any = None  # adapters of the layers; for T5 a pair, the encoder's and the decoder's

    def in_use(self, family: Any) -> Callable:
        """Gathers a layer, and puts its adapters in."""
        return lambda w, ready, low: self.adapt(family.gather_layer(w, self.reduce_dtype, ready), low)

    def numbers(self, first: int, count: int) -> jax.Array | None:
        """The numbers of layers, which dropout needs."""
        return None if self.dropout is None else jnp.arange(first, first + count, dtype=jnp.uint32)


FORWARD = Options()


def scanned(layer: Callable, model: Any, x: jax.Array, stack: Any, in_use: Callable, calls: Callable, how: Options):
    """x, 'B/b L/c M/t', after all layers, and what each layer's router did.

    Args:
      layer: a family's.
      stack: for each layer the arguments of `in_use`, its window, and its number, which dropout needs.
      in_use: returns the layer's `Gathered`.
      calls: `calls(window, drop)` returns a layer's arguments after its weights.
    """
    names = () if how.kept == 'inputs' else ('save_for_backward',)

    @functools.partial(explicit_activation_checkpointing, names=names, on_host=how.kept == 'on_host')
    def one(x, of_layer):
        parts, window, number = of_layer
        drop = None if number is None else how.dropout.of_layer(number)
        M = 'M/t' if drop is None else Residual(drop)
        x, _, routing = layer(model, x, in_use(*parts), *calls(window, drop), M)
        return x, routing

    return lax.scan(one, x, stack, unroll=how.unroll)


# == From tokens to hidden states ======================================================================================
@typed
def inputs_of(batch: TokenBatch, bos_id: int) -> tuple[u32['B/b L'], i32['B/b L'], i32['B/b L']]:
    """For each target the token before it, the number of its segment, and its position there."""
    first = batch.is_seq_start.at[:, 0].set(True)
    inputs = jnp.where(first, jnp.uint32(bos_id), jnp.roll(batch.targets, 1, axis=1))
    # Not by jnp.broadcast_to, which does nothing where a device holds one row: another program, to the check.
    place = lax.broadcast_in_dim(jnp.arange(first.shape[1], dtype=jnp.int32), first.shape, (1,))
    position = place - lax.cummax(jnp.where(first, place, 0), axis=1)
    return inputs, jnp.cumsum(first, axis=1, dtype=jnp.int32), position


def rows_of_tokens(table, tokens, M: str):
    """Rows of a table 'V/t M', laid out like the residual."""

    @explicit_activation_checkpointing  # else a mask of M bytes a token
    @typed
    def rows(table: act['V/t M'], tokens: u32['B/b L/c']) -> act['B/b L/c M +t']:
        return shardops.index_unreduced('[V/t] M, B/b L/c -> B/b L/c M +t', table, tokens)

    return reduce_residual(rows(table, tokens), M)


@typed
def rows_of_learned(table: act['P M'], numbers: i32['B/b L/c'], M: str) -> jax.Array:
    """Rows of a table that all devices hold, laid out like the residual."""
    table = table if M == 'M' else shardops.slice('P M -> P M/t', table)
    return shardops.index_unreduced(f'[P] {M}, B/b L/c -> B/b L/c {M}', table, numbers)


@typed
def embed(model: Any, ends: Any, tokens: u32['B/b L/c'], position: Any, M: str) -> jax.Array:
    """The input of the first layer, for families without learned positions."""
    return rows_of_tokens(ends.embed, tokens, M)


@typed
def final(model: Any, ends: Any, x: jax.Array, M: str) -> act['B/b L/c M']:
    """The input of the unembedding, from the last layer's result."""
    return norm(gather_residual(x, M), ends.final_layer_norm, model.norm_eps)


def learned_positions(model: Any) -> int | None:
    """The longest row that the model has positions for; None: any length."""
    return model.positions - getattr(model, 'first_position', 0) if hasattr(model, 'positions') else None


def require_positions(model: Any, length: int) -> None:
    """Raises RunError for rows that are longer than the table of positions."""
    learned = learned_positions(model)
    if learned is not None and length > learned:
        raise RunError(f'rows of {length} tokens: the model has {learned} positions: shorten training.tokens.len')


def hidden(
    family: Any, model: Any, weights: Any, inputs: jax.Array, segment: jax.Array, position: jax.Array, *,
    ends: Any = None, how: Options = FORWARD, along_c: Context = ALONE,
):  # fmt: skip
    """The hidden states before the unembedding, act['B/b L/c M'], of any family; and what each layer's router did
    (models/experts.py), None without experts.

    Args:
      family: a module of models/.
      inputs, segment, position: as in `inputs_of`.
      ends: `family.gather_ends`, if the caller has it already.
      along_c: how positions on several devices attend to each other.
    Raises:
      RunError: the rows are longer than a table of positions.
    """
    require_positions(model, inputs.shape[1])
    ends = ends or family.gather_ends(weights, how.reduce_dtype)
    with jax.named_scope('embed'):
        x = family.embed(model, ends, along_c.part(inputs), along_c.part(position), 'M/t')
    of_layers = family.TABLE.of_all_layers('transformer', weights.transformer, how.reduce_dtype, how.fp8)
    stack = (*of_layers, how.low), family.mask(model).by_layer(), how.numbers(0, model.layers)
    x, routing = through(family, model, x, stack, how.in_use(family), segment, position, how, along_c)
    return ended(family.final, model, ends, x), routing


def through(family, model, x, stack, in_use: Callable, segment, position, how: Options, along_c: Context):
    """`scanned` with the attention that the family's mask describes; arguments as in `scanned` and `hidden`."""
    mask, rows, position = family.mask(model), Rows(along_c, segment), along_c.part(position)

    def calls(window, drop):
        def attend(q, k, v):
            if not mask.is_causal:
                return rows.both_ways(q, k, v, drop), None
            return rows.attention(model.attention, q, k, v, attend.window, mask.cap, drop), None

        attend.window = mask.of_layer(window)
        return attend, position

    return scanned(family.layer, model, x, stack, in_use, calls, how)


@jax.named_scope('final_norm')
def ended(final: Callable, model, ends, x):
    """act['B/b L/c M'], the input of the logits, from the last layer's result: keeps that gathered, 2M bytes a token,
    and not the norm's float32 values."""
    head = functools.partial(final, model, M='M')
    return explicit_activation_checkpointing(head)(ends, gather_residual(x, 'M/t'))


# == Loss ==============================================================================================================
@typed
def logits_of(unembed: Any, x: act['B/b L/c M'], cap: float | None = None, V: str = 'V/t') -> jax.Array:
    """Logits in float32, 'B/b L/c V/t', by act['V/t M'] or `Biased`; with a cap, cap · tanh(logits / cap). V: another
    layout of the vocabulary, 'V/u'."""
    table = unembed.table if isinstance(unembed, Biased) else unembed
    string = f'B/b L/c M, {V} M -> B/b L/c {V}'
    logits = shardops.einsum_unreduced(string, x, table, preferred_element_type=jnp.float32)
    logits = logits + unembed.bias[None, None] if isinstance(unembed, Biased) else logits
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@typed
def loss_sum(
    unembed: Any, x: act['B/b L/c M'], batch: TokenBatch, cap: float | None = None, weight: f32['B/b L'] | None = None,
    z_loss: float = 0.0, along_c: Context = ALONE, V: str = 'V/t',
) -> jax.Array:  # fmt: skip
    """The sum of -log softmax over all targets, as train.py's, f32['+b +c +t']: a chunk of positions at a time, no
    logits are sent.

    Args:
      weight: each target's, such as WeightedBatch's; None: 1.
      z_loss: this times each target's log² Z is added, Z being the sum that softmax divides by: it keeps logits from
        drifting (Chowdhery et al. 2022, section 5, with 1e-4).
      along_c: as in `hidden`.
      V: how the vocabulary lies; the sum is pending over its axes.
    """
    owed = f'+{V.partition("/")[2]}'
    weight: f32['B/b L'] = batch.is_target.astype(jnp.float32) if weight is None else weight

    @explicit_activation_checkpointing
    def chunk_loss(unembed: Any, x: act['B/b L/c M'], others: tuple[u32['B/b L/c'], f32['B/b L/c']]) -> jax.Array:
        targets, weight = others
        logits = save_for_backward(logits_of(unembed.astype(act.dtype), x, cap, V))  # 4V/t bytes a token of one chunk
        largest = shardops.pmax(f'B/b L/c {V} -> B/b L/c', lax.stop_gradient(logits))
        largest = save_for_backward(largest)  # 4 bytes a token of one chunk, spares the maximum over t
        total = shardops.sum_unreduced(f'B/b L/c {V} -> B/b L/c {owed}', jnp.exp(logits - largest[..., None]))
        total = shardops.psum(f'B/b L/c {owed} -> B/b L/c', total)
        total = save_for_backward(total)  # 4 bytes a token of one chunk, spares the sum over t
        log_normalizer = largest + jnp.log(total)
        at_target = shardops.index_unreduced(f'B/b L/c [{V}], B/b L/c -> B/b L/c {owed}', logits, targets)
        if z_loss:
            log_normalizer = log_normalizer + z_loss * log_normalizer**2
        loss = shardops.pending(f'B/b L/c -> B/b L/c {owed}', log_normalizer) - at_target
        return shardops.sum_unreduced(f'B/b L/c {owed} -> +b +c {owed}', loss * weight)

    # Each device's own positions in chunks; the config's mesh says how many.
    length = batch.targets.shape[1] // along_c.devices
    chunks = length // max(size for size in range(1, train.LOSS_CHUNK + 1) if length % size == 0)

    def in_chunks(part, M=''):
        return jnp.moveaxis(shardops.regroup(f'B/b L/c{M} -> B/b chunks P/c{M}', part, chunks=chunks), 1, 0)

    x, others = in_chunks(x, ' M'), (in_chunks(along_c.part(batch.targets)), in_chunks(along_c.part(weight)))
    # Float32, so that its gradient adds up over chunks in float32; the products are in act's type.
    return shardops.sum_over_chunks(chunk_loss, unembed.astype(jnp.float32), x, others)
