"""Log-probabilities: the target's own, in OpenAI's two shapes, whole and streamed alike, whatever drafts."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from omnidraft.decode.engine import Engine
from omnidraft.ports import DraftTree, LogProbs, Step, Timings
from omnidraft.serving.response_formats import (
    MIN_LOGPROB,
    LogprobCollector,
    LogprobEntry,
    for_chat,
    for_completion,
    token_text,
)
from omnidraft.vocab.tokenizer import Vocabulary
from tests.http_server import events, post

BODY = {"prompt": "How many clips", "max_tokens": 24, "seed": 5, "temperature": 1.3, "mode": "reproducible"}
CHAT = {"messages": [{"role": "user", "content": "How many clips"}], "max_tokens": 24, "seed": 5}
EURO = "\u20ac".encode()
VOCABULARY = Vocabulary((b"a", b"bc", EURO[:1], EURO[1:2], EURO[2:], b"", b"\xff"), {}, frozenset({5}))
NAME_OF = partial(token_text, vocabulary=VOCABULARY)


def step(tokens: list[int], text: str, likeliest: tuple[tuple[int, float], ...] = ()) -> Step:
    logprobs = LogProbs((-1.0,) * len(tokens), (likeliest,) * len(tokens))
    return Step(DraftTree.empty(0), tuple(tokens), (), text, None, Timings(), None, logprobs)


def test_entries_go_out_with_the_text_that_their_tokens_are_in() -> None:
    entries = LogprobCollector(VOCABULARY, {})
    assert [(each.token, each.offset) for each in entries.take(step([0, 1, 2], "abc"))] == [(0, 0), (1, 1)]
    assert entries.take(step([3], "")) == []
    assert [(each.token, each.offset) for each in entries.take(step([4], "\u20ac"))] == [(2, 3), (3, 3), (4, 3)]
    assert entries.take(step([1], "")) == []  # may yet be a stop string's beginning
    assert [each.offset for each in entries.take(step([0], "b"))] == [4]  # "c" is where the stop string begins
    assert entries.take(step([5], "")) == []  # the stop token


def test_a_token_behind_a_broken_character_begins_behind_it() -> None:
    entries = LogprobCollector(VOCABULARY, {})
    logprobs = entries.take(step([2, 0, 2, 3, 6, 1], "\ufffda\ufffd\ufffdbc"))
    assert [(each.token, each.offset) for each in logprobs] == [(2, 0), (0, 1), (2, 2), (3, 2), (6, 3), (1, 4)]


def test_a_marker_whose_text_is_shown_has_its_length_and_the_stop_token_behind_it_no_entry() -> None:
    entries = LogprobCollector(VOCABULARY, {5: b"<call>"})
    assert [(each.token, each.offset) for each in entries.take(step([5, 0], "<call>a"))] == [(5, 0), (0, 6)]
    assert [(each.token, each.offset) for each in entries.take(step([5, 1, 1], "<call>bc"))] == [(5, 7), (1, 13)]


def test_tokens_are_spelled_so_that_no_two_look_alike() -> None:
    names = [token_text(token, VOCABULARY) for token in range(7)]
    assert names == ["a", "bc", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "id:5", "bytes:\\xff"]


@pytest.mark.parametrize(("emitted", "told"), [(0, -0.1), (1, -0.1), (2, -9.0)])
def test_of_tokens_that_are_spelled_alike_the_emitted_one_counts_then_the_likeliest(emitted: int, told: float) -> None:
    twins = Vocabulary((b"a", b"b", b"a"), {}, frozenset())
    likeliest = ((0, -0.1), (1, -3.0), (2, -9.0))
    entry = LogprobEntry(emitted, dict(likeliest)[emitted], likeliest, 0)
    (top,) = for_completion([entry], partial(token_text, vocabulary=twins))["top_logprobs"]
    assert top == {"a": told, "b": -3.0}


def test_both_shapes_have_the_emitted_token_and_the_likeliest() -> None:
    entries = [LogprobEntry(1, -2.0, ((0, -0.5), (2, -math.inf)), 7)]
    completion = for_completion(entries, NAME_OF)
    assert completion == {
        "tokens": ["bc"],
        "token_logprobs": [-2.0],
        "top_logprobs": [{"a": -0.5, "bytes:\\xe2": MIN_LOGPROB, "bc": -2.0}],
        "text_offset": [7],
    }
    (logprobs,) = for_chat(entries, NAME_OF, VOCABULARY)["content"]
    likeliest = [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "bytes:\\xe2", "logprob": MIN_LOGPROB, "bytes": [0xE2]},
    ]
    assert logprobs == {"token": "bc", "logprob": -2.0, "bytes": [98, 99], "top_logprobs": likeliest}


@pytest.mark.parametrize("num", [0, 1, 5])
def test_a_completion_has_as_many_as_were_requested(client: TestClient, num: int) -> None:
    (choice,) = post(client, "/v1/completions", BODY | {"logprobs": num})["choices"]
    logprobs = choice["logprobs"]
    assert len({len(part) for part in logprobs.values()}) == 1
    for token, log_p, top, offset in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], logprobs["text_offset"], strict=True
    ):
        assert MIN_LOGPROB <= log_p < 0
        assert num <= len(top) <= num + (num > 0)
        assert num == 0 or top[token] == log_p
        if not token.startswith(("bytes:", "id:")):
            assert choice["text"][offset : offset + len(token)] == token
    assert post(client, "/v1/completions", BODY)["choices"][0]["logprobs"] is None


def test_the_bytes_of_a_chats_tokens_are_its_text(client: TestClient) -> None:
    (choice,) = post(client, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20})["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode(errors="replace") == choice["message"]["content"]
    for each in content:
        likeliest = [other["logprob"] for other in each["top_logprobs"]]
        assert len(likeliest) == 20
        assert likeliest == sorted(likeliest, reverse=True)
        assert each["logprob"] <= likeliest[0]
    (plain,) = post(client, "/v1/chat/completions", CHAT | {"logprobs": True})["choices"]
    assert [each["top_logprobs"] for each in plain["logprobs"]["content"]] == [[]] * len(content)


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_ones_are_those_of_the_whole_and_no_drafter_shows_in_them(client: TestClient, echo: bool) -> None:
    body = BODY | {"logprobs": 3, "echo": echo}
    (whole,) = post(client, "/v1/completions", body)["choices"]
    (plain,) = post(client, "/v1/completions", body | {"speculation": "off"})["choices"]
    assert plain == whole
    joined: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    shown = ""
    for event in events(client.post("/v1/completions", json=body | {"stream": True})):
        (choice,) = event["choices"]
        for name, part in choice["logprobs"].items():
            joined[name] += part
        shown += choice["text"]
        assert echo or all(offset < len(shown) for offset in choice["logprobs"]["text_offset"])
    assert (joined, shown) == (whole["logprobs"], whole["text"])


def test_what_sampling_settings_do_is_not_in_them(client: TestClient) -> None:
    """A bias of 100 makes one token certain, and leaves what the target thinks of it as it was."""
    body = BODY | {"logprobs": 5, "temperature": 0}
    (before,) = post(client, "/v1/completions", body)["choices"]
    (after,) = post(client, "/v1/completions", body | {"logit_bias": {"40": 100}, "temperature": 0.5})["choices"]
    shared = before["logprobs"]["top_logprobs"][0]
    assert after["logprobs"]["tokens"] != before["logprobs"]["tokens"]
    assert after["logprobs"]["token_logprobs"][0] < -1
    assert {name: after["logprobs"]["top_logprobs"][0][name] for name in shared} == shared


def test_they_are_logarithms_of_a_distribution(engine: Engine, client: TestClient) -> None:
    """Against a softmax in float64 of the target's logits."""
    (choice,) = post(client, "/v1/completions", BODY | {"logprobs": 5})["choices"]
    ids = engine.pair.target_tokenizer.prompt_ids(BODY["prompt"])
    session = engine.decoder.target.open(ids, 1, "reproducible")
    logits_V = session.score(DraftTree.empty(ids[-1]))[0].double().numpy()
    session.close()
    log_p_V = logits_V - np.log(np.exp(logits_V).sum())
    vocabulary = engine.pair.target_tokenizer.vocabulary
    best = sorted(range(len(log_p_V)), key=lambda token: -log_p_V[token])[:5]
    logprobs = choice["logprobs"]["top_logprobs"][0]
    for token in best:
        assert logprobs[token_text(token, vocabulary)] == pytest.approx(log_p_V[token], abs=1e-5)


