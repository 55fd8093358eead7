"""Writes a data set of small tasks whose structure is known, so that it is known how well a model can do.

    python -m tools.write_synthetic_dataset                                # rewrites the one that is checked in
    python -m tools.write_synthetic_dataset path=/tmp/my.zarr sequences=2048 seed=7

A sequence is one task over and over, each time as a group: a marker, which says the task and its number n, then
letters.

| task           | marker says      | letters of a group                                                              |
|----------------|------------------|---------------------------------------------------------------------------------|
| copy           | n letters        | n fresh ones, then the same                                                     |
| reverse        | n letters        | n fresh ones, then the same from last to first                                  |
| known_distance | distance n       | n fresh ones, repeated until there are `distance_letters`                       |
| unknown_distance | nothing (n is drawn) | the same, but where the repetition begins must be noticed                 |
| gaussians      | mixture n        | `gaussian_letters` samples of the n-th mixture of gaussians, quantised          |

Fresh letters of a group are different from one another and come from the sequence's alphabet, one of `alphabets` that
share no token. Ids: 0 is what stands before a sequence and is never written; then the markers, the alphabets, and the
bins of the gaussians. So who knows nothing but frequencies loses about 6 nats a token, who has noticed the alphabet at
most ln(alphabet_size), and who knows the task nothing at all on a letter that is copied.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64, jaxtyped
from typeguard import typechecked

from runtime.config import command_line
from runtime.data.flat_tokens import write_split
from runtime.terminal import RunError

# typeguard takes a string inside an annotation for a forward reference, so that array types need names of their own.
# The inner decorator checks arguments, results and annotated locals; the outer one makes a letter one size within a
# call.
Lengths = Int64[np.ndarray, "sequences"]
Ids = Int64[np.ndarray, "tokens"]
Fresh = Int64[np.ndarray, "fresh"]
Losses = Float64[np.ndarray, "tokens"]
Mask = Bool[np.ndarray, "tokens"]
Probabilities = Float64[np.ndarray, "choices"]
Mixtures = Float64[np.ndarray, "mixtures bins"]

TASKS = ("copy", "reverse", "known_distance", "unknown_distance", "gaussians")


def checked(function):
    """Checks a function's array types whenever it is called: what each array is, and that a dim has one size within the
    call."""
    return jaxtyped(typechecker=None)(typechecked(function))


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    path: str = "synthetic_dataset.zarr"  # of the data set
    overwrite: bool = True  # replaces splits that are there; false refuses
    seed: int = 0  # of everything; the two splits draw from it separately
    sequences: int = 512  # of each split
    longest: int = 1024  # tokens of a sequence, from 1 to this; the longer the likelier
    alphabets: int = 4  # sets of letters without a common one; a sequence is written in one of them
    alphabet_size: int = 12  # letters of each set
    shortest_string: int = 2  # fresh letters of a group, which are then copied; also the shortest distance
    longest_string: int = 3  # the most of them; also the longest distance
    distance_letters: int = 24  # letters of a group of the two distance tasks
    gaussian_letters: int = 15  # samples of a group
    mixtures: int = 4  # of gaussians, that samples are drawn from
    components: int = 3  # gaussians of a mixture
    bins: int = 200  # tokens that the samples are quantised to
    standard_deviation: float = 5.0  # of each gaussian, in bins
    # tokens: where not 0, the targets of `validation` are only the copies whose group lies in one such window
    copies_within: int = 0

    @property
    def strings(self) -> int:
        """How many lengths of strings, and distances, there are."""
        return self.longest_string - self.shortest_string + 1

    @property
    def first_letter(self) -> int:
        """The first id after the markers: those of three tasks with a number, the one without, the gaussians'."""
        return 1 + 3 * self.strings + 1 + self.mixtures

    @property
    def first_bin(self) -> int:
        return self.first_letter + self.alphabets * self.alphabet_size

    @property
    def vocab(self) -> int:
        return self.first_bin + self.bins

    def marker(self, task: str, number: int) -> int:
        """The id that begins a group; the number is a string's length, a distance or a mixture."""
        if task == "unknown_distance":
            return 1 + 3 * self.strings
        if task == "gaussians":
            return 2 + 3 * self.strings + number
        return 1 + TASKS.index(task) * self.strings + number - self.shortest_string


