"""The source with costs in the margin as bars, for ledger.html; what each line costs, in sums and in rows."""

import collections
import dataclasses
from html import escape

from ledger.count.program import PHASES
from ledger.pages.html_parts import MANY_AXES, Parts, amount, bar, coloured, key, table
from ledger.pages.text import array, name_of, shown

WHY = {
    "asked": "save_for_backward",
    "input": "inputs of checkpoints",
    "gradient": "gradients, made ahead",
    "unasked": "nobody asked for it",
}
FOLDED = 4  # so many lines in a row that cost nothing are folded
# The three columns of the margin: unit, and the word after an amount where columns do not stand under their headings.
COLUMNS = {"flops": ("FLOP", ""), "sent": ("B", "sent"), "kept": ("B", "kept")}


@dataclasses.dataclass
class Line:
    """What a line costs on one device in a step; each sum by the class that colours it."""

    flops: Parts = dataclasses.field(default_factory=collections.Counter)  # by phase
    sent: Parts = dataclasses.field(default_factory=collections.Counter)  # by mesh axes
    kept: Parts = dataclasses.field(default_factory=collections.Counter)  # by why
    runs: int = 0  # in a step, without the backward pass

    def add(self, what: str, name: str, value: float, runs: int) -> None:
        getattr(self, what)[name] += value
        self.runs = max(self.runs, runs)

    def total(self, what: str) -> float:
        return sum(getattr(self, what).values())


def sums(ledger) -> dict[str, Line]:
    """Of each line that costs anything, by its place, 'train.py:197'."""
    axes = axes_of(ledger)
    lines = collections.defaultdict(Line)
    for row, times in ledger.costs.products.items():
        lines[row.line].add("flops", row.phase, row.flops * times, times * (row.phase != "backward"))
    for row, times in ledger.costs.collectives.items():
        sent = row.sent_bytes(ledger.mesh) * times
        lines[row.line].add("sent", axes[row.axes], sent, times * (row.phase != "backward"))
    for row in ledger.saved:
        why = {"": "unasked", "input": "input", "gradient": "gradient"}.get(row.why, "asked")
        lines[row.line].add("kept", why, row.bytes * row.times, row.times)
    return dict(lines)


def all_lines(lines: dict[str, Line]) -> Line:
    """The sum of all."""
    whole = Line()
    for line in lines.values():
        for what in COLUMNS:
            getattr(whole, what).update(getattr(line, what))
    return whole


def axes_of(ledger) -> dict[tuple[str, ...], str]:
    """The class of each set of mesh axes that anything is sent over: axes0, axes1, ..."""
    place = {axis: number for number, axis in enumerate(ledger.mesh)}
    found = {row.axes for row in ledger.costs.collectives}
    order = sorted(found, key=lambda axes: (len(axes), [place[axis] for axis in axes]))
    return {axes: f"axes{min(number, MANY_AXES - 1)}" for number, axes in enumerate(order)}


def labels(ledger) -> dict[str, dict[str, str]]:
    """What each class means, for the three columns of the margin."""
    over = {}
    for axes, name in axes_of(ledger).items():
        over[name] = f"{over[name]} or {' × '.join(axes)}" if name in over else f"over {' × '.join(axes)}"
    return {"flops": {phase: phase for phase in PHASES}, "sent": over, "kept": WHY}


# -- Rows --------------------------------------------------------------------------------------------------------------
_HEADINGS = {
    "Matrix products": {"line": "line", "phase": "", "operands": "", "needed": "percent", "one": "FLOP"}
    | {"times": "count", "together": "FLOP", "of all": "percent"},
    "Sent to other devices": {"line": "line", "phase": "", "kind": "", "over": "", "type": "", "operand": "B"}
    | {"one sends": "B", "times": "count", "together": "B", "of all": "percent"},
    "Kept for the backward pass": {"line": "line", "value": "code", "because of": "", "array": "code", "one": "B"}
    | {"layers": "count", "together": "B", "of all": "percent"},
}


