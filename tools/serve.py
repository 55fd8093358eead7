"""An OpenAI-compatible server for a run, a checkpoint or a published folder.

    python -m tools.serve SmolLM2-135M-Instruct          # http://127.0.0.1:8000, with a page for a conversation
    python -m tools.serve runs/my_chats port=9000 rows=16 mesh.t=2
    curl localhost:8000/v1/completions -d '{"prompt": "HAMLET.", "max_tokens": 50, "stream": true}'

Requests share one cache: a free row takes the next one while others are drawn (continuous batching), so an answer is
the one that it would be alone. `pip install starlette uvicorn`.
"""

import asyncio
import contextlib
import hmac
import html
import importlib
import json
import os
import re
import secrets
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import jax
import pydantic
import pydantic_core
from annotated_types import Interval, MaxLen, MinLen, Predicate

from models.decoding import Drawing, Slots, devices_of_rows
from runtime.config import command_line
from runtime.config.keys import Count, NotEmpty, NotNegative, Seed
from runtime.data.tokenizers import ChatError
from runtime.terminal import RunError, heartbeat, needs_package, print_line, run_errors
from tools.engine import Answer, Engine, JobSlots
from tools.hosts import Calls, from_first, is_first, note
from tools.ready import OnFewerBytes, ReadyModel, Text, ready_model, require_writer, start_mesh

PAGE = Path(__file__).parent / "chat.html"
HEADERS = 100  # a request has at most
OTHERS = 128  # connections besides those whose requests are answered or wait
Port = Annotated[int, Interval(ge=1, lt=2**16), "a whole number from 1 to 65535"]
# As browsers send it; they ask for no path.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+")
Origin = Annotated[str, Predicate(ORIGIN.fullmatch), "an origin in lower case, such as https://chat.example.com"]
Rows = Annotated[int, Interval(ge=1, le=2**12), "a whole number from 1 to 4096"]


@dataclass(frozen=True, kw_only=True)
class Serve(OnFewerBytes):
    WORDS: ClassVar = ("model",)
    IS_SERVER: ClassVar = True

    host: NotEmpty = "127.0.0.1"  # its address; 0.0.0.0: for other machines too, best with an api_key
    port: Port = 8000  # its port
    # Clients must send it as a bearer token; null: the environment's CLEARSHARD_API_KEY, since others see arguments.
    api_key: NotEmpty | None = None
    origins: tuple[Origin, ...] = ()  # other sites whose pages may ask: [https://chat.example.com]
    rows: Rows = 8  # answers that are written at the same time
    length: Count = 2048  # tokens of a prompt and its answer, at most; never more than the model has positions
    waiting: Count = 64  # answers that wait for a row, at most; more are told to come again
    grace_s: Count = 30  # seconds that answers have to end after SIGTERM

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


# == What clients ask for ==============================================================================================
_MOST = "max_tokens", "max_completion_tokens"  # two names, of which the second is the newer
_MAX_TOKENS = pydantic.Field(validation_alias=pydantic.AliasChoices(*_MOST))
Stop = Annotated[str, MinLen(1), MaxLen(256)]
# Values that a client may send because they change nothing. null counts as absent for any key.
WITHOUT_EFFECT: dict[str, list[Any]] = {
    "best_of": [1], "echo": [False], "frequency_penalty": [0], "function_call": ["none", "auto"], "functions": [[]],
    "logit_bias": [{}], "modalities": [["text"]], "presence_penalty": [0], "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"], "store": [False], "suffix": [""], "tool_choice": ["none", "auto"],
    "tools": [[]], "top_logprobs": [0],
}  # fmt: skip
IGNORED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user"}  # whatever their values


