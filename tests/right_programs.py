"""Programs that are right, each with what it computes in plain JAX on whole arrays. The check must accept them."""

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.shardtypes import Array, bool_, f32, i32, pytree_dataclass
from shardlib.typed import typed

RIGHT = []


def means(reference):
    """Enters a program with its meaning."""
    return lambda program: RIGHT.append((program, reference)) or program


def softmax_loss(logits, targets):
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def rms(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))


# -- Layers ------------------------------------------------------------------------------------------------------------
@means(lambda x, w, v: jnp.tanh(x @ w) @ v)
def feed_forward(x: f32['B/d M'], w: f32['M F/t'], v: f32['F/t M']) -> f32['B/d M']:
    h = jnp.tanh(shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w))
    return shardops.psum('B/d M +t -> B/d M', shardops.einsum_unreduced('B/d F/t, F/t M -> B/d M +t', h, v))


@means(lambda x, w, v: x + jax.nn.silu(x @ w) @ v)
@typed
def sharded_feed_forward(x: f32['B/d L M/t'], w: f32['M/d F/t'], v: f32['F/t M/d']) -> f32['B/d L M/t']:
    gathered: f32['B/d L M'] = shardops.all_gather('B/d L M/t -> B/d L M', x)
    w: f32['M F/t'] = shardops.all_gather('M/d F/t -> M F/t', w)
    h = jax.nn.silu(shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', gathered, w))
    v = shardops.all_gather('F/t M/d -> F/t M', v)
    y: f32['B/d L M +t'] = shardops.einsum_unreduced('B/d L F/t, F/t M -> B/d L M +t', h, v)
    return x + shardops.psum_scatter('B/d L M +t -> B/d L M/t', y)


@means(lambda x, scale: rms(x) * scale[None])
def norm_of_split_features(x: f32['B/d M/t'], scale: f32['M']) -> f32['B/d M/t']:
    square = shardops.psum('B/d +t -> B/d', shardops.sum_unreduced('B/d M/t -> B/d +t', x * x)) / scale.shape[0]
    return x / jnp.sqrt(square)[:, None] * shardops.slice('M -> M/t', scale)[None]


@means(lambda x: rms(x) + jax.nn.standardize(x) * jax.nn.softmax(x))
def norms_of_whole_features(x: f32['B/d M']) -> f32['B/d M']:
    scaled = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    return scaled + jax.nn.standardize(x) * jax.nn.softmax(x)


def attention(q, k, v):
    weights = jax.nn.softmax(
        jnp.where(jnp.tril(jnp.ones((len(q[0]),) * 2, bool)), jnp.einsum("blhk,bshk->bhls", q, k), -1e9)
    )
    return jnp.einsum("bhls,bshk->blhk", weights, v)


@means(lambda x, w: attention(*((x @ u).reshape(*x.shape[:2], -1, 4) for u in w)).reshape(*x.shape[:2], -1))
def heads(x: f32['B/d L M'], w: f32['3 M F/t']) -> f32['B/d L F/t']:
    q, k, v = (shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', x, u).reshape(*x.shape[:2], -1, 4) for u in w)
    weights = jnp.einsum("blhk,bshk->bhls", q, k)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(weights.shape[2:], bool))[None, None], weights, -1e9))
    return jnp.einsum("bhls,bshk->blhk", weights, v).reshape(*x.shape[:2], -1)


@means(lambda x, w: jnp.tanh(x @ w))
def tokens_side_by_side(x: f32['B/d L M'], w: f32['M F']) -> f32['B/d L F']:
    return jnp.tanh(x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:2], w.shape[1])


@means(lambda x, w: jnp.concatenate(jnp.split(x @ w, 3, -1)[::-1], -1))
def three_products_in_one(x: f32['B/d M'], w: f32['M E']) -> f32['B/d E']:
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    return jnp.concatenate([v, k, q], axis=-1)


@means(lambda table, ids: table[ids])
def embedding(table: f32['V/t M/d'], ids: i32['B/d L']) -> f32['B/d L M/t']:
    table = shardops.all_gather('V/t M/d -> V/t M', table)
    rows = shardops.index_unreduced('[V/t] M, B/d L -> B/d L M +t', table, ids)
    return shardops.psum_scatter('B/d L M +t -> B/d L M/t', rows)


