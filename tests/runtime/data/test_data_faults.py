"""Data that are not as they should be, or not to be had, on a disk and in an object store: an error with the place,
never a hang or a zero."""

import os
import sys

import fsspec
import numpy as np
import pytest
import small
import zarr
from fsspec.implementations.memory import MemoryFileSystem
from parts import assert_refuses, says
from ragged import FlatTokens, assert_equal, ragged, read_from_chunks, sharding
from several_hosts import TINY, records, where

from runtime import retries
from runtime.data import chunks, rows
from runtime.data.batches import Loader
from runtime.data.flat_tokens import open_split
from runtime.data.split_writer import write_split

DAMAGED = "damaged or out of reach; write or copy"


def load_all(path, packing=True):
    config = FlatTokens(path, sequence_packing=packing)
    with Loader(config, "train", batch=8, length=8, sharding=sharding(), shuffle=False) as loader:
        return [loader.load(step) for step in range(loader.steps)]


def write(path):
    """A data set of 256 tokens a chunk, with a mask; returns its path."""
    sequences = ragged(0)
    write_split(path, "train", sequences, is_target=[ids % 3 > 0 for ids in sequences], chunk_tokens=256)
    return str(path)


def test_the_same_from_an_object_store(object_store, tmp_path, monkeypatch):
    """An object store gives the batches that a disk gives, whatever the chunks."""
    path = write(f"{object_store}/data")
    read_from_chunks(monkeypatch)
    sequences = ragged(0)
    write_split(tmp_path / "other", "train", sequences, is_target=[ids % 3 > 0 for ids in sequences], chunk_tokens=640)
    for packing in (True, False):
        for one, other in zip(load_all(path, packing), load_all(str(tmp_path / "other"), packing)):
            assert_equal(one, other)


