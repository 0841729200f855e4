"""Who drafted which piece of a text: the source of each accepted token, None for what the target drew undrafted."""

import codecs
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omnidraft.ports import Source, Step
from omnidraft.vocab.tokenizer import Vocabulary

REPLACEMENT_CHARACTER = "\ufffd"
"""The character that replaces bytes that are not UTF-8."""


class TokenOffsets:
    """Follows the tokens of one text."""

    def __init__(self, vocabulary: Vocabulary, shown_ids: Mapping[int, bytes]) -> None:
        """`shown_ids` spell nothing, and the text has these bytes of them nevertheless."""
        self._vocabulary = vocabulary
        self._shown_ids = shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_decoded = 0

    def offset(self, token: int) -> int:
        """Return the offset of the next token in characters: within a character that it continues, behind one that it
        leaves broken."""
        token_bytes = self._shown_ids.get(token) or self._vocabulary.spell((token,))
        was_inside = bool(self._utf8.getstate()[0])
        first = self._utf8.decode(token_bytes[:1])
        offset = self._num_decoded + (was_inside and first.startswith(REPLACEMENT_CHARACTER))
        self._num_decoded += len(first) + len(self._utf8.decode(token_bytes[1:]))
        return offset


@dataclass(frozen=True, slots=True)
class DraftedSpan:
    """A piece of a text and the source that drafted it."""

    text: str
    source: Source | None


class DraftedSpans:
    """Follows the steps of one text without calls of tools, whose markers spell nothing."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._offsets = TokenOffsets(vocabulary, {})
        self._tokens: deque[tuple[int, Source | None]] = deque()
        self._num_shown = 0

    def take(self, step: Step) -> list[DraftedSpan]:
        """Return the spans of the text that this step shows, in order; together they are its text."""
        for index, token in enumerate(step.emitted):
            source = step.tree.sources[step.path[index]] if index < len(step.path) else None
            self._tokens.append((self._offsets.offset(token), source))
        return list(self._spans(step.text))

    def _spans(self, text: str) -> Iterator[DraftedSpan]:
        while text:
            while len(self._tokens) > 1 and self._tokens[1][0] <= self._num_shown:
                self._tokens.popleft()
            num_chars = self._tokens[1][0] - self._num_shown if len(self._tokens) > 1 else len(text)
            piece, text = text[:num_chars], text[num_chars:]
            self._num_shown += len(piece)
            yield DraftedSpan(piece, self._tokens[0][1])
