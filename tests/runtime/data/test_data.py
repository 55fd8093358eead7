"""The loader: which rows a batch holds, in which order, on every mesh and host, and that nothing a thread meets is
lost."""

import dataclasses
import multiprocessing
import threading
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts import assert_refuses
from ragged import (
    EXAMPLE,
    FlatTokens,
    HostSharding,
    as_numpy,
    assert_equal,
    encoded,
    ragged,
    read_all,
    read_from_chunks,
    sharding,
)

from runtime.data import chunks, flat_tokens, refusals
from runtime.data import rows as rows_module
from runtime.data.batches import Batch, Loader
from runtime.data.read_ahead import ReadAhead
from runtime.data.split_writer import write_split
from runtime.terminal import RunError
from shardlib.shardtypes import check_tree, make_shardings
from train import TokenBatch


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two splits of ragged sequences, in chunks so small that rows cross them."""
    path = tmp_path_factory.mktemp("data") / "ragged"
    write_split(path, "train", ragged(0), chunk_tokens=64)
    write_split(path, "validation", ragged(1), chunk_tokens=64)
    return path


@pytest.fixture
def starts_read(monkeypatch):
    """The places at which the rows that are read begin."""
    found, read_rows = [], flat_tokens.Split.read_rows

    def watched(self, starts, *rest):
        found.extend(starts.tolist())
        return read_rows(self, starts, *rest)

    monkeypatch.setattr(flat_tokens.Split, "read_rows", watched)
    return found


# ---------------------------------------------------------------- rows

SEQUENCES = st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 9), max_size=20), min_size=1, max_size=15)


@pytest.mark.parametrize("packing", [True, False])
@given(SEQUENCES, st.integers(1, 12), st.integers(8, 50), st.booleans(), st.integers(0, 9))
@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path_factory, packing, sequences, length, chunk, masked, seed):
    """Random ragged sequences, written and read shuffled, are the same sequences again when their rows are put back in
    order; padding is no target and starts a sequence at each place."""
    sequences = [np.array(ids, np.int64) for ids in sequences]
    masks = [np.arange(len(ids)) % 3 != 1 for ids in sequences] if masked else None
    path = tmp_path_factory.mktemp("property") / "data"
    write_split(path, "train", sequences, is_target=masks, chunk_tokens=chunk)
    joined = encoded(sequences) if any(map(len, sequences)) else np.zeros(0, np.uint32)
    targets = np.concatenate(masks) if masked else np.ones(len(joined), bool)
    config = FlatTokens(str(path), seed, packing)
    rows = len(joined) // length if packing else sum(-(-len(ids) // length) for ids in sequences)
    shape = {"batch": 1, "length": length, "sharding": sharding()}
    with pytest.MonkeyPatch.context() as patch:
        read_from_chunks(patch)
        if rows == 0:
            assert_refuses("one batch of 1", Loader, config, "train", **shape)
            return
        with Loader(config, "train", **shape) as loader:
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
    np.testing.assert_array_equal(got_targets[:read], targets[:read])  # once each, and no context is a target


@pytest.mark.parametrize("resident", [True, False])
def test_unshuffled_rows(data, resident, monkeypatch):
    """Packed and in order, rows are consecutive windows of the joined tokens, and the last batch is filled up with no
    targets; not packed, a sequence longer than a row continues in the next, which starts no sequence, and an empty one
    has no row."""
    if not resident:
        read_from_chunks(monkeypatch)
    stored, lengths = encoded(ragged(1)), [len(ids) for ids in ragged(1)]
    shape = {"batch": 6, "length": 32, "sharding": sharding(), "shuffle": False}
    with Loader(FlatTokens(str(data)), "validation", **shape) as loader:
        targets, is_seq_start, is_target = read_all(loader)
        assert (loader.rows, loader.dropped_tokens) == divmod(len(stored), 32)
        assert loader.steps == -(-loader.rows // 6) and loader.rows % 6
    rows = stored[: loader.rows * 32].reshape(-1, 32)
    np.testing.assert_array_equal(targets[: loader.rows], rows >> 1)
    np.testing.assert_array_equal(is_seq_start[: loader.rows], rows & 1)
    assert is_target[: loader.rows].all() and not is_target[loader.rows :].any()
    assert is_seq_start[loader.rows :].all() and not targets[loader.rows :].any()
    with Loader(FlatTokens(str(data), sequence_packing=False), "validation", **shape) as loader:
        targets, is_seq_start, is_target = read_all(loader)
    np.testing.assert_array_equal((2 * targets + is_seq_start)[is_target], stored)
    counts = [min(32, length - first) for length in lengths for first in range(0, length, 32)]
    assert loader.rows == len(counts) and max(lengths) > 32
    np.testing.assert_array_equal(is_target[: loader.rows], np.arange(32) < np.array(counts)[:, None])


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("blocks, rows_per_block", [(1, 1), (3, 4), (2, 7), (1000, 3), (1, 1000)])
def test_each_row_once_an_epoch(tmp_path, packing, blocks, rows_per_block):
    """Each row comes once in each epoch, whatever the sizes of blocks and buffers, and each epoch and seed has an order
    of its own."""
    sequences = [np.full(8, index) for index in range(60)]  # so that a row's first token is its number
    write_split(tmp_path / "data", "train", sequences, chunk_tokens=100)
    sizes = {"read_blocks_per_shuffle_buffer": blocks, "sequences_per_read_block": rows_per_block}
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=packing, epochs=3, **sizes)
    orders = [tuple(range(60))]
    for variant in (config, dataclasses.replace(config, seed=1)):
        with Loader(variant, "train", batch=5, length=8, sharding=sharding()) as loader:
            assert loader.steps == 36
            orders += map(tuple, read_all(loader)[0][:, 0].reshape(3, 60).tolist())
    assert all(sorted(order) == list(range(60)) for order in orders) and len(set(orders)) == 7


def test_many_sequences_are_found(tmp_path, monkeypatch):
    """Rows are found over many blocks of sequences, the last one not whole, in any order; of a sequence whose start is
    wrong the number is said before training begins."""
    monkeypatch.setattr(rows_module, "BLOCK", 16)
    monkeypatch.setattr(rows_module, "READ_AT_ONCE", 64)
    read_from_chunks(monkeypatch)
    sequences = ragged(7, count=1000, longest=20)
    write_split(tmp_path / "data", "train", sequences, chunk_tokens=512)
    expected = [ids[i : i + 6] for ids in sequences for i in range(0, len(ids), 6)]
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=False, sequences_per_read_block=7)
    shape = {"batch": 1, "length": 6, "sharding": sharding()}
    for shuffle in (False, True):
        with Loader(config, "train", **shape, shuffle=shuffle) as loader:
            assert loader.rows == len(expected)
            got = [targets[0][is_target[0]] for targets, _, is_target in (as_numpy(loader.load(s)) for s in range(150))]
        if not shuffle:
            assert all(np.array_equal(a, b) for a, b in zip(got, expected))
        else:
            assert sorted(map(tuple, got)) != sorted(map(tuple, expected[:150]))
            assert {tuple(row) for row in got} <= {tuple(row) for row in expected}
    starts = zarr.open_group(tmp_path / "data", mode="r+")["train/seq_starts"]
    for at, wrong in ((37, 2**63), (200, 0), (999, 10**6)):
        before, starts[at] = int(starts[at]), wrong
        message = f"seq_starts of {tmp_path}/data/train … sequence {at - 1} … to {wrong}, expected increasing … write"
        assert_refuses(message, Loader, config, "train", **shape)
        starts[at] = before


# ---------------------------------------------------------------- steps, meshes, hosts, threads


@pytest.mark.parametrize("packing", [True, False])
def test_load_is_a_function_of_the_step(data, packing):
    """A fresh loader at step k, one that walked there and one that jumps about give the same batch."""
    config = FlatTokens(str(data), sequence_packing=packing, epochs=2)
    make = lambda: Loader(config, "train", batch=6, length=20, sharding=sharding())  # noqa: E731
    with make() as walker, make() as jumper:
        walked = [walker.load(step) for step in range(walker.steps)]
        for step in np.random.default_rng(0).permutation(len(walked)).tolist():
            assert_equal(jumper.load(step), walked[step])
    for step in (1, len(walked) // 2, len(walked) - 1):
        with make() as fresh:
            assert_equal(fresh.load(step), walked[step])
            assert_equal(fresh.load(step), walked[step])


@pytest.mark.parametrize("d, t", [(8, 1), (4, 2), (1, 8)])
def test_same_batch_on_every_mesh(data, d, t):
    """A step's global batch does not depend on the mesh, and it lies on it as TokenBatch says."""
    config, mesh = FlatTokens(str(data)), sharding(d, t).targets.mesh
    with jax.set_mesh(mesh):
        on_mesh = make_shardings(TokenBatch)
    shape = {"batch": 8, "length": 20}
    with (
        Loader(config, "train", **shape, sharding=sharding()) as one,
        Loader(config, "train", **shape, sharding=on_mesh) as many,
    ):
        for step in range(one.steps):
            batch = many.load(step)
            assert_equal(one.load(step), batch)
            assert batch.targets.sharding.is_equivalent_to(on_mesh.targets, 2)
            with jax.set_mesh(mesh):
                check_tree(TokenBatch, batch)


