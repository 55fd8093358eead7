"""optimizers.py and models/dropout.py: against published formulas in plain numpy, against torch, and across meshes."""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from mutation import proofs
from pages import module_of
from parts import assert_refuses
from published import on_mesh
from test_mutation import abstract

import optimizers
import train
from ledger.count.costs import count
from ledger.count.program import read
from models import layers
from models.dropout import Dropout, random_bits
from models.layers import TokenBatch
from runtime.check import by_name
from runtime.config.rebuild import Origins, rebuild
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, make_shardings, narrowed, pytree_dataclass, u32
from shardlib.spec import parse
from train import act

MESHES = [(4, 2), (2, 4), *small.slow((1, 1), (8, 1), (1, 8))]
SIZES = dict(M=16, K=8, D=4, F=32, E=8, V=16)


def training(**keys):
    return optimizers.Training(**{**vars(small.TRAINING), "warmup_steps": 0, "learning_rate": 0.01, **keys})


@pytree_dataclass
class Weights:
    """One weight of each kind: stacks of wide and of tall matrices, whose numbers the devices do not divide; experts,
    which are split; a matrix in no stack; and two that are no matrices."""

    wide: f32["3 M/d K/t D"]
    tall: f32["3 2 M/d K/t"]
    experts: f32["3 E/t M/d F"]
    single: f32["M/d F/t"]
    norm: f32["3 M/d/t"]
    embed: f32["V/t M/d"]


MATRICES = {"wide": 1, "tall": 2, "experts": 2, "single": 0}  # which dim counts rows
TYPES = narrowed(Weights, None)


def shape_of(array):
    return [int(name) if name.isdigit() else SIZES[name] for name in array.spec.names]


def draw(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda array: rng.normal(size=shape_of(array)).astype(np.float32), TYPES)


def decayed(types):
    """Factors of weight_decay: some 1, some 0."""
    return jax.tree.map(lambda array: float(optimizers.is_matrix(array.spec)), types.weights)


def steps(training, mesh, weights, gradients, types=None, check=False):
    """The state after a step with each of the gradients, as numpy arrays."""
    types = optimizers.state_type(training, TYPES if types is None else types)
    Gradient = types.weights

    def step(state: types, gradient: Gradient, number: u32[""]) -> types:
        return optimizers.step(training, types, decayed(types), state, gradient, number)

    with small.on_mesh(*mesh):
        step = jax.jit(typed_shard_map(step, check=check))
        state = jax.device_put(optimizers.first_state(types, weights), make_shardings(types))
        for number, gradient in enumerate(gradients):
            state = step(state, jax.device_put(gradient, make_shardings(Gradient)), jnp.uint32(number))
    return jax.tree.map(np.asarray, state)


def same_bits(one, other):
    leaves = [jax.tree.leaves(tree) for tree in (one, other)]
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(*leaves, strict=True))


# -- Schedules ---------------------------------------------------------------------------------------------------------
def rates(**keys):
    settings = training(warmup_steps=4, steps_for_lr=20, learning_rate=1.0, **keys)
    return [float(optimizers.learning_rate(settings, jnp.uint32(step))) for step in range(24)]


def test_schedules():
    """Each step's rate is that of the formula, and cosine that of train.py, bit for bit."""
    warm = [0.25, 0.5, 0.75, 1.0]
    cosine = [float(train.learning_rate(training(warmup_steps=4, steps_for_lr=20, learning_rate=1.0), jnp.uint32(n)))
              for n in range(24)]  # fmt: skip
    assert rates() == cosine
    assert rates(schedule="constant") == [*warm, *[1.0] * 20]
    assert rates(schedule="constant", decay_from=12)[:13] == rates(schedule="constant")[:13]  # a run resumes with it
    line = [1 - 0.9 * n / 16 for n in range(16)]
    np.testing.assert_allclose(rates(schedule="linear"), [*warm, *line, *[0.1] * 4], rtol=1e-6)
    root = [math.sqrt(4 / (n + 1)) for n in range(4, 24)]
    np.testing.assert_allclose(rates(schedule="inverse_sqrt"), [*warm, *root], rtol=1e-6)
    falls = [1 - 0.9 * min(max(n - 12, 0) / 8, 1) for n in range(4, 24)]
    np.testing.assert_allclose(rates(schedule="constant", decay_from=12), [*warm, *falls], rtol=1e-6)
    both = np.multiply(root, falls)
    np.testing.assert_allclose(rates(schedule="inverse_sqrt", decay_from=12), [*warm, *both], rtol=1e-6)


