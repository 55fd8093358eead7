"""A connection of uvicorn's, bounded before anything is known about the client.

    uvicorn.Config(application, http=functools.partial(Connection, most=200, grace_s=30), ws="none")

h11 refuses a request line and headers of more than 16 KiB that are not complete; it sees at most as much more at once.
"""

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PIECE = 16 * 1024  # bytes that h11 is given at once
SLOW_S = 15.0  # between two looks at a connection: one that made no progress meanwhile is ended


class Connection(H11Protocol):
    """
    Args:
      most: connections at once; the next is ended at once.
      grace_s: how long answers that have begun may take after SIGTERM.
    """

    def __init__(self, *arguments: Any, most: int, grace_s: float, **others: Any):
        super().__init__(*arguments, **others)
        self.most, self.grace_s = most, grace_s
        self.before: Any = None
        self.timer = self.loop.call_later(SLOW_S, self.look)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.timer.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + PIECE])

    def send_400_response(self, msg: str) -> None:
        """For a body that is no longer HTTP: the request's own answer is not sent; one that has begun is cut off."""
        if self.cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer has begun, or it has no body, as to HEAD
            self.transport.abort()

    def look(self) -> None:
        """Ends a connection whose client still sends the same request, or reads the same answer, as last time."""
        is_sending = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        now = (self.cycle, self.conn.their_state) if is_sending or self.transport.get_write_buffer_size() else None
        if now is not None and now == self.before:
            return self.transport.abort()
        self.before, self.timer = now, self.loop.call_later(SLOW_S, self.look)

    def shutdown(self) -> None:
        """Ends a connection with half a request at once, one with an answer after grace_s."""
        if self.conn.their_state is h11.SEND_BODY:
            return self.transport.abort()
        super().shutdown()
        self.timer.cancel()
        self.timer = self.loop.call_later(self.grace_s, self.transport.abort)
