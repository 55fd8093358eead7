"""Batches of tokens for training and validation, read ahead while the device works.

    with Loader(config.flat_tokens, "train", batch=64, length=1024, sharding=sharding) as loader:
        batch = loader.load(step)       # a TokenBatch of global arrays

A batch is a function of the seed and the step and of nothing else: no state is kept, so a run that resumes at step k, on
whatever mesh and hosts, sees what an uninterrupted one would. What makes that cheap is an order that is computed rather
than stored: a permutation of blocks of neighbouring rows, and of the rows in groups of such blocks (shuffle buffers).
"""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import jax
import numpy as np

from runtime.errors import RunError
from runtime.flat_tokens import ENCODED_PADDING, open_split
from shardlib.shardtypes import bool_, pytree_dataclass, u32

BATCHES_AHEAD = 3  # on the device already while a step runs
BUFFERS_AHEAD = 1  # so that a step never waits for a whole shuffle buffer; host memory is twice the buffer
FEISTEL_ROUNDS = 8

T = TypeVar("T")


@pytree_dataclass
class TokenBatch:
    targets: u32['B/d L']  # what is to be predicted
    is_seq_start: bool_['B/d L']  # the target starts a sequence: it sees none of the tokens before it
    is_target: bool_['B/d L']  # False for context and padding: no part of the loss


class FlatTokensConfig(Protocol):
    """What the loader reads of runtime.config.FlatTokens."""

    filespec: str
    seed: int
    sequence_packing: bool
    epochs: int
    read_blocks_per_shuffle_buffer: int
    sequences_per_read_block: int


