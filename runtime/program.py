"""A run's program: the trainer's module, loaded by its name, recorded with a run, and compared when it resumes.

trainer = load("train")                          # or tests.abc_trainer, or a file, runs/first/program.py
record = recorded(config)                        # the program whose Config this is
differences(checkpoint_attributes, record)       # ["what train is made of"]
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from runtime.files import LARGEST_BYTES, NotPlain, open_file
from runtime.terminal import RunError

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = "train"
# Rooms that a trainer computes with; and what does not change what it computes: other rooms, and what reads and writes
# published files.
MATHEMATICS = ("train", "optimizers", "models", "shardlib", "kernels", "jax_extra")
NO_MATHEMATICS = ("runtime", "ledger", "tools", "models.huggingface", "models.foreign", "models.adapters")
MODEL = ("forward", "loss_sum", "validation_step", "mapped_steps")  # functions of a trainer like train.py
NO_MODEL = {"Config", "Training", "training_step"}  # which these reach, and which are mostly an optimizer's
# `model_parts` of the train.py whose model is that of models/llama.py: tools refuse runs of another.
TRAIN_PY = {
    "LOSS_CHUNK": "d21acc52",
    "Layer": "3c9a5f7a",
    "Model": "71e2e528",
    "TokenBatch": "2ae8d68e",
    "Weights": "0ab391dc",
    "act": "5a296e84",
    "attention": "360d7137",
    "forward": "aa2b6df9",
    "imports": "3c41f376",
    "kernels": "6139f3e6d7a3979a",
    "loss_sum": "7bc54068",
    "mapped_steps": "4c172e0d",
    "module": "442bce32",
    "rms_norm": "7814259e",
    "rotary": "fd1b07df",
    "validation_step": "c945e349",
}
LONGEST_GIT_S = 10.0


class Trainer(Protocol):
    """What a trainer's module offers. train.py is the first one; tests/abc_trainer.py the smallest.

    tools/generate.py takes its runs if they are of a family in models/.
    """

    # A RunConfig with the sections `mesh`, a number of devices for each axis, in the mesh's order; `model`, which has
    # `vocab`; and `training`, a RunTraining.
    Config: type
    State: type  # a pytree_dataclass with `weights`
    TokenBatch: type  # a pytree_dataclass with the fields of runtime.data.batches.Batch

    def init_state(self, model: Any, seed: Any) -> Any:
        """The first State."""

    def shapes(self, config: Any) -> tuple[Any, Any]:
        """The global shapes of a State and a TokenBatch. Raises RunError where the mesh cannot split them."""

    def mapped_steps(self, config: Any, bos_id: int) -> tuple[Any, Any]:
        """Two typed_shard_map: (state, skipped steps, step, batch) -> (state, metrics), which have `loss`, `grad_norm`
        and `skipped_steps`; and (weights, sum of losses, number of targets, batch) -> the two with the batch's."""

    def main(self, config: Any) -> None:
        """Trains; with check_only, checks."""

    # Where only files that a config names say what is trained, as in train_any.py, there are three more:
    # resolved(config), the config with the model in it, for shapes and mapped_steps; and for that config
    # state_type(config) instead of State, and drawn_state(config, seed) instead of init_state(config.model, seed).


@dataclass(frozen=True, kw_only=True)
class ProgramKey:
    """The key of tools that work with any trainer."""

    program: str = DEFAULT  # the trainer: its module, or its file, such as the program.py of a run folder


def with_keys(keys: type, trainer: Trainer) -> type:
    """A class of configs with a tool's keys besides a trainer's."""

    @dataclass(frozen=True, kw_only=True)
    class Config(keys, trainer.Config):  # type: ignore[misc, valid-type, name-defined]  # bases that are values
        pass

    return Config


@functools.cache
def load(name: str) -> Trainer:
    """The trainer of this name: a module as after `python -m`, or a path that ends in .py. Raises RunError: there is
    none, or it offers less than a Trainer."""
    try:
        module = _of_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{error.name}."):
            raise
        raise RunError(f"program = {name}: there is no such module or file; expected {DEFAULT}, say") from error
    except NotPlain as error:
        raise RunError(f"program = {name}: {error}") from None
    offered = ("Config", "State", "TokenBatch", "init_state", "shapes", "mapped_steps", "main")
    if missing := [name for name in offered if not hasattr(module, name)]:
        raise RunError(f"program = {name}: it is no trainer, since it has no {', '.join(missing)} (runtime/program.py)")
    return module


def resolved(config: Any, trainer: Any) -> Any:
    """The config in the form that a trainer's shapes and steps take."""
    return getattr(trainer, "resolved", lambda config: config)(config)


def of_command_line(arguments: Sequence[str]) -> Trainer:
    """The trainer that `program=...` names. Ends the process where there is none: hydra has not started yet."""
    names = [text.lstrip("+").partition("=")[2] for text in arguments if text.lstrip("+").startswith("program=")]
    try:
        return load(names[-1] if names else DEFAULT)
    except RunError as error:
        sys.exit(f"error: {error}")


def recorded(config: Any) -> dict[str, Any]:
    """The program that this config belongs to, as JSON values: its module's name and source, a hash of that file, one
    of everything that it is made of, one of the family in models/ that the config names, and the commit."""
    module = sys.modules[type(config).__module__]
    spec, file = getattr(module, "__spec__", None), Path(inspect.getfile(module)).resolve()
    name = (spec.name if spec else file.stem) if module.__name__ == "__main__" else module.__name__
    changes = _git(file.parent, "status", "--porcelain")
    hashes, family = _hashes(name, file), sys.modules[type(getattr(config, "model", None)).__module__]
    return {
        "module": name,
        "file": hashes.pop(name),
        "made_of": _hash(repr(hashes)),
        "family": of_family(family) if family.__name__.startswith("models.") else None,
        "kernels": _of_rooms(hashes, "kernels.", "jax_extra"),
        "git_commit": _git(file.parent, "rev-parse", "HEAD"),
        "local_changes": None if changes is None else bool(changes),
        "source": file.read_text(encoding="utf-8"),
    }


