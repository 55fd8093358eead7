"""The reference against what it cannot share a mistake with: differences, scalar loops, numbers worked out by hand."""

import cmath
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

MODEL = types.SimpleNamespace(
    d_model=16, n_q_per_kv=2, n_kv=2, d_head=4, layers=2, vocab=24, d_ff=20, rope_max_timescale=50, norm_eps=1e-6
)
TRAINING = types.SimpleNamespace(
    warmup_steps=4,
    steps_for_lr=12,
    learning_rate=0.5,
    cosine_learning_rate_final_fraction=0.1,
    adam_b1=0.9,
    adam_b2=0.95,
    adam_eps=1e-8,
    weight_decay=0.1,
    max_grad_norm=1.0,
)


def with_training(**changes):
    return types.SimpleNamespace(**(vars(TRAINING) | changes))


def test_gradient_is_that_of_finite_differences():
    """Each leaf's float64 gradient along a random direction is the loss's central difference, to 1e-7."""
    weights = jax.tree.map(np.float64, reference.random_weights(MODEL, 0))
    batch = reference.random_batch(MODEL, 2, 12, 0)
    _, grads = reference.loss_and_grad(weights, batch, MODEL)
    leaves, tree = jax.tree.flatten(weights)
    rng = np.random.default_rng(1)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        assert grad.dtype == np.float64
        direction = rng.standard_normal(grad.shape)
        direction /= np.linalg.norm(direction)
        losses = []
        for step in [1e-5, -1e-5]:
            moved = [*leaves[:i], leaves[i] + step * direction, *leaves[i + 1 :]]
            losses.append(reference.loss(tree.unflatten(moved), batch, MODEL))
        assert np.sum(grad * direction) == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-6, abs=1e-9)


def scalar_logits(weights, batch, model, row, bos_id):
    """One row's logits in scalar Python: rotary by complex numbers, segments by numbering, sums by sum()."""
    t = jax.tree.map(lambda leaf: leaf.astype(float).tolist(), weights)
    length, half = batch.targets.shape[1], model.d_head // 2
    segments = [int(batch.is_seq_start[row, 1 : i + 1].sum()) for i in range(length)]
    x = []
    for i in range(length):
        first = i == 0 or segments[i] != segments[i - 1]
        x.append(t["embed"][bos_id if first else int(batch.targets[row, i - 1])])

    def norm(vector, scale):
        root = math.sqrt(sum(a**2 for a in vector) / len(vector) + model.norm_eps)
        return [a / root * s for a, s in zip(vector, scale)]

    def dot(a, b):
        return sum(i * j for i, j in zip(a, b))

    def pairs(vector, position):
        """The halves as complex numbers, turned; q·k is then the real part of q times conj(k)."""
        angles = [position / model.rope_max_timescale ** (2 * i / model.d_head) for i in range(half)]
        return [complex(vector[i], vector[i + half]) * cmath.exp(1j * angles[i]) for i in range(half)]

    for layer in range(model.layers):
        w = {name: leaf[layer] for name, leaf in t["transformer"].items()}
        h = [norm(vector, w["ln1"]) for vector in x]
        x = [list(vector) for vector in x]
        for k in range(model.n_kv):
            for q in range(model.n_q_per_kv):
                of_head = {
                    "q": [w["w_q"][m][q][k] for m in range(model.d_model)],
                    "k": [w["w_kv"][0][m][k] for m in range(model.d_model)],
                    "v": [w["w_kv"][1][m][k] for m in range(model.d_model)],
                }
                columns = {name: [[row[d] for row in of_head[name]] for d in range(model.d_head)] for name in of_head}
                queries = [pairs([dot(vector, c) for c in columns["q"]], i) for i, vector in enumerate(h)]
                keys = [pairs([dot(vector, c) for c in columns["k"]], i) for i, vector in enumerate(h)]
                values = [[dot(vector, c) for c in columns["v"]] for vector in h]
                for i in range(length):
                    seen = [j for j in range(i + 1) if segments[j] == segments[i]]
                    raised = [math.exp(dot(queries[i], [z.conjugate() for z in keys[j]]).real) for j in seen]
                    for d in range(model.d_head):
                        o = sum(p * values[j][d] for p, j in zip(raised, seen)) / sum(raised)
                        for m in range(model.d_model):
                            x[i][m] += o * w["w_o"][m][q][k][d]
        for vector in x:
            h = norm(vector, w["ln2"])
            for f in range(model.d_ff):
                gate = dot(h, [w["w_gate"][m][f] for m in range(model.d_model)])
                up = dot(h, [w["w_up"][m][f] for m in range(model.d_model)])
                for m in range(model.d_model):
                    vector[m] += gate / (1 + math.exp(-gate)) * up * w["w_down"][m][f]
    return [[dot(norm(v, t["final_layer_norm"]), column) for column in t["unembed"]] for v in x]


