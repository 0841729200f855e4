"""How one tokenizer spells the tokens of another.

By bytes, not by strings: two ids with the same bytes are one token, the lower id stands for it and the other is
masked. Special tokens match by role only, each at most once; a control token without a partner is unmapped.
"""

from collections.abc import Sequence

from omnidraft.errors import VocabularyError
from omnidraft.vocab.byte_table import ByteTable
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

NEVER_MATCHED = "unk"
GENERAL_ROLES = ("eos", "end_of_text", "bos", "pad")
"""Matched last, in this order: an id that is both end_of_turn and eos is the end of a turn first."""


def spelled_by(speller: Tokenizer, vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """Each id of the vocabulary in the speller's ids; () for special, masked and unspellable ones."""
    table, mine = speller.vocabulary.byte_table, vocabulary.byte_table
    pieces: list[tuple[int, ...]] = [()] * len(vocabulary)
    without_partner = []
    for token, spelled in enumerate(vocabulary.token_bytes):
        if mine.get(spelled) != token:
            continue
        partner = table.get(spelled)
        if partner is None:
            without_partner.append(token)
        else:
            pieces[token] = (partner,)
    spelled_out = _spell_out(speller, [vocabulary.token_bytes[token] for token in without_partner])
    for token, several in zip(without_partner, spelled_out, strict=True):
        pieces[token] = several
    return pieces


def _spell_out(speller: Tokenizer, texts: Sequence[bytes]) -> list[tuple[int, ...]]:
    """What the speller's tokenizer makes of each; its byte table where that would spell something else."""
    vocabulary = speller.vocabulary
    proposals = speller.encode_batch([text.decode("utf-8", "replace") for text in texts])
    return [
        tuple(ids) if vocabulary.spell(ids) == text else _longest_match(vocabulary.byte_table, text)
        for text, ids in zip(texts, proposals, strict=True)
    ]


def _longest_match(table: ByteTable, text: bytes) -> tuple[int, ...]:
    try:
        return tuple(table.longest_match(text))
    except VocabularyError:  # this vocabulary has no token for some byte
        return ()


def partners_by_role(draft: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """Special draft ids -> special target ids."""
    partners: dict[int, int] = {}
    for role in _in_order(draft.roles.keys() & target.roles.keys()):
        draft_id, target_id = draft.roles[role], target.roles[role]
        both_special = draft_id in draft.special_ids and target_id in target.special_ids
        if both_special and draft_id not in partners and target_id not in partners.values():
            partners[draft_id] = target_id
    return partners


def _in_order(roles: set[str]) -> list[str]:
    particular = sorted(roles - {*GENERAL_ROLES, NEVER_MATCHED})
    return particular + [role for role in GENERAL_ROLES if role in roles]
