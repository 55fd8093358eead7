"""python -m train_any with what optimizers.py adds to train.py: runs that stop and resume, and their averages."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import small
import zarr
from parts import says
from published import FOLDER, on_mesh
from several_hosts import logged, where
from test_axes import ledger_of
from test_train_any import arrays_of, start  # noqa: F401 a fixture

import train_any
from models import bert, huggingface
from models.layers import WeightedBatch
from runtime.checkpoints.checkpoint import read_leaf
from runtime.config.command_line import load
from runtime.data.split_writer import write_split
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import u32
from shardlib.typed import typed

ROOT = FOLDER.parents[2]

ALL = """
    training.optimizer=muon training.moment_dtype=bfloat16 training.ema_decay=0.5 training.dropout=0.1
    training.z_loss=1e-3 training.schedule=constant training.microbatches=2 train='embed|transformer/w_q'
""".split()
FOUR = "mesh={d: 2, t: 2}"


@pytest.fixture(scope="module")
def whole(start):  # noqa: F811
    """A run with all of it on four devices."""
    assert start("whole", *ALL, FOUR) == 0
    return start.folder / "whole"


@pytest.fixture(scope="module")
def half(start):  # noqa: F811
    """The same, after two of four steps."""
    assert start("half", *ALL, FOUR, "training.steps=2") == 0
    return start.folder / "half"


def test_it_resumes_bit_for_bit(whole, half, start, pool):  # noqa: F811
    """A resumed run with the average, rounded moments and dropout leaves the checkpoint of a run that was never
    stopped."""
    shutil.copytree(half, start.folder / "resumed")
    assert start("resumed", *ALL, FOUR) == 0
    expected = arrays_of(whole, pool)
    names = {"embed", "transformer/w_q"}
    assert expected.keys() == {f"{tree}/{name}" for tree in ("weights", "ema", "adam_mu") for name in names} | {
        "adam_nu/embed"
    }
    assert expected["adam_mu/embed"].dtype == expected["adam_nu/embed"].dtype == np.uint16
    for name, values in arrays_of(start.folder / "resumed", pool).items():
        assert values.tobytes() == expected[name].tobytes(), name


@pytest.mark.slow
def test_a_run_ends_when_it_gets_no_better(start, capsys):  # noqa: F811
    """Steps so large that one soon makes it worse end the run after that validation, also if it was stopped before; the
    best checkpoint stays beside the last, and the run does not start again."""
    worse = ["training.learning_rate=3.0", "training.steps=9", "training.steps_for_lr=9", "checkpoint.keep_last=1"]
    worse += ["eval_interval=1", "patience=1", "lora.rank=2", "training.warmup_steps=0"]
    assert start("ends", *worse) == 0
    losses = logged(start.folder / "ends", "validation_loss")
    best, last = min(losses, key=losses.get), max(losses)
    assert last == best + 1 < 9
    checkpoints = [f"{start.folder}/ends/checkpoints/{step:010d}" for step in (best, last)]
    said = f"the best validation_loss, {losses[best]:.4f}, is that of {checkpoints[0]}; none was better in 1 after it"
    assert f"ended after step {last} of 9: {said}" in " ".join(capsys.readouterr().out.split())
    there = (start.folder / "ends/checkpoints").iterdir()
    assert sorted(str(path) for path in there if path.name.isdigit()) == checkpoints
    assert start("ended", *worse, f"training.steps={last - 1}") == 0 and start("ended", *worse) == 0
    assert logged(start.folder / "ended", "validation_loss") == losses
    assert start("ended", *worse) == 0 and "nothing to train: the best validation_loss" in capsys.readouterr().out
    assert start("other", *worse, "best_by=score/x/acc") == 1
    assert says("best_by = score/x/acc: … gives validation_loss", capsys.readouterr().err)


@pytest.mark.slow
def test_a_batch_that_grows_resumes_bit_for_bit(start, pool):  # noqa: F811
    """Steps of 1, 2, 2 and 4 microbatches leave the checkpoint of a run that was never stopped, and have the losses of
    one device. The rows are read in the order of equal steps, each once."""
    grows = ["training.microbatches=4", "training.tokens.batch=16", "training.batch_doubles_at=[1,3]", "mesh.d=2"]
    assert start("grows", *grows) == 0
    for steps in (1, 2, 3, 4):
        assert start("grown", *grows, f"training.steps={steps}") == 0
    expected = arrays_of(start.folder / "grows", pool)
    for name, values in arrays_of(start.folder / "grown", pool).items():
        assert values.tobytes() == expected[name].tobytes(), name
    assert start("one", *grows[:-1]) == 0
    one, two = (logged(start.folder / name, "loss") for name in ("one", "grows"))
    assert one.keys() == {1, 2, 3, 4} and one == pytest.approx(two, rel=1e-6)
    assert start("small", "training.tokens.batch=4", "training.steps=1") == 0
    assert logged(start.folder / "small", "loss")[1] == pytest.approx(one[1], rel=1e-6)
    assert start("grown", *grows[:2], "training.batch_doubles_at=[1,2]", "training.steps=5") == 1


def test_the_average_is_exported(whole, pool):
    """What is read of the run is the average, not the last weights."""
    arrays, source = arrays_of(whole, pool), huggingface.open_weights(whole, pool)
    for name in ("weights/embed", "weights/transformer/w_q"):
        read = read_leaf(source.checkpoint, name, pool)
        assert read.tobytes() == arrays[name.replace("weights", "ema")].tobytes() != arrays[name].tobytes()
    of_another = dataclasses.replace(huggingface.open_newest(str(whole), pool), attributes={"config": {"training": {}}})
    assert huggingface.averaged(of_another) is of_another  # whose `ema` may be something else
    of_another = dataclasses.replace(of_another, arrays=dict.fromkeys(["weights/embed", "weights_ema/embed"]))
    assert list(huggingface.weights_in(of_another)) == ["weights/embed"]


def test_another_optimizer_is_refused(half, start, capsys):  # noqa: F811
    """A run does not resume with it, since its moments mean something else."""
    assert start("half", *ALL, FOUR, "training.optimizer=adamw", "training.ema_decay=0.6") == 1
    assert 'training.optimizer: "muon" -> "adamw" (command line)' in capsys.readouterr().err


@pytest.mark.slow
def test_a_constant_run_can_be_resumed_with_its_decay(half, start):  # noqa: F811
    """The rate falls tenfold to the end: at step 4 it is half way there."""
    shutil.copytree(half, start.folder / "decays")
    assert start("decays", *ALL, FOUR, "training.decay_from=2") == 0
    assert logged(start.folder / "decays", "learning_rate") == pytest.approx({1: 0.01, 2: 0.01, 3: 0.01, 4: 0.0055})


@pytest.mark.slow
def test_the_average_is_validated(whole, start):  # noqa: F811
    """The validation loss was that of the weights which are read: those of a run from them that changes nothing."""
    still = ["training.learning_rate=1e-30", "training.weight_decay=0", "training.steps=1"]
    assert start("still", f"initial_weights={whole}", *still) == 0
    again = logged(start.folder / "still", "validation_loss")[1]
    assert abs(logged(whole, "validation_loss")[4] - again) <= 1e-6 * again


FAMILIES = {path.stem: ["mesh={r: 2, d: 1, c: 2, t: 2}"] for path in sorted((ROOT / "configs/family").glob("*.yaml"))}
MIXTURES = "mixtral", "olmoe", "qwen3_moe"
FAMILIES |= {key: ["mesh={r: 2, d: 1, c: 2, e: 2, t: 1}"] for key in MIXTURES}
FAMILIES |= {
    "olmoe": ["mesh={d: 2, e: 2, t: 2}"],
    "t5": ["mesh={r: 2, d: 2, t: 2}"],
    "bert": ["mesh={d: 2, c: 2, t: 2}"],
}
OF_FAMILY = {key: ["model.window=8"] for key in ("mistral", "gemma2", "gemma3")} | {
    "gptj": ["model.d_rotary=4"],
    "bert": ["masking.share=0.5"],
}
SMALL = """
    --config-name=any_synthetic model.d_model=32 model.d_head=8 model.d_ff=64 model.compute_dtype=float32
    training.steps=5 training.steps_for_lr=5 training.warmup_steps=1 training.tokens.batch=8 training.tokens.len=32
    log_interval=1 eval_interval=5 checkpoint_interval=5 validation_batches=1
