"""Who asks: the middleware that lets in only holders of an API key, and says whose requests those are.

Keys are compared as SHA-256 digests, every one of them each time and in constant time, so that how long a refusal takes
tells nothing. The body of a request without a key is never read.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omnidraft.config import ApiKey
from omnidraft.serving.error_handlers import error

OPEN = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/redoc"})
"""What probes, Prometheus and readers of the document need no key for."""
_CALLER = "omnidraft_caller"


@dataclass(frozen=True, slots=True)
class ApiClient:
    """The holder of a key."""

    name: str
    """Of its share of the queue."""
    tenant: str | None
    """None: each request says its own."""


class ApiKeyAuth:
    """Middleware in front of everything that reads a body."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._callers = [
            (_digest(each.key.get_secret_value()), ApiClient(f"key {number}", each.tenant))
            for number, each in enumerate(keys)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN:
            return await self._app(scope, receive, send)
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        caller = self._holder(key.strip()) if scheme.lower() == "bearer" else None
        if caller is None:
            return await _refusal()(scope, receive, send)
        scope.setdefault("state", {})[_CALLER] = caller
        await self._app(scope, receive, send)

    def _holder(self, key: str) -> ApiClient | None:
        given, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, given):
                found = caller
        return found


def caller(request: Request) -> ApiClient | None:
    """None where no keys are asked for."""
    found: ApiClient | None = getattr(request.state, _CALLER, None)
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def _refusal() -> JSONResponse:
    message = "no such API key; send one as 'Authorization: Bearer KEY'"
    content = error(message, "invalid_request_error", code="invalid_api_key")
    return JSONResponse(content, status_code=401, headers={"WWW-Authenticate": "Bearer"})
