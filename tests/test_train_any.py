"""python -m train_any: all weights, some or adapters, against dense references, train.py, and PEFT's own files."""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
import small
from einops import einsum
from mutation import GROUPS, refuse_all_of
from pages import module_of
from parts import assert_refuses, says
from published import FOLDER, batch_of, oracle_of, read_of, step_of, weights_of
from safetensors.numpy import load_file
from several_hosts import logged, where

import train
import train_any
from ledger.compiled.agreement import peak_bytes
from ledger.count.program import read as read_jaxpr
from ledger.count.step import of_step
from models import adapters, huggingface, layers, llama
from models.dropout import Dropout
from models.layers import stored
from runtime import program
from runtime.checkpoints.checkpoint import named_leaves, open_newest, read_leaf
from runtime.config.command_line import run
from runtime.config.keys import PairTokens
from runtime.data.split_writer import write_split
from runtime.run import with_shardings
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.products import Adapted, product
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import bool_, f32, make_shardings, u32
from tools import convert as tools_convert
from tools import plan, plan_step

TRAINING = train_any.Training(
    **dict(seed=0, steps=4, warmup_steps=0, steps_for_lr=4, learning_rate=1e-2, weight_decay=0.1),
    tokens=PairTokens(batch=8, len=24),
)
# Its first moment is the gradient.
OF_GRADIENTS = dataclasses.replace(TRAINING, adam_b1=0.0, max_grad_norm=1e30)


on_mesh = functools.partial(published.on_mesh, p=1)


def config_of(model, d=1, t=1, training=TRAINING, e=1, **keys):
    """A resolved config, as far as the step reads it."""
    given = {"lora": train_any.Lora(), "train": None, "initial_adapter": None, "context": "auto", "fp8": False}
    given |= {"mesh": train_any.Mesh(d=d, t=t, e=e), "masking": train_any.Masking()}
    return types.SimpleNamespace(model=model, training=training, **given | keys)


def stepped(config, weights, batch, trained=None, bos_id=1, weight=1.0, read=None):
    """A step from these weights, which are numpy's in float32: the new state and the metrics. read: of `read_of`."""
    task = train_any.task_of(config)
    if task.lora.rank:
        frozen = jax.tree.map(lambda type_, w: w.astype(type_.element.dtype), task.State.weights.frozen, weights)
        tuned = train_any.Tuned(trained, frozen)
    else:
        tuned = train_any.Tuned(
            *(
                jax.tree.map(lambda type_, w: w if type_ else None, types_, weights, is_leaf=train_any.is_none)
                for types_ in (task.trained, task.State.weights.frozen)
            )
        )
    state = train_any.State(tuned, *(jax.tree.map(np.zeros_like, tuned.trained) for _ in range(2)))
    state = jax.device_put(state, make_shardings(task.State))
    given = {**vars(batch), "weight": batch.is_target.astype(jnp.float32) * weight}
    if read is not None:
        given |= {"read": read.tokens, "read_starts": np.diff(read.segment, axis=1, prepend=0) > 0}
    batch = jax.device_put(task.Batch(**given), make_shardings(task.Batch))
    step, _ = train_any.mapped_steps(config, bos_id)
    new, metrics = jax.jit(step)(state, np.uint32(0), np.uint32(0), batch)
    return jax.tree.map(np.asarray, (new, metrics))


def drawn_adapters(task, seed=0):
    """Adapters whose b is not zero, unlike at the start of training."""
    draws = np.random.default_rng(seed)

    def draw(place, which):
        return draws.normal(size=place.shape(which, task.lora.rank)).astype(np.float32) / 4

    return adapters.tree(task.family, task.places, draw)


def pairs_of(task, low):
    """Each place with its a and b."""
    return [(place, getattr(getattr(low, place.stack), place.name)) for place in task.places]


def part_of(place, weights):
    """The matrices of all layers that a place names, a view of numpy's array."""
    whole = getattr(getattr(weights, place.stack), place.leaf)
    return whole[(slice(None), *place.part)]


