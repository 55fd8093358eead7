"""python -m tools.serve: an OpenAI client against it, many of them, and what it refuses."""

import asyncio
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import httpx
import openai
import pytest
from browser import ENTER, browser
from pages import ROOT
from parts import says
from several_hosts import free_port, wait_until

from tools import serve


class Server:
    """`python -m tools.serve` in a process of its own, and clients of it."""

    def __init__(self, *arguments):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=600)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.complete = functools.partial(self.client.completions.create, model="cat")
        self.chat = functools.partial(self.client.chat.completions.create, model="cat")
        command = [sys.executable, "-m", "tools.serve", *map(str, arguments), f"port={port}"]
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""})
        wait_until(self.answers, limit_s=300)

    def answers(self):
        assert self.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health").text == "ok\n"

    def metrics(self):
        lines = map(str.split, self.http.get("/metrics").text.splitlines())
        return {name.removeprefix("clearshard_"): int(number) for name, number in lines}

    def idle(self):
        """What it has counted, when no row is in use and nobody waits."""
        wait_until(lambda: not (metrics := self.metrics())["rows_in_use"] and not metrics["waiting"])
        return self.metrics()

    def stop(self):
        self.client.close()
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(600) in (0, -signal.SIGTERM)


@pytest.fixture(scope="module")
def server(cat_run):
    server = Server(cat_run, "rows=4", "length=300", "waiting=6")
    yield server
    server.stop()


