"""Ends real runs with signals at random moments, and takes from them disk, files and stores: nothing may be lost.

    python -m tests.torture                          # 150 signals, then each fault; half an hour on two cores
    python -m tests.torture kills=20 faults=[] seed=1
    python -m tests.torture program=train_any         # adapters, on a model that train.py trains first

Runs of the same small model are ended again and again, and started again until they reach their last step: by SIGKILL,
SIGTERM and SIGINT, while they start, compile, step, save, remove old checkpoints, validate, resume and end. A life is a
fork of this process, which has imported all that a run imports, and XLA is asked to compile quickly.

No start may go on from an older checkpoint than the newest complete one; a status says what happened; and in the end
the losses of all steps are bit for bit those of a run that was left alone. A fault, which every second life has:
`disk`, a full file system; `file_size`, a limit as `ulimit -f` sets it; `descriptors`, few open files; `store`, an
object store that is slow, answers 503 or cuts connections.
"""

import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime import program
from runtime.config import command_line
from runtime.terminal import RunError

# 0.1M parameters: a step takes some milliseconds, so that most of a life is not the start.
MODEL = "model.d_model=32", "model.n_q_per_kv=1", "model.n_kv=4", "model.d_head=8", "model.d_ff=64"
SMALL = (
    "mesh.d=2", "mesh.t=1",
    "training.tokens.batch=16", "training.tokens.len=32", "log_interval=1", "validation_batches=3", "eval_interval=10",
    "checkpoint_interval=5", "checkpoint.keep_last=2", "training.steps=60", "training.steps_for_lr=60",
)  # fmt: skip
FINETUNE = (
    "--config-name=finetune_smollm2", "flat_tokens.filespec=synthetic_dataset.zarr", "lora.rank=2", "lora.dropout=0.1",
    "flat_tokens.sequence_packing=true", "training.ema_decay=0.9", "training.microbatches=2",
    "training.batch_doubles_at=[20]",
)  # fmt: skip
STEPS, LONGEST_S = 60, 600
MOMENTS = {"starting": 3, "stepping": 3, "saving": 4, "saved": 2, "validating": 1, "ending": 2}
SIGNALS = {signal.SIGKILL: 6, signal.SIGTERM: 3, signal.SIGINT: 1}
# What a life ends with: its end, stopped and saved, interrupted before there was anything to save.
STATUSES = {
    signal.SIGKILL: {0, -signal.SIGKILL},
    signal.SIGTERM: {0, 75, -signal.SIGTERM},
    signal.SIGINT: {0, 75, 130, -signal.SIGINT},
}
FAULTS = ("disk", "file_size", "descriptors", "store")


@dataclass(frozen=True, kw_only=True)
class Torture:
    folder: str = "runs/torture"  # emptied first; holds the run folders and the log of each life
    program: Literal["train", "train_any"] = "train"  # whose runs they are
    seed: int = 0  # of the moments and the signals
    kills: int = 150  # signals
    faults: tuple[str, ...] = FAULTS  # each in turn, three runs with it


def main(config: Torture) -> None:
    """Ends runs at random moments and takes their disk from them, and compares them with one that was left alone."""
    folder = Path(config.folder).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    draw = random.Random(config.seed)
    if config.program == "train_any":
        Run(folder, "base").live().end()
        Run.program, Run.keys = "train_any", (*FINETUNE, f"initial_weights={folder}/base")
    whole, began = Run(folder, "whole"), time.monotonic()
    life = whole.live()
    life.wait_for(lambda: whole.last_step(life) > 0)
    start_s = time.monotonic() - began
    life.end()

    counts, number = Counter(), 0
    while counts["signals"] < config.kills:
        run, number = Run(folder, f"tortured-{number}"), number + 1
        while not run.reached_end() and counts["signals"] < config.kills:
            _end_a_life(run, draw, start_s, counts)
        run.finish(whole)
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    for fault in config.faults:
        for number in range(3):
            print(f"{fault}: {_with_fault(folder, fault, number, whole, draw)}", flush=True)
    print(f"no checkpoint was lost, and the losses of all {STEPS} steps are bit for bit those of a run left alone")


