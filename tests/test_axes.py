"""train_any.py on axes p, r, d, c, e and t: it computes what a plain, unsharded reference does, and sends what its
ledger says; with one device along all but d and t what train.py does, bit for bit."""

import dataclasses
import functools
import math
import re
import tarfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small
from pages import ROOT, module_of
from parts import says
from several_hosts import TINY, logged, where, write_tiny

import train
import train_any
from ledger.compiled.agreement import differences
from ledger.count.step import of_step
from models import experts, huggingface, layers, llama, mixtral
from optimizers import State
from runtime.cluster.tuning import options
from runtime.config.keys import PairTokens
from shardlib.mesh import make_mesh
from shardlib.shardtypes import make_shardings

SIZES = dict(d_model=32, n_q_per_kv=2, n_kv=4, d_head=4, layers=2, vocab=64, d_ff=32, rope_max_timescale=256)
DENSE = llama.Model(**SIZES, compute_dtype='float32', attention='einsum')
DEEP = dataclasses.replace(DENSE, layers=8)
# c = t = 2 has more devices than heads: keys are gathered, or go round.
FEW_HEADS = dataclasses.replace(DENSE, n_kv=2, attention='blockwise')
DROPLESS = mixtral.Model(**SIZES, compute_dtype='float32', attention='einsum', experts=4, experts_per_token=2)
CAPACITY = dataclasses.replace(DROPLESS, capacity=0.75, capacity_parts=8, shared_experts=1)  # 2 slots for 4 tokens
DEEP_MIXTURE = dataclasses.replace(DROPLESS, layers=4)
SCHEDULE = dict(steps=10, warmup_steps=2, steps_for_lr=10, learning_rate=1e-2, adam_b1=0.0, max_grad_norm=1e30)
ROUTERS = dict(balance_loss=0.1, router_z_loss=0.05)
TRAINING = train_any.Training(**SCHEDULE, **ROUTERS, tokens=PairTokens(batch=8, len=32))
BATCH = reference.random_batch(DENSE, batch=8, length=32, seed=1)


def mesh_of(text):
    """'r2 c4' as sizes of all axes."""
    return train_any.Mesh(**{word[0]: int(word[1:]) for word in text.split()})


def config_of(model, mesh, training=TRAINING, way='auto', train=None):
    lora = train_any.Lora()
    return types.SimpleNamespace(
        mesh=mesh, model=model, training=training, lora=lora, train=train, context=way, fp8=False
    )


def weights_of(model):
    """Weights under which nothing is special, as a nested dict of numpy arrays."""
    shapes = jax.eval_shape(functools.partial(train_any.family_of(model).init, model), np.uint32(0))
    rng, tree = np.random.default_rng(0), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name, size = path[-1].name, math.prod(leaf.shape)
        fan_in = model.d_model * (model.d_head if name == 'w_q' else 1)
        fan_in = {'embed': 1, 'w_o': model.n_q_per_kv * model.n_kv * model.d_head}.get(name, fan_in)
        fan_in = leaf.shape[-1] if name.endswith('down') else fan_in
        is_matrix = leaf.ndim > len(path)
        value = rng.standard_normal(size) * fan_in**-0.5 if is_matrix else rng.uniform(0.5, 1.5, size)
        inner = tree if len(path) == 1 else tree.setdefault(path[0].name, {})
        inner[name] = value.reshape(leaf.shape).astype(np.float32)
    return tree


def on(mesh):
    sizes = vars(mesh)
    return jax.set_mesh(make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())]))


def traced(config, module=train_any):
    """The training step on the current mesh, its types unchecked."""
    step, _ = module.mapped_steps(config, 0)
    step.checked, zero = False, np.uint32(0)
    state, batch = module.shapes(config)
    return jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch)


def ledger_of(config, module=train_any):
    sizes, tokens = vars(config.mesh), config.training.tokens
    automatic = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)
    with jax.sharding.use_abstract_mesh(mesh):
        return of_step(traced(config, module), sizes, source=module.__file__, tokens=tokens.batch * tokens.len)


