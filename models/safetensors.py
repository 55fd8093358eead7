"""Files of safetensors: a tensor's rows are read when they are asked for; files are written in one stream, since the
package would hold all of a file in memory.

tensors = read(Path("folder"))                     # by name, none of them in memory
tensors["lm_head.weight"].read(slice(0, 4096))
write(Path("out"), {"lm_head.weight": (49152, 576)}, "bfloat16", values)
"""

import contextlib
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

import ml_dtypes  # noqa: F401 bfloat16 becomes a type of numpy
import numpy as np
from einops import rearrange
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from runtime.files import open_file, read_text
from runtime.terminal import RunError, run_errors

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # numpy's name: that in a file
SHARD_BYTES = 5 * 10**9  # most bytes of a file that is written
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    read: Callable[[slice], Float[np.ndarray, "rows ..."]]


@dataclass(frozen=True)
class Row:
    """A published tensor: its name, its layout -> ours, and the sizes of its dims."""

    name: str
    pattern: str
    sizes: dict[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        dims = re.findall(r"\([^)]*\)|\S+", self.pattern.partition(" -> ")[0])
        return tuple(math.prod(self.sizes[letter] for letter in dim.strip("()").split()) for dim in dims)

    @property
    def is_plain(self) -> bool:
        left, _, right = self.pattern.partition(" -> ")
        return left == right

    def read_in(self, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        return values if self.is_plain else rearrange(values, self.pattern, **self.sizes)

    def read_out(self, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        left, _, right = self.pattern.partition(" -> ")
        return values if self.is_plain else rearrange(values, f"{right} -> {left}", **self.sizes)


def read_json(file: Path) -> dict[str, Any]:
    with run_errors(f"{file} cannot be read", ValueError, RecursionError):
        content = json.loads(read_text(file))
    if not isinstance(content, dict):
        raise RunError(f"{file} cannot be read: expected an object in braces")
    return content


def read(folder: Path, unused: re.Pattern | None = None) -> dict[str, Tensor]:
    """The tensors of all files in a folder, or of those that its index names.

    Args:
      unused: names of tensors that may be of another type than CODES: those are left out.
    Raises:
      RunError: there are none, one cannot be read, or a tensor is of another type than CODES.
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
        with _readable(file):
            open_file(file).close()  # the package waits for a pipe
            opened = safe_open(file, framework="numpy", backend="pread")  # not mapped: a file may be cut short later
        for name in opened.keys():
            about = opened.get_slice(name)
            if about.get_dtype() not in CODES.values():
                if unused is not None and unused.fullmatch(name):
                    continue
                expected = f"expected one of {', '.join(CODES.values())}, not quantized weights"
                raise RunError(f"{name} in {file} is {about.get_dtype()}: {expected}")
            if name in tensors:
                raise RunError(f"{name} is in {file}, and in another file of {folder}: delete what is no part of them")
            tensors[name] = Tensor(tuple(about.get_shape()), functools.partial(_rows, file, about))
    return tensors


def _readable(file: Path) -> contextlib.AbstractContextManager:
    return run_errors(f"{file} cannot be read (is it whole?)", SafetensorError)


def _rows(file: Path, about: Any, rows: slice) -> Float[np.ndarray, "rows ..."]:
    with _readable(file):
        return about[rows]


def _named_in(index: Path) -> list[str]:
    """The files that an index names; they lie beside it."""
    named = read_json(index).get("weight_map")
    names = set(named.values()) if isinstance(named, dict) and all(isinstance(n, str) for n in named.values()) else ()
    if not names or any(Path(name).name != name for name in names):
        raise RunError(f"{index}: weight_map is not the name of a file beside it for each tensor")
    return sorted(names)


def write(
    folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str,
    values: Callable[[str], Iterator[Float[np.ndarray, "..."]]], only: str = "model.safetensors",
) -> None:  # fmt: skip
    """Writes tensors, several files with an index above SHARD_BYTES.

    Args:
      values: returns the tensor of a name, in consecutive pieces.
      only: the file's name if it is the only one.
    """
    code, kind = CODES[dtype], np.dtype(dtype)
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
    for name, more in sizes.items():
        if names and size + more > SHARD_BYTES:
            yield names
            names, size = [], 0
        names, size = [*names, name], size + more
    yield names
