"""Shows what is in a checkpoint, or what differs between two.

    python -m tools.inspect_checkpoint runs/my_run/checkpoints/0000000050
    python -m tools.inspect_checkpoint runs/my_run/checkpoints                                      # the newest in there
    python -m tools.inspect_checkpoint runs/a/checkpoints/0000000050 runs/b/checkpoints/0000000050

A leaf's norm is the root of the sum of its squares. Differences are the largest of a leaf, absolute and relative to the leaf's largest value in
the first checkpoint. Exits with 0, also when two checkpoints differ.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from runtime.checkpoints.checkpoint import Checkpoint, Incomplete, open_checkpoint, read_leaf
from runtime.terminal import RunError
from tools.verify_checkpoint import find, size_text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.inspect_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="a checkpoint, or a directory of them; local or a URL")
    parser.add_argument("other", nargs="?", help="another one, to compare with")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of an object store (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        with ThreadPoolExecutor(8) as pool:
            checkpoint = open_newest(arguments.path, arguments.timeout_s, pool)
            if arguments.other is None:
                show(checkpoint, pool)
            else:
                compare(checkpoint, open_newest(arguments.other, arguments.timeout_s, pool), pool)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def open_newest(path: str, timeout_s: float, pool: ThreadPoolExecutor) -> Checkpoint:
    """The checkpoint at a path, or the newest complete one in it."""
    store, names = find(path, timeout_s)
    for name in reversed(names):
        try:
            return open_checkpoint(store, name, pool)
        except Incomplete as incomplete:
            print(f"passed over: {incomplete}", file=sys.stderr)
    raise RunError(f"there is no complete checkpoint at {path}")


def show(checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
    print(f"checkpoint {checkpoint.path}")
    for key, value in flat(checkpoint.attributes).items():
        print(f"  {key}: {json.dumps(value)}")
    rows, values, size = [], 0, 0
    for name, array in sorted(checkpoint.arrays.items()):
        leaf = read_leaf(checkpoint, name, pool)
        values, size = values + leaf.size, size + leaf.nbytes
        not_finite = leaf.size - int(np.isfinite(leaf).sum())
        note = f"{not_finite} not finite" if not_finite else ""
        chunk = "×".join(map(str, checkpoint.grid(name).chunk)) or "1"
        rows.append(
            (name, array.dtype.name, shown(array.shape), size_text(leaf.nbytes), chunk, f"{norm(leaf):.6g}", note)
        )
    print_table(("leaf", "dtype", "shape", "size", "chunk", "norm", ""), rows, right={3, 5})
    print(f"{len(rows)} leaves, {values:,} values, {size_text(size)}")


def compare(first: Checkpoint, second: Checkpoint, pool: ThreadPoolExecutor) -> None:
    print(f"first   {first.path}\nsecond  {second.path}")
    ours, theirs = flat(first.attributes), flat(second.attributes)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            print(f"  {key}: {json.dumps(ours.get(key))} -> {json.dumps(theirs.get(key))}")
    rows, same = [], 0
    for name in sorted(first.arrays.keys() | second.arrays.keys()):
        if name not in first.arrays or name not in second.arrays:
            rows.append((name, "", "", f"only in the {'first' if name in first.arrays else 'second'}"))
            continue
        shapes = [(c.arrays[name].dtype.name, c.arrays[name].shape) for c in (first, second)]
        if shapes[0] != shapes[1]:
            rows.append((name, "", "", " -> ".join(f"{dtype}{shown(shape)}" for dtype, shape in shapes)))
            continue
        a, b = read_leaf(first, name, pool), read_leaf(second, name, pool)
        if a.tobytes() == b.tobytes():
            same += 1
            continue
        absolute, relative, count = difference(a, b)
        rows.append((name, f"{absolute:.3g}", f"{relative:.3g}", f"{count:,} of {a.size:,} values"))
    if rows:
        print_table(("leaf", "absolute", "relative", "what differs"), rows, right={1, 2})
    print(f"{same} leaves are the same bit for bit, {len(rows)} differ")


def difference(a: np.ndarray, b: np.ndarray) -> tuple[float, float, int]:
    """The largest absolute difference, the same relative to the largest value of `a`, and how many values differ in any bit."""
    bits = f"V{a.dtype.itemsize}"
    count = int((a.reshape(-1).view(bits) != b.reshape(-1).view(bits)).sum())
    wide = np.float64 if a.dtype.kind in "biuf" else np.complex128
    with np.errstate(invalid="ignore", over="ignore"):
        absolute = float(np.abs(a.astype(wide) - b.astype(wide)).max())
        largest = float(np.abs(a.astype(wide)).max())
    return absolute, absolute / largest if largest else float("inf") if absolute else 0.0, count


def norm(leaf: np.ndarray) -> float:
    wide = leaf.astype(np.complex128 if leaf.dtype.kind == "c" else np.float64).reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.sqrt(np.vdot(wide, wide).real))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested attributes by their paths: {"config": {"mesh": {"d": 8}}} is {"config.mesh.d": 8}."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    return {
        path: leaf
        for key, value in tree.items()
        for path, leaf in flat(value, f"{prefix}.{key}" if prefix else key).items()
    }


def shown(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def print_table(head: tuple[str, ...], rows: list[tuple[str, ...]], right: set[int]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    main()
