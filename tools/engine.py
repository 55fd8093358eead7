"""The thread that draws for all requests of a server, and its `Slots` on all processes of a job.

slots = Calls(JobSlots(functools.partial(Slots, generator, 8, 2048, 2048)))
engine = Engine(slots, mesh, rows=8, waiting=64)                      # others: slots.follow(Exception)
engine.start()
engine.submit([Answer(ids, drawing, text, put)])                      # put(answer, what is drawn) on this thread
"""

import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from models.decoding import Drawing, Drawn, Slots
from runtime.terminal import print_error
from tools.hosts import Calls
from tools.ready import Text

IDLE_S = 5.0  # a process that waits for another one longer may give up


@dataclass(eq=False)
class Answer:
    """A text on its way: the engine draws it, and its request reads it on the server's thread."""

    ids: list[int]
    drawing: Drawing
    text: Text
    # Takes the answer and what was drawn of it; None: that was all; a str: what went wrong.
    put: Callable[["Answer", Drawn | str | None], None]
    is_left: bool = False  # its client does not read it: the row is free, if it has one

    @property
    def reason(self) -> str:
        ended = self.text.has_ended or (self.text.ids and self.text.ids[-1] in self.text.ready.generator.ends)
        return "stop" if ended else "length"


class Engine(threading.Thread):
    """Draws for all requests, on the thread that speaks with the devices; nothing else is done there.

    Args:
      slots: those of a `JobSlots`, which are renewed after each failure of a device.
      rows, waiting: answers that are drawn at the same time, and that may wait.
    """

    def __init__(self, slots: Calls, mesh: jax.sharding.Mesh, rows: int, waiting: int):
        super().__init__(name="engine", daemon=True)
        self.slots, self.mesh, self.most = slots, mesh, waiting
        slots.lead("renew")
        self.waiting: deque[Answer] = deque()
        self.changed, self.stopping, self.has_ended = threading.Condition(), False, False
        self.answers: list[Answer | None] = [None] * rows
        self.counts: Counter[str] = Counter()

    def submit(self, answers: Sequence[Answer]) -> bool:
        """Takes all of the answers or none: False if too many wait already, or the server stops."""
        with self.changed:
            self._forget_left()
            room = self.most + self.answers.count(None)  # free rows are taken when the others have drawn a burst
            if self.stopping or self.has_ended or len(self.waiting) + len(answers) > room:
                self.counts["refused"] += 1
                return False
            self.waiting.extend(answers)
            self.counts["requests"] += len(answers)
            self.changed.notify()
            return True

    def stop(self) -> None:
        """The engine ends once the answers that wait or are drawn are done."""
        with self.changed:
            self.stopping = True
            self.changed.notify()

    def run(self) -> None:
        try:
            with jax.set_mesh(self.mesh):
                self._run()
        finally:  # clients and /health must learn of a failure, whose traceback Python prints
            with self.changed:
                self.has_ended = True
            for answer in [*self.waiting, *filter(None, self.answers)]:
                answer.put(answer, "the engine has ended")

    def _run(self) -> None:
        while (new := self._next()) is not None:
            try:
                self._admit(new)
                if any(self.answers):
                    self._hand_out(self.slots.lead("advance"))
                else:
                    self.slots.lead("idle")
            except Exception as error:  # whatever it is: those who ask later must not suffer from it
                self._fail([row for row, answer in enumerate(self.answers) if answer], error)
            else:
                continue
            self.slots.lead("renew")  # not above, where the error still holds the memory of the old ones

    def _next(self) -> dict[int, Answer] | None:
        """The answers that now get a row, if there are any; None after the last one."""
        with self.changed:
            if not self.waiting and not any(self.answers):
                if self.stopping:
                    return None
                self.changed.wait(IDLE_S)
            self._forget_left()
            new = {}
            for row in [row for row, answer in enumerate(self.answers) if answer is None]:
                if self.waiting:
                    new[row] = self.answers[row] = self.waiting.popleft()
            return new

    def _forget_left(self) -> None:
        """Those whose clients have left wait no longer, in place of others."""
        for answer in [answer for answer in self.waiting if answer.is_left]:
            self.waiting.remove(answer)
            self.counts["left"] += 1

    def _admit(self, new: Mapping[int, Answer]) -> None:
        names = [field.name for field in fields(Drawing)]  # a request has other fields besides
        try:
            if new:
                how = {row: {name: getattr(answer.drawing, name) for name in names} for row, answer in new.items()}
                self.slots.lead("admit", [(row, answer.ids, how[row]) for row, answer in new.items()])
        except Exception as error:  # any, as above; if several were admitted, each is tried alone
            self.slots.lead("drop", list(new))
            if len(new) == 1:
                return self._fail(list(new), error)
            for row, answer in new.items():
                self._admit({row: answer})

    def _fail(self, rows: Sequence[int], error: Exception) -> None:
        print_error("".join(traceback.format_exception(error, chain=False)), "an answer failed")
        for row in rows:
            if answer := self.answers[row]:
                answer.put(answer, f"it could not be drawn ({type(error).__name__})")
            self.answers[row] = None
            self.counts["failed"] += 1

    def _hand_out(self, burst: Sequence[Drawn]) -> None:
        gone = []
        for row, (answer, drawn) in enumerate(zip(self.answers, burst)):
            if answer is None:
                continue
            self.counts["tokens"] += len(drawn.tokens)
            answer.put(answer, drawn)
            if answer.is_left or answer.text.has_ended or not self.slots.here.left[row]:
                answer.put(answer, None)
                self.answers[row] = None
                gone.append(row)
                self.counts["left" if answer.is_left and not answer.text.has_ended else "answered"] += 1
        if any(self.slots.here.left[row] for row in gone):
            self.slots.lead("drop", gone)


class JobSlots:
    """`Slots` for `Calls`: with arguments that JSON can say, on each process of the job."""

    def __init__(self, make: Callable[[], Slots]):
        self.make = make
        self.slots: Any = None

    @property
    def left(self) -> np.ndarray:
        return self.slots.left

    def renew(self) -> None:
        """Replaces the slots by new ones."""
        self.slots = None  # frees the memory for the next ones
        self.slots = self.make()

    def admit(self, rows: Sequence[tuple[int, list[int], dict]]) -> None:
        self.slots.admit({row: (ids, Drawing(**how)) for row, ids, how in rows})

    def drop(self, rows: Sequence[int]) -> None:
        self.slots.drop(rows)

    def advance(self) -> list[Drawn]:
        return self.slots.advance()

    def idle(self) -> None:
        """Keeps the other processes from timing out while there is nothing to do."""
