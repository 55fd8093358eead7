"""T5 1.0 and 1.1 (Flan-T5 is 1.1): an encoder, and a decoder that also attends to the encoder's results.

    x = t5.hidden(model, weights, read, read_segment, inputs, segment)      # 'B/b L/c M', of the decoder's tokens

Decoding encodes once: `encoded = encode(...)`, then `memory(...)` computes each decoder layer's keys and values of it.
A layer's `cross(q, project)` attends to those without calling `project`, its `attend` to the tokens written so far.
Distances are between places in a row, so no token needs its position. Legend as in train.py, with S tokens read
and N buckets of distances. models/layers.py says what a family's file holds; here a layer has `cross`, not positions.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_extra import save_for_backward
from models import layers
from models.config import ConfigJson, Fields, Key, Keys, Kind, Sizes
from models.context import ALONE, attention_where, deal_heads
from models.layers import WeightedBatch, act, gather_residual, reduce_residual
from models.weights import Table, Weight, exact, matrix
from runtime.config.keys import Count, Positive
from shardlib import shardops
from shardlib.products import product
from shardlib.shardtypes import bool_, f32, i32, pytree_dataclass, u32
from shardlib.typed import typed

KIND = 'both'


@dataclass(frozen=True, kw_only=True)
class Model(Sizes):
    encoder_layers: Count  # how many
    layers: Count  # the decoder's layers
    buckets: Count = 32  # N, of distances; an encoder's are half for keys before the query, half for those after it
    max_distance: Count = 128  # longer ones share one bucket
    gated: bool = True  # gelu(gate) · up (1.1); else relu(up) (1.0)
    tied: bool = False  # the embedding / sqrt(M) is the unembedding (1.0)
    norm_eps: Positive = 1e-6  # added to the mean square in RMSNorm


mask = layers.causal


# == Weights ===========================================================================================================
def stack(name: str, ffn: int) -> dict[str, Weight]:
    """The layers of the encoder or of the decoder; ffn: the feed-forward's number in a published block."""
    block = f'{name}.block.{{}}.layer'
    attention, dense = f'{block}.0.SelfAttention', f'{block}.{ffn}.DenseReluDense'
    kv = tuple(f'{attention}.{x}.weight' for x in 'kv')
    return {
        'ln1': exact('M/w/t -> M', 1, f'{block}.0.layer_norm.weight', 'M'),
        'ln2': exact('M/w/t -> M', 1, f'{block}.{ffn}.layer_norm.weight', 'M'),
        'w_q': matrix('M/w K/t D -> M K/t D', 'M', f'{attention}.q.weight', '(K D) M', scale=small_scale),
        'w_kv': matrix('2 M/w K/t D -> M K/t D', 'M', kv, '(K D) M'),
        'w_o': matrix('M/w K/t D -> M K/t D', 'K D', f'{attention}.o.weight', 'M (K D)'),
        'w_up': matrix('M/w F/t -> M F/t', 'M', lambda model: f'{dense}.wi{"_1" if model.gated else ""}.weight', 'F M'),
        'w_down': matrix('M/w F/t -> M F/t', 'F', f'{dense}.wo.weight', 'M F'),
        'w_gate': matrix('M/w F/t -> M F/t', 'M', f'{dense}.wi_0.weight', 'F M', lambda model: model.gated),
    }


def small_scale(model: Model) -> float:
    """Smaller first values, since T5 does not scale logits."""
    return model.d_head**-0.5


def of_stack(name: str) -> dict[str, Weight]:
    table = f'{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
    return {
        f'{name}_bias': exact('N K/t -> N K/t', 'M', table, 'N K'),
        f'{name}_norm': exact('M/w/t -> M', 1, f'{name}.final_layer_norm.weight', 'M'),
    }


