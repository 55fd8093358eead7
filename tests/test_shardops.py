"""Every operation: its value and gradient against the same on whole arrays, what it sends, and its errors with their text."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from prove import prove, refusal

from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shardtypes import Adapted, ShardingError, bf16, bool_, f32, i32, typed_shard_map

random = np.random.default_rng(0)


def draw(*shape):
    return random.integers(-8, 8, shape).astype(np.float32)  # sums are exact in any order


IDS = random.integers(-2, 18, (16, 8)).astype(np.int32)
HELD = (IDS >= 0) & (IDS < 16)


def rows(table, ids):
    return np.where(((ids >= 0) & (ids < table.shape[0]))[..., None], table[np.clip(ids, 0, table.shape[0] - 1)], 0)


# name: (types of the operands, type of the result, the program, the same on whole arrays, operands)
# The axes are those of the mesh d x t; on the mesh of three axes, e is added to what is written E.
T = f32
OPERATIONS = {
    "all_gather": ([T['M/d F/t']], T['M F/t'], lambda x: shardops.all_gather('M/d F/t -> M F/t', x), lambda x: x, [(16, 8)]),
    "all_gather of two dims": ([T['M/d F/t']], T['M F'], lambda x: shardops.all_gather('M/d F/t -> M F', x), lambda x: x, [(16, 8)]),
    "all_gather over two axes": ([T['M/d/t']], T['M'], lambda x: shardops.all_gather('M/d/t -> M', x), lambda x: x, [(16,)]),
    "all_gather over the minor axis": ([T['M/d/t']], T['M/d'], lambda x: shardops.all_gather('M/d/t -> M/d', x), lambda x: x, [(16,)]),
    "all_gather with dtypes": ([T['M/d F/t']], T['M F/t'], lambda x: shardops.all_gather('M/d F/t -> M F/t', x, dtype=bf16, reduce_dtype=f32).astype(jnp.float32), lambda x: x, [(16, 8)]),
    "psum_scatter": ([T['B/d F/t'], T['M F/t']], T['B/d M/t'], lambda x, w: shardops.psum_scatter('B/d M +t -> B/d M/t', shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', x, w)), lambda x, w: x @ w.T, [(16, 8), (8, 8)]),
    "psum_scatter over two axes": ([T['B/d/t M']], T['M/d/t'], lambda x: shardops.psum_scatter('M +d +t -> M/d/t', shardops.sum_unreduced('B/d/t M -> M +d +t', x)), lambda x: x.sum(0), [(16, 8)]),
    "psum_scatter to two dims": ([T['B/d/t M F']], T['M/d F/t'], lambda x: shardops.psum_scatter('M F +d +t -> M/d F/t', shardops.sum_unreduced('B/d/t M F -> M F +d +t', x)), lambda x: x.sum(0), [(16, 8, 8)]),
    "psum": ([T['B/d F/t']], T['B/d'], lambda x: shardops.psum('B/d +t -> B/d', shardops.sum_unreduced('B/d F/t -> B/d +t', x)), lambda x: x.sum(1), [(16, 8)]),
    "psum over one of two axes": ([T['B/d F/t']], T[''], lambda x: shardops.psum('+t -> ', shardops.psum('+d +t -> +t', shardops.sum_unreduced('B/d F/t -> +d +t', x))), lambda x: x.sum(), [(16, 8)]),
    "pmax": ([T['B/d F/t']], T['B/d'], lambda x: shardops.pmax('B/d F/t -> B/d', lax.stop_gradient(x)), lambda x: lax.stop_gradient(x.max(1)), [(16, 8)]),
    "pmax of a whole dim": ([T['B/d F']], T['B/d'], lambda x: shardops.pmax('B/d F -> B/d', lax.stop_gradient(x)), lambda x: lax.stop_gradient(x.max(1)), [(16, 8)]),
    "all_to_all": ([T['E/t C M']], T['E C/t M'], lambda x: shardops.all_to_all('E/t C M -> E C/t M', x), lambda x: x, [(8, 16, 3)]),
    "all_to_all of a minor axis": ([T['E/d/t C']], T['E/d C/t'], lambda x: shardops.all_to_all('E/d/t C -> E/d C/t', x), lambda x: x, [(16, 8)]),
    "all_to_all of two axes": ([T['E/d/t C']], T['E C/d/t'], lambda x: shardops.all_to_all('E/d/t C -> E C/d/t', x), lambda x: x, [(16, 16)]),
    "ppermute": ([T['S/d M']], T['S/d M'], lambda x: turned('S/d M', 'd/d s M', 'd/d s M', x, 1), lambda x: jnp.roll(x, 16 // D[0], 0), [(16, 8)]),
    "ppermute of the marked dim, backwards": ([T['S/d M/t']], T['S/d M/t'], lambda x: turned('S/d M/t', 'd/d s M/t', '[d/d] s M/t', x, -1), lambda x: jnp.roll(x, -16 // D[0], 0), [(16, 8)]),
    "einsum": ([T['B/d M'], T['M F/t']], T['B/d F/t'], lambda x, w: shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w), lambda x, w: x @ w, [(16, 4), (4, 8)]),
    "einsum of three dims": ([T['B/d Q K/t'], T['M Q K/t']], T['B/d M'], lambda x, w: shardops.psum('B/d M +t -> B/d M', shardops.einsum_unreduced('B/d Q K/t, M Q K/t -> B/d M +t', x, w, preferred_element_type=jnp.float32)), lambda x, w: jnp.einsum('bqk,mqk->bm', x, w), [(16, 2, 8), (4, 2, 8)]),
    "product": ([T['B/d F/t'], T['M F/t']], T['B/d M'], lambda x, w: shardops.psum('B/d M +t -> B/d M', shardops.product('B/d F/t, M F/t -> B/d M +t', x, w)), lambda x, w: x @ w.T, [(16, 8), (4, 8)]),
    "product of an adapted matrix": ([T['B/d F/t'], T['M F/t'], T['F/t N'], T['N M']], T['B/d M'], lambda x, w, a, b: shardops.psum('B/d M +t -> B/d M', shardops.product('B/d F/t, M F/t -> B/d M +t', x, Adapted(w, a, b, 2.0))), lambda x, w, a, b: x @ (w.T + 2 * a @ b), [(16, 8), (4, 8), (8, 3), (3, 4)]),
    "product of adapted experts": ([T['X B/d M'], T['X M F/t'], T['X M N'], T['X N F/t']], T['X B/d F/t'], lambda x, w, a, b: shardops.product('X B/d M, X M F/t -> X B/d F/t', x, Adapted(w, a, b, 0.5)), lambda x, w, a, b: x @ (w + 0.5 * a @ b), [(2, 16, 4), (2, 4, 8), (2, 4, 3), (2, 3, 8)]),
    "index_unreduced of a split table": ([T['V/t M'], i32['B/d L']], T['B/d L M'], lambda w, i: shardops.psum('B/d L M +t -> B/d L M', shardops.index_unreduced('[V/t] M, B/d L -> B/d L M +t', w, i)), lambda w, i: jnp.where(HELD[..., None], w[jnp.clip(i, 0, 15)], 0.0), [(16, 3), IDS]),
    "index_unreduced of a table split over both": ([T['M V/d/t'], i32['B L']], T['B L M'], lambda w, i: shardops.psum('B L M +d +t -> B L M', shardops.index_unreduced('M [V/d/t], B L -> B L M +d +t', w, i)), lambda w, i: jnp.where(HELD[..., None], w.T[jnp.clip(i, 0, 15)], 0.0), [(3, 16), IDS]),
    "index_unreduced of a whole table": ([T['V M/t'], i32['B/d L']], T['B/d L M/t'], lambda w, i: shardops.index_unreduced('[V] M/t, B/d L -> B/d L M/t', w, i), lambda w, i: jnp.where(HELD[..., None], w[jnp.clip(i, 0, 15)], 0.0), [(16, 8), IDS]),
    "index_unreduced, a table for each index": ([T['B/d L V/t'], i32['B/d L']], T['B/d L'], lambda w, i: shardops.psum('B/d L +t -> B/d L', shardops.index_unreduced('B/d L [V/t], B/d L -> B/d L +t', w, i)), lambda w, i: jnp.where(HELD, jnp.take_along_axis(w, jnp.clip(i, 0, 15)[..., None], -1)[..., 0], 0.0), [(16, 8, 16), IDS]),
    "sum_unreduced": ([T['B/d L V/t']], T['B/d L'], lambda x: shardops.psum('B/d L +t -> B/d L', shardops.sum_unreduced('B/d L V/t -> B/d L +t', x)), lambda x: x.sum(2), [(16, 3, 8)]),
    "sum_unreduced of a whole dim": ([T['B/d L V/t']], T['B/d V/t'], lambda x: shardops.sum_unreduced('B/d L V/t -> B/d V/t', x), lambda x: x.sum(1), [(16, 3, 8)]),
    "sum_unreduced of all": ([T['B/d L V/t']], T[''], lambda x: shardops.psum('+d +t -> ', shardops.sum_unreduced('... -> +d +t', x * x)), lambda x: (x * x).sum(), [(16, 3, 8)]),
    "slice": ([T['M F/t']], T['M/d F/t'], lambda x: shardops.slice('M F/t -> M/d F/t', x), lambda x: x, [(16, 8)]),
    "slice over two axes": ([T['M']], T['M/d/t'], lambda x: shardops.slice('M -> M/d/t', x), lambda x: x, [(16,)]),
    "pending": ([T['M']], T['M'], lambda x: shardops.psum('M +d +t -> M', shardops.pending('M -> M +d +t', x)), lambda x: x, [(16,)]),
    "zeros": ([T['M/d']], T['M/d F/t'], lambda x: shardops.zeros('M/d F/t', f32, F=8) + x[:, None], lambda x: x[:, None] + jnp.zeros((16, 8)), [(16,)]),
    "zeros that are pending": ([T['M/d']], T['M/d'], lambda x: x + shardops.psum('M/d +t -> M/d', shardops.zeros('M/d +t', f32)), lambda x: x, [(16,)]),
    "full": ([T['M/d']], T['M/d'], lambda x: x * shardops.full('M/d', 3, f32), lambda x: 3 * x, [(16,)]),
    "local": ([T['B/d M/t']], T['B/d M/t'], lambda x: shardops.local('B/d M/t -> B/d M/t', lambda x: x * x, x), lambda x: x * x, [(16, 8)]),
    "axis_size": ([T['M/d']], T['M/d'], lambda x: x * (x.shape[0] * shardops.axis_size('d')), lambda x: x * 16, [(16,)]),
    "index": ([T['M']], i32['d'], lambda x: shardops.all_gather('d/d -> d', shardops.index('d')), lambda x: jnp.arange(D[0]), [(16,)]),
    "regroup": ([T['B/d M']], T['M'], lambda x: shardops.psum('M +d -> M', shardops.sum_unreduced('P R/d M -> M +d', shardops.regroup('B/d M -> P R/d M', x, P=2) ** 2)), lambda x: (x**2).sum(0), [(16, 8)]),
    "regroup, and its inverse": ([T['B/d F/t']], T['B/d F/t'], lambda x: shardops.regroup('P R/d F/t -> B/d F/t', shardops.regroup('B/d F/t -> P R/d F/t', x, P=2)), lambda x: x, [(16, 8)]),
    "argmax": ([T['B/d V/t']], i32['B/d'], lambda x: shardops.argmax('B/d V/t -> B/d', x), lambda x: x.argmax(1), [(16, 8)]),
    "argmax over two axes": ([T['V/d/t B']], i32['B'], lambda x: shardops.argmax('V/d/t B -> B', x), lambda x: x.argmax(0), [(16, 8)]),
    "any": ([T['B/d V/t']], bool_['B/d'], lambda x: shardops.any('B/d V/t -> B/d', x > 6), lambda x: (x > 6).any(1), [(16, 8)]),
    "any of all": ([T['B/d V/t']], bool_[''], lambda x: shardops.any('B/d V/t -> ', x > 7), lambda x: (x > 7).any(), [(16, 8)]),
    "local with several results": ([T['B/d M']], T['B/d X'], lambda x: shardops.local('B/d M -> B/d X, B/d X', lambda x: lax.top_k(x, 2), x, X=2)[0], lambda x: lax.top_k(x, 2)[0], [(16, 8)]),
}  # fmt: skip


def turned(before, blocks, moving, x, shift):
    """Each device's rows passed on as a block."""
    passed = shardops.ppermute(f"{moving} -> {moving}", shardops.regroup(f"{before} -> {blocks}", x), shift)
    return shardops.regroup(f"{blocks} -> {before}", passed)


