"""The flat-tokens format: all sequences of a split one after another, and where each starts, in a zarr group.

    write_split("my.zarr", "train", [np.array([1, 2]), np.array([3, 4, 5])])
    split = open_split("my.zarr", "train")
    split.encoded_tokens[:]     # [3, 4, 7, 8, 10]: 2 * id + 1 where a sequence starts, else 2 * id
    split.seq_starts[:]         # [0, 2, 5]: the last is the number of tokens
    split.max_token_id          # 5

A data set is a zarr group of such groups, `train` and `validation`. Format 2 and format 3 of zarr are read, 3 is
written.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np
import zarr
import zarr.errors

from runtime.data.chunks import (
    check_chunks,
    chunk_file,
    open_checked,
    open_group,
    read,
    read_errors,
    read_ranges,
    write_chunk,
)
from runtime.terminal import RunError

LARGEST_ID = 2**31 - 1  # one bit of 32 tells where a sequence starts
CHUNK_TOKENS = 2**18  # 1 MiB of tokens is one file: a quarter of that on disk, decoded in about a millisecond
RESIDENT_BYTES = (
    64 * 2**20
)  # an array no larger is read once and kept: small rows out of many chunks would decode each often
ENCODED_PADDING = np.uint32(1)  # id 0 that starts a sequence: what pads is a segment of its own, so no token can see it

# zarr reads a chunk file that is lost as the fill value. These are impossible values, so a lost chunk is found when it
# is read.
_LOST_TOKENS, _LOST_STARTS = 2**32 - 1, 2**64 - 1


# ---------------------------------------------------------------- writing


def write_split(
    path: str | os.PathLike,
    split: str,
    sequences: Iterable[np.ndarray],
    *,
    is_target: Iterable[np.ndarray] | None = None,
    bos_id: int = 0,
    attributes: dict[str, Any] | None = None,
    overwrite: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> None:
    """Writes one split of a data set, holding no more than a chunk and a sequence in memory.

        write_split("my.zarr", "train", (tokenize(text) for text in texts), attributes={"tokenizer": "gpt2"})

    Args:
      path: the data set; made where there is none. Other splits in it stay.
      sequences: one-dimensional integer arrays of token ids from 0 to 2³¹ - 1; an empty one is a sequence too.
      is_target: a boolean array for each sequence, False where a token is only context. Without it every token is a target.
      attributes: further ones, such as the tokenizer's name.
      overwrite: replaces a split that is there already.
    Raises:
      RunError: the split is there already, the data set is of zarr format 2, or a sequence is not as above.
    """
    where, dataset = absolute_path(path), open_for_writing(path)
    if split in dataset and not overwrite:
        raise RunError(
            f"{where} holds the split '{split}' already: write to a new path, or say overwrite=true to replace it"
        )

    writer = SplitWriter(
        dataset, split, with_targets=is_target is not None, chunk_tokens=chunk_tokens, overwrite=overwrite
    )
    masks = None if is_target is None else iter(is_target)
    for index, sequence in enumerate(sequences):
        ids = np.asarray(sequence)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise RunError(
                f"sequence {index} for {where}/{split} is {ids.dtype}{list(ids.shape)}, expected integers of one "
                "dimension"
            )
        if ids.size:
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest > LARGEST_ID:
                wrong = smallest if smallest < 0 else largest
                raise RunError(
                    f"sequence {index} for {where}/{split} holds the token id {wrong}, expected 0 to {LARGEST_ID}"
                )
        mask = None if masks is None else np.asarray(next(masks, None))
        if mask is not None and (mask.dtype != bool or mask.shape != ids.shape):
            raise RunError(
                f"is_target of sequence {index} for {where}/{split} is {mask.dtype}{list(mask.shape)}, expected "
                f"bool{list(ids.shape)}"
            )
        writer.append(ids.astype(np.uint32), np.array([ids.size]), mask)
    writer.finish(bos_id, attributes)


def open_for_writing(path: str | os.PathLike) -> zarr.Group:
    """The group of a data set that is there or is made now.

    Raises:
      RunError: it cannot be, or is of zarr format 2.
    """
    where = absolute_path(path)
    try:
        dataset = open_group(where, mode="a")
    except (OSError, ValueError, ImportError) as error:
        raise RunError(f"cannot write a data set at {where}: {error}") from error
    if dataset.metadata.zarr_format != 3:
        raise RunError(f"{where} is of zarr format 2, and only format 3 is written: write to a new path")
    return dataset


class SplitWriter:
    """Appends sequences to a split, holding no more than a chunk in memory; can go on where a recorded state was.

        writer = SplitWriter(dataset, "train")
        writer.append(ids, lengths)      # all ids of some sequences one after another, and how many each has
        state = writer.flush()           # all of it is stored now
        writer = SplitWriter(dataset, "train", resume=state)    # after a crash: as if nothing had come after flush()
        writer.finish(bos_id=0)          # the split opens from now on

    What is stored does not depend on how the sequences were grouped, nor on flush() and resume.

    Args:
      dataset: the open group, of zarr format 3, that the split is or shall be in.
      with_targets: every append gives is_target.
      resume: what flush() returned; the split must be there. Without it the split is made.
      overwrite: a split that is there already is replaced.
    Raises:
      RunError: by every method, a write that failed.
    """

    def __init__(
        self,
        dataset: zarr.Group,
        split: str,
        *,
        with_targets: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
        resume: dict[str, int] | None = None,
        overwrite: bool = False,
    ):
        self.where = f"{dataset.store_path}/{split}".removeprefix("file://")
        state = resume or {"tokens": 0, "sequences": 0, "max_token_id": 0}
        self.token_count, self.sequence_count, self.max_token_id = (
            state[key] for key in ("tokens", "sequences", "max_token_id")
        )
        with self._failing_writes():
            self.group = dataset.create_group(split, overwrite=overwrite) if resume is None else dataset[split]
            arrays = [
                ("encoded_tokens", "uint32", chunk_tokens, _LOST_TOKENS, self.token_count),
                ("seq_starts", "uint64", max(1, chunk_tokens // 8), _LOST_STARTS, self.sequence_count),
                ("is_target", "bool", chunk_tokens, False, self.token_count),
            ]
            self.appenders = [
                _Appender(self.group, *array, resume=resume is not None) for array in arrays[: 2 + with_targets]
            ]

    def append(self, ids: np.ndarray, lengths: np.ndarray, is_target: np.ndarray | None = None) -> None:
        """Appends sequences: uint32 ids up to 2³¹ - 1, how many each sequence has, and which are targets."""
        starts = np.cumsum(lengths) - lengths
        firsts = starts[lengths > 0]
        encoded_tokens, seq_starts, *mask = self.appenders
        with self._failing_writes():
            for place, room in encoded_tokens.rooms(len(ids)):
                some = ids[place : place + len(room)]
                np.left_shift(some, np.uint32(1), out=room)
                low, high = np.searchsorted(firsts, (place, place + len(room)))
                room[firsts[low:high] - place] |= np.uint32(1)
                self.max_token_id = max(self.max_token_id, int(some.max()))
            seq_starts.append(starts.astype(np.uint64) + np.uint64(self.token_count))
            for appender in mask:
                appender.append(is_target)
        self.token_count += len(ids)
        self.sequence_count += len(lengths)

    def flush(self) -> dict[str, int]:
        """Stores all that was appended, in a local folder also through the system's caches; what `resume` goes on from."""
        with self._failing_writes():
            for appender in self.appenders:
                appender.flush()
                appender.to_disk()
        return {"tokens": self.token_count, "sequences": self.sequence_count, "max_token_id": self.max_token_id}

    def finish(self, bos_id: int, attributes: dict[str, Any] | None = None) -> None:
        """Completes the split. Nothing can be appended any more."""
        with self._failing_writes():
            self.appenders[1].append(np.array([self.token_count], np.uint64))
            for appender in self.appenders:
                appender.flush()
            # Last, since a split without max_token_id does not open: one that was only half written is never taken for
            # whole.
            self.group.attrs.update({**(attributes or {}), "bos_id": int(bos_id), "max_token_id": self.max_token_id})

    @contextlib.contextmanager
    def _failing_writes(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write {self.where}: {error}") from error


class _Appender:
    """Gathers the values of a zarr array and writes whole chunks of it."""

    def __init__(
        self, group: zarr.Group, name: str, dtype: str, chunk: int, fill_value: int | bool, length: int, resume: bool
    ):
        # An array that is gone on with keeps its first `length` values; those of its last chunk are taken back to
        # memory.
        self.number = length // chunk  # of the chunk that is gathered; those before it are written
        self.on_disk = self.number  # that many chunks are known to be on the disk
        self.values, self.count = np.empty(chunk, dtype), length % chunk
        if resume:
            self.array = group[name]
            self.array.resize((length,))
            self.values[: self.count] = self.array[self.number * chunk :]
        else:
            self.array = group.create_array(
                name,
                shape=(0,),
                dtype=dtype,
                chunks=(chunk,),
                # At level 9, the slowest of lz4, still twice as fast to write and five times as fast to read as zstd at
                # level 1, for a seventh to a third more space.
                compressors=[
                    zarr.codecs.BloscCodec(cname="lz4", clevel=9, shuffle="shuffle"),
                    zarr.codecs.Crc32cCodec(),
                ],
                fill_value=fill_value,
                config={"write_empty_chunks": True},
            )
        self.is_local = isinstance(self.array.store, zarr.storage.LocalStore)
        if resume and self.is_local:  # chunks that were written after the place which is gone on from
            number = self.number + (self.count > 0)
            while (file := chunk_file(self.array, number)).exists():
                file.unlink()
                number += 1

    def rooms(self, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """Memory for the next `count` values, in pieces, each with how many come before it; to be filled before the
        next is asked for."""
        done = 0
        while done < count:
            room = self.values[self.count : self.count + count - done]
            yield done, room
            done += len(room)
            self.count += len(room)
            if self.count == len(self.values):
                self._write()
                self.number, self.count = self.number + 1, 0

    def append(self, values: np.ndarray) -> None:
        for place, room in self.rooms(len(values)):
            room[:] = values[place : place + len(room)]

    def flush(self) -> None:
        """Writes what is left too. It stays in memory, since its chunk is written again when it is full."""
        if self.count:
            self._write()
        self._grow()

    def to_disk(self) -> None:
        """Waits until the chunks that were written are on the disk, and finds one that is not there; a local folder's
        only."""
        if self.is_local:
            for number in range(self.on_disk, self.number + (self.count > 0)):
                descriptor = os.open(chunk_file(self.array, number), os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        self.on_disk = self.number

    def _write(self) -> None:
        if self.is_local:
            self.values[self.count :] = self.array.fill_value
            write_chunk(self.array, self.number, self.values)
        else:
            self._grow()
            start = self.number * len(self.values)
            self.array[start : start + self.count] = self.values[: self.count]

    def _grow(self) -> None:
        length = self.number * len(self.values) + self.count
        if length > self.array.shape[0]:
            self.array.resize((length,))


# ---------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class Split:
    """An open split. The arrays are zarr's, or numpy's where they are small enough to be kept."""

    where: str  # for messages
    encoded_tokens: zarr.Array | np.ndarray  # uint32[token_count]
    seq_starts: zarr.Array | np.ndarray  # uint64[sequence_count + 1]
    is_target: zarr.Array | np.ndarray | None  # bool[token_count]
    max_token_id: int
    bos_id: int

    @property
    def token_count(self) -> int:
        return self.encoded_tokens.shape[0]

    @property
    def sequence_count(self) -> int:
        return self.seq_starts.shape[0] - 1

    def read_rows(
        self, starts: np.ndarray, stops: np.ndarray, tokens: np.ndarray, is_target: np.ndarray, pool: Executor
    ) -> None:
        """Fills row i with the tokens from starts[i] to stops[i], as they are stored, and with which are targets.

        What pads a row at its end is ENCODED_PADDING and no target.

        Args:
          tokens, is_target: to be filled: uint32 and bool, [rows, length].
        Raises:
          RunError: the tokens cannot be read, or an id is larger than max_token_id.
        """
        tokens.fill(ENCODED_PADDING)
        read_ranges(self.encoded_tokens, starts, stops, tokens, f"encoded_tokens of {self.where}", pool)
        if tokens.size and int(tokens.max()) >> 1 > self.max_token_id:
            row, place = np.argwhere(tokens >> np.uint32(1) > self.max_token_id)[0]
            raise RunError(
                f"encoded_tokens of {self.where} holds the token id {tokens[row, place] >> 1} at "
                f"{starts[row] + place}, which is larger than its "
                f"max_token_id {self.max_token_id}: a chunk was damaged, or the writer was wrong; write or copy the "
                "data set again"
            )
        if self.is_target is None:
            np.less(np.arange(tokens.shape[1]), (stops - starts)[:, None], out=is_target)
        else:
            is_target.fill(False)
            read_ranges(self.is_target, starts, stops, is_target, f"is_target of {self.where}", pool)


def open_split(path: str | os.PathLike, split: str, *, resident_bytes: int = RESIDENT_BYTES) -> Split:
    """Opens one split of a data set, and checks what can be checked without reading the tokens.

    Args:
      path: a folder (`~` is expanded) or a URL that zarr can open.
      resident_bytes: an array that is no larger is read at once and kept in memory.
    Raises:
      RunError: the data set, the split, an array or an attribute is missing, or is not as the format says.
    """
    where = absolute_path(path)
    advice = (
        "set flat_tokens.filespec to a flat-tokens data set, or write one (python -m tools.tokenize_text; docs/data.md)"
    )
    try:
        dataset = open_checked(where)
        present = sorted(dataset.keys())
    except (FileNotFoundError, zarr.errors.GroupNotFoundError) as error:
        if "://" in where or not os.path.exists(where):
            raise RunError(f"the data set {where} does not exist: {advice}") from error
        raise RunError(f"{where} exists but is no zarr group, so it is no data set: {advice}") from error
    except ImportError as error:  # fsspec's text names the package last: "Install s3fs to access S3"
        package = re.search(r"nstall (\w+)", str(error))
        fix = f"pip install {package[1]}" if package else "install what it needs"
        raise RunError(f"the data set {where} cannot be opened ({error}): {fix}") from error
    except (*read_errors(), KeyError, TypeError) as error:
        raise RunError(f"the data set {where} cannot be opened ({type(error).__name__}: {error}): {advice}") from error
    if split not in present and "encoded_tokens" in present:
        raise RunError(
            f"{where} is one split of a data set, expected the data set that holds it: give the folder above"
        )
    group = _member(dataset, split, where)
    if not isinstance(group, zarr.Group):
        raise RunError(f"the data set {where} has no split '{split}'; it holds {_listed(present)}")

    where = f"{where}/{split}"
    encoded_tokens = _open_array(group, where, "encoded_tokens", np.uint32)
    seq_starts = _open_array(group, where, "seq_starts", np.uint64)
    is_target = None if _member(group, "is_target", where) is None else _open_array(group, where, "is_target", np.bool_)
    token_count = encoded_tokens.shape[0]
    if is_target is not None and is_target.shape != encoded_tokens.shape:
        raise RunError(f"is_target of {where} has {is_target.shape[0]} entries, expected one a token, {token_count}")
    if seq_starts.shape[0] == 0:
        raise RunError(
            f"seq_starts of {where} is empty, expected where each sequence starts and, last, the number of tokens"
        )
    first, last = (int(read(seq_starts, i, i + 1, f"seq_starts of {where}")[0]) for i in (0, seq_starts.shape[0] - 1))
    if first != 0:
        raise RunError(
            f"seq_starts of {where} starts with {first}, expected 0: the data set is damaged, write it again"
        )
    if last != token_count:
        raise RunError(
            f"seq_starts of {where} ends with {last}, expected {token_count}, the length of encoded_tokens: "
            f"the data set is damaged or only partly written, write or copy it again"
        )
    max_token_id = _attribute(group, where, "max_token_id", None)
    bos_id = _attribute(group, where, "bos_id", 0)

    def resident(array, name):
        small = array is not None and array.shape[0] * array.dtype.itemsize <= resident_bytes
        return read(array, 0, array.shape[0], f"{name} of {where}") if small else array

    return Split(
        where,
        resident(encoded_tokens, "encoded_tokens"),
        resident(seq_starts, "seq_starts"),
        resident(is_target, "is_target"),
        max_token_id,
        bos_id,
    )


def absolute_path(path: str | os.PathLike) -> str:
    """The path that is opened and that messages name: absolute, `~` expanded; a URL as it is."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _member(group: zarr.Group, name: str, where: str) -> zarr.Group | zarr.Array | None:
    try:
        return group[name]
    except KeyError:
        return None
    except (*read_errors(), TypeError) as error:
        raise RunError(
            f"'{name}' of {where} cannot be opened ({type(error).__name__}: {error}): write or copy it again"
        ) from error


def _open_array(group: zarr.Group, where: str, name: str, dtype: type) -> zarr.Array:
    array = _member(group, name, where)
    if not isinstance(array, zarr.Array):
        raise RunError(
            f"{where} has no array '{name}', so it is no flat-tokens split; it holds {_listed(sorted(group.keys()))}"
        )
    if np.dtype(array.dtype).newbyteorder("=") != np.dtype(dtype) or array.ndim != 1:
        raise RunError(
            f"{name} of {where} is {array.dtype}{list(array.shape)}, expected {np.dtype(dtype)} of one dimension"
        )
    check_chunks(array)
    return array


def _attribute(group: zarr.Group, where: str, name: str, default: int | None) -> int:
    value = group.attrs.get(name, default)
    if value is None:
        raise RunError(
            f"{where} has no attribute '{name}': the writer did not finish, or is none of flat-tokens; write it again"
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_ID:
        raise RunError(f"attribute '{name}' of {where} is {value!r}, expected a token id from 0 to {LARGEST_ID}")
    return value


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) if names else "nothing"
