"""What JAX's own operations do, device by device, to values that are split or pending over mesh axes.

Of *pending* only what is linear keeps the meaning: `LINEAR` lists it. Of *split* only what treats each device's part by
itself: one rule a primitive says which dim of the result is split, and refuses a reduction, an index or a shift along a
split dim. What has no rule and is not in `ELEMENTWISE` is refused for split values: `shardops.local` gives it a type.

The names are those of jax 0.10 to 0.12.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from shardlib.spec import ShardingError
from shardlib.states import COUNTED, Axes, Dims, Made, State, agree, describe, merged, whole

# Linear in the operands at these positions together ('all': in each of them, all of one state), with the others the
# same along the pending axis.
_ALL = "all"
_LINEAR_IN_ALL = """
    neg reshape transpose broadcast_in_dim squeeze tile reduce_sum cumsum slice rev copy copy_p reduce_precision name
    concatenate split stop_gradient stack unstack add sub add_any reshard
    """
LINEAR = {
    **dict.fromkeys(_LINEAR_IN_ALL.split(), _ALL),
    **dict.fromkeys(("gather", "dynamic_slice", "div"), (0,)),
    **dict.fromkeys(("dynamic_update_slice", "pad"), (0, 1)),
    **dict.fromkeys(("scatter-add",), (0, 2)),
}
BILINEAR = {"mul", "dot_general", "ragged_dot_general"}
ELEMENTWISE = set(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt
    lt_to max min mul mulhi name ne neg nextafter not or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem reshard round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
    """.split()
)
# The operands that say which element is taken, or whether.
_CHOOSING = {
    "select_n": (0,),
    "dynamic_slice": range(1, 9),
    "dynamic_update_slice": range(2, 10),
    **dict.fromkeys(("gather", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), (1,)),
}
_KEEP_ZERO = set("broadcast_in_dim convert_element_type reshape neg copy reshard squeeze dynamic_slice".split())


@dataclass
class Equation:
    """One equation of the program: what goes in and out, on one device.

    Attributes:
      twin: the same equation of the program on one device alone, whose shapes are the whole arrays'; None where it is
        not known.
      axes: sizes of the mesh's axes.
      turning: it stands in a loop that sends, where whole numbers that depend on how many devices there are may say
        which slot is used in which turn.
      unreduced: sums over split dims leave them pending (in the backward rule of a custom_vjp).
    """

    eqn: object
    states: list[State]
    twin: object = None
    axes: dict[str, int] = field(default_factory=dict)
    turning: bool = False
    unreduced: bool = False
    dropped: frozenset[str] = frozenset()  # set by a rule: axes whose dim of one element a device is gone
    summed: frozenset[str] = frozenset()  # set by a rule, if `unreduced`: axes over which the result is a sum

    def __post_init__(self):
        self.name, self.params = self.eqn.primitive.name, self.eqn.params
        self.rows = [state.dims for state in self.states]
        self.shapes, self.outs = _shapes(self.eqn.invars), _shapes(self.eqn.outvars)
        self.twin_shapes, self.twin_outs = (
            (_shapes(self.twin.invars), _shapes(self.twin.outvars)) if self.twin is not None else (None, None)
        )

    def made(self, dim: int, out: int = 0) -> Axes:
        """What is known of a dim of the result that comes from no operand."""
        return Made.ANY if self.twin is None or self.twin_outs[out][dim] == self.outs[out][dim] else Made.PART

    def is_one(self, operand: int, dim: int) -> bool:
        """Whether the dim has one element on each device, however many there are."""
        return self.shapes[operand][dim] == 1 and (self.twin is None or self.twin_shapes[operand][dim] == 1)

    def drop(self, axes: Axes):
        if isinstance(axes, tuple):
            self.dropped |= frozenset(axes)


def _shapes(variables) -> list[tuple[int, ...]]:
    return [tuple(getattr(variable.aval, "shape", ())) for variable in variables]


