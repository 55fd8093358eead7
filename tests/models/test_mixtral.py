"""models/mixtral.py: what it drops with a capacity, and the check of all that it sends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from mutation import proofs
from published import FOLDER, batch_of, check_family, decoded, loss_and_logits, on_mesh, oracle_of, weights_of

from ledger.count.costs import count
from ledger.count.program import read
from models import experts, huggingface, mixtral
from runtime.terminal import RunError
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, i32
from train import act

Expert = act["E/e M H/t"]


# -- Capacity ----------------------------------------------------------------------------------------------------------
def reference(x, weight, choice, w_gate, w_up, w_down, C):
    """Expert by expert and token by token; an expert takes the first C tokens that chose it, of each of six parts of a
    row."""
    x, weight, choice = (array.reshape(48, 4, -1) for array in (x, weight, choice))
    y = np.zeros_like(x)
    for row in range(x.shape[0]):
        taken = [0] * len(w_gate)
        for token, chosen in enumerate(choice[row]):
            for which, expert in enumerate(chosen):
                taken[expert] += 1
                if taken[expert] <= C:
                    gate, up = x[row, token] @ w_gate[expert], x[row, token] @ w_up[expert]
                    hidden = gate / (1 + np.exp(-gate)) * up
                    y[row, token] += weight[row, token, which] * (hidden @ w_down[expert].T)
    return y.reshape(8, 24, 8)


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize(("capacity", "C"), [(None, 4), (2.0, 4), (0.75, 2), (0.01, 1)])
@pytest.mark.parametrize("mesh", [(2, 1, 3), *small.slow((1, 1, 1), (2, 2, 1), (8, 1, 1))], ids=str)
def test_experts_take_as_many_tokens_of_a_row_as_they_have_slots(mesh, capacity, C):
    """Results are numpy's on every mesh, with c = 3 too: without a capacity, or with one of E/X, no token is dropped;
    else the last of each part of a row are."""
    model = mixtral.Model(
        **dict.fromkeys(("d_model", "n_q_per_kv", "n_kv", "d_head", "layers", "vocab"), 8), d_ff=12, experts=8,
        experts_per_token=4, capacity=capacity, capacity_parts=6, rope_max_timescale=100.0,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    x, router = rng.normal(size=(8, 24, 8)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    matrices = rng.normal(size=(3, 8, 8, 12)).astype(np.float32) / 3

    def forward(
        x: act["B/b L/c M"], router: f32["M E"], w_gate: Expert, w_up: Expert, w_down: Expert
    ) -> tuple[act["B/b L/c M"], act["B/b L/c X"], i32["B/b L/c X"]]:
        (weight, choice), _ = experts.route(model, x, router)
        return experts.mixture(model, x, router, (w_gate, w_up, w_down), "M")[0], weight, choice

    with on_mesh(*mesh[:2], c=mesh[2]):
        y, weight, choice = jax.jit(typed_shard_map(forward))(x, router, *matrices)
    weight, choice = np.asarray(weight), np.asarray(choice)
    np.testing.assert_allclose(weight.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_allclose(y, reference(x, weight, choice, *matrices, C), atol=1e-5, rtol=0)
    dropped = np.abs(reference(x, weight, choice, *matrices, 4) - y).max() > 0.1
    assert dropped == (C < 4)


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_no_token_depends_on_what_follows_it(capacity, pool):
    """The last token of each row is changed: logits before it keep their bits, dropped tokens included."""
    source = huggingface.open_weights(FOLDER / "olmoe", pool)
    source = dataclasses.replace(source, model=dataclasses.replace(source.model, capacity=capacity))
    oracle = oracle_of("olmoe")
    with on_mesh(2, 2):
        weights, type_ = weights_of(source, pool)
        run = jax.jit(typed_shard_map(loss_and_logits(source, type_)))
        first = np.asarray(run(weights, batch_of(oracle))[1])
        oracle["targets"][:, -2] += 1  # an input is the target before it
        second = np.asarray(run(weights, batch_of(oracle))[1])
    assert first[:, :-1].tobytes() == second[:, :-1].tobytes()
    assert (first[:, -1] != second[:, -1]).any(axis=-1).all()


@pytest.mark.parametrize("held", [8, 2], ids=["all", "a-quarter"])
@pytest.mark.parametrize("favourites", [8, 3, 1], ids=["even", "skewed", "one"])
def test_pairs_are_multiplied_with_their_experts_alone(favourites, held):
    """However the router chooses, the devices' results and gradients add up to those of lax.ragged_dot; where one
    device has all experts, XLA counts at most 1.6 times the FLOPs of the pairs' products, not 8 times."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 40, 8)).astype(np.float32), rng.random((2, 40, 3), np.float32)
    choice = rng.integers(0, favourites, (2, 40, 3)).astype(np.int32)
    matrices = tuple(rng.normal(size=(3, 8, 8, 12)).astype(np.float32) / 3)

    def by_blocks(x, weight, matrices):
        numbers, chosen = jnp.arange(8, dtype=jnp.int32), jnp.asarray(choice)
        parts = [
            experts.multiplied(
                lambda own: own, 8, 1, x, weight, chosen, numbers[i : i + held], *(w[i : i + held] for w in matrices)
            )
            for i in range(0, 8, held)
        ]
        return sum(parts)

    def by_ragged_dot(x, weight, matrices):
        order, sizes = np.argsort(choice, axis=None, kind="stable"), np.bincount(choice.ravel(), minlength=8)

        def product(x, w):
            return jax.lax.ragged_dot(x, w, jnp.asarray(sizes, jnp.int32))

        tokens = x.reshape(80, 8)[order // 3]
        hidden = jax.nn.silu(product(tokens, matrices[0])) * product(tokens, matrices[1])
        y = product(hidden, matrices[2].swapaxes(1, 2)) * weight.reshape(-1)[order][:, None]
        return jnp.zeros((80, 8)).at[order // 3].add(y).reshape(x.shape)

    def with_gradients(function):
        def loss(*arguments):
            y = function(*arguments)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))

    ours, theirs = [jax.tree.leaves(with_gradients(way)(x, weight, matrices)) for way in (by_blocks, by_ragged_dot)]
    for one, other in zip(ours, theirs, strict=True):
        assert np.linalg.norm(one - other) < 1e-6 * np.linalg.norm(other)
    if held == 8:
        flops = jax.jit(by_blocks).lower(x, weight, matrices).compile().cost_analysis()["flops"]
        assert 1 < flops / (240 * 3 * 2 * 8 * 12) < 1.6  # 1.23 for rows that fill up blocks; the rest is no product


