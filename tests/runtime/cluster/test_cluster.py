"""Several hosts: who they are, the mesh over them, what is said; and real runs of two processes with four devices
each."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest
import several_hosts as hosts
import small
from parts import assert_refuses, says
from several_hosts import nothing_is_left  # noqa: F401 a fixture

import train
from runtime import terminal as errors
from runtime.cluster import processes as cluster
from runtime.config.command_line import load
from runtime.terminal import RunError

needs_mpirun = pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun: apt-get install openmpi-bin")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--tag-output", "-np", "2"]


@dataclasses.dataclass(frozen=True)
class Device:
    """What the mesh and the table look at."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def gpus(hosts, per_host):
    return [Device(host * per_host + index, host, host) for host in range(hosts) for index in range(per_host)]


# ---------------------------------------------------------------- the mesh


@pytest.mark.parametrize(
    "per_host, d, t, crossed",
    [(8, 4, 4, "d"), (8, 2, 8, "d"), (8, 16, 1, "d"), (8, 1, 16, "t"), (4, 1, 8, "t"), (6, 3, 4, "dt")],
)
def test_axis_t_stays_within_a_host_where_it_fits(per_host, d, t, crossed):
    """The devices of two GPU hosts come in any order: those along t are of one host, unless t is larger than a host or
    does not divide it."""
    devices = gpus(2, per_host)
    np.random.default_rng(0).shuffle(devices)
    mesh = cluster.lay_out(devices, {"d": d, "t": t})
    assert {device.id for device in mesh.devices.flat} == set(range(2 * per_host))
    assert cluster.crossing(mesh) == tuple(crossed)
    assert mesh.axis_names == ("d", "t")


def test_three_axes_over_hosts():
    """Four hosts of four follow each other along the first axes, and the last axis stays within one."""
    mesh = cluster.lay_out(gpus(4, 4), {"a": 2, "b": 2, "c": 4})
    assert mesh.axis_names == ("a", "b", "c") and cluster.crossing(mesh) == ("a", "b") and cluster.advice(mesh) == []
    *_, row, last = cluster.table(mesh, ["one", "two", "three", "four"])
    assert row == "        3  four   4 × NVIDIA H200: a 1, b 1, c 0-3"
    assert last == "axis a and axis b crosses hosts; axis c stays within one"
    (text,) = cluster.advice(cluster.lay_out(gpus(4, 4), {"a": 1, "b": 2, "c": 8}))
    assert text.endswith("set mesh.c=4 mesh.a=2")


@dataclasses.dataclass(frozen=True)
class Tpu(Device):
    """What JAX looks at besides, to place a mesh on a torus."""

    coords: tuple = ()
    core_on_chip: int = 0


def test_axes_share_a_dim_of_a_torus():
    """t=2 of 4 × 4 × 4 TPUs, of which no dim has two: the devices along t are neighbours."""
    cube = [
        Tpu(16 * z + 4 * y + x, z, 0, "tpu", "TPU v5", (x, y, z)) for z in range(4) for y in range(4) for x in range(4)
    ]
    placed = cluster.lay_out(cube, {"d": 32, "t": 2}).devices
    assert len({device.id for device in placed.flat}) == 64
    for one, other in placed:
        assert sorted(abs(a - b) for a, b in zip(one.coords, other.coords)) == [0, 0, 1]


