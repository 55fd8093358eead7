"""The walk through a traced program: from the states of its arguments to those of its results, mark by mark, with
ordinary JAX between them (`rules.py`), or a refusal."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp

from shardlib.places import is_users
from shardlib.proof.frames import spoken_name
from shardlib.proof.jaxprs import CALLS, function_of, inner_jaxprs, is_literal, scan_counts, trace_with_axes
from shardlib.proof.marks import Check, Mark, during, mark_of
from shardlib.proof.parts import is_part, shown
from shardlib.proof.rules import Equation, apply
from shardlib.proof.states import State, dual, join, merged, require_dual
from shardlib.proof.terms import same_values
from shardlib.spec import ShardingError

GRAD = (
    "a jax.grad, vjp, jvp or linear_transpose inside typed_shard_map: the type of its result cannot be known\n"
    "  fix: use shardops.value_and_grad, shardops.grad or shardops.vjp, which give each gradient its type; jax.jvp "
    "and linearize may stand in shardops.local alone"
)
# Operations with a function that goes from scalars to a scalar.
_WITH_FUNCTION = {"reduce", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"}
# Parameters that may be the size of a part, since their rules look at them, and those that say a shape.
_ASKED_FOR = {("scan", "length"), ("conv_general_dilated", "feature_group_count")}
_SHAPES = {"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes"}
_NOT_SEEN = {"pallas_call", "custom_call", "ffi_call", "shard_map", "new_ref"}
_TANGENTS = "its tangents"


class Walk:
    """Goes through a trace of a check.

    Args:
      check: that made the trace.
      trace: traces a function of the program, with given shapes, for a check: backward rules, on the way.
      functions: those of the user's program that were met are added, as (file, first line).
    """

    def __init__(self, check: Check, trace, functions: set):
        self.check, self.trace, self.functions = check, trace, functions
        # The call of the jitted function that is being walked, and its line: inner lines may come from a cached trace.
        self.line: str | None = None
        self.call_of_line = None
        self.around = "unknown line"  # the line of the equation around: those in JAX's functions have none
        self.divergent: frozenset[str] = frozenset()  # axes along which devices may take different branches here
        self.rule = ""  # 'jax.custom_vjp' inside one
        self.backward = False  # in its backward rule

    def __call__(self, jaxpr, states: list[State]):
        with during(self.check):
            self.jaxpr(jaxpr, states)

    def jaxpr(self, jaxpr, states: list[State]) -> list[State]:
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, states, strict=True))
        known |= {variable: self.constant(value) for variable, value in zip(jaxpr.constvars, consts)}

        def read(atom) -> State:
            if is_literal(atom):
                return self.constant(atom.val)
            # A constant that is closed over is the same everywhere.
            return known[atom] if atom in known else State(((),) * atom.aval.ndim)

        for eqn in jaxpr.eqns:
            outer = self.line, self.around, self.call_of_line
            line = self.around = self.line or self.where(eqn) or self.around
            if eqn.primitive.name in ("jit", "pjit"):
                self.line, self.call_of_line = line, self.call_of_line or eqn
            try:
                results = self.equation(eqn, list(map(read, eqn.invars)))
            except ShardingError as error:
                text = str(error)
                text = text.removesuffix("\n  at unknown line")
                if "\n  at " in text:
                    raise
                name, spoken = eqn.primitive.name, spoken_name(outer[2] or eqn) or spoken_name(eqn)
                if spoken not in (None, name):
                    text = text.replace(f"'{name}'", f"'{spoken}' ({name})", 1)
                raise ShardingError(f"{text}\n  at {line}") from None
            finally:
                self.line, self.around, self.call_of_line = outer
            known.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def constant(self, value) -> State:
        """The state of a number or an array that the trace holds."""
        if isinstance(value, jax.core.Tracer):
            raise ShardingError(
                f"a {self.rule} closes over a value of the program: its state is not known in the backward rule\n"
                "  fix: make it an argument, and a residual"
                if self.rule
                else "a value of another trace: of the program around typed_shard_map, or one that a cache has kept\n"
                "  fix: pass it as an argument; what is kept for the next call (functools.cache) is made by NumPy"
            )
        is_zero = jnp.result_type(value) == jax.dtypes.float0 or (jnp.shape(value) == () and bool(value == 0))
        return State(((),) * jnp.ndim(value), zero=is_zero)

    def where(self, eqn) -> str | None:
        """The user's line of an equation; notes the functions that it was reached through."""
        traceback, line = eqn.source_info.traceback, None
        for frame in traceback.frames if traceback is not None else ():
            if frame.function_name == trace_with_axes.__name__:
                break
            if is_users(frame.file_name):
                line = line or f"{frame.file_name}:{frame.line_num}"
                self.functions.add((frame.file_name, frame.function_start_line))
        return line

    def equation(self, eqn, states: list[State]) -> list[State]:
        name, params = eqn.primitive.name, eqn.params
        if name == "dim_as_value":
            return [State((), sized=True)]
        require_unordered(eqn)
        stack = str(eqn.source_info.name_stack)
        if not self.backward and ("jvp(" in stack or "transpose(" in stack):
            raise ShardingError(GRAD)
        if (mark := mark_of(eqn)) is not None:
            return self.mark(mark, states)
        if name in _WALKED:
            return _WALKED[name](self, eqn, states)
        inner = inner_jaxprs(eqn)
        if name in _WITH_FUNCTION:
            for function in inner:
                numbers = [State(())] * len(getattr(function, "jaxpr", function).invars)
                if any(state.sized for state in self.jaxpr(function, numbers)):
                    raise ShardingError(f"the function of '{name}' depends on how many devices there are")
        elif not eqn.outvars and name.startswith("debug_"):  # jax.debug.print
            return []
        elif name == "rng_uniform":
            raise ShardingError(f"'{name}' draws other numbers on each device\n  fix: jax.random, with the same key")
        elif inner or name in _NOT_SEEN or "callback" in name:
            fix = "call it through shardops.local, with a declared type"
            raise ShardingError(f"'{name}': what it does cannot be seen\n  fix: {fix}")
        results = apply(Equation(eqn, states, self.check.parts, unreduced=self.backward))
        for key, value in params.items():
            sized = () if key in _SHAPES or (name, key) in _ASKED_FOR else filter(is_part, jax.tree.leaves(value))
            for size in sized:
                raise ShardingError(f"'{name}' with {key}={shown(size)}, which depends on how many devices there are")
        return results

    def linear_solve(self, eqn, states):
        """jnp.linalg.solve: the result is what `solve` makes; its transpose is walked with the gradient's states."""
        jaxprs, counts, consts = eqn.params["jaxprs"], eqn.params["const_lengths"], {}
        for field, count in zip(counts._fields, counts):
            consts[field], states = states[:count], states[count:]
        results = self.jaxpr(jaxprs.solve, [*consts["solve"], *states])
        if jaxprs.transpose_solve is not None:
            with self.backwards():
                duals = [dual(state, self.check.axes) for state in results]
                try:
                    gradients = self.jaxpr(jaxprs.transpose_solve, [*consts["transpose_solve"], *duals])
                    for gradient, state in zip(gradients, states):
                        require_dual(gradient, state, self.check.axes, "the right side's gradient")
                except ShardingError as error:
                    what, fix = str(error).splitlines()[0], "solve through shardops.local, with a declared type"
                    raise ShardingError(f"in the backward pass of a linear solve, {what}\n  fix: {fix}") from None
        return results

    @contextlib.contextmanager
    def backwards(self):
        """Inside, a backward pass is walked; what is proved there is no claim of the program's."""
        outer, self.backward = (self.backward, self.check.proved), True
        try:
            yield
        finally:
            self.backward, self.check.proved = outer

    # -- Rules for gradients that the program brings along -------------------------------------------------------------
    def call(self, eqn, states):
        name, (inner, *_) = eqn.primitive.name, inner_jaxprs(eqn)
        if not name.startswith("custom_"):
            return self.jaxpr(inner, states)
        if eqn.params.get("symbolic_zeros"):
            raise ShardingError("rules with symbolic_zeros compute what depends on what is differentiated")
        outer, self.rule = self.rule, f"jax.{name.removesuffix('_call')}"
        try:
            # A gradient may be injected into what is zero: it is no constant.
            results = [replace(state, zero=False) for state in self.jaxpr(inner, states)]
            if not self.backward:
                self.check_rules(eqn, states, results)
            return results
        finally:
            self.rule = outer

    def check_rules(self, eqn, states, results):
        """Walks the rules. The value of the forward rule is the function's, by the same program; from cotangents of the
        dual types the backward rule makes gradients of the dual types, and it sends nothing. A rule of a custom_jvp is
        linear in its tangents."""
        axes = self.check.axes
        operands, trained, floats = _differentiated(eqn)
        if not trained or not floats:
            return
        values, duals = [states[index] for index in operands], [dual(results[index], axes) for index in floats]
        with self.backwards():
            if self.rule == "jax.custom_jvp":
                self.require_linear(eqn, values, [states[index] for index in trained])
            traced = self.trace_rules(eqn)
            gradients = self.jaxpr(traced, [*values, *duals])[len(floats) :]
        for index, state in zip(trained, gradients, strict=True):
            require_dual(state, states[index], axes, f"the gradient that {self.rule} gives operand {index}")
        if not same_values(eqn, traced, operands, floats):
            fix = "let both call one function for the value; JAX's, as jnp.linalg.det, through shardops.local"
            raise ShardingError(f"the forward rule of a {self.rule} has another value than its function\n  fix: {fix}")

    def require_linear(self, eqn, values, trained):
        """Walks a rule with tangents that are pending, as if over an axis: only what is linear keeps that."""
        tangents = [replace(state, pending=state.pending | {_TANGENTS}, zero=False) for state in trained]
        why = "one that it gives has none in it"
        try:
            results = self.jaxpr(self.trace_rules(eqn, forward=True), [*values, *tangents])
            if all(state.zero or _TANGENTS in state.pending for state in results):
                return
        except ShardingError as error:
            if f"over {_TANGENTS}" not in str(error):
                raise
            why = str(error).replace(f"a value that is pending over {_TANGENTS}", "them").partition(":")[0]
        raise ShardingError(f"the rule of a jax.custom_jvp is not linear in its tangents: {why}")

    def trace_rules(self, eqn, forward=False):
        """The forward and the backward rule: operands and cotangents to the values and to gradients. Or, forward,
        operands and tangents to tangents."""
        operands, trained, floats = _differentiated(eqn)
        function, positions = function_of(eqn, inner_jaxprs(eqn)[0].jaxpr), [operands.index(index) for index in trained]

        def rules(*values):
            values, others = list(values[: len(operands)]), list(values[len(operands) :])

            def of_trained(*arguments):
                for position, value in zip(positions, arguments, strict=True):
                    values[position] = value
                outs = function(*values)
                return [outs[index] for index in floats]

            arguments = [values[position] for position in positions]
            if forward:
                return jax.jvp(of_trained, arguments, others)[1]
            outs, backward = jax.vjp(of_trained, *arguments)
            return *outs, *backward(others)

        others = [eqn.invars[index] for index in trained] if forward else [eqn.outvars[index] for index in floats]
        atoms = (*(eqn.invars[index] for index in operands), *others)
        return self.trace(rules, self.check, [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms])

    def require_sealed(self, jaxpr):
        """Raises `ShardingError` for a function that is local to a device and takes the size of a part from outside, or
        sends in its rules for gradients. (Elsewhere it cannot: the axes are not bound.)"""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        for eqn in jaxpr.eqns:
            require_unordered(eqn)
            sizes = [size for out in eqn.outvars for size in getattr(out.aval, "shape", ())]
            if eqn.primitive.name == "dim_as_value" or any(map(is_part, sizes)):
                raise ShardingError("a local function takes a number that depends on how many devices there are")
            for inner in inner_jaxprs(eqn):
                self.require_sealed(inner)
            if eqn.primitive.name.startswith("custom_") and all(_differentiated(eqn)):
                self.trace_rules(eqn)

    def mark(self, mark: Mark, states):
        try:
            self.require_may_stand_here(mark, states[mark.operands :])
            results = mark.rule(states[: mark.operands])
        except ShardingError as error:
            raise error if "\n  at " in str(error) else error.extended(mark.where) from None
        self.check.proved += 1
        return results

    def require_may_stand_here(self, mark: Mark, closed_over: list[State]):
        if stuck := mark.moves & self.divergent:
            what = f"a transfer over {', '.join(sorted(stuck))} under a branch that depends on what differs there"
            raise ShardingError(f"{what}: some devices would wait for ever")
        if mark.moves and self.rule:
            what = f"a transfer over {', '.join(sorted(mark.moves))} inside a {self.rule}"
            raise ShardingError(f"{what}\n  fix: put the rule around what is local, transfers outside of it")
        if any(state.split or state.pending or state.sized or state.local_iota for state in closed_over):
            what = "a function that is local to a device takes a value from outside that differs between devices"
            raise ShardingError(f"{what}\n  fix: pass it as an operand, with its type")
        if mark.sealed is not None:
            self.require_sealed(mark.sealed)

    # -- Control flow: carries reach a fixed point; branches join ------------------------------------------------------
    def scan(self, eqn, states):
        consts, carry = scan_counts(eqn.params)
        fixed, start, rows = states[:consts], states[consts : consts + carry], states[consts + carry :]
        for row in rows:
            if row.dims[0]:
                fix = "all_gather it first, scan another dim, or write the dim in an operation's string"
                raise ShardingError(f"a scan over a dim that is {row.along(row.dims[0])}\n  fix: {fix}")
        if is_part(length := eqn.params["length"]):
            raise ShardingError(f"a scan of {shown(length)} turns, as many as a device's part has elements")
        rows = [row.with_dims(row.dims[1:]) for row in rows]

        def body(now):
            return self.jaxpr(eqn.params["jaxpr"], [*fixed, *now, *rows])

        carried, out = self.fixed_point(body, start)
        return [*carried, *(state.with_dims(((), *state.dims)) for state in out[carry:])]

    def while_loop(self, eqn, states):
        params = eqn.params
        conds, consts = params["cond_nconsts"], params["body_nconsts"]
        start, outer = states[conds + consts :], self.divergent

        def body(now):
            return self.jaxpr(params["body_jaxpr"], [*states[conds : conds + consts], *now])

        try:
            while True:
                carried, _ = self.fixed_point(body, start)
                (go_on,) = self.jaxpr(params["cond_jaxpr"], [*states[:conds], *carried])
                self.can_decide(go_on, "the condition of a while loop")
                if go_on.split <= self.divergent:
                    return [self.under(go_on, state) for state in carried]
                self.divergent |= go_on.split
        finally:
            self.divergent = outer

    def cond(self, eqn, states):
        index, *operands = states
        self.can_decide(index, "the index of a branch")
        outer, self.divergent = self.divergent, self.divergent | index.split
        try:
            branches = [self.jaxpr(branch, operands) for branch in eqn.params["branches"]]
        finally:
            self.divergent = outer
        return [self.under(index, join(*results)) for results in zip(*branches, strict=True)]

    def under(self, decides: State, state: State) -> State:
        """A result of a branch or a loop: it differs along the axes along which what decides differs."""
        merged([decides, state])
        if crossing := decides.split & state.pending:
            what = f"a result pending over {min(crossing)} under a branch that depends on a value split over it"
            raise ShardingError(f"{what}: the sum would mix them")
        if not decides.split:
            return state
        split, dims = state.split | decides.split, {axis for axes in state.dims for axis in axes}
        without_dim = state.without_dim | (decides.split - state.split - dims)
        return State(state.dims, split, state.pending, without_dim, sized=state.sized, local_iota=state.local_iota)

    def fixed_point(self, body, start):
        while True:
            proved = self.check.proved
            out = body(start)
            joined = [join(before, after) for before, after in zip(start, out)]
            if joined == start:
                return joined, out
            start, self.check.proved = joined, proved

    def can_decide(self, state, what):
        if state.pending:
            raise ShardingError(f"{what} is pending over {', '.join(sorted(state.pending))}: reduce it first")
        if state.sized:
            raise ShardingError(f"{what} depends on how many devices there are, like the size of a device's part")


_WALKED = {
    **dict.fromkeys(CALLS, Walk.call),
    "scan": Walk.scan,
    "while": Walk.while_loop,
    "cond": Walk.cond,
    "custom_linear_solve": Walk.linear_solve,
}


def require_unordered(eqn):
    """Raises `ShardingError` for a callback, as jax.debug.print has, with an order: JAX has none on several."""
    if not inner_jaxprs(eqn) and any(str(effect).startswith("Ordered") for effect in eqn.effects):
        raise ShardingError(f"'{eqn.primitive.name}' with ordered=True runs on one device alone\n  fix: leave it out")


def _differentiated(eqn) -> tuple[list[int], list[int], list[int]]:
    """For a function with rules for its gradients: the operands that are no literals; those that have a gradient, which
    closed-over values do not; the results that have a cotangent."""
    operands = [index for index, atom in enumerate(eqn.invars) if not is_literal(atom)]
    proper = [index for index in operands if index >= eqn.params.get("num_consts", 0)]
    trained = [index for index in proper if jnp.issubdtype(eqn.invars[index].aval.dtype, jnp.inexact)]
    floats = [index for index, out in enumerate(eqn.outvars) if jnp.issubdtype(out.aval.dtype, jnp.inexact)]
    return operands, trained, floats
