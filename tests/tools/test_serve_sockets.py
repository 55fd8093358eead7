"""serve.py over sockets, as strangers reach it: what is bounded, counted rather than timed. An engine that draws 'a's
stands for the model."""

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from parts import says
from several_hosts import free_port, wait_until
from uvicorn import Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from models.decoding import Drawn
from models.mesh import Mesh
from runtime.data.tokenizers import CHATML, Tokenizer
from shardlib.mesh import make_mesh
from tools import connection as bounds
from tools import engine, ready, serve
from tools.hosts import Calls

FAILS = 200  # an id that no row with it can be admitted
BREAKS = 201  # and one with which nothing is drawn


class Slots:
    """Draws 'a's, when `may_draw` lets it."""

    may_draw = threading.Event()

    def __init__(self, rows):
        self.rows, self.renewed = rows, 0

    def renew(self):
        self.left, self.prompts, self.renewed = np.zeros(self.rows, np.int32), [()] * self.rows, self.renewed + 1

    def admit(self, rows):
        for row, prompt, how in rows:
            self.left[row], self.prompts[row] = how["tokens"], prompt
        if any(FAILS in prompt for _, prompt, _ in rows):
            raise IndexError("out of bounds")

    def advance(self):
        self.may_draw.wait()
        if any(BREAKS in prompt for prompt, left in zip(self.prompts, self.left) if left):
            raise RuntimeError("the device is gone")
        drawn = np.minimum(self.left, 16)
        self.left = self.left - drawn
        return [Drawn([98] * count, [-1.0] * count) for count in drawn.tolist()]

    def drop(self, rows):
        self.left[list(rows)] = 0

    def idle(self):
        pass


class Running:
    """A server on a thread, and clients of it."""

    def __init__(self, template=CHATML, **keys):
        self.config = serve.Serve(**{"model": "fake", "rows": 2, "waiting": 4, "length": 64, **keys})
        tokenizer = Tokenizer(name="bytes_utf8", bos_id=0, chat_template=template)
        source = SimpleNamespace(model=SimpleNamespace(vocab=257), folder="fake")
        model = ready.ReadyModel(SimpleNamespace(ends=[], start=None), source, tokenizer, (0,), (), 64)
        self.slots, self.clients = Slots(self.config.rows), []
        mesh = make_mesh(vars(Mesh()), devices=jax.devices()[:1])
        self.engine = engine.Engine(Calls(self.slots), mesh, self.config.rows, self.config.waiting)
        self.server = serve.server_of(serve.Api(model, self.engine, self.config))
        self.listens = socket.create_server(("127.0.0.1", 0))
        self.address = self.listens.getsockname()
        self.thread = threading.Thread(target=self.server.run, args=([self.listens],))
        Slots.may_draw.set()
        self.engine.start()
        self.thread.start()
        wait_until(lambda: self.server.started)

    @property
    def connections(self):
        return self.server.server_state.connections

    def end(self):
        """Ends the server as SIGTERM does."""
        self.server.should_exit = True
        self.thread.join(600)
        assert not self.thread.is_alive()
        self.engine.stop()
        self.engine.join(600)
        assert not self.engine.is_alive()
        for client in self.clients:
            client.close()

    def connect(self, data=b""):
        self.clients.append(client := socket.create_connection(self.address, timeout=600))
        client.sendall(data)
        return client

    def ask(self, body=None, path="/v1/completions", headers=(), **keys):
        """The status and what is said."""
        client = http.client.HTTPConnection(*self.address, timeout=600)
        with contextlib.closing(client):
            body = json.dumps(body or {"prompt": "a", "max_tokens": 3, **keys}).encode()
            method = "POST" if path.startswith("/v1/c") else "GET"
            client.request(method, path, body, {"Host": "localhost", **dict(headers)})
            answer = client.getresponse()
            text, self.retry_after = answer.read(), answer.getheader("Retry-After")
            return answer.status, json.loads(text) if text[:1] == b"{" else text.decode()

    @contextlib.contextmanager
    def held(self, count=1):
        """So many requests, which nothing is drawn for within the block; then each has its answer."""
        Slots.may_draw.clear()
        with ThreadPoolExecutor(count) as pool:
            answers = [pool.submit(self.ask)]
            try:
                wait_until(lambda: any(self.engine.answers))  # it has a row, so that the others may all wait
                answers += [pool.submit(self.ask) for _ in range(count - 1)]
                wait_until(lambda: self.engine.counts["requests"] >= count)
                yield
            finally:
                Slots.may_draw.set()
            assert [answer.result()[1]["choices"][0]["text"] for answer in answers] == ["aaa"] * count


