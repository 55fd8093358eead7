"""A grammar of small programs in the notation, right ones and careless ones, and what each means on whole arrays.

A program is source text. As it stands it runs on a mesh; with the operations of `Whole` instead of shardops' it runs on
whole arrays: gathers, slices and sums over devices do nothing there, so it computes what its author meant.
"""

import itertools
import linecache
import re
from dataclasses import dataclass, field
from math import prod
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
    """shardops on whole arrays: the strings say which dims there are; what they say of devices means nothing."""

    def __init__(self, sizes):
        self.sizes = sizes | dict.fromkeys(AXES, 1)

    @staticmethod
    def names(text):
        """The dims' names on the left and on the right of the arrow."""
        sides = text.split("->")
        return [[[w.split("/")[0] for w in part.split() if w[0] != "+"] for part in side.split(",")] for side in sides]

    def same(self, text, x, *_):
        return x

    all_gather = psum = psum_scatter = slice = pending = all_to_all = ppermute = same

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
        return self.reduce(lambda x, axis: jnp.argmax(x, *axis), text, x)

    def einsum_unreduced(self, text, x, y):
        operands, (result,) = self.names(text)
        letters = dict(zip(itertools.chain(*operands), "abcdefghijkl"))
        first, second, last = ("".join(letters[name] for name in names) for names in (*operands, result))
        return jnp.einsum(f"{first},{second}->{last}", x, y)

    def index_unreduced(self, text, table, ids):
        (names, of_ids), _ = self.names(text)
        (axis,) = (k for k, name in enumerate(names) if name[0] == "[")
        if names[:axis] + names[axis + 1 :] == of_ids:
            return jnp.take_along_axis(table, jnp.expand_dims(ids, axis), axis).squeeze(axis)
        return jnp.moveaxis(table, axis, 0)[ids]

    def regroup(self, text, x, **_):
        return x.reshape([self.sizes[name] for name in self.names(text)[1][0]])

    def full(self, text, value, dtype, **_):
        return jnp.full([self.sizes[name] for name in self.names(text)[0][0]], value, dtype.dtype)

    def zeros(self, text, dtype, **_):
        return self.full(text, 0, dtype)

    def local(self, text, function, *operands, **_):
        return function(*operands)

    def sum_over_chunks(self, function, shared, x, others):
        return sum(function(shared, *chunk) for chunk in zip(x, lax.stop_gradient(others)))

    def axis_size(self, axis):
        return 1

    grad, value_and_grad, vjp = map(staticmethod, (jax.grad, jax.value_and_grad, jax.vjp))


class WholeLax:
    """jax.lax, whose transfers do nothing."""

    def __getattr__(self, name):
        return {"psum": lambda x, axis: x, "axis_index": lambda axis: 0}.get(name) or getattr(lax, name)


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
    def unused(self):
        """The axes along which it is the same."""
        return "".join(axis for axis in AXES if axis not in self.axes + self.pending)

    @property
    def type(self):
        return f"{self.dtype}['{self}']"

    def at(self, k, index):
        """The source of an index or a slice of dim k."""
        return f"{self.name}[{':, ' * k}{index}]"


def spec(dims, pending=""):
    return " ".join(["/".join([letter, *axes]) for letter, axes in dims] + [f"+{axis}" for axis in sorted(pending)])


def replaced(dims, k, *new):
    return (*dims[:k], *new, *dims[k + 1 :])


def letters(dims):
    return [letter for letter, _ in dims]


@dataclass
class Program:
    source: str
    sizes: dict[str, int]
    parameters: list[Value]

    def arguments(self):
        """The same random arrays each time; integers are indices that each dim has."""
        random = np.random.default_rng(7)
        for value in self.parameters:
            shape = [self.sizes[letter] for letter, _ in value.dims]
            floats = value.dtype == "f32"
            yield random.normal(size=shape).astype(np.float32) if floats else random.integers(0, 8, shape, np.int32)

    def build(self, whole=False):
        names = dict(jax=jax, jnp=jnp, lax=lax, shardops=shardops, f32=f32, i32=i32, typed=typed)
        if whole:
            names |= dict(shardops=Whole(self.sizes), lax=WholeLax(), typed=lambda function: function)
        file = f"/program/{abs(hash(self.source))}.py"
        linecache.cache[file] = len(self.source), None, self.source.splitlines(True), file  # for @typed, which reads it
        names["pytree_dataclass"] = pytree_dataclass
        exec(compile(self.source, file, "exec"), names)
        return names["program"]