# -- The step ----------------------------------------------------------------------------------------------------------
EXPERTS = {"targets": "expert_.*|w_q"}


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("name, mesh, lora, changes", [
    ("llama", (2, 2), {}, {}),
    pytest.param("olmoe", (2, 2, 2), EXPERTS, {}, marks=pytest.mark.slow),
    *(pytest.param(name, (1, 1), {}, {}, marks=pytest.mark.slow) for name in "llama gpt2 t5".split()),
    *(pytest.param(name, (2, 2), {}, {}, marks=pytest.mark.slow)
      for name in "gpt2 qwen3 olmo2 gemma2 gemma3 gptj olmoe t5 t5_gated".split()),
    pytest.param("mixtral", (1, 2, 4), EXPERTS, {}, marks=pytest.mark.slow),
    pytest.param("olmoe", (2, 1, 2), EXPERTS, {"capacity": 4.0}, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_gradients_of_adapters_are_those_of_the_merged_weights(name, mesh, lora, changes, pool):
    """With W = base + s·A·B, dL/dA = s·dL/dW·Bᵀ and dL/dB = s·Aᵀ·dL/dW, where dL/dW is that of the merged weights on
    one device, and the loss is the same. The tolerance is 2e-5 of the largest entry, and twice what one more rounding
    of W changes: up to 3e-5 for T5, whose scores are not divided by the root of d_head."""
    oracle = oracle_of(name)
    source = huggingface.open_weights(FOLDER / name, pool)
    model = dataclasses.replace(source.model, compute_dtype="float32", **changes)
    source = dataclasses.replace(source, model=model)
    lora = train_any.Lora(rank=3, alpha=1.5, **lora)
    config = config_of(model, **dict(zip("dte", mesh)), training=OF_GRADIENTS, lora=lora)
    low = drawn_adapters(train_any.task_of(config))
    task, scale = train_any.task_of(config), np.float32(lora.alpha / lora.rank)
    stored.dtype = "float32"
    with published.on_mesh(1, 1):
        weights, type_ = weights_of(source, pool)
        merged = jax.tree.map(np.array, weights)
        for place, pair in pairs_of(task, low):
            one, other, whole = (" ".join(spec.names) for spec in (place.a, place.b, place.whole))
            part_of(place, merged)[...] += scale * einsum(pair.a, pair.b, f"{one}, {other} -> {whole}")
        dense, given = step_of(source, type_, oracle)
        step, draws = jax.jit(typed_shard_map(dense)), np.random.default_rng(0)
        rounded = jax.tree.map(lambda w: (w * (1 + draws.uniform(-1, 1, w.shape) * 2**-24)).astype(w.dtype), merged)
        (loss, _, by_w), (_, _, by_rounded) = (
            step(jax.device_put(tree, make_shardings(type_)), *given) for tree in (merged, rounded)
        )
        by_w, by_rounded, weights = jax.tree.map(np.asarray, (by_w, by_rounded, weights))
    with on_mesh(**dict(zip("dte", mesh))):
        read = read_of(oracle) if "read" in oracle else None
        new, metrics = stepped(config, weights, batch_of(oracle), low, read=read)
    assert abs(metrics.loss - loss) < 2e-6 * abs(loss)
    for place, pair in pairs_of(task, low):
        found = getattr(getattr(new.adam_mu, place.stack), place.name)
        one, other, whole = (" ".join(spec.names) for spec in (place.a, place.b, place.whole))
        by_a, by_b = (
            [scale * einsum(part_of(place, by), factor, string) for by in (by_w, by_rounded)]
            for factor, string in ((pair.b, f"{whole}, {other} -> {one}"), (pair.a, f"{whole}, {one} -> {other}"))
        )
        for got, (expected, moved) in ((found.a, by_a), (found.b, by_b)):
            atol = 2e-5 * np.abs(expected).max() + 2 * np.abs(moved - expected).max()
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=place.path)
    assert len(jax.tree.leaves(new.adam_mu)) == 2 * len(task.places)


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("mesh", [*small.slow((1, 1)), (2, 2)])
def test_training_all_weights_is_training_them_with_train_py(mesh):
    """A Llama's weights, moments and metrics after a step of two microbatches in bfloat16 have train.py's bits. Rows
    have one sequence each, since train.py counts positions from the row's start and rounds rotary angles
    accordingly."""
    training = dataclasses.replace(TRAINING, microbatches=2, tokens=PairTokens(batch=16, len=32))
    sizes = {key: value for key, value in vars(small.MODEL).items() if key != "attention"}
    with small.on_mesh(*mesh, "bfloat16"):
        init = jax.jit(train.init_state, static_argnums=0, out_shardings=make_shardings(train.State))
        rows = dataclasses.replace(small.BATCH, is_seq_start=np.zeros_like(small.BATCH.is_seq_start))
        state, batch = init(small.MODEL, np.uint32(3)), small.batch_of(rows)
        first, numbers = jax.tree.map(np.asarray, (state.weights, batch))
        expected, theirs = small.step(small.MODEL, training, state, batch)
    with on_mesh(*mesh, "bfloat16"):
        config = config_of(llama.Model(**sizes), *mesh, training=training)
        weights = llama.Weights(**{**vars(first), "transformer": llama.Layer(**vars(first.transformer))})
        new, metrics = stepped(config, weights, numbers, bos_id=0)
    found = dataclasses.replace(new, weights=new.weights.trained)
    assert len(jax.tree.leaves(found)) == 33
    for one, other in zip(jax.tree.leaves((found, metrics)), jax.tree.leaves((expected, theirs)), strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.slow
@pytest.mark.usefixtures("proved_elsewhere")
def test_only_the_named_weights_change(pool):
    """Weights that train leaves out are frozen and have no moments; the named ones change as if all were trained."""
    source = huggingface.open_weights(FOLDER / "qwen3", pool)
    model = dataclasses.replace(source.model, compute_dtype="float32")
    with on_mesh(2, 2):
        weights = jax.tree.map(np.asarray, weights_of(source, pool)[0])
        batch = batch_of(oracle_of("qwen3"))
        whole, _ = stepped(config_of(model, 2, 2, OF_GRADIENTS), weights, batch, weight=0.001)  # of all alike: as 1
        some, metrics = stepped(config_of(model, 2, 2, OF_GRADIENTS, train="transformer/w_q|.*norm"), weights, batch)
    expected = {names[0]: leaf for names, leaf in named_leaves(whole.weights.trained)}
    found = {names[0]: leaf for names, leaf in named_leaves(some.weights.trained)}
    assert sorted(found) == ["final_layer_norm", *(f"transformer/{x}" for x in ("k_norm", "q_norm", "w_q"))]
    assert len(jax.tree.leaves(some.adam_nu)) == 4 == len(metrics.grad_norm_of)
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    frozen = {names[0]: leaf for names, leaf in named_leaves(some.weights.frozen)}
    assert frozen.keys() | found.keys() == expected.keys() and not frozen.keys() & found.keys()
    for names, leaf in named_leaves(weights):
        assert names[0] in found or frozen[names[0]].tobytes() == np.asarray(leaf).tobytes()


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("dtype", ["bfloat16", *small.slow("float32")])
def test_no_gradient_of_the_base_is_computed(dtype):
    """No product of the step with adapters has the size of a matrix's gradient, and all of the step without have."""
    sizes = dict(d_model=24, n_q_per_kv=1, n_kv=4, d_head=10, layers=3, vocab=56, d_ff=72, rope_max_timescale=256)
    model = llama.Model(**sizes, compute_dtype=dtype)  # no product of sizes is that of a matrix
    gradients = {24 * 40, 24 * 72, 24 * 56}
    mesh = jax.sharding.AbstractMesh((1,) * 6, tuple("prdcet"))
    found = {}
    for rank in (0, 2):
        config = config_of(model, training=dataclasses.replace(TRAINING, tokens=PairTokens(batch=11, len=13)))
        config.lora = train_any.Lora(rank=rank)
        config.origins = None
        step, _ = train_any.mapped_steps(config, 0)
        with jax.sharding.use_abstract_mesh(mesh):
            state, batch = train_any.shapes(config)
            traced = jax.jit(step).trace(state, np.uint32(0), np.uint32(0), batch)
        adding = "dot_general", "scatter-add"  # products, and what is looked up and added to
        of_all = (op for op, _ in read_jaxpr(traced.jaxpr).runs() if op.name in adding)
        found[rank] = {int(np.prod(op.outputs[0].shape)) for op in of_all}
    assert gradients <= found[0] and not gradients & found[2]


def test_the_forecast_of_adapters_under_a_large_vocabulary_is_xlas():
    """It is so within a tenth on a CPU, where the logits and their copies are most of a step's memory."""
    sizes = dict(d_model=64, n_q_per_kv=1, n_kv=2, d_head=32, layers=1, vocab=49152, d_ff=128, rope_max_timescale=256)
    training = dataclasses.replace(TRAINING, tokens=PairTokens(batch=8, len=64))
    config = config_of(llama.Model(**sizes, compute_dtype="float32"), training=training, lora=train_any.Lora(rank=8))
    config.origins, zero = None, np.uint32(0)
    with on_mesh():
        task, shapes = train_any.task_of(config), train_any.shapes(config)
        state, batch = map(with_shardings, shapes, (task.State, task.Batch))
        step, _ = train_any.mapped_steps(config, 0)
        traced = jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch)
        xlas = peak_bytes(traced.lower().compile())
    mesh = vars(config.mesh)
    ledger = of_step(traced, mesh, source=train_any.__file__, tokens=batch.targets.size, platform="cpu")
    assert 1 / 1.1 < ledger.memory.bytes / xlas < 1.1


ADAPTERS = {"lora": train_any.Lora(rank=2, alpha=1.0, dropout=0.25)}


@pytest.mark.parametrize("name, mesh, keys, changes", [
    ("llama", {"d": 4, "t": 2}, {}, {}),
    ("llama", {"d": 2, "c": 2, "t": 2}, {}, {}),  # gathers keys
    ("llama", {"c": 2}, ADAPTERS | {"context": "ring"}, {}),
    *(pytest.param("gpt2", {"d": d, "t": 2}, {}, {}, marks=pytest.mark.slow) for d in (2, 4)),
    pytest.param("gpt2", {"c": 2, "t": 2}, ADAPTERS, {}, marks=pytest.mark.slow),
    pytest.param("olmoe", {"c": 4, "e": 2}, {}, {"capacity": 4.0, "capacity_parts": 8}, marks=pytest.mark.slow),
])  # fmt: skip
def test_dropout_is_the_same_on_any_mesh(name, mesh, keys, changes, pool):
    """The loss and each gradient are those of one device, to rounding; another seed has others. So it is of adapters'
    inputs, of rows of several sequences, where a device has positions from both ends of a row, and of experts with
    slots enough."""
    source = huggingface.open_weights(FOLDER / name, pool)

    def found(seed=5, changes=None, **mesh):
        model = dataclasses.replace(source.model, compute_dtype="float32", **changes or {})
        training = dataclasses.replace(OF_GRADIENTS, dropout=0.0 if keys else 0.25, seed=seed)
        config = config_of(model, training=training, **keys, mesh=train_any.Mesh(**mesh))
        with on_mesh(**mesh):
            weights = jax.tree.map(np.asarray, weights_of(source, pool)[0])
            low = drawn_adapters(train_any.task_of(config)) if keys else None
            new, metrics = stepped(config, weights, batch_of(oracle_of(name)), low)
        return metrics.loss, jax.tree.leaves(new.adam_mu)

    (one, of_one), (several, of_several) = found(), found(changes=changes, **mesh)
    assert several == pytest.approx(one, rel=1e-6) and abs(one - found(seed=6)[0]) > 1e-3
    for a, b in zip(of_one, of_several, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


def test_dropout_is_of_what_the_adapter_reads():
    """Identity adapters turn ones into a quarter zeros and 4/3 elsewhere: the same elements on any mesh, others for
    another seed and in each matrix."""
    identity, X = np.eye(16, dtype=np.float32), "B/b L/c M/t"

    def dropped(x: f32[X], a: f32["M/t N"], b: f32["N F"], seed: u32[""], rows: u32["B/b"]) -> f32["2 B/b L/c F"]:
        drop = Dropout(0.25, seed, rows).of_layer(jnp.uint32(0))
        w = Adapted(jnp.zeros((a.shape[0], 16)), a, b, 1.0, drop)
        y = jnp.stack([product(f"{X}, M/t F -> B/b L/c F +t", x, w) for _ in range(2)])
        return shardops.psum("2 B/b L/c F +t -> 2 B/b L/c F", y)

    def on(mesh, seed):
        with on_mesh(*mesh):
            given = np.ones((8, 50, 16), np.float32), identity, identity, np.uint32(seed), np.arange(8, dtype=np.uint32)
            return np.asarray(jax.jit(typed_shard_map(dropped))(*given))

    first, again, other = on((2, 2), 2), on((4, 1), 2), on((2, 2), 3)
    assert first.tobytes() == again.tobytes() and 0.3 < (first != other).mean() < 0.45
    assert set(np.unique(first)) == {0, np.float32(1) / np.float32(0.75)}
    assert abs((first == 0).mean() - 0.25) < 5 * (0.25 * 0.75 / first.size) ** 0.5
    assert (first[0] != first[1]).mean() > 0.3


# -- Runs --------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs as `python -m train_any <overrides>` would, on a small data set; returns the exit status."""
    folder = tmp_path_factory.mktemp("train_any")
    draws = np.random.default_rng(0)
    for split in ("train", "validation"):
        sequences = [draws.integers(0, 40, 11).astype(np.uint32) for _ in range(80)]
        write_split(str(folder / "data.zarr"), split, sequences)
    (folder / "tiny.yaml").write_text(
        "defaults: [base, _self_]\nmesh: {d: 1, t: 1}\nmodel: {compute_dtype: float32}\n"
        "training: {steps: 4, steps_for_lr: 4, warmup_steps: 1, learning_rate: 0.01, tokens: {batch: 4, len: 16}}\n"
        f"flat_tokens: {{filespec: {folder}/data.zarr}}\ncheckpoint_interval: 2\neval_interval: 4\n"
        f"log_interval: 1\ninitial_weights: {FOLDER}/llama\n"
    )

    def call(name, *overrides):
        given = [f"--config-dir={folder}", "--config-name=tiny", *where(folder / name), *overrides]
        proved = contextlib.nullcontext() if "check_only=true" in overrides else small.proved_elsewhere()
        with pytest.MonkeyPatch.context() as patch, proved:
            return small.start_training(patch, *given, trainer=train_any)

    call.folder = folder
    return call


KEYS = ["lora.rank=2", "lora.alpha=6", "lora.targets=w_q|w_v|w_o", "lora.dropout=0.2", "mesh.d=2"]


@pytest.fixture(scope="module")
def lora_run(start):
    """A run with adapters, on two devices."""
    assert start("lora", *KEYS) == 0
    return start.folder / "lora"


def arrays_of(run_folder, pool):
    """All of its newest checkpoint, by name."""
    checkpoint = open_newest(str(run_folder), pool)
    return {name: read_leaf(checkpoint, name, pool) for name in checkpoint.arrays}


def test_a_run_saves_its_adapters_alone(lora_run, pool):
    """It saves adapters and their moments in float32, and what they belong to."""
    arrays = arrays_of(lora_run, pool)
    names = {f"transformer/w_{x}/{which}" for x in "qvo" for which in "ab"}
    assert arrays.keys() == {f"{tree}/{name}" for tree in ("weights", "adam_mu", "adam_nu") for name in names}
    assert arrays["weights/transformer/w_o/a"].shape == (2, 2, 2, 8, 2) and arrays["weights/transformer/w_o/b"].any()
    attributes = open_newest(str(lora_run), pool).attributes
    source = huggingface.open_weights(FOLDER / "llama", pool)
    assert attributes["base"] == huggingface.fingerprint(source, pool) and attributes["family"] == "llama"
    for name in ("validation_loss", "grad_norm_of/transformer/w_q/a"):
        assert max(logged(lora_run, name)) == 4


def test_another_base_or_other_adapters_are_refused(lora_run, start, capsys, monkeypatch):
    """A run that resumes, and a reader of its weights, compare a hash of the base."""
    keys = ["lora.targets=w_.*", "lora.dropout=0.2", "mesh.d=2", "training.steps=5"]
    assert start("lora", "lora.rank=2", "lora.alpha=7", *keys) == 1
    assert "lora.alpha: 6.0 -> 7.0 (command line)" in capsys.readouterr().err
    monkeypatch.setattr(huggingface, "fingerprint", lambda *_: "0123456789abcdef")
    assert start("lora", "lora.rank=2", "lora.alpha=6", *keys) == 1
    assert '-> "0123456789abcdef"' in capsys.readouterr().err
    assert start("next", f"initial_weights={lora_run}") == 1
    assert says(f"trained from other weights … {FOLDER}/llama", capsys.readouterr().err)


def test_a_family_that_has_changed_is_refused(lora_run, start, capsys, monkeypatch, pool):
    """A run that resumes, one that begins from its weights, and tools that take them refuse it."""
    of_family = program._of_family
    monkeypatch.setattr(program, "_of_family", lambda family: of_family(family) | {"models.llama": "of another"})
    keys = ["lora.rank=2", "lora.alpha=6", "lora.targets=w_.*", "lora.dropout=0.2", "mesh.d=2", "training.steps=5"]
    assert start("lora", *keys) == 1
    assert "the program: models.llama\n" in capsys.readouterr().err
    changed = "that run and models/ differ (models.llama): … a family (docs/recipes/family.md) … "
    assert start("next", f"initial_weights={lora_run}") == 1
    assert says(f"{changed}add allow_config_change=true", capsys.readouterr().err)
    opened = huggingface.open_weights(lora_run, pool)
    assert_refuses(f"{changed}add this", huggingface.require_same_program, opened, None, "this")


def test_merged_they_are_the_base_and_their_product(lora_run, pool, tmp_path):
    """`open_weights` reads base + alpha / rank · A · B from a run with adapters; tools.convert writes that, or the
    adapters as PEFT names them, which read back the same."""
    merged = huggingface.open_weights(lora_run, pool)
    base = huggingface.open_weights(FOLDER / "llama", pool)
    arrays = arrays_of(lora_run, pool)
    assert merged.adapters and merged.config == base.config
    for name in merged.checkpoint.arrays:
        found, expected = (read_leaf(source.checkpoint, name, pool) for source in (merged, base))
        leaf = name.rpartition("/")[2]
        if name == "weights/transformer/w_kv":
            pair = [arrays[f"weights/transformer/w_v/{which}"] for which in "ab"]
            expected[:, 1] += 3 * np.einsum("lmr,lrkd->lmkd", *pair)
        elif leaf in ("w_q", "w_o"):
            change = [np.tensordot(*pair, axes=1) for pair in zip(*(arrays[f"{name}/{which}"] for which in "ab"))]
            expected += 3 * np.stack([np.moveaxis(x, -1, 0) if leaf == "w_o" else x for x in change])
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7, err_msg=name)

    def convert(**keys):
        tools_convert.main(tools_convert.Convert(from_=str(lora_run), **keys))

    convert(to=str(tmp_path / "merged"))
    again = huggingface.open_weights(tmp_path / "merged", pool)
    for name in merged.checkpoint.arrays:
        found, expected = (read_leaf(source.checkpoint, name, pool) for source in (again, merged))
        assert found.tobytes() == expected.tobytes(), name
    convert(to=str(tmp_path / "adapter"), adapter=True)
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    lora = train_any.Lora(rank=2, alpha=6.0, targets="w_[qvo]")
    for factor in (1.0, 2.0):  # of the scale of the logits, which a run with weights of its own has in w_q
        model = dataclasses.replace(base.model, compute_dtype="float32", logits_scale=factor * base.model.logits_scale)
        config = config_of(model, lora=lora, initial_adapter=str(tmp_path / "adapter"))
        task = train_any.task_of(config)
        with on_mesh(1, 1):
            like = train_any.with_shardings(train_any.shapes(config)[0].weights.trained, task.trained)
            read = train_any.reader(config, task)(base, model, like, pool)
        for names, leaf in named_leaves(read):
            expected = arrays[f"weights/{names[0]}"] / (factor if names[0] == "transformer/w_q/b" else 1)
            assert np.asarray(leaf).tobytes() == expected.tobytes(), names
        saved = dataclasses.replace(merged, model=model, checkpoint=open_newest(str(lora_run), pool))
        of_run, of_base = (
            read_leaf(source.checkpoint, "weights/transformer/w_q", pool)
            for source in (huggingface.with_base(saved, pool), base)
        )
        change = [arrays[f"weights/transformer/w_q/{which}"] for which in "ab"]
        change = 3 * np.einsum("lmr,lrqkd->lmqkd", *change)
        np.testing.assert_allclose(of_run, of_base / factor + change, rtol=1e-6, atol=1e-7)


OF_PEFT = {
    "llama": ("w_(q|v|o|down|up)", 0.1), "gptj": ("w_(k|o|up)", 0.1), "olmoe": ("expert_.*", 0.0),
    "mixtral": ("expert_.*|w_q", None),
}  # fmt: skip


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("name", ["llama", "olmoe", *small.slow("gptj", "mixtral")])
def test_adapters_of_peft_are_taken(name, pool, tmp_path):
    """Files that PEFT wrote or reads give PEFT's logits, and the same tensors when written again. Arrays of all experts
    are written as those of each, in which gate and up have an a of their own."""
    targets, dropout = OF_PEFT[name]
    folder = FOLDER.parent / "peft" / name
    with np.load(folder / "oracle.npz") as file:
        oracle = dict(file)
    source = huggingface.open_weights(FOLDER / name, pool)
    model = dataclasses.replace(source.model, compute_dtype="float32")
    lora = train_any.Lora(rank=3, alpha=5.0, targets=targets)
    config = config_of(model, 2, 2, lora=lora, initial_adapter=str(folder))
    task = train_any.task_of(config)
    tokens = oracle["tokens"]
    with on_mesh(2, 2):
        weights, _ = weights_of(dataclasses.replace(source, model=model), pool)
        like = train_any.with_shardings(train_any.shapes(config)[0].weights.trained, task.trained)
        low = train_any.reader(config, task)(source, model, like, pool)
        Weights = task.in_step

        def logits(weights: Weights, tokens: u32["B/b L"], first: bool_["B/b L"]) -> f32["B/b L/c V/t"]:
            segment = jnp.cumsum(first, axis=1, dtype=jnp.int32)
            position = jnp.broadcast_to(jnp.arange(first.shape[1], dtype=jnp.int32)[None], first.shape)
            ends = task.family.gather_ends(weights.frozen)
            adapt = functools.partial(train_any.adapted, config.lora, None)
            low = weights.trained.transformer, jnp.arange(model.layers, dtype=jnp.uint32)
            given = (tokens, segment, position + 0 * segment)
            how = layers.Options(adapt=adapt, low=low)
            x = layers.hidden(task.family, model, weights.frozen, *given, ends=ends, how=how)[0]
            return layers.logits_of(ends.unembed, x)

        first = np.zeros(tokens.shape, bool)
        found = jax.jit(typed_shard_map(logits))(train_any.Tuned(low, weights), tokens, first)
        np.testing.assert_allclose(np.asarray(found), oracle["logits"], atol=1e-4, rtol=0)
    values = {place.path: pair for place, pair in pairs_of(task, jax.tree.map(np.asarray, low))}
    named = adapters.named(task.family, model, task.places)
    if dropout is None:
        return
    about = {"base": name, "rank": 3, "alpha": 5.0, "dropout": dropout, "task": "CAUSAL_LM"}

    def read(place, which):
        return getattr(values[place.path], which)

    adapters.write_peft(tmp_path, named, read, about)
    if name == "olmoe":
        gate = [adapter for adapter in named if adapter.place.name == "expert_gate"]
        with pytest.raises(RunError, match="PEFT has adapters of experts' gate and up"):
            adapters.write_peft(tmp_path / "gate", gate, read, about)
    written, expected = (load_file(path / "adapter_model.safetensors") for path in (tmp_path, folder))
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        assert written[key].tobytes() == tensor.tobytes(), key
    ours, theirs = (json.loads((path / "adapter_config.json").read_text()) for path in (tmp_path, folder))
    for key in ("peft_type", "r", "lora_alpha", "lora_dropout", "bias", "task_type"):
        assert ours[key] == theirs[key]
    assert sorted(ours["target_modules"]) == sorted(theirs["target_modules"])


@pytest.mark.slow
def test_some_weights_are_saved_alone_and_read_with_the_rest(start, pool):
    """A run that trains some weights saves only those, by the family's names; the others come from its initial
    weights."""
    assert start("some", "train=transformer/w_q|final_layer_norm", "mesh.t=2") == 0
    arrays = arrays_of(start.folder / "some", pool)
    assert {name for name in arrays if name.startswith("weights")} == {
        "weights/transformer/w_q",
        "weights/final_layer_norm",
    }
    found = huggingface.open_weights(start.folder / "some", pool).checkpoint
    base = huggingface.open_weights(FOLDER / "llama", pool).checkpoint
    for name in base.arrays:
        expected = arrays[name] if name in arrays else read_leaf(base, name, pool)
        assert read_leaf(found, name, pool).tobytes() == expected.tobytes(), name


@pytest.fixture(scope="module")
def pairs(start):
    """Keys of a run of a T5 on what transformers had in golden.py, in which 1 stands before what is written."""
    folder = start.folder / "t5"
    shutil.copytree(FOLDER / "t5_gated", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "decoder_start_token_id": 1}))
    oracle = oracle_of("t5_gated")
    rows = np.concatenate([oracle["read"], oracle["targets"]], axis=1)
    sequences = [part for row in rows for part in np.split(row, [13, 20, 29])]
    is_target = [np.full(len(part), number % 4 > 1) for number, part in enumerate(sequences)]
    for split in ("train", "validation"):
        about = {"attributes": {"row_length": 24, "read_length": 20}, "is_target": is_target}
        write_split(str(start.folder / "pairs.zarr"), split, sequences, **about)
    data = f"flat_tokens.filespec={start.folder}/pairs.zarr"
    return [f"initial_weights={folder}", data, "training.tokens={batch: 8, len: 24, read_len: 20}", "mesh={d: 2, t: 2}"]


