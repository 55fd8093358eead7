"""metrics.jsonl and the progress line."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pty
import re
import resource
import struct
import sys
import termios
import time
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parts import says
from several_hosts import records

from runtime.files import flat
from runtime.run import InFlight, Run
from runtime.terminal import print_line
from runtime.tracking import metrics as tracking
from runtime.tracking.metrics import Tracker, memory


def open_tracker(folder, **changed) -> Tracker:
    settings = dict(
        start_step=0,
        total_steps=10,
        tokens_per_step=4096,
        flops_per_step={"mfu": 1e9, "hfu": 2e9},
        peak_flops_per_s=1e12,
        log_interval=4,
        is_leader=True,
    )
    return Tracker(folder, **{**settings, **changed})


def metrics_of(loss: float) -> dict[str, jax.Array]:
    return {
        "loss": jnp.float32(loss),
        "learning_rate": jnp.float32(1e-3),
        "grad_norm": jnp.float32(0.5),
        "skipped_steps": jnp.int32(0),
    }


def logged(folder, losses, start_step=0, **settings) -> list[dict]:
    """The lines of the file after steps with these losses."""
    with open_tracker(folder, start_step=start_step, **settings) as tracker:
        for step, loss in enumerate(losses, start_step + 1):
            tracker.log(step, metrics_of(loss))
    return records(folder)


class Clock:
    """Stands in for time.perf_counter; moved by the test."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(tracking.time, "perf_counter", lambda: self.now)


class DeviceScalar:
    """A scalar that is still being computed: reading it, or waiting for it, before it is ready is an error."""

    def __init__(self, value: float):
        self.value = value
        self.ready = False
        self.reads = 0

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        assert self.ready, "waited for a step that is still running"
        return self

    def __array__(self, dtype=None, copy=None):
        assert self.ready, "read a step that is still running"
        self.reads += 1
        return np.float32(self.value).__array__()


def test_lines_at_the_first_step_every_interval_and_the_last(tmp_path):
    """Ten steps with log_interval 4 log steps 1, 4, 8 and 10, each once, with all that was given and measured."""
    lines = logged(tmp_path, [step / 3 for step in range(1, 11)])
    assert [line["step"] for line in lines] == [1, 4, 8, 10]
    names = """step time loss learning_rate grad_norm skipped_steps perplexity bits_per_byte step_time_s device_s
        tokens_per_s mfu hfu step_cpu_s data_wait_s device_peak_memory_bytes host_peak_memory_bytes""".split()
    assert all(list(line) == names for line in lines)
    assert lines[1]["skipped_steps"] == 0 and isinstance(lines[1]["skipped_steps"], int)
    assert abs(lines[0]["time"] - time.time()) < 60


def test_a_step_is_read_only_when_the_next_is_dispatched(tmp_path):
    """`log` never waits for the step that it is given, and reads nothing of a step that is not due."""
    scalars = {step: DeviceScalar(step) for step in range(1, 11)}
    with open_tracker(tmp_path) as tracker:
        for step in range(1, 11):
            if step > 1:
                scalars[step - 1].ready = True  # the device runs one step behind
            tracker.log(step, {"loss": scalars[step]})
        scalars[10].ready = True
    assert [step for step, scalar in scalars.items() if scalar.reads] == [1, 4, 8, 10]


@pytest.mark.parametrize("peak", [1e12, None])
def test_rates_are_the_mean_since_the_line_before(tmp_path, monkeypatch, capsys, peak):
    """The first line has no timing, since it compiled; later lines have wall time over steps, tokens over time, and
    FLOPs over time and peak. A step of 2 s that waited 0.5 s for data has 1.5 s of the devices. Without a known peak
    the MFU is null in the file and n/a on the terminal."""
    clock = Clock(monkeypatch)
    with open_tracker(tmp_path, peak_flops_per_s=peak) as tracker:
        for step in range(1, 11):
            tracker.log(step, metrics_of(1), data_waited_s=0.5 * step)
            clock.now += 30 if step == 1 else 2
    first, *others = records(tmp_path)
    timings = ("step_time_s", "device_s", "tokens_per_s", "mfu")
    assert [first[name] for name in timings] == [None] * 4 and first["data_wait_s"] == 0.5
    for line in others:
        assert (line["step_time_s"], line["data_wait_s"], line["device_s"]) == (2, 0.5, 1.5)
        assert (line["tokens_per_s"], line["mfu"], line["hfu"]) == (2048, peak and 5e-4, peak and 1e-3)
    assert ("mfu < 0.1%" if peak else "mfu n/a") in capsys.readouterr().out