D = [4]  # the size of axis d on the mesh of the running test
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile in half the time


def signed(function, types, result):
    arguments = {f"x{index}": type_ for index, type_ in enumerate(types)}

    def call(*values):
        return function(*values)

    import inspect

    call.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=type_)
            for name, type_ in arguments.items()
        ],
        return_annotation=result,
    )
    return call


def value_and_gradients(name, names):
    """The program of a mesh: the result, and the gradient of the sum of its squares for each float operand, reduced."""
    types, result, function, _whole, _operands = OPERATIONS[name]
    diff = tuple(index for index, type_ in enumerate(types) if type_.element is f32 and result.element is f32)

    def program(*values):
        def loss(*values):
            y = function(*values)
            split = result.spec.split
            total = (
                shardops.sum_unreduced(f"{result.spec} -> {' '.join('+' + a for a in names if a in split)}", y * y)
                if result.spec.dims
                else y * y
            )
            rest = [a for a in names if a not in split]
            before = ' '.join('+' + a for a in names if a in split)
            return shardops.pending(f"{before} -> {' '.join('+' + a for a in names)}", total) if rest else total

        gradients = shardops.grad(loss, argnums=diff)(*values) if diff else ()
        reduced = []
        for index, gradient in zip(diff, gradients):
            spec = types[index].spec
            owed = ' '.join('+' + a for a in names if a not in spec.split)
            reduced.append(shardops.psum(f"{spec} {owed} -> {spec}", gradient) if owed else gradient)
        return function(*values), *reduced

    return signed(program, types, tuple[(result, *(types[index] for index in diff))]), diff


