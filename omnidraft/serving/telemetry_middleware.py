"""Middleware that counts and times every response, and makes every request a span.

The span continues the trace of the caller's `traceparent`, and the application reads the span's context from the same
header. It ends with the last byte of the response, also of a streamed one. Paths outside the API share one label,
because anybody can invent them.
"""

import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnidraft.ports import Metrics, NoopSpan, Span, Tracing
from omnidraft.telemetry.metric_definitions import GENERATION_PATHS, TOKENIZATION_PATHS
from omnidraft.traces.trace_context import valid_traceparent

KNOWN_PATHS = (*GENERATION_PATHS, *TOKENIZATION_PATHS, "/v1/models", "/healthz", "/health", "/readyz", "/metrics")
OTHER_PATH = "other"
CLIENT_CLOSED_REQUEST = "499"
"""The code of a request whose client went away before the first byte, as in nginx."""
TRACEPARENT = b"traceparent"


class TelemetryMiddleware:
    """An ASGI application that wraps another one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing) -> None:
        self._app, self._metrics, self._tracing = app, metrics, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        span, scope = self._begin_span(scope)
        path = scope["path"] if scope["path"] in KNOWN_PATHS else OTHER_PATH
        code, started = CLIENT_CLOSED_REQUEST, time.perf_counter()

        async def send_and_note_status(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            self._metrics.add("omnidraft_http_responses_total", path=path, code=code)
            self._metrics.observe("omnidraft_http_request_seconds", time.perf_counter() - started, path=path)
            failure = {"error": code} if code.startswith("5") else {}
            span.end(status=int(code), **failure)

    def _begin_span(self, scope: Scope) -> tuple[Span, Scope]:
        """Return the request's span, and the scope with the span's context in place of the caller's."""
        if not self._tracing.is_on or scope["path"] not in GENERATION_PATHS:
            return NoopSpan(None), scope
        parent = _traceparent(scope["headers"])
        span = self._tracing.begin("request", parent=parent, method=scope["method"], path=scope["path"])
        headers = [(name, value) for name, value in scope["headers"] if name != TRACEPARENT]
        if span.context:
            headers.append((TRACEPARENT, span.context.encode()))
        return span, dict(scope) | {"headers": headers}


def _traceparent(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the caller's traceparent; None if it is invalid or there are several."""
    values = [value.decode("latin-1") for name, value in headers if name == TRACEPARENT]
    return valid_traceparent(values[0]) if len(values) == 1 else None
