"""The config of a plan, and its step: on its mesh, with the kernel of its machine, counted without a device."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kernels.attention import suited
from ledger.count.step import Ledger, of_step
from ledger.machines import hardware
from runtime import program
from runtime.config.checks import check_combinations
from runtime.config.keys import Count
from runtime.terminal import RunError
from shardlib.shardtypes import mesh_text
from shardlib.spec import ShardingError


@dataclass(frozen=True, kw_only=True)
class OwnHardware:
    """A device that ledger/machines/hardware.yaml does not know; what is left out is n/a."""

    name: str  # the value of hardware=
    peak_flops_per_s: float | None = None  # bfloat16, dense
    hbm_bytes: int | None = None  # its memory
    hbm_bytes_per_s: float | None = None  # to and from its memory
    link_bytes_per_s: float | None = None  # from one device to the others of its host
    network_bytes_per_s: float | None = None  # from one device to other hosts


@dataclass(frozen=True, kw_only=True)
class Machine:
    # h200, tpu_v5p, ...: a name of ledger/machines/hardware.yaml or of own_hardware; null: no times
    hardware: str | None = None
    own_hardware: tuple[OwnHardware, ...] = ()  # [{name: mine, peak_flops_per_s: 1.0e15, ...}]
    devices_per_host: Count | None = None  # neighbours in the mesh's order; null: 8, of TPUs 4 chips
    folder: str | None = None  # gets ledger.txt, ledger.json and ledger.html; from a sweep sweep.html
    total_tokens: float | None = None  # 1.0e12: for time and price; null: those of the run's steps
    price: float | None = None  # price of one device for an hour, in any currency

    @property
    def per_host(self) -> int:
        """devices_per_host, or what is usual."""
        machine = hardware.named(self.hardware or "")
        of_four_chips = 4 * machine.xla.get("devices_per_chip", 0) if machine else 0  # 0: not of TPUs
        return self.devices_per_host or of_four_chips or 8


@dataclass(frozen=True, kw_only=True)
class PlanKeys(Machine, program.ProgramKey):
    """The machine to plan a config of training for."""

    hosts: Count | None = None  # null: as many as the mesh needs
    compile: bool = False  # compile it ahead of time too (requirements-plan.txt)
    sweep: bool = False  # the best meshes of so many devices, with what is kept and the fewest microbatches that fit


def plan_class(trainer: program.Trainer) -> type:
    """The class of a plan's config: a trainer's config, and the machine."""
    return program.with_keys(PlanKeys, trainer)


def machine_of(config: Any) -> hardware.Hardware:
    """The figures of the plan's device. Raises RunError for a name that is not known."""
    if config.hardware is None:
        return hardware.Hardware(None, None, None)
    for described in config.own_hardware:
        if described.name == config.hardware:
            figures = {key: value for key, value in vars(described).items() if key != "name"}
            return hardware.Hardware(**figures, source=f"own_hardware {described.name}")
    machine = hardware.named(config.hardware)
    if machine is None:
        names, own = ", ".join(hardware.NAMES), f"own_hardware=[{{name: {config.hardware}, peak_flops_per_s: ...}}]"
        raise RunError(f"{config.origins.of('hardware')}: hardware = {config.hardware}: expected {names}; or {own}")
    return machine


def with_kernel(config: Any, machine: hardware.Hardware) -> Any:
    """The config with the attention that the planned device would choose, where the trainer has that key."""
    if getattr(config.model, "attention", None) != "auto":
        return config
    platform = "tpu" if machine.torus_dims else "gpu" if machine.capability else "cpu"
    kernel = suited(platform, machine.capability, config.model.compute_dtype, config.model.d_head)
    return changed(config, model=dataclasses.replace(config.model, attention=kernel))


def on_mesh(config: Any) -> Any:
    """The config with the mesh that `hosts` and `devices_per_host` need: its own if it is as large, else with the rest
    of the devices along its first axis but that of stages. Raises RunError if there is none."""
    axes, per_host = vars(config.mesh), config.per_host
    keys, sizes = " × ".join(f"mesh.{axis}" for axis in axes), " × ".join(map(str, axes.values()))
    count = math.prod(axes.values())
    said = f"{keys} = {sizes} = {count} devices"
    if config.hosts is None:
        if count > per_host and count % per_host:
            raise RunError(f"{said} are no whole number of hosts of devices_per_host = {per_host}: set that")
        return changed(config, hosts=max(count // per_host, 1), devices_per_host=min(per_host, count))
    devices, first = config.hosts * per_host, next(axis for axis in axes if axis != "p")
    if count == devices:
        return config
    others = count // axes[first]
    if config.origins.of(f"mesh.{first}") == "command line" or devices % others:
        hosts = f"hosts × devices_per_host = {config.hosts} × {per_host} = {devices}"
        raise RunError(f"{said}, but {hosts}: set {keys} to that")
    return changed(config, mesh=dataclasses.replace(config.mesh, **{first: devices // others}))


def changed(config: Any, **keys) -> Any:
    new = dataclasses.replace(config, **keys)
    object.__setattr__(new, "origins", config.origins)  # frozen for everyone else
    check_combinations(new)
    return new


def shaped(config: Any, mesh: dict[str, int], **training: Any) -> Any:
    """The config on another mesh, with these keys of training."""
    devices = math.prod(mesh.values())
    per_host = min(config.per_host, devices)
    sizes, keys = dataclasses.replace(config.mesh, **mesh), dataclasses.replace(config.training, **training)
    return changed(config, mesh=sizes, training=keys, hosts=devices // per_host, devices_per_host=per_host)


def trace(
    config: Any, mesh: jax.sharding.AbstractMesh | jax.sharding.Mesh, arguments, check: bool = True
) -> jax.stages.Traced:
    """The training step, traced on a mesh; `arguments` are the state's and a batch's shapes. Without the check of its
    types it takes a quarter of the time."""
    zero, (state, batch) = np.uint32(0), arguments
    step, _ = program.load(config.program).mapped_steps(config, 0)
    step.checked = check
    try:
        return jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch)
    except ShardingError as error:
        raise RunError(f"the step cannot be split over the {mesh_text(mesh.shape)}:\n{error}") from None


def abstract_mesh(mesh: dict[str, int]) -> jax.sharding.AbstractMesh:
    """A mesh without devices, as runs have it; jax 0.11's default is another type of axes."""
    return jax.sharding.AbstractMesh(
        tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh)
    )


def ledger_of(config: Any, check: bool = True) -> Ledger:
    """The ledger of the config's step on its mesh, without a device."""
    trainer: Any = program.load(config.program)
    mesh = abstract_mesh(vars(config.mesh))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = trace(config, mesh, trainer.shapes(config), check)
    tokens = config.training.tokens
    return of_step(traced, vars(config.mesh), source=trainer.__file__, tokens=tokens.batch * tokens.len)
