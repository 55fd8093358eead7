"""The step as one device runs it: operations with their source line and phase, loops with their lengths, calls written
out.

    step = read(jax.jit(typed_shard_map(f)).trace(*shapes).jaxpr)
    for op, times in step.runs():
        print(op.line, op.phase, op.name, times)                  # train.py:197 forward dot_general 8

All other modules of the ledger go by this: what JAX has traced is read once, here. A value is what one device holds;
nothing runs.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from shardlib.places import is_users

PHASES = ("forward", "recomputed", "backward", "update")
# Frames in these files are wrappers; the line to report is their caller's.
_REPOSITORY = Path(__file__).absolute().parents[2]
_INNER = tuple(str(_REPOSITORY / name) for name in ("kernels", "jax_extra.py"))
# A scope 'w_q=llama.py:66' says that another line is the place: of a family's table, from which a gather is derived.
_TAKEN = re.compile(r"(?<![\w.])taken=(\d+):(\d+)")
_DECLARED = re.compile(r"=(\w+\.py:\d+)(?![\w.])")


@functools.cache
def is_place(file_name: str) -> bool:
    """Whether what a frame of this file does counts at its line."""
    return is_users(file_name) and not file_name.startswith(_INNER)


def declared_place(scopes: str) -> str:
    """The place that the innermost such scope gives; '' without one.

    >>> declared_place("jvp(layers)/w_q=llama.py:66")
    'llama.py:66'
    """
    return (_DECLARED.findall(scopes) or [""])[-1]


@dataclass(eq=False)
class Value:
    """An array on one device. One without a maker is an argument of its block, or a constant."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    maker: "Operation | None" = None
    literal: bool = False
    on_host: bool = False  # in the host's memory: no bytes of a device
    uses: list["Operation"] = field(default_factory=list)  # those of its own block


@dataclass(eq=False)
class Operation:
    """One of JAX's primitives. `blocks`: the body of a scan, condition and body of a while loop, branches of a cond."""

    name: str
    params: dict
    inputs: list[Value]
    outputs: list[Value]
    phase: str  # forward, recomputed, backward: of what is differentiated; update: the rest of the step
    scopes: str  # JAX's name stack, those of the enclosing loops included
    line: str  # in the user's program, 'train.py:197'; '' if unknown
    blocks: list["Block"] = field(default_factory=list)
    within: str = "update"  # the phase of the loop or branch in whose block it is

    @property
    def length(self) -> int:
        """How many turns it has."""
        return self.params["length"] if self.name == "scan" else 1

    @property
    def turns(self) -> int:
        """How often its blocks run. Under `jax.named_scope('taken=1:8')` one of a loop's eight turns runs."""
        taken, out_of = (_TAKEN.findall(self.scopes) or [(1, 1)])[-1]
        return self.length * int(taken) // int(out_of) if self.name == "scan" else 1


@dataclass(eq=False)
class Block:
    """Straight code: a step, the body of a loop, a branch."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value]
    files: dict[str, Path] = field(default_factory=dict)  # by name, all files with lines of the step

    def runs(self, times: int = 1) -> Iterator[tuple[Operation, int]]:
        """Every operation, those of its loops too, with how often it runs. All branches of a cond count."""
        for op in self.operations:
            yield op, times
            for block in op.blocks:
                yield from block.runs(times * op.turns)


def read(jaxpr: Jaxpr | ClosedJaxpr, *, widened: bool = False, has_bfloat16: bool = True) -> Block:
    """Reads a traced step. What no result depends on is left out, as XLA leaves it out.

    An operation's place is the innermost line of the user's program that led to it, or the one that a scope declares.
    Lines of shardlib, JAX, kernels/ and jax_extra.py are no places.

    Args:
      jaxpr: of the jitted step, `jax.jit(step).trace(...).jaxpr`.
      widened: each bfloat16 value that no product reads is a float32, as XLA:CPU computes.
      has_bfloat16: the cores have instructions for bfloat16; without them `widened` is of operands of products too.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    reader = _Reader(widened, has_bfloat16)
    # jax 0.11 says for each argument where it is to be before the one shard_map; a step's arguments are there.
    placed = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "reshard"}
    mapped = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "reshard"]
    operands = [placed.get(var, var) if isinstance(var, Var) else None for var in mapped[0].invars] if mapped else []
    if [eqn.primitive.name for eqn in mapped] == ["shard_map"] and set(jaxpr.invars) <= set(operands):
        block = reader.block(_bodies(mapped[0].params)[0], "", "")
        # Besides the step's arguments go in constants, such as a table of a kernel's blocks.
        block.inputs = [block.inputs[operands.index(var)] for var in jaxpr.invars]
    else:
        block = reader.block(jaxpr, "", "")
    operations = [op for op, _ in block.runs()]
    if all(op.phase == "update" for op in operations):  # nothing is differentiated, as in a validation step
        for op in operations:
            op.phase = "forward"
    _place_hoisted(block)
    block.files = {file.name: file for file in map(Path, reader.files)}
    return block


def _place_hoisted(block: Block) -> None:
    """Operations that JAX takes out of a loop of the forward pass are forward where only that pass reads them."""
    results = set(block.outputs)
    for op in reversed(block.operations):
        readers = [reader for value in op.outputs for reader in value.uses]
        if op.phase == "update" and readers and results.isdisjoint(op.outputs):
            op.phase = "forward" if all(reader.phase == "forward" for reader in readers) else "update"
        for inner in op.blocks:
            _place_hoisted(inner)


