"""Programs that are right: the check must accept them, and they must compute what they mean on whole arrays."""

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import shardops
from shardlib.shardtypes import Array, f32, i32, pytree_dataclass
from shardlib.typed import typed

RIGHT = []


def right(program):
    RIGHT.append(program)
    return program


def own_rule(function, forward, backward):
    wrapped = jax.custom_vjp(lambda *args: function(*args))
    wrapped.defvjp(forward, backward)
    return wrapped


def own_vjp(function, backward):
    return own_rule(function, lambda *args: (function(*args), args), backward)


def own_jvp(function, rule):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(rule)
    return wrapped


def matrices(x):
    """Symmetric and positive, one for each row."""
    x = x.reshape(x.shape[0], 8, 8)
    return jnp.einsum("bij,bkj->bik", x, x) + 8 * jnp.eye(8)[None]


def total(row):
    return shardops.sum_unreduced('B/d -> +d', row)


def squares(y):
    """A loss of 'B/d M'."""
    return shardops.pending('+d -> +d +t', shardops.sum_unreduced('B/d M -> +d', y * y))


def reduced(loss, w):
    """The gradient of a weight 'M'."""
    return shardops.psum('M +d +t -> M', shardops.grad(loss)(w))


# Everyday JAX, device by device; tests/prove.py says how a table is read.
ACCEPTED = r"""
B/d M | jax.nn.standardize(x, axis=-1)
B/d M | jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1)
B/d M | x * lax.top_k(x, 2)[0][:, :1]
B/d M | jnp.concatenate(jnp.split(x, 2, axis=1), axis=1)
B/d M | x.at[:, 0].set(1.0)
i32 B/d | jnp.argmax(jax.nn.one_hot(x, 8), axis=-1).astype(jnp.int32)
L/d M
    | shardops.regroup('parts R/d M -> L/d M', lax.map(jnp.tanh, shardops.regroup('L/d M -> parts R/d M', x, parts=2)))
8 8, 8 M/d -> 8 M/d | jax.scipy.linalg.solve_triangular(x, y, lower=True)
B/d N, B/d M -> N M | shardops.psum('N M +d -> N M',
    product('B/d N, B/d M -> N M +d', x, Adapted(y, y[:, :8], jnp.ones((8, 64)), 2.0)))
B/d M/t | jnp.zeros(x.shape)
B/d M/t | lax.scan(lambda c, _: (c + x, None), jnp.zeros(x.shape), None, length=2)[0]
B/d M | jax.debug.callback(lambda value: None, x) or x
B/d M | lax.optimization_barrier((x, shardops.sum_unreduced('B/d M -> M +d', x)))[0]
B/d M
    | x * shardops.psum('+d -> ', lax.scan(lambda c, r: (check(f32, '+d', c) + total(r), None), jnp.float32(0), x.T)[0])
B/d K/t
    | jnp.max(jnp.repeat(x, 3, axis=1).reshape(x.shape[0], x.shape[1], 3) + shardops.zeros('B/d K/t 3', f32), axis=2)
i32 B/d L | jnp.arange(99, dtype=jnp.int32)[x]
M/d, '' -> M
    | lax.cond(y > 0, lambda x: shardops.all_gather('M/d -> M', x), lambda x: jnp.zeros(64), x)
M/d, '' -> M/d | shardops.local('M/d -> M/d', lambda x: x * y, x)
B/d M, 4 -> B/d M | jax.vmap(lambda row: jnp.convolve(row, y, mode='same'))(x)
B/d L M, 3 1 M -> B/d L M | lax.conv_general_dilated(x, y, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'),
    feature_group_count=64)
B/d L M/t, 3 1 M/t -> B/d L M/t | lax.conv_general_dilated(x, y, (1,), 'SAME',
    dimension_numbers=('NWC', 'WIO', 'NWC'), feature_group_count=x.shape[-1])
B/d F/t, M F/t -> B/d M | shardops.psum('B/d M +t -> B/d M',
    shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', x, y).at[:, 0].set(0.0).at[:, 1].multiply(2.0))
B/d L M, 3 M F/t -> B/d L F/t | lax.conv_general_dilated(x, y, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))
B/d M | lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), 'SAME')
B/d M | lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), 'SAME')
B/d M | jnp.fft.irfft(jnp.fft.rfft(x, axis=1), axis=1)
i32 B/d -> B/d 8 | jnp.zeros((x.shape[0], 8)).at[jnp.arange(x.shape[0]), x % 8].set(1.0)
B/d F/t, M F/t, M -> B/d M | shardops.psum('B/d M +t -> B/d M',
    shardops.einsum_unreduced('B/d F/t, M F/t -> B/d M +t', x, y) + (z / shardops.axis_size('t'))[None])
B/d M | x + jnp.ones(x.shape)
B/d M | own_vjp(lambda x, s: x * s, lambda r, g: (g * r[1], g * r[0]))(x, jnp.ones(x.shape))
M | own_vjp(lambda x, s: x * s, lambda r, g: (g * r[1], g * r[0]))(x, x)
B/d M, bool_ B/d -> B/d M | jnp.where(y[:, None], x, 0.0)
i32 B/d -> B/d | jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(jax.random.key(0), n)))(x)
B/d M, B/d, i32 B/d -> B/d M | x.at[jnp.arange(x.shape[0]), z % 64].set(y)
B/d M, i32 B/d -> B/d | x[jnp.arange(x.shape[0]), y % 64]
B/d M, i32 B/d -> B/d | jnp.take_along_axis(x, y[:, None] % 64, axis=1)[:, 0]
B/d M -> B/d 8 8 | jnp.linalg.cholesky(matrices(x))
B/d M -> B/d 8 8 | jnp.linalg.qr(matrices(x)).R
B/d M -> B/d | jnp.linalg.slogdet(matrices(x))[1]
B/d M, B/d 8 -> B/d 8 | jnp.linalg.solve(matrices(x), y[..., None])[..., 0]
B/d M, B/d 8 4 -> B/d 8 4 | lax.linalg.triangular_solve(matrices(x), y, left_side=True, lower=True)
8 8, B/d 8 -> B/d 8 | jnp.linalg.solve(x @ x.T + 8 * jnp.eye(8), y.T).T
B M, 4 M F/t -> B F/t | lax.ragged_dot(x, y, jnp.array([4, 0, 2, 2]))
L/d M | shardops.regroup('P R/d M -> L/d M', 2 * shardops.regroup('L/d M -> P R/d M', x, P=4))
B L/t | x + shardops.slice('L -> L/t', jnp.arange(32.0))[None]
B/d M | own_vjp(jnp.round, lambda r, g: (g,))(x)
B/d M, M -> B/d M | own_vjp(lambda x, s: x * s[None], lambda r, g: (g * r[1][None], jnp.sum(g * r[0], axis=0)))(x, y)
B/d M | own_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), jnp.cos(x[0]) * t[0]))(x)
B/d M | lax.composite(lambda x: x * 2, name='own.double')(x)
M | jax.nn.log_sigmoid(x) + jnp.sinc(x)
B/d M | jax.nn.relu(x) + jax.nn.softmax(x, axis=1) * jax.nn.logsumexp(x, axis=1, keepdims=True)
B/d -> '' | shardops.psum('+d -> ', shardops.sum_unreduced('B/d -> +d', jnp.ones_like(x)))
# Control flow
B/d M | lax.while_loop(lambda c: shardops.any('B/d M -> ', jnp.abs(c) > 1), lambda c: c * 0.5, x)
B/d M | jax.vmap(lambda r: lax.while_loop(lambda c: jnp.any(jnp.abs(c) > 1), lambda c: c * 0.5, r))(x)
B/d M | jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r, lambda r: 2 * r, r))(x)
B/d M, i32 B/d -> B/d M | jax.vmap(lambda r, n: lax.fori_loop(0, n, lambda i, c: c * 0.5, r))(x, y % 9)
M/d -> M
    | lax.fori_loop(0, 3, lambda i, c: lax.cond(i > 1, lambda e: e + shardops.all_gather('M/d -> M', x),
      lambda e: e, c), jnp.ones(64))
M, B/d M -> M | lax.cond(x[0] > 0, lambda: reduced(lambda w: squares(y * w[None]), x), lambda: x)
B/d M | jax.vmap(lambda r: r * lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 1.0), (r[0], 1.0))[1])(x)
# Dims on their way
M/d/t -> M/t/d | shardops.slice('M -> M/t/d', shardops.all_gather('M/d/t -> M', x))
M/d F/t -> M F/t/d | shardops.all_to_all('M/d F/t -> M F/t/d', x)
B M/d/t, F M/d/t -> B F/t/d
    | shardops.psum_scatter('B F +d +t -> B F/t/d', shardops.einsum_unreduced('B M/d/t, F M/d/t -> B F +d +t', x, y))
B M/d/t, F M/d/t -> B F/d/t
    | shardops.psum_scatter('B F/d +t -> B F/d/t', shardops.psum_scatter('B F +d +t -> B F/d +t',
      shardops.einsum_unreduced('B M/d/t, F M/d/t -> B F +d +t', x, y)))
M/d, H/t -> M/d H/t | shardops.einsum_unreduced('M/d, H/t -> M/d H/t', x, y)
B/d M, M -> '' | shardops.psum('+d -> ', shardops.einsum_unreduced('B/d M, M -> +d', x, y))
B/d M, B/d M -> Z/d M | jnp.stack([x, y], axis=1).reshape(-1, x.shape[1])
2 B/d M -> Z/d M | jnp.swapaxes(x, 0, 1).reshape(-1, 64)
B M/t -> B 8 Z/t | jnp.swapaxes(x.reshape(x.shape[0], -1, 8), 1, 2)
B/d M -> Z/d 32 | x.reshape(-1, 32)
B/d M -> Z/d | x.reshape(-1)
B/d M -> 1 B/d M | x.reshape(1, -1, 64)
B/d M -> B/d 1 M 1 | x.reshape(-1, 1, 64, 1)
B M/t | (x.reshape(x.shape[0], -1, 8) - x.reshape(x.shape[0], -1, 8).mean(-1, keepdims=True)).reshape(x.shape)
B L M/t | jnp.fft.fft(x, axis=1).real
B/d L M -> B/d 16 M | jax.image.resize(x, (x.shape[0], 16, x.shape[2]), 'linear')
B/d M | jnp.where(x > jnp.median(x, axis=1, keepdims=True), x, 0.0)
B/d M | x[jnp.arange(x.shape[0])]
L/d M -> Z/d M | x.reshape(-1, 2, 64)[:, 0]
B/d M | jax.random.permutation(jax.random.key(0), x, axis=1)
B/d L 2 -> B/d L | lax.bitcast_convert_type(x.astype(jnp.float16), jnp.float32)
M -> M | x + jax.vmap(lambda n: jax.random.uniform(jax.random.key(n, impl='rbg')))(jnp.arange(64))
M/d | x + shardops.slice('M -> M/d', jax.random.normal(jax.random.key(0), (64,)))
M/d | jnp.interp(x, jnp.arange(64.0), jnp.arange(64.0) ** 2)
L M -> L | jax.vmap(lambda r: jnp.sum(r) - lax.pmean(jnp.sum(r), 'i'), axis_name='i')(x)
B/d M | jax.vmap(lambda r: r - lax.pmean(r, 'i'), 1, 1, axis_name='i')(x)
M | x * jnp.ldexp(jnp.ones(64), jnp.zeros(64, int))
V M, i32 B/d -> B/d M | x[y]
B/d M, i32 B/d -> 8 M
    | shardops.psum('8 M +d -> 8 M', shardops.einsum_unreduced('B/d 8, B/d M -> 8 M +d', jax.nn.one_hot(y, 8), x))
# Numbers of Python as operands
'' | shardops.psum('+d -> ', shardops.pending(' -> +d', 2.0)) * x
B/d | shardops.psum('B/d +t -> B/d', shardops.einsum_unreduced('B/d, +t -> B/d +t', x, shardops.pending(' -> +t', 2.0)))
# Means and gradients
B/d -> '' | shardops.psum('+d -> ', total(x) / (x.shape[0] * shardops.axis_size('d')))
B/d, B/d -> '' | shardops.psum('+d -> ', total(x) / shardops.psum('+d -> ', total(jnp.abs(y))))
B/d M | x - (shardops.psum('M +d -> M', shardops.sum_unreduced('B/d M -> M +d', x))
    / (x.shape[0] * shardops.axis_size('d')))[None]
'', B/d M -> '' | shardops.psum('+d +t -> ', shardops.grad(lambda w: squares(jnp.sin(y * w)))(x))
M/t, B/d M/t -> M/t | shardops.psum('M/t +d -> M/t', shardops.grad(
    lambda w: shardops.sum_unreduced('B/d M/t -> +d +t', jnp.sin(y * w[None])))(x))
M, B/d M -> M | reduced(lambda w: squares(y * w[None]) + shardops.pending(' -> +d +t', jnp.sum(w * w)), x)
M, B/d M -> M
    | reduced(lambda w: shardops.pending(' -> +d +t', jnp.sqrt(shardops.psum('+d +t -> ', squares(y * w[None])))), x)
M, B/d M -> M | reduced(lambda w: squares(jnp.linalg.solve(jnp.diag(2 + jnp.cos(w)), y.T).T), x)
M, B/d M -> M | reduced(lambda b: shardops.pending(' -> +d +t', jnp.sum((shardops.psum('M +d -> M',
    shardops.sum_unreduced('B/d M -> M +d', y + b[None])) / 16) ** 2)), x)
M, B/d M -> M | reduced(lambda w: jnp.sum(shardops.grad(lambda v: squares(jnp.tanh(y * v[None])))(w) * x), x)
M, B/d M -> M | reduced(lambda w: squares(y * (w - 0.1 * reduced(lambda v: squares(y * v[None]), w))[None]), x)
M, B/d M -> M | reduced(lambda w: squares(jax.checkpoint(lambda w: jnp.tanh(y * w[None]),
    policy=jax.checkpoint_policies.everything_saveable)(w)), x)
M, B/d M -> M | reduced(lambda w: squares(y * w[None] + lax.stop_gradient(jnp.round(y * w[None]) - y * w[None])), x)
M, B/d M -> M | reduced(lambda w: squares(own_vjp(jnp.sin, lambda r, g: (g * jnp.cos(r[0]),))(y * w[None])), x)
M, B/d M -> M | reduced(lambda w: lax.scan(lambda c, s: (c + squares(y * w[None] * s), None),
    shardops.zeros('+d +t', f32), jnp.arange(3.0))[0], x)
M, B/d M -> B/d M | shardops.grad(lambda w: (squares(y * w[None]), y * w[None]), has_aux=True)(x)[1]
M, M, B/d M -> M | sum(jax.tree.map(lambda w, g: w + shardops.psum('M +d +t -> M', g), (x, y),
    shardops.grad(lambda a, b: squares(z * (a * b)[None]), (0, 1))(x, y)))
M, 3 B/d M -> M
    | reduced(lambda w: 2 * shardops.sum_over_chunks(lambda w, x, _: squares(x * w[None]), w, y * w[None, None], y), x)
"""
# Accepted too; on another number of devices they have another type, order, or random numbers.
OF_DEVICES = r"""
B/d M/t -> B/d 2 Z/t | shardops.regroup('B/d M/t -> B/d 2 Z/t', x)
B/d M/t | x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(jnp.float32)
d/d M, d/d M -> d/d M | (jnp.tanh(x[0]) * y[0])[None]
d/d M -> d/d 1 M | x.reshape(1, 1, 64)
8 d/d M -> 8 d/d 8 8 | x.reshape(8, 1, 8, 8)
1 d/d M -> 1 d/d 8 8 | x.reshape(1, 1, 8, 8)
d/d M, t/t M -> d/d t/t | x @ y.T
d/d t/t M -> d/d t/t M | jnp.stack([x, x])[0]
d/d M, d/d M -> d/d | jnp.einsum('dm,dm->d', x, y)
B/d M -> i32 d/d | shardops.index('d')
B/d M | (jax.debug.print('{}', x), x)[1]
B/d C M | lax.linalg.householder_product(x, jnp.sum(x, axis=1))
"""
# What is done to u, a sum over t that is owed, 'B/d M +t'.
LINEAR = r"""
-u
u / u.shape[-1]
u * jnp.arange(64, dtype=jnp.float32)[None]
u @ jnp.eye(64)
u - 2 * u
jnp.where(jnp.arange(64)[None] > 3, u, -u)
jnp.cumsum(u, axis=1)
jnp.flip(u, axis=1)
jnp.roll(u, 1, axis=1)
jnp.take(u, jnp.arange(64), axis=1)
u.at[:, 3:4].add(u[:, :1])
jnp.pad(u, ((0, 0), (1, 0)))[:, 1:]
jnp.unstack(jnp.stack([u, -u]))[0]
u.astype(jnp.bfloat16).astype(jnp.float32) * 0.0 + u
u.reshape(u.shape[0], 8, 8).reshape(u.shape)
lax.optimization_barrier((u, jnp.float32(3)))[0]
lax.scan(lambda c, _: (c + u, None), shardops.zeros('B/d M +t', f32), None, length=3)[0]
lax.scan(lambda c, _: (c + u, None), jnp.zeros_like(u), None, length=3)[0]
lax.stop_gradient(u)
jax.checkpoint(lambda v: 2 * v)(u)
lax.cond(jnp.float32(3) > 2, lambda v: v, lambda v: 2 * v, u)
u - jnp.mean(u, axis=1, keepdims=True)
lax.reduce_window(u, 0.0, lax.add, (1, 3), (1, 1), 'SAME')
u.at[:, jnp.arange(64) + 10].get(mode='fill', fill_value=0.0)
u.at[:, jnp.arange(64) + 10].get(mode='clip')
u.at[:, 0].divide(2.0)
jnp.pad(u[:, 1:], ((0, 0), (1, 0)), mode='wrap')
u + lax.cond(jnp.float32(1) > 1, lambda: jnp.zeros((1, 64)), lambda: jnp.zeros((1, 64)))
jnp.where(jnp.arange(64)[None] > 3, u, shardops.pending('B/d M -> B/d M +t', shardops.zeros('B/d M', f32) + 1))
jnp.average(jnp.stack([u, u]), axis=0, weights=jnp.array([0.25, 0.75]))
jnp.real(jnp.fft.ifft(jnp.fft.fft(u, axis=1), axis=1))
jax.vmap(lambda r: jnp.convolve(r, jnp.ones(3), mode='same'))(u)
lax.dynamic_update_slice(u, jnp.zeros_like(u[:, :3]), (0, 0))
lax.cond(jnp.float32(3) > 2, lambda: u, lambda: jnp.zeros_like(u))
own_vjp(lambda u: 2 * u, lambda r, g: (2 * g,))(u)
"""


