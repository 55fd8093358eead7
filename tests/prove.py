"""Checks small programs on meshes that need no device; sizes follow from the letters of their types.

Tables of programs are text. A row begins at the left edge and goes on at an indent; its cells stand between ' | '; a
line that begins with '# ' is a heading. The first cell has the types of x, y, z, w and of the result, where it is not
x's; float32 if nothing else is said: 'B/d M, i32 B/d -> B/d'."""

import inspect
import linecache
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardlib import products, shardops, shardtypes
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import map_type
from shardlib.spec import ShardingError
from shardlib.typed import typed

# Different, so that letters are not confused, and divisible by the axes of every mesh here.
SIZES = dict(B=16, L=32, M=64, F=48, V=80, E=96, K=112, D=128, Q=144, S=32, H=192, N=3, C=160)
# The same where a device holds one row, one head, one expert.
SINGLE = SIZES | dict(B=8, F=8, V=8, E=8, K=8, H=32)
MESHES = [dict(zip("dt", sizes)) for sizes in ((4, 2), (2, 4), (8, 1), (1, 8), (2, 1), (1, 1))] + [dict(d=2, e=2, t=2)]
OF_D_AND_T = [mesh for mesh in MESHES if len(mesh) == 2]  # where a loss is '+d +t'
OF_EIGHT = [dict(d=8, t=1), dict(d=1, t=8)]  # where SINGLE is one a device


# -- Programs as text --------------------------------------------------------------------------------------------------
def table(text):
    """The rows of a table, each a list of cells."""
    rows = re.sub(r"\n +", " ", re.sub(r"^# .*$", "", text, flags=re.M)).split("\n")
    return [row.split(" | ") for row in rows if row]


def each_row(rows):
    """Parametrizes a test by the rows of a table."""
    ids = [re.sub(r"\W+", "-", " ".join(row))[:70] for row in rows]
    return pytest.mark.parametrize("row", rows, ids=ids)


def program(types, body, names=(), shardops=shardops):
    """The function of x, y, z and w of these types that returns `body`, an expression of JAX and of these names."""
    given, _, result = types.partition("->")
    arguments = {name: _annotation(text, names) for name, text in zip("xyzw", given.split(","))}
    result = _annotation(result, names) if "->" in types else arguments["x"]
    text = ", ".join(f"{name}: {annotation}" for name, annotation in arguments.items())
    source = f"def program({text}) -> {result}:\n    return {body}\n"
    file = f"/program/{abs(hash(source))}.py"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # for @typed, which reads it
    known = vars(shardtypes) | vars(products) | dict(names)
    known |= dict(jax=jax, jnp=jnp, np=np, lax=lax, shardops=shardops, typed=typed)
    known["product"] = getattr(shardops, "product", products.product)  # a plain reference may stand for shardops
    exec(compile(source, file, "exec"), known)
    return known["program"]


def _annotation(text, names):
    text = text.strip().strip("'")
    element, _, dims = text.partition(" ")
    if element in ("i32", "u32", "bool_"):
        return f"{element}['{dims}']"
    return text if text in names else f"f32['{text}']"


def abstract(type_, sizes=SIZES):
    """Arrays without data for a type."""

    def size(name):
        return int(name) if name.isdigit() else sizes[name]

    return map_type(lambda array: jax.ShapeDtypeStruct(tuple(map(size, array.spec.names)), array.element.dtype), type_)


# -- Verdicts ----------------------------------------------------------------------------------------------------------
def prove(function, mesh=MESHES[0], sizes=SIZES) -> int:
    """Checks a function for arguments as its annotations say; returns the number of claims."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    arguments = [abstract(parameter.annotation, sizes | mesh) for parameter in parameters]
    abstract_mesh = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    return typed_shard_map(function).check(abstract_mesh, *arguments)


def refusal(function, mesh=MESHES[0], sizes=SIZES) -> str:
    """The text of the refusal."""
    with pytest.raises(ShardingError) as caught:
        prove(function, mesh, sizes)
    return str(caught.value)


def refused(function, mesh=MESHES[0], sizes=SIZES) -> str:
    """The text of a refusal that has a line of the program, or of what it calls in its test."""
    text = refusal(function, mesh, sizes)
    assert re.search(r"(/program/\d+|/tests/\w+)\.py:\d+", text), (mesh, text)
    return text
