"""The jobs of a sweep, one after the other, and the table of how each ended.

with Sweep() as sweep:
    for overrides in (["training.steps=5"], ["training.steps=10"]):
        with sweep.job(overrides) as job:
            job.config = ...
            train(job.config)
"""

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.terminal import columns, refusals

WIDTH = 120
COLUMNS = ("what differs", "loss", "validation", "tokens/s", "run folder")
NOT_KNOWN = "n/a"


@dataclass
class Job:
    overrides: Sequence[str]  # of the command line, this job's values in the place of the sweep's
    config: Any = None  # None as long as it is refused
    error: str = ""  # what ended it early


class Sweep:
    """Remembers the jobs and, where they are runs of a sweep, prints their table at the end, whatever ends them."""

    def __init__(self):
        self.has_table = False
        self._jobs: list[Job] = []

    @contextlib.contextmanager
    def job(self, overrides: Sequence[str]) -> Iterator[Job]:
        job = Job(overrides)
        self._jobs.append(job)
        try:
            yield job
        except BaseException as error:
            text = str(error) if isinstance(error, refusals()) else f"{type(error).__name__} {error}".strip()
            job.error = text.partition("\n")[0]
            raise

    def __enter__(self) -> "Sweep":
        return self

    def __exit__(self, *_) -> None:
        if self.has_table and _is_leader(self._jobs):
            print("\n".join(["", *table(self._jobs)]), flush=True)


def table(jobs: Sequence[Job]) -> list[str]:
    """A line for each job, the overrides that not all have, last losses, median speed and folder, and one for its
    error."""
    common = set.intersection(*(set(job.overrides) for job in jobs))
    rows = [COLUMNS]
    for job in jobs:
        differs = " ".join(text.lstrip("+") for text in job.overrides if text not in common)
        folder = None if job.config is None else run_folder(job.config)
        numbers = [NOT_KNOWN] * 3 if folder is None else _numbers(folder)
        rows.append((differs or "nothing", *numbers, "none" if folder is None else str(folder)))
    errors = ["", *(f"\n  error: {job.error}"[: WIDTH + 1] if job.error else "" for job in jobs)]
    return [line + error for line, error in zip(columns(rows), errors, strict=True)]


def run_folder(config: Any) -> Path:
    """Where a run leaves its metrics; with a URL as root_working_dir, `runs` on this disk."""
    root = config.paths.root_working_dir
    return Path("runs" if "://" in root else root) / config.paths.model_name


def _numbers(folder: Path) -> list[str]:
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError):  # the run wrote none, or was killed while it wrote the last
        return [NOT_KNOWN] * 3

    def values(name: str) -> list[float]:
        return [line[name] for line in lines if isinstance(line.get(name), int | float)]

    shown = [f"{values(name)[-1]:.4f}" if values(name) else NOT_KNOWN for name in ("loss", "validation_loss")]
    rates = values("tokens_per_s")
    return [*shown, f"{statistics.median(rates):,.0f}" if rates else NOT_KNOWN]


def _is_leader(jobs: Sequence[Job]) -> bool:
    if all(job.config is None or job.config.num_hosts == 1 for job in jobs):
        return True
    import jax

    return jax.process_index() == 0
