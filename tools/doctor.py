"""Says whether this machine can do a run, how fast its links are, and which command repairs what is wrong.

    python -m tools.doctor                                                    # for the job to try first
    python -m tools.doctor --config-name=c4_a100x8_1b                         # for that run: its mesh, its run folder
    python -m tools.doctor mesh.d=2 mesh.t=4 paths.root_working_dir=s3://bucket/runs

Looks at versions, the packages of the run's trackers, devices, an all-reduce over each axis of the mesh, the data, and
the store of checkpoints. Exits with 1 when something that the run needs is missing or broken; a version that is not the
tested one is only named. A rate takes a second, on a machine that does nothing else.
"""

import contextlib
import functools
import os
import platform
import re
import secrets
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ledger.count.costs import turns
from ledger.machines.hardware import of_device_kind
from runtime import program
from runtime.checkpoints.store import open_store
from runtime.cluster.processes import crossing, start
from runtime.config import command_line
from runtime.config.checks import check_dataset
from runtime.data.chunks import read_errors
from runtime.data.sources import open_data
from runtime.terminal import RunError, print_line, wrapped
from runtime.tracking.trackers import PACKAGES
from shardlib.mesh import shard_map
from shardlib.shardtypes import make_shardings, mesh_text

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 5  # the median counts
ALL_REDUCE_BYTES = {"cpu": 4 * 2**20}  # the size on each device
LARGE_ALL_REDUCE = 256 * 2**20
LONGEST_STORE_S = 60.0

Row = tuple[str, str, str]  # a part, what was found, and the command that repairs it: empty where all is well


def main(config: Any) -> None:
    """Prints rows as they come. All processes measure; those after the first print what is wrong with their host."""
    wrong = []
    for part, state, fix in rows(config):
        if fix or jax.process_index() == 0:
            print_line(wrapped(f"{'WRONG' if fix else 'ok':6} {part:25} {state}", others=" " * 33))
        if fix:
            print_line(wrapped(f"fix: {fix}", " " * 33, " " * 33))
            wrong.append(part)
    if wrong:
        raise RunError(f"missing or broken: {', '.join(wrong)}; the fix of each is below it")
    if jax.process_index() == 0:
        print_line("\nNothing that this run needs is missing or broken.")


def rows(config: Any) -> Iterator[Row]:
    try:
        mesh = start(config)
    except RunError as error:
        if config.num_hosts > 1:  # the others are not there, or see the same
            raise
        what, _, fix = str(error).partition("; fix: ")
        yield "devices", what, fix or "as it says, then run this again: nothing else was checked"
        return
    config = program.resolved(config, program.load(config.program))
    yield packages(config.tracking.to)
    yield from devices(mesh)
    yield from all_reduces(mesh)
    yield from data(config, mesh)
    if jax.process_index() == 0:
        yield from storage(config.paths.root_working_dir)


