"""Two measurements of delays: a long prompt that arrives while texts run, and the second turn of a chat."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from statistics import median
from threading import Event
from typing import Any

from omnidraft.client import CHAT, OpenAIClient, text_of
from pipelines.bench.throughput.clients import (
    TIMEOUT_S,
    Message,
    TimedAnswer,
    Workload,
    ask,
    cached_tokens,
    chat_body,
    spread,
    user,
)
from pipelines.bench.throughput.systems import Endpoint

NUM_RUNNING = 4
"""Texts that run when the long prompt arrives."""
RUNNING_TOKENS = 512
"""Tokens of a running text at most; another begins when it ends."""
USUAL_GAPS = 48
"""Gaps of each running text before the long prompt comes; the first WARM_UP_GAPS of them do not count."""
WARM_UP_GAPS = 16
ANSWER_TOKENS = 16
TURNS = 3
"""Chats of which the second turn is measured, and first turns beside them."""
NUM_REQUESTS = 3 * TURNS
QUESTION = "Say that again in other words."
_LOOK_EVERY_S = 0.01

Figures = dict[str, Any]
Gaps = list[tuple[float, float]]
"""(time of the earlier event, time of the later event)"""


def long_prompt(endpoint: Endpoint, work: Workload, num_tokens: int, temperature: float) -> Figures:
    """Return the gaps of NUM_RUNNING texts before a prompt of so many tokens is sent, and until its first token.

    A gap is the whole time between two events of a text, however many tokens the later one brought. Raises ApiError.
    """
    gaps: list[Gaps] = [[] for _ in range(NUM_RUNNING)]
    stop = Event()
    with OpenAIClient(endpoint.url, timeout_s=TIMEOUT_S) as api, ThreadPoolExecutor(NUM_RUNNING) as pool:

        def run(number: int) -> None:
            """Request one text after another until stopped."""
            for seed, prompt in enumerate(_endless(work, f"running {number}")):
                body = chat_body(endpoint, [user(prompt)], RUNNING_TOKENS, temperature, seed)
                before: float | None = None
                for event in api.stream(CHAT, body):
                    if stop.is_set():
                        return
                    if text_of(event):
                        now = time.perf_counter()
                        if before is not None:
                            gaps[number].append((before, now))
                        before = now

        running = [pool.submit(run, number) for number in range(NUM_RUNNING)]
        try:
            _until(lambda: all(len(of_text) >= USUAL_GAPS for of_text in gaps), running)
            body = chat_body(endpoint, [user(work.long_text("long", num_tokens))], ANSWER_TOKENS, temperature, 0)
            answer = ask(api, body)
            _until(lambda: all(of_text[-1][1] > answer.ended_s for of_text in gaps), running)
        finally:
            stop.set()
    return gap_figures(gaps, answer)


def gap_figures(gaps: Sequence[Gaps], answer: TimedAnswer) -> Figures:
    """Return the figures of running texts' gaps before a request and until its first token."""
    arrived_s = answer.events[0].at_s if answer.events else answer.ended_s
    before = [end - start for of_text in gaps for start, end in of_text[WARM_UP_GAPS:] if end < answer.sent_s]
    during = [end - start for of_text in gaps for start, end in of_text if end >= answer.sent_s and start <= arrived_s]
    return {
        "prompt_tokens": answer.usage.get("prompt_tokens"),
        "first_token_s": answer.first_token_s,
        "gaps_before": len(before),
        "gaps_during": len(during),
        "gap_before_s": spread(before) | {"largest": max(before, default=None)},
        "gap_during_s": spread(during) | {"largest": max(during, default=None)},
        "growth_s": max(during) - max(before) if before and during else None,
    }


def second_turn(
    endpoint: Endpoint, work: Workload, num_tokens: int, temperature: float, on_answer: Callable[[], None]
) -> Figures:
    """Return the first token's time of second turns with so many tokens of history, and of first turns of that length.

    The first turn beside each has the same messages under a beginning of its own, so that nothing of it can be reused.
    Raises ApiError.
    """
    turns: dict[str, list[TimedAnswer]] = {"without_reuse": [], "second_turn": []}
    with OpenAIClient(endpoint.url, timeout_s=TIMEOUT_S) as api:

        def answered(messages: Sequence[Message]) -> TimedAnswer:
            answer = ask(api, chat_body(endpoint, messages, ANSWER_TOKENS, temperature, 0))
            on_answer()
            return answer

        for number in range(TURNS):
            history = [user(work.long_text(f"chat {number}", num_tokens))]
            reply = {"role": "assistant", "content": answered(history).text}
            turns["second_turn"].append(answered([*history, reply, user(QUESTION)]))
            other = user(work.long_text(f"other {number}", num_tokens))
            turns["without_reuse"].append(answered([other, reply, user(QUESTION)]))
    return turn_figures(turns["second_turn"], turns["without_reuse"])


def turn_figures(second: Sequence[TimedAnswer], without_reuse: Sequence[TimedAnswer]) -> Figures:
    """Return medians of both, and how much sooner the second turns' first tokens come."""

    def first_token_s(answers: Sequence[TimedAnswer]) -> float:
        return median(answer.first_token_s or answer.ended_s - answer.sent_s for answer in answers)

    return {
        "turns": len(second),
        "prompt_tokens": [answer.usage.get("prompt_tokens") for answer in second],
        "prompt_tokens_without_reuse": [answer.usage.get("prompt_tokens") for answer in without_reuse],
        "cached_tokens": [cached_tokens(answer.usage) for answer in second],
        "first_token_s": first_token_s(second),
        "first_token_without_reuse_s": first_token_s(without_reuse),
        "times_sooner": first_token_s(without_reuse) / first_token_s(second),
    }


def _endless(work: Workload, part: str) -> Iterator[str]:
    for turn in count():
        yield from work.prompts(f"{part}, {turn}", len(work.texts))


def _until(is_so: Callable[[], bool], running: Sequence[Future[None]]) -> None:
    """Wait until it is so. Raises what ended one of those that run."""
    while not is_so():
        for each in running:
            if each.done():
                each.result()
        time.sleep(_LOOK_EVERY_S)
