"""The pieces that ledger.html is put together from: amounts, bars, legends, tables, coloured source."""

import functools
import io
import keyword
import re
import tokenize
from html import escape

from ledger import units
from ledger.count.memory import GROUPS
from ledger.count.program import PHASES


# -- Numbers -----------------------------------------------------------------------------------------------------------
def amount(value: float, unit: str) -> str:
    return _on_one_line(units.amount(value, unit))


def seconds(value: float | None) -> str:
    return _on_one_line(units.seconds(value))


def percent(part: float | None) -> str:
    return _on_one_line(units.percent(part))


def _on_one_line(text: str) -> str:
    """A browser parts no number from its unit."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


# -- Bars and legends --------------------------------------------------------------------------------------------------
Parts = dict[str, float]  # from a class of html.css, which gives the colour, to an amount
# The classes, in the order in which bars and legends show them.
MANY_AXES = 6  # sets of mesh axes with a colour of their own
ORDER = (*PHASES, *(f"axes{number}" for number in range(MANY_AXES)), "asked", "input", "gradient", "unasked")
ORDER += tuple(kind.replace(" ", "-") for kind in GROUPS)


def bar(parts: Parts, full: float) -> str:
    """A stacked bar; `full` is the amount that takes the whole width. For the eye alone: numbers stand beside it."""
    shown = [(name, 100 * parts[name] / full) for name in ORDER if parts.get(name)]
    cells = "".join(f'<i class="{name}" style="width:{width:.3g}%"></i>' for name, width in shown)
    return f'<span class="bar" aria-hidden="true">{cells}</span>'


def legend(rows: list[tuple[str, str, str]]) -> str:
    """Of (class, label, amount)."""
    items = (f"<li>{key(name, label)} <b>{escape(text)}</b></li>" for name, label, text in rows)
    return f'<ul class="legend">{"".join(items)}</ul>'


def key(name: str, label: str) -> str:
    """A label with its colour."""
    return f'<span class="key"><i class="{name}"></i>{escape(label)}</span>'


# -- Tables ------------------------------------------------------------------------------------------------------------
def table(caption: str, columns: dict[str, str], rows: list[tuple]) -> str:
    """A table that html.js makes sortable.

    Args:
      columns: from the heading to what is below it: a unit ('FLOP', 'B'), 'count', 'percent', 's' for seconds or None,
        'line' for a place in the source, 'code', or '' for words.
      rows: tuples of as many values.
    """
    head = "".join(f'<th scope="col"{_numeric(kind)}>{escape(name)}</th>' for name, kind in columns.items())
    body = "".join(
        f"<tr>{''.join(_cell(value, kind) for value, kind in zip(row, columns.values(), strict=True))}</tr>\n"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def _numeric(kind: str) -> str:
    return ' class="n"' if kind in ("FLOP", "B", "s", "count", "percent") else ""


def _cell(value, kind: str) -> str:
    if kind == "line":
        place = value.rpartition(":")[2]
        text = f'<a href="#L{place}">{escape(value)}</a>' if place else "–"
        return f'<td data-v="{place or 0}">{text}</td>'
    if kind == "code":
        return f"<td><code>{escape(value)}</code></td>"
    if not kind:
        return f"<td>{escape(value)}</td>"
    shown = {"count": "{:,}".format, "percent": percent, "s": seconds}.get(kind) or functools.partial(amount, unit=kind)
    return f'<td class="n" data-v="{-1 if value is None else value}">{shown(value)}</td>'


# -- Source ------------------------------------------------------------------------------------------------------------
_BEFORE_A_STATEMENT = {"ENCODING", "NEWLINE", "INDENT", "DEDENT"}


def coloured(text: list[str]) -> list[str]:
    """The lines of a Python file as HTML: comments and docstrings, other strings, and keywords in spans."""
    marks: dict[int, list[tuple[int, int, str]]] = {}
    before = "ENCODING"
    for token in tokenize.generate_tokens(io.StringIO("\n".join(text)).readline):
        kind, name = tokenize.tok_name[token.type], ""
        if kind == "COMMENT" or (kind == "STRING" and before in _BEFORE_A_STATEMENT):
            name = "c"
        elif kind == "STRING" or kind.startswith("FSTRING"):
            name = "s"
        elif kind == "NAME" and keyword.iskeyword(token.string):
            name = "w"
        if name:
            (first, start), (last, end) = token.start, token.end
            for line in range(first, last + 1):
                stop = end if line == last else len(text[line - 1])
                marks.setdefault(line, []).append((start if line == first else 0, stop, name))
        before = before if kind in ("NL", "COMMENT") else kind
    return [_coloured(line, marks.get(number_, [])) for number_, line in enumerate(text, 1)]


def _coloured(line: str, marks: list[tuple[int, int, str]]) -> str:
    """Without the leading blanks, which become the indent of the lines that a long one is broken into."""
    blanks = len(re.match(r" *", line)[0])
    found, position = [], blanks
    for start, stop, name in marks:
        start = max(start, position)
        found.append(f'{escape(line[position:start])}<span class="{name}">{escape(line[start:stop])}</span>')
        position = max(stop, position)
    found.append(escape(line[position:]))
    return f'<code style="--in:{blanks}">{"".join(found)}</code>'
