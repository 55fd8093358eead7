"""The second witness: it agrees with the programs that are right, and refuses many wrong ones by itself.

tests/prove.py asks it about each program that a test of the check accepts.
"""

import collections
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import prove
import pytest
import small
from jax import lax
from mutation import mutants
from pages import MESH_OF_RECIPE, RECIPES, module_of, recipe, steps_of_the_tutorial, train_py
from witness import Disagreement, agreed_claims

import train
from kernels.attention import KERNELS
from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, pytree_dataclass
from shardlib.typed import typed

MESH = jax.sharding.AbstractMesh((4, 2), ("d", "t"))


def claims_of(steps, mesh=MESH):
    return [agreed_claims(typed_shard_map(step, check=False), mesh, *given) for step, given in steps]


WAYS = [("einsum", "everything"), ("einsum", "inputs")] + [(kernel, "everything") for kernel in KERNELS]
QUICK = [("einsum", "inputs"), ("blockwise", "everything"), ("A new weight",)]


def quick(cases):
    """The others are slow."""
    assert set(cases) & set(QUICK)
    return [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("kernel, saved", quick(WAYS))
def test_it_agrees_with_the_steps(kernel, saved, record_property):
    """The types in train.py are those of the program that runs, backward pass included, by each policy and kernel."""
    claims = claims_of(small.steps_of(train, {"attention": kernel}, {"save_for_backward": saved}))
    record_property("summary", f"second witness, {kernel}, {saved}: agreed claims of training and validation {claims}")
    assert claims[0] > 700 and claims[1] > 200


@pytest.mark.parametrize("title", quick([(title,) for title in RECIPES]))
def test_it_agrees_with_the_recipes(title, tmp_path, record_property):
    """The types in train.py changed as a section of docs/changing.md says are those of the program that runs."""
    axes = MESH_OF_RECIPE.get(title, {"d": 4, "t": 2})
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    source = recipe(title, tmp_path)
    claims = claims_of(small.steps_of(module_of(tmp_path / "train.py", source)), mesh)
    record_property("summary", f"second witness, {title}: agreed claims of training and validation {claims}")
    assert min(claims) > 200


def test_it_agrees_with_the_tutorial(tmp_path):
    """And those of its three steps."""
    for step, given, axes in steps_of_the_tutorial(tmp_path / "tutorial.py"):
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
        assert min(claims_of([(step, given)], mesh)) > 20


@pytest.mark.slow
def test_how_many_mutants_it_refuses_by_itself(tmp_path, record_property):
    """With the check off most mutants of train.py are refused by their strings and sizes, most of the others here."""
    refused = collections.Counter()
    for index, (_name, _line, source) in enumerate(mutants(train_py())):
        (tmp_path / f"mutant_{index}").mkdir()
        module = module_of(tmp_path / f"mutant_{index}" / "train.py", source)
        try:
            claims_of(small.steps_of(module))
        except Disagreement:
            refused["by the walk"] += 1
        except (TypeError, ValueError):  # ShardingError is one; the others are JAX's, of shapes
            refused["by strings and sizes"] += 1
        else:
            refused["not"] += 1
    record_property("summary", f"second witness: mutants of train.py refused {dict(refused)}")
    assert refused["by the walk"] > 20 and refused["not"] < 10


# -- Wrong programs ----------------------------------------------------------------------------------------------------
@pytree_dataclass
class Rows:
    sums: tuple[f32['B/d'], f32['B/d']]


def in_a_tuple(x: f32['B/d F/t']) -> Rows:
    owed = shardops.sum_unreduced('B/d F/t -> B/d +t', x)
    return Rows((shardops.psum('B/d +t -> B/d', owed), owed))


@typed
def in_a_local(x: f32['B/d M']) -> f32['']:
    first: f32['2 M'] = x[:2]
    return shardops.sum_unreduced('2 M -> ', first)


def with_backward(function, backward):
    own = jax.custom_vjp(function)
    own.defvjp(lambda x: (function(x), None), lambda _, gradient: (backward(gradient),))
    return own


def gradient_program(before, reduced=lambda g: shardops.psum('M +d +t -> M', g)):
    """The gradient of a replicated weight, to which `before` is applied first."""

    def program(w: f32['M'], x: f32['B/d M/t']) -> f32['M']:
        def loss(w):
            part = shardops.slice('M -> M/t', before(w))
            y = shardops.einsum_unreduced('B/d M/t, M/t -> B/d +t', x, part)
            y = shardops.psum('B/d +t -> B/d', y)
            return shardops.pending('+d -> +d +t', shardops.sum_unreduced('B/d -> +d', y))

        return reduced(shardops.grad(loss)(w))

    return program


def a_backward_pass_that_forgets(w: f32['F/t'], x: f32['B F/t']) -> f32['F/t']:
    sum_over_t = with_backward(lambda y: shardops.psum('B +t -> B', y), lambda gradient: gradient)

    def loss(w):
        y = sum_over_t(shardops.einsum_unreduced('B F/t, F/t -> B +t', x, w))
        return shardops.pending(' -> +d +t', shardops.sum_unreduced('B -> ', y * y))

    return shardops.psum('F/t +d -> F/t', shardops.grad(loss)(w))


def a_kernel_whose_backward_pass_sends(x: f32['M/d']) -> f32['M/d']:
    kernel = with_backward(lambda x: x, lambda gradient: lax.psum(gradient, 't'))

    def loss(x):
        y = shardops.local('M/d -> M/d', kernel, x)
        return shardops.pending('+d -> +d +t', shardops.sum_unreduced('M/d -> +d', y * y))

    return shardops.psum('M/d +t -> M/d', shardops.grad(loss)(x))


@typed
def a_loss_that_counts_twice(w: f32['M'], x: f32['B/d M']) -> f32['M']:
    def loss(w: f32['M']) -> f32['+d +t']:
        return shardops.sum_unreduced('B/d M -> +d', x * w[None] ** 2)

    return shardops.psum('M +d +t -> M', shardops.grad(loss)(w))


def in_a_ref(x):
    total = jax.new_ref(ZERO)

    def add(index, nothing):
        total[...] += x[index, 0]
        return nothing

    lax.fori_loop(0, x.shape[0], add, 0)
    return total[...]


def in_a_ref_of_a_branch(x):
    total = jax.new_ref(ZERO)
    lax.cond(x[0, 0] > 0, lambda: jax.ref.addupdate(total, (), ZERO + 1), lambda: None)
    return total[...]


def device():
    return lax.axis_index('d').astype(jnp.float32)


ZERO = jnp.float32(0)
# f32['B/d M'] -> f32['']: a number that is another one on each device of d.
FROM_SPLIT = {
    "a mean of a split batch": jnp.mean,
    "a sum over another axis": lambda x: lax.psum(jnp.sum(x), 't'),
    "a carry": lambda x: lax.scan(lambda c, row: (c + row[0], None), ZERO, x)[0],
    "a carry, rounds later": lambda x: lax.fori_loop(0, 4, lambda _, c: (x[0, 0], *c[:3]), (ZERO,) * 4)[3],
    "how often a loop runs": lambda x: lax.while_loop(lambda c: c < jnp.max(x), lambda c: c + 0.1, ZERO),
    "which branch is taken": lambda x: lax.cond(x[0, 0] > 0, lambda: ZERO, lambda: ZERO + 1),
    "remat": jax.checkpoint(jnp.max),
    "custom_jvp": lambda x: jax.nn.relu(jnp.max(x)),
    "a ref": in_a_ref,
    "a ref, written in a branch": in_a_ref_of_a_branch,
}
# f32['M'] -> f32['M'], the same.
FROM_REPLICATED = {
    "a device's index": lambda x: x * (1 + device()),
    "a key of each device": lambda x: jax.random.permutation(jax.random.key(lax.axis_index('d')), x),
    "composite": lax.composite(lambda x: x * (1 + device()), name="tests.composite"),
    "linear_solve": lambda x: lax.custom_linear_solve(lambda v: v * (1 + device()), x, lambda _, b: b / (1 + device())),
    "a callback": lambda x: x * jax.pure_callback(lambda i: 1 + i, jax.ShapeDtypeStruct((), jnp.float32), device()),
}


def of(annotation, result, function):
    def program(x: annotation) -> result:
        return function(x)

    return program


REPLICATED, SPLIT = f32['M'], f32['B/d M']
OVER_D, OVER_T = (f"devices along {axis} may hold different values" for axis in "dt")
TWICE = "a sum over t of what is the same counts it once for each device"
WRONG = {
    **{name: (of(SPLIT, f32[''], function), OVER_D) for name, function in FROM_SPLIT.items()},
    **{name: (of(REPLICATED, REPLICATED, function), OVER_D) for name, function in FROM_REPLICATED.items()},
    "a field of a tuple": (in_a_tuple, OVER_T),
    "a local": (in_a_local, f"'2 M' of local first at {__file__}:"),
    "a gradient without its psum": (gradient_program(lambda w: w, lambda g: g), OVER_D),
    "a gradient with half of its psum": (gradient_program(lambda w: w, lambda g: lax.psum(g, 't')), OVER_D),
    "a gradient summed twice": (gradient_program(lambda w: w, lambda g: lax.psum(lax.psum(g, ('d', 't')), 't')), TWICE),
    "a backward pass that sends": (gradient_program(with_backward(lambda w: w, lambda g: lax.psum(g, 't'))), TWICE),
    "a backward pass that forgets": (
        a_backward_pass_that_forgets,
        "the gradient of 'B +t' of the result of shardops.einsum",
    ),
    "a kernel's backward pass that sends": (
        a_kernel_whose_backward_pass_sends,
        "the gradient of 'M/d' of shardops.local",
    ),
    "a loss that is the same along t": (a_loss_that_counts_twice, "'+d +t' of the result of loss"),
    "a sum taken twice": (of(SPLIT, f32[''], lambda x: lax.psum(lax.psum(jnp.sum(x), ('d', 't')), 't')), TWICE),
    "a sum of a replicated weight": (of(REPLICATED, REPLICATED, lambda w: lax.psum(w, 't')), TWICE),
    "a scatter of it": (of(REPLICATED, f32['M/t'], lambda w: lax.psum_scatter(w, 't', tiled=True)), TWICE),
}


def differ(leaf):
    """Whether devices that should hold the same part of an array do not."""
    parts = {}
    for shard in leaf.addressable_shards:
        parts.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return any((part != held[0]).any() for held in parts.values() for part in held)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_refused(name):
    """A program in which devices differ where its types say the same, or whose result one device does not give."""
    program, message = WRONG[name]
    shapes = [prove.abstract(each.annotation) for each in inspect.signature(program).parameters.values()]
    mapped = typed_shard_map(program, check=False)
    with pytest.raises(Disagreement) as refused:
        agreed_claims(mapped, MESH, *shapes)
    assert message in str(refused.value)
    random = np.random.default_rng(0)
    values = [random.normal(size=shape.shape).astype(np.float32) for shape in shapes]
    results = []
    for mesh in ({"d": 4, "t": 2}, {"d": 1, "t": 1}):
        with jax.set_mesh(make_mesh(mesh, devices=jax.devices()[: mesh["d"] * mesh["t"]])):
            results.append(jax.tree.leaves(jax.jit(typed_shard_map(program, check=False))(*values)))
    many, one = results
    assert any(map(differ, many)) or any(not np.allclose(a, b, rtol=1e-4) for a, b in zip(many, one, strict=True))


HANG = {
    "in a branch": lambda x: lax.cond(x[0] > 0, lambda: lax.psum(x, 'd'), lambda: x),
    "in a loop": lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: lax.pmax(c + 1, 'd'), x),
    "in what a loop goes on by": lambda x: lax.while_loop(lambda c: c[0] < lax.pmax(c[0], 'd'), lambda c: c + 1, x),
    "in a jit in a branch": lambda x: lax.cond(x[0] > 0, jax.jit(lambda c: lax.pmax(c, 'd')), lambda c: c, x),
}


