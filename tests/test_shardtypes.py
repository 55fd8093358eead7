"""Types of arrays and trees, typed_shard_map's own errors, checks outside of shard_map, programs as published."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import prove
import pytest
import typeguard
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parts import assert_refuses, says

import jax_extra
from shardlib import shardops, shardtypes
from shardlib.mesh import current_mesh, make_mesh
from shardlib.products import Adapted
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import (
    Array,
    ComputeType,
    bf16,
    bool_,
    check,
    f32,
    i8,
    i32,
    is_fully_sharded,
    make_partition_specs,
    make_shardings,
    narrowed,
    pytree_dataclass,
    register_with_typeguard,
    u8,
    u32,
)  # fmt: skip
from shardlib.spec import ShardingError
from shardlib.typed import typed

MESH = dict(d=4, t=2)
register_with_typeguard()


# -- A program in the published style: bytes, typeguard, Array[b'layers', Layer] ---------------------------------------
@pytree_dataclass
class Layer:
    w_up: f32[b'M/d F/t']
    w_down: f32[b'F/t M/d']


@pytree_dataclass
class Weights:
    embed: f32[b'V/t M/d']
    layers: Array[b'layers', Layer]
    norm: f32[b'M/d/t']
    bias: f32[b'']


@typeguard.typechecked
def block(x: bf16[b'B/d L M'], w_up: bf16[b'M F/t'], w_down: bf16[b'F/t M']) -> bf16[b'B/d L M']:
    h: bf16[b'B/d L F/t'] = jax.nn.relu(shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', x, w_up))
    y = shardops.einsum_unreduced('B/d L F/t, F/t M -> B/d L M +t', h, w_down)
    return x + shardops.all_gather('B/d L M/t -> B/d L M', shardops.psum_scatter('B/d L M +t -> B/d L M/t', y))


def loss(w, ids):
    embed = shardops.all_gather('V/t M/d -> V/t M', w.embed, dtype=bf16)
    x = shardops.psum('B/d L M +t -> B/d L M', shardops.index_unreduced('[V/t] M, B/d L -> B/d L M +t', embed, ids))

    @jax_extra.explicit_activation_checkpointing
    @typeguard.typechecked
    def body(x: bf16[b'B/d L M'], layer: Layer) -> tuple[bf16[b'B/d L M'], tuple[()]]:
        w_up = shardops.all_gather('M/d F/t -> M F/t', layer.w_up.astype(jnp.bfloat16))
        w_down = shardops.all_gather('F/t M/d -> F/t M', layer.w_down.astype(jnp.bfloat16))
        return jax_extra.save_for_backward(block(x, w_up, w_down)), ()

    x, () = lax.scan(body, x, w.layers)
    x = x.astype(jnp.float32) * shardops.all_gather('M/d/t -> M', w.norm)[None, None] + w.bias
    part = shardops.slice('B/d L M -> B/d L M/t', x)
    return shardops.sum_unreduced('B/d L M/t -> +d +t', part * part) / 1e5


def weights():
    random = np.random.default_rng(0)

    def draw(*shape):
        return random.normal(size=shape).astype(np.float32)

    return Weights(
        embed=draw(8, 16), layers=Layer(w_up=draw(2, 16, 8), w_down=draw(2, 8, 16)), norm=draw(16), bias=np.float32(3)
    )


def test_specs_and_shardings():
    """make_partition_specs, make_shardings and is_fully_sharded, leading dims included."""
    specs = make_partition_specs(Weights)
    assert specs == Weights(
        embed=P('t', 'd'), layers=Layer(w_up=P(None, 'd', 't'), w_down=P(None, 't', 'd')), norm=P(('d', 't')), bias=P()
    )
    with jax.set_mesh(make_mesh(MESH)):
        assert make_shardings(Weights).layers.w_up == NamedSharding(current_mesh(), P(None, 'd', 't'))
        fully = jax.tree.map(is_fully_sharded, specs, is_leaf=lambda x: isinstance(x, P))
        assert fully == Weights(embed=True, layers=Layer(w_up=True, w_down=True), norm=True, bias=False)
        assert is_fully_sharded(f32['M/d/t']) and not is_fully_sharded(P('d')) and not is_fully_sharded(P())
    with pytest.raises(ShardingError, match="make_shardings needs a mesh: call it under"):
        make_shardings(Weights)
    with pytest.raises(ShardingError, match="is_fully_sharded needs a mesh: call it under"):
        is_fully_sharded(P())
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("t", "e"))),
        pytest.raises(ShardingError, match="names mesh axis d, but the mesh has t, e"),
    ):
        make_shardings(Weights)


@pytree_dataclass
class Biased:
    w: f32['M/d F/t']
    b: f32['F/d/t'] | None = None


@pytest.mark.parametrize("b", [None, np.ones((2, 8), np.float32)], ids=["absent", "there"])
def test_a_field_that_may_be_absent(b):
    """`narrowed` is the type of a tree, None where it has none; as such it maps a function, in and out, and its
    shardings are made. A tree that has the field where the type has not, or the other way round, is refused."""
    tree = Biased(np.ones((2, 16, 8), np.float32), b)
    other = Biased(tree.w, np.ones((2, 8), np.float32) if b is None else None)
    Type = narrowed(Array['layers', Biased], tree)
    assert Type.w == f32['layers M/d F/t'] and Type.b == (None if b is None else f32['layers F/d/t'])

    @typed
    def added(w: Biased) -> f32['M/d F/t']:
        if w.b is None:
            return w.w
        return w.w + shardops.slice('F -> F/t', shardops.all_gather('F/d/t -> F', w.b))[None]

    def doubled(tree: Type) -> tuple[Type, f32['M/d F/t']]:
        total, _ = lax.scan(lambda x, w: (x + added(w), None), shardops.zeros('M/d F/t', f32, M=16, F=8), tree)
        return jax.tree.map(lambda x: 2 * x, tree), total

    with jax.set_mesh(make_mesh(MESH)):
        assert make_shardings(Type).w.spec == P(None, 'd', 't')
        twice, total = jax.jit(typed_shard_map(doubled))(jax.device_put(tree, make_shardings(Type)))
        with pytest.raises(ShardingError, match="against argument tree of doubled"):
            typed_shard_map(doubled)(other)
    assert jax.tree.structure(twice) == jax.tree.structure(tree) and (twice.w == 2).all()
    assert (total == (2 if b is None else 4)).all()


def test_a_type_that_does_not_say_what_is_there_is_refused():
    """Where the types alone are asked for, nothing says whether an optional field is there."""
    message = "nothing says here … fix: shardtypes.narrowed("
    assert_refuses(message, make_partition_specs, Biased, error=ShardingError)


def test_a_pytree_dataclass():
    """JAX sees field names as keys; instances are frozen."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(weights())]
    assert paths == [".embed", ".layers.w_up", ".layers.w_down", ".norm", ".bias"]
    with pytest.raises(AttributeError):
        weights().bias = 4


