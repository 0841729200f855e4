"""Every refusal in OpenAI's shape, and the middleware that refuses bodies that are too large or too deep."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnidraft.decode.sampling.json_limits import BODY_LIMITS
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.serving.error_object import error
from omnidraft.serving.request_queue import Abandoned, QueueFull, Stopping

STOPPING_RETRY_S = "1"
"""Another worker can be asked at once."""
NOBODY_READS = 499
"""As nginx logs a client that closed its connection."""


class ModelNotServed(RequestError):
    """The request names a model that is not served here (HTTP 404)."""


class BodyLimit:
    """Middleware: reads a body whole, before anything parses it.

    One over the limit is a 413, whether its length is announced or it comes in chunks; one that is not UTF-8, or of too
    many or too deeply nested values, is a 400.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            body = await self._read(receive)
            if body is None:
                return None  # the client has gone
            check_body(body)
        except HTTPException as exc:
            await JSONResponse(error(exc.detail, "invalid_request_error"), exc.status_code)(scope, receive, send)
        except RequestError as exc:
            await JSONResponse(error(str(exc), "invalid_request_error"), 400)(scope, receive, send)
        else:
            await self._app(scope, _again(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return None when the client goes away before the body's end. Raises HTTPException."""
        body = bytearray()
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise HTTPException(413, f"the body may have {self._max_body_bytes} bytes at most")
            has_more = message.get("more_body", False)
        return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return the body in one piece; what comes after it as it comes."""
    left = [body]

    async def received() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return received


def check_body(body: bytes) -> None:
    """Raises RequestError for a body that is not UTF-8, as JSON has to be, or too costly to parse."""
    try:
        body.decode()
    except UnicodeDecodeError as exc:
        raise RequestError(f"body: byte {exc.start} is not UTF-8") from exc
    BODY_LIMITS.check(body, "body")


def add_errors(app: FastAPI) -> None:
    """What the application raises, as responses."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, exc: RequestValidationError) -> JSONResponse:
        problem = exc.errors()[0]
        path = ".".join(str(part) for part in problem["loc"] if part != "body")
        where = path.encode("utf-8", "backslashreplace").decode() or None
        message = f"{where or 'body'}: {problem['msg']}"
        return JSONResponse(error(message, "invalid_request_error", where), status_code=400)

    @app.exception_handler(HTTPException)
    async def unserved(_request: Request, exc: HTTPException) -> JSONResponse:
        content = error(exc.detail, "invalid_request_error")
        return JSONResponse(content, status_code=exc.status_code, headers=exc.headers)

    @app.exception_handler(ModelNotServed)
    async def unknown(_request: Request, exc: ModelNotServed) -> JSONResponse:
        content = error(str(exc), "invalid_request_error", "model", "model_not_found")
        return JSONResponse(content, status_code=404)

    @app.exception_handler(RequestError)
    async def refused(_request: Request, exc: RequestError) -> JSONResponse:
        return JSONResponse(error(str(exc), "invalid_request_error"), status_code=400)

    @app.exception_handler(QueueFull)
    async def busy(_request: Request, exc: QueueFull) -> JSONResponse:
        content = error(str(exc), "rate_limit_error", code="queue_full")
        return JSONResponse(content, status_code=429, headers={"Retry-After": str(exc.retry_after_s)})

    @app.exception_handler(Stopping)
    async def stopping(_request: Request, exc: Stopping) -> JSONResponse:
        content = error(str(exc), "server_error", code="stopping")
        return JSONResponse(content, status_code=503, headers={"Retry-After": STOPPING_RETRY_S})

    @app.exception_handler(Abandoned)
    async def gone(_request: Request, _exc: Abandoned) -> Response:
        return Response(status_code=NOBODY_READS)

    @app.exception_handler(OmnidraftError)
    @app.exception_handler(Exception)
    async def failed(_request: Request, exc: Exception) -> JSONResponse:
        return JSONResponse(error(str(exc), "server_error"), status_code=500)
