"""The operations that know how values lie on the mesh; what moves between devices is in the string.

    w = shardops.all_gather('M/d F/t -> M F/t', w)                               # split -> same over d
    y = shardops.einsum_unreduced('B/d L F/t, M F/t -> B/d L M +t', x, w)        # sends nothing: still a sum over t
    y = shardops.psum_scatter('B/d L M +t -> B/d L M/t', y)                      # takes the sum, keeps a part

docs/notation.md has the table of all, with what the gradient of each sends. Call them inside `typed_shard_map` (or
`jax.shard_map(..., check_vma=False)`). Each operation raises `ShardingError` if its string is not one for it or
contradicts the operands' sizes and, in the check, if an operand does not lie as the string says. The message has the
corrected string where one is likely, the line, the string, local and global shapes and the mesh.

"Sends" below says how many bytes leave one device, for an axis of n devices and an operand of x bytes on each of them,
in the type that is sent. An operation without that line sends nothing.

Each operation is a function of its plan: the plan reads the string, refuses one that is not for the operation, and
returns what runs on a device.
"""

import builtins
import dataclasses
import functools
import itertools
import math
import string as _strings
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.mesh import all_mapped_axes, mapped_axes, row_major
from shardlib.places import users_line
from shardlib.proof import claims, marks
from shardlib.proof.states import State, require
from shardlib.shardtypes import (
    StandIn,
    bind,
    known_size,
    letters_of_scope,
    mesh_text,
    remember,
    require_divisible,
)
from shardlib.spec import Dim, Recipe, ShardingError, Spec, as_text, expanded, located, parse, parse_operation, parts

SAVED = "save_for_backward"  # the name under which jax_extra.save_for_backward keeps a value


# -- From the string to what runs --------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of an operation with its string on one mesh.

    Attributes:
      run: `run(*operands, **options)` computes a device's part of the result from its parts of the operands.
      moves: the axes over which it sends.
      needs_all: every device of the mesh takes part, as XLA requires for a permutation along any axis.
      sizes: if it makes new dims, a function from the known dims' sizes to the new ones'; `run` then gets the
        result's `shape` on a device as well.
      rule: for the check, a function from the operands' states to the results', if the string does not say them.
      calls: `run` calls a function of the user's, which is local to a device.
      dtype: a function from the first operand's type to the result's, unless the caller chooses that.
    """

    run: Callable
    moves: tuple[str, ...] = ()
    needs_all: bool = False
    sizes: Callable | None = None
    rule: Callable | None = None
    calls: bool = False
    dtype: Callable = lambda dtype: dtype


def operate(plan, text, operands, options=None, *, sizes=None, results: int | None = 1, dtype=None):
    """Checks the string and the sizes, then runs the operation; in the check, marks it instead.

    Args:
      plan: `plan(recipe, axes) -> Plan` raises if the string is not one for the operation. It has the operation's name,
        or that with an underscore in front.
      options: keyword arguments of `Plan.run`.
      sizes: of dims that no operand has, in the whole array.
      results: how many the string must have; None, any number.
      dtype: the result's, where the caller chooses it.
    """
    name, axes, check = plan.__name__.lstrip("_"), mapped_axes(), marks.current()
    with located(lambda: f"  at {users_line()} in shardops.{name}"):
        text = as_text(text)
    where = functools.partial(_where, name, text, operands)
    with located(where):
        if check is not None and check.is_local:
            raise ShardingError("an operation with a string in a function that is local to a device: call it outside")
        operands = tuple(map(_numbers, operands))
        sizes = {name: _size(name, size) for name, size in (sizes or {}).items()}
        recipe, planned = _planned(plan, text, len(operands), results, tuple(axes.items()))
        shapes = _result_shapes(recipe, planned, operands, sizes, axes, text)
        options = {**(options or {}), **(dict(shape=shapes[0]) if planned.sizes else {})}
        if planned.calls:
            if marks.marking():  # on one device, whose part the function gets, nothing is sent
                alone = tuple(dict.fromkeys(axes, 1).items())
                _, planned = _planned(plan, text, len(operands), results, alone)
            planned = dataclasses.replace(planned, run=_declared(recipe, planned.run))
        if not marks.marking():
            return planned.run(*operands, **options)
        dtype = jnp.dtype(dtype or planned.dtype(jnp.result_type(operands[0])))
        made = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return claims.operation((plan.__name__, text), recipe, planned, operands, options, made, where)


def operation(plan):
    """The operation that a plan describes: a function of the string and the operands."""

    def operation(spec: str | bytes, *operands):
        return operate(plan, spec, operands)

    operation.__name__, operation.__doc__ = plan.__name__, plan.__doc__
    return operation


@functools.cache
def _planned(plan, text, operands, results, axes) -> tuple[Recipe, Plan]:
    name, axes = plan.__name__.lstrip("_"), dict(axes)
    if not axes:
        raise ShardingError("called outside of shard_map\n  fix: call it inside a function under typed_shard_map")
    if not operands and "->" in text:
        raise ShardingError("the call lacks the operands of the string")
    recipe = parse_operation(text, operands, results) if operands else Recipe((), (parse(text),))
    for spec in (*recipe.operands, *recipe.results):
        spec.require_mesh_order(tuple(axes))
        for dim in spec.dims:
            if dim.indexed and name not in ("index_unreduced", "ppermute", "ring"):
                raise ShardingError(f"[{dim.name}]: only index_unreduced, ppermute and ring mark a dim with [ ]")
            if dim.name == "..." and name != "sum_unreduced":
                raise ShardingError("'...' is for sum_unreduced alone: name the dims")
    return recipe, plan(recipe, axes)


def _numbers(x):
    x = jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x
    element = jnp.result_type(x)
    if jax.dtypes.issubdtype(element, jax.dtypes.extended):
        raise ShardingError(
            f"an operand of {element}: operations take numbers\n  fix: jax.random.key_data(key) has them"
        )
    if element in (jnp.int2, jnp.uint2):
        raise ShardingError(f"an operand of {element}, of which XLA sends and reduces none\n  fix: .astype(jnp.int8)")
    if 0 in jnp.shape(x):
        raise ShardingError(f"an operand without elements, {element}{marks.on_this_mesh(jnp.shape(x))}")
    return x


def _size(name, size) -> int:
    if isinstance(size, float | str) or int(size) < 0:
        raise ShardingError(f"{name}={size!r}: expected a whole number that is not below 0")
    return int(size)


def _result_shapes(recipe, planned, operands, sizes, axes, text) -> list[tuple]:
    """The shapes of the results on a device. Raises if sizes contradict the string or the scope's letters."""
    letters, known = letters_of_scope(), {}
    for spec, operand in zip(recipe.operands, operands):
        known |= zip(spec.names, bind(spec, jnp.shape(operand), axes, letters))
    known |= sizes
    if planned.sizes:
        known |= planned.sizes(known)

    def held(dim: Dim):
        size = known[dim.name] if dim.name in known else known_size(dim, axes, letters)[0]
        if size is None:
            fix = f"where the operation makes {dim.name} (zeros, local, regroup), say {dim.name}=..."
            raise ShardingError(f"no operand and no annotation here has the size of {dim.name}\n  fix: {fix}")
        require_divisible(dim, size, axes)
        remember(dim, size, axes, letters, text)
        return marks.part_of(size, dim, axes)

    return [tuple(map(held, spec.dims)) for spec in recipe.results]


