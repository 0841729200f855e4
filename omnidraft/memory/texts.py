"""The texts of a memory: segments of answers, each after the last tokens of what came before it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class MemoryText:
    """A segment of one answer."""

    tenant: str
    request: int
    """A hash of 63 bits of the request's id."""
    segment: int
    """0 for a request's first."""
    time_ms: int
    """When it was said, Unix milliseconds."""
    num_context: int
    """The number of ids at its beginning that come from before the segment. 0: it goes on where the segment before it
    ends, if that one is in the memory."""
    ids: np.ndarray
    """uint32, the target's."""


def joined(texts: Iterable[MemoryText]) -> list[list[MemoryText]]:
    """Return the segments of each answer together, in their order; answers stand in the order of their first one."""
    answers: list[list[MemoryText]] = []
    answer_before: dict[tuple[int, int], list[MemoryText]] = {}
    for text in texts:
        answer = None if text.num_context else answer_before.pop((text.request, text.segment - 1), None)
        if answer is None:
            answer = []
            answers.append(answer)
        answer.append(text)
        answer_before[text.request, text.segment] = answer
    return answers
