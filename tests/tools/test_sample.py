"""Text out of a trained model."""

import sys
import types

import numpy as np
import pytest
import reference
import small

import train
from runtime.config.command_line import load, run
from runtime.data.tokenizers import load_tokenizer
from tools import sample, tokenize_text

MODEL = [
    "model.d_model=32", "model.n_q_per_kv=1", "model.n_kv=2", "model.d_head=16", "model.layers=1", "model.d_ff=64",
    "model.vocab=257", "model.compute_dtype=float32", "mesh.d=1", "mesh.t=1", "training.tokens.batch=8",
    "training.tokens.len=32", "training.steps=60", "training.warmup_steps=5", "training.steps_for_lr=60",
    "training.learning_rate=0.01", "checkpoint_interval=60", "eval_interval=60", "validation_batches=1",
]  # fmt: skip
SENTENCE = "the cat sat on the mat. "


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run on one sentence, over and over."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text(SENTENCE * 3000)
    keys = [f"input={folder}/text.txt", f"output={folder}/text.zarr", "validation_fraction=0.5", "document_bytes=100"]
    tokenize_text.main(load(tokenize_text.TokenizeText, None, keys))
    where = [f"flat_tokens.filespec={folder}/text.zarr", f"paths.root_working_dir={folder}", "paths.model_name=cat"]
    train.main(load(train.Config, "local_shakespeare", [*MODEL, *where]))
    return folder / "cat"


def said(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["sample", *map(str, arguments)])
    run(sample.main, sample.Sample)
    return capsys.readouterr().out


def test_it_goes_on_with_what_it_has_learnt(run_folder, monkeypatch, capsys):
    """At temperature 0 a model that has seen one sentence only goes on with it, beyond the length of a row too; the
    prompt comes first."""
    text = said(monkeypatch, capsys, run_folder, "prompt=on the mat. the c", "tokens=55", "temperature=0")
    assert text == ("on the mat. " + SENTENCE * 4)[: len("on the mat. the c") + 55] + "\n"


def test_the_seed_says_what_is_drawn(run_folder, monkeypatch, capsys):
    """The same seed draws the same text, another seed another one."""
    texts = [said(monkeypatch, capsys, run_folder, "tokens=40", "temperature=2", f"seed={seed}") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_tokens_come_from_the_softmax_of_the_reference():
    """At temperature 0 each token is the likeliest by the plain reference's logits, which see all tokens before it."""
    weights = reference.random_weights(small.MODEL, seed=0)
    batch = reference.random_batch(small.MODEL, batch=1, length=32, seed=3)
    given = batch.targets[0, :20].tolist()
    with small.on_mesh(1, 1):
        placed = small.state_of(weights).weights
        config = types.SimpleNamespace(model=small.MODEL, training=small.TRAINING)
        next_logits = sample.logits_of(train, config, placed, bos_id=0)
        drawn = list(sample.sample(next_logits, given, 3, 32, temperature=0, seed=0))
    for number, token in enumerate(drawn):
        seen = [*given, *drawn[:number]]
        targets = np.array([[*seen, *[0] * (32 - len(seen))]])
        no = np.zeros((1, 32), bool)
        row = type(batch)(targets=targets, is_seq_start=no, is_target=~no)
        logits = reference.logits(weights, row, small.MODEL)
        assert token == int(np.argmax(logits[0, len(seen)]))


def test_a_character_of_several_tokens_is_printed_when_it_is_whole():
    """Bytes of one character are held back until the last has come, and nothing is printed twice."""
    tokenizer = load_tokenizer("bytes_utf8")
    ids = tokenizer.encode_batch(["naïve €"])[0].tolist()
    pieces = list(sample.pieces(tokenizer, ids[:2], iter(ids[2:])))
    assert "".join(pieces) == "naïve €" and "\ufffd" not in "".join(pieces) and "ï" in pieces[0] + pieces[1]


def test_control_characters_are_spelled_out(run_folder, monkeypatch, capsys):
    """What a model writes cannot steer a terminal."""
    monkeypatch.setattr(sample, "pieces", lambda *_: iter(["a\x1b[2J", "b\n"]))
    assert said(monkeypatch, capsys, run_folder) == "a\\x1b[2Jb\n\n"


def test_no_checkpoint_is_one_message(tmp_path, monkeypatch, capsys):
    """A folder that is no run ends with what was expected."""
    with pytest.raises(SystemExit):
        said(monkeypatch, capsys, tmp_path / "none")
    expected = f"there is no complete checkpoint in {tmp_path}/none/checkpoints: give the folder of a run, runs/NAME"
    assert capsys.readouterr().err == f"error: {expected}\n"


def test_ids_without_a_tokenizer_are_no_text(tmp_path, monkeypatch, capsys):
    """The synthetic data set names no tokenizer, which is said."""
    where = [
        f"paths.root_working_dir={tmp_path}",
        "paths.model_name=ids",
        "flat_tokens.filespec=synthetic_dataset.zarr",
    ]
    monkeypatch.setattr(
        sys, "argv", ["train", "--config-name=local_shakespeare", *MODEL, *where, "model.vocab=260", "training.steps=1"]
    )
    run(train.main, train.Config)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        said(monkeypatch, capsys, tmp_path / "ids")
    message = capsys.readouterr().err
    assert message.endswith("synthetic_dataset.zarr names no tokenizer, so that its ids are no text\n")
