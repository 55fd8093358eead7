"""Another trainer, with a mesh of axes a, t and c and another model, has all that train.py has: no room knows the
axes."""

import json
from pathlib import Path

import pytest
import small
from parts import says
from several_hosts import logged, records, where

from runtime import program
from runtime.terminal import RunError
from tools import generate, plan, plan_step

TRAINER = program.load("tests.abc_trainer")
CONFIG = [f"--config-dir={Path(__file__).parent}", "--config-name=abc"]


def start(monkeypatch, *overrides, main=TRAINER.main, config_class=TRAINER.Config):
    """Runs as `python -m tests.abc_trainer <overrides>` would, or a tool; returns the exit status."""
    return small.start(monkeypatch, main, config_class, *CONFIG, *overrides)


def losses(folder):
    return [*logged(folder, "loss").items(), *logged(folder, "validation_loss").items()]


@pytest.fixture(scope="module")
@small.proved_elsewhere()
def whole(tmp_path_factory):
    """The folder of a run of 12 steps."""
    root = tmp_path_factory.mktemp("abc")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert start(monkeypatch, *where(root / "abc")) == 0
    return root / "abc"


def test_it_trains_and_validates(whole):
    """The loss falls; the validation loss is there twice; a norm for each of the weights, by its name."""
    found = losses(whole)  # the last two are of validation
    assert len(found) == 14 and found[11][1] < found[0][1] - 0.5
    assert [name for name in records(whole)[0] if name.startswith("grad_norm_of/")] == [
        "grad_norm_of/table", "grad_norm_of/w_in", "grad_norm_of/w_out",
    ]  # fmt: skip


def test_its_ledger_has_its_axes(whole):
    """What is sent is counted along a, b and c, and annotated in the trainer's own file."""
    ledger = json.loads((whole / "ledger.json").read_text())
    assert ledger["mesh"] == {"a": 2, "t": 2, "c": 2} and ledger["source"].endswith("abc_trainer.py")
    assert {tuple(row["axes"]) for row in ledger["collectives"]} >= {("a", "t"), ("c",), ("a", "t", "c")}


@pytest.mark.slow
@pytest.mark.usefixtures("proved_elsewhere")
def test_it_resumes_bit_for_bit(whole, monkeypatch, tmp_path):
    """A run that was stopped after 6 steps and started again on the same mesh has the losses of one that was not."""
    again = where(tmp_path / "abc")
    assert start(monkeypatch, *again, "training.steps=6", "training.steps_for_lr=12") == 0
    assert start(monkeypatch, *again) == 0
    assert losses(tmp_path / "abc") == losses(whole)
    starts = [json.loads(line) for line in (tmp_path / "abc" / "starts.jsonl").read_text().splitlines()]
    assert [record["after_step"] for record in starts] == [0, 6]


def test_its_sharding_is_checked(monkeypatch, capsys):
    """check_only proves both steps on a mesh for which there are no devices, and sizes are held against its axes."""
    assert start(monkeypatch, "check_only=true", "mesh.a=4", "mesh.c=8") == 0
    assert "training_step on the mesh a=4 × t=2 × c=8: " in capsys.readouterr().out
    assert start(monkeypatch, "check_only=true", "mesh.c=3") == 1
    assert says("dim V … c=3 cannot divide: set it to 1278 or 1281, or mesh.c to 2 or 4", capsys.readouterr().err)
    assert start(monkeypatch, "check_only=true", "training.tokens.batch=6") == 1
    assert says("training.tokens.batch = 6: dim B … a=2 × t=2 cannot divide: set it to 4", capsys.readouterr().err)


def test_it_is_planned(monkeypatch, capsys):
    """It is planned for a machine that is not here, on its own mesh and on all ten meshes of eight devices."""
    given = {"main": plan.main, "config_class": plan_step.plan_class(TRAINER)}
    overrides = ["program=tests.abc_trainer", "hardware=h200", "devices_per_host=8"]
    assert start(monkeypatch, *overrides, **given) == 0
    assert "abc on 8 × h200: 1 host of 8, mesh a=2 × t=2 × c=2; 16 × 32 tokens a step" in capsys.readouterr().out
    assert start(monkeypatch, *overrides, "hosts=1", "sweep=true", **given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["a", "t", "c", "keeps"]
    assert {tuple(line.split()[:3]) for line in lines if " everything " in line} == {
        ("8", "1", "1"), ("4", "2", "1"), ("4", "1", "2"), ("2", "4", "1"), ("2", "2", "2"), ("2", "1", "4"),
        ("1", "8", "1"), ("1", "4", "2"), ("1", "2", "4"), ("1", "1", "8"),
    }  # fmt: skip


def test_a_model_on_other_axes_is_not_decoded(whole):
    """generate.py takes only runs whose program computes what a family in models/ does."""
    with pytest.raises(RunError, match="models/ does not compute this model: write a family"):
        generate.main(generate.Generate(model=str(whole), prompt_ids=(1,), tokens=1))
