"""train_at_scale.py: on axes r, d, c, e and t it computes what a plain, unsharded reference does, and on d and t alone
what train.py does, bit for bit."""

import ast
import collections
import dataclasses
import functools
import json
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small
from mutation import mutants, refuse_all
from pages import module_of

import generate
import train
import train_any
import train_at_scale as at_scale
import train_pipeline
from ledger.compiled.check import differences
from ledger.count.step import of_step
from models import layers
from models.huggingface import as_family, family_of
from runtime.config.keys import Tokens
from runtime.config.rebuild import Origins, as_tree, rebuild
from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, make_shardings, narrowed
from tools import convert

SIZES = dict(d_model=32, n_q_per_kv=2, n_kv=4, d_head=4, layers=2, vocab=64, d_ff=32, rope_max_timescale=256)
DENSE = at_scale.Model(**SIZES, compute_dtype='float32', attention='einsum')
FEW_HEADS = dataclasses.replace(
    DENSE, n_kv=2, attention='blockwise'
)  # c = t = 2 has more devices than heads: keys are gathered
RING = dataclasses.replace(FEW_HEADS, context='ring')
DROPLESS = dataclasses.replace(DENSE, experts=4, experts_per_token=2)
CAPACITY = dataclasses.replace(DROPLESS, capacity=0.75, shared_experts=1)  # 16 slots, and 16 tokens on average
SCHEDULE = dict(steps=10, warmup_steps=2, steps_for_lr=10, learning_rate=1e-2)
TRAINING = at_scale.Training(**SCHEDULE, tokens=Tokens(batch=8, len=32), balance_loss=0.1, router_z_loss=0.05)
BATCH = reference.random_batch(DENSE, batch=8, length=32, seed=1)
AXES = 'rdcet'


def mesh_of(text):
    """'r2 c4' as sizes of all axes."""
    sizes = dict.fromkeys(AXES, 1) | {word[0]: int(word[1:]) for word in text.split()}
    return at_scale.Mesh(**sizes)


def config_of(model, training, mesh):
    return types.SimpleNamespace(mesh=mesh, model=model, training=training)


def weights_of(model):
    """Weights under which nothing is special, as a nested dict of numpy arrays."""
    shapes = jax.eval_shape(functools.partial(at_scale.init_state, model), np.uint32(0)).weights
    rng, tree = np.random.default_rng(0), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name, size = path[-1].name, math.prod(leaf.shape)
        fan_in = model.d_model * (model.d_head if name == 'w_q' else 1)
        fan_in = {'embed': 1, 'w_o': model.n_q_per_kv * model.n_kv * model.d_head}.get(name, fan_in)
        fan_in = leaf.shape[-1] if name.endswith('down') else fan_in
        value = (
            rng.standard_normal(size) * fan_in**-0.5 if leaf.ndim > 1 + len(path) - 1 else rng.uniform(0.5, 1.5, size)
        )
        inner = tree if len(path) == 1 else tree.setdefault(path[0].name, {})
        inner[name] = value.reshape(leaf.shape).astype(np.float32)
    return tree


def as_weights(tree, module=at_scale):
    layer = dict.fromkeys(('w_gate', 'w_up', 'w_down')) | tree['transformer']
    return module.Weights(**{**tree, 'transformer': module.Layer(**layer)})


def on(mesh):
    sizes = vars(mesh)
    return jax.set_mesh(make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())]))


def stepped(model, training, mesh, weights, batch=BATCH, steps=1, module=at_scale):
    """The last state and all metrics of some steps, as numpy arrays. Its types are not checked here, but the compiled
    program sends what its ledger says."""
    module.act.dtype = model.compute_dtype
    config = config_of(model, training, mesh)
    module.shapes(config)
    step, _ = module.mapped_steps(config, 0)
    step.checked = False
    with on(mesh):
        zeros = jax.tree.map(np.zeros_like, weights)
        state = module.State(weights, zeros, zeros)
        state = jax.device_put(state, make_shardings(narrowed(module.State, state)))
        arrays = batch.targets.astype(np.uint32), batch.is_seq_start, batch.is_target
        placed = jax.device_put(module.TokenBatch(*arrays), make_shardings(module.TokenBatch))
        traced, found = jax.jit(step).trace(state, jnp.uint32(0), jnp.uint32(0), placed), []
        step = traced.lower().compile()
        tokens = training.tokens.batch * training.tokens.len
        ledger = of_step(traced, vars(mesh), source=module.__file__, tokens=tokens)
        rows = differences(ledger, step.as_text())
        assert all('as all bfloat16 is by XLA:CPU' in row.reason for row in rows), rows
        for number in range(steps):
            state, metrics = step(state, jnp.uint32(0), jnp.uint32(number), placed)
            found.append(jax.tree.map(np.asarray, metrics))
        return jax.tree.map(np.asarray, state), found


