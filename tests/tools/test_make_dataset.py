"""tools/make_dataset.py: the synthetic data set is what the tool writes, and what is said to be known of it is
so."""

import functools

import numpy as np
import pytest
import zarr
from pages import ROOT
from parts import assert_refuses
from ragged import encoded, files

from runtime.config import command_line
from runtime.data.flat_tokens import open_split
from runtime.data.split_writer import write_split
from tools import make_dataset as tool

CHECKED_IN = ROOT / "synthetic_dataset.zarr"
SPLITS = ("train", "validation")


@functools.cache
def config(*overrides):
    return command_line.load(tool.MakeDataset, None, overrides)


@functools.cache
def corpus(split):
    return tool.generate(config(), split)


def test_the_data_of_another_program_are_kept(tmp_path):
    """What it wrote itself is written anew, and nothing else: not a split of other data, not a data set with a
    tokenizer."""
    for name, attributes in (("split", None), ("tokenizer", {"tokenizer": {"name": "bytes_utf8"}})):
        path = str(tmp_path / name)
        if attributes is None:
            write_split(path, "train", [np.array([1, 2])])
        else:
            zarr.open_group(path, mode="a").attrs.put(attributes)
        before = files(tmp_path)
        assert_refuses("data set that this program did not write: … new path", tool.main, config(f"path={path}"))
        assert files(tmp_path) == before
    for _ in range(2):
        tool.main(config(f"path={tmp_path}/own", "sequences=2"))


@pytest.mark.parametrize("split", SPLITS)
def test_checked_in(split):
    """What is checked in is what the tool writes."""
    stored = open_split(CHECKED_IN, split)
    made = corpus(split)
    np.testing.assert_array_equal(stored.encoded_tokens[:], encoded(made))
    np.testing.assert_array_equal(stored.seq_starts[:], np.cumsum([0, *map(len, made)]))
    assert (stored.max_token_id, stored.bos_id, stored.weight) == (max(map(max, made)), 0, None)
    assert zarr.open_group(CHECKED_IN, mode="r")[split].attrs["config"] == {"seed": 0, "sequences": 512}


def test_sizes():
    """It is small, has 512 sequences of 1 to 1024 tokens in each split, ids that the small model knows, and enough for
    its run."""
    assert sum(map(len, files(CHECKED_IN).values())) < 2_000_000
    for split in SPLITS:
        stored = open_split(CHECKED_IN, split)
        lengths = np.diff(stored.seq_starts[:].astype(int))
        assert len(lengths) == 512 and lengths.min() >= 1 and 1000 < lengths.max() <= 1024
        assert stored.encoded_tokens[:].min() >> 1 == 1 and stored.max_token_id < 1280
    assert open_split(CHECKED_IN, "train").token_count > 1.5 * 50 * 64 * 64


def test_twice_the_same_bytes(tmp_path):
    """The tool writes the same files each time, and others from another seed; the splits differ."""
    for name, seed in [("once", 0), ("twice", 0), ("other", 1)]:
        tool.main(config(f"path={tmp_path}/{name}", "sequences=10", f"seed={seed}"))
    once, twice, other = (files(tmp_path / name) for name in ("once", "twice", "other"))
    assert once == twice and len(once) == 11
    chunk = "{}/encoded_tokens/c/0".format
    assert once[chunk("train")] != other[chunk("train")] != once[chunk("validation")]


def test_command(called, tmp_path):
    """What is known of each split is printed."""
    status, out, error = called(tool.main, tool.MakeDataset, f"path={tmp_path}/data", "sequences=4")
    assert (status, error) == (0, "")
    train, validation, last = out.splitlines()
    assert train.startswith("train: ") and validation.endswith(" nats know only their frequencies")
    assert last == f"ids 1 to 259, 4 sequences a split, in {tmp_path}/data"


def groups(tokens):
    """A sequence's groups, by their markers, which come before all letters."""
    starts = np.flatnonzero(tokens < tool.FIRST_LETTER)
    return [(group[0], group[1:].tolist()) for group in np.split(tokens, starts[1:])]


@pytest.mark.parametrize("split", SPLITS)
def test_tasks(split):
    """Each group but a sequence's last, which is cut, is as its marker says, by a second way to make its letters; a
    sequence has one task and one alphabet; and frequencies alone leave over 4.5 nats a token."""
    expected = {
        "copy": lambda fresh: fresh + fresh,
        "reverse": lambda fresh: fresh + fresh[::-1],
        "known_distance": lambda fresh: [fresh[i % len(fresh)] for i in range(tool.DISTANCE_LETTERS)],
    }
    markers = {tool.marker(task, n): (task, [n]) for task in expected for n in tool.STRINGS}
    markers[tool.marker("unknown_distance", 0)] = ("known_distance", tool.STRINGS)
    found = set()
    for tokens in corpus(split):
        *whole, _ = groups(tokens)
        kinds = {markers.get(marker, (f"gaussians {marker}", []))[0] for marker, _ in groups(tokens)}
        assert len(kinds) == 1
        alphabets = {(letter - tool.FIRST_LETTER) // tool.ALPHABET_SIZE for _, letters in whole for letter in letters}
        for marker, letters in whole:
            found.add(marker)
            if marker in markers:
                task, numbers = markers[marker]
                assert any(letters == expected[task](letters[:n]) and len(set(letters[:n])) == n for n in numbers)
                assert len(alphabets) == 1 and max(letters) < tool.FIRST_BIN
            else:
                assert len(letters) == tool.GAUSSIAN_LETTERS and min(letters) >= tool.FIRST_BIN
    assert found == set(range(1, tool.FIRST_LETTER))
    assert tool.unigram_entropy(np.concatenate(corpus(split))) > 4.5


def test_mixtures():
    """The samples of each mixture of gaussians are as frequent as its probabilities say."""
    probabilities = tool.mixture_probabilities(0)
    for number, row in enumerate(probabilities):
        marker = tool.marker("gaussians", number)
        of_all = [group for split in SPLITS for tokens in corpus(split) for group in groups(tokens)]
        letters = [letter for at, group in of_all if at == marker for letter in group]
        counts = np.bincount(np.array(letters) - tool.FIRST_BIN, minlength=tool.BINS)
        deviation = np.sqrt(len(letters) * row * (1 - row))
        assert len(letters) > 10_000 and (np.abs(counts - len(letters) * row) < 5 * deviation + 1).all()
