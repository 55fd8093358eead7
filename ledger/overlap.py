"""What a compiled program does while it sends, by its schedule: for each collective, the matrix products that run
between its start and its end, or that it stands alone.

    for each in overlaps(compiled.as_text()):
        print(each)        # all-gather of train.py:250 (forward), 8.39 MB, ×8: while train.py:248 multiplies
"""

import dataclasses
import re

from ledger.collectives import operands, turns
from ledger.costs import KINDS
from ledger.hlo_text import Computation, Instruction, Module, parse
from ledger.program import phase_of

# Instructions that do nothing by themselves.
_NOTHING = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "partition-id", "replica-id"}
_PRODUCT = re.compile(r'custom_call_target="(__cublas|__cudnn)')


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of the compiled program; one that XLA combined of several is one."""

    kind: str  # HLO's word
    lines: tuple[str, ...]  # of the source, of all that were combined
    phase: str
    bytes: int  # of its operands on one device
    times: int  # in a step
    products: tuple[str, ...]  # lines of the matrix products that run meanwhile
    others: int  # how many other operations do

    @property
    def stands_alone(self) -> bool:
        return not self.products and not self.others

    def __str__(self):
        if self.products:
            meanwhile = f"while {', '.join(self.products)} multipl{'ies' if len(self.products) == 1 else 'y'}"
        elif self.others:
            meanwhile = f"beside {self.others} operation{'s' if self.others > 1 else ''} without a matrix product"
        else:
            meanwhile = "alone: nothing is computed meanwhile"
        lines = ", ".join(self.lines) or "a line that is not known"
        return f"{self.kind} of {lines} ({self.phase}), {self.bytes / 1e6:,.2f} MB, ×{self.times}: {meanwhile}"


def overlaps(text: str) -> list[Sent]:
    """All collectives over more than one device, those that send most first.

    Args:
      text: the scheduled HLO module, `jax.stages.Compiled.as_text()`: its instructions stand in the order in which they
        run.
    """
    module = parse(text)
    rows = _of(module, module.computations[module.entry], 1)
    return sorted(rows, key=lambda row: (-row.bytes * row.times, row))if False else sorted(
        rows, key=lambda row: -row.bytes * row.times
    )


def _of(module: Module, computation: Computation, times: int) -> list[Sent]:
    rows = []
    order = list(computation.instructions.values())
    for place, instruction in enumerate(order):
        if instruction.is_done:
            continue
        if (sending := _sending(module, instruction)) is not None:
            inner, where = sending
            parts = [(line, stack) for _, _, (line, stack) in operands(module, where, inner)]
            if not any(line for line, _ in parts):
                parts = [module.metadata(instruction)]
            meanwhile = order[place + 1 : _end(order, place)]
            rows.append(
                Sent(
                    kind=inner.opcode,
                    lines=tuple(dict.fromkeys(line for line, _ in parts if line)),
                    phase=phase_of(parts[0][1]),
                    bytes=sum(size for _, size, _ in operands(module, where, inner)),
                    times=times,
                    products=tuple(
                        dict.fromkeys(module.metadata(each)[0] or "?" for each in meanwhile if _is_product(module, each))
                    ),
                    others=sum(1 for each in meanwhile if _works(module, each)),
                )
            )
            continue
        for body in module.callees(instruction, "calls", "to_apply", "body", "branch_computations"):
            turns_of = turns(module, instruction) if instruction.opcode == "while" else 1
            rows += _of(module, body, times * turns_of)
    return rows


def _sending(module: Module, instruction: Instruction) -> tuple[Instruction, Computation] | None:
    """The collective that an instruction is, or starts, and the computation that it stands in."""
