"""BERT: an encoder whose tokens all see each other, hidden states and the logits of masked tokens.

    batch = masked(batch, rows, seed, config.masking.share, mask, model.vocab)       # the model reads `batch.inputs`
    x, _ = layers.hidden(bert, model, weights, batch.inputs, segment, position)      # 'B/b L/c M', for the unembedding

Against Llama: norms behind each half, layer norms, biases and learned positions; a token is read itself, not the one
before it, and some are masked. Nothing here decodes. The hidden states are the last layer's result, `final` is the head
that predicts; the pooler and the head for next sentences are neither read nor written. Legend as in train.py, with P
positions and N kinds of tokens. models/layers.py says what a family's file holds.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import layers
from models.config import BERT, ConfigJson, Key, Kind, Sizes
from models.dropout import mixed, random_bits
from models.layers import Mask, WeightedBatch, act, gather_residual
from models.weights import Table, Weight, bias, exact, matrix
from runtime.config.keys import Count, Positive
from shardlib import shardops
from shardlib.products import product
from shardlib.shardtypes import i32, pytree_dataclass, u32
from shardlib.spec import parse
from shardlib.typed import typed

KIND = 'encoder'


@dataclass(frozen=True, kw_only=True)
class Model(Sizes):
    positions: Count  # P, rows of the table of positions; no row of tokens may be longer
    kinds: Count = 2  # N, kinds of tokens: those of a first text, and those of a second
    norm_eps: Positive = 1e-12  # added to the variance in layer norms


def mask(model: Model) -> Mask:
    return Mask(is_causal=False)


# == Batch =============================================================================================================
@pytree_dataclass
class MaskedBatch(WeightedBatch):
    """Rows with masked tokens; only these have a weight."""

    inputs: u32['B/b L']  # what the model reads


@typed
def masked(batch: WeightedBatch, rows: u32['B/b'], seed: u32[''], share: float, mask: int, vocab: int) -> MaskedBatch:
    """Chooses targets: 80 % of them are read as `mask`, 10 % as a random token, 10 % unchanged (Devlin et al. 2018,
    3.1). The choice depends only on the seed, the row's number and the position in the row.

    Args:
      rows: the rows' numbers in the whole batch.
      share: the share of tokens that become targets.
    """
    dims, shape = parse('B/b L').dims[1:], batch.targets.shape[1:]
    is_chosen, kind, token = (random_bits(mixed(mixed(seed, jnp.uint32(n)), rows), dims, shape) for n in range(3))
    chosen = (is_chosen < np.uint32(share * (2**32 - 1))) & batch.is_target
    read = jnp.where(kind < np.uint32(0.9 * 2**32), token % np.uint32(vocab), batch.targets)
    read = jnp.where(kind < np.uint32(0.8 * 2**32), jnp.uint32(mask), read)
    weight = jnp.where(chosen, batch.weight, 0.0)
    inputs = jnp.where(chosen, read, batch.targets)
    return MaskedBatch(batch.targets, batch.is_seq_start, chosen, weight, inputs)


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
def embed(
    model: Model, ends: Ends, tokens: u32['B/b L/c'], position: i32['B/b L/c'], M: str,
    kinds: i32['B/b L/c'] | None = None,
) -> jax.Array:  # fmt: skip
    """The normalized sum of rows of three tables. kinds: None means zeros."""
    x = layers.embed(model, ends, tokens, position, M) + layers.rows_of_learned(ends.positions, position, M)
    x = x + layers.rows_of_learned(ends.kinds, jnp.zeros_like(position) if kinds is None else kinds, M)
    return layers.norm(x, ends.first_norm, model.norm_eps, M)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/b L/c'], M: str
) -> tuple[jax.Array, Any, None]:
    """One layer; x lies as 'B/b L/c' with M. Each half's norm takes the sum of what the half reads and what it adds."""
    none = (None, None)
    y, kept = layers.attention_half(model, x, w, attend, layers.without_rotations(model), none, M)
    x = layers.norm(x + y, w.ln1, model.norm_eps, M)
    y = layers.feed_forward_half(model, x, w, functools.partial(jax.nn.gelu, approximate=False), none, M)
    return layers.norm(x + y, w.ln2, model.norm_eps, M), kept, None


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/b L/c M']:
    """The input of the unembedding. 2M/t bytes a token are gathered over t."""
    y = product('B/b L/c M, M M2/t -> B/b L/c M2/t', gather_residual(x, M), ends.w_predict)
    y: act['B/b L/c M'] = shardops.all_gather('B/b L/c M2/t -> B/b L/c M2', y)
    y = y + ends.b_predict[None, None]
    return layers.norm(jax.nn.gelu(y, approximate=False), ends.predict_norm, model.norm_eps)


# == config.json =======================================================================================================
CONFIG = ConfigJson(
    Model,
    {'bert': Kind('BertForMaskedLM')},
    BERT
    | {
        'd_ff': Key('intermediate_size'),
        'positions': Key('max_position_embeddings'),
        'kinds': Key('type_vocab_size', 2),
        'norm_eps': Key('layer_norm_eps', 1e-12),
    },
    hidden_act='gelu',
    position_embedding_type='absolute',
    is_decoder=False,
    add_cross_attention=False,
    tie_word_embeddings=True,
)
model_of, config_of = CONFIG.functions
