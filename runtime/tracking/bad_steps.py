"""Steps whose loss or gradient is not finite: the update was skipped on the device; too many in a row stop the run.

The device counts what it skips, so one number tells whether any step since the last reading was bad. Only then are the
others fetched, to say which.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from runtime.tracking.metrics import scalars


class BadSteps:
    """Counts bad steps in a row: `limit` are too many. skipped_steps: where the device's count begins."""

    def __init__(self, limit: int, skipped_steps: int):
        self._limit, self._skipped = limit, skipped_steps
        self._unread: list[tuple[int, Mapping[str, jax.Array], Sequence[str]]] = []
        self.row: list[dict[str, float]] = []  # the bad ones up to the last step that was read

    def note(self, step: int, metrics: Mapping[str, jax.Array], names: Sequence[str] = ()) -> None:
        """Takes a step that was just dispatched, whose `skipped_steps` counts all so far. names: see `scalars`."""
        self._unread.append((step, metrics, names))

    def read(self) -> list[dict[str, float]]:
        """Reads the steps noted, waiting for the last. Returns the bad ones in a row once they are too many."""
        unread, self._unread = self._unread, []
        if unread and int(unread[-1][1]["skipped_steps"]) == self._skipped:
            unread, self.row = [], []
        for step, metrics, names in unread:
            values = scalars(metrics, names)
            self.row = [*self.row, {"step": step, **values}] if values["skipped_steps"] > self._skipped else []
            self._skipped = values["skipped_steps"]
            if len(self.row) >= self._limit:
                return self.row
        return []


def not_finite(state: Any) -> list[str]:
    """Where this process's devices hold numbers that are not finite: 'weights/embed on device 3 (d 1, t 1)'."""
    devices, places = jax.sharding.get_mesh().devices, []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        for shard in leaf.addressable_shards:
            if not np.isfinite(np.asarray(shard.data)).all():
                axes = zip(jax.sharding.get_mesh().axis_names, np.argwhere(devices == shard.device)[0], strict=True)
                place = ", ".join(f"{axis} {index}" for axis, index in axes)
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                places.append(f"{name} on device {shard.device.id} ({place})")
    return places