# -- Layers ------------------------------------------------------------------------------------------------------------
@right
@typed
def sharded_feed_forward(x: f32['B/d L M/t'], w: f32['M/d F/t'], v: f32['F/t M/d']) -> f32['B/d L M/t']:
    gathered: f32['B/d L M'] = shardops.all_gather('B/d L M/t -> B/d L M', x)
    w: f32['M F/t'] = shardops.all_gather('M/d F/t -> M F/t', w)
    h = jax.nn.silu(shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', gathered, w))
    v = shardops.all_gather('F/t M/d -> F/t M', v)
    y: f32['B/d L M +t'] = shardops.einsum_unreduced('B/d L F/t, F/t M -> B/d L M +t', h, v)
    return x + shardops.psum_scatter('B/d L M +t -> B/d L M/t', y)


@right
def norm_of_split_features(x: f32['B/d M/t'], scale: f32['M']) -> f32['B/d M/t']:
    square = shardops.psum('B/d +t -> B/d', shardops.sum_unreduced('B/d M/t -> B/d +t', x * x)) / scale.shape[0]
    return x / jnp.sqrt(square)[:, None] * shardops.slice('M -> M/t', scale)[None]


@right
def heads(x: f32['B/d L M'], w: f32['3 M F/t']) -> f32['B/d L F/t']:
    q, k, v = (shardops.einsum_unreduced('B/d L M, M F/t -> B/d L F/t', x, u).reshape(*x.shape[:2], -1, 4) for u in w)
    weights = jnp.einsum("blhk,bshk->bhls", q, k)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(weights.shape[2:], bool))[None, None], weights, -1e9))
    return jnp.einsum("bhls,bshk->blhk", weights, v).reshape(*x.shape[:2], -1)


