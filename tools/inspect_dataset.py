"""Shows what a flat-tokens data set holds, and checks that all of it is as the format says.

    python -m tools.inspect_dataset path=synthetic_dataset.zarr
    python -m tools.inspect_dataset path=s3://bucket/my.zarr split=validation samples=5
    python -m tools.inspect_dataset path=my.zarr verify=true     # reads every token; exit status 1 if anything is wrong

Without verify it reads where sequences start, 8 bytes a sequence, and the sequences that it prints.
"""

import itertools
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.config import command_line
from runtime.data.chunks import has_checksums, open_checked, read, read_errors
from runtime.data.flat_tokens import WEIGHT, Split, absolute_path, is_weight, open_split
from runtime.data.tokenizers import Tokenizer, load_dataset_tokenizer
from runtime.terminal import RunError, print_line, printable, wrapped

SAMPLE_TOKENS, SAMPLE_LINES = 512, 8  # printed of a sequence


@dataclass(frozen=True, kw_only=True)
class InspectDataset:
    path: str  # folder or URL of the data set
    split: str = ""  # the only one to look at; empty: train and validation
    samples: int = 2  # sequences of a split to print
    verify: bool = False  # checks every token; exit status 1 if anything is wrong


def main(config: InspectDataset) -> None:
    where, wrong = absolute_path(config.path), 0
    try:
        dataset = open_checked(where)
    except read_errors(KeyError, TypeError, ImportError):
        open_split(where, "train")  # says what is wrong
        raise
    print_line(f"{where} (zarr format {dataset.metadata.zarr_format})")
    print_attributes(dataset)
    tokenizer, about = load_dataset_tokenizer(where), "not named"
    if tokenizer:
        about = f"{tokenizer.name}, ids below {tokenizer.vocab:,}, bos_id {tokenizer.bos_id:,}"
        about += ", with a chat template" if tokenizer.chat_template else ""
    print_line(f"  tokenizer: {about}")
    # A data set without `validation` can be looked at, though no run can train on it.
    names = ["train", "validation"] if config.verify or "validation" in dataset else ["train"]
    for name in [config.split] if config.split else names:
        print_line(f"\n{name}")
        faults = violations(where, name, tokenizer) if config.verify else []
        for text, count in faults:
            print_line(wrapped(f"  {text}" + (f"; so are {count - 1:,} more" if count > 1 else "")))
            wrong += count
        if not faults:  # otherwise these figures may be wrong
            split = open_split(where, name, resident_bytes=0)
            print_attributes(dataset[name])
            describe(split, tokenizer, config.samples)
    if wrong:
        raise RunError(f"{where}: {wrong} violation{'s' * (wrong > 1)} of the format")
    if config.verify:
        print_line(f"\n{where}: as the format says")


def print_attributes(group: Any) -> None:
    for key, value in group.attrs.items():
        if key not in ("tokenizer", "max_token_id", "bos_id", "has_is_target", "has_weight"):
            print_line(wrapped(f"{key}: {json.dumps(value, ensure_ascii=False)}", "  ", "    "))


# ---------------------------------------------------------------- what it holds


def describe(split: Split, tokenizer: Tokenizer | None, samples: int) -> None:
    """Prints a split's size, its lengths, and some of its sequences."""
    count, sequences = split.token_count, split.sequence_count
    checksums = "" if has_checksums(split.encoded_tokens) else "; no checksums"
    size = f"{count:,} tokens in {sequences:,} sequences; no id is above {split.max_token_id:,}"
    print_line(f"  {size}; bos_id is {split.bos_id:,}{checksums}")
    starts = read(split.seq_starts, 0, sequences + 1, f"seq_starts of {split.where}").astype(np.int64)
    lengths = np.diff(starts)
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > count:
        raise RunError(f"seq_starts of {split.where} is damaged: verify=true says where")
    if sequences:
        quarters = ", ".join(f"{length:,}" for length in np.percentile(lengths, (0, 25, 50, 75, 100)).astype(int))
        print_line(f"  tokens of a sequence: {count / sequences:,.1f} on average; least, quartiles, most: {quarters}")
    for index in range(samples if sequences else 0):
        sequence = (2 * index + 1) * sequences // (2 * samples)
        print_sample(split, tokenizer, sequence, *starts[sequence : sequence + 2].tolist())


