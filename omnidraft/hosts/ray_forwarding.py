"""A request that a replica answers, or another one when the first dies before its client has read anything."""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from omnidraft.hosts.asgi_bridge import HttpCall, ResponseStart
from omnidraft.hosts.ray_router import conversation_of
from omnidraft.serving.error_handlers import anthropic_error, is_anthropic
from omnidraft.serving.event_stream import RESPONSES_PATH, event, failed_response_event, is_ping, last_error_events
from omnidraft.serving.response_schemas import Json, error

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""The number of replicas that are tried for one request."""
EVENT_STREAM = "text/event-stream"
PAGE_PATHS = "/page/"
"""The prefix of the paths of the page's streams."""


class StreamFollower:
    """Follows the pieces of one response, each of whole events."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._first = b""
        self._num_events = 0

    @property
    def has_events(self) -> bool:
        """Whether there was more than pings so far."""
        return bool(self._first)

    def take(self, piece: bytes) -> bytes:
        """Note a piece and return it."""
        if is_ping(piece):
            return piece
        self._first = self._first or piece
        self._num_events += piece.count(b"\n\n")
        return piece

    def error_events(self, content: Mapping[str, Any]) -> bytes:
        """Return the events that end the stream after the pieces so far, given an error of OpenAI's shape."""
        if is_anthropic(self._path):
            return event("error", anthropic_error(500, content))
        if self._path == RESPONSES_PATH:
            return failed_response_event(self._created_response(), "server_error", content, self._num_events)
        return event("error", content) if self._path.startswith(PAGE_PATHS) else last_error_events(content)

    def _created_response(self) -> Json:
        """Return the response of response.created, the first event of its stream."""
        if not self.has_events:
            return {"object": "response"}
        data = self._first.split(b"\n")[1].removeprefix(b"data: ")
        response: Json = json.loads(data)["response"]
        return response


class ReplicasDied(Exception):
    """MAX_ATTEMPTS replicas died while they had this request."""


class ForwardedCall:
    """One request, forwarded to a replica and, if that dies before the client reads of it, to another."""

    def __init__(self, replicas: DeploymentHandle, call: HttpCall) -> None:
        self._replicas = replicas.options(stream=True, method_name="respond", session_id=conversation_of(call))
        self._call = call
        self._num_left = MAX_ATTEMPTS - 1
        self.frames = _frames(self._replicas, call)
        """What the replica that was asked last answers."""

    async def response(self) -> Response:
        """Return the response. Raises ReplicasDied, BackPressureError and DeploymentUnavailableError."""
        while True:
            try:
                return await self._start()
            except RayActorError as exc:
                self._ask_another(exc)

    async def _start(self) -> Response:
        """Return the response once all of its body, or the first piece of a stream, has arrived."""
        async with AsyncExitStack() as cleanup:
            await cleanup.enter_async_context(aclosing(self.frames))
            head = await anext(self.frames)
            assert isinstance(head, ResponseStart)
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            if headers.get("content-type", "").startswith(EVENT_STREAM):
                first = await anext(self.frames, None)
                cleanup.pop_all()
                return _ReplicaStream(self, first, head.status, headers)
            body = b"".join([piece async for piece in self.frames if isinstance(piece, bytes)])
            return Response(body, head.status, headers)

    async def events(self, first: ResponseStart | bytes | None) -> AsyncIterator[bytes]:
        """Yield the body of a stream. When its replica dies, another one is asked as long as no event was told; else
        the error event of the stream's API is the last."""
        follower = StreamFollower(self._call.path)
        try:
            while True:
                try:
                    if isinstance(first, bytes):
                        yield follower.take(first)
                    async for piece in self.frames:
                        if isinstance(piece, bytes):
                            yield follower.take(piece)
                        elif piece.status != 200:
                            raise ReplicasDied(
                                "the replica that read this prompt died, and another one is busy; ask again"
                            )
                    return
                except RayActorError as exc:
                    if follower.has_events:
                        raise ReplicasDied("the replica that wrote this text died; ask again") from exc
                    self._ask_another(exc)
                    first = None
        except (ReplicasDied, BackPressureError, DeploymentUnavailableError) as exc:
            logger.warning("a stream is cut short: %s", exc)
            yield follower.error_events(error(str(exc), "server_error"))

    def _ask_another(self, exc: RayActorError) -> None:
        """Raises ReplicasDied."""
        if not self._num_left:
            raise ReplicasDied(f"{MAX_ATTEMPTS} replicas died under this request; it is not asked again") from exc
        logger.warning("a replica died under %s, asking another one: %s", self._call.path, type(exc).__name__)
        self._num_left -= 1
        self.frames = _frames(self._replicas, self._call)


async def _frames(replicas: DeploymentHandle, call: HttpCall) -> AsyncGenerator[ResponseStart | bytes, None]:
    """Yield the frames of one replica. Closing the generator early cancels the request there."""
    answer = cast(DeploymentResponseGenerator[Any], replicas.remote(call))  # the handle has stream=True
    has_ended = False
    try:
        async for frame in answer:
            yield frame
        has_ended = True
    finally:
        if not has_ended:
            answer.cancel()


class _ReplicaStream(StreamingResponse):
    """Cancels its request at the replica when the response ends, however it ends. The iterator of the body cannot do
    that: see EventStream of serving/event_stream.py."""

    def __init__(
        self, call: ForwardedCall, first: ResponseStart | bytes | None, status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(call.events(first), status, headers)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body. See StreamingResponse."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._call.frames.aclose()
