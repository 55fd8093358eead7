"""Where checkpoints are kept: a directory, or any path that fsspec opens (`s3://`, `gs://`), behind the same few verbs.

    store = open_store("s3://bucket/runs/a/checkpoints", timeout_s=600)
    store.write("0000000020/weights/embed/c.0.0", values, checksum)     # durable when it returns
    store.files("0000000020")                                           # {"weights/embed/c.0.0": 1028}

A name is a path below the store's root. Writing is all or nothing. On an object store, where servers answer 500, are
slow or cut connections, every verb is retried, with growing pauses, until `timeout_s` is over.
"""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import fsspec

from runtime.files import LARGEST_BYTES, read_bytes, sync, write_whole
from runtime.retries import FINAL, REFUSED, pauses
from runtime.terminal import RunError

ATTEMPTS_AT_LEAST = 3  # an attempt that hangs is given up after a third of the time


def open_store(directory: str | Path, timeout_s: float) -> "LocalStore | RemoteStore":
    """The store at a directory, which need not be there yet, or at a URL. Raises RunError: the URL's protocol is not
    known, its package is not installed, or it leads to no folder."""
    url = str(directory)
    if "://" not in url:
        return LocalStore(url)
    try:
        # Without a cache: other hosts write too.
        files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:  # fsspec's text names the package
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}.get(url.split("://")[0])
        fix = f"pip install {package}" if package else "install it"
        raise RunError(f"{url} cannot be opened: {error}. Fix: {fix}") from error
    except (ValueError, TypeError, OSError) as error:
        fix = "take a directory, or the URL of an object store (s3://bucket/folder)"
        raise RunError(f"{url} cannot be opened: {error}. Fix: {fix}") from error
    return LocalStore(root) if "file" in files.protocol else RemoteStore(files, url, root, timeout_s)


class LocalStore:
    """A directory, on a disk or on a file system that all hosts share."""

    def __init__(self, root: str):
        self._root = Path(root)

    def path(self, name: str) -> str:
        """The path or URL of a name, for messages."""
        return str(self._root / name)

    def read(self, name: str, most: int = LARGEST_BYTES) -> bytes:
        """A file's content. Raises OSError: FileNotFoundError; NotPlain, also for more than `most` bytes."""
        return read_bytes(self._root / name, most)

    def write(self, name: str, *parts: bytes | memoryview) -> None:
        """Writes a file, which appears whole once it is on the disk; for its directories see `flush`."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, *parts)

    def names(self, name: str = "") -> list[str]:
        """The names in a directory; none where there is no directory."""
        try:
            return os.listdir(self._root / name)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, name: str) -> dict[str, int]:
        """The sizes in bytes of all files below a directory, by their paths from there; links are not followed."""
        top, sizes = self._root / name, {}
        for folder, _, files in os.walk(top):
            for file in files:
                path = Path(folder, file)
                sizes[path.relative_to(top).as_posix()] = path.lstat().st_size
        return sizes

    def remove(self, name: str) -> None:
        """Removes a file or a directory, if it is there. A link's target, which is not this store's, stays."""
        path, top = self._root / name, self._root / name.partition("/")[0]
        if path != top and (top.is_symlink() or not top.is_dir()):
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def move(self, name: str, new_name: str) -> None:
        """Renames a directory."""
        os.rename(self._root / name, self._root / new_name)

    def flush(self, name: str) -> None:
        """Waits until the entries of a directory, and of those in it and above it, are on the disk."""
        top = self._root / name
        for path in [*(Path(folder) for folder, _, _ in os.walk(top)), self._root, self._root.parent]:
            sync(path)


class RemoteStore:
    """A path of an fsspec file system, with LocalStore's verbs. Raises RunError: the store refuses everything, without
    credentials or bucket; TimeoutError: no success within `timeout_s`, with the attempts and the last error."""

    def __init__(self, files: Any, url: str, root: str, timeout_s: float):
        if not files.async_impl:
            from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

            files = AsyncFileSystemWrapper(files, asynchronous=False)
        # When a connection is cut, aiohttp leaves tasks whose errors nobody reads; the caller gets its own error.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        self._files, self._url, self._root, self._timeout_s = files, url.rstrip("/"), root.rstrip("/"), timeout_s

    def path(self, name: str) -> str:
        return f"{self._url}/{name}".rstrip("/")

    def read(self, name: str, most: int = 0) -> bytes:
        """`most` is not needed here: an object cannot be sparse."""
        return self._retried(lambda: self._files._cat_file(self._at(name)))

    def write(self, name: str, *parts: bytes | memoryview) -> None:
        content = b"".join(parts)
        self._retried(lambda: self._files._pipe_file(self._at(name), content))

    def names(self, name: str = "") -> list[str]:
        try:
            paths = self._retried(lambda: self._files._ls(self._at(name), detail=False))
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != self._at(name)]

    def files(self, name: str) -> dict[str, int]:
        top = self._at(name)
        entries = self._retried(lambda: self._files._find(top, detail=True))
        return {path.removeprefix(top + "/"): entry["size"] for path, entry in entries.items() if path != top}

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._retried(lambda: self._files._rm(self._at(name), recursive=True))

    def move(self, name: str, new_name: str) -> None:
        """Copies every object, within the store, then removes the old ones."""
        for file in self.files(name):
            old, new = self._at(f"{name}/{file}"), self._at(f"{new_name}/{file}")
            self._retried(functools.partial(self._files._cp_file, old, new))
        self.remove(name)

    def flush(self, name: str) -> None:
        """Does nothing: an object store makes each object durable as it is written."""

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _retried(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        began, left, attempts = time.monotonic(), pauses(self._timeout_s), 0
        limit_s = self._timeout_s / ATTEMPTS_AT_LEAST
        while True:
            future = asyncio.run_coroutine_threadsafe(operation(), self._files.loop)
            attempts += 1
            try:
                error = future.exception(limit_s)
            except FutureTimeoutError:
                future.cancel()
                error = TimeoutError(f"no answer within {limit_s:.1f} s")
            if error is None:
                return future.result()
            if isinstance(error, FINAL):
                raise error
            if fix := REFUSED.get(type(error).__name__):
                text = " ".join(str(error).split()) or "it cannot do that"
                raise RunError(f"{self._url} cannot be used: {text}. Fix: {fix}") from error
            if (pause_s := next(left, None)) is None:
                waited = f"{attempts} attempts in {time.monotonic() - began:.1f} s failed"
                raise TimeoutError(f"{waited}, the last with {type(error).__name__}: {error}") from error
            time.sleep(pause_s)
