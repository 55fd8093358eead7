"""Optimizers and schedules beside train.py's AdamW and cosine, for the weights of any model: Muon, Adafactor, moments
in bfloat16, an average of the weights.

    types = state_type(training, narrowed(Weights, shapes))         # the state's types: weights, moments, average
    state = first_state(types, weights)
    state = step(training, types, decayed, state, gradient, number)                 # within a training step

Weights may have any types; the dim M, d_model, tells which are matrices (`row_of`). All mathematics and communication
of the optimizers is in this file; z_loss and dropout, which belong to the loss, are in models/. Legend as in train.py.

To change: an optimizer, its function and `state_type`; which weights Muon takes, `row_of`; a schedule, `learning_rate`.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import train
from models.dropout import mixed, random_bits
from runtime.config.keys import Count, Decay, Momentum, NotNegative, Steps
from shardlib import shardops
from shardlib.mesh import mapped_axes
from shardlib.shardtypes import ArrayType, DType, f32, map_type, pytree_dataclass, scope, u32
from shardlib.spec import Dim, Spec
from shardlib.typed import typed

MUON_MOMENTUM = 0.95  # Jordan et al. 2024
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # a, b and c of Jordan et al. 2024, for five steps
FACTORED_DECAY, FACTORED_EPS, LEAST_SCALE, MOST_CHANGE = 0.8, 1e-30, 1e-3, 1.0  # Shazeer and Stern 2018, algorithm 4


# == Hyperparameters ===================================================================================================
@dataclass(frozen=True, kw_only=True)
class Training(train.Training):
    # After the warmup, cosine and linear fall to their floor at steps_for_lr; the others do not end by themselves.
    schedule: Literal['cosine', 'linear', 'constant', 'inverse_sqrt'] = 'cosine'
    # constant and inverse_sqrt: from this step on a line to the floor at steps_for_lr multiplies the rate; null: never.
    # A run without it may be resumed with it.
    decay_from: Steps | None = None
    # The batch doubles at each of these steps, up to tokens.batch rows. Smaller batches have fewer microbatches.
    batch_doubles_at: tuple[Count, ...] = ()
    # muon: for matrices, with adamw for all else; adafactor: learning_rate is relative to a weight's root mean square.
    optimizer: Literal['adamw', 'muon', 'adafactor'] = 'adamw'
    # Type of moments at rest, 4 or 2 bytes a weight each; bfloat16 rounds stochastically.
    moment_dtype: Literal['float32', 'bfloat16'] = 'float32'
    ema_decay: Momentum = 0.0  # decay of the weights' average, which is validated and exported; 0: no average
    z_loss: NotNegative = 0.0  # adds z_loss · log² of the softmax's denominator to each target's loss
    dropout: Decay = 0.0  # share of layers' outputs and of attention's probabilities that is dropped

    def __post_init__(self) -> None:
        own_end = self.schedule in ('cosine', 'linear')
        if self.decay_from is not None and own_end:
            raise ValueError(f'decay_from: schedule {self.schedule} falls from the warmup on: set it to constant')
        if self.decay_from is not None and not self.warmup_steps <= self.decay_from < self.steps_for_lr:
            raise ValueError(f'decay_from: expected a step from {self.warmup_steps} to below {self.steps_for_lr}')
        if list(self.batch_doubles_at) != sorted(set(self.batch_doubles_at)):
            raise ValueError('batch_doubles_at: expected steps in increasing order')
        if self.microbatches % (least := 2 ** len(self.batch_doubles_at)):
            halved = f'training.microbatches = {self.microbatches} is halved for each of these steps'
            raise ValueError(f'batch_doubles_at: {halved}: set it to a multiple of {least}')
        if self.optimizer == 'adafactor' and self.moment_dtype != 'float32':
            raise ValueError('moment_dtype: adafactor keeps only rows and columns, which are small: set it to float32')


def learning_rate(training: Training, step: jax.Array) -> jax.Array:
    """Linear warmup; then train.py's cosine, a line, a constant (with `decay_from`: Hu et al. 2024, section 4, with the
    line of Hägele et al. 2024), or 1 / sqrt(step) (Vaswani et al. 2017, section 5.3)."""
    if training.schedule == 'cosine':
        return train.learning_rate(training, step)
    step, warmup = step.astype(jnp.float32), max(training.warmup_steps, 1)
    rate = training.learning_rate * jnp.minimum(1.0, (step + 1) / warmup)
    if training.schedule == 'inverse_sqrt':
        rate = rate * jnp.sqrt(warmup / jnp.maximum(step + 1, warmup))
    start = training.warmup_steps if training.schedule == 'linear' else training.decay_from
    if start is None:
        return rate
    fraction = jnp.clip((step - start) / max(training.steps_for_lr - start, 1), 0.0, 1.0)
    return rate * (1 - (1 - training.cosine_learning_rate_final_fraction) * fraction)


# bfloat16's bits: zarr, and so a checkpoint, has no bfloat16.
BITS = DType('u16', jnp.uint16)


# == State =============================================================================================================
def row_of(spec: Spec) -> int | None:
    """The dim that counts a matrix' rows: dims before it count matrices, dims after it are the columns.

    It is M if a dim follows it, or the vocabulary: 'layers 2 M/d K/t D' is 2·layers matrices M × KD, 'V/t M/d'
    one V × M. None for norms and biases.
    """
    if 'M' in spec.names[:-1]:
        return spec.names.index('M')
    return 0 if spec.names[0] == 'V' and len(spec.names) > 1 else None


def is_matrix(spec: Spec) -> bool:
    """Whether Muon takes it: a matrix of a layer, no embedding."""
    row = row_of(spec)
    return row is not None and spec.names[row] == 'M'


@pytree_dataclass
class Factored:
    """A matrix' second moments: the means of its rows and of its columns, split as its dims are."""

    rows: Any
    columns: Any


