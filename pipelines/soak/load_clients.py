"""Clients that ask the worker without end, and again whenever it died under them; half of them streamed."""

import itertools
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from pipelines.soak.ack_monitor import AckMonitor

PATIENCE_S = 240.0
RETRY_S = 0.1
BUSY = (429, 503)
"""Statuses after which a client may ask again."""
PREFIX = "chatcmpl-"
QUESTIONS = tuple(
    f"{opening} {number} {what}{'?' * (1 + number % 2)}"
    for opening, what in (("How many clips in", "months"), ("A robe takes", "bolts of fiber"), ("Numbers:", "and then"))
    for number in range(24)
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    request_id: str
    snapshot_id: str
    text: str
    at_s: float
    """Of the monotonic clock, when it had come."""


@dataclass(slots=True)
class Tally:
    """What clients have seen. Threads write it under `lock`."""

    replies: list[tuple[int, Reply]] = field(default_factory=list)
    """(index of the question, its answer)"""
    failures: list[str] = field(default_factory=list)
    num_tries: int = 0
    beginnings: list[tuple[int, str]] = field(default_factory=list)
    """Of streams that broke off: what came before."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Failed(Exception):
    """An answer that no asking again mends."""


class Broken(Exception):
    """The worker went away under the request; `begun` is what came before."""

    def __init__(self, begun: str) -> None:
        super().__init__(begun)
        self.begun = begun


class Clients:
    """So many threads in front of one worker.

    Args:
        pause_s: of each client, between two questions.
    """

    def __init__(self, url: str, watch: AckMonitor, *, num_clients: int, pause_s: float, max_tokens: int) -> None:
        self._url, self._watch, self._pause_s, self._max_tokens = url, watch, pause_s, max_tokens
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(num_clients, thread_name_prefix="client")
        self.tally = Tally()
        self._running: Sequence[Future[None]] = [self._threads.submit(self._ask_on) for _ in range(num_clients)]

    def stop(self) -> Tally:
        """When the requests under way have their answers."""
        self._stop.set()
        for running in self._running:
            running.result()
        self._threads.shutdown()
        return self.tally

    def _ask_on(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60.0) as http:
            while not self._stop.wait(self._pause_s):
                number = next(self._numbers)
                self._ask_until_answered(http, number % len(QUESTIONS), is_streamed=number % 2 == 1)

    def _ask_until_answered(self, http: httpx.Client, question: int, *, is_streamed: bool) -> None:
        deadline = time.monotonic() + PATIENCE_S
        ask = _streamed if is_streamed else _whole
        body = {
            "messages": [{"role": "user", "content": QUESTIONS[question]}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "seed": question,
            "stream": is_streamed,
        }
        while True:
            life = self._watch.life
            with self.tally.lock:
                self.tally.num_tries += 1
            try:
                reply = ask(http, body)
            except Broken as exc:
                with self.tally.lock:
                    self.tally.beginnings += [(question, exc.begun)] if exc.begun else []
            except Failed as exc:
                return self._failed(f"{QUESTIONS[question]}: {exc}")
            else:
                self._watch.answered(reply.request_id, life)
                with self.tally.lock:
                    self.tally.replies.append((question, reply))
                return None
            if time.monotonic() > deadline:
                return self._failed(f"{QUESTIONS[question]}: no answer within {PATIENCE_S:.0f} s")
            time.sleep(RETRY_S)

    def _failed(self, what: str) -> None:
        with self.tally.lock:
            self.tally.failures.append(what)


def _whole(http: httpx.Client, body: dict[str, object]) -> Reply:
    try:
        response = http.post("/v1/chat/completions", json=body)
    except httpx.TransportError as exc:
        raise Broken("") from exc
    _check(response)
    said = response.json()
    return _reply(said, said["choices"][0]["message"]["content"])


def _streamed(http: httpx.Client, body: dict[str, object]) -> Reply:
    text, last = "", None
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            _check(response)
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    break
                last = json.loads(line.removeprefix("data: "))
                if "error" in last:
                    raise Failed(str(last["error"]))
                text += last["choices"][0]["delta"]["content"]
    except httpx.TransportError as exc:
        raise Broken(text) from exc
    if last is None or last["choices"][0]["finish_reason"] is None:
        raise Broken(text)
    return _reply(last, text)


def _check(response: httpx.Response) -> None:
    if response.status_code in BUSY:
        raise Broken("")
    if response.status_code != 200:
        response.read()
        raise Failed(f"status {response.status_code}: {response.text[:200]}")


def _reply(said: dict[str, str], text: str) -> Reply:
    snapshot_id = said["system_fingerprint"].partition("/")[0]
    return Reply(said["id"].removeprefix(PREFIX), snapshot_id, text, time.monotonic())
