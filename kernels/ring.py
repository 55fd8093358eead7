"""Ring attention to a split sequence: an operation of the notation like those of `shardops`."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib import places
from shardlib.shardops import SAVED, Plan, operate, require_local, require_result, require_same_parts
from shardlib.spec import ShardingError

places.defines_operations(__file__)


def ring(spec: str | bytes, forward, backward, *operands):
    """Attention to blocks that go round: what has a dim in [ ] is passed on along that dim's axis until each device has
    had every block; the other operands stay, and the result lies as the first of them.

        ring('B/d L/c K/t D, B/d [S/c] K/t D, B/d [S/c] K/t D, L/c, [S/c] -> B/d L/c K/t D', forward, backward,
             q, k, v, position, key_position)

    Both functions are local to a device and see one block of what goes round, the device's own one first:

        forward(*operands) -> o, log_sum_exp                            of the logits with this block alone
        backward(*operands, o, log_sum_exp, gradient) -> gradients      of the operands that are floats

    in float32, log_sum_exp of o's shape without its last dim. Blocks are put together as parts of one softmax, and
    `backward` gets the o and log_sum_exp of all of them (Dao et al. 2022, algorithms 1 and 4; the ring is that of Liu
    et al. 2023). Kept for the backward pass, under the name of save_for_backward: o and its log-sum-exp; nothing of a
    turn.
    Proved: as of `local`. Sends: of what goes round, x bytes, (n - 1) x; backward that again, and n times the gradients
    of its floats in float32, each while a block is multiplied.
    """
    return operate(_ring, spec, operands, dict(forward=forward, backward=backward))


def _ring(recipe, axes):
    goes, axis = _going_round(recipe)
    turns = axes[axis]

    def run(*operands, forward, backward):
        floats = [jnp.issubdtype(operand.dtype, jnp.inexact) for operand in operands]
        of_floats = [moves for moves, is_float in zip(goes, floats) if is_float]

        def parted(values, goes):
            return [[value for value, moves in zip(values, goes) if moves is wanted] for wanted in (False, True)]

        def joined(stay, moving):
            stay, moving = iter(stay), iter(moving)
            return [next(moving if moves else stay) for moves in goes]

        def turned(values):
            pairs = [(index, (index + 1) % turns) for index in range(turns)]
            return [lax.ppermute(value, axis, pairs) for value in values]

        def keep(*operands):
            stay, moving = parted(lax.optimization_barrier(operands), goes)  # else a loop over layers is left by some

            def turn(carry, _):
                moving, (o, largest) = carry
                coming = turned(moving) if turns > 1 else moving  # sent while this block is multiplied
                more, other = forward(*joined(stay, moving))
                both = jnp.logaddexp(largest, other)
                o = o * jnp.exp(largest - both)[..., None] + more * jnp.exp(other - both)[..., None]
                return (coming, (o, both)), None

            first = operands[0]
            carry = moving, (jnp.zeros(first.shape, jnp.float32), jnp.full(first.shape[:-1], -1e30, jnp.float32))
            if turns > 1:
                carry, _ = lax.scan(turn, carry, None, length=turns - 1)
            (_, (o, log_sum_exp)), _ = turn(carry, None)  # the last block is passed on to nobody
            o, log_sum_exp = (checkpoint_name(x, SAVED) for x in (o.astype(first.dtype), log_sum_exp))
            return o, (operands, o, log_sum_exp)

        def give_back(kept, gradient):
            operands, *result = kept
            stay, moving = parted(lax.optimization_barrier(operands), goes)

            def of_pair(moving):
                return parted(backward(*joined(stay, moving), *result, gradient), of_floats)

            def turn(carry, _):
                moving, (of_stay, of_moving) = carry
                coming, passed = turned(moving), turned(of_moving)  # a block's gradients come a turn after the block
                more, of_pass = of_pair(moving)
                return (coming, jax.tree.map(jnp.add, (of_stay, passed), (more, of_pass))), None

            sums = tuple(of_pair(moving))
            if turns > 1:
                carry = turned(moving), sums
                if turns > 2:
                    carry, _ = lax.scan(turn, carry, None, length=turns - 2)
                (_, (of_stay, of_moving)), _ = turn(carry, None)
                sums = of_stay, turned(of_moving)
            of_stay, of_moving = map(iter, sums)
            return tuple(
                next(of_moving if moves else of_stay).astype(operand.dtype) if is_float else None
                for operand, moves, is_float in zip(operands, goes, floats)
            )

        attend = jax.custom_vjp(lambda *operands: keep(*operands)[0])
        attend.defvjp(keep, give_back)
        return attend(*operands)

    require_local(recipe, axes)
    return Plan(run, moves=(axis,), needs_all=True, calls=True)


def _going_round(recipe) -> tuple[list[bool], str]:
    """For each operand whether it rotates, and the axis of the ring. Raises if that is no attention to blocks."""
    first, *_ = recipe.operands
    marked = [[dim for dim in operand.dims if dim.indexed] for operand in recipe.operands]
    dims = {dim for marks in marked for dim in marks}
    if len(dims) != 1 or max(map(len, marked)) > 1 or len(dims.pop().axes) != 1:
        raise ShardingError("what goes round has one dim in [ ], split over an axis, the same in all: '[S/c] K/t D'")
    (axis,) = next(dim for marks in marked for dim in marks).axes
    if marked[0] or axis not in first.split:
        raise ShardingError(f"the first operand stays, is split over {axis}, and the result lies as it does")
    require_result(recipe, first.dims, first.pending)
    require_same_parts(recipe)
    if any(operand.pending for operand in recipe.operands):
        raise ShardingError("an operand is pending, and a softmax is not linear: reduce it first")
    return [bool(dims) for dims in marked], axis