@pytest.mark.parametrize("keys, message", [
    (dict(decay_from=5), "training.decay_from = 5: schedule cosine … set it to constant"),
    (dict(schedule="constant", decay_from=10, steps_for_lr=10), "training.decay_from = 10: expected … 0 to below 10"),
    (dict(optimizer="adafactor", moment_dtype="bfloat16"), 'training.moment_dtype = "bfloat16": adafactor'),
    (dict(schedule="wsd"), "training.schedule"),
    (dict(dropout=1.0), "training.dropout"),
])  # fmt: skip
def test_refusals(keys, message):
    """Settings that contradict each other are refused by name, when the config is read."""
    given = {**vars(small.TRAINING), "warmup_steps": 0, "tokens": {"batch": 8, "len": 8}, **keys}

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        training: optimizers.Training

    assert_refuses(message, rebuild, Config, {"training": given}, Origins())


# -- AdamW, and moments in bfloat16 ------------------------------------------------------------------------------------
OF_TRAIN_PY = jax.eval_shape(functools.partial(train.init_state, small.MODEL), np.uint32(0)).weights


def test_a_weight_without_an_entry_is_named():
    """One that DECAYED lacks, or that is no weight, is a message with what is expected."""
    for table, what in (({"w_q": 1.0}, "'embed' is missing"), ({**train.DECAYED, "bias": 0.0}, "'bias' is no weight")):
        said = f"DECAYED: … {what} … : expected an entry for each weight: … 'w_up'"
        assert_refuses(said, by_name, "DECAYED", table, OF_TRAIN_PY)


def test_moments_in_bfloat16_are_the_same_on_any_mesh():
    """The numbers that round them depend on the place in the whole weight. The gradients are such that the moments need
    no rounding that a compiler may order otherwise."""
    settings, weights = training(moment_dtype="bfloat16", adam_b1=0.5, adam_b2=0.5), draw(0)
    whole = jax.tree.map(lambda w: np.round(w * 64) / 64, draw(1))
    one, other = (steps(settings, mesh, weights, [whole, whole]) for mesh in ((1, 1), (4, 2)))
    assert {leaf.dtype for leaf in jax.tree.leaves((one.adam_mu, one.adam_nu))} == {np.dtype(np.uint16)}
    assert same_bits((one.adam_mu, one.adam_nu), (other.adam_mu, other.adam_nu))


def test_stochastic_rounding_is_unbiased():
    """Each number becomes one of its two neighbours in bfloat16, and the mean over 4,000 seeds is the number, within
    five standard deviations."""
    x = np.array([1.001, -3.1416, 1e-20, 255.3, -0.7e5, 0.0, 1.0], np.float32)
    spec = parse('F')

    def rounds(x: f32["F"], seeds: u32["B"]) -> f32["B F"]:
        bits = jnp.zeros(x.shape, jnp.uint16)
        return jax.lax.map(lambda seed: optimizers.wide(optimizers.rounded(x, bits, spec, seed)), seeds)

    with small.on_mesh(1, 1):
        drawn = jax.jit(typed_shard_map(rounds, check=False))(x, np.arange(4000, dtype=np.uint32) * 2654435761)
    drawn = np.asarray(drawn, np.float64)
    low = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    high = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(1 << 16)).view(np.float32).astype(np.float64)
    assert ((drawn == low) | (drawn == high)).all()
    chance = (x - low) / (high - low)
    sigma = np.abs(high - low) * np.sqrt(chance * (1 - chance) / len(drawn))
    assert (np.abs(drawn.mean(axis=0) - x) <= 5 * sigma + 1e-12 * np.abs(x)).all()


