"""Programs that look right and compute something else on another mesh, by class, and right ones that look like them.

The wrong ones are refused on every mesh, with a text; the right ones are accepted on every mesh and compute there what
plain JAX computes on whole arrays.
"""

import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from prove import MESHES, OF_D_AND_T, SINGLE, SIZES, abstract, prove, prove_everywhere, refusal, refused_everywhere

from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shardtypes import (
    Array,
    ShardingError,
    bool_,
    check,
    f32,
    i32,
    pytree_dataclass,
    typed_shard_map,
    u32,
)
from shardlib.typed import typed


def program(annotations, result, function):
    """A program with these types, for tables."""
    first, second, third = (*annotations, None, None)[:3]

    def one(x: first) -> result:
        return function(x)

    def two(x: first, y: second) -> result:
        return function(x, y)

    def three(x: first, y: second, z: third) -> result:
        return function(x, y, z)

    return (one, two, three)[len(annotations) - 1]


@pytree_dataclass
class Pair:
    sums: tuple[f32['B/d'], f32['B/d']]


@pytree_dataclass
class Inner:
    total: f32['B/d']


@pytree_dataclass
class Outer:
    inner: tuple[Inner, ...]


@pytree_dataclass
class Listed:
    sums: list[f32['B/d']]


def forgotten(x):
    """A sum over t that nobody takes."""
    return shardops.sum_unreduced('B/d M/t -> B/d +t', x)


@typed
def variadic(*sums: f32['B/d']) -> f32['B/d']:
    return sums[0] + sums[1]


@typed
def keywords(**sums: f32['B/d']) -> f32['B/d']:
    return sums["a"]


@typed
def optional(total: f32['B/d'] | None) -> f32['B/d']:
    return total


@typed
def several(totals: list[f32['B/d']]) -> f32['B/d']:
    return totals[1]


@typed
def named(totals: dict[str, f32['B/d']]) -> f32['B/d']:
    return totals["a"]


class Holder:
    pass


@typed
def attribute(x: f32['B/d M/t']) -> f32['B/d M/t']:
    holder = Holder()
    holder.total: f32['B/d'] = forgotten(x)
    return x


def helper(x: f32['B/d M']) -> f32['B/d M']:
    return jnp.tanh(x)


def inverse(x):
    """Its backward rule sends."""

    @jax.custom_vjp
    def copy(x):
        return x

    copy.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, 't'),))
    return copy(x)


def own_vjp(forward, backward):
    @jax.custom_vjp
    def function(*args):
        return forward(*args)

    function.defvjp(lambda *args: (forward(*args), args), backward)
    return function


def own_jvp(function, rule):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(rule)
    return wrapped


def loss_of(function):
    """The gradient of a sum of what a function makes of 'B/d M/t', on axes d and t."""

    def gradient(x):
        return shardops.grad(lambda x: shardops.sum_unreduced('B/d M/t -> +d +t', function(x)))(x)

    return gradient


def ref_forgets(x):
    ref = jax.new_ref(jnp.zeros((x.shape[0],)))
    ref[...] = forgotten(x)
    return ref[...]


def ref_adds(x):
    ref = jax.new_ref(shardops.zeros('B/d M', f32))
    ref[...] += x
    ref[...] = ref[...] * 2
    return ref[...]


def unsaid(x):
    return jnp.repeat(x, 3, axis=1)


