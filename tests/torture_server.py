"""Attacks a server over its sockets: it answers as before, its memory stays, and it still ends when it is told to.

    python -m tests.torture_server                   # a quarter of an hour
    python -m tests.torture_server minutes=2 seed=1

An attack is a request with an odd value, an odd head, or random bytes, which may be damaged, sent slowly or in part, by
a client that reads all of the answer, a part of it or nothing, leaves or stays. Meanwhile the same questions are asked
again and again, whose answers are known; once a minute the server's memory is printed.
"""

import http.client
import json
import math
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.config import command_line
from runtime.terminal import RunError
from tests.torture_tools import make_inputs
from tools.serve import REQUEST, WITHOUT_EFFECT

HOST, KEY, LONGEST_S, MORE_MB, CLIENTS = "127.0.0.1", "secret", 60, 64, 12
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTIONS = [
    (CHAT, {"messages": [{"role": "user", "content": "fade bed"}], "temperature": 0, "max_tokens": 16}),
    *((TEXT, {"prompt": "ab" * n, "seed": n, "max_tokens": 40, "logprobs": True}) for n in (0, 1, 8)),
    (TEXT, {"prompt": "bead", "seed": 3, "max_tokens": 9, "top_p": 0.9}),  # another program: compiling takes 80 MB
    (TEXT, {"prompt": ["cafe", "dead"], "n": 2, "seed": 5, "max_tokens": 9, "stop": "a"}),
]
KEYS = [*(field["name"] for field in REQUEST.core_schema["schema"]["fields"]), "max_tokens", "unknown", *WITHOUT_EFFECT]
VALUES = [
    True, -1, 0, 1.5, 2**31, 2**63, 10**30, "", "x" * 10**4, "\ud800", "\x00", "bytes \u202e\U0001f600", [], {}, [[]],
    [1] * 3000, [-1], [2**40], [[1], "a"], {"a": 1}, [{"role": "user"}], [{"role": 7, "content": "a"}], 1e-300, 400,
    [{"role": "user", "content": [{"type": "text"}]}], ["a"] * 100, {"include_usage": True}, ["b" * 257], float("nan"),
]  # fmt: skip
BODIES = [
    b"", b"[" * 10**4, b"9" * 5000, b'{"prompt": "a", "prompt": "b"}', b"\xff\xfe", b"null", b'{"prompt": 1e999}',
    b"[" * 400 + b"]" * 400, b'{"a":' * 5000, b'{"prompt": "\\ud800"}', b"{}" * 9, b"x" * 2 * 10**6,
    b'{"prompt": ["a"' + b', "a"' * 10**4 + b"]}",
]  # fmt: skip
MANY = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000
LINES = [
    "Content-Length: -1", "Content-Length: 1e3", "Content-Length: 99999999999999999999", "Content-Length: 5",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Expect: 100-continue", "Upgrade: websocket",
    "Upgrade: h2c", "Host: evil.com", "Origin: http://evil.com", "Authorization: Bearer x", "Connection: close",
    "Cookie: " + "a" * 9000, "a: b\r\n" * 150, "X: \x00", "no colon", " folded", "Content-Type: multipart/form-data",
]  # fmt: skip
STARTS = [
    "GET / HTTP/1.1", "GET /health HTTP/1.0", "GET /metrics HTTP/1.1", "GET /v1/models/../.. HTTP/1.1", "BREW / HTTP",
    "GET http://evil.com/ HTTP/1.1", "OPTIONS * HTTP/1.1", "GET /%00%ff HTTP/1.1", "GET / HTTP/9.9", "HEAD / HTTP/1.1",
    f"PUT {TEXT} HTTP/1.1", "PRI * HTTP/2.0", "CONNECT evil.com:80 HTTP/1.1", "GET /" + "a" * 9000 + " HTTP/1.1", "GET",
    f"POST {CHAT} HTTP/1.1", f"POST {TEXT} HTTP/1.1", "DELETE /v1/models/run HTTP/1.1", "GET /v1/models/run HTTP/1.1",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TortureServer:
    folder: str = "runs/torture_server"  # emptied first; holds the model and the server's log
    seed: int = 0  # of the attacks
    minutes: float = 15.0


def main(config: TortureServer) -> None:
    folder, counts, wrong = Path(config.folder).absolute(), Counter[str](), list[str]()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "inputs").mkdir(parents=True)
    make_inputs(folder / "inputs", random.Random(config.seed))
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    keys = (f"port={port}", f"api_key={KEY}", "rows=4", "waiting=16", "length=64")
    command = [sys.executable, "-m", "tools.serve", str(folder / "inputs/run"), *keys]
    log = folder / "server.log"
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as server:
        try:
            _wait_for(lambda: " at http" in log.read_text() or server.poll() is not None)
            expected = [asked(port, question, counts) for question in QUESTIONS]
            end = time.monotonic() + 60 * config.minutes
            threads = [
                threading.Thread(target=attack, args=(port, random.Random(f"{config.seed} {n}"), end, counts, wrong))
                for n in range(CLIENTS)
            ]
            threads.append(threading.Thread(target=ask, args=(port, expected, end, counts, wrong)))
            for thread in threads:
                thread.start()
            memory = [memory_of(server)]
            while time.monotonic() < end and not wrong:
                time.sleep(min(60, max(end - time.monotonic(), 0)))
                memory.append(memory_of(server))
                print(f"minute {len(memory) - 1}: {memory[-1]:.0f} MB, {counts['attacks']} attacks", flush=True)
            for thread in threads:
                thread.join()
            if not same([asked(port, question, counts) for question in QUESTIONS], expected):
                wrong.append("other answers at the end")
            engine = counted(port)
            if engine["answered"] + engine["left"] != engine["requests"] or "failed" in engine:
                wrong.append(f"answers are lost: {engine}")
            server.send_signal(signal.SIGTERM)
            if server.wait(LONGEST_S) not in (0, -signal.SIGTERM):
                wrong.append(f"the server ends with status {server.returncode}")
        finally:
            server.kill()
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    half = len(memory) // 2  # until then everything has been met, and compiled, once
    if memory[-1] > max(memory[: half + 1]) + MORE_MB:
        wrong.append(f"the memory grows: {memory[half]:.0f} MB after half of the time, {memory[-1]:.0f} at the end")
    wrong += ["a traceback"] if "Traceback" in log.read_text() else []
    if wrong:
        raise RunError("\n".join([*dict.fromkeys(wrong), f"the server's log: {log}"]))
    print(f"the answers are those of before, {counts['questions']}; {memory[0]:.0f} MB, {memory[-1]:.0f} MB at the end")


