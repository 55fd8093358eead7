"""Several hosts: finds the other processes, lays the mesh over their devices, and says who failed.

    mesh = start(config)        # in every process
    crossing(mesh)              # ('d',): the axes whose collectives use the network

`jax.distributed` finds the processes that Slurm's srun, Open MPI's mpirun, a Kubernetes Job or JobSet, or Cloud TPU has
started; elsewhere the keys `cluster.*` name them (docs/hosts.md).
"""

import math
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh

from ledger.count.step import Ledger
from ledger.pages.table import columns
from ledger.units import gigabytes
from runtime.cluster.tuning import is_given, keep_programs, multiply_bfloat16
from runtime.terminal import RunError, one_of_several, print_line, print_note
from shardlib.mesh import make_mesh
from shardlib.shardtypes import mesh_text

START_S = 300  # processes wait so long for each other: in a large job some are scheduled minutes later
WAITING_S = 30  # a process that has waited so long says so
SILENT_S = 60  # all others end when a process sends no heartbeat for so long; JAX's default is 100

# Where Open MPI and Slurm say how many processes a job has, in JAX's order. JAX itself asks Kubernetes and Cloud TPU.
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
MOST_SIMULATED = 2**10  # devices; JAX starts so many in a second
LONGEST_NAME = 64  # a Linux host's


def start(config: Any) -> Mesh:
    """Starts JAX and returns the config's mesh. On several hosts process 0 prints a table of them, and error messages
    begin with the host's name. Raises RunError: hosts or devices are not those of the config, or JAX does not start."""
    prepare_devices(config)
    launched = [os.environ[variable] for variable in LAUNCHERS if variable in os.environ]
    if launched and config.cluster.coordinator is None:
        check_num_hosts(config, int(launched[0]))  # before processes wait for each other
    if config.num_hosts > 1 and not jax.distributed.is_initialized():  # it is started, in a sweep's later jobs
        _join(config)
    if config.num_hosts == 1:  # several hosts get JAX's own error: one may be at fault, so starting again helps
        find_devices()
    check_num_hosts(config, jax.process_count())
    if jax.process_count() > 1:
        one_of_several(socket.gethostname(), jax.process_index(), jax.process_count())
    check_mesh(config, jax.device_count(), jax.default_backend())
    axes, count = vars(config.mesh), math.prod(vars(config.mesh).values())
    keep_programs(jax.default_backend(), count)
    mesh = lay_out(jax.devices()[:count], axes)
    if jax.process_count() > 1:
        names = host_names()
        if jax.process_index() == 0:
            print_line("\n".join([*table(mesh, names), *advice(mesh)]))
    return mesh


def prepare_devices(config: Any) -> None:
    """Lets a CPU simulate the mesh's devices, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES says how many."""
    multiply_bfloat16()
    is_set = jax.config.jax_num_cpu_devices != -1  # type: ignore[attr-defined]  # its types lack flags
    if config.check_only or is_set or is_given("xla_force_host_platform_device_count"):
        return
    try:
        wanted = math.prod(vars(config.mesh).values()) // config.num_hosts
        jax.config.update("jax_num_cpu_devices", min(max(1, wanted), MOST_SIMULATED))  # beyond, check_mesh refuses
    except RuntimeError:  # JAX has started (a sweep's later job): check_mesh refuses if devices are too few
        return


def check_num_hosts(config: Any, process_count: int) -> None:
    """Raises RunError: the job does not have num_hosts processes."""
    if (num_hosts := config.num_hosts) != process_count:
        has = f"this job has {process_count} process{'es' if process_count > 1 else ''}"
        start_one = f"start one {f'on each of {num_hosts} hosts' if num_hosts > 1 else 'alone'}"
        where = config.origins.of("num_hosts")
        raise RunError(f"{where}: num_hosts = {num_hosts}: {has}: {start_one}, or set num_hosts={process_count}")