def _where(name, text, operands) -> str:
    """The last line of an error: the user's line, the operation, what a device and the whole have, the mesh."""
    axes = all_mapped_axes()
    shapes = [marks.on_this_mesh(jnp.shape(operand)) for operand in operands]
    sizes = [f"{jnp.result_type(operand)}{shape}" for operand, shape in zip(operands, shapes)]
    held = f", local {', '.join(sizes)}" if sizes else ""
    try:
        specs = parse_operation(text, len(operands), None).operands
        pairs = [zip(spec.dims, shape, strict=True) for spec, shape in zip(specs, shapes)]
        held += ", global " + ", ".join(str([int(size) * parts(dim, axes) for dim, size in pair]) for pair in pairs)
    except (ShardingError, KeyError, ValueError):
        pass  # the string cannot be read, or names an axis that the mesh lacks: that is the error
    return f"  at {users_line()} in shardops.{name}('{text}'){held}, {mesh_text(axes)}"


def _declared(recipe, run):
    """`run`, which calls a function of the user's and must return what the string says."""
    specs = recipe.results

    def declared(*operands, **options):
        returned = run(*operands, **options)
        kind, is_several = type(returned).__name__, isinstance(returned, (tuple, list))
        if is_several != (len(specs) > 1) or (is_several and len(returned) != len(specs)):
            what = f"a {kind} of {len(returned)}" if is_several else kind
            raise ShardingError(f"the string has {len(specs)} results, the function returned {what}")
        for spec, value in zip(specs, returned if is_several else [returned]):
            bind(spec, jnp.shape(value), mapped_axes(), letters_of_scope())
        return returned

    return declared


# -- What the plans share ----------------------------------------------------------------------------------------------
def require_result(recipe: Recipe, dims, pending=(), why: str = ""):
    """Raises `ShardingError`, with the corrected string, if the result is of another type."""
    expected = Spec(tuple(dims), tuple(pending))
    if recipe.result != expected:
        operands = ", ".join(map(str, recipe.operands))
        fix = f"write '{operands} -> {expected}'"
        raise ShardingError(f"the result is '{expected}', not '{recipe.result}'{why}\n  fix: {fix}")


class _Change(typing.NamedTuple):
    """The effects of an operation that keeps the dims: (position, axes) of dims that lose or get minor axes; axes of
    sums that it takes or leaves."""

    gathers: list[tuple[int, tuple[str, ...]]]
    splits: list[tuple[int, tuple[str, ...]]]
    sums: list[str]
    terms: list[str]


def _change(recipe: Recipe, text: str, *does: str) -> _Change:
    """Raises `ShardingError` unless the string does what the operation `does`, of `_Change`; `text` says that."""
    (operand,), result, name = recipe.operands, recipe.result, text.split()[0]
    if operand.names != result.names:
        before, after = (" ".join(spec.names) or "none" for spec in (operand, result))
        raise ShardingError(f"{name} keeps the dims, {before}, but the result has {after}")
    gathers, splits = [], []
    for position, (before, after) in enumerate(zip(operand.dims, result.dims)):
        fewer, more = sorted((before, after), key=lambda dim: len(dim.axes))
        if more.axes[: len(fewer.axes)] != fewer.axes:
            fix, last = "", [axis for axis in more.axes if axis not in fewer.axes]
            if len(last) + len(fewer.axes) == len(more.axes):
                fix = f"\n  fix: split it as {'/'.join((more.name, *fewer.axes, *last))} where it is declared"
            why = f"{name} changes a dim's last axes only, whose parts are neighbours"
            raise ShardingError(f"{before} and {after}: {why}{fix}")
        if axes := more.axes[len(fewer.axes) :]:
            (gathers if more is before else splits).append((position, axes))
    sums = [axis for axis in operand.pending if axis not in result.pending]
    terms = [axis for axis in result.pending if axis not in operand.pending]
    change = _Change(gathers, splits, sums, terms)
    if len(does) == 1:
        fits = True
    elif gathers:  # one dim loses what one other gets
        fits = len(splits) == 1 and [axes for _, axes in gathers] == [axes for _, axes in splits]
    else:
        fits = sorted(sums) == sorted(axis for _, axes in splits for axis in axes)
    if not fits or {word for word, axes in change._asdict().items() if axes} != set(does):
        dims = result.dims if {"gathers", "splits"} & set(does) else operand.dims
        right = Spec(dims, result.pending if {"sums", "terms"} & set(does) else operand.pending)
        fix = f"\n  fix: write '{operand} -> {right}'" if right not in (operand, result) else ""
        raise ShardingError(f"{text}: not '{operand} -> {result}'{fix}")
    return change


