"""The log-probabilities of a prompt are the target's own, in vLLM's shape, and cost nobody else a wait."""

import math
from itertools import pairwise
from typing import Any

import pytest
from fastapi.testclient import TestClient

from omnidraft.decode.engine import Engine
from omnidraft.ports import DraftTree
from tests.http_server import events, post

BODY: dict[str, Any] = {"prompt": "How many clips", "max_tokens": 2, "seed": 5}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "How many clips"}], "max_tokens": 2, "seed": 5}


def expected(engine: Engine, ids: list[int]) -> list[float]:
    """Each token's log-probability, one pass of the target for each."""
    session = engine.decoder.target.open(ids[:1], len(ids), "reproducible")
    log_p = []
    for before, token in pairwise(ids):
        (logits_V,) = session.score(DraftTree.empty(before)).float()
        log_p.append(float(logits_V.log_softmax(-1)[token]))
        session.keep([0])
    session.close()
    return log_p


def test_they_are_what_the_target_expects_token_by_token(client: TestClient, engine: Engine) -> None:
    body = BODY | {"prompt": "How many clips did she sell altogether in May", "prompt_logprobs": 3}
    choice = post(client, "/v1/completions", body)["choices"][0]
    ids = post(client, "/tokenize", {"prompt": body["prompt"]})["tokens"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    told = [entries[str(token)] for token, entries in zip(ids[1:], others, strict=True)]
    assert [each["logprob"] for each in told] == pytest.approx(expected(engine, ids), abs=1e-4)
    for own, entries in zip(told, others, strict=True):
        assert len(entries) == 3 + (own["rank"] > 3)
        best = max(entries.values(), key=lambda entry: entry["logprob"])
        assert best["rank"] == 1
        assert own["logprob"] <= best["logprob"]
        assert sum(math.exp(entry["logprob"]) for entry in entries.values()) <= 1.001
    assert "".join(each["decoded_token"] for each in told) in body["prompt"]


def test_the_answer_is_the_same_with_and_without_them(client: TestClient) -> None:
    plain = post(client, "/v1/completions", BODY)["choices"][0]
    scored = post(client, "/v1/completions", BODY | {"prompt_logprobs": 0})["choices"][0]
    assert {len(entries) for entries in scored.pop("prompt_logprobs")[1:]} == {1}
    assert scored == plain


def test_a_chat_has_them_beside_its_choices_and_choices_share_those_of_their_prompt(client: TestClient) -> None:
    chat = post(client, "/v1/chat/completions", CHAT | {"prompt_logprobs": 1, "n": 2})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]
    streamed, *chunks = events(client.post("/v1/chat/completions", json=CHAT | {"prompt_logprobs": 1, "stream": True}))
    assert streamed["prompt_logprobs"] == chat["prompt_logprobs"]
    assert all("prompt_logprobs" not in chunk for chunk in chunks)
    body = BODY | {"prompt": ["How many", "How many clips"], "n": 2, "prompt_logprobs": 1}
    first, again, other, _ = (each["prompt_logprobs"] for each in post(client, "/v1/completions", body)["choices"])
    assert first == again
    assert other[: len(first)] == first
    assert "prompt_logprobs" not in post(client, "/v1/completions", BODY)["choices"][0]


def test_a_prompt_that_cannot_be_scored_ends_its_request_alone(client: TestClient, engine: Engine) -> None:
    long = {"prompt": "clips " * engine.decoder.target.context_limit, "max_tokens": 1, "prompt_logprobs": 1}
    assert client.post("/v1/completions", json=long).status_code == 400
    assert post(client, "/v1/completions", BODY)["choices"][0]["text"] != ""