class Loader:
    """Loads the batches of one split.

    A row is, packed, `length` tokens in the order they are stored in, whatever sequences they belong to; not packed, it is
    one sequence, padded or cut at its end. Padding is no target, and each position of it is a segment of its own.

    Args:
      flat_tokens: the section of the config.
      split: `train` or `validation`.
      batch: rows of a batch, over all hosts.
      length: tokens of a row.
      sharding: of arrays 'B/d L'; each host reads only those rows that its own devices need.
      shuffle: False gives each row once, in the order they are stored in (for validation); the last batch is filled up with
        rows that are no target.
      io_threads: threads that read at the same time.
    Raises:
      RunError: the data set cannot be opened, or holds less than a batch.
    """

    max_token_id: int  # no token id is larger
    bos_id: int  # the input that stands before a sequence's first token
    rows: int  # of an epoch
    dropped_tokens: int  # at the end of the split, packed: too few for a row
    steps_per_epoch: int
    steps: int  # of all epochs; one epoch, unless shuffled

    def __init__(
        self,
        flat_tokens: FlatTokensConfig,
        split: str,
        *,
        batch: int,
        length: int,
        sharding: jax.sharding.Sharding,
        shuffle: bool = True,
        io_threads: int = 8,
    ):
        self._split = open_split(flat_tokens.filespec, split)
        self._batch, self._length, self._sharding, self._threads = batch, length, sharding, io_threads
        self._packed, self._shuffle, self._epochs = flat_tokens.sequence_packing, shuffle, flat_tokens.epochs
        self.max_token_id, self.bos_id = self._split.max_token_id, self._split.bos_id

        token_count = self._split.token_count
        self.rows = token_count // length if self._packed else self._split.sequence_count
        self.dropped_tokens = token_count - self.rows * length if self._packed else 0
        self.steps_per_epoch = self.rows // batch if shuffle else math.ceil(self.rows / batch)
        self.steps = self.steps_per_epoch * (self._epochs if shuffle else 1)
        if self.steps_per_epoch == 0:
            raise RunError(
                f"{self._rows_text()}, which is less than one batch of {batch}: lower training.tokens.batch or training.tokens.len, or use more data"
            )
        self._order = Order(
            self.rows,
            flat_tokens.sequences_per_read_block,
            flat_tokens.read_blocks_per_shuffle_buffer,
            flat_tokens.seed if shuffle else None,
        )
        # The rows of each batch that this host's devices hold, in increasing order.
        indices = sharding.addressable_devices_indices_map((batch, length)).values()
        self._host_rows = np.unique(np.concatenate([np.arange(batch)[rows] for rows, _ in indices]))
        epochs = self._epochs if shuffle else 1
        self._buffers = ReadAhead(self._read_buffer, epochs * self._order.buffers, BUFFERS_AHEAD, "read_buffers")
        self._batches = ReadAhead(self._read_batch, self.steps, BATCHES_AHEAD, "read_batches")

    def load(self, step: int) -> TokenBatch:
        """The batch of a step, the first being 0; in any order, though reading on from the last one is fastest.

        Raises:
          RunError: the data hold fewer steps, or cannot be read.
        """
        if not 0 <= step < self.steps:
            epochs = step // self.steps_per_epoch + 1
            fix = (
                f"set flat_tokens.epochs to {epochs} or more, or lower training.steps"
                if self._shuffle
                else "an unshuffled pass reads each row once"
            )
            raise RunError(
                f"there is no batch for step {step}: {self._rows_text()}, {self.steps_per_epoch} batches of {self._batch} an epoch, "
                f"{self.steps} steps in all (flat_tokens.epochs is {self._epochs}): {fix}"
            )
        return self._batches(step)

    def close(self) -> None:
        """Ends the threads. What they are reading is finished first, what is queued is not begun."""
        self._batches.close()
        self._buffers.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _rows_text(self) -> str:
        if self._packed:
            return f"{self._split.where} holds {self._split.token_count} tokens, {self.rows} rows of {self._length}"
        return f"{self._split.where} holds {self.rows} sequences"

    def _read_batch(self, step: int) -> TokenBatch:
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        positions = step_of_epoch * self._batch + self._host_rows
        tokens = np.full((len(positions), self._length), ENCODED_PADDING)
        is_target = np.zeros(tokens.shape, bool)
        there = positions[positions < self.rows]  # the last batch of an unshuffled pass may go beyond
        ends = [self._order.buffer_of(epoch, place) for place in there[[0, -1]].tolist()] if len(there) else [0, -1]
        for index in range(ends[0], ends[1] + 1):
            buffer = self._buffers(epoch * self._order.buffers + index)
            _, here, source = np.intersect1d(there, buffer.positions, assume_unique=True, return_indices=True)
            tokens[here], is_target[here] = buffer.tokens[source], buffer.is_target[source]

        def place(values: np.ndarray) -> jax.Array:
            def part(index):
                first, last, _ = index[0].indices(self._batch)
                begin = np.searchsorted(self._host_rows, first)
                return values[begin : begin + last - first, index[1]]

            return jax.make_array_from_callback((self._batch, self._length), self._sharding, part)

        return TokenBatch(
            targets=place(tokens >> np.uint32(1)),
            is_seq_start=place((tokens & np.uint32(1)) != 0),
            is_target=place(is_target),
        )

    def _read_buffer(self, index: int) -> "_Buffer":
        epoch, buffer = divmod(index, self._order.buffers)
        first, rows = self._order.rows_of(epoch, buffer)
        positions = first + np.arange(len(rows))
        used = np.isin(positions % self._batch, self._host_rows) & (positions < self.steps_per_epoch * self._batch)
        positions, rows = positions[used], rows[used]
        if self._packed:
            starts, stops = rows * self._length, (rows + 1) * self._length
        else:
            starts, stops = self._split.sequence_ranges(rows, self._threads)
            stops = np.minimum(stops, starts + self._length)
        return _Buffer(positions, *self._split.read_rows(starts, stops, self._length, self._threads))


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """This host's rows of a shuffle buffer, in the order in which batches take them."""

    positions: np.ndarray  # in the epoch's stream of rows
    tokens: np.ndarray  # uint32 [rows, length], as stored
    is_target: np.ndarray  # bool [rows, length]