def rows_of_hosts(monkeypatch, starts_read, config, mesh, hosts, batch, length, doubles_at):
    """The rows that several hosts place on their devices: the whole batch of each step, put together from all hosts,
    and how many rows each host read."""
    whole, parts, of_hosts, counts = sharding(*mesh).targets, [], [], []

    def place(shape, host, part):
        array = np.full(shape, -1)
        for index in host.addressable_devices_indices_map(shape).values():
            array[index] = part(index)
        parts.append(array)

    with monkeypatch.context() as patch:
        patch.setattr(jax, "make_array_from_callback", place)
        devices = list(whole.mesh.devices.flat)
        for host in range(hosts):
            own = frozenset(devices[host * len(devices) // hosts : (host + 1) * len(devices) // hosts])
            split = Batch(*[HostSharding(whole, own)] * 3)
            parts.clear(), starts_read.clear()
            with Loader(config, "train", batch=batch, length=length, sharding=split, doubles_at=doubles_at) as loader:
                for step in range(loader.steps):
                    loader._read_batch(step)
            of_hosts.append([parts[i : i + 3] for i in range(0, 3 * loader.steps, 3)])
            counts.append(len(starts_read))
    whole_batches = []
    for one_step in zip(*of_hosts):
        stacks = [np.stack(one) for one in zip(*one_step)]
        for stack in stacks:
            assert (stack.max(axis=0) >= 0).all()  # each row is on some host
            assert ((stack == stack.max(axis=0)) | (stack == -1)).all()  # and the same where it is on several
        whole_batches.append([stack.max(axis=0) for stack in stacks])
    return whole_batches, counts, loader


@pytest.mark.parametrize("packing, batch, length, mesh, hosts, hosts_of_a_row, doubles_at", [
    (True, 16, 24, (4, 2), 4, 1, ()), (True, 16, 24, (1, 8), 2, 2, ()), (True, 16, 5, (2, 4), 4, 2, (9, 90)),
    (False, 24, 64, (2, 4), 2, 1, ()),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (True, 8, 5, (8, 1), 1, 1, ()), (True, 8, 5, (8, 1), 2, 1, ()), (True, 16, 5, (4, 2), 2, 1, (3, 7)),
        (False, 16, 24, (8, 1), 1, 1, ()), (False, 8, 5, (8, 1), 2, 1, ()))),
])  # fmt: skip
def test_every_token_is_a_target_once(
    tmp_path, monkeypatch, starts_read, packing, batch, length, mesh, hosts, hosts_of_a_row, doubles_at
):
    """Two epochs make each token, but those reported as left out, a target twice, on any mesh and hosts, whose rows
    together are those of one loader; each host reads the rows of its own devices only."""
    sequences = ragged(0, count=80)
    joined = np.concatenate(sequences)
    numbered = np.split(np.arange(len(joined)), np.cumsum([len(ids) for ids in sequences])[:-1])  # ids are places
    write_split(tmp_path / "data", "train", numbered, chunk_tokens=64)
    config = FlatTokens(str(tmp_path / "data"), 1, packing, epochs=2)
    found, counts, loader = rows_of_hosts(monkeypatch, starts_read, config, mesh, hosts, batch, length, doubles_at)
    sizes = [batch // 2 ** sum(step < doubling for doubling in doubles_at) for step in range(loader.steps)]
    assert [len(targets) for targets, _, _ in found] == sizes and 0 <= 2 * loader.rows - sum(sizes) < batch
    assert counts == [sum(sizes) * hosts_of_a_row // hosts] * hosts
    targets_of = np.zeros(len(joined), int)
    for targets, _, is_target in found:
        np.add.at(targets_of, targets[is_target == 1], 1)
    assert len(joined) - loader.dropped_tokens == np.sum(targets_of > 0)
    left = 2 * loader.rows - sum(sizes)  # rows that fill no batch: at the end of all, and said at the start
    assert f"{loader.steps:,} steps in 2 epochs, {left:,} rows left over at the end" in loader.summary
    once = np.sum(targets_of == 1)
    assert targets_of.max() == 2 and (once == left * length if packing else left <= once <= left * length)
    with Loader(config, "train", batch=batch, length=length, sharding=sharding()) as single:
        whole = list(zip(*(as_numpy(single.load(step)) for step in range(single.steps))))
    for arrays, expected in zip(zip(*found), whole):  # the rows, one after another, are those of steps that are alike
        array, expected = np.concatenate(arrays), np.concatenate(expected)
        np.testing.assert_array_equal(array[: len(expected)], expected[: len(array)])


def test_each_chunk_is_decoded_once_a_buffer(data, monkeypatch):
    """However many rows of a shuffle buffer lie in a chunk, it is decoded once for all of them."""
    read_from_chunks(monkeypatch)
    decoded, read = [], chunks.read

    def watched(array, start, stop, what):
        if what.startswith("encoded"):
            decoded.extend(range(start // 64, (stop - 1) // 64 + 1))
        return read(array, start, stop, what)

    monkeypatch.setattr(chunks, "read", watched)
    config = FlatTokens(str(data), read_blocks_per_shuffle_buffer=1000)  # an epoch is one buffer
    with Loader(config, "train", batch=4, length=8, sharding=sharding()) as loader:
        read_all(loader)
    assert len(decoded) == len(set(decoded)) > 20


def test_thread_reads_ahead(data):
    """The next results are computed while nobody asks, a bounded number of them, each once; what the thread raises is
    raised to whoever asks for that result; closed, no thread is left, and none of a loader."""
    computed, third = [], threading.Event()

    def function(index):
        computed.append(index)
        if index == 2:
            third.set()
        if index == 3:
            raise RunError(f"no {index}")
        return index * 10

    read = ReadAhead(function, count=8, ahead=2, name="test")
    read(0)
    assert third.wait(300) and [read(1), read(2)] == [10, 20]
    with pytest.raises(RunError, match=r"^no 3$"):
        read(3)
    assert computed[:4] == [0, 1, 2, 3] and len(computed) <= 6
    assert [read(index) for index in (4, 0, 5)] == [40, 0, 50]
    read.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]
    before = set(threading.enumerate())
    left = lambda: {thread.name.rpartition("_")[0] for thread in set(threading.enumerate()) - before}  # noqa: E731
    with Loader(FlatTokens(str(data)), "train", batch=4, length=8, sharding=sharding()) as loader:
        loader.load(0)
        assert left() >= {"read_buffers", "read_batches"}
    assert not [name for name in left() if name.startswith("read_")]


# ---------------------------------------------------------------- what is said and refused


def test_too_little(tmp_path):
    """Less than a batch, and a step beyond the data, are refused with the numbers and the keys to change."""
    example = tmp_path / "data"
    write_split(example, "train", EXAMPLE)
    packed = FlatTokens(str(example), epochs=2)
    unpacked = dataclasses.replace(packed, sequence_packing=False)
    in_rows = f"8 tokens of {example}/train … 4 rows of 2, 0 at its end"
    as_rows = f"3 sequences, 8 tokens, of {example}/train … 5 rows of up to 2, 2 of them longer"
    for config, text, batch in ((packed, in_rows, 9), (unpacked, as_rows, 11)):
        message = f"{text} … epochs = 2 … less than one batch of {batch} … training.tokens.batch or training.tokens.len"
        assert_refuses(message, Loader, config, "train", batch=batch, length=2, sharding=sharding())
    for shuffle, steps in ((True, 4), (False, 2)):
        with Loader(packed, "train", batch=2, length=2, sharding=sharding(), shuffle=shuffle) as loader:
            loader.load(steps - 1)
            assert_refuses(f"there is no batch for step {steps}: {loader.summary}", loader.load, steps)


def most_memory(config):
    """The most bytes that 60 batches take, and what the loader says."""
    with pytest.MonkeyPatch.context() as patch:
        read_from_chunks(patch)
        tracemalloc.start()
        with Loader(config, "train", batch=64, length=256, sharding=sharding(), io_threads=4) as loader:
            before = tracemalloc.get_traced_memory()[0]
            for step in range(60):
                loader.load(step)
            return tracemalloc.get_traced_memory()[1] - before, loader.memory_bytes


@pytest.mark.parametrize("packing", [pytest.param(True, marks=pytest.mark.slow), False])
def test_memory_is_bounded(tmp_path, monkeypatch, packing):
    """A loader takes less memory than it says, and not much less; one that says more than 4 GiB is refused with the
    keys to lower."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 1000, rng.integers(200, 400)) for _ in range(4000)]  # 5 MB
    write_split(tmp_path / "data", "train", sequences, chunk_tokens=2**14)
    sizes = {"read_blocks_per_shuffle_buffer": 32, "sequences_per_read_block": 64}
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=packing, **sizes)
    # In a process of its own: one that had run other tests for minutes counted 2.9 MB more.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        peak, most = process.submit(most_memory, config).result()
    assert 0.5 * most < peak < most < 8 * 10**6
    assert refusals.MAX_BYTES == 4 * 2**30
    read_from_chunks(monkeypatch)
    monkeypatch.setattr(refusals, "MAX_BYTES", 10**6)
    keys = "flat_tokens.read_blocks_per_shuffle_buffer, flat_tokens.sequences_per_read_block or io.max_io_threads"
    message = f"{tmp_path}/data/train takes up to {most:,} bytes … more than 1,000,000: lower {keys}"
    assert_refuses(message, Loader, config, "train", batch=64, length=256, sharding=sharding(), io_threads=4)


def test_what_is_left_out_is_said(data):
    """The line that a run prints says what is read, which tokens make no row, which rows no batch, and the memory."""
    rows = {"batch": 7, "length": 16, "sharding": sharding()}
    count, left = divmod(sum(map(len, ragged(0))), 16)
    with Loader(FlatTokens(str(data), epochs=2), "train", **rows) as loader:
        assert loader.summary == (
            f"{16 * count + left:,} tokens of {data}/train in {count:,} rows of 16, {left} at its end being too few "
            f"for a row; {2 * count // 7} steps in 2 epochs, {2 * count % 7} rows left over at the end; at most "
            f"{-(-loader.memory_bytes // 10**6)} MB of host memory"
        )
    lengths = [len(ids) for ids in ragged(1)]
    config = FlatTokens(str(data), sequence_packing=False)
    with Loader(config, "validation", **rows, shuffle=False, batches=3) as loader:
        assert loader.summary == (
            f"100 sequences, {sum(lengths):,} tokens, of {data}/validation in {sum(-(-n // 16) for n in lengths)} rows "
            f"of up to 16, {sum(n > 16 for n in lengths)} of them longer and split; 3 batches of 7 are read; at most "
            f"{-(-loader.memory_bytes // 10**6)} MB of host memory"
        )


def test_validation_batches(data, monkeypatch, starts_read):
    """The first batches are read, and no more than these."""
    read_from_chunks(monkeypatch)
    rows = {"batch": 8, "length": 16, "sharding": sharding(), "shuffle": False}
    with Loader(FlatTokens(str(data)), "validation", **rows) as whole:
        expected = [whole.load(step) for step in range(3)]
    starts_read.clear()
    with Loader(FlatTokens(str(data)), "validation", **rows, batches=3) as loader:
        for _ in range(2):
            for step in range(loader.steps):
                assert_equal(loader.load(step), expected[step])
    assert loader.steps == 3 and len(set(starts_read)) == 24
    with Loader(FlatTokens(str(data)), "validation", **rows, batches=10**6) as loader:
        assert loader.steps == whole.steps


def test_the_time_waited_is_counted(data, monkeypatch):
    """`waited_s` grows by what load() has to wait for slow storage, and hardly where batches are there already."""
    read_rows = flat_tokens.Split.read_rows
    slow = lambda *args: (time.sleep(0.3), read_rows(*args))[1]  # noqa: E731
    monkeypatch.setattr(flat_tokens.Split, "read_rows", slow)
    config = FlatTokens(str(data), read_blocks_per_shuffle_buffer=1000)  # an epoch is one buffer
    with Loader(config, "train", batch=4, length=8, sharding=sharding()) as loader:
        loader.load(0)
        assert (before := loader.waited_s) >= 0.3
        time.sleep(0.5)
        loader.load(1)
        assert loader.waited_s - before < 0.3