def loss_and_gradient(model, training, mesh, weights, module=at_scale):
    """Of a step: the first moment, with b1 = 0 and no clipping."""
    training = dataclasses.replace(training, adam_b1=0.0, max_grad_norm=1e30)
    given = module.Model(**vars(model)), module.Training(**vars(training)), module.Mesh(**vars(mesh))
    state, (metrics,) = stepped(*given, as_weights(weights, module), module=module)
    return metrics, state.adam_mu


@functools.cache
def truth_of(model, parts=1):
    """The reference's loss and gradient in float64, for rows in so many parts."""
    known = {name: getattr(model, name) for name in vars(model)}
    factors = (TRAINING.balance_loss, TRAINING.router_z_loss) if model.experts else (0.0, 0.0)
    slots = None if model.capacity is None else 16 // parts
    plain = types.SimpleNamespace(**known, router_losses=factors, slots=slots, parts=parts)
    return reference.loss_and_grad(weights_of(model), BATCH, plain)


def require_truth(model, mesh, microbatches=1, module=at_scale):
    training = dataclasses.replace(TRAINING, microbatches=microbatches)
    metrics, gradient = loss_and_gradient(model, training, mesh, weights_of(model), module)
    loss, expected = truth_of(model, mesh.c if model.capacity else 1)
    if model.experts:
        of_routers = TRAINING.balance_loss * metrics.balance_loss + TRAINING.router_z_loss * metrics.router_z_loss
        assert model.capacity is None or 0.05 < metrics.dropped < 0.5
        assert metrics.load.sum() == pytest.approx(model.experts)
        loss = loss - model.layers * float(of_routers)
    assert abs(float(metrics.loss) - float(loss)) <= 2e-6 * abs(float(loss)), 'the loss is another'
    far = {}
    for path, true in jax.tree_util.tree_leaves_with_path(expected):
        ours = getattr(gradient, path[0].key)
        ours = getattr(ours, path[1].key) if len(path) == 2 else ours
        far[path[-1].key] = float(np.linalg.norm(ours - true) / np.linalg.norm(true))
    far = {name: distance for name, distance in far.items() if not distance <= 1e-5}
    assert not far, 'the gradient is another'


# Each two axes meet on some mesh.
QUICK = [(DENSE, 'r2 d2 c2', 2), (CAPACITY, 'r2 e2 t2', 1), (DROPLESS, 'd2 c2 e2', 1), (FEW_HEADS, 'd2 c2 t2', 1)]
QUICK += [(RING, 'c4 t2', 1)]


@pytest.mark.parametrize('model, mesh, microbatches', QUICK, ids=[mesh for _, mesh, _ in QUICK])
def test_loss_and_gradient_equal_the_reference(model, mesh, microbatches):
    """In float32 the loss is within 2e-6 of float64's, and each leaf of the gradient within 1e-5 of its norm; and what
    XLA compiled sends what the ledger says."""
    require_truth(model, mesh_of(mesh), microbatches)


