"""Checks small functions on meshes that need no device; sizes follow from the letters of their annotations."""

import inspect

import jax
import pytest
import witness

from shardlib.shardtypes import ShardingError, map_type, typed_shard_map

# Different, so that letters are not confused, and divisible by the axes of every mesh here.
SIZES = dict(B=16, L=32, M=64, F=48, V=80, E=96, K=112, D=128, Q=144, S=32, N=3)
MESHES = [dict(d=4, t=2), dict(d=8, t=1), dict(d=2, t=2), dict(d=1, t=1)]


def abstract(type_):
    """Arrays without data for a type."""

    def size(name):
        return int(name) if name.isdigit() else SIZES[name]

    return map_type(lambda array: jax.ShapeDtypeStruct(tuple(map(size, array.spec.names)), array.element.dtype), type_)


def prove(function, mesh=MESHES[0]) -> int:
    """Checks a function for arguments as its annotations say; returns the number of claims. The second witness, where
    the mesh has no axis of one device, must agree."""
    arguments = [abstract(parameter.annotation) for parameter in inspect.signature(function).parameters.values()]
    abstract_mesh = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    claims = typed_shard_map(function).check(abstract_mesh, *arguments)
    if min(mesh.values()) > 1:
        witness.agreed_claims(typed_shard_map(function, check=False), abstract_mesh, *arguments)
    return claims


def prove_everywhere(function):
    """Accepted on every mesh, one device included."""
    for mesh in MESHES:
        assert prove(function, mesh) > 0, mesh


def refusal(function, mesh=MESHES[0]) -> str:
    """The text of the refusal."""
    with pytest.raises(ShardingError) as caught:
        prove(function, mesh)
    return str(caught.value)


def refused_everywhere(function) -> str:
    """Refused on every mesh, one device included, with a line of the function's file; returns the text of the first."""
    file = inspect.getsourcefile(function)
    texts = []
    for mesh in MESHES:
        texts.append(refusal(function, mesh))
        assert f"{file}:" in texts[-1], (mesh, texts[-1])
    return texts[0]
