"""Safe boundaries: positions at which a text can be cut without changing its tokenisation.

A cut is safe if no token of the vocabulary reaches across it and the pre-tokenizer does not look across it either.
The pre-tokenizers in use look ahead only from white space (GPT-2's `\\s+(?!\\S)`), so every cut here has a visible
character on its left; on its right is white space or a punctuation mark, neither of which Unicode normalisation joins
to the character before it.
"""

import re
from collections.abc import Sequence

_BETWEEN_TOKENS = "\x00"
_VISIBLE = r"[^\s\x00]"
_WORD = r"[^\W_]"
_CUTS = (
    (_VISIBLE, " "),
    (_WORD, r"[ \t\r\n]"),
    (_WORD, r"[!-/:-@\[-^`{-~]"),
    (_WORD, r"[\u3001\u3002\u300c\u300d\uff01-\uff0f\uff1a-\uff20]"),
)
_SURROGATE = r"[\udc80-\udcff]"
_TEXT = r"[^\udc80-\udcff]"


def boundary_pattern(token_bytes: Sequence[bytes]) -> re.Pattern[str]:
    """Return a pattern that matches at every safe cut, and around bytes that are not UTF-8 (as surrogates, PEP 383)."""
    tokens = _BETWEEN_TOKENS.join(data.decode("utf-8", "replace") for data in token_bytes)
    safe = [pair for pair in _CUTS if re.search("".join(pair), tokens) is None]
    return re.compile("|".join(_between(*pair) for pair in [*safe, (_SURROGATE, _TEXT), (_TEXT, _SURROGATE)]))


def _between(left: str, right: str) -> str:
    return f"(?<={left})(?={right})"
