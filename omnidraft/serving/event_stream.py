"""The response that streams what is decoded for a queued request as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from omnidraft.serving.response_schemas import Json

EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
"""The second keeps nginx from holding events back."""
QUEUED = b": queued\n\n"
"""A comment, which no client reads as an event: headers come at once, however long the prompt is read."""
PING = b": ping\n\n"
PING_S = 10.0
"""Seconds from one ping to the next; proxies give up what is silent for 30 to 60."""
DONE = b"data: [DONE]\n\n"
"""The last event of a stream of completions."""


RESPONSES_PATH = "/v1/responses"


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


ANTHROPIC_PING = event("ping", {"type": "ping"})
"""A ping as Anthropic's servers send it."""


def is_ping(piece: bytes) -> bool:
    """Return whether a piece of a stream, of whole events, only says that the stream is alive."""
    return piece.startswith((b":", ANTHROPIC_PING))


def response_event(name: str, number: int, content: Json) -> bytes:
    """Return one event of a stream of OpenAI's Responses: its name and its number are in its data."""
    return event(name, {"type": name, "sequence_number": number, **content})


def failed_response_event(response: Json, code: str, error: Mapping[str, Any], number: int) -> bytes:
    """Return the event that ends the stream of a response that failed with an error of OpenAI's shape."""
    told = {"code": code, "message": error["error"]["message"]}
    failed = response | {"status": "failed", "error": told}
    return response_event("response.failed", number, {"response": failed})


def unnamed_event(data: str) -> bytes:
    """Return one event of a stream of completions, given its JSON."""
    return f"data: {data}\n\n".encode()


def last_error_events(content: Mapping[str, Any]) -> bytes:
    """Return the events that end a stream of completions with an error."""
    return unnamed_event(json.dumps(content)) + DONE


class EventStream(StreamingResponse):
    """Sends a ping every PING_S, and abandons its request when the response ends, however it ends.

    The iterator of the events cannot do that: when the client leaves before the first event, it never starts, and one
    that is never started runs no `finally`.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str],
        abandon: Callable[[], None],
        ping: Callable[[], bytes] = lambda: PING,
    ) -> None:
        super().__init__(events, headers=EVENT_HEADERS | dict(headers), media_type="text/event-stream")
        self._abandon, self._ping = abandon, ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. See StreamingResponse."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._abandon()

    async def stream_response(self, send: Send) -> None:
        """Send the events and the pings, none behind the end. See StreamingResponse."""
        turn = asyncio.Lock()

        async def send_in_turn(message: Message) -> None:
            async with turn:
                await send(message)

        pings = asyncio.create_task(self._send_pings(send_in_turn))
        try:
            await super().stream_response(send_in_turn)
        finally:
            pings.cancel()

    async def _send_pings(self, send: Send) -> None:
        while True:
            await asyncio.sleep(PING_S)
            await send({"type": "http.response.body", "body": self._ping(), "more_body": True})
