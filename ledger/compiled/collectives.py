"""The collectives of a step as XLA compiled it: how often each runs, and with how many bytes.

    axes = {"d": 4, "t": 2}
    traced = jax.jit(typed_shard_map(step)).trace(*shapes)
    table = compiled(traced.lower().compile().as_text(), axes)
    table[Collective("all-gather", ("d",), "float32", 4096, "forward", "train.py:197")]       # times a step
    table == count(read(traced.jaxpr), axes).collectives                 # where XLA does as it is told

The program is walked, with the turns of its loops as factors. Nothing runs.
"""

import collections
import dataclasses
import math
import re

import jax.numpy as jnp
import numpy as np

from ledger.compiled.hlo_text import Computation, Instruction, Module, parse
from ledger.count.costs import KINDS, Collective, Sites, Table, add_sites, any_branch, times_of
from ledger.count.program import phase_of


def dtype_of(word: str) -> str:
    """JAX's name of an element type of HLO.

    >>> [dtype_of(word) for word in ("f32", "bf16", "u8", "f8e4m3fn")]
    ['float32', 'bfloat16', 'uint8', 'float8_e4m3fn']
    """
    kinds = {"pred": "bool", "bf": "bfloat", "s": "int", "u": "uint", "f": "float"}
    return re.sub(r"^(pred|bf|s|u|f)", lambda kind: kinds[kind[0]], word).replace("float8e", "float8_e")


def widened(row: Collective) -> Collective:
    """A collective as XLA:CPU, which has none in bfloat16, runs it: in float32, twice the bytes."""
    return dataclasses.replace(row, dtype="float32", bytes=2 * row.bytes) if row.dtype == "bfloat16" else row


def compiled(text: str, mesh_axes: dict[str, int]) -> Table:
    """The collectives of an optimized program and how often they run; see `compiled_sites`."""
    return times_of(compiled_sites(text, mesh_axes))


def compiled_sites(text: str, mesh_axes: dict[str, int]) -> Sites:
    """The places of an optimized program that send. One that XLA combined of several is several rows again, one for
    each operand.

    Args:
      text: the HLO module, `jax.stages.Compiled.as_text()`.
      mesh_axes: name and size of each mesh axis, in the mesh's order. A collective whose groups are those of no mesh
        axes has the groups' text as its only axis.
    Raises:
      ValueError: for groups in a spelling that is not known, a loop that sends and whose turns are not known, branches
        that send differently.
    """
    module = parse(text)
    sites = _compiled(module, module.computations[module.entry], mesh_axes, set())
    if any(row.phase != "update" for row, _ in sites):
        return sites
    # A program in which nothing is differentiated, such as a validation step, is all forward.
    return collections.Counter({(dataclasses.replace(row, phase="forward"), n): at for (row, n), at in sites.items()})


def chain(instruction: Instruction) -> str:
    """The name that all parts of a collective have which XLA:TPU has cut into several fusions; '' for any other."""
    match = re.search(r'chain_id="(\d+)"', instruction.attributes)
    return match[1] if match else ""


def _compiled(module: Module, computation: Computation, axes, chains: set[str]) -> Sites:
    """`chains`: those that are counted already."""
    sites: Sites = collections.Counter()
    for instruction in computation.instructions.values():
        if instruction.is_done:
            continue
        if instruction.opcode in KINDS.values():
            if (link := chain(instruction)) and link in chains:
                continue
            chains.add(link)
            if over := axes_of_groups(instruction.attributes, axes):
                for dtype, size, (line, stack) in operands(module, computation, instruction):
                    sites[Collective(instruction.opcode, over, dtype, size, phase_of(stack), line), 1] += 1
            continue  # what it calls is the addition
        keys = ("calls", "to_apply", "body", "branch_computations", "true_computation", "false_computation")
        bodies = [_compiled(module, body, axes, chains) for body in module.callees(instruction, *keys)]
        for body in [any_branch(bodies, instruction.name)] if instruction.opcode == "conditional" else bodies:
            add_sites(sites, body, turns(module, instruction) if body and instruction.opcode == "while" else 1)
    return sites


