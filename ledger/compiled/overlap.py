"""Reads from a compiled program's schedule what runs while it sends: for each collective, the matrix products that run
between its start and its end, or that it stands alone.

    for each in overlaps(compiled.as_text()):
        print(each)        # all-gather of train.py:250 (forward), 8.39 MB, ×8: while train.py:248 multiplies
"""

import dataclasses
import re

from ledger.compiled.collectives import chain, operands, turns
from ledger.compiled.hlo_text import Computation, Instruction, Module, parse
from ledger.count.costs import KINDS
from ledger.count.program import phase_of
from ledger.units import gigabytes

# Opcodes that do nothing by themselves.
_NOTHING = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "partition-id", "replica-id"}
_PREPARES = 'custom_call_target="PrepareAsyncCall'  # XLA:TPU puts one before and after what runs meanwhile
_LIBRARY = re.compile(r'custom_call_target="__(cublas|cudnn)')


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of the compiled program; several that XLA combined count as one."""

    kind: str  # HLO's word
    lines: tuple[str, ...]  # in the source, of all collectives that were combined
    phase: str
    bytes: int  # its operands' size on one device
    times: int  # in a step
    products: tuple[str, ...]  # lines of the matrix products that run meanwhile
    others: int  # other operations that run meanwhile

    @property
    def stands_alone(self) -> bool:
        return not self.products and not self.others

    def __str__(self):
        if self.products:
            meanwhile = f"while {', '.join(self.products)} multipl{'ies' if len(self.products) == 1 else 'y'}"
        elif self.others:
            meanwhile = f"beside {self.others} operation{'s' if self.others > 1 else ''}, no matrix product"
        else:
            meanwhile = "alone"
        lines = ", ".join(self.lines) or "a line that is not known"
        return f"{self.kind} of {lines} ({self.phase}), {gigabytes(self.bytes)}, ×{self.times}: {meanwhile}"


def overlaps(text: str) -> list[Sent]:
    """All collectives, those that send most first.

    Args:
      text: the scheduled HLO module, `jax.stages.Compiled.as_text()`, whose instructions stand in the order in which
        they run.
    """
    module = parse(text)
    rows = _rows(module, module.computations[module.entry], 1)
    return sorted(rows, key=lambda row: -row.bytes * row.times)


def _rows(module: Module, computation: Computation, times: int) -> list[Sent]:
    rows, order = [], list(computation.instructions.values())
    parts_of: dict[str, int] = {}  # the row of a collective that is cut into several
    for place, instruction in enumerate(order):
        if instruction.is_done:
            continue
        sending = _sending(module, computation, instruction)
        if sending is None:
            inner_times = times * (turns(module, instruction) if instruction.opcode == "while" else 1)
            for body in module.callees(instruction, "calls", "to_apply", "body", "branch_computations"):
                rows += _rows(module, body, inner_times)
            continue
        inner, where = sending
        meanwhile = [other for other in order[place + 1 : _end(order, place)] if _works(other)]
        if where is not computation and instruction.opcode == "fusion":  # sends and computes in one
            meanwhile += [other for other in where.instructions.values() if other is not inner and _works(other)]
        products = [other for other in meanwhile if _is_product(module, other)]
        parts = operands(module, where, inner)
        places = [place for _, _, place in parts if place[0]] or [module.metadata(instruction)]
        row = Sent(
            kind=inner.opcode,
            lines=tuple(dict.fromkeys(line for line, _ in places if line)),
            phase=phase_of(places[0][1]),
            bytes=sum(size for _, size, _ in parts),
            times=times,
            products=tuple(dict.fromkeys(module.metadata(product)[0] or "a product" for product in products)),
            others=len(meanwhile) - len(products),
        )
        if (link := chain(inner)) in parts_of:
            before = rows[parts_of[link]]
            both = tuple(dict.fromkeys(before.products + row.products))
            rows[parts_of[link]] = dataclasses.replace(before, products=both, others=before.others + row.others)
            continue
        if link:
            parts_of[link] = len(rows)
        rows.append(row)
    return rows


def _sending(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[Instruction, Computation] | None:
    """The collective that an instruction is, or that it wraps, and the computation in which that stands."""
    if instruction.opcode in KINDS.values():
        return instruction, computation
    if instruction.opcode in ("async", "fusion"):
        for body in module.callees(instruction, "calls", "to_apply"):
            for inner in body.instructions.values():
                if (sent := _sending(module, body, inner)) is not None:
                    return sent
    return None


def _end(order: list[Instruction], start: int) -> int:
    """Where the asynchronous instruction at `start` is done; a synchronous one is at once."""
    for place in range(start + 1, len(order)):
        if order[place].is_done and order[place].operands[0] == order[start].name:
            return place
    return start


def _works(instruction: Instruction) -> bool:
    does = instruction.opcode not in _NOTHING and _PREPARES not in instruction.attributes
    return does and not instruction.is_done and instruction.opcode not in KINDS.values()


def _is_product(module: Module, instruction: Instruction) -> bool:
    if _LIBRARY.search(instruction.attributes) or instruction.opcode == "while":
        return bool(_LIBRARY.search(instruction.attributes))
    return any(leaf.opcode in ("dot", "convolution") for leaf in module.inner(instruction))
