"""The response that streams what is decoded for a queued request as server-sent events."""

from collections.abc import AsyncIterator, Mapping

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue


class EventStream(StreamingResponse):
    """Abandons its request when the response ends, however it ends.

    The iterator of the events cannot do that: when the client leaves before the first event, it never starts, and one
    that is never started runs no `finally`.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str],
        requests: RequestQueue,
        queued: QueuedRequest,
    ) -> None:
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._requests, self._queued = requests, queued

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. See StreamingResponse."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._requests.abandon(self._queued)