LARGER = [
    (DENSE, 'r8', 1), (DENSE, 'r2 c4', 1), (FEW_HEADS, 'c8', 1), (FEW_HEADS, 'r2 c4', 2), (DENSE, 'r4 e2', 1),
    (RING, 'd2 c2 t2', 1), (RING, 'r2 d2 c2', 2), (RING, 'd2 c4', 1), (RING, 'c8', 1),
    (CAPACITY, 'e4 t2', 1), (CAPACITY, 'c4 e2', 1), (CAPACITY, 'r2 d2 e2', 1), (CAPACITY, 'c2 e2 t2', 1),
    (DROPLESS, 'e4 c2', 1), (DROPLESS, 'r2 e2 t2', 1), (DROPLESS, 'd4 t2', 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    'model, mesh, microbatches', LARGER, ids=[f'{mesh} {n}' for n, (_, mesh, _) in enumerate(LARGER)]
)
def test_larger_axes(model, mesh, microbatches):
    """The same with more devices along an axis, and with axes alone."""
    require_truth(model, mesh_of(mesh), microbatches)


@pytest.mark.slow
@pytest.mark.parametrize('capacity', [None, 4.0], ids=['dropless', 'capacity'])
def test_a_mixture_of_equal_experts_is_the_dense_model(capacity):
    """Whatever the router says: each token's weights add up to one, and with slots enough none is dropped."""
    tree, training = weights_of(DENSE), dataclasses.replace(TRAINING, balance_loss=0.0, router_z_loss=0.0)
    model = dataclasses.replace(DROPLESS, capacity=capacity)
    layer = dict(tree['transformer'])
    for name in ('gate', 'up', 'down'):
        layer[f'expert_{name}'] = np.stack([layer.pop(f'w_{name}')] * model.experts, axis=1)
    layer['router'] = weights_of(DROPLESS)['transformer']['router']
    metrics, gradient = loss_and_gradient(model, training, mesh_of('e4 t2'), {**tree, 'transformer': layer})
    loss, expected = truth_of(DENSE)
    assert metrics.dropped == 0 and float(metrics.loss) == pytest.approx(float(loss), rel=2e-6)
    summed = gradient.transformer.expert_up.sum(axis=1)
    np.testing.assert_allclose(summed, expected['transformer']['w_up'], atol=1e-5 * abs(summed).max())
    assert np.abs(gradient.transformer.router).max() < 1e-5 * abs(summed).max()  # the router makes no difference


def as_train(model, training):
    """The same settings of train.py."""
    fields = [field.name for field in dataclasses.fields(train.Model)]
    others = {field.name: getattr(training, field.name) for field in dataclasses.fields(train.Training)}
    return train.Model(**{name: getattr(model, name) for name in fields}), train.Training(**others)


@pytest.mark.parametrize('attention', ['einsum', pytest.param('blockwise', marks=pytest.mark.slow)])
def test_axes_of_one_device_cost_nothing(attention):
    """On d and t alone, three steps in bfloat16 leave the weights and losses of train.py, bit for bit; and what is sent
    and computed is what train.py's ledger has, row by row, and no more is held."""
    model = dataclasses.replace(DENSE, compute_dtype='bfloat16', attention=attention)
    training = dataclasses.replace(TRAINING, microbatches=2)
    plain_model, plain_training = as_train(model, training)
    tree = weights_of(model)
    plain_weights = train.Weights(**{**tree, 'transformer': train.Layer(**tree['transformer'])})
    plain_mesh, mesh = train.Mesh(d=4, t=2), mesh_of('d4 t2')
    state, metrics = stepped(model, training, mesh, as_weights(tree), steps=3)
    plain_state, plain_metrics = stepped(plain_model, plain_training, plain_mesh, plain_weights, steps=3, module=train)
    for ours, theirs in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves((plain_state, plain_metrics))):
        np.testing.assert_array_equal(ours, theirs)

    ours = ledger_of(at_scale, config_of(model, training, mesh))
    theirs = ledger_of(train, config_of(plain_model, plain_training, plain_mesh))
    assert sent_by(ours) == sent_by(theirs)
    assert (ours.model_flops, ours.hardware_flops) == (theirs.model_flops, theirs.hardware_flops)
    assert ours.memory.bytes <= theirs.memory.bytes


def ledger_of(module, config):
    step, _ = module.mapped_steps(config, 0)
    step.checked = False
    sizes, zero = vars(config.mesh), np.uint32(0)
    automatic = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)
    state, batch = module.shapes(config)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch)
    tokens = config.training.tokens
    return of_step(traced, sizes, source=module.__file__, tokens=tokens.batch * tokens.len)


def sent_by(ledger):
    """How often each collective is run, wherever it stands."""
    counts = collections.Counter()
    for row, times in ledger.costs.collectives.items():
        counts[dataclasses.replace(row, line='')] += times
    return counts


