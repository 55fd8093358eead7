"""A profile of a few steps, once per run folder, for Perfetto and for TensorBoard's profiler."""

import shutil
import threading
from pathlib import Path
from typing import Any

import jax

from runtime.terminal import print_line

SETTLING_STEPS = 3  # not profiled: the first compiles, the next ones fill caches and the queue
PROFILED_STEPS = 3
LONGEST_WAIT_S = 60.0  # at the end of a run, for a profile that is still being written


class Profiler:
    """Profiles three steps near the start into `<run_folder>/profile`.

        with Profiler(run_folder, start_step=0, total_steps=50, is_leader=True) as profiler:
            for step in range(1, 51):
                profiler.before_step(step)
                state, metrics = training_step(state, batch)
                profiler.after_step(step, (state, metrics))

    `profile/perfetto_trace.json.gz` opens at https://ui.perfetto.dev; `profile/plugins` is what TensorBoard reads.
    Nothing is profiled where fewer steps than needed are left, where the folder has a profile, or on other processes
    than the leader; no step is added and no batch drawn. Training waits once, for the last profiled step: its outputs
    are donated to the next one, so nobody could wait for them later. The files are written by a thread meanwhile.

    An exception ends the profile and leaves no folder, so that the next start profiles again.
    """

    def __init__(self, run_folder: str | Path, *, start_step: int, total_steps: int, is_leader: bool):
        self._folder = Path(run_folder) / "profile"
        self._part = Path(run_folder) / "profile.part"  # renamed when complete
        self._first_step = start_step + 1 + SETTLING_STEPS
        self._last_step = self._first_step + PROFILED_STEPS - 1
        self._is_wanted = is_leader and self._last_step <= total_steps and not self._folder.exists()
        self._is_tracing = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._writer: threading.Thread | None = None

    def before_step(self, step: int) -> None:
        """Called before a step is dispatched."""
        if self._is_wanted and step == self._first_step:
            shutil.rmtree(self._part, ignore_errors=True)
            options = jax.profiler.ProfileOptions()
            # It would slow all Python down, data threads too, and say little of the device.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._part, create_perfetto_trace=True, profiler_options=options)
            self._is_tracing = True
        if self._is_tracing:
            self._annotation = jax.profiler.StepTraceAnnotation("step", step_num=step)
            self._annotation.__enter__()

    def after_step(self, step: int, outputs: Any) -> None:
        """Called when a step is dispatched.

        Args:
            outputs: all that the step returns; waited for at the last profiled step, and only there.
        """
        if not self._is_tracing:
            return
        self._end_annotation()
        if step == self._last_step:
            jax.block_until_ready(outputs)
            self._is_tracing = False
            self._writer = threading.Thread(target=self._write, name="profile", daemon=True)
            self._writer.start()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: Any, traceback: Any) -> None:
        if self._is_tracing:
            self._is_tracing = False
            self._end_annotation()
            jax.profiler.stop_trace()
            shutil.rmtree(self._part, ignore_errors=True)
        if self._writer is not None:
            self._writer.join(LONGEST_WAIT_S)
            if self._writer.is_alive():
                print_line(f"{self._folder} is given up: it was not written within {LONGEST_WAIT_S:g} s.")

    def _end_annotation(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _write(self) -> None:
        try:
            jax.profiler.stop_trace()
            (trace,) = self._part.glob("plugins/profile/*/perfetto_trace.json.gz")
            trace.rename(self._part / trace.name)  # to the top, where it is found
            self._part.rename(self._folder)
        except (OSError, ValueError, RuntimeError) as error:
            print_line(f"{self._folder} is not written: {type(error).__name__}: {error}. Training goes on.")
            return
        print_line(
            f"profile of steps {self._first_step} to {self._last_step}: {self._folder / trace.name} "
            "(https://ui.perfetto.dev)"
        )
