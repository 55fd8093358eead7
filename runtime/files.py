"""Opens files that others may have written or damaged, and writes files that a browser or a resumed run may be reading.

    text = read_text(folder / "config.json")
    with open_file("corpus.txt") as file:
        first = file.read(100)

Opening never waits and reading has a limit: a pipe, a device or a sparse file is an error, like a missing file.
"""

import contextlib
import dataclasses
import errno
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 2**30  # metrics.jsonl grows with a run
LARGEST_BYTES = 2**27  # most of what is read at once; a tokenizer.json may have tens of millions
LARGEST_YAML = 2**16  # characters, which take a second to parse
MOST_REPEATED = 1000  # how often references may repeat a value
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class NotPlain(OSError):
    """The path is not a plain file, or the file is too large to be read at once."""


def open_file(path: str | os.PathLike, most: float = math.inf) -> BinaryIO:
    """Opens a file to read. Raises OSError; NotPlain: a folder, pipe, device, link to itself, or over `most` bytes."""

    def opened(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_NONBLOCK)  # else opening a pipe waits for its writer
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise NotPlain(error.errno, "it is a link to itself or a socket, expected a plain file", name) from None
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and about.st_size <= most:
            return descriptor
        os.close(descriptor)
        if stat.S_ISREG(about.st_mode):
            raise NotPlain(errno.EFBIG, f"it has {about.st_size:,} bytes, expected at most {most:,}", name)
        kind = KINDS.get(stat.S_IFMT(about.st_mode), "a device")
        raise NotPlain(errno.EINVAL, f"it is {kind}, expected a plain file", name)

    if "\0" in os.fsdecode(path):
        raise NotPlain(errno.EINVAL, "a name holds no zero byte", os.fsdecode(path))
    return open(path, "rb", opener=opened)


def read_bytes(path: str | os.PathLike, most: int = LARGEST_BYTES) -> bytes:
    """A file's content. Raises as open_file."""
    with open_file(path, most) as file:
        return file.read(most)


def read_text(path: str | os.PathLike, errors: str = "strict") -> str:
    """A file's text, which must be UTF-8, without a byte order mark. Raises as read_bytes, and UnicodeDecodeError, a
    ValueError."""
    return read_bytes(path).decode("utf-8-sig", errors)


def parse_yaml(text: str) -> Any:
    """yaml.safe_load, which raises yaml.YAMLError for everything that it cannot read, or that would grow too large."""
    import yaml

    try:
        if len(text) > LARGEST_YAML:
            raise yaml.YAMLError(f"it has {len(text):,} characters, expected at most {LARGEST_YAML:,}")
        if multiply(re.findall(r"[\s\[{,:?-]\*([\w-]+)", text)):  # also matches text that only looks like an alias
            raise yaml.YAMLError(f"its aliases may repeat a value more than {MOST_REPEATED:,} times")
        return yaml.safe_load(text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # a wrong tag, or depth
        raise yaml.YAMLError(str(error)) from error


def flat(tree: Any, prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """The values of nested mappings and dataclasses by path: {'a': {'b': 1}} as {'a.b': 1}."""
    leaves: dict[str, Any] = {}
    for name, value in (vars(tree) if dataclasses.is_dataclass(tree) else tree).items():
        if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            leaves |= flat(value, f"{prefix}{name}{separator}", separator)
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def multiply(references: Sequence[str]) -> bool:
    """Whether nested references could repeat a value more than MOST_REPEATED times.

    The worst case: each of the n names is referred to equally often, by the values of the previous name.
    """
    names = len(set(references))
    return names > 0 and names * math.log(len(references) / names) > math.log(MOST_REPEATED)


def write_all(folder: str | Path, texts: Mapping[str, str]) -> None:
    """Writes files by their names into a folder, which is made if there is none, each whole. Raises OSError."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(Path(folder) / name, text)


def write_whole(path: Path, *parts: str | bytes | memoryview) -> None:
    """Writes a file whole or not at all, even if the machine fails meanwhile; text as UTF-8. Raises OSError."""
    if path.is_dir():  # else the .part file would stay
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)  # a part that fills the disk is of no use
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: str | Path) -> None:
    """Waits until a file's content, or a folder's entries, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
