"""The mechanics around the steps: devices and mesh, the run folder, what is due when, and `check_only`.

with jax.set_mesh(start(config)), Run(config, sharding, model_flops_per_step) as run:
    for step in run.steps():
        state, metrics = training_step(state, run.data.load(step))
        run.log(step, (state, metrics), metrics)
"""

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ledger.hardware import peak_flops_per_s
from runtime.checkpoint import latest_step, read_attributes, restore, save
from runtime.config import RunConfig, prepare_devices, to_yaml
from runtime.config_checks import check_dataset, check_mesh, check_num_hosts, check_resume
from runtime.data import Loader
from runtime.errors import RunError
from runtime.hlo_graph import StepGraph
from runtime.profiling import Profiler
from runtime.tracking import Tracker, print_line
from shardlib.mesh import make_mesh
from shardlib.shardtypes import ShardingError, typed_shard_map

# How far the host may be ahead. The device never runs dry of work, and the host does not run away from it: with 32 programs in flight, simulated devices stop for
# ever (jax 0.10.2: the next program waits for a place in each device's queue while it already holds others').
PROGRAMS_IN_FLIGHT = 8

# For a program that runs once its compilation is what takes time. XLA:CPU compiles the initialization in 2.3 s of CPU time with
# this and in 16.2 s without, to a program that draws the same bits (2.4M parameters, two cores, jax 0.10.2, 2026-11-21).
RUNS_ONCE = {"xla_backend_optimization_level": 1}


