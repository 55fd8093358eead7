"""Output for a person at a terminal: errors, lines, bars, and how a process ends.

Printing never ends a program. Lines that standard output does not take (a full disk, a closed pipe) go to standard
error and to `messages.txt` of the run folder; without one, the program ends with status 1, and says nothing more if
the reader of its pipe has ended.
"""

import atexit
import contextlib
import importlib.util
import os
import re
import shutil
import stat
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# The status of one of several processes after an exception other than a RunError, by which JAX ends the others, too:
# starting again may help.
DIED = 134
SILENT_S = 60.0  # the longest time without a line in a file
LEADER_LINGERS_S = 5.0  # the others end when process 0 does, but first print the same error

_process = ""  # this process's name if there are several: "host gpu-07 (process 7 of 16): "
_lingers_s = 0.0
_messages: Path | None = None  # takes what standard output does not


def install(what: str) -> str:
    """The command that installs the packages of requirements-WHAT.txt; an installed clearshard comes without files."""
    file = Path(__file__).parents[1] / f"requirements-{what}.txt"
    return f"pip install -r {file.name}" if file.exists() else f'pip install ".[{what}]" in the clone'


INSTALL = install("text")


class RunError(Exception):
    """Says what is wrong, where, what was expected and the fix. The entry point prints no traceback: status 1."""


class NothingToTrain(RunError):
    """Says that a run has ended already. The entry point prints it as any other line: status 0, so that what starts
    runs again, after a host has failed or for a whole sweep, comes to an end."""


@contextlib.contextmanager
def run_errors(what: str, *others: type[Exception]) -> Iterator[None]:
    """Turns errors of a disk or a store, and `others`, into a RunError."""
    errors: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except errors as error:
        raise RunError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def needs_package(what: str, package: str, install: str = INSTALL) -> Iterator[None]:
    """For what not every run needs, an import or a process of its own: turns a missing package into a RunError."""
    try:
        if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError
        yield
    except ModuleNotFoundError as error:
        raise RunError(f"{what} needs the package {package}, which is not installed: {install}") from error


def refusals() -> tuple[type[Exception], ...]:
    """The exceptions that end a program with their message alone: RunError, the refusals of shardlib's check and of
    kernels, and in a run of one process the machine's errors (a full disk, no memory), after which processes of several
    hosts are started again. What is not loaded has refused nothing; importing it here would take a second.
    """
    others = {"shardlib.spec": "ShardingError", "typeguard": "TypeCheckError", "kernels.attention": "KernelError"}
    loaded = [getattr(sys.modules[module], name) for module, name in others.items() if module in sys.modules]
    return RunError, *loaded, *(() if _process else (OSError, MemoryError))


class _Output:
    """Standard output, as a file that takes everything: what cannot be written there goes elsewhere."""

    def __init__(self):
        self.is_failing = False

    def write(self, text: str) -> None:
        if not text:  # a pipe that nobody reads takes nothing, too
            return
        try:
            if sys.stdout is None:
                raise ValueError("it is closed")
            sys.stdout.write(text)
            sys.stdout.flush()
            self.is_failing = False
        except (OSError, ValueError) as error:
            is_left = isinstance(error, BrokenPipeError) and _messages is None  # `head` has read enough of a tool
            if not self.is_failing and not is_left:
                print_error(f"standard output cannot be written ({error}); it goes on here", "warning")
            self.is_failing = True
            if is_left:
                return
            if text.endswith("\n"):  # bars do not end so
                _write_error(text)
                if _messages is not None:
                    with contextlib.suppress(OSError), _messages.open("a", encoding="utf-8") as file:
                        file.write(text)

    def flush(self) -> None:
        """Nothing is left to write."""

    def __getattr__(self, name: str) -> Any:
        """For tqdm, which draws bars by the encoding and the terminal's width."""
        return getattr(sys.stdout, name)

    def isatty(self) -> bool:
        return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


_OUTPUT: Any = _Output()
_LOCK = threading.RLock()  # guards lines and bars


def output_is_failing() -> bool:
    """Whether neither standard output nor a run folder took the last line."""
    return _OUTPUT.is_failing and _messages is None


def _tqdm() -> Any:
    from tqdm import tqdm  # a program that prints nothing starts without it

    tqdm.set_lock(_LOCK)  # Control-C while tqdm makes one of its own, with its first line, ends in an AttributeError
    return tqdm


