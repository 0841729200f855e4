"""The drafter's view of one request: the target's text in the drafter's tokens, and the merges learned from it.

The text is re-tokenised at its tail only (algorithms.md section 4); the target's ids are never re-encoded.
"""

from collections.abc import Sequence

from omnidraft.errors import VocabularyError
from omnidraft.ports import Request
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.retokenise import TailTokeniser
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


class DrafterContext:
    """Follows one text."""

    def __init__(self, request: Request, tokenizer: Tokenizer, target: Vocabulary, cache: NgramCache) -> None:
        self._tail = TailTokeniser(tokenizer, request.drafter_prompt_ids)
        self._target = target
        self._cache = cache
        self._unlearned: list[int] = []
        self._learned_to: int | None = len(self._tail.ids)
        self._behind: list[int] = []
        """Emitted, and not looked at yet: while nobody drafts, nobody needs it."""
        self._is_lost = False  # the text has bytes that the drafter cannot spell: nothing more is drafted

    @property
    def ids(self) -> list[int] | None:
        """The text in draft tokens; None when it cannot be drafted from: inside a character, or for good."""
        if self._behind:
            behind, self._behind = self._behind, []
            self._follow(behind)
        if self._is_lost or self._tail.pending or not self._tail.ids:
            return None
        return self._tail.ids

    def observe(self, emitted: Sequence[int]) -> None:
        """The text goes on with these."""
        self._behind += emitted

    def _follow(self, emitted: Sequence[int]) -> None:
        """What the text confirmed of the earlier tokenisation teaches the cache its merges."""
        if self._is_lost:
            return
        num_before, was_pending = len(self._tail.ids), bool(self._tail.pending)
        try:
            unchanged = self._tail.append(self._target.spell(emitted))
        except VocabularyError:
            self._is_lost = True
            return
        if unchanged == num_before and not was_pending:
            if self._learned_to is not None:
                self._cache.learn(self._tail.ids[self._learned_to : num_before], self._unlearned)
            self._learned_to, self._unlearned = num_before, []
        elif self._learned_to is not None and unchanged < self._learned_to:
            self._learned_to = None  # the ids before it spell another part of the text now
        self._unlearned += [token for token in emitted if token not in self._target.special_ids]
