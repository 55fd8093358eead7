"""The check: that each value lies on the mesh as its type says, proved on the program's jaxpr before a device is used.

The function is traced once more, abstractly, for the shapes of one device. In that trace each operation of shardops and
each annotation is a *mark*: a call whose rule says, from the types of what goes in, what comes out, or refuses. A walk
over the jaxpr then carries, for every value and mesh axis, one of three states:

    split      each device holds its own part (and, where it is known, which dim is split)
    same       all devices hold the same
    pending    the devices hold the terms of a sum

Between marks stands ordinary JAX, device by device (`shardlib/primitives.py`): it keeps *same* if every operand is the
same, makes *split* of split, and *pending* of pending where it is linear. The walk does not go by the sizes of mesh
axes, so that what is refused on a 4 x 2 mesh is refused on a single device too.

Backward passes are not walked: the gradient's type follows from the value's by exchanging same and pending
(`shardops.value_and_grad`), since each operation's transpose does just that.
"""

import contextvars
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib.mesh import scan_counts, trace_with_axes
from shardlib.primitives import apply
from shardlib.spec import ShardingError, Spec, is_users, line_of, users_line
from shardlib.states import State, describe, join, whole


@dataclass(frozen=True)
class Mark:
    """An operation or an annotation in the trace: its rule, the axes it sends over, the ranks of its operands, its
    line."""

    rule: Callable
    moves: frozenset[str]
    ranks: list[int]
    sealed: bool
    line: str


@dataclass
class Check:
    """One check in progress: the mesh's axes, and every mark that the trace has met, by name."""

    axes: dict[str, int]
    marks: dict[str, Mark] = field(default_factory=dict)
    proved: int = 0


_current: contextvars.ContextVar[Check | None] = contextvars.ContextVar("check", default=None)
_serial = itertools.count()


def checking() -> dict[str, int] | None:
    """The mesh's axes while a check is being traced, else None."""
    check = _current.get()
    return None if check is None else check.axes


def mark(rule, implementation, *operands, moves: tuple[str, ...] = (), sealed: bool = False):
    """Calls `implementation(*operands)`; in a check, as a mark with `rule(states of the operands' leaves) -> states of
    the results' leaves`.

    `moves` are the axes over which devices exchange data: all of them must get there, so a mark under a branch that
    depends on them is refused. A `sealed` implementation is the user's own, and must not send anything.
    """
    if _current.get() is None:
        return implementation(*operands)

    def call(*operands):
        return implementation(*operands)

    call.__name__ = _record(rule, moves, jax.tree.leaves(operands), sealed)
    return jax.jit(call)(*operands)


def mark_value(rule, value):
    """In a check, marks one value with a rule, and returns it marked (an annotation: nothing is computed)."""
    return value if _current.get() is None else checkpoint_name(value, _record(rule, (), [value], False))


def _record(rule, moves, operands, sealed) -> str:
    marks = _current.get().marks
    name = f"shardlib mark {len(marks)}"
    marks[name] = Mark(rule, frozenset(moves), [jnp.ndim(operand) for operand in operands], sealed, users_line())
    return name


_GRAD = (
    "a jax.grad, jax.vjp or jax.jvp inside typed_shard_map: the type of its result cannot be known\n"
    "  fix: use shardops.value_and_grad or shardops.grad, which give each gradient its type"
)


def verify(function, axes: dict[str, int], arguments, in_specs: list[Spec]) -> int:
    """Traces `function` on one device's shapes and walks it; returns how many claims were proved.

    Args:
      function: the body that `shard_map` would run; it checks its own result.
      axes: the mesh's axes and sizes.
      arguments: tree of `ShapeDtypeStruct`, local shapes.
      in_specs: the types of the leaves of the arguments.
    Raises:
      ShardingError: at the first claim that is not so, with its line.
    """
    check = Check(dict(axes))
    token = _current.set(check)
    try:
        # The extra axis is in the key of every cache of traced functions, so that nothing traced here is met by the
        # real trace.
        closed = trace_with_axes(function, {**axes, f"check {next(_serial)}": 1}, *arguments)
    except ShardingError:
        raise
    except (
        TypeError,
        ValueError,
    ) as error:  # JAX's own: shapes that do not fit, after a reduction that was forgotten, say
        raise ShardingError(f"{error}\n  at {line_of(error)}") from error
    finally:
        _current.reset(token)
    _Walk(check).jaxpr(closed.jaxpr, [State.of(spec) for spec in in_specs])
    return check.proved


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call")


