"""What a person reads in a terminal: the one exception that is meant for them, lines, and how a process ends."""

import os
import re
import sys
import textwrap
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

# The status of one of several processes that an exception ended, not a RunError: that with which JAX itself ends the
# others. It may be the machine's fault, so that starting again helps.
DIED = 134
LEADER_LINGERS_S = 5.0  # so that others which meet the same error print theirs: they end when process 0 does

_process = ""  # of several: "host gpu-07 (process 7 of 16): "
_lingers_s = 0.0


class RunError(Exception):
    """What is wrong, where, what was expected and the fix. The entry point prints it alone, without a traceback, and
    exits with 1."""


def refusals() -> tuple[type[Exception], ...]:
    """What ends a program with its message alone: RunError and, once shardlib is loaded, what its check refuses with.

    Both of those name the line of the program that is to be changed. shardlib is not imported for this: whoever has not
    loaded it cannot have been refused by it, and its import takes a second of JAX.
    """
    if "shardlib.spec" not in sys.modules:
        return (RunError,)
    from typeguard import TypeCheckError

    return RunError, sys.modules["shardlib.spec"].ShardingError, TypeCheckError


def shown(text: str) -> str:
    """What may be shown of a text: no password of a URL, and no control character, which a terminal may obey."""
    text = re.sub(r"(\w://+[^/\s:@]*:)[^/\s@]+@", r"\1***@", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def print_line(text: str) -> None:
    """Prints a line on standard output, above the progress bar where there is one; may be called from any thread."""
    from tqdm import tqdm  # a program that prints nothing starts without it

    tqdm.write(shown(text), file=sys.stdout)
    sys.stdout.flush()


def wrapped(line: str) -> str:
    """A line for a terminal, in several where it is longer than 120 columns; those that follow are indented."""
    return textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, with the cells of a column below one another; those in `right` end there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def one_of_several(host: str, index: int, count: int) -> None:
    """Says that this process is one of several: its last messages begin with its name, and it ends without waiting."""
    global _process, _lingers_s
    _process = f"host {host} (process {index} of {count}): "
    _lingers_s = LEADER_LINGERS_S if index == 0 else 0.0
    sys.excepthook = _end


def print_error(error: BaseException, kind: str = "error") -> None:
    """Prints a message on stderr, at once, so that those of several processes do not run into each other."""
    sys.stderr.write(f"{_process}{kind}: {shown(str(error))}\n")
    sys.stderr.flush()


def leave(status: int) -> NoReturn:
    """Ends the process after an error. JAX's own end would wait for the other processes, which may wait for this one."""
    if _process:
        sys.stdout.flush()
        time.sleep(_lingers_s)
        os._exit(status)
    sys.exit(status)


def _end(kind: type[BaseException], error: BaseException, traceback: object) -> None:
    sys.__excepthook__(kind, error, traceback)
    print_error(error, kind.__name__)
    if kind.__name__ == "JaxRuntimeError":
        print_error(RuntimeError("most likely another process ended first: the message of its host says why"), "hint")
    leave(DIED)
