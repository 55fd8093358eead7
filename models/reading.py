"""Whole rows through any family: hidden states of texts, and predictions at each position.

    reader = Reader(bert, model, weights, mask=103)             # under `with jax.set_mesh(mesh):`
    log_probs, best = reader.predict(rows)                      # log probability of each target, and the likeliest id
    vectors = reader.embed(rows, 'mean')                        # float32 [B, M]

BERT predicts the token at a position itself, T5 the target of each decoder input. models/decoding.py generates text.
Legend as in train.py, with S tokens that T5's encoder reads.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Float32, Int32, Int64, Integer

import train
from models import layers
from models.context import ALONE
from models.decoding import devices_of_rows, log_normalizer
from models.layers import act
from models.mesh import placed
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, i32, narrowed, pytree_dataclass, u32
from shardlib.typed import typed

Pool = Literal['mean', 'first', 'last']
Fields = Sequence[Integer[np.ndarray, 'B L']]  # of `ReadRows`, in order


@pytree_dataclass
class ReadRows:
    tokens: u32['B/b L']  # inputs; T5's decoder's begin with decoder_start_token_id
    targets: u32['B/b L']
    segment: i32['B/b L']  # 1; 0: padding
    kinds: i32['B/b L']  # for BERT: 0 in a first text, 1 in a second
    read: u32['B/b S'] | None = None  # by T5's encoder
    read_segment: i32['B/b S'] | None = None


@typed
def of_targets(unembed, cap: float | None, x: jax.Array, targets: u32['B/b L']) -> tuple[f32['B/b L'], i32['B/b L']]:
    """The log probability of each target, in float32, and the likeliest id (the lowest of several), from hidden states
    x, act['B/b L/c M'], which are gathered. 20 bytes a token are sent over t."""

    @typed
    def of_chunk(x: act['B/b L M'], targets: u32['B/b L']) -> tuple[f32['B/b L'], i32['B/b L']]:
        logits = layers.logits_of(unembed, shardops.slice('B/b L M -> B/b L/c M', x), cap)
        logits = shardops.all_gather('B/b L/c V/t -> B/b L V/t', logits)
        at_target = shardops.index_unreduced('B/b L [V/t], B/b L -> B/b L +t', logits, targets)
        best = shardops.argmax('B/b L V/t -> B/b L', logits)
        normalizer = log_normalizer(rearrange(logits, 'B L V -> (B L) V')).reshape(targets.shape)
        return shardops.psum('B/b L +t -> B/b L', at_target) - normalizer, best

    x: act['B/b L M'] = shardops.all_gather('B/b L/c M -> B/b L M', x)
    # Positions whose logits are in memory at once, 4V/t bytes each.
    chunk = max(size for size in range(1, train.LOSS_CHUNK + 1) if x.shape[1] % size == 0)
    x, targets = [rearrange(values, 'B (chunk L) ... -> chunk B L ...', L=chunk) for values in (x, targets)]
    _, chunks = lax.scan(lambda _, part: (None, of_chunk(*part)), None, (x, targets))
    return tuple(rearrange(values, 'chunk B L -> B (chunk L)') for values in chunks)


@typed
def gathered(log_probs: f32['B/b L'], best: i32['B/b L']) -> tuple[f32['B L'], i32['B L']]:
    """The results of `of_targets` on all devices, since each process reads them: 8 bytes a token are sent."""
    return shardops.all_gather('B/b L -> B L', log_probs), shardops.all_gather('B/b L -> B L', best)


def through(family, model, weights, ends, rows: ReadRows):
    """The residual after the last layer, 'B/b L/c M/t', in a family with one stack."""
    layers.require_positions(model, rows.tokens.shape[1])
    position = jnp.cumsum(rows.segment > 0, axis=1, dtype=jnp.int32) - 1
    position = jnp.maximum(position, 0)  # in a row of padding
    tokens, kinds, places = map(ALONE.part, (rows.tokens, rows.kinds, position))
    inputs = (kinds,) if family.KIND == 'encoder' else ()
    x = family.embed(model, ends, tokens, places, 'M/t', *inputs)
    stack = (weights.transformer,), family.mask(model).by_layer(), None
    inputs = rows.segment, position, layers.FORWARD, ALONE
    return layers.through(family, model, x, stack, family.gather_layer, *inputs)[0]


@typed
def predicted(family, model, weights, rows: ReadRows) -> tuple[f32['B/b L'], i32['B/b L']]:
    """`of_targets` for a family with an encoder."""
    ends = family.gather_ends(weights)
    if family.KIND == 'both':
        pair = rows.read, rows.read_segment, rows.tokens, rows.segment
        x = family.hidden(model, weights, *pair, ends=ends)
    else:
        x = layers.ended(family.final, model, ends, through(family, model, weights, ends, rows))
    return of_targets(ends.unembed, family.mask(model).logits_cap, x, rows.targets)


@typed
def embedded(family, model, weights, rows: ReadRows, pool: Pool) -> f32['B/b M']:
    """One vector a row, in float32: the mean of its hidden states, the first, or the last; those of the encoder, if
    there is one, else the input of the unembedding."""
    ends = family.gather_ends(weights)
    if family.KIND == 'both':
        x = family.encode(model, weights, rows.tokens, rows.segment, ends=ends)
        x = shardops.all_gather('B/b S/c M -> B/b S M', x)
    else:
        x = through(family, model, weights, ends, rows)
        x = layers.gather_residual(x, 'M/t') if family.KIND == 'encoder' else family.final(model, ends, x, 'M/t')
        x = shardops.all_gather('B/b L/c M -> B/b L M', x)
    is_there = (rows.segment > 0).astype(jnp.float32)
    if pool != 'mean':
        place, count = jnp.arange(rows.segment.shape[1], dtype=jnp.int32), jnp.sum(rows.segment > 0, axis=1)
        is_there = (place[None] == (count - 1 if pool == 'last' else 0 * count)[:, None]).astype(jnp.float32)
    total = shardops.sum_unreduced('B/b L M -> B/b M', is_there[:, :, None] * x.astype(jnp.float32))
    return total / jnp.maximum(shardops.sum_unreduced('B/b L -> B/b', is_there), 1.0)[:, None]


class Reader:
    """A model with its weights at rest.

    Args:
      mask: the id of a masked token; None: there is none.
    """

    ends: Sequence[int] = ()

    def __init__(self, family: Any, model: Any, weights: Any, mask: int | None = None):
        self.family, self.model, self.weights, self.mask = family, model, weights, mask
        Weights = narrowed(family.Weights, jax.eval_shape(functools.partial(family.init, model), np.uint32(0)))
        self.Rows = narrowed(ReadRows, ReadRows(*[0] * (6 if family.KIND == 'both' else 4)))
        Rows = self.Rows

        @typed
        def predict(weights: Weights, rows: Rows) -> tuple[f32['B L'], i32['B L']]:
            return gathered(*predicted(family, model, weights, rows))

        @typed
        def embed(weights: Weights, rows: Rows, *, pool: Pool) -> f32['B M']:
            return shardops.all_gather('B/b M -> B M', embedded(family, model, weights, rows, pool))

        self.functions = {'predict': predict, 'embed': embed}
        self.compiled = functools.cache(lambda which, **settings: jax.jit(self.mapped(which, **settings)))

    def take(self, weights: Any) -> None:
        """Replaces the weights; None: holds none until the next call."""
        self.weights = weights

    def mapped(self, which: str, **settings: Any) -> typed_shard_map:
        return typed_shard_map(functools.partial(self.functions[which], **settings))

    def predict(self, rows: Fields) -> tuple[Float32[np.ndarray, 'B L'], Int32[np.ndarray, 'B L']]:
        """rows: their number is a multiple of the devices that share them."""
        return tuple(map(np.asarray, self.compiled('predict')(self.weights, self._placed(rows))))

    def embed(self, rows: Fields, pool: Pool) -> Float32[np.ndarray, 'B M']:
        return np.asarray(self.compiled('embed', pool=pool)(self.weights, self._placed(rows)))

    def _placed(self, rows: Fields) -> Any:
        kinds = np.uint32, np.uint32, np.int32, np.int32, np.uint32, np.int32
        return placed(ReadRows(*(values.astype(kind) for values, kind in zip(rows, kinds))), self.Rows)

    def fill(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        """The likeliest token at each masked position of each prompt, and its log probability.

        Raises RunError for a prompt without masked positions."""
        for ids in prompts:
            if self.mask is None or self.mask not in ids:
                raise RunError(f'{list(ids)[:20]}: expected a masked token, the id {self.mask}, to fill in')
        rows = batch_of(prompts, max(map(len, prompts)))
        _, best = self.predict(rows)
        again = rows[0].copy()
        again[rows[0] == self.mask] = best[rows[0] == self.mask]
        log_probs, _ = self.predict([rows[0], again, *rows[2:]])
        places = [np.flatnonzero(row == self.mask) for row in rows[0][: len(prompts)]]
        return [(best[n][place].tolist(), log_probs[n][place].tolist()) for n, place in enumerate(places)]


def batch_of(prompts: Sequence[Sequence[int]], longest: int, least: int = 1) -> list[Int64[np.ndarray, 'B L']]:
    """tokens, targets, segment and kinds of rows with one prompt each, at least two rows a device: JAX broadcasts one
    row with one head in another way, which the check refuses."""
    share = devices_of_rows()
    count = max(-(-max(len(prompts), least) // share), 2) * share
    tokens, segment = np.zeros((2, count, longest), np.int64)
    for n, ids in enumerate(prompts):
        tokens[n, : len(ids)], segment[n, : len(ids)] = ids, 1
    return [tokens, tokens, segment, np.zeros_like(tokens)]
