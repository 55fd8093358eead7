"""The flat-tokens format: all sequences of a split one after another, and where each starts, in a zarr group.

    write_split("my.zarr", "train", [np.array([1, 2]), np.array([3, 4, 5])])
    split = open_split("my.zarr", "train")
    split.encoded_tokens[:]     # [3, 4, 7, 8, 10]: 2 * id + 1 where a sequence starts, else 2 * id
    split.seq_starts[:]         # [0, 2, 5]: the last is the number of tokens
    split.max_token_id          # 5

A data set is a zarr group of such groups, `train` and `validation`. Format 2 and format 3 of zarr are read, 3 is written.
"""

import dataclasses
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import zarr
import zarr.errors

from runtime.errors import RunError

LARGEST_ID = 2**31 - 1  # one bit of 32 tells where a sequence starts
CHUNK_TOKENS = 2**18  # 1 MiB of tokens is one file: a quarter of that on disk, decoded in about a millisecond
RESIDENT_BYTES = (
    64 * 2**20
)  # an array no larger is read once and kept: small rows out of many chunks would decode each often
RUN_CHUNKS = 64  # at most so many neighbouring chunks are decoded by one read
ENCODED_PADDING = np.uint32(1)  # id 0 that starts a sequence: what pads is a segment of its own, so no token can see it

