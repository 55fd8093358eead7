"""The check: that each value lies on the mesh as its type says, proved on the program's jaxpr before a device is used.

The function is traced abstractly, for the shapes of one device. In that trace each operation of shardops and each
annotation is a *mark*: a call whose rule says, from the types of what goes in, what comes out, or refuses. A walk over
the jaxpr then carries, for every value and mesh axis, one of three states:

    split      each device holds its own part (and which dim is split)
    same       all devices hold the same
    pending    the devices hold the terms of a sum

Between marks stands ordinary JAX, device by device (`shardlib/primitives.py`): it keeps *same* if every operand is the
same, makes *split* of split, and *pending* of pending where it is linear.

The verdict must not depend on the mesh. So the program is traced on two meshes of the check's own, which follow from
the arguments' sizes alone: on one device, where a part is the whole, and on a small mesh whose axes all have several
devices and split no dim down to one element (the user's, if it is such a one). The two are walked side by side. Where
they differ in more than the sizes of split dims, the program counts what a device holds (`x.shape[0]` of a split dim),
and is refused. The mesh that the user has then shows whether its sizes fit, and that the program there is the same one.

Backward passes are not walked: the gradient's type follows from the value's by exchanging same and pending
(`shardops.vjp`), since each operation's transpose does just that. Backward rules that the program brings along
(`jax.custom_vjp`, `jax.custom_jvp`) are walked where they stand.
"""

import itertools
import math

import jax

from shardlib.check import Check, during
from shardlib.mesh import trace_with_axes
from shardlib.same import ANOTHER, require_same
from shardlib.spec import Indivisible, ShardingError, Spec, TooFew, line_of, parts
from shardlib.states import State
from shardlib.walk import Walk

_serial = itertools.count()
_WHILE = "while the check traced it for"


def verify(function, axes: dict[str, int], arguments: list, in_specs: list[Spec]) -> tuple[int, set]:
    """Traces `function` and walks it; returns how many claims were proved, and the functions of the user's program that
    were traced, as (file, first line).

    Args:
      function: the body that `shard_map` would run; it checks its own result.
      axes: the mesh's axes and sizes.
      arguments: trees of `ShapeDtypeStruct`, the whole arrays.
      in_specs: the types of the leaves of the arguments.
    Raises:
      ShardingError: at the first claim that is not so, with its line.
    """
    tree, starts = jax.tree.structure(arguments), [State.of(spec) for spec in in_specs]
    given = [(leaf.shape, leaf.dtype, spec) for leaf, spec in zip(jax.tree.leaves(arguments), in_specs, strict=True)]
    functions = set()

    def trace(sizes: dict[str, int], arrays=given, marking: bool = True):
        check = Check(sizes, axes, marking)
        return check, _traced(function, check, jax.tree.unflatten(tree, [_part(*each, sizes) for each in arrays]))

    def walk_beside(arrays, one, alone):
        """Walks the program on the check's own mesh beside that on one device."""
        many, small = _on_small_mesh(lambda sizes: trace(sizes, arrays), axes, arrays)
        Walk(many, _traced, beside=one)(small, starts, alone)
        return many, small

    one, alone = trace(dict.fromkeys(axes, 1))
    first = Walk(one, _traced, functions=functions)
    first(alone, starts)
    known = [alone]
    try:
        many, small = walk_beside(given, one, alone)
        short = None
    except ShardingError as error:
        # Where a device would hold single elements, JAX may go ways of its own: twice the sizes tell.
        larger, short = _longer(given, axes, error)
        if not short:
            raise
        try:
            one, alone = trace(dict.fromkeys(axes, 1), larger)
            known.insert(0, alone)
            many, small = walk_beside(larger, one, alone)
        except ShardingError as error:
            raise error.extended(f"  while it was checked with {short}, for several elements on each device") from None
    if many.axes != axes or short:
        here, traced = trace(axes)
        try:
            Walk(here, _traced, beside=first.check)(traced, starts, known[-1])
        except ShardingError as error:
            if ANOTHER not in str(error) or not any(_single(shape, spec, axes) for shape, _, spec in given):
                where = ", ".join(f"{axis}={size}" for axis, size in axes.items())
                raise error.extended(f"  on the mesh {where}: it was accepted on the check's own") from None
            require_same(traced, here, small, many, known, first.where)
    if many.gradients:
        trace(axes, marking=False)
    return many.proved, functions


