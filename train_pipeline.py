"""train_at_scale.py for models whose layers are dealt out to stages: a pipeline over axis p.

    python -m train_pipeline --config-name=pipeline_local                      # four stages, on eight simulated devices
    python -m train_pipeline --config-name=pipeline_local training.pieces=2 mesh.p=2 mesh.t=2      # interleaved
    python -m train_pipeline --config-name=pipeline_local check_only=true      # proves the types, without a device

All devices run one program in lockstep: in a tick each stage computes a piece of its layers forward for one microbatch
and a piece backward for another (`pipelined`, 1F1B). Checkpoints are train.py's and train_at_scale.py's, and know no
stages. docs/at_scale.md says when to use it. With p = 1, and for mixtures of experts, use train_at_scale.

Legend as in train_at_scale.py, and
    v pieces of a stage (training.pieces), n layers of a piece, N microbatches.
'p/p' is a dim of one element for each stage; `shardops.each` runs a function on each stage by itself, without it.
"""

import functools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import train
import train_at_scale as at_scale
from jax_extra import explicit_activation_checkpointing, save_for_backward
from kernels.attention import usable
from runtime.check import batch_shapes, check_sizes, report_check
from runtime.config.command_line import run
from runtime.config.keys import Count, RunConfig
from runtime.run import Run, start, with_shardings
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, bool_, f32, i32, narrowed, pytree_dataclass, u32
from shardlib.sizes import nearest_multiples
from shardlib.typed import typed
from train import act
from train_at_scale import attention_half, deals_heads, dealt, feed_forward, places_of, rms_norm, updated


# == Hyperparameters ===================================================================================================
@dataclass(frozen=True, kw_only=True)
class Mesh:  # in the order of its axes: neighbours along the last one are nearest to each other
    p: Count  # stages of the pipeline
    r: Count = 1  # as in train_at_scale.py; weights are gathered over r, d, c and e alike, once a step
    d: Count = 1
    c: Count = 1
    e: Count = 1  # as one more d
    t: Count = 1


@dataclass(frozen=True, kw_only=True)
class Training(train.Training):
    # Of each stage's layers: 1 is 1F1B; with more, interleaved, the stages wait less and send as many times more.
    pieces: Count = 1


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    CONFIG = 'pipeline_local'

    mesh: Mesh
    model: at_scale.Model
    training: Training


# == Batch and weights =================================================================================================
@pytree_dataclass
class TokenBatch:  # each device along c has the whole rows
    targets: u32['B/p/r/d/e L']
    is_seq_start: bool_['B/p/r/d/e L']
    is_target: bool_['B/p/r/d/e L']


@pytree_dataclass
class Layer:
    ln1: f32['M/d/c/e/t/r/p']
    ln2: f32['M/d/c/e/t/r/p']
    w_q: f32['M/d/c/e/r/p Q K/t D']
    w_kv: f32['2 M/d/c/e/r/p K/t D']
    w_o: f32['M/d/c/e/r/p Q K/t D']
    w_gate: f32['M/d/c/e/r/p F/t']
    w_up: f32['M/d/c/e/r/p F/t']
    w_down: f32['M/d/c/e/r/p F/t']


@pytree_dataclass
class Weights:
    embed: f32['V/t M/d/c/e/r/p']
    unembed: f32['V/t M/d/c/e/r/p']
    transformer: Array['layers', Layer]
    final_layer_norm: f32['M/d/c/e/t/r/p']


@pytree_dataclass
class State:
    weights: Weights  # float32; with the two moments 12 bytes a parameter, divided over all devices
    adam_mu: Weights
    adam_nu: Weights


def init_state(model: at_scale.Model, seed: jax.Array) -> State:
    """The first state, the same as train.py's."""

    def ours(weights) -> Weights:
        return Weights(**{**vars(weights), 'transformer': Layer(**vars(weights.transformer))})

    return State(*map(ours, vars(train.init_state(model, seed)).values()))