def test_element_types():
    """Every name that published programs use, and the type with one name that is chosen at run time."""
    for element, dtype in zip(
        (f32, bf16, i32, u32, i8, u8, bool_),
        (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32, jnp.int8, jnp.uint8, jnp.bool_),
    ):
        assert element.dtype == dtype
        check(element, 'M', jnp.zeros(3, dtype))
    act = ComputeType('act', jnp.bfloat16)
    annotation = act['M']
    act.dtype = jnp.float32
    check(annotation.element, annotation.spec, jnp.zeros(3))
    with pytest.raises(TypeError, match=r"makes no arrays: use shardops\.zeros"):
        f32['M'](3)
    with pytest.raises(ShardingError, match=r"no type of sharded arrays: use f32"):
        make_partition_specs(int)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize("legacy", [False, True], ids=["set_mesh", "with Mesh"])
def test_the_published_style_runs(legacy):
    """bytes, typeguard.typechecked, Array[b'layers', ...], checkpointing and scan run as they are, the step's loss as
    on one device."""

    @typed_shard_map
    @typeguard.typechecked
    def step(w: Weights, ids: u32[b'B/d L']) -> tuple[Weights, f32[b'']]:
        value, gradient = shardops.value_and_grad(lambda w: loss(w, ids))(w)
        gradient = dataclasses.replace(gradient, bias=shardops.psum('+d +t -> ', gradient.bias))
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), shardops.psum('+d +t -> ', value)

    ids = np.random.default_rng(1).integers(0, 8, (8, 4)).astype(np.uint32)
    results = []
    for shape in [(4, 2), (1, 1)]:
        devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
        mesh = Mesh(devices, ("d", "t"))
        with mesh if legacy else jax.set_mesh(make_mesh(dict(mesh.shape), devices=devices.ravel())):
            placed = jax.device_put(weights(), make_shardings(Weights))
            results.append(jax.tree.map(np.asarray, jax.jit(step)(placed, ids)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.05, atol=0.02), *results)


