"""models/llama.py against train.py, its layer in both forms and with adapters, and the check of all that it sends."""

import dataclasses
import functools
import importlib
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from mutation import GROUPS, PLACE, refuse_all_of
from pages import ROOT, module_of
from published import (
    FOLDER,
    batch_of,
    claims_of,
    loss_and_logits,
    on_mesh,
    on_mesh_of_train_py,
    oracle_of,
    reduced,
    weights_of,
)
from reference import random_weights

import train
from models import huggingface, layers, llama
from models.context import ALONE, attention, deal_heads
from models.layers import TokenBatch
from runtime.checkpoints.checkpoint import named_leaves
from shardlib import shardops
from shardlib.products import Adapted
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, f32, make_shardings, narrowed, pytree_dataclass
from train import act

MODEL = llama.Model(**vars(small.MODEL))


def names_of(tree):
    return [names[0] for names, _ in named_leaves(tree)]


def test_the_first_weights_are_those_of_train_py():
    """With the defaults the leaves have the names, the shapes and the bits that train.py's have."""
    ours, theirs = llama.init(MODEL, np.uint32(3)), train.init_state(small.MODEL, np.uint32(3)).weights
    assert names_of(ours) == names_of(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert one.shape == other.shape and np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [(4, 2), *small.slow((1, 1), (8, 1))], ids=str)
