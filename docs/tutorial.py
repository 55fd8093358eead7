"""Two matrices, trained for a step in three ways: split over devices as weights, as features, and both.

    python -m docs.tutorial

Eight devices are simulated, so that it runs anywhere, in some ten seconds. Each part prints the collectives (the
transfers between devices) of its compiled program, and compares its result with plain numpy. The notation is that of
docs/notation.md; nothing of it need be known before.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from ledger.compiled.collectives import compiled
from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, make_shardings, pytree_dataclass
from shardlib.spec import ShardingError
from shardlib.typed import typed

# == 0. Without devices ================================================================================================
# The model has two matrices and a ReLU between them; the loss is the squared error, summed; a step of gradient descent
# subtracts RATE times the gradient. B rows, M numbers in a row, F features in between.
B, M, F, RATE = 16, 32, 64, 1e-4
rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
x, target, w_in, w_out = draw(B, M), draw(B, M), draw(M, F), draw(M, F)


def numpy_step():
    """The loss, and both matrices after the step; the gradient is the chain rule by hand."""
    before = x @ w_in
    hidden = np.maximum(before, 0)
    error = hidden @ w_out.T - target
    gradient_of_out = 2 * error.T @ hidden
    gradient_of_in = x.T @ ((2 * error @ w_out) * (before > 0))
    return np.sum(error**2), w_in - RATE * gradient_of_in, w_out - RATE * gradient_of_out


def show(title, weights_type, step, mesh):
    """Compiles a step, prints what it sends, runs it, and compares it with numpy."""
    with jax.set_mesh(make_mesh(mesh, devices=jax.devices()[: np.prod(list(mesh.values()))])):
        weights = jax.device_put(weights_type(w_in=w_in, w_out=w_out), make_shardings(weights_type))
        program = jax.jit(typed_shard_map(step)).trace(weights, x, target).lower().compile()
        loss, new = program(*jax.device_put((weights, x, target), program.input_shardings[0]))
    print(f"\n{title}, mesh {mesh}: {weights.w_in.addressable_shards[0].data.shape} of {w_in.shape} on each device")
    for row, times in sorted(compiled(program.as_text(), mesh).items()):
        print(f"  {times} × {row.kind} over {' and '.join(row.axes)}, {row.bytes:,} bytes, {row.phase}")
    for ours, numpys in zip((loss, new.w_in, new.w_out), numpy_step(), strict=True):
        np.testing.assert_allclose(ours, numpys, rtol=1e-4, atol=1e-4)
    print("  loss and new weights are numpy's")


# == 1. Fully sharded data parallelism (FSDP) ==========================================================================
# The devices stand in a row, the mesh axis d. Each has B/d of the rows, and keeps 1/d of each matrix: 'M/d F' says that
# M is split over d and F is not. To multiply, a device needs the whole matrix, so it gathers it, uses it, and drops it.
#
# Each device then has the loss of its own rows. The loss is the sum of these, and nobody has added them up yet: '+d'.
# The gradient comes back as the weights lie, 'M/d F': the backward pass of a gather adds up what all devices have found
# for the matrix and leaves each its part. That is a reduce-scatter, and nobody has to write it.
@pytree_dataclass
class SplitOverD:
    w_in: f32['M/d F']
    w_out: f32['M/d F']


@typed
def fsdp_step(weights: SplitOverD, x: f32['B/d M'], target: f32['B/d M']) -> tuple[f32[''], SplitOverD]:
    def loss(weights: SplitOverD) -> f32['+d']:
        w_in = shardops.all_gather('M/d F -> M F', weights.w_in)
        hidden = jax.nn.relu(shardops.einsum_unreduced('B/d M, M F -> B/d F', x, w_in))
        w_out = shardops.all_gather('M/d F -> M F', weights.w_out)
        error = shardops.einsum_unreduced('B/d F, M F -> B/d M', hidden, w_out) - target
        return shardops.sum_unreduced('B/d M -> +d', error * error)

    value, gradient = shardops.value_and_grad(loss)(weights)
    weights = jax.tree.map(lambda w, g: w - RATE * g, weights, gradient)
    return shardops.psum('+d -> ', value), weights


# Two all-gathers of a part, 32/8 × 64 × 4 = 1,024 bytes; two reduce-scatters of a whole gradient, 8,192 bytes; and the
# loss, 4 bytes, added up on all devices: an all-reduce.
show("FSDP", SplitOverD, fsdp_step, {"d": 8})


# == 2. Tensor parallelism =============================================================================================
# Now the features are split, over the axis t, and all devices see all rows. Each computes F/t of the features with its
# part of w_in, which it has: nothing is gathered. The second product is a sum over F, of which each device has but a
# few terms: the result is 'B M +t', a sum not yet taken. (Without '+t' the line is an error; part 4 shows it.)
# psum_scatter takes the sum and leaves each device a part of M. Its backward pass is a gather: the reverse of before.
@pytree_dataclass
class SplitOverT:
    w_in: f32['M F/t']
    w_out: f32['M F/t']


@typed
def tensor_parallel_step(weights: SplitOverT, x: f32['B M'], target: f32['B M/t']) -> tuple[f32[''], SplitOverT]:
    def loss(weights: SplitOverT) -> f32['+t']:
        hidden = jax.nn.relu(shardops.einsum_unreduced('B M, M F/t -> B F/t', x, weights.w_in))
        y = shardops.einsum_unreduced('B F/t, M F/t -> B M +t', hidden, weights.w_out)
        error = shardops.psum_scatter('B M +t -> B M/t', y) - target
        return shardops.sum_unreduced('B M/t -> +t', error * error)

    value, gradient = shardops.value_and_grad(loss)(weights)
    weights = jax.tree.map(lambda w, g: w - RATE * g, weights, gradient)
    return shardops.psum('+t -> ', value), weights


# Activations travel instead of weights: forward the terms of y, 16 × 32 × 4 = 2,048 bytes; backward each device's part
# of the error, 16 × 32/8 × 4 = 256 bytes. With few rows that is less than FSDP sends, with many it is more.
show("Tensor parallelism", SplitOverT, tensor_parallel_step, {"t": 8})


# == 3. Both ===========================================================================================================
# A mesh of 4 × 2: rows and weights over d, features over t. Each line is what it was in one of the parts before, and
# says so: 'M/d F/t' is gathered over d and stays split over t; the sum over F is owed over t alone.
@pytree_dataclass
class SplitOverBoth:
    w_in: f32['M/d F/t']
    w_out: f32['M/d F/t']


@typed
def step(weights: SplitOverBoth, x: f32['B/d M'], target: f32['B/d M/t']) -> tuple[f32[''], SplitOverBoth]:
    def loss(weights: SplitOverBoth) -> f32['+d +t']:
        w_in = shardops.all_gather('M/d F/t -> M F/t', weights.w_in)
        hidden = jax.nn.relu(shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w_in))
        w_out = shardops.all_gather('M/d F/t -> M F/t', weights.w_out)
        y = shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', hidden, w_out)
        error = shardops.psum_scatter('B/d M +t -> B/d M/t', y) - target
        return shardops.sum_unreduced('B/d M/t -> +d +t', error * error)

    value, gradient = shardops.value_and_grad(loss)(weights)
    weights = jax.tree.map(lambda w, g: w - RATE * g, weights, gradient)
    return shardops.psum('+d +t -> ', value), weights


show("Both", SplitOverBoth, step, {"d": 4, "t": 2})


# == 4. A mistake ======================================================================================================
# What if '+t' is left out, and the sum is never taken? The shapes would fit, and each device would go on with its own
# terms. But the string is not what the line computes, and that is an error before anything is compiled.
@typed
def forgotten(weights: SplitOverBoth, x: f32['B/d M']) -> f32['B/d M']:
    w_in = shardops.all_gather('M/d F/t -> M F/t', weights.w_in)
    hidden = jax.nn.relu(shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w_in))
    w_out = shardops.all_gather('M/d F/t -> M F/t', weights.w_out)
    return shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M', hidden, w_out)


with jax.set_mesh(make_mesh({"d": 4, "t": 2})):
    try:
        jax.jit(typed_shard_map(forgotten)).trace(SplitOverBoth(w_in=w_in, w_out=w_out), x)
    except ShardingError as error:
        print(f"\nA forgotten sum:\n{error}")

# train.py is this with a whole model in the place of two matrices: docs/reading.md leads through it.
