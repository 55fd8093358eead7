"""Reads checkpoints through: every chunk is there, and is what was written.

    python -m tools.verify_checkpoint runs/my_run/checkpoints                # all of a run
    python -m tools.verify_checkpoint runs/my_run/checkpoints/0000000050     # one
    python -m tools.verify_checkpoint s3://bucket/runs/my_run/checkpoints

Lists each bad chunk. Exits with 0 when all that are complete are whole, with 1 when one is damaged, or there is none. Incomplete ones, which a run
that was killed leaves, are named; a run passes them over.
"""

import argparse
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from runtime.checkpoints.checkpoint import Damaged, Incomplete, Store, open_checkpoint, verify
from runtime.checkpoints.store import open_store
from runtime.terminal import RunError


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.verify_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="a checkpoint, or a directory of them; local or a URL")
    parser.add_argument(
        "--threads", type=int, default=8, help="chunks that are read at the same time (default: %(default)s)"
    )
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of an object store (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        store, names = find(arguments.path, arguments.timeout_s)
        with ThreadPoolExecutor(arguments.threads) as pool:
            found = [report(store, name, pool) for name in names]
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if "damaged" in found or "whole" not in found:
        sys.exit(1)


def find(path: str, timeout_s: float) -> tuple[Store, list[str]]:
    """The store and the names of the checkpoints at a path: itself, or all in it, oldest first. Raises RunError if there is none."""
    path = path.rstrip("/")
    store = open_store(path, timeout_s)
    there = store.names()
    if "checkpoints" in there:
        return find(f"{path}/checkpoints", timeout_s)
    if names := sorted(name for name in there if re.fullmatch(r"\d{10}", name)):
        return store, names
    parent, _, name = path.rpartition("/")
    if there and (re.fullmatch(r"\d{10}", name) or {"zarr.json", ".zattrs"} & set(there)):
        return open_store(parent or ("/" if path.startswith("/") else "."), timeout_s), [name]
    raise RunError(f"there is no checkpoint at {path}: expected a run folder, its `checkpoints`, or one of those")


def size_text(size: int) -> str:
    """As a person says it: 1.26 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def report(store: Store, name: str, pool: ThreadPoolExecutor) -> str:
    """Prints what a checkpoint is, and returns it: whole, damaged or incomplete."""
    began = time.perf_counter()
    try:
        opened = open_checkpoint(store, name, pool)
        chunks, faults = verify(opened, pool)
    except Incomplete:
        print(f"{name}: incomplete, it was not written to its end")
        return "incomplete"
    except Damaged as damaged:
        print(f"{name}: DAMAGED\n  {str(damaged).partition(' is damaged: ')[2]}")
        return "damaged"
    size = sum(array.nbytes for array in opened.arrays.values())
    text = f"{chunks} chunks of {len(opened.arrays)} leaves, {size_text(size)}, read in {time.perf_counter() - began:.1f} s"
    if faults:
        print(f"{name}: DAMAGED, {len(faults)} of {text}", *faults, sep="\n  ")
        return "damaged"
    print(f"{name}: whole, {text}")
    return "whole"


if __name__ == "__main__":
    main()