def print_sample(split: Split, tokenizer: Tokenizer | None, sequence: int, start: int, stop: int) -> None:
    """Prints the beginning of a sequence as text, or as ids, with targets apart from the rest."""
    end = min(stop, start + SAMPLE_TOKENS)
    ids = read(split.encoded_tokens, start, end, f"encoded_tokens of {split.where}") >> np.uint32(1)
    weights = np.ones(len(ids))
    if split.weight is not None:
        weights = read(split.weight, start, end, f"{split.targets} of {split.where}").astype(float)
    print_line(f"\n  sequence {sequence:,}: the {stop - start:,} tokens from {start:,} on")
    lines = []
    for weight, run in itertools.groupby(range(len(ids)), key=weights.__getitem__):
        part = ids[list(run)]
        text = tokenizer.decode(part) if tokenizer else " ".join(map(str, part.tolist()))
        label = {0: "context ", 1: "target  "}.get(weight, f"× {weight:<6.4g}") if split.targets else ""
        for line in text.expandtabs(4).splitlines():
            lines += [f"  {label}| {part}" for part in textwrap.wrap(printable(line), 88) or [""]]
    print_line("\n".join(lines[:SAMPLE_LINES] + (["  …"] if len(lines) > SAMPLE_LINES or end < stop else [])))


# ---------------------------------------------------------------- whether it is as it should be


def violations(where: str, name: str, tokenizer: Tokenizer | None) -> list[tuple[str, int]]:
    """Reads all of a split. Returns the first violation of each kind, and how many there are."""
    try:
        split = open_split(where, name, resident_bytes=0)
    except RunError as error:
        return [(str(error), 1)]
    faults: dict[str, tuple[str, int]] = {}

    def note(what: str, wrong: np.ndarray, *values: np.ndarray) -> None:
        """what: takes the index of the first that is wrong, and its values."""
        if len(wrong):
            text, count = faults.get(what, (what.format(wrong[0], *(array[0] for array in values)), 0))
            faults[what] = text, count + len(wrong)

    def chunks(name: str, array: Any) -> Iterator[tuple[int, np.ndarray]]:
        for start in range(0, array.shape[0], array.chunks[0]):
            stop = min(start + array.chunks[0], array.shape[0])
            try:
                yield start, read(array, start, stop, f"{name} of {split.where}")
            except RunError as error:
                faults[str(error)] = str(error), 1

    for name in ("max_token_id", "bos_id"):
        if tokenizer is not None and (value := getattr(split, name)) >= tokenizer.vocab:
            expected = f"expected an id of the tokenizer {tokenizer.name}, below {tokenizer.vocab}"
            note(f"{name} is {value}, {expected}", np.zeros(1))
    starts = np.concatenate([np.zeros(0, np.uint64), *(values for _, values in chunks("seq_starts", split.seq_starts))])
    wrong = np.flatnonzero((starts[1:] < starts[:-1]) | (starts[1:] > split.token_count))
    expected = f"expected increasing numbers up to the number of tokens, {split.token_count}"
    note(f"sequence {{}} goes from {{}} to {{}} in seq_starts, {expected}", wrong, starts[wrong], starts[wrong + 1])
    is_damaged = len(wrong) > 0 or len(starts) <= split.sequence_count
    if is_damaged:
        print_line("  since seq_starts is damaged, it is not compared with the tokens that are marked as first")
    firsts = starts[:-1][starts[1:] > starts[:-1]].astype(np.int64)
    if split.row_length and not is_damaged:
        rows = np.arange(0, split.token_count, split.read_length + split.row_length)
        cut = np.setdiff1d(np.concatenate([rows, rows + split.read_length]), firsts)
        note("a sequence goes on at {}, where a row, or its part for the decoder, begins: expected whole ones", cut)
    for start, tokens in chunks("encoded_tokens", split.encoded_tokens):
        ids = tokens >> np.uint32(1)
        wrong = np.flatnonzero(ids > split.max_token_id)
        expected = f"expected no id above max_token_id, {split.max_token_id}"
        note(f"encoded_tokens[{{}}] is the id {{}}, {expected}", start + wrong, ids[wrong])
        if not is_damaged:
            of_chunk = firsts[slice(*np.searchsorted(firsts, (start, start + len(ids))))]
            marked = start + np.flatnonzero(tokens & np.uint32(1))
            is_first = "as a sequence's first token, and {} sequence starts there in seq_starts"
            note(f"encoded_tokens[{{}}] is marked {is_first.format('no')}", np.setdiff1d(marked, of_chunk))
            note(f"encoded_tokens[{{}}] is not marked {is_first.format('a')}", np.setdiff1d(of_chunk, marked))
    if split.targets:
        for start, weights in chunks(split.targets, split.weight):
            wrong = np.flatnonzero(~is_weight(weights))
            note(f"{split.targets}[{{}}] is {{}}, expected {WEIGHT}", start + wrong, weights[wrong])
    return list(faults.values())


if __name__ == "__main__":
    command_line.run(main, InspectDataset)