# Kernels: what they do inside is not JAX's to know.
OPAQUE = ("pallas_call", "custom_call", "ffi_call")


class _Reader:
    def __init__(self, widened: bool, has_bfloat16: bool):
        self.widened, self.keeps_operands = widened, widened and has_bfloat16
        self.files: dict[str, None] = {}  # files that frames are in

    def block(self, jaxpr: Jaxpr, scopes: str, line: str) -> Block:
        operations: list[Operation] = []
        inputs = [self.value(var) for var in jaxpr.invars]
        outputs = self.write_out(jaxpr, inputs, operations, scopes, line, "")
        for op in operations:
            op.within = phase_of(scopes)
        return _without_dead_code(Block(inputs, operations, outputs))

    def write_out(self, jaxpr, inputs, operations, scopes, outer_line, fixed_line) -> list[Value]:
        """Appends the operations of a jaxpr that is called with `inputs`; returns its results."""
        known: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def look_up(atom) -> Value:
            if isinstance(atom, Literal):
                return self.value(atom, literal=True)
            return known.setdefault(atom, self.value(atom)) if atom in jaxpr.constvars else known[atom]

        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            # A body's name stack starts anew, and the body of a custom_jvp has no frame of the user's: join the one,
            # inherit the other.
            inner_scopes = f"{scopes}/{eqn.source_info.name_stack}"
            line = fixed_line or declared_place(inner_scopes) or self.line(eqn) or outer_line
            operands = [look_up(atom) for atom in eqn.invars]
            called = _called(eqn)
            if called is not None:
                # Marks: into a checkpoint goes what it was asked to keep, and inside a shard_map arrays are a device's
                # parts.
                mark = {"remat": "checkpoint", "remat2": "checkpoint"}.get(name, name)
                if mark in ("checkpoint", "shard_map"):
                    op = Operation(mark, {}, operands, [], phase_of(inner_scopes), inner_scopes, line)
                    operands = self.results(op, called.invars, operations)
                # JAX's own jitted functions are traced once, with the lines of their first caller.
                is_jax = not is_users(called.debug_info.func_filename or "<")
                fixed = line if name in ("jit", "pjit") and is_jax else fixed_line
                results = self.write_out(called, operands, operations, inner_scopes, line, fixed)
            else:
                op = Operation(name, params, operands, [], phase_of(inner_scopes), inner_scopes, line)
                bodies = [] if name in OPAQUE else _bodies(params)
                op.blocks = [self.block(inner, inner_scopes, line) for inner in bodies]
                for operand, atom in zip(operands, eqn.invars):
                    if self.keeps_operands and name == "dot_general" and atom.aval.dtype == jnp.bfloat16:
                        operand.dtype, operand.bytes = "bfloat16", 2 * atom.aval.size
                results = self.results(op, eqn.outvars, operations)
            known.update(zip(eqn.outvars, results, strict=True))
        return [look_up(atom) for atom in jaxpr.outvars]

    def value(self, var, maker: Operation | None = None, literal: bool = False) -> Value:
        shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
        if dtype is None:
            return Value(shape, "", 0, maker, literal)
        dtype = jnp.dtype("float32") if self.widened and dtype.name == "bfloat16" else dtype
        memory = getattr(getattr(var.aval, "memory_space", None), "name", "")
        on_host = memory == "Host" and not self.widened  # a CPU has but one memory
        return Value(shape, dtype.name, 0 if on_host else var.aval.size * dtype.itemsize, maker, literal, on_host)

    def results(self, op: Operation, variables, operations: list[Operation]) -> list[Value]:
        op.outputs = [self.value(var, op) for var in variables]
        for value in op.inputs:
            value.uses.append(op)
        operations.append(op)
        return op.outputs

    def line(self, eqn: JaxprEqn) -> str:
        """The innermost line that is a place; '' without one."""
        traceback: Any = eqn.source_info.traceback
        frames = [frame for frame in traceback.frames if is_place(frame.file_name)] if traceback else []
        self.files |= dict.fromkeys(frame.file_name for frame in frames)
        return f"{Path(frames[0].file_name).name}:{frames[0].line_num}" if frames else ""


def _bodies(params: dict) -> list[Jaxpr]:
    values = [part for value in params.values() for part in (value if isinstance(value, tuple | list) else (value,))]
    values = [value.jaxpr if isinstance(value, ClosedJaxpr) else value for value in values]
    return [value for value in values if isinstance(value, Jaxpr)]


def _called(eqn: JaxprEqn) -> Jaxpr | None:
    """The function that an equation just calls: jit, shard_map, checkpoint, custom_jvp, custom_vjp."""
    bodies = [] if eqn.primitive.name in ("scan", "while", "cond", *OPAQUE) else _bodies(eqn.params)
    if len(bodies) != 1:
        return None
    same = len(bodies[0].invars) == len(eqn.invars) and len(bodies[0].outvars) == len(eqn.outvars)
    return bodies[0] if same else None


def phase_of(scopes: str) -> str:
    """The phase by JAX's name stack; of what JAX does not differentiate, by a scope of that name around it."""
    marks = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
    marks |= {"/forward": "forward", "/backward": "backward"}
    return next((phase for mark, phase in marks.items() if mark in scopes), "update")


def _without_dead_code(block: Block) -> Block:
    needed, kept = set(block.outputs), []
    for op in reversed(block.operations):
        if not op.outputs or not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    block.operations, alive = kept[::-1], set(kept)
    for value in [*block.inputs, *(operand for op in kept for operand in (*op.inputs, *op.outputs))]:
        value.uses = [op for op in value.uses if op in alive]
    return block
