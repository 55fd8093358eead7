"""The strings of the notation: how a value lies on the mesh, parsed once into a cached recipe.

'B/d L M/t'      dims B, L, M; B is split over mesh axis d, M over t
'B/d L M +t'     pending: the true value is the sum over t of what the devices hold
'2 M/d K/t D'    an integer is a dim of that size
'M/d/t'          one dim split over two axes, major first, in the order of the mesh's axes
'd/d M'          a dim that is named like an axis counts that axis' devices; here each device has its own row of M
''               a scalar that is the same on every device
'B/b L +w'       b and w are groups, `groups('r d c e t', b='r d e', w='d c e')`: 'B/r/d/e L +d +c +e'
"""

import contextlib
import functools
import math
import re
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

_DIM = re.compile(r"(?P<open>\[)?(?P<name>[A-Za-z_]\w*|\d+|\.\.\.)(?P<axes>(/[A-Za-z_]\w*)*)(?P<close>\])?")
_PENDING = re.compile(r"\+([A-Za-z_]\w*)")


class ShardingError(TypeError):
    """The program does not do what its notation says. The message names the operation, its string, the shapes, the mesh
    and the line."""

    def extended(self, more: str) -> "ShardingError":
        """A copy of the error with more lines."""
        return type(self)(f"{self}\n{more}")


@contextlib.contextmanager
def located(where):
    """Adds lines to an error that is raised inside: `where()`, the claim that it contradicts and its place."""
    try:
        yield
    except ShardingError as error:
        raise error.extended(where()) from None


# -- Groups of axes ----------------------------------------------------------------------------------------------------
_GROUPS: dict[str, tuple[str, ...]] = {}
_ORDER: list[str] = []  # the order of the axes in groups


def groups(order: str, **names: str) -> None:
    """Declares abbreviations: groups('r d c e t', b='r d e') lets 'B/b' mean 'B/r/d/e', and '+b' '+r +d +e'.

    One table for the process, declared before strings are read that use it.

    Args:
      order: the axes in the order of the meshes' axes, in which pending axes are brought where a group stands for some.
    Raises:
      ShardingError: a name has another meaning already, or the axes another order.
    """
    axes = {name: tuple(text.split()) for name, text in names.items()}
    if wrong := [name for name in axes if _GROUPS.get(name, axes[name]) != axes[name]]:
        raise ShardingError(f"the group {wrong[0]} is '{' '.join(_GROUPS[wrong[0]])}' already")
    if _ORDER and _ORDER != order.split():
        raise ShardingError(f"the axes of groups have the order '{' '.join(_ORDER)}' already")
    _GROUPS.update(axes)
    _ORDER[:] = order.split()


def expanded(names) -> tuple[str, ...]:
    """Axes in the place of groups."""
    return tuple(axis for name in names for axis in _GROUPS.get(name, (name,)))


def _meaning(text: str, axis: str) -> str:
    """' (b is r d e)', of the groups in a type that contain the axis."""
    meanings = [f"{name} is {' '.join(_GROUPS[name])}" for name in re.findall(r"(?<=[/+])\w+", text) if name in _GROUPS]
    meanings = [meaning for meaning in dict.fromkeys(meanings) if axis in meaning.partition(" is ")[2].split()]
    return f" ({', '.join(meanings)})" if meanings else ""


@dataclass(frozen=True)
class Dim:
    """A dim's name (or size, in digits), the mesh axes it is split over, and whether it stands in `[ ]` (the dim that
    is indexed)."""

    name: str
    axes: tuple[str, ...] = ()
    indexed: bool = False
    written: tuple[str, ...] = field(default=(), compare=False)  # axes and groups as in the source: for messages

    def __str__(self):
        axes = self.written if expanded(self.written) == self.axes else self.axes
        text = "/".join((self.name, *axes))
        return f"[{text}]" if self.indexed else text


