"""The rows of one data set in the order of its epochs, read a shuffle buffer at a time.

    every_other = lambda ordinals: ordinals % 2 == 0
    stream = RowStream("my.zarr", split, PackedRows(split, 1024), Order(...), 1024, every_other, pool)
    for at, buffer, place in stream.find(np.array([0, 2, 4])):
        rows[at] = buffer.tokens[place]

A row's ordinal is the number of rows before it, over all epochs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import numpy as np
from jaxtyping import Bool, Float32, UInt32

from runtime.data.flat_tokens import Split
from runtime.data.order import Order, Rows
from runtime.data.read_ahead import NO_END, ReadAhead
from runtime.data.rows import PackedRows, SequenceRows

BUFFERS_AHEAD = 1  # so that a step never waits for a whole shuffle buffer; host memory is twice the buffer


@dataclasses.dataclass(frozen=True)
class Buffer:
    """This host's rows of a shuffle buffer, in the order in which batches take them."""

    ordinals: Rows  # increasing
    tokens: UInt32[np.ndarray, "rows length"]  # in the stored encoding
    weight: Bool[np.ndarray, "rows length"] | Float32[np.ndarray, "rows length"]


class RowStream:
    def __init__(
        self,
        name: str,
        split: Split,
        rows: PackedRows | SequenceRows,
        order: Order,
        length: int,
        wanted: Callable[[np.ndarray], np.ndarray],
        pool: Executor,
    ):
        self.name, self.split, self.rows, self._order = name, split, rows, order
        self._wanted, self._pool = wanted, pool
        self._length = length
        self._memory: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._buffers = ReadAhead(self._read, NO_END, BUFFERS_AHEAD, "read_buffers")
        self.close = self._buffers.close

    @property
    def order(self) -> Order:
        """A growing split's number of rows is known only when it has ended."""
        return dataclasses.replace(self._order, rows=self.rows.count)

    def find(self, ordinals: Rows) -> Iterator[tuple[slice, Buffer, Rows]]:
        """The buffers of these rows, whose ordinals increase: which of the rows a buffer has, the buffer, and where."""
        begin = 0
        while begin < len(ordinals):
            buffer = self._buffers(self._buffer_of(int(ordinals[begin])))
            end = int(np.searchsorted(ordinals, buffer.ordinals[-1], side="right"))
            yield slice(begin, end), buffer, np.searchsorted(buffer.ordinals, ordinals[begin:end])
            begin = end

    def advance(self, ordinal: int) -> None:
        """Reads the buffer of a row that another host may want, so that a split that grows gets there."""
        self._buffers(self._buffer_of(ordinal))

    def place_of(self, ordinal: int) -> str:
        epoch, place = divmod(ordinal, self.rows.count)
        first, rows = self.order.rows_of(epoch, self.order.buffer_of(epoch, place))
        (start,), (stop,) = self.rows.ranges(rows[place - first : place - first + 1], self._pool)
        return f"tokens {start} to {stop - 1} of {self.split.where}"

    def _buffer_of(self, ordinal: int) -> int:
        self.rows.reach(ordinal + 1)  # there, or of a later epoch
        order = self.order
        epoch, place = divmod(ordinal, order.rows)
        return epoch * order.buffers + order.buffer_of(epoch, place)

    def _rows_of(self, index: int) -> tuple[Rows, Rows]:
        """The rows of a buffer, and their ordinals."""
        order = self.order
        epoch, buffer = divmod(index, order.buffers)
        first, rows = order.rows_of(epoch, buffer)
        return rows, epoch * order.rows + first + np.arange(len(rows))

    def _read(self, index: int) -> Buffer:
        rows, ordinals = self._rows_of(index)
        if not self.rows.reach(int(rows.max()) + 1):
            rows, ordinals = self._rows_of(index)  # where the split ends is known now
        wanted = self._wanted(ordinals)
        rows, ordinals = rows[wanted], ordinals[wanted]
        starts, stops = self.rows.ranges(rows, self._pool)
        # Two buffers alternate, each in the memory of the one before the last, which the loader has moved past: new
        # memory costs as much time as decoding where the system hands it out page by page.
        slot, shape = index % (1 + BUFFERS_AHEAD), (len(starts), self._length)
        if slot in self._memory and len(self._memory[slot][0]) < len(starts):
            del self._memory[slot]
        if slot not in self._memory:
            self._memory[slot] = np.empty(shape, np.uint32), np.empty(shape, self.split.weight_type)
        tokens, weight = (array[: len(starts)] for array in self._memory[slot])
        self.split.read_rows(starts, stops, tokens, weight, self._pool)
        return Buffer(ordinals, tokens, weight)
