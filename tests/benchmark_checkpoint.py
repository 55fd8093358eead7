"""Measures checkpoints: MB/s saved and loaded, against zarr alone, and what saving costs the steps.

    python -m tests.benchmark_checkpoint                                      # 100M parameters with Adam, 1.26 GB
    python -m tests.benchmark_checkpoint layers=2 steps=4 save_every=2 step_s=0.2     # a small one

Zarr alone means zarr-python's own `array[...] = values` and `array[...]` on numpy arrays, one leaf after another, with
chunks of the same largest size, the same checksums, and every file flushed to disk in the end. Files are read back from
the operating system's cache by both. Expect two minutes, 4 GB of memory and 4 GB of disk, which are freed at the end.
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import zarr

from runtime.checkpoints import checkpoint
from runtime.checkpoints import writing as checkpoint_writing
from runtime.checkpoints.directory import Checkpoints
from runtime.config import command_line
from runtime.terminal import RunError


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    directory: str = "runs/benchmark_checkpoint"  # is created, and removed at the end; must not be there yet
    layers: int = 12  # of the transformer whose shapes the state has
    d_model: int = 768  # length of its vectors between layers
    d_ff: int = 2048  # length of its feed-forward networks' hidden vectors
    vocab: int = 13312  # with the others, 105 million parameters: 1.26 GB with both moments of Adam
    devices: int = 8  # simulated ones, over which the state is split
    max_io_threads: int = 64  # that read and write at once
    repeats: int = 3  # of each bandwidth, alternating; the best counts: others use the disk too
    steps: int = 30  # of the test of the stall
    step_s: float = 1.0  # how long a step takes; the host sleeps meanwhile, as it does while an accelerator computes
    save_every: int = 10  # steps


def main(config: Benchmark) -> None:
    directory = Path(config.directory)
    if directory.exists():
        raise RunError(f"directory is {directory}, which is there already: name one that is not, since it is removed")
    for key in ("d_model", "vocab"):
        if getattr(config, key) % config.devices:
            raise RunError(f"{key} is {getattr(config, key)}, expected a multiple of devices, {config.devices}")
    jax.config.update("jax_num_cpu_devices", config.devices)
    directory.mkdir(parents=True)
    try:
        state = make_state(config)
        parameters = sum(x.size for x in jax.tree.leaves(state["weights"]))
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        over = f"over {config.devices} devices; {os.cpu_count()} CPUs"
        print(f"state: {parameters / 1e6:.1f}M parameters, {size / 1e9:.2f} GB, {over}")
        measure_stall(config, directory, state, size)
        measure_bandwidth(config, directory, state, size)
    finally:
        shutil.rmtree(directory)


def make_state(config: Benchmark) -> dict:
    """Weights and both moments, of the shapes of a transformer, each leaf split over all devices."""
    layers, model, ff = config.layers, config.d_model, config.d_ff
    tables = dict.fromkeys(("embed", "unembed"), (config.vocab, model))
    attention = {"norm": (layers, model), "w_kv": (layers, 2, model, model)}
    attention |= dict.fromkeys(("w_q", "w_o"), (layers, model, model))
    shapes = tables | attention | dict.fromkeys(("w_gate", "w_up", "w_down"), (layers, model, ff))
    mesh = jax.make_mesh((config.devices,), ("d",), (jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)

    def leaf(shape: tuple[int, ...]) -> jax.Array:
        dim = shape.index(model) if len(shape) > 2 else len(shape) - 1
        spec = jax.sharding.PartitionSpec(*[None] * dim, "d")
        return jax.device_put(rng.standard_normal(shape, np.float32), jax.NamedSharding(mesh, spec))

    return {name: {key: leaf(shape) for key, shape in shapes.items()} for name in ("weights", "adam_mu", "adam_nu")}


def measure_stall(config: Benchmark, directory: Path, state: dict, size: int) -> None:
    without_s = config.steps * config.step_s
    for behind in (True, False):
        checkpoints = open_checkpoints(config, directory / str(behind))
        before, stalls_s, copies_s = resident(), [], []
        reset_peak()
        began = time.perf_counter()
        for step in range(1, config.steps + 1):
            time.sleep(config.step_s)
            checkpoints.raise_failure()
            if step % config.save_every == 0:
                save_began = time.perf_counter()
                checkpoints.save(step, state, {})
                if not behind:
                    checkpoints.latest()  # waits for it
                stalls_s.append(time.perf_counter() - save_began)
                copies_s.append(copied(state))
        lost_s = time.perf_counter() - began - without_s - sum(copies_s)
        checkpoints.close()
        grown, copy_s = peak() - before, float(np.mean(copies_s))
        mode = "saving behind the steps" if behind else "saving in the foreground"
        print(
            f"{mode}, every {config.save_every} steps of {config.step_s:g} s: a save holds the steps up for "
            f"{np.mean(stalls_s):.2f} s, {copy_s:.2f} s of it the copy ({size / 1e9 / copy_s:.1f} GB/s); "
            f"{lost_s / without_s:.1%} of the steps' time, {(lost_s - sum(copies_s)) / without_s:.1%} beyond the copy"
            + (f"; host memory grew by {grown / 1e9:.2f} GB" if behind else "")
        )
        shutil.rmtree(directory / str(behind))


def copied(state: dict) -> float:
    """The seconds that a copy of the state takes, by itself."""
    began = time.perf_counter()
    jax.tree.map(lambda leaf: [np.array(shard.data) for shard in leaf.addressable_shards], state)
    return time.perf_counter() - began


def measure_bandwidth(config: Benchmark, directory: Path, state: dict, size: int) -> None:
    leaves = {names[0]: np.array(leaf) for names, leaf in checkpoint.named_leaves(state)}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    theirs, ours = directory / "zarr", directory / "ours"
    checkpoints = open_checkpoints(config, ours)

    def save(step):
        checkpoints.save(step, state, {})
        checkpoints.latest()  # waits for it

    best: dict[str, float] = {}
    grown = 0

    def measure(what, action, *arguments):
        began = time.perf_counter()
        result = action(*arguments)
        best[what] = max(best.get(what, 0.0), size / 1e6 / (time.perf_counter() - began))
        return result

    for repeat in range(config.repeats):
        os.sync()  # what was written before is no part of what is measured
        measure("save, zarr alone", save_with_zarr, theirs, leaves)
        os.sync()
        measure("save", save, repeat)
        measure("load, zarr alone", lambda: {name: zarr.open_group(theirs, mode="r")[name][...] for name in leaves})
        reset_peak()
        before = resident()
        restored = measure("load", lambda: jax.block_until_ready(checkpoints.restore(like)))[1]
        grown = max(grown, peak() - before)
        if not jax.tree.all(jax.tree.map(np.array_equal, restored, state)):
            raise RunError("what was loaded is not what was saved")
        del restored
        shutil.rmtree(theirs)
        shutil.rmtree(ours)
    checkpoints.close()
    for what in ("save", "load"):
        share = best[what] / best[f"{what}, zarr alone"]
        print(f"{what}: {best[what]:.0f} MB/s; zarr alone {best[f'{what}, zarr alone']:.0f} MB/s; {share:.0%} of it")
    largest = max(leaf.nbytes for leaf in leaves.values())
    is_state = f"of which {size / 1e9:.2f} GB is the state (largest leaf {largest / 1e9:.2f} GB)"
    print(f"load: host memory grew by {grown / 1e9:.2f} GB at most, {is_state}")


def save_with_zarr(path: Path, leaves: dict[str, np.ndarray]) -> None:
    group = zarr.create_group(path)
    for name, values in leaves.items():
        chunks = checkpoint_writing.chunk_shape(values.shape, values.itemsize)  # each without a gap in memory
        group.create_array(name, data=values, chunks=chunks, compressors=zarr.codecs.Crc32cCodec())
    for file in [path, *path.rglob("*")]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def open_checkpoints(config: Benchmark, directory: Path) -> Checkpoints:
    return Checkpoints(directory, timeout_s=60.0, max_io_threads=config.max_io_threads)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most bytes in memory since `reset_peak`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    command_line.run(main, Benchmark)
