"""What JAX's own operations do, device by device, to values that are split or pending over mesh axes.

Of *pending* only what is linear keeps the meaning: `LINEAR` lists it. Of *split* only what treats each device's part by
itself. Which dims of the result are split follows from their sizes (`parts.py`). A rule says which dims of the operands
an operation goes along or through, `ALONG`: they must be whole. What has no rule and is not in `ELEMENTWISE` is refused
for split values: `shardops.local` gives it a type.

The names are those of jax 0.10 to 0.12.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from shardlib.proof.parts import Parts, is_part, shown
from shardlib.proof.states import LOCAL_IOTA, Dims, State, agree, merged
from shardlib.spec import ShardingError

# Linear in the operands at these positions together ('all': in each of them, all of one state), with the others the
# same along the pending axis.
_ALL = "all"
_LINEAR_IN_ALL = """
    neg reshape transpose broadcast_in_dim squeeze tile reduce_sum cumsum slice rev copy copy_p reduce_precision name
    concatenate split stop_gradient stack unstack add sub add_any reshard reduce_window_sum fft real imag complex
    """
LINEAR = {
    **dict.fromkeys(_LINEAR_IN_ALL.split(), _ALL),
    **dict.fromkeys(("gather", "dynamic_slice", "div", "scatter-mul"), (0,)),
    **dict.fromkeys(("dynamic_update_slice", "pad"), (0, 1)),
    **dict.fromkeys(("scatter-add",), (0, 2)),
}
BILINEAR = {"mul", "dot_general", "ragged_dot_general", "conv_general_dilated"}
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
_KEEP_ZERO = set("broadcast_in_dim convert_element_type reshape neg copy reshard squeeze dynamic_slice".split())
# The operand that says which elements are taken.
_INDICES = {"gather": 1, "scatter": 1, "scatter-add": 1, "scatter-mul": 1, "scatter-min": 1, "scatter-max": 1}


@dataclass
class Equation:
    """One equation of the program: what goes in and out, on one device.

    Attributes:
      parts: the sizes of the trace.
      unreduced: sums over split dims leave them pending (in the backward rule of a custom_vjp).
    """

    eqn: object
    states: list[State]
    parts: Parts
    unreduced: bool = False

    def __post_init__(self):
        self.name, self.params = self.eqn.primitive.name, self.eqn.params
        self.rows = [state.dims for state in self.states]
        self.shapes, self.outs = _shapes(self.eqn.invars), _shapes(self.eqn.outvars)


def _shapes(variables) -> list[tuple]:
    return [tuple(getattr(variable.aval, "shape", ())) for variable in variables]


def apply(equation: Equation) -> list[State]:
    """The states of the results of one equation. Raises `ShardingError` where they would have no meaning."""
    name, states = equation.name, equation.states
    if name in ("optimization_barrier", "device_put"):  # each operand by itself
        return states
    if name == "select_n" and states[0].never:
        return [states[1]]
    position = _position(equation)
    for place, state in enumerate(states):
        if state.local_iota and _INDICES.get(name) != place and position is None:
            raise ShardingError(f"'{name}' of {LOCAL_IOTA}")
    summed = _require_whole(equation)
    rows = [_dims(equation, out) for out in range(len(equation.outs))]
    base = merged(states)
    split, pending = base.split - summed, _pending(equation) | summed
    if crossing := split & pending:
        axis = min(crossing)
        raise ShardingError(
            f"'{name}' of a value that is pending over {axis} and one that is split over {axis}: the sum over {axis} "
            "would mix them"
        )
    without_dim = base.without_dim | _dropped(equation)
    results = []
    for row in rows:
        for axis in sorted(split):
            times = sum(axis in axes for axes in row)
            if not times and axis not in without_dim:
                raise ShardingError(
                    f"'{name}' of a value that is split over {axis} loses the dim that is split: what each device has "
                    f"is no part of any whole\n  fix: {_REDUCED}"
                )
            if times > 1 or (times and axis in without_dim):
                raise ShardingError(
                    f"'{name}' makes two dims that are split over {axis}: each device has only the parts of its own "
                    "index\n  fix: all_gather one operand first"
                )
        taken = states[1:] if name == "select_n" else states[:1] if name == "dynamic_slice" else states
        zero = name in _KEEP_ZERO and all(state.zero for state in taken)
        results.append(State(row, split, pending, without_dim, zero, base.sized))
    return [replace(results[0], **position)] if position is not None else results


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
        elif name == "scatter":  # where an index comes twice, devices might write different ones
            sets = eqn.params["update_jaxpr"] is None and (states[2].zero or eqn.params["unique_indices"])
            data = {0, 2} if sets else set()
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


def _position(equation: Equation) -> dict | None:
    """What is known of the result as an index, where anything is: JAX makes `table[arange(B), i]` of an iota, a
    comparison with zero, the addition of the size, a broadcast and a concatenation."""
    name, params, states = equation.name, equation.params, equation.states
    if name == "iota":
        dim = params["dimension"]
        return dict(position_along=dim, local_iota=is_part(equation.outs[0][dim]))
    if name == "concatenate" and _are_coordinates(equation):
        along = tuple(state.position_along for state in states)
        return dict(positions_along=along, local_iota=any(state.local_iota for state in states))
    positions = [state for state in states if state.position_along is not None]
    if len(positions) != 1:
        return None
    along, kept = positions[0].position_along, dict(local_iota=positions[0].local_iota)
    numbers = [atom.val for atom in equation.eqn.invars if hasattr(atom, "val")]
    if name == "lt" and numbers == [0] and states[0] is positions[0]:
        return dict(never=True)
    if name == "add" and any(state.sized for state in states):
        return kept
    if (name, numbers) in (("mul", [1]), ("add", [0])):
        return dict(position_along=along, **kept)
    if name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.integer):
        return dict(position_along=along, **kept) if jnp.iinfo(params["new_dtype"]).max >= 2**31 - 1 else None
    if name == "broadcast_in_dim":
        to = params["broadcast_dimensions"][along]
        return dict(position_along=to, **kept) if equation.shapes[0][along] == equation.outs[0][to] else None
    if name == "reshape" and equation.outs[0][: along + 1] == equation.shapes[0][: along + 1]:
        return dict(position_along=along, **kept)
    return None


def _are_coordinates(equation) -> bool:
    """Whether indices of several dims are put together, as `x[arange(B), i]` does."""
    last = len(equation.outs[0]) - 1
    return (
        equation.params["dimension"] == last
        and all(shape[-1] == 1 for shape in equation.shapes)
        and any(state.position_along is not None and state.position_along < last for state in equation.states)
        and jnp.issubdtype(equation.eqn.outvars[0].aval.dtype, jnp.integer)
    )


# -- Which axes split which dim ----------------------------------------------------------------------------------------
_REDUCED = "a split dim is reduced only by an operation with a string (sum_unreduced, einsum_unreduced, pmax)"
_INDEXED = "all_gather it first; index_unreduced looks up rows of a split dim"
_GATHERED = "all_gather it first, or all_to_all the split to another dim"
_REGROUP = (
    "shardops.regroup with a string, as in 'B/d L -> parts R/d L', where another order is meant; all_gather first, "
    "where the whole is meant"
)
_LOCAL = "all_gather it first, or call it through shardops.local, with a declared type"
_COUNTED = "count in the whole array: x.shape[0] * shardops.axis_size('d') elements, shardops.slice for positions"
Whole = Iterator[tuple[int, int, str, str]]  # operand, dim, what the operation does to it, and a fix


def _require_whole(equation: Equation) -> frozenset[str]:
    """Raises `ShardingError` where a device would take its part of a split dim for all of it. Returns the axes over
    which the result is a sum, in a backward rule."""
    name, summed = equation.name, frozenset()
    if name in ALONG:
        along = ALONG[name](equation)
    elif name in ELEMENTWISE or name.startswith(("random_", "rng_")):
        along = _repeats(equation)
    elif name in ("iota", "transpose", "squeeze", "stack"):
        along = ()
    else:
        dims = ((operand, dim) for operand, row in enumerate(equation.rows) for dim in range(len(row)))
        along = ((operand, dim, "does what is not known here to", _LOCAL) for operand, dim in dims)
    for operand, dim, does, fix in along:
        state, axes = equation.states[operand], equation.rows[operand][dim]
        if not axes:
            continue
        if equation.unreduced and (name, does) in _SUMS and state.split >= frozenset(axes):
            summed |= frozenset(axes)
            continue
        raise ShardingError(
            f"'{name}' {does} a dim that is {state.along(axes)}: each device would take its own part for the whole\n"
            f"  fix: {fix if state.split >= frozenset(axes) else _COUNTED}"
        )
    return summed


_SUMS = {("reduce_sum", "reduces"), ("dot_general", "contracts")}


def _repeats(equation) -> Whole:
    """An operand of an elementwise operation is a scalar, or its dims are the result's or of size one. Of random
    numbers a key's dims come first, then those of what is drawn with it."""
    out = equation.outs[0]
    for operand, shape in enumerate(equation.shapes):
        for dim, size in enumerate(shape):
            if dim >= len(out) or size != out[dim]:
                yield operand, dim, "repeats", _GATHERED


