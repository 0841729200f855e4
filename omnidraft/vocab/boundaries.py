"""Where a text can be cut without changing how it is tokenised.

A cut is safe when no token of the vocabulary reaches across it and the split into words does not look across
it either. The words of the tokenizers in use look ahead only from white space (GPT-2's `\\s+(?!\\S)`), so every
cut here has a visible character on its left; on its right stands white space or a punctuation mark, neither of
which Unicode normalisation joins to what stands before it.
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
_BROKEN = r"[\udc80-\udcff]"
_WHOLE = r"[^\udc80-\udcff]"


def boundary_pattern(token_bytes: Sequence[bytes]) -> re.Pattern[str]:
    """An empty match at every safe cut, and around bytes that are no UTF-8 (as surrogates, PEP 383)."""
    tokens = _BETWEEN_TOKENS.join(spelled.decode("utf-8", "replace") for spelled in token_bytes)
    safe = [pair for pair in _CUTS if re.search("".join(pair), tokens) is None]
    return re.compile("|".join(_between(*pair) for pair in [*safe, (_BROKEN, _WHOLE), (_WHOLE, _BROKEN)]))


def _between(left: str, right: str) -> str:
    return f"(?<={left})(?={right})"
