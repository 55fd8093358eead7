"""Batches of tokens for training and validation, read ahead while the device works.

    sharding = make_shardings(TokenBatch)   # the trainer's own type, with the fields of Batch
    with Loader(config.flat_tokens, "train", batch=64, length=1024, sharding=sharding) as loader:
        batch = loader.load(step)           # a TokenBatch of global arrays

A batch is a function of the config and the step alone, so a run that resumes at step k, on whatever mesh and hosts,
sees what an uninterrupted one would. The order is computed, not stored (runtime/data/order.py): a permutation of blocks
of neighbouring rows, and of the rows in groups of such blocks (shuffle buffers).
"""

import contextlib
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import zarr
from jaxtyping import Bool, Float32, Int64, UInt32

from runtime.data import refusals
from runtime.data.flat_tokens import CHUNK_TOKENS, ENCODED_PADDING, open_split
from runtime.data.growing import GrowingSplit
from runtime.data.order import GrowingBatch, MixtureOrder, Order, SequentialOrder
from runtime.data.read_ahead import NO_END, ReadAhead
from runtime.data.row_stream import BUFFERS_AHEAD, RowStream
from runtime.data.rows import PackedRows, SequenceRows
from runtime.terminal import RunError

BATCHES_AHEAD = 3  # on the device already while a step runs
UNSHUFFLED_BATCHES = 8  # are read at once if rows are read in stored order
TOKEN_BYTES = 4  # a token's id in a buffer; is_target takes another byte, or weight 4
CHUNKS_A_THREAD = 3  # while it reads one: compressed, decoded, and copied


class Batch(NamedTuple):
    """A batch, or its shardings; or a trainer's own pytree with these fields, each of rows of tokens.

    More fields may be there: `weight` (f32: each target's in the loss, 0 for what is no target); and, for an encoder,
    `read` (u32) and `read_starts` (bool: it starts a sequence), of a row's first training.tokens.read_len tokens.
    """

    targets: Any  # u32: what is to be predicted
    is_seq_start: Any  # bool: the target starts a sequence
    is_target: Any  # bool: False for context and padding


def rows_of_host(sharding: Batch, batch: int, length: int) -> Int64[np.ndarray, "rows"]:
    """The rows of a batch that this host's devices hold, in increasing order."""
    indices = sharding.targets.addressable_devices_indices_map((batch, length)).values()
    return np.unique(np.concatenate([np.arange(batch)[rows] for rows, _ in indices]))