# -- Muon --------------------------------------------------------------------------------------------------------------
def orthogonalized(g):
    """Five steps of Newton and Schulz on each matrix of a stack, in float64 (Jordan et al. 2024)."""
    x = g / (np.sqrt((g * g).sum((-2, -1), keepdims=True)) + 1e-7)
    for _ in range(5):
        gram = x @ x.swapaxes(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon(weight, gradients, row, settings):
    """Weight and momentum after the steps: Jordan et al. 2024, with the scale of Liu et al. 2025."""
    shape, momentum = weight.shape, 0.0
    as_matrices = (*shape[: row + 1], -1)
    weight = weight.astype(np.float64)
    for step, g in enumerate(gradients):
        rate = float(optimizers.learning_rate(settings, jnp.uint32(step)))
        momentum = 0.95 * momentum + g.astype(np.float64)
        matrices = (g + 0.95 * momentum).reshape(as_matrices)
        change = 0.2 * math.sqrt(max(matrices.shape[-2:])) * orthogonalized(matrices)
        weight = weight - rate * (change.reshape(shape) + settings.weight_decay * weight)
    return weight, momentum


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_muon_is_the_published_formula(mesh):
    """Matrices, whole on one device each, are within 1e-5 of float64's; what is none is AdamW's, to rounding: XLA may
    fuse it in another way."""
    settings, weights, gradients = training(optimizer="muon"), draw(0), [draw(1), draw(2)]
    state = steps(settings, mesh, weights, gradients, check=mesh == (2, 4))
    for name, row in MATRICES.items():
        history = [getattr(gradient, name) for gradient in gradients]
        weight, momentum = muon(getattr(weights, name), history, row, settings)
        np.testing.assert_allclose(getattr(state.weights, name), weight, atol=1e-5)
        np.testing.assert_allclose(getattr(state.adam_mu, name), momentum, atol=1e-5)
        assert getattr(state.adam_nu, name) is None
    if mesh == (4, 2):
        adamw = steps(training(), mesh, weights, gradients)
        for name in ("norm", "embed"):
            found, expected = (getattr(run.weights, name) for run in (state, adamw))
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layers, turns", [(8, 1), (9, 2), (1, 1)])
def test_muon_orthogonalizes_a_matrix_once(layers, turns):
    """Eight devices compute an eighth of what one does; where the layers do not go into them, a turn more. One layer
    is accepted too, whose dim of size one stands beside those that count devices."""
    matrix = f32["layers M/d K/t D"]

    def whole(x: matrix) -> matrix:
        return optimizers.orthogonalized(matrix.spec, x)

    def flops(d, t):
        with small.on_mesh(d, t):
            traced = jax.jit(typed_shard_map(whole)).trace(jnp.zeros((layers, 16, 4, 4), jnp.float32))
        return count(read(traced.jaxpr), {"d": d, "t": t}).flops()

    assert flops(4, 2) * layers == flops(1, 1) * turns > 0


# -- Adafactor ---------------------------------------------------------------------------------------------------------
@pytree_dataclass
class Stack:
    matrices: f32["3 M/d F/t"]
    vector: f32["M/d/t"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_adafactor_is_that_of_torch(mesh):
    """Three steps, of a stack of matrices and of a vector, end within 1e-6 of torch.optim.Adafactor's in float64."""
    with np.load(pathlib.Path(__file__).parent / "golden/adafactor.npz") as file:
        golden = dict(file)
    settings = training(optimizer="adafactor", schedule="constant", weight_decay=0.1)
    names = ("matrices", "vector")
    start = Stack(*(golden[f"{name}/start"] for name in names))
    gradients = [Stack(*(golden[f"{name}/gradients"][step] for name in names)) for step in range(3)]
    state = steps(settings, mesh, start, gradients, narrowed(Stack, None), check=mesh == (4, 2))
    for name in names:
        np.testing.assert_allclose(getattr(state.weights, name), golden[f"{name}/end"], atol=1e-6)
        assert getattr(state.adam_mu, name) is None
    assert state.adam_nu.matrices.rows.shape == (3, 8) and state.adam_nu.matrices.columns.shape == (3, 16)


def test_adafactor_of_every_kind_of_weight():
    """Its state is the same on two meshes, to rounding; an embedding has means of rows and columns too."""
    settings, weights, gradients = training(optimizer="adafactor"), draw(0), [draw(1), draw(2)]
    one, other = (steps(settings, mesh, weights, gradients) for mesh in ((1, 1), (2, 4)))
    assert one.adam_nu.embed.rows.shape == one.adam_nu.embed.columns.shape == (16,)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


# -- The average -------------------------------------------------------------------------------------------------------
def test_the_average_of_the_weights():
    """It begins at the first weights; then each step 0.9 of it and 0.1 of the new ones."""
    settings, weights, gradients = training(ema_decay=0.9), draw(0), [draw(1), draw(2)]
    types = optimizers.state_type(settings, TYPES)
    first = optimizers.first_state(types, weights)
    assert same_bits(optimizers.averaged(first), weights)
    after = [steps(settings, (4, 2), weights, gradients[: n + 1]) for n in range(2)]
    average = weights
    for state in after:
        average = jax.tree.map(lambda a, w: 0.9 * np.float64(a) + 0.1 * w, average, state.weights)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), after[1].ema, average)
    assert same_bits(optimizers.averaged(after[1]), after[1].ema)
    without = steps(training(), (4, 2), weights, gradients)
    assert without.ema is None and same_bits(optimizers.averaged(without), after[1].weights)


