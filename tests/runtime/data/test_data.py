"""The loader: which rows a batch holds, in which order, on every mesh and host, and that nothing a thread meets is
lost."""

import dataclasses
import itertools
import multiprocessing
import threading
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import assert_refuses
from ragged import FlatTokens, HostSharding, assert_equal, encoded, ragged, read_all, read_from_chunks, sharding

from runtime.data import chunks, flat_tokens, refusals
from runtime.data import rows as rows_module
from runtime.data.batches import Batch, Loader
from runtime.data.flat_tokens import open_split
from runtime.data.read_ahead import ReadAhead
from runtime.data.split_writer import write_split
from runtime.terminal import RunError
from shardlib.shardtypes import check_tree
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

IDS = st.sampled_from([*range(9), 2**31 - 1]) | st.integers(0, 2**31 - 1)
SEQUENCES = st.lists(st.lists(IDS, max_size=20), min_size=1, max_size=20)
SIZES = st.sampled_from([(1, 1), (3, 4), (2, 7), (1000, 3), (1, 1000)])  # of buffers, in blocks; of blocks, in rows


def rows_of(sequences, masks, length, packing):
    """The rows as they are stored, from where to where, and their arrays, which rows of padding follow."""
    joined, starts = encoded(sequences), np.cumsum([0, *map(len, sequences)])
    places = [(first, first + length) for first in range(0, len(joined) - length + 1, length)]
    if not packing:
        bounds = itertools.pairwise(starts.tolist())
        places = [(at, min(at + length, end)) for start, end in bounds for at in range(start, end, length)]
    ids, is_seq_start, is_target = (np.full((len(places) + 9, length), padding) for padding in (0, True, False))
    for row, (first, stop) in enumerate(places):
        ids[row, : stop - first], is_seq_start[row, : stop - first] = joined[first:stop] >> 1, joined[first:stop] & 1
        is_target[row, : stop - first] = np.concatenate(masks)[first:stop]
    return places, (ids, is_seq_start, is_target)


