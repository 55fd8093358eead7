"""Contents of both ledger pages: tables of totals, transfers, kept values, memory and times; advice; the summary."""

import collections
import re
from collections.abc import Sequence

from ledger.count.costs import Saved
from ledger.count.memory import Held
from ledger.count.program import PHASES
from ledger.count.step import Ledger
from ledger.machines.roofline import Roofline
from ledger.pages.table import Bar, Table
from ledger.units import gigabytes

LISTED = 24  # rows of a list of values, the largest first
# Why a value is kept, where it is not a name in the source.
WHY = {"input": "input of a checkpoint", "gradient": "a gradient, made ahead", "": "nobody asked for it"}


# -- Counts ------------------------------------------------------------------------------------------------------------
def totals(ledger: Ledger) -> Table:
    """FLOPs and bytes sent of one device, by phase."""
    rows = [(phase, ledger.costs.flops(phase), ledger.sent_bytes(phase)) for phase in PHASES]
    rows.append(("all", ledger.costs.flops(), ledger.sent_bytes()))
    return Table("A step of one device", {"phase": "", "computed": "FLOP", "sent": "B"}, rows)


def sent(ledger: Ledger) -> Table:
    """The bytes that a device sends, by kind, axes, type and phase."""
    alike: dict[tuple, list[float]] = collections.defaultdict(lambda: [0, 0])
    for row, times in ledger.costs.collectives.items():
        sums = alike[row.kind, " × ".join(row.axes), row.dtype, row.phase]
        sums[:] = sums[0] + times, sums[1] + row.sent_bytes(ledger.mesh) * times
    columns = {"kind": "", "over": "", "as": "", "phase": "", "times": "count", "together": "B"}
    return Table("Sent by one device in a step", columns, [(*key, *sums) for key, sums in sorted(alike.items())])


def kept(ledger: Ledger) -> Table:
    """The largest values kept for the backward pass, and what is copied to the host and back."""
    rows: list[tuple] = []
    for row in sorted(ledger.saved, key=lambda row: -row.bytes * row.times):
        rows.append((row.bytes * row.times, row.times, array(row), row.line, WHY.get(row.why, row.why)))
    rows = rows[:LISTED]
    for copy, times in sorted(ledger.costs.host_copies.items(), key=lambda row: -row[0].bytes * row[1]):
        where = "to the host" if copy.to_host else "from the host"
        rows.append((copy.bytes * times, times, copy.dtype, copy.line, where))
    total = sum(row.bytes * row.times for row in ledger.saved)
    columns = {"together": "B", "times": "count", "array": "code", "line": "line", "because of": "", "value": "code"}
    rows = [(*row, name_of(ledger, row[3])) for row in rows]
    return Table(f"Kept for the backward pass, {gigabytes(total)} on one device", columns, rows)


# -- Memory ------------------------------------------------------------------------------------------------------------
def memory(ledger: Ledger, most: float | None = None) -> Table:
    """The peak by kind; shares are of `most` bytes, by default of the peak."""
    whole = ledger.memory.bytes
    at = f" at {ledger.memory.line} ({ledger.memory.phase})" if ledger.memory.line else ""
    of = f" of {gigabytes(most)}" if most else ""
    most = max(most or 0, whole, 1)
    rows = [(kind, part, part / most, "█" * round(40 * part / most)) for kind, part in ledger.memory.by_kind().items()]
    columns = {"kind": "", "bytes": "GB", "share": "percent", " ": ""}
    return Table(f"Memory of one device: forecast of the peak {gigabytes(whole)}{of}{at}", columns, rows)


def at_peak(ledger: Ledger) -> Table:
    """The largest values at the peak; an argument of the step, which has no name in the source, goes by its kind."""
    rows = []
    for held, times in collections.Counter(ledger.memory.held).items():
        called, phase = name_of(ledger, held.line) or held.kind, held.phase or "argument"
        rows.append((held.bytes * times, times, array(held), held.line or None, phase, held.kind, called))
    columns = {"together": "B", "number": "count", "array": "code", "line": "line", "phase": "", "kind": ""}
    rows = sorted(rows, key=lambda row: -row[0])[:LISTED]
    return Table("The largest values at the peak", {**columns, "value": "code"}, rows)


