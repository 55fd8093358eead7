"""The flat-tokens format: all sequences of a split one after another, and where each starts, in a zarr group.

    write_split("my.zarr", "train", [np.array([1, 2]), np.array([3, 4, 5])])    # runtime/data/split_writer.py
    split = open_split("my.zarr", "train")
    split.encoded_tokens[:]     # [3, 4, 7, 8, 10]: 2 * id + 1 where a sequence starts, else 2 * id
    split.seq_starts[:]         # [0, 2, 5]: the last is the number of tokens
    split.max_token_id          # 5

A data set is a zarr group of such groups, `train` and `validation`. zarr's formats 2 and 3 are read, 3 is written.
"""

import dataclasses
import os
import re
import threading
import zlib
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np
import zarr
import zarr.errors
from jaxtyping import Bool, Float32, Int64, Shaped, UInt32, UInt64

from runtime.data.chunks import NEVER, check_chunks, open_checked, read, read_errors, read_ranges
from runtime.terminal import RunError

LARGEST_ID = 2**31 - 1  # one bit of 32 tells where a sequence starts
SYNTHETIC = "synthetic_dataset.zarr"  # in the repository, and the one that configs name
CHUNK_TOKENS = 2**18  # 1 MiB of tokens is one file: a quarter of that on disk, decoded in about a millisecond
# An array up to this size is read once and kept: small rows from many chunks would decode each chunk often.
RESIDENT_BYTES = 64 * 2**20
END_TOKENS = 2**10  # at each end of a split, which tell it from another
# How much each token counts in the loss: a split has one of these arrays, or none, if all are targets.
TARGETS = {"is_target": np.bool_, "weight": np.float32}
WEIGHT = "a finite number, 0 or more"
ENCODED_PADDING = np.uint32(1)  # id 0, starting a sequence: padding is its own segment, so no token sees it

AGAIN = "the data set is damaged or only partly written, write or copy it again"

M = TypeVar("M", zarr.Array, zarr.Group)


