"""Clients of all kinds in front of one server: whole, streamed, several choices, log-probabilities, disconnecting."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from omnidraft.demo.openai_client import CHAT, COMPLETIONS, ApiError, OpenAIClient, Reply, text_of

TIMEOUT_S = 120.0
OPENINGS = ("How many clips in", "A robe takes", "Numbers:", "Natalia sold")
SHOWN = 20
GONE = "gone"
"""The kind of request whose client leaves after the first event."""

Body = dict[str, Any]


@dataclass(slots=True)
class ClientTally:
    """Everything that the clients received. Threads write it under `lock`."""

    by_kind: Counter[str] = field(default_factory=Counter)
    """Number of requests that went well, by their kind."""
    num_refused: int = 0
    """Number of 429s with a Retry-After header."""
    errors: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    """Seconds of each complete answer, from the request on, so with the time in the server's queue."""
    texts: dict[str, str] = field(default_factory=dict)
    """The answer to each request, which must not change."""
    num_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class WrongAnswer(Exception):
    """The server gave an answer that should not have come."""


class LoadClient:
    """Sends one request after another."""

    def __init__(self, api: OpenAIClient, tally: ClientTally, seed: int) -> None:
        self._api, self._tally, self._rng = api, tally, random.Random(seed)
        self._kinds: dict[str, Callable[[str, Body], None]] = {
            "whole": self._whole,
            "streamed": self._streamed,
            "log-probabilities": self._log_probs,
            "two choices": self._two_choices,
            GONE: self._disconnect,
        }

    def run_until(self, end_s: float) -> None:
        """Send requests until `end_s` of the monotonic clock."""
        while time.monotonic() < end_s:
            kind = self._rng.choice(list(self._kinds))
            opening, number = self._rng.choice(OPENINGS), self._rng.randrange(12)
            try:
                self._kinds[kind](
                    f"{opening} {number}", {"max_tokens": 8 + 2 * number, "temperature": 1.0, "seed": number}
                )
            except ApiError as exc:
                if exc.status == 429 and exc.retry_after_s:
                    with self._tally.lock:
                        self._tally.num_refused += 1
                    time.sleep(min(exc.retry_after_s, max(0.0, end_s - time.monotonic())))
                else:
                    self._failed(kind, exc)
            except (WrongAnswer, ValueError, KeyError) as exc:
                self._failed(kind, exc)
            else:
                with self._tally.lock:
                    self._tally.by_kind[kind] += 1

    def _failed(self, kind: str, exc: Exception) -> None:
        with self._tally.lock:
            is_shown = len(self._tally.errors) < SHOWN
            self._tally.errors.append(f"{kind}: {type(exc).__name__}: {exc}" if is_shown else kind)

    def _whole(self, prompt: str, body: Body) -> None:
        started = time.monotonic()
        reply = self._api.ask(CHAT, body | {"messages": [{"role": "user", "content": prompt}]})
        self._answered(f"{CHAT} {prompt}", reply.text, started, reply.body["usage"])

    def _streamed(self, prompt: str, body: Body) -> None:
        body |= {"messages": [{"role": "user", "content": prompt}], "stream_options": {"include_usage": True}}
        started, text, usage = time.monotonic(), "", None
        for event in self._api.stream(CHAT, body):
            text += text_of(event)
            usage = event["usage"]
        if usage is None:
            raise WrongAnswer("the stream has no usage")
        self._answered(f"{CHAT} {prompt}", text, started, usage)

    def _log_probs(self, prompt: str, body: Body) -> None:
        reply = self._complete(prompt, body | {"logprobs": 5})
        if reply.text and not reply.body["choices"][0]["logprobs"]["tokens"]:
            raise WrongAnswer("no log-probabilities")

    def _two_choices(self, prompt: str, body: Body) -> None:
        if len(self._complete(prompt, body | {"n": 2}).body["choices"]) != 2:
            raise WrongAnswer("not two choices")

    def _complete(self, prompt: str, body: Body) -> Reply:
        started = time.monotonic()
        reply = self._api.ask(COMPLETIONS, body | {"prompt": prompt})
        self._answered(f"{COMPLETIONS} {prompt}", reply.text, started, reply.body["usage"])
        return reply

    def _disconnect(self, prompt: str, body: Body) -> None:
        """Close the connection after the first event."""
        with closing(self._api.stream(COMPLETIONS, body | {"prompt": prompt, "max_tokens": 200})) as events:
            next(events)

    def _answered(self, request: str, text: str, started: float, usage: Mapping[str, int]) -> None:
        with self._tally.lock:
            self._tally.latencies_s.append(time.monotonic() - started)
            self._tally.num_tokens += usage["completion_tokens"]
            if self._tally.texts.setdefault(request, text) != text:
                raise WrongAnswer(f"{request!r} was answered with {text!r} and {self._tally.texts[request]!r}")


def send_load(url: str, num_clients: int, seconds: float, tally: ClientTally, seed: int) -> None:
    """Run `num_clients` clients, each with a connection of its own, for `seconds`."""
    end_s = time.monotonic() + seconds

    def run(number: int) -> None:
        with OpenAIClient(url, timeout_s=TIMEOUT_S) as api:
            LoadClient(api, tally, seed + number).run_until(end_s)

    with ThreadPoolExecutor(num_clients, thread_name_prefix="client") as threads:
        list(threads.map(run, range(num_clients)))
