"""How long an answer may be: as long as the client, the deployment and the context all allow."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.serving.answer import ServedModel
from omnidraft.serving.app import application
from omnidraft.serving.request_queue import RequestQueue

ALMOST_FULL = "clips " * 995
TOO_LONG = "clips " * 1024
MESSAGES = [{"role": "user", "content": "clips " * 980}]


ASKED = [{"role": "user", "content": "How many clips"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "How many clips", "ignore_eos": True},
    "/v1/chat/completions": {"messages": ASKED, "ignore_eos": True},
    "/v1/responses": {"input": "How many clips"},
    "/v1/messages": {"messages": ASKED},
}
LIMITS = {"/v1/completions": "max_tokens", "/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}


@pytest.fixture
def unlimited(requests: RequestQueue, engine: Engine) -> Iterator[TestClient]:
    """A client of a worker whose operator limits no answer."""
    made = application(requests, [ServedModel(engine, "print")], WorkerSettings(), lambda: b"")
    with TestClient(made, raise_server_exceptions=False) as client:
        yield client


def never_stopping(engine: Engine) -> dict[str, float]:
    return {str(token): -100.0 for token in engine.pair.target_tokenizer.stop_ids}


def post(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_tokens": -1}, {"max_tokens": 32_000}], ids=str)
def test_an_answer_goes_on_to_the_end_of_the_context_where_nobody_limits_it(
    unlimited: TestClient, engine: Engine, path: str, limit: dict[str, Any]
) -> None:
    answer = post(unlimited, path, ENDPOINTS[path] | limit | {"seed": 5})
    assert answer["usage"]["total_tokens"] == engine.decoder.target.context_limit == 1024
    assert answer["usage"]["completion_tokens"] > 256
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("num_tokens", [65, 32_000])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_limit_above_the_deployments_is_a_ceiling_and_no_demand(
    client: TestClient, engine: Engine, path: str, num_tokens: int
) -> None:
    field = LIMITS.get(path, "max_completion_tokens")
    usage = post(client, path, ENDPOINTS[path] | {field: num_tokens, "seed": 5})["usage"]
    assert 0 < usage.get("completion_tokens", usage.get("output_tokens")) <= 64


@pytest.mark.parametrize(
    ("path", "prompt"), [("/v1/completions", {"prompt": ALMOST_FULL}), ("/v1/chat/completions", {"messages": MESSAGES})]
)
def test_an_answer_without_a_limit_ends_where_the_context_does(
    client: TestClient, engine: Engine, path: str, prompt: dict[str, Any]
) -> None:
    body = prompt | {"seed": 5, "logit_bias": never_stopping(engine)}
    answer = post(client, path, body)
    assert answer["usage"]["total_tokens"] == engine.decoder.target.context_limit
    assert answer["usage"]["completion_tokens"] < 64
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_answer_without_a_limit_has_no_more_than_the_deployment_allows(client: TestClient, engine: Engine) -> None:
    body = {"prompt": "How many clips", "seed": 5, "logit_bias": never_stopping(engine)}
    assert post(client, "/v1/completions", body)["usage"]["completion_tokens"] == 64


def test_a_response_without_a_limit_ends_where_the_context_does(client: TestClient) -> None:
    response = post(client, "/v1/responses", {"input": MESSAGES[0]["content"], "seed": 5})
    assert response["status"] in ("completed", "incomplete")
    assert response["usage"]["output_tokens"] < 64


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}], "stream": True}),
        ("/v1/responses", {"input": TOO_LONG}),
    ],
)
def test_a_full_context_is_told_in_the_words_that_clients_look_for(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    """By the code or by these words agents know that they have to compact a conversation."""
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["code"] == "context_length_exceeded"
    told = r"This model's maximum context length is 1024 tokens\. However, your request has \d{4,} tokens"
    assert re.match(told, error["message"])


def test_a_full_context_is_told_in_anthropics_words_to_its_clients(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": TOO_LONG}], "max_tokens": 8}
    num_tokens = post(client, "/v1/messages/count_tokens", {"messages": body["messages"]})["input_tokens"]
    response = client.post("/v1/messages", json=body)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {num_tokens} tokens > 1023 maximum",
    }


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_one_prompt_that_is_too_long_refuses_its_request_before_the_answer_begins(
    client: TestClient, is_streamed: bool
) -> None:
    body = {"prompt": ["one", "two", "three", TOO_LONG], "max_tokens": 20, "stream": is_streamed}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("top_k", [-1, 0])
def test_a_top_k_that_is_off_in_vllm_is_off_here(client: TestClient, top_k: int) -> None:
    body = {"prompt": "How many clips", "max_tokens": 12, "seed": 5}
    (plain,), (off,) = (post(client, "/v1/completions", each)["choices"] for each in (body, body | {"top_k": top_k}))
    assert off == plain
    assert client.post("/v1/completions", json=body | {"top_k": -2}).status_code == 400
