"""python -m serve: an OpenAI client against it, many of them, and what it refuses."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).resolve().parents[1]


class Server:
    """`python -m serve` in a process of its own."""

    def __init__(self, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        command = [sys.executable, "-m", "serve", *map(str, arguments), f"port={port}"]
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""})
        end = time.monotonic() + 300
        while time.monotonic() < end and self.process.poll() is None:
            try:
                return self.get("/health") and None
            except OSError:
                time.sleep(0.2)
        raise AssertionError("the server does not answer")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def post(self, path, body, **headers):
        """The status and what is said."""
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def metrics(self):
        return {
            line.split()[0].removeprefix("clearshard_"): int(line.split()[1])
            for line in self.get("/metrics").splitlines()
        }

    def stop(self):
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) in (0, -signal.SIGTERM)


@pytest.fixture(scope="module")
def server(cat_run):
    server = Server(cat_run, "rows=4", "length=64", "waiting=6")
    yield server
    server.stop()


def test_an_openai_client_completes_and_streams(server):
    """The package `openai`, unchanged: a text at once and as it comes, ended by a stop, counted."""
    client = server.client
    given = dict(model="cat", prompt="the cat sat", max_tokens=20, temperature=0)
    whole = client.completions.create(**given)
    assert whole.choices[0].text == " on the mat. the cat" and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (12, 20)
    streamed = [chunk.choices[0] for chunk in client.completions.create(**given, stream=True)]
    assert "".join(each.text for each in streamed) == whole.choices[0].text and streamed[-1].finish_reason == "length"
    stopped = client.completions.create(**given, stop=["mat"])
    assert stopped.choices[0].text == " on the " and stopped.choices[0].finish_reason == "stop"
    assert [each.id for each in client.models.list()] == ["cat"]


@pytest.mark.parametrize("body, message", [
    (b"{", "body: Invalid JSON: EOF while parsing an object at line 1 column 1"),
    (b'{"prompt": "a", "best_of": 3}', "best_of: Extra inputs are not permitted"),
    (b'{"prompt": "a", "temperature": -1}', "temperature: Input should be greater than or equal to 0"),
    (b'{"messages": []}', "expected prompt"),
    (b'{"prompt": [999]}', "prompt: expected ids of the vocabulary, one or more"),
    (b'{"prompt": "a", "max_tokens": 90}', "2 tokens and max_tokens=90: at most 64 together"),
    (b" " * (2**20 + 1), "a request has at most 1,048,576 bytes"),
])  # fmt: skip
def test_what_is_refused(server, body, message):
    """Status 400 and what was wrong, in the form that clients expect."""
    status, said = server.post("/v1/completions", body)
    assert (status, said["error"]["message"]) == (400, message)


def test_answers_beside_others_are_those_alone(server):
    """Twelve requests at once, each with its own seed and filters: rows come and go, the texts stay the same; more
    than can wait are told to come again."""
    requests = [dict(prompt="the cat"[:n], max_tokens=10 + n, temperature=1.5, seed=n, top_p=0.9) for n in range(1, 8)]
    alone = [server.client.completions.create(model="cat", **each).choices[0].text for each in requests]

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20) as client:
            some = [client.completions.create(model="cat", **each) for each in requests * 4]
            return [each.choices[0].text for each in await asyncio.gather(*some)]

    assert asyncio.run(ask()) == alone * 4
    assert server.metrics()["refused"] > 0 and server.metrics()["rows_in_use"] == server.metrics()["waiting"] == 0


def test_a_client_that_leaves_frees_its_row(server):
    """Streams that are closed after a piece leave no row in use."""
    for _ in range(6):
        with server.client.completions.create(model="cat", prompt="the", max_tokens=50, stream=True) as stream:
            next(iter(stream))
    end = time.monotonic() + 30
    while server.metrics()["rows_in_use"] and time.monotonic() < end:
        time.sleep(0.1)
    assert server.metrics()["rows_in_use"] == 0 and server.metrics()["left"] > 0


def test_a_key_is_asked_for(cat_run):
    """With api_key only its bearers are answered; SIGTERM finishes what was begun and ends the server."""
    server = Server(cat_run, "rows=1", "length=64", "api_key=secret")
    body = b'{"prompt": "the cat sat", "max_tokens": 30, "temperature": 0}'
    assert server.post("/v1/completions", body)[0] == 401
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", body, Authorization="Bearer secret"))
    )
    asking.start()
    while not server.metrics().get("requests"):
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    asking.join()
    assert answers[0][0] == 200 and answers[0][1]["choices"][0]["text"].startswith(" on the mat. the cat")
    assert server.process.wait(60) in (0, -signal.SIGTERM)
    server.client.close()
