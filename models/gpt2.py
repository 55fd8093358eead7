"""GPT-2 and OPT: what they differ in are fields of `Model`.

Against Llama: layer norms with a bias, learned positions, biases everywhere, one feed-forward matrix on the way up, one
table at both ends. GPT-2 is stored transposed, with q, k and v in one tensor; OPT's table of positions begins at row 2.
Legend as in train.py; no heads share keys, so Q is 1. models/layers.py says what a family's file holds and
who calls it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from models import layers
from models.config import BERT, GPT, ConfigJson, DecoderSizes, Fields, Key, Keys, Kind
from models.weights import Table, Weight, bias, exact, matrix
from runtime.config.keys import Count, Positive, Steps
from shardlib.shardtypes import i32, u32
from shardlib.typed import typed

ACTIVATIONS = {'gelu_tanh': jax.nn.gelu, 'gelu': functools.partial(jax.nn.gelu, approximate=False), 'relu': jax.nn.relu}


KIND = 'decoder'


@dataclass(frozen=True, kw_only=True)
class Model(DecoderSizes):
    positions: Count  # P, rows of the table of positions; no row of tokens may be longer
    first_position: Steps = 0  # the row of the table that the first token takes (OPT: 2)
    activation: Literal['gelu_tanh', 'gelu', 'relu'] = 'gelu_tanh'  # between the feed-forward's two matrices
    norm_eps: Positive = 1e-5  # added to the variance in layer norms


# == Weights ===========================================================================================================
GPT2, OPT = 'transformer.h.{}', 'model.decoder.layers.{}'
OPT_ATTENTION = f'{OPT}.self_attn'


def either(gpt2: Any, opt: Any) -> Callable:
    """One value for GPT-2, another for OPT."""
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
final, mask = layers.final, layers.causal


@typed
def embed(model: Model, ends: Ends, tokens: u32['B/b L/c'], position: i32['B/b L/c'], M: str) -> jax.Array:
    """Rows of both tables."""
    of_position = layers.rows_of_learned(ends.positions, position + model.first_position, M)
    return layers.embed(model, ends, tokens, position, M) + of_position


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, None]:
    """One layer; x lies as 'B/b L/c' with M."""
    y, kept = layers.attention_half(model, x, w, attend, layers.without_rotations(model), (w.ln1, None), M)
    x = x + y
    return x + layers.feed_forward_half(model, x, w, ACTIVATIONS[model.activation], (w.ln2, None), M), kept, None


# == config.json =======================================================================================================
ACTIVATION = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu', 'relu': 'relu'}


def activation(default: str) -> Keys:
    def read(config: Fields, before: dict[str, Any]) -> dict[str, Any]:
        name = config.take('activation_function', default)
        if name not in ACTIVATION:
            config.refuse('activation_function', f'expected one of {", ".join(ACTIVATION)}')
        return {'activation': ACTIVATION[name]}

    names = {ours: theirs for theirs, ours in reversed(ACTIVATION.items())}
    return Keys(read, lambda model: {'activation_function': names[model.activation]})


def projection_from(config: Fields, before: dict[str, Any]) -> dict[str, Any]:
    """Refuses OPT 350M, whose embeddings have another size."""
    if config.take('word_embed_proj_dim', None) not in (None, before['d_model']):
        config.refuse('word_embed_proj_dim', f'expected {before["d_model"]}, as hidden_size')
    return {}


OF_OPT = BERT | {
    'd_ff': Key('ffn_dim'),
    'positions': Key('max_position_embeddings', read=lambda n, _: n + 2, write=lambda model: model.positions - 2),
    'norm_eps': Key('', lambda *_: 1e-5),
    'activation': activation('relu'),
    'projection': Keys(projection_from, lambda model: {'word_embed_proj_dim': model.d_model}),
}
CONFIG = ConfigJson(
    Model,
    {
        'gpt2': Kind(
            'GPT2LMHeadModel',
            keys=GPT | {'positions': Key('n_positions'), 'activation': activation('gelu_new')},
            only={'scale_attn_weights': True},
        ),
        'opt': Kind(
            'OPTForCausalLM',
            {'first_position': 2},
            OF_OPT,
            {'do_layer_norm_before': True, 'enable_bias': True, 'layer_norm_elementwise_affine': True},
        ),
    },
    {},
    tie_word_embeddings=True,
)
model_of, config_of = CONFIG.functions
