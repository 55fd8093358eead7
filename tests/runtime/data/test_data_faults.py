"""Data that are not as they should be, or not to be had, on a disk and in an object store: an error with the place, never a hang or a zero."""

import gzip
import json
import os
import sys

import fsspec
import numpy as np
import pytest
import zarr
from ragged import FlatTokens, assert_equal, assert_refuses, ragged, read_from_chunks, sharding

import train
from runtime.config.command_line import load, run
from runtime.data.batches import Loader
from runtime.data.flat_tokens import open_split, write_split
from runtime.data.sources import open_data

DAMAGED = "the data set is damaged or out of reach; write or copy it again"


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
    """From an object store come the batches that come from a disk, whatever the chunks."""
    path = write(f"{object_store}/data")
    read_from_chunks(monkeypatch)
    sequences = ragged(0)
    write_split(tmp_path / "other", "train", sequences, is_target=[ids % 3 > 0 for ids in sequences], chunk_tokens=640)
    for packing in (True, False):
        for one, other in zip(load_all(path, packing), load_all(str(tmp_path / "other"), packing)):
            assert_equal(one, other)


@pytest.mark.parametrize("place, name, chunk, packing, tokens", [
    ("disk", "encoded_tokens", 2, True, "512 to 768"),
    ("disk", "is_target", 2, True, "512 to 768"),
    ("disk", "seq_starts", 1, False, "0 to 101"),
    ("object_store", "encoded_tokens", 2, True, "512 to 768"),
])  # fmt: skip
def test_lost_and_truncated_chunks(request, tmp_path, place, name, chunk, packing, tokens, monkeypatch):
    """A chunk's file that is missing, empty, cut short or longer is an error that names the array, the tokens and the file."""
    read_from_chunks(monkeypatch)
    path = write(f"{request.getfixturevalue('object_store')}/data" if place == "object_store" else tmp_path / "data")
    file = f"{path}/train/{name}/c/{chunk}"
    with fsspec.open(file, "rb") as stored:
        whole = stored.read()
    where = f"cannot read {name} of {path}/train from {tokens} (the file train/{name}/c/{chunk} "
    for damaged in (b"", whole[:10], whole[:-1], whole + b"x") if place == "disk" else (whole[:-1],):
        with fsspec.open(file, "wb") as stored:
            stored.write(damaged)
        message = f"{where}has {len(damaged)} bytes and was written with another number): {DAMAGED}"
        assert_refuses(message, load_all, path, packing)
    files, inside = fsspec.url_to_fs(file)
    files.rm(inside)
    assert_refuses(f"{where}is missing): {DAMAGED}", load_all, path, packing)


@pytest.mark.parametrize("place", ["tmp_path", "object_store"])
def test_flipped_bits(request, place, monkeypatch):
    """Each bit that flips in a chunk's file is found when it is read, from a disk and from an object store."""
    read_from_chunks(monkeypatch)
    folder = request.getfixturevalue(place)
    path, rng = write(f"{folder}/data"), np.random.default_rng(0)
    file = f"{path}/train/encoded_tokens/c/1"
    with fsspec.open(file, "rb") as stored:
        whole = stored.read()
    for bit in rng.integers(0, 8 * len(whole), 40 if place == "tmp_path" else 3).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with fsspec.open(file, "wb") as stored:
            stored.write(bytes(damaged))
        message = f"cannot read encoded_tokens of {path}/train from 256 to 512 (the file train/encoded_tokens/c/1 …): {DAMAGED}"
        assert_refuses(message, load_all, path)


def test_a_data_set_without_checksums(tmp_path, capsys):
    """One that was written before there were any is read, and a line says what is not noticed."""
    for split in ("train", "validation"):
        write_split(tmp_path / "new", split, ragged(0))
    copy = zarr.open_group(tmp_path / "old", mode="w")
    for split in ("train", "validation"):
        stored = zarr.open_group(tmp_path / "new", mode="r")[split]
        group = copy.create_group(split, attributes=dict(stored.attrs))
        for name, array in stored.arrays():
            group.create_array(name, data=array[:], compressors=[zarr.codecs.BloscCodec()])
    batches = []
    for name in ("old", "new"):
        sizes = ["training.tokens.batch=8", "training.tokens.len=8", "model.vocab=2048", "training.steps=1"]
        config = load(train.Config, None, [*sizes, f"flat_tokens.filespec={tmp_path}/{name}"])
        for split in ("train", "validation"):
            with open_data(config, split, sharding()) as loader:
                batches.append(loader.load(0))
    for old, new in zip(batches[:2], batches[2:], strict=True):
        assert_equal(old, new)
    line = f"{tmp_path}/old: written without checksums, so a bit that flips on disk is not noticed; written again it has them\n"
    assert capsys.readouterr().out == line


def test_a_pipe_and_a_bomb(tmp_path, monkeypatch):
    """A chunk's file that is a pipe is refused and not waited for; one of gzip may not unpack to more than a chunk."""
    read_from_chunks(monkeypatch)
    path = write(tmp_path / "data")
    file = tmp_path / "data/train/encoded_tokens/c/1"
    file.unlink()
    os.mkfifo(file)
    message = f"cannot read encoded_tokens of {path}/train from 256 to 512 (the file train/encoded_tokens/c/1 is no plain file): {DAMAGED}"
    assert_refuses(message, load_all, path)
    group = zarr.open_group(tmp_path / "data", mode="r+")["train"]
    values = group["seq_starts"][:]
    del group["encoded_tokens"]
    gzipped = group.create_array(
        "encoded_tokens", shape=(int(values[-1]),), dtype="uint32", chunks=(256,), compressors=[zarr.codecs.GzipCodec()]
    )
    gzipped[:] = 2
    load_all(path)
    file.write_bytes(gzip.compress(bytes(2**26)))
    message = f"cannot read encoded_tokens of {path}/train from 256 to 512 (the file train/encoded_tokens/c/1 unpacks to more than the 1024 bytes of a chunk): {DAMAGED}"
    assert_refuses(message, load_all, path)