@pytree_dataclass
class State:
    """Bytes a parameter, divided over the devices that split it: 12 with adamw, 8 with muon, 4 with adafactor; an
    average adds 4. A moment in bfloat16 takes 2 in place of 4."""

    weights: Any
    adam_mu: Any  # first moments, a tree like the weights; None under adafactor
    adam_nu: Any  # second moments; None for Muon's matrices, `Factored` for Adafactor's
    ema: Any = None  # the weights' average, if there is one


def state_type(training: Training, weights: Any) -> State:
    """The state's types for weights of these types, a tree of array types as `narrowed` returns."""
    weights = map_type(lambda array: array, weights)
    moment = BITS if training.moment_dtype == 'bfloat16' else f32

    def first(array):
        return None if training.optimizer == 'adafactor' else ArrayType(moment, array.spec)

    def second(array):
        if training.optimizer == 'muon' and is_matrix(array.spec):
            return None
        if training.optimizer == 'adafactor' and (row := row_of(array.spec)) is not None:
            dims = array.spec.dims
            columns = Spec((*dims[:row], *dims[row + 1 :]))
            return Factored(ArrayType(f32, Spec(dims[: row + 1])), ArrayType(f32, columns))
        return ArrayType(moment, array.spec)

    ema = weights if training.ema_decay else None
    return State(weights, jax.tree.map(first, weights), jax.tree.map(second, weights), ema)


