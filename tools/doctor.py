"""Whether this machine can do a run, how fast its parts are, and the command that repairs what is wrong.

    python -m tools.doctor                                                    # for the job to try first
    python -m tools.doctor --config-name=c4_a100x8_1b                         # for that run: its mesh, its run folder
    python -m tools.doctor mesh.d=2 mesh.t=4 paths.root_working_dir=s3://bucket/runs

Looks at versions, the packages of the run's trackers, devices, the collectives over each axis of the mesh, the data,
and the store of checkpoints. Exits with 1 when something that the run needs is missing or broken; a
version that is not the tested one is only said. Each part takes a second or two, so figures are within some per cent of
what a benchmark would say, on a machine that does nothing else.
"""

import functools
import os
import platform
import re
import secrets
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ledger.count.costs import Collective
from ledger.machines.hardware import of_device_kind
from runtime import program
from runtime.checkpoints.store import open_store
from runtime.cluster.processes import NoDevice, crossing, prepare_devices, start
from runtime.config import command_line
from runtime.config.checks import check_dataset
from runtime.data.batches import Batch
from runtime.data.chunks import read_errors
from runtime.data.sources import open_data
from runtime.terminal import RunError
from runtime.tracking.trackers import PACKAGES
from shardlib.mesh import shard_map
from shardlib.shardtypes import make_shardings, mesh_text

ROOT = Path(__file__).resolve().parents[1]
NEEDED, TRACKERS = "requirements-cpu.txt", "requirements-trackers.txt"
REPEATS = 5  # the median counts
COLLECTIVE_BYTES = {"cpu": 4 * 2**20}  # of the whole array, before it is scattered or after it is gathered
LARGE_COLLECTIVE = 256 * 2**20
FILES, FILE_BYTES = 16, 4 * 2**20
LONGEST_STORE_S = 60.0

Row = tuple[str, str, str]  # a part, what was found, and the command that repairs it: empty where all is well


def main(config: Any) -> None:
    """Prints rows as they come. Of several processes each measures, since collectives need all, and all but the first
    print only what is wrong with their own host."""
    wrong = []
    for part, found, fix in rows(config):
        if fix:
            wrong.append(part)
        if fix or jax.process_index() == 0:
            text = [f"{'WRONG' if fix else 'ok':6} {part:25} {found}", f"{'':33}fix: {fix}"][: 1 + bool(fix)]
            for line in text:
                print(textwrap.fill(line, 120, subsequent_indent=" " * 33, break_on_hyphens=False), flush=True)
    if wrong:
        raise RunError(f"missing or broken: {', '.join(wrong)}; the fix of each is below it")
    if jax.process_index() == 0:
        print("\nNothing that this run needs is missing or broken.")


def rows(config: Any) -> Iterator[Row]:
    prepare_devices(config)
    mesh, refusal = None, ""
    try:
        mesh = start(config)
    except NoDevice as error:
        what, _, fix = str(error).partition("; fix: ")
        yield "devices", what, fix
        return
    except RunError as error:
        if config.num_hosts > 1:  # the others are not there, or see the same
            raise
        refusal = str(error)
    yield from packages(config)
    yield from devices(config, mesh, refusal)
    if mesh is not None:
        yield from collectives(mesh)
    yield from data(config, mesh)
    if jax.process_index() == 0:
        yield from storage(config.paths.root_working_dir, config.io.max_io_threads)


def packages(config: Any) -> Iterator[Row]:
    """Python, each package that is missing or not as tested, and how many others there are."""
    yield "python", f"{platform.python_version()}, {sys.executable}", ""
    pins = {}
    for file in (NEEDED, TRACKERS):
        text = (ROOT / file).read_text(encoding="utf-8")
        pins[file] = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    trackers = [PACKAGES[name][0] for name in config.tracking.to]
    asked_for = {**pins[NEEDED], **{name: pins[TRACKERS][name] for name in trackers}}
    versions = {each.name.replace("_", "-").lower(): each.version for each in metadata.distributions()}
    found = {name: versions.get(name.replace("_", "-").lower()) for name in asked_for}
    for name, pin in asked_for.items():
        if found[name] is None:
            yield name, "not installed, which this run needs", f"pip install {name}=={pin}"
        elif found[name] != pin:
            yield name, f"{found[name]}, not the tested {pin}: it may work", ""
    as_tested = sum(found[name] == pin for name, pin in asked_for.items())
    yield "packages", f"{as_tested} of {len(asked_for)} at the tested versions", ""


