"""The flat-tokens format: what is stored, what others stored, and what is said of data that are not as they should be."""

import json
import os

import numpy as np
import pytest
import zarr
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
from runtime.data.batches import Loader
from runtime.data.flat_tokens import open_split, write_split
from runtime.terminal import RunError


@pytest.fixture
def example(tmp_path):
    write_split(tmp_path / "data", "train", EXAMPLE)
    return tmp_path / "data"


# ---------------------------------------------------------------- the format


def test_example(example):
    """The example of the format's description is stored as it says."""
    group = zarr.open_group(example, mode="r")["train"]
    assert group["encoded_tokens"].dtype == np.uint32 and group["encoded_tokens"][:].tolist() == [
        3,
        4,
        7,
        8,
        10,
        13,
        14,
        16,
    ]
    assert group["seq_starts"].dtype == np.uint64 and group["seq_starts"][:].tolist() == [0, 2, 5, 8]
    assert dict(group.attrs) == {"max_token_id": 8, "bos_id": 0}
    assert sorted(group.array_keys()) == ["encoded_tokens", "seq_starts"]


def test_example_batch(example):
    """Packed with length 8, the example is the one row that the format's description gives."""
    with Loader(FlatTokens(str(example)), "train", batch=1, length=8, sharding=sharding()) as loader:
        targets, is_seq_start, is_target = as_numpy(loader.load(0))
    assert targets.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    inputs = np.where(is_seq_start, loader.bos_id, np.roll(targets, 1))
    assert inputs.tolist() == [[0, 1, 0, 3, 4, 0, 6, 7]]
    assert is_target.all()


def test_stored_as_said(example):
    """New data sets are zarr format 3, compressed by blosc lz4 at level 9 with byte shuffle, with a crc32c for each chunk."""
    metadata = json.loads((example / "train" / "encoded_tokens" / "zarr.json").read_text())
    assert metadata["zarr_format"] == 3
    _, blosc, checksum = metadata["codecs"]
    assert (blosc["name"], checksum) == ("blosc", {"name": "crc32c"})
    assert {**blosc["configuration"], "blocksize": 0} == {
        "typesize": 4,
        "cname": "lz4",
        "clevel": 9,
        "shuffle": "shuffle",
        "blocksize": 0,
    }


@pytest.mark.parametrize("chunk_tokens", [7, 64, 2**18])
def test_round_trip(tmp_path, chunk_tokens):
    """Ragged sequences, empty ones among them, are stored the same whatever the size of chunks; so is which tokens are targets."""
    sequences = [np.array([], int), *ragged(3), np.array([], int)]
    masks = [np.arange(len(ids)) % 3 > 0 for ids in sequences]
    write_split(
        tmp_path / "data",
        "train",
        iter(sequences),
        is_target=iter(masks),
        bos_id=5,
        attributes={"tokenizer": "x"},
        chunk_tokens=chunk_tokens,
    )
    split = open_split(tmp_path / "data", "train")
    np.testing.assert_array_equal(split.encoded_tokens[:], encoded(sequences))
    np.testing.assert_array_equal(split.seq_starts[:], np.cumsum([0, *map(len, sequences)]))
    np.testing.assert_array_equal(split.is_target[:], np.concatenate(masks))
    assert (split.max_token_id, split.bos_id) == (max(ids.max() for ids in sequences if len(ids)), 5)
    assert (split.token_count, split.sequence_count) == (sum(map(len, sequences)), 102)
    assert zarr.open_group(tmp_path / "data", mode="r")["train"].attrs["tokenizer"] == "x"


def test_ids_of_31_bits(tmp_path):
    """The largest id, 2³¹ - 1, comes back."""
    write_split(tmp_path / "data", "train", [np.array([2**31 - 1, 0])])
    with Loader(FlatTokens(str(tmp_path / "data")), "train", batch=1, length=2, sharding=sharding()) as loader:
        assert np.asarray(loader.load(0).targets).tolist() == [[2**31 - 1, 0]]


def test_writer_holds_a_chunk_at_most(tmp_path, monkeypatch):
    """The writer's memory does not grow with the data: it never holds more than a chunk and a sequence."""
    held = []
    write = flat_tokens.write_chunk
    monkeypatch.setattr(
        flat_tokens, "write_chunk", lambda *chunk: (held.append((chunk[1], len(chunk[2]))), write(*chunk))
    )
    write_split(tmp_path / "data", "train", (np.arange(10) for _ in range(1000)), chunk_tokens=64)
    assert held[-2:] == [(156, 64), (125, 8)] and {size for _, size in held} == {64, 8}  # tokens, starts