# -- Its author --------------------------------------------------------------------------------------------------------
@dataclass
class Author:
    """Writes a program line by line, as hypothesis draws; believes a type of each value, sometimes wrongly."""

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
        """A name for a dim of this size, none that the value has already."""
        known = [name for name, other in self.sizes.items() if other == size and name not in taken]
        name = known[0] if known else next(name for name in "BLMFVHKQRSCEGNPUWXYZ" if name not in self.sizes)
        self.sizes[name] = size
        return name

    def size(self, dims):
        return prod(self.sizes[letter] for letter, _ in dims)

    def dim(self, taken, free):
        """A new dim, perhaps split over axes that are free."""
        return self.letter(self.choose(SIZES), taken), self.choose(["", *free, *([free] if len(free) > 1 else [])])

    def parameter(self, dims=None, dtype="f32"):
        if dims is None:
            dims, free = [], AXES
            for _ in range(self.choose([2, 1, 3])):
                dims.append(self.dim(letters(dims), free))
                free = "".join(axis for axis in free if axis not in dims[-1][1])
        self.parameters.append(Value(f"x{len(self.parameters)}", tuple(dims), "", dtype))
        self.values.append(self.parameters[-1])
        return self.values[-1]

    def value(self, rank=1, dtype="f32", where=lambda value: True):
        """One of the latest values, or a new argument."""
        fit = [v for v in self.values[::-1] if len(v.dims) >= rank and dtype in ("", v.dtype) and where(v)][:3]
        if fit and not self.chance(6):
            return self.choose(fit)
        while len((new := self.parameter(dtype=dtype or "f32")).dims) < rank:
            pass
        return new

    def axis(self, value):
        """The number of a dim, more often of one that is whole."""
        whole = [k for k, (_, axes) in enumerate(value.dims) if not axes]
        return self.choose(whole if whole and not self.chance(3) else range(len(value.dims)))

    def new_name(self):
        return f"v{len(self.lines)}"

    def put(self, expression, dims, pending="", dtype="f32"):
        value = Value(self.new_name(), tuple(dims), "".join(sorted(pending)), dtype)
        annotation = f": {value.type}" if self.chance(4) else ""
        self.lines.append(f"{value.name}{annotation} = {expression}")
        self.values.append(value)
        return value

    def made(self, dims, pending="", what="zeros"):
        """The source of zeros, or of threes."""
        known = {letter for parameter in self.parameters for letter, _ in parameter.dims}
        sizes = "".join(f", {letter}={self.sizes[letter]}" for letter, _ in dims if letter not in known)
        return f"shardops.{what}('{spec(dims, pending)}', {'3, ' * (what == 'full')}f32{sizes})"

    def term(self, value, name=None):
        """The source of a term of a loss: the sum of a value, of which each element has a weight of its own."""
        text, pending = name or value.name, value.pending
        if value.dims:
            pending = value.pending + value.axes
            text = (
                f"shardops.sum_unreduced('{value} -> {spec((), pending)}', {text} * {self.parameter(value.dims).name})"
            )
        missing = len(pending) < len(AXES)
        return f"shardops.pending('{spec((), pending)} -> +d +t', {text})" if missing else text


# Operations with strings, right but for a transfer that is now and then forgotten.
def redistribute(a):
    v = a.value(rank=0, dtype="")
    moves = [("psum", v.dims, v.pending.replace(axis, "")) for axis in v.pending]
    moves += [("pending", v.dims, v.pending + axis) for axis in v.unused]
    can_split = [a.sizes[letter] % 8 == 0 for letter in letters(v.dims)]
    for k, (letter, axes) in enumerate(v.dims):
        if axes:
            gathered = replaced(v.dims, k, (letter, axes[:-1]))
            moves += [("all_gather", gathered, v.pending)] * 2
            for j, (other, others) in enumerate(v.dims):
                if j != k and can_split[j] and others < axes[-1]:
                    moves.append(("all_to_all", replaced(gathered, j, (other, others + axes[-1])), v.pending))
        for axis in v.unused + v.pending if can_split[k] else "":
            if axes < axis:
                operation = "slice" if axis in v.unused else "psum_scatter"
                moves.append((operation, replaced(v.dims, k, (letter, axes + axis)), v.pending.replace(axis, "")))
    if moves:
        operation, dims, pending = a.choose(moves)
        line = f"shardops.{operation}('{v} -> {spec(dims, pending)}', {v.name})"
        a.put(v.name if a.chance(10) else line, dims, pending, v.dtype)


def contract(a):
    v = a.value()
    shared, new = [dim for dim in v.dims if not a.chance(3)], a.dim(letters(v.dims), v.unused)
    w = a.parameter([*shared, new])
    summed = [dim for dim in shared if a.chance(2)]
    dims, pending = [dim for dim in (*v.dims, new) if dim not in summed], v.pending + "".join(a for _, a in summed)
    a.put(f"shardops.einsum_unreduced('{v}, {w} -> {spec(dims, pending)}', {v.name}, {w.name})", dims, pending)


def total(a, dtype=""):
    v = a.value(dtype=dtype)
    dims = [dim for dim in v.dims[1:] if a.chance(2)]
    pending = v.pending + "".join(axes for letter, axes in v.dims if letter not in letters(dims))
    a.put(f"shardops.sum_unreduced('{v} -> {spec(dims, pending)}', {v.name})", dims, pending, v.dtype)


