"""One tracker in a process of its own: takes lines of metrics.jsonl from its standard input until that ends.

The first line is the run: `tracker`, `folder` (the tracker's own, in the run folder), `project`, `name`, `config`,
`start_step` and `offline`. runtime/tracking/trackers.py starts this file; what a tracker prints, patches, or waits for
does not reach the training, and a training that is killed leaves a tracker that has all lines and ends by itself.
"""

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Log = Callable[[int, float, dict[str, float]], None]  # of a step, its time (s since 1970), and numbers by their names


@contextlib.contextmanager
def tensorboard(run: Mapping[str, Any]) -> Iterator[Log]:
    """Event files, which `tensorboard --logdir` of the run folder, or of the folder of all runs, shows."""
    from tensorboardX import SummaryWriter

    # Hides what an interrupted run wrote of later steps, which are repeated. Its file is named by the second: one that
    # is started within the same would be written over it.
    first, suffix = run["start_step"] + 1, f".{run['start_step']:010}"
    with SummaryWriter(run["folder"], purge_step=first, flush_secs=10, filename_suffix=suffix) as writer:
        writer.add_text("config", f"```json\n{json.dumps(run['config'], indent=1)}\n```", run["start_step"])

        def log(step: int, time: float, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step, walltime=time)

        yield log


@contextlib.contextmanager
def wandb(run: Mapping[str, Any]) -> Iterator[Log]:
    """Weights & Biases. Steps are a metric of their own: its count cannot go back to where a resumed run begins."""
    import wandb

    identity = remembered(run, lambda: uuid.uuid4().hex[:8])
    with wandb.init(
        project=run["project"],
        name=run["name"],
        id=identity,
        resume="allow",
        dir=Path(run["folder"]).parent,  # in which it makes a folder `wandb`, which is ours
        config=run["config"],
        settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
    ) as opened:
        opened.define_metric("step", hidden=True)
        opened.define_metric("*", step_metric="step")
        yield lambda step, time, values: opened.log({"step": step, **values})


@contextlib.contextmanager
def clearml(run: Mapping[str, Any]) -> Iterator[Log]:
    """ClearML. Offline, each start leaves a session of its own, a zip file."""
    offline = os.environ.get("CLEARML_OFFLINE_MODE", "0").lower() not in ("0", "false")
    if offline:
        os.environ["CLEARML_CACHE_DIR"] = run["folder"]
    from clearml import Task

    Task.set_offline(offline)
    known = remembered(run)
    task = Task.init(
        run["project"],
        run["name"],
        reuse_last_task_id=known or False,
        continue_last_task=0 if known else False,  # 0: our steps count on where they stood
        auto_connect_arg_parser=False,
        auto_connect_frameworks={"detect_repository": False},
        auto_connect_streams=False,
        auto_resource_monitoring=False,
    )
    if not offline:
        remembered(run, lambda: task.id)
    task.connect_configuration(run["config"], name="config")
    logger = task.get_logger()

    def log(step: int, time: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            title, _, series = name.partition("/")
            logger.report_scalar(title, series or title, value, step)

    try:
        yield log
    finally:
        task.close()


@contextlib.contextmanager
def trackio(run: Mapping[str, Any]) -> Iterator[Log]:
    """trackio: a database in the run folder, or where TRACKIO_DIR says."""
    os.environ.setdefault("TRACKIO_DIR", run["folder"])
    import trackio

    measured = {"auto_log_gpu": False, "auto_log_cpu": False}
    trackio.init(run["project"], name=run["name"], config=run["config"], resume="allow", embed=False, **measured)
    try:
        yield lambda step, time, values: trackio.log(values, step=step)
    finally:
        trackio.finish()


TRACKERS = {each.__name__: each for each in (tensorboard, wandb, clearml, trackio)}


def remembered(run: Mapping[str, Any], new: Callable[[], str] | None = None) -> str | None:
    """What the tracker calls the run, kept in a file for when it is resumed; `new` names it the first time."""
    file = Path(run["folder"]) / "id"
    if not file.exists() and new is not None:
        file.write_text(new(), encoding="utf-8")
    return file.read_text(encoding="utf-8") if file.exists() else None


def main() -> None:
    # No package shall find the lines, or a terminal to ask at, on file descriptor 0.
    with open(os.dup(0), encoding="utf-8") as lines:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        run = json.loads(next(lines))
        with TRACKERS[run["tracker"]](run) as log:
            for line in lines:
                if not line.endswith("\n"):
                    break  # the training was killed while it wrote it
                record = json.loads(line)
                step, time = record.pop("step"), record.pop("time")
                # What is null is not known; "NaN" and "Infinity" are numbers that JSON cannot write.
                log(step, time, {name: float(value) for name, value in record.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
