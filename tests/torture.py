"""Kills a real run with SIGKILL at random moments, and proves that nothing is lost.

    python -m tests.torture
    python -m tests.torture kills=100 steps=6000 epochs=9 seed=1

Two runs of the same small model, `python -m train` in processes of their own: one is left alone; the other is killed at
moments that a seed chooses, and started again each time: one kill in ten while it starts, half of them when a save has
begun (a third of these at once), the others some steps after a checkpoint. A kill counts as one inside saving if it
leaves a checkpoint that is not complete. At the end the losses of all steps must be the same, bit for bit, and each
start must have gone on from the newest checkpoint that was complete.

Expect 5 to 10 minutes on two cores.
"""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.config import command_line
from runtime.terminal import RunError

ROOT = Path(__file__).resolve().parents[1]
# 0.1M parameters: a step takes some milliseconds, so that most of a life is not the start.
SMALL = """model.d_model=32 model.n_q_per_kv=1 model.n_kv=4 model.d_head=8 model.d_ff=64 mesh.d=2 mesh.t=1
    log_interval=1 training.tokens.batch=16 training.tokens.len=32""".split()
LONGEST_START_S = 600.0
POLL_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Torture:
    folder: str = "runs/torture"  # emptied first; holds both run folders and the log of each start
    seed: int = 0  # of the moments
    kills: int = 30  # of the run, by SIGKILL
    # of the run; it must last for all kills, each of which takes it forward by 3 checkpoint_interval or, on a busy
    # machine, more
    steps: int = 2000
    checkpoint_interval: int = 10  # steps
    epochs: int = 3  # passes over synthetic_dataset.zarr, of 688 steps each


@dataclass
class Count:
    kills: int = 0
    in_saving: int = 0  # these left a checkpoint that the killed process had not completed
    in_starting: int = 0  # before the first step
    restarts: int = 0
    lost_checkpoints: int = 0  # starts that went on from an older one than the newest complete one
    repeated_steps: int = 0


def main(config: Torture) -> None:
    """Kills a real run with SIGKILL at random moments, and compares it with one that was never disturbed."""
    count = torture(config)
    for field in dataclasses.fields(count):
        print(f"{field.name.replace('_', ' ')}: {getattr(count, field.name)}")
    print(f"the losses of all {config.steps} steps are bit for bit those of the run that was never disturbed")


