"""The ledger as one page for a browser: the source with costs in the margin as bars, memory, the roofline, and tables.

    Path("ledger.html").write_text(page(ledger), encoding="utf-8")
    page(ledger, roofline(ledger, named("h200"), devices_per_host=8))     # with the time that a step takes there

This file says what is on the page, ledger.html how it looks. page.css has the colours, for light and dark; the
colour-blind can tell them apart too. The page can be read without JavaScript, which only sorts tables and opens lines.
"""

import collections
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
from ledger.pages import roofs
from ledger.pages.lines import all_lines, axes_of, sums
from ledger.pages.render import render
from ledger.pages.text import WHY, advice, array, name_of, shown

FOLDED = 4  # so many lines in a row that cost nothing are folded
LISTED = 24  # rows of a table of values in memory
KINDS = {
    "weights": "the parameters, this device's part",
    "optimizer state": "what the optimizer remembers of each parameter",
    "batch": "what a step is given besides",
    "gradients": "of the parameters, and their sum over microbatches",
    "saved activations": "kept from the forward pass for the backward pass",
    "gathered weights": "put together from all devices' parts, for a product",
    "other values": "what is computed on the way",
}
KEPT = {
    "asked": "save_for_backward",
    "input": "inputs of checkpoints",
    "gradient": "gradients, made ahead",
    "unasked": "nobody asked for it",
}
TABLES = {
    "Matrix products": {"line": "line", "phase": "", "operands": "", "needed": "percent", "one": "FLOP"}
    | {"times": "count", "together": "FLOP", "of all": "percent"},
    "Sent to other devices": {"line": "line", "phase": "", "kind": "", "over": "", "type": "", "operand": "B"}
    | {"one sends": "B", "times": "count", "together": "B", "of all": "percent"},
    "Kept for the backward pass": {"line": "line", "value": "code", "because of": "", "array": "code", "one": "B"}
    | {"layers": "count", "together": "B", "of all": "percent"},
}


def page(ledger: Ledger, roofline: Roofline | None = None) -> str:
    """The whole page; without a roofline, where the hardware is not known, it does not say how long a step takes."""
    lines, every = sums(ledger), rows(ledger)
    alive = collections.Counter(ledger.memory.held)
    others = collections.Counter(each for each in ledger.memory.largest if each not in alive)
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
        blocks=blocks(ledger, set(lines)),
        elsewhere=sorted(set(lines) - {f"{ledger.source}:{number}" for number in range(1, len(ledger.text) + 1)}),
        every=every,
        details=details(every),
        columns=TABLES,
        kinds={_class(kind): part for kind, part in ledger.memory.by_kind().items()},
        groups={_class(kind): (kind, KINDS[kind]) for kind in GROUPS},
        cells=cells(ledger, alive),
        values={"In memory at the peak": values(ledger, alive), "Not in memory at the peak": values(ledger, others)},
        advice=advice(ledger),
        loops=[(row.line, row.phase, row.length, times) for row, times in sorted(ledger.costs.loops.items())],
        roofline=roofline,
        time=roofline and roofs.time(roofline),
        diagram=roofline and roofs.diagram(roofline),
        assumptions=ASSUMPTIONS,
    )


# -- What each line costs ----------------------------------------------------------------------------------------------
def labels(ledger: Ledger) -> dict[str, dict[str, str]]:
    """What each class means, for the three columns of the margin."""
    over: dict[str, str] = {}
    for axes, name in axes_of(ledger).items():
        over[name] = f"{over[name]} or {' × '.join(axes)}" if name in over else f"over {' × '.join(axes)}"
    return {"flops": {phase: phase for phase in PHASES}, "sent": over, "kept": KEPT}


