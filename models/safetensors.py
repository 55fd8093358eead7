"""Files of safetensors: their headers are read, and a tensor's rows when they are asked for; written in one stream.

tensors = read(Path("folder"))                     # by name, none of them in memory
tensors["lm_head.weight"].read(slice(0, 4096))
write(Path("out"), {"lm_head.weight": (49152, 576)}, "bfloat16", values)
"""

import functools
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from runtime.files import open_file, read_text
from runtime.terminal import RunError, run_errors

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # numpy's name: that in a file
TYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
LONGEST_HEADER = 10**8  # bytes, as in the format's own reader
SHARD_BYTES = 5 * 10**9  # of a file that is written, at most
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensor:
    """A published tensor that has not been read."""

    shape: tuple[int, ...]
    read: Callable[[slice], np.ndarray]  # of its rows


def read_json(file: Path) -> dict[str, Any]:
    with run_errors(f"{file} cannot be read", ValueError, RecursionError):
        content = json.loads(read_text(file))
    if not isinstance(content, dict):
        raise RunError(f"{file} cannot be read: expected an object in braces")
    return content


def read(folder: Path, unused: re.Pattern | None = None) -> dict[str, Tensor]:
    """The tensors of all files in a folder; where there is an index, of those that it names.

    Args:
      unused: names of tensors that may be of another type than TYPES: those are left out.
    Raises:
      RunError: there are none, one cannot be read, or a tensor is of another type than TYPES.
    """
    index, whole = folder / INDEX, folder / "model.safetensors"
    if os.path.lexists(index):
        files = [folder / name for name in _named_in(index)]
    else:  # beside one whole file there may be the same weights in another form
        files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise RunError(f"there are no *.safetensors in {folder}, and no checkpoints")
    tensors: dict[str, Tensor] = {}
    for file in files:
        start, about = _header(file)
        for name, each in about.items():
            if each["dtype"] not in TYPES:
                if unused is not None and unused.fullmatch(name):
                    continue
                raise RunError(f"{name} in {file} is {each['dtype']}: expected one of {', '.join(TYPES)}")
            if name in tensors:
                raise RunError(f"{name} is in {file}, and in another file of {folder}: delete what is no part of them")
            shape, offset = tuple(each["shape"]), start + each["data_offsets"][0]
            tensors[name] = Tensor(shape, functools.partial(_rows, file, offset, TYPES[each["dtype"]], shape))
    return tensors


def _named_in(index: Path) -> list[str]:
    """The files that an index names, which lie beside it."""
    named = read_json(index).get("weight_map")
    names = set(named.values()) if isinstance(named, dict) and all(isinstance(n, str) for n in named.values()) else ()
    if not names or any(Path(name).name != name for name in names):
        raise RunError(f"{index}: weight_map is not the name of a file beside it for each tensor")
    return sorted(names)


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and what is said of each. Raises RunError where they are not what the format has: one
    after another, from there to the end of the file."""
    wrong = ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error
    with run_errors(f"{file} cannot be read", *wrong):
        with open_file(file) as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            size = file.stat().st_size - 8 - length
            if size < 0 or length > LONGEST_HEADER:
                raise ValueError(f"its header would have {length:,} bytes")
            about = json.loads(opened.read(length))
        about.pop("__metadata__", None)
        end = 0
        for each in sorted(about.values(), key=lambda each: each["data_offsets"]):
            start, stop = each["data_offsets"]
            shape, dtype = each["shape"], TYPES.get(each["dtype"])
            if start != end or stop < start or any(type(n) is not int or n < 0 for n in (*shape, start, stop)):
                raise ValueError("its tensors do not follow one another")
            if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"a tensor of shape {shape} cannot have {stop - start} bytes")
            end = stop
    if end != size:
        is_short = "is cut short: it ends before what its header says" if end > size else "holds more than it says"
        raise RunError(f"{file} {is_short}")
    return 8 + length, about


def _rows(file: Path, offset: int, dtype: np.dtype, shape: tuple[int, ...], rows: slice) -> np.ndarray:
    """Read, not mapped: what is in memory is what was asked for."""
    start, stop, _ = rows.indices(shape[0])
    size = math.prod(shape[1:]) * dtype.itemsize
    with open_file(file) as opened:
        opened.seek(offset + start * size)
        content = opened.read((stop - start) * size)
    if len(content) != (stop - start) * size:
        raise RunError(f"{file} is cut short: it ends before what its header says")
    return np.frombuffer(content, dtype).reshape(stop - start, *shape[1:])


def write(
    folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str, values: Callable[[str], Iterator[np.ndarray]],
    only: str = "model.safetensors",
) -> None:  # fmt: skip
    """Writes tensors, several files with an index above SHARD_BYTES.

    Args:
      values: of a name the tensor, in pieces that follow each other.
      only: the file's name where it is the only one.
    """
    code, kind = CODES[dtype], TYPES[CODES[dtype]]
    sizes = {name: math.prod(shape) * kind.itemsize for name, shape in shapes.items()}
    files = list(_in_files(sizes))
    index = {}
    for number, names in enumerate(files, 1):
        file = only if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        index |= dict.fromkeys(names, file)
        about, offset = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            about[name] = {"dtype": code, "shape": shapes[name], "data_offsets": [offset, offset + sizes[name]]}
            offset += sizes[name]
        text = json.dumps(about).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                for piece in values(name):
                    opened.write(np.ascontiguousarray(piece.astype(kind)).tobytes())
    if len(files) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _in_files(sizes: dict[str, int]) -> Iterator[list[str]]:
    """The names in groups of at most SHARD_BYTES, or of one."""
    names, size = [], 0
    for name, each in sizes.items():
        if names and size + each > SHARD_BYTES:
            yield names
            names, size = [], 0
        names, size = [*names, name], size + each
    yield names
