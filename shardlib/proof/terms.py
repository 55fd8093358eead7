"""Whether two traces compute the same value by the same operations."""

import jax
import numpy as np

from shardlib.proof.jaxprs import CALLS, inner_jaxprs, is_literal
from shardlib.proof.marks import mark_of

_IDENTITIES = {"name", "copy", "copy_p", "reshard", "optimization_barrier"}


def same_values(eqn, traced, operands: list[int], inputs: list[int]) -> bool:
    """Whether a function with rules for gradients has the values that `traced` computes first, from these operands
    and then others: at the results with these places."""
    terms = Terms()
    arguments = [terms.constant(atom.val) if is_literal(atom) else terms.argument(id(atom)) for atom in eqn.invars]
    of_function = terms.of(inner_jaxprs(eqn)[0], arguments)
    others = [terms.argument(index) for index in range(len(traced.jaxpr.invars) - len(operands))]
    of_rule = terms.of(traced, [*(arguments[index] for index in operands), *others])
    return all(of_rule[place] == of_function[index] for place, index in enumerate(inputs))


class Terms:
    """Gives each value a number, by the operation that makes it and the numbers of its operands: two values with one
    number are equal, and what no result needs does not matter."""

    def __init__(self):
        self.numbers = {}

    def argument(self, key) -> int:
        return self.number("argument", key)

    def number(self, *key) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def of(self, jaxpr, arguments: list[int]) -> list[int]:
        """The numbers of the results of a jaxpr, from those of its arguments."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= {variable: self.constant(value) for variable, value in zip(jaxpr.constvars, consts)}

        def read(atom):
            return self.constant(atom.val) if is_literal(atom) else known[atom]

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self.equation(eqn, list(map(read, eqn.invars)))))
        return list(map(read, jaxpr.outvars))

    def constant(self, value) -> int:
        if isinstance(value, jax.core.Tracer):
            return self.number("tracer", id(value))
        if hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            return self.number("key", id(value))
        array = np.asarray(value)
        return self.number("constant", str(array.dtype), array.shape, array.tobytes())

    def equation(self, eqn, operands: list[int]) -> list[int]:
        name = eqn.primitive.name
        if (mark := mark_of(eqn)) is not None:
            key = "mark", mark.said
        elif name in CALLS:
            return self.of(inner_jaxprs(eqn)[0], operands)
        elif name in _IDENTITIES:
            return operands
        else:
            key = name, *(self.parameter(*item) for item in sorted(eqn.params.items()))
        made = self.number(*key, *operands, *(str(out.aval) for out in eqn.outvars))
        return [self.number("result", made, index) for index in range(len(eqn.outvars))]

    def parameter(self, key, value):
        if isinstance(value, (tuple, list)):
            return key, *(self.parameter(key, item) for item in value)
        if hasattr(jaxpr := getattr(value, "jaxpr", value), "eqns"):
            inner = [self.argument(("inner", index)) for index in range(len(jaxpr.invars))]
            return key, *self.of(value, inner)
        return (key,) if callable(value) or key == "sharding" else (key, repr(value))
