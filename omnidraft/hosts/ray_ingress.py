"""The door of a fleet on Ray Serve: chooses the target's replicas, and asks another one when a replica dies.

A request waits here until a replica has room, so one that waits cannot be lost with a replica. One that a replica had
begun is asked again elsewhere as long as its client has seen nothing of it; a stream that was under way ends with an
error in OpenAI's shape.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from omnidraft.decode.sampling.json_limits import BODY_LIMITS
from omnidraft.errors import RequestError
from omnidraft.hosts.asgi_bridge import HttpCall, ResponseStart
from omnidraft.serving.error_object import error
from omnidraft.telemetry.exposition import merged

TRIES = 4
"""Replicas that may die under one request before it is given up."""
ASK_ALL_S = 2.0
"""For all replicas to say where they stand."""
RETRY_AFTER_S = "5"
EVENTS = "text/event-stream"
HOP = (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host")
"""Headers that are about one connection only."""

logger = logging.getLogger(__name__)


class ReplicasDied(Exception):
    """As many replicas as may died under one request."""


class Ingress:
    """Passes requests on by `model`. Requests that name none, or nobody's, go to the first target, which answers."""

    def __init__(self, max_body_bytes: int, replicas: Mapping[str, DeploymentHandle]) -> None:
        """
        Args:
            replicas: by target; the first is the default.
        """
        self._max_body_bytes = max_body_bytes
        self._replicas = replicas
        self._ready: set[str] = set()

    async def __call__(self, request: Request) -> Response:
        match request.url.path:
            case "/healthz":
                return JSONResponse({"status": "ok"})
            case "/readyz":
                return await self._readiness()
            case "/replicas":
                return JSONResponse([asdict(each) for each in await self._ask_all("facts")])
            case "/metrics":
                scrapes = [(worker, text.decode()) for worker, text in await self._ask_all("metrics_text")]
                return Response(merged("worker", scrapes), media_type="text/plain; version=0.0.4")
        call = await self._call_of(request)
        if call is None:
            what = f"the body may have {self._max_body_bytes} bytes at most"
            return JSONResponse(error(what, "invalid_request_error"), status_code=413)
        try:
            BODY_LIMITS.check(call.body, "body")
        except RequestError as exc:
            return JSONResponse(error(str(exc), "invalid_request_error"), status_code=400)
        if call.path == "/v1/models":
            return await self._models(call)
        return await self._passed_on(self._replicas[self._target_of(call)], call)

    async def _call_of(self, request: Request) -> HttpCall | None:
        """None: the body is too large."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                return None
        headers = tuple((name, value) for name, value in request.headers.raw if name.lower() not in HOP)
        return HttpCall(request.method, request.url.path, headers, bytes(body), request.url.query.encode())

    def _target_of(self, call: HttpCall) -> str:
        default = next(iter(self._replicas))
        try:
            asked = json.loads(call.body)
        except ValueError:
            return default
        name = asked.get("model") if isinstance(asked, dict) else None
        return name if isinstance(name, str) and name in self._replicas else default

    async def _passed_on(self, replicas: DeploymentHandle, call: HttpCall) -> Response:
        try:
            return await _ForwardedCall(replicas, call).response()
        except BackPressureError as exc:
            headers = {"Retry-After": RETRY_AFTER_S}
            return JSONResponse(error(str(exc), "rate_limit_error"), status_code=429, headers=headers)
        except (ReplicasDied, DeploymentUnavailableError) as exc:
            return JSONResponse(error(str(exc), "server_error"), status_code=503)

    async def _models(self, call: HttpCall) -> Response:
        """The lists of all targets as one; the first refusal as it is."""
        known: list[Any] = []
        for replicas in self._replicas.values():
            answer = await self._passed_on(replicas, call)
            if answer.status_code != 200:
                return answer
            known += json.loads(bytes(answer.body))["data"]
        return JSONResponse({"object": "list", "data": known})

    async def _readiness(self) -> Response:
        """Ready when every target has a replica that answers."""
        for target, replicas in self._replicas.items():
            try:
                has_one = bool(await _of_all(replicas, "facts"))
            except DeploymentUnavailableError:
                has_one = False
            except TimeoutError:  # one that hangs says nothing about the others: it is as it was
                continue
            (self._ready.add if has_one else self._ready.discard)(target)
        missing = ", ".join(target for target in self._replicas if target not in self._ready)
        if missing:
            return JSONResponse({"status": f"no replica of {missing}"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _ask_all(self, method: str) -> list[Any]:
        """The answers of all replicas, without those of a target of which one does not answer in time."""
        asked = (_of_all(replicas, method) for replicas in self._replicas.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [each for of_target in answers if not isinstance(of_target, BaseException) for each in of_target]


async def _of_all(replicas: DeploymentHandle, method: str) -> list[Any]:
    """What those say that have not died. Raises DeploymentUnavailableError, TimeoutError."""
    answers = await replicas.broadcast(method).results_async(timeout_s=ASK_ALL_S, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


class _ForwardedCall:
    """One request on its way through a replica, and through another one if that dies."""

    def __init__(self, replicas: DeploymentHandle, call: HttpCall) -> None:
        self._replicas = replicas.options(stream=True, method_name="respond")
        self._call = call

    async def response(self) -> Response:
        """Raises ReplicasDied, and what Serve says when no replica can be had."""
        for _ in range(TRIES):
            frames: AsyncGenerator[ResponseStart | bytes, None] = _frames(self._replicas, self._call)
            try:
                return await self._begun(frames)
            except RayActorError as exc:
                logger.warning("a replica died under %s, asking another one: %s", self._call.path, type(exc).__name__)
        raise ReplicasDied(f"{TRIES} replicas died under this request; it is not asked again")

    async def _begun(self, frames: AsyncGenerator[ResponseStart | bytes, None]) -> Response:
        """A response of which everything, or of a stream the first piece, has come."""
        async with AsyncExitStack() as given_up:
            await given_up.enter_async_context(aclosing(frames))
            head = await anext(frames)
            assert isinstance(head, ResponseStart)
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            if headers.get("content-type", "").startswith(EVENTS):
                first = await anext(frames, None)
                given_up.pop_all()
                return StreamingResponse(_stream(first, frames), head.status, headers)
            body = b"".join([piece async for piece in frames if isinstance(piece, bytes)])
            return Response(body, head.status, headers)


async def _frames(replicas: DeploymentHandle, call: HttpCall) -> AsyncGenerator[ResponseStart | bytes, None]:
    """Of one replica. Closing it early tells the replica that the client went away."""
    answer = cast(DeploymentResponseGenerator[Any], replicas.remote(call))  # asked for with stream=True
    has_ended = False
    try:
        async for frame in answer:
            yield frame
        has_ended = True
    finally:
        if not has_ended:
            answer.cancel()


async def _stream(
    first: ResponseStart | bytes | None, frames: AsyncGenerator[ResponseStart | bytes, None]
) -> AsyncIterator[bytes]:
    """The pieces; a replica that dies between them ends the stream with an error that says so."""
    async with aclosing(frames):
        try:
            if isinstance(first, bytes):
                yield first
            async for piece in frames:
                if isinstance(piece, bytes):
                    yield piece
        except RayActorError:
            logger.warning("a replica died under a stream")
            told: Mapping[str, object] = error("the replica that wrote this text died; ask again", "server_error")
            yield f"data: {json.dumps(told)}\n\ndata: [DONE]\n\n".encode()
