"""A run knows its program: what is recorded, what is refused, and that tools take it from the run."""

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
import small
from parts import says
from several_hosts import where

import train
from docs import generate
from runtime import program
from runtime.checkpoints.directory import Checkpoints
from runtime.config.command_line import load
from runtime.data.sources import keep_tokenizer, kept_tokenizer
from runtime.data.tokenizers import load_tokenizer, tokenizer_identity, train_bpe
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


# ---- what is recorded, and what is refused


def test_a_run_knows_its_program(monkeypatch, folder, capsys):
    """A copy of the module is in the run folder and in the checkpoint; its name, hashes and commit in both, for each
    start. A changed module does not go on with the run, and it is named; with allow_config_change it does. That its
    model is none of this project's is known by its hash."""
    assert start(monkeypatch, copy_of(folder), folder) == 0
    text = (folder / "my_trainer.py").read_text()
    assert (folder / "run/program.py").read_text() == text
    kept = attributes_of(folder / "run")["program"]
    hashes = program._hashes("my_trainer", folder / "my_trainer.py")
    assert {"my_trainer", "jax_extra", "kernels.attention", "shardlib.shardops"} <= hashes.keys()
    assert not any(name.startswith(tuple(program.NO_MATHEMATICS)) for name in hashes)

    changed = copy_of(folder, "jax.nn.silu(gate)", "jax.nn.gelu(gate)")
    capsys.readouterr()
    assert start(monkeypatch, changed, folder, "training.steps=4") == 1
    assert says("another program or configuration: the program: my_trainer Set these", capsys.readouterr().err)
    assert start(monkeypatch, changed, folder, "training.steps=4", "allow_config_change=true") == 0
    printed = capsys.readouterr().out
    assert "  the program: my_trainer\n" in printed and "does not say which program" not in printed
    assert program.changed(program.model_of(attributes_of(folder / "run")), program.released("train", None)) == [
        "forward"
    ]
    assert program.model_of({}) is None
    assert start(monkeypatch, program.load("train"), folder, "training.steps=6") == 1
    assert "the program: my_trainer -> train\n" in capsys.readouterr().err

    first, second = map(json.loads, (folder / "run/starts.jsonl").read_text().splitlines())
    assert (first["after_step"], second["after_step"]) == (0, 2)
    assert (
        kept == {**first["program"], "source": text} and kept["module"] == second["program"]["module"] == "my_trainer"
    )
    assert program.changed(first["program"]["files"], second["program"]["files"]) == ["my_trainer"]


def another(x):
    return x


REPLACED = [
    (train, "rms_norm", another), (train, "rotary", train.rms_norm), (jax.nn, "silu", another),
    (jax.nn, "silu", jax.nn.gelu), (jax.numpy, "sin", jax.jit(another)),
]  # fmt: skip


@pytest.mark.parametrize("of, name, by", REPLACED)
def test_what_a_script_replaces_is_known(monkeypatch, of, name, by):
    """A function that a script puts in the place of train.py's or of JAX's, its own or another of theirs: the run's
    model is none of this project's, and a run without the script does not go on with it."""
    config = load(train.Config, "local_test_synthetic")
    before = program.recorded(config)
    assert program.changed(program.model_of({"program": before}), program.released("train", None)) == []

    monkeypatch.setattr(of, name, by)
    now = program.recorded(config)
    replaced = [f"{of.__name__}.{name}"]
    assert program.changed(program.model_of({"program": now}), program.released("train", None)) == replaced
    assert program.differences({"program": now}, before) == replaced


def test_the_commit_and_local_changes(tmp_path):
    """They are taken from the repository in which the module lies, and are null outside of one."""
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
    same = "def f():\n    'Was.'\n    return (1, 2)\n"
    cases = {("# why", same): [], ("x = 1", same): ["my_trainer"], ("", same.replace("2", "3")): ["two"]}
    for sources, differences in cases.items():
        assert program.differences({"program": before}, recorded(*sources)) == differences
    earlier = {"module": "my_trainer", "source": before["source"], "file": "0123456789abcdef"}
    assert program.differences({"program": earlier}, before) == ["what my_trainer is made of"]
    assert program.differences({}, before) == []


