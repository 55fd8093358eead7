"""report.html, and tools.compare on run folders that are made by hand."""

import html
import html.parser
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from browser import browser
from parts import says

from ledger.count.step import FORMAT
from ledger.pages.table import Table
from runtime.config.keys import FlatTokens, HuggingFaceDataset, Source
from runtime.data.sources import bytes_per_token
from runtime.tracking.curves import POINTS, charts, curves
from runtime.tracking.recorded import Recorded, read_run
from runtime.tracking.report import compare_page, environment, report_page, write_report
from tools import compare


def write_run(folder, losses, *, config="training: {steps: 100, seed: 0}\nmodel: {d_model: 64}\n", **more):
    """A run folder as a run of so many steps leaves it, a line a step."""
    folder.mkdir()
    timings = {"tokens_per_s": 1001.0, "mfu": None, "step_time_s": 0.5}
    lines = [
        {"step": step, "time": 1.7e9 + 36 * step, "loss": loss, **timings, **more}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({**environment(), "ledger": ["A step: 5 FLOPs <all>."]}))
    return folder


def figure_of(chart) -> tuple[list[dict], dict]:
    """The traces and the layout that plotly's JavaScript is given."""
    decoder, (_, rest) = json.JSONDecoder(), chart.html.split("Plotly.newPlot(", 1)
    traces, end = decoder.raw_decode(rest, rest.index("["))
    layout, _ = decoder.raw_decode(rest, rest.index("{", end))
    return traces, layout


def charts_of(*runs) -> dict:
    return {f"{chart.family} {chart.title}".strip(): chart for chart in charts(list(runs))}


def recorded(name="run", steps=3, **metrics) -> Recorded:
    """A run with these metrics in each of its lines."""
    return Recorded(
        name, None, [{"step": step, "time": 36.0 * step, **metrics} for step in range(1, steps + 1)], {}, {}, ""
    )


# ---- the page


class Outside(html.parser.HTMLParser):
    """Tags, and what stands outside of scripts and styles."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self._skips = [], "", False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._skips = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._skips = False

    def handle_data(self, data):
        self.text += "" if self._skips else data


def test_the_page_holds_all_and_loads_nothing(tmp_path):
    """The page has curves, the ledger's summary, configuration, environment, links to existing files and samples.
    plotly's script is inside, and no tag has an address that a browser would fetch from."""
    folder = write_run(tmp_path / "first", [3.0, 2.5, 2.25], validation_loss=2.75, bits_per_byte=3.2)
    (folder / "step.svg").write_text("<svg/>")
    (folder / "samples.txt").write_text("To be, or <not>")
    page = write_report(folder).read_text()
    outside = Outside(page)
    for text in ("step 3 of 100", "A step: 5 FLOPs <all>.", "To be, or <not>", "training.steps", "jaxlib", "2.2500"):
        assert text in outside.text, text
    links = [attributes["href"] for tag, attributes in outside.tags if tag == "a" and attributes["href"][0] != "#"]
    assert links == ["step.svg", "metrics.jsonl", "config.yaml"]
    assert not {tag for tag, _ in outside.tags} & {"link", "img", "iframe", "object", "embed", "base"}
    assert not any("src" in attributes for _, attributes in outside.tags)
    scripts = re.findall(r"<script.*?</script>", page, re.DOTALL)
    own = "".join(script for script in scripts if len(script) < 1e6)
    assert len(max(scripts, key=len)) > 4e6 and not re.search(r"https?:|fetch|import\(", own)  # plotly's, and ours
    styles = "".join(re.findall(r"<style>.*?</style>", page, re.DOTALL))
    assert "prefers-color-scheme: dark" in styles and not re.search(r"@import|url\(", styles)
    (folder / "metrics.jsonl").write_text('{"step": 1, "ti')  # no line yet: one is being written
    page = report_page(read_run(folder))
    assert "step 0 of 100; as of the start" in page and "newPlot(" not in page.split("<main>")[1]


