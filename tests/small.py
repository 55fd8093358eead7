"""A model that compiles in seconds, with heads enough for every mesh, and ways to run train.py's functions on it."""

import contextlib
import dataclasses
import functools
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import train
from models.huggingface import first_weights
from runtime.config.command_line import run
from runtime.config.keys import Tokens
from runtime.tracking.followers import Followers
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import make_shardings
from train import TokenBatch

MODEL = train.Model(d_model=64, n_q_per_kv=2, n_kv=8, d_head=8, layers=2, vocab=128, d_ff=96, rope_max_timescale=256)
TRAINING = train.Training(
    **dict(seed=0, steps=10, warmup_steps=2, steps_for_lr=10, learning_rate=1e-2),
    **dict(cosine_learning_rate_final_fraction=0.1, adam_b1=0.9, adam_b2=0.95, adam_eps=1e-8, weight_decay=0.1),
    tokens=Tokens(batch=16, len=32),
)
BATCH = reference.random_batch(MODEL, batch=16, length=32, seed=1)


def slow(*cases):
    """Values of a parameter with which a test is slow."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@contextlib.contextmanager
def proved_elsewhere():
    """Leaves out the check, which is half of the time to compile a step, for programs that another test proves."""
    with mock.patch.object(typed_shard_map, "check"):
        yield


START_FOLLOWERS = Followers.start


@contextlib.contextmanager
def followed():
    """Runs have their followers, which conftest.py otherwise leaves out."""
    with mock.patch.object(Followers, "start", START_FOLLOWERS):
        yield


@contextlib.contextmanager
def on_mesh(d, t, dtype="float32"):
    """The mesh d x t of simulated devices, with activations in `dtype`."""
    before = train.act.dtype
    train.act.dtype = dtype
    try:
        with jax.set_mesh(make_mesh({"d": d, "t": t}, devices=jax.devices()[: d * t])):
            yield
    finally:
        train.act.dtype = before


def as_weights(tree) -> train.Weights:
    """The reference's nested dict as train.py's dataclass."""
    return train.Weights(**{**tree, "transformer": train.Layer(**tree["transformer"])})


def state_of(tree) -> train.State:
    """A state with these weights and no moments, placed on the current mesh."""
    weights = as_weights(tree)
    zeros = functools.partial(jax.tree.map, np.zeros_like, weights)
    return jax.device_put(train.State(weights=weights, adam_mu=zeros(), adam_nu=zeros()), make_shardings(train.State))


def batch_of(batch) -> TokenBatch:
    arrays = TokenBatch(
        targets=batch.targets.astype(np.uint32), is_seq_start=batch.is_seq_start, is_target=batch.is_target
    )
    return jax.device_put(arrays, make_shardings(TokenBatch))


@functools.lru_cache
def _compiled(model, training, bos_id, mesh, dtype, loss_chunk):
    return jax.jit(typed_shard_map(functools.partial(train.training_step, model, training, bos_id)))


def step(model, training, state, batch, number=0, bos_id=0):
    """One training step, checked and compiled once for each of its settings; returns the new state and the metrics as
    numpy arrays."""
    mapped = _compiled(model, training, bos_id, jax.sharding.get_mesh(), train.act.dtype, train.LOSS_CHUNK)
    return jax.tree.map(np.asarray, mapped(state, jnp.uint32(0), jnp.uint32(number), batch))


def loss_and_gradient(model, training, weights, batch, bos_id=0):
    """The loss and the gradient of a step: the first moment, with b1 = 0 and no clipping."""
    training = dataclasses.replace(training, adam_b1=0.0, max_grad_norm=1e30)
    state, metrics = step(model, training, state_of(weights), batch_of(batch), bos_id=bos_id)
    return metrics.loss, state.adam_mu


def hidden_and_logits(model, weights, batch, bos_id=0):
    """All logits, B L V: the forward pass with the unembedding applied by numpy."""

    def forward(weights: train.Weights, batch: TokenBatch) -> train.act["B/d L M"]:
        return train.forward(model, TRAINING, bos_id, weights, batch)

    placed = jax.device_put(as_weights(weights), make_shardings(train.Weights))
    hidden = jax.jit(typed_shard_map(forward))(placed, batch_of(batch))
    return np.asarray(hidden, np.float32) @ weights["unembed"].T


def steps_of(module, model=None, training=None):
    """The training step and the validation step of train.py, or of a changed copy, each with its arguments' shapes.

    Args:
      model, training: settings that are others than above. Attention is as written, not a kernel.
    """
    model = module.Model(**vars(MODEL) | {"attention": "einsum"} | (model or {}))
    given = {"tokens": Tokens(batch=16, len=32), "microbatches": 2} | (training or {})
    training = module.Training(**vars(TRAINING) | given)
    mesh = module.Mesh(**dict.fromkeys((field.name for field in dataclasses.fields(module.Mesh)), 1))
    state, batch = module.shapes(types.SimpleNamespace(mesh=mesh, model=model, training=training))
    number, loss = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    step, validate = (functools.partial(f, model, training, 0) for f in (module.training_step, module.validation_step))
    return [(step, (state, number, number, batch)), (validate, (state.weights, loss, loss, batch))]


def start_training(monkeypatch, *overrides, trainer=train):
    """Runs as `python -m train <overrides>` would, or another trainer; returns the exit status."""
    return start(monkeypatch, trainer.main, trainer.Config, *overrides)


def start(monkeypatch, main, config_class, *arguments):
    """Runs as `python -m` of main's module would; returns the exit status."""
    others = [first_weights] if main is train.main else []
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    try:
        run(main, config_class, *others)
    except SystemExit as stop:
        return stop.code or 0
    return 0
