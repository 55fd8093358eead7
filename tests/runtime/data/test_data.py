"""The loader: which rows a batch holds, in which order, on every mesh and host, and that nothing a thread meets is lost."""

import dataclasses
import shutil
import threading
import time
import tracemalloc

import jax
import numpy as np
import pytest
from ragged import (
    EXAMPLE,
    FlatTokens,
    as_numpy,
    assert_equal,
    assert_refuses,
    encoded,
    ragged,
    read_from_chunks,
    sharding,
)

from runtime.data import chunks, flat_tokens
from runtime.data.batches import Batch, Loader
from runtime.data.flat_tokens import write_split
from runtime.data.read_ahead import ReadAhead
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


# ---------------------------------------------------------------- rows


def all_rows(loader, epoch=0):
    """Rows of an epoch as (targets, is_seq_start, is_target), in the order of the batches, which must end where it does."""
    steps = -(-loader.rows // len(as_numpy(loader.load(0))[0]))
    return [np.concatenate(a) for a in zip(*(as_numpy(loader.load(epoch * steps + step)) for step in range(steps)))]


@pytest.mark.parametrize("resident", [True, False])
def test_packed_rows(data, resident, monkeypatch):
    """Packed and in order, rows are consecutive windows of the joined tokens; the last batch is filled up with no targets."""
    if not resident:
        read_from_chunks(monkeypatch)
    stored = encoded(ragged(1))
    with Loader(FlatTokens(str(data)), "validation", batch=6, length=32, sharding=sharding(), shuffle=False) as loader:
        targets, is_seq_start, is_target = all_rows(loader)
        assert (loader.rows, loader.dropped_tokens) == divmod(len(stored), 32)
        assert loader.steps == -(-loader.rows // 6) and loader.rows % 6
    stored = stored[: loader.rows * 32].reshape(-1, 32)
    np.testing.assert_array_equal(targets[: loader.rows], stored >> 1)
    np.testing.assert_array_equal(is_seq_start[: loader.rows], stored & 1)
    assert is_target[: loader.rows].all() and not is_target[loader.rows :].any()
    assert is_seq_start[loader.rows :].all() and not targets[loader.rows :].any()


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("with_mask", [True, False])
def test_unpacked_rows(tmp_path, resident, with_mask, monkeypatch):
    """Not packed, a row is a sequence, cut or padded at its end; an empty one has none; padding is no target and sees nothing."""
    if not resident:
        read_from_chunks(monkeypatch)
    sequences = ragged(5)
    assert not all(map(len, sequences)) and max(map(len, sequences)) > 24
    masks = [np.arange(len(ids)) % 3 > 0 if with_mask else np.ones(len(ids), bool) for ids in sequences]
    write_split(tmp_path / "data", "train", sequences, is_target=masks if with_mask else None, chunk_tokens=64)
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=False)
    with Loader(config, "train", batch=8, length=24, sharding=sharding(), shuffle=False) as loader:
        targets, is_seq_start, is_target = all_rows(loader)
    rows = [(ids, mask) for ids, mask in zip(sequences, masks) if len(ids)]
    assert loader.rows == len(rows)
    assert loader.dropped_tokens == sum(max(0, len(ids) - 24) for ids in sequences)
    for row, (ids, mask) in enumerate(rows):
        count = min(len(ids), 24)
        np.testing.assert_array_equal(targets[row], np.concatenate([ids[:count], np.zeros(24 - count, int)]))
        np.testing.assert_array_equal(is_target[row], np.concatenate([mask[:count], np.zeros(24 - count, bool)]))
        np.testing.assert_array_equal(is_seq_start[row], (np.arange(24) == 0) | (np.arange(24) >= count))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("blocks, rows_per_block", [(1, 1), (3, 4), (2, 7), (1000, 3), (1, 1000)])
def test_each_row_once_an_epoch(tmp_path, packing, blocks, rows_per_block):
    """Each row comes once in each epoch, whatever the sizes of blocks and buffers, and each epoch has an order of its own."""
    sequences = [np.full(8, index) for index in range(60)]  # so that a row's first token is its number
    write_split(tmp_path / "data", "train", sequences, chunk_tokens=100)
    sizes = {"read_blocks_per_shuffle_buffer": blocks, "sequences_per_read_block": rows_per_block}
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=packing, epochs=3, **sizes)
    with Loader(config, "train", batch=5, length=8, sharding=sharding()) as loader:
        orders = [tuple(all_rows(loader, epoch)[0][:, 0].tolist()) for epoch in range(3)]
    assert loader.steps == 36
    assert all(sorted(order) == list(range(60)) for order in orders)
    assert len({*orders, tuple(range(60))}) == 4
    with Loader(dataclasses.replace(config, seed=1), "train", batch=5, length=8, sharding=sharding()) as loader:
        assert tuple(all_rows(loader)[0][:, 0].tolist()) not in orders


