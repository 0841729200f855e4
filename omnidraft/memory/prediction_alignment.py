"""Where a growing text stands in a prediction of it, with changes: a hidden Markov model of an edit.

The text copies the prediction id by id, writes ids of its own, beside the prediction's or in place of them, or skips
some; rarely it goes on anywhere else. Of each place the likeliest way there counts (Viterbi's algorithm,
https://doi.org/10.1109/TIT.1967.1054010). An id that is frequent in the prediction tells little of where the text
stands, and a rare one all. All places are updated at once: 0.05 ms an id and 0.1 ms a pass for a prediction of 2,000.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from math import exp, log
from typing import NamedTuple

import numpy as np

_MAX_IDS = 2**14
"""Ids of a prediction that are followed, the first ones."""
_MAX_RUN = 48
_COPY, _INSERT, _REPLACE = map(log, (0.94, 0.03, 0.03))
"""What comes behind an id that was copied."""
_RETURN, _INSERT_MORE, _REPLACE_MORE = map(log, (0.25, 0.6, 0.15))
"""What comes behind an id of the text's own."""
_SKIP, _SKIP_MORE = log(0.01), log(0.9)
_ANYWHERE = log(1e-3)
"""The weight of all places together where the text may go on, wherever it stands."""
_MIN_PROBABILITY = 0.01


class Place(NamedTuple):
    """A place in the prediction where the text may go on."""

    position: int
    """The index of the id that would come next."""
    probability: float
    run: int
    """The ids before it that are the text's last ones, too; at most 48."""


class PredictionAlignment:
    """Not thread-safe."""

    def __init__(self, prediction: Sequence[int]) -> None:
        """Stand before the prediction's first id."""
        self._ids = np.array(prediction[:_MAX_IDS], np.uint32)
        num = len(self._ids)
        self._copied = np.full(num + 1, -np.inf, np.float32)
        """The log weight of each place where the text's last id was copied from before it."""
        self._own = np.full(num + 1, -np.inf, np.float32)
        """And where the last id was the text's own."""
        self._copied[0] = 0.0
        self._skipped = np.arange(num + 1, dtype=np.float32) * _SKIP_MORE
        self._ending = deque[int](maxlen=_MAX_RUN)

    def append(self, ids: Sequence[int]) -> None:
        """Follow the text."""
        for token in ids:
            is_equal = self._ids == token
            own = np.maximum(self._copied + _INSERT, self._own + _INSERT_MORE)
            replaced = np.maximum(self._copied + _REPLACE, self._own + _REPLACE_MORE)
            np.maximum(own[1:], replaced[:-1], out=own[1:])
            own += log((int(np.count_nonzero(is_equal)) + 0.5) / len(self._ids))
            self._copied[1:] = np.where(is_equal, self._ready()[:-1], -np.inf)
            self._copied[0] = -np.inf
            highest = max(self._copied.max(), own.max())
            self._copied -= highest
            self._own = own - highest
            self._ending.append(token)

    def best(self, limit: int) -> Iterator[Place]:
        """Yield the likeliest places, at most `limit`, each before another id."""
        ready = np.exp(self._ready())
        own = np.exp(self._copied) * (1 - exp(_COPY)) + np.exp(self._own) * (1 - exp(_RETURN))
        total, ready = ready.sum() + own.sum(), ready[:-1]
        for _ in range(limit):
            position = int(ready.argmax())
            is_same = self._ids == self._ids[position]
            probability = float(ready[is_same].sum() / total)
            if probability < _MIN_PROBABILITY:
                return
            yield Place(position, probability, self._run(position))
            ready[is_same] = 0.0

    def _ready(self) -> np.ndarray:
        """Return for each id of the prediction, and for its end, the log weight of copying it next."""
        stays = np.maximum(self._copied + _COPY, self._own + _RETURN)
        skips = np.maximum.accumulate(np.maximum(self._copied, self._own) - self._skipped) + self._skipped + _SKIP
        return np.maximum(np.maximum(stays, skips), _ANYWHERE - log(len(self._ids)))

    def _run(self, position: int) -> int:
        run = 0
        for token in reversed(self._ending):
            if run == position or int(self._ids[position - 1 - run]) != token:
                break
            run += 1
        return run
