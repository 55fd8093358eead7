"""tools/benchmark.py: the keys of a line, the table, and errors of one line."""

import functools
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT, run_in
from parts import says
from several_hosts import records

import train
from runtime.data.flat_tokens import open_split
from runtime.terminal import RunError
from tools import benchmark

TINY = (
    "local_test_synthetic mesh.d=2 mesh.t=2 model.d_model=32 model.d_head=8 model.layers=1 model.vocab=64 "
    "model.d_ff=64 training.tokens.batch=4 training.tokens.len=16"
)
KEYS = (
    "config devices mesh tokens_per_s step_time_s step_time_spread_s step_cpu_s mfu hfu mfu_6nd gflops_6nd "
    "peak_memory_bytes compile_s predicted_step_time_s hardware versions"
).split()


@pytest.fixture
def run(called, monkeypatch):
    """`python -m tools.benchmark ARGUMENTS` in this process: the exit status, what it prints and its error."""
    monkeypatch.chdir(ROOT)
    return functools.partial(called, benchmark.main, benchmark.Benchmark)


@pytest.mark.slow
def test_a_line_has_its_keys_and_they_agree(tmp_path):
    """A job adds one line of exactly the stated keys to the file; its figures follow from each other, and its run
    leaves nothing in the working directory."""
    path = tmp_path / "sub/new.jsonl"
    command = [sys.executable, "-m", "tools.benchmark", "device=cpu", "steps=2", f"file={path}", f'configs=["{TINY}"]']
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert not Path(ROOT, "random").exists() and "loss" in run.stdout
    (text,) = path.read_text().splitlines()
    line = json.loads(text)
    assert list(line) == KEYS
    assert (line["config"], line["devices"], line["mesh"]) == (TINY, 4, {"d": 2, "t": 2})
    assert line["tokens_per_s"] == pytest.approx(64 / line["step_time_s"])
    parameters = 2 * 64 * 32 + 2 * 32 * 4 * 8 + 2 * 32 * 2 * 8 + 3 * 32 * 64 + 3 * 32
    assert line["gflops_6nd"] == pytest.approx(6 * parameters * line["tokens_per_s"] / 1e9)
    for key in ("step_time_spread_s", "step_cpu_s", "peak_memory_bytes", "compile_s"):
        assert line[key] > 0
    for key in ("mfu", "hfu", "mfu_6nd", "predicted_step_time_s"):  # of a CPU nothing is known
        assert line[key] is None
    assert line["hardware"].keys() == {"device", "cpu", "cpu_cores"}
    assert line["versions"].keys() >= {"python", "jax", "jaxlib", "XLA_FLAGS"}
    table = run.stdout.splitlines()[-1]
    assert table.strip().startswith(TINY) and "n/a" in table and "2×2" in table


@pytest.mark.slow
@pytest.mark.parametrize("job", [
    f"{TINY} mesh.c=2 model.family=mixtral model.experts=2 model.experts_per_token=1",
    "finetune_smollm2 initial_weights=tests/models/golden/llama lora.rank=2 mesh.d=2",
    "finetune_smollm2 initial_weights=tests/models/golden/t5 training.tokens.read_len=8",
])  # fmt: skip
def test_train_any(tmp_path, job):
    """A step of a mixture, of adapters and of pairs counts as many parameters as it trains."""
    command = ["python", "-m", "tools.benchmark", "program=train_any", "device=cpu", "steps=2"]
    run_in(ROOT, [*command, f"file={tmp_path}/new.jsonl", f'configs=["{job}"]'])
    line = json.loads((tmp_path / "new.jsonl").read_text())
    assert list(line) == KEYS and line["tokens_per_s"] > 0
    if "lora" in job:  # 2 layers of what each adapter of rank 2 reads and writes, as in test_train_any.py
        count = 2 * 2 * (2 * (16 + 32) + 2 * (16 + 16) + 3 * (16 + 24))
        assert line["gflops_6nd"] == pytest.approx(6 * count * line["tokens_per_s"] / 1e9)


def test_the_mesh_is_that_of_the_devices_there_are(monkeypatch):
    """d takes all devices of an accelerator that t leaves; t shrinks to what divides them. A CPU simulates the config's
    own mesh."""
    monkeypatch.chdir(ROOT)
    shape = benchmark.config_of(benchmark.Benchmark(), "local_test_synthetic")
    for devices, expected in ((1, (1, 1)), (2, (1, 2)), (8, (4, 2)), (32, (16, 2))):
        mesh = benchmark.on_devices(shape, devices, "gpu").mesh
        assert (mesh.d, mesh.t) == expected
    assert benchmark.on_devices(shape, 1, "cpu").mesh == shape.mesh
    with pytest.raises(RunError, match="dim M has size 256, which axis d=3"):
        train.shapes(benchmark.on_devices(shape, 3 * 2, "gpu"))
    assert benchmark.config_of(benchmark.Benchmark(), "c4_a100x8x4_1b").num_hosts == 1


