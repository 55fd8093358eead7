"""The smallest trainer: another model, on a mesh of axes a, t and c. No room of the house knows it.

    python -m tests.abc_trainer --config-dir=tests --config-name=abc
    python -m tools.plan program=tests.abc_trainer --config-dir=tests --config-name=abc

The model predicts each token from the one before, through one hidden layer. Rows are split over a and t, the hidden
layer and the vocabulary over c; the weights over all.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from runtime.check import batch_shapes, check_sizes, report_check
from runtime.config.command_line import run
from runtime.config.keys import Count, RunConfig
from runtime.run import Run, start, with_shardings
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import bool_, f32, pytree_dataclass, u32
from shardlib.typed import typed
from train import Training, adamw_step


@dataclass(frozen=True, kw_only=True)
class Mesh:
    a: Count  # half of the rows' split
    t: Count  # the other half
    c: Count  # hidden layer and vocabulary


@dataclass(frozen=True, kw_only=True)
class Model:
    width: Count  # M
    hidden: Count  # F
    vocab: Count  # V


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    mesh: Mesh
    model: Model
    training: Training


@pytree_dataclass
class TokenBatch:
    targets: u32['B/a/t L']
    is_seq_start: bool_['B/a/t L']
    is_target: bool_['B/a/t L']


@pytree_dataclass
class Weights:
    table: f32['V/c M/a/t']
    w_in: f32['M/a/t F/c']
    w_out: f32['M/a/t F/c']


@pytree_dataclass
class State:
    weights: Weights
    adam_mu: Weights
    adam_nu: Weights


@pytree_dataclass
class Metrics:
    loss: f32['']
    grad_norm: f32['']
    skipped_steps: u32['']
    grad_norm_of: f32['weights']


def init_state(model: Model, seed: jax.Array) -> State:
    shapes = {
        'table': (model.vocab, model.width),
        'w_in': (model.width, model.hidden),
        'w_out': (model.width, model.hidden),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    weights = Weights(**{name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())})
    return State(weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)))


@typed
def loss_sum(bos_id: int, weights: Weights, batch: TokenBatch) -> f32['+a +t +c']:
    table = shardops.all_gather('V/c M/a/t -> V/c M', weights.table)
    w_in = shardops.all_gather('M/a/t F/c -> M F/c', weights.w_in)
    w_out = shardops.all_gather('M/a/t F/c -> M F/c', weights.w_out)
    first = batch.is_seq_start.at[:, 0].set(True)
    inputs = jnp.where(first, jnp.uint32(bos_id), jnp.roll(batch.targets, 1, axis=1))
    x = shardops.index_unreduced('[V/c] M, B/a/t L -> B/a/t L M +c', table, inputs)
    x = shardops.psum('B/a/t L M +c -> B/a/t L M', x)
    hidden = jnp.tanh(shardops.einsum_unreduced('B/a/t L M, M F/c -> B/a/t L F/c', x, w_in))
    y = shardops.einsum_unreduced('B/a/t L F/c, M F/c -> B/a/t L M +c', hidden, w_out)
    x = x + shardops.psum('B/a/t L M +c -> B/a/t L M', y)
    logits = shardops.einsum_unreduced('B/a/t L M, V/c M -> B/a/t L V/c', x, table)
    total = shardops.psum('B/a/t L +c -> B/a/t L', shardops.sum_unreduced('B/a/t L V/c -> B/a/t L +c', jnp.exp(logits)))
    at_target = shardops.index_unreduced('B/a/t L [V/c], B/a/t L -> B/a/t L +c', logits, batch.targets)
    loss = shardops.pending('B/a/t L -> B/a/t L +c', jnp.log(total)) - at_target
    return shardops.sum_unreduced('B/a/t L +c -> +a +t +c', loss * batch.is_target.astype(jnp.float32))


@typed
def training_step(
    training: Training, bos_id: int, state: State, skipped: u32[''], step: u32[''], batch: TokenBatch
) -> tuple[State, Metrics]:
    targets = shardops.psum(
        '+a +t -> ', shardops.sum_unreduced('B/a/t L -> +a +t', batch.is_target.astype(jnp.float32))
    )

    def loss(weights: Weights, batch: TokenBatch) -> f32['+a +t +c']:
        return loss_sum(bos_id, weights, batch) / targets

    def add(sums: tuple[f32['+a +t +c'], Weights], batch: TokenBatch) -> tuple[tuple[f32['+a +t +c'], Weights], None]:
        return jax.tree.map(jnp.add, sums, shardops.value_and_grad(loss)(state.weights, batch)), None

    regroup = functools.partial(shardops.regroup, 'B/a/t L -> parts R/a/t L', parts=training.microbatches)
    zero = shardops.zeros('+a +t +c', f32), jax.tree.map(jnp.zeros_like, state.weights)
    (value, gradient), _ = lax.scan(add, zero, jax.tree.map(regroup, batch))
    squares = [shardops.sum_unreduced('... -> +a +t +c', leaf * leaf) for leaf in jax.tree.leaves(gradient)]
    squares = shardops.psum('weights +a +t +c -> weights', jnp.stack(squares))
    metrics = Metrics(
        loss=shardops.psum('+a +t +c -> ', value),
        grad_norm=jnp.sqrt(shardops.sum_unreduced('weights -> ', squares)),
        skipped_steps=skipped,
        grad_norm_of=jnp.sqrt(squares),
    )
    return adamw_step(training, Weights(table=0.0, w_in=1.0, w_out=1.0), state, gradient, step), metrics


@typed
def validation_step(
    bos_id: int, weights: Weights, loss: f32[''], targets: f32[''], batch: TokenBatch
) -> tuple[f32[''], f32['']]:
    count = shardops.psum('+a +t -> ', shardops.sum_unreduced('B/a/t L -> +a +t', batch.is_target.astype(jnp.float32)))
    return loss + shardops.psum('+a +t +c -> ', loss_sum(bos_id, weights, batch)), targets + count


def mapped_steps(config: Config, bos_id: int) -> tuple[typed_shard_map, typed_shard_map]:
    step = functools.partial(training_step, config.training, bos_id)
    return typed_shard_map(step), typed_shard_map(functools.partial(validation_step, bos_id))


def shapes(config: Config) -> tuple[State, TokenBatch]:
    state = jax.eval_shape(functools.partial(init_state, config.model), np.uint32(0))
    return check_sizes(config, State, state), batch_shapes(config, TokenBatch)


def main(config: Config) -> None:
    """Trains the smallest model."""
    state, batch = shapes(config)
    if config.check_only:
        return report_check(config, mapped_steps(config, bos_id=0), state, batch)
    with jax.set_mesh(start(config)), Run(config, TokenBatch) as run:
        step, validate = mapped_steps(config, run.data.bos_id)
        state, batch, zero = with_shardings(state, State), with_shardings(batch, TokenBatch), np.uint32(0)
        step = run.compile(jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch), __file__)
        validate = jax.jit(validate)
        state = run.first_state(state, functools.partial(init_state, config.model))
        for number in run.steps():
            state, metrics = step(state, zero, np.uint32(number), run.data.load(number))
            run.log(number, state, metrics)
            run.validate_if_due(number, validate, state.weights)
            run.save_if_due(number, state)


if __name__ == '__main__':
    run(main, Config)