# -- Dropout -----------------------------------------------------------------------------------------------------------
def mixed(seed, number):
    """A step of a Weyl sequence and MurmurHash3's finalizer, in whole numbers without an end."""
    x = (seed + number * 0x9E3779B9) % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)], ids=str)
def test_random_bits_are_a_function_of_the_place(mesh):
    """The number at i, j is the one that plain Python computes from seed, i and j, on any mesh."""

    def bits(seed: u32[""], like: f32["M/d F/t"]) -> u32["M/d F/t"]:
        return random_bits(seed, parse("M/d F/t").dims, like.shape)

    with small.on_mesh(*mesh):
        found = np.asarray(jax.jit(typed_shard_map(bits))(jnp.uint32(7), np.zeros((4, 8), np.float32)))
    assert found.tolist() == [[mixed(mixed(7, i), j) for j in range(8)] for i in range(4)]


def test_dropout_keeps_the_mean():
    """The mean over 2,000 masks is the value, within five deviations; zeros are as frequent as the rate says, in each
    row, position and feature; each call, layer and seed has its own mask."""

    def drops(x: f32["B/b L M/t"], seeds: u32["V"], rows: u32["B/b"]) -> f32["V B/b L M/t"]:
        def one(seed):
            return Dropout(0.25, seed, rows).of_layer(jnp.uint32(1))('B/b L M/t', x)

        return jax.lax.map(one, seeds)

    def calls(x: f32["B/b L M/t"], rows: u32["B/b"]) -> tuple[f32["B/b L M/t"], f32["B/b L M/t"], f32["B/b L M/t"]]:
        drop, other = (Dropout(0.25, jnp.uint32(3), rows).of_layer(jnp.uint32(n)) for n in (0, 1))
        return drop('B/b L M/t', x), drop('B/b L M/t', x), other('B/b L M/t', x)

    rng, rows = np.random.default_rng(0), np.arange(2, dtype=np.uint32)
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)
    with on_mesh(1, 1):
        found = np.asarray(jax.jit(typed_shard_map(drops, check=False))(x, np.arange(2000, dtype=np.uint32), rows))
        masks = [
            np.asarray(array) == 0 for array in jax.jit(typed_shard_map(calls))(np.ones((2, 64, 64), np.float32), rows)
        ]
    sigma = np.abs(x) * math.sqrt(0.25 / 0.75 / 2000)
    assert (np.abs(found.mean(axis=0) - x) <= 5 * sigma).all()
    np.testing.assert_allclose(found[found != 0], np.broadcast_to(x / 0.75, found.shape)[found != 0], rtol=1e-6)
    every = [*masks, masks[0][::-1]]
    for index, mask in enumerate(every):
        for other in every[:index]:
            both = (mask & other).mean()
            assert abs(both - 0.25**2) < 5 * math.sqrt(0.25**2 / mask.size), "masks are not independent"


