"""The HTTP application: OpenAI's completions and chat completions, health, metrics.

Every response names its snapshot (`system_fingerprint`) and carries what speculation did (`omnidraft`).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.errors import RequestError
from omnidraft.serving.queue import RequestQueue, Ticket
from omnidraft.serving.refusals import BodyLimit, ModelNotServed, add_errors, error
from omnidraft.serving.schemas import ChatRequest, CompletionRequest
from omnidraft.traces.traceparent import accepted

SPARE_THREADS = 8


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target as clients see it."""

    engine: Engine
    fingerprint: str
    """Names all that a text depends on besides the request; see ports.Target."""

    @property
    def name(self) -> str:
        return self.engine.pair.target


@dataclass(frozen=True, slots=True)
class _Shape:
    """How one endpoint's responses look."""

    prefix: str
    kind: str
    field: Callable[[str], dict[str, object]]


COMPLETION = _Shape("cmpl-", "text_completion", lambda text: {"text": text})
CHAT = _Shape("chatcmpl-", "chat.completion", lambda text: {"message": {"role": "assistant", "content": text}})
CHAT_CHUNK = _Shape(
    "chatcmpl-", "chat.completion.chunk", lambda text: {"delta": {"role": "assistant", "content": text}}
)


def application(
    requests: RequestQueue, served: Sequence[ServedModel], settings: WorkerSettings, metrics_text: Callable[[], bytes]
) -> FastAPI:
    """A request chooses one of the served models by `model`; the first answers those that name none."""
    app = FastAPI(
        title="omnidraft",
        description="Speculative decoding across tokenizers.",
        lifespan=partial(_with_threads, len(served) * (settings.max_queue + 1) + SPARE_THREADS),
    )
    respond = _Responder(requests, served, settings)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await respond(request, body, body.max_tokens, COMPLETION, COMPLETION)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await respond(request, body, body.num_new_tokens, CHAT, CHAT_CHUNK)

    @app.get("/v1/models")
    def models() -> dict[str, object]:
        known = [{"id": each.name, "object": "model", "created": 0, "owned_by": "omnidraft"} for each in served]
        return {"object": "list", "data": known}

    @app.get("/healthz")
    @app.get("/readyz")
    def healthy() -> Response:
        if requests.is_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the decoding thread ended"}, status_code=503)

    @app.get("/metrics")
    def metrics() -> Response:
        return PlainTextResponse(metrics_text())

    add_errors(app)
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes)
    return app


@asynccontextmanager
async def _with_threads(num_threads: int, _app: FastAPI) -> AsyncIterator[None]:
    """A thread for every request that may wait, and some for health and metrics meanwhile."""
    to_thread.current_default_thread_limiter().total_tokens = num_threads
    yield


class _Responder:
    """Answers one body, whole or streamed."""

    def __init__(self, requests: RequestQueue, served: Sequence[ServedModel], settings: WorkerSettings) -> None:
        self._requests = requests
        self._served = {each.name: each for each in served}
        self._first = served[0].name
        self._settings = settings

    async def __call__(
        self, request: Request, body: CompletionRequest | ChatRequest, num_new: int, whole: _Shape, chunk: _Shape
    ) -> Response:
        model = self._asked_for(body.model)
        if num_new > self._settings.max_new_tokens:
            raise RequestError(f"max_tokens may be {self._settings.max_new_tokens} at most, got {num_new}")
        traceparent = accepted(request.headers.get("traceparent"))
        question = replace(body.question(self._settings.tenant), traceparent=traceparent)
        ticket = self._requests.submit(model.engine, question)
        gone = asyncio.create_task(_give_up_with_client(request, ticket))
        try:
            if not body.stream:
                return JSONResponse(await run_in_threadpool(self._whole, ticket, whole))
            started = await run_in_threadpool(_Started, ticket)
        finally:
            gone.cancel()
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return StreamingResponse(self._chunks(ticket, started, chunk, include_usage), media_type="text/event-stream")

    def _asked_for(self, name: str | None) -> ServedModel:
        model = self._served.get(self._first if name is None else name)
        if model is None:
            names = ", ".join(repr(known) for known in self._served)
            raise ModelNotServed(f"no model {name!r} here; this worker serves {names}")
        return model

    def _whole(self, ticket: Ticket, shape: _Shape) -> dict[str, object]:
        text, reason = "", None
        for step in ticket.steps():
            text, reason = text + step.text, step.finish_reason
        choice = {"index": 0, "logprobs": None, "finish_reason": reason} | shape.field(text)
        return self._frame(ticket, shape) | {"choices": [choice]} | _usage(ticket)

    def _chunks(self, ticket: Ticket, started: "_Started", shape: _Shape, include_usage: bool) -> Iterator[str]:
        try:
            for text, reason in started.pieces():
                choice = {"index": 0, "finish_reason": reason} | shape.field(text)
                yield _event(self._frame(ticket, shape) | {"choices": [choice]})
            if include_usage:
                yield _event(self._frame(ticket, shape) | {"choices": []} | _usage(ticket))
        except Exception as exc:  # the status line is out: all that is left is to say it in the stream
            yield _event(error(str(exc), "server_error"))
        yield "data: [DONE]\n\n"

    def _frame(self, ticket: Ticket, shape: _Shape) -> dict[str, object]:
        snapshot = ticket.answer.snapshot if ticket.answer else None
        model = self._served[ticket.engine.pair.target]
        return {
            "id": shape.prefix + ticket.question.request_id,
            "object": shape.kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"{snapshot.snapshot_id if snapshot else 'none'}/{model.fingerprint}",
        }


async def _give_up_with_client(request: Request, ticket: Ticket) -> None:
    """Wait until the client goes away, then give its ticket up. The body has been read, nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    ticket.is_abandoned = True


class _Started:
    """A stream whose first step has come, so that a bad request is still a 4xx."""

    def __init__(self, ticket: Ticket) -> None:
        self._steps = ticket.steps()
        self._first = next(self._steps, None)

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        """Text and finish reason of each step; the generator closed early gives the request up."""
        try:
            step = self._first
            while step is not None:
                yield step.text, step.finish_reason
                step = next(self._steps, None)
        finally:
            self._steps.close()  # type: ignore[attr-defined]


def _usage(ticket: Ticket) -> dict[str, object]:
    answer, num_tokens = ticket.answer, ticket.figures.num_tokens
    assert answer is not None
    return {
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": answer.num_prompt_tokens + num_tokens,
        },
        "omnidraft": ticket.figures.summary() | {"snapshot_version": answer.snapshot.version, "seed": str(answer.seed)},
    }


def _event(data: dict[str, object]) -> str:
    return f"data: {json.dumps(data)}\n\n"
