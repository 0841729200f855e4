"""Call an ASGI application from inside its process: one request in, its response as frames.

So a replica that is called through Ray answers with the very application that a worker serves over HTTP. Frames can
be pickled: first a Head, then pieces of the body.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

GONE_TIMEOUT_S = 5.0
"""For the application to notice that its client went away, before it is cancelled."""
MAX_FRAMES = 64
"""That wait for a slow reader; then the application waits."""

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

    @property
    def scope(self) -> dict[str, Any]:
        """As ASGI has it; version 2.3 is the last whose streams listen for the client going away."""
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
            "client": None,
            "server": None,
            "state": {},
        }


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """How a response begins."""

    status: int
    headers: Headers


async def respond(app: ASGIApp, call: HttpCall) -> AsyncGenerator[ResponseStart | bytes, None]:
    """The response's frames as the application sends them. Closing the generator is the client going away.

    Raises whatever the application raises before it answered; after that it is logged.
    """
    running = _Running(app, call)
    try:
        async with aclosing(running.frames()) as frames:
            async for frame in frames:
                yield frame
    finally:
        await running.end()


class _Running:
    """The application at work on one request."""

    def __init__(self, app: ASGIApp, call: HttpCall) -> None:
        self._body: bytes | None = call.body
        self._sent: asyncio.Queue[ResponseStart | bytes | None] = asyncio.Queue(MAX_FRAMES)
        self._has_gone = asyncio.Event()
        self._has_answered = False
        self._task = asyncio.create_task(self._run(app, call))

    async def frames(self) -> AsyncGenerator[ResponseStart | bytes, None]:
        while (frame := await self._sent.get()) is not None:
            yield frame
        await asyncio.wait({self._task})
        self._tell_failure()

    async def end(self) -> None:
        """Give the application up, unless it has ended."""
        self._has_gone.set()
        while not self._sent.empty():  # it may wait for room
            self._sent.get_nowait()
        _, late = await asyncio.wait({self._task}, timeout=GONE_TIMEOUT_S)
        for task in late:
            task.cancel()

    async def _run(self, app: ASGIApp, call: HttpCall) -> None:
        try:
            await app(call.scope, self._receive, self._send)
        finally:
            await self._put(None)

    def _tell_failure(self) -> None:
        error = self._task.exception()
        if error is not None and not self._has_answered:
            raise error
        if error is not None:
            logger.error("failed after it had answered", exc_info=error)

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._has_answered = True
            await self._put(
                ResponseStart(message["status"], tuple((bytes(k), bytes(v)) for k, v in message["headers"]))
            )
        elif message["type"] == "http.response.body" and message.get("body"):
            await self._put(bytes(message["body"]))

    async def _put(self, frame: ResponseStart | bytes | None) -> None:
        """Nobody reads once the client has gone: nothing waits for room, and the application can hear of it."""
        if self._has_gone.is_set():
            await asyncio.sleep(0)
        else:
            await self._sent.put(frame)
