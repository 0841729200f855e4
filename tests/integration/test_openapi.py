"""The OpenAPI document is true: whatever it allows is served or refused as it says, and what it forbids is refused or
taken as clients mean it.

Requests are made from the document itself; every answer must have a status, a content type and a shape that it names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.auth import API_KEY_HEADER
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.tiny_engine import PATIENCE_S, tiny_worker

KEY = "sk-for-the-document-0123"
HEADERS = {"Authorization": f"Bearer {KEY}", API_KEY_HEADER: KEY}
"""Every header of the document, so that what is forbidden is in the body: without a key nothing else is looked at."""
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 25
OPERATIONS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
ASKED = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 4}
STREAMS = {
    "/v1/completions": {"prompt": "What is 2 + 2?", "max_tokens": 4},
    "/v1/chat/completions": ASKED,
    "/v1/responses": {"input": "What is 2 + 2?", "max_output_tokens": 4},
    "/v1/messages": ASKED,
}
load_all_checks()


@pytest.fixture(scope="module")
def app(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Iterator[FastAPI]:
    metrics = CountingMetrics()
    worker = tiny_worker(tiny_models, omnidraft_home, metrics)
    requests = RequestQueue(metrics, max_waiting=4)
    served = [ServedModel(worker.engine, worker.target.fingerprint)]
    limits = WorkerSettings(max_new_tokens=4, api_keys=(ApiKey(key=KEY),))
    yield application(requests, served, limits, lambda: b"# metrics\n")
    requests.close(PATIENCE_S)


@pytest.fixture(scope="module")
def document(app: FastAPI) -> BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_one_that_the_document_names(
    document: BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    @settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(document[path][method].as_strategy(mode, headers=HEADERS))
    def check(case: schemathesis.Case) -> None:
        response = case.call_and_validate(checks=CHECKS)
        assert response.status_code != 401
        if response.status_code >= 400:
            check_shape(path, response.json())

    check()


@pytest.mark.parametrize("path", STREAMS)
def test_every_event_of_a_stream_is_one_that_the_document_names(document: BaseSchema, app: FastAPI, path: str) -> None:
    with TestClient(app, headers=HEADERS) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
    case = document[path]["POST"].Case(body={**STREAMS[path], "model": model, "stream": True})
    response = case.call_and_validate(headers=HEADERS, checks=CHECKS)
    assert response.status_code == 200
    assert response.headers["content-type"][0].startswith("text/event-stream")


def check_shape(path: str, body: dict[str, Any]) -> None:
    """Every error has the shape of its protocol."""
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"}
        assert set(body["error"]) - {"details"} == {"type", "message"}  # details of a refused `thread`
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}


def test_what_is_no_operation_is_refused_in_the_same_shape(app: FastAPI) -> None:
    with TestClient(app, headers=HEADERS) as client:
        for method, path in (("PUT", "/v1/completions"), ("GET", "/v1/chat/completions"), ("GET", "/v1/none")):
            response = client.request(method, path)
            assert response.status_code in (404, 405)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_every_status_of_ours_is_in_the_document_and_no_other(app: FastAPI) -> None:
    paths = app.openapi()["paths"]
    assert set(paths) >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/healthz", "/readyz", "/metrics"}
    for name in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        operation = paths[name]["post"]
        assert set(operation["responses"]) == {"200", "400", "401", "403", "404", "413", "429", "500", "503"}
        assert operation["security"] == [{"key": []}, *([{"x_api_key": []}] if name == "/v1/messages" else [])]
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
