"""Writes flat tokens (runtime/data/flat_tokens.py): a whole split, or piece by piece, to go on after a crash.

write_split("my.zarr", "train", [np.array([1, 2]), np.array([3, 4, 5])])
"""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import zarr
from jaxtyping import Bool, Float32, Int64, Integer, Shaped, UInt32

from runtime.data.chunks import open_group
from runtime.data.flat_tokens import CHUNK_TOKENS, LARGEST_ID, TARGETS, WEIGHT, absolute_path, is_weight, open_member
from runtime.files import sync
from runtime.terminal import RunError, run_errors

CHUNKS_AT_ONCE = 8  # are written together: 140 M tokens a second on one core, one by one half of that

# zarr reads a lost chunk as the fill value. These values are impossible, so a lost chunk is found when it is read.
_LOST_TOKENS, _LOST_STARTS = 2**32 - 1, 2**64 - 1


def write_split(
    path: str | os.PathLike,
    split: str,
    sequences: Iterable[Integer[np.ndarray, "tokens"]],
    *,
    is_target: Iterable[Bool[np.ndarray, "tokens"]] | None = None,
    weight: Iterable[Float32[np.ndarray, "tokens"]] | None = None,
    bos_id: int = 0,
    attributes: dict[str, Any] | None = None,
    overwrite: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> None:
    """Writes one split of a data set, which is made if it is not there, with a few chunks in memory.

    Args:
      sequences: one-dimensional integer arrays of token ids from 0 to 2³¹ - 1; an empty one is a sequence too.
      is_target: a boolean array for each sequence, False where a token is only context; None: every token is a target.
      weight: or a float32 array for each sequence, its tokens' weights in the loss, 0 where a token is only context.
      overwrite: replaces a split that is there already.
    Raises:
      RunError: the split is there already, the data set is of zarr format 2, or a sequence is not as above.
    """
    where, dataset = f"{absolute_path(path)}/{split}", open_for_writing(path)
    if split in dataset and not overwrite:
        raise RunError(f"{where} is there already: write to a new path, or say overwrite=true to replace it")
    with run_errors(f"cannot write {where}"):
        values, targets = (is_target, "is_target") if weight is None else (weight, "weight")
        dtype = np.dtype(TARGETS[targets])
        writer = SplitWriter(dataset, split, targets=None if values is None else targets, chunk_tokens=chunk_tokens)
        masks = None if values is None else iter(values)
        for index, sequence in enumerate(sequences):
            ids, what = np.asarray(sequence), f"sequence {index} for {where}"
            whole = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
            if not whole or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= LARGEST_ID):
                held = f"{ids.dtype}{list(ids.shape)}" + (f" from {ids.min()} to {ids.max()}" if whole else "")
                expected = f"expected whole numbers from 0 to {LARGEST_ID} in one dimension"
                raise RunError(f"{what} is {held}, {expected}")
            mask = None if masks is None else np.asarray(next(masks, None))
            if mask is not None and (mask.dtype != dtype or mask.shape != ids.shape):
                held, expected = f"{mask.dtype}{list(mask.shape)}", f"{dtype}{list(ids.shape)}"
                raise RunError(f"{targets} of {what} is {held}, expected {expected}")
            if mask is not None and not is_weight(mask).all():
                raise RunError(f"weight of {what} holds {mask[~is_weight(mask)][0]}, expected {WEIGHT}")
            writer.append(ids.astype(np.uint32), np.array([ids.size]), mask)
        writer.finish(bos_id, attributes)


def open_for_writing(path: str | os.PathLike) -> zarr.Group:
    """The group of a data set, made if it is not there. Raises RunError: it is of zarr format 2, or cannot be made, or
    the folder holds something else, among which a data set's files would be written, and old ones removed."""
    where = absolute_path(path)
    with run_errors(f"cannot write a data set at {where}", ValueError, ImportError):
        names = set(os.listdir(where)) if os.path.isdir(where) else set()
        # A process that was killed may have left the first file half-written.
        others = {name for name in names if not name.endswith(".partial")}
        if others and not names & {"zarr.json", ".zgroup"}:
            raise RunError(f"{where} holds {min(others)}, which is no data set: write to a new folder")
        dataset = open_group(where, mode="a")
    if dataset.metadata.zarr_format != 3:
        raise RunError(f"{where} is of zarr format 2, and only format 3 is written: write to a new path")
    return dataset


