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

from kernels.attention import KernelName
from models import layers
from models.layers import ALL, Mask, RopeScaling, act, enter, rms_norm
from models.weights import Table, Weight, exact, matrix, q_scale, qk_norms
from runtime.config.keys import Count, Even, Positive
from shardlib.shardtypes import i32, u32
from shardlib.typed import typed

KIND = 'decoder'


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
LAYER, ATTENTION = 'model.layers.{}', 'model.layers.{}.self_attn'


def second_norm(model: Model) -> str:
    return f'{LAYER}.{"pre_feedforward" if model.norm_after else "post_attention"}_layernorm.weight'


def norms_after(model: Model) -> bool:
    return model.norm_after


def norm(published: Any, *only_if: Callable) -> Weight:
    """It multiplies by 1 + w."""
    return exact('M/w/t -> M', 0, published, 'M', *only_if, plus=1)


TABLE = Table({  # at rest -> in use; first values; the published tensor, and how it lies; which models have it
    'embed': matrix('V/t M/w -> V/t M', 'M', 'model.embed_tokens.weight', 'V M'),
    'transformer': {
        'ln1': norm(f'{LAYER}.input_layernorm.weight'),
        'ln2': norm(second_norm),
        'w_q': matrix('M/w Q K/t D -> M Q K/t D', 'M', f'{ATTENTION}.q_proj.weight', '(K Q D) M', scale=q_scale),
        'w_kv': matrix('2 M/w K/t D -> M K/t D', 'M', tuple(f'{ATTENTION}.{x}_proj.weight' for x in 'kv'), '(K D) M'),
        'w_o': matrix('M/w Q K/t D -> M Q K/t D', 'Q K D', f'{ATTENTION}.o_proj.weight', 'M (K Q D)'),
        'w_gate': matrix('M/w F/t -> M F/t', 'M', f'{LAYER}.mlp.gate_proj.weight', 'F M'),
        'w_up': matrix('M/w F/t -> M F/t', 'M', f'{LAYER}.mlp.up_proj.weight', 'F M'),
        'w_down': matrix('M/w F/t -> M F/t', 'F', f'{LAYER}.mlp.down_proj.weight', 'M F'),
        'ln1_after': norm(f'{LAYER}.post_attention_layernorm.weight', norms_after),
        'ln2_after': norm(f'{LAYER}.post_feedforward_layernorm.weight', norms_after),
        **qk_norms(ATTENTION, plus=1),
    },
    'final_layer_norm': norm('model.norm.weight'),
})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Forward pass ======================================================================================================
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/b L/c'], position: i32['B/b L/c'], M: str) -> jax.Array:
    """Rows of the table times √M, which is rounded to the compute type first, as transformers does."""
    return layers.embed(ends.embed, tokens, M) * jnp.asarray(model.d_model**0.5, act.dtype)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, None]:
    """One layer; x lies as 'B/b L/c' with M."""
    rope = layers.frequencies(model.d_head, model.rope_max_timescale, model.rope_scaling)
    if model.rope_local_timescale is not None and model.window is not None:
        local = layers.frequencies(model.d_head, model.rope_local_timescale, None)
        rope = jnp.where(attend.window < ALL, local, rope)
    turn = functools.partial(layers.rotary, position=position, frequency=rope)
    y, kept = layers.attention_half(model, x, w, attend, turn, (w.ln1, w.ln1_after), M)
    x = x + y
    return x + layers.feed_forward_half(model, x, w, jax.nn.gelu, (w.ln2, w.ln2_after), M), kept, None


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/b L/c M']:
    """The hidden states that logits are computed from."""
    return rms_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == config.json =======================================================================================================
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