TOTAL, PLAIN = ([f32['B/d M/t']], f32['B/d'])
WRONG = {
    # H1: containers of sharded arrays
    "H1 tuple field": ([f32['B/d M/t']], Pair, lambda x: Pair((forgotten(x), forgotten(x))), "still a sum over t that nobody has taken"),
    "H1 path": ([f32['B/d M/t']], Pair, lambda x: Pair((shardops.psum('B/d +t -> B/d', forgotten(x)), forgotten(x))), "sums/1: f32['B/d'], value float32[4] on each device, mesh d=4 × t=2"),
    "H1 list local": ([f32['B/d M/t']], f32['B/d'], lambda x: several([shardops.zeros('B/d', f32), forgotten(x)]), "argument totals of several"),
    "H1 dict argument": ([f32['B/d M/t']], f32['B/d'], lambda x: named({"a": forgotten(x)}), "still a sum over t"),
    # H2: reshapes of a split dim
    "H2 heads from a flat product": ([f32['B/d M'], f32['M H/t']], f32['B/d 4 Z/t 2'], lambda x, w: shardops.einsum_unreduced('B/d M, M H/t -> B/d H/t', x, w).reshape(x.shape[0], 4, -1, 2), "says 4, but that dim is split over t in the value: write 4/t"),
    "H2 flat bias": ([f32['B/d 4 Q/t'], f32['F/t']], f32['B/d 4 Q/t'], lambda x, b: x + jnp.max(b.reshape(1, 4, -1), axis=2, keepdims=True), "dim 1 is whole in one, split over t in another"),
    "H2 heads merged": ([f32['B/d 4 F/t'], f32['H/t M']], f32['B/d M'], lambda x, w: shardops.psum('B/d M +t -> B/d M', shardops.einsum_unreduced('B/d H/t, H/t M -> B/d M +t', x.reshape(x.shape[0], -1), w)), "'reshape' merges a dim that is split over t with one that stands before it"),
    "H2 fused gate": ([f32['M F/t']], f32['M E/t'], lambda w: check(f32, 'M 2 E/t', w.reshape(w.shape[0], 2, -1))[:, 0], "says 2, but that dim is split over t in the value: write 2/t"),
    "H2 all of it flat": ([f32['M/d F/t']], f32['N/d/t'], lambda w: w.reshape(-1), "'reshape' merges a dim that is split over t"),
    "H2 chunks": ([f32['L/t M']], f32['M'], lambda x: lax.scan(lambda c, rows: (c + jnp.max(rows, axis=0), None), jnp.zeros(x.shape[1]), x.reshape(4, -1, x.shape[1]))[0], "a scan over a dim that is split over t"),
    "H2 parts by a local size": ([f32['B/d M']], f32['P/d M'], lambda x: jnp.max(x.reshape(4, -1, x.shape[1]), axis=1), "'reshape' makes a dim whose size depends on how many devices there are"),
    # H3: dims that a reshape left open
    "H3 contrastive in chunks": ([f32['L/d M']], f32['L/d'], lambda x: jnp.max(lax.map(lambda rows: rows @ x.T, x.reshape(4, -1, x.shape[1])), axis=-1).reshape(-1), "two dims that are split over d|a scan over a dim that is split over d"),
    # H4: a write at an index of what was made to a split dim's size
    "H4 mark the first": ([f32['B L/t']], f32['B L/t'], lambda x: x * jnp.zeros(x.shape).at[:, 0].set(1.0), "dim 1 is whole in one, split over t in another"),
    "H4 positions": ([f32['B L/t']], f32['B L/t'], lambda x: x + jnp.cumsum(jnp.ones_like(x), axis=1), "dim 1 is whole in one, split over t in another"),
    "H4 alone": ([f32['B L/t']], f32['B L/t'], lambda x: jnp.zeros(x.shape).at[:, 0].set(1.0), "'B L/t' says L/t, but that dim is whole in the value"),
    "H4 positions alone": ([f32['B L/t']], f32['B L/t'], lambda x: jnp.cumsum(jnp.ones_like(x), axis=1), "'B L/t' says L/t, but that dim is whole in the value"),
    # H5: split indices
    "H5 write at split indices": ([f32['V M/d'], i32['B/d']], f32['V M/d'], lambda w, i: w.at[i].set(0.0), "'scatter' writes at indices of a dim that is split over d"),
    "H5 add at split indices": ([f32['V M/d'], i32['B/d']], f32['V M/d'], lambda w, i: w.at[i].add(1.0), "writes at indices of a dim that is split over d"),
    # H6: rules for gradients
    "H6 a backward that sends": ([f32['B/d M/t']], f32['B/d M/t'], loss_of(inverse), "a transfer over t inside a jax.custom_vjp"),
    "H6 not even differentiated": ([f32['B/d M/t']], f32['B/d M/t'], inverse, "a transfer over t inside a jax.custom_vjp"),
    "H6 a jvp that sends": ([f32['M/t']], f32['M/t'], own_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), lax.pmean(t[0], 't'))), "a transfer over t inside a jax.custom_jvp"),
    "H6 a clipped cotangent": ([f32['M']], f32['M'], own_vjp(jnp.sin, lambda r, g: (jnp.clip(g, -1.0, 1.0),)), "which is not linear, of a value that is pending over d"),
    "H6 a mean over the batch": ([f32['B/d M'], f32['M']], f32['B/d M'], own_vjp(lambda x, s: x * s[None], lambda r, g: (g * r[1][None], jnp.sum(g * r[0], axis=0) / r[0].shape[0])), "depends on how many devices there are"),
    "H6 a gradient that is not one": ([f32['M']], f32['M'], own_vjp(jnp.sin, lambda r, g: (jnp.cos(r[0]),)), "the gradient that jax.custom_vjp gives operand 0 is the same along d, but must be pending"),
    # H7: whole numbers, fill values
    "H7 integer division": ([i32['B/d M/t']], i32['B/d'], lambda x: shardops.psum('B/d +t -> B/d', shardops.sum_unreduced('B/d M/t -> B/d +t', x) // 2), "which is not linear, of a value that is pending over t"),
    "H7 lax.div": ([i32['B/d M/t']], i32['B/d'], lambda x: shardops.psum('B/d +t -> B/d', lax.div(shardops.sum_unreduced('B/d M/t -> B/d +t', x), jnp.int32(2))), "'div', which is not linear"),
    "H7 fill": ([f32['B M/t'], i32['L']], f32['L'], lambda x, i: shardops.psum('L +t -> L', jnp.take(shardops.sum_unreduced('B M/t -> B +t', x), i, mode='fill', fill_value=1.0)), "'take' .gather., which is not linear"),
    # H8: what the check cannot see
    "H8 a ref": ([f32['B/d M/t']], f32['B/d'], ref_forgets, "writes into a ref what does not lie as the ref was made\n  fix: make it of the type that is written"),
    "H8 a composite": ([f32['M/t']], f32['M/t'], lambda x: lax.composite(lambda x: x / jnp.sum(x), name="own.norm")(x), "'sum' .reduce_sum. reduces a dim that is split over t"),
    "H8 a composite that sends": ([f32['M/t']], f32['M/t'], lambda x: lax.composite(lambda x: lax.pmean(x, 't'), name="own.mean")(x), "over t outside of shardops"),
    "H8 linear_solve": ([f32['M/t']], f32['M/t'], lambda x: lax.custom_linear_solve(lambda y: y * (1.0 + lax.axis_index('t').astype(jnp.float32)), x, lambda mv, b: b), "'custom_linear_solve': what it does cannot be seen"),
    # H9: counts of what was made from a split shape
    "H9 a count": ([f32['B/d M']], f32[''], lambda x: jnp.sum(jnp.ones_like(x)), "'sum' .reduce_sum. reduces a dim that is made to the size of a device's part"),
    "H9 a mean by a local count": ([f32['B/d M']], f32[''], lambda x: shardops.psum('+d -> ', shardops.sum_unreduced('B/d M -> +d', x)) / jnp.sum(jnp.ones(x.shape[0])), "reduces a dim that is made to the size of a device's part"),
    "H9 a local size": ([f32['B/d M']], f32['B/d M'], lambda x: x / x.shape[0], "'f32|'B/d M' is said of a number that depends on how many devices there are"),
    "H9 turns": ([f32['B/d M']], f32[''], lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c + 1.0, jnp.float32(0)), "a scan of as many turns as a device's part has elements"),
    "H9 a power": ([f32['B/d M']], f32['B/d M'], lambda x: x ** x.shape[0], "'power' .integer_pow. with another y, . in place of 16"),
    # H10: blocks are no elements
    "H10 blocks": ([f32['L/d M']], f32['L/d M'], lambda x: shardops.ppermute('L/d M -> L/d M', x, 1), "ppermute rolls one dim that counts an axis' devices, as 'd/d' does: of a longer dim it would move blocks"),
    # H11: what depends on how many elements a device has
    "H11 the first four": ([f32['B/d M']], f32['B/d M'], lambda x: x - jnp.max(x[:4], axis=0, keepdims=True), "takes a part of a dim that is split over d|reduces a dim that is split over d"),
    "H11 the first four alone": ([f32['B/d M']], f32['B/d M'], lambda x: x[:4], "'B/d M' is 4, but B is 16|takes a part of a dim that is split over d"),
    "H11 the first": ([f32['B/d M']], f32['B/d M'], lambda x: x - x[:1], "takes a part of a dim that is split over d"),
    "H11 positions as a value": ([f32['B/d M']], f32['B/d'], lambda x: jnp.max(jnp.concatenate([jnp.arange(x.shape[0])[:, None], x[:, :1].astype(jnp.int32)], axis=1), axis=1).astype(jnp.float32), "positions that each device counts from 0\n  fix: the device's part of the whole's positions is shardops.slice"),
    "H11 a transfer in local": ([f32['M/d']], f32['M/d'], lambda x: shardops.local('M/d -> M/d', lambda x: x / lax.psum(x, 'd'), x), "a function that is local to a device sends over d"),
    # H12: annotations that nobody read
    "H12 no @typed": ([f32['B/d M']], f32['B/d M'], helper, "nobody reads the annotations of helper: what they say of its arrays is not checked\n  fix: @typed above `def helper`"),
    "H12 *args": ([f32['B/d M/t']], f32['B/d'], lambda x: variadic(shardops.zeros('B/d', f32), forgotten(x)), "argument sums of variadic"),
    "H12 **kwargs": ([f32['B/d M/t']], f32['B/d'], lambda x: keywords(a=forgotten(x)), "argument sums of keywords"),
    "H12 or None": ([f32['B/d M/t']], f32['B/d'], lambda x: optional(forgotten(x)), "argument total of optional"),
    "H12 an attribute": ([f32['B/d M/t']], f32['B/d M/t'], attribute, "local holder.total"),
    "H12 nested dataclasses": ([f32['B/d M/t']], f32['B/d'], lambda x: typed_total(Outer((Inner(forgotten(x)),))), "inner/0/total"),
    "H12 a list in a dataclass": ([f32['B/d M/t']], f32['B/d'], lambda x: typed_list(Listed([shardops.zeros('B/d', f32), forgotten(x)])), "sums/1"),
    # Numbers and values that differ from mesh to mesh on other ways
    "a local size out of jit": ([f32['B/d M']], f32['B/d'], lambda x: (lambda r: r[0] / r[1])(jax.jit(lambda x: (jnp.sum(x, axis=1), jnp.float32(x.shape[0])))(x)), "a number that depends on how many devices there are"),
    "a local size out of a scan": ([f32['B/d M'], f32['L']], f32['L'], lambda x, y: lax.scan(lambda c, r: (c, float(x.shape[0])), 0.0, y)[1], "a number that depends on how many devices there are"),
    "full of a local size": ([f32['B/d M']], f32[''], lambda x: shardops.full('', 1.0 / x.shape[0], f32), "a number that depends on how many devices there are"),
    "turned by a local size": ([f32['B/d M']], f32['B/d M'], lambda x: shardops.regroup('d/d b M -> B/d M', shardops.ppermute('d/d b M -> d/d b M', shardops.regroup('B/d M -> d/d b M', x), x.shape[0] + 1)), "another operation"),
    "counted positions under vmap": ([f32['B/d L/t'], f32['L M']], f32['L/t M'], lambda x, table: jax.vmap(lambda i: lax.dynamic_index_in_dim(table, i, keepdims=False))(jnp.arange(x.shape[1])), "positions that each device counts from 0|'L/t M' says L/t, but that dim is whole in the value"),
    "counted positions in a longer table": ([f32['L M'], i32['B/d']], f32['B/d'], lambda table, i: table[jnp.arange(i.shape[0]), i], "positions that each device counts from 0"),
    "the diagonal of all pairs": ([f32['B/d M'], f32['N M']], f32['B/d'], lambda x, queue: (lambda logits: logits[jnp.arange(x.shape[0]), jnp.arange(x.shape[0])])(x @ jnp.concatenate([shardops.all_gather('B/d M -> B M', x), queue]).T), "positions that each device counts from 0|two dims that are split over d|lie differently"),
    "a branch of one device's own": ([f32['B/d M']], f32['B/d M'], lambda x: lax.cond(shardops.index('d')[0] == 0, lambda: x * 2, lambda: x), "each device would pair them by its own index"),
    "turns of one device's own": ([f32['B/d M']], f32['B/d M'], lambda x: lax.fori_loop(0, shardops.index('d')[0], lambda i, c: c * 2, x), "each device would pair them by its own index"),
    "whole numbers that wrap": ([u32['B/d M']], f32[''], lambda x: shardops.psum('+d -> ', shardops.sum_unreduced('B/d M -> +d', x).astype(jnp.float32)), "which is not linear, of a value that is pending over d"),
    "made to size, reshaped": ([f32['B/d M'], f32['M']], f32['M B/d'], lambda x, y: jnp.broadcast_to(y[None], x.shape).reshape(x.shape[1], x.shape[0]), "'reshape' reshapes a dim that is made to the size of a device's part"),
    "the gradient of a loss by a local size": ([f32['B/d M/t']], f32['B/d M/t'], loss_of(lambda x: x / x.shape[0]), "depends on how many devices there are"),
    "local, by a local size": ([f32['B/d M'], f32['M']], f32['M'], lambda x, y: shardops.local('M -> M', lambda y: y / x.shape[0], y), "a number that it takes from outside depends on that"),
    "coordinates out of a scan": ([f32['B/d M'], i32['B/d']], i32['B/d 2'], lambda x, i: lax.scan(lambda k, _: (k, jnp.concatenate([jnp.arange(x.shape[0])[:, None], i[:, None]], axis=1)), 0, None, length=2)[1][0], "positions that each device counts from 0"),
    "a rule in local that sends": ([f32['M/d']], f32['M/d'], lambda x: shardops.local('M/d -> M/d', own_vjp(lambda x: 2 * x, lambda r, g: (2 * lax.psum(g, 't'),)), x), "a function that is local to a device sends over t"),
    "a backward rule that closes over a value": ([f32['B/d M'], f32['B/d']], f32['B/d M'], lambda x, s: own_vjp(lambda x: x * 2, lambda r, g: (g * s[:, None],))(x), "a jax.custom_vjp closes over a value of the program"),
}  # fmt: skip


