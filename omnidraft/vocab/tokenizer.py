"""Vocabularies and tokenizers: the bytes of every id, and the ids of a text."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from omnidraft.vocab.boundaries import boundary_pattern
from omnidraft.vocab.byte_table import ByteTable


@dataclass(frozen=True)
class Vocabulary:
    """The ids of one tokenizer. It is immutable; derived tables are computed once, on first use."""

    token_bytes: tuple[bytes, ...]
    """The bytes that each id spells; b"" for special tokens and for ids that no text has."""
    roles: Mapping[str, int]
    """bos, eos, pad, unk, end_of_turn, start_of_turn, think_start, ... -> id."""
    special_ids: frozenset[int]

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
        return ByteTable(self.token_bytes)

    @cached_property
    def boundary(self) -> re.Pattern[str]:
        """A pattern that matches where a cut does not change the tokenisation; see boundaries.py."""
        return boundary_pattern(self.token_bytes)


class Tokenizer(Protocol):
    """Converts text to ids. It adds no special token and recognises none: "<|im_end|>" in a text stays text."""

    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that continues another: nothing is added before its first word."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text; faster than one by one."""