MISTAKES = {
    "": "nothing to measure: set configs=[NAME,...]",
    "device=tpu": 'command line: device = "tpu": expected cpu',
    "steps=1": "command line: steps = 1: expected 2 or more",
    "configs=[local_18m,local_19m]": "there is no config local_19m … nearest is local_18m",
    "configs=local_18m": 'command line: configs = "local_18m": expected a list of text',
    "configs=[local_18m] file=README.md/x": "file = README.md/x cannot be written: FileExistsError",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_said_before_anything_runs(run, arguments):
    """Each is one line, with status 1."""
    status, _, message = run(*arguments.split())
    assert status == 1 and says(f"error: {MISTAKES[arguments]}", message) and message.count("\n") == 1


def test_the_jobs(monkeypatch, run):
    """device=cpu is three jobs, of two steps or more; configs come first. A job that was not measured is an error."""
    asked = []
    monkeypatch.setattr(benchmark, "measure_all", lambda _, jobs: asked.append(jobs) or [])
    for keys in (["device=cpu", "steps=2"], ["device=cpu", "configs=[local_18m a.b=1,z]"]):
        assert run(*keys)[0] == 1
    assert asked == [benchmark.cpu_jobs(train), ("local_18m a.b=1", "z")]


def test_random_data_of_pairs(monkeypatch, tmp_path):
    """A model with an encoder gets, row after row, what it reads and what it writes."""
    monkeypatch.chdir(ROOT)
    job = "finetune_smollm2 initial_weights=tests/models/golden/t5 training.tokens.batch=4 training.tokens.read_len=8"
    config = benchmark.config_of(benchmark.Benchmark(program="train_any"), job, str(tmp_path))
    benchmark.write_random_data(config, "train_any")
    lengths = np.diff(open_split(tmp_path / "data", "train").seq_starts[:].astype(int))
    assert lengths[lengths > 0].tolist() == [8, config.training.tokens.len] * 4 * benchmark.STEPS_OF_DATA


def test_what_was_measured_is_kept(monkeypatch, tmp_path):
    """Lines are added to the file; a job that failed has none."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(benchmark, "measure", lambda _, job: None if "batch=3" in job else {"config": job})
    file = tmp_path / "of/lines.jsonl"
    config = benchmark.Benchmark(device="cpu", file=str(file))
    for times in (1, 2):
        lines = benchmark.measure_all(config, (f"{TINY} training.tokens.batch=3", TINY))
        assert lines == [{"config": TINY}] and file.read_text() == f'{{"config": "{TINY}"}}\n' * times


def test_a_line_is_of_the_median_step(tmp_path):
    """Time, its spread and the shares of the peak are those of the middle of the steps after warming up, processor time
    is their mean, and a device's peak of memory is the last one."""
    times = np.array([90.0, 90, 90, 4, 1, 2, 5, 3])  # three to warm up
    lines = [
        {"step_time_s": t, "step_cpu_s": t, "mfu": t / 2, "hfu": t / 4, "mfu_6nd": None, "device_peak_memory_bytes": n}
        for n, t in enumerate(times, 1)
    ]
    start = {"compiled": {"compile_s": 7.0, "predicted_step_time_s": 2.5, "peak_memory_bytes": 1}, "packages": {}}
    start |= dict.fromkeys(("cpu", "cpu_cores", "python", "XLA_FLAGS"))
    ledger = {"mesh": {"d": 2, "t": 3}, "tokens": 60, "flops_6nd": 9e9}
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, content in (("starts.jsonl", start), ("ledger.json", ledger)):
        (tmp_path / name).write_text(json.dumps(content))
    found = benchmark.line_of("job", tmp_path)
    expected = dict(devices=6, tokens_per_s=20, step_time_s=3, step_time_spread_s=2, step_cpu_s=3, mfu=1.5, hfu=0.75)
    expected |= dict(mfu_6nd=None, gflops_6nd=3, peak_memory_bytes=8, compile_s=7)
    assert {key: found[key] for key in expected} == expected and list(found) == KEYS


def test_a_step_that_is_refused(monkeypatch, capsys):
    """A job whose sizes the mesh cannot split is one message, no traceback, and the next one is measured."""
    monkeypatch.chdir(ROOT)
    job = f"{TINY} training.tokens.batch=3"
    assert benchmark.measure(benchmark.Benchmark(device="cpu"), job) is None
    message = capsys.readouterr().err
    assert message.startswith(f"error: {job} was not measured: ") and "training.tokens.batch" in message


# == How fast data come: tests/benchmark_loader.py, and a run ==========================================================
@pytest.mark.slow
@pytest.mark.parametrize("packed", ["true", "false"])
def test_figures_of_the_loader(packed):
    """Tokens/s, processor time and memory, and the share of the time that steps wait."""
    keys = "tokens=300000 batch=8 length=64 seconds=0.2 step_s=0.01 max_io_threads=2".split()
    said = run_in(ROOT, ["python", "-m", "tests.benchmark_loader", *keys, f"packed={packed}"])
    _, figures, waits = said.splitlines()
    assert re.fullmatch(r"\d+\.\d M tokens/s, cpu \d+\.\d ns/token, \d+ MB more of memory", figures), figures
    assert re.fullmatch(r"steps of 0.01 s waited for \d+\.\d{3}% of their time", waits), waits


@pytest.mark.slow
def test_steps_do_not_wait_for_data(tmp_path):
    """The small job, as users run it: over all its lines but the first, a step waits for data less than 1 % of its
    time."""
    where = [f"paths.root_working_dir={tmp_path}", "paths.model_name=run"]
    run_in(ROOT, ["python", "-m", "train", *where, "checkpoint_interval=1000", "eval_interval=1000"])
    lines = [line for line in records(tmp_path / "run") if line.get("step_time_s")]
    waited, took = (sum(line[name] for line in lines) for name in ("data_wait_s", "step_time_s"))
    assert len(lines) >= 5 and waited < 0.01 * took