def test_equals_scalar_python():
    """Logits and loss equal those of a second implementation in Python's floats, to 1e-12, with a bos_id of 3."""
    weights = reference.random_weights(MODEL, 2)
    batch = reference.random_batch(MODEL, 2, 7, 2)
    expected = np.array([scalar_logits(weights, batch, MODEL, row, bos_id=3) for row in range(2)])
    np.testing.assert_allclose(reference.logits(weights, batch, MODEL, bos_id=3), expected, atol=1e-12)

    losses = []
    for row in range(2):
        for i in range(7):
            if batch.is_target[row, i]:
                raised = [math.exp(score) for score in expected[row, i]]
                losses.append(-math.log(raised[batch.targets[row, i]] / sum(raised)))
    assert len(losses) < 14
    assert reference.loss(weights, batch, MODEL, bos_id=3) == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_lower_precision_is_near_but_not_the_same():
    """float32 is within 1e-5 of float64 and bfloat16 within 5 %, further away; results are in `dtype`."""
    weights, batch = reference.random_weights(MODEL, 0), reference.random_batch(MODEL, 2, 12, 0)
    distances = []
    _, true = reference.loss_and_grad(weights, batch, MODEL)
    for compute_dtype in [None, jnp.bfloat16]:
        _, grads = reference.loss_and_grad(weights, batch, MODEL, dtype=np.float32, compute_dtype=compute_dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
        off = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), grads, true)
        distances.append(max(jax.tree.leaves(off)))
    assert 0 < distances[0] < 1e-5 < 1e-3 < distances[1] < 0.05


@pytest.mark.parametrize(
    "step, expected",
    [(0, 0.125), (1, 0.25), (3, 0.5), (4, 0.5), (8, 0.5 * (0.1 + 0.9 / 2)), (12, 0.05), (13, 0.05), (1000, 0.05)],
)
def test_learning_rate(step, expected):
    """It rises to lr over warmup_steps, falls by half a cosine to a tenth at steps_for_lr, and stays."""
    assert reference.learning_rate(step, TRAINING) == pytest.approx(expected, rel=1e-12)


def test_learning_rate_at_the_corners():
    """warmup_steps of 0 starts at lr; equal to steps_for_lr it goes from lr to the floor without a NaN."""
    assert reference.learning_rate(0, with_training(warmup_steps=0)) == 0.5
    corner = with_training(warmup_steps=12)
    assert [reference.learning_rate(step, corner) for step in [11, 12, 13]] == [0.5, 0.05, 0.05]


def test_adamw_by_hand():
    """Two steps from zero moments decay matrices alone, clip by the norm of all leaves, and correct the bias."""
    weights = jax.tree.map(np.float64, reference.random_weights(MODEL, 0))
    zeros = jax.tree.map(np.zeros_like, weights)
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    grads = jax.tree.map(lambda leaf: np.full_like(leaf, 3.0), weights)
    g = 1 / math.sqrt(count)  # each entry of a gradient of equal entries whose norm is clipped to 1
    assert reference.global_norm(grads) == pytest.approx(3 * math.sqrt(count))

    training = with_training(adam_eps=0.5)
    new, mu, nu = reference.adamw_update(weights, zeros, zeros, grads, 0, training)
    step = g / (g + 0.5)  # bias correction undoes the averages exactly
    np.testing.assert_allclose(new["embed"], weights["embed"] - 0.125 * step, rtol=1e-12)
    np.testing.assert_allclose(new["unembed"], weights["unembed"] - 0.125 * step, rtol=1e-12)
    for name, old in weights["transformer"].items():
        decay = 0.0 if name.startswith("ln") else 0.1
        np.testing.assert_allclose(new["transformer"][name], old - 0.125 * (step + decay * old), rtol=1e-12)
    np.testing.assert_allclose(mu["final_layer_norm"], 0.1 * g, rtol=1e-12)
    np.testing.assert_allclose(nu["final_layer_norm"], 0.05 * g**2, rtol=1e-12)

    small = jax.tree.map(lambda leaf: np.full_like(leaf, -g / 2), weights)  # its norm is 1/2: not clipped
    newer, mu, nu = reference.adamw_update(new, mu, nu, small, 1, training)
    m_hat = (0.9 * 0.1 * g - 0.1 * g / 2) / (1 - 0.9**2)
    v_hat = (0.95 * 0.05 * g**2 + 0.05 * g**2 / 4) / (1 - 0.95**2)
    step = m_hat / (math.sqrt(v_hat) + 0.5)
    np.testing.assert_allclose(newer["embed"], new["embed"] - 0.25 * step, rtol=1e-12)


def test_random_batches_hold_what_the_tests_are_about():
    """Every row has several segments, some rows begin inside one, and some positions are no targets."""
    batch = reference.random_batch(MODEL, 4, 32, 0)
    assert (batch.is_seq_start[:, 1:].sum(axis=1) >= 1).all()
    assert batch.is_seq_start[:, 0].tolist() == [True, False, True, False]
    assert 0.5 < batch.is_target.mean() < 1
    assert batch.targets.dtype == np.uint32 and batch.targets.max() < MODEL.vocab