def operands(module: Module, computation: Computation, instruction: Instruction) -> list[tuple[str, int, tuple]]:
    """Type, bytes, and source with name stack of each operand."""
    sizes = []
    for name in instruction.operands:
        (word, dims), *_ = re.findall(r"(\w+)\[([\d,]*)\]", computation.instructions[name].shape)
        dtype, elements = dtype_of(word), math.prod(int(dim) for dim in dims.split(",") if dim)
        sizes.append((dtype, elements * jnp.dtype(dtype).itemsize))
    if instruction.opcode == "all-to-all":  # its operands are the parts for each device
        sizes = [(sizes[0][0], sum(size for _, size in sizes))]
    if len(sizes) == 1:
        return [(*sizes[0], module.metadata(instruction))]
    # In a combined collective the items of the result (of its done, if it is asynchronous) still have their lines.
    others = computation.instructions.values()
    results = {instruction.name, *(op.name for op in others if op.is_done and instruction.name in op.operands)}
    items = [op for op in others if op.opcode == "get-tuple-element" and op.operands[0] in results]
    places = {index: module.metadata(item) for item in items for index in re.findall(r"index=(\d+)", item.attributes)}
    return [(*size, places.get(str(index), ("", ""))) for index, size in enumerate(sizes)]


def turns(module: Module, loop: Instruction) -> int:
    """How often a loop's body runs: as XLA has found, or the bound of an index from 0 in steps of 1."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(known[1])
    (condition,) = module.callees(loop, "condition")
    steps = [inner for op in condition.instructions.values() for inner in (op, *module.inner(op))]
    bounds = {step.literal for step in steps if step.opcode == "constant" and step.is_counter}
    if len(bounds) != 1 or not any("direction=LT" in step.attributes for step in steps):
        raise ValueError(f"the turns of the loop {loop.name} are not known, and a collective is in it")
    return int(bounds.pop())


def axes_of_groups(attributes: str, mesh_axes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes over which an HLO collective goes, by its attributes; devices are numbered in the order of the
    mesh.

    axes_of_groups("replica_groups={{0,1},{2,3}}", {"d": 2, "t": 2})                  # ('t',)
    axes_of_groups("replica_groups=[2,2]<=[2,2]T(1,0)", {"d": 2, "t": 2})             # ('d',)
    axes_of_groups("source_target_pairs={{0,2},{2,0}}", {"d": 2, "t": 2})             # ('d',)
    axes_of_groups("replica_groups=mesh['d'=2,'t'=2] {'d'}", {"d": 2, "t": 2})        # ('d',)
    axes_of_groups("replica_groups={{0,3},{1,2}}", {"d": 2, "t": 2})                  # ('{{0,3},{1,2}}',)
    """
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):  # the syntax since jax 0.11
        of_mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        said, several = re.findall(r"'(\w+)'", named[2]), [item for item in mesh_axes.items() if item[1] > 1]
        is_mesh = [item for item in of_mesh.items() if item[1] > 1] == several
        if is_mesh and set(said) <= of_mesh.keys() and named[2] == ",".join(f"'{axis}'" for axis in said):
            return tuple(axis for axis, _ in several if axis in said)
    shape = tuple(mesh_axes.values())
    devices = math.prod(shape)
    match = re.search(r"(replica_groups|source_target_pairs)=([{\[](?:[\d,<=T(){}\[\]]*[})\]])?)", attributes)
    name, text = match.groups() if match else ("", "")
    if iota := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        sizes, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        groups = np.arange(devices).reshape(dims).transpose(order).reshape(sizes).tolist()
    elif re.fullmatch(r"\{(\{[\d,]+\},?)*\}", text):
        groups = [[int(n) for n in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]
        groups = groups or [list(range(devices))]
    else:
        shown = attributes.strip(", ")[:160]
        raise ValueError(f"HLO text: the groups of a collective are in a spelling that is not known: {shown!r}")
    # The axes along which the members of some group, or a source and its target, have different places.
    places = [np.unravel_index(group, shape) for group in groups]
    over = tuple(axis for i, axis in enumerate(mesh_axes) if any(np.ptp(place[i]) > 0 for place in places))
    # A group's members differ along these alone, so that it holds all places along them if it is as large as they are.
    size = math.prod(mesh_axes[axis] for axis in over)
    whole = all(len(group) == size for group in groups) and size * len(groups) == devices
    return over if whole or name == "source_target_pairs" else (text,)