""".split()


@pytest.fixture
def small_run(tmp_path, monkeypatch, proved_elsewhere):
    """Trains a small model; gives its losses, the last of them of validation."""
    monkeypatch.chdir(ROOT)

    def call(name, *keys):
        assert small.start_training(monkeypatch, *SMALL, *where(tmp_path / name), *keys, trainer=train_any) == 0
        return [*logged(tmp_path / name, "loss").values(), *logged(tmp_path / name, "validation_loss").values()]

    return call


def pairs_for_t5(folder):
    """Keys of a data set of pairs, which this writes."""
    rows = np.random.default_rng(0).integers(2, 60, (80, 48)).astype(np.uint32)
    sequences, is_target = [part for row in rows for part in np.split(row, [16])], [[False] * 16, [True] * 32] * 80
    for split in ("train", "validation"):
        about = {"attributes": {"row_length": 32, "read_length": 16}, "is_target": map(np.array, is_target)}
        write_split(f"{folder}/pairs.zarr", split, sequences, **about)
    return [f"flat_tokens.filespec={folder}/pairs.zarr", "training.tokens.read_len=16"]


def keys_of(family, folder):
    """Keys of a run of a family, with its data if they are others."""
    return [f"family={family}", *OF_FAMILY.get(family, []), *(pairs_for_t5(folder) if family == "t5" else [])]


@pytest.mark.parametrize("family", small.slow(*sorted(FAMILIES)))
def test_any_family_from_random_weights(family, small_run, tmp_path, pool):
    """Its losses begin near those of a guess and fall, and on three axes at once are those of one device; so are the
    gradient's norm and what routers report. It can be published, and a run that begins from that and changes nothing
    has its validation loss."""
    keys = keys_of(family, tmp_path)
    one = small_run("one", *keys, "mesh={d: 1, t: 1}")
    assert abs(one[0] - np.log(1280)) < 0.7 and min(one[1:5]) < one[0] - 0.2
    assert small_run("several", *keys, *FAMILIES[family]) == pytest.approx(one, rel=1e-5)
    for name in ["grad_norm", *(["balance_loss", "largest_load"] if family in MIXTURES else [])]:
        expected, found = (logged(tmp_path / run, name) for run in ("one", "several"))
        assert len(expected) == 5 and found[1] == pytest.approx(expected[1], rel=1e-5), name
        if family in ("llama", *MIXTURES):  # other families: rounding grows with the steps
            assert found == pytest.approx(expected, rel=1e-5), name
    huggingface.export(huggingface.open_weights(tmp_path / "one", pool), tmp_path / "published", "float32", pool)
    again = [f"initial_weights={tmp_path}/published", "training.learning_rate=1e-30", "training.weight_decay=0"]
    assert small_run("again", *keys, *again, "mesh={d: 1, t: 1}")[-1] == pytest.approx(one[-1], rel=1e-6)


@pytest.mark.parametrize("family", ["olmoe", "t5", *small.slow(*sorted(FAMILIES.keys() - {"olmoe", "t5"}))])
def test_model_flops_do_not_depend_on_the_mesh(family):
    """What several devices compute alike counts once, with adapters and without; causal attention counts half."""
    keys = [*SMALL[1:], f"family={family}", *OF_FAMILY.get(family, []), "training.microbatches=2"]
    keys += ["training.tokens.read_len=16"] if family == "t5" else []
    meshes = ["mesh={d: 1, t: 1}", *FAMILIES[family], "mesh={d: 2, t: 4}"]
    meshes += [] if family in ("bert", "t5") else ["mesh={p: 2, d: 1, c: 2, t: 2}"]
    configs = [train_any.resolved(load(train_any.Config, "any_synthetic", [*keys, mesh])) for mesh in meshes]
    for lora in train_any.Lora(), train_any.Lora(rank=2, targets=".*|expert_.*"):
        one, *others = (ledger_of(dataclasses.replace(config, lora=lora)) for config in configs)
        assert [other.model_flops for other in others] == pytest.approx([one.model_flops] * len(others), rel=1e-12)
        rows = [(row, times) for row, times in one.costs.products.items() if row.phase == "forward"]
        model, tokens = configs[0].model, configs[0].training.tokens
        heads = getattr(model, "n_q_per_kv", 1) * model.n_kv
        causal = 0 if family == "bert" else 4 * tokens.batch * tokens.len**2 * heads * model.d_head * model.layers
        assert sum(row.flops * times for row, times in rows if row.needed == 0.5) == causal


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_dropout_of_a_family_with_an_encoder(family, small_run, tmp_path):
    """The losses on any mesh are those of one device, and differ from those without dropout."""
    keys = keys_of(family, tmp_path)
    without, one = (
        small_run(f"rate_{rate}", *keys, f"training.dropout={rate}", "mesh={d: 1, t: 1}") for rate in (0, 0.2)
    )
    found = small_run("several", *keys, "training.dropout=0.2", *FAMILIES[family])
    assert found == pytest.approx(one, rel=1e-5) and one[0] != without[0]
    assert one[5] == pytest.approx(without[5], rel=0.1)  # of validation, which has none


def test_masked_tokens_are_a_function_of_seed_row_and_place():
    """The share of targets and how they read, 80 : 10 : 10 the mask, any token, themselves, are as told, and equal on
    any mesh; other tokens stay."""
    tokens = np.random.default_rng(0).integers(0, 500, (64, 128)).astype(np.uint32)
    one = np.ones(tokens.shape)
    batch = WeightedBatch(tokens, one == 0, one == 1, one.astype(np.float32))
    batch.is_target[:, 7] = False

    def read(d, t, c=1):
        with on_mesh(d, t, c=c):

            @typed
            def step(batch: WeightedBatch, seed: u32[""]) -> bert.MaskedBatch:
                return bert.masked(batch, train_any.row_numbers(batch, "B/b"), seed, 0.15, 499, 500)

            return jax.tree.map(np.asarray, jax.jit(typed_shard_map(step))(batch, np.uint32(3)))

    found = read(1, 1)
    for other in (read(4, 2), read(2, 1, 2)):
        assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(other)))
    chosen = found.is_target
    assert not chosen[:, 7].any() and (found.weight == chosen).all()
    assert (found.inputs[~chosen] == tokens[~chosen]).all() and (found.targets == tokens).all()
    count = chosen.sum()
    assert abs(count / chosen.size - 0.15) < 0.012
    kept = found.inputs[chosen] == tokens[chosen]
    shares = [(found.inputs[chosen] == 499).mean(), kept.mean()]
    np.testing.assert_allclose(shares, [0.8, 0.1], atol=0.03)


@pytest.mark.slow
def test_bert_predicts_masked_tokens_better_than_a_table_of_bigrams(monkeypatch, tmp_path):
    """After 100 steps from random weights on the repository's data its loss is below the best smoothing of counted
    pairs."""
    monkeypatch.chdir(ROOT)
    keys = """family=bert training.steps=100 training.steps_for_lr=100 training.warmup_steps=20
        training.learning_rate=3e-3 eval_interval=100 checkpoint_interval=100 log_interval=50 flat_tokens.epochs=2
        model.compute_dtype=float32 mesh.d=2 mesh.t=1"""
    assert small.start_training(monkeypatch, *keys.split(), *where(tmp_path / "run"), trainer=train_any) == 0
    (loss,) = logged(tmp_path / "run", "validation_loss").values()
    groups = (zarr.open_group(f"synthetic_dataset.zarr/{name}", mode="r") for name in ("train", "validation"))
    train_ids, ids = (group["encoded_tokens"][:] >> 1 for group in groups)
    pairs, single = np.zeros((1280, 1280)), np.bincount(train_ids, minlength=1280) + 0.01
    single /= single.sum()
    np.add.at(pairs, (train_ids[:-1], train_ids[1:]), 1)
    count = pairs.sum(1)
    of_bigrams = [
        -np.log((pairs[ids[:-1], ids[1:]] + a * single[ids[1:]]) / (count[ids[:-1]] + a)).mean() for a in (1, 3, 10, 30)
    ]
    assert loss < min(of_bigrams) - 0.2


STAGES = (
    ["mesh={p: 2, d: 2, t: 2}"],
    ["mesh={p: 4, d: 2, t: 1}"],
    ["mesh={p: 2, d: 1, c: 2, t: 2}", "training.pieces=2"],
)
OF_STAGES = {"mixtral": ["mesh={p: 2, d: 1, e: 2, t: 2}"], "olmoe": ["mesh={p: 4, d: 1, e: 2, t: 1}"]}
OTHERWISE = {
    "adapters": ["lora.rank=2", "lora.dropout=0.1"],
    "some": ["train=transformer/.*", "training.moment_dtype=bfloat16", "training.optimizer=muon"],
    "all": ["training.dropout=0.1", "training.ema_decay=0.5", "training.batch_doubles_at=[1]", "training.z_loss=1e-3"],
    "inputs": ["training.save_for_backward=inputs", "training.optimizer=adafactor"],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [*(family for family in FAMILIES if family not in ("bert", "t5")), *OTHERWISE])
def test_whatever_is_trained_on_stages(what, small_run, tmp_path):
    """Any family, and adapters, some weights or all of a Llama's that are given, have the losses of one device."""
    keys = ["model.layers=4", "training.microbatches=4", "training.tokens.batch=16"]
    if what in OTHERWISE:
        small_run("first", *keys, "mesh={d: 1, t: 1}")
        keys += [f"initial_weights={tmp_path}/first", "training.learning_rate=0.01", *OTHERWISE[what]]
        mesh = STAGES[0]
    else:
        keys += [*keys_of(what, tmp_path), "training.steps=3", "eval_interval=3"]
        mesh = OF_STAGES.get(what, STAGES[list(FAMILIES).index(what) % 3])
    one = small_run("one", *keys, "mesh={d: 1, t: 1}")
    assert small_run("several", *keys, *mesh) == pytest.approx(one, rel=1e-5)