def test_pauses_do_not_count(tmp_path, monkeypatch):
    """Validation of 500 s between steps of 2 s leaves step_time_s at 2 s, but is in the time left."""
    clock = Clock(monkeypatch)
    with open_tracker(tmp_path, log_interval=2) as tracker:
        for step in range(1, 5):
            tracker.log(step, metrics_of(1))
            clock.now += 2
            if step == 2:
                with tracker.paused():
                    clock.now += 500
                    tracker.log_validation(step, jnp.float32(3.5), {"data/a": 3.0, "data/b": 5.0})
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 2, 4]
    names = {"step", "time", "validation_loss", "validation_perplexity", "validation_bits_per_byte"}
    names |= {"validation_loss_of/data/a", "validation_loss_of/data/b"}
    assert lines[2].keys() == names and lines[2]["validation_loss"] == 3.5
    assert lines[2]["validation_loss_of/data/b"] == 5.0
    assert lines[1]["step_time_s"] == lines[3]["step_time_s"] == 2


def test_a_pause_begins_when_the_steps_under_way_are_finished(tmp_path):
    """Their time would otherwise fall into the pause and make step_time_s too short."""

    loss = mock.Mock()
    with open_tracker(tmp_path) as tracker:
        tracker.log(2, {"loss": loss})
        with tracker.paused():
            loss.block_until_ready.assert_called_once()


def test_numbers_come_back_as_they_were(tmp_path):
    """A float32 comes back from the file as the same float32. NaN and the infinities are strings, so that every JSON
    reader takes the line and null keeps its meaning."""
    losses = np.random.default_rng(0).normal(size=10).astype(np.float32)
    logged(tmp_path, [*losses, np.nan, np.inf, -np.inf], log_interval=1, total_steps=13)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines]
    assert [np.float32(loss) for loss in found[:10]] == list(losses) and found[10:] == ["NaN", "Infinity", "-Infinity"]


def test_a_resumed_run_has_every_step_once(tmp_path, capsys, monkeypatch):
    """A run stopped after step 7 with a checkpoint at 4 drops the later steps' lines, validations and a half-written
    line, all or nothing. It names a damaged line and sets it aside; the other lines stay as they were."""
    with open_tracker(tmp_path, log_interval=1) as tracker:
        for step in range(1, 8):
            tracker.log(step, metrics_of(step))
            if step in (4, 6):
                tracker.log_validation(step, 9.0)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(before := b"\n".join([*lines[:2], b"not json", *lines[2:]]) + b'{"step": 8, "lo')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
        open_tracker(tmp_path, start_step=4)
    assert path.read_bytes() == before
    (tmp_path / "metrics.damaged.jsonl").unlink()
    capsys.readouterr()
    later = logged(tmp_path, range(50, 110, 10), start_step=4, log_interval=1)[5:]
    assert [(line["step"], line["loss"]) for line in later] == [(step, 10 * step) for step in range(5, 11)]
    assert path.read_bytes().splitlines()[:5] == lines[:5]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == b"not json\n"
    parts = f"warning: {path}, line 3: … `step` and `time` … got 'not json' … {tmp_path}/metrics.damaged.jsonl"
    assert says(parts, capsys.readouterr().out)


def test_times_only_increase(tmp_path, monkeypatch):
    """A run that goes on where the clock is an hour behind writes later times: what follows the file goes by them."""
    before = logged(tmp_path, range(1, 8), log_interval=1)[-1]["time"]
    behind = time.time() - 3600
    monkeypatch.setattr(tracking.time, "time", lambda: behind)
    times = [line["time"] for line in logged(tmp_path, range(5, 11), start_step=4, log_interval=1)]
    assert times == sorted(set(times)) and before < times[4] < before + 1


