"""What tools/doctor.py tries: devices, a matrix product, collectives over the axes of a mesh, the data, the store of
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
from runtime.terminal import RunError
from shardlib.mesh import shard_map
from shardlib.shardtypes import make_shardings, mesh_text

REPEATS = 5  # the median counts
PRODUCT_SIZE = {"cpu": 1024}  # rows and columns of both factors
LARGE_PRODUCT = 8192
PRODUCTS_AT_ONCE = 4  # one after another, so that the host's part does not count
COLLECTIVE_BYTES = {"cpu": 4 * 2**20}  # of the whole array, before it is scattered or after it is gathered
LARGE_COLLECTIVE = 256 * 2**20
FILES, FILE_BYTES = 16, 4 * 2**20
LONGEST_STORE_S = 60.0

Row = tuple[str, str, str]  # as of tools/doctor.py


def measured(config: Any) -> Iterator[tuple[Iterable[Row], bool]]:
    """All rows, and whether this process prints them: of several each measures, since collectives need all."""
    prepare_devices(config)
    mesh, refusal = None, ""
    try:
        mesh = start(config)
    except NoDevice as error:
        what, _, fix = str(error).partition("; fix: ")
        yield [("devices", what, fix)], True
        return
    except RunError as error:
        if config.num_hosts > 1:  # the others are not there, or see the same
            raise
        refusal = str(error)
    is_leader = jax.process_index() == 0
    yield devices(config, mesh, refusal), is_leader
    yield product(jax.local_devices()[0]), is_leader
    if mesh is not None:
        yield collectives(mesh), is_leader
    yield data(config, mesh), is_leader  # of several processes too: the data may be missing on one host
    if is_leader:
        yield storage(config.paths.root_working_dir, config.io.max_io_threads), True


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


def product(device: Any) -> Iterator[Row]:
    """The rate of large square matrix products on one device."""
    size = PRODUCT_SIZE.get(device.platform, LARGE_PRODUCT)

    @jax.jit
    def chain(x, w):
        for _ in range(PRODUCTS_AT_ONCE):
            x = x @ w
        return x

    x, w = jax.device_put(np.full((2, size, size), 1 / size, jnp.bfloat16), device)
    rate = PRODUCTS_AT_ONCE * 2 * size**3 / _seconds(lambda: chain(x, w))
    hardware = of_device_kind(device.device_kind)
    peak = hardware and hardware.peak_flops_per_s
    share = f", {rate / peak:.0%} of the published peak" if peak else ""
    yield "matrix product bfloat16", f"{rate / 1e12:,.3g} TFLOP/s of one device, {size}³{share}", ""


def collectives(mesh: Mesh) -> Iterator[Row]:
    """Bytes a second that leave a device, of each collective over each axis, and whether its result is right."""
    device, axes = mesh.devices.flat[0], dict(mesh.shape)
    whole, hardware = COLLECTIVE_BYTES.get(device.platform, LARGE_COLLECTIVE) // 4, of_device_kind(device.device_kind)
    spec = PartitionSpec(tuple(axes))  # each device has an operand of its own, and a result
    for axis, count in axes.items():
        if count == 1:
            yield f"collectives over {axis}", "none: one device along it", ""
            continue
        length = whole // count * count
        for kind, function, size, expected in (
            ("all-gather", lambda x, axis=axis: lax.all_gather(x, axis, tiled=True), length // count, 1),
            ("reduce-scatter", lambda x, axis=axis: lax.psum_scatter(x, axis, tiled=True), length, count),
            ("all-reduce", lambda x, axis=axis: lax.psum(x, axis), length, count),
        ):
            ones = jax.jit(jnp.ones, static_argnums=0, out_shardings=NamedSharding(mesh, spec))(size * mesh.size)
            run = jax.jit(shard_map(function, mesh, (spec,), spec))
            sent = Collective(kind, (axis,), "float32", 4 * size, "", "").sent_bytes(axes)
            rate = sent / _seconds(lambda run=run, ones=ones: run(ones))
            text, fix = f"{rate / 1e9:,.3g} GB/s leave each device", ""
            link = hardware and (hardware.network_bytes_per_s if axis in crossing(mesh) else hardware.link_bytes_per_s)
            text += f", {rate / link:.0%} of the published link" if link else ""
            values = np.asarray(run(ones).addressable_shards[0].data)
            if not (values == expected).all():
                what = f"of ones it makes {values.min():g} to {values.max():g}, expected {expected}"
                text = f"wrong values: {what}; {text}"
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
                written_s = time.perf_counter() - begin
                begin = time.perf_counter()
                read = list(pool.map(store.read, names))
                read_s = time.perf_counter() - begin
            finally:
                store.remove(folder)
                if not was_there:
                    os.rmdir(root)
    except RunError as error:  # it says what to install
        what, _, fix = str(error).partition(" Fix: ")
        yield "store", what, fix
        return
    except (*read_errors(), OSError) as error:  # TimeoutError and PermissionError among them
        fix = (
            f'mkdir -p "{root}" && chmod u+rwx "{root}"' if is_local else "check the URL, the credentials, the network"
        )
        yield "store", f"{root}: {type(error).__name__}: {error}", f"{fix}; or paths.root_working_dir=ANOTHER"
        return
    if any(each != content for each in read):
        yield "store", f"{root}: what was read is not what was written", "replace the disk, or use another"
        return
    writes, reads = (f"{FILES * FILE_BYTES / s / 1e6:,.0f} MB/s" for s in (written_s, read_s))
    text = f"{root}: writes {writes}"
    if is_local:  # reading would say how fast the system's memory is, which still holds what was written
        free = shutil.disk_usage(root if was_there else Path(root).absolute().parent).free
        yield "store", f"{text}, {free / 1e9:,.1f} GB free", ""
    else:
        yield "store", f"{text}, reads {reads}", ""