@pytest.mark.parametrize("mesh", [dict(d=4, t=2), dict(d=8, t=1), dict(d=2, e=2, t=2)], ids=["4x2", "8x1", "2x2x2"])
def test_values_and_gradients(mesh):
    """Each operation's value and gradient, on meshes of two and three axes, equal those of plain JAX on whole arrays exactly."""
    D[0] = mesh["d"]
    whole_arrays = {
        name: [operand if isinstance(operand, np.ndarray) else draw(*operand) for operand in entry[4]]
        for name, entry in OPERATIONS.items()
    }

    def everything(arrays):  # one compilation for all
        results = {}
        for name in OPERATIONS:
            program, _ = value_and_gradients(name, tuple(mesh))
            results[name] = typed_shard_map(program)(*arrays[name])
        return results

    with jax.set_mesh(make_mesh(mesh)):
        ours = jax.jit(everything, compiler_options=QUICK)(whole_arrays)

    def truths(arrays):
        results = {}
        for name, (_, _, _, whole, _) in OPERATIONS.items():
            _, diff = value_and_gradients(name, tuple(mesh))
            loss = functools.partial(lambda whole, *values: jnp.sum(whole(*values) ** 2), whole)
            results[name] = whole(*arrays[name]), *(jax.grad(loss, argnums=diff)(*arrays[name]) if diff else ())
        return results

    truth = jax.jit(truths, compiler_options=QUICK)(whole_arrays)
    for name in OPERATIONS:
        for mine, right in zip(ours[name], truth[name], strict=True):
            np.testing.assert_array_equal(mine, right, err_msg=name)


