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
devices and split no dim down to one element. The two are walked side by side. Where they differ in more than the sizes
of split dims, the program counts what a device holds (`x.shape[0]` of a split dim), and is refused. The mesh that the
user has then shows whether its sizes fit, and that the program there is the same one.

Backward passes are not walked: the gradient's type follows from the value's by exchanging same and pending
(`shardops.vjp`), since each operation's transpose does just that. Backward rules that the program brings along
(`jax.custom_vjp`, `jax.custom_jvp`) are walked where they stand.
"""

import contextvars
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from shardlib.mesh import function_of, scan_counts, trace_with_axes
from shardlib.primitives import Equation, apply, require_uniform
from shardlib.spec import Indivisible, ShardingError, Spec, is_users, line_of, parts, spoken_name, users_line
from shardlib.states import Made, State, agree, describe, join, whole


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
    """One trace in progress.

    Attributes:
      axes: the mesh's axes, of the trace.
      shown: those of the user's mesh, for messages.
      marking: whether operations and annotations become marks; else the program is traced as it runs.
      marks: every mark that the trace has met, by name.
      schedule: whether the program names its devices, as in 'p/p': how many turns it takes, and which slot is used in
        which, may then depend on how many there are.
      gradients: whether it takes one.
    """

    axes: dict[str, int]
    shown: dict[str, int]
    marking: bool = True
    marks: dict[str, Mark] = field(default_factory=dict)
    schedule: bool = False
    gradients: bool = False
    proved: int = 0


_MARK = "shardlib mark"
_current: contextvars.ContextVar[Check | None] = contextvars.ContextVar("check", default=None)
_serial = itertools.count()


def current() -> Check | None:
    """The check that is being traced."""
    return _current.get()


def marking() -> bool:
    """Whether operations and annotations are to be marked."""
    check = _current.get()
    return check is not None and check.marking


def note(what: str):
    """Notes in the check that is being traced, if any, that the program has a `schedule` or takes `gradients`."""
    if (check := _current.get()) is not None:
        setattr(check, what, True)


def mark(rule, implementation, *operands, moves: tuple[str, ...] = (), sealed: bool = False):
    """Calls `implementation(*operands)`; in a check, as a mark with `rule(states of the operands' leaves) -> states of
    the results' leaves`.

    `moves` are the axes over which devices exchange data: all of them must get there, so a mark under a branch that
    depends on them is refused. A `sealed` implementation is the user's own, and must not send anything.
    """
    if not marking():
        return implementation(*operands)

    def call(*operands):
        return implementation(*operands)

    call.__name__ = _record(rule, moves, jax.tree.leaves(operands), sealed)
    return jax.jit(call)(*operands)


def mark_value(rule, value):
    """In a check, marks one value with a rule, and returns it marked (an annotation: nothing is computed)."""
    return checkpoint_name(value, _record(rule, (), [value], False)) if marking() else value


def _record(rule, moves, operands, sealed) -> str:
    marks = _current.get().marks
    name = f"{_MARK} {len(marks)}"
    marks[name] = Mark(rule, frozenset(moves), [jnp.ndim(operand) for operand in operands], sealed, users_line())
    return name


_GRAD = (
    "a jax.grad, jax.vjp or jax.jvp inside typed_shard_map: the type of its result cannot be known\n"
    "  fix: use shardops.value_and_grad, shardops.grad or shardops.vjp, which give each gradient its type"
)


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
    tree = jax.tree.structure(arguments)
    shapes = list(zip(jax.tree.leaves(arguments), in_specs))

    def trace(sizes: dict[str, int], marking: bool = True):
        check = Check(sizes, axes, marking)
        local = jax.tree.unflatten(tree, [_on_a_device(leaf, spec, sizes) for leaf, spec in shapes])
        return check, _traced(function, check, local)

    starts = [State.of(spec) for spec in in_specs]
    one, alone = trace(dict.fromkeys(axes, 1))
    walk = _Walk(one, functions=set())
    walk(alone, starts)
    many, small = _on_small_mesh(trace, axes, [(leaf.shape, spec) for leaf, spec in shapes], alone)
    walk_many = _Walk(many)
    walk_many(small, starts, alone)
    check, here = trace(axes)
    if (eqn := _unlike(here, small, _MOVES)) is not None:
        text = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ShardingError(f"{_ANOTHER}, and is not proved for {text}\n  at {walk.where(eqn)}")
    if check.gradients:
        trace(axes, marking=False)
    return many.proved, walk.functions


def _on_a_device(leaf, spec: Spec, axes: dict[str, int]):
    """The shape of a device's part; a dim that is named like an axis has that axis' size."""
    sizes = [axes[dim.name] if dim.name in axes else size for dim, size in zip(spec.dims, leaf.shape)]
    return jax.ShapeDtypeStruct(
        tuple(size // parts(dim, axes) for dim, size in zip(spec.dims, sizes)), leaf.dtype
    )


def _traced(function, check: Check, arguments: list):
    token = _current.set(check)
    try:
        # The extra axis is in the key of every cache of traced functions, so that nothing traced here is met by the
        # real trace.
        return trace_with_axes(function, {**check.axes, f"check {next(_serial)}": 1}, *arguments)
    except ShardingError:
        raise
    # JAX's own: shapes that do not fit, a while loop without a gradient, a value that leaks
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ShardingError(f"{error}\n  at {line_of(error)}") from error
    finally:
        _current.reset(token)


def _on_small_mesh(trace, axes: dict[str, int], shapes: list[tuple[tuple[int, ...], Spec]], alone):
    """The trace on the check's own mesh: each axis has a small number of devices, all different where that can be, that
    divide the dims that they split, with more than one element left on each where that can be. An axis for which there
    is no such number has one device; so has one that leaves single elements for which JAX traces another program than
    `alone`, on one device."""
    fits = [
        (size, dim.axes)
        for shape, spec in shapes
        for dim, size in zip(spec.dims, shape)
        if dim.axes and dim.name not in axes
    ]
    at_least = 1
    while True:
        sizes = dict.fromkeys(axes, 1)
        for axis in axes:
            for left in (2, at_least):
                choices = [n for n in (2, 3, 4, 5, 7, 8) if _leaves({**sizes, axis: n}, axis, fits) >= left]
                if choices and sizes[axis] == 1:
                    sizes[axis] = next((n for n in choices if n not in sizes.values()), choices[0])
        try:
            check, traced = trace(sizes)
        except Indivisible as error:  # a dim that no argument has
            if all(sizes[axis] == 1 for axis in error.axes) or (error.size, error.axes) in fits:
                raise
            fits.append((error.size, error.axes))
            continue
        if at_least == 2 or _unlike(traced, alone) is None:
            return check, traced
        at_least = 2


def _leaves(sizes: dict[str, int], axis: str, fits: list[tuple[int, tuple[str, ...]]]) -> int:
    """How many elements are left on a device, at the least, of the dims that an axis splits; 0 where it cannot."""
    counts = [(size, math.prod(sizes[each] for each in axes)) for size, axes in fits if axis in axes]
    return min((0 if size % count else size // count for size, count in counts), default=2)


_ANOTHER = (
    "another program is traced for another number of devices: what is computed must not depend on the size of a "
    "device's part"
)
# Where a device holds one row, JAX moves it in ways of its own.
_MOVES = frozenset("broadcast_in_dim concatenate dynamic_slice gather reshape slice squeeze transpose".split())


def _unlike(one, other, but: frozenset[str] = frozenset()):
    """The first equation of a jaxpr that another one has not at its place, `but` operations of these names, whatever
    the sizes; None if the two are alike."""
    one, other = (
        [eqn for eqn in getattr(each, "jaxpr", each).eqns if eqn.primitive.name not in but] for each in (one, other)
    )
    for a, b in itertools.zip_longest(one, other):
        if a is None or b is None or a.primitive is not b.primitive:
            return a or b
        if str(a.params.get("name")).startswith(_MARK):  # over an axis of one device nothing is sent
            continue
        for inner in itertools.starmap(functools.partial(_unlike, but=but), zip(_inner(a), _inner(b), strict=True)):
            if inner is not None:
                return inner
    return None


def _inner(eqn) -> list:
    """The jaxprs among an equation's parameters."""
    return [
        each
        for value in eqn.params.values()
        for each in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(getattr(each, "jaxpr", each), "eqns")
    ]