# -- Fewer bytes -------------------------------------------------------------------------------------------------------
FP8 = dataclasses.replace(DENSE, fp8=True)


@pytest.mark.slow
def test_products_in_8_bits_are_the_same_on_any_mesh():
    """In float32, loss and gradient of two meshes are those of one device to 1e-5; the gradient is within a quarter of
    float64's, as three bits of a fraction go, and is not it."""
    tree, (_, expected) = weights_of(DENSE), truth_of(DENSE)
    (one, alone), *others = (loss_and_gradient(FP8, TRAINING, mesh_of(mesh), tree) for mesh in ('', 'd4', 'd2 c2 t2'))
    for metrics, gradient in others:
        assert float(metrics.loss) == pytest.approx(float(one.loss), rel=1e-5)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(alone)):
            assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    for name, true in expected['transformer'].items():
        distance = np.linalg.norm(getattr(alone.transformer, name) - true) / np.linalg.norm(true)
        assert 0.01 < distance < 0.25, name


@pytest.mark.slow
def test_products_in_8_bits_train():
    """Over 30 steps in bfloat16, in which the loss of one batch falls to a sixth, that of products in 8 bits stays
    within a tenth of it."""
    training, losses = dataclasses.replace(TRAINING, steps=30, steps_for_lr=30), []
    for model in (DENSE, FP8):
        model = dataclasses.replace(model, compute_dtype='bfloat16')
        _, found = stepped(model, training, mesh_of('d2 t2'), as_weights(weights_of(model)), steps=30)
        losses.append(np.array([float(each.loss) for each in found]))
    wide, narrow = losses
    assert wide[-1] < 0.2 * wide[0] and (np.abs(narrow - wide) < 0.1 * wide).all()


@pytest.mark.slow
def test_matrices_in_8_bits_are_gathered_in_half_the_bytes():
    """Of each layer's matrices a byte an element, forward and again backward; all their products forward are of 8-bit
    floats, and none of the backward pass; besides there are but scales."""
    mesh, gathered, products = mesh_of('d4 t2'), [], []
    for model in (DENSE, FP8):
        ledger = ledger_of(at_scale, config_of(dataclasses.replace(model, compute_dtype='bfloat16'), TRAINING, mesh))
        rows = [row for row, times in ledger.costs.collectives.items() for _ in range(times)]
        rows = [row for row in rows if (row.kind, row.axes) == ('all-gather', ('d',))]
        gathered.append(
            {dtype: sum(row.bytes for row in rows if row.dtype == dtype) for dtype in ('bfloat16', 'uint8')}
        )
        products.append(ledger.costs)
    plain, fp8 = gathered
    assert plain['uint8'] == 0 and fp8['uint8'] * 2 == plain['bfloat16'] - fp8['bfloat16'] > 0
    plain, fp8 = products
    assert fp8.flops() == plain.flops() and plain.float8_flops('forward') == 0
    elements = sum(value.size for name, value in weights_of(FP8)['transformer'].items() if name.startswith('w_'))
    assert fp8.float8_flops('forward') == 2 * 8 * 32 * elements // 8 and fp8.float8_flops('backward') == 0


@pytest.mark.slow
def test_what_is_kept_on_the_host():
    """A step is the same bit for bit, since a CPU has but one memory. For a GPU what layers keep under the name goes to
    the host and back: in the ledger, out of the memory's forecast, and in the program that XLA is given."""
    model = dataclasses.replace(FEW_HEADS, compute_dtype='bfloat16')
    mesh, tree, found, ledgers = mesh_of('d2 c2 t2'), weights_of(model), [], []
    for how in ('everything', 'on_host'):
        training = dataclasses.replace(TRAINING, save_for_backward=how)
        found.append(stepped(model, training, mesh, as_weights(tree)))
        ledgers.append(ledger_of(at_scale, config_of(model, training, mesh)))
    for ours, theirs in zip(*map(jax.tree.leaves, found)):
        np.testing.assert_array_equal(ours, theirs)
    device, host = ledgers
    named = sum(row.bytes * row.times for row in device.saved if row.why == 'save_for_backward')
    assert named > 0 and not any(row.why == 'save_for_backward' for row in host.saved)
    assert host.costs.host_bytes(to_host=True) == host.costs.host_bytes(to_host=False) == named
    assert host.memory.bytes < device.memory.bytes and not device.costs.host_copies
    assert sent_by(host) == sent_by(device)

    config = config_of(model, dataclasses.replace(TRAINING, save_for_backward='on_host'), mesh)
    step, _ = at_scale.mapped_steps(config, 0)
    step.checked = False
    with on(mesh):
        state, batch = at_scale.shapes(config)
        traced = jax.jit(step).trace(state, np.uint32(0), np.uint32(0), batch)
        text = traced.lower(lowering_platforms=('cuda',)).as_text()
    there, back = (text.count(f'_xla_buffer_placement = "{place}"') for place in ('pinned_host', 'device'))
    assert there == back == sum(times for row, times in host.costs.host_copies.items() if row.to_host) // model.layers


