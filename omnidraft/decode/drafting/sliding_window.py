"""The part of a text that the drafter reads when its context cannot hold all of it: the end, from a safe boundary on.

A window that is full loses its older half, and the drafter reads the other half again: every id is read twice, whatever
the length of the text. A bos at the beginning stays, since models that were taught with one go wrong without it.
"""

from omnidraft.vocab.tokenizer import Vocabulary

_ROOM = 64
"""Ids of the context that are left to what is drafted, a quarter of a small context."""
_SEARCHED_SHARE = 0.25
"""Of what stays: how far a safe boundary is looked for."""


class SlidingWindow:
    """Over one text, which grows."""

    def __init__(self, vocabulary: Vocabulary, context_limit: int) -> None:
        self._vocabulary = vocabulary
        self._most = max(context_limit - min(_ROOM, context_limit // 4), 1)
        self._start = 0

    def of(self, ids: list[int]) -> list[int]:
        """What the drafter reads of these ids, at least the last one; at most so many that there is room to draft."""
        front = ids[:1] if self._begins_with_bos(ids) else []
        if not 0 < len(ids) - self._start <= self._most - len(front):
            self._start = 0 if len(ids) <= self._most else self._boundary(ids, (self._most + 1) // 2)
        return ids if self._start == 0 else front + ids[self._start :]

    def _begins_with_bos(self, ids: list[int]) -> bool:
        return self._most > 2 and ids[:1] == [self._vocabulary.roles.get("bos")]

    def _boundary(self, ids: list[int], num_kept: int) -> int:
        """Where the last `num_kept` ids begin, or a little behind that."""
        earliest = len(ids) - num_kept
        last = earliest + int(num_kept * _SEARCHED_SHARE)
        return next((at for at in range(earliest, last) if self._is_safe(ids[at - 1], ids[at])), earliest)

    def _is_safe(self, before: int, after: int) -> bool:
        if not {before, after}.isdisjoint(self._vocabulary.special_ids):
            return True
        left, right = (self._vocabulary.token_bytes[token].decode("utf-8", "replace") for token in (before, after))
        return self._vocabulary.boundary.match(left + right, len(left)) is not None