def _reduced(recipe: Recipe, what: str) -> tuple[list[Dim], tuple[int, ...], tuple[str, ...]]:
    """The dims that the result of a reduction keeps, the positions of the others, and the axes that split those."""
    (operand,), result = recipe.operands, recipe.result
    kept = [dim for dim in operand.dims if dim.name in result.names]
    dropped = [position for position, dim in enumerate(operand.dims) if dim.name not in result.names]
    if not dropped:
        raise ShardingError(f"the result lacks no dim: the {what} over what?")
    return kept, tuple(dropped), tuple(axis for position in dropped for axis in operand.dims[position].axes)


def _ordered(names, axes) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in names)


def _wide(names, axes) -> tuple[str, ...]:
    """The axes of more than one device: along others nothing is sent, but XLA:CPU would copy and widen bfloat16."""
    return tuple(name for name in names if axes[name] > 1)


def _sent(dims, axes) -> list[tuple[int, tuple[str, ...]]]:
    """Positions of dims with the axes over which they are sent."""
    return [(position, names) for position, split in dims if (names := _wide(split, axes))]


def _gather(x, names, position: int):
    """The devices' parts next to each other along a dim. They travel as they lie in memory, one after another: a gather
    along a minor dim would make XLA lay out its result by that dim, and transpose the elements before and after."""
    parts = jnp.moveaxis(lax.all_gather(x, names), 0, position)
    return parts.reshape(*x.shape[:position], -1, *x.shape[position + 1 :])


def _scatter(x, names, position: int):
    """The sum over the devices, to each its part of a dim; the transpose of `_gather`. Each part lies in one piece:
    where XLA:TPU lays them out within each other, it has to send the whole sum to every device."""
    devices = math.prod(lax.axis_size(name) for name in names)
    parts = x.reshape(*x.shape[:position], devices, -1, *x.shape[position + 1 :])
    return lax.psum_scatter(row_major(jnp.moveaxis(parts, position, 0)), names)


def axis_size(name: str) -> int:
    """The number of devices along a mesh axis, or along all axes of a group. Raises `ShardingError` for an axis that
    the mesh lacks, or outside of shard_map."""
    names = expanded([name])
    _require_axes(name, names)
    return claims.count(names) if marks.marking() else math.prod(mapped_axes()[axis] for axis in names)


def _require_axes(name: str, axes):
    if not set(axes) <= set(mapped_axes()):
        raise ShardingError(f"'{name}': the {mesh_text(all_mapped_axes())} has no such axis here\n  at {users_line()}")
    if (check := marks.current()) is not None and check.is_local:
        what = f"a function that is local to a device asks for the devices along {name}, or its index there"
        raise ShardingError(f"{what}\n  fix: pass it as an operand\n  at {users_line()}")


def index(name: str):
    """Each device's index along a mesh axis, i32['d/d']: on the whole, jnp.arange(axis_size('d')). Sends nothing."""
    _require_axes(name, [name])
    return slice(f"{name} -> {name}/{name}", jnp.arange(mapped_axes()[name], dtype=jnp.int32))


# -- split -> same -----------------------------------------------------------------------------------------------------
def all_gather(spec: str | bytes, x, *, dtype=None, reduce_dtype=None, sent_as=None):
    """Gathers the parts of the dims that lose an axis: split -> same.

        all_gather('M/d F/t -> M F/t', w)
        all_gather('M/d/t -> M', w)                                   one collective over both
        all_gather('M/d F/t -> M F/t', w, dtype=bf16, reduce_dtype=f32)

    Args:
      dtype: cast to this before sending; the result has it.
      reduce_dtype: the gradient is cast to this float type before its reduction, then to the operand's. With a cast by
        hand before the gather, the gradient's reduction would run in the gathered type.
      sent_as: rounded to this float type on the way, and only there.
    Sends: (n - 1) x bytes in `sent_as` or `dtype`; in the backward pass a reduce-scatter of (n - 1) x bytes in
    `reduce_dtype`. Where x stands for a matrix (`products`), its typed field is sent; of `Float8`, 1 byte an element.
    """
    options = dict(dtype=dtype, reduce_dtype=reduce_dtype, sent_as=sent_as)
    if isinstance(x, StandIn):
        return x.map(lambda values: all_gather(spec, values, **{**options, "sent_as": sent_as or x.sent_as}))
    return operate(_all_gather, spec, (x,), options, dtype=dtype)


def _all_gather(recipe, axes):
    gathered = _change(recipe, "all_gather gathers dims, as in 'M/d F/t -> M F/t'", "gathers").gathers
    sent = _sent(gathered, axes)

    def run(x, dtype, reduce_dtype, sent_as):
        held, out = x.dtype, jnp.dtype(dtype or x.dtype)
        wire, reduced = jnp.dtype(sent_as or out), jnp.dtype(reduce_dtype or out)

        def gather(x):
            x = x.astype(wire)
            if sent_as is not None:  # sent as bits: XLA:CPU would send 8-bit floats as 16-bit ones
                x = lax.bitcast_convert_type(x, f"uint{8 * wire.itemsize}")
            for position, names in sent:
                x = _gather(x, names, position)
            return (x if sent_as is None else lax.bitcast_convert_type(x, wire)).astype(out)

        def backward(_, cotangent):
            cotangent = cotangent.astype(reduced)
            for position, names in reversed(sent):
                cotangent = _scatter(cotangent, names, position)
            return (cotangent.astype(held),)

        if wire == out == reduced == held:
            return gather(x)  # JAX's own transpose is the reduce-scatter
        gather_cast = jax.custom_vjp(gather)
        gather_cast.defvjp(lambda x: (gather(x), None), backward)
        return gather_cast(x)

    return Plan(run, moves=tuple(axis for _, names in gathered for axis in names))