CROSS = 'decoder.block.{}.layer.1'
CROSS_KV = tuple(f'{CROSS}.EncDecAttention.{x}.weight' for x in 'kv')
TABLE = Table({  # at rest -> in use; first values; the published tensor, and how it lies; which models have it
    'embed': matrix('V/t M/w -> V/t M', '1', 'shared.weight', 'V M'),
    'unembed': matrix('V/t M/w -> V/t M', 'M', 'lm_head.weight', 'V M', lambda model: not model.tied),
    'encoder': stack('encoder', 1),
    **of_stack('encoder'),
    'decoder': {
        **stack('decoder', 2),
        'ln_cross': exact('M/w/t -> M', 1, f'{CROSS}.layer_norm.weight', 'M'),
        'cross_q': matrix(
            'M/w K/t D -> M K/t D', 'M', f'{CROSS}.EncDecAttention.q.weight', '(K D) M', scale=small_scale
        ),
        'cross_kv': matrix('2 M/w K/t D -> M K/t D', 'M', CROSS_KV, '(K D) M'),
        'cross_o': matrix('M/w K/t D -> M K/t D', 'K D', f'{CROSS}.EncDecAttention.o.weight', 'M (K D)'),
    },
    **of_stack('decoder'),
}, sizes={'N': 'buckets'}, counts={'encoder': 'encoder_layers'})  # fmt: skip
Layer, Weights, Gathered, Ends = TABLE.types
init, gather_layer, gather_ends, published = TABLE.functions


# == Distances =========================================================================================================
def first_distances(buckets: int, max_distance: int) -> list[int]:
    """The least distance of each bucket but the first: exact up to half of them, then growing by a constant factor."""
    exact = buckets // 2
    distance = np.arange(exact, max_distance + 1, dtype=np.float32)
    number = np.log(distance / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    number = np.minimum(exact + (number * np.float32(buckets - exact)).astype(np.int32), buckets - 1)
    return [*range(1, exact), *(exact + int(np.argmax(number >= distance)) for distance in range(exact, buckets))]


def bucket_of(model: Model, distance: jax.Array, both_ways: bool) -> jax.Array:
    """The bucket of each distance, the query's place minus the key's."""
    buckets = model.buckets // 2 if both_ways else model.buckets
    far = jnp.abs(distance) if both_ways else jnp.maximum(distance, 0)
    bucket = buckets * (distance < 0).astype(jnp.int32) if both_ways else jnp.zeros_like(far)
    for first in first_distances(buckets, model.max_distance):
        bucket = bucket + (far >= first).astype(jnp.int32)
    return bucket


@typed
def relative_bias(model: Model, table: f32['N K/t'], distance: i32['L S'], both_ways: bool) -> f32['K/h L S']:
    bucket = bucket_of(model, distance, both_ways)
    bias = shardops.index_unreduced('[N] K/t, L S -> L S K/t', table, bucket)
    return shardops.slice('K/t L S -> K/h L S', jnp.moveaxis(bias, -1, 0))


@typed
def decoding_bias(model: Model, ends: Ends, distance: i32['B/b L S']) -> f32['B/b K/t L S']:
    """The bias of the decoder's attention while it generates: rows are at different positions."""
    bucket = bucket_of(model, distance, both_ways=False)
    return jnp.moveaxis(shardops.index_unreduced('[N] K/t, B/b L S -> B/b L S K/t', ends.decoder_bias, bucket), -1, 1)


# == Batch =============================================================================================================
@pytree_dataclass
class PairBatch(WeightedBatch):
    """Pairs, several a row, as `tools.tokenize_text format=pairs` writes them: the decoder's n-th sequence of a row is
    written to the n-th that the encoder reads."""

    read: u32['B/b S']
    read_starts: bool_['B/b S']  # the token starts a sequence


@typed
def pairs_of(batch: PairBatch, bos_id: int) -> tuple[u32['B/b S'], i32['B/b S'], u32['B/b L'], i32['B/b L']]:
    """Arguments of `hidden` after its weights: read, read_segment, inputs, segment. bos_id: decoder_start_token_id."""
    inputs, segment, _ = layers.inputs_of(batch, bos_id)
    return batch.read, jnp.cumsum(batch.read_starts, axis=1, dtype=jnp.int32), inputs, segment


# == Forward pass ======================================================================================================
embed = layers.embed


@typed
def project(w: Gathered, encoded: act['B/b S/c M']) -> tuple[act['B/b S/c K/t D'], act['B/b S/c K/t D']]:
    """A decoder layer's keys and values of the encoder's results."""
    k = product('B/b S/c M, M K/t D -> B/b S/c K/t D', encoded, w.cross_k)
    return k, product('B/b S/c M, M K/t D -> B/b S/c K/t D', encoded, w.cross_v)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, cross: Callable | None, M: str
) -> tuple[jax.Array, Any, None]:
    """One layer of the decoder, or without `cross` of the encoder; x lies as 'B/b L/c' with M.

    `attend(q, k, v)` returns o and what of k and v is to be kept; `cross(q, project)` returns o, where
    `project(encoded)` are keys and values. No factor stands before q·k.
    """
    y, kept = layers.attention_half(model, x, w, attend, (lambda q: q, lambda k: k), (w.ln1, None), M)
    x: act[f'B/b L/c {M}'] = x + y

    if cross is not None:
        with jax.named_scope('cross'):
            gathered = save_for_backward(gather_residual(x, M))  # 2M bytes a token, spares w_o's product, sum, gather
            normed = layers.norm(gathered, w.ln_cross, model.norm_eps)
            q = product('B/b L/c M, M K/t D -> B/b L/c K/t D', normed, w.cross_q)
            q = save_for_backward(q)  # 2KD/t bytes a token, spares the product with cross_q
            o = cross(q[:, :, None], functools.partial(project, w))
            x = x + reduce_residual(product('B/b L/c K/t D, M K/t D -> B/b L/c M +t', o[:, :, 0], w.cross_o), M)

    activation = jax.nn.relu if w.w_gate is None else jax.nn.gelu
    return x + layers.feed_forward_half(model, x, w, activation, (w.ln2, None), M), kept, None


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/b L/c M']:
    scale = ends.decoder_norm * model.d_model**-0.5 if model.tied else ends.decoder_norm
    return layers.norm(gather_residual(x, M), scale, model.norm_eps)


