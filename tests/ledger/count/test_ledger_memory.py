"""The forecast of memory: on small programs what one counts by hand, on the step what XLA says."""

import collections
import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small
from jax import lax
from ledgers import ledger_of

import train
from ledger.compiled import agreement
from ledger.compiled.agreement import (
    AS_ALL_REDUCE,
    ELIMINATED,
    JOINED,
    MERGED,
    UNKNOWN,
    WIDENED,
    differences,
    peak_bytes,
)
from ledger.compiled.collectives import compiled as compiled_collectives
from ledger.count.costs import Collective
from ledger.count.memory import GROUPS, forecast
from ledger.count.memory import _is_reduced as is_reduced
from ledger.count.program import read
from ledger.count.step import of_step
from runtime.cluster.tuning import has_bfloat16
from runtime.run import with_shardings
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from tools.benchmark import Benchmark, config_of, cpu_jobs
from train import TokenBatch


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def besides_arguments(function, *shapes, donated=()):
    """Bytes at the peak that are no arguments', largest first."""
    block = read(jax.make_jaxpr(function)(*shapes))
    free = [index in donated for index in range(len(block.inputs))]
    memory = forecast(block, ["batch"] * len(block.inputs), free)
    arguments = sum(value.bytes for value in block.inputs)
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

    block = read(jax.make_jaxpr(loss)(X, W, jax.ShapeDtypeStruct((8,), jnp.int32)))
    for on_cpu, count in ((False, 1), (True, 3)):
        held = forecast(block, ["batch"] * 3, [False] * 3, on_cpu=on_cpu).held
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
@functools.cache
@small.proved_elsewhere()
def traced_step(microbatches, dtype, layers=2):
    model = dataclasses.replace(small.MODEL, layers=layers)
    training = dataclasses.replace(small.TRAINING, microbatches=microbatches)
    with small.on_mesh(4, 2, dtype):
        step = typed_shard_map(functools.partial(train.training_step, model, training, 0))
        state = small.state_of(reference.random_weights(model, seed=0))
        zero = np.uint32(0)
        traced = jax.jit(step, donate_argnums=0).trace(state, zero, zero, small.batch_of(small.BATCH))
        return of_step(traced, {"d": 4, "t": 2}, source=train.__file__, tokens=16 * 32), traced


def test_a_cpu_holds_bfloat16_as_float32():
    """For a CPU the bfloat16 step is forecast to need more memory than bfloat16 does, and less than the float32 step
    where operands of products stay, but as much where the cores have no instructions for bfloat16; what is computed,
    sent and kept stays bfloat16's."""
    narrow, _ = traced_step(2, "bfloat16")
    given = {"source": train.__file__, "tokens": 16 * 32, "platform": "cpu"}
    on_cpu, without, wide = (
        of_step(traced_step(2, dtype)[1], {"d": 4, "t": 2}, has_bfloat16=has_bfloat16, **given)
        for dtype, has_bfloat16 in (("bfloat16", True), ("bfloat16", False), ("float32", False))
    )
    assert narrow.memory.bytes < on_cpu.memory.bytes < without.memory.bytes == wide.memory.bytes
    assert (on_cpu.costs, on_cpu.saved) == (narrow.costs, narrow.saved)


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


@functools.cache
def ledger_and_compiled(microbatches, dtype):
    ledger, traced = traced_step(microbatches, dtype)
    return ledger, traced.lower().compile()


def test_the_report_of_a_step_that_sends_what_is_written(record_property):
    """The float32 step has no difference: one line says so, another the forecast's ratio to XLA's."""
    ledger, compiled = ledger_and_compiled(2, "float32")
    assert differences(ledger, compiled.as_text()) == []
    lines, rows = agreement.agreement(ledger, compiled)
    assert rows == []
    assert lines[0] == "The compiled step sends what is written: 155 collectives, equal by kind, axes, type and bytes."
    assert lines[1].startswith("Memory of a device: forecast ") and len(lines) == 2
    record_property("summary", f"memory of the small step, float32, XLA:CPU: {lines[1]}")
    assert 0.5 < ledger.memory.bytes / peak_bytes(compiled) < 1.5


