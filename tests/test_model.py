"""What the model must not see, and what a step must do: against the reference, and against itself; and the reference.

That the model is right, in both: train.py has the bits of models/llama.py (test_train_any.py), which has the logits,
loss and gradients of transformers (models/test_golden_models.py).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small

import train
from ledger.count.program import read
from shardlib.proof.jaxprs import scan_counts
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import make_shardings

pytestmark = pytest.mark.usefixtures("proved_elsewhere")  # tests/test_mutation.py does


@pytest.fixture(scope="module")
def weights():
    return reference.random_weights(small.MODEL, seed=0)


@pytest.mark.parametrize("mesh", [*small.slow((1, 1)), (4, 2)], ids=["1x1", "4x2"])
def test_no_token_is_seen_from_before_or_from_another_segment(mesh, weights):
    """Changing one token moves the logits of exactly the later positions of its segment: neither the past, nor other
    sequences, nor other rows."""
    position, changed = 12, small.BATCH.targets.copy()
    changed[:, position] = (changed[:, position] + 1) % small.MODEL.vocab
    batches = small.BATCH, dataclasses.replace(small.BATCH, targets=changed)
    with small.on_mesh(*mesh):
        before, after = (small.hidden_and_logits(small.MODEL, weights, batch) for batch in batches)
    moved = np.any(before != after, axis=-1)  # bool[B, L]
    starts = small.BATCH.is_seq_start.copy()
    starts[:, 0] = True
    segment = np.cumsum(starts, axis=1)
    # The token at a position is the input of the next one, if that is of the same segment.
    reached = (np.arange(32)[None] > position) & (segment == segment[:, position : position + 1])
    assert reached.any() and not reached.all()
    np.testing.assert_array_equal(moved, reached)


def test_bos_id_stands_before_a_sequence(weights):
    """Another bos_id gives the reference's loss with that bos_id."""
    with small.on_mesh(4, 2):
        loss, _ = small.loss_and_gradient(small.MODEL, small.TRAINING, weights, small.BATCH, bos_id=7)
    expected = reference.loss(weights, small.BATCH, small.MODEL, bos_id=7)
    assert abs(loss - expected) < 1e-5 and abs(expected - reference.loss(weights, small.BATCH, small.MODEL)) > 1e-4


def test_a_long_row_goes_through_the_loss_in_chunks(weights, monkeypatch):
    """Chunks of 8 positions give the loss and gradient of one chunk of 32, to rounding, and their gradient adds up in
    float32."""
    with small.on_mesh(4, 2):
        one, gradient = small.loss_and_gradient(small.MODEL, small.TRAINING, weights, small.BATCH)
        monkeypatch.setattr(train, "LOSS_CHUNK", 8)
        many, other = small.loss_and_gradient(small.MODEL, small.TRAINING, weights, small.BATCH)
    assert abs(one - many) < 1e-6 * abs(one)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other)):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


def test_the_embedding_gradient_adds_up_in_float32(weights):
    """A token that stands at 4,000 places of a device has in the bfloat16 step the gradient of the float32 one, to 2 %:
    4,000 terms of about the same size, added up one by one in bfloat16, would stay near the first few hundred."""
    batch, gradients = reference.random_batch(small.MODEL, batch=136, length=64, seed=2), []
    batch = dataclasses.replace(batch, targets=np.full_like(batch.targets, 3))
    for dtype in ("bfloat16", "float32"):
        with small.on_mesh(2, 2, dtype):
            _, gradient = small.loss_and_gradient(small.MODEL, small.TRAINING, weights, batch)
        gradients.append(gradient.embed[3])
    ours, expected = gradients
    assert np.linalg.norm(ours - expected) < 0.02 * np.linalg.norm(expected)


