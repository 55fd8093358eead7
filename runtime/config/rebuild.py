"""Rebuilds an untyped tree, as hydra composes it, as frozen dataclasses. pydantic checks; the messages are made here.

    rebuild(Config, {"mesh": {"d": 4, "t": 2}, ...}, origins)

All problems are reported at once. Each names the yaml file that set the value, or `command line`.
"""

import dataclasses
import difflib
import functools
import importlib.util
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime.files import flat
from runtime.terminal import RunError

C = TypeVar("C")

COMMAND_LINE = "command line"
MISSING = "???"  # omegaconf's mark for a value that must still be given
EXPECTED = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "text"},
    dict[str, Any]: "a section, {key: value}",
}


@dataclass(frozen=True)
class Origins:
    """Where keys were set, for messages: {'mesh.d': 'configs/x.yaml', 'training.steps': 'command line'}."""

    config_file: str = "config"  # named for a key that is set nowhere
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


def rebuild(
    config_class: type[C], content: Any, origins: Origins, dropped: Mapping[str, tuple[Any, str]] | None = None,
    is_derived: bool = False,
) -> C:  # fmt: skip
    """The config_class of a content, nested dicts. Raises RunError: all that is wrong with it.

    Sections are dataclasses, fields have the types of runtime/config/keys.py; a field `from_` is the key `from`.
    dropped: as in runtime.config.keys.DROPPED_KEYS. is_derived: values were made of others, so one bad value may be
    several problems: the first one alone is said.
    """
    from pydantic import ValidationError  # here, as in _adapter: --help starts without it

    problems: list[str] = []
    content, known = _without_missing(content), all_keys(config_class)
    for key, (harmless, why) in (dropped or {}).items():
        for value in take_out(content, key):
            if value != harmless:
                problems.append(f"{origins.of(key)}: {key} is refused: {why}")
    try:
        config = _adapter(typing.cast(Any, config_class)).validate_json(json.dumps(content, default=str))
    except ValidationError as error:
        for wrong in error.errors(include_url=False, include_context=False):
            key, value = _dotted(wrong["loc"]), wrong["input"]
            others = []
            if wrong["type"] == "unexpected_keyword_argument":
                others = _keys_of_other(getattr(config_class, "OTHER", None), key, value, origins)
            problems += others or [_message(key, wrong["type"], value, wrong["msg"], known, origins)]
    refuse(problems[:1] if is_derived else problems)
    return config


def _keys_of_other(program: str | None, key: str, value: Any, origins: Origins) -> list[str]:
    """Messages for keys of another program; none if it does not know all of them, or there is no such program."""
    if program is None or importlib.util.find_spec(program) is None:
        return []
    keys = [f"{key}.{name}" for name in flat(value)] if isinstance(value, dict) else [key]
    if not all(map(importlib.import_module(program).has_key, keys)):
        return []
    return [f"{origins.of(key)}: {key} is a key of another program: python -m {program}" for key in keys]


@functools.cache
def _adapter(config_class: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # pydantic finds it on the class. Strict: 2.0 is no whole number, 1 is not true. Its sections follow it.
    config_class.__pydantic_config__ = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, alias_generator=_key_of
    )
    return TypeAdapter(config_class)


def take_out(content: Any, key: str) -> list[Any]:
    """Removes a dotted key from nested dicts; its value in a list, which is empty where the key is not there."""
    *sections, name = key.split(".")
    for section in sections:
        content = content.get(section) if isinstance(content, dict) else None
    return [content.pop(name)] if isinstance(content, dict) and name in content else []


def all_keys(section_class: type, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field]]:
    """All keys of a config class with type and field, also those of sections, 'mesh.d': (Count, ...), and of a list's
    items, 'mixture[].weight'. For `int | None` the type is int."""
    hints = typing.get_type_hints(section_class, include_extras=True)
    keys = {}
    for field_ in dataclasses.fields(section_class):
        key, kind = prefix + _key_of(field_.name), hints[field_.name]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            (kind,) = set(typing.get_args(kind)) - {type(None)}
        keys[key] = (kind, field_)
        if dataclasses.is_dataclass(item_of(kind)):
            keys |= all_keys(item_of(kind), f"{key}." if item_of(kind) is kind else f"{key}[].")
    return keys


