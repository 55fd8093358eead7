"""A run that is killed, asked to stop, started twice, changed or fed bad numbers: what is kept, and how it goes on."""

import errno
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import zarr
from jax.sharding import SingleDeviceSharding
from parts import assert_refuses, says
from several_hosts import ROOT, TRAIN, checkpoints, losses, records, wait_for_step, wait_until, where, write_tiny

import train
import train_any
from runtime import run as runtime_run
from runtime.checkpoints import lock
from runtime.checkpoints.lock import Ownership
from runtime.checkpoints.store import open_store
from runtime.config import resume
from runtime.config.command_line import load
from runtime.config.rebuild import as_tree
from runtime.data.batches import Batch
from runtime.data.sources import open_data
from runtime.files import flat
from runtime.run import InFlight, Run
from runtime.terminal import RunError
from runtime.tracking.bad_steps import BadSteps
from runtime.tracking.best import Best
from shardlib.mesh import make_mesh

pytestmark = pytest.mark.usefixtures("proved_elsewhere")
TINY = """model.d_model=32 model.n_kv=4 model.d_head=8 model.d_ff=64 model.layers=1 model.vocab=128 mesh.d=2 mesh.t=1
    training.tokens.batch=16 training.tokens.len=32 training.steps=12 training.warmup_steps=2 training.steps_for_lr=12
    training.learning_rate=0.01 checkpoint_interval=4 eval_interval=12 log_interval=1""".split()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The overrides of a run of 12 steps, on a data set of 20, that saves after 4, 8 and 12."""
    return [*TINY, write_tiny(tmp_path_factory.mktemp("data"))]


@pytest.fixture
def start(tiny, monkeypatch, tmp_path):
    """Runs as `python -m train <tiny> <overrides>` would, in the folder tmp_path/run; returns the exit status."""

    run_folder = where(tmp_path / "run")
    return lambda *overrides: small.start_training(monkeypatch, *tiny, *run_folder, *overrides)


@pytest.fixture(scope="module")
@small.proved_elsewhere()
@small.followed()
def whole(tiny, tmp_path_factory):
    """The folder of a run that was never disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train.main(load(train.Config, "local_test_synthetic", [*tiny, *where(folder)]))
    return folder


