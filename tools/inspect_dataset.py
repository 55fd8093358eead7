"""Shows what a flat-tokens data set holds, and checks that all of it is as the format says.

    python -m tools.inspect_dataset synthetic_dataset.zarr
    python -m tools.inspect_dataset s3://bucket/my.zarr --split validation --samples 5
    python -m tools.inspect_dataset my.zarr --verify     # reads every token; exit status 1 if anything is wrong

Without --verify it reads at most 16M tokens and 4M lengths of each split, in places spread evenly over it. What it says
of lengths, frequencies and targets is then said of these.
"""

import argparse
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zarr
from tqdm import tqdm

from runtime.data.chunks import open_group, read, read_errors
from runtime.data.flat_tokens import Split, absolute_path, open_split
from runtime.data.tokenizers import Tokenizer, load_dataset_tokenizer
from runtime.terminal import RunError

WIDTH, BAR = 100, 40
BLOCK = 2**20  # values that are read at once, or a chunk's where that has more: 4 MiB of tokens, 8 MiB of starts
SAMPLED_TOKENS, SAMPLED_LENGTHS = 2**24, 2**22
MOST_FREQUENT = 10
SAMPLE_TOKENS, SAMPLE_LINES = 512, 8  # of a sequence that is shown
SHOWN = 10  # violations of a kind; further ones are counted


def main(arguments: list[str] | None = None) -> int:
    """The command line's arguments; returns the exit status."""
    about, _, usage = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.inspect_dataset",
        description=about,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="folder or URL of the data set")
    parser.add_argument("--split", help="look at this one alone, not at all there are")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="sequences of a split that are shown (2)")
    parser.add_argument("--verify", action="store_true", help="check all tokens; exit status 1 if anything is wrong")
    options = parser.parse_args(arguments)
    try:
        return inspect(options)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def inspect(options: argparse.Namespace) -> int:
    """Prints what there is to say; the exit status."""
    where = absolute_path(options.path)
    names = splits_of(where)
    dataset = open_group(where, mode="r")
    if options.split:
        names = [options.split]
    print(f"{where} (zarr format {dataset.metadata.zarr_format})")
    print_attributes(dataset.attrs, but=("tokenizer",))
    problems, tokenizer = 0, None
    try:
        tokenizer = load_dataset_tokenizer(where)
        print(wrapped(f"tokenizer: {tokenizer_text(tokenizer)}", ""))
    except RunError as error:
        problems += refuse_or_print(error, options.verify)
    for name in names:
        try:
            split = open_split(where, name, resident_bytes=0)
        except RunError as error:
            # A data set of one split can be looked at, though no run can be trained on it.
            problems += refuse_or_print(error, options.verify or (len(names) > 1 and name not in dataset), f"\n{name}")
            continue
        print(f"\n{name}")
        violations = verify(split, tokenizer) if options.verify else 0
        problems += violations
        if not violations:  # else what is said of it may be wrong
            describe(split, dataset[name].attrs, tokenizer, options.samples)
    if not options.verify:
        return 0
    print(
        f"\n{where}: "
        + ("as the format says" if not problems else f"{problems:,} violation{'s' * (problems > 1)} of the format")
    )
    return 1 if problems else 0


def splits_of(where: str) -> list[str]:
    """The names of a data set's splits, among them `train` and `validation`, which it should have."""
    present = []
    try:
        for name, member in open_group(where, mode="r").members():
            if isinstance(member, zarr.Group):
                present.append(name)
    except (*read_errors(), KeyError, TypeError, ImportError):
        present = []
    if not present:
        open_split(where, "train")  # says what is wrong
    return list(dict.fromkeys(["train", "validation", *sorted(present)]))


def refuse_or_print(error: RunError, is_printed: bool, heading: str = "") -> int:
    if not is_printed:
        raise error
    if heading:
        print(heading)
    print(wrapped(str(error), "  "))
    return 1


# ---------------------------------------------------------------- what it holds


