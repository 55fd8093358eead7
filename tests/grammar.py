"""A grammar of small programs in the notation, right ones and careless ones, and what each means on whole arrays.

A program is source text. `build` runs it as it stands, on a mesh; with `whole=True` the same text runs with the
operations of `Whole` instead of shardops': gathers, sums and slices over devices do nothing there, so what is computed
is what the author meant.
"""

import itertools
import linecache
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from shardlib import shardops
from shardlib.shardtypes import f32, i32, pytree_dataclass
from shardlib.typed import typed

AXES = "dt"
SIZES = (8, 16, 32)  # each mesh axis divides them; 8 leaves one element on each of eight devices


# -- What a program means ----------------------------------------------------------------------------------------------
class Whole:
    """shardops on whole arrays: the strings say which dims there are, what they say of devices means nothing."""

    def __init__(self, sizes):
        self.sizes = sizes

    @staticmethod
    def names(text):
        """The dims' names on the left and on the right of the arrow."""
        sides = text.split("->")
        return [[[w.split("/")[0] for w in part.split() if w[0] != "+"] for part in side.split(",")] for side in sides]

    def same(self, text, x, *_):
        return x

    all_gather = psum = psum_scatter = slice = pending = all_to_all = same

    def reduce(self, function, text, x):
        (before,), (after,) = self.names(text)
        return function(x, axis=tuple(k for k, name in enumerate(before) if name not in after))

    def sum_unreduced(self, text, x):
        return self.reduce(jnp.sum, text, x)

    def pmax(self, text, x):
        return self.reduce(jnp.max, text, x)

    def any(self, text, x):
        return self.reduce(jnp.any, text, x)

    def argmax(self, text, x):
        (before,), (after,) = self.names(text)
        (axis,) = (k for k, name in enumerate(before) if name not in after)
        return jnp.argmax(x, axis)

    def einsum_unreduced(self, text, x, y):
        operands, (result,) = self.names(text)
        letters = dict(zip(dict.fromkeys(itertools.chain(*operands)), "abcdefghijkl"))
        first, second, last = ("".join(letters[name] for name in names) for names in (*operands, result))
        return jnp.einsum(f"{first},{second}->{last}", x, y)

    def index_unreduced(self, text, table, ids):
        (names, of_ids), _ = self.names(text)
        (axis,) = (k for k, name in enumerate(names) if name[0] == "[")
        rows, held = table.shape[axis], (ids >= 0) & (ids < table.shape[axis])
        if [name for name in names if name[0] != "["] == of_ids:
            found = jnp.take_along_axis(table, jnp.expand_dims(ids % rows, axis), axis).squeeze(axis)
        else:
            found = jnp.moveaxis(table, axis, 0)[ids % rows]
        return jnp.where(held.reshape(held.shape + (1,) * (found.ndim - held.ndim)), found, jnp.zeros((), found.dtype))

    def full(self, text, value, dtype, **_):
        return jnp.full([self.sizes[name] for name in self.names(text)[0][0]], value, dtype.dtype)

    def zeros(self, text, dtype, **_):
        return self.full(text, 0, dtype)

    def ppermute(self, text, x, shift):
        return jnp.roll(x, shift, [name[0] for name in self.names(text)[0][0]].index("["))

    def local(self, text, function, *operands):
        return function(*operands)

    value_and_grad = staticmethod(jax.value_and_grad)


class WholeLax:
    """jax.lax, whose transfers do nothing."""

    def __getattr__(self, name):
        return getattr(lax, name) if name not in ("psum", "axis_index") else lambda x, *_: 0 if name != "psum" else x


class Value(NamedTuple):
    """A name in a program, and the type that its author believes it has: (letter, axes) for each dim."""

    name: str
    dims: tuple[tuple[str, str], ...]
    pending: str = ""
    dtype: str = "f32"

    def __str__(self):
        return spec(self.dims, self.pending)

    @property
    def axes(self):
        return "".join(axes for _, axes in self.dims)

    @property
    def type(self):
        return f"{self.dtype}['{self}']"

    def rows(self, axis, index):
        """The source of an index or a slice of one dim."""
        return f"{self.name}[{':, ' * axis}{index}]"


