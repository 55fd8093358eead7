"""Every published family against transformers, as the golden files keep it: what it computes, and what it writes."""

import json
import re

import jax
import numpy as np
import pytest
from published import FOLDER, NAMES, config_of, on_mesh, oracle_of, published_as, step_of, weights_of
from safetensors.numpy import load_file

from models import huggingface
from models.context import Context
from runtime.checkpoints.checkpoint import named_leaves
from shardlib.shard_map import typed_shard_map

pytestmark = pytest.mark.usefixtures("proved_elsewhere")  # the test_the_family_is_accepted do
# Attention does not change when all keys move alike; where no rotation follows the bias, it has no gradient.
WITHOUT_GRADIENT = re.compile(r"model\.decoder\.layers\..*k_proj\.bias|bert\..*\.key\.bias")
ONE_OF_EACH = "llama3 qwen2 olmo2 gemma3 mixtral gpt2 opt gptj t5_gated bert".split()  # family, and kind of layer
WINDOWS_AND_EXPERTS = ["gemma3", "olmoe"]
WAYS = [  # along c, the mesh, and the names that are not slow
    ("deal", dict(d=4, t=2), ONE_OF_EACH),
    *(("deal", dict(d=d, t=t), []) for d, t in ((1, 1), (2, 2), (8, 1))),
    ("deal", dict(r=2, d=2, c=2), WINDOWS_AND_EXPERTS),
    ("gather", dict(d=2, c=4), WINDOWS_AND_EXPERTS),
    ("ring", dict(c=2, e=2, t=2), WINDOWS_AND_EXPERTS),
]
CASES = [
    pytest.param(name, way, mesh, marks=[] if name in quick else pytest.mark.slow)
    for way, mesh, quick in WAYS
    for name in NAMES
]


@pytest.mark.parametrize("name, way, mesh", CASES, ids=str)
def test_logits_loss_and_gradients_are_those_of_transformers(name, way, mesh, pool):
    """Logits, loss and the gradient of each tensor agree to 1e-4 in float32, with two sequences in each row, on every
    mesh: with replicas, with experts on two devices, and with rows split over c in each way, windows and caps included.
    A family with an encoder has its heads dealt out."""
    source, oracle = huggingface.open_weights(FOLDER / name, pool), oracle_of(name)
    context = Context(mesh.get("c", 1), way)
    if way != "deal" and not hasattr(source.model, "attention"):
        pytest.skip("its heads are dealt out on every mesh")
    with on_mesh(**mesh):
        weights, type_ = weights_of(source, pool)
        step, arguments = step_of(source, type_, oracle, context)
        loss, logits, gradient = jax.tree.map(np.asarray, jax.jit(typed_shard_map(step))(weights, *arguments))
    expected = context.in_order(np.moveaxis(oracle["logits"], 1, 2)).swapaxes(1, 2)
    np.testing.assert_allclose(logits[: len(expected)], expected, atol=1e-4, rtol=0)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_the_published_folder_bit_for_bit(name, dtype, pool, tmp_path):
    """Read and exported again, a folder has the same tensors, bits and config.json but for its type, in both types."""
    tensors = load_file(FOLDER / name / "model.safetensors")
    config = config_of(name) | dict.fromkeys(("dtype", "torch_dtype"), "float32")  # the names of two releases
    published = {key: value.astype(dtype) for key, value in tensors.items()}
    folder = published_as(tmp_path / "in", name, config, published)
    huggingface.export(huggingface.open_weights(folder, pool), tmp_path / "out", dtype, pool)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == published.keys()
    for key, value in published.items():
        assert written[key].dtype == value.dtype and written[key].tobytes() == value.tobytes(), key
    expected = config | dict.fromkeys(("dtype", "torch_dtype"), dtype)
    assert json.loads((tmp_path / "out/config.json").read_text()) == expected
