"""What is sent is what is written: the collectives of the compiled step are those of its source."""

import collections
import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small
from jax import lax

import train
import train_any
from ledger.compiled.agreement import (
    AS_ALL_REDUCE,
    ELIMINATED,
    JOINED,
    MERGED,
    UNKNOWN,
    WIDENED,
    agreement,
    differences,
    peak_bytes,
)
from ledger.compiled.collectives import axes_of_groups, compiled, dtype_of, widened
from ledger.count.costs import Collective, count, totals
from ledger.count.program import read
from ledger.count.step import of_step
from models import llama
from runtime.config.command_line import load
from runtime.run import with_shardings
from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32

pytestmark = pytest.mark.usefixtures("proved_elsewhere")
AXES = {"d": 4, "t": 2}


def both_tables(traced, axes):
    """The collectives as written and as compiled."""
    return count(read(traced.jaxpr), axes).collectives, compiled(traced.lower().compile().as_text(), axes)


def traced_step(mesh=(4, 2), microbatches=2, dtype="float32", layers=2):
    """The small model's training step."""
    model = dataclasses.replace(small.MODEL, layers=layers)
    training = dataclasses.replace(small.TRAINING, microbatches=microbatches)
    with small.on_mesh(*mesh, dtype):
        step = typed_shard_map(functools.partial(train.training_step, model, training, 0))
        state = small.state_of(reference.random_weights(model, seed=0))
        zero = jnp.uint32(0)
        return jax.jit(step, donate_argnums=0).trace(state, zero, zero, small.batch_of(small.BATCH))


def ledger_of(traced, axes=AXES, **given):
    return of_step(traced, axes, source=train.__file__, tokens=16 * 32, **given)


@pytest.fixture(scope="module")
@small.proved_elsewhere()
def plain():
    """The ledger of the float32 step, and its compiled program."""
    traced = traced_step()
    return ledger_of(traced), traced.lower().compile()


# How many collectives a microbatch has, and the whole step: targets, loss, and the norms of gradient, weights, update.
SENT = {(4, 2): (75, 5), (8, 1): (52, 5), (1, 1): (0, 0), (2, 4): (75, 5), (1, 8): (29, 4)}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", [(4, 2), *small.slow(*list(SENT)[1:])], ids=str)
def test_the_compiled_step_sends_what_is_written(mesh, microbatches):
    """Kinds, axes, counts, bytes, phases and lines are equal exactly in float32; microbatches repeat all but the sums
    of the whole step. A single device sends nothing; axes of one device are left out on both sides."""
    ours, theirs = both_tables(traced_step(mesh, microbatches), dict(zip("dt", mesh)))
    assert ours == theirs
    once, whole = SENT[mesh]
    assert sum(ours.values()) == once * microbatches + whole
    assert sum(times for row, times in ours.items() if row.phase == "update") == whole
    assert all(row.line.startswith("train.py:") for row in ours)


def test_the_lines_of_a_family():
    """train_any's lines on d · c · t are equal too, in all its files; each weight is gathered, and its gradient
    reduced, at its line of the family's table."""
    keys = ["mesh={d: 2, c: 2, t: 2}", "model.compute_dtype=float32", "training.tokens.batch=16"]
    config = train_any.resolved(load(train_any.Config, "any_synthetic", keys))
    axes, zero = vars(config.mesh), np.uint32(0)
    step, _ = train_any.mapped_steps(config, 0)
    with jax.set_mesh(make_mesh(axes)):
        state, batch = train_any.shapes(config)
        shapes = with_shardings(state, train_any.state_type(config)), with_shardings(batch, type(batch))
        traced = jax.jit(step).trace(shapes[0], zero, zero, shapes[1])
        ours, theirs = both_tables(traced, axes)
        ledger = of_step(traced, axes, source=train_any.__file__, tokens=1)
    # XLA merges two gathers of the residual, of equal lines: one is left.
    assert set(ours) == set(theirs) and sum((ours - theirs).values()) <= 1 and not theirs - ours
    assert next(iter(ledger.texts)) == "train_any.py" and {"llama.py", "layers.py"} < set(ledger.texts)
    assert {row.line.partition(":")[0] for row in ours} <= set(ledger.texts)
    for name, weight in llama.TABLE.layer.items():
        if getattr(state.weights.trained.transformer, name) is not None:
            place = Path(weight.line).name
            file, _, number = place.partition(":")
            assert f"'{name}': " in ledger.texts[file][int(number) - 1]
            sent = {row.phase: row.kind for row in ours if row.line == place}
            again = {} if name.startswith("ln") else {"recomputed": "all-gather"}  # norms: once, of all layers together
            assert sent == {"forward": "all-gather", "backward": "reduce-scatter", **again}