def test_a_step_that_was_seen_late_does_not_make_the_next_one_fast(tmp_path, monkeypatch):
    """The host is held up for 7 s while steps 5 and 6 of 2 s finish, and again while 7 runs. Their times are means
    since step 4, and none is said to have taken no time."""
    clock, ends = Clock(monkeypatch), [0.0]

    class Device(DeviceScalar):
        """Runs for 2 s from its dispatch on, after the step before; waiting moves the clock to its end."""

        def __init__(self, value):
            super().__init__(value)
            ends.append(max(ends[-1], clock.now) + 2)
            self.end = ends[-1]

        def is_ready(self):
            return clock.now >= self.end

        def __array__(self, dtype=None, copy=None):
            clock.now, self.ready = max(clock.now, self.end), True
            return super().__array__()

    with open_tracker(tmp_path, log_interval=1) as tracker:
        for step in range(1, 11):
            scalar = Device(step)
            clock.now += {6: 7, 7: 1.8}.get(step, 0.01)
            tracker.log(step, {"loss": scalar})
    times = [line["step_time_s"] for line in records(tmp_path)]
    assert times[1:4] == pytest.approx([2, 2, 2], abs=0.02) and times[7:] == pytest.approx([2, 2, 2], abs=0.02)
    assert times[4:7] == pytest.approx([7, 8.8 / 2, 9 / 3], abs=0.02)  # of steps 5, 5 and 6, and 5 to 7


def test_a_profile_that_ends_takes_no_time_from_the_step_before(monkeypatch):
    """The loop reads a step's time before the profiler waits for the next one."""
    called = []
    run = object.__new__(Run)
    parts = {"_tracker": "log", "_profiler": "after_step", "_bad_steps": "note"}
    for name, method in parts.items():
        setattr(run, name, SimpleNamespace(**{method: lambda *_, name=name: called.append(name)}))
    run.data = SimpleNamespace(waited_s=0.0, metrics=lambda step: {})
    run._config, run._total = SimpleNamespace(log_interval=7), 10
    run._in_flight, run._signals = InFlight(), SimpleNamespace(stop=lambda: False)
    run.log(1, SimpleNamespace(weights=()), {"loss": jnp.float32(1), "skipped_steps": 0})
    assert called == ["_tracker", "_profiler", "_bad_steps"]


def test_nested_metrics_have_flat_names():
    """Mappings and dataclasses are flattened at any depth, in order; keys of a configuration too, where a list is a
    value."""
    by_key = {"a.b": 1, "a.c.d": None, "e": [{"f": 2}]}
    assert flat({"a": {"b": 1, "c": {"d": None}}, "e": [{"f": 2}]}) == by_key
    nested = {"loss": 1.0, "b": dataclasses.make_dataclass("Metrics", ["loss", "norm"])(2.0, {"w_q": 4.0}), "a": 5}
    assert list(flat(nested, separator="/").items()) == [("loss", 1.0), ("b/loss", 2.0), ("b/norm/w_q", 4.0), ("a", 5)]


def test_perplexity_and_bits_per_byte(tmp_path):
    """A loss of 3 nats a token of 4 bytes gives e³, and 3 / 4 / ln 2; validation likewise. An overflow is Infinity, NaN
    stays NaN."""
    with open_tracker(tmp_path, log_interval=1, bytes_per_token=4.0) as tracker:
        for step, loss in enumerate((3.0, 1e30, float("nan")), 1):
            tracker.log(step, metrics_of(loss))
        tracker.log_validation(3, 3.0)
    first, second, third, validation = records(tmp_path)
    assert first["perplexity"] == validation["validation_perplexity"] == math.exp(3)
    assert first["bits_per_byte"] == validation["validation_bits_per_byte"] == 3 / 4 / math.log(2)
    assert (second["perplexity"], third["perplexity"], third["bits_per_byte"]) == ("Infinity", "NaN", "NaN")


