"""The operations that know how values lie on the mesh; what moves between devices is in the string.

    w = shardops.all_gather('M/d F/t -> M F/t', w)                               # split -> same over d
    y = shardops.einsum_unreduced('B/d L F/t, M F/t -> B/d L M +t', x, w)        # sends nothing: still a sum over t
    y = shardops.psum_scatter('B/d L M +t -> B/d L M/t', y)                      # takes the sum, keeps a part

All are called inside `typed_shard_map` (or `jax.shard_map(..., check_vma=False)`). A dim that is named like a mesh axis
counts that axis' devices: 'c/c' has one element on each. Each raises `ShardingError`, with
the operation, its string, local and global shapes, the mesh and, where one is likely, the corrected string, if the
string is not one for the operation or contradicts the operands' sizes; and, in the check, if an operand does not lie as
the string says.

The gradient's type is the value's with *same* and *pending* exchanged, so the backward pass sends, line by line:
all_gather <-> reduce-scatter, psum <-> psum, all_to_all and ppermute their reverses, the others nothing.

"Bytes" below are those that leave one device, for an axis of n devices and x bytes on each device before the operation.
"""

import builtins
import dataclasses
import functools
import math
import string as _strings

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.mesh import row_major
from shardlib.places import unbound, users_line
from shardlib.proof import marks
from shardlib.proof.parts import Count, is_part
from shardlib.proof.states import State, dual, require, require_dual
from shardlib.shardtypes import (
    DType,
    StandIn,
    all_mapped_axes,
    bind,
    devices_of,
    letters_of_scope,
    mapped_axes,
    mesh_text,
    on_this_mesh,
    part_of,
    remember,
    require_divisible,
)
from shardlib.spec import Dim, Recipe, ShardingError, Spec, as_text, parse, parse_operation, parts

SAVED = "save_for_backward"  # the name under which jax_extra.save_for_backward keeps a value


# -- What all operations share -----------------------------------------------------------------------------------------
def operate(name, text, operands, plan, execute, rule=None, new_sizes=None, several=False, with_=(), dtype=None):
    """Checks the string and the sizes, then runs the operation; or, in the check, marks it.

    `plan(recipe, mesh_axes)` raises if the string is not one for the operation; else it returns what `execute(planned,
    axes, *operands)` needs, which is cached by string. `planned['moves']` are the axes over which data are sent.
    `new_sizes` are sizes of dims that no operand has; `several` says that the string may have several results; `with_`
    are numbers that are no operands; `dtype` is the result's, where it is not the first operand's. A function of the
    user's that `execute` runs (`planned['runs']`) says it itself.
    """
    text = as_text(text)
    axes = mapped_axes()
    try:
        if not axes:
            raise ShardingError(
                "called outside of shard_map: there are no mesh axes here\n"
                "  fix: call it inside a function under typed_shard_map"
            )
        recipe, planned = _planned(name, plan, text, len(operands), None if several else 1, tuple(axes))
        letters = letters_of_scope()
        shapes = [bind(spec, jnp.shape(operand), axes, letters) for spec, operand in zip(recipe.operands, operands)]
        sizes = {dim.name: size for spec, shape in zip(recipe.operands, shapes) for dim, size in zip(spec.dims, shape)}
        sizes |= new_sizes or {}
        if planned["infers"]:
            planned = {**planned, "sizes": planned["infers"](sizes, axes)}
            sizes |= planned["sizes"]
        results = []
        for spec in recipe.results:
            shape = []
            for dim in spec.dims:
                size = sizes[dim.name] if dim.name in sizes else _size_of(dim, letters, axes)
                require_divisible(dim, size, axes)
                remember(dim, size, axes, letters, text)
                shape.append(part_of(size, dim, axes))
            results.append(tuple(shape))
    except ShardingError as error:
        raise error.extended(f"{_context(name, text, operands)}\n  at {users_line()}") from None

    def run(sizes, *operands):
        function = functools.partial(execute, planned, sizes)
        return (
            _as_declared(function, name, text, recipe, several, axes, operands)
            if planned["runs"]
            else function(*operands)
        )

    if (check := marks.marking()) is None:
        return run(axes, *operands)
    context = _context(name, text, operands)  # now: the walk comes when the trace is over
    _require_own_axes(axes, context)
    given_as, made_of = jnp.result_type(operands[0]), jnp.dtype(dtype or jnp.result_type(operands[0]))

    def refuse(why):
        raise ShardingError(f"{why}\n{context}\n  at {users_line()}")

    if planned["moves"] and recipe.operands[0].pending and given_as == jnp.bool_:
        refuse("a sum of truth values is none: any, or numbers")
    rounds = jnp.issubdtype(given_as, jnp.inexact) and not jnp.issubdtype(made_of, jnp.inexact)
    if rounds and builtins.any(spec.pending for spec in recipe.results):
        refuse(f"each term of a sum would be rounded to {made_of}: reduce first")
    if builtins.any(is_part(number) or isinstance(number, Count) for number in with_):
        refuse("a number that depends on how many devices there are")

    def checked(states):
        try:
            if rule is not None:
                return rule(recipe, states)
            for spec, state in zip(recipe.operands, states):
                require(spec, state, strict=True)
            return list(map(State.of, recipe.results))
        except ShardingError as error:
            raise error.extended(context) from None

    sealed, closed_over, dtypes = None, [], [made_of]
    if planned["runs"]:
        given = [jax.ShapeDtypeStruct(tuple(on_this_mesh(jnp.shape(x))), jnp.result_type(x)) for x in operands]
        try:
            with marks.during(marks.Check(check.axes, None, is_local=True)):
                # By itself: a ring looks like one of one device.
                sealed = jax.make_jaxpr(functools.partial(run, dict.fromkeys(axes, 1)))(*given)
        except NameError as error:
            raise ShardingError(
                f"a function that is local to a device sends over {unbound(error, axes)}: write the transfer as an "
                f"operation with a string\n{context}\n  at {users_line()}"
            ) from error
        closed_over = [each for each in sealed.consts if isinstance(each, jax.core.Tracer)]
        dtypes = [aval.dtype for aval in sealed.out_avals]
    said = name, text, *map(str, with_), str(sealed)

    made = tuple(map(jax.ShapeDtypeStruct, results, dtypes))
    given = dict(moves=planned["moves"], sealed=sealed, closed_over=closed_over)
    return marks.mark(said, checked, made if len(made) > 1 else made[0], *operands, **given)


