"""How the hosts of a run agree, from any thread: by small files in the store that they share.

    hosts = Hosts(store, timeout_s=600)                       # by all hosts alike
    fault, values = hosts.agree(fault, value)                 # the same on every host

Collectives would run between those of the training step, in another order on each host. A host that has not spoken for
`timeout_s` counts as dead. A shared file system may show a new file late (NFS: up to a minute).
"""

import json
import secrets
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from runtime.checkpoints.store import LocalStore, RemoteStore
from runtime.terminal import RunError

FOLDER = ".hosts"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class Hosts:
    """The processes of this JAX program, which all call the same methods in the same order; one alone has no files."""

    def __init__(self, store: LocalStore | RemoteStore, timeout_s: float):
        self._store, self._timeout_s, self._exchanges = store, timeout_s, 0
        self.index, self.count = jax.process_index(), jax.process_count()
        self.is_leader = self.index == 0
        if self.count > 1:
            if self.is_leader:
                store.remove(FOLDER)  # left by an earlier run; nobody writes before the broadcast
            # A name of this run's own: files of an earlier run may still become visible.
            self._run = int(multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32))))

    def agree(self, fault: str | None, value: Any) -> tuple[str | None, list[Any]]:
        """Exchanges faults and values (JSON): returns all hosts' faults in one text, or None, and all hosts' values."""
        if self.count == 1:
            return fault, [value]
        self._say(str(self.index), [fault and f"host {self.index}: {fault}", value])
        if self.is_leader:
            names = [str(host) for host in range(self.count)]
            heard = self._hear(names, self._timeout_s)
            faults = [heard[name][0] for name in names if name in heard and heard[name][0]]
            if silent := [name for name in names if name not in heard]:
                silence = f"nothing was heard of host {', '.join(silent)} within {self._timeout_s:g} s"
                faults.append(f"{silence}: it died or hangs")
            fault, values = "; ".join(faults) or None, [heard[name][1] for name in names if name in heard]
            self._say("leader", [fault, values])
        else:
            limit_s = 2 * self._timeout_s  # the leader may itself wait for another host
            heard = self._hear(["leader"], limit_s)
            if not heard:
                raise RunError(f"nothing was heard of host 0 within {limit_s:g} s: it died or hangs")
            fault, values = heard["leader"]
        # All hosts have spoken in this exchange, so all have read the files of the previous one.
        for name in ["leader", "0"] if self.is_leader else [str(self.index)]:
            self._store.remove(self._name(name, self._exchanges - 1))
        self._exchanges += 1
        return fault, values

    def _say(self, name: str, what: Any) -> None:
        self._store.write(self._name(name, self._exchanges), json.dumps(what).encode())

    def _hear(self, names: list[str], timeout_s: float) -> dict[str, Any]:
        """The contents by name, without names that did not appear in time."""
        heard: dict[str, Any] = {}
        deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while True:
            there = set(self._store.names(FOLDER))
            for name in names:
                path = self._name(name, self._exchanges)
                if name not in heard and path.rpartition("/")[2] in there:
                    heard[name] = json.loads(self._store.read(path))
            if len(heard) == len(names) or time.monotonic() > deadline:
                return heard
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _name(self, name: str, exchange: int) -> str:
        return f"{FOLDER}/{self._run:08x}-{exchange:06d}-{name}"