def as_float32(table):
    """A table, with what is bfloat16 widened."""
    wide = collections.Counter()
    for row, times in table.items():
        wide[widened(row)] += times
    return wide


@pytest.mark.parametrize("mesh", [(4, 2), *small.slow((8, 1))], ids=["4x2", "8x1"])
def test_bfloat16_is_widened_and_nothing_else(mesh):
    """The only difference in bfloat16 is that the CPU sends those collectives as float32, twice the bytes. It is said
    with the lines that send them, and is no warning: the report has one line of it."""
    traced, axes = traced_step(mesh, dtype="bfloat16"), dict(zip("dt", mesh))
    compiled_step = traced.lower().compile()
    ours, theirs = count(read(traced.jaxpr), axes).collectives, compiled(compiled_step.as_text(), axes)
    assert {row.dtype for row in ours} == {"bfloat16", "float32"} and {row.dtype for row in theirs} == {"float32"}
    assert as_float32(ours) == theirs
    lines = collections.defaultdict(set)
    for row in ours:
        if row.dtype == "bfloat16":
            lines[row.kind, row.axes, row.bytes].add(row.line)
    report, rows = agreement(ledger_of(traced, axes), compiled_step)
    assert {(row.kind, row.axes, row.bytes): set(row.lines) for row in rows} == lines and len(rows) == len(lines)
    assert {(row.dtype, row.reason, row.is_harmless) for row in rows} == {("bfloat16", WIDENED, True)}
    assert len(report) == 2 and report[0] == (
        f"The compiled step sends what is written: {sum(ours.values())} collectives, equal by kind, axes and number; "
        "what is bfloat16 is sent as float32, twice the bytes, as all bfloat16 is by XLA:CPU."
    )


def test_chunks_of_the_loss_are_counted(monkeypatch):
    """The sums of a loss in four chunks run four times, as written and as compiled."""
    monkeypatch.setattr(train, "LOSS_CHUNK", 8)
    ours, theirs = both_tables(traced_step(), AXES)
    assert ours == theirs
    (line,) = {row.line for row in ours if row.kind == "all-reduce" and row.phase == "backward"}
    assert ours[Collective("all-reduce", ("t",), "float32", 2 * 8 * 4, "backward", line)] == 8


def test_every_difference_has_its_reason(monkeypatch):
    """XLA widens bfloat16 collectives and, without the barrier, gathers embed, unembed and the norms once for both
    microbatches: each row has its line and reason."""
    monkeypatch.setattr(lax, "optimization_barrier", lambda x: x)
    traced = traced_step(dtype="bfloat16")
    compiled_step, ledger = traced.lower().compile(), ledger_of(traced)
    gone = as_float32(ledger.costs.collectives) - compiled(compiled_step.as_text(), AXES)
    assert {(row.axes, row.bytes): times for row, times in totals(gone).items()} == {
        (("d",), 4096): 2, (("d", "t"), 32): 1, (("d", "t"), 64): 2,
    }  # fmt: skip
    assert {(row.kind, row.phase) for row in gone} == {("all-gather", "forward")}
    lines, rows = agreement(ledger, compiled_step)
    assert {row.reason for row in rows if row.dtype == "bfloat16"} == {WIDENED}
    assert lines[0] == "warning: the compiled step does not send what is written:"
    harmful = [row for row in rows if row.reason != WIDENED]
    assert lines[1:-1] == [f"  {row}" for row in harmful] and not any(row.is_harmless for row in harmful)
    # What is widened is then as often there as written; what is left over are the gathers of embed and unembed, and of
    # the layers' and the final norm.
    assert {(row.written, row.compiled) for row in harmful} == {(20, 18), (4, 2), (2, 1)}
    (norm,) = [row for row in rows if row.bytes == 32 and row.axes == ("d", "t")]
    assert (norm.written, norm.compiled) == (2, 1) and norm.reason.startswith("taken out of the loop at train.py:")
    assert str(norm).startswith("all-gather over d × t, 32 bytes of float32 (train.py:")
    assert "written 2, compiled 1 times a step: taken out of the loop at" in str(norm)


