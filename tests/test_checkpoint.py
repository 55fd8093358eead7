"""Checkpoints: the same bits on any mesh, readable by plain zarr, and no lost write is ever called complete."""

import dataclasses
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numcodecs
import numpy as np
import pytest
import zarr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime import checkpoint
from runtime.errors import RunError


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


def mesh_of(d, t):
    return Mesh(np.array(jax.devices()[: d * t]).reshape(d, t), ('d', 't'))


def numpy_state(seed=0):
    """Bits no rounding would survive: any pattern of float32 (NaN payloads, -0, subnormals), and zeros, the fill value."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (16, 24), np.uint32).view(np.float32)
    w_q = rng.standard_normal((3, 16, 8)).astype(np.float32)
    w_q[1] = 0.0
    counts = {"flags": rng.random(5) < 0.5, "step": np.array(7, np.int32)}
    return State(Weights(bits, Transformer(w_q, np.zeros((3, 16), np.float32))), counts)


def put(state, mesh):
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), state, SPECS)


def like(state, mesh):
    def describe(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(describe, state, SPECS)


def assert_same_bits(restored, expected):
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == b.tobytes()


@pytest.fixture
def saved(tmp_path):
    """A complete checkpoint of step 20, saved from a 4 × 2 mesh."""
    checkpoint.save(tmp_path, 20, put(numpy_state(), mesh_of(4, 2)), {"bad_steps": 3, "seeds": [1, 2]})
    return tmp_path


@pytest.mark.parametrize("small_chunks", [False, True])
@pytest.mark.parametrize("d, t", [(4, 2), (8, 1), (2, 4), (1, 1), (2, 2)])
def test_restores_the_same_bits_on_any_mesh(tmp_path, monkeypatch, d, t, small_chunks):
    """Saved on 4 × 2, every leaf has the same bits and the asked sharding on five meshes, chunked by shard or finer."""
    if small_chunks:
        monkeypatch.setattr(checkpoint, "MAX_CHUNK_BYTES", 24)
    state, mesh = numpy_state(), mesh_of(d, t)
    checkpoint.save(tmp_path, 20, put(state, mesh_of(4, 2)), {})
    restored = checkpoint.restore(tmp_path, 20, like(state, mesh), max_io_threads=3)
    assert_same_bits(restored, state)
    assert restored.weights.transformer.w_q.sharding == NamedSharding(mesh, P(None, 'd', 't'))


def test_is_plain_zarr(saved):
    """zarr alone opens whole leaves by path, walks the hierarchy, and finds format 3, checksums and the attributes."""
    group = zarr.open(saved / "0000000020", mode="r")
    np.testing.assert_array_equal(group['weights/transformer/w_q'][:], numpy_state().weights.transformer.w_q)
    assert sorted(group['weights'].keys()) == ["embed", "transformer"]
    array = group['weights/transformer/w_q']
    assert array.metadata.zarr_format == 3 and array.compressors == (zarr.codecs.Crc32cCodec(),)
    assert dict(group.attrs) == {"bad_steps": 3, "seeds": [1, 2], "write_completed": True}


def test_attributes_come_back(saved):
    """read_attributes returns what save was given, without the marker."""
    assert checkpoint.read_attributes(saved, 20) == {"bad_steps": 3, "seeds": [1, 2]}


@pytest.mark.parametrize(
    "shard, limit, expected",
    [
        ((4, 6), 96, (4, 6)),
        ((4, 6), 95, (2, 6)),
        ((4, 6), 20, (1, 3)),
        ((7, 6), 96, (1, 6)),
        ((3, 4), 1, (1, 1)),
        ((), 1, ()),
    ],
)
def test_a_shard_is_a_whole_number_of_chunks(monkeypatch, shard, limit, expected):
    """Chunks are a shard's shape, evenly divided from the first dim on, at most MAX_CHUNK_BYTES where one value fits."""
    monkeypatch.setattr(checkpoint, "MAX_CHUNK_BYTES", limit)
    assert checkpoint._chunk_shape(shard, 4) == expected


