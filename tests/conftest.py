"""Eight simulated devices, strict promotion, quick compilation: what every test stands on. Must run before JAX
starts."""

import gc
import logging
import os
from concurrent.futures import ThreadPoolExecutor

# Most of a test's time is LLVM's. Without its optimizations, and with XLA's older code generator, the small training
# step compiles in 2 s of CPU time instead of 12 (bfloat16, mesh 4 x 2, jax 0.10.2). Both act after XLA has placed its
# collectives.
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",  # of programs as small as these each part costs more than it saves
    "--xla_cpu_multi_thread_eigen=false",
])  # fmt: skip
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The tests neither read nor fill the user's. One of their own is hardly ever hit, since runs put the source's lines
# into the key; and JAX does not write it at once: another process that reads half a file warns, which fails a test.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"  # what the tests read is on the disk

import array_types  # noqa: F401 before the modules that it checks
import jax
import pytest
import small
from object_store import object_store, object_store_server  # noqa: F401 fixtures
from several_hosts import where

import train
from models import layers
from runtime.cluster.tuning import multiply_bfloat16
from runtime.config.command_line import load
from runtime.tracking.followers import Followers
from tools import tokenize_text

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
multiply_bfloat16()  # as in every run


def pytest_collection_finish():
    """Modules live to the end, so the garbage collector need not look at them, nor run so often. It took a quarter of
    the time in which JAX traces a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def quick_runs():
    """Runs within a process of tests share the programs of equal steps, and no process writes their reports: these take
    most of a small run's time. `small.followed` is for what looks at reports."""
    programs, compile = {}, jax.stages.Lowered.compile

    def compile_once(lowered, *given, **options):
        mesh = jax.sharding.get_mesh()
        if mesh.empty:  # its devices are not known here
            return compile(lowered, *given, **options)
        key = mesh, lowered.as_text(), lowered.in_tree, lowered.out_tree, repr((given, options))
        if key not in programs:
            programs[key] = compile(lowered, *given, **options)
        return programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_once)
        patch.setattr(Followers, "start", lambda followers: None)
        yield


@pytest.fixture(autouse=True)
def own_logging():
    """Takes back what hydra sets up for logging: its handler writes to a stream that pytest closes after the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def called(monkeypatch, capsys):
    """Runs a module as `python -m` would: the exit status, what it prints, and its error message."""

    def call(main, config_class, *arguments):
        status = small.start(monkeypatch, main, config_class, *arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture(scope="session")
def pool():
    """Threads that read and write weights."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


COMPUTE_DTYPE = train.act.dtype


@pytest.fixture(autouse=True)
def own_compute_dtype():
    """Each test begins with the activations' type as imported: a trainer's main, in a fixture too, sets it."""
    train.act.dtype, layers.stored.dtype = COMPUTE_DTYPE, "float32"


@pytest.fixture
def proved_elsewhere():
    """Leaves out the check of the test's programs, which another test proves."""
    with small.proved_elsewhere():
        yield


@pytest.fixture(scope="session")
@small.proved_elsewhere()
def cat_run(tmp_path_factory):
    """The folder of a run that has learnt one repeated sentence by heart."""
    folder = tmp_path_factory.mktemp("cat")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 3000)
    keys = [f"input={folder}/text.txt", f"output={folder}/text.zarr", "validation_fraction=0.5", "document_bytes=100"]
    tokenize_text.main(load(tokenize_text.TokenizeText, None, keys))
    overrides = f"""
        flat_tokens.filespec={folder}/text.zarr mesh.d=1 mesh.t=1
        model.d_model=32 model.n_q_per_kv=1 model.n_kv=2 model.d_head=16 model.layers=1 model.d_ff=64 model.vocab=257
        model.compute_dtype=float32 training.tokens.batch=8 training.tokens.len=32 training.steps=60
        training.warmup_steps=5 training.steps_for_lr=60 training.learning_rate=0.01 checkpoint_interval=60
        eval_interval=60 validation_batches=1
    """
    train.main(load(train.Config, "local_shakespeare", [*where(folder / "cat"), *overrides.split()]))
    return folder / "cat"


def pytest_terminal_summary(terminalreporter):
    """Prints what tests recorded as "summary", also those that ran in another process."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, text in report.user_properties:
            if name == "summary" and report.when == "call":
                terminalreporter.write_line(text)
