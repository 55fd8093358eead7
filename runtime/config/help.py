"""What --help prints. Each key is explained by the comment beside its field, so that no text is written twice.

explanations(Config)["mesh.d"]      # 'devices along axis d: the batch, and ...'
"""

import ast
import dataclasses
import functools
import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.config.rebuild import all_keys, as_tree, item_of, shown

WIDTH = 120
FLAGS = """
  key=value           overrides a key; +key=value is the same
  --cfg job           prints all keys with their values, and runs nothing
  -m key=a,b          one run after the other, each with one of the values, each in its own run folder
  --hydra-help        hydra's other flags
"""
CONFIG_FLAGS = """
  --config-name=NAME  one of the configs below, by default {name}
  --config-dir=FOLDER another folder to look for it in"""


def help_page(main: Callable, config_class: type, default: str | None, folder: Path) -> str:
    """Usage, the program's configs with their first comment lines, every key explained.

    Args:
      default: the name of the default config; None: the program has no configs.
      folder: of configs.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name}" if spec else f"python {sys.argv[0]}"
    about = (sys.modules[main.__module__].__doc__ or "").strip().partition("\n\n")[0]
    lines = [*_wrapped(about, 0), "", f"usage: {program} {'[--config-name=NAME] ' * bool(default)}[key=value ...]"]
    lines += (CONFIG_FLAGS.format(name=default) * bool(default) + FLAGS).split("\n")
    if default:
        lines.append("configs:")
        for name in configs_of(config_class, folder):
            first = (folder / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            lines.append(f"  {name:24} {first}")
        for group in sorted(path for path in folder.iterdir() if path.is_dir()):
            lines.append(f"  {group.name}={'|'.join(sorted(file.stem for file in group.glob('*.yaml')))}")
        lines.append("")
    return "\n".join([*lines, "keys, with type and default:", *help_of_keys(config_class)])


def configs_of(config_class: type, folder: Path) -> list[str]:
    """The configs of a folder that are a program's own: what each sets itself is a key or a section of the program's.

    Only names at the beginning of a line are looked at, which takes a thousandth of a second where reading yaml takes
    a tenth.
    """
    known = {"defaults", *all_keys(config_class)}
    texts = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.yaml")}
    return sorted(name for name in texts if known.issuperset(re.findall(r"^(\w+):", texts[name], re.MULTILINE)))


def help_of_keys(config_class: type) -> list[str]:
    """Lines for --help: each key with type and default, and below it what it means."""
    lines, explained_by = [], explanations(config_class)
    for key, (kind, each) in all_keys(config_class).items():
        explained = explained_by[key]
        if dataclasses.is_dataclass(kind):
            lines += ["", *_wrapped(f"{key}: {explained}", 2)] if explained else []
            continue
        default = "" if each.default is dataclasses.MISSING else f" = {shown(as_tree(each.default))}"
        lines += [f"  {key}: {_type_name(kind)}{default}", *_wrapped(explained, 6)]
    return lines


def explanations(config_class: type) -> dict[str, str]:
    """The explanation of every key: its field's comment, or the docstring of a section. '' where there is none.

    A comment is what stands at the end of the field's lines; where there is none, the whole lines right above.
    """
    known = all_keys(config_class)
    classes = {"": config_class} | {key: item_of(kind) for key, (kind, _) in known.items()}
    found = {}
    for key, (kind, field) in known.items():
        owner = classes[key.rpartition(".")[0].removesuffix("[]")]
        found[key] = _docstring(kind) if dataclasses.is_dataclass(kind) else _field_comments(owner)[field.name]
    return found


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    return "list" if typing.get_origin(kind) is tuple else getattr(kind, "__origin__", kind).__name__


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)


def _docstring(section_class: type) -> str:
    """The class's own; dataclasses give the others their signature."""
    text = section_class.__dict__.get("__doc__") or ""
    return "" if text.startswith(f"{section_class.__name__}(") else " ".join(text.split())


@functools.cache
def _field_comments(section_class: type) -> dict[str, str]:
    """By a field's name, those of base classes too."""
    comments: dict[str, str] = {}
    for owner in filter(dataclasses.is_dataclass, reversed(section_class.__mro__)):
        source = textwrap.dedent(inspect.getsource(owner))
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        at_line = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
        for node in ast.parse(source).body[0].body:
            if not isinstance(node, ast.AnnAssign):
                continue
            found = [at_line[line] for line in range(node.lineno, node.end_lineno + 1) if line in at_line]
            line = node.lineno - 1
            while not (found and found[-1].start[0] >= node.lineno) and _is_whole(at_line.get(line)):
                found.insert(0, at_line[line])
                line -= 1
            comments[node.target.id] = " ".join(token.string.lstrip("# ") for token in found)
    return comments


def _is_whole(comment: tokenize.TokenInfo | None) -> bool:
    """Whether a comment has its line for itself."""
    return comment is not None and comment.line.lstrip().startswith("#")