def test_three_axes():
    """Strings with a third axis between the others: gathered, scattered and moved in the mesh's order."""
    types = tuple[f32['M/d/e/t'], f32['M/d/t'], f32['M/e/t']]

    def program(x: f32['M/d/e/t'], y: f32['B/e M']) -> types:
        gathered = shardops.all_gather('M/d/e/t -> M', x)
        y = shardops.psum_scatter('M +e -> M/e', shardops.sum_unreduced('B/e M -> M +e', y))
        return (
            shardops.slice('M -> M/d/e/t', gathered),
            shardops.slice('M -> M/d/t', gathered),
            shardops.slice('M/e -> M/e/t', y),
        )

    x, y = draw(16), draw(4, 16)
    with jax.set_mesh(make_mesh(dict(d=2, e=2, t=2))):
        a, b, c = jax.jit(typed_shard_map(program))(x, y)
    np.testing.assert_array_equal(a, x)
    np.testing.assert_array_equal(b, x)
    np.testing.assert_array_equal(c, y.sum(0))


def test_dtypes_of_a_gather():
    """dtype=bf16, reduce_dtype=f32: gathers in bfloat16, and the reduce-scatter of the gradient is in float32; one collective over both axes."""

    def program(w: f32['M/d/t'], x: f32['B/d/t M']) -> f32['M/d/t']:
        def loss(w):
            w = shardops.all_gather('M/d/t -> M', w, dtype=bf16, reduce_dtype=f32)
            y = shardops.einsum_unreduced(
                'B/d/t M, M -> B/d/t', x.astype(jnp.bfloat16), w, preferred_element_type=jnp.float32
            )
            return shardops.sum_unreduced('B/d/t -> +d +t', y * y)

        return shardops.grad(loss)(w)

    with jax.set_mesh(make_mesh(dict(d=4, t=2))):
        text = str(jax.make_jaxpr(typed_shard_map(program))(draw(8), draw(16, 8)))
    assert re.findall(r":(\w+)\[[\d,]*\] = all_gather", text) == ["bf16"]
    assert re.findall(r":(\w+)\[[\d,]*\] = reduce_scatter", text) == ["f32"]
    assert re.search(r"all_gather\[\s*all_gather_dimension=0\s*axis_index_groups=None\s*axis_name=\('d', 't'\)", text)


