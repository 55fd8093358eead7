"""tools/whole_rows.py: sequences in rows, against packing them one by one; and how much of the rows is padding."""

import numpy as np
import pytest

from tools.whole_rows import OPEN_ROWS, Sequences, in_rows


def rows_one_by_one(parts, room):
    """Rows of lists of ids: each sequence goes into the first of the newest rows in which it has room."""
    rows = []
    for part in parts:
        for row in rows[-OPEN_ROWS:]:
            if all(sum(map(len, there)) + len(new) <= most for there, new, most in zip(row, part, room)):
                break
        else:
            row = [[] for _ in room]
            rows.append(row)
        for there, new in zip(row, part):
            there.append(new)
    return rows


@pytest.mark.parametrize("room", [(40,), (30, 12)])
@pytest.mark.parametrize("count", [1, 7, 900])
def test_first_fit(room, count):
    """Rows hold what packing one by one puts there, in its order, then padding: one sequence of id 0, no target."""
    rng = np.random.default_rng(count)
    parts = [[rng.integers(1, 99, rng.integers(1, most + 1)) for most in room] for _ in range(count)]
    flat = [ids for part in parts for ids in part]
    ids = np.concatenate(flat).astype(np.uint32)
    found = in_rows(Sequences(ids, np.array([*map(len, flat)]), ids.astype(np.float32) / 2), room)
    expected, lengths = [], []
    for row in rows_one_by_one(parts, room):
        for there, most in zip(row, room):
            rest = most - sum(map(len, there))
            expected += [*there, np.zeros(rest, int)]
            lengths += [*map(len, there), *([rest] if rest else [])]
    np.testing.assert_array_equal(found.ids, np.concatenate(expected))
    np.testing.assert_array_equal(found.lengths, lengths)
    np.testing.assert_array_equal(found.weight, found.ids / np.float32(2))
    assert len(found.ids) % sum(room) == 0


def test_little_padding():
    """Rows of 1024 with chats of about 200 tokens, widely spread, have less than 2% padding."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.3, 0.8, 5000).astype(int) + 1, 1024)
    ids = np.ones(lengths.sum(), np.uint32)
    found = in_rows(Sequences(ids, lengths, ids > 0), (1024,))
    assert 1 - len(ids) / len(found.ids) < 0.02, 1 - len(ids) / len(found.ids)
