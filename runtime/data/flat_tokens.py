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
from typing import Any, TypeVar

import numpy as np
import zarr
import zarr.errors

from runtime.data.chunks import check_chunks, open_checked, open_group, read, read_errors, read_ranges
from runtime.terminal import RunError

LARGEST_ID = 2**31 - 1  # one bit of 32 tells where a sequence starts
CHUNK_TOKENS = 2**18  # 1 MiB of tokens is one file: a quarter of that on disk, decoded in about a millisecond
CHUNKS_AT_ONCE = 8  # that are written together: 140 M tokens a second of one core, one by one half of that
# An array that is no larger is read once and kept: small rows out of many chunks would decode each often.
RESIDENT_BYTES = 64 * 2**20
# What says how much each token counts in the loss: a split has one of these arrays, or none, if all are targets.
TARGETS = {"is_target": np.bool_, "weight": np.float32}
WEIGHT = "a finite number, 0 or more"
ENCODED_PADDING = np.uint32(1)  # id 0 that starts a sequence: what pads is a segment of its own, so no token can see it

# zarr reads a chunk file that is lost as the fill value. These are impossible values, so a lost chunk is found when it
# is read.
_LOST_TOKENS, _LOST_STARTS = 2**32 - 1, 2**64 - 1

M = TypeVar("M", zarr.Array, zarr.Group)


def is_weight(values: np.ndarray) -> np.ndarray:
    """Which of them may be weights, or are targets or not."""
    return (values >= 0) & (values < np.inf)


# ---------------------------------------------------------------- writing


def write_split(
    path: str | os.PathLike,
    split: str,
    sequences: Iterable[np.ndarray],
    *,
    is_target: Iterable[np.ndarray] | None = None,
    weight: Iterable[np.ndarray] | None = None,
    bos_id: int = 0,
    attributes: dict[str, Any] | None = None,
    overwrite: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> None:
    """Writes one split of a data set, holding no more than some chunks and a sequence in memory.

        write_split("my.zarr", "train", (tokenize(text) for text in texts), attributes={"tokenizer": "gpt2"})

    Args:
      path: the data set; made where there is none. Other splits in it stay.
      sequences: one-dimensional integer arrays of token ids from 0 to 2³¹ - 1; an empty one is a sequence too.
      is_target: a boolean array for each sequence, False where a token is only context; None: every token is a target.
      weight: or a float32 array for each, the weights of its tokens in the loss, 0 where a token is only context.
      attributes: further ones, such as the tokenizer's name.
      overwrite: replaces a split that is there already.
    Raises:
      RunError: the split is there already, the data set is of zarr format 2, or a sequence is not as above.
    """
    where, dataset = f"{absolute_path(path)}/{split}", open_for_writing(path)
    if split in dataset and not overwrite:
        raise RunError(f"{where} is there already: write to a new path, or say overwrite=true to replace it")
    with failing_writes(where):
        given, targets = (is_target, "is_target") if weight is None else (weight, "weight")
        dtype = np.dtype(TARGETS[targets])
        writer = SplitWriter(dataset, split, targets=None if given is None else targets, chunk_tokens=chunk_tokens)
        masks = None if given is None else iter(given)
        for index, sequence in enumerate(sequences):
            ids = np.asarray(sequence)
            whole = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
            if not whole or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= LARGEST_ID):
                held = f" from {ids.min()} to {ids.max()}" if whole else ""
                raise RunError(
                    f"sequence {index} for {where} is {ids.dtype}{list(ids.shape)}{held}, expected whole numbers "
                    f"from 0 to {LARGEST_ID} in one dimension"
                )
            mask = None if masks is None else np.asarray(next(masks, None))
            if mask is not None and (mask.dtype != dtype or mask.shape != ids.shape):
                raise RunError(
                    f"{targets} of sequence {index} for {where} is {mask.dtype}{list(mask.shape)}, expected "
                    f"{dtype}{list(ids.shape)}"
                )
            if mask is not None and not is_weight(mask).all():
                wrong = mask[~is_weight(mask)][0]
                raise RunError(f"weight of sequence {index} for {where} holds {wrong}, expected {WEIGHT}")
            writer.append(ids.astype(np.uint32), np.array([ids.size]), mask)
        writer.finish(bos_id, attributes)


