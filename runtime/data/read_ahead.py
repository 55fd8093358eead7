"""Reading ahead: a thread computes a function's next results while the last one is used."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")

NO_END = 2**62  # a count that nobody reaches


class ReadAhead(Generic[T]):
    """The results of a function of 0, 1, … count - 1; one thread computes the next few before they are asked for.

        read = ReadAhead(slow, count=100, ahead=3, name="slow")
        read(0), read(1)    # the second is there already, and 2, 3, 4 are on their way
        read(50)            # goes on from there
        read.waited_s       # how long callers have waited, in all

    The function's exception is raised to whoever asks for that result.
    """

    def __init__(self, function: Callable[[int], T], count: int, ahead: int, name: str):
        self._function, self._count, self._ahead = function, count, ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._futures: dict[int, Future[T]] = {}
        self.waited_s = 0.0

    def __call__(self, index: int) -> T:
        self.is_there(index, None)
        return self._futures[index].result()

    def is_there(self, index: int, timeout_s: float | None) -> bool:
        """Waits for a result, at most so long (None: for ever)."""
        began = time.perf_counter()  # before the thread begins
        wanted = range(index, min(index + self._ahead + 1, self._count))
        for other in [known for known in self._futures if known not in wanted]:
            self._futures.pop(other).cancel()
        for new in wanted:
            if new not in self._futures:
                self._futures[new] = self._pool.submit(self._function, new)
        try:
            return bool(wait([self._futures[index]], timeout_s).done)
        finally:
            self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
