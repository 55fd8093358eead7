"""A run's program: the trainer's module, loaded by its name, recorded with a run, and compared when it resumes.

trainer = load("train")                          # or tests.abc_trainer, or a file, runs/first/program.py
record = recorded(config)                        # the program whose Config this is
differences(checkpoint_attributes, record)       # ["what train is made of"]
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from runtime.files import LARGEST_BYTES, NotPlain, open_file, read_text
from runtime.terminal import RunError, run_errors

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = "train"
# Rooms that a trainer computes with; and what does not change what it computes: other rooms, what reads and writes
# published files, what names lines, and the check.
MATHEMATICS = ("train", "optimizers", "pipeline", "models", "shardlib", "kernels", "jax_extra")
NO_MATHEMATICS = {
    "runtime", "ledger", "tools", "models.huggingface", "models.foreign", "models.adapters", "shardlib.places",
    "shardlib.proof",
}  # fmt: skip
ROOTS = ("mapped_steps", "validation_step", "main")  # functions of a trainer, which reach its model
# The optimizer, the loop and the first values are no part of the model; what reads weights compares their sizes.
NO_MODEL = {
    "Training", "State", "Metrics", "MixtureMetrics", "init_state", "training_step", "updated", "mixture_metrics",
}  # fmt: skip
PARTLY_DECODED = {"models.layers", "models.context"}  # decoding has no kernels, and a part of these alone
QUIET = r"(typed|functools.cache|pytree_dataclass)$|dataclass\(|jax.named_scope\('"  # decorators that only change one
RELEASED = ROOT / "runtime/released.json"  # this project's models: python -m docs.generate released
LONGEST_GIT_S = 10.0


class Trainer(Protocol):
    """The attributes of a trainer's module. train.py is the first one; tests/abc_trainer.py the smallest.

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
    except (ImportError, FileNotFoundError) as error:
        if isinstance(error, ImportError) and name.endswith(".py"):
            raise RunError(
                f"program = {name}: {error}: PYTHONPATH has to have the folder of what it imports"
            ) from error
        if isinstance(error, ImportError) and not f"{name}.".startswith(f"{error.name}."):
            raise
        raise RunError(f"program = {name}: there is no such module or file; expected {DEFAULT}, say") from error
    except NotPlain as error:
        raise RunError(f"program = {name}: {error}") from None
    offered = ("Config", "State", "TokenBatch", "init_state", "shapes", "mapped_steps", "main")
    if missing := [name for name in offered if not hasattr(module, name)]:
        raise RunError(f"program = {name}: it is no trainer, since it has no {', '.join(missing)} (runtime/program.py)")
    return module


def of_run(folder: Path, attributes: Mapping[str, Any], *, is_changed: bool = False) -> Trainer:
    """The trainer of a run's checkpoint, from the copy in the run folder. Raises RunError: there is none, or it is not
    the one that the checkpoint names; or what it imports has changed, unless is_changed says that this may be."""
    path, record = folder.resolve() / "program.py", _record(attributes)
    with run_errors(f"program=run: {path} cannot be read"):
        source = read_text(path)
    with run_errors(f"program=run: {path} is no Python", SyntaxError, ValueError):
        is_another = record is None or _hash_and_imports(source)[0] != _hash_and_imports(record["source"])[0]
    if record is None or is_another:
        fix = "put that back there (it is in the checkpoint's attributes)"
        raise RunError(f"program=run: {path} is not the program that its checkpoint names: {fix}")
    name = record["module"]
    before, now = ({**files, name: ""} for files in (record.get("files", {}), _hashes(name, path)))
    if (different := changed(before, now)) and not is_changed:
        fix = "take these from the run's commit; only if they compute the same, add allow_program_change=true"
        raise RunError(f"program=run: {path} imports what has changed, or is not here ({', '.join(different)}): {fix}")
    return load(str(path))


def resolved(config: Any, trainer: Any) -> Any:
    """The config in the form that a trainer's shape and step functions take."""
    return getattr(trainer, "resolved", lambda config: config)(config)


def of_command_line(arguments: Sequence[str]) -> Trainer:
    """The trainer that `program=...` names. Ends the process where there is none: hydra has not started yet."""
    names = [text.lstrip("+").partition("=")[2] for text in arguments if text.lstrip("+").startswith("program=")]
    try:
        return load(names[-1] if names else DEFAULT)
    except RunError as error:
        sys.exit(f"error: {error}")


