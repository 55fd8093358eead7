"""What follows a run: what each real tracker holds afterwards, offline; that none can stop, slow or lose anything."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import small
import yaml
from pages import ROOT
from parts import assert_refuses, says
from several_hosts import wait_until

from runtime import beside
from runtime.config.keys import Paths, Tracking
from runtime.terminal import RunError
from runtime.tracking import follow as follow_module
from runtime.tracking import followers
from runtime.tracking.followers import Followers
from runtime.tracking.metrics import _drop_steps_after
from runtime.tracking.trackers import PACKAGES, TRACKERS, Tracked


@dataclasses.dataclass(frozen=True)
class Config:
    """The part of a config that followers read."""

    paths: Paths
    tracking: Tracking


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """The trackers' own variables: nothing is sent. Runs are followed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    with small.followed():
        yield


def config_of(*names: str) -> Config:
    return Config(Paths(root_working_dir="runs", model_name="mine"), Tracking(to=names))


def write_lines(folder: Path, config: Config, done_steps: int, steps: range, factor: float = 1.0, **more) -> None:
    """What a run leaves that goes on after `done_steps`, before anything follows it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    _drop_steps_after(folder / "metrics.jsonl", done_steps)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            line = {"step": step, "time": time.time(), "loss": factor * step, "grad_norm/embed": 0.5, "mfu": None}
            file.write(json.dumps(line | more) + "\n")


def follow(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs the follower by hand."""
    command = [sys.executable, "-m", "runtime.tracking.follow", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def curves(steps: range, factor: float = 1.0) -> dict[tuple[int, str], float]:
    """What a tracker holds of `write_lines`."""
    return {(step, "loss"): factor * step for step in steps} | {(step, "grad_norm/embed"): 0.5 for step in steps}


# ---- what is in each tracker's own files: (step, name) -> value, what comes later being what a viewer shows


def tensorboard_curves(folder: Path) -> dict[tuple[int, str], float]:
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    curves = {}
    for file in sorted((folder / "tensorboard").glob("events*"), key=lambda file: file.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == SessionLog.START:  # TensorBoard then forgets what it read from this step on
                curves = {key: value for key, value in curves.items() if key[0] < event.step}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curves[event.step, value.tag] = value.simple_value
    return curves


def wandb_curves(folder: Path) -> dict[tuple[int, str], float]:
    from wandb.proto.wandb_internal_pb2 import Record

    curves, identities = {}, set()
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        data, position, whole = file.read_bytes(), 7, b""
        while position + 7 <= len(data):  # LevelDB's log: blocks of 32 kB; 4 bytes of checksum, 2 of length, 1 of kind
            if position % 32768 > 32768 - 7:
                position += -position % 32768
                continue
            length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
            whole += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # a whole record, or the end of one
                record, whole = Record.FromString(whole), b""
                if record.HasField("run"):
                    identities.add(record.run.run_id)
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = int(values.pop("step", 0))
                curves |= {(step, name): float(value) for name, value in values.items() if name[0] != "_"}
    assert identities == {(folder / "wandb" / "id").read_text()}  # the server joins them to one run
    return curves


def clearml_curves(folder: Path) -> dict[tuple[int, str], float]:
    curves = {}
    for file in sorted((folder / "clearml" / "offline").glob("*.zip"), key=lambda file: file.stat().st_mtime_ns):
        with zipfile.ZipFile(file) as session, session.open("metrics.jsonl") as lines:
            for point in (point for points in lines for point in json.loads(points)):
                names = dict.fromkeys((point["metric"], point["variant"]))
                curves[point["iter"], "/".join(names)] = point["value"]
    return curves


def trackio_curves(folder: Path) -> dict[tuple[int, str], float]:
    with contextlib.closing(sqlite3.connect(folder / "trackio" / "clearshard.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        identities = database.execute("SELECT DISTINCT run_id FROM metrics").fetchall()
    assert {row[0] for row in rows} == {"mine"} and len(identities) == 1
    return {(step, name): value for _, step, values in rows for name, value in json.loads(values).items()}


@pytest.mark.slow
@pytest.mark.parametrize("curves_of", [tensorboard_curves, wandb_curves, clearml_curves, trackio_curves])
def test_a_resumed_run_continues_its_curves(tmp_path, capsys, monkeypatch, curves_of):
    """A run that stopped after step 7 and went on from step 4 has each step once, in the same tracker's run, with the
    second start's values; NaN is no number in any."""
    name = curves_of.__name__.removesuffix("_curves")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # a tracker's settings of this machine's user are not ours
    for done, steps, factor in ((0, range(1, 8), 1.0), (4, range(5, 11), 10.0)):
        write_lines(tmp_path, config_of(name), done, steps, factor, weight_norm="NaN")
        with Followers(config_of(name), tmp_path, is_leader=True) as opened:
            opened.start()
    finite = {key: value for key, value in curves_of(tmp_path).items() if math.isfinite(float(value))}
    assert finite == curves(range(1, 5)) | curves(range(5, 11), 10.0)
    output = capsys.readouterr().out
    assert "warning" not in output and "mine" not in output, (tmp_path / f"{name}.log").read_text()
    assert (tmp_path / "report.html").exists()


def test_lines_are_followed_as_they_come(tmp_path):
    """A line is sent soon after it is written, also by a run that went on from step 2 and replaced the file; the last
    lines are sent when the run ends."""
    with Followers(config_of("tensorboard"), tmp_path, is_leader=True) as opened:
        opened.start()  # before there is any line
        write_lines(tmp_path, config_of("tensorboard"), 0, range(1, 4))
        wait_until(lambda: tensorboard_curves(tmp_path) == curves(range(1, 4)))
        write_lines(tmp_path, config_of("tensorboard"), 2, range(3, 6), 10.0)
        wait_until(lambda: (5, "loss") in tensorboard_curves(tmp_path))
        write_lines(tmp_path, config_of("tensorboard"), 5, range(6, 7), 10.0)
    assert tensorboard_curves(tmp_path) == curves(range(1, 3)) | curves(range(3, 7), 10.0)
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2  # one for each file of lines
    assert (tmp_path / "report.html").exists()


def test_tensorboard_waits_for_lines_without_a_core(tmp_path):
    """Between two lines the writer's thread takes a quarter of a core at most."""
    with TRACKERS["tensorboard"](Tracked(tmp_path, "mine", "ours", {}, first_step=1, is_repeated=False)) as log:
        log(1, time.time(), {"loss": 1.0})
        before = time.process_time()
        time.sleep(2)
        assert time.process_time() - before < 0.5


@pytest.mark.slow
def test_what_a_dead_tracker_missed_is_sent_by_hand(tmp_path):
    """A tracker killed after step 3 loses no line and sends none twice. Values that are not finite arrive, damaged
    lines do not stop it, and the run's own config need not name the tracker. The folder is one of a sweep."""
    (folder := tmp_path / "x_training.learning_rate=1e-3").mkdir()
    write_lines(folder, config_of(), 0, range(1, 4))
    assert follow(folder, "to=tensorboard", "once=true").returncode == 0
    assert tensorboard_curves(folder) == curves(range(1, 4))
    write_lines(folder, config_of(), 3, range(4, 7))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("damaged\n" + json.dumps({"step": 7, "time": time.time(), "loss": "Infinity", "note": "x"}) + "\n")
    for _ in range(2):
        assert follow(folder, "to=tensorboard", "once=true").returncode == 0
    assert tensorboard_curves(folder) == curves(range(1, 7)) | {(7, "loss"): float("inf")}
    files = list((folder / "tensorboard").glob("events*"))
    assert len(files) == 2  # the last start had nothing to send


def test_arguments_that_are_refused(tmp_path):
    """One line says what was expected."""
    for arguments, message in (
        ([], "expected python -m runtime.tracking.follow RUN_FOLDER to=TRACKER [once=true]"),
        ([f"{tmp_path}", "to=tensorbord"], f"clearml, trackio, report; got {tmp_path} to=tensorbord"),
        ([f"{tmp_path}/none", "to=wandb"], f"{tmp_path}/none is no folder: expected … runs/NAME"),
    ):
        assert_refuses(message, follow_module.main, arguments)


# ---- what goes wrong


def test_a_package_that_is_missing_is_refused_before_anything_starts(tmp_path, monkeypatch):
    """One line has the command that installs the pinned version, and no folder is made."""
    find_spec = followers.importlib.util.find_spec
    absent = ("wandb", "clearml")
    monkeypatch.setattr(followers.importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    message = "tracking.to: wandb and clearml: pip install wandb==.* clearml==.*or leave it"
    for is_leader in (True, False):  # all hosts are refused alike, so that none waits for the others
        with pytest.raises(RunError, match=message):
            Followers(config_of("wandb", "clearml", "tensorboard"), tmp_path, is_leader=is_leader)
    with Followers(config_of("tensorboard"), tmp_path, is_leader=False) as opened:
        opened.start()  # only the leader is followed
    assert list(tmp_path.iterdir()) == []
    pinned = (ROOT / "requirements-trackers.txt").read_text().splitlines()
    assert {requirement for _, requirement in PACKAGES.values()} <= set(pinned)


def stand_in(program, folder, monkeypatch):
    """Runs a program in place of runtime/tracking/follow.py; its sys.argv[2] is to=NAME."""
    (folder / "runtime/tracking").mkdir(parents=True)
    (folder / "runtime/tracking/follow.py").write_text(program)
    monkeypatch.setattr(beside, "REPOSITORY", folder)


FAILS = """import sys
if sys.argv[2] == 'to=wandb':
    raise ValueError('no API key: run wandb login \\x1b[2J')
sys.stdin.read()"""
HANGS = "import sys, time\nif sys.argv[2] == 'to=wandb': time.sleep(600)\nsys.stdin.read()"


FAILED = r"failed (ValueError: no API key: run wandb login \x1b[2J)"


@pytest.mark.parametrize("program, why, while_it_runs", [
    (FAILS, FAILED, True), (FAILS, FAILED, False), (HANGS, "was not done 0.5 s after the end", False),
])  # fmt: skip
def test_a_follower_that_fails_or_hangs_is_named_once(tmp_path, capsys, monkeypatch, program, why, while_it_runs):
    """The warning has its last words and how to send what is missing; the follower holds up neither a step nor, for
    long, the end."""
    stand_in(program, tmp_path, monkeypatch)
    monkeypatch.setattr(followers, "LONGEST_WAIT_S", 0.5 if program == HANGS else 600.0)
    write_lines(tmp_path, config_of("wandb"), 0, range(1, 4))
    with Followers(config_of("wandb"), tmp_path, is_leader=True) as opened:
        opened.start()
        if while_it_runs:
            opened._running["wandb"].wait(600)
        longest = 0.0
        for _ in range(100):
            before = time.thread_time()
            opened.name_failed()
            longest = max(longest, time.thread_time() - before)
    assert longest < 0.05
    output = capsys.readouterr().out
    fix = f"python -m runtime.tracking.follow {tmp_path} to=wandb once=true"
    assert says(f"warning: wandb {why} … {tmp_path}/wandb.log … To catch up: {fix}", output)
    assert output.count("warning") == 1


KILLED = """
import sys, time
from pathlib import Path
from tests.runtime.tracking.test_trackers import config_of, write_lines
from runtime.tracking.followers import Followers
opened = Followers(config_of("tensorboard"), Path(sys.argv[1]), is_leader=True)
opened.start()
write_lines(Path(sys.argv[1]), config_of("tensorboard"), 0, range(1, 6))
packages = "tensorboardX", "wandb", "clearml", "trackio", "plotly"
print("imported", [name for name in packages if name in sys.modules], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_training_leaves_followers_that_have_all(tmp_path):
    """After SIGKILL they send what was written and end. The training itself imports no tracker's package."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", KILLED, tmp_path]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "imported []\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: tensorboard_curves(tmp_path) == curves(range(1, 6)) and (tmp_path / "report.html").exists())


# ---- the report


def test_a_report_that_cannot_be_written_is_tried_again(tmp_path, monkeypatch, capsys):
    """A disk that is full for a moment is said, and the page is there afterwards; at the end it is an error. One that
    takes 0.05 s is not begun again before 5 s are over."""
    waits, tries = [], []
    monkeypatch.setattr(follow_module, "draw", lambda folder: None)
    monkeypatch.setattr(follow_module.os, "nice", lambda by: None)

    def write(folder):
        tries.append(folder)
        time.sleep(0.05)
        if len(tries) != 2:
            raise OSError(28, "No space left on device")

    def is_over(seconds):
        waits.append(seconds)
        return len(waits) == 3

    monkeypatch.setattr(follow_module, "write_report", write)
    monkeypatch.setattr(follow_module, "INTERVAL_S", 1.0)
    with pytest.raises(OSError, match="No space left on device"):
        follow_module.keep_report(tmp_path, "report", is_over)
    assert len(tries) == 3 and waits[0] == 1.0 and waits[1] >= 5.0
    assert capsys.readouterr().err == "warning: [Errno 28] No space left on device\n"


def test_a_run_ends_with_what_was_reached(tmp_path, capsys, monkeypatch):
    """The run says its last loss, where its page is, and what to do next, with a tokenizer or without; after an error
    it does not, so that the message comes last."""
    stand_in("import sys\nsys.stdin.read()", tmp_path, monkeypatch)
    (tmp_path / "report.html").touch()
    write_lines(tmp_path, config_of(), 0, range(1, 4))
    with Followers(config_of(), tmp_path, is_leader=True) as opened:
        opened.start()
    assert " ".join(capsys.readouterr().out.split()) == (
        f"{tmp_path.name}: step 3, loss 3.0000. Its page, for a browser: {tmp_path}/report.html Next: python -m "
        f"tools.compare {tmp_path} OTHER_RUN lays runs over one another; python -m tools.generate {tmp_path} "
        "prompt_ids=[1] output=ids draws ids."
    )
    (tmp_path / "tokenizer_record.json").touch()
    assert followers.reached(tmp_path, True)[-1].endswith(f"python -m tools.generate {tmp_path} writes text.")
    with pytest.raises(ZeroDivisionError), Followers(config_of(), tmp_path, is_leader=True) as opened:
        opened.start()
        raise ZeroDivisionError
    assert capsys.readouterr().out == ""
