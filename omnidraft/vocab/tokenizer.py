"""What the rest of omnidraft knows of a tokenizer: the bytes of every id, and how a text becomes ids."""

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
    """The ids of one tokenizer. Immutable; what is derived from it is computed once, on first use."""

    token_bytes: tuple[bytes, ...]
    """What each id spells; b"" for special tokens and for ids that no text has."""
    roles: Mapping[str, int]
    """bos, eos, pad, unk, end_of_turn, start_of_turn, think_start, ... -> id."""
    special_ids: frozenset[int]

    def __len__(self) -> int:
        return len(self.token_bytes)

    def spell(self, ids: Iterable[int]) -> bytes:
        """The bytes of these ids, one after another."""
        return b"".join([self.token_bytes[token] for token in ids])

    @cached_property
    def num_bytes(self) -> np.ndarray:
        """Length of each id's bytes, int64."""
        return np.fromiter(map(len, self.token_bytes), dtype=np.int64, count=len(self.token_bytes))

    @cached_property
    def byte_table(self) -> ByteTable:
        """From bytes back to ids."""
        return ByteTable(self.token_bytes)

    @cached_property
    def boundary(self) -> re.Pattern[str]:
        """Where a text can be cut so that both parts are tokenised as in one piece."""
        return boundary_pattern(self.token_bytes)


class Tokenizer(Protocol):
    """Text to ids. Adds no special token and recognises none: "<|im_end|>" in a text stays text."""

    vocabulary: Vocabulary

    def encode(self, text: str) -> list[int]:
        """Ids of a text that continues another: nothing is put before its first word."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for each text, faster."""