def largest(a):
    v = a.value(where=lambda v: not v.pending)
    dims = [dim for dim in v.dims[1:] if a.chance(2)]
    form = a.choose(["pmax('{0}', lax.stop_gradient({1}))", "pmax('{0}', {1})", "any('{0}', {1} > 2.0)"])
    line = "shardops." + form.format(f"{v} -> {spec(dims)}", v.name)
    a.put(f"{line}.astype(jnp.float32)" if "any" in form else line, dims)


def first_largest(a):
    v = a.value(where=lambda v: not v.pending)
    dims = replaced(v.dims, a.choose(range(len(v.dims))))
    a.put(f"shardops.argmax('{v} -> {spec(dims)}', {v.name}).astype(jnp.int32)", dims, "", "i32")


def look_up(a):
    table = a.value(where=lambda v: not v.pending)
    k = a.choose(range(len(table.dims)))
    others, marked = replaced(table.dims, k), [spec([dim]) for dim in table.dims]
    marked[k] = f"[{marked[k]}]"
    if a.size(table.dims[k : k + 1]) >= 8:
        ids = a.parameter(others if others and a.chance(2) else [a.dim(letters(table.dims), table.unused)], "i32")
        dims, pending = ids.dims if ids.dims == others else (*ids.dims, *others), table.dims[k][1]
        text = f"{' '.join(marked)}, {ids} -> {spec(dims, pending)}"
        a.put(f"shardops.index_unreduced('{text}', {table.name}, {ids.name})", dims, pending)


def kernel(a):
    v = a.value(where=lambda v: not v.pending)
    k = a.choose([k for k, (_, axes) in enumerate(v.dims) if not axes] or [-1])
    if k >= 0 and a.chance(2):
        new = a.letter(4, letters(v.dims))
        first, second = replaced(v.dims, k), (*replaced(v.dims, k), (new, ""))
        function = f"lambda x: (jnp.sum(x, axis={k}), jnp.stack([jnp.max(x, axis={k})] * 4, axis=-1))"
        name, text = a.new_name(), f"'{v} -> {spec(first)}, {spec(second)}', {function}, {v.name}, {new}=4"
        a.lines.append(f"{name} = shardops.local({text})")
        a.put(f"{name}[0]", first)
        a.put(f"{name}[1]", second)
    else:
        function = f"lambda x: jnp.cumsum(jnp.sin(x), axis={k})" if k >= 0 else "jnp.sin"
        a.put(f"shardops.local('{v} -> {v}', {function}, {v.name})", v.dims)


def regroup(a):
    """A device's rows in another order, and back or summed up, so that the order does not matter."""
    v = a.value()
    k = a.choose(range(len(v.dims)))
    (letter, axes), name = v.dims[k], a.new_name()
    if len(axes) == 1 and a.chance(2):
        count, size = (axes, axes), ""
    else:
        count, size = (a.letter(2, letters(v.dims)), ""), "2"
        axes = axes if a.sizes[letter] >= 16 else None
    if axes is not None:
        dims = replaced(v.dims, k, count, ("rest", "" if count[1] else axes))
        a.sizes["rest"] = a.sizes[letter] // 2 if size else a.sizes[letter]
        a.lines.append(
            f"{name} = shardops.regroup('{v} -> {spec(dims, v.pending)}', {v.name}{size and f', {count[0]}=2'})"
        )
        text = spec(dims, v.pending)
        moved = text.replace(spec([count]), f"[{spec([count])}]", 1) if count[1] else None
        back = name
        if moved:
            name = f"shardops.ppermute('{moved} -> {moved}', {name}, 1)"
            back = f"shardops.ppermute('{moved} -> {moved}', {name}, -1)"
        if a.chance(2):
            a.put(f"shardops.regroup('{text} -> {v}', {back}, {letter}={a.sizes[letter]})", v.dims, v.pending)
        else:
            dims, pending = replaced(v.dims, k), v.pending + axes
            a.put(f"shardops.sum_unreduced('{text} -> {spec(dims, pending)}', {name})", dims, pending)


def inner_gradient(a):
    v = a.value(rank=0)
    w = a.choose(["w", "w * 2.0"] if v.pending else ["jnp.sin(w)", "w * w", "w * 2.0"])
    a.put(f"shardops.grad(lambda w: {a.term(v, f'({w})')})({v.name})", v.dims, v.unused)


def pull_back(a):
    v = a.value(where=lambda v: not v.pending)
    w, cotangent, name = a.parameter(v.dims), a.parameter(v.dims).name, a.new_name()
    a.lines.append(f"{name} = shardops.vjp(lambda x, w: jnp.sin(x) * w, {v.name}, {w.name})[1]")
    if v.unused and not a.chance(6):
        cotangent = f"shardops.pending('{v} -> {spec(v.dims, v.unused)}', {cotangent})"
    a.put(f"{name}({cotangent})[{a.choose([0, 1])}]", v.dims, v.unused)


