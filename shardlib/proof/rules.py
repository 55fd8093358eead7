"""The rules of JAX's own operations, device by device, for values that are split or pending over mesh axes.

A *pending* value keeps its meaning only through linear operations, listed in `LINEAR`; a *split* one only through those
that treat each device's part by itself. The sizes of the result's dims say which are split (`parts.py`). `ALONG` lists
the dims of the operands that an operation goes along or through: they must be whole. An operation that is neither there
nor in `ELEMENTWISE` is refused for split values: `shardops.local` gives it a type.

The names are those of jax 0.10 to 0.12.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from shardlib.proof.parts import Parts, is_part, shown
from shardlib.proof.states import LOCAL_IOTA, Dims, State, agree, merged
from shardlib.spec import ShardingError


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
        if self.name == "call_hi_primitive":  # jax 0.12 wraps SearchSorted
            self.name = type(self.params["_prim"]).__name__
        self.rows = [state.dims for state in self.states]
        self.shapes, self.outs = _shapes(self.eqn.invars), _shapes(self.eqn.outvars)

    def is_inexact(self, variable) -> bool:
        return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _shapes(variables) -> list[tuple]:
    return [tuple(getattr(variable.aval, "shape", ())) for variable in variables]


def apply(equation: Equation) -> list[State]:
    """The states of the results of one equation. Raises `ShardingError` where they would have no meaning."""
    name, states = equation.name, equation.states
    if name in ("optimization_barrier", "device_put"):  # each operand by itself
        return states
    if name == "select_n" and states[0].zero:
        return [states[1]]
    summed = _require_whole(equation)
    indices = _indices(equation)
    for place, state in enumerate(states):
        if state.local_iota and _INDICES.get(name) != place and indices is None:
            raise ShardingError(f"'{name}' of {LOCAL_IOTA}")
    base = merged(states)
    split, pending = base.split - summed, _pending(equation) | summed
    if crossing := split & pending:
        axis = min(crossing)
        raise ShardingError(f"'{name}' of a value pending over {axis} and one split over it: the sum would mix them")
    taken = states[1:] if name == "select_n" else states[:1] if name == "dynamic_slice" else states
    zero = name in _KEEP_ZERO and all(state.zero for state in taken)
    zero |= name == "mul" and equation.unreduced and any(state.zero for state in states)
    results = []
    for out in range(len(equation.outs)):
        dims, dropped = _dims(equation, out)
        without_dim = base.without_dim | dropped
        for axis in sorted(split):
            _require_one_dim(name, axis, sum(axis in axes for axes in dims), axis in without_dim)
        results.append(State(dims, split, pending, without_dim, zero, base.sized))
    return results if indices is None else [replace(results[0], **indices)]


def _require_one_dim(name: str, axis: str, times: int, is_without: bool):
    """Raises `ShardingError` unless an axis that splits the result splits one of its dims (or one of size 1)."""
    if not times and not is_without:
        raise ShardingError(f"'{name}' of a value that is split over {axis} loses that dim\n  fix: {_REDUCED}")
    if times + is_without > 1:
        raise ShardingError(f"'{name}' makes two dims that are split over {axis}\n  fix: all_gather one operand first")


# -- What is linear, and in which operands -----------------------------------------------------------------------------
def sums_stay_sums(before, after) -> bool:
    """Whether a sum may be taken after its terms are converted to another type. Not for whole numbers, which may wrap
    around where their sum does not; not for rounding to whole numbers; not for a type without infinity or NaN, such as
    those of 4 bits, which clips terms to its largest number; and not for one without sign or zero."""
    if jnp.issubdtype(after, jnp.inexact):
        infinite, *others = np.array([np.inf, -1.0, 0.0]).astype(after)
        if np.isfinite(infinite) or [complex(number) for number in others] != [-1, 0]:
            return False
    return before == after or (jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact))


def _cast(equation) -> tuple:
    return (0,) if sums_stay_sums(equation.eqn.invars[0].aval.dtype, equation.params["new_dtype"]) else ()


def _quotient(equation) -> tuple:
    return (0,) if equation.is_inexact(equation.eqn.outvars[0]) else ()  # whole numbers are rounded


def _written(equation) -> tuple:
    """Where an index comes twice, devices might write different ones."""
    params, updates = equation.params, equation.states[2]
    return (0, 2) if params["update_jaxpr"] is None and (updates.zero or params["unique_indices"]) else ()


def _looked_up(equation) -> tuple:
    """Out of bounds a gather has what is linear: zero, NaN (a sum of NaNs is NaN), or the element at the edge."""
    fill = equation.params.get("fill_value")
    if "FILL" not in str(equation.params.get("mode")):
        return (0,)
    if fill is None:
        return (0,) if equation.is_inexact(equation.eqn.outvars[0]) else ()
    return (0,) if fill == 0 or fill != fill else ()


# Linear in the operands at these positions together, with the others the same along the pending axis; None: in all.
_LINEAR_IN_ALL = """
    neg reshape transpose broadcast_in_dim squeeze tile reduce_sum psum cumsum slice rev copy copy_p name split
    concatenate stop_gradient stack unstack add sub add_any reshard reduce_window_sum fft real imag
    complex conj
    """
LINEAR = {
    **dict.fromkeys(_LINEAR_IN_ALL.split()),
    **dict.fromkeys(("dynamic_slice", "scatter-mul"), (0,)),
    **dict.fromkeys(("dynamic_update_slice", "pad"), (0, 1)),
    "scatter-add": (0, 2),
    "reduce_precision": lambda equation: (0,) if equation.params["exponent_bits"] >= 5 else (),  # as float16 has
    "scatter": _written,
    "gather": _looked_up,
    "triangular_solve": (1,),
    "div": _quotient,
    "convert_element_type": _cast,
    "select_n": lambda equation: range(1, len(equation.states)),
}
BILINEAR = {"mul", "dot_general", "ragged_dot_general", "conv_general_dilated"}
_KEEP_ZERO = set(
    "broadcast_in_dim convert_element_type reshape neg copy reshard squeeze dynamic_slice select_n".split()
)


def _pending(equation: Equation) -> frozenset[str]:
    """The axes over which the result is pending; raises where that would have no meaning."""
    name, states = equation.name, equation.states
    axes = frozenset().union(*(state.pending for state in states))
    zeros = {index for index, state in enumerate(states) if state.zero}
    for axis in sorted(axes):
        holding = {index for index, state in enumerate(states) if axis in state.pending}
        if name in BILINEAR or LINEAR.get(name) is _cast:
            dtypes = [variable.aval.dtype for variable in (equation.eqn.invars[min(holding)], *equation.eqn.outvars)]
            if not sums_stay_sums(*dtypes):
                what = f"'{name}' makes {dtypes[1]} of a value that is pending over {axis}, {dtypes[0]}"
                raise ShardingError(f"{what}: it may wrap or round\n  fix: convert before the sum, or reduce it first")
        if name in BILINEAR:
            if len(holding) == 1 and (name != "ragged_dot_general" or holding <= {0, 1}):
                continue
            what = f"'{name}' of two values that are both pending over {axis}: products of sums are no sum of products"
            raise ShardingError(f"{what}\n  fix: reduce one of them first")
        data = LINEAR.get(name, ())
        data = range(len(states)) if data is None else data(equation) if callable(data) else data
        if holding <= set(data) <= holding | zeros:
            continue
        gradient_of = states[min(holding)].gradient_of
        made = gradient_of and f", made of the gradient of {gradient_of}"
        if holding < set(data):
            value = f"a value that is pending over {axis}{made}{',' if made else ''}"
            what = f"'{name}' of {value} and one that is not: each device would add it again"
            fix = (
                "reduce the pending one first, or make the other pending with shardops.pending (zeros: shardops.zeros)"
            )
            raise ShardingError(f"{what}\n  fix: {fix}")
        what = f"'{name}', which is not linear, of a value that is pending over {axis}{made}"
        why = "a function of a sum is not the sum of the function"
        raise ShardingError(f"{what}: {why}\n  fix: reduce it over {axis} first")
    return axes


# -- Positions, as in `table[arange(B), i]` ----------------------------------------------------------------------------
# Position of the index operand.
_INDICES = {"gather": 1, "scatter": 1, "scatter-add": 1, "scatter-mul": 1, "scatter-min": 1, "scatter-max": 1}


def _indices(equation: Equation) -> dict | None:
    """The facts known about the result as indices, or None. JAX makes those of `table[arange(B), i]` from an iota, a
    comparison with zero, the addition of the size, a broadcast, and a concatenation of the coordinates."""
    name, params, states = equation.name, equation.params, equation.states
    before, after = (equation.shapes or [()])[0], (equation.outs or [()])[0]
    if name == "iota":
        dim = params["dimension"]
        return dict(positions=(dim,), local_iota=is_part(after[dim]))
    known = [state for state in states if len(state.positions) == 1]
    if name == "concatenate" and known and params["dimension"] == len(after) - 1:
        positions = tuple(state.positions[0] if len(state.positions) == 1 else None for state in states)
        if all(shape[-1] == 1 for shape in equation.shapes) and any(dim in positions for dim in range(len(after) - 1)):
            return dict(positions=positions, local_iota=any(state.local_iota for state in states))
    if len(known) != 1:
        return None
    ((along,), local), to = (known[0].positions, known[0].local_iota), None
    numbers = [atom.val for atom in equation.eqn.invars if hasattr(atom, "val")]
    if name == "lt" and numbers == [0] and states[0] is known[0]:
        return dict(zero=True)  # no position is negative
    if name == "add" and any(state.sized for state in states):
        return dict(local_iota=local)
    if (name, numbers) in (("mul", [1]), ("add", [0])):
        to = along
    elif name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.integer):
        to = along if jnp.iinfo(params["new_dtype"]).max >= 2**31 - 1 else None
    elif name == "reshape" and params["dimensions"] is None and after[: along + 1] == before[: along + 1]:
        to = along
    elif name == "broadcast_in_dim" and before[along] == after[params["broadcast_dimensions"][along]]:
        to = params["broadcast_dimensions"][along]
    return None if to is None else dict(positions=(to,), local_iota=local)


def _read_by_row(equation, dimensions: Iterable[int], batching: dict[int, int]) -> dict[int, int]:
    """Maps each operand dim that is read or written element by element to the dim of the indices that selects the
    element: batching dims, and those indexed by their own positions, as in `cache.at[arange(B), i]`."""
    (table, indices), state = equation.shapes[:2], equation.states[1]
    by_row, positions = dict(batching), state.positions
    for place, axis in zip(positions or (None,), dimensions):
        if place is not None and place < len(indices) - 1 and indices[place] == table[axis]:
            by_row[axis] = place
        elif state.local_iota and (place is not None or not positions):
            raise ShardingError(f"'{equation.name}' at {LOCAL_IOTA}")
    return by_row


# -- Dims that must be whole -------------------------------------------------------------------------------------------
_REDUCED = "a split dim is reduced only by an operation with a string (sum_unreduced, einsum_unreduced, pmax)"
_COUNTED = "count in the whole array: x.shape[0] * shardops.axis_size('d') elements, shardops.slice for positions"
_FIXES = {
    _REDUCED: ["reduces", "contracts"],
    "all_gather it first, or all_to_all the split to another dim": ["runs along"],
    "all_gather it first; index_unreduced looks up rows of a split dim": ["indexes", "writes to"],
    "all_gather it first; positions in the whole are shardops.slice('L -> L/d', jnp.arange(L))": [
        "changes the length of",
    ],
    "all_gather indices and values first; a sum by index is an einsum_unreduced with jax.nn.one_hot(indices, n)": [
        "writes at indices of"
    ],
    "shardops.regroup with a string, as in 'B/d L -> parts R/d L', where another order is meant; all_gather first, "
    "where the whole is meant": ["reshapes", "makes a minor dim of", "merges into the one before it"],
    "all_gather it first, or call it through shardops.local, with a declared type": ["does what is not known here to"],
    "call it through shardops.local, with each device's own group sizes": ["goes through the groups of"],
    "jax.random.key(seed, impl='threefry2x32')": ["draws with the first key alone along"],
}
_FIX = {does: fix for fix, all_of_it in _FIXES.items() for does in all_of_it}
_SUMS = {("reduce_sum", "reduces"), ("dot_general", "contracts")}
Whole = Iterator[tuple[int, Iterable[int], str]]  # operand, dims, what the operation does to them


def _require_whole(equation: Equation) -> frozenset[str]:
    """Raises `ShardingError` if a device would take its part of a split dim for the whole. Returns the axes over which
    the result is a sum, in a backward rule."""
    name, sums = equation.name, set()
    is_local = name in ELEMENTWISE or name in _KEPT or name.startswith(("random_", "rng_"))
    rule = ALONG.get(name, (lambda equation: ()) if is_local else _not_known)
    for operand, dims, does in itertools.chain(rule(equation), _kept(equation) if name != "reshape" else ()):
        state = equation.states[operand]
        for dim in dims:
            axes = equation.rows[operand][dim]
            if not axes or (operand, dim) in sums:
                continue
            is_split = state.split >= frozenset(axes)
            if equation.unreduced and (name, does) in _SUMS and is_split:
                sums.add((operand, dim))
                continue
            what = f"'{name}' {does} a dim that is {state.along(axes)}: each device would take its part for the whole"
            raise ShardingError(f"{what}\n  fix: {_FIX[does] if is_split else _COUNTED}")
    return frozenset(axis for operand, dim in sums for axis in equation.rows[operand][dim])


def _not_known(equation) -> Whole:
    for operand, row in enumerate(equation.rows):
        yield operand, range(len(row)), "does what is not known here to"


def _kept(equation) -> Whole:
    """Yields dims of operands that a result lacks or has with another length: only split ones are refused."""
    for operand, shape in enumerate(equation.shapes):
        for dim, size in enumerate(shape):
            for out in equation.outs:
                to = None if is_part(size) else _moved(equation, operand, dim, out)
                if size not in out if is_part(size) else to is not None and out[to] != size:
                    yield operand, [dim], "changes the length of"


def _reduced_dims(equation) -> Iterable[int]:
    return equation.params["axes"] if "axes" in equation.params else equation.params["dimensions"]


def _reduced(equation) -> Whole:
    for operand in range(len(equation.outs)):
        yield operand, _reduced_dims(equation), "reduces"


def _along(key: str):
    """The rule of an operation that goes along the dims that this parameter names."""

    def rule(equation) -> Whole:
        value = equation.params[key]
        for operand, row in enumerate(equation.rows):
            dims = value if isinstance(value, (tuple, list)) else (value,)
            yield operand, [dim for dim in dims if dim < len(row)], "runs along"

    return rule


def _drawn(equation) -> Whole:
    """Only threefry uses all keys of a batch; the others draw with the first."""
    if str(equation.eqn.invars[0].aval.dtype) != "key<fry>":
        yield 0, range(len(equation.rows[0])), "draws with the first key alone along"


def _contracted(equation) -> Whole:
    contracted, _ = equation.params["dimension_numbers"]
    for operand, dims in enumerate(contracted):
        yield operand, dims, "contracts"


def _ragged_dot(equation) -> Whole:
    """'T M, E M F/t, E -> T F/t': rows, groups and what is contracted are whole, since the groups' sizes count the
    whole's rows. Batch dims, and groups of what is contracted, are not known here."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left, right), (batch, _) = numbers.dot_dimension_numbers
    if batch or numbers.lhs_ragged_dimensions[0] in left:
        yield from _not_known(equation)
    yield 0, numbers.lhs_ragged_dimensions[:1], "goes through the groups of"
    yield 1, numbers.rhs_group_dimensions, "goes through the groups of"
    yield 0, left, "contracts"
    yield 1, right, "contracts"
    yield 2, range(len(equation.shapes[2])), "goes through the groups of"


