"""The pages of a ledger in a folder: ledger.txt for a terminal, ledger.html for a browser, ledger.json for programs."""

import json
from pathlib import Path

from ledger.count.step import Ledger
from ledger.machines.roofline import Roofline
from ledger.pages import html, text


def write(ledger: Ledger, folder: str | Path, roofline: Roofline | None = None) -> None:
    """Writes the three; the page for a browser with the time that a step takes, where there is a roofline."""
    (Path(folder) / "ledger.html").write_text(html.page(ledger, roofline), encoding="utf-8")
    (Path(folder) / "ledger.txt").write_text(text.text(ledger), encoding="utf-8")
    (Path(folder) / "ledger.json").write_text(json.dumps(ledger.to_json(), indent=1) + "\n", encoding="utf-8")