@dataclass(frozen=True)
class Spec:
    """One value's type: its dims, and the axes over which it is pending."""

    dims: tuple[Dim, ...]
    pending: tuple[str, ...] = ()
    written: tuple[str, ...] = field(default=(), compare=False)  # pending axes and groups as in the source

    def __str__(self):
        is_same = sorted(expanded(self.written)) == sorted(self.pending)
        return " ".join([*map(str, self.dims), *("+" + name for name in (self.written if is_same else self.pending))])

    @property
    def split(self) -> frozenset[str]:
        """The axes that some dim is split over."""
        return frozenset(axis for dim in self.dims for axis in dim.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.dims)

    @property
    def partition_spec(self) -> PartitionSpec:
        if self.pending:
            over = ", ".join(self.pending)
            raise ShardingError(f"'{self}' is pending over {over}, which has no meaning outside of shard_map")
        return PartitionSpec(*(dim.axes[0] if len(dim.axes) == 1 else dim.axes or None for dim in self.dims))

    def require_mesh_order(self, mesh_axes):
        """Raises `ShardingError` for an axis that the mesh lacks, and for pending axes in another order than its. A
        dim's own axes stand major first, in any order: 'M/d/t' and 'M/t/d' are two ways to deal out M."""
        for axis in [*(a for dim in self.dims for a in dim.axes), *self.pending]:
            if axis not in mesh_axes:
                what = f"'{self}' names mesh axis {axis}{_meaning(str(self), axis)}"
                raise ShardingError(f"{what}, but the mesh has {', '.join(mesh_axes) or 'no axes'}")
        legal = tuple(sorted(self.pending, key=list(mesh_axes).index))
        if legal != self.pending:
            fix = f"write '{Spec(self.dims, legal)}', not '{self}'"
            raise ShardingError(f"pending axes are in the mesh's order ({', '.join(mesh_axes)}): {fix}")


@dataclass(frozen=True)
class Recipe:
    """An operation's string: the types of its operands and of its results."""

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]

    @property
    def result(self) -> Spec:
        """The result of an operation that has one."""
        return self.results[0]


def as_text(text: str | bytes) -> str:
    """`f32[b'...']` is `f32['...']`: published programs write bytes, since typeguard evaluates strings."""
    text = text.decode() if isinstance(text, bytes) else text
    if not isinstance(text, str):
        raise ShardingError(f"{text!r} is no string such as 'B/d M', or 'B/d M -> B M' of an operation")
    return text


@functools.cache
def parse(text: str) -> Spec:
    """Parses one value's type.

    >>> parse('B/d L M +t').pending
    ('t',)
    """
    dims, pending = [], []
    for word in text.split():
        if match := _PENDING.fullmatch(word):
            pending.append(match[1])
            continue
        match = _DIM.fullmatch(word)
        if match is None or bool(match["open"]) != bool(match["close"]):
            what = "a dim is a name or a number, then /axis for each axis it is split over: 'B/d L 2 M/d/t +t'"
            raise ShardingError(f"cannot read '{word}' in '{text}': {what}")
        if pending:
            raise ShardingError(f"in '{text}' the dim '{word}' stands after a pending axis: pending axes come last")
        names = tuple(match["axes"].split("/")[1:])
        dims.append(Dim(match["name"], expanded(names), bool(match["open"]), names))
    axes = expanded(pending)
    used = [*(axis for dim in dims for axis in dim.axes), *axes]
    for axis in used:
        if used.count(axis) > 1:
            what = f"'{text}' uses mesh axis {axis} twice{_meaning(text, axis)}"
            raise ShardingError(f"{what}: an axis is split over one dim, or pending, or not mentioned")
    if axes != tuple(pending):
        axes = tuple(sorted(axes, key=lambda axis: _ORDER.index(axis) if axis in _ORDER else len(_ORDER)))
    return Spec(tuple(dims), axes, tuple(pending))


def parts(dim: Dim, axes: dict[str, int]) -> int:
    """Into how many parts a dim is split on a mesh with these axes."""
    return math.prod(axes[axis] for axis in dim.axes)


@functools.cache
def parse_operation(text: str, operands: int, results: int | None = 1) -> Recipe:
    """Parses an operation's string, 'A, B -> C', with the number of operands that the operation takes, and of results
    (None: any)."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        fix = f"write '{text.replace('->', ' ').strip()} -> ...', the result after the arrow"
        raise ShardingError(f"an operation's string is 'operand -> result', with commas between operands\n  fix: {fix}")
    parts, after = left.split(","), right.split(",")
    for what, count, takes in (("operand", len(parts), operands), ("result", len(after), results)):
        if takes is not None and count != takes:
            raise ShardingError(f"the string has {count} {what}{'s' * (count != 1)}, the operation takes {takes}")
    return Recipe(tuple(parse(part.strip()) for part in parts), tuple(parse(part.strip()) for part in after))