def start(config: RunConfig) -> jax.sharding.Mesh:
    """Starts JAX, on several hosts with its own discovery of the cluster, and returns the config's mesh.

    Raises:
      RunError: the hosts or the devices are not those that the config says.
    """
    prepare_devices(config)
    if config.num_hosts > 1:
        jax.distributed.initialize()
    check_num_hosts(config, jax.process_count())
    check_mesh(config, jax.device_count(), jax.default_backend())
    mesh = {"d": config.mesh.d, "t": config.mesh.t}
    return make_mesh(mesh, devices=jax.devices()[: config.mesh.d * config.mesh.t])


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """The tree of `ShapeDtypeStruct` with a sharding each."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def report_check(config: RunConfig, *checks: tuple[typed_shard_map, tuple]) -> None:
    """Proves the types of mapped functions on the config's mesh, without a device, and prints what was proved.

    Args:
      checks: each function with its arguments, arrays or `ShapeDtypeStruct` of global shapes.
    Raises:
      RunError: with the first claim that is not so, and its line.
    """
    mesh = jax.sharding.AbstractMesh((config.mesh.d, config.mesh.t), ("d", "t"))
    where = f"on the mesh d={config.mesh.d} × t={config.mesh.t}"
    for function, arguments in checks:
        began = time.perf_counter()
        try:
            proved = function.check(mesh, *arguments)
        except ShardingError as error:
            raise RunError(f"{function.name} is refused {where}:\n{error}") from None
        print_line(f"{function.name} {where}: {proved} claims proved in {time.perf_counter() - began:.1f} s.")
    print_line(
        "Proved: at each operation and annotation, along which axes the value is split, the same, or a sum not yet taken. So no\n"
        "reduction is forgotten or doubled, and every transfer is an operation with a string.\n"
        "Not proved: which rows of the data a device sees, random keys, arithmetic with a device's index or a local size, the mathematics."
    )


class Run:
    """One run: its folder, data, checkpoints, metrics, profile and graph, and which steps are still to do.

    Args:
      config: train.py's; written to the run folder as config.yaml.
      sharding: of a batch's arrays 'B/d L'.
      model_flops_per_step: of the global batch.
    Raises:
      RunError: the data do not fit the config, or the run has all its steps already. Nothing is written then.
    """

    def __init__(self, config: Any, sharding: jax.sharding.Sharding, model_flops_per_step: float):
        self._config, tokens = config, config.training.tokens
        self._total = config.training.steps
        self.folder = Path(config.paths.root_working_dir) / config.paths.model_name
        self._checkpoints = self.folder / "checkpoints"
        self._threads = config.io.max_io_threads
        rows = {"batch": tokens.batch, "length": tokens.len, "sharding": sharding, "io_threads": self._threads}
        with contextlib.ExitStack() as opened:
            self.data = opened.enter_context(Loader(config.flat_tokens, "train", **rows))
            self.validation_data = opened.enter_context(Loader(config.flat_tokens, "validation", **rows, shuffle=False))
            largest_id = max(self.data.max_token_id, self.validation_data.max_token_id)
            check_dataset(config, largest_id, self.data.steps, self.data.bos_id)
            self.done_steps = latest_step(self._checkpoints) or 0
            check_resume(config, self.done_steps)
            self.attributes = read_attributes(self._checkpoints, self.done_steps) if self.done_steps else {}

            is_leader = jax.process_index() == 0
            if is_leader:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            peak = peak_flops_per_s(jax.devices()[0].device_kind)
            steps = {"start_step": self.done_steps, "total_steps": self._total, "is_leader": is_leader}
            self._tracker = Tracker(
                self.folder,
                **steps,
                tokens_per_step=tokens.batch * tokens.len,
                model_flops_per_step=model_flops_per_step,
                peak_flops_per_s=None if peak is None else peak * config.mesh.d * config.mesh.t,
                log_interval=config.log_interval,
            )
            opened.enter_context(self._tracker)
            self._profiler = opened.enter_context(Profiler(self.folder, **steps))
            self._open = opened.pop_all()
        self._is_leader = is_leader
        self._in_flight: collections.deque[jax.Array] = collections.deque()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error) -> None:
        self._open.__exit__(*error)

    def show(self, compiled: jax.stages.Compiled) -> jax.stages.Compiled:
        """Writes the compiled step as text and graph, in the background; returns it."""
        if self._is_leader and not (self.folder / "step.svg").exists():
            self._open.callback(StepGraph(compiled, self.folder).close)
        return compiled

    def restore(self, shapes: Any) -> Any:
        """The state of the checkpoint that the run goes on from; `shapes` is its tree of `ShapeDtypeStruct` with shardings."""
        return restore(self._checkpoints, self.done_steps, shapes, max_io_threads=self._threads)

    def save(self, step: int, state: Any, attributes: dict[str, Any]) -> None:
        """Writes the state after a step as a checkpoint; returns when it is complete."""
        save(self._checkpoints, step + 1, state, attributes, max_io_threads=self._threads)

    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 0."""
        for step in range(self.done_steps, self._total):
            self._profiler.before_step(step + 1)
            yield step

    def due(self, step: int, interval: int) -> bool:
        """Whether something that is done every `interval` steps, and at the end, is due after this step."""
        return (step + 1) % interval == 0 or step + 1 == self._total

    def log(self, step: int, outputs: Any, metrics: Any) -> None:
        """Takes what a step that was just dispatched returns; its numbers are read later, when they are due."""
        self._profiler.after_step(step + 1, outputs)
        self._tracker.log(step + 1, vars(metrics))
        self.stay_close(metrics.loss)

    def log_validation(self, step: int, loss: jax.Array, targets: jax.Array) -> None:
        """Logs the mean of the validation split's losses after a step, from their sum and their number."""
        self._tracker.log_validation(step + 1, float(loss) / max(float(targets), 1))

    def paused(self) -> contextlib.AbstractContextManager:
        """What is done inside does not count as a step's time."""
        return self._tracker.paused()

    def stay_close(self, output: jax.Array) -> None:
        """Called with an output of each program that is dispatched: lets the device be PROGRAMS_IN_FLIGHT behind, not more."""
        self._in_flight.append(output)
        if len(self._in_flight) > PROGRAMS_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()