@dataclass(frozen=True)
class Corpus:
    """The tokens of a split, and what a predictor that knows the tasks loses on each of them."""

    lengths: Lengths  # of the sequences
    tokens: Ids  # all sequences, one after another
    losses: Losses  # -ln p in nats, given all of the sequence before; no predictor does better on average
    copied: Mask  # letters that repeat an earlier one of their group
    group_starts: Ids  # where the token's group begins, counted in tokens of the split

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


# ---------------------------------------------------------------- the tasks


def main(config: Synthetic) -> None:
    print(f"{'split':12}{'tokens':>10}{'unigram entropy':>20}{'knowing the tasks':>20}{'predictable copies':>20}")
    for split in ("train", "validation"):
        corpus = generate(config, split)
        about = {"made_by": "tools/write_synthetic_dataset.py", "config": dataclasses.asdict(config)}
        del about["config"]["path"], about["config"]["overwrite"]
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
        print(f"{split:12}{len(corpus.tokens):>10,}" + "".join(f"{column:>20}" for column in columns))
    print(f"ids 1 to {config.vocab - 1}, {config.sequences} sequences a split, in {config.path}")


def generate(config: Synthetic, split: str) -> Corpus:
    """The tokens of `train` or `validation` and what is known of them; the same ones at each call.

    Raises:
      RunError: the sizes do not go together.
    """
    check_sizes(config)
    mixtures = mixture_probabilities(config)
    draws = Draws(config.seed, 1 + ("train", "validation").index(split))
    # The larger of two uniform numbers: long sequences are likelier, so that 512 of them hold tokens enough.
    lengths = (1 + draws.uniforms(2 * config.sequences).reshape(-1, 2).max(axis=1) * config.longest).astype(np.int64)
    parts = [sequence(config, draws, mixtures, length) for length in lengths.tolist()]
    tokens, losses, copied, group_starts = (np.concatenate(columns) for columns in zip(*parts))
    starts = np.cumsum(lengths) - lengths
    return Corpus(lengths, tokens, losses, copied, group_starts + np.repeat(starts, lengths))


@checked
def sequence(config: Synthetic, draws: Draws, mixtures: Mixtures, length: int) -> tuple[Ids, Losses, Mask, Ids]:
    """Groups of one task, cut at the length: ids, the informed predictor's losses, what is copied, where groups begin."""
    task = TASKS[draws.below(len(TASKS))]
    first_letter = config.first_letter + draws.below(config.alphabets) * config.alphabet_size
    mixture = draws.below(config.mixtures)

    ids, losses, copied, group_starts, count = [], [], [], [], 0
    while count < length:
        if task == "gaussians":
            number, marker_loss = mixture, 0.0 if count else math.log(config.mixtures)
            letters, letter_losses = samples(draws, mixtures[mixture], config.gaussian_letters)
            letters, is_copy = letters + config.first_bin, np.zeros(len(letters), bool)
        else:
            number = config.shortest_string + draws.below(config.strings)
            marker_loss = 0.0 if task == "unknown_distance" else math.log(config.strings)
            letters, letter_losses, is_copy = string(config, draws, task, number)
            letters = letters + first_letter
            if not count:  # the first letter of all also tells which alphabet it is
                letter_losses[0] += math.log(config.alphabets)
        ids.append(np.concatenate([[config.marker(task, number)], letters]))
        losses.append(np.concatenate([[marker_loss + (0.0 if count else math.log(len(TASKS)))], letter_losses]))
        copied.append(np.concatenate([[False], is_copy]))
        group_starts.append(np.full(len(ids[-1]), count))
        count += len(ids[-1])
    return tuple(np.concatenate(pieces)[:length] for pieces in (ids, losses, copied, group_starts))


