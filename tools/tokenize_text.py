"""Writes your own text as a flat-tokens data set: files or a Hugging Face data set in, token ids out.

    python -m tools.tokenize_text input=corpus.txt output=corpus.zarr validation_fraction=0.1
    python -m tools.tokenize_text input='web/*.jsonl.zst' output=web.zarr tokenizer=openai-community/gpt2
    python -m tools.tokenize_text input=qa.jsonl format=prompt output=qa.zarr tokenizer=train_bpe bpe_vocab=8192
    python -m tools.tokenize_text hf_dataset.path=roneneldan/TinyStories output=stories.zarr

This process reads blocks of text in order, others turn them into ids, and this one writes these in the same order.
Every few seconds it records how far it is in the data set itself. Killed at any moment, the same command goes on from
there, and ends with the same bytes: what is written is a function of the text alone.

Expect, for each core, a byte-level BPE to take 1 to 3 MB of text a second, and bytes_utf8 about 100 MB.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import pathlib
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Annotated, Literal

import zarr
from annotated_types import Ge, Gt, Interval, Predicate
from tqdm import tqdm

from runtime.cluster.tuning import keep_memory
from runtime.config import command_line
from runtime.config.keys import Decay, Steps
from runtime.data.documents import Block, File, find_files, find_splits, read_blocks
from runtime.data.flat_tokens import LARGEST_ID, SplitWriter, absolute_path, open_for_writing
from runtime.data.tokenizers import (
    BYTES,
    Tokenizer,
    load_dataset_tokenizer,
    load_tokenizer,
    save_dataset_tokenizer,
    train_bpe,
)
from runtime.terminal import RunError, print_line, printable
from tools.text_records import (
    Settings,
    Tokenized,
    drawn,
    read_documents,
    start_worker,
    text_ends,
    tokenize,
    work_on,
)

RECORD_S = 15.0  # seconds between two records of how far it is: what a killed run does again
SHOWN_BAD_RECORDS = 10
TRAIN_BPE = "train_bpe"


def unescaped(text: str) -> str | None:
    r"""Text with \\n for a new line, as a command line gives it; None for what is none."""
    try:
        return text.encode("ascii", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        return None


Escaped = Annotated[
    str,
    Predicate(lambda text: unescaped(text) is not None),
    r"text, with \n for a new line and \\ for a backslash",
]
Id = Annotated[int, Interval(ge=0, le=LARGEST_ID), f"an id from 0 to {LARGEST_ID}"]


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    path: str = ""  # in place of input: a data set's name on the Hugging Face hub, or its folder
    name: str = ""  # its configuration, where it has several
    split: str = "train"  # of it, that is tokenized
    validation_split: str = ""  # becomes `validation`


@dataclass(frozen=True, kw_only=True)
class TokenizeText:
    # A path, a glob such as 'corpus/*.jsonl.zst', or a URL that fsspec knows; or else hf_dataset. The suffix says how
    # it is read: .jsonl (.ndjson, .json), .parquet, all others text; .gz, .bz2 and .zst are unpacked.
    input: str = ""
    hf_dataset: HubDataset = field(default_factory=HubDataset)
    output: str  # folder or URL of the data set
    overwrite: bool = False  # replaces a data set that is there
    # or a tokenizer.json, a folder that holds one, a name on the Hugging Face hub; or train_bpe
    tokenizer: str = "bytes_utf8"
    # ids of the byte-level BPE that train_bpe trains, and the data set then holds
    bpe_vocab: Annotated[int, Interval(ge=257, le=LARGEST_ID), f"257 (the bytes and one) to {LARGEST_ID}"] = 32768
    # of training text that it is trained on, taken evenly from all the input
    bpe_bytes: Annotated[int, Gt(0), "more than 0"] = 100_000_000
    # the input that stands before each sequence, where it shall not be what the tokenizer says
    bos_id: Id | None = None
    chat_template: str = ""  # a file of jinja in place of the tokenizer's own
    # prompt: records of a prompt, which is no target, and an answer. chat: messages, of which the assistant's are
    # targets
    format: Literal["text", "prompt", "chat"] = "text"
    text_field: str = "text"  # of a record (a line of jsonl, a row of parquet)
    in_field: str = "in_text"  # the prompt
    out_field: str = "out_text"  # the answer
    messages_field: str = "messages"  # a list of {"role": ..., "content": ...}
    # what stands between the documents of a text file, such as '\n' or '<|endoftext|>'. Without one they are cut by
    # size:
    separator: Escaped = ""
    # the least that is cut off, to the end of its line. Four times the tokens of a training sequence are enough
    document_bytes: Annotated[int, Ge(4), "4 or more"] = 16384
    validation: str = ""  # path, glob or URL of what becomes the split `validation`
    # without that, about so many of the documents, chosen by their hash; 0: no validation split
    validation_fraction: Decay = 0.01
    seed: Annotated[int, Interval(ge=0, lt=2**64), "a number from 0 to less than 2⁶⁴"] = 0  # of that choice
    # skip: leaves out what is no text or no JSON, or lacks a field, and counts it
    on_bad_record: Literal["fail", "skip"] = "fail"
    processes: Steps = 0  # that tokenize; 0: one for each core

    @property
    def settings(self) -> Settings:
        """What of it says which documents there are."""
        fields = {
            "text": (self.text_field,),
            "prompt": (self.in_field, self.out_field),
            "chat": (self.messages_field,),
        }
        given = self.validation or self.hf_dataset.validation_split
        fraction = 0.0 if given else self.validation_fraction
        separator = unescaped(self.separator).encode()
        return Settings(self.format, fields[self.format], separator, self.document_bytes, fraction, self.seed)

    @property
    def has_validation(self) -> bool:
        return bool(self.validation or self.hf_dataset.validation_split or self.validation_fraction)


# ---------------------------------------------------------------- from beginning to end


def main(config: TokenizeText) -> None:
    check(config)
    files = find_all(config)
    # A run goes on where another was if these are the same. How many processes there are makes no difference.
    about = json.loads(printable(json.dumps(dataclasses.asdict(config))))  # without the password of a URL
    for key in ("output", "overwrite", "on_bad_record", "processes"):
        del about[key]
    made_by = {"tool": "tools/tokenize_text.py", "config": about, "input_size": total_bytes(files)}
    known = [(file.name, file.size, file.version, file.split) for file in files]
    inputs = hashlib.sha256(json.dumps(known).encode()).hexdigest()

    open_for_writing(config.output)  # the folder must be there for alone_in
    with alone_in(config.output), failing_writes(config.output):
        dataset = open_for_writing(config.output)
        if dataset.attrs.get("made_by") == made_by and not config.overwrite:
            print_line(
                f"{config.output} is complete: {counted(dataset.attrs['counts'])}. overwrite=true writes it again"
            )
            return
        state = dataset.attrs.get("tokenizing")
        if not state or (state["made_by"], state["inputs"]) != (made_by, inputs):
            state = {"made_by": made_by, "inputs": inputs, "position": None, "splits": {}, "counts": {}}
            begin(config, files, dataset, state)
        counts = write(config, files, dataset, state)
        # One write turns what was going on into what is complete.
        attributes = {"tokenizer": dataset.attrs["tokenizer"], "made_by": made_by, "counts": counts}
        dataset.attrs.put(attributes)
        remove_partial_files(config.output)
    print_line(f"{config.output}: {counted(counts)}; flat_tokens.filespec={config.output} trains on it")
    print_line(f"model.vocab must be at least {dataset.attrs['tokenizer']['vocab']} (tokenizer {config.tokenizer})")


def begin(config: TokenizeText, files: list[File], dataset: zarr.Group, state: dict) -> None:
    """Refuses to write over what is there, makes the tokenizer, and records that nothing is written yet."""
    # A run that was killed in here leaves a tokenizer at most, which is no more than this one writes.
    present = [*(name for name in dataset.keys() if name != "tokenizer_json"), *(set(dataset.attrs) - {"tokenizer"})]
    if present and not config.overwrite:
        what = f"{', '.join(sorted(present))} already"
        if {"tokenizing", "made_by"} & set(dataset.attrs):
            what = "a data set, or its beginning, made with another config or from an input that has changed since"
        raise RunError(f"{config.output} holds {what}: write to a new path, or say overwrite=true to replace it")
    tokenizer = make_tokenizer(config, files)
    dataset.attrs.put({})
    for name in list(dataset.keys()):
        del dataset[name]
    save_dataset_tokenizer(dataset, tokenizer)
    dataset.attrs["tokenizing"] = state


def write(config: TokenizeText, files: list[File], dataset: zarr.Group, state: dict) -> dict:
    """Goes on from the state to the end of the files, recording it now and then; what was counted."""
    remove_partial_files(config.output)
    tokenizer, settings = load_dataset_tokenizer(config.output), config.settings
    begun = bool(state["splits"])
    writers = {
        split: SplitWriter(
            dataset,
            split,
            with_targets=config.format != "text",
            resume=state["splits"].get(split),
            overwrite=True,  # what a run wrote that was killed before its first record
        )
        for split in ("train", "validation")[: 1 + config.has_validation]
    }
    position, counts = state["position"], {"tokens": 0, "documents": 0, "empty": 0, "bad": 0, **state["counts"]}

    def record() -> None:
        splits = {split: writer.flush() for split, writer in writers.items()}
        dataset.attrs["tokenizing"] = {**state, "position": position, "splits": splits, "counts": counts}

    if not begun:
        record()
    recorded, bad_before = time.monotonic(), counts["bad"]
    total, blocks = total_bytes(files), read_all(files, settings, position or (0, 0, 0))
    with progress_bar(total) as bar, tokenized(blocks, tokenizer, settings, process_count(config, files)) as results:
        start, tokens_before = time.monotonic(), counts["tokens"]
        for block, result in results:
            if result.bad and config.on_bad_record == "fail":
                record()
                raise RunError(f"{result.bad[0]}; on_bad_record=skip leaves out such records")
            for reason in result.bad[: max(0, SHOWN_BAD_RECORDS - counts["bad"] + bad_before)]:
                bar.write(printable(f"left out: {reason}"), file=sys.stderr)
            for split, sequences in result.sequences.items():
                writers[split].append(sequences.ids, sequences.lengths, sequences.is_target)
                counts["tokens"] += len(sequences.ids)
                counts["documents"] += len(sequences.lengths)
            counts["empty"] += result.empty
            counts["bad"] += len(result.bad)
            position = block.position
            rate = (counts["tokens"] - tokens_before) / (time.monotonic() - start)
            bar.set_description_str(
                f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, {rate:,.0f} tokens/s", False
            )
            bar.update(min(block.done, total or block.done) - bar.n)
            if time.monotonic() - recorded > RECORD_S:
                record()
                recorded = time.monotonic()
    record()
    for split, writer in writers.items():
        if not writer.token_count:
            fix = (
                "give validation=..., a larger validation_fraction, or documents that are more and smaller "
                "(separator, document_bytes)"
            )
            raise RunError(
                f"no document came to the split '{split}' of {config.output} ({counted(counts)})"
                + (f": {fix}; and overwrite=true" if split == "validation" else "")
            )
        writer.finish(tokenizer.bos_id, {"tokenizer": tokenizer.name})
    return counts


def read_all(files: list[File], settings: Settings, position: Sequence[int]) -> Iterator[Block]:
    return read_blocks(files, position, lambda data: max(text_ends(data, settings, False), default=0))


@contextlib.contextmanager
def tokenized(
    blocks: Iterator[Block], tokenizer: Tokenizer, settings: Settings, processes: int
) -> Iterator[Iterator[tuple[Block, Tokenized]]]:
    """What becomes of the blocks, in their order, by so many processes; a few blocks for each are under way at once."""
    if processes == 1:
        yield ((block, tokenize(block, tokenizer, settings)) for block in blocks)
        return
    # A fork would copy the locks of threads that are not there in the copy.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, start_worker, (tokenizer, settings))

    def in_order() -> Iterator[tuple[Block, Tokenized]]:
        under_way = deque()
        for block in blocks:
            under_way.append((block, pool.submit(work_on, block)))
            if len(under_way) > 2 * processes:
                block, future = under_way.popleft()
                yield block, future.result()
        for block, future in under_way:
            yield block, future.result()

    try:
        yield in_order()
    except BrokenProcessPool as error:
        raise RunError(
            "a process that tokenizes died, of too little memory perhaps: say fewer processes=...; the same command "
            "goes on"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- what it begins with


def check(config: TokenizeText) -> None:
    """Refuses keys that do not go together."""
    if bool(config.input) == bool(config.hf_dataset.path):
        raise RunError("expected one of input (a path, glob or URL) and hf_dataset.path (the name of a data set)")
    if config.validation and config.hf_dataset.path:
        raise RunError(f"validation = {config.validation}: expected hf_dataset.validation_split, or neither")


def find_all(config: TokenizeText) -> list[File]:
    """What is read, in this order. A file that `validation` names too is none of the training split's."""
    rest = "" if config.settings.validation_fraction else "train"
    if path := config.hf_dataset.path:
        splits = find_splits(path, config.hf_dataset.name)
        files = []
        for key, split in (("split", rest), ("validation_split", "validation")):
            if name := getattr(config.hf_dataset, key):
                if name not in splits:
                    raise RunError(f"hf_dataset.{key}: {path} has no split '{name}'; it holds {', '.join(splits)}")
                files += [dataclasses.replace(file, split=split) for file in splits[name]]
        return files
    held_out = find_files(config.validation) if config.validation else []
    files = [dataclasses.replace(file, split=rest) for file in find_files(config.input) if file not in held_out]
    if not files:
        raise RunError(
            f"validation={config.validation} names all files of input={config.input}, so nothing is left to train on"
        )
    files += [dataclasses.replace(file, split="validation") for file in held_out]
    for file in files:
        if file.kind == "text" and config.format != "text":
            raise RunError(
                f"{file.name} is plain text by its suffix, but format={config.format} needs records: .jsonl or .parquet"
            )
    return files


