"""From a block of text to token ids: what a process of tools.tokenize_text does, again and again."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Interval

from runtime.config.keys import Decay, Steps
from runtime.data.documents import BadRecord, Block, decoded, place, records, values
from runtime.data.flat_tokens import LARGEST_ID
from runtime.data.tokenizers import ChatError, Tokenizer, plain_exceptions

Id = Annotated[int, Interval(ge=0, le=LARGEST_ID), f"an id from 0 to {LARGEST_ID}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubDataset:
    path: str = ""  # in place of input: a data set's name on the Hugging Face hub, or its folder
    name: str = ""  # its configuration, where it has several
    split: str = "train"  # of it, that is tokenized
    validation_split: str = ""  # becomes `validation`


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeText:
    # A path, a glob such as 'corpus/*.jsonl.zst', or a URL that fsspec knows; or else hf_dataset. The suffix says how
    # it is read: .jsonl (.ndjson, .json), .parquet, all others text; .gz, .bz2 and .zst are unpacked.
    input: str = ""
    hf_dataset: HubDataset = dataclasses.field(default_factory=HubDataset)
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
    separator: str = ""
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
    def fields(self) -> tuple[str, ...]:
        """Of a record: the text; or the prompt and the answer; or the messages."""
        fields = {"text": (self.text_field,), "prompt": (self.in_field, self.out_field)}
        return fields.get(self.format, (self.messages_field,))

    @property
    def drawn_fraction(self) -> float:
        """Of the documents, that becomes the validation split by their hash."""
        return 0.0 if self.validation or self.hf_dataset.validation_split else self.validation_fraction

    @property
    def separator_bytes(self) -> bytes:
        return self.separator.replace("\\n", "\n").encode()  # as a command line gives a new line


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

_worker: list[Any] = []  # the tokenizer and the config of a process of a pool


def start_worker(tokenizer: Tokenizer, config: TokenizeText) -> None:
    """Prepares a process of a pool for work_on."""
    _worker[:] = tokenizer, config
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    # Of itself a pool's worker would wait forever for a parent that was killed.
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def work_on(block: Block) -> Tokenized:
    return tokenize(block, *_worker)


# ---------------------------------------------------------------- a block


def tokenize(block: Block, tokenizer: Tokenizer, config: TokenizeText) -> Tokenized:
    """The token ids of a block's documents, in their order, for the split that the file says or else for each by the
    documents' hash; and the records that cannot be taken."""
    documents, bad = read_documents(block, tokenizer, config)
    by_split = {block.file.split or "train": documents}
    if not block.file.split and config.drawn_fraction:
        by_split = {"train": [], "validation": []}
        for document in documents:
            by_split["validation" if drawn(document, config) else "train"].append(document)
    sequences, empty = {}, 0
    for name, some in by_split.items():
        if some:
            found = encoded(some, block.file.name, tokenizer, config)
            lengths = found.lengths[found.lengths > 0]
            sequences[name] = dataclasses.replace(found, lengths=lengths)
            empty += len(some) - len(lengths)
    return Tokenized(sequences, empty, bad)


def encoded(documents: list[tuple], source: str, tokenizer: Tokenizer, config: TokenizeText) -> Sequences:
    """The ids of documents, which are from `source`, and the lengths of all, 0 for one without a token."""
    if config.format == "chat":
        ids, is_target = (np.concatenate([document[part] for document in documents]) for part in (1, 2))
        return Sequences(ids, np.array([len(ids) for _, ids, _ in documents]), is_target)
    with plain_exceptions(f"the tokenizer {tokenizer.name} does not take the text of {source} ({{}})"):
        ids, lengths = tokenizer.encode_flat([part for document in documents for part in document])
    if config.format == "prompt":
        return Sequences(ids, lengths.reshape(-1, 2).sum(axis=1), np.repeat(np.arange(len(lengths)) % 2 == 1, lengths))
    return Sequences(ids, lengths, None)


def drawn(document: tuple, config: TokenizeText) -> bool:
    """Whether a document belongs to the validation split: by its own text and the seed alone, wherever it stands."""
    chat = config.format == "chat"
    text = json.dumps(document[0], sort_keys=True).encode() if chat else b"\0".join(document)
    digest = hashlib.sha256(config.seed.to_bytes(8, "little") + text).digest()  # processors have instructions for it
    return int.from_bytes(digest[:8], "little") < config.drawn_fraction * 2**64


def read_documents(block: Block, tokenizer: Tokenizer, config: TokenizeText) -> tuple[list[tuple], list[str]]:
    """A block's documents, and of its other records where they are and what is wrong.

    A document is a text; a prompt and an answer; or the messages of a chat, their ids and which of these are targets.
    Its texts are in UTF-8, as they are in a file, so that bytes become ids without being decoded and encoded.
    """
    if not block.content and not block.rows:
        return [], [f"{block.file.name}: the file is empty"]
    documents: list[tuple] = []
    bad: list[str] = []
    if block.file.kind == "text":
        separator = config.separator_bytes
        ends = text_ends(block.content, separator, config.document_bytes, final=True)
        for start, end in zip([0, *ends], ends):
            text = block.content[start:end].removesuffix(separator)
            try:
                decoded(text)
                documents.append((text,))
            except BadRecord as error:
                line = block.first + block.content.count(b"\n", 0, start) + error.lines
                bad.append(f"{place(block, line)}: {error}")
        return documents, bad
    for number, record in records(block):
        try:
            if config.format == "chat":
                (messages,) = values(record, config.fields, object)
                documents.append((messages, *tokenizer.encode_chat(messages)))
                continue
            texts = tuple(value.encode() for value in values(record, config.fields))
            if config.format == "prompt" and not texts[1]:
                raise BadRecord(f"field '{config.fields[1]}' is empty, so there is nothing to learn")
            documents.append(texts)
        except UnicodeEncodeError as error:
            bad.append(f"{place(block, number)}: half of a surrogate pair ({error.reason}), expected Unicode text")
        except (BadRecord, ChatError) as error:
            bad.append(f"{place(block, number)}: {error}")
    return documents, bad


def text_ends(data: bytes, separator: bytes, size: int, *, final: bool) -> list[int]:
    """Where the documents of a text end that begins with one. `final`: nothing follows the data, so its rest is one
    too.

    A document goes up to and with a separator. Without one it goes to the end of the line in which it becomes `size`
    bytes long; if that is more than as long again, it ends between two characters.
    """
    ends, start = [], 0
    while True:
        if separator:
            found = data.find(separator, start)
            end = found + len(separator)
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
