"""Counts what a step costs on one device: matrix products, collectives, loops, and what is kept for the backward
pass.

    costs = count(read(traced.jaxpr), {"d": 4, "t": 2})
    costs.products[Product("train.py:229", "forward", 2 * 16 * 64 * 256 * 128, "bfloat16", 1.0)]     # times a step
    costs.collectives[Collective("all-gather", ("d",), "float32", 4096, "forward", "train.py:197")]

A row stands for one line of the source and one phase; a loop's body counts as often as it runs. Nothing is executed.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

from ledger.count.program import OPAQUE, Block, Operation, Value
from shardlib.proof.jaxprs import scan_counts

# JAX's primitives that send, and HLO's word for each. Any other that names mesh axes must be in SEND_NOTHING.
KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
SEND_NOTHING = {"axis_index", "pvary"}
# Names of scopes. 'causal': the model needs half of the products, since they are masked to the positions before;
# 'needed=3:4': it needs three quarters. 'flops:NAME=5:4': each run of the kernel NAME computes 5 FLOPs, and the model
# needs 4 of them. 'busy=8:11': 8 of a loop's 11 turns do useful work; or of 11 devices, or rows, that compute in it.
_NEEDED = re.compile(r"(?<![\w.])(?:causal|needed=(\d+):(\d+))(?![\w.])")
_KERNEL = re.compile(r"flops:([^\s=]+)=(\d+):(\d+)")
_BUSY = re.compile(r"(?<![\w.])busy=(\d+):(\d+)")


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    kind: str  # HLO's word
    axes: tuple[str, ...]  # mesh axes that it goes over, in the mesh's order; those of a single device are left out
    dtype: str
    bytes: int  # the operand's size on one device
    phase: str  # forward, recomputed, backward: of what is differentiated; update: the rest of the step
    line: str  # in the user's program, 'train.py:197'; '' if unknown

    def sent_bytes(self, mesh_axes: dict[str, int]) -> float:
        """Bytes that leave a device, and as many that enter it, when devices pass parts around a ring."""
        return turns(self.kind, math.prod(mesh_axes[axis] for axis in self.axes)) * self.bytes


def turns(kind: str, devices: int) -> float:
    """The bytes that leave a device per byte of the operand, when n devices pass parts around a ring.

    all-gather of a part: n - 1; reduce-scatter and all-to-all: (n - 1) / n; all-reduce, a reduce-scatter and an
    all-gather: 2 (n - 1) / n; collective-permute: 1.
    """
    share = (devices - 1) / devices
    return {"all-gather": devices - 1, "all-reduce": 2 * share, "collective-permute": 1}.get(kind, share)


@dataclasses.dataclass(frozen=True, order=True)
class Product:
    """A matrix product on one device, or a kernel with the FLOPs that its author declares."""

    line: str
    phase: str
    flops: int  # a multiply and an add are two
    dtype: str  # the operands' type
    needed: float  # the share of its FLOPs that the model needs: 0.5 if half is masked


@dataclasses.dataclass(frozen=True, order=True)
class Loop:
    line: str
    phase: str
    length: int


@dataclasses.dataclass(frozen=True, order=True)
class Saved:
    """A value of the forward pass that JAX keeps for the backward pass."""

    line: str
    # The name it is saved under, such as save_for_backward; "input" of a checkpoint; "gradient", computed ahead; ""
    # where nobody asked for it.
    why: str
    dtype: str
    shape: tuple[int, ...]  # on one device, for one layer
    bytes: int  # on one device, for one layer
    times: int  # layers


@dataclasses.dataclass(frozen=True, order=True)
class HostCopy:
    """An array that is copied between a device's memory and its host's."""

    line: str
    phase: str
    to_host: bool
    dtype: str
    bytes: int


Table = collections.Counter[Collective]  # times a step
# The number of places in the program, by collective and by how often a place runs it in a step, loops included.
Sites = collections.Counter[tuple[Collective, int]]


@dataclasses.dataclass
class Costs:
    """Rows and how often each is met in a step."""

    products: collections.Counter[Product] = dataclasses.field(default_factory=collections.Counter)
    sites: Sites = dataclasses.field(default_factory=collections.Counter)
    loops: collections.Counter[Loop] = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    host_copies: collections.Counter[HostCopy] = dataclasses.field(default_factory=collections.Counter)

    @property
    def collectives(self) -> Table:
        return times_of(self.sites)

    def add(self, other: "Costs", times: int) -> None:
        for name in ("products", "loops", "kernels", "host_copies"):
            for row, count in getattr(other, name).items():
                getattr(self, name)[row] += count * times
        add_sites(self.sites, other.sites, times)

    def flops(self, *phases: str, dtype: str = "") -> int:
        """The FLOPs of all products in these phases; without phases, in all. dtype: what the operands' begins with."""
        rows = [(row, times) for row, times in self.products.items() if row.dtype.startswith(dtype)]
        return sum(row.flops * times for row, times in rows if not phases or row.phase in phases)

    def model_flops(self) -> float:
        """FLOPs of products, forward and backward, without recomputation; of masked ones only the needed part."""
        rows = [(row, times) for row, times in self.products.items() if row.phase in ("forward", "backward")]
        return sum(row.flops * times * row.needed for row, times in rows)


