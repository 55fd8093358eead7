"""The check: that each value lies on the mesh as its type says, proved on the program's jaxpr before a device is used.

The function is traced once more, abstractly, for the shapes of one device. In that trace each operation of shardops and
each annotation is a *mark*: a call whose rule says, from the types of what goes in, what comes out, or refuses. A walk
over the jaxpr then carries, for every value and mesh axis, one of three states:

    split      each device holds its own part (and, where it is known, which dim is split)
    same       all devices hold the same
    pending    the devices hold the terms of a sum

Between marks stands ordinary JAX, device by device. It keeps *same* if every operand is the same; it makes *split* of
split; and of *pending* only what is linear keeps the meaning: `LINEAR` lists it, everything else is refused. The walk looks at no
sizes, so that what is refused on a 4 x 2 mesh is refused on a single device too.

Backward passes are not walked: the gradient's type follows from the value's by exchanging same and pending
(`shardops.value_and_grad`), since each operation's transpose does just that.
"""

import contextvars
import itertools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from shardlib.mesh import trace_with_axes
from shardlib.spec import ShardingError, Spec, is_users, users_line

Dims = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class State:
    """How a value lies: for each dim the axes that split it (None where that is not known), and all axes that are split or pending.

    Zeros made from nothing lie in any way: adding them to a term of a sum changes nothing.
    """

    dims: Dims
    split: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()
    zero: bool = False

    @classmethod
    def of(cls, spec: Spec) -> "State":
        return cls(tuple(dim.axes for dim in spec.dims), spec.split, frozenset(spec.pending))

    def word(self, axis: str) -> str:
        return "pending" if axis in self.pending else "split" if axis in self.split else "the same"


@dataclass
class Check:
    """One check in progress: the mesh's axes, and the rule of every mark that the trace has met."""

    axes: dict[str, int]
    rules: dict = field(default_factory=dict)
    proved: int = 0


_current: contextvars.ContextVar[Check | None] = contextvars.ContextVar("check", default=None)
_serial = itertools.count()


def checking() -> dict[str, int] | None:
    """The mesh's axes while a check is being traced, else None."""
    check = _current.get()
    return None if check is None else check.axes


def mark(rule, implementation, *operands, moves: tuple[str, ...] = ()):
    """Calls `implementation(*operands)`; in a check, as a mark with `rule(states of the operands' leaves) -> states of the results' leaves`.

    `moves` are the axes over which devices exchange data: all of them must get there, so a mark under a branch that depends on them is refused.
    """
    check = _current.get()
    if check is None:
        return implementation(*operands)

    @jax.custom_jvp
    def marked(*operands):
        return implementation(*operands)

    @marked.defjvp
    def _refuse(primals, tangents):
        raise ShardingError(_GRAD)

    def call(*operands):
        return marked(*operands)

    call.__name__ = f"shardlib mark {len(check.rules)}"
    check.rules[call.__name__] = rule, frozenset(moves), users_line()
    return jax.jit(call)(*operands)


_GRAD = (
    "a jax.grad or jax.vjp inside typed_shard_map: the type of its result cannot be known\n"
    "  fix: use shardops.value_and_grad or shardops.grad, which give each gradient its type"
)


def require(spec: Spec, state: State, *, strict: bool):
    """Raises `ShardingError` if a value's state contradicts its type; `strict` (operations) also refuses 'split' said of what is the same.

    An annotation may call a value split that is the same on all devices (positions, zeros): each device's part is then equal.
    """
    for axis in sorted(state.split | state.pending | spec.split | frozenset(spec.pending)):
        said = State.of(spec).word(axis)
        true = state.word(axis)
        if said == true or (said, true) == ("split", "the same") and not strict:
            continue
        why = {
            ("the same", "split"): f"the value differs along {axis}: a reduction over {axis} or a gather was forgotten, or '/{axis}' is missing",
            ("the same", "pending"): f"the value is still a sum over {axis} that nobody has taken: reduce it, or write '+{axis}'",
            ("split", "pending"): f"the value is still a sum over {axis} that nobody has taken (psum_scatter makes '/{axis}' of '+{axis}')",
            ("split", "the same"): f"the value is the same along {axis} (slice makes '/{axis}' of it; zeros and full make new ones)",
            ("pending", "the same"): f"the value is already the same along {axis}: a sum over {axis} would count it once for each device",
            ("pending", "split"): f"the value is split over {axis}, it is no term of a sum over {axis}",
        }[said, true]
        raise ShardingError(f"'{spec}' says {said} along {axis}, but {why}")
    for dim, axes in zip(spec.dims, state.dims):
        if axes is not None and axes != dim.axes:
            raise ShardingError(
                f"'{spec}' says {'/'.join((dim.name, *dim.axes))}, but that dim is {'split over ' + '/'.join(axes) if axes else 'whole'} in the value: write {'/'.join((dim.name, *axes))}"
            )


