"""What a run says while it goes: `metrics.jsonl` in the run folder and one line on the terminal.

The device is never waited for while it has nothing else to do: a step's numbers are read when the next step is already
dispatched, so that reading them costs no idle time.
"""

import contextlib
import dataclasses
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from runtime.terminal import RunError, print_line
from runtime.tracking.files import write_whole


def flattened(metrics: Any, name: str = "", separator: str = "/") -> dict[str, Any]:
    """What is in nested mappings and dataclasses, by its path.

    flattened({"loss": 1.5, "grad_norm": {"embed": 0.5}})      # {"loss": 1.5, "grad_norm/embed": 0.5}
    """
    if dataclasses.is_dataclass(metrics):
        metrics = vars(metrics)
    if not isinstance(metrics, Mapping):
        return {name: metrics}
    parts = (flattened(value, f"{name}{separator}{key}" if name else key, separator) for key, value in metrics.items())
    return {name: scalar for part in parts for name, scalar in part.items()}


def scalars(metrics: Mapping[str, jax.Array], names: Sequence[str]) -> dict[str, Any]:
    """Each number of a step's metrics, read from the device.

    Args:
      names: of the elements of a vector: that of 'embed' in 'grad_norm_of' is 'grad_norm_of/embed'.
    """
    fetched = jax.device_get(dict(metrics))  # all copies at once; its keys come out sorted
    values: dict[str, Any] = {}
    for name in metrics:
        array = np.asarray(fetched[name])
        keys = [f"{name}/{each}" for each in names] if array.ndim else [name]
        values |= dict(zip(keys, array.reshape(-1).tolist(), strict=True))
    return values


