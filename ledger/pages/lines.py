"""Collects what each line of the source costs on one device in a step, for the pages."""

import collections
import dataclasses
import itertools

from ledger.count.step import Ledger

MANY_AXES = 6  # sets of mesh axes with a colour of their own


@dataclasses.dataclass
class Line:
    """The costs of a line on one device in a step; each sum is under the class that colours it."""

    flops: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by phase
    sent: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by mesh axes
    sent_in: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by phase
    kept: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by why
    runs: int = 0  # in a step, without the backward pass

    def add(self, what: str, name: str, value: float, runs: int) -> None:
        getattr(self, what)[name] += value
        self.runs = max(self.runs, runs)

    def total(self, what: str) -> float:
        return sum(getattr(self, what).values())


def sums(ledger: Ledger) -> dict[str, Line]:
    """The costs of each line that has any, by its place, 'train.py:197'."""
    axes = axes_of(ledger)
    lines: dict[str, Line] = collections.defaultdict(Line)
    for row, times in ledger.costs.products.items():
        lines[row.line].add("flops", row.phase, row.flops * times, times * (row.phase != "backward"))
    for op, times in ledger.costs.collectives.items():
        sent = op.sent_bytes(ledger.mesh) * times
        lines[op.line].add("sent", axes[op.axes], sent, times * (op.phase != "backward"))
        lines[op.line].add("sent_in", op.phase, sent, 0)
    for kept in ledger.saved:
        why = {"": "unasked", "input": "input", "gradient": "gradient"}.get(kept.why, "asked")
        lines[kept.line].add("kept", why, kept.bytes * kept.times, kept.times)
    return dict(lines)


def all_lines(lines: dict[str, Line]) -> Line:
    """The sum of all."""
    whole = Line()
    for line, what in itertools.product(lines.values(), ("flops", "sent", "kept")):
        getattr(whole, what).update(getattr(line, what))
    return whole


def axes_of(ledger: Ledger) -> dict[tuple[str, ...], str]:
    """The class of each set of mesh axes that anything is sent over: axes0, axes1, ..."""
    place = {axis: number for number, axis in enumerate(ledger.mesh)}
    used = {row.axes for row in ledger.costs.collectives}
    order = sorted(used, key=lambda axes: (len(axes), [place[axis] for axis in axes]))
    return {axes: f"axes{min(number, MANY_AXES - 1)}" for number, axes in enumerate(order)}
