"""The pages of docs/recipes/: train.py changed as each says is accepted, and trains alike on one and eight devices."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from pages import (
    FAMILY,
    MESH_OF_RECIPE,
    RECIPES,
    ROOT,
    blocks,
    changed,
    copy_of_the_repository,
    module_of,
    recipe,
    run_in,
    without_places,
)
from published import check_family, loss_and_logits, on_mesh

import train
from models import huggingface, llama
from models.layers import TokenBatch
from runtime.terminal import RunError
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import make_shardings, narrowed
from shardlib.spec import ShardingError

TITLES = {path.read_text().partition("\n")[0].removeprefix("# "): path for path in (ROOT / "docs/recipes").glob("*.md")}
PAGES = {title: path for title, path in TITLES.items() if title in RECIPES}
D_T = {"d": 4, "t": 2}


def trained(module, axes):
    """Losses of three steps, the norm of the first gradient, and what that gradient leaves in the first moment."""
    model = module.Model(**vars(small.MODEL) | {"attention": "einsum"})
    training = module.Training(**vars(small.TRAINING) | {"microbatches": 2})
    module.act.dtype, module.LOSS_CHUNK = "float32", 8  # four chunks
    with jax.set_mesh(make_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])):
        step = functools.partial(module.training_step, model, training, 0)
        step = jax.jit(typed_shard_map(step, check=math.prod(axes.values()) > 1))
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


SLOW = ("A context axis", "LayerNorm")  # the first is compared with train.py below


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=pytest.mark.slow if title in SLOW else []) for title in sorted(PAGES)]
)
def test_it_trains_alike_on_every_mesh(title, tmp_path):
    """Its losses and its gradient on eight devices are those on one, and the losses fall."""
    module, axes = module_of(tmp_path / "train.py", recipe(title, tmp_path)), MESH_OF_RECIPE.get(title, D_T)
    one, eight = (trained(module, mesh)[0] for mesh in (dict.fromkeys(axes, 1), axes))
    assert np.allclose(one, eight, rtol=2e-5)
    assert one[1] > one[2] > one[3]


@pytest.mark.parametrize("c", [*small.slow(1, 2), 4])
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


# -- A family ----------------------------------------------------------------------------------------------------------
FACTORS = {"embed_factor": 4.0, "residual_factor": 0.5, "logits_divisor": 8.0}  # powers of 2: what they scale is exact


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    """models/llama.py changed as the page says, with its name in models/huggingface.py; and its source."""
    *diffs, name = [body for language, body in blocks(TITLES[FAMILY].read_text()) if language == "diff"]
    text = (ROOT / "models/llama.py").read_text()
    for diff in diffs:
        text = changed(text, diff)
    assert '"granite": "models.granite"' in changed((ROOT / "models/huggingface.py").read_text(), name)
    path = tmp_path_factory.mktemp("family") / "granite.py"
    return module_of(path, text), text


def test_a_family_is_accepted(granite, tmp_path):
    """Its loss and gradient, tied or not, in training."""
    variant = {**vars(small.MODEL), **FACTORS}
    assert (
        check_family(tmp_path / "checked.py", granite[1], [variant, {**variant, "tied": True}], [loss_and_logits]) > 100
    )


def test_a_family_computes_what_its_factors_say(granite):
    """Logits, bit for bit, of a Llama whose embedding, last matrices of each half and unembedding are scaled."""
    model = granite[0].Model(**vars(small.MODEL), **FACTORS)
    weights = llama.init(llama.Model(**vars(small.MODEL)), np.uint32(0))
    layer = weights.transformer
    layer = dataclasses.replace(layer, w_o=layer.w_o * 0.5, w_down=layer.w_down * 0.5)
    scaled = dataclasses.replace(weights, embed=weights.embed * 4, unembed=weights.unembed / 8, transformer=layer)
    given = {
        granite[0]: (model, granite[0].init(model, np.uint32(0))),
        llama: (llama.Model(**vars(small.MODEL)), scaled),
    }
    logits = []
    with on_mesh(2, 2):
        for family, (each, weights) in given.items():
            source = types.SimpleNamespace(family=family, model=each)
            step = typed_shard_map(loss_and_logits(source, narrowed(family.Weights, weights)))
            numbers = {**vars(small.BATCH), "targets": small.BATCH.targets.astype(np.uint32)}
            batch = jax.device_put(TokenBatch(**numbers), make_shardings(TokenBatch))
            weights = jax.device_put(weights, make_shardings(narrowed(family.Weights, weights)))
            logits.append(np.asarray(jax.jit(step)(weights, batch)[1]))
    assert logits[0].tobytes() == logits[1].tobytes()


def test_a_family_is_published_and_read(granite):
    """Its config.json leads back to the model; a family without one of the factors refuses it as the page says."""
    model = granite[0].Model(**vars(small.MODEL) | FACTORS | {"logits_scale": 0.25})
    content = granite[0].config_of(model)
    fields = huggingface.Fields(content, "config.json")
    found = granite[0].model_of(fields)
    fields.finish()
    assert huggingface.same(found, model) and found.logits_scale == 0.25 and content["model_type"] == "granite"
    for key in ("attention_multiplier", "embedding_multiplier", "residual_multiplier"):
        del content[key]
    fields = huggingface.Fields(content, "config.json")
    llama.model_of(fields)
    with pytest.raises(RunError) as error:
        fields.finish()
    assert [str(error.value)] == [body.strip() for name, body in blocks(TITLES[FAMILY].read_text()) if name == ""]