def test_a_program_of_which_xla_says_no_memory(monkeypatch):
    """On a GPU a program that was read from the disk has no peak: the report has the forecast alone."""
    ledger, compiled = ledger_and_compiled(2, "float32")
    unknown = SimpleNamespace(peak_memory_in_bytes=0)
    device = SimpleNamespace(platform="gpu")
    shardings = [SimpleNamespace(device_set=[device])]
    read = SimpleNamespace(as_text=compiled.as_text, memory_analysis=lambda: unknown, input_shardings=shardings)
    assert peak_bytes(read) == 0
    lines, _ = agreement.agreement(ledger, read)
    assert lines[1].endswith(", XLA does not say.")


def test_what_is_widened_is_no_warning():
    """XLA:CPU compiles the bfloat16 step with the float32 step's collectives: each widened one has a row, and the
    report one line."""
    ledger, (_, compiled) = traced_step(2, "bfloat16")[0], ledger_and_compiled(2, "float32")
    rows = differences(ledger, compiled.as_text())
    assert {(row.dtype, row.compiled, row.reason) for row in rows} == {("bfloat16", 0, WIDENED)} and len(rows) == 5
    lines, rows = agreement.agreement(ledger, compiled)
    assert len(lines) == 2 and all(row.is_harmless for row in rows)
    assert lines[0] == (
        "The compiled step sends what is written: 155 collectives, equal by kind, axes and number; "
        "what is bfloat16 is sent as float32, twice the bytes, as all bfloat16 is by XLA:CPU."
    )


@pytest.mark.slow
def test_every_difference_has_its_reason(monkeypatch):
    """XLA widens bfloat16 collectives and, without the barrier, takes gathers out of the microbatch loop: each row has
    its line and reason."""
    monkeypatch.setattr(lax, "optimization_barrier", lambda x: x)
    ledger, traced = traced_step.__wrapped__(2, "bfloat16")
    compiled = traced.lower().compile()
    rows = differences(ledger, compiled.as_text())
    assert {row.reason for row in rows if row.dtype == "bfloat16"} == {WIDENED}
    lines, _ = agreement.agreement(ledger, compiled)
    assert lines[0] == "warning: the compiled step does not send what is written:"
    harmful = [row for row in rows if row.reason != WIDENED]
    assert lines[1:-1] == [f"  {row}" for row in harmful] and not any(row.is_harmless for row in harmful)
    # What is widened is then as often there as written; what is left over are the gathers of embed and unembed, and of
    # the layers' and the final norm.
    assert {(row.written, row.compiled) for row in rows if row.reason != WIDENED} == {(20, 18), (4, 2), (2, 1)}
    (norm,) = [row for row in rows if row.bytes == 32 and row.axes == ("d", "t")]
    assert (norm.written, norm.compiled) == (2, 1) and norm.reason.startswith("taken out of the loop at train.py:")
    assert str(norm).startswith("all-gather over d × t, 32 bytes of float32 (train.py:")
    assert "written 2, compiled 1 times a step: taken out of the loop at" in str(norm)


@pytest.mark.parametrize("microbatches", [*small.slow(1), 2])
def test_a_gather_that_is_merged_with_an_equal_one_is_no_warning(microbatches):
    """One layer's weights are gathered twice in a row, forward and backward, and XLA merges one such pair a microbatch:
    one line says how many, and the row has the reason and the line."""
    ledger, traced = traced_step(microbatches, "float32", layers=1)
    lines, rows = agreement.agreement(ledger, traced.lower().compile())
    (row,) = rows
    assert row.reason == MERGED and row.written - row.compiled == microbatches and row.lines[0].startswith("train.py:")
    written = sum(ledger.costs.collectives.values())
    merged = f": {written} collectives, {microbatches} of them merged with an equal one."
    assert len(lines) == 2 and lines[0].endswith(merged)


