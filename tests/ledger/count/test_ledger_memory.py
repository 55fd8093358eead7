"""The forecast of memory: on small programs what one counts by hand, on a step for a CPU what XLA says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ledgers import f32, forecast_of, ledger_of

import train
from ledger.compiled.agreement import peak_bytes
from ledger.count.memory import GROUPS, forecast
from ledger.count.memory import _is_reduced as is_reduced
from ledger.count.program import read
from ledger.count.step import of_step
from runtime.cluster.tuning import has_bfloat16
from runtime.run import with_shardings
from shardlib.mesh import make_mesh
from tools.benchmark import Benchmark, config_of, cpu_jobs
from train import TokenBatch


def besides_arguments(function, *shapes, donated=()):
    """Bytes at the peak that are no arguments', largest first."""
    memory = forecast_of(function, *shapes, donated=donated)
    arguments = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    assert memory.bytes == sum(memory.by_kind().values()) and memory.by_kind()["batch"] >= arguments
    return [held.bytes for held in memory.held if held.line]


X, W, V, U = f32(8, 16), f32(16, 32), f32(32, 4), f32(4, 2)
HELD = {
    "the first product lives until the second is made": (lambda x, w, v: x @ w @ v, (X, W, V), [8 * 32, 8 * 4]),
    "and is gone before a third": (lambda x, w, v, u: x @ w @ v @ u, (X, W, V, U), [8 * 32, 8 * 4]),
    "a chain between takes its place": (lambda x, w, v: jnp.sin(2 * (x @ w) + 1) @ v, (X, W, V), [8 * 32, 8 * 4]),
    "before a sum it takes none": (lambda x, w: jnp.sum(jnp.sin(x @ w)), (X, W), [8 * 32, 1]),
}


@pytest.mark.parametrize("function, shapes, elements", HELD.values(), ids=HELD)
def test_what_small_programs_hold(function, shapes, elements):
    """The forecast's peak of small programs is what one counts by hand."""
    assert besides_arguments(function, *shapes) == [4 * count for count in elements]


def test_results_take_the_place_of_donated_arguments():
    """An update of the weights takes memory unless they are donated."""

    def update(w, g):
        return w - 0.1 * g

    assert besides_arguments(update, f32(64), f32(64)) == [256]
    assert besides_arguments(update, f32(64), f32(64), donated=[0]) == []


def test_a_loop_holds_what_it_stacks_and_one_turn_of_its_body():
    """A scan over layers holds its carry, all that it returns, and in its body the product."""

    def layers(x, w):
        def layer(x, w):
            h = x @ w
            return jnp.sin(h), jnp.cos(h)

        return lax.scan(layer, x, w)

    carry, stack, weight = 8 * 16 * 4, 5 * 8 * 16 * 4, 16 * 16 * 4
    # cos(h) takes the product's place; a layer's weights are a part of w that the product needs by itself.
    held = besides_arguments(layers, f32(8, 16), f32(5, 16, 16))
    assert held == [stack, weight, carry, carry]


def test_a_product_is_written_in_the_type_that_is_needed():
    """A bfloat16 product that is only read as float32 is held as float32; one that is read as it is, is not."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 16), (16, 32)))
    assert besides_arguments(lambda x, w: jnp.sum((x @ w).astype(jnp.float32)), x, w) == [8 * 32 * 4, 4]
    two = besides_arguments(lambda x, w: (jnp.sum((h := x @ w).astype(jnp.float32)), h), x, w)
    assert two == [8 * 32 * 2, 4]


def test_a_reduction_of_a_cpu_reads_what_is_selected_from_memory():
    """There logits have two copies, one rounded for the maximum, one selected for the targets' sum, though not for
    arithmetic; on an accelerator reductions read the logits themselves."""

    def loss(x, w, targets):
        logits = x @ w
        largest = jnp.max(lax.reduce_precision(logits, 8, 23), axis=1)
        selected = jnp.where(jnp.arange(32)[None] == targets[:, None], logits, 0)
        return jnp.sum(largest), jnp.sum(selected), jnp.sum(jnp.exp(logits)), logits

    for on_cpu, count in ((False, 1), (True, 3)):
        held = forecast_of(loss, X, W, jax.ShapeDtypeStruct((8,), jnp.int32), on_cpu=on_cpu).held
        assert [value.shape for value in held].count((8, 32)) == count


def test_a_barrier_of_several_hands_each_on():
    """A product that goes through a barrier together with others is followed to its own result: written in the wider
    type where that alone is read, put off where that goes into a reduce-scatter; the others' results do not matter."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 16), (16, 32)))

    def barrier(x, w):
        _, y, _ = lax.optimization_barrier((x, x @ w, w))
        return jnp.sum(y.astype(jnp.float32))

    assert besides_arguments(barrier, x, w) == [8 * 32 * 4, 4]

    def scattered(x, w, first):
        with jax.named_scope("transpose(jvp())"):
            product = x @ w
        both = lax.optimization_barrier((product, 2 * x) if first else (2 * x, product))
        return lax.psum_scatter(both[0 if first else 1], "d", tiled=True)

    for first in (True, False):
        block = read(jax.make_jaxpr(functools.partial(scattered, first=first), axis_env=[("d", 2)])(x, w))
        (product,) = [op for op in block.operations if op.name == "dot_general"]
        assert is_reduced(product.outputs[0])
        (barrier,) = [op for op in block.operations if op.name == "optimization_barrier"]
        assert not is_reduced(barrier.inputs[1 if first else 0])