@right
def tokens_side_by_side(x: f32['B/d L M'], w: f32['M F']) -> f32['B/d L F']:
    return jnp.tanh(x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:2], w.shape[1])


@right
@typed
def loss_of_split_logits(logits: f32['B/d V/t'], targets: i32['B/d']) -> f32['B/d']:
    top = shardops.pmax('B/d V/t -> B/d', lax.stop_gradient(logits))
    total = shardops.sum_unreduced('B/d V/t -> B/d +t', jnp.exp(logits - top[:, None]))
    own = shardops.psum('B/d +t -> B/d', shardops.index_unreduced('B/d [V/t], B/d -> B/d +t', logits, targets))
    return jnp.log(shardops.psum('B/d +t -> B/d', total)) + top - own


@right
def experts(x: f32['E C/t M'], w: f32['E/t M F']) -> f32['E C/t F']:
    x = shardops.all_to_all('E C/t M -> E/t C M', x)
    return shardops.all_to_all('E/t C F -> E C/t F', jnp.einsum("ecm,emf->ecf", x, w))


# -- Decoding: indices, caches, masks ----------------------------------------------------------------------------------
@right
def cache_at_each_rows_position(cache: f32['B/d L M/t'], row: f32['B/d M/t'], at: i32['B/d']) -> f32['B/d L M/t']:
    return jax.vmap(lambda cache, row, at: cache.at[at].set(row))(cache, row, at)