@operation
def pmax(recipe, axes):
    """The largest over the dims that the result lacks, over all devices: split -> same. No gradient: stop it first.

        pmax('B/d L V/t -> B/d L', lax.stop_gradient(logits))

    NaN: XLA's all-reduce may lose one (seen on the CPU, jaxlib 0.10.2); any('... -> ', jnp.isnan(x)) finds it.
    Sends: an all-reduce of the result, about 2 (n - 1) / n of its bytes; nothing if the dims that it lacks are whole.
    """
    largest, spec = _largest(recipe, axes, jnp.max), f"{recipe.operands[0]} -> {recipe.result}"

    def run(x):
        line = users_line()

        def refuse(primals, tangents):
            what = "pmax has no gradient: pass it lax.stop_gradient(x)"
            raise ShardingError(f"{what}\n  at {line} in shardops.pmax('{spec}')")

        undifferentiated = jax.custom_jvp(lambda x: x)
        undifferentiated.defjvp(refuse)
        return largest.run(undifferentiated(x))

    return Plan(run, largest.moves, dtype=_with_an_order)


def _with_an_order(dtype):
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.issubdtype(dtype, jax.dtypes.extended):
        raise ShardingError(f"values of {dtype} have no order, and so no largest one")
    return dtype


def _largest(recipe, axes, largest):
    kept, dropped, split = _reduced(recipe, "largest")
    if recipe.operands[0].pending:
        raise ShardingError("the largest of a sum is not the largest of its terms: reduce the pending axes first")
    require_result(recipe, kept)
    moves = _ordered(split, axes)
    names = _wide(moves, axes)

    def run(x):
        x = largest(x, axis=dropped)
        return lax.pmax(x, names) if names else x

    return Plan(run, moves)


