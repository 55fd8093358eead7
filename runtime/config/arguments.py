"""The command line of a program without yaml: `key=value`, and words for the fields that its WORDS names.

    @dataclass(frozen=True, kw_only=True)
    class Compare:
        WORDS: ClassVar = ("runs",)

        runs: tuple[str, ...]  # a run folder, or a file of metrics
        output: str = "compare.html"  # the page

    read(Compare, ["runs/first", "runs/second", "output=both.html"])

A text is taken literally; other values are JSON or yaml: 1e-4, true, [a, b].
"""

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_origin

import yaml

from runtime.config.rebuild import COMMAND_LINE, Origins, all_keys, rebuild
from runtime.files import parse_yaml
from runtime.terminal import RunError

C = TypeVar("C")


def read(config_class: type[C], arguments: Sequence[str]) -> C:
    """The config_class of a command line. Raises RunError: all that is wrong with it."""
    known = all_keys(config_class)
    content: dict[str, Any] = {}
    words: list[str] = []
    for text in arguments:
        if match := re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", text, re.DOTALL):
            _set(content, match[1], _value(match[1], match[2], known))
        elif text.startswith("-"):
            raise no_flag(text)
        else:
            words.append(text)
    for name in getattr(config_class, "WORDS", ()):
        if words and name in content:
            raise RunError(f"{COMMAND_LINE}: {name} is given twice, as {name}=... and as the word {words[0]}")
        if words and get_origin(known[name][0]) is tuple:
            content[name], words = words, []
        elif words:
            content[name] = words.pop(0)
    if words:
        raise RunError(f"{COMMAND_LINE}: {words[0]} is too much: expected key=value, and --help lists the keys")
    return rebuild(config_class, content, Origins(COMMAND_LINE))


def no_flag(text: str, more: str = "") -> RunError:
    key = text.lstrip("-").partition("=")[0]
    return RunError(f"{COMMAND_LINE}: {text} is no flag: keys are given as {key}=VALUE, {more}and --help lists them")


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(content.get(section), dict):
            content[section] = {}
        content = content[section]
    content[name] = value


def _value(key: str, text: str, known: dict[str, tuple[Any, Any]]) -> Any:
    kind, field = known.get(key, (str, None))
    if field is not None and field.default is None and text == "null":
        return None
    if getattr(kind, "__origin__", kind) is str or get_origin(kind) is Literal:
        quoted = re.fullmatch(r"""(['"])(.*)\1""", text, re.DOTALL)
        return quoted[2] if quoted and quoted[1] not in quoted[2] else text
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    try:  # [a, b] without quotes
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise RunError(f"{COMMAND_LINE}: {key}={text[:100]} cannot be read: {' '.join(str(error).split())}") from None