@right
def sums_by_segment(x: f32['B/d L'], ids: i32['B/d L']) -> f32['B/d 8']:
    return jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=8))(x, ids)


@right
def along_a_whole_dim(x: f32['B/d L']) -> tuple[f32['B/d L'], f32['B/d L'], f32['B/d L']]:
    return jnp.cumsum(x, axis=1), jnp.sort(x, axis=1), lax.associative_scan(jnp.multiply, x, axis=1)


@right
def recurrence(x: f32['B/d L'], decay: f32['']) -> f32['B/d L']:
    return lax.scan(lambda c, r: (decay * c + r,) * 2, jnp.zeros(x.shape[:1]), x.T)[1].T


@right
def integers(ids: i32['B/d L']) -> tuple[i32['L'], f32['B/d 8'], i32['B/d L']]:
    total = shardops.psum('L +d -> L', shardops.sum_unreduced('B/d L -> L +d', ids))
    return total // 2, jnp.sum(jax.nn.one_hot(ids, 8), axis=1), ids % 3


# -- Sums that are owed ------------------------------------------------------------------------------------------------
@right
def bias_added_once(x: f32['B/d F/t'], bias: f32['M'], w: f32['F/t M']) -> f32['B/d M']:
    y = shardops.einsum_unreduced('B/d F/t, F/t M -> B/d M +t', x, w)
    return shardops.psum('B/d M +t -> B/d M', y + shardops.pending('M -> M +t', bias)[None])