# -- z-loss ------------------------------------------------------------------------------------------------------------
def test_z_loss_is_the_published_term():
    """The loss grows by 1e-2 · log² Z of each target, and its gradient by that of it, on two meshes, as in float64."""

    def reference(logits):
        return 0.01 * np.log(np.exp(logits).sum(axis=-1)) ** 2

    rng = np.random.default_rng(0)
    x, table = rng.normal(size=(4, 8, 16)).astype(np.float32), rng.normal(size=(16, 16)).astype(np.float32)
    is_target = rng.random((4, 8)) < 0.8
    batch = TokenBatch(np.zeros((4, 8), np.uint32), np.zeros((4, 8), bool), is_target)

    def term(x: act["B/b L/c M"], table: act["V/t M"], batch: TokenBatch) -> tuple[f32[""], f32["B/b L/c M"]]:
        def loss(x: act["B/b L/c M"], z_loss: float) -> f32["+b +c +t"]:
            return layers.loss_sum(table, x, batch, z_loss=z_loss)

        found = [shardops.value_and_grad(functools.partial(loss, z_loss=z))(x) for z in (0.01, 0.0)]
        values, gradients = zip(*found)
        of_x = shardops.psum("B/b L/c M +t -> B/b L/c M", gradients[0] - gradients[1])
        return shardops.psum("+b +c +t -> ", values[0] - values[1]), of_x

    logits = x.astype(np.float64) @ table.T.astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    log_z = np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    of_x = is_target[..., None] * 0.02 * log_z * (probabilities @ table)
    for mesh in ((1, 1), (2, 4)):
        with on_mesh(*mesh):
            value, gradient = jax.jit(typed_shard_map(term))(x, table, batch)
        np.testing.assert_allclose(value, (is_target * reference(logits)).sum(), rtol=1e-5)
        np.testing.assert_allclose(gradient, of_x, atol=1e-5)


# -- Mutants -----------------------------------------------------------------------------------------------------------
def check_optimizers(path, source):
    """Checks a step of each optimizer; returns the number of claims."""
    module, count = module_of(path, source), 0
    for settings in (dict(optimizer="muon"), dict(optimizer="adafactor"), dict(moment_dtype="bfloat16", ema_decay=0.9)):
        settings = module.Training(**{**vars(small.TRAINING), **settings})
        types = module.state_type(settings, TYPES)
        Gradient = types.weights

        def step(
            state: types, gradient: Gradient, number: u32[""], module=module, settings=settings, types=types
        ) -> types:
            return module.step(settings, types, decayed(types), state, gradient, number)

        weights = jax.tree.map(lambda array: jax.ShapeDtypeStruct(shape_of(array), jnp.float32), TYPES)
        state = jax.eval_shape(functools.partial(module.first_state, types), weights)
        count += typed_shard_map(step).check(
            abstract(dict(d=4, t=2)), state, weights, jax.ShapeDtypeStruct((), jnp.uint32)
        )
    return count


OPTIMIZERS = "optimizers.py"
test_they_are_accepted, test_every_mutant_is_refused = proofs(
    {OPTIMIZERS: (check_optimizers, 20, 5)}, [OPTIMIZERS], ("d", "t"), place=None
)
