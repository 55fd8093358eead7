"""Measures how fast a training step is, on whatever devices there are: a JSON line for each job, and a table.

    python -m tools.benchmark device=cpu                                            # three jobs for a CPU
    python -m tools.benchmark configs=[c4_h200x1_84m,c4_h200x1_1b]                  # on the devices at hand
    python -m tools.benchmark 'configs=["c4_h200x1_1b training.microbatches=2"]'    # any key of training can be set
    python -m tools.benchmark program=train_any 'configs=["finetune_smollm2 lora.rank=8"]'

A job is a run in a process of its own, on one host and compiled anew: random tokens in place of the data, nothing
validated, nothing saved. It trains WARM_UP_STEPS and then `steps`, which are timed, in a temporary folder. On an
accelerator the mesh becomes that of all devices there are, with the config's `t` as far as it divides them.

Expect four minutes on two cores for the CPU jobs. docs/performance.md explains the figures.
"""

import json
import math
import multiprocessing
import statistics
import tempfile
import typing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from annotated_types import Ge

from ledger.pages.table import Table
from runtime.cluster.processes import find_devices, prepare_devices
from runtime.config import command_line
from runtime.data.split_writer import write_split
from runtime.program import ProgramKey, Trainer, load, resolved
from runtime.terminal import RunError, print_error, refusals, run_errors
from tools.plan_step import changed

WARM_UP_STEPS = 3
DOCUMENT = 427  # tokens on average: C4 has 156 billion in 365 million documents (Dodge et al. 2021, table 1)
STEPS_OF_DATA = 2  # the data set has these; a run reads them again and again
KEYS = (  # for a run that is only timed
    "num_hosts=1 log_interval=1 checkpoint_interval=null eval_interval=null patience=null tracking.to=[] mixture=[] "
    "hf_dataset.path=null flat_tokens.epochs=1000000 flat_tokens.sequence_packing=true"
)
COLUMNS = {  # heading: unit, and the key of a line
    "tokens/s": ("rate", "tokens_per_s"), "step": ("s", "step_time_s"), "spread": ("s", "step_time_spread_s"),
    "CPU": ("s", "step_cpu_s"), "compile": ("s", "compile_s"), "predicted": ("s", "predicted_step_time_s"),
    "MFU": ("percent", "mfu"), "6ND": ("percent", "mfu_6nd"), "memory": ("GB", "peak_memory_bytes"),
}  # fmt: skip
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Benchmark(ProgramKey):
    # each a config of training, or one with overrides: "c4_h200x1_1b training.microbatches=2"
    configs: tuple[str, ...] = ()
    device: Literal["cpu"] | None = None  # cpu: not the accelerator; without configs it runs the three jobs for a CPU
    steps: Annotated[int, Ge(2), "2 or more, best 20: the spread needs them"] = 20  # timed, after those that warm up
    file: str = "runs/benchmark.jsonl"  # to which each line is added


def main(config: Benchmark) -> None:
    jobs = config.configs or (cpu_jobs(load(config.program)) if config.device == "cpu" else ())
    if not jobs:
        raise RunError("nothing to measure: set configs=[NAME,...], or device=cpu")
    lines = measure_all(config, jobs)
    if lines:
        print("\n".join(["", *table(lines).text()]), flush=True)
    if len(lines) < len(jobs):
        raise RunError(f"{len(jobs) - len(lines)} of {len(jobs)} jobs were not measured, for the reasons above")


def cpu_jobs(trainer: Trainer) -> tuple[str, ...]:
    """On one device, on several, and a larger one."""
    axes = typing.get_type_hints(trainer.Config)["mesh"].__dataclass_fields__
    one = " ".join(f"mesh.{axis}=1" for axis in axes)
    return f"local_test_synthetic {one}", "local_test_synthetic", "local_18m"