def print_line(text: str) -> None:
    """Prints a line on standard output, above the progress bar; may be called from any thread."""
    _tqdm().write(f"{printable(text)}\n", file=_OUTPUT, end="")


def keep_messages(folder: Path) -> None:
    """From now on, lines that standard output does not take are appended to `messages.txt` of this run folder."""
    global _messages
    _messages = folder / "messages.txt"


def has_rows(file: Any) -> bool:
    """Whether this is a terminal that shows bars: that of mpirun has no rows, and tqdm shows nothing there."""
    try:
        return file.isatty() and os.get_terminal_size(file.fileno()).lines > 0
    except (OSError, ValueError):  # it does not say
        return True


def progress(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """tqdm's bar in a terminal; elsewhere a line every SILENT_S."""
    if sys.stderr is not None and not sys.stderr.closed and has_rows(sys.stderr):
        return _tqdm()(items, **options)
    form = "{desc}{n_fmt} of {total_fmt}{unit}, {elapsed}\n"
    every = {"delay": SILENT_S, "mininterval": SILENT_S, "maxinterval": SILENT_S}
    return _tqdm()(items, **{**options, **every, "leave": False, "bar_format": form})


@contextlib.contextmanager
def heartbeat(descriptor: int, say: Callable[[str], None]) -> Iterator[None]:
    """While it is open, a file that is standard output (1) or standard error (2) gets a line at least every SILENT_S.

    A thread looks at its size twice in that time. A terminal or a pipe is left alone.
    """
    over = threading.Event()

    def watch() -> None:
        size, turns = os.fstat(descriptor).st_size, 0
        while not over.wait(SILENT_S / 2):
            turns += 1
            if size == os.fstat(descriptor).st_size:
                say(f"still running after {turns * SILENT_S / 120:g} min")
            size = os.fstat(descriptor).st_size

    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        threading.Thread(target=watch, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Progress:
    """How far a run is: a bar in a terminal, elsewhere a line each time it is shown."""

    def __init__(self, total: int, done: int):
        self._total, self._bar = total, None
        if has_rows(_OUTPUT):
            form = "step {n_fmt}/{total_fmt} |{bar}| {desc}"
            self._bar = _tqdm()(total=total, initial=done, file=_OUTPUT, dynamic_ncols=True, bar_format=form)

    def show(self, done: int, status: str) -> None:
        if self._bar is None:
            return print_line(f"step {done}/{self._total}: {status}")
        self._bar.n = done
        self._bar.set_description_str(printable(status))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no place is left to say it
        sys.stderr.write(text)
        sys.stderr.flush()


def printable(text: Any) -> str:
    """The text without passwords of URLs, and with control characters, which move the cursor, spelled out."""
    text = re.sub(r"(\w://+[^/\s:@]*:)[^/\s]+@", r"\1***@", str(text))
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def wrapped(line: str, first: str = "", others: str = "  ") -> str:
    """Breaks a line at the terminal's width, or at 120 columns; `first` begins the first one, `others` the rest."""
    width = max(40, shutil.get_terminal_size((120, 24)).columns)
    broken = textwrap.TextWrapper(width, first, others, break_long_words=False, break_on_hyphens=False)
    return broken.fill(line)


def one_of_several(host: str, index: int, count: int) -> None:
    """From now on this process's error messages begin with its name, and it exits without waiting for the others."""
    global _process, _lingers_s
    _process = f"host {host} (process {index} of {count}): "
    _lingers_s = LEADER_LINGERS_S if index == 0 else 0.0
    sys.excepthook = _end


def print_error(error: BaseException | str, kind: str = "error") -> None:
    """Prints a message on stderr, at once: those of several processes do not run into each other."""
    _write_error(f"{_process}{kind}: {printable(str(error) or type(error).__name__)}\n")


def print_note(text: str) -> None:
    """Prints a line on stderr, at once; may be called from any thread."""
    _write_error(f"{printable(text)}\n")


def leave(status: int) -> NoReturn:
    """Ends the process after an error. JAX would wait for the other processes, which may be waiting for this one."""
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
    """Writes out standard output's buffer, or drops it, so that Python's own attempt at exit does not fail."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


while (_free := os.open(os.devnull, os.O_RDWR)) <= 2:
    pass  # occupies closed standard files, so that none that is opened later takes their numbers
os.close(_free)
atexit.register(_give_up_stdout)