@typed
def typed_total(outer: Outer) -> f32['B/d']:
    return outer.inner[0].total


@typed
def typed_list(listed: Listed) -> f32['B/d']:
    return listed.sums[0]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_some_mesh_is_refused(name):
    """Each class of program that computes something else on another mesh is refused on all, with its text and line."""
    annotations, result, function, message = WRONG[name]
    text = refused_everywhere(program(annotations, result, function))
    assert message in text or re.search(message, text), text


def test_python_that_asks_for_a_local_size():
    """A program that Python makes another one where a device holds few rows is refused there, with the line."""

    def by_size(x: f32['B/d M']) -> f32['B/d M']:
        if x.shape[0] > 4:
            return jnp.tanh(x)
        return jnp.sin(x) + 1

    assert prove(by_size, dict(d=2, t=2)) > 0

    def by_threshold(x: f32['B/d M']) -> f32['B/d']:
        return jnp.sum(lax.top_k(x, min(4, x.shape[0]))[0], axis=1)

    assert prove(by_threshold, dict(d=2, t=2)) > 0
    assert "'top_k' with another k" in refusal(by_threshold, dict(d=8, t=1))
    text = refusal(by_size, dict(d=8, t=1))
    assert "another program is traced for another number of devices: what is computed must not depend" in text
    assert "test_holes.py:" in text and "on the mesh d=8, t=1: it was accepted on the check's own" in text

    def other_values(x: f32['B/d M'], y: f32['B/d M']) -> f32['B/d M']:
        a, b = (x, y) if x.shape[0] > 10 else (y, x)
        return a - b

    def another_type(x: f32['B/d M']) -> f32['B/d M']:
        return x.astype(jnp.bfloat16 if x.shape[0] > 10 else jnp.float16).astype(jnp.float32)

    def reversed_dim(x: f32['B/d L M']) -> f32['B/d L M']:
        return lax.rev(x, (1,) if x.shape[0] > 10 else (2,))

    def some_turns(x: f32['B/d M']) -> f32['B/d M']:
        return lax.fori_loop(0, min(4, x.shape[0]), lambda i, c: c * 2.0, x)

    def some_columns(x: f32['B/d M']) -> f32['B/d']:
        return jnp.max(x[:, : min(4, x.shape[0])], axis=1)

    def single_row(x: f32['B/d 64 64'], a: f32['64']) -> f32['B/d 64 64']:
        z = jnp.where((a > 0)[None, None], x, 0.0)  # is another program where a device has one row: JAX broadcasts less
        return z * (a[None, None] if x.shape[0] == 1 else a[None, :, None])

    def single_row_literal(x: f32['B/d 64 64'], a: f32['64']) -> f32['B/d 64 64']:
        z = jnp.where((a > 0)[None, None], x, 0.0)
        return z * jnp.full((1, 1, 64), 2.0 if x.shape[0] == 1 else 3.0)

    def single_row_gather(x: f32['B/d 64 64'], a: f32['64']) -> f32['B/d 64 64']:
        z = jnp.where((a > 0)[None, None], x, 0.0)
        return jnp.take(z, (a > 1).astype(jnp.int32), axis=1 if x.shape[0] == 1 else 2)

    def single_row_right(x: f32['B/d 64 64'], a: f32['64']) -> f32['B/d 64 64']:
        z = jnp.where((a > 0)[None, None], x, 0.0)
        return jnp.take(z, (a > 1).astype(jnp.int32), axis=2)

    for mesh in (dict(d=4, t=2), dict(d=8, t=1)):
        assert prove(single_row_right, mesh, SINGLE) > 0
    for function in (single_row, single_row_literal, single_row_gather):
        assert prove(function, dict(d=4, t=2), SINGLE) > 0
        text = refusal(function, dict(d=8, t=1), SINGLE)
        assert "another program" in text or "depends on how many devices there are" in text, function
    for function in (other_values, another_type, reversed_dim):
        assert "another program is traced for another number of devices" in refusal(function), function
    for function in (some_turns, some_columns):
        assert prove(function, dict(d=2, t=2)) > 0
        assert refusal(function, dict(d=8, t=1)), function