def recorded(config: Any) -> dict[str, Any]:
    """The program that this config belongs to, as JSON values: its module's name and source, a hash of each file that
    it and the config's family in models/ are made of, by module, and the commit."""
    module = sys.modules["__main__"]  # it may have another module's Config
    if not hasattr(module, "mapped_steps"):
        module = sys.modules[type(config).__module__]
    spec, file = getattr(module, "__spec__", None), Path(inspect.getfile(module)).resolve()
    name = (spec.name if spec else file.stem) if module.__name__ == "__main__" else module.__name__
    changes = _git(file.parent, "status", "--porcelain")
    family = sys.modules[type(getattr(config, "model", None)).__module__]
    files = _hashes(name, file) | (_of_family(family) if family.__name__.startswith("models.") else {})
    modules = {imported: sys.modules[imported] for imported in files.keys() & sys.modules.keys()} | {name: module}
    return {
        "module": name,
        "files": files | _replaced(modules),
        "git_commit": _git(file.parent, "rev-parse", "HEAD"),
        "local_changes": None if changes is None else bool(changes),
        "source": file.read_text(encoding="utf-8"),
    }


def _replaced(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Where functions and classes are from that stand in the place of those of these modules' files, or of JAX's, since
    a script, a notebook or a helper put them there: {"train.rms_norm": "layer_norm of __main__"}."""
    places = dict[str, str]()
    for name, module in modules.items():
        source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
        for defined in re.findall(r"^(?:def|class) (\w+)", source, re.M):
            value = getattr(module, defined, None)
            origin = f"{defined} of {module.__name__}" if value is None else _origin(value)
            origin = re.sub(r"^\w+\.<locals>\.\w+ ", f"{defined} ", origin)  # what a decorator has made
            if origin != f"{defined} of {module.__name__}":
                places[f"{name}.{defined}"] = origin
    for name in {"jax.nn", "jax.numpy", "jax.lax"} & sys.modules.keys():
        for inner, origin in _imported(name).items():
            value = vars(sys.modules[name]).get(inner, origin)
            if value is not origin:
                places[f"{name}.{inner}"] = _origin(value)
    return places


def _origin(value: Any) -> str:
    kind = type(value)
    return f"{getattr(value, '__qualname__', kind.__name__)} of {getattr(value, '__module__', kind.__module__)}"


@functools.cache
def _imported(name: str) -> dict[str, Any]:
    """What the file of a module of JAX imports into it from other modules."""
    values = dict[str, Any]()
    for node in ast.parse(inspect.getsource(sys.modules[name])).body:
        if isinstance(node, ast.ImportFrom) and node.module in sys.modules:
            names = [alias for alias in node.names if hasattr(sys.modules[node.module], alias.name)]
            values |= {alias.asname or alias.name: getattr(sys.modules[node.module], alias.name) for alias in names}
    return values


def model_of(attributes: Mapping[str, Any]) -> dict[str, str] | None:
    """The parts of the model of a checkpoint's program, as in `released`; None if the attributes name no program."""
    if (record := _record(attributes)) is None:
        return None
    return {**parts_of(record["source"]), **of_model(record.get("files", {}), record["module"])}


def released(trainer: str, family: ModuleType | None, *, is_published: bool = False) -> dict[str, str]:
    """The parts of the model of train or train_any: its file's `parts_of`, as released, and hashes of the files that it
    and a family import: their hashes here, where a tool computes with them, or released ones if is_published.

    The hash "changed", which no run has, marks a file here that differs from its release and computes what the run
    computes in another file.
    """
    families = [family] if family else []
    own, of_families = files_of(trainer), {name for each in families for name in _of_family(each)}
    known = json.loads(RELEASED.read_text(encoding="utf-8"))
    files = dict[str, str]()
    for name, here in files_of(trainer, *families).items():
        as_released = known["files"].get(name, here if name in of_families else "")
        is_imported = trainer != DEFAULT or name in own  # train.py is a family's model without its file
        if is_published or name.startswith("kernels"):
            files |= {name: as_released} if is_imported and as_released else {}
        elif here != as_released and (name in PARTLY_DECODED or not is_imported):
            files[name] = "changed"
        elif is_imported:
            files[name] = here
    return {**known[trainer], **of_model(files, trainer)}


def of_model(files: Mapping[str, str], trainer: str) -> dict[str, str]:
    """The files that compute a model: without the trainer's own, of which parts count, and without train.py, from which
    the others take only types and the optimizer's arithmetic."""
    return {name: hashed for name, hashed in files.items() if name not in (trainer, DEFAULT, "optimizers")}


def files_of(trainer: str, *families: ModuleType) -> dict[str, str]:
    """Hashes by module of all that train or train_any, and families, are made of, as they are here."""
    files = _hashes(trainer, ROOT / f"{trainer}.py")
    for family in families:
        files |= _of_family(family)
    return files


def _of_family(family: ModuleType) -> dict[str, str]:
    return _hashes(family.__name__, Path(inspect.getfile(family)).resolve())


def parts_of(source: str) -> dict[str, str]:
    """The model that a trainer's file computes: hashes, by name, of its functions, classes and constants that ROOTS
    reach, but for NO_MODEL; of other statements, by their beginning; and where the names are from that these import."""
    defined, imported, left = dict[str, list[ast.stmt]](), dict[str, str](), dict[str, list[ast.stmt]]()
    tree = ast.parse(source)
    for node in tree.body:
        names = _bound(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            where = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
            imported |= {name: where + alias.name for name, alias in zip(names, node.names)}
        elif _only_defines(node) and not imported.keys() & names:
            for name in names:
                defined.setdefault(name, []).append(node)
        else:
            name = node.name if isinstance(node, ast.ClassDef) else ast.unparse(node).partition("\n")[0][:50]
            left.setdefault(name, []).append(node)
    everywhere = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}  # others are imported for an effect
    parts = {f"{name} from {origin}": "" for name, origin in imported.items() if name not in everywhere}
    left |= {name: defined.get(name, []) for name in ROOTS}
    while left:
        name, nodes = left.popitem()
        parts[name] = _hash("".join(map(_dumped, nodes)))[:8] if nodes else "absent"
        used = {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        left |= {inner: defined[inner] for inner in used & defined.keys() - parts.keys() - NO_MODEL}
        parts |= {f"{inner} from {imported[inner]}": "" for inner in used & imported.keys()}
    return dict(sorted(parts.items()))


def _bound(node: ast.stmt) -> list[str]:
    """The names to which a statement at the top level gives a value, or an item."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Pass())]
    return [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]


def _only_defines(node: ast.stmt) -> bool:
    """Whether a statement at the top level has no effect but names for a function or a constant."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        decorators = map(ast.unparse, node.decorator_list)
        inside = node.body if isinstance(node, ast.ClassDef) and node.name not in NO_MODEL else []
        return all(re.match(QUIET, decorator) for decorator in decorators) and all(map(_only_defines, inside))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        with contextlib.suppress(ValueError, TypeError):
            ast.literal_eval(node.value or ast.Constant(None))
            return True
    return isinstance(node, ast.Pass)


def differences(attributes: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """The differences between the program that saved a checkpoint with these attributes and the one with this record:
    its module, or its parts. Empty if the attributes name no program."""
    before, name = _record(attributes), record["module"]
    if before is None:
        return []
    if before["module"] != name:
        return [f"{before['module']} -> {name}"]
    if "files" not in before:  # an earlier version's, which hashed other text
        return [f"what {name} is made of"]
    return changed(before["files"], record["files"])


def _record(attributes: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record that `recorded` made. Raises RunError if the attribute holds something else."""
    record = attributes.get("program")
    if record is None or (
        isinstance(record, dict) and {type(record.get(key)) for key in ("module", "source")} == {str}
    ):
        return record
    raise RunError("the checkpoint's attribute `program` does not say which program trained it: correct or delete it")


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = filter(_computes, before.keys() | now.keys())  # earlier versions recorded others too
    return sorted(name for name in names if before.get(name) != now.get(name))


def _computes(module: str) -> bool:
    return not any(f"{module}.".startswith(f"{room}.") for room in NO_MATHEMATICS)


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
        for level, imported in names:
            if level:
                package = module.split(".")[: (path.stem == "__init__") - level or None]
                imported = ".".join([*package, *filter(None, [imported])])
            room = imported.partition(".")[0]
            if imported in hashes or not _computes(imported) or (is_installed and room not in MATHEMATICS):
                continue
            place = imported.replace(".", "/")
            files = (folder / path for folder in folders for path in (f"{place}.py", f"{place}/__init__.py"))
            if source := next(filter(Path.is_file, files), None):
                left[imported] = source
    return dict(sorted(hashes.items()))


@functools.cache  # for processes that make several runs, like tests: a trainer has some forty files
def _hash_and_imports(source: str) -> tuple[str, list[tuple[int, str]]]:
    """A hash of the code, and the modules, or names in them, that it imports, each after the dots before it."""
    tree, names = ast.parse(source), list[tuple[int, str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [(node.level, name.strip(".")) for name in (base, *(f"{base}.{each.name}" for each in node.names))]
    return _hash(_dumped(tree)), names


def _dumped(tree: ast.AST) -> str:
    """The code as its syntax tree: without comments, docstrings and how it is laid out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
    return re.sub(r", (type_params=\[\]|Constant\(value=''\)(?=\]\)))", "", ast.dump(tree))  # only in Python 3.12


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command in a folder; None without git or repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=LONGEST_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