def both(function, *arguments, axes=AXES):
    with small.on_mesh(*axes.values()):
        return both_tables(jax.jit(typed_shard_map(function)).trace(*arguments), axes)


def each_kind(
    x: f32['X/d/t 16 16'], y: f32['X Y/d 16']
) -> tuple[f32['X Y/d 16'], f32['X/d 16/t 16'], f32['X/d/t 16 16']]:
    def turn(y: f32['X d/d l 16'], _: None):
        return shardops.ppermute('X d/d l 16 -> X d/d l 16', y, 1), None

    y, _ = lax.scan(turn, shardops.regroup('X Y/d 16 -> X d/d l 16', y), None, length=3)
    y = shardops.regroup('X d/d l 16 -> X Y/d 16', y)
    x = shardops.all_gather('X/d/t 16 16 -> X/d 16 16', x)
    scattered = shardops.psum_scatter('X/d 16 16 +t -> X/d 16/t 16', shardops.pending('X/d 16 16 -> X/d 16 16 +t', x))
    moved = shardops.all_to_all('X/d 16/t 16 -> X/d/t 16 16', scattered)
    return y, scattered, moved


@pytest.mark.parametrize("axes", [{"d": 4, "t": 2}, {"d": 8, "t": 1}, {"d": 1, "t": 8}], ids=["4x2", "8x1", "1x8"])
def test_every_kind_of_collective(axes):
    """Each kind, alone and in a scan, has the bytes of its operand on a device; one over a single device is no
    collective. Undifferentiated, all is forward."""
    ours, theirs = both(each_kind, jnp.ones((16, 16, 16)), jnp.ones((16, 16, 16)), axes=axes)
    assert ours == theirs
    d, t = axes.values()
    whole = 4 * 16**3
    expected = {("collective-permute", ("d",), whole // d): 3 * (d > 1)}
    expected[("all-gather", ("t",), whole // (d * t))] = expected[("reduce-scatter", ("t",), whole // d)] = int(t > 1)
    expected[("all-to-all", ("t",), whole // (d * t))] = int(t > 1)
    assert +collections.Counter(expected) == {(row.kind, row.axes, row.bytes): times for row, times in ours.items()}
    assert {(row.phase, row.line.split(":")[0]) for row in ours} == {("forward", "test_compiled_collectives.py")}


def test_what_cannot_be_counted_is_refused():
    """A collective or a product in a while loop, or a collective in one branch only, is refused with its line."""

    def sends_in_while(x: f32['d/d']) -> f32['d/d']:
        return lax.while_loop(lambda x: x[0] < 1, lambda x: shardops.ppermute('d/d -> d/d', x, 1), x)

    def multiplies_in_while(x: f32['d/d']) -> f32['d/d']:
        return lax.while_loop(lambda x: x[0] < 1, lambda x: x[:, None] @ x, x)

    def in_branch(x: f32['d/d'], flag: f32['']) -> f32['d/d']:
        return lax.cond(flag > 0, lambda x: shardops.ppermute('d/d -> d/d', x, 1), lambda x: x, x)

    for function, arguments, text in [
        (sends_in_while, (), "a collective in the while loop at"),
        (multiplies_in_while, (), "a matrix product in the while loop at"),
        (in_branch, (jnp.ones(()),), "the branches at"),
    ]:
        with small.on_mesh(4, 2):
            traced = jax.jit(typed_shard_map(function, check=False)).trace(jnp.ones(4), *arguments)
        with pytest.raises(ValueError, match=f"{text} test_compiled_collectives.py:\\d+"):
            count(read(traced.jaxpr), AXES)


@pytest.mark.parametrize("attributes, axes", [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", ("t",)),
    ("replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}", ("d",)),
    ("replica_groups={{6,4,2,0},{7,5,3,1}}, dimensions={0}", ("d",)),
    ("replica_groups={}, to_apply=%add", ("d", "t")),
    ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("{{0,1,2,3},{4,5,6,7}}",)),
    ("replica_groups=[4,2]<=[8], dimensions={0}", ("t",)),
    ("replica_groups=[1,8]<=[8], to_apply=%add", ("d", "t")),
    ("replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true", ("d",)),
    ("replica_groups=[2,4]<=[8]", ("[2,4]<=[8]",)),
    ("source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", ("d",)),
    ("source_target_pairs={{0,1},{1,0}}", ("t",)),
    ("source_target_pairs={{0,3}}", ("d", "t")),
])  # fmt: skip
def test_groups_are_mesh_axes(attributes, axes):
    """Every spelling of a collective's groups on a 4 x 2 mesh is read; groups of no mesh axes are shown as they are."""
    assert axes_of_groups(", channel_id=1, " + attributes, AXES) == axes


def test_three_axes_and_an_unknown_spelling():
    """Axes of one device drop out among several; what cannot be read is refused."""
    of_jax_11 = "replica_groups=mesh['p'=2,'d'=2,'s'=1] {'d','s'}"
    assert axes_of_groups(of_jax_11, {"p": 2, "d": 2, "s": 1}) == axes_of_groups(of_jax_11, {"p": 2, "d": 2}) == ("d",)
    assert axes_of_groups("replica_groups=[4,2]<=[2,2,2]T(1,2,0)", {"p": 2, "d": 2, "s": 1, "t": 2}) == ("p",)
    assert axes_of_groups("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", {"p": 2, "d": 2, "s": 1, "t": 2}) == ("p", "t")
    with pytest.raises(ValueError, match="a spelling that is not known: 'replica_groups=@mesh"):
        axes_of_groups("replica_groups=@mesh<d=4>{d}", AXES)


OTHER_FORMS = Path(__file__).with_name("other_forms.hlo.txt").read_text()


def test_asynchronous_and_combined_collectives():
    """A start and its done are one collective, a combined one is one for each operand, and a loop without a known count
    has its condition's bound."""
    assert compiled(OTHER_FORMS, AXES) == {
        Collective("all-reduce", ("d",), "float32", 32, "backward", "train.py:7"): 5,
        Collective("all-reduce", ("d",), "float32", 8, "update", ""): 5,
        Collective("reduce-scatter", ("t",), "bfloat16", 128, "update", ""): 1,
    }
    with pytest.raises(ValueError, match="turns of the loop while are not known"):
        compiled(OTHER_FORMS.replace("direction=LT", "direction=NE"), AXES)


def test_element_types():
    """HLO's words for element types are read as JAX's."""
    words = "pred s8 u32 bf16 f16 f32 f8e4m3fn".split()
    assert [jnp.dtype(dtype_of(word)).name for word in words] == list(map(dtype_of, words))
    assert list(map(dtype_of, words[:2])) == ["bool", "int8"] and dtype_of("f8e5m2") == "float8_e5m2"


# -- The report, and the memory ---------------------------------------------------------------------------------------
def test_a_cpu_holds_bfloat16_as_float32():
    """For a CPU the bfloat16 step is forecast to need more memory than bfloat16 does, and less than the float32 step
    where operands of products stay, but as much where the cores have no instructions for bfloat16; what is computed,
    sent and kept stays bfloat16's."""
    narrow, wide = traced_step(dtype="bfloat16"), traced_step()
    elsewhere = ledger_of(narrow)
    on_cpu, without, of_float32 = (
        ledger_of(traced, platform="cpu", has_bfloat16=has_bfloat16)
        for traced, has_bfloat16 in ((narrow, True), (narrow, False), (wide, False))
    )
    assert elsewhere.memory.bytes < on_cpu.memory.bytes < without.memory.bytes == of_float32.memory.bytes
    assert (on_cpu.costs, on_cpu.saved) == (elsewhere.costs, elsewhere.saved)


def test_the_report_of_a_step_that_sends_what_is_written(plain, record_property):
    """The float32 step has no difference: one line says so, another the forecast's ratio to XLA's; the forecast alone
    for a GPU's program that was read from the disk, which has no peak."""
    ledger, step = plain
    lines, rows = agreement(ledger, step)
    assert rows == []
    assert lines[0] == "The compiled step sends what is written: 155 collectives, equal by kind, axes, type and bytes."
    assert lines[1].startswith("Memory of a device: forecast ") and len(lines) == 2
    record_property("summary", f"memory of the small step, float32, XLA:CPU: {lines[1]}")
    assert 0.5 < ledger.memory.bytes / peak_bytes(step) < 1.5
    donating = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jax.ShapeDtypeStruct((1000,), jnp.float32)).compile()
    assert peak_bytes(donating) == 4000  # the result takes its argument's place

    unknown = SimpleNamespace(peak_memory_in_bytes=0)
    shardings = [SimpleNamespace(device_set=[SimpleNamespace(platform="gpu")])]
    of_disk = SimpleNamespace(as_text=step.as_text, memory_analysis=lambda: unknown, input_shardings=shardings)
    assert peak_bytes(of_disk) == 0
    assert agreement(ledger, of_disk)[0][1].endswith(", XLA does not say.")


@pytest.mark.parametrize("microbatches", [*small.slow(1), 2])
def test_a_gather_that_is_merged_with_an_equal_one_is_no_warning(microbatches):
    """One layer's weights are gathered twice in a row, forward and backward, and XLA merges one such pair a microbatch:
    one line says how many, and the row has the reason and the line."""
    traced = traced_step(microbatches=microbatches, layers=1)
    ledger = ledger_of(traced)
    lines, rows = agreement(ledger, traced.lower().compile())
    merges = jax.__version_info__ < (0, 11)  # XLA of later releases leaves both
    found = [(row.reason, row.written - row.compiled, row.lines[0].partition(":")[0]) for row in rows]
    assert found == [(MERGED, microbatches, "train.py")] * merges
    said = f"{microbatches} of them merged with an equal one" if merges else "equal by kind, axes, type and bytes"
    assert len(lines) == 2 and lines[0].endswith(f": {sum(ledger.costs.collectives.values())} collectives, {said}.")


def with_sites(ledger, *sites):
    """The ledger, as if these collectives over both axes were written: kind, elements, the turns of their loop."""
    costs = dataclasses.replace(ledger.costs, sites=collections.Counter())
    for kind, size, turns in sites:
        costs.sites[Collective(kind, ("d", "t"), "float32", 4 * size, "update", "train.py:1"), turns] += 1
    return dataclasses.replace(ledger, costs=costs)


def test_a_merge_is_told_from_what_leaves_a_loop(plain, monkeypatch):
    """Two gathers in a loop of two turns run four times. Twice may be one of them in the loop, or both before it: the
    first is harmless, the second holds what it gathered, and is a warning."""
    ledger = with_sites(plain[0], *[("all-gather", 2, 2)] * 2)
    (row, _), *_ = ledger.costs.sites

    def found(turns, times):
        monkeypatch.setattr(
            "ledger.compiled.agreement.compiled_sites", lambda *_: collections.Counter({(row, turns): times})
        )
        (difference,) = differences(ledger, "")
        assert (difference.written, difference.compiled) == (4, 2)
        return difference

    assert found(turns=2, times=1).reason == MERGED
    hoisted = found(turns=1, times=2)
    assert hoisted.reason.startswith("taken out of the loop at train.py:") and not hoisted.is_harmless


OVER_ALL = "{{0,1,2,3,4,5,6,7}}"


def program(*collectives, at=OVER_ALL):
    """A program of these collectives on a mesh of 4 × 2, each of the whole of a float32 parameter."""
    lines = [f"%x{i} = f32[{size}] parameter({i})" for i, (_, size) in enumerate(collectives)]
    lines += [f"%c{i} = f32[8] {kind}(%x{i}), replica_groups={at}" for i, (kind, _) in enumerate(collectives)]
    body = "\n  ".join([*lines, "ROOT %r = f32[] constant(0)"])
    return f"HloModule m, num_partitions=8\n\nENTRY %main () -> f32[] {{\n  {body}\n}}\n"


def test_what_is_not_compiled_at_all(plain):
    """A program that sends nothing lacks every row."""
    rows = differences(plain[0], program())
    assert {row.reason for row in rows} == {ELIMINATED} and not any(row.is_harmless for row in rows)
    assert sum(row.written for row in rows) == 155


def test_what_is_done_in_another_way_has_its_reason(plain):
    """The reasons name all-reduces that are joined into one of as many bytes, and a reduce-scatter and an all-gather
    that run as all-reduces."""

    def rows(*written, compiled):
        ledger = with_sites(plain[0], *((*site, 1) for site in written))
        found = differences(ledger, program(*compiled))
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
    text = program(*[("all-gather", 2)] * 4, at=f'{OVER_ALL}, frontend_attributes={{chain_id="3"}}')
    assert sum(compiled(text, AXES).values()) == 1
