"""The synthetic data set: it is what its tool writes, and what is said to be known of it is so."""

import dataclasses
import functools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from typeguard import TypeCheckError

from runtime.config import command_line
from runtime.data.flat_tokens import open_split
from runtime.terminal import RunError
from tools import write_synthetic_dataset as tool

ROOT = Path(__file__).resolve().parents[2]
CHECKED_IN = ROOT / "synthetic_dataset.zarr"
SPLITS = ("train", "validation")


@functools.cache
def config(*overrides):
    return command_line.load(tool.Synthetic, None, overrides)


@functools.cache
def corpus(split):
    return tool.generate(config(), split)


@pytest.mark.parametrize("split", SPLITS)
def test_checked_in(split):
    """What is checked in is what the tool writes."""
    stored = open_split(CHECKED_IN, split)
    made = corpus(split)
    ends = np.cumsum(made.lengths)
    is_start = np.isin(np.arange(ends[-1]), ends - made.lengths)
    np.testing.assert_array_equal(stored.encoded_tokens[:], 2 * made.tokens + is_start)
    np.testing.assert_array_equal(stored.seq_starts[:], [0, *ends])
    assert (stored.max_token_id, stored.bos_id, stored.is_target) == (made.tokens.max(), 0, None)
    settings = dataclasses.asdict(config())
    del settings["path"], settings["overwrite"]
    assert zarr.open_group(CHECKED_IN, mode="r")[split].attrs["config"] == settings


def test_sizes():
    """It is small, has 512 sequences of 1 to 1024 tokens in each split, ids that the small model knows, and enough for its run."""
    assert sum(file.stat().st_size for file in CHECKED_IN.rglob("*") if file.is_file()) < 2_000_000
    for split in SPLITS:
        stored = open_split(CHECKED_IN, split)
        lengths = np.diff(stored.seq_starts[:].astype(int))
        assert len(lengths) == 512 and lengths.min() >= 1 and 1000 < lengths.max() <= 1024
        assert stored.encoded_tokens[:].min() >> 1 == 1 and stored.max_token_id < 1280
    assert open_split(CHECKED_IN, "train").token_count > 1.5 * 50 * 64 * 64


def test_twice_the_same_bytes(tmp_path):
    """The tool writes the same files each time, and others from another seed; the splits differ."""
    files = {}
    for name, seed in [("once", 0), ("twice", 0), ("other", 1)]:
        tool.main(config(f"path={tmp_path}/{name}", "sequences=10", f"seed={seed}"))
        files[name] = {
            str(file.relative_to(tmp_path / name)): file.read_bytes()
            for file in (tmp_path / name).rglob("*")
            if file.is_file()
        }
    assert files["once"] == files["twice"] and len(files["once"]) == 11
    chunk = "{}/encoded_tokens/c/0".format
    assert files["once"][chunk("train")] != files["other"][chunk("train")] != files["once"][chunk("validation")]


