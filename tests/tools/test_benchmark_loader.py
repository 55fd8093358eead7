"""tests/benchmark_loader.py on small data, and that a run's steps do not wait for theirs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["tokens=300000", "batch=8", "length=64", "seconds=0.2", "step_s=0.01", "max_io_threads=2"]


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["true", "false"])
def test_figures(packed):
    """Tokens/s, processor time and memory, and the share of the time that steps wait."""
    command = [sys.executable, "-m", "tests.benchmark_loader", *SMALL, f"packed={packed}"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    assert run.returncode == 0 and not run.stderr, run.stderr
    _, figures, waits = run.stdout.splitlines()
    assert re.fullmatch(r"\d+\.\d M tokens/s, cpu \d+\.\d ns/token, \d+ MB more of memory", figures), figures
    assert re.fullmatch(r"steps of 0.01 s waited for \d+\.\d{3}% of their time", waits), waits


@pytest.mark.slow
def test_steps_do_not_wait_for_data(tmp_path):
    """The small job, as users run it: over all its lines but the first, a step waits for data less than 1 % of its
    time."""
    where = [
        f"paths.root_working_dir={tmp_path}", "paths.model_name=run", "checkpoint_interval=1000", "eval_interval=1000",
    ]  # fmt: skip
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "train", *where], check=True, cwd=root, timeout=600)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line.get("step_time_s")]
    waited, took = (sum(line[name] for line in lines) for name in ("data_wait_s", "step_time_s"))
    assert len(lines) >= 5 and waited < 0.01 * took