def _part(shape, dtype, spec: Spec, axes: dict[str, int]):
    """What one device holds of an array; a dim that is named like an axis has that axis' size."""
    sizes = [axes[dim.name] if dim.name in axes else size for dim, size in zip(spec.dims, shape, strict=True)]
    return jax.ShapeDtypeStruct(tuple(size // parts(dim, axes) for dim, size in zip(spec.dims, sizes)), dtype)


def _single(shape, spec: Spec, axes: dict[str, int]) -> bool:
    """Whether a device holds one element of a dim that is split."""
    return any(size == parts(dim, axes) > 1 for dim, size in zip(spec.dims, shape, strict=True))


def _traced(function, check: Check, arguments: list):
    """The jaxpr of a function for a check."""
    try:
        with during(check):
            # The extra axis is in the key of every cache of traced functions, so that nothing traced here is met by
            # the real trace.
            return trace_with_axes(function, {**check.axes, f"check {next(_serial)}": 1}, *arguments)
    except ShardingError:
        raise
    # JAX's own, shapes that do not fit, and what a program raises that does not expect these sizes.
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError, AssertionError) as error:
        where = ", ".join(f"{axis}={size}" for axis, size in check.axes.items())
        own = "" if check.axes == check.shown else f"\n  {_WHILE} {where}"
        raise ShardingError(f"{error or type(error).__name__}{own}\n  at {line_of(error)}") from error


def _on_small_mesh(trace, axes: dict[str, int], arrays: list):
    """The trace on the check's own mesh: each axis has a small number of devices that divides the dims that it splits;
    all different where that can be, and with more than one element left on each. Where the program does not fit these
    sizes (three heads), the next are tried."""
    fits, tried, refused = _split_dims(arrays, axes), [], None
    if all(count > 1 and _leaves(axes, axis, fits) > 1 for axis, count in axes.items()):
        return trace(dict(axes))  # the user's mesh tells as much
    while True:
        sizes = next((sizes for sizes in _small_meshes(axes, fits) if sizes not in tried), None)
        if sizes is None or len(tried) == 12:
            raise refused
        tried.append(sizes)
        try:
            return trace(sizes)
        except Indivisible as error:  # a dim that no argument has
            fits.append((error.size, error.axes))
            refused = refused or error
        except ShardingError as error:
            if _WHILE not in str(error):
                raise
            refused = error if isinstance(refused, Indivisible | None) else refused


def _split_dims(arrays, axes) -> list[tuple[int, tuple[str, ...]]]:
    """Size and axes of each dim of the arguments that is split."""
    return [
        (size, dim.axes)
        for shape, _, spec in arrays
        for dim, size in zip(spec.dims, shape, strict=True)
        if dim.axes and dim.name not in axes
    ]


def _small_meshes(axes, fits) -> list[dict[str, int]]:
    """Numbers of devices for each axis, the best first: none has one device, each leaves several elements, all differ,
    and are small."""
    few = 6 if len(axes) <= 3 else 2
    meshes = [
        dict(zip(axes, counts)) for counts in itertools.product(*([*_counts(axis, fits)[:few], 1] for axis in axes))
    ]
    left = [min((_leaves(mesh, axis, fits) for axis in axes), default=2) for mesh in meshes]
    found = [
        (list(mesh.values()).count(1), least < 2, len(axes) - len(set(mesh.values())), sum(mesh.values()), index)
        for index, (mesh, least) in enumerate(zip(meshes, left))
        if least > 0
    ]
    fewest = min(found)[0]
    return [meshes[rank[-1]] for rank in sorted(found) if rank[0] == fewest]


def _counts(axis: str, fits) -> list[int]:
    """Numbers of devices that divide what the axis splits, the small ones first."""
    least = min((size for size, axes in fits if axis in axes), default=2**7 * 9 * 5 * 7)
    return [n for n in range(2, min(least, 1000) + 1) if least % n == 0]


def _leaves(sizes: dict[str, int], axis: str, fits) -> int:
    """How many elements are left on a device, at the least, of the dims that an axis splits; 0 where it cannot."""
    counts = [(size, math.prod(sizes[each] for each in axes)) for size, axes in fits if axis in axes]
    return min((0 if size % count else size // count for size, count in counts), default=2)


def _longer(arrays, axes, error: ShardingError):
    """Arguments that the check's own mesh leaves more of on a device, where that may be why it refused a program; and
    what was changed, in words."""
    if ANOTHER in str(error):
        return _twice_as_long(arrays, axes)
    if not isinstance(error, TooFew):
        return None, ""
    # Two elements where one would fit: of single ones JAX may go ways of its own.
    size = {dim.name: size for shape, _, spec in arrays for dim, size in zip(spec.dims, shape)}.get(error.name)
    if size is None or error.name.isdigit():
        return None, ""
    longer = 2 * error.factor * size
    changed = [
        (tuple(longer if dim.name == error.name else size for dim, size in zip(spec.dims, shape)), dtype, spec)
        for shape, dtype, spec in arrays
    ]
    return changed, f"{error.name}={longer} in place of {size}"


def _twice_as_long(arrays, axes):
    """The arguments with twice as many elements, as often as needed, in each letter of which the check's own mesh
    leaves single elements on a device; and what was changed, in words: nothing, where that does not help."""
    sizes = {dim.name: size for shape, _, spec in arrays for dim, size in zip(spec.dims, shape) if dim.axes}
    before = dict(sizes)
    for _ in range(6):
        lengths = [tuple(sizes.get(dim.name, size) for dim, size in zip(spec.dims, shape)) for shape, _, spec in arrays]
        longer = [(shape, dtype, spec) for shape, (_, dtype, spec) in zip(lengths, arrays)]
        mesh = _small_meshes(axes, _split_dims(longer, axes))[0]
        short = {
            dim.name
            for shape, _, spec in longer
            for dim, size in zip(spec.dims, shape)
            if dim.axes and not dim.name.isdigit() and dim.name not in axes and size > 1
            if size < 2 * parts(dim, mesh) or any(mesh[axis] == 1 for axis in dim.axes)
        }
        if not short:
            changed = [
                f"{name}={size} in place of {before[name]}" for name, size in sizes.items() if size != before[name]
            ]
            return longer, ", ".join(changed)
        sizes |= {name: 2 * sizes[name] for name in short}
    return arrays, ""