@contextlib.contextmanager
def failing_writes(where: str) -> Iterator[None]:
    """Turns what a full or broken disk raises into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {where}: {error}") from error


def open_for_writing(path: str | os.PathLike) -> zarr.Group:
    """The group of a data set that is there or is made now. Raises RunError if it is of zarr format 2, or cannot be."""
    where = absolute_path(path)
    try:
        dataset = open_group(where, mode="a")
    except (OSError, ValueError, ImportError) as error:
        raise RunError(f"cannot write a data set at {where}: {error}") from error
    if dataset.metadata.zarr_format != 3:
        raise RunError(f"{where} is of zarr format 2, and only format 3 is written: write to a new path")
    return dataset


class SplitWriter:
    """Appends sequences to a split, holding no more than CHUNKS_AT_ONCE chunks; can resume from a recorded state.

        writer = SplitWriter(dataset, "train")
        writer.append(ids, lengths)      # all ids of some sequences one after another, and how many each has
        state = writer.flush()           # all of it is stored now
        writer = SplitWriter(dataset, "train", resume=state)    # after a crash: as if nothing had come after flush()
        writer.finish(bos_id=0)          # the split opens from now on

    What is stored does not depend on how the sequences were grouped, nor on flush() and resume.

    Args:
      dataset: the open group, of zarr format 3, that the split is or shall be in.
      targets: the array, of TARGETS, that every append gives.
      resume: what flush() returned; the split must be there. Without it the split is made, in place of one that is
        there.
    """

    def __init__(
        self,
        dataset: zarr.Group,
        split: str,
        *,
        targets: str | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        resume: dict[str, int] | None = None,
    ):
        state = resume or {"tokens": 0, "sequences": 0, "max_token_id": 0}
        self.token_count, self.sequence_count = state["tokens"], state["sequences"]
        self.max_token_id = state["max_token_id"]
        if resume is None:
            group = dataset.create_group(split, overwrite=True)
            _create_array(group, "encoded_tokens", "uint32", chunk_tokens, _LOST_TOKENS)
            _create_array(group, "seq_starts", "uint64", max(1, chunk_tokens // 8), _LOST_STARTS)
            if targets:
                _create_array(group, targets, TARGETS[targets], chunk_tokens, 0)
        self.group = open_member(dataset, split, zarr.Group)
        self._tokens = _Appender(self.group, "encoded_tokens", self.token_count)
        self._starts = _Appender(self.group, "seq_starts", self.sequence_count)
        self._targets = _Appender(self.group, targets, self.token_count) if targets else None
        self._has_targets = {f"has_{targets}": True} if targets else {}
        self._appenders = [each for each in (self._tokens, self._starts, self._targets) if each is not None]

    def append(self, ids: np.ndarray, lengths: np.ndarray, weight: np.ndarray | None = None) -> None:
        """Appends sequences: uint32 ids up to 2³¹ - 1, how many each sequence has, and their weights (or True for
        targets)."""
        starts = np.cumsum(lengths) - lengths
        encoded = ids << np.uint32(1)
        encoded[starts[lengths > 0]] |= np.uint32(1)
        self._tokens.append(encoded)
        self._starts.append(starts.astype(np.uint64) + np.uint64(self.token_count))
        if self._targets is not None and weight is not None:
            self._targets.append(weight)
        self.token_count += len(ids)
        self.sequence_count += len(lengths)
        self.max_token_id = max(self.max_token_id, int(ids.max(initial=0)))

    def flush(self) -> dict[str, int]:
        """Stores all that was appended, in a local folder also through the system's caches; returns what `resume`
        takes."""
        for appender in self._appenders:
            appender.flush()
        return {"tokens": self.token_count, "sequences": self.sequence_count, "max_token_id": self.max_token_id}

    def finish(self, bos_id: int, attributes: dict[str, Any] | None = None) -> None:
        """Completes the split. Nothing can be appended any more."""
        self._starts.append(np.array([self.token_count], np.uint64))
        self.flush()
        # Last, since a split without max_token_id does not open: one that was only half written is never taken for
        # whole.
        about = {"bos_id": int(bos_id), "max_token_id": self.max_token_id}
        self.group.attrs.update({**self._has_targets, **(attributes or {}), **about})


def _create_array(group: zarr.Group, name: str, dtype: Any, chunk: int, fill_value: int) -> None:
    group.create_array(
        name,
        shape=(0,),
        dtype=dtype,
        chunks=(chunk,),
        # At level 9, the slowest of lz4, still twice as fast to write and five times as fast to read as zstd at
        # level 1, for a seventh to a third more space.
        compressors=[zarr.codecs.BloscCodec(cname="lz4", clevel=9, shuffle="shuffle"), zarr.codecs.Crc32cCodec()],
        fill_value=fill_value,
        config={"write_empty_chunks": True},
    )


class _Appender:
    """Gathers values of a zarr array, of which it keeps the first `length`, and writes some whole chunks at a time."""

    def __init__(self, group: zarr.Group, name: str, length: int):
        self.array = open_member(group, name, zarr.Array)
        self.array.resize((length,))  # and removes the chunks of what was written after
        chunk = self.array.chunks[0]
        self.first = length - length % chunk  # place of `values` in the array: where a chunk begins
        self.values, self.count = np.empty(CHUNKS_AT_ONCE * chunk, self.array.dtype), length - self.first
        self.values[: self.count] = self.array[self.first :]
        self.on_disk = self.first  # up to there all is known to be on the disk

    def append(self, values: np.ndarray) -> None:
        while len(values):
            room = self.values[self.count : self.count + len(values)]
            room[:] = values[: len(room)]
            self.count, values = self.count + len(room), values[len(room) :]
            if self.count == len(self.values):
                self._write()
                self.first, self.count = self.first + self.count, 0

    def flush(self) -> None:
        """Writes what is left too, which stays in memory, since its chunks are written again when they are full."""
        self._write()
        if isinstance(self.array.store, zarr.storage.LocalStore):
            chunk = self.array.chunks[0]
            for number in range(self.on_disk // chunk, -(-self.array.shape[0] // chunk)):
                key = self.array.metadata.encode_chunk_key((number,))
                descriptor = os.open(self.array.store.root / self.array.path / key, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        self.on_disk = self.first

    def _write(self) -> None:
        end = self.first + self.count
        if end > self.array.shape[0]:
            self.array.resize((end,))
        if self.count:
            self.array[self.first : end] = self.values[: self.count]


# ---------------------------------------------------------------- reading


@dataclasses.dataclass
class Split:
    """An open split. The arrays are zarr's, or numpy's where they are small enough to be kept."""

    where: str  # for messages
    encoded_tokens: zarr.Array | np.ndarray  # uint32[token_count]
    seq_starts: zarr.Array | np.ndarray  # uint64[sequence_count + 1]
    targets: str | None  # the name of `weight`, of TARGETS
    weight: zarr.Array | np.ndarray | None  # bool or float32[token_count]; None: all are targets
    max_token_id: int
    bos_id: int
    row_length: int = 0  # 0, or it was written in rows that hold sequences whole: of so many tokens,
    read_length: int = 0  # after so many that an encoder reads

    @property
    def token_count(self) -> int:
        return self.encoded_tokens.shape[0]

    @property
    def text(self) -> str:
        """What it holds, for messages."""
        return f"{self.token_count:,} tokens of {self.where}"

    def reach(self, tokens: int) -> bool:
        """Whether so many tokens are there. A split that grows waits for them (runtime/data/growing.py)."""
        return tokens <= self.token_count

    @property
    def sequence_count(self) -> int:
        return self.seq_starts.shape[0] - 1

    @property
    def weight_type(self) -> np.dtype:
        """float32 where tokens have weights, else bool."""
        return np.dtype(TARGETS[self.targets or "is_target"])

    def read_rows(
        self, starts: np.ndarray, stops: np.ndarray, tokens: np.ndarray, weight: np.ndarray, pool: Executor
    ) -> None:
        """Fills row i with the tokens from starts[i] to stops[i], as they are stored, and with their weights.

        What pads a row at its end is ENCODED_PADDING and no target.

        Args:
          tokens, weight: to be filled: uint32 and `weight_type`, [rows, length].
        Raises:
          RunError: the tokens cannot be read, an id is larger than max_token_id, or a weight is none.
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
        if self.weight is None:
            np.less(np.arange(tokens.shape[1]), (stops - starts)[:, None], out=weight)
            return
        weight.fill(0)
        read_ranges(self.weight, starts, stops, weight, f"{self.targets} of {self.where}", pool)
        if self.targets == "weight" and not is_weight(weight).all():
            row, place = np.argwhere(~is_weight(weight))[0]
            raise RunError(
                f"weight of {self.where} holds {weight[row, place]} at {starts[row] + place}, expected {WEIGHT}: write "
                "the data set again"
            )


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
        return _split_of(open_checked(where), where, split, resident_bytes)
    except (FileNotFoundError, zarr.errors.GroupNotFoundError) as error:
        if "://" in where or not os.path.exists(where):
            raise RunError(f"the data set {where} does not exist: {advice}") from error
        raise RunError(f"{where} exists but is no zarr group, so it is no data set: {advice}") from error
    except ImportError as error:  # fsspec's text names the package last: "Install s3fs to access S3"
        package = re.search(r"nstall (\w+)", str(error))
        fix = f"pip install {package[1]}" if package else "install what it needs"
        raise RunError(f"the data set {where} cannot be opened ({error}): {fix}") from error
    except read_errors(KeyError, TypeError, AttributeError) as error:
        raise RunError(f"the data set {where} cannot be opened ({type(error).__name__}: {error}): {advice}") from error


