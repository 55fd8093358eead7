"""Trackers besides metrics.jsonl: TensorBoard, Weights & Biases, ClearML, trackio.

with TRACKERS["wandb"](run) as log:          # in a process of its own: see runtime/tracking/follow.py
    log(step, time, {"loss": 7.59})
"""

import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.files import read_text

# The config's key -> the package, and pip's requirement.
PACKAGES = {
    "tensorboard": ("tensorboardX", "tensorboardX==2.6.5"),
    "wandb": ("wandb", "wandb==0.31.0"),
    "clearml": ("clearml", "clearml==2.1.12"),
    "trackio": ("trackio", "trackio==0.43.0"),
}
Log = Callable[[int, float, dict[str, float]], None]  # log(step, its time in s since 1970, numbers by name)


@dataclass(frozen=True)
class Tracked:
    """A run as a tracker needs to know it."""

    folder: Path  # the tracker's own, in the run folder
    name: str
    project: str
    config: dict[str, Any]
    first_step: int  # the first step that is sent now
    is_repeated: bool  # whether that step, and later ones, were sent before: the run was resumed

    def remembered(self, new: Callable[[], str] | None = None) -> str | None:
        """The tracker's name for the run, kept in a file for a resumed run; `new` gives it the first time."""
        file = self.folder / "id"
        if not file.exists() and new is not None:
            file.write_text(new(), encoding="utf-8")
        return read_text(file) if file.exists() else None


@contextlib.contextmanager
def tensorboard(run: Tracked) -> Iterator[Log]:
    """Event files, which `tensorboard --logdir` of the run folder, or of the folder of all runs, shows."""
    from tensorboardX import SummaryWriter

    # Hides what was sent of steps that are repeated. Files are named by the second: the suffix tells two of one apart.
    purged = run.first_step if run.is_repeated else None
    named = {"purge_step": purged, "filename_suffix": f".{time.time_ns()}"}
    # flush_secs: how long the writer's thread waits for a value; with 0 it would keep a core busy.
    with SummaryWriter(str(run.folder), flush_secs=0.05, **named) as writer:
        writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```", run.first_step)

        def log(step: int, time: float, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step, walltime=time)

        yield log


@contextlib.contextmanager
def wandb(run: Tracked) -> Iterator[Log]:
    """Weights & Biases. Steps are a metric: its own count cannot go back to where a resumed run begins."""
    import wandb

    with wandb.init(
        project=run.project,
        name=run.name,
        id=run.remembered(lambda: uuid.uuid4().hex[:8]),
        resume="allow",
        dir=run.folder.parent,  # in which it makes a folder `wandb`, which is ours
        config=run.config,
        settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
    ) as opened:
        opened.define_metric("step", hidden=True)
        opened.define_metric("*", step_metric="step")
        yield lambda step, time, values: opened.log({"step": step, **values})


@contextlib.contextmanager
def clearml(run: Tracked) -> Iterator[Log]:
    """ClearML. Offline, each start leaves a session, a zip file."""
    offline = os.environ.get("CLEARML_OFFLINE_MODE", "0").lower() not in ("0", "false")
    if offline:
        os.environ["CLEARML_CACHE_DIR"] = str(run.folder)
    from clearml import Task

    Task.set_offline(offline)
    known = run.remembered()
    task: Any = Task.init(
        run.project,
        run.name,
        reuse_last_task_id=known or False,
        continue_last_task=0 if known else False,  # 0: our steps count on where they stood
        auto_connect_arg_parser=False,
        auto_connect_frameworks={"detect_repository": False},
        auto_connect_streams=False,
        auto_resource_monitoring=False,
    )
    if not offline:
        run.remembered(lambda: task.id)
    task.connect_configuration(run.config, name="config")
    logger = task.get_logger()

    def log(step: int, time: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):  # it would show 0
                logger.report_scalar(title, series or title, value, step)

    try:
        yield log
    finally:
        task.close()


@contextlib.contextmanager
def trackio(run: Tracked) -> Iterator[Log]:
    """trackio: a database in the run folder, or where TRACKIO_DIR says."""
    os.environ.setdefault("TRACKIO_DIR", str(run.folder))
    import trackio

    alone: Any = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    trackio.init(run.project, name=run.name, config=run.config, resume="allow", **alone)
    try:
        yield lambda step, time, values: trackio.log(values, step=step)
    finally:
        trackio.finish()


TRACKERS = {tracker.__name__: tracker for tracker in (tensorboard, wandb, clearml, trackio)}
