"""Checkpoints: any pytree of JAX arrays as a zarr group that any zarr reader opens, restored onto any mesh.

    save("runs/a/checkpoints", 20, state, {"bad_steps": 0}, max_io_threads=64)
    step = latest_step("runs/a/checkpoints")                      # 20; None where there is no complete one
    state = restore("runs/a/checkpoints", step, jax.eval_shape(...), max_io_threads=64)
    zarr.open("runs/a/checkpoints/0000000020")["weights/transformer/w_q"][:]

The format is docs/formats.md's "PyTree-zarr checkpoint". A group is a checkpoint once its attribute `write_completed` is
true. The leader sets it last: after every host has said that each of its writes succeeded and is on the disk, and after
seeing that every chunk's file is there. The directory is local, or a file system that all hosts share.
"""

import itertools
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numcodecs
import numpy as np
import zarr
from jax.experimental import multihost_utils

from runtime.errors import RunError

MAX_CHUNK_BYTES = 64 * 2**20
COMPLETED = "write_completed"


def save(directory: str | Path, step: int, tree: Any, attributes: dict[str, Any], *, max_io_threads: int = 16) -> None:
    """Writes `tree` and `attributes` (JSON values) as checkpoint `step`; returns when it is complete and on the disk.

    Called by all hosts alike; each writes its own shards, one host those that are replicated. An incomplete checkpoint
    of the same step is replaced. The arrays' types are those of plain numpy: not bfloat16, for which zarr has no type.

    Raises RunError, on every host, when the checkpoint is already there or when any write on any host failed. It is then
    not complete, and a later run skips it.
    """
    path, leader = _path(directory, step), jax.process_index() == 0
    leaves = {names[0]: leaf for names, leaf in _named_leaves(tree)}
    unfit = [f"  {name}: {leaf.dtype}" for name, leaf in leaves.items() if not _storable(leaf.dtype)]
    if unfit:
        raise RunError(f"checkpoint {path}: zarr has no such type; save these in float32:\n" + "\n".join(unfit))

    with ThreadPoolExecutor(max_io_threads) as pool:
        _finish({pool.submit(_create, path, leaves, attributes): path} if leader else {}, "created")
        opening = pool.submit(_arrays, path, "r+")
        _finish({opening: path}, "opened")
        writes: dict[Future, Path] = {}
        for name, leaf in leaves.items():
            # A chunk of zeros is written too, so a missing one is a lost one. zarr does not store this choice.
            array = opening.result()[name].with_config({"write_empty_chunks": True})
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    for region, key in _chunks(array, _bounds(shard.index, leaf.shape)):
                        file = path / name / key
                        writes[pool.submit(_write_chunk, array, region, shard, file)] = file
        _finish(writes, "written")
        _finish({pool.submit(_complete, path): path} if leader else {}, "completed")