def test_pmax_without_stop_gradient():
    """pmax in what is differentiated says to stop the gradient first, with its line."""

    def program(x: f32['B/d V/t']) -> f32['B/d V/t']:
        return shardops.grad(
            lambda x: shardops.sum_unreduced('B/d V/t -> +d +t', x - shardops.pmax('B/d V/t -> B/d', x)[:, None])
        )(x)

    with (
        jax.set_mesh(make_mesh(dict(d=4, t=2))),
        pytest.raises(
            ShardingError,
            match=r"pmax has no gradient: pass it lax.stop_gradient\(x\)\n  in shardops.pmax\('B/d V/t -> B/d'\)\n  at .*test_shardops.py:\d+",
        ),
    ):
        jax.jit(typed_shard_map(program))(draw(16, 8))


# -- Errors of the strings ---------------------------------------------------------------------------------------------
def call(name, spec, *extra):
    return lambda *values: getattr(shardops, name)(spec, *values, *extra)


X = (f32['B/d M/t'],)
XW = (f32['B/d F/t'], f32['M F/t'])
TI = (f32['V/t M'], i32['B/d L'])
INVALID = [
    # all_gather
    (X, call("all_gather", 'B/d M/t -> B/d M/t'), "gathers nothing: 'B/d M/t' and 'B/d M/t' are split alike"),
    (X, call("all_gather", 'B/d M/t -> M B/d'), "the operation keeps the dims, B M, but the result has M B"),
    ((f32['M/d/t'],), call("all_gather", 'M/d/t -> M/t'), "M/t and M/d/t: all_gather gathers a dim's minor axes only, the last ones, since the parts over a major axis alone are not neighbours"),
    ((f32['M/d'],), call("all_gather", 'M/d +t -> M'), "all_gather takes no sum: write 'M/d +t -> M +t'"),
    (X, call("all_gather", 'Z/t E/d -> Z/t E'), "'Z/t E/d' says Z/t, but that dim is split over d in the value: write Z/d"),
    ((f32['M/d/t'],), call("all_gather", 'M/t/d -> M'), "axes are written in the order of the mesh's axes (d, t): write 'M/d/t -> M'"),
    ((f32['M'],), call("all_gather", 'Z/d -> Z'), "'Z/d' says split along d, but the value is the same along d (slice makes '/d' of it; zeros and full make new ones)"),
    # psum_scatter
    (XW[:1], call("psum_scatter", 'B/d F/t -> B/d F/t'), "psum_scatter takes the sum over axes that some dim is then split over: 'B/d F/t' to 'B/d F/t' takes the sum over none and splits over none"),
    (X, call("psum_scatter", 'B/d M +t -> B/d M'), "takes the sum over t and splits over none"),
    (X, call("psum_scatter", 'B/d M/t -> B/d M/t +t'), "uses mesh axis t twice"),
    ((f32['M/t'],), call("psum_scatter", 'M/t +d -> M/d/t'), "M/t and M/d/t: psum_scatter splits a dim's minor axes only"),
    ((f32['M'],), call("psum_scatter", 'M +t -> M/t'), "'M +t' says pending along t, but the value is already the same along t: a sum over t would count it once for each device"),
    ((f32['M/t'],), call("psum_scatter", 'Z +t -> Z/t'), "'Z +t' says pending along t, but the value is split over t, it is no term of a sum over t"),
    # psum
    ((f32['M'],), call("psum", 'M -> M'), "takes no sum: the operand must be pending over more axes than the result, as in 'M +t -> M'"),
    ((f32['M'],), call("psum", 'M +t -> M/t'), "psum keeps the dims: write 'M +t -> M'"),
    ((f32['M'],), call("psum", 'M +t -> M'), "'M +t' says pending along t, but the value is already the same along t"),
    ((f32['M'],), call("psum", 'M -> M +t'), "takes no sum"),
    # pmax
    (X, call("pmax", 'B/d M/t -> B/d M/t'), "the result lacks no dim: the largest over what?"),
    (X, call("pmax", 'B/d M/t -> B'), "the other dims stay as they are: write 'B/d M/t -> B/d'"),
    ((f32['M'],), call("pmax", 'M +t -> '), "the largest of a sum is not the largest of its terms: reduce the pending axes first"),
    # all_to_all
    (X, call("all_to_all", 'B/d M/t -> B/d M'), "all_to_all moves the same axes from one dim to one other, as in 'E/t C M -> E C/t M'"),
    (X, call("all_to_all", 'B/d M/t -> B/t M/d'), "all_to_all moves"),
    # ppermute
    (X, call("ppermute", 'B/d M/t -> B/d M/t', 1), "ppermute rolls one dim that counts an axis' devices, as 'd/d' does: of a longer dim it would move blocks, of another size on each mesh\n  fix: shardops.regroup('L/d -> d/d l', x) makes such a dim"),
    ((f32['M'],), call("ppermute", 'M -> M', 1), "ppermute rolls one dim that counts an axis' devices"),
    ((f32['M/d'],), call("ppermute", 'M/d -> M', 1), "ppermute keeps the type: write 'M/d -> M/d'"),
    # einsum_unreduced
    (XW, call("einsum_unreduced", 'B/d F/t, M F/t -> B/d M'), "the result is 'B/d M +t', not 'B/d M': the contraction leaves a sum over t\n  fix: write 'B/d F/t, M F/t -> B/d M +t'"),
    (XW, call("einsum_unreduced", 'B/d F/t, M F -> B/d M +t'), "F/t in one operand, F in the other: the devices' parts do not match"),
    (XW, call("einsum_unreduced", 'B/d F/t, M F/t -> B M +t'), "the result is 'B/d M +t', not 'B M +t'\n  fix: write 'B/d F/t, M F/t -> B/d M +t'"),
    (XW, call("einsum_unreduced", 'B/d F/t, M F/t -> B/d Z +t'), "dim Z of the result is in no operand"),
    (XW, call("einsum_unreduced", 'B/d B, M F/t -> B/d M'), "dim B stands twice in 'B/d B'"),
    ((f32['B/d M'], f32['M F/d']), call("einsum_unreduced", 'B/d M, M F/d -> B/d F'), "two dims that are split over d meet in the result 'B/d F/d': each device has only the parts of its own index, gather one of them first"),
    ((f32['B'], f32['B/t']), call("einsum_unreduced", 'B +t, M/t -> B M/t'), "'B +t' is pending over t, and 'M/t' is not the same along it: reduce it first"),
    (XW, call("einsum_unreduced", 'B/d F/t -> B/d'), "the string has 1 operand, the operation takes 2"),
    # sum_unreduced
    (X, call("sum_unreduced", 'B/d M/t -> B/d'), "the result is 'B/d +t', not 'B/d'\n  fix: write 'B/d M/t -> B/d +t'"),
    (X, call("sum_unreduced", 'B/d M/t -> B/d M/t'), "the result lacks no dim: the sum over what?"),
    (X, call("sum_unreduced", '... -> +d'), "'...' is split along t: the result is pending over it, write '+t'"),
    ((f32['M/d'],), call("sum_unreduced", '... -> +d +t'), "'...' is the same along t: the sum of what is the same would count it once for each device"),
    (X, call("sum_unreduced", 'B/d ... -> B/d +t'), "'...' stands for all dims, and all are summed: '... -> +d +t'"),
    # index_unreduced
    (TI, call("index_unreduced", 'V/t M, B/d L -> B/d L M +t'), "the table's indexed dim, and no other, stands in [ ], as in '[V/t] M, B/d L -> B/d L M +t'"),
    (TI, call("index_unreduced", '[V/t] M, B/d L -> B/d L M'), "the result is 'B/d L M +t', not 'B/d L M'\n  fix: write '[V/t] M, B/d L -> B/d L M +t'"),
    (TI, call("index_unreduced", '[V/t] M +d, B L -> B L M +t'), "a pending table or index: reduce it first"),
    ((f32['V/d M'], i32['B/d L']), call("index_unreduced", '[V/d] M, B/d L -> B/d L M'), "table and indices are both split over d: a device looks up only its own indices in its own rows, gather one of them first"),
    ((f32['V/t L'], i32['B/d L']), call("index_unreduced", '[V/t] L, B/d L -> B/d L +t'), "table and indices share L: either all dims but the indexed one are the indices' dims, or none"),
    # slice, pending
    (X, call("slice", 'B/d M/t -> B/d M/t'), "slice splits dims and changes nothing else, as in 'M -> M/t'"),
    ((f32['M/t'],), call("slice", 'M/t -> M/d/t'), "M/t and M/d/t: slice splits a dim's minor axes only"),
    ((f32['M'],), call("pending", 'M -> M'), "pending adds pending axes and changes nothing else, as in 'M -> M +t'"),
    ((f32['M'],), call("pending", 'M -> M/t +d'), "pending adds pending axes"),
    # local
    (X, lambda x: shardops.local('B/d M/t -> B/d', lambda x: x[:, 0], x), "an operand differs along t, the result says it is the same: nothing is sent inside a local function"),
    ((f32['M'],), lambda x: shardops.local('M -> M/t', lambda x: x, x), "the operands are the same along t, and so is the result: a local function does not know which device it runs on"),
    ((f32['M'],), lambda x: shardops.local('M -> M +t', lambda x: x, x), "the operands are the same along t"),
    ((f32['M'],), lambda x: shardops.local('M +t -> M', lambda x: x, x), "an operand is pending over t and the result is not: reduce it first"),
    ((f32['M'], f32['F/t']), lambda x, y: shardops.local('M +t, F/t -> M +t', lambda x, y: x, x, y), "an operand is pending over t and another is split over it: reduce it first"),
    (X, lambda x: shardops.local('B/d M/t -> B/d M/t', lambda x: x[:, :1], x), "dim M/t of 'B/d M/t' is 1, but M is 64 in 'B/d M/t'"),
    # all of them
    (X, call("all_gather", '[B/d] M/t -> B M/t'), "[B]: only index_unreduced and ppermute mark a dim with [ ]"),
    (X, call("all_gather", '... M/t -> ... M'), "'...' is for sum_unreduced alone: name the dims"),
    (X, call("all_gather", 'B/d M/x -> B/d M'), "'B/d M/x' names mesh axis x, but the mesh has d, t"),
    (X, call("all_gather", 'M/t -> M'), "'M/t' has 1 dims, the value has 2"),
    (X, call("all_gather", 'B/d B/t -> B/d B'), "dim B/t of 'B/d B/t' is 64, but B is 16 in"),
    (X, lambda x: shardops.zeros('Z', f32), "the size of Z is not known here: no operand and no annotation of this scope has it\n  fix: where the operation makes Z (zeros, full, local, regroup), say Z=...\n  in shardops.zeros('Z'), mesh d=4 × t=2"),
    (X, lambda x: shardops.zeros('Z/d', f32, Z=6), "dim Z has size 6, which axis d=4 cannot divide\n  in shardops.zeros('Z/d'), mesh d=4 × t=2"),
    (X, lambda x: shardops.full('B/d +t', 1, f32), "a pending value is a sum of the devices' terms\n  fix: shardops.pending('B/d -> B/d +t', shardops.full('B/d', ...))"),
    # regroup
    (X, call("regroup", 'B/d M/t -> M/t B/d'), "regroup keeps the order of the dims that stay: transpose before or after"),
    (X, call("regroup", 'B/d M/t -> B/d M/t'), "regroup divides and merges dims, and changes nothing else"),
    (X, call("regroup", 'B/d M/t -> B/d 2 Z +t'), "regroup divides and merges dims, and changes nothing else: write 'B/d M/t -> B/d 2 Z'"),
    (X, call("regroup", 'B/d M/t -> B/d P Z'), "M/t and P Z are split over different axes (t): regroup moves nothing between devices"),
    (X, call("regroup", 'B/d M/t -> B/d P Z/t'), "say all sizes of P Z/t but one, as in P=..."),
    (X, call("regroup", 'B/d M/t -> B/d 5 Z/t'), "M/t to 5 Z/t: a device's 64 elements are not a multiple of 5"),
    (X, lambda x: shardops.regroup('B/d M/t -> B/d P Z/t', x, P=4, Z=32), "M/t to P Z/t: a device's 64 elements are not 128"),
    (X, call("regroup", 'B/d M/t -> B/t P Z/d'), "B/d and B/t: a dim that stays is split as before"),
    # argmax, any, local with several results
    (X, call("argmax", 'B/d M/t -> '), "argmax goes along one dim, as in 'B/d L V/t -> B/d L'"),
    (X, call("any", 'B/d M/t -> B'), "the other dims stay as they are: write 'B/d M/t -> B/d'"),
    (X, lambda x: shardops.local('B/d M/t -> B/d M/t, B/d M/t', lambda x: x, x), "the string has 2 results, the function returned "),
    (X, lambda x: shardops.local('B/d M/t -> B/d Z', lambda x: x[:, :3], x), "the result says it is the same: nothing is sent inside a local function"),
    (X, lambda x: shardops.axis_size('x'), "axis_size('x'): the mesh d=4 × t=2 has no such axis here"),
    ((f32['N'],), call("slice", 'N -> N/d'), "dim N has size 3, which axis d=4 cannot divide"),
    ((f32['N M/d'],), lambda x: shardops.psum_scatter('N +d -> N/d', shardops.sum_unreduced('N M/d -> N +d', x)), "dim N has size 3, which axis d=4 cannot divide"),
    ((f32['N C/t'],), call("all_to_all", 'N C/t -> N/t C'), "dim N has size 3, which axis t=2 cannot divide"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(INVALID)), ids=lambda index: re.sub(r"\W+", "-", INVALID[index][2])[:60])
