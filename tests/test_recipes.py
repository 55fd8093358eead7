"""The pages of docs/recipes/: train.py changed as each says is accepted, and trains alike on one and eight devices."""

import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import several_hosts as hosts
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
    train_py,
    without_folders,
)
from published import check_family, loss_and_logits, on_mesh

from models import huggingface, llama
from models.layers import TokenBatch
from runtime.terminal import RunError
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import make_shardings, narrowed
from shardlib.spec import ShardingError

TITLES = {path.read_text().partition("\n")[0].removeprefix("# "): path for path in (ROOT / "docs/recipes").glob("*.md")}
PAGES = {title: path for title, path in TITLES.items() if title in RECIPES}
TIED = "Tied embeddings"
D_T = {"d": 4, "t": 2}


def trained(module, axes):
    """The norm of the first gradient, and the losses of three steps."""
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
        metrics = [None] * 3
        for number in range(3):
            state, metrics[number] = step(state, jnp.uint32(0), jnp.uint32(number), batch)
    return [float(metrics[0].grad_norm), *(float(of_step.loss) for of_step in metrics)]


@pytest.mark.parametrize("title", [TIED, *small.slow(*sorted(PAGES.keys() - {TIED}))])
def test_it_trains_alike_on_every_mesh(title, tmp_path):
    """Its losses and its gradient on eight devices are those on one, and the losses fall."""
    module, axes = module_of(tmp_path / "train.py", recipe(title, tmp_path)), MESH_OF_RECIPE.get(title, D_T)
    one, eight = (trained(module, mesh) for mesh in (dict.fromkeys(axes, 1), axes))
    assert np.allclose(one, eight, rtol=2e-5)
    assert one[1] > one[2] > one[3]


@pytest.mark.parametrize("title", [pytest.param(title, marks=pytest.mark.slow) for title in sorted(RECIPES)])
def test_what_imports_train_py_still_does(title, tmp_path):
    """Every program beside train.py starts with the changed one in its place, and knows that it is another."""
    copy_of_the_repository(tmp_path)
    (tmp_path / "train.py").write_text(recipe(title, tmp_path))
    programs = "train_any, tools.generate, tools.serve, tools.score, tools.convert, tools.embed, tools.plan"
    made_of = "program.parts_of(open('train.py').read()).items()"
    is_another = f"not {made_of} <= program.released('train', None).items()"
    code = f"import {programs}; from runtime import program; assert {is_another}"
    run_in(tmp_path, [sys.executable, "-c", code])


WINDOW = """\
-    allowed = (segment[:, :, None] == segment[:, None, :]) & (position[:, None] >= position[None])[None]
+    allowed = (segment[:, :, None] == segment[:, None, :]) & (position[:, None] >= position[None])[None]
+    allowed &= (position[:, None] - position[None] < 20)[None]
"""


@pytest.mark.slow
@pytest.mark.parametrize("title, different", [("LayerNorm", "forward, layer_norm, rms_norm"), (None, "attention")])
def test_a_changed_model_is_not_taken_for_a_llama(title, different, tmp_path):
    """A run of the LayerNorm page, or with a window of 20 written into attention, is exported, decoded and scored by
    no tool that computes another model; the refusal, as a user meets it, names the functions that differ."""
    copy_of_the_repository(tmp_path)
    source = recipe(title, tmp_path) if title else changed(train_py(), WINDOW)
    (tmp_path / "train.py").write_text(source)
    data = hosts.write_tiny(tmp_path)
    small_run = """model.d_model=32 model.n_kv=4 model.d_head=8 model.d_ff=64 model.vocab=128 training.tokens.batch=16
        training.tokens.len=32 training.steps=1 validation_batches=1 paths.model_name=run model.attention=einsum"""
    run_in(tmp_path, ["python", "-m", "train", *small_run.split(), data])
    (tmp_path / "text.txt").write_text("the cat sat")
    for command in ("convert from=runs/run to=out", "generate runs/run prompt_ids=[1]", "score runs/run text.txt"):
        program, *arguments = command.split()
        error = run_in(tmp_path, ["python", "-m", f"tools.{program}", *arguments], status=1)
        assert f"differ ({different})" in " ".join(error.split()) and "allow_program_change=true" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("title", sorted(RECIPES.keys() - MESH_OF_RECIPE.keys()))
