"""Whether traces on different meshes are one program: the same operations of the same values with the same numbers, in
everything but the sizes of what a device holds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.check import Check, mark_of
from shardlib.mesh import call_sites
from shardlib.spec import ShardingError, is_users

ANOTHER = (
    "another program is traced for another number of devices: what is computed must not depend on the size of a "
    "device's part"
)
# Parameters that are sizes, compared as those of results, and what is no number: JAX notes a `sharding`, empty inside
# of shard_map, depending on what else it has traced.
_SIZES = frozenset("shape new_sizes sizes slice_sizes limit_indices length unroll donated_invars name sharding".split())
# Where a device holds one row, JAX moves it in ways of its own.
_MOVES = frozenset("broadcast_in_dim gather reshape squeeze".split())


def inner_jaxprs(eqn) -> list:
    """The jaxprs among an equation's parameters."""
    return [
        each
        for value in eqn.params.values()
        for each in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(getattr(each, "jaxpr", each), "eqns")
    ]


def numbers(eqn) -> dict:
    """The parameters of an equation that say what it computes, but for sizes, as text: nan is nan."""
    said = {key: repr(value) for key, value in eqn.params.items() if key not in _SIZES and _is_plain(value)}
    return said | {"type": [str(getattr(out.aval, "dtype", None)) for out in eqn.outvars]}