def stepped(config, tree, batch=BATCH, steps=1, module=train_any):
    """The last state and all metrics of some steps, as numpy arrays. The compiled program sends what its ledger
    says."""
    family, task = module.family_of(config.model), module.task_of(config)
    module.shapes(config)
    step, _ = module.mapped_steps(config, 0)
    step.checked = False
    with on(config.mesh):
        weights = family.Weights(**{**tree, 'transformer': family.Layer(**tree['transformer'])})
        trained, frozen = (
            jax.tree.map(lambda type_, w: type_ and w, types, weights, is_leaf=module.is_none)
            for types in (task.in_step.trained, task.in_step.frozen)
        )
        zeros = jax.tree.map(np.zeros_like, trained)
        state = State(module.Tuned(trained, frozen), zeros, zeros)
        state = jax.device_put(state, make_shardings(task.State))
        arrays = batch.targets.astype(np.uint32), batch.is_seq_start, batch.is_target
        placed = task.Batch(*arrays, batch.is_target.astype(np.float32))
        placed, zero = jax.device_put(placed, make_shardings(task.Batch)), jnp.uint32(0)
        program, found = jax.jit(step).trace(state, zero, zero, placed), []
        compiled = program.lower().compile(options(jax.devices()[0], vars(config.mesh).get('p', 1)))
        ledger = of_step(program, vars(config.mesh), source=module.__file__, tokens=batch.targets.size)
        rows = differences(ledger, compiled.as_text())
        reasons = 'as all bfloat16 is by XLA:CPU', 'merged with an equal one'
        assert all(any(reason in row.reason for reason in reasons) for row in rows), rows
        for number in range(steps):
            state, metrics = compiled(state, zero, jnp.uint32(number), placed)
            found.append(jax.tree.map(np.asarray, metrics))
        return jax.tree.map(np.asarray, state), found


@functools.cache
def truth_of(model):
    """The reference's loss and gradient in float64."""
    known = dict(experts=0, capacity=None) | vars(model)
    factors = (TRAINING.balance_loss, TRAINING.router_z_loss) if known['experts'] else (0.0, 0.0)
    slots = None if known['capacity'] is None else 2
    plain = types.SimpleNamespace(**known, router_losses=factors, slots=slots, parts=8)
    return reference.loss_and_grad(weights_of(model), BATCH, plain)


def require_truth(model, mesh, training=TRAINING, way='auto', module=train_any, train=None):
    is_mixture, mesh = isinstance(model, mixtral.Model), mesh_of(mesh)
    state, (metrics,) = stepped(config_of(model, mesh, training, way, train), weights_of(model), module=module)
    loss, expected = truth_of(model)
    if is_mixture:
        of_routers = TRAINING.balance_loss * metrics.balance_loss + TRAINING.router_z_loss * metrics.router_z_loss
        assert model.capacity is None or 0.05 < metrics.dropped < 0.5
        assert metrics.load.sum() == pytest.approx(model.experts)
        loss = loss - model.layers * float(of_routers)
    assert abs(float(metrics.loss) - float(loss)) <= 2e-6 * abs(float(loss)), 'the loss is another'
    far = {}
    for path, true in jax.tree_util.tree_leaves_with_path(expected):
        ours = functools.reduce(lambda tree, key: getattr(tree, key.key), path, state.adam_mu)
        name = '/'.join(part.key for part in path)
        assert (ours is not None) == bool(re.fullmatch(train or '.*', name)), f'{name} is trained, or is not'
        if ours is not None:
            far[name] = float(np.linalg.norm(ours - true) / np.linalg.norm(true))
    far = {name: distance for name, distance in far.items() if not distance <= 1e-5}
    assert not far, 'the gradient is another'


def with_parts(microbatches, pieces=1):
    return dataclasses.replace(TRAINING, microbatches=microbatches, pieces=pieces)