# ---- killed, and asked to stop ---------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_bit_for_bit(tiny, whole, start, tmp_path, capsys):
    """SIGKILL after step 9 or so, in a process of its own, most likely in a save: started again, at once and with no
    file to delete, all losses are those of the run that was left alone."""
    command = [*TRAIN, *tiny, *where(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_for_step(tmp_path / "run", 9, [process])  # so that the checkpoint of step 4 is complete
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "run" / lock.NAME).exists()  # left behind: the owner is dead, its lock is gone
    assert start() == 0
    assert losses(tmp_path / "run") == losses(whole)
    printed = capsys.readouterr()
    assert re.search(r"going on after step (4|8) of 12\n", printed.out) and "watching" not in printed.err


def test_a_signal_saves_and_ends_with_a_status_of_its_own(whole, start, tmp_path, capfd):
    """SIGTERM during a step: it is finished and saved, validation is not begun, the status is 75, and the run goes on
    bit for bit."""

    def stop():
        wait_for_step(tmp_path / "run", 5)
        os.kill(os.getpid(), signal.SIGTERM)

    asker = threading.Thread(target=stop)
    asker.start()
    assert start("checkpoint_interval=100", "eval_interval=1") == 75
    asker.join()
    (saved,) = checkpoints(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole)[:saved] and saved >= 5
    assert max(line["step"] for line in records(tmp_path / "run") if "validation_loss" in line) == saved - 1
    printed = capfd.readouterr()
    assert "SIGTERM: stopping after the step in flight; a second one exits at once\n" in printed.err
    assert f"stopped after step {saved} of 12; started again, the run goes on from there\n" in printed.out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert start() == 0
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.parametrize("during, steps, status", [("validation", 12, 75), ("validation", 5, 0), ("train", 5, 0)])
def test_a_signal_during_a_validation(start, tmp_path, capfd, monkeypatch, during, steps, status):
    """SIGTERM stops it after the batch in flight. It is dropped, the state saved, the status 75. The last one is made
    whole once the state is saved, also where the signal comes in the last step, and the status is 0."""
    loaded = []

    def opened(config, split, sharding):
        loader = open_data(config, split, sharding)
        load, is_validation = loader.load, split == "validation"

        def slow(index):
            if is_validation:
                loaded.append(index)
            if split == during and index == (2 if is_validation else 4):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
            return load(0 if is_validation else index)

        loader.load = slow
        if is_validation:
            loader.steps, loader.source_of, loader.is_there = 6, lambda index: "", lambda *_: True
        return loader

    monkeypatch.setattr(runtime_run, "open_data", opened)
    assert start("checkpoint_interval=100", "eval_interval=5", f"training.steps={steps}") == status
    assert checkpoints(tmp_path / "run") == [5] and loaded == ([0, 1, 2] if status else [*range(6)])
    after = [
        name for line in records(tmp_path / "run") for name in ("checkpoint_stall_s", "validation_loss") if name in line
    ]
    assert after == (["checkpoint_stall_s"] if status else ["checkpoint_stall_s", "validation_loss"])
    dropped = "the validation after step 5 is dropped: the run was told to stop\n"
    assert (dropped in capfd.readouterr().out) == bool(status)


@pytest.mark.parametrize("split, at, interval", [("train", 5, 100), ("train", 5, 5), ("validation", 0, 100)])
def test_a_signal_while_data_are_waited_for(start, tmp_path, whole, monkeypatch, split, at, interval):
    """SIGTERM while the data's store is down: the state of the last step is saved, if it is not yet, and the status is
    75; a validation is dropped."""
    told = []

    def opened(config, name, sharding):
        loader = open_data(config, name, sharding)

        def is_there(index, timeout_s):
            if name == split and index == at and not told:
                told.append(os.kill(os.getpid(), signal.SIGTERM))
            return not told

        loader.is_there = is_there
        return loader

    monkeypatch.setattr(runtime_run, "open_data", opened)
    assert start(f"checkpoint_interval={interval}", "eval_interval=5") == 75
    assert checkpoints(tmp_path / "run") == [5] and losses(tmp_path / "run") == losses(whole)[:5]


def test_what_a_run_writes_is_its_owner_s_alone(whole):
    """A configuration may hold a secret: neither files nor folders of a run are readable by others, and afterwards the
    process has the mask that it had."""
    assert not [
        str(path)
        for path in whole.rglob("*")
        if path.stat().st_mode & 0o077 and path.name not in ("profile", "step.svg")
    ]
    assert {"config.yaml", "environment.json", "report.html", "starts.jsonl"} <= {path.name for path in whole.iterdir()}
    mask = os.umask(0)
    os.umask(mask)
    assert mask != 0o077


@pytest.mark.parametrize("name", ["config.yaml", "ledger.txt"])
def test_a_disk_that_is_full_at_the_start(start, tmp_path, capfd, name):
    """One line with the folder, the cause and the fix, status 1, no traceback, whichever file it is."""
    (tmp_path / "run" / f"{name}.part").symlink_to("/dev/full")
    assert start() == 1
    parts = f"error: {tmp_path}/run cannot be written; make room … paths.root_working_dir: OSError: … No space left"
    assert says(parts, said := capfd.readouterr().err) and "Traceback" not in said


BUSY = """
import hashlib, sys, threading
from runtime.cluster.signals import StopSignals
with StopSignals() as signals:
    signals.training = sys.argv[1] == "training"
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in C, during which Python runs no signal handler
"""


@pytest.mark.parametrize("step_s, ahead", [(0.01, 8), (0.3, 6), (1.5, 1), (10.0, 0)])
def test_a_signal_waits_for_two_seconds_of_steps_or_for_one(step_s, ahead):
    """What is in flight once steps take so long; a program's output is waited for when it comes to that."""
    now, waited = [0.0], []

    def block_until_ready(number):
        now[0] = max(now[0], step_s * (number + 1))
        waited.append(number)

    in_flight = InFlight(lambda: now[0])
    for number in range(40):
        in_flight.add(SimpleNamespace(block_until_ready=functools.partial(block_until_ready, number)))
    assert waited == [*range(40 - ahead)]


@pytest.mark.parametrize("state, signals, status, said", [
    ("training", [signal.SIGTERM, signal.SIGTERM], 143, "SIGTERM: stopping after the step in flight; a second"),
    ("starting", [signal.SIGINT], 75, "SIGINT: no step is done yet"),
])  # fmt: skip
def test_signals_while_the_process_is_busy(state, signals, status, said):
    """While the main thread is in a long call outside Python: a second signal exits at once, and so does the first
    before any step."""
    command = [sys.executable, "-c", BUSY, state]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signals[0])
        assert process.stderr.readline().startswith(said)
        for number in signals[1:]:
            process.send_signal(number)
        assert process.wait(600) == status
    finally:
        process.kill()
        process.communicate()