def spec(dims, pending=""):
    return " ".join(["/".join([letter, *axes]) for letter, axes in dims] + [f"+{axis}" for axis in sorted(pending)])


@dataclass
class Program:
    source: str
    sizes: dict[str, int]
    parameters: list[Value]

    def __str__(self):
        return self.source

    def arguments(self):
        """The same random arrays each time; integers are indices that each dim has."""
        random = np.random.default_rng(7)
        shapes = [[self.sizes[letter] for letter, _ in value.dims] for value in self.parameters]
        return [
            random.normal(size=shape).astype(np.float32)
            if value.dtype == "f32"
            else random.integers(0, 8, shape).astype(np.int32)
            for shape, value in zip(shapes, self.parameters)
        ]

    def build(self, whole=False):
        names = dict(jax=jax, jnp=jnp, lax=lax, shardops=shardops, f32=f32, i32=i32)
        names |= dict(typed=typed, pytree_dataclass=pytree_dataclass)
        if whole:
            names |= dict(shardops=Whole(self.sizes), lax=WholeLax(), typed=lambda function: function)
        file = f"/program/{abs(hash(self.source))}.py"
        linecache.cache[file] = len(self.source), None, self.source.splitlines(True), file  # @typed reads it
        exec(compile(self.source, file, "exec"), names)
        return names["program"]


# -- Its author --------------------------------------------------------------------------------------------------------
@dataclass
class Author:
    """Writes a program line by line, with what hypothesis draws; believes a type of each value, sometimes wrongly."""

    draw: object
    gradient: bool
    sizes: dict[str, int] = field(default_factory=dict)
    parameters: list[Value] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def choose(self, options):
        return self.draw(st.sampled_from(list(options)))

    def chance(self, of):
        return of - 1 == self.draw(st.integers(0, of - 1))

    def letter(self, size, taken=()):
        """A name for a dim of this size that the value does not have yet."""
        known = [name for name, other in self.sizes.items() if other == size and name not in taken]
        new = next(name for name in "BLMFVHKQRSCEGNPUWXYZ" if name not in self.sizes)
        self.sizes.setdefault(known[0] if known else new, size)
        return known[0] if known else new

    def dim(self, taken, free):
        """A new dim, perhaps split over some of the axes that are free."""
        axes = self.choose(["", *free, *([free] if len(free) > 1 else [])])
        return self.letter(self.choose(SIZES), taken), axes

    def parameter(self, dims=None, dtype="f32"):
        if dims is None:
            dims, free = [], AXES
            for _ in range(self.choose([2, 1, 3])):
                dims.append(self.dim([letter for letter, _ in dims], free))
                free = "".join(axis for axis in free if axis not in dims[-1][1])
        self.parameters.append(Value(f"x{len(self.parameters)}", tuple(dims), "", dtype))
        self.values.append(self.parameters[-1])
        return self.values[-1]

    def value(self, rank=1, dtype="f32", where=lambda value: True):
        """One of the latest values, or a new argument."""
        fit = [v for v in self.values[::-1] if len(v.dims) >= rank and dtype in ("", v.dtype) and where(v)][:3]
        if not fit or self.chance(6):
            parameter = self.parameter(dtype=dtype or "f32")
            while len(parameter.dims) < rank:
                parameter = self.parameter(dtype=dtype or "f32")
            return parameter
        return self.choose(fit)

    def put(self, expression, dims, pending="", dtype="f32"):
        value = Value(f"v{len(self.lines)}", tuple(dims), "".join(sorted(pending)), dtype)
        annotation = f": {value.type}" if self.chance(4) else ""
        self.lines.append(f"{value.name}{annotation} = {expression}")
        self.values.append(value)

    def leaves(self):
        """The values that no line has used."""
        used = re.findall(r"\b[vx]\d+\b", "\n".join(line.split(" = ", 1)[-1] for line in self.lines))
        return [value for value in self.values if value.name not in used]

    def made(self, dims, pending="", value="zeros"):
        """The source of zeros, or of a value that is the same everywhere."""
        bound = {letter for parameter in self.parameters for letter, _ in parameter.dims}
        sizes = "".join(f", {letter}={self.sizes[letter]}" for letter, _ in dims if letter not in bound)
        return f"shardops.{value}('{spec(dims, pending)}', {'3, ' * (value == 'full')}f32{sizes})"

    def axis(self, value):
        """A dim's number, more often of a dim that is whole."""
        whole = [k for k, (_, axes) in enumerate(value.dims) if not axes]
        return self.choose(whole if whole and not self.chance(3) else range(len(value.dims)))

    def size(self, value, axis):
        return self.sizes[value.dims[axis][0]]