def _convolution(equation) -> Whole:
    """Only the operand's batch rows and the kernel's output features may be split; in a depthwise convolution also the
    features of both."""
    numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]
    (rows, features, *_), (outputs, *_) = numbers.lhs_spec, numbers.rhs_spec
    is_depthwise = groups == equation.shapes[0][features]
    of_operand, of_kernel = {features} if is_depthwise else set(), set()
    if equation.params["batch_group_count"] == 1:
        of_operand |= {rows}
        of_kernel |= {outputs} if is_depthwise or groups == 1 else set()
    for operand, free in enumerate((of_operand, of_kernel)):
        yield operand, set(range(len(equation.shapes[operand]))) - free, "runs along"


def _window(equation) -> Whole:
    params = equation.params
    keys = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    moved = {dim for key in keys for dim, size in enumerate(params.get(key) or ()) if size != 1}
    padded = {dim for dim, amounts in enumerate(params.get("padding") or ()) if any(amounts)}
    yield 0, sorted(moved | padded), "runs along"


def _fourier(equation) -> Whole:
    rank = len(equation.shapes[0])
    yield 0, range(rank - len(equation.params["fft_lengths"]), rank), "runs along"


def _matrices(equation) -> Whole:
    """A factorization of the last two dims, matrix by matrix: Cholesky, QR, LU, eigenvalues."""
    yield 0, range(len(equation.shapes[0]))[-2:], "runs along"


