"""The pages that show runs: report.html of one, and tools.compare's of several. One look with ledger.html.

plotly draws the curves; its JavaScript is in the page, which loads nothing. Numbers, configuration and environment are
plain HTML and can be read without JavaScript.
"""

import json
import math
import time
from html import escape
from pathlib import Path
from typing import Any

from ledger.pages import html_parts
from ledger.pages.html_parts import amount, percent, seconds
from runtime.tracking.recorded import Recorded, as_yaml

POINTS = 2000  # of a curve; of a longer one every second is shown, or every third, …
# What is drawn together: title, unit, and the metrics by name; 'name/' stands for all that begin so.
CHARTS = (
    ("Loss", "nats a token", ("loss", "validation_loss")),
    ("Bits per byte", "", ("bits_per_byte", "validation_bits_per_byte")),
    ("Perplexity", "", ("perplexity", "validation_perplexity")),
    ("Learning rate", "", ("learning_rate",)),
    ("Gradient norm", "", ("grad_norm", "grad_norm_of/")),
    ("Weight norm", "", ("weight_norm", "weight_norm_of/")),
    ("Update to weight", "ratio of norms", ("update_ratio_of/",)),
    ("Throughput", "tokens/s", ("tokens_per_s",)),
    ("Time of a step", "s", ("step_time_s", "device_s", "data_wait_s", "checkpoint_stall_s")),
    ("Share of the devices' peak", "share", ("mfu", "hfu", "mfu_6nd")),
    ("Memory, the most so far", "B", ("device_peak_memory_bytes", "host_peak_memory_bytes")),
    ("Tokens of each source", "tokens", ("tokens_per_source/",)),
    ("Steps skipped", "", ("skipped_steps",)),
)
LINKS = {
    "ledger.html": "what a step costs, line by line",
    "step.svg": "the compiled step as a graph",
    "step.hlo.txt": "the compiled step as text",
    "profile/perfetto_trace.json.gz": "a profile of three steps, for https://ui.perfetto.dev",
    "metrics.jsonl": "all numbers",
    "config.yaml": "the configuration",
}


def report_page(run: Recorded) -> str:
    """One run."""
    steps = run.config.get("training.steps")
    done = max((line["step"] for line in run.lines), default=0)
    about = f"step {done:,}" + (f" of {steps:,}" if steps else "")
    files = "".join(
        f'<li><a href="{escape(name)}">{escape(name)}</a>: {what}</li>'
        for name, what in LINKS.items()
        if (run.folder / name).exists()
    )
    costs = "\n".join(run.environment.get("ledger", []))
    samples = f'<section id="samples"><h2>Samples</h2><pre>{escape(run.samples)}</pre></section>' if run.samples else ""
    body = f"""<header>
<h1>{escape(run.name)}</h1>
<p>{about}; as of {_now(run)}. A run that goes on renews this page: load it again for what came since.</p>
</header>
<div class="cards">{_cards(run)}</div>
<nav aria-label="Sections"><a href="#curves">Curves</a> <a href="#step">The step</a>
{'<a href="#samples">Samples</a>' if run.samples else ""} <a href="#config">Configuration</a> <a href="#environment">Environment</a></nav>
{_curves([run])}
<section id="step"><h2>The step</h2><pre>{escape(costs)}</pre><ul>{files}</ul></section>
{samples}
<section id="config"><h2>Configuration</h2>{_table("Keys", run.config)}</section>
<section id="environment"><h2>Environment</h2>{_table("What it runs on", _environment(run))}</section>"""
    return _page(run.name, body, [run])


def compare_page(
    runs: list[Recorded], differences: dict[str, list[Any]], summary: tuple[list[str], list[list[str]]]
) -> str:
    """Several runs over one another.

    Args:
      differences: of configuration: values in the order of the runs, by key.
      summary: the table that the terminal shows: its headings, and a row a run.
    """
    names = [run.name for run in runs]
    rows = [
        [key, *("–" if value is None else as_yaml(value) for value in values)] for key, values in differences.items()
    ]
    table = (
        _rows("Configuration that differs", ["key", *names], rows) if rows else "<p>The configurations are equal.</p>"
    )
    body = f"""<header><h1>{len(runs)} runs</h1></header>
<section id="numbers"><h2>In numbers</h2>{_rows("At the end", *summary)}</section>
{_curves(runs)}
<section id="config"><h2>Configuration</h2>{table}</section>"""
    return _page(", ".join(names), body, runs)


