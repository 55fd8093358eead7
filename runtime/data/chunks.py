"""Chunks of one-dimensional zarr arrays: each is decoded once, and a lost or damaged one is an error.

    group = open_checked("my.zarr")
    read_ranges(group["train/encoded_tokens"], starts, stops, out, "encoded_tokens of my.zarr/train", pool)

zarr reads a missing chunk as its fill value; arrays of `open_checked` do not. It and they ask an object store for ten
minutes.
"""

import asyncio
import atexit
import functools
import os
import sys
import threading
import zlib
from concurrent.futures import Executor
from typing import Any, Literal

import numpy as np
import zarr
import zarr.abc.store
import zarr.codecs
import zarr.core.sync
import zarr.storage
from jaxtyping import Int64, Shaped

from runtime.files import LARGEST_BYTES, open_file
from runtime.retries import is_final, pauses
from runtime.terminal import RunError, print_note
from runtime.unpacking import require_readable, require_size

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
# Errors of packages that not every reading needs, which are none of Python's own.
OF_PACKAGES = (
    ("botocore.exceptions", "BotoCoreError"), ("botocore.exceptions", "ClientError"), ("aiohttp", "ClientError"),
    ("datasets.exceptions", "DatasetsError"), ("pyarrow", "ArrowException"), ("zstandard", "ZstdError"),
)  # fmt: skip
PATIENCE_S = 600.0  # as checkpoints have it
NEVER = threading.Event()  # is not set
MOST_FILE_BYTES = 2**32  # in other writers' shards; ours have a quarter of 2**20


class CheckedStore(zarr.storage.WrapperStore):
    """A store to read from: a chunk that is not there is an OSError, one of format 2 that is not whole a ValueError.
    Once `closing` is set, nothing is asked again."""

    def __init__(self, store: zarr.abc.store.Store, closing: threading.Event = NEVER):
        super().__init__(store)
        self._closing = closing
        self.folder = store.root if isinstance(store, zarr.storage.LocalStore) else None
        self.fs = getattr(store, "fs", None)
        self.format_2: dict[str, tuple[Any, int]] = {}  # the compressor and a chunk's bytes, by the array's path

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        if self.folder and os.path.lexists(self.folder / key):
            open_file(self.folder / key, MOST_FILE_BYTES).close()  # reading a pipe would wait forever
        value = await self._fetched(key, prototype, byte_range)
        array, _, name = key.rpartition("/")
        if name in METADATA:
            return value
        if value is None:
            raise OSError(f"the file {key} is missing")
        if array in self.format_2:
            require_size(self.format_2[array][0], value.to_bytes(), self.format_2[array][1])
        return value

    async def _fetched(self, key: str, prototype: Any, byte_range: Any) -> Any:
        """The store's answer. An object store, whose servers answer 500 or cut connections, is asked again."""
        left = pauses(PATIENCE_S)
        while True:
            try:
                return await self._store.get(key, prototype, byte_range)
            except read_errors() as error:
                pause_s = next(left, None)
                if self.folder or is_final(error) or pause_s is None or self._closing.is_set():
                    raise
                print_note(f"{key} is read again in {pause_s:.1f} s: {type(error).__name__}: {error}")
            await asyncio.sleep(pause_s)


def open_group(path: str, mode: Literal["r+", "a"]) -> zarr.Group:
    """zarr.open_group, to write."""
    return _opened(path, path, mode)


def open_checked(path: str, closing: threading.Event = NEVER) -> zarr.Group:
    """The group at a path or URL, to read, through a CheckedStore. Raises as zarr.open_group."""
    store = zarr.storage.FsspecStore.from_url if "://" in path else zarr.storage.LocalStore
    return _opened(path, CheckedStore(store(path, read_only=True), closing), "r")


def _opened(path: str, store: str | CheckedStore, mode: Literal["r", "r+", "a"]) -> zarr.Group:
    """zarr.open_group. Its connections to an object store are closed when the program ends: nothing else does that, and
    aiohttp may print "Unclosed client session"."""
    for name in METADATA:
        if "://" not in path and os.path.lexists(file := os.path.join(path, name)):
            open_file(file, LARGEST_BYTES).close()
    try:
        group = zarr.open_group(store, mode=mode)
    except (TypeError, AttributeError, KeyError) as error:  # at JSON of another kind
        raise ValueError(f"its metadata are not those of a group ({error})") from error
    if (file_system := getattr(group.store, "fs", None)) is not None:
        _close_at_the_end(file_system)
    return group


@functools.cache
def _close_at_the_end(file_system: Any) -> None:
    def close() -> None:
        # s3fs's, gcsfs's: neither has a public name, nor a close() for the file systems that zarr makes.
        for name in ("_s3", "_session"):
            if (session := getattr(file_system, name, None)) is not None:
                zarr.core.sync.sync(session.close(), timeout=5)

    atexit.register(close)  # runs before zarr's own, which ends the loop that the connections live in


def check_chunks(array: zarr.Array) -> None:
    """Lets the array's CheckedStore check chunks of format 2. Raises ValueError: a codec is not known."""
    require_readable(array)
    if array.metadata.zarr_format == 2 and array.compressors and isinstance(array.store, CheckedStore):
        array.store.format_2[array.path] = array.compressors[0], array.chunks[0] * array.dtype.itemsize


def has_checksums(array: Any) -> bool:
    return bool(array.compressors) and isinstance(array.compressors[-1], zarr.codecs.Crc32cCodec)


def read(
    array: zarr.Array | Shaped[np.ndarray, "values"], start: int, stop: int, what: str
) -> Shaped[np.ndarray, "part"]:
    """array[start:stop]; `what` names it in messages. Raises RunError: a chunk cannot be read."""
    try:
        return np.asarray(array[start:stop])
    except read_errors() as error:
        text = str(error) or type(error).__name__
        fix = "the data set is damaged or out of reach; write or copy it again"
        raise RunError(f"cannot read {what} from {start} to {stop} ({text}): {fix}") from error


def read_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """The exceptions that a store, a codec or a package may raise if data are damaged or out of reach, and `others`."""
    loaded = [getattr(sys.modules[module], name) for module, name in OF_PACKAGES if module in sys.modules]
    return OSError, ValueError, ArithmeticError, RuntimeError, EOFError, zlib.error, *loaded, *others


def read_ranges(
    array: zarr.Array | Shaped[np.ndarray, "values"],
    starts: Int64[np.ndarray, "rows"],
    stops: Int64[np.ndarray, "rows"],
    out: Shaped[np.ndarray, "rows length"],
    what: str,
    pool: Executor,
) -> None:
    """Copies array[starts[i]:stops[i]] to the front of out[i], for all i. Each chunk is decoded once, by a thread that
    holds one at a time. Raises RunError: a chunk cannot be read."""
    chunk = array.chunks[0] if isinstance(array, zarr.Array) else max(1, array.shape[0])
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
