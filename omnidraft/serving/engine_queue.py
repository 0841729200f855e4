"""The requests of one engine: those that wait, those whose prompts are scored, and those that are decoded."""

import time
from collections import deque
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

from omnidraft.decode.generation import Generation
from omnidraft.serving.fair_queue import FairQueue
from omnidraft.serving.prompt_scoring import PromptScoring
from omnidraft.serving.queued_request import QueuedRequest

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
