"""The loader: which rows a batch holds, in which order, on every mesh and host, and that nothing a thread meets is lost."""

import dataclasses
import shutil
import threading

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

from runtime import flat_tokens
from runtime.data import Loader, Order, ReadAhead, TokenBatch, permute
from runtime.errors import RunError
from runtime.flat_tokens import write_split
from shardlib.shardtypes import check_tree


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two splits of ragged sequences, in chunks so small that rows cross them."""
    path = tmp_path_factory.mktemp("data") / "ragged"
    write_split(path, "train", ragged(0), chunk_tokens=64)
    write_split(path, "validation", ragged(1), chunk_tokens=64)
    return path


# ---------------------------------------------------------------- rows


def all_rows(loader, epoch=0):
    """Rows of an epoch as (targets, is_seq_start, is_target), in the order of the batches."""
    steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
    return [np.concatenate(arrays) for arrays in zip(*(as_numpy(loader.load(step)) for step in steps))]


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
    """Not packed, a row is a sequence, cut or padded at its end, also an empty one; padding is no target and sees nothing."""
    if not resident:
        read_from_chunks(monkeypatch)
    sequences = ragged(5)
    masks = [np.arange(len(ids)) % 3 > 0 if with_mask else np.ones(len(ids), bool) for ids in sequences]
    write_split(tmp_path / "data", "train", sequences, is_target=masks if with_mask else None, chunk_tokens=64)
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=False)
    with Loader(config, "train", batch=8, length=24, sharding=sharding(), shuffle=False) as loader:
        targets, is_seq_start, is_target = all_rows(loader)
    assert loader.rows == len(sequences) and not all(map(len, sequences)) and max(map(len, sequences)) > 24
    for row, (ids, mask) in enumerate(zip(sequences, masks)):
        count = min(len(ids), 24)
        np.testing.assert_array_equal(targets[row], np.concatenate([ids[:count], np.zeros(24 - count, int)]))
        np.testing.assert_array_equal(is_target[row], np.concatenate([mask[:count], np.zeros(24 - count, bool)]))
        np.testing.assert_array_equal(is_seq_start[row], (np.arange(24) == 0) | (np.arange(24) >= count))


def test_only_empty_sequences(tmp_path):
    """Sequences that are all empty make rows of padding, not a crash."""
    write_split(tmp_path / "data", "train", [np.array([], int)] * 4)
    config = FlatTokens(str(tmp_path / "data"), sequence_packing=False)
    with Loader(config, "train", batch=2, length=4, sharding=sharding()) as loader:
        targets, is_seq_start, is_target = all_rows(loader)
    assert loader.steps == 2 and not targets.any() and is_seq_start.all() and not is_target.any()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("blocks, rows_per_block", [(1, 1), (3, 4), (2, 7), (1000, 3), (1, 1000)])
def test_each_row_once_an_epoch(tmp_path, packing, blocks, rows_per_block):
    """Each row comes once in each epoch, whatever the sizes of blocks and buffers, and each epoch has an order of its own."""
    sequences = [np.full(8, index) for index in range(60)]  # so that a row's first token is its number
    write_split(tmp_path / "data", "train", sequences, chunk_tokens=100)
    config = FlatTokens(str(tmp_path / "data"), 0, packing, 3, blocks, rows_per_block)
    with Loader(config, "train", batch=5, length=8, sharding=sharding()) as loader:
        orders = [tuple(all_rows(loader, epoch)[0][:, 0].tolist()) for epoch in range(3)]
    assert loader.steps == 36
    assert all(sorted(order) == list(range(60)) for order in orders)
    assert len({*orders, tuple(range(60))}) == 4
    with Loader(dataclasses.replace(config, seed=1), "train", batch=5, length=8, sharding=sharding()) as loader:
        assert tuple(all_rows(loader)[0][:, 0].tolist()) not in orders


def test_last_partial_batch_is_dropped(data):
    """A batch never reaches into the next epoch: what is too little for a batch is left out of this one."""
    with Loader(FlatTokens(str(data), epochs=2), "train", batch=7, length=16, sharding=sharding()) as loader:
        assert (
            loader.rows % 7
            and loader.steps_per_epoch == loader.rows // 7
            and loader.steps == 2 * loader.steps_per_epoch
        )


@pytest.mark.parametrize(
    "rows, rows_per_block, blocks", [(1, 1, 1), (2, 3, 1), (17, 4, 2), (100, 3, 5), (101, 8, 3), (64, 200, 1)]
)
def test_order(rows, rows_per_block, blocks):
    """Buffers follow one another without gaps, hold whole blocks, and a position's buffer is found without walking there."""
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
    """Over many keys, each index goes to each place about equally often."""
    counts = np.zeros((17, 17))
    for key in range(1700):
        counts[np.arange(17), permute(np.arange(17), 17, (key,))] += 1
    assert 0.7 < ((counts - 100) ** 2 / 100).sum() / 16**2 < 1.3
    big = permute(np.arange(3) + 10**12, 10**13, (0,))  # nothing of the size is stored
    assert len(set(big.tolist())) == 3 and (big < 10**13).all()


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
    with (
        Loader(config, "train", batch=8, length=20, sharding=sharding()) as one,
        Loader(config, "train", batch=8, length=20, sharding=sharding(d, t)) as many,
    ):
        for step in range(one.steps):
            batch = many.load(step)
            assert_equal(one.load(step), batch)
            assert batch.targets.sharding.is_equivalent_to(sharding(d, t), 2)
            with jax.set_mesh(sharding(d, t).mesh):
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
    whole, batch, length = sharding(8, 1), 16, 20
    devices = {device for i, device in enumerate(whole.mesh.devices.flat) if own(i)}
    placed = []

    def place(shape, _, part):
        placed.append(
            {
                device: part(index)
                for device, index in HostSharding(whole, devices).addressable_devices_indices_map(shape).items()
            }
        )

    with Loader(FlatTokens(str(data)), "train", batch=batch, length=length, sharding=whole, shuffle=shuffle) as single:
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
            sharding=HostSharding(whole, devices),
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
    read = flat_tokens._read
    monkeypatch.setattr(
        flat_tokens,
        "_read",
        lambda array, start, stop, what: (reads.append((what, start, stop)), read(array, start, stop, what))[1],
    )
    config = FlatTokens(str(data), read_blocks_per_shuffle_buffer=1000)  # an epoch is one buffer
    with Loader(config, "train", batch=4, length=8, sharding=sharding()) as loader:
        for step in range(loader.steps):
            loader.load(step)
    chunks = [
        chunk
        for what, start, stop in reads
        if what.startswith("encoded")
        for chunk in range(start // 64, (stop - 1) // 64 + 1)
    ]
    assert len(chunks) == len(set(chunks)) > 20
    assert len(chunks) > 3 * sum(what.startswith("encoded") for what, *_ in reads)  # and neighbours are read together


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
        with pytest.raises(RunError, match="holds the token id 2147483647, which is larger than its max_token_id"):
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
        f"{example}/train holds 8 tokens, 4 rows of 2, which is less than one batch of 5: "
        "lower training.tokens.batch or training.tokens.len, or use more data"
    )
    assert_refuses(message, Loader, config, "train", batch=5, length=2, sharding=sharding())
    unpacked = dataclasses.replace(config, sequence_packing=False)
    message = f"{example}/train holds 3 sequences, which is less than one batch of 4: lower training.tokens.batch or training.tokens.len, or use more data"
    assert_refuses(message, Loader, unpacked, "train", batch=4, length=2, sharding=sharding())
    with Loader(config, "train", batch=2, length=2, sharding=sharding()) as loader:
        loader.load(3)
        message = (
            f"there is no batch for step 4: {example}/train holds 8 tokens, 4 rows of 2, 2 batches of 2 an epoch, 4 steps in all "
            "(flat_tokens.epochs is 2): set flat_tokens.epochs to 3 or more, or lower training.steps"
        )
        assert_refuses(message, loader.load, 4)
    with Loader(config, "train", batch=2, length=2, sharding=sharding(), shuffle=False) as loader:
        message = (
            f"there is no batch for step 2: {example}/train holds 8 tokens, 4 rows of 2, 2 batches of 2 an epoch, 2 steps in all "
            "(flat_tokens.epochs is 2): an unshuffled pass reads each row once"
        )
        assert_refuses(message, loader.load, 2)