@means(softmax_loss)
def loss_of_split_logits(logits: f32['B/d V/t'], targets: i32['B/d']) -> f32['B/d']:
    top = shardops.pmax('B/d V/t -> B/d', lax.stop_gradient(logits))
    total = shardops.sum_unreduced('B/d V/t -> B/d +t', jnp.exp(logits - top[:, None]))
    own = shardops.psum('B/d +t -> B/d', shardops.index_unreduced('B/d [V/t], B/d -> B/d +t', logits, targets))
    return jnp.log(shardops.psum('B/d +t -> B/d', total)) + top - own


@means(lambda x, w: jnp.einsum("ecm,emf->ecf", x, w))
def experts(x: f32['E C/t M'], w: f32['E/t M F']) -> f32['E C/t F']:
    x = shardops.all_to_all('E C/t M -> E/t C M', x)
    return shardops.all_to_all('E/t C F -> E C/t F', jnp.einsum("ecm,emf->ecf", x, w))


@means(lambda x, ws: (lambda y: jnp.tanh(y @ ws[2]))(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1])))
def layers(x: f32['B/d M'], ws: f32['3 M/d M2/t']) -> f32['B/d M']:
    def layer(x, w):
        w = shardops.all_gather('M/d M2/t -> M M2/t', w)
        y = shardops.einsum_unreduced('B/d M, M M2/t -> B/d M2/t', x, w)
        return jnp.tanh(shardops.all_gather('B/d M2/t -> B/d M2', y)), None

    return lax.scan(layer, x, ws)[0]


# -- Decoding: indices, caches, masks ----------------------------------------------------------------------------------
@means(lambda cache, row, at: cache.at[:, at].set(row))
def cache_at_one_position(cache: f32['B/d L M/t'], row: f32['B/d M/t'], at: i32['']) -> f32['B/d L M/t']:
    return lax.dynamic_update_slice(cache, row[:, None], (0, at, 0))


@means(lambda cache, row, at: cache.at[jnp.arange(len(at)), at].set(row))
def cache_at_each_rows_position(cache: f32['B/d L M/t'], row: f32['B/d M/t'], at: i32['B/d']) -> f32['B/d L M/t']:
    return jax.vmap(lambda cache, row, at: cache.at[at].set(row))(cache, row, at)


@means(lambda x, ids: jnp.take_along_axis(x, ids[:, None], 1)[:, 0])
def one_of_each_row(x: f32['B/d M'], ids: i32['B/d']) -> f32['B/d']:
    return jnp.take_along_axis(x, ids[:, None], axis=1)[:, 0]


@means(lambda x, keep: jnp.where(keep[:, None] > 3, x, 0.0))
def masked_rows(x: f32['B/d M/t'], keep: i32['B/d']) -> f32['B/d M/t']:
    return jnp.where(keep[:, None] > 3, x, 0.0)


@means(lambda x, ids: jnp.where(ids[:, :, None] == ids[:, None, :], x[:, :, None], -x[:, None, :]).sum(2))
def segments(x: f32['B/d L'], ids: i32['B/d L']) -> f32['B/d L']:
    return jnp.sum(jnp.where(ids[:, :, None] == ids[:, None, :], x[:, :, None], -x[:, None, :]), axis=2)


@means(lambda x, ids: jnp.zeros((len(x), 8)).at[jnp.arange(len(x))[:, None], ids].add(x))
def sums_by_segment(x: f32['B/d L'], ids: i32['B/d L']) -> f32['B/d 8']:
    return jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=8))(x, ids)


@means(lambda ids: jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (4,)))(ids))
def noise_by_row(ids: i32['B/d']) -> f32['B/d 4']:
    return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (4,)))(ids)


@means(lambda x: (jnp.where(x >= jnp.sort(x, 1)[:, -3:-2], x, 0.0), jnp.argmax(x, 1)))
def sampling_filter(x: f32['B/d V']) -> tuple[f32['B/d V'], i32['B/d']]:
    return jnp.where(x >= lax.top_k(x, 3)[0][:, 2:], x, 0.0), jnp.argmax(x, axis=1).astype(jnp.int32)


@means(lambda x: (jnp.argmax(x, 1), jnp.any(x > 2.5)))
def choice_of_split_logits(x: f32['B/d V/t']) -> tuple[i32['B/d'], bool_['']]:
    return shardops.argmax('B/d V/t -> B/d', x), shardops.any('B/d V/t -> ', x > 2.5)


