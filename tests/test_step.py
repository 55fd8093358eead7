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
def test_bfloat16_is_as_near_as_the_plain_reference(mesh, weights, truth):
    """In bfloat16 loss and gradient are no further from float64 than 1.5 times the plain reference in bfloat16."""
    plain_loss, plain = reference.loss_and_grad(
        weights, small.BATCH, small.MODEL, dtype=np.float32, compute_dtype=jnp.bfloat16
    )
    with small.on_mesh(*mesh, dtype="bfloat16"):
        loss, gradient = small.loss_and_gradient(small.MODEL, small.TRAINING, weights, small.BATCH)
    ours, plains = distances(gradient, truth[1]), distances(small.as_weights(plain), truth[1])
    print({name: (round(ours[name], 4), round(plains[name], 4)) for name in ours}, loss, plain_loss, truth[0])
    assert all(ours[name] <= 1.5 * plains[name] for name in ours)
    assert abs(loss - truth[0]) <= 1.5 * abs(plain_loss - truth[0]) + 1e-4
