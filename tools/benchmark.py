"""How fast a training step is, on whatever devices there are: a JSON line each, and a table.

    python -m tools.benchmark device=cpu                                            # three jobs for a CPU
    python -m tools.benchmark configs=[c4_h200x1_84m,c4_h200x1_1b]                  # on the devices at hand
    python -m tools.benchmark 'configs=["c4_h200x1_1b training.microbatches=2"]'    # any key of training can be set
    python -m tools.benchmark program=finetune 'configs=["finetune_smollm2 lora.rank=8"]'   # weights drawn, not read

Each job is a process of its own: train.py's step on random tokens, compiled anew, on one host. On an accelerator the
mesh becomes that of all devices there are, with the config's `t` as far as it divides them.

An accelerator is timed without synchronization: WARM_UP_STEPS and `steps` are dispatched as in training, up to
PROGRAMS_IN_FLIGHT ahead, and a step's time is that between its end and the end of the one before. A CPU's step is
waited for, and followed by PRODUCTS products of 1024³ in bfloat16, with the machine to themselves: the speed of a
shared machine drifts from minute to minute, so the step's rate (6 × parameters × tokens per second) is divided by that
of the product at that moment, and `share_of_matmul` is the median of these shares.

Expect four minutes on two cores for the CPU jobs. docs/performance.md explains the figures.
"""

import collections
import functools
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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge

from ledger.compiled.check import peak_bytes
from ledger.count.step import of_step
from ledger.machines.hardware import of_device_kind
from ledger.machines.roofline import roofline
from ledger.units import gigabytes, percent, seconds
from runtime.cluster.processes import find_devices, prepare_devices
from runtime.cluster.tuning import options
from runtime.config import command_line
from runtime.config.checks import check_combinations
from runtime.program import ProgramKey, Trainer, load
from runtime.run import PROGRAMS_IN_FLIGHT, RUNS_ONCE, start, with_shardings
from runtime.terminal import RunError, columns, print_error, refusals
from runtime.tracking.metrics import memory
from runtime.tracking.report import environment
from shardlib.arrays import fields
from shardlib.shardtypes import make_shardings

WARM_UP_STEPS = 3
DOCUMENT = 427  # tokens on average: C4 has 156 billion in 365 million documents (Dodge et al. 2021, table 1)
PRODUCTS = 6  # after a CPU's step; the median counts
PROCESSES = multiprocessing.get_context("spawn")
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Benchmark(ProgramKey):
    # each a config of training, or one with overrides: "c4_h200x1_1b training.microbatches=2"
    configs: tuple[str, ...] = ()
    device: Literal["cpu"] | None = None  # cpu: not the accelerator; without configs it runs the three jobs for a CPU
    steps: Annotated[int, Ge(2), "2 or more, best 20: the spread needs them"] = 20  # timed, after those that warm up
    file: str | None = None  # where the lines go; null: runs/benchmark/ and the time


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
    path = Path(config.file or f"runs/benchmark/{time.strftime('%Y-%m-%d_%H%M%S')}.jsonl").expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("x", encoding="utf-8")
    except OSError as error:
        raise RunError(f"file = {path}: it cannot be written ({error}): give another name") from None
    lines, began = [], time.perf_counter()
    with file:
        for job in jobs:
            receiver, sender = PROCESSES.Pipe(duplex=False)
            process = PROCESSES.Process(target=measure, args=(config, job, sender))
            process.start()
            sender.close()
            try:
                lines.append(receiver.recv())
                for each in (file, sys.stdout):
                    print(json.dumps(lines[-1]), file=each, flush=True)
            except EOFError:  # it has said why; the other jobs may still run
                print(f"{job} was not measured: the message above says why", file=sys.stderr, flush=True)
            process.join()
    print(f"\n{len(lines)} of {len(jobs)} jobs in {(time.perf_counter() - began) / 60:.1f} minutes, written to {path}")
    return lines


def config_of(benchmark: Benchmark, job: str) -> Any:
    if not job.strip():
        raise RunError('configs: "" is no job: expected the name of a config, or one with overrides, "NAME KEY=VALUE"')
    name, *overrides = job.split()
    return command_line.load(load(benchmark.program).Config, name, ["num_hosts=1", *overrides])


def measure(benchmark: Benchmark, job: str, sender: Connection) -> None:
    """In a process of its own: sends the job's line."""
    try:
        if benchmark.device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        config = config_of(benchmark, job)
        prepare_devices(config)
        jax.config.update("jax_enable_compilation_cache", False)  # else compile_s would be that of reading a file
        config = on_devices(config, len(find_devices()), jax.default_backend())
        config = getattr(load(benchmark.program), "resolved", lambda config: config)(config)
        mesh = start(config)
        # Before the mesh is set: the product runs on one device, and the intra-op threads of all.
        product = product_on(mesh.devices.flat[0]) if jax.default_backend() == "cpu" else None
        with jax.set_mesh(mesh):
            sender.send(figures(benchmark, job, config, mesh, product))
    except refusals() as error:
        print_error(error)
        sys.exit(1)


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
    changed = replace(config, mesh=replace(config.mesh, **sizes, **{first: devices}))
    object.__setattr__(changed, "origins", config.origins)  # frozen for everyone else
    check_combinations(changed)
    return changed


