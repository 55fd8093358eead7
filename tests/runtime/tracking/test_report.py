"""report.html, and tools.compare on run folders that are made by hand."""

import json
import math
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import zarr

from runtime.config.keys import FlatTokens, HuggingFaceDataset, Source
from runtime.data.sources import bytes_per_token
from runtime.terminal import RunError
from runtime.tracking import report
from runtime.tracking.metrics import flattened
from runtime.tracking.recorded import Recorded, read_run
from runtime.tracking.report import Report, environment, write_report
from runtime.tracking.report_page import POINTS, curves, report_page
from tools import compare


def write_run(folder, losses, *, config="training: {steps: 100, seed: 0}\nmodel: {d_model: 64}\n", **more):
    """A run folder as a run of so many steps leaves it, a line a step."""
    folder.mkdir()
    lines = [
        {
            "step": step,
            "time": 1.7e9 + 36 * step,
            "loss": loss,
            "tokens_per_s": 1000.0 + step,
            "mfu": None,
            "step_time_s": 0.5,
            **more,
        }
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({**environment(), "ledger": ["A step: 5 FLOPs <all>."]}))
    return folder


def data_of(page: str) -> dict:
    """What the page's JavaScript draws."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def test_the_page_holds_all_and_loads_nothing(tmp_path):
    """Curves as data, the ledger's summary, configuration, environment, links to the files that are there, samples; no
    address that a browser would fetch from but in plotly's own script."""
    folder = write_run(
        tmp_path / "first", [3.0, 2.5, 2.25], validation_loss=2.75, bits_per_byte=3.2, **{"grad_norm_of/embed": 0.5}
    )
    (folder / "step.svg").write_text("<svg/>")
    (folder / "samples.txt").write_text("To be, or <not>")
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert not (folder / "report.html.part").exists()
    charts = {chart["title"]: chart["series"] for chart in data_of(page)["charts"]}
    assert charts["Loss"] == [
        {"run": 0, "name": "loss", "step": [1, 2, 3], "hours": [0.0, 0.01, 0.02], "value": [3.0, 2.5, 2.25]},
        {"run": 0, "name": "validation_loss", "step": [1, 2, 3], "hours": [0.0, 0.01, 0.02], "value": [2.75] * 3},
    ]
    assert [each["name"] for each in charts["Gradient norm"]] == ["grad_norm_of/embed"]
    assert "Share of the devices' peak" not in charts  # mfu is null: nothing to draw
    for text in (
        "step 3 of 100",
        "A step: 5 FLOPs &lt;all&gt;.",
        "To be, or &lt;not&gt;",
        "training.steps",
        "jaxlib",
        "2.2500",
    ):
        assert text in page, text
    assert '<a href="step.svg">' in page and '<a href="ledger.html">' not in page
    scripts = re.findall(r"<script.*?>.*?</script>", page, re.DOTALL)
    assert len(max(scripts, key=len)) > 4e6  # plotly's
    outside = page
    for script in scripts:
        outside = outside.replace(script, "")
    assert not re.search(r'(src|href)="(https?:)?//|@import|url\(', outside)
    assert len(outside) < 30_000


def test_long_curves_are_thinned_and_what_is_not_finite_is_left_out():
    """Of 100,001 points at most POINTS, the last among them; NaN, infinities and null have none."""
    lines = [{"step": step, "time": float(step), "loss": 1 / step} for step in range(1, 100_002)]
    lines[0]["grad_norm"], lines[1]["grad_norm"], lines[2]["grad_norm"], lines[3]["grad_norm"] = (
        "NaN",
        "Infinity",
        None,
        1,
    )
    run = Recorded("long", None, lines, {}, {}, "")
    found = curves(run)
    assert POINTS / 2 < len(found["loss"]["step"]) <= POINTS and found["loss"]["step"][-1] == 100_001
    assert found["grad_norm"] == {"step": [4], "hours": [pytest.approx(3 / 3600, abs=1e-6)], "value": [1]}


def test_a_page_of_a_run_that_has_no_line_yet(tmp_path):
    """It says so and draws nothing; a line that is being written is left for the next page."""
    folder = write_run(tmp_path / "first", [])
    (folder / "metrics.jsonl").write_text('{"step": 1, "ti')
    page = report_page(read_run(folder))
    assert "step 0 of 100; as of the start" in page and data_of(page)["charts"] == []