def test_invalid_strings(case, monkeypatch):
    """Two levels: what is wrong, with the corrected string where one is likely; then the operation, its string, shapes, mesh and line."""
    import prove

    monkeypatch.setitem(prove.SIZES, "C", 160)
    types, function, message = INVALID[case]

    def program(*values):
        function(*values)
        return values[0]

    text = refusal(signed(program, types, types[0]))
    assert message in text, text
    assert re.search(r"\n  at .*test_shardops\.py:\d+$", text), text
    if "axis_size" not in text:
        assert re.search(r"\n  in shardops\.\w+\('.*'\).*, mesh d=4 × t=2", text), text


def test_the_second_level():
    """The operation, its string, local and global shapes, the mesh, the line."""

    def program(x: f32['B/d F/t'], w: f32['M F/t']) -> f32['B/d M']:
        return shardops.einsum_unreduced('B/d F/t, M F -> B/d M', x, w)

    text = refusal(program)
    assert "F/t in one operand, F in the other" in text
    assert (
        "\n  in shardops.einsum_unreduced('B/d F/t, M F -> B/d M'), local float32[4, 24], float32[64, 48], global [16, 48], [64, 48], mesh d=4 × t=2\n  at "
        in text
    )

    def forgotten(x: f32['B/d F/t']) -> f32['B/d F']:
        return shardops.all_gather('B F/t -> B F', x)

    text = refusal(forgotten)
    assert "'B F/t' says the same along d, but the value differs along d: a reduction over d or a gather was" in text
    assert "local float32[16, 24]" in text


def test_outside_of_shard_map():
    """An operation outside of shard_map says where to call it."""
    with pytest.raises(
        ShardingError,
        match=r"called outside of shard_map: there are no mesh axes here\n  fix: call it inside a function under typed_shard_map\n  in shardops.psum",
    ):
        shardops.psum('M +t -> M', jnp.ones(3))
    with pytest.raises(ShardingError, match=r"called outside of shard_map"):
        shardops.zeros('M', f32, M=3)


def test_strings_as_bytes():
    """Strings may be bytes, as in published programs."""

    def program(x: f32[b'B/d F/t'], w: f32[b'M F/t']) -> f32[b'B/d M/t']:
        y = shardops.einsum_unreduced(b'B/d F/t, M F/t -> B/d M +t', x, w)
        return shardops.psum_scatter(b'B/d M +t -> B/d M/t', y) + shardops.zeros(b'B/d M/t', f32)

    assert prove(program) >= 4
