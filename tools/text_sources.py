"""Where text comes from: files and Hugging Face data sets, read one after another in blocks of about a megabyte.

    sources = list_files("corpus/*.jsonl.zst", "") + list_files("held_out.txt", "validation")
    for block in read_blocks(sources, settings, position=None):
        ...                               # hand it to tools.text_records
    read_blocks(sources, settings, position=block.position)    # goes on after that block

Every block holds whole records, and blocks after a position hold the same records wherever reading began.
"""

import bz2
import contextlib
import dataclasses
import gzip
import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import fsspec
import numpy as np

from runtime.data.tokenizers import needs_package
from runtime.terminal import RunError

BLOCK_BYTES = 2**20
BLOCK_ROWS = 256  # of a data set in columns, whose rows have no size that is known beforehand
COMPRESSIONS = (".gz", ".bz2", ".zst")
LINES = (".jsonl", ".ndjson", ".json")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How records are told apart and what is taken of them; also what a worker must know."""

    format: str  # text, prompt or chat
    fields: tuple[str, ...]  # of a record: the text; or the prompt and the answer; or the messages
    separator: bytes  # stands between the documents of a text file; empty: they are cut by size
    document_bytes: int  # about so long is a document that is cut by size
    validation_fraction: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Source:
    kind: str  # text, lines, parquet or hub
    name: str  # path or URL, or the data set's name
    split: str  # train or validation; empty: by the hash of each document
    size: int  # bytes as stored, or rows; 0 where it is not known
    version: str = ""  # changes with the content, as far as the file system tells
    options: tuple[str, str] = ("", "")  # of the hub: the configuration and the split


@dataclasses.dataclass(frozen=True)
class Block:
    kind: str  # text, lines or rows
    source: str
    split: str
    content: bytes | list[dict]
    first: int  # number of its first line, from 1, or row, from 0
    position: tuple[
        int, int, int
    ]  # what follows: source, byte or row, lines that were passed (1 where nothing was there)
    done: int  # of all sources, in their sizes


# ---------------------------------------------------------------- what there is


def list_files(pattern: str, split: str) -> list[Source]:
    """The files of a path, glob or URL, by name. Their kind is that of their suffix; what has no known one is text.

    Raises:
      RunError: nothing matches, or the file system cannot be asked.
    """
    with _reading(pattern):
        file_system, path = fsspec.core.url_to_fs(os.path.expanduser(pattern))
        paths = sorted(file_system.glob(path)) if any(mark in path for mark in "*?[") else [path]
        files = [(file_system.unstrip_protocol(each), file_system.info(each)) for each in paths]
    sources = []
    for url, about in files:
        if about["type"] == "directory":
            if paths == [path]:
                raise RunError(f"{pattern} is a folder, expected files: say {pattern.rstrip('/')}/*.txt or such")
            continue
        stem, suffix = os.path.splitext(url)
        stored_as = os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix
        kind = "lines" if stored_as in LINES else "parquet" if suffix == ".parquet" else "text"
        changed = next((str(about[key]) for key in ("mtime", "ETag", "LastModified", "updated") if key in about), "")
        sources.append(Source(kind, url.removeprefix("file://"), split, about.get("size") or 0, changed))
    if not sources:
        raise RunError(f"no file matches {pattern}")
    return sources


def hub_source(path: str, name: str, hub_split: str, split: str) -> Source:
    """One split of a Hugging Face data set, by its name on the hub or its folder; `name` is its configuration, if it
    has several."""
    with needs_package(path, "datasets"):
        import datasets
    with _reading(path, datasets.exceptions.DatasetsError):
        builder = datasets.load_dataset_builder(path, name or None)
        known = builder.info.splits or {}
    size = known[hub_split].num_examples if hub_split in known else 0
    return Source("hub", path, split, size or 0, str(builder.hash), (name, hub_split))


# ---------------------------------------------------------------- blocks


def read_blocks(sources: list[Source], settings: Settings, position: tuple[int, int, int] | None) -> Iterator[Block]:
    """The blocks of all sources from a position on, None for the beginning.

    Raises:
      RunError: a source cannot be read.
    """
    first_source, offset, number = position or (0, 0, 0)
    readers = {"text": _read_bytes, "lines": _read_bytes, "parquet": _read_parquet, "hub": _read_hub}
    done = sum(source.size for source in sources[:first_source])
    for index in range(first_source, len(sources)):
        source = sources[index]
        for content, first, following, read in readers[source.kind](source, settings, offset, number):
            kind = source.kind if isinstance(content, bytes) else "rows"
            yield Block(kind, source.name, source.split, content, first, (index, *following), done + read)
        done += source.size
        offset = number = 0


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


def _read_bytes(source: Source, settings: Settings, offset: int, line: int) -> Iterator[tuple]:
    """Blocks of lines or documents; line: how many lies before the offset. An empty file is one empty block."""
    with _reading(source.name, *_compression_errors(source.name)), fsspec.open(source.name, "rb") as raw:
        file = _decompressed(raw, source.name)
        if file is raw:
            raw.seek(offset)
        else:
            skipped = 0
            while skipped < offset:
                piece = file.read(min(BLOCK_BYTES, offset - skipped))
                if not piece:
                    raise EOFError(f"it ends before byte {offset}, which was read before")
                skipped += len(piece)
        data, wanted, at_end, empty = b"", BLOCK_BYTES, False, not (offset or line)
        while True:
            while len(data) < wanted and not at_end:  # as much at each restart, so that the blocks are the same
                piece = file.read(wanted - len(data))
                at_end = not piece
                data += piece
            if at_end:
                stop = len(data)
            elif source.kind == "lines":
                stop = data.rfind(b"\n") + 1
            else:
                stop = max(text_ends(data, settings, False), default=0)
            if stop:
                content, data, wanted, empty = data[:stop], data[stop:], BLOCK_BYTES, False
                lines = np.count_nonzero(
                    np.frombuffer(content, np.uint8) == ord("\n")
                )  # four times as fast as bytes.count
                first, line, offset = line + 1, line + int(lines), offset + stop
                yield content, first, (offset, line), offset if file is raw else min(raw.tell(), source.size)
            elif at_end:
                break
            else:  # a record that is longer than what was read
                wanted *= 2
    if empty:
        yield b"", 1, (0, 1), 0


def _read_parquet(source: Source, settings: Settings, row: int, line: int) -> Iterator[tuple]:
    with needs_package(source.name, "pyarrow"):
        import pyarrow
        import pyarrow.parquet
    with _reading(source.name, pyarrow.ArrowException), fsspec.open(source.name, "rb") as raw:
        file = pyarrow.parquet.ParquetFile(raw)
        names = file.schema_arrow.names
        if missing := [field for field in settings.fields if field not in names]:
            raise RunError(f"{source.name} has no column '{missing[0]}'; it has {', '.join(names)}: name the right one")
        rows = file.metadata.num_rows
        if not rows and not line:
            yield [], 0, (0, 1), source.size
        at = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if at + size <= row:
                at += size
                continue
            for batch in file.iter_batches(BLOCK_ROWS, row_groups=[group], columns=list(settings.fields)):
                records = batch.slice(max(0, row - at)).to_pylist()
                first, at = at + batch.num_rows - len(records), at + batch.num_rows
                if records:
                    yield records, first, (at, 0), source.size * at // rows


def _read_hub(source: Source, settings: Settings, row: int, line: int) -> Iterator[tuple]:
    """Streams; what lies before the row is passed over, which reads it once more."""
    with needs_package(source.name, "datasets"):
        import datasets
    name, split = source.options
    with _reading(source.name, datasets.exceptions.DatasetsError):
        stream = datasets.load_dataset(source.name, name or None, split=split, streaming=True)
        if row:
            stream = stream.skip(row)
        records = []
        for record in stream:
            records.append({field: record[field] for field in settings.fields if field in record})
            if len(records) == BLOCK_ROWS:
                first, row = row, row + len(records)
                yield records, first, (row, 0), row
                records = []
    if records or not (row or line):
        yield records, row, (row + len(records), 1), row + len(records)


# ---------------------------------------------------------------- files


def _decompressed(raw: BinaryIO, name: str) -> BinaryIO:
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if name.endswith(".bz2"):
        return bz2.BZ2File(raw)
    if name.endswith(".zst"):
        with needs_package(name, "zstandard"):
            import zstandard
        return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return raw


def _compression_errors(name: str) -> tuple[type[Exception], ...]:
    errors = (EOFError, zlib.error)
    if name.endswith(".zst"):
        with needs_package(name, "zstandard"):
            import zstandard
        errors += (zstandard.ZstdError,)
    return errors


@contextlib.contextmanager
def _reading(name: str, *further: type[Exception]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise RunError(f"there is no {name} ({error})") from error
    except (OSError, ValueError, ImportError, *further) as error:
        raise RunError(f"cannot read {name} ({type(error).__name__}: {error})") from error