def _reflections(equation) -> Whole:
    """A matrix, and the factor of each of its columns."""
    yield from _matrices(equation)
    yield 1, range(len(equation.shapes[1]))[-1:], "runs along"


def _triangular(equation) -> Whole:
    """A matrix and the right sides of its equations: columns, or rows."""
    matrix, sides = map(len, equation.shapes)
    yield 0, range(matrix - 2, matrix), "runs along"
    yield 1, [sides - 2 if equation.params["left_side"] else sides - 1], "runs along"


def _padded(equation) -> Whole:
    amounts = enumerate(equation.params["padding_config"])
    yield 0, [dim for dim, of_dim in amounts if any(is_part(amount) or amount for amount in of_dim)], "runs along"


def _updated(equation) -> Whole:
    for operand in (0, 1):
        sizes = enumerate(zip(*equation.shapes[:2]))
        yield operand, [dim for dim, (whole, part) in sizes if whole != part], "writes to"


def _gather(equation) -> Whole:
    numbers, table = equation.params["dimension_numbers"], equation.shapes[0]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    by_row = _read_by_row(equation, numbers.start_index_map, batching)
    for axis, part in enumerate(equation.params["slice_sizes"]):
        gone = axis in numbers.collapsed_slice_dims or axis in batching
        if (gone or part != table[axis]) and not (axis in by_row and part == 1 and gone):
            yield 0, (axis,), "indexes"


