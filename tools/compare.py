"""Compares runs: a table, what their configurations differ in, and a page with their curves over one another.

    python -m tools.compare runs/first runs/second                        # writes compare.html too
    python -m tools.compare runs/first runs/second output=first_second.html
    python -m tools.compare runs/first                                    # of one: its report.html is written again
    python -m tools.compare runs/now tests/golden/cpu.jsonl assert_equal=true tolerance=0.01

The page of a single run is its report: written again after samples.txt has come to the run folder, say. With
assert_equal nothing is written. Exits with 1, and the first step and metric that differ, unless all runs have the same
steps and values, but for what a machine's speed and memory say.
"""

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ledger.units import percent, seconds
from runtime.config import command_line
from runtime.config.keys import NotNegative
from runtime.files import write_whole
from runtime.terminal import RunError, columns, print_error, print_line
from runtime.tracking.recorded import Recorded, as_yaml, read_run
from runtime.tracking.report import compare_page, write_report

# What the machine decides, and not the training; of names that end so, all.
MEASURED = ("time", "tokens_per_s", "mfu", "hfu", "mfu_6nd")
MEASURED_ENDS = ("_s", "_memory_bytes")
PROGRAM = "program.py"  # stands among the keys where the trainers' files differ
COLUMNS = ("run", "steps", "loss", "validation", "step time", "tokens/s", "MFU")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    WORDS: ClassVar = ("runs",)

    runs: tuple[str, ...]  # run folders, or files of metrics
    output: str = "compare.html"  # the page
    assert_equal: bool = False  # only checks that the runs' metrics are equal
    tolerance: NotNegative = 0.0  # with assert_equal, a relative difference


def main(config: Compare) -> None:
    runs = with_short_names([read_run(path) for path in config.runs], config.runs)
    damaged = [problem for run in runs for problem in run.damaged]
    if config.assert_equal:
        for problem in damaged:
            raise RunError(problem)
        for other in runs[1:]:
            print(equal(runs[0], other, config.tolerance))
        return
    changed, page = differences(runs), Path(config.output)
    if len(runs) == 1 and Path(config.runs[0]).is_dir():
        page = write_report(config.runs[0])
    else:
        write_whole(page, compare_page(runs, changed, (list(COLUMNS), list(map(row, runs)))))
    print_line("\n".join([*columns([COLUMNS, *map(row, runs)]), ""]))
    if changed:
        print_line("\n".join(columns([("configuration", *(run.name for run in runs)), *shown(changed)])))
    elif len(runs) > 1:
        print("The configurations are equal.")
    for run in runs[1:] if PROGRAM in changed else ():
        print_line(f"The programs: diff -u {runs[0].folder}/program.py {run.folder}/program.py")
    for problem in damaged:
        print_error(problem, "left out")
    print_line(f"Curves: {page}")


def with_short_names(runs: list[Recorded], paths: Sequence[str]) -> list[Recorded]:
    """The runs, named by their folders; by their whole paths where two folders are called the same."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [dataclasses.replace(run, name=str(path)) for path, run in zip(paths, runs)]


def differences(runs: list[Recorded]) -> dict[str, list[Any]]:
    """The keys that not all configurations have the same value of, but for the run's own place; None: no such key."""
    keys = sorted({key for run in runs for key in run.config if not key.startswith("paths.")})
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    values = {PROGRAM: [hashed(run.program) for run in runs], **values}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def hashed(program: str) -> str | None:
    """Of a trainer's file; None where the run has none."""
    return hashlib.sha256(program.encode()).hexdigest()[:8] if program else None


def row(run: Recorded) -> list[str]:
    """A run in numbers: its last losses, and medians of its speed."""

    def values(name: str) -> list[float]:
        return [line[name] for line in run.lines if isinstance(line.get(name), int | float)]

    def median(name: str) -> float | None:
        return statistics.median(found) if (found := values(name)) else None

    losses = [f"{found[-1]:.4f}" if (found := values(name)) else "n/a" for name in ("loss", "validation_loss")]
    steps, rate = max((line["step"] for line in run.lines), default=0), median("tokens_per_s")
    shown_rate = "n/a" if rate is None else f"{rate:,.0f}"
    return [run.name, f"{steps:,}", *losses, seconds(median("step_time_s")), shown_rate, percent(median("mfu"))]


def shown(changed: dict[str, list[Any]]) -> list[list[str]]:
    return [[key, *("–" if value is None else as_yaml(value) for value in values)] for key, values in changed.items()]


def equal(one: Recorded, other: Recorded, tolerance: float) -> str:
    """Says how many values are equal.

    Args:
      tolerance: relative to the larger of two values; 0: bit for bit.
    Raises:
      RunError: with the first step, in their order, that has another value or is in one run alone.
    """
    tables = [_table(run) for run in (one, other)]
    count, largest = 0, 0.0
    for step in sorted(tables[0].keys() | tables[1].keys()):
        values = [table.get(step, {}) for table in tables]
        for name in dict.fromkeys([*values[0], *values[1]]):
            pair = [each.get(name, "nothing") for each in values]
            difference = _difference(*pair)
            if difference > tolerance:
                by = f", a relative difference of {difference:.2g}" if math.isfinite(difference) else ""
                raise RunError(
                    f"step {step}, {name}: {pair[0]!r} in {one.name}, {pair[1]!r} in {other.name}{by}; expected "
                    + (f"{tolerance:g} at most" if tolerance else "equality")
                )
            count, largest = count + 1, max(largest, difference)
    if not count:
        raise RunError(f"{one.name} and {other.name} have no value in common to compare")
    how = f"equal to a relative difference of {largest:.2g}" if largest else "equal"
    return f"{one.name} and {other.name}: {count:,} values of {len(tables[0]):,} steps are {how}."


def is_measured(name: str) -> bool:
    return name in MEASURED or name.endswith(MEASURED_ENDS)


def _table(run: Recorded) -> dict[int, dict[str, Any]]:
    """What the training alone decides, by step and name."""
    table: dict[int, dict[str, Any]] = {}
    for line in run.lines:
        values = {name: value for name, value in line.items() if name != "step" and not is_measured(name)}
        if values:
            table.setdefault(line["step"], {}).update(values)
    return table


def _difference(one: Any, other: Any) -> float:
    """Relative; infinite between what cannot be compared, as a number and NaN, which is written as a string."""
    if one == other:
        return 0.0
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


if __name__ == "__main__":
    command_line.run(main, Compare)