def test_as_many_parts_as_rows():
    """A batch of four rows in four parts: right on one device, where the check's own mesh needs more rows, and refused on two."""
    sizes = SIZES | {"B": 4}

    @typed
    def parts(x: f32['B/d M']) -> f32['parts R/d M']:
        return shardops.regroup('B/d M -> parts R/d M', x, parts=4)

    @typed
    def wrong(x: f32['B/d M']) -> f32['parts R/d M']:
        return parts(x) / x.shape[0]

    assert prove(parts, dict(d=1, t=1), sizes) > 0
    assert "B/d to parts R/d: a device's 2 elements are not a multiple of 4" in refusal(parts, dict(d=2, t=1), sizes)
    assert "a number that depends on how many devices there are" in refusal(wrong, dict(d=1, t=1), sizes)


def test_two_rows():
    """With two rows a device holds one: the check makes the batch longer for itself, and sees what depends on its size."""
    sizes = SIZES | {"B": 2}

    def right(x: f32['B/d M'], i: i32['B/d']) -> f32['B/d']:
        return jnp.take_along_axis(x, i[:, None] % 64, axis=1)[:, 0]

    def wrong(x: f32['B/d M'], i: i32['B/d']) -> f32['B/d']:
        return right(x, i) / x.shape[0]

    right = typed(right)
    for mesh in (dict(d=1, t=1), dict(d=2, t=1), dict(d=2, t=2)):
        assert prove(right, mesh, sizes) > 0
        assert "a number that depends on how many devices there are" in refusal(wrong, mesh, sizes)


