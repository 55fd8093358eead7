"""models/llama.py against train.py, its layer in both forms, and the check of all that it sends."""

import functools
import sys

import jax
import numpy as np
import pytest
import small
from mutation import proofs
from pages import ROOT, module_of
from published import FOLDER, SIZES, batch_of, claims_of, decoded, loss_and_logits, on_mesh, oracle_of, weights_of

import models
import train
from models import huggingface, layers, llama
from models.layers import TokenBatch
from runtime.checkpoints.checkpoint import named_leaves
from shardlib.shard_map import typed_shard_map
from train import act

MODEL = llama.Model(**vars(small.MODEL))


def names_of(tree):
    return [names[0] for names, _ in named_leaves(tree)]


def test_the_first_weights_are_those_of_train_py():
    """The default model's leaves have the names, shapes and bits of train.py's."""
    ours, theirs = llama.init(MODEL, np.uint32(3)), train.init_state(small.MODEL, np.uint32(3)).weights
    assert names_of(ours) == names_of(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert one.shape == other.shape and np.asarray(one).tobytes() == np.asarray(other).tobytes()


MORE = "mistral qwen2 olmo2 gemma3 opt olmoe qwen3_moe".split()  # another of each of the families


@pytest.mark.parametrize("name", ["llama3", "gemma2", "gpt2", "gptj", "mixtral", *small.slow(*MORE)])
def test_the_layer_of_decoding_is_the_layer_of_training(name, pool):
    """A layer that has the whole residual on each device of t passes the check and computes the same to 1e-5."""
    source = huggingface.open_weights(FOLDER / name, pool)
    with on_mesh(4, 2):
        weights, type_ = weights_of(source, pool)
        batch = batch_of(oracle_of(name))

        def trained(weights: type_, batch: TokenBatch) -> act["B/b L/c M"]:
            return layers.hidden(source.family, source.model, weights, *layers.inputs_of(batch, 1))[0]

        expected = jax.jit(typed_shard_map(trained))(weights, batch)
        found, _ = jax.jit(typed_shard_map(decoded(source, type_)))(weights, batch)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


# -- The check ---------------------------------------------------------------------------------------------------------
VARIANTS = [
    {"qkv_bias": True, "window": 5, "window_from": 1, "tied": True},
    {"qk_norm": "head", "window": 5},
    {"qk_norm": "all", "norm_after": True},
]


MODULES = ["models.weights", "models.layers", "models.llama"]


def check_family(path, source, module="models.llama"):
    """Checks each variant's loss with its gradient, and its layer of decoding, with a changed file in the place of a
    module; returns the claims."""
    families = ["models.llama"] if module == "models.llama" else ["models.llama", "models.gpt2"]
    changed = [*MODULES[MODULES.index(module) : 2], *families]  # those that import it are made anew
    with pytest.MonkeyPatch.context() as patch:
        for name in changed:
            text = source if name == module else (ROOT / f"{name.replace('.', '/')}.py").read_text()
            stem = name.rpartition(".")[2]
            patch.setitem(sys.modules, name, module_of(path.with_name(f"{stem}.py"), text))
            patch.setattr(models, stem, sys.modules[name], raising=False)
        variants = [vars(small.MODEL) | {"attention": "einsum"} | variant for variant in VARIANTS]
        given = {"models.llama": variants, "models.gpt2": [{**SIZES, "positions": 64, "attention": "einsum"}]}
        return sum(claims_of(sys.modules[name], given[name], [loss_and_logits, decoded]) for name in families)


LEAST = {"models.weights": 3, "models.layers": 40, "models.llama": 30}
test_it_is_accepted, test_every_mutant_is_refused = proofs(
    {f"{module.replace('.', '/')}.py": (functools.partial(check_family, module=module), 300, count)
     for module, count in LEAST.items()}, quick=["models/llama.py"],
)  # fmt: skip
