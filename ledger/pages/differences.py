"""Shows what a change of the source costs: the lines in which two ledgers differ.

    print("\n".join(differences(load("runs/before/ledger.json"), load("runs/after/ledger.json"))))

Lines are matched by their text and their neighbours, so line numbers may shift.
"""

import collections
import difflib
import json
from pathlib import Path
from typing import Any

from ledger.count.step import FORMAT
from ledger.units import number

ALL = "altogether"


def load(path: str | Path) -> dict[str, Any]:
    """A ledger.json; one of format 1 annotated a single file. Raises `ValueError` if it is none."""
    ledger = json.loads(Path(path).read_text(encoding="utf-8"))
    known = ledger.get("format") if isinstance(ledger, dict) else None
    if known not in (1, FORMAT):
        raise ValueError(f"expected a ledger of format {FORMAT}, found {known}")
    return {"texts": {ledger["source"]: ledger.get("text", [])}, **ledger}


def entries(ledger: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The costs of each line, and their sum: line -> what -> how much, per device and step."""
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
    memory = {f"bytes of memory, {kind}": size for kind, size in ledger["memory"]["by_kind"].items()}
    flops = {"model FLOPs": ledger["model_flops"], "hardware FLOPs": ledger["hardware_flops"]}
    sent = {"bytes sent": sum(ledger["sent_bytes_per_device"].values())}
    return {**table, ALL: flops | sent | {"bytes of memory": ledger["memory"]["bytes"]} | memory}


def titles(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Titles of the lines of both sources, 'train.py:197  text': a line that is in both has that of `after`."""
    ours: dict[str, str] = {}
    theirs: dict[str, str] = {}
    for file in dict.fromkeys([*after["texts"], *before["texts"]]):
        old, new = before["texts"].get(file, []), after["texts"].get(file, [])
        for _, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            is_same = i2 - i1 == j2 - j1  # equal, or each line has been changed in its place
            for j in range(j1, j2):
                theirs[f"{file}:{j + 1}"] = f"{file}:{j + 1}{'' if is_same else ' (new)'}  {new[j].strip()}".rstrip()
            for i in range(i1, i2):
                same = theirs[f"{file}:{i - i1 + j1 + 1}"] if is_same else ""
                ours[f"{file}:{i + 1}"] = same or f"{file}:{i + 1} (deleted)  {old[i].strip()}".rstrip()
    return ours, theirs


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The changes line by line, sums last; empty where nothing has changed."""
    if (old := before["source"]) != (new := after["source"]):  # a copy under another name
        before = json.loads(json.dumps(before).replace(f'"{old}:', f'"{new}:').replace(f'"{old}"', f'"{new}"'))
    ours, theirs = titles(before, after)
    left = {ours.get(line, line): costs for line, costs in entries(before).items()}
    right = {theirs.get(line, line): costs for line, costs in entries(after).items()}
    elsewhere = sorted((left.keys() | right.keys()) - {ALL})
    lines = [] if before["mesh"] == after["mesh"] else [f"mesh: {before['mesh']} -> {after['mesh']}"]
    for title in dict.fromkeys([*theirs.values(), *ours.values(), *elsewhere, ALL]):
        was, now = left.get(title, {}), right.get(title, {})
        changed = [what for what in dict.fromkeys((*was, *now)) if was.get(what, 0) != now.get(what, 0)]
        lines += [title] if changed else []
        lines += [f"    {what}: {_shown(was.get(what, 0), now.get(what, 0))}" for what in changed]
    return lines


def _shown(was: float, now: float) -> str:
    """Two values, short unless they would look the same."""
    short = [f"{value:,.0f}" if value < 1e5 else number(value) for value in (was, now)]
    return " -> ".join(short if short[0] != short[1] else [f"{value:,.0f}" for value in (was, now)])
