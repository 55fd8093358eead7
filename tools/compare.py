"""Compares runs: a table, what their configurations, programs and costs differ in, and a page with their curves.

    python -m tools.compare runs/first runs/second                        # writes compare.html too
    python -m tools.compare runs/first runs/second output=first_second.html
    python -m tools.compare runs/first                                    # one run: writes its report.html again
    python -m tools.compare before/ledger.json after/ledger.json          # what a change costs, line by line
    python -m tools.compare runs/now tests/golden/cpu.jsonl assert_equal=true tolerance=0.01

The page of a single run is its report: write it again when samples.txt has come to the run folder, say. For two
ledgers, and with assert_equal, no page is written; the status is 1 if they differ. assert_equal compares all values of
all steps, except speed and memory, and names the first that differ.
"""

import dataclasses
import hashlib
import math
import statistics
import sys
from pathlib import Path
from typing import Any, ClassVar

from ledger.pages.differences import ALL, load
from ledger.pages.differences import differences as of_ledgers
from ledger.pages.table import Table
from runtime.config import command_line
from runtime.config.keys import NotNegative
from runtime.files import LARGEST_BYTES, open_file, write_whole
from runtime.terminal import RunError, print_error, print_line, run_errors
from runtime.tracking.recorded import Recorded, as_yaml, last, read_run
from runtime.tracking.report import compare_page, write_report

# Metrics that the machine decides, not the training; and those whose names end so, but no source of a mixture.
MEASURED = ("time", "tokens_per_s", "mfu", "hfu", "mfu_6nd")
MEASURED_ENDS = ("_s", "_memory_bytes")
PROGRAM = "program.py"  # stands among the keys where the trainers' files differ
COLUMNS = {"run": "", "steps": "count", "loss": "loss", "validation": "loss"}
COLUMNS |= {"step time": "s", "tokens/s": "rate", "MFU": "percent"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    WORDS: ClassVar = ("runs",)

    runs: tuple[str, ...]  # run folders, files of metrics, or files ledger.json
    output: str | None = None  # the page; null: compare.html, or for one run its report.html
    assert_equal: bool = False  # only checks that the runs' metrics are equal
    tolerance: NotNegative = 0.0  # with assert_equal, a relative difference


def main(config: Compare) -> None:
    if len(config.runs) < 2 and (config.assert_equal or config.runs[0].endswith(".json")):
        raise RunError(f"{config.runs[0]} alone is given: expected another one to compare it with")
    if all(path.endswith(".json") for path in config.runs):
        lines = [line for other in config.runs[1:] for line in costs(config.runs[0], other)]
        print_line("\n".join(lines) or "The ledgers say the same.")
        sys.exit(bool(lines))
    runs = [read_run(path) for path in config.runs]
    if len({run.name for run in runs}) < len(runs):  # folders that are called the same
        runs = [dataclasses.replace(run, name=path) for run, path in zip(runs, config.runs)]
    damaged = [problem for run in runs for problem in run.damaged]
    if config.assert_equal:
        if damaged:
            raise RunError(damaged[0])
        for other in runs[1:]:
            print_line(equal(runs[0], other, config.tolerance))
        return
    summary, changed = Table("At the end", COLUMNS, list(map(row, runs))), differences(runs)
    ledgers = [run.folder / "ledger.json" for run in runs]
    pairs = [(run, ledger) for run, ledger in zip(runs[1:], ledgers[1:]) if ledger.exists() and ledgers[0].exists()]
    changed_costs = {run.name: costs(ledgers[0], ledger) for run, ledger in pairs}
    page = Path(config.output or "compare.html")
    if len(runs) == 1 and Path(config.runs[0]).is_dir():
        if config.output is not None:  # the page has links to other files of the run folder
            raise RunError(f"output: the page of one run is {config.runs[0]}/report.html: leave it out")
        page = write_report(config.runs[0])
    else:
        write_whole(page, compare_page(runs, summary, changed, changed_costs))
    lines = [*summary.text(), "", *(changed.text() if changed.rows else ["The configurations are equal."])]
    print_line("\n".join(lines if len(runs) > 1 else summary.text()))
    for run in runs[1:]:
        if changed.rows and changed.rows[0][0] == PROGRAM:
            print_line(f"The programs: diff -u {runs[0].folder}/program.py {run.folder}/program.py")
        if changes := changed_costs.get(run.name):
            print_line(f"A step costs, {runs[0].name} -> {run.name} (the page has the lines of the source):")
            print_line("\n".join(changes[changes.index(ALL) + 1 :] if ALL in changes else ["    in all the same"]))
    for problem in damaged:
        print_error(problem, "left out")
    print_line(f"Curves: {page}")


def costs(before: str | Path, after: str | Path) -> list[str]:
    """The lines in which two ledgers differ. Raises RunError for a file that is none."""
    ledgers = []
    for path in (before, after):
        with run_errors(f"{path} is no ledger: give the ledger.json of a run folder", ValueError, LookupError):
            open_file(path, LARGEST_BYTES).close()
            ledgers.append(load(path))
    return of_ledgers(*ledgers)


def differences(runs: list[Recorded]) -> Table:
    """The differences of the programs, and the keys whose values differ, except for the run's folder."""
    keys = sorted({key for run in runs for key in run.config if not key.startswith("paths.")})
    programs = [hashlib.sha256(run.program.encode()).hexdigest()[:8] if run.program else None for run in runs]
    values: dict[str, list] = {PROGRAM: programs}
    made_of = {key for run in runs for key in run.environment if key.startswith("program/")}
    values |= {key: [run.environment.get(key) for run in runs] for key in sorted(made_of)}
    values |= {key: [as_yaml(run.config[key]) if key in run.config else None for run in runs] for key in keys}
    rows = [(key, *of_runs) for key, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)]
    return Table("Configuration that differs", dict.fromkeys(["key", *(run.name for run in runs)], ""), rows)


