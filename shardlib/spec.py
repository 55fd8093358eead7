"""The strings of the notation: how a value lies on the mesh, parsed once into a cached recipe.

'B/d L M/t'      dims B, L, M; B is split over mesh axis d, M over t
'B/d L M +t'     pending: the true value is the sum over t of what the devices hold
'2 M/d K/t D'    an integer is a dim of that size
'M/d/t'          one dim split over two axes, major first, in the order of the mesh's axes
'd/d M'          a dim that is named like an axis counts that axis' devices; here each device has its own row of M
''               a scalar that is the same on every device
'B/b L +w'       b and w are groups, `groups('r d c e t', b='r d e', w='d c e')`: 'B/r/d/e L +d +c +e'
"""

import functools
import math
import os
import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass, field

import jax
from jax.sharding import PartitionSpec

_DIM = re.compile(r"(?P<open>\[)?(?P<name>[A-Za-z_]\w*|\d+|\.\.\.)(?P<axes>(/[A-Za-z_]\w*)*)(?P<close>\])?")
_PENDING = re.compile(r"\+([A-Za-z_]\w*)")


class ShardingError(TypeError):
    """What the notation says and what the program does differ. The message names the operation, its string, the shapes,
    the mesh and the line."""

    def extended(self, more: str) -> "ShardingError":
        """The same error, with more lines."""
        return type(self)(f"{self}\n{more}")


class Indivisible(ShardingError):
    """A dim whose size the mesh axes that split it do not divide."""

    def __init__(self, text: str, size: int, axes: tuple[str, ...]):
        super().__init__(text)
        self.size, self.axes = size, axes

    def extended(self, more: str) -> "Indivisible":
        return Indivisible(f"{self}\n{more}", self.size, self.axes)


# -- Groups of axes ----------------------------------------------------------------------------------------------------
_GROUPS: dict[str, tuple[str, ...]] = {}
_ORDER: list[str] = []  # of the axes that stand in groups


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
    found = [f"{name} is {' '.join(_GROUPS[name])}" for name in re.findall(r"(?<=[/+])\w+", text) if name in _GROUPS]
    found = [each for each in dict.fromkeys(found) if axis in each.partition(" is ")[2].split()]
    return f" ({', '.join(found)})" if found else ""


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
            raise ShardingError(
                f"'{self}' is pending over {', '.join(self.pending)}: "
                "a pending value has no meaning outside of shard_map"
            )
        return PartitionSpec(*(dim.axes[0] if len(dim.axes) == 1 else dim.axes or None for dim in self.dims))

    def in_mesh_order(self, mesh_axes) -> "Spec":
        """The one legal spelling: pending axes in the order of the mesh's axes. A dim's own axes stand major first, in
        any order: 'M/d/t' and 'M/t/d' are two ways to deal out M. Raises `ShardingError` for an axis that the mesh
        lacks."""
        for axis in [*(a for dim in self.dims for a in dim.axes), *self.pending]:
            if axis not in mesh_axes:
                raise ShardingError(
                    f"'{self}' names mesh axis {axis}{_meaning(str(self), axis)}, but the mesh has "
                    f"{', '.join(mesh_axes) or 'no axes'}"
                )
        legal = tuple(sorted(self.pending, key=list(mesh_axes).index))
        return self if legal == self.pending else Spec(self.dims, legal)

    def require_mesh_order(self, mesh_axes):
        legal = self.in_mesh_order(mesh_axes)
        if legal != self:
            raise ShardingError(
                f"pending axes are written in the order of the mesh's axes ({', '.join(mesh_axes)}): "
                f"write '{legal}', not '{self}'"
            )


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
    return text.decode() if isinstance(text, bytes) else text


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
            raise ShardingError(
                f"cannot read '{word}' in '{text}': a dim is a name or an integer, then /axis for each axis it is "
                "split over, as in 'B/d L 2 M/d/t'; pending axes come last, as in '+t'"
            )
        if pending:
            raise ShardingError(f"in '{text}' the dim '{word}' stands after a pending axis: pending axes come last")
        names = tuple(match["axes"].split("/")[1:])
        dims.append(Dim(match["name"], expanded(names), bool(match["open"]), names))
    axes = expanded(pending)
    used = [*(axis for dim in dims for axis in dim.axes), *axes]
    for axis in used:
        if used.count(axis) > 1:
            raise ShardingError(
                f"'{text}' uses mesh axis {axis} twice{_meaning(text, axis)}: an axis is split over one dim, or "
                "pending, or not mentioned"
            )
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
        raise ShardingError(
            "an operation's string is 'operand -> result', with commas between operands\n"
            f"  fix: write '{text.replace('->', ' ').strip()} -> ...', the result after the arrow"
        )
    parts, after = left.split(","), right.split(",")
    for what, found, takes in (("operand", len(parts), operands), ("result", len(after), results)):
        if takes is not None and found != takes:
            raise ShardingError(f"the string has {found} {what}{'s' * (found != 1)}, the operation takes {takes}")
    return Recipe(tuple(parse(part.strip()) for part in parts), tuple(parse(part.strip()) for part in after))


def low_rank(w: Spec, contracted, of_x=()) -> tuple[Spec, Spec]:
    """The types of an adapter's a and b for a matrix of this type, rank N.

    Args:
      contracted: names of the dims that a product takes the sum over.
      of_x: names of the other operand's dims: what w shares with it, uncontracted, both parts have.
    """
    both = tuple(dim for dim in w.dims if dim.name in of_x and dim.name not in contracted)
    summed = tuple(dim for dim in w.dims if dim.name in contracted)
    rest = tuple(dim for dim in w.dims if dim not in both and dim not in summed)
    return Spec((*both, *summed, Dim("N"))), Spec((*both, Dim("N"), *rest))


# -- Where an error is -------------------------------------------------------------------------------------------------
_NOT_USERS = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
    sysconfig.get_paths()["purelib"] + os.sep,
    "<",
)


@functools.cache
def is_users(file_name: str) -> bool:
    """Whether a frame is of the user's program: not of shardlib, JAX, Python's or an installed package's own files. A
    cell of IPython's is."""
    return file_name.startswith("<ipython-input") or not file_name.startswith(_NOT_USERS)


def users_line() -> str:
    """'file:line' of the innermost frame of the user's program."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """'file:line' of the innermost frame of the user's program on the way to where an error was raised."""
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if is_users(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else "unknown line"


def unbound(error: NameError, axes) -> str:
    """The mesh axis that a function of JAX's names where the axes are not bound. Raises the error itself if it is
    another one."""
    match = re.search(r"axis name: (\w+)", str(error))
    if match is None or match[1] not in axes:
        raise error
    return match[1]


_WRITTEN = (jax.numpy, jax.nn, jax.lax, jax.random, jax.numpy.linalg)
_TAKE_FUNCTIONS = {"map", "scan", "cond", "switch", "while_loop", "fori_loop", "associative_scan"}


def spoken_name(eqn) -> str | None:
    """The function of JAX that the user's line called, 'softmax', of which an equation is a part; not operators."""
    frames = [] if eqn.source_info.traceback is None else eqn.source_info.traceback.frames
    users = next((index for index, frame in enumerate(frames) if is_users(frame.file_name)), 0)
    for frame in reversed(frames[:users]):
        name = frame.function_name.rpartition(".")[2]
        if name.startswith("_") or name in _TAKE_FUNCTIONS:
            continue
        if any(callable(getattr(module, name, None)) for module in _WRITTEN):
            return name
    return None