def _reduced(equation) -> Sequence[int]:
    return equation.params["axes"] if "axes" in equation.params else equation.params["dimensions"]


def _reduce(equation) -> Whole:
    for operand in range(len(equation.outs)):
        yield from ((operand, dim, "reduces", _REDUCED) for dim in _reduced(equation))


def _along(key: str, does: str = "runs along", fix: str = _GATHERED):
    """The rule of an operation that goes along the dims that this parameter names."""

    def rule(equation) -> Whole:
        value = equation.params[key]
        for operand, row in enumerate(equation.rows):
            dims = value if isinstance(value, (tuple, list)) else (value,)
            yield from ((operand, dim, does, fix) for dim in dims if dim < len(row))

    return rule


def _dot_general(equation) -> Whole:
    contracted, _ = equation.params["dimension_numbers"]
    for operand, dims in enumerate(contracted):
        yield from ((operand, dim, "contracts", _REDUCED) for dim in dims)


def _ragged_dot(equation) -> Whole:
    """'T M, E M F/t, E -> T F/t': rows, groups and what is contracted are whole, since the groups' sizes count the
    whole's rows."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left, right), (batch, _) = numbers.dot_dimension_numbers
    if batch or numbers.lhs_ragged_dimensions[0] in left:
        raise ShardingError(
            "'ragged_dot_general' with batch dims, or ragged along what is contracted: what it does to the parts is "
            "not known here\n  fix: call it through shardops.local, with a declared type"
        )
    fix = "call it through shardops.local, with each device's own group sizes"
    yield 0, numbers.lhs_ragged_dimensions[0], "goes through the groups of", fix
    yield from ((1, dim, "goes through the groups of", fix) for dim in numbers.rhs_group_dimensions)
    yield from ((0, dim, "contracts", _REDUCED) for dim in left)
    yield from ((1, dim, "contracts", _REDUCED) for dim in right)
    yield from ((2, dim, "reads the sizes of groups from", fix) for dim in range(len(equation.shapes[2])))


def _convolution(equation) -> Whole:
    """Of the operand's dims only the rows of the batch may be split, of the kernel's only its output features; and the
    features of both, where each goes through a kernel of its own."""
    numbers, batches = equation.params["dimension_numbers"], equation.params["batch_group_count"]
    groups = equation.params["feature_group_count"]
    if is_each := groups == equation.shapes[0][numbers.lhs_spec[1]]:
        groups = 1
    elif is_part(groups):
        raise ShardingError(
            f"'{equation.name}' with feature_group_count={shown(groups)}, which depends on how many devices there are"
        )
    for operand, (first, second, *others) in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
        free = [first] if batches == 1 and not (operand and groups > 1) else []
        free += [second] if is_each and not operand else []
        dims = (dim for dim in (first, second, *others) if dim not in free)
        yield from ((operand, dim, "goes along", _GATHERED) for dim in dims)


def _window(equation) -> Whole:
    sizes, ones = equation.params["window_dimensions"], (1,) * len(equation.shapes[0])
    keys = ("window_strides", "base_dilation", "window_dilation")
    steps = [equation.params.get(key) or ones for key in keys]
    padding = equation.params.get("padding") or ((0, 0),) * len(ones)
    for dim, numbers in enumerate(zip(sizes, *steps)):
        if set(numbers) != {1} or any(padding[dim]):
            yield 0, dim, "goes along", _GATHERED


def _fourier(equation) -> Whole:
    rank = len(equation.shapes[0])
    yield from ((0, dim, "goes along", _GATHERED) for dim in range(rank - len(equation.params["fft_lengths"]), rank))


def _matrices(equation) -> Whole:
    """A factorization of the last two dims, matrix by matrix: Cholesky, QR, LU, eigenvalues."""
    for operand, shape in enumerate(equation.shapes):
        yield from ((operand, dim, "factorizes along", _GATHERED) for dim in range(len(shape))[-2:] if len(shape) > 1)


def _broadcast(equation) -> Whole:
    for dim, (size, to) in enumerate(zip(equation.shapes[0], equation.params["broadcast_dimensions"])):
        if size != equation.outs[0][to]:
            yield 0, dim, "repeats", _GATHERED


def _tile(equation) -> Whole:
    yield from ((0, dim, "repeats", _GATHERED) for dim, times in enumerate(equation.params["reps"]) if times != 1)


def _part(equation) -> Whole:
    for dim, (size, out) in enumerate(zip(equation.shapes[0], equation.outs[0])):
        if size != out:
            yield 0, dim, "takes a part of", _INDEXED


def _pad(equation) -> Whole:
    for dim, amounts in enumerate(equation.params["padding_config"]):
        if any(is_part(amount) or amount for amount in amounts):
            yield 0, dim, "lengthens", _GATHERED


def _update_slice(equation) -> Whole:
    for dim, (size, part) in enumerate(zip(*equation.shapes[:2])):
        if size != part:
            yield from ((operand, dim, "writes a part of", _INDEXED) for operand in (0, 1))


def _rows_of_their_own(equation, dimensions: Sequence[int], batching: dict[int, int]) -> dict[int, int]:
    """Operand dims that are read or written element by element, with the dim of the indices that says which: the
    batching ones, and those indexed by their own positions, as in `cache.at[arange(B), i]`."""
    (table, indices), state = equation.shapes[:2], equation.states[1]
    along = state.positions_along
    if along is None and indices and indices[-1] == 1:
        along = (state.position_along,)
    own = dict(batching)
    for place, axis in zip(along or (None,), dimensions):
        if place is not None and place < len(indices) - 1 and indices[place] == table[axis]:
            own[axis] = place
        elif state.local_iota and (place is not None or along is None):
            raise ShardingError(f"'{equation.name}' at {LOCAL_IOTA}")
    return own


def _gather(equation) -> Whole:
    numbers, table = equation.params["dimension_numbers"], equation.shapes[0]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    own = _rows_of_their_own(equation, numbers.start_index_map, batching)
    for axis, part in enumerate(equation.params["slice_sizes"]):
        gone = axis in numbers.collapsed_slice_dims or axis in batching
        if (gone or part != table[axis]) and not (axis in own and part == 1 and gone):
            yield 0, axis, "indexes", _INDEXED


def _scatter(equation) -> Whole:
    numbers, table, updates = equation.params["dimension_numbers"], equation.shapes[0], equation.shapes[2]
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims))
    own = _rows_of_their_own(equation, numbers.scatter_dims_to_operand_dims, batching)
    own = {axis: place for axis, place in own.items() if axis in (*numbers.inserted_window_dims, *batching)}
    window = iter(numbers.update_window_dims)
    for axis, size in enumerate(table):
        if axis in own:
            continue
        if axis in numbers.inserted_window_dims:
            yield 0, axis, "writes at an index of", _INDEXED
        elif updates[place := next(window)] != size:
            yield 0, axis, "writes a part of", _INDEXED
            yield 2, place, "writes a part of", _INDEXED
    scattered = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    for place, dim in enumerate(scattered):
        if place not in own.values():
            yield 1, place, "writes at indices of", "all_gather indices and values first"
            yield 2, dim, "writes at indices of", "all_gather indices and values first"


def _unstack(equation) -> Whole:
    axis = equation.params["axis"]
    if is_part(size := equation.shapes[0][axis]) or size != 1:
        yield 0, axis, "takes parts of", _INDEXED


def _reshape(equation) -> Whole:
    """Runs of dims with the same product correspond. In a run the dim that is split must be the major one, before and
    after: only that is the same permutation of the whole array on every mesh."""
    before, after = equation.shapes[0], equation.outs[0]
    if 0 in before:
        yield from ((0, dim, "reshapes", _REGROUP) for dim in range(len(before)))
        return
    runs = list(_runs(before, after))
    if {dim for dims, _ in runs for dim in dims} != {dim for dim, size in enumerate(before) if size != 1}:
        yield from ((0, dim, "reshapes", _REGROUP) for dim in range(len(before)))
    for dims, sizes in runs:
        if any(map(is_part, sizes[1:])):
            yield from ((0, dim, "makes a minor dim of", _REGROUP) for dim in dims[:1])
        yield from ((0, dim, "merges into the one before it", _REGROUP) for dim in dims[1:])


def _runs(before, after) -> Iterator[tuple[list[int], list]]:
    """The dims of each run before, and the sizes after; without those of one element."""
    products = [list(itertools.accumulate(sizes, operator.mul)) for sizes in (before, after)]
    i = j = 0
    while ends := next(
        ((k, m) for k in range(i, len(before)) for m in range(j, len(after)) if products[0][k] == products[1][m]), None
    ):
        k, m = ends
        yield [dim for dim in range(i, k + 1) if before[dim] != 1], [size for size in after[j : m + 1] if size != 1]
        i, j = k + 1, m + 1


_REDUCTIONS = """
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce
    """
ALONG = {
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), _along("axis")),
    "sort": _along("dimension"),
    "concatenate": _along("dimension", "lengthens"),
    "rev": _along("dimensions", "reverses"),
    "split": _along("axis", "takes parts of", _INDEXED),
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "fft": _fourier,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **dict.fromkeys(
        ("cholesky", "qr", "lu", "eigh", "eig", "svd", "triangular_solve", "householder_product"), _matrices
    ),
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    **dict.fromkeys(("slice", "dynamic_slice"), _part),
    "pad": _pad,
    "dynamic_update_slice": _update_slice,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"), _scatter),
    "unstack": _unstack,
    "reshape": _reshape,
}


# -- Dims of the result ------------------------------------------------------------------------------------------------
def _dims(equation: Equation, out: int) -> Dims:
    """What splits each dim of a result: what its size says; or, of one element a device, where it comes from."""
    rows = [[()] * len(equation.outs[out])]
    for operand, row in enumerate(equation.rows):
        moved = [()] * len(equation.outs[out])
        for dim, axes in enumerate(row):
            if axes and not is_part(equation.shapes[operand][dim]):
                to = _moved(equation, operand, dim, out)
                if to is not None:
                    moved[to] = axes
        rows.append(moved)
    dims = list(agree(f"'{equation.name}' of values", rows))
    for dim, size in enumerate(equation.outs[out]):
        if is_part(size):
            try:
                dims[dim] = equation.parts.axes(size)
            except ShardingError as error:
                raise ShardingError(f"'{equation.name}' makes a dim of {error}\n  fix: {_REGROUP}") from None
    return tuple(dims)


def _dropped(equation: Equation) -> frozenset[str]:
    """The axes whose dim of one element a device is gone in the result."""
    found = frozenset()
    for operand, row in enumerate(equation.rows):
        for dim, axes in enumerate(row):
            if axes and not is_part(equation.shapes[operand][dim]) and _moved(equation, operand, dim, 0) is None:
                found |= frozenset(axes)
    return found


def _moved(equation: Equation, operand: int, dim: int, out: int) -> int | None:
    """Where a dim of one element a device stands in the result; None where it is dropped."""
    name, params, after = equation.name, equation.params, equation.outs[out]
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][dim]
    if name == "transpose":
        return params["permutation"].index(dim)
    if name == "stack":
        return dim + (params["axis"] <= dim)
    if name in _REDUCTIONS.split() or name in ("squeeze", "unstack"):
        gone = (params["axis"],) if name == "unstack" else _reduced(equation)
        return None if dim in gone else dim - sum(each < dim for each in gone)
    if name == "reshape":
        # The one that stands behind as many elements, in the same place if there is one; of several, in their order.
        before = equation.shapes[0]
        have = math.prod(before[:dim])
        alike = [at for at, size in enumerate(after) if size == 1 and math.prod(after[:at]) == have]
        if dim in alike and before[:dim] == after[:dim]:
            return dim
        among = [at for at, axes in enumerate(equation.rows[0]) if axes and before[at] == 1]
        place = [at for at in among if math.prod(before[:at]) == have].index(dim)
        return alike[place] if place < len(alike) else None
    if name == "dot_general":
        contracted, batches = params["dimension_numbers"]
        if dim in batches[operand]:
            return list(batches[operand]).index(dim)
        free = [
            [at for at in range(len(shape)) if at not in (*contracted[side], *batches[side])]
            for side, shape in enumerate(equation.shapes)
        ]
        return len(batches[0]) + operand * len(free[0]) + free[operand].index(dim) if dim in free[operand] else None
    if name == "gather":
        numbers = params["dimension_numbers"]
        if operand == 0:
            gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
            return numbers.offset_dims[[at for at in range(len(equation.shapes[0])) if at not in gone].index(dim)]
        return [at for at in range(len(after)) if at not in numbers.offset_dims][dim]
    if name.startswith("scatter") and operand > 0:
        numbers = params["dimension_numbers"]
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        window = [at for at in range(len(equation.shapes[0])) if at not in gone]
        return window[numbers.update_window_dims.index(dim)]
    return dim
