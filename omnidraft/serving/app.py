"""The HTTP application: OpenAI's and Anthropic's protocols, health, metrics, and the OpenAPI document of all.

Every response names its snapshot (`system_fingerprint`) and on request has statistics of speculation (`omnidraft`). The
document lists exactly the statuses that each endpoint answers with.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from omnidraft import __version__
from omnidraft.config import WorkerSettings
from omnidraft.serving import response_schemas
from omnidraft.serving.answer import ServedModel
from omnidraft.serving.anthropic_messages.writer import add_messages
from omnidraft.serving.auth import API_KEY_HEADER, METRICS_PATH, ApiKeyAuth
from omnidraft.serving.completion_writer import CompletionWriter
from omnidraft.serving.error_handlers import (
    IGNORED_HEADER,
    REQUEST_ID_HEADERS,
    AnthropicError,
    BodyLimit,
    add_error_handlers,
    is_anthropic,
)
from omnidraft.serving.openai_responses.writer import add_responses
from omnidraft.serving.page.pass_stream import add_page
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.request_schemas import ChatRequest, CompletionRequest
from omnidraft.serving.response_schemas import DESCRIPTIONS, error_responses, generation_responses
from omnidraft.serving.responses import Responder
from omnidraft.serving.tokenization import Tokenization, add_tokenization
from omnidraft.telemetry.metric_definitions import GENERATION_PATHS, TOKENIZATION_PATHS
from omnidraft.threads import Supervised, first_problem

_REASONS: Mapping[str, str] = {
    "/v1/embeddings": "embeddings are not served here: the models generate text. Ask a server with an embedding model",
    "/v1/responses/{rest:path}": "no response is kept: the server is stateless. Send the whole conversation as `input`",
}


__all__ = ["ServedModel", "application"]

_NEVER_SENT = "422"
"""The status that FastAPI documents for bodies that do not validate; here they are 400."""


def application(
    requests: RequestQueue,
    served: Sequence[ServedModel],
    settings: WorkerSettings,
    metrics_text: Callable[[], bytes],
    vital: Sequence[Supervised] = (),
) -> FastAPI:
    """Return the application. A request chooses a served model by `model`; the first is the default.

    Args:
        vital: threads that the process cannot do without, beside the queue.
    """
    app = FastAPI(title="omnidraft", description="Speculative decoding across tokenizers.", version=__version__)
    respond = Responder(requests, served, settings)
    tokenization = Tokenization(respond)
    _add_completions(app, respond)
    add_responses(app, respond)
    add_messages(app, respond, tokenization)
    add_tokenization(app, respond, tokenization)
    for path, reason in _REASONS.items():
        _add_missing(app, path, reason)
    if settings.page:
        add_page(app, respond, requests)
    _add_models(app, served, respond)
    _add_health(app, requests, vital, metrics_text)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes, is_strict=settings.strict_fields)
    if settings.api_keys or settings.metrics_key is not None:
        app.add_middleware(ApiKeyAuth, keys=settings.api_keys, metrics_key=settings.metrics_key)
    app.add_middleware(OtherPaths)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_origin_regex=LOCAL_ORIGINS,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[IGNORED_HEADER, *REQUEST_ID_HEADERS],
    )
    _correct_openapi(app, has_keys=bool(settings.api_keys), has_metrics_key=settings.metrics_key is not None)
    return app


LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Pages that this machine serves itself may ask, as with Ollama."""


