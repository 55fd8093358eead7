"""The one place that knows JAX's young API of meshes: which one is current, over which of its axes code is mapped, how
a step is mapped, how an array lies in memory."""

import math
import warnings

import jax
from jax.experimental import mesh_utils
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardlib.proof import marks


def current_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh(mesh)`, of the older `with Mesh(...)`, or None; concrete outside of jit."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:  # inside jit only the abstract mesh may be read
            return abstract
        return abstract if mesh.empty else mesh
    # `with Mesh(...)` can be read under a deprecated name only (jax 0.10.2); where JAX has dropped it, there is no such
    # context.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.interpreters import pxla

        resources = getattr(pxla, "thread_resources", None)
    return None if resources is None or resources.env.physical_mesh.empty else resources.env.physical_mesh


def all_mapped_axes() -> dict[str, int]:
    """Name and size of each mesh axis that the code being traced is mapped over, in the mesh's order; empty outside of
    `shard_map`."""
    if (check := marks.current()) is not None:
        return check.axes
    mesh = jax.sharding.get_abstract_mesh()
    return {name: size for name, size in mesh.shape.items() if name in mesh.manual_axes}


def mapped_axes() -> dict[str, int]:
    """The same, but for the axes of `shardops.each` around it."""
    return {name: size for name, size in all_mapped_axes().items() if name not in marks.axes_of_each()}


def make_mesh(shape: dict[str, int], devices=None) -> Mesh:
    """A mesh with axes of type Auto: under Explicit ones (`jax.make_mesh`'s choice) `shard_map` refuses arrays that are
    not placed yet. On a TPU's torus axes may share a dim: t=2 of 4 × 4 × 4 chips is a mesh too."""
    sizes = tuple(shape.values())
    chosen = (jax.devices() if devices is None else devices)[: math.prod(sizes)]
    placed = mesh_utils.create_device_mesh(sizes, chosen, allow_split_physical_axes=True)
    return Mesh(placed, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def shard_map(f, mesh, in_specs, out_specs):
    """`jax.shard_map` under which the function that is differentiated is the sum over devices of what each returns."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if AxisType.Explicit not in mesh.axis_types:
        return mapped
    return lambda *args: mapped(*jax.sharding.reshard(args, place(mesh, in_specs)))


def place(mesh, specs):
    """The tree of `NamedSharding` for a tree of `PartitionSpec`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
    )


def row_major(x):
    """`x`, whose elements the compiled program lays out by the first dim, then the second, and so on."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