_CALLS = "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call composite".split()
_REFS = {"new_ref", "get", "swap", "addupdate", "freeze"}


class _Walk:
    """Walks a traced program with the states of its arguments."""

    def __init__(self, check: Check, functions: set[tuple[str, int]] | None = None):
        self.check = check
        self.functions = functions  # of the user's program: those that were met are added
        # Of the jitted function that is being walked: inner lines may come from a cached trace.
        self.line: str | None = None
        self.spoken: str | None = None
        self.near = "unknown line"  # of the equation around the one that is walked: JAX's own functions have none
        self.divergent: frozenset[str] = frozenset()  # axes along which devices may take different branches here
        self.rule = ""  # 'jax.custom_vjp' inside one
        self.backward = False  # in its backward rule
        self.within = None, None  # the jaxpr that is being walked, and its twin

    def __call__(self, jaxpr, states: list[State], twin=None):
        token = _current.set(self.check)  # backward rules are traced on the way
        try:
            self.jaxpr(jaxpr, states, twin)
        finally:
            _current.reset(token)

    def jaxpr(self, jaxpr, states: list[State], twin=None) -> list[State]:
        consts, twin_consts = getattr(jaxpr, "consts", ()), getattr(twin, "consts", None)
        jaxpr, twin = getattr(jaxpr, "jaxpr", jaxpr), getattr(twin, "jaxpr", twin)
        known = dict(zip(jaxpr.invars, states, strict=True))
        for position, (variable, value) in enumerate(zip(jaxpr.constvars, consts)):
            known[variable] = self.constant(value, twin_consts[position] if twin_consts is not None else None)

        def read(atom, other=None) -> State:
            if hasattr(atom, "val"):
                return self.constant(atom.val, getattr(other, "val", None))
            # A constant that is closed over is the same everywhere.
            return known[atom] if atom in known else State(whole(atom.aval.ndim))

        for index, eqn in enumerate(jaxpr.eqns):
            outer = self.line, self.near, self.spoken
            line = self.near = self.line or self.where(eqn) or self.near
            spoken = self.spoken or spoken_name(eqn)
            if eqn.primitive.name in ("jit", "pjit"):
                self.line, self.spoken = line, spoken
            try:
                other = self.twin_of(eqn, twin, index)
                given = other.invars if other is not None else [None] * len(eqn.invars)
                self.within = jaxpr, twin
                results = self.equation(eqn, list(map(read, eqn.invars, given)), other)
            except ShardingError as error:
                text = str(error)
                if "\n  at " in text:
                    raise
                name = eqn.primitive.name
                if spoken not in (None, name):
                    text = text.replace(f"'{name}'", f"'{spoken}' ({name})", 1)
                raise ShardingError(f"{text}\n  at {line}") from None
            finally:
                self.line, self.near, self.spoken = outer
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def twin_of(self, eqn, twin, index):
        """The same equation of the program on one device."""
        if twin is None:
            return None
        other = twin.eqns[index] if index < len(twin.eqns) else None
        if other is None or other.primitive is not eqn.primitive:
            raise ShardingError(
                f"{_ANOTHER} ('{eqn.primitive.name}' is not in both)\n"
                "  fix: lax.scan or lax.fori_loop for turns; shardops.axis_size says how many devices there are"
            )
        return other

    def constant(self, value, twin) -> State:
        """The state of a number or an array that the trace holds."""
        shape = jnp.shape(value)
        if twin is None:
            return State(whole(len(shape)), zero=shape == () and bool(value == 0))
        if shape != jnp.shape(twin):
            dims = [() if size == other else Made.OWN for size, other in zip(shape, jnp.shape(twin), strict=True)]
            return State(tuple(dims))
        trusted = self.check.schedule and not jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        equal = value is twin or trusted or _equal(value, twin)
        return State(whole(len(shape)), zero=equal and shape == () and bool(value == 0), sized=not equal)

    def where(self, eqn) -> str | None:
        """The user's line of an equation; notes the functions that it was reached through."""
        traceback, found = eqn.source_info.traceback, None
        for frame in traceback.frames if traceback is not None else ():
            if frame.function_name == trace_with_axes.__name__:
                break
            if is_users(frame.file_name):
                found = found or f"{frame.file_name}:{frame.line_num}"
                if self.functions is None:
                    break
                self.functions.add((frame.file_name, frame.function_start_line))
        return found

    def equation(self, eqn, states: list[State], twin) -> list[State]:
        name, params = eqn.primitive.name, eqn.params
        stack = str(eqn.source_info.name_stack)
        if not self.backward and ("jvp(" in stack or "transpose(" in stack):
            raise ShardingError(_GRAD)
        if name in ("jit", "pjit", "name") and params["name"] in self.check.marks:
            return self.mark(self.check.marks[params["name"]], eqn, states, twin)
        if foreign := _axis_names(params) & set(self.check.axes):
            if self.rule:
                raise ShardingError(self.sends_in_rule(foreign))
            raise ShardingError(
                f"'{name}' over {', '.join(sorted(foreign))} outside of shardops: every transfer is written as an "
                "operation with a string"
            )
        if name == "scan":
            return self.scan(eqn, states, twin)
        if name == "while":
            return self.while_loop(params, states, twin)
        if name == "cond":
            return self.cond(params, states, twin)
        if name in _CALLS:
            return self.call(eqn, states, twin)
        if name in _REFS:
            return self.ref(eqn, states)
        hidden = name in ("pallas_call", "custom_call", "ffi_call", "shard_map") or "callback" in name or _inner(eqn)
        if (hidden and eqn.outvars) or not (eqn.outvars or name.startswith("debug_")):
            if name not in _WITH_JAXPR:
                raise ShardingError(
                    f"'{name}': what it does cannot be seen\n"
                    "  fix: call it through shardops.local, with a declared type"
                )
        if not eqn.outvars:  # jax.debug.print
            return []
        return apply(
            Equation(eqn, states, twin, self.check.axes, self.check.schedule, unreduced=self.backward)
        )

    def call(self, eqn, states, twin):
        name = eqn.primitive.name
        (inner, *_), twins = _inner(eqn), _inner(twin) if twin is not None else [None]
        if not name.startswith("custom_"):
            return self.jaxpr(inner, states, twins[0])
        outer, self.rule = self.rule, f"jax.{name.removesuffix('_call')}"
        jaxpr, twin_jaxpr = self.within
        try:
            results = self.jaxpr(inner, states, twins[0])
            if not self.backward:
                self.check_backward(eqn, jaxpr, states, results, None if twin is None else (twin, twin_jaxpr))
            return results
        finally:
            self.rule = outer

    def check_backward(self, eqn, jaxpr, states, results, twin):
        """Walks a backward rule that the program brings along: from cotangents of the dual types it must make gradients
        of the dual types, and send nothing. `twin` is the same equation on one device, and its jaxpr."""
        axes = frozenset(self.check.axes)
        operands = [index for index, atom in enumerate(eqn.invars) if not hasattr(atom, "val")]
        moved = [index for index in operands if jnp.issubdtype(eqn.invars[index].aval.dtype, jnp.inexact)]
        given = [index for index, out in enumerate(eqn.outvars) if jnp.issubdtype(out.aval.dtype, jnp.inexact)]
        if not moved or not given:
            return
        duals = [dual(results[index], axes) for index in given]
        outer = self.backward, self.check.proved
        self.backward = True
        try:
            traced = self.trace_backward(eqn, jaxpr, moved, given)
            other = self.trace_backward(*twin, moved, given) if twin is not None else None
            found = self.jaxpr(traced, [*(states[index] for index in operands), *duals], other)
            for index, state in zip(moved, found, strict=True):
                sizes = eqn.invars[index].aval.shape
                require_dual(state, states[index], axes, sizes, f"the gradient that {self.rule} gives operand {index}")
        finally:
            self.backward, self.check.proved = outer

    def trace_backward(self, eqn, jaxpr, moved, given):
        """The forward and the backward rule: operands and cotangents to gradients."""
        function, operands = function_of(eqn, jaxpr), [atom for atom in eqn.invars if not hasattr(atom, "val")]
        positions = [operands.index(eqn.invars[index]) for index in moved]

        def pull(*values):
            values, cotangents = list(values[: len(operands)]), list(values[len(operands) :])

            def forward(*floats):
                for position, value in zip(positions, floats, strict=True):
                    values[position] = value
                outs = function(*values)
                return [outs[index] for index in given]

            return jax.vjp(forward, *(values[position] for position in positions))[1](cotangents)

        atoms = (*operands, *(eqn.outvars[index] for index in given))
        return _traced(pull, self.check, [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms])

    def sends_in_rule(self, axes) -> str:
        return (
            f"a transfer over {', '.join(sorted(axes))} inside a {self.rule}: the types of its gradients cannot be "
            "known\n  fix: put it around what is local to a device, transfers outside of it; the operations of "
            "shardops have their own backward passes"
        )

    def ref(self, eqn, states) -> list[State]:
        """A mutable array keeps the type that it was made with."""
        name, held = eqn.primitive.name, states[0]
        if name == "new_ref":
            return [replace(held, zero=False, place=None, places=None, never=False)]
        if name == "freeze":
            return [held]
        moved = eqn.outvars[0] if name == "get" else eqn.invars[1]
        if len(states) > 1 + (name != "get") or moved.aval.shape != eqn.invars[0].aval.shape:
            raise ShardingError(f"'{name}' of a part of a ref: read and write it whole, as ref[...]")
        if name == "get":
            return [held]
        value = states[1]
        dims = agree(name, [held.dims, value.dims], eqn.invars[0].aval.shape)
        now = (dims, held.split | value.split, held.alone | value.alone, held.sized or value.sized)
        if now != (held.dims, held.split, held.alone, held.sized) or (value.pending != held.pending and not value.zero):
            raise ShardingError(
                f"'{name}' writes into a ref what does not lie as the ref was made\n"
                "  fix: make it of the type that is written, as jax.new_ref(shardops.zeros('B/d M', f32))"
            )
        if self.divergent - held.split:
            raise ShardingError(
                f"'{name}' under a branch that depends on a value that differs along {min(self.divergent - held.split)}: "
                "the ref would not stay the same along it"
            )
        return [held] * len(eqn.outvars)

    def mark(self, mark: Mark, eqn, states, twin):
        closed_over, operands = states[: len(states) - len(mark.ranks)], states[len(states) - len(mark.ranks) :]
        error = None
        if mark.moves & self.divergent:
            error = (
                f"a transfer over {', '.join(sorted(mark.moves & self.divergent))} under a branch that depends on a "
                "value that differs along it: some devices would wait for ever"
            )
        elif mark.moves and self.rule:
            error = self.sends_in_rule(mark.moves)
        elif [len(state.dims) for state in operands] != mark.ranks:
            error = (
                "an operation or an annotation under jax.vmap: its string does not name the mapped dim\n"
                "  fix: write the dim in the string, or use jax.lax.scan or map"
            )
        elif any(state.split or state.pending or state.sized for state in closed_over):
            error = (
                "a function that is local to a device takes a value from outside that is not the same everywhere\n"
                "  fix: pass it as an operand, with its type"
            )
        elif mark.sealed and (foreign := _all_axis_names(eqn.params["jaxpr"]) & set(self.check.axes)):
            error = (
                f"a function that is local to a device sends over {', '.join(sorted(foreign))}: write the transfer as "
                "an operation with a string"
            )
        if error is None:
            try:
                results = mark.rule(operands)
                if twin is not None:
                    view = Equation(eqn, states, twin, self.check.axes, self.check.schedule)
                    view.name = "an operation or an annotation"
                    require_uniform(view, [state.dims for state in results])
                self.check.proved += 1
                return results
            except ShardingError as refused:
                error = refused
        raise ShardingError(f"{error}\n  at {mark.line}") from None

    # -- Control flow: carries reach a fixed point; branches join ------------------------------------------------------
    def scan(self, eqn, states, twin):
        params = eqn.params
        consts, carry = scan_counts(params)
        fixed, start, rows = states[:consts], states[consts : consts + carry], states[consts + carry :]
        for row in rows:
            if row.dims[0] and row.dims[0] is not Made.ANY and not (row.dims[0] is Made.OWN and self.check.schedule):
                raise ShardingError(
                    f"a scan over a dim that is {describe(row.dims[0])}: each device would go through its own part "
                    "alone\n  fix: all_gather it first, or reshape so that the scanned dim is whole"
                )
        if twin is not None and twin.params["length"] != params["length"] and not self.check.schedule:
            raise ShardingError(
                f"a scan of as many turns as a device's part has elements ({params['length']} on the check's mesh, "
                f"{twin.params['length']} on one device)"
            )
        rows = [row.plain(row.dims[1:]) for row in rows]
        inner, other = params["jaxpr"], twin.params["jaxpr"] if twin is not None else None
        sizes = [atom.aval.shape for atom in eqn.invars[consts : consts + carry]]

        def body(now):
            return self.jaxpr(inner, [*fixed, *now, *rows], other)

        carried, out = self.fixed_point(body, start, sizes)
        return [*carried, *(state.plain(((), *state.dims)) for state in out[carry:])]

    def while_loop(self, params, states, twin):
        conds, consts = params["cond_nconsts"], params["body_nconsts"]
        start, outer = states[conds + consts :], self.divergent
        sizes = [variable.aval.shape for variable in params["body_jaxpr"].jaxpr.outvars]
        body_twin, cond_twin = (twin.params[key] if twin is not None else None for key in ("body_jaxpr", "cond_jaxpr"))

        def body(now):
            return self.jaxpr(params["body_jaxpr"], [*states[conds : conds + consts], *now], body_twin)

        try:
            while True:
                carried, _ = self.fixed_point(body, start, sizes)
                (go_on,) = self.jaxpr(params["cond_jaxpr"], [*states[:conds], *carried], cond_twin)
                self.can_decide(go_on, "the condition of a while loop")
                if go_on.split <= self.divergent:
                    return [self.under(go_on, state) for state in carried]
                self.divergent |= go_on.split
        finally:
            self.divergent = outer

    def cond(self, params, states, twin):
        index, *operands = states
        self.can_decide(index, "the index of a branch")
        outer, self.divergent = self.divergent, self.divergent | index.split
        twins = twin.params["branches"] if twin is not None else [None] * len(params["branches"])
        try:
            branches = [self.jaxpr(branch, operands, other) for branch, other in zip(params["branches"], twins)]
        finally:
            self.divergent = outer
        sizes = [variable.aval.shape for variable in params["branches"][0].jaxpr.outvars]
        return [
            self.under(index, join(*results, sizes=size)) for size, results in zip(sizes, zip(*branches), strict=True)
        ]

    def under(self, decides: State, state: State) -> State:
        """A result of a branch or a loop: it differs along the axes along which what decides differs."""
        if crossing := decides.split & state.pending:
            raise ShardingError(
                f"a result that is pending over {min(crossing)} under a branch that depends on a value that is split "
                "over it: the sum would mix them"
            )
        if not decides.split:
            return state
        split, alone = state.split | decides.split, state.alone | (decides.split - state.split)
        return State(state.dims, split, state.pending, alone, sized=state.sized)

    def fixed_point(self, body, start, sizes):
        while True:
            proved = self.check.proved
            out = body(start)
            joined = [join(before, after, sizes=size) for before, after, size in zip(start, out, sizes)]
            if joined == start:
                return joined, out
            start, self.check.proved = joined, proved

    def can_decide(self, state, what):
        if state.pending:
            raise ShardingError(f"{what} is pending over {', '.join(sorted(state.pending))}: reduce it first")
        if state.sized:
            raise ShardingError(f"{what} depends on how many devices there are, like the size of a device's part")