def test_a_merge_is_told_from_what_leaves_a_loop():
    """Two gathers in a loop of two turns run four times. Twice may be one of them in the loop, or both before it: the
    first is harmless, the second holds what it gathered, and is a warning."""
    ledger, _ = ledger_and_compiled(2, "float32")
    row = Collective("all-gather", ("d", "t"), "float32", 8, "update", "train.py:1")
    costs = dataclasses.replace(ledger.costs, sites=collections.Counter({(row, 2): 2}))
    ledger = dataclasses.replace(ledger, costs=costs)

    def found(monkeypatch, sites):
        monkeypatch.setattr(agreement, "compiled_sites", lambda text, mesh: collections.Counter(sites))
        (difference,) = differences(ledger, "")
        assert (difference.written, difference.compiled) == (4, 2)
        return difference

    with pytest.MonkeyPatch.context() as monkeypatch:
        assert found(monkeypatch, {(row, 2): 1}).reason == MERGED
        hoisted = found(monkeypatch, {(row, 1): 2})
    assert hoisted.reason.startswith("taken out of the loop at train.py:") and not hoisted.is_harmless


def test_what_is_not_compiled_at_all():
    """A program that sends nothing lacks every row."""
    ledger, _ = ledger_and_compiled(2, "float32")
    empty = "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n"
    rows = differences(ledger, empty)
    assert {row.reason for row in rows} == {ELIMINATED} and not any(row.is_harmless for row in rows)
    assert sum(row.written for row in rows) == 155


def program(*instructions):
    """A program of these collectives on a mesh of 4 × 2, each of the whole of a float32 parameter."""
    lines = [f"%x{i} = f32[{size}] parameter({i})" for i, (_, size, _) in enumerate(instructions)]
    lines += [f"%c{i} = f32[8] {kind}(%x{i}), replica_groups={at}" for i, (kind, _, at) in enumerate(instructions)]
    body = "\n  ".join([*lines, "ROOT %r = f32[] constant(0)"])
    return f"HloModule m, num_partitions=8\n\nENTRY %main () -> f32[] {{\n  {body}\n}}\n"


def test_what_is_done_in_another_way_has_its_reason():
    """The reasons name all-reduces that are joined into one of as many bytes, and a reduce-scatter and an all-gather
    that run as all-reduces."""
    ledger, _ = ledger_and_compiled(2, "float32")
    over_all = "{{0,1,2,3,4,5,6,7}}"

    def rows(*written, compiled):
        costs = dataclasses.replace(ledger.costs, sites=collections.Counter())
        for kind, size in written:
            costs.sites[Collective(kind, ("d", "t"), "float32", 4 * size, "update", "train.py:1"), 1] += 1
        changed = dataclasses.replace(ledger, costs=costs)
        found = differences(changed, program(*((kind, size, over_all) for kind, size in compiled)))
        return [(row.kind, row.bytes, row.written, row.compiled, row.reason) for row in found]

    assert rows(("all-reduce", 1), ("all-reduce", 1), compiled=[("all-reduce", 2)]) == [
        ("all-reduce", 4, 2, 0, JOINED),
        ("all-reduce", 8, 0, 1, JOINED),
    ]
    assert rows(("reduce-scatter", 16), ("all-gather", 2), compiled=[("all-reduce", 16)] * 2) == [
        ("all-gather", 8, 1, 0, AS_ALL_REDUCE),
        ("all-reduce", 64, 0, 2, AS_ALL_REDUCE),
        ("reduce-scatter", 64, 1, 0, AS_ALL_REDUCE),
    ]
    assert rows(*[("all-gather", 2)] * 2, compiled=[("all-gather", 2), ("all-reduce", 16)]) == [
        ("all-gather", 8, 2, 1, AS_ALL_REDUCE),
        ("all-reduce", 64, 0, 1, AS_ALL_REDUCE),
    ]
    assert rows(("reduce-scatter", 16), compiled=[("all-reduce", 16)] * 2)[0][-1] == UNKNOWN


def test_a_collective_cut_into_several_counts_once():
    """XLA:TPU's parts of one collective, which a chain marks, count once."""
    ledger, _ = ledger_and_compiled(2, "float32")
    text = program(*[("all-gather", 2, "{{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id=\"3\"}")] * 4)
    assert sum(compiled_collectives(text, ledger.mesh).values()) == 1
