"""tools/benchmark_loader.py on small data: a table of figures, and errors of one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["tokens=300000", "batch=8", "length=64", "seconds=0.2", "step_s=0.01", "max_io_threads=2"]


def benchmark(*overrides):
    command = [sys.executable, "-m", "tools.benchmark_loader", *SMALL, *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)


@pytest.mark.slow
def test_figures(object_store_server):
    """Tokens/s, processor time, memory with its bound, from disk and object store, and the share of the time that steps wait."""
    run = benchmark("object_store=true")
    assert run.returncode == 0 and not run.stderr, run.stderr
    for name in ("local disk, packed", "local disk, a sequence a row", "object store, packed"):
        assert re.search(rf"^{name} +\d+\.\d M +\d+\.\d +\d+ MB +\d+ MB$", run.stdout, re.MULTILINE), run.stdout
    assert re.search(r"^steps of 0.01 s waited for \d+\.\d{3}% of their time", run.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_missing_data_set(tmp_path):
    """A path without a data set is one line, and status 1."""
    run = benchmark(f"path={tmp_path}/nowhere")
    assert run.returncode == 1 and run.stderr.startswith(f"error: the data set {tmp_path}/nowhere does not exist: ")
    assert run.stderr.count("\n") == 1


@pytest.mark.slow
def test_steps_do_not_wait_for_data(tmp_path):
    """The small job, as users run it: over all its lines but the first, a step waits for data less than 1 % of its time."""
    where = [
        f"paths.root_working_dir={tmp_path}",
        "paths.model_name=run",
        "checkpoint_interval=1000",
        "eval_interval=1000",
    ]
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "train", *where], check=True, cwd=root, timeout=600)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line.get("step_time_s")]
    waited, took = (sum(line[name] for line in lines) for name in ("data_wait_s", "step_time_s"))
    assert len(lines) >= 5 and waited < 0.01 * took