@pytest.mark.parametrize("train", small.slow("decoder/.*|encoder_bias", ".*"))
def test_a_model_with_an_encoder_is_trained_on_pairs(train, start, pairs, pool):
    """The first loss and the gradients of all weights, or of some, are those of transformers."""
    name = f"t5_{len(train)}"
    once = ["training.adam_b1=0", "training.max_grad_norm=1e30", "training.steps=1", "log_interval=1"]
    assert start(name, *pairs, *once, f"train='{train}'") == 0
    oracle, source = oracle_of("t5_gated"), huggingface.open_weights(FOLDER / "t5_gated", pool)
    assert logged(start.folder / name, "loss")[1] == pytest.approx(float(oracle["loss"]), rel=1e-5)
    arrays, compared = arrays_of(start.folder / name, pool), 0
    for leaf, rows in huggingface.rows_of(source.family, source.model).items():
        assert (f"adam_mu/{leaf}" in arrays) == bool(re.fullmatch(train, leaf)), leaf
        for place, row in rows.items() if f"adam_mu/{leaf}" in arrays else ():
            found = row.read_out(arrays[f"adam_mu/{leaf}"][place])  # of adam_b1 = 0 the gradient
            np.testing.assert_allclose(found, oracle[f"gradient/{row.name}"], atol=1e-4, rtol=0, err_msg=row.name)
            compared += 1
    assert compared >= 28


