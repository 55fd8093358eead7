"""train_pipeline.py: on axis p, alone and with others, it computes what a plain, unsharded reference does; and its
schedule takes each microbatch through all stages, in order, and back."""

import dataclasses
import functools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small
from pages import module_of
from test_train_at_scale import (
    BATCH,
    DENSE,
    SCHEDULE,
    as_weights,
    claims_of,
    config_of,
    ledger_of,
    on,
    refuse_each,
    started,
    stepped,
    weights_of,
)

import train
import train_at_scale
import train_pipeline
from runtime.config.keys import Tokens
from runtime.run import with_shardings
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32
from shardlib.typed import typed

MODEL = dataclasses.replace(DENSE, layers=8)
TRAINING = train_pipeline.Training(**SCHEDULE, tokens=Tokens(batch=8, len=32), microbatches=4)
SOURCE = pathlib.Path(train_pipeline.__file__).read_text()


def mesh_of(text):
    """'p2 d2' as sizes of all axes."""
    return train_pipeline.Mesh(**dict.fromkeys('prdcet', 1) | {word[0]: int(word[1:]) for word in text.split()})


# -- The schedule, by labels -------------------------------------------------------------------------------------------
def labelled(module, p, v, groups):
    """What the schedule makes of whole numbers: a piece makes 3x + its number of x, so what comes out says which pieces
    it went through, in which order. Returns the microbatches' labels, their sum, the two gradients of the pieces, and
    that of what went in."""
    spec, count = 'p/p groups B/r/d/e L/c M/t', groups * p

    @typed
    def run(
        w: f32['p/p v'], g: f32['p/p v'], a: f32['N'], stream: f32[spec]
    ) -> tuple[f32['N'], f32[''], f32[''], f32['p/p v'], f32['p/p v'], f32[spec]]:
        def stage(piece, x, number):
            w, g = piece
            at = number.astype(jnp.float32)
            return x * (3 + g * (at + 1)) + w + at

        def head(a, y, number):
            last = (shardops.index('p') == int(shardops.axis_size('p')) - 1)[:, None, None, None]
            y = shardops.sum_unreduced('p/p B/r/d/e L/c M/t -> +p +r +d +c +e +t', jnp.where(last, y, 0))
            return y * jax.lax.dynamic_index_in_dim(a, number, keepdims=False)

        loss, of_pieces, of_a, of_stream = module.pipelined(stage, head, (w, g), a, stream)
        alone, *_ = module.pipelined(stage, head, (w, g), a, stream, False)
        sums = [
            shardops.psum(f'{dims} +p +r +d +c +e +t -> {dims}', x)
            for dims, x in (('N', of_a), ('', loss), ('', alone))
        ]
        return *sums, *(shardops.psum('p/p v +r +d +c +e +t -> p/p v', each) for each in of_pieces), of_stream

    module.act.dtype = jnp.float32
    pieces = np.arange(p * v, dtype=np.float32).reshape(v, p).T  # piece i is the (i // p)th of stage i % p
    # Microbatch g·p + m, whose label is its number, goes in on stage (m + 1) % p.
    stream = np.roll(np.arange(count, dtype=np.float32).reshape(groups, p).T, 1, axis=0)
    given = pieces, np.zeros_like(pieces), np.arange(1, count + 1, dtype=np.float32), stream[:, :, None, None, None]
    with on(mesh_of(f'p{p}')):
        return jax.tree.map(np.asarray, jax.jit(typed_shard_map(run, check=False))(*given))


def require_labels(module, p, v, groups):
    count, pieces = groups * p, p * v
    labels, a = np.zeros((pieces + 1, count)), np.arange(1, count + 1)
    labels[0] = np.arange(count)
    for piece in range(pieces):
        labels[piece + 1] = 3 * labels[piece] + piece + np.arange(count)
    back = [a * 3 ** (pieces - 1 - piece) for piece in range(pieces)]  # what a piece is handed back

    def dealt(of_pieces):
        return np.reshape(of_pieces, (v, p)).T

    of_g = dealt([np.sum(back[piece] * labels[piece] * (np.arange(count) + 1)) for piece in range(pieces)])
    of_stream = np.roll((a * 3**pieces).reshape(groups, p).T, 1, axis=0)[:, :, None, None, None]
    loss = np.sum(a * labels[-1])
    expected = labels[-1], loss, loss, dealt([each.sum() for each in back]), of_g, of_stream
    assert max(np.max(each) for each in expected) < 2**24  # float32 has them exactly
    for found, right in zip(labelled(module, p, v, groups), expected, strict=True):
        np.testing.assert_array_equal(found, right)


