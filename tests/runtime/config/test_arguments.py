"""The command line of tools: keys, words without a key, and one clear line for each mistake."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
from parts import assert_refuses

from runtime.config.arguments import read
from runtime.config.keys import Count, NotNegative
from tools.generate import Generate


@dataclass(frozen=True, kw_only=True)
class Section:
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class Tool:
    WORDS: ClassVar = ("what", "runs")

    what: Literal["show", "diff"] = "show"
    runs: tuple[str, ...] = ()
    text: str = ""
    maybe: str | None = "x"
    no_text: str | None = None
    number: Count = 1
    share: NotNegative = 0.0
    yes: bool = False
    names: tuple[str, ...] = ()
    section: Section = field(default_factory=Section)


@pytest.mark.parametrize("arguments, expected", [
    ([], {}),
    (["diff", "runs/a", "runs/b_training.seed=1"], {"what": "diff", "runs": ("runs/a", "runs/b_training.seed=1")}),
    (["yes=true", "diff", "number=3", "a"], {"what": "diff", "runs": ("a",), "yes": True, "number": 3}),
    (["text=To be, or not: {1} = [?]"], {"text": "To be, or not: {1} = [?]"}),
    (["text=5", "no_text=null"], {"text": "5"}),
    (["text='a b'"], {"text": "a b"}),
    (["text='a' or 'b'"], {"text": "'a' or 'b'"}),
    (["text=~\n$x"], {"text": "~\n$x"}),
    (["+share=1e-4"], {"share": 1e-4}),
    (["share=2"], {"share": 2.0}),
    (["names=[a b=1,c]"], {"names": ("a b=1", "c")}),
    (['names=["a, b","1"]'], {"names": ("a, b", "1")}),
    (["section.path=x=y", "number=1", "number=2"], {"section": Section(path="x=y"), "number": 2}),
])  # fmt: skip
def test_what_arguments_mean(arguments, expected):
    """Texts as they stand; numbers, truth and lists as JSON or yaml; the last of a key counts; paths may hold a =."""
    assert read(Tool, arguments) == Tool(**expected)


@pytest.mark.parametrize("arguments, message", [
    (["--text", "x"], "command line: --text is no flag: … text=VALUE"),
    (["txt=1"], "command line: txt is not a key: the nearest is text"),
    (["sections.path=1"], "command line: sections.path is not a key … section.path"),
    (["section=1"], "command line: section = 1: expected a section … path"),
    (["number=0"], "command line: number = 0: expected … from 1 to 2147483647"),
    (["names=[1]"], "command line: names[0] = 1: expected text"),
    (["names=[a"], "command line: names=[a cannot be read: while parsing"),
    (["number=" + "9" * 5000], "command line: number=" + "9" * 100 + " cannot be read: Exceeds the limit"),
    (["show", "a", "what=diff"], "command line: what is given twice … what=... … the word show"),
    (["drop"], 'command line: what = "drop": expected show or diff'),
    (["yes=1", "number=1.5"], "2 problems in the configuration command line: number = 1.5: expected "),
])  # fmt: skip
def test_mistakes_are_refused(arguments, message):
    """The message says what was expected."""
    assert_refuses(message, read, Tool, arguments)


def test_words_that_no_key_takes():
    """A word too many is refused."""
    assert_refuses("command line: b is too much: expected key=value", read, Generate, ["a", "b"])
