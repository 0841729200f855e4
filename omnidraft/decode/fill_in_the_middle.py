"""Prompts of fill-in-the-middle: the text before a gap and the text behind it, in the order that code models learned.

The target reads prefix and suffix, each behind its special token, and answers with the middle.
Source: https://arxiv.org/abs/2207.14255, section 3 (PSM).
"""

from typing import Final

from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

_PREFIX: Final = "fim_prefix"
_SUFFIX: Final = "fim_suffix"
_MIDDLE: Final = "fim_middle"
_ENDS: Final = (_PREFIX, _SUFFIX, _MIDDLE, "file_separator", "repository_name")
"""Roles of the special tokens that begin something else, so that a middle ends before them."""


def can_infill(vocabulary: Vocabulary) -> bool:
    """Return whether the model has the special tokens that mark a gap."""
    return vocabulary.roles.keys() >= {_PREFIX, _SUFFIX, _MIDDLE}


def infill_ids(prefix: str, suffix: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text with a gap, for a tokenizer that `can_infill`; what the tokenizer begins texts with is
    not among them."""
    roles = tokenizer.vocabulary.roles
    before, behind = tokenizer.encode(prefix), tokenizer.encode(suffix)
    return [roles[_PREFIX], *before, roles[_SUFFIX], *behind, roles[_MIDDLE]]


def infill_stop_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """Return the ids that end a middle, besides those that end any text."""
    return frozenset(vocabulary.roles[role] for role in _ENDS if role in vocabulary.roles)
