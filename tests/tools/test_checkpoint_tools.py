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
    """The lines that the tool prints, and what it says of an error; without one nothing."""

    def call(*arguments, status=0):
        found, out, error = called(checkpoint.main, checkpoint.LookAt, *arguments)
        assert found == status and (status or not error), error
        return out.splitlines(), error

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
    """A run folder, its checkpoints, or one: each is read through."""
    expected = r"00000000{}: whole, 26 chunks of 5 leaves, 3.27 kB, read in \d+\.\d s"
    for path, steps in ((saved, (10, 20)), (saved.parent, (10, 20)), (f"{saved}/0000000010/", (10,))):
        lines, _ = run("verify", path)
        assert len(lines) == len(steps)
        assert all(re.fullmatch(expected.format(step), line) for step, line in zip(steps, lines))


def test_verify_damaged_ones(run, saved):
    """Every bad chunk is listed, incomplete ones are named, and the status is 1."""
    (saved / "0000000010" / "counts" / "step" / "c").unlink()
    file = saved / "0000000010" / "weights" / "embed" / "c.1.2"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    (saved / "0000000020" / "weights" / "embed" / "zarr.json").write_text("{}")
    (saved / "0000000030").mkdir()
    lines, _ = run("verify", saved, status=1)
    assert re.fullmatch(r"0000000010: DAMAGED, 2 of 26 chunks of 5 leaves, .*", lines[0])
    parts = "counts/step/c is missing … weights/embed/c.1.2 does not have the checksum"
    assert says(parts, "".join(sorted(lines[1:3])))
    parts = "0000000020: DAMAGED weights/embed/zarr.json does not have the checksum … 0000000030: incomplete"
    assert says(parts, "\n".join(lines[3:])) and len(lines) == 6


def test_what_is_refused(run, saved, tmp_path):
    """A folder without a checkpoint, and one path too few or too many: what was expected."""
    (tmp_path / "empty").mkdir()
    none = f"error: … no checkpoint at {tmp_path}/empty: expected a run folder"
    of_paths = "error: diff takes two paths, show"
    for arguments, message in (
        (("verify", tmp_path / "empty"), none), (("diff", saved), of_paths), (("show", saved, saved), of_paths),
        (("verify", saved, saved), of_paths),
    ):  # fmt: skip
        assert says(message, run(*arguments, status=1)[1])


def test_inspect_one(run, saved):
    """It prints path, attributes, and each leaf's type, shape, size and norm, of a moment in bfloat16 too; values that
    are not finite are counted."""
    lines, _ = run("show", saved)
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
    assert any(line.endswith("nan  3 not finite") for line in run("show", saved)[0])
    for step, moment in (40, [3.0, -4.0]), (50, [3.0, -4.5]):
        bits = jnp.array(moment, jnp.bfloat16).view(jnp.uint16)
        open_checkpoints(saved).save(step, {"adam_mu": bits}, {"config": {}})
    assert run("show", saved / "0000000040")[0][-2].split() == ["adam_mu", "bfloat16", "[2]", "4", "B", "5"]
    assert run("diff", saved / "0000000040", saved)[0][3] == "adam_mu  1 of 2 values, by 0.5 at most"


def test_names_and_passwords_of_others(run, saved):
    """A password in a URL is not printed, nor a control character that a leaf's name has."""
    config = {"initial_weights": "ftp://me:secret@host/x"}
    open_checkpoints(saved).save(30, {"a\x1b[2Jb": jnp.zeros(4)}, {"config": config})
    for arguments in (("show", saved), ("diff", saved, saved / "0000000010")):
        text = "\n".join(run(*arguments)[0])
        assert "ftp://me:***@host/x" in text and "a\\x1b[2Jb" in text


def test_compare_two(run, saved, tmp_path):
    """Attributes that differ, and each leaf that does: how many values, and by how much; or in which shape."""
    assert run("diff", saved / "0000000010", saved)[0] == [
        f"first   {saved}/0000000010", f"second  {saved}/0000000020", "  config.mesh.d: 4 -> 8", "  seed: null -> 1",
        "leaf           what differs", "counts/step    1 of 1 values, by 2 at most",
        "weights/embed  1 of 384 values, by 0.5 at most", "3 leaves are the same bit for bit, 2 differ",
    ]  # fmt: skip
    state = numpy_state()
    state.weights.embed = np.zeros((16, 16), np.float32)
    save(tmp_path / "b", 10, state)
    lines, _ = run("diff", saved / "0000000010", tmp_path / "b")
    assert "weights/embed  float32[16, 24] -> float32[16, 16]" in lines
