"""A run folder belongs to one run at a time: `owner.json` says which, and a second run is refused.

    with Ownership("runs/a") as owner:
        for step in ...:
            owner.check()

The file holds host, process and start of the owner. On a local disk, and on shared file systems that carry locks, the
kernel holds a lock on it (flock) for as long as the owner lives, so a dead one is known at once. Elsewhere, in an
object store for one, the owner rewrites the file every HEARTBEAT_S, and who wants the folder watches it first: an owner
that writes lives.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from runtime.checkpoints.store import open_store
from runtime.terminal import RunError

HEARTBEAT_S = 10.0
SILENT_S = 3 * HEARTBEAT_S  # an owner of which nothing is heard for so long is dead
NAME = "owner.json"
Record = dict[str, Any]


class Ownership:
    """Owns the folder, a path or a URL, from __enter__ to __exit__; what a killed owner left is taken over.

    Raises:
        RunError: from __enter__, when another run owns the folder, with its host and process; from `check`, when
            another has taken it since, which can happen where there are no locks and this process stood still for
            longer than SILENT_S.
    """

    def __init__(self, folder: str | Path):
        self._folder = str(folder)
        self._file = _Object(self._folder) if "://" in self._folder else _LockedFile(Path(self._folder))
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": started,
            "run": secrets.token_hex(8),
        }
        self._closed = threading.Event()
        self._taken_by: Record | None = None
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Ownership":
        try:
            self._take()
        except OSError as error:
            raise RunError(f"{self._folder}/{NAME} cannot be written: {type(error).__name__}: {error}") from error
        self._heart.start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        self._heart.join()
        try:
            if self._taken_by is None:
                self._file.remove()
        except OSError as error:
            _say(f"{self._folder}/{NAME} could not be removed: {error}")
        finally:
            self._file.close()

    def check(self) -> None:
        """Raises RunError if another run has taken the folder."""
        if self._taken_by is not None:
            raise RunError(f"{_in_use(self._folder, self._taken_by)} It took the folder while this run stood still.")

    def _take(self) -> None:
        if (found := self._file.take()) is not None:
            _say(f"{self._folder} was left by {_who(found)}, or is still in use: watching for {SILENT_S:g} s")
            self._watch(found)
            _say(f"nothing is heard of it: {self._folder} is taken over")
        self._file.write({**self._record, "beat": 0})
        if (now := self._file.read()) is None or now.get("run") != self._record["run"]:  # two started at once
            self._file.close()
            raise RunError(_in_use(self._folder, now or {}))

    def _watch(self, found: Record) -> None:
        end = time.monotonic() + SILENT_S
        while time.monotonic() < end:
            time.sleep(SILENT_S / 30)
            if (now := self._file.read()) is not None and now != found:
                self._file.close()
                raise RunError(_in_use(self._folder, now))

    def _beat(self) -> None:
        beat = 0
        while not self._closed.wait(HEARTBEAT_S):
            try:
                found = self._file.read()
                if found and found.get("run") != self._record["run"]:
                    self._taken_by = found
                    return
                beat += 1
                self._file.write({**self._record, "beat": beat})
            except OSError as error:  # whether the disk is well again is seen by the next save
                _say(f"{self._folder}/{NAME} could not be rewritten: {error}")


class _LockedFile:
    """owner.json on a file system."""

    def __init__(self, folder: Path):
        self._path = folder / NAME

    def take(self) -> Record | None:
        """Opens and locks the file; returns the record of an owner that may still live, None if there is none."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            has_locks = self._lock()
            try:
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                    break
            except FileNotFoundError:
                pass
            self.close()  # its owner removed it when it ended, just now: open the new one
        found = self.read()
        is_dead = has_locks and (not found or found.get("host") == socket.gethostname())
        return None if found is None or is_dead else found

    def _lock(self) -> bool:
        """Whether the file system has locks; raises RunError if another process holds this one."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self.read() or {}
            self.close()
            raise RunError(_in_use(str(self._path.parent), owner)) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            return False
        return True

    def read(self) -> Record | None:
        try:
            text = self._path.read_bytes()  # opened anew, so that a network file system asks its server
        except FileNotFoundError:
            return None
        return _parsed(text) if text else None

    def write(self, record: Record) -> None:
        text = (json.dumps(record) + "\n").encode()
        os.pwrite(self._descriptor, text, 0)  # in place: a new file would not have the lock
        os.ftruncate(self._descriptor, len(text))
        os.fsync(self._descriptor)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._descriptor)


class _Object:
    """owner.json in an object store, which has no locks: whoever may own it is watched."""

    def __init__(self, folder: str):
        self._store = open_store(folder, timeout_s=SILENT_S)

    def take(self) -> Record | None:
        return self.read()

    def read(self) -> Record | None:
        try:
            return _parsed(self._store.read(NAME))
        except FileNotFoundError:
            return None

    def write(self, record: Record) -> None:
        self._store.write(NAME, json.dumps(record).encode())

    def remove(self) -> None:
        self._store.remove(NAME)

    def close(self) -> None:
        pass


def _parsed(text: bytes) -> Record:
    try:
        record = json.loads(text)
    except ValueError:  # it is being written
        return {}
    return record if isinstance(record, dict) else {}


def _who(owner: Record) -> str:
    return f"process {owner.get('pid', 'unknown')} on host {owner.get('host', 'unknown')}"


def _in_use(folder: str, owner: Record) -> str:
    return (
        f"{folder} is in use: {_who(owner)}, started {owner.get('started', 'just now')}, writes there. Wait until it "
        "has ended, or give this run its own paths.model_name."
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
