"""Reports a run while it goes: `metrics.jsonl` in the run folder and one line on the terminal.

A step's numbers are read when the next step is already dispatched, so reading them leaves no device idle.
"""

import collections
import contextlib
import dataclasses
import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from ledger.units import percent
from runtime.files import MOST_BYTES, flat, read_bytes, write_whole
from runtime.terminal import Progress, keep_messages, print_line, wrapped
from runtime.tracking.recorded import damage, record_of


def scalars(metrics: Mapping[str, jax.Array], names: Sequence[str]) -> dict[str, Any]:
    """Each number of a step's metrics, read from the device. names: the elements of vectors like 'grad_norm_of', as in
    'grad_norm_of/embed'; elements of other vectors have numbers, 'load/0'."""
    fetched = jax.device_get(dict(metrics))  # all copies at once; its keys come out sorted
    values: dict[str, Any] = {}
    for name in metrics:
        array = np.asarray(fetched[name])
        elements = names if name.endswith("_of") else range(array.size)
        keys = [f"{name}/{element}" for element in elements] if array.ndim else [name]
        values |= dict(zip(keys, array.reshape(-1).tolist(), strict=True))
    return values


@dataclasses.dataclass
class Tracker:
    """Writes a line of metrics every `log_interval` steps, and at the first and the last.

        with Tracker(run_folder, start_step=0, total_steps=50, ...) as tracker:
            for step in range(1, 51):
                state, metrics = training_step(state, batch)
                tracker.log(step, metrics)
                if step % eval_interval == 0:
                    with tracker.paused():
                        tracker.log_validation(step, validation_loss(state))

    docs/runs.md says what each number is. Floats have all their digits, so losses can be compared bit for bit; "NaN",
    "Infinity" and "-Infinity" are strings, since JSON has no such numbers. Timings are means a step since the previous
    line; a process's first line has none, since its step is mostly compilation.

    Nothing about the file stops a run: damaged lines are named and set aside, and lines wait while a disk is full.
    """

    run_folder: str | Path  # where `metrics.jsonl` is appended to; created if missing
    _: dataclasses.KW_ONLY
    start_step: int  # finished updates at the start; lines of later steps, which an interrupted run left, are dropped
    total_steps: int  # the last step's number
    tokens_per_step: int  # in the global batch
    flops_per_step: Mapping[str, float]  # for the global batch, by the logged name of their share of the peak
    peak_flops_per_s: float | None  # all devices together; None if unknown
    log_interval: int  # steps from line to line
    is_leader: bool  # whether this process reads, writes and prints; the others do nothing here
    bytes_per_token: float | None = None  # bytes of text per token, for bits per byte; None if unknown
    part_of_batch: Callable[[int], float] = lambda step: 1.0  # how much of the global batch a step has; from 0
    on_line: Callable[[], None] = lambda: None  # called after each line that is written; returns at once

    def __post_init__(self) -> None:
        # A step whose metrics are still to be read, their names, the time waited for data up to it, what is known.
        self._due: tuple[int, Mapping[str, jax.Array], Sequence[str], float, dict[str, Any]] | None = None
        self._latest: Mapping[str, jax.Array] | None = None  # metrics of the last step dispatched
        self._first_reading: tuple[int, float] | None = None  # step, and when it was known to be finished
        # The last three: the step, whether it was finished before anybody looked, and what had been spent by then,
        # without pauses.
        self._readings: collections.deque[tuple[int, bool, dict[str, float]]] = collections.deque(maxlen=3)
        self._paused_s = self._paused_cpu_s = 0.0
        if self.is_leader:
            path = Path(self.run_folder) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_messages(path.parent)
            # Followers of the file go by times, so these only increase, whatever a machine's clock says.
            self._latest_time = _drop_steps_after(path, self.start_step)
            self._path, self._unwritten, self._is_failing = path, b"", False
            self._file = path.open("ab", buffering=0)  # a killed run loses no finished line
            self._progress = Progress(self.total_steps, self.start_step)

    def log(
        self,
        step: int,
        metrics: Any,
        data_waited_s: float = 0.0,
        data_metrics: Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """Takes the numbers of a step that was just dispatched; reads and writes those of an earlier one that is due.

        Args:
            step: finished updates once this step is done, 1 to `total_steps`, increasing.
            metrics: scalars, `loss` among them, and vectors, as `scalars` takes them; a mapping or dataclass.
            data_waited_s: how long all steps so far waited for their data.
            data_metrics: more values of the line, on the host already.
        """
        if not self.is_leader:
            return
        self.flush()
        metrics = flat(metrics, separator="/")
        self._latest = metrics
        if step in (self.start_step + 1, self.total_steps) or step % self.log_interval == 0:
            self._due = (step, metrics, names, data_waited_s, flat(data_metrics or {}, separator="/"))

    def flush(self) -> None:
        """Reads and writes what is due, waiting for its step."""
        if self._due is None:
            return
        step, metrics, names, waited_s, of_data = self._due
        self._due = None
        # A step that is finished already is seen late, as while a profile is written, and timed from there the next one
        # would seem fast. So times are taken since the last reading that was on time.
        is_late = metrics["loss"].is_ready()  # type: ignore[attr-defined]  # since jax 0.2, not in its types
        values = scalars(metrics, names)
        now = time.perf_counter()
        spent = {"step_time_s": now - self._paused_s, "data_wait_s": waited_s}
        spent["step_cpu_s"] = time.process_time() - self._paused_cpu_s

        timings: dict[str, float | None] = dict.fromkeys(
            ("step_time_s", "device_s", "tokens_per_s", *self.flops_per_step, "step_cpu_s")
        )
        timings["data_wait_s"] = waited_s / (step - self.start_step)
        if self._readings:
            on_time = [reading for reading in self._readings if not reading[1]]
            last_step, _, before = on_time[-1] if on_time else self._readings[0]
            a_step = {name: (value - before[name]) / (step - last_step) for name, value in spent.items()}
            steps_per_s = self.part_of_batch(step - 1) / a_step["step_time_s"]
            timings |= {**a_step, "device_s": a_step["step_time_s"] - a_step["data_wait_s"]}
            timings["tokens_per_s"] = self.tokens_per_step * steps_per_s
            if self.peak_flops_per_s is not None:
                for name, flops in self.flops_per_step.items():
                    timings[name] = flops * steps_per_s / self.peak_flops_per_s
        self._readings.append((step, is_late, spent))
        self._first_reading = self._first_reading or (step, now)
        self._write(step, {**values, **self._of_loss(values["loss"]), **timings, **of_data, **memory()})
        self._progress.show(step, self._status(step, now, values["loss"], timings["tokens_per_s"], timings["mfu"]))

    def log_validation(self, step: int, loss: jax.Array | float, of_sources: Mapping[str, float] | None = None) -> None:
        """Writes and prints the validation loss after `step` updates, in a mixture each source's too; waits for it."""
        if not self.is_leader:
            return
        self.flush()
        loss, of_sources = float(loss), of_sources or {}
        derived = {f"validation_{name}": value for name, value in self._of_loss(loss).items()}
        self._write(step, {"validation_loss": loss, **derived, **flat(of_sources, "validation_loss_of/")})
        texts = [f"; {value:.4f} of {name}" for name, value in of_sources.items()]
        print_line(wrapped(f"step {step}/{self.total_steps}: validation loss {loss:.4f}{''.join(texts)}"))

    def log_scores(self, step: int, scores: Mapping[str, float]) -> None:
        if self.is_leader:
            self._write(step, dict(scores))
            texts = [f"{name.removeprefix('score/')} {value:.4f}" for name, value in scores.items()]
            print_line(wrapped(f"step {step}/{self.total_steps}: {'; '.join(texts)}"))

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        """Writes how long saving the state after `step` updates held the training up."""
        if self.is_leader:
            self.flush()
            self._write(step, {"checkpoint_stall_s": stall_s})

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes what is done inside (validation, saving) from `step_time_s`. Waits first for the steps under way,
        which would else be finished inside and not be counted."""
        if self.is_leader:
            self.flush()
            jax.block_until_ready(self._latest)
        start, start_cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start
            self._paused_cpu_s += time.process_time() - start_cpu

    def __exit__(self, error_type: type[BaseException] | None, *_) -> None:
        try:
            if error_type is None:  # reading a failed step would raise again and hide the first error
                self.flush()
        finally:
            if self.is_leader:
                self._write_lines()
                self._file.close()
                self._progress.close()

    def __enter__(self) -> "Tracker":
        return self

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self._latest_time = max(time.time(), math.nextafter(self._latest_time, math.inf))
        record = {"step": step, "time": self._latest_time, **values}
        line = json.dumps({name: _to_json(value) for name, value in record.items()}, allow_nan=False) + "\n"
        self._unwritten += line.encode()
        self._write_lines()
        self.on_line()

    def _write_lines(self) -> None:
        """Writes what is not written yet; training goes on if it cannot, as on a full disk."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                what = f"{self._path} cannot be written ({error.strerror})"
                print_line(f"warning: {what}. Training goes on; lines wait in memory.")
            self._is_failing = True

    def _of_loss(self, loss: float) -> dict[str, float | None]:
        """Other measures of a mean loss in nats a token."""
        nats_per_byte = None if self.bytes_per_token is None else loss / self.bytes_per_token
        return {
            "perplexity": math.exp(loss) if not loss > 700 else math.inf,  # beyond, float64 ends
            "bits_per_byte": None if nats_per_byte is None else nats_per_byte / math.log(2),
        }

    def _status(self, step: int, now: float, loss: float, tokens_per_s: float | None, mfu: float | None) -> str:
        if tokens_per_s is None or self._first_reading is None:
            return f"loss {loss:.4f} (first step, not timed)"
        first_step, first_time = self._first_reading
        # Pauses count: the person who waits waits for them too.
        left_s = (now - first_time) / (step - first_step) * (self.total_steps - step)
        left = tqdm.format_interval(left_s)
        return f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s, mfu {percent(mfu)}, {left} left"


def memory() -> dict[str, int | None]:
    """The most bytes so far: of the fullest of this process's devices (None where JAX does not say, as on a CPU), and
    of the process (its resident set, with the arrays of simulated devices)."""
    devices = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in devices if "peak_bytes_in_use" in stats]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"device_peak_memory_bytes": max(peaks, default=None), "host_peak_memory_bytes": resident}


def _to_json(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _drop_steps_after(path: Path, step: int) -> float:
    """Rewrites the file, all or nothing, without lines of later steps, damaged ones and a half-written last one.
    Returns the latest time of a line."""
    if not path.exists():
        return 0.0
    *lines, half = read_bytes(path, MOST_BYTES).split(b"\n")
    kept, latest, aside = [], 0.0, path.with_name("metrics.damaged.jsonl")
    for number, line in enumerate(lines, 1):
        if (record := record_of(line)) is None:
            print_line(wrapped(f"warning: {damage(path, number, line)}. It is set aside in {aside}."))
            with aside.open("ab") as file:
                file.write(line + b"\n")
            continue
        latest = max(latest, record["time"])
        if record["step"] <= step:
            kept.append(line)
    if half or len(kept) < len(lines):
        write_whole(path, *(line + b"\n" for line in kept))
    return latest
