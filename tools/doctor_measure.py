"""What tools/doctor.py tries: devices, matrix products, collectives over the axes of a mesh, the data, the store of
checkpoints.

A second or two for each, so figures are within some per cent of what a benchmark would say, on a machine that does
nothing else.
"""

import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from runtime.config.checks import check_dataset
from runtime.data.batches import Batch
from runtime.data.chunks import read_errors
from runtime.data.sources import open_data
from runtime.data.tokenizers import BYTES
from runtime.terminal import RunError
from runtime.tracking.hlo_graph import find_dot
from runtime.tracking.trackers import PACKAGES
from shardlib.mesh import shard_map
from shardlib.shardtypes import make_shardings, mesh_text
from tools.doctor_packages import BROKEN, GOOD, OPTION, Finding, needed_parts, optional_parts, tested

REPEATS = 5  # the median counts
PRODUCT_SIZE = {"cpu": 1024}  # rows and columns of both factors
LARGE_PRODUCT = 8192
PRODUCTS_AT_ONCE = 4  # one after another, so that the host's part does not count
COLLECTIVE_BYTES = {"cpu": 4 * 2**20}  # of the whole array, before it is scattered or after it is gathered
LARGE_COLLECTIVE = 256 * 2**20
FILES, FILE_BYTES = 16, 4 * 2**20
LONGEST_STORE_S = 60.0


def config_class(trainer: program.Trainer) -> type:
    """A trainer's config, and which trainer that is."""

    @dataclass(frozen=True, kw_only=True)
    class Doctor(program.ProgramKey, trainer.Config):
        pass

    return Doctor


def measured(config: Any) -> Iterator[tuple[Iterable[Finding], bool]]:
    """All findings, and whether this process prints them: of several each measures, since collectives need all."""
    prepare_devices(config)
    mesh, refusal = None, ""
    try:
        mesh = start(config)
    except NoDevice as error:
        what, _, fix = str(error).partition("; fix: ")
        yield [*needed_parts(), Finding(BROKEN, "devices", what, fix)], True
        return
    except RunError as error:
        if config.num_hosts > 1:  # the others are not there, or see the same
            raise
        refusal = str(error)
    is_leader = jax.process_index() == 0
    yield needed_parts(), is_leader
    yield optional_parts(asked_for(config)), is_leader
    yield devices(config, mesh, refusal), is_leader
    yield products(jax.local_devices()[0]), is_leader
    if mesh is not None:
        yield collectives(mesh), is_leader
    yield data(config, mesh), is_leader  # of several processes too: the data may be missing on one host
    if is_leader:
        yield storage(config.paths.root_working_dir, config.io.max_io_threads), True
        yield graphs(), True


def asked_for(config: Any) -> set[str]:
    """Which parts of tools.doctor.OPTIONAL the run does not start without."""
    sources = [source.filespec for source in (config.flat_tokens, *config.mixture)]
    urls = [config.paths.root_working_dir, *filter(None, sources)]
    asked = {
        "s3:// URLs": any(url.startswith("s3://") for url in urls),
        "hf_dataset": config.hf_dataset.path,
        "tokenizers": config.hf_dataset.path and config.hf_dataset.tokenizer != BYTES,
        **{f"tracking.{name}": name in config.tracking.to for name in PACKAGES},
    }
    return {purpose for purpose, is_asked in asked.items() if is_asked}


# ---------------------------------------------------------------- devices