@pytest.mark.parametrize("packing", [True, False])
@given(SEQUENCES, st.integers(1, 12), st.integers(5, 50), st.booleans(), st.integers(0, 9), SIZES)
@settings(max_examples=12, derandomize=True, deadline=None)
def test_what_is_written_is_read(tmp_path_factory, packing, sequences, length, chunk, masked, seed, sizes):
    """Random ragged sequences are stored one after another, and read are their rows: once in each epoch, shuffled,
    whatever the sizes of chunks, blocks and buffers; or in order, where the last batch is filled up. Padding is no
    target and starts a sequence at each place."""
    sequences = [np.array(ids, np.int64) for ids in sequences]
    masks = [np.arange(len(ids)) % 3 != 1 if masked else np.ones(len(ids), bool) for ids in sequences]
    path = tmp_path_factory.mktemp("property") / "data"
    write_split(path, "train", iter(sequences), is_target=iter(masks) if masked else None, chunk_tokens=chunk)
    split = open_split(path, "train")
    np.testing.assert_array_equal(split.encoded_tokens[:], encoded(sequences))
    np.testing.assert_array_equal(split.seq_starts[:], np.cumsum([0, *map(len, sequences)]))
    assert split.max_token_id == max(ids.max(initial=0) for ids in sequences)
    places, expected = rows_of(sequences, masks, length, packing)
    keys = dict(zip(("read_blocks_per_shuffle_buffer", "sequences_per_read_block"), sizes))
    config = FlatTokens(str(path), seed, packing, epochs=2, **keys)
    shape = {"length": length, "sharding": sharding()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "BLOCK", 4)
        patch.setattr(rows_module, "READ_AT_ONCE", 8)
        if not places:
            assert_refuses("one batch of 1", Loader, config, "train", batch=1, **shape)
            return
        with Loader(config, "train", batch=3, **shape, shuffle=False) as loader:
            assert (loader.rows, loader.steps) == (len(places), -(-len(places) // 3))
            assert loader.dropped_tokens == (split.token_count % length if packing else 0)
            for found, array in zip(read_all(loader), expected):
                np.testing.assert_array_equal(found, array[: 3 * loader.steps])
        read_from_chunks(patch)
        with Loader(config, "train", batch=1, **shape) as loader:
            said = [f"tokens {first} to {stop - 1} of {path}/train" for first, stop in places]
            order = [said.index(*loader.rows_of(step)) for step in range(loader.steps)]
            assert [sorted(order[: len(said)]), sorted(order[len(said) :])] == [[*range(len(said))]] * 2
            for found, array in zip(read_all(loader), expected):
                np.testing.assert_array_equal(found, array[order])


# ---------------------------------------------------------------- steps, meshes, hosts, threads


@pytest.mark.parametrize("packing, d, t", [(True, 8, 1), (False, 4, 2), (True, 1, 8)])
def test_load_is_a_function_of_the_step(data, packing, d, t):
    """A loader that walks, one that jumps about on another mesh and a fresh one at step k give the same global batch,
    which lies on the mesh as TokenBatch says. Another seed gives another."""
    config, on_mesh = FlatTokens(str(data), sequence_packing=packing, epochs=2), sharding(d, t, TokenBatch)
    make = lambda config, sharding: Loader(config, "train", batch=8, length=20, sharding=sharding)  # noqa: E731
    with make(config, sharding()) as walker, make(dataclasses.replace(config, seed=1), sharding()) as other:
        walked = [walker.load(step) for step in range(walker.steps)]
        assert (other.load(0).targets != walked[0].targets).any()
    with make(config, on_mesh) as jumper:
        for step in np.random.default_rng(0).permutation(len(walked)).tolist():
            assert_equal(batch := jumper.load(step), walked[step])
            assert batch.targets.sharding.is_equivalent_to(on_mesh.targets, 2)
            with jax.set_mesh(on_mesh.targets.mesh):
                check_tree(TokenBatch, batch)
    for step in (1, len(walked) // 2, len(walked) - 1):
        with make(config, on_mesh) as fresh:
            assert_equal(fresh.load(step), walked[step])
            assert_equal(fresh.load(step), walked[step])


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
def test_hosts_read_the_rows_of_one(
    data, monkeypatch, starts_read, packing, batch, length, mesh, hosts, hosts_of_a_row, doubles_at
):
    """On any mesh and hosts, and where the batch doubles, the rows of two epochs are those of one loader, one after
    another, those that fill no batch are said at the start, and one step more takes another epoch. Each host reads the
    rows of its own devices only."""
    config = FlatTokens(str(data), 1, packing, epochs=2)
    found, counts, loader = rows_of_hosts(monkeypatch, starts_read, config, mesh, hosts, batch, length, doubles_at)
    sizes = [batch // 2 ** sum(step < doubling for doubling in doubles_at) for step in range(loader.steps)]
    left = 2 * loader.rows - sum(sizes)
    assert [len(targets) for targets, _, _ in found] == sizes and 0 <= left < batch
    assert counts == [sum(sizes) * hosts_of_a_row // hosts] * hosts
    assert f"{loader.steps:,} steps in 2 epochs, {left:,} rows left over at the end" in loader.summary
    assert [loader.epochs_of(loader.steps + more) for more in (0, 1)] == [2, 3]
    with Loader(config, "train", batch=batch, length=length, sharding=sharding()) as single:
        whole = read_all(single)
    for arrays, expected in zip(zip(*found), whole):
        array = np.concatenate(arrays)
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
    raised to whoever asks for that result; `waited_s` grows by what one has to wait, and hardly where a result is there
    already. Closed, no thread is left, and none of a loader."""
    computed, third = [], threading.Event()

    def function(index):
        computed.append(index)
        time.sleep(0.3 if index == 0 and len(computed) == 1 else 0)
        if index == 2:
            third.set()
        if index == 3:
            raise RunError(f"no {index}")
        return index * 10

    read = ReadAhead(function, count=8, ahead=2, name="test")
    read(0)
    assert third.wait(300) and (waited_s := read.waited_s) >= 0.3
    time.sleep(0.5)
    assert [read(1), read(2)] == [10, 20] and read.waited_s - waited_s < 0.3
    assert_refuses("no 3", read, 3)
    assert computed[:4] == [0, 1, 2, 3] and len(computed) <= 6
    assert [read(index) for index in (4, 0, 5)] == [40, 0, 50]
    read.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]
    before = set(threading.enumerate())
    left = lambda: {thread.name.rpartition("_")[0] for thread in set(threading.enumerate()) - before}  # noqa: E731
    with Loader(FlatTokens(str(data)), "train", batch=4, length=8, sharding=sharding()) as loader:
        loader.load(0)
        assert left() >= {"read_buffers", "read_batches"} and 0 < loader.waited_s < 600
    assert not [name for name in left() if name.startswith("read_")]


# ---------------------------------------------------------------- what is said and refused


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


def test_validation_batches(data, monkeypatch, starts_read):
    """The first batches are read, and no more than these, as the line that a run prints says, with the memory."""
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
    memory = f"at most {-(-loader.memory_bytes // 10**6)} MB of host memory"
    assert loader.summary.endswith(f"; 3 batches of 8 are read; {memory}")
    with Loader(FlatTokens(str(data)), "validation", **rows, batches=10**6) as loader:
        assert loader.steps == whole.steps
