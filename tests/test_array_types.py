"""The test suite checks the array types of host code."""

import jaxtyping
import numpy as np
import pytest

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
