"""Programs that look right and are wrong on some mesh: refused on every one, with a text and a line."""

import functools  # noqa: F401 for the programs
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from pages import module_of
from parts import says
from prove import MESHES, each_row, program, prove, refusal, refused, table
from right_programs import own_jvp, own_rule, own_vjp, reduced, squares, total  # noqa: F401 some for the programs alone

from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, f32, pytree_dataclass
from shardlib.spec import ShardingError
from shardlib.typed import typed


@pytree_dataclass
class Inner:
    total: f32['B/d']


@pytree_dataclass
class Outer:
    inner: tuple[Inner, ...]


@pytree_dataclass
class Listed:
    sums: list[f32['B/d']]


@pytree_dataclass
class Bag:
    arrays: dict
    total: f32['B/d']


def forgotten(x):
    """A sum over t that nobody takes."""
    return shardops.sum_unreduced('B/d M/t -> B/d +t', x)


@typed
def variadic(*sums: f32['B/d']) -> f32['B/d']:
    return sums[0] + sums[1]


@typed
def keywords(**sums: f32['B/d']) -> f32['B/d']:
    return sums["a"]


def taken(value, as_type):
    """The value, as a typed function takes one of this type."""

    @typed
    def function(value: as_type):
        return value

    return function(value)


@typed
def attribute(x: f32['B/d M/t']) -> f32['B/d M/t']:
    holder = SimpleNamespace()
    holder.total: f32['B/d'] = forgotten(x)
    return x


def helper(x: f32['B/d M']) -> f32['B/d M']:
    return jnp.tanh(x)


def gradient(function, x):
    """The gradient of the sum of what a function makes of 'B/d M/t'."""
    return shardops.grad(lambda x: shardops.sum_unreduced('B/d M/t -> +d +t', function(x)))(x)


def ref_adds(x):
    ref = jax.new_ref(x)
    ref[...] += x
    return ref[...]


def by_perturbed(x):
    wrapped = jax.custom_vjp(lambda x: 2 * x)
    wrapped.defvjp(lambda x: (2 * x.value, x.perturbed), lambda r, g: (2 * g if r else g,), symbolic_zeros=True)
    return wrapped(x)


def caught(ask):
    try:
        return ask()
    except (NameError, TypeError):
        return 1.0


def inject(x):
    """An auxiliary loss whose value is zero: its backward rule puts a gradient beside the one that comes."""
    return own_rule(lambda x: jnp.zeros(()), lambda x: (jnp.zeros(()), x), lambda r, g: (g * jnp.ones_like(r),))(x)


def pulled(w):
    """The gradient, which is reduced over d, of a loss that sends."""

    def loss(w):
        whole = shardops.psum('M +d -> M', shardops.pending('M -> M +d', w))
        return shardops.pending(' -> +d +t', jnp.sum(whole))

    return shardops.grad(loss)(w)


def at(axis, dtype=jnp.int32):
    """A device's index along an axis, as a scalar that differs along it."""
    return shardops.index(axis)[0].astype(dtype)


def hop(x):
    """A transfer over d of 'M'."""
    return shardops.psum('M +d -> M', shardops.pending('M -> M +d', x))


def put_aside(w, x):
    """A value of inside a loss, kept in a list."""
    box = []
    reduced(lambda w: (box.append(w * 1.0), squares(x * w[None]))[1], w)
    return box[0]


def owed_over_d(x):
    """A sum over d that nobody takes."""
    return shardops.sum_unreduced('B/d M -> M +d', x)


def bytes_over_d(x):
    """Another, of numbers of 8 bits."""
    return shardops.einsum_unreduced('B/d M, B/d -> M +d', x.astype(jnp.int8), jnp.ones(x.shape[0], jnp.int8))