def check_mesh(config: Any, device_count: int, platform: str) -> None:
    """Raises RunError: the devices of all processes cannot form the mesh. On one host a smaller mesh leaves devices
    idle. platform: 'cpu', 'gpu' or 'tpu'."""
    axes, hosts = vars(config.mesh), config.num_hosts
    needed = math.prod(axes.values())
    if needed == device_count or (needed < device_count and hosts == 1):
        return
    keys = [f"mesh.{axis}" for axis in axes]
    fix = f"set {' and '.join(keys)} so that their product is {device_count}"
    if platform == "cpu":
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed // hosts}"
        fix += f", or simulate {needed // hosts} devices{' in each process' * (hosts > 1)}: {flag}"
    elif needed > device_count:
        fix += ", or run on more devices; check_only=true checks the step without any"
    asked = f"{config.origins.of(keys[0])}: {' × '.join(keys)} = {' × '.join(map(str, axes.values()))}"
    expected = f"expected {device_count} devices{' or fewer' * (hosts == 1)}"
    raise RunError(f"{asked}: {expected}, since this job has {device_count} ({platform}), not {needed}: {fix}")


def find_devices() -> list[jax.Device]:
    """All devices; starts JAX. Raises RunError: it cannot use one, or JAX_PLATFORMS names what is not there."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter has no text
        why = str(error) or "what JAX_PLATFORMS asks for is not installed"
        fix = "nvidia-smi says whether a GPU's driver works, pip install 'jax[cuda13]' brings what JAX needs besides"
        raise RunError(f"JAX does not start: {why}; fix: {fix}; JAX_PLATFORMS=cpu does without the device") from error


# ---------------------------------------------------------------- who is there


def _join(config: Any) -> None:
    cluster, host = config.cluster, socket.gethostname()
    # JAX ends with status 134, and does not say who is missing.
    says = f"host {host}: waiting for the others of {config.num_hosts} processes for {WAITING_S} s; after {START_S} s "
    says += "this ends with status 134. Do all of them run, and do they reach process 0 and its port?"
    waiting = threading.Timer(WAITING_S, print_note, [says])
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            num_processes=None if cluster.coordinator is None else config.num_hosts,
            process_id=cluster.process_id,
            local_device_ids=_local_devices(),
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=SILENT_S,
        )
    except ValueError as error:  # nothing that JAX knows has started this process
        why = f"nothing says who the other processes are ({str(error).rstrip('.')})"
        launchers = "srun, mpirun, a Kubernetes Job or JobSet with completionMode: Indexed, or Cloud TPU"
        fix = f"start it by {launchers}, or set cluster.coordinator=HOST:PORT and cluster.process_id"
        raise RunError(f"num_hosts = {config.num_hosts}, but {why}: {fix}") from error
    except RuntimeError as error:  # JaxRuntimeError is one
        raise RunError(f"host {host}: jax.distributed did not start: {error}") from error
    finally:
        waiting.cancel()


def _local_devices() -> Sequence[int] | None:
    """[]: a process that is alone on its host takes all devices that it sees. None: JAX chooses one GPU a process, as
    it would anyway under Slurm and Open MPI."""
    tasks, nodes = os.environ.get("SLURM_STEP_NUM_TASKS"), os.environ.get("SLURM_STEP_NUM_NODES")
    here = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1" if tasks == nodes else "several")
    return [] if here == "1" and "JAX_LOCAL_DEVICE_IDS" not in os.environ else None


def host_names() -> list[str]:
    name = np.frombuffer(socket.gethostname().encode()[:LONGEST_NAME].ljust(LONGEST_NAME), np.uint8)
    return [bytes(row).decode().strip() for row in np.asarray(multihost_utils.process_allgather(name))]


# ---------------------------------------------------------------- the mesh


def domain(device: Any) -> int:
    """The device's group, which fast links join: a TPU's slice, a host's GPUs, a process' simulated devices."""
    index = None if device.platform == "cpu" else getattr(device, "slice_index", None)
    return device.process_index if index is None else index


def lay_out(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    """The mesh over these devices. Neighbours along its last axes are on one host if the sizes allow it.

    JAX places the axes along a TPU slice's torus. It refuses several slices or GPU hosts; these follow one another here
    along the first axes.
    """
    left = domains = len({domain(device) for device in devices})
    if domains == 1:
        return make_mesh(dict(axes), devices=devices)
    between = []  # the slices along each axis
    for size in axes.values():
        between.append(math.gcd(size, left))
        left //= between[-1]
    if devices[0].platform == "tpu" and left == 1:
        within = [size // slices for size, slices in zip(axes.values(), between, strict=True)]
        # v5e's slices are tori of two dims, which a mesh's axes may have to share.
        placed = mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    else:
        near = sorted(devices, key=lambda device: (domain(device), device.process_index, device.id))
        placed = np.array(near).reshape(*axes.values())
    return Mesh(placed, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def crossing(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which devices are on different hosts (TPUs: slices), so collectives use the network."""
    place = np.vectorize(domain)(mesh.devices)
    names = enumerate(mesh.axis_names)
    return tuple(name for index, name in names if (place != np.take(place, [0], axis=index)).any())


