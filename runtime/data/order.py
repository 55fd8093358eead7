"""The order in which rows are read: computed, not stored, so any place in it is reached at once.

Order(rows=10**9, rows_per_block=128, blocks_per_buffer=64, seed=0).rows_of(epoch=2, buffer=7)
MixtureOrder([0.7, 0.3]).at(np.arange(10**12, 10**12 + 4))  # each row's source, and which of the source's rows
GrowingBatch(64, (10, 30)).start(1000)                      # how many rows the first 1000 steps have
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Int64, Integer

from runtime.terminal import RunError

Rows = Int64[np.ndarray, "rows"]
FEISTEL_ROUNDS = 8
LONGEST_PATTERN = 2**16  # rows after which a mixture's pattern repeats, at most; 6 bytes a row are kept


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of one source's rows in an epoch.

    Blocks of neighbouring rows (the last may be shorter) are permuted, then the rows of each `blocks_per_buffer` blocks
    among themselves. A seed of None leaves all as it is.
    """

    rows: int
    rows_per_block: int
    blocks_per_buffer: int
    seed: int | None

    @property
    def blocks(self) -> int:
        return math.ceil(self.rows / self.rows_per_block)

    @property
    def buffers(self) -> int:
        return math.ceil(self.blocks / self.blocks_per_buffer)

    def rows_of(self, epoch: int, buffer: int) -> tuple[int, Rows]:
        """The buffer's first position in the epoch's stream of rows, and the rows from there on."""
        first_block = buffer * self.blocks_per_buffer
        blocks = np.arange(first_block, min(first_block + self.blocks_per_buffer, self.blocks))
        if self.seed is not None:
            blocks = permute(blocks, self.blocks, self._key(epoch))
        within = np.arange(min(self.rows_per_block, self.rows))  # a block of more rows than there are costs no more
        rows = (blocks[:, None] * self.rows_per_block + within).reshape(-1)
        rows = rows[rows < self.rows]
        if self.seed is not None:
            rows = rows[permute(np.arange(len(rows)), len(rows), self._key(epoch, buffer))]
        return self._first_position(epoch, first_block), rows

    def buffer_of(self, epoch: int, position: int) -> int:
        """The buffer that holds a position of the epoch's stream."""
        buffer = position // (self.rows_per_block * self.blocks_per_buffer)
        # The short block, where it comes earlier, moves all that follows forward: by less than a block, so by one
        # buffer at most.
        return buffer + (position >= self._first_position(epoch, (buffer + 1) * self.blocks_per_buffer))

    def _first_position(self, epoch: int, block: int) -> int:
        """Where the block at this place of the order begins."""
        block = min(block, self.blocks)
        missing = self.blocks * self.rows_per_block - self.rows
        return block * self.rows_per_block - (missing if missing and block > self._short_block(epoch) else 0)

    @functools.lru_cache(maxsize=64)  # noqa: B019 an order holds four numbers
    def _short_block(self, epoch: int) -> int:
        """Where the last block, which may be shorter, comes in the order."""
        last = self.blocks - 1
        if self.seed is None:
            return last
        return int(permute(np.array([last]), self.blocks, self._key(epoch), inverse=True)[0])

    def _key(self, epoch: int, buffer: int = -1) -> tuple[int, ...]:
        return ((self.seed or 0) % 2**64, epoch, buffer + 1)


def permute(index: Rows, size: int, key: tuple[int, ...], *, inverse: bool = False) -> Rows:
    """Where the key's permutation of 0 … size - 1 takes each index; nothing of that size is stored.

    A Feistel network on pairs (left, right) of a grid with at least `size` places: each round adds to one half a hash
    of the other, which can be undone. A place outside is permuted again until it is inside (cycle walking).
    """
    left_size = math.isqrt(size - 1) + 1 if size else 1
    right_size = -(-size // left_size) if size else 1
    keys = list(enumerate(np.random.SeedSequence(key).generate_state(FEISTEL_ROUNDS, np.uint64)))

    def once(place: Rows) -> Rows:
        left, right = np.divmod(place, right_size)
        for turn, round_key in reversed(keys) if inverse else keys:
            sign = -1 if inverse else 1
            if turn % 2:
                right = (right + sign * _hash(left, round_key, right_size)) % right_size
            else:
                left = (left + sign * _hash(right, round_key, left_size)) % left_size
        return left * right_size + right

    place = once(np.asarray(index, np.int64))
    while (outside := place >= size).any():
        place[outside] = once(place[outside])
    return place


def _hash(values: Rows, key: np.uint64, size: int) -> Rows:
    """Numbers below size that look random: the finalizer of SplitMix64."""
    bits = values.astype(np.uint64) + key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) % np.uint64(size)).astype(np.int64)


