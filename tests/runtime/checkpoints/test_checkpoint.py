"""One checkpoint: the same bits on any mesh, readable by plain zarr, each chunk once, and what others have written."""

import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import google_crc32c
import jax
import jax.numpy as jnp
import numcodecs
import numpy as np
import pytest
import zarr
from checkpoint_state import CHUNKS, assert_same_bits, mesh_of, numpy_state, open_checkpoints, put, restore, save
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parts import assert_refuses, says

from runtime.checkpoints import checkpoint
from runtime.checkpoints import writing as checkpoint_writing
from runtime.checkpoints.store import LocalStore


@pytest.fixture
def saved(tmp_path):
    """A complete checkpoint of step 20, saved from a 4 × 2 mesh."""
    save(tmp_path, 20, attributes={"bad_steps": 3, "seeds": [1, 2]})
    return tmp_path


@pytest.mark.parametrize(
    "d, t, small_chunks", [(4, 2, False), (8, 1, True), (2, 4, False), (1, 1, False), (2, 2, True)]
)
def test_restores_the_same_bits_on_any_mesh(tmp_path, monkeypatch, d, t, small_chunks):
    """Saved on 4 × 2, every leaf has the same bits and the asked sharding on five meshes, chunked by shard or finer. No
    chunk has two writers, replicated leaves included, and each is read once, however many devices need a part."""
    if small_chunks:
        monkeypatch.setattr(checkpoint_writing, "MAX_CHUNK_BYTES", 24)
    read, written = [], []
    originals = LocalStore.read, LocalStore.write
    recording = lambda store, name, *most: (read.append(name), originals[0](store, name, *most))[1]  # noqa: E731
    monkeypatch.setattr(LocalStore, "read", recording)
    monkeypatch.setattr(LocalStore, "write", lambda *given: (written.append(given[1]), originals[1](*given)))
    state, mesh = numpy_state(), mesh_of(d, t)
    save(tmp_path, 20, state)
    step, restored = restore(tmp_path, (d, t))
    assert step == 20
    assert_same_bits(restored, state)
    assert restored.weights.transformer.w_q.sharding == NamedSharding(mesh, P(None, 'd', 't'))
    files = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    chunks = sorted(file for file in files if not file.endswith("zarr.json"))
    assert len(chunks) == CHUNKS or small_chunks
    for names in (read, written):
        assert sorted(name for name in names if not name.endswith("zarr.json")) == chunks


def test_is_plain_zarr(saved):
    """zarr alone opens whole leaves by path, walks the hierarchy, and finds format 3, checksums and the attributes."""
    group = zarr.open(saved / "0000000020", mode="r")
    for (name, *_), leaf in checkpoint.named_leaves(numpy_state()):
        assert group[name][...].tobytes() == leaf.tobytes()
    assert sorted(group['weights'].keys()) == ["embed", "transformer"]
    array = group['weights/transformer/w_q']
    assert array.metadata.zarr_format == 3 and array.compressors == (zarr.codecs.Crc32cCodec(),)
    attributes = dict(group.attrs)
    assert len(attributes.pop("metadata_crc32c")) == 5 + 3 + 1  # arrays, groups below the root, attributes
    assert attributes == {"bad_steps": 3, "seeds": [1, 2], "step": 20, "write_completed": True}
    (file, *_) = (saved / "0000000020" / "weights" / "transformer" / "w_q").glob("c.*")
    assert array.attrs["chunk_crc32c"][file.name] == int.from_bytes(file.read_bytes()[-4:], "little")


@pytest.mark.parametrize("shard, limit, expected", [
    ((4, 6), 96, (4, 6)), ((4, 6), 95, (2, 6)), ((4, 6), 20, (1, 3)), ((7, 6), 96, (1, 6)), ((3, 4), 1, (1, 1)),
    ((), 1, ()),
])  # fmt: skip
def test_a_shard_is_a_whole_number_of_chunks(monkeypatch, shard, limit, expected):
    """Chunks are a shard's shape, evenly divided from the first dim on, at most MAX_CHUNK_BYTES where one value
    fits."""
    monkeypatch.setattr(checkpoint_writing, "MAX_CHUNK_BYTES", limit)
    assert checkpoint_writing.chunk_shape(shard, 4) == expected


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's count of the most memory used")
def test_restoring_never_holds_two_copies(tmp_path):
    """While 128 MB are restored, on another mesh too, a process grows by them and less than three leaves of 16 MB: one
    on its way to the devices, and its chunks, all read at once, as they are in files and as values."""
    # malloc gives blocks of 1 MB and more back at once: it would keep up to 60 MB of them for reuse.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "PYTHONPATH": os.pathsep.join(sys.path)}
    measure = f"import test_checkpoint; test_checkpoint.measure_restoring({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", measure], env=environment, capture_output=True, text=True, check=True)
    assert len(grown := [int(line) for line in done.stdout.split()]) == 2
    assert all(2**26 < growth < 2**27 + 3 * 2**24 for growth in grown), grown