def test_sizes_that_cannot_be_made_longer():
    """Where a longer batch does not help the check, it says what it found, and ends."""

    def program(x: f32['3/d M'], y: f32['B/d M/t']) -> f32['B/d M/t']:
        return y / y.shape[1]

    assert "a number that depends on how many devices there are" in refusal(program, dict(d=1, t=1), SIZES | {"B": 4})


def test_three_heads():
    """A program that fits few numbers of devices is checked on one of them: heads of 64 out of 192 columns."""
    sizes = SIZES | {"B": 9, "H": 192}

    def heads(x: f32['B/d H/t']) -> f32['B/d Z/t 64']:
        return x.reshape(x.shape[0], -1, 64)

    for mesh in (dict(d=1, t=1), dict(d=3, t=1), dict(d=1, t=3)):
        assert prove(heads, mesh, sizes) > 0


def test_a_program_that_does_not_expect_the_checks_mesh():
    """What a program raises on each mesh of the check's own is a refusal that says on which."""

    def asserts(x: f32['B/d M']) -> f32['B/d M']:
        assert x.shape[0] == 16, "not sixteen"
        return x

    text = refusal(asserts, dict(d=1, t=1))
    assert "not sixteen\n  while the check traced it for d=" in text


def test_annotations_without_a_value():
    """An annotated local without a value is refused where it stands: nobody could read it."""
    with pytest.raises(
        ShardingError, match=r"'y: f32\['B/d'\]' has no value here: annotate y where it is assigned\n  at "
    ):

        @typed
        def later(x: f32['B/d M']) -> f32['B/d M']:
            y: f32['B/d']
            y = x
            return y


def test_leading_dims_that_a_field_cannot_have():
    """Array['...', cls] takes dims alone, and no axis that a field has already."""

    @pytree_dataclass
    class Weights:
        w: f32['M/d']

    with pytest.raises(ShardingError, match=r"Array\['layers \+d', \.\.\.\] adds dims to each field"):
        Array['layers +d', Weights]
    with pytest.raises(ShardingError, match=r"'layers/d M/d' uses mesh axis d twice"):
        Array['layers/d', Weights]