def devices(config: Any, mesh: Mesh | None, refusal: str) -> Iterator[Finding]:
    """What JAX found, and the run's mesh over it."""
    found = jax.devices()
    kinds = sorted({device.device_kind for device in found})
    text = f"{len(found)} × {', '.join(kinds)} ({jax.default_backend()}), processes: {jax.process_count()}"
    memory = (found[0].memory_stats() or {}).get("bytes_limit") if jax.process_count() == 1 else None
    if memory:
        text += f", {memory / 2**30:.1f} GiB each for JAX"
    unused = [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    if unused and jax.default_backend() == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        fix = f'pip install "jax[cuda13]=={tested("requirements-cpu.txt")["jax"]}"'
        yield Finding(BROKEN, "devices", f"{text}: JAX does not use {', '.join(unused)}", fix)
    else:
        yield Finding(GOOD, "devices", text)
    (first, *others), size = vars(config.mesh), mesh_text(vars(config.mesh)).removeprefix("mesh ")
    if mesh is None:
        yield Finding(
            BROKEN,
            "mesh",
            f"{size}: {refusal}",
            " ".join([f"mesh.{first}={len(found)}", *(f"mesh.{axis}=1" for axis in others)]),
        )
    else:
        crossed = crossing(mesh)
        yield Finding(GOOD, "mesh", size + (f", axis {' and axis '.join(crossed)} crosses hosts" if crossed else ""))


def products(device: Any) -> Iterator[Finding]:
    """The rate of large square matrix products on one device."""
    size = PRODUCT_SIZE.get(device.platform, LARGE_PRODUCT)
    hardware = of_device_kind(device.device_kind)
    for dtype in (jnp.bfloat16, jnp.float32):

        @jax.jit
        def chain(x, w):
            for _ in range(PRODUCTS_AT_ONCE):
                x = x @ w
            return x

        name = jnp.dtype(dtype).name
        operands = jax.device_put(np.full((2, size, size), 1 / size, dtype), device)
        rate = PRODUCTS_AT_ONCE * 2 * size**3 / _seconds(lambda x=operands, run=chain: run(x[0], x[1]))
        text = f"{rate / 1e12:,.3g} TFLOP/s of one device, {size}³"
        if name == "bfloat16" and hardware is not None and hardware.peak_flops_per_s:
            text += f", {rate / hardware.peak_flops_per_s:.0%} of the published peak"
        if name == "float32":
            text += ", in JAX's default precision"
        yield Finding(GOOD, f"matrix product {name}", text)


def collectives(mesh: Mesh) -> Iterator[Finding]:
    """Bytes a second that leave a device, of each collective over each axis, and whether its result is right."""
    device, axes = mesh.devices.flat[0], dict(mesh.shape)
    whole = COLLECTIVE_BYTES.get(device.platform, LARGE_COLLECTIVE) // 4
    hardware = of_device_kind(device.device_kind)
    for axis, count in axes.items():
        if count == 1:
            yield Finding(GOOD, f"collectives over {axis}", "none: one device along it")
            continue
        length = whole // count * count
        for kind, function, size, expected in (
            ("all-gather", lambda x, axis=axis: lax.all_gather(x, axis, tiled=True), length // count, 1),
            ("reduce-scatter", lambda x, axis=axis: lax.psum_scatter(x, axis, tiled=True), length, count),
            ("all-reduce", lambda x, axis=axis: lax.psum(x, axis), length, count),
        ):
            spec = PartitionSpec(tuple(axes))  # each device has an operand of its own, and a result
            operand = jax.jit(
                lambda size=size: jnp.ones(size * mesh.size, jnp.float32), out_shardings=NamedSharding(mesh, spec)
            )()
            run = jax.jit(shard_map(function, mesh, (spec,), spec))
            sent = Collective(kind, (axis,), "float32", 4 * size, "", "").sent_bytes(axes)
            rate = sent / _seconds(lambda run=run, operand=operand: run(operand))
            text = f"{rate / 1e9:,.3g} GB/s leave each device"
            if hardware is not None:
                link = hardware.network_bytes_per_s if axis in crossing(mesh) else hardware.link_bytes_per_s
                text += f", {rate / link:.0%} of the published link" if link else ""
            values = np.asarray(run(operand).addressable_shards[0].data)
            is_right = bool((values == expected).all())
            wrong = f"wrong values: of ones it makes {values.min():g} to {values.max():g}, expected {expected}; "
            fix = "look at the links and their driver (nvidia-smi topo -m, dmesg)"
            yield Finding(
                *((GOOD, f"{kind} {axis}", text) if is_right else (BROKEN, f"{kind} {axis}", wrong + text, fix))
            )


def _seconds(run: Callable[[], jax.Array]) -> float:
    """Of the median run, after one that compiles and one that warms up."""
    for _ in range(2):
        run().block_until_ready()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# ---------------------------------------------------------------- data and store


def data(config: Any, mesh: Mesh | None) -> Iterator[Finding]:
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
            yield Finding(GOOD, "data", training.summary)
    except RunError as error:
        text = "; ".join(map(str.strip, str(error).splitlines()))  # a line for each problem
        yield Finding(BROKEN, "data", text, "as it says; docs/data.md has how to write a data set from your own text")


def storage(root: str, threads: int) -> Iterator[Finding]:
    """Writes and reads files where the run would save checkpoints, as many at once as it would."""
    existed = "://" in root or Path(root).exists()
    folder = f"doctor-{secrets.token_hex(4)}"
    content = np.random.default_rng(0).bytes(FILE_BYTES)
    names = [f"{folder}/{index}" for index in range(FILES)]
    try:
        store = open_store(root, LONGEST_STORE_S)
        with ThreadPoolExecutor(threads) as pool:
            try:
                begin = time.perf_counter()
                list(pool.map(lambda name: store.write(name, content), names))
                written_s = time.perf_counter() - begin
                for name in names:
                    _forget(store.path(name))
                begin = time.perf_counter()
                read = list(pool.map(store.read, names))
                read_s = time.perf_counter() - begin
            finally:
                store.remove(folder)
                if not existed:
                    os.rmdir(root)
    except RunError as error:  # it says what to install
        what, _, fix = str(error).partition(" Fix: ")
        yield Finding(BROKEN, "store", what, fix)
        return
    except (*read_errors(), OSError) as error:  # TimeoutError and PermissionError among them
        yield Finding(BROKEN, "store", f"{root}: {type(error).__name__}: {error}", _fix_of_store(root))
        return
    if any(each != content for each in read):
        yield Finding(
            BROKEN, "store", f"{root}: what was read is not what was written", "replace the disk, or use another"
        )
        return
    size = FILES * FILE_BYTES
    text = f"{root}: writes {size / written_s / 1e6:,.0f} MB/s, reads {size / read_s / 1e6:,.0f} MB/s"
    if "://" in root:
        yield Finding(GOOD, "store", text)
        return
    free = shutil.disk_usage(root if existed else Path(root).absolute().parent).free
    text += f" ({FILES} files of {FILE_BYTES >> 20} MiB, flushed), {free / 1e9:,.1f} GB free"
    yield Finding(GOOD, "store", text)


def _forget(path: str) -> None:
    """Asks the system to drop a file from memory, so that reading it reads the disk; of an object store nothing is
    kept."""
    if "://" in path or not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _fix_of_store(root: str) -> str:
    if "://" in root:
        return "check the URL, the credentials and the network; or paths.root_working_dir=FOLDER"
    return f'mkdir -p "{root}" && chmod u+rwx "{root}"; or paths.root_working_dir=ANOTHER'


def graphs() -> Iterator[Finding]:
    """The program that draws the compiled step."""
    if program := find_dot():
        yield Finding(GOOD, "graph of the step", f"dot: {program}")
    else:
        pins = tested("requirements-cpu.txt")
        fix = (
            f"pip install graphviz=={pins['graphviz']} graphviz-pure=={pins['graphviz-pure']}, or apt-get install "
            "graphviz"
        )
        yield Finding(OPTION, "graph of the step", "no program dot (optional)", fix)
