"""Checks small functions on meshes that need no device; sizes follow from the letters of their annotations."""

import inspect

import jax
import pytest
import witness

from shardlib.shardtypes import ShardingError, map_type, typed_shard_map

# Different, so that letters are not confused, and divisible by the axes of every mesh here.
SIZES = dict(B=16, L=32, M=64, F=48, V=80, E=96, K=112, D=128, Q=144, S=32, H=192, N=3)
# The same where a device holds one row, one head, one expert.
SINGLE = SIZES | dict(B=8, F=8, V=8, E=8, K=8, H=32)
MESHES = [dict(d=4, t=2), dict(d=8, t=1), dict(d=2, t=2), dict(d=1, t=1), dict(d=2, e=2, t=2), dict(d=1, t=8)]
OF_D_AND_T = [mesh for mesh in MESHES if len(mesh) == 2]  # where a loss is '+d +t'


def abstract(type_, sizes=SIZES):
    """Arrays without data for a type."""

    def size(name):
        return int(name) if name.isdigit() else sizes[name]

    return map_type(lambda array: jax.ShapeDtypeStruct(tuple(map(size, array.spec.names)), array.element.dtype), type_)


def prove(function, mesh=MESHES[0], sizes=SIZES) -> int:
    """Checks a function for arguments as its annotations say; returns the number of claims. The second witness, where
    the mesh has no axis of one device, must agree."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    arguments = [abstract(parameter.annotation, sizes | mesh) for parameter in parameters]
    abstract_mesh = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    claims = typed_shard_map(function).check(abstract_mesh, *arguments)
    if min(mesh.values()) > 1:
        witness.agreed_claims(typed_shard_map(function, check=False), abstract_mesh, *arguments)
    return claims


def prove_everywhere(function, meshes=MESHES):
    """Accepted on every mesh, one device included, also where a device holds one row."""
    for sizes in (SIZES, SINGLE):
        for mesh in meshes:
            assert prove(function, mesh, sizes) > 0, mesh


def refusal(function, mesh=MESHES[0], sizes=SIZES) -> str:
    """The text of the refusal."""
    with pytest.raises(ShardingError) as caught:
        prove(function, mesh, sizes)
    return str(caught.value)


def refused_everywhere(function) -> str:
    """Refused on every mesh, with a line of the function's file, also where a device holds one row; returns the text of
    the first."""
    file = inspect.getsourcefile(function)
    texts = []
    for sizes in (SIZES, SINGLE):
        for mesh in MESHES:
            texts.append(refusal(function, mesh, sizes))
            assert f"{file}:" in texts[-1], (mesh, texts[-1])
    return texts[0]
