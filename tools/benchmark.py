"""How fast a training step is, on whatever devices there are: a JSON line each, and a table.

    python -m tools.benchmark device=cpu                                            # three jobs for a CPU
    python -m tools.benchmark configs=[c4_h200x1_84m,c4_h200x1_1b]                  # on the devices at hand
    python -m tools.benchmark 'configs=["c4_h200x1_1b training.microbatches=2"]'    # any key of training can be set
    python -m tools.benchmark program=train_any 'configs=["finetune_smollm2 lora.rank=8"]'   # weights drawn, not read

Each job is a process of its own: train.py's step on random tokens, compiled anew, on one host. On an accelerator the
mesh becomes that of all devices there are, with the config's `t` as far as it divides them.

Steps are dispatched as in training, up to PROGRAMS_IN_FLIGHT ahead, WARM_UP_STEPS and then `steps` of them; a step's
time is that between its end and the end of the one before. `step_cpu_s` is the processor time of all threads, which
says more than time where a CPU computes and other jobs run beside.

Expect four minutes on two cores for the CPU jobs. docs/performance.md explains the figures.
"""

import collections
import json
import math
import multiprocessing
import platform
import re
import statistics
import sys
import time
import typing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from annotated_types import Ge

from ledger.compiled.check import peak_bytes
from ledger.count.step import of_step
from ledger.machines.hardware import of_device_kind
from ledger.machines.roofline import roofline
from ledger.units import gigabytes, percent, seconds
from runtime.cluster.processes import find_devices, prepare_devices, start
from runtime.cluster.tuning import options
from runtime.config import command_line
from runtime.program import ProgramKey, Trainer, load, resolved
from runtime.run import PROGRAMS_IN_FLIGHT, RUNS_ONCE, with_shardings
from runtime.terminal import RunError, columns, print_error, refusals, run_errors
from runtime.tracking.metrics import memory
from runtime.tracking.report import environment
from tools.plan_step import changed

WARM_UP_STEPS = 3
DOCUMENT = 427  # tokens on average: C4 has 156 billion in 365 million documents (Dodge et al. 2021, table 1)
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
    print("\n".join(["", *table(lines)]), flush=True)
    if len(lines) < len(jobs):
        raise RunError(f"{len(jobs) - len(lines)} of {len(jobs)} jobs were not measured, for the reasons above")


def cpu_jobs(trainer: Trainer) -> tuple[str, ...]:
    """On one device, on several, and a larger one."""
    axes = typing.get_type_hints(trainer.Config)["mesh"].__dataclass_fields__
    one = " ".join(f"mesh.{axis}=1" for axis in axes)
    return f"local_test_synthetic {one}", "local_test_synthetic", "local_18m"


def measure_all(config: Benchmark, jobs: tuple[str, ...]) -> list[Line]:
    """Measures the jobs one after another; each line goes to the file and to stdout as soon as it is known."""
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
                for each in (file, sys.stdout):
                    print(json.dumps(line), file=each, flush=True)
    return lines


def config_of(benchmark: Benchmark, job: str) -> Any:
    name, *overrides = job.split()
    return command_line.load(load(benchmark.program).Config, name, ["num_hosts=1", *overrides])


def measure(benchmark: Benchmark, job: str) -> Line | None:
    """In a process of its own: the job's line; None after saying why there is none, since the others may still run."""
    try:
        if benchmark.device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        config = config_of(benchmark, job)
        prepare_devices(config)
        jax.config.update("jax_enable_compilation_cache", False)  # else compile_s would be that of reading a file
        config = on_devices(config, len(find_devices()), jax.default_backend())
        config = resolved(config, load(benchmark.program))
        mesh = start(config)
        with jax.set_mesh(mesh):
            return figures(benchmark, job, config, mesh)
    except (*refusals(), jax.errors.JaxRuntimeError) as error:  # out of memory, perhaps
        print_error(f"{job} was not measured: {error}")
        return None


def on_devices(config: Any, devices: int, backend: str) -> Any:
    """The config on all the devices there are, those that the other axes do not need along the first; on a CPU, which
    simulates as many as are asked for, as it is."""
    if backend == "cpu":
        return config
    (first, _), *others = vars(config.mesh).items()
    sizes = {}
    for axis, size in reversed(others):
        sizes[axis] = math.gcd(size, devices)
        devices //= sizes[axis]
    return changed(config, mesh=replace(config.mesh, **sizes, **{first: devices}))


