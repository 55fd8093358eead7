"""What a run left in its folder, read again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from runtime.terminal import RunError
from runtime.tracking.metrics import flattened


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a run left."""

    name: str
    folder: Path
    lines: list[dict[str, Any]]  # of metrics.jsonl
    config: dict[str, Any]  # by key, 'training.tokens.batch'
    environment: dict[str, Any]  # see `environment`
    samples: str  # text that somebody put into samples.txt


def read_run(path: str | Path) -> Recorded:
    """Reads a run folder, or a file of metrics alone.

    Raises:
      RunError: there are no metrics, or a line is none.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    folder = file.parent
    lines = []
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}: give a run folder, runs/NAME, or a file of metrics") from error
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break  # it is being written
        try:
            record = json.loads(line)
            record["step"], record["time"] = int(record["step"]), float(record["time"])
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{file}, line {number}: expected metrics of a step, but got {line.strip()[:80]!r}"
            ) from error
        lines.append(record)

    def beside(name: str) -> str:
        there = folder / name
        return there.read_text(encoding="utf-8", errors="replace") if path.is_dir() and there.exists() else ""

    name = path.resolve().name if path.is_dir() else path.name
    config = flattened(yaml.safe_load(beside("config.yaml")) or {}, separator=".")
    return Recorded(name, folder, lines, config, json.loads(beside("environment.json") or "{}"), beside("samples.txt"))


def as_yaml(value: Any) -> str:
    """A value of a configuration as one would write it there."""
    return value if isinstance(value, str) else json.dumps(value)
