"""Processes beside a run: those that follow its metrics, and the one that tokenizes its text.

process = start("runtime.tracking.follow", ["runs/first", "to=report", "run=true"], output=log)
status = end(process, longest_wait_s=60)        # None: it had to be killed
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def start(module: str, arguments: Sequence[str], output: Any) -> subprocess.Popen:
    """Starts `python -m module`. The end of its standard input tells it that the run is over, however the run ends."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: the run's starting folder holds no packages of ours
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # an interrupt from the keyboard ends the run, and that ends this
    )


def hang_up(process: subprocess.Popen) -> None:
    """Tells the process that the run is over."""
    assert process.stdin is not None
    process.stdin.close()


def end(process: subprocess.Popen, longest_wait_s: float) -> int | None:
    """The process's status, once it has ended; None if it had to be killed, with the processes that it started."""
    hang_up(process)
    try:
        return process.wait(longest_wait_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