def verify(function, axes: dict[str, int], arguments, in_specs: list[Spec], out_specs: list[Spec]) -> int:
    """Traces `function` on one device's shapes and walks it; returns how many claims were proved.

    Args:
      function: the body that `shard_map` would run.
      axes: the mesh's axes and sizes.
      arguments: tree of `ShapeDtypeStruct`, local shapes.
      in_specs, out_specs: the types of the leaves of the arguments and of the result.
    Raises:
      ShardingError: at the first claim that is not so, with its line.
    """
    check = Check(dict(axes))
    token = _current.set(check)
    try:
        # The extra axis is in the key of every cache of traced functions, so that nothing traced here is met by the real trace.
        closed = trace_with_axes(function, {**axes, f"check {next(_serial)}": 1}, *arguments)
    finally:
        _current.reset(token)
    walk = _Walk(check)
    results = walk.jaxpr(closed.jaxpr, [State.of(spec) for spec in in_specs])
    for index, (spec, state) in enumerate(zip(out_specs, results, strict=True)):
        try:
            require(spec, state, strict=False)
        except ShardingError as error:
            raise ShardingError(f"{error}\n  in result {index} of {getattr(function, '__name__', 'the function')}, against its return annotation") from None
    return check.proved + len(out_specs)


# Linear in the operands at these positions together ('all': in each of them, all of one state), with the others the same along
# the pending axis. The names are those of jax 0.10 and 0.11.
_ALL = "all"
LINEAR = {
    **dict.fromkeys(("neg", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "reduce_sum", "cumsum"), _ALL),
    **dict.fromkeys(("slice", "rev", "copy", "copy_p", "reduce_precision", "name", "concatenate", "split"), _ALL),
    **dict.fromkeys(("add", "sub", "add_any", "optimization_barrier"), _ALL),
    **dict.fromkeys(("gather", "dynamic_slice", "div"), (0,)),
    **dict.fromkeys(("dynamic_update_slice",), (0, 1)),
    **dict.fromkeys(("scatter-add",), (0, 2)),
}
BILINEAR = {"mul", "dot_general"}
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
_KEEP_ZERO = {"broadcast_in_dim", "convert_element_type", "reshape", "neg", "copy"}
_REDUCE = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
_ALONG = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}