# -- What types refuse -------------------------------------------------------------------------------------------------
# Functions that DENSE does not reach, and what stands outside of functions.
WRITTEN_OUT = dataclasses.replace(FEW_HEADS, attention='einsum')
REACHED_BY = {
    'attention_of_gathered_keys': WRITTEN_OUT,
    'experts_without_loss': DROPLESS,
    **dict.fromkeys((None, 'route', 'experts_with_capacity', 'mixture', 'mixture_metrics', 'training_step'), CAPACITY),
}
CHECKED_ON = mesh_of('r2 d2 c2 e2 t2')  # for which no devices are needed


# To trace a model is most of a check's time, and that of the training step of its own.
ONLY_TRAINED = 'training_step squared_norms mixture_metrics scattered_over_replicas at_rest'.split()
WITHOUT_A_MODEL = [*ONLY_TRAINED, 'validation_step', 'count_of', 'gathered_over_replicas']


def no_loss(module, mesh, model, training, bos_id, weights, batch):
    """What stands for `loss_sum` where mutants of other functions are checked."""
    routing, zeros = None, functools.partial(shardops.zeros, dtype=f32, layers=model.layers)
    if model.experts:
        of_layers = zeros('layers +r +d +c +e')
        routing = module.Routing(of_layers, of_layers, zeros('layers E', E=model.experts), of_layers)
    return shardops.zeros('+r +d +c +e +t', f32), routing


def claims_of(module, config, function=None):
    """Checks a trainer's two steps; returns the number of claims. The validation step comes first: it costs a third and
    refuses what is wrong forward. Of a function that it does not reach it is left out."""
    (state, batch), (step, validate) = module.shapes(config), module.mapped_steps(config, 0)
    number, loss = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    sizes = vars(config.mesh)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    claims = 0 if function in ONLY_TRAINED else validate.check(mesh, state.weights, loss, loss, batch)
    return claims + step.check(mesh, state, number, number, batch)


def check(path, source, function=None, model=None):
    """Checks a train_at_scale.py, or one of its functions amid little else, for a model that reaches it; returns the
    number of claims."""
    module, model = module_of(path, source), model or REACHED_BY.get(function, DENSE)
    if function in WITHOUT_A_MODEL:
        module.loss_sum = functools.partial(no_loss, module)
    config = config_of(module.Model(**vars(model)), module.Training(**vars(TRAINING)), module.Mesh(**vars(CHECKED_ON)))
    return claims_of(module, config, function)


