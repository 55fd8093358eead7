"""Steps whose loss or gradient is not finite: the update was skipped on the device; too many in a row stop the run.

    bad_steps = BadSteps(10, skipped_steps=0)
    for step in range(1, 1001):
        metrics = training_step(...)
        if a number is read anyway and bad_steps.read():
            break
        bad_steps.note(step, metrics)

The device counts what it skips, so that one number tells whether any step since the last reading was bad. Only if one
was are the others fetched, to say which.
"""

from collections.abc import Mapping, Sequence

import jax

from runtime.tracking.metrics import scalars


class BadSteps:
    """Counts bad steps in a row: `limit` are too many; skipped_steps is what the device's count begins with."""

    def __init__(self, limit: int, skipped_steps: int):
        self._limit, self._skipped = limit, skipped_steps
        self._unread: list[tuple[int, Mapping[str, jax.Array], Sequence[str]]] = []
        self._row: list[dict[str, float]] = []  # up to the last step that was read

    @property
    def in_a_row(self) -> int:
        return len(self._row)

    def note(self, step: int, metrics: Mapping[str, jax.Array], names: Sequence[str] = ()) -> None:
        """Takes a step that was just dispatched, whose `skipped_steps` counts all so far; names: of vectors'
        elements."""
        self._unread.append((step, metrics, names))

    def read(self) -> list[dict[str, float]]:
        """Reads the steps noted, waiting for the last. Returns the bad ones in a row once they are too many."""
        unread, self._unread = self._unread, []
        if unread and int(unread[-1][1]["skipped_steps"]) == self._skipped:
            unread, self._row = [], []
        for step, metrics, names in unread:
            values = scalars(metrics, names)
            self._row = [*self._row, {"step": step, **values}] if values["skipped_steps"] > self._skipped else []
            self._skipped = values["skipped_steps"]
            if len(self._row) >= self._limit:
                return self._row
        return []
