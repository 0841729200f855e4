"""The HTTP application: OpenAI's completions and chat completions, health, metrics, and the OpenAPI document of all.

Every response names its snapshot (`system_fingerprint`) and on request has statistics of speculation (`omnidraft`). The
document lists exactly the statuses that each endpoint answers with.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from omnidraft import __version__
from omnidraft.config import WorkerSettings
from omnidraft.serving import response_schemas
from omnidraft.serving.auth import METRICS_PATH, ApiKeyAuth
from omnidraft.serving.error_handlers import BodyLimit, ModelNotServed, add_error_handlers
from omnidraft.serving.page.fleet_stream import Fleet, add_fleet
from omnidraft.serving.page.pass_stream import add_page
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.request_schemas import ChatRequest, CompletionRequest
from omnidraft.serving.response_formats import CHAT, CHAT_CHUNK, COMPLETION
from omnidraft.serving.responses import Responder, ServedModel
from omnidraft.supervised_thread import Supervised, first_problem
from omnidraft.telemetry.metric_definitions import GENERATION_PATHS

__all__ = ["ServedModel", "application"]

_Responses = dict[int | str, dict[str, Any]]

_DESCRIPTIONS = {
    400: "A field is missing, unknown or out of its range, or the body is no JSON.",
    401: "No such key, or none.",
    403: "`user` names the tenant of another API key.",
    404: "No such model here.",
    413: "The body is larger than worker.max_body_bytes.",
    429: "Too many requests wait; Retry-After says when to come again.",
    500: "Decoding failed.",
    503: "The worker is stopping; ask another one.",
}
_NEVER_SENT = "422"
"""The status that FastAPI documents for bodies that do not validate; here they are 400."""


def application(
    requests: RequestQueue,
    served: Sequence[ServedModel],
    settings: WorkerSettings,
    metrics_text: Callable[[], bytes],
    vital: Sequence[Supervised] = (),
    fleet: Fleet | None = None,
) -> FastAPI:
    """Return the application. A request chooses a served model by `model`; the first is the default.

    Args:
        vital: threads that the process cannot do without, beside the queue.
        fleet: what the page shows to holders of `worker.operator_key`.
    """
    app = FastAPI(title="omnidraft", description="Speculative decoding across tokenizers.", version=__version__)
    responder = Responder(requests, served, settings)
    _add_completions(app, responder)
    if settings.page:
        add_page(app, responder, requests)
    if settings.page and settings.operator_key is not None and fleet is not None:
        add_fleet(app, fleet, settings.operator_key, lambda: requests.is_open)
    _add_models(app, served)
    _add_health(app, requests, vital, metrics_text)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes)
    if settings.api_keys or settings.metrics_key is not None:
        app.add_middleware(ApiKeyAuth, keys=settings.api_keys, metrics_key=settings.metrics_key)
    _correct_openapi(app, has_keys=bool(settings.api_keys), has_metrics_key=settings.metrics_key is not None)
    return app


def _add_completions(app: FastAPI, respond: Responder) -> None:
    @app.post(
        "/v1/completions",
        responses=_completion_responses(response_schemas.Completion, response_schemas.Completion),
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, as it is."""
        return await respond(request, body, COMPLETION, COMPLETION)

    @app.post(
        "/v1/chat/completions",
        responses=_completion_responses(response_schemas.ChatCompletion, response_schemas.ChatChunk),
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer messages, in the target's own chat template."""
        return await respond(request, body, CHAT, CHAT_CHUNK)


def _add_models(app: FastAPI, served: Sequence[ServedModel]) -> None:
    known = {each.name: response_schemas.Model(id=each.name) for each in served}

    @app.get("/v1/models")
    async def models() -> response_schemas.ModelList:
        """List the models that are served here."""
        return response_schemas.ModelList(data=list(known.values()))

    @app.get("/v1/models/{name:path}", responses=_error_responses(404))
    async def model(name: str) -> response_schemas.Model:
        """Return one of the models that are served here."""
        if name not in known:
            raise ModelNotServed(f"no model {name!r} here; this worker serves {', '.join(map(repr, known))}")
        return known[name]


def _add_health(
    app: FastAPI, requests: RequestQueue, vital: Sequence[Supervised], metrics_text: Callable[[], bytes]
) -> None:
    unhealthy: dict[int | str, dict[str, Any]] = {503: {"model": response_schemas.Health, "description": "It is not."}}

    @app.get("/healthz", response_model=response_schemas.Health, responses=unhealthy)
    async def healthy() -> Response:
        """Whether the process does its work; one that does not is to be restarted."""
        return _health(first_problem((requests, *vital)))

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


def _error_responses(*statuses: int) -> _Responses:
    """Return the responses that are errors in OpenAI's shape."""
    return {status: {"model": response_schemas.ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}


def _completion_responses(whole: type[BaseModel], chunk: type[BaseModel]) -> _Responses:
    """Return the responses of an endpoint that answers whole or streamed."""
    stream = {"schema": {"type": "string", "description": f"Server-sent events: {chunk.__name__}, then [DONE]."}}
    ok = {"model": whole, "description": "The answer.", "content": {"text/event-stream": stream}}
    return {200: ok, **_error_responses(400, 404, 413, 429, 500, 503)}


def _correct_openapi(app: FastAPI, *, has_keys: bool, has_metrics_key: bool) -> None:
    """Correct the document that FastAPI generates for this application."""
    generate = app.openapi

    def document() -> dict[str, Any]:
        generated = generate()
        for path, operations in generated["paths"].items():
            for operation in operations.values():
                operation["responses"].pop(_NEVER_SENT, None)
                if has_keys and path.startswith("/v1"):
                    operation["security"] = [{"key": []}]
                    operation["responses"]["401"] = _refused(401)
                if has_keys and path in GENERATION_PATHS:
                    operation["responses"]["403"] = _refused(403)
                if has_metrics_key and path == METRICS_PATH:
                    operation["security"] = [{"metrics_key": []}]
                    operation["responses"]["401"] = _refused(401)
        names = ["key"] * has_keys + ["metrics_key"] * has_metrics_key
        if names:
            generated["components"]["securitySchemes"] = {name: {"type": "http", "scheme": "bearer"} for name in names}
        return generated

    app.openapi = document  # type: ignore[method-assign]


def _refused(status: int) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{response_schemas.ErrorBody.__name__}"}
    return {"description": _DESCRIPTIONS[status], "content": {"application/json": {"schema": schema}}}
