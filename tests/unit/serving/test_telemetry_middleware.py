"""The telemetry middleware counts every response, and continues the trace of a sound traceparent only."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient

from omnidraft.ports import NoopTracing
from omnidraft.serving.telemetry_middleware import TelemetryMiddleware
from omnidraft.telemetry.metrics import CountingMetrics

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OURS = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


@dataclass
class RecordingTracing:
    """A Tracing that remembers, and a span of it."""

    is_on: bool = True
    context: str = OURS
    begun: list[dict[str, object]] = field(default_factory=list)
    ended: list[dict[str, object]] = field(default_factory=list)

    def begin(self, name: str, **facts: object) -> "RecordingTracing":
        self.begun.append({"name": name, **facts})
        return self

    def end(self, **facts: object) -> None:
        self.ended.append(facts)

    def close(self, timeout_s: float) -> None: ...


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/completions")
    def completions(request: Request) -> dict[str, object]:
        return {"seen": request.headers.getlist("traceparent")}

    @app.post("/v1/chat/completions")
    def chat() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            yield b"two"

        return StreamingResponse(pieces())

    @app.get("/healthz")
    def broken() -> None:
        raise RuntimeError("not today")

    return app


def client(tracing: RecordingTracing | NoopTracing, metrics: CountingMetrics) -> TestClient:
    return TestClient(TelemetryMiddleware(application(), metrics, tracing), raise_server_exceptions=False)


def test_every_response_is_counted_by_path_and_code_and_strangers_paths_are_one() -> None:
    metrics = CountingMetrics()
    ask = client(NoopTracing(), metrics)
    assert ask.post("/v1/completions").status_code == 200
    assert ask.post("/v1/chat/completions").text == "onetwo"
    assert ask.get("/healthz").status_code == 500
    assert {ask.get(f"/{guess}").status_code for guess in ("admin", "wp-login.php")} == {404}
    expected = {("/v1/completions", "200"): 1, ("/v1/chat/completions", "200"): 1, ("/healthz", "500"): 1}
    for (path, code), times in (expected | {("other", "404"): 2}).items():
        assert metrics.value("omnidraft_http_responses_total", path=path, code=code) == times
    assert len(metrics.observed("omnidraft_http_request_seconds")) == 5


@pytest.mark.parametrize(
    ("sent", "parent"),
    [
        ([PARENT], PARENT),
        ([], None),
        ([PARENT, PARENT], None),
        (["00-" + "0" * 32 + "-b7ad6b7169203331-01"], None),
        (["garbage " * 1000], None),
        (["ff" + PARENT[2:]], None),
    ],
)
def test_a_request_goes_on_from_a_sound_traceparent_and_the_application_sees_ours(
    sent: list[str], parent: str | None
) -> None:
    tracing = RecordingTracing()
    response = client(tracing, CountingMetrics()).post(
        "/v1/completions", headers=[("traceparent", each) for each in sent]
    )
    assert response.json() == {"seen": [OURS]}
    assert tracing.begun == [{"name": "request", "parent": parent, "method": "POST", "path": "/v1/completions"}]
    assert tracing.ended == [{"status": 200}]


def test_looks_at_health_are_no_traces() -> None:
    tracing = RecordingTracing()
    client(tracing, CountingMetrics()).get("/healthz")
    assert tracing.begun == []


def test_untraced_the_callers_header_is_left_alone() -> None:
    response = client(NoopTracing(), CountingMetrics()).post("/v1/completions", headers={"traceparent": PARENT})
    assert response.json() == {"seen": [PARENT]}