@right
def global_norm(a: f32['M/d F/t'], b: f32['M/t']) -> tuple[f32['M/d F/t'], f32['']]:
    square = shardops.psum('+d +t -> ', shardops.sum_unreduced('... -> +d +t', a * a))
    square += shardops.psum('+t -> ', shardops.sum_unreduced('... -> +t', b * b))
    return a / jnp.sqrt(square), shardops.pmax('M/d F/t -> ', jnp.abs(a))


# -- Control flow ------------------------------------------------------------------------------------------------------
@right
def loops(x: f32['L M/t']) -> f32['L M/t']:
    first = shardops.all_gather('L M/t -> L M', x)[0, 0]
    grown = lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1] + 2), (first, x))[1]
    return lax.fori_loop(0, 3, lambda i, c: c * 0.5 + x, grown)


@right
def ring(x: f32['B/d L']) -> f32['L']:
    own = jnp.sum(shardops.regroup('B/d L -> d/d R L', x), axis=1)

    def turn(carry, _):
        moved, total = carry
        return (shardops.ppermute('d/d L -> d/d L', moved, 1), total + own * moved), None

    (_, total), _ = lax.scan(turn, (own, jnp.zeros_like(own)), None, length=int(shardops.axis_size('d')))
    return shardops.psum('L +d -> L', shardops.sum_unreduced('d/d L -> L +d', total))


