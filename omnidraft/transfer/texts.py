"""Texts in two tokenisations: the ids of the same bytes before and after a transfer, and the points where they meet.

Every text begins with a start id, which is context and spells nothing. A text is cut where both tokenisations meet, so
that either side has the same bytes.
Shapes: O ids of the old tokenizer and T of the new one, P points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnidraft import prompts
from omnidraft.errors import ModelError, RequestError
from omnidraft.vocab.retokenise import tokenise_bytes
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

START_ROLES = ("end_of_text", "bos", "eos")
"""The roles of a start id, where the tokenizer itself adds none."""


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer, and the id that its texts start with."""

    tokenizer: Tokenizer
    start_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, prefix_ids: Sequence[int], name: str) -> "TextTokenizer":
        """Start with the last id that the tokenizer puts before a prompt, else with a special id. Raises ModelError."""
        roles = tokenizer.vocabulary.roles
        starts = [*reversed(prefix_ids), *(roles[role] for role in START_ROLES if role in roles)]
        if not starts:
            raise ModelError(f"the tokenizer of {name} has no bos, eos or end of text that a text could start with")
        return cls(tokenizer, starts[0])

    @property
    def vocabulary(self) -> Vocabulary:
        return self.tokenizer.vocabulary


@dataclass(frozen=True, slots=True)
class AlignedText:
    """One text in both tokenisations."""

    old_ids_O: np.ndarray
    """int64, the start id first."""
    new_ids_T: np.ndarray
    """int64, the start id first."""
    old_at_P: np.ndarray
    """int64; the index of the old id that ends at each point, from the start id to the last."""
    new_at_P: np.ndarray
    """int64; the index of the new id that ends there."""
    num_bytes: int


def read_texts(path: Path, new: Vocabulary) -> list[str]:
    """Return the texts of a prompt file: each prompt with its answer, or with the data set's own.
    Rows that a file counts among its test or validation rows are left out.

    Args:
        new: spells answers that a file has as ids: they are the new tokenizer's.

    Raises:
        RequestError: the file cannot be read, or its ids are not of this vocabulary.
    """
    return [_text(path, prompt, new) for prompt in prompts.read(path, split="train")]


def align_text(text: str, old: TextTokenizer, new: TextTokenizer, max_tokens: int) -> AlignedText:
    """Tokenise a text twice, and cut it where neither side has more than `max_tokens` ids, start id included.

    Raises:
        VocabularyError: one of the two cannot spell some byte.
    """
    data = text.encode()
    old_ids_O, old_ends_O = _ids_and_ends(old, data)
    new_ids_T, new_ends_T = _ids_and_ends(new, data)
    ends_P = np.intersect1d(old_ends_O, new_ends_T)
    old_at_P, new_at_P = np.searchsorted(old_ends_O, ends_P), np.searchsorted(new_ends_T, ends_P)
    num = int((np.maximum(old_at_P, new_at_P) < max_tokens).sum())
    return AlignedText(
        old_ids_O=old_ids_O[: old_at_P[num - 1] + 1],
        new_ids_T=new_ids_T[: new_at_P[num - 1] + 1],
        old_at_P=old_at_P[:num],
        new_at_P=new_at_P[:num],
        num_bytes=int(ends_P[num - 1]),
    )


def _ids_and_ends(side: TextTokenizer, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids, and the number of bytes up to the end of each."""
    ids_T = np.array([side.start_id, *tokenise_bytes(side.tokenizer, data)], np.int64)
    num_bytes_T = side.vocabulary.num_bytes[ids_T]
    num_bytes_T[0] = 0
    return ids_T, np.cumsum(num_bytes_T)


def _text(path: Path, prompt: prompts.Prompt, new: Vocabulary) -> str:
    if prompt.answer is not None:
        return f"{prompt.text}\n\n{prompt.answer}"
    if prompt.answer_ids:
        if not all(0 <= token < len(new) for token in prompt.answer_ids):
            raise RequestError(f"{path} has answer_ids outside the {len(new)} ids of the new tokenizer")
        return f"{prompt.text}\n\n{new.spell(prompt.answer_ids).decode('utf-8', 'replace')}"
    return f"{prompt.text}\n\n{prompt.reference}" if prompt.reference else prompt.text