@checked
def string(config: Synthetic, draws: Draws, task: str, number: int) -> tuple[Ids, Losses, Mask]:
    """The letters of a group, 0 to alphabet_size - 1: `number` fresh ones and their copies."""
    fresh: Fresh = np.argsort(draws.uniforms(config.alphabet_size), kind="stable")[:number].astype(np.int64)
    if task == "copy":
        letters = np.concatenate([fresh, fresh])
    elif task == "reverse":
        letters = np.concatenate([fresh, fresh[::-1]])
    else:
        letters = np.resize(fresh, config.distance_letters)
    losses = np.zeros(len(letters))
    losses[:number] = np.log(config.alphabet_size - np.arange(number))  # no letter comes twice
    if task == "unknown_distance":
        # Each distance is as likely as the others, so at the i-th letter the repetition begins with probability
        # 1 / (distances from i on), unless it has begun already.
        distances = np.arange(config.shortest_string, number + 1)
        begins = 1 / (config.longest_string + 1 - distances)
        losses[distances[:-1]] -= np.log1p(-begins[:-1])
        losses[number] -= np.log(begins[-1])
    return letters, losses, np.arange(len(letters)) >= number


@checked
def samples(draws: Draws, probabilities: Probabilities, count: int) -> tuple[Ids, Losses]:
    """Independent draws of a mixture's bins, and -ln p of each."""
    cumulative: Probabilities = np.cumsum(probabilities)
    ids = np.searchsorted(cumulative, draws.uniforms(count) * cumulative[-1], side="right")
    return ids, -np.log(probabilities[ids] / cumulative[-1])


@checked
def mixture_probabilities(config: Synthetic) -> Mixtures:
    """The probability of each bin in each mixture; the same in both splits, since they are part of the task."""
    draws = Draws(config.seed, 0)
    bins = np.arange(config.bins) + 0.5
    rows = []
    for _ in range(config.mixtures):
        means = draws.uniforms(config.components) * config.bins
        weights = 0.5 + draws.uniforms(config.components)
        densities = np.exp(-0.5 * ((bins[None, :] - means[:, None]) / config.standard_deviation) ** 2)
        row = weights @ densities
        rows.append(row / row.sum())
    return np.stack(rows)


def check_sizes(config: Synthetic) -> None:
    """Raises a RunError where the tasks cannot be made of these sizes."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in ("path", "overwrite", "seed", "copies_within") and value <= 0:
            raise RunError(f"{field.name} is {value}, expected more than 0")
    for name in ("seed", "copies_within"):
        if getattr(config, name) < 0:
            raise RunError(f"{name} is {getattr(config, name)}, expected 0 or more")
    if config.longest_string < config.shortest_string:
        raise RunError(
            f"longest_string is {config.longest_string}, expected at least shortest_string, {config.shortest_string}"
        )
    if config.alphabet_size < config.longest_string:
        raise RunError(
            f"alphabet_size is {config.alphabet_size}, expected at least longest_string, {config.longest_string}: no "
            "letter comes twice"
        )
    if config.distance_letters <= config.longest_string:
        raise RunError(
            f"distance_letters is {config.distance_letters}, expected more than longest_string, "
            f"{config.longest_string}, else nothing repeats"
        )


# ---------------------------------------------------------------- what is known of it


@checked
def unigram_entropy(tokens: Ids) -> float:
    """In nats: the loss of the best predictor that knows nothing but how frequent each token is."""
    counts = np.bincount(tokens)
    frequencies: Probabilities = counts[counts > 0] / len(tokens)
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


if __name__ == "__main__":
    command_line.run(main, Synthetic)
