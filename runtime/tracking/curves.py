"""The curves of report.html and of tools.compare, drawn by plotly: charts of one run, or of several over one another.

    for chart in charts([read_run("runs/first")]):
        chart.title, chart.html                      # a <div> with its data; the page holds plotly's JavaScript once

The colours can be read on light and dark ground; page.css gives texts and grids those of the page.
"""

import dataclasses
import math
import textwrap
from html import escape
from typing import Any

import plotly.graph_objects as go

from runtime.tracking.recorded import Recorded, numbers

POINTS = 1000  # a curve's most points; a longer one shows every second, or every third, …
# Charts: title, unit, and the metrics by name.
CHARTS = (
    ("Loss", "nats a token", ("loss", "validation_loss")),
    ("Bits per byte", "", ("bits_per_byte", "validation_bits_per_byte")),
    ("Perplexity", "", ("perplexity", "validation_perplexity")),
    ("Learning rate", "", ("learning_rate",)),
    ("Gradient norm", "", ("grad_norm",)),
    ("Weight norm", "", ("weight_norm",)),
    ("Throughput", "tokens/s", ("tokens_per_s",)),
    ("Time of a step", "s", ("step_time_s", "device_s", "data_wait_s", "checkpoint_stall_s")),
    ("Processor time of a step", "s", ("step_cpu_s",)),
    ("Share of the devices' peak", "share", ("mfu", "hfu", "mfu_6nd")),
    ("Memory, the most so far", "B", ("device_peak_memory_bytes", "host_peak_memory_bytes")),
    ("Steps skipped", "", ("skipped_steps",)),
)
# Titles and units of metrics that are called prefix/something, of which there may be any number.
FAMILIES = {
    "grad_norm_of": ("Gradient norm of each weight", ""),
    "weight_norm_of": ("Norm of each weight", ""),
    "update_ratio_of": ("Update of each weight, over its norm", "share"),
    "tokens_per_source": ("Tokens of each source", "tokens"),
    "score": ("Scores of tasks", ""),
    "validation_loss_of": ("Validation loss of each source", "nats a token"),
}
FORMATS = {"B": "~s", "share": ".2~%", "tokens/s": "~s", "tokens": "~s"}
# Curves that jump from step to step: their mean over this share of the curve is drawn, above the pale curve.
NOISY = {"loss", "bits_per_byte", "perplexity", "grad_norm", "tokens_per_s", "step_time_s", "device_s", "data_wait_s"}
NOISY |= {"grad_norm_of", "update_ratio_of"}
MEAN_OVER = 0.04
COLOURS = ("#2b83c6", "#d97a00", "#009080", "#9a63d8", "#c94080", "#988000", "#6b9a20", "#c85030", "#5f86a8", "#888888")
# Pixels: the drawing itself never gets smaller, whatever is written around it.
DRAWN, ABOVE, BELOW, LEGEND_ROW = 220, 42, 42, 19
LEGEND_WIDTH = 34  # characters of its row: a screen of 390 pixels has room for them


