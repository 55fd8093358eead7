"""Every wrong communication program made from train.py by mutation is refused, on four meshes, with its line.

No mutant means the same as the original: even a maximum taken twice is refused, since its dim is gone after the first.
"""

import ast
import functools
import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
import small

import train
from shardlib.shardtypes import ShardingError, typed_shard_map

SOURCE = pathlib.Path(train.__file__).read_text()
COLLECTIVES = {"all_gather", "gather", "psum_scatter", "psum", "pmax", "all_to_all", "ppermute"}
MESHES = [(4, 2), (2, 2), (8, 1), (1, 1)]


def edit(node, text):
    """The source with the text of a node replaced; no line moves."""
    lines = SOURCE.splitlines(keepends=True)
    offset = [0]
    for line in lines:
        offset.append(offset[-1] + len(line))

    def place(line, column):  # ast counts columns in bytes
        return offset[line - 1] + len(lines[line - 1].encode()[:column].decode())

    start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
    return SOURCE[:start] + text + "\n" * (SOURCE[start:end].count("\n") - text.count("\n")) + SOURCE[end:]


def swapped(spec):
    """d and t exchanged, in the order of the mesh's axes."""
    exchanged = re.sub(r"([/+])([dt])\b", lambda match: match[1] + {"d": "t", "t": "d"}[match[2]], spec)
    return exchanged.replace("+t +d", "+d +t").replace("/t/d", "/d/t")


def mutants():
    """(name, line, source) of every mutant."""
    tree = ast.parse(SOURCE)
    made = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            literal = node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
            if name in COLLECTIVES and literal:
                spec, call = node.args[0].value, ast.get_source_segment(SOURCE, node)
                operand = ast.get_source_segment(SOURCE, node.args[1])
                made.append((f"{name} '{spec}' removed", node.lineno, edit(node, operand)))
                made.append((f"{name} '{spec}' twice", node.lineno, edit(node, call.replace(operand, call, 1))))
                if swapped(spec) != spec:
                    made.append((f"{name} '{spec}' swapped", node.lineno, edit(node.args[0], repr(swapped(spec)))))
                for fewer in one_axis_fewer(name, spec):
                    made.append((f"{name} '{spec}' as '{fewer}'", node.lineno, edit(node.args[0], repr(fewer))))
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[\w/+\[\], .>-]*", node.value)
            and "\n" not in node.value
        ):
            for match in re.finditer(r" ?\+[dt]\b", node.value):
                dropped = node.value[: match.start()] + node.value[match.end() :]
                made.append(
                    (f"'{node.value}' without{match[0]} at {match.start()}", node.lineno, edit(node, repr(dropped)))
                )
    return made


def one_axis_fewer(name, spec):
    """The string with one of several axes left where it was."""
    left, right = (part.strip() for part in spec.split("->"))
    moved = [axis for axis in re.findall(r"[/+]([dt])\b", left) if axis not in re.findall(r"[/+]([dt])\b", right)]
    if len(moved) < 2:
        return
    for axis in moved:
        if f"+{axis}" in left:
            yield f"{left} -> {f'{right} +{axis}'.strip()}"
        else:
            dim = re.search(rf"(\w+)[/\w]*/{axis}\b", left)[1]
            kept = re.sub(rf"\b{dim}(?![/\w])", f"{dim}/{axis}", right)
            yield f"{left} -> {kept}"


def load(source, directory, index):
    path = directory / f"mutant_{index}" / "train.py"
    path.parent.mkdir()
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"mutant_{index}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.act.dtype = jnp.bfloat16
    return module


def check(module, mesh):
    """Checks the training step and the validation step of a module, on a mesh that needs no devices."""
    mesh = jax.sharding.AbstractMesh(mesh, ("d", "t"))
    model = module.Model(**vars(small.MODEL) | {"attention": "einsum"})  # with what is written, not a kernel
    training = module.Training(**{**vars(small.TRAINING), "tokens": module.Tokens(batch=16, len=32), "microbatches": 2})
    state = jax.eval_shape(functools.partial(module.init_state, model), jnp.uint32(0))

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype)

    batch = module.TokenBatch(shape(jnp.uint32, 16, 32), shape(bool, 16, 32), shape(bool, 16, 32))
    number, loss = shape(jnp.uint32), shape(jnp.float32)
    proved = typed_shard_map(functools.partial(module.training_step, model, training, 0)).check(
        mesh, state, number, number, batch
    )
    return proved + typed_shard_map(functools.partial(module.validation_step, model, training, 0)).check(
        mesh, state.weights, loss, loss, batch
    )


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_the_program_itself_passes(mesh):
    """train.py as it is is accepted on each mesh: the mutants are refused for their mutation."""
    assert check(train, mesh) > 100


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=[] if mesh == (4, 2) else pytest.mark.slow) for mesh in MESHES],
    ids=lambda mesh: f"{mesh[0]}x{mesh[1]}",
)
def test_every_mutant_is_refused(mesh, tmp_path, record_property):
    """Each collective removed, doubled, with its axes exchanged or one axis too few, and each '+axis' dropped: refused with a line of the file."""
    survivors, unlocated, made = [], [], mutants()
    for index, (name, line, source) in enumerate(made):
        try:
            check(load(source, tmp_path, index), mesh)
        except ShardingError as error:
            if not re.search(r"train\.py:\d+", str(error)):
                unlocated.append((name, line, str(error)))
        else:
            survivors.append((name, line))
    record_property(
        "summary", f"{len(made)} mutants of train.py on the mesh {mesh[0]} x {mesh[1]}: {len(survivors)} accepted"
    )
    assert not survivors and not unlocated
    assert len(made) > 100