def first_state(types: State, weights: Any) -> State:
    """Zero moments, and an average that begins at the weights. Takes global arrays, outside of the mapped step."""

    def zeros(type_, weights):
        def of(array, weight):
            if isinstance(array, Factored):
                row = len(array.rows.spec.dims)
                shapes = weight.shape[:row], weight.shape[: row - 1] + weight.shape[row:]
                return Factored(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
            return None if array is None else jnp.zeros(weight.shape, array.element.dtype)

        return jax.tree.map(lambda _, array, weight: of(array, weight), types.weights, type_, weights)

    ema = None if types.ema is None else jax.tree.map(jnp.copy, weights)
    return State(weights, zeros(types.adam_mu, weights), zeros(types.adam_nu, weights), ema)


def averaged(state: State) -> Any:
    """The weights that are validated and exported."""
    return state.weights if state.ema is None else state.ema


# == AdamW =============================================================================================================
def adamw(training: Training, m, n, g, count):
    """The direction and both moments, by train.py's arithmetic (Loshchilov and Hutter 2019, algorithm 2)."""
    b1, b2 = training.adam_b1, training.adam_b2
    m, n = b1 * m + (1 - b1) * g, b2 * n + (1 - b2) * g**2
    return (m / (1 - b1**count)) / (jnp.sqrt(n / (1 - b2**count)) + training.adam_eps), m, n


# == Muon ==============================================================================================================
def muon(spec: Spec, m, g):
    """The direction and the momentum (Jordan et al. 2024, with Nesterov's). The direction is scaled to AdamW's size by
    0.2 · sqrt(max(rows, columns)) (Liu et al. 2025, 2.2), so that AdamW's learning rate and weight decay serve."""
    m = MUON_MOMENTUM * m + g
    row = row_of(spec)
    sizes = [size * math.prod(map(shardops.axis_size, dim.axes)) for dim, size in zip(spec.dims, g.shape)]
    scale = 0.2 * max(sizes[row], math.prod(sizes[row + 1 :])) ** 0.5
    return scale * orthogonalized(spec, g + MUON_MOMENTUM * m), m


@scope
def orthogonalized(spec: Spec, x):
    """Moves the singular values of each matrix to about 1, by five steps of Newton and Schulz.

    Whole matrices are dealt out over all devices that split them; each device computes on its own ones, and the parts
    go back:

        'stack M/d K/t D'           all matrices in one dim: 'layers 2 M/d K/t D'
        'turns d t M/d K/t D'       equally many for each device, padded with zero matrices
        'turns d/d t M K/t D'       one all-to-all for each axis
        'turns d/d t/t M K D'       whole

    The dims d and t count devices; that `turns` fits them is not proved (docs/notation.md).
    Sends: a device's part of the matrices, in the type of activations, once for each axis that splits them, and back.
    With more devices than matrices some orthogonalize zeros.
    """
    row, shape, element = row_of(spec), x.shape, x.dtype
    stacked = next(place for place, dim in enumerate(spec.dims) if place == row or dim.axes)  # experts may be split
    stack, dims = math.prod(shape[:stacked]), spec.dims[stacked:]
    matrix = dims[row - stacked :]
    axes = [axis for dim in matrix for axis in dim.axes]  # a dim's major axis first
    devices = [int(shardops.axis_size(axis)) for axis in axes]
    turns = -(-stack // math.prod(devices))

    def padded(x):
        zeros = turns * math.prod(devices) - stack
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, zeros, 0), *[(0, 0, 0)] * (x.ndim - 1)])
        return x.reshape(turns, *devices, *x.shape[1:])

    def unpadded(x):
        return lax.dynamic_slice_in_dim(x.reshape(-1, *x.shape[1 + len(axes) :]), 0, stack)

    x = x.reshape(stack, *shape[stacked:]).astype(train.act.dtype)
    rest, counts = ' '.join(map(str, dims)), ' '.join(('turns', *axes))
    x = shardops.local(f'stack {rest} -> {counts} {rest}', padded, x, turns=turns)
    path = [Spec((Dim('turns'), *map(Dim, axes), *dims))]
    for axis in reversed(axes):  # a dim's minor axis first
        after = [
            Dim(axis, (axis,))
            if dim.name == axis
            else replace(dim, axes=tuple(name for name in dim.axes if name != axis))
            for dim in path[-1].dims
        ]
        path.append(Spec((*after,)))
        x = shardops.all_to_all(f'{path[-2]} -> {path[-1]}', x)

    whole, stack_dims = x.shape, path[-1].dims[: -len(matrix)]
    x = x.reshape(*whole[: len(stack_dims) + 1], -1)
    is_tall = x.shape[-2] > x.shape[-1]  # products of the shorter side with itself
    x = newton_schulz(Spec(stack_dims), jnp.swapaxes(x, -1, -2) if is_tall else x)
    x = (jnp.swapaxes(x, -1, -2) if is_tall else x).reshape(whole)

    for now, before in zip(path[:0:-1], path[-2::-1]):
        x = shardops.all_to_all(f'{now} -> {before}', x)
    x = shardops.local(f'{counts} {rest} -> stack {rest}', unpadded, x, stack=stack)
    return x.reshape(shape).astype(element)


@scope
def newton_schulz(spec: Spec, x):
    """x = a·x + (b·A + c·A²)·x with A = x·xᵀ, five times, from x over its norm (Jordan et al. 2024)."""
    (a, b, c), wide = NEWTON_SCHULZ, x.astype(jnp.float32)
    squares = shardops.sum_unreduced(f'{spec} R C -> {spec}', wide**2)
    x = (wide / (jnp.sqrt(squares)[..., None, None] + 1e-7)).astype(x.dtype)

    def iterate(x, _):
        gram = shardops.einsum_unreduced(f'{spec} R C, {spec} S C -> {spec} R S', x, x)
        y = b * gram + c * shardops.einsum_unreduced(f'{spec} R S, {spec} S T -> {spec} R T', gram, gram)
        return a * x + shardops.einsum_unreduced(f'{spec} R T, {spec} T C -> {spec} R C', y, x), None

    return lax.scan(iterate, x, None, length=5)[0]