def rows(ledger) -> dict[str, list[tuple]]:
    """The rows of the three tables, by their captions; the first value of each is the line."""
    costs, whole = ledger.costs, all_lines(sums(ledger))
    found = [[], [], []]
    for row, times in costs.products.items():
        flops = row.flops * times
        share = flops / max(whole.total("flops"), 1)
        found[0].append((row.line, row.phase, row.dtype, row.needed, row.flops, times, flops, share))
    for row, times in costs.collectives.items():
        one, axes = row.sent_bytes(ledger.mesh), " × ".join(row.axes)
        share = one * times / whole.total("sent")
        found[1].append((row.line, row.phase, row.kind, axes, row.dtype, row.bytes, one, times, one * times, share))
    for row in ledger.saved:
        why = {"": WHY["unasked"], "input": "input of a checkpoint", "gradient": "a gradient, made ahead"}.get(
            row.why, row.why
        )
        kept, value = row.bytes * row.times, name_of(ledger, row.line)
        share = kept / max(whole.total("kept"), 1)
        found[2].append((row.line, value, why, array(row), row.bytes, row.times, kept, share))
    return {caption: sorted(each, key=lambda row: -row[-2]) for caption, each in zip(_HEADINGS, found, strict=True)}


def tables(ledger) -> str:
    return "".join(table(caption, _HEADINGS[caption], each) for caption, each in rows(ledger).items() if each)


def _details(every: dict[str, list[tuple]], place: str) -> str:
    """The rows of one line, without their first column."""
    found = []
    for caption, each in every.items():
        headings = {name: kind for name, kind in _HEADINGS[caption].items() if name != "line"}
        if mine := [row[1:] for row in each if row[0] == place]:
            found.append(table(f"{caption}, {place or 'a line that is not known'}", headings, mine))
    return "".join(found)


# -- The source --------------------------------------------------------------------------------------------------------
def source(ledger) -> str:
    """Every line of the file, folded where nothing costs anything; at the end what belongs to no line of it."""
    lines, every, code = sums(ledger), rows(ledger), coloured(ledger.text)
    places = [f"{ledger.source}:{number}" for number in range(1, len(code) + 1)]
    full = {what: max((line.total(what) for line in lines.values()), default=0) for what in COLUMNS}
    visible = {number for number, _ in shown(ledger, set(lines))}

    def row(number: int) -> str:
        place = places[number - 1]
        return _row(str(number), code[number - 1], lines.get(place), full, _details(every, place))

    found, start = [], 1
    while start <= len(code):
        stop = start
        while stop <= len(code) and (stop in visible) == (start in visible):
            stop += 1
        inside = "".join(map(row, range(start, stop)))
        if start not in visible and stop - start >= FOLDED:
            summary = f"<summary>⋮ lines {start} to {stop - 1} cost nothing</summary>"
            inside = f'<details class="fold">{summary}\n{inside}</details>\n'
        found.append(inside)
        start = stop
    for place in sorted(set(lines) - set(places)):
        text = f"<code>{escape(place or 'lines that are not known')}</code>"
        found.append(_row("", text, lines[place], full, _details(every, place)))
    return _legend(ledger, all_lines(lines)) + f'<div class="source">\n{_head(all_lines(lines))}{"".join(found)}</div>'


def _row(number: str, code: str, line: Line | None, full: dict[str, float], details: str) -> str:
    anchor = f' id="L{number or "0"}"'
    inside = f'<span class="no">{number or "?"}</span>{code}'
    if line is None:
        return f'<div class="line"{anchor}>{inside}</div>\n'
    cells = [f'<span class="runs">{f"×{line.runs:,}" if line.runs > 1 else ""}</span>']
    for what, (unit, word) in COLUMNS.items():
        total, text = line.total(what), ""
        if total:
            text = (
                f'<b>{amount(total, unit)}<span class="word"> {word}</span></b>{bar(getattr(line, what), full[what])}'
            )
        cells.append(f'<span class="cost">{text}</span>')
    return (
        f'<details class="line"{anchor}><summary>{"".join(cells)}{inside}</summary>\n'
        f'<div class="rows">{details}</div></details>\n'
    )


def _head(whole: Line) -> str:
    cells = "".join(
        f"<span><span>{name}</span> <b>{amount(whole.total(what), COLUMNS[what][0])}</b></span>"
        for what, name in (("flops", "FLOPs"), ("sent", "bytes sent"), ("kept", "bytes kept"))
    )
    return f'<div class="line head"><span class="runs">runs</span>{cells}<span class="no">line</span></div>\n'


def _legend(ledger, whole: Line) -> str:
    found = []
    for (what, names), title in zip(labels(ledger).items(), ("FLOPs", "Bytes sent", "Bytes kept"), strict=True):
        keys = "".join(key(name, label) for name, label in names.items() if name in getattr(whole, what))
        found.append(f"<div><b>{title}</b> {keys or 'none'}</div>")
    return f'<div class="keys">{"".join(found)}</div>'
