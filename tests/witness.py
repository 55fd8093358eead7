"""A second witness of the check that shares no rule with it: it walks the program that runs, backward pass included.

For each value it knows one bit for each mesh axis: may devices along the axis hold different values? An input may
differ along the axes that its spec names, and a result where an operand may. A sum, a maximum or a gather over an axis
makes it the same; a device's index differs. What comes out of a branch or a loop may differ where the decision may.

Claims are the specs of the results and the types in the program, in annotations and in the strings of operations. A
value whose type has no '/t' and no '+t' must be the same along t. Of what is differentiated the gradient's type is a
claim too: that of the value, with same and pending exchanged. Refused too are a transfer under a branch or a loop
that may differ along its axis, which hangs, and a sum over an axis of what a transfer or an input's spec has made the
same along it, which counts it once for each device.
"""

import contextlib
import inspect
import re
import traceback
from unittest import mock

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib import shardops, shardtypes
from shardlib.mesh import scan_counts
from shardlib.places import is_users
from shardlib.proof.marks import axes_of_each

_MAKE_THE_SAME = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
_ADD_UP = ("psum", "psum_invariant", "reduce_scatter")
_NAME_AXES = ("axes", "axis_name")
_CALLS = tuple("jit pjit closed_call core_call remat checkpoint custom_jvp_call custom_vjp_call composite".split())
# What is known of a value, its facts, are strings: "t", it may differ along t; "=t", a transfer or an input's spec has
# made it, or an operand of it, the same along t; _GRADIENT, it comes from a backward pass. There "=t" of the forward
# pass is forgotten: a gradient may be the same and yet a term of a sum (of a linear loss it is 1 on every device).
_GRADIENT = "(gradient)"
_CLAIM = "claim: "


class Disagreement(AssertionError):
    """A value may lie otherwise than a type says."""


def agreed_claims(function, mesh, *arguments) -> int:
    """Traces a function as it would run, and walks it; returns with how many claims the walk agrees.

    Args:
      function: `typed_shard_map(f, check=False)`, or one that maps another function over the mesh.
      mesh: may be abstract. Of an axis with one device nothing is learned: shardops sends nothing along it.
      arguments: arrays or `ShapeDtypeStruct`, global shapes.
    Raises:
      Disagreement: at the first claim that may not be so, with its line.
    """
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)), _claims_in_the_trace():
        jaxpr = jax.jit(lambda *arguments: function(*arguments)).trace(*arguments).jaxpr
    mapped = [eqn for eqn in _equations(jaxpr) if eqn.primitive.name == "shard_map"]
    assert mapped, "no shard_map in the program"
    return sum(map(_walk, mapped))


# -- Claims become names in the trace ----------------------------------------------------------------------------------
@contextlib.contextmanager
def _claims_in_the_trace():
    """Inside, a value whose type is said, by an annotation or a string, has a name in the trace that says it too."""
    arrays = inspect.getmodule(shardtypes.check)
    check = arrays.check

    def checked(dtype, spec, value, *, what="the annotation"):
        return _named(check(dtype, spec, value, what=what), _text(spec), what)

    def claiming(operation):
        def operate(spec, *operands, **options):
            before, arrow, after = _text(spec).rpartition("->")
            what, types = f"shardops.{operation.__name__}('{_text(spec)}')", iter(before.split(","))
            if arrow:  # zeros and full have no operands
                operands = [_named(each, next(types), what) if hasattr(each, "shape") else each for each in operands]
            results, tree = jax.tree.flatten(operation(spec, *operands, **options))
            of_result = f"the result of {what}"
            named = [_named(each, type_, of_result) for each, type_ in zip(results, after.split(","), strict=True)]
            return jax.tree.unflatten(tree, named)

        return operate

    functions = {name: each for name, each in vars(shardops).items() if inspect.isfunction(each) and name[0] != "_"}
    own = {name: each for name, each in functions.items() if each.__module__ == shardops.__name__}
    operations = {name: claiming(each) for name, each in own.items() if "spec" in inspect.signature(each).parameters}
    with mock.patch.object(arrays, "check", checked), mock.patch.multiple(shardops, **operations):
        yield