def test_command(tmp_path):
    """The documented command runs, prints what is known of each split, and refuses what cannot be without a traceback."""
    command = [sys.executable, "-m", "tools.write_synthetic_dataset", f"path={tmp_path}/data", "sequences=4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    heading, train, validation, last = done.stdout.splitlines()
    assert heading.split("  ")[0] == "split" and "unigram entropy" in heading and "knowing the tasks" in heading
    assert train.startswith("train ") and validation.startswith("validation ") and train.count(" nats") == 2
    assert last == f"ids 1 to 259, 4 sequences a split, in {tmp_path}/data"
    done = subprocess.run([*command, "overwrite=false"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    message = f"error: {tmp_path}/data holds the split 'train' already: write to a new path, or say overwrite=true to replace it\n"
    assert done.stderr == message


BAD_SIZES = [
    ("sequences=0", "sequences is 0, expected more than 0"),
    ("seed=-1", "seed is -1, expected 0 or more"),
    ("longest_string=1", "longest_string is 1, expected at least shortest_string, 2"),
    ("alphabet_size=2", "alphabet_size is 2, expected at least longest_string, 3: no letter comes twice"),
    ("distance_letters=3", "distance_letters is 3, expected more than longest_string, 3, else nothing repeats"),
]


@pytest.mark.parametrize("override, message", BAD_SIZES)
def test_refused_sizes(override, message):
    """Sizes that do not go together are one clear message."""
    with pytest.raises(RunError) as error:
        tool.generate(config(override), "train")
    assert str(error.value) == message


WRONG_ARRAYS = [
    (tool.unigram_entropy, [np.ones(3)], 'argument "tokens" (numpy.ndarray) is not an instance of'),
    (tool.unigram_entropy, [np.ones((3, 1), int)], 'argument "tokens" (numpy.ndarray) is not an instance of'),
    (
        tool.samples,
        [tool.Draws(0), np.ones(3, np.float32), 2],
        'argument "probabilities" (numpy.ndarray) is not an instance of',
    ),
    # Ids and losses that are not equally many: the test makes np.log return one too many.
    (tool.samples, [tool.Draws(0), np.full(3, 1 / 3), 2], "item 1 of the return value (tuple) is not an instance of"),
]


@pytest.mark.parametrize("function, arguments, message", WRONG_ARRAYS)
def test_array_types_are_checked(function, arguments, message, monkeypatch):
    """The annotations hold at run time: another element type, another rank, and two sizes of one dim are refused."""
    if message.startswith("item 1"):
        monkeypatch.setattr(np, "log", lambda x: np.zeros(len(x) + 1))
    with pytest.raises(TypeCheckError) as error:
        function(*arguments)
    assert message in str(error.value)


def test_spread():
    """Frequencies alone leave over 4.5 nats a token; knowing the tasks leaves less than a third, and half of all tokens no doubt."""
    for split in SPLITS:
        made = corpus(split)
        assert tool.unigram_entropy(made.tokens) > 4.5
        assert made.losses.mean() < tool.unigram_entropy(made.tokens) / 3
        assert 0.45 < tool.predictable(made).mean() < 0.55


# ---------------------------------------------------------------- another predictor, which sees only the tokens


def letters_of(task, fresh):
    """A group's letters as its marker describes them."""
    if task in ("copy", "reverse"):
        return [*fresh, *(fresh if task == "copy" else fresh[::-1])]
    return [fresh[i % len(fresh)] for i in range(config().distance_letters)]


def probability(task, number, letters):
    """Of a group that begins with these letters, given the task, its number and the alphabet: 0 unless they repeat as they must."""
    fresh = letters[:number]
    if len(set(fresh)) < len(fresh):
        return 0.0
    whole = letters_of(task, [*fresh, *[None] * (number - len(fresh))])
    if whole[: len(letters)] != letters:
        return 0.0
    return math.prod(1 / (config().alphabet_size - i) for i in range(len(fresh)))


def expected_losses(tokens):
    """-ln p of each token of a sequence, by Bayes over all that the tokens before leave possible."""
    settings = config()
    numbers = range(settings.shortest_string, settings.longest_string + 1)
    markers = {settings.marker(task, number): (task, [number]) for task in tool.TASKS[:3] for number in numbers}
    markers[settings.marker("unknown_distance", 0)] = ("unknown_distance", list(numbers))
    markers |= {settings.marker("gaussians", mixture): ("gaussians", [mixture]) for mixture in range(settings.mixtures)}
    mixtures = tool.mixture_probabilities(settings)
    losses, place = [], 0
    while place < len(tokens):
        task, possible = markers[tokens[place]]
        known = task in ("unknown_distance", "gaussians")
        first = math.log(5) + (math.log(settings.mixtures) if task == "gaussians" else 0) if place == 0 else 0
        losses.append(first + (0 if known else math.log(len(numbers))))
        size = settings.gaussian_letters if task == "gaussians" else len(letters_of(task, list(range(possible[0]))))
        letters = tokens[place + 1 : place + 1 + size]
        if task == "gaussians":
            losses += [-math.log(mixtures[possible[0], letter - settings.first_bin]) for letter in letters]
        else:
            before = 1.0
            for count in range(1, len(letters) + 1):
                now = sum(probability(task, number, letters[:count]) for number in possible) / len(possible)
                losses.append(math.log(before / now))
                before = now
            if place == 0 and letters:
                losses[1] += math.log(settings.alphabets)
        place += 1 + len(letters)
    return losses


def test_losses_are_exact():
    """What the tool says that knowing the tasks leaves of each token is what another predictor finds from the tokens alone."""
    made = corpus("validation")
    starts = np.cumsum(made.lengths) - made.lengths
    tasks = set()
    for start, tokens in list(zip(starts, made.sequences))[:40]:
        np.testing.assert_allclose(
            made.losses[start : start + len(tokens)], expected_losses(tokens.tolist()), atol=1e-9
        )
        tasks.add(tokens[0])
    assert len(tasks) > 8
    # Every sequence draws its letters from one alphabet, and all of it from one task.
    assert all(
        np.unique((s[s >= config().first_letter] - config().first_letter) // config().alphabet_size).size <= 1
        for s in made.sequences
        if s.max() < config().first_bin
    )


def test_predictable():
    """Predictable tokens are copies that cost nothing: in a window, those whose group began in it."""
    made = corpus("train")
    whole, windowed = tool.predictable(made), tool.predictable(made, 64)
    assert not made.losses[whole].any() and made.copied[whole].all()
    assert not (windowed & ~whole).any() and 0.75 < windowed.sum() / whole.sum() < 0.9
    places = np.flatnonzero(windowed)
    assert (places // 64 == made.group_starts[places] // 64).all()
    # Each stands in its group already, within the window: a model that sees no more than the window can know it.
    for place in places[:2000].tolist():
        assert made.tokens[place] in made.tokens[made.group_starts[place] : place]