def apply(equation: Equation) -> list[State]:
    """The states of the results of one equation. Raises `ShardingError` where they would have no meaning."""
    name, states = equation.name, equation.states
    if name in ("optimization_barrier", "device_put"):  # each operand by itself
        return states
    if name == "select_n" and states[0].never:
        return [states[1]]
    indexing = name == "gather" or name.startswith("scatter")
    if any(state.indices and not (indexing and position == 1) for position, state in enumerate(states)):
        raise ShardingError(f"'{name}' of {COUNTED}")
    rows = dims(equation)
    base = merged(states)
    split, pending = base.split, _pending(equation) | equation.summed
    split -= equation.summed
    if crossing := split & pending:
        axis = min(crossing)
        raise ShardingError(
            f"'{name}' of a value that is pending over {axis} and one that is split over {axis}: the sum over {axis} "
            "would mix them"
        )
    alone = base.alone | equation.dropped
    chooses = _CHOOSING.get(name, ())
    taken = [state for position, state in enumerate(states) if position not in chooses]
    sized = any(state.sized for state in (taken if equation.turning else states))
    results = []
    for row in rows:
        for axis in sorted(split):
            times = sum(isinstance(axes, tuple) and axis in axes for axes in row)
            if not times and axis not in alone:
                raise ShardingError(
                    f"'{name}' of a value that is split over {axis} loses the dim that is split: what each device has "
                    f"is no part of any whole\n  fix: {_REDUCED}"
                )
            if times > 1 or (times and axis in alone):
                raise ShardingError(
                    f"'{name}' makes two dims that are split over {axis}: each device has only the parts of its own "
                    "index\n  fix: all_gather one operand first"
                )
        zero = name in _KEEP_ZERO and all(state.zero for state in taken)
        results.append(State(row, split, pending, alone, zero, sized))
    return [_followed(equation, results[0])] if len(results) == 1 else results


def _pending(equation: Equation) -> frozenset[str]:
    """The axes over which the result is pending; raises where that would have no meaning."""
    name, states, eqn = equation.name, equation.states, equation.eqn
    axes = frozenset().union(*(state.pending for state in states))
    zeros = {index for index, state in enumerate(states) if state.zero}
    for axis in sorted(axes):
        holding = {index for index, state in enumerate(states) if axis in state.pending}
        if name in BILINEAR:
            if len(holding) == 1 and (name != "ragged_dot_general" or holding <= {0, 1}):
                continue
            raise ShardingError(
                f"'{name}' of two values that are both pending over {axis}: the product of sums is not the sum of "
                "products\n  fix: reduce one of them first"
            )
        if name == "select_n":
            data = set(range(1, len(states)))
        elif name == "convert_element_type" and jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
            data = {0} if _holds_sums(eqn.invars[0].aval.dtype) else set()
        elif name == "div" and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
            data = set()  # whole numbers are rounded
        elif name == "gather" and not _fills_with_zero(eqn):
            data = set()
        else:
            data = LINEAR.get(name, ())
            data = set(range(len(states))) if data == _ALL else set(data)
        if holding <= data <= holding | zeros:
            continue
        if holding < data:
            raise ShardingError(
                f"'{name}' of a value that is pending over {axis} and one that is not: each device would add it again\n"
                "  fix: reduce the pending one first, or make the other pending with shardops.pending (zeros: "
                "shardops.zeros)"
            )
        raise ShardingError(
            f"'{name}', which is not linear, of a value that is pending over {axis}: a function of a sum is not the "
            f"sum of the function\n  fix: reduce it over {axis} first"
        )
    return axes


def _holds_sums(dtype) -> bool:
    """Whether sums in this type are sums of numbers: small and unsigned whole numbers wrap around."""
    return jnp.issubdtype(dtype, jnp.inexact) or (jnp.issubdtype(dtype, jnp.signedinteger) and dtype.itemsize >= 4)


def _fills_with_zero(eqn) -> bool:
    """Whether a gather gives what is linear where an index is out of bounds: zero, NaN (a sum of NaNs is NaN), or the
    element at the edge."""
    fill = eqn.params.get("fill_value")
    if "FILL" not in str(eqn.params.get("mode")) or fill is None:
        return "FILL" not in str(eqn.params.get("mode")) or jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    return bool(fill == 0 or fill != fill)