# Each two axes meet on some mesh.
CASES = [
    (DENSE, 'r2 d2 c2', with_parts(2), 'auto'), (CAPACITY, 'r2 e2 t2', TRAINING, 'auto'),
    (DROPLESS, 'd2 c2 e2', TRAINING, 'auto'), (FEW_HEADS, 'c4 t2', TRAINING, 'ring'),
]  # fmt: skip
LARGER = [
    (FEW_HEADS, 'd2 c2 t2', TRAINING, 'auto'), (DEEP, 'p2 d2', with_parts(4), 'auto'),
    *((DENSE, mesh, TRAINING, 'auto') for mesh in ('r8', 'r2 c4', 'r4 e2')),
    (FEW_HEADS, 'c8', TRAINING, 'auto'), (FEW_HEADS, 'r2 c4', with_parts(2), 'auto'),
    *((FEW_HEADS, mesh, TRAINING, 'ring') for mesh in ('d2 c2 t2', 'd2 c4', 'c8')),
    (FEW_HEADS, 'r2 d2 c2', with_parts(2), 'ring'),
    *((CAPACITY, mesh, TRAINING, 'auto') for mesh in ('e4 t2', 'c4 e2', 'r2 d2 e2', 'c2 e2 t2')),
    *((DROPLESS, mesh, TRAINING, 'auto') for mesh in ('e4 c2', 'r2 e2 t2', 'd4 t2')),
    *((DEEP, mesh, with_parts(4, pieces), 'auto') for mesh, pieces in [
        ('p2', 2), ('p4 t2', 1), ('p2 r2 t2', 2), ('p2 c2 d2', 1), ('p4', 2), ('p4 r2', 1),
    ]),
]  # fmt: skip


@pytest.mark.usefixtures('proved_elsewhere')
@pytest.mark.parametrize(
    'model, mesh, training, way', [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGER)]
)
def test_loss_and_gradient_equal_the_reference(model, mesh, training, way):
    """The float32 loss is within 2e-6 of float64's, each leaf of the gradient within 1e-5 of its norm, and XLA's
    program sends what the ledger says."""
    require_truth(model, mesh, training, way)


