"""How a value lies on the mesh, as the check knows it: split, same or pending along each axis, and what splits each
dim."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from shardlib.proof import marks
from shardlib.spec import ShardingError, Spec

Axes = tuple[str, ...]  # what splits a dim, major first; () is whole
Dims = tuple[Axes, ...]


@dataclass(frozen=True)
class State:
    """The layout of a value: the axes that split each dim, and all axes that it is split or pending over.

    If an axis splits a dim although the value is the same along it, the dim has the size of a device's part:
    jnp.ones(x.shape). Its elements fit those of x, and must not be counted.
    """

    dims: Dims
    split: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()
    without_dim: frozenset[str] = frozenset()  # the split ones whose dim, one element a device, was dropped: w[0]
    zero: bool = False  # the constant 0, which lies in any way: adding it to a term of a sum changes nothing
    sized: bool = False  # a number that depends on how many devices there are, as x.shape[0] of a split dim does
    # For `cache.at[arange(B), position]`: the dim along which the value, or each coordinate in its last dim, is its own
    # index; None for another one.
    positions: tuple[int | None, ...] = ()
    local_iota: bool = False  # counted by each device from 0: good for indexing alone
    gradient_of: str = field(default="", compare=False)  # the argument whose gradient it is, for messages

    @classmethod
    def of(cls, spec: Spec) -> "State":
        return cls(tuple(dim.axes for dim in spec.dims), spec.split, frozenset(spec.pending))

    def word(self, axis: str) -> str:
        return "pending" if axis in self.pending else "split" if axis in self.split else "the same"

    def along(self, axes: Axes) -> str:
        """How a message describes one of its dims."""
        made = axes and not self.split >= frozenset(axes)
        return "made to the size of a device's part" if made else f"split over {'/'.join(axes)}" if axes else "whole"

    def with_dims(self, dims: Dims) -> "State":
        """This state with other dims: split, pending or the same along the same axes."""
        known = dict(sized=self.sized, local_iota=self.local_iota, gradient_of=self.gradient_of)
        return State(dims, self.split, self.pending, self.without_dim, **known)


LOCAL_IOTA = (
    "positions that each device counts from 0 (jnp.arange of its part's size, which x[::2] makes too)\n"
    "  fix: shardops.slice('L -> L/t', jnp.arange(L)) are its positions in the whole; for x[::2] write "
    "x.reshape(-1, 2, ...)[:, 0]"
)
_WHY = {
    ("the same", "split"): "the value differs along {axes}: a reduction over {axes} or a gather was forgotten, or "
    "'{split}' is missing",
    ("the same", "pending"): "the value is still a sum over {axes} that nobody has taken: reduce it, or write "
    "'{pending}'",
    ("split", "pending"): "the value is still a sum over {axes} that nobody has taken",
    ("pending", "the same"): "the value is already the same along {axes}: a sum over {axes} would count it once for "
    "each device",
    ("pending", "split"): "the value is split over {axes}, it is no term of a sum over {axes}",
}


def require(spec: Spec, state: State):
    """Raises `ShardingError` if a value's state contradicts its type.

    A value that was made to the size of a part, jnp.ones(x.shape), may be called split: each device's part is as good.
    Zeros may be called pending too.
    """
    if state.sized:
        fix = "count in the whole array: x.shape[0] * shardops.axis_size('d')"
        raise ShardingError(f"'{spec}' is said of a number that depends on how many devices there are\n  fix: {fix}")
    if state.local_iota:
        raise ShardingError(f"'{spec}' is said of {LOCAL_IOTA}")
    if state.zero:
        return
    contradicting: dict[tuple[str, str], list[str]] = {}
    for axis in sorted(state.split | state.pending | spec.split | frozenset(spec.pending)):
        words = State.of(spec).word(axis), state.word(axis)
        if words in _WHY:  # ("split", "the same") is not: then the dims must be split too
            contradicting.setdefault(words, []).append(axis)
    for (said, true), names in contradicting.items():
        axes, pending = " and ".join(names), " ".join(f"+{axis}" for axis in names)
        why = _WHY[said, true].format(axes=axes, pending=pending, split=f"/{'/'.join(names)}")
        raise ShardingError(f"'{spec}' says {said} along {axes}, but {why}{_as_it_lies(spec, state)}")
    without_dim = state.without_dim
    for dim, lies in zip(spec.dims, state.dims, strict=True):
        if not lies and dim.axes == (dim.name,) and dim.name in without_dim:  # y[None]: the dim of one element is back
            without_dim -= {dim.name}
        elif lies != dim.axes:
            said, true = ("/".join((dim.name, *axes)) for axes in (dim.axes, lies))
            raise ShardingError(f"'{spec}' says {said}, but that dim is {state.along(lies)} in the value: write {true}")
    for axis in sorted(without_dim):
        fix = f"put it back with x[None], as '{axis}/{axis} ...'"
        raise ShardingError(f"'{spec}': the dim '{axis}/{axis}', one element a device, was dropped: {fix}")


def _as_it_lies(spec: Spec, state: State) -> str:
    """The type that a value has, in the words of the one that was said of it, and the operation that leads there."""
    if len(spec.dims) != len(state.dims) or state.without_dim:
        return ""
    dims = tuple(replace(dim, axes=axes) for dim, axes in zip(spec.dims, state.dims))
    true = Spec(dims, tuple(axis for axis in marks.current().axes if axis in state.pending))
    gathered, split = true.split - spec.split, spec.split - true.split
    sums, terms = state.pending - frozenset(spec.pending), frozenset(spec.pending) - state.pending
    pairs = [sorted((said.axes, axes), key=len) for said, axes in zip(spec.dims, state.dims)]
    name = None
    if not terms and all(longer[: len(shorter)] == shorter for shorter, longer in pairs):
        if gathered or split:
            name = "all_gather" if not split | sums else "psum_scatter" if not gathered and sums == split else None
        else:
            name = "psum"
    return f"\n  it lies as '{true}'" + (f"\n  fix: shardops.{name}('{true} -> {spec}')" if name else "")


def agree(what: str, rows: Sequence[Dims]) -> Dims:
    """The dims of values that are combined element by element. Sizes have been compared: they can differ only where
    one has a dim of one element a device, 'p/p', and the other one element for all."""
    dims = []
    for position, column in enumerate(zip(*rows, strict=True)):
        known = sorted(set(column) - {()})
        if len(known) > 1:
            one, other = ("/".join(axes) for axes in known[:2])
            raise ShardingError(f"{what} that lie differently: dim {position} is split over {one} and over {other}")
        dims.append(known[0] if known else ())
    return tuple(dims)


def join(*states: State) -> State:
    """The state that holds on every path of a loop or a branch: split if split on one; pending must be so on all."""
    pending = next((state.pending for state in states if not state.zero), frozenset())
    for state in states:
        if state.pending != pending and not state.zero:
            axis = min(state.pending ^ pending)
            fix = f"start the carry with shardops.zeros('... +{axis}'), or reduce over {axis} inside"
            raise ShardingError(f"a carry or a branch is pending over {axis} on one path alone\n  fix: {fix}")
    if len(set(states)) == 1:
        return states[0]
    dims = agree("a carry or a branch has values", [state.dims for state in states])
    return replace(merged(states), dims=dims, pending=pending, zero=all(state.zero for state in states))


def merged(states: Sequence[State]) -> State:
    """A scalar that is split, sized and the like as any of these is, pending over nothing; raises where one is a
    device's own along an axis that splits a dim of another."""
    split = frozenset().union(*(state.split for state in states))
    without_dim = frozenset().union(*(state.without_dim for state in states))
    for axis in sorted(without_dim):
        if any(axis in axes for state in states for axes in state.dims):
            what = f"a value whose dim '{axis}/{axis}' was dropped meets one with a dim that is split over {axis}"
            raise ShardingError(f"{what}: each device would pair them by its own index")
    sized, iota = any(state.sized for state in states), any(state.local_iota for state in states)
    gradient_of = next((state.gradient_of for state in states if state.gradient_of), "")
    return State((), split, without_dim=without_dim, sized=sized, local_iota=iota, gradient_of=gradient_of)


def dual(state: State, axes: Collection[str]) -> State:
    """The state of a value's gradient: same and pending exchanged. What is made to a part's size counts as split."""
    split = state.split.union(*state.dims)
    return State(state.dims, split, frozenset(axes) - split - state.pending, state.without_dim)


def require_dual(state: State, of: State, axes: Collection[str], what: str):
    """Raises `ShardingError` if a gradient, or a cotangent, is not of the dual type of a value. One that was made to
    the size of a part may stand for a split one, as in `require`."""
    expected = dual(of, axes)
    if state.sized or of.sized:
        raise ShardingError(f"{what} depends on how many devices there are, like the size of a device's part")
    if state.local_iota:
        raise ShardingError(f"{what} is {LOCAL_IOTA}")
    if state.zero:
        return
    for axis in sorted(axes):
        words = state.word(axis), expected.word(axis)
        if words[0] != words[1] and not (words == ("the same", "split") and axis in {a for d in state.dims for a in d}):
            must = f"but must be {expected.word(axis)}, since the value is {of.word(axis)} along it"
            raise ShardingError(f"{what} is {state.word(axis)} along {axis}, {must} (same and pending change places)")
    agree(what, [state.dims, of.dims])