# ---- a checkpoint that is not whole ----------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over(whole, start, tmp_path, capfd):
    """With a chunk of the newest checkpoint damaged, the run goes on from the one before: its step, data, metrics and
    attributes."""
    shutil.copytree(whole, tmp_path / "run", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run/checkpoints/0000000012")
    chunk = next(path for path in (tmp_path / "run/checkpoints/0000000008").rglob("c.*") if path.stat().st_size > 64)
    content = bytearray(chunk.read_bytes())
    content[20] ^= 1
    chunk.write_bytes(content)
    assert start() == 0
    assert losses(tmp_path / "run") == losses(whole)
    assert [line["step"] for line in records(tmp_path / "run") if "checkpoint_stall_s" in line] == [4, 8, 12]
    printed = capfd.readouterr()
    assert "going on after step 4 of 12\n" in printed.out
    assert "0000000008" in printed.err + printed.out and chunk.name in printed.err + printed.out


@pytest.mark.slow
def test_a_damaged_checkpoint_of_the_last_step_is_repaired(whole, start, tmp_path, capfd):
    """A run that is done, but whose last checkpoint is damaged, goes on from the one before, and saves the last step
    again; started once more there is nothing to train, which is no error."""
    shutil.copytree(whole, tmp_path / "run", dirs_exist_ok=True)
    chunk = next(path for path in (tmp_path / "run/checkpoints/0000000012").rglob("c.*") if path.stat().st_size > 64)
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert start() == 0
    assert losses(tmp_path / "run") == losses(whole)
    assert "going on after step 8 of 12\n" in capfd.readouterr().out
    assert (tmp_path / "run/checkpoints/0000000012.damaged").is_dir()
    assert start() == 0
    assert says("nothing to train: … 12 of 12 steps: raise training.steps", capfd.readouterr().out)
    assert start("training.steps=11") == 1
    assert says("error: nothing to train: … 12 of 11 steps", capfd.readouterr().err)


@pytest.mark.slow
def test_a_checkpoint_of_another_program_resumes(whole, start, tmp_path, capfd):
    """One whose only attribute is write_completed, as docs/formats.md says: the state goes on bit for bit, skipped
    steps are counted from 0, and a line says what is not known."""
    shutil.copytree(whole, tmp_path / "run", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run/checkpoints/0000000012")
    file = tmp_path / "run/checkpoints/0000000008/zarr.json"
    root = json.loads(file.read_text())
    file.write_text(json.dumps({**root, "attributes": {"write_completed": True}}))
    assert start() == 0
    assert losses(tmp_path / "run") == losses(whole)
    said = capfd.readouterr().out.replace("\n  ", " ")
    assert "0000000008 does not say which program saved it" in said


def test_what_saving_costs_is_logged_apart(whole):
    """Each checkpoint has a line with the seconds that it held training up, which are not in step_time_s."""
    lines = records(whole)
    stalls = {line["step"]: line["checkpoint_stall_s"] for line in lines if "checkpoint_stall_s" in line}
    assert sorted(stalls) == [4, 8, 12] and all(0 < stall < 60 for stall in stalls.values())
    assert all(set(line) == {"step", "time", "checkpoint_stall_s"} for line in lines if "checkpoint_stall_s" in line)


# ---- one run a folder ------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused(start, tmp_path, capsys):
    """A run in whose folder another one writes ends with status 1, names host and process, and changes nothing."""
    with Ownership(tmp_path / "run"):
        assert start() == 1
        there = {path.name for path in (tmp_path / "run").iterdir()}
        assert there == {lock.NAME, lock.LOCK, "profile", "step.svg"}
    parts = f"error: {tmp_path}/run is in use: process {os.getpid()} on host {os.uname().nodename}, started … Wait "
    assert says(parts, capsys.readouterr().err)
    assert not (tmp_path / "run" / lock.NAME).exists()


@pytest.fixture
def fast_heart(monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lock, "SILENT_S", 1.5)


OTHER = {"host": "elsewhere", "pid": 17, "started": "2026-11-21 12:00:00 +0000", "run": "a", "beat": 7}


@pytest.mark.parametrize("where", ["folder", "object store"])
def test_an_owner_on_another_host_is_watched(where, fast_heart, tmp_path, capsys):
    """Where no lock tells, the owner lives if its file goes on changing; a silent one is dead, and said to be."""
    folder = str(tmp_path) if where == "folder" else f"memory://{tmp_path.name}"
    store = open_store(folder, 10)
    store.write(lock.NAME, json.dumps(OTHER).encode())
    done = threading.Event()

    def beat():
        count = OTHER["beat"]
        while not done.wait(0.05):
            store.write(lock.NAME, json.dumps({**OTHER, "beat": (count := count + 1)}).encode())

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(RunError, match=r"is in use: process 17 on host elsewhere"), Ownership(folder):
        pass
    done.set()
    heart.join()
    with Ownership(folder):
        printed = capsys.readouterr().err
        assert says(f"{folder} was left by process 17 on host elsewhere … watching for 1.5 s", printed)
        assert f"nothing is heard of it: {folder} is taken over\n" in printed
        assert json.loads(store.read(lock.NAME))["pid"] == os.getpid()
    assert lock.NAME not in store.names()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO], ids=errno.errorcode.get)
