"""How a value lies on the mesh, as the check knows it: split, same or pending along each axis, and which axes split
which dim."""

from dataclasses import dataclass

from shardlib.spec import ShardingError, Spec

# What is known of one dim:
#   ('d', 't')              split over these axes, major first; () is whole
#   frozenset({'d'})        after a reshape: split over some of these, or whole; the next annotation or operation says
# which   None                    made from nothing, as zeros are: each device's part is as good as the whole, it fits
# any type
Axes = tuple[str, ...] | frozenset[str] | None
Dims = tuple[Axes, ...]


@dataclass(frozen=True)
class State:
    """How a value lies: what splits each dim, and all axes that it is split or pending over.

    Zeros made from nothing lie in any way: adding them to a term of a sum changes nothing.
    """

    dims: Dims
    split: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()
    zero: bool = False

    @classmethod
    def of(cls, spec: Spec) -> "State":
        return cls(tuple(dim.axes for dim in spec.dims), spec.split, frozenset(spec.pending))

    def word(self, axis: str) -> str:
        return "pending" if axis in self.pending else "split" if axis in self.split else "the same"


def whole(rank: int) -> Dims:
    return ((),) * rank


def describe(axes: Axes) -> str:
    """What is said of a dim in a message."""
    if isinstance(axes, frozenset):
        return f"split over {' and '.join(sorted(axes))} or whole (a reshape left it open)"
    return f"split over {'/'.join(axes)}" if axes else "whole"


def require(spec: Spec, state: State, *, strict: bool):
    """Raises `ShardingError` if a value's state contradicts its type; `strict` (operations) also refuses 'split' said
    of what is the same.

    An annotation may call a value split that was made from nothing (zeros, random numbers): each device's part is as
    good. Zeros may be called pending too.
    """
    if state.zero:
        return
    for axis in sorted(state.split | state.pending | spec.split | frozenset(spec.pending)):
        said = State.of(spec).word(axis)
        true = state.word(axis)
        if said == true or ((said, true) == ("split", "the same") and not strict):
            continue
        why = {
            (
                "the same",
                "split",
            ): f"the value differs along {axis}: a reduction over {axis} or a gather was forgotten, or '/{axis}' is missing",
            (
                "the same",
                "pending",
            ): f"the value is still a sum over {axis} that nobody has taken: reduce it, or write '+{axis}'",
            (
                "split",
                "pending",
            ): f"the value is still a sum over {axis} that nobody has taken (psum_scatter makes '/{axis}' of '+{axis}')",
            (
                "split",
                "the same",
            ): f"the value is the same along {axis} (slice makes '/{axis}' of it; zeros and full make new ones)",
            (
                "pending",
                "the same",
            ): f"the value is already the same along {axis}: a sum over {axis} would count it once for each device",
            ("pending", "split"): f"the value is split over {axis}, it is no term of a sum over {axis}",
        }[said, true]
        raise ShardingError(f"'{spec}' says {said} along {axis}, but {why}")
    for dim, axes in zip(spec.dims, state.dims, strict=True):
        if axes is None or axes == dim.axes or (isinstance(axes, frozenset) and axes >= set(dim.axes)):
            continue
        write = "" if isinstance(axes, frozenset) else f": write {'/'.join((dim.name, *axes))}"
        raise ShardingError(
            f"'{spec}' says {'/'.join((dim.name, *dim.axes))}, but that dim is {describe(axes)} in the value{write}"
        )


def agree(name: str, rows: list[Dims]) -> Dims:
    """The dims of an elementwise result: what is known of any operand; raises where two operands are known to lie
    differently."""
    return tuple(
        _agreed(f"'{name}' of values", position, column) for position, column in enumerate(zip(*rows, strict=True))
    )


def _agreed(what: str, position: int, column: tuple[Axes, ...]) -> Axes:
    known = sorted({axes for axes in column if isinstance(axes, tuple)})
    open_ = [axes for axes in column if isinstance(axes, frozenset)]
    if len(known) > 1 or (known and any(not axes >= set(known[0]) for axes in open_)):
        one, other = known[:2] if len(known) > 1 else (known[0], open_[0])
        raise ShardingError(
            f"{what} that lie differently: dim {position} is {describe(one)} in one, {describe(other)} in another"
        )
    return known[0] if known else frozenset.intersection(*open_) if open_ else None


def join(*states: State) -> State:
    """What holds on every path of a loop or a branch: split if split on one; pending must be so on all."""
    pending = next((state.pending for state in states if not state.zero), frozenset())
    for state in states:
        if state.pending != pending and not state.zero:
            axis = min(state.pending ^ pending)
            raise ShardingError(
                f"a carry or a branch is pending over {axis} on one path and not on the other\n  fix: start the carry with shardops.zeros('... +{axis}'), or reduce over {axis} inside"
            )
    dims = []
    for position, column in enumerate(zip(*(state.dims for state in states), strict=True)):
        agreed = _agreed("a carry or a branch has values", position, column)
        left_open = [axes for axes in column if isinstance(axes, frozenset)]
        dims.append(frozenset.union(*left_open) if left_open else agreed)
    return State(
        tuple(dims), frozenset().union(*(state.split for state in states)), pending, all(state.zero for state in states)
    )
