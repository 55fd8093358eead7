"""Trains a Llama-style language model; all mathematics, memory and communication of a step is in this file.

    python -m train                                          # a small model, eight devices simulated on a CPU
    python -m train --config-name=c4_a100x8_1b               # configs/ has one file for each model and machine
    python -m train training.steps=80 mesh.d=8 mesh.t=1      # any key can be set; --help lists them
    python -m train check_only=true                          # proves the types below on the mesh, without a device

Legend, the same letters for weights and activations:
    B batch, L position of a query, S position of a key, M d_model, F d_ff, V vocabulary,
    K key heads, Q query heads per key head, D d_head
A type: in f32['B/d L M/t'] B is split over d and M over t. Along an axis not mentioned all devices hold the same.
'+t': each device along t holds one term of a sum.

To change: the model, `Layer` and `forward`; what is kept for the backward pass, `save_for_backward`; the optimizer,
`adamw_step`; what is decayed, `DECAYED`; the mesh, `Mesh` and the types; a hyperparameter, its dataclass.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from jax_extra import explicit_activation_checkpointing, fold_in_str, save_for_backward
from kernels.attention import KERNELS, KernelName, chosen, usable
from runtime.check import batch_shapes, by_name, check_sizes, report_check
from runtime.config.command_line import run
from runtime.config.keys import Count, Even, Fraction, Momentum, NotNegative, Positive, RunConfig, RunTraining, Steps
from runtime.run import Run, start, with_shardings
from shardlib import shardops
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, ComputeType, bool_, f32, i32, pytree_dataclass, u32
from shardlib.typed import typed

# The type of activations and of gathered weights: bfloat16, or what model.compute_dtype says.
act = ComputeType('act', jnp.bfloat16)


# == Hyperparameters ===================================================================================================
@dataclass(frozen=True, kw_only=True)
class Mesh:  # in the order of its axes: neighbours along the last one are nearest to each other
    d: Count  # devices along axis d: the batch, and the master weights and Adam state (FSDP)
    t: Count  # devices along axis t: heads, d_ff and vocabulary (tensor parallelism)


@dataclass(frozen=True, kw_only=True)
class Model:
    d_model: Count  # M, length of the vector that each token has between layers
    n_q_per_kv: Count  # Q, query heads for each head of keys and values
    n_kv: Count  # K, heads of keys and values
    d_head: Even  # D, length of a head's vectors, whose two halves rotary embeddings turn
    layers: Count  # how many, all alike
    vocab: Count  # V, token ids are 0 to vocab - 1
    d_ff: Count  # F, length of the feed-forward network's hidden vector
    rope_max_timescale: Count  # base of the rotary angles
    norm_eps: Positive = 1e-6  # added to the mean square in RMSNorm
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # type of activations and matrix products
    attention: KernelName = 'auto'  # a kernel of kernels/attention.py; einsum: as written below; auto: by device


@dataclass(frozen=True, kw_only=True)
class Training(RunTraining):  # its base has seed, steps, tokens and microbatches
    warmup_steps: Steps  # the learning rate climbs linearly over these
    steps_for_lr: Count  # then follows a cosine, which is at its floor from this step on, counted from 0
    learning_rate: Positive  # its largest value
    cosine_learning_rate_final_fraction: Fraction = 0.1  # the floor, as a fraction of learning_rate
    adam_b1: Momentum = 0.9  # decay rate of the gradient's mean
    adam_b2: Momentum = 0.95  # decay rate of the squared gradient's mean
    adam_eps: Positive = 1e-8  # added to the root of the second moment
    weight_decay: NotNegative = 0.1  # w loses learning_rate · weight_decay · w; matrices only, see DECAYED
    max_grad_norm: Positive = 1.0  # a gradient whose global norm is larger is scaled down to it
    save_for_backward: Literal['everything', 'inputs'] = 'everything'  # a layer keeps what it names, or its input
    unroll_layers: bool = False  # no loop over layers: longer to compile, without copies into stacks of what is kept
    # Type in which weights' gradients are reduce-scattered: float32 sends 4 bytes an element; bfloat16 2, and rounds.
    gradient_reduce_dtype: Literal['float32', 'bfloat16'] = 'float32'


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    OTHER: ClassVar = 'train_any'  # the program that a key unknown here may belong to

    mesh: Mesh
    model: Model
    training: Training


# == Batch and weights =================================================================================================
@pytree_dataclass
class TokenBatch:
    targets: u32['B/d L']  # what is to be predicted
    is_seq_start: bool_['B/d L']  # the target starts a sequence: it sees none of the tokens before it
    is_target: bool_['B/d L']  # False for context and padding: no part of the loss


@pytree_dataclass
class Layer:
    ln1: f32['M/d/t']
    ln2: f32['M/d/t']
    w_q: f32['M/d Q K/t D']
    w_kv: f32['2 M/d K/t D']
    w_o: f32['M/d Q K/t D']
    w_gate: f32['M/d F/t']
    w_up: f32['M/d F/t']
    w_down: f32['M/d F/t']


@pytree_dataclass
class Weights:
    embed: f32['V/t M/d']
    unembed: f32['V/t M/d']
    transformer: Array['layers', Layer]
    final_layer_norm: f32['M/d/t']


# Weight decay pulls matrices to zero, not norms (neutral at one) nor embeddings (whose rare rows would vanish).
DECAYED = {'w_q': 1.0, 'w_kv': 1.0, 'w_o': 1.0, 'w_gate': 1.0, 'w_up': 1.0, 'w_down': 1.0}
DECAYED |= {'embed': 0.0, 'unembed': 0.0, 'ln1': 0.0, 'ln2': 0.0, 'final_layer_norm': 0.0}


@pytree_dataclass
class State:
    weights: Weights  # float32; with the two moments 12 bytes a parameter, divided over all d · t devices
    adam_mu: Weights
    adam_nu: Weights


@pytree_dataclass
class Metrics:
    loss: f32['']
    learning_rate: f32['']
    grad_norm: f32['']  # norm of the whole gradient, before clipping
    weight_norm: f32['']  # norm of all weights, after the update
    skipped_steps: u32['']
    grad_norm_of: f32['weights']  # norm of each weight's gradient, all layers together, before clipping
    weight_norm_of: f32['weights']
    update_ratio_of: f32['weights']  # norm of the step's change over the weight's norm


def init_state(model: Model, seed: jax.Array) -> State:
    """The first state. Jitted with sharded outputs, each device draws only its shard; the values fit any mesh."""
    layers, M, F, V = model.layers, model.d_model, model.d_ff, model.vocab
    Q, K, D = model.n_q_per_kv, model.n_kv, model.d_head

    def normal(name, shape, fan_in, scale=1.0):
        key = fold_in_str(jax.random.key(seed), name)
        # 0.8796 is the standard deviation of a normal distribution that is cut at 2.
        return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) * (scale / 0.87962566 / fan_in**0.5)

    layer = Layer(
        ln1=jnp.ones((layers, M), jnp.float32),
        ln2=jnp.ones((layers, M), jnp.float32),
        w_q=normal('w_q', (layers, M, Q, K, D), M, scale=D**-0.5),  # attention logits are q·k: their 1/sqrt(D) is here
        w_kv=normal('w_kv', (layers, 2, M, K, D), M),
        w_o=normal('w_o', (layers, M, Q, K, D), Q * K * D),
        w_gate=normal('w_gate', (layers, M, F), M),
        w_up=normal('w_up', (layers, M, F), M),
        w_down=normal('w_down', (layers, M, F), F),
    )
    embed, unembed = normal('embed', (V, M), M), normal('unembed', (V, M), M)  # embed starts like unembed
    weights = Weights(embed=embed, unembed=unembed, transformer=layer, final_layer_norm=jnp.ones((M,), jnp.float32))
    return State(weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)))


# == Forward pass ======================================================================================================
@typed
def rms_norm(x: act['B/d L M'], scale: f32['M'], eps: float) -> act['B/d L M']:
    """x / sqrt(mean(x²) + eps) · scale, in float32 (Zhang and Sennrich 2019, section 4)."""
    x = x.astype(jnp.float32)
    mean_square = shardops.sum_unreduced('B/d L M -> B/d L', x * x) / x.shape[-1]
    return (x * lax.rsqrt(mean_square + eps)[:, :, None] * scale[None, None]).astype(act.dtype)


@typed
def rotary(x: act['B/d L Q K/t D'], base: float) -> act['B/d L Q K/t D']:
    """Rotates dims i and i + D/2 by position · base^(-i / (D/2)) (Su et al. 2021, 3.2.2; there neighbours pair)."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None]
    sin, cos = jnp.sin(angle)[None, :, None, None], jnp.cos(angle)[None, :, None, None]
    x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(act.dtype)


