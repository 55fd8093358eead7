"""What is set before JAX starts: programs on disk, XLA's options."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.cluster.tuning import OPTIONS, STAGES_ON_CPUS, has_bfloat16, keep_programs, options

COUNT = """
import sys, jax
misses = []
jax.monitoring.register_event_listener(lambda name, **_: name.endswith("/cache_misses") and misses.append(name))
hits = []
jax.monitoring.register_event_listener(lambda name, **_: name.endswith("/cache_hits") and hits.append(name))
import train
from runtime.config.command_line import run
sys.argv = ["train", *sys.argv[1:]]
try:
    run(train.main, train.Config)
finally:
    print("missed", len(misses), "found", len(hits))
"""
SMALL = "model.d_model=32 model.n_kv=2 model.d_head=8 model.d_ff=64 training.tokens.batch=8 training.tokens.len=16"


@pytest.mark.slow
@pytest.mark.parametrize("devices, kept", [(1, 3), (2, 0)])
def test_a_second_start_compiles_nothing(tmp_path, devices, kept):
    """The same configuration in another run folder finds every program that the first start compiled: those that
    initialize, train and validate, each once. With several simulated devices none is kept."""
    counts = []
    for name in ("first", "second"):
        given = f"{SMALL} mesh.d={devices} mesh.t=1"
        given += " training.steps=2 training.steps_for_lr=2 training.warmup_steps=1 validation_batches=3"
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
            "JAX_ENABLE_COMPILATION_CACHE": "1",
        }
        command = [sys.executable, "-c", COUNT, *given.split(), f"paths.root_working_dir={tmp_path}"]
        done = subprocess.run(
            [*command, f"paths.model_name={name}"], capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stderr
        _, missed, _, found = done.stdout.splitlines()[-1].split()
        counts.append((int(missed), int(found)))
    assert counts == [(kept, 0), (0, kept)]


def test_several_simulated_devices_keep_no_programs():
    """XLA:CPU would compute wrong numbers with programs that it read from a file; a GPU or one device keeps them."""
    before = jax.config.jax_enable_compilation_cache
    try:
        for platform, devices, kept in [("cpu", 8, False), ("cpu", 1, True), ("gpu", 8, True)]:
            jax.config.update("jax_enable_compilation_cache", True)
            keep_programs(platform, devices)
            assert jax.config.jax_enable_compilation_cache == kept
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def device(platform, kind):
    return SimpleNamespace(platform=platform, device_kind=kind)


V5P, V5E = device("tpu", "TPU v5"), device("tpu", "TPU v5 lite")


def test_options_are_of_the_platform_and_the_kind_of_device():
    """Gathers are fused with products on TPU v5e alone, which has no SparseCores: libtpu 0.0.48 refuses that
    elsewhere. A CPU's are for pipelines."""
    assert options(device("cpu", "cpu")) == {} and options(device("gpu", "NVIDIA H200"), 4) == OPTIONS["gpu"]
    assert options(jax.devices()[0], 4) == STAGES_ON_CPUS
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=STAGES_ON_CPUS)
    assert options(V5P) == OPTIONS["tpu"] and options(V5E) == OPTIONS["tpu"] | OPTIONS["TPU v5 lite"]
    assert "xla_tpu_enable_async_collective_fusion" in options(V5E).keys() - options(V5P).keys()


def test_what_the_user_sets_wins(monkeypatch, tmp_path):
    """An option that stands in LIBTPU_INIT_ARGS, in XLA_FLAGS or in the file that this names, with a value, alone or as
    --no…, is left to the user; one with a longer name is another."""
    name = next(iter(OPTIONS["tpu"]))
    without = {other: value for other, value in OPTIONS["tpu"].items() if other != name}
    (tmp_path / "flags").write_text(f"--other=1\n--{name}\n")
    for variable, value, left in [
        ("LIBTPU_INIT_ARGS", f"--{name}=false", without),
        ("LIBTPU_INIT_ARGS", f"--no{name} --other", without),
        ("XLA_FLAGS", f"--{name}_and_more=true", OPTIONS["tpu"]),
        ("XLA_FLAGS", str(tmp_path / "flags"), without),
        ("XLA_FLAGS", str(tmp_path / "nowhere"), OPTIONS["tpu"]),
    ]:
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert options(V5P) == left, value


@pytest.mark.skipif(not has_bfloat16(), reason="the CPU has no bfloat16 instructions")
@pytest.mark.parametrize("dtype, written", [("bfloat16", "bf16"), ("float32", "f32")])
def test_a_cpu_sums_products_in_float32(dtype, written):
    """A CPU sums bfloat16 products in float32 too and rounds once, as float32 does. The program for a TPU or a GPU does
    not change, nor does the precision that was asked for."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((3, 8, 64), (64, 16)))
    traced = jax.jit(lambda x, y: jnp.einsum("blm,mf->blf", x, y, precision="highest")).trace(x, y)
    for platform, element in (("cpu", "f32"), ("tpu", written), ("cuda", written)):
        (product,) = re.findall(r"dot_general.*", traced.lower(lowering_platforms=(platform,)).as_text())
        assert product.endswith(f"tensor<3x8x16x{element}>") and "precision = [HIGHEST, HIGHEST]" in product
    expected = jnp.einsum("blm,mf->blf", x.astype("float32"), y.astype("float32"), precision="highest").astype(dtype)
    result = traced.lower().compile()(x, y)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.astype("float32"), expected.astype("float32"), rtol=2**-8)