@dataclass(frozen=True, kw_only=True)
class Request(Drawing):
    """A request to /v1/completions or /v1/chat/completions: how to draw, and the fields below."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    messages: Annotated[list[dict], MinLen(1)] | None = None
    # null: what the prompt leaves of the server's length, in /v1/completions at most 256
    tokens: Annotated[Count | None, _MAX_TOKENS] = None  # type: ignore[assignment]
    temperature: NotNegative = 1.0
    # null: a new seed for each request; the second of n answers has the next one
    seed: Seed | None = None  # type: ignore[assignment]
    n: Count = 1  # answers for each prompt
    stop: Stop | Annotated[list[Stop], MaxLen(16)] = field(default_factory=list)
    logprobs: pydantic.StrictBool | Literal[0] = False  # those of the drawn tokens; 0 asks for them too
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = field(default_factory=dict)
    model: str | None = None


REQUEST = pydantic.TypeAdapter(Request)


# == The server ========================================================================================================
class Api:
    """The server as an ASGI application."""

    def __init__(self, ready: ReadyModel, engine: Engine, config: Serve):
        from starlette import applications, requests, responses
        from starlette.exceptions import HTTPException
        from starlette.middleware.cors import CORSMiddleware
        from starlette.routing import Route

        self.ready, self.engine, self.config = ready, engine, config
        self.requests, self.responses = requests, responses
        self.name = Path(config.model).resolve().name
        self.most_bytes = 2**16 + 64 * config.length  # a request's most: more is no prompt of that length

        cors: Any = {"allow_origins": config.origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        self.checked = CORSMiddleware(self.check, **cors) if config.origins else self.check
        self.routed = applications.Starlette(
            routes=[
                Route("/v1/completions", partial(self.complete, is_chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self.complete, is_chat=True), methods=["POST"]),
                Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.models),
                Route("/health", self.health), Route("/metrics", self.metrics), Route("/", self.page),
            ],
            exception_handlers={HTTPException: self.unserved},
        )  # fmt: skip

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.checked(scope, receive, send)

    async def check(self, scope: Any, receive: Any, send: Any) -> None:
        refused = self.refusal(self.requests.Request(scope)) if scope["type"] == "http" else None
        await (refused or self.routed)(scope, receive, send)

    def refusal(self, request: Any) -> Any:
        """The answer to a request that is refused unread: without the api_key, or from another site's page, since
        browsers let such pages ask any server on their machine."""
        headers, config, scope = request.headers, self.config, request.scope
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        hosts = [config.host, "localhost", "127.0.0.1", "[::1]", *(url.split("://")[-1] for url in config.origins)]
        is_loopback = config.host in ("localhost", "::1") or config.host.startswith("127.")
        if len(headers) > HEADERS:
            return self.error(431, f"a request has at most {HEADERS} headers")
        if is_loopback and host not in hosts and re.sub(r":\d*$", "", host) not in hosts:
            return self.error(403, f"{host[:100]} is not this server, which listens on {config.host}")
        if origin not in (None, *config.origins) and origin.partition("://")[2] != host:
            return self.error(403, f"pages of {origin[:100]} may not ask: it is not among origins")
        token = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        key = config.api_key or ""  # an empty one is refused when the server starts
        is_open = config.api_key is None or not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS"
        if not is_open and not hmac.compare_digest(token, key.encode()):
            return self.error(401, "expected the server's api_key as a bearer token")
        return None

    # ---- requests

    async def complete(self, request: Any, is_chat: bool) -> Any:
        loop, drawn = asyncio.get_running_loop(), asyncio.Queue[tuple]()

        def put(*piece: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped meanwhile
                loop.call_soon_threadsafe(drawn.put_nowait, piece)

        try:
            asked = await self.asked(request)
            if asked.model not in (None, self.name):
                return self.unknown(asked.model)
            # On a thread, since templates and long texts take their time.
            answers = await asyncio.to_thread(self.answers, asked, is_chat, put)
        except (ValueError, ChatError, RunError) as wrong:
            return self.error(400, str(wrong)[:500])
        except self.requests.ClientDisconnect:
            return self.error(400, "the client left")  # nobody reads this
        if not self.engine.submit(answers):
            is_over = self.engine.stopping or self.engine.has_ended
            status, said = (503, "the server stops") if is_over else (429, "too many wait")
            return self.error(status, said, {"Retry-After": "1"})
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}
        reply = Reply(asked, answers, drawn, head)
        if asked.stream:
            return partial(self.stream, reply)
        return await self.whole(request, reply)

    async def asked(self, request: Any) -> Request:
        """Reads and checks a request's body. Raises ValueError with what is wrong."""
        body = bytearray()
        async for piece in request.stream():
            body += piece[: self.most_bytes + 1 - len(body)]
        if len(body) > self.most_bytes:
            raise ValueError(f"a request has at most {self.most_bytes:,} bytes")
        try:
            content = pydantic_core.from_json(bytes(body))
            if isinstance(content, dict):
                values = {key: content[key] for key in content.keys() - IGNORED if content[key] is not None}
                content = {key: value for key, value in values.items() if value not in WITHOUT_EFFECT.get(key, [])}
                if content.keys() >= {*_MOST} and content[_MOST[0]] != content.pop(_MOST[1]):
                    raise ValueError(f"{' and '.join(_MOST)} differ: expected one of them")
            return REQUEST.validate_python(content)
        except pydantic.ValidationError as wrong:
            first, *others = wrong.errors()
            is_unknown = first["type"] == "unexpected_keyword_argument"
            where, kinds = first["loc"], ["this server does not take it" if is_unknown else first["msg"]]
            if of_kind := [other["msg"] for other in others if where[1:] and other["loc"][:-1] == where[:-1]]:
                where, kinds = where[:-1], [*kinds, *of_kind]  # it may be of several kinds, and is of none
            raise ValueError(f"{'.'.join(map(str, where)) or 'body'}: {', or: '.join(dict.fromkeys(kinds))}") from None
        except ValueError as wrong:
            raise ValueError(f"body: {wrong}") from None

    def answers(self, asked: Request, is_chat: bool, put: Callable) -> list[Answer]:
        """n for each prompt. Raises ValueError, ChatError or RunError with what is wrong."""
        if (asked.messages is None) == is_chat or (asked.prompt is None) != is_chat:
            raise ValueError(f"expected {'messages' if is_chat else 'prompt'}")
        prompts: Any = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        prompts = [asked.prompt] if not prompts or isinstance(prompts[0], int) else prompts
        if len(prompts) * asked.n > self.config.waiting:
            raise ValueError(f"{len(prompts) * asked.n} answers: at most {self.config.waiting} at once")
        stop, answers = [asked.stop] if isinstance(asked.stop, str) else asked.stop, []
        for prompt in [[*map(with_text, asked.messages or ())]] if is_chat else prompts:
            ids = self.ready.ids_of(prompt)
            left = max(self.config.length - len(ids), 1)
            tokens = asked.tokens or (left if is_chat else min(left, 256))
            if len(ids) + tokens > self.config.length:
                most = f"at most {self.config.length} together"
                raise ValueError(f"{len(ids)} tokens and max_tokens={tokens}: {most}")
            for number in range(asked.n):
                seed = secrets.randbits(32) if asked.seed is None else (asked.seed + number) % 2**32
                text = Text(self.ready, self.ready.chat_stops(stop)) if is_chat else Text(self.ready, stop, ids)
                answers.append(Answer(ids, replace(asked, tokens=tokens, seed=seed), text, put))
        return answers

    # ---- answers

    async def whole(self, request: Any, reply: "Reply") -> Any:
        """All of the answers; none if the client leaves."""
        first = reply.answers[0]

        async def watch() -> None:
            while not await request.is_disconnected():
                await asyncio.sleep(0.2)
            first.put(first, "the client has left")

        watching, texts, choices = asyncio.create_task(watch()), [""] * len(reply.answers), []
        try:
            async for number, piece, _ in reply.pieces():
                texts[number] += piece
        except RunError as error:
            return self.error(500, str(error))
        finally:
            watching.cancel()
            reply.close()
        for number, (text, answer) in enumerate(zip(texts, reply.answers)):
            said = {"message": {"role": "assistant", "content": text}} if reply.is_chat else {"text": text}
            logprobs = self.logprobs(reply, answer, 0)
            choices.append({"index": number, "finish_reason": answer.reason, "logprobs": logprobs, **said})
        return self.responses.JSONResponse({**reply.head, "choices": choices, "usage": reply.usage()})

    async def stream(self, reply: "Reply", *asgi: Any) -> None:
        """Sends the answers as they come, until the client leaves: perhaps while an event waits to be sent."""
        with contextlib.closing(reply):
            await self.responses.StreamingResponse(self.events(reply), media_type="text/event-stream")(*asgi)

    async def events(self, reply: "Reply") -> AsyncIterator[str]:
        """The answers as server-sent events."""
        is_chat, counts = reply.is_chat, reply.asked.stream_options.get("include_usage")
        head = {**reply.head, "object": "chat.completion.chunk"} if is_chat else reply.head

        def event(number: int, said: dict, reason: str | None = None, logprobs: dict | None = None) -> str:
            said = {"delta": said} if is_chat else {"text": "", **said}
            choice = {"index": number, "finish_reason": reason, "logprobs": logprobs, **said}
            return f"data: {json.dumps({**head, 'choices': [choice], **({'usage': None} if counts else {})})}\n\n"

        for number in range(len(reply.answers) if is_chat else 0):
            yield event(number, {"role": "assistant", "content": ""})
        try:
            async for number, piece, before in reply.pieces():
                logprobs = self.logprobs(reply, reply.answers[number], before)
                if piece or logprobs:
                    yield event(number, {"content" if is_chat else "text": piece}, None, logprobs)
        except RunError as error:
            yield f"data: {json.dumps(said_of(500, str(error)))}\n\n"
            return
        for number, answer in enumerate(reply.answers):
            yield event(number, {}, answer.reason)
        if counts:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': reply.usage()})}\n\n"
        yield "data: [DONE]\n\n"

    def logprobs(self, reply: "Reply", answer: Answer, since: int) -> dict | None:
        """The log probabilities of an answer's tokens from this one on, if asked for."""
        tokens = [self.ready.require_tokenizer().decode_behind([token]) for token in answer.text.ids[since:]]
        if reply.asked.logprobs is False or not tokens:
            return None
        values = [max(-9999.0, value) for value in answer.text.log_probs[since:]]  # JSON has no infinity
        if reply.is_chat:
            return {"content": [{"token": t, "logprob": v, "top_logprobs": []} for t, v in zip(tokens, values)]}
        return {"tokens": tokens, "token_logprobs": values}

    def error(self, status: int, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> Any:
        """An error that ends the connection, so that nobody reads the rest of the body."""
        return self.responses.JSONResponse(said_of(status, message), status, {"Connection": "close", **headers})

    def unserved(self, _: Any, error: Any) -> Any:
        """An error of Starlette's: 404, or 405 with the methods that there are."""
        return self.error(error.status_code, error.detail, error.headers or {})

    # ---- about the server

    async def models(self, request: Any) -> Any:
        """All models, or the one that is named."""
        about = {"id": self.name, "object": "model", "created": 0, "owned_by": "clearshard"}
        if (name := request.path_params.get("name", self.name)) != self.name:
            return self.unknown(name)
        is_one = "name" in request.path_params
        return self.responses.JSONResponse(about if is_one else {"object": "list", "data": [about]})

    def unknown(self, name: str) -> Any:
        return self.error(404, f"there is no model {name[:100]} here, but {self.name}")

    async def health(self, _: Any) -> Any:
        if self.engine.has_ended:
            return self.error(503, "the engine has ended")
        return self.responses.PlainTextResponse("ok\n")

    async def metrics(self, _: Any) -> Any:
        in_use = sum(map(bool, self.engine.answers))
        now = {**self.engine.counts, "rows_in_use": in_use, "waiting": len(self.engine.waiting)}
        return self.responses.PlainTextResponse("".join(f"clearshard_{key} {value}\n" for key, value in now.items()))

    async def page(self, _: Any) -> Any:
        return self.responses.HTMLResponse(PAGE.read_text(encoding="utf-8").replace("MODEL", html.escape(self.name)))


@dataclass(eq=False)
class Reply:
    """The reply to a request: its answers, and the head with which all parts begin."""

    asked: Request
    answers: list[Answer]
    drawn: asyncio.Queue
    head: dict[str, Any]

    def __post_init__(self) -> None:
        self.left = set(self.answers)

    @property
    def is_chat(self) -> bool:
        return self.asked.messages is not None

    async def pieces(self) -> AsyncIterator[tuple[int, str, int]]:
        """New pieces of the answers, as they come: the answer's number, text, and how many tokens it had before. Raises
        RunError where one could not be drawn."""
        while self.left:
            answer, new = await self.drawn.get()
            if isinstance(new, str):
                raise RunError(new)
            if answer not in self.left:  # what was drawn behind a stop
                continue
            before, piece = len(answer.text.ids), answer.text.end() if new is None else answer.text.add(new)
            if new is None or answer.text.has_ended:
                self.left.remove(answer)
            yield self.answers.index(answer), piece, before

    def close(self) -> None:
        """Nobody reads the answers that are left."""
        for answer in self.left:
            answer.is_left = True

    def usage(self) -> dict[str, int]:
        """The tokens of all answers; a prompt counts once."""
        prompt = sum(len(answer.ids) for answer in self.answers[:: self.asked.n])
        completion = sum(len(answer.text.ids) for answer in self.answers)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def with_text(message: dict) -> dict:
    """A message whose content is text, where it comes in parts. Raises ValueError where a part is none."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError('messages: expected content as text, or as parts {"type": "text", "text": ...}')
    return {**message, "content": "".join(part["text"] for part in parts)}


def said_of(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind}}


# == All of it =========================================================================================================
def server_of(api: Api) -> Any:
    """The uvicorn.Server, within bounds of its own settings and of tools/connection.py."""
    import uvicorn

    from tools.connection import Connection

    most = api.config.rows + api.config.waiting + OTHERS
    http: Any = partial(Connection, most=most, grace_s=api.config.grace_s)
    return uvicorn.Server(uvicorn.Config(api, http=http, ws="none", log_level="error", backlog=OTHERS))


def main(config: Serve) -> None:
    """Answers until it is interrupted; then finishes what it has begun."""
    with needs_package("serving", "uvicorn", "pip install starlette uvicorn"):
        importlib.import_module("uvicorn")
    config = replace(config, api_key=config.api_key or os.environ.get("CLEARSHARD_API_KEY"))
    if config.api_key == "":
        raise RunError("the environment's CLEARSHARD_API_KEY is empty: set it to a key, or unset it")
    with jax.set_mesh(mesh := start_mesh(config)), contextlib.ExitStack() as opened:
        listeners: list[socket.socket] = []
        from_first(lambda: listeners.append(opened.enter_context(listener(config))))
        if config.rows % devices_of_rows():
            text = f"a multiple of {devices_of_rows()}, the devices that share them"
            raise RunError(f"rows = {config.rows}: expected {text}")
        with heartbeat(2, note):
            ready = ready_model(config)
        require_writer(ready.source)
        if ready.tokenizer is None:
            raise RunError(f"{config.model} has no tokenizer, which a server needs: answers are text")
        if hasattr(ready.source.model, "positions"):
            config = replace(config, length=ready.at_most(config.length))
        slots = Calls(JobSlots(partial(Slots, ready.generator, config.rows, config.length, config.length + 1)))
        if not is_first():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the first process ends it
            return slots.follow(Exception)
        if ready.is_chatml:
            print_line(f"{config.model}: chats are written as ChatML.")
        engine = Engine(slots, mesh, config.rows, config.waiting)
        server = server_of(Api(ready, engine, config))
        # Now, and once more when uvicorn, which raises it at its end, has ended: the other processes must hear of that.
        signal.signal(signal.SIGTERM, server.handle_exit)
        engine.start()
        print_line(f"{config.model} at {config.url} ({config.rows} answers at a time); Ctrl-C ends it.")
        try:
            server.run(listeners)
        finally:
            engine.stop()
            engine.join()
            slots.end()


def listener(config: Serve) -> socket.socket:
    """Clients that connect before the model is ready wait for it. Raises RunError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with run_errors(f"host={config.host} port={config.port} cannot be listened on"):
        return socket.create_server((config.host, config.port), family=family)


if __name__ == "__main__":
    command_line.run(main, Serve)
