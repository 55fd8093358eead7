"""The check: what it knows after a reshape, the types of gradients, kinds of mesh. Programs that it refuses stand in
test_refused.py, programs that it accepts in right_programs.py."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from prove import OF_D_AND_T, prove_everywhere, refused_everywhere

from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.proof.parts import Parts
from shardlib.proof.rules import Equation, apply
from shardlib.proof.states import State
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, make_shardings
from shardlib.spec import ShardingError


def test_reshape_tracking():
    """What splits the dims after a reshape: the major dim of a run is the split one, before and after. Of one element a
    device, 'p/p', it is the dim that stands behind as many elements, or it is dropped."""
    parts = Parts(dict(d=1, t=1, p=1))

    def after(before, shape):
        """Dims are sizes, or (size of the whole, its axes); of one element a device (1, ('p',))."""
        rows = tuple(dim[1] if isinstance(dim, tuple) else () for dim in before)
        sizes = [
            [dim if isinstance(dim, int) else parts.size(*dim) if dim[0] > 1 else 1 for dim in dims]
            for dims in (before, shape)
        ]
        given, made = ([SimpleNamespace(aval=SimpleNamespace(shape=tuple(each)))] for each in sizes)
        eqn = SimpleNamespace(
            primitive=SimpleNamespace(name="reshape"), params=dict(dimensions=None), invars=given, outvars=made
        )
        axes = frozenset(axis for row in rows for axis in row)
        (state,) = apply(Equation(eqn, [State(rows, split=axes)], parts))
        return state.dims, state.without_dim

    d, t, p = ('d',), ('t',), ('p',)
    for before, shape, dims, alone in [
        (((4, d), 6), ((24, d),), (d,), ""),
        (((4, d), 6), ((2, d), 2, 6), (d, (), ()), ""),
        (((4, d), 6), ((4, d), 2, 3), (d, (), ()), ""),
        (((4, d), (6, t)), ((4, d), (2, t), 3), (d, t, ()), ""),
        (((4, d), 6), (1, (4, d), 6), ((), d, ()), ""),
        (((4, d), 6), ((4, d), 1, 6, 1), (d, (), (), ()), ""),
        (((1, p), 6), (1, 1, 6), (p, (), ()), ""),
        (((1, p), 6), (6,), ((),), "p"),
        (((1, p), 6), (1, 2, 3), (p, (), ()), ""),
        ((2, (1, p), 3), (6,), ((),), "p"),
        ((2, (1, p), 3), (2, 1, 3), ((), p, ()), ""),
        ((1, (1, p), 3), (1, 1, 3), ((), p, ()), ""),
        ((6,), (1, 6, 1), ((), (), ()), ""),
    ]:
        assert after(before, shape) == (dims, frozenset(alone)), (before, shape)
    for before, shape, text in [
        ((4, (6, d)), ((24, d),), "'reshape' merges into the one before it a dim that is split over d"),
        (((24, d),), (4, (6, d)), "'reshape' makes a minor dim of a dim that is split over d"),
        (((4, d), 6), (6, (4, d)), "'reshape' makes a minor dim of a dim that is split over d"),
    ]:
        with pytest.raises(ShardingError, match=text):
            after(before, shape)


# -- Losses and gradients ----------------------------------------------------------------------------------------------
def gradient_program(weight, reduce, finish=lambda loss: loss):
    """A regression whose weight has a given type: its gradient, reduced or not."""

    def program(w: weight, x: f32['B/d M/t']) -> weight:
        def loss(w):
            w = shardops.slice('M -> M/t', w) if str(weight.spec) == 'M' else w
            terms = x * (w[None] if weight.spec.dims else w)
            y = shardops.psum('B/d +t -> B/d', shardops.sum_unreduced('B/d M/t -> B/d +t', terms))
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
def test_the_gradient_of_a_replicated_weight_is_right(name):
    """It equals the gradient of the unsharded program."""
    weight, reduce = REPLICATED[name]
    w = np.linspace(-1, 1, 8, dtype=np.float32) if weight.spec.dims else np.float32(0.5)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    with jax.set_mesh(make_mesh(dict(d=4, t=2))):
        ours = jax.jit(typed_shard_map(gradient_program(weight, reduce)))(w, x)
    truth = jax.grad(lambda w: jnp.sum(jnp.sum(x * jnp.broadcast_to(w, x.shape), axis=1) ** 2))(w)
    np.testing.assert_allclose(ours, truth, rtol=1e-5)


LOSSES = [
    (
        lambda loss: shardops.psum('+d +t -> +t', loss),
        "the loss is the same along d: what is differentiated is the sum over all devices, so it would count once for "
        "each device along d\n  fix: return it pending, '+d +t', before any psum\n  at ",
    ),
    (lambda loss: shardops.psum('+d +t -> ', loss), "the loss is the same along d"),
    (lambda loss: loss[None], "a scalar of a float type, it is float32[1]\n  at "),
    (lambda loss: jnp.float32(1), "the loss is the same along d"),
]


@pytest.mark.parametrize("finish, message", LOSSES, ids=["summed over d", "summed over both", "no scalar", "constant"])
def test_a_loss_that_is_not_pending_is_refused(finish, message):
    """A loss that is summed over devices, or the same along an axis, would be counted several times: refused, with the
    line of value_and_grad."""
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
    """sum_over_chunks' value and gradients are jax.grad's of the same loss on whole arrays."""
    program = chunked(lambda loss: loss)
    prove_everywhere(program, OF_D_AND_T)
    random = np.random.default_rng(1)
    w, x, y = (random.normal(size=shape).astype(np.float32) for shape in ((8, 4), (3, 8, 4), (3, 8)))

    def whole(w, x):
        return 3 * jnp.sum(y * jax.nn.logsumexp(jnp.einsum("cbm,vm->cbv", x, w), axis=-1))

    expected = whole(w, x), *jax.grad(whole, (0, 1))(w, x)
    with jax.set_mesh(make_mesh(dict(d=4, t=2))):
        for ours, theirs in zip(jax.jit(typed_shard_map(program))(w, x, y), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


def test_a_chunks_loss_that_is_not_pending_is_refused():
    """A chunk's loss that is summed over devices would be counted once for each of them: refused."""
    program = chunked(lambda loss: shardops.psum('+d +t -> ', loss))
    text = refused_everywhere(program)
    assert "'+d +t' says pending along d, but the value is already the same along d" in text
    assert "against the result of chunk_loss" in text