def test_constants_and_placed_arguments_of_the_step():
    """What goes into the step besides its arguments, a table made by numpy, is none of them; an argument that is placed
    first, as jax 0.11 places all, is one of a device's part."""
    mesh = jax.sharding.AbstractMesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    parts = jax.sharding.PartitionSpec("d")
    table = np.arange(32, dtype=np.float32)

    def step(first, x):
        mapped = jax.shard_map(
            lambda first, x: (x[: len(table)] * table, first * x[:16]),
            in_specs=(jax.sharding.PartitionSpec(), parts),
            out_specs=parts,
        )
        return mapped(first, jax.sharding.reshard(x, parts))

    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.jit(step).trace(f32(16), f32(1024)).jaxpr
    block = read(jaxpr)
    assert [value.shape for value in block.inputs] == [(16,), (128,)]
    memory = forecast(block, ["batch", "weights"], [False, False])
    assert memory.by_kind()["weights"] == 4 * 128 and memory.by_kind()["batch"] == 4 * 16


def test_gradients_that_are_sent_are_computed_last():
    """The operands of a product whose result goes into a reduce-scatter are still held when what follows holds most; on
    a CPU so are those of any product of the backward pass."""

    def held(sent, on_cpu=False):
        def loss(w, x):
            return jnp.sum(jnp.sin(x @ w))

        def step(w, x, u):
            gradient = jax.grad(loss)(w, x)
            after = jnp.sum(x @ u @ u.T @ u)
            return (lax.psum_scatter(gradient, "d", tiled=True) if sent else gradient), after

        block = read(jax.make_jaxpr(step, axis_env=[("d", 2)])(f32(64, 64), f32(1024, 64), f32(64, 512)))
        memory = forecast(block, ["batch"] * 3, [False] * 3, on_cpu=on_cpu)
        return sorted(value.shape for value in memory.held if value.line and value.shape[0] == 1024)

    assert held(sent=False) == [(1024, 64), (1024, 512)]
    assert held(sent=True) == held(sent=False, on_cpu=True) == [(1024, 64), (1024, 64), (1024, 512)]


def test_the_parts_of_the_step():
    """Weights and optimizer state are 12 bytes a parameter over all devices; twice the microbatches keep half; half
    the mesh needs more."""
    ledger, half = ledger_of("c4_a100x8_1b"), ledger_of("c4_a100x8_1b", "training.microbatches=2")
    kinds, halved = ledger.memory.by_kind(), half.memory.by_kind()
    assert tuple(kinds) == GROUPS and sum(kinds.values()) == ledger.memory.bytes
    assert kinds["weights"] == 4 * ledger.parameters // 8 and kinds["optimizer state"] == 2 * kinds["weights"]
    tokens = 64 * 1024 // 8
    assert kinds["batch"] == 6 * tokens + 2 * 4 + 4 * tokens  # the batch, two counters, the microbatch's own targets
    kept = sum(row.bytes * row.times for row in ledger.saved)
    assert kept // 2 - 2**28 < sum(row.bytes * row.times for row in half.saved) < kept // 2 + 2**28
    assert abs(halved["saved activations"] / kinds["saved activations"] - 0.5) < 0.01
    assert half.memory.bytes < ledger.memory.bytes
    scores = [value for value in ledger.memory.largest if value.shape == (8, 16, 1024, 1024, 1)]
    assert {score.bytes for score in scores} == {4 * 8 * 16 * 1024 * 1024}


# -- Against the compiled step -----------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("job", cpu_jobs(train))
def test_the_forecast_of_a_cpu_job_is_xlas(job, record_property):
    """The forecast of each of tools.benchmark's three jobs for a CPU is within a tenth of what XLA says."""
    config = config_of(Benchmark(), job)
    mesh = {"d": config.mesh.d, "t": config.mesh.t}
    devices = jax.devices()[: config.mesh.d * config.mesh.t]
    with jax.set_mesh(make_mesh(mesh, devices=devices)):
        state, batch = map(with_shardings, train.shapes(config), (train.State, TokenBatch))
        step, _ = train.mapped_steps(config, 0)
        zero = np.uint32(0)
        traced = jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch)
        xlas = peak_bytes(traced.lower().compile())
    given = {"platform": "cpu", "has_bfloat16": has_bfloat16()}
    ledger = of_step(traced, mesh, source=train.__file__, tokens=batch.targets.size, **given)
    record_property("summary", f"memory of {job}: forecast {ledger.memory.bytes / 1e6:.1f} MB, XLA {xlas / 1e6:.1f} MB")
    assert 1 / 1.1 < xlas / ledger.memory.bytes < 1.1