def _scatter(equation) -> Whole:
    numbers, table, updates = equation.params["dimension_numbers"], equation.shapes[0], equation.shapes[2]
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims))
    by_row = _read_by_row(equation, numbers.scatter_dims_to_operand_dims, batching)
    by_row = {axis: place for axis, place in by_row.items() if axis in (*numbers.inserted_window_dims, *batching)}
    window = iter(numbers.update_window_dims)
    for axis, size in enumerate(table):
        if axis in by_row:
            continue
        if axis in numbers.inserted_window_dims:
            yield 0, (axis,), "writes to"
        elif updates[place := next(window)] != size:
            yield 0, (axis,), "writes to"
            yield 2, (place,), "writes to"
    scattered = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    for place, dim in enumerate(scattered):
        if place not in by_row.values():
            yield 1, (place,), "writes at indices of"
            yield 2, (dim,), "writes at indices of"


def _reshape(equation) -> Whole:
    """Runs of dims with the same product correspond. In a run the dim that is split must be the major one, before and
    after: only that is the same permutation of the whole array on every mesh."""
    before, after = equation.shapes[0], equation.outs[0]
    is_by_rows = equation.params.get("dimensions") is None  # jnp.ravel(x, order="F") is not
    runs = list(_runs(before, after)) if is_by_rows and 0 not in before else []
    if {dim for dims, _ in runs for dim in dims} != {dim for dim, size in enumerate(before) if size != 1}:
        yield 0, range(len(before)), "reshapes"
    for dims, sizes in runs:
        if any(map(is_part, sizes[1:])):
            yield 0, dims[:1], "makes a minor dim of"
        yield 0, dims[1:], "merges into the one before it"


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
# The dims stay where they are.
_IN_PLACE = """
    slice dynamic_slice dynamic_update_slice pad concatenate tile rev sort top_k
    cumsum cumprod cummax cummin cumlogsumexp
    """.split()
