"""Checks before anything is compiled: sizes against the mesh, and with `check_only` the steps' types."""

import math
import time
from collections.abc import Iterator
from typing import Any

import jax

from runtime.config.help import comments_of
from runtime.config.sizes import nearest_divisors, nearest_multiples
from runtime.files import flat
from runtime.terminal import RunError, print_line
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import fields, map_type, mesh_text, narrowed, require_divisible
from shardlib.spec import Dim, ShardingError


def check_sizes(config: Any, type_: Any, shapes: Any, what: str = "") -> Any:
    """Returns the shapes of a tree of this type, if the config's mesh can split all its dims. what: where sizes come
    from, if no key has them. Raises RunError: each dim that cannot be split, with axes, keys and sizes that fit."""
    axes, problems = vars(config.mesh), []
    for dim, size, text, place in _undivided(narrowed(type_, shapes), shapes, axes):
        values = flat({"model": config.model, "training": config.training})
        keys = [key for key, value in values.items() if value == size and not isinstance(value, bool)]
        said = comments_of(type(config.model))
        keys = [key for key in keys if said.get(key.removeprefix("model."), "").split(",")[0] == dim.name] or keys
        where = what or (f"{config.origins.of(keys[0])}: {' or '.join(keys)} = {size}" if keys else "mesh")
        split = [axis for axis in dim.axes if axes[axis] > 1]
        parts = math.prod(axes[axis] for axis in split)
        fix = f"set it to {nearest_multiples(size, parts)}"
        if len(split) == 1:
            fix += f", or mesh.{split[0]} to {nearest_divisors(size, parts)}"
        problems.append(f"{where}: {text}: {fix}\n  in {place}")
    if problems:
        raise RunError("\n".join(problems))
    return shapes


def _undivided(type_: Any, shapes: Any, axes: dict[str, int]) -> Iterator[tuple[Dim, int, str, str]]:
    """Each dim of a tree that the mesh cannot divide, once: its size, a message, and the first leaf that has it."""
    seen = set()
    specs = jax.tree.leaves(map_type(lambda array: array.spec, type_))
    for spec, (path, leaf) in zip(specs, jax.tree_util.tree_leaves_with_path(shapes), strict=True):
        spec.require_mesh_order(axes)
        for dim, size in zip(spec.dims, leaf.shape, strict=True):
            if dim.name in axes or (dim.axes, size) in seen:  # it counts devices, or was said already
                continue
            try:
                require_divisible(dim, size, axes)
            except ShardingError as error:
                seen.add((dim.axes, size))
                yield dim, size, str(error), f"{jax.tree_util.keystr(path, simple=True, separator='/')}: {spec}"


def batch_shapes(config: Any, batch_type: Any) -> Any:
    """The global shapes of a batch: rows by tokens; in `read` and `read_starts` by the encoder's tokens. Raises
    RunError: the rows cannot be divided into microbatches, or these over the mesh."""
    tokens, parts = config.training.tokens, config.training.microbatches
    if tokens.batch % parts:
        what = f"{config.origins.of('training.tokens.batch')}: training.tokens.batch = {tokens.batch}"
        fix = f"set it to {nearest_multiples(tokens.batch, parts)}"
        raise RunError(f"{what}: it is divided into training.microbatches = {parts} parts: {fix}")

    def of_rows(rows: int) -> Any:
        def shape(name: str, array: Any) -> jax.ShapeDtypeStruct:
            columns = tokens.read_len if name in ("read", "read_starts") else tokens.len
            return jax.ShapeDtypeStruct((rows, columns), array.element.dtype)

        return batch_type(**{name: shape(name, array) for name, array in fields(batch_type).items()})

    what = f"training.tokens.batch / training.microbatches = {tokens.batch} / {parts}" if parts > 1 else ""
    check_sizes(config, batch_type, of_rows(tokens.batch // parts), what)
    return of_rows(tokens.batch)


def by_name(table: str, values: dict[str, float], tree: Any) -> Any:
    """The tree with the table's value at each leaf, by the last part of its path. Raises RunError for a leaf without an
    entry and for an entry without a leaf."""
    names = {path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    if wrong := names ^ values.keys():
        what = ", ".join(f"'{name}' {'is missing' if name in names else 'is no weight'}" for name in sorted(wrong))
        raise RunError(f"{table}: {what}: expected an entry for each weight: {sorted(names)}")
    return jax.tree_util.tree_map_with_path(lambda path, _: values[path[-1].name], tree)


def report_check(config: Any, steps: tuple[typed_shard_map, typed_shard_map], state: Any, batch: Any) -> None:
    """Proves the types of a trainer's `mapped_steps` on the config's mesh, without a device, and prints the result.
    state, batch: the trainer's `shapes`. Raises RunError: the first wrong claim, with its line."""
    axes = vars(config.mesh)
    mesh, where = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes)), f"on the {mesh_text(axes)}"
    integer, number = (jax.ShapeDtypeStruct((), dtype) for dtype in ("uint32", "float32"))
    arguments = (state, integer, integer, batch), (state.weights, number, number, batch)
    for step, of_step in zip(steps, arguments, strict=True):
        began = time.perf_counter()
        try:
            proved = step.check(mesh, *of_step)
        except ShardingError as error:
            raise RunError(f"{step.name} is refused {where}:\n{error}") from None
        print_line(f"{step.name} {where}: {proved} claims proved in {time.perf_counter() - began:.1f} s.")
    print_line(
        "Proved: along which axes each value is split, the same, or a sum not yet taken.\n"
        "So no reduction is forgotten or doubled, on any mesh, and every transfer is an\n"
        "operation with a string. Not proved: schedules, random numbers, what stands\n"
        "inside shardops.local, and the mathematics (docs/notation.md)."
    )