def figures(benchmark: Benchmark, job: str, config: Any, mesh: jax.sharding.Mesh, product: Callable | None) -> Line:
    """The job's line."""
    trainer: Any = load(benchmark.program)
    zero, tokens = np.uint32(0), config.training.tokens.batch * config.training.tokens.len
    step, _ = trainer.mapped_steps(config, bos_id=0)
    type_ = getattr(trainer, "state_type", lambda _: trainer.State)(config)
    state, batch = map(with_shardings, trainer.shapes(config), (type_, trainer.TokenBatch))
    traced = jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch)
    backend = jax.default_backend()
    ledger = of_step(traced, dict(mesh.shape), source=trainer.__file__, tokens=tokens, platform=backend)
    began = time.perf_counter()
    compiled = traced.lower().compile(compiler_options=options(jax.devices()[0]))
    compile_s = time.perf_counter() - began

    draw = getattr(trainer, "drawn_state", lambda config, seed: trainer.init_state(config.model, seed))
    shardings = jax.tree.map(lambda each: each.sharding, state)
    init = jax.jit(functools.partial(draw, config), out_shardings=shardings, compiler_options=RUNS_ONCE)
    batch, numbers = random_batch(trainer, config), iter(range(2**31))
    state, metrics = init(np.uint32(config.training.seed)), None

    def next_step() -> tuple[Any, Any]:
        nonlocal state, metrics
        skipped_steps = zero if metrics is None else metrics.skipped_steps
        state, metrics = compiled(state, skipped_steps, np.uint32(next(numbers)), batch)
        return state, metrics

    rates = shares = None
    if product is None:
        times = timed_in_flight(next_step, benchmark.steps)
    else:
        times, rates = timed_between_products(next_step, benchmark.steps, product)
        shares = [ledger.flops_6nd / s / rate for s, rate in zip(times, rates, strict=True)]
    peak_memory = memory()["device_peak_memory_bytes"]

    kind, about = mesh.devices.flat[0].device_kind, environment()
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
        "mfu": peak and ledger.model_flops / step_s / peak,
        "hfu": peak and ledger.hardware_flops / step_s / peak,
        "mfu_6nd": peak and ledger.flops_6nd / step_s / peak,
        "gflops_6nd": ledger.flops_6nd / step_s / 1e9,
        "matmul_gflops": rates and statistics.median(rates) / 1e9,
        "share_of_matmul": shares and statistics.median(shares),
        # Of one device: what its allocator counted; where there is none, what XLA says that the program needs.
        "peak_memory_bytes": peak_bytes(compiled) if peak_memory is None else peak_memory,
        "compile_s": compile_s,
        "predicted_step_time_s": bound and bound.step_s,
        "hardware": {"device": kind, "cpu": processor(), "cpu_cores": about["cpu_cores"]},
        "versions": {"python": about["python"], **about["packages"], "XLA_FLAGS": about["XLA_FLAGS"]},
    }


def random_batch(trainer: Trainer, config: Any) -> Any:
    """Tokens of no data set, in documents as long as C4's."""
    rows, rng = (config.training.tokens.batch, config.training.tokens.len), np.random.default_rng(0)
    values = {
        "targets": rng.integers(0, config.model.vocab, rows).astype(np.uint32),
        "is_seq_start": rng.random(rows) < 1 / DOCUMENT,
        "is_target": np.ones(rows, bool),
        "weight": np.ones(rows, np.float32),
    }
    batch = trainer.TokenBatch(**{name: values[name] for name in fields(trainer.TokenBatch)})
    return jax.device_put(batch, make_shardings(trainer.TokenBatch))


def timed_in_flight(next_step: Callable, steps: int) -> list[float]:
    """Seconds of each step. The device always has the next steps at hand, so that the host does not hold it up."""
    in_flight: collections.deque[jax.Array] = collections.deque()
    ends = []

    def wait() -> None:
        in_flight.popleft().block_until_ready()
        ends.append(time.perf_counter())

    for _ in range(WARM_UP_STEPS + steps):
        in_flight.append(next_step()[1].loss)
        if len(in_flight) > PROGRAMS_IN_FLIGHT:
            wait()
    while in_flight:
        wait()
    return np.diff(ends[WARM_UP_STEPS - 1 :]).tolist()


def product_on(device: jax.Device) -> Callable:
    """A product of 1024³ that is to be run there."""
    ones = jax.device_put(jnp.ones((1024, 1024), jnp.bfloat16), device)
    return functools.partial(jax.jit(jnp.matmul).lower(ones, ones).compile(), ones, ones)


def timed_between_products(next_step: Callable, steps: int, product: Callable) -> tuple[list[float], list[float]]:
    """Seconds of each step, and FLOP/s of the product right after it."""
    times, rates = [], []
    for _ in range(WARM_UP_STEPS + steps):
        times.append(took(next_step))
        rates.append(2 * 1024**3 / statistics.median(took(product) for _ in range(PRODUCTS)))
    return times[WARM_UP_STEPS:], rates[WARM_UP_STEPS:]


def took(work: Callable) -> float:
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


def processor() -> str:
    """The CPU's name, where Linux or Python knows it."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


# ---------------------------------------------------------------- lines


def table(lines: list[Line]) -> list[str]:
    """The lines for a reader; n/a where a figure is not known."""
    rows = [["", "mesh", "tokens/s", "step", "spread", "MFU", "6ND", "share", "memory", "compile", "predicted"]]
    for line in lines:
        share, memory_bytes = line["share_of_matmul"], line["peak_memory_bytes"]
        rows.append(
            [
                line["config"],
                "×".join(str(size) for size in line["mesh"].values()),
                f"{line['tokens_per_s']:,.0f}",
                seconds(line["step_time_s"]),
                seconds(line["step_time_spread_s"]),
                percent(line["mfu"]),
                percent(line["mfu_6nd"]),
                "n/a" if share is None else f"{share:.3f}",
                "n/a" if memory_bytes is None else gigabytes(memory_bytes),
                seconds(line["compile_s"]),
                seconds(line["predicted_step_time_s"]),
            ]
        )
    return columns(rows, range(1, len(rows[0]))) if lines else []


if __name__ == "__main__":
    command_line.run(main, Benchmark)
