"""Where an error is: the line of the user's program, and the function of JAX's that it called."""

import functools
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

import jax

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Programs that are read and changed as the user's own, also where `pip install` has put them.
_PROGRAMS = tuple(os.path.join(_ROOT, name) for name in ("train.py", "train_any.py", "pipeline.py", "optimizers.py"))
_PROGRAMS += (os.path.join(_ROOT, "models", ""),)
_not_users = [
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<",
]


def defines_operations(file_name: str):
    """Declares a file that defines operations: its errors and transfers are reported at the line that calls it."""
    _not_users.append(file_name)


@functools.cache
def is_users(file_name: str) -> bool:
    """Whether a frame is of the user's program: not of shardlib, JAX, Python's or an installed package's own files,
    wherever packages are (a user's own, Debian's, a folder of `pip install --target`). A cell of IPython's is."""
    if file_name.startswith(tuple(_not_users)) or file_name.endswith(".pyx"):  # Cython's, of NumPy
        return file_name.startswith("<ipython-input")
    return file_name.startswith(_PROGRAMS) or not any(_has_packages(str(folder)) for folder in Path(file_name).parents)


@functools.cache
def _has_packages(folder: str) -> bool:
    return Path(folder).name in ("site-packages", "dist-packages") or any(Path(folder).glob("*.dist-info"))


# Packages that compare sizes only to refuse what does not fit.
_REFUSE_ALONE = re.compile(r"[/\\](jax|jaxlib|numpy|ml_dtypes|opt_einsum|einops|jaxtyping|typeguard)[/\\]")


def decides_by_sizes(depth: int) -> bool:
    """Whether the function `depth` frames up may branch on a size. User code and packages may; shardlib, JAX and
    packages that only refuse may not. Code without a file and Python's own modules count as their caller."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and _is_its_callers(frame.f_code.co_filename):
        frame = frame.f_back
    file_name = frame.f_code.co_filename
    if is_users(file_name):
        return True
    return not file_name.startswith(tuple(_not_users)) and not _REFUSE_ALONE.search(file_name)


@functools.cache
def _is_its_callers(file_name: str) -> bool:
    if is_users(file_name) or "-packages" in file_name:
        return False
    return file_name.startswith(("<", sysconfig.get_paths()["stdlib"] + os.sep))


def users_line() -> str:
    """'file:line' of the innermost frame of the user's program."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """'file:line' of the innermost frame of the user's program on the way to where an error was raised."""
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if is_users(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else "unknown line"


def unbound(error: NameError, axes) -> str:
    """The mesh axis that one of JAX's functions names where it is not bound. Raises the error if it is another."""
    match = re.search(r"axis name: (\w+)", str(error))
    if match is None or match[1] not in axes:
        raise error
    return match[1]


_WRITTEN = (jax.numpy, jax.nn, jax.lax, jax.random, jax.numpy.linalg)
_TAKE_FUNCTIONS = {"map", "scan", "cond", "switch", "while_loop", "fori_loop", "associative_scan"}


def spoken_name(eqn) -> str | None:
    """The function of JAX that the user's line called, 'softmax', of which an equation is a part; not operators."""
    frames = [] if eqn.source_info.traceback is None else eqn.source_info.traceback.frames
    users = next((index for index, frame in enumerate(frames) if is_users(frame.file_name)), 0)
    for frame in reversed(frames[:users]):
        name = frame.function_name.rpartition(".")[2]
        if name.startswith("_") or name in _TAKE_FUNCTIONS:
            continue
        if _is_jaxs(name):
            return name
    return eqn.params["name"] if _is_jaxs(eqn.params.get("name")) else None  # jitted, as jnp.median is


def _is_jaxs(name) -> bool:
    return isinstance(name, str) and any(callable(getattr(module, name, None)) for module in _WRITTEN)