# -- Products, collectives, loops --------------------------------------------------------------------------------------
def count(block: Block, mesh_axes: dict[str, int]) -> Costs:
    """Counts a step. If branches differ, the one with the most FLOPs counts.

    Args:
      block: the step, `read(jaxpr)`.
      mesh_axes: name and size of each mesh axis, in the mesh's order.
    Raises:
      ValueError: where the count is not known before the step runs: a collective or a matrix product in
        `lax.while_loop`, or a collective in some branches of `lax.cond` only; and for a primitive over mesh axes of
        which this module does not know what it sends.
    """
    costs = Costs()
    for op in block.operations:
        _count_collective(op, mesh_axes, costs)
        flops, needed = _kernel_flops(op) if op.name in OPAQUE else (_flops(op), _needed(op.scopes))
        for busy, turns in set(_BUSY.findall(op.scopes)):
            needed *= int(busy) / int(turns)
        if flops is not None:
            # A kernel's first operands may be tables of its blocks: the type is that of the largest.
            dtype = max(op.inputs, key=lambda value: value.bytes).dtype if op.name in OPAQUE else op.inputs[0].dtype
            costs.products[Product(op.line, op.phase, flops, dtype, needed)] += 1
        elif op.name in OPAQUE:
            costs.kernels[op.line, op.name] += 1
        bodies = [count(body, mesh_axes) for body in op.blocks]
        if op.name == "while" and any(body.sites or body.products for body in bodies):
            what = "collective" if any(body.sites for body in bodies) else "matrix product"
            raise ValueError(f"a {what} in the while loop at {op.line}, whose length is not known: write lax.scan")
        if op.name == "cond":
            any_branch([body.sites for body in bodies], op.line)
            bodies = [max(bodies, key=Costs.flops)]
        if crosses_to_host(op):
            (here,), (there,) = op.inputs, op.outputs
            line = origin(here)[0] if there.on_host else op.line
            row = HostCopy(line, op.phase, there.on_host, here.dtype, here.bytes or there.bytes)
            costs.host_copies[row] += 1
        if op.name == "scan":
            costs.loops[Loop(op.line, op.phase, op.length)] += 1
        for body in bodies:
            costs.add(body, op.turns)
    return costs


def _count_collective(op: Operation, axes: dict[str, int], costs: Costs) -> None:
    names = op.params.get("axes", op.params.get("axis_name", ()))
    names = names if isinstance(names, tuple | list) else (names,)
    over = tuple(axis for axis, size in axes.items() if axis in names and size > 1)
    if over and op.name in KINDS:
        if op.params.get("axis_index_groups") is not None:
            raise ValueError(f"'{op.name}' at {op.line} has axis_index_groups: write it over mesh axes")
        for value in op.inputs:
            costs.sites[Collective(KINDS[op.name], over, value.dtype, value.bytes, op.phase, op.line), 1] += 1
    elif over and op.name not in SEND_NOTHING:
        raise ValueError(f"'{op.name}' over {', '.join(over)} at {op.line}: what it sends is not known")


def times_of(sites: Sites) -> Table:
    """How often each collective runs, over all its places."""
    table: Table = collections.Counter()
    for (row, times), places in sites.items():
        table[row] += times * places
    return table


def add_sites(sites: Sites, body: Sites, turns: int) -> None:
    """Adds the places of a loop's body, which runs so often."""
    for (row, times), places in body.items():
        sites[row, times * turns] += places


def totals(table: Table) -> Table:
    """The table's sums without lines, for comparing two tables: XLA need not keep the lines."""
    total: Table = collections.Counter()
    for row, times in table.items():
        total[dataclasses.replace(row, line="")] += times
    return total


def any_branch(branches: Iterable[Sites], place: str) -> Sites:
    """The collectives of the one branch that will run. Raises `ValueError` if they are not the same in all."""
    first, *others = branches
    if any(totals(times_of(other)) != totals(times_of(first)) for other in others):
        raise ValueError(f"the branches at {place} do not run the same collectives: which will run is not known")
    return first


