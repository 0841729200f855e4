"""Authentication by API key: middleware that admits only holders of a key, and names the client of each request.

Keys are compared as SHA-256 digests, every one of them each time and in constant time, so that the time that a
refusal takes reveals nothing. The body of a request without a key is never read.
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

PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/redoc"})
"""Paths that need no key: for probes, Prometheus and readers of the document."""
_STATE_KEY = "omnidraft_caller"


@dataclass(frozen=True, slots=True)
class ApiClient:
    """The holder of a key."""

    name: str
    """The client in the fair queue."""
    tenant: str | None
    """None: each request names its own tenant."""


class ApiKeyAuth:
    """Middleware in front of everything that reads a body."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._clients = [
            (_digest(each.key.get_secret_value()), ApiClient(f"key {number}", each.tenant))
            for number, each in enumerate(keys)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in PUBLIC_PATHS:
            return await self._app(scope, receive, send)
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        client = self._find_client(key.strip()) if scheme.lower() == "bearer" else None
        if client is None:
            return await _unauthorized()(scope, receive, send)
        scope.setdefault("state", {})[_STATE_KEY] = client
        await self._app(scope, receive, send)

    def _find_client(self, key: str) -> ApiClient | None:
        digest, match = _digest(key), None
        for known, client in self._clients:
            if hmac.compare_digest(known, digest):
                match = client
        return match


def authenticated_client(request: Request) -> ApiClient | None:
    """Return the holder of the request's key; None where the worker has no keys."""
    client: ApiClient | None = getattr(request.state, _STATE_KEY, None)
    return client


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def _unauthorized() -> JSONResponse:
    message = "no such API key; send one as 'Authorization: Bearer KEY'"
    content = error(message, "invalid_request_error", code="invalid_api_key")
    return JSONResponse(content, status_code=401, headers={"WWW-Authenticate": "Bearer"})
