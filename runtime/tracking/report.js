"use strict";
// Draws the curves: one colour a metric, or a run where there are several; redrawn when a control or the theme changes.
// A group of weights, as in weight_norm/embed, has the same colour in each chart.
const page = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("controls");
const dark = matchMedia("(prefers-color-scheme: dark)");
const colours = ["forward", "recomputed", "axes0", "axes2", "axes3", "axes1", "axes4", "gradients", "gathered", "axes5"];
const dashes = ["solid", "dot", "dash", "longdash", "dashdot"];
const many = page.runs.length > 1;

// An exponential mean in which the first values count no more than they should.
function smoothed(values, weight) {
  let sum = 0, whole = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    whole = weight * whole + (1 - weight);
    return sum / whole;
  });
}

const groupOf = (name) => name.split("/")[1];
const groups = [...new Set(page.charts.flatMap((chart) => chart.series.map((each) => groupOf(each.name)).filter(Boolean)))];

function draw(chart, place) {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const weight = Number(form.smoothing.value), x = form.x.value;
  const names = [...new Set(chart.series.map((each) => each.name))];
  const traces = [];
  for (const each of chart.series) {
    const metric = groupOf(each.name) ? 1 + groups.indexOf(groupOf(each.name)) : names.indexOf(each.name);
    const line = {
      color: css(colours[(many ? each.run : metric) % colours.length]),
      dash: dashes[(many ? metric : Math.floor(metric / colours.length)) % dashes.length],
      width: !many && names.length > 1 && metric === 0 ? 4 : 1.8, // wide, so that a later one that lies on it does not hide it
    };
    const name = many ? (names.length > 1 ? `${page.runs[each.run]}: ${each.name}` : page.runs[each.run]) : each.name;
    const trace = { x: each[x], name, line, mode: each.value.length < 3 ? "lines+markers" : "lines", type: "scatter" };
    const smooth = weight > 0 && each.value.length > 2;
    if (smooth) traces.push({ ...trace, y: each.value, opacity: 0.28, showlegend: false, hoverinfo: "skip" });
    traces.push({ ...trace, y: smooth ? smoothed(each.value, weight) : each.value });
  }
  const axis = { gridcolor: css("rule"), zerolinecolor: css("rule"), linecolor: css("soft"), automargin: true };
  const formats = { B: "~s", share: ".1~%", "tokens/s": "~s", tokens: "~s" };
  const layout = {
    height: 290, margin: { l: 8, r: 8, t: 6, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("ink") },
    hovermode: "x unified", hoverlabel: { bgcolor: css("ground"), bordercolor: css("soft"), font: { color: css("ink") } },
    showlegend: chart.series.length > 1, legend: { orientation: "h", y: -0.2, yanchor: "top", x: 0, font: { size: 11 } },
    xaxis: { ...axis, title: { text: x === "step" ? "step" : "hours", standoff: 6, font: { size: 11 } } },
    yaxis: { ...axis, type: form.log.checked ? "log" : "linear", tickformat: formats[chart.unit], exponentformat: "power",
      rangemode: "nonnegative" },
    uirevision: form.log.checked + x,  // keeps what was zoomed to while the smoothing changes
  };
  Plotly.react(place, traces, layout, { responsive: true, displayModeBar: false });
}

const places = page.charts.map((chart) => {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), place = document.createElement("div");
  figure.className = "chart";
  caption.textContent = chart.unit ? `${chart.title} (${chart.unit})` : chart.title;
  figure.append(caption, place);
  document.getElementById("charts").append(figure);
  return place;
});
const draw_all = () => page.charts.forEach((chart, index) => draw(chart, places[index]));
form.addEventListener("input", draw_all);
form.addEventListener("submit", (event) => event.preventDefault());
dark.addEventListener("change", draw_all);
draw_all();