def chunks(a):
    xs = a.value(rank=2, where=lambda v: not v.pending and not v.dims[0][1])
    if not xs.dims[0][1]:
        w, others = a.parameter(xs.dims[1:]), a.parameter(xs.dims)
        row = Value("jnp.sin(x * w) * y", xs.dims[1:])
        text = f"lambda w, x, y: {a.term(row, f'({row.name})')}"
        a.put(f"shardops.sum_over_chunks({text}, {w.name}, {xs.name}, {others.name})", (), AXES)


# Plain JAX, device by device: right for some values, wrong for others. Of each kind, first what is linear.
def forms(text):
    return [part.strip().splitlines() for part in text.split("---")]


SAME_TYPE = forms("""
-{0}
{0} * 2.0
{0} + {0}
jax.checkpoint(jnp.negative)({0})
jax.jit(jnp.negative)({0})
{0} * jnp.ones_like({0})
{0} + jnp.zeros({0}.shape)
{0}.astype(jnp.bfloat16).astype(jnp.float32) * 0.0 + {0}
{0} * ({0}.size / 8)
---
jnp.sin({0})
jnp.tanh({0})
{0} * {0}
{0} + 1.0
jnp.maximum({0}, 0.0)
jax.nn.silu({0})
lax.while_loop(lambda c: jnp.max(c) < 3.0, lambda c: jnp.abs(c) * 2.0 + 1.0, {0})
""")
ALONG = forms("""
jnp.cumsum({0}, axis={k})
jnp.flip({0}, axis={k})
jnp.roll({0}, 1, axis={k})
{0} - jnp.mean({0}, axis={k}, keepdims=True)
lax.associative_scan(jnp.add, {0}, axis={k})
{0} / {0}.shape[{k}]
({0} if {0}.shape[{k}] > 4 else -{0})
{0} * (1.0 if {0}.shape[{k}] > 4 else 2.0)
{0} * min({0}.shape[{k}], 8)
{0} / ({0}.shape[{k}] * {devices})
{0} * {devices} / ({devices} + 1.0)
lax.fori_loop(0, {0}.shape[{k}], lambda i, c: c * 0.9, {0})
{0} + 0.0 * jnp.squeeze({0}).reshape({0}.shape)
{0} / jnp.sum(jnp.ones_like({0}), axis={k}, keepdims=True)
{0} - lax.slice_in_dim({0}, 0, 1, axis={k})
jnp.concatenate([lax.slice_in_dim({0}, 1, None, axis={k}), lax.slice_in_dim({0}, 0, 1, axis={k})], axis={k})
jnp.moveaxis(lax.scan(lambda c, r: (c + r, c + 2.0 * r), jnp.zeros_like(jnp.take({0}, 0, {k})), jnp.moveaxis({0}, {k}, 0))[1], 0, {k})
jnp.stack([2.0 * row for row in jnp.moveaxis({0}, {k}, 0)], axis={k})
jnp.swapaxes(jnp.swapaxes({0}, 0, {k}) * 2.0, 0, {k})
jnp.take({0}, jnp.arange({0}.shape[{k}])[::-1], axis={k})
---
jax.nn.softmax({0}, axis={k})
jnp.sort({0}, axis={k})
jnp.argsort({0}, axis={k}).astype(jnp.float32)
{0} / jnp.sqrt(1.0 + jnp.sum({0} * {0}, axis={k}, keepdims=True))
{0} * jnp.max({0}, axis={k}, keepdims=True)
jnp.moveaxis(lax.map(jnp.sin, jnp.moveaxis({0}, {k}, 0)), 0, {k})
jax.vmap(lambda r: jnp.sin(r - jnp.mean(r)), {k}, {k})({0})
{0} + jnp.expand_dims(jnp.arange({0}.shape[{k}], dtype=jnp.float32), {rest})
{0} + lax.broadcasted_iota(jnp.float32, {0}.shape, {k})
{0} + jnp.expand_dims({position}, {rest})
jnp.where(lax.broadcasted_iota(jnp.int32, {0}.shape, {k}) < 2, {0}, 0.0)
{0} + jnp.expand_dims(jnp.ones({0}.shape[{k}]), {rest})
lax.reduce_window({0}, 0.0, lax.add, [3 if j == {k} else 1 for j in range({0}.ndim)], [1] * {0}.ndim, "SAME")
jnp.fft.fft({0}, axis={k}).real
lax.fori_loop(0, {0}.shape[{k}], lambda i, c: c + jnp.sin(lax.dynamic_slice_in_dim({0}, i, 1, axis={k})), {0})
""")
# Numbers that stand in a row of as many as a dim has on a device.
POSITIONS = """
jnp.cumsum(jnp.ones({n}))
jnp.linspace(0.0, 1.0, {n})
jnp.zeros({n}).at[0].add(1.0)
jnp.full({n}, 0.5)
jnp.full({n}, 1.0 / {n})
jnp.tri({n})[0]
jnp.sum(jnp.tri({n}), axis=0)
jnp.argsort(jnp.zeros({n})).astype(jnp.float32)
jnp.pad(jnp.ones({n} - 1), (1, 0))
jnp.concatenate([jnp.zeros(1), jnp.ones({n} - 1)])
jnp.repeat(jnp.arange(4.0), {n} // 4)
lax.scan(lambda c, _: (c + 1.0, c), 0.0, None, length={n})[1]
lax.dynamic_update_slice(jnp.zeros({n}), jnp.ones(1), (0,))
lax.associative_scan(jnp.add, jnp.ones({n}))
lax.reduce_window(jnp.ones({n}), 0.0, lax.add, (3,), (1,), "SAME")
lax.fori_loop(0, {n}, lambda i, c: c.at[i].set(1.0 * i), jnp.zeros({n}))
jax.nn.one_hot(0, {n})
jnp.arange(16.0)[:{n}]
jnp.array([1.0 * i for i in range({n})])
jnp.ones({n}) * min({n}, 8)
""".strip().splitlines()
WITHOUT = forms("""
jnp.sum({0}, axis={k})
jnp.mean({0}, axis={k})
jnp.take({0}, 0, axis={k})
jnp.moveaxis({0}, {k}, 0)[-1]
sum(jnp.moveaxis({0}, {k}, 0))
lax.index_in_dim({0}, 1, {k}, keepdims=False)
lax.scan(lambda c, r: (c + r, None), jnp.zeros_like(jnp.take({0}, 0, {k})), jnp.moveaxis({0}, {k}, 0))[0]
jnp.tensordot({0}, jnp.ones({0}.shape[{k}]), [[{k}], [0]])
---
jnp.max({0}, axis={k})
jnp.median({0}, axis={k})
jnp.var({0}, axis={k})
jax.nn.logsumexp({0}, axis={k})
jnp.argmax({0}, axis={k}).astype(jnp.float32)
jnp.all({0} > -1.5, axis={k}).astype(jnp.float32)
jnp.sum(jnp.ones_like({0}), axis={k})
lax.fori_loop(0, {0}.shape[{k}], lambda i, c: c + jnp.sin(jnp.take({0}, i, axis={k})), 0.0 * jnp.take({0}, 0, axis={k}))
lax.composite(lambda x: jnp.sum(jnp.sin(x), axis={k}), 'our.sum')({0})
lax.reduce(jnp.abs({0}), 0.0, lax.max, [{k}])
""")
PAIRS = forms("""
{0} + {1}
{0} - {1}
lax.cond(jnp.arange(3)[0] > 1, lambda x, y: x, lambda x, y: y, {0}, {1})
jnp.where(jnp.arange(3)[0] > 1, {0}, {1})
lax.fori_loop(0, 3, lambda i, c: 0.5 * c + {1}, {0})
---
{0} * {1}
jnp.where({1} > 0, {0}, 0.0)
jnp.where({1} > 0, {0}, {1})
{0} / (1.0 + {1} * {1})
jnp.minimum({0}, {1})
{0} + lax.stop_gradient({1})
lax.cond(jnp.sum({1}) > 0, lambda x: -x, lambda x: x, {0})
lax.cond({1}.ravel()[0] > 0, lambda x: jnp.sin(x), lambda x: 2.0 * x, {0})
lax.while_loop(lambda c: jnp.max(c) < 3.0, lambda c: jnp.abs(c) * 2.0 + {1} * {1} + 1.0, {0})
lax.custom_linear_solve(lambda x: x * (1.0 + {1} * {1}), {0}, lambda f, b: b / (1.0 + {1} * {1}), symmetric=True)
""")


