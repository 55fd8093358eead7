"""How a value lies on the mesh, as the check knows it: split, same or pending along each axis, and what splits each
dim."""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shardlib.spec import ShardingError, Spec


class Made(enum.Enum):
    """What is known of a dim that an operation of JAX made, as zeros and positions are."""

    ANY = "made from nothing"  # each device's part is as good as the whole: it fits any type
    PART = "made to the size of a device's part of a split dim"  # fits that dim, and must not be counted
    OWN = "counted on each device from 0"  # positions within a device's part: they are no positions of the whole


# What splits a dim: these axes, major first, where () is whole; or how the dim was made.
Axes = tuple[str, ...] | Made
Dims = tuple[Axes, ...]


@dataclass(frozen=True)
class State:
    """How a value lies: what splits each dim, and all axes that it is split or pending over.

    Zeros made from nothing lie in any way: adding them to a term of a sum changes nothing.
    """

    dims: Dims
    split: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()
    alone: frozenset[str] = frozenset()  # of the split ones: those whose dim of one element a device was dropped, w[0]
    zero: bool = False
    sized: bool = False  # a number that depends on how many devices there are, as x.shape[0] of a split dim does
    # For `cache.at[arange(B), position]`: this value is its own index along that dim; each coordinate (last dim) is
    # its own index along that dim, or None; so it is on each device by itself, which is good for indexing alone; a
    # comparison is never true (JAX asks whether an index is negative).
    place: int | None = None
    places: tuple[int | None, ...] | None = None
    indices: bool = False
    never: bool = False

    @classmethod
    def of(cls, spec: Spec) -> "State":
        return cls(tuple(dim.axes for dim in spec.dims), spec.split, frozenset(spec.pending))

    def word(self, axis: str) -> str:
        return "pending" if axis in self.pending else "split" if axis in self.split else "the same"

    def plain(self, dims: Dims) -> "State":
        """The same along each axis, with other dims."""
        return State(dims, self.split, self.pending, self.alone, sized=self.sized, indices=self.indices)


def whole(rank: int) -> Dims:
    return ((),) * rank


def describe(axes: Axes) -> str:
    """What is said of a dim in a message."""
    if isinstance(axes, Made):
        return axes.value
    return f"split over {'/'.join(axes)}" if axes else "whole"


COUNTED = (
    "positions that each device counts from 0\n  fix: the device's part of the whole's positions is "
    "shardops.slice('L -> L/t', jnp.arange(L))"
)
_WHY = {
    ("the same", "split"): "the value differs along {axis}: a reduction over {axis} or a gather was forgotten, or "
    "'/{axis}' is missing",
    ("the same", "pending"): "the value is still a sum over {axis} that nobody has taken: reduce it, or write "
    "'+{axis}'",
    ("split", "pending"): "the value is still a sum over {axis} that nobody has taken (psum_scatter makes '/{axis}' "
    "of '+{axis}')",
    ("split", "the same"): "the value is the same along {axis} (slice makes '/{axis}' of it; zeros and full make new "
    "ones)",
    ("pending", "the same"): "the value is already the same along {axis}: a sum over {axis} would count it once for "
    "each device",
    ("pending", "split"): "the value is split over {axis}, it is no term of a sum over {axis}",
}


def require(spec: Spec, state: State, *, strict: bool, sizes: Sequence[int], axes: Collection[str] = ()):
    """Raises `ShardingError` if a value's state contradicts its type; `strict` (operations) also refuses 'split' said
    of what is the same.

    An annotation may call a value split that was made from nothing (zeros, random numbers): each device's part is as
    good. Zeros may be called pending too.

    Args:
      sizes: of the value's dims on a device.
      axes: the mesh's: positions in a dim that is named like one are the numbers of its devices.
    """
    if state.sized:
        raise ShardingError(
            f"'{spec}' is said of a number that depends on how many devices there are, like the size of a split dim "
            "on one of them\n  fix: count in the whole array: x.shape[0] * shardops.axis_size('d')"
        )
    if state.indices:
        raise ShardingError(f"'{spec}' is said of {COUNTED}")
    if state.zero:
        return
    for axis in sorted(state.split | state.pending | spec.split | frozenset(spec.pending)):
        said = State.of(spec).word(axis)
        true = state.word(axis)
        if said == true or ((said, true) == ("split", "the same") and not strict):
            continue
        why = _WHY[said, true].format(axis=axis)
        raise ShardingError(f"'{spec}' says {said} along {axis}, but {why}{_as_it_lies(spec, state)}")
    for dim, lies, size in zip(spec.dims, state.dims, sizes, strict=True):
        if lies == dim.axes or lies is Made.ANY or (lies is Made.PART and dim.axes):
            continue
        if isinstance(lies, Made) and not dim.axes and dim.name in axes:
            continue
        if not lies and size == 1 and dim.axes == (dim.name,):  # y[None]: the dim of one element a device is back
            continue
        write = f": write {'/'.join((dim.name, *lies))}" if isinstance(lies, tuple) else ""
        raise ShardingError(
            f"'{spec}' says {'/'.join((dim.name, *dim.axes))}, but that dim is {describe(lies)} in the value{write}"
        )
    for axis in sorted(state.alone):
        if not any(dim.axes == (axis,) and dim.name == axis for dim in spec.dims):
            raise ShardingError(
                f"'{spec}': the value is one device's own along {axis}, its dim '{axis}/{axis}' was dropped: put it "
                f"back with x[None], as '{axis}/{axis} ...'"
            )


