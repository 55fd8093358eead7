"""The flat-tokens format: what is stored, what others stored, and what is said of data that are not as they should
be."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import zarr
from parts import assert_refuses
from ragged import EXAMPLE, FlatTokens, as_numpy, assert_equal, encoded, ragged, read_from_chunks, sharding

from models.layers import WeightedBatch
from runtime.data import split_writer
from runtime.data.batches import Loader
from runtime.data.flat_tokens import open_split
from runtime.data.split_writer import write_split


@pytest.fixture
def example(tmp_path):
    write_split(tmp_path / "data", "train", EXAMPLE)
    return tmp_path / "data"


# ---------------------------------------------------------------- the format


def test_example(example):
    """The example of the format's description is stored as it says, and packed with length 8 it is the row that it
    gives: zarr format 3, blosc lz4 at level 9 with byte shuffle, and a crc32c for each chunk."""
    group = zarr.open_group(example, mode="r")["train"]
    stored = {"encoded_tokens": [3, 4, 7, 8, 10, 13, 14, 16], "seq_starts": [0, 2, 5, 8]}
    assert {name: array[:].tolist() for name, array in group.arrays()} == stored
    assert (group["encoded_tokens"].dtype, group["seq_starts"].dtype) == (np.uint32, np.uint64)
    assert dict(group.attrs) == {"max_token_id": 8, "bos_id": 0}
    metadata = json.loads((example / "train" / "encoded_tokens" / "zarr.json").read_text())
    _, blosc, checksum = metadata["codecs"]
    assert (metadata["zarr_format"], blosc["name"], checksum) == (3, "blosc", {"name": "crc32c"})
    settings = {"typesize": 4, "cname": "lz4", "clevel": 9, "shuffle": "shuffle"}
    assert settings.items() <= blosc["configuration"].items()
    with Loader(FlatTokens(str(example)), "train", batch=1, length=8, sharding=sharding()) as loader:
        targets, is_seq_start, is_target = as_numpy(loader.load(0))
    assert targets.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] and is_target.all()
    inputs = np.where(is_seq_start, loader.bos_id, np.roll(targets, 1))
    assert inputs.tolist() == [[0, 1, 0, 3, 4, 0, 6, 7]]


@pytest.mark.parametrize("name, dtype", [("is_target", bool), ("weight", np.float32)])
def test_a_chunk_without_targets(name, dtype, tmp_path):
    """It is written as any other, although zarr would leave out a chunk of its fill value alone."""
    weights = (np.arange(30) // 10 != 1).astype(dtype)
    write_split(tmp_path / "data", "train", [np.arange(1, 31)], **{name: [weights]}, chunk_tokens=10)
    assert (tmp_path / f"data/train/{name}/c/1").is_file()
    np.testing.assert_array_equal(open_split(tmp_path / "data", "train").weight[:], weights)


def test_a_writer_goes_on(tmp_path):
    """What a writer that resumes from a recorded state stores is what one that was not interrupted stores, byte for
    byte, whatever was written since."""
    parts = [[np.arange(first, first + 50) for first in range(part, part + 6)] for part in (0, 10, 20)]
    write_split(tmp_path / "whole", "train", parts[0] + parts[2], chunk_tokens=16)

    def append(writer, sequences):
        writer.append(np.concatenate(sequences).astype(np.uint32), np.array([*map(len, sequences)]))

    dataset = split_writer.open_for_writing(tmp_path / "stopped")
    writer = split_writer.SplitWriter(dataset, "train", chunk_tokens=16)
    append(writer, parts[0])
    state = writer.flush()
    append(writer, parts[1] + parts[2])
    writer = split_writer.SplitWriter(dataset, "train", chunk_tokens=16, resume=state)
    append(writer, parts[2])
    writer.finish(bos_id=0)
    whole, stopped = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (tmp_path / "whole", tmp_path / "stopped")
    )
    assert whole == stopped


@pytest.mark.parametrize("shuffle, byteorder", [("bitshuffle", "<"), ("shuffle", ">")])
def test_zarr_format_2_opens(tmp_path, shuffle, byteorder):
    """What others wrote in zarr format 2 opens and reads the same."""
    import numcodecs

    sequences = ragged(4)
    group = zarr.open_group(tmp_path / "old", mode="w", zarr_format=2).create_group("train")
    compressor = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=getattr(numcodecs.Blosc, shuffle.upper()))
    starts = np.cumsum([0, *map(len, sequences)]).astype(np.uint64)
    for name, values in (("encoded_tokens", encoded(sequences)), ("seq_starts", starts)):
        kind = {"dtype": values.dtype.newbyteorder(byteorder), "compressors": compressor}
        group.create_array(name, shape=values.shape, chunks=(100,), **kind)[:] = values
    group.attrs["max_token_id"] = 1000
    write_split(tmp_path / "new", "train", sequences)
    shape = {"batch": 5, "length": 16, "sharding": sharding()}
    old, new = (Loader(FlatTokens(str(tmp_path / name)), "train", **shape) for name in ("old", "new"))
    with old, new:
        assert old.steps == new.steps and old.bos_id == 0
        for step in range(old.steps):
            assert_equal(old.load(step), new.load(step))


# ---------------------------------------------------------------- faults of the input


def test_writer_refuses(tmp_path):
    """What is no sequence of token ids, no target and no weight is refused with its number, a split that is there is
    not replaced unasked, and one that was half written does not open."""
    path, good = tmp_path / "data", np.array([1, 2])
    ids = "expected whole numbers from 0 to 2147483647"
    weights = "expected a finite number, 0 or more"
    for sequences, others, message in (
        ([good, np.array([-1])], {}, f"sequence 1 for {path}/train … int64[1] from -1 to -1, {ids}"),
        ([np.array([5, 2**31])], {}, f"sequence 0 for {path}/train … int64[2] from 5 to 2147483648, {ids}"),
        ([good, np.ones(2)], {}, f"sequence 1 for {path}/train … float64[2], {ids}"),
        ([good[None]], {}, f"sequence 0 for {path}/train … int64[1, 2], {ids}"),
        ([good], {"is_target": [np.ones(1, bool)]}, "is_target of sequence 0 for … bool[1], expected bool[2]"),
        ([good] * 2, {"is_target": [good > 0]}, "is_target of sequence 1 for … object[], expected bool[2]"),
        ([good], {"weight": [np.ones(2)]}, "weight of sequence 0 for … float64[2], expected float32[2]"),
        ([good], {"weight": [np.float32([1, -1])]}, f"weight of sequence 0 for … holds -1.0, {weights}"),
        ([good], {"weight": [np.float32([np.nan, 1])]}, f"weight of sequence 0 for … holds nan, {weights}"),
    ):
        assert_refuses(message, write_split, path, "train", sequences, overwrite=True, **others)
    assert_refuses("/data/train has no attribute 'max_token_id'", open_split, path, "train")
    message = f"{path}/train is there already: write to a new path … overwrite=true"
    assert_refuses(message, write_split, path, "train", [good])
    zarr.open_group(tmp_path / "old", mode="w", zarr_format=2)
    message = f"{tmp_path}/old is of zarr format 2 … format 3 … write to a new path"
    assert_refuses(message, write_split, tmp_path / "old", "train", [good])


def test_too_little(example):
    """Less than a batch, and a step beyond the data, are refused with the numbers and the keys to change."""
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


ADVICE = "set flat_tokens.filespec … tools.tokenize_text (docs/data.md)"


def test_missing(tmp_path, example, monkeypatch):
    """What is missing is named with its absolute path, what is there instead, and what to do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    zarr.open_group(tmp_path / "none", mode="w")
    for path, split, message in (
        (tmp_path / "nowhere", "train", f"{tmp_path}/nowhere does not exist: {ADVICE}"),
        ("nowhere", "train", f"{tmp_path}/nowhere does not exist: {ADVICE}"),
        ("~/nowhere", "train", f"{tmp_path}/nowhere does not exist: {ADVICE}"),
        ("synthetic_dataset.zarr", "train", ".zarr does not exist … `clearshard make_dataset` writes it"),
        ("empty", "train", f"{tmp_path}/empty exists but is no zarr group … {ADVICE}"),
        ("file", "train", f"{tmp_path}/file exists but is no zarr group … {ADVICE}"),
        (example, "validation", f"{example} has no split 'validation'; it holds 'train'"),
        ("none", "train", f"{tmp_path}/none has no split 'train'; it holds nothing"),
        (example / "train", "train", "'encoded_tokens', 'seq_starts' … a split itself: give the folder above"),
    ):
        assert_refuses(message, open_split, path, split)
    assert open_split("~/data", "train").token_count == 8
    (example / "train/seq_starts/zarr.json").write_text("{")
    assert_refuses(f"{example} cannot be opened (JSONDecodeError: … {ADVICE}", open_split, example, "train")


