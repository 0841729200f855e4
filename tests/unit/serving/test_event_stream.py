"""A stream begins at once and is never silent; a client that leaves it ends its request, whatever that waited for."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest
from fastapi import FastAPI

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.hosts.asgi_bridge import HttpCall, respond
from omnidraft.ports import Sampling
from omnidraft.serving import event_stream
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.http_server import served, stream_parts
from tests.page_recordings import PASSES, body
from tests.tiny_engine import PATIENCE_S, Slow, slow_prompts, snapshot, wait_until

QUESTION = "How many clips did Natalia sell?"
LONG = "clips " * 3_000
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}]},
    PASSES: body(LONG),
}
LIMITS = {"/v1/responses": "max_output_tokens"}
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


@pytest.fixture
def long_url(tool_engine: Engine, requests: RequestQueue) -> Iterator[str]:
    """The application over an engine with room for a long prompt, behind the worker's own server."""
    with served(application(requests, [ServedModel(tool_engine, "print")], WorkerSettings(), lambda: b"")) as made:
        yield made


def ask_for_stream(url: str, path: str, connection: HTTPConnection) -> HTTPResponse:
    """Its head."""
    fields = STREAMS[path] | {"stream": True, LIMITS.get(path, "max_tokens"): 4}
    connection.request("POST", path, json.dumps(fields), {"content-type": "application/json"})
    return connection.getresponse()


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_begins_at_once_and_is_never_silent(
    tool_engine: Engine, long_url: str, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(event_stream, "PING_S", 0.05)
    connection = HTTPConnection(long_url.removeprefix("http://"), timeout=PATIENCE_S)
    with slow_prompts(tool_engine, 0.02) as num_read, closing(connection):
        asked_s = time.monotonic()
        response = ask_for_stream(long_url, path, connection)
        first = response.readline()
        assert time.monotonic() - asked_s < 1
        assert sum(num_read) < 1_500, "the prompt has been read before the first byte"
        assert (response.status, first) == (200, b"event: queued\n" if path == PASSES else b": queued\n")
        assert response.headers["cache-control"] == "no-store"
        rest = response.read().decode()
    pings = {"/v1/messages": "event: ping\ndata: {", "/v1/responses": "event: response.in_progress\n"}
    assert rest.count(pings.get(path, ": ping\n\n")) > 2
    numbers = [int(number) for number in re.findall(r'"sequence_number": (\d+)', rest)]
    assert numbers == list(range(len(numbers)))
    *_, last = stream_parts(rest)
    assert not re.search(r'"error": \{', rest)
    assert re.search(r"DONE|message_stop|response.incomplete|event: end", last[0])


def test_a_client_that_goes_away_while_its_prompt_is_read_frees_the_target_at_the_next_pass(
    tool_engine: Engine, long_url: str, metrics: CountingMetrics
) -> None:
    connection = HTTPConnection(long_url.removeprefix("http://"), timeout=PATIENCE_S)
    with slow_prompts(tool_engine, 0.3) as num_read:
        with closing(connection):
            assert ask_for_stream(long_url, "/v1/completions", connection).readline() == b": queued\n"
            wait_until(lambda: num_read)
        num_begun = len(num_read)
        require_abandoned(metrics)
    assert len(num_read) <= num_begun + 1
    assert sum(num_read) < 1_500