@means(lambda x: (x.at[:, 0].set(1.0), x[:, 2:6] - x[:, :1], jnp.roll(x, 1, 1) + jnp.flip(x, 1)))
def parts_of_a_whole_dim(x: f32['B/d L']) -> tuple[f32['B/d L'], f32['B/d 4'], f32['B/d L']]:
    return x.at[:, 0].set(1.0), x[:, 2:6] - x[:, :1], jnp.roll(x, 1, axis=1) + jnp.flip(x, axis=1)


@means(lambda x: (jnp.cumsum(x, 1), jnp.sort(x, 1), lax.associative_scan(jnp.multiply, x, axis=1)))
def along_a_whole_dim(x: f32['B/d L']) -> tuple[f32['B/d L'], f32['B/d L'], f32['B/d L']]:
    return jnp.cumsum(x, axis=1), jnp.sort(x, axis=1), lax.associative_scan(jnp.multiply, x, axis=1)


@means(lambda x, decay: lax.scan(lambda c, r: (decay * c + r,) * 2, 0.0 * x[:, 0], x.T)[1].T)
def recurrence(x: f32['B/d L'], decay: f32['']) -> f32['B/d L']:
    return lax.scan(lambda c, r: (decay * c + r,) * 2, jnp.zeros(x.shape[:1]), x.T)[1].T


@means(lambda ids: (jnp.sum(ids, 0) // 2, jax.nn.one_hot(ids, 8).sum(1), ids % 3))
def integers(ids: i32['B/d L']) -> tuple[i32['L'], f32['B/d 8'], i32['B/d L']]:
    total = shardops.psum('L +d -> L', shardops.sum_unreduced('B/d L -> L +d', ids))
    return total // 2, jnp.sum(jax.nn.one_hot(ids, 8), axis=1), ids % 3


# -- Sums that are owed ------------------------------------------------------------------------------------------------
@means(lambda x, w, s: (x @ w * s[None], jnp.cumsum(x @ w, 1)))
def linear_before_the_sum(x: f32['B/d F/t'], w: f32['F/t M'], s: f32['M']) -> tuple[f32['B/d M'], f32['B/d M']]:
    y = shardops.einsum_unreduced('B/d F/t, F/t M -> B/d M +t', x, w)
    one = shardops.psum('B/d M +t -> B/d M', y * s[None])
    return one, shardops.psum('B/d M +t -> B/d M', jnp.cumsum(y, axis=1))


@means(lambda x, w: jnp.einsum("lbf,fm->bm", x, w))
def sum_owed_through_a_scan(x: f32['L B/d F/t'], w: f32['F/t M']) -> f32['B/d M']:
    def add(total, row):
        return total + shardops.einsum_unreduced('B/d F/t, F/t M -> B/d M +t', row, w), None

    return shardops.psum('B/d M +t -> B/d M', lax.scan(add, shardops.zeros('B/d M +t', f32), x)[0])


@means(lambda x, bias, w: x @ w + bias[None])
def bias_added_once(x: f32['B/d F/t'], bias: f32['M'], w: f32['F/t M']) -> f32['B/d M']:
    y = shardops.einsum_unreduced('B/d F/t, F/t M -> B/d M +t', x, w)
    return shardops.psum('B/d M +t -> B/d M', y + shardops.pending('M -> M +t', bias)[None])


@means(lambda a, b: (a / jnp.sqrt(jnp.sum(a * a) + jnp.sum(b * b)), jnp.max(jnp.abs(a))))
def global_norm(a: f32['M/d F/t'], b: f32['M/t']) -> tuple[f32['M/d F/t'], f32['']]:
    square = shardops.psum('+d +t -> ', shardops.sum_unreduced('... -> +d +t', a * a))
    square += shardops.psum('+t -> ', shardops.sum_unreduced('... -> +t', b * b))
    return a / jnp.sqrt(square), shardops.pmax('M/d F/t -> ', jnp.abs(a))


# -- Control flow ------------------------------------------------------------------------------------------------------
@means(lambda x, go: jnp.where(go > 0, x.sum(0), 0.0))
def a_transfer_that_all_take(x: f32['B/d M'], go: f32['']) -> f32['M']:
    def total(x):
        return shardops.psum('M +d -> M', shardops.sum_unreduced('B/d M -> M +d', x))

    return lax.cond(go > 0, total, lambda x: jnp.zeros(x.shape[1]), x)


@means(
    lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.5 + x, lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 2, x))
)
def loops(x: f32['L M/t']) -> f32['L M/t']:
    first = shardops.all_gather('L M/t -> L M', x)[0, 0]
    grown = lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1] + 2), (first, x))[1]
    return lax.fori_loop(0, 3, lambda i, c: c * 0.5 + x, grown)


