"""Scoring of prompts promises turns for clients, order within a client, and room that is counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.prompt_logprobs import PromptToken
from omnidraft.serving.prompt_scoring import PromptScoring
from omnidraft.serving.queued_request import QueuedRequest


@dataclass(frozen=True)
class CountingEngine:
    """Scores a prompt in as many passes as it has characters."""

    def score_prompt(self, request: GenerationRequest) -> Iterator[list[PromptToken]]:
        for _ in request.prompt or "":
            yield []


def request(client: str, num_passes: int, num_texts: int = 1) -> QueuedRequest:
    generations = [GenerationRequest(prompt="x" * num_passes, num_prompt_log_probs=0)]
    generations += [GenerationRequest(prompt="x" * num_passes)] * (num_texts - 1)
    return QueuedRequest(cast(Engine, CountingEngine()), generations, client=client)


def scored(scoring: PromptScoring) -> tuple[list[str], list[QueuedRequest]]:
    """The client of each pass, and the requests in the order in which their scores are complete."""
    clients, completed = [], []
    while scoring:
        first = scoring.first()
        is_complete, _ = scoring.step()
        if is_complete:
            completed.append(first)
        else:
            clients.append(first.client)
    return clients, completed


def test_a_client_waits_for_one_pass_of_another_and_not_for_all_its_prompts() -> None:
    scoring = PromptScoring()
    many, one = [request("many", 3) for _ in range(20)], request("one", 3)
    for each in (*many, one):
        scoring.add(each)
    clients, completed = scored(scoring)
    assert clients[:6] == ["many", "one"] * 3
    assert completed == [many[0], one, *many[1:]]


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
