"""The training step equals a plain, unsharded reference, on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small
from scipy.special import log_softmax

pytestmark = pytest.mark.usefixtures("proved_elsewhere")  # tests/test_mutation.py does


@pytest.fixture(scope="module")
def weights():
    return reference.random_weights(small.MODEL, seed=0)


@pytest.fixture(scope="module")
def truth(weights):
    loss, gradient = reference.loss_and_grad(weights, small.BATCH, small.MODEL)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {np.dtype(np.float64)}
    return loss, gradient


def distances(ours, truth):
    """Relative distance of each leaf in the 2-norm, by name."""
    ours, found = reference.as_dict(ours), {}
    true = jax.tree.leaves({key: truth[key] for key in ours})
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), map(np.float64, true), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = float(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b))
    return found


ONE, TWO, UNROLLED = {"microbatches": 1}, {"microbatches": 2}, {"unroll_layers": True}
CASES = [((1, 1), TWO), ((8, 1), TWO), ((4, 2), TWO), ((2, 4), ONE), ((1, 8), ONE), ((4, 2), UNROLLED)]


@pytest.mark.parametrize("mesh, keys", CASES, ids=str)
def test_gradient_equals_the_reference_in_float32(mesh, keys, weights, truth):
    """The float32 loss is within 1e-6 of float64's, and each leaf of the gradient within 1e-5 of its norm."""
    training = dataclasses.replace(small.TRAINING, **keys)
    with small.on_mesh(*mesh):
        loss, gradient = small.loss_and_gradient(small.MODEL, training, weights, small.BATCH)
    assert abs(float(loss) - float(truth[0])) <= 1e-6 * abs(float(truth[0])), (loss, truth[0])
    far = {name: distance for name, distance in distances(gradient, truth[1]).items() if not distance <= 1e-5}
    assert not far


@pytest.fixture(scope="module")
def plain(weights):
    """The plain reference in bfloat16: loss and gradient."""
    half = {"dtype": np.float32, "compute_dtype": jnp.bfloat16}
    return reference.loss_and_grad(weights, small.BATCH, small.MODEL, **half)


@pytest.mark.parametrize("mesh", [*small.slow((1, 1)), (4, 2)], ids=["1x1", "4x2"])
def test_bfloat16_is_as_near_as_the_plain_reference(mesh, weights, truth, plain):
    """The bfloat16 gradient is no further from float64 than 1.5 times the plain reference in bfloat16."""
    with small.on_mesh(*mesh, dtype="bfloat16"):
        _, gradient = small.loss_and_gradient(small.MODEL, small.TRAINING, weights, small.BATCH)
    ours, plains = distances(gradient, truth[1]), distances(small.as_weights(plain[1]), truth[1])
    far = {name: (ours[name], plains[name]) for name in ours if not ours[name] <= 1.5 * plains[name]}
    assert not far and 1e-3 < max(plains.values()) < 0.05


@pytest.mark.parametrize("mesh", [*small.slow((1, 1)), (4, 2)], ids=["1x1", "4x2"])
def test_the_loss_in_bfloat16_is_as_near_as_the_plain_reference(mesh, weights):
    """So is the loss, by the root mean square over 32 rows, since a single loss can be near by chance."""
    ours, plains = [], []
    for seed in (1, 2):
        batch = reference.random_batch(small.MODEL, batch=16, length=32, seed=seed)
        logits = reference.logits(weights, batch, small.MODEL)
        half = reference.logits(weights, batch, small.MODEL, dtype=np.float32, compute_dtype=jnp.bfloat16)
        for row in range(16):
            alone = dataclasses.replace(batch, is_target=batch.is_target & (np.arange(16) == row)[:, None])
            if alone.is_target.any():
                true = loss_of(logits, alone)
                with small.on_mesh(*mesh, dtype="bfloat16"):
                    ours.append(small.loss_and_gradient(small.MODEL, small.TRAINING, weights, alone)[0] - true)
                plains.append(loss_of(half, alone) - true)
    assert len(ours) >= 30 and np.linalg.norm(ours) <= 1.5 * np.linalg.norm(plains)


def loss_of(logits, batch):
    """The mean of -log softmax over the targets, in float64."""
    of_all, targets = log_softmax(np.float64(logits), axis=-1), batch.targets.astype(int)
    return -np.take_along_axis(of_all, targets[..., None], axis=-1)[batch.is_target].mean()
