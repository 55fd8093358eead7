"""Names hosts that the others wait for.

All hosts' steps take equally long, since collectives wait for the last host. What differs is the time that a host takes
to load its rows and to start a step. If that is most of a step, the host's disk, network or processor is slow. A slow
device is not noticed, since its host is not busy; a host that hangs ends all within `processes.SILENT_S`.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

TIMES_THE_MEDIAN = 1.5  # over all hosts; the smaller time of two
SHARE_OF_STEP = 0.5  # a host has time for less while the devices compute the previous steps


class SlowHosts:
    """`names` are the hosts of all processes, which all call `exchange` after the same steps."""

    def __init__(self, names: Sequence[str]):
        self._names, self._named = names, set[int]()
        mesh = jax.sharding.get_mesh()
        self._process_of = [device.process_index for device in mesh.devices.flat]
        self._split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        self._gather = jax.jit(lambda time_s: time_s, out_shardings=jax.NamedSharding(mesh, jax.P()))
        self._due: tuple[int, jax.Array] | None = None
        self._begin()

    def _begin(self) -> None:
        self._own_s, self._steps, self._began = 0.0, 0, time.monotonic()

    def note(self, own_s: float) -> None:
        """Takes the time that this host needed to load its rows and to start the step."""
        self._own_s += own_s
        self._steps += 1

    def exchange(self, step: int) -> list[str]:
        """Sends this host's times since the last exchange, two float32 a device. Returns lines that name, once each,
        the hosts that were slow before the last exchange. No device waits for a host here."""
        lines, before = [], self._due
        time_s = np.array([[self._own_s, time.monotonic() - self._began]], np.float32) / max(self._steps, 1)
        shape = (len(self._process_of), 2)
        placed: Any = jax.make_array_from_callback(shape, self._split, lambda index: time_s)
        self._due = step, self._gather(placed)
        if before is not None:
            lines = self._slow(before[0], np.asarray(before[1]))
        self._begin()
        return lines

    def _slow(self, step: int, times: np.ndarray) -> list[str]:
        times_s = dict(zip(self._process_of, times[:, 0].tolist()))
        step_s, median_s = float(times[:, 1].max()), statistics.median_low(times_s.values())
        slow = {
            process for process, s in times_s.items() if s > max(TIMES_THE_MEDIAN * median_s, SHARE_OF_STEP * step_s)
        }
        new, self._named = sorted(slow - self._named), slow
        return [
            f"warning: host {self._names[process]} (process {process} of {len(self._names)}) is slow: up to step "
            f"{step} it took {times_s[process]:.2f} s a step to load its rows and start the step, the median host "
            f"{median_s:.2f} s; a step took {step_s:.2f} s"
            for process in new
        ]