def test_slices_are_joined_along_d():
    """Two hosts of a TPU slice are as near as one host, and slices follow each other along d."""
    devices = [
        Tpu(8 * s + 2 * y + x, 2 * s + y // 2, s, "tpu", "TPU v5 lite", (x, y, 0))
        for s in range(2)
        for y in range(4)
        for x in range(2)
    ]
    mesh = cluster.lay_out(devices, {"d": 8, "t": 2})
    assert cluster.crossing(mesh) == ("d",)
    assert [[device.slice_index for device in row] for row in mesh.devices] == [[0, 0]] * 4 + [[1, 1]] * 4
    lines = cluster.table(mesh, ["a-0", "a-1", "b-0", "b-1"])
    assert lines[0] == "4 hosts, 16 devices: mesh d=8 × t=2"
    assert lines[-1] == "axis d crosses slices; axis t stays within one"
    within = cluster.lay_out(devices[:8], {"d": 1, "t": 8})  # two hosts of a slice: nothing is slow about it
    assert cluster.advice(within) == [] and cluster.table(within, ["a-0", "a-1"])[-1] == "no axis leaves a slice"


def test_the_table_and_the_warning():
    """The table has each process with its host, devices and part of the mesh; a warning says that a mesh whose t
    crosses hosts is slow, and the fix."""
    mesh = cluster.lay_out(gpus(2, 8), {"d": 4, "t": 4})
    assert cluster.table(mesh, ["gpu-01", "gpu-02"]) == [
        "2 hosts, 16 devices: mesh d=4 × t=4",
        "  process  host    devices",
        "        0  gpu-01  8 × NVIDIA H200: d 0-1, t 0-3",
        "        1  gpu-02  8 × NVIDIA H200: d 2-3, t 0-3",
        "axis d crosses hosts; axis t stays within one",
    ]
    assert cluster.advice(mesh) == []
    mesh = cluster.lay_out(gpus(2, 8), {"d": 1, "t": 16})
    assert cluster.table(mesh, ["a", "b"])[3:] == [
        "        1  b     8 × NVIDIA H200: d 0, t 8-15",
        "axis t crosses hosts",
    ]
    (text,) = cluster.advice(mesh)
    assert says("warning: axis t (mesh.t = 16) crosses hosts … 8 devices each … set mesh.t=8 mesh.d=2", text)
    assert cluster.advice(cluster.lay_out(gpus(2, 6), {"d": 3, "t": 4}))[0].endswith("set mesh.t=2 mesh.d=6")


# ---------------------------------------------------------------- who is there


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_num_hosts_that_disagrees_with_the_launcher(variable, monkeypatch):
    """More or fewer processes than num_hosts says are refused before any of them waits for another."""
    monkeypatch.setenv(variable, "4")
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("waited for the others"))
    for given in (1, 2):
        config = load(train.Config, "local_test_synthetic", [f"num_hosts={given}"])
        where = "alone" if given == 1 else f"on each of {given} hosts"
        parts = f"command line: num_hosts = {given}: this job has 4 processes … {where}, or set num_hosts=4"
        assert_refuses(parts, cluster.start, config)


def test_keys_that_cannot_be():
    """The keys cluster.* are checked against num_hosts when the config is loaded."""
    for keys, parts in (
        ("num_hosts=2 cluster.coordinator=gpu-01 cluster.process_id=2",
         'cluster.coordinator = "gpu-01": expected HOST:PORT … cluster.process_id = 2: expected 0 to 1'),
        ("cluster.coordinator=gpu-01:8476", "num_hosts = 1: cluster.coordinator is set: expected"),
    ):  # fmt: skip
        assert_refuses(parts, load, train.Config, "local_test_synthetic", keys.split())


def test_a_platform_that_is_not_there(monkeypatch):
    """JAX ends with an error of its own, or, where the platform's plugin is missing, with one that has no text."""
    missing = "what JAX_PLATFORMS asks for is not installed"
    for error, why in [(RuntimeError("no driver"), "no driver"), (AssertionError(), missing)]:
        monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=error))
        config = load(train.Config, "local_test_synthetic")
        assert_refuses(f"JAX does not start: {why}; fix: nvidia-smi", cluster.start, config)


def test_nobody_says_who_the_others_are(monkeypatch):
    """num_hosts=2 without a launcher is an error that lists what can say it."""
    error = ValueError("coordinator_address should be defined.")
    monkeypatch.setattr(jax.distributed, "initialize", mock.Mock(side_effect=error))
    text = "num_hosts = 2 … who the other processes are (coordinator_address … srun … mpirun … coordinator=HOST:PORT"
    assert_refuses(text, cluster.start, load(train.Config, "local_test_synthetic", ["num_hosts=2"]))