def test_a_file_system_without_locks(code, fast_heart, tmp_path, monkeypatch, capsys):
    """Where there are none, the owner is watched, also one of this host; a disk that fails is said."""

    def flock(descriptor, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    (tmp_path / lock.NAME).write_text(json.dumps({**OTHER, "host": os.uname().nodename}))
    if code == errno.EIO:
        with (
            pytest.raises(RunError, match=r"owner\.json cannot be written: OSError: .* Input/output"),
            Ownership(tmp_path),
        ):
            pass
        return
    with Ownership(tmp_path):
        assert "watching for 1.5 s" in capsys.readouterr().err


def test_a_linked_owner_file_is_not_written_through(tmp_path):
    """What owner.json leads to, where it is a link, stays as it is; a link in the place of the lock is refused, and a
    folder that cannot be."""
    (tmp_path / "mine").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / lock.NAME).symlink_to(tmp_path / "mine")
    with Ownership(folder):
        assert json.loads((folder / lock.NAME).read_text())["pid"] == os.getpid()
    assert (tmp_path / "mine").read_text() == "mine"
    (folder / lock.LOCK).unlink()
    (folder / lock.LOCK).symlink_to(tmp_path / "not there")
    with (
        pytest.raises(RunError, match=r"cannot be written: OSError: .* symbolic links: .*owner\.lock"),
        Ownership(folder),
    ):
        pass
    assert not (tmp_path / "not there").exists()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=rf"{tmp_path}/file/run/owner\.json cannot be written: NotADirectoryError: "):
        Ownership(tmp_path / "file/run").__enter__()


@pytest.mark.parametrize("what, said", [
    ("taken", "in use: process 17 on host elsewhere … It took the folder"),
    ("gone", "owner.json is gone: the folder was moved … Start it"),
])  # fmt: skip
def test_an_owner_that_lost_the_folder_notices(fast_heart, tmp_path, what, said):
    """Who was taken for dead, and wakes up, or whose folder was moved away, does not write on: the next step raises."""
    folder = f"memory://{tmp_path.name}{what}"
    with Ownership(folder) as owner:
        owner.require()
        if what == "taken":
            open_store(folder, 10).write(lock.NAME, json.dumps(OTHER).encode())
        else:
            open_store(folder, 10).remove(lock.NAME)
        wait_until(lambda: owner._taken_by is not None)
        assert_refuses(said, owner.require)
    assert open_store(folder, 10).names() == ([lock.NAME] if what == "taken" else [])


# ---- a changed configuration -----------------------------------------------------------------------------------------