def _as_declared(function, name, text, recipe, several, axes, operands):
    """The results of a function of the user's that is local to a device. Raises where they are not of the types that
    the string says."""
    found = function(*operands)
    given = found if several else (found,)
    try:
        if not isinstance(given, (tuple, list)) or len(given) != len(recipe.results):
            count = f"{len(given)}" if isinstance(given, (tuple, list)) else type(given).__name__
            raise ShardingError(f"the string has {len(recipe.results)} results, the function returned {count}")
        for result, value in zip(recipe.results, given):
            bind(result, jnp.shape(value), axes, letters_of_scope())
    except ShardingError as error:
        shapes = ", ".join(str(list(jnp.shape(value))) for value in jax.tree.leaves(given))
        raise error.extended(f"{_context(name, text, operands)}, result {shapes}\n  at {users_line()}") from None
    return found


def _require_own_axes(axes, context):
    """Raises `ShardingError` under a jax.vmap that has given a mesh axis' name to a dim of its own: the operation would
    go along that. In the check the mesh's axes are not bound."""
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            continue
        raise ShardingError(
            f"a jax.vmap(axis_name='{axis}') around it has the name of a mesh axis\n{context}\n  at {users_line()}"
        )


@functools.cache
def _planned(name, plan, text, operands, results, mesh_axes) -> tuple[Recipe, dict]:
    recipe = parse_operation(text, operands, results)
    for spec in (*recipe.operands, *recipe.results):
        for dim in spec.dims:
            if dim.indexed and name not in ("index_unreduced", "ppermute", "ring"):
                raise ShardingError(f"[{dim.name}]: only index_unreduced, ppermute and ring mark a dim with [ ]")
            if dim.name == "..." and name != "sum_unreduced":
                raise ShardingError("'...' is for sum_unreduced alone: name the dims")
    legal = [[str(spec.in_mesh_order(mesh_axes)) for spec in specs] for specs in (recipe.operands, recipe.results)]
    if legal != [[str(spec) for spec in specs] for specs in (recipe.operands, recipe.results)]:
        raise ShardingError(
            f"pending axes are written in the order of the mesh's axes ({', '.join(mesh_axes)}): "
            f"write '{', '.join(legal[0])} -> {', '.join(legal[1])}'"
        )
    return recipe, {"moves": (), "infers": None, "runs": False, **plan(recipe, mesh_axes)}


def _context(name, text, operands) -> str:
    """The second level of an error: operation, string, shapes on a device and of the whole, mesh."""
    axes = all_mapped_axes()
    shapes = [on_this_mesh(jnp.shape(operand)) for operand in operands]
    local = ", ".join(f"{jnp.result_type(operand)}{shape}" for operand, shape in zip(operands, shapes))
    try:
        specs = parse_operation(text, len(operands), None).operands
        whole = ", global " + ", ".join(str(_global_shape(*each, axes)) for each in zip(specs, shapes, strict=True))
    except (ShardingError, KeyError, ValueError):
        whole = ""  # the string cannot be read, or names an axis that the mesh lacks: that is the error
    return f"  in shardops.{name}('{text}'), local {local}{whole}, {mesh_text(axes)}"


def _global_shape(spec: Spec, shape, axes) -> list[int]:
    return [size * parts(dim, axes) for dim, size in zip(spec.dims, shape, strict=True)]


def _size_of(dim: Dim, letters, axes) -> int:
    if dim.name.isdigit():
        return int(dim.name)
    if dim.name in axes:
        return devices_of(dim, axes)
    if dim.name not in letters:
        raise ShardingError(
            f"the size of {dim.name} is not known here: no operand and no annotation of this scope has it\n"
            f"  fix: where the operation makes {dim.name} (zeros, full, local, regroup), say {dim.name}=..."
        )
    return letters[dim.name][0]


def corrected(recipe: Recipe, result: Spec) -> str:
    return f"write '{', '.join(map(str, recipe.operands))} -> {result}'"


def _same_dims(recipe: Recipe) -> list[tuple[int, Dim, Dim]]:
    """Pairs operand and result dims of an operation that keeps the dims."""
    (operand,), result = recipe.operands, recipe.result
    if operand.names != result.names:
        raise ShardingError(
            f"the operation keeps the dims, {' '.join(operand.names) or 'none'}, but the result has "
            f"{' '.join(result.names) or 'none'}"
        )
    return [(position, before, after) for position, (before, after) in enumerate(zip(operand.dims, result.dims))]


def _suffix(longer: Dim, shorter: Dim, doing: str) -> tuple[str, ...]:
    """The minor axes that `longer` has and `shorter` has not: only those can be gathered or scattered, else the parts
    would not be neighbours."""
    if longer.axes[: len(shorter.axes)] != shorter.axes:
        raise ShardingError(
            f"{shorter} and {longer}: {doing} a dim's minor axes only, the last ones, since the parts over a major "
            "axis alone are not neighbours"
        )
    return longer.axes[len(shorter.axes) :]


def _gaining(recipe: Recipe, doing: str) -> list[tuple[int, tuple[str, ...]]]:
    """Positions of the dims that the result splits over more axes, with these axes."""
    found = [(position, _suffix(after, before, doing)) for position, before, after in _same_dims(recipe)]
    return [(position, names) for position, names in found if names]


def _ordered(axes, mesh_axes) -> tuple[str, ...]:
    return tuple(axis for axis in mesh_axes if axis in axes)


def _wide(names, axes) -> tuple[str, ...]:
    """The axes of more than one device. Along the others nothing is sent; XLA:CPU would copy for them, and widen
    bfloat16 to float32."""
    return tuple(name for name in names if axes[name] > 1)


def _sent(dims, axes) -> list[tuple[int, tuple[str, ...]]]:
    """Positions of dims with the axes over which they are sent."""
    return [(position, names) for position, each in dims if (names := _wide(each, axes))]


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


def _element(dtype):
    return dtype.dtype if isinstance(dtype, DType) else jnp.dtype(dtype)


def axis_size(name: str) -> int:
    """The number of devices along a mesh axis. Raises `ShardingError` for an axis that the mesh lacks, or outside of
    shard_map."""
    axes = mapped_axes()
    if name not in axes:
        mesh = mesh_text(all_mapped_axes())
        raise ShardingError(f"axis_size('{name}'): the {mesh} has no such axis here\n  at {users_line()}")
    check = marks.marking()
    if marks.current() is not None and marks.current().is_local:
        raise ShardingError(
            f"a function that is local to a device asks for the number of devices along {name}, or the index there\n"
            f"  fix: pass it as an operand\n  at {users_line()}"
        )
    return axes[name] if check is None else Count(check.parts, axes[name], (name,), _divided)


def _divided(x, count: Count):
    """A term of a sum over these axes, of what is the same along them: x over the number of devices."""
    line, axes = users_line(), frozenset(count.axes)

    def rule(states):
        (state,) = states
        for axis in sorted(axes):
            if state.word(axis) != "the same" or state.sized:
                raise ShardingError(
                    f"a value that is {state.word(axis)} along {axis} over the number of devices along {axis} is "
                    f"another value on each mesh\n  at {line}"
                )
        return [dataclasses.replace(state, pending=state.pending | axes, zero=False)]

    return marks.mark(("axis_size", count.axes, count.factor), rule, jax.eval_shape(lambda x: x / 1, x), x)


