"""Puts sequences into rows of one length without cutting any: first fit, and padding for what is left."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt32

PACKED_TOKENS = 2**22  # put into rows together, about; the last of them have no later sequence to fill up with
OPEN_ROWS = 64  # the newest rows, in which there may be room


@dataclasses.dataclass(frozen=True)
class Sequences:
    ids: UInt32[np.ndarray, "tokens"]  # all sequences, one after another
    lengths: Int64[np.ndarray, "sequences"]  # a pair has two: what is read, and what is written
    weight: Bool[np.ndarray, "tokens"] | Float32[np.ndarray, "tokens"] | None  # in the loss; None: all are targets

    def cut(self, lengths: np.ndarray) -> "Sequences":
        """The sequences with so many of their first tokens; nothing remains of one with none."""
        if (lengths == self.lengths).all():  # nearly always, and bytes are tokenized at 150 MB/s
            return dataclasses.replace(self, lengths=lengths[lengths > 0])
        place = np.arange(len(self.ids)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        kept = place < np.repeat(lengths, self.lengths)
        return Sequences(self.ids[kept], lengths[lengths > 0], None if self.weight is None else self.weight[kept])

    def targets(self, lengths: np.ndarray) -> np.ndarray:
        """How many targets are among so many of each sequence's first tokens. `weight` is not None."""
        before, starts = np.append(0, np.cumsum(self.weight != 0)), np.cumsum(self.lengths) - self.lengths
        return before[starts + lengths] - before[starts]


def joined(parts: list[Sequences]) -> Sequences:
    ids, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "lengths"))
    weights = [part.weight for part in parts if part.weight is not None]
    return Sequences(ids, lengths, np.concatenate(weights) if weights else None)


def in_rows(sequences: Sequences, room: tuple[int, ...]) -> Sequences:
    """The sequences in rows of sum(room) tokens: each in the first row, of the newest OPEN_ROWS, that has room for it.

        in_rows(Sequences(ids, lengths=[3, 4, 1], weight), room=(6,))   # lengths [3, 1, 2, 4, 2]: two rows, each padded
        in_rows(Sequences(ids, lengths=[3, 2, 4, 1], weight), (8, 4))   # two pairs: [3, 4, 1] and then [2, 1, 1]

    A row has a part for each number in `room`, and so has each of what is put into rows. The order within all parts of
    a row is the same. What is left of a part is one sequence of id 0 with weight 0. `weight` is not None, and nothing
    is longer than its part.
    """
    parts, count = len(room), len(sequences.lengths) // len(room)
    lengths = sequences.lengths.reshape(count, parts)
    rows: list[list[int]] = []
    left = np.empty((count, parts), np.int64)
    for number, needed in enumerate(lengths):
        first = max(0, len(rows) - OPEN_ROWS)
        fits = np.flatnonzero((left[first : len(rows)] >= needed).all(axis=1))
        row = first + int(fits[0]) if len(fits) else len(rows)
        if row == len(rows):
            rows.append([])
            left[row] = room
        rows[row].append(number)
        left[row] -= needed
    starts = (np.cumsum(sequences.lengths) - sequences.lengths).reshape(count, parts).tolist()
    pieces = []  # where each begins, and its length
    for numbers, rest in zip(rows, left.tolist()):
        for part in range(parts):
            pieces += [(starts[number][part], int(lengths[number, part])) for number in numbers]
            pieces += [(len(sequences.ids), rest[part])] if rest[part] else []
    begins, sizes = np.array(pieces, np.int64).reshape(-1, 2).T
    at = np.arange(sizes.sum()) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
    assert sequences.weight is not None  # what pads is no target
    padded = [np.pad(values, (0, max(room)))[at] for values in (sequences.ids, sequences.weight)]
    return Sequences(padded[0], sizes, padded[1])
