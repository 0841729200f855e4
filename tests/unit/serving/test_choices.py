"""Several texts of one request: each is a text of its own, of its own seed, under its own index."""

from collections import defaultdict
from itertools import groupby

import pytest
from fastapi.testclient import TestClient

from omnidraft.decode.sampling.noise import choice_seed
from omnidraft.serving.request_schemas import CompletionRequest
from tests.http_server import events

BODY = {"prompt": "How many clips", "max_tokens": 10, "seed": 5}


def texts(client: TestClient, body: dict) -> list[str]:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def test_the_first_choice_is_the_text_of_one_and_every_other_that_of_its_own_seed(client: TestClient) -> None:
    several = texts(client, BODY | {"n": 3})
    assert len(set(several)) == 3
    for number, text in enumerate(several):
        assert texts(client, BODY | {"seed": choice_seed(5, number)}) == [text]
    response = client.post("/v1/completions", json=BODY | {"n": 3, "figures": True}).json()
    assert response["omnidraft"]["seeds"] == [choice_seed(5, number) for number in range(3)]


def test_without_a_seed_no_two_choices_share_their_noise() -> None:
    asked = CompletionRequest(prompt=["How many clips"] * 3, n=2)
    assert len({each.seed for each in asked.generation_requests("default", 64)}) == 6
    seeded = CompletionRequest(prompt=["How many clips"] * 3, n=2, seed=5)
    assert [each.seed for each in seeded.generation_requests("default", 64)] == [5, choice_seed(5, 1)] * 3


def test_equal_prompts_without_a_seed_get_texts_of_their_own(client: TestClient) -> None:
    """Two of these texts of ten tokens, drawn apart, are equal with a probability below 1e-4."""
    same = {"prompt": ["How many clips"] * 3, "max_tokens": 10, "temperature": 1.5}
    assert len(set(texts(client, same))) == 3


def test_derived_seeds_are_seeds_that_can_be_asked_for() -> None:
    seeds = {choice_seed(seed, choice) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for choice in range(100)}
    assert len(seeds) == 500
    for seed in seeds:
        CompletionRequest(prompt="x", seed=seed)


def test_streamed_choices_carry_their_index_and_come_one_after_another(client: TestClient) -> None:
    body = BODY | {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/completions", json=body))
    joined, reasons = defaultdict(str), {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        joined[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
        assert chunk["usage"] is None
    assert list(joined.values()) == texts(client, BODY | {"n": 3})
    assert set(reasons.values()) <= {"length", "stop"}
    order = [index for index, _ in groupby(chunk["choices"][0]["index"] for chunk in chunks[:-1])]
    assert order == [0, 1, 2]
    assert chunks[-1]["choices"] == []
    assert 3 < chunks[-1]["usage"]["completion_tokens"] <= 30
    assert len({(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in chunks}) == 1


CHAT = {"messages": [{"role": "user", "content": "clips"}], "max_tokens": 6, "seed": 1}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_chats_choices_begin_with_their_roles_in_the_order_of_their_indices(client: TestClient, num: int) -> None:
    """OpenAI's client keeps its choices in a list, which it extends by the index that comes next."""
    response = client.post("/v1/chat/completions", json=CHAT | {"n": num, "stream": True})
    choices = [chunk["choices"][0] for chunk in events(response)]
    assert [choice["index"] for choice in choices[:num]] == list(range(num))
    assert {choice["delta"]["role"] for choice in choices[:num]} == {"assistant"}
    assert not any("role" in choice["delta"] for choice in choices[num:])
    whole = client.post("/v1/chat/completions", json=CHAT | {"n": num}).json()["choices"]
    for index in range(num):
        pieces = [choice["delta"]["content"] for choice in choices if choice["index"] == index]
        assert "".join(pieces) == whole[index]["message"]["content"]


@pytest.mark.parametrize("num", [1, 2])
def test_of_several_prompts_each_has_its_choices(client: TestClient, num: int) -> None:
    together = texts(client, BODY | {"prompt": ["How many clips", "A robe takes"], "n": num})
    apart = texts(client, BODY | {"n": num}) + texts(client, BODY | {"prompt": "A robe takes", "n": num})
    assert together == apart
    counts = [
        client.post("/v1/completions", json=BODY | {"prompt": prompt, "n": num}).json()["usage"]["prompt_tokens"]
        for prompt in ("How many clips", "A robe takes", ["How many clips", "A robe takes"])
    ]
    assert counts[0] + counts[1] == counts[2]


def test_parts_of_a_message_and_a_developers_message_are_what_they_say(client: TestClient) -> None:
    parts = [{"type": "text", "text": "How many "}, {"type": "text", "text": "clips"}]

    def content(messages: list[dict]) -> str:
        body = {"messages": messages, "max_tokens": 8, "seed": 2}
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

    user = {"role": "user", "content": "How many clips"}
    assert content([{"role": "user", "content": parts}]) == content([user])
    assert content([{"role": "developer", "content": "Be brief"}, user]) == content(
        [{"role": "system", "content": "Be brief"}, user]
    )
