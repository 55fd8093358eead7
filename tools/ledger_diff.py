"""Shows what a change of the source costs: the lines in which two ledgers differ.

    python -m tools.ledger_diff runs/before/ledger.json runs/after/ledger.json

Lines are matched by their text and their neighbours, so that numbers may shift. Exits with 1 where the ledgers differ.
"""

import collections
import difflib
import json
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from ledger.count.step import FORMAT
from ledger.units import number
from runtime.config import command_line
from runtime.files import read_text
from runtime.terminal import RunError


@dataclass(frozen=True, kw_only=True)
class LedgerDiff:
    WORDS: ClassVar = ("before", "after")

    before: str  # a ledger.json
    after: str  # another


def load(path: str) -> dict[str, Any]:
    """A ledger.json. Raises `RunError` if it is none, or of another format."""
    try:
        ledger = json.loads(read_text(path))
        found = ledger["format"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is no ledger ({error}): give the ledger.json of a run folder") from error
    if found != FORMAT:
        raise RunError(f"{path}: expected a ledger of format {FORMAT}, found {found}: write it again with this version")
    return ledger


def entries(ledger: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What each line costs, and all together: line -> what -> how much, per device and step."""
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
    return {**table, "altogether": flops | {"bytes of memory": ledger["memory"]["bytes"]} | memory}


def titles(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """What each line of the two sources is called, 'train.py:197  text': a line that is in both as it is in `after`."""
    ours: dict[str, str] = {}
    theirs: dict[str, str] = {}
    old, new = before["text"], after["text"]
    for _, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        is_same = i2 - i1 == j2 - j1  # equal, or each line has been changed in its place
        for j in range(j1, j2):
            place = f"{after['source']}:{j + 1}"
            theirs[place] = f"{place}{'' if is_same else ' (new)'}  {new[j].strip()}".rstrip()
        for i in range(i1, i2):
            place = f"{before['source']}:{i + 1}"
            same = theirs[f"{after['source']}:{i - i1 + j1 + 1}"] if is_same else ""
            ours[place] = same or f"{place} (deleted)  {old[i].strip()}".rstrip()
    return ours, theirs


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What has changed, line by line; empty where nothing has."""
    ours, theirs = titles(before, after)
    left = {ours.get(line, line): costs for line, costs in entries(before).items()}
    right = {theirs.get(line, line): costs for line, costs in entries(after).items()}
    elsewhere = sorted((left.keys() | right.keys()) - {"altogether"})
    lines = [] if before["mesh"] == after["mesh"] else [f"mesh: {before['mesh']} -> {after['mesh']}"]
    for title in dict.fromkeys([*theirs.values(), *ours.values(), *elsewhere, "altogether"]):
        was, now = left.get(title, {}), right.get(title, {})
        changed = [what for what in dict.fromkeys((*was, *now)) if was.get(what, 0) != now.get(what, 0)]
        lines += [title] if changed else []
        lines += [f"    {what}: {_shown(was.get(what, 0))} -> {_shown(now.get(what, 0))}" for what in changed]
    return lines


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value < 1e5 else number(value)


def main(config: LedgerDiff) -> None:
    lines = compare(load(config.before), load(config.after))
    print("\n".join(lines) if lines else "The two ledgers say the same.")
    sys.exit(bool(lines))


if __name__ == "__main__":
    command_line.run(main, LedgerDiff)