def _end_a_life(run: "Run", draw: random.Random, start_s: float, counts: Counter) -> None:
    moment = draw.choices(list(MOMENTS), MOMENTS.values())[0]
    number = draw.choices(list(SIGNALS), SIGNALS.values())[0]
    newest = run.newest_complete()
    life = run.live()
    if moment == "starting":
        time.sleep(draw.uniform(0, start_s))
    elif moment == "saving":
        life.wait_for(lambda: run.is_saving(life))
        time.sleep(draw.choice([0, draw.uniform(0, 0.05)]))
    elif moment == "saved":
        life.wait_for(lambda: run.newest_complete() > newest)
    else:
        step = {"stepping": newest + draw.randint(1, 9), "validating": -(-(newest + 1) // 10) * 10, "ending": STEPS}
        life.wait_for(lambda: run.last_step(life) >= min(step[moment], STEPS))
        time.sleep(draw.uniform(0, 0.5 if moment == "ending" else 0.02))
    life.send(number)
    if life.status not in STATUSES[number]:
        raise RunError(f"a life that got {number.name} while {moment} ended with status {life.status}: {life.log}")
    run.lost_nothing(life, newest)
    if life.status == 75 and run.last_step(life) > run.newest_complete():
        raise RunError(f"stopped after step {run.last_step(life)}, saved step {run.newest_complete()}: {life.log}")
    counts.update(["signals", moment, number.name] if life.status else ["signals", "came too late"])


def _with_fault(folder: Path, fault: str, number: int, whole: "Run", draw: random.Random) -> str:
    """Lives with the fault and lives without take turns until the run is at its end."""
    statuses = []
    with ExitStack() as stack:
        run = Run(folder, f"{fault}-{number}", *_place(stack, folder, fault, draw.randrange(10**6)))
        while not run.reached_end():
            newest = run.newest_complete()
            if len(statuses) % 2 and fault == "disk":
                subprocess.run(["mount", "-o", "remount,size=1g", "tmpfs", str(run.folder.parent)], check=True)
            life = run.live({} if len(statuses) % 2 else _limits(fault, draw))
            life.wait_for(lambda life=life: False, refused=True)
            statuses.append(life.status)
            if len(statuses) > 40:
                raise RunError(f"{fault}: 40 lives, and the run is not at its end: {life.log}")
            text = life.log.read_text()
            if life.status not in (0, 1) or "Traceback" in text or (life.status and "error: " not in text):
                raise RunError(f"a life with the fault {fault} ended with status {life.status}: {life.log}")
            run.lost_nothing(life, newest)
        run.finish(whole)
    return f"statuses {statuses}"


def _limits(fault: str, draw: random.Random) -> dict[int, int]:
    if fault == "file_size":
        return {resource.RLIMIT_FSIZE: draw.choice([500, 3_000, 12_000, 60_000])}
    return {resource.RLIMIT_NOFILE: draw.choice([16, 24, 40, 64])} if fault == "descriptors" else {}


@contextmanager
def _small_disk(place: Path) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def _place(stack: ExitStack, folder: Path, fault: str, seed: int) -> tuple[str, ...]:
    """Overrides that say where the run is, if not in the folder."""
    if fault == "disk":
        place = folder / f"small_disk_{seed}"
        stack.enter_context(_small_disk(place))
        return (f"paths.root_working_dir={place}",)
    if fault != "store":
        return ()
    # In a process of its own: a fork must not copy the server's threads.
    command = [sys.executable, "-m", "tests.torture", "serve", str(seed)]
    server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(server.kill)
    assert server.stdout is not None
    os.environ |= json.loads(server.stdout.readline())
    return ("paths.root_working_dir=s3://bucket",)


def serve(seed: int) -> None:
    """An object store, until it is killed, of whose requests one in ten is slow, refused or cut."""
    import boto3
    from moto.server import ThreadedMotoServer

    from tests.faulty_proxy import FaultyProxy
    from tests.object_store import ENVIRONMENT

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    server, draw = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False), random.Random(seed)
    server.start()
    whole = "http://{}:{}".format(*server.get_host_and_port())
    os.environ |= ENVIRONMENT
    boto3.client("s3", endpoint_url=whole).create_bucket(Bucket="bucket")
    with FaultyProxy(whole, hang_s=1) as proxy:
        proxy.fault = lambda *_: (
            draw.choice(["hang", "503", "500", "cut", "cut answer"]) if draw.random() < 0.1 else None
        )
        print(json.dumps({**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url, "WHOLE_STORE": whole}), flush=True)
        signal.pause()


class Run:
    """A run folder and the lives that it had."""

    program, keys = "train", MODEL

    def __init__(self, folder: Path, name: str, *overrides: str):
        self.name, self.logs, self.lives = name, folder, 0
        self.overrides = (f"paths.root_working_dir={folder}", f"paths.model_name={name}", *overrides)
        place = self.overrides[-1 if overrides else 0].partition("=")[2]
        self.folder = None if "://" in place else Path(place) / name  # None: checkpoints are in the object store
        self.metrics = (self.folder or Path("runs") / name) / "metrics.jsonl"
        if not self.folder:
            shutil.rmtree(self.metrics.parent, ignore_errors=True)

    def live(self, limits: dict[int, int] | None = None) -> "Life":
        self.lives += 1
        if self.folder:  # as if the profile and the picture were there: half of a small run's time goes into these
            (self.folder / "profile").mkdir(parents=True, exist_ok=True)
            (self.folder / "step.svg").touch()
        overrides, log = [*SMALL, *self.keys, *self.overrides], self.logs / f"{self.name}.{self.lives}.log"
        trainer = program.load(self.program)
        return Life(trainer.main, trainer.Config, overrides, log, limits or {})

    def finish(self, whole: "Run") -> None:
        """Lives to the end, if it has not yet; raises RunError unless the losses are those of the whole run."""
        while not self.reached_end():
            newest, life = self.newest_complete(), self.live()
            life.end()
            self.lost_nothing(life, newest)
        differing = {step for step, loss in whole.losses().items() if self.losses().get(step) != loss}
        if differing:
            raise RunError(f"{self.name}: other losses than a run left alone has, first at step {min(differing)}")

    def lost_nothing(self, life: "Life", newest: int) -> None:
        said = re.search(r"going on after step (\d+) of", life.log.read_text())
        began = int(said[1]) if said else 0 if self.last_step(life) else newest
        if began < newest or self.newest_complete() < newest:
            raise RunError(f"step {newest} was saved; the next life began after {began}: {life.log}")

    def reached_end(self) -> bool:
        return self.newest_complete() == STEPS and STEPS in self.losses()

    def losses(self) -> dict[int, float]:
        lines = self.metrics.read_text().splitlines(keepends=True) if self.metrics.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    def last_step(self, life: "Life") -> int:
        """The last step that this life has done; 0 while it starts."""
        steps = re.findall(r"^step (\d+)/\d+: loss", life.log.read_text(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def is_saving(self, life: "Life") -> bool:
        """Whether there is a checkpoint that this life has begun and not completed."""
        begun = [name for name in self._checkpoints() if not self._is_complete(name)]
        for name in begun:
            with suppress(FileNotFoundError):  # one that an earlier life had begun is removed just now
                if self.folder and (self.folder / "checkpoints" / name).stat().st_mtime >= life.began:
                    return True
        return False

    def newest_complete(self) -> int:
        return max((int(name) for name in self._checkpoints() if self._is_complete(name)), default=0)

    def _checkpoints(self) -> list[str]:
        names = [name.split("/")[0] for name in self._files("checkpoints")]
        return sorted({name for name in names if re.match(r"\d{10}", name)})

    def _is_complete(self, name: str) -> bool:
        try:
            stored = json.loads(self._read(f"checkpoints/{name}/zarr.json"))
        except ValueError:
            return False
        return name.isdigit() and stored["attributes"].get("write_completed") is True

    def _files(self, below: str) -> list[str]:
        if self.folder:
            return os.listdir(self.folder / below) if (self.folder / below).is_dir() else []
        prefix = f"{self.name}/{below}/"
        pages = _store().get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
        return [entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", [])]

    def _read(self, name: str) -> str:
        if not self.folder:
            found = name.rpartition("/")[2] in self._files(name.rpartition("/")[0])
            key = f"{self.name}/{name}"
            return _store().get_object(Bucket="bucket", Key=key)["Body"].read().decode() if found else ""
        try:
            return (self.folder / name).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return ""


def _store():
    """A client of the object store that has no faults."""
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["WHOLE_STORE"])


class Life:
    """One start of a program, to its end or its signal: a fork, in a group of its own."""

    def __init__(self, main: Callable, config_class: type, overrides: list[str], log: Path, limits: dict[int, int]):
        self.log, self.began, self.status = log, time.time(), 0
        log.touch()
        sys.stdout.flush()
        self.pid = os.fork()
        os.setpgid(self.pid, self.pid)  # by both, so that the group is there for whoever comes first
        if self.pid == 0:
            for stream in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
            for number, limit in limits.items():
                resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
            sys.argv, status = [main.__module__, *overrides], 1
            try:
                command_line.run(main, config_class)
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else 1
            except KeyboardInterrupt:  # before `run` could catch it: Python's own end of a program
                status = 130
            finally:
                if sys.exc_info()[1] is not None:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(status)

    def _has_ended(self) -> bool:
        if self.pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid, self.status = 0, os.waitstatus_to_exitcode(status)
        return not self.pid

    def wait_for(self, condition: Callable[[], bool], refused: bool = False) -> None:
        """Returns when the condition holds or the life has ended. Raises RunError if it failed, unless it may."""
        end = time.monotonic() + LONGEST_S
        while not self._has_ended() and not condition():
            if time.monotonic() > end:
                os.killpg(self.pid, signal.SIGKILL)
                raise RunError(f"nothing happened for {LONGEST_S} s: {self.log}")
            time.sleep(0.001)
        if self.status and not refused:
            raise RunError(f"a life ended with status {self.status}: {self.log}")

    def end(self) -> None:
        """Waits for the end."""
        self.wait_for(lambda: False)

    def send(self, number: signal.Signals) -> None:
        """Ends the life by a signal, if it has not ended by itself."""
        if not self._has_ended():
            (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)
            self.wait_for(lambda: False, refused=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
    else:
        command_line.run(main, Torture)
