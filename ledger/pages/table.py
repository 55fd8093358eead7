"""The one model of a table: as text for a terminal, and by parts.html for a browser.

table = Table("Time of a step", {"phase": "", "compute": "s"}, [("forward", 0.114), ("backward", None)])
print("\n".join(table.text()))
{{ table(that) }}                       # in a template, after {% from 'parts.html' import table %}
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ledger import units

WORDS = ("", "code", "line")  # kinds that are no numbers
_KNOWN: dict[str, Callable[[Any], str]] = {
    "count": "{:,}".format,
    "GB": units.gigabytes,
    "percent": units.percent,
    "s": units.seconds,
    "loss": "{:.4f}".format,
    "rate": "{:,.0f}".format,
}


@dataclass(frozen=True)
class Bar:
    """An amount that a browser draws as a bar of its parts; text has the amount."""

    amount: float | None
    parts: Mapping[str, float]  # by the class of page.css that colours each
    full: float  # what takes the whole width


@dataclass(frozen=True)
class Table:
    """columns: by heading the kind of what is below. '' are words, 'code' names of the source, 'line' a place in it;
    'count', 'rate', 'percent', 's', 'loss', 'GB' and units ('FLOP', 'B') are numbers, of which None is not known."""

    caption: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]

    def text(self) -> list[str]:
        """The caption, and below it headings and rows, indented."""
        kinds = list(self.columns.values())
        rows = [list(self.columns), *([words(value, kind) for value, kind in zip(row, kinds)] for row in self.rows)]
        numbers = {index for index, kind in enumerate(kinds) if kind not in WORDS}
        return [self.caption, *(f"  {line}" for line in columns(rows, right=numbers))]


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """One line a row, its cells below one another; columns in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def words(value: Any, kind: str) -> str:
    """A cell as text: n/a for a number that is not known, a dash for words that are not there.

    >>> words(4.4e12, "FLOP"), words(None, "s"), words(0.123, "percent"), words(1234, "count"), words(None, "")
    ('4.40 TFLOP', 'n/a', '12.3%', '1,234', '–')
    """
    value = value.amount if isinstance(value, Bar) else value
    if kind in WORDS:
        return "–" if value is None else str(value)
    if value is None:
        return "n/a"
    return _KNOWN[kind](value) if kind in _KNOWN else units.amount(value, kind)


def shown(value: Any, kind: str) -> str:
    """The value as HTML, in which a browser never breaks a number."""
    text = words(value, kind)
    return text if kind in WORDS else text.replace(" ", "\N{NO-BREAK SPACE}")
