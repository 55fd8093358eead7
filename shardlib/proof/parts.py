"""Sizes under the check: a device's part of a dim has a symbol in place of a number.

    parts = Parts(dict(d=4, t=2))
    n = parts.size(4096, ("d",))        # 4096*split_over_d: for any number of devices
    parts.axes(n), parts.whole(n)       # ("d",), 4096

So one trace is that of every mesh, and JAX's own rules for shapes say which dim of a result is split. A program that
asks for the number, `x.shape[0] > 4`, is refused where it asks; one that computes with it is refused by the walk.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import re
import sys
from collections.abc import Callable

import jax.numpy as jnp
from jax import export
from jax.errors import InconclusiveDimensionOperation

from shardlib.places import users_line
from shardlib.proof.frames import asked_by_user
from shardlib.spec import ShardingError

_SYMBOL = re.compile(r"split_over_(\w+)")
_PRODUCT = re.compile(r"(?:(\d+)\*)?split_over_(\w+)")
_Size = type(export.symbolic_shape("n")[0])  # JAX has no public name for it


class Parts:
    """The sizes of one trace, for the axes and sizes of a mesh, which must divide them."""

    def __init__(self, mesh: dict[str, int]):
        self.mesh, self._scope = mesh, export.SymbolicScope()

    def devices(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh[axis] for axis in axes)

    def size(self, whole: int, axes: tuple[str, ...]):
        """A device's part of a dim; of one that is not split, all of it."""
        return whole * _symbol(self._scope, axes) if axes else whole

    def axes(self, size) -> tuple[str, ...]:
        """The axes that a size is split over, major first. Raises `ShardingError` for a size that is no device's part
        of a dim, such as the sum of a part and a number, and for one that the mesh does not divide."""
        whole, axes = _read(size)
        if whole % self.devices(axes):
            devices = " × ".join(f"{axis}={self.mesh[axis]}" for axis in axes)
            raise ShardingError(f"a size, {shown(size)}, which {devices} cannot divide")
        return axes

    def whole(self, size) -> int:
        """The size in the whole array."""
        return _read(size)[0]

    def divides(self, size) -> bool:
        """Whether the mesh divides a product of sizes; what is no such product, as a sum, is no size anyhow."""
        whole, devices = 1, 1
        for factor in str(size).removeprefix("-").split("*"):
            match = _SYMBOL.fullmatch(factor)
            if not match and not factor.isdigit():
                return True
            whole *= 1 if match else int(factor)
            devices *= self.devices(tuple(match[1].split("__"))) if match else 1
        return whole % devices == 0

    def on_mesh(self, size):
        """The number that it is on the mesh, or, of a size that is no part of a dim, its text."""
        try:
            return self.whole(size) // self.devices(self.axes(size))
        except ShardingError:
            return shown(size)

    def times(self, size, count: "Count"):
        """A size times a number of devices: the size of the whole, if it is split over these axes once."""
        factors = str(size).split("*")
        whole, symbols = (int(factors[0]), factors[1:]) if factors[0].isdigit() else (1, factors)
        split = [match[1].split("__") for match in map(_SYMBOL.fullmatch, symbols) if match]
        over = [axis for axes in split for axis in axes]
        if len(split) < len(symbols) or any(over.count(axis) != 1 for axis in count.axes):
            what = f"{shown(size)} times the number of devices along {', '.join(count.axes)} is not the whole's size"
            raise ShardingError(f"{what}\n  at {users_line()}")
        left = [tuple(axis for axis in axes if axis not in count.axes) for axes in split]
        return math.prod((_symbol(self._scope, axes) for axes in left if axes), start=whole * count.factor)


@functools.cache
def _symbol(scope, axes: tuple[str, ...]):
    return export.symbolic_shape("split_over_" + "__".join(axes), scope=scope)[0]


@functools.cache
def _read(size) -> tuple[int, tuple[str, ...]]:
    if not is_part(size):
        return size, ()
    if (match := _PRODUCT.fullmatch(str(size))) is None:
        raise ShardingError(f"a size, {shown(size)}, that depends on how many devices there are")
    return int(match[1] or 1), tuple(match[2].split("__"))


def is_part(size) -> bool:
    return isinstance(size, _Size)


def shown(text) -> str:
    """A size, or a text that has sizes in it, as a type writes them: '4096/d' for 4096*split_over_d."""
    text = re.sub(r"(?<![*\w])split_over_", "1*split_over_", str(text))
    text = re.sub(r"(\d+)\*split_over_(\w+)", r"\1/split_over_\2", text)
    return _SYMBOL.sub(lambda match: match[1].replace("__", "/"), text)


