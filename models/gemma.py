"""Gemma 1, 2 and 3 (text): what they differ in are fields of `Model`.

Against Llama: one table at both ends, its rows times √M; norms multiply by 1 + w; gelu in the gate. Gemma 2 has norms
behind both halves of a layer too, caps on attention's logits and on the tokens', and a window in every other layer.
Gemma 3 has norms of q and k in place of the caps, and five of six layers with a window, whose rotary base is another.
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
from models.layers import ALL, Mask, RopeScaling, act, enter, head_norm, leave, rms_norm, stored
from runtime.config.keys import Count, Even, Positive
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
    rope_max_timescale: Positive = 10000.0  # base of the rotary angles
    rope_scaling: RopeScaling | None = None  # not of layers with a window, where those have a base of their own
    rope_local_timescale: Positive | None = None  # base of the rotary angles in layers with a window (Gemma 3)
    norm_eps: Positive = 1e-6  # added to the mean square in RMSNorm
    logits_scale: Positive  # attention's logits are q·k times this
    norm_after: bool = False  # norms stand behind attention and feed-forward too (Gemma 2 and 3)
    qk_norm: Literal['none', 'head'] = 'none'  # of each head by itself (Gemma 3)
    attention_cap: Positive | None = None  # attention's logits are cap · tanh(logits / cap) (Gemma 2)
    logits_cap: Positive | None = None  # the same of the logits of tokens (Gemma 2)
    window: Count | None = None  # positions that a query sees, its own included (Gemma 2 and 3)
    global_every: Count = 1  # with a window, every so many-th layer sees all
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations and matrix products
    attention: KernelName = 'auto'  # of kernels/attention.py


def mask(model: Model) -> Mask:
    windows = None
    if model.window is not None:
        windows = tuple(model.window if (n + 1) % model.global_every else ALL for n in range(model.layers))
    return Mask(windows, model.attention_cap, model.logits_cap)


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
    ln1_after: f32['M/d/t'] | None = None
    ln2_after: f32['M/d/t'] | None = None
    q_norm: f32['D/d/t'] | None = None
    k_norm: f32['D/d/t'] | None = None


@pytree_dataclass
class Weights:
    embed: stored['V/t M/d']
    transformer: Array['layers', Layer]
    final_layer_norm: f32['M/d/t']


@pytree_dataclass
class Gathered:
    """What a layer multiplies with; a matrix may be `Adapted`. Norms are 1 + w here."""

    ln1: f32['M']
    ln2: f32['M']
    w_q: act['M Q K/t D']
    w_k: act['M K/t D']
    w_v: act['M K/t D']
    w_o: act['M Q K/t D']
    w_gate: act['M F/t']
    w_up: act['M F/t']
    w_down: act['M F/t']
    ln1_after: f32['M'] | None
    ln2_after: f32['M'] | None
    q_norm: f32['D'] | None
    k_norm: f32['D'] | None


@pytree_dataclass
class Ends:
    """What stands before the first layer and after the last, gathered."""

    embed: act['V/t M']
    unembed: act['V/t M']
    final_layer_norm: f32['M']


def init(model: Model, seed: jax.Array) -> Weights:
    """The first weights: norms are 0, which stands for 1."""
    M, F, V = model.d_model, model.d_ff, model.vocab
    Q, K, D = model.n_q_per_kv, model.n_kv, model.d_head

    def normal(name, shape, fan_in, scale=1.0):
        key = fold_in_str(jax.random.key(seed), name)
        return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) * (scale / 0.87962566 / fan_in**0.5)

    def of_layers(name, *shape, fan_in, scale=1.0):
        return normal(name, (model.layers, *shape), fan_in, scale)

    def zeros(*shape, only_if=True):
        return jnp.zeros((model.layers, *shape), jnp.float32) if only_if else None

    layer = Layer(
        ln1=zeros(M),
        ln2=zeros(M),
        w_q=of_layers('w_q', M, Q, K, D, fan_in=M, scale=D**-0.5 / model.logits_scale),
        w_kv=of_layers('w_kv', 2, M, K, D, fan_in=M),
        w_o=of_layers('w_o', M, Q, K, D, fan_in=Q * K * D),
        w_gate=of_layers('w_gate', M, F, fan_in=M),
        w_up=of_layers('w_up', M, F, fan_in=M),
        w_down=of_layers('w_down', M, F, fan_in=F),
        ln1_after=zeros(M, only_if=model.norm_after),
        ln2_after=zeros(M, only_if=model.norm_after),
        q_norm=zeros(D, only_if=model.qk_norm == 'head'),
        k_norm=zeros(D, only_if=model.qk_norm == 'head'),
    )
    return Weights(normal('embed', (V, M), M), layer, jnp.zeros((M,), jnp.float32))


@typed
def gather_layer(w: Layer, reduce_dtype: str = 'float32') -> Gathered:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    return Gathered(
        ln1=1 + shardops.all_gather('M/d/t -> M', w.ln1),
        ln2=1 + shardops.all_gather('M/d/t -> M', w.ln2),
        w_q=gather('M/d Q K/t D -> M Q K/t D', w.w_q),
        w_k=gather('M/d K/t D -> M K/t D', w.w_kv[0]),
        w_v=gather('M/d K/t D -> M K/t D', w.w_kv[1]),
        w_o=gather('M/d Q K/t D -> M Q K/t D', w.w_o),
        w_gate=gather('M/d F/t -> M F/t', w.w_gate),
        w_up=gather('M/d F/t -> M F/t', w.w_up),
        w_down=gather('M/d F/t -> M F/t', w.w_down),
        ln1_after=None if w.ln1_after is None else 1 + shardops.all_gather('M/d/t -> M', w.ln1_after),
        ln2_after=None if w.ln2_after is None else 1 + shardops.all_gather('M/d/t -> M', w.ln2_after),
        q_norm=None if w.q_norm is None else 1 + shardops.all_gather('D/d/t -> D', w.q_norm),
        k_norm=None if w.k_norm is None else 1 + shardops.all_gather('D/d/t -> D', w.k_norm),
    )


@typed
def gather_ends(weights: Weights, reduce_dtype: str = 'float32') -> Ends:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    embed = gather('V/t M/d -> V/t M', weights.embed)
    return Ends(embed, embed, 1 + shardops.all_gather('M/d/t -> M', weights.final_layer_norm))


# == Forward pass ======================================================================================================
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/d L'], position: i32['B/d L'], M: str) -> jax.Array:
    """Rows of the table times √M, which is rounded to the compute type first, as transformers does."""
    return layers.embed(ends.embed, tokens, M) * jnp.asarray(model.d_model**0.5, act.dtype)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/d L'], M: str
) -> tuple[jax.Array, Any]:
    """One layer; x lies as 'B/d L' with M. `attend(q, k, v)` returns o and what of k and v is to be kept, which the
    layer hands on; the logits are q·k, no factor."""
    x: act[f'B/d L {M}'] = x

    with jax.named_scope('attention'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
        normed = rms_norm(gathered, w.ln1, model.norm_eps)
        q = product('B/d L M, M Q K/t D -> B/d L Q K/t D', normed, w.w_q)
        k = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_k)[:, :, None]
        v = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_v)
        rope = layers.frequencies(q.shape[-1], model.rope_max_timescale, model.rope_scaling)
        if model.rope_local_timescale is not None and model.window is not None:
            local = layers.frequencies(q.shape[-1], model.rope_local_timescale, None)
            rope = jnp.where(attend.window < ALL, local, rope)
        if model.qk_norm == 'head':
            q, k = head_norm(q, w.q_norm, model.norm_eps), head_norm(k, w.k_norm, model.norm_eps)
        q = save_for_backward(layers.rotary(q, position, rope, model.logits_scale))  # 2QKD/t bytes a token
        k = save_for_backward(layers.rotary(k, position, rope)[:, :, 0])  # 2KD/t bytes a token
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v
        o, kept = attend(q, k, v)
        y = leave(product('B/d L Q K/t D, M Q K/t D -> B/d L M +t', o, w.w_o), M)
        if model.norm_after:
            y = save_for_backward(y)  # 2M/t bytes a token, spares the product with w_o and its sum
            y = layers.norm_after(y, w.ln1_after, model.norm_eps, M)
        x = x + y

    with jax.named_scope('ffn'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, spares the product with w_o, its sum, the gather
        normed = rms_norm(gathered, w.ln2, model.norm_eps)
        gate = product('B/d L M, M F/t -> B/d L F/t', normed, w.w_gate)
        gate = save_for_backward(gate)  # 2F/t bytes a token, spares a product with w_gate
        up = product('B/d L M, M F/t -> B/d L F/t', normed, w.w_up)
        up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
        y = leave(product('B/d L F/t, M F/t -> B/d L M +t', jax.nn.gelu(gate) * up, w.w_down), M)
        if model.norm_after:
            y = save_for_backward(y)  # 2M/t bytes a token, spares the product with w_down and its sum
            y = layers.norm_after(y, w.ln2_after, model.norm_eps, M)
        return x + y, kept


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/d L M']:
    """The hidden states that logits are computed from."""
    return rms_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == Published names ===================================================================================================
def published(model: Model) -> dict[str, list[tuple[str, str]]]:
    """Of each of the weights the published tensors it is made of, and how each lies there -> here."""
    layer, attention = 'model.layers.{}', 'model.layers.{}.self_attn'
    norms = {'ln1': 'input', 'ln2': 'post_attention'}
    if model.norm_after:
        norms = {'ln1': 'input', 'ln1_after': 'post_attention'}
        norms |= {'ln2': 'pre_feedforward', 'ln2_after': 'post_feedforward'}
    rows = {
        'embed': [('model.embed_tokens.weight', 'V M -> V M')],
        'transformer/w_q': [(f'{attention}.q_proj.weight', '(K Q D) M -> M Q K D')],
        'transformer/w_kv': [(f'{attention}.{x}_proj.weight', '(K D) M -> M K D') for x in 'kv'],
        'transformer/w_o': [(f'{attention}.o_proj.weight', 'M (K Q D) -> M Q K D')],
        'transformer/w_gate': [(f'{layer}.mlp.gate_proj.weight', 'F M -> M F')],
        'transformer/w_up': [(f'{layer}.mlp.up_proj.weight', 'F M -> M F')],
        'transformer/w_down': [(f'{layer}.mlp.down_proj.weight', 'M F -> M F')],
        'final_layer_norm': [('model.norm.weight', 'M -> M')],
    }
    rows |= {f'transformer/{ours}': [(f'{layer}.{name}_layernorm.weight', 'M -> M')] for ours, name in norms.items()}
    if model.qk_norm == 'head':
        rows |= {f'transformer/{x}_norm': [(f'{attention}.{x}_norm.weight', 'D -> D')] for x in 'qk'}
    return rows


def layer_types(global_every: int, count: int) -> list[str]:
    """What each layer sees, in the words of a config.json."""
    return ['sliding_attention' if (n + 1) % global_every else 'full_attention' for n in range(count)]


def model_of(config) -> Model:
    """The model that a published config.json describes.

    Args:
      config: models.huggingface.Fields.
    """
    kind, heads, count = [config.take(key) for key in ('model_type', 'num_attention_heads', 'num_hidden_layers')]
    n_kv, d_head = config.take('num_key_value_heads', None) or heads, config.take('head_dim', 256)
    config.require(attention_bias=False, tie_word_embeddings=True)
    for key in ('hidden_act', 'hidden_activation'):  # the first releases of Gemma 1 say gelu and mean its approximation
        if config.take(key, None) not in (None, 'gelu_pytorch_tanh', *(['gelu'] if kind == 'gemma' else [])):
            config.refuse(key, "expected 'gelu_pytorch_tanh'")
    of_kind = {}
    if kind != 'gemma':
        every = config.take('_sliding_window_pattern', 6 if kind == 'gemma3_text' else 2)
        every = config.take('sliding_window_pattern', every)
        types = config.take('layer_types', None) or layer_types(every, count)
        every = types.index('full_attention') + 1 if 'full_attention' in types else count + 1
        if types != layer_types(every, count):
            config.refuse('layer_types', f'expected full_attention at the end of each {every} layers, and nowhere else')
        of_kind = {
            'norm_after': True,
            'window': config.take('sliding_window', 4096),
            'global_every': every,
            'logits_cap': config.take('final_logit_softcapping', 30.0 if kind == 'gemma2' else None),
        }
    if kind == 'gemma2':
        of_kind['attention_cap'] = config.take('attn_logit_softcapping', 50.0)
    if kind == 'gemma3_text':
        base, scaling, local = ropes_from(config)
        of_kind |= {'qk_norm': 'head', 'rope_local_timescale': local}
    else:
        base, scaling = layers.rope_from(config)
    return Model(
        d_model=config.take('hidden_size'),
        n_q_per_kv=heads // n_kv,
        n_kv=n_kv,
        d_head=d_head,
        layers=count,
        vocab=config.take('vocab_size'),
        d_ff=config.take('intermediate_size'),
        rope_max_timescale=base,
        rope_scaling=scaling,
        norm_eps=config.take('rms_norm_eps', 1e-6),
        logits_scale=(d_head if kind == 'gemma' else config.take('query_pre_attn_scalar', 256)) ** -0.5,
        **of_kind,
    )


def ropes_from(config) -> tuple[float, RopeScaling | None, float]:
    """Base and scaling of layers that see all, and the base of those with a window: transformers 5 nests them."""
    nested = config.take('rope_parameters', None) or {}
    if 'full_attention' not in nested:
        base, scaling = layers.rope_from(config.replaced(rope_theta=config.take('rope_theta', 1e6)), ('linear',))
        config.take('rope_scaling', None)
        return base, scaling, config.take('rope_local_base_freq', 10000.0)
    base, scaling = layers.rope_from(config.replaced(rope_parameters=nested['full_attention']), ('linear',))
    local, _ = layers.rope_from(config.replaced(rope_parameters=nested['sliding_attention']), ())
    return base, scaling, local


def config_of(model: Model) -> dict[str, Any]:
    """The other way round."""
    kind = 'gemma3_text' if model.qk_norm == 'head' else 'gemma2' if model.norm_after else 'gemma'
    rope = layers.rope_to(model.rope_max_timescale, model.rope_scaling)
    of_kind = (
        {}
        if kind == 'gemma'
        else {
            'query_pre_attn_scalar': round(model.logits_scale**-2),
            'sliding_window': model.window,
            'layer_types': layer_types(model.global_every, model.layers),
            'final_logit_softcapping': model.logits_cap,
            'attn_logit_softcapping': model.attention_cap,
        }
    )
    if kind == 'gemma3_text':
        rope = {'full_attention': rope, 'sliding_attention': layers.rope_to(model.rope_local_timescale, None)}
    return {
        'model_type': kind,
        'architectures': [{'gemma': 'Gemma', 'gemma2': 'Gemma2', 'gemma3_text': 'Gemma3'}[kind] + 'ForCausalLM'],
        'hidden_size': model.d_model,
        'num_attention_heads': model.n_q_per_kv * model.n_kv,
        'num_key_value_heads': model.n_kv,
        'head_dim': model.d_head,
        'num_hidden_layers': model.layers,
        'vocab_size': model.vocab,
        'intermediate_size': model.d_ff,
        'hidden_act' if kind == 'gemma' else 'hidden_activation': 'gelu_pytorch_tanh',
        'rms_norm_eps': model.norm_eps,
        'tie_word_embeddings': True,
        **of_kind,
        'rope_parameters': rope,
    }
