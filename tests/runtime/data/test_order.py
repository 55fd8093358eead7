"""The order of rows: permutations that are computed, how well they shuffle, and patterns that mix sources by weight."""

import numpy as np
import pytest
from parts import assert_refuses

from runtime.data.order import LONGEST_PATTERN, MixtureOrder, Order, permute


@pytest.mark.parametrize(
    "rows, rows_per_block, blocks", [(1, 1, 1), (2, 3, 1), (17, 4, 2), (100, 3, 5), (101, 8, 3), (64, 200, 1)]
)
def test_order(rows, rows_per_block, blocks):
    """Buffers follow one another without gaps, hold whole blocks, and a position's buffer is found without walking
    there."""
    order = Order(rows, rows_per_block, blocks, seed=7)
    for epoch in range(4):
        seen = []
        for buffer in range(order.buffers):
            first, here = order.rows_of(epoch, buffer)
            assert first == len(seen) and len(here)
            assert {order.buffer_of(epoch, first + place) for place in range(len(here))} == {buffer}
            assert len({row // rows_per_block for row in here.tolist()}) <= blocks
            seen += here.tolist()
        assert sorted(seen) == list(range(rows))


def test_large_orders():
    """Any place of 10¹³ rows is reached without walking there or holding anything of that size; a block larger than the
    data takes no more memory than the rows that there are, and gives the order of a block of their number."""
    order = Order(10**13, 128, 64, seed=0)
    first, rows = order.rows_of(epoch=3, buffer=10**9)
    assert order.buffer_of(3, first) == 10**9 and len(set(rows.tolist())) == 8192 and rows.max() < 10**13
    first, rows = Order(100, 2**40, 64, seed=3).rows_of(5, 0)
    assert first == 0 and rows.tolist() == Order(100, 100, 64, seed=3).rows_of(5, 0)[1].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permute(size):
    """It is a permutation, its inverse undoes it, and other keys give others."""
    whole = np.arange(size)
    there = permute(whole, size, (0, 1))
    np.testing.assert_array_equal(np.sort(there), whole)
    np.testing.assert_array_equal(permute(there, size, (0, 1), inverse=True), whole)
    np.testing.assert_array_equal(permute(whole[size // 2 :], size, (0, 1)), there[size // 2 :])
    if size > 10:
        assert (permute(whole, size, (0, 2)) != there).mean() > 0.5


def test_permute_is_fair():
    """Each index goes to each place about equally often, over many keys."""
    counts = np.zeros((17, 17))
    for key in range(1700):
        counts[np.arange(17), permute(np.arange(17), 17, (key,))] += 1
    assert 0.7 < ((counts - 100) ** 2 / 100).sum() / 16**2 < 1.3


# ---------------------------------------------------------------- how well it shuffles


def epoch_of(order, epoch=0):
    return np.concatenate([order.rows_of(epoch, buffer)[1] for buffer in range(order.buffers)])


def test_neighbours_end_up_apart():
    """Adjacent rows end up thousands of rows apart with the default sizes, and within a batch of 64 once in 64 rows,
    where a full shuffle has them a third of the whole apart. Whole blocks go anywhere."""
    rows = 2**20
    place = np.empty(rows, np.int64)
    place[epoch_of(Order(rows, 128, 64, seed=0))] = np.arange(rows)
    apart = np.abs(np.diff(place))
    assert 2300 < np.median(apart) < 2500  # of 8192 rows the median distance of two drawn at random is 2399
    assert np.mean(apart <= 64) < 1 / 60
    assert 0.26 * rows < np.median(np.abs(np.diff(place[::128]))) < 0.33 * rows


# ---------------------------------------------------------------- mixtures


@pytest.mark.parametrize(
    "weights",
    [[1.0], [0.7, 0.3], [1, 1, 1], [5, 2, 1], [0.5, 0.25, 0.125, 0.125], [0.98, 0.01, 0.01], [3.7, 0.29, 1.01, 2]],
)
def test_shares_are_exact(weights):
    """Among the first n rows, for every n, each source has n times its share to within one row, and exactly so in the
    long run."""
    mixture = MixtureOrder(weights)
    period = int(mixture.shares.sum())
    source, ordinal = mixture.at(np.arange(3 * period))
    for index, weight in enumerate(weights):
        taken = np.cumsum(source == index)
        expected = np.arange(1, 3 * period + 1) * (weight / sum(weights))
        assert np.abs(taken - expected).max() < 1
        assert abs(taken[-1] - expected[-1]) < 1e-6
        np.testing.assert_array_equal(ordinal[source == index], np.arange(taken[-1]))
        np.testing.assert_array_equal(mixture.rows_of(index, np.arange(taken[-1])), np.flatnonzero(source == index))
        assert [mixture.counts(n)[index] for n in (0, 1, period - 1, 2 * period + 1)] == [
            np.sum(source[:n] == index) for n in (0, 1, period - 1, 2 * period + 1)
        ]


def test_weights_as_written():
    """0.7 and 0.3 are 7 and 3 of 10, not what binary numbers make of them; a place in the far future costs the same.
    Weights without a short pattern are rounded to multiples of 1/65536 of their sum; one that would vanish is
    refused."""
    mixture = MixtureOrder([0.7, 0.3])
    assert mixture.shares.tolist() == [7, 3] and mixture.counts(10**15).tolist() == [7 * 10**14, 3 * 10**14]
    assert [array.tolist() for array in mixture.at(np.array([10**15]))] == [[0], [7 * 10**14]]
    weights = [0.333333, 0.1234567, 0.5]
    shares = MixtureOrder(weights).shares
    assert shares.sum() == LONGEST_PATTERN
    assert np.abs(shares / LONGEST_PATTERN - np.array(weights) / sum(weights)).max() < 1 / LONGEST_PATTERN
    message = "mixture[1].weight = 1e-06 … expected at least 1/65536"
    assert_refuses(message, MixtureOrder, [1.0, 1e-6])
