"""Authentication by API key: middleware that admits only holders of a key, and names client and tenant of each request.

Keys are compared as SHA-256 digests, every one of them each time and in constant time, so that the time that a
refusal takes reveals nothing. The body of a request without a key is never read.
"""

import hashlib
import hmac
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omnidraft.config import GROUP_KEYS, ApiKey, WorkerSettings
from omnidraft.errors import RequestError
from omnidraft.serving.error_handlers import FieldRefused, error, error_response

PAGE_PATH = "/"
FILES_PATH = "/page/files/"
"""The prefix of the paths of the page's other files."""
PUBLIC_PATHS = frozenset({"/healthz", "/health", "/readyz", "/openapi.json", "/docs", "/redoc", PAGE_PATH})
"""Paths that need no key: for probes and readers of the document, and the page, which asks for one. Its files need none
either."""
METRICS_PATH = "/metrics"
"""It needs the metrics key where there is one, and no API key."""
API_KEY_HEADER = "x-api-key"
"""The header in which Anthropic's clients send a key."""
METRICS_REFUSAL = "metrics need a key of their own"
_STATE_KEY = "omnidraft_caller"


@dataclass(frozen=True, slots=True)
class ApiClient:
    """The holder of a key."""

    name: str
    """The client in the fair queue."""
    tenant: str | None
    """None: each request names its own tenant."""


class OwnKey:
    """The key that the metrics need, if any."""

    def __init__(self, key: SecretStr | None) -> None:
        self._digest = None if key is None else _digest(key.get_secret_value())

    def admits(self, authorization: str) -> bool:
        """Return whether a request with this Authorization header holds it."""
        return self._digest is None or hmac.compare_digest(_digest(_bearer(authorization)), self._digest)


class ApiKeyAuth:
    """Middleware in front of everything that reads a body."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], metrics_key: SecretStr | None = None) -> None:
        """Without `keys` only metrics are guarded."""
        self._app, self._metrics_key = app, OwnKey(metrics_key)
        self._clients = [
            (_digest(each.key.get_secret_value()), ApiClient(f"key {number}", each.tenant))
            for number, each in enumerate(keys)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, headers = _path(scope), Headers(scope=scope)
        authorization = headers.get("authorization", "")
        if path == METRICS_PATH and not self._metrics_key.admits(authorization):
            return await unauthorized(METRICS_REFUSAL)(scope, receive, send)
        if path in PUBLIC_PATHS or path == METRICS_PATH or path.startswith(FILES_PATH) or not self._clients:
            return await self._app(scope, receive, send)
        client = self._find_client(_bearer(authorization) or headers.get(API_KEY_HEADER, ""))
        if client is None:
            return await unauthorized("no such API key", path)(scope, receive, send)
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


class TenantNames:
    """Decides whose a request is: its key's tenant, else the one that it names, else the worker's."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._default = settings.tenant
        self._taken = frozenset(_folded(each.tenant) for each in settings.api_keys if each.tenant)

    def tenant_of(self, client: ApiClient | None, user: str | None) -> str:
        """Return the tenant of a request whose body names `user`. Raises RequestError."""
        if client is not None and client.tenant is not None:
            return client.tenant
        if user and _folded(user) in self._taken:
            message = "user: this name is the tenant of another API key; send that key, or name another user"
            raise FieldRefused(message, status=403, field="user", code="tenant_taken")
        if user and user.startswith(GROUP_KEYS):
            raise RequestError(f"user: names that begin with {GROUP_KEYS!r} are reserved; name another user")
        return user or self._default


def cache_scope(client: ApiClient | None, address: str, salt: str | None) -> str:
    """Return the scope in which requests reuse each other's keys: a tenant, key or address, and a salt. Different ones
    never give the same text."""
    if client is None:
        return json.dumps(["address", address, salt])
    return json.dumps(["key", client.name, salt] if client.tenant is None else ["tenant", client.tenant, salt])


def _folded(name: str) -> str:
    """Return the name without what readers do not see: case, compatibility forms, format characters, outer spaces."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    return "".join(char for char in plain if unicodedata.category(char) != "Cf").strip()


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _bearer(authorization: str) -> str:
    """Return the key of an Authorization header; empty for another scheme."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def unauthorized(reason: str, path: str = "") -> JSONResponse:
    """Return the response to a request for `path` without the key it needs."""
    message = f"{reason}; send one as 'Authorization: Bearer KEY'"
    content = error(message, "invalid_request_error", code="invalid_api_key")
    return error_response(path, 401, content, {"WWW-Authenticate": "Bearer"})