@pytest.mark.parametrize("place, name, chunk, packing, tokens", [
    ("tmp_path", "encoded_tokens", 2, True, "512 to 768"),
    ("tmp_path", "is_target", 2, True, "512 to 768"),
    ("tmp_path", "seq_starts", 1, False, "0 to 101"),
    ("object_store", "encoded_tokens", 2, True, "512 to 768"),
])  # fmt: skip
def test_damaged_chunks(request, place, name, chunk, packing, tokens, monkeypatch):
    """A chunk's file that is empty, cut short, longer, missing, a pipe, which is not waited for, or has a bit that
    flipped is an error that names the array and the tokens."""
    read_from_chunks(monkeypatch)
    path, is_local = write(f"{request.getfixturevalue(place)}/data"), place == "tmp_path"
    file, where = f"{path}/train/{name}/c/{chunk}", f"{name} of {path}/train from {tokens}"
    with fsspec.open(file, "rb") as stored:
        whole = stored.read()
    damages = [b"", whole[:10], whole[:-1], whole + b"x"]
    for bit in np.random.default_rng(0).integers(0, 8 * len(whole), 15 if is_local else 3).tolist():
        damages.append(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
    for damaged in damages:
        with fsspec.open(file, "wb") as stored:
            stored.write(damaged)
        assert_refuses(f"{where} … checksum do not match … {DAMAGED}", load_all, path, packing)
    files, inside = fsspec.url_to_fs(file)
    files.rm(inside)
    assert_refuses(f"{where} (the file train/{name}/c/{chunk} is missing … {DAMAGED}", load_all, path, packing)
    if is_local:
        os.mkfifo(file)
        assert_refuses(f"{where} … pipe, expected a plain file: '{file}' … {DAMAGED}", load_all, path, packing)


def test_starts_that_do_not_increase(tmp_path, monkeypatch):
    """Of a sequence whose start is wrong, wherever it is, the number is said before training begins."""
    monkeypatch.setattr(rows, "BLOCK", 16)
    monkeypatch.setattr(rows, "READ_AT_ONCE", 64)
    path = write(tmp_path / "data")
    starts = zarr.open_group(path, mode="r+")["train/seq_starts"]
    for at, wrong in ((37, 2**63), (80, 0), (99, 10**6)):
        before, starts[at] = int(starts[at]), wrong
        expected = f"seq_starts of {path}/train … sequence {at - 1} … to {wrong}, expected increasing … write"
        assert_refuses(expected, load_all, path, packing=False)
        starts[at] = before


@pytest.mark.parametrize("codec", [zarr.codecs.ZstdCodec(), None, zarr.codecs.Crc32cCodec(), zarr.codecs.BloscCodec()])
def test_other_compressors(tmp_path, codec, monkeypatch):
    """A chunk that was cut short is an error with other compressors too, with none, and without checksums."""
    read_from_chunks(monkeypatch)
    path = write(tmp_path / "data")
    group = zarr.open_group(path, mode="r+")["train"]
    options = {"chunks": (256,), "compressors": [codec] if codec else None, "overwrite": True}
    group.create_array("encoded_tokens", data=group["encoded_tokens"][:], **options)
    load_all(path)
    file = tmp_path / "data/train/encoded_tokens/c/1"
    file.write_bytes(file.read_bytes()[:-7])
    assert_refuses(f"encoded_tokens of {path}/train from 256 to 512 … {DAMAGED}", load_all, path)


def test_ids_over_the_largest(tmp_path, monkeypatch):
    """An id that is larger than max_token_id is named with its place, wherever its row comes."""
    path = write(tmp_path / "data")
    read_from_chunks(monkeypatch)
    zarr.open_group(path, mode="r+")["train/encoded_tokens"][333] = 2 * 5000
    message = f"encoded_tokens of {path}/train … token id 5000 at 333, over max_token_id 1000 … damaged"
    assert_refuses(message, load_all, path)


def test_stores_that_are_not_there(object_store, monkeypatch):
    """A missing bucket, data set, split or package is one line with what to do."""
    for path in ("s3://no-such-bucket/data", f"{object_store}/no"):
        assert_refuses(f"{path} does not exist … flat_tokens.filespec … tools.tokenize_text", open_split, path, "train")
    write_split(f"{object_store}/data", "train", ragged(0))
    message = f"{object_store}/data has no split 'validation'; it holds 'train'"
    assert_refuses(message, open_split, f"{object_store}/data", "validation")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert_refuses("gs://a/b cannot be opened … pip install gcsfs", open_split, "gs://a/b", "train")


@pytest.mark.parametrize("file, refused", [
    ("train/encoded_tokens/c/0", "encoded_tokens of PATH/train from … "),
    ("zarr.json", "the data set PATH cannot be opened … "),
])  # fmt: skip
def test_a_store_that_fails_for_a_while(file, refused, tmp_path, monkeypatch, capfd):
    """A chunk, or the data set's first file, that an object store does not give at first is asked for again, with a
    note; no longer than its patience lasts, and not where the store refuses it."""
    read_from_chunks(monkeypatch)
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.001)
    name, fails = tmp_path.name, [OSError("503 Slow Down"), TimeoutError("no answer")]
    path = write(f"memory://{name}")
    expected, kept, refused = load_all(path), MemoryFileSystem.cat_file, refused.replace("PATH", path)

    def cat_file(self, path, *args, **kwargs):
        if path == f"/{name}/{file}" and fails:
            raise fails.pop(0)
        return kept(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    for one, other in zip(load_all(path), expected):
        assert_equal(one, other)
    assert not fails and says("s: OSError: 503 Slow Down … s: TimeoutError: no answer", capfd.readouterr().err)
    fails.append(PermissionError("403 Forbidden"))
    assert_refuses(f"{refused}403 Forbidden)", load_all, path)
    monkeypatch.setattr(chunks, "PATIENCE_S", 0.0)
    fails.append(OSError("503 Slow Down"))
    assert_refuses(f"{refused}503 Slow Down)", load_all, path)


def test_closing_waits_for_no_store(tmp_path, monkeypatch):
    """What a store does not give is not asked for again once the loader is closed."""
    read_from_chunks(monkeypatch)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_S", 0.001)
    path, fails, kept = (
        write(f"memory://{tmp_path.name}"),
        [OSError("503 Slow Down")] * 20_000,
        MemoryFileSystem.cat_file,
    )

    def cat_file(self, path, *args, **kwargs):
        if "encoded_tokens/c/" in path and fails:
            raise fails.pop()
        return kept(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with Loader(FlatTokens(path), "train", batch=8, length=8, sharding=sharding()) as loader:
        assert not loader.is_there(0, 0.01)
    assert fails


@pytest.mark.slow
@pytest.mark.usefixtures("proved_elsewhere")
def test_a_run_stops_where_its_data_are_damaged(tmp_path, monkeypatch, capfd):
    """A lost chunk of one source ends a run with one line and status 1, after the steps that did not need it; metrics
    say how long they waited for data and how many tokens came from each source."""
    rng = np.random.default_rng(0)
    a, b = (str(tmp_path / name) for name in "ab")
    for path in (a, b):
        for split, count in (("train", 400), ("validation", 20)):
            write_split(path, split, [rng.integers(1, 128, 100) for _ in range(count)], chunk_tokens=1024)
    read_from_chunks(monkeypatch)
    (tmp_path / "a/train/encoded_tokens/c/20").unlink()
    keys = f"""mesh.d=2 mesh.t=1 validation_batches=1 log_interval=2 training.steps=120 training.steps_for_lr=120
        eval_interval=1000 checkpoint_interval=1000 flat_tokens.read_blocks_per_shuffle_buffer=4 flat_tokens.seed=1
        flat_tokens.sequences_per_read_block=32 mixture=[{{filespec:'{a}',weight:3}},{{filespec:'{b}',weight:1}}]"""
    assert small.start_training(monkeypatch, *TINY, *keys.split(), *where(tmp_path / "run")) == 1
    said = capfd.readouterr()
    printed = said.out.replace("\n  ", " ")  # long lines are broken
    (error,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert says(f"encoded_tokens of {a}/train from 20480 to 21504 … encoded_tokens/c/20 is missing", error)
    assert f"training data: 75.00% from 40,000 tokens of {a}/train in 1,250 rows of 32, 0 at its end" in printed
    assert f"of {b}/validation in 62 rows of 32, 16 at its end being too few for a row; 2 batches of 16" in printed
    lines = records(tmp_path / "run")
    assert 4 < max(line["step"] for line in lines) < 120
    for line in lines:
        expected = {f"tokens_per_source/{a}": line["step"] * 12 * 32, f"tokens_per_source/{b}": line["step"] * 4 * 32}
        assert {name: count for name, count in line.items() if name.startswith("tokens_per_source")} == expected
        assert line["data_wait_s"] >= 0