def fill(a, of, v, *names, **places):
    linear, others = of
    return a.choose(linear if v.pending and not a.chance(3) else linear + others).format(v.name, *names, **places)


def same_type(a):
    v = a.value(rank=0)
    a.put(fill(a, SAME_TYPE, v), v.dims, v.pending)


def along(a):
    v = a.value()
    k = a.axis(v)
    position = a.choose(POSITIONS).format(n=f"{v.name}.shape[{k}]")
    devices = " * ".join(f"shardops.axis_size('{axis}')" for axis in v.dims[k][1]) or "1"
    rest = [j for j in range(len(v.dims)) if j != k]
    a.put(fill(a, ALONG, v, k=k, rest=rest, position=position, devices=devices), v.dims, v.pending)


def without(a):
    v = a.value()
    k = a.axis(v)
    text = fill(a, WITHOUT, v, k=k)
    if not (a.gradient and "composite" in text):  # JAX does not differentiate one
        a.put(text, replaced(v.dims, k), v.pending)


def pair(a):
    v = a.value(rank=0)
    alike = [u for u in a.values if letters(u.dims) == letters(v.dims) and u.dtype == "f32" and u != v]
    u = a.choose(alike) if alike and not a.chance(3) else a.parameter(v.dims)
    a.put(fill(a, PAIRS, v, u.name), v.dims, {*v.pending, *u.pending})


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