@pytest.mark.slow
def test_adapters_of_an_encoder_and_its_decoder(start, pairs, pool, tmp_path):
    """A run saves them, resumes bit for bit with dropout of their own, and goes out to PEFT and comes back in."""
    keys = [*pairs, "lora.rank=2", "lora.dropout=0.2", "flat_tokens.epochs=4"]
    for name, more in (("t5_lora", []), ("t5_half", ["training.steps=2"]), ("t5_half", [])):
        assert start(name, *keys, *more) == 0
    expected = arrays_of(start.folder / "t5_lora", pool)
    assert {"weights/encoder/w_q/a", "weights/decoder/cross_v/b"} <= expected.keys()
    for name, found in arrays_of(start.folder / "t5_half", pool).items():
        assert found.tobytes() == expected[name].tobytes(), name
    adapter = {"to": str(tmp_path / "out"), "adapter": True}
    tools_convert.main(tools_convert.Convert(from_=str(start.folder / "t5_lora"), **adapter))
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_2_SEQ_LM"
    assert config["target_modules"] == ["k", "o", "q", "v", "wi_0", "wi_1", "wo"]
    again = [
        *pairs, "lora.rank=2", f"initial_adapter={tmp_path}/out", "training.steps=1", "training.learning_rate=1e-30",
    ]  # fmt: skip
    assert start("t5_again", *again) == 0
    for name, found in arrays_of(start.folder / "t5_again", pool).items():
        if name.startswith("weights"):
            assert found.tobytes() == expected[name].tobytes(), name