@pytest.mark.usefixtures('proved_elsewhere')
@pytest.mark.parametrize('train', ['transformer/w_q|.*norm', *small.slow('embed', 'transformer/w_(o|up)')])
def test_stages_compute_the_gradients_of_what_is_trained(train):
    """They equal the reference's, and no product is for another weight: with one stage there are as many."""
    require_truth(DEEP, 'p2 t2', with_parts(4, pieces=2), train=train)
    meshes = (mesh_of('p2 t2'), with_parts(4, pieces=2)), (mesh_of('t2'), with_parts(4))
    ours, theirs = (ledger_of(config_of(DEEP, *mesh, train=train)) for mesh in meshes)
    assert ours.model_flops == pytest.approx(theirs.model_flops, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize('capacity', [None, 4.0], ids=['dropless', 'capacity'])
def test_a_mixture_of_equal_experts_is_the_dense_model(capacity):
    """The router does not matter: each token's weights add up to one, and with enough slots no token is dropped."""
    tree, training = weights_of(DENSE), dataclasses.replace(TRAINING, balance_loss=0.0, router_z_loss=0.0)
    model = dataclasses.replace(DROPLESS, capacity=capacity)
    layer = dict(tree['transformer'])
    for name in ('gate', 'up', 'down'):
        layer[f'expert_{name}'] = np.stack([layer.pop(f'w_{name}')] * model.experts, axis=1)
    layer['router'] = weights_of(DROPLESS)['transformer']['router']
    state, (metrics,) = stepped(config_of(model, mesh_of('e4 t2'), training), {**tree, 'transformer': layer})
    loss, expected = truth_of(DENSE)
    assert metrics.dropped == 0 and float(metrics.loss) == pytest.approx(float(loss), rel=2e-6)
    summed = state.adam_mu.transformer.expert_up.sum(axis=1)
    np.testing.assert_allclose(summed, expected['transformer']['w_up'], atol=1e-5 * abs(summed).max())
    assert np.abs(state.adam_mu.transformer.router).max() < 1e-5 * abs(summed).max()  # the router makes no difference


# -- train.py ----------------------------------------------------------------------------------------------------------
def as_train(config):
    """The same settings of train.py."""
    model, training = ({field.name: getattr(part, field.name) for field in dataclasses.fields(type_)}
                       for part, type_ in ((config.model, train.Model), (config.training, train.Training)))  # fmt: skip
    mesh = train.Mesh(d=config.mesh.d, t=config.mesh.t)
    return types.SimpleNamespace(mesh=mesh, model=train.Model(**model), training=train.Training(**training))


def steps_of_train(config, tree, batch, steps):
    """The losses of train.py, and its last weights."""
    config, losses = as_train(config), []
    train.shapes(config)
    with on(config.mesh):
        state, placed = small.state_of(tree), small.batch_of(batch)
        for number in range(steps):
            state, metrics = small.step(config.model, config.training, state, placed, number)
            losses.append(float(metrics.loss))
    return losses, state.weights


def beside_train(mesh, **changes):
    """Three steps of both, of rows of one document: their losses and last weights."""
    model, starts = dataclasses.replace(DENSE, **changes), np.zeros_like(BATCH.is_seq_start)
    training = dataclasses.replace(TRAINING, microbatches=2, adam_b1=0.9, max_grad_norm=1.0)
    batch, tree = dataclasses.replace(BATCH, is_seq_start=starts), weights_of(model)
    config = config_of(model, mesh_of(mesh), training)
    state, metrics = stepped(config, tree, batch, steps=3)
    ours, theirs = [float(step.loss) for step in metrics], steps_of_train(config, tree, batch, 3)
    return config, ours, state.weights.trained, *theirs


@pytest.mark.usefixtures('proved_elsewhere')
@pytest.mark.parametrize('attention', ['einsum', pytest.param('blockwise', marks=pytest.mark.slow)])
def test_it_is_train_py_bit_for_bit(attention):
    """One device has train.py's bits in float32; on several XLA fuses, and rounds, otherwise."""
    _, ours, of_ours, theirs, of_theirs = beside_train('', attention=attention)
    assert ours == theirs
    for path, own in jax.tree_util.tree_leaves_with_path(of_ours):
        np.testing.assert_array_equal(own, functools.reduce(lambda tree, key: getattr(tree, key.name), path, of_theirs))


@pytest.mark.usefixtures('proved_elsewhere')
@pytest.mark.slow
def test_axes_of_one_device_cost_nothing():
    """On d and t alone, in bfloat16, it has train.py's losses to rounding, its FLOPs and its bytes sent. Its memory
    also holds each target's weight and each token's position in its segment."""
    config, ours, _, theirs, _ = beside_train('d4 t2', compute_dtype='bfloat16')
    assert ours[0] == theirs[0] and ours == pytest.approx(theirs, rel=3e-5)
    ours, theirs = ledger_of(config), ledger_of(as_train(config), train)
    assert (ours.model_flops, ours.hardware_flops) == (theirs.model_flops, theirs.hardware_flops)
    assert ours.sent_bytes() == theirs.sent_bytes()
    of_targets = 4 * BATCH.targets.size // 4
    assert ours.memory.bytes <= theirs.memory.bytes + 2 * of_targets


# -- What types refuse, and what they cannot see -----------------------------------------------------------------------
CHECKED_ON = mesh_of('p2 r2 d2 c2 e2 t2')  # for which no devices are needed


def check(path, source, models=(DEEP, DEEP_MIXTURE)):
    """Checks both steps of a train_any.py on stages; returns the number of claims."""
    module, proved = module_of(path, source), 0
    training = module.Training(**vars(with_parts(4, 2)) | {'tokens': PairTokens(batch=128, len=32)})
    sizes = vars(CHECKED_ON)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    number, loss = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    for model in models:
        config = config_of(dataclasses.replace(model, d_model=128), module.Mesh(**sizes), training)
        (state, batch), (step, validate) = module.shapes(config), module.mapped_steps(config, 0)
        proved += validate.check(mesh, state.weights, loss, loss, batch)
        proved += step.check(mesh, state, number, number, batch)
    return proved


SOURCE = (ROOT / 'train_any.py').read_text()


@pytest.mark.parametrize('models', [(DEEP,), *small.slow((DEEP_MIXTURE,), (FEW_HEADS,))], ids=str)
def test_stages_are_proved(models, tmp_path):
    """The check accepts both steps, interleaved, on axes of two."""
    models = [dataclasses.replace(model, layers=8) for model in models]
    assert check(tmp_path / 'train_any.py', SOURCE, models) > 300


# What types cannot see: which positions, whose tokens, which slot.
UNSEEN = {
    'positions are not dealt': ('context', (layers, 'Rows'), 'self.context.part(self.place),',
     "shardops.slice('L -> L/c', self.place),"),
    'results come back to other slots': ('experts', (experts, 'combine'), 'jnp.moveaxis(y, 0, 1)',
     'jnp.moveaxis(y[::-1], 0, 1)'),
    'two experts share slots': ('experts', (experts, 'slots'), 'slot = pairs * C +', 'slot = pairs // 2 * C +'),
}  # fmt: skip  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('what', UNSEEN)
def test_what_types_cannot_see(what, tmp_path, monkeypatch):
    """The check accepts these errors; the comparison with the reference finds them."""
    file, (module, name), old, new = UNSEEN[what]
    source = (ROOT / f'models/{file}.py').read_text()
    assert source.count(old) == 1
    changed = source.replace(old, new).replace('context: Context, segment', 'context: object, segment')
    monkeypatch.setattr(module, name, getattr(module_of(tmp_path / 'changed.py', changed), name))
    with pytest.raises(AssertionError, match=r'the (loss|gradient) is another'):
        require_truth(FEW_HEADS if file == 'context' else CAPACITY, 'c2 e2 t2')


# -- Runs --------------------------------------------------------------------------------------------------------------
KEYS = [*TINY, 'model.n_q_per_kv=1', 'checkpoint_interval=2', 'eval_interval=2']


@pytest.fixture
def ran(tmp_path, monkeypatch, proved_elsewhere):
    """Trains in a folder, from its last checkpoint on; gives its losses, or None where it is refused."""
    monkeypatch.chdir(ROOT)
    data = write_tiny(tmp_path)

    def call(name, steps, *keys, trainer=train_any):
        given = [*KEYS, data, f'training.steps={steps}', *where(tmp_path / name), *keys]
        if small.start_training(monkeypatch, *given, trainer=trainer):
            return None
        both = ((metric, logged(tmp_path / name, metric)) for metric in ('loss', 'validation_loss'))
        return {(step, metric): value for metric, values in both for step, value in sorted(values.items())}

    return call


ALLOW = 'allow_config_change=true'


@pytest.mark.slow
def test_a_run_goes_on_on_any_mesh_and_by_either_trainer(ran, capsys):
    """Two steps of train.py, two on replicas with rows on two devices, two on stages, and two of train.py have the
    losses of eight steps of train.py; without allow_config_change another trainer is refused."""
    deep = ['model.layers=4', 'training.microbatches=2', 'training.steps_for_lr=50', 'model.rope_max_timescale=256']
    whole = ran('whole', 8, *deep, trainer=train)
    ran('parts', 2, *deep, trainer=train)
    axes = ['mesh={r: 2, d: 1, c: 2, t: 2}', *deep]
    assert ran('parts', 4, *axes) is None and 'the program: train -> train_any' in capsys.readouterr().err
    ran('parts', 4, *axes, ALLOW)
    ran('parts', 6, 'mesh={p: 2, d: 2, e: 2, t: 1}', *deep)
    parts = ran('parts', 8, *deep, ALLOW, trainer=train)
    assert len(whole) == 12 and parts.keys() == whole.keys()
    assert [parts[key] for key in whole] == pytest.approx(list(whole.values()), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('capacity', ['null', '1.0'])
def test_a_mixture_goes_on_on_any_mesh(capacity, ran):
    """Its losses are those of an uninterrupted run, dropped tokens included: slots are counted within a row."""
    mixture = ['family=mixtral', 'model.experts=4', 'model.shared_experts=1', f'model.capacity={capacity}']
    whole = ran('whole', 4, *mixture, 'mesh={d: 1, t: 1}')
    ran('parts', 2, *mixture, 'mesh={r: 2, d: 1, e: 2, t: 2}')
    parts = ran('parts', 4, *mixture, 'mesh={d: 2, e: 4, t: 1}')
    assert parts == pytest.approx(whole, rel=2e-5) and len(parts) == 6


# The third and fourth loss, and the validation loss, of the trainers that train_any.py replaced.
OLDER = {
    'train_at_scale': (
     ['family=mixtral', 'model.experts=2', 'model.experts_per_token=1', 'model.weights_add_to_one=false',
      'model.shared_experts=1', 'model.capacity=2.0', 'training.balance_loss=0.01', 'training.router_z_loss=0.001',
      'mesh={r: 2, d: 1, e: 2, t: 2}'], [5.275275707244873, 5.21381950378418, 5.263882637023926]),
    'train_pipeline': (['model.layers=2', 'training.microbatches=2', 'mesh={p: 2, d: 1, c: 2, t: 1}'],
     [5.308307647705078, 5.20671272277832, 5.191897869110107]),
}  # fmt: skip  # fmt: skip


@pytest.mark.parametrize('trainer', small.slow('train_at_scale', 'train_pipeline'))
def test_runs_of_older_trainers_go_on(trainer, ran, tmp_path, pool):
    """They keep their losses on another mesh, and are read as initial weights of the family that computes them."""
    with tarfile.open(ROOT / 'tests/golden/older_runs.tar.gz') as packed:
        packed.extractall(tmp_path, filter='data')
    keys, expected = OLDER[trainer]
    of_its_time = 'model.d_model=16 model.n_kv=2 model.d_head=4 model.d_ff=16 model.n_q_per_kv=2'.split()
    of_its_time += ['model.rope_max_timescale=256', 'eval_interval=6']
    found = ran(trainer, 4, *keys, *of_its_time, ALLOW)
    assert list(found.values()) == pytest.approx(expected, rel=1e-5)
    (folder,) = (tmp_path / trainer / 'checkpoints').glob('*2')
    assert huggingface.open_weights(str(folder), pool).family is (mixtral if 'family=mixtral' in keys else llama)


REFUSED = [
    ('mesh.c=3', 'training.tokens.len = 64: dim L … c=3 cannot divide: set it to 63 or 66'),
    ('mesh.c=64 mesh.d=1', 'dim l has size 32 … c=64 cannot divide'),
    ('family=mixtral mesh.e=3', 'dim E has size 8 … e=3 cannot divide'),
    ('+experts=small mesh.c=2 mesh.d=1 model.capacity_parts=2', 'a multiple of 2 · mesh.c = 4: set it to 4'),
    ('+experts=small model.capacity_parts=3', 'training.tokens.len = 64: set it to a divisor'),
    ('mesh.r=128', 'dim M has size 256 … d=4 × r=128 cannot divide: set it to 512'),
    ('training.pieces=2', 'training.pieces = 2: mesh.p = 1 has no stages'),
    ('fp8=true mesh.p=2', 'mesh.p = 2: products in 8 bits cannot be dealt'),
    ('--config-name=any_pipeline training.pieces=3', 'model.layers = 8: … mesh.p · training.pieces = 12'),
    ('--config-name=any_pipeline training.microbatches=2', 'training.microbatches = 2: … mesh.p = 4: set'),
    (
        '--config-name=any_pipeline training.batch_doubles_at=[2,3]',
        'training.microbatches = 8: … mesh.p · 4, for training.batch_doubles_at, = 16: set it to 16',
    ),
    ('family=t5 mesh.c=2 training.tokens.read_len=33', 'training.tokens.read_len = 33: … set it to 32 or 34'),
    ('family=bert masking.share=0', 'masking.share = 0: expected a number above 0'),
    ('--config-name=any_pipeline model.vocab=1281', 'dim V has size 1281 … p=4 cannot divide'),
    ('--config-name=any_pipeline mesh.d=16', 'training.microbatches = 64 / 8: dim B … d=16'),
    ('family=t5 mesh.p=2 training.tokens.read_len=16', 'mesh.p = 2: a model with an encoder'),
]  # fmt: skip


def test_a_key_of_this_program_is_named_by_others(monkeypatch, capsys):
    """The message of train.py names this program, not the nearest word."""
    given = ['mesh.r=2', 'model.experts=4', 'lora.rank=2', 'mesh.x=2']
    assert small.start_training(monkeypatch, *given, trainer=train) == 1
    said = capsys.readouterr().err
    for key in 'mesh.r', 'model.experts', 'lora.rank':
        assert says(f'command line: {key} is a key … python -m train_any', said)
    assert says('mesh.x is not a key: … d, t', said)


@pytest.mark.parametrize('keys, message', REFUSED, ids=[keys for keys, _ in REFUSED])
def test_what_cannot_be_is_refused(keys, message, monkeypatch, capsys):
    """The message has the key and what it may be; nothing is compiled."""
    assert small.start_training(monkeypatch, 'check_only=true', *keys.split(), trainer=train_any) == 1
    assert says(message, capsys.readouterr().err)