def test_what_cannot_be_checked_is_an_error():
    """A container of arrays whose type says nothing of them is refused, not skipped."""

    @pytree_dataclass
    class Bag:
        arrays: dict
        total: f32['B/d']

    def bag(x: f32['B/d M/t']) -> f32['B/d']:
        return typed_bag(Bag({"a": x}, shardops.zeros('B/d', f32))).total

    @typed
    def typed_bag(bag: Bag) -> Bag:
        return bag

    text = refused_everywhere(bag)
    assert "dict says nothing of how its arrays lie, or is a container that cannot be checked" in text


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
    path = tmp_path / "postponed.py"
    path.write_text(POSTPONED)
    spec = importlib.util.spec_from_file_location("postponed", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["postponed"] = module
    spec.loader.exec_module(module)
    assert "Totals" in refused_everywhere(module.wrong) or "totals" in refused_everywhere(module.wrong)
    assert "local y: f32['B/d']" in refused_everywhere(module.local)


# -- Accepted by the check, and the run crashes ------------------------------------------------------------------------
def loss_with(function):
    """The gradient of the sum of what a function makes of 'B/d M/t'."""

    def gradient(x: f32['B/d M/t']) -> f32['B/d M/t']:
        return shardops.grad(lambda x: shardops.sum_unreduced('B/d M/t -> +d +t', function(x)))(x)

    return gradient


CRASHES = {
    "pmax": (
        lambda x: x - shardops.pmax('B/d M/t -> B/d', x)[:, None],
        "pmax has no gradient: pass it lax.stop_gradient(x)",
    ),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 2 * c[1]), (0, x))[1],
        "Reverse-mode differentiation does not work for lax.while_loop",
    ),
}


@pytest.mark.parametrize("name", CRASHES)
def test_what_cannot_be_differentiated_is_refused(name):
    """What has no gradient is refused by the check already, not by the run."""
    function, message = CRASHES[name]
    for mesh in OF_D_AND_T:
        assert message in refusal(loss_with(function), mesh)


def test_chunks_that_close_over_a_weight():
    """A loss of chunks that closes over what is differentiated is refused by the check already."""

    def gradient(w: f32['M'], x: f32['L B/d M']) -> f32['M +d +t']:
        def loss(w):
            def chunk(shared, x, _):
                total = shardops.sum_unreduced('B/d M -> +d', x * w * shared)
                return shardops.pending('+d -> +d +t', total)

            return shardops.sum_over_chunks(chunk, jnp.float32(1), x, x)

        return shardops.grad(loss)(w)

    def program(w: f32['M'], x: f32['L B/d M']) -> f32['M']:
        return shardops.psum('M +d +t -> M', gradient(w, x))

    for mesh in OF_D_AND_T:
        refusal(program, mesh)


# -- Right, and refused once -------------------------------------------------------------------------------------------
def matrices(x):
    """Symmetric and positive, one for each row."""
    x = x.reshape(x.shape[0], 8, 8)
    return jnp.einsum("bij,bkj->bik", x, x) + 8 * jnp.eye(8)[None]


def write_rows(cache, row, position):
    return cache.at[jnp.arange(cache.shape[0]), position % cache.shape[1]].set(row)


def device_weights(w, x):
    """A weight for each device: its own, without the dim that counts devices, and back."""
    return (jnp.tanh(w[0]) * x[0])[None]