def measure_restoring(directory):
    """Prints how many bytes the process grows by at most during each of two restorations of eight leaves of 16 MB."""
    onto = [NamedSharding(mesh_of(*mesh), P('d', 't')) for mesh in ((4, 2), (8, 1))]
    tree = {f"leaf_{i}": jax.device_put(np.full((256, 2**14), i + 1, np.float32), onto[0]) for i in range(8)}
    checkpoints = open_checkpoints(directory)
    checkpoints.save(1, tree, {})
    for sharding in onto:
        like = dict.fromkeys(tree, jax.ShapeDtypeStruct((256, 2**14), np.float32, sharding=sharding))
        Path("/proc/self/clear_refs").write_text("5")  # the count starts anew
        before = memory("VmRSS")
        restored = checkpoints.restore(like)[1]
        print(memory("VmHWM") - before)
        assert all(float(leaf[3, 5]) == i + 1 for i, leaf in enumerate(restored.values()))


def memory(name):
    """A count of bytes from this process's status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def test_bfloat16_is_refused(tmp_path):
    """zarr has no bfloat16: save names all such leaves before anything is written."""
    tree = {"a": jnp.zeros(8, jnp.bfloat16), "b": {"c": jnp.zeros(8, jnp.bfloat16)}, "d": jnp.zeros(8)}
    parts = "save these in float32: a: bfloat16 b/c: bfloat16"
    assert_refuses(parts, open_checkpoints(tmp_path).save, 20, tree, {})
    assert list(tmp_path.iterdir()) == []


def test_all_differences_at_once(saved):
    """A missing leaf, a wrong shape, a wrong dtype and a leaf too many are named in one message, with a fix."""

    def leaf(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh_of(4, 2), P()))

    transformer = {"w_q": leaf((3, 16, 8), jnp.bfloat16)}
    wanted = {
        "weights": {"embed": leaf((16, 12), np.float32), "transformer": transformer, "w_down": leaf((4,), np.float32)},
        "counts": {"flags": leaf((5,), bool)},
    }
    parts = f"""
        checkpoint {saved}/0000000020 holds another state:
        weights/embed: holds float32[16, 24], expected float32[16, 12]
        weights/transformer/w_q: holds float32[3, 16, 8], expected bfloat16[3, 16, 8]
        weights/w_down: missing, expected float32[4]
        counts/step: in the checkpoint only weights/transformer/ln1: in the checkpoint only Restore with"""
    assert_refuses(parts, open_checkpoints(saved).restore, wanted)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place, taken_from, named", [
    ("0000000020/weights/embed/c.1.2", "0000000020/weights/embed/c.0.2", "weights/embed/c.1.2 does not"),
    ("0000000020/weights/embed/c.1.2", "0000000010/weights/embed/c.1.2", "weights/embed/c.1.2 does not"),
    ("0000000020/a/c.0", "0000000020/b/c.0", "a/c.0 does not have the checksum"),
    ("0000000020/a", "0000000020/b", "a/zarr.json does not have the checksum"),
    ("0000000020", "0000000010", "it was saved as that of step 10"),
], ids=["number", "chunk of another step", "array", "whole array", "whole checkpoint"])  # fmt: skip
def test_what_changed_places_is_found(tmp_path, capsys, place, taken_from, named):
    """A chunk or an array put where another of equal shape and with a checksum of its own was, or a checkpoint under
    another step's name, is damage that verify and restore name."""
    for step in (10, 20):
        tree = {name: jax.device_put(np.full(4, step + i, np.float32)) for i, name in enumerate("ab")}
        tree["weights"] = {"embed": put(numpy_state(step), mesh_of(4, 2)).weights.embed}
        open_checkpoints(tmp_path).save(step, tree, {})
    if (tmp_path / place).is_dir():
        shutil.rmtree(tmp_path / place)
        shutil.copytree(tmp_path / taken_from, tmp_path / place)
    else:
        shutil.copy(tmp_path / taken_from, tmp_path / place)
    assert open_checkpoints(tmp_path).restore(tree)[0] == 10
    passed_over = rf"^passed over: checkpoint {tmp_path}/0000000020 is damaged: .*{named}"
    assert re.match(passed_over, capsys.readouterr().err)