DECAYED = Weights(**{**vars(train.DECAYED), 'transformer': Layer(**vars(train.DECAYED.transformer))})


# == Weights of the stages =============================================================================================
def way(at_rest: str) -> tuple[str, str, str, str]:
    """How a weight lies on its way to the stages. At rest: 'p v n M/d/c/e/r/p F/t', where the layers are the pieces of
    stages. Dealt out to them: 'p/p v n M/d/c/e/r F/t'. Gathered over r; and over the other axes: 'p/p v n M F/t'."""
    at_rest = at_rest.replace('layers', 'p v n')
    dealt_out = at_rest.replace('/r/p', '/r').replace('p v n', 'p/p v n').replace('V/t', 'V/t/p')
    near = dealt_out.replace('/r', '')
    return at_rest, dealt_out, near, re.sub('M/d/c/e(/t)?', 'M', near)


@typed
def of_stages(training: Training, weights: Weights):
    """Each stage's pieces of the layers, 'p/p v n M F/t', its part of the unembedding, 'V/t/p M', and the last norm: in
    bfloat16, but for norms. Piece i of all is the (i // p)th of stage i % p.

    Sends 2 bytes for each parameter that a device has at rest over p, and 2 for each of its stage / t over r, d, c, e.
    """
    types = narrowed(Weights, weights)

    def deal(w, type_):
        at_rest, dealt_out, near, whole = way(str(type_.spec))
        is_norm = '/t/r' in at_rest
        w = w if is_norm else w.astype(act.dtype)
        w = shardops.all_to_all(f'{at_rest} -> {dealt_out}', w)
        w = shardops.all_gather(f'{dealt_out} -> {near}', w)
        return shardops.all_gather(f'{near} -> {whole}', w)

    def of_layers(w, type_):
        lies = str(type_.spec).removeprefix('layers')
        w = shardops.regroup(f'layers{lies} -> v p n{lies}', w, v=training.pieces)
        return deal(jnp.moveaxis(w, 1, 0), type_)

    pieces = jax.tree.map(of_layers, weights.transformer, types.transformer)
    norm = shardops.all_gather('M/d/c/e/t/r/p -> M', weights.final_layer_norm)
    return pieces, deal(weights.unembed, types.unembed), norm


@typed
def at_rest(training: Training, weights: Weights, pieces, unembed, norm):
    """The gradients of what `of_stages` returns as weights lie at rest. Sends 4 bytes for each parameter of the stage /
    t over r, d, c, e (2 as bfloat16), and 4 for each that a device has at rest over p."""
    types = narrowed(Weights, weights)

    def collect(g, type_):
        at_rest, dealt_out, near, whole = way(str(type_.spec))
        is_norm = '/t/r' in at_rest
        g = g if is_norm else g.astype(training.gradient_reduce_dtype)
        g = shardops.psum_scatter(f'{whole} +r +d +c +e{" +t" * is_norm} -> {near} +r', g)
        g = shardops.psum_scatter(f'{near} +r -> {dealt_out}', g).astype(jnp.float32)
        return shardops.all_to_all(f'{dealt_out} -> {at_rest}', g)

    def of_layers(g, type_):
        lies = str(type_.spec).removeprefix('layers')
        g = jnp.moveaxis(collect(g, type_), 0, 1)
        return shardops.regroup(f'v p n{lies} -> layers{lies}', g)

    transformer = jax.tree.map(of_layers, pieces, types.transformer)
    norm = shardops.psum_scatter('M +p +r +d +c +e +t -> M/d/c/e/t/r/p', norm)
    return transformer, collect(unembed, types.unembed), norm