def item_of(kind: Any) -> Any:
    """X of tuple[X, ...]; any other type itself."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def default_tree(config_class: type) -> dict[str, Any]:
    """All keys as nested dicts with their defaults, or `???`: what a yaml builds on."""
    tree: dict[str, Any] = {}
    for key, (kind, field_) in all_keys(config_class).items():
        *sections, name = key.split(".")
        if dataclasses.is_dataclass(kind) or "[]" in key:
            continue
        section = functools.reduce(lambda outer, inner: outer.setdefault(inner, {}), sections, tree)
        section[name] = as_tree(default_of(field_))
    return tree


def default_of(field_: dataclasses.Field) -> Any:
    """The field's default, or `???`."""
    if field_.default_factory is not dataclasses.MISSING:
        return field_.default_factory()
    return MISSING if field_.default is dataclasses.MISSING else field_.default


def as_tree(config: Any) -> Any:
    """The config as nested dicts and lists, as `rebuild` takes it."""
    if isinstance(config, tuple):
        return [as_tree(item) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    return {_key_of(field_.name): as_tree(getattr(config, field_.name)) for field_ in dataclasses.fields(config)}


def shown(value: Any) -> str:
    """The value as yaml writes it (null, true, "3"), shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 400 else f"{text[:100]}… ({len(text)} characters)"


# ---------------------------------------------------------------- messages


def _message(key: str, error: str, value: Any, said: str, known: Mapping[str, Any], origins: Origins) -> str:
    """The line for one of pydantic's errors."""
    if error == "unexpected_keyword_argument":
        return _unknown_key(key, value, known, origins)
    if error == "value_error":  # raised by a section's __post_init__: `field: what is wrong`
        name, _, text = said.removeprefix("Value error, ").partition(": ")
        key = f"{key}.{name}".lstrip(".")
        return f"{origins.of(key)}: {key} = {shown(value.get(name))}: {text}"
    if error == "json_invalid":  # half of a surrogate pair, or endless nesting
        return f"{origins.of(key)}: expected Unicode text: {said}"
    is_item = key.endswith("]")
    kind = known[re.sub(r"\[\d+\]", "" if is_item else "[]", key)][0]
    expected = f"expected {_expected(item_of(kind) if is_item else kind)}"
    if error != "missing":
        return f"{origins.of(key)}: {key} = {shown(value)}: {expected}"
    where = origins.of(key) if "[" in key else origins.config_file
    return f"{where}: {key} is missing: {expected}; add {key}=..."


def _expected(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return f"a section with the keys {', '.join(_key_of(field_.name) for field_ in dataclasses.fields(kind))}"
    if typing.get_origin(kind) is tuple and dataclasses.is_dataclass(item_of(kind)):
        return f"a list, [{{{', '.join(f'{field_.name}: …' for field_ in dataclasses.fields(item_of(kind)))}}}, …]"
    if typing.get_origin(kind) is tuple:
        return f"a list of {_expected(item_of(kind))}, [a, b, …]"
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    return EXPECTED.get(kind) or kind.__metadata__[-1]


def _unknown_key(key: str, value: Any, known: Mapping[str, Any], origins: Origins) -> str:
    """The message for an unknown key: the nearest known one, or else its section's keys."""
    while isinstance(value, dict) and value:  # the first value in an unknown section tells where it was set
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    section, _, name = key.rpartition(".")
    of_items = re.sub(r"\[\d+\]", "[]", section)
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == of_items]
    by_name = {other.rpartition(".")[2]: other for other in known}
    if nearest := difflib.get_close_matches(name, siblings, n=1) or [each for each in siblings if each.endswith(name)]:
        hint = f"the nearest is {f'{section}.{nearest[0]}'.lstrip('.')}"
    elif name in by_name:  # in another section
        hint = f"the nearest is {by_name[name]}"
    else:
        all_ = f"the keys {f'of {section} ' * bool(section)}are {', '.join(siblings)}"
        hint = all_ if siblings else "--help lists all"
    return f"{origins.of(key)}: {key} is not a key: {hint}; correct it or delete it"


def _dotted(path: Sequence[str | int]) -> str:
    """('mixture', 0, 'weight') as mixture[0].weight."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _key_of(name: str) -> str:
    return name.removesuffix("_")


def _without_missing(content: Any) -> Any:
    """A copy without the keys whose value is `???`."""
    if not isinstance(content, dict):
        return content
    return {key: _without_missing(value) for key, value in content.items() if value != MISSING}
