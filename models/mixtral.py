"""Mixtral, OLMoE and Qwen3-MoE: a router sends each token to a few of E experts (models/experts.py).

Up to the experts it is models/llama.py's layer. Legend as in models/experts.py: F is d_ff of all shared experts
together. models/layers.py says what a family's file holds.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jax_extra import save_for_backward
from models import experts, layers, llama
from models.config import LLAMA, ROPE, ConfigJson, Fields, Key, Keys, Kind, rope_from
from models.layers import gather_residual, reduce_residual
from models.weights import Table, exact, matrix
from runtime.config.keys import Count, Positive, Steps
from shardlib.shardtypes import i32
from shardlib.typed import typed

KIND = 'decoder'


@dataclass(frozen=True, kw_only=True)
class Model(llama.Model):  # d_ff is H, of one expert
    experts: Count  # E, feed-forward networks in a layer
    experts_per_token: Count  # X, experts that a token goes to
    shared_experts: Steps = 0  # further experts, to which every token goes (no published model)
    weights_add_to_one: bool = True  # those of the chosen experts; else they are the softmax over all (OLMoE)
    # An expert's slots, over the tokens that it gets on average; null: no limit (dropless).
    capacity: Positive | None = None
    capacity_parts: Count = 1  # parts of a row, each with separate slots; a multiple of 2 · mesh.c if c is more than 1

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise ValueError(f'experts_per_token: expected 1 to model.experts = {self.experts}')


# == Weights ===========================================================================================================
LAYER = 'model.layers.{}'


def of_moe(published: str, of_mixtral: str) -> Callable:
    """A published name below the layer's mixture, which Mixtral calls otherwise."""
    mixtral, others = f'{LAYER}.block_sparse_moe.{of_mixtral}.weight', f'{LAYER}.mlp.{published}.weight'
    return lambda model: mixtral if model.qk_norm == 'none' else others


def has_shared(model: Model) -> bool:
    return model.shared_experts > 0


TABLE = Table(llama.TABLE.table | {  # at rest -> in use; first values; the published tensor, and how it lies
    'transformer': llama.TABLE.layer | {
        'router': exact('M/w/t E -> M E', 'M', of_moe('gate', 'gate'), 'E M'),
        'expert_gate': matrix('E/e M/v H/t -> E/e M H/t', 'M', of_moe('experts.{}.gate_proj', 'experts.{}.w1'), 'H M'),
        'expert_up': matrix('E/e M/v H/t -> E/e M H/t', 'M', of_moe('experts.{}.up_proj', 'experts.{}.w3'), 'H M'),
        'expert_down': matrix('E/e M/v H/t -> E/e M H/t', 'H', of_moe('experts.{}.down_proj', 'experts.{}.w2'), 'M H'),
        # The shared experts, which no published model has.
        'w_gate': matrix('M/w F/t -> M F/t', 'M', '', 'F M', has_shared),
        'w_up': matrix('M/w F/t -> M F/t', 'M', '', 'F M', has_shared),
        'w_down': matrix('M/w F/t -> M F/t', 'F', '', 'M F', has_shared),
    },
}, sizes={'E': 'experts', 'H': 'd_ff', 'F': lambda model: model.shared_experts * model.d_ff})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Forward pass ======================================================================================================
embed, final, mask = layers.embed, layers.final, llama.mask


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, Any]:
    """One layer; x lies as 'B/b L/c' with M."""
    of_attention, (before, after) = llama.norms_of(model, w)
    y, kept = layers.attention_half(model, x, w, attend, layers.rotations(model, position), of_attention, M)
    x = x + y
    with jax.named_scope('ffn'):
        gathered = save_for_backward(gather_residual(x, M))  # 2M bytes a token, spares w_o's product, its sum, gather
        normed = gathered if before is None else layers.norm(gathered, before, model.norm_eps)
        y, routing = experts.mixture(model, normed, w.router, (w.expert_gate, w.expert_up, w.expert_down), M)
        y = y if w.w_gate is None else y + reduce_residual(layers.feed_forward(normed, w, jax.nn.silu), M)
        return x + layers.behind(model, y, None, after, M), kept, routing


# == config.json =======================================================================================================
def window_from(config: Fields, before: dict[str, Any]) -> dict[str, Any]:
    """That of all layers: Qwen3-MoE does not compute max_window_layers."""
    is_used = config.take('use_sliding_window', False)
    return {'window': config.take('sliding_window', None) if is_used else None}


def window_to(model: Model) -> dict[str, Any]:
    return {'sliding_window': model.window, 'use_sliding_window': bool(model.window)}


IN_EXPERTS = {
    # transformers 5 writes it by the name that Mixtral has
    'experts': Key('num_experts', lambda config, before: config.take('num_local_experts')),
    'weights_add_to_one': Key('norm_topk_prob', False),
}
OF_QWEN = {
    'd_ff': Keys(  # intermediate_size is that of layers without experts
        lambda config, _: {'d_ff': config.take('moe_intermediate_size', config.take('intermediate_size', None))},
        lambda model: {'moe_intermediate_size': model.d_ff, 'intermediate_size': model.d_ff},
    ),
    'norm_eps': Key('rms_norm_eps', 1e-6),
    'window': Keys(window_from, window_to),
}
OF_MIXTRAL = {
    'experts': Key('num_local_experts'),
    'window': Key('sliding_window', None),
    'rope': Keys(functools.partial(rope_from, base=1e6), ROPE.write),
}
CONFIG = ConfigJson(
    Model,
    {
        'mixtral': Kind('MixtralForCausalLM', keys=OF_MIXTRAL, only={'router_jitter_noise': 0.0}),
        'olmoe': Kind('OlmoeForCausalLM', {'qk_norm': 'all'}, IN_EXPERTS, {'clip_qkv': None}),
        'qwen3_moe': Kind(
            'Qwen3MoeForCausalLM',
            {'qk_norm': 'head'},
            IN_EXPERTS | OF_QWEN,
            {'mlp_only_layers': [], 'decoder_sparse_step': 1},
        ),
    },
    LLAMA | {'experts_per_token': Key('num_experts_per_tok'), 'norm_eps': Key('rms_norm_eps', 1e-5)},
    hidden_act='silu',
    attention_bias=False,
)
model_of, config_of = CONFIG.functions