def test_typeguard_refuses_with_our_text():
    """typeguard.typechecked with bytes annotations raises its TypeCheckError with the message of shardlib."""
    mesh = jax.sharding.AbstractMesh((4, 2), ("d", "t"))

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def program(x: bf16[b'B/d L M'], u: bf16[b'M F/t'], w: bf16[b'F/t N']) -> bf16[b'B/d L M']:
        return block(x, u, w)

    with pytest.raises(typeguard.TypeCheckError, match="dim M of 'F/t M'"):
        typed_shard_map(program).check(mesh, shape(8, 4, 16), shape(16, 8), shape(8, 8))


def test_jax_extra():
    """Keys by name are the same everywhere and differ by name; only named values are kept for the backward pass."""
    key = jax.random.key(0)

    def draw(name):
        return jax.random.bits(jax_extra.fold_in_str(key, name))

    assert draw("a") == draw("a") and draw("a") != draw("b")

    @jax_extra.explicit_activation_checkpointing
    def layer(x):
        return jnp.sin(jax_extra.save_for_backward(jnp.sin(jnp.sin(x))))

    np.testing.assert_allclose(
        jax.grad(lambda x: layer(x))(0.3), jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(0.3), rtol=1e-6
    )


# -- typed_shard_map ---------------------------------------------------------------------------------------------------
def program(x: f32['B/d M'], w: f32['M/d/t']) -> f32['B/d M']:
    return x


X, W = np.zeros((8, 16), np.float32), np.zeros(16, np.float32)


def no_result(x: f32['B']):
    return x


def no_argument(x) -> f32['B']:
    return x


def many(*x: f32['M']) -> f32['M']:
    return x[0]


TWO_SPLIT = "B/d M, M/d/t", "x"
# A function, or types and an expression as in tests/prove.py; the arguments; what is said.
CALLS = [
    (no_result, (W,), "needs a return annotation on no_result"),
    (no_argument, (W,), "needs an annotation on argument x of no_argument"),
    (many, (W,), "needs named arguments, many takes *x"),
    (("M", "x"), (Adapted(W, X, X, 1.0),), "argument x of program stands for a matrix"),
    (("M/x", "x"), (W,), "mesh axis x, but the mesh has d, t … argument x of program: f32['M/x'], value float32[16]"),
    (("M +t -> M", "x"), (W,), "'M +t' is pending over t … outside of shard_map … argument x of program"),
    (("M -> M +t", "x"), (W,), "outside of shard_map in the result of program, mesh d=4 × t=2 at "),
    (TWO_SPLIT, (X[:6], W), "size 6 … d=4 cannot divide … x of program: f32['B/d M'], value float32[6,"),
    (TWO_SPLIT, (X[:, :12], W[:12]), "dim M has size 12 … d=4 × t=2 cannot divide"),
    (TWO_SPLIT, (X, W[:8]), "dim M/d/t of … is 8, but M is 16 in 'B/d M' … argument y of"),
    (TWO_SPLIT, (X[0], W), "'B/d M' has 2 dims, the value has 1 … argument x of program"),
    (TWO_SPLIT, (X.astype(np.int32), W), "the element type is int32 … argument x of program"),
    (TWO_SPLIT, (X, 3.0), "an array, got float … argument y of program: f32['M/d/t'], value float"),
    (("Layer -> ''", "shardops.zeros('', f32)"), (W,), "expected Layer, got ndarray … argument x of program at "),
    (("M -> Two", "x"), (W,), "expected a tuple, got "),
    (("M", "x.astype(jnp.bfloat16)"), (W,), "the element type is bfloat16 … the result of program ("),
    (("M", "x[1:]"), (W,), "dim M of 'M' is 15, but M is 16 … the result of program ("),
]


