"""BERT: an encoder whose tokens all see each other, hidden states and the logits of masked tokens.

    x = bert.hidden(model, weights, inputs, kinds, segment, position)       # 'B/d L M', of each token
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

from jax_extra import explicit_activation_checkpointing, fold_in_str, save_for_backward
from models import layers
from models.layers import Biased, Mask, act, enter, layer_norm, leave, part, stored
from runtime.config.keys import Count, Positive
from runtime.terminal import RunError
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
    positions: Count  # P, rows of the table of positions; no row of tokens may be longer
    kinds: Count = 2  # N, of tokens: those of a first text, and of a second
    norm_eps: Positive = 1e-12  # added to the variance in layer norms
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations and matrix products


def mask(model: Model) -> Mask:
    return Mask()


# == Weights ===========================================================================================================
@pytree_dataclass
class Layer:
    w_q: stored['M/d K/t D']
    w_kv: stored['2 M/d K/t D']
    b_qkv: f32['3 K/t D/d']
    w_o: stored['M/d K/t D']
    b_o: f32['M/d/t']
    ln1: f32['2 M/d/t']  # scale and bias
    w_up: stored['M/d F/t']
    b_up: f32['F/d/t']
    w_down: stored['M/d F/t']
    b_down: f32['M/d/t']
    ln2: f32['2 M/d/t']


@pytree_dataclass
class Weights:
    embed: stored['V/t M/d']
    positions: stored['P M/d/t']
    kinds: stored['N M/d/t']
    first_norm: f32['2 M/d/t']
    transformer: Array['layers', Layer]
    w_predict: stored['M/d M2/t']
    b_predict: f32['M/d/t']
    predict_norm: f32['2 M/d/t']
    unembed_bias: f32['V/d/t']


@pytree_dataclass
class Gathered:
    """What a layer multiplies with; a matrix may be `Adapted`."""

    w_q: act['M K/t D']
    w_k: act['M K/t D']
    w_v: act['M K/t D']
    b_qkv: act['3 K/t D']
    w_o: act['M K/t D']
    b_o: act['M']
    ln1: f32['2 M']
    w_up: act['M F/t']
    b_up: act['F/t']
    w_down: act['M F/t']
    b_down: act['M']
    ln2: f32['2 M']


@pytree_dataclass
class Ends:
    """What stands before the first layer and after the last, gathered."""

    embed: act['V/t M']
    positions: act['P M']
    kinds: act['N M']
    first_norm: f32['2 M']
    w_predict: act['M M2/t']
    b_predict: act['M']
    predict_norm: f32['2 M']
    unembed: Biased


def init(model: Model, seed: jax.Array) -> Weights:
    """The first weights: biases are 0."""
    M, F, V, K, D = model.d_model, model.d_ff, model.vocab, model.n_kv, model.d_head

    def normal(name, shape, fan_in):
        key = fold_in_str(jax.random.key(seed), name)
        return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) / (0.87962566 * fan_in**0.5)

    def of_layers(name, *shape, fan_in):
        return normal(name, (model.layers, *shape), fan_in)

    def zeros(*shape):
        return jnp.zeros(shape, jnp.float32)

    norm = jnp.stack([jnp.ones((M,), jnp.float32), zeros(M)])
    layer = Layer(
        w_q=of_layers('w_q', M, K, D, fan_in=M),
        w_kv=of_layers('w_kv', 2, M, K, D, fan_in=M),
        b_qkv=zeros(model.layers, 3, K, D),
        w_o=of_layers('w_o', M, K, D, fan_in=K * D),
        b_o=zeros(model.layers, M),
        ln1=jnp.stack([norm] * model.layers),
        w_up=of_layers('w_up', M, F, fan_in=M),
        b_up=zeros(model.layers, F),
        w_down=of_layers('w_down', M, F, fan_in=F),
        b_down=zeros(model.layers, M),
        ln2=jnp.stack([norm] * model.layers),
    )
    return Weights(
        embed=normal('embed', (V, M), M),
        positions=normal('positions', (model.positions, M), M),
        kinds=normal('kinds', (model.kinds, M), M),
        first_norm=norm,
        transformer=layer,
        w_predict=normal('w_predict', (M, M), M),
        b_predict=zeros(M),
        predict_norm=norm,
        unembed_bias=zeros(V),
    )


@typed
def gather_layer(w: Layer, reduce_dtype: str = 'float32') -> Gathered:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    return Gathered(
        w_q=gather('M/d K/t D -> M K/t D', w.w_q),
        w_k=gather('M/d K/t D -> M K/t D', w.w_kv[0]),
        w_v=gather('M/d K/t D -> M K/t D', w.w_kv[1]),
        b_qkv=gather('3 K/t D/d -> 3 K/t D', w.b_qkv),
        w_o=gather('M/d K/t D -> M K/t D', w.w_o),
        b_o=gather('M/d/t -> M', w.b_o),
        ln1=shardops.all_gather('2 M/d/t -> 2 M', w.ln1),
        w_up=gather('M/d F/t -> M F/t', w.w_up),
        b_up=shardops.slice('F -> F/t', gather('F/d/t -> F', w.b_up)),
        w_down=gather('M/d F/t -> M F/t', w.w_down),
        b_down=gather('M/d/t -> M', w.b_down),
        ln2=shardops.all_gather('2 M/d/t -> 2 M', w.ln2),
    )


@typed
def gather_ends(weights: Weights, reduce_dtype: str = 'float32') -> Ends:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    embed = gather('V/t M/d -> V/t M', weights.embed)
    bias = shardops.slice('V -> V/t', shardops.all_gather('V/d/t -> V', weights.unembed_bias))
    return Ends(
        embed=embed,
        positions=gather('P M/d/t -> P M', weights.positions),
        kinds=gather('N M/d/t -> N M', weights.kinds),
        first_norm=shardops.all_gather('2 M/d/t -> 2 M', weights.first_norm),
        w_predict=gather('M/d M2/t -> M M2/t', weights.w_predict),
        b_predict=gather('M/d/t -> M', weights.b_predict),
        predict_norm=shardops.all_gather('2 M/d/t -> 2 M', weights.predict_norm),
        unembed=Biased(embed, bias),
    )


# == Forward pass ======================================================================================================
@typed
def norm(x: jax.Array, scale_and_bias: f32['2 M'], eps: float, M: str) -> jax.Array:
    """Layer norm of what lies as the residual: where M is split, twice 4 bytes a token are summed over t."""
    if M == 'M':
        return layer_norm(x, scale_and_bias, eps)
    x: f32['B/d L M/t'] = x.astype(jnp.float32)
    size, scale_and_bias = scale_and_bias.shape[1], shardops.slice('2 M -> 2 M/t', scale_and_bias)
    mean = shardops.psum('B/d L +t -> B/d L', shardops.sum_unreduced('B/d L M/t -> B/d L +t', x)) / size
    x = x - mean[:, :, None]
    square = shardops.psum('B/d L +t -> B/d L', shardops.sum_unreduced('B/d L M/t -> B/d L +t', x * x))
    inverse = lax.rsqrt(square / size + eps)[:, :, None]
    return (x * inverse * scale_and_bias[0][None, None] + scale_and_bias[1][None, None]).astype(act.dtype)


@typed
def embed(
    model: Model, ends: Ends, tokens: u32['B/d L'], kinds: i32['B/d L'], position: i32['B/d L'], M: str
) -> jax.Array:
    """Rows of three tables, and a norm.

    Raises:
      RunError: the rows of tokens are longer than the table of positions.
    """
    if tokens.shape[1] > model.positions:
        raise RunError(
            f'rows of {tokens.shape[1]} tokens: this model has learned {model.positions} positions (model.positions): '
            'take shorter rows, training.tokens.len'
        )
    tables = [ends.positions, ends.kinds]
    if M != 'M':
        tables = [shardops.slice('P M -> P M/t', ends.positions), shardops.slice('N M -> N M/t', ends.kinds)]
    x = layers.embed(ends.embed, tokens, M)
    x = x + shardops.index_unreduced(f'[P] {M}, B/d L -> B/d L {M}', tables[0], position)
    x = x + shardops.index_unreduced(f'[N] {M}, B/d L -> B/d L {M}', tables[1], kinds)
    return norm(x, ends.first_norm, model.norm_eps, M)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/d L'], M: str
) -> tuple[jax.Array, Any]:
    """One layer; x lies as 'B/d L' with M. `attend(q, k, v)` returns o and what of k and v is to be kept, which the
    layer hands on; the logits are q·k, no factor."""
    x: act[f'B/d L {M}'] = x

    with jax.named_scope('attention'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
        q = product('B/d L M, M K/t D -> B/d L K/t D', gathered, w.w_q) + w.b_qkv[0][None, None]
        k = product('B/d L M, M K/t D -> B/d L K/t D', gathered, w.w_k) + w.b_qkv[1][None, None]
        v = product('B/d L M, M K/t D -> B/d L K/t D', gathered, w.w_v) + w.b_qkv[2][None, None]
        q = save_for_backward(q * model.d_head**-0.5)  # 2KD/t bytes a token
        k = save_for_backward(k)  # 2KD/t bytes a token
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v
        o, kept = attend(q[:, :, None], k, v)
        y = leave(product('B/d L K/t D, M K/t D -> B/d L M +t', o[:, :, 0], w.w_o), M)
        x = norm(x + y + part(w.b_o, M)[None, None], w.ln1, model.norm_eps, M)

    with jax.named_scope('ffn'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, spares the product with w_o, sums, the gather
        up = product('B/d L M, M F/t -> B/d L F/t', gathered, w.w_up) + w.b_up[None, None]
        up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
        y = leave(product('B/d L F/t, M F/t -> B/d L M +t', jax.nn.gelu(up, approximate=False), w.w_down), M)
        return norm(x + y + part(w.b_down, M)[None, None], w.ln2, model.norm_eps, M), kept


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/d L M']:
    """The hidden states as a whole on each device."""
    return enter(x, M)


@typed
def predict(model: Model, ends: Ends, x: act['B/d L M']) -> act['B/d L M']:
    """What logits are computed from, with `ends.unembed`."""
    y = product('B/d L M, M M2/t -> B/d L M2/t', x, ends.w_predict)
    y: act['B/d L M'] = shardops.all_gather('B/d L M2/t -> B/d L M2', y)
    y = y + ends.b_predict[None, None]
    return layer_norm(jax.nn.gelu(y, approximate=False), ends.predict_norm, model.norm_eps)


def hidden(
    model, weights, inputs, kinds, segment, position, adapt: Callable = lambda w, low: w, low=None, *,
    ends=None, reduce_dtype: str = 'float32', kept: tuple[str, ...] = ('save_for_backward',), unroll: bool = False,
):  # fmt: skip
    """The hidden states of all tokens, act['B/d L M']; options as of layers.hidden.

    Args:
      inputs, kinds: the tokens themselves, u32['B/d L'], some of them masked, and the number of the kind of each.
      segment, position: as of layers.inputs_of; a token sees all of its own segment. Padding has a number of its own.
    """
    ends = ends or gather_ends(weights, reduce_dtype)

    def attend(q, k, v):
        return layers.attention_where(q, k, v, segment[:, :, None] == segment[:, None, :]), None

    @functools.partial(explicit_activation_checkpointing, names=kept)
    def one(x, of_layer):
        w, low = of_layer
        return layer(model, x, adapt(gather_layer(w, reduce_dtype), low), attend, position, 'M/t')

    with jax.named_scope('embed'):
        x = embed(model, ends, inputs, kinds, position, 'M/t')
    x, _ = lax.scan(one, x, (weights.transformer, low), unroll=unroll)
    return final(model, ends, x, 'M/t')


# == Published names ===================================================================================================
def published(model: Model) -> dict[str, list[tuple[str, str]]]:
    """Of each of the weights the published tensors it is made of, and how each lies there -> here."""
    layer, tables, head = 'bert.encoder.layer.{}', 'bert.embeddings', 'cls.predictions'
    own, qkv = f'{layer}.attention.self', ('query', 'key', 'value')

    def norm(name):
        return [(f'{name}.LayerNorm.{x}', 'M -> M') for x in ('weight', 'bias')]

    return {
        'embed': [(f'{tables}.word_embeddings.weight', 'V M -> V M')],
        'positions': [(f'{tables}.position_embeddings.weight', 'P M -> P M')],
        'kinds': [(f'{tables}.token_type_embeddings.weight', 'N M -> N M')],
        'first_norm': norm(tables),
        'transformer/w_q': [(f'{own}.query.weight', '(K D) M -> M K D')],
        'transformer/w_kv': [(f'{own}.{x}.weight', '(K D) M -> M K D') for x in qkv[1:]],
        'transformer/b_qkv': [(f'{own}.{x}.bias', '(K D) -> K D') for x in qkv],
        'transformer/w_o': [(f'{layer}.attention.output.dense.weight', 'M (K D) -> M K D')],
        'transformer/b_o': [(f'{layer}.attention.output.dense.bias', 'M -> M')],
        'transformer/ln1': norm(f'{layer}.attention.output'),
        'transformer/w_up': [(f'{layer}.intermediate.dense.weight', 'F M -> M F')],
        'transformer/b_up': [(f'{layer}.intermediate.dense.bias', 'F -> F')],
        'transformer/w_down': [(f'{layer}.output.dense.weight', 'M F -> M F')],
        'transformer/b_down': [(f'{layer}.output.dense.bias', 'M -> M')],
        'transformer/ln2': norm(f'{layer}.output'),
        'w_predict': [(f'{head}.transform.dense.weight', 'M2 M -> M M2')],
        'b_predict': [(f'{head}.transform.dense.bias', 'M -> M')],
        'predict_norm': norm(f'{head}.transform'),
        'unembed_bias': [(f'{head}.bias', 'V -> V')],
    }


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
