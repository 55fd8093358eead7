"""Ledgers of train.py's step for the configs, on meshes that need no device."""

import functools
import importlib.util
import sys

import jax
import numpy as np
from small import proved_elsewhere

import train
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


@functools.cache
def ledger_of(name: str, *overrides: str) -> Ledger:
    """The ledger for a config; attention by what train.py writes out, unless the overrides say otherwise."""
    config = load(train.Config, name, ("model.attention=einsum", *overrides))
    tokens = config.training.tokens.batch * config.training.tokens.len
    return of_step(traced(train, config), vars(config.mesh), source=train.__file__, tokens=tokens)


def ledger_of_changed(folder, name: str, text: str) -> Ledger:
    """The ledger for a config of a changed train.py, written to a folder and read from there."""
    path = folder / "train.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("changed_train", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["changed_train"] = module
    try:
        spec.loader.exec_module(module)
        config = load(module.Config, name, ("model.attention=einsum",))
        tokens = config.training.tokens.batch * config.training.tokens.len
        return of_step(traced(module, config), vars(config.mesh), source=path, tokens=tokens)
    finally:
        del sys.modules["changed_train"]
