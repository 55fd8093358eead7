"""The training step equals a plain, unsharded reference, on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import small

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.fixture(scope="module")
def weights():
    return reference.random_weights(small.MODEL, seed=0)


@pytest.fixture(scope="module")
def truth(weights):
    return reference.loss_and_grad(weights, small.BATCH, small.MODEL)


def distances(ours, truth):
    """Relative distance of each leaf in the 2-norm, by name."""
    ours = reference.as_dict(ours)
    flat = jax.tree_util.tree_leaves_with_path
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(np.float64(b)))
        for (path, a), (_, b) in zip(flat(ours), flat({key: truth[key] for key in ours}), strict=True)
    }  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_gradient_equals_the_reference_in_float32(mesh, microbatches, weights, truth):
    """In float32 the loss is within 1e-6 of float64's, and each leaf of the gradient within 1e-5 of its norm."""
    training = dataclasses.replace(small.TRAINING, microbatches=microbatches)
    with small.on_mesh(*mesh):
        loss, gradient = small.loss_and_gradient(small.MODEL, training, weights, small.BATCH)
    assert abs(float(loss) - float(truth[0])) <= 1e-6 * abs(float(truth[0])), (loss, truth[0])
    far = {name: distance for name, distance in distances(gradient, truth[1]).items() if not distance <= 1e-5}
    assert not far


@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)], ids=["1x1", "4x2"])
def test_bfloat16_is_as_near_as_the_plain_reference(mesh, weights):
    """In bfloat16 loss and gradient are no further from float64 than 1.5 times the plain reference in bfloat16.

    Each distance is the root of the mean square over eight batches, since that of a single loss can be near zero by chance.
    """
    ours, plains = [], []
    for seed in range(8):
        batch = reference.random_batch(small.MODEL, batch=16, length=32, seed=10 + seed)
        loss, gradient = reference.loss_and_grad(weights, batch, small.MODEL)
        with small.on_mesh(*mesh, dtype="bfloat16"):
            our_loss, our_gradient = small.loss_and_gradient(small.MODEL, small.TRAINING, weights, batch)
        plain_loss, plain_gradient = reference.loss_and_grad(
            weights, batch, small.MODEL, dtype=np.float32, compute_dtype=jnp.bfloat16
        )
        ours.append({"loss": abs(our_loss - loss), **distances(our_gradient, gradient)})
        plains.append({"loss": abs(plain_loss - loss), **distances(small.as_weights(plain_gradient), gradient)})
    ratios = {name: root_mean_square(ours, name) / root_mean_square(plains, name) for name in ours[0]}
    assert max(ratios.values()) <= 1.5, ratios


def root_mean_square(distances_of_batches, name):
    return np.sqrt(np.mean([np.float64(each[name]) ** 2 for each in distances_of_batches]))