class OtherPaths:
    """Middleware that leads paths without /v1, or with a slash at their end, where clients mean to go."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/") or "/"
            known = f"/v1{path}"
            scope["path"] = known if known in GENERATION_PATHS or path == "/models" else path
        await self._app(scope, receive, send)


def _add_completions(app: FastAPI, respond: Responder) -> None:
    @app.post(
        "/v1/completions",
        responses=generation_responses("Completion, then [DONE]", response_schemas.Completion),
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, as it is."""
        return await respond(request, body, CompletionWriter)

    @app.post(
        "/v1/chat/completions",
        responses=generation_responses("chat.completion.chunk objects, then [DONE]", response_schemas.ChatCompletion),
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer messages, in the target's own chat template."""
        return await respond(request, body, CompletionWriter)


def _add_missing(app: FastAPI, path: str, reason: str) -> None:
    """Add a route that refuses every request with the reason; the OpenAPI document does not have it."""

    @app.api_route(path, methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def refuse() -> None:
        raise HTTPException(404, reason)


def _add_models(app: FastAPI, served: Sequence[ServedModel], respond: Responder) -> None:
    now = int(time.time())

    def shown(each: ServedModel) -> response_schemas.Model:
        limit = each.engine.decoder.target.context_limit
        return response_schemas.Model(id=each.name, created=now, max_model_len=limit)

    @app.get("/v1/models")
    async def models() -> response_schemas.ModelList:
        """List the models that are served here."""
        return response_schemas.ModelList(data=list(map(shown, served)))

    @app.get("/v1/models/{name:path}", responses=error_responses(404))
    async def model(name: str) -> response_schemas.Model:
        """Return one of the models that are served here."""
        return shown(respond.model(name))


def _add_health(
    app: FastAPI, requests: RequestQueue, vital: Sequence[Supervised], metrics_text: Callable[[], bytes]
) -> None:
    unhealthy: dict[int | str, dict[str, Any]] = {503: {"model": response_schemas.Health, "description": "It is not."}}

    @app.get("/healthz", response_model=response_schemas.Health, responses=unhealthy)
    async def healthy() -> Response:
        """Whether the process does its work; one that does not is to be restarted."""
        return _health(first_problem((requests, *vital)))

    app.get("/health", response_model=response_schemas.Health, responses=unhealthy, include_in_schema=False)(healthy)

    @app.get("/readyz", response_model=response_schemas.Health, responses=unhealthy)
    async def ready() -> Response:
        """Whether it takes requests."""
        return _health(requests.problem or (None if requests.is_open else "stopping"))

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return PlainTextResponse(metrics_text())


def _health(problem: str | None) -> Response:
    return JSONResponse({"status": problem or "ok"}, status_code=503 if problem else 200)


def _correct_openapi(app: FastAPI, *, has_keys: bool, has_metrics_key: bool) -> None:
    """Correct the document that FastAPI generates for this application."""
    generate = app.openapi

    def document() -> dict[str, Any]:
        generated = generate()
        for path, operations in generated["paths"].items():
            for operation in operations.values():
                operation["responses"].pop(_NEVER_SENT, None)
                if has_keys and (path.startswith("/v1") or path in TOKENIZATION_PATHS):
                    operation["security"] = [{"key": []}, *[{"x_api_key": []}] * is_anthropic(path)]
                    operation["responses"]["401"] = _refused(401, path)
                if has_keys and path in GENERATION_PATHS:
                    operation["responses"]["403"] = _refused(403, path)
                if has_metrics_key and path == METRICS_PATH:
                    operation["security"] = [{"metrics_key": []}]
                    operation["responses"]["401"] = _refused(401, path)
        if has_keys or has_metrics_key:
            generated["components"]["securitySchemes"] = _security_schemes(has_keys, has_metrics_key)
        return generated

    app.openapi = document  # type: ignore[method-assign]


def _security_schemes(has_keys: bool, has_metrics_key: bool) -> dict[str, Any]:
    names = ["key"] * has_keys + ["metrics_key"] * has_metrics_key
    schemes: dict[str, Any] = {name: {"type": "http", "scheme": "bearer"} for name in names}
    if has_keys:
        schemes["x_api_key"] = {"type": "apiKey", "in": "header", "name": API_KEY_HEADER}
    return schemes


def _refused(status: int, path: str) -> dict[str, Any]:
    body = AnthropicError if is_anthropic(path) else response_schemas.ErrorBody
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"description": DESCRIPTIONS[status], "content": {"application/json": {"schema": schema}}}