class SplitWriter:
    """Appends sequences to a split, with CHUNKS_AT_ONCE chunks in memory; can resume from a recorded state.

        writer = SplitWriter(dataset, "train")
        writer.append(ids, lengths)      # all ids of some sequences one after another, and how many each has
        state = writer.flush()           # all of it is stored now
        writer = SplitWriter(dataset, "train", resume=state)    # after a crash: as if nothing had come after flush()
        writer.finish(bos_id=0)          # the split opens from now on

    The bytes do not depend on how sequences were grouped, nor on flush() and resume.

    Args:
      targets: the array, of TARGETS, that every append gives.
      resume: what flush() returned for this split; without it the split is made anew.
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
        self._appenders = [appender for appender in (self._tokens, self._starts, self._targets) if appender is not None]

    def append(
        self,
        ids: UInt32[np.ndarray, "tokens"],
        lengths: Int64[np.ndarray, "sequences"],
        weight: Bool[np.ndarray, "tokens"] | Float32[np.ndarray, "tokens"] | None = None,
    ) -> None:
        """Appends sequences: ids up to 2³¹ - 1, how many each sequence has, and their weights (or True for targets)."""
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
        """Stores all that was appended, on a local disk past the system's caches; returns what `resume` takes."""
        for appender in self._appenders:
            appender.flush()
        return {"tokens": self.token_count, "sequences": self.sequence_count, "max_token_id": self.max_token_id}

    def finish(self, bos_id: int, attributes: dict[str, Any] | None = None) -> None:
        """Completes the split. Nothing can be appended any more."""
        self._starts.append(np.array([self.token_count], np.uint64))
        self.flush()
        # Last, since a split without max_token_id does not open: a half-written one is never taken for whole.
        about = {"bos_id": int(bos_id), "max_token_id": self.max_token_id}
        self.group.attrs.update({**self._has_targets, **(attributes or {}), **about})


def _create_array(group: zarr.Group, name: str, dtype: Any, chunk: int, fill_value: int) -> None:
    group.create_array(
        name,
        shape=(0,),
        dtype=dtype,
        chunks=(chunk,),
        # lz4 at level 9 writes twice and reads five times as fast as zstd at level 1, and takes 1/7 to 1/3 more space.
        compressors=[zarr.codecs.BloscCodec(cname="lz4", clevel=9, shuffle="shuffle"), zarr.codecs.Crc32cCodec()],
        fill_value=fill_value,
        config={"write_empty_chunks": True},
    )


class _Appender:
    """Keeps the first `length` values of a zarr array, gathers more, and writes some whole chunks at a time."""

    def __init__(self, group: zarr.Group, name: str, length: int):
        # How an array writes is not stored with it; a chunk of the fill value needs a file too.
        self.array = open_member(group, name, zarr.Array).with_config({"write_empty_chunks": True})
        self.array.resize((length,))  # and removes the chunks of what was written after
        chunk = self.array.chunks[0]
        self.first = length - length % chunk  # place of `values` in the array: where a chunk begins
        self.values, self.count = np.empty(CHUNKS_AT_ONCE * chunk, self.array.dtype), length - self.first
        self.values[: self.count] = self.array[self.first :]
        self.on_disk = self.first  # up to there all is known to be on the disk

    def append(self, values: Shaped[np.ndarray, "values"]) -> None:
        while len(values):
            room = self.values[self.count : self.count + len(values)]
            room[:] = values[: len(room)]
            self.count, values = self.count + len(room), values[len(room) :]
            if self.count == len(self.values):
                self._write()
                self.first, self.count = self.first + self.count, 0

    def flush(self) -> None:
        """Writes the rest too. It stays in memory, since its chunks are written again when they are full."""
        self._write()
        if isinstance(self.array.store, zarr.storage.LocalStore):
            chunk = self.array.chunks[0]
            for number in range(self.on_disk // chunk, -(-self.array.shape[0] // chunk)):
                key = self.array.metadata.encode_chunk_key((number,))
                sync(self.array.store.root / self.array.path / key)
        self.on_disk = self.first

    def _write(self) -> None:
        end = self.first + self.count
        if end > self.array.shape[0]:
            self.array.resize((end,))
        if self.count:
            self.array[self.first : end] = self.values[: self.count]