def test_epochs_follow_one_another(data):
    """A batch that an epoch's last rows do not fill goes on with the next epoch's; what is left after the last is no batch."""
    with Loader(FlatTokens(str(data), epochs=3), "train", batch=7, length=16, sharding=sharding()) as loader:
        assert loader.rows % 7 and loader.steps == 3 * loader.rows // 7
        rows = np.concatenate([as_numpy(loader.load(step))[0] for step in range(loader.steps)])
    epochs = [sorted(map(tuple, rows[epoch * loader.rows : (epoch + 1) * loader.rows].tolist())) for epoch in range(2)]
    assert epochs[0] == epochs[1] and len(rows) < 3 * loader.rows


# ---------------------------------------------------------------- steps, meshes, hosts, threads


@pytest.mark.parametrize("packing", [True, False])
def test_load_is_a_function_of_the_step(data, packing):
    """A fresh loader at step k, one that walked there and one that jumps about give the same batch."""
    config = FlatTokens(str(data), sequence_packing=packing, epochs=3)
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
    config = FlatTokens(str(data))
    mesh = sharding(d, t).targets.mesh
    with jax.set_mesh(mesh):
        on_mesh = make_shardings(TokenBatch)
    with (
        Loader(config, "train", batch=8, length=20, sharding=sharding()) as one,
        Loader(config, "train", batch=8, length=20, sharding=on_mesh) as many,
    ):
        for step in range(one.steps):
            batch = many.load(step)
            assert_equal(one.load(step), batch)
            assert batch.targets.sharding.is_equivalent_to(on_mesh.targets, 2)
            with jax.set_mesh(mesh):
                check_tree(TokenBatch, batch)


