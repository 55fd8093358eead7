"""Printing: it never ends a run, what standard output does not take is said elsewhere, and names are only text."""

import fcntl
import io
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
import threading
import types
from unittest import mock

import pytest
from pages import ROOT
from parts import says

from runtime import terminal
from runtime.terminal import print_error, print_line, printable, progress, wrapped

# Says three lines, while the progress goes on, and writes a file: nothing that is opened later may stand for fd 1.
PROGRAM = """
import pathlib, sys
from runtime.terminal import Progress, keep_messages, print_line
folder = pathlib.Path(sys.argv[1])
keep_messages(folder)
with open(folder / "data", "w") as file:
    progress = Progress(3, 0)
    for step in (1, 2, 3):
        progress.show(step, "loss 7.25")
        print_line(f"line {step} " + "x" * 5000)
    progress.close()
    file.write("mine")
"""


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "| true", ">/dev/full 2>&1", ">&- 2>&-"])
def test_printing_never_ends_a_run(tmp_path, redirection):
    """A full disk, a closed standard output, a pipe that nobody reads: status 0, no traceback, and every line on
    standard error (which may be closed too) and in the run folder."""
    program = f"'{sys.executable}' -c \"$PROGRAM\" '{tmp_path}'"
    command = f"trap '' PIPE; {{ {program}; echo $? >'{tmp_path}/status'; }} {redirection}"
    env = {**os.environ, "PROGRAM": PROGRAM}
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (tmp_path / "status").read_text() == "0\n", done.stderr
    assert (tmp_path / "data").read_text() == "mine" and "Traceback" not in done.stderr
    said = ["step 1/3: loss 7.25", "line 1 ", "step 2/3: loss 7.25", "line 2 ", "step 3/3: loss 7.25", "line 3 "]
    kept = (tmp_path / "messages.txt").read_text().splitlines()
    if redirection != "| true":  # a pipe takes the first lines, until its reader has ended
        assert [line[:19].rstrip("x") for line in kept] == said
    assert kept[-1].startswith("line 3 ")
    if "2>" not in redirection:
        assert done.stderr.startswith("warning: standard output cannot be written (")
        assert done.stderr.splitlines()[1:] == kept


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_disk_that_has_room_again(tmp_path, monkeypatch, capsys):
    """Lines go to standard output again, and the next failure is said again."""
    monkeypatch.setattr(terminal, "_messages", tmp_path / "messages.txt")
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Full())
            print_line("one")
            print_line("two")
        print_line("three")
    warning = "warning: standard output cannot be written ([Errno 28] … one two"
    out, err = capsys.readouterr()
    assert out == "three\n" * 2 and says(f"{warning} {warning}", err) and err.count("\n") == 6
    assert (tmp_path / "messages.txt").read_text() == "one\ntwo\n" * 2


@pytest.mark.parametrize("arguments, last", [
    ("tools.cli --help", "clearshard {...} --help | --version"),
    ("tools.plan hardware=h200 hosts=1", "8 GPUs."),
])  # fmt: skip
def test_what_a_tool_says_is_not_lost(arguments, last):
    """It is on standard error, to the last line, with status 1 and without a traceback when Python ends."""
    module, *others = arguments.split()  # tools.cli is what an installed `clearshard` calls
    start = ["-c", f"from {module} import main; main()"] if module == "tools.cli" else ["-m", module]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *start, *others], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and done.stderr.endswith(f"{last}\n")
    assert "Traceback" not in done.stderr and done.stderr.startswith("warning: standard output cannot be written (")


def test_a_tool_whose_reader_has_enough():
    """When `| head` has read its line, nothing more is said."""
    program = "from runtime.terminal import print_line\nfor n in range(9999): print_line('x' * 99)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} | head -1"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("x" * 99 + "\n", "")


