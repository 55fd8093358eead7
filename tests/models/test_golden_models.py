"""Every published family against transformers, as the golden files keep it: what it computes, and what it writes."""

import json
import re

import jax
import numpy as np
import pytest
import small
from published import FOLDER, NAMES, on_mesh, oracle_of, step_of, weights_of
from safetensors.numpy import load_file, save_file

from models import huggingface
from models.context import Context
from runtime.checkpoints.checkpoint import named_leaves
from shardlib.shard_map import typed_shard_map

pytestmark = pytest.mark.usefixtures("proved_elsewhere")  # the test_the_family_is_accepted do
# Attention does not change when all keys move alike; where no rotation follows the bias, it has no gradient.
WITHOUT_GRADIENT = re.compile(r"model\.decoder\.layers\..*k_proj\.bias|bert\..*\.key\.bias")
ONE_OF_EACH = "llama3 qwen2 olmo2 gemma3 mixtral gpt2 opt gptj t5_gated bert".split()  # family, and kind of layer
MESHES = [(4, 2), *small.slow((1, 1), (2, 2), (8, 1))]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
@pytest.mark.parametrize("name", [*ONE_OF_EACH, *small.slow(*(name for name in NAMES if name not in ONE_OF_EACH))])
def test_logits_loss_and_gradients_are_those_of_transformers(name, mesh, pool):
    """Logits, loss and the gradient of each tensor agree to 1e-4 in float32, with two sequences in each row, on every
    mesh."""
    source, oracle = huggingface.open_weights(FOLDER / name, pool), oracle_of(name)
    with on_mesh(*mesh):
        weights, type_ = weights_of(source, pool)
        step, arguments = step_of(source, type_, oracle)
        loss, logits, gradient = jax.tree.map(np.asarray, jax.jit(typed_shard_map(step))(weights, *arguments))
    np.testing.assert_allclose(logits[: len(oracle["logits"])], oracle["logits"], atol=1e-4, rtol=0)
    assert_same_loss_and_gradient(source, oracle, loss, gradient)


def assert_same_loss_and_gradient(source, oracle, loss, gradient):
    assert loss == pytest.approx(float(oracle["loss"]), abs=1e-5)
    gradient = {names[0]: leaf for names, leaf in named_leaves(gradient)}
    compared = set()
    for leaf, rows in huggingface.rows_of(source.family, source.model).items():
        for place, row in rows.items():
            expected = oracle[f"gradient/{row.name}"]
            found = row.read_out(gradient[leaf][place])
            np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=row.name)
            assert WITHOUT_GRADIENT.fullmatch(row.name) or np.abs(expected).max() > 1e-3, row.name
            compared.add(f"gradient/{row.name}")
    assert compared == {key for key in oracle if key.startswith("gradient/")}


QUICK = ["gemma3", "olmoe"]  # windows of their own, experts
WAYS = [("deal", dict(r=2, d=2, c=2)), ("gather", dict(d=2, c=4)), ("ring", dict(c=2, e=2, t=2))]


@pytest.mark.parametrize("way, mesh", WAYS, ids=[way for way, _ in WAYS])
@pytest.mark.parametrize("name", [*QUICK, *small.slow(*(name for name in NAMES if name not in QUICK))])
def test_logits_loss_and_gradients_do_not_depend_on_axes(name, way, mesh, pool):
    """They also agree with replicas, with experts on two devices, and with rows split over c in each way, windows and
    caps included. A family with an encoder has its heads dealt out."""
    source, oracle = huggingface.open_weights(FOLDER / name, pool), oracle_of(name)
    if way != "deal" and not hasattr(source.model, "attention"):
        pytest.skip("its heads are dealt out on every mesh")
    with on_mesh(**mesh):
        weights, type_ = weights_of(source, pool)
        step, arguments = step_of(source, type_, oracle, Context(mesh["c"], way))
        loss, logits, gradient = jax.tree.map(np.asarray, jax.jit(typed_shard_map(step))(weights, *arguments))
    expected = Context(mesh["c"], way).in_order(np.moveaxis(oracle["logits"], 1, 2)).swapaxes(1, 2)
    np.testing.assert_allclose(logits[: len(expected)], expected, atol=1e-4, rtol=0)
    assert_same_loss_and_gradient(source, oracle, loss, gradient)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_the_published_folder_bit_for_bit(name, dtype, pool, tmp_path):
    """Read and exported again, a folder has the same tensors, bits and config.json, in both types."""
    tensors = load_file(FOLDER / name / "model.safetensors")
    config = json.loads((FOLDER / name / "config.json").read_text())
    published = {key: value.astype(dtype) for key, value in tensors.items()}
    (tmp_path / "in").mkdir()
    save_file(published, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text(json.dumps({**config, "dtype": dtype}))
    huggingface.export(huggingface.open_weights(tmp_path / "in", pool), tmp_path / "out", dtype, pool)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == published.keys()
    for key, value in published.items():
        assert written[key].dtype == value.dtype and written[key].tobytes() == value.tobytes(), key
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**config, "dtype": dtype}
