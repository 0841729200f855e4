"""An application that is called inside its process answers as it would over HTTP, and notices that its client went."""

import asyncio
import json
import logging
import pickle
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from omnidraft.hosts import asgi_bridge
from omnidraft.hosts.asgi_bridge import MAX_FRAMES, HttpCall, ResponseStart, respond

NUM_PIECES = 3 * MAX_FRAMES


class Served:
    """An application that counts what it sent."""

    def __init__(self) -> None:
        self.num_sent = 0
        routes = [
            Route("/echo", self._echo, methods=["POST"]),
            Route("/stream", self._stream),
            Route("/broken", self._broken),
            Route("/breaks", self._breaks),
        ]
        self.app = Starlette(routes=routes)

    async def _echo(self, request: Request) -> Response:
        body = (await request.body()).decode()
        told = {"body": body, "header": request.headers["x-told"], "query": dict(request.query_params)}
        return JSONResponse(told, 201, headers={"x-answer": "yes"})

    async def _stream(self, _request: Request) -> Response:
        return StreamingResponse(self._pieces(), media_type="text/event-stream")

    async def _pieces(self) -> AsyncIterator[str]:
        for number in range(NUM_PIECES):
            self.num_sent += 1
            yield f"{number} "

    async def _broken(self, _request: Request) -> Response:
        raise RuntimeError("before")

    async def _breaks(self, _request: Request) -> Response:
        async def pieces() -> AsyncIterator[str]:
            yield "one"
            raise RuntimeError("between")

        return StreamingResponse(pieces())


async def frames(served: Served, call: HttpCall) -> list[ResponseStart | bytes]:
    return [frame async for frame in respond(served.app, call)]


def test_a_request_arrives_whole_and_its_answer_too() -> None:
    async def ask() -> list[ResponseStart | bytes]:
        call = HttpCall("POST", "/echo", ((b"x-told", b"me"),), "\u00e9".encode(), b"a=1")
        return await frames(Served(), pickle.loads(pickle.dumps(call)))

    head, body = asyncio.run(ask())
    assert isinstance(head, ResponseStart)
    assert isinstance(body, bytes)
    assert head.status == 201
    assert (b"x-answer", b"yes") in head.headers
    assert json.loads(body) == {"body": "\u00e9", "header": "me", "query": {"a": "1"}}


def test_a_stream_comes_in_pieces_in_their_order() -> None:
    head, *pieces = asyncio.run(frames(Served(), HttpCall("GET", "/stream")))
    assert isinstance(head, ResponseStart)
    assert pieces == [f"{number} ".encode() for number in range(NUM_PIECES)]


def test_an_application_waits_for_a_slow_reader_and_ends_when_it_goes() -> None:
    async def read_one() -> tuple[int, int]:
        served = Served()
        answer = respond(served.app, HttpCall("GET", "/stream"))
        await anext(answer)
        await anext(answer)
        await asyncio.sleep(0.05)
        sent = served.num_sent
        await answer.aclose()
        await asyncio.sleep(0.05)
        return sent, served.num_sent

    sent, sent_in_the_end = asyncio.run(read_one())
    assert sent <= MAX_FRAMES + 2
    assert sent_in_the_end < NUM_PIECES


def test_one_that_does_not_listen_for_its_client_is_cancelled() -> None:
    async def deaf(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def read_head() -> None:
        answer = respond(deaf, HttpCall("GET", "/"), disconnect_timeout_s=0.01)
        await anext(answer)
        await answer.aclose()
        await asyncio.sleep(0.01)

    told: list[str] = []
    asyncio.run(read_head())
    assert told == ["cancelled"]


def test_a_failure_is_an_answer_and_then_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, asgi_bridge.__name__):
        head, _ = asyncio.run(frames(Served(), HttpCall("GET", "/broken")))
        assert isinstance(head, ResponseStart)
        assert head.status == 500  # Starlette answers, then raises
        head, piece = asyncio.run(frames(Served(), HttpCall("GET", "/breaks")))
    assert piece == b"one"
    assert [record.getMessage() for record in caplog.records] == ["failed after it had answered"] * 2


def test_an_application_that_fails_before_it_answers_raises() -> None:
    async def silent(scope, receive, send) -> None:
        raise RuntimeError("nothing to say")

    async def ask() -> None:
        await anext(respond(silent, HttpCall("GET", "/")))

    with pytest.raises(RuntimeError, match="nothing to say"):
        asyncio.run(ask())
