"""The drafter's view of one request: the target's text in the drafter's tokens, and the merges learned from it.

The text is re-tokenised at its end only (docs/algorithms.md section 5); the target's ids are never re-encoded. Special
ids become the drafter's of the same role. Of a text that is longer than its context, or than what pays, the drafter
reads the end.
"""

from collections.abc import Sequence

from omnidraft.errors import VocabularyError
from omnidraft.ports import Request
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.retokenise import TailTokeniser, map_special_ids, runs
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

_RESERVED_IDS = 64
"""Ids of the context that are left for drafting; a quarter of a small context."""
_SEARCHED_SHARE = 0.25
"""Share of the remaining ids that is searched for a safe boundary."""


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
        """Begin with the request's prompt; the drafter's context holds `limit` ids."""
        self._tail = TailTokeniser(tokenizer, request.drafter_prompt_ids)
        self._window = SlidingWindow(tokenizer.vocabulary, limit)
        self._target = target
        self._alignment = alignment
        self._cache = cache
        self._is_stored = request.is_stored
        self._unlearned: list[int] = []
        self._learned_to: int | None = len(self._tail.ids)
        self._unread = list(request.drafter_prompt_tail)
        """Emitted ids that are not tokenised yet; not needed while nothing is drafted."""
        self._is_unspellable = False  # the text has bytes that the drafter cannot spell: nothing more is drafted

    @property
    def ids(self) -> list[int] | None:
        """The drafter's ids of the text; None when nothing can be drafted from them: inside a character, or for
        good."""
        self._append_unread()
        if self._is_unspellable or self._tail.pending or not self._tail.ids:
            return None
        return self._window.visible(self._tail.ids)

    def observe(self, emitted: Sequence[int]) -> None:
        """Append emitted ids to the text."""
        self._unread += emitted

    def skip_to_end(self, num_ids: int) -> None:
        """Let the drafter read the last `num_ids` ids of the text so far, and what follows them, and nothing else."""
        self._append_unread()
        self._window.skip(self._tail.ids, num_ids)

    def _append_unread(self) -> None:
        if self._unread:
            unread, self._unread = self._unread, []
            self._append(unread)

    def _append(self, emitted: Sequence[int]) -> None:
        if self._is_unspellable:
            return
        try:
            for is_special, run in runs(emitted, self._target):
                if is_special:
                    self._append_special(run)
                else:
                    self._append_text(run)
        except VocabularyError:
            self._is_unspellable = True

    def _append_text(self, emitted: Sequence[int]) -> None:
        """Append text; the n-gram cache learns the merges of the earlier tokenisation that the text confirmed."""
        num_before, was_pending = len(self._tail.ids), bool(self._tail.pending)
        unchanged = self._tail.append(self._target.spell(emitted))
        if unchanged == num_before and not was_pending:
            self._learn(num_before)
        else:
            self._unlearn_from(unchanged)
        self._unlearned += emitted

    def _append_special(self, special_ids: Sequence[int]) -> None:
        """Append special ids, which make the tokenisation of the text before them final."""
        self._unlearn_from(self._tail.end())
        self._learn(len(self._tail.ids))
        self._tail.append_special(map_special_ids(special_ids, self._alignment))
        self._learned_to = len(self._tail.ids)

    def _unlearn_from(self, unchanged: int) -> None:
        """Learn nothing of ids that spell another part of the text now."""
        if self._learned_to is not None and unchanged < self._learned_to:
            self._learned_to = None

    def _learn(self, end: int) -> None:
        if self._learned_to is not None and self._is_stored:
            self._cache.learn(self._tail.ids[self._learned_to : end], self._unlearned)
        self._learned_to, self._unlearned = end, []


class SlidingWindow:
    """The end of one text that fits the drafter's context, from a safe boundary on.

    A full window drops its older half, and the drafter reads the other half again: every id is read twice, whatever the
    length of the text. A bos at the beginning stays, since models that were trained with one fail without it. It may
    begin later than it has to, since a long text takes long to read.
    """

    def __init__(self, vocabulary: Vocabulary, context_limit: int) -> None:
        self._vocabulary = vocabulary
        self._max_ids = max(context_limit - min(_RESERVED_IDS, context_limit // 4), 1)
        self._start = 0

    def visible(self, ids: list[int]) -> list[int]:
        """Return the ids that the drafter reads, at least the last one, and at most as many as leave space for
        drafting."""
        bos = ids[:1] if self._begins_with_bos(ids) else []
        if not 0 < len(ids) - self._start <= self._max_ids - len(bos):
            self._start = 0 if len(ids) <= self._max_ids else self._boundary(ids, (self._max_ids + 1) // 2)
        return ids if self._start == 0 else bos + ids[self._start :]

    def skip(self, ids: list[int], num_kept: int) -> None:
        """Begin about `num_kept` ids before the end, unless the drafter begins later already."""
        if len(ids) - self._start > num_kept:
            self._start = self._boundary(ids, num_kept)

    def _begins_with_bos(self, ids: list[int]) -> bool:
        return self._max_ids > 2 and ids[:1] == [self._vocabulary.roles.get("bos")]

    def _boundary(self, ids: list[int], num_kept: int) -> int:
        """Return the index where the last `num_kept` ids begin, or a safe boundary a little after it."""
        earliest = len(ids) - num_kept
        last = earliest + int(num_kept * _SEARCHED_SHARE)
        return next((at for at in range(earliest, last) if self._is_safe(ids[at - 1], ids[at])), earliest)

    def _is_safe(self, before: int, after: int) -> bool:
        if not {before, after}.isdisjoint(self._vocabulary.special_ids):
            return True
        left, right = (self._vocabulary.token_bytes[token].decode("utf-8", "replace") for token in (before, after))
        return self._vocabulary.boundary.match(left + right, len(left)) is not None
