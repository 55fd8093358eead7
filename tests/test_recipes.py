"""The pages of docs/recipes/: train.py changed as each says is accepted, and trains alike on one and eight devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from pages import (
    MESH_OF_RECIPE,
    ROOT,
    blocks,
    changed,
    copy_of_the_repository,
    module_of,
    recipe,
    run_in,
    without_places,
)

import train
from shardlib.mesh import make_mesh
from shardlib.shardtypes import make_shardings, typed_shard_map
from shardlib.spec import ShardingError

PAGES = {path.read_text().partition("\n")[0].removeprefix("# "): path for path in (ROOT / "docs/recipes").glob("*.md")}
D_T = {"d": 4, "t": 2}


def trained(module, axes):
    """Losses of three steps, the norm of the first gradient, and what that gradient leaves in the first moment."""
    model = module.Model(**vars(small.MODEL) | {"attention": "einsum"})
    training = module.Training(**vars(small.TRAINING) | {"microbatches": 2})
    module.act.dtype, module.LOSS_CHUNK = "float32", 8  # four chunks
    with jax.set_mesh(make_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])):
        step = jax.jit(typed_shard_map(functools.partial(module.training_step, model, training, 0)))
        init = functools.partial(module.init_state, model)
        state = jax.jit(init, out_shardings=make_shardings(module.State))(np.uint32(0))
        arrays = small.BATCH.targets.astype(np.uint32), small.BATCH.is_seq_start, small.BATCH.is_target
        batch = jax.device_put(module.TokenBatch(*arrays), make_shardings(module.TokenBatch))
        found = []
        for number in range(3):
            state, metrics = step(state, jnp.uint32(0), jnp.uint32(number), batch)
            if number == 0:
                found, moment = [float(metrics.grad_norm)], jax.tree.map(np.asarray, state.adam_mu)
            found.append(float(metrics.loss))
    return found, jax.tree.leaves(moment)


@pytest.mark.parametrize("title", sorted(PAGES))
def test_it_trains_alike_on_every_mesh(title, tmp_path):
    """Its losses and its gradient on eight devices are those on one, and the losses fall."""
    module, axes = module_of(tmp_path / "train.py", recipe(title, tmp_path)), MESH_OF_RECIPE.get(title, D_T)
    one, eight = (trained(module, mesh)[0] for mesh in (dict.fromkeys(axes, 1), axes))
    assert np.allclose(one, eight, rtol=2e-5)
    assert one[1] > one[2] > one[3]


@pytest.mark.parametrize("c", [1, 2, 4])
def test_a_context_axis_changes_no_result(c, tmp_path, monkeypatch):
    """Losses and each weight's gradient are those of train.py on one device, however many devices share a row."""
    monkeypatch.setattr(train, "LOSS_CHUNK", 8)
    module = module_of(tmp_path / "train.py", recipe("A context axis", tmp_path))
    (numbers, moments), (expected, whole) = trained(module, {"d": 1, "c": c, "t": 2}), trained(train, {"d": 1, "t": 1})
    assert np.allclose(numbers, expected, rtol=2e-5)
    for ours, theirs in zip(moments, whole, strict=True):
        assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()


@pytest.mark.slow
def test_a_run_on_a_context_axis(tmp_path):
    """`python -m train` of that file loads each device's positions, trains and validates."""
    copy_of_the_repository(tmp_path)
    recipe("A context axis", tmp_path)
    data = f"flat_tokens.filespec={ROOT / 'synthetic_dataset.zarr'}"
    keys = ["training.steps=2", "validation_batches=1", data, "mesh.d=2", "mesh.c=2", "mesh.t=2"]
    assert "step 2/2: validation loss " in run_in(tmp_path, ["python", "-m", "train", *keys])


@pytest.mark.parametrize("title", sorted(PAGES))
def test_what_is_forgotten_is_said(title, tmp_path):
    """With a diff that is marked `forgotten` the check says what stands below it."""
    axes, said = MESH_OF_RECIPE.get(title, D_T), None
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    for language, body in blocks(PAGES[title].read_text()):
        if language == "diff forgotten":
            module = module_of(tmp_path / "train.py", changed(recipe(title, tmp_path), body))
            with pytest.raises(ShardingError) as error:
                typed_shard_map(small.steps_of(module)[0][0]).check(mesh, *small.steps_of(module)[0][1])
            said = without_places(str(error.value))
        elif language == "":
            assert said == without_places(body)