def test_what_others_wrote_is_text(tmp_path):
    """Tags in the names and values of metrics.jsonl, in the configuration, the environment and the folder's name."""
    attack = "</script><img src=x onerror=alert(1)>"
    folder = write_run(tmp_path / "<b>", ["NaN", 2.0], **{attack: 1.5, "grad_norm_of/" + attack: 2.0, "notes": attack})
    (folder / "config.yaml").write_text(json.dumps({attack: attack}))
    (folder / "environment.json").write_text(json.dumps({"host": attack, "ledger": [attack]}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(attack + "\n")
    for page in (
        report_page(read_run(folder)),
        compare_page([read_run(folder)] * 2, *[Table(attack, {attack: ""}, [[attack]])] * 2, {attack: [attack]}),
    ):
        assert "<img" not in page.split("<main>")[1] and page.count("</script>") == page.count("<script")


def test_the_page_in_a_browser(tmp_path, run_compare):
    """A column is sorted both ways, with what is no number last. Charts have the width of their frames, though a scroll
    bar, which comes after the first ones, leaves two columns of them instead of three."""
    runs = [write_run(tmp_path / f"run{n}", [loss], weight_norm=1.0) for n, loss in enumerate([3.0, "NaN", None, 1, 5])]
    run_compare(*runs, f"output={tmp_path}/runs.html")
    with browser(tmp_path / "profile") as chromium:
        chromium.look(1400, 900, "dark")
        chromium.open(f"file://{tmp_path}/runs.html")
        width = "[it, it.querySelector('svg')].map((each) => each.getBoundingClientRect().width)"
        widths = np.array(chromium.script(f"return [...document.querySelectorAll('.chart')].map((it) => {width})"))
        for order in ("5.0000 3.0000 1.0000 nan n/a", "1.0000 3.0000 5.0000 nan n/a"):
            chromium.script("document.querySelectorAll('#numbers th button')[2].click()")
            cells = "[...document.querySelectorAll('#numbers td:nth-child(3)')].map((it) => it.textContent)"
            assert chromium.script(f"return {cells}") == order.split()
    assert len(widths) > 2 and (widths[:, 0] > 600).all() and np.ptp(widths[:, 0] - widths[:, 1]) < 1, widths


# ---- curves


def test_a_chart_has_what_belongs_together():
    """A chart shows values over steps, or over hours at a button; null has no curve, and a metric that no chart is made
    for has its own, as has each score: an accuracy would be flat below a perplexity."""
    found = charts_of(recorded(loss=3.0, validation_loss=2.5, mfu=None, skipped_steps=0, other=1.0))
    assert list(found) == ["Loss", "other"] and found["Loss"].unit == "nats a token"
    assert "Steps skipped" in charts_of(recorded(skipped_steps=2))  # a chart of zeros says nothing
    assert list(charts_of(recorded(step_cpu_s=1.0))) == ["Processor time of a step"]
    scores = {"score/exam.jsonl/acc": 0.5, "score/play.txt/perplexity": 400.0}
    assert list(charts_of(recorded(**scores))) == [f"Scores of tasks {name[6:]}" for name in scores]
    traces, layout = figure_of(found["Loss"])
    assert [(trace["name"], trace["x"], trace["y"]) for trace in traces] == [
        ("loss", [1, 2, 3], [3.0] * 3),
        ("validation_loss", [1, 2, 3], [2.5] * 3),
    ]
    log, hours = layout["updatemenus"][0]["buttons"]
    assert log["args"] == [{"yaxis.type": "log"}] and log["args2"] == [{"yaxis.type": "linear"}]
    assert hours["args"][0] == {"x": [[0.0, 0.01, 0.02]] * 2} and hours["args2"][0] == {"x": [[1, 2, 3]] * 2}
    assert layout["hoverlabel"]["namelength"] == -1  # tooltips have whole names


def test_only_noisy_curves_have_a_mean():
    """A long run's loss is pale below its mean, which does not lag; the learning rate is drawn as it was."""
    lines = [{"step": s, "time": float(s), "loss": 1000.0 - s, "learning_rate": s / 1000} for s in range(1, 501)]
    found = charts_of(Recorded("long", None, lines, {}, {}, ""))
    (rate,), _ = figure_of(found["Learning rate"])
    assert rate["y"] == [s / 1000 for s in range(1, 501)]
    (pale, mean), _ = figure_of(found["Loss"])
    assert pale["opacity"] < 0.5 and pale["y"] == [1000.0 - s for s in range(1, 501)]
    assert mean["y"][20:-20] == pytest.approx(pale["y"][20:-20], rel=1e-4)


@pytest.mark.parametrize("weights", [1, 2, 12, 60])
def test_norms_of_any_number_of_weights_can_be_told_apart(weights):
    """No two lines of a chart have the same colour and dashes; the drawing keeps its size below a legend of any length,
    which stands under the axis' title."""
    run = recorded(**{f"grad_norm_of/layers/weight_{number}": 1.0 + number for number in range(weights)})
    (chart,) = charts([run])
    traces, layout = figure_of(chart)
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in traces}) == weights
    assert traces[-1]["name"] == f"layers/weight_{weights - 1}"
    drawn = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
    assert drawn == 220 and not layout["margin"]["autoexpand"]
    rows = layout["margin"]["b"] + layout["legend"]["y"] * drawn
    assert rows >= 19 * weights if weights > 1 else not layout["showlegend"]


