"""The pages of docs/recipes/: train.py changed as each says is accepted, and trains alike on one device and on
eight."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from pages import ROOT, blocks, changed, module_of, recipe

from shardlib.mesh import make_mesh
from shardlib.shardtypes import make_shardings, typed_shard_map
from shardlib.spec import ShardingError

PAGES = {path.read_text().partition("\n")[0].removeprefix("# "): path for path in (ROOT / "docs/recipes").glob("*.md")}
AXES = ("d", "t")


def losses(module, d, t):
    """Of three steps, and the norm of the first gradient."""
    model = module.Model(**vars(small.MODEL) | {"attention": "einsum"})
    training = module.Training(**vars(small.TRAINING) | {"microbatches": 2})
    module.act.dtype = "float32"
    with jax.set_mesh(make_mesh({"d": d, "t": t}, devices=jax.devices()[: d * t])):
        step = jax.jit(typed_shard_map(functools.partial(module.training_step, model, training, 0)))
        init = functools.partial(module.init_state, model)
        state = jax.jit(init, out_shardings=make_shardings(module.State))(np.uint32(0))
        arrays = small.BATCH.targets.astype(np.uint32), small.BATCH.is_seq_start, small.BATCH.is_target
        batch = jax.device_put(module.TokenBatch(*arrays), make_shardings(module.TokenBatch))
        found = []
        for number in range(3):
            state, metrics = step(state, jnp.uint32(0), jnp.uint32(number), batch)
            found += [float(metrics.loss)] if number else [float(metrics.loss), float(metrics.grad_norm)]
    return found


@pytest.mark.parametrize("title", sorted(PAGES))
def test_it_trains_alike_on_every_mesh(title, tmp_path):
    """Its losses and its gradient on 4 × 2 devices are those on one, and the losses fall."""
    module = module_of(tmp_path / "train.py", recipe(title, tmp_path))
    one, eight = losses(module, 1, 1), losses(module, 4, 2)
    assert np.allclose(one, eight, rtol=2e-5)
    assert one[0] > one[2] > one[3]


@pytest.mark.parametrize("title", sorted(PAGES))
def test_what_is_forgotten_is_said(title, tmp_path):
    """With a diff that is marked `forgotten` the check says what stands below it."""
    mesh, said = jax.sharding.AbstractMesh((4, 2), AXES), None
    for language, body in blocks(PAGES[title].read_text()):
        if language == "diff forgotten":
            module = module_of(tmp_path / "train.py", changed(recipe(title, tmp_path), body))
            with pytest.raises(ShardingError) as error:
                typed_shard_map(small.steps_of(module)[0][0]).check(mesh, *small.steps_of(module)[0][1])
            said = re.sub(r"[^\s(]*(train\.py):\d+", r"\1", str(error.value))
        elif language == "":
            assert said == re.sub(r"(train\.py):\d+", r"\1", body.strip())
