"""Looks at checkpoints: what is in one, whether they are whole, or what differs between two.

    python -m tools.checkpoint show runs/my_run                        # its newest; or one, .../checkpoints/0000000050
    python -m tools.checkpoint verify runs/my_run                      # all of a run, or one
    python -m tools.checkpoint diff runs/a/checkpoints/0000000050 runs/b

Paths are local or URLs (s3://bucket/runs/my_run). `show` prints attributes, and each leaf's type, shape, size and norm
(the root of the sum of squares). `verify` reads every chunk and lists the bad ones; it exits with 1 when a checkpoint
is damaged or there is none, and names incomplete ones, which killed runs leave and runs pass over. `diff` prints each
leaf's largest difference and how many values differ; it exits with 0 even when the two differ.
"""

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from ledger.pages.table import columns
from ledger.units import amount
from runtime.checkpoints.checkpoint import (
    UNBOUND,
    Checkpoint,
    Damaged,
    Incomplete,
    Store,
    find,
    open_checkpoint,
    open_newest,
    read_leaf,
    verify,
)
from runtime.config import command_line
from runtime.files import flat
from runtime.terminal import RunError, print_line

THREADS = 8  # chunks that are read at the same time


@dataclass(frozen=True, kw_only=True)
class LookAt:
    WORDS: ClassVar = ("what", "path", "other")

    what: Literal["show", "verify", "diff"]  # what to do
    path: str  # a checkpoint, or a directory of them
    other: str = ""  # diff: the other one


def main(config: LookAt) -> None:
    if (config.what == "diff") != bool(config.other):
        raise RunError("diff takes two paths, show and verify one")
    with ThreadPoolExecutor(THREADS) as pool:
        if config.what == "verify":
            states = [read_through(store, name, pool) for store, name in find(config.path)]
            sys.exit("damaged" in states or "whole" not in states)
        checkpoint = open_newest(config.path, pool)
        if config.what == "show":
            show(checkpoint, pool)
        else:
            diff(checkpoint, open_newest(config.other, pool), pool)


def read_through(store: Store, name: str, pool: ThreadPoolExecutor) -> str:
    """Prints what a checkpoint is, and returns it: whole, damaged or incomplete."""
    began = time.perf_counter()
    try:
        opened = open_checkpoint(store, name, pool)
        chunks, faults = verify(opened, pool)
    except Incomplete:
        print_line(f"{name}: incomplete, it was not written to its end")
        return "incomplete"
    except Damaged as damaged:
        print_line(f"{name}: DAMAGED\n  {damaged.what}")
        return "damaged"
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in opened.arrays.values())
    what = f"{chunks} chunks of {len(opened.arrays)} leaves, {amount(size, 'B')}"
    text = f"{what}, read in {time.perf_counter() - began:.1f} s"
    if faults:
        print_line("\n  ".join([f"{name}: DAMAGED, {len(faults)} of {text}", *faults]))
        return "damaged"
    print_line(f"{name}: whole, {text}" + ("" if opened.is_bound else f"; {UNBOUND}"))
    return "whole"


def show(checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
    print_line(f"checkpoint {checkpoint.path}")
    for key, value in described(checkpoint).items():
        if not key.startswith("program.files."):
            print_line(f"  {key}: {json.dumps(value)}")
    rows, values, size = [("leaf", "dtype", "shape", "size", "norm", "")], 0, 0
    for name in sorted(checkpoint.arrays):
        leaf = values_of(checkpoint, name, pool)
        values, size = values + leaf.size, size + leaf.nbytes
        not_finite = leaf.size - int(np.isfinite(leaf).sum())
        note = f"{not_finite} not finite" if not_finite else ""
        norm = np.linalg.norm(leaf.astype(np.float64))
        rows.append((name, leaf.dtype.name, str([*leaf.shape]), amount(leaf.nbytes, "B"), f"{norm:.6g}", note))
    print_line("\n".join(columns(rows, right={3, 4})))
    print_line(f"{len(checkpoint.arrays)} leaves, {values:,} values, {amount(size, 'B')}")


def diff(first: Checkpoint, second: Checkpoint, pool: ThreadPoolExecutor) -> None:
    print_line(f"first   {first.path}\nsecond  {second.path}")
    ours, theirs = described(first), described(second)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            print_line(f"  {key}: {json.dumps(ours.get(key))} -> {json.dumps(theirs.get(key))}")
    names = sorted(first.arrays.keys() | second.arrays.keys())
    different = [(name, what) for name in names if (what := difference(name, first, second, pool))]
    print_line("\n".join(columns([("leaf", "what differs"), *different])))
    print_line(f"{len(names) - len(different)} leaves are the same bit for bit, {len(different)} differ")


def difference(name: str, first: Checkpoint, second: Checkpoint, pool: ThreadPoolExecutor) -> str:
    """Says how a leaf differs; empty if the leaves are bitwise equal."""
    if name not in first.arrays or name not in second.arrays:
        return f"only in the {'first' if name in first.arrays else 'second'}"
    a, b = values_of(first, name, pool), values_of(second, name, pool)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype}{[*a.shape]} -> {b.dtype}{[*b.shape]}"
    bits = f"V{a.dtype.itemsize}"
    count = int((a.reshape(-1).view(bits) != b.reshape(-1).view(bits)).sum())
    if not count:
        return ""
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
    return f"{count:,} of {a.size:,} values, by {largest:.3g} at most"


def values_of(checkpoint: Checkpoint, name: str, pool: ThreadPoolExecutor) -> np.ndarray:
    """A leaf; a moment in bfloat16, whose bits it has as uint16, in that type."""
    leaf = read_leaf(checkpoint, name, pool)
    return leaf.view(jnp.bfloat16) if leaf.dtype == np.uint16 else leaf


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """The attributes by their paths, without the program's source: the hashes of its files are there."""
    return {key: value for key, value in flat(checkpoint.attributes).items() if key != "program.source"}


if __name__ == "__main__":
    command_line.run(main, LookAt)