def table(mesh: Mesh, names: Sequence[str]) -> list[str]:
    """Lines with each process's host (`names`), devices and part of the mesh, and with the axes that cross hosts."""
    devices = mesh.devices
    process = np.vectorize(lambda device: device.process_index)(devices)
    rows = [("process", "host", "devices")]
    for index, name in enumerate(names):
        places = np.argwhere(process == index)
        ranges = zip(mesh.axis_names, places.min(axis=0), places.max(axis=0))
        part = ", ".join(f"{axis} {first}" + (f"-{last}" if last > first else "") for axis, first, last in ranges)
        rows.append((str(index), name, f"{len(places)} × {devices[tuple(places[0])].device_kind}: {part}"))
    crossed, group = crossing(mesh), _group(devices)
    within = [axis for axis, size in mesh.shape.items() if axis not in crossed and size > 1]
    crosses = f"axis {' and axis '.join(crossed)} crosses {group}s" if crossed else f"no axis leaves a {group}"
    crosses += f"; axis {' and axis '.join(within)} stays within one" if within and crossed else ""
    title = f"{len(names)} hosts, {devices.size} devices: {mesh_text(mesh.shape)}"
    return [title, *(f"  {row}" for row in columns(rows, right={0})), crosses]


def _group(devices: np.ndarray) -> str:
    return "slice" if devices.flat[0].platform == "tpu" else "host"


def advice(mesh: Mesh) -> list[str]:
    """A warning with its fix, if the last axis, along which most bytes are sent, crosses hosts."""
    (first, first_size), *_, (last, size) = mesh.shape.items()
    if first == last or last not in crossing(mesh):
        return []
    group = _group(mesh.devices)
    _, counts = np.unique(np.vectorize(domain)(mesh.devices), return_counts=True)
    fits = max(part for part in range(1, size) if size % part == 0 and (counts % part == 0).all())
    what = f"axis {last} (mesh.{last} = {size}) crosses {group}s, which have {counts.min()} devices each"
    why = f"every layer waits for its collectives over {last}, several times, at the network's speed"
    return [f"warning: {what}: {why}; set mesh.{last}={fits} mesh.{first}={first_size * size // fits}"]


def sent_over_network(ledger: Ledger, mesh: Mesh) -> list[str]:
    """A line with the bytes that a step sends along axes that cross hosts, if one does."""
    crossed = crossing(mesh)
    if not crossed:
        return []
    rows = ledger.costs.collectives.items()
    sent = sum(row.sent_bytes(ledger.mesh) * times for row, times in rows if set(row.axes) & set(crossed))
    return [
        f"Between {_group(mesh.devices)}s, along axis {' and axis '.join(crossed)}: {gigabytes(sent)} of the "
        f"{gigabytes(ledger.sent_bytes())} that each device sends in a step."
    ]