def test_each_chunk_is_written_once(tmp_path, monkeypatch):
    """No chunk has two writers, replicated leaves included, and together they are all chunks."""
    written, write = [], checkpoint._write_chunk

    def recording(array, region, shard, file):
        written.append(file)
        write(array, region, shard, file)

    monkeypatch.setattr(checkpoint, "_write_chunk", recording)
    checkpoint.save(tmp_path, 1, put(numpy_state(), mesh_of(4, 2)), {})
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "zarr.json"]
    assert sorted(written) == sorted(files) and len(files) == 8 + 8 + 8 + 1 + 1


def test_each_chunk_is_read_once(saved, monkeypatch):
    """Restoring onto the mesh it was saved on reads every chunk once, those of replicated leaves too."""
    read, original = [], checkpoint._read_chunk

    def recording(array, region, block, within, file):
        read.append(file)
        original(array, region, block, within, file)

    monkeypatch.setattr(checkpoint, "_read_chunk", recording)
    checkpoint.restore(saved, 20, like(numpy_state(), mesh_of(4, 2)))
    assert len(read) == len(set(read)) == 8 + 8 + 8 + 1 + 1


# ---- what is not complete --------------------------------------------------------------------------------------------


def test_no_checkpoints(tmp_path):
    """A directory that is empty, or not there, has no latest step."""
    assert checkpoint.latest_step(tmp_path) is None
    assert checkpoint.latest_step(tmp_path / "nowhere") is None


def test_incomplete_ones_are_passed_over_and_named(saved, capsys):
    """The latest step is the newest complete one; newer ones without marker, metadata or group are named on stderr."""
    state = put(numpy_state(), mesh_of(4, 2))
    checkpoint.save(saved, 30, state, {})
    zarr.open_group(saved / "0000000030", mode="r+").attrs["write_completed"] = False
    (saved / "0000000040").mkdir()
    (saved / "0000000050").mkdir()
    (saved / "0000000050" / "zarr.json").write_text('{"zarr_format": 3, "node_ty')
    (saved / "notes").mkdir()
    assert checkpoint.latest_step(saved) == 20
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"checkpoint {saved}/0000000050 is passed over: its metadata cannot be read (")
    assert lines[1:] == [
        f"checkpoint {saved}/0000000040 is passed over: there is no zarr group",
        f"checkpoint {saved}/0000000030 is passed over: it was not written to its end",
    ]
    checkpoint.save(saved, 60, state, {})
    assert checkpoint.latest_step(saved) == 60
    assert capsys.readouterr().err == ""


def test_a_checkpoint_that_cannot_be_opened_is_not_passed_over(saved, monkeypatch):
    """An error of the file system (here: permission) stops the run: passing over a good checkpoint could lose work."""

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", "zarr.json")

    monkeypatch.setattr(zarr, "open_group", denied)
    with pytest.raises(RunError, match=r"0000000020 cannot be opened: \[Errno 13\] Permission denied"):
        checkpoint.latest_step(saved)


def test_incomplete_is_not_restored(saved):
    """restore and read_attributes refuse a step that is incomplete or not there."""
    zarr.open_group(saved / "0000000020", mode="r+").attrs["write_completed"] = False
    message = rf"no complete checkpoint at {saved}/0000000020: it was not written to its end"
    with pytest.raises(RunError, match=message):
        checkpoint.restore(saved, 20, like(numpy_state(), mesh_of(4, 2)))
    with pytest.raises(RunError, match=message):
        checkpoint.read_attributes(saved, 20)
    with pytest.raises(RunError, match=rf"no complete checkpoint at {saved}/0000000021: there is no zarr group"):
        checkpoint.read_attributes(saved, 21)


def test_incomplete_is_replaced_and_complete_is_not(saved):
    """Saving a step again replaces an incomplete group whole, its stray leaves too; a complete one is refused."""
    state = numpy_state(1)
    with pytest.raises(RunError, match=r"0000000020 is already there and complete; remove it to save this step again"):
        checkpoint.save(saved, 20, put(state, mesh_of(4, 2)), {})
    group = zarr.open_group(saved / "0000000020", mode="r+")
    group.attrs["write_completed"] = False
    group.create_array("stray", shape=(2,), dtype="float32")
    checkpoint.save(saved, 20, put(state, mesh_of(2, 4)), {})
    assert_same_bits(checkpoint.restore(saved, 20, like(state, mesh_of(1, 1))), state)