def _wait_for(condition) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > end:
            raise RunError("the server does not start")
        time.sleep(0.1)


def memory_of(process: subprocess.Popen) -> float:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[0]) / 1024


def counted(port: int) -> dict[str, int]:
    """What the engine has counted, when no row is in use and nobody waits."""
    while True:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=LONGEST_S) as answer:
            words = answer.read().decode().replace("clearshard_", "").split()
        found = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        if not found["rows_in_use"] and not found["waiting"]:
            return found
        time.sleep(0.1)


def asked(port: int, question: tuple[str, dict], counts: Counter) -> list:
    """What a client gets that comes again while too many are there."""
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        client = http.client.HTTPConnection(HOST, port, timeout=LONGEST_S)
        with suppress(ConnectionError, http.client.HTTPException):
            client.request("POST", question[0], json.dumps(question[1]), {"Authorization": f"Bearer {KEY}"})
            answer = client.getresponse()
            said = json.loads(answer.read())
            if answer.status != 429:
                counts["questions"] += 1
                return [answer.status, said.get("choices"), said.get("usage"), said.get("error")]
        client.close()
        time.sleep(0.2)
    return [f"no answer within {LONGEST_S} s"]


def same(said, expected) -> bool:
    """Log probabilities may be rounded otherwise: the rows beside a row decide the shapes of its products."""
    if isinstance(expected, list):
        return isinstance(said, list) and len(said) == len(expected) and all(map(same, said, expected))
    if isinstance(expected, dict):
        return isinstance(said, dict) and said.keys() == expected.keys() and all(
            same(said[key], expected[key]) for key in expected
        )  # fmt: skip
    return math.isclose(said, expected, abs_tol=1e-5) if isinstance(expected, float) else said == expected


