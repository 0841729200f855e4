"""Which replica a conversation belongs to; the router itself runs in tests/integration/test_ray_serve.py."""

import json
from collections import Counter
from typing import Any

import pytest

from omnidraft.hosts.asgi_bridge import HttpCall
from omnidraft.hosts.ray_router import MOST_AHEAD, conversation_of, replica_of

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "How many clips?"}
ANSWER = {"role": "assistant", "content": "Seven."}


def conversation(body: Any, key: str = "", address: str = "10.0.0.1", port: int = 1) -> str:
    headers = ((b"authorization", key.encode()),) if key else ()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return conversation_of(HttpCall("POST", "/v1/chat/completions", headers, content, client=(address, port)))


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, **more}


def replica(of: str, *names: str, **lengths: int) -> str | None:
    return replica_of(of, dict.fromkeys(names, 0) | lengths, str)


def test_turns_of_a_conversation_are_one_and_other_beginnings_are_others():
    first = conversation(chat(SYSTEM, QUESTION))
    assert (
        conversation(chat(SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "Why?"}, temperature=1), port=2)
        == first
    )
    others = [
        conversation(chat(SYSTEM, {"role": "user", "content": "Why?"})),
        conversation(chat(QUESTION)),
        conversation(chat(SYSTEM, QUESTION, cache_salt="x")),
        conversation({**chat(SYSTEM, QUESTION), "model": "other"}),
    ]
    assert len({first, *others}) == 5


def test_a_prompt_that_goes_on_is_one_conversation():
    assert conversation({"prompt": "x" * 300}) == conversation({"prompt": "x" * 300 + "y"})
    assert conversation({"prompt": "x"}) != conversation({"prompt": "y"})


def test_no_client_follows_the_requests_of_another():
    """By key; by address where there are none."""
    body = chat(SYSTEM, QUESTION)
    seen = [
        conversation(body, key, address)
        for key, address in (("Bearer a", "1"), ("Bearer b", "1"), ("", "1"), ("", "2"))
    ]
    assert len(set(seen)) == 4
    assert conversation(body, "Bearer a", "2") == seen[0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{bad",
        b"\xff",
        [1],
        3,
        None,
        {},
        {"prompt": 5},
        {"messages": 3},
        {"messages": []},
        chat(SYSTEM),
        chat({}),
        chat(3),
    ],
)
def test_what_is_no_request_for_text_is_no_conversation(body: Any):
    assert conversation(body) == ""


def test_conversations_spread_and_a_new_replica_moves_only_its_share():
    conversations = [f"c{number}" for number in range(300)]
    two = {each: replica(each, "a", "b") for each in conversations}
    three = {each: replica(each, "a", "b", "c") for each in conversations}
    assert min(Counter(two.values()).values()) > 100
    assert min(Counter(three.values()).values()) > 60
    assert all(three[each] in (two[each], "c") for each in conversations)


def test_a_busy_replica_is_left_when_another_is_far_less_busy():
    home = replica("c", "a", "b")
    other = "b" if home == "a" else "a"
    assert replica("c", **{home: MOST_AHEAD, other: 0}) == home
    assert replica("c", **{home: MOST_AHEAD + 3, other: 3}) == home
    assert replica("c", **{home: MOST_AHEAD + 1, other: 0}) is None


def test_without_a_conversation_or_without_replicas_there_is_no_preference():
    assert replica("", "a", "b") is None
    assert replica("c") is None
