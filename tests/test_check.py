"""The check: its own traces, kinds of mesh. Programs that it refuses stand in test_refused.py, programs that it accepts
in right_programs.py."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.places import is_users
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, make_shardings
from shardlib.spec import ShardingError


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
