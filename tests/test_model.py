"""What the model must not see, and what a step must do: against the reference, and against itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small

import train
from shardlib.proof.jaxprs import scan_counts
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import make_shardings

pytestmark = pytest.mark.usefixtures("proved_elsewhere")  # tests/test_mutation.py does


@pytest.fixture(scope="module")
def weights():
    return reference.random_weights(small.MODEL, seed=0)


def moved_logits(weights, mesh, change):
    """bool[B, L]: where the logits move when `change` is applied to a batch."""
    batch = dataclasses.replace(small.BATCH, targets=small.BATCH.targets.copy())
    with small.on_mesh(*mesh):
        before = small.hidden_and_logits(small.MODEL, weights, batch)
        change(batch)
        after = small.hidden_and_logits(small.MODEL, weights, batch)
    return np.any(before != after, axis=-1)


@pytest.mark.parametrize("mesh", [*small.slow((1, 1)), (4, 2)], ids=["1x1", "4x2"])
def test_no_token_is_seen_from_before_or_from_another_segment(mesh, weights):
    """Changing one token moves the logits of exactly the later positions of its segment: neither the past, nor other
    sequences, nor other rows."""
    position = 12

    def change(batch):
        batch.targets[:, position] = (batch.targets[:, position] + 1) % small.MODEL.vocab

    moved = moved_logits(weights, mesh, change)
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
    carries = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                first, carry = scan_counts(eqn.params)
                carries.extend(v.aval for v in eqn.invars[first : first + carry])
            for value in eqn.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        visit(inner)

    visit(jaxpr.jaxpr)
    unembed = [aval.dtype for aval in carries if aval.shape == (small.MODEL.vocab // 2, small.MODEL.d_model)]
    assert unembed and all(dtype == jnp.float32 for dtype in unembed)


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


def test_the_learning_rate_is_the_references():
    """It agrees at every step, with and without warmup, and where warmup ends at the floor; after the last step it
    stays."""
    for warmup, last in [(2, 10), (0, 10), (10, 10), (3, 4)]:
        training = dataclasses.replace(small.TRAINING, warmup_steps=warmup, steps_for_lr=last)
        for number in range(14):
            ours = float(train.learning_rate(training, jnp.uint32(number)))
            assert ours == pytest.approx(reference.learning_rate(number, training), rel=1e-5), (warmup, last, number)


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