def replaced(dims, axis, *new):
    return (*dims[:axis], *new, *dims[axis + 1 :])


def letters(dims):
    return [letter for letter, _ in dims]


# Operations with strings; right, but for one that is now and then left out.
def redistribute(a):
    v = a.value(rank=0, dtype="")
    free, moves = [axis for axis in AXES if axis not in v.axes + v.pending], []
    for axis in v.pending:
        moves.append(("psum", v.dims, v.pending.replace(axis, "")))
    for axis in free:
        moves.append(("pending", v.dims, v.pending + axis))
    for k, (letter, axes) in enumerate(v.dims):
        may_split = a.sizes[letter] % 8 == 0
        if axes:
            moves += [("all_gather", replaced(v.dims, k, (letter, axes[:-1])), v.pending)] * 2
            for j, (other, others) in enumerate(v.dims):
                if j != k and a.sizes[other] % 8 == 0 and others < axes[-1]:
                    gained = replaced(replaced(v.dims, k, (letter, axes[:-1])), j, (other, others + axes[-1]))
                    moves.append(("all_to_all", gained, v.pending))
        for axis in [*free, *v.pending] if may_split else []:
            if axes < axis:
                operation = "slice" if axis in free else "psum_scatter"
                moves.append((operation, replaced(v.dims, k, (letter, axes + axis)), v.pending.replace(axis, "")))
    if moves:
        operation, dims, pending = a.choose(moves)
        line = f"shardops.{operation}('{v} -> {spec(dims, pending)}', {v.name})"
        a.put(v.name if a.chance(10) else line, dims, pending, v.dtype)


def pass_on(a):
    v = a.value(where=lambda v: not v.pending)
    split = [k for k, (_, axes) in enumerate(v.dims) if len(axes) == 1]
    if split:
        k = a.choose(split)
        text = spec(v.dims[:k]) + f" [{spec(v.dims[k : k + 1])}] " + spec(v.dims[k + 1 :])
        a.put(f"shardops.ppermute('{text.strip()} -> {text.strip()}', {v.name}, 1)", v.dims)


def contract(a):
    v = a.value()
    shared = [dim for dim in v.dims if not a.chance(3)]
    new = [a.dim(letters(v.dims), "".join(axis for axis in AXES if axis not in v.axes + v.pending))]
    w = a.parameter([*shared, *new])
    summed = [dim for dim in shared if a.chance(2)]
    dims = [dim for dim in (*v.dims, *new) if dim not in summed]
    pending = v.pending + "".join(axes for _, axes in summed)
    a.put(f"shardops.einsum_unreduced('{v}, {w} -> {spec(dims, pending)}', {v.name}, {w.name})", dims, pending)


def total(a, dtype=""):
    v = a.value(dtype=dtype)
    dims = [dim for dim in v.dims[1:] if a.chance(2)]
    pending = v.pending + "".join(axes for dim, axes in v.dims if (dim, axes) not in dims)
    a.put(f"shardops.sum_unreduced('{v} -> {spec(dims, pending)}', {v.name})", dims, pending, v.dtype)


def largest(a):
    v = a.value(where=lambda v: not v.pending)
    dims = [dim for dim in v.dims[1:] if a.chance(2)]
    a.put(f"shardops.pmax('{v} -> {spec(dims)}', {a.choose(['lax.stop_gradient(%s)', '%s']) % v.name})", dims)


