"""Errors in OpenAI's shape or Anthropic's, and the middleware that refuses bodies that are too large or too deep."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnidraft.decode.sampling.input_limits import BODY_LIMITS
from omnidraft.errors import ContextExceeded, OmnidraftError, RequestError
from omnidraft.serving.body_model import collecting_ignored
from omnidraft.serving.queued_request import Abandoned, QueueFull, Stopping
from omnidraft.serving.response_schemas import error

logger = logging.getLogger(__name__)

STOPPING_RETRY_S = "1"
"""Clients may retry at once: another worker takes the request."""
REQUEST_ID_HEADERS = ("x-request-id", "request-id")
"""The headers in which OpenAI's and Anthropic's clients look for the id of a request."""
REQUEST_ID = "omnidraft_request_id"
"""Of a request's state."""
IGNORED_HEADER = "x-omnidraft-ignored"
"""It names the parts of a request that were left out."""
MAX_HEADER_CHARS = 1_000
MAX_TOLD = 1_000
"""Pairs of a client and a name that the log remembers."""
CLIENT_CLOSED_REQUEST = 499
"""The status that nginx logs for a client that closed its connection."""


MESSAGES_PATH = "/v1/messages"

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


THREAD_REFUSED = "thread_unsupported_request"
"""The code by which Anthropic's client knows that it has to send conversations whole."""


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None
    """Of a refused thread: `error_code` and `unsupported`, as Anthropic's client reads them."""


class AnthropicError(BaseModel):
    """The body of every 4xx and 5xx of Anthropic's paths."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


def is_anthropic(path: str) -> bool:
    """Return whether clients of Anthropic's ask this path."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def anthropic_error(status: int, content: Mapping[str, Any]) -> dict[str, object]:
    """Return an error of OpenAI's shape in Anthropic's."""
    detail = AnthropicErrorDetail(type=_TYPES.get(status, "invalid_request_error"), message=content["error"]["message"])
    if content["error"].get("code") == THREAD_REFUSED:
        detail.details = {"error_code": THREAD_REFUSED, "unsupported": ["thread"]}
    return AnthropicError(error=detail).model_dump(exclude_none=True)


class FieldRefused(RequestError):
    """A request is refused for one field, with a status and a code of its own."""

    def __init__(self, message: str, *, status: int, field: str, code: str) -> None:
        super().__init__(message)
        self.status, self.field, self.code = status, field, code


class BodyLimit:
    """Middleware that reads the whole body before anything parses it.

    A body over the limit is a 413, whether its length is announced or it comes in chunks; one that is not UTF-8, or has
    too many or too deeply nested values, is a 400.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, *, is_strict: bool = False) -> None:
        self._app = app
        self._max_body_bytes, self._is_strict = max_body_bytes, is_strict
        self._told = lru_cache(MAX_TOLD)(_log_ignored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            body = await self._read(Request(scope, receive))
            _check(body)
        except ClientDisconnect:
            return None
        except (HTTPException, RequestError) as exc:
            await refusal(exc, scope["path"])(scope, receive, send)
        else:
            scope = _as_json(scope, body)
            with collecting_ignored(is_strict=self._is_strict) as names:
                await self._app(scope, _replay(body, receive), self._telling(names, scope, send))

    def _telling(self, names: Collection[str], scope: Scope, send: Send) -> Send:
        """Return a channel that adds what the body says and nobody reads to the response's headers, and logs it once
        for each client."""

        async def sent(message: Message) -> None:
            if names and message["type"] == "http.response.start":
                shown = ", ".join(sorted(names)).encode("ascii", "backslashreplace").decode()
                MutableHeaders(scope=message)[IGNORED_HEADER] = shown[:MAX_HEADER_CHARS]
                agent = Headers(scope=scope).get("user-agent", "a client")
                for name in names:
                    self._told(agent[:80], name[:80])
            await send(message)

        return sent

    async def _read(self, request: Request) -> bytes:
        """Return the body. Raises HTTPException, and ClientDisconnect when the client goes away before its end."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                raise HTTPException(413, f"the body may have {self._max_body_bytes} bytes at most")
        return bytes(body)


def _log_ignored(agent: str, name: str) -> None:
    logger.info("%r sends %r, which is ignored here; `worker.strict_fields` refuses it", agent, name)


