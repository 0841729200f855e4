"""The drafter's view of one request: the target's text in the drafter's tokens, and the merges learned from it.

The text is re-tokenised at its tail only (algorithms.md section 4); the target's ids are never re-encoded. Special ids
become the drafter's of the same role. Of a text that is longer than the drafter's context it sees the end.
"""

from collections.abc import Sequence

from omnidraft.decode.drafting.sliding_window import SlidingWindow
from omnidraft.errors import VocabularyError
from omnidraft.ports import Request
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.retokenise import TailTokeniser, map_special_ids, runs
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


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
        self._learn(self._tail.append_special(map_special_ids(special_ids, self._alignment)))
        self._learned_to = len(self._tail.ids)

    def _learn(self, end: int) -> None:
        if self._learned_to is not None:
            self._cache.learn(self._tail.ids[self._learned_to : end], self._unlearned)
        self._learned_to, self._unlearned = end, []