def _followed(equation: Equation, result: State) -> State:
    """The result, with what is known of it as an index: JAX makes `table[arange(B), i]` of an iota, a comparison with
    zero, a broadcast and a concatenation."""
    name, params, states = equation.name, equation.params, equation.states
    first = states[0] if states else None
    if name == "iota":
        return replace(result, place=params["dimension"])
    if name == "concatenate" and _are_coordinates(equation):
        places = tuple(state.place for state in states)
        rows = [list(row) for row in equation.rows]
        counted = any(row[place] is Made.OWN for row, place in zip(rows, places) if place is not None)
        return replace(result, places=places, indices=counted or not _agrees(equation, rows))
    if first is None or first.place is None:
        return result
    if name == "lt" and getattr(equation.eqn.invars[1], "val", None) == 0:
        return replace(result, never=True)
    if name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.integer):
        holds = jnp.iinfo(params["new_dtype"]).max >= 2**31 - 1
        return replace(result, place=first.place) if holds else result
    if (
        name == "broadcast_in_dim"
        and equation.shapes[0][first.place] == equation.outs[0][params["broadcast_dimensions"][first.place]]
    ):
        return replace(result, place=params["broadcast_dimensions"][first.place])
    if name == "reshape" and equation.outs[0][: first.place + 1] == equation.shapes[0][: first.place + 1]:
        return replace(result, place=first.place)
    return result


# -- Which axes split which dim ----------------------------------------------------------------------------------------
_REDUCED = "a split dim is reduced only by an operation with a string (sum_unreduced, einsum_unreduced, pmax)"
_INDEXED = "all_gather it first; index_unreduced looks up rows of a split dim"
_GATHERED = "all_gather it first, or all_to_all the split to another dim"
_REGROUP = (
    "shardops.regroup with a string, as in 'B/d L -> parts R/d L', where another order is meant; all_gather first, "
    "where the whole is meant"
)


def dims(equation: Equation) -> list[Dims]:
    """What splits each dim of each result. Raises where a device would take its part of a split dim for all."""
    rows = _dims(equation)
    if equation.twin is not None:
        require_uniform(equation, rows)
    return rows


def require_uniform(equation: Equation, rows: Sequence[Dims]):
    """Raises `ShardingError` for a dim of a result whose size in the whole array depends on how many devices there are,
    unless it is a dim of an operand."""
    operands = zip(equation.rows, equation.shapes, equation.twin_shapes, strict=True)
    known = {pair for row, shape, twin in operands for pair in zip(row, shape, twin, strict=True)}
    for row, shape, twin in zip(rows, equation.outs, equation.twin_outs, strict=True):
        for axes, size, alone in zip(row, shape, twin, strict=True):
            if not isinstance(axes, tuple) or (axes, size, alone) in known:
                continue
            on_many = size * math.prod(equation.axes[axis] for axis in axes)
            if on_many != alone:
                raise ShardingError(
                    f"'{equation.name}' makes a dim whose size depends on how many devices there are: {alone} in all "
                    f"on one device, {on_many} on several\n  fix: {_REGROUP}"
                )


def _dims(equation: Equation) -> list[Dims]:
    name, rows, shapes, outs = equation.name, equation.rows, equation.shapes, equation.outs
    if name in RULES:
        return RULES[name](equation)
    if name.startswith(("random_", "rng_")):
        return _random(equation)
    if name in ELEMENTWISE and all(_broadcasts(shape, outs[0]) for shape in shapes):
        alike = [_stretched(equation, row, shape) for row, shape in zip(rows, shapes) if shape]
        made = tuple(equation.made(dim) for dim in range(len(outs[0])))
        return [agree(name, alike, outs[0]) if alike else made] * len(outs)
    for row in rows:
        for axes in row:
            if axes and axes is not Made.ANY:
                raise ShardingError(
                    f"'{name}' of a value with a dim that is {describe(axes)}: what it does to the parts is not known "
                    "here\n  fix: all_gather it first, or call it through shardops.local, with a declared type"
                )
    return [whole(len(out)) for out in outs]


