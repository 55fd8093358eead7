"""A small state of awkward bits on any mesh, and checkpoints of it: what the checkpoints' tests share."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime.checkpoints.directory import Checkpoints


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Transformer:
    w_q: jax.Array
    ln1: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    embed: jax.Array
    transformer: Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weights: Weights
    counts: dict[str, jax.Array]


SPECS = State(Weights(P('t', 'd'), Transformer(P(None, 'd', 't'), P(None, ('d', 't')))), {"flags": P(), "step": P()})
CHUNKS = 8 + 8 + 8 + 1 + 1  # of the state on 4 × 2


def mesh_of(d, t):
    return Mesh(np.array(jax.devices()[: d * t]).reshape(d, t), ('d', 't'))


def numpy_state(seed=0):
    """Bits no rounding would survive: any pattern of float32 (NaN payloads, -0, subnormals), and zeros, the fill
    value."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (16, 24), np.uint32).view(np.float32)
    w_q = rng.standard_normal((3, 16, 8)).astype(np.float32)
    w_q[1] = 0.0
    counts = {"flags": rng.random(5) < 0.5, "step": np.array(7, np.int32)}
    return State(Weights(bits, Transformer(w_q, np.zeros((3, 16), np.float32))), counts)


def put(state, mesh):
    """The state on a mesh, whose devices may be of several hosts."""

    def place(leaf, spec):
        return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), lambda index: leaf[index])

    return jax.tree.map(place, state, SPECS)


def like(d, t):
    """What `restore` is told of the state on a mesh."""
    arrays = put(numpy_state(), mesh_of(d, t))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays)


def assert_same_bits(restored, expected):
    """All shards of this host have the bits of the expected arrays."""
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert all(np.asarray(s.data).tobytes() == np.asarray(b)[s.index].tobytes() for s in a.addressable_shards)


class Waiting(Checkpoints):
    """A save is complete, or raises, when it returns."""

    def save(self, *arguments):
        stall_s = super().save(*arguments)
        self._wait()
        self.raise_failure()
        return stall_s


def open_checkpoints(directory, *, waits=True, timeout_s=20, threads=4, **kept):
    return (Waiting if waits else Checkpoints)(str(directory), timeout_s=timeout_s, max_io_threads=threads, **kept)


def save(directory, step, state=None, attributes=None, mesh=(4, 2)):
    """A complete checkpoint of the state."""
    state = numpy_state() if state is None else state
    open_checkpoints(directory).save(step, put(state, mesh_of(*mesh)), attributes or {})


def restore(directory, mesh=(4, 2)):
    return open_checkpoints(directory).restore(like(*mesh))
