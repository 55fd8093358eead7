"""An OpenAI-compatible server for a run, a checkpoint or a published folder.

    python -m serve SmolLM2-135M-Instruct                     # http://127.0.0.1:8000, with a page for a conversation
    python -m serve runs/my_chats port=9000 rows=16 mesh.t=2 api_key=secret
    curl localhost:8000/v1/completions -d '{"prompt": "HAMLET.", "max_tokens": 50, "stream": true}'

Requests share one cache: a free row takes the next one while others are drawn (continuous batching), so an answer is
the one that it would be alone. `pip install starlette uvicorn`.
"""

import asyncio
import hmac
import json
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import pydantic

from generate import Mesh, Served, Text, serve, start_mesh
from models.decoding import Drawing, Slots
from runtime.config import command_line
from runtime.config.keys import Count, NotEmpty, NotNegative, Seed
from runtime.data.tokenizers import ChatError
from runtime.terminal import RunError, needs_package, print_line

PAGE = Path(__file__).parent / "runtime/chat.html"
BODY_BYTES = 2**20  # of a request, at most


@dataclass(frozen=True, kw_only=True)
class Serve:
    WORDS: ClassVar = ("model",)

    model: str  # a run, a checkpoint, or a published folder
    host: str = "127.0.0.1"  # where it listens; 0.0.0.0: for other machines too, over which an api_key should watch
    port: Count = 8000  # of it
    api_key: str | None = None  # that clients must send as a bearer token
    rows: Count = 8  # answers that are written at the same time
    length: Count = 2048  # tokens of a prompt and its answer, at most
    waiting: Count = 64  # requests that wait for a row, at most; more are told to come again
    compute_dtype: Literal["bfloat16", "float32"] | None = None  # null: the model's; float32 on a CPU
    # Of the layers: int8, in a byte an element, which rounds them; split, over d too, and gathered for each token.
    weights: Literal["int8", "split"] | None = None
    mesh: Mesh = field(default_factory=Mesh)


_MAX_TOKENS = pydantic.Field(validation_alias=pydantic.AliasChoices("max_tokens", "max_completion_tokens"))


