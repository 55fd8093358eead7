"""Follows a run's metrics.jsonl: sends its lines to a tracker, or keeps report.html up to date.

    python -m runtime.tracking.follow runs/first to=wandb              # until Ctrl-C: what the run writes, as it comes
    python -m runtime.tracking.follow runs/first to=wandb once=true    # what is there now
    python -m runtime.tracking.follow runs/first to=report             # report.html every minute, and step.svg

A run starts one for its report and one for each tracker of its config (runtime/tracking/followers.py). They can also be
started by hand, later or on another machine that sees the folder. <run folder>/<tracker>/sent has the time of the last
line that was sent: no line is left out, and only what was sent just before this process was killed is sent twice.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.files import open_file, parse_yaml, read_text, write_whole
from runtime.terminal import RunError, print_error
from runtime.tracking.hlo_graph import draw
from runtime.tracking.recorded import numbers, record_of
from runtime.tracking.report import write_report
from runtime.tracking.trackers import TRACKERS, Tracked

POLL_S = 1.0  # from one look at metrics.jsonl to the next
INTERVAL_S = 60.0  # from one report to the next, at least
LARGEST_SHARE = 0.01  # share of the time for reports: a long run's takes longer, and comes less often
USAGE = "python -m runtime.tracking.follow RUN_FOLDER to=TRACKER [once=true], where TRACKER is one of "

IsOver = Callable[[float], bool]  # waits so many seconds, less when it becomes true


def send(folder: Path, to: str, is_over: IsOver) -> None:
    """Sends all lines that were not sent yet to a tracker, until it is over and none is left."""
    while not (folder / "metrics.jsonl").exists():
        if is_over(POLL_S):
            return
    while not _send(folder, to, is_over):
        pass  # a resumed run has replaced the file


def _send(folder: Path, to: str, is_over: IsOver) -> bool:
    """Sends this file's lines. Returns whether it is over."""
    mark = folder / to / "sent"
    mark.parent.mkdir(parents=True, exist_ok=True)
    sent = float(read_text(mark)) if mark.exists() else None
    with contextlib.ExitStack() as opened, open_file(folder / "metrics.jsonl") as file:
        log, is_there, rest, wait_s = None, sent is None, b"", 0.0
        while True:
            over, latest = is_over(wait_s), None
            *lines, rest = (rest + file.read()).split(b"\n")
            for record in filter(None, map(record_of, lines)):
                if sent is not None and record["time"] <= sent:
                    is_there |= record["time"] == sent
                    continue
                if log is None:  # where the last line that was sent is gone, later ones are repeated
                    log = opened.enter_context(TRACKERS[to](tracked(folder, to, record["step"], not is_there)))
                log(record["step"], record["time"], numbers(record))
                latest = record["time"]
            if latest is not None:
                write_whole(mark, repr(latest))
            if os.stat(folder / "metrics.jsonl").st_ino != os.fstat(file.fileno()).st_ino:
                return False
            if over:
                return True
            wait_s = POLL_S


def tracked(folder: Path, to: str, first_step: int, is_repeated: bool) -> Tracked:
    """Describes the run to trackers, from its config.yaml."""
    config = parse_yaml(read_text(folder / "config.yaml"))
    tracking, name = config["tracking"], config["paths"]["model_name"]
    about = {"project": tracking["project"], "config": config}
    return Tracked(folder / to, name, **about, first_step=first_step, is_repeated=is_repeated)


def keep_report(folder: Path, _: str, is_over: IsOver) -> None:
    """Draws step.svg once, and writes report.html again and again. It reports a full disk and tries again. Raises
    OSError, RunError: the last report, when it is over, cannot be written."""
    os.nice(10)  # training first
    draw(folder)
    wait_s = INTERVAL_S
    while True:
        over, began = is_over(wait_s), time.perf_counter()
        try:
            write_report(folder)
        except (OSError, RunError) as error:
            if over:
                raise
            print_error(error, "warning")
        if over:
            return
        wait_s = max(INTERVAL_S, (time.perf_counter() - began) / LARGEST_SHARE)


def main(arguments: list[str]) -> None:
    """arguments: a run folder, to=, once=true; run=true of the run that starts this process."""
    # A run of a sweep has a folder such as runs/x_training.learning_rate=1e-3.
    keys = [text for text in arguments if text.partition("=")[0] in ("to", "once", "run")]
    options, folders = dict(text.split("=", 1) for text in keys), [Path(text) for text in arguments if text not in keys]
    to = options.pop("to", "")
    targets: dict[str, Any] = {**dict.fromkeys(TRACKERS, send), "report": keep_report}
    if len(folders) != 1 or to not in targets:
        raise RunError(f"expected {USAGE}{', '.join(targets)}; got {' '.join(arguments) or 'nothing'}")
    if not folders[0].is_dir():
        raise RunError(f"{folders[0]} is no folder: expected that of a run, runs/NAME")
    if options.get("run") == "true":
        # The run holds the other end of standard input, which is closed however it ends. No package shall read it.
        ends = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        targets[to](folders[0], to, lambda seconds: bool(select.select([ends], [], [], seconds)[0]))
    else:
        stop, once = threading.Event(), options.get("once") == "true"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        targets[to](folders[0], to, lambda seconds: once or stop.wait(seconds))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RunError as error:
        print_error(error)
        sys.exit(1)
