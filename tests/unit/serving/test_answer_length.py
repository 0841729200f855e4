"""How long an answer may be: what the client asks for, else what the deployment and the context allow."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from omnidraft.decode.engine import Engine

ALMOST_FULL = "clips " * 995
TOO_LONG = "clips " * 1024
MESSAGES = [{"role": "user", "content": "clips " * 980}]


def never_stopping(engine: Engine) -> dict[str, float]:
    return {str(token): -100.0 for token in engine.pair.target_tokenizer.stop_ids}


def post(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


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
    "body", [{"prompt": ALMOST_FULL, "max_tokens": 64}, {"prompt": TOO_LONG}], ids=["asked for", "no room at all"]
)
def test_what_does_not_fit_is_refused_in_the_words_of_the_api(client: TestClient, body: dict[str, Any]) -> None:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "1024" in message
    assert "max_tokens" in message
    assert "max_new_tokens" not in message


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
