"""GPT-J: attention and feed-forward side by side, from one norm.

Against Llama: each layer adds one sum, that of both halves; layer norms with a bias; rotary turns neighbouring dims,
and only the first of each head; biases in the feed-forward and on the logits. Legend as in train.py; no heads share
keys, so Q is 1. models/layers.py says what a family's file holds and who calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_extra import save_for_backward
from models import layers
from models.config import GPT, ConfigJson, DecoderSizes, Key, Kind
from models.layers import act, gather_residual, reduce_residual
from models.weights import Table, bias, exact, matrix
from runtime.config.keys import Count, Positive
from shardlib.shardtypes import i32
from shardlib.typed import typed

KIND = 'decoder'


@dataclass(frozen=True, kw_only=True)
class Model(DecoderSizes):
    d_rotary: Count  # dims of each head that turn, an even number
    rope_max_timescale: Positive = 10000.0  # base of the rotary angles
    norm_eps: Positive = 1e-5  # added to the variance in layer norms

    def __post_init__(self) -> None:
        if self.d_rotary % 2 or self.d_rotary > self.d_head:
            raise ValueError(f'd_rotary: expected an even number up to d_head = {self.d_head}')


# == Weights ===========================================================================================================
LAYER = 'transformer.h.{}'
QKV = tuple(f'{LAYER}.attn.{x}_proj.weight' for x in 'qkv')
TABLE = Table({  # at rest -> in use; first values; the published tensor, and how it lies
    'embed': matrix('V/t M/w -> V/t M', 'M', 'transformer.wte.weight', 'V M'),
    'unembed': matrix('V/t M/w -> V/t M', 'M', 'lm_head.weight', 'V M'),
    'unembed_bias': exact('V/t/w -> V/t', 0, 'lm_head.bias', 'V'),
    'transformer': {
        'ln': exact('2 M/w/t -> 2 M', (1, 0), (f'{LAYER}.ln_1.weight', f'{LAYER}.ln_1.bias'), 'M'),
        'w_qkv': matrix('3 M/w K/t D -> M K/t D', 'M', QKV, '(K D) M'),
        'w_o': matrix('M/w K/t D -> M K/t D', 'K D', f'{LAYER}.attn.out_proj.weight', 'M (K D)'),
        'w_up': matrix('M/w F/t -> M F/t', 'M', f'{LAYER}.mlp.fc_in.weight', 'F M'),
        'b_up': bias('F/t/w -> F/t', 0, f'{LAYER}.mlp.fc_in.bias', 'F'),
        'w_down': matrix('M/w F/t -> M F/t', 'F', f'{LAYER}.mlp.fc_out.weight', 'M F'),
        'b_down': bias('M/w/t -> M', 0, f'{LAYER}.mlp.fc_out.bias', 'M'),
    },
    'final_layer_norm': exact('2 M/w/t -> 2 M', (1, 0), ('transformer.ln_f.weight', 'transformer.ln_f.bias'), 'M'),
})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Forward pass ======================================================================================================
embed, final, mask = layers.embed, layers.final, layers.causal


@typed
def rotary(
    model: Model, x: act['B/b L/c Q K/t D'], position: i32['B/b L/c'], factor: float = 1.0
) -> act['B/b L/c Q K/t D']:
    """Rotates dims 2i and 2i + 1, of the first d_rotary, and multiplies by factor. The dims that turn come out as the
    even ones and then the odd ones: in q and k alike, so that their product is the same."""
    turning = x[..., : model.d_rotary]
    halves = jnp.concatenate([turning[..., ::2], turning[..., 1::2]], axis=-1)
    turned = layers.rotary(halves, position, layers.frequencies(model.d_rotary, model.rope_max_timescale, None), factor)
    return jnp.concatenate([turned, x[..., model.d_rotary :] * factor], axis=-1)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, None]:
    """One layer; x lies as 'B/b L/c' with M. Both halves read one norm, and what they add is summed over t once."""
    x: act[f'B/b L/c {M}'] = x
    gathered = save_for_backward(gather_residual(x, M))  # 2M bytes a token, in the place of the input's 2M/t
    normed = layers.norm(gathered, w.ln, model.norm_eps)
    with jax.named_scope('attention'):
        q, k, v = layers.projected(model, normed, w)
        o, kept = attend(rotary(model, q, position, model.d_head**-0.5), rotary(model, k, position)[:, :, 0], v)
        of_attention = layers.joined(o, w)
    with jax.named_scope('ffn'):
        of_ffn = layers.feed_forward(normed, w, jax.nn.gelu)
    return x + layers.behind(model, reduce_residual(of_attention + of_ffn, M), w.b_down, None, M), kept, None


# == config.json =======================================================================================================
CONFIG = ConfigJson(
    Model,
    {'gptj': Kind('GPTJForCausalLM')},
    GPT | {'d_rotary': Key('rotary_dim')},
    tie_word_embeddings=False,
    activation_function='gelu_new',
    scale_attn_weights=True,
    rotary=True,
)
model_of, config_of = CONFIG.functions