class _Walk:
    def __init__(self, check: Check):
        self.check = check
        self.line: str | None = None  # of the jitted function that is being walked: inner lines may come from a cached trace
        self.divergent: frozenset[str] = frozenset()  # axes along which devices may take different branches here

    def jaxpr(self, jaxpr, states: list[State]) -> list[State]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, states, strict=True))

        def read(atom) -> State:
            if hasattr(atom, "val"):  # a literal
                return State((None,) * jnp.ndim(atom.val), zero=jnp.ndim(atom.val) == 0 and atom.val == 0)
            return known[atom] if atom in known else State((None,) * atom.aval.ndim)  # a constant is the same everywhere

        for eqn in jaxpr.eqns:
            outer = self.line
            line = self.line or _line(eqn)
            if eqn.primitive.name in ("jit", "pjit"):
                self.line = line
            try:
                results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            except ShardingError as error:
                raise error if "\n  at " in str(error) else ShardingError(f"{error}\n  at {line}") from None
            finally:
                self.line = outer
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn, states: list[State]) -> list[State]:
        name, params = eqn.primitive.name, eqn.params
        if name in ("jit", "pjit") and params["name"] in self.check.rules:
            return self.mark(*self.check.rules[params["name"]], states)
        if "transpose(" in str(eqn.source_info.name_stack):
            raise ShardingError(_GRAD)
        if foreign := _axis_names(params) & set(self.check.axes):
            raise ShardingError(f"'{name}' over {', '.join(sorted(foreign))} outside of shardops: every transfer is written as an operation with a string")
        if name == "scan":
            return self.scan(params, states)
        if name == "while":
            return self.while_loop(params, states)
        if name == "cond":
            return self.cond(params, states)
        if name in _CALLS:
            return self.jaxpr(params.get("jaxpr", params.get("call_jaxpr")), states)
        if name in ("pallas_call", "custom_call", "ffi_call"):
            raise ShardingError(f"'{name}': what a kernel does cannot be seen\n  fix: call it through shardops.local, with a declared type")
        if "callback" in name:
            everywhere = frozenset(self.check.axes)
            states = [State((), everywhere), *states]  # each device calls its own host
        return self.plain(eqn, states)

    def mark(self, rule, moves, line, states):
        if moves & self.divergent:
            raise ShardingError(
                f"a transfer over {', '.join(sorted(moves & self.divergent))} under a branch that depends on a value that differs along it: some devices would wait for ever\n  at {line}"
            )
        try:
            results = rule(states)
        except ShardingError as error:
            raise ShardingError(f"{error}\n  at {line}") from None
        self.check.proved += 1
        return results

    # -- Control flow: carries reach a fixed point; branches join ------------------------------------------------------
    def scan(self, params, states):
        consts, carry = params["num_consts"], params["num_carry"]
        fixed, start, rows = states[:consts], states[consts : consts + carry], states[consts + carry :]
        rows = [State(row.dims[1:], row.split, row.pending) for row in rows]
        carried, out = self.fixed_point(lambda now: self.jaxpr(params["jaxpr"], [*fixed, *now, *rows]), start, carry)
        return [*carried, *(State((None, *row.dims), row.split, row.pending) for row in out[carry:])]

    def while_loop(self, params, states):
        conds, consts = params["cond_nconsts"], params["body_nconsts"]
        start, outer = states[conds + consts :], self.divergent
        try:
            while True:
                carried, _ = self.fixed_point(
                    lambda now: self.jaxpr(params["body_jaxpr"], [*states[conds : conds + consts], *now]), start, len(start)
                )
                (go_on,) = self.jaxpr(params["cond_jaxpr"], [*states[:conds], *carried])
                self.no_pending(go_on, "the condition of a while loop")
                if go_on.split <= self.divergent:
                    return [State(state.dims, state.split | go_on.split, state.pending) for state in carried]
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
        joined = [_join(*results) for results in zip(*branches)]
        return [State(state.dims, state.split | index.split, state.pending) for state in joined]

    def fixed_point(self, body, start, carry):
        while True:
            proved = self.check.proved
            out = body(start)
            joined = [_join(before, after) for before, after in zip(start, out[:carry])]
            if joined == start:
                return joined, out
            start, self.check.proved = joined, proved

    def no_pending(self, state, what):
        if state.pending:
            raise ShardingError(f"{what} is pending over {', '.join(sorted(state.pending))}: reduce it first")

    # -- Ordinary operations, device by device -------------------------------------------------------------------------
    def plain(self, eqn, states):
        name = eqn.primitive.name
        split = frozenset().union(*(state.split for state in states))
        pending = self.pending(eqn, states)
        if crossing := split & pending:
            axis = min(crossing)
            raise ShardingError(f"'{name}' of a value that is pending over {axis} and one that is split over {axis}: the sum over {axis} would mix them")
        if name == "optimization_barrier":
            return states
        zero = name in _KEEP_ZERO and all(state.zero for state in states)
        return [State(dims, split, pending, zero) for dims in self.dims(eqn, states)]

    def pending(self, eqn, states) -> frozenset[str]:
        """The axes over which the result is pending; raises where that would have no meaning."""
        name = eqn.primitive.name
        axes = frozenset().union(*(state.pending for state in states))
        zeros = {index for index, state in enumerate(states) if state.zero}
        for axis in axes:
            holding = {index for index, state in enumerate(states) if axis in state.pending}
            if name in BILINEAR:
                if len(holding) == 1:
                    continue
                raise ShardingError(f"'{name}' of two values that are both pending over {axis}: the product of sums is not the sum of products\n  fix: reduce one of them first")
            if name == "select_n":
                data = set(range(1, len(states)))
            elif name == "convert_element_type" and jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
                data = {0}
            else:
                data = LINEAR.get(name, ())
                data = set(range(len(states))) if data == _ALL else set(data)
            if name == "optimization_barrier" or holding <= data <= holding | zeros:
                continue
            if holding < data:
                raise ShardingError(
                    f"'{name}' of a value that is pending over {axis} and one that is not: each device would add it again\n"
                    f"  fix: reduce the pending one first, or make the other pending with shardops.pending (zeros: shardops.zeros)"
                )
            raise ShardingError(f"'{name}', which is not linear, of a value that is pending over {axis}: a function of a sum is not the sum of the function\n  fix: reduce it over {axis} first")
        return axes

    def dims(self, eqn, states) -> list[Dims]:
        """Which axes split each dim of the results, where that follows; raises if a split dim is reduced or two operands lie differently."""
        name, params = eqn.primitive.name, eqn.params
        shapes = [tuple(atom.aval.shape) for atom in eqn.invars]
        first = states[0].dims if states else ()
        out = eqn.outvars[0].aval.shape

        def refuse_reduced(axes_of_dims, what):
            for axes in axes_of_dims:
                if axes:
                    raise ShardingError(f"'{name}' {what} a dim that is split over {'/'.join(axes)}: a split dim is reduced only by an operation with a string (sum_unreduced, einsum_unreduced, pmax)")

        if name in _REDUCE:
            refuse_reduced((first[axis] for axis in params["axes"]), "over")
            return [tuple(axes for axis, axes in enumerate(first) if axis not in params["axes"])]
        if name in _ALONG:
            refuse_reduced([first[params["axis"]]], "along")
        if name == "sort":
            refuse_reduced([first[params["dimension"]]], "along")
        if name == "dot_general":
            (left, right), (left_batch, right_batch) = params["dimension_numbers"]
            a, b = states[0].dims, states[1].dims
            refuse_reduced([a[i] for i in left] + [b[i] for i in right], "contracts")
            batch = _agree(name, [tuple(a[i] for i in left_batch), tuple(b[i] for i in right_batch)])
            free_a = tuple(axes for i, axes in enumerate(a) if i not in (*left, *left_batch))
            free_b = tuple(axes for i, axes in enumerate(b) if i not in (*right, *right_batch))
            return [(*batch, *free_a, *free_b)]
        if name == "transpose":
            return [tuple(first[axis] for axis in params["permutation"])]
        if name == "broadcast_in_dim":
            places = params["broadcast_dimensions"]
            where = {place: axis for axis, place in enumerate(places) if shapes[0][axis] == out[place] or first[axis]}
            return [tuple(first[where[axis]] if axis in where else None for axis in range(len(out)))]
        if name in ("squeeze", "reduce"):
            dropped = params["dimensions"]
            return [tuple(axes for axis, axes in enumerate(first) if axis not in dropped)]
        if name in ("slice", "dynamic_slice"):
            return [tuple(axes if shapes[0][axis] == out[axis] else None for axis, axes in enumerate(first))]
        results = []
        for variable in eqn.outvars:
            shape = tuple(getattr(variable.aval, "shape", ()))
            alike = [state.dims for state, at in zip(states, shapes) if at == shape]
            elementwise = all(at in (shape, ()) for at in shapes)
            results.append(_agree(name, alike) if elementwise and alike else (None,) * len(shape))
        return results


