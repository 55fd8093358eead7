"""Checkpoints in an object store: moto's S3 server on this machine, alone and behind a proxy that fails as such stores
do."""

import os
import random
import time

import fsspec
import jax.numpy as jnp
import pytest
import small
import zarr
from checkpoint_state import CHUNKS, assert_same_bits, like, mesh_of, numpy_state, open_checkpoints, put, restore, save
from faulty_proxy import FaultyProxy
from parts import assert_refuses, says

from runtime.checkpoints.lock import Ownership
from runtime.checkpoints.store import LocalStore, open_store
from runtime.terminal import RunError
from tools.checkpoint import find


@pytest.fixture
def proxy(object_store, object_store_server, monkeypatch):
    """What stands between the client and the store."""
    import s3fs

    with FaultyProxy(object_store_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy


@pytest.mark.parametrize("kind", ["local", "file", "s3", "memory"])
def test_the_verbs_mean_the_same(tmp_path, request, kind):
    """Reading, writing, listing, moving and removing do the same on a disk, through file://, on S3 and on a file system
    without coroutines."""
    roots = {"local": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": f"memory://{tmp_path.name}"}
    store = open_store(request.getfixturevalue("object_store") + "/a" if kind == "s3" else roots[kind], 20)
    assert isinstance(store, LocalStore) == (kind in ("local", "file"))
    assert store.names() == [] and store.names("x") == []
    with pytest.raises(FileNotFoundError):
        store.read("x/y")
    store.write("x/y/z", b"ab", b"cd")
    store.write("x/y/z", b"abc", b"def")
    store.write("x/w", b"")
    store.write("v", b"1")
    store.flush("x")
    assert store.read("x/y/z") == b"abcdef" and store.read("x/w") == b""
    assert sorted(store.names()) == ["v", "x"] and sorted(store.names("x")) == ["w", "y"]
    assert store.files("x") == {"y/z": 6, "w": 0}
    store.move("x", "u")
    assert store.files("u") == {"y/z": 6, "w": 0} and sorted(store.names()) == ["u", "v"]
    for name in ("v", "nothing", "u", "u"):
        store.remove(name)
    assert store.names() == [] and store.files("u") == {}


def test_a_run_of_checkpoints(object_store, capsys):
    """Saving behind, retention, plain zarr, restoring on another mesh, and falling back work on S3 as on a disk."""
    directory = f"{object_store}/runs/a/checkpoints"
    checkpoints = open_checkpoints(directory, waits=False, keep_last=2)
    assert checkpoints.latest() is None
    for step in (10, 20, 30):
        checkpoints.save(step, put(numpy_state(step), mesh_of(4, 2)), {"at": step})
    checkpoints.close()
    files = fsspec.url_to_fs(directory, use_listings_cache=False)[0]
    root = directory.removeprefix("s3://")
    assert [path.rpartition("/")[2] for path in files.ls(root)] == ["0000000020", "0000000030"]
    assert len(files.find(f"{root}/0000000030")) == CHUNKS + 9
    group = zarr.open_group(f"{directory}/0000000030", mode="r")
    assert group["weights/embed"][...].tobytes() == numpy_state(30).weights.embed.tobytes()

    files.rm_file(f"{root}/0000000030/weights/embed/c.1.2")
    checkpoints = open_checkpoints(directory)
    step, state = checkpoints.restore(like(2, 4))
    assert step == 20 and checkpoints.attributes(step) == {"at": 20}
    assert_same_bits(state, numpy_state(20))
    said = capsys.readouterr().err
    fault = "is damaged: weights/embed/c.1.2 is missing"
    assert says(f"passed over: checkpoint {directory}/0000000030 {fault}", said) and said.count("\n") == 1
    checkpoints.save(30, put(numpy_state(31), mesh_of(4, 2)), {})
    assert_same_bits(restore(directory, (1, 1))[1], numpy_state(31))
    assert len(files.find(f"{root}/0000000030.damaged")) == CHUNKS + 8


@pytest.mark.parametrize("fault", [*small.slow("500", "503", "cut"), "cut answer"])
def test_a_store_that_fails_now_and_then(object_store, proxy, fault, record_property):
    """Saving, restoring and deleting succeed, with the same bits, although 30 % of the requests fail at random."""
    rng = random.Random(1)
    proxy.fault = lambda method, path, count: fault if rng.random() < 0.3 else None
    directory = f"{object_store}/checkpoints"
    checkpoints = open_checkpoints(directory, keep_last=1, timeout_s=60, threads=8)
    for step in (10, 20):
        checkpoints.save(step, put(numpy_state(step), mesh_of(4, 2)), {})
    step, state = open_checkpoints(directory, timeout_s=60).restore(like(2, 4))
    proxy.fault = lambda *_: None
    assert step == 20
    assert_same_bits(state, numpy_state(20))
    assert open_store(directory, 20).names() == ["0000000020"]
    assert proxy.faults[fault] > 20
    said = f"{proxy.faults[fault]} of {proxy.requests} requests failed, none of the operations"
    record_property("summary", f"object store, {fault}: {said}")


def test_a_request_that_hangs(object_store, proxy):
    """A request that is never answered is given up after a third of the time, and tried again."""
    hung = []

    def fault(method, path, count):
        if method == "PUT" and "embed/c.1.2" in path and not hung:
            return hung.append(path) or "hang"

    proxy.fault = fault
    began = time.monotonic()
    open_checkpoints(f"{object_store}/checkpoints", timeout_s=12).save(10, put(numpy_state(), mesh_of(4, 2)), {})
    assert len(hung) == 1 and 4 <= time.monotonic() - began
    assert_same_bits(restore(f"{object_store}/checkpoints")[1], numpy_state())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "cut"])
