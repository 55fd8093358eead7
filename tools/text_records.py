"""From a block of text to token ids: what a process of tools.tokenize_text does, again and again."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import threading

import numpy as np

from runtime.data.tokenizers import ChatError, Tokenizer, plain_exceptions
from tools.text_sources import Block, Settings, text_ends


@dataclasses.dataclass(frozen=True)
class Sequences:
    ids: np.ndarray  # uint32, of all sequences one after another
    lengths: np.ndarray  # int64
    is_target: np.ndarray | None  # bool; None: all are targets


@dataclasses.dataclass(frozen=True)
class Tokenized:
    sequences: dict[str, Sequences]  # by split
    empty: int  # documents without a token, which are left out
    bad: list[str]  # records that cannot be taken: where and why


class BadRecord(ValueError):
    """Why a record cannot be taken; lines: how many of its own lie before the place."""

    def __init__(self, reason: str, lines: int = 0):
        super().__init__(reason)
        self.lines = lines


# ---------------------------------------------------------------- processes

_worker: tuple[Tokenizer, Settings] | None = None


def start_worker(tokenizer: Tokenizer, settings: Settings) -> None:
    """Prepares a process of a pool for work_on."""
    global _worker
    _worker = tokenizer, settings
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    # Of itself a pool's worker would wait forever for a parent that was killed.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def work_on(block: Block) -> Tokenized:
    return tokenize(block, *_worker)


# ---------------------------------------------------------------- a block


def tokenize(block: Block, tokenizer: Tokenizer, settings: Settings) -> Tokenized:
    """The token ids of a block's documents, for each split in their order, and the records that are none."""
    documents, bad = read_documents(block, tokenizer, settings)
    by_split = {"train": documents, "validation": []}
    if block.split:
        by_split = {block.split: documents}
    elif settings.validation_fraction:
        by_split = {"train": [], "validation": []}
        for document in documents:
            by_split["validation" if drawn(document, settings) else "train"].append(document)
    sequences, empty = {}, 0
    for split, some in by_split.items():
        if some:
            found = encoded(some, block.source, tokenizer, settings)
            lengths = found.lengths[found.lengths > 0]
            sequences[split] = dataclasses.replace(found, lengths=lengths)
            empty += len(some) - len(lengths)
    return Tokenized(sequences, empty, bad)


def encoded(documents: list[tuple], source: str, tokenizer: Tokenizer, settings: Settings) -> Sequences:
    """The ids of documents, which are from `source`, and the lengths of all, 0 for one without a token."""
    if settings.format == "chat":
        ids, is_target = (np.concatenate([document[part] for document in documents]) for part in (1, 2))
        return Sequences(ids, np.array([len(ids) for _, ids, _ in documents]), is_target)
    with plain_exceptions(f"the tokenizer {tokenizer.name} does not take the text of {source} ({{}})"):
        ids, lengths = tokenizer.encode_flat([part for document in documents for part in document])
    if settings.format == "prompt":
        return Sequences(ids, lengths.reshape(-1, 2).sum(axis=1), np.repeat(np.arange(len(lengths)) % 2 == 1, lengths))
    return Sequences(ids, lengths, None)


def drawn(document: tuple, settings: Settings) -> bool:
    """Whether a document belongs to the validation split: by its own text and the seed alone, wherever it stands."""
    chat = settings.format == "chat"
    text = json.dumps(document[0], sort_keys=True).encode() if chat else b"\0".join(document)
    digest = hashlib.sha256(settings.seed.to_bytes(8, "little") + text).digest()  # processors have instructions for it
    return int.from_bytes(digest[:8], "little") < settings.validation_fraction * 2**64


def read_documents(block: Block, tokenizer: Tokenizer, settings: Settings) -> tuple[list[tuple], list[str]]:
    """A block's documents, and of its other records where they are and what is wrong.

    A document is a text; a prompt and an answer; or the messages of a chat, their ids and which of these are targets.
    Its texts are in UTF-8, as they are in a file, so that bytes become ids without being decoded and encoded.
    """
    if not block.content:
        return [], [f"{block.source}: the file is empty"]
    if block.kind == "rows":
        items = block.content
    elif block.kind == "lines":
        items = block.content.split(b"\n")
    else:
        ends = text_ends(block.content, settings, final=True)
        items = [block.content[start:end] for start, end in zip([0, *ends], ends)]
    documents, bad = [], []
    for number, item in enumerate(items):
        try:
            if block.kind == "text":
                text = item.removesuffix(settings.separator)
                _decoded(text)  # it must be UTF-8
                documents.append((text,))
            elif item or block.kind == "rows":  # no empty line
                record = _record(item) if block.kind == "lines" else item
                values = _values(record, settings)
                documents.append(
                    (values[0], *tokenizer.encode_chat(values[0])) if settings.format == "chat" else values
                )
        except UnicodeEncodeError as error:
            bad.append(
                f"{_place(block, items, number)}: half of a surrogate pair ({error.reason}), expected Unicode text"
            )
        except BadRecord as error:
            bad.append(f"{_place(block, items, number, error.lines)}: {error}")
        except ChatError as error:
            bad.append(f"{_place(block, items, number)}: {error}")
    return documents, bad


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.rfind(b"\n", 0, error.start) + 1
        byte = f"byte 0x{data[error.start]:02x} at {error.start - line} of the line"
        raise BadRecord(f"invalid UTF-8 ({byte})", data.count(b"\n", 0, error.start)) from error


def _record(line: bytes) -> dict:
    try:
        record = json.loads(_decoded(line))
    except json.JSONDecodeError as error:
        raise BadRecord(f"no JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise BadRecord("no JSON that can be read (nested too deeply)") from error
    if not isinstance(record, dict):
        raise BadRecord(f'{type(record).__name__}, expected {{"field": ...}}')
    return record


def _values(record: dict, settings: Settings) -> tuple:
    """The fields that settings name: texts in UTF-8, or the messages of a chat."""
    values = []
    for field in settings.fields:
        if field not in record:
            raise BadRecord(f"no field '{field}'; it has {', '.join(map(repr, record)) or 'none'}")
        value = record[field]
        if settings.format != "chat":
            if not isinstance(value, str):
                raise BadRecord(f"field '{field}' is {type(value).__name__}, expected text")
            value = value.encode()  # half of a surrogate pair cannot be
        values.append(value)
    if settings.format == "prompt" and not values[1]:
        raise BadRecord(f"field '{settings.fields[1]}' is empty, so there is nothing to learn")
    return tuple(values)


def _place(block: Block, items: list, number: int, lines: int = 0) -> str:
    """Where an item of the block is; lines: how many of its own are passed over."""
    if block.kind == "rows":
        return f"{block.source}, row {block.first + number}"
    before = number if block.kind == "lines" else sum(item.count(b"\n") for item in items[:number])
    return f"{block.source}:{block.first + before + lines}"