@pytest.mark.parametrize("held", [8, 2], ids=["all", "a-quarter"])
def test_the_ledger_counts_the_pairs_that_a_device_has_on_average(held):
    """Model FLOPs are those of three products a pair; what runs is 1.25 times as many rows at most. Chunks that are
    skipped do not run."""
    x, weight = jnp.zeros((1, 400, 8)), jnp.zeros((1, 400, 2))
    choice, numbers = jnp.zeros((1, 400, 2), jnp.int32), jnp.arange(held, dtype=jnp.int32)
    function = functools.partial(experts.multiplied, lambda matrices: matrices, 8, 1)
    program = jax.make_jaxpr(function)(x, weight, choice, numbers, *jnp.zeros((3, held, 8, 12)))
    costs = count(read(program), {})
    a_pair = 3 * 2 * 8 * 12
    assert sum(row.flops * times * row.needed for row, times in costs.products.items()) == 800 * held // 8 * a_pair
    assert 800 * held // 8 * a_pair < costs.flops() <= 1.25 * 800 * held // 8 * a_pair


def test_what_no_published_architecture_has_is_named():
    """The key that differs from the nearest one, and not all of them."""
    model = mixtral.Model(**OF_EXPERTS, shared_experts=1)
    with pytest.raises(RunError, match=r"^no published architecture has model\.shared_experts = 1: "):
        mixtral.config_of(model)


# -- The check ---------------------------------------------------------------------------------------------------------
OF_EXPERTS = {**vars(small.MODEL), "experts": 8, "experts_per_token": 2, "attention": "einsum"}
VARIANTS = [
    {**OF_EXPERTS, "window": 5, "tied": True},
    {**OF_EXPERTS, "qk_norm": "all", "weights_add_to_one": False},
    {**OF_EXPERTS, "qk_norm": "head", "capacity": 1.25, "shared_experts": 2},
]

check = functools.partial(check_family, variants=VARIANTS, steps=[loss_and_logits, decoded])
test_it_is_accepted, test_every_mutant_is_refused = proofs({"models/mixtral.py": (check, 300, 40)})
