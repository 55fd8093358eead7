"""Makes data sets to try things with: small tasks whose structure is known.

    python -m tools.make_dataset                                # rewrites the one that is checked in
    python -m tools.make_dataset path=/tmp/my.zarr sequences=2048 seed=7

A sequence of tasks is one task over and over, each time as a group: a marker, which says the task and its number n,
then letters. A model that has learnt them predicts half of all tokens with certainty.

| task           | marker says      | letters of a group                                                              |
|----------------|------------------|---------------------------------------------------------------------------------|
| copy           | n letters        | n fresh ones, then the same                                                     |
| reverse        | n letters        | n fresh ones, then the same from last to first                                  |
| known_distance | distance n       | n fresh ones, repeated until there are DISTANCE_LETTERS                         |
| unknown_distance | nothing (n is drawn) | the same, but where the repetition begins must be noticed                 |
| gaussians      | mixture n        | GAUSSIAN_LETTERS samples of the n-th mixture of gaussians, quantised            |

Fresh letters of a group are different from one another and come from the sequence's alphabet, one of ALPHABETS that
share no token. Ids: 0 is what stands before a sequence and is never written; then the markers, the alphabets, and the
bins of the gaussians. A predictor that knows only frequencies has a loss of 4.5 nats a token, one that knows the tasks
1.2.
"""

from dataclasses import dataclass

import numpy as np

from runtime.config import command_line
from runtime.config.keys import Count, Seed
from runtime.data.split_writer import open_for_writing, write_split
from runtime.terminal import RunError, print_line

TASKS = ("copy", "reverse", "known_distance", "unknown_distance", "gaussians")
LONGEST = 1024  # tokens of a sequence, from 1 to this; the longer the likelier
ALPHABETS = 4  # sets of letters without a common one; a sequence is written in one of them
ALPHABET_SIZE = 12
STRINGS = (2, 3)  # numbers of fresh letters of a group, which are then copied; also the distances
DISTANCE_LETTERS = 24  # letters in a group of the two distance tasks
GAUSSIAN_LETTERS = 15  # letters in a group
MIXTURES, COMPONENTS = 4, 3  # mixtures of gaussians to draw samples from; gaussians in each
BINS = 200  # tokens that the samples are quantised to
STANDARD_DEVIATION = 5.0  # each gaussian's, in bins
# Ids: the markers of three tasks with a number, of the one without, and the gaussians'; then letters; then bins.
FIRST_LETTER = 1 + 3 * len(STRINGS) + 1 + MIXTURES
FIRST_BIN = FIRST_LETTER + ALPHABETS * ALPHABET_SIZE
VOCAB = FIRST_BIN + BINS
MADE_BY = "tools/make_dataset.py"


@dataclass(frozen=True, kw_only=True)
class MakeDataset:
    path: str = "synthetic_dataset.zarr"  # where to write the data set
    seed: Seed = 0  # the two splits draw from it separately
    sequences: Count = 512  # in each split


class Draws:
    """Seeded random numbers, made of raw bits alone, since these are all that numpy promises never to change."""

    def __init__(self, *seed: int):
        self.bits = np.random.PCG64(np.random.SeedSequence(seed))

    def uniforms(self, count: int) -> np.ndarray:
        return (self.bits.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def below(self, size: int) -> int:
        return int(self.uniforms(1)[0] * size)


def main(config: MakeDataset) -> None:
    dataset = open_for_writing(config.path)
    whole = [split.attrs for _, split in dataset.groups() if "max_token_id" in split.attrs]
    if dataset.attrs or any(attributes.get("made_by") != MADE_BY for attributes in whole):
        raise RunError(f"{config.path} holds a data set that this program did not write: write to a new path")
    for split in ("train", "validation"):
        sequences = generate(config, split)
        about = {"made_by": MADE_BY, "config": {"seed": config.seed, "sequences": config.sequences}}
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
    """The loss, in nats, of the best predictor that knows only how frequent each token is."""
    counts = np.bincount(tokens)
    frequencies = counts[counts > 0] / len(tokens)
    return float(-(frequencies * np.log(frequencies)).sum())


if __name__ == "__main__":
    command_line.run(main, MakeDataset)
