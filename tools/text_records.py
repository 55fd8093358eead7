"""From a block of text to token ids: what a process of tools.tokenize_text does, again and again."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import threading

import numpy as np

from runtime.data.documents import BadRecord, Block, decoded, place, records, values
from runtime.data.tokenizers import ChatError, Tokenizer, plain_exceptions


@dataclasses.dataclass(frozen=True)
class Settings:
    """How records are told apart and what is taken of them."""

    format: str  # text, prompt or chat
    fields: tuple[str, ...]  # of a record: the text; or the prompt and the answer; or the messages
    separator: bytes  # stands between the documents of a text file; empty: they are cut by size
    document_bytes: int  # about so long is a document that is cut by size
    validation_fraction: float
    seed: int


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
    """The token ids of a block's documents, in their order, for the split that the file says or else for each by the
    documents' hash; and the records that cannot be taken."""
    documents, bad = read_documents(block, tokenizer, settings)
    by_split = {block.file.split or "train": documents}
    if not block.file.split and settings.validation_fraction:
        by_split = {"train": [], "validation": []}
        for document in documents:
            by_split["validation" if drawn(document, settings) else "train"].append(document)
    sequences, empty = {}, 0
    for name, some in by_split.items():
        if some:
            found = encoded(some, block.file.name, tokenizer, settings)
            lengths = found.lengths[found.lengths > 0]
            sequences[name] = dataclasses.replace(found, lengths=lengths)
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
        return [], [f"{block.file.name}: the file is empty"]
    if block.file.kind == "text":
        ends = text_ends(block.content, settings, final=True)
        found = [(start, block.content[start:end]) for start, end in zip([0, *ends], ends)]
    else:
        found = records(block)
    documents, bad = [], []
    for number, record in found:
        try:
            if block.file.kind == "text":
                text = record.removesuffix(settings.separator)
                decoded(text)
                documents.append((text,))
            elif settings.format == "chat":
                (messages,) = values(record, settings.fields, object)
                documents.append((messages, *tokenizer.encode_chat(messages)))
            else:
                texts = tuple(value.encode() for value in values(record, settings.fields))
                if settings.format == "prompt" and not texts[1]:
                    raise BadRecord(f"field '{settings.fields[1]}' is empty, so there is nothing to learn")
                documents.append(texts)
        except UnicodeEncodeError as error:
            bad.append(f"{place(block, number)}: half of a surrogate pair ({error.reason}), expected Unicode text")
        except BadRecord as error:
            if block.file.kind == "text":  # numbered by where it begins
                number = block.first + block.content.count(b"\n", 0, number)
            bad.append(f"{place(block, number + error.lines)}: {error}")
        except ChatError as error:
            bad.append(f"{place(block, number)}: {error}")
    return documents, bad


def text_ends(data: bytes, settings: Settings, final: bool) -> list[int]:
    """Where the documents of a text end that begins with one. `final`: nothing follows the data, so its rest is one
    too.

    A document goes up to and with a separator. Without one it goes to the end of the line in which it becomes
    document_bytes long; if that is more than as long again, it ends between two characters.
    """
    ends, start, size = [], 0, settings.document_bytes
    while True:
        if settings.separator:
            found = data.find(settings.separator, start)
            end = found + len(settings.separator)
        elif not final and len(data) < start + 2 * size:  # where it ends depends on what follows
            break
        else:
            found = data.find(b"\n", start + size - 1, start + 2 * size)
            end = found + 1
            if found < 0 and len(data) > start + size:
                end = start + size
                while end > start + size - 3 and data[end] & 0xC0 == 0x80:  # within a character
                    end -= 1
                found = end
        if found < 0:
            break
        ends.append(end)
        start = end
    if final and start < len(data):
        ends.append(len(data))
    return ends
