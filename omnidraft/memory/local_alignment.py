"""Where a growing text stands in itself, with changes: a local alignment that follows it id by id.

The score of a position is that of the best alignment of an end of the text with ids that end before the position: an
equal id counts 1, a changed, an inserted and a skipped one -1 each. An exact match breaks at every change; a score
only falls. All positions are updated at once, in a few operations on vectors: 0.05 ms an id at most.
Source: Smith and Waterman (1981), https://doi.org/10.1016/0022-2836(81)90087-5.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

MAX_SCORE = 32
"""Longer alignments count the same, so that where the text continues now soon outweighs where it came from."""
_MAX_IDS = 8192
"""Ids that are held at most; when there are more, the older half is dropped."""
_MAX_ALIGNED = 64
"""Ids of one `append` that are aligned, the last ones: what came before them says little of what follows."""


class AlignedPosition(NamedTuple):
    """A place in the text where it may go on as it did before."""

    position: int
    """The index of the id that followed there."""
    score: int
    is_equal: bool
    """Whether the id before it is the last one of the text, too."""


class LocalAlignment:
    """Not thread-safe."""

    def __init__(self, max_ids: int = _MAX_IDS) -> None:
        """Align the text with its last ids: at most `max_ids`, at least half as many."""
        assert max_ids < 2**15 - MAX_SCORE, "scores and positions are added as int16"
        self._ids = np.zeros(max_ids, np.uint32)
        self._scores = np.zeros(max_ids + 1, np.int16)
        self._ramp = np.arange(max_ids + 1, dtype=np.int16)
        self._num_ids = 0
        self._num_dropped = 0

    def __len__(self) -> int:
        return self._num_ids

    def append(self, ids: Sequence[int]) -> None:
        """Add ids at the end. Of more than are aligned at once only the last ones are, and nothing before them."""
        if len(ids) > _MAX_ALIGNED:
            self._restart(ids[:-_MAX_ALIGNED])
        for token in ids[-_MAX_ALIGNED:]:
            if self._num_ids == len(self._ids):
                self._drop(len(self._ids) // 2)
            self._align(token)

    def best(self, limit: int) -> Iterator[AlignedPosition]:
        """Yield the positions with the highest scores above 0, at most `limit`, each before another id; of equal
        scores the last, behind an id that was changed."""
        scores, ids = self._scores[: self._num_ids], self._ids[: self._num_ids]
        for _ in range(limit if len(ids) else 0):
            best = len(ids) - 1 - int(scores[::-1].argmax())
            if not scores[best]:
                return
            is_equal = bool(ids[best - 1] == ids[-1])
            yield AlignedPosition(self._num_dropped + best, int(scores[best]), is_equal)
            scores = np.where(ids == ids[best], 0, scores)

    def _restart(self, ids: Sequence[int]) -> None:
        """Add ids, and forget all scores."""
        all_ids = np.concatenate((self._ids[: self._num_ids], np.array(ids, np.uint32)))
        kept = all_ids[-(len(self._ids) // 2) :]
        self._num_dropped += len(all_ids) - len(kept)
        self._num_ids = len(kept)
        self._ids[: len(kept)] = kept
        self._scores[:] = 0

    def _drop(self, num: int) -> None:
        """Forget the oldest ids."""
        self._num_dropped += num
        self._num_ids -= num
        self._ids[: self._num_ids] = self._ids[num:]
        self._scores[: self._num_ids + 1] = self._scores[num:]
        self._scores[self._num_ids + 1 :] = self._scores[0] = 0

    def _align(self, token: int) -> None:
        """Add an id, and update the scores of the positions before it."""
        num = self._num_ids
        before, ramp = self._scores[: num + 1], self._ramp[: num + 1]
        aligned = 2 * (self._ids[:num] == token).view(np.int8) + before[:-1]  # one more than behind a pair of ids
        scores = np.maximum(before, 1)  # the text has one id more
        np.maximum(scores[1:], aligned, out=scores[1:])
        np.minimum(scores, MAX_SCORE + 1, out=scores)
        scores += ramp
        np.maximum.accumulate(scores, out=scores)  # the text leaves ids out
        scores -= 1
        np.subtract(scores, ramp, out=before)
        self._ids[num] = token
        self._num_ids += 1
