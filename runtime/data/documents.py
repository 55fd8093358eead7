"""Documents out of files and Hugging Face data sets, in blocks of about a megabyte, for tools.tokenize_text.

    files = find_files("corpus/*.jsonl.zst")            # a path, a glob, a URL
    files = find_splits("allenai/c4", "en")["train"]    # a name on the hub, or a folder
    for block in read_blocks(files):
        for number, record in records(block):
            (text,) = values(record, ["text"])          # BadRecord: why it has none
    read_blocks(files, block.position)                  # continues after that block

Text and lines of JSON are read here, so that a bad record has a line's number and can be left out: `datasets` parses
ten megabytes at once. It finds the files of a data set and reads all other kinds.
"""

import bz2
import codecs
import contextlib
import dataclasses
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import fsspec
import numpy as np

from runtime.data.chunks import read_errors
from runtime.files import open_file
from runtime.terminal import RunError, needs_package

BLOCK_BYTES = 2**20
MOST_RECORD_BYTES = 2**24  # its ids take 14 times as much memory; packed it may be a thousandth
BLOCK_ROWS = 256  # table rows in a block: their size is not known beforehand
KINDS = {".txt": "text", ".jsonl": "lines", ".ndjson": "lines", ".json": "lines"}  # of what is read here
EXPECTED = "expected the name of a data set on the Hugging Face hub or a folder of .txt, .jsonl or .parquet files"


@dataclasses.dataclass(frozen=True)
class File:
    kind: str  # text, lines or rows
    name: str  # path or URL; of rows of a data set: which part of it
    size: int = 0  # bytes as stored; 0 where that is not known
    version: str = ""  # changes with the content, as far as the file system tells
    split: str = ""  # the split that it belongs to; '' if none is named
    stream: Any = None  # the `datasets.IterableDataset` that holds the rows; None: to be opened by name
    part: int = 0  # its number among the data set's `parts` files
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Block:
    """Whole records of a file. Blocks after a position hold the same records wherever reading began."""

    file: File
    content: bytes  # for text and lines
    rows: list[dict]  # for a table
    first: int  # number of its first line, from 1, or row, from 0
    # Where the next block begins: the file, its byte or row, and the lines before that (1 after an empty file).
    position: tuple[int, int, int]
    done: int  # bytes of all files as stored


class BadRecord(ValueError):
    """Why a record cannot be taken; lines: how many of its lines come before the place."""

    def __init__(self, reason: str, lines: int = 0):
        super().__init__(reason)
        self.lines = lines


# ---------------------------------------------------------------- what there is


def find_files(pattern: str) -> list[File]:
    """The files of a path, glob or URL, by name. A file without a known suffix is text. Raises RunError: nothing
    matches, or the file system cannot be asked."""
    with reading(pattern):
        file_system, path = fsspec.core.url_to_fs(os.path.expanduser(pattern))
        paths = sorted(file_system.glob(path)) if any(mark in path for mark in "*?[") else [path]
        matches = [(file_system.unstrip_protocol(match), file_system.info(match)) for match in paths]
    if matches and paths == [path] and matches[0][1]["type"] == "directory":
        raise RunError(f"{pattern} is a folder, expected files: say {pattern.rstrip('/')}/*.txt or such")
    files = []
    for url, about in matches:
        if about["type"] != "directory":
            if url.startswith("file://"):  # here, since rows are opened by a package
                with reading(pattern):
                    open_file(url.removeprefix("file://")).close()
            kind = "rows" if _named(url).endswith(".parquet") else KINDS.get(_suffix(url), "text")
            keys = ("mtime", "ETag", "LastModified", "updated")
            version = next((str(about[key]) for key in keys if key in about), "")
            files.append(File(kind, url.removeprefix("file://"), about.get("size") or 0, version))
    if not files:
        raise RunError(f"no file matches {pattern}")
    return files