def _broadcasts(shape, out) -> bool:
    """Whether an operand of this shape may be one of an elementwise operation: a scalar, or its dims are the result's
    or of size one."""
    return not shape or (len(shape) == len(out) and all(size in (1, full) for size, full in zip(shape, out)))


def _stretched(equation: Equation, row: Dims, shape) -> Dims:
    """The dims of such an operand once its dims of size one are repeated to the result's size."""
    stretched = []
    for axes, size, full in zip(row, shape, equation.outs[0]):
        if size != full:
            _keep_whole(equation, "repeats", axes, _GATHERED)
        stretched.append(axes if size == full else Made.ANY)
    return tuple(stretched)


def _keep_whole(equation: Equation, does: str, axes: Axes, fix: str):
    if axes and axes is not Made.ANY:
        error = "each device would take its own part for the whole"
        if isinstance(axes, Made):
            fix = (
                "count in the whole array: x.shape[0] * shardops.axis_size('d') elements, shardops.slice for positions"
            )
        raise ShardingError(f"'{equation.name}' {does} a dim that is {describe(axes)}: {error}\n  fix: {fix}")


def _sum_over(equation: Equation, axes: Axes) -> bool:
    """Whether a sum over this dim may be left pending here; notes it."""
    if equation.unreduced and isinstance(axes, tuple):
        equation.summed |= frozenset(axes)
        return True
    return False


def _reduce(equation):
    reduced = equation.params["axes"] if "axes" in equation.params else equation.params["dimensions"]
    rows = equation.rows[: len(equation.outs)]
    for row in rows:
        for axis in reduced:
            if equation.name != "reduce_sum" or not _sum_over(equation, row[axis]):
                _keep_whole(equation, "reduces", row[axis], _REDUCED)
    kept = [tuple(entry for axis, entry in enumerate(row) if axis not in reduced) for row in rows]
    return [agree(equation.name, kept, equation.outs[0])] * len(equation.outs)


def _along(key):
    def rule(equation):
        axis = equation.params[key]
        for row in equation.rows:
            _keep_whole(equation, "runs along", row[axis], _GATHERED)
        row = list(agree(equation.name, equation.rows, equation.shapes[0]))
        row[axis] = ()
        return [tuple(row)] * len(equation.outs)

    return rule


def _dot_general(equation):
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    a, b = equation.rows
    for position, other in zip(left, right):
        if a[position] != b[other] or not _sum_over(equation, a[position]):
            for axes in (a[position], b[other]):
                _keep_whole(equation, "contracts", axes, _REDUCED)
    batches = [tuple(a[axis] for axis in left_batch), tuple(b[axis] for axis in right_batch)]
    batch = agree(equation.name, batches, [equation.shapes[0][axis] for axis in left_batch])
    free_a = tuple(axes for axis, axes in enumerate(a) if axis not in (*left, *left_batch))
    free_b = tuple(axes for axis, axes in enumerate(b) if axis not in (*right, *right_batch))
    return [(*batch, *free_a, *free_b)]