def test_a_terminal_without_rows_gets_lines():
    """mpirun's terminal is one, in which tqdm's bars show nothing; one with rows gets a bar."""
    program = "from runtime.terminal import Progress; bar = Progress(3, 0); bar.show(1, 'loss 7.25'); bar.close()"
    for rows, shown in ((0, "step 1/3: loss 7.25"), (24, "step 1/3 |")):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80 * (rows > 0), 0, 0))
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=theirs, check=True)
        assert shown in os.read(ours, 4096).decode()
        os.close(theirs)
        os.close(ours)


def test_a_signal_in_the_first_line():
    """tqdm makes no lock of its own, in which a KeyboardInterrupt would become an AttributeError."""
    program = (
        "import multiprocessing; from runtime.terminal import print_line\n"
        "def interrupted(): raise KeyboardInterrupt\n"
        "multiprocessing.RLock = interrupted; print_line('said')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("said\n", 0), done.stderr


@pytest.mark.parametrize("text, shown", [
    ("a\tb\nc", "a\tb\nc"),
    ("\x1b]0;title\x07\x1b[2Jgone", r"\x1b]0;title\x07\x1b[2Jgone"),
    ("over\rwritten\x08\x9b2J\x7f", r"over\x0dwritten\x08\x9b2J\x7f"),
    ("größer ×8 …", "größer ×8 …"),
    ("s3://me:se@cret@host/x, memory:///me:secret@x", "s3://me:***@host/x, memory:///me:***@x"),
    ("http://host:80/a@b and gs://bucket/y", "http://host:80/a@b and gs://bucket/y"),
])  # fmt: skip
def test_control_characters_are_spelled_out(capsys, text, shown):
    """A name or a text of others cannot clear the screen, write elsewhere or name the window; no password is
    printed."""
    assert printable(text) == shown
    print_line(text)
    print_error(text)
    assert capsys.readouterr() == (f"{shown}\n", f"error: {shown}\n")


@pytest.mark.parametrize("width", [80, 120])
def test_long_lines_are_broken(monkeypatch, width):
    """Lines break at blanks, at the terminal's width, indented; a path stays whole."""
    monkeypatch.setenv("COLUMNS", str(width))
    line = "a line of words " * 12 + "/" + "x" * 150
    lines = wrapped(line).split("\n")
    assert all(len(piece) <= width for piece in lines[:-1]) and len(lines[0]) > width - 10
    assert lines[-1] == "  /" + "x" * 150 and lines[1].startswith("  ")
    assert " ".join(piece.strip() for piece in lines) == line and wrapped("short") == "short"


def test_a_file_has_a_line_a_minute(monkeypatch, capsys, tmp_path):
    """A program that is silent for half of SILENT_S says that it runs, whatever it does; one that writes does not, nor
    one with a pipe. What a tool counts has a line a minute."""
    said, over = [], threading.Event()
    with (tmp_path / "log").open("w", buffering=1) as file:
        turns = iter(["", "a step\n", "", None])

        def wait(seconds):
            assert seconds == terminal.SILENT_S / 2
            if (text := next(turns)) is None:
                over.set()
                return True
            return bool(file.write(text) and False)

        threads = types.SimpleNamespace(Thread=threading.Thread, Event=lambda: mock.Mock(wait=wait))
        with monkeypatch.context() as patch:
            patch.setattr(terminal, "threading", threads)
            with terminal.heartbeat(file.fileno(), said.append):
                assert over.wait(600)
    assert said == ["still running after 0.5 min", "still running after 1.5 min"]
    read, write = os.pipe()
    with terminal.heartbeat(write, said.append):
        assert "heartbeat" not in [thread.name for thread in threading.enumerate()], "a pipe is watched"
        os.close(read)
    os.close(write)
    for number in progress(range(3), unit=" texts"):
        assert number < 3
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "SILENT_S", 0.0)
    for number in progress(range(3), unit=" texts"):
        assert number < 3
    assert "2 of 3 texts, 00:00\n" in capsys.readouterr().err