def test_what_cannot_be_trained_is_refused(start, capsys, tmp_path):
    """The message says what to set; nothing is compiled."""
    refused = [
        (["initial_weights=null"], "model: expected a family … (+family=llama, say), or initial_weights"),
        (["+family=gpt2"], "model.family = \"gpt2\": initial_weights ="),
        (["initial_weights=null", "model.family=qwen3"],
         "model.family = \"qwen3\": expected bert, gemma, gpt2, gptj, llama,"),
        (["initial_weights=null", "+family=gpt2"], "model.d_ff is missing: expected a whole number"),
        (["best_by=score/exam.jsonl/acc"], "best_by = \"score/exam.jsonl/acc\": patience goes by it: set that too"),
        (["eval_tasks=[exam.jsonl]", "eval_interval=null"], "eval_tasks = … validations score them: set eval_interval"),
        (["patience=2", "checkpoint_interval=null"], "patience = 2: it keeps the best … set checkpoint_interval"),
        (["eval_tasks=[a/exam.jsonl,b/exam.jsonl]"], "eval_tasks = … named by file: give each another name"),
        (["initial_weights=null", "+family=llama", "lora.rank=2"],
         "lora.rank, train: what is frozen would stay random"),
        (["--config-name=any_synthetic", "family=mixtral", "model.experts=1"],
         "model.experts_per_token = 2: expected 1 to model.experts = 1"),
        (["--config-name=any_synthetic", "family=gptj", "model.d_head=8"], "model.d_rotary = 16: expected an even"),
        (["model.d_modl=8"], "command line: model.d_modl is not a key … model.d_model"),
        (["model=5"], "model = 5: expected a section, {key: value}"),
        (["model.d_model=8"], "model.d_model = 16: this run's model has 8"),
        (["model.attention=fast"], "command line: model.attention = \"fast\": expected auto or"),
        (["masking.share=0.3"], "masking: only encoders … leave it out"),
        (["--config-name=any_synthetic", "family=bert", "masking.token=1280"],
         "masking.token = 1280: expected an id below model.vocab = 1280"),
        (["--config-name=any_synthetic", "family=bert", "mesh={c: 8}"],
         "mesh.c = 8, context = auto: an encoder"),
        (["--config-name=any_synthetic", "family=lama"], "no config lama in configs/family … llama"),
        (["--config-name=any_synthetic", "family=bert", "masking.token=null"],
         "masking.token = null: expected the id, below model.vocab"),
        ([f"initial_weights={FOLDER}/t5"],
         "training.tokens.read_len = 0: expected how many tokens"),
        (["training.tokens.read_len=8"], "training.tokens.read_len = 8: only models with an encoder"),
        (["lora.rank=2", "fp8=true"], "fp8 = true: adapters have no 8-bit form"),
        ([f"initial_weights={FOLDER}/olmoe", "lora.rank=2", "lora.targets=expert_up", "lora.dropout=0.1"],
         "lora.dropout: expected 0 for adapters of experts"),
        ([f"initial_weights={FOLDER}/olmoe", "fp8=true"], "fp8 = true: experts have no 8-bit form"),
        (["lora.rank=2", "train=embed"], "train and lora.rank: expected one of them"),
        (["lora.targets=w_q"], "lora.rank = 0: without adapters all weights are trained"),
        (["training.balance_loss=0.01"], "training.balance_loss, … only mixtures have routers"),
        (["lora.rank=2", "training.optimizer=muon"], "training.optimizer = muon: it is for the matrices"),
        (["training.dropout=0.1", "model.attention=blockwise"],
         "model.attention = blockwise has no probabilities"),
        (["training.dropout=0.1", "context=ring"], "context = ring has no probabilities for training.dropout"),
        (["training.batch_doubles_at=[1,2]", "training.microbatches=2"],
         "training.batch_doubles_at = [1, 2]: training.microbatches = 2 is halved"),
        (["training.batch_doubles_at=[2,1]"], "training.batch_doubles_at = [2, 1]: expected … increasing"),
        (["train=w_q"], "train = 'w_q' matches no weight: embed, unembed"),
        (["train='w_q|('"], "train = \"w_q|(\": expected a regular expression"),
        (["lora.rank=2", "lora.targets='*'"], "lora.targets = \"*\": expected a regular expression"),
        (["lora.rank=2", "lora.targets=q_proj"], "lora.targets = 'q_proj' is none of the matrices"),
        (["initial_adapter=x"], "initial_adapter: set lora.rank and lora.alpha … adapter_config.json"),
    ]  # fmt: skip
    peft = f"initial_adapter={FOLDER.parent}/peft/llama"
    refused += [
        (["lora.rank=2", peft], "r = 3, expected 2: set lora.rank=3"),
        (["lora.rank=3", "lora.alpha=5", peft], "lora_A.weight: expected [3, 16]"),
        (["lora.rank=3", "lora.alpha=5", "lora.targets=w_q", peft], "up_proj.lora_A.weight: lora.targets leaves it"),
        (["lora.rank=3", "lora.alpha=5", f"initial_adapter={tmp_path}"], "adapter_config.json cannot be read"),
    ]  # fmt: skip
    for keys, message in refused:
        assert start("cannot_be", *keys) == 1
        assert says(message, capsys.readouterr().err), keys
        assert sorted(path.name for path in (start.folder / "cannot_be").iterdir()) == ["profile", "step.svg"], keys