@jax.named_scope('causal')  # half of its products are masked: MFU counts the other half
@typed
def attention(
    by: str, q: act['B/d L Q K/t D'], k: act['B/d S K/t D'], v: act['B/d S K/t D'], segment: i32['B/d L']
) -> act['B/d L Q K/t D']:
    """Causal, and only within each segment: by 'einsum', as written here, or by a kernel with this meaning."""
    if by != 'einsum':  # nothing of L x S in memory; it keeps o and, in float32, the logits' log-sum-exp by itself
        kernel = KERNELS[chosen(by, act.dtype, q.shape[-1])]
        return shardops.local(
            'B/d L Q K/t D, B/d S K/t D, B/d S K/t D, B/d L -> B/d L Q K/t D', kernel, q, k, v, segment
        )
    position = jnp.arange(segment.shape[1])
    allowed = (segment[:, :, None] == segment[:, None, :]) & (position[:, None] >= position[None])[None]
    logits = shardops.einsum_unreduced(
        'B/d L Q K/t D, B/d S K/t D -> B/d Q K/t L S', q, k, preferred_element_type=jnp.float32
    )
    logits = jnp.where(allowed[:, None, None], logits, -1e30)
    largest = shardops.pmax('B/d Q K/t L S -> B/d Q K/t L', lax.stop_gradient(logits))
    e = jnp.exp(logits - largest[..., None])
    total = shardops.sum_unreduced('B/d Q K/t L S -> B/d Q K/t L', e)
    probs: act['B/d Q K/t L S'] = (e / total[..., None]).astype(act.dtype)
    o = shardops.einsum_unreduced('B/d Q K/t L S, B/d S K/t D -> B/d L Q K/t D', probs, v)
    return save_for_backward(o)  # 2QKD/t bytes a token, spares the product of probabilities and v