def index(name: str):
    """Each device's index along a mesh axis, i32['d/d']: on the whole, jnp.arange(axis_size('d')). Sends nothing."""
    count = int(axis_size(name))
    return slice(f"{name} -> {name}/{name}", jnp.arange(count, dtype=jnp.int32))


# -- split -> same -----------------------------------------------------------------------------------------------------
def all_gather(spec: str | bytes, x, *, dtype=None, reduce_dtype=None, sent_as=None):
    """Gathers the parts of the dims that lose an axis: split -> same.

        all_gather('M/d F/t -> M F/t', w)
        all_gather('M/d/t -> M', w)                                   one collective over both
        all_gather('M/d F/t -> M F/t', w, dtype=bf16, reduce_dtype=f32)

    Args:
      dtype: cast to this before sending; the result has it.
      reduce_dtype: the gradient is cast to this before its reduction, then to the operand's type. With a cast by hand
        before the gather, the gradient's reduction would run in the gathered type.
      sent_as: rounded to this on the way, and only there.
    Sends: (n - 1) x bytes in `sent_as` or `dtype`; in the backward pass a reduce-scatter of (n - 1) x bytes in
    `reduce_dtype`. Of what stands for a matrix (see `products`) its typed field is; of `Float8` in 1 byte an element.
    """
    if isinstance(x, StandIn):
        given = dict(dtype=dtype, reduce_dtype=reduce_dtype, sent_as=sent_as or x.sent_as)
        return x.map(lambda values: all_gather(spec, values, **given))

    def execute(planned, axes, x):
        out = _element(dtype or x.dtype)
        wire, reduced = _element(sent_as or out), _element(reduce_dtype or out)

        def gather(x):
            x = x.astype(wire)
            if sent_as is not None:  # as bits: XLA:CPU would send 8-bit floats as 16-bit ones
                x = lax.bitcast_convert_type(x, f"uint{8 * wire.itemsize}")
            for position, names in _sent(planned["gathered"], axes):
                x = _gather(x, names, position)
            return (x if sent_as is None else lax.bitcast_convert_type(x, wire)).astype(out)

        if wire == out == reduced == x.dtype:
            return gather(x)  # JAX's own transpose is the reduce-scatter
        gather_cast = jax.custom_vjp(gather)

        def backward(_, cotangent):
            cotangent = cotangent.astype(reduced)
            for position, names in reversed(_sent(planned["gathered"], axes)):
                cotangent = _scatter(cotangent, names, position)
            return (cotangent.astype(operand_dtype),)

        operand_dtype = x.dtype
        gather_cast.defvjp(lambda x: (gather(x), None), backward)
        return gather_cast(x)

    return operate(
        "all_gather",
        spec,
        (x,),
        _plan_gather,
        execute,
        with_=(dtype, reduce_dtype, sent_as),
        dtype=_element(dtype or jnp.result_type(x)),
    )


def _plan_gather(recipe, mesh_axes):
    (operand,), result = recipe.operands, recipe.result
    gathered = []
    for position, before, after in _same_dims(recipe):
        if names := _suffix(before, after, "all_gather gathers"):
            gathered.append((position, names))
    if operand.pending != result.pending:
        raise ShardingError(f"all_gather takes no sum: {corrected(recipe, Spec(result.dims, operand.pending))}")
    if not gathered:
        raise ShardingError(f"gathers nothing: '{operand}' and '{result}' are split alike")
    return {"gathered": gathered, "moves": tuple(axis for _, names in gathered for axis in names)}


def pmax(spec: str | bytes, x):
    """The largest over the dims that the result lacks, over all devices: split -> same. No gradient: stop it first.

        pmax('B/d L V/t -> B/d L', lax.stop_gradient(logits))

    NaN: XLA's all-reduce may lose one (seen on the CPU, jaxlib 0.10.2); any('... -> ', jnp.isnan(x)) finds it.
    Sends: an all-reduce of the result, about 2 (n - 1) / n of its bytes.
    """

    line = users_line()

    @jax.custom_jvp
    def undifferentiated(x):
        return x

    @undifferentiated.defjvp
    def _refuse(primals, tangents):
        raise ShardingError(
            f"pmax has no gradient: pass it lax.stop_gradient(x)\n  in shardops.pmax('{as_text(spec)}')\n  at {line}"
        )

    def execute(planned, axes, x):
        return _largest(jnp.max(undifferentiated(x), axis=planned["dropped"]), planned, axes)

    return operate("pmax", spec, (x,), _plan_pmax, execute)


def _largest(local, planned, axes):
    names = _wide(planned["moves"], axes)
    return lax.pmax(local, names) if names else local


def _dropped(recipe):
    (operand,), result = recipe.operands, recipe.result
    kept = [dim for dim in operand.dims if dim.name in result.names]
    dropped = [position for position, dim in enumerate(operand.dims) if dim.name not in result.names]
    return kept, tuple(dropped), frozenset(axis for position in dropped for axis in operand.dims[position].axes)


def _plan_pmax(recipe, mesh_axes):
    kept, dropped, axes = _dropped(recipe)
    if recipe.operands[0].pending:
        raise ShardingError("the largest of a sum is not the largest of its terms: reduce the pending axes first")
    if not dropped:
        raise ShardingError("the result lacks no dim: the largest over what?")
    if recipe.result != Spec(tuple(kept)):
        raise ShardingError(f"the other dims stay as they are: {corrected(recipe, Spec(tuple(kept)))}")
    return {"dropped": dropped, "moves": _ordered(axes, mesh_axes)}