def test_the_thread_writes_again_and_at_the_end(tmp_path, monkeypatch):
    """Every INTERVAL_S, and once more when the run ends; other hosts write nothing."""
    folder, written = write_run(tmp_path / "first", [3.0]), []
    again = threading.Event()

    def write(path):
        written.append(path)
        if len(written) == 3:
            again.set()

    monkeypatch.setattr(report, "write_report", write)
    monkeypatch.setattr(report, "INTERVAL_S", 0.001)
    with Report(folder, is_leader=True):
        assert again.wait(60)
        monkeypatch.setattr(report, "INTERVAL_S", 3600.0)
    count = len(written)
    assert count >= 4 and set(written) == {folder}
    with Report(folder, is_leader=False):
        pass
    assert len(written) == count


def test_a_page_that_takes_long_is_written_less_often(tmp_path, monkeypatch):
    """One that takes 0.05 s is not begun again before 5 s are over."""
    written, first = [], threading.Event()

    def write(path):
        written.append(path)
        threading.Event().wait(0.05)
        first.set()

    monkeypatch.setattr(report, "write_report", write)
    monkeypatch.setattr(report, "INTERVAL_S", 0.001)
    with Report(tmp_path, is_leader=True):
        assert first.wait(60)
        threading.Event().wait(0.3)
    assert len(written) == 2  # at the beginning and at the end


def test_a_page_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, capsys):
    """A disk that is full for a moment is said once, and the page is there afterwards."""
    folder, tries, again = write_run(tmp_path / "first", [3.0]), [], threading.Event()
    write = report.write_report

    def fail_at_first(path):
        tries.append(path)
        if len(tries) <= 3:
            raise OSError(28, "No space left on device")
        write(path)
        again.set()

    monkeypatch.setattr(report, "write_report", fail_at_first)
    monkeypatch.setattr(report, "INTERVAL_S", 0.001)
    with Report(folder, is_leader=True):
        assert again.wait(60)
    assert (folder / "report.html").exists()
    text = "[Errno 28] No space left on device. Training goes on, and it is tried again."
    assert capsys.readouterr().out == f"warning: {folder}/report.html is not written: {text}\n"


def test_the_last_page_is_tried_after_a_failure(tmp_path, monkeypatch):
    """A run that is shorter than INTERVAL_S from the failure on has its page at its end."""
    folder, failed = write_run(tmp_path / "first", [3.0]), threading.Event()
    write = report.write_report

    def fail(path):
        monkeypatch.setattr(report, "write_report", write)
        monkeypatch.setattr(report, "INTERVAL_S", 3600.0)
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_report", fail)
    monkeypatch.setattr(report, "INTERVAL_S", 0.001)
    with Report(folder, is_leader=True):
        assert failed.wait(60) and not (folder / "report.html").exists()
    assert (folder / "report.html").exists()


def test_a_page_whose_package_is_missing_is_given_up(tmp_path, monkeypatch, capsys):
    """One line with the fix, and no further try."""
    tries = []

    def fail(path):
        tries.append(path)
        raise ModuleNotFoundError("No module named 'plotly'")

    monkeypatch.setattr(report, "write_report", fail)
    monkeypatch.setattr(report, "INTERVAL_S", 0.001)
    with Report(tmp_path, is_leader=True) as page:
        page._thread.join(60)
    text = "No module named 'plotly' (pip install -r requirements-cpu.txt). Training goes on."
    assert len(tries) == 1 and capsys.readouterr().out == f"warning: {tmp_path}/report.html is not written: {text}\n"


def test_the_page_can_be_written_again(tmp_path, monkeypatch, capsys):
    """python -m tools.compare RUN writes its report and prints its row; a folder that is no run's is refused."""
    folder = write_run(tmp_path / "first", [3.0])
    monkeypatch.setattr(sys, "argv", ["compare", str(folder)])
    compare.main()
    assert (folder / "report.html").read_text() == report_page(read_run(folder))
    table, row, *_, page = capsys.readouterr().out.splitlines()
    assert table.startswith("run ") and row.startswith("first ") and page == f"Curves: {folder}/report.html"
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as stop:
        compare.main()
    assert stop.value.code == 2
    assert "none: No such file or directory: give a run folder, runs/NAME" in capsys.readouterr().err


