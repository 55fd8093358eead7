"""Every operation: its value and gradient against those on whole arrays, what it sends, and its errors."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from grammar import Whole
from parts import says
from prove import abstract, each_row, program, prove, refusal, table

from ledger.count.costs import count
from ledger.count.program import read
from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.products import Float8, float8_scale, product
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import bf16, f32, i32
from shardlib.spec import ShardingError
from shardlib.typed import typed

random = np.random.default_rng(0)
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile in half the time

# The axes are those of the mesh d × t; on the mesh of three axes the others do the same.
SIZES = dict(B=16, C=16, D=4, E=16, F=8, K=8, L=8, M=16, N=3, Q=2, V=16, X=2)
OPERATIONS = table(r"""
M/d F/t -> M F/t | shardops.all_gather('M/d F/t -> M F/t', x)
M/d F/t -> M F | shardops.all_gather('M/d F/t -> M F', x)
M/d/t -> M | shardops.all_gather('M/d/t -> M', x)
M/d/t -> M/d | shardops.all_gather('M/d/t -> M/d', x)
M/d F/t -> M F/t | shardops.all_gather('M/d F/t -> M F/t', x, dtype=bf16, reduce_dtype=f32).astype(jnp.float32)
B/d F/t, M F/t -> B/d M/t
    | shardops.psum_scatter('B/d M +t -> B/d M/t', shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', x, y))
B/d/t M -> M/d/t | shardops.psum_scatter('M +d +t -> M/d/t', shardops.sum_unreduced('B/d/t M -> M +d +t', x))
B/d/t M F -> M/d F/t
    | shardops.psum_scatter('M F +d +t -> M/d F/t', shardops.sum_unreduced('B/d/t M F -> M F +d +t', x))
B/d F/t -> B/d | shardops.psum('B/d +t -> B/d', shardops.sum_unreduced('B/d F/t -> B/d +t', x))
B/d F/t -> '' | shardops.psum('+t -> ', shardops.psum('+d +t -> +t', shardops.sum_unreduced('B/d F/t -> +d +t', x)))
B/d F/t -> B/d | shardops.pmax('B/d F/t -> B/d', lax.stop_gradient(x))
B/d F -> B/d | shardops.pmax('B/d F -> B/d', lax.stop_gradient(x))
E/t C M -> E C/t M | shardops.all_to_all('E/t C M -> E C/t M', x)
E/d/t C -> E/d C/t | shardops.all_to_all('E/d/t C -> E/d C/t', x)
E/d/t C -> E C/d/t | shardops.all_to_all('E/d/t C -> E C/d/t', x)
B/d M, M F/t -> B/d F/t | shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, y)
B/d Q K/t, M Q K/t -> B/d M
    | shardops.psum('B/d M +t -> B/d M', shardops.einsum_unreduced('B/d Q K/t, M Q K/t -> B/d M +t', x, y))
B/d F/t, D F/t -> B/d D
    | shardops.psum('B/d D +t -> B/d D', product('B/d F/t, D F/t -> B/d D +t', x, y))
B/d F/t, D F/t, F/t N, N D -> B/d D
    | shardops.psum('B/d D +t -> B/d D', product('B/d F/t, D F/t -> B/d D +t', x, Adapted(y, z, w, 2.0)))
X B/d D, X D F/t, X D N, X N F/t -> X B/d F/t
    | product('X B/d D, X D F/t -> X B/d F/t', x, Adapted(y, z, w, 0.5))
V/t M, i32 B/d L -> B/d L M
    | shardops.psum('B/d L M +t -> B/d L M', shardops.index_unreduced('[V/t] M, B/d L -> B/d L M +t', x, y))
M V/d/t, i32 B L -> B L M
    | shardops.psum('B L M +d +t -> B L M', shardops.index_unreduced('M [V/d/t], B L -> B L M +d +t', x, y))
V M/t, i32 B/d L -> B/d L M/t | shardops.index_unreduced('[V] M/t, B/d L -> B/d L M/t', x, y)
B/d L V/t, i32 B/d L -> B/d L
    | shardops.psum('B/d L +t -> B/d L', shardops.index_unreduced('B/d L [V/t], B/d L -> B/d L +t', x, y))