def test_the_unembedding_gradient_adds_up_in_float32(monkeypatch):
    """The backward scan over chunks of the bfloat16 step carries the unembedding's gradient, V/t M, in float32 and
    nowhere in bfloat16."""
    monkeypatch.setattr(train, "LOSS_CHUNK", 8)
    with small.on_mesh(4, 2, dtype="bfloat16"):
        step = typed_shard_map(functools.partial(train.training_step, small.MODEL, small.TRAINING, 0))
        state = small.state_of(reference.random_weights(small.MODEL, seed=0))
        jaxpr = jax.make_jaxpr(step)(state, jnp.uint32(0), jnp.uint32(0), small.batch_of(small.BATCH))
    scans = (op for op, _ in read(jaxpr).runs() if op.name == "scan")
    counts = ((op.inputs, *scan_counts(op.params)) for op in scans)
    carries = [value for inputs, first, carry in counts for value in inputs[first : first + carry]]
    unembed = [value.dtype for value in carries if value.shape == (small.MODEL.vocab // 2, small.MODEL.d_model)]
    assert unembed and set(unembed) == {"float32"}


def test_adamw_equals_the_reference(weights):
    """Two updates, from warmup into the cosine, with clipping and decay, have the float64 reference's weights and
    moments."""
    training = dataclasses.replace(small.TRAINING, max_grad_norm=0.5, warmup_steps=1)
    moments = tuple(jax.tree.map(np.zeros_like, weights) for _ in range(2))
    expected = (weights, *moments)
    with small.on_mesh(4, 2):
        state = small.state_of(weights)
        for number in range(2):
            gradient = reference.loss_and_grad(expected[0], small.BATCH, small.MODEL)[1]
            expected = reference.adamw_update(*expected, gradient, number, training)
            state, metrics = small.step(small.MODEL, training, state, small.batch_of(small.BATCH), number)
            assert abs(metrics.learning_rate - reference.learning_rate(number, training)) < 1e-8
            assert abs(metrics.grad_norm - reference.global_norm(gradient)) < 1e-4
            norm = reference.global_norm(expected[0])
            assert abs(metrics.weight_norm - norm) < 1e-5 * norm
            state = jax.device_put(state, make_shardings(train.State))
    for mine, theirs in zip((state.weights, state.adam_mu, state.adam_nu), expected):
        for a, b in zip(
            jax.tree.leaves(reference.as_dict(mine)),
            jax.tree.leaves({key: theirs[key] for key in reference.as_dict(mine)}),
        ):
            assert np.linalg.norm(a - b) <= 2e-4 * np.linalg.norm(b)


def test_a_step_that_is_not_finite_changes_nothing(weights):
    """An infinite weight makes the loss NaN: weights and moments stay as they were, bit for bit, and the step is
    counted."""
    broken = {**weights, "unembed": np.full_like(weights["unembed"], np.inf)}
    with small.on_mesh(4, 2):
        before = small.state_of(broken)
        kept = jax.tree.map(np.asarray, before)
        after, metrics = small.step(small.MODEL, small.TRAINING, before, small.batch_of(small.BATCH))
    assert metrics.skipped_steps == 1 and not np.isfinite(metrics.loss)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(after)):
        np.testing.assert_array_equal(a, b)


def test_initial_weights_are_the_same_on_every_mesh_and_scaled_by_fan_in():
    """Drawn shard by shard they are bit for bit those of one device; standard deviations are 1/sqrt(fan-in), of w_q
    also 1/sqrt(D)."""
    drawn = []
    for mesh in [(1, 1), (8, 1), (2, 4)]:
        with small.on_mesh(*mesh):
            init = jax.jit(functools.partial(train.init_state, small.MODEL), out_shardings=make_shardings(train.State))
            drawn.append(jax.tree.map(np.asarray, init(np.uint32(3))))
    for other in drawn[1:]:
        jax.tree.map(np.testing.assert_array_equal, drawn[0], other)
    layer, M, F, D = drawn[0].weights.transformer, small.MODEL.d_model, small.MODEL.d_ff, small.MODEL.d_head
    heads = small.MODEL.n_q_per_kv * small.MODEL.n_kv * D
    for leaf, deviation in [
        (layer.w_q, (M * D) ** -0.5), (layer.w_kv, M**-0.5), (layer.w_o, heads**-0.5), (layer.w_up, M**-0.5),
        (layer.w_down, F**-0.5),
    ]:  # fmt: skip
        assert leaf.std() == pytest.approx(deviation, rel=0.05)
        assert abs(leaf).max() <= 2.0 / 0.8796 * deviation * 1.001


# -- The reference, by hand --------------------------------------------------------------------------------------------
TINY = dataclasses.replace(small.MODEL, d_model=16, n_kv=2, d_head=4, vocab=24, d_ff=20)
BY_HAND = dataclasses.replace(small.TRAINING, warmup_steps=4, steps_for_lr=12, learning_rate=0.5, adam_eps=0.5)


@pytest.mark.parametrize("warmup, rates", [
    (4, {0: 0.125, 1: 0.25, 3: 0.5, 4: 0.5, 8: 0.5 * (0.1 + 0.9 / 2), 12: 0.05, 13: 0.05, 1000: 0.05}),
    (0, {0: 0.5, 6: 0.5 * (0.1 + 0.9 / 2), 12: 0.05}),
    (12, {0: 0.5 / 12, 11: 0.5, 12: 0.05, 13: 0.05}),  # without a NaN
])  # fmt: skip
def test_learning_rate(warmup, rates):
    """It rises to lr over warmup_steps, falls by half a cosine to a tenth at steps_for_lr, and stays; so does that of
    train.py."""
    training = dataclasses.replace(BY_HAND, warmup_steps=warmup)
    for step, expected in rates.items():
        assert reference.learning_rate(step, training) == pytest.approx(expected, rel=1e-12), step
        assert float(train.learning_rate(training, jnp.uint32(step))) == pytest.approx(expected, rel=1e-5), step


def test_adamw_by_hand():
    """Two steps from zero moments decay matrices alone, clip by the norm of all leaves, and correct the bias."""
    weights = jax.tree.map(np.float64, reference.random_weights(TINY, 0))
    zeros = jax.tree.map(np.zeros_like, weights)
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    grads = jax.tree.map(lambda leaf: np.full_like(leaf, 3.0), weights)
    g = 1 / math.sqrt(count)  # each entry of a gradient of equal entries whose norm is clipped to 1
    assert reference.global_norm(grads) == pytest.approx(3 * math.sqrt(count))

    new, mu, nu = reference.adamw_update(weights, zeros, zeros, grads, 0, BY_HAND)
    step = g / (g + 0.5)  # bias correction undoes the averages exactly
    np.testing.assert_allclose(new["embed"], weights["embed"] - 0.125 * step, rtol=1e-12)
    np.testing.assert_allclose(new["unembed"], weights["unembed"] - 0.125 * step, rtol=1e-12)
    for name, old in weights["transformer"].items():
        decay = 0.0 if name.startswith("ln") else 0.1
        np.testing.assert_allclose(new["transformer"][name], old - 0.125 * (step + decay * old), rtol=1e-12)
    np.testing.assert_allclose(mu["final_layer_norm"], 0.1 * g, rtol=1e-12)
    np.testing.assert_allclose(nu["final_layer_norm"], 0.05 * g**2, rtol=1e-12)

    half = jax.tree.map(lambda leaf: np.full_like(leaf, -g / 2), weights)  # its norm is 1/2: not clipped
    newer, mu, nu = reference.adamw_update(new, mu, nu, half, 1, BY_HAND)
    m_hat = (0.9 * 0.1 * g - 0.1 * g / 2) / (1 - 0.9**2)
    v_hat = (0.95 * 0.05 * g**2 + 0.05 * g**2 / 4) / (1 - 0.95**2)
    step = m_hat / (math.sqrt(v_hat) + 0.5)
    np.testing.assert_allclose(newer["embed"], new["embed"] - 0.25 * step, rtol=1e-12)


def test_random_batches_hold_what_the_tests_are_about():
    """Every row has several segments, some rows begin inside one, and some positions are no targets."""
    batch = reference.random_batch(TINY, 4, 32, 0)
    assert (batch.is_seq_start[:, 1:].sum(axis=1) >= 1).all()
    assert batch.is_seq_start[:, 0].tolist() == [True, False, True, False]
    assert 0.5 < batch.is_target.mean() < 1
    assert batch.targets.dtype == np.uint32 and batch.targets.max() < TINY.vocab