RIGHT = {
    "an array of ones": ([f32['B/d M']], f32['B/d M'], lambda x: x + np.ones(x.shape, np.float32), lambda x: x + 1),
    "where under a mesh": ([f32['B/d M'], bool_['B/d']], f32['B/d M'], lambda x, m: jnp.where(m[:, None], x, 0.0), None),
    "keys per row": ([i32['B/d']], f32['B/d'], lambda i: jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(jax.random.key(0), n)))(i), None),
    "write a row each": ([f32['B/d M'], f32['B/d'], i32['B/d']], f32['B/d M'], write_rows, None),
    "read a row each": ([f32['B/d M'], i32['B/d']], f32['B/d'], lambda x, i: x[jnp.arange(x.shape[0]), i % 64], None),
    "take_along_axis": ([f32['B/d M'], i32['B/d']], f32['B/d'], lambda x, i: jnp.take_along_axis(x, i[:, None] % 64, axis=1)[:, 0], None),
    "segment_sum of each row": ([f32['B/d M'], i32['B/d M']], f32['B/d 4'], lambda x, i: jax.vmap(lambda x, i: jax.ops.segment_sum(x, i % 4, num_segments=4))(x, i), None),
    "cholesky": ([f32['B/d M']], f32['B/d 8 8'], lambda x: jnp.linalg.cholesky(matrices(x)), None),
    "qr": ([f32['B/d M']], f32['B/d 8 8'], lambda x: jnp.linalg.qr(matrices(x)).R, None),
    "ragged_dot": ([f32['B M'], f32['4 M F/t']], f32['B F/t'], lambda x, w: lax.ragged_dot(x, w, jnp.array([4, 0, 2, 2])), None),
    "a ref": ([f32['B/d M']], f32['B/d M'], ref_adds, lambda x: 2 * x),
    "regroup and back": ([f32['L/d M']], f32['L/d M'], lambda x: shardops.regroup('P R/d M -> L/d M', 2 * shardops.regroup('L/d M -> P R/d M', x, P=4)), lambda x: 2 * x),
    "positions": ([f32['B L/t']], f32['B L/t'], lambda x: x + shardops.slice('L -> L/t', jnp.arange(32.0))[None], lambda x: x + jnp.arange(32.0)[None]),
    "argmax": ([f32['B/d V/t']], i32['B/d'], lambda x: shardops.argmax('B/d V/t -> B/d', x), lambda x: jnp.argmax(x, axis=1).astype(jnp.int32)),
    "any": ([f32['B/d M/t']], bool_[''], lambda x: shardops.any('B/d M/t -> ', x > 2.5), lambda x: jnp.any(x > 2.5)),
    "any of a row": ([f32['B/d M/t']], bool_['B/d'], lambda x: shardops.any('B/d M/t -> B/d', x > 2), lambda x: jnp.any(x > 2, axis=1)),
    "several results": ([f32['B/d M']], f32['B/d 2'], lambda x: (lambda r: r[0] + r[1].astype(jnp.float32))(shardops.local('B/d M -> B/d X, B/d X', lambda x: lax.top_k(x, 2), x, X=2)), lambda x: (lambda r: r[0] + r[1].astype(jnp.float32))(lax.top_k(x, 2))),
    "a straight-through estimator": ([f32['B/d M']], f32['B/d M'], own_vjp(jnp.round, lambda r, g: (g,)), jnp.round),
    "a scale with its own backward": ([f32['B/d M'], f32['M']], f32['B/d M'], own_vjp(lambda x, s: x * s[None], lambda r, g: (g * r[1][None], jnp.sum(g * r[0], axis=0))), lambda x, s: x * s[None]),
    "a jvp of its own": ([f32['B/d M']], f32['B/d M'], own_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), jnp.cos(x[0]) * t[0])), jnp.sin),
    "a composite": ([f32['B/d M']], f32['B/d M'], lambda x: lax.composite(lambda x: x * 2, name="own.double")(x), lambda x: x * 2),
    "relu, softmax, logsumexp": ([f32['B/d M']], f32['B/d M'], lambda x: jax.nn.relu(x) + jax.nn.softmax(x, axis=1) * jax.nn.logsumexp(x, axis=1, keepdims=True), None),
    "divided, minor part whole": ([f32['B/d M']], f32['Z/d M'], lambda x: jnp.max(x.reshape(-1, 4, x.shape[1]), axis=1), lambda x: jnp.max(x.reshape(-1, 4, x.shape[1]), axis=1)),
}  # fmt: skip


def values(annotations, sizes):
    """Arrays of random numbers for types, the same on every mesh."""
    random = np.random.default_rng(0)

    def one(shape):
        if shape.dtype == bool:
            return random.random(shape.shape) < 0.5
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return random.integers(0, 99, shape.shape).astype(shape.dtype)
        return random.normal(size=shape.shape).astype(shape.dtype)

    return [jnp.asarray(one(abstract(annotation, sizes))) for annotation in annotations]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_accepted_and_right(name):
    """Accepted on every mesh, and computes there what plain JAX computes on whole arrays."""
    annotations, result, function, reference = RIGHT[name]
    mapped = program(annotations, result, function)
    if name == "divided, minor part whole":  # a device with one row has no parts of four
        assert all(prove(mapped, mesh) for mesh in MESHES if mesh["d"] < 8)
    else:
        prove_everywhere(mapped)
    given = values(annotations, SIZES)
    truth = (reference or function)(*given)
    for mesh in (MESHES[0], *OF_D_AND_T[2:4]):
        devices = jax.devices()[: int(np.prod(list(mesh.values())))]
        with jax.set_mesh(make_mesh(mesh, devices=devices)):
            ours = jax.jit(typed_shard_map(mapped))(*given)
        np.testing.assert_allclose(np.asarray(ours), np.asarray(truth), rtol=2e-5, atol=2e-5, err_msg=str(mesh))


def test_a_weight_for_each_device():
    """A dim that is named like an axis counts its devices: w[0] is a device's own, w[None] puts it back, and nothing else
    may be said of it in between."""

    def right(w: f32['d/d M'], x: f32['d/d M']) -> f32['d/d M']:
        return (jnp.tanh(w[0]) * x[0])[None]

    def forgotten(w: f32['d/d M']) -> f32['M']:
        return w[0]

    def another(w: f32['d/d M'], x: f32['B/d M']) -> f32['B/d M']:
        return w[0][None] * x

    def turned(x: f32['B/d M']) -> f32['B/d M']:
        blocks = shardops.regroup('B/d M -> d/d b M', x)
        return shardops.regroup('d/d b M -> B/d M', shardops.ppermute('d/d b M -> d/d b M', blocks, 1))

    def index(x: f32['B/d M']) -> i32['d/d']:
        return shardops.index('d')

    shape = jax.ShapeDtypeStruct
    for mesh in MESHES:
        abstract_mesh = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
        w, x = shape((mesh["d"], 64), jnp.float32), shape((16, 64), jnp.float32)
        assert typed_shard_map(right).check(abstract_mesh, w, w) > 0
        assert typed_shard_map(turned).check(abstract_mesh, x) > 0
        assert typed_shard_map(index).check(abstract_mesh, x) > 0
        for program, given, message in (
            (forgotten, (w,), "'M' says the same along d, but the value differs along d"),
            (another, (w, x), "its dim 'd/d' was dropped"),
        ):
            with pytest.raises(ShardingError, match=re.escape(message)):
                typed_shard_map(program).check(abstract_mesh, *given)
    x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    with jax.set_mesh(make_mesh(dict(d=4, t=2))):
        np.testing.assert_array_equal(jax.jit(typed_shard_map(turned))(x), np.roll(x, 4, axis=0))
        np.testing.assert_array_equal(jax.jit(typed_shard_map(index))(x), np.arange(4))
    with pytest.raises(ShardingError, match="is 3, but d is 4 in the mesh, whose axis has that name"):
        typed_shard_map(right).check(jax.sharding.AbstractMesh((4, 2), ("d", "t")), *[shape((3, 64), jnp.float32)] * 2)


