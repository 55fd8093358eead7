"""The ledger as one page for a browser: the source with costs in the margin as bars, memory, and the roofline.

    Path("ledger.html").write_text(page(ledger), encoding="utf-8")
    page(ledger, roofline(ledger, named("h200"), devices_per_host=8))     # with the time that a step takes there

This file says what is on the page, ledger.html how it looks. page.css has the colours, for light and dark; the
colour-blind can tell them apart too. The page can be read without JavaScript, which only sorts tables and opens lines.
"""

import collections
import functools
import itertools
import re

from markupsafe import Markup
from pygments import highlight
from pygments.filter import simplefilter
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, String, Text

from ledger.count.memory import GROUPS
from ledger.count.program import PHASES
from ledger.count.step import Ledger
from ledger.machines.roofline import ASSUMPTIONS, Roofline
from ledger.pages import contents, roofs
from ledger.pages.contents import WHY, array, name_of
from ledger.pages.lines import Line, all_lines, axes_of, sums
from ledger.pages.render import render
from ledger.pages.table import Table
from ledger.pages.text import shown

FOLDED = 4  # so many lines in a row that cost nothing are folded
# The columns of an opened line's tables.
TABLES = {
    "Matrix products": {"phase": "", "operands": "", "needed": "percent", "one": "FLOP"}
    | {"times": "count", "together": "FLOP", "of all": "percent"},
    "Sent to other devices": {"phase": "", "kind": "", "over": "", "type": "", "operand": "B"}
    | {"one sends": "B", "times": "count", "together": "B", "of all": "percent"},
    "Kept for the backward pass": {"value": "code", "because of": "", "array": "code", "one": "B"}
    | {"layers": "count", "together": "B", "of all": "percent"},
}


def page(ledger: Ledger, roofline: Roofline | None = None) -> str:
    """The whole page; without a roofline, where the hardware is not known, it does not say how long a step takes."""
    lines = sums(ledger)
    of_time = [contents.times(roofline), contents.sendings(roofline)] if roofline else []
    return render(
        "ledger.html",
        title=f"{ledger.source}: what a training step costs",
        ledger=ledger,
        lines=lines,
        whole=all_lines(lines),
        full={
            what: max((line.total(what) for line in lines.values()), default=0) for what in ("flops", "sent", "kept")
        },
        most={what: max(lines, key=lambda place: lines[place].total(what), default="") for what in ("sent", "kept")},
        labels=labels(ledger),
        name_of=lambda place: name_of(ledger, place),
        files={name: blocks(ledger, name, set(lines)) for name in ledger.texts},
        elsewhere=sorted(place for place in lines if place.rpartition(":")[0] not in ledger.texts),
        details=details(ledger, all_lines(lines)),
        kinds=contents.held(ledger, ledger.memory.bytes).parts,
        tables=[contents.at_peak(ledger), contents.sent(ledger), *of_time],
        advice=contents.advice(ledger),
        roofline=roofline,
        diagram=roofline and roofs.diagram(roofline),
        assumptions=ASSUMPTIONS,
    )


# -- What each line costs ----------------------------------------------------------------------------------------------
def labels(ledger: Ledger) -> dict[str, dict[str, str]]:
    """The meaning of each class, for the three columns of the margin and for memory."""
    over: dict[str, str] = {}
    for axes, name in axes_of(ledger).items():
        over[name] = f"{over[name]} or {' × '.join(axes)}" if name in over else f"over {' × '.join(axes)}"
    kept = {"asked": "save_for_backward", "unasked": WHY[""]}
    kept |= {why: WHY[why] for why in ("input", "gradient")}
    held = {kind.replace(" ", "-"): kind for kind in GROUPS}
    return {"flops": {phase: phase for phase in PHASES}, "sent": over, "kept": kept, "held": held}


def details(ledger: Ledger, whole: Line) -> dict[str, list[Table]]:
    """Up to three tables for each line: what it computes, sends and keeps."""
    tables: list[dict[str, list[tuple]]] = [collections.defaultdict(list) for _ in TABLES]
    products, sent, kept = tables
    for row, times in ledger.costs.products.items():
        products[row.line].append((row.phase, row.dtype, row.needed, row.flops, times, row.flops * times))
    for op, times in ledger.costs.collectives.items():
        one, over = op.sent_bytes(ledger.mesh), " × ".join(op.axes)
        sent[op.line].append((op.phase, op.kind, over, op.dtype, op.bytes, one, times, one * times))
    for value in ledger.saved:
        about = name_of(ledger, value.line), WHY.get(value.why, value.why), array(value)
        kept[value.line].append((*about, value.bytes, value.times, value.bytes * value.times))
    by_line: dict[str, list[Table]] = collections.defaultdict(list)
    for (caption, columns), what, table in zip(TABLES.items(), ("flops", "sent", "kept"), tables):
        for place, rows in table.items():
            with_shares = sorted(
                [(*row, row[-1] / max(whole.total(what), 1)) for row in rows], key=lambda row: -row[-1]
            )
            title = f"{caption}, {place or 'a line that is not known'}"
            by_line[place].append(Table(title, columns, with_shares))
    return by_line


# -- The source --------------------------------------------------------------------------------------------------------
def blocks(ledger: Ledger, file: str, costly: set[str]) -> list[tuple[bool, list[tuple[int, int, Markup]]]]:
    """The lines of a file in blocks, folded where nothing costs anything: of each its number, indent and HTML."""
    visible = {number for number, _ in shown(ledger, file, costly)}
    result = []
    lines = zip(itertools.count(1), ledger.texts[file], coloured(tuple(ledger.texts[file])))
    for is_visible, group in itertools.groupby(lines, key=lambda line: line[0] in visible):
        block = [(number, len(text) - len(text.lstrip(" ")), code) for number, text, code in group]
        result.append((not is_visible and len(block) >= FOLDED, block))
    return result


@simplefilter
def three_colours(self, lexer, stream, options):
    """Comments (docstrings too), strings and keywords; all else has none."""
    for kind, text in stream:
        kind = Comment if kind in String.Doc else kind
        yield next((colour for colour in (Comment, String, Keyword) if kind in colour), Text), text


@functools.cache  # for processes that write several pages
def coloured(text: tuple[str, ...]) -> list[Markup]:
    """The lines of a Python file as HTML without their indents, which the page makes of blanks itself."""
    lexer = PythonLexer(stripnl=False)
    lexer.add_filter(three_colours())
    lines = highlight("\n".join(text), lexer, HtmlFormatter(nowrap=True)).split("\n")
    return [Markup(re.sub(r"^((?:<span[^>]*>)?) +", r"\1", line)) for line in lines[: len(text)]]