def _is_plain(value) -> bool:
    """Whether a parameter's text says what it is: not of jaxprs, functions, and what depends on the mesh alone."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    other = callable(value) or hasattr(getattr(value, "jaxpr", value), "eqns")
    return not other and not isinstance(value, (jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh))


def is_literal(atom) -> bool:
    return hasattr(atom, "val")


def equal(one, other) -> bool:
    """Whether two constants of traces are the same."""
    if one is other:
        return True
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer) or jnp.shape(one) != jnp.shape(other):
        return False
    if jnp.issubdtype(jnp.result_type(one), jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    one, other = np.asarray(one), np.asarray(other)
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def identical(one, other) -> bool:
    """Whether two jaxprs are the same, sizes and constants included."""
    consts = [getattr(each, "consts", ()) for each in (one, other)]
    one, other = (getattr(each, "jaxpr", each) for each in (one, other))
    same = dict(zip((*one.invars, *one.constvars), (*other.invars, *other.constvars)))

    def alike(atom, beside):
        if is_literal(atom) or is_literal(beside):
            return is_literal(atom) and is_literal(beside) and equal(atom.val, beside.val)
        return same.get(atom) is beside and atom.aval.shape == beside.aval.shape

    if len(one.eqns) != len(other.eqns) or not all(map(equal, *consts)):
        return False
    for eqn, beside in zip(one.eqns, other.eqns):
        inner = zip(inner_jaxprs(eqn), inner_jaxprs(beside))
        if eqn.primitive is not beside.primitive or numbers(eqn) != numbers(beside):
            return False
        if not all(map(alike, eqn.invars, beside.invars)) or not all(identical(*pair) for pair in inner):
            return False
        same.update(zip(eqn.outvars, beside.outvars))
    return all(map(alike, one.outvars, other.outvars))


def require_same(here, check: Check, small, small_check: Check, known: list, line_of):
    """Raises `ShardingError` where the trace on the user's mesh, on which a device holds single elements, is another
    program than those that were walked.

    A number may be another one only where the walk has seen that it depends on the mesh, since it differs between the
    `small` mesh and one device.

    Args:
      known: traces on one device: the first was walked beside `small`, the last has the arguments of `here`.
      line_of: the user's line of an equation.
    """

    def refuse(eqn, what):
        text = ", ".join(f"{axis}={size}" for axis, size in check.axes.items())
        line = eqn is not None and line_of(eqn)
        raise ShardingError(f"{ANOTHER} ({what}), and is not proved for {text}\n  at {line or 'unknown line'}")

    def compare(here, small, known):
        for values in zip(*(getattr(each, "consts", ()) for each in (here, small, *known))):
            if not _explained(list(values), equal):
                refuse(None, "another constant")
        jaxprs = [getattr(each, "jaxpr", each) for each in (here, small, *known)]
        roots = [_Roots(jaxpr) for jaxpr in jaxprs]
        for eqns in itertools.zip_longest(*(root.equations() for root in roots)):
            eqn = next(each for each in eqns if each is not None)
            if any(each is None or each.primitive is not eqn.primitive for each in eqns):
                refuse(eqn, f"'{eqn.primitive.name}'")
            ours, beside, *whole = eqns
            if any(
                not is_literal(atom) and roots[0].of(atom) != roots[-1].of(like)
                for atom, like in zip(ours.invars, whole[-1].invars)
            ):
                refuse(eqn, f"'{eqn.primitive.name}' of other values")
            for atoms in zip(*(each.invars for each in eqns)):
                if any(map(is_literal, atoms)):
                    values = [getattr(atom, "val", None) for atom in atoms]
                    if not _explained(values, equal):
                        refuse(eqn, f"'{eqn.primitive.name}' with {values[0]} in place of {values[-1]}")
            for shapes in zip(*(list(map(_shape, (*each.invars, *each.outvars))) for each in eqns)):
                if any(not _explained(list(sizes), lambda a, b: a == b) for sizes in zip(*shapes)):
                    refuse(eqn, f"'{eqn.primitive.name}' of another size")
            marks = [mark_of(ours, check), mark_of(beside, small_check)]
            if all(mark is not None for mark in marks):
                same = all(_shape(atom) == _shape(like) for atom, like in zip(ours.invars, whole[-1].invars))
                if marks[0].said != marks[1].said:
                    refuse(eqn, "another operation")
                if marks[0].sealed and same and not identical(ours.params["jaxpr"], whole[-1].params["jaxpr"]):
                    refuse(eqn, "another function that is local to a device")
                continue
            found = [numbers(each) | {"length": each.params.get("length")} for each in eqns]
            for key in found[0]:
                if not _explained([each.get(key) for each in found], lambda a, b: a == b):
                    refuse(eqn, f"'{eqn.primitive.name}' with another {key}")
            inner = [inner_jaxprs(each) for each in eqns]
            if len({len(each) for each in inner}) > 1:
                refuse(eqn, f"'{eqn.primitive.name}'")
            for ours, beside, *whole in zip(*inner):
                compare(ours, beside, whole)
        # JAX may drop a gather of single rows: which one is not known.
        if len(roots[0].gathers) == len(roots[-1].gathers):
            for eqn, whole in zip(roots[0].gathers, roots[-1].gathers):
                single = {dim for dim, size in enumerate(_shape(eqn.invars[0])) if size == 1}
                if _indexed(eqn) - single != _indexed(whole) - single:
                    refuse(eqn, "'gather' along another dim")
        if list(map(roots[0].of, jaxprs[0].outvars)) != list(map(roots[-1].of, jaxprs[-1].outvars)):
            refuse((jaxprs[0].eqns or [None])[-1], "another result")

    compare(here, small, known)
    before = _all_sites(known[-1])
    for eqn in _equations(here):
        if call_sites(eqn, is_users) - before:
            refuse(eqn, f"'{eqn.primitive.name}', which is not computed on one device")


def _equations(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner)


def _all_sites(jaxpr) -> set[tuple]:
    return set().union(*(call_sites(eqn, is_users) for eqn in _equations(jaxpr)))


def _explained(values: list, same) -> bool:
    """Whether a number on the user's mesh (first) is that of one device with the same arguments (last), or is known to
    depend on the mesh, since it differs where the two were walked side by side."""
    ours, beside, walked, *_ = values
    return same(ours, values[-1]) or not same(beside, walked)


class _Roots:
    """Where the values of a jaxpr come from, as if its moves were not there: the arguments, and the results of its
    other equations, by number."""

    def __init__(self, jaxpr):
        self.jaxpr, self.gathers = jaxpr, []
        self.roots = {variable: frozenset({index}) for index, variable in enumerate(jaxpr.invars)}
        self.roots |= {variable: frozenset({f"const {index}"}) for index, variable in enumerate(jaxpr.constvars)}

    def of(self, atom) -> frozenset:
        return frozenset({f"literal {atom.val}"}) if is_literal(atom) else self.roots[atom]

    def equations(self):
        """The equations that are no moves, one after another."""
        count = 0
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name in _MOVES:
                roots = frozenset().union(*map(self.of, eqn.invars))
                self.roots.update((out, roots) for out in eqn.outvars)
                if eqn.primitive.name == "gather":
                    self.gathers.append(eqn)
                continue
            yield eqn
            self.roots.update((out, frozenset({(count, index)})) for index, out in enumerate(eqn.outvars))
            count += 1


def _indexed(gather) -> set[int]:
    """The dims of its operand that a gather's indices go along."""
    numbers = gather.params["dimension_numbers"]
    return {*numbers.start_index_map, *numbers.operand_batching_dims}


def _shape(atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))