def held(ledger: Ledger, full: float) -> Bar:
    """The peak as a bar of its kinds."""
    parts = {kind.replace(" ", "-"): part for kind, part in ledger.memory.by_kind().items()}
    return Bar(ledger.memory.bytes, parts, full)


def advice(ledger: Ledger) -> list[str]:
    """Changes that would make it fit, with the bytes that each would save, roughly."""
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
        what = f"without {name_of(ledger, row.line)} kept at {row.line}"
        lines.append(f"{what}: up to {gigabytes(row.bytes * row.times)} less, and what makes it is computed again")
    return lines


def summary(ledger: Ledger, hbm_bytes: int | None = None, fixes: Sequence[str] = ()) -> list[str]:
    """The lines to print before compiling: FLOPs, bytes sent, memory; and, if the step will not fit into a device's
    memory, what to change: `fixes`, by default `advice`."""
    needed = ledger.memory.bytes
    of = "" if hbm_bytes is None else f" of {gigabytes(hbm_bytes)}"
    lines = [
        f"A step: {ledger.model_flops:.4g} model FLOPs, {ledger.hardware_flops:.4g} with what is recomputed; "
        f"each device sends {gigabytes(ledger.sent_bytes())} and needs {gigabytes(needed)}{of} (forecast)."
    ]
    if copied := sum(row.bytes * times for row, times in ledger.costs.host_copies.items() if row.to_host):
        lines.append(f"It copies {gigabytes(copied)} to its host in a step, and back.")
    if hbm_bytes is not None and needed > hbm_bytes:
        parts = [f"{kind} {gigabytes(part)}" for kind, part in ledger.memory.by_kind().items() if part]
        lines += [
            f"It will not fit: {', '.join(parts)}. To need less:",
            *(f"  {line}" for line in fixes or advice(ledger)),
        ]
    return lines


# -- Times -------------------------------------------------------------------------------------------------------------
def times(estimate: Roofline) -> Table:
    """Lower bounds for each phase: compute, memory traffic, communication, with full overlap and with none."""
    rows = [
        (phase.name, *phase.times.values(), phase.overlapped_s, phase.alone_s, phase.bound or "n/a")
        for phase in estimate.phases
    ]
    rows.append(("all", *estimate.totals.values(), estimate.step_s, estimate.step_alone_s, estimate.bound or "n/a"))
    kinds = dict.fromkeys(("compute", "memory", "sending", "overlapped", "alone"), "s")
    return Table("Time of a step at the least", {"phase": "", **kinds, "bound by": ""}, rows)


def sendings(estimate: Roofline) -> Table:
    """The bytes of each kind of collective, and how fast they can be sent."""
    rows = []
    for row in sorted(estimate.sendings, key=lambda row: -row.sent_bytes):
        through = "network" if row.crosses_hosts else "links"
        rows.append((row.kind, " × ".join(row.axes), row.phase, row.sent_bytes, row.bytes_per_s, row.sent_s, through))
    columns = {"kind": "", "over": "", "phase": "", "bytes": "B", "at": "B/s", "takes": "s", "through": ""}
    return Table("Sent by one device", columns, rows)


# -- Values ------------------------------------------------------------------------------------------------------------
def array(row: Held | Saved) -> str:
    return f"{row.dtype}[{', '.join(map(str, row.shape))}]"


def name_of(ledger: Ledger, place: str) -> str:
    """The source's name for the value that a line makes: the assigned name, else the line's text."""
    file, _, line = place.rpartition(":")
    if file not in ledger.texts:
        return ""
    source = ledger.texts[file][int(line) - 1].strip()
    match = re.match(r"([A-Za-z_][\w, ]*?)(?:: [^=]+)? = ", source)
    return match[1] if match else source[:60]