@pytest.fixture
def running():
    """Makes servers, and ends them after the test."""
    made = []

    def make(**keys):
        made.append(Running(**keys))
        return made[-1]

    yield make
    Slots.may_draw.set()
    for server in made:
        server.end()


def all_of(client):
    """What the other side sends until it ends the connection."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        pieces.extend(iter(lambda: client.recv(65536), b""))
    return b"".join(pieces)


def is_closed(client):
    """Whether the other side has ended the connection; what it has sent is read."""
    all_of(client)
    return True


def head(*lines, path="/v1/completions"):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.fixture
def fed(monkeypatch):
    """The bytes that h11 was given, by piece."""
    pieces, kept = [], H11Protocol.data_received

    def data_received(self, data):
        pieces.append(len(data))
        kept(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", data_received)
    return pieces


@pytest.mark.parametrize(
    "line", [b"a: b\r\n", b"a" * 8000, b"a: " + b"b" * 5000 + b"\r\n", b" c\r\n", b"\x00", b"\r\n"]
)
def test_headers_without_end(running, fed, line):
    """40 MB of them: h11 gets to see two pieces at most, and the connection ends."""
    server = running()
    client = server.connect(b"GET / HTTP/1.1\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(40):
            client.sendall(line * (10**6 // len(line)))
    assert is_closed(client)
    assert sum(fed) <= 3 * bounds.PIECE and server.ask()[0] == 200


@pytest.mark.parametrize("number, status", [(0, 200), (98, 200), (99, 431), (2000, 431)])
def test_the_number_of_headers(running, number, status):
    """100 are answered, Host and Connection among them; more are not looked at."""
    others = b"".join(b"a: %d\r\n" % n for n in range(number))
    client = running().connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + others + b"\r\n")
    assert client.recv(12) == b"HTTP/1.1 %d" % status


def test_connections_at_once(running):
    """300 that say nothing: those above the bound are ended at once; when the others leave a request is answered."""
    server = running()
    most, highest = server.config.rows + server.config.waiting + serve.OTHERS, []
    clients = []
    for _ in range(300):
        clients.append(server.connect())
        highest.append(len(server.connections))
    ended = clients[most + 10 :]
    assert all(map(is_closed, ended)) and max(highest) <= most + 1
    wait_until(lambda: len(server.connections) == most)
    for client in clients:
        client.close()
    wait_until(lambda: not server.connections)
    assert server.ask()[0] == 200


HALF = [
    b"", b"P", b"POST /v1/completions HTTP/1.1\r\nHost: loc", head("Content-Length: 100"),
    head("Content-Length: 9") + b"{",
    head("Transfer-Encoding: chunked") + b"5\r\n{\"pro", head("Content-Length: 5", path="/nowhere") + b"{",
]  # fmt: skip


def test_half_requests_are_ended(running, monkeypatch):
    """40 of each kind, whether nothing more comes of them or a byte now and then; the others are answered meanwhile."""
    monkeypatch.setattr(bounds, "SLOW_S", 0.3)
    server = running(waiting=400)
    clients = [server.connect(half) for half in HALF for _ in range(40)]
    assert server.ask()[0] == 200
    for turn in range(2000):
        for client in clients[turn % 2 :: 2]:
            with contextlib.suppress(ConnectionError):
                client.sendall(b" ")
        if not server.connections:
            break
        time.sleep(0.01)
    assert not server.connections and all(map(is_closed, clients)) and server.ask()[0] == 200


def test_an_answer_that_takes_long_is_not_ended(running, monkeypatch):
    """Looked at several times while it is drawn, and in the pauses of a connection that is used again."""
    looks, kept = [], bounds.Connection.look
    monkeypatch.setattr(bounds, "SLOW_S", 0.05)
    monkeypatch.setattr(bounds.Connection, "look", lambda self: looks.append(kept(self)))
    with running().held():
        before = len(looks)
        wait_until(lambda: len(looks) > before + 5)


def test_a_client_that_does_not_read(running, monkeypatch):
    """Pages that nobody takes: the connection ends, and what waits in memory is not more than of a few."""
    monkeypatch.setattr(bounds, "SLOW_S", 0.3)
    server = running()
    server.clients.append(client := socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(server.address)
    client.setblocking(False)
    waiting = []
    for _ in range(3000):
        with contextlib.suppress(BlockingIOError, ConnectionError):
            client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        waiting += [connection.transport.get_write_buffer_size() for connection in list(server.connections)]
        if waiting and not server.connections:
            break
        time.sleep(0.01)
    assert not server.connections and max(waiting) < 200_000
    assert server.ask()[0] == 200


def test_a_client_that_leaves_while_an_event_is_sent(running):
    """The row is free although nobody asked for the next event, here the first one with text."""
    server, is_sent = running(), asyncio.Event()
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}).encode()
    received = iter([{"type": "http.request", "body": body}])
    path = {"path": "/v1/chat/completions", "root_path": "", "query_string": b""}
    scope = {"type": "http", "method": "POST", "headers": [(b"host", b"localhost")], **path}

    async def receive():
        for message in received:
            return message
        await is_sent.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            is_sent.set()
            await asyncio.Event().wait()  # the client does not read

    Slots.may_draw.clear()
    asyncio.run(server.server.config.app(scope, receive, send))
    Slots.may_draw.set()
    wait_until(lambda: server.engine.counts["answered"] or server.engine.counts["left"])
    assert server.engine.counts["left"] == 1


def test_without_the_key_no_body_is_read(running, fed):
    """A gigabyte that is announced: 401 after the headers, and the connection ends. With the key it is answered."""
    server = running(api_key="secret")
    for announced in ("Content-Length: 1000000000", "Transfer-Encoding: chunked"):
        client = server.connect(head(announced, "Authorization: Bearer other"))
        assert client.recv(12) == b"HTTP/1.1 401" and is_closed(client)
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                client.sendall(b"x" * 10**6)
    assert sum(fed) < 10 * bounds.PIECE
    assert server.ask()[0] == 401 and server.ask(headers={"Authorization": "Bearer secret"})[0] == 200
    assert server.ask(path="/health")[0] == 200 and server.ask(path="/v1/models")[0] == 401


@pytest.mark.parametrize("line", ["Authorization: Bearer secret", "Authorization: Bearer other"])
def test_a_body_that_is_no_http(running, line, capfd):
    """A chunk without a size, while its request is answered or refused: one answer, and no traceback in the log."""
    client = running(api_key="secret").connect(head("Transfer-Encoding: chunked", line) + b"no size\r\n")
    assert all_of(client).count(b"HTTP/1.1 4") == 1 and "Traceback" not in capfd.readouterr().err


def test_what_follows_a_last_request(running, capfd):
    """Data behind HEAD, whose answer has no body, on a connection that it closes: ended without a traceback."""
    server = running()
    assert is_closed(server.connect(b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\nmore"))
    assert server.ask()[0] == 200 and "Traceback" not in capfd.readouterr().err


def test_a_client_that_leaves_before_it_has_asked(running, capfd):
    """In the middle of its request: nothing is submitted, and nothing raised."""
    server = running()
    client = server.connect(head("Content-Length: 9") + b"{")
    wait_until(lambda: any(connection.cycle for connection in server.connections))
    client.close()
    wait_until(lambda: not server.connections)
    assert server.ask()[0] == 200 and server.engine.counts["requests"] == 1
    assert "Traceback" not in capfd.readouterr().err


def test_too_many_are_told_to_come_again(running):
    """One is drawn, two wait, and the next is refused; one that comes when the engine stops is told so."""
    server = running(rows=1, waiting=2)
    with server.held(3):
        assert server.ask() == (429, serve.said_of(429, "too many wait")) and server.retry_after == "1"
        server.engine.stop()
        assert server.ask() == (503, serve.said_of(503, "the server stops"))


@pytest.mark.parametrize("keys, leave", [(dict(rows=4, waiting=1), 0), (dict(rows=1, waiting=2), 2)])
def test_who_waits(running, keys, leave):
    """While one is drawn three come: neither those for whom a row is free, nor those who leave, are in others' way."""
    server, body = running(**keys), b'{"prompt": "a"}'
    with server.held():
        clients = []
        for number in range(3):
            clients.append(server.connect(head(f"Content-Length: {len(body)}") + body))
            counts, heard = server.engine.counts, number + 2
            wait_until(lambda: counts["requests"] + counts["refused"] == heard)  # noqa: B023
            if number < leave:
                clients.pop().close()
                wait_until(lambda: server.engine.waiting[-1].is_left)
    assert all(client.recv(12) == b"HTTP/1.1 200" for client in clients) and server.engine.counts["left"] == leave


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_long(running, is_chunked):
    """30 MB: its sender is told, and none of it is kept."""
    server, piece = running(), b"x" * 10**6
    server.ask()
    tracemalloc.start()
    client = server.connect(head("Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {30 * len(piece)}"))
    for _ in range(30):
        client.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
    client.sendall(b"0\r\n\r\n" if is_chunked else b"")
    said = b""
    while b"}" not in said and (more := client.recv(65536)):  # headers and body come one by one
        said += more
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert b" 400 " in said and b"a request has at most 69,632 bytes" in said and peak < 5e6, peak


