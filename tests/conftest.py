"""Eight simulated devices, strict promotion, quick compilation: what every test stands on. Must run before JAX starts."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor

# Most of a test's time is LLVM's. Without its optimizations, and with XLA's older code generator, the small training step compiles in
# 2 s of CPU time instead of 12 (bfloat16, mesh 4 x 2, jax 0.10.2). Both act after XLA has placed its collectives.
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
])  # fmt: skip
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # the tests neither read nor fill the user's
os.environ["HF_HUB_OFFLINE"] = "1"  # what the tests read is on the disk

import jax
import pytest
from object_store import object_store, object_store_server  # noqa: F401 fixtures

import train

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def own_logging():
    """Takes back what hydra sets up for logging: its handler writes to a stream that pytest closes after the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def pool():
    """Threads that read and write weights."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


COMPUTE_DTYPE = train.act.dtype


@pytest.fixture(autouse=True)
def own_compute_dtype():
    """Each test begins with the activations' type as imported: a trainer's main, in a fixture too, sets it."""
    train.act.dtype = COMPUTE_DTYPE


def pytest_terminal_summary(terminalreporter):
    """Prints what tests recorded as "summary", also those that ran in another process."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, text in report.user_properties:
            if name == "summary" and report.when == "call":
                terminalreporter.write_line(text)
