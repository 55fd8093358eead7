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
from shardlib.products import Adapted
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

    def same(self, text, x, *_, **__):
        return x

    all_gather = psum = psum_scatter = slice = pending = all_to_all = ppermute = same

    def reduce(self, function, text, x):
        (before,), (after,) = self.names(text)
        before = range(x.ndim) if before == ["..."] else before
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

    def product(self, text, x, w):
        if isinstance(w, Adapted):  # the rank stands after what is contracted in a, before the rest in b
            (of_x, of_w), (result,) = self.names(text)
            both = [name for name in of_w if name in of_x and name in result]
            summed = [name for name in of_w if name not in result]
            rest = [name for name in of_w if name not in both + summed]
            letters = dict(zip([*of_w, "N"], "abcdefghijkl"))
            a, b, whole = (
                "".join(letters[name] for name in names) for names in ([*both, *summed, "N"], [*both, "N", *rest], of_w)
            )
            w = w.base + w.scale * jnp.einsum(f"{a},{b}->{whole}", w.a, w.b)
        return self.einsum_unreduced(text, x, w)

    def index_unreduced(self, text, table, ids):
        (names, of_ids), _ = self.names(text)
        (axis,) = (k for k, name in enumerate(names) if name[0] == "[")
        held, ids = (ids >= 0) & (ids < table.shape[axis]), jnp.clip(ids, 0, table.shape[axis] - 1)
        if names[:axis] + names[axis + 1 :] == of_ids:
            rows = jnp.take_along_axis(table, jnp.expand_dims(ids, axis), axis).squeeze(axis)
        else:
            rows = jnp.moveaxis(table, axis, 0)[ids]
        return jnp.where(held.reshape(held.shape + (1,) * (rows.ndim - held.ndim)), rows, 0)

    def shape(self, names, sizes):
        """The sizes of these dims; one that is not known is -1."""
        known = self.sizes | sizes
        return [int(name) if name.isdigit() else known.get(name, -1) for name in names]

    def regroup(self, text, x, **sizes):
        return x.reshape(self.shape(self.names(text)[1][0], sizes))

    def zeros(self, text, dtype, **sizes):
        return jnp.zeros(self.shape(self.names(text)[0][0], sizes), dtype.dtype)

    def index(self, axis):
        return jnp.arange(1)

    def local(self, text, function, *operands, **_):
        return function(*operands)

    def each(self, axis, function, *trees):
        return jax.tree.map(lambda y: y[None], function(*jax.tree.map(lambda x: x[0], trees)))

    def sum_over_chunks(self, function, shared, x, others):
        return sum(function(shared, *chunk) for chunk in zip(x, lax.stop_gradient(others)))

    def axis_size(self, axis):
        return 1

    grad, value_and_grad, vjp = map(staticmethod, (jax.grad, jax.value_and_grad, jax.vjp))


class WholeLax:
    """jax.lax, whose transfers do nothing."""

    def __getattr__(self, name):
        return {"psum": lambda x, axis: x}.get(name) or getattr(lax, name)


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
    def free(self):
        """The axes along which it is the same."""
        return "".join(axis for axis in AXES if axis not in self.axes + self.pending)

    @property
    def type(self):
        return f"{self.dtype}['{self}']"


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

    @property
    def by_size(self):
        """Whether Python decides something by the size of a part, as min(x.shape[0], 8) does."""
        return re.search(r" > 4 else |[ (]min\(", self.source) is not None

    def arguments(self):
        """The same random arrays each time; integers are indices that each dim has."""
        random = np.random.default_rng(7)
        for value in self.parameters:
            shape = [self.sizes[letter] for letter, _ in value.dims]
            floats = value.dtype == "f32"
            yield random.normal(size=shape).astype(np.float32) if floats else random.integers(0, 8, shape, np.int32)

    def build(self, whole=False):
        names = dict(jax=jax, jnp=jnp, lax=lax, shardops=shardops, typed=typed)
        if whole:
            names = dict(jax=jax, jnp=jnp, lax=WholeLax(), shardops=Whole(self.sizes), typed=lambda function: function)
        names |= dict(f32=f32, i32=i32, pytree_dataclass=pytree_dataclass)
        file = f"/program/{abs(hash(self.source))}.py"
        linecache.cache[file] = len(self.source), None, self.source.splitlines(True), file  # for @typed, which reads it
        exec(compile(self.source, file, "exec"), names)
        return names["program"]


