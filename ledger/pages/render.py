"""Pages from jinja templates, which escape every text. A page holds its styles and scripts, and loads nothing.

render("ledger.html", title="A step", ...)
render("report.html", folder="runtime/tracking", ...)       # a template of another folder, which extends page.html
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from ledger import units

FOLDER = Path(__file__).parent


def render(template: str, folder: str | Path = FOLDER, **values: Any) -> str:
    """The text of a page.

    Args:
      folder: that of the template; those of this folder can be included from everywhere.
    """
    return _environment(str(folder)).get_template(template).render(**values)


@functools.cache
def _environment(folder: str) -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"shown": shown}
    return found


def shown(value: float | None, kind: str) -> str:
    """A number of a unit ('FLOP', 'B'), or of a kind ('count', 'percent', 's') as text that a browser breaks
    nowhere."""
    known: dict[str, Callable] = {"count": "{:,}".format, "percent": units.percent, "s": units.seconds}
    text = known[kind](value) if kind in known else units.amount(value or 0, kind)
    return text.replace(" ", "\N{NO-BREAK SPACE}")
