"""Where an error is: the line of the user's program."""

import functools
import os
import sys
import sysconfig
from pathlib import Path

import jax

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Programs that are read and changed as the user's own, also where `pip install` has put them.
_PROGRAMS = tuple(os.path.join(_ROOT, name) for name in ("train.py", "train_any.py", "pipeline.py", "optimizers.py"))
_PROGRAMS += (os.path.join(_ROOT, "models", ""),)
STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
not_users = [  # how the names of files begin that are not the user's
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,
    STDLIB,
    "<",
]


def defines_operations(file_name: str):
    """Declares a file that defines operations: its errors and transfers are reported at the line that calls it."""
    not_users.append(file_name)


@functools.cache
def is_users(file_name: str) -> bool:
    """Whether a frame is of the user's program: not of shardlib, JAX, Python's or an installed package's own files,
    wherever packages are (a user's own, Debian's, a folder of `pip install --target`). A cell of IPython's is."""
    if file_name.startswith(tuple(not_users)) or file_name.endswith(".pyx"):  # Cython's, of NumPy
        return file_name.startswith("<ipython-input")
    return file_name.startswith(_PROGRAMS) or not any(_has_packages(str(folder)) for folder in Path(file_name).parents)


@functools.cache
def _has_packages(folder: str) -> bool:
    return Path(folder).name in ("site-packages", "dist-packages") or any(Path(folder).glob("*.dist-info"))


def users_line() -> str:
    """'file:line' of the innermost frame of the user's program."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