def look_up(a):
    table = a.value(where=lambda v: not v.pending)
    axis = a.choose(range(len(table.dims)))
    if a.size(table, axis) < 8:
        return
    free = "".join(axis for axis in AXES if axis not in table.axes)
    others = replaced(table.dims, axis)
    ids = a.parameter(others if others and a.chance(2) else [a.dim(letters(table.dims), free)], "i32")
    text = str(table).replace(spec(table.dims[axis : axis + 1]), f"[{spec(table.dims[axis : axis + 1])}]", 1)
    dims = ids.dims if ids.dims == others else (*ids.dims, *others)
    result = spec(dims, table.dims[axis][1])
    a.put(f"shardops.index_unreduced('{text}, {ids} -> {result}', {table.name}, {ids.name})", dims, table.dims[axis][1])


def kernel(a):
    v = a.value(where=lambda v: not v.pending)
    k = a.choose([k for k, (_, axes) in enumerate(v.dims) if not axes] or [0])
    whole = not v.dims[k][1]
    function = f"lambda x: jnp.cumsum(jnp.sin(x), axis={k})" if whole else "jnp.sin"
    a.put(f"shardops.local('{v} -> {v}', {function}, {v.name})", v.dims)


def made(a):
    v = a.value()
    new = a.choose([a.made(v.dims, v.pending), a.made(v.dims, "", "full"), f"jnp.zeros({v.name}.shape)"])
    a.put(f"{v.name} + {new}", v.dims, v.pending)


# Plain JAX, device by device: right on some values, wrong on others.
def unary(a):
    v = a.value(rank=0)
    linear = ["-{0}", "{0} * 2.0", "{0} / 3.0", "{0} + {0}", "jax.checkpoint(jnp.negative)({0})"]
    others = ["jnp.sin({0})", "jnp.tanh({0})", "{0} * {0}", "{0} + 1.0", "jnp.maximum({0}, 0.0)", "jax.nn.silu({0})"]
    a.put(a.choose(linear if v.pending and not a.chance(3) else linear + others).format(v.name), v.dims, v.pending)


def binary(a):
    v = a.value(rank=0)
    alike = [u for u in a.values if letters(u.dims) == letters(v.dims) and u.dtype == "f32" and u != v]
    u = a.choose(alike) if alike and not a.chance(3) else a.parameter(v.dims)
    forms = ["{0} + {1}", "{0} - {1}", "{0} * {1}", "jnp.where({1} > 0, {0}, 0.0)", "jnp.where({1} > 0, {0}, {1})"]
    forms += ["{0} / (1.0 + {1} * {1})", "jnp.minimum({0}, {1})", "{0} + lax.stop_gradient({1})"]
    a.put(a.choose(forms).format(v.name, u.name), v.dims, {*v.pending, *u.pending})


def broadcast(a):
    v = a.value(rank=2)
    k = a.choose(range(len(v.dims)))
    u = a.parameter(v.dims[k : k + 1])
    stretched = f"{u.name}[{', '.join(':' if j == k else 'None' for j in range(len(v.dims)))}]"
    a.put(
        a.choose(["{0} * {1}", "{0} + {1}", "jnp.where({1} > 0, {0}, 0.0)"]).format(v.name, stretched),
        v.dims,
        v.pending,
    )