def gathered_by(folder):
    """Bytes that the run's all-gathers of weights over d make, in float32 and in 8 bits."""
    rows = json.loads((folder / "ledger.json").read_text())["collectives"]
    rows = [row for row in rows if row["kind"] == "all-gather" and "d" in row["axes"]]
    return [sum(row["bytes"] * row["times"] for row in rows if row["dtype"] == dtype) for dtype in ("float32", "uint8")]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "t5"])
def test_products_in_8_bits(family, small_run, tmp_path):
    """Losses are those of one device, and near those of products in the type of activations but not they; matrices of
    layers are gathered in a byte an element."""
    keys = keys_of(family, tmp_path)
    plain = small_run("plain", *keys, "mesh={d: 2, t: 2}")
    one, found = (small_run(f"on_{n}", *keys, "fp8=true", f"mesh={{d: {n}, t: {n}}}") for n in (1, 2))
    assert found[:5] == pytest.approx(one[:5], rel=1e-5) and found != plain
    assert found == pytest.approx(plain, rel=0.02)
    (as_f32, none), (fewer, as_bytes) = (gathered_by(tmp_path / name) for name in ("plain", "on_2"))
    assert none == 0 and as_f32 - fewer == 4 * as_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "t5"])
def test_what_is_kept_on_the_host(family, small_run, tmp_path):
    """The losses are the same bit for bit; a CPU has only one memory."""
    keys = [*keys_of(family, tmp_path), *FAMILIES[family]]
    assert small_run("device", *keys) == small_run("host", *keys, "training.save_for_backward=on_host")