B/d L V/t -> B/d L | shardops.psum('B/d L +t -> B/d L', shardops.sum_unreduced('B/d L V/t -> B/d L +t', x))
B/d L V/t -> B/d V/t | shardops.sum_unreduced('B/d L V/t -> B/d V/t', x)
B/d L V/t -> '' | shardops.psum('+d +t -> ', shardops.sum_unreduced('... -> +d +t', x * x))
M F/t -> M/d F/t | shardops.slice('M F/t -> M/d F/t', x)
M -> M/d/t | shardops.slice('M -> M/d/t', x)
M | shardops.psum('M +d +t -> M', shardops.pending('M -> M +d +t', x))
M/d -> M/d F/t | shardops.zeros('M/d F/t', f32, F=8) + x[:, None]
M/d | x + shardops.psum('M/d +t -> M/d', shardops.zeros('M/d +t', f32))
B/d M/t | shardops.local('B/d M/t -> B/d M/t', lambda x: x * x, x)
M/d | x * (x.shape[0] * shardops.axis_size('d'))
B/d M -> M
    | shardops.psum('M +d -> M', shardops.sum_unreduced('P R/d M -> M +d', shardops.regroup('B/d M -> P R/d M', x,
      P=2) ** 2))
B/d F/t | shardops.regroup('P R/d F/t -> B/d F/t', shardops.regroup('B/d F/t -> P R/d F/t', x, P=2))
B/d V/t -> i32 B/d | shardops.argmax('B/d V/t -> B/d', x)
V/d/t B -> i32 B | shardops.argmax('V/d/t B -> B', x)
B/d V/t -> bool_ B/d | shardops.any('B/d V/t -> B/d', x > 6)
B/d V/t -> bool_ | shardops.any('B/d V/t -> ', x > 7)
B/d M -> B/d X | shardops.local('B/d M -> B/d X, B/d X', lambda x: lax.top_k(x, 2), x, X=2)[0]
""")


def draw(shape):
    """Sums of these are exact in any order; indices are also such as no table has."""
    if shape.dtype == np.int32:
        return random.integers(-2, 18, shape.shape).astype(np.int32)
    return random.integers(-8, 8, shape.shape).astype(np.float32)


def reduced(spec, x, axes):
    """A value of this type, of which axes that it is the same along are owed, with these sums taken."""
    owed = " ".join(f"+{axis}" for axis in axes if axis not in spec.split)
    return shardops.psum(f"{spec} {owed} -> {spec}", x) if owed else x


def with_gradients(row, axes):
    """The program of a row on a mesh: the result, and the gradient of the sum of its squares for each float operand."""
    function = typed(program(*row))
    signature = inspect.signature(function, eval_str=True)
    types, result = [parameter.annotation for parameter in signature.parameters.values()], signature.return_annotation
    floats = tuple(index for index, type_ in enumerate(types) if type_.element is f32 and result.element is f32)

    def both(*values):
        def loss(*values):
            y = function(*values)
            owed = " ".join(f"+{axis}" for axis in axes if axis in result.spec.split)
            total = shardops.sum_unreduced(f"{result.spec} -> {owed}", y * y) if result.spec.dims else y * y
            if result.spec.split == set(axes):
                return total
            return shardops.pending(f"{owed} -> {' '.join('+' + axis for axis in axes)}", total)

        gradients = shardops.grad(loss, argnums=floats)(*values) if floats else ()
        return function(*values), *(reduced(types[at].spec, gradient, axes) for at, gradient in zip(floats, gradients))

    parameters = [parameter.replace(annotation=type_) for parameter, type_ in zip(signature.parameters.values(), types)]
    results = tuple[(result, *(types[at] for at in floats))]
    both.__signature__ = inspect.Signature(parameters, return_annotation=results)
    return both, types, floats


def shown(mesh):
    return "x".join(map(str, mesh.values()))


@pytest.mark.parametrize("mesh", [dict(d=4, t=2), *small.slow(dict(d=8, t=1), dict(d=2, e=2, t=2))], ids=shown)
def test_values_and_gradients(mesh):
    """Each operation's value and gradient, on meshes of two and three axes, are those on whole arrays exactly."""
    rows = [(with_gradients(row, tuple(mesh)), program(*row, (), Whole(SIZES))) for row in OPERATIONS]
    given = [[draw(abstract(type_, SIZES)) for type_ in types] for (_, types, _), _ in rows]

    def ours(given):  # one compilation for all
        return [typed_shard_map(both)(*values) for ((both, _, _), _), values in zip(rows, given)]

    def truth(given):
        for ((_, _, floats), whole), values in zip(rows, given):
            loss = functools.partial(lambda whole, *values: jnp.sum(whole(*values) ** 2), whole)
            yield whole(*values), *(jax.grad(loss, argnums=floats)(*values) if floats else ())

    with jax.set_mesh(make_mesh(mesh)):
        found = jax.jit(ours, compiler_options=QUICK)(given)
    expected = jax.jit(lambda given: list(truth(given)), compiler_options=QUICK)(given)
    for row, mine, right in zip(OPERATIONS, found, expected, strict=True):
        for one, other in zip(mine, right, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(row))