def test_half_requests_do_not_delay_the_end(running):
    """SIGTERM while some are half there, one is idle and one is answered: the answer is finished, nobody else is waited
    for, and who comes now is refused."""
    server = running(grace_s=1000)
    clients = [server.connect(half) for half in HALF]
    idle = http.client.HTTPConnection(*server.address)
    idle.request("GET", "/health")
    assert idle.getresponse().read() == b"ok\n"
    server.clients.append(idle)
    with server.held():
        server.server.should_exit = True
        assert all(map(is_closed, clients))
        wait_until(lambda: len(server.connections) == 1)
        with pytest.raises(ConnectionError):
            server.ask()
    server.end()


def test_an_answer_that_does_not_end_in_time(running):
    """After grace_s its connection is ended without it: the client does not take half for the whole."""
    server = running(grace_s=1)
    Slots.may_draw.clear()
    bodies = b'{"prompt": "a"}', b'{"prompt": "a", "stream": true}'
    clients = [server.connect(head(f"Content-Length: {len(body)}") + body) for body in bodies]
    wait_until(lambda: server.engine.counts["requests"] == 2)
    server.server.should_exit = True
    said = b"".join(map(all_of, clients))
    assert b"[DONE]" not in said and b"finish_reason\": \"" not in said
    server.thread.join(600)
    assert not server.thread.is_alive()