def test_who_asks_for_ids_or_an_echo_counts_tokens_so_that_each_has_its_entry(
    engine: Engine, client: TestClient
) -> None:
    """Those that end a text too, which show nothing; else lm-eval takes the last of a choice for the one behind it."""
    (end, *_) = sorted(engine.pair.target_tokenizer.stop_ids)
    ends = BODY | {"max_tokens": 4, "logprobs": 0, "logit_bias": {str(end): 100}, "temperature": 0}
    ids = engine.pair.target_tokenizer.prompt_ids(BODY["prompt"])
    (plain,) = post(client, "/v1/completions", ends)["choices"]
    (echo,) = post(client, "/v1/completions", ends | {"echo": True})["choices"]
    (told,) = post(client, "/v1/completions", ends | {"return_token_ids": True})["choices"]
    assert plain["logprobs"]["tokens"] == []
    assert len(echo["logprobs"]["tokens"]) == len(ids) + 1
    (named,) = post(client, "/v1/completions", ends | {"return_tokens_as_token_ids": True})["choices"]
    assert named["logprobs"]["tokens"] == [f"token_id:{end}"]
    assert (told["token_ids"], told["prompt_token_ids"], len(told["logprobs"]["tokens"])) == ([end], ids, 1)


def test_a_chat_tells_its_prompts_ids_beside_the_choices_once(client: TestClient) -> None:
    body = CHAT | {"logprobs": True, "return_token_ids": True, "n": 2, "max_tokens": 6}
    whole = post(client, "/v1/chat/completions", body)
    streamed = list(events(client.post("/v1/chat/completions", json=body | {"stream": True})))
    assert whole["prompt_token_ids"] == streamed[0]["prompt_token_ids"]
    assert all("prompt_token_ids" not in each for each in streamed[1:])
    for choice in whole["choices"]:
        chunks = [each["choices"][0] for each in streamed if each["choices"][0]["index"] == choice["index"]]
        assert [token for each in chunks for token in each["token_ids"]] == choice["token_ids"]
        for each in chunks:
            assert len(each["token_ids"]) == len((each["logprobs"] or {"content": ()})["content"])