def rows(ledger: Ledger) -> dict[str, list[tuple]]:
    """The rows of the three tables, by their captions; the first value of each is the line."""
    costs, whole = ledger.costs, all_lines(sums(ledger))
    found: dict[str, list[tuple]] = {
        "flops": [
            (row.line, row.phase, row.dtype, row.needed, row.flops, times, row.flops * times)
            for row, times in costs.products.items()
        ],
        "sent": [
            (row.line, row.phase, row.kind, " × ".join(row.axes), row.dtype, row.bytes, one, times, one * times)
            for row, times in costs.collectives.items()
            for one in [row.sent_bytes(ledger.mesh)]
        ],
        "kept": [
            (row.line, name_of(ledger, row.line), why, array(row), row.bytes, row.times, row.bytes * row.times)
            for row in ledger.saved
            for why in [WHY.get(row.why, row.why)]
        ],
    }
    tables = {}
    for caption, (what, each) in zip(TABLES, found.items(), strict=True):
        with_shares = [(*row, row[-1] / max(whole.total(what), 1)) for row in each]
        tables[caption] = sorted(with_shares, key=lambda row: -row[-2])
    return tables


def details(every: dict[str, list[tuple]]) -> dict[str, dict[str, list[tuple]]]:
    """The same rows by line and caption, without their first column."""
    found: dict[str, dict[str, list[tuple]]] = {}
    for caption, each in every.items():
        for place, *row in each:
            found.setdefault(place, {}).setdefault(caption, []).append(tuple(row))
    return found


# -- The source --------------------------------------------------------------------------------------------------------
def blocks(ledger: Ledger, costly: set[str]) -> list[tuple[bool, list[tuple[int, int, Markup]]]]:
    """The lines of the file in blocks, folded where nothing costs anything: of each its number, indent and HTML."""
    visible = {number for number, _ in shown(ledger, costly)}
    found = []
    lines = zip(itertools.count(1), ledger.text, coloured(ledger.text))
    for is_visible, group in itertools.groupby(lines, key=lambda line: line[0] in visible):
        block = [(number, len(text) - len(text.lstrip(" ")), code) for number, text, code in group]
        found.append((not is_visible and len(block) >= FOLDED, block))
    return found


@simplefilter
def three_colours(self, lexer, stream, options):
    """Comments (docstrings too), strings and keywords; all else has none."""
    for kind, text in stream:
        kind = Comment if kind in String.Doc else kind
        yield next((each for each in (Comment, String, Keyword) if kind in each), Text), text


def coloured(text: list[str]) -> list[Markup]:
    """The lines of a Python file as HTML without their indents, which the page makes of blanks itself."""
    lexer = PythonLexer(stripnl=False)
    lexer.add_filter(three_colours())
    lines = highlight("\n".join(text), lexer, HtmlFormatter(nowrap=True)).split("\n")
    return [Markup(re.sub(r"^((?:<span[^>]*>)?) +", r"\1", line)) for line in lines[: len(text)]]


# -- Memory ------------------------------------------------------------------------------------------------------------
def cells(ledger: Ledger, alive: collections.Counter) -> list[tuple[str, float, list[tuple[int, str, bool]]]]:
    """The stacked bar: of each kind its class, share and values, largest first: bytes, name, whether that can be read.

    What is too thin to be seen has no cell."""
    found, full = [], max(ledger.memory.bytes, 1)
    for kind in GROUPS:
        mine = {each: each.bytes * times for each, times in alive.items() if each.kind == kind}
        ordered = sorted(mine.items(), key=lambda item: -item[1])
        wide = [(size, _called(ledger, each), size * 30 > full) for each, size in ordered if size * 500 > full]
        found.append((_class(kind), sum(mine.values()) / full, wide))
    return found


def values(ledger: Ledger, counted: collections.Counter) -> list[tuple]:
    found = [
        (each.bytes * times, times, _called(ledger, each), each.kind, array(each), each.phase or "argument", each.line)
        for each, times in counted.items()
    ]
    return sorted(found, key=lambda row: -row[0])[:LISTED]


def _called(ledger: Ledger, each) -> str:
    """The value's name in the source; an argument of the step goes by its kind."""
    return name_of(ledger, each.line) or each.kind


def _class(kind: str) -> str:
    """The class of page.css for a kind of memory."""
    return kind.replace(" ", "-")
