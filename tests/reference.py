"""The model and AdamW once more, unsharded and naive: what `train.py` is compared with.

Written from the mathematics alone, to be read beside it; nothing here is shared with `train.py`. Slow on purpose.

    weights = random_weights(model, seed=0)                      # nested dict of numpy float32
    batch = random_batch(model, batch=4, length=32, seed=0)      # targets, is_seq_start, is_target
    loss, grads = loss_and_grad(weights, batch, model)           # the truth: float64 throughout
    loss, grads = loss_and_grad(weights, batch, model, dtype=np.float32, compute_dtype=jnp.bfloat16)

Letters: B batch, L and S (queries', keys') length, M d_model, Q query heads per key head, K key heads, D d_head, F
d_ff, V vocabulary. `dtype` is the type of weights, norms, softmax and loss; `compute_dtype` (the same unless given)
that of the matrix products' inputs and of the residual stream. Products that a softmax reads (q·k, unembedding) leave
their sum in `dtype`; all others round it to `compute_dtype`. Each public function takes numpy or JAX arrays and returns
numpy.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

TRANSFORMER = ["ln1", "ln2", "w_q", "w_kv", "w_o", "w_gate", "w_up", "w_down"]
DECAYED = ["w_q", "w_kv", "w_o", "w_gate", "w_up", "w_down"]  # no norm, no embedding


@dataclasses.dataclass(frozen=True)
class Batch:
    targets: np.ndarray  # uint32[B, L]
    is_seq_start: np.ndarray  # bool[B, L]
    is_target: np.ndarray  # bool[B, L]


# ---- the model -------------------------------------------------------------------------------------------------------


def inputs_of(batch, bos_id):
    """The token before each target; `bos_id` at a sequence's first token and at a row's first position."""
    targets, is_seq_start = np.asarray(batch.targets), np.asarray(batch.is_seq_start)
    inputs = np.full_like(targets, bos_id)
    for row in range(targets.shape[0]):
        for position in range(1, targets.shape[1]):
            if not is_seq_start[row, position]:
                inputs[row, position] = targets[row, position - 1]
    return inputs


def allowed_of(batch):
    """bool[B, L, S]: may the query at L see the key at S? Only if it is not later and no segment starts in between."""
    is_seq_start = np.asarray(batch.is_seq_start)
    rows, length = is_seq_start.shape
    allowed = np.zeros((rows, length, length), bool)
    for row in range(rows):
        segment_start = 0
        for query in range(length):
            if is_seq_start[row, query]:
                segment_start = query
            allowed[row, query, segment_start : query + 1] = True
    return allowed


def rms_norm(x, scale, norm_eps):
    """x / sqrt(mean(x²) + norm_eps) · scale over the last dim, in the scale's type."""
    x = x.astype(scale.dtype)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + norm_eps) * scale[None, None, :]


