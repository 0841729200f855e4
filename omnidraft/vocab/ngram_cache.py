"""The n-gram cache: several draft tokens that spell one target token, learned from emitted text.

An entry is a hash of the draft ids and a target id. It is checked against the bytes of both vocabularies when it is
inserted and again when it is looked up, so a wrong entry or a collision can cost a guess, but never give a token that
spells something else.
Source: docs/algorithms.md section 2.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from omnidraft.errors import VocabularyError
from omnidraft.vocab.boundary_alignment import align_boundaries
from omnidraft.vocab.ngram_table import ENTRY, NgramTable
from omnidraft.vocab.tokenizer import Vocabulary

CacheMode = Literal["online", "frozen", "off"]
"""Learns and draws; draws and never changes; does neither. See config.CacheSettings."""

MIN_LENGTH = 2
_SEED = 0x9E3779B97F4A7C15
_FACTOR = 0xBF58476D1CE4E5B9
_MASK = 0xFFFFFFFFFFFFFFFF


class NgramCache:
    """A bounded cache. It is not thread-safe: another thread takes a `copy`."""

    def __init__(
        self,
        alignment_fingerprint: str,
        draft_vocab: Vocabulary,
        target_vocab: Vocabulary,
        capacity: int,
        mode: CacheMode = "online",
    ) -> None:
        self.mode = mode
        self.alignment_fingerprint = alignment_fingerprint
        self._draft = draft_vocab
        self._target = target_vocab
        self._table = NgramTable(capacity)
        self.max_length = MIN_LENGTH
        """An upper bound on the length of the n-grams."""

    def __len__(self) -> int:
        return len(self._table)

    def insert(self, draft_ids: Sequence[int], target_id: int) -> bool:
        """Insert an n-gram or count a use of it; return whether it is new. A cache that is not online stays as it is.

        Raises:
            VocabularyError: fewer than two draft tokens, or they do not spell the target token.
        """
        if not self._spells(draft_ids, target_id):
            raise VocabularyError(
                f"draft tokens {list(draft_ids)} spell {self._draft.spell(draft_ids)!r}, "
                f"target token {target_id} spells {self._target.token_bytes[target_id]!r}"
            )
        if self.mode != "online":
            return False
        self.max_length = max(self.max_length, len(draft_ids))
        return self._table.add(_key(draft_ids), target_id)

    def lookup(self, draft_ids: Sequence[int]) -> int | None:
        """Return the target token that these draft tokens spell, or None; the entry counts as used where the cache is
        online. A cache that is off knows none."""
        return self._known(draft_ids, self._table.use if self.mode == "online" else self._table.find)

    def peek(self, draft_ids: Sequence[int]) -> int | None:
        """Return what `lookup` would, without a use: what is measured leaves no trace in what stays."""
        return self._known(draft_ids, self._table.find)

    def learn(self, draft_ids: Sequence[int], target_ids: Sequence[int]) -> int:
        """Insert every merge of two tokenisations of the same bytes, one of which may end earlier; return the number of
        new ones.

        Raises:
            VocabularyError: they are not tokenisations of the same bytes.
        """
        self._require_same_bytes(draft_ids, target_ids)
        common = align_boundaries(self._draft.num_bytes[list(draft_ids)], self._target.num_bytes[list(target_ids)])
        return sum(self.insert(draft_ids[first:end], target_ids[at]) for at, first, end in common.merges_M3.tolist())

    def copy(self) -> "NgramCache":
        """Return a cache with the same entries and no shared memory."""
        return self._with_entries(self._table.entries(), self.max_length)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays for a snapshot; equal histories give equal arrays."""
        entries = self._table.entries()
        columns = {name: np.ascontiguousarray(entries[name]) for name in ENTRY.names or ()}
        fingerprint = np.frombuffer(self.alignment_fingerprint.encode(), np.uint8).copy()
        return {"alignment": fingerprint, "max_length": np.array([self.max_length], np.uint32), **columns}

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, np.ndarray],
        alignment_fingerprint: str,
        draft_vocab: Vocabulary,
        target_vocab: Vocabulary,
        capacity: int,
        mode: CacheMode = "online",
    ) -> "NgramCache":
        """Return the cache of a snapshot. Raises VocabularyError when arrays are missing or belong to another pair."""
        missing = {"alignment", "max_length", *(ENTRY.names or ())} - arrays.keys()
        if missing:
            raise VocabularyError(f"these arrays are no n-gram cache: {sorted(missing)} missing")
        empty = cls(alignment_fingerprint, draft_vocab, target_vocab, capacity, mode)
        empty._require_alignment(arrays["alignment"].tobytes().decode("utf-8", "replace"))
        return empty._with_entries(_entries(arrays, len(target_vocab)), int(arrays["max_length"][0]))

    def _known(self, draft_ids: Sequence[int], find: Callable[[int], int | None]) -> int | None:
        target_id = None if self.mode == "off" else find(_key(draft_ids))
        return target_id if target_id is not None and self._spells(draft_ids, target_id) else None

    def _spells(self, draft_ids: Sequence[int], target_id: int) -> bool:
        parts = [self._draft.token_bytes[token] for token in draft_ids]
        return len(parts) >= MIN_LENGTH and all(parts) and b"".join(parts) == self._target.token_bytes[target_id]

    def _require_same_bytes(self, draft_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        drafted, emitted = self._draft.spell(draft_ids), self._target.spell(target_ids)
        if not drafted.startswith(emitted) and not emitted.startswith(drafted):
            raise VocabularyError(f"not the same text: draft ids spell {drafted[:80]!r}, target ids {emitted[:80]!r}")

    def _require_alignment(self, fingerprint: str) -> None:
        if fingerprint != self.alignment_fingerprint:
            raise VocabularyError(f"n-grams of alignment {fingerprint}, here it is {self.alignment_fingerprint}")

    def _with_entries(self, entries: np.ndarray, max_length: int) -> "NgramCache":
        capacity = self._table.capacity
        other = NgramCache(self.alignment_fingerprint, self._draft, self._target, capacity, self.mode)
        other._table = NgramTable(capacity, entries)
        other.max_length = max_length
        return other


def _entries(arrays: Mapping[str, np.ndarray], num_target: int) -> np.ndarray:
    """Check the arrays of a snapshot and return them as the table's entries."""
    if len({len(arrays[name]) for name in ENTRY.names or ()}) != 1:
        raise VocabularyError("the n-gram cache's arrays differ in length")
    if arrays["target"].max(initial=0) >= num_target:
        raise VocabularyError(f"an n-gram means target token {arrays['target'].max()} of {num_target}")
    entries = np.empty(len(arrays["key"]), ENTRY)
    for name in ENTRY.names or ():
        entries[name] = arrays[name]
    if len(np.unique(entries["key"])) < len(entries):
        raise VocabularyError("the n-gram cache has an entry twice")
    return entries


def _key(draft_ids: Sequence[int]) -> int:
    """Return a hash of draft ids; multiply and fold as in splitmix64."""
    key = _SEED
    for token in draft_ids:
        mixed = ((key ^ (token + 1)) * _FACTOR) & _MASK
        key = mixed ^ (mixed >> 29)
    return key