# ---- writes that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["w_q/c.2.3.1", "w_q/c.0.1.0", "step/c", "embed/zarr.json", "w_q/zarr.json"])
def test_a_failed_write_is_an_error_and_never_complete(tmp_path, monkeypatch, capsys, failing):
    """Whichever write of zarr's store fails, save raises path and cause, and the group is not a checkpoint."""
    checkpoint.save(tmp_path, 10, put(numpy_state(), mesh_of(4, 2)), {})
    original = zarr.storage.LocalStore.set
    monkeypatch.setattr(checkpoint, "MAX_CHUNK_BYTES", 100)

    async def failing_set(self, key, value):
        if key.endswith(failing):
            raise OSError(5, "Input/output error", key)
        await original(self, key, value)

    monkeypatch.setattr(zarr.storage.LocalStore, "set", failing_set)
    with pytest.raises(
        RunError, match=r"0000000020.* could not be (written|created): OSError: .*Input/output error"
    ) as e:
        checkpoint.save(tmp_path, 20, put(numpy_state(), mesh_of(4, 2)), {})
    assert isinstance(e.value.__cause__, OSError)
    if not failing.endswith("zarr.json"):
        assert str(e.value).startswith(f"{tmp_path}/0000000020/") and f"{failing} could not be written" in str(e.value)
    assert checkpoint.latest_step(tmp_path) == 10
    assert "0000000020 is passed over" in capsys.readouterr().err


def test_a_failed_marker_is_an_error_and_not_complete(tmp_path, monkeypatch):
    """When all chunks are written but the marker is not, save raises and there is no checkpoint."""
    original = zarr.storage.LocalStore.set

    async def failing_set(self, key, value):
        if b'"write_completed": true' in value.to_bytes():
            raise OSError(28, "No space left on device")
        await original(self, key, value)

    monkeypatch.setattr(zarr.storage.LocalStore, "set", failing_set)
    with pytest.raises(RunError, match=r"0000000020 could not be completed: OSError: .* No space left on device"):
        checkpoint.save(tmp_path, 20, put(numpy_state(), mesh_of(4, 2)), {})
    assert checkpoint.latest_step(tmp_path) is None


@pytest.mark.parametrize("lost_when", ["written", "synced"])
def test_a_write_that_is_silently_lost_is_found(tmp_path, monkeypatch, lost_when):
    """A store that drops a chunk and reports success, or loses it later (a host's own disk), gets no marker."""
    original_set, original_flush = zarr.storage.LocalStore.set, checkpoint._flush

    async def losing_set(self, key, value):
        if not key.endswith("embed/c.1.2"):
            await original_set(self, key, value)

    def losing_flush(*paths):
        original_flush(*paths)
        if paths[0].match("embed/c.1.2"):
            paths[0].unlink()

    if lost_when == "written":
        monkeypatch.setattr(zarr.storage.LocalStore, "set", losing_set)
        message = r"embed/c.1.2 could not be written: FileNotFoundError"
    else:
        monkeypatch.setattr(checkpoint, "_flush", losing_flush)
        message = r"0000000020/weights/embed/c.1.2 is not there. Do all hosts share this directory\?"
    with pytest.raises(RunError, match=message):
        checkpoint.save(tmp_path, 20, put(numpy_state(), mesh_of(4, 2)), {})
    assert checkpoint.latest_step(tmp_path) is None


def test_everything_is_on_the_disk_before_the_marker(tmp_path, monkeypatch):
    """Every file and directory of the group was fsynced before the marker was set, and the marker's file after."""
    flushed, original = [], checkpoint._flush

    def recording(*paths):
        original(*paths)
        flushed.extend((path, checkpoint._fault(tmp_path / "0000000020") is None) for path in paths)

    monkeypatch.setattr(checkpoint, "_flush", recording)
    checkpoint.save(tmp_path, 20, put(numpy_state(), mesh_of(4, 2)), {})
    before = {path for path, marked in flushed if not marked}
    assert before == {tmp_path / "0000000020", *(tmp_path / "0000000020").rglob("*")}
    after = [path for path, marked in flushed if marked]
    assert after == [tmp_path / "0000000020" / "zarr.json", tmp_path / "0000000020", tmp_path, tmp_path.parent]


def big_state(mesh):
    """4 MiB in 32 chunks of 128 KiB."""
    return {"w": jax.device_put(np.ones((1024, 1024), np.float32), NamedSharding(mesh, P('d', 't')))}