@pytest.mark.parametrize("compressor", ["zstd", "gzip", None, "crc"])
def test_other_compressors(tmp_path, compressor, monkeypatch):
    """Also where others wrote with another compressor, or none, a chunk that was cut short is an error."""
    read_from_chunks(monkeypatch)
    codecs = {"zstd": zarr.codecs.ZstdCodec(), "gzip": zarr.codecs.GzipCodec(), "crc": zarr.codecs.Crc32cCodec()}
    values = {"encoded_tokens": np.arange(2000, dtype=np.uint32) * 2, "seq_starts": np.array([0, 2000], np.uint64)}
    group = zarr.open_group(tmp_path / "data", mode="w").create_group("train", attributes={"max_token_id": 2000})
    for name, array in values.items():
        compressors = [codecs[compressor]] if compressor else None
        group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(500,), compressors=compressors)[:] = (
            array
        )
    load_all(tmp_path / "data")
    file = tmp_path / "data/train/encoded_tokens/c/1"
    file.write_bytes(file.read_bytes()[:-7])
    message = f"cannot read encoded_tokens of {tmp_path}/data/train from 500 to … (…): {DAMAGED}"
    assert_refuses(message, load_all, tmp_path / "data")


def test_ids_over_the_largest(tmp_path, monkeypatch):
    """An id that is larger than max_token_id is named with its place, wherever its row comes."""
    path = write(tmp_path / "data")
    read_from_chunks(monkeypatch)
    zarr.open_group(path, mode="r+")["train/encoded_tokens"][333] = 2 * 5000
    message = (
        f"encoded_tokens of {path}/train holds the token id 5000 at 333, which is larger than its max_token_id 1000: a chunk was damaged, "
        "or the writer was wrong; write or copy the data set again"
    )
    assert_refuses(message, load_all, path)


def test_stores_that_are_not_there(object_store, monkeypatch):
    """A missing bucket, data set, split or package is one line with what to do."""
    advice = (
        "set flat_tokens.filespec to a flat-tokens data set, or write one (python -m tools.tokenize_text; docs/data.md)"
    )
    message = f"the data set s3://no-such-bucket/data does not exist: {advice}"
    assert_refuses(message, open_split, "s3://no-such-bucket/data", "train")
    assert_refuses(
        f"the data set {object_store}/no does not exist: {advice}", open_split, f"{object_store}/no", "train"
    )
    write_split(f"{object_store}/data", "train", ragged(0))
    message = f"the data set {object_store}/data has no split 'validation'; it holds 'train'"
    assert_refuses(message, open_split, f"{object_store}/data", "validation")
    message = "the data set gs://a/b cannot be opened (…gcsfs…): pip install gcsfs"
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert_refuses(message, open_split, "gs://a/b", "train")


def test_a_run_stops_where_its_data_are_damaged(tmp_path, monkeypatch, capfd):
    """A chunk of one source of a mixture that is lost ends a run with one line and status 1, after the steps that did not need it, whose
    metrics say how long they waited for data and how many tokens came from each source."""
    rng = np.random.default_rng(0)
    a, b = (str(tmp_path / name) for name in "ab")
    for path in (a, b):
        for split, count in (("train", 400), ("validation", 20)):
            write_split(path, split, [rng.integers(1, 128, 100) for _ in range(count)], chunk_tokens=1024)
    read_from_chunks(monkeypatch)
    (tmp_path / "a/train/encoded_tokens/c/20").unlink()
    overrides = [
        "model.d_model=32", "model.n_kv=4", "model.d_head=8", "model.d_ff=64", "model.layers=1", "model.vocab=128", "log_interval=2",
        "training.tokens.batch=16", "training.tokens.len=32", "training.steps=120", "training.warmup_steps=2", "training.steps_for_lr=120",
        "flat_tokens.read_blocks_per_shuffle_buffer=4", "flat_tokens.sequences_per_read_block=32", "flat_tokens.seed=1", "mesh.d=2",
        "flat_tokens.filespec=null", f"mixture=[{{filespec:'{a}',weight:3}},{{filespec:'{b}',weight:1}}]", "validation_batches=1",
        f"paths.root_working_dir={tmp_path}", "paths.model_name=run", "mesh.t=1", "eval_interval=1000", "checkpoint_interval=1000",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["train", *overrides])
    with pytest.raises(SystemExit) as stop:
        run(train.main, train.Config)
    assert stop.value.code == 1
    said = capfd.readouterr()
    printed = said.out.replace("\n  ", " ")  # long lines are broken
    (error,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    place = (
        f"cannot read encoded_tokens of {a}/train from 20480 to 21504 (the file train/encoded_tokens/c/20 is missing)"
    )
    assert place in error
    assert (
        f"training data: 75.00% from 40,000 tokens of {a}/train in 1,250 rows of 32, 0 at its end being too few for a row; 25"
        in printed
    )
    assert (
        f"of {b}/validation in 62 rows of 32, 16 at its end being too few for a row; 1 batches of 16 are read; at most"
        in printed
    )
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert 4 < max(line["step"] for line in lines) < 120
    for line in lines:
        expected = {f"tokens_per_source/{a}": line["step"] * 12 * 32, f"tokens_per_source/{b}": line["step"] * 4 * 32}
        assert {name: count for name, count in line.items() if name.startswith("tokens_per_source")} == expected
        assert line["data_wait_s"] >= 0