# -- What its author writes between the strings ------------------------------------------------------------------------
# Forms take a value {x} and one of its dims {k}, of size {n} on a device; they are right for some values, wrong for
# others. A title says the result's dims. What is "not linear" is wrong for each sum that is owed. Names in { } are
# properties of `Places`.
FORMS = """
# the same
-{x}
{x} * 2.0
{x} + {x}
{x} + {zeros}
{x} + jnp.zeros({x}.shape)
{x} * jnp.ones_like({x})
{x} * {row}
{x} - {y}
{x} + {y}
jax.jit(jnp.negative)({x})
jax.checkpoint(jnp.negative)({x})
jnp.where(jnp.arange(3)[0] > 1, {x}, {y})
lax.cond(jnp.arange(3)[0] > 1, lambda x, y: x, lambda x, y: y, {x}, {y})
lax.fori_loop(0, 3, lambda i, c: 0.5 * c + {y}, {x})
{x}.astype(jnp.bfloat16).astype(jnp.float32) * 0.0 + {x}

# the same, not linear
jnp.sin({x})
{x} * {x}
{x} + 1.0
{x} * {y}
{x} + {row}
{x} / (1.0 + {y} * {y})
jnp.minimum({x}, {y})
jnp.where({y} > 0, {x}, 0.0)
jnp.where({y} > 0, {x}, {y})
{x} + lax.stop_gradient({y})
lax.cond(jnp.sum({y}) > 0, lambda x: -x, lambda x: x, {x})
lax.cond({y}.ravel()[0] > 0, lambda x: jnp.sin(x), lambda x: 2.0 * x, {x})
lax.switch(jnp.argmax({y}.ravel()) % 3, [jnp.sin, jnp.cos, lambda x: 2.0 * x], {x})
lax.while_loop(lambda c: jnp.max(c) < 3.0, lambda c: jnp.abs(c) * 2.0 + {y} * {y} + 1.0, {x})
lax.custom_linear_solve(lambda x: x * (1.0 + {y} * {y}), {x}, lambda f, b: b / (1.0 + {y} * {y}), symmetric=True)
def {f}(x: {type}) -> {type}: return jnp.sin(x); {f}({x})
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x) - jnp.mean(x), x), lambda x, g: (g,)); {f}({x})

# the same, along dim k
jnp.cumsum({x}, axis={k})
jnp.flip({x}, axis={k})
jnp.roll({x}, 1, axis={k})
{x} - jnp.mean({x}, axis={k}, keepdims=True)
{x} - lax.slice_in_dim({x}, 0, 1, axis={k})
lax.associative_scan(jnp.add, {x}, axis={k})
jnp.concatenate([lax.slice_in_dim({x}, 1, None, axis={k}), lax.slice_in_dim({x}, 0, 1, axis={k})], axis={k})
jnp.moveaxis(lax.scan(lambda c, r: (c + r, c + 2.0 * r), 0.0 * {x}.sum({k}), jnp.moveaxis({x}, {k}, 0))[1], 0, {k})
jnp.stack([2.0 * row for row in jnp.moveaxis({x}, {k}, 0)], axis={k})
jnp.take({x}, jnp.arange({n})[::-1], axis={k})
lax.dynamic_update_slice_in_dim({x}, lax.dynamic_slice_in_dim({x}, {scalar}, 1, axis={k}), 0, {k})
lax.dynamic_update_slice_in_dim({x}, lax.dynamic_slice_in_dim({x}, {by_row}[0], 1, axis={k}), 0, {k})

# the same, counted
{x} / {n}
{x} * ({x}.size / 8)
{x} / ({n} * {devices})
{x} * {devices} / ({devices} + 1.0)
{x} * min({n}, 8)
{x} * (1.0 if {n} > 4 else 2.0)
{x} * jnp.sum(jnp.ones(min({n}, 8)))
lax.fori_loop(0, min({n}, 8), lambda i, c: c * 0.9, {x})
{x} * jnp.sum(jnp.arange(9.0)[: min({n}, 8)])
({x} if {n} > 4 else -{x})
{x} / jnp.sum(jnp.ones_like({x}), axis={k}, keepdims=True)
lax.fori_loop(0, {n}, lambda i, c: c * 0.9, {x})
lax.fori_loop(0, {n} * {devices}, lambda i, c: c * 0.9, {x})
lax.fori_loop(0, {n} + 0 * {devices}, lambda i, c: c * 0.9, {x})

# the same, along dim k, not linear
jax.nn.softmax({x}, axis={k})
jnp.sort({x}, axis={k})
jnp.argsort({x}, axis={k}).astype(jnp.float32)
jnp.take_along_axis({x}, jnp.argsort({y}, axis={k}), axis={k})
{x} * jnp.max({x}, axis={k}, keepdims=True)
jnp.moveaxis(lax.map(jnp.sin, jnp.moveaxis({x}, {k}, 0)), 0, {k})
jnp.moveaxis(lax.map(jnp.sin, jnp.moveaxis({x}, {k}, 0), batch_size=2), 0, {k})
jax.vmap(lambda r: jnp.sin(r - jnp.mean(r)), {k}, {k})({x})
{x} + lax.broadcasted_iota(jnp.float32, {x}.shape, {k})
jnp.where(lax.broadcasted_iota(jnp.int32, {x}.shape, {k}) < 2, {x}, 0.0)
lax.reduce_window({x}, 0.0, lax.add, [3 if j == {k} else 1 for j in range({x}.ndim)], [1] * {x}.ndim, "SAME")
lax.fori_loop(0, {n}, lambda i, c: c + jnp.sin(lax.dynamic_slice_in_dim({x}, i, 1, axis={k})), {x})
jnp.fft.fft({x}, axis={k}).real

# the same, with positions, not linear
{x} + jnp.expand_dims(jnp.arange(1.0 * {n}), {others})
{x} + jnp.expand_dims(jnp.cumsum(jnp.ones({n})), {others})
{x} + jnp.expand_dims(jnp.linspace(0.0, 1.0, {n}), {others})
{x} + jnp.expand_dims(jnp.zeros({n}).at[0].add(1.0), {others})
{x} + jnp.expand_dims(jnp.full({n}, 1.0 / {n}), {others})
{x} + jnp.expand_dims(jnp.tri({n})[0], {others})
{x} + jnp.expand_dims(jnp.argsort(jnp.zeros({n})).astype(jnp.float32), {others})
{x} + jnp.expand_dims(jnp.pad(jnp.ones({n} - 1), (1, 0)), {others})
{x} + jnp.expand_dims(jnp.array([1.0 * i for i in range({n})]), {others})
{x} + jnp.expand_dims(jnp.arange(16.0)[:{n}], {others})
{x} + jnp.expand_dims(jnp.ones({n}) * min({n}, 8), {others})
{x} + jnp.expand_dims(jax.nn.one_hot(0, {n}), {others})
{x} + jnp.expand_dims(lax.scan(lambda c, _: (c + 1.0, c), 0.0, None, length={n})[1], {others})
{x} + jnp.expand_dims(lax.dynamic_update_slice(jnp.zeros({n}), jnp.ones(1), (0,)), {others})
{x} + jnp.expand_dims(lax.associative_scan(jnp.add, jnp.ones({n})), {others})
{x} + jnp.expand_dims(lax.fori_loop(0, {n}, lambda i, c: c.at[i].set(1.0 * i), jnp.zeros({n})), {others})

# the same, written
{x} + {x}.at[{before}0].set(1.0)
{x} + {x}.at[{before}:2].multiply(2.0)
{x} + {x}.at[{before}{indices}].set(0.0)
{x} + jnp.zeros({x}.shape).at[{before}0].set(1.0)
{x} + jnp.zeros({x}.shape).at[{before}1:3].add(1.0)
{x} + jnp.zeros_like({x}).at[{before}{indices}].add(1.0)

# the same, with a backward pass, not linear
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),)); {f}({x})
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1.0, 1.0),)); {f}({x})
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g - jnp.mean(g),)); {f}({x})
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.sum(g),)); {f}({x})
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g + 1.0,)); {f}({x})
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (lax.psum(g, 'd'),)); {f}({x})
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,)); {local}
{f} = jax.custom_vjp(jnp.sin); {f}.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (lax.psum(g, 't'),)); {local}
{f} = jax.custom_jvp(jnp.sin); {f}.defjvp(lambda p, t: (jnp.sin(p[0]), t[0] * jnp.cos(p[0]))); {f}({x})
{f} = jax.custom_jvp(jnp.sin); {f}.defjvp(lambda p, t: (jnp.sin(p[0]), t[0] - jnp.mean(t[0]))); {f}({x})
{f} = jax.custom_jvp(jnp.sin); {f}.defjvp(lambda p, t: (jnp.sin(p[0]), lax.psum(t[0], 'd'))); {f}({x})

# without dim k
jnp.sum({x}, axis={k})
jnp.mean({x}, axis={k})
jnp.take({x}, 0, axis={k})
jnp.moveaxis({x}, {k}, 0)[-1]
lax.index_in_dim({x}, 1, {k}, keepdims=False)
sum(jnp.moveaxis({x}, {k}, 0))
jnp.tensordot({x}, jnp.ones({n}), [[{k}], [0]])
lax.scan(lambda c, r: (c + r, None), jnp.zeros_like(jnp.take({x}, 0, {k})), jnp.moveaxis({x}, {k}, 0))[0]

# without dim k, not linear
jnp.max({x}, axis={k})
jnp.var({x}, axis={k})
jnp.median({x}, axis={k})
jax.nn.logsumexp({x}, axis={k})
jnp.sum({x} * {y}, axis={k})
jnp.argmax({x}, axis={k}).astype(jnp.float32)
jnp.any({x} > 1.0, axis={k}).astype(jnp.float32)
jnp.sum(jnp.ones_like({x}), axis={k})
lax.reduce(jnp.abs({x}), 0.0, lax.max, [{k}])
lax.fori_loop(0, {n}, lambda i, c: c + jnp.sin(jnp.take({x}, i, axis={k})), 0.0 * jnp.take({x}, 0, axis={k}))

# without dim k, not differentiated
lax.composite(lambda x: jnp.sum(jnp.sin(x), axis={k}), 'our.sum')({x})

# without the first dim
lax.scan(lambda c, r: (c + r, None), {start}, {x})[0]
lax.scan(lambda c, r: (r, None), {start}, {x})[0]
lax.scan(lambda c, r: (c * 0.5, None), {start}, {x})[0]
lax.scan(lambda c, r: (jnp.sin(c) + r, None), {start}, {x})[0]

# without any, not differentiated
lax.while_loop(lambda c: jnp.max(c[0]) < 9.0, lambda c: (jnp.abs(c[0]) * 2.0 + 1.0, c[1] + 1.0), ({x}, 0.0))[1]

# two of dim k
{x}[{before}0:2]
{x}[{before}-2:]
{x}[{before}1:3]

# half of dim k
{x}[{before}::2]
{x}[{before}: {n} // 2]
{x}[{before}{n} // 2 :]

# dim k twice
jnp.repeat({x}, 2, axis={k})
jnp.concatenate([{x}, {x}], axis={k})

# two in a new dim k
jnp.stack([{x}, -{x}], axis={k})

# indices in place of dim k
{x}[{before}{indices}]
jnp.take({x}, {indices}, axis={k})
jnp.take_along_axis({x}, {of_each_row}, axis={k})

# without the second dim
jax.vmap(lambda r, i: r[i])({x}, {by_row})
{x}[jnp.arange({x}.shape[0]), {by_row}]
{x}[jnp.arange({x}.shape[0])[::-1], {by_row}]
{x}[jnp.arange({x}.shape[0]) // 2, {by_row}]

# eight in place of the first dim
jax.ops.segment_sum({x}, {by_row}, num_segments=8)

# another last dim
{x} @ {matrix}

# square, not linear
{x} @ {x}.T
"""
FORMS = {title: lines for title, *lines in (part.strip().splitlines() for part in FORMS.split("\n# ")[1:])}
DIMS = {
    "the same": lambda p: p.v.dims,
    "without dim k": lambda p: p.but(),
    "without any": lambda p: (),
    "without the first dim": lambda p: p.v.dims[1:],
    "without the second dim": lambda p: replaced(p.v.dims, 1) if len(p.v.dims) > 1 and p.indexed(1) else None,
    "two of dim k": lambda p: p.but(p.dim(2)),
    "half of dim k": lambda p: p.but(p.dim(p.size // 2, p.axes)) if p.size % (16 if p.axes else 2) == 0 else None,
    "dim k twice": lambda p: p.but(p.dim(2 * p.size, p.axes)),
    "two in a new dim k": lambda p: (*p.v.dims[: p.k], p.dim(2), *p.v.dims[p.k :]),
    "indices in place of dim k": lambda p: p.but(*p.new) if p.indexed(p.k) else None,
    "eight in place of the first dim": lambda p: (p.dim(8), *p.v.dims[1:]),
    "another last dim": lambda p: (*p.v.dims[:-1], *p.new),
    "square": lambda p: (p.v.dims[0], p.dim(p.a.size(p.v.dims[0]))) if len(p.v.dims) == 2 else None,
}


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
        free = [name for name in self.sizes if name.isupper() and name not in taken]  # a block's size is a mesh's own
        known = [name for name in free if self.sizes[name] == size]
        name = known[0] if known else next(name for name in "BLMFVHKQRSCEGNPUWXYZ" if name not in self.sizes)
        self.sizes[name] = size
        return name

    def size(self, *dims):
        return prod(self.sizes[letter] for letter, _ in dims)

    def dim(self, taken, free):
        """A new dim, perhaps split over axes that are free."""
        both = [free, free[::-1]] if len(free) > 1 else []
        return self.letter(self.choose(SIZES), taken), self.choose(["", *free, *both])

    def parameter(self, dims=None, dtype="f32"):
        if dims is None:
            dims, free = [], AXES
            for _ in range(self.choose([2, 1, 3])):
                dims.append(self.dim(letters(dims), free))
                free = "".join(axis for axis in free if axis not in dims[-1][1])
        self.parameters.append(Value(f"x{len(self.parameters)}", tuple(dims), "", dtype))
        self.values.append(self.parameters[-1])
        return self.values[-1]

    def value(self, rank=1, dtype="f32", reduced=False):
        """One of the latest values, or a new argument; `reduced`: no sum that is owed."""
        fit = [v for v in self.values if len(v.dims) >= rank and dtype in ("", v.dtype) and not (reduced and v.pending)]
        if fit and not self.chance(6):
            return self.choose(fit[:-4:-1])
        while len((new := self.parameter(dtype=dtype or "f32")).dims) < rank:
            pass
        return new

    def axis(self, value):
        """The number of a dim; as often of one that is whole as of one that is split."""
        whole = self.chance(2)
        fit = [k for k, (_, axes) in enumerate(value.dims) if whole is not bool(axes)]
        return self.choose(fit or range(len(value.dims)))

    def name(self, kind="v"):
        return f"{kind}{len(self.lines)}"

    def put(self, expression, dims, pending="", dtype="f32"):
        value = Value(self.name(), tuple(dims), "".join(sorted(pending)), dtype)
        annotation = f": {value.type}" if self.chance(4) else ""
        self.lines.append(f"{value.name}{annotation} = {expression}")
        self.values.append(value)

    def made(self, dims, pending=""):
        """The source of zeros."""
        known = {letter for parameter in self.parameters for letter, _ in parameter.dims}
        sizes = "".join(f", {letter}={self.sizes[letter]}" for letter, _ in dims if letter not in known)
        return f"shardops.zeros('{spec(dims, pending)}', f32{sizes})"

    def term(self, value, weighted=True):
        """The source of a term of a loss: the sum of a value, of which each element has a weight of its own."""
        text, pending = value.name, value.pending + value.axes
        if value.dims:
            weight = f" * {self.parameter(value.dims).name}" if weighted else ""
            text = f"shardops.sum_unreduced('{value} -> {spec((), pending)}', {text}{weight})"
        complete = len(pending) == len(AXES)
        return text if complete else f"shardops.pending('{spec((), pending)} -> +d +t', {text})"


# Operations with strings, right but for a transfer that is now and then forgotten.
def redistribute(a):
    v = a.value(rank=0, dtype="")
    moves = [("psum", v.dims, v.pending.replace(axis, "")) for axis in v.pending]
    moves += [("pending", v.dims, v.pending + axis) for axis in v.free]
    can_split = [a.size(dim) % 8 == 0 for dim in v.dims]
    for k, (letter, axes) in enumerate(v.dims):
        if axes:
            gathered = replaced(v.dims, k, (letter, axes[:-1]))
            moves += [("all_gather", gathered, v.pending)] * 2
            for j, (other, others) in enumerate(v.dims):
                if j != k and can_split[j]:
                    moves.append(("all_to_all", replaced(gathered, j, (other, others + axes[-1])), v.pending))
        for axis in v.free + v.pending if can_split[k] else "":
            operation = "slice" if axis in v.free else "psum_scatter"
            moves.append((operation, replaced(v.dims, k, (letter, axes + axis)), v.pending.replace(axis, "")))
    if moves:
        operation, dims, pending = a.choose(moves)
        line = f"shardops.{operation}('{v} -> {spec(dims, pending)}', {v.name})"
        a.put(v.name if a.chance(10) else line, dims, pending, v.dtype)


def contract(a):
    v = a.value()
    # Now and then the new dim is split over an axis that is taken, and summed: each device has but one pair of parts.
    new = a.dim(letters(v.dims), AXES if a.chance(8) else v.free)
    beside = [dim for dim in v.dims if set(dim[1]) & set(new[1])]
    shared = [dim for dim in v.dims if dim not in beside and not a.chance(3)]
    w = a.parameter([*shared, new])
    is_summed = a.chance(8) or not set(new[1]) <= set(v.free)
    summed = [dim for dim in shared if a.chance(2)] + beside + [new] * is_summed
    dims = [dim for dim in (*v.dims, new) if dim not in summed]
    pending = "".join(sorted({*v.pending, *(axis for _, axes in summed for axis in axes)}))
    a.put(f"shardops.einsum_unreduced('{v}, {w} -> {spec(dims, pending)}', {v.name}, {w.name})", dims, pending)


def total(a, dtype=""):
    v = a.value(dtype=dtype)
    dims = [dim for dim in v.dims[1:] if a.chance(2)]
    pending = v.pending + "".join(axes for letter, axes in v.dims if letter not in letters(dims))
    a.put(f"shardops.sum_unreduced('{v} -> {spec(dims, pending)}', {v.name})", dims, pending, v.dtype)


def largest(a):
    v = a.value(reduced=True)
    dims = [dim for dim in v.dims[1:] if a.chance(2)]
    a.put(f"shardops.pmax('{v} -> {spec(dims)}', {a.choose(['lax.stop_gradient({})', '{}']).format(v.name)})", dims)


def any_or_first(a):
    v = a.value(reduced=True)
    dims = replaced(v.dims, a.choose(range(len(v.dims))))
    text = a.choose(["argmax('{}', {})", "any('{}', {} > 2.0)"]).format(f"{v} -> {spec(dims)}", v.name)
    a.put(f"shardops.{text}.astype(jnp.int32)", dims, "", "i32")


def look_up(a):
    table = a.value(reduced=True)
    k = a.choose(range(len(table.dims)))
    others, marked = replaced(table.dims, k), [spec([dim]) for dim in table.dims]
    marked[k] = f"[{marked[k]}]"
    if a.size(table.dims[k]) >= 8:
        ids = a.parameter(others if others and a.chance(2) else [a.dim(letters(table.dims), table.free)], "i32")
        dims, pending = ids.dims if ids.dims == others else (*ids.dims, *others), table.dims[k][1]
        text = f"{' '.join(marked)}, {ids} -> {spec(dims, pending)}"
        a.put(f"shardops.index_unreduced('{text}', {table.name}, {ids.name})", dims, pending)


def kernel(a):
    v = a.value(reduced=True)
    k = a.choose([k for k, (_, axes) in enumerate(v.dims) if not axes] or [-1])
    if k < 0:
        a.put(f"shardops.local('{v} -> {v}', jnp.sin, {v.name})", v.dims)
    else:
        new = a.letter(4, letters(v.dims))
        first, second = replaced(v.dims, k), (*replaced(v.dims, k), (new, ""))
        function = f"lambda x: (jnp.sum(x, axis={k}), jnp.stack([jnp.max(x, axis={k})] * 4, axis=-1))"
        text = f"shardops.local('{v} -> {spec(first)}, {spec(second)}', {function}, {v.name}, {new}=4)"
        a.put(f"{text}[0]", first)
        a.put(f"{text}[1]", second)


def regroup(a):
    """A device's rows in another order, then back or summed up, so that the order does not matter."""
    v = a.value()
    k = a.choose(range(len(v.dims)))
    (letter, axes), name = v.dims[k], a.name()
    ring = len(axes) == 1 and a.chance(2)
    if not ring and a.size(v.dims[k]) < 16:
        return
    count, a.sizes["rest"] = (axes, axes) if ring else ("parts", ""), a.size(v.dims[k]) // (1 if ring else 2)
    a.sizes["parts"] = 2
    divided = replaced(v.dims, k, count, ("rest", "" if ring else axes))
    text = spec(divided, v.pending)
    a.lines.append(f"{name} = shardops.regroup('{v} -> {text}', {v.name}{'' if ring else ', parts=2'})")
    moved = text.replace(spec([count]), f"[{spec([count])}]", 1)
    once = f"shardops.ppermute('{moved} -> {moved}', {name}, 1)" if ring else name
    if a.chance(2):
        again = f"shardops.ppermute('{moved} -> {moved}', {once}, -1)" if ring else name
        a.put(f"shardops.regroup('{text} -> {v}', {again}, {letter}={a.size(v.dims[k])})", v.dims, v.pending)
    else:
        dims, pending = replaced(v.dims, k), v.pending + axes
        a.put(f"shardops.sum_unreduced('{text} -> {spec(dims, pending)}', {once})", dims, pending)


def inner_gradient(a):
    v = a.value(rank=0)
    w = a.choose(["w", "w * 2.0"] if v.pending else ["jnp.sin(w)", "w * w", "w * 2.0"])
    a.put(f"shardops.grad(lambda w: {a.term(v._replace(name=f'({w})'))})({v.name})", v.dims, v.free)


def pull_back(a):
    v = a.value(reduced=True)
    w, cotangent, name = a.parameter(v.dims), a.parameter(v.dims).name, a.name()
    a.lines.append(f"{name} = shardops.vjp(lambda x, w: jnp.sin(x) * w, {v.name}, {w.name})[1]")
    if v.free and not a.chance(6):
        cotangent = f"shardops.pending('{v} -> {spec(v.dims, v.free)}', {cotangent})"
    a.put(f"{name}({cotangent})[{a.choose([0, 1])}]", v.dims, v.free)


def chunks(a):
    xs = a.value(rank=2, reduced=True)
    if not xs.dims[0][1]:
        w, others = a.parameter(xs.dims[1:]), a.parameter(xs.dims)
        text = a.term(Value("jnp.sin(x * w) * y", xs.dims[1:]), weighted=a.chance(8))
        a.put(f"shardops.sum_over_chunks(lambda w, x, y: {text}, {w.name}, {xs.name}, {others.name})", (), AXES)


class Places(dict):
    """What stands in the places of a form; parameters and types are made as they are asked for."""

    def __init__(self, a, v, k):
        letter, self.axes = v.dims[k] if v.dims else ("", "")
        super().__init__(x=v.name, k=k, n=f"{v.name}.shape[{k}]", before=":, " * k, type=v.type, f=a.name("f"))
        self.a, self.v, self.k, self.size, self.new, self.pending = a, v, k, a.sizes.get(letter), (), v.pending

    def __missing__(self, key):
        self[key] = getattr(self, key)()
        return self[key]

    def but(self, *new):
        """The value's dims with others in place of dim k."""
        return replaced(self.v.dims, self.k, *new)

    def dim(self, size, axes=""):
        return self.a.letter(size, letters(self.v.dims)), axes

    def indexed(self, k):
        """Whether a dim is so long that each index is one of its own."""
        return self.a.size(self.v.dims[k]) >= 8

    def local(self):
        return f"shardops.local('{self.v} -> {self.v}', {self['f']}, {self.v.name})"

    def others(self):
        return [j for j in range(len(self.v.dims)) if j != self.k]

    def devices(self):
        return " * ".join(f"shardops.axis_size('{axis}')" for axis in self.axes) or "1"

    def zeros(self):
        return self.a.made(self.v.dims, self.a.choose([self.v.pending, ""]))

    def start(self):
        dims, text = self.v.dims[1:], f"jnp.zeros({self.v.name}.shape[1:])"
        return self.a.choose([self.a.made(dims, self.v.pending), self.a.made(dims), text])

    def y(self):
        """Another value with these dims."""
        alike = [u for u in self.a.values if letters(u.dims) == letters(self.v.dims) and u.dtype == "f32"]
        y = self.a.choose(alike[-2:]) if not self.a.chance(3) else self.a.parameter(self.v.dims)
        self.pending += "".join(axis for axis in y.pending if axis not in self.pending)
        return y.name

    def row(self):
        """A vector along dim k."""
        if not self.v.dims:
            return self["y"]
        places = [":" if j == self.k else "None" for j in range(len(self.v.dims))]
        return f"{self.a.parameter(self.v.dims[self.k : self.k + 1]).name}[{', '.join(places)}]"

    def indices(self):
        self.new = [self.a.dim(letters(self.v.dims), self.v.free if self.a.chance(2) else "")]
        return self.a.parameter(self.new, "i32").name

    def of_each_row(self):
        self.new = [self.a.dim(letters(self.v.dims), self.axes)]
        return self.a.parameter(self.but(*self.new), "i32").name

    def by_row(self):
        return self.a.parameter(self.v.dims[:1], "i32").name

    def scalar(self):
        return self.a.parameter((), "i32").name

    def matrix(self):
        self.new = [self.a.dim(letters(self.v.dims), self.v.free)]
        return self.a.parameter([self.v.dims[-1], *self.new]).name


def plain(a):
    """Plain JAX, device by device."""
    v = a.value(rank=0)
    titles = (
        [title for title in FORMS if not (a.gradient and "not differentiated" in title)] if v.dims else [*FORMS][:2]
    )
    if v.pending and not a.chance(3):
        titles = [title for title in titles if "not linear" not in title]
    title = a.choose([title for title in titles for _ in range(1 + len(FORMS[title]) // 4)])
    places = Places(a, v, a.axis(v) if v.dims else 0)
    *lines, expression = a.choose(FORMS[title]).format_map(places).split("; ")
    dims = DIMS[title.split(", ")[0]](places)
    if dims is not None:
        a.lines += lines
        a.put(expression, dims, places.pending)


def shape(v, k, middle, count=1):
    """The source of a shape that has other sizes instead of `count` dims from k on."""
    before, after = f"*{v.name}.shape[:{k}], " * (k > 0), f", *{v.name}.shape[{k + count}:]"
    return before + middle + after * (k + count < len(v.dims))


def divide(a):
    v = a.value()
    k = a.axis(v)
    axes, size = v.dims[k][1], a.size(v.dims[k])
    factor = a.choose([n for n in (2, 4, 8, 1) if (size // (8 if axes else 1)) % n == 0])
    first, second = a.choose([(size // factor, factor), (factor, size // factor)])
    wrong = second % 8 == 0 and (first % 8 or a.chance(3))
    one = a.letter(first, letters(v.dims))
    dims = [(one, "" if wrong else axes), (a.letter(second, [*letters(v.dims), one]), axes if wrong else "")]
    sizes = a.choose([f"{first}, -1", f"-1, {second}"] + [f"{first}, {second}"] * (not axes))
    a.put(f"{v.name}.reshape({shape(v, k, sizes)})", replaced(v.dims, k, *dims), v.pending)


def merge(a):
    v = a.value(rank=2)
    k = a.choose(range(len(v.dims) - 1))
    dim = a.letter(a.size(*v.dims[k : k + 2]), letters(v.dims)), max(axes for _, axes in v.dims[k : k + 2])
    a.put(f"{v.name}.reshape({shape(v, k, '-1', 2)})", (*v.dims[:k], dim, *v.dims[k + 2 :]), v.pending)


def reshape_like(a):
    v = a.value(rank=0)
    alike = [u for u in a.values if a.size(*u.dims) == a.size(*v.dims) and u.dims != v.dims]
    if alike:
        u = a.choose(alike)
        a.put(f"{v.name}.reshape({u.name}.shape)", u.dims, v.pending)


def transpose(a):
    v = a.value(rank=2)
    order = tuple(a.draw(st.permutations(range(len(v.dims)))))
    a.put(f"jnp.transpose({v.name}, {order})", [v.dims[k] for k in order], v.pending)


def integer(a):
    if a.chance(3):
        total(a, "i32")
    v = a.value(rank=0, dtype="i32")
    forms = "{0} * 2|{0} + {0}|-{0}|{0} << 1|{0} // 2|lax.div({0}, jnp.int32(2))|{0} % 3|{0} >> 1|~{0}".split("|")
    a.put(a.choose(forms).format(v.name), v.dims, v.pending, "i32")


def as_float(a):
    v = a.value(rank=0, dtype="i32")
    a.put(f"{v.name}.astype(jnp.float32)", v.dims, v.pending)


def one_hot(a):
    v = a.value(dtype="i32", reduced=True)
    a.put(f"jax.nn.one_hot({v.name}, 8)", (*v.dims, (a.letter(8, letters(v.dims)), "")))


STRINGS = [*[redistribute] * 5, contract, contract, total, largest, any_or_first, look_up, kernel, regroup]
STRINGS += [inner_gradient, pull_back, chunks]
PLAIN = [*[plain] * 12, *[divide] * 3, merge, merge, reshape_like, transpose, integer, integer, as_float, one_hot]


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
    results = [Value("value", (), AXES), *(value._replace(pending=value.free) for value in weights)]
    for value in results:
        if value.pending and not a.chance(20):
            a.lines.append(f"{value.name} = shardops.psum('{value} -> {spec(value.dims)}', {value.name})")
    return [value._replace(pending="") for value in results]


@st.composite
def programs(draw):
    a = Author(draw, gradient=draw(st.integers(0, 2)) == 2)
    a.parameter()
    while len(a.lines) < 7 and not a.chance(8):
        a.choose(STRINGS if draw(st.booleans()) else PLAIN)(a)
    results = gradients(a) if a.gradient else values(a)
    source = "\n".join(a.lines)
    parameters = [value for value in a.parameters if value in results or re.search(rf"\b{value.name}\b", source)]
    types, names = [value.type for value in results], [value.name for value in results]
    head, result, returned = "", f"tuple[{', '.join(types)}]", f"{', '.join(names)},"
    if len(types) == 1:
        result, returned = types[0], names[0]
    elif a.chance(3):
        head = f"@pytree_dataclass\nclass Result:\n    one: {types[0]}\n    others: tuple[{', '.join(types[1:])}]\n\n\n"
        result, returned = "Result", f"Result({names[0]}, ({', '.join(names[1:])},))"
    sizes = ", ".join(f"{name}={size}" for name, size in a.sizes.items())
    arguments = ", ".join(f"{value.name}: {value.type}" for value in parameters)
    body = "".join(f"    {line}".rstrip() + "\n" for line in [*a.lines, f"return {returned}"])
    return Program(f"# {sizes}\n{head}@typed\ndef program({arguments}) -> {result}:\n{body}", a.sizes, parameters)
