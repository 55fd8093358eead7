"""Mixtral, OLMoE and Qwen3-MoE: a router sends each token to a few of E experts (models/experts.py).

Legend as in models/experts.py: F is d_ff of all shared experts together. models/layers.py says what a family's
file holds.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jax_extra import save_for_backward
from kernels.attention import KernelName
from models import experts, layers
from models.layers import Mask, RopeScaling, act, enter, leave, rms_norm
from models.weights import Table, exact, matrix, q_scale, qk_norms
from runtime.config.keys import Count, Even, Positive, Steps
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
    d_ff: Count  # H, of one expert
    experts: Count  # E
    experts_per_token: Count  # X
    shared_experts: Steps = 0  # further ones, to which every token goes (no published model)
    weights_add_to_one: bool = True  # those of the chosen experts; else they are the softmax over all (OLMoE)
    capacity: Positive | None = None  # an expert's slots in a row, over what it gets on average; none: no limit
    rope_max_timescale: Positive  # base of the rotary angles
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-6  # added to the mean square in RMSNorm
    logits_scale: Positive = 1.0  # attention's logits are q·k times this; 1: the factor is in w_q
    tied: bool = False  # one table at both ends: there is no `unembed`
    qk_norm: Literal['none', 'head', 'all'] = 'none'  # of each head by itself (Qwen3), or of all together (OLMoE)
    window: Count | None = None  # positions that a query sees, its own included
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations and matrix products
    attention: KernelName = 'auto'  # of kernels/attention.py

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise ValueError(f'experts_per_token: expected 1 to model.experts = {self.experts}')


def mask(model: Model) -> Mask:
    return Mask(model.window)


# == Weights ===========================================================================================================
LAYER, ATTENTION = 'model.layers.{}', 'model.layers.{}.self_attn'


def of_moe(published: str, of_mixtral: str) -> Callable:
    """The name below the layer's mixture, which Mixtral calls otherwise."""
    mixtral, others = f'{LAYER}.block_sparse_moe.{of_mixtral}.weight', f'{LAYER}.mlp.{published}.weight'
    return lambda model: mixtral if model.qk_norm == 'none' else others


def has_shared(model: Model) -> bool:
    return model.shared_experts > 0


