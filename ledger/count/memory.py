"""The forecast of a device's memory: which values are alive when most bytes are, found by following each from where it
is made to its last use.

    peak = forecast(read(traced.jaxpr), groups, donated)    # groups: what each argument is, 'weights' or 'batch', say
    peak.bytes, peak.by_kind()["saved activations"], peak.held[0].line

A model of what XLA does, kept simple:

- Values that operations pass on element by element are computed where they are needed and take no memory (XLA fuses
  them). Memory is taken by results of matrix products, collectives, reductions, scatters and loops, by what goes into
  these (reductions read through), and by results of the step.
- A value lives from the operation that makes it to the last one that reads it. One that is computed from a value of
  the same size that ends there takes its place; so does what a loop carries, and a result of the step that of a
  donated argument.
- A loop holds its arguments and all its results, and on top what its body holds at most.
- A product's result that is only needed in a wider type is written in that type.
- Products whose result goes into a reduce-scatter, the gradients of gathered weights, are put off to the end of the
  layer: they run while others' are sent. What they read stays until then. On a CPU that is so of all products of the
  backward pass: XLA:CPU orders breadth first, so that many operations can run at once, and what the products of a layer
  read is computed before they are.

By the same model it counts what is moved to and from memory: what takes memory is written once, and read once by each
operation that needs it there; results of a step, or of a turn of a loop, are computed together and read what they share
once. A gather, a slice or a scatter counts only the rows that it touches. Nothing stays in a cache.
"""

import collections
import dataclasses
import sys

from ledger.count.costs import KINDS, crosses_to_host, origin, read_in_backward
from ledger.count.program import OPAQUE, Block, Operation, Value
from shardlib.proof.jaxprs import scan_counts

WEIGHTS, OPTIMIZER, BATCH = "weights", "optimizer state", "batch"
GRADIENTS, SAVED, GATHERED, OTHER = "gradients", "saved activations", "gathered weights", "other values"
GROUPS = (WEIGHTS, OPTIMIZER, BATCH, GRADIENTS, SAVED, GATHERED, OTHER)

# Operations whose result is their operand under another name.
_SAME = {"reshape", "squeeze", "transpose", "expand_dims", "copy", "name", "reduce_precision", "stop_gradient"}
_SAME |= {"optimization_barrier", "layout_constraint", "checkpoint", "shard_map", "pvary"}
_CONVERTS = _SAME | {"convert_element_type"}
_LOOPS = {"scan", "while", "cond"}
# Operations whose operands have to lie in memory.
_READ = set("dot_general conv_general_dilated sort top_k cumsum cumlogsumexp cummax dynamic_update_slice".split())
_READ |= {*KINDS, *_LOOPS, *OPAQUE}
# Operations that read as much of their first operand as their result has.
_PARTS = {"gather", "slice", "dynamic_slice"}
# Operations that XLA:CPU does not compute together with a reduction of their result.
_APART_ON_CPU = {"select_n", "reduce_precision"}
# Operations whose result may take the place of an operand that ends there.
_IN_PLACE = {"psum", "pmax", "pmin", "dynamic_update_slice"}


@dataclasses.dataclass(frozen=True)
class Held:
    """One value in memory: what it counts as, the line that made it, its bytes on a device."""

    kind: str  # one of GROUPS
    line: str  # '' for the step's arguments
    phase: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclasses.dataclass
class Memory:
    """The moment at which most is held, and all that is held then; and the largest values of the whole step."""

    line: str  # the line of the operation that runs then
    phase: str
    held: list[Held]  # largest first
    largest: list[Held]  # besides arguments, whether or not they are alive then
    moved: collections.Counter[tuple[str, str]]  # bytes read and written in the step, by line and phase

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.held)

    def moved_bytes(self, *phases: str) -> int:
        """Read and written in these phases or in all."""
        return sum(moved for (_, phase), moved in self.moved.items() if not phases or phase in phases)

    def by_kind(self) -> dict[str, int]:
        sums = dict.fromkeys(GROUPS, 0)
        for array in self.held:
            sums[array.kind] += array.bytes
        return sums


def forecast(block: Block, groups: list[str], donated: list[bool], *, on_cpu: bool = False) -> Memory:
    """Follows the values of a step.

    Args:
      block: the step, `read(jaxpr)`.
      groups: of each of its arguments, what it is: 'weights', 'optimizer state' or 'batch'.
      donated: of each of its arguments, whether a result may take its place.
      on_cpu: XLA:CPU orders the operations.
    """
    arguments = [_held(value, group) for group, value in zip(groups, block.inputs, strict=True)]
    places = collections.Counter((value.shape, value.dtype) for value, free in zip(block.inputs, donated) if free)
    placed = set()
    for value in block.outputs:
        if places[value.shape, value.dtype]:
            places[value.shape, value.dtype] -= 1
            placed.add(value)
    weights = {(held.shape, held.dtype) for held in arguments if held.kind == WEIGHTS}
    step = _Lifetimes(block, groups, weights, on_cpu, placed)
    held = sorted([*arguments, *step.held], key=lambda array: -array.bytes)
    largest = sorted(step.seen, key=lambda array: -array.bytes)
    return Memory(step.line, step.phase, held, largest, step.moved)


