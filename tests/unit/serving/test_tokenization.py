"""Tokens are those that decoding reads, and go back to their text."""

import json
import unicodedata
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnidraft.decode.engine import Engine

MESSAGES = [{"role": "user", "content": "How many clips"}]


def post(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
def test_a_text_goes_to_tokens_and_back(client: TestClient, text: str) -> None:
    told = post(client, "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert told["count"] == len(told["tokens"])
    assert told["token_strs"] is None
    normalised = unicodedata.normalize("NFC", text)  # as the tokenizer does
    assert post(client, "/detokenize", {"tokens": told["tokens"]}) == {"prompt": normalised}


def test_the_tokens_of_a_prompt_are_counted_as_its_usage_counts_them(client: TestClient, engine: Engine) -> None:
    told = post(client, "/tokenize", {"prompt": "How many clips", "return_token_strs": True})
    usage = post(client, "/v1/completions", {"prompt": "How many clips", "max_tokens": 1})["usage"]
    assert told["count"] == len(told["token_strs"]) == usage["prompt_tokens"]
    assert told["max_model_len"] == engine.decoder.target.context_limit
    chat = post(client, "/tokenize", {"messages": MESSAGES, "model": engine.pair.target})
    usage = post(client, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})["usage"]
    assert chat["count"] == usage["prompt_tokens"] > told["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": ""}, 400, "empty"),
        ("/tokenize", {"prompt": "\ud800", "add_special_tokens": False}, 400, "surrogate"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens: 1000000 is none of"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ],
)
def test_what_has_no_tokens_is_refused(
    client: TestClient, path: str, body: dict[str, Any], status: int, named: str
) -> None:
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == status
    assert named in response.json()["error"]["message"]
