"""Rows of sequences: what is written comes back, packed or not, whatever the sequences; every token once; long ones split or cut."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged import FlatTokens, as_numpy, assert_refuses, encoded, ragged, read_from_chunks, sharding

from runtime.data import rows as rows_module
from runtime.data.batches import Batch, Loader
from runtime.data.flat_tokens import write_split


def read_all(loader):
    """All rows of a loader in the order of its batches: targets, is_seq_start, is_target."""
    return [np.concatenate(arrays) for arrays in zip(*(as_numpy(loader.load(step)) for step in range(loader.steps)))]


SEQUENCES = st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 9), max_size=20), min_size=1, max_size=15)
PROPERTY = settings(
    max_examples=20, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("packing", [True, False])
@given(
    sequences=SEQUENCES,
    length=st.integers(1, 12),
    chunk=st.integers(8, 50),
    masked=st.booleans(),
    seed=st.integers(0, 9),
)
@PROPERTY
def test_what_is_written_is_read(tmp_path_factory, packing, sequences, length, chunk, masked, seed):
    """Random ragged sequences, written and read shuffled, are the same sequences again when their rows are put back in order."""
    sequences = [np.array(ids, np.int64) for ids in sequences]
    masks = [np.arange(len(ids)) % 3 != 1 for ids in sequences] if masked else None
    path = tmp_path_factory.mktemp("property") / "data"
    write_split(path, "train", sequences, is_target=masks, chunk_tokens=chunk)
    joined = encoded(sequences) if any(map(len, sequences)) else np.zeros(0, np.uint32)
    targets = np.concatenate(masks) if masked else np.ones(len(joined), bool)
    config = FlatTokens(str(path), seed, packing, long_sequences="split")
    rows = len(joined) // length if packing else sum(-(-len(ids) // length) for ids in sequences)
    with pytest.MonkeyPatch.context() as patch:
        read_from_chunks(patch)
        if rows == 0:
            assert_refuses(
                "…less than one batch of 1…", Loader, config, "train", batch=1, length=length, sharding=sharding()
            )
            return
        with Loader(config, "train", batch=1, length=length, sharding=sharding()) as loader:
            assert (loader.rows, loader.steps) == (rows, rows)
            ids, starts, is_target = read_all(loader)
            places = [[int(word) for word in loader.rows_of(step)[0].split() if word.isdigit()] for step in range(rows)]
    got, got_targets = np.zeros_like(joined), np.zeros(len(joined), int)
    for row, (first, last) in enumerate(places):
        count = last - first + 1
        got[first : last + 1] = ids[row, :count] * 2 + starts[row, :count]
        got_targets[first : last + 1] += is_target[row, :count]
        assert not is_target[row, count:].any() and starts[row, count:].all()
    read = len(joined) - loader.dropped_tokens
    assert loader.dropped_tokens == (len(joined) % length if packing else 0)
    np.testing.assert_array_equal(got[:read], joined[:read])
    np.testing.assert_array_equal(
        got_targets[:read], targets[:read].astype(int)
    )  # once each, and no context is a target


@dataclasses.dataclass(frozen=True)
class HostSharding:
    """What one of several hosts sees of a sharding: its own devices."""

    whole: jax.sharding.Sharding
    devices: frozenset

    def addressable_devices_indices_map(self, shape):
        whole = self.whole.devices_indices_map(shape)
        return {device: index for device, index in whole.items() if device in self.devices}


def rows_of_hosts(monkeypatch, config, mesh, hosts, batch, length):
    """The rows that each of several hosts places on its devices: for each step the whole batch, put together from all of them."""
    whole = sharding(*mesh).targets
    parts = []

    def place(shape, host, part):
        array = np.full(shape, -1)
        for index in host.addressable_devices_indices_map(shape).values():
            array[index] = part(index)
        parts.append(array)

    batches = []
    with monkeypatch.context() as patch:
        patch.setattr(jax, "make_array_from_callback", place)
        devices = list(whole.mesh.devices.flat)
        for host in range(hosts):
            own = frozenset(devices[host * len(devices) // hosts : (host + 1) * len(devices) // hosts])
            with Loader(
                config, "train", batch=batch, length=length, sharding=Batch(*[HostSharding(whole, own)] * 3)
            ) as loader:
                parts.clear()
                for step in range(loader.steps):
                    loader._read_batch(step)
                batches.append([parts[i : i + 3] for i in range(0, len(parts), 3)])
    whole_batches = []
    for of_hosts in zip(*batches):
        arrays = []
        for one in zip(*of_hosts):
            stacked = np.stack(one)
            assert (stacked.max(axis=0) >= 0).all()  # each row is on some host
            assert ((stacked == stacked.max(axis=0)) | (stacked == -1)).all()  # and the same where it is on several
            arrays.append(stacked.max(axis=0))
        whole_batches.append(arrays)
    return whole_batches, loader


@pytest.mark.parametrize(
    "packing, batch, length, mesh, hosts",
    [
        (True, 8, 5, (8, 1), 1),
        (True, 8, 5, (8, 1), 2),
        (True, 16, 24, (4, 2), 4),
        (True, 24, 64, (2, 4), 2),
        (True, 16, 24, (1, 8), 2),
        (False, 16, 24, (8, 1), 1),
        (False, 8, 5, (8, 1), 2),
        (False, 16, 24, (4, 2), 4),
        (False, 24, 64, (2, 4), 2),
    ],
)
def test_every_token_is_a_target_once(tmp_path, monkeypatch, packing, batch, length, mesh, hosts):
    """In two epochs, each token but those that are reported as left out is a target twice, on any mesh and hosts, whose rows are together those of one loader."""
    sequences = ragged(0, count=80)
    joined = np.concatenate(sequences)
    numbered = np.split(np.arange(len(joined)), np.cumsum([len(ids) for ids in sequences])[:-1])  # ids are places
    write_split(tmp_path / "data", "train", numbered, chunk_tokens=64)
    config = FlatTokens(str(tmp_path / "data"), 1, packing, long_sequences="split", epochs=2)
    batches, loader = rows_of_hosts(monkeypatch, config, mesh, hosts, batch, length)
    assert len(batches) == loader.steps == 2 * loader.rows // batch
    counts = np.zeros(len(joined), int)
    for targets, _, is_target in batches:
        np.add.at(counts, targets[is_target == 1], 1)
    assert len(joined) - loader.dropped_tokens == np.sum(counts > 0)
    left = 2 * loader.rows - loader.steps * batch  # rows that fill no batch: at the end of all, and said at the start
    assert f"{loader.steps:,} steps in 2 epochs, {left:,} rows left over at the end" in loader.summary
    once = np.sum(counts == 1)
    assert counts.max() == 2 and (once == left * length if packing else left <= once <= left * length)
    with Loader(config, "train", batch=batch, length=length, sharding=sharding()) as single:
        for step, arrays in enumerate(batches):
            for array, expected in zip(arrays, as_numpy(single.load(step))):
                np.testing.assert_array_equal(array, expected)


def test_long_sequences_are_split(tmp_path):
    """A sequence longer than a row goes on in the next, which starts no sequence; empty ones have no row."""
    sequences = [np.arange(10, 17), np.array([], int), np.arange(20, 23), np.arange(30, 36)]
    write_split(tmp_path / "data", "train", sequences)
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=False, long_sequences="split")
    with Loader(config, "train", batch=2, length=3, sharding=sharding(), shuffle=False) as loader:
        targets, is_seq_start, is_target = read_all(loader)
        assert (loader.rows, loader.steps, loader.dropped_tokens) == (6, 3, 0)
        assert (
            "4 sequences, 16 tokens, of " in loader.summary
            and "in 6 rows of up to 3, 2 of them longer and split" in loader.summary
        )
    assert targets.tolist() == [[10, 11, 12], [13, 14, 15], [16, 0, 0], [20, 21, 22], [30, 31, 32], [33, 34, 35]]
    assert is_seq_start[:, 0].tolist() == [True, False, False, True, True, False]
    assert is_target.sum() == 16 and is_seq_start[2].tolist() == [False, True, True]


def test_many_sequences_are_found(tmp_path, monkeypatch):
    """Rows are found over many blocks of sequences, the last one not whole, in any order."""
    monkeypatch.setattr(rows_module, "BLOCK", 16)
    monkeypatch.setattr(rows_module, "READ_AT_ONCE", 64)
    read_from_chunks(monkeypatch)
    sequences = ragged(7, count=1000, longest=20)
    write_split(tmp_path / "data", "train", sequences, chunk_tokens=512)
    expected = [ids[i : i + 6] for ids in sequences for i in range(0, len(ids), 6)]
    config = FlatTokens(
        str(tmp_path / "data"), sequence_packing=False, long_sequences="split", sequences_per_read_block=7
    )
    for shuffle in (False, True):
        with Loader(config, "train", batch=1, length=6, sharding=sharding(), shuffle=shuffle) as loader:
            assert loader.rows == len(expected)
            got = [targets[0][is_target[0]] for targets, _, is_target in (as_numpy(loader.load(s)) for s in range(150))]
        if not shuffle:
            assert all(np.array_equal(a, b) for a, b in zip(got, expected))
        else:
            assert sorted(map(tuple, got)) != sorted(map(tuple, expected[:150]))
            assert {tuple(row) for row in got} <= {tuple(row) for row in expected}


@pytest.mark.parametrize("at, values, message", [
    (37, 2**63, "sequence 36 goes from … to 9223372036854775808"),
    (200, 0, "sequence 199 goes from … to 0"),
    (500, 10**6, "sequence 499 goes from … to 1000000"),
])  # fmt: skip
def test_seq_starts_out_of_order(tmp_path, monkeypatch, at, values, message):
    """The sequence whose start is wrong is named before training begins, wherever it is."""
    import zarr

    monkeypatch.setattr(rows_module, "READ_AT_ONCE", 64)
    monkeypatch.setattr(rows_module, "BLOCK", 16)
    read_from_chunks(monkeypatch)
    write_split(tmp_path / "data", "train", ragged(2, count=600), chunk_tokens=1024)
    zarr.open_group(tmp_path / "data", mode="r+")["train/seq_starts"][at] = values
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=False)
    text = f"seq_starts of {tmp_path}/data/train says that {message}, expected increasing numbers up to …: the data set is damaged, write it again"
    assert_refuses(text, Loader, config, "train", batch=1, length=8, sharding=sharding())