def test_what_is_no_metrics_is_refused(tmp_path):
    """With the file and the line."""
    folder = write_run(tmp_path / "first", [3.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 1}\n')
    with pytest.raises(
        RunError, match=re.escape("metrics.jsonl, line 2: expected metrics of a step, but got '{\"loss\": 1}'")
    ):
        read_run(folder)


def test_by_key():
    """Nested sections become keys as on the command line; a list stays one value."""
    assert flattened({"a": {"b": 1, "c": {"d": None}}, "e": [{"f": 2}]}, separator=".") == {
        "a.b": 1,
        "a.c.d": None,
        "e": [{"f": 2}],
    }


BYTES = {"tokenizer": {"name": "bytes_utf8"}}
WRITTEN = {"tool": "tools/tokenize_text.py", "input_size": 4200}
BPE = {
    "tokenizer": {"name": "bpe_512"},
    "counts": {"tokens": 1000},
    "made_by": {**WRITTEN, "config": {"input": "*.txt", "validation": ""}},
}
LINES = {**BPE, "made_by": {**WRITTEN, "config": {"input": "*.jsonl", "validation": ""}}}
HUB = {**BPE, "made_by": {**WRITTEN, "config": {"input": "", "validation": ""}}}


@pytest.mark.parametrize(
    "attributes, expected",
    [
        ([BYTES], 1.0),
        ([BPE], 4.2),
        ([LINES], None),
        ([HUB], None),
        ([{}], None),
        ([BYTES, BPE], 1.8),
        ([BYTES, {}], None),
    ],
)
def test_bytes_per_token(tmp_path, attributes, expected):
    """One of bytes; what plain text gave; else not known; of a mixture, 3 to 1, the mean by weight if all are known."""
    for index, each in enumerate(attributes):
        zarr.open_group(tmp_path / str(index), mode="w", attributes=each)
    sources = [Source(filespec=str(tmp_path / str(index)), weight=3 - 2 * index) for index in range(len(attributes))]
    mixture = tuple(sources) if len(sources) > 1 else ()
    flat_tokens = FlatTokens(filespec=None if mixture else sources[0].filespec)
    config = SimpleNamespace(flat_tokens=flat_tokens, mixture=mixture, hf_dataset=HuggingFaceDataset())
    assert bytes_per_token(config) == pytest.approx(expected)


def test_bytes_per_token_of_a_stream():
    """By the tokenizer that the config names."""
    streams = [HuggingFaceDataset(path="x", tokenizer=name) for name in ("bytes_utf8", "gpt2")]
    assert [bytes_per_token(SimpleNamespace(hf_dataset=each)) for each in streams] == [1.0, None]


# ---- tools.compare


def run_compare(monkeypatch, capsys, *arguments) -> tuple[object, str]:
    """The exit status (or text) and what it printed."""
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    try:
        compare.main()
    except SystemExit as stop:
        return stop.code, capsys.readouterr().err
    return 0, capsys.readouterr().out


def test_compare_prints_a_table_and_the_differences_and_writes_a_page(tmp_path, monkeypatch, capsys):
    """Of two runs: steps, last losses, medians of speed; keys of the configuration that differ; curves of both."""
    first = write_run(tmp_path / "first", [3.0, 2.5, 2.25])
    other = "training: {steps: 100, seed: 1}\nmodel: {d_model: 64}\nnew: true\npaths: {model_name: second}\n"
    second = write_run(tmp_path / "second", [3.5, 2.75], config=other, validation_loss=2.0)
    status, output = run_compare(monkeypatch, capsys, first, second, "--output", tmp_path / "both.html")
    assert status == 0 and output.splitlines() == [
        "run     steps  loss    validation  step time  tokens/s  MFU",
        "first   3      2.2500  n/a         500 ms     1,002     n/a",
        "second  2      2.7500  2.0000      500 ms     1,002     n/a",
        "",
        "configuration  first  second",
        "new            –      true",
        "training.seed  0      1",
        f"Curves: {tmp_path}/both.html",
    ]
    data = data_of((tmp_path / "both.html").read_text())
    assert data["runs"] == ["first", "second"]
    assert [(each["run"], each["value"]) for each in data["charts"][0]["series"] if each["name"] == "loss"] == [
        (0, [3.0, 2.5, 2.25]),
        (1, [3.5, 2.75]),
    ]


def test_runs_of_the_same_name_are_told_apart(tmp_path, monkeypatch, capsys):
    """By their paths."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = [write_run(tmp_path / letter / "run", [3.0]) for letter in "ab"]
    _, output = run_compare(monkeypatch, capsys, *folders, "--output", tmp_path / "both.html")
    assert output.splitlines()[1].split()[0] == str(folders[0]) and "The configurations are equal." in output


def test_equal_runs(tmp_path, monkeypatch, capsys):
    """Bit for bit, but for what the machine decides; and a file of metrics in the place of a folder."""
    first = write_run(tmp_path / "first", [3.0, 0.1], host_peak_memory_bytes=1)
    second = write_run(tmp_path / "second", [3.0, 0.1], host_peak_memory_bytes=2, data_wait_s=7.0)
    arguments = (first, second / "metrics.jsonl", "--assert-equal")
    assert run_compare(monkeypatch, capsys, *arguments) == (
        0,
        "first and metrics.jsonl: 2 values of 2 steps are equal.\n",
    )


@pytest.mark.parametrize(
    "losses, arguments, text",
    [
        ([3.0, np.nextafter(0.1, 1)], [], "step 2, loss: 0.1 in first, 0.10000000000000002 in second, a relative difference of 1.4e-16; expected equality"),
        ([3.3, 0.1], ["--tolerance", "0.01"], "step 1, loss: 3.0 in first, 3.3 in second, a relative difference of 0.091; expected 0.01 at most"),
        ([3.0], [], "step 2, loss: 0.1 in first, 'nothing' in second; expected equality"),
        ([3.0, 0.1, 0.05], [], "step 3, loss: 'nothing' in first, 0.05 in second; expected equality"),
        ([3.0, "NaN"], ["--tolerance", "9"], "step 2, loss: 0.1 in first, 'NaN' in second; expected 9 at most"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(tmp_path, monkeypatch, capsys, losses, arguments, text):
    """Step, metric, both values, by how much, and what was expected; SystemExit with a text is status 1."""
    first, second = write_run(tmp_path / "first", [3.0, 0.1]), write_run(tmp_path / "second", losses)
    assert run_compare(monkeypatch, capsys, first, second, "--assert-equal", *arguments)[0] == text
    assert not (tmp_path / "compare.html").exists()


def test_runs_with_nothing_in_common_are_not_equal(tmp_path, monkeypatch, capsys):
    """Two empty files prove nothing."""
    folders = [write_run(tmp_path / name, []) for name in ("first", "second")]
    text = "first and second have no value in common to compare"
    assert run_compare(monkeypatch, capsys, *folders, "--assert-equal")[0] == text


def test_a_tolerance_is_kept_and_said(tmp_path, monkeypatch, capsys):
    """The largest relative difference is printed."""
    first, second = write_run(tmp_path / "first", [3.0, 1.0]), write_run(tmp_path / "second", [3.0, 1.001])
    arguments = (first, second, "--assert-equal", "--tolerance", "0.01")
    text = "first and second: 2 values of 2 steps are equal to a relative difference of 0.001.\n"
    assert run_compare(monkeypatch, capsys, *arguments) == (0, text)


def test_a_run_that_is_not_there(tmp_path):
    """Exit status 2, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.compare", tmp_path / "x", tmp_path / "y"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path}/x: No such file or directory: give a run folder, runs/NAME, or a file of metrics\n"
    )


def test_what_the_machine_decides():
    """Names of speed and memory; none that the training decides."""
    measured = (
        "time",
        "step_time_s",
        "data_wait_s",
        "device_s",
        "checkpoint_stall_s",
        "tokens_per_s",
        "mfu",
        "mfu_6nd",
    )
    assert all(map(compare.is_measured, (*measured, "host_peak_memory_bytes", "device_peak_memory_bytes")))
    decided = (
        "loss",
        "validation_loss",
        "skipped_steps",
        "tokens_per_source/a.zarr",
        "grad_norm_of/embed",
        "bits_per_byte",
    )
    assert not any(map(compare.is_measured, decided)) and math.isclose(compare._difference(1.0, 1.1), 0.1 / 1.1)