@right
def slots(x: f32['B/d L']) -> f32['L']:
    """Each device hands on what it got, and keeps it: in which slot depends on how many devices there are."""
    own, devices = jnp.sum(shardops.regroup('B/d L -> d/d R L', x), axis=1), int(shardops.axis_size('d'))
    kept = shardops.zeros('slots d/d L', f32, slots=devices)

    def turn(carry, i):
        moved, kept = carry
        slot = (i + devices - 1) % devices
        kept = lax.dynamic_update_index_in_dim(kept, jnp.where(slot < devices, moved, 0.0), slot, 0)
        return (shardops.ppermute('d/d L -> d/d L', moved, 1), kept), None

    (_, kept), _ = lax.scan(turn, (own, kept), jnp.arange(devices))
    return shardops.psum('L +d -> L', shardops.sum_unreduced('slots d/d L -> L +d', kept * own[None]))


@right
def each_device_by_itself(x: f32['B/d M/t']) -> f32['B/d M/t']:
    own = shardops.regroup('B/d M/t -> d/d R M/t', x)

    def scaled(own):
        total = shardops.psum('R +t -> R', shardops.sum_unreduced('R M/t -> R +t', own))
        return own * jnp.tanh(total)[:, None]

    return shardops.regroup('d/d R M/t -> B/d M/t', shardops.each('d', scaled, own))