@pytest.mark.parametrize("environment, expected", [
    ({}, []),
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4"}, []),
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "4"}, None),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, []),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, None),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
])  # fmt: skip
def test_a_process_alone_on_its_host_has_all_devices(environment, expected, monkeypatch):
    """JAX is told to leave all of them visible ([]), where it would take the first alone; several share as JAX does
    it."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "OMPI_COMM_WORLD_LOCAL_SIZE", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cluster._local_devices() == expected


def test_errors_of_one_of_several_begin_with_its_host(monkeypatch, capsys):
    """Its last message names host and process; it ends at once, since the others may wait for it."""
    monkeypatch.setattr(errors, "_process", "")
    monkeypatch.setattr(errors, "_lingers_s", 0.0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    errors.print_error(RunError("so"))
    errors.one_of_several("gpu-02", 1, 4)
    errors.print_error(RunError("so"))
    assert capsys.readouterr().err == "error: so\nhost gpu-02 (process 1 of 4): error: so\n"
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "exit", lambda status: None)
    sys.excepthook(jax.errors.JaxRuntimeError, jax.errors.JaxRuntimeError("Connection closed by peer"), None)
    assert ended == [134]
    host = "host gpu-02 (process 1 of 4): "
    parts = f"{host}JaxRuntimeError: Connection closed by peer {host}hint: most likely another process ended first"
    assert says(parts, capsys.readouterr().err)


# ---------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return [*hosts.TINY, hosts.write_mixture(tmp_path_factory.mktemp("data"))]


@pytest.fixture(scope="module")
def alone(mixture, tmp_path_factory):
    """The folder of the same run in one process with eight devices: this one."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert small.start_training(patch, *mixture, *hosts.where(folder)) == 0
    return folder


ROUNDING = 1e-5  # float32's own error in sums of a few terms, over six steps


