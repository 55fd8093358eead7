"""How the hosts of a run agree, from any thread: by small files in the store that they share anyway.

    hosts = Hosts(store, timeout_s=600)                       # by all hosts alike verdict = hosts.agree(fault)
    # None if no host has a fault, else a text that names the host

Not by collectives: these would run between those of the training step, in an order that differs from host to host.
Every wait ends: who hears nothing for `timeout_s` takes the other host for dead. A shared file system may show a new
file late (NFS: up to a minute).
"""

import secrets
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from runtime.checkpoints.store import LocalStore, RemoteStore
from runtime.terminal import RunError

FOLDER = ".hosts"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
GOOD, SILENT = "good", "nothing was heard of host"


class Hosts:
    """The processes of this JAX program. Each calls the same methods in the same order; with one process they cost
    nothing."""

    def __init__(self, store: LocalStore | RemoteStore, timeout_s: float):
        self._store, self._timeout_s, self._exchanges = store, timeout_s, 0
        self.index, self.count = jax.process_index(), jax.process_count()
        self.is_leader = self.index == 0
        if self.count > 1:
            if self.is_leader:
                store.remove(FOLDER)  # of an earlier run; nobody writes before the broadcast
            # The run's own name, so that nothing of an earlier run is taken for this one's.
            self._run = int(multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32))))

    def agree(self, fault: str | None) -> str | None:
        """None when all hosts called this with None; else what they said, the same text on every host."""
        if self.count == 1:
            return fault
        self._say(str(self.index), GOOD if fault is None else f"host {self.index}: {fault}")
        verdict = self._answer(self._collect() if self.is_leader else None)
        return None if verdict == GOOD else verdict

    def leaders(self, text: str) -> str:
        """What host 0 called this with."""
        if self.count == 1:
            return text
        self._say(str(self.index), GOOD)
        if self.is_leader and (verdict := self._collect()) != GOOD:
            raise RunError(verdict)
        return self._answer(text if self.is_leader else None)

    def _answer(self, text: str | None) -> str:
        """What the leader answers, to all alike, once every host has said something."""
        if text is not None:
            self._say("leader", text)
        else:
            limit_s = 2 * self._timeout_s  # the leader may itself wait for another host
            heard = self._hear(["leader"], limit_s)
            if not heard:
                raise RunError(f"{SILENT} 0 within {limit_s:g} s: it died or hangs")
            text = heard["leader"]
        # All have spoken in this exchange, so all have read what was said in the one before.
        for name in ["leader", "0"] if self.is_leader else [str(self.index)]:
            self._store.remove(self._name(name, self._exchanges - 1))
        self._exchanges += 1
        return text

    def _collect(self) -> str:
        names = [str(host) for host in range(self.count)]
        heard = self._hear(names, self._timeout_s)
        faults = [heard[name] for name in names if heard.get(name, GOOD) != GOOD]
        if silent := [name for name in names if name not in heard]:
            faults.append(f"{SILENT} {', '.join(silent)} within {self._timeout_s:g} s: it died or hangs")
        return "; ".join(faults) or GOOD

    def _say(self, name: str, text: str) -> None:
        self._store.write(self._name(name, self._exchanges), text.encode())

    def _hear(self, names: list[str], timeout_s: float) -> dict[str, str]:
        """What was said under these names; those that nothing was heard of in time are left out."""
        heard: dict[str, str] = {}
        deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while True:
            there = set(self._store.names(FOLDER))
            for name in names:
                path = self._name(name, self._exchanges)
                if name not in heard and path.rpartition("/")[2] in there:
                    heard[name] = self._store.read(path).decode()
            if len(heard) == len(names) or time.monotonic() > deadline:
                return heard
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _name(self, name: str, exchange: int) -> str:
        return f"{FOLDER}/{self._run:08x}-{exchange:06d}-{name}"
