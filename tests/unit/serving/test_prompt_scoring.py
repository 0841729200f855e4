"""Scoring of prompts promises turns for clients, order within a client, room that is counted, and one prompt's keys at
a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.teacher_forcing import PromptToken
from omnidraft.ports import Request
from omnidraft.serving.fair_queue import PromptScoring
from omnidraft.serving.queued_request import QueuedRequest


@dataclass(frozen=True)
class CountingEngine:
    """Scores a prompt in as many passes as it has characters; one prompt at a time holds keys."""

    holders: list[str] = field(default_factory=list)

    def decode_request(self, request: GenerationRequest) -> Request:
        return Request((1,) * len(request.prompt or ""), (), 1)

    def score_prompt(self, request: GenerationRequest, decoded: Request) -> Iterator[list[PromptToken]]:
        self.holders.append(request.request_id)
        try:
            for _ in request.prompt or "":
                assert self.holders == [request.request_id]
                yield []
        finally:
            self.holders.remove(request.request_id)


ENGINE = CountingEngine()


def request(client: str, num_passes: int, num_texts: int = 1, num_prompts: int = 1) -> QueuedRequest:
    generations = [GenerationRequest(prompt="x" * num_passes, num_prompt_log_probs=0) for _ in range(num_prompts)]
    generations += [GenerationRequest(prompt="x" * num_passes)] * (num_texts - 1)
    return QueuedRequest(cast(Engine, ENGINE), generations, client=client)


def scored(scoring: PromptScoring) -> tuple[list[str], list[QueuedRequest]]:
    """The client of each pass, and the requests in the order in which their scores are complete."""
    clients, completed = [], []
    while scoring:
        first = scoring.first()
        is_complete, seconds = scoring.step()
        if is_complete:
            completed.append(first)
        elif seconds:
            clients.append(first.client)
    return clients, completed


def test_a_client_waits_for_one_prompt_of_another_and_not_for_all_of_them() -> None:
    scoring = PromptScoring()
    many, one = [request("many", 3) for _ in range(20)], request("one", 3)
    for each in (*many, one):
        scoring.add(each)
    clients, completed = scored(scoring)
    assert clients[:9] == ["many"] * 3 + ["one"] * 3 + ["many"] * 3
    assert completed == [many[0], one, *many[1:]]


def test_the_prompts_of_one_request_take_turns_with_another_client() -> None:
    scoring = PromptScoring()
    several, one = request("several", 2, num_prompts=3), request("one", 2)
    for each in (several, one):
        scoring.add(each)
    clients, completed = scored(scoring)
    assert clients == ["several"] * 2 + ["one"] * 2 + ["several"] * 4
    assert completed == [one, several]


def test_a_request_that_ends_within_its_prompt_frees_the_keys() -> None:
    scoring, gone, other = PromptScoring(), request("a", 3), request("b", 2)
    for each in (gone, other):
        scoring.add(each)
    scoring.step()
    scoring.remove(gone)
    assert scored(scoring) == (["b"] * 2, [other])


def test_every_text_of_a_request_takes_room_until_its_scores_are_complete() -> None:
    scoring, gone = PromptScoring(), request("b", 2)
    for each in (request("a", 1, num_texts=3), gone):
        scoring.add(each)
    assert sorted(scoring.clients) == ["a", "a", "a", "b"]
    scoring.remove(gone)
    scoring.remove(gone)
    assert list(scoring.clients) == ["a", "a", "a"]
    scored(scoring)
    assert list(scoring.clients) == []