def test_an_openai_client_completes_and_streams(server):
    """The package `openai`, unchanged: a text at once and as it comes, counted; none has left. With include_usage the
    last event of a stream has the counts of the whole answer; without there is none."""
    before, given = server.idle(), dict(prompt="the cat sat", max_tokens=20, temperature=0)
    whole = server.complete(**given)
    assert whole.choices[0].text == " on the mat. the cat" and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (12, 20)
    *chunks, last = server.complete(**given, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == whole.usage
    for streamed in (chunks, [*server.complete(**given, stream=True)]):
        assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
        assert streamed[-1].choices[0].finish_reason == "length"
        assert all(chunk.usage is None for chunk in streamed)
    assert [model.id for model in server.client.models.list()] == ["cat"]
    counted = server.idle()
    assert counted.get("left", 0) == before.get("left", 0) and counted["answered"] == before.get("answered", 0) + 3


SAMPLED = dict(prompt="the cat", max_tokens=8, temperature=1.5, seed=3)
WITHOUT_EFFECT = dict(
    best_of=1, echo=False, frequency_penalty=0, logit_bias={}, presence_penalty=0.0, suffix=None, user="me",
)  # fmt: skip
CHAT_WITHOUT_EFFECT = dict(
    frequency_penalty=0, function_call="none", functions=[], logit_bias={}, logprobs=False, metadata={"run": "first"},
    modalities=["text"], parallel_tool_calls=True, presence_penalty=0, prompt_cache_key="cat",
    response_format={"type": "text"}, safety_identifier="me", service_tier="auto", store=False, tool_choice="none",
    tools=[], top_logprobs=0, user="me", max_tokens=None,
)  # fmt: skip
OTHERS_WITHOUT_EFFECT = dict(
    function_call="auto", parallel_tool_calls=False, service_tier="default", tool_choice="auto", tools=[]
)


def test_parameters_without_effect(server):
    """Values that change nothing are taken; max_completion_tokens is the newer name of max_tokens, and the
    two may be equal."""
    expected, given = server.complete(**SAMPLED), server.complete(**SAMPLED, **WITHOUT_EFFECT)
    assert given.choices == expected.choices and given.usage == expected.usage
    create = functools.partial(server.chat, messages=[{"role": "user", "content": "the cat"}], seed=3)
    expected = create(max_tokens=8)
    for more in (CHAT_WITHOUT_EFFECT, OTHERS_WITHOUT_EFFECT):
        given = create(max_completion_tokens=8, **more)
        assert given.choices == expected.choices and given.usage.completion_tokens == 8
    assert create(max_tokens=8, max_completion_tokens=8).choices == expected.choices


def test_without_a_number_of_tokens(server):
    """A chat's answer goes on up to the server's length, another text has at most 256 tokens."""
    text = server.complete(prompt="the cat sat", temperature=0)
    chat = server.chat(messages=[{"role": "user", "content": "the cat"}], temperature=0)
    assert {text.choices[0].finish_reason, chat.choices[0].finish_reason} == {"length"}
    assert text.usage.completion_tokens == 256 and chat.usage.total_tokens == 300


def texts_of(completion):
    return [choice.text for choice in completion.choices]


def test_several_answers(server):
    """A list of prompts, as texts or as ids, and n: each answer is that of a request of its own, whose seed is the next
    one. A prompt counts once."""
    create = functools.partial(server.complete, max_tokens=6, temperature=1.5)
    alone = [create(prompt=prompt, seed=seed) for prompt in ("the", "on the mat") for seed in (3, 4)]
    texts = [completion.choices[0].text for completion in alone]
    ids = [[0, *(byte + 1 for byte in prompt.encode())] for prompt in ("the", "on the mat")]
    for prompt in (["the", "on the mat"], ids):
        several = create(prompt=prompt, n=2, seed=3)
        assert texts_of(several) == texts and [choice.index for choice in several.choices] == [0, 1, 2, 3]
        assert several.usage.prompt_tokens == 4 + 11 and several.usage.completion_tokens == 4 * 6
    found = [""] * 4
    for chunk in create(prompt=ids, n=2, seed=3, stream=True):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == texts
    for prompt in (ids[0], ["the"]):
        assert texts_of(create(prompt=prompt, seed=3)) == texts[:1]
    chats = server.chat(messages=[{"role": "user", "content": "a"}], n=3, seed=3, max_tokens=4)
    assert len({choice.message.content for choice in chats.choices}) > 1 and len(chats.choices) == 3


def test_an_empty_prompt_begins_with_bos(server):
    """ "" is the token that stands before a text."""
    empty, begun = (server.complete(prompt=prompt, temperature=0, max_tokens=6) for prompt in ("", [0]))
    assert texts_of(empty) == texts_of(begun) and empty.usage.prompt_tokens == 1


def test_log_probabilities(server):
    """Those of the tokens that are drawn are the same at once and as they come; a chat has them in its own form."""
    create = functools.partial(server.complete, prompt="the cat", max_tokens=8, seed=1)
    whole = create(logprobs=0).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text and len(whole.logprobs.token_logprobs) == 8
    assert all(logprob < 0 for logprob in whole.logprobs.token_logprobs)
    assert create(temperature=0, logprobs=0).choices[0].logprobs.token_logprobs[0] > -1.0
    streamed = [chunk.choices[0].logprobs for chunk in create(logprobs=0, stream=True)]
    streamed = [number for logprobs in streamed if logprobs for number in logprobs.token_logprobs]
    assert streamed == whole.logprobs.token_logprobs
    assert create().choices[0].logprobs is None
    (chat,) = server.chat(messages=[{"role": "user", "content": "a"}], logprobs=True, max_tokens=5, seed=1).choices
    content = chat.logprobs.content
    assert "".join(token.token for token in content) == chat.message.content
    assert all(token.logprob < 0 for token in content)
    assert [token.top_logprobs for token in content] == [[]] * 5


def test_a_stop_ends_what_counts(server):
    """Tokens that a burst draws behind a stop are not counted, at once or as they come."""
    given = dict(prompt="the cat sat", max_tokens=20, temperature=0, stop=["mat", "zebra"])
    whole = server.complete(**given, logprobs=0)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" on the ", "stop")
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens) == len(" on the mat")
    *_, last = server.complete(**given, stream=True, stream_options={"include_usage": True})
    assert last.usage == whole.usage


