"""Measures the loader: tokens/s from a warm local disk and from an object store, its memory, and how long steps wait
for it.

    python -m tools.benchmark_loader                                    # 64 × 1024 tokens a batch
    python -m tools.benchmark_loader object_store=true seconds=5
    python -m tools.benchmark_loader path=my.zarr length=256            # a data set of your own

Batches go through `Loader.load()` onto one device, as in training, and are waited for there. Chunks are decoded each
time: arrays that are small enough to be kept in memory are not. Each row of the table is a process of its own, so that
its peak of memory is its own. `cpu` is processor time over all threads for each token: where other programs use the
machine too it is the steadier figure; a core does at most 1000 / cpu million tokens a second. Expect a minute, and 150
MB of disk, which are freed at the end; object_store=true needs s3fs, moto, flask and flask-cors.
"""

import contextlib
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import fsspec
import jax
import numpy as np

from runtime.config import command_line
from runtime.data.batches import Batch, Loader
from runtime.data.flat_tokens import open_split, write_split
from runtime.terminal import RunError

MEGABYTE = 1e6
PROCESSES = multiprocessing.get_context("spawn")
SERVER_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    # the data set to read; null writes one of random text-like tokens, which is removed at the end
    path: str | None = None
    tokens: int = 67108864  # that it has; of 4 bytes each, more than the 64 MiB that a loader keeps in memory
    object_store: bool = False  # also over S3, from a server of moto on this machine, which is slower than any real one
    batch: int = 64  # rows of a batch
    length: int = 1024  # tokens of a row
    seconds: float = 10.0  # of each measurement
    max_io_threads: int = 8  # that read at once
    read_blocks_per_shuffle_buffer: int = 64  # as a run's flat_tokens has it
    sequences_per_read_block: int = 128  # the same
    # of the steps that wait: how long each takes, the host being asleep meanwhile as while an accelerator computes
    step_s: float = 0.1


@dataclass(frozen=True)
class FlatTokens:
    """What the loader reads of a run's flat_tokens."""

    filespec: str
    sequence_packing: bool
    read_blocks_per_shuffle_buffer: int
    sequences_per_read_block: int
    seed: int = 0
    long_sequences: str = "split"
    epochs: int = 10**6


def main(config: Benchmark) -> None:
    with contextlib.ExitStack() as opened:
        path = config.path
        if path is None:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            path = f"{folder}/data.zarr"
            write(path, config.tokens)
        split = open_split(path, "train")
        print(
            f"{split.token_count:,} tokens, {split.sequence_count:,} sequences of {split.where}; {os.cpu_count()} CPUs"
        )
        print(f"batches of {config.batch} × {config.length} tokens, load average {os.getloadavg()[0]:.1f}")
        print(f"{'':32}{'tokens/s':>12}{'cpu ns/token':>14}{'peak memory':>13}{'its bound':>11}")
        show("local disk, packed", measured(config, path, True))
        show("local disk, a sequence a row", measured(config, path, False))
        if config.object_store:
            url = opened.enter_context(served(path))
            show("object store, packed", measured(config, url, True))
        waits = measured(config, path, True, step_s=config.step_s)
        print(f"steps of {config.step_s:g} s waited for {waits['waited']:.3%} of their time, from the second on")


def write(path: str, tokens: int) -> None:
    """Writes a data set of sequences of 1 to 1400 tokens, of a vocabulary of 32,000 by Zipf's law: it compresses as
    text does."""
    frequency = 1 / (np.arange(32_000) + 2.7)
    frequency /= frequency.sum()
    rng = np.random.default_rng(0)

    def sequences() -> Iterator[np.ndarray]:
        left = tokens
        while left:
            ids = rng.choice(len(frequency), min(left, 2**20), p=frequency)
            left -= len(ids)
            yield from np.split(ids, np.cumsum(rng.integers(1, 1400, len(ids) // 700)).clip(max=len(ids)))

    write_split(path, "train", sequences())


@contextlib.contextmanager
def served(path: str) -> Iterator[str]:
    """The URL of a copy of a data set in an object store on this machine."""
    try:
        import moto.server  # noqa: F401
        import s3fs
    except ImportError as error:
        raise RunError(
            f"object_store=true needs a package that is not there ({error}): pip install s3fs moto flask flask-cors"
        ) from error
    # In a process of its own, as a real one is on another machine.
    receiver, sender = PROCESSES.Pipe(duplex=False)
    server = PROCESSES.Process(target=serve, args=(sender,), daemon=True)
    server.start()
    if not receiver.poll(60):
        raise RunError("the object store of this machine did not start within a minute")
    os.environ.update(SERVER_ENVIRONMENT, AWS_ENDPOINT_URL=receiver.recv())
    files = s3fs.S3FileSystem()
    files.mkdir("benchmark")
    files.put(f"{fsspec.url_to_fs(path)[1]}/", "benchmark/data.zarr", recursive=True)
    try:
        yield "s3://benchmark/data.zarr"
    finally:
        server.terminate()


def serve(sender: Connection) -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line a request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    sender.send("http://{}:{}".format(*server.get_host_and_port()))
    while True:
        time.sleep(60)


def measured(config: Benchmark, path: str, packed: bool, step_s: float = 0.0) -> dict[str, float]:
    """The figures of `measure`, from a new process."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=measure, args=(config, path, packed, step_s, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RunError(f"reading {path} failed; the message above says why") from None
    finally:
        process.join()


def measure(config: Benchmark, path: str, packed: bool, step_s: float, sender: Connection) -> None:
    """Loads batches for some seconds after a first shuffle buffer, which is what brings the data into the system's
    cache."""
    os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
    sizes = config.read_blocks_per_shuffle_buffer, config.sequences_per_read_block
    options = {
        "io_threads": config.max_io_threads,
        "sharding": Batch(*[jax.sharding.SingleDeviceSharding(jax.devices()[0])] * 3),
    }
    jax.block_until_ready(jax.numpy.zeros(1))
    try:
        loader = Loader(FlatTokens(path, packed, *sizes), "train", batch=config.batch, length=config.length, **options)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    memory_before = peak_memory()
    with loader:
        step = 0
        epoch = min(loader.rows // config.batch, 4 * sizes[0] * sizes[1] // config.batch)
        for step in range(epoch if not step_s else 1):
            jax.block_until_ready(loader.load(step))
        began, cpu, waited, first, tokens = time.perf_counter(), time.process_time(), loader.waited_s, step + 1, 0
        while time.perf_counter() - began < config.seconds:
            step += 1
            batch = jax.block_until_ready(loader.load(step))
            time.sleep(step_s)
            tokens += config.batch * config.length if packed else int(np.sum(batch.is_target))
        took, steps = time.perf_counter() - began, step + 1 - first
    sender.send({
        "tokens_per_s": tokens / took,
        "cpu_ns": (time.process_time() - cpu) / max(tokens, 1) * 1e9,
        "memory_bytes": peak_memory() - memory_before,
        "bound_bytes": loader.memory_bytes,
        "waited": (loader.waited_s - waited) / took,
        "steps": steps,
    })  # fmt: skip


def peak_memory() -> int:
    """The most memory that this process had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # there getrusage counts the process that started this one too
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def show(name: str, figures: dict[str, float]) -> None:
    print(
        f"{name:32}{figures['tokens_per_s'] / 1e6:10.1f} "
        f"M{figures['cpu_ns']:14.1f}{figures['memory_bytes'] / MEGABYTE:10.0f} MB"
        f"{figures['bound_bytes'] / MEGABYTE:8.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    command_line.run(main, Benchmark)
