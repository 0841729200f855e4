"""The page: its files, and the stream that it follows: a chat completion, told pass by pass as server-sent events.

The body is that of /v1/chat/completions, and so are keys, tenants, limits and the queue. The page asks twice, once
without drafting, and compares the two texts. No file of it is generated and none comes from another host; they are
served under headers by which a browser runs them and nothing else. uPlot (MIT, its licence is beside it) draws charts.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

from omnidraft.errors import RequestError
from omnidraft.serving.answer import steps_of
from omnidraft.serving.auth import FILES_PATH, PAGE_PATH
from omnidraft.serving.error_handlers import told
from omnidraft.serving.event_stream import EventStream, event
from omnidraft.serving.page.pass_events import Event, PassEvents
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.serving.request_schemas import ChatRequest
from omnidraft.serving.responses import Responder, ServedModel, waker

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Only files of this page run; a text that got into its markup could not."""
HEADERS = {
    "Content-Security-Policy": SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_files(app: FastAPI) -> None:
    """Serve the page on `/` and each of its files under FILES_PATH."""
    for path in sorted(FOLDER.iterdir()):
        _add_file(app, PAGE_PATH if path.name == INDEX else FILES_PATH + path.name, path)


def _add_file(app: FastAPI, url_path: str, path: Path) -> None:
    content, content_type = path.read_bytes(), CONTENT_TYPES[path.suffix]

    @app.api_route(url_path, methods=["GET", "HEAD"], include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=content_type, headers=HEADERS)


PASSES_PATH = "/page/passes"


def add_page(app: FastAPI, responder: Responder, requests: RequestQueue) -> None:
    """Serve the page and its stream. Nothing is computed for it unless somebody asks there."""
    add_files(app)

    @app.post(PASSES_PATH, include_in_schema=False)
    async def passes(body: ChatRequest, request: Request) -> Response:
        if body.num_choices > 1:
            raise RequestError("n: one text at a time is watched")
        model, ready, clock = responder.model(body.model), asyncio.Event(), StepClock(requests)
        queued = await responder.queued_request(request, body, model, note=clock.note, wake=waker(ready))
        async with responder.watched(request, queued):
            await responder.submit(queued)
        return EventStream(_events(queued, model, ready, clock), {}, partial(requests.abandon, queued))


class StepClock:
    """Notes in the decoding thread when each step came, and whether others shared the target with it: not how many,
    which would tell a tenant the others' traffic."""

    def __init__(self, requests: RequestQueue) -> None:
        self._requests = requests
        self._started_s = time.perf_counter()
        self._notes: deque[tuple[float, bool]] = deque()

    def note(self) -> None:
        """Note one result of the request, before it can be read."""
        self._notes.append((time.perf_counter() - self._started_s, self._requests.num_texts > 1))

    def next(self) -> Event:
        """Return the notes about the next result."""
        at_s, is_shared = self._notes.popleft()
        return {"at_ms": round(at_s * 1000, 3), "is_shared": is_shared}


async def _events(
    queued: QueuedRequest, model: ServedModel, ready: asyncio.Event, clock: StepClock
) -> AsyncIterator[bytes]:
    """Yield the events of a stream."""
    events = PassEvents(model.engine.pair)
    try:
        yield event("queued", {"target": model.name, "drafter": model.engine.pair.drafter})
        async for _, step in steps_of(queued, ready):
            yield event("pass", events.of_pass(step) | clock.next())
        yield event("end", events.of_end() | _summary(queued))
    except Exception as exc:  # the status line is out: all that is left is to say it in the stream
        yield event("error", told(exc)[1])


def _summary(queued: QueuedRequest) -> Event:
    sequence = queued.texts[0].sequence
    assert sequence is not None  # it has ended
    return {
        "seed": str(sequence.seed),
        "snapshot_version": sequence.snapshot.version,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "stats": queued.stats.summary(),
    }
