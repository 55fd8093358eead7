"""A run's followers: a process for its report, and one for each tracker of its config.

    with Followers(config, run_folder, is_leader=True) as followers:     # refuses what is not installed
        followers.start()
        followers.name_failed()                  # now and then: each one that has failed, once

They read metrics.jsonl (runtime/tracking/follow.py), so none can stop or slow the training, or lose a line of it.
"""

import importlib.util
import subprocess
import time
from pathlib import Path
from typing import Any

from runtime import beside
from runtime.files import read_text
from runtime.terminal import RunError, print_line, wrapped
from runtime.tracking.recorded import read_run
from runtime.tracking.trackers import PACKAGES

LONGEST_WAIT_S = 60.0  # at the end of a run, for all followers together


class Followers:
    """Only the leader starts followers. What one prints is in `<run folder>/<follower>.log`. is_known: whether the
    tools compute the run's model. Raises RunError: a tracker's package is not installed."""

    def __init__(self, config: Any, run_folder: Path, *, is_leader: bool, is_known: bool = True):
        names = config.tracking.to
        if missing := [name for name in names if importlib.util.find_spec(PACKAGES[name][0]) is None]:
            packages = " ".join(PACKAGES[name][1] for name in missing)
            raise RunError(f"tracking.to: {' and '.join(missing)}: pip install {packages}, or leave it out")
        self._folder, self._names = run_folder, ["report", *names] if is_leader else []
        self._is_known = is_known
        self._running: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Starts them. A tracker's curves go on where they ended; steps that the run repeats are repeated."""
        for name in self._names:
            arguments = [str(self._folder), f"to={name}", "run=true"]
            try:
                with self._log(name).open("ab") as log:
                    self._running[name] = beside.start("runtime.tracking.follow", arguments, log)
            except OSError as error:
                self._leave_out(name, f"cannot be started ({error})")

    def name_failed(self) -> None:
        """Names those that have failed since the last time."""
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                beside.hang_up(self._running.pop(name))
                self._leave_out(name, self._failure(name, process.returncode))

    def __enter__(self) -> "Followers":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_) -> None:
        """Lets them send what is left, and prints what the run has reached."""
        if not self._running:
            return
        self.name_failed()
        deadline = time.monotonic() + LONGEST_WAIT_S
        for process in self._running.values():
            beside.hang_up(process)
        for name, process in self._running.items():
            status = beside.end(process, max(0.0, deadline - time.monotonic()))
            if status is None:
                self._leave_out(name, f"was not done {LONGEST_WAIT_S:g} s after the end of the run")
            elif status:
                self._leave_out(name, self._failure(name, status))
        if error_type is None:
            print_line("\n".join(map(wrapped, reached(self._folder, self._is_known))))

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _failure(self, name: str, status: int) -> str:
        """Its failure, with the last line that it printed."""
        try:
            lines = read_text(self._log(name), errors="replace").split("\n")
        except OSError:
            lines = []
        said = (line.strip()[:200] for line in reversed(lines) if line.strip())
        return f"failed ({next(said, f'status {status}')})"

    def _leave_out(self, name: str, why: str) -> None:
        print_line(
            f"warning: {name} {why}. The run is not affected: metrics.jsonl has all lines, "
            f"{self._log(name)} what {name} says.\n"
            f"  To catch up: python -m runtime.tracking.follow {self._folder} to={name} once=true"
        )


def reached(folder: Path, is_known: bool) -> list[str]:
    """Lines on what a run has reached, where its page is, and what to do with it."""
    run = read_run(folder)
    steps = run.config.get("training.steps")
    last = {name: value for line in run.lines for name, value in line.items() if value is not None}
    if not run.lines:
        return []
    done = f"{run.name}: step {last['step']:,}" + (f" of {steps:,}" if steps else "")
    for name in ("loss", "validation_loss"):
        if name in last:
            value = f"{last[name]:.4f}" if isinstance(last[name], float) else last[name]
            done += f", {name.replace('_', ' ')} {value}"
    page = folder / "report.html"
    has_texts = (folder / "tokenizer_record.json").exists()
    decodes = f"python -m tools.generate {folder} "
    decodes += "writes text." if has_texts else "prompt_ids=[1] output=ids draws ids."
    if not is_known:
        decodes = "its program was changed: tools.generate and tools.convert say what they need for it."
        decodes += f" python -m tools.score {folder} FILE program=run scores it." if has_texts else ""
    return [
        f"{done}.",
        *([f"Its page, for a browser: {page}"] if page.exists() else []),
        f"Next: python -m tools.compare {folder} OTHER_RUN lays runs over one another; {decodes}",
    ]
