"""How long an answer may be: as long as the client, the deployment and the context all allow."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.serving.answer import ServedModel
from omnidraft.serving.app import application
from omnidraft.serving.request_queue import RequestQueue
from tests.http_server import post

ALMOST_FULL = "clips " * 995
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


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_tokens": -1}, {"max_tokens": 32_000}], ids=str)
def test_an_answer_goes_on_to_the_end_of_the_context_where_nobody_limits_it(
    unlimited: TestClient, engine: Engine, limit: dict[str, Any]
) -> None:
    answer = post(unlimited, "/v1/completions", {"prompt": "clips " * 700, "seed": 5, "ignore_eos": True} | limit)
    assert answer["usage"]["total_tokens"] == engine.decoder.target.context_limit == 1024
    assert answer["usage"]["completion_tokens"] > 256
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_limit_above_the_deployments_is_a_ceiling_and_no_demand(client: TestClient, path: str) -> None:
    field = LIMITS.get(path, "max_completion_tokens")
    usage = post(client, path, ENDPOINTS[path] | {field: 65, "seed": 5})["usage"]
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


@pytest.mark.parametrize("top_k", [-1, 0])
def test_a_top_k_that_is_off_in_vllm_is_off_here(client: TestClient, top_k: int) -> None:
    body = {"prompt": "How many clips", "max_tokens": 12, "seed": 5}
    (plain,), (off,) = (post(client, "/v1/completions", each)["choices"] for each in (body, body | {"top_k": top_k}))
    assert off == plain
    assert client.post("/v1/completions", json=body | {"top_k": -2}).status_code == 400
