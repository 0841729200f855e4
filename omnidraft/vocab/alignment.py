"""The alignment of two vocabularies: tokens that spell the same bytes. It is built once per pair and never changed.

Shapes: D draft ids, T target ids.
Direct: one draft token is one target token. Split: one draft token is several target tokens. Several draft tokens
for one target token are learned while serving: ngram_cache.py.
Source: docs/algorithms.md section 1.
Tokens match by bytes, not by strings: two ids with the same bytes are one token, the one that the tokenizer uses stands
for it (see ByteTable) and the other is masked. Special tokens match by role only, each at most once; a control token
without a partner is unmapped.
"""

import hashlib
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from omnidraft.errors import VocabularyError
from omnidraft.files import replaced_file
from omnidraft.progress import stages
from omnidraft.vocab.tokenizer import ByteTable, Tokenizer, Vocabulary

_FORMAT = "1"
_NEVER_MATCHED = "unk"
_GENERAL_ROLES = ("eos", "end_of_text", "bos", "pad")
"""Matched last, in this order: an id that is both end_of_turn and eos is the end of a turn first."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedLists:
    """List i is ids[offsets[i]:offsets[i + 1]]."""

    offsets: np.ndarray  # int64, one more than there are lists
    ids: np.ndarray  # int32

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Self:
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=offsets[1:])
        flat = (item for each in lists for item in each)
        return cls(offsets, np.fromiter(flat, np.int32, int(offsets[-1])))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.ids[self.offsets[index] : self.offsets[index + 1]].tolist())

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def firsts(self, default: int) -> np.ndarray:
        """Return the first id of each list as int64, `default` for an empty one."""
        firsts = np.full(len(self), default, np.int64)
        filled = self.lengths > 0
        firsts[filled] = self.ids[self.offsets[:-1][filled]]
        return firsts


@dataclass(frozen=True)
class Alignment:
    """A map of token ids in both directions; the arrays are for code that works on whole distributions."""

    fingerprint: str
    """sha256 over both byte tables and roles; a trace, a cache and a snapshot must agree on it."""
    targets_of_draft: PackedLists
    """The target ids that each draft id becomes."""
    drafts_of_target: PackedLists
    """The draft ids that spell each target id."""

    @property
    def num_draft(self) -> int:
        return len(self.targets_of_draft)

    @property
    def num_target(self) -> int:
        return len(self.drafts_of_target)

    @cached_property
    def first_D(self) -> np.ndarray:
        """int64: the first target id that a draft token becomes; num_target where it is unmapped."""
        return self.targets_of_draft.firsts(default=self.num_target)

    @cached_property
    def draft_first_T(self) -> np.ndarray:
        """int64: a target token's direct partner, else the first piece of the drafter's spelling of it; num_draft
        where there is none."""
        return self.drafts_of_target.firsts(default=self.num_draft)

    @cached_property
    def is_direct_D(self) -> np.ndarray:
        """bool: a draft token is one target token."""
        return self.targets_of_draft.lengths == 1

    @cached_property
    def direct_draft_T(self) -> np.ndarray:
        """int64: the draft token that is a target token; num_draft where there is none."""
        return np.where(self.drafts_of_target.lengths == 1, self.draft_first_T, self.num_draft)

    def pieces(self, draft_id: int) -> tuple[int, ...]:
        """Return the target ids that a draft token becomes: one if direct, more if split, () if unmapped."""
        return self.targets_of_draft[draft_id]

    def draft_pieces(self, target_id: int) -> tuple[int, ...]:
        """Return the draft ids that spell a target token: one if direct, () if it cannot be drafted."""
        return self.drafts_of_target[target_id]

    @cached_property
    def num_direct(self) -> int:
        return int(self.is_direct_D.sum())

    def without_splits(self) -> "Alignment":
        """Return this map with the draft tokens unmapped that become several target tokens."""
        every = self.targets_of_draft
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.is_direct_D)])
        direct = PackedLists(offsets, every.ids[np.repeat(self.is_direct_D, every.lengths)])
        return replace(self, targets_of_draft=direct)

    def save(self, path: Path) -> None:
        """Write a file; it appears whole or not at all, also after a power failure."""
        with replaced_file(path) as file:
            np.savez(
                file,
                format=np.array(_FORMAT),
                fingerprint=np.array(self.fingerprint),
                target_offsets=self.targets_of_draft.offsets,
                target_ids=self.targets_of_draft.ids,
                draft_offsets=self.drafts_of_target.offsets,
                draft_ids=self.drafts_of_target.ids,
            )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file. Raises VocabularyError if it is no alignment of this format."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if str(arrays["format"]) != _FORMAT:
                    raise VocabularyError(f"{path} has format {arrays['format']}, this is {_FORMAT}")
                return cls(
                    fingerprint=str(arrays["fingerprint"]),
                    targets_of_draft=PackedLists(arrays["target_offsets"], arrays["target_ids"]),
                    drafts_of_target=PackedLists(arrays["draft_offsets"], arrays["draft_ids"]),
                )
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as exc:
            raise VocabularyError(f"{path} is no alignment: {exc}") from exc


def align(draft: Tokenizer, target: Tokenizer) -> Alignment:
    """Map every draft token to target tokens, and every target token to draft tokens."""
    targets_of_draft = _spellings(target, draft.vocabulary)
    drafts_of_target = _spellings(draft, target.vocabulary)
    for draft_id, target_id in _partners_by_role(draft.vocabulary, target.vocabulary).items():
        targets_of_draft[draft_id] = (target_id,)
        drafts_of_target[target_id] = (draft_id,)
    return Alignment(
        pair_fingerprint(draft.vocabulary, target.vocabulary),
        PackedLists.of(targets_of_draft),
        PackedLists.of(drafts_of_target),
    )


def align_cached(draft: Tokenizer, target: Tokenizer, folder: Path) -> Alignment:
    """Return `align` of both, from a file in this folder that is named by the fingerprint; write it if it is absent or
    damaged. A folder that cannot be read or written costs time only."""
    fingerprint = pair_fingerprint(draft.vocabulary, target.vocabulary)
    path = folder / f"{fingerprint}.npz"
    if path.exists():
        try:
            if (stored := Alignment.load(path)).fingerprint == fingerprint:
                return stored
            raise VocabularyError(f"{path} holds alignment {stored.fingerprint}")
        except (VocabularyError, OSError) as exc:
            logger.warning("%s; building it again", exc)
    stages.info("aligning the two vocabularies, once")
    alignment = align(draft, target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        alignment.save(path)
    except OSError as exc:
        logger.warning("the next start has to align the vocabularies again: %s", exc)
    return alignment


def pair_fingerprint(draft: Vocabulary, target: Vocabulary) -> str:
    """Return the sha256 over bytes, roles, special ids and ids of byte fallback of both, in this order."""
    digest = hashlib.sha256()
    for vocabulary in (draft, target):
        digest.update(len(vocabulary).to_bytes(8, "little"))
        digest.update(vocabulary.num_bytes.astype("<i8").tobytes())
        digest.update(b"".join(vocabulary.token_bytes))
        digest.update(repr((sorted(vocabulary.roles.items()), sorted(vocabulary.special_ids))).encode())
        if vocabulary.fallback_ids:
            digest.update(repr(sorted(vocabulary.fallback_ids)).encode())
    return digest.hexdigest()


def _spellings(speller: Tokenizer, vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """Return each id of the vocabulary in the speller's ids; () for special, masked and unspellable ones."""
    speller_table, own_table = speller.vocabulary.byte_table, vocabulary.byte_table
    texts = vocabulary.token_bytes
    partners = {token: speller_table.get(data) for token, data in enumerate(texts) if own_table.get(data) == token}
    pieces: list[tuple[int, ...]] = [()] * len(vocabulary)
    for token, partner in partners.items():
        pieces[token] = () if partner is None else (partner,)
    without_partner = [token for token, partner in partners.items() if partner is None]
    split = _tokenise_exactly(speller, [texts[token] for token in without_partner])
    for token, ids in zip(without_partner, split, strict=True):
        pieces[token] = ids
    return pieces


