"""Times the attention kernels on the device at hand and holds them against plain products, a JSON line each.

    python -m tests.benchmark_attention                                # the c4 models' heads: 64 rows of 1024, 16 × 128
    python -m tests.benchmark_attention rows=1 length=32768 segments=64 kernels=[blockwise,cudnn_masked,jax_masked]
    JAX_PLATFORMS=cpu python -m tests.benchmark_attention length=128 heads=4 d_head=32 kernels=[einsum,blockwise]

Times are in seconds, of one run: the median of five times `runs` of them. `tflops_per_s` counts what the model needs
(half of the pairs of positions, two products forward and four backward); `distance` is that of o and of the gradients
of q, k and v from float32 products, norm over norm, on one row; `temporary_bytes` is XLA's memory besides operands and
results, on a GPU with what cuDNN asks for.
"""

import functools
import json
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import KERNELS
from runtime.config import command_line
from runtime.config.keys import Count


def einsum(q, k, v, segment):
    """It computes what train.py's `attention` does, with all logits in memory."""
    position = jnp.arange(segment.shape[1])
    allowed = (segment[:, :, None] == segment[:, None]) & (position[:, None] >= position)[None]
    logits = jnp.einsum('BLQKD,BSKD->BQKLS', q, k, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(jnp.where(allowed[:, None, None], logits, -1e30), axis=-1)
    return jnp.einsum('BQKLS,BSKD->BLQKD', probabilities.astype(q.dtype), v)


def jax_masked(q, k, v, segment):
    """JAX's own way to the kernel of `cudnn_masked`."""
    same = (segment[:, :, None] == segment[:, None])[:, None]
    heads = q.swapaxes(2, 3).reshape(*q.shape[:2], -1, q.shape[-1])
    o = jax.nn.dot_product_attention(heads, k, v, mask=same, scale=1.0, is_causal=True, implementation="cudnn")
    return o.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]).swapaxes(2, 3)


WAYS = {"einsum": jax.checkpoint(einsum), "jax_masked": jax_masked, **KERNELS}


def with_gradient(attention, q, k, v, segment, gradient):
    o, backward = jax.vjp(lambda q, k, v: attention(q, k, v, segment), q, k, v)
    return o, *backward(gradient)


def operands(config):
    rng = np.random.default_rng(0)
    rows, length, D = config.rows, config.length, config.d_head
    Q, K = config.groups, config.heads

    def normal(*shape, deviation=1.0):
        return jnp.asarray(deviation * rng.standard_normal(shape, np.float32), config.dtype)

    segment = np.cumsum(rng.random((rows, length)) < config.segments / length, axis=1)
    q, k, v = normal(rows, length, Q, K, D, deviation=D**-0.5), normal(rows, length, K, D), normal(rows, length, K, D)
    return q, k, v, jnp.asarray(segment, jnp.int32), normal(rows, length, Q, K, D)


def median_s(compiled, given, runs: int) -> float:
    """The time of a run; five times `runs` are waited for together: else what the host takes for a run would count."""
    jax.block_until_ready(compiled(*given))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(runs):
            last = compiled(*given)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - began) / runs)
    return statistics.median(times)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    rows: Count = 64  # of a batch
    length: Count = 1024  # tokens of a row
    heads: Count = 16  # of keys
    groups: Count = 1  # query heads a key head
    d_head: Count = 128  # size of a head
    segments: Count = 4  # documents of a row, on average
    runs: Count = 20  # that are waited for together
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of q, k and v
    kernels: tuple[Literal[tuple(WAYS)], ...] = ("einsum", "blockwise")  # what is timed


def main(config: Benchmark) -> None:
    given = operands(config)
    product = 2 * given[0].size * config.length / 2
    row = [x[:1] for x in given]
    exact = [x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in row]
    expected = None
    if config.length <= 4096:
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(functools.partial(with_gradient, einsum))(*exact)

    for name in config.kernels:
        both = jax.jit(functools.partial(with_gradient, WAYS[name]))
        began = time.perf_counter()
        compiled = both.lower(*given).compile()
        compile_s = time.perf_counter() - began
        forward_s = median_s(jax.jit(WAYS[name]).lower(*given[:4]).compile(), given[:4], config.runs)
        both_s = median_s(compiled, given, config.runs)
        line = {"kernel": name, "device": jax.devices()[0].device_kind, **vars(config), "compile_s": compile_s}
        line |= {"forward_s": forward_s, "forward_and_backward_s": both_s}
        line |= {"tflops_per_s": 6 * product / both_s / 1e12}
        line["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        if expected is not None:
            pairs = zip(both(*row), expected, strict=True)
            line["distance"] = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]
        del line["kernels"], line["runs"]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    command_line.run(main, Benchmark)