def curves(run: Recorded) -> dict[str, dict[str, list]]:
    """Of each metric its steps, hours since the run began, and values; what is null or no finite number is left out."""
    begin = run.lines[0]["time"] if run.lines else 0.0
    found: dict[str, dict[str, list]] = {}
    for line in run.lines:
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                curve = found.setdefault(name, {"step": [], "hours": [], "value": []})
                curve["step"].append(line["step"])
                curve["hours"].append(round((line["time"] - begin) / 3600, 6))
                curve["value"].append(value if isinstance(value, int) else float(f"{value:.7g}"))
    for curve in found.values():
        every = math.ceil(len(curve["step"]) / POINTS)
        for values in curve.values():
            values[:] = values[::-1][::every][::-1]  # with the last
    return found


def _charts(runs: list[Recorded]) -> list[dict[str, Any]]:
    """What page.js draws: charts with their series."""
    of_runs = [curves(run) for run in runs]
    names = list(dict.fromkeys(name for each in of_runs for name in each))
    left, charts = set(names), []
    for title, unit, wanted in CHARTS:
        shown = [
            name for each in wanted for name in names if name == each or (each[-1] == "/" and name.startswith(each))
        ]
        left -= set(shown)
        charts.append((title, unit, shown))
    charts += [(name.replace("_", " "), "", [name]) for name in names if name in left]
    return [
        {
            "title": title,
            "unit": unit,
            "series": [
                {"run": index, "name": name, **of_run[name]}
                for index, of_run in enumerate(of_runs)
                for name in shown
                if name in of_run
            ],
        }
        for title, unit, shown in charts
        if shown
    ]


def _curves(runs: list[Recorded]) -> str:
    return """<section id="curves"><h2>Curves</h2>
<form class="controls" id="controls">
<label>Smoothing <input type="range" name="smoothing" min="0" max="0.98" step="0.02" value="0"></label>
<label><input type="checkbox" name="log"> logarithmic</label>
<label>over <select name="x"><option value="step">steps</option><option value="hours">hours</option></select></label>
</form>
<div class="charts" id="charts"></div>
<noscript><p>The curves need JavaScript; the numbers are in metrics.jsonl.</p></noscript>
</section>"""


def _cards(run: Recorded) -> str:
    def latest(name: str) -> Any:
        return next((line[name] for line in reversed(run.lines) if line.get(name) is not None), None)

    def number(value: Any, form: str) -> str:
        return format(value, form) if isinstance(value, int | float) else str(value or "n/a")

    validated = [line["validation_loss"] for line in run.lines if isinstance(line.get("validation_loss"), float)]
    lowest = f"lowest {min(validated):.4f}" if validated else ""
    bits = latest("bits_per_byte")
    loss = f"{number(latest('grad_norm'), '.3g')} gradient norm" + (
        "" if bits is None else f"; {bits:.4f} bits per byte"
    )
    rate, memory = latest("tokens_per_s"), latest("device_peak_memory_bytes")
    host = latest("host_peak_memory_bytes")
    skipped = latest("skipped_steps")
    per_step = f"{seconds(latest('step_time_s'))} a step, of it {seconds(latest('data_wait_s'))} waiting for data"
    return "".join(
        f'<section class="card"><h2>{title}</h2><p><b class="big">{big}</b></p><p '
        f'class="note">{escape(note)}</p></section>'
        for title, big, note in (
            ("Loss", number(latest("loss"), ".4f"), loss + (f"; {skipped} steps skipped" if skipped else "")),
            ("Validation loss", number(latest("validation_loss"), ".4f"), lowest),
            ("Tokens a second", "n/a" if rate is None else f"{rate:,.0f}", f"{per_step}; MFU {percent(latest('mfu'))}"),
            (
                "Memory, the most so far",
                amount(memory or host or 0, "B"),
                "of a device" if memory else "of the process; its devices do not say theirs",
            ),
        )
    )


def _environment(run: Recorded) -> dict[str, Any]:
    rows = {name: value for name, value in run.environment.items() if name not in ("packages", "ledger")}
    return rows | run.environment.get("packages", {})


def _now(run: Recorded) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.lines[-1]["time"])) if run.lines else "the start"


def _table(caption: str, values: dict[str, Any]) -> str:
    return _rows(caption, ["key", "value"], [[key, as_yaml(value)] for key, value in values.items()])


def _rows(caption: str, headings: list[str], rows: list[list[str]]) -> str:
    return html_parts.table(caption, dict.fromkeys(headings, ""), [tuple(row) for row in rows])


def _page(title: str, body: str, runs: list[Recorded]) -> str:
    from plotly.offline import get_plotlyjs

    here, of_ledger = Path(__file__).parent, Path(html_parts.__file__).parent
    style = (of_ledger / "html.css").read_text(encoding="utf-8") + (here / "report.css").read_text(encoding="utf-8")
    data = {"runs": [run.name for run in runs], "charts": _charts(runs)}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no </script> in it
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{text}</script>
<script>{get_plotlyjs()}</script>
<script>
{(here / "report.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""
