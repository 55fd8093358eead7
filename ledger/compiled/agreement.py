"""Holds a ledger against the program that XLA made of its step: what is sent, and the memory.

compiled = traced.lower().compile()
for row in differences(ledger, compiled.as_text()):
    print(row)                                  # nothing, where XLA does as it is told
lines, rows = agreement(ledger, compiled)       # ["The compiled step sends what is written: ...", ...], []
"""

import collections
import dataclasses
import math
from typing import Any

import jax

from ledger.compiled.collectives import compiled_sites, widened
from ledger.count.costs import Collective, Sites
from ledger.count.step import Ledger
from ledger.units import gigabytes

WIDENED = "sent as float32, twice the bytes, as all bfloat16 is by XLA:CPU"
MERGED = "merged with an equal one"
JOINED = "joined end to end with others: as many bytes in all"
HARMLESS = (WIDENED, MERGED, JOINED)
ELIMINATED = "eliminated"
UNKNOWN = "not known why"
AS_ALL_REDUCE = "run as an all-reduce, of which each device keeps its part, as XLA:TPU does with small ones"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One row in which the ledger and the compiled program are not the same."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int  # the operand's size on one device
    written: int  # times a step
    compiled: int
    lines: tuple[str, ...]  # places in the source, 'train.py:197'
    reason: str

    @property
    def is_harmless(self) -> bool:
        """Whether the step does what is written all the same, and sends nothing more but what XLA:CPU widens."""
        return self.reason in HARMLESS

    def __str__(self):
        lines = ", ".join(line or "a line that is not known" for line in self.lines)
        return (
            f"{self.kind} over {' × '.join(self.axes)}, {self.bytes:,} bytes of {self.dtype} ({lines}): "
            f"written {self.written}, compiled {self.compiled} times a step: {self.reason}"
        )


def differences(ledger: Ledger, text: str) -> list[Difference]:
    """The collectives, by kind, axes, type and bytes, whose number in the compiled program is not the ledger's, each
    with the reason.

    Args:
      text: the optimized HLO module, `jax.stages.Compiled.as_text()`.
    """
    ours, theirs = ledger.costs.sites, compiled_sites(text, ledger.mesh)
    rows: list[Difference] = []

    def add(row: Collective, written: int, compiled: int, reason: str) -> None:
        both = {*(site for site, _ in ours), *(widened(site) for site, _ in ours), *(site for site, _ in theirs)}
        lines = tuple(sorted({site.line for site in both if _bare(site) == row}))
        rows.append(Difference(row.kind, row.axes, row.dtype, row.bytes, written, compiled, lines, reason))

    left, right = _times_of_places(ours), _times_of_places(theirs)
    if not any(row.dtype == "bfloat16" for row in right):
        for row in sorted(left):
            if row.dtype == "bfloat16":
                add(row, _sum(left[row]), _sum(left[row]), WIDENED)
        left = _times_of_places(ours, widened)
    for row in sorted(left.keys() | right.keys()):
        written, compiled = left[row], right[row]
        if _sum(written) != _sum(compiled):
            add(row, _sum(written), _sum(compiled), _reason(written, compiled, ledger))
    return _explained(rows, ledger.mesh)


def _explained(rows: list[Difference], mesh: dict[str, int]) -> list[Difference]:
    """The rows, with a reason on those that XLA only writes in another way: joined, or as an all-reduce."""
    reasons: dict[Difference, str] = {}
    for row in rows:
        same = [other for other in rows if (other.axes, other.dtype) == (row.axes, row.dtype)]
        joined = [other for other in same if other.kind == row.kind]
        if row.reason == UNKNOWN and sum(other.bytes * (other.written - other.compiled) for other in joined) == 0:
            reasons |= dict.fromkeys(joined, JOINED)
        devices = math.prod(mesh.get(axis, 1) for axis in row.axes)
        wholes = {"reduce-scatter": row.bytes, "all-gather": row.bytes / devices}  # what it may replace
        replaced = [other for other in same if other.compiled < other.written and wholes.get(other.kind) == other.bytes]
        fewer = sum(other.written - other.compiled for other in replaced)
        if row.kind == "all-reduce" and row.reason == UNKNOWN and fewer == row.compiled - row.written:
            reasons |= dict.fromkeys((row, *replaced), AS_ALL_REDUCE)
    return [dataclasses.replace(row, reason=reasons.get(row, row.reason)) for row in rows]