def test_memory():
    """The process's is that of its working set; a CPU's devices say nothing, others their most since the start."""

    class Device:
        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return self.peak and {"peak_bytes_in_use": self.peak}

    values = memory()
    assert 1e8 < values["host_peak_memory_bytes"] < 1e12 and values["device_peak_memory_bytes"] is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking.jax, "local_devices", lambda: [Device(5), Device(7), Device(None)])
        assert memory()["device_peak_memory_bytes"] == 7


def test_a_full_disk_stops_nothing(tmp_path, capsys):
    """It is said once; what could not be written is written later, in order; others are told of each line at once."""
    said = []
    with open_tracker(tmp_path, log_interval=1, on_line=lambda: said.append(None)) as tracker:
        tracker.log(1, metrics_of(1))
        tracker.flush()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 100, before[1]))
        try:
            for step in (2, 3, 4):
                tracker.log(step, metrics_of(step))
            tracker.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(said) == 4 and (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
        tracker.log(5, metrics_of(5))
    assert [line["loss"] for line in records(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(said) == 5
    output = capsys.readouterr().out
    assert output.count("cannot be written (File too large). ") == 1


def test_other_processes_do_nothing(tmp_path, capsys):
    """They write no file, print nothing and never wait."""
    with open_tracker(tmp_path / "run", is_leader=False) as tracker:
        for step in range(1, 11):
            tracker.log(step, {"loss": DeviceScalar(step)})
            with tracker.paused():
                tracker.log_validation(step, DeviceScalar(step))
                tracker.log_scores(step, {"score/exam": 0.5})
                tracker.log_checkpoint(step, 0.5)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


def test_an_error_in_a_step_is_not_hidden(tmp_path):
    """Leaving by an exception reads nothing more: the failed step's numbers would raise a second one."""
    with pytest.raises(ZeroDivisionError), open_tracker(tmp_path) as tracker:
        tracker.log(1, {"loss": DeviceScalar(1)})
        raise ZeroDivisionError
    assert records(tmp_path) == []


def log_six_steps(folder) -> None:
    """A run of six steps that logs every second one, validates after step 4 and says a line of its own."""
    with open_tracker(folder, total_steps=6, log_interval=2, peak_flops_per_s=None) as tracker:
        for step in range(1, 7):
            tracker.log(step, metrics_of(7.25))
            if step == 4:
                with tracker.paused():
                    tracker.log_validation(step, 3.5)
                print_line("a line from elsewhere")


RATE = r"loss 7\.2500, [\d,]+ tokens/s, mfu n/a, 00:00 left"


def test_in_a_file_the_progress_is_plain_lines(tmp_path, capsys):
    """A line each logged step, no carriage returns, no control characters."""
    log_six_steps(tmp_path)
    expected = [
        r"step 1/6: loss 7\.2500 \(first step, not timed\)", *(f"step {step}/6: {RATE}" for step in (2, 4)),
        r"step 4/6: validation loss 3\.5000", r"a line from elsewhere", f"step 6/6: {RATE}",
    ]  # fmt: skip
    printed = capsys.readouterr()
    assert re.fullmatch("\n".join(expected) + "\n", printed.out) and not printed.err, printed


def test_on_a_terminal_the_progress_is_one_line(tmp_path, monkeypatch):
    """A bar that is drawn over itself; other lines stand above it, whole; 100 columns wide, 100 are never passed."""
    monkeypatch.setenv("COLUMNS", "100")
    main, worker = pty.openpty()
    fcntl.ioctl(worker, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    os.set_blocking(main, False)
    output = b""
    with open(worker, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        log_six_steps(tmp_path)
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(main, 65536):
                output += piece
    os.close(main)
    # What a terminal would show: within a line, what follows a carriage return is written over what stood there.
    shown = []
    for line in output.decode().replace("\x1b[A", "").split("\n"):
        cells = []
        for piece in line.rstrip("\r").split("\r"):
            cells[: len(piece)] = piece
        shown.append("".join(cells).rstrip())
    assert shown[:2] == ["step 4/6: validation loss 3.5000", "a line from elsewhere"] and shown[3:] == [""]
    assert re.fullmatch(rf"step 6/6 \|█+\| {RATE}", shown[2]) and all(len(line) <= 100 for line in shown), shown