def test_checkpoints_of_earlier_programs(saved, capsys):
    """A checkpoint without checksums in the arrays' attributes, and without a step, restores bit for bit; a line says
    what is not noticed, and a damaged chunk is still found."""
    folder = saved / "0000000020"
    root = json.loads((folder / "zarr.json").read_text())
    for file in folder.rglob("*/zarr.json"):
        array = json.loads(file.read_text())
        array["attributes"] = {}
        file.write_text(json.dumps(array))
        root["attributes"]["metadata_crc32c"][str(file.relative_to(folder))] = google_crc32c.value(file.read_bytes())
    del root["attributes"]["step"]
    root["attributes"]["metadata_crc32c"][""] = checkpoint.attributes_checksum(root["attributes"])
    (folder / "zarr.json").write_text(json.dumps(root))
    assert_same_bits(restore(saved, (2, 2))[1], numpy_state())
    said = capsys.readouterr().err
    assert says(f"checkpoint {folder} does not say which chunk belongs where", said) and said.count("\n") == 1
    file = folder / "weights" / "embed" / "c.1.2"
    file.write_bytes(file.read_bytes()[:-5] + b"damag")
    assert_refuses("embed/c.1.2 cannot be decoded (ValueError: ", restore, saved)


def test_many_that_are_damaged(saved, capfd):
    """A checkpoint without checksums whose metadata are all nonsense gets one line, no traceback of another library."""
    root = saved / "0000000020/zarr.json"
    stored = json.loads(root.read_text())
    del stored["attributes"]["metadata_crc32c"]
    root.write_text(json.dumps(stored))
    for file in saved.rglob("*/*/zarr.json"):
        if file != root:
            file.write_text("{}")
    assert_refuses("its metadata cannot be read ('node_type')", restore, saved)
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err


# ---- what others have written ----------------------------------------------------------------------------------------


def write_published(directory, state, separator="", prefix=""):
    """A checkpoint as it is published: zarr format 2, blosc, unevenly chunked, one array a leaf by path."""
    group = zarr.create_group(directory / "0000000020", zarr_format=2)
    blosc = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
    options = {"compressors": blosc, "config": {"write_empty_chunks": True}}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name, chunks = prefix + jax.tree_util.keystr(path, simple=True, separator=separator), np.minimum(leaf.shape, 5)
        group.create_array(name, data=leaf, chunks=tuple(chunks.tolist()), **options)
    group.attrs["write_completed"] = True


@pytest.mark.parametrize("separator, prefix, name", [("", "", "weightsembed"), (".", ".", ".weights.embed")])
def test_published(tmp_path, separator, prefix, name):
    """`weightstransformerw_q` and `.weights.transformer.w_q` in zarr format 2 with blosc restore bit for bit. A chunk
    that is missing, cut short or cannot be decoded is an error."""
    state = numpy_state()
    write_published(tmp_path, state, separator, prefix)
    assert_same_bits(restore(tmp_path, (4, 2))[1], state)
    file = tmp_path / "0000000020" / name / "2.1"
    content = file.read_bytes()
    for damaged, why in ((content[:40], "it has 40 bytes … 116"), (b"\xff" * 12 + content[12:], "it unpacks")):
        file.write_bytes(damaged)
        assert_refuses(f"{name}/2.1 cannot be decoded (ValueError: {why}", restore, tmp_path)
    file.unlink()
    assert_refuses(f"{name}/2.1 is missing", restore, tmp_path)


@pytest.mark.parametrize("shards", [None, (8, 24)])
def test_format_3_of_another_writer(tmp_path, shards):
    """Format 3 with other codecs, uneven chunks, or many chunks in a file (zarr's shards), restores bit for bit."""
    state = numpy_state()
    group = zarr.create_group(tmp_path / "0000000020")
    for (name, *_), leaf in checkpoint.named_leaves(state):
        settings = {"chunks": (4, 8), "shards": shards} if shards and name == "weights/embed" else {}
        settings = settings or {"chunks": tuple(math.ceil(size / 2) for size in leaf.shape)}
        group.create_array(name, data=leaf, config={"write_empty_chunks": True}, **settings)
    group.attrs["write_completed"] = True
    assert "metadata_crc32c" not in json.loads((tmp_path / "0000000020" / "zarr.json").read_text())["attributes"]
    assert_same_bits(restore(tmp_path, (2, 2))[1], state)