def along(a):
    v = a.value()
    k = a.axis(v)
    linear = ["jnp.cumsum({0}, axis={k})", "jnp.flip({0}, axis={k})", "jnp.roll({0}, 1, axis={k})"]
    linear += ["{0} - jnp.mean({0}, axis={k}, keepdims=True)", "lax.associative_scan(jnp.add, {0}, axis={k})"]
    linear += ["{0} / {0}.shape[{k}]", "{0} * jnp.ones_like({0})", "({0} if {0}.shape[{k}] > 4 else -{0})"]
    linear += [
        "{0} / jnp.sum(jnp.ones_like({0}), axis={k}, keepdims=True)",
        "{0} - lax.slice_in_dim({0}, 0, 1, axis={k})",
    ]
    linear += [
        "jnp.concatenate([lax.slice_in_dim({0}, 1, None, axis={k}), lax.slice_in_dim({0}, 0, 1, axis={k})], axis={k})"
    ]
    others = [
        "jax.nn.softmax({0}, axis={k})",
        "jnp.sort({0}, axis={k})",
        "jnp.argsort({0}, axis={k}).astype(jnp.float32)",
    ]
    others += ["{0} / jnp.sqrt(1.0 + jnp.sum({0} * {0}, axis={k}, keepdims=True))"]
    others += ["jnp.moveaxis(lax.map(jnp.sin, jnp.moveaxis({0}, {k}, 0)), 0, {k})"]
    others += [
        "jax.vmap(lambda r: jnp.sin(r - jnp.mean(r)), {k}, {k})({0})",
        "{0} * jnp.max({0}, axis={k}, keepdims=True)",
    ]
    others += ["{0} + jnp.expand_dims(jnp.arange({0}.shape[{k}], dtype=jnp.float32), {rest})"]
    options = linear if v.pending and not a.chance(3) else linear + others
    rest = [j for j in range(len(v.dims)) if j != k]
    a.put(a.choose(options).format(v.name, k=k, rest=rest), v.dims, v.pending)


def reduce(a):
    v = a.value()
    k = a.axis(v)
    linear = [
        "jnp.sum({0}, axis={k})",
        "jnp.mean({0}, axis={k})",
        "jnp.take({0}, 0, axis={k})",
        "jnp.moveaxis({0}, {k}, 0)[-1]",
    ]
    linear += ["lax.scan(lambda c, r: (c + r, None), jnp.take({0}, 0, axis={k}), jnp.moveaxis({0}, {k}, 0))[0]"]
    others = [
        "jnp.max({0}, axis={k})",
        "jax.nn.logsumexp({0}, axis={k})",
        "jnp.argmax({0}, axis={k}).astype(jnp.float32)",
    ]
    others += ["jnp.all({0} > -1.5, axis={k}).astype(jnp.float32)", "jnp.sum(jnp.ones_like({0}), axis={k})"]
    others += [
        "lax.fori_loop(0, {0}.shape[{k}], lambda i, c: c + jnp.sin(jnp.take({0}, i, axis={k})), 0.0 * jnp.take({0}, 0, axis={k}))"
    ]
    expression = a.choose(linear if v.pending and not a.chance(3) else linear + others).format(v.name, k=k)
    a.put(expression, replaced(v.dims, k), v.pending)


