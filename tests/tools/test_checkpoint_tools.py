"""The tools that people look at checkpoints with: what they print, and their exit status."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_state import numpy_state, open_checkpoints, save
from parts import says

from tools import checkpoint


@pytest.fixture
def run(called):
    """Calls the tool with arguments: its exit status, and the lines of its output, and what it says of an error."""

    def call(*arguments):
        status, out, error = called(checkpoint.main, checkpoint.LookAt, *arguments)
        return status, out.splitlines(), error.splitlines()

    return call


@pytest.fixture
def saved(tmp_path):
    """Two steps of a run that differ in two leaves and in two attributes."""
    state = numpy_state()
    state.weights.embed = np.linspace(-1, 1, 384, dtype=np.float32).reshape(16, 24)
    save(tmp_path / "checkpoints", 10, state, {"skipped_steps": 0, "config": {"mesh": {"d": 4}, "steps": 10}})
    state.weights.embed[3, 4] += 0.5
    state.counts["step"] = np.array(9, np.int32)
    attributes = {"skipped_steps": 0, "config": {"mesh": {"d": 8}, "steps": 10}, "seed": 1}
    save(tmp_path / "checkpoints", 20, state, attributes)
    return tmp_path / "checkpoints"


def test_verify_whole_ones(run, saved):
    """A run folder, its checkpoints, or one: each is read through, and the status is 0."""
    expected = r"00000000{}: whole, 26 chunks of 5 leaves, 3.27 kB, read in \d+\.\d s"
    for path in (saved, saved.parent):
        status, lines, errors = run("verify", path)
        assert (status, errors) == (0, []) and len(lines) == 2
        assert all(re.fullmatch(expected.format(step), line) for step, line in zip((10, 20), lines))
    status, lines, _ = run("verify", f"{saved}/0000000010/")
    assert status == 0 and len(lines) == 1 and lines[0].startswith("0000000010: whole")


def test_verify_damaged_ones(run, saved):
    """Every bad chunk is listed, incomplete ones are named, and the status is 1."""
    (saved / "0000000010" / "counts" / "step" / "c").unlink()
    file = saved / "0000000010" / "weights" / "embed" / "c.1.2"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    (saved / "0000000020" / "weights" / "embed" / "zarr.json").write_text("{}")
    (saved / "0000000030").mkdir()
    status, lines, _ = run("verify", saved)
    assert status == 1
    assert re.fullmatch(r"0000000010: DAMAGED, 2 of 26 chunks of 5 leaves, .*", lines[0])
    parts = "counts/step/c is missing … weights/embed/c.1.2 does not have the checksum"
    assert says(parts, "".join(sorted(lines[1:3])))
    parts = "0000000020: DAMAGED weights/embed/zarr.json does not have the checksum … 0000000030: incomplete"
    assert says(parts, "\n".join(lines[3:])) and len(lines) == 6


def test_verify_nothing(run, tmp_path):
    """The status is 1 and the message says what was expected."""
    status, _, errors = run("verify", tmp_path)
    assert status == 1 and says(f"error: … no checkpoint at {tmp_path}: expected a run folder", *errors)


def test_paths_that_do_not_go_with_what_is_asked(run, saved):
    """One too few or too many ends with status 1 and says how many each takes."""
    for arguments in (("diff", saved), ("show", saved, saved), ("verify", saved, saved)):
        status, _, errors = run(*arguments)
        assert status == 1 and says("error: diff takes two paths, show", *errors)


def test_inspect_one(run, saved):
    """It prints path, attributes, and each leaf's type, shape, size and norm; values that are not finite are
    counted."""
    status, lines, errors = run("show", saved)
    assert (status, errors) == (0, [])
    assert lines[:5] == [
        f"checkpoint {saved}/0000000020", "  skipped_steps: 0", "  config.mesh.d: 8", "  config.steps: 10", "  seed: 1",
    ]  # fmt: skip
    embed = np.linspace(-1, 1, 384, dtype=np.float32)
    embed[3 * 24 + 4] += 0.5
    norm = f"{np.linalg.norm(embed.astype(np.float64)):.6g}"
    rows = [line.split() for line in lines[5:]]
    assert rows[0] == ["leaf", "dtype", "shape", "size", "norm"]
    assert rows[2] == ["counts/step", "int32", "[]", "4", "B", "9"]
    assert rows[3] == ["weights/embed", "float32", "[16,", "24]", "1.54", "kB", norm]
    assert lines[-1] == "5 leaves, 822 values, 3.27 kB"
    state = numpy_state()
    state.weights.transformer.w_q[0, 0, :3] = np.nan
    save(saved, 30, state)
    assert any(line.endswith("nan  3 not finite") for line in run("show", saved)[1])


def test_names_and_passwords_of_others(run, saved):
    """A password in a URL is not printed, nor a control character that a leaf's name has."""
    config = {"initial_weights": "ftp://me:secret@host/x"}
    open_checkpoints(saved).save(30, {"a\x1b[2Jb": jnp.zeros(4)}, {"config": config})
    for arguments in (("show", saved), ("diff", saved, saved / "0000000010")):
        status, lines, _ = run(*arguments)
        text = "\n".join(lines)
        assert status == 0 and "ftp://me:***@host/x" in text and "a\\x1b[2Jb" in text


def test_compare_two(run, saved):
    """Attributes that differ, and each leaf that does: how many values, and by how much."""
    status, lines, _ = run("diff", saved / "0000000010", saved)
    assert status == 0
    assert lines == [
        f"first   {saved}/0000000010", f"second  {saved}/0000000020", "  config.mesh.d: 4 -> 8", "  seed: null -> 1",
        "leaf           what differs", "counts/step    1 of 1 values, by 2 at most",
        "weights/embed  1 of 384 values, by 0.5 at most", "3 leaves are the same bit for bit, 2 differ",
    ]  # fmt: skip


def test_compare_other_models(run, saved, tmp_path):
    """Leaves of other shapes, and those that only one has, are named."""
    state = numpy_state()
    state.weights.embed = np.zeros((16, 16), np.float32)
    save(tmp_path / "b", 10, state)
    lines = run("diff", saved / "0000000010", tmp_path / "b")[1]
    assert "weights/embed  float32[16, 24] -> float32[16, 16]" in lines
