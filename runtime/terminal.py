"""What a person reads in a terminal: the one exception that is meant for them, lines, and how a process ends.

Printing never ends a run. What standard output does not take (a full disk below its log, a closed pipe) is said on
standard error and in `messages.txt` of the run folder.
"""

import atexit
import contextlib
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# The status of one of several processes that an exception ended, not a RunError: that with which JAX itself ends the
# others. It may be the machine's fault, so that starting again helps.
DIED = 134
INSTALL = "pip install -r requirements-text.txt"
SILENT_S = 60.0  # after which a file gets a line
LEADER_LINGERS_S = 5.0  # so that others which meet the same error print theirs: they end when process 0 does

_process = ""  # of several: "host gpu-07 (process 7 of 16): "
_lingers_s = 0.0
_messages: Path | None = None  # takes what standard output does not
_is_silent = False  # whether standard output took nothing the last time


class RunError(Exception):
    """What is wrong, where, what was expected and the fix. The entry point prints it alone, without a traceback, and
    exits with 1."""


@contextlib.contextmanager
def run_errors(what: str, *others: type[Exception]) -> Iterator[None]:
    """Makes a RunError of an error of a disk or a store (it is full, a server is down), and of `others`, which say that
    a content is none; what else goes wrong passes."""
    errors: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except errors as error:
        raise RunError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def needs_package(what: str, package: str, install: str = INSTALL) -> Iterator[None]:
    """Around an import of what not every run needs: its absence is one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RunError(f"{what} needs the package {package}, which is not installed: {install}") from error


def refusals() -> tuple[type[Exception], ...]:
    """What ends a program with its message alone: RunError, what shardlib's check and the kernels refuse with, and of
    one process what the machine does (a full disk, too many open files, no memory); several hosts are started again.

    They are not imported for this: whoever has not loaded them cannot have been refused by them, and importing JAX
    takes a second.
    """
    others = {"shardlib.spec": "ShardingError", "typeguard": "TypeCheckError", "kernels.attention": "KernelError"}
    loaded = [getattr(sys.modules[module], name) for module, name in others.items() if module in sys.modules]
    return RunError, *loaded, *(() if _process else (OSError, MemoryError))


def print_line(text: str) -> None:
    """Prints a line on standard output, above the progress bar where there is one; may be called from any thread."""
    from tqdm import tqdm  # a program that prints nothing starts without it

    text = printable(text)
    _on_stdout(text, lambda: (tqdm.write(text, file=sys.stdout), sys.stdout.flush()))


def keep_messages(folder: Path) -> None:
    """From now on, what standard output does not take is appended to `messages.txt` of this run folder."""
    global _messages
    _messages = folder / "messages.txt"


def progress(given: Iterable[Any] | None = None, **options: Any) -> Any:
    """tqdm's bar in a terminal; elsewhere a line every SILENT_S, none of what takes less."""
    from tqdm import tqdm

    if sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty():
        return tqdm(given, **options)
    form = "{desc}{n_fmt} of {total_fmt}{unit}, {elapsed}\n"
    every = {"delay": SILENT_S, "mininterval": SILENT_S, "maxinterval": SILENT_S}
    return tqdm(given, **{**options, **every, "leave": False, "bar_format": form})


class Progress:
    """How far a run is: a bar in a terminal, elsewhere a line each time it is shown."""

    def __init__(self, total: int, done: int):
        self._total, self._bar, self._said_at = total, None, time.monotonic()
        if sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty():
            _on_stdout("", lambda: self._open(done))

    def _open(self, done: int) -> None:
        from tqdm import tqdm

        form = "step {n_fmt}/{total_fmt} |{bar}| {desc}"
        self._bar = tqdm(total=self._total, initial=done, file=sys.stdout, dynamic_ncols=True, bar_format=form)

    def show(self, done: int, status: str) -> None:
        text = f"step {done}/{self._total}: {status}"
        self._said_at = time.monotonic()
        if self._bar is None:
            return print_line(text)
        self._bar.n = done
        _on_stdout(text, lambda: self._bar.set_description_str(printable(status)))

    def pulse(self, done: int) -> None:
        """A line where there was none for SILENT_S: who looks at a file wants to know whether it goes on."""
        if self._bar is None and time.monotonic() - self._said_at >= SILENT_S:
            self.show(done, "under way")

    def close(self) -> None:
        if self._bar is not None:
            _on_stdout("", self._bar.close)


def _on_stdout(text: str, write: Callable[[], Any]) -> None:
    """Says `text` elsewhere where `write` fails, because standard output is closed or its disk is full."""
    global _is_silent
    try:
        if sys.stdout is None:
            raise ValueError("it is closed")
        write()
        _is_silent = False
        return
    except (OSError, ValueError) as error:
        if not _is_silent:
            print_error(f"standard output cannot be written ({error}); it goes on here", "warning")
        _is_silent = True
    if text:
        _write_error(text + "\n")
    if text and _messages is not None:
        with contextlib.suppress(OSError), _messages.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nowhere is left to say it
        sys.stderr.write(text)
        sys.stderr.flush()


def printable(text: Any) -> str:
    """Text without the password of a URL, in which control characters, with which a name could write anywhere in a
    terminal, are spelled out.

    >>> printable("a\x1b[2Jb s3://me:secret@host/x")
    'a\\\\x1b[2Jb s3://me:***@host/x'
    """
    text = re.sub(r"(\w://+[^/\s:@]*:)[^/\s@]+@", r"\1***@", str(text))
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def wrapped(line: str) -> str:
    """A line in several where it is longer than the terminal is wide, or 120 columns; those that follow are
    indented."""
    width = max(40, shutil.get_terminal_size((120, 24)).columns)
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


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


def print_error(error: BaseException | str, kind: str = "error") -> None:
    """Prints a message on stderr, at once, so that those of several processes do not run into each other."""
    _write_error(f"{_process}{kind}: {printable(str(error) or type(error).__name__)}\n")


def leave(status: int) -> NoReturn:
    """Ends the process after an error. JAX's own end would wait for the other processes, which may wait for this
    one."""
    if _process:
        _give_up_stdout()
        time.sleep(_lingers_s)
        os._exit(status)
    sys.exit(status)


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, traceback)
    print_error(error, kind.__name__)
    if kind.__name__ == "JaxRuntimeError":
        print_error("most likely another process ended first: the message of its host says why", "hint")
    leave(DIED)


def _give_up_stdout() -> None:
    """Writes what waits for standard output; what cannot be written is dropped, so that Python's end does not fail."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _hold(descriptor: int) -> None:
    """Keeps a file that is opened later from taking the place of standard output or error that is closed."""
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)


_hold(1)
_hold(2)
atexit.register(_give_up_stdout)
