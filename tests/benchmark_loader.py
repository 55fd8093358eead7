"""Measures the loader: tokens/s from a warm disk or an object store, its memory, and how long steps wait for it.

    python -m tests.benchmark_loader                                    # 64 × 1024 tokens a batch
    python -m tests.benchmark_loader path=s3://bucket/my.zarr length=256 packed=false

Batches go through `Loader.load()` onto one device, as in training, and are waited for there. Chunks are decoded each
time: arrays that are small enough to be kept in memory are not. `cpu` is processor time over all threads for each
token: where other programs use the machine too it is the steadier figure; a core does at most 1000 / cpu million tokens
a second. Expect half a minute, and 150 MB of disk, which are freed at the end.
"""

import contextlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from runtime.config import command_line
from runtime.config.keys import FlatTokens
from runtime.data.batches import Batch, Loader
from runtime.data.split_writer import write_split


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    path: str = ""  # the data set to read; empty: writes one of random text-like tokens, which is removed at the end
    tokens: int = 67108864  # that it has; of 4 bytes each, more than the 64 MiB that a loader keeps in memory
    packed: bool = True  # rows cut from the joined sequences; false: a sequence a row, of which padding is not counted
    batch: int = 64  # rows of a batch
    length: int = 1024  # tokens of a row
    seconds: float = 10.0  # of each of the two measurements
    max_io_threads: int = 8  # that read at once
    # of the steps that wait: how long each takes, the host being asleep meanwhile as while an accelerator computes
    step_s: float = 0.1


def main(config: Benchmark) -> None:
    with contextlib.ExitStack() as opened:
        path = config.path
        if not path:
            path = opened.enter_context(tempfile.TemporaryDirectory()) + "/data.zarr"
            write(path, config.tokens)
        memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sharding = Batch(*[jax.sharding.SingleDeviceSharding(jax.devices()[0])] * 3)
        flat_tokens = FlatTokens(filespec=path, sequence_packing=config.packed, epochs=10**6)
        sizes = {"batch": config.batch, "length": config.length, "io_threads": config.max_io_threads}
        loader = opened.enter_context(Loader(flat_tokens, "train", **sizes, sharding=sharding))
        # The first shuffle buffers bring the data into the system's cache.
        warm = min(loader.rows, 4 * 64 * 128) // config.batch
        for step in range(warm):
            jax.block_until_ready(loader.load(step))
        tokens_per_s, cpu_ns, _, steps = measure(config, loader, warm, 0.0)
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before) * 1024
        *_, waited, _ = measure(config, loader, warm + steps, config.step_s)
        print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}; {loader.summary}")
        print(f"{tokens_per_s / 1e6:.1f} M tokens/s, cpu {cpu_ns:.1f} ns/token, {memory / 1e6:.0f} MB more of memory")
        print(f"steps of {config.step_s:g} s waited for {waited:.3%} of their time")


def measure(config: Benchmark, loader: Loader, first: int, step_s: float) -> tuple[float, float, float, int]:
    """Tokens a second, processor time for each in ns, the share of the time that steps waited, and how many there
    were."""
    tokens, step, waited = 0, first, loader.waited_s
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < config.seconds:
        batch = jax.block_until_ready(loader.load(step))
        time.sleep(step_s)
        tokens += config.batch * config.length if config.packed else int(np.sum(batch.is_target))
        step += 1
    took = time.perf_counter() - began
    cpu_ns = (time.process_time() - cpu) / tokens * 1e9
    return tokens / took, cpu_ns, (loader.waited_s - waited) / took, step - first


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


if __name__ == "__main__":
    command_line.run(main, Benchmark)