def find_splits(path: str, name: str) -> dict[str, list[File]]:
    """The files of each split of a Hugging Face data set: a name on the hub or a folder; `name`: which configuration.
    Raises RunError: a package or the data set is missing."""
    with needs_package("hf_dataset.path", "datasets"):
        import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # otherwise it also logs what it raises
    where = os.path.expanduser(path)
    if where.startswith((".", "/")) and not os.path.isdir(where):
        raise RunError(f"hf_dataset.path: there is no folder {where}: {EXPECTED}")
    try:
        with reading(where):
            builder = datasets.load_dataset_builder(where, name or None)
            splits = {str(split): names for split, names in (builder.config.data_files or {}).items()}
            kind, *others = {KINDS.get(_suffix(name)) for names in splits.values() for name in names} or {None}
            if kind == "lines":  # or one JSON array
                with _open(next(iter(splits.values()))[0]) as (file, _):
                    kind = None if file.read(100).lstrip(codecs.BOM_UTF8).lstrip().startswith(b"[") else kind
            if kind is not None and not others:
                return {
                    split: [File(kind, name, version=str(builder.hash)) for name in names]
                    for split, names in splits.items()
                }
            if getattr(builder.config, "batch_size", 0) is None:
                builder.config.batch_size = BLOCK_ROWS  # instead of row groups: datasets 5.2 fails on an empty one
            streams = builder.as_streaming_dataset()
    except RunError as error:
        raise RunError(f"hf_dataset.path: {error}: {EXPECTED}") from error
    return {
        str(split): [
            File("rows", f"file {part} of {path} {split}", 0, str(builder.hash), "", stream, part, stream.num_shards)
            for part in range(stream.num_shards)
        ]
        for split, stream in streams.items()
    }


def _named(name: str) -> str:
    """A file's name up to its suffix: of a URL not the query behind it, nor what holds the file."""
    name = name.partition("::")[0]
    return name.partition("?")[0] if name.startswith(("http://", "https://")) else name


def _suffix(name: str) -> str:
    """The suffix that says how a file is read, without that of its compression."""
    stem, suffix = os.path.splitext(_named(name))
    return os.path.splitext(stem)[1] if suffix in (".gz", ".bz2", ".xz", ".zst") else suffix


# ---------------------------------------------------------------- blocks


def whole_lines(data: bytes) -> int:
    """How much of the data is whole lines."""
    return data.rfind(b"\n") + 1


def read_blocks(
    files: Sequence[File], position: Sequence[int] = (0, 0, 0), whole: Callable[[bytes], int] = whole_lines
) -> Iterator[Block]:
    """The blocks of all files from a position on. whole: for a text that begins with a document, how much of it is
    documents that surely end there. Raises RunError: a file cannot be read."""
    first_file, offset, line = position
    for index, file in enumerate(files[first_file:], first_file):
        is_empty, before = not offset and not line, sum(file.size for file in files[:index])
        read = _read_rows(file, offset) if file.kind == "rows" else _read_bytes(file, offset, line, whole)
        file = dataclasses.replace(file, stream=None)  # a block goes to other processes
        for content, rows, first, offset, line, done in read:
            is_empty = False
            yield Block(file, content, rows, first, (index, offset, line), before + done)
        if is_empty:
            yield Block(file, b"", [], 1, (index, 0, 1), before)
        offset = line = 0


def _read_bytes(file: File, offset: int, line: int, whole: Callable[[bytes], int]) -> Iterator[tuple]:
    whole = whole if file.kind == "text" else whole_lines
    with reading(file.name), _open(file.name) as (opened, raw):
        opened.seek(offset)
        data, wanted, at_end = b"", BLOCK_BYTES, False
        while data or not at_end:
            while len(data) < wanted and not at_end:  # so that the blocks are the same wherever reading began
                piece = opened.read(wanted - len(data))
                at_end = not piece
                data += piece
            if offset == 0 and data.startswith(codecs.BOM_UTF8):  # says how the file is encoded, and is no text
                offset, data = len(codecs.BOM_UTF8), data.removeprefix(codecs.BOM_UTF8)
            stop = len(data) if at_end else whole(data)
            if not stop:  # a record that is longer than what was read, or the end
                if wanted >= MOST_RECORD_BYTES or b"\0" in data:
                    raise RunError(f"{file.name}: after byte {offset:,} a record has over {wanted:,} bytes, or no text")
                wanted *= 2
                continue
            content, data, wanted = data[:stop], data[stop:], BLOCK_BYTES
            # Four times as fast as bytes.count.
            lines = int(np.count_nonzero(np.frombuffer(content, np.uint8) == ord("\n")))
            first, line, offset = line + 1, line + lines, offset + stop
            yield content, [], first, offset, line, offset if opened is raw else min(raw.tell(), file.size)


