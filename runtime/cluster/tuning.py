"""Settings that make a platform fast: XLA's options for a step, products of bfloat16, compiled programs on disk.

XLA_FLAGS, LIBTPU_INIT_ARGS and JAX_COMPILATION_CACHE_DIR take precedence.
"""

import contextlib
import os
import re
from pathlib import Path

# The compiler's options for a step, by JAX's name of the platform or of the kind of device.
OPTIONS: dict[str, dict[str, str | bool]] = {
    # On NVIDIA GPUs XLA's own schedule hides what can be hidden (1b and 2b compiled for 8 and 32 H200s, 2026-11-22; not
    # run there).
    "gpu": {
        # XLA merges gathers up to so many bytes, 40 MB. With its default of 30 MB it does not merge those of w_q, w_k
        # and w_v (16.8 MB each) of c4_a100x8x4_2b, and nothing runs beside w_q's; with 64 MB it merges four, and w_o's
        # is no longer hidden.
        "xla_gpu_all_gather_combine_threshold_bytes": "41943040"
    },
    # c4_a100x8_1b and _2b compiled for 8 and 64 v5p, libtpu 0.0.42 and 0.0.48, 2026-11-22 (docs/performance.md); not
    # run on a TPU. By default XLA:TPU sends while nothing else runs, and all-reduces where a scatter or gather would
    # send half the bytes. Chips without SparseCores accept these options, too.
    "tpu": {
        # The SparseCores send while the TensorCore multiplies; 2d, 3d and nd are the torus's dims.
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
        # A gather is not computed as a sum of zeros and a part, and is asynchronous.
        "xla_tpu_prefer_async_allgather_to_allreduce": "true",
        "xla_enable_async_all_gather": "true",
        # The scheduler counts a gather's links even before it is made asynchronous. Else, on 64 chips, it puts the
        # second gather of w_o alone at a layer's beginning.
        "xla_track_sync_op_resource_usage_in_latency_hiding_scheduler": "true",
    },
    # v5e has no SparseCores: gathers are fused with products. On all other chips libtpu 0.0.48 refuses that, since it
    # "might lead to many errors", including wrong results.
    "TPU v5 lite": {
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
    },
}

# XLA:CPU's order for concurrency lets a collective overtake those of a loop that it does not depend on, but not on all
# devices: a pipeline of two stages with c=2 and d=2 stood still within 50 steps, and not in 1,750 without it (jax
# 0.10.2, 2026-11-27). Among the programs we looked at, only pipelines have such loops.
STAGES_ON_CPUS = {"xla_cpu_enable_concurrency_optimized_scheduler": False}


def options(device, stages: int = 1) -> dict[str, str | bool]:
    """The compiler's options for a step on this kind of device, but for those that the user has set. stages: of p."""
    wanted = OPTIONS.get(device.platform, {}) | OPTIONS.get(device.device_kind, {})
    if device.platform == "cpu" and stages > 1:
        wanted |= STAGES_ON_CPUS
    return {name: value for name, value in wanted.items() if not is_given(name)}


def is_given(flag: str) -> bool:
    """Whether the user sets a flag of XLA's: in XLA_FLAGS, in the file that it names, or in LIBTPU_INIT_ARGS."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        with contextlib.suppress(OSError):  # XLA says that the file cannot be read
            flags = Path(flags).read_text(encoding="utf-8")
    return re.search(rf"--(no)?{flag}(=|\s|$)", f"{flags} {os.environ.get('LIBTPU_INIT_ARGS', '')}") is not None


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16, according to Linux."""
    with contextlib.suppress(OSError):
        return re.search(r"\b(amx_bf16|avx512_bf16|bf16)\b", Path("/proc/cpuinfo").read_text()) is not None
    return False


def multiply_bfloat16() -> None:
    """Lets XLA:CPU multiply bfloat16 natively, which it does only for float32 sums; else it converts both operands
    first. So products ask for float32 and round afterwards; other platforms' programs stay.

    A step of local_test_synthetic on eight simulated devices took 606 instead of 894 ms of processor time, and on one
    441 instead of 725 (two cores of a Xeon with AMX, measured in turn, jax 0.10.2, 2026-11-23). Cores without bfloat16
    instructions were not measured, and nothing changes there.
    """
    if not has_bfloat16():
        return
    import jax.numpy as jnp
    from jax import lax
    from jax.interpreters import mlir

    def lower(context, x, y, **how):
        all_bfloat16 = all(aval.dtype == jnp.bfloat16 for aval in (*context.avals_in, *context.avals_out))
        sums = {**how, "preferred_element_type": jnp.dtype(jnp.float32)} if all_bfloat16 else how

        def multiply(x, y):
            product = lax.dot_general_p.bind(x, y, **sums)
            return product.astype(jnp.bfloat16) if all_bfloat16 else product

        # By JAX's rule for platforms that have none.
        elsewhere = context.replace(platforms=("default",))
        return mlir.lower_fun(multiply, multiple_results=False)(elsewhere, x, y)

    mlir.register_lowering(lax.dot_general_p, lower, platform="cpu")


def keep_programs(platform: str, devices: int) -> None:
    """Keeps compiled programs in a folder of the user, from which later runs read them; not of several simulated
    devices.

    XLA:CPU does not store that a program's collectives take turns: two at a time mix their parts or end the process
    (jax 0.10.2, gathers of 30 layers and an embedding on eight devices, every second start).
    """
    import jax

    if platform == "cpu" and devices > 1:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # its types lack flags
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", f"{home}/clearshard/programs")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Else a program whose source lines have moved would be read with its old lines, which the ledger compares.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