def test_a_changed_seed_is_refused_with_both_values(whole, start, tmp_path, capsys):
    """What may not change ends the start with status 1, both values and the two ways out, before anything is
    compiled."""
    shutil.copytree(whole, tmp_path / "run", dirs_exist_ok=True)
    assert start("training.steps=20", "training.seed=7", "model.vocab=256", "training.tokens.batch=8") == 1
    changes = "model.vocab: 128 -> 256 (command line) training.seed: 0 -> 7 … training.tokens.batch: 16 -> 8"
    parts = f"error: checkpoint {tmp_path}/run/checkpoints/0000000012 … {changes} … Set these as they were"
    assert says(f"{parts} … paths.model_name … allow_config_change=true", capsys.readouterr().err)
    assert (tmp_path / "run/config.yaml").read_text() == (whole / "config.yaml").read_text()


DATA = {"rows": 300, "max_token_id": 127}


def configs(tiny, *overrides):
    """The config of the tiny run, the same with overrides, and what a checkpoint of the first says."""
    before, now = (load(train.Config, "local_test_synthetic", [*tiny, *more]) for more in ((), overrides))
    return before, now, json.loads(json.dumps(resume.description(before, DATA)))


def test_what_may_change_is_said(tiny):
    """Steps, learning rate, intervals, mesh, paths and a data set that was moved are listed with old and new value;
    nothing else is."""
    changes = {"training.steps": 20, "training.learning_rate": 0.02, "checkpoint_interval": 5, "mesh.d": 4}
    names = {"paths.model_name": "b", "flat_tokens.filespec": "moved.zarr"}
    overrides = [f"{key}={value}" for key, value in (changes | names).items()]
    before, now, attributes = configs(tiny, *overrides, "check_only=true", "allow_config_change=true")
    assert resume.compare(before, DATA, attributes, "x") == []
    old = flat(as_tree(before))
    expected = [
        f"  {key}: {json.dumps(old[key])} -> {json.dumps(value)} (command line)"
        for key, value in (changes | names).items()
    ]
    assert sorted(resume.compare(now, DATA, attributes, "x")) == sorted(expected)


def test_an_average_may_not_begin_or_end():
    """The state has no average to go on with, or one too many; another decay may be."""
    keys = ("any_synthetic", ["family=llama"])
    none, low, high = (
        load(train_any.Config, keys[0], [*keys[1], f"training.ema_decay={decay}"]) for decay in (0, 0.5, 0.6)
    )
    for before, now in ((none, low), (low, none)):
        assert_refuses("training.ema_decay: ", resume.compare, now, DATA, resume.description(before, DATA), "x")
    assert len(resume.compare(high, DATA, resume.description(low, DATA), "x")) == 1


def test_a_folder_beside_a_url_has_one_run(tmp_path):
    """Metrics and pages of a run whose root is a URL are on the disk: another root's run of that name keeps its own."""
    (tmp_path / "config.yaml").write_text("paths: {root_working_dir: 's3://a/runs'}")
    for root, refuses in (("s3://a/runs", False), ("s3://b/runs", True)):
        config = SimpleNamespace(paths=SimpleNamespace(root_working_dir=root))
        run = SimpleNamespace(folder=tmp_path, _config=config)
        if refuses:
            parts = f"{tmp_path} has the metrics of the run in s3://a/runs: give this one another paths.model_name"
            assert_refuses(parts, Run._refuse_another_root, run)
        else:
            Run._refuse_another_root(run)


def test_a_stop_during_a_validation_that_waits_is_kept(capfd):
    """With patience a validation goes on after the signal, which several hosts are told of once only: the run stops
    after it."""
    stops = iter([False, True, False, False])
    with jax.set_mesh(make_mesh({"d": 1})):
        run = SimpleNamespace(
            _best=Best("validation_loss"), _score=None, _stopping=False, _total=2, due=lambda *_: True,
            _config=SimpleNamespace(eval_interval=1), _tracker=MagicMock(), _in_flight=MagicMock(),
            validation_data=SimpleNamespace(steps=4, source_of=lambda index: "", load=lambda index: None),
            _signals=SimpleNamespace(stop=lambda: next(stops)),
        )  # fmt: skip
        Run.validate_if_due(run, 0, lambda weights, total, count, batch: (total + 1, count + 1), None)
    assert run._stopping and run._best.step == 1 and next(stops, None) is None