@typed
def forward(model: Model, training: Training, bos_id: int, weights: Weights, batch: TokenBatch) -> act['B/d L M']:
    """The hidden states before the unembedding."""
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=training.gradient_reduce_dtype)

    @explicit_activation_checkpointing  # else a mask of M bytes a token
    def embed(table: f32['V/t M/d'], inputs: u32['B/d L']) -> act['B/d L M/t']:
        table = gather('V/t M/d -> V/t M', table)
        x = shardops.index_unreduced('[V/t] M, B/d L -> B/d L M +t', table, inputs)  # its gradient adds up in float32
        return shardops.psum_scatter('B/d L M +t -> B/d L M/t', x)

    with jax.named_scope('embed'):
        first = batch.is_seq_start.at[:, 0].set(True)  # a row's first position starts a segment
        inputs: u32['B/d L'] = jnp.where(first, jnp.uint32(bos_id), jnp.roll(batch.targets, 1, axis=1))
        segment: i32['B/d L'] = jnp.cumsum(first, axis=1, dtype=jnp.int32)
        x = embed(weights.embed, inputs)

    # The norms of all layers travel together, in float32: they are small. 8M bytes a layer, held throughout.
    ln1 = shardops.all_gather('layers M/d/t -> layers M', weights.transformer.ln1)
    ln2 = shardops.all_gather('layers M/d/t -> layers M', weights.transformer.ln2)

    # Bytes in the comments below are for one layer and one token of the device's rows, in bfloat16. They add up
    # to 4M + (4QKD + 4KD + 4F)/t. Keeping the input alone takes 2M/t, and a fifth to a quarter more FLOPs.
    kept = ('save_for_backward',) if training.save_for_backward == 'everything' else ()

    @functools.partial(explicit_activation_checkpointing, names=kept)
    def layer(x: act['B/d L M/t'], ws: tuple[f32['M'], f32['M'], Layer]) -> tuple[act['B/d L M/t'], None]:
        ln1, ln2, w = ws  # the matrices of w, gathered below, are not kept: the backward pass gathers them again
        w_q = gather('M/d Q K/t D -> M Q K/t D', w.w_q)
        w_k, w_v = [gather('M/d K/t D -> M K/t D', each) for each in w.w_kv]
        w_o = gather('M/d Q K/t D -> M Q K/t D', w.w_o)
        w_gate = gather('M/d F/t -> M F/t', w.w_gate)
        w_up = gather('M/d F/t -> M F/t', w.w_up)
        w_down = gather('M/d F/t -> M F/t', w.w_down)

        with jax.named_scope('attention'):
            gathered = shardops.all_gather('B/d L M/t -> B/d L M', x)
            gathered = save_for_backward(gathered)  # 2M bytes a token, in the place of the input's 2M/t
            normed = rms_norm(gathered, ln1, model.norm_eps)
            q = shardops.einsum_unreduced('B/d L M, M Q K/t D -> B/d L Q K/t D', normed, w_q)
            q = rotary(q, model.rope_max_timescale)
            q = save_for_backward(q)  # 2QKD/t bytes a token, spares a product with w_q
            k = shardops.einsum_unreduced('B/d L M, M K/t D -> B/d L K/t D', normed, w_k)
            k = rotary(k[:, :, None], model.rope_max_timescale)[:, :, 0]
            k = save_for_backward(k)  # 2KD/t bytes a token, spares the product with w_k
            v = shardops.einsum_unreduced('B/d L M, M K/t D -> B/d L K/t D', normed, w_v)
            v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v
            o = attention(model.attention, q, k, v, segment)
            y = shardops.einsum_unreduced('B/d L Q K/t D, M Q K/t D -> B/d L M +t', o, w_o)
            x = x + shardops.psum_scatter('B/d L M +t -> B/d L M/t', y)

        with jax.named_scope('ffn'):
            gathered = shardops.all_gather('B/d L M/t -> B/d L M', x)
            gathered = save_for_backward(gathered)  # 2M bytes a token, spares the product with w_o, its sum, the gather
            normed = rms_norm(gathered, ln2, model.norm_eps)
            gate = shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', normed, w_gate)
            gate = save_for_backward(gate)  # 2F/t bytes a token, spares a product with w_gate
            up = shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', normed, w_up)
            up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
            hidden = jax.nn.silu(gate) * up
            y = shardops.einsum_unreduced('B/d L F/t, M F/t -> B/d L M +t', hidden, w_down)
            return x + shardops.psum_scatter('B/d L M +t -> B/d L M/t', y), None

    x, _ = lax.scan(layer, x, (ln1, ln2, weights.transformer), unroll=training.unroll_layers)

    with jax.named_scope('final_norm'):
        scale = shardops.all_gather('M/d/t -> M', weights.final_layer_norm)
        gathered = shardops.all_gather('B/d L M/t -> B/d L M', x)
        # Keeps `gathered`, 2M bytes a token, and not the norm's float32 values, 8M.
        return explicit_activation_checkpointing(functools.partial(rms_norm, eps=model.norm_eps))(gathered, scale)