@pytest.mark.parametrize("function, arguments, message", CALLS, ids=[message[:60] for _, _, message in CALLS])
def test_wrong_calls(function, arguments, message):
    """typed_shard_map's own errors: the same text from a call and from a check without devices."""
    if isinstance(function, tuple):
        function = prove.program(*function, {"Layer": Layer, "Two": tuple[f32['M'], f32['M']]})
    with jax.set_mesh(make_mesh(MESH)), pytest.raises(ShardingError) as called:
        typed_shard_map(function)(*arguments)
    with pytest.raises(ShardingError) as checked:
        typed_shard_map(function).check(jax.sharding.AbstractMesh((4, 2), ("d", "t")), *arguments)
    for text in (str(called.value), str(checked.value)):
        assert says(message, text), text


def test_no_mesh():
    """Without a mesh the error says how to set one."""
    with pytest.raises(ShardingError, match="typed_shard_map needs a mesh: call program under"):
        typed_shard_map(program)(X, W)


def test_results_that_are_not_as_annotated():
    """A result that is called the same and is still owed is refused, with how it lies."""
    text = prove.refusal(prove.program("M/d -> ''", "shardops.sum_unreduced('M/d -> +d', x)"))
    parts = "'' says the same along d … still a sum over d … write '+d' … lies as '+d' … the result of program ("
    assert says(parts, text)
    mesh = dict(r=1, d=2, t=2)  # axes in the mesh's order
    summed = "shardops.psum('+r -> ', shardops.sum_unreduced('M/r/d F/t -> +r +d +t', x))"
    assert says("it lies as '+r +d +t'", prove.refusal(prove.program("M/r/d F/t -> ''", summed), mesh))
    text = prove.refusal(prove.program("M/d F -> F/d M", "x.T"), dict(d=1, t=1))
    assert says("'F/d M' says F/d … whole in the value: write F", text)


def test_arguments():
    """Keywords, defaults that are left out, functools.partial and annotations as strings all find their parameter."""

    def f(x: f32['M/d'], y: f32['M/d'] = None, z: f32['M/d'] = None, *, k: f32['M'] = None) -> f32['M/d']:
        return x - (0 if y is None else y) * 2 + (0 if z is None else z) * 3

    def text(static, x: "f32['M/d']") -> "f32['M/d']":
        return x * static

    with jax.set_mesh(make_mesh(MESH)):
        one = np.ones(8, np.float32)
        np.testing.assert_array_equal(typed_shard_map(f)(one, z=one), one * 4)
        np.testing.assert_array_equal(typed_shard_map(f)(x=one, k=one), one)
        np.testing.assert_array_equal(typed_shard_map(functools.partial(text, 5))(one), one * 5)
    assert typed_shard_map(functools.partial(text, 5)).name == "text"


# -- Outside of shard_map ----------------------------------------------------------------------------------------------
def test_outside_annotations_check_the_actual_sharding():
    """An array that is on devices must lie as its type says; numpy arrays and tracers are not placed yet."""
    with jax.set_mesh(make_mesh(MESH)):
        x = jax.device_put(np.zeros((8, 16), np.float32), NamedSharding(current_mesh(), P('d', 't')))
        assert check(f32, 'B/d M/t', x) is x
        parts = "lies as … ('d', 't'), the type says … ('d', None): … jax.device_put(x, make_shardings(...)) … "
        parts += "annotation: f32['B/d M'], value float32[8, 16] globally, mesh d=4 × t=2 at "
        assert_refuses(parts, check, f32, 'B/d M', x, error=ShardingError)
        with pytest.raises(ShardingError, match=r"the array lies as"):
            shardtypes.check_tree(tuple[f32['B M'], f32['B M']], (x, x))
        with pytest.raises(ShardingError, match="size 6, which axis d=4 cannot divide"):
            check(f32, 'B/d', np.zeros(6, np.float32))
        with pytest.raises(ShardingError, match=r"'B \+d' is pending over d"):
            check(f32, 'B +d', np.zeros(8, np.float32))
        check(f32, 'B/d M', np.zeros((8, 16), np.float32))
        jax.jit(lambda x: check(f32, 'B/d M', x))(x)
        replicated = jax.device_put(np.zeros(8, np.float32), NamedSharding(current_mesh(), P()))
        check(f32, 'M', replicated)
    check(f32, 'B/d M/t', x)  # without a current mesh, the array's own
    with pytest.raises(ShardingError, match=r"the array lies as"):
        check(f32, 'B M', x)
    check(f32, 'M/t/d', np.zeros(8, np.float32))  # no mesh at all: any order of axes
