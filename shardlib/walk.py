"""The walk through a traced program: from the states of its arguments to those of its results, mark by mark, with
ordinary JAX between them (`shardlib/primitives.py`), or a refusal."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.check import Check, Mark, during, mark_of
from shardlib.mesh import function_of, scan_counts, trace_with_axes
from shardlib.primitives import Equation, apply, require_uniform
from shardlib.same import ANOTHER, equal, identical, inner_jaxprs, is_literal, numbers
from shardlib.spec import ShardingError, is_users, spoken_name
from shardlib.states import Made, State, agree, describe, dual, join, merged, require_dual, whole

_GRAD = (
    "a jax.grad, jax.vjp or jax.jvp inside typed_shard_map: the type of its result cannot be known\n"
    "  fix: use shardops.value_and_grad, shardops.grad or shardops.vjp, which give each gradient its type"
)
_CALLS = "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call composite".split()
# Operations whose parameters hold a jaxpr that works element by element.
_WITH_JAXPR = {"reduce", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub", "sort"}
_WHERE = {"broadcast_in_dim", "convert_element_type", "ne", "select_n"}  # jnp.where
_REFS = {"new_ref", "get", "swap", "addupdate", "freeze"}


class Walk:
    """Goes through a trace of a check.

    Args:
      check: that made the trace.
      beside: the check whose trace on one device is walked beside it, if any.
      trace: traces a function of the program, with given shapes, for a check: backward rules, on the way.
      functions: those of the user's program that were met are added, as (file, first line).
    """

    def __init__(self, check: Check, trace, beside: Check | None = None, functions: set | None = None):
        self.check, self.trace, self.beside, self.functions = check, trace, beside, functions
        # Of the jitted function that is being walked: inner lines may come from a cached trace.
        self.line: str | None = None
        self.spoken: str | None = None
        self.near = "unknown line"  # of the equation around the one that is walked: JAX's own functions have none
        self.divergent: frozenset[str] = frozenset()  # axes along which devices may take different branches here
        self.rule = ""  # 'jax.custom_vjp' inside one
        self.backward = False  # in its backward rule
        self.turning = False  # in a loop of a program that names its devices, which sends: a ring, a pipeline
        self.within = None, None  # the jaxpr that is being walked, and its twin

    def __call__(self, jaxpr, states: list[State], twin=None):
        with during(self.check):
            self.jaxpr(jaxpr, states, twin)

    def jaxpr(self, jaxpr, states: list[State], twin=None) -> list[State]:
        consts, twin_consts = getattr(jaxpr, "consts", ()), getattr(twin, "consts", ())
        jaxpr, twin = getattr(jaxpr, "jaxpr", jaxpr), getattr(twin, "jaxpr", twin)
        known = dict(zip(jaxpr.invars, states, strict=True))
        beside = {}  # each variable, and its like in the twin
        if twin is not None:
            if len(jaxpr.constvars) != len(twin.constvars) or len(jaxpr.invars) != len(twin.invars):
                raise ShardingError(ANOTHER)
            beside = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*twin.invars, *twin.constvars)))
        for position, (variable, value) in enumerate(zip(jaxpr.constvars, consts)):
            known[variable] = self.constant(value, *twin_consts[position : position + 1])

        def read(atom, other=None) -> State:
            if twin is not None:
                like = is_literal(other) if is_literal(atom) else beside.get(atom) is other
                if not like:
                    raise ShardingError(f"{ANOTHER} (of other values)")
            if is_literal(atom):
                return self.constant(atom.val, *(() if twin is None else (other.val,)))
            # A constant that is closed over is the same everywhere.
            return known[atom] if atom in known else State(whole(atom.aval.ndim))

        def read_all(atoms, others):
            return list(map(read, atoms, others)) if twin is not None else list(map(read, atoms))

        for index, eqn in enumerate(jaxpr.eqns):
            outer = self.line, self.near, self.spoken
            line = self.near = self.line or self.where(eqn) or self.near
            spoken = self.spoken or spoken_name(eqn)
            if eqn.primitive.name in ("jit", "pjit"):
                self.line, self.spoken = line, spoken
            try:
                other = self.twin_of(eqn, twin, index)
                given = read_all(eqn.invars, getattr(other, "invars", ()))
                self.within = jaxpr, twin
                results = self.equation(eqn, given, other)
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
            if other is not None:
                beside.update(zip(eqn.outvars, other.outvars, strict=True))
        return read_all(jaxpr.outvars, getattr(twin, "outvars", ()))

    def twin_of(self, eqn, twin, index):
        """The same equation of the program on one device."""
        if twin is None:
            return None
        other = twin.eqns[index] if index < len(twin.eqns) else None
        name, what = eqn.primitive.name, None
        if other is None or other.primitive is not eqn.primitive or _ranks(other) != _ranks(eqn):
            what = f"'{name}' is not in both"
        elif (mark := mark_of(eqn, self.check)) is not None:
            like = mark_of(other, self.beside)
            if like is None or like.said != mark.said:
                what = "another operation"
        elif (ours := numbers(eqn)) != (theirs := numbers(other)):
            key = next(key for key in ours if ours[key] != theirs.get(key))
            what = f"'{name}' with another {key}, {ours[key]} in place of {theirs.get(key)}"
        if what is not None:
            raise ShardingError(
                f"{ANOTHER} ({what})\n"
                "  fix: lax.scan or lax.fori_loop for turns, lax.dynamic_slice for slots; shardops.axis_size says "
                "how many devices there are"
            )
        return other

    def constant(self, value, *twin) -> State:
        """The state of a number or an array that the trace holds, beside that of its twin."""
        if isinstance(value, jax.core.Tracer):
            raise ShardingError(
                f"a {self.rule or 'function'} closes over a value of the program: its state is not known in the "
                "backward rule\n  fix: make it an argument, and a residual"
            )
        shape = jnp.shape(value)
        zero = shape == () and bool(value == 0)
        # Of an array of ones each device's part is as good as the whole.
        one_number = shape and np.size(value) and bool((np.asarray(value) == np.ravel(value)[0]).all())
        uniform = Made.ANY if one_number else ()
        if not twin:
            return State((uniform,) * len(shape), zero=zero)
        if shape != jnp.shape(twin[0]):
            made = Made.PART if one_number else Made.OWN
            sizes = zip(shape, jnp.shape(twin[0]), strict=True)
            return State(tuple(uniform if size == other else made for size, other in sizes))
        same = equal(value, twin[0])
        return State((uniform,) * len(shape), zero=zero and same, sized=not same)

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
        if (mark := mark_of(eqn, self.check)) is not None:
            return self.mark(mark, eqn, states, twin)
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
        hidden = (
            name in ("pallas_call", "custom_call", "ffi_call", "shard_map") or "callback" in name or inner_jaxprs(eqn)
        )
        if (hidden and eqn.outvars) or not (eqn.outvars or name.startswith("debug_")):
            if name not in _WITH_JAXPR:
                raise ShardingError(
                    f"'{name}': what it does cannot be seen\n"
                    "  fix: call it through shardops.local, with a declared type"
                )
        if not eqn.outvars:  # jax.debug.print
            return []
        return apply(Equation(eqn, states, twin, self.check.axes, self.turning, unreduced=self.backward))

    def call(self, eqn, states, twin):
        name = eqn.primitive.name
        (inner, *_), twins = inner_jaxprs(eqn), inner_jaxprs(twin) if twin is not None else [None]
        if eqn.params.get("name") == "_where" and {each.primitive.name for each in inner.jaxpr.eqns} <= _WHERE:
            twins = [None]  # what it broadcasts depends on which dims have one element
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
        operands, moved, given = _differentiated(eqn)
        if not moved or not given:
            return
        duals = [dual(results[index], axes) for index in given]
        outer = self.backward, self.check.proved
        self.backward = True
        try:
            traced = self.trace_backward(self.check, eqn, jaxpr)
            other = None if twin is None else self.trace_backward(self.beside, *twin)
            found = self.jaxpr(traced, [*(states[index] for index in operands), *duals], other)
            for index, state in zip(moved, found, strict=True):
                sizes = eqn.invars[index].aval.shape
                require_dual(state, states[index], axes, sizes, f"the gradient that {self.rule} gives operand {index}")
        finally:
            self.backward, self.check.proved = outer

    def trace_backward(self, check, eqn, jaxpr):
        """The forward and the backward rule: operands and cotangents to gradients."""
        operands, moved, given = _differentiated(eqn)
        function, positions = function_of(eqn, jaxpr), [operands.index(index) for index in moved]

        def pull(*values):
            values, cotangents = list(values[: len(operands)]), list(values[len(operands) :])

            def forward(*floats):
                for position, value in zip(positions, floats, strict=True):
                    values[position] = value
                outs = function(*values)
                return [outs[index] for index in given]

            return jax.vjp(forward, *(values[position] for position in positions))[1](cotangents)

        atoms = (*(eqn.invars[index] for index in operands), *(eqn.outvars[index] for index in given))
        return self.trace(pull, check, [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms])

    def axis_names(self, jaxpr) -> set[str]:
        """The axes that a function which is local to a device names, in its rules for gradients too."""
        jaxpr, found = getattr(jaxpr, "jaxpr", jaxpr), set()
        for eqn in jaxpr.eqns:
            found |= _axis_names(eqn.params)
            for inner in inner_jaxprs(eqn):
                found |= self.axis_names(inner)
            if eqn.primitive.name.startswith("custom_") and not self.backward and all(_differentiated(eqn)):
                self.backward = True
                found |= self.axis_names(self.trace_backward(self.check, eqn, jaxpr))
                self.backward = False
        return found

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
        if self.divergent - held.alone:
            raise ShardingError(
                f"'{name}' under a branch that depends on a value that differs along "
                f"{min(self.divergent - held.alone)}: the ref would not stay as it lies along it"
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
        elif any(state.split or state.pending or state.sized or state.indices for state in closed_over):
            error = (
                "a function that is local to a device takes a value from outside that is not the same everywhere\n"
                "  fix: pass it as an operand, with its type"
            )
        elif mark.sealed and (foreign := self.axis_names(eqn.params["jaxpr"]) & set(self.check.axes)):
            error = (
                f"a function that is local to a device sends over {', '.join(sorted(foreign))}: write the transfer as "
                "an operation with a string"
            )
        elif mark.sealed and twin is not None and not any(state.split or state.pending for state in operands):
            if not identical(eqn.params["jaxpr"], twin.params["jaxpr"]):
                error = (
                    "a function that is local to a device, of operands that are the same everywhere, is another one on "
                    "another number of devices: a number that it takes from outside depends on that"
                )
        if error is None:
            try:
                results = mark.rule(operands)
                if twin is not None and not self.check.schedule:
                    view = Equation(eqn, states, twin, self.check.axes)
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
        turning = self.check.schedule and _sends(params["jaxpr"])
        for row in rows:
            if row.dims[0] and row.dims[0] is not Made.ANY and not (row.dims[0] is Made.OWN and turning):
                raise ShardingError(
                    f"a scan over a dim that is {describe(row.dims[0])}: each device would go through its own part "
                    "alone\n  fix: all_gather it first, or reshape so that the scanned dim is whole"
                )
        # In a program that names its devices a whole dim may be shorter where there are more: a stage's layers.
        over_whole = self.check.schedule and any(row.dims[0] == () for row in rows)
        if twin is not None and twin.params["length"] != params["length"] and not (turning or over_whole):
            raise ShardingError(
                f"a scan of as many turns as a device's part has elements ({params['length']} on the check's mesh, "
                f"{twin.params['length']} on one device)"
            )
        rows = [row.plain(row.dims[1:]) for row in rows]
        inner, other = params["jaxpr"], twin.params["jaxpr"] if twin is not None else None
        sizes = [atom.aval.shape for atom in eqn.invars[consts : consts + carry]]

        def body(now):
            return self.jaxpr(inner, [*fixed, *now, *rows], other)

        outer, self.turning = self.turning, self.turning or turning
        try:
            carried, out = self.fixed_point(body, start, sizes)
        finally:
            self.turning = outer
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
        if len(twins) != len(params["branches"]):
            raise ShardingError(f"{ANOTHER} (another number of branches)")
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
        merged([decides, state])
        if crossing := decides.split & state.pending:
            raise ShardingError(
                f"a result that is pending over {min(crossing)} under a branch that depends on a value that is split "
                "over it: the sum would mix them"
            )
        if not decides.split:
            return state
        split, alone = state.split | decides.split, state.alone | (decides.split - state.split)
        return State(state.dims, split, state.pending, alone, sized=state.sized, indices=state.indices)

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
        if state.sized and not self.turning:
            raise ShardingError(f"{what} depends on how many devices there are, like the size of a device's part")


def _axis_names(params) -> set[str]:
    """The strings among the parameters that name axes, whatever the primitive calls them."""
    found = set()
    for key in ("axes", "axis_name", "axis_names", "named_axes"):
        value = params.get(key, ())
        names = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
        found |= {name for name in names if isinstance(name, str)}
    return found


def _sends(jaxpr) -> bool:
    """Whether a loop hands something on, as the turns of a ring and the ticks of a pipeline do."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return any(eqn.primitive.name == "ppermute" or any(map(_sends, inner_jaxprs(eqn))) for eqn in eqns)


def _ranks(eqn) -> list[int]:
    return [len(getattr(atom.aval, "shape", ())) for atom in (*eqn.invars, *eqn.outvars)]


def _differentiated(eqn) -> tuple[list[int], list[int], list[int]]:
    """Of a function with rules for its gradients: the operands that are no literals; those that have a gradient, which
    what it closes over has not; the results that have a cotangent."""
    operands = [index for index, atom in enumerate(eqn.invars) if not is_literal(atom)]
    proper = [index for index in operands if index >= eqn.params.get("num_consts", 0)]
    moved = [index for index in proper if jnp.issubdtype(eqn.invars[index].aval.dtype, jnp.inexact)]
    given = [index for index, out in enumerate(eqn.outvars) if jnp.issubdtype(out.aval.dtype, jnp.inexact)]
    return operands, moved, given