SCHEDULES = [
    (4, 1, 2),
    (2, 2, 2),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 1, 1), (2, 3, 1), (4, 2, 1)]),
]


@pytest.mark.parametrize('p, v, groups', SCHEDULES)
def test_every_microbatch_goes_through_all_pieces_and_back(p, v, groups):
    """Labels are exact: each piece adds its number to each microbatch, in order, forward and once more backward."""
    require_labels(train_pipeline, p, v, groups)


WRONG = {
    'results are passed backwards': ('move(y, 1)', 'move(y, -1)'),
    'results are not passed on': ('move(y, 1)', 'y'),
    'gradients are passed forward': ('move(dx, -1)', 'move(dx, 1)'),
    'gradients are not passed on': ('dy, back_belt = move(dx, -1)', 'dy, back_belt = dx'),
    'the belt goes the other way': ('column, belt), -1)', 'column, belt), 1)'),
    'the belt stands still': (
        'move(jnp.where(i % turn == 0, column, belt), -1)',
        'jnp.where(i % turn == 0, column, belt)',
    ),
    'the belt is loaded late': ('i % turn == 0, column', 'i % turn == 1, column'),
    'the belt back goes the other way': ('move(back_belt, -1)', 'move(back_belt, 1)'),
    'the belt back stands still': ('move(back_belt, -1)', 'back_belt'),
    'a tick too few at first': ("ticks(carry, 0, delay, 'forward')", "ticks(carry, 0, delay - 1, 'forward')"),
    'a tick too few forward and backward': ("delay, items, *both", "delay, items - 1, *both"),
    'a tick too few at last': ("items + p - 1, delay, 'backward'", "items + p - 1, delay - 1, 'backward'"),
    'backward a tick late': ('turn, turn - 1, 2 * turn - 1', 'turn, turn, 2 * turn - 1'),
    'a slot too few': ('2 * turn - 1', '2 * turn - 2'),
    'the slot of this tick': ('then % slots', 'i % slots'),
    'the slot after': ('then % slots', '(then + 1) % slots'),
    'the slot of stage 0': ('piece * p + number + index  #', 'piece * p + number  #'),
    'each stage has the first item': ('place(i - index)', 'place(i)'),
    'every stage is the first': ('(index == 0) & (piece == 0), belt', '(piece == 0), belt'),
    'the last stage is the first': ('(index == 0) & (piece == 0), belt', '(index == p - 1) & (piece == 0), belt'),
    'the first stage keeps its results': ('(index == 0) & (piece == 0), dx', '(index == 1) & (piece == 0), dx'),
    'idle stages count': ('jnp.where(item < items, dy, 0)', 'dy'),
    'the head has the microbatch before': ('place(i - (p - 1))', 'place(i - p)'),
    'the gradient of the head is for all': (
        '(index == p - 1)[:, None, None, None]',
        '(index >= 0)[:, None, None, None]',
    ),
    'the gradient of the head is for the first': (
        '(index == p - 1)[:, None, None, None]',
        '(index == 0)[:, None, None, None]',
    ),
    'backward in the order of forward': ('piece = v - 1 - turned', 'piece = turned'),
    'one number in a group': ('item % turn // p, item % p', 'item % turn // p, 0 * item'),
    'groups go round once more': ('item % turn // p, item % p', 'item % turn // v, item % p'),
    'all gradients are of the first piece': ('(total, g, piece, axis=0)', '(total, g, 0, axis=0)'),
    'gradients replace each other': (
        'keepdims=False) + g.astype(jnp.float32)',
        'keepdims=False) * 0 + g.astype(jnp.float32)',
    ),
    'the head is a tick early in a turn': (
        'ticks(carry, first, turn - p, *both)',
        'ticks(carry, first, turn - p - 1, *both)',
    ),
    'the last group comes first': (
        '(of_stream, back_belt, group, axis=1)',
        '(of_stream, back_belt, groups - 1 - group, axis=1)',
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('what', WRONG)
def test_wrong_schedules_fail(what, tmp_path):
    """Their types are right, as far as types go; labels are not."""
    old, new = WRONG[what]
    assert SOURCE.count(old) == 1
    module = module_of(tmp_path / 'train_pipeline.py', SOURCE.replace(old, new))
    with pytest.raises(AssertionError):
        for p, v, groups in (4, 1, 2), (2, 2, 2), (4, 2, 1):
            require_labels(module, p, v, groups)


# -- Loss and gradient -------------------------------------------------------------------------------------------------
def require_truth(mesh, pieces=1, microbatches=4, model=MODEL, module=train_pipeline):
    training = dataclasses.replace(TRAINING, pieces=pieces, microbatches=microbatches, adam_b1=0.0, max_grad_norm=1e30)
    given = module.Training(**vars(training)), module.Mesh(**vars(mesh_of(mesh)))
    weights = weights_of(model)
    state, (metrics,) = stepped(model, *given, as_weights(weights, module), module=module)
    loss, expected = truth_of(model)
    assert abs(float(metrics.loss) - float(loss)) <= 2e-6 * abs(float(loss)), 'the loss is another'
    far = {}
    for path, true in jax.tree_util.tree_leaves_with_path(expected):
        ours = functools.reduce(lambda tree, key: getattr(tree, key.key), path, state.adam_mu)
        far[path[-1].key] = float(np.linalg.norm(ours - true) / np.linalg.norm(true))
    far = {name: distance for name, distance in far.items() if not distance <= 1e-5}
    assert not far, 'the gradient is another'


@functools.cache
def truth_of(model):
    return reference.loss_and_grad(weights_of(model), BATCH, model)


MESHES = [('p2 d2', 1), ('p2', 2), ('p4 t2', 1), ('p2 r2 t2', 2), ('p2 c2 d2', 1), ('p4', 2), ('p4 r2', 1)]


@pytest.mark.slow
@pytest.mark.parametrize('mesh, pieces', MESHES)
def test_loss_and_gradient_equal_the_reference(mesh, pieces):
    """In float32 the loss is within 2e-6 of float64's, and each leaf of the gradient within 1e-5 of its norm; and what
    XLA compiled sends what the ledger says."""
    require_truth(mesh, pieces)


# -- What the compiled program keeps, and how long it runs -------------------------------------------------------------
def compiled_loops(p, pieces, microbatches):
    """The shapes that the compiled step's loops carry, and how often each loop turns; of loops within loops, all."""
    model = dataclasses.replace(MODEL, layers=2 * p * pieces)
    tokens = Tokens(batch=microbatches, len=32)
    training = dataclasses.replace(TRAINING, pieces=pieces, microbatches=microbatches, tokens=tokens)
    mesh = mesh_of(f'p{p}')
    config = config_of(model, training, mesh)
    train_pipeline.act.dtype = model.compute_dtype
    step, _ = train_pipeline.mapped_steps(config, 0)
    step.checked = False
    state, batch = train_pipeline.shapes(config)
    with on(mesh):
        zero = jax.ShapeDtypeStruct((), jnp.uint32)
        state, batch = with_shardings(state, train_pipeline.State), with_shardings(batch, train_pipeline.TokenBatch)
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
    """As many as of train_at_scale.py, whatever stages compute again, or while they are idle."""
    training = dataclasses.replace(TRAINING, pieces=pieces)
    ours = ledger_of(train_pipeline, config_of(MODEL, training, mesh_of('p2')))
    plain = train_at_scale.Training(**{name: value for name, value in vars(TRAINING).items() if name != 'pieces'})
    theirs = ledger_of(train_at_scale, config_of(MODEL, plain, train_at_scale.Mesh(d=2)))
    assert ours.model_flops == pytest.approx(theirs.model_flops, rel=1e-12)


# -- What types refuse -------------------------------------------------------------------------------------------------
CHECKED_ON = mesh_of('p2 r2 d2 c2 e2 t2')  # for which no devices are needed
FEW_HEADS = dataclasses.replace(MODEL, n_kv=2)  # keys are gathered over c


def check(path, source, function=None, model=MODEL, pieces=1):
    """Checks a train_pipeline.py, or one of its functions amid little else; returns the number of claims."""
    module = module_of(path, source)
    if function not in (None, 'layers', 'last_loss'):  # to trace these is most of a check's time
        module.layers = lambda mesh, model, training, weights, x, segment: x
        module.last_loss = lambda *_: shardops.zeros('+p +r +d +c +e +t', f32)
    training = dataclasses.replace(TRAINING, pieces=pieces, tokens=Tokens(batch=64, len=32))
    mesh, training = module.Mesh(**vars(CHECKED_ON)), module.Training(**vars(training))
    config = types.SimpleNamespace(mesh=mesh, model=dataclasses.replace(model, d_model=128), training=training)
    return claims_of(module, config, function)


SLOW = [(None, MODEL, 2), (None, FEW_HEADS, 2), ('at_rest', MODEL, 1), ('of_stages', MODEL, 1)]
PROVED = [(None, MODEL, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.mark.parametrize('function, model, pieces', PROVED)
def test_the_types_are_proved(function, model, pieces, tmp_path):
    """Both steps, on axes of two, also interleaved; and without layers and loss, as mutants of others are checked."""
    assert check(tmp_path / 'train_pipeline.py', SOURCE, function, model, pieces) > 300


EVERY = 7


@pytest.mark.slow
@pytest.mark.parametrize('first', range(EVERY))
def test_mutants_are_refused(first, tmp_path, record_property):
    """Each collective removed, doubled, with its axes exchanged or one axis too few, and each '+axis' dropped: refused,
    by a line of the file. Stages have one piece: with more no line is checked that is not with one, at twice the
    cost."""
    part = slice(first, None, EVERY)
    refuse_each('train_pipeline.py', SOURCE, 'prdcet', part, check, tmp_path, record_property)


# -- Runs --------------------------------------------------------------------------------------------------------------
def run_of(monkeypatch, folder, trainer, *keys):
    """The losses, by step, of a run of pipeline_local's model."""
    fixed = 'paths.model_name=run', 'model.layers=8', 'training.microbatches=8'
    return started(monkeypatch, folder, trainer, *fixed, *keys)


@pytest.mark.slow
def test_a_run_goes_on_on_other_stages_and_by_other_trainers(monkeypatch, tmp_path):
    """Two steps of train_at_scale.py, two on two stages of two pieces, two on four stages and t, and two of train.py
    have the losses of eight steps of train.py."""
    whole = run_of(monkeypatch, tmp_path / 'whole', train, 'training.steps=8', 'eval_interval=2')
    parts = functools.partial(run_of, monkeypatch, tmp_path / 'parts')
    parts(train_at_scale, 'training.steps=2', 'mesh.r=2', 'mesh.d=2')
    allow = 'allow_config_change=true'
    parts(train_pipeline, 'training.steps=4', 'mesh.p=2', 'training.pieces=2', 'mesh.r=2', allow)
    parts(train_pipeline, 'training.steps=6', 'mesh.p=4', 'mesh.t=2')
    losses = parts(train, 'training.steps=8', allow)
    assert len(whole) == 12 and losses.keys() == whole.keys()
    assert [losses[key] for key in whole] == pytest.approx(list(whole.values()), rel=2e-5)


REFUSED = [
    ('mesh.p=1', 'mesh.p = 1: train_pipeline has neither one stage nor mixtures nor 8 bits: use'),
    ('model.experts=4 model.experts_per_token=1', 'model.experts = 4: train_pipeline has neither one stage nor'),
    ('training.pieces=3', 'model.layers = 8: dealt out to mesh.p · training.pieces = 12: set it to 12'),
    ('training.microbatches=2', 'training.microbatches = 2: dealt out to mesh.p = 4: set it to 4'),
    ('model.vocab=1281', 'dim V has size 1281, which axis p=4 cannot divide'),
    ('mesh.d=16', 'training.microbatches = 64 / 8: dim B has size 8, which axis d=16 cannot divide'),
]  # fmt: skip


@pytest.mark.parametrize('keys, message', REFUSED, ids=[keys for keys, _ in REFUSED])
def test_what_cannot_be_is_refused(keys, message, monkeypatch, capsys):
    """Before anything is compiled, with the key and what it may be."""
    assert small.start_training(monkeypatch, 'check_only=true', *keys.split(), trainer=train_pipeline) == 1
    assert message in ' '.join(capsys.readouterr().err.split())