@pytest.mark.parametrize("headers, status, keys", [
    ({"Host": "localhost"}, 200, {}), ({"Host": "127.0.0.1:8000"}, 200, {}), ({"Host": "[::1]:80"}, 200, {}),
    ({"Host": "LOCALHOST:1"}, 200, {}), ({"Host": "evil.com"}, 403, {}), ({"Host": "evil.com:8000"}, 403, {}),
    ({"Host": "localhost.evil.com"}, 403, {}), ({"Host": "evil.com#localhost"}, 403, {}), ({"Host": ""}, 403, {}),
    ({"Host": "[::1"}, 403, {}), ({"Host": "localhost:1:2"}, 403, {}), ({"Host": "localhost@evil.com"}, 403, {}),
    ({"Host": "192.168.0.7:8000"}, 200, {"host": "0.0.0.0"}),
    ({"Origin": "http://localhost"}, 200, {}), ({"Origin": "http://evil.com"}, 403, {}), ({"Origin": "null"}, 403, {}),
    ({"Origin": "http://localhost:81"}, 403, {}), ({"Origin": ""}, 403, {}),
    ({"Origin": "https://a.com"}, 200, {"origins": ("https://a.com",)}),
    ({"Origin": "https://b.com"}, 403, {"origins": ("https://a.com",)}),
    ({"Host": "a.com", "Origin": "https://a.com"}, 200, {"origins": ("https://a.com",)}),
])  # fmt: skip
def test_pages_from_elsewhere(running, headers, status, keys):
    """By another name than its own it is not reached (DNS rebinding), nor by a page whose origin is not named."""
    assert running(**keys).ask(headers=headers)[0] == status


