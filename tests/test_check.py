"""The check: which programs it refuses, with which text, and which it must accept; on four meshes, one device included."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh
from prove import OF_D_AND_T, prove_everywhere, refusal, refused_everywhere

from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shardtypes import ShardingError, check, f32, i32, make_shardings, typed_shard_map
from shardlib.typed import typed


@typed
def owed(x: f32['B/d F/t'], w: f32['M F/t']) -> f32['B/d M +t']:
    return shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', x, w)


def after(function, operation):
    """A program that applies `function` to a sum over t that is owed, then takes the sum."""

    def program(x: f32['B/d F/t'], w: f32['M F/t']) -> f32['B/d M']:
        return shardops.psum(operation, function(owed(x, w)))

    return program


ROW = 'B/d M +t -> B/d M'

# -- What stays a pending sum ------------------------------------------------------------------------------------------
same = jnp.float32(3)
LINEAR = {
    "-u": lambda u: -u,
    "u * 2": lambda u: u * 2,
    "u / n": lambda u: u / u.shape[-1],
    "u * same": lambda u: u * jnp.arange(64, dtype=jnp.float32)[None],
    "u @ same": lambda u: u @ jnp.eye(64),
    "u + u": lambda u: u + u,
    "u - u": lambda u: u - 2 * u,
    "where(same, u, 0)": lambda u: jnp.where(jnp.arange(64)[None] > 3, u, 0.0),
    "where(same, u, u)": lambda u: jnp.where(jnp.arange(64)[None] > 3, u, -u),
    "cumsum": lambda u: jnp.cumsum(u, axis=1),
    "flip": lambda u: jnp.flip(u, axis=1),
    "roll": lambda u: jnp.roll(u, 1, axis=1),
    "indexing": lambda u: u[:, jnp.arange(64)],
    "take": lambda u: jnp.take(u, jnp.arange(64), axis=1),
    "at add zeros": lambda u: jnp.zeros_like(u).at[:, :3].add(u[:, :3]),
    "at add": lambda u: u.at[:, 3:4].add(u[:, :1]),
    "pad with zeros": lambda u: jnp.pad(u, ((0, 0), (1, 0)))[:, 1:],
    "concatenate": lambda u: jnp.concatenate([u[:, :3], u[:, 3:]], axis=1),
    "stack": lambda u: jnp.unstack(jnp.stack([u, -u]))[0],
    "bfloat16": lambda u: u.astype(jnp.bfloat16).astype(jnp.float32),
    "reshape": lambda u: u.reshape(u.shape[0], 8, 8).reshape(u.shape),
    "barrier": lambda u: lax.optimization_barrier((u, same))[0],
    "scan": lambda u: lax.scan(lambda c, _: (c + u, None), shardops.zeros('B/d M +t', f32), None, length=3)[0],
    "zeros to start with": lambda u: lax.scan(lambda c, _: (c + u, None), jnp.zeros_like(u), None, length=3)[0],
    "stop_gradient": lambda u: lax.stop_gradient(u),
    "nested jit": lambda u: jax.jit(lambda v: 2 * v)(u),
    "remat": lambda u: jax.checkpoint(lambda v: 2 * v)(u),
    "cond on the same": lambda u: lax.cond(same > 2, lambda v: v, lambda v: 2 * v, u),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_keeps_a_sum(name):
    """Harmless scaling and every other linear function of a pending value is accepted, on every mesh."""
    prove_everywhere(after(LINEAR[name], ROW))


NOT_LINEAR = {
    "silu": (jax.nn.silu, "'logistic', which is not linear, of a value that is pending over t"),
    "relu": (jax.nn.relu, "'max', which is not linear"),
    "square": (lambda u: u**2, "'power' \\(integer_pow\\), which is not linear"),
    "integer power": (lambda u: u**3, "'power' \\(integer_pow\\), which is not linear"),
    "u * u": (lambda u: u * u, "'mul' of two values that are both pending over t: the product of sums is not the sum of products"),
    "u @ u": (lambda u: u @ u.T @ u, "'dot_general' of two values that are both pending over t"),
    "same / u": (lambda u: 1 / u, "'div', which is not linear"),
    "u + same": (lambda u: u + jnp.ones_like(u), "'add' of a value that is pending over t and one that is not: each device would add it again\n  fix: reduce the pending one first"),
    "u + 1": (lambda u: u + 1, "'add' of a value that is pending over t and one that is not"),
    "same - u": (lambda u: 1 - u, "'sub' of a value that is pending over t and one that is not"),
    "max": (lambda u: u - jnp.max(u, axis=1, keepdims=True), "'max' \\(reduce_max\\), which is not linear"),
    "argmax": (lambda u: u * jnp.argmax(u, axis=1, keepdims=True).astype(jnp.float32), "'argmax', which is not linear"),
    "sort": (lambda u: jnp.sort(u, axis=1), "'sort', which is not linear"),
    "where(u, ...)": (lambda u: jnp.where(u > 0, u, 0.0), "'gt', which is not linear"),
    "where(same, u, 1)": (lambda u: jnp.where(jnp.arange(64)[None] > 3, u, 1.0), "'where' \\(select_n\\) of a value that is pending over t and one that is not"),
    "at set": (lambda u: u.at[:, :1].set(1.0), "'(scatter|dynamic_update_slice)'"),
    "pad with ones": (lambda u: jnp.pad(u, ((0, 0), (1, 0)), constant_values=1.0)[:, 1:], "'pad' of a value that is pending over t and one that is not"),
    "index": (lambda u: jnp.arange(64, dtype=jnp.float32)[u.astype(jnp.int32)], "'astype' \\(convert_element_type\\), which is not linear"),
    "softmax": (lambda u: jax.nn.softmax(u, axis=1), "'softmax' \\(reduce_max\\), which is not linear"),
    "cumprod": (lambda u: jnp.cumprod(u, axis=1), "'cumprod', which is not linear"),
    "concatenate": (lambda u: jnp.concatenate([u[:, :3], jnp.ones_like(u[:, 3:])], axis=1), "'concatenate' of a value that is pending over t and one that is not"),
    "stack": (lambda u: jnp.stack([u, jnp.ones_like(u)])[0], "'stack' of a value that is pending over t and one that is not"),
    "scan from ones": (lambda u: lax.scan(lambda c, _: (c + u, None), jnp.ones_like(u), None, length=3)[0], "'add' of a value that is pending"),
    "scan that ends pending": (lambda u: lax.scan(lambda c, _: (u, None), jnp.ones_like(u), None, length=3)[0], "a carry or a branch is pending over t on one path and not on the other\n  fix: start the carry with shardops.zeros"),
    "cond": (lambda u: lax.cond(same > 2, lambda v: v, lambda v: jnp.ones_like(v), u), "a carry or a branch is pending over t on one path"),
    "cond on it": (lambda u: lax.cond(jnp.all(u > 2), lambda v: v, lambda v: v, u), "'gt', which is not linear"),
    "while": (lambda u: lax.while_loop(lambda c: jnp.any(c < 3), lambda c: 2 * c, u), "'lt', which is not linear"),
    "not summed": (lambda u: shardops.pending('B/d M -> B/d M +t', u), "the value is still a sum over t that nobody has taken"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_refuses_a_sum(name):
    """A non-linear function of a pending value, pending + same, and the like are refused by name, with the line, on every mesh."""
    function, message = NOT_LINEAR[name]
    text = refused_everywhere(after(function, ROW))
    assert re.search(message, text), text


# -- What stays split --------------------------------------------------------------------------------------------------
def mapped(annotation, function, result=None):
    def program(x: annotation) -> result or annotation:
        return function(x)

    return program


SPLIT = {
    "elementwise": (f32['B/d L M/t'], lambda x: jnp.tanh(x) * 2 + x),
    "norm over a whole dim": (f32['B/d M'], lambda x: x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))),
    "softmax over a whole dim": (f32['B/d M'], lambda x: jax.nn.softmax(x, axis=-1)),
    "layer_norm": (f32['B/d M'], lambda x: jax.nn.standardize(x, axis=-1)),
    "cumsum along a whole dim": (f32['B/d M'], lambda x: jnp.cumsum(x, axis=1)),
    "roll a whole dim": (f32['B/d M'], lambda x: jnp.roll(x, 1, axis=1)),
    "sort a whole dim": (f32['B/d M'], lambda x: jnp.sort(x, axis=1)),
    "argsort and take_along_axis": (f32['B/d M'], lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1)),
    "top_k of a whole dim": (f32['B/d M'], lambda x: x * lax.top_k(x, 2)[0][:, :1]),
    "halves": (f32['B/d M'], lambda x: jnp.concatenate([x[:, 32:], x[:, :32]], axis=1)),
    "split": (f32['B/d M'], lambda x: jnp.concatenate(jnp.split(x, 2, axis=1), axis=1)),
    "at set in a whole dim": (f32['B/d M'], lambda x: x.at[:, 0].set(1.0)),
    "causal mask": (f32['B/d L S'], lambda x: jnp.where(jnp.tril(jnp.ones((32, 32), bool))[None], x, -1e30)),
    "positions": (f32['B/d L M/t'], lambda x: x + jnp.arange(32, dtype=jnp.float32)[None, :, None]),
    "one_hot": (i32['B/d'], lambda i: jnp.argmax(jax.nn.one_hot(i, 8), axis=-1).astype(jnp.int32)),
    "heads apart and together": (f32['B/d M'], lambda x: jnp.swapaxes(x.reshape(x.shape[0], 8, 8), 1, 2).swapaxes(1, 2).reshape(x.shape)),
    "split heads apart and together": (f32['B/d M/t'], lambda x: jnp.tanh(x.reshape(x.shape[0], -1, 4)).reshape(x.shape)),
    "tokens flattened and back": (f32['B/d L M'], lambda x: jnp.tanh(x.reshape(-1, x.shape[-1])).reshape(x.shape)),
    "microbatches": (f32['L/d M'], lambda x: shardops.regroup('parts R/d M -> L/d M', lax.map(jnp.tanh, shardops.regroup('L/d M -> parts R/d M', x, parts=2)))),
    "dropout": (f32['B/d M/t'], lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(jnp.float32)),
    "zeros made locally": (f32['B/d M/t'], lambda x: jnp.zeros(x.shape) + x),
    "only zeros": (f32['B/d M/t'], lambda x: jnp.zeros(x.shape)),
    "scan over a whole dim": (f32['B/d L M'], lambda x: jnp.moveaxis(lax.scan(lambda c, r: (c + r, c + r), jnp.zeros(x[:, 0].shape), jnp.moveaxis(x, 1, 0))[1], 0, 1)),
    "associative_scan along a whole dim": (f32['B/d L'], lambda x: lax.associative_scan(jnp.add, x, axis=1)),
    "carry: same to split": (f32['B/d M/t'], lambda x: lax.scan(lambda c, _: (c + x, None), jnp.zeros(x.shape), None, length=2)[0]),
    "fori_loop": (f32['B/d M/t'], lambda x: lax.fori_loop(0, 3, lambda i, c: 2 * c, x)),
    "while on what is split": (f32[''], lambda x: lax.while_loop(lambda c: c < 10, lambda c: c + 1, x)),
    "vmap of JAX alone": (f32['B/d M'], lambda x: jax.vmap(jnp.sort)(x)),
    "remat": (f32['B/d M'], lambda x: jax.checkpoint(jnp.sin)(x)),
    "nested jit": (f32['B/d M'], lambda x: jax.jit(jnp.sin)(x)),
    "debug print of a sum": (f32['B/d M'], lambda x: jax.debug.print("{}", x) or x),
    "barrier with all sorts": (f32['B/d M'], lambda x: lax.optimization_barrier((x, shardops.sum_unreduced('B/d M -> M +d', x)))[0]),
    "dynamic_update_slice of a cache": (f32['B/d L M'], lambda x: lax.dynamic_update_slice(x, x[:, :1], (0, 3, 0))),
    "zeros as the first carry of an annotated sum": (f32['B/d M'], lambda x: x * shardops.psum('+d -> ', lax.scan(lambda c, r: (check(f32, '+d', c) + shardops.sum_unreduced('B/d -> +d', r), None), jnp.float32(0), x.T)[0])),
    "grouped heads repeated": (f32['B/d K/t'], lambda x: jnp.max(jnp.repeat(x, 3, axis=1).reshape(x.shape[0], x.shape[1], 3) + shardops.zeros('B/d K/t 3', f32), axis=2)),
    "lookup in a whole table": (i32['B/d L'], lambda i: jnp.arange(99, dtype=jnp.int32)[i]),
    "segment mask": (i32['B/d L'], lambda i: jnp.sum(i[:, :, None] == i[:, None, :], axis=2).astype(jnp.int32)),
    "rotary": (f32['B/d L M/t'], lambda x: x * jnp.cos(jnp.arange(32, dtype=jnp.float32))[None, :, None]),
    "top-level constant": (f32['B/d M'], lambda x: x * np.arange(64, dtype=np.float32)[None]),
    "batched product": (f32['B/d L S'], lambda x: jnp.einsum('bls,bsm->blm', x, x)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_everyday_programs_pass(name):
    """What treats each device's part by itself is accepted, on every mesh."""
    prove_everywhere(mapped(*SPLIT[name]))


