"""Llama 1 to 3.3, SmolLM2, Mistral, Qwen2, Qwen3 and OLMo 2: what they differ in are fields of `Model`.

With the defaults this is train.py's model, and the weights have its names: its checkpoints are read here as they are.
Legend as in train.py. models/layers.py says what a family's file holds and who calls it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_extra import fold_in_str, save_for_backward
from kernels.attention import KernelName
from models import layers
from models.layers import ALL, Mask, RopeScaling, act, enter, head_norm, heads_norm, leave, norm_after, rms_norm, stored
from runtime.config.keys import Count, Even, Positive, Steps
from shardlib import shardops
from shardlib.shardops import product
from shardlib.shardtypes import Array, f32, i32, pytree_dataclass, u32
from shardlib.typed import typed


@dataclass(frozen=True, kw_only=True)
class Model:
    d_model: Count  # M
    n_q_per_kv: Count  # Q
    n_kv: Count  # K
    d_head: Even  # D
    layers: Count
    vocab: Count  # V
    d_ff: Count  # F
    rope_max_timescale: Positive  # base of the rotary angles
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-6  # added to the mean square in RMSNorm
    logits_scale: Positive = 1.0  # attention's logits are q·k times this; 1: the factor is in w_q, as in train.py
    tied: bool = False  # one table at both ends: there is no `unembed`
    qkv_bias: bool = False  # added to q, k and v (Qwen2)
    qk_norm: Literal['none', 'head', 'all'] = 'none'  # of each head by itself (Qwen3), or of all together (OLMo 2)
    norm_after: bool = False  # norms stand behind attention and feed-forward, not before (OLMo 2)
    window: Count | None = None  # positions that a query sees, its own included (Mistral 7B v0.1)
    window_from: Steps = 0  # the first layer that has the window (Qwen2)
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations and matrix products
    attention: KernelName = 'auto'  # of kernels/attention.py


def mask(model: Model) -> Mask:
    if model.window is None or not model.window_from:
        return Mask(model.window)
    return Mask(tuple(model.window if n >= model.window_from else ALL for n in range(model.layers)))


# == Weights ===========================================================================================================
@pytree_dataclass
class Layer:
    ln1: f32['M/d/t']
    ln2: f32['M/d/t']
    w_q: stored['M/d Q K/t D']
    w_kv: stored['2 M/d K/t D']
    w_o: stored['M/d Q K/t D']
    w_gate: stored['M/d F/t']
    w_up: stored['M/d F/t']
    w_down: stored['M/d F/t']
    b_q: f32['Q K/t D/d'] | None = None
    b_kv: f32['2 K/t D/d'] | None = None
    q_norm: f32['D/d/t'] | None = None
    k_norm: f32['D/d/t'] | None = None
    q_norm_all: f32['Q K/t D/d'] | None = None
    k_norm_all: f32['K/t D/d'] | None = None


@pytree_dataclass
class Weights:
    embed: stored['V/t M/d']
    unembed: stored['V/t M/d'] | None
    transformer: Array['layers', Layer]
    final_layer_norm: f32['M/d/t']


@pytree_dataclass
class Gathered:
    """What a layer multiplies with; a matrix may be `Adapted`."""

    ln1: f32['M']
    ln2: f32['M']
    w_q: act['M Q K/t D']
    w_k: act['M K/t D']
    w_v: act['M K/t D']
    w_o: act['M Q K/t D']
    w_gate: act['M F/t']
    w_up: act['M F/t']
    w_down: act['M F/t']
    b_q: act['Q K/t D'] | None
    b_kv: act['2 K/t D'] | None
    q_norm: f32['D'] | None
    k_norm: f32['D'] | None
    q_norm_all: f32['Q K/t D'] | None
    k_norm_all: f32['K/t D'] | None


@pytree_dataclass
class Ends:
    """What stands before the first layer and after the last, gathered."""

    embed: act['V/t M']
    unembed: act['V/t M']
    final_layer_norm: f32['M']


def init(model: Model, seed: jax.Array) -> Weights:
    """The first weights; with the defaults, train.py's of that seed."""
    M, F, V = model.d_model, model.d_ff, model.vocab
    Q, K, D = model.n_q_per_kv, model.n_kv, model.d_head

    def normal(name, shape, fan_in, scale=1.0):
        key = fold_in_str(jax.random.key(seed), name)
        shape = shape if name.endswith('embed') else (model.layers, *shape)
        return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) * (scale / 0.87962566 / fan_in**0.5)

    def constant(value, *shape, only_if=True):
        return jnp.full((model.layers, *shape), value, jnp.float32) if only_if else None

    layer = Layer(
        ln1=constant(1, M),
        ln2=constant(1, M),
        w_q=normal('w_q', (M, Q, K, D), M, scale=D**-0.5 / model.logits_scale),
        w_kv=normal('w_kv', (2, M, K, D), M),
        w_o=normal('w_o', (M, Q, K, D), Q * K * D),
        w_gate=normal('w_gate', (M, F), M),
        w_up=normal('w_up', (M, F), M),
        w_down=normal('w_down', (M, F), F),
        b_q=constant(0, Q, K, D, only_if=model.qkv_bias),
        b_kv=constant(0, 2, K, D, only_if=model.qkv_bias),
        q_norm=constant(1, D, only_if=model.qk_norm == 'head'),
        k_norm=constant(1, D, only_if=model.qk_norm == 'head'),
        q_norm_all=constant(1, Q, K, D, only_if=model.qk_norm == 'all'),
        k_norm_all=constant(1, K, D, only_if=model.qk_norm == 'all'),
    )
    embed, unembed = normal('embed', (V, M), M), None if model.tied else normal('unembed', (V, M), M)
    return Weights(embed, unembed, layer, jnp.ones((M,), jnp.float32))


