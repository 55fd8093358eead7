"""What the check reads from frames: who asks for a size, which function of JAX's the user called, where an error was
raised."""

import functools
import re
import sys
import traceback

import jax

from shardlib.places import STDLIB, is_users, not_users

# Packages that compare sizes only to refuse what does not fit.
_REFUSE_ALONE = re.compile(r"[/\\](jax|jaxlib|numpy|ml_dtypes|opt_einsum|einops|jaxtyping|typeguard)[/\\]")


def asked_by_user() -> bool:
    """Whether what called the caller may branch on a size. User code and packages may; shardlib, JAX and packages that
    only refuse may not. Code without a file and Python's own modules count as their caller."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_its_callers(frame.f_code.co_filename):
        frame = frame.f_back
    file_name = frame.f_code.co_filename
    if is_users(file_name):
        return True
    return not file_name.startswith(tuple(not_users)) and not _REFUSE_ALONE.search(file_name)


@functools.cache
def _is_its_callers(file_name: str) -> bool:
    if is_users(file_name) or "-packages" in file_name:
        return False
    return file_name.startswith(("<", STDLIB))


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