def test_other_data_under_the_same_name_are_refused(tiny):
    """A data set that was written anew is told by its numbers, not by its path; allow_config_change=true goes on, and
    says so. A tokenizer, and what the data begin and end with, count where the checkpoint says which they were: earlier
    programs did not record them."""
    before, allowed, attributes = configs(tiny, "allow_config_change=true")
    change = '  the data: {"rows": 300, "max_token_id": 127} -> {"rows": 301, "max_token_id": 127}'
    parts = f"x was trained with another configuration: … {change} … Set these"
    assert_refuses(parts, resume.compare, before, {**DATA, "rows": 301}, attributes, "x")
    assert resume.compare(allowed, {**DATA, "rows": 301}, attributes, "x") == [change]
    for key in ("tokenizer", "ends"):
        one, other = ({**DATA, key: value} for value in "ab")
        assert resume.compare(before, one, attributes, "x") == []
        of_one = resume.description(before, one)
        assert resume.compare(before, one, of_one, "x") == []
        parts = f'the data: … "{key}": "a"}} -> … "{key}": "b"}}'
        assert_refuses(parts, resume.compare, before, other, of_one, "x")


def test_keys_of_an_older_program(tiny):
    """A key that the checkpoint does not know counts as its default; one that is no longer a key is said, a published
    key that is ignored now is not, and the config is read, as tools do; a key that nobody knows is refused there. No
    config, no complaint."""
    before, _, attributes = configs(tiny)
    del attributes["config"]["checkpoint"], attributes["config"]["model"]["norm_eps"]
    attributes["config"]["training"]["adam_eps_root"] = 0.0
    assert resume.compare(before, DATA, attributes, "x") == []
    assert resume.config_of(train.Config, attributes) == before and "adam_eps_root" in attributes["config"]["training"]
    attributes["config"]["training"]["momentum"] = 0.5
    assert resume.compare(before, DATA, attributes, "x") == ["  training.momentum: 0.5 -> null"]
    with pytest.raises(RunError, match=r"training\.momentum is not a key"):
        resume.config_of(train.Config, attributes)
    assert resume.compare(before, DATA, {"seed": 0}, "x") == []


# ---- bad steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_full", [False, True])
def test_bad_steps_stop_the_run(start, tmp_path, capsys, monkeypatch, is_full):
    """A learning rate that ruins the weights: after three bad steps in a row the run stops with status 1, names the
    first, its rows and the last checkpoint, saved before; also where the disk has no room for the rows."""
    if is_full:
        (tmp_path / "run/bad_steps.json.part").symlink_to("/dev/full")
    monkeypatch.setattr(runtime_run, "MOST_BAD_STEPS", 3)
    assert start("training.learning_rate=1e30", "checkpoint_interval=1") == 1
    lines = [line for line in records(tmp_path / "run") if "loss" in line]
    first = next(line["step"] for line in lines if line["skipped_steps"])
    printed = capsys.readouterr().err
    assert says(f"3 steps in a row … not finite … step {first}: loss … the last checkpoint … after step", printed)
    assert re.search(rf"\nThe 16 rows of step {first} are tokens \d+ to \d+ of .*tiny\.zarr", printed)
    assert checkpoints(tmp_path / "run") == list(range(1, first))
    if is_full:
        assert says("bad_steps.json, of all rows … cannot be written (No space left on device). Look at them", printed)
        return
    steps = json.loads((tmp_path / "run/bad_steps.json").read_text())
    assert [step["step"] for step in steps] == [first, first + 1, first + 2] and len(steps[0]["rows"]) == 16
    assert f"{tmp_path}/run/bad_steps.json has all rows" in printed


@pytest.mark.slow
def test_a_run_of_bad_steps_is_no_success(start, tmp_path, capsys, monkeypatch):
    """Where more than half of all steps were skipped the status is 1, though never too many came in a row, and also
    when it is started again."""
    monkeypatch.setattr(runtime_run, "MOST_BAD_STEPS", 100)
    for _ in range(2):
        assert start("training.learning_rate=1e30") == 1
        skipped = [line["skipped_steps"] for line in records(tmp_path / "run") if "loss" in line][-1]
        assert skipped > 6 and checkpoints(tmp_path / "run")[-1] == 12
        assert f"error: {skipped} of 12 steps were skipped" in capsys.readouterr().err


