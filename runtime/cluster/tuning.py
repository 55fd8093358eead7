"""What makes a platform fast: XLA's options for a step, the allocator, compiled programs on disk.

What the user says by XLA_FLAGS, LIBTPU_INIT_ARGS or JAX_COMPILATION_CACHE_DIR wins.
"""

import contextlib
import ctypes
import os
import re
from pathlib import Path

# By JAX's word for the platform or for the kind of device, what a step is compiled with.
OPTIONS = {
    # On NVIDIA GPUs XLA's own schedule hides what can be hidden (1b and 2b compiled for 8 and 32 H200s, 2026-11-22).
    # None was run on them.
    "gpu": {
        # Gathers travel together up to so many bytes, 40 MB. With XLA's 30 MB those of w_q, w_k and w_v (16.8 MB each)
        # of c4_a100x8x4_2b did not, and nothing ran beside w_q's; with 64 MB four do, and w_o's is not hidden any more.
        "xla_gpu_all_gather_combine_threshold_bytes": "41943040"
    },
    # c4_a100x8_1b and _2b compiled for 8 and 64 v5p, libtpu 0.0.42 and 0.0.48, 2026-11-22 (docs/performance.md). By
    # default XLA:TPU sends while nothing else runs, and sums what should be scattered or gathered, twice the bytes.
    # None of it was run on a TPU. Chips without SparseCores accept these options, too.
    "tpu": {
        # The SparseCores send while the TensorCore multiplies; 2d, 3d and nd are of a torus's dims.
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
        # A gather is one, not a sum of zeros and a part, and asynchronous.
        "xla_tpu_prefer_async_allgather_to_allreduce": "true",
        "xla_enable_async_all_gather": "true",
        # The scheduler counts the links that a gather takes also where it is not asynchronous yet. Else, on 64 chips,
        # it puts the second gather of w_o before all else of a layer, alone.
        "xla_track_sync_op_resource_usage_in_latency_hiding_scheduler": "true",
    },
    # v5e has no SparseCores: gathers are fused with products. On all other chips libtpu 0.0.48 refuses that, since it
    # "might lead to many errors", wrong results among them.
    "TPU v5 lite": {
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": "true",
        "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
    },
}


def options(device) -> dict[str, str]:
    """The compiler's options for a step on devices like this `jax.Device`, without those that the user has set
    himself."""
    wanted = OPTIONS.get(device.platform, {}) | OPTIONS.get(device.device_kind, {})
    return {name: value for name, value in wanted.items() if not is_given(name)}


def is_given(flag: str) -> bool:
    """Whether the user sets a flag of XLA's: in XLA_FLAGS, in the file that it names, or in LIBTPU_INIT_ARGS."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        with contextlib.suppress(OSError):  # XLA says that the file cannot be read
            flags = Path(flags).read_text(encoding="utf-8")
    return re.search(rf"--(no)?{flag}(=|\s|$)", f"{flags} {os.environ.get('LIBTPU_INIT_ARGS', '')}") is not None


def tune() -> None:
    """Sets the rest, for this process. Call it before JAX's first operation."""
    keep_memory()
    multiply_bfloat16()


def keep_memory() -> None:
    """Lets the C library keep what is freed, as XLA:CPU does after each step, for the next time.

    Else the kernel takes it back and has to give zeroed pages again: 0.19 and 0.28 of 1.5 and 2.0 s of CPU time a step
    of local_test_synthetic on one and on eight simulated devices, and a step of 0.80 to 0.93 s instead of 0.74 to 0.78,
    1.01 to 1.12 instead of 0.88 to 0.97 (two cores, jax 0.10.2, 2026-11-21). Only glibc has these settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping, which would be unmapped when it is freed
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads; the others' may have no block above 64 MB
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB that are free at the heap's end stay


def has_bfloat16() -> bool:
    """Whether the CPU's cores have instructions for it, as Linux says."""
    with contextlib.suppress(OSError):
        return re.search(r"\b(amx_bf16|avx512_bf16|bf16)\b", Path("/proc/cpuinfo").read_text()) is not None
    return False


def multiply_bfloat16() -> None:
    """Lets XLA:CPU multiply bfloat16 as such. It does where sums are asked for in float32; else it first makes float32
    of both operands. So it is asked for that, and rounds afterwards; no other platform's program changes.

    A step of local_test_synthetic on eight simulated devices took 606 in place of 894 ms of processor time, and on one
    441 in place of 725 (two cores of a Xeon with AMX, measured in turn, jax 0.10.2, 2026-11-23). Cores without bfloat16
    instructions were not measured: there nothing changes.
    """
    if not has_bfloat16():
        return
    import jax.numpy as jnp
    from jax import lax
    from jax.interpreters import mlir

    def lower(context, x, y, **how):
        all_bfloat16 = all(each.dtype == jnp.bfloat16 for each in (*context.avals_in, *context.avals_out))
        sums = {**how, "preferred_element_type": jnp.dtype(jnp.float32)} if all_bfloat16 else how

        def multiply(x, y):
            product = lax.dot_general_p.bind(x, y, **sums)
            return product.astype(jnp.bfloat16) if all_bfloat16 else product

        # By JAX's own rule, which is that for platforms that have none.
        elsewhere = context.replace(platforms=("default",))
        return mlir.lower_fun(multiply, multiple_results=False)(elsewhere, x, y)

    mlir.register_lowering(lax.dot_general_p, lower, platform="cpu")


def keep_programs(platform: str, devices: int) -> None:
    """A program that was compiled before is read from a folder, of the user and not of the run.

    Not on several simulated devices: of a program from a file XLA:CPU no longer knows that its collectives take turns.
    Two of them at a time mix their parts, or end the process (jax 0.10.2, gathers of 30 layers and an embedding on
    eight devices, every second start).

    Args:
      platform: JAX's name of it.
      devices: of the mesh.
    """
    import jax

    if platform == "cpu" and devices > 1:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # its types lack flags
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", f"{home}/clearshard/programs")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Of the same program on other lines of the source the old one would be read, and the ledger is held against lines.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