def token_batch(
    tokens: UInt32[np.ndarray, "rows length"],
    weight: Bool[np.ndarray, "rows length"] | Float32[np.ndarray, "rows length"],
    host_rows: Int64[np.ndarray, "rows"],
    batch: int,
    sharding: Batch,
    read_length: int = 0,
) -> Batch:
    """The global batch of `batch` rows; each host gives its own.

    Args:
      tokens: as flat tokens are stored, the first read_length of each row for the encoder.
      host_rows: `rows_of_host`.
      sharding: each field's; rows are split alike in all.
    """

    def place(values: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        def part(index):
            first, last, _ = index[0].indices(batch)
            begin = np.searchsorted(host_rows, first)
            return values[begin : begin + last - first, index[1]]

        return jax.make_array_from_callback((batch, values.shape[1]), sharding, part)

    (read, tokens), weight = np.split(tokens, [read_length], axis=1), weight[:, read_length:]
    values = {
        "targets": tokens >> np.uint32(1),
        "is_seq_start": (tokens & np.uint32(1)).astype(bool),
        "is_target": weight > 0,
        "weight": weight.astype(np.float32),
        "read": read >> np.uint32(1),
        "read_starts": (read & np.uint32(1)).astype(bool),
    }
    there = {name: value for name, value in values.items() if hasattr(sharding, name)}
    return type(sharding)(**{name: place(value, getattr(sharding, name)) for name, value in there.items()})


class Loader:
    """Loads the batches of one split of a data set, or of a mixture of several.

    A packed row is `length` tokens in the order in which they are stored, whatever sequences they belong to. Without
    packing it has tokens of one sequence and padding; a longer sequence makes several rows. Padding is no target, and
    each position of it is a segment of its own.

    Epochs follow one another without a gap: a batch may hold an epoch's last rows and the next one's first. In a
    mixture each source goes through its own epochs, and has its share of any number of rows, within one row. A split
    that is still being written is read in the order in which it is stored, and waited for.

    Args:
      batch: rows over all hosts; with doubles_at those of the largest batch (`GrowingBatch`).
      length, read_length: tokens of a row; before these, tokens that an encoder reads.
      mixture: sources, each with filespec and weight, instead of flat_tokens.filespec.
      growing: splits that are still being written, by their sources' names; the loader closes them.
      shuffle: False gives each row once, in the order in which it is stored; what is missing in the last batch is no
        target. A mixture ends where its first source does, and each source's rows have batches of their own.
      batches: the most that an unshuffled split gives; None: all.
    Raises:
      RunError: a data set cannot be opened, does not fit the batch or the other sources, or needs too much memory.
    """

    max_token_id: int  # no token id is larger
    bos_id: int  # the input that stands before a sequence's first token
    steps: int | None  # in all epochs; None: there is no end
    rows: int  # in an epoch, of all sources together
    dropped_tokens: int  # in an epoch: at the ends of splits, too few for a row
    memory_bytes: int  # most memory of the host that it takes

    def __init__(
        self,
        flat_tokens: Any,
        split: str,
        *,
        batch: int,
        length: int,
        sharding: Batch,
        mixture: Sequence[Any] = (),
        growing: Mapping[str, GrowingSplit] = MappingProxyType({}),
        shuffle: bool = True,
        batches: int | None = None,
        io_threads: int = 8,
        read_length: int = 0,
        doubles_at: Sequence[int] = (),
    ):
        refusals.check_batch(batch // jax.process_count(), read_length + length)
        self._growing_batch = GrowingBatch(batch, doubles_at if shuffle else ())
        self._batch, self._sharding, self._shuffle, self._most_batches = batch, sharding, shuffle, batches
        self._length, self._read_length = read_length + length, read_length
        self._epochs = flat_tokens.epochs if shuffle else 1
        self._mixture = MixtureOrder([source.weight for source in mixture] or [1])
        self._host_rows = {size: rows_of_host(sharding, size, length) for size in self._growing_batch.sizes}
        self._is_host_row = np.zeros((len(self._growing_batch.sizes), batch), bool)  # by phase
        for phase, size in enumerate(self._growing_batch.sizes):
            self._is_host_row[phase, self._host_rows[size]] = True
        self._sources: list[RowStream] = []
        self._growing, closing = growing, threading.Event()
        with contextlib.ExitStack() as opened:
            pool = opened.enter_context(ThreadPoolExecutor(io_threads, thread_name_prefix="read_chunks"))
            names = [source.filespec for source in mixture] or [*growing] or [flat_tokens.filespec]
            for index, name in enumerate(names):
                opened_split = growing.get(name) or open_split(name, split, closing=closing)
                refusals.check_rows(opened_split, length, read_length, flat_tokens.sequence_packing, sharding)
                rows = (
                    PackedRows(opened_split, self._length)
                    if flat_tokens.sequence_packing
                    else SequenceRows(opened_split, length, pool)
                )
                order = Order(rows.count, batch, UNSHUFFLED_BATCHES, None)
                if shuffle and name not in growing:
                    sizes = flat_tokens.sequences_per_read_block, flat_tokens.read_blocks_per_shuffle_buffer
                    order = Order(rows.count, *sizes, flat_tokens.seed)
                wanted = functools.partial(self._is_wanted, index)
                self._sources.append(RowStream(name, opened_split, rows, order, self._length, wanted, pool))
                opened.callback(self._sources[-1].close)
            self.bos_id = refusals.check_same_bos_id([source.split for source in self._sources])
            self.max_token_id = max(source.split.max_token_id for source in self._sources)
            self.rows = sum(source.rows.count for source in self._sources)
            whole = [source for source in self._sources if source.name not in growing]
            self.dropped_tokens = sum(source.rows.dropped_tokens for source in whole)
            self._set_end()
            self.memory_bytes = self._most_memory(io_threads)
            refusals.check_memory(self.memory_bytes, [source.split.where for source in self._sources])
            opened.callback(lambda: self._batches.close())
            for other in growing.values():
                opened.callback(other.close)  # first, since the threads may be waiting for it
            opened.callback(closing.set)  # or for a store
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def begin(self) -> None:
        """Waits for the first rows of a split that is still being written; for all that an unshuffled pass reads."""
        for source, count in zip(self._sources, self._counts.tolist(), strict=True):
            if source.name in self._growing:
                source.rows.reach(1 if self._shuffle else count)
        if self._growing:
            self._set_end()

    def close(self) -> None:
        """Ends the threads. What they are reading is finished first, what is queued is not begun."""
        self._opened.close()

    def load(self, step: int) -> Batch:
        """The batch of a step, from 0; the next is fastest. Raises RunError: there is none, or it cannot be read."""
        if step < 0 or (self.steps is not None and step >= self.steps):
            raise RunError(f"there is no batch for step {step}: {self.summary}")
        return self._batches(step)

    def is_there(self, step: int, timeout_s: float) -> bool:
        """Waits for the batch of a step, at most so long; whether `load` would wait no longer."""
        return self._batches.is_there(step, timeout_s)

    @property
    def waited_s(self) -> float:
        return self._batches.waited_s

    @property
    def summary(self) -> str:
        """Says in one line what is read and what is left out."""
        if self.steps is None:
            end = "without end"
        elif self._shuffle:
            left, epochs = self._end - self._growing_batch.start(self.steps), "epoch" + "s" * (self._epochs != 1)
            end = f"{self.steps:,} steps in {self._epochs} {epochs}, {left:,} rows left over at the end"
        else:
            end = f"{self.steps:,} batches of {self._batch} are read"
            if len(self._sources) > 1:
                end += f": {', '.join(map(str, self._counts))} rows"
        texts = [source.rows.text for source in self._sources]
        if len(texts) > 1:
            shares = self._mixture.shares / self._mixture.shares.sum()
            texts = [f"{share:.2%} from {text}" for share, text in zip(shares, texts)]
        return f"{'; '.join(texts)}; {end}; at most {math.ceil(self.memory_bytes / 1e6):,} MB of host memory"

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that tell this split from another: a checkpoint keeps them, so no run goes on with other data."""
        identity: dict[str, Any] = {"max_token_id": self.max_token_id, "bos_id": self.bos_id}
        # The number of a growing split's rows is not known yet.
        whole = [source for source in self._sources if source.name not in self._growing]
        if self._growing:
            identity["files"] = sum(split.files for split in self._growing.values())
        if whole:
            rows, ends = [source.rows.count for source in whole], [source.split.ends for source in whole]
            identity |= {"rows": rows, "ends": ends} if len(self._sources) > 1 else {"rows": rows[0], "ends": ends[0]}
            identity["dropped_tokens"] = self.dropped_tokens
        if len(self._sources) > 1:
            identity["shares"] = self._mixture.shares.tolist()
        return identity

    def metrics(self, step: int) -> dict[str, Any]:
        """For a mixture, tokens read from each source up to a step, padding included."""
        if len(self._sources) == 1:
            return {}
        counts = self._mixture.counts(self._growing_batch.start(step + 1)) * self._length
        return {"tokens_per_source": {source.name: count for source, count in zip(self._sources, counts.tolist())}}

    def epochs_of(self, steps: int) -> int:
        """How many epochs hold so many steps."""
        return -(-self._growing_batch.start(steps) // self.rows)

    def part_of_batch(self, step: int) -> float:
        """The share of the largest batch's rows that a step has."""
        return self._growing_batch.rows(step) / self._batch

    def rows_of(self, step: int) -> list[str]:
        """Where each row of a step's batch, on all hosts, comes from: for a person who looks at a bad step."""
        first, after = (self._growing_batch.start(number) for number in (step, step + 1))
        sources, ordinals = self._places.at(np.arange(first, after))
        there = ordinals < self._counts[sources]
        pairs = zip(sources[there].tolist(), ordinals[there].tolist())
        return [self._sources[source].place_of(ordinal) for source, ordinal in pairs]

    def source_of(self, step: int) -> str:
        (source,), _ = self._places.at(np.array([step * self._batch]))
        return self._sources[source].name

    # ---- what is there

    def _set_end(self) -> None:
        """Counts the rows of each source that there are to read, says where they come, and refuses too few."""
        self._end = self._count_rows()
        self.steps = None if self._end == NO_END else self._growing_batch.steps(self._end)
        end = NO_END if self.steps is None else self._growing_batch.start(self.steps)
        self._counts = np.full(len(self._sources), end)
        self._places: MixtureOrder | SequentialOrder = self._mixture
        if not self._shuffle:
            self._counts = self._mixture.counts(self._end)
            self._places = SequentialOrder(self._counts, self._batch)
            self.steps = int(self._places.starts[-1]) // self._batch
        refusals.check_enough([source.rows for source in self._sources], self.steps, self._epochs, self._batch)
        steps = NO_END if self.steps is None else self.steps
        self._batches = ReadAhead(self._read_batch, steps, BATCHES_AHEAD, "read_batches")

    def _count_rows(self) -> int:
        counts = [source.rows.count for source in self._sources]
        if self._shuffle:
            return NO_END if self._growing or len(counts) > 1 else counts[0] * self._epochs
        # Up to the first row that a source does not have; a split that grows may have any number.
        most = NO_END if self._most_batches is None else self._most_batches * self._batch
        firsts = [np.array([min(count, most)]) for count in counts]
        return min(most, *(int(self._mixture.rows_of(index, first)[0]) for index, first in enumerate(firsts)))

    def _most_memory(self, io_threads: int) -> int:
        rows_here = len(self._host_rows[self._batch])
        self._weight_type = np.result_type(*(source.split.weight_type for source in self._sources))
        rows = (BATCHES_AHEAD + 2) * rows_here * 2  # the rows in batches
        for source in self._sources:
            buffer = min(source.order.rows_per_block * source.order.blocks_per_buffer, source.order.rows)
            if len(self._sources) == 1:  # in a mixture one host may read all rows of a source
                buffer = min(buffer, (buffer // self._batch + 2) * rows_here)
            rows += (1 + BUFFERS_AHEAD) * buffer
        splits = [source.split for source in self._sources]
        arrays = [array for split in splits for array in (split.encoded_tokens, split.seq_starts, split.weight)]
        kept = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        chunks = [array.chunks[0] * array.dtype.itemsize for array in arrays if isinstance(array, zarr.Array)]
        chunks += [CHUNK_TOKENS * TOKEN_BYTES] if self._growing else []
        token_bytes = TOKEN_BYTES + self._weight_type.itemsize
        reading = io_threads * CHUNKS_A_THREAD * max(chunks, default=0)
        return rows * (self._length * token_bytes + 8) + kept + reading

    # ---- reading

    def _is_wanted(self, source: int, ordinals: Int64[np.ndarray, "rows"]) -> Bool[np.ndarray, "rows"]:
        positions = self._places.rows_of(source, ordinals)
        return self._is_host_row[self._growing_batch.places(positions)] & (ordinals < self._counts[source])

    def _read_batch(self, step: int) -> Batch:
        size = self._growing_batch.rows(step)
        host_rows = self._host_rows[size]
        positions = self._growing_batch.start(step) + host_rows
        tokens = np.full((len(positions), self._length), ENCODED_PADDING)
        weight = np.zeros(tokens.shape, self._weight_type)
        sources, ordinals = self._places.at(positions)
        there = ordinals < self._counts[sources]  # the last batch of a source in an unshuffled pass may go beyond
        for index, source in enumerate(self._sources):
            rows = np.flatnonzero(there & (sources == index))
            for at, buffer, place in source.find(ordinals[rows]):
                tokens[rows[at]], weight[rows[at]] = buffer.tokens[place], buffer.weight[place]
        if self._growing and self._shuffle:  # the first host asks for all, and may itself have no row of a source
            counts = self._mixture.counts(self._growing_batch.start(step + 1)).tolist()
            for source, count in zip(self._sources, counts, strict=True):
                if source.name in self._growing and count:
                    source.advance(count - 1)
        return token_batch(tokens, weight, host_rows, size, self._sharding, self._read_length)