def rotate(x, max_timescale, dtype):
    """Rotary embedding: turns (first half, second half) of D by position · max_timescale^(-i / (D/2))."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = np.zeros((length, half), np.float64)
    for position in range(length):
        for i in range(half):
            angles[position, i] = position * float(max_timescale) ** (-i / half)
    over_heads = [1, length] + [1] * (x.ndim - 3) + [half]  # B L [heads] D/2
    cos = jnp.asarray(np.cos(angles), dtype).reshape(over_heads)
    sin = jnp.asarray(np.sin(angles), dtype).reshape(over_heads)
    x1, x2 = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def softmax(x):
    exponentials = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)


def attention(q, k, v, allowed, dtype):
    """Softmax over the allowed keys, one query head at a time. q: B L Q K D; k, v: B S K D; returns B L Q K D."""
    heads = []
    for q_head in range(q.shape[2]):
        for k_head in range(q.shape[3]):
            scores = jnp.einsum('BLD,BSD->BLS', q[:, :, q_head, k_head], k[:, :, k_head], preferred_element_type=dtype)
            probabilities = softmax(jnp.where(allowed, scores, -jnp.inf)).astype(v.dtype)
            heads.append(jnp.einsum('BLS,BSD->BLD', probabilities, v[:, :, k_head]))
    return jnp.stack(heads, axis=2).reshape(q.shape)


def feed_forward(h, w_gate, w_up, w_down):
    gate = jnp.einsum('BLM,MF->BLF', h, w_gate)
    up = jnp.einsum('BLM,MF->BLF', h, w_up)
    return jnp.einsum('BLF,MF->BLM', gate * jax.nn.sigmoid(gate) * up, w_down)  # silu(gate) · up


def mixture(h, w, model, compute):
    """Every expert of every token, of which the weights of those that were not chosen, or had no slot left, are zero;
    and the router's two losses: balance (Fedus et al. 2021, equation 4) and z (Zoph et al. 2022, equation 5).

    `model.slots`: of an expert in each of the `model.parts` parts of a row; None for as many as there are tokens.
    """
    rows = h.shape[0]
    scores = jnp.einsum('BLM,ME->BLE', h.astype(w["router"].dtype), w["router"])
    probabilities, left, taken = softmax(scores), softmax(scores), []
    for _ in range(model.experts_per_token):
        best = jax.nn.one_hot(jnp.argmax(left, axis=-1), model.experts, dtype=scores.dtype)
        taken.append(best)
        left = left * (1 - best)
    chosen = sum(taken)
    weight = probabilities * chosen
    if model.experts_per_token > 1:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    if model.slots is not None:  # a part's tokens take their experts' slots in turn
        in_turn = chosen.reshape(rows, model.parts, -1, model.experts)
        has_slot = jnp.cumsum(in_turn, axis=2) <= model.slots
        weight = jnp.where(has_slot.reshape(weight.shape), weight, 0)
    y = 0
    for e in range(model.experts):
        own = (compute(w[name][e]) for name in ("expert_gate", "expert_up", "expert_down"))
        y = y + feed_forward(h, *own) * compute(weight[:, :, e, None])
    share, mean = jnp.mean(chosen, axis=(0, 1)) / model.experts_per_token, jnp.mean(probabilities, axis=(0, 1))
    balance = model.experts * jnp.sum(jax.lax.stop_gradient(share) * mean)
    z = jnp.mean(jnp.log(jnp.sum(jnp.exp(scores), axis=-1)) ** 2)
    return y, jnp.stack([balance, z])


def _logits(weights, batch, model, bos_id, dtype, compute_dtype):
    def compute(array):
        return array.astype(compute_dtype)

    allowed = jnp.asarray(allowed_of(batch))
    routers = jnp.zeros(2, dtype)
    x = compute(weights["embed"][jnp.asarray(inputs_of(batch, bos_id))])  # cast last: its gradient adds up in `dtype`
    for layer in range(model.layers):
        w = {name: leaf[layer] for name, leaf in weights["transformer"].items() if name != "w_kv"}
        w_k, w_v = weights["transformer"]["w_kv"][layer]

        h = compute(rms_norm(x, w["ln1"], model.norm_eps))
        q = rotate(jnp.einsum('BLM,MQKD->BLQKD', h, compute(w["w_q"])), model.rope_max_timescale, dtype)
        k = rotate(jnp.einsum('BLM,MKD->BLKD', h, compute(w_k)), model.rope_max_timescale, dtype)
        v = jnp.einsum('BLM,MKD->BLKD', h, compute(w_v))
        o = attention(q, k, v, allowed, dtype)
        x = x + jnp.einsum('BLQKD,MQKD->BLM', o, compute(w["w_o"]))

        h = compute(rms_norm(x, w["ln2"], model.norm_eps))
        if "w_gate" in w:
            x = x + feed_forward(h, compute(w["w_gate"]), compute(w["w_up"]), compute(w["w_down"]))
        if "router" in w:
            y, of_layer = mixture(h, w, model, compute)
            x, routers = x + y, routers + of_layer

    h = compute(rms_norm(x, weights["final_layer_norm"], model.norm_eps))
    return jnp.einsum('BLM,VM->BLV', h, compute(weights["unembed"]), preferred_element_type=dtype), routers


def _loss(weights, batch, model, bos_id, dtype, compute_dtype):
    scores, routers = _logits(weights, batch, model, bos_id, dtype, compute_dtype)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    log_normalizer = highest[..., 0] + jnp.log(jnp.sum(jnp.exp(scores - highest), axis=-1))
    targets, is_target = jnp.asarray(np.asarray(batch.targets)), np.asarray(batch.is_target)
    target_score = jnp.take_along_axis(scores, targets[:, :, None], axis=-1)[..., 0]
    losses = jnp.where(jnp.asarray(is_target), log_normalizer - target_score, 0.0)
    of_routers = jnp.asarray(getattr(model, "router_losses", (0.0, 0.0)), dtype)  # the factors of the two, per layer
    return jnp.sum(losses) / int(is_target.sum()) + jnp.sum(of_routers * routers)


def _run(function, weights, batch, model, bos_id, dtype, compute_dtype):
    """Evaluates in exactly the types asked for: JAX has float64 only when told so."""
    compute_dtype = dtype if compute_dtype is None else compute_dtype
    with jax.enable_x64(np.dtype(dtype) == np.float64), jax.default_matmul_precision("highest"):
        weights = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), dtype), weights)
        return jax.tree.map(np.asarray, function(weights, batch, model, bos_id, dtype, compute_dtype))


def logits(weights, batch, model, *, bos_id=0, dtype=np.float64, compute_dtype=None):
    """The logits B L V of a batch under `model` (the attributes of train.Model)."""
    return _run(lambda *given: _logits(*given)[0], weights, batch, model, bos_id, dtype, compute_dtype)


def loss(weights, batch, model, *, bos_id=0, dtype=np.float64, compute_dtype=None):
    """The mean negative log likelihood, in nats, of all targets of the batch; what is no target counts nowhere."""
    return _run(_loss, weights, batch, model, bos_id, dtype, compute_dtype)


def loss_and_grad(weights, batch, model, *, bos_id=0, dtype=np.float64, compute_dtype=None):
    """`loss` and its gradient, a tree like `weights` in `dtype`."""

    def compiled(weights, *others):  # as one program: operation by operation, its many shapes take longer to compile
        # Each rounding to `compute_dtype` is done as written, where XLA would be free to keep more bits.
        options = {"xla_allow_excess_precision": False}
        return jax.jit(lambda weights: jax.value_and_grad(_loss)(weights, *others), compiler_options=options)(weights)

    return _run(compiled, weights, batch, model, bos_id, dtype, compute_dtype)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def learning_rate(step, training):
    """The learning rate of update number `step`, counted from 0.

    lr·(step+1)/warmup_steps before warmup_steps; then the cosine, lr at step = warmup_steps, lr·final_fraction at
    step = steps_for_lr; and that for ever.
    """
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    floor = training.cosine_learning_rate_final_fraction
    if step >= training.steps_for_lr:
        return training.learning_rate * floor
    progress = (step - training.warmup_steps) / (training.steps_for_lr - training.warmup_steps)
    return training.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def global_norm(grads):
    """The 2-norm of all leaves together."""
    return math.sqrt(sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in jax.tree.leaves(grads)))


def adamw_update(weights, mu, nu, grads, step, training, *, dtype=np.float64):
    """AdamW's update number `step` (from 0), after clipping to `max_grad_norm`. Returns new weights, mu, nu."""
    norm = global_norm(grads)
    scale = 1.0 if norm <= training.max_grad_norm else training.max_grad_norm / norm
    lr = learning_rate(step, training)
    b1, b2 = training.adam_b1, training.adam_b2

    def update(w, m, v, g, decayed):
        w, m, v, g = (np.asarray(array, dtype) for array in (w, m, v, g))
        g = g * scale
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        m_hat = m / (1 - b1 ** (step + 1))
        v_hat = v / (1 - b2 ** (step + 1))
        direction = m_hat / (np.sqrt(v_hat) + training.adam_eps)
        if decayed:
            direction = direction + training.weight_decay * w
        return w - lr * direction, m, v

    new_weights, new_mu, new_nu = {"transformer": {}}, {"transformer": {}}, {"transformer": {}}
    for name in ["embed", "unembed", "final_layer_norm"]:
        new_weights[name], new_mu[name], new_nu[name] = update(
            weights[name], mu[name], nu[name], grads[name], decayed=False
        )
    for name in TRANSFORMER:
        old = [tree["transformer"][name] for tree in (weights, mu, nu, grads)]
        new = update(*old, decayed=name in DECAYED)
        new_weights["transformer"][name], new_mu["transformer"][name], new_nu["transformer"][name] = new
    return new_weights, new_mu, new_nu


