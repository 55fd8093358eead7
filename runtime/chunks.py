"""Reading parts of one-dimensional zarr arrays: each chunk is decoded once, and one that is lost or damaged is an error.

    group = open_checked("my.zarr")
    read_ranges(group["train/encoded_tokens"], starts, stops, out, "encoded_tokens of my.zarr/train", pool)

zarr reads a chunk that is not there as its fill value, and numcodecs (0.16) decodes a blosc file that was cut short to
garbage where its values were not compressible. `open_checked` gives a group of arrays that do neither.
"""

import sys
import zlib
from concurrent.futures import Executor
from typing import Any

import numcodecs
import numpy as np
import zarr
import zarr.abc.store
import zarr.codecs
import zarr.storage

from runtime.errors import RunError

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
BLOSC_HEADER_BYTES = 16  # the last four are the size of the whole


class CheckedStore(zarr.storage.WrapperStore):
    """A store to read from, in which every chunk that is asked for must be there, and whole where it is compressed by blosc."""

    def __init__(self, store: zarr.abc.store.Store):
        super().__init__(store)
        self.blosc_arrays: set[str] = set()  # paths of arrays whose files are frames of blosc

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        value = await self._store.get(key, prototype, byte_range)
        if key.rpartition("/")[2] in METADATA:
            return value
        if value is None:
            raise OSError(f"the file {key} is missing")
        if byte_range is None and key.rpartition("/")[0].removesuffix("/c") in self.blosc_arrays:
            header = value.as_numpy_array()[:BLOSC_HEADER_BYTES].tobytes()
            size = int.from_bytes(header[-4:], "little")
            if len(header) < BLOSC_HEADER_BYTES or size != len(value):
                raise OSError(f"the file {key} has {len(value)} bytes and was written with another number")
        return value


def open_checked(path: str) -> zarr.Group:
    """The group at a path or URL, to be read through a CheckedStore; raises what zarr does."""
    group = zarr.open_group(path, mode="r")
    return zarr.open_group(CheckedStore(group.store), path=group.path, mode="r")


def check_blosc(array: zarr.Array) -> None:
    """Lets the array's CheckedStore check its files, if they are compressed by blosc."""
    whole = array.shards is None and array.compressors
    if whole and isinstance(array.compressors[-1], zarr.codecs.BloscCodec | numcodecs.Blosc):
        array.store.blosc_arrays.add(array.path)


def read(array: zarr.Array | np.ndarray, start: int, stop: int, what: str) -> np.ndarray:
    """array[start:stop]; `what` names it in messages.

    Raises:
      RunError: a chunk of it cannot be read.
    """
    try:
        return np.asarray(array[start:stop])
    except read_errors() as error:
        text = str(error) or type(error).__name__
        raise RunError(
            f"cannot read {what} from {start} to {stop} ({text}): the data set is damaged or out of reach; write or copy it again"
        ) from error


def read_errors() -> tuple[type[Exception], ...]:
    """What a store or a codec may raise for data that are not as they should be, or not to be had."""
    errors: list[type[Exception]] = [OSError, ValueError, RuntimeError, EOFError, zlib.error]
    # Packages of object stores have errors of their own, which are none of the above.
    if "botocore" in sys.modules:
        from botocore.exceptions import BotoCoreError, ClientError

        errors += [BotoCoreError, ClientError]
    if "aiohttp" in sys.modules:
        from aiohttp import ClientError

        errors.append(ClientError)
    return tuple(errors)


def read_ranges(
    array: zarr.Array | np.ndarray, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, what: str, pool: Executor
) -> None:
    """Copies array[starts[i]:stops[i]] to the front of out[i], for all i, decoding each chunk once, in the pool's threads.

    A thread holds one chunk at a time.

    Raises:
      RunError: a chunk cannot be read.
    """
    size = max(1, array.shape[0])
    chunk = array.chunks[0] if isinstance(array, zarr.Array) else size
    # A range is cut where chunks end: into pieces, each with its row, its chunk, and from where to where it goes.
    there = np.flatnonzero(stops > starts)
    if not len(there):
        return
    first, last = starts[there] // chunk, (stops[there] - 1) // chunk
    row = np.repeat(there, last - first + 1)
    of_chunk = np.arange(len(row)) - np.repeat(np.cumsum(last - first + 1) - last - 1, last - first + 1)
    order = np.argsort(of_chunk, kind="stable")
    row, of_chunk = row[order], of_chunk[order]
    begin = np.maximum(starts[row], of_chunk * chunk)
    end = np.minimum(stops[row], (of_chunk + 1) * chunk)
    edges = [0, *(np.flatnonzero(np.diff(of_chunk)) + 1).tolist(), len(row)]

    def copy(edge: int) -> None:
        pieces = slice(edges[edge], edges[edge + 1])
        low, high = int(begin[pieces].min()), int(end[pieces].max())
        values = read(array, low, high, what)
        rows, begins, ends = row[pieces], begin[pieces], end[pieces]
        whole = (ends - begins == out.shape[1]) & (begins == starts[rows])
        if whole.any():  # at once: a loop over rows would take longer than decoding where rows are short
            windows = np.lib.stride_tricks.sliding_window_view(values, out.shape[1])
            out[rows[whole]] = windows[begins[whole] - low]
        rest = ~whole
        places = (array[rest].tolist() for array in (rows, begins - starts[rows], begins - low, ends - low))
        for one, place, left, right in zip(*places):
            out[one, place : place + right - left] = values[left:right]

    for _ in pool.map(copy, range(len(edges) - 1)):  # going through the results raises what a thread raised
        pass