class HostSharding:
    """What one of several hosts sees of a sharding: only its own devices, all others being out of reach."""

    def __init__(self, whole, devices):
        self.whole, self.devices = whole, devices

    def addressable_devices_indices_map(self, shape):
        return {
            device: index for device, index in self.whole.devices_indices_map(shape).items() if device in self.devices
        }


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("own", [lambda i: i < 4, lambda i: i >= 4, lambda i: i % 2 == 1])
def test_hosts_read_their_own_rows(data, own, shuffle, monkeypatch):
    """Each host reads the rows of its own devices and no others, and together they have the batch of a single host."""
    on_eight, batch, length = sharding(8, 1), 16, 20
    whole = on_eight.targets
    devices = {device for i, device in enumerate(whole.mesh.devices.flat) if own(i)}
    placed = []

    def place(shape, _, part):
        placed.append(
            {
                device: part(index)
                for device, index in HostSharding(whole, devices).addressable_devices_indices_map(shape).items()
            }
        )

    with Loader(
        FlatTokens(str(data)), "train", batch=batch, length=length, sharding=on_eight, shuffle=shuffle
    ) as single:
        expected = [single.load(step) for step in range(single.steps)]
        read = []
        read_rows = flat_tokens.Split.read_rows
        monkeypatch.setattr(
            flat_tokens.Split,
            "read_rows",
            lambda self, starts, *rest: (read.extend(starts.tolist()), read_rows(self, starts, *rest))[1],
        )
        monkeypatch.setattr(jax, "make_array_from_callback", place)
        with Loader(
            FlatTokens(str(data)),
            "train",
            batch=batch,
            length=length,
            sharding=Batch(*[HostSharding(whole, devices)] * 3),
            shuffle=shuffle,
        ) as host:
            for step in range(host.steps):
                host._read_batch(step)
    assert len(placed) == 3 * len(expected)
    for i, part in enumerate(placed):
        for shard in jax.tree.leaves(expected[i // 3])[i % 3].addressable_shards:
            if shard.device in devices:
                np.testing.assert_array_equal(part[shard.device], shard.data)
    used = min(single.rows, single.steps * batch)
    rows_of_host = sum(own(place % batch // 2) for place in range(used))
    assert len(read) == len(set(read)) == rows_of_host < used


def test_each_chunk_is_decoded_once_a_buffer(data, monkeypatch):
    """However many rows of a shuffle buffer lie in a chunk, it is decoded once for all of them."""
    read_from_chunks(monkeypatch)
    reads = []
    read = chunks._read
    monkeypatch.setattr(
        chunks,
        "_read",
        lambda values, start, stop, what: (reads.append((what, start, stop)), read(values, start, stop, what))[1],
    )
    config = FlatTokens(str(data), read_blocks_per_shuffle_buffer=1000)  # an epoch is one buffer
    with Loader(config, "train", batch=4, length=8, sharding=sharding()) as loader:
        for step in range(loader.steps):
            loader.load(step)
    decoded = [
        chunk
        for what, start, stop in reads
        if what.startswith("encoded")
        for chunk in range(start // 64, (stop - 1) // 64 + 1)
    ]
    assert len(decoded) == len(set(decoded)) > 20


def test_thread_reads_ahead():
    """The next results are computed before they are asked for, a bounded number of them, each once."""
    computed, release = [], threading.Semaphore(0)

    def function(index):
        release.acquire()
        computed.append(index)
        return index * 10

    read = ReadAhead(function, count=8, ahead=2, name="test")
    for _ in range(8):
        release.release()
    assert [read(index) for index in (0, 1, 2)] == [0, 10, 20]
    read.close()
    assert computed[:3] == [0, 1, 2] and len(computed) <= 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]


def test_thread_is_ahead():
    """What is two further on is computed while nobody asks."""
    third = threading.Event()
    read = ReadAhead(lambda index: third.set() if index == 2 else index, count=8, ahead=2, name="test")
    read(0)
    assert third.wait(10)
    read.close()


def test_thread_exceptions_surface():
    """What the thread raises is raised to whoever asks for that result, and asking again computes it again."""
    fails = {3}

    def function(index):
        if index in fails:
            raise RunError(f"no {index}")
        return index

    read = ReadAhead(function, count=6, ahead=2, name="test")
    assert [read(index) for index in range(3)] == [0, 1, 2]
    with pytest.raises(RunError, match=r"^no 3$"):
        read(3)
    fails.clear()
    assert [read(index) for index in (3, 4, 0, 5)] == [3, 4, 0, 5]
    read.close()


def test_loader_exceptions_surface(tmp_path, monkeypatch):
    """Data that vanish while training runs are an error at the step that needs them, none before."""
    read_from_chunks(monkeypatch)
    path = tmp_path / "data"
    write_split(path, "train", ragged(0), chunk_tokens=64)
    config = FlatTokens(str(path), read_blocks_per_shuffle_buffer=1)
    with Loader(config, "train", batch=4, length=8, sharding=sharding()) as loader:
        loader.load(0)
        shutil.rmtree(path / "train" / "encoded_tokens" / "c")
        with pytest.raises(
            RunError, match=r"cannot read encoded_tokens of .*/train from \d+ to \d+ \(the file .*/c/\d+ is missing\)"
        ):
            for step in range(loader.steps):
                loader.load(step)


def test_no_thread_is_left(data):
    """A closed loader has no threads."""
    before = set(threading.enumerate())
    with Loader(FlatTokens(str(data)), "train", batch=4, length=8, sharding=sharding()) as loader:
        loader.load(0)
        assert {thread.name.split("_")[1] for thread in set(threading.enumerate()) - before} >= {"buffers", "batches"}
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("read_")]


def test_too_little(tmp_path):
    """Less than a batch, and a step beyond the data, are refused with the numbers and the keys to change."""
    example = tmp_path / "data"
    write_split(example, "train", EXAMPLE)
    config = FlatTokens(str(example), epochs=2)
    message = (
        f"8 tokens of {example}/train in 4 rows of 2, 0 at its end being too few for a row: in flat_tokens.epochs = 2 that is less than "
        "one batch of 9; lower training.tokens.batch or training.tokens.len, or use more data"
    )
    assert_refuses(message, Loader, config, "train", batch=9, length=2, sharding=sharding())
    unpacked = dataclasses.replace(config, sequence_packing=False)
    message = (
        f"3 sequences, 8 tokens, of {example}/train in 3 rows of up to 2, 2 of them longer and cut there, 2 tokens being left out: in "
        "flat_tokens.epochs = 2 that is less than one batch of 7; lower training.tokens.batch or training.tokens.len, or use more data"
    )
    assert_refuses(message, Loader, unpacked, "train", batch=7, length=2, sharding=sharding())
    with Loader(config, "train", batch=2, length=2, sharding=sharding()) as loader:
        loader.load(3)
        message = (
            f"there is no batch for step 4: 8 tokens of {example}/train in 4 rows of 2, 0 at its end being too few for a row, 4 batches of 2 "
            "in flat_tokens.epochs = 2: set flat_tokens.epochs to 3 or more, or lower training.steps"
        )
        assert_refuses(message, loader.load, 4)
    with Loader(config, "train", batch=2, length=2, sharding=sharding(), shuffle=False) as loader:
        message = (
            f"there is no batch for step 2: 8 tokens of {example}/train in 4 rows of 2, 0 at its end being too few for a row, 2 batches of 2 "
            "in flat_tokens.epochs = 1: an unshuffled pass reads each row once"
        )
        assert_refuses(message, loader.load, 2)


@pytest.mark.parametrize("packing", [True, False])
def test_memory_is_bounded(tmp_path, monkeypatch, packing):
    """What a loader says it takes at most is more than it takes, and not much more; more than 4 GiB is refused with what it is for."""
    read_from_chunks(monkeypatch)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 1000, rng.integers(200, 400)) for _ in range(4000)]  # 5 MB
    write_split(tmp_path / "data", "train", sequences, chunk_tokens=2**14)
    sizes = {"read_blocks_per_shuffle_buffer": 32, "sequences_per_read_block": 64}
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=packing, **sizes)
    rows = {"batch": 64, "length": 256, "sharding": sharding(), "io_threads": 4}
    tracemalloc.start()
    with Loader(config, "train", **rows) as loader:
        before = tracemalloc.get_traced_memory()[0]
        for step in range(60):
            loader.load(step)
        peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert 0.5 * loader.memory_bytes < peak < loader.memory_bytes < 8 * 10**6
    message = (
        f"reading {tmp_path}/data/train takes up to {loader.memory_bytes:,} bytes of host memory, more than 1,000,000: "
        "5,275,648 for 2 shuffle buffers of each source, … for chunks in 4 threads, 0 for small arrays that are kept, … for batches. Lower "
        "flat_tokens.read_blocks_per_shuffle_buffer, flat_tokens.sequences_per_read_block or io.max_io_threads"
    )
    assert_refuses(message, Loader, config, "train", **rows, max_bytes=10**6)