# == Loss ==============================================================================================================
# At most this many positions of a row have their logits in memory at once. All logits in float32, with their gradient,
# would be 6 B L V / (d t) bytes, 1.6 GB a device for c4_a100x8_1b; a chunk takes LOSS_CHUNK / L of it.
LOSS_CHUNK = 256


@typed
def loss_sum(model: Model, training: Training, bos_id: int, weights: Weights, batch: TokenBatch) -> f32['+d +t']:
    """The sum of -log softmax over all targets, which sends 16 (t-1)/t bytes a token, 8 (t-1)/t backward: no logits."""
    x = forward(model, training, bos_id, weights, batch)
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=training.gradient_reduce_dtype)
    # Float32, so that its gradient adds up over chunks in float32 (4VM/t bytes each); the products are in bfloat16.
    unembed = gather('V/t M/d -> V/t M', weights.unembed).astype(jnp.float32)

    @explicit_activation_checkpointing
    def chunk_loss(unembed: f32['V/t M'], x: act['B/d L M'], batch: TokenBatch) -> f32['+d +t']:
        w = unembed.astype(act.dtype)
        logits = shardops.einsum_unreduced('B/d L M, V/t M -> B/d L V/t', x, w, preferred_element_type=jnp.float32)
        logits = save_for_backward(logits)  # 4V/t bytes a token of one chunk, spares the product
        largest = shardops.pmax('B/d L V/t -> B/d L', lax.stop_gradient(logits))
        largest = save_for_backward(largest)  # 4 bytes a token of one chunk, spares the maximum over t
        total = shardops.sum_unreduced('B/d L V/t -> B/d L +t', jnp.exp(logits - largest[..., None]))
        total = shardops.psum('B/d L +t -> B/d L', total)
        total = save_for_backward(total)  # 4 bytes a token of one chunk, spares the sum over t
        log_normalizer = largest + jnp.log(total)
        # The target's logit is on one device of t and zero on the others: it stays a pending sum.
        at_target = shardops.index_unreduced('B/d L [V/t], B/d L -> B/d L +t', logits, batch.targets)
        loss = shardops.pending('B/d L -> B/d L +t', log_normalizer) - at_target
        return shardops.sum_unreduced('B/d L +t -> +d +t', loss * batch.is_target.astype(jnp.float32))

    chunk = max(size for size in range(1, LOSS_CHUNK + 1) if x.shape[1] % size == 0)
    x, batch = jax.tree.map(lambda a: rearrange(a, 'B (chunk L) ... -> chunk B L ...', L=chunk), (x, batch))
    # Each chunk's gradient is computed right after its loss: it is kept in the place of x, 2M bytes a token.
    return shardops.sum_over_chunks(chunk_loss, unembed, x, batch)


