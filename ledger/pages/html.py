"""The ledger as one self-contained page for a browser: the source with costs in the margin as bars, the memory, the
roofline, and tables that can be sorted.

    Path("ledger.html").write_text(page(ledger), encoding="utf-8")
    page(ledger, roofline(ledger, named("h200"), devices_per_host=8))     # with the time that a step takes there

The page loads nothing and can be read without JavaScript: html.js adds sorting, details under the pointer, and the data
as a file. html.css has the colours, for light and dark; the colour-blind can tell them apart too.
"""

import collections
import json
from html import escape
from pathlib import Path

from ledger.count.memory import GROUPS
from ledger.pages import html_roofline, html_source
from ledger.pages.html_parts import Parts, amount, bar, legend, percent, table
from ledger.pages.text import advice, array, name_of

_KINDS = {
    "weights": "the parameters, this device's part",
    "optimizer state": "what the optimizer remembers of each parameter",
    "batch": "what a step is given besides",
    "gradients": "of the parameters, and their sum over microbatches",
    "saved activations": "kept from the forward pass for the backward pass",
    "gathered weights": "put together from all devices' parts, for a product",
    "other values": "what is computed on the way",
}
_LISTED = 24  # rows of a table of values in memory


def page(ledger, roofline=None) -> str:
    """The whole page.

    Args:
      ledger: a `ledger.count.step.Ledger`.
      roofline: its `ledger.machines.roofline.Roofline`; None where the hardware is not known.
    """
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("html.css", "html.js"))
    data = json.dumps(ledger.to_json(), separators=(",", ":")).replace("<", "\\u003c")  # no </script> in it
    if roofline is None:
        time = "<p>How long a step takes is not said: the hardware is not known.</p>"
    else:
        time = html_roofline.section(roofline)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(ledger.source)}: what a training step costs</title>
<style>
{style}</style>
</head>
<body>
<main>
{_header(ledger, roofline)}
<section id="source"><h2>Line by line</h2>
<p>A bar is a line's part of a step: all its layers and microbatches, forward and backward. The longest bar of a column
is its most expensive line. <b>Open a line</b> (click it, or Enter) for each of its products, transfers and kept values.
×8: it runs 8 times a step, the backward pass not counted.</p>
{html_source.source(ledger)}
</section>
<section id="memory"><h2>Memory</h2>
{_memory(ledger, roofline)}
</section>
<section id="time"><h2>Time</h2>
{time}
</section>
<section id="tables"><h2>Tables</h2>
{html_source.tables(ledger)}
{_loops(ledger)}
</section>
{_READING}
</main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


_READING = """<section id="reading"><h2>How it is counted</h2>
<ul>
<li>k, M, G, T, P: thousands, millions, 10⁹, 10¹², 10¹⁵; GB are 10⁹ bytes. A multiply and an add are two FLOPs.
FLOPs are those of matrix products; what is computed element by element has none here.</li>
<li><b>Needed</b>: the part of a product that the model needs; half of it where the other half is masked.</li>
<li><b>Recomputed</b>: computed once more, or sent, for the backward pass, because it was not kept.</li>
<li><b>Bytes sent</b> leave a device while as many enter it. In a ring of n devices an all-gather of parts of b bytes
sends (n − 1) b; a reduce-scatter or all-to-all of b bytes (n − 1)/n b; an all-reduce twice that; a permutation b.</li>
<li><b>Bytes kept</b> are made in the forward pass and read in the backward pass.</li>
<li><b>Memory</b> is a forecast: each value from where it is made to its last use, in the order of the program. A
compiler may reorder, pad, or keep more.</li>
<li>What happens in another file counts at the line that leads there.</li>
</ul></section>"""