def describe(split: Split, attributes: Any, tokenizer: Tokenizer | None, samples: int) -> None:
    """Prints a split's size, its lengths, its most frequent tokens, and some of its sequences."""
    count, sequences = split.token_count, split.sequence_count
    print(
        f"  {count:,} tokens in {sequences:,} sequences; no id is above {split.max_token_id:,}; bos_id is "
        f"{split.bos_id:,}"
    )
    print_attributes(attributes, but=("max_token_id", "bos_id"))
    lengths = np.concatenate(
        [
            np.diff(read(split.seq_starts, start, stop + 1, f"seq_starts of {split.where}").astype(np.int64))
            for start, stop in spread(sequences, SAMPLED_LENGTHS, BLOCK)
        ]
        or [np.zeros(0, np.int64)]
    )
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > count:
        raise RunError(f"seq_starts of {split.where} is damaged: --verify says where")
    if len(lengths):
        part = "" if len(lengths) == sequences else f" of {len(lengths):,} sequences"
        print(f"\n  lengths{part}: {lengths.min():,} to {lengths.max():,} tokens, {count / sequences:,.1f} on average")
        print_lengths(lengths)

    ids, counts, targets = frequencies(split)
    total = int(counts.sum())
    if total:
        part = "the tokens" if total == count else f"{total:,} tokens"
        share = "all" if targets == total else f"{targets / total:.2%}"
        print(f"\n  {share} of {part} are targets; the most frequent of them:")
        order = np.argsort(-counts, kind="stable")[:MOST_FREQUENT]
        for token, times in zip(ids[order].tolist(), counts[order].tolist()):
            text = f"  {tokenizer.decode([token])!r:<18.18}" if tokenizer else ""
            print(f"{token:>12,}{text}{times / total:>10.3%}  {bar(times / counts.max())}")
    for index in range(samples if sequences else 0):
        print_sample(split, tokenizer, (2 * index + 1) * sequences // (2 * samples))


def print_attributes(attributes: Any, but: tuple[str, ...]) -> None:
    for key, value in attributes.items():
        if key not in but:
            text = f"  {key}: {json.dumps(value, ensure_ascii=False)}"
            print(text if len(text) <= WIDTH else text[: WIDTH - 2] + " …")


def tokenizer_text(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "the data set does not say"
    chat = ", with a chat template" if tokenizer.chat_template else ""
    return f"{tokenizer.name}, ids below {tokenizer.vocab:,}, bos_id {tokenizer.bos_id:,}{chat}"


def frequencies(split: Split) -> tuple[np.ndarray, np.ndarray, int]:
    """The ids in a part of the split, how often each occurs, and how many tokens are targets."""
    targets, ids, counts = 0, np.zeros(0, np.uint32), np.zeros(0, np.int64)
    for start, stop in spread(split.token_count, SAMPLED_TOKENS, block_of(split.encoded_tokens)):
        tokens = read(split.encoded_tokens, start, stop, f"encoded_tokens of {split.where}")
        new_ids, new_counts = np.unique(tokens >> np.uint32(1), return_counts=True)
        ids, place = np.unique(np.concatenate([ids, new_ids]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, new_counts])).astype(np.int64)
        if split.is_target is None:
            targets += stop - start
        else:
            targets += int(read(split.is_target, start, stop, f"is_target of {split.where}").sum())
    return ids, counts, targets


def print_lengths(lengths: np.ndarray) -> None:
    """A bar for each doubling of the length."""
    bins = np.bincount(np.frexp(lengths.astype(np.float64))[1])  # 0, 1, 2 to 3, 4 to 7, …
    for power in range(int(np.flatnonzero(bins)[0]), len(bins)):
        low, high = (2**power) // 2, max(2**power - 1, 0)
        label = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        print(f"{label:>24}{bins[power]:>17,}  {bar(bins[power] / bins.max())}".rstrip())


def print_sample(split: Split, tokenizer: Tokenizer | None, sequence: int) -> None:
    """The beginning of a sequence as text, or as ids; what is no target apart from what is one."""
    start, stop = (int(each) for each in read(split.seq_starts, sequence, sequence + 2, f"seq_starts of {split.where}"))
    end = max(start, min(stop, start + SAMPLE_TOKENS))
    ids = read(split.encoded_tokens, start, end, f"encoded_tokens of {split.where}") >> np.uint32(1)
    is_target = np.ones(len(ids), bool)
    if split.is_target is not None:
        is_target = read(split.is_target, start, end, f"is_target of {split.where}")
    print(f"\n  sequence {sequence:,}: the {stop - start:,} tokens from {start:,} on")
    lines = []
    for mark, run in itertools.groupby(range(len(ids)), key=is_target.__getitem__):
        part = ids[list(run)]
        text = tokenizer.decode(part) if tokenizer else " ".join(map(str, part.tolist()))
        label = "" if is_target.all() else "target  " if mark else "context "
        for line in "".join(
            each if each.isprintable() or each == "\n" else "\ufffd" for each in text.expandtabs(4)
        ).splitlines():
            lines += [f"  {label}| {part}" for part in textwrap.wrap(line, WIDTH - len(label) - 4) or [""]]
    print("\n".join(lines[:SAMPLE_LINES] + (["  …"] if len(lines) > SAMPLE_LINES or end < stop else [])))


# ---------------------------------------------------------------- whether it is as it should be


class Violations:
    """Prints violations, the first few of each kind, and counts them all."""

    def __init__(self):
        self.count, self.of_kind = 0, {}

    def add(self, kind: str, indices: np.ndarray | list[int], text: Callable[[int], str]) -> None:
        """kind: of violations, such as `seq_starts decreases`. text: what is wrong with an index."""
        shown = self.of_kind.get(kind, 0)
        for index in indices[: max(0, SHOWN - shown)]:
            print(wrapped(text(int(index)), "  "))
        self.of_kind[kind] = shown + len(indices)
        self.count += len(indices)

    def finish(self) -> int:
        for kind, count in self.of_kind.items():
            if count > SHOWN:
                print(f"  … and {count - SHOWN:,} more: {kind}")
        return self.count


def verify(split: Split, tokenizer: Tokenizer | None) -> int:
    """Reads all of a split and prints what is not as the format says; how many violations there are. open_split has
    checked the rest."""
    found = Violations()
    if tokenizer is not None:
        for name in ("max_token_id", "bos_id"):
            value = getattr(split, name)
            if value >= tokenizer.vocab:
                text = f"{name} is {value}, expected an id of the tokenizer {tokenizer.name}, below {tokenizer.vocab}"
                found.add("ids that the tokenizer does not have", [0], lambda _, text=text: text)
    in_order = verify_starts(split, found)
    if not in_order:
        print("  since seq_starts is damaged, it is not compared with the tokens that are marked as first")
    starts = Starts(split) if in_order else None
    for start, stop, tokens in blocks(split, "encoded_tokens", found):
        expected, sequences = starts.below(stop) if starts else (None, None)
        if tokens is None:
            continue
        ids = tokens >> np.uint32(1)
        found.add(
            "ids above max_token_id",
            np.flatnonzero(ids > split.max_token_id),
            lambda i, start=start, ids=ids: (
                f"encoded_tokens[{start + i}] is the id {ids[i]}, expected no id above max_token_id, "
                f"{split.max_token_id}"
            ),
        )
        if starts:
            marked = start + np.flatnonzero(tokens & np.uint32(1))
            found.add(
                "tokens that are marked as first and are not",
                np.setdiff1d(marked, expected),
                lambda i: (
                    f"encoded_tokens[{i}] is marked as a sequence's first token, and no sequence starts there in "
                    "seq_starts"
                ),
            )
            sequence_at = dict(zip(expected.tolist(), sequences.tolist())) if len(expected) else {}
            found.add(
                "first tokens that are not marked",
                np.setdiff1d(expected, marked),
                lambda i, at=sequence_at: (
                    f"encoded_tokens[{i}] is not marked as a sequence's first token, and sequence {at[i]} starts "
                    "there in seq_starts"
                ),
            )
    if split.is_target is not None:
        for _ in blocks(split, "is_target", found):
            pass
    return found.finish()


def verify_starts(split: Split, found: Violations) -> bool:
    """Whether seq_starts can be read and increases. Its first and its last were checked when it was opened."""
    before, count = np.zeros(1, np.uint64), found.count
    for start, _, values in blocks(split, "seq_starts", found):
        if values is None:
            continue
        previous = np.concatenate([before, values[:-1]])
        found.add(
            "starts that decrease",
            np.flatnonzero(values < previous),
            lambda i, start=start, values=values, previous=previous: (
                f"seq_starts[{start + i}] is {values[i]}, less than {previous[i]} before it, expected increasing "
                "numbers"
            ),
        )
        found.add(
            "starts beyond the tokens",
            np.flatnonzero(values > split.token_count),
            lambda i, start=start, values=values: (
                f"seq_starts[{start + i}] is {values[i]}, expected at most the number of tokens, {split.token_count}"
            ),
        )
        before = values[-1:]
    return found.count == count


class Starts:
    """Where sequences start that are not empty, read on and on."""

    def __init__(self, split: Split):
        self._split = split
        self._blocks = blocks(split, "seq_starts", Violations())
        self._values, self._sequences = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def below(self, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The starts from the last `stop` on to this one, and the numbers of their sequences."""
        values, sequences = [self._values], [self._sequences]
        while not len(values[-1]) or values[-1][-1] < stop:
            block = next(self._blocks, None)
            if block is None:
                break
            values.append(block[2].astype(np.int64))
            sequences.append(np.arange(block[0], block[1]))
        values, sequences = np.concatenate(values), np.concatenate(sequences)
        split = np.searchsorted(values, stop)
        self._values, self._sequences = values[split:], sequences[split:]
        # Of those that start at the same place, all but the last are empty.
        is_last = np.append(values[1:] != values[:-1], True)[:split]
        return values[:split][is_last], sequences[:split][is_last]


def blocks(split: Split, name: str, found: Violations) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """From where to where, and the values there, None where they cannot be read, which is a violation for each chunk."""
    array, what = getattr(split, name), f"{name} of {split.where}"
    size = block_of(array)
    with tqdm(
        total=array.shape[0], desc=name, unit_scale=True, leave=False, disable=not sys.stderr.isatty()
    ) as progress:
        for start in range(0, array.shape[0], size):
            stop = min(start + size, array.shape[0])
            progress.update(stop - start)
            try:
                values = read(array, start, stop, what)
            except RunError:
                values = None
            if values is not None:
                yield start, stop, values
                continue
            for begin in range(start, stop, array.chunks[0]):
                end = min(begin + array.chunks[0], stop)
                try:
                    yield begin, end, read(array, begin, end, what)
                except RunError as error:
                    found.add(f"chunks of {name} that cannot be read", [begin], lambda _, error=error: str(error))
                    yield begin, end, None


# ---------------------------------------------------------------- small things


def block_of(array: zarr.Array) -> int:
    """How many values are read at once: whole chunks."""
    return -(-BLOCK // array.chunks[0]) * array.chunks[0]


def spread(count: int, limit: int, block: int) -> Iterator[tuple[int, int]]:
    """From where to where: all of `count`, or blocks of it, evenly spread, of `limit` together."""
    total, wanted = -(-count // block), max(1, limit // block)
    for index in range(min(total, wanted)):
        start = (index * total // min(total, wanted)) * block
        yield start, min(start + block, count)


def bar(fraction: float) -> str:
    """Eighths of a character, and at least one for what is not nothing."""
    eighths = max(round(fraction * BAR * 8), 1 if fraction else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    sys.exit(main())