def test_a_write_that_the_kernel_cuts_short(tmp_path, monkeypatch):
    """Files limited to 100 kB (RLIMIT_FSIZE, a real failing write): save raises, and there is no checkpoint."""
    monkeypatch.setattr(checkpoint, "MAX_CHUNK_BYTES", 2**17)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(RunError, match=r"0000000020/w/c.\d+.\d+ could not be written: OSError: .* File too large"):
            checkpoint.save(tmp_path, 20, big_state(mesh_of(4, 2)), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.latest_step(tmp_path) is None


def test_a_full_disk(tmp_path, monkeypatch):
    """On a file system of 2 MiB (a real tmpfs) a 4 MiB save raises, there is no checkpoint, and room lets it succeed."""
    monkeypatch.setattr(checkpoint, "MAX_CHUNK_BYTES", 2**17)
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path / "disk")]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here (not root, or no tmpfs)")
    try:
        directory = tmp_path / "disk" / "checkpoints"
        with pytest.raises(RunError, match=r"could not be written: OSError: .* No space left on device"):
            checkpoint.save(directory, 20, big_state(mesh_of(4, 2)), {})
        assert checkpoint.latest_step(directory) is None
        subprocess.run(["mount", "-o", "remount,size=6m", str(tmp_path / "disk")], check=True)
        checkpoint.save(directory, 20, big_state(mesh_of(4, 2)), {})
        assert checkpoint.latest_step(directory) == 20
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_bfloat16_is_refused(tmp_path):
    """zarr has no bfloat16: save names all such leaves before anything is written."""
    tree = {"a": jnp.zeros(8, jnp.bfloat16), "b": {"c": jnp.zeros(8, jnp.bfloat16)}, "d": jnp.zeros(8)}
    expected = r"zarr has no such type; save these in float32:\n  a: bfloat16\n  b/c: bfloat16$"
    with pytest.raises(RunError, match=expected):
        checkpoint.save(tmp_path, 20, tree, {})
    assert list(tmp_path.iterdir()) == []


# ---- reading what does not fit, or is damaged ------------------------------------------------------------------------


def test_all_differences_at_once(saved):
    """A missing leaf, a wrong shape, a wrong dtype and a leaf too many are named in one message, with a fix."""
    sharding = NamedSharding(mesh_of(4, 2), P())
    wanted = {
        "weights": {
            "embed": jax.ShapeDtypeStruct((16, 12), jnp.float32, sharding=sharding),
            "transformer": {"w_q": jax.ShapeDtypeStruct((3, 16, 8), jnp.bfloat16, sharding=sharding)},
            "w_down": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding),
        },
        "counts": {"flags": jax.ShapeDtypeStruct((5,), bool, sharding=sharding)},
    }
    with pytest.raises(RunError) as e:
        checkpoint.restore(saved, 20, wanted)
    assert str(e.value).splitlines() == [
        f"checkpoint {saved}/0000000020 is not of this state:",
        "  weights/embed: holds float32[16, 24], expected float32[16, 12]",
        "  weights/transformer/w_q: holds float32[3, 16, 8], expected bfloat16[3, 16, 8]",
        "  weights/w_down: missing, expected float32[4]",
        "  counts/step: in the checkpoint only",
        "  weights/transformer/ln1: in the checkpoint only",
        "Restore with the model that saved it, or start a run with another name.",
    ]


@pytest.mark.parametrize("damage", ["bit flipped", "cut short", "empty"])
def test_a_damaged_chunk_is_named(saved, damage):
    """A flipped bit, a file cut short or an empty one is an error with the chunk's path, never data."""
    file = saved / "0000000020" / "weights" / "embed" / "c.1.2"
    data = bytearray(file.read_bytes())
    data[17] ^= 4
    file.write_bytes({"bit flipped": data, "cut short": data[:100], "empty": b""}[damage])
    with pytest.raises(
        RunError, match=rf"^{re.escape(str(file))} could not be read: ValueError: .*checksum do not match"
    ):
        checkpoint.restore(saved, 20, like(numpy_state(), mesh_of(2, 4)))


def test_a_missing_chunk_is_no_zeros(saved):
    """A chunk that is not there is an error with its path, though zarr would fill in zeros."""
    file = saved / "0000000020" / "weights" / "transformer" / "ln1" / "c.0.3"
    file.unlink()
    with pytest.raises(RunError, match=rf"^{re.escape(str(file))} is missing: the checkpoint has lost a chunk"):
        checkpoint.restore(saved, 20, like(numpy_state(), mesh_of(4, 2)))


