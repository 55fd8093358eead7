"""A run's checkpoints: nothing that is called complete is not, and whatever is lost, an older one is gone back to."""

import functools
import itertools
import os
import random
import re
import resource
import shutil
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import zarr
from checkpoint_state import CHUNKS, assert_same_bits, like, mesh_of, numpy_state, open_checkpoints, put, restore, save
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parts import assert_refuses, says

from runtime.checkpoints import checkpoint
from runtime.checkpoints import writing as checkpoint_writing
from runtime.checkpoints.store import LocalStore
from runtime.terminal import RunError
from tools import checkpoint as checkpoint_tool


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def writes(monkeypatch):
    """Lets a test decide what happens to each write of a file: `writes.before = function(store, name, write)`."""

    class Writes:
        before = staticmethod(lambda store, name, write: write())

    original = LocalStore.write

    def intercepted(store, name, *parts):
        Writes.before(store, name, lambda: original(store, name, *parts))

    monkeypatch.setattr(LocalStore, "write", intercepted)
    return Writes


# ---- saving behind the steps -----------------------------------------------------------------------------------------


def test_saving_returns_when_the_state_is_copied(tmp_path, writes):
    """While no file can be written yet, `save` has returned, the arrays are overwritten by the next step, and what is
    saved is the old state."""
    may_write = threading.Event()
    writes.before = lambda store, name, write: (may_write.wait(), write())
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    tree = {"w": jax.device_put(jnp.arange(64.0), NamedSharding(mesh_of(4, 2), P("d")))}
    checkpoints = open_checkpoints(tmp_path, waits=False)
    stall_s = checkpoints.save(1, tree, {"is": "old"})
    jax.block_until_ready(step(tree))
    checkpoints.raise_failure()
    assert 0 < stall_s and not (tmp_path / "0000000001" / "zarr.json").exists()
    may_write.set()
    checkpoints.close()
    restored = open_checkpoints(tmp_path).restore(tree)[1]
    np.testing.assert_array_equal(restored["w"], np.arange(64.0))


def test_the_next_save_waits_for_the_one_before(tmp_path, writes):
    """Memory never holds two copies of the state: the second save begins when the first is complete, and its stall
    includes the wait."""
    began, asked = [], threading.Event()

    def slow(store, name, write):
        began.append(name[:10])
        if name.startswith("0000000001") and name.endswith("step/c"):
            assert asked.wait(600)  # the first save has returned, and the second begins
            time.sleep(0.5)
        write()

    writes.before = slow
    checkpoints = open_checkpoints(tmp_path, waits=False)
    state = put(numpy_state(), mesh_of(4, 2))
    checkpoints.save(1, state, {})
    asked.set()
    assert checkpoints.save(2, state, {}) > 0.2
    checkpoints.close()
    assert began == sorted(began)
    assert names(tmp_path) == ["0000000001", "0000000002"]


def fail(store, name, write):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("failing", ["w_q/c.2.3.1", "embed/zarr.json", "0000000020/zarr.json"])
def test_a_failure_behind_stops_at_the_next_step(tmp_path, writes, failing, monkeypatch):
    """Any failing write raises path and cause at the next step, once, and the checkpoint before stays the latest. A run
    that does not ask gets it from the next save, or at the end from `close`."""
    monkeypatch.setattr(checkpoint_writing, "MAX_CHUNK_BYTES", 64)  # many chunks are written after the one that fails
    save(tmp_path, 10)
    state = put(numpy_state(), mesh_of(4, 2))
    writes.before = lambda store, name, write: fail(store, name, write) if name.endswith(failing) else write()
    checkpoints = open_checkpoints(tmp_path, waits=False)
    checkpoints.save(20, state, {})
    match = rf"^{tmp_path}/\S*0000000020\S* could not be \w+: OSError: .*Input/output error"
    with pytest.raises(RunError, match=match):
        for _ in range(5000):
            checkpoints.raise_failure()
            time.sleep(0.02)
    checkpoints.raise_failure()
    assert checkpoints.latest() == 10
    writes.before = fail
    checkpoints.save(30, state, {})
    assert_refuses("0000000030/ … could not be written: OSError", checkpoints.save, 40, state, {})
    assert not (tmp_path / "0000000040").exists()
    checkpoints.save(50, state, {})
    assert_refuses("0000000050/ … could not be written: OSError", checkpoints.close)