def _tokenise_exactly(speller: Tokenizer, texts: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Tokenise each text; where the tokenizer changes the bytes, its byte table spells them instead."""
    vocabulary = speller.vocabulary
    proposals = speller.encode_batch([text.decode("utf-8", "replace") for text in texts])
    return [
        tuple(ids) if vocabulary.spell(ids) == text else longest_match(vocabulary.byte_table, text)
        for text, ids in zip(texts, proposals, strict=True)
    ]


def longest_match(table: ByteTable, text: bytes) -> tuple[int, ...]:
    """Return the table's spelling of a text, () where it has none."""
    try:
        return tuple(table.longest_match(text))
    except VocabularyError:
        return ()


def _partners_by_role(draft: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """Return special draft ids -> special target ids."""
    partners: dict[int, int] = {}
    for role in _in_order(draft.roles.keys() & target.roles.keys()):
        draft_id, target_id = draft.roles[role], target.roles[role]
        both_special = draft_id in draft.special_ids and target_id in target.special_ids
        if both_special and draft_id not in partners and target_id not in partners.values():
            partners[draft_id] = target_id
    return partners


def _in_order(roles: set[str]) -> list[str]:
    particular = sorted(roles - {*_GENERAL_ROLES, _NEVER_MATCHED})
    return particular + [role for role in _GENERAL_ROLES if role in roles]