def measure_all(config: Benchmark, jobs: tuple[str, ...]) -> list[Line]:
    """Measures the jobs one after another; each line goes to the file as soon as it is known."""
    for job in jobs:
        config_of(config, job)  # a mistake in the last one is said before the first one has run
    path, lines = Path(config.file).expanduser(), []
    with run_errors(f"file = {path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    with file:
        for job in jobs:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                line = process.submit(measure, config, job).result()
            if line is not None:
                lines.append(line)
                print(json.dumps(line), file=file, flush=True)
    return lines


def config_of(benchmark: Benchmark, job: str, folder: str = "random") -> Any:
    name, *overrides = job.split()
    where = [f"paths.root_working_dir={folder}", "paths.model_name=run", f"flat_tokens.filespec={folder}/data"]
    steps = f"training.steps={WARM_UP_STEPS + benchmark.steps}"
    return command_line.load(load(benchmark.program).Config, name, [*overrides, *KEYS.split(), *where, steps])


def measure(benchmark: Benchmark, job: str) -> Line | None:
    """Runs a job in its own process and returns its line; or says why it failed, and the other jobs still run."""
    try:
        if benchmark.device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(benchmark, job, folder)
            # An empty folder of programs: with kept ones compile_s would time reading a file. XLA also keeps there
            # which kernel is fastest for a product (on an H200 12 s to compile, 45 without a folder).
            jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")
            prepare_devices(config)
            config = on_devices(config, len(find_devices()), jax.default_backend())
            write_random_data(config, benchmark.program)
            Path(folder, "run/profile").mkdir(parents=True)  # where there is one, no step is profiled
            load(benchmark.program).main(config)
            return line_of(job, Path(folder, "run"))
    except (*refusals(), jax.errors.JaxRuntimeError) as error:  # out of memory, perhaps
        print_error(f"{job} was not measured: {error}")
        return None


def on_devices(config: Any, devices: int, backend: str) -> Any:
    """The config on all devices that are there: the first axis takes those that the others leave. On a CPU, which
    simulates as many as it asks for, the config stays as it is."""
    if backend == "cpu":
        return config
    (first, _), *others = vars(config.mesh).items()
    sizes = {}
    for axis, size in reversed(others):
        sizes[axis] = math.gcd(size, devices)
        devices //= sizes[axis]
    return changed(config, mesh=replace(config.mesh, **sizes, **{first: devices}))


def write_random_data(config: Any, program: str) -> None:
    """A data set of random tokens: in documents as long as C4's, or in pairs for a model with an encoder."""
    rng, tokens = np.random.default_rng(0), config.training.tokens
    read, rows = getattr(tokens, "read_len", 0), STEPS_OF_DATA * tokens.batch
    ids = rng.integers(0, resolved(config, load(program)).model.vocab, rows * (read + tokens.len))
    starts = np.flatnonzero(rng.random(len(ids)) < 1 / DOCUMENT)
    if read:
        starts = (np.arange(rows)[:, None] * (read + tokens.len) + [0, read]).ravel()
    about = {"row_length": tokens.len, "read_length": read} if read else {}
    for split in ("train", "validation"):
        write_split(config.flat_tokens.filespec, split, np.split(ids, starts), attributes=about)


def line_of(job: str, run: Path) -> Line:
    """The job's line, from the files of its run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP_STEPS:]
    start, ledger = (json.loads((run / name).read_text()) for name in ("starts.jsonl", "ledger.json"))
    kind, compiled = jax.devices()[0].device_kind, start["compiled"]
    first, step_s, third = statistics.quantiles([line["step_time_s"] for line in lines], n=4, method="inclusive")
    return {
        "config": job,
        "devices": math.prod(ledger["mesh"].values()),
        "mesh": ledger["mesh"],
        "tokens_per_s": ledger["tokens"] / step_s,
        "step_time_s": step_s,
        "step_time_spread_s": third - first,
        "step_cpu_s": statistics.mean(line["step_cpu_s"] for line in lines),
        **{key: lines[0][key] and statistics.median(line[key] for line in lines) for key in ("mfu", "hfu", "mfu_6nd")},
        "gflops_6nd": ledger["flops_6nd"] / step_s / 1e9,
        # One device's peak by its allocator or, where JAX does not say that, what XLA says the program needs.
        "peak_memory_bytes": lines[-1]["device_peak_memory_bytes"] or compiled["peak_memory_bytes"],
        "compile_s": compiled["compile_s"],
        "predicted_step_time_s": compiled["predicted_step_time_s"],
        "hardware": {"device": kind, "cpu": start["cpu"], "cpu_cores": start["cpu_cores"]},
        "versions": {"python": start["python"], **start["packages"], "XLA_FLAGS": start["XLA_FLAGS"]},
    }


def table(lines: list[Line]) -> Table:
    units, keys = zip(*COLUMNS.values())
    rows = [(line["config"], "×".join(map(str, line["mesh"].values())), *map(line.get, keys)) for line in lines]
    columns = {"config": "", "mesh": "", **dict(zip(COLUMNS, units))}
    return Table("A step, the median of those that were timed", columns, rows)


if __name__ == "__main__":
    command_line.run(main, Benchmark)
