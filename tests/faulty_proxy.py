"""A proxy before an HTTP server on this machine that misbehaves as object stores do: answers 500 or 503, is slow, cuts
connections.

with FaultyProxy("http://127.0.0.1:5000") as proxy:
    proxy.fault = lambda method, path, count: "503" if count % 3 == 0 else None
    ...                                            # talk to proxy.url; proxy.faults counts what was done
"""

import collections
import contextlib
import http.client
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ERROR = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>made up for a test</Message></Error>'


class FaultyProxy:
    """`fault(method, path, count)` says what happens to a request, the count-th that came:

    None, all goes well; "500" or "503", the server says so and does nothing; "cut", the connection ends before the
    request is passed on; "cut answer", the request is done and half of the answer sent; "hang", it is held for `hang_s`
    and then cut."""

    def __init__(self, url: str, hang_s: float = 60.0):
        self.fault: Callable[[str, str, int], str | None] = lambda method, path, count: None
        self.faults: collections.Counter = collections.Counter()
        self.requests = 0
        upstream, proxy, lock = urllib.parse.urlsplit(url).netloc, self, threading.Lock()
        closing = self._closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    proxy.requests += 1
                    fault = proxy.fault(self.command, self.path, proxy.requests)
                    proxy.faults[fault] += 1
                if fault in ("cut", "hang"):
                    if fault == "hang":
                        closing.wait(hang_s)
                    self.close_connection = True
                    return
                if fault in ("500", "503"):
                    code = {"500": b"InternalError", "503": b"SlowDown"}[fault]
                    return self.answer(int(fault), {"Content-Type": "application/xml"}, ERROR % code)
                with contextlib.closing(http.client.HTTPConnection(upstream)) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    response = connection.getresponse()
                    self.answer(response.status, dict(response.headers), response.read(), cut=fault == "cut answer")

            def answer(self, status, headers, content, cut=False):
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if cut else content)
                self.close_connection = self.close_connection or cut

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                pass  # clients that have gone away

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> "FaultyProxy":
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