@dataclass(frozen=True, kw_only=True)
class Request(Drawing):
    """What /v1/completions and /v1/chat/completions take: how to draw, and what follows; n and those after it are
    taken because clients send them, and have no effect."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")

    prompt: str | list[int] | None = None
    messages: list[dict] | None = None
    tokens: Annotated[Count | None, _MAX_TOKENS] = None  # null: 256, or what the prompt leaves of the server's length
    temperature: NotNegative = 1.0
    seed: Seed | None = None  # null: another for each request
    stop: NotEmpty | list[NotEmpty] | None = None
    stream: bool = False
    n: Literal[1] = 1
    model: str | None = None
    user: str | None = None
    stream_options: dict | None = None


class Answer:
    """A request on its way: what the engine writes, and where its client reads."""

    def __init__(self, ids: list[int], drawing: Drawing, text: Text):
        self.ids, self.drawing, self.text, self.is_left = ids, drawing, text, False
        self.loop, self.pieces = asyncio.get_running_loop(), asyncio.Queue()

    def put(self, piece: str | None) -> None:
        """A piece of text; None: that was all."""
        with suppress(RuntimeError):  # the server has stopped meanwhile
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def read(self) -> AsyncIterator[str]:
        try:
            while (piece := await self.pieces.get()) is not None:
                if piece:
                    yield piece
        finally:
            self.is_left = True  # its row is free, if it has one still

    @property
    def reason(self) -> str:
        ended = self.text.has_ended or (self.text.ids and self.text.ids[-1] in self.text.served.generator.ends)
        return "stop" if ended else "length"


class Engine(threading.Thread):
    """Draws for all requests, on the thread that speaks with the devices."""

    def __init__(self, served: Served, mesh: jax.sharding.Mesh, config: Serve):
        super().__init__(name="engine", daemon=True)
        self.served, self.mesh, self.config = served, mesh, config
        self.waiting: deque[Answer] = deque()
        self.changed, self.stopping, self.has_ended = threading.Condition(), False, False
        self.answers: list[Answer | None] = [None] * config.rows
        self.counts: Counter[str] = Counter()

    def submit(self, answer: Answer) -> bool:
        """False where too many wait already, or the server stops."""
        with self.changed:
            if self.stopping or self.has_ended or len(self.waiting) >= self.config.waiting:
                self.counts["refused"] += 1
                return False
            self.waiting.append(answer)
            self.counts["requests"] += 1
            self.changed.notify()
            return True

    def stop(self) -> None:
        """Ends after what waits and what is drawn."""
        with self.changed:
            self.stopping = True
            self.changed.notify()

    def run(self) -> None:
        try:
            with jax.set_mesh(self.mesh):
                self._run()
        finally:  # of a failure, whose traceback Python prints, clients and /health must learn
            with self.changed:
                self.has_ended = True
            for answer in [*self.waiting, *filter(None, self.answers)]:
                answer.put(None)

    def _run(self) -> None:
        length = self.config.length
        slots = Slots(self.served.generator, self.config.rows, length, length)
        while True:
            with self.changed:
                while not self.waiting and not any(self.answers) and not self.stopping:
                    self.changed.wait()
                if self.stopping and not self.waiting and not any(self.answers):
                    return
                new = {}
                for row in [row for row, answer in enumerate(self.answers) if answer is None]:
                    while self.waiting and self.waiting[0].is_left:
                        self.waiting.popleft().put(None)
                        self.counts["left"] += 1
                    if self.waiting:
                        new[row] = self.answers[row] = self.waiting.popleft()
            if new:
                slots.admit({row: (answer.ids, answer.drawing) for row, answer in new.items()})
            if any(self.answers):
                self._hand_out(slots, slots.advance())

    def _hand_out(self, slots: Slots, burst: list) -> None:
        gone = []
        for row, (answer, drawn) in enumerate(zip(self.answers, burst)):
            if answer is None:
                continue
            self.counts["tokens"] += len(drawn.tokens)
            answer.put(answer.text.add(drawn))
            if answer.is_left or answer.text.has_ended or not slots.left[row]:
                answer.put(answer.text.end())
                answer.put(None)
                self.answers[row] = None
                gone.append(row)
                self.counts["left" if answer.is_left else "answered"] += 1
        if any(slots.left[row] for row in gone):
            slots.drop(gone)


class Api:
    """What the server answers; `application` is the ASGI application."""

    def __init__(self, served: Served, engine: Engine, config: Serve):
        from starlette import requests, responses

        self.served, self.engine, self.config = served, engine, config
        self.requests, self.responses = requests, responses
        self.name, self.seeds = Path(config.model).name, iter(range(2**32))

    def application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            yield
            self.engine.stop()

        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/models", self.models), Route("/health", self.health), Route("/metrics", self.metrics),
            Route("/", self.page),
        ]  # fmt: skip
        return Starlette(routes=routes, lifespan=lifespan)

    # ---- requests

    async def completions(self, request: Any) -> Any:
        return await self.complete(request, is_chat=False)

    async def chat_completions(self, request: Any) -> Any:
        return await self.complete(request, is_chat=True)

    async def complete(self, request: Any, is_chat: bool) -> Any:
        if (refused := self.refusal(request)) is not None:
            return refused
        try:
            given = await self.asked(request)
            ids = self.ids_of(given, is_chat)
            tokens = given.tokens or max(min(256, self.config.length - len(ids)), 1)
            if len(ids) + tokens > self.config.length:
                most = f"at most {self.config.length} together"
                raise ValueError(f"{len(ids)} tokens and max_tokens={tokens}: {most}")
        except (ValueError, ChatError, RunError) as wrong:
            return self.error(400, str(wrong))
        except self.requests.ClientDisconnect:
            return self.error(400, "the client left")  # which nobody reads
        stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
        text = Text(self.served, self.served.chat_stops(stop) if is_chat else stop)
        seed = next(self.seeds) if given.seed is None else given.seed
        answer = Answer(ids, replace(given, tokens=tokens, seed=seed), text)
        if not self.engine.submit(answer):
            is_over = self.engine.stopping or self.engine.has_ended
            said = (503, "the server stops") if is_over else (429, "too many wait")
            return self.error(*said, **{"Retry-After": "1"})
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        if given.stream:
            return self.responses.StreamingResponse(self.events(answer, head, is_chat), media_type="text/event-stream")
        return await self.whole(request, answer, head, is_chat)

    def refusal(self, request: Any) -> Any:
        """Of a request without the api_key, where one is asked for."""
        given, key = request.headers.get("authorization", "").removeprefix("Bearer "), self.config.api_key
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            return self.error(401, "expected the server's api_key as a bearer token")
        return None

    async def asked(self, request: Any) -> Request:
        """Raises ValueError with what is wrong."""
        body = b""
        async for piece in request.stream():
            if len(body := body + piece) > BODY_BYTES:
                raise ValueError(f"a request has at most {BODY_BYTES:,} bytes")
        try:
            return pydantic.TypeAdapter(Request).validate_json(body)
        except pydantic.ValidationError as wrong:
            first = wrong.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from None

    def ids_of(self, given: Request, is_chat: bool) -> list[int]:
        if (given.messages is None) == is_chat or (given.prompt is None) != is_chat:
            raise ValueError(f"expected {'messages' if is_chat else 'prompt'}")
        if isinstance(given.prompt, list):
            if not given.prompt or not all(0 <= each < self.served.source.model.vocab for each in given.prompt):
                raise ValueError("prompt: expected ids of the vocabulary, one or more")
            return given.prompt
        return self.served.ids_of(given.messages if is_chat else given.prompt)

    # ---- answers

    async def whole(self, request: Any, answer: Answer, head: dict, is_chat: bool) -> Any:
        """All of an answer; it is left when its client is."""

        async def watch() -> None:
            while not await request.is_disconnected():
                await asyncio.sleep(0.2)
            answer.is_left = True

        watching = asyncio.create_task(watch())
        try:
            text = "".join([piece async for piece in answer.read()])
        finally:
            watching.cancel()
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        counts = {"prompt_tokens": len(answer.ids), "completion_tokens": len(answer.text.ids)}
        usage = {**counts, "total_tokens": sum(counts.values())}
        choice = {"index": 0, "finish_reason": answer.reason, "logprobs": None, **said}
        kind = "chat.completion" if is_chat else "text_completion"
        return self.responses.JSONResponse({**head, "object": kind, "choices": [choice], "usage": usage})

    async def events(self, answer: Answer, head: dict, is_chat: bool) -> AsyncIterator[str]:
        """An answer as server-sent events."""
        kind = "chat.completion.chunk" if is_chat else "text_completion"

        def event(said: dict, reason: str | None = None) -> str:
            choice = {"index": 0, "finish_reason": reason, **({"delta": said} if is_chat else {"text": "", **said})}
            return f"data: {json.dumps({**head, 'object': kind, 'choices': [choice]})}\n\n"

        if is_chat:
            yield event({"role": "assistant", "content": ""})
        async for piece in answer.read():
            yield event({"content": piece} if is_chat else {"text": piece})
        yield event({}, answer.reason)
        yield "data: [DONE]\n\n"

    def error(self, status: int, message: str, **headers: str) -> Any:
        body = {"error": {"message": message, "type": "invalid_request_error" if status < 500 else "server_error"}}
        return self.responses.JSONResponse(body, status, headers)

    # ---- about the server

    async def models(self, request: Any) -> Any:
        listed = [{"id": self.name, "object": "model", "created": 0, "owned_by": "clearshard"}]
        return self.refusal(request) or self.responses.JSONResponse({"object": "list", "data": listed})

    async def health(self, _: Any) -> Any:
        if self.engine.has_ended:
            return self.error(503, "the engine has ended")
        return self.responses.PlainTextResponse("ok\n")

    async def metrics(self, _: Any) -> Any:
        in_use = sum(map(bool, self.engine.answers))
        now = {**self.engine.counts, "rows_in_use": in_use, "waiting": len(self.engine.waiting)}
        return self.responses.PlainTextResponse("".join(f"clearshard_{key} {value}\n" for key, value in now.items()))

    async def page(self, _: Any) -> Any:
        return self.responses.HTMLResponse(PAGE.read_text(encoding="utf-8"))


def main(config: Serve) -> None:
    """Answers until it is interrupted; then finishes what it has begun."""
    with needs_package("serving", "uvicorn", "pip install starlette uvicorn"):
        import uvicorn
    mesh = start_mesh(config)
    with jax.set_mesh(mesh):
        served = serve(config.model, mesh, config.compute_dtype, config.weights)
    if served.tokenizer is None:
        raise RunError(f"{config.model} has no tokenizer, which a server needs: answers are text")
    if hasattr(served.source.model, "positions") and config.length > served.length:
        raise RunError(f"length = {config.length}: the model knows {served.length} positions, set it to that or less")
    if served.is_chatml:
        print_line(f"{config.model}: chats are written as ChatML.")
    engine = Engine(served, mesh, config)
    engine.start()
    settings = uvicorn.Config(Api(served, engine, config).application(), config.host, config.port, log_level="warning")
    print_line(
        f"{config.model} at http://{config.host}:{config.port}, {config.rows} answers at a time; Ctrl-C ends it."
    )
    uvicorn.Server(settings).run()
    engine.stop()
    engine.join()


if __name__ == "__main__":
    command_line.run(main, Serve)