def test_vjp_gives_each_gradient_its_type():
    """shardops.vjp equals jax.vjp of the whole program; a cotangent of another type than the result's dual is refused."""

    def program(w: f32['M F/t'], x: f32['B/d M'], g: f32['B/d F/t']) -> tuple[f32['M F/t'], f32['B/d M']]:
        def stage(w, x):
            return jnp.tanh(shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w))

        _, pull = shardops.vjp(stage, w, x)
        dw, dx = pull(g)
        return shardops.psum('M F/t +d -> M F/t', dw), shardops.psum('B/d M +t -> B/d M', dx)

    def wrong(w: f32['M F/t'], x: f32['B/d M']) -> f32['M F/t']:
        def total(w, x):
            y = shardops.sum_unreduced('B/d F/t -> B/d +t', shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w))
            return shardops.psum('B/d +t -> B/d', y)

        y, pull = shardops.vjp(total, w, x)
        return shardops.psum('M F/t +d -> M F/t', pull(jnp.ones_like(y) * y)[0])

    prove_everywhere(program, OF_D_AND_T)
    random = np.random.default_rng(0)
    given = [random.normal(size=shape).astype(np.float32) for shape in ((6, 8), (16, 6), (16, 8))]
    truth = jax.vjp(lambda w, x: jnp.tanh(x @ w), *given[:2])[1](given[2])
    for d, t in ((1, 1), (4, 2), (2, 4)):
        with jax.set_mesh(make_mesh(dict(d=d, t=t), devices=jax.devices()[: d * t])):
            for ours, theirs in zip(jax.jit(typed_shard_map(program))(*given), truth, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    text = refused_everywhere(wrong)
    assert "the cotangent of result 0 is the same along t, but must be pending" in text
    assert "in shardops.vjp\n  at " in text


MUTANTS = {
    "argmax taken on each device": ([f32['B/d V/t']], i32['B/d'], lambda x: jnp.argmax(x, axis=1).astype(jnp.int32)),
    "argmax of a dim that is called whole": ([f32['B/d V/t']], i32['B/d'], lambda x: shardops.argmax('B/d V -> B/d', x)),
    "argmax that forgets a batch axis": ([f32['B/d V/t']], i32['B'], lambda x: shardops.argmax('B V/t -> B', x)),
    "argmax of a sum": ([f32['B/d V/t M']], i32['M'], lambda x: shardops.argmax('V/t M -> M', shardops.sum_unreduced('B/d V/t M -> V/t M +d', x))),
    "any taken on each device": ([f32['B/d M/t']], bool_['B/d'], lambda x: jnp.any(x > 0, axis=1)),
    "any over one axis of two": ([f32['B/d M/t']], bool_[''], lambda x: shardops.any('M/t -> ', shardops.any('B/d M/t -> M/t', x > 0) & (x[0] > 0))),
    "any that forgets an axis": ([f32['B/d M/t']], bool_[''], lambda x: shardops.any('B/d M -> ', x > 0)),
    "index as a value that all have": ([f32['M']], i32[''], lambda x: shardops.index('d')[0]),
    "index of another axis": ([f32['B/d M']], i32['t/t'], lambda x: shardops.index('d')),
    "regroup of an axis that is lost": ([f32['B/d M']], f32['P R M'], lambda x: shardops.regroup('B/d M -> P R M', x, P=2)),
    "regroup that moves an axis": ([f32['B/d M']], f32['P/d R M'], lambda x: check(f32, 'P R/d M', shardops.regroup('B/d M -> P/d R M', x, R=1))),
    "regroup of what is whole": ([f32['B M']], f32['P R/d M'], lambda x: shardops.regroup('B/d M -> P R/d M', x, P=2)),
    "regroup of a sum that is then the same": ([f32['B/d M/t']], f32['P R/d'], lambda x: shardops.regroup('B/d -> P R/d', shardops.sum_unreduced('B/d M/t -> B/d +t', x), P=2)),
    "a second result that forgets an axis": ([f32['B/d M']], f32['X'], lambda x: shardops.local('B/d M -> B/d X, X', lambda x: (x[:, :2], x[0, :2]), x, X=2)[1]),
    "a turn that is not of devices": ([f32['d/d M/t']], f32['d/d M/t'], lambda x: shardops.ppermute('d/d M/t -> d/d M', x, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_younger_operations(name):
    """argmax, any, index, regroup, local with several results and ppermute, each with an axis lost, moved or doubled: refused."""
    annotations, result, function = MUTANTS[name]
    refused_everywhere(program(annotations, result, function))
