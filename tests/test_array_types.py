"""The test suite checks the array types of host code, and of kernels, which see one device's part."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kernels import blockwise
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
