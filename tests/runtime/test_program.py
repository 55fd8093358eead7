"""A run knows its program: what is recorded, what is refused, and that tools take it from the run."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small
from several_hosts import where

from models import llama
from runtime import program
from runtime.checkpoints.directory import Checkpoints
from runtime.data.sources import kept_tokenizer
from runtime.data.split_writer import write_split
from runtime.data.tokenizers import save_dataset_tokenizer, train_bpe
from runtime.terminal import RunError

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("proved_elsewhere")
TINY = """model.d_model=32 model.n_kv=2 model.d_head=8 model.d_ff=64 model.layers=1 training.tokens.batch=16 mesh.d=2
    mesh.t=1 training.tokens.len=32 training.steps=2 eval_interval=100 validation_batches=1""".split()


def copy_of(folder, old="", new=""):
    """train.py under another name in a folder, changed, as a module."""
    text = (ROOT / "train.py").read_text()
    assert text.count(old) >= 1
    (folder / "my_trainer.py").write_text(text.replace(old, new, 1) if old else text)
    sys.modules.pop("my_trainer", None)
    program.load.cache_clear()
    return program.load("my_trainer")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_trainer", None)
    program.load.cache_clear()


def start(monkeypatch, trainer, folder, *overrides):
    """Runs a trainer; returns the exit status."""
    return small.start_training(monkeypatch, *TINY, *where(folder / "run"), *overrides, trainer=trainer)


def attributes_of(folder):
    checkpoints = Checkpoints(f"{folder}/checkpoints")
    attributes = checkpoints.attributes(checkpoints.latest())
    checkpoints.close()
    return attributes


# ---- what is recorded


def test_what_a_run_records(monkeypatch, folder, capsys):
    """A copy of the module in the run folder and in the checkpoint; its name, hashes and commit in both, for each
    start."""
    trainer = copy_of(folder)
    assert start(monkeypatch, trainer, folder) == 0
    assert start(monkeypatch, trainer, folder, "training.steps=4") == 0
    text = (folder / "my_trainer.py").read_text()
    assert (folder / "run/program.py").read_text() == text
    first, second = map(json.loads, (folder / "run/starts.jsonl").read_text().splitlines())
    assert (first["after_step"], second["after_step"]) == (0, 2) and first["program"] == second["program"]
    kept = attributes_of(folder / "run")["program"]
    assert kept == {**first["program"], "source": text} and kept["module"] == "my_trainer"
    hashes = program._hashes("my_trainer", folder / "my_trainer.py")
    assert {"my_trainer", "jax_extra", "kernels.attention", "shardlib.shardops"} <= hashes.keys()
    assert not any(name.startswith(program.NO_MATHEMATICS) for name in hashes)
    assert "does not say which program" not in capsys.readouterr().out


def test_the_commit_and_local_changes(tmp_path):
    """Of the repository in which the module lies; null outside of one."""
    assert program._git(tmp_path, "rev-parse", "HEAD") is None
    for command in ("init -q", "config user.email a@b", "config user.name a", "commit -q --allow-empty -m first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    assert (
        len(program._git(tmp_path, "rev-parse", "HEAD")) == 40 and program._git(tmp_path, "status", "--porcelain") == ""
    )
    (tmp_path / "new.py").write_text("")
    assert program._git(tmp_path, "status", "--porcelain") == "?? new.py"


def test_what_counts_as_a_change(folder):
    """The program's file and everything that it imports, wherever the import stands; comments, docstrings and line
    breaks do not. A record of earlier versions, which hashed each module, differs in both."""

    def recorded(one, two):
        (folder / "my_trainer.py").write_text(f"{one}\nimport two\nimport jax\nclass Config:\n    pass\n")
        (folder / "two.py").write_text(two)
        sys.modules.pop("my_trainer", None)
        return program.recorded(importlib.import_module("my_trainer").Config())

    before = recorded('"""Says."""', "def f():\n    'Is.'\n    return (1,\n     2)  # why\n")
    same, made_of = "def f():\n    'Was.'\n    return (1, 2)\n", "what my_trainer is made of"
    cases = {("# why", same): [], ("x = 1", same): ["my_trainer"], ("", same.replace("2", "3")): [made_of]}
    for sources, differences in cases.items():
        assert program.differences({"program": before}, recorded(*sources)) == differences
    earlier = {"module": "my_trainer", "source": before["source"], "files": {"my_trainer": before["file"]}}
    assert program.differences({"program": earlier}, before) == ["my_trainer", made_of]
    assert program.differences({}, before) == []


# ---- what is refused


def test_another_program_is_refused(monkeypatch, folder, capsys):
    """A changed module does not go on with the run, and it is named; with allow_config_change it does."""
    assert start(monkeypatch, copy_of(folder), folder) == 0
    changed = copy_of(folder, "jax.nn.silu(gate)", "jax.nn.gelu(gate)")
    capsys.readouterr()
    assert start(monkeypatch, changed, folder, "training.steps=4") == 1
    said = capsys.readouterr().err
    assert (
        "was trained with another program or configuration:\n  the program: my_trainer\nSet these as they were" in said
    )
    assert start(monkeypatch, changed, folder, "training.steps=4", "allow_config_change=true") == 0
    assert "  the program: my_trainer\n" in capsys.readouterr().out
    assert start(monkeypatch, train_itself(), folder, "training.steps=6") == 1
    assert "the program: my_trainer -> train\n" in capsys.readouterr().err


def train_itself():
    return program.load("train")


@pytest.mark.slow
def test_a_checkpoint_from_before_resumes_and_says_so(monkeypatch, folder, capsys):
    """A checkpoint without a record is taken as it is, with a line."""
    with monkeypatch.context() as before:
        before.setattr(program, "recorded", lambda config: {"source": ""})
        save = Checkpoints.save
        before.setattr(
            Checkpoints,
            "save",
            lambda self, step, state, attributes, best: save(
                self, step, state, {key: value for key, value in attributes.items() if key != "program"}, best
            ),
        )
        assert start(monkeypatch, train_itself(), folder) == 0
    assert "program" not in attributes_of(folder / "run")
    capsys.readouterr()
    assert start(monkeypatch, train_itself(), folder, "training.steps=4") == 0
    assert "/run/checkpoints/0000000002 does not say which program saved it" in capsys.readouterr().out.replace(
        "\n  ", " "
    )


# ---- what tools take


@pytest.mark.parametrize(
    "name, text",
    [
        ("no_such", "program = no_such: there is no such module or file; expected train, say"),
        ("no/such.py", "program = no/such.py: there is no such module or file"),
        (
            "runtime.terminal",
            "program = runtime.terminal: it is no trainer, since it has no Config, State, TokenBatch, ",
        ),
    ],
)
def test_what_is_no_trainer(name, text):
    """One line that says what was looked for and what is missing."""
    with pytest.raises(RunError, match=text.replace("(", r"\(")):
        program.load(name)


def test_the_command_line_names_the_program(capsys):
    """train where it names none; one line where there is no such."""
    assert program.of_command_line(["a=1"]) is program.load("train")
    assert program.of_command_line(["+program=tests.abc_trainer"]).__name__ == "tests.abc_trainer"
    with pytest.raises(SystemExit, match="error: program = no_such: there is no such module"):
        program.of_command_line(["program=no_such"])


@pytest.mark.slow
def test_the_program_of_a_checkpoint(monkeypatch, folder, capsys):
    """That its model is none of this project's is known by its hash."""
    changed = copy_of(folder, "jax.nn.silu(gate)", "jax.nn.gelu(gate)")
    assert start(monkeypatch, changed, folder) == 0
    assert program.model_parts(attributes_of(folder / "run")) not in (None, llama.TRAIN_PY)
    assert program.model_parts({}) is None


