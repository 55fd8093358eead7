"""report.html in the run folder: curves, costs, configuration and environment in one page, renewed as the run goes on.

    write_report("runs/first")                     # from the files of the run folder, and from nothing else
    with Report("runs/first", is_leader=True):     # again and again, in a thread
        train()

A page is built from what the folder holds (metrics.jsonl, config.yaml, environment.json, samples.txt), so that it can
be written again at any time: python -m tools.compare runs/first.
"""

import os
import platform
import socket
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from runtime.terminal import RunError, print_line
from runtime.tracking.files import write_whole
from runtime.tracking.recorded import read_run
from runtime.tracking.report_page import report_page

INTERVAL_S = 60.0  # from one writing to the next, at least
LARGEST_SHARE = 0.01  # of the time that goes into writing: a long run's page takes longer, and is written less often
LONGEST_WAIT_S = 30.0  # for the last one, at the end of a run
PACKAGES = ("jax", "jaxlib", "numpy", "zarr", "hydra-core", "libtpu", "jax-cuda13-plugin")


def environment() -> dict[str, Any]:
    """What the run runs on, as JSON values."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    installed = {package: _version(package) for package in PACKAGES}
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": socket.gethostname(),
        "hosts": jax.process_count(),
        "devices": f"{len(devices)} × {', '.join(kinds)} ({jax.default_backend()})",
        "cpu_cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: version for package, version in installed.items() if version},
        "command": " ".join(sys.orig_argv),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def write_report(folder: str | Path) -> Path:
    """Writes report.html into a run folder, all or nothing; returns its path.

    Raises:
      RunError: the folder has no metrics.
    """
    page = Path(folder) / "report.html"
    write_whole(page, report_page(read_run(folder)))
    return page


class Report:
    """Keeps report.html up to date, in a thread: every INTERVAL_S, less often where it takes long, and at the end.

    That it cannot be written stops nothing and is said once. A disk may be full for a moment, so it is tried again;
    what is not installed stays so.
    """

    def __init__(self, folder: str | Path, *, is_leader: bool):
        self._folder = Path(folder)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._write, name="report", daemon=True) if is_leader else None

    def __enter__(self) -> "Report":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(LONGEST_WAIT_S)
            if self._thread.is_alive():
                print_line(
                    f"{self._folder / 'report.html'} is given up: it was not written within {LONGEST_WAIT_S:g} s."
                )

    def _write(self) -> None:
        is_last, is_said, wait_s = False, False, INTERVAL_S
        while not is_last:
            is_last = self._end.wait(wait_s)
            begin = time.perf_counter()
            try:
                write_report(self._folder)
            except ImportError as error:
                self._warn(f"{error} (pip install -r requirements-cpu.txt). Training goes on.")
                return
            except (OSError, RunError) as error:
                if not is_said:
                    self._warn(f"{error}. Training goes on, and it is tried again.")
                is_said = True
            wait_s = max(INTERVAL_S, (time.perf_counter() - begin) / LARGEST_SHARE)

    def _warn(self, why: str) -> None:
        print_line(f"warning: {self._folder / 'report.html'} is not written: {why}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
