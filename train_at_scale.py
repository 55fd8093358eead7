"""train.py for 8 to 4,096 devices: replicas, long rows and mixtures of experts, on axes that compose.

    python -m train_at_scale                                    # train.py's small model, on axes d and t
    python -m train_at_scale mesh.r=2 mesh.d=2                  # replicas of the weights, one a host
    python -m train_at_scale mesh.d=2 mesh.c=2                  # a row's positions on two devices
    python -m train_at_scale +experts=small                     # a mixture of experts, on eight simulated devices

It takes train.py's configs, whose checkpoints it resumes, and what it leaves as it is comes from there. An axis of one
device costs nothing: with r = c = e = 1 this is train.py, bit for bit. docs/at_scale.md says when to use which axis.

Legend as in train.py, and
    E experts, X of them chosen by a token, C an expert's slots in a row, H d_ff of one expert;
    in a mixture F is d_ff of all shared experts together.
A dim's axes stand major first: 'M/d/c/e/r' is gathered over r first. Types are long because all axes stand in them:
rows are split over r, d and e, positions over c, weights over all.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import train
from jax_extra import explicit_activation_checkpointing, fold_in_str, save_for_backward
from kernels import blockwise
from kernels.attention import KERNELS, chosen, of_part, usable
from kernels.ring import ring
from runtime.check import batch_shapes, check_sizes, report_check
from runtime.config.command_line import run
from runtime.config.keys import Count, NotNegative, Positive, RunConfig, Steps
from runtime.run import Run, start, with_shardings
from shardlib import shardops
from shardlib.products import Float8, float8_scale, product
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import Array, bool_, f32, i32, narrowed, pytree_dataclass, u32
from shardlib.typed import typed
from train import act, adamw_step, learning_rate


# == Hyperparameters ===================================================================================================
@dataclass(frozen=True, kw_only=True)
class Mesh:  # in the order of its axes: neighbours along the last one are nearest to each other
    r: Count = 1  # replicas of the weights of a step, best one a host; master weights and Adam state are split over it
    d: Count = 1  # as in train.py
    c: Count = 1  # context: the positions of a row, and weights as over d
    e: Count = 1  # experts; rows and all other weights as over d
    t: Count = 1  # as in train.py


@dataclass(frozen=True, kw_only=True)
class Model(train.Model):
    experts: Steps = 0  # E, each with a d_ff of model.d_ff; 0: one feed-forward network for all tokens
    experts_per_token: Steps = 0  # X, how many of them a token goes to
    shared_experts: Steps = 0  # further ones, to which every token goes
    # An expert's slots in a row, over what it gets on average; tokens beyond them are dropped; null: none is dropped.
    capacity: Positive | None = None
    # How rows meet over c. auto: heads are dealt out, or, with more devices than heads, keys gathered; ring: keys are
    # passed on from device to device, for rows whose gathered keys do not fit.
    context: Literal['auto', 'ring'] = 'auto'
    fp8: bool = False  # products of layers with their weights are of 8-bit numbers, and half as much is gathered

    def __post_init__(self) -> None:
        if self.fp8 and self.experts:
            raise ValueError('fp8: expected false in a mixture of experts, whose products have no 8-bit form')
        if not self.experts and (self.experts_per_token or self.shared_experts or self.capacity):
            raise ValueError('experts: expected 1 or more, since another key of a mixture of experts is set')
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f'experts_per_token: expected 1 to model.experts = {self.experts}')


@dataclass(frozen=True, kw_only=True)
class Training(train.Training):
    # What a layer keeps: what says so, on the device or in the host's memory; or its input.
    save_for_backward: Literal['everything', 'on_host', 'inputs'] = 'everything'
    balance_loss: NotNegative = 0.01  # factor of the loss that is least where all experts get as many tokens
    router_z_loss: NotNegative = 0.001  # factor of the loss that keeps the router's logits small


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    mesh: Mesh = field(default_factory=Mesh)
    model: Model
    training: Training


# == Batch and weights =================================================================================================
@pytree_dataclass
class TokenBatch:  # each device along c has the whole rows: 6 bytes a token
    targets: u32['B/r/d/e L']
    is_seq_start: bool_['B/r/d/e L']
    is_target: bool_['B/r/d/e L']


@pytree_dataclass
class Layer:
    ln1: f32['M/d/c/e/t/r']
    ln2: f32['M/d/c/e/t/r']
    w_q: f32['M/d/c/e/r Q K/t D']
    w_kv: f32['2 M/d/c/e/r K/t D']
    w_o: f32['M/d/c/e/r Q K/t D']
    w_gate: f32['M/d/c/e/r F/t'] | None  # the network, or the shared experts, to which all tokens go
    w_up: f32['M/d/c/e/r F/t'] | None
    w_down: f32['M/d/c/e/r F/t'] | None
    router: f32['M/d/c/e/t/r E'] | None = None
    expert_gate: f32['E/e M/d/c/r H/t'] | None = None
    expert_up: f32['E/e M/d/c/r H/t'] | None = None
    expert_down: f32['E/e M/d/c/r H/t'] | None = None


@pytree_dataclass
class Weights:
    embed: f32['V/t M/d/c/e/r']
    unembed: f32['V/t M/d/c/e/r']
    transformer: Array['layers', Layer]
    final_layer_norm: f32['M/d/c/e/t/r']


@pytree_dataclass
class State:
    weights: Weights  # float32; with the two moments 12 bytes a parameter, divided over all devices
    adam_mu: Weights
    adam_nu: Weights


@pytree_dataclass
class Routing:
    """What a layer's router did with a microbatch."""

    balance: f32['+r +d +c +e']  # 1 where all experts get as many tokens
    z: f32['+r +d +c +e']  # the mean square of log sum exp of a token's logits
    load: f32['E']  # each expert's share of the tokens' choices; they add up to 1
    dropped: f32['+r +d +c +e']  # the share of choices without a slot


