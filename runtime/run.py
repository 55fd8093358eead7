"""The mechanics around the steps: devices and mesh, the run folder, what is due when, and `check_only`.

with jax.set_mesh(start(config)), Run(config, done_steps, model_flops) as run:
    for step in run.steps():
        ...
        run.log(step, metrics)
"""

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ledger.hardware import peak_flops_per_s
from runtime.config import RunConfig, prepare_devices, to_yaml
from runtime.config_checks import check_mesh, check_num_hosts
from runtime.errors import RunError
from runtime.hlo_graph import StepGraph
from runtime.profiling import Profiler
from runtime.tracking import Tracker, print_line
from shardlib.mesh import make_mesh
from shardlib.shardtypes import ShardingError, typed_shard_map

# The device never runs dry, and the host does not run away from it: with 32 programs in flight, simulated devices stop for
# ever (jax 0.10.2: the next program waits for a place in each device's queue while it already holds others').
PROGRAMS_IN_FLIGHT = 8


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


def run_folder(config: RunConfig) -> Path:
    return Path(config.paths.root_working_dir) / config.paths.model_name


def report_check(config: RunConfig, step: typed_shard_map, *arguments: Any) -> None:
    """Proves the types of a step on the config's mesh, without a device, and prints what was proved.

    Args:
      arguments: the step's, arrays or `ShapeDtypeStruct` of global shapes.
    Raises:
      RunError: with the first claim that is not so, and its line.
    """
    mesh = jax.sharding.AbstractMesh((config.mesh.d, config.mesh.t), ("d", "t"))
    began = time.perf_counter()
    try:
        proved = step.check(mesh, *arguments)
    except ShardingError as error:
        raise RunError(f"{step.name} is refused on the mesh d={config.mesh.d} × t={config.mesh.t}:\n{error}") from None
    print_line(
        f"{step.name} on the mesh d={config.mesh.d} × t={config.mesh.t}: {proved} claims proved in {time.perf_counter() - began:.1f} s.\n"
        "  Proved: at each operation and annotation, along which axes the value is split, the same or a sum not yet taken; no\n"
        "  reduction is forgotten or doubled, and every transfer is an operation with a string.\n"
        "  Not proved: which rows a device sees, random keys, arithmetic with a device's index, the mathematics."
    )


class Run:
    """One run's folder, metrics, profile and graph, and which steps are still to do.

    Args:
      config: written to the run folder as config.yaml.
      total_steps: of the whole run.
      done_steps: those behind the checkpoint that it goes on from.
      tokens_per_step, model_flops_per_step: of the global batch.
    """

    def __init__(
        self, config: RunConfig, total_steps: int, done_steps: int, tokens_per_step: int, model_flops_per_step: float
    ):
        self._config, self._total, self._done = config, total_steps, done_steps
        self.folder = run_folder(config)
        self.is_leader = jax.process_index() == 0
        if self.is_leader:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        peak = peak_flops_per_s(jax.devices()[0].device_kind)
        self.tracker = Tracker(
            self.folder,
            start_step=done_steps,
            total_steps=total_steps,
            tokens_per_step=tokens_per_step,
            model_flops_per_step=model_flops_per_step,
            peak_flops_per_s=None if peak is None else peak * config.mesh.d * config.mesh.t,
            log_interval=config.log_interval,
            is_leader=self.is_leader,
        )
        self._profiler = Profiler(self.folder, start_step=done_steps, total_steps=total_steps, is_leader=self.is_leader)
        self._graph: StepGraph | None = None
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        self._open.enter_context(self.tracker)
        self._open.enter_context(self._profiler)
        return self

    def __exit__(self, *error) -> None:
        self._open.__exit__(*error)
        if self._graph is not None:
            self._graph.close()

    def show(self, compiled: jax.stages.Compiled) -> jax.stages.Compiled:
        """Writes the compiled step as text and graph, in the background; returns it."""
        if self.is_leader and not (self.folder / "step.svg").exists():
            self._graph = StepGraph(compiled, self.folder)
        return compiled

    def steps(self) -> Iterator[int]:
        """The steps to do, from 0; each is profiled if it is one of those."""
        for step in range(self._done, self._total):
            self._profiler.before_step(step + 1)
            yield step

    def log(self, step: int, outputs: Any, metrics: Any) -> None:
        """Takes what a step that was just dispatched returns; its numbers are read later, when they are due."""
        self._profiler.after_step(step + 1, outputs)
        self.tracker.log(step + 1, vars(metrics))
        self.stay_close(metrics.loss)

    def stay_close(self, output: jax.Array) -> None:
        """Called with an output of each program that is dispatched: lets the device be PROGRAMS_IN_FLIGHT behind, not more."""
        self._in_flight.append(output)
        if len(self._in_flight) > PROGRAMS_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()

    def due(self, step: int, interval: int) -> bool:
        """Whether something that is done every `interval` steps, and at the end, is due after this step."""
        return (step + 1) % interval == 0 or step + 1 == self._total
