"""The test suite checks the array types of host code, and of what sees one device's part."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kernels import blockwise
from models import decoding
from runtime.data import order
from tools.whole_rows import Sequences


def test_array_types_are_checked():
    """Arguments, results, and dims that two of them share; also the fields of a dataclass."""
    ids, lengths = np.zeros(3, np.uint32), np.array([3])
    with pytest.raises(jaxtyping.TypeCheckError):
        order.permute(np.zeros(3, np.int32), 3, (0,))
    mixture = order.MixtureOrder([1.0])
    mixture._rank = mixture._rank.astype(np.float64)
    with pytest.raises(jaxtyping.TypeCheckError):
        mixture.at(np.array([0]))
    Sequences(ids, lengths, np.ones(3, bool))
    with pytest.raises(jaxtyping.TypeCheckError):
        Sequences(ids, lengths, np.ones(2, bool))


def test_a_kernels_operands_are_checked():
    """Keys of another batch than the queries, and segments of another type."""
    q, k, segment = (
        np.zeros((2, 8, 1, 2, 4), np.float32),
        np.zeros((2, 8, 2, 4), np.float32),
        np.zeros((2, 8), np.int32),
    )
    q, k, segment = map(jnp.asarray, (q, k, segment))
    blockwise.forward(q, k, k, segment)
    for wrong in (q, k[:1], k, segment), (q, k, k, segment > 0):
        with pytest.raises(jaxtyping.TypeCheckError):
            blockwise.forward(*wrong)


def test_what_decoding_hands_over_is_checked():
    """On the host, and on one device, in a module where shardlib checks other functions: keys and lengths of other rows
    than the cache has, candidates of another number of beams."""
    beams = decoding.Beams(2, 4, 1.0, np.array([7], np.uint32))
    values, ids = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.int32)
    beams.advance(values, ids)
    with pytest.raises(jaxtyping.TypeCheckError):
        beams.advance(values, ids[:1])
    old, new, length = jnp.zeros((1, 2, 3, 8, 4)), jnp.zeros((1, 2, 5, 3, 4)), jnp.zeros(2, jnp.int32)
    assert decoding.write(old, new, length).shape == old.shape
    for wrong in (old, new[:, :1], length), (old, new, length[:1]), (old, new, length > 0):
        with pytest.raises(jaxtyping.TypeCheckError):
            decoding.write(*wrong)