def devices(mesh: Mesh) -> Iterator[Row]:
    kinds = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    text, fix = f"{jax.device_count()} × {kinds} ({jax.default_backend()}), processes: {jax.process_count()}", ""
    unused = [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    if unused and jax.default_backend() == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        text, fix = f"{text}: JAX does not use {', '.join(unused)}", f'pip install "jax[cuda13]=={jax.__version__}"'
    yield "devices", text, fix
    crosses = "".join(f", axis {axis} crosses hosts" for axis in crossing(mesh))
    yield "mesh", mesh_text(mesh.shape).removeprefix("mesh ") + crosses, ""


def packages(trackers: tuple[str, ...]) -> Row:
    """The packages that are missing, and those of another version than the tested one."""
    file = ROOT / "requirements-cpu.txt"
    text = file.read_text() if file.exists() else ""  # what an installed clearshard needs pip has seen to
    needed = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    needed |= dict(PACKAGES[name][1].split("==") for name in trackers)
    missing, versions = [], [f"python {platform.python_version()}, {sys.executable}"]
    for name, pin in needed.items():
        try:
            if (version := metadata.version(name)) != pin:
                versions.append(f"{name} {version}, not the tested {pin}: it may work")
        except metadata.PackageNotFoundError:
            missing.append(f"{name}=={pin}")
    if missing:
        what = f"{', '.join(missing)}: not installed, which this run needs"
        return "packages", what, f"pip install {' '.join(missing)}"
    return "packages", "; ".join(versions), ""


def all_reduces(mesh: Mesh) -> Iterator[Row]:
    """Bytes a second that leave a device in an all-reduce over each axis, and whether its sum is right."""
    device = mesh.devices.flat[0]
    size = ALL_REDUCE_BYTES.get(device.platform, LARGE_ALL_REDUCE) // 4
    hardware, spec = of_device_kind(device.device_kind), PartitionSpec(mesh.axis_names)
    for axis, count in mesh.shape.items():
        if count == 1:
            continue
        ones = jax.jit(jnp.ones, static_argnums=0, out_shardings=NamedSharding(mesh, spec))(size * mesh.size)
        add: Any = functools.partial(lax.psum, axis_name=axis)
        run = functools.partial(jax.jit(shard_map(add, mesh, (spec,), spec)), ones)
        rate = turns("all-reduce", count) * 4 * size / _seconds(run)
        text, fix = f"{rate / 1e9:,.3g} GB/s leave each device", ""
        link = hardware and (hardware.network_bytes_per_s if axis in crossing(mesh) else hardware.link_bytes_per_s)
        text += f", {rate / link:.0%} of the published link" if link else ""
        values = np.asarray(run().addressable_shards[0].data)
        if not (values == count).all():
            text = f"of ones it makes {values.min():g} to {values.max():g}, expected {count}; {text}"
            fix = "look at the links and their driver (nvidia-smi topo -m, dmesg)"
        yield f"all-reduce {axis}", text, fix


def _seconds(run: Callable[[], jax.Array]) -> float:
    """The median run's time, after one that compiles and one that warms up."""
    return statistics.median(timeit.repeat(lambda: run().block_until_ready(), number=1, repeat=2 + REPEATS)[2:])


def data(config: Any, mesh: Mesh) -> Iterator[Row]:
    """Opens both splits as the run would, and checks them against its vocabulary and its steps."""
    _, batch = program.load(config.program).shapes(config)
    with jax.set_mesh(mesh):
        sharding = make_shardings(type(batch))
    try:
        splits = [contextlib.closing(open_data(config, split, sharding)) for split in ("train", "validation")]
        with splits[0] as training, splits[1] as validation:  # without a run that owns its folder, none is begun
            largest_id = max(training.max_token_id, validation.max_token_id)
            epochs = training.epochs_of(config.training.steps)
            check_dataset(config, largest_id, training.steps, epochs, training.bos_id)
            yield "data", training.summary, ""
    except RunError as error:
        text = "; ".join(map(str.strip, str(error).splitlines()))  # a line for each problem
        yield "data", text, "as it says; docs/data.md says how to write a data set from your text"


def storage(root: str) -> Iterator[Row]:
    """Writes a file where the run would save checkpoints, reads it and removes it."""
    folder, content = f"doctor-{secrets.token_hex(4)}", secrets.token_bytes(2**20)
    try:
        store = open_store(root, LONGEST_STORE_S)
        try:
            store.write(f"{folder}/file", content)
            is_same = store.read(f"{folder}/file") == content
        finally:
            store.remove(folder)
    except RunError as error:  # it says what to install
        what, _, fix = str(error).partition(" Fix: ")
        yield "store", what, fix
    except read_errors() as error:  # TimeoutError and PermissionError among them
        here = f'mkdir -p "{root}" && chmod u+rwx "{root}"'
        fix = "check the URL, the credentials, the network" if "://" in root else here
        yield "store", f"{root}: {type(error).__name__}: {error}", f"{fix}; or paths.root_working_dir=ANOTHER"
    else:
        wrong = "" if is_same else "replace the disk, or use another"
        yield "store", f"{root}: what was read is {'' if is_same else 'not '}what was written", wrong


if __name__ == "__main__":
    command_line.run(main, program.with_keys(program.ProgramKey, program.of_command_line(sys.argv[1:])))
