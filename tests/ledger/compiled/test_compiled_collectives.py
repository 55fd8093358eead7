"""What is sent is what is written: the collectives of the compiled step are those of its source."""

import collections
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small
from jax import lax

import train
import train_any
from ledger.compiled.agreement import differences
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


def both_tables(traced, axes):
    """The collectives as written and as compiled."""
    return count(read(traced.jaxpr), axes).collectives, compiled(traced.lower().compile().as_text(), axes)


def traced_step(d, t, microbatches, dtype="float32"):
    """The small model's training step."""
    training = dataclasses.replace(small.TRAINING, microbatches=microbatches)
    with small.on_mesh(d, t, dtype):
        step = typed_shard_map(functools.partial(train.training_step, small.MODEL, training, 0))
        state = small.state_of(reference.random_weights(small.MODEL, seed=0))
        return jax.jit(step).trace(state, jnp.uint32(0), jnp.uint32(0), small.batch_of(small.BATCH))


def tables(d, t, microbatches):
    """Both tables of the small model's training step."""
    return both_tables(traced_step(d, t, microbatches), {"d": d, "t": t})


# How many collectives a microbatch has, and the whole step: targets, loss, and the norms of gradient, weights, update.
SENT = {(4, 2): (75, 5), (8, 1): (52, 5), (1, 1): (0, 0), (2, 4): (75, 5), (1, 8): (29, 4)}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", [(4, 2), *small.slow(*list(SENT)[1:])], ids=str)
def test_the_compiled_step_sends_what_is_written(mesh, microbatches):
    """Kinds, axes, counts, bytes, phases and lines are equal exactly in float32; microbatches repeat all but the sums
    of the whole step. A single device sends nothing; axes of one device are left out on both sides."""
    ours, theirs = tables(*mesh, microbatches)
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


@pytest.mark.parametrize("mesh", [(4, 2), *small.slow((8, 1))], ids=["4x2", "8x1"])
def test_bfloat16_is_widened_and_nothing_else(mesh):
    """The only difference in bfloat16 is that the CPU sends those collectives as float32, twice the bytes. It is said
    with the lines that send them."""
    traced, axes = traced_step(*mesh, microbatches=2, dtype="bfloat16"), dict(zip("dt", mesh))
    ours, theirs = both_tables(traced, axes)
    assert {row.dtype for row in ours} == {"bfloat16", "float32"} and {row.dtype for row in theirs} == {"float32"}
    wide = collections.Counter()
    for row, times in ours.items():
        wide[widened(row)] += times
    assert wide == theirs
    lines = collections.defaultdict(set)
    for row in ours:
        if row.dtype == "bfloat16":
            lines[row.kind, row.axes, row.bytes].add(row.line)
    ledger = of_step(traced, axes, source=train.__file__, tokens=1)
    rows = differences(ledger, traced.lower().compile().as_text())
    assert {(row.kind, row.axes, row.bytes): set(row.lines) for row in rows} == lines and len(rows) == len(lines)


def test_chunks_of_the_loss_are_counted(monkeypatch):
    """The sums of a loss in four chunks run four times, as written and as compiled."""
    monkeypatch.setattr(train, "LOSS_CHUNK", 8)
    ours, theirs = tables(4, 2, microbatches=2)
    assert ours == theirs
    (line,) = {row.line for row in ours if row.kind == "all-reduce" and row.phase == "backward"}
    assert ours[Collective("all-reduce", ("t",), "float32", 2 * 8 * 4, "backward", line)] == 8


def test_a_gather_that_is_hoisted_is_seen(monkeypatch):
    """XLA gathers embed, unembed and the norms once for both microbatches if the barrier is missing."""
    monkeypatch.setattr(lax, "optimization_barrier", lambda x: x)
    ours, theirs = tables(4, 2, microbatches=2)
    hoisted = {(row.axes, row.bytes): times for row, times in totals(ours - theirs).items()}
    assert hoisted == {(("d",), 4096): 2, (("d", "t"), 32): 1, (("d", "t"), 64): 2}
    assert {(row.kind, row.phase) for row in ours - theirs} == {("all-gather", "forward")}


AXES = {"d": 4, "t": 2}


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
    """A collective in a while loop, or in one branch only, is refused with its line."""

    def in_while(x: f32['d/d']) -> f32['d/d']:
        return lax.while_loop(lambda x: x[0] < 1, lambda x: shardops.ppermute('d/d -> d/d', x, 1), x)

    def in_branch(x: f32['d/d'], flag: f32['']) -> f32['d/d']:
        return lax.cond(flag > 0, lambda x: shardops.ppermute('d/d -> d/d', x, 1), lambda x: x, x)

    for function, arguments, text in [
        (in_while, (), "a collective in the while loop at"),
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