@pytest.mark.parametrize("dtype", ["uint32", "uint64", "bool"])
@pytest.mark.parametrize("cname", ["lz4", "zstd"])
@pytest.mark.parametrize("checksum", [[], [zarr.codecs.Crc32cCodec()]], ids=["", "crc32c"])
def test_chunks_are_the_files_that_zarr_writes(tmp_path, dtype, cname, checksum):
    """A chunk that is written past zarr is, byte for byte, the file that zarr writes, with whichever codec of blosc the array has."""
    group, values = zarr.open_group(tmp_path), np.random.default_rng(0).integers(0, 1000, 300).astype(dtype)
    codec = zarr.codecs.BloscCodec(cname=cname, clevel=5, shuffle="bitshuffle" if dtype == "bool" else "shuffle")
    options = dict(
        shape=(300,), dtype=dtype, chunks=(300,), compressors=[codec, *checksum], config={"write_empty_chunks": True}
    )
    ours, theirs = (group.create_array(name, **options) for name in ("ours", "theirs"))
    chunks.write_chunk(ours, 0, values)
    theirs[:] = values
    assert (tmp_path / "ours/c/0").read_bytes() == (tmp_path / "theirs/c/0").read_bytes()
    assert os.listdir(tmp_path / "ours/c") == ["0"]


def test_a_writer_goes_on(tmp_path):
    """What a writer that goes on from a recorded state stores is what one that was not interrupted stores, whatever was written since."""
    parts = [[np.arange(each, each + 50) for each in range(part, part + 6)] for part in (0, 10, 20)]
    write_split(tmp_path / "whole", "train", parts[0] + parts[2], chunk_tokens=16)

    def append(writer, sequences):
        for each in sequences:
            writer.append(each.astype(np.uint32), np.array([len(each)]))

    dataset = flat_tokens.open_for_writing(tmp_path / "stopped")
    writer = flat_tokens.SplitWriter(dataset, "train", chunk_tokens=16)
    append(writer, parts[0])
    state = writer.flush()
    append(writer, parts[1] + parts[2])
    writer = flat_tokens.SplitWriter(dataset, "train", chunk_tokens=16, resume=state)
    append(writer, parts[2])
    writer.finish(bos_id=0)
    files = [
        {str(file.relative_to(tmp_path / name)): file.read_bytes() for file in (tmp_path / name).rglob("*") if file.is_file()}
        for name in ("whole", "stopped")
    ]  # fmt: skip
    assert files[0] == files[1]


def test_writer_refuses(tmp_path):
    """What is no sequence of token ids is refused with its number, and a split that is there is not replaced unasked."""
    path = tmp_path / "data"
    write = lambda *args, **kwargs: write_split(path, "train", *args, overwrite=True, **kwargs)  # noqa: E731
    good = np.array([1, 2])
    assert_refuses(
        f"sequence 1 for {path}/train holds the token id -1, expected 0 to 2147483647", write, [good, np.array([-1])]
    )
    assert_refuses(
        f"sequence 0 for {path}/train holds the token id 2147483648, expected 0 to 2147483647",
        write,
        [np.array([2**31])],
    )
    assert_refuses(
        f"sequence 1 for {path}/train is float64[2], expected integers of one dimension", write, [good, np.ones(2)]
    )
    assert_refuses(
        f"sequence 0 for {path}/train is int64[1, 2], expected integers of one dimension", write, [good[None]]
    )
    assert_refuses(
        f"is_target of sequence 0 for {path}/train is bool[1], expected bool[2]",
        write,
        [good],
        is_target=[np.ones(1, bool)],
    )
    assert_refuses(
        f"is_target of sequence 1 for {path}/train is object[], expected bool[2]",
        write,
        [good, good],
        is_target=[np.ones(2, bool)],
    )
    assert_refuses(
        f"{path} holds the split 'train' already: write to a new path, or say overwrite=true to replace it",
        write_split,
        path,
        "train",
        [good],
    )
    zarr.open_group(tmp_path / "old", mode="w", zarr_format=2)
    message = f"{tmp_path}/old is of zarr format 2, and only format 3 is written: write to a new path"
    assert_refuses(message, write_split, tmp_path / "old", "train", [good])


