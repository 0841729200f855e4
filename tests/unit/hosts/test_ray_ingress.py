"""The ingress with replicas that die: retries, error events, and disconnects that reach the replicas."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request

from omnidraft.config import WorkerSettings
from omnidraft.hosts.asgi_bridge import HttpCall, ResponseStart
from omnidraft.hosts.ray_forwarding import MAX_ATTEMPTS
from omnidraft.hosts.ray_ingress import Ingress
from omnidraft.hosts.ray_worker import ReplicaStatus
from omnidraft.serving.event_stream import ANTHROPIC_PING, DONE, PING, QUEUED, event, response_event
from tests.http_server import stream_parts

SETTINGS = WorkerSettings(max_body_bytes=1000)
JSON = ResponseStart(200, ((b"content-type", b"application/json"), (b"x-told", b"yes")))
EVENTS = ResponseStart(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
DIED = ActorDiedError()
TEXT_DELTA = {"type": "text_delta", "text": "clips"}
CREATED = {"id": "resp_1", "object": "response", "status": "in_progress", "output": [], "error": None}

Frame = ResponseStart | bytes | Exception


@dataclass
class Answer:
    """The frames of one replica, possibly up to an error."""

    frames: Sequence[Frame]
    is_cancelled: bool = False
    never_ends: bool = False

    async def __aiter__(self) -> AsyncIterator[ResponseStart | bytes]:
        for frame in self.frames:
            if isinstance(frame, Exception):
                raise frame
            yield frame
        if self.never_ends:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Replicas:
    """Implements a deployment handle: each call gets the next answer, from a replica of its own."""

    answers: list[Answer]
    facts: Sequence[ReplicaStatus | Exception] | Exception = ()
    calls: list[HttpCall] = field(default_factory=list)

    def options(self, **_options: Any) -> "Replicas":
        return self

    def remote(self, call: HttpCall) -> Answer:
        self.calls.append(call)
        return self.answers[len(self.calls) - 1]

    def broadcast(self, _method: str) -> "Replicas":
        return self

    async def results_async(self, **_options: Any) -> Sequence[Any]:
        if isinstance(self.facts, Exception):
            raise self.facts
        return self.facts


def app_of(ingress: Ingress) -> Callable[..., Awaitable[None]]:
    """Return the ingress as an ASGI application, called as Serve calls it."""

    async def app(scope, receive, send) -> None:
        response = await ingress(Request(scope, receive))
        await response(scope, receive, send)

    return app


def ask(replicas: dict[str, Replicas], path: str = "/v1/completions", body: Any = None) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(Ingress(SETTINGS, replicas)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            if body is None:
                return await client.get(path)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers={"authorization": "Bearer k"})

    return asyncio.run(asked())


@pytest.mark.parametrize("frames", [[DIED], [JSON, DIED], [JSON, b'{"a', DIED], [EVENTS, DIED]])
def test_what_no_client_has_seen_is_asked_again(frames: list[Frame]) -> None:
    replicas = Replicas([Answer(frames), Answer([JSON, b'{"a"', b": 1}"])])
    answer = ask({"t": replicas}, body={"prompt": "x"})
    assert (answer.status_code, answer.json(), answer.headers["x-told"]) == (200, {"a": 1}, "yes")
    assert [json.loads(call.body) for call in replicas.calls] == [{"prompt": "x"}] * 2
    assert dict(replicas.calls[1].headers)[b"authorization"] == b"Bearer k"


def test_a_stream_that_was_seen_ends_with_an_error_and_is_not_asked_again() -> None:
    replicas = Replicas([Answer([EVENTS, b"data: 1\n\n", DIED])])
    answer = ask({"t": replicas}, body={"stream": True})
    first, told, done = answer.text.strip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert "ask again" in json.loads(told.removeprefix("data: "))["error"]["message"]
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_a_stream_of_which_only_pings_were_seen_goes_on_with_another_replica() -> None:
    """And with the first one's head, since its client has that."""
    died = Answer([EVENTS, QUEUED, PING, ANTHROPIC_PING, DIED])
    replicas = Replicas([died, Answer([EVENTS, QUEUED, b"data: 1\n\n", DONE])])
    answer = ask({"t": replicas}, body={"stream": True})
    assert answer.content == QUEUED + PING + ANTHROPIC_PING + QUEUED + b"data: 1\n\n" + DONE
    assert len(replicas.calls) == 2