TABLE = Table({  # at rest -> in use; first values; the published tensor, and how it lies; which models have it
    'embed': matrix('V/t M/w -> V/t M', 'M', 'model.embed_tokens.weight', 'V M'),
    'unembed': matrix('V/t M/w -> V/t M', 'M', 'lm_head.weight', 'V M', lambda model: not model.tied),
    'transformer': {
        'ln1': exact('M/w/t -> M', 1, f'{LAYER}.input_layernorm.weight', 'M'),
        'ln2': exact('M/w/t -> M', 1, f'{LAYER}.post_attention_layernorm.weight', 'M'),
        'w_q': matrix('M/w Q K/t D -> M Q K/t D', 'M', f'{ATTENTION}.q_proj.weight', '(K Q D) M', scale=q_scale),
        'w_kv': matrix('2 M/w K/t D -> M K/t D', 'M', tuple(f'{ATTENTION}.{x}_proj.weight' for x in 'kv'), '(K D) M'),
        'w_o': matrix('M/w Q K/t D -> M Q K/t D', 'Q K D', f'{ATTENTION}.o_proj.weight', 'M (K Q D)'),
        'router': exact('M/w/t E -> M E', 'M', of_moe('gate', 'gate'), 'E M'),
        'expert_gate': matrix('E/e M/v H/t -> E/e M H/t', 'M', of_moe('experts.{}.gate_proj', 'experts.{}.w1'), 'H M'),
        'expert_up': matrix('E/e M/v H/t -> E/e M H/t', 'M', of_moe('experts.{}.up_proj', 'experts.{}.w3'), 'H M'),
        'expert_down': matrix('E/e M/v H/t -> E/e M H/t', 'H', of_moe('experts.{}.down_proj', 'experts.{}.w2'), 'M H'),
        # The shared experts, which no published model has.
        'w_gate': matrix('M/w F/t -> M F/t', 'M', '', 'F M', has_shared),
        'w_up': matrix('M/w F/t -> M F/t', 'M', '', 'F M', has_shared),
        'w_down': matrix('M/w F/t -> M F/t', 'F', '', 'M F', has_shared),
        **qk_norms(ATTENTION),
    },
    'final_layer_norm': exact('M/w/t -> M', 1, 'model.norm.weight', 'M'),
}, sizes={'E': 'experts', 'H': 'd_ff', 'F': lambda model: model.shared_experts * model.d_ff})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Forward pass ======================================================================================================
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/b L/c'], position: i32['B/b L/c'], M: str) -> jax.Array:
    return layers.embed(ends.embed, tokens, M)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, Any]:
    """One layer, as models/llama.py's up to the experts."""
    rope = layers.frequencies(model.d_head, model.rope_max_timescale, model.rope_scaling)
    turn = functools.partial(layers.rotary, position=position, frequency=rope)
    y, kept = layers.attention_half(model, x, w, attend, turn, (w.ln1, None), M)
    x = x + y
    with jax.named_scope('ffn'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, spares the product with w_o, its sum, the gather
        normed = rms_norm(gathered, w.ln2, model.norm_eps)
        y, routing = experts.mixture(model, normed, w.router, (w.expert_gate, w.expert_up, w.expert_down), M)
        y = y if w.w_gate is None else y + leave(layers.gated(normed, w, jax.nn.silu), M)
        return x + y, kept, routing


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/b L/c M']:
    """The hidden states that logits are computed from."""
    return rms_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == config.json =======================================================================================================
def model_of(config) -> Model:
    """The model that a published config.json describes; no token is dropped, as there.

    Args:
      config: models.huggingface.Fields.
    """
    kind, heads, d_model = [config.take(key) for key in ('model_type', 'num_attention_heads', 'hidden_size')]
    n_kv = config.take('num_key_value_heads', None) or heads
    d_head = config.take('head_dim', None) or d_model // heads
    config.require(hidden_act='silu', attention_bias=False, clip_qkv=None, router_jitter_noise=0.0)
    config.require(mlp_only_layers=[], decoder_sparse_step=1)
    window, d_ff = config.take('sliding_window', None), config.take('intermediate_size')
    if kind == 'qwen3_moe':  # intermediate_size is that of layers without experts
        d_ff = config.take('moe_intermediate_size')
        window = window if config.take('use_sliding_window', False) else None
    base, scaling = layers.rope_from(config)
    return Model(
        d_model=d_model,
        n_q_per_kv=heads // n_kv,
        n_kv=n_kv,
        d_head=d_head,
        layers=config.take('num_hidden_layers'),
        vocab=config.take('vocab_size'),
        d_ff=d_ff,
        experts=config.take('num_local_experts', None) or config.take('num_experts'),
        experts_per_token=config.take('num_experts_per_tok'),
        weights_add_to_one=True if kind == 'mixtral' else config.take('norm_topk_prob', False),
        rope_max_timescale=base,
        rope_scaling=scaling,
        norm_eps=config.take('rms_norm_eps', 1e-6 if kind == 'qwen3_moe' else 1e-5),
        logits_scale=d_head**-0.5,
        tied=config.take('tie_word_embeddings', False),
        qk_norm={'mixtral': 'none', 'olmoe': 'all', 'qwen3_moe': 'head'}[kind],
        window=window,
    )


def config_of(model: Model) -> dict[str, Any]:
    """The other way round."""
    kind, name = {
        'none': ('mixtral', 'Mixtral'),
        'all': ('olmoe', 'Olmoe'),
        'head': ('qwen3_moe', 'Qwen3Moe'),
    }[model.qk_norm]
    of_kind = {
        'mixtral': {'num_local_experts': model.experts, 'sliding_window': model.window},
        'olmoe': {'num_experts': model.experts, 'norm_topk_prob': model.weights_add_to_one},
        'qwen3_moe': {
            'num_experts': model.experts,
            'norm_topk_prob': model.weights_add_to_one,
            'moe_intermediate_size': model.d_ff,
            'mlp_only_layers': [],
            'decoder_sparse_step': 1,
            'use_sliding_window': bool(model.window),
            'sliding_window': model.window,
        },
    }[kind]
    return {
        'model_type': kind,
        'architectures': [f'{name}ForCausalLM'],
        'hidden_size': model.d_model,
        'num_attention_heads': model.n_q_per_kv * model.n_kv,
        'num_key_value_heads': model.n_kv,
        **({} if kind == 'olmoe' else {'head_dim': model.d_head}),
        'num_hidden_layers': model.layers,
        'vocab_size': model.vocab,
        'intermediate_size': model.d_ff,
        'num_experts_per_tok': model.experts_per_token,
        'hidden_act': 'silu',
        'rms_norm_eps': model.norm_eps,
        'tie_word_embeddings': model.tied,
        **of_kind,
        'rope_parameters': layers.rope_to(model.rope_max_timescale, model.rope_scaling),
    }
