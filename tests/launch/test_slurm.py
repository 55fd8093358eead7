"""A Slurm of this one machine: srun, and launch/train.sbatch, which is queued again after a kill and after a
preemption."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import several_hosts as hosts
from several_hosts import nothing_is_left  # noqa: F401 a fixture

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd runs as root"),
]

# The cluster has no systemd, cgroups or accounting, and a node of eight processors, whatever the machine has.
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which a command finds this Slurm."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool", "compiled"):
        (folder / name).mkdir(mode=0o700)
    ports = {"ctld_port": hosts.free_port(), "d_port": hosts.free_port()}
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, **ports))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    for parent in (folder, *folder.parents[:2]):  # munge wants its socket's folders to be open to all
        parent.chmod(0o755)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = ["munged", "--force", *(f"--{option}={folder}/munge.{name}" for option, name in files.items())]
    env = {**hosts.environment(folder / "compiled"), "SLURM_CONF": str(folder / "slurm.conf")}
    started = []
    try:
        for name, command in (("munge", munged), ("slurmctld", ["slurmctld"]), ("slurmd", ["slurmd"])):
            subprocess.run(command, env=env, check=True, timeout=600)
            hosts.wait_until((folder / f"{name}.pid").exists, limit_s=600)
            started.append(int((folder / f"{name}.pid").read_text()))
        hosts.wait_until(lambda: ask(env, "sinfo", "-h", "-o", "%T") == "idle", limit_s=600)
        yield env
    finally:
        subprocess.run(["scancel", "--user=root"], env=env)
        for pid in reversed(started):
            os.kill(pid, signal.SIGTERM)


def ask(env, *command):
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600).stdout.strip()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return [*hosts.TINY, hosts.write_mixture(tmp_path_factory.mktemp("data"))]


def test_srun(slurm, mixture, tmp_path):
    """Two processes that srun starts find each other: the table, the losses of two processes that keys bring together;
    with another num_hosts each is refused before it waits."""
    folder = tmp_path / "run"
    srun = ["srun", "-n", "2", "--overcommit", "--label", *hosts.TRAIN, *mixture]
    ended = subprocess.run([*srun, *hosts.where(folder)], cwd=hosts.ROOT, env=slurm, capture_output=True, text=True)
    refusal = "num_hosts = 1: this job has 2 processes: "
    assert ended.returncode == 1 and ended.stderr.count(refusal) == 2, ended.stdout + ended.stderr
    command = [*srun, *hosts.TWO, *hosts.where(folder)]
    ended = subprocess.run(command, cwd=hosts.ROOT, env=slurm, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 hosts, 8 devices: mesh d=4 × t=2" in ended.stdout and hosts.checkpoints(folder) == [3, 6]
    by_keys = hosts.start_two([*mixture, *hosts.where(tmp_path / "keys")], slurm, output=tmp_path / "log")
    assert [process.wait(400) for process in by_keys] == [0, 0]
    assert hosts.losses(folder) == hosts.losses(tmp_path / "keys")


def test_sbatch_is_queued_again(slurm, mixture, tmp_path):
    """A run of launch/train.sbatch, of which one process is killed, and which is then told to save as before a time
    limit: queued again both times, in the same folder, it comes to its end with the losses of a run that was left
    alone."""
    folder, log, long = tmp_path / "run", tmp_path / "log", ["training.steps=80", "checkpoint_interval=10"]
    # The directives that only a cluster with GPUs can fulfil; all others are the script's own.
    here = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0", f"--output={log}"]
    env = {**slurm, "VENV": os.path.dirname(os.path.dirname(sys.executable))}
    arguments = [*mixture, *hosts.TWO, *long, *hosts.where(folder)]
    job = ask(env, "sbatch", "--parsable", f"--chdir={hosts.ROOT}", *here, "launch/train.sbatch", *arguments)

    def state():
        return ask(env, "squeue", "-h", "-j", job, "-o", "%T")

    def queued_again(text):
        hosts.wait_until(lambda: state() == "PENDING", limit_s=200)
        assert text in log.read_text(), log.read_text()
        time.sleep(2)  # slurmd takes a job that starts again within the second of its end for one that was ended
        ask(env, "scontrol", "update", f"JobId={job}", "StartTime=now")  # else Slurm waits two minutes

    hosts.wait_for_step(folder, 12)
    second = re.search(rf"^(\d+) +{job} +0 +1 ", ask(env, "scontrol", "listpids"), re.MULTILINE)
    os.kill(int(second[1]), signal.SIGKILL)
    queued_again("since a process died: queued again")
    resumed = hosts.checkpoints(folder)[-1]
    hosts.wait_until(lambda: f"going on after step {resumed} of 80" in log.read_text())
    hosts.wait_for_step(folder, resumed + 3)
    ask(env, "scancel", "--signal=TERM", job)  # which is what --signal=TERM@120 sends
    queued_again("stopped by a signal: queued again")
    hosts.wait_until(lambda: state() in ("", "COMPLETED"), limit_s=300)
    alone = hosts.start_two([*mixture, *long, *hosts.where(tmp_path / "alone")], slurm, output=tmp_path / "alone_log")
    assert [process.wait(400) for process in alone] == [0, 0]
    assert hosts.losses(folder) == hosts.losses(tmp_path / "alone"), log.read_text()
    assert np.isfinite([loss for _, loss in hosts.losses(folder)]).all() and len(hosts.losses(folder)) == 80
    assert log.read_text().count("queued again") == 2
