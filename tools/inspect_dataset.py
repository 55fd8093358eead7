"""Shows what a flat-tokens data set holds, and checks that all of it is as the format says.

    python -m tools.inspect_dataset path=synthetic_dataset.zarr
    python -m tools.inspect_dataset path=s3://bucket/my.zarr split=validation samples=5
    python -m tools.inspect_dataset path=my.zarr verify=true     # reads every token; exit status 1 if anything is wrong

Without verify it reads where sequences start, 8 bytes a sequence, and the sequences that it prints.
"""

import itertools
import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import zarr

from runtime.config import command_line
from runtime.data.chunks import has_checksums, open_group, read, read_errors
from runtime.data.flat_tokens import Split, absolute_path, open_split
from runtime.data.tokenizers import Tokenizer, load_dataset_tokenizer
from runtime.terminal import RunError, print_line, printable, wrapped

BLOCK = 2**20  # tokens that are read at once, or a chunk's where that has more: 4 MiB
SAMPLE_TOKENS, SAMPLE_LINES = 512, 8  # of a sequence that is printable
SHOWN = 10  # violations of a kind; further ones are counted


@dataclass(frozen=True, kw_only=True)
class InspectDataset:
    path: str  # folder or URL of the data set
    split: str = ""  # looks at this one alone; empty: at all there are
    samples: int = 2  # sequences of a split that are printable
    verify: bool = False  # checks every token; exit status 1 if anything is wrong


def main(config: InspectDataset) -> None:
    where = absolute_path(config.path)
    present = splits_of(where)
    dataset = open_group(where, mode="r")
    print_line(f"{where} (zarr format {dataset.metadata.zarr_format})")
    found = Violations()

    def opened(value: Callable, *arguments: str):
        """None where it cannot be opened, which is one violation."""
        try:
            return value(*arguments)
        except RunError as error:
            if not config.verify:
                raise
            message = str(error)
            found.add("cannot be opened", [0], lambda _: message)
            return None

    print_attributes(dataset)
    tokenizer = opened(load_dataset_tokenizer, where)
    about = (
        f"{tokenizer.name}, ids below {tokenizer.vocab:,}, bos_id {tokenizer.bos_id:,}" if tokenizer else "not named"
    )
    print_line(f"  tokenizer: {about}{', with a chat template' if tokenizer and tokenizer.chat_template else ''}")
    # One that has no `validation` can be looked at, though no run can be trained on it.
    needed = ["train", "validation"] if config.verify else []
    for name in [config.split] if config.split else dict.fromkeys([*needed, *present]):
        print_line(f"\n{name}")
        split = opened(lambda name: open_split(where, name, resident_bytes=0), name)
        if split is None:
            continue
        before = found.count
        if config.verify:
            verify(split, tokenizer, found)
        print_attributes(dataset[name])
        if found.count == before:  # else what is said of it may be wrong
            describe(split, tokenizer, config.samples)
    if found.count:
        raise RunError(f"{where}: {found.finish()} violation{'s' * (found.count > 1)} of the format")
    if config.verify:
        print_line(f"\n{where}: as the format says")


def print_attributes(group: zarr.Group) -> None:
    for key, value in group.attrs.items():
        if key not in ("tokenizer", "max_token_id", "bos_id"):
            print_line(f"  {key}: {json.dumps(value, ensure_ascii=False)}")


def splits_of(where: str) -> list[str]:
    try:
        members = open_group(where, mode="r").members()
        names = sorted(name for name, member in members if isinstance(member, zarr.Group))
    except (*read_errors(), KeyError, TypeError, ImportError):
        names = []
    if not names:
        open_split(where, "train")  # says what is wrong
    return names


# ---------------------------------------------------------------- what it holds


def describe(split: Split, tokenizer: Tokenizer | None, samples: int) -> None:
    """Prints a split's size, its lengths, and some of its sequences."""
    count, sequences = split.token_count, split.sequence_count
    checksums = "" if has_checksums(split.encoded_tokens) else "; no checksums"
    print_line(
        f"  {count:,} tokens in {sequences:,} sequences; no id is above {split.max_token_id:,}; bos_id is "
        f"{split.bos_id:,}{checksums}"
    )
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
    """The beginning of a sequence as text, or as ids; what is no target apart from what is one."""
    end = min(stop, start + SAMPLE_TOKENS)
    ids = read(split.encoded_tokens, start, end, f"encoded_tokens of {split.where}") >> np.uint32(1)
    is_target = np.ones(len(ids), bool)
    if split.is_target is not None:
        is_target = read(split.is_target, start, end, f"is_target of {split.where}")
    print_line(f"\n  sequence {sequence:,}: the {stop - start:,} tokens from {start:,} on")
    lines = []
    for mark, run in itertools.groupby(range(len(ids)), key=is_target.__getitem__):
        part = ids[list(run)]
        text = tokenizer.decode(part) if tokenizer else " ".join(map(str, part.tolist()))
        label = "" if is_target.all() else "target  " if mark else "context "
        for line in text.expandtabs(4).splitlines():
            lines += [f"  {label}| {part}" for part in textwrap.wrap(printable(line), 96 - len(label)) or [""]]
    print_line("\n".join(lines[:SAMPLE_LINES] + (["  …"] if len(lines) > SAMPLE_LINES or end < stop else [])))