def test_of_several_runs_each_weight_has_a_chart():
    """A line is a run, in the same colour in each chart; loss and validation differ in their dashes."""
    norms = {f"grad_norm_of/weight_{number}": 1.0 for number in range(12)}
    runs = [recorded(f"run {number}", loss=3.0, validation_loss=2.0, **norms) for number in range(12)]
    found = charts_of(*runs)
    assert list(found) == ["Loss", *(f"Gradient norm of each weight weight_{number}" for number in range(12))]
    first, second = (figure_of(found[f"Gradient norm of each weight weight_{number}"])[0] for number in (0, 11))
    assert [trace["name"] for trace in first] == [f"run {number}" for number in range(12)]
    assert [trace["line"] for trace in first] == [trace["line"] for trace in second]
    for traces in (first, figure_of(found["Loss"])[0]):
        assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in traces}) == len(traces)


def test_long_curves_are_thinned_and_what_is_not_finite_is_left_out():
    """A curve of 100,001 points keeps at most POINTS, the last among them; NaN, infinities and null have no point."""
    lines = [{"step": step, "time": float(step), "loss": 1 / step} for step in range(1, 100_002)]
    for line, value in zip(lines, ("NaN", "Infinity", None, 1)):
        line["grad_norm"] = value
    found = curves(Recorded("long", None, lines, {}, {}, ""))
    assert POINTS / 2 < len(found["loss"].step) <= POINTS and found["loss"].step[-1] == 100_001
    norm = found["grad_norm"]
    assert (norm.step, norm.hours, norm.value) == ([4], [pytest.approx(3 / 3600, abs=1e-6)], [1])


# ---- what a run left


@pytest.mark.parametrize("bad", [
    b"not json", b'{"loss": 1}', b'{"step": "two", "time": 1}', b"[]", b"\xff", b"[" * 100_000,
    b'{"step": 1, "time": Infinity}', b'{"step": 1, "time": 1, "x": 1' + b"0" * 400 + b"}",
])  # fmt: skip
def test_a_damaged_line_is_left_out_and_named(tmp_path, bad, run_compare):
    """The report and tools.compare name it; a run with a damaged line is not said to be equal."""
    folder = write_run(tmp_path / "first", [3.0, 2.0])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(bad + b"\n")
    run = read_run(folder)
    text = f"{folder}/metrics.jsonl, line 3: expected a JSON object with `step` and `time`"
    assert len(run.lines) == 2 and run.damaged[0].startswith(text)
    assert "Damaged lines are left out: " in report_page(run)
    status, output = run_compare(folder, folder, "assert_equal=true")
    assert status == 1 and f"error: {text}" in output


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
@pytest.mark.parametrize("text", ["{a: [", "[1]", "\x00"])
def test_a_damaged_file_beside_the_metrics_is_one_line(tmp_path, name, text, run_compare):
    """The message says what to do."""
    folder = write_run(tmp_path / "first", [3.0])
    (folder / name).write_text(text)
    status, said = run_compare(folder)
    assert status == 1 and said.startswith(f"error: {folder}/{name} is damaged") and "remove it\n" in said


BYTES = {"tokenizer": {"name": "bytes_utf8"}}


def bpe(*inputs) -> dict:
    """The attributes of a data set of 1,000 tokens that tools.tokenize_text made of these inputs."""
    made_by = {"input_size": 4200, "config": dict(zip(("input", "validation"), inputs))}
    return {"tokenizer": {"name": "bpe_512"}, "counts": {"tokens": 1000}, "made_by": made_by}


