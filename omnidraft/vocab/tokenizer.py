"""Vocabularies and tokenizers: the bytes of every id, the ids of these bytes, and where a text can be cut."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from omnidraft.errors import VocabularyError

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


class ByteTable:
    """The inverse of a vocabulary, also for bytes that no tokenizer call can spell. If two ids spell the same bytes,
    the lower one is used, and one of byte fallback only where there is no other, as the tokenizer does."""

    def __init__(self, token_bytes: Sequence[bytes], fallback_ids: Collection[int] = ()) -> None:
        self._id_of: dict[bytes, int] = {}
        lengths: defaultdict[int, set[int]] = defaultdict(set)
        for token in sorted(range(len(token_bytes)), key=lambda token: token in fallback_ids):
            if data := token_bytes[token]:
                self._id_of.setdefault(data, token)
                lengths[data[0]].add(len(data))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}

    def get(self, data: bytes) -> int | None:
        """Return the token that spells exactly these bytes."""
        return self._id_of.get(data)

    def longest_match(self, data: bytes) -> list[int]:
        """Return ids that spell the data: the longest token that matches, then the same for the rest.

        Raises:
            VocabularyError: at some byte no token matches.
        """
        ids: list[int] = []
        start = 0
        while start < len(data):
            token, num_bytes = self._longest_token_at(data, start)
            ids.append(token)
            start += num_bytes
        return ids

    def _longest_token_at(self, data: bytes, start: int) -> tuple[int, int]:
        for num_bytes in self._lengths.get(data[start], ()):
            token = self._id_of.get(data[start : start + num_bytes])
            if token is not None and start + num_bytes <= len(data):
                return token, num_bytes
        raise VocabularyError(f"no token spells byte {data[start]:#04x} before {data[start + 1 : start + 9]!r}")


@dataclass(frozen=True)
class Vocabulary:
    """The ids of one tokenizer. It is immutable; derived tables are computed once, on first use."""

    token_bytes: tuple[bytes, ...]
    """The bytes that each id spells; b"" for special tokens and for ids that no text has."""
    roles: Mapping[str, int]
    """bos, eos, pad, unk, end_of_turn, start_of_turn, think_start, ... -> id."""
    special_ids: frozenset[int]
    fallback_ids: frozenset[int] = frozenset()
    """Ids for single bytes that a tokenizer takes where no other id spells a character, such as `<0x0A>`."""

    def __len__(self) -> int:
        return len(self.token_bytes)

    def spell(self, ids: Iterable[int]) -> bytes:
        """Return the concatenated bytes of these ids."""
        return b"".join([self.token_bytes[token] for token in ids])

    @cached_property
    def num_bytes(self) -> np.ndarray:
        """Length of each id's bytes, int64."""
        return np.fromiter(map(len, self.token_bytes), dtype=np.int64, count=len(self.token_bytes))

    @cached_property
    def byte_table(self) -> ByteTable:
        """The map from bytes to ids."""
        return ByteTable(self.token_bytes, self.fallback_ids)

    @cached_property
    def boundary(self) -> re.Pattern[str]:
        """A pattern that matches at safe boundaries: where a cut does not change the tokenisation."""
        return boundary_pattern(self.token_bytes)


class Tokenizer(Protocol):
    """Converts text to ids. It adds no special token and recognises none: "<|im_end|>" in a text stays text."""

    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that continues another: nothing is added before its first word."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text; faster than one by one."""


def boundary_pattern(token_bytes: Sequence[bytes]) -> re.Pattern[str]:
    """Return a pattern that matches at every safe cut, and around bytes that are not UTF-8 (as surrogates, PEP 383).

    A cut is safe if no token of the vocabulary reaches across it and the pre-tokenizer does not look across it either.
    The pre-tokenizers in use look ahead only from white space (GPT-2's `\\s+(?!\\S)`), so every cut here has a visible
    character on its left; on its right is white space or a punctuation mark, neither of which Unicode normalisation
    joins to the character before it.
    """
    tokens = _BETWEEN_TOKENS.join(data.decode("utf-8", "replace") for data in token_bytes)
    safe = [pair for pair in _CUTS if re.search("".join(pair), tokens) is None]
    return re.compile("|".join(_between(*pair) for pair in [*safe, (_SURROGATE, _TEXT), (_TEXT, _SURROGATE)]))


def _between(left: str, right: str) -> str:
    return f"(?<={left})(?={right})"
