"""The one place that knows how JAX's traces are made, read and run: what its releases change."""

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh

CALLS = "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call composite".split()


def trace_with_axes(f, axes: dict[str, int], *args):
    """The jaxpr of `f` for shapes local to a device, with the axes' names and sizes but no mesh and no device."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(f, axis_env=list(axes.items()))(*args)


def scan_counts(params: dict) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many after them its carry: jax 0.10 and 0.11 differ."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def function_of(eqn, jaxpr):
    """One equation, which calls this jaxpr, as a function of its operands but literals to the list of its results."""
    operands = [atom for atom in eqn.invars if not is_literal(atom)]
    alone = jaxpr.replace(constvars=[], invars=operands, outvars=list(eqn.outvars), eqns=[eqn])
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))


def inner_jaxprs(eqn) -> list:
    """The jaxprs among an equation's parameters."""
    return [
        item
        for value in eqn.params.values()
        for item in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(getattr(item, "jaxpr", item), "eqns")
    ]


def is_literal(atom) -> bool:
    return hasattr(atom, "val")