def test_a_store_that_is_down(object_store, proxy, fault):
    """A store that does not come back in time stops the next step with the object's path, the attempts and the cause;
    the checkpoint before stays."""
    directory = f"{object_store}/checkpoints"
    save(directory, 10)
    proxy.fault = lambda method, path, count: fault if method == "PUT" and "0000000020/weights" in path else None
    checkpoints = open_checkpoints(directory, waits=False, timeout_s=3)
    checkpoints.save(20, put(numpy_state(), mesh_of(4, 2)), {})
    parts = f"{directory}/0000000020/weights/ … could not be written: TimeoutError: … attempts in … s failed"
    assert_refuses(parts, checkpoints.close)
    proxy.fault = lambda *_: None
    assert open_checkpoints(directory).latest() == 10
    save(directory, 20)
    assert open_checkpoints(directory).latest() == 20


def test_what_is_refused_is_not_tried_again(object_store):
    """A bucket that is not there, on which no attempt would have any effect, is reported at once."""
    checkpoints = open_checkpoints("s3://there-is-no-such-bucket/a", timeout_s=600)
    began = time.monotonic()
    parts = "s3://there-is-no-such-bucket/a/0000000010/w/c.0 could not be written: FileNotFoundError: "
    assert_refuses(parts, checkpoints.save, 10, {"w": jnp.zeros(4)}, {})
    assert time.monotonic() - began < 300  # of the 600 that it has


@pytest.mark.parametrize("url, what", [
    ("s3://some-bucket/a", "credentials. Fix: write ~/.aws/credentials, or set AWS_ACCESS_KEY_ID"),
    ("s3://Bad_Bucket!/a", 'Invalid bucket name "Bad_Bucket!": … Fix: write the URL'),
    ("data://a", "it cannot do that. Fix: take a directory, or"),
])  # fmt: skip
def test_what_a_store_refuses(tmp_path, monkeypatch, url, what):
    """Missing credentials, a bucket's name that is none, and a protocol without folders are one line each, at once,
    wherever the store is touched first."""
    import s3fs

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    touches = (open_checkpoints(url).latest, Ownership(url).__enter__, lambda: find(url))
    for touch in touches[:: 1 if url.startswith("s3") else 2]:
        with pytest.raises(RunError) as error:
            touch()
        assert says(f"{url} cannot be used: … {what}", str(error.value)) and "\n" not in str(error.value)
    s3fs.S3FileSystem.clear_instance_cache()
