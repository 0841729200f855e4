"""Around the HTTP application: every response is counted and timed, every request is a span.

The span goes on from the caller's `traceparent`, and the application finds its context in that header. It ends with the
last byte of the response, streamed ones too. Only the paths of the API are told apart: others are strangers' guesses.
"""

import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnidraft.ports import Metrics, NoopSpan, Span, Tracing
from omnidraft.telemetry.metric_definitions import GENERATION_PATHS
from omnidraft.traces.trace_context import accepted

KNOWN = (*GENERATION_PATHS, "/v1/models", "/healthz", "/readyz", "/metrics")
OTHER = "other"
GONE = "499"
"""Code of a request whose client went away before the first byte, as nginx has it."""
TRACEPARENT = b"traceparent"


class TelemetryMiddleware:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing) -> None:
        self._app, self._metrics, self._tracing = app, metrics, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        span, scope = self._begun(scope)
        path = scope["path"] if scope["path"] in KNOWN else OTHER
        code, started = GONE, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.add("omnidraft_http_responses_total", path=path, code=code)
            self._metrics.observe("omnidraft_http_request_seconds", time.perf_counter() - started, path=path)
            failure = {"error": code} if code.startswith("5") else {}
            span.end(status=int(code), **failure)

    def _begun(self, scope: Scope) -> tuple[Span, Scope]:
        """The request's span, and the scope with its context in the place of the caller's."""
        if not self._tracing.is_on or scope["path"] not in GENERATION_PATHS:
            return NoopSpan(None), scope
        parent = _traceparent(scope["headers"])
        span = self._tracing.begin("request", parent=parent, method=scope["method"], path=scope["path"])
        headers = [(name, value) for name, value in scope["headers"] if name != TRACEPARENT]
        if span.context:
            headers.append((TRACEPARENT, span.context.encode()))
        return span, dict(scope) | {"headers": headers}


def _traceparent(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Of several headers none is trusted."""
    given = [value.decode("latin-1") for name, value in headers if name == TRACEPARENT]
    return accepted(given[0]) if len(given) == 1 else None
