"""pipeline.py: its schedule takes each microbatch through all stages, in order, and back; what it keeps, how long it
runs, and what the check refuses. tests/test_axes.py compares what it computes."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import GROUPS, mutants, refuse_all
from pages import module_of
from test_axes import DEEP, DEEP_MIXTURE, SOURCE, check, config_of, ledger_of, mesh_of, on, with_parts

import pipeline
import train_any
from runtime.config.keys import PairTokens
from runtime.run import with_shardings
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32
from shardlib.typed import typed


# -- The schedule, by labels -------------------------------------------------------------------------------------------
def labelled(p, v, groups):
    """What the schedule makes of whole numbers: a piece makes 3x + its number of x, so what comes out says which pieces
    it went through, in which order. A piece adds its number times g times the microbatch's to the loss, and the
    microbatch's times its own to what is seen. Returns the microbatches' labels, their sum, what was seen, the two
    gradients of the pieces, and that of what went in."""
    spec, count = 'p/p groups B/b L/c M/t', groups * p

    @typed
    def run(
        w: f32['p/p v'], g: f32['p/p v'], a: f32['N'], stream: f32[spec]
    ) -> tuple[f32['N'], f32[''], f32[''], f32['p/p v'], f32['p/p v'], f32['p/p v'], f32[spec]]:
        def stage(piece, fixed, x, number):
            w, g = piece
            at = number.astype(jnp.float32)
            return (x * (3 + g * (at + 1)) + w + at, fixed * g * (at + 1)), (at + 1) * (fixed + 1)

        def head(a, y, number):
            last = (shardops.index('p') == int(shardops.axis_size('p')) - 1)[:, None, None, None]
            y = shardops.sum_unreduced('p/p B/b L/c M/t -> +p +r +d +c +e +t', jnp.where(last, y, 0))
            return y * jax.lax.dynamic_index_in_dim(a, number, keepdims=False)

        seen = jnp.zeros_like(w)
        loss, seen, of_pieces, of_a, of_stream = pipeline.pipelined(stage, head, (w, g), w, a, stream, seen)
        alone, *_ = pipeline.pipelined(stage, head, (w, g), w, a, stream, seen, False)
        sums = [
            shardops.psum(f'{dims} +p +r +d +c +e +t -> {dims}', x)
            for dims, x in (('N', of_a), ('', loss), ('', alone))
        ]
        return *sums, seen, *(shardops.psum('p/p v +r +d +c +e +t -> p/p v', x) for x in of_pieces), of_stream

    pipeline.act.dtype = jnp.float32
    pieces = np.arange(p * v, dtype=np.float32).reshape(v, p).T  # piece i is the (i // p)th of stage i % p
    # Microbatch g·p + m, whose label is its number, goes in on stage (m + 1) % p.
    stream = np.roll(np.arange(count, dtype=np.float32).reshape(groups, p).T, 1, axis=0)
    given = pieces, np.zeros_like(pieces), np.arange(1, count + 1, dtype=np.float32), stream[:, :, None, None, None]
    with on(mesh_of(f'p{p}')):
        return jax.tree.map(np.asarray, jax.jit(typed_shard_map(run, check=False))(*given))


SCHEDULES = [
    (4, 1, 2),
    (2, 2, 2),
    *(pytest.param(*schedule, marks=pytest.mark.slow) for schedule in [(2, 1, 1), (2, 3, 1), (4, 2, 1)]),
]


@pytest.mark.parametrize('p, v, groups', SCHEDULES)
def test_every_microbatch_goes_through_all_pieces_and_back(p, v, groups):
    """Labels are exact: each piece adds its number to each microbatch, in order, forward and once more backward."""
    count, pieces = groups * p, p * v
    labels, a = np.zeros((pieces + 1, count)), np.arange(1, count + 1)
    labels[0] = np.arange(count)
    for piece in range(pieces):
        labels[piece + 1] = 3 * labels[piece] + piece + np.arange(count)
    back = [a * 3 ** (pieces - 1 - piece) for piece in range(pieces)]  # what a piece is handed back

    def dealt(of_pieces):
        return np.reshape(of_pieces, (v, p)).T

    numbers = np.arange(count) + 1
    of_g = dealt([np.sum((back[piece] * labels[piece] + piece) * numbers) for piece in range(pieces)])
    seen = dealt([(piece + 1) * numbers.sum() for piece in range(pieces)])
    of_stream = np.roll((a * 3**pieces).reshape(groups, p).T, 1, axis=0)[:, :, None, None, None]
    loss = np.sum(a * labels[-1])
    expected = labels[-1], loss, loss, seen, dealt([array.sum() for array in back]), of_g, of_stream
    assert max(np.max(value) for value in expected) < 2**24  # float32 has them exactly
    for found, right in zip(labelled(p, v, groups), expected, strict=True):
        np.testing.assert_array_equal(found, right)


# -- What the compiled program keeps, and how long it runs -------------------------------------------------------------
def compiled_loops(p, pieces, microbatches):
    """The shapes that the compiled step's loops carry, and how often each loop turns; of loops within loops, all."""
    model = dataclasses.replace(DEEP, layers=2 * p * pieces)
    training = dataclasses.replace(with_parts(microbatches, pieces), tokens=PairTokens(batch=microbatches, len=32))
    mesh = mesh_of(f'p{p}')
    config = config_of(model, mesh, training)
    task = train_any.task_of(config)
    step, _ = train_any.mapped_steps(config, 0)
    step.checked = False
    state, batch = train_any.shapes(config)
    with on(mesh):
        zero = jax.ShapeDtypeStruct((), jnp.uint32)
        state, batch = with_shardings(state, task.State), with_shardings(batch, task.Batch)
        text = jax.jit(step).lower(state, zero, zero, batch).compile().as_text()
    return model, re.findall(r'= \((.*?)\) while\(.*?"known_trip_count":\{"n":"(\d+)"\}', text)


