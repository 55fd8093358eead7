"""What explains the keys of a config: the comments beside the fields of its dataclasses, and beside the keys in a yaml.

    explanations(Config, Path("configs/base.yaml"))["mesh.d"]      # 'devices along axis d: the batch, and ...'

So --help and --cfg job say what a reader of the source reads, and no text is written twice.
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

import yaml
from omegaconf import OmegaConf

from runtime.config.rebuild import all_keys, as_tree, from_here, shown

WIDTH = 120
COMMENT_COLUMN = 44  # of annotated yaml, where the line leaves room


def explanations(config_class: type, file: Path | None) -> dict[str, str]:
    """The explanation of every key that is no section, from its field's comment and then its comment in the yaml file,
    where there is one.

    A comment is what stands at the end of the field's lines; where there is none, the whole lines right above. A
    section of which the class has a docstring of its own has that. '' where nothing explains a key.
    """
    known = all_keys(config_class)
    classes = {"": config_class} | {key: _section_class(kind) for key, (kind, _) in known.items()}
    in_yaml = {} if file is None else _yaml_comments(file.read_text(encoding="utf-8"))
    found = {}
    for key, (kind, field) in known.items():
        owner = classes[key.rpartition(".")[0].removesuffix("[]")]
        if dataclasses.is_dataclass(kind):
            found[key] = _docstring(kind)
        else:
            found[key] = "; ".join(filter(None, [_field_comments(owner).get(field.name, ""), in_yaml.get(key, "")]))
    return found


def help_page(
    main: Callable, config_class: type, config_name: str | None, folder: Path, file: Path | None
) -> list[str]:
    """What --help prints: usage, the program's configs with their first comment lines, every key explained.

    Args:
      config_name: of the default config; None: the program has no configs.
      folder: of configs.
      file: the yaml that explains keys besides the dataclasses.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name}" if spec else f"python {sys.argv[0]}"
    about = _wrapped((sys.modules[main.__module__].__doc__ or "").strip().partition("\n\n")[0], 0)
    lines = [
        *about,
        "",
        f"usage: {program} {'[--config-name=NAME] ' * (config_name is not None)}[key=value ...]",
        "",
        "  key=value           overrides a key; +key=value is the same",
        "  --cfg job           prints all keys with their values and what they mean, and runs nothing",
        "  -m key=a,b          one run after the other, each with one of the values, each in its own run folder",
        "  --hydra-help        hydra's other flags",
        "",
    ]
    if config_name is not None:
        lines[4:4] = [
            f"  --config-name=NAME  a yaml file of {from_here(folder)}, by default {config_name}",
            "  --config-dir=FOLDER another folder to look for it in",
        ]
        lines.append("configs:")
    for name in configs_of(config_class, folder) if config_name is not None else ():
        first = (folder / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"  {name:24} {first}")
    return [
        *lines,
        *[""] * (config_name is not None),
        "keys, with type and default:",
        *help_of_keys(config_class, file),
    ]


def configs_of(config_class: type, folder: Path) -> list[str]:
    """The configs of a folder that are a program's own: what each sets itself is a key or a section of the program's.

    Only names at the beginning of a line are looked at, which takes a thousandth of a second where reading yaml takes
    a tenth. `base` is none: it is there to be built on.
    """
    known = {"defaults", *all_keys(config_class)}
    set_in = {
        file.stem: re.findall(r"^(\w+):", file.read_text(encoding="utf-8"), re.MULTILINE)
        for file in folder.glob("*.yaml")
    }
    return sorted(name for name, keys in set_in.items() if name != "base" and known.issuperset(keys))


def help_of_keys(config_class: type, file: Path | None) -> list[str]:
    """Lines for --help: each key with type and default, and below it what it means."""
    explained = explanations(config_class, file)
    in_yaml = OmegaConf.create() if file is None else OmegaConf.load(file)
    lines = []
    for key, (kind, each) in all_keys(config_class).items():
        if dataclasses.is_dataclass(kind):
            if explained[key]:
                lines += ["", *_wrapped(f"{key}: {explained[key]}", 2)]
            continue
        default = ""
        value = None if "[]" in key else OmegaConf.select(in_yaml, key)  # None too where it is ???
        if each.default is not dataclasses.MISSING:
            default = f" = {shown(each.default)}"
        elif value is not None:
            default = f" = {shown(value)} in {file.name}"
        lines.append(f"  {key}: {'list' if kind not in (int, float, bool, str) else kind.__name__}{default}")
        lines += _wrapped(explained[key], 6)
    return lines


def annotated(config_class: type, composed: str, file: Path | None) -> str:
    """A composed config as yaml with all keys that have a default, and beside each what it means.

    Args:
      composed: yaml, as hydra prints it. Nothing of it is checked, so that a config can be looked at that is not right.
    """
    tree = yaml.safe_load(composed) or {}
    for key, (kind, each) in all_keys(config_class).items():
        *sections, name = key.split(".")
        if "[]" in key or dataclasses.is_dataclass(kind) or each.default is dataclasses.MISSING:
            continue
        section = tree
        for part in sections:
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.setdefault(name, as_tree(each.default))
    text = OmegaConf.to_yaml(OmegaConf.create(tree))
    explained = explanations(config_class, file)
    lines = text.splitlines()
    for key, line in _yaml_lines(text).items():
        if explanation := explained.get(key):
            first, *rest = textwrap.wrap(explanation, WIDTH - COMMENT_COLUMN - 2, break_long_words=False)
            beside = f"{lines[line]:{COMMENT_COLUMN - 2}}  # {first}"
            lines[line] = "\n".join([beside, *(f"{'':{COMMENT_COLUMN}}# {more}" for more in rest)])
    return "\n".join(lines)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _section_class(kind: Any) -> Any:
    """The dataclass of a section or of a list's items."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def _docstring(section_class: type) -> str:
    """The class's own; dataclasses give the others their signature."""
    text = section_class.__dict__.get("__doc__") or ""
    return "" if text.startswith(f"{section_class.__name__}(") else " ".join(text.split())


@functools.cache
def _field_comments(section_class: type) -> dict[str, str]:
    """By a field's name, those of base classes too."""
    comments: dict[str, str] = {}
    for owner in reversed(section_class.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        source = textwrap.dedent(inspect.getsource(owner))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        at_line = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
        fields = [node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)]
        for node in fields:
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


def _yaml_comments(text: str) -> dict[str, str]:
    """By key: the comment at the end of its line, or else the whole lines right above."""
    lines = text.splitlines()
    comments = {}
    for key, line in _yaml_lines(text).items():
        beside = re.search(r"\s#\s+(.*)$", lines[line])
        above: list[str] = []
        while not beside and lines[line - 1].lstrip().startswith("#") and line > 0:
            line -= 1
            above.insert(0, lines[line].lstrip("# "))
        comments[key] = beside[1] if beside else " ".join(above)
    return comments


def _yaml_lines(text: str) -> dict[str, int]:
    """The line, from 0, of each key whose section is not written in braces."""

    def walk(node: yaml.Node, prefix: str) -> dict[str, int]:
        if not isinstance(node, yaml.MappingNode) or node.flow_style:
            return {}
        found = {}
        for name, value in node.value:
            found |= {f"{prefix}{name.value}": name.start_mark.line} | walk(value, f"{prefix}{name.value}.")
        return found

    return walk(yaml.compose(text), "")