# ---- what is complete ------------------------------------------------------------------------------------------------


def test_incomplete_ones_are_passed_over_and_named(tmp_path, capsys):
    """The latest step is the newest complete one; newer ones without marker, metadata or group are named on stderr,
    once, and not restored when they are asked for. A plain file is none. An empty directory, or none, has no latest."""
    for directory in (tmp_path, tmp_path / "nowhere"):
        assert open_checkpoints(directory).latest() is None
        assert_refuses(f"no complete checkpoint in {directory}", restore, directory)
    for step in (20, 30):
        save(tmp_path, step)
    zarr.open_group(tmp_path / "0000000030", mode="r+").attrs["write_completed"] = False
    (tmp_path / "0000000040").mkdir()
    (tmp_path / "0000000050").mkdir()
    (tmp_path / "0000000050" / "zarr.json").write_text('{"zarr_format": 3, "node_ty')
    (tmp_path / "0000000060").write_text("a note")
    checkpoints = open_checkpoints(tmp_path)
    assert checkpoints.latest() == checkpoints.latest() == checkpoints.restore(like(4, 2))[0] == 20
    lines = capsys.readouterr().err.splitlines()
    incomplete = f"checkpoint {tmp_path}/00000000{{}} was not written"
    assert lines[1].startswith(f"passed over: checkpoint {tmp_path}/0000000050 is damaged: zarr.json ")
    assert len(lines) == 4
    for step, line in zip((60, 40, 30), [lines[0], *lines[2:]]):
        assert line.startswith(f"passed over: {incomplete.format(step)}")
    for step in (30, 31):
        assert_refuses(incomplete.format(step), checkpoints.attributes, step)
    save(tmp_path, 60)
    assert open_checkpoints(tmp_path).latest() == 60
    assert capsys.readouterr().err == ""


def test_a_linked_checkpoint(tmp_path):
    """A folder that is a link is read as a checkpoint; deleting it takes the link away and leaves what it leads to."""
    tree = {"w": jnp.arange(4.0)}
    mine, theirs = tmp_path / "run", tmp_path / "other"
    open_checkpoints(theirs).save(10, tree, {})
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    mine.mkdir()
    (mine / "0000000010").symlink_to(theirs / "0000000010")
    checkpoints = open_checkpoints(mine, keep_last=1)
    assert checkpoints.latest() == 10
    for step in (20, 30):
        checkpoints.save(step, tree, {})
    assert names(mine) == ["0000000030"] and not (mine / "0000000030").is_symlink()
    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before


def denied(*_, **__):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("owner, verb, what", [
    (LocalStore, "read", "/0000000020 cannot be opened"), (LocalStore, "names", " cannot be listed"),
    (zarr, "open_array", "/0000000020 cannot be opened"),
])  # fmt: skip
def test_a_store_that_denies_is_an_error(tmp_path, monkeypatch, owner, verb, what):
    """An error of the machine (a permission; too few open files for zarr) stops the run: passing over a good
    checkpoint, or taking it for none, could lose work."""
    save(tmp_path, 20)
    monkeypatch.setattr(owner, verb, denied)
    assert_refuses(f"{tmp_path}{what}: PermissionError: [Errno 13]", restore, tmp_path, (1, 1))