# == Schedule ==========================================================================================================
@typed
def pipelined(stage, head, pieces, shared, stream: act['p/p groups B/r/d/e L/c M/t'], backward: bool = True):
    """Takes all microbatches through all stages, and back: 1F1B (Narayanan et al. 2021, 2.2) in lockstep, interleaved
    where a stage has several pieces.

    Stage s computes item i - s in tick i: items are pieces of microbatches, in groups of p microbatches that go round
    v times. The last stage's result goes to the head, whose gradient it takes back in the same tick. Backward a stage
    computes its piece again, from the input that it kept. vp - 1 ticks are forward alone, v(N - p) + p forward and
    backward, vp - 1 backward alone: of all ticks (p - 1) / (vN + p - 1) are idle.

    Args:
      stage(piece, x, number): a piece's result for a microbatch, on each stage by itself; it does not know p.
      head(shared, y, number): the loss, pending over all axes, of the last stage's y, 'p/p B/r/d/e L/c M/t'.
      pieces: weights 'p/p v ...' of the stages; shared: of the head.
      stream: what goes in: microbatch g·p + m is of group g, on stage (m + 1) % p. A belt brings it to stage 0.
    Returns:
      The loss; and the gradients of pieces and shared in float32, and of the stream.
    Kept: 2vp - 1 stage inputs, 2M/t bytes a token each. Sends, in a tick, 4M/t bytes a token forward, as many backward.
    """
    p, v, groups = int(shardops.axis_size('p')), jax.tree.leaves(pieces)[0].shape[1], stream.shape[1]
    turn = v * p  # ticks that a group takes
    items, delay, slots = groups * turn, turn - 1, 2 * turn - 1
    busy = f'busy={items}:{items + p - 1}'  # for the ledger: ticks of which the model needs the products
    index = shardops.index('p')
    move = functools.partial(shardops.ppermute, '[p/p] B/r/d/e L/c M/t -> [p/p] B/r/d/e L/c M/t')

    def place(item):
        """Of an item: its group, which piece of the stage, and its number in the group."""
        item = jnp.clip(item, 0, items - 1)
        return item // turn, item % turn // p, item % p

    def of(tree, at):
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), tree)

    def forward(i, index, pieces, kept, x, belt):
        group, piece, number = place(i - index)
        x = jnp.where((index == 0) & (piece == 0), belt, x)
        with jax.named_scope(busy):
            y = stage(of(pieces, piece), x, group * p + number)
        return lax.dynamic_update_index_in_dim(kept, x, i % slots, axis=0), y

    def back(i, index, pieces, kept, dy, belt, sums):
        item = i - delay - (p - 1) + index
        group, turned, number = place(item)
        piece = v - 1 - turned
        then = group * turn + piece * p + number + index  # the tick of its forward
        # What it computes again is marked so: the ledger counts the model's products once.
        of_piece = explicit_activation_checkpointing(functools.partial(stage, number=group * p + number), names=())
        with jax.named_scope(busy):
            _, pull = shardops.vjp(of_piece, of(pieces, piece), of(kept, then % slots))
            dw, dx = pull(jnp.where(item < items, dy, 0))

        def add(total, g):
            g = lax.dynamic_index_in_dim(total, piece, keepdims=False) + g.astype(jnp.float32)
            return lax.dynamic_update_index_in_dim(total, g, piece, axis=0)

        return dx, jnp.where((index == 0) & (piece == 0), dx, belt), jax.tree.map(add, sums, dw)

    def tick(does, carry, i):
        (y, belt, kept), (dx, back_belt, sums), (loss, of_shared, of_stream) = carry
        if 'forward' in does:
            with jax.named_scope('forward'):
                column = lax.dynamic_index_in_dim(stream, jnp.minimum(i // turn, groups - 1), axis=1, keepdims=False)
                x, belt = move(y, 1), move(jnp.where(i % turn == 0, column, belt), -1)
                kept, y = shardops.each('p', functools.partial(forward, i), index, pieces, kept, x, belt)
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
                given = index, pieces, kept, dy, back_belt, sums
                dx, back_belt, sums = shardops.each('p', functools.partial(back, i), *given)
                group, _, _ = place(i - delay - (p - 1))
                of_stream = lax.dynamic_update_index_in_dim(of_stream, back_belt, group, axis=1)
        return ((y, belt, kept), (dx, back_belt, sums), (loss, of_shared, of_stream)), None

    def ticks(carry, first, count, *does):
        return lax.scan(functools.partial(tick, does), carry, first + jnp.arange(count))[0]

    def round_of_a_group(carry, first):
        carry = ticks(carry, first, turn - p, *both)
        return ticks(carry, first + turn - p, p, *both, 'head'), None

    both = ('forward', 'backward') if backward else ('forward',)
    x = jnp.zeros_like(lax.dynamic_index_in_dim(stream, 0, axis=1, keepdims=False))
    kept = shardops.zeros('p/p slots B/r/d/e L/c M/t', act, slots=slots)
    floats = functools.partial(jnp.zeros_like, dtype=jnp.float32)
    sums = (jax.tree.map(floats, pieces), jax.tree.map(floats, shared)) if backward else (None, None)
    carry = (x, x, kept), (x, x, sums[0]), (jnp.float32(0), sums[1], shardops.zeros('p/p groups B/r/d/e L/c M/t', act))
    carry = ticks(carry, 0, delay, 'forward')
    if v == 1:
        carry = ticks(carry, delay, items, *both, 'head')
    else:  # in p ticks of each turn what comes out of the last stage is finished
        carry = ticks(carry, delay, p, *both, 'head')
        carry, _ = lax.scan(round_of_a_group, carry, delay + p + turn * jnp.arange(groups - 1))
    if backward:
        carry = ticks(carry, items + p - 1, delay, 'backward')
    _, (_, _, of_pieces), (loss, of_shared, of_stream) = carry
    return loss, of_pieces, of_shared, of_stream


# == Model =============================================================================================================
@typed
def layers(
    mesh: at_scale.Mesh,
    model: at_scale.Model,
    training: Training,
    weights,
    x: act['B/r/d/e L/c M/t'],
    segment: i32['B/r/d/e L'],
) -> act['B/r/d/e L/c M/t']:
    """A piece of the layers, train_at_scale.py's, of whole weights 'n M F/t', on each stage by itself."""
    places = places_of(mesh, model, segment)
    kept = ('save_for_backward',) if training.save_for_backward == 'everything' else ()

    @functools.partial(explicit_activation_checkpointing, names=kept)
    def layer(x: act['B/r/d/e L/c M/t'], w):
        x = attention_half(mesh, model, x, w.ln1, (w.w_q, *w.w_kv, w.w_o), places)
        with jax.named_scope('ffn'):
            gathered = shardops.all_gather('B/r/d/e L/c M/t -> B/r/d/e L/c M', x)
            gathered = save_for_backward(gathered)  # 2M bytes a token
            return x + feed_forward(rms_norm(gathered, w.ln2, model.norm_eps), w.w_gate, w.w_up, w.w_down), None

    return lax.scan(layer, x, weights, unroll=training.unroll_layers)[0]


@typed
def last_loss(
    mesh: at_scale.Mesh,
    model: at_scale.Model,
    shared: tuple[f32['V/t/p M'], f32['M']],
    y: act['p/p B/r/d/e L/c M/t'],
    labels: tuple[u32['B/r/d/e L'], bool_['B/r/d/e L']],
) -> f32['+p +r +d +c +e +t']:
    """The sum of -log softmax over the targets of the microbatch that the last stage has done. Each stage has a part of
    the vocabulary (Yeung et al. 2024): y goes to all of them, 4M/t bytes a token, and 12 bytes a token for sums."""
    is_last = (shardops.index('p') == int(shardops.axis_size('p')) - 1)[:, None, None, None]
    y = shardops.sum_unreduced('p/p B/r/d/e L/c M/t -> B/r/d/e L/c M/t +p', jnp.where(is_last, y, 0))
    y = shardops.psum('B/r/d/e L/c M/t +p -> B/r/d/e L/c M/t', y)
    y = shardops.all_gather('B/r/d/e L/c M/t -> B/r/d/e L/c M', y)
    unembed, scale = shared
    x = explicit_activation_checkpointing(functools.partial(rms_norm, eps=model.norm_eps))(y, scale)

    @explicit_activation_checkpointing
    def chunk_loss(
        unembed: f32['V/t/p M'], x: act['B/r/d/e L/c M'], labels: tuple[u32['B/r/d/e L/c'], bool_['B/r/d/e L/c']]
    ) -> f32['+p +r +d +c +e +t']:
        targets, is_target = labels
        w = unembed.astype(act.dtype)
        logits = shardops.einsum_unreduced(
            'B/r/d/e L/c M, V/t/p M -> B/r/d/e L/c V/t/p', x, w, preferred_element_type=jnp.float32
        )
        logits = save_for_backward(logits)  # 4V/tp bytes a token of one chunk
        largest = shardops.pmax('B/r/d/e L/c V/t/p -> B/r/d/e L/c', lax.stop_gradient(logits))
        largest = save_for_backward(largest)  # 4 bytes a token of one chunk
        total = shardops.sum_unreduced('B/r/d/e L/c V/t/p -> B/r/d/e L/c +p +t', jnp.exp(logits - largest[..., None]))
        total = shardops.psum('B/r/d/e L/c +p +t -> B/r/d/e L/c', total)
        total = save_for_backward(total)  # 4 bytes a token of one chunk
        at_target = shardops.index_unreduced('B/r/d/e L/c [V/t/p], B/r/d/e L/c -> B/r/d/e L/c +p +t', logits, targets)
        loss = shardops.pending('B/r/d/e L/c -> B/r/d/e L/c +p +t', largest + jnp.log(total)) - at_target
        return shardops.sum_unreduced('B/r/d/e L/c +p +t -> +p +r +d +c +e +t', loss * is_target.astype(jnp.float32))

    own = labels[0].shape[1] // mesh.c
    chunks = own // max(size for size in range(1, at_scale.LOSS_CHUNK + 1) if own % size == 0)
    x = shardops.regroup('B/r/d/e L/c M -> B/r/d/e chunks P/c M', x, chunks=chunks)

    def in_chunks(whole):
        part = shardops.regroup('B/r/d/e L/c -> B/r/d/e chunks P/c', dealt(mesh, model, whole), chunks=chunks)
        return jnp.moveaxis(part, 1, 0)

    return shardops.sum_over_chunks(chunk_loss, unembed, jnp.moveaxis(x, 1, 0), tuple(map(in_chunks, labels)))


@typed
def loss_and_gradient(
    mesh: Mesh,
    model: at_scale.Model,
    training: Training,
    bos_id: int,
    weights: Weights,
    batch: TokenBatch,
    backward: bool = True,
):
    """The sum of -log softmax over all targets, pending over all axes; and its gradient, or None."""
    inner = at_scale.Mesh(**{name: size for name, size in vars(mesh).items() if name != 'p'})
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=training.gradient_reduce_dtype)
    # Each device embeds its own rows: microbatch g·p + m is those in group g of the devices at (m + 1) % p along p.
    p = int(shardops.axis_size('p'))
    groups = training.microbatches // p
    regroup = functools.partial(shardops.regroup, 'B/p/r/d/e L -> p/p groups R/r/d/e L', groups=groups)
    rows = jax.tree.map(regroup, batch)
    first = rows.is_seq_start.at[..., 0].set(True)  # a row's first position starts a segment
    inputs = jnp.where(first, jnp.uint32(bos_id), jnp.roll(rows.targets, 1, axis=-1))
    segments = jnp.cumsum(first, axis=-1, dtype=jnp.int32)

    def of_all(rows):  # 9 bytes a token: each stage masks with them, and has a part of the loss
        rows = shardops.all_gather('p/p groups R/r/d/e L -> p groups R/r/d/e L', rows)
        return rows.reshape(-1, *rows.shape[2:])

    segments, targets, is_target = map(of_all, (segments, rows.targets, rows.is_target))

    def of(number, *arrays):
        at = (number + 1) % p * groups + number // p
        return tuple(lax.dynamic_index_in_dim(array, at, keepdims=False) for array in arrays)

    def stage(piece, x, number):
        return layers(inner, model, training, piece, x, *of(number, segments))

    def head(shared, y, number):
        return last_loss(inner, model, shared, y, of(number, targets, is_target))

    @explicit_activation_checkpointing  # else a mask of M bytes a token
    def embed(table: f32['V/t M/d/c/e/r/p'], inputs: u32['p/p groups B/r/d/e L']) -> act['p/p groups B/r/d/e L/c M/t']:
        table = gather('V/t M/d/c/e/r/p -> V/t M', table)

        def of_own(inputs):
            own = dealt(inner, model, shardops.regroup('groups B/r/d/e L -> R/r/d/e L', inputs))
            x = shardops.index_unreduced('[V/t] M, R/r/d/e L/c -> R/r/d/e L/c M +t', table, own)
            x = shardops.psum_scatter('R/r/d/e L/c M +t -> R/r/d/e L/c M/t', x)
            return shardops.regroup('R/r/d/e L/c M/t -> groups B/r/d/e L/c M/t', x, groups=groups)

        return shardops.each('p', of_own, inputs)

    with jax.named_scope('embed'):
        stream, pull = shardops.vjp(lambda table: embed(table, inputs), weights.embed)
    with jax.named_scope('stages'):
        pieces, unembed, norm = of_stages(training, weights)
    shared = unembed.astype(jnp.float32), norm
    loss, of_pieces, of_shared, of_stream = pipelined(stage, head, pieces, shared, stream, backward)
    if not backward:
        return loss, None
    with jax.named_scope('stages'):
        transformer, unembed, norm = at_rest(training, weights, of_pieces, *of_shared)
    with jax.named_scope('embed'):
        (embed,) = pull(of_stream)
    return loss, Weights(embed=embed, unembed=unembed, transformer=transformer, final_layer_norm=norm)


# == Optimizer and step ================================================================================================
@typed
def squared_norms(tree: Weights) -> f32['weights']:
    """Of each of the weights, of their gradients or changes, all layers together; one sum over all devices."""
    squares = [shardops.sum_unreduced('... -> +p +r +d +c +e +t', w * w) for w in jax.tree.leaves(tree)]
    return shardops.psum('weights +p +r +d +c +e +t -> weights', jnp.stack(squares))


@typed
def count_of(batch: TokenBatch) -> f32['']:
    """The number of targets of all devices."""
    own = shardops.sum_unreduced('B/p/r/d/e L -> +p +r +d +e', batch.is_target.astype(jnp.float32))
    return shardops.psum('+p +r +d +e -> ', own)


@typed
def training_step(
    mesh: Mesh,
    model: at_scale.Model,
    training: Training,
    bos_id: int,
    state: State,
    skipped: u32[''],
    step: u32[''],
    batch: TokenBatch,
) -> tuple[State, train.Metrics]:
    """The update number `step`, from 0, and what is logged of it."""
    with jax.named_scope('gradient'):
        value, gradient = loss_and_gradient(mesh, model, training, bos_id, state.weights, batch)
        target_count = jnp.maximum(count_of(batch), 1)
        value: f32[''] = shardops.psum('+p +r +d +c +e +t -> ', value / target_count)
        gradient: Weights = jax.tree.map(lambda g: g / target_count, gradient)

    return updated(training, DECAYED, squared_norms, state, skipped, step, value, gradient)


@typed
def validation_step(
    mesh: Mesh,
    model: at_scale.Model,
    training: Training,
    bos_id: int,
    weights: Weights,
    loss: f32[''],
    targets: f32[''],
    batch: TokenBatch,
) -> tuple[f32[''], f32['']]:
    """Adds a batch's losses and its number of targets to the sums so far."""
    value, _ = loss_and_gradient(mesh, model, training, bos_id, weights, batch, backward=False)
    return loss + shardops.psum('+p +r +d +c +e +t -> ', value), targets + count_of(batch)


# == Main loop =========================================================================================================
def mapped_steps(config: Config, bos_id: int) -> tuple[typed_shard_map, typed_shard_map]:
    """The training step and the validation step over the mesh."""
    act.dtype = config.model.compute_dtype
    given = config.mesh, config.model, config.training, bos_id
    return tuple(typed_shard_map(functools.partial(step, *given)) for step in (training_step, validation_step))


def shapes(config: Config) -> tuple[State, TokenBatch]:
    """The global shapes of the state and of a batch. Raises RunError for what this program has not, and for sizes that
    the mesh cannot split."""
    mesh, model, training = config.mesh, config.model, config.training
    refused = {'mesh.p = 1': mesh.p == 1, f'model.experts = {model.experts}': model.experts, 'model.fp8': model.fp8}
    for what, is_so in refused.items():
        if is_so:
            raise RunError(f'{what}: train_pipeline has neither one stage nor mixtures nor 8 bits: use train_at_scale')
    of_stages = 'model.layers', model.layers, mesh.p * training.pieces, 'mesh.p · training.pieces'
    for key, size, count, what in of_stages, ('training.microbatches', training.microbatches, mesh.p, 'mesh.p'):
        if size % count:
            raise RunError(f'{key} = {size}: dealt out to {what} = {count}: set it to {nearest_multiples(size, count)}')
    state = jax.eval_shape(functools.partial(init_state, model), np.uint32(0))
    check_sizes(config, f32['V/t/p'], jax.ShapeDtypeStruct((model.vocab,), jnp.float32))
    check_sizes(config, i32['L/c'], jax.ShapeDtypeStruct((training.tokens.len,), jnp.int32))
    if not deals_heads(mesh, model):
        check_sizes(config, i32['2 l/c'], jax.ShapeDtypeStruct((2, training.tokens.len // 2), jnp.int32))
    return check_sizes(config, State, state), TokenBatch(**vars(batch_shapes(config, at_scale.TokenBatch)))


def main(config: Config) -> None:
    """Trains a language model on a flat-tokens data set, its layers on the stages of a pipeline."""
    state, batch = shapes(config)
    if config.check_only:
        return report_check(config, mapped_steps(config, bos_id=0), state, batch)
    mesh, kernel = start(config), usable(config.model.attention, config.model.compute_dtype, config.model.d_head)
    with jax.set_mesh(mesh), Run(config, TokenBatch) as run:
        run.say(f'attention: {kernel}')
        step, validate = mapped_steps(config, run.data.bos_id)
        state, batch, zero = with_shardings(state, State), with_shardings(batch, TokenBatch), np.uint32(0)
        step = run.compile(jax.jit(step, donate_argnums=0).trace(state, zero, zero, batch), __file__)
        validate = jax.jit(validate, compiler_options=run.compiler_options)
        state = run.first_state(state, functools.partial(init_state, config.model))
        skipped_steps = np.uint32(run.attributes.get('skipped_steps', 0))

        for number in run.steps():
            state, metrics = step(state, skipped_steps, np.uint32(number), run.data.load(number))
            skipped_steps = metrics.skipped_steps
            run.log(number, state, metrics)
            run.validate_if_due(number, validate, state.weights)
            run.save_if_due(number, state)


if __name__ == '__main__':
    run(main, Config)