# -- The first screen --------------------------------------------------------------------------------------------------
def _header(ledger, roofline) -> str:
    mesh = " × ".join(f"{axis}={size:,}" for axis, size in ledger.mesh.items())
    facts = {
        "Program": ledger.source,
        "Model": f"{ledger.parameters:,} parameters",
        "Mesh": f"{mesh}: {_devices(ledger)}",
        "Tokens a step": f"{ledger.tokens:,} ({ledger.tokens / ledger.devices:,.0f} a device)",
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    verdict = f'<p class="verdict">{html_roofline.verdict(roofline)}</p>' if roofline else ""
    return f"""<header>
<h1>What a training step costs</h1>
<p>For each line of <code>{escape(ledger.source)}</code>: what it computes, sends to other devices, and keeps in memory;
counted in the traced program, before it was compiled. All numbers are of <b>one device and one step</b> unless they say
otherwise.</p>
<dl class="facts">{items}</dl>
</header>
<div class="cards">
{_cards(ledger)}
</div>
{verdict}
<nav aria-label="Sections"><a href="#source">Line by line</a> <a href="#memory">Memory</a> <a href="#time">Time</a>
<a href="#tables">Tables</a> <a href="#reading">How it is counted</a></nav>"""


def _cards(ledger) -> str:
    lines = html_source.sums(ledger)
    whole = html_source.all_lines(lines)
    labels = html_source.labels(ledger)
    kinds = {_class(kind): part for kind, part in ledger.memory.by_kind().items()}
    flops = (
        f"{_devices(ledger)} together: {amount(ledger.hardware_flops, 'FLOP')}, of which the model needs "
        f"{amount(ledger.model_flops, 'FLOP')}, what is masked or recomputed left out. MFU counts these."
    )
    peak = f"Most while {_link(ledger, ledger.memory.line)} runs." if ledger.memory.line else ""
    return "\n".join(
        (
            _card("Computes", "in matrix products", whole.flops, "FLOP", labels["flops"], flops),
            _card("Sends", "to other devices", whole.sent, "B", labels["sent"], _most(ledger, lines, "sent")),
            _card("Keeps", "for the backward pass", whole.kept, "B", labels["kept"], _most(ledger, lines, "kept")),
            _card("Needs", "of memory (forecast)", kinds, "B", {_class(kind): kind for kind in GROUPS}, peak),
        )
    )


def _card(title: str, what: str, parts: Parts, unit: str, labels: dict[str, str], note: str) -> str:
    whole = sum(parts.values())
    rows = [(name, label, amount(parts[name], unit)) for name, label in labels.items() if parts.get(name)]
    return (
        f'<section class="card"><h2>{title}</h2><p><b class="big">{amount(whole, unit)}</b> {what}</p>'
        f'{bar(parts, whole)}{legend(rows)}<p class="note">{note}</p></section>'
    )


def _most(ledger, lines: dict[str, html_source.Line], what: str) -> str:
    place = max(lines, key=lambda place: lines[place].total(what), default="")
    if not lines or not lines[place].total(what):
        return ""
    return f"Most at {_link(ledger, place)}, <code>{escape(name_of(ledger, place))}</code>."


def _devices(ledger) -> str:
    return "1 device" if ledger.devices == 1 else f"{ledger.devices:,} devices"


def _link(ledger, place: str) -> str:
    return f'<a href="#L{place.rpartition(":")[2] or 0}">{escape(place or "a line that is not known")}</a>'


def _class(kind: str) -> str:
    """The class of html.css for a kind of memory."""
    return kind.replace(" ", "-")


# -- Memory ------------------------------------------------------------------------------------------------------------
def _memory(ledger, roofline) -> str:
    memory, kinds = ledger.memory, ledger.memory.by_kind()
    room = roofline.hardware.hbm_bytes if roofline else None
    fits = ""
    if room is not None:
        fits = f" A device has {amount(room, 'B')}; this is {percent(memory.bytes / room)} of it."
        fits += " <b>It will not fit.</b>" if memory.bytes > room else ""
    where = f" That is while {_link(ledger, memory.line)} runs ({memory.phase})." if memory.line else ""
    rows = [(kind, kinds[kind], kinds[kind] / max(memory.bytes, 1), what) for kind, what in _KINDS.items()]
    alive = collections.Counter(memory.held)
    others = collections.Counter(each for each in memory.largest if each not in alive)
    return f"""<p>Forecast of the peak: <b>{amount(memory.bytes, "B")}</b>.{where} Each cell below is a value that is in
memory then.{fits}</p>
{_cells(ledger, alive)}
{legend([(_class(kind), kind, amount(kinds[kind], "B")) for kind in GROUPS if kinds[kind]])}
{table("What the memory is for", {"kind": "", "bytes": "B", "of all": "percent", "what it is": ""}, rows)}
<details open><summary>The largest values at the peak</summary>
{_values(ledger, "In memory at the peak", alive)}</details>
<details><summary>Large values at other times</summary>
{_values(ledger, "Not in memory at the peak", others)}</details>
<h3>To need less</h3>
<ul>{"".join(f"<li>{escape(each)}</li>" for each in advice(ledger))}</ul>"""


def _cells(ledger, alive: collections.Counter) -> str:
    """The stacked bar: kinds in order, in each its values, largest first. What is too thin to be seen has no
    cell, what is too thin to be read no name."""
    kinds, full = [], max(ledger.memory.bytes, 1)
    for kind in GROUPS:
        values = {each: each.bytes * times for each, times in alive.items() if each.kind == kind}
        cells = "".join(
            f'<i style="flex-grow:{size}" title="{escape(_called(ledger, each))}: {amount(size, "B")}">'
            f"{escape(_called(ledger, each)) if size * 30 > full else ''}</i>"
            for each, size in sorted(values.items(), key=lambda item: -item[1])
            if size * 500 > full
        )
        width = 100 * sum(values.values()) / full
        kinds.append(f'<span class="{_class(kind)}" style="width:{width:.3g}%">{cells}</span>' if width else "")
    return f'<div class="held" aria-hidden="true">{"".join(kinds)}</div>'


def _values(ledger, caption: str, values: collections.Counter) -> str:
    columns = {
        "bytes": "B",
        "number": "count",
        "value": "code",
        "kind": "",
        "array": "code",
        "phase": "",
        "line": "line",
    }
    rows = [
        (each.bytes * times, times, _called(ledger, each), each.kind, array(each), each.phase or "argument", each.line)
        for each, times in values.items()
    ]
    return table(caption, columns, sorted(rows, key=lambda row: -row[0])[:_LISTED])


def _called(ledger, each) -> str:
    """The value's name in the source; an argument of the step goes by its kind."""
    return name_of(ledger, each.line) or each.kind


# -- The rest ----------------------------------------------------------------------------------------------------------
def _loops(ledger) -> str:
    rows = [(row.line, row.phase, row.length, times) for row, times in sorted(ledger.costs.loops.items())]
    found = [table("Loops", {"line": "line", "phase": "", "length": "count", "times": "count"}, rows)] if rows else []
    for (line, name), times in ledger.costs.kernels.items():
        found.append(f"<p>Not counted: {escape(name)} at {_link(ledger, line)}, ×{times:,}: it declares no FLOPs.</p>")
    return "".join(found)
