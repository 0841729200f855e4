"""Call an ASGI application from inside its process: one request in, its response as picklable frames.

So a replica that is called through a Ray Serve handle answers with the same application that a worker serves over
HTTP. Serve's own ASGI support (`serve.ingress`) covers an application's ingress deployment only, not handle calls.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

DISCONNECT_TIMEOUT_S = 5.0
"""The time the application has to react to a disconnect before it is cancelled."""
MAX_FRAMES = 64
"""The number of frames that wait for a slow reader; beyond it the application waits."""

Headers = tuple[tuple[bytes, bytes], ...]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request whose body has been read."""

    method: str
    path: str
    headers: Headers = ()
    body: bytes = b""
    query: bytes = b""
    client: tuple[str, int] | None = None
    """The address that the request came from."""

    @property
    def scope(self) -> dict[str, Any]:
        """The ASGI scope. Starlette's streams listen for a disconnect only up to spec version 2.3."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": {},
        }


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """The first frame of a response; pieces of the body follow."""

    status: int
    headers: Headers


async def respond(
    app: ASGIApp, call: HttpCall, *, disconnect_timeout_s: float = DISCONNECT_TIMEOUT_S
) -> AsyncGenerator[ResponseStart | bytes, None]:
    """Yield the response's frames as the application sends them. Closing the generator means a client disconnect.

    An exception of the application before its first frame is raised here; a later one is logged.
    """
    app_call = _AppCall(app, call)
    try:
        async with aclosing(app_call.frames()) as frames:
            async for frame in frames:
                yield frame
    finally:
        await app_call.disconnect(disconnect_timeout_s)


class _AppCall:
    """One request in progress."""

    def __init__(self, app: ASGIApp, call: HttpCall) -> None:
        self._body: bytes | None = call.body
        self._sent: asyncio.Queue[ResponseStart | bytes | None] = asyncio.Queue(MAX_FRAMES)
        self._is_disconnected = asyncio.Event()
        self._has_started = False
        self._task = asyncio.create_task(self._run(app, call))

    async def frames(self) -> AsyncGenerator[ResponseStart | bytes, None]:
        while (frame := await self._sent.get()) is not None:
            yield frame
        await asyncio.wait({self._task})
        self._raise_or_log()

    async def disconnect(self, timeout_s: float) -> None:
        """Disconnect, and cancel the application unless it returns in time."""
        self._is_disconnected.set()
        while not self._sent.empty():  # the application may wait for the queue
            self._sent.get_nowait()
        _, late = await asyncio.wait({self._task}, timeout=timeout_s)
        for task in late:
            task.cancel()

    async def _run(self, app: ASGIApp, call: HttpCall) -> None:
        try:
            await app(call.scope, self._receive, self._send)
        finally:
            await self._put(None)

    def _raise_or_log(self) -> None:
        error = self._task.exception()
        if error is not None and not self._has_started:
            raise error
        if error is not None:
            logger.error("failed after it had answered", exc_info=error)

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._has_started = True
            await self._put(
                ResponseStart(message["status"], tuple((bytes(k), bytes(v)) for k, v in message["headers"]))
            )
        elif message["type"] == "http.response.body" and message.get("body"):
            await self._put(bytes(message["body"]))

    async def _put(self, frame: ResponseStart | bytes | None) -> None:
        """Queue a frame. After a disconnect drop it and yield to the loop, so that the application can notice."""
        if self._is_disconnected.is_set():
            await asyncio.sleep(0)
        else:
            await self._sent.put(frame)
