"""The ledger as text for a terminal of 160 columns: the source with costs in the margin, then the totals and the
memory."""

import ast
import collections
import re

from ledger.count.costs import Saved
from ledger.count.memory import GROUPS, Held
from ledger.count.program import PHASES
from ledger.pages.lines import Line, sums
from ledger.units import gigabytes, number

WIDTH = 160
_HEAD = (
    "             FLOPs            bytes sent        bytes",
    " runs forward again backw │forward again backw │  kept │ line",
)
# Why a value is kept, where it is not a name in the source.
WHY = {"input": "input of a checkpoint", "gradient": "a gradient, made ahead", "": "nobody asked for it"}
_LISTED = 14  # rows of the list of largest values


# -- The annotated source ----------------------------------------------------------------------------------------------
def _margin(line: Line) -> str:
    runs = f"×{line.runs:,}" if line.runs > 1 else ""
    kept = number(line.total("kept")) + ("!" if "unasked" in line.kept else "")
    return f"{runs:>5} {_phases(line.flops)} │{_phases(line.sent_in)} │{kept:>6} │"


def _phases(parts: collections.Counter) -> str:
    first = number(parts["forward"]) or number(parts["update"]) + "u" * bool(parts["update"])
    return f"{first:>7}{number(parts['recomputed']):>6}{number(parts['backward']):>6}"