_MAKES = {"broadcast_in_dim", "iota"}  # a dim whose elements are alike, or are marked
_KEPT = "iota transpose squeeze stack unstack broadcast_in_dim tile slice dynamic_slice split concatenate".split()
_REDUCTIONS = """
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce psum pmax pmin
    """.split()
_DROPPING = {*_REDUCTIONS, "squeeze", "reshape", "dot_general"}
_FACTORIZATIONS = "cholesky qr lu eigh eig svd".split()
ALONG = {
    **dict.fromkeys(_REDUCTIONS, _reduced),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), _along("axis")),
    **dict.fromkeys(("random_bits", "random_split", "random_fold_in", "rng_bit_generator"), _drawn),
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "dot_general": _contracted,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "fft": _fourier,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **dict.fromkeys(_FACTORIZATIONS, _matrices),
    "householder_product": _reflections,
    "triangular_solve": _triangular,
    "SearchSorted": lambda equation: [(0, range(len(equation.shapes[0])), "runs along")],
    "lu_pivots_to_permutation": lambda equation: [(0, [len(equation.shapes[0]) - 1], "runs along")],
    "pad": _padded,
    "dynamic_update_slice": _updated,
    **dict.fromkeys((*_INDICES, "scatter-sub"), _scatter),
    "gather": _gather,
    "reshape": _reshape,
}


