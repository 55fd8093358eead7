"""Shows what a change of the source costs: the lines in which two ledgers differ.

    python -m tools.ledger_diff runs/before/ledger.json runs/after/ledger.json

Lines are matched by their text and their neighbours, so that numbers may shift. Exits with 1 where the ledgers differ.
"""

import collections
import difflib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ledger.count.step import FORMAT
from ledger.units import gigabytes, number
from runtime.config import command_line
from runtime.terminal import RunError


@dataclass(frozen=True, kw_only=True)
class LedgerDiff:
    WORDS: ClassVar = ("before", "after")

    before: str  # a ledger.json
    after: str  # another


def load(path: str) -> dict[str, Any]:
    """A ledger.json. Raises `RunError` if it is none, or of another format."""
    try:
        ledger = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}: give the ledger.json of a run folder") from error
    except ValueError as error:
        raise RunError(f"{path}: is no JSON ({error}): give the ledger.json of a run folder") from error
    found = ledger.get("format") if isinstance(ledger, dict) else None
    if found != FORMAT:
        raise RunError(f"{path}: expected a ledger of format {FORMAT}, found {found}: write it again with this version")
    return ledger


def entries(ledger: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What each line costs: line -> what -> how much, per device and step."""
    table: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for row in ledger["products"]:
        table[row["line"]][f"FLOPs, {row['phase']}"] += row["flops"] * row["times"]
    for row in ledger["collectives"]:
        what = f"{row['kind']} over {' × '.join(row['axes'])} of {row['dtype']}, {row['phase']}"
        table[row["line"]][f"{what}: times"] += row["times"]
        table[row["line"]][f"{what}: bytes sent"] += row["sent_bytes"] * row["times"]
    for row in ledger["saved"]:
        why = {"": "nobody asked", "input": "input of a checkpoint"}.get(row["why"], row["why"])
        table[row["line"]][f"bytes kept for the backward pass ({why})"] += row["bytes"] * row["times"]
    for row in ledger["loops"]:
        table[row["line"]][f"loop of {row['length']}, {row['phase']}: times"] += row["times"]
    return table


def matching(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    """Each line of `before` with what it has become in `after`, '' where it is gone; likewise those that are new; in
    the order of the source."""
    old, new = before["text"], after["text"]
    pairs: list[tuple[int | None, int | None]] = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal" or i2 - i1 == j2 - j1:  # as many lines as before: each has been changed in its place
            pairs += zip(range(i1, i2), range(j1, j2))
        else:
            pairs += [(i, None) for i in range(i1, i2)] + [(None, j) for j in range(j1, j2)]

    def place(ledger, index):
        return "" if index is None else f"{ledger['source']}:{index + 1}"

    order = [(place(before, i), place(after, j)) for i, j in pairs]
    known = {line for pair in order for line in pair}
    elsewhere = sorted((entries(before).keys() | entries(after).keys()) - known)
    return order + [(line, line) for line in elsewhere]


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What has changed, line by line; empty where nothing has."""
    left, right = entries(before), entries(after)
    lines = []
    for old, new in matching(before, after):
        mine, theirs = left.get(old, {}), right.get(new, {})
        changed = [what for what in dict.fromkeys((*mine, *theirs)) if mine.get(what, 0) != theirs.get(what, 0)]
        if changed:
            lines.append(_title(before, after, old, new))
            lines += [f"    {what}: {_shown(mine.get(what, 0))} -> {_shown(theirs.get(what, 0))}" for what in changed]
    totals = [
        f"    {name}: {number(before[key]) or '0'} -> {number(after[key]) or '0'}"
        for key, name in (("model_flops", "model FLOPs"), ("hardware_flops", "hardware FLOPs"))
        if before[key] != after[key]
    ]
    if before["mesh"] != after["mesh"]:
        totals.append(f"    mesh: {before['mesh']} -> {after['mesh']}")
    kinds = {"memory of a device": "bytes"} | {f"  {kind}": kind for kind in after["memory"]["by_kind"]}
    for name, key in kinds.items():
        was, now = (each["memory"].get(key, each["memory"]["by_kind"].get(key, 0)) for each in (before, after))
        if was != now:
            totals.append(f"    {name}: {gigabytes(was)} -> {gigabytes(now)}")
    return lines + (["altogether", *totals] if totals else [])


def _title(before, after, old: str, new: str) -> str:
    ledger, place = (after, new) if new else (before, old)
    file, _, line = place.rpartition(":")
    text = ledger["text"][int(line) - 1].strip() if file == ledger["source"] else ""
    where = f"{old} -> {new}" if old and new and old != new else f"{old} (deleted)" if not new else new
    return f"{where}{'' if old else ' (new)'}  {text}".rstrip()


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value < 1e5 else number(value)


def main(config: LedgerDiff) -> None:
    lines = compare(load(config.before), load(config.after))
    print("\n".join(lines) if lines else "The two ledgers say the same.")
    sys.exit(bool(lines))


if __name__ == "__main__":
    command_line.run(main, LedgerDiff)
