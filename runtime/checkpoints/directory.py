"""A run's directory of checkpoints: saved while training goes on, restored from the newest that reads whole.

    checkpoints = Checkpoints("runs/a/checkpoints", keep_last=3, keep_every=1000)
    step, state = checkpoints.restore(shapes) if checkpoints.latest() else (0, init())
    for step in range(step + 1, steps + 1):
        checkpoints.raise_failure()
        state = training_step(state)                    # may donate its argument
        if step % 100 == 0:
            stall_s = checkpoints.save(step, state, {"skipped_steps": 0})
    checkpoints.close()

A checkpoint is the group `<step, ten digits>`. All hosts share the directory, a path or a URL that fsspec opens.
"""

import functools
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from runtime.checkpoints import checkpoint
from runtime.checkpoints import writing as checkpoint_writing
from runtime.checkpoints.checkpoint import UNBOUND, Damaged, Incomplete
from runtime.checkpoints.hosts import Hosts
from runtime.checkpoints.store import open_store
from runtime.terminal import RunError, print_note, run_errors

TIMEOUT_S = 600.0  # a save that takes longer, since a host died or the disk hangs, stops the run
MOST_THREADS = 16  # each may hold a few chunks: about 2 GB of host memory besides the copy of the state


class Checkpoints:
    """All hosts construct it with the same arguments and call its methods in the same order.

    Args:
      keep_last: how many of the newest checkpoints are kept, and every multiple of keep_every; None: all.
      timeout_s: how long a host waits for another one, and for an object store.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        timeout_s: float = TIMEOUT_S,
        max_io_threads: int = MOST_THREADS,
    ):
        self._store = open_store(directory, timeout_s)
        with run_errors(f"{directory} cannot be used"):
            self._hosts = Hosts(self._store, timeout_s)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._pool = ThreadPoolExecutor(min(max_io_threads, MOST_THREADS), "checkpoint-io")
        self._writer = ThreadPoolExecutor(1, "checkpoint-save")
        self._saving: Future | None = None
        self._complete: set[str] = set()  # names of checkpoints
        self._damaged: dict[str, str] = {}  # what is wrong, by name
        self._said: set[str] = set()

    def save(self, step: int, tree: Any, attributes: dict[str, Any], best: int | None = None) -> float:
        """Saves a tree of arrays and attributes (JSON values); returns for how many seconds it held up the caller.

        Waits until the previous save is complete and the arrays are computed, and copies this host's shards; afterwards
        the arrays may be donated. Replaces an incomplete checkpoint of the same step, and moves a damaged one aside.
        The checkpoint of step `best` is kept too. Raises RunError: the previous save failed; with path and cause.
        """
        began = time.perf_counter()
        self._wait()
        self.raise_failure()
        waited_s = time.perf_counter() - began
        jax.block_until_ready(tree)
        began = time.perf_counter()
        attributes = json.loads(json.dumps(attributes))  # a copy
        name = _name(step)
        grids, chunks = checkpoint_writing.snapshot(tree, self._pool, self._store.path(name))
        self._saving = self._writer.submit(self._save, name, grids, chunks, attributes, best)
        return waited_s + time.perf_counter() - began

    def raise_failure(self) -> None:
        """Raises RunError, once, if saving or deleting failed in the background; does not wait."""
        if self._saving is not None and self._saving.done():
            saving, self._saving = self._saving, None
            saving.result()

    def latest(self, last_step: int | None = None) -> int | None:
        """The newest complete checkpoint's step, or None; says on stderr which newer ones are passed over, and why.

        Waits for a save that is under way. Checkpoints from `last_step` on, which nobody restores, are read whole here.
        Raises RunError: all checkpoints are damaged, or the store cannot be read.
        """
        self._wait()
        failed = f"{self._store.path('')} cannot be read"
        return self._together(failed, lambda: self._newest(last_step) if self._hosts.is_leader else None)[0]

    def attributes(self, step: int) -> dict[str, Any]:
        """The attributes that a checkpoint was saved with. Raises RunError: it is incomplete or damaged."""
        return checkpoint.read_attributes(self._store, _name(step))

    def restore(self, like: Any) -> tuple[int, Any]:
        """The step and the tree of the newest checkpoint that reads whole.

        All hosts pass over a checkpoint with a lost or damaged chunk, and a line on stderr says so. `like` is a tree of
        jax.ShapeDtypeStructs with shardings on any mesh. Raises RunError: none reads whole; the leaves are not those of
        `like`, with all differences; the store cannot be read.
        """
        trees = []

        def read(name: str) -> str | None:
            try:
                opened = checkpoint.open_checkpoint(self._store, name, self._pool)
                trees.append(checkpoint.restore(opened, like, self._pool))
            except Damaged as damaged:
                return str(damaged)
            if not opened.is_bound:
                self._say(f"checkpoint {opened.path} {UNBOUND}")
            return None

        while (step := self.latest()) is not None:
            name = _name(step)
            faults = self._together(
                f"checkpoint {self._store.path(name)} could not be read", functools.partial(read, name)
            )
            if not any(faults):
                return step, trees[0]
            trees.clear()
            said = [f"host {host}: {fault}" if len(faults) > 1 else fault for host, fault in enumerate(faults) if fault]
            self._damaged[name] = "; ".join(said)
        raise RunError(f"there is no complete checkpoint in {self._store.path('')}")

    def close(self) -> None:
        """Waits for the save that is under way. Raises RunError: it failed."""
        try:
            self._wait()
            self.raise_failure()
        finally:
            self._writer.shutdown()
            self._pool.shutdown()

    # ---- saving, in a thread of its own

    def _wait(self) -> None:
        wait([self._saving] if self._saving else [])

    def _save(self, name: str, grids: dict, chunks: list, attributes: dict[str, Any], best: int | None) -> None:
        failed, is_leader = f"checkpoint {self._store.path(name)} could not be saved", self._hosts.is_leader
        write = functools.partial(checkpoint_writing.write_chunks, self._store, name, chunks, self._pool)
        self._together(failed, lambda: self._make_room(name) if is_leader else None)
        checksums = {file: checksum for of_file in self._together(failed, write) for file, checksum in of_file.items()}
        parts = self._store, name, grids, checksums, attributes, self._pool
        self._together(failed, lambda: checkpoint_writing.complete(*parts) if is_leader else None)
        self._complete.add(name)
        if is_leader and self._keep_last is not None:
            self._remove_old(name, best)

    def _together(self, failed: str, action: Callable[[], Any]) -> list[Any]:
        """Runs the action on all hosts; returns the values of all, and raises on all if it failed on any."""
        value = error = None
        try:
            with run_errors(failed):
                value = action()
        except RunError as failure:
            error = failure
        with run_errors("the hosts cannot agree"):
            fault, values = self._hosts.agree(None if error is None else str(error), value)
        if error is not None:
            raise error
        if fault is not None:
            raise RunError(f"{failed}: {fault}")
        return values

    def _make_room(self, name: str) -> None:
        if name not in self._store.names():
            return
        fault = self._fault(name)
        if fault is None:
            path = self._store.path(name)
            raise RunError(f"checkpoint {path} is already there and complete; remove it to save this step again")
        if self._damaged.pop(name, None) is None:
            return checkpoint_writing.remove(self._store, name)
        number = sum(other.startswith(f"{name}.damaged") for other in self._store.names())
        self._store.move(name, aside := f"{name}.damaged" + (f"-{number + 1}" if number else ""))
        self._say(f"moved aside, to {aside}: {fault}")

    def _remove_old(self, newest: str, best: int | None) -> None:
        """Deletes checkpoints that are not kept, and incomplete ones older than the newest."""
        complete: list[str] = []
        old: list[str] = []
        for name in self._names():
            if name <= newest:
                fault = self._fault(name)
                if name not in self._damaged:
                    (complete if fault is None else old).append(name)
        kept = {name for name in complete if int(name) == best or int(name) % (self._keep_every or int(name) + 1) == 0}
        old += [name for name in complete[self._keep_last :] if name not in kept]
        for name in old:
            self._complete.discard(name)
            with run_errors(f"checkpoint {self._store.path(name)} could not be deleted"):
                checkpoint_writing.remove(self._store, name)

    # ---- what is there

    def _names(self) -> list[str]:
        """The names of all checkpoints, whatever their state, newest first."""
        with run_errors(f"{self._store.path('')} cannot be listed"):
            there = self._store.names()
        return sorted((name for name in there if re.fullmatch(r"\d{10}", name)), reverse=True)

    def _newest(self, last_step: int | None) -> int | None:
        for name in self._names():
            fault = self._fault(name, read_through=last_step is not None and int(name) >= last_step)
            if fault is None:
                return int(name)
            self._say(f"passed over: {fault}")
        if self._damaged:
            faults = [fault for name, fault in sorted(self._damaged.items(), reverse=True)]
            raise RunError("\n".join([f"no checkpoint in {self._store.path('')} reads whole:", *faults]))
        return None

    def _fault(self, name: str, read_through: bool = False) -> str | None:
        """Why a run cannot go on from this checkpoint, by attributes and, with `read_through`, its chunks; or None."""
        if name in self._damaged or (name in self._complete and not read_through):
            return self._damaged.get(name)
        try:
            checkpoint.read_attributes(self._store, name)
            if read_through:
                opened = checkpoint.open_checkpoint(self._store, name, self._pool)
                if faults := checkpoint.verify(opened, self._pool)[1]:
                    raise Damaged(opened.path, faults[0])
        except Incomplete as incomplete:
            return str(incomplete)
        except Damaged as damaged:
            self._damaged[name] = str(damaged)
            return str(damaged)
        self._complete.add(name)
        return None

    def _say(self, text: str) -> None:
        if text not in self._said and self._hosts.is_leader:
            print_note(text)
        self._said.add(text)


def _name(step: int) -> str:
    return f"{step:010d}"