# ---- things to compare on --------------------------------------------------------------------------------------------


def as_dict(weights):
    """Weights held as attributes (those of train.py) as the nested dict of numpy arrays that this file works on."""
    tree = {name: np.asarray(getattr(weights, name)) for name in ["embed", "unembed", "final_layer_norm"]}
    return tree | {"transformer": {name: np.asarray(getattr(weights.transformer, name)) for name in TRANSFORMER}}


def random_weights(model, seed):
    """float32 weights under which nothing is special: norms are not 1, and logits q·k have a deviation of about 1."""
    rng = np.random.default_rng(seed)
    M, Q, K, D, F = model.d_model, model.n_q_per_kv, model.n_kv, model.d_head, model.d_ff

    def normal(*shape, deviation):
        return (deviation * rng.standard_normal(shape)).astype(np.float32)

    def around_one(*shape):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)

    return {
        "embed": normal(model.vocab, M, deviation=1.0),
        "unembed": normal(model.vocab, M, deviation=M**-0.5),
        "final_layer_norm": around_one(M),
        "transformer": {
            "ln1": around_one(model.layers, M),
            "ln2": around_one(model.layers, M),
            "w_q": normal(model.layers, M, Q, K, D, deviation=(M * D) ** -0.5),  # the 1/√D that q·k lacks
            "w_kv": normal(model.layers, 2, M, K, D, deviation=M**-0.5),
            "w_o": normal(model.layers, M, Q, K, D, deviation=(Q * K * D) ** -0.5),
            "w_gate": normal(model.layers, M, F, deviation=M**-0.5),
            "w_up": normal(model.layers, M, F, deviation=M**-0.5),
            "w_down": normal(model.layers, M, F, deviation=F**-0.5),
        },
    }


def random_batch(model, batch, length, seed):
    """Rows of several segments (some rows begin inside one), about a tenth of the positions no targets."""
    rng = np.random.default_rng(seed)
    is_seq_start = rng.random((batch, length)) < 4 / length
    is_seq_start[:, length // 2] = True  # at least two segments in each row
    is_seq_start[::2, 0] = True
    is_seq_start[1::2, 0] = False
    is_target = rng.random((batch, length)) >= 0.1
    is_target[0, 0], is_target[0, -1] = True, False
    return Batch(rng.integers(0, model.vocab, (batch, length), np.uint32), is_seq_start, is_target)