def test_content_in_parts(server):
    """Content that is a list of texts is their concatenation; a picture is refused."""
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    whole, of_parts = (
        server.chat(messages=[{"role": "user", "content": content}], seed=1, max_tokens=6)
        for content in ("the cat", parts)
    )
    assert of_parts.choices == whole.choices
    with pytest.raises(openai.BadRequestError, match="expected content as text, or as parts"):
        server.chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_model_by_its_name(server):
    """/v1/models/NAME; another name is not found, there or in a request, and the message says ours."""
    assert server.client.models.retrieve("cat").id == "cat"
    for call in (
        lambda: server.client.models.retrieve("gpt-4"),
        lambda: server.complete(model="gpt-4", prompt="a"),
        lambda: server.chat(model="gpt-4", messages=[{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no model gpt-4 here, but cat"):
            call()
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        server.client.embeddings.create(model="cat", input="a")


@pytest.mark.parametrize("body, message", [
    (b"{", "body: EOF while parsing an object"),
    (b"", "body: EOF while parsing a value"),
    (b"[" * 80_000, "body: recursion limit exceeded"),
    (b'{"prompt": "\\ud800"}', "body: unexpected end of hex escape"),
    (b'{"prompt": "\xff"}', "body: invalid unicode code point"),
    (b"3", "body: Input should be a dictionary"),
    (b'{"prompt": "a", "best_of": 3}', "best_of: this server does not take it"),
    (b'{"prompt": "a", "logprobs": 5}', "logprobs: … boolean, or: Input should be 0"),
    (b'{"prompt": "a", "temperature": -1}', "temperature: … greater than or equal to 0"),
    (b'{"prompt": "a", "temperature": 1e39}', "temperature: Input should be less than 3402823669209385" + 23 * "0"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature: Input should be a finite number"),
    (b'{"prompt": "a", "stop": ""}', "stop: … at least 1 character, or: … a valid list"),
    (b'{"prompt": "a", "stop": "%0999d"}' % 0, "stop: … at most 256 characters, or: … a valid list"),
    (b'{"prompt": "a", "stop": [%s"a"]}' % (b'"a",' * 16), "stop: … a valid string, or: … at most 16 items"),
    (b'{"messages": [{}]}', "expected prompt"),
    (b'{"messages": []}', "messages: List should have at least 1 item"),
    (b'{"prompt": [999]}', "the ids [999]: expected … from 0 to 256"),
    (b'{"prompt": [-1]}', "the ids [-1]: expected … from 0 to 256"),
    (b'{"prompt": []}', "the ids []: expected one or more"),
    (b'{"prompt": "a", "n": 7}', "7 answers: at most 6 at once"),
    (b'{"prompt": "a", "max_tokens": 299}', "2 tokens and max_tokens=299: at most 300"),
    (b'{"prompt": "a", "max_tokens": 2, "max_completion_tokens": 3}',
     "max_tokens and max_completion_tokens differ: expected one of them"),
    (b" " * 2**20, "a request has at most 84,736 bytes"),
])  # fmt: skip
def test_what_is_refused(server, body, message):
    """Status 400 and what was wrong, in the form that clients expect."""
    refused = server.http.post("/v1/completions", content=body)
    assert refused.status_code == 400 and says(message, refused.json()["error"]["message"])


async def load(server, expected, clients, seconds):
    """Clients that ask again and again; a third of them leaves, while the answer comes or before. Returns how often
    what happened; whatever is not as it should be is raised."""
    happened, end = Counter(), time.monotonic() + seconds

    async def one(client, number):
        rng = random.Random(number)
        while time.monotonic() < end:
            given, text = rng.choice(expected)
            try:
                if number % 6 == 0:
                    async with await client.completions.create(**given, stream=True) as stream:
                        await anext(aiter(stream))
                    happened["left"] += 1
                elif number % 6 == 3:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(client.completions.create(**given), rng.random() / 10)
                    happened["left"] += 1
                else:
                    assert (await client.completions.create(**given)).choices[0].text == text
                    happened["answered"] += 1
            except openai.RateLimitError:
                happened["refused"] += 1
                await asyncio.sleep(0.1)

    # It gives up after 5 s if nothing else is said, in which one thread for all clients may not even get to connect.
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        await asyncio.gather(*(one(client, number) for number in range(clients)))
    return happened


def answers_alone(server):
    """Some requests, each with its own seed and filter, and what each is answered when nobody else asks."""
    requests = [
        dict(model="cat", prompt="the cat sat"[:n], max_tokens=8 * n, temperature=1.5, seed=n, top_p=0.9)
        for n in range(1, 9)
    ]
    return [(request, server.complete(**request).choices[0].text) for request in requests]


def test_clients_that_come_and_leave(server):
    """Eight at once for two seconds: each answer is the one alone, nothing fails but by 429, and no row is lost."""
    before = server.metrics()
    happened = asyncio.run(load(server, answers_alone(server), clients=8, seconds=2))
    counted = {key: number - before.get(key, 0) for key, number in server.idle().items()}
    assert counted["answered"] + counted["left"] == counted["requests"] and counted["answered"] >= happened["answered"]
    assert happened["answered"] > 0 and happened["left"] > 0 and counted["left"] > 0


def test_a_model_without_a_tokenizer_is_not_served(called):
    """It could not say anything."""
    status, _, error = called(serve.main, serve.Serve, ROOT / "tests/models/golden/llama")
    assert status == 1 and says("has no tokenizer, which a server needs", error)


def test_the_page_converses_in_a_browser(server, tmp_path):
    """Two messages typed into the page, in Chromium: what it shows grows and is what a client gets of the same chat;
    of a third, which is too long, it shows the server's reason, and that of an answer that fails on its way. Enter
    sends no word that is still composed, and stops no answer. The page loads nothing from elsewhere, and fits a narrow
    window."""
    with browser(tmp_path) as chromium:
        chromium.open(server.url)
        headings = chromium.script("return [document.title, document.querySelector('h1').textContent]")
        assert headings == ["cat · clearshard", "cat"]
        assert chromium.script("return document.querySelector('link[rel=icon]').href").startswith("data:image/svg")
        chromium.script("""
            const ask = window.fetch;
            window.fetch = (url, given) => ask(url, {...given, body: given.body.replace("0.7", '0, "max_tokens": 48')});
            window.lengths = [];
            const main = document.querySelector("main");
            new MutationObserver(() => window.lengths.push(main.lastChild.textContent.length)).observe(
                main, {childList: true, subtree: true});
        """)
        messages = []
        for text in ("the cat", "on the"):
            messages.append({"role": "user", "content": text})
            chromium.type("textarea", text + ENTER)
            number = len(messages) // 2
            shown = chromium.wait_for(f"""
                return document.querySelector("button").textContent == "Send"
                    && document.querySelectorAll(".assistant")[{number}].textContent
            """)
            told = server.chat(messages=messages, temperature=0, max_tokens=48)
            assert shown == told.choices[0].message.content
            messages.append({"role": "assistant", "content": shown})
        assert len({*chromium.script("return window.lengths")} - {0, 6, 7, 48}) > 0  # between nothing and all of it
        cut = chromium.script("""
            const errors = [...document.querySelectorAll(".error")];
            errors.forEach(error => error.remove());
            return errors.map(error => error.textContent);
        """)
        assert cut == 2 * ["Cut: conversation and answer have the server's length."]
        chromium.script("""
            const text = document.querySelector("textarea");
            const enter = {key: "Enter", bubbles: true, cancelable: true};
            text.value = "a word that is being composed";
            text.dispatchEvent(new KeyboardEvent("keydown", {...enter, isComposing: true}));
            window.ask = window.fetch;
            window.fetch = async () => new Response('data: {"error": {"message": "it could not be drawn"}}\\n\\n');
            text.value = "a";
            for (const _ of "ab") text.dispatchEvent(new KeyboardEvent("keydown", enter));
        """)
        assert chromium.wait_for("return document.querySelector('.error')?.textContent") == "it could not be drawn"
        assert chromium.script("return document.querySelectorAll('.user').length") == 3
        chromium.script("document.querySelector('.error').remove(); window.fetch = window.ask")
        chromium.look(320, 700, "dark")
        chromium.type("textarea", 294 * "a" + ENTER)
        assert "at most 300 together" in chromium.wait_for("return document.querySelector('.error')?.textContent")
        places = [f"document.querySelector('{selector}').getBoundingClientRect()" for selector in (".error", "form")]
        assert chromium.script(f"return {places[0]}.bottom <= {places[1]}.top"), "the form hides the error"
        loaded = chromium.script("return performance.getEntriesByType('resource').map(each => new URL(each.name).host)")
        assert set(loaded) <= {server.url.removeprefix("http://")}
        for width, scheme in ((320, "dark"), (1000, "light")):
            (tmp_path / f"chat_{scheme}.png").write_bytes(chromium.look(width, 700, scheme))
            assert chromium.script("return document.documentElement.scrollWidth <= innerWidth")