def ask(port: int, expected: list, end: float, counts: Counter, wrong: list[str]) -> None:
    while time.monotonic() < end and not wrong:
        for question, answer in zip(QUESTIONS, expected, strict=True):
            if not same(said := asked(port, question, counts), answer):
                wrong.append(f"to {question} the answer is {said}, not {answer}")


def attack(port: int, draw: random.Random, end: float, counts: Counter, wrong: list[str]) -> None:
    staying: deque[socket.socket] = deque(maxlen=25)  # whoever falls out has left
    while time.monotonic() < end and not wrong:
        data, way = drawn(draw), draw.choice(["reads", "reads", "reads", "leaves", "stays", "reads a byte", "slow"])
        counts.update(["attacks"])
        client = socket.create_connection((HOST, port), timeout=LONGEST_S)
        try:
            said = conversation(client, data, way, draw)
        except TimeoutError:
            said = b""
            wrong += (
                [f"nothing is said for {LONGEST_S} s to {data[:1000]!r}"] if client.gettimeout() == LONGEST_S else []
            )
        except OSError:  # it is refused, also while it sends
            said = b""
        counts[f"status {said[9:12].decode()}" if said else "attacks without an answer"] += 1
        if way == "stays":
            staying.append(client)
        else:
            client.close()
        if said and not is_fine(said):
            wrong.append(f"{data[:1000]!r} is answered {said[:1000]!r}")


def drawn(draw: random.Random) -> bytes:
    """A request that is odd in one way or in several, or none at all."""
    if draw.random() < 0.05:
        return draw.choice([draw.randbytes(1), draw.randbytes(10**5), MANY])
    path, known = draw.choice(QUESTIONS)
    body = json.dumps({**known, "stream": draw.random() < 0.3})
    if draw.random() < 0.6:
        body = json.dumps({**json.loads(body), draw.choice(KEYS): draw.choice(VALUES)})
    content = draw.choice(BODIES) if draw.random() < 0.15 else body.encode()
    lines = ["Host: localhost", f"Content-Length: {len(content)}", f"Authorization: Bearer {KEY}", "Connection: close"]
    start = f"POST {path} HTTP/1.1"
    if draw.random() < 0.3:
        lines.insert(draw.randint(0, 3), draw.choice(LINES))
        lines.pop(draw.randrange(5))
    if draw.random() < 0.2:
        start = draw.choice(STARTS)
    data = "\r\n".join([start, *lines, "", ""]).encode("latin-1") + content
    for _ in range(draw.choice([0, 0, 0, 1, 3])):
        place = draw.randrange(len(data))
        data = data[:place] + draw.choice([b"", draw.randbytes(1), draw.randbytes(9), b"\r\n"]) + data[place + 1 :]
    return data[: draw.randint(1, len(data))] if draw.random() < 0.15 else data


def conversation(client: socket.socket, data: bytes, way: str, draw: random.Random) -> bytes:
    """All that is answered, to a client that reads it."""
    size = max(len(data) // 5, 1) if way == "slow" else len(data)
    for start in range(0, len(data), size):
        client.sendall(data[start : start + size])
        time.sleep(0.05 if way == "slow" else 0)
    if way in ("leaves", "stays"):
        return b""
    if way == "reads a byte":
        client.settimeout(draw.uniform(0, 2))
        with suppress(TimeoutError):
            client.recv(1)
        return b""
    client.settimeout(draw.choice([1, 1, 1, LONGEST_S]))  # most are impatient
    said = b""
    while piece := client.recv(65536):
        said += piece
    return said


def is_fine(said: bytes) -> bool:
    """The server was not at fault, and says what is wrong as OpenAI's does; uvicorn says in words what is no HTTP."""
    head, _, body = said.partition(b"\r\n\r\n")
    status = int(head[9:12])
    if status < 400:
        return True
    is_said = body.startswith(b'{"error":{"message":"') or b"Invalid HTTP request received." in body or not body
    return is_said and (status < 500 or status == 503)


if __name__ == "__main__":
    command_line.run(main, TortureServer)