class ReadAhead(Generic[T]):
    """The results of a function of 0, 1, … count - 1, computed by one thread, the next few before they are asked for.

        read = ReadAhead(slow, count=100, ahead=3, name="slow")
        read(0), read(1)    # the second is there already, and 2, 3, 4 are on their way
        read(50)            # goes on from there

    An exception of the function is raised to whoever asks for that result; asking again computes it again.
    """

    def __init__(self, function: Callable[[int], T], count: int, ahead: int, name: str):
        self._function, self._count, self._ahead = function, count, ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._futures: dict[int, Future[T]] = {}

    def __call__(self, index: int) -> T:
        wanted = range(index, min(index + self._ahead + 1, self._count))
        for other in [known for known in self._futures if known not in wanted]:
            self._futures.pop(other).cancel()
        for new in wanted:
            if new not in self._futures:
                self._futures[new] = self._pool.submit(self._function, new)
        future = self._futures[index]
        if future.exception() is not None:
            del self._futures[index]
        return future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- the order


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of the rows of an epoch: a permutation that is computed, so that any place in it is reached at once.

    Blocks of neighbouring rows (the last may be shorter) are permuted; the rows of `blocks_per_buffer` blocks that then
    follow one another are permuted among themselves. A seed of None leaves all as it is.
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

    def rows_of(self, epoch: int, buffer: int) -> tuple[int, np.ndarray]:
        """The buffer's first position in the epoch's stream of rows, and the rows from there on."""
        first_block = buffer * self.blocks_per_buffer
        blocks = np.arange(first_block, min(first_block + self.blocks_per_buffer, self.blocks))
        if self.seed is not None:
            blocks = permute(blocks, self.blocks, self._key(epoch))
        rows = (blocks[:, None] * self.rows_per_block + np.arange(self.rows_per_block)).reshape(-1)
        rows = rows[rows < self.rows]
        if self.seed is not None:
            rows = rows[permute(np.arange(len(rows)), len(rows), self._key(epoch, buffer))]
        return self._first_position(epoch, first_block), rows

    def buffer_of(self, epoch: int, position: int) -> int:
        """The buffer that holds a position of the epoch's stream."""
        buffer = position // (self.rows_per_block * self.blocks_per_buffer)
        # The short block, where it comes earlier, moves all that follows forward: by less than a block, so by one buffer at most.
        return buffer + (position >= self._first_position(epoch, (buffer + 1) * self.blocks_per_buffer))

    def _first_position(self, epoch: int, block: int) -> int:
        """Where the block that comes at this place of the order begins."""
        block = min(block, self.blocks)
        short_block = self.blocks - 1
        if self.seed is not None:
            short_block = int(permute(np.array([short_block]), self.blocks, self._key(epoch), inverse=True)[0])
        missing = self.blocks * self.rows_per_block - self.rows
        return block * self.rows_per_block - (missing if block > short_block else 0)

    def _key(self, epoch: int, buffer: int = -1) -> tuple[int, ...]:
        return (self.seed % 2**64, epoch, buffer + 1)


def permute(index: np.ndarray, size: int, key: tuple[int, ...], *, inverse: bool = False) -> np.ndarray:
    """Where a permutation of 0 … size - 1, which the key chooses, takes each index; nothing of the size is stored.

        permute(np.arange(5), 5, key=(0,))                        # the five numbers in some order
        permute(np.array([10**12]), 10**13, key=(0, 3))           # costs the same

    A Feistel network on pairs (left, right) of a grid with at least `size` places: each round adds to one half a hash of the
    other, which can be undone. What lands outside is sent on until it is inside (cycle walking).
    """
    left_size = math.isqrt(size - 1) + 1 if size else 1
    right_size = -(-size // left_size) if size else 1
    keys = list(enumerate(np.random.SeedSequence(key).generate_state(FEISTEL_ROUNDS, np.uint64)))

    def once(place: np.ndarray) -> np.ndarray:
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


def _hash(values: np.ndarray, key: np.uint64, size: int) -> np.ndarray:
    """Numbers below size that look random: the finalizer of SplitMix64."""
    bits = values.astype(np.uint64) + key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) % np.uint64(size)).astype(np.int64)