IDS = "expected a number from 0 to 2147483647"
# What is said, and the arrays and attributes that a split has then; None: it lacks the array.
DAMAGE = {
    "DATA/train has no array 'encoded_tokens' … it holds 'seq_starts'": {"encoded_tokens": None},
    "encoded_tokens of DATA/train … int32[8], expected uint32": {"encoded_tokens": np.zeros(8, np.int32)},
    "encoded_tokens of DATA/train … uint32[2, 4], expected uint32 of one dimension": {
        "encoded_tokens": np.zeros((2, 4), np.uint32)
    },
    "seq_starts of DATA/train … from 0 to 7, expected from 0 to 8": {"seq_starts": np.array([0, 7], np.uint64)},
    "seq_starts of DATA/train … from 2 to 8, expected from 0 to 8": {"seq_starts": np.array([2, 8], np.uint64)},
    "seq_starts of DATA/train … empty, expected from 0 to 8": {"seq_starts": np.zeros(0, np.uint64)},
    "is_target of DATA/train … 7 entries, expected one a token, 8": {"is_target": np.ones(7, bool)},
    "DATA/train … both is_target and weight, expected one": {"has_is_target": True, "has_weight": True},
    "DATA/train has 8 tokens, expected … row_length = 5": {"row_length": 3, "read_length": 2},
    f"'max_token_id' of DATA/train is 'eight', {IDS}": {"max_token_id": "eight"},
    f"'bos_id' of DATA/train is -1, {IDS}": {"bos_id": -1},
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged(example, message):
    """Whatever of a split is not as the format says is refused when it is opened, with its path."""
    group = zarr.open_group(example, mode="r+")["train"]
    for name, value in DAMAGE[message].items():
        if isinstance(value, np.ndarray):
            group.create_array(name, data=value, overwrite=True)
        elif value is None:
            del group[name]
        else:
            group.attrs[name] = value
    assert_refuses(message.replace("DATA", str(example)), open_split, example, "train")


# ---------------------------------------------------------------- weights and rows


@pytest.mark.parametrize("packing", [True, False])
def test_weights_are_read(tmp_path, packing, monkeypatch):
    """A batch has the weights that were written, beside data without weights 1 for each target, in a mixture too;
    padding has 0. One that is none, which a writer or a damaged disk left, is named with its place."""
    read_from_chunks(monkeypatch)
    sequences = [ids[:40] for ids in ragged(7, longest=39)]
    written = [np.float32((ids % 5) / 2) for ids in sequences]
    write_split(tmp_path / "a", "train", sequences, weight=written, chunk_tokens=64)
    write_split(tmp_path / "b", "train", sequences, is_target=[weight > 0 for weight in written], chunk_tokens=64)
    shape = {"batch": 4, "length": 40, "sharding": sharding(2, 1, WeightedBatch)}

    def batches_of(name, mixture=()):
        with Loader(FlatTokens(name and str(tmp_path / name), 0, packing), "train", **shape, mixture=mixture) as loader:
            batches = [jax.tree.map(np.asarray, loader.load(step)) for step in range(loader.steps or 9)]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)

    one, two = batches_of("a"), batches_of("b")
    for name in ("targets", "is_seq_start", "is_target"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    np.testing.assert_array_equal(one.weight, one.is_target * (one.targets % 5) / 2)
    np.testing.assert_array_equal(two.weight, two.is_target)
    assert one.weight.dtype == np.float32 and one.is_target.any() and one.weight.max() == 2
    mixed = batches_of(None, [SimpleNamespace(filespec=str(tmp_path / name), weight=1) for name in "ab"])
    assert set(mixed.weight.ravel()) == {0, 0.5, 1, 1.5, 2}
    np.testing.assert_array_equal(mixed.weight[1::2], mixed.is_target[1::2])  # every second row is of b
    zarr.open_group(tmp_path / "a", mode="r+")["train/weight"][5] = np.nan
    assert_refuses(f"weight of {tmp_path}/a/train holds nan at 5, expected a finite", batches_of, "a")


def test_what_a_batch_cannot_hold_is_refused(tmp_path):
    """Weights for a loss that does not take them, rows of another length, tokens that no encoder reads, or none for
    one."""
    one = [np.arange(1, 9)]
    write_split(tmp_path / "weights", "train", one, weight=[np.ones(8, np.float32)])
    write_split(tmp_path / "rows", "train", one, attributes={"row_length": 4})
    write_split(tmp_path / "pairs", "train", one, attributes={"row_length": 1, "read_length": 3})
    write_split(tmp_path / "plain", "train", one)
    rows = "train was written in rows of 4 … set training.tokens.len=4"
    for name, options, message in (
        ("weights", {}, "train holds weights of targets … loss does not take"),
        ("rows", {"length": 8}, rows),
        ("rows", {"packing": False}, rows),
        ("pairs", {}, "train holds pairs … this program has no encoder"),
        ("pairs", {"read_length": 2}, "train … set training.tokens.len=1 and training.tokens.read_len=3"),
        ("plain", {"read_length": 3}, "train holds no pairs … this program has an encoder"),
    ):
        config = FlatTokens(str(tmp_path / name), 0, options.pop("packing", True))
        options = {"batch": 1, "length": 4, "sharding": sharding(), **options}
        assert_refuses(f"{tmp_path}/{name}/{message}", Loader, config, "train", **options)
    with Loader(FlatTokens(str(tmp_path / "rows")), "train", batch=1, length=4, sharding=sharding()) as loader:
        assert loader.rows == 2 and loader.dropped_tokens == 0
