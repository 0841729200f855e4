"""Clients that send requests to the worker without end and retry when it dies; half of the answers are streamed."""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omnidraft.client import CHAT, ApiError, ConnectionLost, OpenAIClient, text_of
from tests.soak.acknowledged import AckMonitor

GIVE_UP_S = 240.0
RETRY_S = 0.1
BUSY = (429, 503)
"""HTTP statuses after which a client may retry."""
PREFIX = "chatcmpl-"
TEMPERATURE = 1.0
PROMPTS = tuple(
    f"{opening} {number} {rest}{'?' * (1 + number % 2)}"
    for opening, rest in (("How many clips in", "months"), ("A robe takes", "bolts of fiber"), ("Numbers:", "and then"))
    for number in range(24)
)


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """A complete answer."""

    request_id: str
    snapshot_id: str
    text: str
    at_s: float
    """Time of the monotonic clock at which it was complete."""


@dataclass(slots=True)
class Tally:
    """Everything that the clients received. Threads write it under `lock`."""

    replies: list[tuple[int, ServedAnswer]] = field(default_factory=list)
    """(index of the prompt, its answer)"""
    failures: list[str] = field(default_factory=list)
    num_tries: int = 0
    beginnings: list[tuple[int, str]] = field(default_factory=list)
    """(index of the prompt, the text that came before its stream broke off)"""
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def load(url: str, acks: AckMonitor, *, num_clients: int, pause_s: float, max_tokens: int) -> Iterator[Tally]:
    """Run so many clients in front of one worker within the context, and yield their tally.

    At its end the requests under way get their answers. After an error nobody waits for these: each client gives up
    once the try that it is at has ended.

    Args:
        pause_s: pause of each client between two requests.
    """
    client = _Client(url, acks, pause_s, max_tokens)
    with ThreadPoolExecutor(num_clients, thread_name_prefix="client") as threads:
        running = [threads.submit(client.run) for _ in range(num_clients)]
        try:
            yield client.tally
            client.stop.set()
            for each in running:
                each.result()
        finally:
            client.stop.set()
            client.give_up.set()


@dataclass(slots=True)
class _Client:
    """What each of the threads does."""

    url: str
    acks: AckMonitor
    pause_s: float
    max_tokens: int
    tally: Tally = field(default_factory=Tally)
    stop: threading.Event = field(default_factory=threading.Event)
    give_up: threading.Event = field(default_factory=threading.Event)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> None:
        with OpenAIClient(self.url, timeout_s=60.0) as api:
            while not self.stop.wait(self.pause_s):
                number = next(self.numbers)
                self._ask_until_answered(api, number % len(PROMPTS), is_streamed=number % 2 == 1)

    def _ask_until_answered(self, api: OpenAIClient, prompt: int, *, is_streamed: bool) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        body = {
            "messages": [{"role": "user", "content": PROMPTS[prompt]}],
            "max_tokens": self.max_tokens,
            "temperature": TEMPERATURE,
            "seed": prompt,
        }
        while True:
            life = self.acks.life
            with self.tally.lock:
                self.tally.num_tries += 1
            try:
                answer = self._streamed(api, prompt, body) if is_streamed else _whole(api, body)
            except ApiError as exc:
                if not isinstance(exc, ConnectionLost) and exc.status not in BUSY:
                    return self._failed(f"{PROMPTS[prompt]}: {exc}")
            else:
                self.acks.answered(answer.request_id, life)
                with self.tally.lock:
                    self.tally.replies.append((prompt, answer))
                return None
            if time.monotonic() > deadline:
                return self._failed(f"{PROMPTS[prompt]}: no answer within {GIVE_UP_S:.0f} s")
            if self.give_up.wait(RETRY_S):
                return None

    def _streamed(self, api: OpenAIClient, prompt: int, body: Mapping[str, Any]) -> ServedAnswer:
        text, last = "", body
        try:
            for event in api.stream(CHAT, body):
                text, last = text + text_of(event), event
        except ConnectionLost:
            with self.tally.lock:
                self.tally.beginnings += [(prompt, text)] if text else []
            raise
        return _answer(last, text)

    def _failed(self, reason: str) -> None:
        with self.tally.lock:
            self.tally.failures.append(reason)


def _whole(api: OpenAIClient, body: Mapping[str, Any]) -> ServedAnswer:
    reply = api.ask(CHAT, body)
    return _answer(reply.body, reply.text)


def _answer(body: Mapping[str, Any], text: str) -> ServedAnswer:
    snapshot_id = body["system_fingerprint"].partition("/")[0]
    return ServedAnswer(body["id"].removeprefix(PREFIX), snapshot_id, text, time.monotonic())
