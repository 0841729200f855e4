"""The drafter's view of one request: the target's text in the drafter's tokens, and the merges learned from it.

The text is re-tokenised at its tail only (algorithms.md section 4); the target's ids are never re-encoded. Special ids
become the drafter's of the same role. Of a text that is longer than the drafter's context it sees the end.
"""

from collections.abc import Sequence

from omnidraft.errors import VocabularyError
from omnidraft.ports import Request
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.retokenise import TailTokeniser, partners, runs
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

_ROOM = 64
"""Ids of the context that are left to what is drafted, a quarter of a small context."""
_SEARCHED_SHARE = 0.25
"""Of what stays: how far a safe boundary is looked for."""


class DrafterContext:
    """Follows one text."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        target: Vocabulary,
        alignment: Alignment,
        cache: NgramCache,
        *,
        limit: int,
    ) -> None:
        """`limit`: ids that the drafter's context holds."""
        self._tail = TailTokeniser(tokenizer, request.drafter_prompt_ids)
        self._window = SlidingWindow(tokenizer.vocabulary, limit)
        self._target = target
        self._alignment = alignment
        self._cache = cache
        self._unlearned: list[int] = []
        self._learned_to: int | None = len(self._tail.ids)
        self._behind: list[int] = []
        """Emitted, and not looked at yet: while nobody drafts, nobody needs it."""
        self._is_lost = False  # the text has bytes that the drafter cannot spell: nothing more is drafted

    @property
    def ids(self) -> list[int] | None:
        """What the drafter reads of the text; None when it cannot be drafted from: inside a character, or for good."""
        if self._behind:
            behind, self._behind = self._behind, []
            self._follow(behind)
        if self._is_lost or self._tail.pending or not self._tail.ids:
            return None
        return self._window.of(self._tail.ids)

    def observe(self, emitted: Sequence[int]) -> None:
        """The text goes on with these."""
        self._behind += emitted

    def _follow(self, emitted: Sequence[int]) -> None:
        if self._is_lost:
            return
        try:
            for is_special, run in runs(emitted, self._target):
                if is_special:
                    self._part(run)
                else:
                    self._go_on(run)
        except VocabularyError:
            self._is_lost = True

    def _go_on(self, emitted: Sequence[int]) -> None:
        """What the text confirmed of the earlier tokenisation teaches the cache its merges."""
        num_before, was_pending = len(self._tail.ids), bool(self._tail.pending)
        unchanged = self._tail.append(self._target.spell(emitted))
        if unchanged == num_before and not was_pending:
            self._learn(num_before)
        elif self._learned_to is not None and unchanged < self._learned_to:
            self._learned_to = None  # the ids before it spell another part of the text now
        self._unlearned += emitted

    def _part(self, special_ids: Sequence[int]) -> None:
        """Behind a special id the text before it is tokenised for good."""
        self._learn(self._tail.part(partners(special_ids, self._alignment)))
        self._learned_to = len(self._tail.ids)

    def _learn(self, end: int) -> None:
        if self._learned_to is not None:
            self._cache.learn(self._tail.ids[self._learned_to : end], self._unlearned)
        self._learned_to, self._unlearned = end, []


class SlidingWindow:
    """The part of one text that the drafter reads: the end, from a safe boundary on.

    A window that is full loses its older half, and the drafter reads the other half again: every id is read twice,
    whatever the length of the text. A bos at the beginning stays, since models that were taught with one go wrong
    without it.
    """

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
