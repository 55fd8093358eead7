"""The lines of tools/benchmark.py: read, as a table, and held against older ones.

What got slower, with `compare`: a job whose steps take longer by more than half the distance between the quartiles of
the old steps' times and half that of the new ones, and by more than SAME. On a CPU the time is counted in the
product's, which is what `share_of_matmul` says. Jobs are the same by config and number of devices; other hardware is
not compared.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ledger.units import gigabytes, percent, seconds
from runtime.terminal import RunError, columns

SAME = 0.02  # a smaller difference counts as none, however small the spread within each process is

Line = dict[str, Any]
KEYS = (
    "config devices mesh tokens_per_s step_time_s step_time_spread_s mfu hfu mfu_6nd gflops_6nd matmul_gflops "
    "share_of_matmul peak_memory_bytes compile_s predicted_step_time_s hardware versions"
).split()


def read(path: str) -> list[Line]:
    """The lines of a file that this tool wrote. Raises RunError if it is not one."""
    try:
        lines = [json.loads(text) for text in Path(path).expanduser().read_text(encoding="utf-8").splitlines()]
        if not lines:
            raise ValueError("it is empty")
        for number, line in enumerate(lines, start=1):
            lacks = [key for key in KEYS if key not in line] if isinstance(line, dict) else KEYS
            if lacks:
                raise ValueError(f"line {number} has no {', '.join(lacks)}")
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: expected a file that tools.benchmark wrote: {error}") from None
    return lines


def compared(old: list[Line], new: list[Line]) -> tuple[list[str], list[str]]:
    """A table, and the jobs that got slower by more than the spread explains."""
    before = {(line["config"], line["devices"]): line for line in old}
    columns = "old", "new", "ratio", "spread", ""
    width = max([len(name(line)) for line in (*old, *new)], default=0) + 2
    text, slower = [f"{'':{width}}" + "".join(f"{column:>12}" for column in columns)], []
    for line in new:
        was = before.get((line["config"], line["devices"]))
        if was is None or any(was["hardware"][key] != line["hardware"][key] for key in ("device", "cpu")):
            why = "not in the old file" if was is None else f"measured on {was['hardware']}: not compared"
            text.append(f"{name(line):{width}}  {why}")
            continue
        kind = "share_of_matmul" if was["share_of_matmul"] and line["share_of_matmul"] else "step_time_s"
        ratio = line[kind] / was[kind] if kind == "step_time_s" else was[kind] / line[kind]
        spread = sum(each["step_time_spread_s"] / each["step_time_s"] / 2 for each in (was, line))
        verdict = "slower" if ratio > 1 + max(spread, SAME) else "faster" if ratio < 1 - max(spread, SAME) else "same"
        values = [seconds(each[kind]) if kind == "step_time_s" else f"{each[kind]:.3f}" for each in (was, line)]
        cells = *values, f"{ratio:.3f}", f"{max(spread, SAME):.3f}", verdict
        text.append(f"{name(line):{width}}" + "".join(f"{cell:>12}" for cell in cells))
        if verdict == "slower":
            slower.append(f"{name(line)} by {ratio - 1:.1%}")
    now = {(line["config"], line["devices"]) for line in new}
    text += [f"{name(line):{width}}  not in the new lines" for job, line in before.items() if job not in now]
    text.append("old, new: a step's time, on a CPU the share of the product's rate; ratio: new time over old")
    return text, slower


def name(line: Line) -> str:
    return f"{line['config']} ({line['devices']} device{'s' * (line['devices'] > 1)})"


def table(lines: list[Line]) -> list[str]:
    """The lines for a reader; n/a where a figure is not known."""
    rows = [list(cells(line)) for line in lines]
    header = [key for key, _ in rows[0]] if rows else []
    texts = [header, *([text for _, text in row] for row in rows)]
    return ["", *columns(texts, range(1, len(header)))] if rows else [""]


def cells(line: Line) -> Iterator[tuple[str, str]]:
    predicted, share = line["predicted_step_time_s"], line["share_of_matmul"]
    yield "", name(line)
    yield "mesh", "×".join(str(size) for size in line["mesh"].values())
    yield "tokens/s", f"{line['tokens_per_s']:,.0f}"
    yield "step", seconds(line["step_time_s"])
    yield "spread", seconds(line["step_time_spread_s"])
    yield "MFU", percent(line["mfu"])
    yield "HFU", percent(line["hfu"])
    yield "6ND", percent(line["mfu_6nd"])
    yield "GFLOP/s", f"{line['gflops_6nd']:,.0f}"
    yield "share", "n/a" if share is None else f"{share:.3f}"
    yield "memory", "n/a" if line["peak_memory_bytes"] is None else gigabytes(line["peak_memory_bytes"])
    yield "compile", seconds(line["compile_s"])
    yield "predicted", seconds(predicted)
    yield "of it", "n/a" if predicted is None else f"{line['step_time_s'] / predicted:.2f}"