class _Walk:
    def __init__(self, check: Check):
        self.check = check
        self.line: str | None = (
            None  # of the jitted function that is being walked: inner lines may come from a cached trace
        )
        self.near = "unknown line"  # of the equation around the one that is walked: JAX's own functions have none
        self.divergent: frozenset[str] = frozenset()  # axes along which devices may take different branches here
        self.own_gradient = False  # inside a jax.custom_vjp

    def jaxpr(self, jaxpr, states: list[State]) -> list[State]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, states, strict=True))

        def read(atom) -> State:
            if hasattr(atom, "val"):  # a literal
                return State(whole(jnp.ndim(atom.val)), zero=jnp.ndim(atom.val) == 0 and atom.val == 0)
            return known[atom] if atom in known else State(whole(atom.aval.ndim))  # a constant is the same everywhere

        for eqn in jaxpr.eqns:
            outer = self.line, self.near
            line = self.near = self.line or _line(eqn) or self.near
            if eqn.primitive.name in ("jit", "pjit"):
                self.line = line
            try:
                results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            except ShardingError as error:
                raise error if "\n  at " in str(error) else ShardingError(f"{error}\n  at {line}") from None
            finally:
                self.line, self.near = outer
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn, states: list[State]) -> list[State]:
        name, params = eqn.primitive.name, eqn.params
        stack = str(eqn.source_info.name_stack)
        if "jvp(" in stack or "transpose(" in stack:
            raise ShardingError(_GRAD)
        if name in ("jit", "pjit", "name") and params["name"] in self.check.marks:
            return self.mark(self.check.marks[params["name"]], eqn, states)
        if foreign := _axis_names(params) & set(self.check.axes):
            raise ShardingError(
                f"'{name}' over {', '.join(sorted(foreign))} outside of shardops: every transfer is written as an operation with a string"
            )
        if name == "scan":
            return self.scan(params, states)
        if name == "while":
            return self.while_loop(params, states)
        if name == "cond":
            return self.cond(params, states)
        if name.startswith(_CALLS):
            outer, self.own_gradient = self.own_gradient, self.own_gradient or name.startswith("custom_vjp")
            try:
                return self.jaxpr(params.get("jaxpr", params.get("call_jaxpr")), states)
            finally:
                self.own_gradient = outer
        if name in ("pallas_call", "custom_call", "ffi_call", "shard_map") or ("callback" in name and eqn.outvars):
            raise ShardingError(
                f"'{name}': what it does cannot be seen\n  fix: call it through shardops.local, with a declared type"
            )
        if not eqn.outvars:  # jax.debug.print
            return []
        return apply(eqn, states)

    def mark(self, mark: Mark, eqn, states):
        closed_over, operands = states[: len(states) - len(mark.ranks)], states[len(states) - len(mark.ranks) :]
        error = None
        if mark.moves & self.divergent:
            error = f"a transfer over {', '.join(sorted(mark.moves & self.divergent))} under a branch that depends on a value that differs along it: some devices would wait for ever"
        elif mark.moves and self.own_gradient:
            error = "a transfer inside a jax.custom_vjp: the types of its gradients cannot be known\n  fix: put the custom_vjp around what is local to a device, transfers outside of it"
        elif [len(state.dims) for state in operands] != mark.ranks:
            error = "an operation or an annotation under jax.vmap: its string does not name the mapped dim\n  fix: write the dim in the string, or use jax.lax.scan or map"
        elif any(state.split or state.pending for state in closed_over):
            error = "a function that is local to a device takes a value from outside that is not the same everywhere\n  fix: pass it as an operand, with its type"
        elif mark.sealed and (foreign := _all_axis_names(eqn.params["jaxpr"]) & set(self.check.axes)):
            error = f"a function that is local to a device sends over {', '.join(sorted(foreign))}: write the transfer as an operation with a string"
        if error is None:
            try:
                results = mark.rule(operands)
                self.check.proved += 1
                return results
            except ShardingError as refused:
                error = refused
        raise ShardingError(f"{error}\n  at {mark.line}") from None

    # -- Control flow: carries reach a fixed point; branches join ------------------------------------------------------
    def scan(self, params, states):
        consts, carry = scan_counts(params)
        fixed, start, rows = states[:consts], states[consts : consts + carry], states[consts + carry :]
        for row in rows:
            if isinstance(row.dims[0], tuple) and row.dims[0]:
                raise ShardingError(
                    f"a scan over a dim that is {describe(row.dims[0])}: each device would go through its own part alone\n  fix: all_gather it first, or reshape so that the scanned dim is whole"
                )
        rows = [State(row.dims[1:], row.split, row.pending) for row in rows]
        carried, out = self.fixed_point(lambda now: self.jaxpr(params["jaxpr"], [*fixed, *now, *rows]), start, carry)
        return [*carried, *(State(((), *row.dims), row.split, row.pending) for row in out[carry:])]

    def while_loop(self, params, states):
        conds, consts = params["cond_nconsts"], params["body_nconsts"]
        start, outer = states[conds + consts :], self.divergent
        try:
            while True:
                carried, _ = self.fixed_point(
                    lambda now: self.jaxpr(params["body_jaxpr"], [*states[conds : conds + consts], *now]),
                    start,
                    len(start),
                )
                (go_on,) = self.jaxpr(params["cond_jaxpr"], [*states[:conds], *carried])
                self.no_pending(go_on, "the condition of a while loop")
                if go_on.split <= self.divergent:
                    return [self.under(go_on, state) for state in carried]
                self.divergent |= go_on.split
        finally:
            self.divergent = outer

    def cond(self, params, states):
        index, *operands = states
        self.no_pending(index, "the index of a branch")
        outer, self.divergent = self.divergent, self.divergent | index.split
        try:
            branches = [self.jaxpr(branch, operands) for branch in params["branches"]]
        finally:
            self.divergent = outer
        return [self.under(index, join(*results)) for results in zip(*branches)]

    def under(self, decides: State, state: State) -> State:
        """A result of a branch or a loop: it differs along the axes along which what decides differs."""
        if crossing := decides.split & state.pending:
            raise ShardingError(
                f"a result that is pending over {min(crossing)} under a branch that depends on a value that is split over it: the sum would mix them"
            )
        return State(state.dims, state.split | decides.split, state.pending)

    def fixed_point(self, body, start, carry):
        while True:
            proved = self.check.proved
            out = body(start)
            joined = [join(before, after) for before, after in zip(start, out[:carry])]
            if joined == start:
                return joined, out
            start, self.check.proved = joined, proved

    def no_pending(self, state, what):
        if state.pending:
            raise ShardingError(f"{what} is pending over {', '.join(sorted(state.pending))}: reduce it first")


def _axis_names(params) -> set[str]:
    """The strings among the parameters that name axes, whatever the primitive calls them."""
    found = set()
    for key in ("axes", "axis_name", "axis_names", "named_axes"):
        value = params.get(key, ())
        found |= {
            name
            for name in (value if isinstance(value, (tuple, list, set, frozenset)) else (value,))
            if isinstance(name, str)
        }
    return found


def _all_axis_names(jaxpr) -> set[str]:
    """The same of all equations of a jaxpr and of those within."""
    found = set()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found |= _axis_names(eqn.params)
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    found |= _all_axis_names(inner)
    return found


def _line(eqn) -> str | None:
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if is_users(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return None