def test_losses_and_gradients_are_those_of_train_py(mesh, dtype):
    """A checkpoint of train.py is one of models/llama.py: the same bits come out, of packed rows."""
    with on_mesh_of_train_py(*mesh, dtype):
        theirs = small.state_of(random_weights(small.MODEL, 0)).weights

        def of_train(weights: train.Weights, batch: train.TokenBatch) -> tuple[f32[""], train.Weights]:
            def loss(weights, batch) -> f32["+d +t"]:
                return train.loss_sum(small.MODEL, small.TRAINING, 0, weights, batch)

            value, gradient = shardops.value_and_grad(loss)(weights, batch)
            return shardops.psum("+d +t -> ", value), gradient

        expected = jax.jit(typed_shard_map(of_train))(theirs, small.batch_of(small.BATCH))

    with on_mesh(*mesh, dtype):
        shapes = jax.eval_shape(functools.partial(llama.init, MODEL), np.uint32(0))
        Weights = narrowed(llama.Weights, shapes)
        ours = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.map(np.asarray, jax.tree.leaves(theirs)))

        def of_llama(weights: Weights, batch: TokenBatch) -> tuple[f32[""], Weights]:
            def loss(weights, batch) -> f32["+b +c +t"]:
                inputs, segment, _ = layers.inputs_of(batch, 0)
                position = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None], inputs.shape)  # train.py's: in the row
                x = layers.hidden(llama, MODEL, weights, inputs, segment, position)[0]
                return layers.loss_sum(llama.gather_ends(weights).unembed, x, batch)

            value, gradient = shardops.value_and_grad(loss)(weights, batch)
            return shardops.psum("+b +c +t -> ", value), reduced(Weights, gradient)

        batch = TokenBatch(**{name: np.asarray(x) for name, x in vars(small.BATCH).items()})
        batch = replace(batch, targets=batch.targets.astype(np.uint32))
        found = jax.jit(typed_shard_map(of_llama))(ours, batch)
    for name, one, other in zip(names_of(expected), jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name


MORE = "mistral qwen2 olmo2 gemma3 opt olmoe qwen3_moe".split()  # another of each of the families


def decoded(source, Weights):
    """Hidden states by the layer as decoding calls it: the residual is whole, keys and values are kept."""
    family, model, layers = source.family, source.model, source.family.layers

    def forward(weights: Weights, batch: TokenBatch) -> tuple[act["B/b L/c M"], act["layers B/b S/c K/t D"]]:
        inputs, segment, position = layers.inputs_of(batch, 1)
        inputs, position = ALONE.part(inputs), ALONE.part(position)
        mask, ends = family.mask(model), family.gather_ends(weights)

        def layer(x, of_layer):
            w, window = of_layer

            def attend(q, k, v):
                whole = functools.partial(attention, "einsum", segment=segment, window=attend.window, cap=mask.cap)
                return deal_heads(whole, q, k, v), k

            attend.window = mask.of_layer(window)
            return family.layer(model, x, family.gather_layer(w), attend, position, "M")[:2]

        x, keys = jax.lax.scan(
            layer, family.embed(model, ends, inputs, position, "M"), (weights.transformer, mask.by_layer())
        )
        return family.final(model, ends, x, "M"), keys

    return forward


@pytest.mark.parametrize("name", ["llama3", "gemma2", "gpt2", "gptj", "mixtral", *small.slow(*MORE)])
def test_the_layer_of_decoding_is_the_layer_of_training(name, pool):
    """With the residual whole on each device of t it is accepted by the check, and computes the same to 1e-5."""
    source = huggingface.open_weights(FOLDER / name, pool)
    with on_mesh(4, 2):
        weights, type_ = weights_of(source, pool)
        batch = batch_of(oracle_of(name))

        def trained(weights: type_, batch: TokenBatch) -> act["B/b L/c M"]:
            return layers.hidden(source.family, source.model, weights, *layers.inputs_of(batch, 1))[0]

        expected = jax.jit(typed_shard_map(trained))(weights, batch)
        found, _ = jax.jit(typed_shard_map(decoded(source, type_)))(weights, batch)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


# -- Adapters ----------------------------------------------------------------------------------------------------------
@pytree_dataclass
class LowRank:
    w_q_a: f32['M N']
    w_q_b: f32['N Q K/t D']
    w_down_a: f32['F/t N']
    w_down_b: f32['N M']


def adapt(w, low):
    """The gathered layer with adapters on two of its matrices."""
    of = {name: value.astype(act.dtype) for name, value in vars(low).items()}
    return dataclasses.replace(
        w,
        w_q=Adapted(w.w_q, of["w_q_a"], of["w_q_b"], 0.5),
        w_down=Adapted(w.w_down, of["w_down_a"], of["w_down_b"], 0.5),
    )


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("mesh", [*small.slow((1, 1)), (4, 2)], ids=str)
def test_adapters_compute_what_merged_weights_do(mesh, pool):
    """The layer takes matrices with adapters as it is; hidden states are those of base + scale · a · b, to 1e-5."""
    source = huggingface.open_weights(FOLDER / "llama", pool)
    model = source.model
    rng = np.random.default_rng(0)
    M, F, Q, K, D, N = model.d_model, model.d_ff, model.n_q_per_kv, model.n_kv, model.d_head, 4
    shapes = LowRank((2, M, N), (2, N, Q, K, D), (2, F, N), (2, N, M))
    low = LowRank(*(rng.normal(size=shape).astype(np.float32) / 4 for shape in vars(shapes).values()))
    with on_mesh(*mesh):
        weights, type_ = weights_of(source, pool)

        def adapted(weights: type_, low: Array['layers', LowRank], batch: TokenBatch) -> act["B/b L/c M"]:
            how = layers.Options(adapt=adapt, low=low)
            return layers.hidden(llama, model, weights, *layers.inputs_of(batch, 1), how=how)[0]

        def merged(weights: type_, batch: TokenBatch) -> act["B/b L/c M"]:
            return layers.hidden(llama, model, weights, *layers.inputs_of(batch, 1))[0]

        batch = batch_of(oracle_of("llama"))
        found = jax.jit(typed_shard_map(adapted))(weights, low, batch)
        w = weights.transformer
        w_q = np.asarray(w.w_q) + 0.5 * np.einsum("lmn,lnqkd->lmqkd", low.w_q_a, low.w_q_b)
        w_down = np.asarray(w.w_down) + 0.5 * np.einsum("lfn,lnm->lmf", low.w_down_a, low.w_down_b)
        whole = dataclasses.replace(weights, transformer=dataclasses.replace(w, w_q=w_q, w_down=w_down))
        whole = jax.device_put(whole, make_shardings(type_))
        expected = jax.jit(typed_shard_map(merged))(whole, batch)
        unchanged = jax.jit(typed_shard_map(merged))(weights, batch)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert np.abs(np.asarray(found) - np.asarray(unchanged)).max() > 0.1


# -- The check ---------------------------------------------------------------------------------------------------------
VARIANTS = [
    {"qkv_bias": True, "window": 5, "window_from": 1, "tied": True},
    {"qk_norm": "head", "window": 5},
    {"qk_norm": "all", "norm_after": True},
]


MODULES = ["models.weights", "models.layers", "models.llama"]
GPT2 = {"d_model": 64, "n_kv": 8, "d_head": 8, "layers": 2, "vocab": 128, "d_ff": 96, "positions": 64}


def check_family(path, source, module="models.llama"):
    """Checks each variant's loss with its gradient, and its layer of decoding, with a changed file in the place of a
    module; returns the claims."""
    families = ["models.llama"] if module == "models.llama" else ["models.llama", "models.gpt2"]
    changed = [*MODULES[MODULES.index(module) : 2], *families]  # those that import it are made anew
    before = {name: importlib.import_module(name) for name in changed}
    try:
        for name in changed:
            text = source if name == module else (ROOT / f"{name.replace('.', '/')}.py").read_text()
            sys.modules[name] = module_of(path.with_name(f"{name.rpartition('.')[2]}.py"), text)
            setattr(sys.modules["models"], name.rpartition(".")[2], sys.modules[name])
        variants = [vars(small.MODEL) | {"attention": "einsum"} | each for each in VARIANTS]
        given = {"models.llama": variants, "models.gpt2": [GPT2 | {"attention": "einsum"}]}
        return sum(claims_of(sys.modules[name], given[name], [loss_and_logits, decoded]) for name in families)
    finally:
        sys.modules.update(before)
        for name, each in before.items():
            setattr(sys.modules["models"], name.rpartition(".")[2], each)


@pytest.mark.parametrize("module", [*small.slow(*MODULES[:-1]), MODULES[-1]])
def test_the_family_is_accepted(module, tmp_path):
    """As it is, in training and in decoding: the mutants are refused for their mutation."""
    file = f"{module.replace('.', '/')}.py"
    assert check_family(tmp_path / file.rpartition("/")[2], (ROOT / file).read_text(), module) > 300


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_mutant_of_the_family_is_refused(module, tmp_path, record_property):
    """Each collective removed, doubled, with its axes exchanged or one too few, and each '+axis' dropped."""
    file = f"{module.replace('.', '/')}.py"
    check = functools.partial(check_family, module=module)
    least = {"models.weights": 3, "models.layers": 40, "models.llama": 30}[module]
    assert refuse_all_of(file, check, tmp_path, record_property, PLACE, GROUPS) > least
