"""One checkpoint: a pytree of JAX arrays as a zarr group that any zarr reader opens, restored onto any mesh.

    saved = open_checkpoint(store, "0000000020", pool)
    state = restore(saved, shapes, pool)                      # jax.ShapeDtypeStructs with shardings
    w_q = read_leaf(saved, "weights/transformer/w_q", pool)   # numpy
    chunks, faults = verify(saved, pool)
    halved = {name: array.changed(lambda w, bounds: w / 2) for name, array in saved.arrays.items()}
    state = restore(replace(saved, arrays=halved), shapes, pool)

The format is docs/formats.md's "PyTree-zarr". A chunk is one file: its values and their crc32c, which its array's
attributes hold too. Zarr parses the metadata and decodes the chunks in memory; the store reads and writes all bytes.
The root's `zarr.json` is written last and removed first. A directory without it, or without its attribute
`write_completed: true`, is not a checkpoint.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Any

import google_crc32c
import jax
import numpy as np
import zarr
import zarr.buffer.cpu

from runtime.checkpoints.store import LocalStore, RemoteStore, open_store
from runtime.files import NotPlain
from runtime.terminal import RunError, print_note, run_errors
from runtime.unpacking import require_readable, require_size

# Attributes of the root.
COMPLETED = "write_completed"
CHECKSUMS = "metadata_crc32c"  # each metadata file's checksum, by path; under "" that of all attributes but these two
STEP = "step"  # the number of updates, as in the checkpoint's name
CHUNKS = "chunk_crc32c"  # attribute of an array: its chunks' checksums by file name
OTHER_CHECKSUM = "does not have the checksum that it was written with"
UNBOUND = "does not say which chunk belongs where, as an earlier program's: chunks that changed places are not noticed"
METADATA_FILES = ("zarr.json", ".zgroup", ".zarray", ".zattrs")
MOST_CHUNK_BYTES = 2**32  # in other programs' checkpoints; ours have chunks of 32 MiB
# Something else lies where a file was, so the checkpoint is passed over. An error of the disk is no reason for that.
NO_FILE = (FileNotFoundError, NotADirectoryError, NotPlain)
# Decoders raise these at bytes that they cannot read.
UNREADABLE = (
    ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RuntimeError, OSError, EOFError, zlib.error,
)  # fmt: skip

FIND_TIMEOUT_S = 60.0  # for an answer of an object store

Store = LocalStore | RemoteStore
Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dim


class Incomplete(RunError):
    """The checkpoint was not written to its end, or is being deleted."""


class Damaged(RunError):
    """The checkpoint was complete, and is no longer what was written. `what` says where."""

    def __init__(self, path: str, what: str):
        super().__init__(f"checkpoint {path} is damaged: {what}")
        self.what = what


@dataclasses.dataclass(frozen=True)
class Grid:
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]  # a chunk's shape

    def within(self, bounds: Bounds) -> Iterator[tuple[tuple[int, ...], Bounds]]:
        """The numbers and the bounds of each chunk with a part within bounds."""
        numbers = [range(start // size, -(-stop // size)) for (start, stop), size in zip(bounds, self.chunk)]
        for number in itertools.product(*numbers):
            edges = zip(number, self.chunk, self.shape)
            yield number, tuple((n * size, min((n + 1) * size, end)) for n, size, end in edges)

    def all(self) -> Iterator[tuple[tuple[int, ...], Bounds]]:
        return self.within(tuple((0, size) for size in self.shape))

    @property
    def file_bytes(self) -> int:
        """The size of a chunk that we write: values and crc32c."""
        return math.prod(self.chunk) * self.dtype.itemsize + 4


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LazyArray(Grid):
    """An array whose chunks are read when they are asked for."""

    read: Callable[[Bounds], np.ndarray]  # the values of a chunk, as far as it lies in the array

    def changed(self, change: Callable[[np.ndarray, Bounds], np.ndarray], dtype: Any = None) -> "LazyArray":
        """The array with `change(values, bounds)` for each chunk's values, in this type; None: the array's type."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)

        def read(bounds: Bounds) -> np.ndarray:
            return change(self.read(bounds), bounds).astype(dtype, copy=False)

        return dataclasses.replace(self, dtype=dtype, read=read)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose metadata have been read; or arrays from elsewhere that are read as one."""

    path: str
    attributes: dict[str, Any]  # without the format's own
    arrays: dict[str, LazyArray]
    is_bound: bool = True  # whether it says which chunk belongs where; those of earlier and other programs do not


@dataclasses.dataclass(frozen=True)
class _Files:
    """The chunks of a checkpoint in zarr format 2 or 3."""

    store: Store
    name: str
    memory: dict[str, Any]  # the store of the zarr arrays: contents by path
    is_bound: bool

    def array(self, leaf: str, array: zarr.Array) -> LazyArray:
        chunk = array.shards or array.chunks  # a file is a shard where there are any
        return LazyArray(array.shape, array.dtype, chunk, functools.partial(self.read, leaf, array, chunk))

    def read(self, leaf: str, array: zarr.Array, chunk: tuple[int, ...], bounds: Bounds) -> np.ndarray:
        """The values of a chunk. Raises Damaged, naming the file."""
        key = array.metadata.encode_chunk_key(tuple(start // size for (start, _), size in zip(bounds, chunk)))
        file, path = f"{leaf}/{key}", self.store.path(self.name)
        try:
            # A codec may need more bytes for values that it cannot compress.
            content = self.store.read(f"{self.name}/{file}", 2 * math.prod(chunk) * array.dtype.itemsize + 2**16)
        except NO_FILE as error:  # zarr would return zeros
            raise Damaged(path, _lost(file, error)) from None
        checksums: Any = array.attrs.get(CHUNKS)
        written = checksums.get(key) if self.is_bound and isinstance(checksums, dict) else None
        if written is not None and google_crc32c.value(content[:-4]) != written:
            raise Damaged(path, f"{file} {OTHER_CHECKSUM}")
        self.memory[file] = zarr.buffer.cpu.Buffer.from_bytes(content)
        try:
            if array.metadata.zarr_format == 2 and array.compressors:
                require_size(array.compressors[0], content, math.prod(chunk) * array.dtype.itemsize)
            return np.asarray(array[tuple(slice(*part) for part in bounds)])
        except UNREADABLE as error:
            raise Damaged(path, f"{file} cannot be decoded ({type(error).__name__}: {error})") from error
        finally:
            del self.memory[file]


def read_attributes(store: Store, name: str) -> dict[str, Any]:
    """The attributes of a complete checkpoint, from one file. Raises Incomplete or Damaged."""
    return _without_ours(_read_root(store, name))


def open_checkpoint(store: Store, name: str, pool: Executor) -> Checkpoint:
    """Reads the metadata. Raises as read_attributes."""
    path, root = store.path(name), _read_root(store, name)
    checksums, there = root.get(CHECKSUMS, {}), store.files(name)

    def read(file: str) -> bytes:
        try:
            return store.read(f"{name}/{file}")
        except NO_FILE as error:
            raise Damaged(path, _lost(file, error)) from None

    reads = {file: pool.submit(read, file) for file in there if file.rpartition("/")[2] in METADATA_FILES}
    finish({read: store.path(f"{name}/{file}") for file, read in reads.items()}, "read")
    contents = {file: read.result() for file, read in reads.items()}
    for file in filter(None, checksums):
        if google_crc32c.value(contents.get(file, b"")) != checksums[file]:
            raise Damaged(path, f"{file} {OTHER_CHECKSUM if file in contents else 'is missing'}")
    memory: dict[str, Any] = {file: zarr.buffer.cpu.Buffer.from_bytes(content) for file, content in contents.items()}
    try:
        leaves = [file.rpartition("/")[0] for file, content in contents.items() if _is_of_array(file, content)]
        # One by one: of several that zarr opens at once, all errors but the first are printed with a traceback.
        stored = zarr.storage.MemoryStore(memory)
        arrays = {leaf: zarr.open_array(stored, path=leaf, mode="r") for leaf in sorted(filter(None, leaves))}
        for opened in arrays.values():
            require_readable(opened)
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno:  # not from memory: this process may not open more files
            raise RunError(f"checkpoint {path} cannot be opened: {type(error).__name__}: {error}") from error
        raise Damaged(path, f"its metadata cannot be read ({error})") from error
    files = _Files(store, name, memory, is_bound=bool(checksums) and STEP in root)
    lazy = {leaf: files.array(leaf, array) for leaf, array in arrays.items()}
    for leaf, array in lazy.items():  # before a loop goes over the chunks, or memory for one is allocated
        count = math.prod(-(-size // part) for size, part in zip(array.shape, array.chunk))
        if count > len(there) or array.file_bytes > MOST_CHUNK_BYTES:
            raise Damaged(path, f"{leaf} would have {count:,} chunks of {array.file_bytes:,} bytes")
    return Checkpoint(path, _without_ours(root), lazy, files.is_bound)


def _is_of_array(file: str, content: bytes) -> bool:
    name = file.rpartition("/")[2]
    return name == ".zarray" or (name == "zarr.json" and json.loads(content)["node_type"] == "array")


def find(path: str) -> list[tuple[Store, str]]:
    """Store and name of a checkpoint at a path, or of all in a folder, oldest first. Raises RunError: there is none."""
    path = path.rstrip("/")
    store = open_store(path, FIND_TIMEOUT_S)
    with run_errors(f"{path} cannot be read"):
        there = store.names()
    if "checkpoints" in there:
        return find(f"{path}/checkpoints")
    if names := sorted(name for name in there if re.fullmatch(r"\d{10}", name)):
        return [(store, name) for name in names]
    parent, _, name = path.rpartition("/")
    if there and (re.fullmatch(r"\d{10}", name) or {"zarr.json", ".zattrs"} & set(there)):
        return [(open_store(parent or ("/" if path.startswith("/") else "."), FIND_TIMEOUT_S), name)]
    raise RunError(f"there is no checkpoint at {path}: expected a run folder, its `checkpoints`, or one of those")


def open_newest(path: str, pool: Executor) -> Checkpoint:
    """The checkpoint at a path, or the newest complete one in it."""
    for store, name in reversed(find(path)):
        try:
            return open_checkpoint(store, name, pool)
        except Incomplete as incomplete:
            print_note(f"passed over: {incomplete}")
    raise RunError(f"there is no complete checkpoint at {path}")


def restore(checkpoint: Checkpoint, like: Any, pool: Executor) -> Any:
    """Reads a tree like `like`, whose leaves are jax.ShapeDtypeStructs with shardings, bit for bit as it was saved.

    A host reads each chunk that its devices need once. Besides the leaves on its devices it holds one, and the chunks
    of it that are being read.
    Raises RunError: the leaves are not those of `like`, with all differences; Damaged: a chunk is lost or changed.
    """
    wanted = named_leaves(like)
    names = [next((name for name in names if name in checkpoint.arrays), "") for names, _ in wanted]
    differences = []
    for name, (spellings, leaf) in zip(names, wanted):
        expected = f"expected {leaf.dtype}{list(leaf.shape)}"
        if not name:
            differences.append(f"  {spellings[0]}: missing, {expected}")
        elif (array := checkpoint.arrays[name]) and (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            differences.append(f"  {name}: holds {array.dtype}{list(array.shape)}, {expected}")
    differences += [f"  {name}: in the checkpoint only" for name in sorted(checkpoint.arrays.keys() - set(names))]
    if differences:
        fix = "Restore with the model that saved it, or start a run with another name."
        raise RunError("\n".join([f"checkpoint {checkpoint.path} holds another state:", *differences, fix]))
    leaves = [_read_leaf(checkpoint, name, leaf, pool) for name, (_, leaf) in zip(names, wanted)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_leaf(checkpoint: Checkpoint, name: str, pool: Executor) -> np.ndarray:
    """A whole leaf, on the host."""
    return read_block(checkpoint, name, tuple((0, size) for size in checkpoint.arrays[name].shape), pool)


def read_block(checkpoint: Checkpoint, name: str, bounds: Bounds, pool: Executor) -> np.ndarray:
    """A part of a leaf, on the host."""
    return _read_blocks(checkpoint, name, [bounds], pool)[bounds]


def verify(checkpoint: Checkpoint, pool: Executor) -> tuple[int, list[str]]:
    """Reads all of a checkpoint: the number of its chunks, and a line for each damaged one."""
    reads = []
    for array in checkpoint.arrays.values():
        reads += [pool.submit(lambda array, part: array.read(part) is None, array, part) for _, part in array.all()]
    faults = []
    for read in reads:
        try:
            read.result()
        except Damaged as error:
            faults.append(error.what)
    return len(reads), faults


def _read_root(store: Store, name: str) -> dict[str, Any]:
    path = store.path(name)
    for file in ("zarr.json", ".zattrs"):
        try:
            content = json.loads(store.read(f"{name}/{file}"))
            attributes = content.get("attributes", {}) if file == "zarr.json" else content
            if file == "zarr.json" and (content["zarr_format"], content["node_type"]) != (3, "group"):
                raise ValueError("it is no group of format 3")
            if attributes.get(COMPLETED) is not True:
                break
            if CHECKSUMS not in attributes:
                return attributes
            if attributes[CHECKSUMS][""] != attributes_checksum(attributes):
                raise Damaged(path, f"the attributes in {file} are not those that were written")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except NotPlain as error:
            raise Damaged(path, _lost(file, error)) from None
        except OSError as error:  # it may be complete: passing it over could lose a run's work
            raise RunError(f"checkpoint {path} cannot be opened: {type(error).__name__}: {error}") from error
        except UNREADABLE as error:
            raise Damaged(path, f"{file} cannot be read ({error})") from error
        if name.isdigit() and int(name) != attributes.get(STEP, int(name)):
            raise Damaged(path, f"it was saved as that of step {attributes[STEP]}")
        return attributes
    raise Incomplete(f"checkpoint {path} was not written to its end")


def _lost(file: str, error: OSError) -> str:
    return f"{file}: {error.strerror}" if isinstance(error, NotPlain) else f"{file} is missing"


def _read_leaf(checkpoint: Checkpoint, name: str, leaf: jax.ShapeDtypeStruct, pool: Executor) -> jax.Array:
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    blocks = _read_blocks(checkpoint, name, [bounds_of(index, leaf.shape) for index in indices], pool)
    array = jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: blocks[bounds_of(index, leaf.shape)], dtype=leaf.dtype
    )
    return jax.block_until_ready(array)  # the host keeps the values until they are copied


def _read_blocks(checkpoint: Checkpoint, name: str, wanted: list[Bounds], pool: Executor) -> dict[Bounds, np.ndarray]:
    """The values by bounds. A chunk that several need is read once."""
    array = checkpoint.arrays[name]
    blocks = {bounds: np.empty([stop - start for start, stop in bounds], array.dtype) for bounds in wanted}
    needed: dict[Bounds, list[Bounds]] = {}
    for bounds in blocks:
        for _, part in array.within(bounds):
            needed.setdefault(part, []).append(bounds)

    def read(part: Bounds) -> None:
        values = array.read(part)
        for bounds in needed[part]:
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, bounds))
            blocks[bounds][relative(both, bounds)] = values[relative(both, part)]

    finish({pool.submit(read, part): f"{checkpoint.path}/{name}" for part in needed}, "read")
    return blocks


# ---- both ------------------------------------------------------------------------------------------------------------


def finish(futures: dict[Future, str], done: str) -> None:
    """Waits for work on files (futures: the path of each), up to the first failure: a RunError with path and cause."""
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        future.cancel()
    wait(futures)
    for future, path in futures.items():
        if future.cancelled():
            continue
        error = future.exception()
        if isinstance(error, OSError):
            raise RunError(f"{path} could not be {done}: {type(error).__name__}: {error}") from error
        if error is not None:
            raise error


def named_leaves(tree: Any) -> list[tuple[list[str], Any]]:
    """Each leaf with the spellings of its path: ours, `weightstransformerw_q` and `.weights.transformer.w_q`."""
    named = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        ours, joined, dotted = (
            jax.tree_util.keystr(path, simple=True, separator=between) for between in ["/", "", "."]
        )
        named.append(([ours, joined, f".{dotted}"], leaf))
    return named


def attributes_checksum(attributes: dict[str, Any]) -> int:
    others = {key: value for key, value in attributes.items() if key not in (COMPLETED, CHECKSUMS)}
    return google_crc32c.value(json.dumps(others, sort_keys=True).encode())


def _without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key not in (COMPLETED, CHECKSUMS, STEP)}


def bounds_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape))


def relative(part: Bounds, origin: Any) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, origin))
