"""The pages that show runs: report.html in a run folder, and tools.compare's page of several.

    write_report("runs/first")                     # from the files of the run folder alone

So it can be written again at any time: python -m tools.compare runs/first. While a run goes on,
runtime/tracking/follow.py renews it. What a page says is here, how it looks in report.html and compare.html.
"""

import contextlib
import difflib
import os
import platform
import re
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from ledger.pages.render import render
from ledger.pages.table import Table
from ledger.units import amount, percent, seconds
from runtime.files import write_whole
from runtime.tracking.recorded import Recorded, as_yaml, last, read_run

PACKAGES = ("jax", "jaxlib", "numpy", "zarr", "hydra-core", "libtpu", "jax-cuda13-plugin")
LINKS = {
    "ledger.html": "what a step costs, line by line",
    "step.svg": "the compiled step as a graph",
    "step.hlo.txt": "the compiled step as text",
    "profile/perfetto_trace.json.gz": "a profile of three steps, for https://ui.perfetto.dev",
    "metrics.jsonl": "all numbers",
    "config.yaml": "the configuration",
}


def environment() -> dict[str, Any]:
    """The machine, versions and environment of this process, as JSON values."""
    import jax  # what reads run folders starts without it

    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": socket.gethostname(),
        "hosts": jax.process_count(),
        "devices": f"{len(devices)} × {', '.join(kinds)} ({jax.default_backend()})",
        "cpu": processor(),
        "cpu_cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": installed,
        "command": " ".join(sys.orig_argv),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def processor() -> str:
    """The CPU's name, where Linux or Python knows it."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def write_report(folder: str | Path) -> Path:
    """Writes report.html into a run folder, all or nothing; returns its path. Raises RunError: it has no metrics."""
    page = Path(folder) / "report.html"
    write_whole(page, report_page(read_run(folder)))
    return page


def report_page(run: Recorded) -> str:
    steps = run.config.get("training.steps")
    done = max((line["step"] for line in run.lines), default=0)
    left_out = r"packages$|ledger$|program/files/"  # shown in a table, in lines above, and for tools.compare
    rows = {name: value for name, value in run.environment.items() if not re.match(left_out, name)}
    return _page(
        "report.html",
        [run],
        title=run.name,
        about=f"step {done:,}" + (f" of {steps:,}" if steps else ""),
        as_of=time.strftime("%Y-%m-%d %H:%M", time.localtime(run.lines[-1]["time"])) if run.lines else "the start",
        cards=_cards(run),
        costs="\n".join(run.environment.get("ledger", [])),
        files={name: what for name, what in LINKS.items() if (run.folder / name).exists()},
        config=_keys("Configuration", run.config),
        environment=_keys("What it runs on", rows | run.environment.get("packages", {})),
    )


def compare_page(runs: list[Recorded], summary: Table, changed: Table, costs: dict[str, list[str]]) -> str:
    """Several runs over one another. changed: keys of the configuration that differ. costs: the lines in which each
    other run's ledger differs from the first one's."""
    first, *others = runs
    texts = {run.name: run.program.splitlines() for run in runs if run.program}
    programs = {
        run.name: "\n".join(difflib.unified_diff(texts[first.name], texts[run.name], first.name, run.name, lineterm=""))
        for run in others
        if first.name in texts and run.name in texts
    }
    title = ", ".join(run.name for run in runs)
    return _page("compare.html", runs, title=title, summary=summary, changed=changed, programs=programs, costs=costs)


def _keys(caption: str, values: dict[str, Any]) -> Table:
    return Table(caption, {"key": "", "value": ""}, [(key, as_yaml(value)) for key, value in values.items()])


def _page(template: str, runs: list[Recorded], **values: Any) -> str:
    # A run can do without plotly, and a tool starts without it.
    from plotly.offline import get_plotlyjs

    from runtime.tracking.curves import charts

    by_family: dict[str, list] = {}
    for chart in charts(runs):
        by_family.setdefault(chart.family, []).append(chart)
    return render(template, Path(__file__).parent, runs=runs, families=by_family, plotly=get_plotlyjs(), **values)


def _cards(run: Recorded) -> list[tuple[str, str, str]]:
    def latest(name: str) -> float | None:
        values = (line[name] for line in reversed(run.lines) if isinstance(line.get(name), int | float))
        return next(values, None)

    def number(name: str, form: str, says: str = "{}") -> str:
        value = latest(name)
        return "" if value is None else says.format(format(value, form))

    validated = [line["validation_loss"] for line in run.lines if isinstance(line.get("validation_loss"), float)]
    skipped = latest("skipped_steps")
    notes = [number("grad_norm", ".3g", "{} gradient norm"), number("bits_per_byte", ".4f", "{} bits per byte")]
    notes.append(f"{skipped} steps skipped" if skipped else "")
    loss, validation = (
        "n/a" if (value := last(run.lines, name)) is None else f"{value:.4f}" for name in ("loss", "validation_loss")
    )
    memory, host = latest("device_peak_memory_bytes"), latest("host_peak_memory_bytes")
    per_step = f"{seconds(latest('step_time_s'))} a step, of it {seconds(latest('data_wait_s'))} waiting for data"
    return [
        ("Loss", loss, "; ".join(filter(None, notes))),
        ("Validation loss", validation, f"lowest {min(validated):.4f}" if validated else ""),
        ("Tokens a second", number("tokens_per_s", ",.0f") or "n/a", f"{per_step}; MFU {percent(latest('mfu'))}"),
        (
            "Memory, the most so far",
            amount(memory or host or 0, "B"),
            "of a device" if memory else "of the process; its devices do not say theirs",
        ),
    ]
