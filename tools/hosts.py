"""One job of several processes: the first one reads and writes, all compute.

    prompts = from_first(lambda: read(file))     # what the first process reads, on all; or its refusal
    calls = Calls(slots)                         # the first process leads, the others follow
    burst = calls.lead("advance") if is_first() else calls.follow()

Processes send each other JSON, so nothing that arrives can run as code. A job of one process sends nothing.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from runtime.terminal import RunError, print_error


def is_first() -> bool:
    return jax.process_index() == 0


def note(text: str) -> None:
    if is_first():
        print_error(text, "note")


def shared(value: Any = None) -> Any:
    """Broadcasts the first process's value; all processes call it together. Keys become texts, tuples lists."""
    if jax.process_count() == 1:
        return value
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    room = np.zeros(1 << max(size - 1, 255).bit_length(), np.uint8)  # so that few programs are compiled
    if is_first():
        room[:size] = content
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(room))[:size].tobytes())


def from_first(make: Callable[[], Any]) -> Any:
    """Calls `make` on the first process and returns its value on all; a RunError is raised on all, too."""
    refused, value = None, None
    if is_first():
        try:
            value = make()
        except RunError as error:
            refused = str(error)
    refused, value = shared([refused, value])
    if refused is not None:
        raise RunError(refused)
    return value


class Calls:
    """Methods of an object on each process, which all call together, with the first one's arguments."""

    def __init__(self, here: Any):
        self.here = here

    def lead(self, name: str, *arguments: Any) -> Any:
        """Calls the method on all processes; the first one calls this."""
        shared([name, *arguments])
        return getattr(self.here, name)(*arguments)

    def follow(self, *outlives: type[Exception]) -> None:
        """Repeats the first process's calls until its `end`.

        Args:
          outlives: exceptions that a call may raise; they are raised on the first process too, which goes on.
        """
        while (call := shared()) is not None:
            name, *arguments = call
            with suppress(*outlives):
                getattr(self.here, name)(*arguments)

    def end(self) -> None:
        """Ends `follow` on the others, after the last call."""
        shared(None)
