"""The stages of a pipeline: axis p of train_any.py, over which the layers of a decoder family are dealt out.

    python -m train_any --config-name=any_pipeline                                       # four stages
    python -m train_any --config-name=any_pipeline mesh='{p: 2, d: 2, t: 2}' training.pieces=2        # interleaved

All devices run one program in lockstep: in a tick each stage computes a piece of its layers forward for one microbatch
and a piece backward for another (`pipelined`, 1F1B). Checkpoints know no stages. docs/at_scale.md says when to use it.

Legend as in train.py and models/mesh.py, and
    v pieces of a stage (training.pieces), n layers of a piece, N microbatches.
'p/p' is a dim with one element a stage; `shardops.each` runs a function on each stage, whose arrays lack that dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import models.mesh  # noqa: F401  it declares the group b
from jax_extra import explicit_activation_checkpointing
from shardlib import shardops
from shardlib.shardtypes import bool_, f32, pytree_dataclass, u32
from shardlib.typed import typed
from train import act


@pytree_dataclass
class StagedBatch:  # like WeightedBatch
    targets: u32['B/p/b L']
    is_seq_start: bool_['B/p/b L']
    is_target: bool_['B/p/b L']
    weight: f32['B/p/b L']


# == What stages have ==================================================================================================
def staged(spec: str) -> str:
    """How 'layers M/w/r/p F/t' lies on the stages: 'p/p v n M/w/r F/t'."""
    return f'p/p v n{spec.removeprefix("layers").replace("/p", "")}'


@typed
def dealt_out(at_rest: str, pieces: int, w: jax.Array) -> jax.Array:
    """Deals a stack of layers, 'layers M/w/r/p F/t', out to stages, 'p/p v n M/w/r F/t': piece i is the (i // p)th of
    stage i % p. Sends a device's part over p; nothing where that is whole on each device."""
    dims = at_rest.removeprefix('layers')
    w = jnp.moveaxis(shardops.regroup(f'layers{dims} -> v p n{dims}', w, v=pieces), 1, 0)
    if '/p' not in dims:
        return shardops.slice(f'p v n{dims} -> {staged(at_rest)}', w)
    return shardops.all_to_all(f'p v n{dims} -> {staged(at_rest)}', w)


@typed
def collected(at_rest: str, g: jax.Array) -> jax.Array:
    """The inverse of `dealt_out`."""
    dims = at_rest.removeprefix('layers')
    if '/p' in dims:
        g = shardops.all_to_all(f'{staged(at_rest)} -> p v n{dims}', g)
    else:
        g = shardops.all_gather(f'{staged(at_rest)} -> p v n{dims}', g)
    return shardops.regroup(f'v p n{dims} -> layers{dims}', jnp.moveaxis(g, 0, 1))


@typed
def stage_rows(x: jax.Array, groups: int) -> jax.Array:
    """A device's rows in groups, 'p/p groups R/b L': microbatch g·p + m is group g of the devices at (m + 1) % p."""
    rest = ' L' * (x.ndim - 1)
    return shardops.regroup(f'B/p/b{rest} -> p/p groups R/b{rest}', x, groups=groups)


@typed
def all_rows(x: jax.Array) -> jax.Array:
    """`stage_rows` of all stages, 'p groups R/b L': each stage needs them for its masks and its part of the loss."""
    rest = ' L' * (x.ndim - 3)
    return shardops.all_gather(f'p/p groups R/b{rest} -> p groups R/b{rest}', x)


def microbatch(rows: Any, number: jax.Array) -> Any:
    """The microbatch of this number, 'R/b L', taken from `all_rows`."""

    def of(array):
        p, groups = array.shape[:2]
        at = (number + 1) % p * groups + number // p
        return lax.dynamic_index_in_dim(array.reshape(p * groups, *array.shape[2:]), at, keepdims=False)

    return jax.tree.map(of, rows)


@typed
def from_last(y: act['p/p B/b L/c M/t']) -> act['B/b L/c M/t']:
    """The last stage's result on all stages. Sends 4M/t bytes a token."""
    is_last = (shardops.index('p') == int(shardops.axis_size('p')) - 1)[:, None, None, None]
    y = shardops.sum_unreduced('p/p B/b L/c M/t -> B/b L/c M/t +p', jnp.where(is_last, y, 0))
    return shardops.psum('B/b L/c M/t +p -> B/b L/c M/t', y)


# == Schedule ==========================================================================================================
@typed
def pipelined(
    stage, head, pieces, fixed, shared, stream: act['p/p groups B/b L/c M/t'], seen=None, backward: bool = True
):
    """Takes all microbatches through all stages and back: 1F1B (Narayanan et al. 2021, 2.2) in lockstep, interleaved if
    stages have several pieces.

    Stage s computes item i - s in tick i: items are pieces of microbatches, in groups of p microbatches that go round
    v times. The last stage's result goes to the head, whose gradient comes back in the same tick. Backward, a stage
    computes its piece again from the input that it kept. vp - 1 ticks are forward only, v(N - p) + p forward and
    backward, vp - 1 backward only: (p - 1) / (vN + p - 1) of all are idle.

    Args:
      stage(piece, fixed, x, number): ((y, loss), seen) of a piece and a microbatch; it does not know p. y is its
        result; loss, what it adds to the loss, '+b +c +t', or None; seen, what is to be added up, or None.
      head(shared, y, number): the loss, pending over all axes, of the last stage's y, 'p/p B/b L/c M/t'.
      pieces, fixed: the stages' weights, 'p/p v ...', and what has no gradient. shared: the head's weights.
      stream: the inputs: microbatch g·p + m is in group g, on stage (m + 1) % p. A belt brings it to stage 0.
      seen: zeros 'p/p v ...', or None.
    Returns:
      The heads' loss; the sums of seen; the gradients of pieces and shared, in float32, and of the stream.
    Kept: 2vp - 1 stage inputs of 2M/t bytes a token. A tick sends 4M/t bytes a token forward and as many backward.
    """
    p, v, groups = int(shardops.axis_size('p')), jax.tree.leaves(fixed)[0].shape[1], stream.shape[1]
    turn = v * p  # ticks that a group takes
    items, delay, slots = groups * turn, turn - 1, 2 * turn - 1
    busy = f'busy={items}:{items + p - 1}'  # for the ledger: `items` of the ticks do useful work
    index = shardops.index('p')
    move = functools.partial(shardops.ppermute, '[p/p] B/b L/c M/t -> [p/p] B/b L/c M/t')

    def place(item):
        """An item's group, its piece of the stage, and its number in the group."""
        item = jnp.clip(item, 0, items - 1)
        return item // turn, item % turn // p, item % p

    def at(tree, index):
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)

    def add(total, piece, x):
        x = lax.dynamic_index_in_dim(total, piece, keepdims=False) + x.astype(jnp.float32)
        return lax.dynamic_update_index_in_dim(total, x, piece, axis=0)

    def forward(i, index, pieces, fixed, kept, x, belt, seen):
        group, piece, number = place(i - index)
        x = jnp.where((index == 0) & (piece == 0), belt, x)
        with jax.named_scope(busy):
            (y, _), reports = stage(at(pieces, piece), at(fixed, piece), x, group * p + number)
        is_item = (i >= index) & (i - index < items)
        seen = jax.tree.map(lambda total, new: add(total, piece, jnp.where(is_item, new, 0)), seen, reports)
        return lax.dynamic_update_index_in_dim(kept, x, i % slots, axis=0), y, seen

    def back(i, index, pieces, fixed, kept, dy, belt, sums):
        item = i - delay - (p - 1) + index
        group, turned, number = place(item)
        piece = v - 1 - turned
        then = group * turn + piece * p + number + index  # the tick of its forward
        is_item = (item >= 0) & (item < items)

        # Marks recomputation, so that the ledger counts the model's products once.
        @functools.partial(explicit_activation_checkpointing, names=())
        def of_piece(weights, x):
            return stage(weights, at(fixed, piece), x, group * p + number)[0]

        with jax.named_scope(busy):
            (_, loss), pull = shardops.vjp(of_piece, at(pieces, piece), at(kept, then % slots))
            of_loss = None if loss is None else is_item.astype(jnp.float32)
            dw, dx = pull((jnp.where(is_item, dy, 0), of_loss))
        sums = jax.tree.map(lambda total, g: add(total, piece, g), sums, dw)
        return dx, jnp.where((index == 0) & (piece == 0), dx, belt), sums

    def tick(does, carry, i):
        (y, belt, kept, seen), (dx, back_belt, sums), (loss, of_shared, of_stream) = carry
        if 'forward' in does:
            with jax.named_scope('forward'):
                column = lax.dynamic_index_in_dim(stream, jnp.minimum(i // turn, groups - 1), axis=1, keepdims=False)
                x, belt = move(y, 1), move(jnp.where(i % turn == 0, column, belt), -1)
                args = index, pieces, fixed, kept, x, belt, seen
                kept, y, seen = shardops.each('p', functools.partial(forward, i), *args)
        if 'backward' in does:
            with jax.named_scope('backward'):
                dy, back_belt = move(dx, -1), move(back_belt, -1)
        if 'head' in does:
            group, _, number = place(i - (p - 1))
            of_microbatch = functools.partial(head, number=group * p + number)
            if 'backward' in does:
                value, (dw, last) = shardops.value_and_grad(of_microbatch, (0, 1))(shared, y)
                of_shared = jax.tree.map(jnp.add, of_shared, dw)
                dy = jnp.where((index == p - 1)[:, None, None, None], last, dy)
            else:
                value = of_microbatch(shared, y)
            loss = loss + value
        if 'backward' in does:
            with jax.named_scope('backward'):
                args = index, pieces, fixed, kept, dy, back_belt, sums
                dx, back_belt, sums = shardops.each('p', functools.partial(back, i), *args)
                group, _, _ = place(i - delay - (p - 1))
                of_stream = lax.dynamic_update_index_in_dim(of_stream, back_belt, group, axis=1)
        return ((y, belt, kept, seen), (dx, back_belt, sums), (loss, of_shared, of_stream)), None

    def ticks(carry, first, count, *does):
        return lax.scan(functools.partial(tick, does), carry, first + jnp.arange(count))[0]

    def round_of_a_group(carry, first):
        carry = ticks(carry, first, turn - p, *both)
        return ticks(carry, first + turn - p, p, *both, 'head'), None

    both = ('forward', 'backward') if backward else ('forward',)
    x = jnp.zeros_like(lax.dynamic_index_in_dim(stream, 0, axis=1, keepdims=False))
    kept = shardops.zeros('p/p slots B/b L/c M/t', act, slots=slots)
    floats = functools.partial(jnp.zeros_like, dtype=jnp.float32)
    sums = (jax.tree.map(floats, pieces), jax.tree.map(floats, shared)) if backward else (None, None)
    of_stream = shardops.zeros('p/p groups B/b L/c M/t', act)
    carry = (x, x, kept, seen), (x, x, sums[0]), (jnp.float32(0), sums[1], of_stream)
    carry = ticks(carry, 0, delay, 'forward')
    if v == 1:
        carry = ticks(carry, delay, items, *both, 'head')
    else:  # in p ticks of each turn the last stage finishes microbatches
        carry = ticks(carry, delay, p, *both, 'head')
        carry, _ = lax.scan(round_of_a_group, carry, delay + p + turn * jnp.arange(groups - 1))
    if backward:
        carry = ticks(carry, items + p - 1, delay, 'backward')
    (_, _, _, seen), (_, _, of_pieces), (loss, of_shared, of_stream) = carry
    return loss, seen, of_pieces, of_shared, of_stream