def _split_of(dataset: zarr.Group, where: str, split: str, resident_bytes: int) -> Split:
    if split not in dataset:
        above = "; it is a split itself: give the folder above" if "encoded_tokens" in dataset else ""
        raise RunError(f"the data set {where} has no split '{split}'; it holds {_listed(dataset)}{above}")
    where, group = f"{where}/{split}", open_member(dataset, split, zarr.Group)
    encoded_tokens = _checked_array(group, where, "encoded_tokens", np.uint32)
    seq_starts = _checked_array(group, where, "seq_starts", np.uint64)
    # The attribute says so where the array's own file is lost.
    has = [name for name in TARGETS if name in group or group.attrs.get(f"has_{name}")]
    if len(has) > 1:
        raise RunError(f"{where} has both is_target and weight, expected one of them: weights say what is a target")
    targets = has[0] if has else None
    stored = _checked_array(group, where, targets, TARGETS[targets]) if targets else None
    token_count = encoded_tokens.shape[0]
    if stored is not None and stored.shape != encoded_tokens.shape:
        raise RunError(f"{targets} of {where} has {stored.shape[0]} entries, expected one a token, {token_count}")
    row_length, read_length = (_attribute(group, where, name, 0) for name in ("row_length", "read_length"))
    if row_length and token_count % (row_length + read_length):
        raise RunError(
            f"{where} has {token_count} tokens, expected whole rows of {row_length + read_length} as its row_length "
            "says: the data set is damaged, write or copy it again"
        )
    max_token_id, bos_id = _attribute(group, where, "max_token_id", None), _attribute(group, where, "bos_id", 0)
    what, count = f"seq_starts of {where}", seq_starts.shape[0]
    ends = [int(read(seq_starts, at, at + 1, what)[0]) for at in ((0, count - 1) if count else ())]
    if ends != [0, token_count]:
        held = f"goes from {ends[0]} to {ends[1]}" if ends else "is empty"
        raise RunError(
            f"{what} {held}, expected from 0 to {token_count}, the length of encoded_tokens: the data set is damaged "
            "or only partly written, write or copy it again"
        )

    def resident(array: zarr.Array, name: str) -> zarr.Array | np.ndarray:
        small = array.shape[0] * array.dtype.itemsize <= resident_bytes
        return read(array, 0, array.shape[0], f"{name} of {where}") if small else array

    weight = None if stored is None else resident(stored, str(targets))
    tokens, starts = resident(encoded_tokens, "encoded_tokens"), resident(seq_starts, "seq_starts")
    return Split(where, tokens, starts, targets, weight, max_token_id, bos_id, row_length, read_length)


def absolute_path(path: str | os.PathLike) -> str:
    """The path that is opened and that messages name: absolute, `~` expanded; a URL as it is."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def open_member(group: zarr.Group, name: str, kind: type[M]) -> M:
    """A member of a group. Raises KeyError where it has none of that name and kind, and what zarr does."""
    member = group[name]
    if not isinstance(member, kind):
        raise KeyError(name)
    return member


def _checked_array(group: zarr.Group, where: str, name: str, dtype: type) -> zarr.Array:
    try:
        array = open_member(group, name, zarr.Array)
    except KeyError:
        raise RunError(
            f"{where} has no array '{name}', so it is no flat-tokens split; it holds {_listed(group)}"
        ) from None
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
        raise RunError(f"attribute '{name}' of {where} is {value!r}, expected a number from 0 to {LARGEST_ID}")
    return value


def _listed(group: zarr.Group) -> str:
    return ", ".join(f"'{name}'" for name in sorted(group.keys())) or "nothing"
