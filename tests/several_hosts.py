"""Tiny runs, in one process or in two of four simulated devices each: how they are started, and what they leave."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.data.split_writer import write_split

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, "-m", "train"]
# float32, so that what another order of a sum changes stays small.
TINY = """model.d_model=32 model.n_kv=4 model.d_head=8 model.d_ff=64 model.layers=1 model.vocab=128 mesh.d=4 mesh.t=2
    model.compute_dtype=float32 training.tokens.batch=16 training.tokens.len=32 training.steps=6 training.warmup_steps=2
    training.steps_for_lr=6 training.learning_rate=0.01 checkpoint_interval=3 eval_interval=6 validation_batches=2
    log_interval=1 flat_tokens.filespec=null""".split()
TWO = ["num_hosts=2"]
STARTED: list[subprocess.Popen] = []
FOR_EVER = ["training.steps=100000", "checkpoint_interval=100000", "eval_interval=100000"]


def write_tiny(folder: Path) -> str:
    """A data set of 20 steps of 16 x 32 tokens below 128, and a tenth for validation; returns the override that names
    it."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 200), ("validation", 20)):
        write_split(folder / "tiny.zarr", split, [rng.integers(1, 128, rng.integers(1, 104)) for _ in range(count)])
    return f"flat_tokens.filespec={folder}/tiny.zarr"


def write_mixture(folder: Path) -> str:
    """Two data sets; returns the override that mixes them."""
    rng = np.random.default_rng(0)
    for name, count in (("a.zarr", 60), ("b.zarr", 30)):
        for split in ("train", "validation"):
            write_split(folder / name, split, [rng.integers(1, 128, rng.integers(20, 104)) for _ in range(count)])
    return f"mixture=[{{filespec: {folder}/a.zarr, weight: 0.7}}, {{filespec: {folder}/b.zarr, weight: 0.3}}]"


def where(folder: Path) -> list[str]:
    """The overrides of a run in this folder. The run finds a profile and a picture, which would take half its time."""
    (folder / "profile").mkdir(parents=True, exist_ok=True)
    (folder / "step.svg").touch()
    return [f"paths.root_working_dir={folder.parent}", f"paths.model_name={folder.name}"]


def environment(cache: Path) -> dict[str, str]:
    """The environment of a process that no launcher has started and that simulates as many devices as its mesh
    needs."""
    launchers = re.compile(r"(OMPI|PMIX|SLURM|JAX_COORDINATOR)_")
    given = {name: value for name, value in os.environ.items() if not launchers.match(name)}
    given["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", given["XLA_FLAGS"])
    return {**given, "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def without_gloo(output: str) -> list[str]:
    """The lines of a process without Gloo's count of connections, which several threads print, also in the middle of
    another line."""
    words = set("[Gloo] Rank is connected to peer ranks. Expected number of connected peer ranks is :".split())
    return [line for line in output.splitlines() if set(re.sub(r"\d", " ", line).split()) - words]


def start_two(
    arguments: list[str], env: dict[str, str], *, output: Path, program: list[str] = TRAIN
) -> list[subprocess.Popen]:
    """Two processes that are told by keys who they are; what each prints goes to `output`.0 and `output`.1."""
    who = [f"cluster.coordinator=localhost:{free_port()}"]
    processes = []
    for index in range(2):
        with open(f"{output}.{index}", "w") as file:
            command = [*program, *arguments, *TWO, *who, f"cluster.process_id={index}"]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT))
    STARTED.extend(processes)
    return processes


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A test that fails leaves no process behind."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def records(folder: Path) -> list[dict]:
    """The whole lines of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def logged(folder: Path, name: str) -> dict[int, float]:
    """A metric, by step."""
    return {record["step"]: record[name] for record in records(folder) if name in record}


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each line: a step that was logged twice stands here twice."""
    return [(record["step"], record["loss"]) for record in records(folder) if "loss" in record]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())


def wait_until(is_so, *, limit_s: float = 1200) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.05)


def wait_for_step(folder: Path, step: int, processes: list[subprocess.Popen] = ()) -> None:
    """Returns when a run has logged the step; fails when one of its processes ends before."""

    def is_there():
        assert all(process.poll() is None for process in processes)
        return any(number >= step for number, _ in losses(folder))

    wait_until(is_there)
