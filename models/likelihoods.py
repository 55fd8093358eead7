"""Log likelihoods of continuations after contexts, with any family.

Continuations of one context share a row, in which the context is read once. Legend as in train.py.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxtyping import Int64

from models import layers
from models.context import ALONE, attention_where, deal_heads
from models.decoding import SLOTS
from models.layers import act
from models.reading import gathered, of_targets
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, f32, i32, narrowed, pytree_dataclass, u32
from shardlib.typed import typed


@pytree_dataclass
class Packed:
    """Rows of contexts, each followed by its continuations, as `pack` places them."""

    tokens: u32['B/b L']
    targets: u32['B/b L']  # the next token, within continuations
    context: i32['B/b L']  # the context's number; 0: padding
    continuation: i32['B/b L']  # its number among those of the context; 0: the context itself
    position: i32['B/b L']  # counted as if this continuation were the only one


@typed
def log_probs(family, model, ends, stack, rows: Packed) -> tuple[f32['B/b L'], i32['B/b L']]:
    """`of_targets` of a family without an encoder.

    A continuation sees its context and itself. A row takes 4 · Q · K · L² / t bytes of memory. Sends over t the sums of
    the layers, as in decoding, and 20 bytes a token. stack: the family's `Gathered`, of all layers.
    """
    mask = family.mask(model)
    distance = rows.position[:, :, None] - rows.position[:, None]
    same = rows.continuation[:, :, None] == rows.continuation[:, None]
    sees = (rows.context[:, :, None] == rows.context[:, None]) & (same | (rows.continuation == 0)[:, None])
    sees = sees & (distance >= 0)

    position = ALONE.part(rows.position)

    def layer(x: act['B/b L/c M'], of_layer):
        w, window = of_layer

        def attend(q, k, v):
            near = distance < (layers.ALL if attend.window is None else attend.window)
            return deal_heads(functools.partial(attention_where, allowed=sees & near, cap=mask.cap), q, k, v), None

        attend.window = mask.of_layer(window)
        x, _, _ = family.layer(model, x, w, attend, position, 'M')
        return x, None

    x = family.embed(model, ends, ALONE.part(rows.tokens), position, 'M')
    x, _ = lax.scan(layer, x, (stack, mask.by_layer()))
    return of_targets(ends.unembed, mask.logits_cap, family.final(model, ends, x, 'M'), rows.targets)


def mapped(family: Any, model: Any, stack: Any) -> typed_shard_map:
    """`log_probs` of one model over the mesh; stack: shapes."""
    Ends, Layers = family.Ends, narrowed(Array['layers', family.Gathered], stack)

    @typed
    def score(ends: Ends, stack: Layers, rows: Packed) -> tuple[f32['B L'], i32['B L']]:
        return gathered(*log_probs(family, model, ends, stack, rows))

    return typed_shard_map(score)


Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context and of a continuation, neither empty


Places = list[list[tuple[int, slice]]]  # for each pair, the rows and slices of its continuation's targets


def room_of(longest: int, length: int) -> int:
    """The length of a row: one of few, so that few programs are compiled."""
    return min(max(SLOTS, 1 << (longest - 1).bit_length()), length)


def pack(pairs: Sequence[Pair], length: int) -> tuple[Int64[np.ndarray, 'B 5 L'], Places]:
    """Rows of the fields of `Packed`, and for each pair the row and the slice of its continuation.

    All tokens of a context but the last are read once. Each continuation begins with that last token and ends before
    its own last one, so that every position has one target. If a context does not fit into a row with all its
    continuations, the next row reads it again.
    """
    of_context: dict[tuple[int, ...], list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        of_context.setdefault(tuple(context), []).append(index)
    longest = max(len(context) + len(continuation) - 1 for context, continuation in pairs)
    room = room_of(longest, length)
    rows: list[np.ndarray] = []
    places: Places = [[]] * len(pairs)
    used = room
    for number, ((*before, last), indices) in enumerate(of_context.items(), 1):
        need, is_read = min(len(before) + sum(len(pairs[index][1]) for index in indices), room), False
        for nth, index in enumerate(indices, 1):
            after = pairs[index][1]
            if used + (len(after) if is_read else need) > room:
                rows.append(np.zeros((5, room), np.int64))
                used, is_read = 0, False
            parts = [] if is_read else [(before, [0] * len(before), 0, 0)]
            for tokens, targets, of, start in [*parts, ([last, *after[:-1]], after, nth, len(before))]:
                place, count = slice(used, used + len(tokens)), len(tokens)
                rows[-1][:, place] = tokens, targets, [number] * count, [of] * count, range(start, start + count)
                places[index], used, is_read = [(len(rows) - 1, place)], used + count, True
    return np.stack(rows), places


def written(pairs: Sequence[Pair], length: int, start: int) -> tuple[Int64[np.ndarray, 'B 6 L'], Places]:
    """Rows for T5, in the order of `ReadRows`: one pair a row; the encoder reads the context."""
    room = room_of(max(len(part) for pair in pairs for part in pair), length)
    rows = np.zeros((len(pairs), 6, room), np.int64)
    for (tokens, targets, segment, _, read, read_segment), (context, after) in zip(rows, pairs):
        tokens[: len(after)], targets[: len(after)], segment[: len(after)] = [start, *after[:-1]], after, 1
        read[: len(context)], read_segment[: len(context)] = context, 1
    return rows, [[(number, slice(len(after)))] for number, (_, after) in enumerate(pairs)]


def masked_one_by_one(
    pairs: Sequence[Pair], length: int, end: Sequence[int], mask: int
) -> tuple[Int64[np.ndarray, 'B 4 L'], Places]:
    """Rows for BERT: one for each token of a continuation, with that token masked (Salazar et al. 2020, 2.1)."""
    room = room_of(max(len(context) + len(after) for context, after in pairs) + len(end), length)
    rows, places = [], []
    for context, after in pairs:
        whole, first = [*context, *after, *end], len(rows)
        for place in range(len(context), len(context) + len(after)):
            rows.append(np.zeros((4, room), np.int64))
            tokens, targets, segment, _ = rows[-1]
            tokens[: len(whole)], targets[: len(whole)], segment[: len(whole)] = whole, whole, 1
            tokens[place] = mask
        places.append([(first + n, slice(len(context) + n, len(context) + n + 1)) for n in range(len(after))])
    return np.stack(rows), places
