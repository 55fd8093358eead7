"""A run folder belongs to one run at a time: `owner.json` says which, and a second run is refused.

    with Ownership("runs/a") as owner:
        for step in ...:
            owner.require()

Where the file system has locks (flock on `owner.lock`, which stays) the kernel holds one as long as the owner lives, so
a dead owner is known at once. Elsewhere, such as in an object store, the owner rewrites `owner.json` every HEARTBEAT_S,
and a second run first watches whether it changes.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from runtime.checkpoints.store import LocalStore, open_store
from runtime.terminal import RunError, print_note, run_errors

HEARTBEAT_S = 10.0
SILENT_S = 3 * HEARTBEAT_S  # an owner that has not written for so long is dead
NAME, LOCK = "owner.json", "owner.lock"
Record = dict[str, Any]


class Ownership:
    """Owns the folder, a path or a URL, from __enter__ to __exit__. A dead owner's folder is taken over.

    __enter__ raises RunError: another run owns the folder, with its host and process; `require`: another run has taken
    it since, because there are no locks and this process stood still for over SILENT_S.
    """

    def __init__(self, folder: str | Path):
        self._store = open_store(folder, timeout_s=SILENT_S)
        self._folder = self._store.path("")
        self._record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "run": secrets.token_hex(8),
        }
        self._closed = threading.Event()
        self._lock: int | None = None
        self._taken_by: Record | None = None
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Ownership":
        with contextlib.ExitStack() as undo:
            undo.callback(self._unlock)
            with run_errors(f"{self._folder}/{NAME} cannot be written"):
                self._take()
            undo.pop_all()
        self._heart.start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        self._heart.join()
        try:
            if self._taken_by is None:
                self._store.remove(NAME)
        except (OSError, RunError) as error:
            print_note(f"{self._folder}/{NAME} could not be removed: {error}")
        self._unlock()

    def require(self) -> None:
        """Raises RunError if another run has taken the folder, or the folder is gone."""
        if self._taken_by == {}:
            gone = "the folder was moved, or the file deleted, while this run wrote there"
            raise RunError(f"{self._folder}/{NAME} is gone: {gone}. Start it again.")
        if self._taken_by is not None:
            raise RunError(f"{self._in_use(self._taken_by)} It took the folder while this run stood still.")

    def _take(self) -> None:
        is_locked = isinstance(self._store, LocalStore) and self._has_lock()
        left = self._read()
        if left is not None and not (is_locked and left.get("host", self._record["host"]) == self._record["host"]):
            print_note(f"{self._folder} was left by {_who(left)}, or is still in use: watching for {SILENT_S:g} s")
            end = time.monotonic() + SILENT_S
            while time.monotonic() < end:
                time.sleep(SILENT_S / 30)
                if (now := self._read()) is not None and now != left:
                    raise RunError(self._in_use(now))
            print_note(f"nothing is heard of it: {self._folder} is taken over")
        self._write(0)
        if (now := self._read() or {}).get("run") != self._record["run"]:  # two started at once
            raise RunError(self._in_use(now))

    def _has_lock(self) -> bool:
        """Whether the file system has locks; raises RunError if another process holds this one."""
        path = Path(self._store.path(LOCK))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(self._in_use(self._read() or {})) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            return False
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _beat(self) -> None:
        beat = 0
        while not self._closed.wait(HEARTBEAT_S):
            try:
                owner = self._read() or {}
                if owner.get("run") != self._record["run"]:
                    self._taken_by = owner
                    return
                self._write(beat := beat + 1)
            except (OSError, RunError) as error:  # if the disk stays bad, the next save fails
                print_note(f"{self._folder}/{NAME} could not be rewritten: {error}")

    def _read(self) -> Record | None:
        try:
            record = json.loads(self._store.read(NAME))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):  # not what a run wrote
            return {}
        return record if isinstance(record, dict) else {}

    def _write(self, beat: int) -> None:
        self._store.write(NAME, json.dumps({**self._record, "beat": beat}).encode())

    def _in_use(self, owner: Record) -> str:
        return (
            f"{self._folder} is in use: {_who(owner)}, started {owner.get('started', 'just now')}, writes there. Wait "
            "until it has ended, or give this run its own paths.model_name."
        )


def _who(owner: Record) -> str:
    return f"process {owner.get('pid', 'unknown')} on host {owner.get('host', 'unknown')}"