def is_weight(values: Shaped[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    """For each value whether it is a valid weight, finite and at least 0; booleans are."""
    return (values >= 0) & (values < np.inf)


@dataclasses.dataclass
class Split:
    """An open split. Its arrays are zarr's, or numpy's if they are small enough to be kept in memory."""

    where: str  # for messages
    encoded_tokens: zarr.Array | UInt32[np.ndarray, "tokens"]
    seq_starts: zarr.Array | UInt64[np.ndarray, "starts"]  # sequence_count + 1 of them
    targets: str | None  # the name of `weight`, of TARGETS
    weight: zarr.Array | Bool[np.ndarray, "tokens"] | Float32[np.ndarray, "tokens"] | None  # None: all are targets
    max_token_id: int
    bos_id: int
    row_length: int = 0  # 0, or it was written in rows that hold sequences whole: of so many tokens,
    read_length: int = 0  # after so many that an encoder reads

    @property
    def token_count(self) -> int:
        return self.encoded_tokens.shape[0]

    @property
    def text(self) -> str:
        return f"{self.token_count:,} tokens of {self.where}"

    def reach(self, tokens: int) -> bool:
        """Whether so many tokens are there. A split that grows waits for them (runtime/data/growing.py)."""
        return tokens <= self.token_count

    @property
    def ends(self) -> int:
        """A checksum of its first and last tokens: another order of the same texts has other ones."""
        count, what = self.token_count, f"encoded_tokens of {self.where}"
        first, last = (read(self.encoded_tokens, at, at + END_TOKENS, what) for at in (0, max(0, count - END_TOKENS)))
        return zlib.crc32(np.concatenate([first, last]).astype("<u4").tobytes())

    @property
    def sequence_count(self) -> int:
        return self.seq_starts.shape[0] - 1

    @property
    def weight_type(self) -> np.dtype:
        """float32 where tokens have weights, else bool."""
        return np.dtype(TARGETS[self.targets or "is_target"])

    def read_rows(
        self,
        starts: Int64[np.ndarray, "rows"],
        stops: Int64[np.ndarray, "rows"],
        tokens: UInt32[np.ndarray, "rows length"],
        weight: Bool[np.ndarray, "rows length"] | Float32[np.ndarray, "rows length"],
        pool: Executor,
    ) -> None:
        """Fills row i of tokens and weight with what is stored from starts[i] to stops[i], and pads it at its end.
        Raises RunError: it cannot be read, an id is larger than max_token_id, or a weight is none."""
        tokens.fill(ENCODED_PADDING)
        read_ranges(self.encoded_tokens, starts, stops, tokens, f"encoded_tokens of {self.where}", pool)
        if tokens.size and int(tokens.max()) >> 1 > self.max_token_id:
            row, place = np.argwhere(tokens >> np.uint32(1) > self.max_token_id)[0]
            what = f"the token id {tokens[row, place] >> 1} at {starts[row] + place}"
            raise RunError(f"encoded_tokens of {self.where} has {what}, over max_token_id {self.max_token_id}: {AGAIN}")
        if self.weight is None:
            np.less(np.arange(tokens.shape[1]), (stops - starts)[:, None], out=weight)
            return
        weight.fill(0)
        read_ranges(self.weight, starts, stops, weight, f"{self.targets} of {self.where}", pool)
        if self.targets == "weight" and not is_weight(weight).all():
            row, place = np.argwhere(~is_weight(weight))[0]
            what = f"{weight[row, place]} at {starts[row] + place}"
            raise RunError(f"weight of {self.where} holds {what}, expected {WEIGHT}: write the data set again")


def open_split(
    path: str | os.PathLike,
    split: str,
    *,
    resident_bytes: int = RESIDENT_BYTES,
    closing: threading.Event = NEVER,
) -> Split:
    """Opens one split of a data set, a folder or a URL, and checks all but the tokens. An array of at most
    resident_bytes is read at once and kept in memory. closing: see CheckedStore. Raises RunError: the data set, the
    split, an array or an attribute is missing, or is not as the format says."""
    where = absolute_path(path)
    advice = "set flat_tokens.filespec to a flat-tokens data set, or write one by tools.tokenize_text (docs/data.md)"
    try:
        return _split_of(open_checked(where, closing), where, split, resident_bytes)
    except (FileNotFoundError, zarr.errors.GroupNotFoundError) as error:
        if "://" in where or not os.path.exists(where):
            if os.path.basename(where) == SYNTHETIC:
                advice = "it comes with the repository; elsewhere `clearshard make_dataset` writes it"
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
    if row_length and token_count % (row := row_length + read_length):
        raise RunError(f"{where} has {token_count} tokens, expected rows of row_length = {row}: {AGAIN}")
    max_token_id, bos_id = _attribute(group, where, "max_token_id", None), _attribute(group, where, "bos_id", 0)
    what, count = f"seq_starts of {where}", seq_starts.shape[0]
    ends = [int(read(seq_starts, at, at + 1, what)[0]) for at in ((0, count - 1) if count else ())]
    if ends != [0, token_count]:
        held = f"goes from {ends[0]} to {ends[1]}" if ends else "is empty"
        raise RunError(f"{what} {held}, expected from 0 to {token_count}, the length of encoded_tokens: {AGAIN}")

    def resident(array: zarr.Array, name: str) -> zarr.Array | np.ndarray:
        small = array.shape[0] * array.dtype.itemsize <= resident_bytes
        return read(array, 0, array.shape[0], f"{name} of {where}") if small else array

    weight = None if stored is None else resident(stored, str(targets))
    tokens, starts = resident(encoded_tokens, "encoded_tokens"), resident(seq_starts, "seq_starts")
    return Split(where, tokens, starts, targets, weight, max_token_id, bos_id, row_length, read_length)


def absolute_path(path: str | os.PathLike) -> str:
    """An absolute path with `~` expanded; a URL as it is."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def open_member(group: zarr.Group, name: str, kind: type[M]) -> M:
    """A member of a group. Raises KeyError if there is none of that name and kind, and what zarr raises."""
    member = group[name]
    if not isinstance(member, kind):
        raise KeyError(name)
    return member


def _checked_array(group: zarr.Group, where: str, name: str, dtype: type) -> zarr.Array:
    try:
        array = open_member(group, name, zarr.Array)
    except KeyError:
        held = f"it holds {_listed(group)}"
        raise RunError(f"{where} has no array '{name}', so it is no flat-tokens split; {held}") from None
    if np.dtype(array.dtype).newbyteorder("=") != np.dtype(dtype) or array.ndim != 1:
        held = f"{array.dtype}{list(array.shape)}"
        raise RunError(f"{name} of {where} is {held}, expected {np.dtype(dtype)} of one dimension")
    check_chunks(array)
    return array


def _attribute(group: zarr.Group, where: str, name: str, default: int | None) -> int:
    value = group.attrs.get(name, default)
    if value is None:
        raise RunError(f"{where} has no attribute '{name}': its writer did not finish; write it again")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_ID:
        raise RunError(f"attribute '{name}' of {where} is {value!r}, expected a number from 0 to {LARGEST_ID}")
    return value


def _listed(group: zarr.Group) -> str:
    return ", ".join(f"'{name}'" for name in sorted(group.keys())) or "nothing"