# == Adafactor =========================================================================================================
@scope
def mean(spec: Spec, kept: Sequence[int], x):
    """The mean over the dims that are not kept, the same on all their devices. Sends 4 bytes an element of it."""
    gone = [place for place in range(x.ndim) if place not in kept]
    axes = [axis for place in gone for axis in spec.dims[place].axes]
    count = math.prod(x.shape[place] for place in gone) * math.prod(map(shardops.axis_size, axes))
    whole = Spec(tuple(spec.dims[place] for place in kept))
    owed = replace(whole, pending=tuple(axis for axis in mapped_axes() if axis in axes))
    total = shardops.sum_unreduced(f'{spec} -> {owed}', x)
    return (shardops.psum(f'{owed} -> {whole}', total) if axes else total) / count


@scope
def adafactor(spec: Spec, w, n, g, count):
    """The direction and the second moments (Shazeer and Stern 2018, algorithm 4, without momentum). A matrix' moments
    are the product of its rows' and its columns' means; each matrix of a stack has its own."""
    row, every = row_of(spec), range(g.ndim)
    kept = 1 - count**-FACTORED_DECAY  # the moments' decay, 0 in the first step

    def moving(old, new):
        return kept * old + (1 - kept) * new

    square = g**2 + FACTORED_EPS
    if row is None:
        matrices, n = (), moving(n, square)
        change = g * lax.rsqrt(n)
    else:
        matrices, of_rows, of_columns = every[:row], every[: row + 1], (*every[:row], *every[row + 1 :])
        rows = moving(n.rows, mean(spec, of_rows, square))
        columns = moving(n.columns, mean(spec, of_columns, square))
        n = Factored(rows, columns)
        rows = rows / mean(Spec(spec.dims[: row + 1]), matrices, rows)[..., None]
        change = g * jnp.expand_dims(lax.rsqrt(rows), every[row + 1 :]) * jnp.expand_dims(lax.rsqrt(columns), row)
    among = every[len(matrices) :]

    def root_mean_square(x):
        return jnp.expand_dims(jnp.sqrt(mean(spec, matrices, x**2)), among)

    change = change / jnp.maximum(1.0, root_mean_square(change) / MOST_CHANGE)
    return jnp.maximum(LEAST_SCALE, root_mean_square(w)) * change, n


# == Step ==============================================================================================================
@scope
def rounded(x, like, spec: Spec, seed):
    """x in `like`'s type: float32, or bfloat16's bits, rounded up or down at random so that the mean is x (Gupta et al.
    2015, 3.1). Rounding to nearest would lose every change below 1/512 of a moment."""
    if like.dtype == jnp.float32:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (random_bits(seed, spec.dims, x.shape) >> np.uint32(16))
    return (bits >> np.uint32(16)).astype(jnp.uint16)


def wide(x):
    """The result of `rounded` in float32."""
    if x.dtype == jnp.float32:
        return x
    return lax.bitcast_convert_type(x.astype(jnp.uint32) << np.uint32(16), jnp.float32)


def seed_of(training: Training, name: str, number: jax.Array) -> jax.Array:
    """A seed, u32[''], for what is drawn under this name in this step."""
    return mixed(mixed(jnp.uint32(training.seed), jnp.uint32(zlib.crc32(name.encode()))), number)


@typed
def step(training: Training, types: State, decayed: Any, state: Any, gradient: Any, number: u32['']):
    """The state after update `number`, from 0. types: `state_type`'s; decayed: factors of weight_decay."""
    rate, count = learning_rate(training, number), number.astype(jnp.float32) + 1

    def updated(path, array, decayed, w, g, m, n):
        spec, name = array.spec, jax.tree_util.keystr(path)
        if training.optimizer == 'adafactor':
            direction, n = adafactor(spec, w, n, g, count)
        elif n is None:
            direction, new = muon(spec, wide(m), g)
            m = rounded(new, m, spec, seed_of(training, f'mu{name}', number))
        else:
            direction, *new = adamw(training, wide(m), wide(n), g, count)
            m = rounded(new[0], m, spec, seed_of(training, f'mu{name}', number))
            n = rounded(new[1], n, spec, seed_of(training, f'nu{name}', number))
        return w - rate * (direction + training.weight_decay * decayed * w), m, n

    triples = jax.tree_util.tree_map_with_path(
        updated, types.weights, decayed, state.weights, gradient, state.adam_mu, state.adam_nu
    )
    weights, mu, nu = [jax.tree.map(lambda _, triple, n=n: triple[n], types.weights, triples) for n in range(3)]
    b = training.ema_decay
    ema = None if state.ema is None else jax.tree.map(lambda a, w: b * a + (1 - b) * w, state.ema, weights)
    return State(weights, mu, nu, ema)