@pytest.mark.parametrize("attributes, expected", [
    ([BYTES], 1.0), ([bpe("*.txt", "")], 4.2), ([bpe("*.jsonl", "")], None), ([bpe("", "")], None), ([{}], None),
    ([BYTES, bpe("*.txt", "")], 1.8), ([BYTES, {}], None), (["bytes_utf8"], 1.0), (["gpt2"], None),
    ([bpe("*.txt", ""), "bytes_utf8"], 3.4), ([BYTES, "gpt2"], None),
])  # fmt: skip
def test_bytes_per_token(tmp_path, attributes, expected):
    """A token of bytes is one byte; plain text says its average, other data nothing. A mixture, 3 to 1, has the mean by
    weight if all are known; a stream, the last here, goes by the config's tokenizer."""
    stream, paths = HuggingFaceDataset(), [str(tmp_path / str(index)) for index in range(len(attributes))]
    for path, entry in zip(paths, attributes):
        if isinstance(entry, str):
            stream = HuggingFaceDataset(path=path, tokenizer=entry)
        else:
            zarr.open_group(path, mode="w", attributes=entry)
    sources = [Source(filespec=path, weight=3 - 2 * index) for index, path in enumerate(paths)]
    mixture = tuple(sources) if len(sources) > 1 else ()
    flat_tokens = FlatTokens(filespec=None if mixture or stream.path else paths[0])
    config = SimpleNamespace(flat_tokens=flat_tokens, mixture=mixture, hf_dataset=stream)
    assert bytes_per_token(config) == pytest.approx(expected)


# ---- tools.compare


@pytest.fixture
def run_compare(called):
    """Its exit status and what it prints, of an error on standard error."""

    def call(*arguments):
        status, out, error = called(compare.main, compare.Compare, *arguments)
        return status, error if status else out

    return call


def test_compare_prints_a_table_and_the_differences_and_writes_a_page(tmp_path, run_compare):
    """One run gives its row and a new report. Several give steps, last losses, median speeds, the keys that differ, and
    a page of curves; programs that differ have a row, a diff command and their lines on the page."""
    first = write_run(tmp_path / "first", [3.0, 2.5, 2.25])
    _, table, row, page = run_compare(first)[1].splitlines()
    assert "step 3 of 100" in (first / "report.html").read_text()
    assert table.startswith("  run ") and row.startswith("  first ") and page == f"Curves: {first}/report.html"
    other = "training: {steps: 100, seed: 1}\nmodel: {d_model: 64}\nnew: true\npaths: {model_name: second}\n"
    second = write_run(tmp_path / "second", [3.5, 2.75], config=other, validation_loss=2.0)
    status, output = run_compare(first, second, f"output={tmp_path}/both.html")
    assert status == 0 and output.splitlines() == [
        "At the end", "  run     steps    loss  validation  step time  tokens/s  MFU",
        "  first       3  2.2500         n/a     500 ms     1,001  n/a",
        "  second      2  2.7500      2.0000     500 ms     1,001  n/a", "", "Configuration that differs",
        "  key            first  second", "  new            –      true", "  training.seed  0      1",
        f"Curves: {tmp_path}/both.html",
    ]  # fmt: skip
    lost = write_run(tmp_path / "lost", [3.0, "NaN"], validation_loss="Infinity")
    assert re.search(r"\n  lost +2 +nan +inf ", run_compare(first, lost, f"output={tmp_path}/lost.html")[1])
    assert re.search(r"Validation loss\s*inf\s", Outside(report_page(read_run(lost))).text)
    assert says(f"output: the page of one run is {first}/report.html: leave", run_compare(first, "output=page.html")[1])
    for alone in ([first, "assert_equal=true"], [first / "ledger.json"]):
        assert says(f"{alone[0]} alone is given: expected another one", run_compare(*alone)[1])
    text = Outside((tmp_path / "both.html").read_text()).text
    assert "2 runs" in text and "training.seed" in text and "2.7500" in text
    (tmp_path / "other").mkdir()  # names that are the same are told apart by their paths
    folders = [first, second, write_run(tmp_path / "other" / "first", [3.0])]
    for folder, program in zip(folders, ("rate = 1\nsame = 2\n", "rate = 3\nsame = 2\n", "rate = 1\nsame = 2\n")):
        (folder / "program.py").write_text(program)
        about = {"program/files/train": "0123", "program/files/models.t5": "abcd" if "1" in program else "ef01"}
        (folder / "environment.json").write_text(json.dumps(about))
    _, output = run_compare(*folders, f"output={tmp_path}/all.html")
    assert f"\n  {first} " in output and "configurations are equal" not in output
    (line,) = (line.split() for line in output.splitlines() if line.startswith("  program.py "))
    assert "\n  program/files/models.t5  abcd  ef01  abcd\n" in re.sub("  +", "  ", output)
    assert "files/train" not in output and "program/files" not in report_page(read_run(first))
    assert line[1] == line[3] != line[2] and f"diff -u {first}/program.py {second}/program.py" in output
    page = (tmp_path / "all.html").read_text()
    assert "-rate = 1\n+rate = 3\n same = 2" in page and page.count("<h2>program.py") == 1


