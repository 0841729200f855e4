"""The page's second view: what the fleet has learned, and orders to it, for whoever holds the operator's key."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal, Protocol

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, SecretStr, model_validator

from omnidraft.serving.auth import OwnKey, unauthorized
from omnidraft.serving.page.files import FLEET_PATH
from omnidraft.serving.server_sent_events import EVENT_HEADERS, event
from omnidraft.serving.strict_model import StrictModel

INTERVAL_S = 5
"""The pause between two readings: each asks log, registry and workers."""
REFUSAL = "the fleet is for holders of the operator's key"

logger = logging.getLogger(__name__)


class FleetOrder(StrictModel):
    """What an operator orders about one target."""

    kind: Literal["promote", "rollback", "pause", "resume"]
    target: str
    version: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _names_what_it_promotes(self) -> "FleetOrder":
        if (self.version is not None) != (self.kind == "promote"):
            raise ValueError("version: promote needs one, nothing else has one")
        return self


class Fleet(Protocol):
    """Access to the fleet. Both calls may block."""

    def read(self) -> Mapping[str, Any]:
        """Return its status as plain data; what does not answer is among its problems."""

    def obey(self, order: FleetOrder) -> None:
        """Carry out an order. Raises RequestError when it is refused, and another OmnidraftError when log or registry
        do not answer."""


def add_fleet(app: FastAPI, fleet: Fleet, key: SecretStr, is_open: Callable[[], bool]) -> None:
    """Stream the fleet's status as long as somebody follows and the worker is open, and take orders."""
    own_key = OwnKey(key)

    @app.get(FLEET_PATH, include_in_schema=False)
    async def status(request: Request) -> Response:
        if not own_key.admits(request.headers.get("authorization", "")):
            return unauthorized(REFUSAL)
        return StreamingResponse(_readings(fleet, is_open), media_type="text/event-stream", headers=EVENT_HEADERS)

    @app.post(FLEET_PATH, include_in_schema=False)
    async def order(body: FleetOrder, request: Request) -> Response:
        if not own_key.admits(request.headers.get("authorization", "")):
            return unauthorized(REFUSAL)
        await run_in_threadpool(fleet.obey, body)
        logger.info("the operator ordered: %s", body.model_dump_json(exclude_none=True))
        return JSONResponse(await run_in_threadpool(fleet.read))


async def _readings(fleet: Fleet, is_open: Callable[[], bool]) -> AsyncIterator[bytes]:
    while is_open():
        yield event("fleet", await run_in_threadpool(fleet.read))
        for _ in range(INTERVAL_S):
            if is_open():
                await asyncio.sleep(1)