def torture(config: Torture) -> Count:
    """Raises RunError if the runs differ, a checkpoint was lost, or a start failed."""
    for key in ("kills", "steps", "checkpoint_interval", "epochs"):
        if getattr(config, key) < 1:
            raise RunError(f"{key} is {getattr(config, key)}, expected 1 or more")
    folder = Path(config.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draw = random.Random(config.seed)

    whole = Life(config, "whole", 0)
    began = time.monotonic()
    whole.wait_for(lambda: whole.last_step() > 0)
    start_s = time.monotonic() - began
    whole.wait_for(whole.is_saving)
    began = time.monotonic()
    whole.wait_for(lambda: whole.newest_complete() > 0)
    save_s = time.monotonic() - began
    whole.end()

    count, newest = Count(), 0
    while count.kills < config.kills:
        if newest == config.steps:
            raise ended_early(config, count)
        life = Life(config, "tortured", count.restarts)
        kind = draw.choices(["starting", "saving", "stepping"], [1, 5, 4])[0]
        if kind == "starting":
            time.sleep(draw.uniform(0, start_s))
        else:
            saved = newest + draw.randint(0, 2) * config.checkpoint_interval
            life.wait_for(lambda life=life, saved=saved: life.newest_complete() >= saved)
            if kind == "saving":
                life.wait_for(life.is_saving)
                time.sleep(max(draw.uniform(-0.6, 1.2) * save_s, 0))
            else:
                step = saved + draw.randint(1, config.checkpoint_interval)
                life.wait_for(lambda life=life, step=step: life.last_step() >= step)
        if not life.kill():
            raise ended_early(config, count)
        count.kills += 1
        count.restarts += 1
        count.in_saving += life.is_saving()
        count.in_starting += life.last_step() == 0
        count.lost_checkpoints += life.lost(newest)
        newest = life.newest_complete()
        count.repeated_steps += max(life.last_step() - newest, 0)
        moment = "in a save" if life.is_saving() else "between saves" if life.last_step() else "while it started"
        print(f"kill {count.kills}: {moment}; last step {life.last_step()}, newest checkpoint {newest}", flush=True)

    if newest < config.steps:
        life = Life(config, "tortured", count.restarts)
        life.end()
        count.lost_checkpoints += life.lost(newest)
    differing = [step for step, loss in whole.losses().items() if life.losses().get(step) != loss]
    if differing or count.lost_checkpoints or len(life.losses()) != config.steps:
        raise RunError(
            f"{len(differing)} steps have another loss, the first {differing[:1]}; {len(life.losses())} of "
            f"{config.steps} steps are there; {count.lost_checkpoints} checkpoints were lost. {folder} has both runs "
            "and the log of each start."
        )
    return count


def ended_early(config: Torture, count: Count) -> RunError:
    return RunError(
        f"the run ended after {count.kills} of {config.kills} kills: raise steps, to "
        f"{6 * config.checkpoint_interval * (config.kills + 1)} say, and epochs if the data do not suffice"
    )


class Life:
    """One process of a run, from its start to its end or its kill."""

    def __init__(self, config: Torture, name: str, number: int):
        root, self._began = Path(config.folder).absolute(), time.time()
        self._folder, self._log = root / name, root / f"{name}.{number}.log"
        # What was compiled once is not compiled again: the same program, and a start takes seconds.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        overrides = (
            f"paths.root_working_dir={root}",
            f"paths.model_name={name}",
            f"training.steps={config.steps}",
            f"training.steps_for_lr={config.steps}",
            f"checkpoint_interval={config.checkpoint_interval}",
            f"eval_interval={config.steps}",
            f"flat_tokens.epochs={config.epochs}",
        )
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "train", *SMALL, *overrides],
                cwd=ROOT,
                env={**os.environ, **cache},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds or the process has ended. Raises RunError if it ended with a failure."""
        end = time.monotonic() + LONGEST_START_S
        while self._process.poll() is None and not condition():
            if time.monotonic() > end:
                self.kill()
                raise RunError(f"nothing happened for {LONGEST_START_S:g} s: {self._log}")
            time.sleep(POLL_S)
        if self._process.returncode:
            raise RunError(f"a start ended with status {self._process.returncode}: {self._log}")

    def end(self) -> None:
        """Waits for the end."""
        self.wait_for(lambda: False)

    def kill(self) -> bool:
        """Kills the process with all that it started; False if it had ended before."""
        if self._process.poll() is not None:
            return False
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return True

    def losses(self) -> dict[int, float]:
        try:
            lines = (self._folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return {}
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    def last_step(self) -> int:
        """The last step that this process has done; 0 while it starts."""
        steps = re.findall(r"^step (\d+)/\d+: loss", self._log.read_text(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def is_saving(self) -> bool:
        """Whether there is a checkpoint that this process has begun and not completed."""
        try:
            begun = [path for path in self._checkpoints() if path.stat().st_mtime >= self._began]
        except FileNotFoundError:  # one that an earlier process had begun is removed just now
            return False
        return any(not _is_complete(path) for path in begun)

    def newest_complete(self) -> int:
        return max((int(path.name) for path in self._checkpoints() if _is_complete(path)), default=0)

    def lost(self, newest: int) -> bool:
        """Whether the process went on from an older checkpoint than the newest complete one, or began anew."""
        if said := re.search(r"going on after step (\d+) of", self._log.read_text()):
            return int(said[1]) < newest
        return self.last_step() > 0 and newest > 0

    def _checkpoints(self) -> list[Path]:
        folder = self._folder / "checkpoints"
        return [path for path in folder.iterdir() if re.match(r"\d{10}", path.name)] if folder.is_dir() else []


def _is_complete(checkpoint: Path) -> bool:
    if not checkpoint.name.isdigit():  # a name that it has until it is complete
        return False
    try:
        return json.loads((checkpoint / "zarr.json").read_text())["attributes"].get("write_completed") is True
    except (FileNotFoundError, ValueError):
        return False


if __name__ == "__main__":
    command_line.run(main, Torture)
