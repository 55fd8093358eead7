"""What makes a platform fast and is to be set before JAX starts: XLA's flags, the allocator, compiled programs on disk.

What the user says by XLA_FLAGS, LIBTPU_INIT_ARGS or JAX_COMPILATION_CACHE_DIR wins.
"""

import ctypes
import os
from pathlib import Path

# By the environment variable that XLA reads for the platform. Other platforms' flags have no effect.
FLAGS: dict[str, dict[str, str]] = {}


def tune() -> None:
    """Sets all of it, for this process and those that it starts. Call it before JAX's first operation."""
    for variable, flags in FLAGS.items():
        given = os.environ.get(variable, "")
        ours = [f"--{name}={value}" for name, value in flags.items() if f"--{name}" not in given]
        os.environ[variable] = " ".join([*ours, given]).strip()
    _keep_memory()
    _keep_programs()


def _keep_memory() -> None:
    """Lets the C library keep what XLA:CPU frees after each step for the next one.

    Else the kernel takes it back and has to give zeroed pages again: 0.19 and 0.28 of 1.5 and 2.0 s of CPU time a step
    of local_test_synthetic on one and on eight simulated devices, and a step of 0.80 to 0.93 s instead of 0.74 to 0.78,
    1.01 to 1.12 instead of 0.88 to 0.97 (two cores, jax 0.10.2, 2026-11-21). Only glibc has these settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping, which would be unmapped when it is freed
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads; the others' may have no block above 64 MB
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB that are free at the heap's end stay


def _keep_programs() -> None:
    """A program that was compiled before is read from a folder, of the user and not of the run."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", f"{home}/clearshard/programs")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
