"""The check: that each value lies on the mesh as its type says, proved on the program's jaxpr before a device is used.

The function is traced abstractly, once, for what one device holds; docs/notation.md says what is proved. In that trace
each operation of shardops and each annotation is a *mark* (`claims.py`), whose rule says, from the types of what goes
in, what comes out, or refuses. A walk over the jaxpr carries each value's state (`states.py`), through marks and,
between them, ordinary JAX (`rules.py`).

The verdict does not depend on the mesh: what a device holds of a split dim has no number for its size but a symbol
(`parts.py`), and the mesh's axes are not bound, so that nothing but a mark sends, or knows how many devices there are.

Backward passes are not walked: the gradient's type follows from the value's by exchanging same and pending
(`shardops.vjp`), since each operation's transpose does just that. Backward rules that the program brings along
(`jax.custom_vjp`, `jax.custom_jvp`) are walked where they stand.
"""

import itertools
import math
import re

import jax
from jax.errors import InconclusiveDimensionOperation

from shardlib.proof.frames import line_of, unbound
from shardlib.proof.jaxprs import trace_with_axes
from shardlib.proof.marks import Check, during
from shardlib.proof.parts import NUMBER, Parts, guarded, shown
from shardlib.proof.states import State
from shardlib.proof.unread import refuse_unread
from shardlib.proof.walk import GRAD, Walk
from shardlib.spec import ShardingError, Spec

_serial = itertools.count()
_OUTSIDE = (
    "a transfer, an index or a number of devices over {0} outside of shardops: each is written as an operation with a "
    "string, the number as shardops.axis_size('{0}')"
)
_LEAKED = "a value is used outside of the differentiated function that made it\n  fix: return it too, with has_aux=True"
# Errors of JAX, and their meaning here.
_MEANT = (
    ("unexpected tracer", _LEAKED),  # jax 0.11 and later; before, it is among the constants
    (
        "Batching rule for 'shardlib_mark'",
        "an operation or an annotation under jax.vmap: its string does not name the mapped dim\n"
        "  fix: write the dim in the string, outside of jax.vmap",
    ),
    ("rule.* for 'shardlib_mark'", GRAD),
    (
        r"proof.parts.Count|\bCount\(|Cannot determine dtype of \d",
        "a number of devices is given to a function: x / shardops.axis_size('d') is written with /, a plain number is "
        "int(shardops.axis_size('d'))",
    ),
    (
        "boolean conversion of traced|Abstract tracer value|conversion method __array__",
        "a value, or what was computed from the size of a split dim, is asked for as a Python number, a truth value or "
        "a NumPy array: it is not known while the program is traced\n"
        "  fix: jnp, jnp.where, lax.cond; a number of the whole is x.shape[0] * shardops.axis_size('d')",
    ),
    ("Pallas", "'pallas_call': what it does cannot be seen\n  fix: call it through shardops.local"),
    (
        # jax 0.11 and later raise the last one when a size is used outside a trace.
        "_DimExpr|interpreted as an integer|sequence of integers|shape polymorphism|dim_as_value|non-constant size|"
        "process_primitive|non-integer powers|valid indices. Got .*split_over_",
        NUMBER,
    ),
)


def verify(function, axes: dict[str, int], arguments: list, in_specs: list[Spec], where: str, read: set) -> int:
    """Traces `function` and walks it; returns how many claims were proved.

    Args:
      function: the body that `shard_map` would run; it checks its own result.
      axes: the mesh's axes and sizes.
      arguments: trees of `ShapeDtypeStruct`, the whole arrays.
      in_specs: the types of the leaves of the arguments.
      where: the line at which the function stands.
      read: (file, line of `def`) of the functions whose annotations are claims.
    Raises:
      ShardingError: at the first claim that is not so, with its line; for annotations that nobody reads.
    """
    check, functions = Check(axes, Parts(axes)), set()
    with guarded(check.parts):
        jaxpr = traced(function, check, _on_a_device(arguments, in_specs, axes, check.parts.size))
        Walk(check, traced, functions)(jaxpr, [State.of(spec) for spec in in_specs])
    if check.gradients:
        _trace_as_it_runs(function, axes, arguments, in_specs, where)
    refuse_unread(functions, read)
    return check.proved


def _trace_as_it_runs(function, axes, arguments, in_specs, where):
    """Traces the function with its gradients for the sizes of this mesh. Raises `ShardingError` where they do not
    fit."""

    def numbers(whole, over):
        return whole // math.prod(axes[axis] for axis in over)

    jaxpr = traced(function, Check(axes, None), _on_a_device(arguments, in_specs, axes, numbers), axes)
    if any(isinstance(value, jax.core.Tracer) for value in jaxpr.consts):
        raise ShardingError(f"{_LEAKED}\n  at {where}")


def _on_a_device(arguments, in_specs, axes, size) -> list:
    """The arguments' shapes on one device; a dim that is named like an axis has one element, or all."""
    leaves, tree = jax.tree.flatten(arguments)

    def part(leaf, spec):
        shape = [
            (1 if dim.axes else axes[dim.name]) if dim.name in axes else size(whole, dim.axes)
            for dim, whole in zip(spec.dims, leaf.shape, strict=True)
        ]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree.unflatten(tree, [part(leaf, spec) for leaf, spec in zip(leaves, in_specs, strict=True)])


def traced(function, check: Check, arguments: list, axes: dict[str, int] | None = None):
    try:
        with during(check):
            # The extra axis is in the key of every cache of traced functions, so that nothing traced here is met by
            # the real trace.
            return trace_with_axes(function, {**(axes or {}), f"check {next(_serial)}": 1}, *arguments)
    except ShardingError:
        raise
    except InconclusiveDimensionOperation as error:
        first = shown(error).partition("\n")[0]
        what = "what is computed must not depend on the size of a device's part"
        raise ShardingError(f"{what}: {first}\n  at {line_of(error)}") from error
    except NameError as error:
        raise ShardingError(f"{_OUTSIDE.format(unbound(error, check.axes))}\n  at {line_of(error)}") from error
    # JAX's own, shapes that do not fit, and what a program raises that does not expect these sizes.
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError, AssertionError) as error:
        message = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else shown(error)
        text = next((text for said, text in _MEANT if re.search(said, message)), message)
        if isinstance(error, KeyError) and error.args[0] in check.axes:  # get_abstract_mesh().shape['d']
            text = _OUTSIDE.format(error.args[0])
        if "incompatible shapes" in text and "/" in text:
            fix = "psum_scatter a sum, slice what is the same, or all_gather the other"
            text += f"\n  fix: a dim is split in one and whole in the other: {fix}"
        raise ShardingError(f"{text or type(error).__name__}\n  at {line_of(error)}") from error