def test_the_check_and_the_run_share_no_cached_trace():
    """A jitted helper with value_and_grad inside, which the check traces with stand-ins for gradients, gives true
    gradients in the run."""

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


def test_vjp_gives_each_gradient_its_type():
    """shardops.vjp equals jax.vjp of the whole program; a cotangent of another type than the result's dual is
    refused."""

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
    with jax.set_mesh(make_mesh(dict(d=4, t=2))):
        for ours, theirs in zip(jax.jit(typed_shard_map(program))(*given), truth, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    text = refused_everywhere(wrong)
    assert "the cotangent of result 0 is the same along t, but must be pending" in text
    assert "  at " in text and text.endswith(" in shardops.vjp")


# -- Meshes ------------------------------------------------------------------------------------------------------------
def test_an_abstract_mesh_of_4096_devices():
    """The check needs no devices, and takes no longer for more of them."""

    def program(x: f32['B/d M/t'], w: f32['M/d/t']) -> f32['B/d']:
        return shardops.psum('B/d +t -> B/d', shardops.einsum_unreduced('B/d M/t, M/t -> B/d +t', x, _over_d(w)))

    def _over_d(w):
        return shardops.slice('M -> M/t', shardops.all_gather('M/d/t -> M', w))

    mesh = jax.sharding.AbstractMesh((512, 8), ("d", "t"))
    shape = jax.ShapeDtypeStruct
    started = time.process_time()
    assert typed_shard_map(program).check(mesh, shape((1024, 8192), jnp.float32), shape((8192,), jnp.float32)) >= 5
    assert time.process_time() - started < 5


def twice(x: f32['M/d']) -> f32['M/d']:
    return 2 * x


@pytest.mark.parametrize("kind", ["auto", "explicit", "legacy"])
@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_kinds_of_mesh(kind):
    """Meshes with Auto and with Explicit axes, and the older `with Mesh(...)`, run and check the same, and read arrays
    that are not placed yet."""
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
        # The first device's term: what the check is for.
        assert jax.jit(typed_shard_map(unreduced, check=False))(x) == 1