def test_imports_from_its_own_package(tmp_path):
    """They are followed as those by their names are."""
    for name, text in {
        "exp/mine.py": "from .einops import f\nfrom . import two",
        "exp/einops.py": "from .sub import x",
        "exp/two.py": "",
        "exp/sub/__init__.py": "from . import three\nfrom ..four import y",
        "exp/sub/three.py": "",
        "exp/four.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names = ["exp.einops", "exp.four", "exp.mine", "exp.sub", "exp.sub.three", "exp.two"]
    assert list(program._hashes("exp.mine", tmp_path / "exp/mine.py")) == names


def test_the_program_that_is_started_is_recorded(tmp_path):
    """It is recorded also where it takes the Config of another."""
    text = "import train\nfrom runtime import program\nfrom train import mapped_steps\n"
    (tmp_path / "mine.py").write_text(f"{text}print(program.recorded(train.Config.__new__(train.Config))['module'])")
    command, env = [sys.executable, "-m", "mine"], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "mine\n"


def test_the_family_is_part_of_the_program(monkeypatch, tmp_path):
    """Its file and what that imports from models/, which no trainer imports; but no comments, and nothing that reads
    published files."""
    monkeypatch.setattr(program, "ROOT", tmp_path)
    (tmp_path / "models").mkdir()
    family = types.ModuleType("models.mine")
    family.__file__ = str(tmp_path / "models/mine.py")

    def hashed(mine="x = 1", layers="y = 1", train="z = 1", reader="u = 1"):
        (tmp_path / "models/mine.py").write_text(f"from models import layers\nimport train\n{mine}\n")
        (tmp_path / "models/layers.py").write_text(f"from models import huggingface\n{layers}\n")
        (tmp_path / "models/huggingface.py").write_text(reader)
        (tmp_path / "train.py").write_text(train)
        return str(program.of_model(program._of_family(family), "train_any"))

    assert hashed() == hashed("x = 1  # why") == hashed(train="z = 2") == hashed(reader="u = 2")
    assert len({hashed(), hashed("x = 2"), hashed(layers="y = 2")}) == 3


# ---- what tools take


@pytest.mark.parametrize("name, text", [
    ("no_such", "there is no such .*; expected train"),
    ("no/such.py", "there is no such module or file"),
    ("runtime.terminal", "it is no trainer, .* Config, State, TokenBatch, "),
])  # fmt: skip
def test_what_is_no_trainer(name, text):
    """One line that says what was looked for and what is missing."""
    with pytest.raises(RunError, match=f"^program = {name}: {text}"):
        program.load(name)


def test_the_command_line_names_the_program():
    """train where it names none; one line where there is no such."""
    assert program.of_command_line(["a=1"]) is program.load("train")
    assert program.of_command_line(["+program=tests.abc_trainer"]).__name__ == "tests.abc_trainer"
    with pytest.raises(SystemExit, match="error: program = no_such: "):
        program.of_command_line(["program=no_such"])


GUARD = "if __name__ == '__main__':"
SETS_A_KERNEL = "KERNELS['einsum'] = None"


@pytest.mark.parametrize("old, new, different", [
    ("", "", []),
    # The optimizer's, what is logged, first values, and how the file is laid out.
    ("vocab: Count  #", "vocab:  Count  # or", []),
    ("act = ComputeType('act', jnp.bfloat16)", 'act = ComputeType(  # what is\n    "act",\n    jnp.bfloat16,\n)', []),
    ("def learning_rate(", "def rate_of_learning(", []),
    ("    target_count: f32[''] = jnp.maximum", "    target_count: f32[''] = 2 * jnp.maximum", []),
    ("class Metrics:", "class Metrics:\n    another: f32['']\n", []),
    ("DECAYED |=", "BETAS, EPSILON = (0.9, 0.99), 1e-8\nDECAYED['embed'] = 1.0\nDECAYED |=", []),
    ("import functools", "import functools\nimport logging", ["logging from logging"]),  # perhaps for its effect
    (GUARD, "def lion_step(x):\n    return x\n\n\n" + GUARD, []),
    (GUARD, "@pytree_dataclass\nclass Lion:\n    mean: Weights\n    rate: float = 0.1\n\n\n" + GUARD, []),
    # The model.
    ("jax.nn.silu(gate)", "jax.nn.gelu(gate)", ["forward"]),
    ("LOSS_CHUNK = 256", "LOSS_CHUNK = 128", ["LOSS_CHUNK"]),
    ("rms_norm", "layer_norm", ["forward", "layer_norm", "rms_norm"]),
    ("n_kv: Count", "n_kv: Steps", ["Model", "Steps from"]),
    ("from jax_extra import", "from my_extra import", ["explicit_activation_checkpointing from"]),
    ("settings = config.model,", "settings = replace(config.model, norm_eps=0.5),", ["mapped_steps", "replace from"]),
    ("(model, training, bos_id, weights, batch))", "(model, training, 0, weights, batch))", ["validation_step"]),
    ("mapped_steps(config, run.data.bos_id)", "mapped_steps(config, 7)", ["main"]),
    ("class Config(RunConfig):", "class Config(RunConfig):\n    def __post_init__(self):\n        pass\n", ["Config"]),
    # What is done while the file is read.
    (GUARD, "jax.nn.silu = jax.nn.relu\n" + GUARD, ["jax.nn.silu = jax.nn.relu"]),
    (GUARD, "KERNELS |= {}\n" + GUARD, ["KERNELS |= {}"]),
    (GUARD, f"{SETS_A_KERNEL}\n{GUARD}", [SETS_A_KERNEL]),
    (GUARD, "_silu = setattr(jax.nn, 'silu', None)\n" + GUARD, ["_silu = setattr"]),
    (GUARD, "class Patch:\n    print()\n\n\n" + GUARD, ["Patch"]),
    (GUARD, "@register('einsum')\ndef mine():\n    pass\n\n\n" + GUARD, ["@register('einsum')"]),
    (GUARD, "import my_kernels\n" + GUARD, ["my_kernels from my_kernels"]),
    (GUARD, "from mine import *\n" + GUARD, ["* from mine.*"]),
    ('section 4)."""', 'section 4)."""; scale = scale + 1.0', ["rms_norm"]),
])  # fmt: skip
def test_which_changes_make_another_model(old, new, different):
    """What the model is made of differs in these names, whose beginnings are given."""
    source = (ROOT / "train.py").read_text()
    assert old in source
    parts = program.parts_of(source.replace(old, new) if old else source)
    found = program.changed(json.loads(program.RELEASED.read_text())["train"], parts)
    assert len(found) >= len(different) and all(map(str.startswith, found, different)), found
    assert bool(found) is bool(different)


def test_the_optimizer_of_train_any_is_no_part_of_the_model():
    """Its update and the metrics are functions, which training_step calls."""
    source = (ROOT / "train_any.py").read_text()
    for old in ("jnp.minimum(1.0, training.max_grad_norm", "routing.load / parts"):
        assert old in source
        assert program.parts_of(source.replace(old, f"2 * {old}")) == program.parts_of(source)


def test_what_is_released_is_what_is_here():
    """If this fails and the trainers still compute the models of models/: python -m docs.generate released."""
    assert generate.released() == program.RELEASED.read_text()


def test_a_newer_python_hashes_the_same(tmp_path):
    """All files hash as in this Python, also an f-string with braces and spaces, which has other tokens there."""
    others = [ROOT / f".venv-jax-{version}/bin/python" for version in ("0.11.2", "0.12.0.1")]
    if not (there := [python for python in others if python.exists()]):
        pytest.skip("there is no newer Python: make environments")
    odd = tmp_path / "odd.py"
    odd.write_text("def f(a):\n    return f'{{ {a + 1 !r:>{a}} }' f\"{a['x']}\"\n".replace("} }'", "} }}'"))
    files = [odd, *ROOT.glob("*.py"), *ROOT.glob("models/*.py")]
    code = "import sys; from runtime.program import _hash_and_imports as hashed\n"
    code += "print([hashed(open(file).read()) for file in sys.argv[1:]])"
    hashed = {
        subprocess.run([python, "-c", code, *files], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, *there)
    }
    assert len(hashed) == 1


# ---- the tokenizer


def test_a_run_folder_is_enough_to_decode(cat_run, tmp_path):
    """The tokenizer is copied into the run folder, and its content is part of what a checkpoint says of the data."""
    tokenizer = train_bpe(["to be or not to be, that is the question\n"] * 4, 300)
    keep_tokenizer(tmp_path, tokenizer)
    assert kept_tokenizer(tmp_path) == tokenizer
    assert kept_tokenizer(cat_run) == load_tokenizer("bytes_utf8")
    assert attributes_of(cat_run)["data"]["tokenizer"] == tokenizer_identity(load_tokenizer("bytes_utf8"))