def test_the_rows_of_a_step_are_those_of_its_batch(tiny):
    """What rows_of names are the tokens that the step's batch holds, row by row."""
    config = load(train.Config, "local_test_synthetic", tiny)
    stored = zarr.open_group(config.flat_tokens.filespec)["train/encoded_tokens"][:]
    with open_data(config, "train", Batch(*[SingleDeviceSharding(jax.devices()[0])] * 3)) as loader:
        for step in (0, 3, loader.steps - 1):
            places = [re.match(r"tokens (\d+) to (\d+) of", row).groups() for row in loader.rows_of(step)]
            expected = np.stack([stored[int(first) : int(last) + 1] >> 1 for first, last in places])
            np.testing.assert_array_equal(np.asarray(loader.load(step).targets), expected)


def metrics_of(skipped):
    return {"loss": jnp.float32(np.nan if skipped else 1), "skipped_steps": jnp.uint32(skipped)}


def test_bad_steps_are_counted_in_a_row_only():
    """Good steps between them start the count anew, whenever it is read; the third in a row is one too many."""
    bad_steps = BadSteps(3, skipped_steps=5)
    found = {}
    for step, skipped in enumerate([5, 6, 7, 7, 8, 9, 9, 9, 10, 11, 12], 1):
        bad_steps.note(step, metrics_of(skipped))
        if step in (1, 2, 4, 6, 7, 9, 11):
            found[step] = [bad["step"] for bad in bad_steps.read()], len(bad_steps.row)
    assert found == {1: ([], 0), 2: ([], 1), 4: ([], 0), 6: ([], 2), 7: ([], 0), 9: ([], 1), 11: ([9, 10, 11], 3)}


def test_good_steps_cost_one_number():
    """Where none of the steps was skipped, only the last count is read from the device."""
    bad_steps = BadSteps(3, skipped_steps=0)
    unread = object()  # a number that cannot be read
    bad_steps.note(1, {"loss": unread, "skipped_steps": unread})
    bad_steps.note(2, {"loss": unread, "skipped_steps": jnp.uint32(0)})
    assert bad_steps.read() == []


# ---- when to save ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides, skipped, expected", [
    (["checkpoint_interval=5"], [0] * 12, [5, 10, 12]),
    (["checkpoint_interval=100"], [0] * 12, [12]),
    (["checkpoint_interval=100", "checkpoint.interval_minutes=4"], [0] * 12, [5, 9, 12]),
    (["checkpoint_interval=5", "checkpoint.interval_minutes=4"], [0] * 12, [5, 9, 10, 12]),
    # Steps 4 to 6 are bad: what is due at 5 waits for 7. The last step is saved whatever it is.
    (["checkpoint_interval=5"], [0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 4], [7, 10, 12]),
])  # fmt: skip
def test_when_a_run_saves(overrides, skipped, expected, tiny, monkeypatch):
    """It saves by steps, by minutes since the last checkpoint, and at the end; not after a bad step. A step takes a
    minute here. skipped: the steps that were skipped so far, by step."""
    running = Run.__new__(Run)
    running._config = load(train.Config, "local_test_synthetic", [*tiny, *overrides])
    running._total, running._stopping, running._save_is_late, running._saved_at = 12, False, False, 0.0
    running._bad_steps = BadSteps(100, skipped_steps=0)
    saved = []
    for step in range(12):
        running._bad_steps.note(step + 1, metrics_of(skipped[step]))
        monkeypatch.setattr(runtime_run.time, "monotonic", lambda now=60.0 * step: now)
        if running._save_is_due(step):
            saved.append(step + 1)
            running._saved_at = 60.0 * step
    assert saved == expected


# ---- several hosts, and no disk of one's own -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_kept_in_an_object_store(start, tiny, tmp_path, monkeypatch):
    """With a URL as root_working_dir the checkpoints and the owner are there, the rest is in `runs` here; started again
    it goes on."""
    monkeypatch.chdir(tmp_path)
    store = fsspec.filesystem("memory")
    in_store = ["paths.root_working_dir=memory://runs", "paths.model_name=kept"]
    assert start(*in_store, "training.steps=5") == 0
    assert start(*in_store, "training.steps=9") == 0
    names = sorted(path.rpartition("/")[2] for path in store.ls("/runs/kept/checkpoints", detail=False))
    assert [name for name in names if name.isdigit()] == ["0000000004", "0000000005", "0000000008", "0000000009"]
    assert [step for step, _ in losses(tmp_path / "runs/kept")] == list(range(1, 10))
    assert not store.exists(f"/runs/kept/{lock.NAME}")
