"""From an untyped tree, as hydra composes it, to frozen dataclasses: strictly, and with messages that name the place.

Every problem of a tree is collected before one error reports them all. A value's place is the yaml file that set it, or
`command line`; hydra forgets it while it composes, so find_origins reads the files once more.
"""

import dataclasses
import difflib
import json
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from runtime.terminal import RunError

C = TypeVar("C")

COMMAND_LINE = "command line"
MISSING = "???"  # omegaconf's mark for a value that must still be given
EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Origins:
    """Where each key was set, for messages: {'mesh.d': 'configs/x.yaml', 'training.steps': 'command line'}."""

    config_file: str = "config"  # where a key belongs that is set nowhere
    by_key: Mapping[str, str] = field(default_factory=dict)

    def of(self, key: str) -> str:
        while key:
            if key in self.by_key:
                return self.by_key[key]
            key = key.rpartition("[" if key.endswith("]") else ".")[0]
        return self.config_file


def refuse(problems: Sequence[str]) -> None:
    """Raises a RunError that lists all problems, if there are any."""
    if len(problems) == 1:
        raise RunError(problems[0])
    if problems:
        raise RunError("\n  ".join([f"{len(problems)} problems in the configuration", *problems]))


def rebuild(config_class: type[C], content: Any, origins: Origins, refused: Mapping[str, str]) -> C:
    """A config_class that holds what content says, or a RunError with everything that is wrong with it.

    content: nested dicts. refused: keys that once had a meaning, with why they have none now.
    Fields are int, float, bool, str, `| None` where None is their default, frozen dataclasses of these, or tuples of
    such dataclasses or of str. A field `async_` is the key `async`: the underscore at its end is there only because the
    key is a word of Python.
    """
    known = all_keys(config_class)
    problems: list[str] = []

    def kind_of(key: str) -> type:
        return known[_any_item(key)][0]

    def section(section_class: type, content: Any, prefix: str) -> Any:
        """An instance of section_class, or None after adding to problems; prefix is its key and a dot, or empty."""
        fields = {_key(each): each for each in dataclasses.fields(section_class)}
        if not isinstance(content, dict):
            expected = f"expected a section with the keys {', '.join(fields)}"
            problems.append(_wrong(prefix.rstrip("."), content, expected, origins))
            return None
        for name, value in content.items():
            if name not in fields:
                problems.append(_unknown_key(f"{prefix}{name}", value, known, origins, refused))
        values = {name: field_value(f"{prefix}{name}", each, content) for name, each in fields.items()}
        given = {name: value for name, value in values.items() if value is not None}
        return None if problems else section_class(**{fields[name].name: value for name, value in given.items()})

    def field_value(key: str, each: dataclasses.Field, content: dict) -> Any:
        """The field's value; None where the default holds, or after adding to problems."""
        kind = kind_of(key)
        value = content.get(_key(each), MISSING)
        if (value == MISSING and _has_default(each)) or (value is None and each.default is None):
            return None
        if dataclasses.is_dataclass(kind):
            return section(kind, {} if value == MISSING else value, f"{key}.")
        if item := _item(kind):
            are_sections = dataclasses.is_dataclass(item)
            if not isinstance(value, list) or not (are_sections or all(type(each) is item for each in value)):
                names = ", ".join(f"{_key(field)}: …" for field in dataclasses.fields(item)) if are_sections else ""
                form = f", [{{{names}}}, …]" if are_sections else " of text, [a, b, …]"
                problems.append(_wrong(key, value, f"expected a list{form}", origins))
                return None
            if not are_sections:
                return tuple(value)
            return tuple(section(item, values, f"{key}[{index}].") for index, values in enumerate(value))
        if value == MISSING:
            where, add = origins.config_file, f"add it there, or {key}=... to the command line"
            if where == COMMAND_LINE:
                add = f"add {key}=..."
            if "[" in key:  # of an item, which the command line sets only with its whole list
                where, add = origins.of(key), "add it there"
            problems.append(f"{where}: {key} is missing: expected {EXPECTED[kind]}; {add}")
            return None
        converted = _converted(value, kind)
        if converted is None:
            expected = f"expected {EXPECTED[kind]}{_how_to_write(key, value, kind)}"
            problems.append(_wrong(key, value, expected, origins))
        return converted

    config = section(config_class, content, "")
    refuse(problems)
    return config


def all_keys(section_class: type, prefix: str = "") -> dict[str, tuple[type, dataclasses.Field]]:
    """Every key that a config of this class may have, sections included: {'mesh': ..., 'mesh.d': (int, ...), ...}; of a
    list's items `list[].key`."""
    types = typing.get_type_hints(section_class)
    keys = {}
    for each in dataclasses.fields(section_class):
        key, kind = prefix + _key(each), types[each.name]
        if each.default is None:
            (kind,) = set(typing.get_args(kind)) - {type(None)}  # of `int | None`
        keys[key] = (kind, each)
        if dataclasses.is_dataclass(kind):
            keys |= all_keys(kind, f"{key}.")
        elif dataclasses.is_dataclass(_item(kind)):
            keys |= all_keys(_item(kind), f"{key}[].")
        elif kind not in EXPECTED and _item(kind) is not str:
            raise TypeError(f"{section_class.__name__}.{each.name}: a config cannot hold {kind}")
    return keys


