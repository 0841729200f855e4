"""The HTTP application: OpenAI's completions and chat completions, health, metrics.

Every response names its snapshot (`system_fingerprint`) and carries what speculation did (`omnidraft`).
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from omnidraft.config import WorkerSettings
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.serving.queue import QueueFull, RequestQueue, Ticket
from omnidraft.serving.schemas import ChatRequest, CompletionRequest

RETRY_AFTER_S = "5"


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
    requests: RequestQueue, model: str, fingerprint: str, settings: WorkerSettings, metrics_text: Callable[[], bytes]
) -> FastAPI:
    """`fingerprint` names all that a text depends on besides the request; see ports.Target."""
    app = FastAPI(title="omnidraft", description="Speculative decoding across tokenizers.")
    respond = _Responder(requests, model, fingerprint, settings)

    @app.post("/v1/completions")
    def completions(body: CompletionRequest) -> Response:
        return respond(body, body.max_tokens, COMPLETION, COMPLETION)

    @app.post("/v1/chat/completions")
    def chat(body: ChatRequest) -> Response:
        return respond(body, body.num_new_tokens, CHAT, CHAT_CHUNK)

    @app.get("/v1/models")
    def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "omnidraft"}]}

    @app.get("/healthz")
    @app.get("/readyz")
    def healthy() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    def metrics() -> Response:
        return PlainTextResponse(metrics_text())

    _add_errors(app, settings.max_body_bytes)
    return app


class _Responder:
    """Answers one body, whole or streamed."""

    def __init__(self, requests: RequestQueue, model: str, fingerprint: str, settings: WorkerSettings) -> None:
        self._requests = requests
        self._model = model
        self._fingerprint = fingerprint
        self._settings = settings

    def __call__(self, body: CompletionRequest | ChatRequest, num_new: int, whole: _Shape, chunk: _Shape) -> Response:
        if body.model not in (None, self._model):
            raise RequestError(f"no model {body.model!r} here; this worker serves {self._model!r}")
        if num_new > self._settings.max_new_tokens:
            raise RequestError(f"max_tokens may be {self._settings.max_new_tokens} at most, got {num_new}")
        ticket = self._requests.submit(body.question(self._settings.tenant))
        if not body.stream:
            return JSONResponse(self._whole(ticket, whole))
        first = _Started(ticket)
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return StreamingResponse(self._chunks(ticket, first, chunk, include_usage), media_type="text/event-stream")

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
        except OmnidraftError as exc:
            yield _event(_error(str(exc), "server_error"))
        yield "data: [DONE]\n\n"

    def _frame(self, ticket: Ticket, shape: _Shape) -> dict[str, object]:
        snapshot = ticket.answer.snapshot if ticket.answer else None
        return {
            "id": shape.prefix + ticket.question.request_id,
            "object": shape.kind,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": f"{snapshot.snapshot_id if snapshot else 'none'}/{self._fingerprint}",
        }


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


def _error(message: str, kind: str, param: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _add_errors(app: FastAPI, max_body_bytes: int) -> None:
    """Every refusal in OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    def invalid(_request: Request, exc: RequestValidationError) -> JSONResponse:
        problem = exc.errors()[0]
        where = ".".join(str(part) for part in problem["loc"] if part != "body") or None
        message = f"{where or 'body'}: {problem['msg']}"
        return JSONResponse(_error(message, "invalid_request_error", where), status_code=400)

    @app.exception_handler(RequestError)
    def refused(_request: Request, exc: RequestError) -> JSONResponse:
        return JSONResponse(_error(str(exc), "invalid_request_error"), status_code=400)

    @app.exception_handler(QueueFull)
    def busy(_request: Request, exc: QueueFull) -> JSONResponse:
        headers = {"Retry-After": RETRY_AFTER_S}
        return JSONResponse(_error(str(exc), "rate_limit_error"), status_code=429, headers=headers)

    @app.exception_handler(OmnidraftError)
    def failed(_request: Request, exc: OmnidraftError) -> JSONResponse:
        return JSONResponse(_error(str(exc), "server_error"), status_code=500)

    @app.middleware("http")
    async def limited(request: Request, call_next):  # type: ignore[no-untyped-def]
        if int(request.headers.get("content-length") or 0) > max_body_bytes:
            message = f"the body may have {max_body_bytes} bytes at most"
            return JSONResponse(_error(message, "invalid_request_error"), status_code=413)
        return await call_next(request)
