"""GPT-2 and OPT: what they differ in are fields of `Model`.

Against Llama: layer norms with a bias, learned positions, biases everywhere, one feed-forward matrix on the way up, one
table at both ends. GPT-2 is stored transposed, with q, k and v in one tensor; OPT's table of positions begins at row 2.
Legend as in train.py; each head has keys of its own, so Q is 1. models/layers.py says what a family's file holds and
who calls it.
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
from models.layers import Mask, act, enter, layer_norm, leave, part, stored
from runtime.config.keys import Count, Positive, Steps
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.shardops import product
from shardlib.shardtypes import Array, f32, i32, pytree_dataclass, u32
from shardlib.typed import typed

ACTIVATIONS = {'gelu_tanh': jax.nn.gelu, 'gelu': functools.partial(jax.nn.gelu, approximate=False), 'relu': jax.nn.relu}


@dataclass(frozen=True, kw_only=True)
class Model:
    d_model: Count  # M
    n_kv: Count  # K, heads
    d_head: Count  # D
    layers: Count
    vocab: Count  # V
    d_ff: Count  # F
    positions: Count  # P, rows of the table of positions; no row of tokens may be longer
    first_position: Steps = 0  # the row of the table that the first token takes (OPT: 2)
    activation: Literal['gelu_tanh', 'gelu', 'relu'] = 'gelu_tanh'
    norm_eps: Positive = 1e-5  # added to the variance in layer norms
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations and matrix products
    attention: KernelName = 'auto'  # of kernels/attention.py


def mask(model: Model) -> Mask:
    return Mask()


# == Weights ===========================================================================================================
@pytree_dataclass
class Layer:
    ln1: f32['2 M/d/t']  # scale and bias
    ln2: f32['2 M/d/t']
    w_qkv: stored['3 M/d K/t D']
    b_qkv: f32['3 K/t D/d']
    w_o: stored['M/d K/t D']
    b_o: f32['M/d/t']
    w_up: stored['M/d F/t']
    b_up: f32['F/d/t']
    w_down: stored['M/d F/t']
    b_down: f32['M/d/t']


@pytree_dataclass
class Weights:
    embed: stored['V/t M/d']
    positions: stored['P M/d/t']
    transformer: Array['layers', Layer]
    final_layer_norm: f32['2 M/d/t']


@pytree_dataclass
class Gathered:
    """What a layer multiplies with; a matrix may be `Adapted`."""

    ln1: f32['2 M']
    ln2: f32['2 M']
    w_q: act['M K/t D']
    w_k: act['M K/t D']
    w_v: act['M K/t D']
    b_qkv: act['3 K/t D']
    w_o: act['M K/t D']
    b_o: act['M']
    w_up: act['M F/t']
    b_up: act['F/t']
    w_down: act['M F/t']
    b_down: act['M']


@pytree_dataclass
class Ends:
    """What stands before the first layer and after the last, gathered."""

    embed: act['V/t M']
    positions: act['P M']
    unembed: act['V/t M']
    final_layer_norm: f32['2 M']


def init(model: Model, seed: jax.Array) -> Weights:
    """The first weights: biases are 0."""
    M, F, K, D = model.d_model, model.d_ff, model.n_kv, model.d_head

    def normal(name, shape, fan_in):
        key = fold_in_str(jax.random.key(seed), name)
        return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) / (0.87962566 * fan_in**0.5)

    def of_layers(name, *shape, fan_in):
        return normal(name, (model.layers, *shape), fan_in)

    def zeros(*shape):
        return jnp.zeros((model.layers, *shape), jnp.float32)

    norm = jnp.stack([jnp.ones((M,), jnp.float32), jnp.zeros((M,), jnp.float32)])
    norms = jnp.stack([norm] * model.layers)
    layer = Layer(
        ln1=norms,
        ln2=norms,
        w_qkv=of_layers('w_qkv', 3, M, K, D, fan_in=M),
        b_qkv=zeros(3, K, D),
        w_o=of_layers('w_o', M, K, D, fan_in=K * D),
        b_o=zeros(M),
        w_up=of_layers('w_up', M, F, fan_in=M),
        b_up=zeros(F),
        w_down=of_layers('w_down', M, F, fan_in=F),
        b_down=zeros(M),
    )
    embed, positions = normal('embed', (model.vocab, M), M), normal('positions', (model.positions, M), M)
    return Weights(embed, positions, layer, norm)


@typed
def gather_layer(w: Layer, reduce_dtype: str = 'float32') -> Gathered:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    return Gathered(
        ln1=shardops.all_gather('2 M/d/t -> 2 M', w.ln1),
        ln2=shardops.all_gather('2 M/d/t -> 2 M', w.ln2),
        w_q=gather('M/d K/t D -> M K/t D', w.w_qkv[0]),
        w_k=gather('M/d K/t D -> M K/t D', w.w_qkv[1]),
        w_v=gather('M/d K/t D -> M K/t D', w.w_qkv[2]),
        b_qkv=gather('3 K/t D/d -> 3 K/t D', w.b_qkv),
        w_o=gather('M/d K/t D -> M K/t D', w.w_o),
        b_o=gather('M/d/t -> M', w.b_o),
        w_up=gather('M/d F/t -> M F/t', w.w_up),
        b_up=shardops.slice('F -> F/t', gather('F/d/t -> F', w.b_up)),
        w_down=gather('M/d F/t -> M F/t', w.w_down),
        b_down=gather('M/d/t -> M', w.b_down),
    )


@typed
def gather_ends(weights: Weights, reduce_dtype: str = 'float32') -> Ends:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    embed, positions = gather('V/t M/d -> V/t M', weights.embed), gather('P M/d/t -> P M', weights.positions)
    return Ends(embed, positions, embed, shardops.all_gather('2 M/d/t -> 2 M', weights.final_layer_norm))


# == Forward pass ======================================================================================================
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/d L'], position: i32['B/d L'], M: str) -> jax.Array:
    """Rows of both tables.

    Raises:
      RunError: the rows of tokens are longer than the table of positions.
    """
    if tokens.shape[1] > model.positions - model.first_position:
        raise RunError(
            f'rows of {tokens.shape[1]} tokens: this model has learned {model.positions - model.first_position} '
            'positions (model.positions - model.first_position): take shorter rows, training.tokens.len'
        )
    table = ends.positions if M == 'M' else shardops.slice('P M -> P M/t', ends.positions)
    of_position = shardops.index_unreduced(f'[P] {M}, B/d L -> B/d L {M}', table, position + model.first_position)
    return layers.embed(ends.embed, tokens, M) + of_position


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/d L'], M: str
) -> tuple[jax.Array, Any]:
    """One layer; x lies as 'B/d L' with M. `attend(q, k, v)` returns o and what of k and v is to be kept, which the
    layer hands on; the logits are q·k, no factor."""
    x: act[f'B/d L {M}'] = x

    with jax.named_scope('attention'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
        normed = layer_norm(gathered, w.ln1, model.norm_eps)
        q = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_q) + w.b_qkv[0][None, None]
        k = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_k) + w.b_qkv[1][None, None]
        v = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_v) + w.b_qkv[2][None, None]
        q = save_for_backward(q * model.d_head**-0.5)  # 2KD/t bytes a token
        k = save_for_backward(k)  # 2KD/t bytes a token
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v
        o, kept = attend(q[:, :, None], k, v)
        y = product('B/d L K/t D, M K/t D -> B/d L M +t', o[:, :, 0], w.w_o)
        x = x + leave(y, M) + part(w.b_o, M)[None, None]

    with jax.named_scope('ffn'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, spares the product with w_o, its sum, the gather
        normed = layer_norm(gathered, w.ln2, model.norm_eps)
        up = product('B/d L M, M F/t -> B/d L F/t', normed, w.w_up) + w.b_up[None, None]
        up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
        y = product('B/d L F/t, M F/t -> B/d L M +t', ACTIVATIONS[model.activation](up), w.w_down)
        return x + leave(y, M) + part(w.b_down, M)[None, None], kept


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/d L M']:
    """The hidden states that logits are computed from."""
    return layer_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == Published names ===================================================================================================
def published(model: Model) -> dict[str, list[tuple[str, str]]]:
    """Of each of the weights the published tensors it is made of, and how each lies there -> here."""
    if model.first_position:
        return of_opt()
    layer = 'transformer.h.{}'
    return {
        'embed': [('transformer.wte.weight', 'V M -> V M')],
        'positions': [('transformer.wpe.weight', 'P M -> P M')],
        'transformer/ln1': norm(f'{layer}.ln_1'),
        'transformer/ln2': norm(f'{layer}.ln_2'),
        'transformer/w_qkv': [(f'{layer}.attn.c_attn.weight', 'M (N K D) -> N M K D')],
        'transformer/b_qkv': [(f'{layer}.attn.c_attn.bias', '(N K D) -> N K D')],
        'transformer/w_o': [(f'{layer}.attn.c_proj.weight', '(K D) M -> M K D')],
        'transformer/b_o': [(f'{layer}.attn.c_proj.bias', 'M -> M')],
        'transformer/w_up': [(f'{layer}.mlp.c_fc.weight', 'M F -> M F')],
        'transformer/b_up': [(f'{layer}.mlp.c_fc.bias', 'F -> F')],
        'transformer/w_down': [(f'{layer}.mlp.c_proj.weight', 'F M -> M F')],
        'transformer/b_down': [(f'{layer}.mlp.c_proj.bias', 'M -> M')],
        'final_layer_norm': norm('transformer.ln_f'),
    }


def of_opt() -> dict[str, list[tuple[str, str]]]:
    layer, attention = 'model.decoder.layers.{}', 'model.decoder.layers.{}.self_attn'
    return {
        'embed': [('model.decoder.embed_tokens.weight', 'V M -> V M')],
        'positions': [('model.decoder.embed_positions.weight', 'P M -> P M')],
        'transformer/ln1': norm(f'{layer}.self_attn_layer_norm'),
        'transformer/ln2': norm(f'{layer}.final_layer_norm'),
        'transformer/w_qkv': [(f'{attention}.{x}_proj.weight', '(K D) M -> M K D') for x in 'qkv'],
        'transformer/b_qkv': [(f'{attention}.{x}_proj.bias', '(K D) -> K D') for x in 'qkv'],
        'transformer/w_o': [(f'{attention}.out_proj.weight', 'M (K D) -> M K D')],
        'transformer/b_o': [(f'{attention}.out_proj.bias', 'M -> M')],
        'transformer/w_up': [(f'{layer}.fc1.weight', 'F M -> M F')],
        'transformer/b_up': [(f'{layer}.fc1.bias', 'F -> F')],
        'transformer/w_down': [(f'{layer}.fc2.weight', 'M F -> M F')],
        'transformer/b_down': [(f'{layer}.fc2.bias', 'M -> M')],
        'final_layer_norm': norm('model.decoder.final_layer_norm'),
    }


def norm(name: str) -> list[tuple[str, str]]:
    return [(f'{name}.weight', 'M -> M'), (f'{name}.bias', 'M -> M')]


PUBLISHED_ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu', 'relu': 'relu'}


def model_of(config) -> Model:
    """The model that a published config.json describes.

    Args:
      config: models.huggingface.Fields.
    """
    is_opt = config.take('model_type') == 'opt'
    names = OPT_FIELDS if is_opt else GPT2_FIELDS
    d_model, heads, count, positions = [config.take(names[ours]) for ours in ('d_model', 'n_kv', 'layers', 'positions')]
    config.require(tie_word_embeddings=True)
    if is_opt:
        config.require(do_layer_norm_before=True, enable_bias=True, layer_norm_elementwise_affine=True)
        if config.take('word_embed_proj_dim', None) not in (None, d_model):
            config.refuse('word_embed_proj_dim', f'expected {d_model}, as hidden_size')
    else:
        config.require(scale_attn_weights=True)
    activation = config.take('activation_function', 'relu' if is_opt else 'gelu_new')
    if activation not in PUBLISHED_ACTIVATIONS:
        config.refuse('activation_function', f'expected one of {", ".join(PUBLISHED_ACTIVATIONS)}')
    first = 2 if is_opt else 0
    return Model(
        d_model=d_model,
        n_kv=heads,
        d_head=d_model // heads,
        layers=count,
        vocab=config.take('vocab_size'),
        d_ff=config.take(names['d_ff'], None) or 4 * d_model,
        positions=positions + first,
        first_position=first,
        activation=PUBLISHED_ACTIVATIONS[activation],
        norm_eps=1e-5 if is_opt else config.take('layer_norm_epsilon', 1e-5),
    )


GPT2_FIELDS = {
    'd_model': 'n_embd',
    'n_kv': 'n_head',
    'layers': 'n_layer',
    'positions': 'n_positions',
    'd_ff': 'n_inner',
}
OPT_FIELDS = {
    'd_model': 'hidden_size',
    'n_kv': 'num_attention_heads',
    'layers': 'num_hidden_layers',
    'positions': 'max_position_embeddings',
    'd_ff': 'ffn_dim',
}


def config_of(model: Model) -> dict[str, Any]:
    """The other way round."""
    names = OPT_FIELDS if model.first_position else GPT2_FIELDS
    activations = {ours: theirs for theirs, ours in reversed(PUBLISHED_ACTIVATIONS.items())}
    return {
        'model_type': 'opt' if model.first_position else 'gpt2',
        'architectures': ['OPTForCausalLM' if model.first_position else 'GPT2LMHeadModel'],
        **{theirs: getattr(model, ours) for ours, theirs in names.items()},
        names['positions']: model.positions - model.first_position,
        **({'word_embed_proj_dim': model.d_model} if model.first_position else {'layer_norm_epsilon': model.norm_eps}),
        'vocab_size': model.vocab,
        'activation_function': activations[model.activation],
        'tie_word_embeddings': True,
    }
