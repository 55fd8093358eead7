"""Gemma 1, 2 and 3 (text): what they differ in are fields of `Model`.

Against Llama: one table at both ends, its rows times √M; norms multiply by 1 + w; gelu in the gate. Gemma 2 has norms
behind both halves of a layer too, caps on attention's logits and on the tokens', and a window in every other layer.
Gemma 3 has norms of q and k instead of the caps; five of six layers have a window and another rotary base.
Legend as in train.py. models/layers.py says what a family's file holds and who calls it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from models import layers, llama
from models.config import (
    LLAMA,
    ConfigJson,
    DecoderSizes,
    Fields,
    Key,
    Keys,
    Kind,
    RopeScaling,
    base_and_scaling,
    rope_from,
    rope_to,
)
from models.layers import ALL, Mask, act
from models.weights import Table, Weight, exact, qk_norms
from runtime.config.keys import Count, Even, Positive
from shardlib.shardtypes import i32, u32
from shardlib.typed import typed

KIND = 'decoder'


@dataclass(frozen=True, kw_only=True)
class Model(DecoderSizes):
    n_q_per_kv: Count  # Q, query heads for each head of keys and values
    d_head: Even  # D, length of a head's vectors, whose two halves rotary embeddings turn
    rope_max_timescale: Positive = 10000.0  # base of the rotary angles
    rope_scaling: RopeScaling | None = None  # not for layers with a window, if those have another base
    rope_local_timescale: Positive | None = None  # base of the rotary angles in layers with a window (Gemma 3)
    norm_eps: Positive = 1e-6  # added to the mean square in RMSNorm
    logits_scale: Positive  # attention's logits are q·k times this
    norm_after: bool = False  # norms stand behind attention and feed-forward too (Gemma 2 and 3)
    qk_norm: Literal['none', 'head'] = 'none'  # head: norms of q and k, each head by itself (Gemma 3)
    attention_cap: Positive | None = None  # attention's logits are cap · tanh(logits / cap) (Gemma 2)
    logits_cap: Positive | None = None  # soft cap of the tokens' logits (Gemma 2)
    window: Count | None = None  # number of positions that a query sees, its own included (Gemma 2 and 3)
    global_every: Count = 1  # with a window, every so many-th layer sees all


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
    """The scale of a norm, which multiplies by 1 + w."""
    return exact('M/w/t -> M', 0, published, 'M', *only_if, plus=1)


TABLE = Table({  # at rest -> in use; first values; the published tensor, and how it lies; which models have it
    'embed': llama.TABLE.ends['embed'],
    'transformer': {
        'ln1': norm(f'{LAYER}.input_layernorm.weight'),
        'ln2': norm(second_norm),
        **{name: llama.TABLE.layer[name] for name in ('w_q', 'w_kv', 'w_o', 'w_gate', 'w_up', 'w_down')},
        'ln1_after': norm(f'{LAYER}.post_attention_layernorm.weight', norms_after),
        'ln2_after': norm(f'{LAYER}.post_feedforward_layernorm.weight', norms_after),
        **qk_norms(ATTENTION, plus=1),
    },
    'final_layer_norm': norm('model.norm.weight'),
})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Forward pass ======================================================================================================
final = layers.final


@typed
def embed(model: Model, ends: Ends, tokens: u32['B/b L/c'], position: i32['B/b L/c'], M: str) -> jax.Array:
    """Rows of the table times √M, which is rounded to the compute type first, as transformers does."""
    return layers.embed(model, ends, tokens, position, M) * jnp.asarray(model.d_model**0.5, act.dtype)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, None]:
    """One layer; x lies as 'B/b L/c' with M."""
    rope = layers.frequencies(model.d_head, model.rope_max_timescale, model.rope_scaling)
    if model.rope_local_timescale is not None and model.window is not None:
        local = layers.frequencies(model.d_head, model.rope_local_timescale, None)
        rope = jnp.where(attend.window < ALL, local, rope)
    turns = layers.rotations(model, position, rope)
    y, kept = layers.attention_half(model, x, w, attend, turns, (w.ln1, w.ln1_after), M)
    x = x + y
    return x + layers.feed_forward_half(model, x, w, jax.nn.gelu, (w.ln2, w.ln2_after), M), kept, None


# == config.json =======================================================================================================
def layer_types(global_every: int, count: int) -> list[str]:
    return ['sliding_attention' if (n + 1) % global_every else 'full_attention' for n in range(count)]


def windows_from(config: Fields, before: dict[str, Any], every: int) -> dict[str, Any]:
    count = before['layers']
    every = config.take('sliding_window_pattern', config.take('_sliding_window_pattern', every))
    types = config.take('layer_types', None) or layer_types(every, count)
    every = types.index('full_attention') + 1 if 'full_attention' in types else count + 1
    if types != layer_types(every, count):
        config.refuse('layer_types', f'expected full_attention at the end of each {every} layers, and nowhere else')
    return {'window': config.take('sliding_window', 4096), 'global_every': every}


def windows_to(model: Model) -> dict[str, Any]:
    return {'sliding_window': model.window, 'layer_types': layer_types(model.global_every, model.layers)}


def ropes_from(config: Fields, before: dict[str, Any]) -> dict[str, Any]:
    """The angles of layers that see all, and the base of those with a window, which transformers 5 nests."""
    nested = config.take('rope_parameters', None) or {}
    if not nested:
        rope = rope_from(config, before, 1e6, ('linear',))
        return rope | {'rope_local_timescale': config.take('rope_local_base_freq', 10000.0)}
    base, scaling = base_and_scaling(config, nested['full_attention'], ('linear',))
    local, _ = base_and_scaling(config, nested['sliding_attention'], ())
    return {'rope_max_timescale': base, 'rope_scaling': scaling, 'rope_local_timescale': local}


def ropes_to(model: Model) -> dict[str, Any]:
    full, local = rope_to(model.rope_max_timescale, model.rope_scaling), rope_to(model.rope_local_timescale, None)
    return {'rope_parameters': {'full_attention': full, 'sliding_attention': local}}


def activation_from(config: Fields, before: dict[str, Any]) -> dict[str, Any]:
    """Checks the activation: the first releases of Gemma 1 say gelu and mean its approximation."""
    old = ['gelu'] if config.content['model_type'] == 'gemma' else []
    for key in ('hidden_act', 'hidden_activation'):
        if config.take(key, None) not in (None, 'gelu_pytorch_tanh', *old):
            config.refuse(key, "expected 'gelu_pytorch_tanh'")
    return {}


SCALE = Key('query_pre_attn_scalar', 256, lambda n, before: n**-0.5, lambda model: round(model.logits_scale**-2))
SECOND = {
    'logits_scale': SCALE,
    'window': Keys(functools.partial(windows_from, every=2), windows_to),
    'logits_cap': Key('final_logit_softcapping', 30.0),
    'attention_cap': Key('attn_logit_softcapping', 50.0),
}
THIRD = {
    'logits_scale': SCALE,
    'window': Keys(functools.partial(windows_from, every=6), windows_to),
    'logits_cap': Key('final_logit_softcapping', None),
    'rope': Keys(ropes_from, ropes_to),
}
CONFIG = ConfigJson(
    Model,
    {
        'gemma': Kind('GemmaForCausalLM'),
        'gemma2': Kind('Gemma2ForCausalLM', {'norm_after': True}, SECOND),
        'gemma3_text': Kind('Gemma3ForCausalLM', {'norm_after': True, 'qk_norm': 'head'}, THIRD),
    },
    {name: key for name, key in LLAMA.items() if name != 'tied'}
    | {
        'd_head': Key('head_dim', 256),
        'activation': Keys(activation_from, lambda model: {'hidden_activation': 'gelu_pytorch_tanh'}),
    },
    attention_bias=False,
    tie_word_embeddings=True,
)
model_of, config_of = CONFIG.functions
