"""Responses tell how their drafts were accepted in vLLM's shape, as AIPerf checks it."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.decode.step_stats import DecodeStats
from omnidraft.ports import DraftTree, Source, Step, Timings
from omnidraft.serving.answer import response_metrics

BODY: dict[str, Any] = {"prompt": "How many clips", "max_tokens": 40, "seed": 5}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "How many clips"}], "max_tokens": 40, "seed": 5}


def check(metrics: dict[str, Any], num_tokens: int) -> None:
    """What AIPerf 0.13 refuses a response for."""
    told = metrics["speculative_decoding"]
    histogram = told["acceptance_histogram"]
    assert len(histogram) == told["num_spec_tokens"] + 1
    assert sum(histogram) == told["num_spec_steps"]
    assert sum(count * times for count, times in enumerate(histogram)) == told["num_accepted_draft_tokens"]
    assert told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]
    assert 1 <= told["mean_acceptance_length"] <= told["num_spec_tokens"] + 1
    assert 0 <= told["draft_acceptance_rate"] <= 1
    assert told["num_accepted_draft_tokens"] <= num_tokens
    assert all(metrics[name] >= 0 for name in ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms"))
    assert metrics["tokens_per_second"] > 0


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_whole_and_in_the_last_chunk_of_a_stream_with_usage(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    whole = client.post(path, json=body).json()
    check(whole["metrics"], whole["usage"]["completion_tokens"])
    assert whole["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(path, json=body | options).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert ["metrics" in chunk for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    check(chunks[-1]["metrics"], whole["usage"]["completion_tokens"])


def test_plain_decoding_has_no_steps_and_several_choices_have_no_metrics(client: TestClient) -> None:
    plain = client.post("/v1/completions", json=BODY | {"speculation": "off"}).json()
    check(plain["metrics"], plain["usage"]["completion_tokens"])
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert "metrics" not in client.post("/v1/completions", json=BODY | {"n": 2}).json()


@given(st.lists(st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))))
def test_the_counts_fit_whatever_was_drafted_and_accepted(passes: list[tuple[int, int]]) -> None:
    stats = DecodeStats()
    stats.begin()
    for drafted, accepted in [*passes, (0, 0)]:
        tree = DraftTree.chain(0, range(drafted), [Source.DIRECT] * drafted, [0.0] * drafted)
        path = tuple(range(1, accepted + 1))
        stats.take(Step(tree, (0,) * (accepted + 1), path, "", None, Timings(), None))
    told = response_metrics(stats).model_dump()
    check(told, stats.num_tokens)
    assert told["speculative_decoding"]["num_draft_tokens"] == sum(drafted for drafted, _ in passes)
    assert told["speculative_decoding"]["num_spec_steps"] == sum(drafted > 0 for drafted, _ in passes)
