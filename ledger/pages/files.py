"""The pages of a ledger: ledger.txt for a terminal, ledger.html for a browser, ledger.json for programs."""

import json

from ledger.count.step import Ledger
from ledger.machines.roofline import Roofline
from ledger.pages import html, text


def pages(ledger: Ledger, roofline: Roofline | None = None) -> dict[str, str]:
    """The texts of the three by their names; with a roofline, the page for a browser has the time of a step."""
    of_programs = json.dumps(ledger.to_json(), indent=1) + "\n"
    return {"ledger.html": html.page(ledger, roofline), "ledger.txt": text.text(ledger), "ledger.json": of_programs}