class _Lifetimes:
    """From when to when each value of a block is in memory, and what the block holds besides its arguments when it
    holds most.

    Times are positions in the block; the end is one more. `placed` are results that take the place of an argument;
    `slices` those arguments that are parts of a larger array, so that they need memory of their own where they have to
    lie there by themselves.
    """

    def __init__(
        self, block: Block, kinds: list[str], weights: set, on_cpu: bool, placed=frozenset(), slices=frozenset()
    ):
        self.kinds, self.weights, self.slices = dict(zip(block.inputs, kinds, strict=True)), weights, slices
        self.on_cpu = on_cpu
        self.results = set(block.outputs)
        self.born: dict[Value, int] = {}
        self.last: dict[Value, int] = {}
        self.copies: dict[Value, tuple[int, int]] = {}  # from when to when, of what is made for a reduction
        self.heirs: list[tuple[Value, list[Value]]] = []  # values with those whose place they may take
        self.moved: collections.Counter[tuple[str, str]] = collections.Counter()
        self.held: list[Held]
        self.seen: list[Held]
        bodies: dict[int, _Lifetimes] = {}
        for now, op in enumerate(block.operations):
            if op.name in _READ or op.name.startswith("scatter") or crosses_to_host(op):
                for value in op.inputs:
                    self.compute([value])
                    self.lay_down(value, now)
            elif op.name.startswith(("reduce_", "arg")) and op.name not in _SAME:
                self.read(op.inputs, now)
                if on_cpu:
                    self.copy(op.inputs, now)
            else:
                continue  # computed where it is needed
            self.moved[op.line, op.phase] += self.touched(op)
            for index, value in enumerate(map(self.written_as, op.outputs)):
                self.born[value] = self.last[value] = now
                before = op.inputs
                if op.name == "scan":  # what it carries, but not what it stacks
                    first, carry = scan_counts(op.params)
                    before = before[first + index : first + index + 1] if index < carry else []
                if op.name in _IN_PLACE or op.name in _LOOPS or op.name.startswith("scatter"):
                    self.heirs.append((value, list(map(self.origin, before))))
            if op.name in _LOOPS:
                bodies[now] = max((self.body(op, block) for block in op.blocks), key=lambda body: body.bytes)
                for place, moved in bodies[now].moved.items():
                    self.moved[place] += moved * op.turns
        end = len(block.operations)
        self.compute(block.outputs)
        for op in block.operations:
            if op.name == "dot_general" and op.phase == "backward" and (on_cpu or _is_reduced(op.outputs[0])):
                self.read(op.inputs, end)
        for value in block.outputs:
            self.lay_down(value, end, placed=value in placed)
        for heir, ended in self.heirs:
            for value in ended:
                if self.last.get(value) == self.born[heir] and value in self.born and value.bytes == heir.bytes:
                    self.last[value] -= 1
                    break
        self.seen = [array for body in bodies.values() for array in body.seen]
        self.seen += [self.describe(value) for value in self.born]
        moments = {now: self.alive(now) + (bodies[now].held if now in bodies else []) for now in self.born.values()}
        at = max(moments, key=lambda now: sum(array.bytes for array in moments[now]), default=end)
        self.held = moments.get(at, [])
        self.line, self.phase = (block.operations[at].line, block.operations[at].phase) if at < end else ("", "update")
        if at in bodies and bodies[at].line:
            self.line, self.phase = bodies[at].line, bodies[at].phase

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.held)

    def body(self, op: Operation, block: Block) -> "_Lifetimes":
        """The values that the body of a loop holds besides those of the loop."""
        if op.name != "scan":
            return _Lifetimes(block, [OTHER] * len(block.inputs), self.weights, self.on_cpu)
        consts, carry = scan_counts(op.params)
        kinds = [self.kind(self.origin(value)) for value in op.inputs]
        layer_weights = self.weights | {(shape[1:], dtype) for shape, dtype in self.weights}
        # A carry is written over once it is not read any more; JAX hands it on at the end of the body.
        carried = {new for new, old in zip(block.outputs, block.inputs[consts : consts + carry]) if old is not new}
        slices = set(block.inputs[consts + carry :])
        return _Lifetimes(block, kinds, layer_weights, self.on_cpu, carried, slices)

    def same(self, value: Value) -> Value | None:
        """The operand that a value is under another name."""
        op = value.maker
        if op is None or not op.inputs:
            return None
        changes_nothing = op.name in ("broadcast_in_dim", "convert_element_type") and (
            op.inputs[0].bytes == value.bytes and op.inputs[0].dtype == value.dtype
        )
        if op.name not in _SAME and not changes_nothing:
            return None
        return op.inputs[op.outputs.index(value) if len(op.outputs) > 1 else 0]

    def written_as(self, value: Value) -> Value:
        """A product's result in the wider type to which all that need it convert it; any other value itself."""
        wide, is_product = value, value.maker is not None and value.maker.name == "dot_general"
        while is_product and wide not in self.results and len(wide.uses) == 1 and wide.uses[0].name in _CONVERTS:
            wide = _passed_on(wide.uses[0], wide)
            if wide.bytes > value.bytes:
                return wide
        return value

    def origin(self, value: Value) -> Value:
        while (same := self.same(value)) is not None:
            value = same
        return value

    def sources(self, value: Value) -> list[Value]:
        """The values in memory that one is computed from; itself, if it is there."""
        return list(self.parts_read([value]))

    def read(self, values: list[Value], now: int) -> None:
        for value in values:
            for source in self.sources(value):
                self.last[source] = now

    def parts_read(self, values: list[Value]) -> dict[Value, int]:
        """The values in memory that these are computed from, with how many bytes are read of each."""
        bytes_read: dict[Value, int] = {}
        met, ahead = set(), [(self.origin(value), sys.maxsize) for value in values]
        while ahead:
            source, most = ahead.pop()
            if (source, most) in met or source.literal:
                continue
            met.add((source, most))
            if source in self.born or source.maker is None:
                bytes_read[source] = max(bytes_read.get(source, 0), min(source.bytes, most))
            else:
                most = min(most, source.bytes) if source.maker.name in _PARTS else most
                ahead += [(self.origin(value), most) for value in source.maker.inputs]
        return bytes_read

    def compute(self, values: list[Value]) -> None:
        """Counts what is moved to compute values, together, that are not in memory yet."""
        origins = dict.fromkeys(map(self.origin, values))
        new = [(value, value.maker) for value in origins if value.maker is not None and value not in self.born]
        for value, op in new:
            self.moved[op.line, op.phase] += value.bytes
        for _, op in new[:1]:
            self.moved[op.line, op.phase] += sum(self.parts_read([value for value, _ in new]).values())

    def touched(self, op: Operation) -> int:
        if op.name in _LOOPS:
            return 0  # its body does
        if op.name.startswith("scatter") or op.name == "dynamic_update_slice":
            rows = max(value.bytes for value in op.inputs[1:])
            return sum(value.bytes for value in op.inputs[1:]) + 2 * rows
        return sum(self.parts_read(op.inputs).values()) + sum(value.bytes for value in op.outputs)

    def lay_down(self, value: Value, now: int, placed: bool = False) -> None:
        """Reads a value that has to lie in memory now, and computes it now if it is not there yet.

        `placed`: it takes an argument's place.
        """
        value = self.origin(value)
        self.read([value], now)
        is_there = value in self.born or value.literal or (value.maker is None and value not in self.slices)
        if not is_there and not placed:
            self.heirs.append((value, [source for source in self.sources(value) if source is not value]))
            self.born[value] = self.last[value] = now

    def copy(self, values: list[Value], now: int) -> None:
        """Lays down what a reduction of XLA:CPU reads that is not computed together with it."""
        ahead, met = list(values), set()
        while ahead:
            value = ahead.pop()
            if value in met or value in self.born or value.maker is None:
                continue
            met.add(value)
            if value.maker.name in _APART_ON_CPU:
                sources = [self.born[source] for source in self.sources(value) if source in self.born]
                self.copies[value] = max(sources, default=now), now
            else:
                ahead += value.maker.inputs

    def kind(self, value: Value) -> str:
        if value not in self.kinds:
            op, kind = value.maker, OTHER
            if op is not None and op.name in ("all_gather", "convert_element_type", "slice", "dynamic_slice"):
                kind = GATHERED if self.kind(self.origin(op.inputs[0])) in (WEIGHTS, GATHERED) else OTHER
            if kind == OTHER and op is not None and read_in_backward(value):
                kind = SAVED
            elif kind == OTHER and op is not None and op.phase in ("backward", "update"):
                kind = GRADIENTS if (value.shape, value.dtype) in self.weights else OTHER
            self.kinds[value] = kind
        return self.kinds[value]

    def describe(self, value: Value) -> Held:
        return _held(value, self.kind(value), value.maker or next(iter(value.uses), None))

    def alive(self, now: int) -> list[Held]:
        copies = [value for value, (birth, last) in self.copies.items() if birth <= now <= last]
        held = [self.describe(value) for value, birth in self.born.items() if birth <= now <= self.last[value]]
        return held + [_held(value, OTHER, value.maker) for value in copies]


def _passed_on(op: Operation, value: Value) -> Value:
    """The result that one of `_CONVERTS` makes of an operand; an operation with several operands returns each."""
    return op.outputs[op.inputs.index(value) if len(op.outputs) > 1 else 0]


def _is_reduced(value: Value) -> bool:
    """Whether a value, perhaps under another name or type, goes into a reduce-scatter."""
    return any(
        op.name == "reduce_scatter" or (op.name in _CONVERTS and _is_reduced(_passed_on(op, value)))
        for op in value.uses
    )


def _held(value: Value, kind: str, op: Operation | None = None) -> Held:
    """`op`: the operation that makes the value, or, for a part that only a loop's body uses, the one that uses it."""
    line = op.line if op else ""
    if kind == SAVED and value.maker:
        line = origin(value)[0]  # for a loop's result, the line in the loop that made it
    return Held(kind, line, op.phase if op else "", value.dtype, value.shape, value.bytes)
