"""Turns a block of text into token ids, as the processes of tools.tokenize_text do again and again."""

import collections
import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Interval

from runtime.config.keys import Decay, Steps
from runtime.data.documents import BadRecord, Block, decoded, parsed, place, records, values
from runtime.data.flat_tokens import LARGEST_ID, TARGETS
from runtime.data.tokenizers import ChatError, PlainExceptions, Tokenizer
from tools.whole_rows import Sequences

LARGEST_WEIGHT = 1_000_000
PAIR = ("in_text", "out_text")
FIELDS = {"text": ("text",), "prompt": PAIR, "pairs": PAIR, "chat": ("messages",), "segments": ("segments",)}
Id = Annotated[int, Interval(ge=0, le=LARGEST_ID), f"an id from 0 to {LARGEST_ID}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubDataset:
    path: str = ""  # in place of input: a data set's name on the Hugging Face hub, or its folder
    name: str = ""  # its configuration, where it has several
    split: str = "train"  # its split that is tokenized
    validation_split: str = ""  # becomes `validation`


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeText:
    # A path, a glob such as 'corpus/*.jsonl.zst', or a URL that fsspec knows; or else hf_dataset. The suffix says how
    # it is read: .jsonl (.ndjson, .json), .parquet, all others text; .gz, .bz2, .xz and .zst are unpacked.
    input: str = ""
    hf_dataset: HubDataset = dataclasses.field(default_factory=HubDataset)
    output: str  # folder or URL of the data set
    overwrite: bool = False  # replaces a data set that is there
    # or a tokenizer.json, a folder or data set that has one, a name on the Hugging Face hub; or train_bpe
    tokenizer: str = "bytes_utf8"
    # ids of the byte-level BPE that train_bpe trains, and the data set then holds
    bpe_vocab: Annotated[int, Interval(ge=259, le=LARGEST_ID), f"259 (the bytes and three) to {LARGEST_ID}"] = 32768
    # the input that stands before each sequence, where it shall not be what the tokenizer says
    bos_id: Id | None = None
    # a file of jinja in place of the tokenizer's own; a tokenizer that has none writes chats as ChatML
    chat_template: str = ""
    # prompt: records of a prompt, which is no target, and an answer. chat: messages, of which the assistant's are
    # targets. segments: texts, each with a weight. pairs: a prompt that an encoder reads, and an answer
    format: Literal["text", "prompt", "chat", "segments", "pairs"] = "text"
    # a record's fields (a line of jsonl, a row of parquet), if not text; in_text and out_text; messages; segments
    fields: tuple[str, ...] = ()
    # is written after each text, answer or last segment, such as '</s>', and after what an encoder reads; with
    # bytes_utf8 also write it after a prompt for an encoder
    end: str = ""
    # The field `weight` of a record, message or segment counts in the loss. Without this key records have none, and a
    # message's or segment's is 0, for what is no target, or 1.
    weights: bool = False
    row_length: Steps = 0  # tokens of a row that holds whole documents, to be training.tokens.len; 0: no such rows
    read_length: Steps = 0  # for pairs: tokens of a row that an encoder reads, to be training.tokens.read_len
    too_long: Literal["refuse", "truncate", "drop"] = "refuse"  # what happens to a document that is longer than a row
    # what stands between the documents of a text file, such as '\n' or '<|endoftext|>'. Without one they are cut by
    # size:
    separator: str = ""
    # the least that is cut off, to the end of its line. Four times the tokens of a training sequence are enough
    document_bytes: Annotated[int, Ge(4), "4 or more"] = 16384
    validation: str = ""  # path, glob or URL of what becomes the split `validation`
    # without that, about so many of the documents, chosen by their hash; 0: no validation split
    validation_fraction: Decay = 0.01
    # skip: leaves out what is no text or no JSON, or lacks a field, and counts it
    on_bad_record: Literal["fail", "skip"] = "fail"
    processes: Steps = 0  # number that tokenize; 0: one for each core
    # For a run that reads along: write at most so many tokens beyond the last number on standard input, where each line
    # is one, and end when standard input ends. null: write to the end
    tokens_ahead: Steps | None = None

    def __post_init__(self) -> None:
        if len(self.names) != len(FIELDS[self.format]):
            raise ValueError(f"fields: expected one for each of {', '.join(FIELDS[self.format])}")
        if self.end and self.format == "chat":
            raise ValueError("end: the chat template says how a turn ends: give it there")
        if self.too_long != "refuse" and not self.row_length:
            raise ValueError("too_long: only rows of a row_length have documents that are too long: set that too")
        if self.format == "pairs" and not (self.row_length and self.read_length):
            raise ValueError("format: pairs are written in rows: set row_length and read_length")
        if self.format != "pairs" and self.read_length:
            raise ValueError("read_length: only format=pairs has something that an encoder reads")

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of a record: the text; or the prompt and the answer; or the messages; or the segments."""
        return self.fields or FIELDS[self.format]

    @property
    def targets(self) -> str | None:
        """The array, of flat_tokens.TARGETS, that the data set has."""
        if self.weights:
            return "weight"
        return None if self.format == "text" and not self.row_length else "is_target"

    @property
    def room(self) -> tuple[int, ...]:
        """The tokens of each part of a row; empty where sequences are not put into rows."""
        return tuple(length for length in (self.read_length, self.row_length) if length)

    @property
    def drawn_fraction(self) -> float:
        """The part of the documents that their hash puts into the validation split."""
        return 0.0 if self.validation or self.hf_dataset.validation_split else self.validation_fraction

    @property
    def separator_bytes(self) -> bytes:
        return self.separator.replace("\\n", "\n").encode()  # a command line writes a new line so


class Document(NamedTuple):
    number: int  # its line or row
    texts: tuple[bytes, ...]  # in UTF-8, each tokenized on its own; for a chat, its messages as JSON
    weights: tuple[float, ...] = (1.0,)  # each text's weight in the loss
    chat: tuple[np.ndarray, np.ndarray] | None = None  # its ids, and the weight of each


@dataclasses.dataclass(frozen=True)
class Tokenized:
    sequences: dict[str, Sequences]  # by split
    counts: dict[str, int]  # tokens and documents; documents without a token, left out; too long ones, cut or left out
    bad: list[str]  # records that cannot be taken: where and why


# ---------------------------------------------------------------- processes

_worker: list[Any] = []  # the tokenizer and the config of a process of a pool


def start_worker(tokenizer: Tokenizer, config: TokenizeText) -> None:
    _worker[:] = tokenizer, config
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    # Without this a worker would wait forever for a parent that was killed.
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def work_on(block: Block) -> Tokenized:
    return tokenize(block, *_worker)


# ---------------------------------------------------------------- a block


def tokenize(block: Block, tokenizer: Tokenizer, config: TokenizeText) -> Tokenized:
    """The token ids of a block's documents, in their order, for the split that the file says or else for each by the
    documents' hash; and the records that cannot be taken."""
    documents, bad = read_documents(block, tokenizer, config)
    by_split: dict[str, list[Document]] = collections.defaultdict(list)
    for document in documents:
        by_split[block.file.split or ("validation" if drawn(document, config) else "train")].append(document)
    sequences, counts = {}, {"tokens": 0, "documents": 0, "empty": 0, "too_long": 0}
    for name, group in by_split.items():
        encoding = encoded(group, block.file.name, tokenizer, config)
        lengths = encoding.lengths.reshape(len(group), -1)
        kept, is_empty = lengths, (lengths == 0).any(axis=1)
        if config.room:
            is_long = (lengths > config.room).any(axis=1) & ~is_empty
            if config.too_long == "refuse":
                bad += [
                    f"{place(block, group[one].number)}: {too_long(lengths[one], config)}"
                    for one in np.flatnonzero(is_long)
                ]
            else:
                counts["too_long"] += int(is_long.sum())
            kept = lengths * ~is_long[:, None]
            if config.too_long == "truncate":
                kept = np.minimum(lengths, config.room)
                # What has no target before the cut would train nothing.
                kept = kept * encoding.targets(kept.reshape(-1)).reshape(kept.shape).any(axis=1, keepdims=True)
        kept = kept * ~is_empty[:, None]
        sequences[name] = encoding.cut(kept.reshape(-1))
        counts["tokens"] += len(sequences[name].ids)
        counts["documents"] += int(kept.all(axis=1).sum())
        counts["empty"] += int(is_empty.sum())
    return Tokenized(sequences, counts, bad)


def too_long(lengths: np.ndarray, config: TokenizeText) -> str:
    names = ("read_length", "row_length")[-len(config.room) :]
    parts = [f"{length} tokens for {name} = {most}" for length, name, most in zip(lengths, names, config.room)]
    return f"{' and '.join(parts)}: set it larger, or too_long to truncate or drop"


def encoded(documents: list[Document], source: str, tokenizer: Tokenizer, config: TokenizeText) -> Sequences:
    """The ids of the documents, and their lengths: 0 for an empty document."""
    dtype = TARGETS[config.targets or "is_target"]
    chats = [document.chat for document in documents if document.chat]
    if chats:
        ids, weight = (np.concatenate(parts) for parts in zip(*chats))
        return Sequences(ids, np.array([len(ids) for ids, _ in chats]), weight.astype(dtype))
    with PlainExceptions(f"the tokenizer {tokenizer.name} does not take the text of {source} ({{}})"):
        ids, lengths = tokenizer.encode_flat([text for document in documents for text in document.texts])
    of_ids: np.ndarray | None = None
    if config.targets:
        weights = np.array([weight for document in documents for weight in document.weights])
        of_ids = np.repeat(weights.astype(dtype), lengths)
    if config.format != "pairs":
        counts = np.array([len(document.texts) for document in documents])
        lengths = np.add.reduceat(lengths, np.cumsum(counts) - counts)
    return Sequences(ids, lengths, of_ids)


def drawn(document: Document, config: TokenizeText) -> bool:
    """Whether a document belongs to the validation split: by its own text alone, wherever it stands."""
    if not config.drawn_fraction:
        return False
    text = bytes(8) + b"\0".join(document.texts)  # eight zero bytes first: data sets so far are split so
    digest = hashlib.sha256(text).digest()  # processors have instructions for it
    return int.from_bytes(digest[:8], "little") < config.drawn_fraction * 2**64


def read_documents(block: Block, tokenizer: Tokenizer, config: TokenizeText) -> tuple[list[Document], list[str]]:
    """A block's documents, and of its other records where they are and what is wrong.

    Texts are in UTF-8, as they are in a file, so that bytes become ids without being decoded and encoded. Where a bad
    record is refused, nothing behind it is read.
    """
    if not block.content and not block.rows:
        return [], [f"{block.file.name}: the file is empty"]
    documents: list[Document] = []
    bad: list[str] = []
    if block.file.kind == "text":
        separator, end, line = config.separator_bytes, config.end.encode(), block.first
        ends = text_ends(block.content, separator, config.document_bytes, final=True)
        for start, stop in zip([0, *ends], ends):
            text = block.content[start:stop].removesuffix(separator)
            try:
                decoded(text)
                documents.append(Document(line, (text and text + end,)))
            except BadRecord as error:
                line = block.first + block.content.count(b"\n", 0, start)
                bad.append(f"{place(block, line + error.lines)}: {error}")
            if config.room:  # counting takes as long as all else, and only the check of lengths needs it
                line = line + block.content.count(b"\n", start, stop)
        return documents, bad
    for number, record in records(block):
        try:
            documents.append(document_of(number, parsed(record), tokenizer, config))
        except UnicodeEncodeError as error:
            bad.append(f"{place(block, number)}: half of a surrogate pair ({error.reason}), expected Unicode text")
        except (BadRecord, ChatError) as error:
            bad.append(f"{place(block, number)}: {error}")
        if bad and config.on_bad_record == "fail":  # a template may take seconds for each of the others
            break
    return documents, bad


def document_of(number: int, record: dict, tokenizer: Tokenizer, config: TokenizeText) -> Document:
    """Makes a document of a record. Raises BadRecord, ChatError or UnicodeEncodeError if it holds none."""
    of_record, chat = weight_of(record, "weight") if config.weights else 1.0, None
    texts: tuple[str, ...]
    if config.format == "chat":
        (messages,) = values(record, config.names, object)
        weights = weights_of(messages, config)
        ids, weight = tokenizer.encode_chat(messages, None if set(weights) <= {1.0} else weights)
        texts, chat = (json.dumps(messages, sort_keys=True),), (ids, of_record * weight)
        weights = weight.tolist()
    elif config.format == "segments":
        (segments,) = values(record, config.names, object)
        if not (isinstance(segments, list) and segments and all(isinstance(segment, dict) for segment in segments)):
            raise BadRecord(f"field '{config.names[0]}': expected a list of {{\"text\": ..., \"weight\": ...}}")
        texts, weights = tuple(values(segment, ("text",))[0] for segment in segments), weights_of(segments, config)
    else:
        texts = tuple(values(record, config.names))
        weights = [0.0, 1.0][-len(texts) :]
        if len(texts) == 2 and not texts[1]:
            raise BadRecord(f"field '{config.names[1]}' is empty, so there is nothing to learn")
    if config.format == "pairs":
        texts = (texts[0] + config.end, texts[1])
    if not of_record or not any(weights):
        raise BadRecord("all weights are 0, so there is nothing to learn")
    if any(texts):  # an empty document has no end either, and is left out
        texts = (*texts[:-1], texts[-1] + config.end)
    return Document(number, tuple(map(str.encode, texts)), tuple(of_record * weight for weight in weights), chat)


def weights_of(parts: Any, config: TokenizeText) -> list[float]:
    """The weights of messages or segments; what is neither is refused elsewhere."""
    (field,), known = config.names, parts if isinstance(parts, list) else []
    weights = [
        weight_of(part, f"{field}[{number}].weight") for number, part in enumerate(known) if isinstance(part, dict)
    ]
    if not config.weights and (other := set(weights) - {0.0, 1.0}):
        raise BadRecord(f"the weight {other.pop()} of {field} needs weights=true; without that a weight is 0 or 1")
    return weights


def weight_of(part: dict, name: str) -> float:
    weight = part.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= LARGEST_WEIGHT:
        raise BadRecord(f"{name} is {weight!r}, expected a number from 0 to {LARGEST_WEIGHT:,}")
    return float(weight)


def text_ends(data: bytes, separator: bytes, size: int, *, final: bool) -> list[int]:
    """Where documents end in a text that begins with one. `final`: nothing follows the data, so its rest is one
    too.

    A document goes up to and with a separator. Without one it goes to the end of the line in which it becomes `size`
    bytes long; if that is more than as long again, it ends between two characters.
    """
    ends, start = [], 0
    if separator:
        ends = [match.end() for match in re.finditer(re.escape(separator), data)]
    while not separator and (final or len(data) >= start + 2 * size):  # else what follows says where it ends
        line = data.find(b"\n", start + size - 1, start + 2 * size)
        end = line + 1 if line >= 0 else start + size
        if line < 0 and end >= len(data):
            break
        while line < 0 and end > start + size - 3 and data[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        ends.append(end)
        start = end
    if final and data and ends[-1:] != [len(data)]:
        ends.append(len(data))
    return ends