def argmax(spec: str | bytes, x):
    """The index, in the whole array, of the largest along the one dim that the result lacks, over all devices: split ->
    same. Of equal ones the first; NaN counts as infinity. No gradient.

        argmax('B/d L V/t -> B/d L', logits)

    Sends: two all-reduces of the result, 4 bytes an element: the largest, and the smallest index that has it.
    """

    def execute(planned, axes, x):
        (dim,), names = planned["dropped"], _wide(planned["major_first"], axes)
        x, size = lax.stop_gradient(x), x.shape[dim]
        x = jnp.where(jnp.isnan(x), jnp.inf, x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        first = lax.axis_index(names) * size if names else 0
        largest, place = jnp.max(x, axis=dim), jnp.argmax(x, axis=dim).astype(jnp.int32) + first
        if not names:
            return place
        ours = largest == lax.pmax(largest, names)
        return lax.pmin(jnp.where(ours, place, jnp.iinfo(jnp.int32).max), names)

    return operate("argmax", spec, (x,), _plan_argmax, execute, dtype=jnp.int32)


def _plan_argmax(recipe, mesh_axes):
    planned = _plan_pmax(recipe, mesh_axes)
    if len(planned["dropped"]) != 1:
        raise ShardingError("argmax goes along one dim, as in 'B/d L V/t -> B/d L'")
    return {**planned, "major_first": recipe.operands[0].dims[planned["dropped"][0]].axes}


def any(spec: str | bytes, x):
    """Whether any element is true, over the dims that the result lacks and over all devices: split -> same.

        any('B/d L -> ', ~jnp.isfinite(x))

    Sends: an all-reduce of the result, 4 bytes an element.
    """

    def execute(planned, axes, x):
        return _largest(jnp.any(x, axis=planned["dropped"]).astype(jnp.int32), planned, axes).astype(bool)

    return operate("any", spec, (x,), _plan_pmax, execute, dtype=jnp.bool_)


# -- pending -> split, pending -> same ---------------------------------------------------------------------------------
def psum_scatter(spec: str | bytes, x):
    """Takes the sum over the pending axes and leaves each device its part: pending -> split.

        psum_scatter('B/d L M +t -> B/d L M/t', y)

    Sends: (n - 1) / n of x bytes; in the backward pass an all-gather of as much.
    """

    def execute(planned, axes, x):
        for position, names in _sent(planned["scattered"], axes):
            x = _scatter(x, names, position)
        return x

    return operate("psum_scatter", spec, (x,), _plan_scatter, execute)


def _plan_scatter(recipe, mesh_axes):
    (operand,), result = recipe.operands, recipe.result
    scattered = _gaining(recipe, "psum_scatter splits")
    gained = {axis for _, names in scattered for axis in names}
    taken = set(operand.pending) - set(result.pending)
    if new := set(result.pending) - set(operand.pending):
        raise ShardingError(f"the result is pending over {', '.join(sorted(new))}, the operand is not")
    if not taken or gained != taken:
        raise ShardingError(
            f"psum_scatter takes the sum over axes that some dim is then split over: '{operand}' to '{result}' takes "
            f"the sum over {', '.join(sorted(taken)) or 'none'} and splits over {', '.join(sorted(gained)) or 'none'}"
        )
    return {"scattered": scattered, "moves": _ordered(gained, mesh_axes)}


def psum(spec: str | bytes, x):
    """Takes the sum over the pending axes that the result lacks: pending -> same.

        psum('B/d L +t -> B/d L', total)

    Sends: 2 (n - 1) / n of x bytes; as much in the backward pass.
    """

    def execute(planned, axes, x):
        names = _wide(planned["moves"], axes)
        return lax.psum(x, names) if names else x

    return operate("psum", spec, (x,), _plan_psum, execute)


def _plan_psum(recipe, mesh_axes):
    (operand,), result = recipe.operands, recipe.result
    if operand.dims != result.dims:
        raise ShardingError(f"psum keeps the dims: {corrected(recipe, Spec(operand.dims, result.pending))}")
    taken = set(operand.pending) - set(result.pending)
    if not taken or set(result.pending) - set(operand.pending):
        raise ShardingError(
            "takes no sum: the operand must be pending over more axes than the result, as in "
            f"'{Spec(operand.dims, ('t',))} -> {Spec(operand.dims)}'"
        )
    return {"moves": _ordered(taken, mesh_axes)}


# -- split -> split ----------------------------------------------------------------------------------------------------
def all_to_all(spec: str | bytes, x):
    """Moves a split from one dim to another.

        all_to_all('E/t C M -> E C/t M', x)

    Sends: (n - 1) / n of x bytes; as much in the backward pass.
    """

    def execute(planned, axes, x):
        names = _wide(planned["moves"], axes)
        if not names:
            return x
        return lax.all_to_all(x, names, split_axis=planned["gains"], concat_axis=planned["loses"], tiled=True)

    return operate("all_to_all", spec, (x,), _plan_all_to_all, execute)


def _plan_all_to_all(recipe, mesh_axes):
    loses, gains = [], []
    for position, before, after in _same_dims(recipe):
        if len(before.axes) > len(after.axes):
            loses.append((position, _suffix(before, after, "all_to_all moves")))
        elif before.axes != after.axes:
            gains.append((position, _suffix(after, before, "all_to_all moves")))
    moved = [[axes for _, axes in each] for each in (loses, gains)]
    if moved[0] != moved[1] or len(loses) != 1 or recipe.operands[0].pending != recipe.result.pending:
        raise ShardingError("all_to_all moves the same axes from one dim to one other, as in 'E/t C M -> E C/t M'")
    return {"loses": loses[0][0], "gains": gains[0][0], "moves": loses[0][1]}


def ppermute(spec: str | bytes, x, shift: int):
    """Rolls a dim that counts an axis' devices: the device at index i sends its part to i + shift, around the end.

        ppermute('c/c B/d l M -> c/c B/d l M', x, 1)
        ppermute('[c/c] B/d l -> [c/c] B/d l', x, 1)     where several dims do, [ ] says which one moves

    `regroup('B/d L/c -> B/d c/c l', x)` makes such a dim of each device's part.
    Sends: x bytes; as much in the backward pass.
    """

    if isinstance(shift, jax.Array):
        raise ShardingError(f"ppermute: shift is a plain int, not {shift!r}\n  at {users_line()}")

    def execute(planned, axes, x):
        (axis,) = planned["moves"]
        if axes[axis] == 1:
            return x
        return lax.ppermute(x, axis, [(index, (index + shift) % axes[axis]) for index in range(axes[axis])])

    return operate("ppermute", spec, (x,), _plan_ppermute, execute, with_=(shift,))


def _plan_ppermute(recipe, mesh_axes):
    (operand,), result = recipe.operands, recipe.result
    if operand != result:
        raise ShardingError(f"ppermute keeps the type: {corrected(recipe, operand)}")
    moving = [dim for dim in operand.dims if dim.indexed] or [dim for dim in operand.dims if dim.axes == (dim.name,)]
    if len(moving) != 1 or moving[0].axes != (moving[0].name,):
        split = next((axis for dim in operand.dims for axis in dim.axes), mesh_axes[0])
        raise ShardingError(
            f"ppermute rolls one dim that counts an axis' devices, as '{split}/{split}' does: of a longer dim it would "
            f"move blocks, of another size on each mesh\n  fix: shardops.regroup('L/{split} -> {split}/{split} l', x) "
            "makes such a dim; where there are several, mark the one that moves with [ ]"
        )
    return {"moves": moving[0].axes}


# -- Nothing is sent ---------------------------------------------------------------------------------------------------
def einsum_unreduced(spec: str | bytes, x, y, *, rounded_to=None, x_is_thin: bool = False, **jnp_kwargs):
    """`jnp.einsum` of two operands. A contraction over a dim that is split over t leaves the result pending, '+t'.

        einsum_unreduced('B/d L F/t, M F/t -> B/d L M +t', h, w_down)

    Args:
      rounded_to: both operands are, for the product alone; the gradient's products are of the operands as they are.
      x_is_thin: y's gradient is computed as x · gradient, not, as JAX does, as gradient · x: of the two XLA:CPU
        transposes the first, and computes anew what was fused into it.
      jnp_kwargs: passed on. With preferred_element_type=float32 of bfloat16 operands the sums stay in float32; the
        gradient's products are in bfloat16 too (JAX would take the result's gradient in float32, and multiply at the
        rate of that). An operand that is not differentiated costs no product.
    Sends: nothing.
    """

    def execute(planned, axes, x, y):
        def product(x, y):
            if rounded_to is not None:
                x, y = x.astype(rounded_to), y.astype(rounded_to)
            return jnp.einsum(planned["equation"], x, y, **jnp_kwargs)

        as_they_are = rounded_to is None and jnp_kwargs.get("preferred_element_type", x.dtype) == x.dtype
        if (x.dtype != y.dtype or as_they_are) and not x_is_thin:
            return product(x, y)

        # The gradient of a frozen operand is not computed, and what only it would need is not kept.
        def forward(x, y):
            return product(x.value, y.value), (x.value if y.perturbed else None, y.value if x.perturbed else None)

        def backward(kept, cotangent):
            of_y, of_x = kept
            cotangent, like = cotangent.astype(x.dtype), [jax.ShapeDtypeStruct(each.shape, x.dtype) for each in (x, y)]

            def pulled(multiply, like):
                return jax.linear_transpose(multiply, like)(cotangent)[0]

            by_x = None if of_x is None else pulled(lambda x: jnp.einsum(planned["equation"], x, of_x), like[0])
            if of_y is None or not x_is_thin:
                by_y = None if of_y is None else pulled(lambda y: jnp.einsum(planned["equation"], of_y, y), like[1])
            else:
                operands, result = planned["equation"].split("->")
                first, second = operands.split(",")
                by_y = jnp.einsum(f"{first},{result}->{second}", of_y, cotangent)
            return by_x, by_y

        widened = jax.custom_vjp(product)
        widened.defvjp(forward, backward, symbolic_zeros=True)
        return widened(x, y)

    given = (rounded_to, sorted(jnp_kwargs.items()))
    dtype = jnp.dtype(jnp_kwargs.get("preferred_element_type") or jnp.result_type(x, y))
    return operate("einsum_unreduced", spec, (x, y), _plan_einsum, execute, with_=given, dtype=dtype)


def _plan_einsum(recipe, mesh_axes):
    lies: dict[str, Dim] = {}
    for operand in recipe.operands:
        for dim in operand.dims:
            if operand.names.count(dim.name) > 1:
                raise ShardingError(f"dim {dim.name} stands twice in '{operand}'")
            if lies.setdefault(dim.name, dim).axes != dim.axes:
                raise ShardingError(
                    f"{lies[dim.name]} in one operand, {dim} in the other: the devices' parts do not match"
                )
    first, second = recipe.operands
    for a, b in ((first, second), (second, first)):
        for axis in a.pending:
            if axis in b.split or axis in b.pending:
                raise ShardingError(
                    f"'{a}' is pending over {axis}, and '{b}' is not the same along it: reduce it first"
                )
    for name in recipe.result.names:
        if name not in lies:
            raise ShardingError(f"dim {name} of the result is in no operand")
    contracted = {axis for name, dim in lies.items() if name not in recipe.result.names for axis in dim.axes}
    dims = tuple(lies[name] for name in recipe.result.names)
    expected = Spec(dims, _ordered(contracted | set(first.pending) | set(second.pending), mesh_axes))
    used = [*(axis for dim in dims for axis in dim.axes), *expected.pending]
    for axis in used:
        if used.count(axis) > 1:
            raise ShardingError(
                f"two dims that are split over {axis} meet in the result '{expected}': each device has only the parts "
                "of its own index, gather one of them first"
            )
    if recipe.result != expected:
        forgotten = contracted - set(recipe.result.pending)
        owed = f": the contraction leaves a sum over {', '.join(sorted(contracted))}" if forgotten else ""
        raise ShardingError(
            f"the result is '{expected}', not '{recipe.result}'{owed}\n  fix: {corrected(recipe, expected)}"
        )
    letter = dict(zip(lies, _strings.ascii_letters))
    words = ["".join(letter[name] for name in each.names) for each in (first, second, recipe.result)]
    return {"equation": f"{words[0]},{words[1]}->{words[2]}"}


def sum_unreduced(spec: str | bytes, x):
    """Sums over the dims that the result lacks; a split one leaves its axes pending.

        sum_unreduced('B/d L V/t -> B/d L +t', e)
        sum_unreduced('... -> +d +t', g * g)            any dims, which must be split over just d and t

    Sends: nothing.
    """

    def rule(recipe, states):
        (operand,), result = recipe.operands, recipe.result
        if "..." not in operand.names:
            require(operand, states[0], strict=True)
            return [State.of(result)]
        (state,) = states
        made = builtins.any(not state.split >= frozenset(axes) for axes in state.dims)
        if made or state.sized or state.local_iota:
            raise ShardingError(
                "'...' was made to the size of a device's part: its elements are no elements of the whole"
            )
        for axis in sorted(states[0].split | states[0].pending | set(result.pending)):
            true = states[0].word(axis)
            if axis not in result.pending:
                raise ShardingError(f"'...' is {true} along {axis}: the result is pending over it, write '+{axis}'")
            if true != ("pending" if axis in operand.pending else "split"):
                raise ShardingError(
                    f"'...' is {true} along {axis}: the sum of what is the same would count it once for each device"
                )
        return [State.of(result)]

    def execute(planned, axes, x):
        return jnp.sum(x, axis=planned["dropped"])

    return operate("sum_unreduced", spec, (x,), _plan_sum, execute, rule)


def _plan_sum(recipe, mesh_axes):
    (operand,), result = recipe.operands, recipe.result
    if "..." in operand.names:
        if operand.names != ("...",) or result.dims:
            raise ShardingError("'...' stands for all dims, and all are summed: '... -> +d +t'")
        return {"dropped": None}
    kept, dropped, axes = _dropped(recipe)
    expected = Spec(tuple(kept), _ordered(axes | set(operand.pending), mesh_axes))
    if not dropped:
        raise ShardingError("the result lacks no dim: the sum over what?")
    if result != expected:
        raise ShardingError(f"the result is '{expected}', not '{result}'\n  fix: {corrected(recipe, expected)}")
    return {"dropped": dropped}


def index_unreduced(spec: str | bytes, table, indices):
    """Looks rows up in a table whose indexed dim, in [ ], may be split: a device gives zero for the rows that it does
    not hold.

        index_unreduced('[V/t] M, B/d L -> B/d L M +t', embed, ids)
        index_unreduced('B/d L [V/t], B/d L -> B/d L +t', logits, targets)      a table for each index: its dims

    Indices outside of the dim give zero. The gradient of a table whose rows are looked up adds up in float32 and then
    takes the table's type: of the terms of a row that is looked up thousands of times, bfloat16 would add but the first
    hundreds.
    Sends: nothing.
    """

    def execute(planned, axes, table, indices):
        position, names = planned["position"], planned["names"]
        rows = table.shape[position]
        first = lax.axis_index(names) * rows if names else 0
        local = indices.astype(jnp.int32) - first
        held = (local >= 0) & (local < rows)
        if planned["own"]:
            # A sum over one-hot rows: its transpose is a product, where a gather's would be a slow scatter.
            one_hot = lax.broadcasted_iota(jnp.int32, table.shape, position) == jnp.expand_dims(local, position)
            return jnp.sum(jnp.where(one_hot, table, jnp.zeros((), table.dtype)), axis=position)
        found = _rows(jnp.moveaxis(table, position, 0), jnp.where(held, local, 0))
        held = held.reshape(held.shape + (1,) * (found.ndim - held.ndim))
        return jnp.where(held, found, jnp.zeros((), found.dtype))

    return operate("index_unreduced", spec, (table, indices), _plan_index, execute)


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


def _plan_index(recipe, mesh_axes):
    table, indices = recipe.operands
    marked = [position for position, dim in enumerate(table.dims) if dim.indexed]
    if len(marked) != 1 or builtins.any(dim.indexed for dim in (*indices.dims, *recipe.result.dims)):
        raise ShardingError(
            "the table's indexed dim, and no other, stands in [ ], as in '[V/t] M, B/d L -> B/d L M +t'"
        )
    if table.pending or indices.pending:
        raise ShardingError("a pending table or index: reduce it first")
    position = marked[0]
    names = table.dims[position].axes
    own = (*table.dims[:position], *table.dims[position + 1 :]) == indices.dims
    if not own and (clash := set(indices.split) & table.split):
        raise ShardingError(
            f"table and indices are both split over {', '.join(sorted(clash))}: a device looks up only its own "
            "indices in its own rows, gather one of them first"
        )
    if not own and (both := set(indices.names) & set(table.names)):
        raise ShardingError(
            f"table and indices share {', '.join(sorted(both))}: either all dims but the indexed one are the indices' "
            "dims, or none"
        )
    dims = indices.dims if own else (*indices.dims, *table.dims[:position], *table.dims[position + 1 :])
    expected = Spec(dims, _ordered(names, mesh_axes))
    if recipe.result != expected:
        raise ShardingError(f"the result is '{expected}', not '{recipe.result}'\n  fix: {corrected(recipe, expected)}")
    return {"position": position, "names": names, "own": own}


def slice(spec: str | bytes, x):
    """Each device keeps its part: same -> split.

        slice('M -> M/t', scale)

    Sends: nothing.
    """

    def execute(planned, axes, x):
        for position, names in _sent(planned["sliced"], axes):
            size = x.shape[position] // math.prod(axes[name] for name in names)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, position)
        return x

    return operate("slice", spec, (x,), _plan_slice, execute)


def _plan_slice(recipe, mesh_axes):
    sliced = _gaining(recipe, "slice splits")
    if not sliced or recipe.operands[0].pending != recipe.result.pending:
        raise ShardingError("slice splits dims and changes nothing else, as in 'M -> M/t'")
    return {"sliced": sliced}


def regroup(spec: str | bytes, x, **sizes: int):
    """Reshapes each device's part by itself, where the order that this gives the whole array is meant to depend on the
    mesh: rows into microbatches, a part into a dim that counts devices.

        regroup('B/d L -> parts R/d L', x, parts=4)      each microbatch has rows of every device
        regroup('parts R/d L -> B/d L', x)               its inverse
        regroup('B/d L/c -> B/d c/c l', x)               one block a device

    Dims of the same name stay; between them, dims are divided and merged, and are split over the same axes before and
    after. One size may be left out. Sends: nothing; its transpose is the inverse.
    """

    def execute(planned, axes, x):
        shape = [planned["sizes"][dim.name] // parts(dim, axes) for dim in planned["result"].dims]
        return x.reshape(shape)

    sizes = {name: int(size) for name, size in sizes.items()}
    return operate("regroup", spec, (x,), _plan_regroup, execute, new_sizes=sizes)


def _plan_regroup(recipe, mesh_axes):
    (operand,), result = recipe.operands, recipe.result
    stay = [name for name in operand.names if name in result.names]
    if stay != [name for name in result.names if name in stay]:
        raise ShardingError("regroup keeps the order of the dims that stay: transpose before or after")
    if operand.pending != result.pending or operand.names == result.names:
        fix = corrected(recipe, Spec(result.dims, operand.pending))
        raise ShardingError(f"regroup divides and merges dims, and changes nothing else: {fix}")
    runs, before, after = [], list(operand.dims), list(result.dims)
    for name in (*stay, None):
        run = [], []
        for dims, found in zip((before, after), run):
            while dims and dims[0].name != name:
                found.append(dims.pop(0))
        runs.append(run)
        for one, other in zip(before[:1], after[:1]):
            if one != other:
                raise ShardingError(f"{one} and {other}: a dim that stays is split as before")
        del before[:1], after[:1]
    for one, other in runs:
        lost = sorted({axis for dim in one for axis in dim.axes} ^ {axis for dim in other for axis in dim.axes})
        if lost:
            raise ShardingError(
                f"{' '.join(map(str, one)) or 'nothing'} and {' '.join(map(str, other)) or 'nothing'} are split over "
                f"different axes ({', '.join(lost)}): regroup moves nothing between devices"
            )

    def infers(sizes, axes):
        """Sizes of all dims; of each run one that was left out follows from the others."""
        sizes = dict(sizes)
        for one, other in runs:
            for dim in (*one, *other):
                if dim.name.isdigit():
                    sizes[dim.name] = int(dim.name)
                elif dim.name in axes:
                    sizes[dim.name] = devices_of(dim, axes)
            known, unknown = ([dim for dim in other if (dim.name in sizes) is wanted] for wanted in (True, False))
            for dim in known:
                require_divisible(dim, sizes[dim.name], axes)
            have, rest = (math.prod(sizes[dim.name] // parts(dim, axes) for dim in each) for each in (one, known))
            if len(unknown) > 1:
                raise ShardingError(
                    f"say all sizes of {' '.join(map(str, other))} but one, as in {unknown[0].name}=..."
                )
            if have % rest or (not unknown and have != rest):
                text = f"{' '.join(map(str, one))} to {' '.join(map(str, other))}: a device's {have} elements are not "
                text += f"{'a multiple of ' * bool(unknown)}{rest}"
                raise ShardingError(text)
            for dim in unknown:
                sizes[dim.name] = have // rest * parts(dim, axes)
        return sizes

    return {"result": result, "infers": infers}


def pending(spec: str | bytes, x):
    """Makes one term of a sum of what is the same: the first device along the axes keeps it, the others hold zero.

        pending('X -> X +t', x)

    Sends: nothing.
    """

    def execute(planned, axes, x):
        several = [name for name in planned["new"] if axes[name] > 1]
        return jnp.where(lax.axis_index(several) == 0, x, jnp.zeros((), x.dtype)) if several else x

    return operate("pending", spec, (x,), _plan_pending, execute)


def _plan_pending(recipe, mesh_axes):
    (operand,), result = recipe.operands, recipe.result
    new = set(result.pending) - set(operand.pending)
    if operand.dims != result.dims or not new or set(operand.pending) - set(result.pending):
        raise ShardingError(
            f"pending adds pending axes and changes nothing else, as in '{Spec(operand.dims)} -> "
            f"{Spec(operand.dims, ('t',))}'"
        )
    return {"new": _ordered(new, mesh_axes)}


def zeros(spec: str | bytes, dtype, **sizes: int):
    """Zeros of that type, pending ones too (a scan's first carry). Sizes are the scope's letters, or given, of the
    whole: zeros('M/d', f32, M=512)."""
    return _make("zeros", spec, dtype, 0, sizes)


def full(spec: str | bytes, value, dtype, **sizes: int):
    """An array of that type that holds `value` everywhere. Raises `ShardingError` for a pending type: write
    pending(spec, full(...))."""
    return _make("full", spec, dtype, value, sizes)


def _make(name, text, dtype, value, sizes):
    text, axes = as_text(text), mapped_axes()
    where = f"  in shardops.{name}('{text}'), {mesh_text(all_mapped_axes())}"
    try:
        spec = parse(text)
        if not axes:
            raise ShardingError("called outside of shard_map: there are no mesh axes here")
        spec.require_mesh_order(axes)
        if spec.pending and name == "full":
            raise ShardingError(
                "a pending value is a sum of the devices' terms\n  fix: shardops.pending("
                f"'{Spec(spec.dims)} -> {spec}', shardops.full('{Spec(spec.dims)}', ...))"
            )
        letters = letters_of_scope() | {letter: (int(size), "the arguments") for letter, size in sizes.items()}
        shape = []
        for dim in spec.dims:
            size = _size_of(dim, letters, axes)
            require_divisible(dim, size, axes)
            shape.append(part_of(size, dim, axes))
    except ShardingError as error:
        raise error.extended(f"{where}\n  at {users_line()}") from None

    value, element = jnp.asarray(value, _element(dtype)), _element(dtype)
    if marks.marking() is None:
        return jnp.full(shape, value, element)

    def rule(states):
        try:
            require(Spec(()), states[0], strict=True)
        except ShardingError as error:
            raise error.extended(where) from None
        return [State.of(spec)]

    return marks.mark((name, text, str(shape)), rule, jax.ShapeDtypeStruct(tuple(shape), element), value)


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
    several = "," in as_text(spec).partition("->")[2]
    sizes = {name: int(size) for name, size in sizes.items()}

    def execute(planned, axes, *operands):
        return function(*operands)

    return operate("local", spec, operands, plan_local, execute, new_sizes=sizes, several=several)


def plan_local(recipe, mesh_axes):
    for axis in mesh_axes:
        split = builtins.any(axis in operand.split for operand in recipe.operands)
        owed = builtins.any(axis in operand.pending for operand in recipe.operands)
        for result in recipe.results:
            claimed = axis in result.split or axis in result.pending
            if owed and (split or axis not in result.pending):
                other = "another is split over it" if split else "the result is not"
                raise ShardingError(f"an operand is pending over {axis} and {other}: reduce it first")
            if split and not claimed:
                raise ShardingError(
                    f"an operand differs along {axis}, the result says it is the same: nothing is sent inside a local "
                    "function"
                )
            if claimed and not split and not owed:
                raise ShardingError(
                    f"the operands are the same along {axis}, and so is the result: a local function does not know "
                    "which device it runs on"
                )
    return {"runs": True}


def each(axis: str, function, *trees):
    """Runs a function on each device along an axis by itself, as if the mesh did not have that axis.

        y = each('p', stage, w, x)      # f32['p/p M F/t'], f32['p/p B/d M']; inside of stage f32['M F/t'], f32['B/d M']

    The values' first dim, 'p/p', is not there inside, and the results get it. What the function takes from around it
    is the same along the axis. Sends nothing over it.

    Raises:
      ShardingError: for a value whose first dim does not count the axis' devices; in the check, for a result that is
        pending over the axis.
    """
    axis_size(axis)
    where = f"  in shardops.each('{axis}'), {mesh_text(all_mapped_axes())}\n  at {users_line()}"

    def of_one(states):
        (state,) = states
        if state.dims[0] != (axis,) and not state.zero:
            raise ShardingError(f"the first dim is {state.along(state.dims[0])}: write '{axis}/{axis} ...'\n{where}")
        axes = {} if state.zero else dict(split=state.split | {axis}, without_dim=state.without_dim | {axis})
        return [dataclasses.replace(state, dims=state.dims[1:], **axes)]

    def of_all(states):
        (state,) = states
        if axis in state.pending:
            raise ShardingError(f"a result is pending over {axis}: reduce it first\n{where}")
        dims, without_dim = ((axis,), *state.dims), state.without_dim - {axis}
        return [dataclasses.replace(state, dims=dims, split=state.split | {axis}, without_dim=without_dim)]

    def marked(rule, function, x):
        if marks.marking() is None:
            return function(x)
        return marks.mark(("each", axis), rule, jax.eval_shape(function, x), x)

    def enter(x):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] != 1:
            shape = on_this_mesh(jnp.shape(x))
            raise ShardingError(f"the first dim is one element a device, '{axis}/{axis} ...', not {shape}\n{where}")
        return marked(of_one, functools.partial(jnp.squeeze, axis=0), x)

    given = jax.tree.map(enter, trees)
    with marks.on_each(axis):
        results = function(*given)
    return jax.tree.map(functools.partial(marked, of_all, lambda y: y[None]), results)


# -- Gradients ---------------------------------------------------------------------------------------------------------
def vjp(function, *args):
    """`jax.vjp`: the result, and a function from its cotangent to the arguments' gradients. What is differentiated is
    the sum over all devices, so a cotangent has the result's type with same and pending exchanged, and a gradient that
    of its argument: of 'B/d M' on axes d, t it is 'B/d M +t'.

        y, pull = shardops.vjp(stage, w, x)
        of_w, of_x = pull(of_y)

    Raises:
      ShardingError: in the check, for a cotangent of another type.
    """
    return _vjp("vjp", function, args)


def _vjp(name, function, args, has_aux=False, loss=False):
    if (check := marks.marking()) is None:
        return jax.vjp(function, *args, has_aux=has_aux)
    # The backward pass need not be traced: the theory of the types gives the gradients' (see shardlib/proof/verify.py).
    check.gradients = True
    result, *aux = function(*args) if has_aux else (function(*args),)
    results, given = jax.tree.leaves(result), jax.tree.leaves(args)
    axes, line = frozenset(mapped_axes()), users_line()

    def pull(cotangent):
        if jax.tree.structure(cotangent) != jax.tree.structure(result):
            raise ShardingError(f"the cotangent is no tree like the result\n  in shardops.{name}\n  at {users_line()}")

        def rule(states):
            of_results, cotangents = states[: len(results)], states[len(results) : 2 * len(results)]
            of_given = states[2 * len(results) :]
            for index, (of, state) in enumerate(zip(of_results, cotangents)):
                if loss:
                    _require_pending(of, axes, name)
                try:
                    require_dual(state, of, axes, f"the cotangent of result {index}")
                except ShardingError as error:
                    raise error.extended(f"  in shardops.{name}\n  at {line}") from None
            if builtins.any(state.zero for state in of_given):
                raise ShardingError(
                    "a constant zero, which has no type, is differentiated: its gradient would have none either\n"
                    f"  fix: make it with shardops.zeros, which gives it one\n  in shardops.{name}\n  at {line}"
                )
            return [dual(state, axes) for state in of_given]

        operands = *results, *jax.tree.leaves(cotangent), *given
        # What is pulled back may send wherever something has been sent.
        return marks.mark((name,), rule, jax.tree.map(jnp.asarray, args), *operands, moves=check.moves)

    return result, pull, *aux


def _require_pending(loss: State, axes: frozenset[str], name: str):
    for axis in sorted(axes - loss.pending):
        raise ShardingError(
            f"the loss is {loss.word(axis)} along {axis}: what is differentiated is the sum over all devices, so it "
            f"would count once for each device along {axis}\n  fix: return it pending, "
            f"'{Spec((), tuple(mapped_axes()))}', before any psum\n  in shardops.{name}"
        )


def value_and_grad(function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False):
    """`jax.value_and_grad` of a loss whose every mesh axis is pending, '+d +t': what is differentiated is the sum over
    all devices.

    Each gradient has its weight's type with same and pending exchanged: that of a weight 'M' (the same over d and t) is
    'M +d +t', still to be reduced; that of a weight 'M/d' is 'M/d +t'; of a fully split one, fully split.

    Raises:
      ShardingError: for a loss that is no float scalar; in the check, for one that is the same along an axis (it would
        count once for each device).
    """

    @functools.wraps(function)
    def differentiate(*args):
        chosen = [index % len(args) for index in ((argnums,) if isinstance(argnums, int) else argnums)]

        def of_chosen(*weights):
            given = dict(zip(chosen, weights))
            return function(*(given.get(index, arg) for index, arg in enumerate(args)))

        weights = [args[index] for index in chosen]
        loss, pull, *aux = _vjp("value_and_grad", of_chosen, weights, has_aux, loss=True)
        if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise ShardingError(
                f"the loss must be a scalar of a float type, it is {jnp.result_type(loss)}{list(jnp.shape(loss))}\n"
                f"  in shardops.value_and_grad\n  at {users_line()}"
            )
        gradients = pull(jnp.ones_like(loss))
        return ((loss, *aux) if has_aux else loss), (gradients[0] if isinstance(argnums, int) else gradients)

    return differentiate


def sum_over_chunks(function, shared, x, others):
    """The sum of `function(shared, x[i], others[i])`, scalar losses '+d +t', over the leading dim; in a gradient, the
    losses' own are computed in the same scan, right after each loss.

        total = sum_over_chunks(chunk_loss, unembed, hidden, batch)

    So nothing that is made inside is kept or made twice: in the place of `x` its gradient is kept until the backward
    pass, and that of `shared` is summed up in its own type (Hsu et al. 2024, section 3.2, where chunks are rows).

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
        leaves, structure = jax.tree.flatten(shared)
        if builtins.any(each.perturbed for each in jax.tree.leaves(others)):
            raise ShardingError(
                "what stands in `others` is differentiated: its gradient would be zero\n"
                f"  fix: pass it in `shared` or `x`\n  in shardops.sum_over_chunks\n  at {line}"
            )
        values, x, others = [each.value for each in leaves], x.value, jax.tree.map(lambda each: each.value, others)
        trained = [index for index, each in enumerate(leaves) if each.perturbed]

        def of_trained(some, x, others):
            given = dict(zip(trained, some))
            all_ = [given.get(index, value) for index, value in enumerate(values)]
            return function(jax.tree.unflatten(structure, all_), x, others)

        def add(sums, chunk):
            value, (by_shared, by_x) = jax.value_and_grad(of_trained, (0, 1))([values[i] for i in trained], *chunk)
            return jax.tree.map(jnp.add, sums, (value, by_shared)), by_x

        start = jnp.float32(0), [jnp.zeros_like(values[index]) for index in trained]
        (value, by_shared), by_x = lax.scan(add, start, (x, others))
        found = dict(zip(trained, by_shared))
        return value, (jax.tree.unflatten(structure, [found.get(index) for index in range(len(leaves))]), by_x)

    def backward(kept, gradient):
        return *jax.tree.map(lambda each: (gradient * each.astype(jnp.float32)).astype(each.dtype), kept), None

    # What is differentiated and closed over is shared.
    first = jax.tree.map(lambda leaf: leaf[0], (x, others))
    own, closed_over = jax.closure_convert(function, shared, *first)
    shared, function = (shared, closed_over), lambda both, x, others: own(both[0], x, others, *both[1])
    differentiated = jax.custom_vjp(total)
    differentiated.defvjp(with_gradient, backward, symbolic_zeros=True)
    return differentiated(shared, x, others)


def grad(function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False):
    """`jax.grad` of such a loss; see `value_and_grad`."""

    def differentiate(*args):
        value, gradients = value_and_grad(function, argnums, has_aux)(*args)
        return (gradients, value[1]) if has_aux else gradients

    return differentiate
