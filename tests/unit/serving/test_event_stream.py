"""A client that leaves its stream before the first event ends its request, whatever the request waited for."""

import asyncio
import json
import threading
from collections.abc import MutableMapping
from typing import Any

import pytest
from fastapi import FastAPI

from omnidraft.decode.engine import Engine
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.hosts.asgi_bridge import HttpCall, respond
from omnidraft.ports import Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from tests.page_recordings import PASSES, body
from tests.tiny_engine import PATIENCE_S, Slow, snapshot, wait_until

QUESTION = "How many clips did Natalia sell?"
JSON = ((b"content-type", b"application/json"),)


@pytest.fixture
def slow_engine(engine: Engine) -> Engine:
    engine.slot.swap(snapshot(1, Slow(0.05)))
    return engine


def call(path: str, **fields: Any) -> HttpCall:
    return HttpCall("POST", path, JSON, json.dumps(body(QUESTION, max_tokens=64, **fields)).encode())


def require_abandoned(metrics: CountingMetrics) -> None:
    """The request ended once, and as one whose client went away."""
    wait_until(lambda: metrics.value("omnidraft_requests_total"))
    assert metrics.value("omnidraft_requests_total", status="abandoned") == 1
    assert metrics.value("omnidraft_requests_total") == 1
    assert metrics.value("omnidraft_requests_running") == 0


async def leave_at_the_head(app: FastAPI, asked: HttpCall) -> None:
    """Ask, and leave while the head of the response is sent."""
    head, unread = asyncio.Event(), [asked.body]

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await head.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        head.set()
        await asyncio.sleep(PATIENCE_S)

    await app(asked.scope, receive, send)


@pytest.mark.usefixtures("slow_engine")
@pytest.mark.parametrize("asked", [call(PASSES), call("/v1/chat/completions", stream=True)], ids=["page", "api"])
def test_a_client_that_leaves_before_the_first_event(app: FastAPI, metrics: CountingMetrics, asked: HttpCall) -> None:
    asyncio.run(leave_at_the_head(app, asked))
    require_abandoned(metrics)


class GatedGrammars:
    """Compiles when the gate opens."""

    def __init__(self, whole: Grammars) -> None:
        self.whole = whole
        self.is_reached, self.gate = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def prepared(self, sampling: Sampling, **scope: Any) -> Sampling:
        self.is_reached.set()
        assert self.gate.wait(PATIENCE_S)
        return self.whole.prepared(sampling, **scope)


def test_a_watcher_of_the_page_that_leaves_while_its_grammar_is_compiled(
    app: FastAPI, slow_engine: Engine, metrics: CountingMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GatedGrammars(slow_engine.decoder.grammars)
    monkeypatch.setattr(slow_engine.decoder, "grammars", grammars)

    async def leave() -> None:
        asked = call(PASSES, response_format={"type": "json_object"})
        answer = respond(app, asked, disconnect_timeout_s=PATIENCE_S)
        reading = asyncio.ensure_future(anext(answer))
        assert await asyncio.to_thread(grammars.is_reached.wait, PATIENCE_S)
        reading.cancel()
        asyncio.get_running_loop().call_later(0.1, grammars.gate.set)
        await asyncio.wait({reading})

    asyncio.run(leave())
    require_abandoned(metrics)
