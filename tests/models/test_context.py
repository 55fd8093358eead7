"""models/context.py and models/experts.py by themselves: the check accepts them and refuses every mutant."""

import types

import jax
import jax.numpy as jnp
from mutation import proofs
from pages import module_of

from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, i32
from train import act

MESH = jax.sharding.AbstractMesh((1, 2, 2, 2, 2), tuple("rdcet"))
Q, K = "B/b L/c Q K/t D", "B/b S/c K/t D"


def check_context(path, source):
    """Each way of attention and its gradient, as written out and in blocks; returns the claims."""
    context, act.dtype = module_of(path, source), jnp.bfloat16
    q, k = [jax.ShapeDtypeStruct(shape, act.dtype) for shape in ((8, 32, 2, 8, 8), (8, 32, 8, 8))]
    segment = jax.ShapeDtypeStruct((8, 32), jnp.int32)

    def program(way, by):
        def step(q: act[Q], k: act[K], v: act[K], segment: i32["B/b L"]) -> tuple[act[Q], act[K], act[K]]:
            rows = context.Rows(context.Context(2, way), segment)

            def loss(q, k, v):
                o = rows.attention(by, q, k, v, window=9, cap=30.0)
                return shardops.sum_unreduced(f"{Q} -> +b +c +t", o.astype(jnp.float32) ** 2)

            return tuple(shardops.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)[1])

        return step

    ways = [("deal", "einsum"), ("deal", "blockwise"), ("gather", "einsum"), ("gather", "blockwise"), ("ring", "auto")]
    return sum(typed_shard_map(program(*way)).check(MESH, q, k, k, segment) for way in ways)


def check_experts(path, source):
    """Checks both ways of a mixture and their gradients, with the residual as in training and as in decoding."""
    experts, act.dtype = module_of(path, source), jnp.bfloat16
    x, router = jax.ShapeDtypeStruct((8, 32, 16), act.dtype), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    matrix = jax.ShapeDtypeStruct((8, 16, 24), act.dtype)
    E = act["E/e M H/t"]

    def program(capacity, M):
        model = types.SimpleNamespace(experts=8, experts_per_token=2, weights_add_to_one=True, capacity=capacity)
        model.capacity_parts = 4

        def step(
            x: act["B/b L/c M"], router: f32["M E"], a: E, b: E, c: E
        ) -> tuple[act["B/b L/c M"], f32["M E"], E, E, E]:
            def loss(x, router, *matrices):
                y, routing = experts.mixture(model, x, router, matrices, M)
                y = shardops.slice("B/b L/c M -> B/b L/c M/t", y) if M == "M" else y
                others = shardops.sum_unreduced("n +b +c -> +b +c", jnp.stack([routing.balance, routing.z]))
                y = shardops.sum_unreduced("B/b L/c M/t -> +b +c +t", y.astype(jnp.float32) ** 2)
                return y + shardops.pending("+b +c -> +b +c +t", others)

            gradient = shardops.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))(x, router, a, b, c)[1]
            of_matrices = [shardops.psum("E/e M H/t +g +c -> E/e M H/t", derivative) for derivative in gradient[2:]]
            of_x = shardops.psum("B/b L/c M +t -> B/b L/c M", gradient[0])
            return of_x, shardops.psum("M E +b +c +t -> M E", gradient[1]), *of_matrices

        return step

    cases = [(None, "M/t"), (1.25, "M/t"), (None, "M"), (1.25, "M")]
    return sum(typed_shard_map(program(*case)).check(MESH, x, router, *[matrix] * 3) for case in cases)


CONTEXT, EXPERTS = "models/context.py", "models/experts.py"
test_context_is_accepted, test_every_mutant_of_context_is_refused = proofs(
    {CONTEXT: (check_context, 100, 25)}, [CONTEXT], ("b", "c", "h", "t"), r"(context|test_context)\.py"
)
test_experts_are_accepted, test_every_mutant_of_experts_is_refused = proofs(
    {EXPERTS: (check_experts, 100, 40)}, [EXPERTS], ("b", "g", "c", "e", "t"), r"(experts|test_context)\.py"
)
