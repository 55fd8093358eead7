"""The check: what it knows after a reshape, its own traces, kinds of mesh. Programs that it refuses stand in
test_refused.py, programs that it accepts in right_programs.py."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.places import is_users
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
        given, made = ([SimpleNamespace(aval=SimpleNamespace(shape=tuple(dims)))] for dims in sizes)
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
        ((4, (6, d)), ((24, d),), "'reshape' merges into .* split over d"),
        (((24, d),), (4, (6, d)), "'reshape' makes a minor dim .* split over d"),
        (((4, d), 6), (6, (4, d)), "'reshape' makes a minor dim .* split over d"),
    ]:
        with pytest.raises(ShardingError, match=text):
            after(before, shape)


# -- Traces ------------------------------------------------------------------------------------------------------------
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

    def total(x: f32['M/d']) -> f32['']:
        ones = jnp.ones((2, 1, 1))  # of ragged_dot JAX does not know how its result lies under Explicit axes
        pending = shardops.sum_unreduced('M/d -> +d', x)
        return shardops.psum('+d -> ', lax.ragged_dot(pending[None, None], ones, jnp.array([1, 0]))[0, 0])

    def nested(x: f32['M/d']) -> f32['M/d']:
        return typed_shard_map(twice)(x)

    with context:
        np.testing.assert_array_equal(jax.jit(typed_shard_map(twice))(x), 2 * x)
        placed = jax.device_put(x, make_shardings(f32['M/d']))
        np.testing.assert_array_equal(jax.jit(typed_shard_map(twice))(placed), 2 * x)
        np.testing.assert_array_equal(typed_shard_map(twice)(placed), 2 * x)
        with pytest.raises(ShardingError, match="still a sum over d"):
            jax.jit(typed_shard_map(unreduced))(x)
        assert jax.jit(typed_shard_map(total))(x) == 28
        with pytest.raises(ShardingError, match=r"twice is mapped over the mesh, .*\n  fix"):
            jax.jit(typed_shard_map(nested))(x)
        # The first device's term: what the check is for.
        assert jax.jit(typed_shard_map(unreduced, check=False))(x) == 1


def test_a_package_is_no_part_of_the_program_wherever_it_lies(tmp_path):
    """A package that pip has installed with --target is known by what lies beside its folder."""
    (tmp_path / "einops").mkdir()
    assert is_users(str(tmp_path / "einops" / "einops.py"))
    (tmp_path / "there" / "einops-1.0.dist-info").mkdir(parents=True)
    assert not is_users(str(tmp_path / "there" / "einops" / "einops.py"))
    assert is_users(str(tmp_path / "train.py"))
