"""Pages from jinja templates, which escape every text. A page holds its styles and scripts, and loads nothing.

render("ledger.html", title="A step", ...)
render("report.html", folder="runtime/tracking", ...)       # a template of another folder, which extends page.html
"""

import functools
from pathlib import Path
from typing import Any

import jinja2

from ledger.pages.table import WORDS, Bar, shown

FOLDER = Path(__file__).parent


def render(template: str, folder: str | Path = FOLDER, **values: Any) -> str:
    """The text of a page.

    Args:
      folder: that of the template; those of this folder can be included from everywhere.
    """
    return _environment(str(folder)).get_template(template).render(**values)


@functools.cache
def _environment(folder: str) -> jinja2.Environment:
    loader = jinja2.FileSystemLoader([folder, FOLDER])
    blocks: Any = {"trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, **blocks)
    environment.filters |= {"shown": shown}
    environment.tests |= {"bar": lambda value: isinstance(value, Bar)}
    environment.globals |= {"words": WORDS}
    return environment