@typed
def gather_layer(w: Layer, reduce_dtype: str = 'float32') -> Gathered:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)

    def if_there(gather, string, w):
        return None if w is None else gather(string, w)

    return Gathered(
        ln1=shardops.all_gather('M/d/t -> M', w.ln1),
        ln2=shardops.all_gather('M/d/t -> M', w.ln2),
        w_q=gather('M/d Q K/t D -> M Q K/t D', w.w_q),
        w_k=gather('M/d K/t D -> M K/t D', w.w_kv[0]),
        w_v=gather('M/d K/t D -> M K/t D', w.w_kv[1]),
        w_o=gather('M/d Q K/t D -> M Q K/t D', w.w_o),
        w_gate=gather('M/d F/t -> M F/t', w.w_gate),
        w_up=gather('M/d F/t -> M F/t', w.w_up),
        w_down=gather('M/d F/t -> M F/t', w.w_down),
        b_q=if_there(gather, 'Q K/t D/d -> Q K/t D', w.b_q),
        b_kv=if_there(gather, '2 K/t D/d -> 2 K/t D', w.b_kv),
        q_norm=if_there(shardops.all_gather, 'D/d/t -> D', w.q_norm),
        k_norm=if_there(shardops.all_gather, 'D/d/t -> D', w.k_norm),
        q_norm_all=if_there(shardops.all_gather, 'Q K/t D/d -> Q K/t D', w.q_norm_all),
        k_norm_all=if_there(shardops.all_gather, 'K/t D/d -> K/t D', w.k_norm_all),
    )


@typed
def gather_ends(weights: Weights, reduce_dtype: str = 'float32') -> Ends:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    embed = gather('V/t M/d -> V/t M', weights.embed)
    unembed = embed if weights.unembed is None else gather('V/t M/d -> V/t M', weights.unembed)
    return Ends(embed, unembed, shardops.all_gather('M/d/t -> M', weights.final_layer_norm))