# ---------------------------------------------------------------- whether it is as it should be


class Violations:
    """Prints violations, the first few of each kind, and counts them all."""

    def __init__(self):
        self.count, self.of_kind = 0, {}

    def add(self, kind: str, indices: np.ndarray | list[int], text: Callable[[int], str]) -> None:
        """kind: of violations, such as `starts that decrease`. text: what is wrong with an index."""
        already = self.of_kind.get(kind, 0)
        for index in indices[: max(0, SHOWN - already)]:
            print_line(wrapped(f"  {text(int(index))}"))
        self.of_kind[kind] = already + len(indices)
        self.count += len(indices)

    def finish(self) -> int:
        for kind, count in self.of_kind.items():
            if count > SHOWN:
                print_line(f"  … and {count - SHOWN:,} more: {kind}")
        return self.count


def verify(split: Split, tokenizer: Tokenizer | None, found: Violations) -> None:
    """Reads all of a split and prints what is not as the format says. open_split has checked the rest."""
    for name in ("max_token_id", "bos_id"):
        if tokenizer is not None and (value := getattr(split, name)) >= tokenizer.vocab:
            text = f"{name} is {value}, expected an id of the tokenizer {tokenizer.name}, below {tokenizer.vocab}"
            found.add("ids that the tokenizer does not have", [0], lambda _, text=text: text)
    before = found.count
    starts = np.concatenate([values for _, values in contents(split, "seq_starts", found)])
    if found.count == before:
        found.add(
            "starts that decrease",
            1 + np.flatnonzero(starts[1:] < starts[:-1]),
            lambda i: (
                f"seq_starts[{i}] is {starts[i]}, less than {starts[i - 1]} before it, expected increasing numbers"
            ),
        )
        found.add(
            "starts beyond the tokens",
            np.flatnonzero(starts > split.token_count),
            lambda i: f"seq_starts[{i}] is {starts[i]}, expected at most the number of tokens, {split.token_count}",
        )
    in_order = found.count == before
    if not in_order:
        print_line("  since seq_starts is damaged, it is not compared with the tokens that are marked as first")
    firsts = starts[:-1][starts[1:] > starts[:-1]].astype(np.int64) if in_order else None
    for start, tokens in contents(split, "encoded_tokens", found):
        ids = tokens >> np.uint32(1)
        found.add(
            "ids above max_token_id",
            start + np.flatnonzero(ids > split.max_token_id),
            lambda i, start=start, ids=ids: (
                f"encoded_tokens[{i}] is the id {ids[i - start]}, expected no id above max_token_id, "
                f"{split.max_token_id}"
            ),
        )
        if in_order:
            expected = firsts[slice(*np.searchsorted(firsts, (start, start + len(ids))))]
            marked = start + np.flatnonzero(tokens & np.uint32(1))
            found.add(
                "tokens that are marked as first and are not",
                np.setdiff1d(marked, expected),
                lambda i: (
                    f"encoded_tokens[{i}] is marked as a sequence's first token, and no sequence starts there in "
                    "seq_starts"
                ),
            )
            found.add(
                "first tokens that are not marked",
                np.setdiff1d(expected, marked),
                lambda i: (
                    f"encoded_tokens[{i}] is not marked as a sequence's first token, and sequence "
                    f"{np.searchsorted(starts, i, side='right') - 1} starts there in seq_starts"
                ),
            )
    if split.is_target is not None:
        for _ in contents(split, "is_target", found):
            pass


def contents(split: Split, name: str, found: Violations) -> Iterator[tuple[int, np.ndarray]]:
    """Where each block begins, and its values. A chunk that cannot be read is a violation."""
    array, what = getattr(split, name), f"{name} of {split.where}"
    for start, stop in blocks_of(array):
        try:
            yield start, read(array, start, stop, what)
        except RunError:  # chunk by chunk
            for begin in range(start, stop, array.chunks[0]):
                try:
                    yield begin, read(array, begin, min(begin + array.chunks[0], stop), what)
                except RunError as error:
                    found.add(f"chunks of {name} that cannot be read", [begin], lambda _, error=error: str(error))


def blocks_of(array: zarr.Array) -> Iterator[tuple[int, int]]:
    """From where to where: whole chunks."""
    size = -(-BLOCK // array.chunks[0]) * array.chunks[0]
    for start in range(0, array.shape[0], size):
        yield start, min(start + size, array.shape[0])


if __name__ == "__main__":
    command_line.run(main, InspectDataset)