def _as_json(scope: Scope, body: bytes) -> Scope:
    """Return the scope of a body that is JSON under another type, as of `curl -d`, with that of JSON. A page keeps its
    own: a form of another site needs no permission to send one."""
    headers = Headers(scope=scope)
    if not body.lstrip().startswith(b"{") or "origin" in headers:
        return scope
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a channel that gives the body as one message, and after it the messages of `receive`."""
    unread = [body]

    async def replayed() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replayed


def _check(body: bytes) -> None:
    """Raises RequestError for a body that is not UTF-8, as JSON has to be, or too costly to parse."""
    try:
        body.decode()
    except UnicodeDecodeError as exc:
        raise RequestError(f"body: byte {exc.start} is not UTF-8") from exc
    BODY_LIMITS.check(body, "body")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception of the application with an error in the shape of its path's protocol."""

    async def refuse(request: Request, exc: Exception) -> Response:
        return refusal(exc, request.url.path, getattr(request.state, REQUEST_ID, None))

    for exception in (RequestValidationError, HTTPException, OmnidraftError, Exception):
        app.add_exception_handler(exception, refuse)


def refusal(exc: Exception, path: str, request_id: str | None = None) -> Response:
    """Return the response to a request for this path that raised."""
    headers: Mapping[str, str] | None = None
    match exc:
        case Abandoned():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case HTTPException():
            headers = exc.headers
        case QueueFull():
            headers = {"Retry-After": str(exc.retry_after_s)}
        case Stopping():
            headers = {"Retry-After": STOPPING_RETRY_S}
    return error_response(path, *told(exc, path), headers, request_id)


def told(exc: Exception, path: str = "") -> tuple[int, dict[str, object]]:
    """Return the status and the content, in OpenAI's shape, of the error of a request for this path, also of one that
    ends a stream. Of errors that are not the request's only our own are shown: the text of any other may be about what
    was decoded beside it, and the server's log has it."""
    refused = "invalid_request_error"
    match exc:
        case RequestValidationError():
            return 400, _invalid(exc)
        case HTTPException():
            return exc.status_code, error(exc.detail, refused)
        case FieldRefused():
            return exc.status, error(str(exc), refused, exc.field, exc.code)
        case ContextExceeded() if is_anthropic(path):
            numbers = f"{exc.num_prompt_tokens} tokens > {exc.most_prompt_tokens} maximum"
            return 400, error(f"prompt is too long: {numbers}", refused)
        case ContextExceeded():
            return 400, error(str(exc), refused, code="context_length_exceeded")
        case RequestError():
            return 400, error(str(exc), refused)
        case QueueFull():
            return 429, error(str(exc), "rate_limit_error", code="queue_full")
        case Stopping():
            return 503, error(str(exc), "server_error", code="stopping")
        case OmnidraftError():
            return 500, error(str(exc), "server_error")
        case _:
            return 500, error(f"decoding failed: {type(exc).__name__}", "server_error")


def _invalid(exc: RequestValidationError) -> dict[str, object]:
    problem = exc.errors()[0]
    if problem["type"] == "json_invalid":  # its location is a position in the body
        message = f"body: no JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
        return error(message, "invalid_request_error")
    path = ".".join(map(str, _fields(problem["loc"][1:], exc.body, is_missing=problem["type"] == "missing")))
    field = path.encode("utf-8", "backslashreplace").decode() or None
    return error(f"{field or 'body'}: {problem['msg']}", "invalid_request_error", field)


def _fields(location: Sequence[str | int], body: Any, *, is_missing: bool) -> Iterator[str | int]:
    """Yield the parts of a location that are in the body, without the names of the types that were tried there."""
    for number, part in enumerate(location, 1):
        if _has(body, part):
            body = body[part]
        elif not (is_missing and number == len(location)):
            continue
        yield part


def _has(container: Any, part: str | int) -> bool:
    if isinstance(container, list):
        return isinstance(part, int) and part < len(container)
    return isinstance(container, dict) and part in container


def error_response(
    path: str,
    status: int,
    content: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    request_id: str | None = None,
) -> JSONResponse:
    """Return the response of an error to a request for this path, in the shape of the path's protocol; in its headers
    the id under which the log tells of it, if it has one."""
    shown = anthropic_error(status, content) if is_anthropic(path) else content
    ids = dict.fromkeys(REQUEST_ID_HEADERS, request_id) if request_id else {}
    return JSONResponse(shown, status_code=status, headers={**ids, **(headers or {})})