def test_what_is_left_out_is_said(data):
    """The line that a run prints says what is read, which tokens make no row, which rows no batch, and the memory."""
    rows = {"batch": 7, "length": 16, "sharding": sharding()}
    with Loader(FlatTokens(str(data), epochs=2), "train", **rows) as loader:
        tokens = sum(map(len, ragged(0)))
        assert loader.summary == (
            f"{tokens:,} tokens of {data}/train in {tokens // 16:,} rows of 16, {tokens % 16} at its end being too few for a row; "
            f"{2 * (tokens // 16) // 7} steps in 2 epochs, {2 * (tokens // 16) % 7} rows left over at the end; "
            f"at most {loader.memory_bytes / 1e6:.0f} MB of host memory"
        )
    config = FlatTokens(str(data), sequence_packing=False)
    with Loader(config, "validation", **rows, shuffle=False, batches=3) as loader:
        lengths = [len(ids) for ids in ragged(1)]
        cut = sum(max(0, length - 16) for length in lengths)
        assert loader.summary == (
            f"100 sequences, {sum(lengths):,} tokens, of {data}/validation in {sum(map(bool, lengths))} rows of up to 16, "
            f"{sum(length > 16 for length in lengths)} of them longer and cut there, {cut:,} tokens being left out; 3 batches of 7 are read; "
            f"at most {loader.memory_bytes / 1e6:.0f} MB of host memory"
        )


def test_validation_batches(data, monkeypatch):
    """So many batches are the first of all, and no more than these are read."""
    read_from_chunks(monkeypatch)
    rows = {"batch": 8, "length": 16, "sharding": sharding(), "shuffle": False}
    with Loader(FlatTokens(str(data)), "validation", **rows) as whole:
        expected = [whole.load(step) for step in range(3)]
    read = []
    read_rows = flat_tokens.Split.read_rows
    watched = lambda self, starts, *rest: (read.extend(starts.tolist()), read_rows(self, starts, *rest))[1]  # noqa: E731
    monkeypatch.setattr(flat_tokens.Split, "read_rows", watched)
    with Loader(FlatTokens(str(data)), "validation", **rows, batches=3) as loader:
        for _ in range(2):
            for step in range(loader.steps):
                assert_equal(loader.load(step), expected[step])
    assert loader.steps == 3 and len(set(read)) == 24
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
        assert 0.3 <= loader.waited_s < 3
        time.sleep(0.5)
        before = loader.waited_s
        loader.load(1)
        assert loader.waited_s - before < 0.1