@typed
def encoder_end(model: Model, ends: Ends, x: act['B/b L/c M/t']) -> act['B/b L/c M']:
    """The encoder's results, from its last layer's."""
    return layers.norm(gather_residual(x, 'M/t'), ends.encoder_norm, model.norm_eps)


def _stack(model, name, weights, x, attend, cross, low, how: layers.Options):
    """All layers of the encoder or of the decoder; `attend` and `cross` also take a `Drop`."""
    of_layers = TABLE.of_all_layers(name, getattr(weights, name), how.reduce_dtype, how.fp8)
    numbers = (0, model.encoder_layers) if name == 'encoder' else (model.encoder_layers, model.layers)
    stack = (*of_layers, low), None, how.numbers(*numbers)

    def calls(_, drop):
        return [function and functools.partial(function, drop=drop) for function in (attend, cross)]

    return layers.scanned(layer, model, x, stack, how.in_use(TABLE), calls, how)[0]


def encode(model, weights, read, segment, *, ends=None, how: layers.Options = layers.FORWARD):
    """The encoder's results, act['B/b S/c M'], for tokens u32['B/b S']; they see their own segment."""
    ends = ends or gather_ends(weights, how.reduce_dtype)
    place = jnp.arange(read.shape[1], dtype=jnp.int32)
    bias = relative_bias(model, ends.encoder_bias, place[:, None] - place[None], both_ways=True)
    same = segment[:, :, None] == segment[:, None, :]

    def attend(q, k, v, drop):
        return deal_heads(functools.partial(attention_where, allowed=same, bias=bias, drop=drop), q, k, v), None

    x = embed(model, ends, ALONE.part(read), None, 'M/t')
    x = _stack(model, 'encoder', weights, x, attend, None, how.low and how.low[0], how)
    return encoder_end(model, ends, x)


