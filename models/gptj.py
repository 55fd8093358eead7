"""GPT-J: attention and feed-forward side by side, from one norm.

Against Llama: each layer adds one sum, that of both halves; layer norms with a bias; rotary turns neighbouring dims,
and only the first of each head; biases in the feed-forward and on the logits. Legend as in train.py; each head has keys
of its own, so Q is 1. models/layers.py says what a family's file holds and who calls it.
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
from models.layers import Biased, Mask, act, enter, layer_norm, leave, part, stored
from runtime.config.keys import Count, Positive
from shardlib import shardops
from shardlib.shardops import product
from shardlib.shardtypes import Array, f32, i32, pytree_dataclass, u32
from shardlib.typed import typed


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


def mask(model: Model) -> Mask:
    return Mask()


# == Weights ===========================================================================================================
@pytree_dataclass
class Layer:
    ln: f32['2 M/d/t']  # scale and bias
    w_qkv: stored['3 M/d K/t D']
    w_o: stored['M/d K/t D']
    w_up: stored['M/d F/t']
    b_up: f32['F/d/t']
    w_down: stored['M/d F/t']
    b_down: f32['M/d/t']


@pytree_dataclass
class Weights:
    embed: stored['V/t M/d']
    unembed: stored['V/t M/d']
    unembed_bias: f32['V/d/t']
    transformer: Array['layers', Layer]
    final_layer_norm: f32['2 M/d/t']


@pytree_dataclass
class Gathered:
    """What a layer multiplies with; a matrix may be `Adapted`."""

    ln: f32['2 M']
    w_q: act['M K/t D']
    w_k: act['M K/t D']
    w_v: act['M K/t D']
    w_o: act['M K/t D']
    w_up: act['M F/t']
    b_up: act['F/t']
    w_down: act['M F/t']
    b_down: act['M']


@pytree_dataclass
class Ends:
    """What stands before the first layer and after the last, gathered."""

    embed: act['V/t M']
    unembed: Biased
    final_layer_norm: f32['2 M']


def init(model: Model, seed: jax.Array) -> Weights:
    """The first weights: biases are 0."""
    M, F, K, D = model.d_model, model.d_ff, model.n_kv, model.d_head

    def normal(name, shape, fan_in):
        key = fold_in_str(jax.random.key(seed), name)
        return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) / (0.87962566 * fan_in**0.5)

    def of_layers(name, *shape, fan_in):
        return normal(name, (model.layers, *shape), fan_in)

    norm = jnp.stack([jnp.ones((M,), jnp.float32), jnp.zeros((M,), jnp.float32)])
    layer = Layer(
        ln=jnp.stack([norm] * model.layers),
        w_qkv=of_layers('w_qkv', 3, M, K, D, fan_in=M),
        w_o=of_layers('w_o', M, K, D, fan_in=K * D),
        w_up=of_layers('w_up', M, F, fan_in=M),
        b_up=jnp.zeros((model.layers, F), jnp.float32),
        w_down=of_layers('w_down', M, F, fan_in=F),
        b_down=jnp.zeros((model.layers, M), jnp.float32),
    )
    embed, unembed = normal('embed', (model.vocab, M), M), normal('unembed', (model.vocab, M), M)
    return Weights(embed, unembed, jnp.zeros((model.vocab,), jnp.float32), layer, norm)


@typed
def gather_layer(w: Layer, reduce_dtype: str = 'float32') -> Gathered:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    return Gathered(
        ln=shardops.all_gather('2 M/d/t -> 2 M', w.ln),
        w_q=gather('M/d K/t D -> M K/t D', w.w_qkv[0]),
        w_k=gather('M/d K/t D -> M K/t D', w.w_qkv[1]),
        w_v=gather('M/d K/t D -> M K/t D', w.w_qkv[2]),
        w_o=gather('M/d K/t D -> M K/t D', w.w_o),
        w_up=gather('M/d F/t -> M F/t', w.w_up),
        b_up=shardops.slice('F -> F/t', gather('F/d/t -> F', w.b_up)),
        w_down=gather('M/d F/t -> M F/t', w.w_down),
        b_down=gather('M/d/t -> M', w.b_down),
    )


@typed
def gather_ends(weights: Weights, reduce_dtype: str = 'float32') -> Ends:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    bias = shardops.slice('V -> V/t', shardops.all_gather('V/d/t -> V', weights.unembed_bias))
    return Ends(
        embed=gather('V/t M/d -> V/t M', weights.embed),
        unembed=Biased(gather('V/t M/d -> V/t M', weights.unembed), bias),
        final_layer_norm=shardops.all_gather('2 M/d/t -> 2 M', weights.final_layer_norm),
    )


# == Forward pass ======================================================================================================
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/d L'], position: i32['B/d L'], M: str) -> jax.Array:
    return layers.embed(ends.embed, tokens, M)


@typed
def rotary(model: Model, x: act['B/d L Q K/t D'], position: i32['B/d L'], factor: float = 1.0) -> act['B/d L Q K/t D']:
    """Rotates dims 2i and 2i + 1, of the first d_rotary, and multiplies by factor. The dims that turn come out as the
    even ones and then the odd ones: in q and k alike, so that their product is the same."""
    turning = x[..., : model.d_rotary]
    halves = jnp.concatenate([turning[..., ::2], turning[..., 1::2]], axis=-1)
    turned = layers.rotary(halves, position, layers.frequencies(model.d_rotary, model.rope_max_timescale, None), factor)
    return jnp.concatenate([turned, x[..., model.d_rotary :] * factor], axis=-1)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/d L'], M: str
) -> tuple[jax.Array, Any]:
    """One layer; x lies as 'B/d L' with M. `attend(q, k, v)` returns o and what of k and v is to be kept, which the
    layer hands on; the logits are q·k, no factor."""
    x: act[f'B/d L {M}'] = x
    gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
    normed = layer_norm(gathered, w.ln, model.norm_eps)

    with jax.named_scope('attention'):
        q = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_q)[:, :, None]
        k = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_k)[:, :, None]
        v = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_v)
        q = save_for_backward(rotary(model, q, position, model.d_head**-0.5))  # 2KD/t bytes a token
        k = save_for_backward(rotary(model, k, position)[:, :, 0])  # 2KD/t bytes a token
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v
        o, kept = attend(q, k, v)
        of_attention = product('B/d L K/t D, M K/t D -> B/d L M +t', o[:, :, 0], w.w_o)

    with jax.named_scope('ffn'):
        up = product('B/d L M, M F/t -> B/d L F/t', normed, w.w_up) + w.b_up[None, None]
        up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
        of_ffn = product('B/d L F/t, M F/t -> B/d L M +t', jax.nn.gelu(up), w.w_down)

    return x + leave(of_attention + of_ffn, M) + part(w.b_down, M)[None, None], kept


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/d L M']:
    """The hidden states that logits are computed from."""
    return layer_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == Published names ===================================================================================================
def published(model: Model) -> dict[str, list[tuple[str, str]]]:
    """Of each of the weights the published tensors it is made of, and how each lies there -> here."""
    layer = 'transformer.h.{}'
    return {
        'embed': [('transformer.wte.weight', 'V M -> V M')],
        'unembed': [('lm_head.weight', 'V M -> V M')],
        'unembed_bias': [('lm_head.bias', 'V -> V')],
        'transformer/ln': [(f'{layer}.ln_1.weight', 'M -> M'), (f'{layer}.ln_1.bias', 'M -> M')],
        'transformer/w_qkv': [(f'{layer}.attn.{x}_proj.weight', '(K D) M -> M K D') for x in 'qkv'],
        'transformer/w_o': [(f'{layer}.attn.out_proj.weight', 'M (K D) -> M K D')],
        'transformer/w_up': [(f'{layer}.mlp.fc_in.weight', 'F M -> M F')],
        'transformer/b_up': [(f'{layer}.mlp.fc_in.bias', 'F -> F')],
        'transformer/w_down': [(f'{layer}.mlp.fc_out.weight', 'M F -> M F')],
        'transformer/b_down': [(f'{layer}.mlp.fc_out.bias', 'M -> M')],
        'final_layer_norm': [('transformer.ln_f.weight', 'M -> M'), ('transformer.ln_f.bias', 'M -> M')],
    }


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
