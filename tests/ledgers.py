"""Ledgers of train.py's step for the configs, and forecasts of small programs, on meshes that need no device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from pages import module_of
from small import proved_elsewhere

import train
from ledger.count.memory import Memory, forecast
from ledger.count.program import read
from ledger.count.step import Ledger, of_step
from runtime.config.command_line import load


@proved_elsewhere()
def traced(module, config) -> jax.stages.Traced:
    """The training step of train.py, or of a changed copy of it, traced on the config's mesh."""
    before = module.act.dtype
    try:
        zero, (state, batch) = np.uint32(0), module.shapes(config)
        step, _ = module.mapped_steps(config, 0)
        axes = vars(config.mesh)
        automatic = (jax.sharding.AxisType.Auto,) * len(axes)  # jax 0.11's default is another
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=automatic)
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch)
    finally:
        module.act.dtype = before


def of_config(module, name: str, *overrides: str) -> Ledger:
    """The ledger of a module for a config; attention by what is written out, unless the overrides say otherwise."""
    config = load(module.Config, name, ("model.attention=einsum", *overrides))
    tokens = config.training.tokens.batch * config.training.tokens.len
    return of_step(traced(module, config), vars(config.mesh), source=module.__file__, tokens=tokens)


@functools.cache
def ledger_of(name: str, *overrides: str) -> Ledger:
    return of_config(train, name, *overrides)


def ledger_of_changed(folder, name: str, text: str) -> Ledger:
    """The ledger for a config of a changed train.py, written to a folder and read from there."""
    return of_config(module_of(folder / "train.py", text), name)


# -- Small programs ----------------------------------------------------------------------------------------------------
def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def forecast_of(function, *shapes, donated=(), **given) -> Memory:
    """The forecast of a function of these shapes, of which some are donated."""
    block = read(jax.make_jaxpr(function)(*shapes))
    free = [index in donated for index in range(len(block.inputs))]
    return forecast(block, ["batch"] * len(block.inputs), free, **given)