@means(lambda x: jax.vmap(lambda r: jnp.sort(r) - jnp.mean(r))(x))
def row_by_row(x: f32['B/d/t M']) -> f32['B/d/t M']:
    return jax.vmap(jax.jit(lambda r: jnp.sort(r) - jnp.mean(r)))(x)


@means(lambda x: jnp.sum(x, 0) ** 2)
def ring(x: f32['B/d L']) -> f32['L']:
    own = jnp.sum(shardops.regroup('B/d L -> d/d R L', x), axis=1)

    def turn(carry, _):
        moved, total = carry
        return (shardops.ppermute('d/d L -> d/d L', moved, 1), total + own * moved), None

    (_, total), _ = lax.scan(turn, (own, jnp.zeros_like(own)), None, length=shardops.axis_size('d'))
    return shardops.psum('L +d -> L', shardops.sum_unreduced('d/d L -> L +d', total))


@means(lambda x: lax.top_k(x, 2))
def a_kernel_with_two_results(x: f32['B/d L']) -> tuple[f32['B/d 2'], i32['B/d 2']]:
    return tuple(shardops.local('B/d L -> B/d X, B/d X', lambda x: lax.top_k(x, 2), x, X=2))


@means(lambda x: jnp.cumsum(jnp.sin(x), 1))
def a_kernel(x: f32['B/d L M/t']) -> f32['B/d L M/t']:
    return shardops.local('B/d L M/t -> B/d L M/t', lambda x: jnp.cumsum(jnp.sin(x), axis=1), x)


# -- Gradients ---------------------------------------------------------------------------------------------------------
def regression(w, x, y):
    return jnp.sum((jnp.tanh(x @ w) - y) ** 2)


@means(lambda w, x, y: (regression(w, x, y), jax.grad(regression)(w, x, y)))
def gradient_of_a_replicated_weight(w: f32['M'], x: f32['B/d M'], y: f32['B/d']) -> tuple[f32[''], f32['M']]:
    def loss(w):
        error = jnp.tanh(x @ w) - y
        return shardops.pending('+d -> +d +t', shardops.sum_unreduced('B/d -> +d', error * error))

    value, gradient = shardops.value_and_grad(loss)(w)
    return shardops.psum('+d +t -> ', value), shardops.psum('M +d +t -> M', gradient)


@means(lambda w, x, y: jax.vjp(lambda w, x: jnp.tanh(x * w[None]), w, x)[1](y))
def pulled_back(w: f32['M'], x: f32['B/d M'], y: f32['B/d M']) -> tuple[f32['M'], f32['B/d M']]:
    _, pull = shardops.vjp(lambda w, x: jnp.tanh(x * w[None]), w, x)
    of_w, of_x = pull(shardops.pending('B/d M -> B/d M +t', y))
    return shardops.psum('M +d +t -> M', of_w), shardops.psum('B/d M +t -> B/d M', of_x)


@pytree_dataclass
class Layer:
    w: f32['M/d M2/t']
    scale: f32['M2/t']


@pytree_dataclass
class Step:
    loss: f32['']
    gradients: tuple[Array['3', Layer], f32['M/d/t']]


def deep(stack, last, x):
    for w, scale in zip(stack.w, stack.scale):
        x = jax.nn.silu(x @ w * scale[None])
    return jnp.sum((x @ last) ** 2)


@means(lambda stack, last, x: (deep(stack, last, x), jax.grad(deep, (0, 1))(stack, last, x)))
def step(stack: Array['3', Layer], last: f32['M/d/t'], x: f32['B/d M']) -> Step:
    def loss(stack, last):
        def layer(x, layer):
            w = shardops.all_gather('M/d M2/t -> M M2/t', layer.w)
            y = jax.nn.silu(shardops.einsum_unreduced('B/d M, M M2/t -> B/d M2/t', x, w) * layer.scale[None])
            return shardops.all_gather('B/d M2/t -> B/d M2', y), None

        y = lax.scan(jax.checkpoint(layer), x, stack)[0] @ shardops.all_gather('M/d/t -> M', last)
        return shardops.pending('+d -> +d +t', shardops.sum_unreduced('B/d -> +d', y * y))

    value, (stack, last) = shardops.value_and_grad(loss, (0, 1))(stack, last)
    stack = Layer(stack.w, shardops.psum('3 M2/t +d -> 3 M2/t', stack.scale))
    return Step(shardops.psum('+d +t -> ', value), (stack, last))


