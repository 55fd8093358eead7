"""Marks in a trace under the check: each operation of shardops and each annotation is recorded as one, with a rule.

`verify.py` makes the trace, `walk.py` goes through it; docs/notation.md says what is proved.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from shardlib.places import users_line
from shardlib.proof.parts import Parts
from shardlib.spec import Dim, ShardingError, Spec, parts


@dataclass(frozen=True)
class Mark:
    """An operation or an annotation in the trace.

    Attributes:
      said: what the source says there: the operation, its string, and what else it was given.
      rule: from the states of the operands' leaves to those of the results'; it refuses.
      moves: the axes over which it sends.
      operands: how many there are. What follows them in the trace, a function of the user's has closed over.
      sealed: the jaxpr of a function of the user's that it runs, which must not send.
      where: the last lines of its errors.
    """

    said: tuple
    rule: Callable
    moves: frozenset[str]
    operands: int
    sealed: object
    where: str


@dataclass
class Check:
    """One trace in progress.

    Attributes:
      axes: the mesh's axes.
      parts: the sizes of what a device holds; None: they are numbers, and the program is traced as it runs.
      moves: the axes over which anything has been sent so far.
      proved: the number of those that were walked, each of which is a claim.
      gradients: whether the program takes one.
      is_local: whether what is traced is a function of `shardops.local`, which knows nothing of the mesh.
    """

    axes: dict[str, int]
    parts: Parts | None
    moves: frozenset[str] = frozenset()
    gradients: bool = False
    proved: int = 0
    is_local: bool = False


_current: contextvars.ContextVar[Check | None] = contextvars.ContextVar("check", default=None)
# The axes along which what is traced runs on each device by itself, as if the mesh did not have them.
_axes_of_each: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("axes_of_each", default=frozenset())


def current() -> Check | None:
    return _current.get()


def marking() -> Check | None:
    """The check, if operations and annotations are to be marked."""
    check = _current.get()
    return check if check is not None and check.parts is not None else None


def part_of(whole: int, dim: Dim, axes: dict[str, int]):
    """The size of a device's part of a dim; in the check a symbol, unless the dim counts devices."""
    check = marking()
    return whole // parts(dim, axes) if check is None or dim.name in axes else check.parts.size(whole, dim.axes)


def whole_of(size, dim: Dim, axes: dict[str, int], spec: Spec) -> int:
    """The size of the whole dim, of that of a device's part. In the check the part's symbol says what splits the dim:
    raises `ShardingError` if `spec`, which has the dim, says otherwise."""
    if (check := marking()) is None or dim.name in axes:
        return size * parts(dim, axes)
    if dim.name != "..." and (lies := check.parts.axes(size)) != dim.axes:
        raise ShardingError(_lies_otherwise(spec, dim, lies))
    return check.parts.whole(size)


def _lies_otherwise(spec: Spec, dim: Dim, lies: tuple[str, ...]) -> str:
    said, true = str(dim).strip("[]"), "/".join((dim.name, *lies))
    if not lies:
        fix = f"write {true}, or make {said} of it: psum_scatter if it is a sum, slice if it is the same"
        return f"'{spec}' says {said}, but that dim is whole in the value: {fix}"
    gather = "" if set(lies) <= set(dim.axes) else ", or a gather was forgotten"
    return f"'{spec}' says {said}, but that dim is split over {'/'.join(lies)} in the value: write {true}{gather}"


def on_this_mesh(shape) -> list[int]:
    """The shape of a value on a device of the user's mesh, where the check has symbols as sizes."""
    if (check := marking()) is None:
        return list(shape)
    return list(map(check.parts.on_mesh, shape))


_mark = Primitive("shardlib_mark")
_mark.multiple_results = True
_mark.def_abstract_eval(lambda *_, mark, results: [jax.core.ShapedArray(*result) for result in results])


def mark(said, rule, results, *operands, where="", moves=(), sealed=None, closed_over=()):
    """In a check, marks what the source `said`: the `results`, a tree with shapes and dtypes, are of `operands` what
    `rule(states of the operands' leaves) -> states of the results' leaves` says.

    `where` are the last lines of an error. `moves` are the axes over which devices exchange data: all of them must get
    there, so a mark under a branch that depends on them is refused. `sealed` is the jaxpr of a function of the user's,
    which must not send, and which has `closed_over` these values.
    """
    check, leaves = _current.get(), list(map(jnp.asarray, jax.tree.leaves(operands)))
    if _axes_of_each.get():
        rule = functools.partial(_by_itself, rule, _axes_of_each.get())
    check.moves |= frozenset(moves)
    made, tree = jax.tree.flatten(results)
    shapes = tuple((tuple(leaf.shape), jnp.dtype(leaf.dtype)) for leaf in made)
    known = Mark(said, rule, frozenset(moves), len(leaves), sealed, where or f"  at {users_line()}")
    return jax.tree.unflatten(tree, _mark.bind(*leaves, *closed_over, mark=known, results=shapes))


def mark_of(eqn) -> Mark | None:
    """The mark that an equation of a check's trace is, if it is one."""
    return eqn.params["mark"] if eqn.primitive is _mark else None


@contextlib.contextmanager
def _inside(variable: contextvars.ContextVar, value):
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def during(check: Check):
    """A context: code traced inside is traced for this check."""
    return _inside(_current, check)


def axes_of_each() -> frozenset[str]:
    """The axes of the `shardops.each` around what is traced: inside they are not there."""
    return _axes_of_each.get()


def on_each(axis: str):
    """A context: code traced inside runs on each device along an axis by itself."""
    return _inside(_axes_of_each, _axes_of_each.get() | {axis})


def _by_itself(rule, axes, states):
    """Applies a rule that does not know these axes: it maps one device's values to that device's results."""
    gone = frozenset().union(*(state.without_dim & axes for state in states))
    inside = [replace(state, split=state.split - gone, without_dim=state.without_dim - gone) for state in states]
    return [replace(state, split=state.split | gone, without_dim=state.without_dim | gone) for state in rule(inside)]
