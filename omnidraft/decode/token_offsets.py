"""Where each token begins in the text that its bytes and those before it spell."""

import codecs
from collections.abc import Mapping

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
