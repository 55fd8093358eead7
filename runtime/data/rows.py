"""Rows of a flat-tokens split: which tokens each holds, packed or sequence by sequence, behind the same names.

rows = PackedRows(split, length=1024)
rows.count, rows.dropped_tokens             # how many, and how many tokens at the end fill none
starts, stops = rows.ranges(np.array([0, 7, 3]), pool)
"""

from concurrent.futures import Executor

import numpy as np
from jaxtyping import Int64

from runtime.data.chunks import read, read_ranges
from runtime.data.flat_tokens import Split
from runtime.data.order import Rows
from runtime.data.read_ahead import NO_END
from runtime.terminal import RunError

BLOCK = 1024  # sequences for which one number is kept
READ_AT_ONCE = 128 * BLOCK  # sequences, 1 MiB of seq_starts


class PackedRows:
    """Row r holds `length` tokens from r * length on, whatever sequences they belong to."""

    def __init__(self, split: Split, length: int):
        self._split, self._length = split, length

    @property
    def count(self) -> int:
        return self._split.token_count // self._length

    @property
    def dropped_tokens(self) -> int:
        return self._split.token_count % self._length

    @property
    def text(self) -> str:
        if self._split.token_count == NO_END:
            return f"{self._split.text}, in rows of {self._length}"
        rows = f"{self._split.text} in {self.count:,} rows of {self._length}"
        return f"{rows}, {self.dropped_tokens:,} at its end being too few for a row"

    def reach(self, count: int) -> bool:
        """Whether there are so many rows; waits for those of a split that grows."""
        return self._split.reach(count * self._length)

    def ranges(self, rows: Rows, pool: Executor) -> tuple[Rows, Rows]:
        """Where each row starts and ends, in tokens."""
        return rows * self._length, (rows + 1) * self._length


class SequenceRows:
    """A row holds tokens of one sequence, `length` at most. Empty sequences have no row. Raises RunError: seq_starts
    cannot be read or does not increase.

    seq_starts is read once, 8 bytes a sequence, and the number of rows before each BLOCK sequences is kept: 8 MB for
    10⁹ sequences. A binary search among these, and reading one block's starts, finds a row.
    """

    dropped_tokens = 0

    def __init__(self, split: Split, length: int, pool: Executor):
        self._split, self._length = split, length
        firsts = range(0, split.sequence_count, READ_AT_ONCE)
        counted = list(pool.map(self._count, firsts))
        self._before = np.concatenate([[0], *(rows for rows, _ in counted)]).cumsum()  # rows before each block
        self.count = int(self._before[-1])
        self.text = (
            f"{split.sequence_count:,} sequences, {split.token_count:,} tokens, of {split.where} in {self.count:,} "
            f"rows of up to {length}, {sum(longer for _, longer in counted):,} of them longer and split"
        )

    def reach(self, count: int) -> bool:
        return count <= self.count

    def _count(self, first: int) -> tuple[Int64[np.ndarray, "blocks"], int]:
        """The rows of each block of READ_AT_ONCE sequences, and how many sequences are longer than a row."""
        stop = min(first + READ_AT_ONCE, self._split.sequence_count)
        starts = read(self._split.seq_starts, first, stop + 1, f"seq_starts of {self._split.where}")
        wrong = (starts[1:] < starts[:-1]) | (starts[1:] > self._split.token_count)
        if wrong.any():
            one = int(np.argmax(wrong))
            expected = f"expected increasing numbers up to {self._split.token_count}"
            raise RunError(
                f"seq_starts of {self._split.where} says that sequence {first + one} goes from {starts[one]} to "
                f"{starts[one + 1]}, {expected}: the data set is damaged, write it again"
            )
        lengths = np.diff(starts.astype(np.int64))
        rows = np.add.reduceat(-(-lengths // self._length), np.arange(0, len(lengths), BLOCK))
        return rows, int((lengths > self._length).sum())

    def ranges(self, rows: Rows, pool: Executor) -> tuple[Rows, Rows]:
        """Where each row starts and ends, in tokens. Raises RunError: seq_starts cannot be read."""
        blocks = np.unique(np.searchsorted(self._before, rows, side="right") - 1)
        first = blocks * BLOCK
        last = np.minimum(first + BLOCK, self._split.sequence_count)
        starts = np.full((len(blocks), BLOCK + 1), self._split.token_count, np.int64)  # what is not there is empty
        what = f"seq_starts of {self._split.where}"
        read_ranges(self._split.seq_starts, first, last + 1, starts, what, pool)
        of_sequence = -(-np.diff(starts) // self._length)
        before = self._before[blocks][:, None] + of_sequence.cumsum(axis=1) - of_sequence  # rows before each sequence
        # It grows over all blocks, so that one search finds each row's sequence.
        after = (before + of_sequence).reshape(-1)
        place = np.searchsorted(after, rows, side="right")
        block, sequence = np.divmod(place, BLOCK)
        begin = starts[block, sequence] + (rows - before[block, sequence]) * self._length
        return begin, np.minimum(begin + self._length, starts[block, sequence + 1])