# ---- what others have written ----------------------------------------------------------------------------------------


def write_published(directory, state, separator, prefix):
    """A checkpoint as it is published: zarr format 2, blosc, unevenly chunked, one array a leaf by path."""
    group = zarr.create_group(directory / "0000000020", zarr_format=2)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        group.create_array(
            prefix + jax.tree_util.keystr(path, simple=True, separator=separator),
            shape=leaf.shape,
            dtype=leaf.dtype,
            chunks=tuple(min(size, 5) for size in leaf.shape),
            compressors=numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE),
            config={"write_empty_chunks": True},
        )[...] = leaf
    group.attrs["write_completed"] = True


@pytest.mark.parametrize("separator, prefix, name", [("", "", "weightsembed"), (".", ".", ".weights.embed")])
@pytest.mark.parametrize("d, t", [(4, 2), (1, 1)])
def test_published_spellings(tmp_path, separator, prefix, name, d, t):
    """`weightstransformerw_q` and `.weights.transformer.w_q` in zarr format 2 with blosc restore bit for bit."""
    state = numpy_state()
    write_published(tmp_path, state, separator, prefix)
    assert (tmp_path / "0000000020" / name / ".zarray").is_file()
    assert checkpoint.latest_step(tmp_path) == 20
    assert_same_bits(checkpoint.restore(tmp_path, 20, like(state, mesh_of(d, t))), state)


def test_published_with_a_missing_or_damaged_chunk(tmp_path):
    """In format 2 as well a missing chunk is an error, and one that is cut short too."""
    state = numpy_state()
    write_published(tmp_path, state, "", "")
    file = tmp_path / "0000000020" / "weightsembed" / "2.1"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(RunError, match=r"weightsembed/2.1 is damaged: it has 40 bytes and was written with 116"):
        checkpoint.restore(tmp_path, 20, like(state, mesh_of(4, 2)))
    file.unlink()
    with pytest.raises(RunError, match=r"weightsembed/2.1 is missing"):
        checkpoint.restore(tmp_path, 20, like(state, mesh_of(4, 2)))


# ---- several hosts ---------------------------------------------------------------------------------------------------

HOST = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path[:0] = [{root!r}, {tests!r}]
import jax
host, address, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, 2, host)
import zarr
import test_checkpoint as test
from runtime import checkpoint
from runtime.errors import RunError

state, mesh = test.numpy_state(), test.mesh_of(4, 2)
sharded = jax.tree.map(
    lambda leaf, spec: jax.make_array_from_callback(leaf.shape, test.NamedSharding(mesh, spec), lambda i: leaf[i]),
    state, test.SPECS,
)
checkpoint.save(directory, 10, sharded, {{}})
restored = checkpoint.restore(directory, 10, test.like(state, test.mesh_of(2, 4)))
for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state)):
    for shard in leaf.addressable_shards:
        assert test.np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()

original = zarr.storage.LocalStore.set
async def failing_set(self, key, value):
    if host == 1 and key.endswith("embed/c.1.3"):
        raise OSError(5, "Input/output error", key)
    await original(self, key, value)
zarr.storage.LocalStore.set = failing_set
try:
    checkpoint.save(directory, 20, sharded, {{}})
except RunError as error:
    print("RunError:", error)
print("latest", checkpoint.latest_step(directory))
"""


def test_two_hosts(tmp_path):
    """Two processes of four devices save, restore on another mesh, and both raise when one's write fails."""
    tests = Path(__file__).parent
    (tmp_path / "host.py").write_text(HOST.format(root=str(tests.parent), tests=str(tests)))
    (tmp_path / "checkpoints").mkdir()
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [f"localhost:{port}", str(tmp_path / "checkpoints")]
    hosts = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "host.py"), str(host), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        outputs = [host.communicate(timeout=120) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    for (output, errors), expected in zip(
        outputs,
        [
            r"RunError: checkpoint: host 1 failed \(not written\); its own message says why\nlatest 10\n$",
            r"RunError: \S*/0000000020/weights/embed/c.1.3 could not be written: OSError: .*\nlatest 10\n$",
        ],
    ):
        assert re.search(expected, output), output + errors