# -- Gradients ---------------------------------------------------------------------------------------------------------
@right
def pulled_back(w: f32['M'], x: f32['B/d M'], y: f32['B/d M']) -> tuple[f32['M'], f32['B/d M']]:
    _, pull = shardops.vjp(lambda w, x: jnp.tanh(x * w[None]), w, x)
    of_w, of_x = pull(shardops.pending('B/d M -> B/d M +t', y))
    return shardops.psum('M +d +t -> M', of_w), shardops.psum('B/d M +t -> B/d M', of_x)


@right
def pulled_ones(x: f32['B/d M/t']) -> f32['B/d M/t']:
    y, pull = shardops.vjp(lambda x: shardops.sum_unreduced('B/d M/t -> B/d +t', x**2), x)
    return pull(jnp.ones(y.shape))[0]


@pytree_dataclass
class Layer:
    w: f32['M/d M2/t']
    scale: f32['M2/t']


@pytree_dataclass
class Step:
    loss: f32['']
    gradients: tuple[Array['3', Layer], f32['M/d/t']]


@right
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


@right
def aside(w: f32['M/t'], x: f32['B/d M/t']) -> tuple[f32['M/t'], f32['']]:
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

    def loss(w):
        y = own(x * w[None])
        return shardops.sum_unreduced('B/d M/t -> +d +t', y), shardops.pmax('B/d M/t -> ', lax.stop_gradient(x))

    gradient, top = shardops.grad(loss, has_aux=True)(w)
    return shardops.psum('M/t +d -> M/t', gradient), top


@right
def gradient_of_an_embedding(table: f32['V/t M/d'], ids: i32['B/d'], w: f32['B/d M']) -> f32['V/t M/d']:
    def loss(table):
        table = shardops.all_gather('V/t M/d -> V/t M', table)
        rows = shardops.index_unreduced('[V/t] M, B/d -> B/d M +t', table, ids)
        return shardops.sum_unreduced('B/d M +t -> +d +t', rows * w)

    return shardops.grad(loss)(table)


@right
def gradients_over_chunks(
    w: f32['M V/t'], x: f32['3 B/d M'], y: i32['3 B/d']
) -> tuple[f32[''], f32['M V/t'], f32['3 B/d M']]:
    def loss(w, x, y):
        losses = loss_of_split_logits(shardops.einsum_unreduced('B/d M, M V/t -> B/d V/t', x, w), y)
        return shardops.pending('+d -> +d +t', shardops.sum_unreduced('B/d -> +d', losses))

    def total(w, x):
        return 3 * shardops.sum_over_chunks(loss, w, x, y)

    value, (of_w, of_x) = shardops.value_and_grad(total, (0, 1))(w, x)
    of_w = shardops.psum('M V/t +d -> M V/t', of_w)
    return shardops.psum('+d +t -> ', value), of_w, shardops.psum('3 B/d M +t -> 3 B/d M', of_x)


@right
def gradient_of_what_chunks_close_over(w: f32['M'], x: f32['3 B/d M'], scale: f32['']) -> f32['M']:
    def loss(w):
        def of_chunk(scale, x, _):
            y = jnp.sin(x * w[None]) * scale
            return shardops.pending('+d -> +d +t', shardops.sum_unreduced('B/d M -> +d', y))

        return shardops.sum_over_chunks(of_chunk, scale, x, x)

    return shardops.psum('M +d +t -> M', shardops.grad(loss)(w))


@right
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


@right
def whole_matrices(g: f32['S M/d F/t']) -> f32['S M/d F/t']:
    g = shardops.all_to_all('S M/d F/t -> S/d M F/t', g)
    other = g
    a = shardops.einsum_unreduced('S/d M F/t, S/d N F/t -> S/d M N +t', g, other)
    a = shardops.psum('S/d M N +t -> S/d M N', a)
    b = shardops.einsum_unreduced('S/d M N, S/d N O -> S/d M O', a, a) - 2 * a
    g = shardops.einsum_unreduced('S/d M N, S/d N F/t -> S/d M F/t', b, g)
    return shardops.all_to_all('S/d M F/t -> S M/d F/t', g)