def text(ledger) -> str:
    """The whole page."""
    costs, nothing = sums(ledger), Line()
    mesh = " × ".join(f"{axis}={size}" for axis, size in ledger.mesh.items())
    lines = [
        f"{ledger.source} on the mesh {mesh}: one step of {ledger.tokens:,} tokens, {ledger.parameters:,} parameters.",
        "Costs of one device and one step. again: computed or sent again for the backward pass. u: in the update. "
        "runs: how often in a step, without",
        "the backward pass. kept: for the backward pass, at once (!: nobody asked for it). k, M, G, T: thousands, "
        "millions, ... A multiply and an add",
        "are two FLOPs. Lines between ⋮ cost nothing here: no matrix product, nothing sent, nothing kept.",
        "",
        *_HEAD,
    ]
    rows = shown(ledger, set(costs))
    for before, (number_, source) in zip([(0, ""), *rows], rows):
        if number_ != before[0] + 1:
            lines.append(f"{_margin(nothing)}    ⋮")
        line = f"{_margin(costs.get(f'{ledger.source}:{number_}', nothing))}{number_:>5} {source}"
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")
    for place in sorted(set(costs) - {f"{ledger.source}:{number_}" for number_, _ in rows}):
        lines.append(f"{_margin(costs[place])} {place or 'a line that is not known'}")
    lines += ["", *_totals(ledger), "", *_sent(ledger), "", *_kept(ledger), "", *_memory(ledger)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def shown(ledger, lines: set[str]) -> list[tuple[int, str]]:
    """Numbers and texts of the lines of all functions and statements that have one of these lines, which cost."""
    found = []
    for node in ast.parse("\n".join(ledger.text)).body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        numbers = range(first, (node.end_lineno or first) + 1)
        if any(f"{ledger.source}:{line}" in lines for line in numbers):
            found += [(line, ledger.text[line - 1]) for line in numbers]
    return found


# -- Totals ------------------------------------------------------------------------------------------------------------
def _totals(ledger) -> list[str]:
    rows = [
        f"  {phase:<22}{number(ledger.costs.flops(phase)) or '0':>8}{number(ledger.sent_bytes(phase)) or '0':>16}"
        for phase in PHASES
    ]
    lines = [
        f"{'A step of one device':<24}{'FLOPs':>8}{'bytes sent':>16}",
        *rows,
        f"  {'all':<22}{number(ledger.costs.flops()) or '0':>8}{number(ledger.sent_bytes()) or '0':>16}",
        f"On all {ledger.devices:,} devices: model FLOPs {ledger.model_flops:.6g} "
        f"(forward and backward, causal products as half), hardware FLOPs {ledger.hardware_flops:.6g} (all that runs),",
        f"6 × parameters × tokens {ledger.flops_6nd:.6g}.",
    ]
    loops = [f"{row.line} {row.phase} ×{row.length:,}" for row in sorted(ledger.costs.loops)]
    lines.append(f"Loops: {'; '.join(loops) or 'none'}.")
    for (line, name), times in ledger.costs.kernels.items():
        lines.append(f"Not counted: {name} at {line}, ×{times:,}: it declares no FLOPs.")
    return lines


def _sent(ledger) -> list[str]:
    alike: dict[tuple, list[float]] = collections.defaultdict(lambda: [0, 0])
    for row, times in ledger.costs.collectives.items():
        sums = alike[row.kind, row.axes, row.dtype, row.phase]
        sums[:] = sums[0] + times, sums[1] + row.sent_bytes(ledger.mesh) * times
    lines = [f"{'Sent by one device in a step':<30}{'over':<9}{'as':<10}{'phase':<11}{'times':>8}{'bytes':>9}"]
    for (kind, axes, dtype, phase), (times, sent) in sorted(alike.items()):
        lines.append(f"  {kind:<28}{' × '.join(axes):<9}{dtype:<10}{phase:<11}{times:>8,}{number(sent):>9}")
    return lines if alike else ["Nothing is sent."]


def _kept(ledger) -> list[str]:
    lines = ["Kept for the backward pass, on one device"]
    for row in sorted(ledger.saved, key=lambda row: -row.bytes * row.times):
        if row.bytes * row.times * 1000 < max(each.bytes * each.times for each in ledger.saved):
            continue
        times = f"{row.times} × " if row.times > 1 else ""
        lines.append(
            f"  {number(row.bytes * row.times):>7}  {times + array(row):<34} {row.line:<14} "
            f"{WHY.get(row.why, row.why):<22} {name_of(ledger, row.line)}"
        )
    total = sum(row.bytes * row.times for row in ledger.saved)
    lines.append(f"  {number(total) or '0':>7}  in all (what is under a thousandth of the largest is not listed)")
    copies = ledger.costs.host_copies.items()
    for row, times in sorted(copies, key=lambda each: (not each[0].to_host, -each[0].bytes * each[1])):
        where = "to the host" if row.to_host else "from the host"
        lines.append(
            f"  {number(row.bytes * times):>7}  {f'{times} × {row.dtype}':<34} {row.line:<14} {where:<22} "
            f"{name_of(ledger, row.line)}"
        )
    return lines


# -- Memory ------------------------------------------------------------------------------------------------------------
def _memory(ledger) -> list[str]:
    memory = ledger.memory
    where = f" at {memory.line} ({memory.phase})" if memory.line else ""
    lines = [f"Memory of one device: forecast of the peak {gigabytes(memory.bytes)}{where}"]
    for kind in GROUPS:
        part = memory.by_kind()[kind]
        bar = "█" * round(60 * part / max(memory.bytes, 1))
        lines.append(f"  {kind:<18}{gigabytes(part):>12}{part / max(memory.bytes, 1):>6.0%}  {bar}")
    lines += ["", "The largest values of the step, besides weights and optimizer state (*: alive at the peak)"]
    at_peak = collections.Counter(memory.held)
    listed = collections.Counter(memory.largest)
    for each in list(listed)[:_LISTED]:
        times = f"{listed[each]} × " if listed[each] > 1 else ""
        mark = "*" if at_peak[each] else " "
        lines.append(
            f" {mark}{number(each.bytes):>7}  {times + array(each):<34} {each.line:<14} {each.phase:<11} "
            f"{each.kind:<18} {name_of(ledger, each.line)}"
        )
    return [*lines, "", "To need less", *(f"  {line}" for line in advice(ledger))]


def advice(ledger) -> list[str]:
    """What would make it fit, with the bytes that each would save, roughly."""
    kinds = ledger.memory.by_kind()
    of_rows = kinds["saved activations"] + kinds["other values"]
    fixed = kinds["weights"] + kinds["optimizer state"] + kinds["gradients"]
    lines = [
        f"twice the microbatches, or half the batch: about {gigabytes(of_rows / 2)} less "
        "(saved activations and other values halve)",
        f"twice the devices: about {gigabytes(fixed / 2)} less (weights, optimizer state and gradients halve), "
        "and as much as above where the batch stays",
    ]
    asked = [row for row in ledger.saved if row.why not in ("", "input", "gradient")]
    for row in sorted(asked, key=lambda row: -row.bytes * row.times)[:2]:
        lines.append(
            f"without {name_of(ledger, row.line)} kept at {row.line}: up to {gigabytes(row.bytes * row.times)} less, "
            "and what makes it is computed again"
        )
    return lines


def summary(ledger, hbm_bytes: int | None = None) -> list[str]:
    """What to print before compiling: FLOPs, bytes sent, memory; and what to change, if it will not fit into a
    device's memory."""
    memory = ledger.memory.bytes
    of = "" if hbm_bytes is None else f" of {gigabytes(hbm_bytes)}"
    lines = [
        f"A step: {ledger.model_flops:.4g} model FLOPs, {ledger.hardware_flops:.4g} with what is recomputed; "
        f"each device sends {gigabytes(ledger.sent_bytes())} and needs {gigabytes(memory)}{of} (forecast)."
    ]
    if copied := ledger.costs.host_bytes(to_host=True):
        lines.append(f"It copies {gigabytes(copied)} to its host in a step, and back.")
    if hbm_bytes is not None and memory > hbm_bytes:
        parts = [f"{kind} {gigabytes(part)}" for kind, part in ledger.memory.by_kind().items() if part]
        lines += [
            f"It will not fit: {', '.join(parts)}. To need less:",
            *(f"  {line}" for line in advice(ledger)),
        ]
    return lines


def array(row: Held | Saved) -> str:
    return f"{row.dtype}[{', '.join(map(str, row.shape))}]"


def name_of(ledger, place: str) -> str:
    """What the source calls the value that a line makes: the name that is assigned to, else the line's text."""
    file, _, line = place.rpartition(":")
    if file != ledger.source:
        return ""
    source = ledger.text[int(line) - 1].strip()
    match = re.match(r"([A-Za-z_][\w, ]*?)(?:: [^=]+)? = ", source)
    return match[1] if match else source[:60]