WRONG = {
    "mean over a split batch": (f32['B/d M'], lambda x: x - jnp.mean(x, axis=0, keepdims=True), "'mean' (reduce_sum) reduces a dim that is split over d: each device would take its own part for the whole\n  fix: a split dim is reduced only by an operation with a string"),
    "mean over everything": (f32['B/d M'], lambda x: x - jnp.mean(x), "'mean' (reduce_sum) reduces a dim that is split over d"),
    "mean over a flattened batch": (f32['B/d M'], lambda x: x - jnp.mean(x.reshape(-1)), "'mean' (reduce_sum) reduces a dim that is split over d"),
    "norm over split features": (f32['B/d M/t'], lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True), "'reduce_sum' reduces a dim that is split over t"),
    "norm over split heads": (f32['B/d M/t'], lambda x: (lambda y: (y / jnp.sum(y, axis=(1, 2), keepdims=True)).reshape(x.shape))(x.reshape(x.shape[0], -1, 4)), "'sum' (reduce_sum) reduces a dim that is split over t"),
    "softmax over split vocabulary": (f32['B/d V/t'], lambda x: jax.nn.softmax(x, axis=-1), "'softmax' (reduce_max) reduces a dim that is split over t"),
    "argmax over split vocabulary": (f32['B/d V/t'], lambda x: x * jnp.argmax(x, axis=1)[:, None].astype(jnp.float32), "'argmax' reduces a dim that is split over t"),
    "cumsum along a split dim": (f32['B/d L'], lambda x: jnp.cumsum(x, axis=0), "'cumsum' runs along a dim that is split over d: each device would take its own part for the whole\n  fix: all_gather it first"),
    "sort along a split dim": (f32['B/d L'], lambda x: jnp.sort(x, axis=0), "'sort' runs along a dim that is split over d"),
    "top_k of split vocabulary": (f32['B/d V/t'], lambda x: x + lax.top_k(x, 1)[0], "'top_k' runs along a dim that is split over t"),
    "roll of a split sequence": (f32['B L/t'], lambda x: jnp.roll(x, 1, axis=1), "takes a part of a dim that is split over t"),
    "flip of a split sequence": (f32['B L/t'], lambda x: jnp.flip(x, axis=1), "'flip' (rev) reverses a dim that is split over t"),
    "first row": (f32['B/d M'], lambda x: x - x[0][None], "'(slice|squeeze)' (takes a part of|drops) a dim that is split over d"),
    "shift by padding": (f32['B L/t'], lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :-1], "'pad' lengthens a dim that is split over t"),
    "concatenate along a split dim": (f32['B L/t'], lambda x: jnp.concatenate([x, x], axis=1)[:, : x.shape[1]], "'concatenate' lengthens a dim that is split over t"),
    "unstack along a split dim": (f32['B L/t'], lambda x: x + jnp.unstack(x, axis=1)[0][:, None], "'unstack' takes parts of a dim that is split over t"),
    "lookup in a split table": (f32['V/t M'], lambda x: x + x[jnp.zeros((1,), jnp.int32)], "'gather' indexes a dim that is split over t: each device would take its own part for the whole\n  fix: all_gather it first; index_unreduced"),
    "take_along_axis in a split dim": (f32['B/d V/t'], lambda x: x - jnp.take_along_axis(x, jnp.zeros((x.shape[0], 1), jnp.int32), axis=1), "'gather' indexes a dim that is split over t"),
    "at set in a split dim": (f32['B/d M'], lambda x: x.at[0].set(1.0), "a dim that is split over d"),
    "contraction of split dims": (f32['B/d M/t'], lambda x: (x @ x.T) @ x, "'dot_general' contracts a dim that is split over t"),
    "all pairs of a split batch": (f32['B/d M'], lambda x: jnp.max(x @ x.T, axis=1, keepdims=True) * x, "'dot_general' makes two dims that are split over d: each device has only the parts of its own index\n  fix: all_gather one operand first"),
    "mask of all pairs": (f32['L/d'], lambda x: jnp.max((x[:, None] > x[None]).astype(jnp.float32), axis=1) * x, "makes two dims that are split over d"),
    "local positions of a split sequence": (f32['B L/t'], lambda x: x + jnp.arange(x.shape[1], dtype=jnp.float32)[None], "'add' of values that lie differently: dim 1 is whole in one, split over t in another"),
    "a scan over a split sequence": (f32['L/t M'], lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(x.shape[1]), x)[1], "a scan over a dim that is split over t: each device would go through its own part alone"),
    "associative_scan along a split dim": (f32['B L/t'], lambda x: lax.associative_scan(jnp.add, x, axis=1), "a dim that is split over t"),
    "local histogram": (i32['B/d L'], lambda i: i + jnp.zeros(8, jnp.int32).at[i].add(1)[0], "'add' (scatter-add) writes at indices of a dim that is split over d: each device would take its own part for the whole\n  fix: all_gather indices and values first"),
    "keys from split data": (i32['B/d'], lambda i: i + jax.random.bits(jax.vmap(lambda s: jax.random.fold_in(jax.random.key(0), s))(i)[0], dtype=jnp.uint32).astype(jnp.int32), "that is split"),
    "mean of microbatches": (f32['B/d L'], lambda x: x - jnp.mean(x.reshape(2, -1, 32), axis=(0, 1))[None], "'mean' (reduce_sum) reduces a dim that is split over d"),
    "scan that adds a split batch": (f32['B/d L'], lambda x: x - lax.scan(lambda c, r: (c + r, None), jnp.zeros(32), x)[0][None], "a scan over a dim that is split over d"),
    "transposed": (f32['B/d M'], lambda x: x @ (x.T @ jnp.zeros((x.shape[0], x.shape[1]))), "'dot_general' contracts a dim that is split over d"),
    "Fourier transform of a split dim": (f32['M/d'], lambda x: jnp.fft.fft(x).real, "'fft' of a value with a dim that is split over d: what it does to the parts is not known here\n  fix: all_gather it first, or call it through shardops.local"),
    "a callback with a result": (f32['B/d M'], lambda x: jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x), "'pure_callback': what it does cannot be seen\n  fix: call it through shardops.local"),
    "a kernel": (f32['B/d M'], lambda x: pl.pallas_call(lambda a, b: b.__setitem__(..., a[...]), jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x), "'pallas_call': what it does cannot be seen\n  fix: call it through shardops.local, with a declared type"),
    "jax.grad": (f32['M'], lambda x: jax.grad(lambda y: jnp.sum(y * y))(x), "a jax.grad, jax.vjp or jax.jvp inside typed_shard_map"),
    "jax.grad of what is linear": (f32['M'], lambda x: jax.grad(lambda y: jnp.sum(y))(x), "fix: use shardops.value_and_grad, shardops.grad or shardops.vjp"),
    "jax.grad through an operation": (f32['M/d'], lambda x: jax.grad(lambda y: jnp.sum(shardops.all_gather('M/d -> M', y)))(x), "a jax.grad, jax.vjp or jax.jvp"),
    "jax.vjp": (f32['M'], lambda x: jax.vjp(jnp.sin, x)[1](x)[0], "a jax.grad, jax.vjp or jax.jvp"),
    "jax.jvp": (f32['M'], lambda x: jax.jvp(jnp.sin, (x,), (x,))[1], "a jax.grad, jax.vjp or jax.jvp"),
    "jax.hessian": (f32['M'], lambda x: jnp.diag(jax.hessian(lambda y: jnp.sum(y**3))(x)), "a jax.grad, jax.vjp or jax.jvp"),
    "lax.psum": (f32['M/d'], lambda x: x / lax.psum(x, 'd'), "'psum' over d outside of shardops: every transfer is written as an operation with a string"),
    "lax.pmean": (f32['M/d'], lambda x: lax.pmean(x, 'd'), "'pmean' (psum) over d outside of shardops"),
    "lax.pmax": (f32['M/d'], lambda x: lax.pmax(x, 'd'), "'pmax' over d outside of shardops"),
    "lax.all_gather": (f32['M/d'], lambda x: lax.all_gather(x, 'd', tiled=True)[: x.shape[0]], "'all_gather' over d outside of shardops"),
    "lax.psum_scatter": (f32['M'], lambda x: x * jnp.sum(lax.psum_scatter(x, ('d', 't'), tiled=True)), "'psum_scatter' (reduce_scatter) over d, t outside of shardops"),
    "lax.ppermute": (f32['M/t'], lambda x: lax.ppermute(x, 't', [(0, 0)]), "'ppermute' over t outside of shardops"),
    "lax.all_to_all": (f32['M/t'], lambda x: lax.all_to_all(x, 't', 0, 0, tiled=True), "'all_to_all' over t outside of shardops"),
    "lax.axis_index": (f32['M/t'], lambda x: x * lax.axis_index('t').astype(jnp.float32), "'axis_index' over t outside of shardops"),
    "lax.psum in a scan": (f32['M/d'], lambda x: lax.scan(lambda c, _: (lax.psum(c, 'd'), None), x, None, length=2)[0], "'psum' over d outside of shardops"),
    "vmap of an operation": (f32['B M/d'], lambda x: shardops.all_gather('B M/d -> B M', x)[:, :1] * jax.vmap(lambda r: shardops.all_gather('M/d -> M', r)[: r.shape[0]])(x), "an operation or an annotation under jax.vmap: its string does not name the mapped dim\n  fix: write the dim in the string"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_refused(name):
    """A split dim that is treated as whole, a collective or a gradient outside of shardops: refused with its text and line, on every mesh."""
    annotation, function, message = WRONG[name]
    text = refused_everywhere(mapped(annotation, function))
    assert message in text or re.search(message, text), text


# -- Control flow, closures, what is hidden ----------------------------------------------------------------------------
def test_a_carry_from_the_same_to_split_is_refused_on_one_device_too():
    """A carry that starts whole and comes back split is refused even where the mesh's sizes do not show it."""

    def program(x: f32['M']) -> f32['M/t']:
        return lax.scan(lambda c, _: (shardops.slice('M -> M/t', c), None), x, None, length=1)[0]

    text = refusal(program, dict(d=1, t=1))
    assert "a carry or a branch has values that lie differently: dim 0 is whole in one, split over t in another" in text


def test_what_is_whole_is_not_split_on_one_device():
    """Calling a whole value split is refused where sizes cannot tell: 8 x 1 is as strict as 4 x 2; two levels of message."""

    def program(x: f32['M']) -> f32['M/t']:
        return x

    text = refusal(program, dict(d=8, t=1))
    assert "'M/t' says M/t, but that dim is whole in the value: write M" in text
    assert "against the result of program (" in text and "mesh d=8 × t=1" in text


def test_transfers_under_a_branch_that_differs():
    """A transfer under a branch or a loop that depends on a value that differs along its axis would hang: refused; over another axis it is accepted."""

    def loop(x: f32['B/d M']) -> f32['B/d M']:
        return lax.while_loop(lambda c: jnp.any(c < 3), lambda c: 2 * c, x)

    assert "'any' (reduce_or) reduces a dim that is split over d" in refused_everywhere(loop)
    from shardlib.check import Check, Mark
    from shardlib.walk import Walk

    def transfer(axis):
        walk = Walk(Check(dict(d=4, t=2), dict(d=4, t=2)), None)
        walk.divergent = frozenset('d')
        walk.mark(Mark((), lambda states: states, frozenset(axis), [], False, "here"), None, [], None)

    transfer('t')
    with pytest.raises(
        ShardingError,
        match=r"a transfer over d under a branch that depends on a value that differs along it: some devices would wait for ever\n  at here",
    ):
        transfer('d')


def test_cond_with_collectives_on_the_same():
    """Branches that all devices take together may send."""

    def program(x: f32['M/d'], go: f32['']) -> f32['M']:
        return lax.cond(go > 0, lambda y: shardops.all_gather('M/d -> M', y), lambda y: jnp.zeros(64), x)

    prove_everywhere(program)


def test_custom_vjp():
    """A custom_vjp of what is local is accepted; around a transfer it is refused."""

    def own(function):
        wrapped = jax.custom_vjp(function)
        wrapped.defvjp(lambda x: (function(x), None), lambda _, g: (g,))
        return wrapped

    def local(x: f32['M/d']) -> f32['M/d']:
        return own(jnp.sin)(x)

    def sends(x: f32['M/d']) -> f32['M']:
        return own(lambda x: shardops.all_gather('M/d -> M', x))(x)

    prove_everywhere(local)
    assert (
        "a transfer over d inside a jax.custom_vjp: the types of its gradients cannot be known\n  fix: put it around what is local to a device, transfers outside of it"
        in refused_everywhere(sends)
    )


def test_local_functions():
    """A kernel goes through shardops.local; what it takes from outside must be the same everywhere, and it must not send."""

    def kernel(x: f32['M/d']) -> f32['M/d']:
        call = pl.pallas_call(
            lambda a, b: b.__setitem__(..., a[...]), jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )
        return shardops.local('M/d -> M/d', call, x)

    def takes_same(x: f32['M/d'], s: f32['']) -> f32['M/d']:
        return shardops.local('M/d -> M/d', lambda x: x * s, x)

    def takes_split(x: f32['M/d'], s: f32['M/d']) -> f32['M/d']:
        return shardops.local('M/d -> M/d', lambda x: x * s, x)

    def takes_another_axis(x: f32['M'], s: f32['M/t']) -> f32['']:
        return shardops.local('M -> ', lambda x: jnp.sum(x) * jnp.sum(s), x)

    def sends(x: f32['M/d']) -> f32['M/d']:
        return shardops.local('M/d -> M/d', lambda x: jax.jit(lambda x: x / lax.psum(x, 'd'))(x), x)

    def identity(x: f32['M/d']) -> f32['M/d']:
        return shardops.local('M/d -> M/d', lambda x: x, x)

    for program in (kernel, takes_same, identity):
        prove_everywhere(program)
    for program in (takes_split, takes_another_axis):
        assert (
            "takes a value from outside that is not the same everywhere\n  fix: pass it as an operand, with its type"
            in refused_everywhere(program)
        )
    assert (
        "a function that is local to a device sends over d: write the transfer as an operation with a string"
        in refused_everywhere(sends)
    )


def test_full_of_what_differs():
    """full with a value that differs along an axis does not make it the same."""

    def program(x: f32['B/d']) -> f32['M']:
        return shardops.full('M', shardops.sum_unreduced('B/d -> +d', x), f32, M=64)

    text = refused_everywhere(program)
    assert "'' says the same along d, but the value is still a sum over d that nobody has taken" in text
    assert "in shardops.full('M'), mesh d=4 × t=2" in text


def test_what_a_reshape_leaves_split():
    """Of a split dim that is divided the major part stays split; a merge keeps the split of the major part: what else is
    written is refused, and shardops.regroup says what is meant."""

    def major(x: f32['B/d M/t']) -> f32['B/d Z/t 2']:
        return check(f32, 'B/d Z/t 2', x.reshape(x.shape[0], -1, 2))

    def minor(x: f32['B/d M/t']) -> f32['B/d 2 Z/t']:
        return check(f32, 'B/d 2 Z/t', x.reshape(x.shape[0], 2, -1))

    def minor_on_purpose(x: f32['B/d M/t']) -> f32['B/d 2 Z/t']:
        return shardops.regroup('B/d M/t -> B/d 2 Z/t', x)

    def merged(x: f32['B/d 2 F/t']) -> f32['B/d Z/t']:
        return check(f32, 'B/d Z/t', x.reshape(x.shape[0], -1))

    def by_a_local_size(x: f32['B/d M']) -> f32['P/d R M']:
        return check(f32, 'P/d R M', x.reshape(2, -1, x.shape[1]))

    for program in (major, minor_on_purpose):
        prove_everywhere(program)
    text = refused_everywhere(minor)
    assert "'B/d 2 Z/t' says 2, but that dim is split over t in the value: write 2/t" in text
    text = refused_everywhere(merged)
    assert "'reshape' merges a dim that is split over t with one that stands before it" in text
    assert "fix: shardops.regroup with a string, as in 'B/d L -> parts R/d L', where another order is meant" in text
    text = refused_everywhere(by_a_local_size)
    assert "makes a dim whose size depends on how many devices there are" in text


def test_reshape_tracking():
    """What is known after a reshape, by sizes alone: the major dim of a run is the split one, before and after."""
    from types import SimpleNamespace

    from shardlib.primitives import RULES, Equation
    from shardlib.states import Made, State

    def after(before, row, shape):
        def variables(shape):
            return [SimpleNamespace(aval=SimpleNamespace(shape=shape))]

        eqn = SimpleNamespace(
            primitive=SimpleNamespace(name="reshape"), params={}, invars=variables(before), outvars=variables(shape)
        )
        return RULES['reshape'](Equation(eqn, [State(row)]))[0]

    d, t, made = ('d',), ('t',), Made.ANY
    table = [
        ((4, 6), (d, ()), (24,), (d,)),
        ((4, 6), (d, ()), (2, 2, 6), (d, (), ())),
        ((4, 6), (d, ()), (4, 2, 3), (d, (), ())),
        ((4, 6), (d, t), (4, 2, 3), (d, t, ())),
        ((4, 6), (d, ()), (1, 4, 6), (made, d, ())),
        ((4, 6), (d, ()), (4, 1, 6), (d, made, ())),
        ((4, 6), (d, ()), (4, 6, 1), (d, (), made)),
        ((1, 6), (d, ()), (1, 1, 6), (d, made, ())),
        ((1, 6), (d, ()), (6,), (d,)),
        ((1, 6), (d, ()), (1, 2, 3), (d, (), ())),
        ((2, 1, 3), (d, (), ()), (6,), (d,)),
        ((4, 6), (made, ()), (24,), (made,)),
        ((4, 6), (made, made), (24,), (made,)),
        ((6,), ((),), (1, 6, 1), (made, (), made)),
    ]  # fmt: skip
    for before, row, shape, expected in table:
        assert after(before, row, shape) == expected, (before, row, shape)
    for before, row, shape in (((4, 6), ((), d), (24,)), ((4, 6), (d, t), (24,)), ((2, 1, 6), ((), d, t), (2, 6))):
        with pytest.raises(ShardingError, match="merges a dim that is split over"):
            after(before, row, shape)


# -- Losses and gradients ----------------------------------------------------------------------------------------------
def gradient_program(weight, reduce, loss_axes='+d +t', finish=lambda loss: loss):
    """A regression whose weight has a given type: its gradient, reduced or not."""

    def program(w: weight, x: f32['B/d M/t']) -> weight:
        def loss(w):
            w = shardops.slice('M -> M/t', w) if str(weight.spec) == 'M' else w
            y = (
                shardops.einsum_unreduced('B/d M/t, M/t -> B/d +t', x, w)
                if weight.spec.dims
                else shardops.sum_unreduced('B/d M/t -> B/d +t', x * w)
            )
            y = shardops.psum('B/d +t -> B/d', y)
            return finish(shardops.pending('+d -> +d +t', shardops.sum_unreduced('B/d -> +d', y * y)))

        return reduce(shardops.grad(loss)(w))

    return program


REPLICATED = {
    "M": (f32['M'], lambda g: shardops.psum('M +d +t -> M', g)),
    "M/t": (f32['M/t'], lambda g: shardops.psum('M/t +d -> M/t', g)),
    "scalar": (f32[''], lambda g: shardops.psum('+d +t -> ', g)),
}


@pytest.mark.parametrize("name", REPLICATED)
def test_the_gradient_of_a_replicated_weight_is_a_pending_sum(name):
    """With the psum of its gradient accepted, without it refused, on every mesh."""
    weight, reduce = REPLICATED[name]
    prove_everywhere(gradient_program(weight, reduce), OF_D_AND_T)
    text = refused_everywhere(gradient_program(weight, lambda g: g))
    assert "is still a sum over d that nobody has taken: reduce it, or write '+d'" in text


@pytest.mark.parametrize("name", REPLICATED)
@pytest.mark.parametrize("mesh", [(4, 2), (8, 1)], ids=["4x2", "8x1"])
def test_the_gradient_of_a_replicated_weight_is_right(name, mesh):
    """It equals the gradient of the unsharded program."""
    weight, reduce = REPLICATED[name]
    w = np.linspace(-1, 1, 8, dtype=np.float32) if weight.spec.dims else np.float32(0.5)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    with jax.set_mesh(make_mesh(dict(d=mesh[0], t=mesh[1]))):
        ours = jax.jit(typed_shard_map(gradient_program(weight, reduce)))(w, x)
    truth = (
        jax.grad(lambda w: jnp.sum(jnp.sum(x * w, axis=1) ** 2))(w)
        if not weight.spec.dims
        else jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
    )
    np.testing.assert_allclose(ours, truth, rtol=1e-5)


LOSSES = {
    "summed over d": (lambda loss: shardops.psum('+d +t -> +t', loss), "the loss is the same along d: what is differentiated is the sum over all devices, so it would count once for each device along d\n  fix: return it pending, '+d +t', before any psum\n  in shardops.value_and_grad"),
    "summed over both": (lambda loss: shardops.psum('+d +t -> ', loss), "the loss is the same along d"),
    "no scalar": (lambda loss: loss[None], "the loss must be a scalar of a float type, it is float32[1]\n  in shardops.value_and_grad"),
    "a constant": (lambda loss: jnp.float32(1), "the loss is the same along d"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_pending_is_refused(name):
    """A loss that is summed over devices, or the same along an axis, would be counted several times: refused, with the line of value_and_grad."""
    finish, message = LOSSES[name]
    weight, reduce = REPLICATED["M"]
    assert message in refused_everywhere(gradient_program(weight, reduce, finish=finish))


def test_has_aux_and_several_arguments():
    """value_and_grad with has_aux and a tuple of argnums gives what jax.value_and_grad gives, typed."""

    def program(a: f32['M/d'], b: f32['M/d'], x: f32['M/d']) -> tuple[f32['M/d'], f32['M/d'], f32['']]:
        def loss(x, a, b):
            total = shardops.sum_unreduced('M/d -> +d', a * b * x)
            return shardops.pending('+d -> +d +t', total), shardops.psum('+d -> ', total)

        (_value, aux), (da, db) = shardops.value_and_grad(loss, argnums=(1, 2), has_aux=True)(x, a, b)
        da = shardops.psum('M/d +t -> M/d', da)
        return da, shardops.psum('M/d +t -> M/d', db), aux

    prove_everywhere(program, OF_D_AND_T)
    a, b, x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    with jax.set_mesh(make_mesh(dict(d=4, t=2))):
        da, db, aux = jax.jit(typed_shard_map(program))(a, b, x)
    np.testing.assert_allclose(da, b * x, rtol=1e-6)
    np.testing.assert_allclose(db, a * x, rtol=1e-6)
    np.testing.assert_allclose(aux, np.sum(a * b * x), rtol=1e-5)


def chunked(finish):
    """A loss over chunks of rows with a weight that is split over t; `finish` makes it from the chunk's '+d +t' sum."""

    def program(w: f32['V/t M'], x: f32['L B/d M'], y: f32['L B/d']) -> tuple[f32[''], f32['V/t M'], f32['L B/d M']]:
        def chunk_loss(w: f32['V/t M'], x: f32['B/d M'], y: f32['B/d']) -> f32['+d +t']:
            logits = shardops.einsum_unreduced('B/d M, V/t M -> B/d V/t', x, w)
            total = shardops.psum('B/d +t -> B/d', shardops.sum_unreduced('B/d V/t -> B/d +t', jnp.exp(logits)))
            loss = shardops.pending('B/d -> B/d +t', y * jnp.log(total))
            return finish(shardops.sum_unreduced('B/d +t -> +d +t', loss))

        def loss(w, x):
            return 3 * shardops.sum_over_chunks(chunk_loss, w, x, y)

        value, (dw, dx) = shardops.value_and_grad(loss, argnums=(0, 1))(w, x)
        dw = shardops.psum('V/t M +d -> V/t M', dw)
        return shardops.psum('+d +t -> ', value), dw, shardops.psum('L B/d M +t -> L B/d M', dx)

    return program


def test_the_gradient_over_chunks_is_that_of_the_sum():
    """sum_over_chunks' value and gradients are jax.grad's of the same loss on whole arrays, on every mesh."""
    program = chunked(lambda loss: loss)
    prove_everywhere(program, OF_D_AND_T)
    random = np.random.default_rng(1)
    w, x, y = (random.normal(size=shape).astype(np.float32) for shape in ((8, 4), (3, 8, 4), (3, 8)))

    def whole(w, x):
        return 3 * jnp.sum(y * jax.nn.logsumexp(jnp.einsum("cbm,vm->cbv", x, w), axis=-1))

    expected = whole(w, x), *jax.grad(whole, (0, 1))(w, x)
    for d, t in ((1, 1), (4, 2), (2, 4)):
        with jax.set_mesh(make_mesh(dict(d=d, t=t), devices=jax.devices()[: d * t])):
            for ours, theirs in zip(jax.jit(typed_shard_map(program))(w, x, y), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


def test_a_chunks_loss_that_is_not_pending_is_refused():
    """A chunk's loss that is summed over devices would be counted once for each of them: refused."""
    program = chunked(lambda loss: shardops.psum('+d +t -> ', loss))
    text = refused_everywhere(program)
    assert "'+d +t' says pending along d, but the value is already the same along d" in text
    assert "against the result of chunk_loss" in text


def test_the_check_and_the_run_share_no_cached_trace():
    """A jitted helper with value_and_grad inside, which the check traces with stand-ins for gradients, gives true gradients in the run."""

    @jax.jit
    def helper(w, x):
        def loss(w):
            return shardops.pending('+d -> +d +t', shardops.sum_unreduced('M/d -> +d', w * w * x))

        return shardops.value_and_grad(loss)(w)[1]

    def program(w: f32['M/d'], x: f32['M/d']) -> f32['M/d']:
        return shardops.psum('M/d +t -> M/d', helper(w, x) + helper(w, x))

    w = np.arange(8, dtype=np.float32)
    mapped = typed_shard_map(program)
    mesh = make_mesh(dict(d=4, t=2))
    with jax.set_mesh(mesh):
        for _ in range(2):
            assert mapped.check(mesh, w, w) > 0
            np.testing.assert_allclose(jax.jit(mapped)(w, w), 4 * w * w)


# -- Meshes ------------------------------------------------------------------------------------------------------------
def test_an_abstract_mesh_of_4096_devices():
    """The check needs no devices, and takes no longer for more of them."""

    def program(x: f32['B/d M/t'], w: f32['M/d/t']) -> f32['B/d']:
        return shardops.psum('B/d +t -> B/d', shardops.einsum_unreduced('B/d M/t, M/t -> B/d +t', x, _over_d(w)))

    def _over_d(w):
        return shardops.slice('M -> M/t', shardops.all_gather('M/d/t -> M', w))

    mesh = jax.sharding.AbstractMesh((512, 8), ("d", "t"))
    shape = jax.ShapeDtypeStruct
    started = time.perf_counter()
    assert typed_shard_map(program).check(mesh, shape((1024, 8192), jnp.float32), shape((8192,), jnp.float32)) >= 5
    assert time.perf_counter() - started < 5


def twice(x: f32['M/d']) -> f32['M/d']:
    return 2 * x


@pytest.mark.parametrize("kind", ["auto", "explicit", "legacy"])
@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_kinds_of_mesh(kind):
    """Meshes with Auto and with Explicit axes, and the older `with Mesh(...)`, run and check the same, and read arrays that are not placed yet."""
    x = np.arange(8, dtype=np.float32)
    if kind == "explicit":
        context = jax.set_mesh(jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2))
    elif kind == "legacy":
        context = Mesh(np.array(jax.devices()).reshape(4, 2), ("d", "t"))
    else:
        context = jax.set_mesh(make_mesh(dict(d=4, t=2)))

    def unreduced(x: f32['M/d']) -> f32['']:
        return shardops.sum_unreduced('M/d -> +d', x)

    with context:
        np.testing.assert_array_equal(jax.jit(typed_shard_map(twice))(x), 2 * x)
        placed = jax.device_put(x, make_shardings(f32['M/d']))
        np.testing.assert_array_equal(jax.jit(typed_shard_map(twice))(placed), 2 * x)
        np.testing.assert_array_equal(typed_shard_map(twice)(placed), 2 * x)
        with pytest.raises(ShardingError, match=r"the value is still a sum over d that nobody has taken"):
            jax.jit(typed_shard_map(unreduced))(x)
        assert (
            jax.jit(typed_shard_map(unreduced, check=False))(x) == 1
        )  # the first device's term: what the check is for