def divide(a):
    v = a.value()
    k = a.axis(v)
    (_, axes), size = v.dims[k], a.size(v, k)
    factor = a.choose([n for n in (2, 4, 8, 1) if (size // (8 if axes else 1)) % n == 0])
    minor = a.chance(2)
    before, after = (
        f"*{v.name}.shape[{part}], " if full else ""
        for part, full in ((f":{k}", k), (f"{k + 1}:", k + 1 < len(v.dims)))
    )
    first, second = (size // factor, factor) if minor else (factor, size // factor)
    one = a.letter(first, letters(v.dims))
    two = a.letter(second, [*letters(v.dims), one])
    minor_is_split = second % 8 == 0 and (first % 8 or a.chance(3))
    dims = [(one, ""), (two, axes)] if minor_is_split else [(one, axes), (two, "")]
    rest = f"-1, {factor}" if minor else f"{factor}, -1"
    a.put(
        f"{v.name}.reshape({before}{rest}, {after.rstrip(', ')})".replace(", )", ")"),
        replaced(v.dims, k, *dims),
        v.pending,
    )


def merge(a):
    v = a.value(rank=2)
    k = a.choose(range(len(v.dims) - 1))
    (one, axes), (two, others) = v.dims[k : k + 2]
    letter = a.letter(a.sizes[one] * a.sizes[two], letters(v.dims))
    axes = axes if axes > others else others
    shape = [f"*{v.name}.shape[:{k}]"] * (k > 0) + ["-1"] + [f"*{v.name}.shape[{k + 2}:]"] * (k + 2 < len(v.dims))
    a.put(f"{v.name}.reshape({', '.join(shape)})", [*v.dims[:k], (letter, axes), *v.dims[k + 2 :]], v.pending)


def reshape_like(a):
    v = a.value(rank=0)
    count = {u.name: int(np.prod([a.sizes[letter] for letter, _ in u.dims])) for u in a.values}
    alike = [u for u in a.values if count[u.name] == count[v.name] and u.dims != v.dims]
    if alike:
        u = a.choose(alike)
        a.put(f"{v.name}.reshape({u.name}.shape)", u.dims, v.pending)


def transpose(a):
    v = a.value(rank=2)
    order = a.draw(st.permutations(range(len(v.dims))))
    a.put(f"jnp.transpose({v.name}, {tuple(order)})", [v.dims[k] for k in order], v.pending)


def part(a):
    v = a.value()
    k = a.axis(v)
    (_, axes), size = v.dims[k], a.size(v, k)
    few = a.chance(2) or size % (16 if axes else 2)
    options = ["0:2", "-2:", "1:3"] if few else ["::2", f": {v.name}.shape[{k}] // 2", f"{v.name}.shape[{k}] // 2 :"]
    dim = (a.letter(min(2, size) if few else size // 2, letters(v.dims)), "" if few else axes)
    a.put(v.rows(k, a.choose(options)), replaced(v.dims, k, dim), v.pending)


def write(a):
    v = a.value(where=lambda v: not v.pending)
    k = a.axis(v)
    base = a.choose([v.name, f"jnp.zeros({v.name}.shape)", f"jnp.zeros_like({v.name})"])
    where = a.choose(["0", "-1", ":2", "1:3", "x"])
    if where == "x":
        where = a.parameter([a.dim(letters(v.dims), AXES if a.chance(3) else "")], "i32").name
    what = a.choose(["set(1.0)", "add(1.0)", "multiply(2.0)"])
    a.put(f"{v.name} + {base}.at[{':, ' * k}{where}].{what}", v.dims)


def gather(a):
    v = a.value()
    k = a.axis(v)
    free = "".join(axis for axis in AXES if axis not in v.axes)
    form = a.choose(["take", "along", "rows", "segments"])
    if a.size(v, k) < 8:
        return
    if form == "take":
        ids = a.parameter([a.dim(letters(v.dims), free if a.chance(2) else "")], "i32")
        a.put(
            a.choose([f"jnp.take({v.name}, {ids.name}, axis={k})", v.rows(k, ids.name)]),
            replaced(v.dims, k, *ids.dims),
            v.pending,
        )
    elif form == "along":
        ids = a.parameter(replaced(v.dims, k, a.dim(letters(v.dims), v.dims[k][1])), "i32")
        a.put(f"jnp.take_along_axis({v.name}, {ids.name}, axis={k})", ids.dims, v.pending)
    elif form == "rows" and len(v.dims) > 1:
        ids = a.parameter(v.dims[:1], "i32")
        a.put(f"{v.name}[jnp.arange({v.name}.shape[0]), {ids.name}]", replaced(v.dims, 1), v.pending)
    elif form == "segments":
        ids = a.parameter(v.dims[:1], "i32")
        dims = ((a.letter(8, letters(v.dims)), ""), *v.dims[1:])
        a.put(f"jax.ops.segment_sum({v.name}, {ids.name}, num_segments=8)", dims, v.pending)


def product(a):
    v = a.value()
    free = "".join(axis for axis in AXES if axis not in v.axes)
    if len(v.dims) == 2 and a.chance(3):
        other = a.letter(a.size(v, 0), letters(v.dims))
        a.put(f"{v.name} @ {v.name}.T", [v.dims[0], (other, "")], v.pending)
    else:
        new = a.dim(letters(v.dims), free)
        w = a.parameter([v.dims[-1], new])
        a.put(f"{v.name} @ {w.name}", [*v.dims[:-1], new], v.pending)


def loop(a):
    v = a.value()
    zeros = a.made(v.dims[1:], v.pending)
    forms = [
        (f"lax.scan(lambda c, r: (c + r, c + 2.0 * r), {zeros}, {v.name})[1]", v.dims),
        (f"lax.scan(lambda c, r: (c + r, None), {zeros}, {v.name})[0]", v.dims[1:]),
        (f"lax.fori_loop(0, 3, lambda i, c: 0.5 * c + {v.name}, {v.name})", v.dims),
        (f"lax.fori_loop(0, {v.name}.shape[0], lambda i, c: c.at[i].add(1.0), {v.name})", v.dims),
        (f"lax.while_loop(lambda c: jnp.max(c) < 3.0, lambda c: jnp.abs(c) * 2.0 + 1.0, {v.name})", v.dims),
        (f"lax.scan(lambda c, i: (c + {v.name}[i], None), {zeros}, jnp.arange({v.name}.shape[0]))[0]", v.dims[1:]),
    ]  # fmt: skip
    expression, dims = a.choose(forms)
    a.put(expression, dims, v.pending)


def branch(a):
    v = a.value(rank=0)
    s = a.value(rank=0)
    decides = a.choose(
        [
            f"jnp.sum({s.name}) > 0",
            f"{s.name}.ravel()[0] > 0",
            f"jnp.max({s.name}) > 2.0",
            f"{a.parameter(()).name} > 0",
        ]
    )
    one, other = a.choose([("-x", "x"), ("jnp.sin(x)", "x"), ("x * 2.0", "jnp.zeros_like(x)")])
    a.put(f"lax.cond({decides}, lambda x: {one}, lambda x: {other}, {v.name})", v.dims, v.pending)


def custom(a):
    v = a.value(where=lambda v: not v.pending)
    if a.chance(4):
        tangent = a.choose(
            ["jnp.cos(p[0]) * t[0]", "t[0] - jnp.mean(t[0], axis=0, keepdims=True)", "lax.psum(t[0], 'd')"]
        )
        a.lines.append(f"f{len(a.lines)} = jax.custom_jvp(jnp.sin)")
        a.lines.append(f"f{len(a.lines) - 1}.defjvp(lambda p, t: (jnp.sin(p[0]), {tangent}))")
        a.put(f"f{len(a.lines) - 2}({v.name})", v.dims)
        return
    back = [
        "g * jnp.cos(x)",
        "jnp.clip(g, -1.0, 1.0)",
        "g - jnp.mean(g, axis=0, keepdims=True)",
        "lax.psum(g, 'd')",
        "g * jnp.sum(g)",
    ]
    name = f"f{len(a.lines)}"
    a.lines.append(f"{name} = jax.custom_vjp(jnp.sin)")
    a.lines.append(f"{name}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: ({a.choose(back)},))")
    a.put(f"{name}({v.name})", v.dims)


def integer(a):
    if a.chance(3):
        total(a, "i32")
    v = a.value(rank=0, dtype="i32")
    forms = ["{0} * 2", "{0} // 2", "lax.div({0}, jnp.int32(2))", "{0} % 3", "{0} + {0}", "{0} >> 1"]
    a.put(a.choose(forms).format(v.name), v.dims, v.pending, "i32")


def as_float(a):
    v = a.value(rank=0, dtype="i32")
    a.put(f"{v.name}.astype(jnp.float32)", v.dims, v.pending)


def hidden(a):
    """Computations that stand in another jaxpr, or that no result of an equation shows."""
    v = a.value()
    n, dims = len(a.lines), v.dims
    form = a.choose(["solve"] if a.gradient else ["composite", "solve", "ref"])  # JAX differentiates no more
    if form == "ref":
        what = a.choose([f"jnp.sum({v.name}, axis=0)", f"{v.name}[0]", f"{v.name}[0] * 2.0"])
        a.lines.append(f"r{n} = jax.new_ref(jnp.zeros({v.name}.shape[1:]))")
        a.lines.append(f"r{n}[...] += {what}")
        a.put(f"r{n}[...]", dims[1:], v.pending)
    elif form == "composite":
        a.put(f"lax.composite(lambda x: jnp.sum(jnp.sin(x), axis=0), 'our.sum')({v.name})", dims[1:], v.pending)
    else:
        scale = a.choose(["2.0", f"(1.0 + jnp.sum({v.name} * {v.name}))", "(1.0 + lax.axis_index('d'))"])
        a.put(
            f"lax.custom_linear_solve(lambda x: x * {scale}, {v.name}, lambda f, b: b / {scale}, symmetric=True)",
            dims,
            v.pending,
        )


PRODUCTIONS = [
    *[redistribute] * 4, *[contract] * 2, total, largest, look_up, kernel, made, pass_on,
    *[unary] * 2, *[binary] * 2, broadcast, *[along] * 3, *[reduce] * 2, *[divide] * 3, *[merge] * 2, reshape_like,
    transpose, *[part] * 2, *[write] * 2, *[gather] * 2, *[product] * 2, *[loop] * 2, branch, custom, *[integer] * 2,
    as_float, hidden,
]  # fmt: skip


@st.composite
def programs(draw):
    a = Author(draw, gradient=draw(st.integers(0, 2)) == 2)
    a.parameter()
    for _ in range(draw(st.integers(1, 7))):
        a.choose(PRODUCTIONS)(a)
    results = gradients(a) if a.gradient else values(a)
    types, names = [value.type for value in results], [value.name for value in results]
    lines, result, returned = [], f"tuple[{', '.join(types)}]", f"{', '.join(names)},"
    if len(types) == 1:
        result, returned = types[0], names[0]
    elif a.chance(3):
        lines = [
            "@pytree_dataclass",
            "class Result:",
            f"    first: {types[0]}",
            f"    rest: tuple[{', '.join(types[1:])}]",
            "",
            "",
        ]
        result, returned = "Result", f"Result({names[0]}, ({', '.join(names[1:])},))"
    arguments = ", ".join(f"{value.name}: {value.type}" for value in a.parameters)
    lines += [
        "@typed",
        f"def program({arguments}) -> {result}:",
        *(f"    {line}" for line in a.lines),
        f"    return {returned}",
    ]
    sizes = ", ".join(f"{name}={size}" for name, size in a.sizes.items())
    return Program("\n".join([f"# {sizes}", *lines]) + "\n", a.sizes, a.parameters)


def values(a):
    """The results: what no line has used, its sums taken."""
    leaves = a.leaves()
    for value in leaves:
        if value.pending:
            a.put(
                value.name if a.chance(12) else f"shardops.psum('{value} -> {spec(value.dims)}', {value.name})",
                value.dims,
                "",
                value.dtype,
            )
    return [value for value in a.leaves()]


def gradients(a):
    """The results: a loss of what no line has used, weighted element by element, and its gradients."""
    terms = []
    for value in a.leaves():
        if value.dtype == "f32":
            term, pending = value.name, value.pending
            if value.dims:
                pending = "".join(sorted(value.pending + value.axes))
                term = f"shardops.sum_unreduced('{value} -> {spec((), pending)}', {value.name} * {a.parameter(value.dims).name})"
            if pending != AXES:
                term = f"shardops.pending('{spec((), pending)} -> +d +t', {term})"
            terms.append(term)
    terms = terms or ["shardops.zeros('+d +t', f32)"]
    weights = [value for value in a.parameters if value.dtype == "f32"]
    names = ", ".join(value.name for value in weights)
    a.lines = [f"def loss({names}):", *(f"    {line}" for line in a.lines), f"    return {' + '.join(terms)}", ""]
    a.lines += [f"value, ({names},) = shardops.value_and_grad(loss, {tuple(range(len(weights)))})({names})"]
    results = [Value("value", (), "dt")]
    results += [value._replace(pending="".join(axis for axis in AXES if axis not in value.axes)) for value in weights]
    for k, value in enumerate(results):
        if value.pending and not a.chance(20):
            a.lines.append(f"{value.name} = shardops.psum('{value} -> {spec(value.dims)}', {value.name})")
        results[k] = value._replace(pending="")
    return results
