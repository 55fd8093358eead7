"""What JAX's own operations do, device by device, to values that are split or pending over mesh axes.

Of *pending* only what is linear keeps the meaning: `LINEAR` lists it. Of *split* only what treats each device's part by
itself: one rule a primitive says which dim of the result is split, and refuses a reduction, an index or a shift along a
split dim. What has no rule and is not in `ELEMENTWISE` is refused for split values: `shardops.local` gives it a type.

The names are those of jax 0.10 and 0.11.
"""

import math

import jax.numpy as jnp

from shardlib.spec import ShardingError
from shardlib.states import Axes, Dims, State, agree, describe, whole

# Linear in the operands at these positions together ('all': in each of them, all of one state), with the others the
# same along the pending axis.
_ALL = "all"
LINEAR = {
    **dict.fromkeys(
        ("neg", "reshape", "transpose", "broadcast_in_dim", "squeeze", "tile", "reduce_sum", "cumsum"), _ALL
    ),
    **dict.fromkeys(
        ("slice", "rev", "copy", "copy_p", "reduce_precision", "name", "concatenate", "split", "stop_gradient"), _ALL
    ),
    **dict.fromkeys(("stack", "unstack"), _ALL),
    **dict.fromkeys(("add", "sub", "add_any"), _ALL),
    **dict.fromkeys(("gather", "dynamic_slice", "div"), (0,)),
    **dict.fromkeys(("dynamic_update_slice", "pad"), (0, 1)),
    **dict.fromkeys(("scatter-add",), (0, 2)),
}
BILINEAR = {"mul", "dot_general"}
ELEMENTWISE = set(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg nextafter not or polygamma population_count pow real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor zeta
    """.split()
)
_KEEP_ZERO = {"broadcast_in_dim", "convert_element_type", "reshape", "neg", "copy"}


def apply(eqn, states: list[State]) -> list[State]:
    """The states of the results of one equation. Raises `ShardingError` where they would have no meaning."""
    name = eqn.primitive.name
    if name in ("optimization_barrier", "device_put"):  # each operand by itself
        return states
    split = frozenset().union(*(state.split for state in states))
    pending = _pending(eqn, states)
    if crossing := split & pending:
        axis = min(crossing)
        raise ShardingError(
            f"'{name}' of a value that is pending over {axis} and one that is split over {axis}: the sum over {axis} would mix them"
        )
    rows = dims(eqn, states)
    for row in rows:
        for axis in sorted(split):
            if not any(axes and axis in axes for axes in row):
                raise ShardingError(
                    f"'{name}' of a value that is split over {axis} loses the dim that is split: what each device has is no part of any whole\n  fix: {_REDUCED}"
                )
            if sum(isinstance(axes, tuple) and axis in axes for axes in row) > 1:
                raise ShardingError(
                    f"'{name}' makes two dims that are split over {axis}: each device has only the parts of its own index\n  fix: all_gather one operand first"
                )
    zero = name in _KEEP_ZERO and all(state.zero for state in states)
    return [State(row, split, pending, zero) for row in rows]


def _pending(eqn, states) -> frozenset[str]:
    """The axes over which the result is pending; raises where that would have no meaning."""
    name = eqn.primitive.name
    axes = frozenset().union(*(state.pending for state in states))
    zeros = {index for index, state in enumerate(states) if state.zero}
    for axis in sorted(axes):
        holding = {index for index, state in enumerate(states) if axis in state.pending}
        if name in BILINEAR:
            if len(holding) == 1:
                continue
            raise ShardingError(
                f"'{name}' of two values that are both pending over {axis}: the product of sums is not the sum of products\n  fix: reduce one of them first"
            )
        if name == "select_n":
            data = set(range(1, len(states)))
        elif name == "convert_element_type" and jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
            data = {0}
        else:
            data = LINEAR.get(name, ())
            data = set(range(len(states))) if data == _ALL else set(data)
        if holding <= data <= holding | zeros:
            continue
        if holding < data:
            raise ShardingError(
                f"'{name}' of a value that is pending over {axis} and one that is not: each device would add it again\n"
                f"  fix: reduce the pending one first, or make the other pending with shardops.pending (zeros: shardops.zeros)"
            )
        raise ShardingError(
            f"'{name}', which is not linear, of a value that is pending over {axis}: a function of a sum is not the sum of the function\n  fix: reduce it over {axis} first"
        )
    return axes


# -- Which axes split which dim ----------------------------------------------------------------------------------------
_REDUCED = "a split dim is reduced only by an operation with a string (sum_unreduced, einsum_unreduced, pmax)"
_INDEXED = "all_gather it first; index_unreduced looks up rows of a split dim"
_GATHERED = "all_gather it first, or all_to_all the split to another dim"


def dims(eqn, states) -> list[Dims]:
    """What splits each dim of each result. Raises where a device would take its part of a split dim for all."""
    name = eqn.primitive.name
    rows = [state.dims for state in states]
    shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in eqn.invars]
    outs = [tuple(getattr(variable.aval, "shape", ())) for variable in eqn.outvars]
    if name in RULES:
        return RULES[name](name, eqn.params, rows, shapes, outs)
    if name.startswith(("random_", "threefry", "rng_")):  # which numbers a device draws is not proved
        return [(None,) * len(out) for out in outs]
    if name in ELEMENTWISE and all(_broadcasts(shape, outs[0]) for shape in shapes):
        alike = [_stretched(name, row, shape, outs[0]) for row, shape in zip(rows, shapes) if shape]
        return [agree(name, alike) if alike else (None,) * len(outs[0])] * len(outs)
    for row in rows:
        for axes in row:
            if axes:
                raise ShardingError(
                    f"'{name}' of a value with a dim that is {describe(axes)}: what it does to the parts is not known here\n  fix: all_gather it first, or call it through shardops.local, with a declared type"
                )
    return [whole(len(out)) for out in outs]


def _broadcasts(shape, out) -> bool:
    """Whether an operand of this shape may be one of an elementwise operation: a scalar, or its dims are the result's
    or of size one."""
    return not shape or (len(shape) == len(out) and all(size in (1, full) for size, full in zip(shape, out)))


def _stretched(name, row, shape, out) -> Dims:
    """The dims of such an operand once its dims of size one are repeated to the result's size."""
    stretched = []
    for axes, size, full in zip(row, shape, out):
        if size != full:
            _keep_whole(name, "repeats", axes, _GATHERED)
        stretched.append(axes if size == full else None)
    return tuple(stretched)


def _keep_whole(name: str, does: str, axes: Axes, fix: str):
    if axes:
        fix = "annotate the value first, to say how it lies" if isinstance(axes, frozenset) else fix
        raise ShardingError(
            f"'{name}' {does} a dim that is {describe(axes)}: each device would take its own part for the whole\n  fix: {fix}"
        )


def _reduce(name, params, rows, shapes, outs):
    axes = params["axes"] if "axes" in params else params["dimensions"]
    for row in rows[: len(outs)]:
        for axis in axes:
            _keep_whole(name, "reduces", row[axis], _REDUCED)
    kept = [tuple(entry for axis, entry in enumerate(row) if axis not in axes) for row in rows[: len(outs)]]
    return [agree(name, kept)] * len(outs)


def _along(key):
    def rule(name, params, rows, shapes, outs):
        axis = params[key]
        for row in rows:
            _keep_whole(name, "runs along", row[axis], _GATHERED)
        row = list(agree(name, rows))
        row[axis] = ()
        return [tuple(row)] * len(outs)

    return rule


def _dot_general(name, params, rows, shapes, outs):
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    a, b = rows
    for axes in [*(a[axis] for axis in left), *(b[axis] for axis in right)]:
        _keep_whole(name, "contracts", axes, _REDUCED)
    batch = agree(name, [tuple(a[axis] for axis in left_batch), tuple(b[axis] for axis in right_batch)])
    free_a = tuple(axes for axis, axes in enumerate(a) if axis not in (*left, *left_batch))
    free_b = tuple(axes for axis, axes in enumerate(b) if axis not in (*right, *right_batch))
    return [(*batch, *free_a, *free_b)]


def _broadcast(name, params, rows, shapes, outs):
    row = [None] * len(outs[0])
    places = params["broadcast_dimensions"]
    for place, axes in zip(places, _stretched(name, rows[0], shapes[0], [outs[0][place] for place in places])):
        row[place] = axes
    return [tuple(row)]


def _tile(name, params, rows, shapes, outs):
    for axes, times in zip(rows[0], params["reps"]):
        if times != 1:
            _keep_whole(name, "repeats", axes, _GATHERED)
    return [rows[0]]


def _squeeze(name, params, rows, shapes, outs):
    for axis in params["dimensions"]:
        _keep_whole(name, "drops", rows[0][axis], _INDEXED)
    return [tuple(axes for axis, axes in enumerate(rows[0]) if axis not in params["dimensions"])]


def _part(name, params, rows, shapes, outs):
    row = []
    for axes, size, out in zip(rows[0], shapes[0], outs[0]):
        if size != out:
            _keep_whole(name, "takes a part of" if out < size else "lengthens", axes, _INDEXED)
        row.append(axes)
    return [tuple(row)]


def _pad(name, params, rows, shapes, outs):
    row = []
    for axes, amounts in zip(rows[0], params["padding_config"]):
        if any(amounts):
            _keep_whole(name, "lengthens", axes, _GATHERED)
            axes = () if axes is None else axes
        row.append(axes)
    return [tuple(row)]


def _update_slice(name, params, rows, shapes, outs):
    row = []
    for axes, update, size, part in zip(rows[0], rows[1], shapes[0], shapes[1]):
        if size != part:
            _keep_whole(name, "writes a part of", axes, _INDEXED)
            row.append(axes)
        else:
            row += agree(name, [(axes,), (update,)])
    return [tuple(row)]


def _gather(name, params, rows, shapes, outs):
    (table, indices), numbers = rows[:2], params["dimension_numbers"]
    batch = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    window = []
    indices = list(indices[:-1])  # the last holds the coordinates
    for axis, (axes, part) in enumerate(zip(table, params["slice_sizes"])):
        if axis in batch:
            indices[batch[axis]] = agree(name, [(axes,), (indices[batch[axis]],)])[0]
        elif axis in numbers.collapsed_slice_dims or part != shapes[0][axis]:
            _keep_whole(name, "indexes", axes, _INDEXED)
            window += [] if axis in numbers.collapsed_slice_dims else [axes]
        else:
            window.append(axes)
    window, others = iter(window), iter(indices)
    return [tuple(next(window) if axis in numbers.offset_dims else next(others) for axis in range(len(outs[0])))]


def _scatter(name, params, rows, shapes, outs):
    (table, _, updates), numbers = rows[:3], params["dimension_numbers"]
    window = iter(numbers.update_window_dims)
    row = []
    for axis, axes in enumerate(table):
        if axis in numbers.operand_batching_dims:
            row.append(axes)
        elif axis in numbers.inserted_window_dims:
            _keep_whole(name, "writes at an index of", axes, _INDEXED)
            row.append(axes)
        else:
            place = next(window)
            if shapes[2][place] != shapes[0][axis]:
                _keep_whole(name, "writes a part of", axes, _INDEXED)
                row.append(axes)
            else:
                row += agree(name, [(axes,), (updates[place],)])
    return [tuple(row)]


def _concatenate(name, params, rows, shapes, outs):
    for row in rows:
        _keep_whole(name, "lengthens", row[params["dimension"]], _GATHERED)
    row = list(agree(name, rows))
    row[params["dimension"]] = ()
    return [tuple(row)]


def _stack(name, params, rows, shapes, outs):
    row = list(agree(name, rows))
    row.insert(params["axis"], ())
    return [tuple(row)]


def _unstack(name, params, rows, shapes, outs):
    axis = params["axis"]
    _keep_whole(name, "takes parts of", rows[0][axis], _INDEXED)
    return [(*rows[0][:axis], *rows[0][axis + 1 :])] * len(outs)


def _iota(name, params, rows, shapes, outs):
    return [tuple(() if axis == params["dimension"] else None for axis in range(len(outs[0])))]


def _rev(name, params, rows, shapes, outs):
    for axis in params["dimensions"]:
        _keep_whole(name, "reverses", rows[0][axis], _GATHERED)
    return [rows[0]]


def _split(name, params, rows, shapes, outs):
    _keep_whole(name, "takes parts of", rows[0][params["axis"]], _INDEXED)
    return [rows[0]] * len(outs)


def _axes(*entries: Axes) -> frozenset[str]:
    return frozenset().union(*(entry for entry in entries if entry))


def _reshape(name, params, rows, shapes, outs):
    """Runs of dims of equal size correspond. A dim that stays by itself stays as it is; dims that merge are split as
    the major one is; of a split dim that is divided, which part stays split is left open (microbatches are whole, heads
    are split)."""
    (row,), (before,), (after,) = rows, shapes, outs
    if 0 in before:
        return [(_axes(*row),) * len(after)]
    groups, gaps = (
        [],
        [],
    )  # (what is known of the dims before, number of dims after): of each run, and of the ones around the runs
    i = j = 0
    while True:
        i0, j0 = i, j
        while before[i : i + 1] == (1,):
            i += 1
        while after[j : j + 1] == (1,):
            j += 1
        gaps.append((row[i0:i], j - j0))
        if i == len(before):
            break
        i0, j0, i, j = i, j, i + 1, j + 1
        while (have := math.prod(before[i0:i])) != (want := math.prod(after[j0:j])):
            i, j = (i + 1, j) if have < want else (i, j + 1)
        groups.append((row[i0:i], j - j0))
    if not after:
        for axes in row:
            _keep_whole(name, "drops", axes, _INDEXED)
    result = []
    for position, (ones, new) in enumerate(gaps):
        # Beside a split dim of size n, a new one of size one: it may have been divided as n x 1 or 1 x n.
        beside = [axes for inside, _ in groups[max(position - 1, 0) : position + 1] for axes in inside]
        result += ones if len(ones) == new else [_axes(*ones, *beside) or (() if ones else None)] * new
        if position < len(groups):
            inside, count = groups[position]
            around = gaps[position : position + 2]
            merged = _axes(*(axes for ones, new in around if len(ones) > new for axes in ones))
            divided = count > 1 or any(new > len(ones) for ones, new in around)
            axes = _axes(*inside) | merged
            if not axes:
                result += [None if all(entry is None for entry in inside) else ()] * count
            elif not merged and not divided and isinstance(inside[0], tuple) and axes == set(inside[0]):
                result.append(inside[0])
            else:
                result += [axes] * count
    return [tuple(result)]


RULES = {
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "reduce_xor",
            "argmax",
            "argmin",
            "reduce",
        ),
        _reduce,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), _along("axis")),
    "sort": _along("dimension"),
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    "transpose": lambda name, params, rows, shapes, outs: [tuple(rows[0][axis] for axis in params["permutation"])],
    "squeeze": _squeeze,
    **dict.fromkeys(("slice", "dynamic_slice"), _part),
    "pad": _pad,
    "dynamic_update_slice": _update_slice,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"), _scatter),
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "iota": _iota,
    "rev": _rev,
    "split": _split,
    "reshape": _reshape,
}
