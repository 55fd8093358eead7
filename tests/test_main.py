"""`python -m train` from its command line to its run folder, on a model that compiles in seconds."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import several_hosts as hosts
import small
from pages import module_of, train_py

import tools.make_dataset as tool
import train
from runtime.config.command_line import load

TINY = """model.d_model=32 model.n_kv=4 model.d_head=8 model.d_ff=64 model.vocab=128 training.tokens.batch=16
    training.tokens.len=32 training.steps=12 training.warmup_steps=2 training.steps_for_lr=12 checkpoint_interval=4
    eval_interval=6 log_interval=1""".split()


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory):
    TINY.append(hosts.write_tiny(tmp_path_factory.mktemp("data")))
    yield
    TINY.pop()


def start(monkeypatch, *overrides):
    """Runs as `python -m train <TINY> <overrides>` would; returns the exit status."""
    return small.start_training(monkeypatch, *TINY, *overrides)


def losses(folder):
    return dict(hosts.losses(folder))


@pytest.fixture(scope="module")
@small.proved_elsewhere()
def uninterrupted(data, tmp_path_factory):
    """The folder of a run of 12 steps on the mesh 4 x 2, never stopped."""
    folder = tmp_path_factory.mktemp("runs")
    where = [f"paths.root_working_dir={folder}", "paths.model_name=whole"]
    train.main(load(train.Config, "local_test_synthetic", [*TINY, *where]))
    return folder / "whole"


def test_a_run_leaves_all_that_it_should(uninterrupted):
    """Config, metrics with the documented keys, the ledger, the compiled step as text, checkpoints at each interval and
    the end. Each array of the step's new state takes the place of the old one's: the state is donated."""
    head, _, _ = (uninterrupted / "step.hlo.txt").read_text().partition("\n")
    state, _ = train.shapes(load(train.Config))
    assert len(re.findall("(?:may|must)-alias", head)) == len(jax.tree.leaves(state))
    names = {"config.yaml", "metrics.jsonl", "step.hlo.txt", "ledger.html", "checkpoints", "profile"}
    assert names <= {path.name for path in uninterrupted.iterdir()}
    lines = hosts.records(uninterrupted)
    assert [line["step"] for line in lines if "validation_loss" in line] == [6, 12]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    named = "step loss learning_rate grad_norm weight_norm tokens_per_s step_time_s mfu skipped_steps".split()
    assert all(set(named) <= set(line) for line in steps)
    assert hosts.checkpoints(uninterrupted) == [4, 8, 12]


@pytest.mark.usefixtures("proved_elsewhere")
def test_a_run_goes_on_on_another_mesh(uninterrupted, monkeypatch, tmp_path):
    """Stopped after 5 steps on 4 x 2 and resumed on 2 x 4, the losses are those of the uninterrupted run to bfloat16's
    rounding."""
    where = hosts.where(tmp_path / "moved")
    assert start(monkeypatch, *where, "training.steps=5") == 0
    assert start(monkeypatch, *where, "mesh.d=2", "mesh.t=4") == 0
    whole, moved = losses(uninterrupted), losses(tmp_path / "moved")
    assert all(moved[step] == whole[step] for step in range(1, 6))
    np.testing.assert_allclose(*([run[step] for step in range(6, 13)] for run in (moved, whole)), rtol=2e-3)


@pytest.mark.slow
def test_the_small_job_goes_on_bit_for_bit(tmp_path):
    """local_test_synthetic as users run it, stopped at step 20: the losses of steps 21 to 50 are bit for bit those of
    an uninterrupted run, and it has learnt more than frequencies."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    for name, last in [("whole", 50), ("halves", 20), ("halves", 50)]:
        where = [f"paths.root_working_dir={tmp_path}", f"paths.model_name={name}", f"training.steps={last}"]
        often = ["log_interval=1", "eval_interval=50"]
        subprocess.run([sys.executable, "-m", "train", *where, *often], check=True, env=environment)
    whole = losses(tmp_path / "whole")
    assert len(whole) == 50 and losses(tmp_path / "halves") == whole
    (*_, validation) = (line for line in hosts.records(tmp_path / "whole") if "validation_loss" in line)
    tokens = np.concatenate(tool.generate(load(tool.MakeDataset, None, []), "validation"))
    assert validation["validation_loss"] < tool.unigram_entropy(tokens)


@pytest.mark.parametrize("overrides, message", [
    (["flat_tokens.filespec=nowhere.zarr"], r"nowhere\.zarr.*does not exist"),
    (["model.vocab=64"], r"model\.vocab = 64: the data set .*tiny\.zarr has token ids up to 127: set"),
    (["training.steps=100000"],
     r"training\.steps = 100000: the data set .*tiny\.zarr holds \d+ steps in flat_tokens\.epochs = 1: set"),
    (["mesh.d=16"],
     r"mesh\.d × mesh\.t = 16 × 2: expected 8 devices.*XLA_FLAGS=--xla_force_host_platform_device_count=32"),
    (["num_hosts=1", "training.tokens.batch=62"], r"training\.tokens\.batch = 62"),
    (["checkpoint_interval=0"], r"checkpoint_interval = 0"),
    (["training.steps=-5"], r"training\.steps = -5"),
    (["+paths.mistyped=x"], r"paths\.mistyped is not a key"),
], ids=lambda value: value[0] if isinstance(value, list) else "")  # fmt: skip
def test_bad_input_is_one_message_and_no_traceback(overrides, message, monkeypatch, capsys, tmp_path):
    """What cannot run ends with status 1 and a message that names the key and the fix, before anything is compiled or
    written."""
    assert start(monkeypatch, f"paths.root_working_dir={tmp_path}/runs", *overrides) == 1
    printed = capsys.readouterr().err
    assert re.search(message, printed, re.DOTALL) and printed.startswith("error: ") and "Traceback" not in printed
    assert not (tmp_path / "runs").exists()


def test_a_wrong_program_is_refused(monkeypatch, capsys, tmp_path):
    """A run, and check_only, of a program whose layers do not add up the terms of their products ends with status 1 and
    a message that names the line; no traceback."""
    right, where = train.shardops.psum_scatter, f"paths.root_working_dir={tmp_path}"
    monkeypatch.setattr(
        train.shardops, "psum_scatter", lambda spec, x: x if spec == 'B/d L M +t -> B/d L M/t' else right(spec, x)
    )
    for keys, message in [
        (["check_only=true"], "error: training_step is refused on"),
        ([where], "error: 'B/d L M/t' says M/t"),
    ]:
        assert start(monkeypatch, *keys) == 1
        printed = capsys.readouterr().err
        assert printed.startswith(message) and "Traceback" not in printed
        assert re.search(r"\n  at .*train\.py:\d+\n", printed) and printed.count("\n") < 10


def test_a_weight_without_a_first_value(monkeypatch, capsys, tmp_path):
    """A field that Layer declares and init_state does not make is one message with both places, and no traceback."""
    declared = "    w_down: f32['M/d F/t']"
    source = train_py().replace(declared, f"{declared}\n    w_new: f32['M/d F/t']")
    made, new = (source.splitlines().index(line) + 1 for line in ("    layer = Layer(", "    w_new: f32['M/d F/t']"))
    monkeypatch.setattr(train, "init_state", module_of(tmp_path / "train.py", source).init_state)
    assert start(monkeypatch, "check_only=true") == 1
    says = f"/train.py:{made}: Layer has no w_new, which line {new} declares: give it its first value here, w_new=...\n"
    assert re.fullmatch(rf"error: \S+{re.escape(says)}", capsys.readouterr().err)