def _ragged_dot(equation):
    """'T M, E M F/t, E -> T F/t': rows, groups and what is contracted are whole, since the groups' sizes count the
    whole's rows."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left, right), (batch, _) = numbers.dot_dimension_numbers
    a, b = equation.rows[:2]
    if batch or numbers.lhs_ragged_dimensions[0] in left:
        raise ShardingError(
            "'ragged_dot_general' with batch dims, or ragged along what is contracted: what it does to the parts is "
            "not known here\n  fix: call it through shardops.local, with a declared type"
        )
    fix = "call it through shardops.local, with each device's own group sizes"
    for axes in (a[numbers.lhs_ragged_dimensions[0]], *(b[axis] for axis in numbers.rhs_group_dimensions)):
        _keep_whole(equation, "goes through the groups of", axes, fix)
    for axes in (*(a[axis] for axis in left), *(b[axis] for axis in right)):
        _keep_whole(equation, "contracts", axes, _REDUCED)
    for axes in equation.rows[2]:
        _keep_whole(equation, "reads the sizes of groups from", axes, fix)
    free_a = tuple(axes for axis, axes in enumerate(a) if axis not in left)
    free_b = tuple(axes for axis, axes in enumerate(b) if axis not in (*right, *numbers.rhs_group_dimensions))
    return [(*free_a, *free_b)]


def _batched(equation):
    """A factorization of the last two dims, matrix by matrix: Cholesky, QR, LU, eigenvalues."""
    matrices = [(row, shape) for row, shape in zip(equation.rows, equation.shapes) if len(row) >= 2]
    for row, _ in matrices:
        for axes in row[-2:]:
            _keep_whole(equation, "factorizes along", axes, _GATHERED)
    batch = agree(equation.name, [row[:-2] for row, _ in matrices], matrices[0][1][:-2])
    return [(*batch, *whole(len(out) - len(batch))) for out in equation.outs]


def _broadcast(equation):
    (before,), (after,), places = equation.shapes, equation.outs, equation.params["broadcast_dimensions"]
    row = [equation.made(dim) for dim in range(len(after))]
    for place, axes, size in zip(places, equation.rows[0], before):
        if size == after[place]:
            row[place] = axes
        else:
            _keep_whole(equation, "repeats", axes, _GATHERED)
    return [tuple(row)]


def _tile(equation):
    for axes, times in zip(equation.rows[0], equation.params["reps"]):
        if times != 1:
            _keep_whole(equation, "repeats", axes, _GATHERED)
    return [equation.rows[0]]


def _squeeze(equation):
    (row,), dimensions = equation.rows, equation.params["dimensions"]
    for axis in dimensions:
        if not equation.is_one(0, axis):
            _keep_whole(equation, "drops", row[axis], _INDEXED)
        equation.drop(row[axis])
    return [tuple(axes for axis, axes in enumerate(row) if axis not in dimensions)]


def _part(equation):
    row = []
    for dim, (axes, size, out) in enumerate(zip(equation.rows[0], equation.shapes[0], equation.outs[0])):
        at_index = equation.name == "dynamic_slice" and equation.is_one(0, dim) and not equation.states[1 + dim].zero
        if size != out or at_index:
            _keep_whole(equation, "takes a part of" if out < size else "lengthens", axes, _INDEXED)
            axes = ()
        row.append(axes)
    return [tuple(row)]


def _pad(equation):
    row = []
    for axes, amounts in zip(equation.rows[0], equation.params["padding_config"]):
        if any(amounts):
            _keep_whole(equation, "lengthens", axes, _GATHERED)
            axes = ()
        row.append(axes)
    return [tuple(row)]


def _update_slice(equation):
    row = []
    for axes, update, size, part in zip(*equation.rows[:2], *equation.shapes[:2]):
        if size != part:
            for each in (axes, update):
                _keep_whole(equation, "writes a part of", each, _INDEXED)
            row.append(())
        else:
            row += agree(equation.name, [(axes,), (update,)], [size])
    return [tuple(row)]


def _own_rows(equation, dimensions: Sequence[int], batching: dict[int, int]) -> dict[int, int]:
    """Operand dims that are read or written element by element, with the dim of the indices that says which: the
    batching ones, and those indexed by positions of their own, as in `cache.at[arange(B), i]`."""
    (table, indices), places = equation.shapes[:2], equation.states[1].places
    if places is None and indices and indices[-1] == 1:
        places = (equation.states[1].place,)
    own = dict(batching)
    if places is None and equation.states[1].indices:
        raise ShardingError(f"'{equation.name}' at {COUNTED}")
    for place, axis in zip(places or (), dimensions):
        if place is not None and place < len(indices) - 1 and indices[place] == table[axis]:
            own[axis] = place
        elif place is not None and equation.states[1].indices:
            raise ShardingError(f"'{equation.name}' at {COUNTED}")
    return own


def _gather(equation):
    (table, indices), numbers = equation.rows[:2], equation.params["dimension_numbers"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    own = _own_rows(equation, numbers.start_index_map, batching)
    window, taken = [], set()
    indices = list(indices[:-1])  # the last holds the coordinates
    for axis, (axes, part) in enumerate(zip(table, equation.params["slice_sizes"])):
        gone = axis in numbers.collapsed_slice_dims or axis in batching
        if axis in own and part == 1 and gone:
            place, size = own[axis], equation.shapes[0][axis]
            index = indices[place] if axis in batching or place in taken else Made.ANY
            indices[place] = agree(equation.name, [(axes,), (index,)], [size])[0]
            taken.add(place)
        elif gone or part != equation.shapes[0][axis]:
            _keep_whole(equation, "indexes", axes, _INDEXED)
            window += [] if gone else [()]
        else:
            window.append(axes)
    window, others = iter(window), iter(indices)
    return [tuple(next(window if axis in numbers.offset_dims else others) for axis in range(len(equation.outs[0])))]


def _scatter(equation):
    (table, indices, updates), numbers = equation.rows[:3], equation.params["dimension_numbers"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims))
    own = _own_rows(equation, numbers.scatter_dims_to_operand_dims, batching)
    own = {axis: place for axis, place in own.items() if axis in (*numbers.inserted_window_dims, *batching)}
    scattered = [axis for axis in range(len(updates)) if axis not in numbers.update_window_dims]
    window = iter(numbers.update_window_dims)
    row = []
    for axis, axes in enumerate(table):
        size = equation.shapes[0][axis]
        if axis in own:
            index = indices[own[axis]] if axis in batching else Made.ANY
            row += agree(equation.name, [(axes,), (index,), (updates[scattered[own[axis]]],)], [size])
        elif axis in numbers.inserted_window_dims:
            _keep_whole(equation, "writes at an index of", axes, _INDEXED)
            row.append(())
        else:
            place = next(window)
            if equation.shapes[2][place] != size:
                for each in (axes, updates[place]):
                    _keep_whole(equation, "writes a part of", each, _INDEXED)
                row.append(())
            else:
                row += agree(equation.name, [(axes,), (updates[place],)], [size])
    for place, axis in enumerate(scattered):
        if place not in own.values():
            for axes in (indices[place], updates[axis]):
                _keep_whole(equation, "writes at indices of", axes, "all_gather indices and values first")
    return [tuple(row)]


def _concatenate(equation):
    dimension = equation.params["dimension"]
    for row in equation.rows:
        _keep_whole(equation, "lengthens", row[dimension], _GATHERED)
    rows = [[*row[:dimension], (), *row[dimension + 1 :]] for row in equation.rows]
    if _are_coordinates(equation) and not _agrees(equation, rows):
        for row, state in zip(rows, equation.states):
            if state.place is not None:
                row[state.place] = Made.ANY
    return [agree(equation.name, rows, equation.outs[0])]


def _agrees(equation, rows) -> bool:
    try:
        agree(equation.name, [row[:-1] for row in rows], equation.outs[0][:-1])
    except ShardingError:
        return False
    return True


def _are_coordinates(equation) -> bool:
    """Whether indices of several dims are put together, as `x[arange(B), i]` does."""
    last = len(equation.outs[0]) - 1
    places = [state.place for state in equation.states]
    return (
        equation.params["dimension"] == last
        and all(shape[-1] == 1 for shape in equation.shapes)
        and any(place is not None and place < last for place in places)
        and jnp.issubdtype(equation.eqn.outvars[0].aval.dtype, jnp.integer)
    )


def _stack(equation):
    row = list(agree(equation.name, equation.rows, equation.shapes[0]))
    row.insert(equation.params["axis"], ())
    return [tuple(row)]


def _unstack(equation):
    axis, (row,) = equation.params["axis"], equation.rows
    if equation.is_one(0, axis):
        equation.drop(row[axis])
    else:
        _keep_whole(equation, "takes parts of", row[axis], _INDEXED)
    return [(*row[:axis], *row[axis + 1 :])] * len(equation.outs)


def _iota(equation):
    def made(dim):
        axes = equation.made(dim)
        if dim == equation.params["dimension"]:
            return Made.OWN if axes is Made.PART else ()
        return axes

    return [tuple(map(made, range(len(equation.outs[0]))))]


def _rev(equation):
    for axis in equation.params["dimensions"]:
        _keep_whole(equation, "reverses", equation.rows[0][axis], _GATHERED)
    return [equation.rows[0]]


def _split(equation):
    axis, (row,) = equation.params["axis"], equation.rows
    _keep_whole(equation, "takes parts of", row[axis], _INDEXED)
    return [(*row[:axis], (), *row[axis + 1 :])] * len(equation.outs)


def _random(equation):
    """A key's dims come first, then those of what is drawn with it. Which numbers a device draws is not proved."""
    alike = [row for row, shape in zip(equation.rows, equation.shapes) if shape]
    rank = min([len(row) for row in alike] + [len(out) for out in equation.outs], default=0)
    sizes = equation.outs[0][:rank]
    lead = agree(equation.name, [row[:rank] for row in alike], sizes) if alike else ()
    for row in alike:
        for axes in row[rank:]:
            _keep_whole(equation, "makes keys of", axes, _GATHERED)
    return [(*lead, *(equation.made(dim, out) for dim in range(len(lead), len(shape))))
            for out, shape in enumerate(equation.outs)]  # fmt: skip