def refuse_each(file, source, axes, part, check, folder, record_property):
    """Each mutant of a part of all is refused by check(path, source, function), of the function that it stands in."""
    made = mutants(source, tuple(axes))[part]
    within = {
        line: node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    for function in {within.get(line) for _, line, _ in made}:
        of_function = [mutant for mutant in made if within.get(mutant[1]) == function]
        refuse_all(of_function, functools.partial(check, function=function), folder / str(function), file)
    record_property('summary', f'{len(made)} mutants of {file}: none accepted')


SOURCE = pathlib.Path(at_scale.__file__).read_text()


@pytest.mark.parametrize(
    'function', [pytest.param(name, marks=pytest.mark.slow) for name in ('training_step', 'count_of')]
)
def test_a_step_without_a_model_is_proved(function, tmp_path):
    """As mutants of a step's own functions are checked."""
    assert check(tmp_path / 'train_at_scale.py', SOURCE, function) > 100


@pytest.mark.parametrize(
    'model',
    [DENSE, CAPACITY, *(pytest.param(model, marks=pytest.mark.slow) for model in (DROPLESS, WRITTEN_OUT, RING, FP8))],
)
def test_the_types_are_proved(model, tmp_path):
    """The steps of a dense model, by each way over c and in 8 bits, and of both mixtures, on axes of two."""
    assert check(tmp_path / 'train_at_scale.py', SOURCE, model=model) > 500


EVERY = 7


@pytest.mark.slow
@pytest.mark.parametrize('first', range(EVERY))
def test_mutants_are_refused(first, tmp_path, record_property):
    """Each collective removed, doubled, with its axes exchanged or one axis too few, and each '+axis' dropped: refused,
    by a line of the file, with a model that reaches it."""
    part = slice(first, None, EVERY)
    refuse_each('train_at_scale.py', SOURCE, AXES, part, check, tmp_path, record_property)


# What types cannot see: which positions, whose tokens, which slot.
UNSEEN = {
    'labels are not dealt': (
        FEW_HEADS,
        "part = shardops.regroup('B/r/d/e L/c -> B/r/d/e chunks P/c', dealt(mesh, model, whole), chunks=chunks)",
        "part = shardops.slice('B/r/d/e L -> B/r/d/e L/c', whole)\n"
        "        part = shardops.regroup('B/r/d/e L/c -> B/r/d/e chunks P/c', part, chunks=chunks)",
    ),
    'positions are not dealt': (
        FEW_HEADS,
        'own = [dealt(mesh, model, each) for each in (position, segment)]',
        "own = [shardops.slice('L -> L/c', position), dealt(mesh, model, segment)]",
    ),
    'results come back to other slots': (CAPACITY, 'jnp.moveaxis(y, 0, 1)', 'jnp.moveaxis(y[::-1], 0, 1)'),
    'each device multiplies the first experts': (DROPLESS, 'choice.reshape(-1) - held[0]', 'choice.reshape(-1)'),
    'two experts share slots': (CAPACITY, 'pairs * C + place, E * C', 'pairs // 2 * C + place, E * C'),
}


@pytest.mark.slow
@pytest.mark.parametrize('what', UNSEEN)
def test_mutants_that_types_cannot_see(what, tmp_path):
    """The check accepts them; the comparison with the reference does not."""
    model, old, new = UNSEEN[what]
    assert SOURCE.count(old) == 1
    changed = SOURCE.replace(old, new)
    assert check(tmp_path / 'train_at_scale.py', changed, model=model) > 500
    module = module_of(tmp_path / 'train_at_scale.py', changed)
    with pytest.raises(AssertionError, match=r'the (loss|gradient) is another'):
        require_truth(model, mesh_of('c2 e2 t2'), module=module)


# -- The families that read its runs -----------------------------------------------------------------------------------
READ = {
    'dense': DENSE,
    'mixture': dataclasses.replace(DROPLESS, shared_experts=2),
    'one of the experts': dataclasses.replace(DROPLESS, experts_per_token=1, capacity=4.0),  # none is dropped
}


@pytest.mark.parametrize('name', READ)
def test_a_family_computes_the_model(name):
    """Of the same weights models/llama.py or mixtral.py has the trainer's hidden states, on the same mesh."""
    model, weights = READ[name], as_weights(weights_of(READ[name]))
    named, keys = as_family(as_tree(model))
    family, at_scale.act.dtype, layers.stored.dtype = family_of(named, ''), 'float32', 'float32'
    theirs, arrays = rebuild(family.Model, keys, Origins()), (BATCH.targets.astype(np.uint32), BATCH.is_seq_start)
    of_layers = {key: leaf for key, leaf in vars(weights.transformer).items() if leaf is not None}
    read = family.Weights(**{**vars(weights), 'transformer': family.Layer(**of_layers)})
    mesh = mesh_of('c2 e2 t2')

    def hidden(
        weights: narrowed(at_scale.Weights, weights), batch: at_scale.TokenBatch
    ) -> at_scale.act['B/r/d/e L/c M']:
        held = at_scale.gathered_over_replicas(mesh, weights)
        return at_scale.forward(mesh, model, TRAINING, 0, held, batch)[0]

    def of_family(weights: narrowed(family.Weights, read), batch: layers.TokenBatch) -> train.act['B/b L/c M']:
        return layers.hidden(family, theirs, weights, *layers.inputs_of(batch, 0))[0]

    with on(mesh):
        expected = jax.jit(typed_shard_map(hidden))(weights, at_scale.TokenBatch(*arrays, BATCH.is_target))
        found = jax.jit(typed_shard_map(of_family))(read, layers.TokenBatch(*arrays, BATCH.is_target))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=2e-5, rtol=0)


