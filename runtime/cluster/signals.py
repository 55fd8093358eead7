"""SIGTERM and SIGINT while training: the steps in flight end, the state is saved, and the run ends with STOPPED.

STOPPED is 75, EX_TEMPFAIL of sysexits.h: started again, the run goes on. A second signal ends the process at once, with
128 plus the signal's number, whatever it is doing; so does the first, with 75, before there is a state to save.
"""

import os
import signal
import socket
import threading

import jax
from jax.experimental import multihost_utils

from runtime.terminal import print_note

STOPPED = 75


class StopSignals:
    """Takes SIGTERM and SIGINT while the context is open; does nothing outside the main thread, which alone gets them.

    A signal to one of several hosts stops all after the same step, by JAX's coordination service. The service keeps its
    handler of SIGTERM, so a second SIGTERM is not noticed there; a second SIGINT is.
    """

    training = False  # whether there is a state to save

    def __init__(self):
        self._several_hosts = jax.process_count() > 1
        self._numbers = [signal.SIGINT] if self._several_hosts else [signal.SIGINT, signal.SIGTERM]
        self._received: signal.Signals | None = None
        self._asked = 0
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopSignals":
        if self._in_main_thread:
            # Python runs no handler while the main thread compiles or waits for a device. But it writes the signal's
            # number to this socket at once, and a thread reads it.
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno())
            self._handlers_before = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._in_main_thread:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            self._writer.close()  # ends the thread

    def stop(self) -> bool:
        """Whether the run stops now; called after each step and each batch of a validation. Several hosts must call it
        equally often, and get the same answer; it is True only once."""
        self._asked += 1
        if self._several_hosts:
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self._received is not None

    def is_alone_told(self) -> bool:
        """Whether this process was told to stop and there is no other, with which it would have to agree on a step."""
        return not self._several_hosts and self._received is not None

    def _watch(self) -> None:
        while number := self._reader.recv(1):
            if number[0] in self._numbers:
                self._take(signal.Signals(number[0]))
        self._reader.close()

    def _take(self, number: signal.Signals) -> None:
        if self._received is not None:
            os._exit(128 + number)
        self._received = number
        if self._several_hosts:
            os.kill(os.getpid(), signal.SIGTERM)  # to JAX, which tells the other hosts
        elif not self.training:
            print_note(f"{number.name}: no step is done yet, nothing to save")
            os._exit(STOPPED)
        print_note(f"{number.name}: stopping after the step in flight; a second one exits at once")