def _bare(row: Collective) -> Collective:
    return dataclasses.replace(row, phase="", line="")


def _times_of_places(sites: Sites, change=lambda row: row) -> dict[Collective, collections.Counter[int]]:
    """How often each place of a collective runs in a step, by collective."""
    places: dict[Collective, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for (row, times), count in sites.items():
        places[_bare(change(row))][times] += count
    return places


def _sum(places: collections.Counter[int]) -> int:
    return sum(times * count for times, count in places.items())


def _reason(written: collections.Counter[int], compiled: collections.Counter[int], ledger: Ledger) -> str:
    """Explains why XLA runs a collective more or less often than the source says.

    After a merge the remaining ones run as often as before; one taken out of a loop runs less often.
    """
    fewer = _sum(written) - _sum(compiled)
    if not compiled:
        return ELIMINATED
    if compiled <= written:
        return MERGED
    loops = [loop for loop in ledger.costs.loops if loop.length > 1 and fewer % (loop.length - 1) == 0]
    if fewer < 0 or not loops:
        return UNKNOWN
    places = sorted({f"{loop.line} (×{loop.length})" for loop in loops})
    return f"taken out of the loop at {' or '.join(places)}, or merged with an equal one"


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """The bytes that one device needs to run a program, its arguments included, by XLA; 0 where it does not say, as on
    a GPU of a program that was read from the disk (jax 0.11.2)."""
    analysis: Any = compiled.memory_analysis()
    (device, *_) = jax.tree.leaves(compiled.input_shardings)[0].device_set
    if device.platform != "cpu":  # there XLA's peak leaves out what it calls temporary (jax 0.10.2)
        return analysis.peak_memory_in_bytes
    together = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    return together - analysis.alias_size_in_bytes


def agreement(ledger: Ledger, compiled: jax.stages.Compiled) -> tuple[list[str], list[Difference]]:
    """Lines to print about the compiled step, and all differences.

    Harmless ones are folded into one line; of the others there is a warning with a line each.
    """
    rows = differences(ledger, compiled.as_text() or "")
    harmful = [str(row) for row in rows if not row.is_harmless]
    if harmful:
        lines = ["warning: the compiled step does not send what is written:", *(f"  {row}" for row in harmful)]
    else:
        lines = [f"The compiled step sends what is written: {_but_for(rows, sum(ledger.costs.collectives.values()))}."]
    ours, xlas = ledger.memory.bytes, peak_bytes(compiled)
    by_xla = f"XLA says {gigabytes(xlas)} (ratio {ours / xlas:.2f})" if xlas else "XLA does not say"
    lines.append(f"Memory of a device: forecast {gigabytes(ours)}, {by_xla}.")
    return lines, rows


def _but_for(rows: list[Difference], times: int) -> str:
    """How many collectives there are, and what is harmless in how they are compiled."""
    merged = sum(row.written - row.compiled for row in rows if row.reason == MERGED)
    joined = sum(max(row.written - row.compiled, 0) for row in rows if row.reason == JOINED)
    parts = [f"{merged} of them {MERGED}"] * (merged > 0)
    parts += [f"{joined} of them joined end to end with others"] * (joined > 0)
    widened = any(row.reason == WIDENED for row in rows)
    equal = "equal by kind, axes and number" if widened else "equal by kind, axes, type and bytes"
    return f"{times} collectives, {' and '.join(parts) or equal}" + f"; what is bfloat16 is {WIDENED}" * widened
