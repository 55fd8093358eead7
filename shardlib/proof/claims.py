"""What the check makes of an operation of `shardops.py` or an annotation: a mark whose rule says how it changes states,
or a refusal."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.mesh import all_mapped_axes, mapped_axes
from shardlib.places import users_line
from shardlib.proof import marks
from shardlib.proof.frames import unbound
from shardlib.proof.parts import Count, is_part, shown
from shardlib.proof.rules import sums_stay_sums
from shardlib.proof.states import State, dual, require, require_dual
from shardlib.spec import ShardingError, Spec


def operation(said, recipe, plan, operands, options, made, where):
    """Marks an operation with a string: returns its results in the trace.

    Args:
      said: its name and string.
      made: its results' shapes and element types; what a function of the user's returns has types of its own.
      where: makes the last lines of its errors.
    Raises:
      ShardingError: where the result would depend on how many devices there are, or be no sum.
    """
    _require_meaning(recipe, plan, operands, options, made[0].dtype)
    sealed, closed_over = None, []
    if plan.calls:
        sealed = _sealed(functools.partial(plan.run, **options), operands)
        made = [jax.ShapeDtypeStruct(one.shape, aval.dtype) for one, aval in zip(made, sealed.out_avals)]
        closed_over = [value for value in sealed.consts if isinstance(value, jax.core.Tracer)]

    def rule(states):
        if plan.rule is not None:
            return plan.rule(states)
        for spec, state in zip(recipe.operands, states):
            require(spec, state)
        return list(map(State.of, recipe.results))

    said = *said, str(sealed), *(str(value) for value in options.values() if not callable(value))
    moves = all_mapped_axes() if plan.needs_all else plan.moves
    known = dict(where=where(), moves=moves, sealed=sealed, closed_over=closed_over)
    return marks.mark(said, rule, tuple(made) if len(made) > 1 else made[0], *operands, **known)


_ON_THE_WAY = ("sent_as", "reduce_dtype", "rounded_to")  # options that are element types


def _require_meaning(recipe, plan, operands, options, dtype):
    for axis in mapped_axes():  # in the check the mesh's axes are not bound
        with contextlib.suppress(NameError):
            lax.axis_size(axis)
            raise ShardingError(f"a jax.vmap(axis_name='{axis}') around it has the name of a mesh axis")
    dtypes, is_sum = list(map(jnp.result_type, operands)), any(spec.pending for spec in recipe.results)
    pending = [before for spec, before in zip(recipe.operands, dtypes) if spec.pending] + [dtype] * is_sum
    if jnp.bool_ in pending and not plan.calls:
        raise ShardingError("a sum of truth values is none: any, or numbers")
    on_the_way = {name: jnp.dtype(options[name]) for name in _ON_THE_WAY if options.get(name) is not None}
    for name, other in on_the_way.items():
        if not jnp.issubdtype(other, jnp.inexact) or (name == "sent_as" and jnp.finfo(other).bits % 8):
            raise ShardingError(f"{name} is a float type{' of whole bytes' * (name == 'sent_as')}, not {other}")
    for spec, before in zip(recipe.operands, dtypes):
        is_term = spec.pending or (is_sum and jnp.issubdtype(before, jnp.inexact))
        for after in (*on_the_way.values(), dtype) if is_term and not plan.calls else ():
            if not sums_stay_sums(before, after):
                raise ShardingError(f"each term of a sum, {before}, would be rounded to {after}, or wrap: reduce first")
    if any(is_part(value) or isinstance(value, Count) for value in options.values()):
        raise ShardingError("a number that depends on how many devices there are")


def _sealed(run, operands):
    """The jaxpr of a user's function on one device's part, traced by itself: with no axis bound it cannot send."""
    axes = marks.current().axes
    held = [jax.ShapeDtypeStruct(tuple(marks.on_this_mesh(jnp.shape(x))), jnp.result_type(x)) for x in operands]
    try:
        with marks.during(marks.Check(axes, None, is_local=True)):
            return jax.make_jaxpr(run)(*held)
    except NameError as error:
        what = f"a function that is local to a device sends over {unbound(error, axes)}"
        raise ShardingError(f"{what}: write the transfer as an operation with a string") from error


def count(axes: tuple[str, ...]) -> Count:
    """The number of devices along these axes, of which the check knows no value."""
    return Count(marks.current().parts, axes, _divided)


def _divided(x, count: Count):
    """x over a number of devices, where x is the same along these axes: a term of a sum over them."""
    axes = frozenset(count.axes)

    def rule(states):
        (state,) = states
        if state.pending and not jnp.issubdtype(x.dtype, jnp.inexact):
            what = f"{x.dtype}, pending over {', '.join(sorted(state.pending))}, over a number of devices"
            raise ShardingError(f"{what}: it may wrap around\n  fix: convert before the sum, or reduce it first")
        for axis in sorted(axes):
            if state.word(axis) != "the same" or state.sized:
                word = "counted on one device" if state.sized else f"{state.word(axis)} along {axis}"
                fix = f"divide by the whole's size, (x.shape[0] * shardops.axis_size('{axis}')), of a dim '/{axis}'"
                raise ShardingError(f"what is {word} over the devices along {axis} differs by mesh\n  fix: {fix}")
        return [dataclasses.replace(state, pending=state.pending | axes, zero=False)]

    return marks.mark(("axis_size", count.axes, count.factor), rule, jax.eval_shape(lambda x: x / 1, x), x)


def annotation(said, spec: Spec, value, where: str):
    """Marks an annotation: the value in the trace, which is of that type from there on."""

    def rule(states):
        require(spec, states[0])
        return [State.of(spec)]

    return marks.mark(said, rule, value, value, where=where)


# -- Values of one device each -----------------------------------------------------------------------------------------
def without_dim(axis: str, states):
    """The rule of what goes into `shardops.each`: its first dim, 'p/p', is not there inside."""
    (state,) = states
    if state.zero:
        return [dataclasses.replace(state, dims=state.dims[1:])]
    if state.dims[0] != (axis,):
        raise ShardingError(f"the first dim is {state.along(state.dims[0])}: write '{axis}/{axis} ...'")
    axes = dict(split=state.split | {axis}, without_dim=state.without_dim | {axis})
    return [dataclasses.replace(state, dims=state.dims[1:], **axes)]


def with_dim(axis: str, states):
    """The rule of what comes out of `shardops.each`: it has that dim again."""
    (state,) = states
    if axis in state.pending:
        raise ShardingError(f"a result is pending over {axis}: reduce it first")
    axes = dict(split=state.split | {axis}, without_dim=state.without_dim - {axis})
    return [dataclasses.replace(state, dims=((axis,), *state.dims), **axes)]


# -- Gradients ---------------------------------------------------------------------------------------------------------
def pullback(name, args, result):
    """A function from the result's cotangent to the arguments' gradients. The backward pass is not traced: the
    gradients' types follow from the values' (`verify.py`)."""
    check = marks.current()
    check.gradients = True
    results, leaves, axes = jax.tree.leaves(result), jax.tree.leaves(args), frozenset(mapped_axes())
    paths = [path for arg in args for path, _ in jax.tree_util.tree_leaves_with_path(arg)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    where = f"  at {users_line()} in shardops.{name}"

    def rule(states):
        count = len(results)
        of_results, cotangents, of_args = states[:count], states[count : 2 * count], states[2 * count :]
        for index, (state, cotangent) in enumerate(zip(of_results, cotangents)):
            if name == "value_and_grad":
                _require_pending(state, axes)
            require_dual(cotangent, state, axes, f"the cotangent of result {index}")
        if any(state.zero for state in of_args):
            what = "a constant zero, which has no type, is differentiated"
            raise ShardingError(f"{what}\n  fix: make it with shardops.zeros, which gives it one")
        return [dataclasses.replace(dual(state, axes), gradient_of=name) for name, state in zip(names, of_args)]

    def pull(cotangent):
        if jax.tree.structure(cotangent) != jax.tree.structure(result):
            raise ShardingError(f"the cotangent is no tree like the result\n{where}")
        for one, other in zip(jax.tree.leaves(cotangent), results):
            if jnp.shape(one) != jnp.shape(other):
                shapes = " and ".join(shown(jnp.shape(x)) for x in (one, other))
                raise ShardingError(f"the cotangent has another shape than the result, {shapes}\n{where}")
        operands = *results, *jax.tree.leaves(cotangent), *leaves
        # The pullback may send wherever the function has sent.
        return marks.mark((name,), rule, jax.tree.map(jnp.asarray, args), *operands, where=where, moves=check.moves)

    return pull


def _require_pending(loss: State, axes: frozenset[str]):
    for axis in sorted(axes - loss.pending):
        what = f"the loss is {loss.word(axis)} along {axis}: it would count once for each device along {axis}"
        raise ShardingError(f"{what}\n  fix: return it pending, '{Spec((), tuple(mapped_axes()))}', before any psum")
