"""BERT: an encoder whose tokens all see each other, hidden states and the logits of masked tokens.

    x = bert.hidden(model, weights, inputs, kinds, segment, position)       # 'B/b L/c M', of each token
    loss = layers.loss_sum(ends.unembed, bert.predict(model, ends, x), batch)   # of batch's targets at its own places

Against Llama: norms behind each half, layer norms, biases and learned positions. Nothing here decodes. `predict` stands
between the hidden states and the unembedding; the pooler and the head for next sentences are neither read nor written.
Legend as in train.py, with P positions and N kinds of tokens. models/layers.py says what a family's file holds; `embed`
has the tokens' kinds besides, so that `hidden` is the family's own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_extra import explicit_activation_checkpointing, save_for_backward
from models import layers
from models.context import ALONE, attention_where, deal_heads
from models.layers import Mask, act, enter, layer_norm, leave, part
from models.weights import Table, Weight, bias, exact, matrix
from runtime.config.keys import Count, Positive
from shardlib import shardops
from shardlib.products import product
from shardlib.shardtypes import f32, i32, u32
from shardlib.typed import typed


@dataclass(frozen=True, kw_only=True)
class Model:
    d_model: Count  # M
    n_kv: Count  # K, heads
    d_head: Count  # D
    layers: Count
    vocab: Count  # V
    d_ff: Count  # F
    positions: Count  # P, rows of the table of positions; no row of tokens may be longer
    kinds: Count = 2  # N, of tokens: those of a first text, and of a second
    norm_eps: Positive = 1e-12  # added to the variance in layer norms
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations and matrix products


def mask(model: Model) -> Mask:
    return Mask()


# == Weights ===========================================================================================================
LAYER, TABLES, HEAD = 'bert.encoder.layer.{}', 'bert.embeddings', 'cls.predictions'
ATTENTION, QKV = f'{LAYER}.attention.self', ('query', 'key', 'value')


def norm_of(name: str) -> Weight:
    return exact('2 M/w/t -> 2 M', (1, 0), (f'{name}.LayerNorm.weight', f'{name}.LayerNorm.bias'), 'M')


TABLE = Table({  # at rest -> in use; first values; the published tensor, and how it lies
    'embed': matrix('V/t M/w -> V/t M', 'M', f'{TABLES}.word_embeddings.weight', 'V M'),
    'positions': matrix('P M/w/t -> P M', 'M', f'{TABLES}.position_embeddings.weight', 'P M'),
    'kinds': matrix('N M/w/t -> N M', 'M', f'{TABLES}.token_type_embeddings.weight', 'N M'),
    'first_norm': norm_of(TABLES),
    'transformer': {
        'w_q': matrix('M/w K/t D -> M K/t D', 'M', f'{ATTENTION}.query.weight', '(K D) M'),
        'w_kv': matrix('2 M/w K/t D -> M K/t D', 'M', tuple(f'{ATTENTION}.{x}.weight' for x in QKV[1:]), '(K D) M'),
        'b_qkv': bias('3 K/t D -> 3 K/t D', 0, tuple(f'{ATTENTION}.{x}.bias' for x in QKV), '(K D)'),
        'w_o': matrix('M/w K/t D -> M K/t D', 'K D', f'{LAYER}.attention.output.dense.weight', 'M (K D)'),
        'b_o': bias('M/w/t -> M', 0, f'{LAYER}.attention.output.dense.bias', 'M'),
        'ln1': norm_of(f'{LAYER}.attention.output'),
        'w_up': matrix('M/w F/t -> M F/t', 'M', f'{LAYER}.intermediate.dense.weight', 'F M'),
        'b_up': bias('F/t/w -> F/t', 0, f'{LAYER}.intermediate.dense.bias', 'F'),
        'w_down': matrix('M/w F/t -> M F/t', 'F', f'{LAYER}.output.dense.weight', 'M F'),
        'b_down': bias('M/w/t -> M', 0, f'{LAYER}.output.dense.bias', 'M'),
        'ln2': norm_of(f'{LAYER}.output'),
    },
    'w_predict': matrix('M/w M2/t -> M M2/t', 'M', f'{HEAD}.transform.dense.weight', 'M2 M'),
    'b_predict': bias('M/w/t -> M', 0, f'{HEAD}.transform.dense.bias', 'M'),
    'predict_norm': norm_of(f'{HEAD}.transform'),
    'unembed_bias': exact('V/t/w -> V/t', 0, f'{HEAD}.bias', 'V'),
}, sizes={'N': 'kinds', 'M2': 'd_model'})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Forward pass ======================================================================================================
@typed
def norm(x: jax.Array, scale_and_bias: f32['2 M'], eps: float, M: str) -> jax.Array:
    """Layer norm of what lies as the residual: where M is split, twice 4 bytes a token are summed over t."""
    if M == 'M':
        return layer_norm(x, scale_and_bias, eps)
    x: f32['B/b L/c M/t'] = x.astype(jnp.float32)
    size, scale_and_bias = scale_and_bias.shape[1], shardops.slice('2 M -> 2 M/t', scale_and_bias)
    mean = shardops.psum('B/b L/c +t -> B/b L/c', shardops.sum_unreduced('B/b L/c M/t -> B/b L/c +t', x)) / size
    x = x - mean[:, :, None]
    square = shardops.psum('B/b L/c +t -> B/b L/c', shardops.sum_unreduced('B/b L/c M/t -> B/b L/c +t', x * x))
    inverse = lax.rsqrt(square / size + eps)[:, :, None]
    return (x * inverse * scale_and_bias[0][None, None] + scale_and_bias[1][None, None]).astype(act.dtype)


@typed
def embed(
    model: Model, ends: Ends, tokens: u32['B/b L/c'], kinds: i32['B/b L/c'], position: i32['B/b L/c'], M: str
) -> jax.Array:
    """Rows of three tables, and a norm."""
    tables = [ends.positions, ends.kinds]
    if M != 'M':
        tables = [shardops.slice('P M -> P M/t', ends.positions), shardops.slice('N M -> N M/t', ends.kinds)]
    x = layers.embed(ends.embed, tokens, M)
    x = x + shardops.index_unreduced(f'[P] {M}, B/b L/c -> B/b L/c {M}', tables[0], position)
    x = x + shardops.index_unreduced(f'[N] {M}, B/b L/c -> B/b L/c {M}', tables[1], kinds)
    return norm(x, ends.first_norm, model.norm_eps, M)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, None]:
    """One layer; x lies as 'B/b L/c' with M. `attend(q, k, v)` returns o and what of k and v is to be kept, which the
    layer hands on; the logits are q·k, no factor."""
    x: act[f'B/b L/c {M}'] = x

    with jax.named_scope('attention'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
        q, k, v = layers.heads_of(gathered, w)
        o, kept = attend(q * model.d_head**-0.5, k[:, :, 0], v)
        y = leave(product('B/b L/c K/t D, M K/t D -> B/b L/c M +t', o[:, :, 0], w.w_o), M)
        x = norm(x + y + part(w.b_o, M)[None, None], w.ln1, model.norm_eps, M)

    with jax.named_scope('ffn'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, spares the product with w_o, sums, the gather
        y = leave(layers.network(gathered, w, functools.partial(jax.nn.gelu, approximate=False)), M)
        return norm(x + y + part(w.b_down, M)[None, None], w.ln2, model.norm_eps, M), kept, None


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/b L/c M']:
    """The hidden states as a whole on each device."""
    return enter(x, M)


@typed
def predict(model: Model, ends: Ends, x: act['B/b L/c M']) -> act['B/b L/c M']:
    """What logits are computed from, with `ends.unembed`."""
    y = product('B/b L/c M, M M2/t -> B/b L/c M2/t', x, ends.w_predict)
    y: act['B/b L/c M'] = shardops.all_gather('B/b L/c M2/t -> B/b L/c M2', y)
    y = y + ends.b_predict[None, None]
    return layer_norm(jax.nn.gelu(y, approximate=False), ends.predict_norm, model.norm_eps)


def hidden(
    model, weights, inputs, kinds, segment, position, adapt: Callable = lambda w, low: w, low=None, *,
    ends=None, reduce_dtype: str = 'float32', kept: tuple[str, ...] = ('save_for_backward',), unroll: bool = False,
):  # fmt: skip
    """The hidden states of all tokens, act['B/b L/c M']; options as of layers.hidden.

    Args:
      inputs, kinds: the tokens themselves, u32['B/b L'], some of them masked, and the number of the kind of each.
      segment, position: as of layers.inputs_of; a token sees all of its own segment. Padding has a number of its own.
    """
    layers.require_positions(model, inputs.shape[1])
    ends = ends or gather_ends(weights, reduce_dtype)
    inputs, kinds, position = map(ALONE.part, (inputs, kinds, position))
    whole = functools.partial(attention_where, allowed=segment[:, :, None] == segment[:, None, :])

    def attend(q, k, v):
        return deal_heads(whole, q, k, v), None

    @functools.partial(explicit_activation_checkpointing, names=kept)
    def one(x, of_layer):
        w, low = of_layer
        return layer(model, x, adapt(gather_layer(w, reduce_dtype), low), attend, position, 'M/t')[0], None

    with jax.named_scope('embed'):
        x = embed(model, ends, inputs, kinds, position, 'M/t')
    x, _ = lax.scan(one, x, (weights.transformer, low), unroll=unroll)
    return final(model, ends, x, 'M/t')


# == config.json =======================================================================================================
def model_of(config) -> Model:
    """The model that a published config.json describes.

    Args:
      config: models.huggingface.Fields.
    """
    heads, d_model = config.take('num_attention_heads'), config.take('hidden_size')
    config.require(
        model_type='bert',
        hidden_act='gelu',
        position_embedding_type='absolute',
        is_decoder=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    return Model(
        d_model=d_model,
        n_kv=heads,
        d_head=d_model // heads,
        layers=config.take('num_hidden_layers'),
        vocab=config.take('vocab_size'),
        d_ff=config.take('intermediate_size'),
        positions=config.take('max_position_embeddings'),
        kinds=config.take('type_vocab_size', 2),
        norm_eps=config.take('layer_norm_eps', 1e-12),
    )


def config_of(model: Model) -> dict[str, Any]:
    """The other way round."""
    return {
        'model_type': 'bert',
        'architectures': ['BertForMaskedLM'],
        'hidden_size': model.d_model,
        'num_attention_heads': model.n_kv,
        'num_hidden_layers': model.layers,
        'vocab_size': model.vocab,
        'intermediate_size': model.d_ff,
        'max_position_embeddings': model.positions,
        'type_vocab_size': model.kinds,
        'layer_norm_eps': model.norm_eps,
        'hidden_act': 'gelu',
    }
