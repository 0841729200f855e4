"""The page's second view: what the fleet has learned, for whoever holds the operator's key."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from pydantic import SecretStr

from omnidraft.serving.auth import OwnKey, unauthorized
from omnidraft.serving.page.events import EVENT_HEADERS, event
from omnidraft.serving.page.files import FLEET_PATH

INTERVAL_S = 5
"""The pause between two readings: each asks log, registry and workers."""

ReadFleet = Callable[[], Mapping[str, Any]]


def add_fleet(app: FastAPI, read: ReadFleet, key: SecretStr, is_open: Callable[[], bool]) -> None:
    """Stream what `read` returns, as long as somebody follows and the worker is open."""
    own_key = OwnKey(key)

    @app.get(FLEET_PATH, include_in_schema=False)
    async def fleet(request: Request) -> Response:
        if not own_key.admits(request.headers.get("authorization", "")):
            return unauthorized("the fleet is shown to holders of the operator's key")
        return StreamingResponse(_readings(read, is_open), media_type="text/event-stream", headers=EVENT_HEADERS)


async def _readings(read: ReadFleet, is_open: Callable[[], bool]) -> AsyncIterator[bytes]:
    while is_open():
        yield event("fleet", await run_in_threadpool(read))
        for _ in range(INTERVAL_S):
            if is_open():
                await asyncio.sleep(1)