def of_family(family: ModuleType) -> str:
    """A hash of a family's file and of all that it imports from models/ and kernels/."""
    return _of_rooms(_hashes(family.__name__, Path(inspect.getfile(family)).resolve()), "models.", "kernels.")


def _of_rooms(hashes: dict[str, str], *rooms: str) -> str:
    return _hash(repr({name: hashed for name, hashed in hashes.items() if name.startswith(rooms)}))


def model_parts(attributes: Mapping[str, Any]) -> dict[str, str] | None:
    """`model_parts_of` the source that a checkpoint keeps, which is not run, and its kernels; None: it keeps none."""
    if (record := _record(attributes)) is None:
        return None
    kernels = record.get("kernels", TRAIN_PY["kernels"])  # earlier versions did not record them
    return {**model_parts_of(record["source"]), "kernels": kernels}


def model_parts_of(source: str) -> dict[str, str]:
    """The model that a trainer like train.py computes: a hash of each function, class and constant of its file that
    MODEL reaches by name, as `_tokens`; of where the names are from that these import; of all other statements."""
    defined, imported, others = dict[str, ast.stmt](), dict[str, str](), list[ast.stmt]()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            where = getattr(node, "module", "")
            imported |= {alias.asname or alias.name.partition(".")[0]: f"{where}.{alias.name}" for alias in node.names}
        elif not isinstance(node, ast.AugAssign):  # DECAYED |= ...
            others.append(node)
    tokens = _tokens(source)

    def hashed(node: ast.stmt) -> str:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        texts = [text for line, text in tokens if first <= line <= (node.end_lineno or first)]
        return _hash("".join(texts).lstrip("\b"))[:8]  # without what ends the statement before

    parts, origins = {name: "absent" for name in MODEL if name not in defined}, set[str]()
    left = {name for name in MODEL if name in defined}
    while left:
        node = defined[name := left.pop()]
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        parts[name] = hashed(node)
        left |= names & defined.keys() - parts.keys() - NO_MODEL
        origins |= {f"{inner} is {imported[inner]}" for inner in names & imported.keys()}
    parts |= {"imports": _hash(repr(sorted(origins)))[:8], "module": _hash(repr(list(map(hashed, others))))[:8]}
    return dict(sorted(parts.items()))


def differences(attributes: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """What differs between the program that saved a checkpoint with these attributes and the one with this record:
    module, file, or what it is made of. Empty where the attributes name no program."""
    before, name = _record(attributes), record["module"]
    if before is None:
        return []
    if before["module"] != name:
        return [f"{before['module']} -> {name}"]
    texts = {"file": name, "made_of": f"what {name} is made of", "family": "the model's family in models/"}
    known = {"family": record["family"], **before}  # earlier versions recorded none, or none of the three
    return [text for key, text in texts.items() if known.get(key) != record[key]]


def _record(attributes: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What `recorded` gave. Raises RunError: the attribute has another content."""
    record = attributes.get("program")
    if record is None or (
        isinstance(record, dict) and {type(record.get(key)) for key in ("module", "source")} == {str}
    ):
        return record
    raise RunError("the checkpoint's attribute `program` does not say which program trained it: correct or delete it")


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"program_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}", path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    open_file(path, LARGEST_BYTES).close()
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _hashes(name: str, file: Path) -> dict[str, str]:
    """Hashes by module: this one, and all that it imports from its folder and this project, but NO_MATHEMATICS."""
    is_installed = "site-packages" in file.parts  # other files there are not part of it
    folders = [ROOT] if is_installed else [file.parents[name.count(".")], ROOT]
    hashes, left = {}, {name: file}
    while left:
        module, path = left.popitem()
        hashes[module], names = _hash_and_imports(path.read_text(encoding="utf-8"))
        for imported in names:
            room = imported.partition(".")[0]
            is_left_out = imported in NO_MATHEMATICS or room in NO_MATHEMATICS
            if imported in hashes or is_left_out or (is_installed and room not in MATHEMATICS):
                continue
            place = imported.replace(".", "/")
            files = (folder / path for folder in folders for path in (f"{place}.py", f"{place}/__init__.py"))
            if source := next(filter(Path.is_file, files), None):
                left[imported] = source
    return dict(sorted(hashes.items()))


@functools.cache  # for processes that make several runs, like tests: a trainer has some forty files
def _hash_and_imports(source: str) -> tuple[str, list[str]]:
    """A hash of the code, as `_tokens`; and the modules, or names in them, that it imports."""
    names = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return _hash("".join(text for _, text in _tokens(source))), names


def _tokens(source: str) -> list[tuple[int, str]]:
    """The lines and texts of a program's tokens, without comments, docstrings, spaces and line breaks in statements."""
    marks, left_out = {tokenize.NEWLINE: "\n", tokenize.INDENT: "\t", tokenize.DEDENT: "\b"}, set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            left_out |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return [
        (line, marks.get(kind, "".join(text.split())))
        for kind, text, (line, _), _, _ in tokenize.generate_tokens(io.StringIO(source).readline)
        if kind not in (tokenize.COMMENT, tokenize.NL) and line not in left_out
    ]


def _hash(text: str) -> str:
    text = re.sub(r"([{}])\1+", r"\1", text)  # of an f-string's braces Python 3.11 has two where later ones have one
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says of a folder; None without git or repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=LONGEST_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
