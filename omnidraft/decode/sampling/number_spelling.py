"""Which tokens of a vocabulary are digits, and which may follow them in JSON.

Shapes: V vocabulary.
"""

import numpy as np

from omnidraft.vocab.tokenizer import Vocabulary

_DIGITS = b"0123456789"
_FOLLOWS_DIGITS = _DIGITS + b".eE,]} \t\r\n"


class NumberSpelling:
    """The digits in the tokens of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = tokens = vocabulary.token_bytes
        self.num_digits_V = np.array([len(token) - len(token.lstrip(_DIGITS)) for token in tokens])
        """The number of digits with which each token begins."""
        self.most_digits = int(self.num_digits_V.max(initial=0))
        self.follows_digits_V = np.array([token[:1] in _FOLLOWS_DIGITS for token in tokens])
        """Whether each token may follow a digit in a number, or behind one."""

    def digits_after(self, token: int, num_before: int) -> int:
        """Return the digits at the end of a text of which so many are before its last token."""
        spelled = self.tokens[token]
        rest = spelled.rstrip(_DIGITS)
        return len(spelled) - len(rest) + (0 if rest else num_before)