def total_bytes(files: list[File]) -> int:
    """As stored; 0 where none is known."""
    return sum(file.size for file in files)


def make_tokenizer(config: TokenizeText, files: list[File]) -> Tokenizer:
    template = None
    if config.chat_template:
        try:
            template = pathlib.Path(config.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RunError(f"chat_template={config.chat_template} cannot be read ({error})") from error
    if config.tokenizer == TRAIN_BPE:
        tokenizer = dataclasses.replace(trained_tokenizer(config, files, template), chat_template=template or "")
        if config.bos_id is not None:
            tokenizer = dataclasses.replace(tokenizer, bos_id=config.bos_id)
    else:
        tokenizer = load_tokenizer(config.tokenizer, bos_id=config.bos_id, chat_template=template)
    if config.format == "chat" and not tokenizer.chat_template:
        raise RunError(f"the tokenizer {config.tokenizer} has no chat template: give one, chat_template=FILE of jinja")
    return tokenizer


def trained_tokenizer(config: TokenizeText, files: list[File], template: str | None) -> Tokenizer:
    """A byte-level BPE of the training documents: all of them, or of every so many-th block as many as bpe_bytes asks
    for."""
    files = [file for file in files if file.split != "validation"]
    stride = max(1, total_bytes(files) // config.bpe_bytes)
    some = files[:: min(stride, len(files))]
    every = max(1, stride // min(stride, len(files)))
    stand_in = load_tokenizer(BYTES, chat_template=template)  # for the chats' sake, which it renders
    count = 0

    def texts() -> Iterator[str]:
        nonlocal count
        for number, block in enumerate(read_all(some, config.settings, (0, 0, 0))):
            documents = read_documents(block, stand_in, config.settings)[0] if number % every == 0 else ()
            for document in documents:
                if config.settings.validation_fraction and drawn(document, config.settings):
                    continue
                if config.format == "chat":
                    parts = [message.get("content") or "" for message in document[0]]
                else:
                    parts = [part.decode() for part in document]
                for part in parts:
                    yield part
                    count += len(part)
            if count >= config.bpe_bytes:
                return

    tokenizer = train_bpe(texts(), config.bpe_vocab)
    if not count:
        raise RunError(f"{config.input or config.hf_dataset.path} holds no text that a tokenizer could be trained on")
    print_line(f"trained a byte-level BPE on {count:,} characters: {tokenizer.vocab} ids")
    return tokenizer


def process_count(config: TokenizeText, files: list[File]) -> int:
    """As configured; else one for each core, where it pays to start them."""
    small = 0 < total_bytes(files) < 8 * 2**20
    # Bytes are made sooner than they are sent to another process.
    return config.processes or (1 if small or config.tokenizer == BYTES else len(os.sched_getaffinity(0)))


# ---------------------------------------------------------------- the output


@contextlib.contextmanager
def alone_in(path: str) -> Iterator[None]:
    """Refuses a local data set that another process is writing; elsewhere nothing can tell."""
    if "://" in path:
        yield
        return
    descriptor = os.open(absolute_path(path), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
        yield
    except BlockingIOError as error:
        raise RunError(f"{path} is being written by another process: wait for it, or write to another path") from error
    finally:
        os.close(descriptor)


def remove_partial_files(path: str) -> None:
    """Removes what zarr had begun to write when a run was killed."""
    if "://" not in path:
        for partial in pathlib.Path(absolute_path(path)).rglob("*.partial"):
            partial.unlink()


@contextlib.contextmanager
def failing_writes(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from error


# ---------------------------------------------------------------- what is said


def progress_bar(total: int) -> tqdm:
    return tqdm(
        total=total or None,
        file=sys.stderr,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
        bar_format="{percentage:3.0f}%|{bar:20}| {desc} [{elapsed}<{remaining}]" if total else "{desc} [{elapsed}]",
    )


def counted(counts: dict) -> str:
    text = f"{counts['documents']:,} documents, {counts['tokens']:,} tokens"
    if counts["empty"]:
        text += f"; {counts['empty']:,} empty documents left out"
    if counts["bad"]:
        text += f"; {counts['bad']:,} bad records left out"
    return text


if __name__ == "__main__":
    keep_memory()  # of one block for the next: 111 in place of 95 MB of text a second
    command_line.run(main, TokenizeText)