def test_a_kind_of_adapter_that_is_not_computed_is_refused(pool, tmp_path):
    """A field of adapter_config.json that the program does not read is refused, not ignored, unless it says how the
    adapters were drawn."""
    config = json.loads((FOLDER.parent / "peft/llama/adapter_config.json").read_text())
    source = huggingface.open_weights(FOLDER / "llama", pool)
    task = train_any.task_of(config_of(source.model, lora=train_any.Lora(rank=3, alpha=5.0, targets="w_q")))
    named = adapters.named(task.family, task.model, task.places)
    for key, value in {"use_dora": True, "rank_pattern": {"q": 2}, "init_lora_weights": "pissa", "new": 1}.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(RunError, match=f"{key} = "):
            adapters.read_peft(tmp_path, named, 3, 5.0)
    for drawn in (False, "gaussian"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": drawn}))
        with pytest.raises(RunError, match=r"there are no \*\.safetensors"):
            adapters.read_peft(tmp_path, named, 3, 5.0)
    fused = huggingface.open_weights(FOLDER / "gpt2", pool)
    task = train_any.task_of(config_of(fused.model, lora=train_any.Lora(rank=3)))
    with pytest.raises(RunError, match=r"PEFT has one adapter for all of transformer.*c_attn\.weight"):
        adapters.named(task.family, task.model, task.places)


def test_it_is_checked_and_planned_without_a_device(start, capsys, monkeypatch, tmp_path):
    """check_only proves both steps, of one row a device and microbatch; tools.plan counts the step, and in 6 ×
    parameters × tokens no frozen weight."""
    rows = ["training.tokens.batch=8", "training.microbatches=2"]
    assert start("checked", "lora.rank=2", "mesh={d: 4, t: 2}", "check_only=true", *rows) == 0
    out = capsys.readouterr().out
    for step in ("training_step", "validation_step"):
        assert f"{step} on the mesh p=1 × r=1 × d=4 × c=1 × e=1 × t=2: " in out
    keys = ["program=train_any", "lora.rank=2", "hardware=h200", f"folder={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["plan", f"--config-dir={start.folder}", "--config-name=tiny", *keys])
    run(plan.main, plan_step.plan_class(train_any))
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    # 2 layers of (16 + 16) q, o; (16 + 8) k, v; (16 + 24) gate, up, down: what each reads and writes.
    heads, kv, d_ff, layers_ = 2 * 2 * 8, 2 * 8, 24, 2
    count = layers_ * 2 * (2 * (16 + heads) + 2 * (16 + kv) + 3 * (16 + d_ff))
    assert ledger["parameters"] == count and ledger["flops_6nd"] == 6 * count * 64
    frozen = {kind: size for kind, size in ledger["memory"]["by_kind"].items() if kind == "weights"}
    assert frozen["weights"] > 4 * count


@pytest.mark.slow
def test_every_mutant_of_the_program_is_refused(pool, tmp_path, record_property):
    """The check refuses each mutant (mutation.py) with adapters, with some weights, in a mixture, or on stages."""
    names = "llama", "olmoe", "bert", "t5"
    llama_, olmoe, bert_, t5_ = [huggingface.open_weights(FOLDER / name, pool).model for name in names]
    bert_ = dataclasses.replace(bert_, positions=32)
    rows = PairTokens(batch=16, len=32, read_len=24)
    training = dataclasses.replace(TRAINING, microbatches=2, tokens=rows)

    def check(path, text):
        module, proved = module_of(path, text), 0
        number, loss = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
        lora, some = {"lora": train_any.Lora(rank=2, targets="w_[qo]")}, {"train": ".*norm|transformer/w_q"}
        on_stages = {"mesh": train_any.Mesh(p=2, r=2, d=2, t=2)}
        cases = (llama_, lora), (llama_, some), (olmoe, {"train": ".*router"}), (bert_, {}), (t5_, {})
        cases += (llama_, on_stages), (olmoe, on_stages)
        for model, keys in cases:
            config = config_of(model, 4, 2, training, **keys)
            state, batch = module.shapes(config)
            sizes = (2 if keys is on_stages else 1, 2, 2, 1, 1, 2)
            mesh = jax.sharding.AbstractMesh(sizes, tuple("prdcet"))
            step, validate = module.mapped_steps(config, 0)
            proved += step.check(mesh, state, number, number, batch)
            proved += validate.check(mesh, state.weights, loss, loss, batch)
        return proved

    assert check(tmp_path / "train_any.py", Path(train_any.__file__).read_text()) > 100
    assert refuse_all_of("train_any.py", check, tmp_path, record_property, None, GROUPS) > 20