@pytree_dataclass
class MixtureMetrics(train.Metrics):
    balance_loss: f32['']  # mean over layers, without its factor; 1 where all experts get as many tokens
    router_z_loss: f32['']  # mean over layers, without its factor
    dropped: f32['']  # share of the tokens' choices that found no slot
    largest_load: f32['']  # of all experts of all layers, over the even share
    load: f32['E']  # each expert's share of the choices over the even share, mean over layers


def init_state(model: Model, seed: jax.Array) -> State:
    """The first state; the weights that train.py has too are the same as there."""
    dense = model.shared_experts if model.experts else 1
    weights = train.init_state(replace(model, d_ff=max(dense, 1) * model.d_ff), seed).weights
    layer = Layer(**vars(weights.transformer))
    if not dense:
        layer = replace(layer, w_gate=None, w_up=None, w_down=None)
    if model.experts:
        layers, M, H, E = model.layers, model.d_model, model.d_ff, model.experts

        def normal(name, shape, fan_in):
            key = fold_in_str(jax.random.key(seed), name)
            return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) / (0.87962566 * fan_in**0.5)

        layer = replace(
            layer,
            router=normal('router', (layers, M, E), M),
            expert_gate=normal('expert_gate', (layers, E, M, H), M),
            expert_up=normal('expert_up', (layers, E, M, H), M),
            expert_down=normal('expert_down', (layers, E, M, H), H),
        )
    weights = Weights(**{**vars(weights), 'transformer': layer})
    return State(weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)))


def decayed(weights: Weights) -> Weights:
    """A factor of weight_decay for each of the weights: of matrices, not of norms, embeddings and routers."""

    def factor(path, _):
        return float(path[-1].name.startswith(('w_', 'expert_')))

    return jax.tree_util.tree_map_with_path(factor, weights)


# == Replicas ==========================================================================================================
@typed
def dims_of(weights: Weights) -> list[str]:
    """How each of the weights lies at rest: 'V/t M/d/c/e/r'. Within a step it is the same along r."""
    return [str(array.spec) for array in jax.tree.leaves(narrowed(Weights, weights))]


@typed
def gathered_over_replicas(mesh: Mesh, weights: Weights):
    """The weights of a step, float32, the same along r. Matrices travel as they will be used: between hosts 2 bytes a
    parameter of the devices' share, and 4 of norms and routers. Held in a step: 4 bytes a parameter of the share."""

    def gather(at_rest, w):
        is_matrix = '/t/r' not in at_rest
        dtype = act if mesh.r > 1 and is_matrix else None  # of one replica they are not rounded, nor copied
        return shardops.all_gather(f'{at_rest} -> {at_rest.replace("/r", "")}', w, dtype=dtype).astype(jnp.float32)

    leaves, tree = jax.tree.flatten(weights)
    return jax.tree.unflatten(tree, map(gather, dims_of(weights), leaves))


@typed
def scattered_over_replicas(weights: Weights, gradient) -> Weights:
    """The gradient at rest, of one that is pending over r: once a step, 4 bytes a parameter of the share."""

    def scatter(at_rest, g):
        return shardops.psum_scatter(f'{at_rest.replace("/r", "")} +r -> {at_rest}', g)

    leaves, tree = jax.tree.flatten(gradient)
    return jax.tree.unflatten(tree, map(scatter, dims_of(weights), leaves))


# == Attention =========================================================================================================
@typed
def rms_norm(x: act['B/r/d/e L/c M'], scale: f32['M'], eps: float) -> act['B/r/d/e L/c M']:
    """x / sqrt(mean(x²) + eps) · scale, in float32 (Zhang and Sennrich 2019, section 4)."""
    x = x.astype(jnp.float32)
    mean_square = shardops.sum_unreduced('B/r/d/e L/c M -> B/r/d/e L/c', x * x) / x.shape[-1]
    return (x * lax.rsqrt(mean_square + eps)[:, :, None] * scale[None, None]).astype(act.dtype)


@typed
def rotary(x: act['B/r/d/e L/c Q K/t D'], position: i32['L/c'], base: float) -> act['B/r/d/e L/c Q K/t D']:
    """Rotates dims i and i + D/2 by position · base^(-i / (D/2)) (Su et al. 2021, 3.2.2; there neighbours pair)."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position.astype(jnp.float32)[:, None] * frequency[None]
    sin, cos = jnp.sin(angle)[None, :, None, None], jnp.cos(angle)[None, :, None, None]
    x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(act.dtype)


def deals_heads(mesh: Mesh, model: Model) -> bool:
    """Whether attention deals out its heads over c; else each device keeps its positions and keys come to it."""
    return mesh.c == 1 or (model.context == 'auto' and model.n_kv % (mesh.t * mesh.c) == 0)


def in_order(mesh: Mesh, model: Model, whole):
    """Rows, 'B/r/d/e L' or 'L', in the order in which their positions lie on the devices. Where keys come, each device
    has some from the front and some from the end, else the last one would have nearly all pairs of positions."""
    return whole if deals_heads(mesh, model) else whole[..., blockwise.dealt(whole.shape[-1], mesh.c)]


@typed
def dealt(mesh: Mesh, model: Model, whole):
    """Each device's positions of rows that all devices along c have."""
    spec = 'L -> L/c' if whole.ndim == 1 else 'B/r/d/e L -> B/r/d/e L/c'
    return shardops.slice(spec, in_order(mesh, model, whole))


@pytree_dataclass
class Places:
    """Where tokens stand: in whole rows, in a device's part of them, and as the keys that come to it."""

    segment: i32['B/r/d/e L']
    position: i32['L/c']
    own_segment: i32['B/r/d/e L/c']
    key_position: i32['S']
    key_segment: i32['B/r/d/e S']


@typed
def places_of(mesh: Mesh, model: Model, segment: i32['B/r/d/e L']) -> Places:
    position = jnp.arange(segment.shape[1], dtype=jnp.int32)
    own = [dealt(mesh, model, each) for each in (position, segment)]
    return Places(segment, *own, *[in_order(mesh, model, each) for each in (position, segment)])


@typed
def written_out(L: str, K: str, q, k, v, position, key_position, segment, key_segment):
    """Attention by plain products. L and K say how queries and heads lie: 'L' and 'K/t/c', or 'L/c' and 'K/t'."""
    allowed = segment[:, :, None] == key_segment[:, None, :]
    allowed = allowed & (position[:, None] >= key_position[None])[None]
    logits = shardops.einsum_unreduced(
        f'B/r/d/e {L} Q {K} D, B/r/d/e S {K} D -> B/r/d/e Q {K} {L} S', q, k, preferred_element_type=jnp.float32
    )
    logits = jnp.where(allowed[:, None, None], logits, -1e30)
    largest = shardops.pmax(f'B/r/d/e Q {K} {L} S -> B/r/d/e Q {K} {L}', lax.stop_gradient(logits))
    e = jnp.exp(logits - largest[..., None])
    total = shardops.sum_unreduced(f'B/r/d/e Q {K} {L} S -> B/r/d/e Q {K} {L}', e)
    probs = (e / total[..., None]).astype(act.dtype)
    o = shardops.einsum_unreduced(f'B/r/d/e Q {K} {L} S, B/r/d/e S {K} D -> B/r/d/e {L} Q {K} D', probs, v)
    return save_for_backward(o)  # 2QKD/t bytes a token, spares the product of probabilities and v


@jax.named_scope('causal')  # half of its products are masked: MFU counts the other half
@typed
def attention(
    by: str,
    q: act['B/r/d/e L Q K/t/c D'],
    k: act['B/r/d/e S K/t/c D'],
    v: act['B/r/d/e S K/t/c D'],
    segment: i32['B/r/d/e L'],
) -> act['B/r/d/e L Q K/t/c D']:
    """Of whole rows, each device with its heads: causal, and only within each segment."""
    if by == 'einsum':
        position = jnp.arange(segment.shape[1])
        return written_out('L', 'K/t/c', q, k, v, position, position, segment, segment)
    kernel = KERNELS[chosen(by, act.dtype, q.shape[-1])]
    types = 'B/r/d/e L Q K/t/c D, B/r/d/e S K/t/c D, B/r/d/e S K/t/c D, B/r/d/e L -> B/r/d/e L Q K/t/c D'
    return shardops.local(types, kernel, q, k, v, segment)


@jax.named_scope('causal')
@typed
def attention_of_gathered_keys(
    by: str,
    q: act['B/r/d/e L/c Q K/t D'],
    k: act['B/r/d/e S/c K/t D'],
    v: act['B/r/d/e S/c K/t D'],
    places: Places,
) -> act['B/r/d/e L/c Q K/t D']:
    """Of a device's positions, with all keys of its rows (Llama Team 2024, 3.3.2), which backward gathers again. By
    'einsum', or in blocks, whichever kernel is asked for: the others count positions by themselves."""
    k = shardops.all_gather('B/r/d/e S/c K/t D -> B/r/d/e S K/t D', k)  # 2KD/t bytes for each position of others
    v = shardops.all_gather('B/r/d/e S/c K/t D -> B/r/d/e S K/t D', v)
    of_both = places.position, places.key_position, places.own_segment, places.key_segment
    if by == 'einsum':
        return written_out('L/c', 'K/t', q, k, v, *of_both)
    types = 'B/r/d/e L/c Q K/t D, B/r/d/e S K/t D, B/r/d/e S K/t D, L/c, S, B/r/d/e L/c, B/r/d/e S'
    return shardops.local(f'{types} -> B/r/d/e L/c Q K/t D', of_part, q, k, v, *of_both)


@jax.named_scope('causal')
@typed
def attention_in_a_ring(
    q: act['B/r/d/e L/c Q K/t D'],
    k: act['B/r/d/e S/c K/t D'],
    v: act['B/r/d/e S/c K/t D'],
    position: i32['L/c'],
    segment: i32['B/r/d/e L/c'],
) -> act['B/r/d/e L/c Q K/t D']:
    """Of a device's positions, with keys that are passed on from device to device (Liu et al. 2023), in blocks: two
    parts of the keys are in memory at a time, and nothing of a turn is kept.

    Sends in each of c - 1 turns 4KD/t bytes a token of a part; backward that again, and in c turns 8KD/t of gradients.
    """
    kept, passed = 'B/r/d/e L/c Q K/t D', 'B/r/d/e [S/c] K/t D'
    types = f'{kept}, {passed}, {passed}, L/c, [S/c], B/r/d/e L/c, B/r/d/e [S/c] -> {kept}'
    both = blockwise.forward_of_part, blockwise.backward_of_part
    return ring(types, *both, q, k, v, position, position, segment, segment)


@typed
def attention_half(
    mesh: Mesh,
    model: Model,
    x: act['B/r/d/e L/c M/t'],
    scale: f32['M'],
    weights: tuple,
    places: Places,
) -> act['B/r/d/e L/c M/t']:
    """A layer's first half, of its gathered weights: q, k, v and o."""
    w_q, w_k, w_v, w_o = weights
    with jax.named_scope('attention'):
        gathered = shardops.all_gather('B/r/d/e L/c M/t -> B/r/d/e L/c M', x)
        gathered = save_for_backward(gathered)  # 2M bytes a token, in the place of the input's 2M/t
        normed = rms_norm(gathered, scale, model.norm_eps)
        q = product('B/r/d/e L/c M, M Q K/t D -> B/r/d/e L/c Q K/t D', normed, w_q)
        q = rotary(q, places.position, model.rope_max_timescale)
        k = product('B/r/d/e L/c M, M K/t D -> B/r/d/e L/c K/t D', normed, w_k)
        k = rotary(k[:, :, None], places.position, model.rope_max_timescale)[:, :, 0]
        v = product('B/r/d/e L/c M, M K/t D -> B/r/d/e L/c K/t D', normed, w_v)
        if deals_heads(mesh, model):  # whole rows of some heads, in the place of some positions of all heads
            q = shardops.all_to_all('B/r/d/e L/c Q K/t D -> B/r/d/e L Q K/t/c D', q)
            k = shardops.all_to_all('B/r/d/e S/c K/t D -> B/r/d/e S K/t/c D', k)
            v = shardops.all_to_all('B/r/d/e S/c K/t D -> B/r/d/e S K/t/c D', v)
        q = save_for_backward(q)  # 2QKD/t bytes a token, spares a product with w_q, and sending it
        k = save_for_backward(k)  # 2KD/t bytes a token, spares the product with w_k, and sending it
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v, and sending it
        if deals_heads(mesh, model):
            o = attention(model.attention, q, k, v, places.segment)
            o = shardops.all_to_all('B/r/d/e L Q K/t/c D -> B/r/d/e L/c Q K/t D', o)
        elif model.context == 'ring':
            o = attention_in_a_ring(q, k, v, places.position, places.own_segment)
        else:
            o = attention_of_gathered_keys(model.attention, q, k, v, places)
        y = product('B/r/d/e L/c Q K/t D, M Q K/t D -> B/r/d/e L/c M +t', o, w_o)
        return x + shardops.psum_scatter('B/r/d/e L/c M +t -> B/r/d/e L/c M/t', y)


@typed
def feed_forward(normed: act['B/r/d/e L/c M'], w_gate, w_up, w_down) -> act['B/r/d/e L/c M/t']:
    gate = product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', normed, w_gate)
    gate = save_for_backward(gate)  # 2F/t bytes a token, spares a product with w_gate
    up = product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', normed, w_up)
    up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
    hidden = jax.nn.silu(gate) * up
    y = product('B/r/d/e L/c F/t, M F/t -> B/r/d/e L/c M +t', hidden, w_down)
    return shardops.psum_scatter('B/r/d/e L/c M +t -> B/r/d/e L/c M/t', y)


# == Experts ===========================================================================================================
Choices = tuple[act['B/r/d/e L/c X'], i32['B/r/d/e L/c X']]  # of each token its experts' weights and their numbers
Experts = tuple[act['E/e M H/t'], act['E/e M H/t'], act['E/e M H/t']]  # w_gate, w_up and w_down of each


@typed
def route(model: Model, x: act['B/r/d/e L/c M'], router: f32['M E']) -> tuple[Choices, Routing]:
    """Of each token's chosen experts the weight and the number, and the losses of the choice.

    The weights add up to 1; that of a single expert is its probability, else the router would have no gradient (Fedus
    et al. 2021, equation 2). Sends E numbers of float32, all-reduced over r, d, c and e.
    """
    E = router.shape[1]
    logits = shardops.einsum_unreduced('B/r/d/e L/c M, M E -> B/r/d/e L/c E', x.astype(jnp.float32), router)
    probs = jax.nn.softmax(logits)
    weight, choice = lax.top_k(probs, model.experts_per_token)
    if model.experts_per_token > 1:
        weight = weight / shardops.sum_unreduced('B/r/d/e L/c X -> B/r/d/e L/c', weight)[..., None]

    tokens = x.shape[0] * x.shape[1] * math.prod(map(shardops.axis_size, 'rdce'))
    took = jax.nn.one_hot(choice, E, dtype=jnp.float32)
    load = shardops.sum_unreduced('B/r/d/e L/c X E -> E +r +d +c +e', took) / (tokens * model.experts_per_token)
    load = shardops.psum('E +r +d +c +e -> E', load)
    load = save_for_backward(load)  # 4E bytes, spares the sum over all devices
    # Load balance (Fedus et al. 2021, equations 4 to 6): an expert's share and mean probability, of all tokens.
    mean = shardops.sum_unreduced('B/r/d/e L/c E -> E +r +d +c +e', probs) / tokens
    balance = shardops.sum_unreduced('E +r +d +c +e -> +r +d +c +e', mean * load) * E
    square = jax.nn.logsumexp(logits, axis=-1) ** 2  # Zoph et al. 2022, equation 5
    z = shardops.sum_unreduced('B/r/d/e L/c -> +r +d +c +e', square) / tokens
    routing = Routing(balance=balance, z=z, load=load, dropped=shardops.zeros('+r +d +c +e', f32))
    return (weight.astype(act.dtype), choice), routing


def slots(choice, E, C):
    """Part by part: of each (token, choice) its slot, of E·C, or the one past the last where its expert has none left;
    and whether it has none.

    A row's earlier tokens come first, so that no token is dropped for one that follows it.
    """
    pairs = choice.reshape(choice.shape[0], -1)
    one_hot = jax.nn.one_hot(pairs, E, dtype=jnp.int32)
    place = jnp.sum(jnp.cumsum(one_hot, axis=1) * one_hot, axis=-1) - 1
    slot, lost = jnp.where(place < C, pairs * C + place, E * C), place >= C
    return slot.reshape(choice.shape), lost.astype(jnp.float32).reshape(choice.shape)


def dispatch(x, slot, E, C):
    """Part by part: the tokens in their slots, 'E B C M'; zero in slots that are free."""
    rows, top, M = x.shape[0], slot.shape[-1], x.shape[-1]
    taken = jnp.zeros((rows, E * C + 1, M), x.dtype)
    fill = jax.vmap(lambda taken, slot, tokens: taken.at[slot].set(tokens))
    taken = fill(taken, slot.reshape(rows, -1), jnp.repeat(x, top, axis=1))
    return jnp.moveaxis(taken[:, :-1].reshape(rows, E, C, M), 1, 0)


def combine(y, weight, slot):
    """Part by part: what came back in the slots, 'E B C M', weighted, where the tokens are."""
    y = jnp.moveaxis(y, 0, 1).reshape(slot.shape[0], -1, y.shape[-1])
    y = jnp.pad(y, ((0, 0), (0, 1), (0, 0)))
    y = jnp.take_along_axis(y, slot.reshape(slot.shape[0], -1)[..., None], axis=1).reshape(*slot.shape, y.shape[-1])
    return jnp.sum(y * weight[..., None], axis=2)


@typed
def experts_with_capacity(
    mesh: Mesh, model: Model, x: act['B/r/d/e L/c M'], choices: Choices, experts: Experts
) -> tuple[act['B/r/d/e L/c M/t'], f32['+r +d +c +e']]:
    """The chosen experts' results, weighted; and the share of choices that were dropped (Lepikhin et al. 2020, 2.2).

    Each row has C slots of each expert, the same number on every mesh; of a row on c devices each fills its C/c. Sends
    all-to-all over e, of the tokens' M there, 2·capacity·X·M bytes a token, and of M/t back; as much backward.
    """
    (weight, choice), (w_gate, w_up, w_down) = choices, experts
    E, length = model.experts, x.shape[1] * shardops.axis_size('c')
    average = length * model.experts_per_token / E
    C = math.ceil(min(model.capacity * average, length))
    C = -(-C // math.lcm(8, mesh.c)) * math.lcm(8, mesh.c)  # a multiple of 8, and of the devices that share a row
    own = C // int(shardops.axis_size('c'))
    into = functools.partial(slots, E=E, C=own)
    slot, lost = shardops.local('B/r/d/e L/c X -> B/r/d/e L/c X, B/r/d/e L/c X', into, choice)
    into = functools.partial(dispatch, E=E, C=own)
    sent = shardops.local('B/r/d/e L/c M, B/r/d/e L/c X -> E B/r/d/e C/c M', into, x, slot, E=E, C=C)
    there = shardops.all_to_all('E B/r/d/e C/c M -> E/e B/r/d C/c M', sent)
    there = save_for_backward(there)  # 2·capacity·XM bytes a token, spares sending it again
    gate = shardops.einsum_unreduced('E/e B/r/d C/c M, E/e M H/t -> E/e B/r/d C/c H/t', there, w_gate)
    gate = save_for_backward(gate)  # 2·capacity·XH/t bytes a token, spares a product with w_gate
    up = shardops.einsum_unreduced('E/e B/r/d C/c M, E/e M H/t -> E/e B/r/d C/c H/t', there, w_up)
    up = save_for_backward(up)  # 2·capacity·XH/t bytes a token, spares a product with w_up
    hidden = jax.nn.silu(gate) * up
    y = shardops.einsum_unreduced('E/e B/r/d C/c H/t, E/e M H/t -> E/e B/r/d C/c M +t', hidden, w_down)
    y = shardops.psum_scatter('E/e B/r/d C/c M +t -> E/e B/r/d C/c M/t', y)
    back = shardops.all_to_all('E/e B/r/d C/c M/t -> E B/r/d/e C/c M/t', y)
    back = save_for_backward(back)  # 2·capacity·XM/t bytes a token, spares the product with w_down, and sending it
    types = 'E B/r/d/e C/c M/t, B/r/d/e L/c X, B/r/d/e L/c X -> B/r/d/e L/c M/t'
    y = shardops.local(types, combine, back, weight, slot)
    lost = shardops.sum_unreduced('B/r/d/e L/c X -> +r +d +c +e', lost)
    choices = x.shape[0] * length * model.experts_per_token * math.prod(map(shardops.axis_size, 'rde'))
    return y, lost / choices


def multiplied(x, weight, choice, held, w_gate, w_up, w_down):
    """Part by part: the weighted results of the experts that a device holds, numbers `held`, for each token of x.

    (token, choice) pairs are sorted by expert, those of other devices last; each expert multiplies its group.
    """
    top, count = choice.shape[-1], held.shape[0]
    own = choice.reshape(-1) - held[0]
    own = jnp.where((own >= 0) & (own < count), own, count)
    order = jnp.argsort(own)
    sizes = jnp.bincount(own, length=count).astype(jnp.int32)
    is_own = (own[order] < count)[:, None]  # past the last group ragged_dot's rows are not promised to be zero
    tokens = jnp.where(is_own, x.reshape(-1, x.shape[-1])[order // top], 0)
    hidden = jax.nn.silu(lax.ragged_dot(tokens, w_gate, sizes)) * lax.ragged_dot(tokens, w_up, sizes)
    y = lax.ragged_dot(hidden, w_down.swapaxes(1, 2), sizes) * weight.reshape(-1)[order][:, None]
    y = jnp.where(is_own, y, 0)
    return jnp.zeros((x.shape[0] * x.shape[1], x.shape[2]), y.dtype).at[order // top].add(y).reshape(x.shape)


@typed
def experts_without_loss(
    model: Model, x: act['B/r/d/e L/c M'], choices: Choices, experts: Experts
) -> act['B/r/d/e L/c M/t']:
    """The chosen experts' results, weighted; no token is dropped. Each device has the tokens of all devices along e,
    2M bytes a token, and multiplies those of its own experts; one reduce-scatter adds what they found."""
    x = shardops.all_gather('B/r/d/e L/c M -> B/r/d L/c M', x)
    weight = shardops.all_gather('B/r/d/e L/c X -> B/r/d L/c X', choices[0])
    choice = shardops.all_gather('B/r/d/e L/c X -> B/r/d L/c X', choices[1])
    held = shardops.slice('E -> E/e', jnp.arange(model.experts, dtype=jnp.int32))
    types = 'B/r/d L/c M, B/r/d L/c X, B/r/d L/c X, E/e, E/e M H/t, E/e M H/t, E/e M H/t -> B/r/d L/c M +e +t'
    y = shardops.local(types, multiplied, x, weight, choice, held, *experts)
    return shardops.psum_scatter('B/r/d L/c M +e +t -> B/r/d/e L/c M/t', y)


@typed
def mixture(mesh: Mesh, model: Model, gather, x: act['B/r/d/e L/c M'], w) -> tuple[act['B/r/d/e L/c M/t'], Routing]:
    """What a layer's experts, which it gathers, make of the tokens; and what its router did."""
    router = shardops.all_gather('M/d/c/e/t E -> M E', w.router)
    w_gate = gather('E/e M/d/c H/t -> E/e M H/t', w.expert_gate)
    w_up = gather('E/e M/d/c H/t -> E/e M H/t', w.expert_up)
    w_down = gather('E/e M/d/c H/t -> E/e M H/t', w.expert_down)
    choices, routing = route(model, x, router)
    if model.capacity is None:
        return experts_without_loss(model, x, choices, (w_gate, w_up, w_down)), routing
    y, dropped = experts_with_capacity(mesh, model, x, choices, (w_gate, w_up, w_down))
    return y, replace(routing, dropped=dropped)


# == Products in 8 bits ================================================================================================
@typed
def float8_scales(layers) -> dict[str, f32['layers']]:
    """Of each matrix of each layer one number, the same on all devices: 4 bytes, all-reduced."""
    dims = {'w_q': 'Q K/t D', 'w_kv': 'K/t D', 'w_o': 'Q K/t D', 'w_gate': 'F/t', 'w_up': 'F/t', 'w_down': 'F/t'}
    dims = {name: f'layers {"2 " * (name == "w_kv")}M/d/c/e {rest}' for name, rest in dims.items()}
    return {name: float8_scale(f'{spec} -> layers', getattr(layers, name)) for name, spec in dims.items()}


def in_float8(w: Layer, scales: dict) -> Layer:
    """The layer with matrices that are gathered and multiplied as 8-bit numbers, of these scales."""
    w = replace(w, **{name: Float8(getattr(w, name) / scale, scale) for name, scale in scales.items()})
    return replace(w, w_kv=[Float8(each, w.w_kv.scale) for each in w.w_kv.values])


# == Forward pass ======================================================================================================
@typed
def forward(
    mesh: Mesh, model: Model, training: Training, bos_id: int, weights, batch: TokenBatch
) -> tuple[act['B/r/d/e L/c M'], Array['layers', Routing] | None]:
    """The hidden states before the unembedding, of each device's positions; and what the routers did.

    mesh: what is done is chosen by it; nothing is counted by it. weights: as `gathered_over_replicas` returns them.
    """
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=training.gradient_reduce_dtype)

    @explicit_activation_checkpointing  # else a mask of M bytes a token
    def embed(table: f32['V/t M/d/c/e'], inputs: u32['B/r/d/e L/c']) -> act['B/r/d/e L/c M/t']:
        table = gather('V/t M/d/c/e -> V/t M', table)
        x = shardops.index_unreduced('[V/t] M, B/r/d/e L/c -> B/r/d/e L/c M +t', table, inputs)
        return shardops.psum_scatter('B/r/d/e L/c M +t -> B/r/d/e L/c M/t', x)

    with jax.named_scope('embed'):  # inputs, segments and positions are those of whole rows: then each takes its part
        first = batch.is_seq_start.at[:, 0].set(True)  # a row's first position starts a segment
        inputs: u32['B/r/d/e L'] = jnp.where(first, jnp.uint32(bos_id), jnp.roll(batch.targets, 1, axis=1))
        segment: i32['B/r/d/e L'] = jnp.cumsum(first, axis=1, dtype=jnp.int32)
        places = places_of(mesh, model, segment)
        x = embed(weights.embed, dealt(mesh, model, inputs))

    # The norms of all layers travel together, in float32: they are small. 8M bytes a layer, held throughout.
    ln1 = shardops.all_gather('layers M/d/c/e/t -> layers M', weights.transformer.ln1)
    ln2 = shardops.all_gather('layers M/d/c/e/t -> layers M', weights.transformer.ln2)

    scales = float8_scales(weights.transformer) if model.fp8 else None

    # Bytes of one layer and one token of the device's positions, in bfloat16, as in train.py.
    kept = () if training.save_for_backward == 'inputs' else ('save_for_backward',)

    @functools.partial(explicit_activation_checkpointing, names=kept, on_host=training.save_for_backward == 'on_host')
    def layer(x: act['B/r/d/e L/c M/t'], ws):
        ln1, ln2, w, scales = ws
        w = in_float8(w, scales) if model.fp8 else w
        w_q = gather('M/d/c/e Q K/t D -> M Q K/t D', w.w_q)
        w_k, w_v = [gather('M/d/c/e K/t D -> M K/t D', each) for each in w.w_kv]
        w_o = gather('M/d/c/e Q K/t D -> M Q K/t D', w.w_o)

        x = attention_half(mesh, model, x, ln1, (w_q, w_k, w_v, w_o), places)

        with jax.named_scope('ffn'):
            gathered = shardops.all_gather('B/r/d/e L/c M/t -> B/r/d/e L/c M', x)
            gathered = save_for_backward(gathered)  # 2M bytes a token, spares the product with w_o, its sum, the gather
            normed = rms_norm(gathered, ln2, model.norm_eps)
            if w.w_gate is not None:
                w_gate = gather('M/d/c/e F/t -> M F/t', w.w_gate)
                w_up = gather('M/d/c/e F/t -> M F/t', w.w_up)
                w_down = gather('M/d/c/e F/t -> M F/t', w.w_down)
                x = x + feed_forward(normed, w_gate, w_up, w_down)
            if not model.experts:
                return x, None
            y, routing = mixture(mesh, model, gather, normed, w)
            return x + y, routing

    x, routing = lax.scan(layer, x, (ln1, ln2, weights.transformer, scales), unroll=training.unroll_layers)

    with jax.named_scope('final_norm'):
        scale = shardops.all_gather('M/d/c/e/t -> M', weights.final_layer_norm)
        gathered = shardops.all_gather('B/r/d/e L/c M/t -> B/r/d/e L/c M', x)
        # Keeps `gathered`, 2M bytes a token, and not the norm's float32 values, 8M.
        normed = explicit_activation_checkpointing(functools.partial(rms_norm, eps=model.norm_eps))(gathered, scale)
        return normed, routing


# == Loss ==============================================================================================================
LOSS_CHUNK = train.LOSS_CHUNK  # of a device's positions


@typed
def loss_sum(
    mesh: Mesh, model: Model, training: Training, bos_id: int, weights, batch: TokenBatch
) -> tuple[f32['+r +d +c +e +t'], Array['layers', Routing] | None]:
    """The sum of -log softmax over all targets; and what the routers did. V is split over t: 8 bytes a token are sent,
    4 backward, no logits."""
    x, routing = forward(mesh, model, training, bos_id, weights, batch)
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=training.gradient_reduce_dtype)
    # Float32, so that its gradient adds up over chunks in float32 (4VM/t bytes each); the products are in bfloat16.
    unembed = gather('V/t M/d/c/e -> V/t M', weights.unembed).astype(jnp.float32)

    @explicit_activation_checkpointing
    def chunk_loss(
        unembed: f32['V/t M'], x: act['B/r/d/e L/c M'], labels: tuple[u32['B/r/d/e L/c'], bool_['B/r/d/e L/c']]
    ) -> f32['+r +d +c +e +t']:
        targets, is_target = labels
        w = unembed.astype(act.dtype)
        logits = shardops.einsum_unreduced(
            'B/r/d/e L/c M, V/t M -> B/r/d/e L/c V/t', x, w, preferred_element_type=jnp.float32
        )
        logits = save_for_backward(logits)  # 4V/t bytes a token of one chunk, spares the product
        largest = shardops.pmax('B/r/d/e L/c V/t -> B/r/d/e L/c', lax.stop_gradient(logits))
        largest = save_for_backward(largest)  # 4 bytes a token of one chunk, spares the maximum over t
        total = shardops.sum_unreduced('B/r/d/e L/c V/t -> B/r/d/e L/c +t', jnp.exp(logits - largest[..., None]))
        total = shardops.psum('B/r/d/e L/c +t -> B/r/d/e L/c', total)
        total = save_for_backward(total)  # 4 bytes a token of one chunk, spares the sum over t
        log_normalizer = largest + jnp.log(total)
        # The target's logit is on one device of t and zero on the others: it stays a pending sum.
        at_target = shardops.index_unreduced('B/r/d/e L/c [V/t], B/r/d/e L/c -> B/r/d/e L/c +t', logits, targets)
        loss = shardops.pending('B/r/d/e L/c -> B/r/d/e L/c +t', log_normalizer) - at_target
        return shardops.sum_unreduced('B/r/d/e L/c +t -> +r +d +c +e +t', loss * is_target.astype(jnp.float32))

    # Each device's positions in chunks of its own, as many on every mesh: the configured one says how many.
    own = batch.targets.shape[1] // mesh.c
    chunks = own // max(size for size in range(1, LOSS_CHUNK + 1) if own % size == 0)
    x = shardops.regroup('B/r/d/e L/c M -> B/r/d/e chunks P/c M', x, chunks=chunks)

    def in_chunks(whole):
        part = shardops.regroup('B/r/d/e L/c -> B/r/d/e chunks P/c', dealt(mesh, model, whole), chunks=chunks)
        return jnp.moveaxis(part, 1, 0)

    labels = in_chunks(batch.targets), in_chunks(batch.is_target)
    # Each chunk's gradient is computed right after its loss: of x 2M bytes a token are kept, in the place of x.
    return shardops.sum_over_chunks(chunk_loss, unembed, jnp.moveaxis(x, 1, 0), labels), routing


# == Optimizer and step ================================================================================================
@typed
def squared_norms(tree: Weights) -> f32['weights']:
    """Of each of the weights, of their gradients or changes, all layers together; one sum over all devices."""
    squares = [shardops.sum_unreduced('... -> +r +d +c +e +t', w * w) for w in jax.tree.leaves(tree)]
    return shardops.psum('weights +r +d +c +e +t -> weights', jnp.stack(squares))


@typed
def count_of(batch: TokenBatch) -> f32['']:
    """The number of targets of all devices."""
    own = shardops.sum_unreduced('B/r/d/e L -> +r +d +e', batch.is_target.astype(jnp.float32))
    return shardops.psum('+r +d +e -> ', own)


@typed
def updated(
    training: train.Training, decayed, squared_norms, state, skipped: u32[''], step: u32[''], loss: f32[''], gradient
):
    """The state of any model after AdamW of its clipped gradient, and train.py's metrics. `decayed` as in `adamw_step`;
    squared_norms(tree) is the model's own, of its types: what is sent, it sends."""
    with jax.named_scope('clip'):
        grad_squares: f32['weights'] = squared_norms(gradient)
        grad_norm: f32[''] = jnp.sqrt(shardops.sum_unreduced('weights -> ', grad_squares))
        clip = jnp.minimum(1.0, training.max_grad_norm / jnp.maximum(grad_norm, 1e-30))
        clipped = jax.tree.map(lambda g: clip * g, gradient)

    with jax.named_scope('adamw'):
        after = adamw_step(training, decayed, state, clipped, step)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)  # a step that is not changes nothing
        new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)

    with jax.named_scope('metrics'):
        weight_squares = squared_norms(new_state.weights)
        change_squares = squared_norms(jax.tree.map(jnp.subtract, new_state.weights, state.weights))
        metrics = train.Metrics(
            loss=loss,
            learning_rate=learning_rate(training, step),
            grad_norm=grad_norm,
            weight_norm=jnp.sqrt(shardops.sum_unreduced('weights -> ', weight_squares)),
            skipped_steps=skipped + jnp.where(finite, jnp.uint32(0), jnp.uint32(1)),
            grad_norm_of=jnp.sqrt(grad_squares),
            weight_norm_of=jnp.sqrt(weight_squares),
            update_ratio_of=jnp.sqrt(change_squares / weight_squares),
        )
    return new_state, metrics


@jax.named_scope('metrics')
@typed
def mixture_metrics(
    model: Model, training: Training, metrics: train.Metrics, routing: Array['layers', Routing]
) -> MixtureMetrics:
    """The metrics of a mixture, of what its routers did, summed over microbatches."""
    scalars = jnp.stack([routing.balance, routing.z, routing.dropped])
    scalars = shardops.psum('metrics layers +r +d +c +e -> metrics layers', scalars) / training.microbatches
    balance, z, dropped = shardops.sum_unreduced('metrics layers -> metrics', scalars) / model.layers
    load = routing.load / training.microbatches * model.experts
    return MixtureMetrics(
        **vars(metrics),
        balance_loss=balance,
        router_z_loss=z,
        dropped=dropped,
        largest_load=shardops.pmax('layers E -> ', load),
        load=shardops.sum_unreduced('layers E -> E', load) / model.layers,
    )


@typed
def training_step(
    mesh: Mesh,
    model: Model,
    training: Training,
    bos_id: int,
    state: State,
    skipped: u32[''],
    step: u32[''],
    batch: TokenBatch,
):
    """The update number `step`, from 0, and what is logged of it; of a mixture MixtureMetrics."""
    with jax.named_scope('count_targets'):
        target_count = jnp.maximum(count_of(batch), 1)

    with jax.named_scope('replicas'):
        near = gathered_over_replicas(mesh, state.weights)

    def loss(weights, batch: TokenBatch):
        value, routing = loss_sum(mesh, model, training, bos_id, weights, batch)
        value = total = value / target_count
        if routing is not None:
            balance = shardops.sum_unreduced('layers +r +d +c +e -> +r +d +c +e', routing.balance)
            z = shardops.sum_unreduced('layers +r +d +c +e -> +r +d +c +e', routing.z)
            routers = (training.balance_loss * balance + training.router_z_loss * z) / training.microbatches
            total = value + shardops.pending('+r +d +c +e -> +r +d +c +e +t', routers)
        return total, (value, routing)

    def add_microbatch(sums, batch: TokenBatch):
        # Without the barrier XLA gathers embed, unembed and the final norm before the loop and holds them throughout.
        weights, batch = lax.optimization_barrier((near, batch))
        (_, (value, routing)), gradient = shardops.value_and_grad(loss, has_aux=True)(weights, batch)
        return jax.tree.map(jnp.add, sums, (value, gradient, routing)), None

    with jax.named_scope('gradient'):
        # Each part has rows of every device.
        regroup = functools.partial(shardops.regroup, 'B/r/d/e L -> parts R/r/d/e L', parts=training.microbatches)
        rows = jax.tree.map(regroup, batch)
        routing = None
        if model.experts:
            scalar = jnp.zeros((model.layers,), jnp.float32)
            load = jnp.zeros((model.layers, model.experts), jnp.float32)
            routing = Routing(balance=scalar, z=scalar, load=load, dropped=scalar)
        zero = shardops.zeros('+r +d +c +e +t', f32), jax.tree.map(jnp.zeros_like, near), routing
        (value, gradient, routing), _ = lax.scan(add_microbatch, zero, rows)  # pending over r throughout
        value: f32[''] = shardops.psum('+r +d +c +e +t -> ', value)

    with jax.named_scope('replicas'):
        gradient: Weights = scattered_over_replicas(state.weights, gradient)

    new_state, metrics = updated(training, decayed(state.weights), squared_norms, state, skipped, step, value, gradient)
    return new_state, metrics if routing is None else mixture_metrics(model, training, metrics, routing)


@typed
def validation_step(
    mesh: Mesh,
    model: Model,
    training: Training,
    bos_id: int,
    weights: Weights,
    loss: f32[''],
    targets: f32[''],
    batch: TokenBatch,
) -> tuple[f32[''], f32['']]:
    """Adds a batch's losses and its number of targets to the sums so far."""
    near = gathered_over_replicas(mesh, weights)
    value, _ = loss_sum(mesh, model, training, bos_id, near, batch)
    return loss + shardops.psum('+r +d +c +e +t -> ', value), targets + count_of(batch)


# == Main loop =========================================================================================================
def mapped_steps(config: Config, bos_id: int) -> tuple[typed_shard_map, typed_shard_map]:
    """The training step and the validation step over the mesh."""
    act.dtype = config.model.compute_dtype
    given = config.mesh, config.model, config.training, bos_id
    OwnState = narrowed(State, jax.eval_shape(functools.partial(init_state, config.model), np.uint32(0)))
    OwnMetrics = MixtureMetrics if config.model.experts else train.Metrics

    def step(state: OwnState, skipped: u32[''], step: u32[''], batch: TokenBatch) -> tuple[OwnState, OwnMetrics]:
        return training_step(*given, state, skipped, step, batch)

    def validate(
        weights: OwnState.weights, loss: f32[''], targets: f32[''], batch: TokenBatch
    ) -> tuple[f32[''], f32['']]:
        return validation_step(*given, weights, loss, targets, batch)

    step.__name__, validate.__name__ = training_step.__name__, validation_step.__name__
    return typed_shard_map(step), typed_shard_map(validate)


def shapes(config: Config) -> tuple[State, TokenBatch]:
    """The global shapes of the state and of a batch. Raises RunError for sizes that the mesh cannot split."""
    state = jax.eval_shape(functools.partial(init_state, config.model), np.uint32(0))
    check_sizes(config, i32['L/c'], jax.ShapeDtypeStruct((config.training.tokens.len,), jnp.int32))
    if not deals_heads(config.mesh, config.model):
        check_sizes(config, i32['2 l/c'], jax.ShapeDtypeStruct((2, config.training.tokens.len // 2), jnp.int32))
    return check_sizes(config, State, state), batch_shapes(config, TokenBatch)


def main(config: Config) -> None:
    """Trains a language model on a flat-tokens data set, on any number of devices."""
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