def test_half_written_does_not_open(tmp_path):
    """A writer that was stopped leaves nothing that can be taken for a whole split."""

    def stopped():
        yield np.arange(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_split(tmp_path / "data", "train", stopped(), chunk_tokens=16)
    with pytest.raises(RunError, match=r"seq_starts of .*/data/train is empty"):
        open_split(tmp_path / "data", "train")


@pytest.mark.parametrize("shuffle", ["bitshuffle", "shuffle"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_zarr_format_2_opens(tmp_path, shuffle, byteorder):
    """What others wrote in zarr format 2 opens and reads the same."""
    import numcodecs

    sequences = ragged(4)
    group = zarr.open_group(tmp_path / "old", mode="w", zarr_format=2).create_group("train")
    compressor = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=getattr(numcodecs.Blosc, shuffle.upper()))
    for name, values in [
        ("encoded_tokens", encoded(sequences)),
        ("seq_starts", np.cumsum([0, *map(len, sequences)]).astype(np.uint64)),
    ]:
        stored = group.create_array(
            name, shape=values.shape, dtype=values.dtype.newbyteorder(byteorder), chunks=(100,), compressors=compressor
        )
        stored[:] = values
    group.attrs["max_token_id"] = 1000
    write_split(tmp_path / "new", "train", sequences)
    for packing in (True, False):
        old, new = (
            Loader(
                FlatTokens(str(tmp_path / name), sequence_packing=packing),
                "train",
                batch=5,
                length=16,
                sharding=sharding(),
            )
            for name in ("old", "new")
        )
        with old, new:
            assert old.steps == new.steps and old.bos_id == 0
            for step in range(old.steps):
                assert_equal(old.load(step), new.load(step))


# ---------------------------------------------------------------- faults of the input


def test_missing(tmp_path, example, monkeypatch):
    """What is missing is named with its absolute path, what is there instead, and what to do."""
    advice = (
        "set flat_tokens.filespec to a flat-tokens data set, or write one (python -m tools.tokenize_text; docs/data.md)"
    )
    assert_refuses(
        f"the data set {tmp_path}/nowhere does not exist: {advice}", open_split, tmp_path / "nowhere", "train"
    )
    monkeypatch.chdir(tmp_path)
    assert_refuses(f"the data set {tmp_path}/nowhere does not exist: {advice}", open_split, "nowhere", "train")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_refuses(f"the data set {tmp_path}/nowhere does not exist: {advice}", open_split, "~/nowhere", "train")
    assert open_split("~/data", "train").token_count == 8
    (tmp_path / "empty").mkdir()
    assert_refuses(
        f"{tmp_path}/empty exists but is no zarr group, so it is no data set: {advice}", open_split, "empty", "train"
    )
    (tmp_path / "file").write_text("x")
    assert_refuses(
        f"{tmp_path}/file exists but is no zarr group, so it is no data set: {advice}", open_split, "file", "train"
    )
    assert_refuses(
        f"the data set {example} has no split 'validation'; it holds 'train'", open_split, example, "validation"
    )
    zarr.open_group(tmp_path / "none", mode="w")
    assert_refuses(f"the data set {tmp_path}/none has no split 'train'; it holds nothing", open_split, "none", "train")
    message = f"{example}/train is one split of a data set, expected the data set that holds it: give the folder above"
    assert_refuses(message, open_split, example / "train", "train")
    (example / "zarr.json").write_text("{")
    assert_refuses(
        f"the data set {example} cannot be opened (JSONDecodeError: …): {advice}", open_split, example, "train"
    )


def replace_array(group, name, values):
    del group[name]
    if values is not None:
        values = np.asarray(values)
        group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=values.shape)[...] = values


DAMAGE = [
    (
        lambda group: replace_array(group, "encoded_tokens", None),
        "DATA/train has no array 'encoded_tokens', so it is no flat-tokens split; it holds 'seq_starts'",
    ),
    (
        lambda group: replace_array(group, "seq_starts", None),
        "DATA/train has no array 'seq_starts', so it is no flat-tokens split; it holds 'encoded_tokens'",
    ),
    (
        lambda group: replace_array(group, "encoded_tokens", np.zeros(8, np.int32)),
        "encoded_tokens of DATA/train is int32[8], expected uint32 of one dimension",
    ),
    (
        lambda group: replace_array(group, "encoded_tokens", np.zeros((2, 4), np.uint32)),
        "encoded_tokens of DATA/train is uint32[2, 4], expected uint32 of one dimension",
    ),
    (
        lambda group: replace_array(group, "seq_starts", np.array([0, 8])),
        "seq_starts of DATA/train is int64[2], expected uint64 of one dimension",
    ),
    (
        lambda group: replace_array(group, "seq_starts", np.array([0, 7], np.uint64)),
        "seq_starts of DATA/train ends with 7, expected 8, the length of encoded_tokens: "
        "the data set is damaged or only partly written, write or copy it again",
    ),
    (
        lambda group: replace_array(group, "seq_starts", np.array([2, 8], np.uint64)),
        "seq_starts of DATA/train starts with 2, expected 0: the data set is damaged, write it again",
    ),
    (
        lambda group: group.create_array("is_target", shape=(7,), dtype=bool),
        "is_target of DATA/train has 7 entries, expected one a token, 8",
    ),
    (
        lambda group: group.create_array("is_target", shape=(8,), dtype="uint8"),
        "is_target of DATA/train is uint8[8], expected bool of one dimension",
    ),
    (
        lambda group: group.attrs.put({"bos_id": 0}),
        "DATA/train has no attribute 'max_token_id': the writer did not finish, or is none of flat-tokens; write it again",
    ),
    (
        lambda group: group.attrs.update(max_token_id="eight"),
        "attribute 'max_token_id' of DATA/train is 'eight', expected a token id from 0 to 2147483647",
    ),
    (
        lambda group: group.attrs.update(bos_id=-1),
        "attribute 'bos_id' of DATA/train is -1, expected a token id from 0 to 2147483647",
    ),
]


@pytest.mark.parametrize("damage, message", DAMAGE, ids=[message.split(",")[0] for _, message in DAMAGE])
def test_damaged(example, damage, message):
    """Whatever of a split is not as the format says is refused when it is opened, with its path."""
    damage(zarr.open_group(example, mode="r+")["train"])
    assert_refuses(message.replace("DATA", str(example)), open_split, example, "train")


def test_damaged_metadata(example):
    """Metadata that cannot be read is refused with the array's name."""
    (example / "train" / "seq_starts" / "zarr.json").write_text("{")
    message = f"'seq_starts' of {example}/train cannot be opened (JSONDecodeError: …): write or copy it again"
    assert_refuses(message, open_split, example, "train")


def test_damaged_chunks(tmp_path, monkeypatch):
    """A chunk that cannot be decoded, and one that is lost, are found when they are read, by load(), where they are."""
    read_from_chunks(monkeypatch)
    path = tmp_path / "data"
    config = FlatTokens(str(path))
    chunk = path / "train" / "encoded_tokens" / "c" / "2"

    def load():
        with Loader(config, "train", batch=8, length=8, sharding=sharding(), shuffle=False) as loader:
            return [loader.load(step) for step in range(loader.steps)]

    write_split(path, "train", ragged(0), chunk_tokens=64)
    load()
    chunk.write_bytes(b"x" * 40)
    message = (
        f"cannot read encoded_tokens of {path}/train from 128 to 192 (the file train/encoded_tokens/c/2 has 40 bytes and was written with "
        "another number): the data set is damaged or out of reach; write or copy it again"
    )
    assert_refuses(message, load)
    chunk.unlink()
    message = message.replace("has 40 bytes and was written with another number", "is missing")
    assert_refuses(message, load)


def test_seq_starts_that_decrease(example, monkeypatch):
    """seq_starts that decrease are found before the first batch where rows are made of sequences."""
    read_from_chunks(monkeypatch)
    replace_array(zarr.open_group(example, mode="r+")["train"], "seq_starts", np.array([0, 9, 5, 8], np.uint64))
    config = FlatTokens(str(example), sequence_packing=False)
    message = (
        f"seq_starts of {example}/train says that sequence 0 goes from 0 to 9, expected increasing numbers up to 8: "
        "the data set is damaged, write it again"
    )
    assert_refuses(message, Loader, config, "train", batch=1, length=8, sharding=sharding(), shuffle=False)