@pytest.mark.parametrize("old, new, is_same", [
    ("", "", True),
    ("vocab: Count  #", "vocab:  Count  # or", True),  # a comment
    ("def learning_rate(", "def rate_of_learning(", True),  # of the optimizer
    ("jax.nn.silu(gate)", "jax.nn.gelu(gate)", False),
    ("LOSS_CHUNK = 256", "LOSS_CHUNK = 128", False),
    ("rms_norm", "layer_norm", False),
    ("def loss_sum(", "def sum_of_losses(", False),
    ("n_kv: Count", "n_kv: Steps", False),
])  # fmt: skip
def test_which_changes_make_another_model(old, new, is_same):
    """models/llama.py says which train.py it computes: if this fails and both still compute the same, give it the new
    hash; else it needs the change too."""
    source = (ROOT / "train.py").read_text()
    assert old in source
    assert (program.model_parts_of(source.replace(old, new) if old else source) == llama.TRAIN_PY) is is_same


# ---- the tokenizer


def test_a_run_folder_is_enough_to_decode(monkeypatch, folder):
    """The tokenizer is copied into the run folder, and its content is part of what a checkpoint says of the data."""
    tokenizer = train_bpe(["to be or not to be, that is the question\n"] * 4, 300)
    ids = tokenizer.encode_batch(["to be or not to be, that is the question\n" * 20] * 100)
    for split in ("train", "validation"):
        write_split(folder / "b.zarr", split, ids)
    save_dataset_tokenizer(folder / "b.zarr", tokenizer)
    data = f"flat_tokens.filespec={folder}/b.zarr"
    trainer = train_itself()
    assert start(monkeypatch, trainer, folder, data) == 0
    assert len(attributes_of(folder / "run")["data"]["tokenizer"]) == 16
    shutil.rmtree(folder / "b.zarr")
    tokenizer = kept_tokenizer(folder / "run")
    (ids,) = tokenizer.encode_batch(["the question"])
    assert tokenizer.decode(ids) == "the question" and len(ids) < 12
