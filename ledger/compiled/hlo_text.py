"""Reads the text of an optimized HLO module: computations, instructions, and the source line of each."""

import collections
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ledger.count.program import declared_place, is_place


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str  # without layouts
    opcode: str  # without -start, -update and -done
    operands: list[str]  # names; of a parameter, its number instead
    attributes: str
    is_done: bool  # a later part of an asynchronous operation: it stands for the first part's result
    literal: str = ""  # a constant's value

    @property
    def is_counter(self) -> bool:
        """Whether it is a scalar that counts or chooses: a loop's index, its condition, an offset."""
        return re.fullmatch(r"(pred|[su]\d+)\[\]", self.shape) is not None


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""


@dataclass
class Module:
    name: str
    computations: dict[str, Computation]
    entry: str
    frames: dict[int, tuple[str, int, int]]  # stack frame -> file, line, parent frame (0: none)

    def callees(self, instruction: Instruction, *keys: str) -> Iterator[Computation]:
        """The computations that the attributes name under these keys, in order."""
        for key in keys:
            for match in re.finditer(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.attributes):
                for name in re.findall(r"%([\w.\-]+)", match[1]):
                    yield self.computations[name]

    def inner(self, instruction: Instruction) -> list[Instruction]:
        """The instructions in a fusion, or in another one with a body; the instruction itself where it has no body."""
        bodies = list(self.callees(instruction, "calls"))
        if not bodies:
            return [instruction]
        return [leaf for body in bodies for child in body.instructions.values() for leaf in self.inner(child)]

    def metadata(self, instruction: Instruction) -> tuple[str, str]:
        """Source (`train.py:120`) and JAX's name stack; of a fusion without, those of its last instruction with."""
        for candidate in (instruction, *reversed(self.inner(instruction))):
            if source := self._source(candidate.attributes):
                match = re.search(r'op_name="([^"]*)"', candidate.attributes)
                op_name = match[1] if match else ""
                return declared_place(op_name) or source, op_name
        return "", ""

    def _source(self, attributes: str) -> str:
        if match := re.search(r'source_file="([^"]*)" source_line=(\d+)', attributes):
            return f"{Path(match[1]).name}:{match[2]}"
        match = re.search(r"stack_frame_id=(\d+)", attributes)
        frame = innermost = int(match[1]) if match else 0
        while frame in self.frames and not is_place(self.frames[frame][0]):
            frame = self.frames[frame][2]
        file, line, _ = self.frames.get(frame) or self.frames.get(innermost) or ("", 0, 0)
        return f"{Path(file).name}:{line}" if file else ""


def parse(text: str) -> Module:
    """Reads the text of an HLO module, as `jax.stages.Compiled.as_text()` prints it.

    Raises:
        ValueError: if there is no ENTRY computation, or a line of a computation is no instruction; it is named.
    """
    tables: dict[str, dict[int, str]] = collections.defaultdict(dict)
    computations: dict[str, Computation] = {}
    entry, table, current = "", "", None
    for number, line in enumerate(text.splitlines(), 1):
        if current is not None and line.startswith(" "):
            instruction, is_root = _parse_instruction(line, number)
            current.instructions[instruction.name] = instruction
            if is_root:
                current.root = instruction.name
        elif match := re.match(r"(ENTRY )?%?([\w.\-]+) .*-> .*\{$", line):
            current = computations[match[2]] = Computation(match[2])
            entry = match[2] if match[1] else entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = line
        elif match := re.match(r"(\d+) (.*)", line):
            tables[table][int(match[1])] = match[2]
    if not entry:
        raise ValueError("HLO text without an ENTRY computation")
    for computation in computations.values():
        for done in [candidate for candidate in computation.instructions.values() if candidate.is_done]:
            start = computation.instructions[done.operands[0]]  # the start's own shape holds operands and contexts too
            computation.instructions[start.name] = replace(start, shape=done.shape)
    name = re.match(r"HloModule ([\w.\-]+)", text)
    return Module(name[1] if name else entry, computations, entry, _parse_frames(tables))


def _parse_frames(tables: dict[str, dict[int, str]]) -> dict[int, tuple[str, int, int]]:
    def numbers(row: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}

    rows = {number: numbers(row) for number, row in tables["StackFrames"].items()}
    # XLA of jax 0.10 prints the parent's number plus one, so that an outermost frame looks like its own parent.
    shift = 1 if any(row.get("parent_frame_id") == number for number, row in rows.items()) else 0
    frames = {}
    for number, row in rows.items():
        location = numbers(tables["FileLocations"][row["file_location_id"]])
        file = tables["FileNames"][location["file_name_id"]].strip('"')
        frames[number] = (file, location["line"], row.get("parent_frame_id", shift) - shift)
    return frames


def _parse_instruction(line: str, number: int) -> tuple[Instruction, bool]:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    # An opcode is the first word that is followed by a parenthesis: inside a shape, none stands after a blank.
    opcode = re.compile(r" ([a-z][a-z0-9\-]*)\(").search(line, head.end() - 1) if head else None
    if head is None or opcode is None:
        raise ValueError(f"HLO text, line {number}: expected an instruction, got {line.strip()[:80]!r}")
    shape = re.sub(r"/\*.*?\*/|(?<=\])\{[^}]*\}", "", line[head.end() : opcode.start()])
    depth, end = 1, opcode.end()
    while depth and end < len(line):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    arguments, attributes = line[opcode.end() : end - 1], line[end:]
    operands = [arguments] if opcode[1] == "parameter" else re.findall(r"%([\w.\-]+)", arguments)
    base = re.sub(r"-(start|update|done)$", "", opcode[1])
    if opcode[1] in ("call-start", "call-done"):  # XLA:TPU writes the work of its SparseCores so
        base = "async"
    is_done = opcode[1].endswith(("-update", "-done"))
    literal = arguments if base == "constant" else ""
    return Instruction(head[2], shape, base, operands, attributes, is_done, literal), head[1] is not None