def restore(directory: str | Path, step: int, like: Any, *, max_io_threads: int = 16) -> Any:
    """Reads checkpoint `step` into a tree like `like`, whose leaves are jax.ShapeDtypeStructs with shardings.

    The values are bit for bit those that were saved, on whatever mesh. Each host reads the chunks that its devices need,
    and holds one leaf at a time. Takes zarr formats 2 and 3, and a leaf's path spelled `weights/transformer/w_q`,
    `weightstransformerw_q` or `.weights.transformer.w_q`.

    Raises RunError when there is no such complete checkpoint; with all differences at once, when its leaves are not those
    of `like`; and for a chunk that is missing or damaged, with its path.
    """
    path = _path(directory, step)
    if fault := _fault(path):
        raise RunError(f"no complete checkpoint at {path}: {fault}")
    found, wanted = _arrays(path, "r"), _named_leaves(like)
    names = [next((name for name in names if name in found), None) for names, _ in wanted]
    differences = []
    for name, (spellings, leaf) in zip(names, wanted):
        expected = f"expected {leaf.dtype}{list(leaf.shape)}"
        if name is None:
            differences.append(f"  {spellings[0]}: missing, {expected}")
        elif (found[name].shape, found[name].dtype) != (leaf.shape, leaf.dtype):
            differences.append(f"  {name}: holds {found[name].dtype}{list(found[name].shape)}, {expected}")
    differences += [f"  {name}: in the checkpoint only" for name in sorted(found.keys() - set(names))]
    if differences:
        fix = "Restore with the model that saved it, or start a run with another name."
        raise RunError("\n".join([f"checkpoint {path} is not of this state:", *differences, fix]))

    with ThreadPoolExecutor(max_io_threads) as pool:
        leaves = [_read_leaf(pool, found[name], path / name, leaf) for name, (_, leaf) in zip(names, wanted)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_attributes(directory: str | Path, step: int) -> dict[str, Any]:
    """The attributes that checkpoint `step` was saved with. Raises RunError when it is not there or not complete."""
    path = _path(directory, step)
    if fault := _fault(path):
        raise RunError(f"no complete checkpoint at {path}: {fault}")
    return {name: value for name, value in zarr.open_group(path, mode="r").attrs.items() if name != COMPLETED}


def latest_step(directory: str | Path) -> int | None:
    """The newest complete checkpoint's step, or None; says on stderr which newer ones it passes over, and why."""
    paths = Path(directory).iterdir() if Path(directory).is_dir() else []
    for path in sorted((path for path in paths if re.fullmatch(r"\d{10}", path.name)), reverse=True):
        fault = _fault(path)
        if fault is None:
            return int(path.name)
        print(f"checkpoint {path} is passed over: {fault}", file=sys.stderr)
    return None


# ---- writing ---------------------------------------------------------------------------------------------------------


def _create(path: Path, leaves: dict[str, jax.Array], attributes: dict[str, Any]) -> None:
    if path.exists():
        if _fault(path) is None:
            raise RunError(f"checkpoint {path} is already there and complete; remove it to save this step again")
        shutil.rmtree(path)
    group = zarr.create_group(path, attributes={**attributes, COMPLETED: False})
    for name, leaf in leaves.items():
        group.create_array(
            name,
            shape=leaf.shape,
            dtype=leaf.dtype,
            chunks=_chunk_shape(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize),
            compressors=zarr.codecs.Crc32cCodec(),  # a checksum alone: compression saves 7 % of float32 weights
            chunk_key_encoding={"name": "default", "separator": "."},  # a leaf's chunks in one directory
        )


def _chunk_shape(shard_shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A shard's shape, its leading dims divided evenly until it has at most MAX_CHUNK_BYTES: a chunk has one writer."""
    shape = [max(1, size) for size in shard_shape]
    while math.prod(shape) * itemsize > MAX_CHUNK_BYTES and math.prod(shape) > 1:
        dim = next(i for i, size in enumerate(shape) if size > 1)
        shape[dim] //= next(n for n in range(2, shape[dim] + 1) if shape[dim] % n == 0)
    return tuple(shape)


def _write_chunk(array: zarr.Array, region: tuple[slice, ...], shard: jax.Shard, file: Path) -> None:
    origin = [start for start, _ in _bounds(shard.index, array.shape)]
    within = tuple(slice(part.start - start, part.stop - start) for part, start in zip(region, origin))
    array[region] = np.asarray(shard.data)[within]
    _flush(file)  # which also finds a write that left no file


def _complete(path: Path) -> None:
    """The leader's last act; every write has been reported as on the disk by now."""
    for name, array in _arrays(path, "r").items():
        for _, key in _chunks(array, [(0, size) for size in array.shape]):
            if not (path / name / key).is_file():
                raise RunError(f"{path / name / key} is not there. Do all hosts share this directory?")
    for parent, _, files in os.walk(path):
        _flush(*(Path(parent) / file for file in files if file == "zarr.json"), Path(parent))
    zarr.open_group(path, mode="r+").attrs[COMPLETED] = True
    _flush(path / "zarr.json", path, path.parent, path.parent.parent)


def _flush(*paths: Path) -> None:
    """Waits until files or directories are on the disk, whatever happens to the machine."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _fault(path: Path) -> str | None:
    """What keeps `path` from being a complete checkpoint; None if it is one."""
    try:
        completed = zarr.open_group(path, mode="r").attrs.get(COMPLETED)
    except FileNotFoundError:
        return "there is no zarr group"
    except ValueError as error:  # a metadata file that ends early
        return f"its metadata cannot be read ({error})"
    except OSError as error:  # may be a complete one: to pass it over could lose a run's work
        raise RunError(f"checkpoint {path} cannot be opened: {error}") from error
    return None if completed is True else "it was not written to its end"


def _read_leaf(pool: ThreadPoolExecutor, array: zarr.Array, path: Path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    blocks = {bounds: None for bounds in (_bounds(index, leaf.shape) for index in indices)}  # replicas are read once
    reads: dict[Future, Path] = {}
    for bounds in blocks:
        blocks[bounds] = np.empty([stop - start for start, stop in bounds], leaf.dtype)
        for region, key in _chunks(array, bounds):
            within = tuple(slice(part.start - start, part.stop - start) for part, (start, _) in zip(region, bounds))
            reads[pool.submit(_read_chunk, array, region, blocks[bounds], within, path / key)] = path / key
    _finish(reads, "read")
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: blocks[_bounds(index, leaf.shape)], dtype=leaf.dtype
    )


def _read_chunk(array: zarr.Array, region: tuple, block: np.ndarray, within: tuple, file: Path) -> None:
    if not file.is_file():  # zarr would return zeros
        raise RunError(f"{file} is missing: the checkpoint has lost a chunk. Remove it, so that an older one is used.")
    if any(isinstance(codec, numcodecs.Blosc) for codec in array.compressors):
        # numcodecs 0.16 decodes a file that was cut short to garbage, when its values were not compressible.
        with file.open("rb") as stored:
            size = int.from_bytes(stored.read(16)[12:], "little")  # of the whole file, by blosc's header
        if size != file.stat().st_size:
            raise RunError(f"{file} is damaged: it has {file.stat().st_size} bytes and was written with {size}")
    block[within] = array[region]


# ---- both ------------------------------------------------------------------------------------------------------------


def _path(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"{step:010d}"


def _named_leaves(tree: Any) -> list[tuple[list[str], Any]]:
    """Each leaf with the spellings of its path: ours, which is written, and the two that others have published."""
    named = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        ours, joined, dotted = (
            jax.tree_util.keystr(path, simple=True, separator=between) for between in ["/", "", "."]
        )
        named.append(([ours, joined, f".{dotted}"], leaf))
    return named


def _storable(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "biufc"


def _arrays(path: Path, mode: str) -> dict[str, zarr.Array]:
    members = zarr.open_group(path, mode=mode).members(max_depth=None)
    return {name: member for name, member in members if isinstance(member, zarr.Array)}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """A shard's index as (start, stop) of each dim."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _chunks(array: zarr.Array, bounds: Any) -> Iterator[tuple[tuple[slice, ...], str]]:
    """The parts of the region `bounds` that lie in one chunk each, with the name of the chunk's file."""
    sizes = array.shards or array.chunks  # of what is one file
    numbers = [range(start // size, -(-stop // size)) for (start, stop), size in zip(bounds, sizes)]
    for chunk in itertools.product(*numbers):
        edges = [(number * size, (number + 1) * size) for number, size in zip(chunk, sizes)]
        region = (slice(max(a, start), min(b, stop)) for (a, b), (start, stop) in zip(edges, bounds))
        yield tuple(region), array.metadata.encode_chunk_key(chunk)


def _finish(tasks: dict[Future, Path], done: str) -> None:
    """Waits for the tasks of all hosts; if one fails anywhere, no more are begun and every host raises RunError."""
    wait(tasks, return_when=FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    wait(tasks)
    errors = [(path, task.exception()) for task, path in tasks.items() if not task.cancelled() and task.exception()]
    failed = [bool(errors)]
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.array(bool(errors)))
    if errors:
        path, error = errors[0]
        if isinstance(error, RunError):
            raise error
        raise RunError(f"{path} could not be {done}: {type(error).__name__}: {error}") from error
    if any(failed):
        raise RunError(f"checkpoint: host {np.argmax(failed)} failed (not {done}); its own message says why")