# -- Runs --------------------------------------------------------------------------------------------------------------
def started(monkeypatch, folder, trainer, *overrides):
    """The losses, by step, of a run in this folder, resumed where it has a checkpoint; None where it is refused."""
    keys = 'training.steps_for_lr=50 log_interval=1 validation_batches=1 checkpoint_interval=2 model.d_model=32'
    keys += ' model.d_ff=32 model.d_head=8 model.n_kv=4 model.compute_dtype=float32 mesh.d=1 mesh.t=1'
    status = small.start_training(
        monkeypatch, f'paths.root_working_dir={folder}', *keys.split(), *overrides, trainer=trainer
    )
    if status:
        return None
    (run,) = (path.parent for path in folder.glob('*/metrics.jsonl'))
    lines = map(json.loads, (run / 'metrics.jsonl').read_text().splitlines())
    return {(line['step'], name): line[name] for line in lines for name in ('loss', 'validation_loss') if name in line}


@pytest.mark.slow
def test_a_run_goes_on_on_any_mesh_and_by_either_trainer(monkeypatch, tmp_path, capsys):
    """Two steps of train.py, two on axes r, c and t, two on e and d, and two of train.py again have the losses of eight
    steps of train.py; without allow_config_change another trainer is refused."""
    whole = started(monkeypatch, tmp_path / 'whole', train, 'training.steps=8', 'eval_interval=2')
    folder = tmp_path / 'parts'
    started(monkeypatch, folder, train, 'training.steps=2')
    axes = ['training.steps=4', 'mesh.r=2', 'mesh.c=2', 'mesh.t=2']
    assert started(monkeypatch, folder, at_scale, *axes) is None
    assert 'the program: train -> train_at_scale' in capsys.readouterr().err
    started(monkeypatch, folder, at_scale, *axes, 'allow_config_change=true')
    started(monkeypatch, folder, at_scale, 'training.steps=6', 'mesh.d=4', 'mesh.e=2')
    parts = started(monkeypatch, folder, train, 'training.steps=8', 'allow_config_change=true')
    assert len(whole) == 12 and parts.keys() == whole.keys()
    assert [parts[key] for key in whole] == pytest.approx(list(whole.values()), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('capacity', ['null', '1.0'])
def test_a_mixture_goes_on_on_any_mesh(capacity, monkeypatch, tmp_path):
    """Its losses are those of an uninterrupted run, with dropped tokens too: slots are counted in a row."""
    mixture = f'model.experts=4 model.experts_per_token=2 model.shared_experts=1 model.capacity={capacity}'.split()
    whole = started(monkeypatch, tmp_path / 'whole', at_scale, *mixture, 'training.steps=4', 'eval_interval=2')
    started(monkeypatch, tmp_path / 'parts', at_scale, *mixture, 'training.steps=2', 'mesh.e=2', 'mesh.r=2', 'mesh.t=2')
    parts = started(monkeypatch, tmp_path / 'parts', at_scale, *mixture, 'training.steps=4', 'mesh.e=4', 'mesh.d=2')
    assert parts == pytest.approx(whole, rel=2e-5) and len(parts) == 6


def texts(monkeypatch, capsys, model, mesh):
    """What greedy decoding draws, and its log probabilities."""
    arguments = [model, 'prompt_ids=[5,6,7]', 'tokens=8', 'temperature=0', 'output=jsonl', mesh]
    assert not small.start(monkeypatch, generate.main, generate.Generate, *arguments)
    text = json.loads(capsys.readouterr().out.splitlines()[-1])
    return text['ids'], text['log_probs']


@pytest.mark.slow
@pytest.mark.parametrize('trainer, keys', [
    (at_scale, 'mesh.r=2 mesh.c=2 mesh.t=2'),
    (at_scale, 'model.experts=4 model.experts_per_token=2 mesh.e=2 mesh.t=2'),
    (at_scale, 'model.experts=4 model.experts_per_token=2 model.shared_experts=1 mesh.e=2'),
    (train_pipeline, 'mesh.p=2 mesh.d=2 training.microbatches=2'),
])  # fmt: skip
def test_all_programs_read_its_runs(trainer, keys, monkeypatch, tmp_path, capsys):
    """The run, its export and what is trained further from it decode the same; fine-tuning begins with the loss with
    which the trainer itself begins from these weights."""
    keys = keys.split()
    assert started(monkeypatch, tmp_path / 'first', trainer, 'training.steps=2', *keys)
    (run,) = (tmp_path / 'first').iterdir()
    capsys.readouterr()
    ids, log_probs = texts(monkeypatch, capsys, run, 'mesh.t=2')
    assert texts(monkeypatch, capsys, run, 'mesh.d=2') == (ids, pytest.approx(log_probs, abs=1e-4))
    with monkeypatch.context() as patch:
        patch.setattr(generate.program, 'is_another', lambda *_: True)
        assert small.start(patch, generate.main, generate.Generate, run, 'prompt_ids=[5]', 'tokens=1', 'output=ids')
    assert f'trained by another {trainer.__name__}.py than this one' in ' '.join(capsys.readouterr().err.split())
    status = small.start(monkeypatch, convert.main, convert.Convert, run, f'to={tmp_path}/out')
    said = capsys.readouterr().err
    assert ('no published architecture computes what' in said) == bool(status) == ('model.shared_experts=1' in keys)
    if not status:
        assert texts(monkeypatch, capsys, tmp_path / 'out', 'mesh.t=1') == (ids, pytest.approx(log_probs, abs=1e-4))
    again = [f'initial_weights={run}', 'training.steps=1', 'training.max_grad_norm=1']
    expected = started(monkeypatch, tmp_path / 'second', trainer, *again, *keys)
    further = [f'paths.root_working_dir={tmp_path}/third', *again, 'flat_tokens.filespec=synthetic_dataset.zarr']
    further += (
        'flat_tokens.sequence_packing=true training.tokens.batch=64 training.tokens.len=64 log_interval=1'.split()
    )
    further += 'model.compute_dtype=float32 mesh.d=2 mesh.t=2 validation_batches=1 lora.rank=2'.split()
    assert not small.start_training(monkeypatch, *further, trainer=train_any)
    (metrics,) = (tmp_path / 'third').glob('*/metrics.jsonl')
    assert json.loads(metrics.read_text().splitlines()[0])['loss'] == pytest.approx(expected[1, 'loss'], rel=1e-5)


REFUSED = [
    ('model.experts_per_token=2', 'model.experts = 0: expected 1 or more, since another key of a mixture'),
    ('model.experts=4', 'model.experts_per_token = 0: expected 1 to model.experts = 4'),
    ('model.fp8=true model.experts=4 model.experts_per_token=1', 'model.fp8 = true: expected false in a mixture'),
    ('mesh.c=3', 'training.tokens.len = 64: dim L has size 64, which axis c=3 cannot divide: set it to 63 or 66'),
    ('mesh.c=64', 'dim l has size 32, which axis c=64 cannot divide'),
    ('mesh.e=3 model.experts=4 model.experts_per_token=1', 'dim E has size 4, which axis e=3 cannot divide'),
    ('mesh.r=128', 'dim M has size 256, which axes d=4 × t=2 × r=128 cannot divide: set it to 1024'),
]  # fmt: skip


@pytest.mark.parametrize('keys, message', REFUSED, ids=[keys for keys, _ in REFUSED])
def test_what_cannot_be_is_refused(keys, message, monkeypatch, capsys):
    """Before anything is compiled, with the key and what it may be."""
    assert small.start_training(monkeypatch, 'check_only=true', *keys.split(), trainer=at_scale) == 1
    assert message in ' '.join(capsys.readouterr().err.split())