@means(lambda w, x: (jax.grad(lambda w: jnp.sum(jnp.sin(x * w[None])))(w), jnp.max(x)))
def aside(w: f32['M/t'], x: f32['B/d M/t']) -> tuple[f32['M/t'], f32['']]:
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

    def loss(w):
        y = own(x * w[None])
        return shardops.sum_unreduced('B/d M/t -> +d +t', y), shardops.pmax('B/d M/t -> ', lax.stop_gradient(x))

    gradient, top = shardops.grad(loss, has_aux=True)(w)
    return shardops.psum('M/t +d -> M/t', gradient), top


@means(lambda table, ids, w: jax.grad(lambda table: jnp.sum(table[ids] * w))(table))
def gradient_of_an_embedding(table: f32['V/t M/d'], ids: i32['B/d'], w: f32['B/d M']) -> f32['V/t M/d']:
    def loss(table):
        table = shardops.all_gather('V/t M/d -> V/t M', table)
        rows = shardops.index_unreduced('[V/t] M, B/d -> B/d M +t', table, ids)
        return shardops.sum_unreduced('B/d M +t -> +d +t', rows * w)

    return shardops.grad(loss)(table)


@means(lambda w, x, y: jax.grad(lambda w: sum(jnp.sum(softmax_loss(x[i] @ w, y[i])) for i in range(3)))(w))
def gradient_over_chunks(w: f32['M V/t'], x: f32['3 B/d M'], y: i32['3 B/d']) -> f32['M V/t']:
    def loss(w, x, y):
        each = loss_of_split_logits(shardops.einsum_unreduced('B/d M, M V/t -> B/d V/t', x, w), y)
        return shardops.pending('+d -> +d +t', shardops.sum_unreduced('B/d -> +d', each))

    gradient = shardops.grad(lambda w: shardops.sum_over_chunks(loss, w, x, y))(w)
    return shardops.psum('M V/t +d -> M V/t', gradient)


@means(lambda w, x: jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w))
def gradient_by_microbatches(w: f32['M/d F/t'], x: f32['B/d M']) -> f32['M/d F/t']:
    near = shardops.all_gather('M/d F/t -> M F/t', w)

    def add(total, x):
        def loss(w):
            y = shardops.einsum_unreduced('R/d M, M F/t -> R/d F/t', x, w)
            return shardops.sum_unreduced('... -> +d +t', y * y)

        return total + shardops.grad(loss)(near), None

    rows = shardops.regroup('B/d M -> parts R/d M', x, parts=2)
    total = lax.scan(add, shardops.zeros('M F/t +d', f32), rows)[0]
    return shardops.psum_scatter('M F/t +d -> M/d F/t', total)


@means(lambda g: (lambda a: jnp.einsum("lmn,lnf->lmf", a @ a - 2 * a, g))(jnp.einsum("lmf,lnf->lmn", g, g)))
def whole_matrices(g: f32['S M/d F/t']) -> f32['S M/d F/t']:
    g = shardops.all_to_all('S M/d F/t -> S/d M F/t', g)
    other = g
    a = shardops.einsum_unreduced('S/d M F/t, S/d N F/t -> S/d M N +t', g, other)
    a = shardops.psum('S/d M N +t -> S/d M N', a)
    b = shardops.einsum_unreduced('S/d M N, S/d N O -> S/d M O', a, a) - 2 * a
    g = shardops.einsum_unreduced('S/d M N, S/d N F/t -> S/d M F/t', b, g)
    return shardops.all_to_all('S/d M F/t -> S M/d F/t', g)


def moved(w, m, g):
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    return jax.tree.map(lambda w, m: w - 0.1 * m, w, m), m


@means(moved)
def momentum(w: Layer, m: Layer, g: Layer) -> tuple[Layer, Layer]:
    return moved(w, m, g)