@typed
def memory(weights: Weights, encoded: act['B/b S/c M']) -> act['layers 2 B/b S K/t D']:
    """The keys and values of all layers of the decoder, for decoding."""

    def of_layer(_, w):
        both = jnp.stack(project(gather_layer(w), encoded))
        return None, shardops.all_gather('2 B/b S/c K/t D -> 2 B/b S K/t D', both)

    return lax.scan(of_layer, None, weights.decoder)[1]


def hidden(model, weights, read, read_segment, inputs, segment, *, ends=None, how: layers.Options = layers.FORWARD):
    """The decoder's hidden states before the unembedding, act['B/b L/c M'].

    Args:
      read, read_segment: the encoder's tokens, u32['B/b S'], and the numbers of their segments, i32['B/b S']; a token
        of the decoder sees those of its own segment. Padding has a number of its own, such as 0.
      inputs, segment: the decoder's, as in layers.inputs_of; a sequence begins with decoder_start_token_id.
    """
    ends = ends or gather_ends(weights, how.reduce_dtype)
    with jax.named_scope('encoder'):
        encoded = encode(model, weights, read, read_segment, ends=ends, how=how)
    place = jnp.arange(inputs.shape[1], dtype=jnp.int32)
    distance = place[:, None] - place[None]
    bias = relative_bias(model, ends.decoder_bias, distance, both_ways=False)
    allowed = (segment[:, :, None] == segment[:, None, :]) & (distance >= 0)[None]
    is_read = segment[:, :, None] == read_segment[:, None, :]

    @jax.named_scope('causal')
    def attend(q, k, v, drop):
        return deal_heads(functools.partial(attention_where, allowed=allowed, bias=bias, drop=drop), q, k, v), None

    def cross(q, project, drop):
        of_read = functools.partial(attention_where, allowed=is_read, drop=drop)
        return deal_heads(of_read, q, *project(encoded), is_saved=False)

    with jax.named_scope('embed'):
        x = embed(model, ends, ALONE.part(inputs), None, 'M/t')
    x = _stack(model, 'decoder', weights, x, attend, cross, how.low and how.low[1], how)
    return layers.ended(final, model, ends, x)


# == config.json =======================================================================================================
def ends_from(config: Fields, before: dict[str, Any]) -> dict[str, Any]:
    """The difference between 1.0 and 1.1; transformers 5 writes tie_word_embeddings = true for both."""
    feed_forward = config.take('feed_forward_proj', 'relu')
    if feed_forward not in ('relu', 'gated-gelu'):
        config.refuse('feed_forward_proj', 'relu is that of T5 1.0, gated-gelu that of 1.1')
    gated = feed_forward == 'gated-gelu'
    config.require(is_gated_act=gated, dense_act_fn='gelu_new' if gated else 'relu')
    return {'gated': gated, 'tied': config.take('scale_decoder_outputs', config.take('tie_word_embeddings', True))}


def ends_to(model: Model) -> dict[str, Any]:
    feed_forward = 'gated-gelu' if model.gated else 'relu'
    tied = {'tie_word_embeddings': model.tied, 'scale_decoder_outputs': model.tied}
    return {'feed_forward_proj': feed_forward, **tied}


CONFIG = ConfigJson(
    Model,
    {'t5': Kind('T5ForConditionalGeneration')},
    {
        'd_model': Key('d_model'),
        'n_kv': Key('num_heads'),
        'd_head': Key('d_kv'),
        'encoder_layers': Key('num_layers'),
        'layers': Key('num_decoder_layers', lambda config, before: before['encoder_layers']),
        'vocab': Key('vocab_size'),
        'd_ff': Key('d_ff'),
        'buckets': Key('relative_attention_num_buckets'),
        'max_distance': Key('relative_attention_max_distance', 128),
        'norm_eps': Key('layer_norm_epsilon', 1e-6),
        'ends': Keys(ends_from, ends_to),
    },
    is_encoder_decoder=True,
)
model_of, config_of = CONFIG.functions
