"""Writes one checkpoint: copies the state, writes each host's chunks, then the metadata, which complete it.

    grids, chunks = snapshot(state, pool)                     # afterwards the state may be donated
    checksums = write_chunks(store, "0000000020", chunks, pool)              # every host
    complete(store, "0000000020", grids, checksums, attributes, pool)        # one host, with the checksums of all

The format is in runtime/checkpoints/checkpoint.py.
"""

import math
from concurrent.futures import Executor
from typing import Any

import google_crc32c
import jax
import numpy as np
import zarr
import zarr.codecs

from runtime.checkpoints import checkpoint as form
from runtime.checkpoints.checkpoint import Grid, LazyArray, Store, bounds_of, finish, named_leaves, relative
from runtime.terminal import RunError

MAX_CHUNK_BYTES = 32 * 2**20  # also what a thread holds, and the size of a request to an object store


def snapshot(tree: Any, pool: Executor, path: str = "") -> tuple[dict[str, Grid], list[tuple[str, np.ndarray]]]:
    """The leaves' grids by name, and copies of the chunks that this host writes: (file name, values). One host writes
    each shard. The arrays may be donated afterwards. Raises RunError: zarr has no type for a leaf's bfloat16."""
    grids: dict[str, Grid] = {}
    shards: list[tuple[str, jax.Shard]] = []
    for (name, *_), leaf in named_leaves(tree):
        chunk = chunk_shape(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize)
        grids[name] = Grid(leaf.shape, leaf.dtype, chunk)
        shards += [(name, shard) for shard in leaf.addressable_shards if shard.replica_id == 0]
    storable = {name for name, grid in grids.items() if isinstance(grid.dtype, np.dtype) and grid.dtype.kind in "biufc"}
    unfit = [f"  {name}: {grid.dtype}" for name, grid in grids.items() if name not in storable]
    if unfit:
        raise RunError(f"checkpoint {path}: zarr has no such type; save these in float32:\n" + "\n".join(unfit))

    for _, shard in shards:
        shard.data.copy_to_host_async()  # all transfers at once
    chunks = []
    for (name, shard), values in zip(shards, pool.map(_copy, [shard for _, shard in shards])):
        bounds = bounds_of(shard.index, grids[name].shape)
        for number, part in grids[name].within(bounds):
            chunks.append((f"{name}/{_file(number)}", values[relative(part, bounds)]))
    return grids, chunks


def write_chunks(store: Store, name: str, chunks: list[tuple[str, np.ndarray]], pool: Executor) -> dict[str, int]:
    """Writes a host's chunks to the disk and returns the crc32c of their values by file. Empties `chunks`, which frees
    memory as it goes. Raises RunError: a chunk could not be written; with path and cause."""
    checksums: dict[str, int] = {}

    def write(file: str, values: np.ndarray) -> None:
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        content.flags.writeable = False  # google_crc32c asks for it
        checksums[file] = google_crc32c.value(content)
        store.write(f"{name}/{file}", content.data, checksums[file].to_bytes(4, "little"))

    writes = {}
    while chunks:
        file = chunks[-1][0]
        writes[pool.submit(write, *chunks.pop())] = store.path(f"{name}/{file}")
    finish(writes, "written")
    return checksums


def complete(
    store: Store,
    name: str,
    grids: dict[str, Grid],
    checksums: dict[str, int],
    attributes: dict[str, Any],
    pool: Executor,
) -> None:
    """Writes the metadata, after all hosts' chunks. Raises RunError: a chunk is missing, or a write fails."""
    sizes = store.files(name)
    for leaf, grid in grids.items():
        for number, _ in grid.all():
            file = f"{leaf}/{_file(number)}"
            if sizes.get(file) != grid.file_bytes:
                there = f"has {sizes[file]} bytes of {grid.file_bytes}" if file in sizes else "is not there"
                raise RunError(f"{store.path(f'{name}/{file}')} {there}. Do all hosts share this directory?")
    files = {f"{name}/{file}": content for file, content in _metadata(name, grids, checksums, attributes).items()}
    root = f"{name}/zarr.json"
    for now in (files.keys() - {root}, {root}):
        finish({pool.submit(store.write, file, files[file]): store.path(file) for file in now}, "written")
        store.flush(name)


def write_copy(
    arrays: dict[str, LazyArray], store: Store, name: str, attributes: dict[str, Any], pool: Executor
) -> None:
    """Writes a checkpoint of these arrays, a chunk at a time; their chunks divide them evenly."""
    grids: dict[str, Grid] = {}
    checksums: dict[str, Any] = {}
    for leaf, array in arrays.items():
        grids[leaf] = Grid(array.shape, array.dtype, chunk_shape(array.chunk, array.dtype.itemsize))
        for _, bounds in array.all():
            values = array.read(bounds)
            parts = grids[leaf].within(bounds)
            chunks = [(f"{leaf}/{_file(part)}", values[relative(edges, bounds)]) for part, edges in parts]
            checksums |= write_chunks(store, name, chunks, pool)
    complete(store, name, grids, checksums, attributes, pool)


def remove(store: Store, name: str) -> None:
    """Deletes a checkpoint; interrupted, it leaves an incomplete one."""
    for file in ("zarr.json", ".zattrs"):
        store.remove(f"{name}/{file}")
    store.flush(name)
    store.remove(name)


def _metadata(
    name: str, grids: dict[str, Grid], chunk_checksums: dict[str, int], attributes: dict[str, Any]
) -> dict[str, bytes]:
    files: dict[str, Any] = {}
    group = zarr.create_group(zarr.storage.MemoryStore(files))
    for leaf, grid in grids.items():
        group.create_array(
            leaf,
            shape=grid.shape,
            dtype=grid.dtype,
            chunks=grid.chunk,
            compressors=zarr.codecs.Crc32cCodec(),  # only a checksum: compression saves 7 % of float32 weights
            chunk_key_encoding={"name": "default", "separator": "."},  # a leaf's chunks in one directory
            attributes={
                form.CHUNKS: {_file(number): chunk_checksums[f"{leaf}/{_file(number)}"] for number, _ in grid.all()}
            },
        )
    attributes = {**attributes, form.STEP: int(name)}
    checksums = {file: google_crc32c.value(text.to_bytes()) for file, text in files.items() if file != "zarr.json"}
    checksums[""] = form.attributes_checksum(attributes)
    group.attrs.update({**attributes, form.CHECKSUMS: checksums, form.COMPLETED: True})
    return {file: content.to_bytes() for file, content in files.items()}


def _copy(shard: jax.Shard) -> np.ndarray:
    values = np.asarray(shard.data)
    # A CPU's `values` are the device's own memory, which the next step overwrites.
    return values.copy() if shard.device.platform == "cpu" else values


def chunk_shape(shard_shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A shard's shape, leading dims divided evenly down to MAX_CHUNK_BYTES. So a chunk has one writer."""
    shape = [max(1, size) for size in shard_shape]
    while math.prod(shape) * itemsize > MAX_CHUNK_BYTES and math.prod(shape) > 1:
        dim = next(i for i, size in enumerate(shape) if size > 1)
        shape[dim] //= next(n for n in range(2, shape[dim] + 1) if shape[dim] % n == 0)
    return tuple(shape)


def _file(number: tuple[int, ...]) -> str:
    return ".".join(["c", *map(str, number)])
