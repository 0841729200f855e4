"""The requests of one engine, and start-time fair queueing over its clients, by the seconds that their texts took.

The client that has used the least time is next; its own requests are served by priority, then in order of arrival. A
client that returns after a while starts at the virtual time of the queue, so that nobody saves up time by staying away.
A full queue admits a client with few requests by evicting the last one of the client with most: one client cannot fill
it for all.
Source: Goyal, Vin, Cheng 1996, https://doi.org/10.1145/248156.248171; for language models: Sheng et al. 2024,
https://arxiv.org/abs/2401.00588.
"""

import asyncio
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import TypeVar
from weakref import WeakValueDictionary

from omnidraft.decode.sequence import SequenceState
from omnidraft.serving.queued_request import QueuedRequest, QueuedText

MAX_IDLE_CLIENTS = 256
"""Clients without a waiting request whose time is remembered."""


class FairQueue:
    """A queue of requests that is fair to clients. It is not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[QueuedRequest]] = {}
        """Only clients with waiting requests, in the order in which they came."""
        self._served_s: dict[str, float] = {}
        self._virtual_time_s = 0.0
        """The time that the client served last had used when its turn came."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, request: QueuedRequest) -> None:
        """Add a request behind those of its client that are not less urgent."""
        if request.client not in self._waiting:
            self._waiting[request.client] = deque()
            self._served_s[request.client] = max(self._served_s.get(request.client, 0.0), self._virtual_time_s)
        insort(self._waiting[request.client], request, key=lambda each: each.priority)

    def peek(self) -> QueuedRequest:
        """Return the next request; the queue must not be empty."""
        return self._waiting[self._next_client()][0]

    def next(self) -> QueuedRequest:
        """Remove and return the next request; the queue must not be empty."""
        client = self._next_client()
        self._virtual_time_s = self._served_s[client]
        request = self._waiting[client].popleft()
        self._drop_if_empty(client)
        return request

    def charge(self, client: str, seconds: float) -> None:
        """Add the seconds that a request of this client took."""
        self._served_s[client] = self._served_s.get(client, self._virtual_time_s) + seconds
        if not self._waiting:
            self._served_s.clear()  # nobody is left to share with
            self._virtual_time_s = 0.0
        elif len(self._served_s) - len(self._waiting) > MAX_IDLE_CLIENTS:
            idle = [other for other in self._served_s if other not in self._waiting]
            del self._served_s[min(idle, key=lambda other: self._served_s[other])]

    def remove(self, request: QueuedRequest) -> bool:
        """Remove this request; return False when it does not wait here."""
        waiting = self._waiting.get(request.client, deque())
        if request not in waiting:
            return False
        waiting.remove(request)
        self._drop_if_empty(request.client)
        return True

    def evict_for(self, client: str) -> QueuedRequest | None:
        """Remove and return the last request of the client with most of them; None unless this client has fewer."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting[most]) <= len(self._waiting.get(client, ())) + 1:
            return None
        return self._waiting[most].pop()

    def clear(self) -> list[QueuedRequest]:
        """Remove and return all requests."""
        requests = [request for waiting in self._waiting.values() for request in waiting]
        self._waiting.clear()
        return requests

    def _next_client(self) -> str:
        return min(self._waiting, key=lambda each: self._served_s[each])

    def _drop_if_empty(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]


SHORT_BYTES = 65_536
"""Of a text that is tokenized in less than a tenth of a second."""
_Result = TypeVar("_Result")


class FairTurns:
    """Two lines of clients, each in front of one thread: for short pieces and for long ones."""

    def __init__(self) -> None:
        self._lock_of_client: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._short, self._long = asyncio.Lock(), asyncio.Lock()  # first come, first served

    async def run(self, client: str, work: Callable[[], _Result], num_bytes: int = 0) -> _Result:
        """Return the result of `work` on so many bytes, which runs in a thread when it is this client's turn. Raises
        what it raises."""
        own = self._lock_of_client.setdefault(client, asyncio.Lock())
        async with own, self._long if num_bytes > SHORT_BYTES else self._short:
            return await asyncio.to_thread(work)


@dataclass(slots=True)
class PromptScoring:
    """The requests of one engine that wait for their prompts' scores; those of one client are served in order."""

    _requests: dict[str, dict[QueuedRequest, list[Iterator[None]]]] = field(default_factory=dict)
    """The requests of each client, each with the passes of its prompts; the client whose turn it is comes first."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def clients(self) -> Sequence[str]:
        """The client of each text that is decoded once its request's prompts are scored."""
        return [client for client, requests in self._requests.items() for each in requests for _ in each.texts]

    def add(self, request: QueuedRequest) -> None:
        scored = [text for text in request.texts if text.request.num_prompt_log_probs is not None]
        self._requests.setdefault(request.client, {})[request] = [_passes(request, text) for text in scored]

    def first(self) -> QueuedRequest:
        """Return the request whose turn it is; there must be one."""
        return next(iter(next(iter(self._requests.values()))))

    def step(self) -> tuple[bool, float]:
        """Run one pass for the first request; behind its prompt's last one it is another client's turn. Return whether
        the request's scores are complete, and the seconds spent; it is removed when they are. Raises what scoring
        raises."""
        began_s, request = time.monotonic(), self.first()
        prompts = self._requests[request.client][request]
        for _ in prompts[0]:
            return False, time.monotonic() - began_s
        del prompts[0]
        self._requests[request.client] = self._requests.pop(request.client)
        if not prompts:
            self.remove(request)
        return not prompts, 0.0

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request that has ended, if it is here."""
        requests = self._requests.get(request.client, {})
        requests.pop(request, None)
        if not requests:
            self._requests.pop(request.client, None)


def _passes(request: QueuedRequest, text: QueuedText) -> Iterator[None]:
    """Score the prompt of one text of the request; yield after each pass."""
    assert text.request.num_prompt_log_probs is not None
    request.tokenize()
    assert text.decoded is not None
    for scored in request.engine.score_prompt(text.request, text.decoded):
        text.prompt_tokens += scored
        yield


RECENT_REQUESTS = 32
"""Finished requests whose durations predict those of the next ones."""
MAX_RETRY_S = 60
"""OpenAI's clients ignore a larger Retry-After."""


@dataclass(slots=True)
class EngineQueue:
    """The waiting and the running requests of one engine, and the durations of its last ones."""

    waiting: FairQueue = field(default_factory=FairQueue)
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    """Each from the start of decoding to its end."""
    running: dict[QueuedRequest, float] = field(default_factory=dict)
    """With the start of each, by the monotonic clock."""
    scoring: PromptScoring = field(default_factory=PromptScoring)
    texts: dict[SequenceState, tuple[QueuedRequest, int]] = field(default_factory=dict)
    """The running texts, each with its index among those of its request."""

    def retry_after_s(self) -> int:
        """Return the whole seconds until half of the waiting requests will have been served."""
        so_far_s = time.monotonic() - min(self.running.values()) if self.running else 0.0
        mean_s = fmean(self.durations_s) if self.durations_s else so_far_s
        rounds = (len(self.waiting) + 1) / max(len(self.running), 1)
        return max(1, min(MAX_RETRY_S, ceil(mean_s * rounds / 2)))
