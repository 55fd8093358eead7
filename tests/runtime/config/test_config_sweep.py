"""The table at the end of a sweep."""

import json
import sys
from pathlib import Path

import pytest

from runtime.config import command_line as runtime_config
from runtime.config.command_line import DEFAULT_CONFIG, run
from runtime.config.sweep import Sweep, table
from runtime.terminal import RunError
from tests.runtime.config.test_config import Config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Runs main as `python -m train -m ARGUMENTS` would, in a folder of its own; returns the exit status."""
    monkeypatch.setattr(runtime_config, "CONFIG_FOLDER", tmp_path)
    for name in ("base", DEFAULT_CONFIG):
        (tmp_path / f"{name}.yaml").write_text((ROOT / f"configs/{name}.yaml").read_text())
    monkeypatch.chdir(tmp_path)

    def call(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            run(main, Config)
        except SystemExit as stop:
            return stop.code
        return 0

    return call


def trained(config):
    """Leaves what a run leaves; one with a large learning rate fails."""
    rate = config.training.learning_rate
    if rate > 1:
        raise RunError("3 steps in a row had a loss that is not finite\nLook at them.")
    folder = Path(config.paths.root_working_dir) / config.paths.model_name
    folder.mkdir(parents=True)
    lines = [
        {"step": 1, "time": 0.0, "loss": 7.5},
        {"step": 2, "time": 1.0, "loss": rate, "tokens_per_s": 1000.0},
        {"step": 3, "time": 2.0, "loss": rate / 2, "tokens_per_s": 3000.0},
        {"step": 3, "time": 2.0, "validation_loss": rate / 4},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_table_at_the_end(sweep, capsys):
    """Each job's folder, what differs, last losses and median speed, or the first line of its error; refused ones too."""
    assert sweep(trained, "-m", "training.learning_rate=0.5,7,-1", "training.steps=3") == 1
    name = "runs/local_test_synthetic_training.learning_rate=0.5"
    out, err = capsys.readouterr()
    empty, *lines = out.splitlines()
    assert empty == "" and [line.split() for line in lines] == [
        ["what", "differs", "loss", "validation", "tokens/s", "run", "folder"],
        ["training.learning_rate=0.5", "0.2500", "0.1250", "2,000", name],
        ["training.learning_rate=7", "n/a", "n/a", "n/a", name.replace("0.5", "7")],
        "error: 3 steps in a row had a loss that is not finite".split(),
        ["training.learning_rate=-1", "n/a", "n/a", "n/a", "none"],
        "error: command line: training.learning_rate = -1.0: expected more than 0".split(),
    ]
    assert err.count("error: ") == 2


def test_a_job_alone_has_no_table(sweep, capsys):
    """The table is a sweep's."""
    assert sweep(trained) == 0
    assert capsys.readouterr().out == ""


def test_the_table_also_after_an_interrupt(sweep, capsys):
    """Who stops a sweep sees what was done."""

    def main(config):
        if config.training.steps == 10:
            raise KeyboardInterrupt
        trained(config)

    assert sweep(main, "-m", "training.steps=5,10,20") == 130
    *_, first, second, error = capsys.readouterr().out.splitlines()
    assert first.startswith("training.steps=5 ") and "  2,000  " in first
    assert second.startswith("training.steps=10 ") and error == "  error: KeyboardInterrupt"


def test_a_run_without_metrics_is_not_known(monkeypatch, tmp_path):
    """A job that left no metrics, as one with check_only, is n/a."""
    monkeypatch.chdir(tmp_path)
    with Sweep() as jobs, jobs.job(["check_only=true", "mesh.t=2"]) as job:
        job.config = runtime_config.load(Config)
    with jobs.job(["check_only=true", "mesh.t=4"]) as job:
        job.config = runtime_config.load(Config, overrides=["paths.root_working_dir=s3://bucket"])
    _, *rows = table(jobs._jobs)
    assert [row.split()[:4] for row in rows] == [[f"mesh.t={t}", "n/a", "n/a", "n/a"] for t in (2, 4)]
    assert rows[1].split()[4] == "runs/local_test_synthetic"