def kernel(x):
    def copy(source, target):
        target[...] = source[...]

    return pl.pallas_call(copy, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


# H1 to H12 (H3: two dims split over one axis) are the classes of holes that an attack on the check found.
REFUSED = table(r"""
# A split dim is treated as whole
B/d M | x - jnp.mean(x, axis=0, keepdims=True)
    | 'mean' (reduce_sum) reduces … split over d … fix: … an operation with a string
B/d M/t | (lambda y: (y / jnp.sum(y, axis=(1, 2), keepdims=True)).reshape(x.shape))(x.reshape(x.shape[0], -1, 4))
    | 'sum' (reduce_sum) reduces … split over t
B/d L | jnp.cumsum(x, axis=0) | 'cumsum' runs along … split over d … fix: all_gather it first
B/d V/t | x + lax.top_k(x, 1)[0] | 'top_k' runs along … split over t
L/d M -> Z/d M | x[::2]
    | each device counts from 0 … fix: shardops.slice('L -> L/t', jnp.arange(L)) … x.reshape(-1, 2, ...)[:, 0]
B/d M, i32 B/d -> V M | shardops.psum('V M +d -> V M', jax.ops.segment_sum(x, y, num_segments=80))
    | fix: all_gather indices and values first … jax.nn.one_hot(indices, n)
B L/t | jnp.pad(x, ((0, 0), (1, 0)))[:, :-1] | 'pad' runs along … split over t
B L/t | jnp.concatenate([x, x], axis=1)[:, :x.shape[1]] | 'concatenate' changes the length … split over t
B L/t | x + jnp.unstack(x, axis=1)[0][:, None] | the size of a device's part … as a number
V/t M | x + x[jnp.zeros((1,), jnp.int32)] | 'gather' indexes … split over t … fix: all_gather it first; index_unreduced
B/d V/t | x - jnp.take_along_axis(x, jnp.zeros((x.shape[0], 1), jnp.int32), axis=1)
    | 'take_along_axis' (gather) indexes … split over t
B/d M | x.at[0].set(1.0) | a dim that is split over d
B/d M/t | x @ x.T @ x | 'dot_general' contracts … split over t
B/d M | jnp.max(x @ x.T, axis=1, keepdims=True) * x
    | 'dot_general' makes two dims … split over d fix: all_gather one operand first
L/d | jnp.max((x[:, None] > x[None]).astype(jnp.float32), axis=1) * x | makes two dims … split over d
B L/t | x + jnp.arange(x.shape[1], dtype=jnp.float32)[None] | 'add' … positions that each device counts from 0
L/t M | lax.scan(lambda c, r: (c + r, c), jnp.zeros(x.shape[1]), x)[1] | a scan over … split over t
B L/t | lax.associative_scan(jnp.add, x, axis=1) | the size of a device's part … as a number
i32 B/d L | x + jnp.zeros(8, jnp.int32).at[x].add(1)[0]
    | 'add' (scatter-add) writes at indices … split over d … fix: all_gather indices and values first
B/d M | x @ (x.T @ jnp.zeros((x.shape[0], x.shape[1]))) | 'dot_general' contracts … split over d
B/d M | kernel(x) | 'pallas_call': what it does cannot be seen
M | jax.linear_transpose(lambda y: 2 * y, x)(x)[0] | a jax.grad, vjp, jvp or linear_transpose
M/d | jax.grad(lambda y: jnp.sum(shardops.all_gather('M/d -> M', y)))(x) | a jax.grad, vjp, jvp or linear_transpose
M | jax.vjp(jnp.sin, x)[1](x)[0] | a jax.grad, vjp, jvp or linear_transpose
M/d | x / lax.psum(x, 'd') | over d outside of shardops … an operation with a string
M | x * jnp.sum(lax.psum_scatter(x, ('d', 't'), tiled=True)) | over d outside of shardops
M/t | lax.all_to_all(x, 't', 0, 0, tiled=True) | over t outside of shardops
M/d | lax.scan(lambda c, _: (lax.psum(c, 'd'), None), x, None, length=2)[0] | over d outside of shardops
# A whole dim that is called split, on one device too
M -> M/t | lax.scan(lambda c, _: (shardops.slice('M -> M/t', c), None), x, None, length=1)[0]
    | so the shapes do not match
# A transfer that not all devices reach, inside of rules for gradients, or hidden
B/d M | lax.while_loop(lambda c: jnp.any(c < 3), lambda c: 2 * c, x) | 'any' (reduce_or) reduces … split over d
M/d | shardops.local('M/d -> M/d', lambda x: jax.jit(lambda x: x / lax.psum(x, 'd'))(x), x)
    | local to a device sends over d
# What is local to a device closes over what is not the same everywhere; full of what differs
M/d, M/d -> M/d | shardops.local('M/d -> M/d', lambda x: x * y, x) | mul got incompatible shapes for broadcasting
B/d M/t, B/d M -> B/d M/t | x + y | (16/d, 64/t), (16/d, 64). fix: … psum_scatter a sum, slice what is the same
M, M/t -> '' | shardops.local('M -> ', lambda x: jnp.sum(x) * jnp.sum(y), x) | a value from outside that differs
# H1: Containers of sharded arrays
B/d M/t -> Inner | Inner(forgotten(x)) | result of program ( … , total: f32['B/d'], value float32[4] … mesh d=4 × t=2
B/d M/t -> B/d | taken([shardops.zeros('B/d', f32), forgotten(x)], list[f32['B/d']])[1]
    | item 1 of argument value of function
B/d M/t -> B/d | taken({'a': forgotten(x)}, dict[str, f32['B/d']])['a'] | argument value of function … , a: f32['B/d']
B/d M/t -> B/d | taken(Bag({'a': x}, shardops.zeros('B/d', f32)), Bag).total
    | dict says nothing of how its arrays lie
# H2: Reshapes of a split dim: the major part stays split, and only that
B/d M, M H/t -> B/d 4 Z/t 2 | shardops.einsum_unreduced('B/d M, M H/t -> B/d H/t', x, y).reshape(x.shape[0], 4, -1, 2)
    | 'reshape' makes a minor dim … split over t
B/d 4 Q/t, F/t -> B/d 4 Q/t | x + jnp.max(y.reshape(1, 4, -1), axis=2, keepdims=True)
    | 'reshape' makes a minor dim … split over t
M F/t -> M E/t | check(f32, 'M 2 E/t', x.reshape(x.shape[0], 2, -1))[:, 0] | 'reshape' makes a minor dim … split over t
B/d H/t M, B/d/t M H -> B/d/t M H | x.reshape(y.shape) | 'reshape' reshapes … split over d
M/d F/t -> N/d/t | x.reshape(-1) | a size, 3072/d*t, … how many devices
B/d 2 F/t -> B/d Z/t | x.reshape(x.shape[0], -1) | fix: shardops.regroup … 'B/d L -> parts R/d L'
B/d M -> P/d M | jnp.max(x.reshape(4, -1, x.shape[1]), axis=1) | 'P/d M' says P/d … whole in the value
B/d M | shardops.each('d', jnp.tanh, x) | one element a device, 'd/d ...', not
d M | shardops.each('d', jnp.tanh, x[:1]) | dim d of 'd M' is 1, … d is 4 in the mesh
d/d M -> d/d M | shardops.each('d', lambda y: shardops.psum('M +d -> M', y), x) | 'M +d' names mesh axis d … mesh has t
d/d M -> d/d | shardops.each('d', lambda y: shardops.sum_unreduced('X M -> ', x), x)
    | 'X M' says the same along d … differs along d
d/d M/t | shardops.each('d', lambda y: jnp.exp(shardops.sum_unreduced('M/t -> +t', y)) * y, x)
    | 'exp' … not linear … pending over t
d/d M/t | shardops.each('d', lambda y: (y[None] + x)[0], x) | a value whose dim 'd/d' was dropped
B/d -> d/d R | shardops.ppermute('[d/d] R -> [d/d] R', shardops.regroup('B/d -> d/d R', x *
    jnp.arange(9.0)[jnp.int32(x.shape[0]) % 9]), 1) | depends on how many devices there are
# H4: Positions in what was made to a split dim's size
B L/t | jnp.zeros(x.shape).at[:, 0].set(1.0) | 'scatter' writes to … made to the size of a device's part
B L/t | jnp.cumsum(jnp.ones_like(x), axis=1) | 'cumsum' runs along … made to the size of a device's part
# H5: Split indices
V M/d, i32 B/d -> V M/d | x.at[y].set(0.0) | 'scatter' writes at indices … split over d
# H6: Rules for gradients that the program brings along
B/d M/t | own_vjp(lambda x: x, lambda _, g: (lax.psum(g, 't'),))(x) | over t outside of shardops
M/t | own_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), lax.pmean(t[0], 't')))(x) | over t outside of shardops
M | own_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), t[0] + 1))(x)
    | jax.custom_jvp is not linear … 'add' of them and one that is not
M | own_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), x[0]))(x) | is not linear in its tangents
B/d 8 8 -> B/d | jnp.linalg.det(x) | forward rule of a jax.custom_jvp has another value … fix: … through shardops.local
M | x * jax.sharding.get_abstract_mesh().shape['d'] | the number as shardops.axis_size('d')
M | own_vjp(jnp.sin, lambda r, g: (jnp.clip(g, -1.0, 1.0),))(x) | not linear … pending over d
B/d M, M -> B/d M | own_vjp(lambda x, s: x * s[None], lambda r, g: (g * r[1][None], jnp.sum(g * r[0], axis=0) /
    r[0].shape[0]))(x, y) | depends on how many devices there are
M | own_vjp(jnp.sin, lambda r, g: (jnp.cos(r[0]),))(x) | jax.custom_vjp gives operand 0 … same along d … pending
# H7: Whole numbers and fill values of a sum that is owed
i32 B/d M/t -> i32 B/d | shardops.psum('B/d +t -> B/d', lax.div(shardops.sum_unreduced('B/d M/t -> B/d +t', x),
    jnp.int32(2))) | 'div', which is not linear
# H8: What the check cannot see
B/d M/t | ref_adds(x) | 'new_ref': what it does cannot be seen
M/t | lax.composite(lambda x: x / jnp.sum(x), name='own.norm')(x) | 'sum' (reduce_sum) reduces … split over t
# H9: Counts of what was made to a split dim's size
B/d M -> '' | jnp.sum(jnp.ones_like(x)) | 'sum' (reduce_sum) reduces … made to the size of a device's part
B/d M -> '' | lax.fori_loop(0, x.shape[0], lambda i, c: c + 1.0, jnp.float32(0))
    | condition of a while loop … how many devices
# H10: A turn of blocks
# A dim that counts an axis' devices
d/d M -> M | x[0] | 'M' says the same along d … differs along d
d/d M, B/d M -> B/d M | x[0][None] * y | a value whose dim 'd/d' was dropped
# H11: What depends on how many elements a device has
B/d M | x[:4] | 16/d compared with 4
i32 B/d M -> i32 B/d | jnp.max(jnp.concatenate([jnp.arange(x.shape[0])[:, None], x[:, :1]], axis=1), axis=1)
    | each device counts from 0 … fix: shardops.slice('L -> L/t', jnp.arange(L))
# H12: Annotations that nobody would read
B/d M | helper(x) | annotations of helper fix: @typed above `def helper`
B/d M/t -> B/d | variadic(shardops.zeros('B/d', f32), forgotten(x)) | argument sums of variadic
B/d M/t -> B/d | keywords(a=forgotten(x)) | argument sums of keywords
B/d M/t -> B/d | taken(forgotten(x), f32['B/d']|None) | argument value of function
B/d M/t | attribute(x) | local holder.total
B/d M/t -> B/d | taken(Outer((Inner(forgotten(x)),)), Outer).inner[0].total | inner/0/total
B/d M/t -> B/d | taken(Listed([shardops.zeros('B/d', f32), forgotten(x)]), Listed).sums[0] | sums/1
# Numbers and positions that differ from mesh to mesh
B/d M -> B/d | (lambda r: r[0] / r[1])(jax.jit(lambda x: (jnp.sum(x, axis=1), jnp.float32(x.shape[0])))(x))
    | a number that depends on how many devices
B/d M -> d/d b M | shardops.ppermute('d/d b M -> d/d b M', shardops.regroup('B/d M -> d/d b M', x), x.shape[0] + 1)
    | a number that depends on how many devices
B/d L/t, L M -> L/t M | jax.vmap(lambda i: lax.dynamic_index_in_dim(y, i, keepdims=False))(jnp.arange(x.shape[1]))
    | positions that each device counts from 0
L M, i32 B/d -> B/d | x[jnp.arange(y.shape[0]), y] | positions that each device counts from 0
B/d M, N M -> B/d | (lambda p: p[jnp.arange(p.shape[0]), jnp.arange(p.shape[0])])(
    x @ jnp.concatenate([shardops.all_gather('B/d M -> B M', x), y]).T)
    | positions that each device counts from 0
B/d M | lax.cond(shardops.index('d')[0] == 0, lambda: x * 2, lambda: x) | pair them by its own index
B/d M | lax.fori_loop(0, shardops.index('d')[0], lambda i, c: c * 2, x) | pair them by its own index
B/d M -> '' | shardops.psum('+d -> ', shardops.sum_unreduced('B/d M -> +d', x).astype(jnp.float4_e2m1fn)
    .astype(jnp.float32)) | makes float4_e2m1fn … pending over d, float32
B/d M -> '' | shardops.psum('+d -> ', shardops.sum_unreduced('B/d M -> +d', x).astype(jnp.float8_e8m0fnu)
    .astype(jnp.float32)) | makes float8_e8m0fnu … pending over d, float32
B/d M, M -> M B/d | jnp.broadcast_to(y[None], x.shape).reshape(x.shape[1], x.shape[0])
    | 'reshape' makes a minor dim … made to the size of a device's part
B/d M/t | gradient(lambda x: x / x.shape[0], x) | depends on how many devices there are
B/d M, M -> M | shardops.local('M -> M', lambda y: y / x.shape[0], y)
    | a local function takes a number … how many devices
i32 B/d -> i32 B/d 2 | lax.scan(lambda k, _: (k, jnp.concatenate([jnp.arange(x.shape[0])[:, None], x[:, None]],
    axis=1)), 0, None, length=2)[1][0]
    | positions that each device counts from 0
M/d | shardops.local('M/d -> M/d', own_vjp(lambda x: 2 * x, lambda r, g: (2 * lax.psum(g, 't'),)), x)
    | over t outside of shardops
B/d M, B/d -> B/d M | own_vjp(lambda x: x * 2, lambda r, g: (g * y[:, None],))(x) | a jax.custom_vjp closes over a value
# argmax, any, index, regroup and local with an axis lost, moved or doubled
B/d V/t -> i32 B/d | shardops.argmax('B/d V -> B/d', x) | 'B/d V' says V … split over t in the value
B/d V/t M -> i32 M | shardops.argmax('V/t M -> M', shardops.sum_unreduced('B/d V/t M -> V/t M +d', x))
    | still a sum over d
M -> i32 | shardops.index('d')[0] | '' says the same along d … differs along d
B/d M -> i32 t/t | shardops.index('d') | 't/t' says the same along d … differs along d
B/d M -> P/d R M | check(f32, 'P R/d M', shardops.regroup('B/d M -> P/d R M', x, R=1))
    | 'P R/d M' says P … split over d in the value
B/d M -> X | shardops.local('B/d M -> B/d X, X', lambda x: (x[:, :2], x[0, :2]), x, X=2)[1]
    | differs along d, the result does not
# Python that asks for the size of a part
B/d M -> B/d | x[jnp.arange(x.shape[0]) + x.shape[0], 3] | positions that each device counts from 0
B/d M, M -> M | shardops.local('M -> M', lambda y: y / jnp.sum(jnp.ones(x.shape)), y)
    | takes a number … how many devices
B/d M | x * functools.reduce(max, (x.shape[0], 4)) | 16/d is another number
B/d M | x if x.shape == (4, 64) else 2 * x | 16/d is another number
B/d M | x * divmod(x.shape[0], 3)[1] | 16/d is another number
B/d M | lax.switch(x.shape[0] % 3, [jnp.sin, jnp.cos, jnp.tan], x) | 16/d is another number
B/d M | x * float(x.shape[0]) | asked for as a number
B/d M | x * (1.0 / x.shape[0]) | said of a number … how many devices
B/d M | x * x.shape[0] ** -0.5 | asked for as a number
B/d M | x + np.arange(x.shape[0])[:, None] | size of a split dim … as a Python number
B/d M | x if x[0, 0] > 0 else -x | as a Python number, a truth value … not known
B/d M | x * np.random.RandomState(x.shape[0]).rand() | Cannot cast scalar
B/d M -> M | x[x.shape[0] - 1] | asked for as a number
B/d M, M -> B/d M | x * jnp.max(lax.top_k(y, x.shape[0])[0]) | 'top_k' makes a dim of … part, 16/d
B/d M | lax.reduce_window(x, 0.0, lax.add, (1, x.shape[0]), (1, 1), 'SAME') | with window_dimensions=16/d, which depends
B/d M, M M -> M M | jnp.rot90(y, x.shape[0]) | must not depend on … a device's part
B/d M | lax.pad(x, 0.0, [(0, 0, 0), (x.shape[0], -x.shape[0], 0)]) | 'pad' with padding_config=16/d, which depends
B/d M | x * (2.0 if x.shape[0] - 4 else 1.0) | is another number on each mesh
B/d M | x * (hash(x.shape) % 7) | 16/d is another number
B/d M | x * caught(lambda: int(x.shape[0])) | 16/d is another number
B/d M | x * caught(lambda: x.shape[0] > 3) | 16/d is another number
M | x * caught(lambda: shardops.axis_size('d') > 1) | the number of devices along d is another
# The number of devices
B/d M | x * (x.shape[0] ** 2 * shardops.axis_size('d')) | devices along d is not the whole's size
B/d M | x * ((x.shape[0] - 1) * shardops.axis_size('d')) | devices along d is not the whole's size
B/d M, H/d -> B/d M | x * (x.shape[0] * y.shape[0] * shardops.axis_size('d')) | is not the whole's size
B/d M | x / shardops.axis_size('d')
    | split along d over the devices along d … fix: divide by … (x.shape[0] * shardops.axis_size('d'))
B/d M, M -> M | y / x.shape[0] / shardops.axis_size('d') | counted on one device over the devices
M | lax.fori_loop(0, shardops.axis_size('d'), lambda i, c: c * 2, x) | a plain number is int(shardops.axis_size('d'))
M | x / shardops.axis_size('d') | still a sum over d
M | x ** shardops.axis_size('d') | the number of devices along d is another
M | x * 2.0 ** shardops.axis_size('d') | the number of devices along d is another
M | jnp.tanh(x) if shardops.axis_size('d') > 2 else x | the number of devices along d is another
M | sum(x for _ in range(shardops.axis_size('d'))) | the number of devices along d is another
M | x * jnp.float32(shardops.axis_size('d')) | the number of devices along d is another
M/d | x * (x.shape[0] * shardops.axis_size('t')) | devices along t is not the whole's size
B/d M -> M | shardops.psum('M +d -> M', shardops.sum_unreduced('B/d M -> M +d', x) / shardops.axis_size('d'))
    | pending along d over the devices along d
M | x * lax.psum(1, 'd') | over d outside of shardops
# What hides from the walk
M | jax.vmap(lambda row: shardops.psum('M +d -> M', shardops.pending('M -> M +d', x)) * row, axis_name='d')(
    jnp.ones(3))[0] | jax.vmap(axis_name='d') … the name of a mesh axis
B/d M -> B/d | lax.reduce(x, 0.0, lambda a, b: a + b * x.shape[0], (1,)) | depends on how many devices there are
B/d M/t -> B/d | lax.reduce(forgotten(x)[:, None], 0.0, lambda a, b: jnp.maximum(a, b), (1,)) | which is not linear
B/d M | x.at[:, 3].apply(lambda row: row * x.shape[0]) | depends on how many devices there are
M -> d/d M | x[None] | 'd/d M' says d/d … whole in the value
# What is the same everywhere, cut or padded to the size of a device's part
B/d M, B M -> M | jnp.sum(y[:x.shape[0]], axis=0) | makes a dim of … part, 16/d, alike on each
B/d M, B M -> B M | y.at[:x.shape[0]].set(0.0) | made to the size of a device's part
B/d M, B -> '' | jnp.sum(y[x.shape[0]:]) | 16/d
B/d M, B -> '' | jnp.sum(y[-x.shape[0]:]) | 16/d
B/d M | x * (1 - jnp.pad(jnp.ones(1), (x.shape[0] - 1, 0)))[:, None] | makes a dim of … a device's part
B M, B M/d | x.reshape(y.shape)[:, :1] * x | a device's part
# A number of devices that is squared, counted with, or asked for by a library
M | shardops.psum('M +d -> M', x / (shardops.axis_size('d') * shardops.axis_size('d')))
    | the number of devices along d is another
B/d | x * caught(lambda: len(range(x.shape[0]))) | the size of a device's part … as a number
# Terms that are whole numbers wrap around where their sum does not
i32 B/d M -> M | shardops.psum('M +d -> M', shardops.sum_unreduced('B/d M -> M +d', x).astype(jnp.float32))
    | fix: convert before the sum, or reduce
# Rules for gradients: the value of the forward rule
B/d M | own_rule(lambda x: x * 2, lambda x: (x * x.shape[0], None), lambda r, g: (g * 2,))(x)
    | a jax.custom_vjp has another value
M | own_jvp(jnp.sin, lambda x, t: (2 * jnp.sin(x[0]), jnp.cos(x[0]) * t[0]))(x)
    | forward rule of a jax.custom_jvp has another value
# Gradients of what has no type
B/d M/t, M -> M | shardops.psum('M +d +t -> M', shardops.grad(lambda w: inject(w) + shardops.sum_unreduced('B/d M/t ->
    +d +t', x))(y)) | 'add' … pending over d and one that is not
# Transfers that not all devices reach
# Options that round each term of a sum
M/d F/t, F/t -> M | shardops.psum('M +t -> M', shardops.all_gather('M/d +t -> M +t', shardops.einsum_unreduced('M/d F/t,
    F/t -> M/d +t', x, y), dtype=jnp.int32)).astype(jnp.float32) | term of a sum, float32 … rounded to int32
B/d F/t, F/t -> B/d | shardops.psum('B/d +t -> B/d', shardops.einsum_unreduced('B/d F/t, F/t -> B/d +t', x, y,
    preferred_element_type=jnp.int32).astype(jnp.float32)) | term of a sum, float32 … rounded to int32
i32 B/d M -> '' | shardops.psum('+d -> ', shardops.einsum_unreduced('M +d, M -> +d', owed_over_d(x),
    jnp.ones(64, jnp.int32), preferred_element_type=jnp.float32)) | term of a sum, int32 … rounded to float32
i32 B/d M -> '' | shardops.psum('+d -> ', jnp.dot(owed_over_d(x), jnp.ones(64, jnp.int32),
    preferred_element_type=jnp.float32)) | 'dot_general' makes float32 … over d, int32 … wrap or round
i32 B/d M -> i32 | shardops.psum('+d -> ', shardops.sum_unreduced('M +d -> +d', bytes_over_d(x)))
    | term of a sum, int8 … to int32, or wrap: reduce
i32 B/d M -> i32 M | shardops.psum('M +d -> M', jnp.dot(bytes_over_d(x), jnp.eye(64, dtype=jnp.int8),
    preferred_element_type=jnp.int32)) | 'dot_general' makes int32 … over d, int8
M/d F/t -> M | shardops.psum('M +t -> M', shardops.all_gather('M/d +t -> M +t', shardops.sum_unreduced('M/d F/t ->
    M/d +t', x), sent_as=jnp.int8)) | sent_as is a float type … not int8
M/d -> M | shardops.all_gather('M/d -> M', x, reduce_dtype=jnp.int32) | reduce_dtype is a float type, not int32
M/t, M/t -> '' | shardops.psum('+t -> ', shardops.einsum_unreduced('M/t, M/t -> +t', x, y, rounded_to=jnp.int32))
    | rounded_to is a float type, not int32
bool_ M/t, bool_ M/t, B -> B | shardops.psum('B +t -> B', shardops.einsum_unreduced('+t, B -> B +t',
    shardops.einsum_unreduced('M/t, M/t -> +t', x, y), z)) | a sum of truth values is none
# Another order, a solve whose transpose is another
B/d 2 -> L/d | jnp.ravel(x, order='F') | 'reshape' reshapes … split over d
M | lax.custom_linear_solve(lambda y: 2 * y, x, lambda mv, b: b / 2, lambda mv, b: jnp.ones_like(b))
    | linear solve, the right side's gradient is the same along d … pending
M | jax.scipy.sparse.linalg.cg(lambda v: v * 2, x, maxiter=2)[0]
    | backward pass of a linear solve, 'dot_general' … both pending over d
# A function that is local to a device and asks for the mesh; a roll that differs
M | shardops.local('M -> M', lambda v: v * shardops.index('d')[0].astype(jnp.float32), x)
    | local to a device asks for the devices along d
M | shardops.local('M -> M', lambda v: v * shardops.axis_size('d'), x) | local to a device asks for the devices along d
# Arguments of operations that would mean something else, or nothing
d/d M | shardops.ppermute('d/d M -> d/d M', x, shardops.index('d')[0]) | shift is a plain int
d/d M | shardops.ppermute('d/d M -> d/d M', x, 1.0) | shift is a plain int, not 1.0
M -> M 2 | shardops.zeros('M 2', f32)[:, :shardops.zeros('Z', f32, Z=2.5).size] | Z=2.5: expected … not below 0
B/d L -> B/d 2 S | shardops.regroup('B/d L -> B/d H S', x, H=-2) | H=-2: expected … not below 0
M/t -> '' | jnp.abs(shardops.pmax('M/t -> ', lax.complex(x, x))) | values of complex64 have no order
M/t -> i32 | shardops.argmax('M/t -> ', lax.complex(x, x)) | values of complex64 have no order
M, M -> M | shardops.psum('M +d +t -> M', shardops.grad(lambda w, v: shardops.pending(' -> +d +t', jnp.sum(w * v)),
    2)(x, y))
    | argnums=2: expected numbers of different arguments, of 2
M/t -> M | shardops.zeros('M/t -> M', f32) | the call lacks the operands of the string
M/t -> M | shardops.all_gather(x, x) | is no string such as 'B/d M'
# Truth values
bool_ B/d -> bool_ | shardops.psum('+d -> ', shardops.sum_unreduced('B/d -> +d', x)) | the element type is int32
# Decisions and loops that differ from device to device
M | lax.cond(at('d') > 0, lambda: x, lambda: 2 * x) | 'M' says the same along d … differs along d
M | lax.while_loop(lambda c: c[0] < at('d'), lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]
    | 'M' says the same along d … differs along d
M -> '' | lax.fori_loop(0, 4, lambda i, c: (c[0] + c[1], c[1] + c[2], c[2]), (0.0, 1.0, at('d', jnp.float32)))[0]
    | '' says the same along d … differs along d
M -> '' | lax.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (1.0, at('d', jnp.float32)))[0]
    | '' says the same along d … differs along d
M | lax.fori_loop(0, 3, lambda i, c: lax.cond(i > 1, lambda e: e * at('d', jnp.float32), lambda e: e, c), x)
    | 'M' says the same along d … differs along d
M | lax.while_loop(lambda c: c[0] < at('d'), lambda c: (c[0] + 1, hop(c[1])), (0, x))[1]
    | a transfer over d under a branch … differs
M | lax.fori_loop(0, 3, lambda i, c: lax.cond(i > at('d'), hop, lambda e: e, c), x)
    | a transfer over d under a branch … differs
M | lax.while_loop(lambda c: c[1] > 0.5, lambda c: (hop(c[0]), c[1] * 0.5 * at('d', jnp.float32)), (x, 8.0))[0]
    | a transfer over d under a branch … differs
t/t M | lax.cond(at('d') > 0, lambda e: shardops.ppermute('t/t M -> t/t M', e, 1), lambda e: e, x)
    | a transfer over d under a branch … differs
d/d t/t M, d/d -> d/d t/t M | shardops.each('d', lambda e, k: lax.cond(k > 0, lambda e: shardops.ppermute(
    't/t M -> t/t M', e, 1), lambda e: e, e), x, y)
    | a transfer over d under a branch
B/d M/t -> B/d | shardops.psum('B/d +t -> B/d', lax.cond(at('t') > 0, lambda u: u, lambda u: 2 * u, forgotten(x)))
    | a result pending over t under a branch … split over it
B/d M/t -> B/d | shardops.psum('B/d +t -> B/d', lax.fori_loop(0, at('t'), lambda i, c: 2 * c, forgotten(x)))
    | a result pending over t under a branch … split over it
B/d M/t -> B/d | shardops.psum('B/d +t -> B/d', jnp.where(at('t') > 0, forgotten(x), -forgotten(x)))
    | 'where' (select_n) … pending over t and one split over it
B/d M/t -> B/d | shardops.psum('B/d +t -> B/d', forgotten(x) * at('t', jnp.float32))
    | 'mul' … pending over t and one split over it
B/d M/t -> B/d | lax.scan(lambda c, _: (shardops.psum('B/d +t -> B/d', c), None), forgotten(x), None, length=2)[0]
    | carry or a branch is pending over t
# Keys, rows and places that differ from device to device
M | x + lax.rng_uniform(0.0, 1.0, x.shape) | 'rng_uniform' draws other numbers on each device
i32 B/d -> B/d | jax.vmap(lambda n: jax.random.uniform(jax.random.key(n, impl='rbg')))(x)
    | draws with the first key alone along … split over d
B/d M | jnp.reshape(x, (shardops.axis_size('d'), -1)) | number of devices is given to a function
M | x * jax.random.uniform(jax.random.fold_in(jax.random.key(0), at('d')), x.shape)
    | 'M' says the same along d … differs along d
M | x[at('d')] * jnp.ones_like(x) | 'M' says the same along d … differs along d
M | shardops.psum('M +d -> M', jnp.zeros_like(x).at[at('d')].add(x[at('d')]))
    | 'M +d' says pending along d … split over d
M -> M/d | lax.dynamic_slice(x, (at('d') * 8,), (16,)) | 'M/d' says M/d … whole in the value
M/d -> M | jax.random.uniform(jax.random.key(x.shape[0]), (64,)) | 'M' is said of a number … how many devices
# Dims that lie in another way: lost, moved, in another order
M/t/d -> M/d/t | x | 'M/d/t' says M/d/t … split over t/d in the value
M/d/t F -> M F/t/d | shardops.all_to_all('M/d/t F -> M F/t/d', x) | all_to_all moves axes from one dim to one
t/t M -> d/d M | shardops.ppermute('d/d M -> d/d M', x, 1) | but the value differs along t
d/d M -> M | shardops.psum('M +d -> M', x[0]) | 'M +d' says pending along d … split over d
d/d M -> M | x.reshape(-1) | 'M' says the same along d … differs along d
8 d/d M -> Z | x.reshape(-1) | 'Z' says the same along d … differs along d
B/d M -> M B/d | x.reshape(64, -1) | 'reshape' makes a minor dim … split over d
d/d M, t/t M -> d/d M | x + y | 'add' of values that lie differently
B M/d/t, F M/d/t -> B F | shardops.psum('B F +d -> B F', shardops.einsum_unreduced('B M/d/t, F M/d/t -> B F +d +t', x,
    y)) | 'B F +d' says the same along t … still a sum over t
B M/d/t, F M/t/d -> B F | shardops.einsum_unreduced('B M/d/t, F M/t/d -> B F +d +t', x, y) | M/d/t in one operand, M/t/d
B/d L, M/d L -> L | shardops.psum('L +d -> L', shardops.einsum_unreduced('B/d L, M/d L -> L +d', x, y))
    | two dims … over d, B/d and M/d
B/d M -> M/d B | x.T | 'M/d B' says M/d … whole in the value
B/d M -> 8 Z | x.reshape(8, -1) | '8 Z' says Z … split over d in the value
B/d M -> Z/d 32 | x.reshape(32, 32) | 'Z/d 32' says Z/d … whole in the value
N B/d M -> Z/d M | x.reshape(-1, 64) | 'reshape' merges into the one before it … split over d
B/d M | jnp.tril(x) | positions that each device counts from 0
B M/t -> B F/t | jax.nn.glu(x) | must not depend on … a device's part
B M/t -> B F/t | x[:, : x.shape[1] // 2] | 'gather' indexes … split over t
B/d M -> 32/d M | jnp.tile(x, (2, 1)) | 'tile' changes the length … split over d
B L/t M, 3 M F -> B L/t F | lax.conv_general_dilated(x, y, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))
    | 'conv_general_dilated' runs along … split over t
B L M/t, 3 M/t F -> B L F | lax.conv_general_dilated(x, y, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))
    | 'conv_general_dilated' runs along … split over t
B L/t M | lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 1, 1), 'SAME')
    | 'reduce_window' (reduce_window_sum) runs along … split over t
B/d M, i32 V -> V M | shardops.index_unreduced('[B/d] M, V -> V M +d', x, y)
    | 'V M' says the same along d … still a sum over d
# Means and losses over what a device has
B/d, B/d -> '' | shardops.psum('+d -> ', total(x) / total(y)) | 'div' … not linear … pending over d
M, B/d M -> M | shardops.psum('M +d -> M', shardops.grad(lambda w: squares(y * w[None]))(x))
    | 'M +d' says the same along t … still a sum over t
M, B/d M -> M | x - 0.1 * shardops.grad(lambda w: squares(y * w[None]))(x) | 'sub' … pending over d and one that is not
M, B/d M -> M | reduced(lambda w: squares(y * w[None]) + jnp.sum(w), x) | 'add' … pending over d and one that is not
M, B/d M -> M | reduced(lambda w: shardops.sum_unreduced('B/d M -> +d', y * w[None]), x) | the loss is the same along t
M, B/d M -> M | reduced(lambda w: shardops.psum('+d +t -> +t', squares(y * w[None])), x)
    | loss is the same along d: … count once for each device
M, B/d M -> M | reduced(lambda w: shardops.psum('+d +t -> ', squares(y * w[None])), x) | before any psum
M, B/d M -> M | reduced(lambda w: squares(y * w[None])[None], x) | a scalar of a float type … float32[1]
'', B/d M -> '' | shardops.grad(lambda w: squares(y * w))(x)
    | still a sum over d and t … reduce it, or write '+d +t' … fix: shardops.psum('+d +t -> ')
M, B/d M -> '' | shardops.grad(lambda w: (squares(y * w[None]), squares(y)), has_aux=True)(x)[1]
    | '' says the same along d … still a sum over d
M, N B/d M -> M | reduced(lambda w: shardops.sum_over_chunks(lambda w, x, _: squares(x * w[None]) ** 2, w, y, y), x)
    | 'power' (integer_pow) … not linear … pending over d
M, B/d M -> M | shardops.vjp(lambda w: jnp.tanh(w[None] * y), x)[1](y)[0]
    | cotangent of result 0 is the same along t … pending … in shardops.vjp
B/d M, B/d M | shardops.vjp(jnp.tanh, x)[1](jnp.ones((16, 64)))[0]
    | cotangent has another shape … (16, 64) and (16/d, 64)
B/d | shardops.vjp(jnp.tanh, x)[1](jnp.arange(x.shape[0], dtype=jnp.float32))[0]
    | cotangent of result 0 is positions that each device counts
# What has no gradient is refused by the check already, not by the run
B/d M/t | gradient(lambda x: x - shardops.pmax('B/d M/t -> B/d', x)[:, None], x)
    | pmax has no gradient: pass it lax.stop_gradient(x)
B/d M/t | gradient(lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 2 * c[1]), (0, x))[1], x)
    | Reverse-mode differentiation does not work for lax.while_loop
# Rules for gradients that are not linear, or send
M, B/d M -> B/d M | own_vjp(lambda w, x: x * w[None], lambda r, g: (jnp.max(g * r[1], axis=0), g * r[0][None]))(x, y)
    | 'reduce_max' reduces … split over d
M | own_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), t[0] * at('d', jnp.float32)))(x)
    | 'mul' … pending over d and one split over it
# Operands that lose a dim of a part's size, that have no elements, or are no numbers that XLA sends
B/d M, C M -> C M | lax.linalg.householder_product(y, jnp.ones(x.shape[0]))
    | 'householder_product' runs along … made to the size of a device's part
B/d M, C M -> C | lax.reduce((y, jnp.ones(x.shape)), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,))[0]
    | 'reduce' changes the length … made to the size of a device's part
M/d -> M | shardops.psum('M Z -> M Z', shardops.pending('M Z -> M Z +d', jnp.zeros((64, 0))))[:, 0]
    | an operand without elements, float32[64, 0]
M/d -> M | shardops.all_gather('M/d -> M', x.astype(jnp.int2)).astype(jnp.float32)
    | an operand of int2 … fix: .astype(jnp.int8)
M -> M/d | jax.random.uniform(shardops.slice('M -> M/d', jax.random.split(jax.random.key(0), 64))[0], x.shape)
    | an operand of key<fry>: operations take numbers
# What packages compute otherwise where two sizes are equal
B/d M | x * jnp.array_equal(jnp.arange(x.shape[0]), jnp.arange(8)) | 16/d compared with 8
8 8 8, 8 K/d -> 8 8 K/d | jnp.linalg.solve(x, y) | 112/d compared with 8
# Dims of one element a device keep their place
d/d M -> d/d 1 | x @ x.T | 'dot_general' makes two dims … split over d
d/d M -> d/d | jnp.sum(x[:, jnp.array([0])], 1) | 'gather' of a dim of one element
d/d M -> M d/d | x.reshape(64, 1) | 'reshape' of a dim of one element
d/d M, t/t M -> t/t d/d | x @ y.T | 't/t d/d' says t/t … split over d in the value
d/d t/t M -> t/t d/d M | jnp.stack([x, x])[0] | 't/t d/d M' says t/t … split over d in the value
d/d M, M 1 -> 1 d/d | x @ y | '1 d/d' says 1 … split over d in the value
# Whole numbers that wrap around
i32 B/d -> '' | shardops.psum('+d +t -> ', shardops.sum_unreduced('B/d -> +d', x) / shardops.axis_size('t'))
    | int32, pending over d, over a number … wrap around
# What JAX runs on one device alone, and what it does not run
B/d M | (jax.debug.print('{}', 1, ordered=True), x)[1] | 'debug_print' with ordered=True runs on one device alone
B/d M | shardops.local('B/d M -> B/d M', lambda x: (jax.debug.print('{}', x, ordered=True), x)[1], x)
    | 'debug_print' with ordered=True runs on one device alone
M, B/d M -> M | put_aside(x, y) | used outside of the differentiated function … fix: return it too
M/d, M -> M | shardops.local('M -> M', functools.partial(lambda o, v: v * o.sum(), x), y)
    | local to a device takes a value from outside … differs
""")


# What is done to u, a sum over t that is owed: 'B/d M +t'.
NOT_LINEAR = table(r"""
u * u | 'mul' … both pending over t
u @ u.T @ u | 'dot_general' … both pending over t
u + 1 | 'add' … pending over t and one that is not
u * jnp.argmax(u, axis=1, keepdims=True).astype(jnp.float32) | 'argmax', which is not linear
jnp.cumprod(u, axis=1) | 'cumprod', which is not linear
lax.reduce_precision(u, 4, 3) | 'reduce_precision', which is not linear
jnp.where(u > 0, u, 0.0) | 'gt', which is not linear
jnp.where(jnp.arange(64)[None] > 3, u, 1.0) | 'where' (select_n) … pending over t and one that is not
u.at[:, :1].set(1.0) | 'scatter' … pending over t and one that is not
jnp.pad(u, ((0, 0), (1, 0)), constant_values=1.0)[:, 1:] | 'pad' … pending over t and one that is not
jnp.arange(64, dtype=jnp.float32)[u.astype(jnp.int32)] | 'astype' (convert_element_type) makes int32 of a value
jnp.concatenate([u[:, :3], jnp.ones_like(u[:, 3:])], axis=1) | 'concatenate' … pending over t and one that is not
jnp.stack([u, jnp.ones_like(u)])[0] | 'stack' … pending over t and one that is not
lax.scan(lambda c, _: (c + u, None), jnp.ones_like(u), None, length=3)[0] | 'add' of a value that is pending
lax.scan(lambda c, _: (u, None), jnp.ones_like(u), None, length=3)[0]
    | a carry or a branch is pending … fix: … shardops.zeros
lax.cond(jnp.float32(3) > 2, lambda v: v, lambda v: jnp.ones_like(v), u) | carry or a branch is pending over t
shardops.pending('B/d M -> B/d M +t', u) | still a sum over t
lax.clamp(-1.0, u, 1.0) | 'clamp', which is not linear
jnp.sum(u, axis=1, keepdims=True, initial=1.0) * jnp.ones((1, 64)) | 'sum' (add) … pending over t and one that is not
lax.reduce(u, 1.0, lax.add, (1,))[:, None] + u | 'reduce', which is not linear
u.at[:, jnp.arange(64) + 10].get(mode='fill', fill_value=1.0) | 'gather', which is not linear
u.at[:, 0].add(1.0) | 'add' (scatter-add) … pending over t and one that is not
u.at[:, 0].multiply(u[:, 1]) | 'multiply' (scatter-mul), which is not linear
u.at[:, jnp.array([0, 0])].set(u[:, 1:3]) | 'scatter', which is not linear
u.at[:, 0].max(0.0) | 'max' (scatter-max), which is not linear
u.at[:, 0].apply(jnp.tanh) | 'scatter_apply' (scatter), which is not linear
lax.bitcast_convert_type(u, jnp.int32) | the element type is int32
u.astype(bool) | a sum of truth values is none
jax.checkpoint(jnp.tanh, policy=jax.checkpoint_policies.dots_saveable)(u) | 'tanh', which is not linear
own_vjp(jnp.tanh, lambda r, g: (g,))(u) | 'tanh', which is not linear
own_rule(lambda u: 2 * u, lambda u: (2 * u, jnp.tanh(u)), lambda r, g: (g * r,))(u) | 'tanh', which is not linear
own_jvp(jnp.tanh, lambda x, t: (jnp.tanh(x[0]), t[0]))(u) | 'tanh', which is not linear
lax.dynamic_update_slice(u, jnp.ones_like(u[:, :3]), (0, 0))
    | 'dynamic_update_slice' … pending over t and one that is not
lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c) + u, u) | 'tanh', which is not linear
lax.fori_loop(0, 2, lambda i, c: (c[1], c[0]), (u, jnp.ones_like(u)))[0] | carry or a branch is pending over t
shardops.psum('B/d M +t -> B/d M', u) | 'B/d M +t' says pending along t … already the same along t
shardops.local('B/d M -> B/d M', lambda v: v, u) | 'B/d M' says the same along t … still a sum over t""")


@typed
def owed(x: f32['B/d F/t'], w: f32['M F/t']) -> f32['B/d M +t']:
    return shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', x, w)


# Functions along the dim of x, 'M/t', that is split.
ALONG_A_SPLIT_DIM = """
jnp.max jnp.min jnp.mean jnp.std jnp.median jnp.ptp jnp.nanmax jnp.prod jnp.any jnp.all jnp.count_nonzero jnp.cumprod
lax.cummax lax.cumlogsumexp jax.nn.log_softmax jax.nn.logsumexp jax.nn.standardize jnp.flip jnp.linalg.norm
jnp.fft.rfft jnp.gradient jnp.argsort jnp.argmax
""".split()
# Functions of a sum that is owed, each as f(u), that are not linear.
NOT_LINEAR_FUNCTIONS = """
jnp.abs jnp.sign jnp.round jnp.floor jnp.square jnp.sqrt jnp.reciprocal jnp.isfinite jnp.nan_to_num jax.nn.gelu
jax.nn.relu6 jax.nn.sigmoid jax.nn.log_softmax lax.erf lax.rsqrt jnp.logical_not jnp.angle jnp.sort
""".split()
# Functions whose value of zeros, which lie in any way, is not zero: what is made of zeros lies as what is made of ones.
NOT_ZERO_OF_ZERO = """
jnp.exp jnp.cos jax.nn.sigmoid jax.nn.softmax jnp.ones_like jax.nn.softplus jnp.logical_not
""".split()


def of_owed(expression):
    """The types and the body of a program that takes the sum u, of which the expression is made."""
    return "B/d F/t, M F/t -> B/d M", f"shardops.psum('B/d M +t -> B/d M', (lambda u: {expression})(owed(x, y)))"


ROWS = [
    *REFUSED,
    *((*of_owed(expression), message) for expression, message in NOT_LINEAR),
    *(
        ("M/t -> ''", f"jnp.sum(jnp.real({name}(x))).astype(jnp.float32)", "a dim that is split")
        for name in ALONG_A_SPLIT_DIM
    ),
    *((*of_owed(f"{name}(u).astype(jnp.float32)"), "not linear … pending over t") for name in NOT_LINEAR_FUNCTIONS),
    *(
        (
            *of_owed(f"u + {name}(jnp.zeros((1, 64))).astype(jnp.float32)"),
            "'add' … pending over t and one that is not",
        )
        for name in NOT_ZERO_OF_ZERO
    ),
]


@each_row(ROWS)
def test_what_is_wrong_on_some_mesh_is_refused(row):
    """A split dim that is treated as whole, a sum that is forgotten, a function of a pending value that is not linear,
    a collective or a gradient outside of shardops, what has no gradient, what depends on how many devices there are:
    refused with its text and line. tests/test_verdict.py has the other meshes."""
    types, body, message = row
    text = refused(program(types, body, globals()))
    assert says(message, text), text


def test_a_dim_that_counts_devices_has_their_number():
    """Another size of a dim that is named like an axis is refused."""
    mesh = jax.sharding.AbstractMesh((4, 2), ("d", "t"))
    with pytest.raises(ShardingError, match="is 3, but d is 4 in the mesh"):
        typed_shard_map(program("d/d M", "x")).check(mesh, jax.ShapeDtypeStruct((3, 64), jnp.float32))


def test_the_mesh_divides_sizes_that_a_program_makes():
    """A quarter of a part, as a number or as a dim, is refused on the mesh that does not divide it, and there alone."""
    for body in ("x * ((x.shape[0] // 4) * shardops.axis_size('d'))", "x.reshape(-1, 4).reshape(-1)"):
        function = program("8/d", body)
        assert "2/d, which d=4 cannot divide" in refused(function, dict(d=4, t=2))
        assert prove(function, dict(d=2, t=2)) > 0


def test_the_mesh_divides_sizes_that_jax_makes():
    """JAX's own helper makes 4/d of 16/d where the mesh divides that; on eight devices it is refused."""
    scaled = program("B/d M", "x * (pl.cdiv(x.shape[0], 4) * shardops.axis_size('d'))", {"pl": pl})
    assert prove(scaled, dict(d=4, t=2))
    assert "which the mesh does not divide" in refused(scaled, dict(d=8, t=1))


@pytest.mark.parametrize("body", [
    "n // 4 * 3", "divmod(n, 4)[1]", "2 if n == 16 else 3", "2 if n in (8, 16) else 3", "{16: 2}.get(n, 3)",
])  # fmt: skip
def test_what_a_package_decides_by_a_size_is_refused(body, tmp_path):
    """An installed package and code of no file may decide no more than the program itself."""
    (tmp_path / "site-packages").mkdir()
    module = module_of(tmp_path / "site-packages/decided.py", f"decided = lambda n: {body}\n")
    for decided in module.decided, eval(f"lambda n: {body}"):
        text = refused(program("B/d M", "x * decided(x.shape[0])", {"decided": decided}), dict(d=8, t=1))
        assert "depend on the size of a device's part" in text or "which d=8 cannot divide" in text


# -- Annotations -------------------------------------------------------------------------------------------------------
def test_annotations_without_a_value():
    """An annotated local without a value is refused where it stands: nobody could read it."""
    with pytest.raises(ShardingError) as caught:

        @typed
        def later(x: f32['B/d M']) -> f32['B/d M']:
            y: f32['B/d']
            y = x
            return y

    assert says("'y: f32['B/d']' has no value here: annotate y … at", str(caught.value))


def test_leading_dims_that_a_field_cannot_have():
    """Array['...', cls] takes dims alone, and no axis that a field has already."""
    with pytest.raises(ShardingError, match=r"Array\['layers \+d', \.\.\.\] adds dims to fields"):
        Array['layers +d', Inner]
    with pytest.raises(ShardingError, match=r"'layers/d B/d' uses mesh axis d twice"):
        Array['layers/d', Inner]


POSTPONED = '''
from __future__ import annotations
from shardlib import shardops
from shardlib.shardtypes import f32, pytree_dataclass
from shardlib.typed import typed

@pytree_dataclass
class Totals:
    total: f32['B/d']

def wrong(x: f32['B/d M/t']) -> f32['B/d']:
    return inner(Totals(shardops.sum_unreduced('B/d M/t -> B/d +t', x)))

@typed
def inner(totals: Totals) -> f32['B/d']:
    return totals.total

def local(x: f32['B/d M/t']) -> f32['B/d M/t']:
    y: f32['B/d'] = shardops.sum_unreduced('B/d M/t -> B/d +t', x)
    return x
'''


def test_postponed_annotations(tmp_path):
    """Under `from __future__ import annotations`, where annotations are strings, fields and locals are checked too."""
    module = module_of(tmp_path / "postponed.py", POSTPONED)
    for function, said in ((module.wrong, "argument totals of inner"), (module.local, "local y: f32['B/d']")):
        assert all(said in refusal(function, mesh) for mesh in MESHES)
