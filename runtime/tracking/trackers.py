"""Trackers besides metrics.jsonl: TensorBoard, Weights & Biases, ClearML, trackio; those that the config asks for.

    with Trackers(config, run_folder, is_leader=True) as trackers:     # refuses what is not installed
        trackers.start(done_steps=0)
        trackers.put('{"step": 1, "time": 1.79e9, "loss": 7.59}\\n')   # never waits

Each is a process of its own (runtime/tracking/tracker_process.py) that a thread feeds from a bounded queue. So none can
stop or slow the training: one that fails, or takes no more lines, is named once, and metrics.jsonl has all lines
anyway.
"""

import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from runtime.terminal import RunError, print_line

# By the key of the config: the package, and what pip calls it.
PACKAGES = {
    "tensorboard": ("tensorboardX", "tensorboardX==2.6.5"),
    "wandb": ("wandb", "wandb==0.31.0"),
    "clearml": ("clearml", "clearml==2.1.12"),
    "trackio": ("trackio", "trackio==0.43.0"),
}
WAITING_LINES = 1000  # of metrics.jsonl, about a megabyte, for a tracker that is slow or still starting
LONGEST_WAIT_S = 60.0  # at the end of a run, for all trackers together


class Trackers:
    """The trackers that `config.tracking` names.

    Args:
      config: train.py's.
      run_folder: each tracker has a folder in it, by its name, with `tracker.log`: what its process prints.
      is_leader: the others start none.
    Raises:
      RunError: a package is not installed.
    """

    def __init__(self, config: Any, run_folder: Path, *, is_leader: bool):
        names = [name for name in PACKAGES if name in config.tracking.to]
        missing = [name for name in names if importlib.util.find_spec(PACKAGES[name][0]) is None]
        if missing:
            packages = " ".join(PACKAGES[name][1] for name in missing)
            raise RunError(
                f"tracking.to: {' and '.join(missing)} cannot be used, since the package is not installed: pip install "
                f"{packages} (all: pip install -r requirements-trackers.txt), or leave it out"
            )
        self._config, self._folder, self._names = config, run_folder, names if is_leader else []
        self._feeds: list[_Feed] = []

    def start(self, done_steps: int) -> None:
        """Starts them. Their curves continue; steps after `done_steps`, which an interrupted run left, are repeated."""
        run = {
            "project": self._config.tracking.project,
            "name": self._config.paths.model_name,
            "config": self._config.tree(),
            "start_step": done_steps,
        }
        for name in self._names:
            self._feeds.append(_Feed(name, {**run, "tracker": name, "folder": str((self._folder / name).absolute())}))

    def put(self, line: str) -> None:
        """Hands on a line of metrics.jsonl."""
        for feed in self._feeds:
            feed.put(line)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_) -> None:
        deadline = time.monotonic() + LONGEST_WAIT_S
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(deadline)


class _Feed:
    """A tracker's process and the thread that feeds it."""

    def __init__(self, name: str, run: dict[str, Any]):
        self._name, self._log = name, Path(run["folder"]) / "tracker.log"
        self._lines: queue.Queue[str | None] = queue.Queue(WAITING_LINES)
        self._lines.put(json.dumps(run) + "\n")
        self._process: subprocess.Popen | None = None
        self._is_left_out = False  # told, so not told again
        self._thread = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._leave_out(f"takes no more lines ({WAITING_LINES} are waiting)")

    def end(self) -> None:
        """No more lines come. Where there is no place to say so, what waits is given up."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            self._kill()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._leave_out(f"had not taken everything {LONGEST_WAIT_S:g} s after the end of the run")
            self._kill()

    def _feed(self) -> None:
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    # -P: else the modules of this folder would be found under the names of packages.
                    [sys.executable, "-P", str(Path(__file__).with_name("tracker_process.py"))],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,  # an interrupt from the keyboard ends the training, and that the tracker
                )
            with self._process.stdin as lines:
                for line in iter(self._lines.get, None):
                    lines.write(line)
                    lines.flush()
        except OSError as error:  # its process died, or could not be started
            reason = str(error)
        else:
            reason = ""
        status = self._process.wait() if self._process is not None else None
        if reason or status:
            self._leave_out(f"failed ({self._last_words() or reason})")

    def _last_words(self) -> str:
        """The last line of what its process printed."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")

    def _leave_out(self, why: str) -> None:
        if not self._is_left_out:
            self._is_left_out = True
            print_line(
                f"warning: tracking.{self._name} {why}. Training goes on; metrics.jsonl has all lines, and\n"
                f"  {self._log} what {self._name} says."
            )

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