def devices(config: Any, mesh: Mesh | None, refusal: str) -> Iterator[Row]:
    """What JAX found, and the run's mesh over it."""
    found = jax.devices()
    kinds = ", ".join(sorted({device.device_kind for device in found}))
    text, fix = f"{len(found)} × {kinds} ({jax.default_backend()}), processes: {jax.process_count()}", ""
    unused = [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    if unused and jax.default_backend() == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        text, fix = f"{text}: JAX does not use {', '.join(unused)}", f'pip install "jax[cuda13]=={jax.__version__}"'
    yield "devices", text, fix
    (first, *others), size = vars(config.mesh), mesh_text(vars(config.mesh)).removeprefix("mesh ")
    if mesh is None:
        yield "mesh", f"{size}: {refusal}", " ".join([f"mesh.{first}={len(found)}", *(f"mesh.{x}=1" for x in others)])
    else:
        yield "mesh", size + "".join(f", axis {axis} crosses hosts" for axis in crossing(mesh)), ""


def collectives(mesh: Mesh) -> Iterator[Row]:
    """Bytes a second that leave a device, of each collective over each axis, and whether its result is right."""
    device, axes = mesh.devices.flat[0], dict(mesh.shape)
    whole, hardware = COLLECTIVE_BYTES.get(device.platform, LARGE_COLLECTIVE) // 4, of_device_kind(device.device_kind)
    spec = PartitionSpec(tuple(axes))  # each device has an operand of its own, and a result
    functions: dict[str, Callable[..., jax.Array]] = {
        "all-gather": lambda x, axis: lax.all_gather(x, axis, tiled=True),
        "reduce-scatter": lambda x, axis: lax.psum_scatter(x, axis, tiled=True),
        "all-reduce": lambda x, axis: lax.psum(x, axis),
    }
    for axis, count in axes.items():
        for kind, function in functions.items() if count > 1 else ():
            size, expected = (whole // count, 1) if kind == "all-gather" else (whole // count * count, count)
            ones = jax.jit(jnp.ones, static_argnums=0, out_shardings=NamedSharding(mesh, spec))(size * mesh.size)
            of_axis: Any = functools.partial(function, axis=axis)
            run = functools.partial(jax.jit(shard_map(of_axis, mesh, (spec,), spec)), ones)
            rate = Collective(kind, (axis,), "float32", 4 * size, "", "").sent_bytes(axes) / _seconds(run)
            text, fix = f"{rate / 1e9:,.3g} GB/s leave each device", ""
            link = hardware and (hardware.network_bytes_per_s if axis in crossing(mesh) else hardware.link_bytes_per_s)
            text += f", {rate / link:.0%} of the published link" if link else ""
            values = np.asarray(run().addressable_shards[0].data)
            if not (values == expected).all():
                text = f"of ones it makes {values.min():g} to {values.max():g}, expected {expected}; {text}"
                fix = "look at the links and their driver (nvidia-smi topo -m, dmesg)"
            yield f"{kind} {axis}", text, fix


def _seconds(run: Callable[[], jax.Array]) -> float:
    """Of the median run, after one that compiles and one that warms up."""
    times = []
    for _ in range(2 + REPEATS):
        begin = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def data(config: Any, mesh: Mesh | None) -> Iterator[Row]:
    """Opens both splits as the run would, and holds them against its vocabulary and its steps."""
    # Without a mesh there is one process, which reads all rows of a batch: as if for one device.
    sharding = Batch(*[SingleDeviceSharding(jax.local_devices()[0])] * 3)
    if mesh is not None:
        with jax.set_mesh(mesh):
            sharding = make_shardings(program.load(config.program).TokenBatch)
    try:
        with open_data(config, "train", sharding) as training, open_data(config, "validation", sharding) as validation:
            largest_id = max(training.max_token_id, validation.max_token_id)
            check_dataset(config, largest_id, training.steps, training.bos_id)
            yield "data", training.summary, ""
    except RunError as error:
        text = "; ".join(map(str.strip, str(error).splitlines()))  # a line for each problem
        yield "data", text, "as it says; docs/data.md has how to write a data set from your own text"


def storage(root: str, threads: int) -> Iterator[Row]:
    """Writes and reads files where the run would save checkpoints, as many at once as it would."""
    is_local = "://" not in root
    was_there = not is_local or Path(root).exists()
    folder, content = f"doctor-{secrets.token_hex(4)}", np.random.default_rng(0).bytes(FILE_BYTES)
    names = [f"{folder}/{index}" for index in range(FILES)]
    try:
        store = open_store(root, LONGEST_STORE_S)
        with ThreadPoolExecutor(threads) as pool:
            try:
                begin = time.perf_counter()
                list(pool.map(lambda name: store.write(name, content), names))
                written = time.perf_counter()
                read = list(pool.map(store.read, names))
                times = written - begin, time.perf_counter() - written
            finally:
                store.remove(folder)
                if not was_there:
                    os.rmdir(root)
    except RunError as error:  # it says what to install
        what, _, fix = str(error).partition(" Fix: ")
        yield "store", what, fix
        return
    except read_errors() as error:  # TimeoutError and PermissionError among them
        here = f'mkdir -p "{root}" && chmod u+rwx "{root}"'
        fix = here if is_local else "check the URL, the credentials, the network"
        yield "store", f"{root}: {type(error).__name__}: {error}", f"{fix}; or paths.root_working_dir=ANOTHER"
        return
    if any(each != content for each in read):
        yield "store", f"{root}: what was read is not what was written", "replace the disk, or use another"
        return
    writes, reads = (f"{FILES * FILE_BYTES / s / 1e6:,.0f} MB/s" for s in times)
    if is_local:  # reading would say how fast the system's memory is, which still holds what was written
        free = shutil.disk_usage(root if was_there else Path(root).absolute().parent).free
        reads = f"{free / 1e9:,.1f} GB free"
    yield "store", f"{root}: writes {writes}, {'' if is_local else 'reads '}{reads}", ""


if __name__ == "__main__":
    command_line.run(main, program.with_keys(program.ProgramKey, program.of_command_line(sys.argv[1:])))
