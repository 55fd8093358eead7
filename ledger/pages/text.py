"""The ledger as text for a terminal of 160 columns: the source with costs in the margin, then the tables."""

import ast
import collections

from ledger.count.step import Ledger
from ledger.pages import contents
from ledger.pages.lines import Line, sums
from ledger.units import number

WIDTH = 160
_HEAD = (
    "             FLOPs            bytes sent        bytes",
    " runs forward again backw │forward again backw │  kept │ line",
)


def _margin(line: Line) -> str:
    runs = f"×{line.runs:,}" if line.runs > 1 else ""
    kept = number(line.total("kept")) + ("!" if "unasked" in line.kept else "")
    return f"{runs:>5} {_phases(line.flops)} │{_phases(line.sent_in)} │{kept:>6} │"


def _phases(parts: collections.Counter) -> str:
    first = number(parts["forward"]) or number(parts["update"]) + "u" * bool(parts["update"])
    return f"{first:>7}{number(parts['recomputed']):>6}{number(parts['backward']):>6}"


def text(ledger: Ledger) -> str:
    costs = sums(ledger)
    mesh = " × ".join(f"{axis}={size}" for axis, size in ledger.mesh.items())
    lines = [
        f"{ledger.source} on the mesh {mesh}: one step of {ledger.tokens:,} tokens, {ledger.parameters:,} parameters.",
        "Costs of one device and one step. again: computed or sent again for the backward pass. u: in the update. "
        "runs: how often in a step, without",
        "the backward pass. kept: for the backward pass, at once (!: nobody asked for it). k, M, G, T: thousands, "
        "millions, ... A multiply and an add",
        "are two FLOPs. Lines between ⋮ cost nothing here: no matrix product, nothing sent, nothing kept.",
    ]
    for file in ledger.texts:
        lines += ["", f"-- {file} " + "-" * (WIDTH - 4 - len(file)), *_HEAD, *_annotated(ledger, file, costs)]
    elsewhere = [place for place in sorted(costs) if place.rpartition(":")[0] not in ledger.texts]
    lines += [f"{_margin(costs[place])} {place or 'a line that is not known'}" for place in elsewhere]
    lines += ["", *_totals(ledger)]
    for table in (contents.sent(ledger), contents.kept(ledger), contents.memory(ledger), contents.at_peak(ledger)):
        lines += ["", *(table.text() if table.rows else [f"{table.caption}: nothing."])]
    lines += ["", "To need less", *(f"  {line}" for line in contents.advice(ledger))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _annotated(ledger: Ledger, file: str, costs: dict[str, Line]) -> list[str]:
    """The lines of a file's functions and statements that cost anything, with their costs."""
    lines, before = [], 0
    for row, source in shown(ledger, file, set(costs)):
        if row != before + 1:
            lines.append(f"{_margin(Line())}    ⋮")
        line = f"{_margin(costs.get(f'{file}:{row}', Line()))}{row:>5} {source}"
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")
        before = row
    return lines


def shown(ledger: Ledger, file: str, places: set[str]) -> list[tuple[int, str]]:
    """Numbers and texts of the lines of all functions and statements of a file that have one of these places."""
    result, text = [], ledger.texts[file]
    for node in ast.parse("\n".join(text)).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        numbers = range(first, (node.end_lineno or first) + 1)
        if any(f"{file}:{line}" in places for line in numbers):
            result += [(line, text[line - 1]) for line in numbers]
    return result


def _totals(ledger: Ledger) -> list[str]:
    loops = [f"{row.line} {row.phase} ×{row.length:,}" for row in sorted(ledger.costs.loops)]
    return [
        *contents.totals(ledger).text(),
        f"On all {ledger.devices:,} devices: model FLOPs {ledger.model_flops:.6g} "
        f"(forward and backward, causal products as half), hardware FLOPs {ledger.hardware_flops:.6g} (all that runs),",
        f"6 × parameters × tokens {ledger.flops_6nd:.6g}.",
        f"Loops: {'; '.join(loops) or 'none'}.",
        *(
            f"Not counted: {name} at {line}, ×{times:,}: it declares no FLOPs."
            for (line, name), times in ledger.costs.kernels.items()
        ),
    ]