# == Optimizer and step ================================================================================================
def learning_rate(training: Training, step: jax.Array) -> jax.Array:
    """Linear warmup, then a cosine to its floor (Loshchilov and Hutter 2017, section 3), where it stays."""
    step = step.astype(jnp.float32)
    warm = jnp.minimum(1.0, (step + 1) / max(training.warmup_steps, 1))
    decay_steps = max(training.steps_for_lr - training.warmup_steps, 1)
    fraction = jnp.maximum(0.0, (step - training.warmup_steps) / decay_steps)
    fraction = jnp.where(step < training.steps_for_lr, fraction, 1.0)
    floor = training.cosine_learning_rate_final_fraction
    cosine = floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * fraction))
    return training.learning_rate * warm * cosine


@typed
def squared_norms(tree: Weights) -> f32['weights']:
    """The squared norm of each weight, gradient or change, all layers together; one sum over all devices."""
    squares = jnp.stack([shardops.sum_unreduced('... -> +d +t', w * w) for w in jax.tree.leaves(tree)])
    return shardops.psum('weights +d +t -> weights', squares)


@typed
def adamw_step(training: Training, decayed, state, gradient, step: u32['']):
    """The state of any model after AdamW (Loshchilov and Hutter 2019, algorithm 2, decay times learning rate).
    `decayed` has a factor of weight_decay for each of the weights; `step` counts from 0."""
    b1, b2, count = training.adam_b1, training.adam_b2, step.astype(jnp.float32) + 1
    rate = learning_rate(training, step)
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.adam_mu, gradient)
    nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g**2, state.adam_nu, gradient)

    def update(w, m, n, decayed):
        m, n = m / (1 - b1**count), n / (1 - b2**count)  # bias correction
        direction = m / (jnp.sqrt(n) + training.adam_eps)
        return w - rate * (direction + training.weight_decay * decayed * w)

    return replace(state, weights=jax.tree.map(update, state.weights, mu, nu, decayed), adam_mu=mu, adam_nu=nu)


