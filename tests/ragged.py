"""What the tests of data share: records, ragged data, what a folder holds, and a loader's config."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from models.mesh import Mesh
from runtime.data.batches import Batch
from runtime.data.flat_tokens import open_split
from shardlib.mesh import make_mesh
from shardlib.shardtypes import make_shardings

EXAMPLE = [np.array(ids) for ids in ([1, 2], [3, 4, 5], [6, 7, 8])]  # of the format's description


@dataclasses.dataclass(frozen=True)
class FlatTokens:
    filespec: str
    seed: int = 0
    sequence_packing: bool = True
    epochs: int = 1
    read_blocks_per_shuffle_buffer: int = 3
    sequences_per_read_block: int = 4


def sharding(d=1, t=1, batch_type=None):
    """The sharding of a batch whose rows are split over d; or as its type says."""
    mesh = make_mesh(vars(Mesh(d=d, t=t)), jax.devices()[: d * t])
    if batch_type is None:
        return Batch(*[NamedSharding(mesh, PartitionSpec("d", None))] * 3)
    with jax.set_mesh(mesh):
        return make_shardings(batch_type)


def ragged(seed, count=100, longest=40, largest_id=1000):
    """Random sequences, several of them empty."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, largest_id + 1, rng.integers(0, longest + 1)) for _ in range(count)]


def encoded(sequences):
    """The sequences as flat tokens."""
    return np.array([2 * token + (place == 0) for ids in sequences for place, token in enumerate(ids)], np.uint32)


def write_lines(path, records):
    """Writes records as lines of JSON; returns the file's path."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def files(folder):
    """The content of each file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def as_numpy(batch):
    return np.asarray(batch.targets), np.asarray(batch.is_seq_start), np.asarray(batch.is_target)


def read_all(loader):
    """All rows of a loader in the order of its batches: targets, is_seq_start, is_target."""
    return [np.concatenate(arrays) for arrays in zip(*(as_numpy(loader.load(step)) for step in range(loader.steps)))]


def assert_equal(left, right):
    for a, b in zip(as_numpy(left), as_numpy(right)):
        np.testing.assert_array_equal(a, b)


@dataclasses.dataclass(frozen=True)
class HostSharding:
    """What one of several hosts sees of a sharding: its own devices."""

    whole: jax.sharding.Sharding
    devices: frozenset

    def addressable_devices_indices_map(self, shape):
        whole = self.whole.devices_indices_map(shape)
        return {device: index for device, index in whole.items() if device in self.devices}


def read_from_chunks(monkeypatch):
    """Makes loaders read from chunks also what is small enough to be kept in memory."""
    monkeypatch.setattr(
        "runtime.data.batches.open_split", lambda path, split, **more: open_split(path, split, resident_bytes=0, **more)
    )
