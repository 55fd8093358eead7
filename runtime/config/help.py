"""Writes what --help prints. A key's explanation is the comment beside its field, so no text is written twice."""

import dataclasses
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.config.rebuild import MISSING, all_keys, as_tree, default_of, item_of, shown
from runtime.terminal import wrapped

PAGE = """{about}

usage: {program} {words}[key=value ...]
{configs}
keys, with type and default:
{keys}"""

CONFIGS = """
  --config-name=NAME  a yaml file, by default {default}
  --config-dir=FOLDER another folder to look for it in
  key=value           overrides a key; +key=value is the same
  --cfg job           prints all keys with their values, and runs nothing
  -m key=a,b          one run after the other, each with one of the values, each in its own run folder
  --hydra-help        hydra's other flags

configs:
{configs}
"""


def help_page(main: Callable, config_class: type, default: str | None, folder: Path) -> str:
    """Usage, the configs in a folder with their first sentences, and every key explained. default: the name of the
    default config; None: the program has no configs."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    lines = []
    for name, about in configs_of(folder, default or "").items():
        lines.append(wrapped(f"{name:24} {about}", "  ", 27 * " "))
    for group in sorted(path for path in folder.iterdir() if path.is_dir()):
        if group.name in OF_FAMILIES and program_of(default or "") == "train":
            continue
        lines.append(f"  {group.name}={'|'.join(sorted(file.stem for file in group.glob('*.yaml')))}")
    title, _, rest = (sys.modules[main.__module__].__doc__ or "").strip().partition("\n\n")
    examples = rest.partition("\n\n")[0]
    words = [_word(name, *all_keys(config_class)[name]) for name in getattr(config_class, "WORDS", ())]
    return PAGE.format(
        about=wrapped(title, others="") + f"\n\n{examples}" * examples.startswith("    "),
        program=f"python -m {spec.name}" if spec else f"python {sys.argv[0]}",
        words="[--config-name=NAME] " if default else "".join(words),
        configs=CONFIGS.format(default=default, configs="\n".join(lines)) if default else "",
        keys="\n".join(help_of_keys(config_class)),
    )


def _word(name: str, kind: Any, field: dataclasses.Field) -> str:
    word = name.upper() + " ..." * (item_of(kind) is not kind)
    return f"{word} " if field.default is dataclasses.MISSING else f"[{word}] "


OF_FAMILIES = ("experts", "family")  # groups of configs that train.py does not take


def program_of(config: str) -> str:
    """The trainer that a config in configs/ is for."""
    return "train_any" if config.startswith(("any_", "finetune_", "scale")) else "train"


def configs_of(folder: Path, like: str = "") -> dict[str, str]:
    """A folder's configs with their first sentences: those for the same program as `like`."""
    about = {}
    for file in sorted(folder.glob("*.yaml")):
        if program_of(file.stem) == program_of(like):
            comment = itertools.takewhile(lambda line: line.startswith("# "), file.read_text("utf-8").splitlines())
            about[file.stem] = re.split(r"(?<=\.) ", " ".join(line[2:] for line in comment))[0]
    return about


def help_of_keys(config_class: type) -> list[str]:
    """Lines for --help: the keys with type and default, and below each what it means."""
    lines, explained = [], explanations(config_class)
    for key, (kind, field) in all_keys(config_class).items():
        if dataclasses.is_dataclass(kind):
            lines += ["", wrapped(f"{key}: {explained[key]}", "  ")] if explained[key] else []
            continue
        name = "list" if typing.get_origin(kind) is tuple else getattr(kind, "__origin__", kind).__name__
        if typing.get_origin(kind) is typing.Literal:
            name = " or ".join(typing.get_args(kind))
        default = default_of(field)
        default = "" if default == MISSING else f" = {shown(as_tree(default))}"
        lines += [f"  {key}: {name}{default}", wrapped(explained[key], 6 * " ", 6 * " ")]
    return lines


def explanations(config_class: type) -> dict[str, str]:
    """The explanations of all keys: a field's comment, or a section's docstring; '' without either."""
    known = all_keys(config_class)
    comments = {"": comments_of(config_class)}
    explained = {}
    for key, (kind, field) in known.items():
        if dataclasses.is_dataclass(item_of(kind)):
            comments[key] = comments[f"{key}[]"] = comments_of(item_of(kind))
        explained[key] = comments[key.rpartition(".")[0]].get(field.name, "")
        about = inspect.getdoc(kind) if dataclasses.is_dataclass(kind) else None
        if about and not about.startswith(f"{kind.__name__}("):  # a dataclass's default docstring
            explained[key] = " ".join(about.split())
    return explained


def comments_of(section_class: Any) -> dict[str, str]:
    """The comments of all fields, those of base classes too, by name: beside the field, or in the lines above it."""
    comments: dict[str, str] = {}
    for owner in [cls for cls in reversed(section_class.__mro__) if "__dataclass_fields__" in vars(cls)]:
        above: list[str] = []
        for line in map(str.strip, inspect.getsource(owner).splitlines()):
            if line.startswith("# "):
                above.append(line[2:])
                continue
            if field := re.match(r"(\w+): .*?(?:  # (.*))?$", line):
                comments[field[1]] = field[2] or " ".join(above)
            above = []
    return comments
