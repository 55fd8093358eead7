"""A run that begins with another's weights, or with published ones: what is theirs, and what begins anew."""

import functools
import re

import jax
import numpy as np
import pytest
import small
from published import FOLDER, config_of, on_mesh, oracle_of, published_as
from safetensors.numpy import load_file
from several_hosts import logged, where

import train
from models import huggingface
from runtime.data.split_writer import write_split
from runtime.run import with_shardings

pytestmark = pytest.mark.usefixtures("proved_elsewhere")
RUN = """model.d_model=16 model.n_q_per_kv=2 model.n_kv=2 model.d_head=8 model.d_ff=24 model.vocab=40
    model.rope_max_timescale=10000 model.compute_dtype=float32 training.tokens.batch=8 training.tokens.len=24
    training.steps=4 training.steps_for_lr=4 training.warmup_steps=0 checkpoint_interval=4 eval_interval=4
    log_interval=1 flat_tokens.epochs=9""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The rows that transformers computed the loss of, for training and for validation."""
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    rows = [part for row in oracle_of("llama")["targets"] for part in np.split(row, [9])]
    for split in ("train", "validation"):
        write_split(path, split, rows, bos_id=1)
    return f"flat_tokens.filespec={path}"


def start(monkeypatch, folder, *overrides):
    return small.start_training(monkeypatch, *RUN, *where(folder), *overrides)


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(data, monkeypatch, tmp_path, capsys):
    """A run that changes nothing, on another mesh, has the source's last validation loss; steps and learning rate begin
    anew. When it resumes it reads its own checkpoint, not the source."""
    assert start(monkeypatch, tmp_path / "first", data, "mesh.d=4", "mesh.t=2") == 0
    still = [data, "training.steps=1", "training.learning_rate=1e-30", f"initial_weights={tmp_path / 'first'}"]
    assert start(monkeypatch, tmp_path / "second", *still, "mesh.d=2", "mesh.t=1", "training.seed=5") == 0
    before, after = (logged(tmp_path / name, "validation_loss") for name in ("first", "second"))
    assert after[1] == pytest.approx(before[4], abs=1e-5)
    assert re.search(r"the first weights are those of\s+\S+first/checkpoints/0000000004", capsys.readouterr().out)
    assert f"initial_weights: {tmp_path / 'first'}" in (tmp_path / "second/config.yaml").read_text()
    more = [data, "training.steps=2", "training.steps_for_lr=2", "initial_weights=/moved/away", "mesh.d=2", "mesh.t=1"]
    assert start(monkeypatch, tmp_path / "second", *more, "training.seed=5") == 0
    assert list(logged(tmp_path / "second", "loss")) == [1, 2]


def test_train_py_starts_from_published_weights(data, monkeypatch, tmp_path):
    """The loss of the first step is the one that transformers computes with them."""
    weights = f"initial_weights={FOLDER / 'llama'}"
    assert start(monkeypatch, tmp_path / "run", data, weights, "mesh.d=4", "mesh.t=2", "model.norm_eps=1e-6") == 0
    losses = logged(tmp_path / "run", "loss")
    assert losses[1] == pytest.approx(float(oracle_of("llama")["loss"]), abs=1e-5) and losses[4] < losses[1]


def test_tied_weights_begin_both_tables(pool, tmp_path):
    """A published Llama without a second table fills both of train.py's with its embedding; all other weights are equal
    too."""
    tensors = load_file(FOLDER / "llama/model.safetensors")
    tables = {"tied": {}, "twice": {"lm_head.weight": tensors["model.embed_tokens.weight"]}}
    del tensors["lm_head.weight"]
    sizes = {"d_model": 16, "n_q_per_kv": 2, "n_kv": 2, "d_head": 8, "layers": 2, "vocab": 40, "d_ff": 24}
    model = train.Model(**sizes, rope_max_timescale=10000)
    shapes = jax.eval_shape(functools.partial(train.init_state, model), np.uint32(0)).weights
    found = []
    with on_mesh(2, 2):
        for name, table in tables.items():
            config = config_of("llama") | {"tie_word_embeddings": name == "tied"}
            source = huggingface.open_weights(published_as(tmp_path / name, "llama", config, tensors | table), pool)
            found.append(huggingface.restored(source, model, with_shardings(shapes, train.Weights), pool))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert np.asarray(found[0].unembed).tobytes() == tensors["model.embed_tokens.weight"].tobytes()


@pytest.mark.parametrize(("weights", "text"), [
    ("llama_linear_tied", 'model.rope_scaling = {"kind": "linear", '),
    ("mistral", "model.window = 5: this run's model"),
    ("olmo2", 'model.qk_norm = "all": this run\'s model'),
    ("nowhere", "there is no run, checkpoint or folder"),
])  # fmt: skip
def test_weights_of_another_model_are_refused(weights, text, data, monkeypatch, tmp_path, capsys):
    """The message names the keys that train.py's model lacks; nothing is compiled, and no run folder is left."""
    keys = [f"initial_weights={FOLDER / weights}", "mesh.d=1", "mesh.t=1"]
    assert start(monkeypatch, tmp_path / "run", data, *keys) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run/config.yaml").exists()