# zarr reads a chunk file that is lost as the fill value. These are impossible values, so a lost chunk is found when it is read.
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
    where = absolute_path(path)
    try:
        dataset = zarr.open_group(where, mode="a")
    except (OSError, ValueError, ImportError) as error:
        raise RunError(f"cannot write a data set at {where}: {error}") from error
    if dataset.metadata.zarr_format != 3:
        raise RunError(f"{where} is of zarr format 2, and only format 3 is written: write to a new path")
    if split in dataset and not overwrite:
        raise RunError(
            f"{where} holds the split '{split}' already: write to a new path, or say overwrite=true to replace it"
        )

    group = dataset.create_group(split, overwrite=overwrite)
    tokens = _Appender(group, "encoded_tokens", "uint32", chunk_tokens, _LOST_TOKENS)
    starts = _Appender(group, "seq_starts", "uint64", max(1, chunk_tokens // 8), _LOST_STARTS)
    targets = None if is_target is None else _Appender(group, "is_target", "bool", chunk_tokens, False)
    masks = None if is_target is None else iter(is_target)

    token_count, max_token_id = 0, 0
    for index, sequence in enumerate(sequences):
        ids = np.asarray(sequence)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise RunError(
                f"sequence {index} for {where}/{split} is {ids.dtype}{list(ids.shape)}, expected integers of one dimension"
            )
        if ids.size:
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest > LARGEST_ID:
                wrong = smallest if smallest < 0 else largest
                raise RunError(
                    f"sequence {index} for {where}/{split} holds the token id {wrong}, expected 0 to {LARGEST_ID}"
                )
            max_token_id = max(max_token_id, largest)
        encoded = ids.astype(np.uint32) << np.uint32(1)
        encoded[:1] |= np.uint32(1)
        tokens.append(encoded)
        starts.append(np.array([token_count], np.uint64))
        if masks is not None:
            mask = np.asarray(next(masks, None))
            if mask.dtype != bool or mask.shape != ids.shape:
                raise RunError(
                    f"is_target of sequence {index} for {where}/{split} is {mask.dtype}{list(mask.shape)}, expected bool{list(ids.shape)}"
                )
            targets.append(mask)
        token_count += ids.size
    starts.append(np.array([token_count], np.uint64))
    for appender in (tokens, starts, targets):
        if appender is not None:
            appender.flush()
    # Last, since a split without max_token_id does not open: one that was only half written is never taken for whole.
    group.attrs.update({**(attributes or {}), "bos_id": int(bos_id), "max_token_id": max_token_id})


class _Appender:
    """Gathers pieces of a zarr array and writes whole chunks of it."""

    def __init__(self, group: zarr.Group, name: str, dtype: str, chunk: int, fill_value: int | bool):
        compressor = zarr.codecs.BloscCodec(cname="zstd", clevel=1, shuffle="shuffle")
        self.array = group.create_array(
            name,
            shape=(0,),
            dtype=dtype,
            chunks=(chunk,),
            compressors=compressor,
            fill_value=fill_value,
            config={"write_empty_chunks": True},
        )
        self.chunk, self.pieces, self.count = chunk, [], 0

    def append(self, piece: np.ndarray) -> None:
        self.pieces.append(piece)
        self.count += len(piece)
        if self.count >= self.chunk:
            self._write(self.count - self.count % self.chunk)

    def flush(self) -> None:
        if self.count:
            self._write(self.count)

    def _write(self, count: int) -> None:
        gathered = np.concatenate(self.pieces)
        self.array.append(gathered[:count])
        self.pieces, self.count = [gathered[count:]], len(gathered) - count


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

    def sequence_ranges(self, sequences: np.ndarray, threads: int = 8) -> tuple[np.ndarray, np.ndarray]:
        """Where each of these sequences starts and ends, in tokens.

        Raises:
          RunError: seq_starts cannot be read, decreases, or leaves the tokens.
        """
        first = np.asarray(sequences, np.int64)
        ends = np.zeros((len(first), 2), np.uint64)
        read_ranges(self.seq_starts, first, first + 2, ends, f"seq_starts of {self.where}", threads)
        wrong = (ends[:, 0] > ends[:, 1]) | (ends[:, 1] > self.token_count)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise RunError(
                f"seq_starts of {self.where} says that sequence {first[row]} goes from {ends[row, 0]} to {ends[row, 1]}, "
                f"expected increasing numbers up to {self.token_count}: the data set is damaged, write it again"
            )
        ends = ends.astype(np.int64)
        return ends[:, 0], ends[:, 1]

    def read_rows(
        self, starts: np.ndarray, stops: np.ndarray, length: int, threads: int = 8
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens from starts[i] to stops[i] as row i, as they are stored, and which are targets; padded at the end to `length`.

        What pads is ENCODED_PADDING and no target.

        Raises:
          RunError: the tokens cannot be read, or an id is larger than max_token_id.
        """
        tokens = np.full((len(starts), length), ENCODED_PADDING)
        read_ranges(self.encoded_tokens, starts, stops, tokens, f"encoded_tokens of {self.where}", threads)
        if tokens.size and int(tokens.max()) >> 1 > self.max_token_id:
            raise RunError(
                f"encoded_tokens of {self.where} holds the token id {int(tokens.max()) >> 1}, which is larger than its max_token_id "
                f"{self.max_token_id}: a chunk was lost or damaged, or the writer was wrong; write or copy the data set again"
            )
        if self.is_target is None:
            is_target = np.arange(length) < (stops - starts)[:, None]
        else:
            is_target = np.zeros((len(starts), length), bool)
            read_ranges(self.is_target, starts, stops, is_target, f"is_target of {self.where}", threads)
        return tokens, is_target


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
        "set flat_tokens.filespec to a flat-tokens data set, or write one (python -m tools.write_synthetic_dataset)"
    )
    try:
        dataset = zarr.open_group(where, mode="r")
        present = sorted(dataset.keys())
    except (FileNotFoundError, zarr.errors.GroupNotFoundError) as error:
        if "://" in where or not os.path.exists(where):
            raise RunError(f"the data set {where} does not exist: {advice}") from error
        raise RunError(f"{where} exists but is no zarr group, so it is no data set: {advice}") from error
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
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
    first, last = (int(_read(seq_starts, i, i + 1, f"seq_starts of {where}")[0]) for i in (0, seq_starts.shape[0] - 1))
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
        return _read(array, 0, array.shape[0], f"{name} of {where}") if small else array

    return Split(
        where,
        resident(encoded_tokens, "encoded_tokens"),
        resident(seq_starts, "seq_starts"),
        resident(is_target, "is_target"),
        max_token_id,
        bos_id,
    )


def read_ranges(
    array: zarr.Array | np.ndarray, starts: np.ndarray, stops: np.ndarray, out: np.ndarray, what: str, threads: int
) -> None:
    """Copies array[starts[i]:stops[i]] to the front of out[i], for all i, decoding each chunk once.

    Ranges that lie in the same or in neighbouring chunks are read together; what lies apart is read by several threads.

    Raises:
      RunError: a chunk cannot be read.
    """
    chunk = array.chunks[0] if isinstance(array, zarr.Array) else max(1, array.shape[0])
    order = np.argsort(starts, kind="stable")
    order = order[stops[order] > starts[order]]
    if not len(order):
        return
    first_chunk = starts[order] // chunk
    last_chunk = np.maximum.accumulate((stops[order] - 1) // chunk)
    runs, begin = [], 0
    for i in range(1, len(order) + 1):
        # A new run may only begin in a chunk that the last one did not reach, else that chunk would be decoded twice.
        apart = i == len(order) or first_chunk[i] > last_chunk[i - 1] + 1
        full = not apart and first_chunk[i] > last_chunk[i - 1] and first_chunk[i] - first_chunk[begin] >= RUN_CHUNKS
        if apart or full:
            runs.append(order[begin:i])
            begin = i

    def read(rows: np.ndarray) -> None:
        low, high = int(starts[rows].min()), int(stops[rows].max())
        values = _read(array, low, high, what)
        for row, start, stop in zip(rows.tolist(), (starts[rows] - low).tolist(), (stops[rows] - low).tolist()):
            out[row, : stop - start] = values[start:stop]

    if len(runs) == 1:
        read(runs[0])
        return
    with ThreadPoolExecutor(min(threads, len(runs)), thread_name_prefix="read_ranges") as pool:
        for _ in pool.map(read, runs):  # going through the results raises what a thread raised
            pass


def absolute_path(path: str | os.PathLike) -> str:
    """The path that is opened and that messages name: absolute, `~` expanded; a URL as it is."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _read(array, start: int, stop: int, what: str) -> np.ndarray:
    try:
        return np.asarray(array[start:stop])
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(
            f"cannot read {what} from {start} to {stop} ({error}): the data set is damaged, write or copy it again"
        ) from error


def _member(group: zarr.Group, name: str, where: str) -> zarr.Group | zarr.Array | None:
    try:
        return group[name]
    except KeyError:
        return None
    except (OSError, ValueError, TypeError) as error:
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