def _read_rows(file: File, row: int) -> Iterator[tuple]:
    """Yields blocks of rows from number `row` on. It reads the rows before that again and discards them."""
    with needs_package(file.name, "datasets"):
        import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    with reading(file.name):
        stream, at = file.stream, 0
        if stream is None:
            options = {"data_files": file.name, "batch_size": BLOCK_ROWS}
            stream = datasets.load_dataset("parquet", **options, split="train", streaming=True)
        for table in stream.shard(file.parts, file.part).with_format("arrow").iter(BLOCK_ROWS):
            rest = table.slice(max(0, row - at))
            at += table.num_rows
            if rest.nbytes > MOST_RECORD_BYTES:
                sizes = [rest.slice(number, 1).nbytes for number in range(rest.num_rows)]
                if (largest := max(sizes)) > MOST_RECORD_BYTES:
                    number = at - rest.num_rows + sizes.index(largest)
                    raise RunError(f"{file.name}, row {number}: a record has over {MOST_RECORD_BYTES:,} bytes")
            if rest.num_rows:
                yield b"", rest.to_pylist(), at - rest.num_rows, at, 0, 0


@contextlib.contextmanager
def _open(name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file's content, and the stored file."""
    with fsspec.open(name, "rb") if "://" in name else open_file(name) as raw:
        compression = os.path.splitext(_named(name))[1]
        if compression == ".zst":
            with needs_package(name, "zstandard"):
                import zstandard
            # fsspec's own reads the first frame alone (2026.9), without a word.
            yield zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), raw
        else:
            openers: dict[str, Callable] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
            yield openers.get(compression, lambda raw: raw)(raw), raw


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns what opening or reading raises, if the network or the data are at fault, into a RunError of one line."""
    try:
        yield
    except read_errors(TypeError, ImportError, lzma.LZMAError) as error:
        raise RunError(f"cannot read {name} ({type(error).__name__}: {' '.join(str(error).split())})") from error


# ---------------------------------------------------------------- records


def records(block: Block) -> list[tuple[int, bytes | dict]]:
    """A block's records, with the numbers of their lines or rows; a line of text is a record."""
    if block.file.kind == "rows":
        return [*enumerate(block.rows, block.first)]
    if block.file.kind == "text":
        return [*enumerate(block.content.splitlines(), block.first)]
    lines = enumerate(block.content.split(b"\n"), block.first)
    return [(number, line) for number, line in lines if line and not line.isspace()]


def place(block: Block, number: int) -> str:
    return f"{block.file.name}, row {number}" if block.file.kind == "rows" else f"{block.file.name}:{number}"


def decoded(data: bytes) -> str:
    """The text. Raises BadRecord: it is not UTF-8, or has a zero byte, as a sparse or binary file."""
    if (zero := data.find(b"\0")) >= 0:
        raise BadRecord("byte 0x00, which is in no text", data.count(b"\n", 0, zero))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.rfind(b"\n", 0, error.start) + 1
        byte = f"byte 0x{data[error.start]:02x} at {error.start - line} of the line"
        raise BadRecord(f"invalid UTF-8 ({byte})", data.count(b"\n", 0, error.start)) from error


def parsed(record: bytes | dict) -> dict[str, Any]:
    """A record, a line of JSON or a row, as a mapping. Raises BadRecord: it is none."""
    if isinstance(record, bytes):
        text = decoded(record)
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadRecord(f"no JSON ({error.msg}, column {error.colno})") from error
        except (RecursionError, ValueError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else "an integer of over 4,300 digits"
            raise BadRecord(f"no JSON that can be read ({reason})") from error
    if not isinstance(record, dict):
        raise BadRecord(f'{type(record).__name__}, expected {{"field": ...}}')
    return record


def values(record: bytes | dict, fields: Sequence[str], kind: type = str) -> list[Any]:
    """The fields of a record. Raises BadRecord: one is missing or is no `kind`."""
    record = parsed(record)
    for field in fields:
        if field not in record:
            raise BadRecord(f"no field '{field}'; it has {', '.join(map(repr, record)) or 'none'}")
        if not isinstance(record[field], kind):
            raise BadRecord(f"field '{field}' is {type(record[field]).__name__}, expected text")
    return [record[field] for field in fields]
