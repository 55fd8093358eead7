"""Trackers: what each real package holds afterwards, offline, and that none can stop or slow a run."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from runtime.config.keys import Paths, Tracking
from runtime.terminal import RunError
from runtime.tracking import trackers
from runtime.tracking.trackers import PACKAGES, Trackers

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Config:
    """Of a config, what trackers read."""

    paths: Paths
    tracking: Tracking
    learning_rate: float = 0.5

    def tree(self):
        return dataclasses.asdict(self)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """The trackers' own variables: nothing is sent."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")


def config_of(*names: str) -> Config:
    return Config(Paths(root_working_dir="runs", model_name="mine"), Tracking(to=names))


def line(step: int, **values) -> str:
    return json.dumps({"step": step, "time": 1.7e9 + step, **values}) + "\n"


def write_run(folder: Path, config: Config, done_steps: int, steps: range, factor: float) -> None:
    with Trackers(config, folder, is_leader=True) as opened:
        opened.start(done_steps)
        for step in steps:
            opened.put(line(step, loss=factor * step, **{"grad_norm/embed": 0.5, "mfu": None}))


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


@pytest.mark.parametrize(
    "name, curves_of",
    [
        ("tensorboard", tensorboard_curves),
        pytest.param("wandb", wandb_curves, marks=pytest.mark.slow),
        pytest.param("clearml", clearml_curves, marks=pytest.mark.slow),
        pytest.param("trackio", trackio_curves, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_continues_its_curves(tmp_path, capsys, monkeypatch, name, curves_of):
    """Stopped after step 7 and gone on from step 4: each step once, in the same run, with the second start's values."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # a tracker's settings of this machine's user are not ours
    write_run(tmp_path, config_of(name), 0, range(1, 8), factor=1.0)
    write_run(tmp_path, config_of(name), 4, range(5, 11), factor=10.0)
    curves = curves_of(tmp_path)
    expected = {(step, "loss"): float(step if step <= 4 else 10 * step) for step in range(1, 11)}
    expected |= {(step, "grad_norm/embed"): 0.5 for step in range(1, 11)}
    assert curves == expected
    assert capsys.readouterr().out == "", (tmp_path / name / "tracker.log").read_text()


def test_values_that_are_not_finite_reach_the_tracker(tmp_path):
    """The strings of metrics.jsonl are numbers again; null has no point."""
    with Trackers(config_of("tensorboard"), tmp_path, is_leader=True) as opened:
        opened.start(0)
        opened.put(line(1, loss="Infinity", grad_norm="NaN", mfu=None))
    curves = tensorboard_curves(tmp_path)
    assert curves[1, "loss"] == float("inf") and str(curves[1, "grad_norm"]) == "nan" and len(curves) == 2


# ---- what goes wrong


def test_a_package_that_is_missing_is_refused_before_anything_starts(tmp_path, monkeypatch):
    """One line with the command that installs it, the config's keys, and no folder."""
    find_spec = trackers.importlib.util.find_spec
    absent = ("wandb", "clearml")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    message = (
        "tracking.to: wandb and clearml cannot be used, since the package is not installed: pip install wandb==0.31.0 "
        "clearml==2.1.12 (all: pip install -r requirements-trackers.txt), or leave it out"
    )
    for is_leader in (True, False):  # all hosts are refused alike, so that none waits for the others
        with pytest.raises(RunError, match=re.escape(message)):
            Trackers(config_of("wandb", "clearml", "tensorboard"), tmp_path, is_leader=is_leader)
    assert list(tmp_path.iterdir()) == []


def test_the_messages_name_the_pinned_versions():
    """pip's commands in messages install what requirements-trackers.txt says."""
    pinned = (REPOSITORY / "requirements-trackers.txt").read_text().splitlines()
    assert {requirement for _, requirement in PACKAGES.values()} <= set(pinned)


def test_only_the_leader_tracks(tmp_path):
    """The other hosts start nothing."""
    with Trackers(config_of("tensorboard"), tmp_path, is_leader=False) as opened:
        opened.start(0)
        opened.put(line(1, loss=1))
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_fails_is_named_once(tmp_path, capsys):
    """Its folder is a file, so it cannot start: one warning; the other one has all lines."""
    (tmp_path / "trackio").write_text("in the way")
    write_run(tmp_path, config_of("tensorboard", "trackio"), 0, range(1, 6), factor=1.0)
    assert capsys.readouterr().out == (
        f"warning: tracking.trackio failed ([Errno 17] File exists: '{tmp_path}/trackio'). Training goes on; metrics.jsonl has all "
        f"lines, and\n  {tmp_path}/trackio/tracker.log what trackio says.\n"
    )
    assert (5, "loss") in tensorboard_curves(tmp_path)


@pytest.mark.slow
def test_no_network(tmp_path, capsys, monkeypatch):
    """Weights & Biases, not offline, with a key and a server that nobody answers at: warned of once, with the reason; a run
    is held up at its end for LONGEST_WAIT_S at most."""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    monkeypatch.setattr(trackers, "LONGEST_WAIT_S", 5.0)
    start = time.monotonic()
    write_run(tmp_path, config_of("wandb"), 0, range(1, 6), factor=1.0)
    assert time.monotonic() - start < 60  # of itself it tries for 90 s
    output = capsys.readouterr().out
    assert re.match(r"warning: tracking\.wandb (failed \(.*\)|had not taken everything .*)\. Training goes on", output)
    assert output.count("warning") == 1


def replace_process(monkeypatch, tmp_path, source: str) -> None:
    """Lets another program stand for tracker_process.py."""
    (tmp_path / "tracker_process.py").write_text(source)
    monkeypatch.setattr(trackers, "__file__", str(tmp_path / "trackers.py"))


def test_a_tracker_that_hangs_holds_nothing_up(tmp_path, capsys, monkeypatch):
    """One that reads nothing: 100 lines of 100 kB are taken in no time, ten of them are kept, and the end waits no longer than
    it should."""
    replace_process(monkeypatch, tmp_path, "import time; time.sleep(600)")
    monkeypatch.setattr(trackers, "LONGEST_WAIT_S", 0.5)
    monkeypatch.setattr(trackers, "WAITING_LINES", 10)
    with Trackers(config_of("tensorboard"), tmp_path / "run", is_leader=True) as opened:
        opened.start(0)
        longest = 0.0
        for step in range(1, 101):
            text = line(step, text="x" * 100_000)
            before = time.thread_time()
            opened.put(text)
            longest = max(longest, time.thread_time() - before)
    assert longest < 0.01
    output = capsys.readouterr().out
    assert output.startswith("warning: tracking.tensorboard takes no more lines (10 are waiting). Training goes on")
    assert output.count("warning") == 1


def test_a_tracker_that_is_slow_to_end_is_given_up(tmp_path, capsys, monkeypatch):
    """One that reads all and then does not end (a server that does not answer)."""
    replace_process(monkeypatch, tmp_path, "import sys, time; sys.stdin.read(); time.sleep(600)")
    monkeypatch.setattr(trackers, "LONGEST_WAIT_S", 0.5)
    write_run(tmp_path / "run", config_of("tensorboard"), 0, range(1, 6), factor=1.0)
    output = capsys.readouterr().out
    assert output.startswith("warning: tracking.tensorboard had not taken everything 0.5 s after the end of the run.")
    assert output.count("warning") == 1


def test_the_last_words_of_a_tracker_are_told(tmp_path, capsys, monkeypatch):
    """An error in the package: the last line that it printed."""
    replace_process(monkeypatch, tmp_path, "raise ValueError('no API key: run wandb login')")
    write_run(tmp_path / "run", config_of("wandb"), 0, range(1, 6), factor=1.0)
    assert capsys.readouterr().out.startswith(
        "warning: tracking.wandb failed (ValueError: no API key: run wandb login)."
    )


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.runtime.tracking.test_trackers import config_of, line
from runtime.tracking.trackers import Trackers
opened = Trackers(config_of("tensorboard"), Path(sys.argv[1]), is_leader=True)
opened.start(0)
for step in range(1, 6):
    opened.put(line(step, loss=step))
while opened._feeds[0]._lines.qsize():
    time.sleep(0.01)
print("imported", [name for name in ("tensorboardX", "wandb", "clearml", "trackio") if name in sys.modules], flush=True)
time.sleep(600)
"""


def test_a_killed_training_leaves_a_tracker_that_has_all(tmp_path):
    """SIGKILL: the tracker's process writes what it was given and ends. The training itself imports no tracker's package."""
    command = [sys.executable, "-c", KILLED.format(tests=str(REPOSITORY / "tests")), tmp_path]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "imported []\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    while (5, "loss") not in tensorboard_curves(tmp_path):
        assert time.monotonic() < deadline, (tmp_path / "tensorboard" / "tracker.log").read_text()
        time.sleep(0.1)