def row(run: Recorded) -> tuple:
    """A run in numbers, by COLUMNS: its last losses, and medians of its speed."""

    def values(name: str) -> list[float]:
        return [line[name] for line in run.lines if isinstance(line.get(name), int | float)]

    losses = [last(run.lines, name) for name in ("loss", "validation_loss")]
    medians = [statistics.median(values(name)) if values(name) else None for name in ("step_time_s", *MEASURED[1:3])]
    return run.name, max((line["step"] for line in run.lines), default=0), *losses, *medians


def equal(one: Recorded, other: Recorded, tolerance: float) -> str:
    """Says how many values are equal.

    Args:
      tolerance: relative to the larger of two values; 0: bit for bit.
    Raises:
      RunError: with the first step, in their order, that has another value or is in one run alone.
    """
    ours, theirs = decided(one), decided(other)
    places, largest = sorted(dict.fromkeys([*ours, *theirs]), key=lambda place: place[0]), 0.0
    if not places:
        raise RunError(f"{one.name} and {other.name} have no value in common to compare")
    for place in places:
        pair = ours.get(place, "nothing"), theirs.get(place, "nothing")
        difference = _difference(*pair)
        if difference > tolerance:
            by = f", a relative difference of {difference:.2g}" if math.isfinite(difference) else ""
            limit = f"{tolerance:g} at most" if tolerance else "equality"
            text = f"{pair[0]!r} in {one.name}, {pair[1]!r} in {other.name}{by}"
            raise RunError(f"step {place[0]}, {place[1]}: {text}; expected {limit}")
        largest = max(largest, difference)
    how = f"equal to a relative difference of {largest:.2g}" if largest else "equal"
    steps = {step for step, _ in ours}
    return f"{one.name} and {other.name}: {len(places):,} values of {len(steps):,} steps are {how}."


def is_measured(name: str) -> bool:
    return name in MEASURED or (name.endswith(MEASURED_ENDS) and "/" not in name)


def decided(run: Recorded) -> dict[tuple[int, str], Any]:
    """The metrics that the training alone decides, by step and name."""
    values = ((line["step"], name, value) for line in run.lines for name, value in line.items())
    return {(step, name): value for step, name, value in values if name != "step" and not is_measured(name)}


def _difference(one: Any, other: Any) -> float:
    """The relative difference; infinite if values cannot be compared, such as a number and NaN, which is a string."""
    if one == other:
        return 0.0
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


if __name__ == "__main__":
    command_line.run(main, Compare)
