"""The ring: each device meets every block once, and each gradient comes home; and attention by it is attention."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import module_of
from parts import says
from prove import SIZES, program, prove, refusal, table
from test_attention import distances, operands, truth

import kernels.ring
from kernels import blockwise
from kernels.ring import ring
from ledger.compiled.agreement import differences
from ledger.count.costs import saved
from ledger.count.program import read
from ledger.count.step import of_step
from shardlib import shardops
from shardlib.mesh import make_mesh
from shardlib.shard_map import typed_shard_map
from shardlib.shardtypes import f32, i32

SOURCE = pathlib.Path(kernels.ring.__file__).read_text()


# -- Labels: every device and every block is a number ------------------------------------------------------------------
def forward(own, k, v, at):
    """The mean, over all blocks, of a row with a 1 at the block's number, if all that goes round is of one block."""
    is_one = (k == v) & (k.astype(jnp.int32) == at)
    return jnp.where(is_one[:, None], jax.nn.one_hot(at, own.shape[1]), 0), jnp.zeros(own.shape[:1])


def backward(own, k, v, at, o, log_sum_exp, gradient):
    """A device's gradient says which blocks it met; a block's is its number + 1 times a digit for each device it
    met."""
    device = 2 ** own[:, 0]
    return forward(own, k, v, at)[0], device * (k + 1), device * (v + 1)


def labels(ring):
    """The program of devices and blocks with these numbers: what is found forward, and the gradients."""

    def both(
        own: f32['L/c X'], k: f32['S/c'], at: i32['S/c']
    ) -> tuple[f32['L/c X'], f32['L/c X'], f32['S/c'], f32['S/c']]:
        def attend(own, k, v):
            return ring('L/c X, [S/c], [S/c], [S/c] -> L/c X', forward, backward, own, k, v, at)

        o, pull = shardops.vjp(attend, own, k, k)
        return o, *pull(own)

    return both


def require_labels(ring, devices):
    number = np.arange(devices, dtype=np.float32)
    with jax.set_mesh(make_mesh(dict(c=devices), devices=jax.devices()[:devices])):
        own = np.repeat(number[:, None], devices, axis=1)
        given = own, number, number.astype(np.int32)
        o, of_own, of_k, of_v = jax.jit(typed_shard_map(labels(ring)))(*given)
    np.testing.assert_allclose(o, np.full((devices, devices), 1 / devices), rtol=1e-6, err_msg='forward')
    np.testing.assert_array_equal(of_own, np.ones((devices, devices)), err_msg='what stays')
    home = np.arange(1, devices + 1) * (2**devices - 1)
    np.testing.assert_array_equal(of_k, home, err_msg='what goes round')
    np.testing.assert_array_equal(of_v, home, err_msg='what goes round')


@pytest.mark.parametrize('devices', [1, 2, 3, 4])
def test_each_device_meets_each_block_once(devices):
    """Each block counts once forward and once backward, and its gradient comes home with a part from every device."""
    require_labels(ring, devices)


TURNED = 'return [lax.ppermute(value, axis, pairs) for value in values]'
SCHEDULES = {
    'v is not passed on': (TURNED,
     'return [value if n == 1 else lax.ppermute(value, axis, pairs) for n, value in enumerate(values)]'),
    'positions go the other way': (TURNED,
     'return [lax.ppermute(value, axis, pairs if n < 2 else [(b, a) for a, b in pairs]) '
      'for n, value in enumerate(values)]'),
    'a turn too few': ('length=turns - 1', 'length=turns - 2'),
    'a turn too few backward': ('length=turns - 2', 'length=turns - 3'),
    'a turn too many': ('length=turns - 1', 'length=turns'),
    'gradients do not come home': ('sums = of_stay, turned(of_moving)', 'sums = of_stay, of_moving'),
    'gradients stay where they are': ('turned(moving), turned(of_moving)', 'turned(moving), of_moving'),
}  # fmt: skip


@pytest.mark.parametrize('what', SCHEDULES)
def test_another_schedule_has_other_labels(what, tmp_path):
    """Types cannot see the schedule; the labels' numbers can."""
    old, new = SCHEDULES[what]
    assert SOURCE.count(old) == 1
    changed = module_of(tmp_path / 'ring.py', SOURCE.replace(old, new))
    with pytest.raises(AssertionError, match=r'forward|what stays|what goes round'):
        require_labels(changed.ring, 4)


# -- Attention ---------------------------------------------------------------------------------------------------------
def attend(q, k, v, position, segment):
    types = 'B/d L/c Q K/t D, B/d [S/c] K/t D, B/d [S/c] K/t D, L/c, [S/c], B/d L/c, B/d [S/c] -> B/d L/c Q K/t D'

    def forward(q, k, v, *places):
        return blockwise.forward(q, k, v, places)

    def backward(q, k, v, *others):
        *places, o, log_sum_exp, gradient = others
        return blockwise.backward(q, k, v, tuple(places), o, log_sum_exp, gradient)

    return ring(types, forward, backward, q, k, v, position, position, segment, segment)


