"""Requests whose prompts are scored before they are decoded: a pass of the target in each round, so that nobody waits
long beside them."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from omnidraft.serving.queued_request import QueuedRequest


@dataclass(slots=True)
class PromptScoring:
    """The requests of one engine that wait for their prompts' scores, first come, first served."""

    _requests: deque[tuple[QueuedRequest, Iterator[None]]] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, request: QueuedRequest) -> None:
        self._requests.append((request, _passes(request)))

    def first(self) -> QueuedRequest:
        return self._requests[0][0]

    def step(self) -> tuple[bool, float]:
        """Run one pass for the first request. Return whether its scores are complete, and the seconds spent; it is
        removed when they are. Raises what scoring raises."""
        began_s = time.monotonic()
        _, passes = self._requests[0]
        for _ in passes:
            return False, time.monotonic() - began_s
        self._requests.popleft()
        return True, 0.0

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request that has ended, if it is here."""
        self._requests = deque(each for each in self._requests if each[0] is not request)


def _passes(request: QueuedRequest) -> Iterator[None]:
    """Score every prompt of the request that is to be scored; yield after each pass."""
    for text in request.texts:
        if text.request.num_prompt_log_probs is not None:
            for scored in request.engine.score_prompt(text.request):
                text.prompt_tokens += scored
                yield