class Tracker:
    """Writes a line of metrics every `log_interval` steps, and at the first and the last.

        with Tracker(run_folder, start_step=0, total_steps=50, ...) as tracker:
            for step in range(1, 51):
                state, metrics = training_step(state, batch)
                tracker.log(step, metrics)
                if step % eval_interval == 0:
                    with tracker.paused():
                        tracker.log_validation(step, validation_loss(state))

    A line of `metrics.jsonl` is `step`, `time` (s since 1970) and numbers by their names, nested ones joined by '/';
    docs/runs.md says what each is. Floats are written with all their digits, so that losses can be compared bit for
    bit. What is not known is null: the shares of unknown hardware's peak, and the timings of a process's first line
    (its step is mostly compilation). A float that is not finite is the string "NaN", "Infinity" or "-Infinity", which
    JSON cannot write as a number.

    Timings are means a step since the line before, without what `paused` excludes: `step_time_s` is wall time; for
    `data_wait_s` of it the leader waited for its data; `device_s` is the rest, in which it kept its devices at work.

    Args:
        run_folder: where `metrics.jsonl` is appended to; created if missing.
        start_step: finished updates at the start. Lines of later steps, which an interrupted run left, are dropped first.
        total_steps: the last step's number.
        tokens_per_step: of the global batch.
        flops_per_step: of the global batch, by the name that their share of the peak is logged under.
        peak_flops_per_s: of all devices together, or None if not known.
        log_interval: steps from line to line.
        bytes_per_token: of the data's text, for bits per byte; None if not known.
        on_line: called with each line that is written; returns at once.
        is_leader: whether this process reads, writes and prints; the others do nothing here.

    Raises:
        RunError: if `metrics.jsonl` has a line that is no record of a step (a half-written last one is dropped). That it
            cannot be written (a full disk) stops nothing: it is said once, and the lines are written when they can be.
    """

    def __init__(
        self,
        run_folder: str | Path,
        *,
        start_step: int,
        total_steps: int,
        tokens_per_step: int,
        flops_per_step: Mapping[str, float],
        peak_flops_per_s: float | None,
        log_interval: int,
        is_leader: bool,
        bytes_per_token: float | None = None,
        on_line: Callable[[str], None] = lambda line: None,
    ):
        self._start_step = start_step
        self._total_steps = total_steps
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_step
        self._peak_flops_per_s = peak_flops_per_s
        self._log_interval = log_interval
        self._is_leader = is_leader
        self._bytes_per_token = bytes_per_token
        self._on_line = on_line
        # A step whose metrics are still to be read, with what is known already.
        self._due: tuple[int, Mapping[str, jax.Array], dict[str, Any], Sequence[str]] | None = None
        self._latest: Mapping[str, jax.Array] | None = None  # metrics of the last step dispatched
        self._first_reading: tuple[int, float] | None = None  # step, and when it was known to be finished
        self._last_reading: tuple[int, float] | None = None
        self._paused_s = 0.0  # since the last reading
        self._data_waited = (start_step, 0.0)  # at the last line: the step, and the time waited up to it
        self._bar: tqdm | None = None
        if is_leader:
            path = Path(run_folder) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_steps_after(path, start_step)
            self._path, self._unwritten, self._is_failing = path, b"", False
            self._file = path.open("ab", buffering=0)  # a killed run loses no finished line
            if sys.stdout.isatty():
                self._bar = tqdm(
                    total=total_steps,
                    initial=start_step,
                    file=sys.stdout,
                    dynamic_ncols=True,
                    bar_format="step {n_fmt}/{total_fmt} |{bar}| {desc}",
                )

    def log(
        self,
        step: int,
        metrics: Any,
        data_waited_s: float = 0.0,
        data_metrics: Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """Takes the scalars of a step that was just dispatched; reads and writes those of an earlier one that is due.

        Args:
            step: finished updates once this step is done, 1 to `total_steps`, increasing.
            metrics: scalars and vectors, replicated on all devices, `loss` among them; a mapping or dataclass that may be
                nested.
            data_waited_s: for how long all steps so far waited for their data.
            data_metrics: further values of the line, on the host already.
            names: of the elements of vectors.
        """
        if not self._is_leader:
            return
        self.flush()
        metrics = flattened(metrics)
        self._latest = metrics
        if step in (self._start_step + 1, self._total_steps) or step % self._log_interval == 0:
            last_step, waited_s = self._data_waited
            self._data_waited = (step, data_waited_s)
            wait_s = (data_waited_s - waited_s) / (step - last_step)
            self._due = (step, metrics, {"data_wait_s": wait_s, **flattened(data_metrics or {})}, names)

    def flush(self) -> None:
        """Reads and writes what is due, waiting for its step."""
        if self._due is None:
            return
        step, metrics, of_data, names = self._due
        self._due = None
        values = scalars(metrics, names)
        now = time.perf_counter()

        step_time_s = tokens_per_s = device_s = None
        utilization = dict.fromkeys(self._flops_per_step)
        if self._last_reading is not None:
            last_step, last_time = self._last_reading
            step_time_s = (now - last_time - self._paused_s) / (step - last_step)
            device_s = step_time_s - of_data["data_wait_s"]
            tokens_per_s = self._tokens_per_step / step_time_s
            if self._peak_flops_per_s is not None:
                for name, flops in self._flops_per_step.items():
                    utilization[name] = flops / step_time_s / self._peak_flops_per_s
        self._last_reading = (step, now)
        self._first_reading = self._first_reading or self._last_reading
        self._paused_s = 0.0
        timings = {"step_time_s": step_time_s, "device_s": device_s, "tokens_per_s": tokens_per_s, **utilization}
        self._write(step, {**values, **self._of_loss(values["loss"]), **timings, **of_data, **memory()})
        self._show(step, self._status(step, now, values["loss"], tokens_per_s, utilization["mfu"]))

    def log_validation(self, step: int, loss: jax.Array | float) -> None:
        """Writes and prints the loss on the validation split after `step` updates; waits for it."""
        if not self._is_leader:
            return
        self.flush()
        loss = float(loss)
        derived = {f"validation_{name}": value for name, value in self._of_loss(loss).items()}
        self._write(step, {"validation_loss": loss, **derived})
        print_line(f"step {step}/{self._total_steps}: validation loss {loss:.4f}")

    def log_checkpoint(self, step: int, stall_s: float) -> None:
        """Writes for how long saving the state after `step` updates held the training up."""
        if self._is_leader:
            self.flush()
            self._write(step, {"checkpoint_stall_s": stall_s})

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes what is done inside (validation, saving) from `step_time_s`.

        Waits first for the steps that are under way: they would else be finished inside, and not be counted.
        """
        if self._is_leader:
            self.flush()
            jax.block_until_ready(self._latest)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start

    def close(self) -> None:
        """Writes what is due and ends the progress bar."""
        try:
            self.flush()
        finally:
            self._close_outputs()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: Any, traceback: Any) -> None:
        if error_type is None:
            self.close()
        else:
            self._close_outputs()  # reading a failed step would raise again and hide the first error

    def _close_outputs(self) -> None:
        if self._is_leader:
            self._write_lines()
            self._file.close()
            if self._bar is not None:
                self._bar.close()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        record = {"step": step, "time": time.time(), **values}
        line = json.dumps({name: _to_json(value) for name, value in record.items()}, allow_nan=False) + "\n"
        self._unwritten += line.encode()
        self._write_lines()
        self._on_line(line)

    def _write_lines(self) -> None:
        """Writes what is not written yet. Where it cannot, as on a full disk, training goes on."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                print_line(
                    f"warning: {self._path} cannot be written ({error.strerror}). Training goes on; lines wait in "
                    "memory."
                )
            self._is_failing = True

    def _of_loss(self, loss: float) -> dict[str, float | None]:
        """What else a mean loss, in nats a token, can be given as."""
        nats_per_byte = None if self._bytes_per_token is None else loss / self._bytes_per_token
        return {
            "perplexity": math.exp(loss) if not loss > 700 else math.inf,  # beyond, float64 ends
            "bits_per_byte": None if nats_per_byte is None else nats_per_byte / math.log(2),
        }

    def _status(self, step: int, now: float, loss: float, tokens_per_s: float | None, mfu: float | None) -> str:
        if tokens_per_s is None:
            return f"loss {loss:.4f} (first step, not timed)"
        first_step, first_time = self._first_reading
        # With the pauses: the person who waits waits for them too.
        left_s = (now - first_time) / (step - first_step) * (self._total_steps - step)
        mfu_text = "n/a" if mfu is None else f"{mfu:.1%}"
        return f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s, mfu {mfu_text}, {tqdm.format_interval(left_s)} left"

    def _show(self, step: int, status: str) -> None:
        if self._bar is None:
            print(f"step {step}/{self._total_steps}: {status}", flush=True)
        else:
            self._bar.n = step
            self._bar.set_description_str(status)


def memory() -> dict[str, int | None]:
    """The most that was in use so far, in bytes: of the fullest of this process's devices (None where JAX does not say, as
    on a CPU), and of the process itself (its resident set, in which the arrays of simulated devices are too)."""
    devices = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in devices if "peak_bytes_in_use" in stats]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"device_peak_memory_bytes": max(peaks, default=None), "host_peak_memory_bytes": resident}


def _to_json(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _drop_steps_after(path: Path, step: int) -> None:
    """Rewrites the file, all or nothing, without the lines of later steps and without a half-written last line."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break  # only the last line can lack its end: the process died while writing it
        try:
            is_kept = json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{path}, line {number}: expected a JSON object with `step`, a number, but got {line.strip()[:80]!r}. "
                "Repair or remove the line, or choose another paths.model_name."
            ) from error
        if is_kept:
            kept.append(line)
    if len(kept) < len(lines):
        write_whole(path, "".join(kept))
