"""GPT-J: attention and feed-forward side by side, from one norm.

Against Llama: each layer adds one sum, that of both halves; layer norms with a bias; rotary turns neighbouring dims,
and only the first of each head; biases in the feed-forward and on the logits. Legend as in train.py; each head has keys
of its own, so Q is 1. models/layers.py says what a family's file holds and who calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_extra import save_for_backward
from kernels.attention import KernelName
from models import layers
from models.layers import Mask, act, enter, layer_norm, leave, part
from models.weights import Table, bias, exact, matrix
from runtime.config.keys import Count, Positive
from shardlib.products import product
from shardlib.shardtypes import i32, u32
from shardlib.typed import typed

KIND = 'decoder'


@dataclass(frozen=True, kw_only=True)
class Model:
    d_model: Count  # M
    n_kv: Count  # K, heads
    d_head: Count  # D
    layers: Count
    vocab: Count  # V
    d_ff: Count  # F
    d_rotary: Count  # dims of each head that turn, an even number
    rope_max_timescale: Positive = 10000.0  # base of the rotary angles
    norm_eps: Positive = 1e-5  # added to the variance in layer norms
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations and matrix products
    attention: KernelName = 'auto'  # of kernels/attention.py

    def __post_init__(self) -> None:
        if self.d_rotary % 2 or self.d_rotary > self.d_head:
            raise ValueError(f'd_rotary: expected an even number up to d_head = {self.d_head}')


def mask(model: Model) -> Mask:
    return Mask()


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
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/b L/c'], position: i32['B/b L/c'], M: str) -> jax.Array:
    return layers.embed(ends.embed, tokens, M)


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
    """One layer; x lies as 'B/b L/c' with M. `attend(q, k, v)` returns o and what of k and v is to be kept, which the
    layer hands on; the logits are q·k, no factor."""
    x: act[f'B/b L/c {M}'] = x
    gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
    normed = layer_norm(gathered, w.ln, model.norm_eps)

    with jax.named_scope('attention'):
        q, k, v = layers.heads_of(normed, w)
        o, kept = attend(rotary(model, q, position, model.d_head**-0.5), rotary(model, k, position)[:, :, 0], v)
        of_attention = product('B/b L/c K/t D, M K/t D -> B/b L/c M +t', o[:, :, 0], w.w_o)

    with jax.named_scope('ffn'):
        of_ffn = layers.network(normed, w, jax.nn.gelu)

    return x + leave(of_attention + of_ffn, M) + part(w.b_down, M)[None, None], kept, None


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/b L/c M']:
    """The hidden states that logits are computed from."""
    return layer_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == config.json =======================================================================================================
def model_of(config) -> Model:
    """The model that a published config.json describes.

    Args:
      config: models.huggingface.Fields.
    """
    config.take('model_type')
    d_model, heads, d_rotary = [config.take(key) for key in ('n_embd', 'n_head', 'rotary_dim')]
    config.require(tie_word_embeddings=False, activation_function='gelu_new', scale_attn_weights=True, rotary=True)
    config.take('n_positions', None)  # the length of a table of angles, which has no weights
    if not d_rotary or d_rotary % 2:
        config.refuse('rotary_dim', 'expected an even number of dims')
    return Model(
        d_model=d_model,
        n_kv=heads,
        d_head=d_model // heads,
        layers=config.take('n_layer'),
        vocab=config.take('vocab_size'),
        d_ff=config.take('n_inner', None) or 4 * d_model,
        d_rotary=d_rotary,
        norm_eps=config.take('layer_norm_epsilon', 1e-5),
    )


def config_of(model: Model) -> dict[str, Any]:
    """The other way round."""
    return {
        'model_type': 'gptj',
        'architectures': ['GPTJForCausalLM'],
        'n_embd': model.d_model,
        'n_head': model.n_kv,
        'n_layer': model.layers,
        'rotary_dim': model.d_rotary,
        'vocab_size': model.vocab,
        'n_inner': model.d_ff,
        'activation_function': 'gelu_new',
        'layer_norm_epsilon': model.norm_eps,
        'tie_word_embeddings': False,
    }