@pytest.mark.parametrize("name", HANG)
def test_a_transfer_that_not_all_devices_reach_is_refused(name):
    """A transfer under a branch or in a loop that differs along its axis, where some devices would wait for ever."""
    program = typed_shard_map(of(f32['B/d'], f32['B/d'], HANG[name]), check=False)
    with pytest.raises(Disagreement, match="under a branch or a loop that may differ along d"):
        agreed_claims(program, MESH, prove.abstract(f32['B/d']))


def test_a_branch_that_all_devices_take_may_send():
    """By a decision that is the same, or that differs along another axis than the transfer's."""

    def program(x: f32['B/d M/t'], go: f32['']) -> tuple[f32['M/t'], f32['B/d']]:
        columns = lax.cond(go > 0, lambda: lax.psum(jnp.sum(x, axis=0), 'd'), lambda: jnp.zeros(x.shape[1]))
        rows = lax.psum(jnp.sum(x, axis=1), 't')
        return columns, lax.cond(rows[0] > 0, lambda: lax.psum(jnp.sum(x, axis=1), 't'), lambda: rows)

    shapes = [prove.abstract(annotation) for annotation in (f32['B/d M/t'], f32[''])]
    assert agreed_claims(typed_shard_map(program, check=False), MESH, *shapes) > 0


def test_a_gradient_that_is_the_same_may_be_a_term():
    """A bias of which only the mean is used gets the same gradient from each device's rows, a term: it is accepted."""

    def program(bias: f32['M'], x: f32['B/d M']) -> f32['M']:
        def loss(bias):
            mean = shardops.psum('M +d -> M', shardops.sum_unreduced('B/d M -> M +d', x + bias[None])) / 16
            return shardops.pending(' -> +d +t', shardops.sum_unreduced('M -> ', mean**2))

        return shardops.psum('M +d +t -> M', shardops.grad(loss)(bias))

    prove.prove_everywhere(program, prove.OF_D_AND_T)
