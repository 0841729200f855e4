"""Concurrent clients, each with the next request when its last answer has ended, and the figures of what they got."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any

from omnidraft.client import CHAT, ApiError, OpenAIClient, text_of
from omnidraft.vocab.tokenizer import Tokenizer
from pipelines.bench.throughput.systems import Endpoint


@dataclass(frozen=True, slots=True)
class Workload:
    """The texts of a prompt file, and the target's tokenizer."""

    texts: Sequence[str]
    tokenizer: Tokenizer

    def prompts(self, part: str, num: int) -> list[str]:
        """Return `num` prompts of the file, from the start again after its end, each begun with part and number.

        The same part gives the same prompts, so that all systems get them.
        """
        return [f"({part}, {number}) {self.texts[number % len(self.texts)]}" for number in range(num)]

    def long_text(self, part: str, num_tokens: int) -> str:
        """Return prompts of the file, one after another, cut to about so many of the target's tokens."""
        ids: list[int] = []
        number = 0
        while len(ids) < num_tokens:
            ids += self.tokenizer.encode(f"({part}, {number}) {self.texts[number % len(self.texts)]}\n")
            number += 1
        return self.tokenizer.vocabulary.spell(ids[:num_tokens]).decode(errors="ignore")

    def count_tokens(self, text: str) -> int:
        """Return the number of the target's tokens of a text."""
        return len(self.tokenizer.encode(text))


TIMEOUT_S = 1800.0
"""The longest time without anything from the server; the first token of many long prompts takes minutes."""

_SHOWN_ERRORS = 5

Message = Mapping[str, str]
Row = dict[str, Any]
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """An event of a stream that brought text."""

    at_s: float
    text: str
    num_so_far: int | None
    """Tokens of the answer up to here; None where the server does not say."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """A complete answer with the times of its events."""

    sent_s: float
    ended_s: float
    events: Sequence[TokenEvent]
    usage: Mapping[str, Any]
    fingerprint: str | None = None
    """The server's `system_fingerprint`, if it has one."""

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending to the first text; None where there is no text."""
        return self.events[0].at_s - self.sent_s if self.events else None

    def num_tokens(self, count_tokens: CountTokens) -> int:
        """Return the completion tokens by the server's usage, or those of the text."""
        num: int | None = self.usage.get("completion_tokens")
        return count_tokens(self.text) if num is None else num

    def token_gaps(self, count_tokens: CountTokens) -> list[float]:
        """Return the seconds of each token after the first event; those of one event share the time since the last.

        How many they are is what the server says in the event, else the target's tokens of its text.
        """
        gaps: list[float] = []
        for before, event in zip(self.events, self.events[1:], strict=False):
            if before.num_so_far is not None and event.num_so_far is not None:
                num = event.num_so_far - before.num_so_far
            else:
                num = count_tokens(event.text)
            num = max(num, 1)
            gaps += [(event.at_s - before.at_s) / num] * num
        return gaps


@dataclass(slots=True)
class Tally:
    """The outcome of all clients."""

    answers: list[TimedAnswer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def chat_body(
    endpoint: Endpoint, messages: Sequence[Message], max_new_tokens: int, temperature: float, seed: int = 0
) -> dict[str, Any]:
    """Return a request that streams, with the usage in every event where the server can.

    Our server does not remember its answer: each number of clients asks the same questions again.
    """
    return {
        "model": endpoint.model,
        "messages": list(messages),
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "store": False,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def user(text: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def run_clients(
    url: str, bodies: Sequence[Mapping[str, Any]], num_clients: int, on_answer: Callable[[], None]
) -> Tally:
    """Send each request once, `num_clients` at a time; a request that fails is an error of the tally."""
    tally = Tally()
    with OpenAIClient(url, timeout_s=TIMEOUT_S) as api, ThreadPoolExecutor(num_clients) as pool:
        for answered in as_completed([pool.submit(ask, api, body) for body in bodies]):
            try:
                tally.answers.append(answered.result())
            except ApiError as exc:
                tally.errors.append(str(exc))
            on_answer()
    return tally


def ask(api: OpenAIClient, body: Mapping[str, Any]) -> TimedAnswer:
    """Send one request and return its answer. Raises ApiError, ConnectionLost."""
    events: list[TokenEvent] = []
    usage: Mapping[str, Any] = {}
    fingerprint: str | None = None
    sent_s = time.perf_counter()
    for event in api.stream(CHAT, body):
        usage = event.get("usage") or usage
        fingerprint = event.get("system_fingerprint") or fingerprint
        if text := text_of(event):
            events.append(TokenEvent(time.perf_counter(), text, usage.get("completion_tokens")))
    return TimedAnswer(sent_s, time.perf_counter(), events, usage, fingerprint)


def row(system: str, num_clients: int, tally: Tally, count_tokens: CountTokens) -> Row:
    """Return the row of a measurement.

    `tokens_per_s` is the completion tokens of all clients over the time from the first request to the end of the last
    answer.
    """
    answers = tally.answers
    num_tokens = sum(answer.num_tokens(count_tokens) for answer in answers)
    wall_s = max(each.ended_s for each in answers) - min(each.sent_s for each in answers) if answers else 0.0
    gaps = [gap for answer in answers for gap in answer.token_gaps(count_tokens)]
    return {
        "system": system,
        "clients": num_clients,
        "fingerprints": sorted({each.fingerprint for each in answers if each.fingerprint}),
        "tokens_per_s": num_tokens / wall_s if wall_s else None,
        "first_token_s": spread([each.first_token_s for each in answers if each.first_token_s is not None]),
        "gap_s": spread(gaps),
        "requests": len(answers) + len(tally.errors),
        "tokens": num_tokens,
        "prompt_tokens": sum(answer.usage.get("prompt_tokens", 0) for answer in answers),
        "cached_tokens": sum(cached_tokens(answer.usage) for answer in answers),
        "wall_s": wall_s,
        "num_errors": len(tally.errors),
        "errors": list(dict.fromkeys(tally.errors))[:_SHOWN_ERRORS],
    }


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 99th percentile: the smallest value that 99 % of them do not exceed."""
    if not seconds:
        return {"median": None, "p99": None}
    return {"median": median(seconds), "p99": sorted(seconds)[ceil(0.99 * len(seconds)) - 1]}


def cached_tokens(usage: Mapping[str, Any]) -> int:
    """Return the prompt tokens whose keys the server had, by its usage."""
    details = usage.get("prompt_tokens_details") or {}
    num: int = details.get("cached_tokens") or 0
    return num