def _text(spec) -> str:
    return spec.decode() if isinstance(spec, bytes) else str(spec)


def _named(value, type_, what):
    axes = shardtypes.mapped_axes()
    if "..." in type_ or not axes:
        return value
    type_ = " ".join([*(f"{axis}/{axis}" for axis in sorted(axes_of_each())), type_.strip()])  # inside of shardops.each
    line = _line((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    said = f"{_CLAIM}{type_.strip()}|'{type_.strip()}' of {what} at {line}"
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return checkpoint_name(value, said)
    split, pending = _axes_of(type_)
    dual = [f"/{axis}" for axis in sorted(split)] + [f"+{axis}" for axis in axes if axis not in split | pending]
    of_gradient = f"{_CLAIM}{' '.join(dual)}|the gradient of '{type_.strip()}' of {what} at {line}"
    named = jax.custom_vjp(lambda value: checkpoint_name(value, said))
    named.defvjp(lambda value: (checkpoint_name(value, said), None), lambda _, g: (checkpoint_name(g, of_gradient),))
    return named(value)


def _axes_of(type_) -> tuple[frozenset[str], frozenset[str]]:
    """The axes over which a type is split, and pending."""
    return frozenset(re.findall(r"/(\w+)", type_)), frozenset(re.findall(r"[+](\w+)", type_))


def _line(frames) -> str:
    """The innermost line of the user's program, of (file, line) from the innermost on."""
    return next((f"{file}:{line}" for file, line in frames if is_users(file) and file != __file__), "unknown line")


def _line_of(eqn) -> str:
    found = eqn.source_info.traceback
    return _line((frame.file_name, frame.line_num) for frame in (found.frames if found else ()))


# -- The walk ----------------------------------------------------------------------------------------------------------
def _equations(jaxpr):
    """All equations, also those inside of others, but for what is in a shard_map."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        if eqn.primitive.name != "shard_map":
            yield from _inside(eqn)


def _inside(eqn):
    for value in eqn.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from _equations(inner)


def _strings(value) -> frozenset[str]:
    """The axes that a parameter or a spec names, in tuples or not."""
    if isinstance(value, str):
        return frozenset({value})
    return frozenset().union(*map(_strings, value)) if isinstance(value, (tuple, list, set, frozenset)) else frozenset()


def _same_along(axes) -> frozenset[str]:
    return frozenset(f"={axis}" for axis in axes)


def _walk(eqn) -> int:
    walk = _Walk(eqn.params["mesh"].axis_names)
    splits = [_strings(tuple(spec)) for spec in eqn.params["in_specs"]]
    outs = walk.jaxpr(eqn.params["jaxpr"], [split | _same_along(walk.axes - split) for split in splits], frozenset())
    for index, (facts, spec) in enumerate(zip(outs, eqn.params["out_specs"], strict=True)):
        walk.claim(facts, _strings(tuple(spec)), f"result {index} of the mapped function, {spec}")
    if walk.doubts:
        raise Disagreement(walk.doubts[0])
    return walk.agreed


class _Ref:
    """A mutable ref, which may hold all that was ever written to it."""

    def __init__(self, facts):
        self.facts = facts


class _Walk:
    def __init__(self, axes):
        self.axes, self.agreed, self.refs = frozenset(axes), 0, []
        self.doubts = []  # sums of what is the same so far: another round of a loop may show that it is not
        self.backward = False  # in an equation of a backward pass

    def claim(self, facts, said, text):
        if wrong := facts & self.axes - said:
            raise Disagreement(f"{text}: devices along {min(wrong)} may hold different values")
        self.agreed += 1

    def doubt(self, facts, over, text):
        """A value of these facts is a term of a sum over these axes."""
        if alike := [axis for axis in sorted(over - facts) if f"={axis}" in facts]:
            self.doubts.append(f"{text}: a sum over {alike[0]} of what is the same counts it once for each device")

    def made_of(self, values):
        """The facts of what is computed from values with these facts."""
        every = frozenset().union(*values)
        if not self.backward and _GRADIENT not in every:
            return every
        return (every & self.axes).union({_GRADIENT}, *(facts for facts in values if _GRADIENT in facts))

    def jaxpr(self, jaxpr, ins, under):
        """The facts of the results. `under`: along what the branches and loops around may differ."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, ins, strict=True))

        def read(atom):  # literals and constants have no facts
            return frozenset() if hasattr(atom, "val") else known.get(atom, frozenset())

        for eqn in jaxpr.eqns:
            outer = self.backward
            self.backward |= "transpose(" in str(eqn.source_info.name_stack)
            known.update(zip(eqn.outvars, self.equation(eqn, [read(atom) for atom in eqn.invars], under), strict=True))
            self.backward = outer
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn, ins, under):
        name, params = eqn.primitive.name, eqn.params
        if name.startswith(_CALLS):
            return self.jaxpr(params.get("jaxpr", params.get("call_jaxpr")), ins, under)
        if name == "scan":
            consts, carry = scan_counts(params)
            fixed, start, rows = ins[:consts], ins[consts : consts + carry], ins[consts + carry :]
            return self.loop(lambda now: self.jaxpr(params["jaxpr"], [*fixed, *now, *rows], under), start)
        if name == "while":
            return self.while_loop(params, ins, under)
        if name == "cond":
            index, *operands = ins
            branches = [self.jaxpr(branch, operands, under | index) for branch in params["branches"]]
            return [index.union(*outs) for outs in zip(*branches)]
        if name == "optimization_barrier":
            return ins
        values = [each.facts if isinstance(each, _Ref) else each for each in ins]
        every = self.made_of(values)
        if name == "name" and params["name"].startswith(_CLAIM):
            return [self.typed(every, params["name"].removeprefix(_CLAIM))]
        # What a primitive that is not known here does with the jaxprs that it holds is not known either.
        over = self.axes & _strings([each.params.get(key) for each in (eqn, *_inside(eqn)) for key in _NAME_AXES])
        if name != "axis_index" and over & under:
            axis = min(over & under)
            raise Disagreement(f"'{name}' at {_line_of(eqn)}: under a branch or a loop that may differ along {axis}")
        if name in _ADD_UP:
            for facts in values:
                self.doubt(self.made_of([facts]), over, f"'{name}' at {_line_of(eqn)}")
        if name in _MAKE_THE_SAME and params.get("axis_index_groups") is None:
            return [self.made_of([facts]) - over | _same_along(over) for facts in values]
        if "callback" in name:  # Python may return something else on each device
            over = self.axes
        for ref in ins:
            if isinstance(ref, _Ref):
                ref.facts |= every | over | under
        if name == "new_ref":
            self.refs.append(_Ref(every))
            return self.refs[-1:]
        return [every | over] * len(eqn.outvars)

    def typed(self, facts, said):
        """The facts of a value of which a type is said."""
        type_, _, text = said.partition("|")
        split, pending = _axes_of(type_)
        self.claim(facts, split | pending, text)
        self.doubt(facts, pending, text)
        return facts | split  # what is made from nothing lies in any way: from here on as its type says

    def while_loop(self, params, ins, under):
        conds, consts = params["cond_nconsts"], params["body_nconsts"]
        for_cond, for_body, start = ins[:conds], ins[conds : conds + consts], ins[conds + consts :]

        def body(carry):
            goes_on, *now = carry
            (decides,) = self.jaxpr(params["cond_jaxpr"], [*for_cond, *now], under | goes_on)
            outs = self.jaxpr(params["body_jaxpr"], [*for_body, *now], under | goes_on | decides)
            return [decides, *(out | decides for out in outs)]

        return self.loop(body, [frozenset(), *start])[1:]

    def loop(self, body, carry):
        """The results of a body whose first ones are its carry, in the round from which on no fact is new."""
        while True:
            agreed, doubts, refs = self.agreed, len(self.doubts), [(ref, ref.facts) for ref in self.refs]
            outs = body(carry)
            joined = [before | after for before, after in zip(carry, outs)]
            if joined == carry and all(ref.facts == facts for ref, facts in refs):
                return [*carry, *outs[len(carry) :]]
            carry, self.agreed = joined, agreed
            del self.doubts[doubts:]
