"""Llama 1 to 3.3, SmolLM2, Mistral, Qwen2, Qwen3 and OLMo 2: what they differ in are fields of `Model`.

With the defaults this is train.py's model, and the weights have its names: its checkpoints are read here as they are.
Legend as in train.py. models/layers.py says what a family's file holds and who calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from models import layers
from models.config import LLAMA, QWEN_WINDOW, ConfigJson, DecoderSizes, Key, Kind, RopeScaling
from models.layers import ALL, Mask
from models.weights import Table, Weight, bias, exact, matrix, q_scale, qk_norms
from runtime.config.keys import Count, Even, Positive, Steps
from shardlib.shardtypes import i32
from shardlib.typed import typed

KIND = 'decoder'


@dataclass(frozen=True, kw_only=True)
class Model(DecoderSizes):
    n_q_per_kv: Count  # Q, query heads for each head of keys and values
    d_head: Even  # D, length of a head's vectors, whose two halves rotary embeddings turn
    rope_max_timescale: Positive  # base of the rotary angles
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-6  # added to the mean square in RMSNorm
    logits_scale: Positive = 1.0  # attention's logits are q·k times this; 1: the factor is in w_q, as in train.py
    tied: bool = False  # one table at both ends: there is no `unembed`
    qkv_bias: bool = False  # added to q, k and v (Qwen2)
    qk_norm: Literal['none', 'head', 'all'] = 'none'  # per head (Qwen3), or over all heads (OLMo 2)
    norm_after: bool = False  # norms stand behind attention and feed-forward, not before (OLMo 2)
    window: Count | None = None  # positions that a query sees, its own included (Mistral 7B v0.1)
    window_from: Steps = 0  # the first layer that has the window (Qwen2)


def mask(model: Model) -> Mask:
    if model.window is None or not model.window_from:
        return Mask(model.window)
    return Mask(tuple(model.window if n >= model.window_from else ALL for n in range(model.layers)))


# == Weights ===========================================================================================================
LAYER, ATTENTION = 'model.layers.{}', 'model.layers.{}.self_attn'


def norm(before: str, after: str) -> Weight:
    """The scale of a norm; its published name depends on the norm's place."""
    return exact(
        'M/w/t -> M', 1, lambda model: f'{LAYER}.{after if model.norm_after else before}_layernorm.weight', 'M'
    )


def has_bias(model: Model) -> bool:
    return model.qkv_bias


KV_WEIGHT, KV_BIAS = [tuple(f'{ATTENTION}.{x}_proj.{kind}' for x in 'kv') for kind in ('weight', 'bias')]
TABLE = Table({  # at rest -> in use; first values; the published tensor, and how it lies; which models have it
    'embed': matrix('V/t M/w -> V/t M', 'M', 'model.embed_tokens.weight', 'V M'),
    'unembed': matrix('V/t M/w -> V/t M', 'M', 'lm_head.weight', 'V M', lambda model: not model.tied),
    'transformer': {
        'ln1': norm('input', 'post_attention'),
        'ln2': norm('post_attention', 'post_feedforward'),
        'w_q': matrix('M/w Q K/t D -> M Q K/t D', 'M', f'{ATTENTION}.q_proj.weight', '(K Q D) M', scale=q_scale),
        'w_kv': matrix('2 M/w K/t D -> M K/t D', 'M', KV_WEIGHT, '(K D) M'),
        'w_o': matrix('M/w Q K/t D -> M Q K/t D', 'Q K D', f'{ATTENTION}.o_proj.weight', 'M (K Q D)'),
        'w_gate': matrix('M/w F/t -> M F/t', 'M', f'{LAYER}.mlp.gate_proj.weight', 'F M'),
        'w_up': matrix('M/w F/t -> M F/t', 'M', f'{LAYER}.mlp.up_proj.weight', 'F M'),
        'w_down': matrix('M/w F/t -> M F/t', 'F', f'{LAYER}.mlp.down_proj.weight', 'M F'),
        'b_q': bias('Q K/t D -> Q K/t D', 0, f'{ATTENTION}.q_proj.bias', '(K Q D)', has_bias),
        'b_kv': bias('2 K/t D -> 2 K/t D', 0, KV_BIAS, '(K D)', has_bias),
        **qk_norms(ATTENTION),
    },
    'final_layer_norm': exact('M/w/t -> M', 1, 'model.norm.weight', 'M'),
})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Forward pass ======================================================================================================
embed, final = layers.embed, layers.final


def norms_of(model: Model, w: Any) -> list[layers.Norms]:
    return [(None, scale) if model.norm_after else (scale, None) for scale in (w.ln1, w.ln2)]


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, None]:
    """One layer; x lies as 'B/b L/c' with M."""
    norms = norms_of(model, w)
    y, kept = layers.attention_half(model, x, w, attend, layers.rotations(model, position), norms[0], M)
    x = x + y
    return x + layers.feed_forward_half(model, x, w, jax.nn.silu, norms[1], M), kept, None


# == config.json =======================================================================================================
CONFIG = ConfigJson(
    Model,
    {
        'llama': Kind('LlamaForCausalLM'),
        'mistral': Kind('MistralForCausalLM', keys={'window': Key('sliding_window', 4096)}),
        'qwen2': Kind('Qwen2ForCausalLM', {'qkv_bias': True}, {'window': QWEN_WINDOW}),
        'qwen3': Kind('Qwen3ForCausalLM', {'qk_norm': 'head'}, {'window': QWEN_WINDOW}),
        'olmo2': Kind(
            'Olmo2ForCausalLM', {'qk_norm': 'all', 'norm_after': True}, {'norm_eps': Key('rms_norm_eps', 1e-5)}
        ),
    },
    LLAMA,
    hidden_act='silu',
    attention_bias=False,
    mlp_bias=False,
    pretraining_tp=1,
)
model_of, config_of = CONFIG.functions