# -- Dims of the result ------------------------------------------------------------------------------------------------
def _dims(equation: Equation, out: int) -> tuple[Dims, frozenset[str]]:
    """The axes that split each dim of a result: its size says them, or, for a dim of one element a device, its origin.
    And the axes whose dim of one element a device is gone."""
    sizes, dropped = equation.outs[out], frozenset()
    rows = [[()] * len(sizes)]
    for operand, row in enumerate(equation.rows):
        rows.append([()] * len(sizes))
        for dim, axes in enumerate(row):
            if axes and not is_part(equation.shapes[operand][dim]):
                to = _moved(equation, operand, dim, sizes)
                if to is None and (equation.name not in _DROPPING or (equation.name == "reshape" and 1 in sizes)):
                    what = f"'{equation.name}' of a dim of one element a device"
                    raise ShardingError(f"{what}\n  fix: x[0] drops it, y[None] puts it back")
                if to is None:  # the value is one device's own all the same, and a type can put the dim back
                    dropped |= frozenset(axes)
                else:
                    rows[-1][to] = axes
    dims = list(agree(f"'{equation.name}' of values", rows))
    for dim, size in enumerate(sizes):
        if is_part(size):
            try:
                dims[dim] = equation.parts.axes(size)
            except ShardingError as error:
                raise ShardingError(f"'{equation.name}' makes a dim of {error}\n  fix: {_FIX['reshapes']}") from None
            is_made = equation.name in _MAKES or equation.name.startswith(("random_", "rng_"))
            is_made |= equation.name == "reshape" and any(map(is_part, equation.shapes[0]))
            if not is_made and not any(size in shape for shape in equation.shapes):
                what = f"'{equation.name}' makes a dim of the size of a device's part, {shown(size)}, alike on each"
                raise ShardingError(f"{what}\n  fix: shardops.slice('L -> L/t', x) is each device's own part")
    return tuple(dims), dropped


def _moved(equation: Equation, operand: int, dim: int, after: tuple) -> int | None:
    """Where a dim of one element a device stands in the result; None where it is dropped, or not known to be there."""
    name, params, before = equation.name, equation.params, equation.shapes[operand]
    if name == "dot_general":
        contracted, batch = (dims[operand] for dims in params["dimension_numbers"])
        if dim in batch:
            return batch.index(dim)
        free = [other for other in range(len(before)) if other not in (*contracted, *batch)]
        return None if dim in contracted else free.index(dim) + (len(batch) if operand == 0 else len(after) - len(free))
    if name == "stack":
        return dim + (dim >= params["axis"])
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][dim]
    if name == "transpose":
        return params["permutation"].index(dim)
    if name in _REDUCTIONS or name == "squeeze":
        gone = _reduced_dims(equation)
        return None if dim in gone else dim - sum(other < dim for other in gone)
    if name == "reshape":
        return dim if before[:dim] == after[:dim] and after[dim : dim + 1] == (1,) else None
    return dim if (name in ELEMENTWISE or name in _IN_PLACE) and dim < len(after) else None  # a bitcast may join one