def zeros(a):
    v = a.value()
    new = a.choose([a.made(v.dims, v.pending), a.made(v.dims, "", "full")])
    a.put(f"{v.name} + {new}", v.dims, v.pending)


def divide(a):
    v = a.value()
    k = a.axis(v)
    (_, axes), size = v.dims[k], a.size(v.dims[k : k + 1])
    factor = a.choose([n for n in (2, 4, 8, 1) if (size // (8 if axes else 1)) % n == 0])
    first, second = a.choose([(size // factor, factor), (factor, size // factor)])
    wrong = second % 8 == 0 and (first % 8 or a.chance(3))
    one = a.letter(first, letters(v.dims))
    dims = [(one, "" if wrong else axes), (a.letter(second, [*letters(v.dims), one]), axes if wrong else "")]
    sizes = a.choose([f"{first}, -1", f"-1, {second}"] + [f"{first}, {second}"] * (not axes))
    shape = [f"*{v.name}.shape[:{k}]"] * (k > 0) + [sizes] + [f"*{v.name}.shape[{k + 1}:]"] * (k + 1 < len(v.dims))
    a.put(f"{v.name}.reshape({', '.join(shape)})", replaced(v.dims, k, *dims), v.pending)


def merge(a):
    v = a.value(rank=2)
    k = a.choose(range(len(v.dims) - 1))
    run = v.dims[k : k + 2]
    dim = a.letter(a.size(run), letters(v.dims)), max(axes for _, axes in run)
    shape = [f"*{v.name}.shape[:{k}]"] * (k > 0) + ["-1"] + [f"*{v.name}.shape[{k + 2}:]"] * (k + 2 < len(v.dims))
    a.put(f"{v.name}.reshape({', '.join(shape)})", (*v.dims[:k], dim, *v.dims[k + 2 :]), v.pending)


def reshape_like(a):
    v = a.value(rank=0)
    alike = [u for u in a.values if a.size(u.dims) == a.size(v.dims) and u.dims != v.dims]
    if alike:
        u = a.choose(alike)
        a.put(f"{v.name}.reshape({u.name}.shape)", u.dims, v.pending)


def transpose(a):
    v = a.value(rank=2)
    order = tuple(a.draw(st.permutations(range(len(v.dims)))))
    a.put(f"jnp.transpose({v.name}, {order})", [v.dims[k] for k in order], v.pending)


def stack(a):
    v = a.value()
    k = a.choose(range(len(v.dims) + 1))
    new = a.letter(2, letters(v.dims)), ""
    a.put(f"jnp.stack([{v.name}, -{v.name}], axis={k})", (*v.dims[:k], new, *v.dims[k:]), v.pending)


def twice(a):
    v = a.value()
    k = a.axis(v)
    times = ", ".join("2" if j == k else "1" for j in range(len(v.dims)))
    form = a.choose(
        [f"repeat({{0}}, 2, axis={k})", f"tile({{0}}, ({times}))", f"concatenate([{{0}}, {{0}}], axis={k})"]
    )
    dim = a.letter(2 * a.size(v.dims[k : k + 1]), letters(v.dims)), v.dims[k][1]
    a.put("jnp." + form.format(v.name), replaced(v.dims, k, dim), v.pending)


def part(a):
    v = a.value()
    k = a.axis(v)
    (_, axes), size = v.dims[k], a.size(v.dims[k : k + 1])
    few = a.chance(2) or size % (16 if axes else 2)
    index = a.choose(
        ["0:2", "-2:", "1:3"] if few else ["::2", f": {v.name}.shape[{k}] // 2", f"{v.name}.shape[{k}] // 2 :"]
    )
    dim = (a.letter(min(2, size) if few else size // 2, letters(v.dims)), "" if few else axes)
    a.put(v.at(k, index), replaced(v.dims, k, dim), v.pending)


def write(a):
    v = a.value(where=lambda v: not v.pending)
    k = a.axis(v)
    base = a.choose([v.name, f"jnp.zeros({v.name}.shape)", f"jnp.zeros_like({v.name})"])
    index = a.choose(["0", "-1", ":2", "1:3", "array"])
    if index == "array":
        index = a.parameter([a.dim(letters(v.dims), AXES if a.chance(3) else "")], "i32").name
    what = a.choose(["set(1.0)", "add(1.0)", "multiply(2.0)"])
    a.put(f"{v.name} + {base}.at[{':, ' * k}{index}].{what}", v.dims)


def gather(a):
    v = a.value()
    k = a.axis(v)
    form = a.choose(["take", "along", "rows", "segments", "update", "sort"])
    if a.size(v.dims[k : k + 1]) < 8:
        return
    if form == "take":
        ids = a.parameter([a.dim(letters(v.dims), v.unused if a.chance(2) else "")], "i32")
        text = a.choose([f"jnp.take({v.name}, {ids.name}, axis={k})", v.at(k, ids.name)])
        a.put(text, replaced(v.dims, k, *ids.dims), v.pending)
    elif form == "along":
        ids = a.parameter(replaced(v.dims, k, a.dim(letters(v.dims), v.dims[k][1])), "i32")
        a.put(f"jnp.take_along_axis({v.name}, {ids.name}, axis={k})", ids.dims, v.pending)
    elif form == "rows" and len(v.dims) > 1 and a.size(v.dims[1:2]) >= 8:
        ids = a.parameter(v.dims[:1], "i32")
        rows = a.choose(["{0}[jnp.arange({0}.shape[0]), {1}]", "jax.vmap(lambda r, i: r[i])({0}, {1})"])
        a.put(rows.format(v.name, ids.name), replaced(v.dims, 1), v.pending)
    elif form == "segments":
        ids = a.parameter(v.dims[:1], "i32")
        dims = ((a.letter(8, letters(v.dims)), ""), *v.dims[1:])
        a.put(f"jax.ops.segment_sum({v.name}, {ids.name}, num_segments=8)", dims, v.pending)
    elif form == "update":
        at = a.parameter(a.choose([(), v.dims[:1]]), "i32")
        index = at.name if not at.dims else f"{at.name}[0]"
        update = f"lax.dynamic_slice_in_dim({v.name}, {index}, 1, axis={k})"
        a.put(f"lax.dynamic_update_slice_in_dim({v.name}, {update}, 0, {k})", v.dims, v.pending)
    elif form == "sort" and not v.pending:
        u = a.parameter(v.dims)
        a.put(f"jnp.take_along_axis({v.name}, jnp.argsort({u.name}, axis={k}), axis={k})", v.dims)


def product(a):
    v = a.value()
    if len(v.dims) == 2 and a.chance(3):
        other = a.letter(a.size(v.dims[:1]), letters(v.dims)), ""
        a.put(f"{v.name} @ {v.name}.T", [v.dims[0], other], v.pending)
    else:
        new = a.dim(letters(v.dims), v.unused)
        w = a.parameter([v.dims[-1], new])
        a.put(f"{v.name} @ {w.name}", [*v.dims[:-1], new], v.pending)


def batched_product(a):
    v = a.value(rank=2)
    w = a.parameter(v.dims)
    first, last = "abcd"[: len(v.dims)], a.choose("abcd"[: len(v.dims)])
    dims = [dim for dim, letter in zip(v.dims, first) if letter != last]
    a.put(f"jnp.einsum('{first},{first}->{first.replace(last, '')}', {v.name}, {w.name})", dims, v.pending)


def carried(a):
    """A scan over a leading dim whose carry starts as zeros of a type."""
    v = a.value()
    start = a.choose([a.made(v.dims[1:], v.pending), a.made(v.dims[1:]), f"jnp.zeros({v.name}.shape[1:])"])
    step = a.choose(["c + r", "jnp.sin(c) + r", "jnp.flip(c) + r", "r", "c * 0.5"])
    a.put(f"lax.scan(lambda c, r: ({step}, None), {start}, {v.name})[0]", v.dims[1:], v.pending)


def counted(a):
    """How often a loop ran, which a device decides by what it holds."""
    v = a.value(rank=0, where=lambda v: not v.pending)
    if not a.gradient:
        text = "lax.while_loop(lambda c: jnp.max(c[0]) < 9.0, lambda c: (jnp.abs(c[0]) * 2.0 + 1.0, c[1] + 1.0), ({0}, 0.0))"
        a.put(text.format(v.name) + "[1]", ())


def custom(a):
    v = a.value(where=lambda v: not v.pending)
    name = a.new_name().replace("v", "f")
    if a.chance(4):
        tangent = a.choose(
            ["jnp.cos(p[0]) * t[0]", "t[0] - jnp.mean(t[0], axis=0, keepdims=True)", "lax.psum(t[0], 'd')"]
        )
        a.lines += [f"{name} = jax.custom_jvp(jnp.sin)", f"{name}.defjvp(lambda p, t: (jnp.sin(p[0]), {tangent}))"]
    else:
        forward = a.choose(["jnp.sin(x)", "jnp.sin(x)", "jnp.sin(x) - jnp.mean(x, axis=0, keepdims=True)"])
        back = [
            "g * jnp.cos(x)",
            "jnp.clip(g, -1.0, 1.0)",
            "g - jnp.mean(g, axis=0, keepdims=True)",
            "lax.psum(g, 'd')",
        ]
        back = a.choose([*back, "g * jnp.sum(g)", "g + 1.0", "g * 2.0", "jnp.where(x > 0, g, 0.0)"])
        a.lines += [
            f"{name} = jax.custom_vjp(jnp.sin)",
            f"{name}.defvjp(lambda x: ({forward}, x), lambda x, g: ({back},))",
        ]
    a.put(f"{name}({v.name})", v.dims)


def reference(a):
    """A sum in a mutable reference."""
    v = a.value()
    if not a.gradient:  # JAX differentiates through no reference that is made there
        name = a.new_name().replace("v", "r")
        what = a.choose(["jnp.sum({0}, axis=0)", "{0}[0]", "{0}[0] * 2.0"]).format(v.name)
        a.lines += [f"{name} = jax.new_ref(jnp.zeros({v.name}.shape[1:]))", f"{name}[...] += {what}"]
        a.put(f"{name}[...]", v.dims[1:], v.pending)


def integer(a):
    if a.chance(3):
        total(a, "i32")
    v = a.value(rank=0, dtype="i32")
    ops = [
        "{0} * 2",
        "{0} // 2",
        "lax.div({0}, jnp.int32(2))",
        "{0} % 3",
        "{0} + {0}",
        "{0} >> 1",
        "{0} << 1",
        "-{0}",
        "~{0}",
    ]
    a.put(a.choose(ops).format(v.name), v.dims, v.pending, "i32")


def as_float(a):
    v = a.value(rank=0, dtype="i32")
    a.put(f"{v.name}.astype(jnp.float32)", v.dims, v.pending)


def one_hot(a):
    v = a.value(dtype="i32", where=lambda v: not v.pending)
    a.put(f"jax.nn.one_hot({v.name}, 8)", (*v.dims, (a.letter(8, letters(v.dims)), "")))


STRINGS = [*[redistribute] * 5, contract, contract, total, largest, first_largest, look_up, kernel, regroup]
STRINGS += [inner_gradient, pull_back, chunks]
PLAIN = [same_type, same_type, *[pair] * 3, broadcast, zeros, *[along] * 3, without, without, transpose, stack, twice]
PLAIN += [*[divide] * 3, merge, merge, reshape_like, part, part, write, write, *[gather] * 3, product, batched_product]
PLAIN += [carried, counted, custom, custom, reference, integer, integer, as_float, one_hot]


@st.composite
def programs(draw):
    a = Author(draw, gradient=draw(st.integers(0, 2)) == 2)
    a.parameter()
    while len(a.lines) < 9 and draw(st.integers(0, 5)):
        a.choose(STRINGS if draw(st.booleans()) else PLAIN)(a)
    results = gradients(a) if a.gradient else values(a)
    source = "\n".join(a.lines)
    parameters = [value for value in a.parameters if value in results or re.search(rf"\b{value.name}\b", source)]
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
        ]
        result, returned = "Result", f"Result({names[0]}, ({', '.join(names[1:])},))"
    arguments = ", ".join(f"{value.name}: {value.type}" for value in parameters)
    lines += [
        "@typed",
        f"def program({arguments}) -> {result}:",
        *(f"    {line}" for line in a.lines),
        f"    return {returned}",
    ]
    sizes = ", ".join(f"{name}={size}" for name, size in a.sizes.items())
    return Program("\n".join([f"# {sizes}", *lines]) + "\n", a.sizes, parameters)


def leaves(a):
    """The values that no line uses."""
    used = re.findall(r"\b[vx]\d+\b", "\n".join(line.split(" = ", 1)[-1] for line in a.lines))
    computed = [value for value in a.values if value.name not in used and value not in a.parameters]
    return computed or a.parameters[:1]


def values(a):
    """The results: what no line uses, its sums taken."""
    for value in leaves(a):
        if value.pending:
            line = f"shardops.psum('{value} -> {spec(value.dims)}', {value.name})"
            a.put(value.name if a.chance(12) else line, value.dims, "", value.dtype)
    return leaves(a)


def gradients(a):
    """The results: a loss of what no line uses, and its gradients, their sums taken."""
    terms = [a.term(value) for value in leaves(a) if value.dtype == "f32"] or [a.made((), AXES)]
    source = "\n".join([*a.lines, *terms])
    weights = [x for x in a.parameters if x.dtype == "f32" and re.search(rf"\b{x.name}\b", source)] or a.parameters[:1]
    names = ", ".join(value.name for value in weights)
    a.lines = [f"def loss({names}):", *(f"    {line}" for line in a.lines), f"    return {' + '.join(terms)}", ""]
    a.lines += [f"value, ({names},) = shardops.value_and_grad(loss, {tuple(range(len(weights)))})({names})"]
    results = [Value("value", (), AXES), *(value._replace(pending=value.unused) for value in weights)]
    for value in results:
        if value.pending and not a.chance(20):
            a.lines.append(f"{value.name} = shardops.psum('{value} -> {spec(value.dims)}', {value.name})")
    return [value._replace(pending="") for value in results]