def test_incomplete_is_replaced_and_complete_is_not(tmp_path):
    """Saving a step again replaces an incomplete group whole, its stray files too; a complete one is refused."""
    save(tmp_path, 20)
    state = numpy_state(1)
    assert_refuses("0000000020 is already there … ; remove it", save, tmp_path, 20, state)
    (tmp_path / "0000000020" / "zarr.json").unlink()
    (tmp_path / "0000000020" / "stray").mkdir()
    (tmp_path / "0000000020" / "stray" / "zarr.json").write_text("{}")
    save(tmp_path, 20, state, mesh=(2, 4))
    assert not (tmp_path / "0000000020" / "stray").exists()
    assert_same_bits(restore(tmp_path, (1, 1))[1], state)


@pytest.mark.parametrize("lost_when", ["at once", "later"])
def test_a_write_that_is_silently_lost_is_found(tmp_path, writes, lost_when):
    """A store that drops a chunk, or a part of it, and reports success gets no marker."""

    def lose(store, name, write):
        if lost_when == "at once" and name.endswith("embed/c.1.2"):
            return
        write()
        if lost_when == "later" and name.endswith("step/c"):
            os.truncate(tmp_path / name, 3)

    writes.before = lose
    message = {"at once": "weights/embed/c.1.2 is not there", "later": "counts/step/c has 3 bytes of 8"}[lost_when]
    assert_refuses(f"0000000020/{message} … Do all hosts share", save, tmp_path, 20)
    assert open_checkpoints(tmp_path).latest() is None


def test_everything_is_on_the_disk_before_the_marker(tmp_path, monkeypatch):
    """Every file and directory of the group was fsynced before the root's zarr.json came to be, and its directories
    after."""
    flushed, original = [], os.fsync
    root = tmp_path / "0000000020" / "zarr.json"

    def recording(descriptor):
        original(descriptor)
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), root.exists()))

    monkeypatch.setattr(os, "fsync", recording)
    save(tmp_path, 20)
    before = {path.removesuffix(".part") for path, is_there in flushed if not is_there}
    there = {str(path) for path in tmp_path.rglob("*")}
    assert there <= before and str(root) in before
    after = {path for path, is_there in flushed if is_there}
    assert {str(tmp_path / "0000000020"), str(tmp_path), str(tmp_path.parent)} <= after


# ---- falling back ----------------------------------------------------------------------------------------------------


