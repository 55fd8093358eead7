"""A profile of a few steps, once per run folder, for Perfetto and for TensorBoard's profiler."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from runtime.terminal import print_line, wrapped

SETTLING_STEPS = 3  # not profiled: the first compiles, the next ones fill caches and the queue
PROFILED_STEPS = 3
TRACE = "perfetto_trace.json.gz"


class Profiler:
    """Profiles three steps near the start into `<run_folder>/profile`.

        with Profiler(run_folder, start_step=0, total_steps=50, is_leader=True) as profiler:
            for step in range(1, 51):
                profiler.before_step(step)
                state, metrics = training_step(state, batch)
                profiler.after_step(step, (state, metrics))

    `profile/perfetto_trace.json.gz` opens at https://ui.perfetto.dev; `profile/plugins` is what TensorBoard reads. Only
    the leader profiles, if enough steps are left and the folder has no profile. Training waits once, for the last
    profiled step and until the files are written, some seconds. After an exception no folder is left, and the next
    start profiles again. `paused` is a context in which nothing is timed, for the writing.
    """

    def __init__(
        self, run_folder: str | Path, *, start_step: int, total_steps: int, is_leader: bool,
        paused: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):  # fmt: skip
        self._folder = Path(run_folder) / "profile"
        self._part = Path(run_folder) / "profile.part"  # renamed when complete
        self._first_step = start_step + 1 + SETTLING_STEPS
        self._last_step = self._first_step + PROFILED_STEPS - 1
        self._is_wanted = is_leader and self._last_step <= total_steps and not self._folder.exists()
        self._tracing = contextlib.ExitStack()  # closed, it stops the tracer
        self._annotation = contextlib.ExitStack()  # the step's name in the profile
        self._paused = paused

    def before_step(self, step: int) -> None:
        if not self._is_wanted or not self._first_step <= step <= self._last_step:
            return
        if step == self._first_step:
            shutil.rmtree(self._part, ignore_errors=True)
            options = jax.profiler.ProfileOptions()
            # It would slow all Python down, data threads too.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._part, create_perfetto_trace=True, profiler_options=options)
            self._tracing.callback(shutil.rmtree, self._part, ignore_errors=True)
            self._tracing.callback(jax.profiler.stop_trace)
        self._annotation.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=step))

    def after_step(self, step: int, outputs: Any) -> None:
        """Called when a step is dispatched, with all that it returns: awaited at the last profiled step alone."""
        self._annotation.close()
        if self._is_wanted and step == self._last_step:
            jax.block_until_ready(outputs)
            self._tracing.pop_all()
            with self._paused():
                self._write()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *error) -> None:
        self._annotation.close()
        self._tracing.close()

    def _write(self) -> None:
        try:
            jax.profiler.stop_trace()
            (trace,) = self._part.glob(f"plugins/profile/*/{TRACE}")
            trace.rename(self._part / TRACE)  # to the top, where it is found
            self._part.rename(self._folder)
        except (OSError, ValueError, RuntimeError) as error:
            print_line(f"{self._folder} is not written: {type(error).__name__}: {error}. Training goes on.")
        else:
            steps = f"profile of steps {self._first_step} to {self._last_step}"
            print_line(wrapped(f"{steps}: {self._folder / TRACE} (https://ui.perfetto.dev)"))