_WITH_JAXPR = {"reduce", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub", "sort"}


def dual(state: State, axes: frozenset[str]) -> State:
    """The state of a value's gradient: same and pending exchanged."""
    return State(state.dims, state.split, axes - state.split - state.pending, state.alone, sized=state.sized)


def require_dual(state: State, of: State, axes: frozenset[str], sizes, what: str):
    """Raises `ShardingError` if a gradient, or a cotangent, is not of the dual type of a value."""
    expected = dual(of, axes)
    if state.sized:
        raise ShardingError(f"{what} depends on how many devices there are, like the size of a device's part")
    if state.zero:
        return
    for axis in sorted(axes):
        if state.word(axis) != expected.word(axis):
            raise ShardingError(
                f"{what} is {state.word(axis)} along {axis}, but must be {expected.word(axis)}, since the value is "
                f"{of.word(axis)} along it (same and pending change places)"
            )
    agree(what, [state.dims, of.dims], sizes)


def _equal(one, other) -> bool:
    try:
        return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True))
    except TypeError:  # keys, strings: not numbers
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))


def _axis_names(params) -> set[str]:
    """The strings among the parameters that name axes, whatever the primitive calls them."""
    found = set()
    for key in ("axes", "axis_name", "axis_names", "named_axes"):
        value = params.get(key, ())
        names = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
        found |= {name for name in names if isinstance(name, str)}
    return found


def _all_axis_names(jaxpr) -> set[str]:
    """The same of all equations of a jaxpr and of those within."""
    found = set()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found |= _axis_names(eqn.params)
        for inner in _inner(eqn):
            found |= _all_axis_names(inner)
    return found