@pytest.mark.slow
@needs_mpirun
def test_mpirun(mixture, alone, cache, tmp_path):
    """Two processes that mpirun starts find each other; process 0 prints the table and tracks. The losses of the
    mixture, validation too, are those of one process, but for the order of sums."""
    folder = tmp_path / "run"
    command = [*MPIRUN, *hosts.TRAIN, *mixture, *hosts.TWO, *hosts.where(folder)]
    ended = subprocess.run(
        command, cwd=hosts.ROOT, env=hosts.environment(cache), capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # mpirun tags what it passes on, also in the middle of a line.
    second = re.findall(r"\[1,1\]<stdout>:(.*?)(?=\[1,\d\]<stdout>:|$)", ended.stdout, re.MULTILINE)
    assert not hosts.without_gloo("\n".join(second))
    table = re.search(r"2 hosts, 8 devices: mesh d=4 × t=2\n(.*\n){3}.*crosses hosts.*", ended.stdout)[0]
    rows = re.findall(r"(\d)  \S+ +4 × cpu: d (\d-\d), t 0-1\n", table)
    assert rows == [("0", "0-1"), ("1", "2-3")] and "axis d crosses hosts; axis t stays within one" in table
    assert re.search(r"Between hosts, along axis d: 0.\d\d MB of the 0.\d\d MB that each device sends", ended.stdout)
    np.testing.assert_allclose(hosts.losses(folder), hosts.losses(alone), rtol=ROUNDING)
    assert len(expected := hosts.logged(alone, "validation_loss")) == 1
    assert hosts.logged(folder, "validation_loss") == pytest.approx(expected, rel=ROUNDING)
    assert hosts.checkpoints(folder) == [3, 6]


@pytest.mark.slow
def test_resumed_by_one_and_by_two(mixture, alone, cache, tmp_path):
    """Two processes train half a run and one the other half, and the other way about: the losses are those of the whole
    run."""
    env, half = hosts.environment(cache), "training.steps=3"

    def by_one(folder, *overrides):
        command = [*hosts.TRAIN, *mixture, *hosts.where(folder), *overrides]
        assert subprocess.run(command, cwd=hosts.ROOT, env=env).returncode == 0

    def by_two(folder, *overrides):
        processes = hosts.start_two([*mixture, *hosts.where(folder), *overrides], env, output=tmp_path / "log")
        assert [process.wait(400) for process in processes] == [0, 0], (tmp_path / "log.0").read_text()

    by_two(tmp_path / "a", half)
    by_one(tmp_path / "a")
    by_one(tmp_path / "b", half)
    by_two(tmp_path / "b")
    for name in "ab":
        np.testing.assert_allclose(hosts.losses(tmp_path / name), hosts.losses(alone), rtol=ROUNDING)
    by_two(tmp_path / "c")
    by_two(tmp_path / "d", half)
    by_two(tmp_path / "d")
    assert hosts.losses(tmp_path / "d") == hosts.losses(tmp_path / "c")  # the same processes: bit for bit


@pytest.mark.slow
def test_sums_of_two_terms_are_equal_bit_for_bit(mixture, cache, tmp_path):
    """One device a process gives the very same losses, since each sum over the mesh has two terms, whose order does not
    matter."""
    keys, env = [*mixture, "mesh.d=2", "mesh.t=1"], hosts.environment(cache)
    one = [*hosts.TRAIN, *keys, *hosts.where(tmp_path / "one")]
    assert subprocess.run(one, cwd=hosts.ROOT, env=env).returncode == 0
    both = hosts.start_two([*keys, *hosts.where(tmp_path / "two")], env, output=tmp_path / "log")
    assert [process.wait(400) for process in both] == [0, 0], (tmp_path / "log.0").read_text()
    assert hosts.losses(tmp_path / "one") == hosts.losses(tmp_path / "two")


@pytest.mark.slow
def test_preempted_saved_by_minutes_and_in_use(mixture, cache, tmp_path):
    """checkpoint.interval_minutes saves on both; a second job in the folder is refused on all its hosts, which name
    themselves; SIGTERM to one process stops both after the same step, with status 75."""
    folder, env = tmp_path / "run", hosts.environment(cache)
    minutes = [*mixture, *hosts.where(folder), *hosts.FOR_EVER, "checkpoint.interval_minutes=0.05"]
    first = hosts.start_two(minutes, env, output=tmp_path / "first")
    hosts.wait_for_step(folder, 1, first)
    hosts.wait_until(lambda: hosts.checkpoints(folder))
    second = hosts.start_two(minutes, env, output=tmp_path / "second")
    assert [process.wait(200) for process in second] == [1, 1]
    for index, text in ((0, rf"{folder} is in use: process {first[0].pid} on host"), (1, "in use by another run")):
        printed = (tmp_path / f"second.{index}").read_text()
        assert re.search(rf"\nhost \S+ \(process {index} of 2\): error: .*{text}", printed), printed
    assert all(process.poll() is None for process in first)
    first[1].send_signal(signal.SIGTERM)
    assert [process.wait(200) for process in first] == [75, 75]
    last = hosts.checkpoints(folder)[-1]
    assert f"stopped after step {last} of 100000" in (tmp_path / "first.0").read_text()
    assert "stopped after" not in (tmp_path / "first.1").read_text()
    assert hosts.losses(folder)[-1][0] == last


@pytest.mark.slow
@pytest.mark.parametrize("ends, how", [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_process_that_dies_ends_the_other(ends, how, mixture, cache, tmp_path):
    """A process that is killed or silent ends the other with status 134, by its own message or JAX's, after
    SILENT_S."""
    folder = tmp_path / "run"
    both = hosts.start_two(
        [*mixture, *hosts.where(folder), *hosts.FOR_EVER], hosts.environment(cache), output=tmp_path / "log"
    )
    hosts.wait_for_step(folder, 2, both)
    both[ends].send_signal(how)
    try:
        status = both[1 - ends].wait(1200)
    finally:
        both[ends].kill()
    printed = (tmp_path / f"log.{1 - ends}").read_text()
    assert status in (134, -signal.SIGABRT), printed
    own = rf"\nhost \S+ \(process {1 - ends} of 2\): hint: most likely another process ended first"
    assert re.search(own, printed) or "This most likely indicates that another task died" in printed


MISSING = """
from runtime.cluster import processes as cluster
cluster.WAITING_S, cluster.START_S = 1, 5
import train
from runtime.config.command_line import run
run(train.main, train.Config)
"""


@pytest.mark.slow
def test_a_process_that_never_comes(mixture, cache, tmp_path):
    """The process that waits says for whom, and that it will end; JAX ends it after START_S, with status 134."""
    who = [f"cluster.coordinator=localhost:{hosts.free_port()}", "cluster.process_id=0"]
    arguments = [*mixture, *hosts.TWO, *hosts.where(tmp_path / "run"), *who]
    program = [sys.executable, "-c", MISSING, *arguments]
    ended = subprocess.run(program, cwd=hosts.ROOT, env=hosts.environment(cache), capture_output=True, text=True)
    assert ended.returncode == -signal.SIGABRT
    said = r"host \S+: waiting for the others of 2 processes for 1 s; after 5 s this ends with status 134\. Do"
    assert re.search(said, ended.stderr)