@operation
def argmax(recipe, axes):
    """The index, in the whole array, of the largest along the one dim that the result lacks, over all devices: split ->
    same. The first of equal ones; NaN counts as infinity. No gradient.

        argmax('B/d L V/t -> B/d L', logits)

    Sends: two all-reduces of the result, 4 bytes an element: the largest, and the smallest index that has it.
    """
    moves = _largest(recipe, axes, jnp.max).moves
    _, (dim, *others), split = _reduced(recipe, "largest")
    if others:
        raise ShardingError("argmax goes along one dim, as in 'B/d L V/t -> B/d L'")
    names = _wide(split, axes)

    def run(x):
        x, size = lax.stop_gradient(x), x.shape[dim]
        x = jnp.where(jnp.isnan(x), jnp.inf, x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        first = lax.axis_index(names) * size if names else 0
        largest, place = jnp.max(x, axis=dim), jnp.argmax(x, axis=dim).astype(jnp.int32) + first
        if not names:
            return place
        is_here = largest == lax.pmax(largest, names)
        return lax.pmin(jnp.where(is_here, place, jnp.iinfo(jnp.int32).max), names)

    return Plan(run, moves, dtype=lambda dtype: _with_an_order(dtype) and jnp.int32)


@operation
def any(recipe, axes):
    """Whether any element is true, over the dims that the result lacks and over all devices: split -> same.

        any('B/d L -> ', ~jnp.isfinite(x))

    Sends: an all-reduce of the result, 4 bytes an element.
    """
    largest = _largest(recipe, axes, lambda x, axis: jnp.any(x, axis=axis).astype(jnp.int32))
    return Plan(lambda x: largest.run(x).astype(bool), largest.moves, dtype=lambda dtype: jnp.bool_)


# -- pending -> split, pending -> same ---------------------------------------------------------------------------------
@operation
def psum_scatter(recipe, axes):
    """Takes the sum over the pending axes and leaves each device its part: pending -> split.

        psum_scatter('B/d L M +t -> B/d L M/t', y)

    Sends: (n - 1) / n of x bytes; in the backward pass an all-gather of as much.
    """
    change = _change(
        recipe, "psum_scatter takes a sum and splits a dim over its axes, as in 'B M +t -> B M/t'", "sums", "splits"
    )

    def run(x):
        for position, names in _sent(change.splits, axes):
            x = _scatter(x, names, position)
        return x

    return Plan(run, change.sums)


@operation
def psum(recipe, axes):
    """Takes the sum over the pending axes that the result lacks: pending -> same.

        psum('B/d L +t -> B/d L', total)

    Sends: 2 (n - 1) / n of x bytes; as much in the backward pass.
    """
    sums = _change(recipe, "psum takes a sum, as in 'B/d L +t -> B/d L'", "sums").sums
    names = _wide(sums, axes)
    return Plan(lambda x: lax.psum(x, names) if names else x, sums)


# -- split -> split ----------------------------------------------------------------------------------------------------
@operation
def all_to_all(recipe, axes):
    """Moves a split from one dim to another.

        all_to_all('E/t C M -> E C/t M', x)

    Sends: (n - 1) / n of x bytes; as much in the backward pass.
    """
    change = _change(
        recipe, "all_to_all moves axes from one dim to one other, as in 'E/t C M -> E C/t M'", "gathers", "splits"
    )
    ((loses, moves),), ((gains, _),) = change.gathers, change.splits
    names = _wide(moves, axes)

    def run(x):
        return lax.all_to_all(x, names, split_axis=gains, concat_axis=loses, tiled=True) if names else x

    return Plan(run, moves)


def ppermute(spec: str | bytes, x, shift: int):
    """Rolls a dim that counts an axis' devices: the device at index i sends its part to i + shift, around the end.

        ppermute('c/c B/d l M -> c/c B/d l M', x, 1)
        ppermute('[c/c] B/d l -> [c/c] B/d l', x, 1)     where several dims do, [ ] says which one moves

    `regroup('B/d L/c -> B/d c/c l', x)` makes such a dim of each device's part.
    Sends: x bytes; as much in the backward pass.
    """
    if isinstance(shift, jax.Array) or not hasattr(shift, "__index__"):
        raise ShardingError(f"ppermute: shift is a plain int, not {shift!r}\n  at {users_line()}")
    return operate(_ppermute, spec, (x,), dict(shift=shift))


def _ppermute(recipe, axes):
    (operand,) = recipe.operands
    require_result(recipe, operand.dims, operand.pending)
    moving = [dim for dim in operand.dims if dim.indexed] or [dim for dim in operand.dims if dim.axes == (dim.name,)]
    if len(moving) != 1 or moving[0].axes != (moving[0].name,):
        split = next((axis for dim in operand.dims for axis in dim.axes), next(iter(axes)))
        fix = f"shardops.regroup('L/{split} -> {split}/{split} l', x) makes one; of several, mark it with [ ]"
        raise ShardingError(f"ppermute rolls one dim that counts an axis' devices, '{split}/{split}'\n  fix: {fix}")
    (axis,) = moving[0].axes
    count = axes[axis]

    def run(x, shift):
        return lax.ppermute(x, axis, [(at, (at + shift) % count) for at in range(count)]) if count > 1 else x

    return Plan(run, moves=(axis,), needs_all=True)


# -- Nothing is sent ---------------------------------------------------------------------------------------------------
def einsum_unreduced(
    spec: str | bytes, x, y, *, precision=None, preferred_element_type=None, rounded_to=None, x_is_thin: bool = False
):
    """`jnp.einsum` of two operands. A contraction over a dim that is split over t leaves the result pending, '+t'.

        einsum_unreduced('B/d L F/t, M F/t -> B/d L M +t', h, w_down)

    Args:
      rounded_to: both operands are, to floats, for the product alone; the gradient's products are of the operands as
        they are.
      x_is_thin: y's gradient is computed as x · gradient, not, as JAX does, as gradient · x: of the two XLA:CPU
        transposes the first, and computes anew what was fused into it.
      precision, preferred_element_type: of jnp.einsum. With preferred_element_type=float32 of bfloat16 operands the
        sums stay in float32; the gradient's products are in bfloat16 too (JAX would take the result's gradient in
        float32, and multiply at the rate of that). An operand that is not differentiated costs no product.
    """
    how = dict(precision=precision, preferred_element_type=preferred_element_type)
    options = dict(rounded_to=rounded_to, x_is_thin=x_is_thin, how=how)
    dtype = preferred_element_type or rounded_to or jnp.result_type(x, y)
    return operate(_einsum_unreduced, spec, (x, y), options, dtype=dtype)


def _einsum_unreduced(recipe, axes):
    equation = _equation(recipe, axes)
    words, result = equation.split("->")[0].split(","), equation.split("->")[1]
    first, second = recipe.operands
    # Devices along axes that split no operand multiply alike: of their products the model needs one.
    alike = math.prod(size for axis, size in axes.items() if axis not in first.split | second.split)

    def run(x, y, rounded_to, x_is_thin, how):
        def product(x, y):
            if rounded_to is not None:
                x, y = x.astype(rounded_to), y.astype(rounded_to)
            return jnp.einsum(equation, x, y, **how)

        as_they_are = rounded_to is None and (how["preferred_element_type"] or x.dtype) == x.dtype
        if (x.dtype != y.dtype or as_they_are) and not x_is_thin:
            return product(x, y)

        def transposed(multiply, like, cotangent):
            return jax.linear_transpose(multiply, jax.ShapeDtypeStruct(like.shape, cotangent.dtype))(cotangent)[0]

        # The gradient of a frozen operand is not computed, and what only it would need is not kept.
        def forward(x, y):
            return product(x.value, y.value), (x.value if y.perturbed else None, y.value if x.perturbed else None)

        def backward(kept, cotangent):
            (kept_x, kept_y), cotangent, by_x, by_y = kept, cotangent.astype(x.dtype), None, None
            if kept_y is not None:
                by_x = transposed(lambda x: jnp.einsum(equation, x, kept_y), x, cotangent)
            if kept_x is not None and x_is_thin:
                by_y = jnp.einsum(f"{words[0]},{result}->{words[1]}", kept_x, cotangent)
            elif kept_x is not None:
                by_y = transposed(lambda y: jnp.einsum(equation, kept_x, y), y, cotangent)
            return by_x, by_y

        differentiated = jax.custom_vjp(product)
        differentiated.defvjp(forward, backward, symbolic_zeros=True)
        return differentiated(x, y)

    return Plan(run if alike == 1 else jax.named_scope(f"busy=1:{alike}")(run))  # the scope is for the ledger


def _equation(recipe, axes) -> str:
    """A product's equation for `jnp.einsum`; raises where devices' products are no parts, or terms, of the whole."""
    first, second = recipe.operands
    require_once(*recipe.operands)
    lies = require_same_parts(recipe)
    require_once(recipe.result)
    for one, other in ((first, second), (second, first)):
        for axis in one.pending:
            if axis in other.split or axis in other.pending:
                raise ShardingError(f"'{one}' is pending over {axis}, '{other}' not the same along it: reduce it first")
    if unknown := [name for name in recipe.result.names if name not in lies]:
        raise ShardingError(f"dim {unknown[0]} of the result is in no operand")
    dims = tuple(lies[name] for name in recipe.result.names)
    contracted = {axis for name, dim in lies.items() if name not in recipe.result.names for axis in dim.axes}
    pending = _ordered({*contracted, *first.pending, *second.pending}, axes)
    split = [axis for dim in lies.values() for axis in dim.axes]
    for axis in split:
        if split.count(axis) > 1:
            dims = " and ".join(str(dim) for dim in lies.values() if axis in dim.axes)
            raise ShardingError(f"two dims are split over {axis}, {dims}: gather one of them first")
    is_forgotten = contracted - set(recipe.result.pending)
    sums = f": the contraction leaves a sum over {', '.join(sorted(contracted))}" if is_forgotten else ""
    require_result(recipe, dims, pending, sums)
    letter = dict(zip(lies, _strings.ascii_letters))
    x, y, out = ("".join(letter[name] for name in spec.names) for spec in (first, second, recipe.result))
    return f"{x},{y}->{out}"


def require_once(*arrays: Spec) -> None:
    """Raises where a name stands twice in one of them."""
    for array in arrays:
        for name in array.names:
            if array.names.count(name) > 1:
                raise ShardingError(f"dim {name} stands twice in '{array}'")


def require_same_parts(recipe: Recipe) -> dict[str, Dim]:
    """All operands' dims by name; raises where two operands are split over different axes along one."""
    lies: dict[str, Dim] = {}
    for dim in (dim for operand in recipe.operands for dim in operand.dims):
        if lies.setdefault(dim.name, dim).axes != dim.axes:
            raise ShardingError(f"{lies[dim.name]} in one operand, {dim} in the other: the devices' parts do not match")
    return lies


@operation
def sum_unreduced(recipe, axes):
    """Sums over the dims that the result lacks; a split one leaves its axes pending.

        sum_unreduced('B/d L V/t -> B/d L +t', e)
        sum_unreduced('... -> +d +t', g * g)

    '...' stands for any dims, which must be split over just d and t.
    """
    (operand,), result = recipe.operands, recipe.result
    if "..." not in operand.names:
        kept, dropped, split = _reduced(recipe, "sum")
        require_result(recipe, kept, _ordered({*split, *operand.pending}, axes))
        return Plan(lambda x: jnp.sum(x, axis=dropped), dtype=_dtype_of_sum)
    if operand.names != ("...",) or result.dims:
        raise ShardingError("'...' stands for all dims, and all are summed: '... -> +d +t'")

    def rule(states):
        (state,) = states
        lies = Spec(tuple(Dim("_", split) for split in state.dims), operand.pending)
        require(lies, state)
        require_result(recipe, (), _ordered({*lies.split, *lies.pending}, axes), f": '...' lies as '{lies}'")
        return [State.of(result)]

    return Plan(jnp.sum, rule=rule, dtype=_dtype_of_sum)


def _dtype_of_sum(dtype):
    """JAX sums truth values and small integers in 32 bits."""
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


@operation
def index_unreduced(recipe, axes):
    """Looks rows up in a table whose indexed dim, in [ ], may be split: a device gives zero for the rows that it does
    not hold.

        index_unreduced('[V/t] M, B/d L -> B/d L M +t', embed, ids)
        index_unreduced('B/d L [V/t], B/d L -> B/d L +t', logits, targets)      a table for each index: its dims

    Indices outside of the dim give zero. The gradient of a table whose rows are looked up adds up in float32 and then
    takes the table's type: of a row that is looked up thousands of times, bfloat16 would add only the first hundreds of
    terms.
    """
    table, indices = recipe.operands
    marked = [position for position, dim in enumerate(table.dims) if dim.indexed]
    if len(marked) != 1 or builtins.any(dim.indexed for dim in (*indices.dims, *recipe.result.dims)):
        raise ShardingError("the table's indexed dim alone stands in [ ], as in '[V/t] M, B/d L -> B/d L M +t'")
    if table.pending or indices.pending:
        raise ShardingError("a pending table or index: reduce it first")
    (position,) = marked
    names = table.dims[position].axes
    others = (*table.dims[:position], *table.dims[position + 1 :])
    is_table_each = others == indices.dims  # a table for each index
    if not is_table_each and (clash := set(indices.split) & table.split):
        over = ", ".join(sorted(clash))
        raise ShardingError(f"table and indices are both split over {over}: gather one of them first")
    if not is_table_each and (both := set(indices.names) & set(table.names)):
        dims = ", ".join(sorted(both))
        raise ShardingError(f"table and indices share {dims}: all dims but the indexed one are the indices', or none")
    require_result(recipe, indices.dims if is_table_each else (*indices.dims, *others), _ordered(names, axes))

    def run(table, indices):
        count = table.shape[position]
        first = lax.axis_index(names) * count if names else 0
        local = indices.astype(jnp.int32) - first
        if is_table_each:
            # A sum over one-hot rows: its transpose is a product, where a gather's would be a slow scatter.
            one_hot = lax.broadcasted_iota(jnp.int32, table.shape, position) == jnp.expand_dims(local, position)
            return jnp.sum(jnp.where(one_hot, table, jnp.zeros((), table.dtype)), axis=position, dtype=table.dtype)
        is_held = (local >= 0) & (local < count)
        rows = _rows(jnp.moveaxis(table, position, 0), jnp.where(is_held, local, 0))
        is_held = is_held.reshape(is_held.shape + (1,) * (rows.ndim - is_held.ndim))
        return jnp.where(is_held, rows, jnp.zeros((), rows.dtype))

    return Plan(run)


def _rows(table, indices):
    """table[indices], whose gradient adds up in float32."""

    def gradient_of_table(indices, gradient):
        # XLA would make this zero together with others, long before it is needed: it waits for the gradient.
        wide = table.dtype if table.dtype == jnp.float64 else jnp.float32
        zero, gradient = lax.optimization_barrier((jnp.zeros((), wide), gradient))
        total = jnp.full(table.shape, zero).at[indices].add(gradient.astype(wide))
        return total.astype(table.dtype), None

    rows = jax.custom_vjp(lambda table, indices: jnp.take(table, indices, axis=0))
    rows.defvjp(lambda table, indices: (jnp.take(table, indices, axis=0), indices), gradient_of_table)
    return rows(table, indices)


@operation
def slice(recipe, axes):
    """Each device keeps its part: same -> split, as in slice('M -> M/t', scale)."""
    splits = _change(recipe, "slice splits dims, as in 'M -> M/t'", "splits").splits

    def run(x):
        for position, names in _sent(splits, axes):
            size = x.shape[position] // math.prod(axes[name] for name in names)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, position)
        return x

    return Plan(run)


def regroup(spec: str | bytes, x, **sizes: int):
    """Reshapes each device's part by itself, where the order that this gives the whole array is meant to depend on the
    mesh: rows into microbatches, a part into a dim that counts devices.

        regroup('B/d L -> parts R/d L', x, parts=4)      each microbatch has rows of every device
        regroup('parts R/d L -> B/d L', x)               its inverse
        regroup('B/d L/c -> B/d c/c l', x)               one block a device

    Neighbouring dims become others, split over the same axes; the dims before and after them stay. One size may be left
    out. The transpose is the inverse.
    """
    return operate(_regroup, spec, (x,), sizes=sizes)


def _regroup(recipe, axes):
    (operand,), result = recipe.operands, recipe.result
    require_result(recipe, result.dims, operand.pending)
    front = _in_common(operand.dims, result.dims)
    old, new = operand.dims[front:], result.dims[front:]
    if end := _in_common(old[::-1], new[::-1]):
        old, new = old[:-end], new[:-end]
    were, are = " ".join(map(str, old)) or "nothing", " ".join(map(str, new)) or "nothing"
    if not (old or new) or {dim.name for dim in old} & {dim.name for dim in new}:
        what = "regroup makes other dims of neighbours, as in 'B/d L -> parts R/d L'"
        raise ShardingError(f"{what}, not '{result}' of '{operand}'")
    if lost := {axis for dim in old for axis in dim.axes} ^ {axis for dim in new for axis in dim.axes}:
        over = ", ".join(sorted(lost))
        raise ShardingError(f"{were} and {are} are split over different axes ({over}): regroup sends nothing")

    def sizes(known):
        known = {dim.name: known.get(dim.name, known_size(dim, axes, {})[0]) for dim in (*old, *new)}
        left_out = [dim for dim in new if known[dim.name] is None]

        def elements(dims):
            for dim in dims:
                require_divisible(dim, known[dim.name], axes)
            return math.prod(known[dim.name] // parts(dim, axes) for dim in dims)

        if len(left_out) > 1:
            raise ShardingError(f"say all sizes of {are} but one, as in {left_out[0].name}=...")
        have, rest = elements(old), elements([dim for dim in new if dim not in left_out])
        if have % rest or (not left_out and have != rest):
            multiple = "a multiple of " if left_out else ""
            raise ShardingError(f"{were} to {are}: a device's {have} elements are not {multiple}{rest}")
        return {dim.name: have // rest * parts(dim, axes) for dim in left_out}

    return Plan(lambda x, shape: x.reshape(shape), sizes=sizes)


def _in_common(dims, others) -> int:
    """How many dims two types have in common at the front."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(dims, others))))


@operation
def pending(recipe, axes):
    """One term of a sum of what is the same, 'X -> X +t': the axes' first device keeps it, others hold zero."""
    names = _wide(_change(recipe, "pending makes one term of a sum, as in 'M -> M +t'", "terms").terms, axes)

    def run(x):
        return jnp.where(lax.axis_index(names) == 0, x, jnp.zeros((), x.dtype)) if names else x

    return Plan(run)


def zeros(spec: str | bytes, dtype, **sizes: int):
    """Zeros of that type, pending ones too (a scan's first carry). Sizes are the scope's letters, or given, of the
    whole: zeros('M/d', f32, M=512)."""
    return operate(_zeros, spec, (), dict(dtype=jnp.dtype(dtype)), sizes=sizes, dtype=dtype)


def _zeros(recipe, axes):
    return Plan(jnp.zeros, sizes=lambda known: {})


def local(spec: str | bytes, function, *operands, **sizes: int):
    """Runs a device-local function, a kernel, of a declared type; the check sees only the types.

        local('B/d L Q K/t D, B/d S K/t D -> B/d L Q K/t D', attend, q, k)
        local('B/d L E -> B/d L X, B/d L X', choose, scores, X=2)      several results; X is new

    Args:
      sizes: of dims that no operand has, in the whole array.
    Proved: operands lie as the string says, the results differ along the same axes as they do, and the function sends
    nothing and takes no other value that is split. Not proved: that it treats split dims part by part, and is linear in
    what is pending.
    """
    return operate(_local, spec, operands, dict(function=function), sizes=sizes, results=None)


def _local(recipe, axes):
    require_local(recipe, axes)
    return Plan(lambda *operands, function: function(*operands), calls=True)


def require_local(recipe: Recipe, axes):
    """Raises `ShardingError` for a string that no function can satisfy which is local to a device."""
    for axis in axes:
        split = builtins.any(axis in operand.split for operand in recipe.operands)
        is_pending = builtins.any(axis in operand.pending for operand in recipe.operands)
        for result in recipe.results:
            differs = axis in result.split or axis in result.pending
            if is_pending and (split or axis not in result.pending):
                other = "another is split over it" if split else "the result is not"
                raise ShardingError(f"an operand is pending over {axis} and {other}: reduce it first")
            if split and not differs:
                raise ShardingError(
                    f"an operand differs along {axis}, the result does not: a local function sends nothing"
                )
            if differs and not split and not is_pending:
                raise ShardingError(f"operands and result are the same along {axis}: a local function knows no index")


def each(axis: str, function, *trees):
    """Runs a function on each device along an axis by itself, as if the mesh did not have that axis.

        y = each('p', stage, w, x)      # f32['p/p M F/t'], f32['p/p B/d M']; inside of stage f32['M F/t'], f32['B/d M']

    The values' first dim, 'p/p', is not there inside, and the results get it. What the function takes from around it
    is the same along the axis, or one device's own. Sends nothing over it.

    Raises:
      ShardingError: for a value whose first dim does not count the axis' devices; in the check, for a result that is
        pending over the axis.
    """
    _require_axes(axis, [axis])
    where = f"  at {users_line()} in shardops.each('{axis}'), {mesh_text(all_mapped_axes())}"

    def marked(rule, function, x):
        if marks.marking() is None:
            return function(x)
        rule = functools.partial(rule, axis)
        return marks.mark(("each", axis), rule, jax.eval_shape(function, x), x, where=where)

    def enter(x):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] != 1:
            shape = marks.on_this_mesh(jnp.shape(x))
            raise ShardingError(f"the first dim is one element a device, '{axis}/{axis} ...', not {shape}\n{where}")
        return marked(claims.without_dim, functools.partial(jnp.squeeze, axis=0), x)

    operands = jax.tree.map(enter, trees)
    with marks.on_each(axis):
        results = function(*operands)
    return jax.tree.map(functools.partial(marked, claims.with_dim, lambda y: y[None]), results)


# -- Gradients ---------------------------------------------------------------------------------------------------------
def vjp(function, *args, has_aux: bool = False):
    """`jax.vjp`: the result, and a function from its cotangent to the arguments' gradients. Each has the type of its
    value with same and pending exchanged: for 'B/d M' on axes d, t it is 'B/d M +t'. has_aux: the function returns
    something else after its result, which has no gradient and comes third.

        y, pull = shardops.vjp(stage, w, x)
        gradient_of_w, gradient_of_x = pull(gradient_of_y)

    Raises:
      ShardingError: in the check, for a cotangent of another type.
    """
    return _vjp("vjp", function, args, has_aux)


def _vjp(name, function, args, has_aux):
    if marks.marking() is None:
        return jax.vjp(function, *args, has_aux=has_aux)
    result, *aux = function(*args) if has_aux else (function(*args),)
    return result, claims.pullback(name, args, result), *aux


def value_and_grad(function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False):
    """`jax.value_and_grad` of a loss whose every mesh axis is pending, '+d +t'. Each gradient has the type of its
    weight with same and pending exchanged, as of `vjp`.

    Raises:
      ShardingError: for a loss that is no float scalar; in the check, for one that is the same along an axis (it would
        count once for each device).
    """

    @functools.wraps(function)
    def differentiate(*args):
        indices = (argnums,) if isinstance(argnums, int) else argnums
        chosen = [index % len(args) for index in indices if -len(args) <= index < len(args)]
        if len(set(chosen)) < len(indices):
            what = f"argnums={argnums}: expected numbers of different arguments, of {len(args)}"
            raise ShardingError(f"{what}\n  at {users_line()} in shardops.value_and_grad")

        def of_weights(*weights):
            weights = dict(zip(chosen, weights))
            return function(*(weights.get(index, arg) for index, arg in enumerate(args)))

        loss, pull, *aux = _vjp("value_and_grad", of_weights, tuple(args[index] for index in chosen), has_aux)
        if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            what = f"the loss must be a scalar of a float type, it is {jnp.result_type(loss)}{list(jnp.shape(loss))}"
            raise ShardingError(f"{what}\n  at {users_line()} in shardops.value_and_grad")
        gradients = pull(jnp.ones_like(loss))
        return ((loss, *aux) if has_aux else loss), (gradients[0] if isinstance(argnums, int) else gradients)

    return differentiate


def grad(function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False):
    """`jax.grad` of such a loss; see `value_and_grad`."""

    def differentiate(*args):
        value, gradients = value_and_grad(function, argnums, has_aux)(*args)
        return (gradients, value[1]) if has_aux else gradients

    return differentiate


def sum_over_chunks(function, shared, x, others):
    """The sum of `function(shared, x[i], others[i])`, scalar losses '+d +t', over the leading dim; each chunk's
    gradient is computed in the same scan, right after its loss.

        total = sum_over_chunks(chunk_loss, unembed, hidden, batch)

    So values made inside are neither kept nor recomputed: the gradient of `x` is kept until the backward pass instead
    of `x`, and the gradient of `shared` is summed in its own type (Hsu et al. 2024, section 3.2, with rows as chunks).

    Args:
      shared: an array or a tree of them, the same for each chunk; differentiated, but for what is frozen.
      x: an array with a leading dim of chunks; differentiated.
      others: tree of arrays with the same leading dim; not differentiated.
    Sends: what `function` sends.
    """
    line = users_line()

    def total(shared, x, others):
        start = zeros(str(Spec((), tuple(mapped_axes()))), jnp.float32)
        return lax.scan(lambda sum, chunk: (sum + function(shared, *chunk), None), start, (x, others))[0]

    if marks.marking():
        return total(shared, x, others)

    def with_gradient(shared, x, others):
        if builtins.any(leaf.perturbed for leaf in jax.tree.leaves(others)):
            what = "what stands in `others` is differentiated: its gradient would be zero"
            raise ShardingError(f"{what}\n  fix: pass it in `shared` or `x`\n  at {line} in shardops.sum_over_chunks")
        leaves, structure = jax.tree.flatten(shared)
        trained = {index: leaf.value for index, leaf in enumerate(leaves) if leaf.perturbed}

        def loss(trained, x, others):
            values = [trained.get(index, leaf.value) for index, leaf in enumerate(leaves)]
            return function(jax.tree.unflatten(structure, values), x, others)

        def add(sums, chunk):
            value, (by_shared, by_x) = jax.value_and_grad(loss, (0, 1))(trained, *chunk)
            return jax.tree.map(jnp.add, sums, (value, by_shared)), by_x

        start = jnp.float32(0), jax.tree.map(jnp.zeros_like, trained)
        chunks = x.value, jax.tree.map(lambda leaf: leaf.value, others)
        (value, by_shared), by_x = lax.scan(add, start, chunks)
        return value, (jax.tree.unflatten(structure, map(by_shared.get, range(len(leaves)))), by_x)

    def backward(kept, gradient):
        return *jax.tree.map(lambda leaf: (gradient * leaf.astype(jnp.float32)).astype(leaf.dtype), kept), None

    # Values that the function closes over are differentiated too: they join the shared ones.
    first_chunk = jax.tree.map(lambda leaf: leaf[0], (x, others))
    converted, closed_over = jax.closure_convert(function, shared, *first_chunk)
    function = lambda both, x, others: converted(both[0], x, others, *both[1])  # noqa: E731
    differentiated = jax.custom_vjp(total)
    differentiated.defvjp(with_gradient, backward, symbolic_zeros=True)
    return differentiated((shared, closed_over), x, others)