@pytest.mark.parametrize("after", [[DIED], [ResponseStart(503, ()), b'{"error": {}}'], [BackPressureError(1, 1)]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_of_which_only_pings_were_seen_ends_with_an_error_where_no_replica_is_left(
    path: str, after: list[Frame]
) -> None:
    replicas = Replicas([Answer([EVENTS, QUEUED, DIED]), *[Answer(after)] * MAX_ATTEMPTS])
    answer = ask({"t": replicas}, path, {"stream": True})
    told = json.loads(stream_parts(answer.text)[0][-1].removeprefix("data: "))
    assert (told.get("response") or told)["error"]["message"]


def test_a_message_whose_replica_dies_ends_with_the_error_that_anthropics_client_raises() -> None:
    piece = event("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": TEXT_DELTA})
    answer = ask({"t": Replicas([Answer([EVENTS, piece, DIED])])}, "/v1/messages", {"messages": [], "stream": True})
    name, data = answer.text.removeprefix(piece.decode()).strip().split("\n")
    assert name == "event: error"
    last = json.loads(data.removeprefix("data: "))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "ask again" in last["error"]["message"]


def test_a_response_whose_replica_dies_has_failed() -> None:
    pieces = [
        response_event("response.created", 0, {"response": CREATED}) + response_event("response.in_progress", 1, {}),
        response_event("response.output_text.delta", 2, {"delta": "one\n\ntwo"}),
        PING,
    ]
    answer = ask({"t": Replicas([Answer([EVENTS, *pieces, DIED])])}, "/v1/responses", {"input": "x", "stream": True})
    name, data = answer.text.removeprefix(b"".join(pieces).decode()).strip().split("\n")
    assert name == "event: response.failed"
    last = json.loads(data.removeprefix("data: "))
    assert (last["type"], last["sequence_number"]) == ("response.failed", 3)
    error = {"code": "server_error", "message": "the replica that wrote this text died; ask again"}
    assert last["response"] == CREATED | {"status": "failed", "error": error}


def test_the_page_reads_that_the_replica_died() -> None:
    replicas = Replicas([Answer([EVENTS, event("queued", {"target": "t"}), DIED])])
    last = ask({"t": replicas}, "/page/passes", {"messages": []}).text.split("\n\n")[1]
    assert last.startswith('event: error\ndata: {"error": ')


def test_it_is_given_up_when_replica_after_replica_dies() -> None:
    replicas = Replicas([Answer([DIED]) for _ in range(MAX_ATTEMPTS)])
    answer = ask({"t": replicas}, body={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert len(replicas.calls) == MAX_ATTEMPTS


def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    answer = ask({"t": Replicas([Answer([BackPressureError(256, 256)])])}, body={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("body", "target"),
    [({"model": "b"}, "b"), ({"model": "a"}, "a"), ({}, "a"), ({"model": "c"}, "a"), ([1], "a"), (b"{bad", "a")],
)
def test_the_model_chooses_and_the_first_target_refuses_what_nobody_serves(body: Any, target: str) -> None:
    replicas = {name: Replicas([Answer([JSON, b"{}"])]) for name in ("a", "b")}
    ask(replicas, body=body)
    assert {name for name, each in replicas.items() if each.calls} == {target}


@pytest.mark.parametrize(("name", "target"), [("b/b", "b/b"), ("b%2Fb", "b/b"), ("a", "a"), ("c", "a"), ("", "a")])
def test_a_model_is_described_by_its_own_replicas(name: str, target: str) -> None:
    replicas = {each: Replicas([Answer([JSON, b"{}"])]) for each in ("a", "b/b")}
    ask(replicas, f"/v1/models/{name}")
    assert {each for each, asked in replicas.items() if asked.calls} == {target}


def test_a_body_that_is_too_deep_to_be_parsed_reaches_no_replica() -> None:
    replicas = Replicas([])
    answer = ask({"t": replicas}, body=b"[" * 500)
    assert (answer.status_code, answer.json()["error"]["message"][:24]) == (400, "body: nested 500 deep, a")
    assert replicas.calls == []


def test_a_body_that_is_too_large_reaches_no_replica() -> None:
    replicas = Replicas([])
    assert ask({"t": replicas}, body=b" " * 1001).status_code == 413
    assert replicas.calls == []


def test_models_of_all_targets_are_one_list_and_a_refusal_is_the_answer() -> None:
    lists = [Answer([JSON, json.dumps({"data": [{"id": name}]}).encode()]) for name in ("a", "b")]
    told = ask({"a": Replicas([lists[0]]), "b": Replicas([lists[1]])}, "/v1/models").json()
    assert told == {"object": "list", "data": [{"id": "a"}, {"id": "b"}]}
    unauthorised = Answer([ResponseStart(401, ()), b"{}"])
    assert ask({"a": Replicas([unauthorised])}, "/v1/models").status_code == 401


def test_it_is_ready_when_every_target_has_a_replica_that_answers() -> None:
    facts = ReplicaStatus("worker-1", "a", 3, "s")
    ready, missing = Replicas([], [facts, DIED]), Replicas([], DeploymentUnavailableError("b"))
    assert ask({"a": ready}, "/readyz").status_code == 200
    answer = ask({"a": ready, "b": missing}, "/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "no replica of b"})
    assert [each["worker"] for each in ask({"a": ready}, "/replicas").json()] == ["worker-1"]
    assert ask({"b": missing}, "/healthz").status_code == 200


def test_what_is_about_all_tenants_is_for_holders_of_the_metrics_key() -> None:
    replicas = Replicas([], [ReplicaStatus("worker-1", "a", 3, "s")])
    ingress = Ingress(WorkerSettings(metrics_key="sk-of-prometheus-0123456789"), {"a": replicas})

    async def statuses(**headers: str) -> list[int]:
        transport = httpx.ASGITransport(app_of(ingress))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return [(await client.get(path)).status_code for path in ("/replicas", "/readyz")]

    assert asyncio.run(statuses()) == [401, 200]
    assert asyncio.run(statuses(authorization="Bearer sk-of-a-tenant-0123456789")) == [401, 200]
    assert asyncio.run(statuses(authorization="Bearer sk-of-prometheus-0123456789")) == [200, 200]


@pytest.mark.parametrize("path", ["/v1/completions", "/readyz", "/replicas"])
def test_a_name_that_is_not_allowed_gets_no_answer(path: str) -> None:
    replicas = Replicas([Answer([JSON, b"{}"])], [ReplicaStatus("worker-1", "a", 3, "s")])
    ingress = Ingress(WorkerSettings(allowed_hosts=("fleet",)), {"a": replicas})

    async def status(host: str) -> int:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(ingress)), base_url=f"http://{host}"
        ) as client:
            return (await client.get(path)).status_code

    assert asyncio.run(status("evil.example:8000")) == 421
    assert replicas.calls == []
    assert asyncio.run(status("fleet:8000")) == 200


def test_one_replica_that_hangs_makes_nobody_unready() -> None:
    replicas = Replicas([])
    ingress = Ingress(SETTINGS, {"a": replicas})

    async def status() -> int:
        return (await ingress(Request(HttpCall("GET", "/readyz").scope))).status_code

    seen = []
    facts = [ReplicaStatus("worker-1", "a", 3, "s")]
    for told in (TimeoutError(), facts, TimeoutError(), [DIED], TimeoutError()):
        replicas.facts = told
        seen.append(asyncio.run(status()))
    assert seen == [503, 200, 200, 503, 503]
    replicas.facts = TimeoutError()
    assert ask({"a": replicas}, "/replicas").json() == []


def test_a_client_that_goes_away_is_told_to_the_replica() -> None:
    """In the middle of a stream, whose rest nobody reads."""
    answer = Answer([EVENTS, *[b"data: 1\n\n"] * 100])

    async def leave() -> None:
        app = app_of(Ingress(SETTINGS, {"t": Replicas([answer])}))
        scope = HttpCall("POST", "/v1/completions").scope
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])
        sent = 0

        async def receive() -> dict[str, Any]:
            if (message := next(messages, None)) is not None:
                return message
            while sent < 3:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(_message: dict[str, Any]) -> None:
            nonlocal sent
            sent += 1
            await asyncio.sleep(0)

        await app(scope, receive, send)

    asyncio.run(leave())
    assert answer.is_cancelled


def test_a_request_that_serve_cancels_is_cancelled_at_the_replica() -> None:
    """Serve cancels a request when its client disconnects before the response began."""
    answer = Answer([JSON], never_ends=True)

    async def cancelled() -> None:
        ingress = Ingress(SETTINGS, {"t": Replicas([answer])})
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> dict[str, Any]:
            return next(messages)

        asked = asyncio.create_task(ingress(Request(HttpCall("POST", "/v1/completions").scope, receive)))
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(cancelled())
    assert answer.is_cancelled


def test_a_client_that_leaves_at_the_head_of_its_stream_is_told_to_the_replica_at_once() -> None:
    """Before the first event is sent, so the iterator of the events never starts."""
    answer = Answer([EVENTS, b"data: 1\n\n"], never_ends=True)

    async def leave() -> None:
        ingress = Ingress(SETTINGS, {"t": Replicas([answer])})
        scope = HttpCall("POST", "/v1/completions").scope
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])
        head = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if (message := next(messages, None)) is not None:
                return message
            await head.wait()
            return {"type": "http.disconnect"}

        async def send(_message: dict[str, Any]) -> None:
            head.set()
            await asyncio.Event().wait()

        response = await ingress(Request(scope, receive))
        await response(scope, receive, send)
        assert answer.is_cancelled

    asyncio.run(leave())