def _as_it_lies(spec: Spec, state: State) -> str:
    """The type that a value has, in the words of the one that was said of it."""
    if len(spec.dims) != len(state.dims) or not all(isinstance(axes, tuple) for axes in state.dims) or state.alone:
        return ""
    dims = tuple(replace(dim, axes=axes) for dim, axes in zip(spec.dims, state.dims))
    return f"\n  it lies as '{Spec(dims, tuple(sorted(state.pending)))}'"


def agree(name: str, rows: Sequence[Dims], sizes: Sequence[int]) -> Dims:
    """The dims of an elementwise result: what is known of any operand; raises where two operands are known to lie
    differently. `sizes` are those of the dims on a device."""
    what = f"'{name}' of values"
    return tuple(
        _agreed(what, position, column, size) for position, (size, *column) in enumerate(zip(sizes, *rows, strict=True))
    )


def _agreed(what: str, position: int, column: Sequence[Axes], size: int) -> Axes:
    known = {axes for axes in column if isinstance(axes, tuple)}
    if size == 1 and len(known) > 1:
        known -= {()}  # one element for all devices fits the one that each device has
    made = {axes for axes in column if isinstance(axes, Made)}
    if Made.OWN in made and any(known):
        known |= {Made.OWN}
    if len(known) > 1:
        one, other = map(
            describe, sorted(known, key=lambda axes: (0, axes) if isinstance(axes, tuple) else (1, axes.value))[:2]
        )
        counted = f": {COUNTED}" if Made.OWN in made else ""
        raise ShardingError(f"{what} that lie differently: dim {position} is {one} in one, {other} in another{counted}")
    if known:
        return known.pop()
    return next((each for each in (Made.OWN, Made.PART) if each in made), Made.ANY)


def join(*states: State, sizes: Sequence[int]) -> State:
    """What holds on every path of a loop or a branch: split if split on one; pending must be so on all."""
    pending = next((state.pending for state in states if not state.zero), frozenset())
    for state in states:
        if state.pending != pending and not state.zero:
            axis = min(state.pending ^ pending)
            raise ShardingError(
                f"a carry or a branch is pending over {axis} on one path and not on the other\n"
                f"  fix: start the carry with shardops.zeros('... +{axis}'), or reduce over {axis} inside"
            )
    if len(set(states)) == 1:
        return states[0]
    dims = tuple(
        _agreed("a carry or a branch has values", position, column, size)
        for position, (size, *column) in enumerate(zip(sizes, *(state.dims for state in states), strict=True))
    )
    together = merged(states)
    return replace(together, dims=dims, pending=pending, zero=all(state.zero for state in states))


def merged(states: Sequence[State]) -> State:
    """A scalar that is split, alone and sized as any of these is, pending over nothing; raises where one is a device's
    own along an axis that splits a dim of another."""
    split = frozenset().union(*(state.split for state in states))
    alone = frozenset().union(*(state.alone for state in states))
    for axis in sorted(alone):
        if any(axis in axes for state in states for axes in state.dims if isinstance(axes, tuple)):
            raise ShardingError(
                f"a value that is one device's own along {axis} (its dim '{axis}/{axis}' was dropped) meets one with a "
                f"dim that is split over {axis}: each device would pair them by its own index"
            )
    sized, indices = any(state.sized for state in states), any(state.indices for state in states)
    return State((), split, alone=alone, sized=sized, indices=indices)


def dual(state: State, axes: frozenset[str]) -> State:
    """The state of a value's gradient: same and pending exchanged."""
    return State(state.dims, state.split, axes - state.split - state.pending, state.alone, sized=state.sized)


def require_dual(state: State, of: State, axes: frozenset[str], sizes, what: str):
    """Raises `ShardingError` if a gradient, or a cotangent, is not of the dual type of a value."""
    expected = dual(of, axes)
    if state.sized or of.sized:
        raise ShardingError(f"{what} depends on how many devices there are, like the size of a device's part")
    if state.zero:
        return
    for axis in sorted(axes):
        if state.word(axis) != expected.word(axis):
            raise ShardingError(
                f"{what} is {state.word(axis)} along {axis}, but must be {expected.word(axis)}, since the value is "
                f"{of.word(axis)} along it (same and pending change places)"
            )
    agree(what, [state.dims, of.dims], sizes)