@dataclasses.dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    family: str  # charts of one family are folded; ''
    is_wide: bool  # it takes a row of the page
    html: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric of a run, by steps and by hours since the run began."""

    name: str
    step: list[int]
    hours: list[float]
    value: list[float]


def curves(run: Recorded) -> dict[str, Curve]:
    """All metrics of a run; what is null or no finite number is left out."""
    begin = run.lines[0]["time"] if run.lines else 0.0
    by_name: dict[str, Curve] = {}
    for line in run.lines:
        for name, value in numbers(line).items():
            if math.isfinite(value):
                curve = by_name.setdefault(name, Curve(name, [], [], []))
                curve.step.append(line["step"])
                curve.hours.append(float(f"{(line['time'] - begin) / 3600:.5g}"))
                curve.value.append(float(f"{value:.7g}"))
    return {name: _thinned(curve) for name, curve in by_name.items() if name != "skipped_steps" or any(curve.value)}


def _thinned(curve: Curve) -> Curve:
    every = max(1, math.ceil(len(curve.step) / POINTS))
    kept = slice((len(curve.step) - 1) % every, None, every)  # with the last
    return Curve(curve.name, curve.step[kept], curve.hours[kept], curve.value[kept])


def charts(runs: list[Recorded]) -> list[Chart]:
    """The charts that these runs have curves for. One run's weights share a chart for each norm; with several runs each
    weight has its chart, and a run the same colour everywhere. Each score has its chart."""
    of_runs = [curves(run) for run in runs]
    names = list(dict.fromkeys(name for by_name in of_runs for name in by_name))
    wanted = [(title, unit, "", [name for name in metrics if name in names]) for title, unit, metrics in CHARTS]
    left = [name for name in names if not any(name in metrics for *_, metrics in wanted)]
    for family in dict.fromkeys(name.partition("/")[0] for name in left):
        title, unit = FAMILIES.get(family, (family.replace("_", " "), ""))
        mine = [name for name in left if name.partition("/")[0] == family]
        if len(mine) == 1 or (len(runs) == 1 and family != "score"):  # an accuracy's scale is no perplexity's
            wanted.append((title, unit, "", mine))
        else:
            wanted += [(name.partition("/")[2] or name, unit, title, [name]) for name in mine]
    result = []
    for title, unit, family, metrics in wanted:
        drawn = enumerate(zip(runs, of_runs))
        series = [
            (run.name, index, by_name[name]) for index, (run, by_name) in drawn for name in metrics if name in by_name
        ]
        if series:
            html = _figure(series, unit, of_several=len(runs) > 1, several_metrics=len(metrics) > 1)
            result.append(Chart(title, unit, family, len(series) > 10, html))
    return result


def _figure(series: list[tuple[str, int, Curve]], unit: str, *, of_several: bool, several_metrics: bool) -> str:
    """A chart: one colour a run where there are several, else one a metric."""
    metrics = list(dict.fromkeys(curve.name for *_, curve in series))
    traces: list[go.Scatter] = []
    steps: list[list[int]] = []
    hours: list[list[float]] = []
    rows: list[list[str]] = []  # the legend's rows for each line
    for run, index, curve in series:
        metric = metrics.index(curve.name)
        short = curve.name.partition("/")[2] or curve.name
        name = f"{run}: {short}" if of_several and several_metrics else run if of_several else short
        colour, dash = (index, metric) if of_several else (metric, metric // len(COLOURS))
        rows.append(textwrap.wrap(name, LEGEND_WIDTH))
        # Colours and dashes come again, but the two together for no other line of a chart.
        dash += (index // len(COLOURS)) * len(metrics) if of_several else 0
        pattern = f"{2 + dash}px,3px,{dash}px,3px" if dash else "solid"
        line = {"color": COLOURS[colour % len(COLOURS)], "dash": pattern, "width": 1.8}
        shown = {"x": curve.step, "y": curve.value, "name": "<br>".join(map(escape, rows[-1])), "line": line}
        shown["mode"] = "lines+markers" if len(curve.step) < 3 else "lines"
        if curve.name.partition("/")[0] in NOISY and MEAN_OVER * len(curve.step) >= 4:
            if len(series) <= 4:
                traces.append(go.Scatter(**shown, opacity=0.3, showlegend=False, hoverinfo="skip"))
            shown["y"] = _mean(curve.value)
        traces.append(go.Scatter(**shown))
        steps += [curve.step] * (len(traces) - len(steps))
        hours += [curve.hours] * (len(traces) - len(hours))
    legend = 10 + LEGEND_ROW * sum(map(len, rows)) if len(series) > 1 else 0
    figure = go.Figure(traces)
    figure.update_layout(
        template=go.layout.Template(),
        height=ABOVE + DRAWN + BELOW + legend,
        margin={"l": 56, "r": 12, "t": ABOVE, "b": BELOW + legend, "autoexpand": False},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
        hovermode="x unified" if len(series) <= 10 else "closest",
        hoverlabel={"namelength": -1},
        showlegend=legend > 0,
        legend={"x": 0, "y": -BELOW / DRAWN, "yanchor": "top", "bgcolor": "rgba(0,0,0,0)", "font": {"size": 12}},
        xaxis={"title": {"text": "step", "standoff": 4}, "zeroline": False},
        yaxis={"tickformat": FORMATS.get(unit, ""), "exponentformat": "e", "rangemode": "nonnegative"},
        updatemenus=[_buttons(steps, hours)],
    )
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})


def _buttons(steps: list[list[int]], hours: list[list[float]]) -> dict[str, Any]:
    """Two above a chart, which a second press undoes: a logarithmic axis, and hours in place of steps."""
    to_log = {"label": "log", "method": "relayout", "args": [{"yaxis.type": "log"}]}
    to_hours = {"label": "hours", "method": "update", "args": [{"x": hours}, {"xaxis.title.text": "hours"}]}
    return {
        "type": "buttons",
        "direction": "right",
        "showactive": False,
        "buttons": [
            {**to_log, "args2": [{"yaxis.type": "linear"}]},
            {**to_hours, "args2": [{"x": steps}, {"xaxis.title.text": "step"}]},
        ],
        **{"x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "pad": {"b": 4}, "font": {"size": 11}},
    }


def _mean(values: list[float]) -> list[float]:
    """The mean of each value and its neighbours, as many before as after where there are so many."""
    reach = round(MEAN_OVER * len(values) / 2)
    parts = (values[max(0, place - reach) : place + reach + 1] for place in range(len(values)))
    return [float(f"{sum(part) / len(part):.5g}") for part in parts]