def figures(benchmark: Benchmark, job: str, config: Any, mesh: jax.sharding.Mesh) -> Line:
    """The job's line."""
    trainer: Any = load(benchmark.program)
    zero, tokens = np.uint32(0), config.training.tokens.batch * config.training.tokens.len
    type_ = getattr(trainer, "state_type", lambda _: trainer.State)(config)
    shapes, batch = trainer.shapes(config)
    shapes, batch = with_shardings(shapes, type_), with_shardings(batch, type(batch))
    step, _ = trainer.mapped_steps(config, bos_id=0)
    traced = jax.jit(step, donate_argnums=0).trace(shapes, zero, zero, batch)
    backend = jax.default_backend()
    ledger = of_step(traced, dict(mesh.shape), source=trainer.__file__, tokens=tokens, platform=backend)
    began = time.perf_counter()
    compiled = traced.lower().compile(compiler_options=options(jax.devices()[0]))
    compile_s = time.perf_counter() - began

    draw = getattr(trainer, "drawn_state", lambda config, seed: trainer.init_state(config.model, seed))
    shardings = jax.tree.map(lambda each: each.sharding, shapes)
    init = jax.jit(lambda seed: draw(config, seed), out_shardings=shardings, compiler_options=RUNS_ONCE)
    state = init(np.uint32(config.training.seed))
    times, cpu_s = timed(compiled, state, random_batch(config.model.vocab, batch), benchmark.steps)

    kind, about, peak_memory = mesh.devices.flat[0].device_kind, environment(), memory()["device_peak_memory_bytes"]
    first, step_s, third = statistics.quantiles(times, n=4, method="inclusive")
    machine = of_device_kind(kind)
    bound = machine and roofline(ledger, machine, devices_per_host=mesh.size)
    peak = machine and machine.peak_flops_per_s and machine.peak_flops_per_s * mesh.size
    return {
        "config": job,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "tokens_per_s": tokens / step_s,
        "step_time_s": step_s,
        "step_time_spread_s": third - first,
        "step_cpu_s": cpu_s,
        "mfu": peak and ledger.model_flops / step_s / peak,
        "hfu": peak and ledger.hardware_flops / step_s / peak,
        "mfu_6nd": peak and ledger.flops_6nd / step_s / peak,
        "gflops_6nd": ledger.flops_6nd / step_s / 1e9,
        # Of one device: what its allocator counted; where there is none, what XLA says that the program needs.
        "peak_memory_bytes": peak_bytes(compiled) if peak_memory is None else peak_memory,
        "compile_s": compile_s,
        "predicted_step_time_s": bound and bound.step_s,
        "hardware": {"device": kind, "cpu": processor(), "cpu_cores": about["cpu_cores"]},
        "versions": {"python": about["python"], **about["packages"], "XLA_FLAGS": about["XLA_FLAGS"]},
    }


def random_batch(vocab: int, like: Any) -> Any:
    """Tokens of no data set, in documents as long as C4's, for a batch of these shapes and shardings."""
    rng = np.random.default_rng(0)

    def values(path, leaf):
        if leaf.dtype == np.uint32:
            return rng.integers(0, vocab, leaf.shape).astype(np.uint32)
        return rng.random(leaf.shape) < 1 / DOCUMENT if "start" in path[-1].name else np.ones(leaf.shape, leaf.dtype)

    placed = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.device_put(jax.tree_util.tree_map_with_path(values, like), placed)


def timed(step: Callable, state: Any, batch: Any, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and processor time of one. The device always has the next steps at hand, so that the host
    does not hold it up."""
    skipped_steps = np.uint32(0)
    in_flight: collections.deque[jax.Array] = collections.deque()
    ends, cpu = [], []
    for number in range(WARM_UP_STEPS + steps + PROGRAMS_IN_FLIGHT):
        if number < WARM_UP_STEPS + steps:
            state, metrics = step(state, skipped_steps, np.uint32(number), batch)
            skipped_steps = metrics.skipped_steps
            in_flight.append(metrics.loss)
        if number >= PROGRAMS_IN_FLIGHT:
            in_flight.popleft().block_until_ready()
            ends.append(time.perf_counter())
            cpu.append(time.process_time())
    return np.diff(ends[WARM_UP_STEPS - 1 :]).tolist(), (cpu[-1] - cpu[WARM_UP_STEPS - 1]) / steps


def processor() -> str:
    """The CPU's name, where Linux or Python knows it."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


# ---------------------------------------------------------------- lines


def table(lines: list[Line]) -> list[str]:
    """The lines for a reader; n/a where a figure is not known."""
    timed = {"step": "step_time_s", "spread": "step_time_spread_s", "CPU": "step_cpu_s"}
    timed |= {"compile": "compile_s", "predicted": "predicted_step_time_s"}
    rows = [["", "mesh", "tokens/s", *timed, "MFU", "6ND", "memory"]]
    for line in lines:
        row = [line["config"], "×".join(map(str, line["mesh"].values())), f"{line['tokens_per_s']:,.0f}"]
        row += [seconds(line[key]) for key in timed.values()]
        rows.append([*row, percent(line["mfu"]), percent(line["mfu_6nd"]), gigabytes(line["peak_memory_bytes"])])
    return columns(rows, range(1, len(rows[0]))) if lines else []


if __name__ == "__main__":
    command_line.run(main, Benchmark)