class MixtureOrder:
    """Chooses the source of each row of a mixture: among the first n rows each source has its share, within one row.

        mixture = MixtureOrder([0.7, 0.3])
        mixture.at(np.array([0, 1, 2]))          # sources [0, 1, 0], of which these are the rows [0, 0, 1]
        mixture.counts(1000)                     # [700, 300]: rows of each source among the first 1000

    Weights are the decimals as written. The pattern has as many rows as the sum of their ratio in lowest terms, so the
    shares are exact; above LONGEST_PATTERN rows, weights are rounded to multiples of 1 / LONGEST_PATTERN of their sum.
    Raises RunError if a weight is too small a part of the sum.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(repr(weight)) / sum(Fraction(repr(other)) for other in weights) for weight in weights]
        period = min(math.lcm(*(share.denominator for share in exact)), LONGEST_PATTERN)
        shares = [math.floor(share * period) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index] * period)
        for index in by_remainder[: period - sum(shares)]:
            shares[index] += 1
        if 0 in shares:
            small = shares.index(0)
            expected = f"expected at least 1/{LONGEST_PATTERN} of the sum of all weights"
            raise RunError(f"mixture[{small}].weight = {weights[small]} is too small: {expected}")
        self.shares = np.array(shares)
        self._source = np.array(_pattern(shares), np.uint16)
        self._places = [np.flatnonzero(self._source == index) for index in range(len(shares))]
        self._rank = np.zeros(period, np.int32)  # rows of the same source before, within the pattern
        for places in self._places:
            self._rank[places] = np.arange(len(places))

    def at(self, rows: Rows) -> tuple[Integer[np.ndarray, "rows"], Rows]:
        """The source of each row, and how many rows of the same source come before it."""
        turn, place = np.divmod(rows, len(self._source))
        source = self._source[place]
        return source, turn * self.shares[source] + self._rank[place]

    def rows_of(self, source: int, ordinals: Rows) -> Rows:
        """The inverse: where a source's rows come in the mixture."""
        turn, place = np.divmod(ordinals, self.shares[source])
        return turn * len(self._source) + self._places[source][place]

    def counts(self, rows: int) -> Int64[np.ndarray, "sources"]:
        turn, rest = divmod(rows, len(self._source))
        return turn * self.shares + np.bincount(self._source[:rest], minlength=len(self.shares))


class GrowingBatch:
    """How many rows each step has: twice as many from each step of doubles_at on, up to a whole batch.

    batch = GrowingBatch(64, doubles_at=(10, 30))   # 16 rows a step, from step 10 on 32, from step 30 on 64
    batch.rows(10), batch.start(11)                 # 32, 10 · 16 + 32
    """

    def __init__(self, batch: int, doubles_at: Sequence[int] = ()):
        self.sizes = [batch >> times for times in range(len(doubles_at), -1, -1)]  # rows a step in each phase
        self._steps = np.array([0, *doubles_at])  # first step of each phase; below, the rows before it
        self._starts = np.cumsum([0, *(np.diff(self._steps) * np.array(self.sizes[:-1], int))])

    def rows(self, step: int) -> int:
        return self.sizes[int(np.searchsorted(self._steps, step, side="right")) - 1]

    def start(self, step: int) -> int:
        phase = int(np.searchsorted(self._steps, step, side="right")) - 1
        return int(self._starts[phase]) + (step - int(self._steps[phase])) * self.sizes[phase]

    def steps(self, rows: int) -> int:
        """How many whole steps so many rows are."""
        phase = int(np.searchsorted(self._starts, rows, side="right")) - 1
        return int(self._steps[phase]) + (rows - int(self._starts[phase])) // self.sizes[phase]

    def places(self, rows: Rows) -> tuple[Rows, Rows]:
        """Each row's phase, and its place in its step's batch."""
        phase = np.searchsorted(self._starts, rows, side="right") - 1
        return phase, (rows - self._starts[phase]) % np.array(self.sizes)[phase]


class SequentialOrder:
    """One source after another, each from a batch's first row on, so that a batch has one source."""

    def __init__(self, counts: Int64[np.ndarray, "sources"], batch: int):
        self.starts = np.concatenate([[0], np.cumsum(-(-counts // batch) * batch)])  # the last is where all end

    def at(self, rows: Rows) -> tuple[Integer[np.ndarray, "rows"], Rows]:
        """The source of each row, and how many rows of the same source come before it: maybe more than it has."""
        source = np.searchsorted(self.starts, rows, side="right") - 1
        return source, rows - self.starts[source]

    def rows_of(self, source: int, ordinals: Rows) -> Rows:
        """The inverse."""
        return self.starts[source] + ordinals


def _pattern(shares: Sequence[int]) -> list[int]:
    """Source s comes shares[s] times, and among the first n rows less than one row more or less than its share of n.

    The source's j-th row, counted from 0, may come once j / share rows are over and must before (j + 1) / share are.
    Earliest deadline first meets all deadlines (Baruah et al. 1996, proportionate progress).
    """
    period, taken = sum(shares), [0] * len(shares)
    pattern = []
    for row in range(period):
        allowed = (index for index, share in enumerate(shares) if taken[index] * period <= row * share)
        soonest = min(allowed, key=lambda index: -(-(taken[index] + 1) * period // shares[index]))
        taken[soonest] += 1
        pattern.append(soonest)
    return pattern
