"""train_any.py in two processes: each axis across them; and what a slow, a dead and a faulty
one do."""

import re
import signal
import subprocess
import sys

import pytest
import several_hosts as hosts
import small
from several_hosts import nothing_is_left  # noqa: F401 a fixture
from test_cluster import MPIRUN, needs_mpirun

import train_any
from runtime.cluster import processes

PROGRAM = [sys.executable, "-m", "train_any"]
MIXTURE = "family=mixtral model.experts=4 model.experts_per_token=2"
STAGES = "model.layers=4 training.microbatches=4"
ACROSS = {
    "r": "mesh.r=2 mesh.d=2 mesh.t=1",
    "d": "mesh.d=2 mesh.t=2",
    "c": "mesh.d=1 mesh.c=2 mesh.t=2",
    "c of gathered keys": "mesh.d=1 mesh.c=2 mesh.t=2 model.n_kv=2",
    "e": f"mesh.d=1 mesh.e=2 mesh.t=2 {MIXTURE}",
    "e with a capacity": f"mesh.d=1 mesh.e=2 mesh.t=2 {MIXTURE} model.capacity=1.0",
    "t": "mesh.d=1 mesh.t=4",
    "p": f"mesh.p=2 mesh.d=2 mesh.t=1 {STAGES}",
    "p with r": f"mesh.p=2 mesh.r=2 mesh.d=1 mesh.t=1 {STAGES}",
    "p with t, interleaved": f"mesh.p=2 mesh.d=1 mesh.t=2 {STAGES} training.pieces=2",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return hosts.write_tiny(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize("axis", ACROSS)
def test_an_axis_across_processes(axis, data, tmp_path, monkeypatch):
    """Two devices in each of two processes that mpirun starts have the losses and the validation loss of four devices
    in one, but for the order in which sums are taken."""
    keys = [*hosts.TINY, data, *ACROSS[axis].split()]
    assert small.start_training(monkeypatch, *keys, *hosts.where(tmp_path / "one"), trainer=train_any) == 0
    command = [*MPIRUN, sys.executable, "-m", "train_any", *keys, *hosts.TWO, *hosts.where(tmp_path / "two")]
    env = hosts.environment(tmp_path / "compiled")
    ended = subprocess.run(command, cwd=hosts.ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"Between hosts, along axis {axis[0]}: " in ended.stdout
    for name, count in (("loss", 6), ("validation_loss", 1)):
        ours, expected = (hosts.logged(tmp_path / run, name) for run in ("two", "one"))
        assert len(expected) == count and ours == pytest.approx(expected, rel=1e-5)


# -- Faults ------------------------------------------------------------------------------------------------------------
RUN = """
import train_any
from runtime.config.command_line import run
run(train_any.main, train_any.Config)
"""
SLOW = """
import time
import jax
import runtime.run as at
opened = at.open_data
def slow(*given):
    data = opened(*given)
    load = data.load
    data.load = lambda step: (time.sleep(2 * jax.process_index()), load(step))[1]
    return data
at.open_data = slow
"""
NAN = """
import dataclasses
import jax
import numpy as np
import runtime.run as at
first_state = at.Run.first_state
def poisoned(run, *given):
    state = first_state(run, *given)
    norm, own = state.weights.final_layer_norm, jax.local_devices()[1]
    parts = [jax.device_put(np.asarray(shard.data) * (np.nan if jax.process_index() and shard.device == own else 1),
                            shard.device) for shard in norm.addressable_shards]
    norm = jax.make_array_from_single_device_arrays(norm.shape, norm.sharding, parts)
    return dataclasses.replace(state, weights=dataclasses.replace(state.weights, final_layer_norm=norm))
at.Run.first_state = poisoned
"""


def run_two(program, data, folder, *keys):
    """Two replicas, each in a process that runs this program first; their statuses and what each printed."""
    both = hosts.start_two(
        [*hosts.TINY, data, "mesh.r=2", "mesh.d=1", *keys, *hosts.where(folder / "run")],
        hosts.environment(folder / "compiled"),
        output=folder / "log",
        program=[sys.executable, "-c", program + RUN],
    )
    statuses = [process.wait(400) for process in both]
    return statuses, [" ".join((folder / f"log.{index}").read_text().split()) for index in range(2)]


@pytest.mark.slow
def test_a_slow_host_is_named(data, tmp_path):
    """Process 1 takes two seconds longer to load its rows: it is named, once, and process 0, which waits for it, is
    not."""
    statuses, printed = run_two(SLOW, data, tmp_path, "training.steps=8")
    assert statuses == [0, 0], printed
    assert re.findall(r"warning: host \S+ \(process (\d) of 2\) is slow: ", printed[0]) == ["1"]
    assert "is slow" not in printed[1]


@pytest.mark.slow
def test_the_device_that_holds_a_nan_is_named(data, tmp_path):
    """A number goes bad in one device's part of a norm: both processes end with status 1, and the one that has the
    device names its place in the mesh and what it holds."""
    statuses, printed = run_two(NAN, data, tmp_path, "training.steps=20")
    assert statuses == [1, 1]
    assert "10 steps in a row had a loss" in printed[0] and "Not finite on this host: no weight or moment" in printed[0]
    holds = r"Not finite on this host: weights/final_layer_norm on device \d+ \(p 0, r 1, d 0, c 0, e 0, t 1\)\. "
    assert re.search(holds, printed[1])


@pytest.mark.slow
def test_a_job_goes_on_on_fewer_hosts(tmp_path, monkeypatch):
    """Process 1 of two replicas is killed, and process 0 ends within a minute. One process, without r, goes on from the
    last checkpoint with the losses of an undisturbed run."""
    tiny = [*hosts.TINY, hosts.write_mixture(tmp_path), "mesh.d=1", "checkpoint_interval=3"]
    ever, folder = [key for key in hosts.FOR_EVER if "checkpoint" not in key], tmp_path / "parts"
    both = hosts.start_two(
        [*tiny, *ever, "mesh.r=2", *hosts.where(folder)],
        hosts.environment(tmp_path / "compiled"),
        output=tmp_path / "log",
        program=PROGRAM,
    )
    hosts.wait_until(lambda: (folder / "checkpoints").exists() and hosts.checkpoints(folder))
    both[1].kill()
    assert both[0].wait(processes.SILENT_S + 600) in (134, -signal.SIGABRT)
    done = hosts.checkpoints(folder)[-1]
    for run_folder in (folder, tmp_path / "whole"):
        keys = [*tiny, f"training.steps={done + 3}", "mesh.r=1", *hosts.where(run_folder)]
        assert small.start_training(monkeypatch, *keys, trainer=train_any) == 0
    losses, whole = (dict(hosts.losses(run_folder)) for run_folder in (folder, tmp_path / "whole"))
    assert list(losses) == list(whole) and losses[done + 3] == pytest.approx(whole[done + 3], rel=1e-5)
