"""Checkpoints of several hosts: two processes of four simulated devices each, over gloo, on one directory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from checkpoint_state import assert_same_bits, numpy_state, open_checkpoints, restore, save
from jax.experimental import multihost_utils
from parts import says
from several_hosts import free_port, without_gloo

from runtime.checkpoints.hosts import Hosts
from runtime.checkpoints.store import open_store
from runtime.terminal import RunError

BEGINNING = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path[:0] = [{root!r}, {tests!r}]
import jax
from jax.experimental import multihost_utils
host, address, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
# Short, since a host that was killed does not come to the end, where the others wait for it.
jax.distributed.initialize(address, 2, host, shutdown_timeout_seconds=5, heartbeat_timeout_seconds=100)
import checkpoint_state as states
from runtime.terminal import RunError
from runtime.checkpoints.store import LocalStore

mesh = states.mesh_of(4, 2)

original_write = LocalStore.write
"""

SAVE_AND_RESTORE = """
checkpoints = states.open_checkpoints(directory, waits=False, keep_last=2)
assert checkpoints.latest() is None
for step in (5, 10, 20):
    checkpoints.save(step, states.put(states.numpy_state(step), mesh), {"at": step})
assert checkpoints.latest() == 20
read = []
original_read = LocalStore.read
LocalStore.read = lambda store, name, *most: (read.append(name), original_read(store, name, *most))[1]
step, tree = checkpoints.restore(states.like(2, 4))
assert step == 20
states.assert_same_bits(tree, states.numpy_state(20))
print("read", sorted(name[11:] for name in read if "0000000020/weights/embed/c." in name))

if host == 1:
    with open(os.path.join(directory, "0000000020/weights/embed/c.1.3"), "r+b") as file:
        file.write(b"damaged")
multihost_utils.sync_global_devices("the damage is done")
step, tree = checkpoints.restore(states.like(4, 2))
states.assert_same_bits(tree, states.numpy_state(10))
print("restored", step, "latest", checkpoints.latest(), checkpoints.attributes(step))

def failing_write(store, name, *parts):
    if host == 1 and name.endswith("embed/c.1.3"):
        raise OSError(5, "Input/output error")
    original_write(store, name, *parts)

LocalStore.write = failing_write
checkpoints.save(30, states.put(states.numpy_state(30), mesh), {})
try:
    checkpoints.close()
except RunError as error:
    print("RunError:", error)
print("left", sorted(os.listdir(directory)))
"""

KILLED_WHILE_SAVING = """
import signal, time
checkpoints = states.open_checkpoints(directory, waits=False, timeout_s=6)
checkpoints.save(10, states.put(states.numpy_state(10), mesh), {})

def killing_write(store, name, *parts):
    if "0000000020/" in name and host == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    original_write(store, name, *parts)

killed = int(sys.argv[4])
assert checkpoints.latest() == 10
LocalStore.write = killing_write
began = time.monotonic()
checkpoints.save(20, states.put(states.numpy_state(20), mesh), {})
try:
    while True:
        checkpoints.raise_failure()
        time.sleep(0.05)
except RunError as error:
    print(f"RunError after {time.monotonic() - began:.0f} s:", error, flush=True)
"""


def start_hosts(tmp_path, program, *arguments):
    tests = Path(__file__).parents[2]
    (tmp_path / "host.py").write_text(BEGINNING.format(root=str(tests.parent), tests=str(tests)) + program)
    command = [f"localhost:{free_port()}", str(tmp_path / "checkpoints"), *arguments]
    return [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "host.py"), str(host), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]


def outputs_of(hosts, timeout_s):
    try:
        return [host.communicate(timeout=timeout_s) for host in hosts]
    finally:
        for host in hosts:
            host.kill()


def test_two_hosts(tmp_path):
    """Two hosts save behind the steps, restore on another mesh by reading each its own chunks, fall back together, and
    both raise when one's write fails."""
    outputs = outputs_of(start_hosts(tmp_path, SAVE_AND_RESTORE), 400)
    path = tmp_path / "checkpoints"
    chunks = [[f"weights/embed/c.{row}.{column}" for column in range(4)] for row in range(2)]
    for host, (output, errors) in enumerate(outputs):
        lines = without_gloo(output)
        assert len(lines) == 4, output + errors
        # On 2 × 4 the first host holds column 0 to 3 of d = 0, that is the columns' first half.
        assert lines[0] == f"read {[row[column] for row in chunks for column in (2 * host, 2 * host + 1)]}"
        assert lines[1] == "restored 10 latest 10 {'at': 10}"
        own = f"{path}/0000000030/weights/embed/c.1.3 … OSError: [Errno 5]"
        others = f"checkpoint {path}/0000000030 could not be saved: host 1: {own}"
        assert says(f"RunError: {own if host == 1 else others}", lines[2])
        assert lines[3].replace("'.hosts', ", "") == "left ['0000000010', '0000000020', '0000000030']"
    fault = "is damaged: weights/embed/c.1.3 … checksum"
    assert says(f"passed over: host 1: checkpoint {path}/0000000020 {fault}", outputs[0][1])
    directory = tmp_path / "checkpoints"
    assert len(list((directory / ".hosts").iterdir())) <= 3  # what was read by all is removed
    assert open_checkpoints(directory).latest() == 20  # one process alone, which does not know yet that it is damaged
    save(directory, 40)
    assert_same_bits(restore(directory, (1, 1))[1], numpy_state())


def test_the_first_host_may_be_the_dead_one(tmp_path, monkeypatch):
    """The others wait for it twice as long as it may wait for them, and say so."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda value: value)
    with pytest.raises(RunError, match=r"nothing was heard of host 0 within 0\.2 s"):
        Hosts(open_store(tmp_path, 1), timeout_s=0.1).agree(None, 1)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0])
def test_a_host_that_is_killed_while_saving(tmp_path, killed):
    """The other host ends, by its own error or, when the first host dies, by JAX's; the
    checkpoint is not complete."""
    hosts = start_hosts(tmp_path, KILLED_WHILE_SAVING, str(killed))
    outputs = outputs_of(hosts, 600)
    assert hosts[killed].returncode == -signal.SIGKILL
    output, errors = outputs[1 - killed]
    if killed == 1:
        parts = "RunError after … s: checkpoint … /0000000020 could not be saved: … host 1 within 6 s"
        assert says(parts, output), output + errors
    else:
        assert "RunError" in output or "distributed service" in errors, output + errors
    directory = tmp_path / "checkpoints"
    assert not (directory / "0000000020" / "zarr.json").exists() and os.listdir(directory / "0000000020")
    assert open_checkpoints(directory).latest() == 10
