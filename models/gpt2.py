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

from jax_extra import save_for_backward
from kernels.attention import KernelName
from models import layers
from models.layers import Mask, act, enter, layer_norm, leave, part
from models.weights import Table, Weight, bias, exact, matrix
from runtime.config.keys import Count, Positive, Steps
from shardlib import shardops
from shardlib.products import product
from shardlib.shardtypes import i32, u32
from shardlib.typed import typed

ACTIVATIONS = {'gelu_tanh': jax.nn.gelu, 'gelu': functools.partial(jax.nn.gelu, approximate=False), 'relu': jax.nn.relu}


KIND = 'decoder'


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
GPT2, OPT = 'transformer.h.{}', 'model.decoder.layers.{}'
OPT_ATTENTION = f'{OPT}.self_attn'


def either(gpt2: Any, opt: Any) -> Callable:
    """What GPT-2 has, or OPT."""
    return lambda model: opt if model.first_position else gpt2


def norm(gpt2: str, opt: str) -> Weight:
    names = ((f'{name}.weight', f'{name}.bias') for name in (gpt2, opt))
    return exact('2 M/w/t -> 2 M', (1, 0), either(*names), 'M')  # scale and bias


def qkv(kind: str) -> Callable:
    return either(f'{GPT2}.attn.c_attn.{kind}', tuple(f'{OPT_ATTENTION}.{x}_proj.{kind}' for x in 'qkv'))


TABLE = Table({  # at rest -> in use; first values; the tensor that GPT-2 publishes, or OPT, and how it lies
    'embed': matrix(
        'V/t M/w -> V/t M', 'M', either('transformer.wte.weight', 'model.decoder.embed_tokens.weight'), 'V M'
    ),
    'positions': matrix(
        'P M/w/t -> P M', 'M', either('transformer.wpe.weight', 'model.decoder.embed_positions.weight'), 'P M'
    ),
    'transformer': {
        'ln1': norm(f'{GPT2}.ln_1', f'{OPT_ATTENTION}_layer_norm'),
        'ln2': norm(f'{GPT2}.ln_2', f'{OPT}.final_layer_norm'),
        'w_qkv': matrix('3 M/w K/t D -> M K/t D', 'M', qkv('weight'), either('M (N K D)', '(K D) M')),
        'b_qkv': bias('3 K/t D -> 3 K/t D', 0, qkv('bias'), either('(N K D)', '(K D)')),
        'w_o': matrix(
            'M/w K/t D -> M K/t D', 'K D', either(f'{GPT2}.attn.c_proj.weight', f'{OPT_ATTENTION}.out_proj.weight'),
            either('(K D) M', 'M (K D)'),
        ),
        'b_o': bias('M/w/t -> M', 0, either(f'{GPT2}.attn.c_proj.bias', f'{OPT_ATTENTION}.out_proj.bias'), 'M'),
        'w_up': matrix(
            'M/w F/t -> M F/t', 'M', either(f'{GPT2}.mlp.c_fc.weight', f'{OPT}.fc1.weight'), either('M F', 'F M')
        ),
        'b_up': bias('F/t/w -> F/t', 0, either(f'{GPT2}.mlp.c_fc.bias', f'{OPT}.fc1.bias'), 'F'),
        'w_down': matrix(
            'M/w F/t -> M F/t', 'F', either(f'{GPT2}.mlp.c_proj.weight', f'{OPT}.fc2.weight'), either('F M', 'M F')
        ),
        'b_down': bias('M/w/t -> M', 0, either(f'{GPT2}.mlp.c_proj.bias', f'{OPT}.fc2.bias'), 'M'),
    },
    'final_layer_norm': norm('transformer.ln_f', 'model.decoder.final_layer_norm'),
})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Forward pass ======================================================================================================
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/b L/c'], position: i32['B/b L/c'], M: str) -> jax.Array:
    """Rows of both tables."""
    table = ends.positions if M == 'M' else shardops.slice('P M -> P M/t', ends.positions)
    of_position = shardops.index_unreduced(f'[P] {M}, B/b L/c -> B/b L/c {M}', table, position + model.first_position)
    return layers.embed(ends.embed, tokens, M) + of_position


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, None]:
    """One layer; x lies as 'B/b L/c' with M. `attend(q, k, v)` returns o and what of k and v is to be kept, which the
    layer hands on; the logits are q·k, no factor."""
    x: act[f'B/b L/c {M}'] = x

    with jax.named_scope('attention'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
        q, k, v = layers.heads_of(layer_norm(gathered, w.ln1, model.norm_eps), w)
        o, kept = attend(q * model.d_head**-0.5, k[:, :, 0], v)
        y = product('B/b L/c K/t D, M K/t D -> B/b L/c M +t', o[:, :, 0], w.w_o)
        x = x + leave(y, M) + part(w.b_o, M)[None, None]

    with jax.named_scope('ffn'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, spares the product with w_o, its sum, the gather
        y = layers.network(layer_norm(gathered, w.ln2, model.norm_eps), w, ACTIVATIONS[model.activation])
        return x + leave(y, M) + part(w.b_down, M)[None, None], kept, None


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/b L/c M']:
    """The hidden states that logits are computed from."""
    return layer_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == config.json =======================================================================================================
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
