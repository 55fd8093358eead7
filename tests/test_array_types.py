"""The test suite checks the array types of host code, and of what sees one device's part."""

import functools

import jax.numpy as jnp
import jaxtyping
import numpy as np
from parts import assert_refuses

from kernels import blockwise
from models import context, decoding, experts
from runtime.data import order
from tools.whole_rows import Sequences

refused = functools.partial(assert_refuses, "", error=jaxtyping.TypeCheckError)


def test_array_types_are_checked():
    """Arguments, results, and dims that two of them share; also the fields of a dataclass."""
    ids, lengths = np.zeros(3, np.uint32), np.array([3])
    refused(order.permute, np.zeros(3, np.int32), 3, (0,))
    mixture = order.MixtureOrder([1.0])
    mixture._rank = mixture._rank.astype(np.float64)
    refused(mixture.at, np.array([0]))
    Sequences(ids, lengths, np.ones(3, bool))
    refused(Sequences, ids, lengths, np.ones(2, bool))


def test_a_kernels_operands_are_checked():
    """Keys of another batch than the queries, and segments of another type."""
    q, k, segment = jnp.zeros((2, 8, 1, 2, 4)), jnp.zeros((2, 8, 2, 4)), jnp.zeros((2, 8), jnp.int32)
    blockwise.forward(q, k, k, segment)
    for wrong in (q, k[:1], k, segment), (q, k, k, segment > 0):
        refused(blockwise.forward, *wrong)


def test_what_decoding_hands_over_is_checked():
    """Keys and lengths of other rows than the cache has, and candidates of another number of beams, are refused on the
    host, and on one device, in a module where shardlib checks other functions."""
    beams = decoding.Beams(2, 4, 1.0, np.array([7], np.uint32))
    values, ids = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.int32)
    beams.advance(values, ids)
    refused(beams.advance, values, ids[:1])
    old, new, length = jnp.zeros((1, 2, 3, 8, 4)), jnp.zeros((1, 2, 5, 3, 4)), jnp.zeros(2, jnp.int32)
    assert decoding.write(old, new, length).shape == old.shape
    for wrong in (old, new[:, :1], length), (old, new, length[:1]), (old, new, length > 0):
        refused(decoding.write, *wrong)


def test_what_experts_take_and_give_is_checked():
    """Slots and weights of other rows than the tokens have, blocks without their experts, one expert's matrix alone,
    and numbers of another type."""
    x, slot = jnp.zeros((2, 8, 4)), jnp.zeros((2, 8, 3), jnp.int32)
    weight, sent = jnp.ones((2, 8, 3)), experts.dispatch(x, slot, 5, 6)
    assert experts.combine(sent, weight, slot).shape == x.shape
    owner, rows, matrix = jnp.zeros(7, jnp.int32), jnp.zeros((7, 2, 4)), jnp.zeros((5, 4, 6))
    assert experts.products(rows, matrix, owner, 'nbM, nMH -> nbH', 1).shape == (7, 2, 6)
    numbers = jnp.arange(5, dtype=jnp.int32)
    every = functools.partial(experts.multiplied, lambda own: own, 5, 1)
    assert every(x, weight, slot, numbers, matrix, matrix, matrix).shape == x.shape
    for wrong in (
        lambda: experts.slots(weight, 5, 6, 2),
        lambda: experts.dispatch(x, slot[:1], 5, 6),
        lambda: experts.combine(sent[:, :1], weight, slot),
        lambda: experts.combine(sent, weight[:, :1], slot),
        lambda: experts.blocks(slot, 5, 5),
        lambda: experts.products(rows, matrix, owner[:1], 'nbM, nMH -> nbH', 1),
        lambda: experts.products(rows, matrix[0], owner, 'nbM, nMH -> nbH', 1),
        lambda: every(x, weight[:, :1], slot, numbers, matrix, matrix, matrix),
        lambda: every(x, weight, slot, weight, matrix, matrix, matrix),
    ):
        refused(wrong)


def test_what_attention_of_a_part_takes_and_gives_is_checked():
    """Segments of other keys than there are, a window for each key, keys of other places than the values, a gradient
    that is a number; and rows to be put in order that are no array."""
    q, k, position = jnp.zeros((2, 8, 1, 2, 4)), jnp.zeros((2, 16, 2, 4)), jnp.arange(16, dtype=jnp.int32)
    segment, window = jnp.zeros((2, 16), jnp.int32), jnp.int32(9)
    right = [q, k, k, position[:8], position, segment[:, :8], segment, window]
    wrong = [*right[:6], segment[:, :8], window], [*right[:7], position], [q, k[:, :8], *right[2:]]
    result = context.forward(None, *right)
    for function, more in (context.forward, ()), (context.by_blocks, ()), (context.backward, (q, result[1], q)):
        function(None, *right, *more)
        for operands in wrong:
            assert_refuses(
                f"models.context.{function.__name__}", function, None, *operands, *more, error=jaxtyping.TypeCheckError
            )
    refused(context.backward, None, *right, q, result[1], window)
    assert context.Context(2, "ring").in_order(segment).shape == segment.shape
    refused(context.Context(2, "ring").in_order, [0, 1, 2, 3])