def attention(
    q: f32['B/d L/c Q K/t D'],
    k: f32['B/d S/c K/t D'],
    v: f32['B/d S/c K/t D'],
    position: i32['L/c'],
    segment: i32['B/d L/c'],
    gradient: f32['B/d L/c Q K/t D'],
) -> tuple[f32['B/d L/c Q K/t D'], f32['B/d L/c Q K/t D'], f32['B/d S/c K/t D'], f32['B/d S/c K/t D']]:
    o, pull = shardops.vjp(lambda *given: attend(*given, position, segment), q, k, v)
    return o, *pull(gradient)


MESHES = [dict(d=1, c=2, t=1), dict(d=2, c=2, t=2), dict(d=1, c=4, t=2), dict(d=2, c=4, t=1)]


@pytest.mark.slow
@pytest.mark.parametrize('sizes', MESHES, ids=str)
def test_attention_in_a_ring(sizes, monkeypatch):
    """Rows with segments lie in zigzag order: o and the gradients are float64's to 2e-6, and the compiled program sends
    what the ledger counts."""
    monkeypatch.setattr(blockwise, 'BLOCK', 4)
    q, k, v, segment, gradient = (np.asarray(operand) for operand in operands(32))
    order = blockwise.dealt(32, sizes['c'])
    given = *(operand[:, order] for operand in (q, k, v)), order, segment[:, order], gradient[:, order]
    with jax.set_mesh(make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())])):
        traced = jax.jit(typed_shard_map(attention)).trace(*given)
        compiled = traced.lower().compile()
        found = compiled(*given)
    expected = truth(q, k, v, segment, gradient)
    assert max(distances(found, [array[:, order] for array in expected])) < 2e-6
    ledger = of_step(traced, sizes, source=__file__, tokens=64)
    rows = differences(ledger, compiled.as_text())  # nothing else stands between what both passes pass on first
    assert all(row.reason == 'merged with an equal one' for row in rows), rows
    part = 4 * k.size // math.prod(sizes.values())
    places = 4 * 32 // sizes['c'] + 4 * segment.size // sizes['d'] // sizes['c']
    turns = sizes['c'] - 1
    assert ledger.sent_bytes() == turns * 2 * (2 * part + places) + (turns + 1) * 2 * part


def test_nothing_of_a_turn_is_kept():
    """The backward pass keeps o and the log-sum-exp, once each; the operands are arguments here."""
    sizes = dict(d=2, c=4, t=2)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    q, k, v, segment, gradient = (jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands(64))
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = typed_shard_map(attention, check=False)
        traced = jax.jit(mapped).trace(q, k, v, jax.ShapeDtypeStruct((64,), jnp.int32), segment, gradient)
    kept = sorted((row.why, row.shape, row.times) for row in saved(read(traced.jaxpr)))
    assert kept == [('save_for_backward', (1, 16, 2, 1), 1), ('save_for_backward', (1, 16, 2, 1, 8), 1)]


# -- Types -------------------------------------------------------------------------------------------------------------
def test_a_ring_is_proved():
    """The check accepts a ring whose gradients' types are claimed."""
    assert prove(labels(ring), dict(c=4), SIZES | dict(X=4)) > 8


REFUSED = table(r"""
L/c D, S/c | ring('L/c D, S/c -> L/c D', x, y) | one dim in [ ], split over an axis, the same
L/c D, S | ring('L/c D, [S] -> L/c D', x, y) | split over an axis
L/c D, S | ring('L/c D, [S/c] -> L/c D', x, y) | '[S/c]' says S/c … whole in the value: write S
L/c D, S/c/d | ring('L/c D, [S/c/d] -> L/c D', x, y) | split over an axis
L/c D, S/c, B/c | ring('L/c D, [S/c], [B/c] -> L/c D', x, y, z) | the same in all
L D, S/c | ring('L D, [S/c] -> L D', x, y) | first operand stays, is split over c
L/c D, S/c | ring('[L/c] D, [L/c] -> L/c D', x, x) | first operand stays, is split over c
L/c D, S/c | ring('L/c D, [S/c] -> L/c', x, y) | the result is 'L/c D', not 'L/c' fix: write 'L/c D, [S/c] -> L/c D'
L/c D, S/c D/d | ring('L/c D, [S/c] D/d -> L/c D', x, y) | D in one operand, D/d in the other
L/c D, S/c B/d | ring('L/c D, [S/c] B/d -> L/c D', x, y) | differs along d, the result does not
L/c D, S/c, B | ring('L/c D, [S/c], B +d -> L/c D', x, y, z) | pending, and a softmax is not linear
L/c D, S/c | ring('L/c D, [S/c] -> L/c D', x, y, forward=sends) | local to a device sends over c
L/c D, S/c | ring('L/c D, [S/c] -> L/c D', x, y, backward=sends) | a number of devices over c
""")


def sends(own, k, *_):
    return jax.lax.psum(own, 'c'), (jnp.zeros(own.shape[:1]) if not _ else k)


@pytest.mark.parametrize('row', REFUSED, ids=[row[1] for row in REFUSED])
def test_refused(row):
    """The check refuses wrong strings, and functions that send."""

    def ring(spec, *given, forward=lambda own, *_: (own, own[:, 0]), backward=lambda own, k, *_: (own, k)):
        return kernels.ring.ring(spec, forward, backward, *given)

    types, body, message = row
    text = refusal(program(f"{types} -> {types.split(',')[0]}", body, dict(ring=ring, sends=sends)), dict(d=2, c=2))
    assert says(message, text), text
