"""The requests of one engine: those that wait, those whose prompts are scored, and those that are decoded."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

from omnidraft.decode.generation import Generation
from omnidraft.serving.fair_queue import FairQueue
from omnidraft.serving.queued_request import QueuedRequest, QueuedText


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
    texts: dict[Generation, tuple[QueuedRequest, int]] = field(default_factory=dict)
    """The running texts, each with its index among those of its request."""

    def retry_after_s(self) -> int:
        """Return the whole seconds until half of the waiting requests will have been served."""
        so_far_s = time.monotonic() - min(self.running.values()) if self.running else 0.0
        mean_s = fmean(self.durations_s) if self.durations_s else so_far_s
        rounds = (len(self.waiting) + 1) / max(len(self.running), 1)
        return max(1, min(MAX_RETRY_S, ceil(mean_s * rounds / 2)))