def test_what_counts_devices():
    """ppermute passes each device's block on, forwards and back; index is each device's number."""
    x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    turn = "shardops.ppermute('{0} -> {0}', shardops.regroup('B/d M/t -> d/d b M/t', x), {1})"
    back = f"shardops.regroup('d/d b M/t -> B/d M/t', {turn})"
    for d, t in ((4, 2), (8, 1), (2, 4)):
        with jax.set_mesh(make_mesh(dict(d=d, t=t))):
            on = jax.jit(typed_shard_map(program("B/d M/t", back.format("d/d b M/t", 1))))(x)
            before = jax.jit(typed_shard_map(program("B/d M/t", back.format("[d/d] b M/t", -1))))(x)
            index = jax.jit(typed_shard_map(program("B M -> i32 d/d", "shardops.index('d')")))(x)
        np.testing.assert_array_equal(on, np.roll(x, 16 // d, axis=0))
        np.testing.assert_array_equal(before, np.roll(x, -16 // d, axis=0))
        np.testing.assert_array_equal(index, np.arange(d))


def test_a_dims_axes_stand_major_first_in_any_order():
    """'M/t/d' deals M out over t first, whichever the mesh names first: gathered, scattered, sliced, looked up and
    moved, it is numpy's result, and so are the gradients."""

    def program(
        x: f32['M/t/d'], y: f32['B/e M'], table: f32['V/t/d'], ids: i32['B/e']
    ) -> tuple[f32['M/t'], f32['M/t/e/d'], f32['M'], f32['B/e'], f32['M/t/d'], f32['M N/t/d'], i32['']]:
        near = shardops.all_gather('M/t/d -> M/t', x)
        whole = shardops.all_gather('M/t/d -> M', x)
        of_y = shardops.psum_scatter('M +e -> M/e', shardops.sum_unreduced('B/e M -> M +e', y))
        moved = shardops.all_gather('M/e -> M', of_y)
        moved = shardops.slice('M -> M/t/e/d', moved)
        found = shardops.index_unreduced('[V/t/d], B/e -> B/e +d +t', table, ids)
        found = shardops.psum('B/e +d +t -> B/e', found)

        def loss(x: f32['M/t/d']) -> f32['+d +e +t']:
            whole = shardops.all_gather('M/t/d -> M', x)
            products = shardops.einsum_unreduced('B/e M, M -> B/e', y, whole)
            return shardops.pending('+e -> +d +e +t', shardops.sum_unreduced('B/e -> +e', products * products))

        dealt = shardops.einsum_unreduced('M/t/d, N -> M/t/d N', x, whole)
        dealt = shardops.all_to_all('M/t/d N -> M N/t/d', dealt)
        gradient = shardops.psum('M/t/d +e -> M/t/d', shardops.grad(loss)(x))
        back = shardops.all_gather('M/t/e/d -> M', moved)
        return near, moved, back, found, gradient, dealt, shardops.argmax('M/t/d -> ', x)

    x = np.float32([-3, 5, 2, -8, 1, 0, 7, -2, 4, 3, -5, 6, -1, -4, -6, -7])  # the largest is on neither end's device
    y, ids = random.integers(-8, 8, (4, 16)).astype(np.float32), np.int32([3, 15, 0, 8])
    with jax.set_mesh(make_mesh(dict(d=2, e=2, t=2))):
        found = jax.jit(typed_shard_map(program))(x, y, x, ids)
    expected = x, y.sum(0), y.sum(0), x[ids], 2 * y.T @ (y @ x), np.outer(x, x), 6
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_dtypes_of_a_gather():
    """dtype=bf16, reduce_dtype=f32: gathers in bfloat16, and the reduce-scatter of the gradient is in float32; one
    collective over both axes."""

    def program(w: f32['M/d/t'], x: f32['B/d/t M']) -> f32['M/d/t']:
        def loss(w):
            w = shardops.all_gather('M/d/t -> M', w, dtype=bf16, reduce_dtype=f32)
            half = x.astype(jnp.bfloat16)
            y = shardops.einsum_unreduced('B/d/t M, M -> B/d/t', half, w, preferred_element_type=jnp.float32)
            return shardops.sum_unreduced('B/d/t -> +d +t', y * y)

        return shardops.grad(loss)(w)

    with jax.set_mesh(make_mesh(dict(d=4, t=2))):
        text = str(jax.make_jaxpr(typed_shard_map(program))(jnp.zeros(8), jnp.zeros((16, 8))))
    assert re.findall(r":(\w+)\[[\d,]*\] = all_gather", text) == ["bf16"]
    assert re.findall(r":(\w+)\[[\d,]*\] = reduce_scatter", text) == ["f32"]
    assert re.search(r"all_gather\[\s*all_gather_dimension=0\s*axis_index_groups=None\s*axis_name=\('d', 't'\)", text)


# -- Errors of the strings ---------------------------------------------------------------------------------------------
INVALID = table(r"""
B/d M/t | shardops.all_gather('B/d M/t -> B/d M/t', x) | all_gather gathers dims … not 'B/d M/t -> B/d M/t'
B/d M/t | shardops.all_gather('B/d M/t -> M B/d', x) | all_gather keeps the dims, B M … M B
M/d/t | shardops.all_gather('M/d/t -> M/t', x) | fix: split it as M/t/d where it is declared
M/d | shardops.all_gather('M/d +t -> M', x) | all_gather gathers dims … not 'M/d +t -> M' fix: write 'M/d +t -> M +t'
M/d/t | shardops.all_gather('Z/t/d -> Z', x) | 'Z/t/d' says Z/t/d … split over d/t in the value: write Z/d/t
M/t/d | shardops.all_gather('M/t/d -> M/d', x) | M/t/d and M/d: all_gather … last axes only
M | shardops.pending('M -> M +t +d', x) | (d, t): write 'M +d +t', not 'M +t +d'
M | shardops.all_gather('Z/d -> Z', x) | 'Z/d' says Z/d … whole in the value: write Z
B/d M/t | shardops.psum_scatter('B/d M +t -> B/d M', x) | psum_scatter takes a sum … not 'B/d M +t -> B/d M'
B/d M/t | shardops.psum_scatter('B/d M/t -> B/d M/t +t', x) | uses mesh axis t twice
M | shardops.psum_scatter('M +t -> M/t', x)
    | 'M +t' says pending along t … already the same along t … once for each device
M/t | shardops.psum_scatter('Z +t -> Z/t', x) | 'Z +t' says Z … split over t in the value: write Z/t
M | shardops.psum('M -> M', x) | psum takes a sum … not 'M -> M'
M | shardops.psum('M +t -> M/t', x) | psum takes a sum … not 'M +t -> M/t' fix: write 'M +t -> M'
B/d M/t | shardops.pmax('B/d M/t -> B/d M/t', x) | lacks no dim: the largest over what?
B/d M/t | shardops.pmax('B/d M/t -> B', x) | the result is 'B/d', not 'B' fix: write 'B/d M/t -> B/d'
M | shardops.pmax('M +t -> ', x) | the largest of a sum … reduce the pending axes first
B/d M/t | shardops.all_to_all('B/d M/t -> B/d M', x)
    | all_to_all moves axes from one dim to one other … not 'B/d M/t -> B/d M'
B/d M/t | shardops.all_to_all('B/d M/t -> B/t M/d', x) | B/d and B/t: all_to_all … last axes only
B/d M/t | shardops.ppermute('B/d M/t -> B/d M/t', x, 1)
    | counts an axis' devices, 'd/d' fix: shardops.regroup('L/d -> d/d l', x)
M | shardops.ppermute('M -> M', x, 1) | ppermute … counts an axis' devices
M/d | shardops.ppermute('M/d -> M', x, 1) | the result is 'M/d', not 'M' fix: write 'M/d -> M/d'
B/d F/t, M F/t | shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M', x, y)
    | the result is 'B/d M +t', not 'B/d M' … fix: write 'B/d F/t, M F/t -> B/d M +t'
B/d F/t, M F/t | shardops.einsum_unreduced('B/d F/t, M F -> B/d M +t', x, y) | F/t in one operand, F in the other
B/d F/t, M F/t | shardops.einsum_unreduced('B/d F/t, M F/t -> B/d Z +t', x, y) | dim Z of the result is in no operand
B/d F/t, M F/t | shardops.einsum_unreduced('B/d B, M F/t -> B/d M', x, y) | dim B stands twice in 'B/d B'
F, M F | shardops.einsum_unreduced('F, M F -> M M', x, y) | dim M stands twice in 'M M'
B/d M, M F/d | shardops.einsum_unreduced('B/d M, M F/d -> B/d F', x, y) | split over d, B/d and F/d: gather one
B, B/t | shardops.einsum_unreduced('B +t, M/t -> B M/t', x, y) | 'B +t' is pending over t, 'M/t' not … reduce
B/d F/t, M F/t | shardops.einsum_unreduced('B/d F/t -> B/d', x, y) | 1 operand, the operation takes 2
B/d M/t | shardops.sum_unreduced('B/d M/t -> B/d', x) | the result is 'B/d +t', not 'B/d' fix: write 'B/d M/t -> B/d +t'
B/d M/t | shardops.sum_unreduced('B/d M/t -> B/d M/t', x) | lacks no dim: the sum over what?
B/d M/t | shardops.sum_unreduced('... -> +d', x) | '+d +t', not '+d': '...' lies as '_/d _/t' … '... -> +d +t'
M/d | shardops.sum_unreduced('... -> +d +t', x) | '+d', not '+d +t': '...' lies as '_/d' … '... -> +d'
B/d M/t | shardops.sum_unreduced('B/d ... -> B/d +t', x) | '...' stands for all dims … '... -> +d +t'
V/t M, i32 B/d L | shardops.index_unreduced('V/t M, B/d L -> B/d L M +t', x, y)
    | indexed dim alone stands in [ ] … '[V/t] M, B/d L -> B/d L M +t'
V/t M, i32 B/d L | shardops.index_unreduced('[V/t] M, B/d L -> B/d L M', x, y)
    | the result is 'B/d L M +t', not 'B/d L M' fix: write '[V/t] M, B/d L -> B/d L M +t'
V/t M, i32 B/d L | shardops.index_unreduced('[V/t] M +d, B L -> B L M +t', x, y)
    | a pending table or index: reduce it first
V/d M, i32 B/d L | shardops.index_unreduced('[V/d] M, B/d L -> B/d L M', x, y)
    | table and indices … split over d: gather one
V/t L, i32 B/d L | shardops.index_unreduced('[V/t] L, B/d L -> B/d L +t', x, y) | table and indices share L
B/d M/t | shardops.slice('B/d M/t -> B/d M/t', x) | slice splits dims … not 'B/d M/t -> B/d M/t'
M | shardops.pending('M -> M', x) | pending makes one term of a sum … not 'M -> M'
M | shardops.pending('M -> M/t +d', x) | pending … one term of a sum … not 'M -> M/t +d' fix: write 'M -> M +d'
B/d M/t | shardops.local('B/d M/t -> B/d', lambda x: x[:, 0], x) | differs along t, the result does not … sends nothing
M | shardops.local('M -> M/t', lambda x: x, x) | the same along t: a local function knows no index
M | shardops.local('M -> M +t', lambda x: x, x) | operands and result … the same along t
M | shardops.local('M +t -> M', lambda x: x, x) | pending over t and the result is not: reduce
M, F/t | shardops.local('M +t, F/t -> M +t', lambda x, y: x, x, y) | pending over t and another is split … reduce
B/d M/t | shardops.local('B/d M/t -> B/d M/t', lambda x: x[:, :1], x) | dim M/t of … is 2, but M is 64 in 'B/d M/t'
B/d M/t | shardops.all_gather('[B/d] M/t -> B M/t', x) | [B]: only index_unreduced, ppermute and ring
B/d M/t | shardops.all_gather('... M/t -> ... M', x) | '...' is for sum_unreduced alone
B/d M/t | shardops.all_gather('B/d M/x -> B/d M', x) | names mesh axis x, but the mesh has d, t
B/d M/t | shardops.all_gather('M/t -> M', x) | 'M/t' has 1 dims, the value has 2
B/d M/t | shardops.all_gather('B/d B/t -> B/d B', x) | dim B/t of … is 64, but B is 16 in
B/d M/t | shardops.zeros('Z', f32) | size of Z fix: … say Z=...
B/d M/t | shardops.zeros('Z/d', f32, Z=6) | dim Z has size 6 … d=4 cannot divide
B/d M/t | shardops.regroup('B/d M/t -> M/t B/d', x) | regroup … dims of neighbours … not 'M/t B/d' of 'B/d M/t'
B/d M/t | shardops.regroup('B/d M/t -> B/d M/t', x) | regroup makes other dims of neighbours … not 'B/d M/t' of
B/d M/t | shardops.regroup('B/d M/t -> B/d 2 Z +t', x)
    | the result is 'B/d 2 Z', not 'B/d 2 Z +t' fix: write 'B/d M/t -> B/d 2 Z'
B/d M/t | shardops.regroup('B/d M/t -> B/d P Z', x) | M/t and P Z … different axes (t): regroup sends nothing
B/d M/t | shardops.regroup('B/d M/t -> B/d P Z/t', x) | say all sizes of P Z/t … P=...
B/d M/t | shardops.regroup('B/d M/t -> B/d 5 Z/t', x) | M/t to 5 Z/t: … 32 elements … multiple of 5
B/d M/t | shardops.regroup('B/d M/t -> B/d P Z/t', x, P=4, Z=32) | M/t to P Z/t: … 32 elements are not 64
B/d M/t | shardops.argmax('B/d M/t -> ', x) | argmax goes along one dim
B/d M/t | shardops.any('B/d M/t -> B', x) | the result is 'B/d', not 'B' fix: write 'B/d M/t -> B/d'
B/d M/t | shardops.local('B/d M/t -> B/d M/t, B/d M/t', lambda x: x, x) | 2 results, the function returned
B/d M/t | shardops.local('B/d M/t -> B/d M/t', lambda x: (x, x), x) | 1 results, the function returned a tuple of 2
B/d M/t | shardops.local('B/d M/t -> B/d Z', lambda x: x[:, :3], x) | does not: a local function sends nothing
B/d M/t | shardops.axis_size('x') | 'x': the mesh d=4 × t=2 has no such axis
N | shardops.slice('N -> N/d', x) | dim N has size 3 … d=4 cannot divide
""")


@each_row(INVALID)
def test_invalid_strings(row):
    """Two levels: what is wrong, with the corrected string where one is likely; then the operation, its string, shapes,
    mesh and line."""
    types, body, message = row
    text = refusal(program(f"{types} -> {types.split(',')[0]}", f"({body}, x)[1]"))
    assert says(message, text), text
    operation = "" if "no such axis" in text else r" in shardops\.\w+\('.*'\).*, mesh d=4 × t=2"
    assert re.search(rf"\n  at /program/\d+\.py:2{operation}$", text) and text.count("\n") <= 2, text


def test_the_second_level():
    """The operation, its string, local and global shapes, the mesh, the line."""
    text = refusal(program("B/d F/t, M F -> B/d M", "shardops.einsum_unreduced('B/d F/t, M F -> B/d M', x, y)"))
    call = "shardops.einsum_unreduced('B/d F/t, M F -> B/d M'), local float32[4, 24], float32[64, 48]"
    assert says(f"at /program/ … .py:2 in {call}, global [16, 48], [64, 48], mesh d=4 × t=2", text)
    text = refusal(program("B/d F/t -> B/d F", "shardops.all_gather('B F/t -> B F', x)"))
    assert says("'B F/t' says B … split over d in the value: write B/d, or a gather … local float32[4, 24]", text)


def test_outside_of_shard_map():
    """An operation outside of shard_map says where to call it."""
    with pytest.raises(ShardingError) as caught:
        shardops.psum('M +t -> M', jnp.ones(3))
    assert says("called outside of shard_map fix: … under typed_shard_map at ", str(caught.value))
    with pytest.raises(ShardingError, match=r"called outside of shard_map"):
        shardops.zeros('M', f32, M=3)


@pytest.mark.parametrize("mesh", [dict(d=4, t=2), dict(d=1, t=1)], ids=["4x2", "1x1"])
def test_products_of_8_bit_numbers(mesh):
    """The value is that of both operands rounded to float8_e4m3fn after division by powers of two, summed exactly; the
    gradients are those of the rounded matrix and of the activations as they are; and a matrix is sent in bytes."""

    def both(
        x: f32['B/d F/t'], w: f32['M/d F/t'], gradient: f32['B/d M/t']
    ) -> tuple[f32['B/d M/t'], f32['B/d F/t'], f32['M/d F/t']]:
        def multiply(x, w):
            scale = float8_scale('M/d F/t -> ', w)
            w = shardops.all_gather('M/d F/t -> M F/t', Float8(w / scale, scale))
            y = product('B/d F/t, M F/t -> B/d M +t', x, w)
            return shardops.psum_scatter('B/d M +t -> B/d M/t', y)

        y, pull = shardops.vjp(multiply, x, w)
        return y, *pull(gradient)

    def rounded(values, axis):
        largest = np.abs(values).max(axis=axis, keepdims=True).astype(np.float64)
        scale = 2.0 ** np.floor(np.log2(largest / 1.5) + 1) / 256
        assert ((largest / scale > 191) & (largest / scale < 385)).all()
        return (values / scale).astype(np.float32).astype(jnp.float8_e4m3fn).astype(np.float64) * scale

    draws = np.random.default_rng(3)
    x = draws.standard_normal((8, 16)) * np.exp(draws.standard_normal((8, 1)) * 4)  # rows of very different sizes
    x, w, g = (array.astype(np.float32) for array in (x, *draws.standard_normal((2, 8, 16))))
    g = g[:, :8]
    with jax.set_mesh(make_mesh(mesh, devices=jax.devices()[: mesh["d"] * mesh["t"]])):
        traced = jax.jit(typed_shard_map(both)).trace(x, w, g)
        y, of_x, of_w = traced.lower().compile()(x, w, g)
    near = rounded(w, axis=None)
    for found, right in ((y, rounded(x, axis=1) @ near.T), (of_x, g @ near), (of_w, g.T @ x)):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5 * np.abs(right).max(axis=-1, keepdims=True).max())
    assert np.abs(y - x @ w.T).max() > 1e-3 * np.abs(y).max()  # 8 bits are few
    table = count(read(traced.jaxpr), mesh).collectives
    sent = {(row.dtype, row.bytes) for row in table if (row.kind, row.axes) == ("all-gather", ("d",))}
    assert sent == ({("uint8", 2 * 8)} if mesh["d"] > 1 else set())


def test_strings_as_bytes():
    """Strings may be bytes, as in published programs."""

    def program(x: f32[b'B/d F/t'], w: f32[b'M F/t']) -> f32[b'B/d M/t']:
        y = shardops.einsum_unreduced(b'B/d F/t, M F/t -> B/d M +t', x, w)
        return shardops.psum_scatter(b'B/d M +t -> B/d M/t', y) + shardops.zeros(b'B/d M/t', f32)

    assert prove(program) >= 4
