"""Reads what a run left in its folder."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from runtime.files import MOST_BYTES, flat, parse_yaml, read_bytes, read_text
from runtime.terminal import RunError

# Numbers that JSON cannot write; metrics.jsonl has them as strings.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclasses.dataclass(frozen=True)
class Recorded:
    name: str
    folder: Path
    lines: list[dict[str, Any]]  # those of metrics.jsonl
    config: dict[str, Any]  # by key, 'training.tokens.batch'
    environment: dict[str, Any]  # see `runtime.tracking.report.environment`
    samples: str  # text that somebody put into samples.txt
    program: str = ""  # the trainer's file
    damaged: tuple[str, ...] = ()  # what is wrong with lines of metrics.jsonl that are left out


def record_of(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged: not an object with `step` and `time`, which are numbers."""
    try:
        record = json.loads(line)
        step, time = int(record["step"]), float(record["time"])
        float(sum(abs(value) for value in record.values() if type(value) is int))  # none is too large for a float
        return {**record, "step": step, "time": time} if 0 <= step < 2**53 and 0 <= time < 1e11 else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def last(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The last number of this name, also one that is not finite; None: there is none."""
    found = (numbers(record).get(name) for record in reversed(records))
    return next((number for number in found if number is not None), None)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line, those that are not finite included."""
    values = {name: NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in record.items()}
    return {
        name: float(value)
        for name, value in values.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }


def damage(file: Path, number: int, line: bytes) -> str:
    """Says what is wrong with a line that `record_of` refuses."""
    text = line.strip()[:80].decode(errors="replace")
    return f"{file}, line {number}: expected a JSON object with `step` and `time`, which are numbers, but got {text!r}"


def read_run(path: str | Path) -> Recorded:
    """Reads a run folder, or a file of metrics alone. Damaged lines are left out, and `damaged` says so. Raises
    RunError: there are no metrics, or the configuration or the environment beside them is damaged."""
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        # A last line without an end is being written.
        lines = read_bytes(file, MOST_BYTES).split(b"\n")[:-1]
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}: give a run folder, runs/NAME, or a file of metrics") from error
    records = [record_of(line) for line in lines]

    def beside(name: str) -> str:
        there = file.parent / name
        return read_text(there, errors="replace") if path.is_dir() and there.exists() else ""

    def parsed(name: str, read: Callable[[str], Any]) -> dict[str, Any]:
        try:
            values = read(beside(name) or "{}")
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise RunError(f"{file.parent / name} is damaged ({str(error).splitlines()[0]}): remove it") from error
        if not isinstance(values, dict):
            raise RunError(f"{file.parent / name} is damaged: expected keys with values; remove it")
        return values

    return Recorded(
        name=path.resolve().name if path.is_dir() else path.name,
        folder=file.parent,
        lines=[record for record in records if record is not None],
        config=flat(parsed("config.yaml", parse_yaml)),
        environment=parsed("environment.json", json.loads),
        samples=beside("samples.txt"),
        program=beside("program.py"),
        damaged=tuple(
            damage(file, number, line) for number, (line, record) in enumerate(zip(lines, records), 1) if record is None
        ),
    )


def as_yaml(value: Any) -> str:
    """A value of a configuration as one would write it there."""
    return value if isinstance(value, str) else json.dumps(value)