def clear(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def copy(path, to):
    shutil.copytree(path, to) if path.is_dir() else shutil.copy(path, to)


def flip(path, draw):
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


OF_CONTENT = {
    "truncated": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    "flipped": flip,
    "longer": lambda path, draw: path.write_bytes(path.read_bytes() + draw.randbytes(9)),
    "random": lambda path, draw: path.write_bytes(draw.randbytes(path.stat().st_size)),
}
# What lies in its place instead; `other` is of the same kind, and has another content.
IN_ITS_PLACE = {
    "removed": lambda path, other: None,
    "of another step or place": lambda path, other: copy(other, path),
    "link to another": lambda path, other: path.symlink_to(other),
    "folder": lambda path, other: path.mkdir(),
    "dangling link": lambda path, other: path.symlink_to("no/where"),
    "link to itself": lambda path, other: path.symlink_to(path.name),
    "pipe": lambda path, other: os.mkfifo(path),
    "device": lambda path, other: path.symlink_to("/dev/zero"),
    "sparse file": lambda path, other: (path.touch(), os.truncate(path, 8 * 2**30)),
}


def damage(path, kind, draw, other=None):
    if kind in OF_CONTENT:
        return OF_CONTENT[kind](path, draw)
    clear(path)
    IN_ITS_PLACE[kind](path, other)


@pytest.mark.parametrize("ways", [1, *small.slow(3)])
def test_every_file_in_turn_is_damaged(ways, tmp_path, capsys, record_property):
    """Each chunk and each metadata file is truncated, has a byte flipped, or is removed (quickly: one of these): it is
    found and named, and the older checkpoint is restored with its attributes. The damaged checkpoint is left as it is;
    when all is as it was, the newest is restored."""
    older, newer, draw = numpy_state(1), numpy_state(2), random.Random(0)
    save(tmp_path, 10, older, {"skipped_steps": 1})
    save(tmp_path, 20, newer, {"skipped_steps": 2})
    newest = tmp_path / "0000000020"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    chunks = [file for file in files if file.name != "zarr.json"]
    assert len(chunks) == CHUNKS and len(files) == CHUNKS + 9
    shapes = like(2, 2)
    for (number, file), way in itertools.product(enumerate(files), range(ways)):
        content, kind = file.read_bytes(), ("truncated", "flipped", "removed")[(number + way) % 3]
        damage(file, kind, draw)
        checkpoints = open_checkpoints(tmp_path)
        step, restored = checkpoints.restore(shapes)
        assert step == checkpoints.latest() == 10, (file, kind)
        assert_same_bits(restored, older)
        assert checkpoints.attributes(step) == {"skipped_steps": 1}
        error = capsys.readouterr().err
        assert error.startswith(f"passed over: checkpoint {newest} ") and error.count("\n") == 1
        assert file == newest / "zarr.json" or str(file.relative_to(newest)) in error
        assert sorted(path for path in newest.rglob("*") if path.is_file()) == [f for f in files if f.exists()]
        checkpoints.close()
        file.write_bytes(content)
    assert_same_bits(restore(tmp_path, (4, 2))[1], newer)
    said = f"{len(chunks)} chunks and {len(files) - len(chunks)} of metadata: {ways * len(files)} damages found"
    record_property("summary", f"checkpoint files damaged: {said}, each with a fallback")


def drawn(seed, older, newest):
    """A file or a folder of the newest checkpoint, what happens to it, and another of its kind."""
    draw = random.Random(seed)
    paths = [newest, *sorted(newest.rglob("*"))]
    path = draw.choice(paths)
    kinds = [*IN_ITS_PLACE, *(OF_CONTENT if path.is_file() else ())]
    kind = draw.choice([kind for kind in kinds if kind != "folder" or path.is_file()])
    others = [older / path.relative_to(newest)]
    if path.is_file():
        others += [other for other in paths if other.is_file() and other.read_bytes() != path.read_bytes()]
    return path, kind, draw.choice(others)


@pytest.mark.parametrize("case", [
    *range(4), *small.slow(*range(4, 150)), "pipe of counts/step/zarr.json", "pipe of counts/step/c",
    *(f"{kind} of zarr.json" for kind in IN_ITS_PLACE if " another" not in kind),
])  # fmt: skip
def test_any_damage(case, tmp_path, capsys):
    """Whatever is damaged in whatever way, the checkpoint before is restored, verify tells the damaged one, and its
    step is saved again; nothing is waited for, no gigabyte is read, and what a link leads to is not changed."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in (10, 20):
        save(tmp_path, step, numpy_state(step))
    older, newest = tmp_path / "0000000010", tmp_path / "0000000020"
    before = {path: path.read_bytes() for path in older.rglob("*") if path.is_file()}
    if isinstance(case, int):
        path, kind, other = drawn(case, older, newest)
    else:
        kind, _, name = case.partition(" of ")
        path = other = newest / name
    damage(path, kind, random.Random(case), other)
    what = f"{path.relative_to(tmp_path)}: {kind}"
    is_there = path != newest or kind != "removed"
    if is_there:
        with pytest.raises(SystemExit) as status:
            checkpoint_tool.main(checkpoint_tool.LookAt(what="verify", path=str(tmp_path)))
        said = capsys.readouterr().out
        assert "0000000010: whole" in said and re.search("0000000020: (DAMAGED|incomplete)", said), what
        assert status.value.code == ("DAMAGED" in said), what
    checkpoints = open_checkpoints(tmp_path)
    step, state = checkpoints.restore(like(2, 2))
    assert step == 10 and (f"passed over: checkpoint {newest} " in capsys.readouterr().err) == is_there, what
    assert_same_bits(state, numpy_state(10))
    checkpoints.save(20, put(numpy_state(21), mesh_of(4, 2)), {})
    checkpoints.close()
    step, state = restore(tmp_path, (2, 2))
    assert step == 20, what
    assert_same_bits(state, numpy_state(21))
    assert {path: path.read_bytes() for path in before} == before, what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024, what


def test_the_one_that_was_passed_over_is_never_deleted(tmp_path, capsys):
    """A run that fell back from 20 and 30 saves both again: the damaged ones are moved aside, and retention leaves them
    alone."""
    for step in (10, 20, 30):
        save(tmp_path, step, numpy_state(step))
    for step in (20, 30):
        (tmp_path / f"00000000{step}" / "counts" / "step" / "c").write_bytes(b"damaged")
    checkpoints = open_checkpoints(tmp_path, keep_last=1)
    assert checkpoints.restore(like(4, 2))[0] == 10
    for step, left in (
        (15, ["0000000015", "0000000020", "0000000030"]),
        (20, ["0000000020", "0000000020.damaged", "0000000030"]),
        (30, ["0000000020.damaged", "0000000030", "0000000030.damaged"]),
    ):
        checkpoints.save(step, put(numpy_state(step + 1), mesh_of(4, 2)), {})
        assert names(tmp_path) == left and checkpoints.latest() in (15, 20, 30)
    assert (tmp_path / "0000000030.damaged" / "counts" / "step" / "c").read_bytes() == b"damaged"
    assert "moved aside, to 0000000030.damaged: checkpoint" in capsys.readouterr().err
    step, state = restore(tmp_path, (1, 1))
    assert step == 30
    assert_same_bits(state, numpy_state(31))


def test_the_last_step_is_read_whole(tmp_path, capsys):
    """Nobody restores a checkpoint of the last step, so it is read through before a run counts as done."""
    for step in (10, 20):
        save(tmp_path, step, numpy_state(step))
    assert open_checkpoints(tmp_path).latest(last_step=20) == 20
    (tmp_path / "0000000020" / "counts" / "step" / "c").write_bytes(b"damaged")
    assert open_checkpoints(tmp_path).latest() == open_checkpoints(tmp_path).latest(last_step=30) == 20
    capsys.readouterr()
    assert open_checkpoints(tmp_path).latest(last_step=20) == 10
    said = capsys.readouterr().err
    assert says(f"passed over: checkpoint {tmp_path}/0000000020 is damaged: counts/step/c", said)


def test_none_reads_whole(tmp_path):
    """All faults are listed, and nothing is restored or begun anew."""
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "0000000020" / "counts" / "step" / "c").unlink()
    (tmp_path / "0000000010" / "zarr.json").write_text("")
    parts = f"no checkpoint in {tmp_path} reads whole: … {tmp_path}/0000000020 is damaged: counts/step/c is missing"
    parts += f" … {tmp_path}/0000000010 is damaged: zarr.json cannot be read"
    checkpoints = open_checkpoints(tmp_path)
    for look in (lambda: checkpoints.restore(like(4, 2)), checkpoints.latest):
        assert_refuses(parts, look)


# ---- retention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last, keep_every, best, expected", [
    (None, 30, None, [10, 20, 30, 40, 50, 60]), (2, None, 40, [40, 50, 60]), (2, None, None, [50, 60]),
    (1, 20, 10, [10, 20, 40, 60]), (2, 30, None, [30, 50, 60]), (9, 30, 40, [10, 20, 30, 40, 50, 60]),
])  # fmt: skip
def test_what_is_kept(tmp_path, keep_last, keep_every, best, expected):
    """The newest `keep_last`, every multiple of `keep_every`, and the best are kept; all are where keep_last is
    None."""
    checkpoints = open_checkpoints(tmp_path, waits=False, keep_last=keep_last, keep_every=keep_every)
    tree = {"w": jnp.zeros(4)}
    for step in range(10, 61, 10):
        checkpoints.save(step, tree, {}, best)
    checkpoints.close()
    assert names(tmp_path) == [f"{step:010d}" for step in expected]


@pytest.mark.parametrize("stop_at", [1, 2, 3, 5, 8])
def test_deletion_that_is_interrupted(tmp_path, monkeypatch, pool, stop_at):
    """A deletion may be killed at any moment: its rest is never taken for a checkpoint, the newest is complete, and the
    next save deletes the rest."""
    tree = {"w": jnp.zeros(4), "x": jnp.zeros(4)}
    for step in (10, 20):
        open_checkpoints(tmp_path).save(step, tree, {})
    calls = itertools.count(1)

    def killed(original, *given, **options):
        if next(calls) >= stop_at:
            raise KeyboardInterrupt  # nothing of ours catches it, as nothing would run after a kill
        return original(*given, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for name in ("unlink", "rmdir"):  # rmtree's and ours
            patch.setattr(os, name, functools.partial(killed, getattr(os, name)))
        patch.setattr(shutil, "_use_fd_functions", False)
        open_checkpoints(tmp_path, keep_last=1).save(30, tree, {})
    left = [name for name in names(tmp_path) if (tmp_path / name / "zarr.json").exists()]
    assert left[-1] == "0000000030"
    for name in left:  # whole, or not there
        assert not checkpoint.verify(checkpoint.open_checkpoint(LocalStore(str(tmp_path)), name, pool), pool)[1]
    open_checkpoints(tmp_path, keep_last=1).save(40, tree, {})
    assert names(tmp_path) == ["0000000040"]


def test_a_deletion_that_fails_is_said(tmp_path, monkeypatch):
    """The run is stopped with the path of what could not be deleted; the newer checkpoint is complete."""
    tree = {"w": jnp.zeros(4)}
    open_checkpoints(tmp_path).save(10, tree, {})
    monkeypatch.setattr(LocalStore, "remove", denied)
    checkpoints = open_checkpoints(tmp_path, waits=False, keep_last=1)
    checkpoints.save(20, tree, {})
    assert_refuses("0000000010 could not be deleted: PermissionError: … denied", checkpoints.close)
    assert open_checkpoints(tmp_path).latest() == 20


# ---- disks that fill up ----------------------------------------------------------------------------------------------


def test_a_full_disk(tmp_path, monkeypatch):
    """A disk that takes no file over 100 kB (RLIMIT_FSIZE, a write that really fails) is an error, and the checkpoint
    before stays as it is. When there is room the same step is saved."""
    monkeypatch.setattr(checkpoint_writing, "MAX_CHUNK_BYTES", 2**17)
    tree = {"w": jax.device_put(np.ones((1024, 1024), np.float32), NamedSharding(mesh_of(4, 2), P('d', 't')))}
    open_checkpoints(tmp_path).save(10, tree, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        parts = "0000000020/w/c. … could not be written: OSError: … File too large"
        assert_refuses(parts, open_checkpoints(tmp_path).save, 20, tree, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_checkpoints(tmp_path).restore(tree)[0] == 10
    open_checkpoints(tmp_path).save(20, tree, {})
    step, restored = open_checkpoints(tmp_path).restore(tree)
    assert step == 20
    assert_same_bits(restored, tree)


@pytest.mark.parametrize("url, what", [
    ("nosuch://a/b", "Protocol not known"), ("gs://a/b", "… Fix: pip install gcsfs"),
    *((f"{kind}://a/b", "… Fix: take a directory, or the URL") for kind in ("zip", "tar", "reference")),
])  # fmt: skip
def test_urls_that_cannot_be_opened(monkeypatch, url, what):
    """A protocol that nobody knows, or that leads to no folder, is an error that says so; one whose package is missing
    names the pip command."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert_refuses(f"{url} cannot be opened: {what}", open_checkpoints, url)