@pytest.mark.slow
@pytest.mark.parametrize('p, pieces, microbatches', [(4, 1, 12), (2, 2, 8)])
def test_what_is_kept_and_the_bubble(p, pieces, microbatches):
    """XLA's loops turn as often as the formula says, p - 1 ticks more than there is work for, and carry 2vp - 1 stage
    inputs: as 1F1B in lockstep must, and not one for each microbatch."""
    model, loops = compiled_loops(p, pieces, microbatches)
    M, slots, turn = model.d_model, 2 * pieces * p - 1, pieces * p
    inputs = [(re.findall(rf'f32\[1,(\d+),1,32,{M}\]', carried), int(times)) for carried, times in loops]
    ticks = [times for shapes, times in inputs if str(slots) in shapes]
    assert all(set(shapes) <= {str(slots), str(microbatches // p)} for shapes, _ in inputs)
    if pieces == 1:
        assert ticks == [p - 1, microbatches, p - 1]
        forward = p - 1 + microbatches
    else:
        groups = microbatches // p
        assert sorted(ticks) == sorted([turn - 1, p, groups - 1, turn - p, p, turn - 1])
        forward = turn - 1 + p + (groups - 1) * turn
    work = pieces * microbatches
    assert (forward - work) / forward == (p - 1) / (work + p - 1)


@pytest.mark.parametrize('pieces', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_ledger_counts_the_models_products_once(pieces):
    """Stages have as many as one stage has, whatever they compute again or while they are idle."""
    ours, theirs = (
        ledger_of(config_of(DEEP, mesh_of(mesh), with_parts(4, v))) for mesh, v in (('p2', pieces), ('d2', 1))
    )
    assert ours.model_flops == pytest.approx(theirs.model_flops, rel=1e-12)


# -- What types refuse -------------------------------------------------------------------------------------------------
EVERY = 4


@pytest.mark.slow
@pytest.mark.parametrize('first', range(EVERY))
def test_mutants_are_refused(first, tmp_path, monkeypatch, record_property):
    """The check refuses each mutant (mutation.py) in a step of a mixture on stages."""
    made = mutants(Path(pipeline.__file__).read_text(), ('p', *GROUPS))[first::EVERY]

    def check_pipeline(path, source):
        module = module_of(path, source)
        for name in ('dealt_out', 'collected', 'stage_rows', 'all_rows', 'microbatch', 'from_last', 'pipelined'):
            monkeypatch.setattr(pipeline, name, getattr(module, name))
        return check(path.with_name('train_any.py'), SOURCE, (DEEP_MIXTURE,))

    refuse_all(made, check_pipeline, tmp_path, 'pipeline.py', r'(pipeline|train_any)\.py')
    record_property('summary', f'{len(made)} mutants of pipeline.py: none accepted')