def as_tree(config: Any) -> Any:
    """The config as nested dicts by key, and lists: what `rebuild` took."""
    if isinstance(config, tuple):
        return [as_tree(item) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    return {_key(each): as_tree(getattr(config, each.name)) for each in dataclasses.fields(config)}


def _key(each: dataclasses.Field) -> str:
    return each.name.removesuffix("_")


def _item(kind: type) -> type | None:
    """X of tuple[X, ...]; None for another kind."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def _any_item(key: str) -> str:
    return re.sub(r"\[\d+\]", "[]", key)


def _has_default(each: dataclasses.Field) -> bool:
    return each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING


def _wrong(key: str, value: Any, expected: str, origins: Origins) -> str:
    return f"{origins.of(key)}: {key} = {shown(value)}: {expected}"


def _converted(value: Any, wanted: type) -> Any:
    """The value as the wanted type, or None where it is something else. Nothing is rounded, cut or guessed."""
    if wanted is not float:
        return value if type(value) is wanted else None  # type(), since True is an int to isinstance
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)  # a whole number, or text such as 1e-3, which YAML 1.1 does not read as a number
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _how_to_write(key: str, value: Any, wanted: type) -> str:
    """The fix, where one is likely."""
    if wanted is int and isinstance(value, float) and math.isfinite(value):
        return "; write " + " or ".join(f"{key}={whole}" for whole in sorted({math.floor(value), math.ceil(value)}))
    if wanted is int and isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value):
        return f"; write {key}={int(value)}, without quotes"
    if wanted is bool and str(value).lower() in ("no", "off", "n", "0", "false"):
        return f"; write {key}=false"
    if wanted is bool and str(value).lower() in ("yes", "on", "y", "1", "true"):
        return f"; write {key}=true"
    if wanted is str and isinstance(value, bool | int | float):
        return f"; write it in quotes that the shell keeps: \"{key}='{value}'\""
    return ""


def shown(value: Any) -> str:
    """The value as yaml writes it: null, true, "3"."""
    return json.dumps(value, default=str)


def _unknown_key(key: str, value: Any, known: Mapping[str, Any], origins: Origins, refused: Mapping[str, str]) -> str:
    """The message for a key that is not in the schema: the nearest one that is, or else its section's keys."""
    first = key  # the first value in an unknown section: it says where the section was set, and what was meant
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        first = f"{first}.{name}"
    where = origins.of(first)
    if key in refused:
        return f"{where}: {key} is refused: {refused[key]}"

    key = first
    section, _, name = key.rpartition(".")
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == _any_item(section)]
    nearest = [f"{section}.{other}".lstrip(".") for other in difflib.get_close_matches(name, siblings, n=1)]
    if not nearest and not siblings:  # the section itself is unknown
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    nearest = nearest or [other for other in known if other.rpartition(".")[2] == name]
    if nearest:
        hint = f"the nearest is {nearest[0]}"
    else:
        of_section = f"of {section} " if siblings and section else ""
        hint = f"the keys {of_section}are {', '.join(siblings or [each for each in known if '.' not in each])}"
    return f"{where}: {key} is not a key: {hint}; correct it or delete it"


def find_origins(config_name: str | None, folders: Sequence[Path], overrides: Sequence[str]) -> Origins:
    """Reads the yaml files once more, each before the one that includes it, and notes which one set each key.

    config_name: None where there is no file.
    """
    by_key: dict[str, str] = {}
    if config_name is None:
        return Origins(COMMAND_LINE)
    files = [folder / f"{config_name.removesuffix('.yaml')}.yaml" for folder in folders]
    main_file = next((file for file in files if file.is_file()), Path(f"{config_name}.yaml"))

    def note(content: Any, prefix: str, file: str) -> None:
        for name, value in content.items():
            if isinstance(value, dict):
                note(value, f"{prefix}{name}.", file)
            else:
                by_key[f"{prefix}{name}"] = file

    def read(file: Path) -> None:
        content = OmegaConf.to_container(OmegaConf.load(file))
        for entry in content.pop("defaults", []):
            included = [folder / f"{entry}.yaml" for folder in folders]
            if included := [other for other in included if other.is_file()]:  # groups are told by the main file's name
                read(included[0])
        note(content, "", from_here(file))

    if main_file.is_file():
        read(main_file)
    for override in overrides:
        key = re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0]
        for other in [other for other in by_key if f"{other}.".startswith(f"{key}.") or key.startswith(f"{other}.")]:
            by_key[other] = "command line"
        by_key[key] = "command line"
    return Origins(config_file=from_here(main_file), by_key=by_key)


def from_here(file: Path) -> str:
    """The path as seen from the working directory, where the file lies in it."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative
