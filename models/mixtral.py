"""Mixtral, OLMoE and Qwen3-MoE: a router sends each token to a few of E experts, which are split over t.

A device of t computes its own experts for the tokens of all its rows; the sum over t that ends a layer's half adds
them. No token is dropped, or each expert has `capacity` slots in a row: then what it computes has a fixed size.
With the defaults the weights have the names of train_at_scale.py's mixtures: their checkpoints are read here as they
are. Legend as there: E experts, X of them chosen by a token, H d_ff of one expert, F that of all shared experts
together. models/layers.py says what a family's file holds.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_extra import fold_in_str, save_for_backward
from kernels.attention import KernelName
from models import layers
from models.layers import Mask, RopeScaling, act, enter, head_norm, heads_norm, leave, rms_norm, stored
from runtime.config.keys import Count, Even, Positive, Steps
from runtime.terminal import RunError
from shardlib import shardops
from shardlib.shardops import product
from shardlib.shardtypes import Array, f32, i32, pytree_dataclass, u32
from shardlib.typed import typed


@dataclass(frozen=True, kw_only=True)
class Model:
    d_model: Count  # M
    n_q_per_kv: Count  # Q
    n_kv: Count  # K
    d_head: Even  # D
    layers: Count
    vocab: Count  # V
    d_ff: Count  # H, of one expert
    experts: Count  # E
    experts_per_token: Count  # X
    shared_experts: Steps = 0  # further ones, to which every token goes (train_at_scale.py; no published model)
    weights_add_to_one: bool = True  # those of the chosen experts; else they are the softmax over all (OLMoE)
    capacity: Positive | None = None  # an expert's slots in a row, over what it gets on average; none: no limit
    rope_max_timescale: Positive  # base of the rotary angles
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-6  # added to the mean square in RMSNorm
    logits_scale: Positive = 1.0  # attention's logits are q·k times this; 1: the factor is in w_q
    tied: bool = False  # one table at both ends: there is no `unembed`
    qk_norm: Literal['none', 'head', 'all'] = 'none'  # of each head by itself (Qwen3), or of all together (OLMoE)
    window: Count | None = None  # positions that a query sees, its own included
    compute_dtype: Literal['bfloat16', 'float32'] = 'bfloat16'  # of activations and matrix products
    attention: KernelName = 'auto'  # of kernels/attention.py


def mask(model: Model) -> Mask:
    return Mask(model.window)


# == Weights ===========================================================================================================
@pytree_dataclass
class Layer:
    ln1: f32['M/d/t']
    ln2: f32['M/d/t']
    w_q: stored['M/d Q K/t D']
    w_kv: stored['2 M/d K/t D']
    w_o: stored['M/d Q K/t D']
    router: f32['M/d/t E']
    expert_gate: stored['E/t M/d H']
    expert_up: stored['E/t M/d H']
    expert_down: stored['E/t M/d H']
    w_gate: stored['M/d F/t'] | None = None  # the shared experts
    w_up: stored['M/d F/t'] | None = None
    w_down: stored['M/d F/t'] | None = None
    q_norm: f32['D/d/t'] | None = None
    k_norm: f32['D/d/t'] | None = None
    q_norm_all: f32['Q K/t D/d'] | None = None
    k_norm_all: f32['K/t D/d'] | None = None


@pytree_dataclass
class Weights:
    embed: stored['V/t M/d']
    unembed: stored['V/t M/d'] | None
    transformer: Array['layers', Layer]
    final_layer_norm: f32['M/d/t']


@pytree_dataclass
class Gathered:
    """What a layer multiplies with; a matrix may be `Adapted`, but for the experts'."""

    ln1: f32['M']
    ln2: f32['M']
    w_q: act['M Q K/t D']
    w_k: act['M K/t D']
    w_v: act['M K/t D']
    w_o: act['M Q K/t D']
    router: f32['M E']
    expert_gate: act['E/t M H']
    expert_up: act['E/t M H']
    expert_down: act['E/t M H']
    w_gate: act['M F/t'] | None
    w_up: act['M F/t'] | None
    w_down: act['M F/t'] | None
    q_norm: f32['D'] | None
    k_norm: f32['D'] | None
    q_norm_all: f32['Q K/t D'] | None
    k_norm_all: f32['K/t D'] | None


@pytree_dataclass
class Ends:
    """What stands before the first layer and after the last, gathered."""

    embed: act['V/t M']
    unembed: act['V/t M']
    final_layer_norm: f32['M']


def init(model: Model, seed: jax.Array) -> Weights:
    M, H, V, E = model.d_model, model.d_ff, model.vocab, model.experts
    F = model.shared_experts * H
    Q, K, D = model.n_q_per_kv, model.n_kv, model.d_head

    def normal(name, shape, fan_in, scale=1.0):
        key = fold_in_str(jax.random.key(seed), name)
        shape = shape if name.endswith('embed') else (model.layers, *shape)
        return jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) * (scale / 0.87962566 / fan_in**0.5)

    def ones(*shape, only_if=True):
        return jnp.ones((model.layers, *shape), jnp.float32) if only_if else None

    layer = Layer(
        ln1=ones(M),
        ln2=ones(M),
        w_q=normal('w_q', (M, Q, K, D), M, scale=D**-0.5 / model.logits_scale),
        w_kv=normal('w_kv', (2, M, K, D), M),
        w_o=normal('w_o', (M, Q, K, D), Q * K * D),
        router=normal('router', (M, E), M),
        expert_gate=normal('expert_gate', (E, M, H), M),
        expert_up=normal('expert_up', (E, M, H), M),
        expert_down=normal('expert_down', (E, M, H), H),
        w_gate=normal('w_gate', (M, F), M) if F else None,
        w_up=normal('w_up', (M, F), M) if F else None,
        w_down=normal('w_down', (M, F), F) if F else None,
        q_norm=ones(D, only_if=model.qk_norm == 'head'),
        k_norm=ones(D, only_if=model.qk_norm == 'head'),
        q_norm_all=ones(Q, K, D, only_if=model.qk_norm == 'all'),
        k_norm_all=ones(K, D, only_if=model.qk_norm == 'all'),
    )
    embed, unembed = normal('embed', (V, M), M), None if model.tied else normal('unembed', (V, M), M)
    return Weights(embed, unembed, layer, jnp.ones((M,), jnp.float32))


@typed
def gather_layer(w: Layer, reduce_dtype: str = 'float32') -> Gathered:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)

    def if_there(string, w, gather=shardops.all_gather):
        return None if w is None else gather(string, w)

    return Gathered(
        ln1=shardops.all_gather('M/d/t -> M', w.ln1),
        ln2=shardops.all_gather('M/d/t -> M', w.ln2),
        w_q=gather('M/d Q K/t D -> M Q K/t D', w.w_q),
        w_k=gather('M/d K/t D -> M K/t D', w.w_kv[0]),
        w_v=gather('M/d K/t D -> M K/t D', w.w_kv[1]),
        w_o=gather('M/d Q K/t D -> M Q K/t D', w.w_o),
        router=shardops.all_gather('M/d/t E -> M E', w.router),
        expert_gate=gather('E/t M/d H -> E/t M H', w.expert_gate),
        expert_up=gather('E/t M/d H -> E/t M H', w.expert_up),
        expert_down=gather('E/t M/d H -> E/t M H', w.expert_down),
        w_gate=if_there('M/d F/t -> M F/t', w.w_gate, gather),
        w_up=if_there('M/d F/t -> M F/t', w.w_up, gather),
        w_down=if_there('M/d F/t -> M F/t', w.w_down, gather),
        q_norm=if_there('D/d/t -> D', w.q_norm),
        k_norm=if_there('D/d/t -> D', w.k_norm),
        q_norm_all=if_there('Q K/t D/d -> Q K/t D', w.q_norm_all),
        k_norm_all=if_there('K/t D/d -> K/t D', w.k_norm_all),
    )


@typed
def gather_ends(weights: Weights, reduce_dtype: str = 'float32') -> Ends:
    gather = functools.partial(shardops.all_gather, dtype=act, reduce_dtype=reduce_dtype)
    embed = gather('V/t M/d -> V/t M', weights.embed)
    unembed = embed if weights.unembed is None else gather('V/t M/d -> V/t M', weights.unembed)
    return Ends(embed, unembed, shardops.all_gather('M/d/t -> M', weights.final_layer_norm))


# == Experts ===========================================================================================================
@typed
def route(model: Model, x: act['B/d L M'], router: f32['M E']) -> tuple[act['B/d L X'], i32['B/d L X']]:
    """Of each token's chosen experts the weight and the number.

    Raises:
      RunError: more experts are chosen than there are.
    """
    if model.experts_per_token > model.experts:
        raise RunError(f'experts_per_token = {model.experts_per_token}: expected 1 to model.experts = {model.experts}')
    probs = jax.nn.softmax(shardops.einsum_unreduced('B/d L M, M E -> B/d L E', x.astype(jnp.float32), router))
    weight, choice = lax.top_k(probs, model.experts_per_token)
    if model.weights_add_to_one:
        weight = weight / shardops.sum_unreduced('B/d L X -> B/d L', weight)[..., None]
    return weight.astype(act.dtype), choice


def every_token(x, weight, choice, held, w_gate, w_up, w_down):
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


def slots(choice, held, E, C):
    """Part by part: of each (token, choice) its slot among those of the experts `held`, the last + 1 where it has none.

    A row's earlier tokens come first, so that no token sees what follows it.
    """
    pairs = choice.reshape(choice.shape[0], -1)
    one_hot = jax.nn.one_hot(pairs, E, dtype=jnp.int32)
    place = jnp.sum(jnp.cumsum(one_hot, axis=1) * one_hot, axis=-1) - 1
    own = pairs - held[0]
    has_slot = (own >= 0) & (own < held.shape[0]) & (place < C)
    return jnp.where(has_slot, own * C + place, held.shape[0] * C).reshape(choice.shape)


def dispatch(x, choice, held, E, C):
    """Part by part: the tokens in the slots of the experts `held`; zero in slots that are free."""
    slot = slots(choice, held, E, C).reshape(choice.shape[0], -1)
    tokens = jnp.repeat(x, choice.shape[-1], axis=1)
    taken = jnp.zeros((x.shape[0], held.shape[0] * C + 1, x.shape[2]), x.dtype)
    taken = jax.vmap(lambda taken, slot, tokens: taken.at[slot].set(tokens))(taken, slot, tokens)
    return taken[:, :-1].reshape(x.shape[0], held.shape[0], C, x.shape[2])


def combine(y, weight, choice, held, E):
    """Part by part: the weighted results of the experts `held`, back where the tokens are."""
    slot = slots(choice, held, E, y.shape[2]).reshape(choice.shape[0], -1)
    y = jnp.pad(y.reshape(y.shape[0], -1, y.shape[-1]), ((0, 0), (0, 1), (0, 0)))
    y = jnp.take_along_axis(y, slot[..., None], axis=1).reshape(*choice.shape, y.shape[-1])
    return jnp.sum(y * weight[..., None], axis=2)


@typed
def experts(
    model: Model, x: act['B/d L M'], weight: act['B/d L X'], choice: i32['B/d L X'],
    w_gate: act['E/t M H'], w_up: act['E/t M H'], w_down: act['E/t M H'],
) -> act['B/d L M +t']:  # fmt: skip
    """The chosen experts' results, weighted; what a device lacks is in the sum over t."""
    E = model.experts
    held = shardops.slice('E -> E/t', jnp.arange(E, dtype=jnp.int32))
    if model.capacity is None:
        types = 'B/d L M, B/d L X, B/d L X, E/t, E/t M H, E/t M H, E/t M H -> B/d L M +t'
        return shardops.local(types, every_token, x, weight, choice, held, w_gate, w_up, w_down)
    C = math.ceil(model.capacity * x.shape[1] * model.experts_per_token / E)
    C = max(1, min(x.shape[1], C))  # slots of an expert in a row
    into = functools.partial(dispatch, E=E, C=C)
    tokens = shardops.local('B/d L M, B/d L X, E/t -> B/d E/t C M', into, x, choice, held, C=C)
    gate = shardops.einsum_unreduced('B/d E/t C M, E/t M H -> B/d E/t C H', tokens, w_gate)
    gate = save_for_backward(gate)  # 2·capacity·XH/t bytes a token, spares a product with w_gate
    up = shardops.einsum_unreduced('B/d E/t C M, E/t M H -> B/d E/t C H', tokens, w_up)
    up = save_for_backward(up)  # 2·capacity·XH/t bytes a token, spares a product with w_up
    y = shardops.einsum_unreduced('B/d E/t C H, E/t M H -> B/d E/t C M', jax.nn.silu(gate) * up, w_down)
    back = functools.partial(combine, E=E)
    return shardops.local('B/d E/t C M, B/d L X, B/d L X, E/t -> B/d L M +t', back, y, weight, choice, held)


# == Forward pass ======================================================================================================
@typed
def embed(model: Model, ends: Ends, tokens: u32['B/d L'], position: i32['B/d L'], M: str) -> jax.Array:
    return layers.embed(ends.embed, tokens, M)


@typed
def layer(
    model: Model, x: jax.Array, w: Gathered, attend: Callable, position: i32['B/d L'], M: str
) -> tuple[jax.Array, Any]:
    """One layer, as models/llama.py's up to the experts."""
    x: act[f'B/d L {M}'] = x

    with jax.named_scope('attention'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, in the place of the input's 2M/t
        normed = rms_norm(gathered, w.ln1, model.norm_eps)
        q = product('B/d L M, M Q K/t D -> B/d L Q K/t D', normed, w.w_q)
        k = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_k)[:, :, None]
        v = product('B/d L M, M K/t D -> B/d L K/t D', normed, w.w_v)
        if model.qk_norm == 'head':
            q, k = head_norm(q, w.q_norm, model.norm_eps), head_norm(k, w.k_norm, model.norm_eps)
        if model.qk_norm == 'all':
            q, k = heads_norm(q, w.q_norm_all, model.norm_eps), heads_norm(k, w.k_norm_all[None], model.norm_eps)
        rope = layers.frequencies(q.shape[-1], model.rope_max_timescale, model.rope_scaling)
        factor = 1.0 if model.rope_scaling is None else model.rope_scaling.attention_factor
        q = save_for_backward(layers.rotary(q, position, rope, factor * model.logits_scale))  # 2QKD/t bytes a token
        k = save_for_backward(layers.rotary(k, position, rope, factor)[:, :, 0])  # 2KD/t bytes a token
        v = save_for_backward(v)  # 2KD/t bytes a token, spares the product with w_v
        o, kept = attend(q, k, v)
        x = x + leave(product('B/d L Q K/t D, M Q K/t D -> B/d L M +t', o, w.w_o), M)

    with jax.named_scope('ffn'):
        gathered = save_for_backward(enter(x, M))  # 2M bytes a token, spares the product with w_o, its sum, the gather
        normed = rms_norm(gathered, w.ln2, model.norm_eps)
        weight, choice = route(model, normed, w.router)
        y = experts(model, normed, weight, choice, w.expert_gate, w.expert_up, w.expert_down)
        if w.w_gate is not None:
            gate = product('B/d L M, M F/t -> B/d L F/t', normed, w.w_gate)
            gate = save_for_backward(gate)  # 2F/t bytes a token, spares a product with w_gate
            up = product('B/d L M, M F/t -> B/d L F/t', normed, w.w_up)
            up = save_for_backward(up)  # 2F/t bytes a token, spares a product with w_up
            y = y + product('B/d L F/t, M F/t -> B/d L M +t', jax.nn.silu(gate) * up, w.w_down)
        return x + leave(y, M), kept


@typed
def final(model: Model, ends: Ends, x: jax.Array, M: str) -> act['B/d L M']:
    """The hidden states that logits are computed from."""
    return rms_norm(enter(x, M), ends.final_layer_norm, model.norm_eps)


# == Published names ===================================================================================================
def published(model: Model) -> dict[str, list[tuple[str, str]]]:
    """Of each of the weights the published tensors it is made of, and how each lies there -> here."""
    layer, attention, moe = 'model.layers.{}', 'model.layers.{}.self_attn', 'model.layers.{}.mlp'
    gate, up, down = 'gate_proj', 'up_proj', 'down_proj'
    if model.qk_norm == 'none':  # Mixtral
        moe, gate, up, down = f'{layer}.block_sparse_moe', 'w1', 'w3', 'w2'
    rows = {
        'embed': [('model.embed_tokens.weight', 'V M -> V M')],
        'unembed': [('lm_head.weight', 'V M -> V M')],
        'transformer/ln1': [(f'{layer}.input_layernorm.weight', 'M -> M')],
        'transformer/ln2': [(f'{layer}.post_attention_layernorm.weight', 'M -> M')],
        'transformer/w_q': [(f'{attention}.q_proj.weight', '(K Q D) M -> M Q K D')],
        'transformer/w_kv': [(f'{attention}.{x}_proj.weight', '(K D) M -> M K D') for x in 'kv'],
        'transformer/w_o': [(f'{attention}.o_proj.weight', 'M (K Q D) -> M Q K D')],
        'transformer/router': [(f'{moe}.gate.weight', 'E M -> M E')],
        'transformer/expert_gate': [(f'{moe}.experts.{{}}.{gate}.weight', 'H M -> M H')],
        'transformer/expert_up': [(f'{moe}.experts.{{}}.{up}.weight', 'H M -> M H')],
        'transformer/expert_down': [(f'{moe}.experts.{{}}.{down}.weight', 'M H -> M H')],
        'final_layer_norm': [('model.norm.weight', 'M -> M')],
    }
    if model.tied:
        del rows['unembed']
    if model.qk_norm == 'head':
        rows |= {f'transformer/{x}_norm': [(f'{attention}.{x}_norm.weight', 'D -> D')] for x in 'qk'}
    if model.qk_norm == 'all':
        rows['transformer/q_norm_all'] = [(f'{attention}.q_norm.weight', '(K Q D) -> Q K D')]
        rows['transformer/k_norm_all'] = [(f'{attention}.k_norm.weight', '(K D) -> K D')]
    return rows