def crosses_to_host(op: Operation) -> bool:
    return op.name == "device_put" and op.inputs[0].on_host != op.outputs[0].on_host


def _flops(op: Operation) -> int | None:
    """FLOPs of a matrix product or a convolution; None for anything else."""
    if op.name == "dot_general":
        (contracted, _), _ = op.params["dimension_numbers"]
        return 2 * math.prod(op.outputs[0].shape) * math.prod(op.inputs[0].shape[dim] for dim in contracted)
    if op.name == "conv_general_dilated":
        kernel, features = op.inputs[1].shape, op.params["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(op.outputs[0].shape) * math.prod(kernel) // kernel[features]
    return None


def _needed(scopes: str) -> float:
    """The part that the model needs of products in these scopes: what the innermost says."""
    matches = _NEEDED.findall(scopes)
    needed, run = matches[-1] if matches else (1, 1)
    return int(needed) / int(run) if needed else 0.5


def _kernel_flops(op: Operation) -> tuple[int | None, float]:
    """FLOPs of a kernel and the part that the model needs, as declared around it or by its `cost_estimate`; or None."""
    name = op.params.get("target_name") or op.params.get("name")
    for declared, run, needed in reversed(_KERNEL.findall(op.scopes)):
        if declared == name:
            return int(run), int(needed) / int(run)
    estimate = op.params.get("cost_estimate")
    return (None, 1.0) if estimate is None else (estimate.flops, 1.0)


# -- What is kept for the backward pass --------------------------------------------------------------------------------
def saved(block: Block) -> list[Saved]:
    """Values that the forward pass makes and the backward pass reads; equal ones of one line are one row. Arguments,
    such as weights and the batch, are not made."""
    rows: collections.Counter[Saved] = collections.Counter()  # how often, of rows whose own `times` is 1
    for op in block.operations:
        for value in op.outputs:
            if not value.on_host and (readers := read_in_backward(value)):
                line, why, array, times = origin(value)
                if not why and any(reader.name == "checkpoint" for reader in readers):
                    why = "input"
                elif not why and _is_gradient(array):
                    why = "gradient"
                rows[Saved(line, why, array.dtype, array.shape, array.bytes, 1)] += times
        for body in op.blocks:
            for row in saved(body):
                rows[dataclasses.replace(row, times=1)] += row.times
    return [dataclasses.replace(row, times=times) for row, times in rows.items()]


def read_in_backward(value: Value) -> list[Operation]:
    """The operations of the backward pass that read a value of the forward pass; none for other values.

    A loop of the forward pass that computes gradients right after what they are of, as of a loss in chunks, keeps none
    of it.
    """
    if value.maker is None or value.maker.phase != "forward" or value.maker.within == "forward":
        return []
    return [reader for reader in _readers(value) if reader.phase in ("recomputed", "backward")]


def _is_gradient(value: Value) -> bool:
    """Whether a value, perhaps a sum, is a gradient that the forward pass computes right after what it is of."""
    op = value.maker
    if op is None or op.phase == "backward" or op.name != "add":
        return op is not None and op.phase == "backward"
    return any(map(_is_gradient, op.inputs))


def _readers(value: Value) -> list[Operation]:
    """The operations that read a value, those in the body of a loop that it is passed to instead of the loop."""
    readers = []
    for op in dict.fromkeys(value.uses):
        if op.name != "scan" or op.phase not in ("recomputed", "backward"):
            readers.append(op)
            continue
        for operand, argument in zip(op.inputs, op.blocks[0].inputs, strict=True):
            if operand is value:
                readers += _readers(argument)
    return readers


def origin(value: Value) -> tuple[str, str, Value, int]:
    """Where a value is from: line, name it is saved under, its value in loops' bodies, how many of those it holds."""
    op = value.maker
    assert op is not None, "an argument is from nowhere"
    if op.name == "scan":
        position = next(index for index, output in enumerate(op.outputs) if output is value)
        inner = op.blocks[0].outputs[position]
        stacked = position >= scan_counts(op.params)[1]
        if inner.maker is None:  # a body's own argument, such as the layer's input
            return op.line, "", inner if stacked else value, op.length if stacked else 1
        line, why, array, times = origin(inner)
        return line, why, array, times * (op.length if stacked else 1)
    named = op
    while named.name == "reduce_precision" and (before := named.inputs[0].maker) is not None:
        named = before
    if named.name == "name":
        return named.line, named.params["name"], value, 1
    return op.line, "", value, 1