# -- What a program may ask of a size ----------------------------------------------------------------------------------
_COMPARISONS = {f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_QUESTIONS = (*_COMPARISONS, "__mod__", "__divmod__", "__bool__", "__hash__", "__int__", "__index__")
# Functions here may compute something else where two sizes are equal, as jnp.array_equal, though jnp.diagonal does not;
# others of JAX's raise an error where they are not.
_ANOTHER_WAY = re.compile(r"[/\\]jax[/\\]_src[/\\](numpy|scipy|nn|image|ops|random)\b")
_refused: list[ShardingError] = []  # in the trace that is under way
NUMBER = (
    "the size of a device's part is asked for as a number, which is another one on each mesh\n"
    "  fix: jnp.ones(x.shape), not np.ones; a number of the whole is x.shape[0] * shardops.axis_size('d')"
)


@contextlib.contextmanager
def guarded(parts: Parts):
    """Inside, no question about sizes gets an answer that would differ between meshes. A program that asks one is
    refused, even if it catches the error; JAX, einops and other packages are told that the answer is unknown. To them,
    sizes differ until they are proved equal."""
    others = "__mul__", "__floordiv__", "min", "max", "rmin", "rmax"
    before = {name: getattr(_Size, name, None) for name in (*_QUESTIONS, *others)}
    for name in _QUESTIONS:
        setattr(_Size, name, _asked(name, before[name] or (lambda size: True)))
    times, over = before["__mul__"], before["__floordiv__"]

    def divide(size, other):
        result, by_user = over(size, other), asked_by_user()
        if is_part(result) and by_user:
            try:
                parts.axes(result)
            except ShardingError as error:
                raise refused(f"{shown(size)} // {shown(other)} makes {error}\n  at {users_line()}") from None
        if is_part(result) and not parts.divides(result):
            raise InconclusiveDimensionOperation(f"{size} // {other}, which the mesh does not divide")
        return result

    _Size.__mul__ = lambda size, other: other * size if isinstance(other, Count) else times(size, other)
    _Size.__floordiv__ = divide
    _Size.min = _Size.rmin = lambda size, other: size if _compared(operator.le, size, other) else other
    _Size.max = _Size.rmax = lambda size, other: size if _compared(operator.ge, size, other) else other
    _refused.clear()
    try:
        yield
        if _refused:
            raise _refused[0]
    finally:
        for name, method in before.items():
            if method is None:
                delattr(_Size, name)
            else:
                setattr(_Size, name, method)


def _asked(name: str, method: Callable):
    compare = _COMPARISONS.get(name)

    def ask(size, *other):
        by_user, decides = asked_by_user(), name not in ("__eq__", "__ne__")
        if not decides and other[0] not in (0, 1, -1):  # 1: a dim that is repeated
            code = sys._getframe(1).f_code
            decides = code.co_name != "diagonal" and _ANOTHER_WAY.search(code.co_filename) is not None
        if compare is not None and isinstance(other[0], (int, _Size)) and (by_user or decides):
            if not by_user and "mod(" in f"{size} {other[0]}":
                return method(size, *other)  # JAX knows that a remainder is no less than 0 and less than the divisor
            try:
                return _compared(compare, size, other[0])
            except InconclusiveDimensionOperation:
                if not by_user:
                    raise
        if name == "__index__":
            raise refused(f"{NUMBER}\n  at {users_line()}") if by_user else TypeError(NUMBER)
        # JAX would say that 16/d % 4 is 0.
        if name == "__mod__" and not by_user and isinstance(other[0], int) and other[0] != 1:
            raise InconclusiveDimensionOperation(f"{size} % {other[0]}")
        if not by_user:
            return method(size, *other)
        what = "what is computed must not depend on the size of a device's part"
        raise refused(f"{what}: {shown(size)} is another number on each mesh\n  at {users_line()}")

    return ask


def _compared(compare: Callable, size, other) -> bool:
    """Compares a size with another, if the answer is the same on every mesh."""
    low, high = _bounds(size - other)
    if compare in (operator.eq, operator.ne) and low < 0 < high:
        low = 0
    if compare(low, 0) != compare(high, 0):
        what = f"{shown(size)} compared with {shown(other)}"
        raise InconclusiveDimensionOperation(f"{what}, as by a slice or an index along a dim that is split")
    return compare(low, 0)


def _bounds(size) -> tuple[float, float]:
    """The least and the largest that a sum of sizes is on any mesh: a part has one element to all of the whole's."""
    low = high = 0
    for sign, term in re.findall(r"([+-]?)([^+-]+)", str(size).replace(" ", "")):
        whole, least = 1, 1
        for factor in term.split("*"):
            if factor.isdigit():
                whole *= int(factor)
            elif not _SYMBOL.fullmatch(factor):
                return -math.inf, math.inf
        least = whole if term.isdigit() else 1
        low, high = (low - whole, high - least) if sign == "-" else (low + least, high + whole)
    return low, high


def refused(text: str) -> ShardingError:
    """An error that a program cannot catch."""
    _refused.append(ShardingError(text))
    return _refused[-1]


@dataclasses.dataclass(frozen=True, eq=False)
class Count:
    """The number of devices along mesh axes, in the check: a number that is another one on each mesh.

    It makes the whole's size of a part's, `x.shape[0] * axis_size('d')`; what is divided by it is a term of a sum over
    these axes; and `int(...)` is the number itself, with which what is computed is not proved.
    """

    parts: Parts
    axes: tuple[str, ...]
    divide: Callable
    factor: int = 1

    def __mul__(self, other):
        if isinstance(other, int):
            return dataclasses.replace(self, factor=self.factor * other)
        if isinstance(other, Count) and not set(self.axes) & set(other.axes):
            return dataclasses.replace(self, axes=self.axes + other.axes, factor=self.factor * other.factor)
        return self.parts.times(other, self) if is_part(other) else self._refuse(other)

    __rmul__ = __mul__

    def __rtruediv__(self, other):
        return self._refuse() if is_part(other) else self.divide(jnp.asarray(other), self)

    def __int__(self) -> int:
        return self.factor * self.parts.devices(self.axes) if asked_by_user() else self._refuse()

    def __str__(self) -> str:
        return str(self.factor * self.parts.devices(self.axes))

    def _refuse(self, *_, **__):
        axes = ", ".join(self.axes)
        raise refused(
            f"the number of devices along {axes} is another one on each mesh, and so is what is computed with it\n"
            f"  fix: x.shape[0] * shardops.axis_size('{self.axes[0]}') is the size of the whole, x / axis_size a term "
            f"of a sum; int(axis_size) is a plain number, of which nothing is proved\n  at {users_line()}"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __index__ = __float__ = __array__ = _refuse
    __hash__ = None