# == Forward pass ======================================================================================================
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/d L'], position: i32['B/d L'], M: str) -> jax.Array:
    return layers.embed(ends.embed, tokens, M)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/d L'], M: str
) -> tuple[jax.Array, Any]:
    """One layer; x lies as 'B/d L' with M. `attend(q, k, v)` returns o and what of k and v is to be kept, which the
    layer hands on; the logits are q·k, no factor."""
    x: act[f'B/d L {M}'] = x

    with jax.named_scope('attention'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
        normed = gathered if model.norm_after else rms_norm(gathered, w.ln1, model.norm_eps)
        q = product('B/d L M, M Q K/t D -> B/d L Q K/t D', normed, w.w_q)
        k = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_k)[:, :, None]
        v = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_v)
        if model.qkv_bias:
            q, k, v = q + w.b_q[None, None], k + w.b_kv[0][None, None, None], v + w.b_kv[1][None, None]
        if model.qk_norm == 'head':
            q, k = head_norm(q, w.q_norm, model.norm_eps), head_norm(k, w.k_norm, model.norm_eps)
        if model.qk_norm == 'all':
            q, k = heads_norm(q, w.q_norm_all, model.norm_eps), heads_norm(k, w.k_norm_all[None], model.norm_eps)
        rope = layers.frequencies(q.shape[-1], model.rope_max_timescale, model.rope_scaling)
        factor = 1.0 if model.rope_scaling is None else model.rope_scaling.attention_factor
        q = save_for_backward(layers.rotary(q, position, rope, factor * model.logits_scale))  # 2QKD/t bytes a token
        k = save_for_backward(layers.rotary(k, position, rope, factor)[:, :, 0])  # 2KD/t bytes a token
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v
        o, kept = attend(q, k, v)
        y = leave(product('B/d L Q K/t D, M Q K/t D -> B/d L M +t', o, w.w_o), M)
        x = x + (norm_after(y, w.ln1, model.norm_eps, M) if model.norm_after else y)

    with jax.named_scope('ffn'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, spares the product with w_o, its sum, the gather
        normed = gathered if model.norm_after else rms_norm(gathered, w.ln2, model.norm_eps)
        gate = product('B/d L M, M F/t -> B/d L F/t', normed, w.w_gate)
        gate = save_for_backward(gate)  # 2F/t bytes a token, spares a product with w_gate
        up = product('B/d L M, M F/t -> B/d L F/t', normed, w.w_up)
        up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
        y = leave(product('B/d L F/t, M F/t -> B/d L M +t', jax.nn.silu(gate) * up, w.w_down), M)
        return x + (norm_after(y, w.ln2, model.norm_eps, M) if model.norm_after else y), kept


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/d L M']:
    """The hidden states that logits are computed from."""
    return rms_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == Published names ===================================================================================================
def published(model: Model) -> dict[str, list[tuple[str, str]]]:
    """Of each of the weights the published tensors it is made of, and how each lies there -> here."""
    before = ('input', 'post_attention') if not model.norm_after else ('post_attention', 'post_feedforward')
    layer, attention = 'model.layers.{}', 'model.layers.{}.self_attn'
    rows = {
        'embed': [('model.embed_tokens.weight', 'V M -> V M')],
        'unembed': [('lm_head.weight', 'V M -> V M')],
        'transformer/ln1': [(f'{layer}.{before[0]}_layernorm.weight', 'M -> M')],
        'transformer/ln2': [(f'{layer}.{before[1]}_layernorm.weight', 'M -> M')],
        'transformer/w_q': [(f'{attention}.q_proj.weight', '(K Q D) M -> M Q K D')],
        'transformer/w_kv': [(f'{attention}.{x}_proj.weight', '(K D) M -> M K D') for x in 'kv'],
        'transformer/w_o': [(f'{attention}.o_proj.weight', 'M (K Q D) -> M Q K D')],
        'transformer/w_gate': [(f'{layer}.mlp.gate_proj.weight', 'F M -> M F')],
        'transformer/w_up': [(f'{layer}.mlp.up_proj.weight', 'F M -> M F')],
        'transformer/w_down': [(f'{layer}.mlp.down_proj.weight', 'M F -> M F')],
        'final_layer_norm': [('model.norm.weight', 'M -> M')],
    }
    if model.tied:
        del rows['unembed']
    if model.qkv_bias:
        rows['transformer/b_q'] = [(f'{attention}.q_proj.bias', '(K Q D) -> Q K D')]
        rows['transformer/b_kv'] = [(f'{attention}.{x}_proj.bias', '(K D) -> K D') for x in 'kv']
    if model.qk_norm == 'head':
        rows |= {f'transformer/{x}_norm': [(f'{attention}.{x}_norm.weight', 'D -> D')] for x in 'qk'}
    if model.qk_norm == 'all':
        rows['transformer/q_norm_all'] = [(f'{attention}.q_norm.weight', '(K Q D) -> Q K D')]
        rows['transformer/k_norm_all'] = [(f'{attention}.k_norm.weight', '(K D) -> K D')]
    return rows


def model_of(config) -> Model:
    """The model that a published config.json describes.

    Args:
      config: models.huggingface.Fields.
    """
    kind, heads, d_model = [config.take(key) for key in ('model_type', 'num_attention_heads', 'hidden_size')]
    count, n_kv = config.take('num_hidden_layers'), config.take('num_key_value_heads', None) or heads
    d_head = config.take('head_dim', None) or d_model // heads
    config.require(hidden_act='silu', attention_bias=False, mlp_bias=False, pretraining_tp=1)
    window, first = config.take('sliding_window', None), 0
    if kind.startswith('qwen'):
        window = window if config.take('use_sliding_window', False) else None
        first = config.take('max_window_layers', 0) if window else 0
    if types := config.take('layer_types', None):
        slides = [window is not None and n >= first for n in range(count)]
        if types != ['sliding_attention' if each else 'full_attention' for each in slides]:
            config.refuse('layer_types', 'the window is that of all layers, or of those from max_window_layers on')
    base, scaling = layers.rope_from(config)
    return Model(
        d_model=d_model,
        n_q_per_kv=heads // n_kv,
        n_kv=n_kv,
        d_head=d_head,
        layers=count,
        vocab=config.take('vocab_size'),
        d_ff=config.take('intermediate_size'),
        rope_max_timescale=base,
        rope_scaling=scaling,
        norm_eps=config.take('rms_norm_eps', 1e-5 if kind == 'olmo2' else 1e-6),
        logits_scale=d_head**-0.5,
        tied=config.take('tie_word_embeddings', False),
        qkv_bias=kind == 'qwen2',
        qk_norm={'qwen3': 'head', 'olmo2': 'all'}.get(kind, 'none'),
        norm_after=kind == 'olmo2',
        window=window,
        window_from=first,
    )


def config_of(model: Model) -> dict[str, Any]:
    """The other way round."""
    kind = 'qwen2' if model.qkv_bias else {'head': 'qwen3', 'all': 'olmo2', 'none': 'llama'}[model.qk_norm]
    kind = 'mistral' if kind == 'llama' and model.window else kind
    of_qwen = {'use_sliding_window': bool(model.window), 'max_window_layers': model.window_from}
    return {
        'model_type': kind,
        'architectures': [f'{ {"olmo2": "Olmo2"}.get(kind, kind.capitalize()) }ForCausalLM'],
        'hidden_size': model.d_model,
        'num_attention_heads': model.n_q_per_kv * model.n_kv,
        'num_key_value_heads': model.n_kv,
        'head_dim': model.d_head,
        'num_hidden_layers': model.layers,
        'vocab_size': model.vocab,
        'intermediate_size': model.d_ff,
        'hidden_act': 'silu',
        'rms_norm_eps': model.norm_eps,
        'tie_word_embeddings': model.tied,
        **({'sliding_window': model.window} if kind in ('mistral', 'qwen2', 'qwen3') else {}),
        **(of_qwen if kind.startswith('qwen') else {}),
        'rope_parameters': layers.rope_to(model.rope_max_timescale, model.rope_scaling),
    }