def model_of(config) -> Model:
    """The model that a published config.json describes; no token is dropped, as there.

    Args:
      config: models.huggingface.Fields.
    """
    kind, heads, d_model = [config.take(key) for key in ('model_type', 'num_attention_heads', 'hidden_size')]
    n_kv = config.take('num_key_value_heads', None) or heads
    d_head = config.take('head_dim', None) or d_model // heads
    config.require(hidden_act='silu', attention_bias=False, clip_qkv=None, router_jitter_noise=0.0)
    config.require(mlp_only_layers=[], decoder_sparse_step=1)
    window, d_ff = config.take('sliding_window', None), config.take('intermediate_size')
    if kind == 'qwen3_moe':  # intermediate_size is that of layers without experts
        d_ff = config.take('moe_intermediate_size')
        window = window if config.take('use_sliding_window', False) else None
    base, scaling = layers.rope_from(config)
    return Model(
        d_model=d_model,
        n_q_per_kv=heads // n_kv,
        n_kv=n_kv,
        d_head=d_head,
        layers=config.take('num_hidden_layers'),
        vocab=config.take('vocab_size'),
        d_ff=d_ff,
        experts=config.take('num_local_experts', None) or config.take('num_experts'),
        experts_per_token=config.take('num_experts_per_tok'),
        weights_add_to_one=True if kind == 'mixtral' else config.take('norm_topk_prob', False),
        rope_max_timescale=base,
        rope_scaling=scaling,
        norm_eps=config.take('rms_norm_eps', 1e-6 if kind == 'qwen3_moe' else 1e-5),
        logits_scale=d_head**-0.5,
        tied=config.take('tie_word_embeddings', False),
        qk_norm={'mixtral': 'none', 'olmoe': 'all', 'qwen3_moe': 'head'}[kind],
        window=window,
    )


def config_of(model: Model) -> dict[str, Any]:
    """The other way round."""
    kind, name = {
        'none': ('mixtral', 'Mixtral'),
        'all': ('olmoe', 'Olmoe'),
        'head': ('qwen3_moe', 'Qwen3Moe'),
    }[model.qk_norm]
    of_kind = {
        'mixtral': {'num_local_experts': model.experts, 'sliding_window': model.window},
        'olmoe': {'num_experts': model.experts, 'norm_topk_prob': model.weights_add_to_one},
        'qwen3_moe': {
            'num_experts': model.experts,
            'norm_topk_prob': model.weights_add_to_one,
            'moe_intermediate_size': model.d_ff,
            'mlp_only_layers': [],
            'decoder_sparse_step': 1,
            'use_sliding_window': bool(model.window),
            'sliding_window': model.window,
        },
    }[kind]
    return {
        'model_type': kind,
        'architectures': [f'{name}ForCausalLM'],
        'hidden_size': model.d_model,
        'num_attention_heads': model.n_q_per_kv * model.n_kv,
        'num_key_value_heads': model.n_kv,
        **({} if kind == 'olmoe' else {'head_dim': model.d_head}),
        'num_hidden_layers': model.layers,
        'vocab_size': model.vocab,
        'intermediate_size': model.d_ff,
        'num_experts_per_tok': model.experts_per_token,
        'hidden_act': 'silu',
        'rms_norm_eps': model.norm_eps,
        'tie_word_embeddings': model.tied,
        **of_kind,
        'rope_parameters': layers.rope_to(model.rope_max_timescale, model.rope_scaling),
    }