def test_changes_are_accepted_and_what_is_forgotten_is_said(title, tmp_path):
    """The check accepts what a page says; with its diffs that are marked `forgotten` it says what stands below them."""
    mesh = jax.sharding.AbstractMesh(tuple(D_T.values()), tuple(D_T))

    def check(text):
        step, given = small.steps_of(module_of(tmp_path / "train.py", text))[0]
        return typed_shard_map(step).check(mesh, *given)

    text = forgotten = recipe(title, tmp_path / "recipe")
    assert check(text) > 100
    for language, body in RECIPES[title]:
        if language == "diff forgotten":
            forgotten = changed(forgotten, body)
        elif language == "" and forgotten != text:
            with pytest.raises(ShardingError) as error:
                check(forgotten)
            expected = body.removeprefix("training_step is refused on the mesh d=4 × t=2:\n")
            assert without_folders(str(error.value)) == without_folders(expected)
            forgotten = text
    assert forgotten == text


# -- A family ----------------------------------------------------------------------------------------------------------
FACTORS = {"embed_factor": 4.0, "residual_factor": 0.5, "logits_divisor": 8.0}  # powers of 2: what they scale is exact


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    """The family of the page, and its source."""
    text = "\n\n".join(body for language, body in blocks(TITLES[FAMILY].read_text()) if language == "python")
    assert text.count("\n") <= 150
    path = tmp_path_factory.mktemp("family") / "granite.py"
    return module_of(path, text), text


def test_a_family_is_accepted(granite, tmp_path):
    """Its loss and gradient, tied or not, in training."""
    variant = {**vars(small.MODEL), **FACTORS}
    assert (
        check_family(tmp_path / "checked.py", granite[1], [variant, {**variant, "tied": True}], [loss_and_logits]) > 100
    )


@pytest.mark.slow
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
        for family, (model, weights) in given.items():
            source = types.SimpleNamespace(family=family, model=model)
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
    assert not huggingface.different(found, model) and found.logits_scale == 0.25 and content["model_type"] == "granite"
    for key in ("attention_multiplier", "embedding_multiplier", "residual_multiplier"):
        del content[key]
    fields = huggingface.Fields(content | {"model_type": "llama"}, "config.json")
    llama.model_of(fields)
    with pytest.raises(RunError) as error:
        fields.finish()
    assert [str(error.value)] == [body.strip() for name, body in blocks(TITLES[FAMILY].read_text()) if name == ""]


@pytest.mark.slow
def test_a_family_is_trained_everywhere(granite, tmp_path):
    """A copy of the repository has the file: on three axes and on stages the losses are those of one device; published
    and read again it is the same; adapters are trained beside what was published, and it decodes."""
    copy_of_the_repository(tmp_path)
    os.symlink(ROOT / "synthetic_dataset.zarr", tmp_path / "synthetic_dataset.zarr")
    (tmp_path / "models").unlink()
    shutil.copytree(ROOT / "models", tmp_path / "models")
    (tmp_path / "models/granite.py").write_text(granite[1])

    def program(name, *keys):
        return run_in(tmp_path, ["python", "-m", name, *keys])

    keys = """model.family=granite model.residual_factor=0.5 model.d_model=32 model.d_head=8 model.d_ff=64
        model.layers=4 model.compute_dtype=float32 training.microbatches=4 training.steps=3 training.tokens.batch=16
        log_interval=1 training.tokens.len=32 eval_interval=3 validation_batches=1""".split()
    last = []
    for number, mesh in enumerate(("{d: 1, t: 1}", "{d: 1, r: 2, c: 2, t: 2}", "{p: 2, d: 2, t: 2}")):
        program("train_any", *keys, f"mesh={mesh}", f"paths.model_name=granite{number}")
        last.append(hosts.logged(tmp_path / f"runs/granite{number}", "loss"))
    assert last[1] == pytest.approx(last[0], rel=1e-5) and last[2] == pytest.approx(last[0], rel=1e-5)
    program("tools.convert", "from=runs/granite2", "to=published")
    assert json.loads((tmp_path / "published/config.json").read_text())["residual_multiplier"] == 0.5
    decoded = [
        program("tools.generate", model, "prompt_ids=[5,6,7]", "tokens=8", "temperature=0", "output=ids", "mesh.t=2")
        for model in ("runs/granite2", "published")
    ]
    assert decoded[0] == decoded[1]
    adapt = [*keys, "initial_weights=published", "lora.rank=2", "mesh={p: 2, d: 2, t: 1}"]
    program("train_any", *adapt, "paths.model_name=adapted")
