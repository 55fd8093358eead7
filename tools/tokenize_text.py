"""Writes your own text as a flat-tokens data set: files or a Hugging Face data set in, token ids out.

    python -m tools.tokenize_text input=corpus.txt output=corpus.zarr validation_fraction=0.1
    python -m tools.tokenize_text input='web/*.jsonl.zst' output=web.zarr tokenizer=openai-community/gpt2
    python -m tools.tokenize_text input=qa.jsonl format=prompt output=qa.zarr tokenizer=train_bpe bpe_vocab=8192
    python -m tools.tokenize_text hf_dataset.path=roneneldan/TinyStories output=stories.zarr

This process reads blocks of text in order, others turn them into ids, and this one writes these in the same order.
Every few seconds it records how far it is in the data set itself. Killed at any moment, the same command goes on from
there, and ends with the same bytes: what is written is a function of the text alone.

docs/data.md says how much text a core takes in a second.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import select
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import zarr

from runtime.config import command_line
from runtime.data.documents import Block, File, find_files, find_splits, read_blocks
from runtime.data.flat_tokens import absolute_path
from runtime.data.split_writer import SplitWriter, open_for_writing
from runtime.data.tokenizers import (
    BYTES,
    CHATML,
    Tokenizer,
    load_dataset_tokenizer,
    load_tokenizer,
    save_dataset_tokenizer,
    tokenizer_identity,
    train_bpe,
)
from runtime.files import flat, read_text
from runtime.terminal import RunError, print_line, printable, progress, run_errors
from tools.text_records import (
    Tokenized,
    TokenizeText,
    drawn,
    read_documents,
    start_worker,
    text_ends,
    tokenize,
    work_on,
)
from tools.whole_rows import PACKED_TOKENS, Sequences, in_rows, joined

RECORD_S = 15.0  # seconds between records of the progress: a killed run repeats at most as much
READ_RECORD_S = 0.5  # where another process reads up to the record
SHOWN_BAD_RECORDS = 10
TRAIN_BPE = "train_bpe"
BPE_BYTES = 100_000_000  # bytes of text that a tokenizer is trained on, taken evenly from all the input


# ---------------------------------------------------------------- from beginning to end


def main(config: TokenizeText) -> None:
    if bool(config.input) == bool(config.hf_dataset.path):
        raise RunError("expected one of input (a path, glob or URL) and hf_dataset.path (the name of a data set)")
    if config.validation and config.hf_dataset.path:
        raise RunError(f"validation = {config.validation}: expected hf_dataset.validation_split, or neither")
    files = find_all(config)
    # A run goes on where another stopped if these are the same. The number of processes makes no difference.
    about = json.loads(printable(json.dumps(dataclasses.asdict(config))))  # without the password of a URL
    for key in ("output", "overwrite", "on_bad_record", "processes", "tokens_ahead"):
        del about[key]
    made_by = {"tool": "tools/tokenize_text.py", "config": about, "input_size": total_bytes(files)}
    known = [(file.name, file.size, file.version, file.split) for file in files]
    made_by["inputs"] = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    # A file under the same name may hold another; one that is trained follows from all the rest.
    template, tokenizer = None, None
    if config.chat_template:
        with run_errors(f"chat_template={config.chat_template} cannot be read", ValueError):
            template = read_text(os.path.expanduser(config.chat_template))
    if config.tokenizer != TRAIN_BPE:
        tokenizer = load_tokenizer(config.tokenizer, bos_id=config.bos_id, chat_template=template)
    made_by["tokenizer"] = template if tokenizer is None else tokenizer_identity(tokenizer)

    open_for_writing(config.output)  # the folder must be there for alone_in
    with alone_in(config.output), run_errors(f"cannot write {config.output}"):
        dataset = open_for_writing(config.output)
        there: dict[str, Any] = dataset.attrs.asdict()
        if there.get("made_by") == made_by and not config.overwrite:
            print_line(f"{config.output} is complete: {counted(there['counts'])}. overwrite=true writes it again")
            return
        state = there.get("tokenizing")
        if not state or state["made_by"] != made_by or config.overwrite:
            refuse_what_is_there(config, dataset, made_by)
            state = {"made_by": made_by, "position": None, "splits": {}, "counts": {}}
            begin(dataset, as_written(tokenizer or trained_tokenizer(config, files, template), config), state)
        tokenizer = load_dataset_tokenizer(config.output)
        assert tokenizer is not None  # begin() put it there
        counts = write(config, files, dataset, tokenizer, state)
        # One write turns what was going on into what is complete.
        dataset.attrs.put({"tokenizer": dataset.attrs["tokenizer"], "made_by": made_by, "counts": counts})
    is_whole = "validation" in dataset
    use = f"flat_tokens.filespec={config.output} trains on it" if is_whole else "a run needs a split validation too"
    print_line(f"{config.output}: {counted(counts)}; {use}")
    print_line(f"model.vocab must be at least {tokenizer.vocab} (tokenizer {config.tokenizer})")


def refuse_what_is_there(config: TokenizeText, dataset: zarr.Group, made_by: dict) -> None:
    """Raises RunError if a data set would be overwritten, and says in what its making differs."""
    there: Any = dataset.attrs.asdict()
    state = there.get("tokenizing", {})
    # A run that was killed in begin() leaves a tokenizer at most, which is no more than this one writes.
    present = {*dataset.keys()} - {"tokenizer_json"} | there.keys() - {"tokenizer"}
    # Without a position the first record was refused, or the command was killed: no document is written yet.
    if config.overwrite or not present or (state and state["position"] is None):
        return
    what = f"{', '.join(sorted(present))} already"
    if made := there.get("made_by") or state.get("made_by"):
        before, now = flat(made), flat(made_by)
        others = {key.removeprefix("config.") for key in before.keys() | now if before.get(key) != now.get(key)}
        names = {"inputs": "input (name, size or time)", "tokenizer": "content of tokenizer or chat_template"}
        said = ", ".join(sorted(names.get(key, key) for key in others - {"input_size"}))
        what = f"a data set, or its beginning, that was made with another {said}"
    fix = "write to a new path, or say overwrite=true to replace it"
    if config.tokens_ahead is not None:
        fix = "put the text back as it was, or delete this folder, so that the run writes it anew"
    raise RunError(f"{config.output} holds {what}: {fix}")


def begin(dataset: zarr.Group, tokenizer: Tokenizer, state: dict) -> None:
    """Empties the data set, and records its tokenizer and that nothing is written yet."""
    dataset.attrs.put({})
    for name in list(dataset.keys()):
        del dataset[name]
    save_dataset_tokenizer(dataset, tokenizer)
    dataset.attrs["tokenizing"] = state


def write(config: TokenizeText, files: list[File], dataset: zarr.Group, tokenizer: Tokenizer, state: dict) -> dict:
    """Continues from the state to the end of the files, recording it now and then. Returns what was counted."""
    remove_partial_files(config.output)
    output, reader = Output(config, dataset, state), Reader(config.tokens_ahead)
    start, before = time.monotonic(), dict(output.counts)
    total, blocks = total_bytes(files), read_all(files, config, output.position or (0, 0, 0))
    bar = progress(total=total or None, unit=" bytes", unit_scale=True)
    results = tokenized(blocks, tokenizer, config, process_count(config, files))
    with bar, contextlib.closing(results):
        for block, result in results:
            if result.bad and config.on_bad_record == "fail":
                output.record()
                fix = "; on_bad_record=skip leaves out such records"
                if config.tokens_ahead is not None:
                    fix = ": mend it, or set hf_dataset.text_field to the field that holds the text"
                raise RunError(result.bad[0] + fix)
            for reason in result.bad[: max(0, SHOWN_BAD_RECORDS - output.counts["bad"] + before["bad"])]:
                bar.write(printable(f"left out: {reason}"), file=sys.stderr)
            output.add(block.position, result)
            rate = (output.counts["tokens"] - before["tokens"]) / (time.monotonic() - start)
            bar.set_description(f"{counted(output.counts)}, {rate:,.0f} tokens/s", False)
            bar.update(min(block.done, total or block.done) - bar.n)
            if output.tokens >= reader.wanted or time.monotonic() - output.recorded > reader.record_s:
                output.record()
            reader.wait(output.tokens)
    output.finish(tokenizer)
    return output.counts


class Output:
    """The splits being written, and how far they are: the position in the text, and the counts up to it."""

    def __init__(self, config: TokenizeText, dataset: zarr.Group, state: dict):
        has_validation = config.validation or config.hf_dataset.validation_split or config.validation_fraction
        self._config, self._dataset, self._state = config, dataset, state
        self._writers = {
            split: SplitWriter(dataset, split, targets=config.targets, resume=state["splits"].get(split))
            for split in ("train", "validation")[: 1 + bool(has_validation)]
        }
        self._waiting: dict[str, list[Sequences]] = {split: [] for split in self._writers}
        names = "tokens", "documents", "padding", "empty", "too_long", "bad"
        self.position, self.counts = state["position"], {**dict.fromkeys(names, 0), **state["counts"]}
        self.recorded = time.monotonic()
        if not state["splits"]:
            self.record()

    @property
    def tokens(self) -> int:
        return self._writers["train"].token_count

    def add(self, position: Sequence[int], result: Tokenized) -> None:
        """Takes in the block of text that ends at the position."""
        self.position = position
        for name, number in {**result.counts, "bad": len(result.bad)}.items():
            self.counts[name] += number
        for split, sequences in result.sequences.items():
            self._waiting[split].append(sequences)
        # Many are put into rows at once, and the same ones however often a run was killed.
        waiting = sum(len(part.ids) for parts in self._waiting.values() for part in parts)
        if not self._config.room or waiting >= PACKED_TOKENS:
            self._write_waiting()

    def record(self) -> None:
        """Records how far the splits are, unless sequences wait: these are counted, but not written."""
        if not any(self._waiting.values()):
            reached = {"position": self.position, "counts": self.counts}
            splits = {split: writer.flush() for split, writer in self._writers.items()}
            self._dataset.attrs["tokenizing"] = {**self._state, **reached, "splits": splits}
            self.recorded = time.monotonic()

    def finish(self, tokenizer: Tokenizer) -> None:
        """Completes the splits. Raises RunError: one has no document."""
        self._write_waiting()
        self.record()
        rows = {name: value for name in ("row_length", "read_length") if (value := getattr(self._config, name))}
        for split, writer in self._writers.items():
            if not writer.token_count:
                what = f"no document came to the split '{split}' of {self._config.output} ({counted(self.counts)})"
                fix = "validation=..., a larger" if split == "validation" else "a smaller"
                fix += " validation_fraction, or more and smaller documents (separator, document_bytes)"
                raise RunError(f"{what}: give {fix}; and overwrite=true")
            writer.finish(tokenizer.bos_id, {"tokenizer": tokenizer.name, **rows})

    def _write_waiting(self) -> None:
        for split, waiting in self._waiting.items():
            if waiting:
                sequences = joined(waiting)
                if self._config.room:
                    self.counts["padding"] -= len(sequences.ids)
                    sequences = in_rows(sequences, self._config.room)
                    self.counts["padding"] += len(sequences.ids)
                self._writers[split].append(sequences.ids, sequences.lengths, sequences.weight)
                waiting.clear()


def read_all(files: list[File], config: TokenizeText, position: Sequence[int]) -> Iterator[Block]:
    separator, size = config.separator_bytes, config.document_bytes
    return read_blocks(files, position, lambda data: max(text_ends(data, separator, size, final=False), default=0))


def tokenized(
    blocks: Iterator[Block], tokenizer: Tokenizer, config: TokenizeText, processes: int
) -> Generator[tuple[Block, Tokenized], None, None]:
    """The tokenized blocks in their order, made by so many processes, which end when it is closed; each has a few
    blocks under way at once."""
    if processes == 1:
        yield from ((block, tokenize(block, tokenizer, config)) for block in blocks)
        return
    # A fork would copy the locks of threads that are not there in the copy.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, start_worker, (tokenizer, config))
    under_way: deque[tuple[Block, Future[Tokenized]]] = deque()
    try:
        for block in blocks:
            under_way.append((block, pool.submit(work_on, block)))
            if len(under_way) > 2 * processes:
                block, future = under_way.popleft()
                yield block, future.result()
        for block, future in under_way:
            yield block, future.result()
    except BrokenProcessPool as error:
        why = "perhaps of too little memory: run it again, which continues, with fewer processes=..."
        raise RunError(f"a tokenizing process died, {why}") from error
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- what it begins with


def find_all(config: TokenizeText) -> list[File]:
    """The files to read, in this order. One that `validation` names too is not part of the training split."""
    rest = "" if config.drawn_fraction else "train"
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
        raise RunError(f"validation={config.validation} names all of input={config.input}: nothing is left to train on")
    files += [dataclasses.replace(file, split="validation") for file in held_out]
    for file in files:
        if file.kind == "text" and config.format != "text":
            raise RunError(f"{file.name} is plain text, but format={config.format} needs records: .jsonl or .parquet")
        if file.kind == "text" and config.end and not config.separator:
            raise RunError(f"{file.name} is cut by size, not where a document ends: end={config.end} needs a separator")
    return files


def total_bytes(files: list[File]) -> int:
    """The files' stored size; 0 where none is known."""
    return sum(file.size for file in files)