def _reshape(equation):
    """The first dims, as far as they keep their sizes, and then runs of dims of equal size correspond. In a run the dim
    that is split must be the major one, and the major one of those after stays split: only that is the same permutation
    of the whole array on every mesh."""
    (row,), (before,), (after,) = equation.rows, equation.shapes, equation.outs
    # The runs are those of the whole arrays: on a device a split dim may have size one by chance.
    before, after = (before, after) if equation.twin is None else (equation.twin_shapes[0], equation.twin_outs[0])
    if 0 in before:
        for axes in row:
            _keep_whole(equation, "reshapes", axes, _REGROUP)
        return [whole(len(after))]
    result: list[Axes] = [()] * len(after)
    i = j = 0
    for sizes in zip(before, after, equation.shapes[0], equation.outs[0]):  # the first dims stay what they are
        if sizes[0] != sizes[1] or sizes[2] != sizes[3]:
            break
        result[j] = row[i]
        i = j = i + 1
    waiting: Axes = ()  # of a split dim of one element a device, which stands before the run
    while i < len(before) or j < len(after):
        if i < len(before) and before[i] == 1:
            if row[i] and not isinstance(row[i], Made):
                if j < len(after) and after[j] == 1:
                    result[j] = row[i]
                    j += 1
                else:
                    if waiting:
                        _keep_major(equation, waiting, row[i])
                    waiting = row[i]
            i += 1
        elif j < len(after) and after[j] == 1:
            result[j] = equation.made(j)
            j += 1
        else:
            i0, j0, i, j = i, j, i + 1, j + 1
            while (have := math.prod(before[i0:i])) != (want := math.prod(after[j0:j])):
                i, j = (i + 1, j) if have < want else (i, j + 1)
            run = [row[k] for k in range(i0, i) if before[k] > 1 or row[k]]
            major = waiting or run[0]
            for axes in run if waiting else run[1:]:
                _keep_major(equation, major, axes)
            waiting = ()
            if isinstance(major, Made) and (i - i0, j - j0) != (1, 1):
                result[j0:j] = [equation.made(k) for k in range(j0, j)]
                for axes in (*run[1:], *result[j0 + 1 : j], *([major] if major is Made.OWN else ())):
                    if isinstance(axes, Made) and axes is not Made.ANY:
                        _keep_whole(equation, "reshapes", axes, _REGROUP)
            else:
                result[j0] = major
    equation.drop(waiting)
    return [tuple(result)]


def _keep_major(equation: Equation, major: Axes, axes: Axes):
    """Refuses a split dim that is merged with a dim that stands before it."""
    if isinstance(axes, tuple) and axes and major != axes:
        raise ShardingError(
            f"'{equation.name}' merges a dim that is {describe(axes)} with one that stands before it: the devices' "
            f"parts would lie within each other, in another order on each mesh\n  fix: {_REGROUP}"
        )


_REDUCTIONS = """
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce
    """
RULES = {
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), _along("axis")),
    "sort": _along("dimension"),
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    **dict.fromkeys(
        ("cholesky", "qr", "lu", "eigh", "eig", "svd", "triangular_solve", "householder_product"), _batched
    ),
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    "transpose": lambda equation: [tuple(equation.rows[0][axis] for axis in equation.params["permutation"])],
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