@typed
def training_step(
    model: Model, training: Training, bos_id: int, state: State, skipped: u32[''], step: u32[''], batch: TokenBatch
) -> tuple[State, Metrics]:
    """The state after update number `step`, from 0, and its metrics."""
    with jax.named_scope('count_targets'):
        target_count = shardops.sum_unreduced('B/d L -> +d', batch.is_target.astype(jnp.float32))
        target_count: f32[''] = jnp.maximum(shardops.psum('+d -> ', target_count), 1)

    def loss(weights: Weights, batch: TokenBatch) -> f32['+d +t']:
        return loss_sum(model, training, bos_id, weights, batch) / target_count

    Sums = tuple[f32['+d +t'], Weights]  # sums of losses and of gradients

    def add_microbatch(sums: Sums, batch: TokenBatch) -> tuple[Sums, None]:
        # Without the barrier XLA gathers embed, unembed and the final norm before the loop and holds them throughout:
        # 4VM/t bytes, 537 MB a device for c4_a100x8_2b. The price is that each microbatch gathers them again.
        weights, batch = lax.optimization_barrier((state.weights, batch))
        value, gradient = shardops.value_and_grad(loss)(weights, batch)
        return jax.tree.map(jnp.add, sums, (value, gradient)), None

    with jax.named_scope('gradient'):
        # Each microbatch has rows of every device.
        regroup = functools.partial(shardops.regroup, 'B/d L -> parts R/d L', parts=training.microbatches)
        rows = jax.tree.map(regroup, batch)
        zero = shardops.zeros('+d +t', f32), jax.tree.map(jnp.zeros_like, state.weights)
        (value, gradient), _ = lax.scan(add_microbatch, zero, rows)
        gradient: Weights = gradient

    with jax.named_scope('clip'):
        value: f32[''] = shardops.psum('+d +t -> ', value)
        grad_squares: f32['weights'] = squared_norms(gradient)
        grad_norm: f32[''] = jnp.sqrt(shardops.sum_unreduced('weights -> ', grad_squares))
        clip = jnp.minimum(1.0, training.max_grad_norm / jnp.maximum(grad_norm, 1e-30))
        clipped: Weights = jax.tree.map(lambda g: clip * g, gradient)

    with jax.named_scope('adamw'):
        updated: State = adamw_step(training, by_name('DECAYED', DECAYED, clipped), state, clipped, step)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)  # else the step changes nothing
        new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)

    with jax.named_scope('metrics'):
        weight_squares = squared_norms(new_state.weights)
        change_squares = squared_norms(jax.tree.map(jnp.subtract, new_state.weights, state.weights))
        metrics = Metrics(
            loss=value,
            learning_rate=learning_rate(training, step),
            grad_norm=grad_norm,
            weight_norm=jnp.sqrt(shardops.sum_unreduced('weights -> ', weight_squares)),
            skipped_steps=skipped + jnp.where(finite, jnp.uint32(0), jnp.uint32(1)),
            grad_norm_of=jnp.sqrt(grad_squares),
            weight_norm_of=jnp.sqrt(weight_squares),
            update_ratio_of=jnp.sqrt(change_squares / weight_squares),
        )
    return new_state, metrics


@typed
def validation_step(
    model: Model, training: Training, bos_id: int, weights: Weights, loss: f32[''], targets: f32[''], batch: TokenBatch
) -> tuple[f32[''], f32['']]:
    """Adds a batch's losses and its number of targets to the sums so far."""
    loss = loss + shardops.psum('+d +t -> ', loss_sum(model, training, bos_id, weights, batch))
    batch_targets = shardops.sum_unreduced('B/d L -> +d', batch.is_target.astype(jnp.float32))
    return loss, targets + shardops.psum('+d -> ', batch_targets)


# == Main loop =========================================================================================================
def mapped_steps(config: Config, bos_id: int) -> tuple[typed_shard_map, typed_shard_map]:
    """The training step and the validation step over the mesh."""
    act.dtype = config.model.compute_dtype
    settings = config.model, config.training, bos_id
    return tuple(typed_shard_map(functools.partial(step, *settings)) for step in (training_step, validation_step))


def shapes(config: Config) -> tuple[State, TokenBatch]:
    """The global shapes of the state and of a batch. Raises RunError for sizes that the mesh cannot split."""
    state = jax.eval_shape(functools.partial(init_state, config.model), np.uint32(0))
    return check_sizes(config, State, state), batch_shapes(config, TokenBatch)


def main(config: Config, first_weights=None) -> None:
    """Trains a language model on a flat-tokens data set, as a config in configs/ says. `first_weights` reads
    initial_weights, as models.huggingface.first_weights does."""
    state, batch = shapes(config)
    if config.check_only:
        return report_check(config, mapped_steps(config, bos_id=0), state, batch)
    mesh, kernel = start(config), usable(config.model.attention, config.model.compute_dtype, config.model.d_head)
    read = first_weights and functools.partial(first_weights, config)
    with jax.set_mesh(mesh), Run(config, TokenBatch, read) as run:
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
    from models.huggingface import first_weights  # here, since the families there compute with this file

    run(main, Config, first_weights)
