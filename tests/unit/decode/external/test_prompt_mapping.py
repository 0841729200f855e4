"""The drafter's prompt is the target's in other tokens."""

from hypothesis import given
from hypothesis import strategies as st

from omnidraft.decode.external.prompt_mapping import map_prompt
from tests.unit.decode.toys import ALIGNMENT, DRAFT_EOS, DRAFT_TOKENIZER, TARGET_EOS, TARGET_PIECES, TARGET_TOKENIZER

SPECIAL = TARGET_TOKENIZER.vocabulary.special_ids


def prompt_of(ids, longest=1000):
    return map_prompt(ids, TARGET_TOKENIZER.vocabulary, DRAFT_TOKENIZER, ALIGNMENT, longest=longest)


@given(ids=st.lists(st.integers(0, len(TARGET_PIECES) - 1), min_size=1, max_size=30))
def test_it_spells_the_same_bytes(ids):
    mapped, rest = prompt_of(ids)
    spelled = DRAFT_TOKENIZER.vocabulary.spell(mapped) + TARGET_TOKENIZER.vocabulary.spell(rest)
    assert spelled == TARGET_TOKENIZER.vocabulary.spell(ids)
    assert not SPECIAL & set(rest)


def test_a_special_token_becomes_that_of_the_same_role():
    text = TARGET_TOKENIZER.encode("abc he")
    assert prompt_of([*text, TARGET_EOS, *text]) == ((*DRAFT_TOKENIZER.encode("abc he"), DRAFT_EOS), tuple(text))


def test_of_a_long_one_the_end_stays():
    text = TARGET_TOKENIZER.encode("abc he")
    mapped, rest = prompt_of([*text * 20, TARGET_EOS, *text * 20], longest=8)
    assert mapped[-1] == DRAFT_EOS
    assert len(mapped) == len(rest) == 8