def as_written(tokenizer: Tokenizer, config: TokenizeText) -> Tokenizer:
    """The tokenizer with what the documents have: a chat template; `end`, if it is a special token, as the one that
    ends a text; and in pairs nothing but `end` around what an encoder reads."""
    if tokenizer.json:
        added = tokenizer.backend.get_added_tokens_decoder().values()
        if config.end in [token.content for token in added]:
            special = {**tokenizer.special_tokens, "eos_token": config.end}
            tokenizer = dataclasses.replace(tokenizer, special_tokens=special)
        end = tokenizer.encode_batch([config.end])[0].tolist()
        if config.format == "pairs" and tokenizer.backend.encode("", add_special_tokens=True).ids != end:
            tokenizer = dataclasses.replace(tokenizer, json=ending(tokenizer, end))
    if config.format == "chat" and not tokenizer.chat_template:
        print_line(f"the tokenizer {config.tokenizer} has no chat template: chats are written as ChatML")
        tokenizer = dataclasses.replace(tokenizer, chat_template=CHATML)
    return tokenizer


def ending(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The tokenizer's json with these ids behind each text, as T5's has one."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors

    backend = Backend.from_str(tokenizer.json)
    end: Any = {"id": "END", "ids": ids, "tokens": list(map(backend.id_to_token, ids))}
    backend.post_processor = processors.TemplateProcessing("$A END" if ids else "$A", special_tokens=[end])
    return backend.to_str()


def trained_tokenizer(config: TokenizeText, files: list[File], template: str | None) -> Tokenizer:
    """A byte-level BPE of the training documents: all of them, or BPE_BYTES of every so many-th block."""
    files = [file for file in files if file.split != "validation"]
    stride = max(1, total_bytes(files) // BPE_BYTES)
    stand_in = load_tokenizer(BYTES, chat_template=template or CHATML)  # for the chats' sake, which it renders
    count = 0

    def texts() -> Iterator[str]:
        nonlocal count
        for block in itertools.islice(read_all(files, config, (0, 0, 0)), 0, None, stride):
            for document in read_documents(block, stand_in, config)[0]:
                if drawn(document, config):
                    continue
                parts = [text.decode() for text in document.texts]
                if config.format == "chat":
                    parts = [message.get("content") or "" for message in json.loads(parts[0])]
                yield from parts
                count += sum(map(len, parts))
            if count >= BPE_BYTES:
                return

    tokenizer = train_bpe(texts(), config.bpe_vocab)
    if not count:
        raise RunError(f"{config.input or config.hf_dataset.path} holds no text that a tokenizer could be trained on")
    print_line(f"trained a byte-level BPE on {count:,} characters: {tokenizer.vocab} ids")
    bos_id = tokenizer.bos_id if config.bos_id is None else config.bos_id
    return dataclasses.replace(tokenizer, bos_id=bos_id, chat_template=template or "")


def process_count(config: TokenizeText, files: list[File]) -> int:
    """The configured number; else one process for each core, where starting them pays."""
    small = 0 < total_bytes(files) < 8 * 2**20
    cores = len(os.sched_getaffinity(0))
    if config.tokens_ahead is not None:  # the others are the run's
        cores = max(1, cores // 2)
    # Making bytes takes less time than sending them to another process.
    return config.processes or (1 if small or config.tokenizer == BYTES else cores)


class Reader:
    """The reader of the data set: with `ahead`, a run that says on standard input how many tokens it wants; else
    nobody, and all tokens may be written at once."""

    def __init__(self, ahead: int | None):
        self.ahead = ahead
        self.wanted: float = math.inf if ahead is None else ahead  # tokens that may be written
        self.record_s = RECORD_S if ahead is None else READ_RECORD_S
        if ahead is not None:
            os.nice(10)  # training first

    def wait(self, count: int) -> None:
        """Returns when more than `count` tokens are wanted. Ends this process when the reader has ended."""
        while self.ahead is not None and (count >= self.wanted or select.select([0], [], [], 0)[0]):
            # Unbuffered, since select does not see what a buffer holds.
            with open(0, "rb", buffering=0, closefd=False) as lines:
                line = lines.readline()
            if not line:
                sys.exit(0)
            self.wanted = max(self.wanted, int(line) + self.ahead)


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


# ---------------------------------------------------------------- what is said


def counted(counts: dict) -> str:
    about = {
        "padding": f"of padding ({counts['padding'] / max(1, counts['padding'] + counts['tokens']):.1%})",
        "empty": "empty documents left out",
        "too_long": "documents longer than a row cut or left out",
        "bad": "bad records left out",
    }
    texts = [f"; {counts[key]:,} {what}" for key, what in about.items() if counts[key]]
    return f"{counts['documents']:,} documents, {counts['tokens']:,} tokens{''.join(texts)}"


if __name__ == "__main__":
    command_line.run(main, TokenizeText)
