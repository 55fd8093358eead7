"""Holds a ledger against the program that XLA made of its step: what is sent, and the memory.

compiled = traced.lower().compile()
for row in differences(ledger, compiled.as_text()):
    print(row)                                  # nothing, where XLA does as it is told
lines, agrees = report(ledger, compiled)        # ["The compiled step sends what is written: ...", ...], True
"""

import collections
import dataclasses
import math

import jax

from ledger.collectives import compiled as compiled_collectives
from ledger.collectives import widened
from ledger.costs import Table, totals
from ledger.page import gigabytes
from ledger.step import Ledger

WIDENED = "sent as float32, twice the bytes, as all bfloat16 is by XLA:CPU"
FEWER = "eliminated, or merged with an equal one"
MORE = "not known why"
JOINED = "joined end to end with others: as many bytes in all"
AS_ALL_REDUCE = "run as an all-reduce, of which each device keeps its part, as XLA:TPU does with small ones"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One row in which the ledger and the compiled program are not the same."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int  # of the operand on one device
    written: int  # times a step
    compiled: int
    lines: tuple[str, ...]  # of the source, 'train.py:197'
    reason: str

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
    ours, theirs = ledger.costs.collectives, compiled_collectives(text, ledger.mesh)
    rows: list[Difference] = []

    def add(row, written: int, compiled: int, reason: str) -> None:
        both = (*ours, *widened(ours), *theirs)
        lines = tuple(sorted({each.line for each in both if dataclasses.replace(each, phase="", line="") == row}))
        rows.append(Difference(row.kind, row.axes, row.dtype, row.bytes, written, compiled, lines, reason))

    narrow = _without_phases(ours)
    if not any(row.dtype == "bfloat16" for row in theirs):
        for row in sorted(narrow):
            if row.dtype == "bfloat16":
                add(row, narrow[row], 0, WIDENED)
        ours = widened(ours)
    left, right = _without_phases(ours), _without_phases(theirs)
    for row in sorted(left.keys() | right.keys()):
        if left[row] != right[row]:
            add(row, left[row], right[row], _reason(left[row], right[row], ledger))
    return _explained(rows, ledger.mesh)


def _explained(rows: list[Difference], mesh: dict[str, int]) -> list[Difference]:
    """The same rows; those that are one thing done in another way say so."""
    reasons: dict[Difference, str] = {}
    for row in rows:
        same = [other for other in rows if (other.axes, other.dtype) == (row.axes, row.dtype)]
        joined = [other for other in same if other.kind == row.kind]
        if row.reason == MORE and sum(other.bytes * (other.written - other.compiled) for other in joined) == 0:
            reasons |= dict.fromkeys(joined, JOINED)
        devices = math.prod(mesh.get(axis, 1) for axis in row.axes)
        wholes = {"reduce-scatter": row.bytes, "all-gather": row.bytes / devices}  # of which it may stand in the place
        replaced = [other for other in same if other.compiled < other.written and wholes.get(other.kind) == other.bytes]
        fewer = sum(other.written - other.compiled for other in replaced)
        if row.kind == "all-reduce" and row.reason == MORE and fewer == row.compiled - row.written:
            reasons |= dict.fromkeys((row, *replaced), AS_ALL_REDUCE)
    return [dataclasses.replace(row, reason=reasons.get(row, row.reason)) for row in rows]


def _without_phases(table: Table) -> Table:
    bare: Table = collections.Counter()
    for row, times in totals(table).items():
        bare[dataclasses.replace(row, phase="")] += times
    return bare


def _reason(written: int, compiled: int, ledger: Ledger) -> str:
    if compiled > written:
        return MORE
    loops = [loop for loop in ledger.costs.loops if loop.length > 1 and (written - compiled) % (loop.length - 1) == 0]
    if compiled == 0 or not loops:
        return FEWER
    places = sorted({f"{loop.line} (×{loop.length})" for loop in loops})
    return f"taken out of the loop at {' or '.join(places)}, or merged with an equal one"


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """What XLA says that one device needs to run a program, its arguments included."""
    analysis = compiled.memory_analysis()
    (device, *_) = jax.tree.leaves(compiled.input_shardings)[0].device_set
    if device.platform != "cpu":  # there XLA's peak leaves out what it calls temporary (jax 0.10.2)
        return analysis.peak_memory_in_bytes
    together = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    return together - analysis.alias_size_in_bytes


def report(ledger: Ledger, compiled: jax.stages.Compiled) -> tuple[list[str], bool]:
    """Lines to print about the compiled step, and whether it sends what is written, but for what XLA:CPU widens."""
    rows = differences(ledger, compiled.as_text())
    others = [row for row in rows if row.reason != WIDENED]
    times = sum(ledger.costs.collectives.values())
    if others:
        lines = ["warning: the compiled step does not send what is written:", *(f"  {row}" for row in rows)]
    else:
        but = f"; what is bfloat16 is {WIDENED}" if rows else ""
        lines = [
            f"The compiled step sends what is written: {times} collectives, equal by kind, axes, type and bytes{but}."
        ]
    ours, xlas = ledger.memory.bytes, peak_bytes(compiled)
    texts = gigabytes(ours), gigabytes(xlas)
    lines.append(f"Memory of a device: forecast {texts[0]}, XLA says {texts[1]} (ratio {ours / xlas:.2f}).")
    return lines, not others