def test_an_origin_that_is_named(running):
    """Its browser may ask, with the key too, and shows its page why it is refused without."""
    server = running(origins=("https://a.com",), api_key="secret")
    client = server.connect(
        b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a.com\r\nConnection: close\r\n"
        b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n"
    )
    said = client.recv(65536).lower()
    assert said.startswith(b"http/1.1 200") and b"access-control-allow-origin: https://a.com" in said
    said = all_of(server.connect(head("Origin: https://a.com"))).lower()
    assert said.startswith(b"http/1.1 401") and b"access-control-allow-origin: https://a.com" in said


def test_another_method(running):
    """The answer says which one there is."""
    said = all_of(running().connect(b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    assert said.startswith(b"HTTP/1.1 405") and b"\r\nallow: POST\r\n" in said


def test_a_row_that_fails_is_alone(running, capfd):
    """It gets an error; one that was admitted with it is answered, and so is what comes later. The log says it once."""
    server = running()
    with ThreadPoolExecutor(2) as pool:
        with server.held():
            good, bad = (pool.submit(server.ask, prompt=[number]) for number in (1, FAILS))
            wait_until(lambda: len(server.engine.waiting) == 2)
        assert good.result()[1]["choices"][0]["text"] == "aaa"
        assert bad.result() == (500, serve.said_of(500, "it could not be drawn (IndexError)"))
    assert server.ask()[0] == 200 and server.engine.counts["failed"] == 1 and server.slots.renewed == 1
    assert capfd.readouterr().err.count("IndexError: out of bounds") == 1


def test_a_device_that_fails(running, capfd):
    """All rows have an error, of a stream too; what comes later gets a new cache and its answer."""
    server = running()
    assert server.ask(prompt=[BREAKS])[0] == 500
    status, said = server.ask(prompt=[BREAKS], stream=True)
    assert status == 200 and '"type": "server_error"' in said and "[DONE]" not in said
    assert server.ask()[0] == 200 and server.slots.renewed == 3 and server.engine.counts["failed"] == 2
    assert capfd.readouterr().err.count("RuntimeError: the device is gone") == 2


@pytest.mark.parametrize("ids, reason", [([], "length"), ([2, 5], "length"), ([5, 2], "stop")])
def test_why_an_answer_ended(ids, reason):
    """Its last token is one of the model's ends, or it has as many as it may."""
    text = SimpleNamespace(ids=ids, has_ended=False, ready=SimpleNamespace(generator=SimpleNamespace(ends=[2])))
    assert engine.Answer([], None, text, None).reason == reason


def test_the_engine_draws_and_does_nothing_else(running, monkeypatch):
    """Texts, templates and stops are other threads' work."""
    threads, add, render = set(), ready.Text.add, Tokenizer.encode_prompt
    note = lambda: threads.add(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(ready.Text, "add", lambda self, drawn: (note(), add(self, drawn))[1])
    monkeypatch.setattr(Tokenizer, "encode_prompt", lambda self, messages: (note(), render(self, messages))[1])
    server = running()
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "stop": ["b" * 256] * 16, "max_tokens": 3}
    assert server.ask(body, "/v1/chat/completions")[0] == 200
    assert threads and not any("engine" in name for name in threads)


@pytest.mark.parametrize("template, said", [
    ("{{ 1//0 }}", "ZeroDivisionError: integer division or modulo by zero"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth exceeded"),
    ("{{ 10.0**400 }}", "OverflowError: "),
    ("{{ 'a'.center(10**10) }}", "it takes too much memory"),
    ("{{ 'a' * 10**5 }}", "ValueError: it writes 100000 characters, at most 16928"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it takes too much time"),
    ("{{ messages[7].x.y }}", "UndefinedError: "),
    ("{% if", "TemplateSyntaxError: "),
])  # fmt: skip
def test_a_template_that_does_not_end(running, template, said):
    """One line and 400; a chat with a template that does is answered next."""
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    status, answer = running(template=template).ask(chat, "/v1/chat/completions")
    assert status == 400 and says(f"the chat template … messages ({said}", answer["error"]["message"] + "(")
    assert running().ask(chat, "/v1/chat/completions")[1]["choices"][0]["message"]["content"] == "aaa"


@pytest.mark.parametrize("arguments, message", [
    (["port=70000"], "port = 70000: expected … from 1 to 65535"),
    (["port=0"], "port = 0: expected … from 1 to 65535"),
    (["host="], 'host = "": expected text, not empty'),
    (["api_key="], 'api_key = "": expected text, not empty'),
    (["rows=4097"], "rows = 4097: expected … from 1 to 4096"),
    (["rows=3", "mesh.d=2"], "rows = 3: expected a multiple of 2"),
    (["origins=[https://a.com/]"], 'origins[0] = "https://a.com/": expected an origin'),
    (["origins=['*']"], 'origins[0] = "*": expected an origin'),
    (["origins=[https://A.com]"], 'origins[0] = "https://A.com": expected an origin in lower case'),
    (["host=no.such.host.invalid"], "host=no.such.host.invalid port=8000 cannot be listened on: "),
])  # fmt: skip
def test_keys_that_are_refused(called, arguments, message):
    """They are refused before a model is read."""
    status, _, error = called(serve.main, serve.Serve, "nowhere", *arguments)
    assert status == 1 and says(message, error)


def test_a_port_in_use_and_an_empty_variable(called, monkeypatch):
    """One line each."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        _, _, error = called(serve.main, serve.Serve, "nowhere", f"port={taken.getsockname()[1]}")
        assert "cannot be listened on: OSError: [Errno 98]" in error
    monkeypatch.setenv("CLEARSHARD_API_KEY", "")
    _, _, error = called(serve.main, serve.Serve, "nowhere")
    assert says("CLEARSHARD_API_KEY is empty: set it … or unset it", error)


def test_a_signal_as_soon_as_it_says_where_it_is(called, cat_run, monkeypatch):
    """SIGTERM is not lost before uvicorn takes it."""
    monkeypatch.setattr(serve, "print_line", lambda text: " at http" in text and signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(Server, "main_loop", lambda self: pytest.fail("it goes on"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert called(serve.main, serve.Serve, cat_run, f"port={free_port()}")[0] == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_its_address():
    """As a URL has it."""
    assert serve.Serve(model="a", host="::1").url == "http://[::1]:8000"