def test_steps_that_cost_something_else(tmp_path, run_compare):
    """The command prints the sums of the runs' ledgers, and the page has the lines of the source."""
    folders = [write_run(tmp_path / name, [3.0]) for name in ("first", "second")]
    nothing = {"collectives": [], "saved": [], "loops": [], "mesh": {}, "source": "a.py", "sent_bytes_per_device": {}}
    for folder, flops in zip(folders, (100, 300)):
        products = [{"line": "a.py:1", "phase": "forward", "flops": flops, "times": 1}]
        sums = {"model_flops": flops, "hardware_flops": flops, "memory": {"bytes": 1, "by_kind": {}}}
        ledger = {**nothing, **sums, "format": FORMAT, "texts": {"a.py": ["y = x @ w"]}, "products": products}
        (folder / "ledger.json").write_text(json.dumps(ledger))
    _, output = run_compare(*folders, f"output={tmp_path}/both.html")
    assert "    model FLOPs: 100 -> 300\n" in output and "y = x @ w" not in output
    page = html.unescape((tmp_path / "both.html").read_text())
    assert "a.py:1  y = x @ w\n    FLOPs, forward: 100 -> 300" in page


@pytest.mark.parametrize("losses, tolerance, text", [
    ([3.0, np.nextafter(0.1, 1)], 0, "step 2, loss: 0.1 in first, 0.10000000000000002 in … 1.4e-16; expected equality"),
    ([3.3, 0.1], 0.01, "step 1, loss: 3.0 in first, 3.3 in second … 0.091; expected 0.01 at most"),
    ([3.0], 0, "step 2, loss: 0.1 in first, 'nothing' in second; expected equality"),
    ([3.0, 0.1, 0.05], 0, "step 3, loss: 'nothing' in first, 0.05 in second; expected equality"),
    ([3.0, "NaN"], 9, "step 2, loss: 0.1 in first, 'NaN' in second; expected 9 at most"),
    ([], 0, "first and second have no value in common"),  # two empty files prove nothing
])  # fmt: skip
def test_the_first_difference_is_named(tmp_path, losses, tolerance, text, run_compare):
    """Step, metric, both values, by how much, and what was expected (status 1)."""
    first = write_run(tmp_path / "first", [3.0, 0.1] if losses else [])
    second = write_run(tmp_path / "second", losses)
    status, said = run_compare(first, second, "assert_equal=true", f"tolerance={tolerance}")
    assert status == 1 and says(f"error: {text}", said) and said.count("\n") == 1
    assert not (tmp_path / "compare.html").exists()


def test_equal_runs(tmp_path, run_compare):
    """Equal means bit for bit, except speed and memory, which the machine decides; a file of metrics may stand for a
    folder; within a tolerance the largest difference is said."""
    measured = """time step_time_s data_wait_s device_s checkpoint_stall_s tokens_per_s mfu mfu_6nd
        host_peak_memory_bytes device_peak_memory_bytes""".split()
    decided = dict.fromkeys(["validation_loss", "skipped_steps", "tokens_per_source/data_s", "grad_norm_of/embed"], 1)
    first, second = (
        write_run(tmp_path / name, [3.0, 0.1], **decided, **dict.fromkeys(measured, value))
        for name, value in (("first", 1), ("second", 2))
    )
    said = "first and metrics.jsonl: 10 values of 2 steps are equal.\n"
    assert run_compare(first, second / "metrics.jsonl", "assert_equal=true") == (0, said)
    near = write_run(tmp_path / "near", [3.0, 0.1001], **decided)
    said = "first and near: 10 values of 2 steps are equal to a relative difference of 0.001.\n"
    assert run_compare(first, near, "assert_equal=true", "tolerance=0.01") == (0, said)


def test_a_run_that_is_not_there(tmp_path, run_compare):
    """Status 1 and one line."""
    status, said = run_compare(tmp_path / "x", tmp_path / "y")
    text = f"error: {tmp_path}/x: No such file or directory: give a run folder"
    assert status == 1 and text in said and said.count("\n") == 1