def _agree(name, rows: list[Dims]) -> Dims:
    """The dims of an elementwise result: what is known of any operand; raises where two operands are known to lie differently."""
    result = []
    for position, column in enumerate(zip(*rows)):
        known = {axes for axes in column if axes is not None}
        if len(known) > 1:
            one, other = sorted(known)[:2]
            raise ShardingError(
                f"'{name}' of values that lie differently: dim {position} is {'split over ' + '/'.join(one) if one else 'whole'} in one operand, {'split over ' + '/'.join(other) if other else 'whole'} in another"
            )
        result.append(known.pop() if known else None)
    return tuple(result)


def _join(*states: State) -> State:
    """What holds on every path: split if split on one; pending must be so on all."""
    pending = next((state.pending for state in states if not state.zero), frozenset())
    for state in states:
        if state.pending != pending and not state.zero:
            axis = min(state.pending ^ pending)
            raise ShardingError(
                f"a carry or a branch is pending over {axis} on one path and not on the other\n  fix: start the carry with shardops.zeros('... +{axis}'), or reduce over {axis} inside"
            )
    dims = tuple(column[0] if all(axes == column[0] for axes in column) else None for column in zip(*(state.dims for state in states)))
    return State(dims, frozenset().union(*(state.split for state in states)), pending, all(state.zero for state in states))


def _axis_names(params) -> set[str]:
    """The strings among the parameters that name axes, whatever the primitive calls them."""
    found = set()
    for key in ("axes", "axis_name", "axis_names", "named_axes"):
        value = params.get(key, ())
        found |= {name for name in (value if isinstance(value, (tuple, list, set, frozenset)) else (value,)) if isinstance(name, str)}
    return found


def _line(eqn) -> str:
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if is_users(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return "unknown line"

