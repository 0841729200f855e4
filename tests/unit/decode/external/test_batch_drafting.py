"""Drafts of several texts at once are those that each would have alone."""

import pytest

from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.external.batch_drafting import DraftingState, draft_batch
from omnidraft.decode.external.batch_policy import FixedBatchPolicy, ThresholdBatchPolicy
from omnidraft.errors import ContractError
from omnidraft.ports import Request, Source
from omnidraft.testing.toy_models import ToyDrafter
from tests.unit.decode.external.engines import NUM_TOKENS, STOP_IDS, prompts
from tests.unit.decode.toys import (
    DRAFT_PIECES,
    DRAFT_TOKENIZER,
    TARGET_TOKENIZER,
    D,
    T,
    make_cache,
    make_drafter,
    table_of,
)


def drafted_text(proposer: TreeProposer, prompt_ids, *, with_lookup: bool = False) -> DraftingState:
    drafter = next(each for each in proposer.sources if isinstance(each, Drafter))
    text = TARGET_TOKENIZER.vocabulary.spell(prompt_ids).decode()
    request = Request(tuple(prompt_ids), (1, *DRAFT_TOKENIZER.encode(text)), 1, stop_ids=STOP_IDS)
    return DraftingState(drafter, request, (), proposer.calibrator, with_lookup=with_lookup)


def chains(texts, policy=None, num_tokens=NUM_TOKENS, **options):
    drafted = draft_batch(
        texts, num_tokens, policy or FixedBatchPolicy(), None, **({"may_open": lambda num: True} | options)
    )
    return [tree.tokens for tree in drafted.trees]


@pytest.mark.parametrize("policy", [FixedBatchPolicy(), ThresholdBatchPolicy(0.05)], ids=["everything", "likely"])
def test_a_text_is_drafted_for_as_if_it_were_alone(policy):
    """Draft several rounds, in which sequences grow by tokens that were not drafted."""
    together = [drafted_text(make_drafter(), prompt, with_lookup=True) for prompt in prompts(8)]
    for other in together[1:]:
        other.drafter, other.calibrator = together[0].drafter, together[0].calibrator
    alone = [drafted_text(make_drafter(), prompt, with_lookup=True) for prompt in prompts(8)]
    for said in ([3, 4], [5], [6, 7, 8]):
        got = chains(together, policy)
        assert got == [chains([each], policy)[0] for each in alone]
        assert any(len(chain) > 1 for chain in got)
        for each in (*together, *alone):
            each.observe(said)


def test_one_step_serves_all_texts():
    counting = CountingDrafter()
    proposer = make_drafter()
    texts = [drafted_text(proposer, prompt) for prompt in prompts(6)]
    for each in texts:
        each.drafter = counting.instead_of(each.drafter)
    chains(texts)
    assert counting.num_calls <= 1 + NUM_TOKENS


def test_merges_and_splits_are_read_as_the_target_says_them():
    cache = make_cache()
    cache.insert([D[b"a"], D[b"bc"]], T[b"abc"])
    table = table_of(len(DRAFT_PIECES), {D[b"a"]: D[b"bc"], D[b"bc"]: D[b"de"]}, favourite=D[b"a"])
    text = drafted_text(make_drafter(table, cache=cache), TARGET_TOKENIZER.encode("."))
    tree = draft_batch([text], 3, FixedBatchPolicy(), None, may_open=lambda num: True).trees[0]
    assert tree.tokens[1:] == (T[b"abc"], T[b"d"], T[b"e"])
    assert tree.sources[1:] == (Source.MERGE, Source.SPLIT, Source.SPLIT)


def test_without_memory_only_what_costs_none_is_drafted():
    repeated = TARGET_TOKENIZER.encode("abc he.abc he.")
    with_lookup = drafted_text(make_drafter(), repeated, with_lookup=True)
    without = drafted_text(make_drafter(), repeated)
    got = chains([with_lookup, without], may_open=lambda num: False)
    assert len(got[0]) > 1
    assert len(got[1]) == 1
    assert with_lookup.model is None


def test_of_a_text_longer_than_the_drafters_context_the_end_is_read():
    long = drafted_text(make_drafter(context_limit=8), TARGET_TOKENIZER.encode("abc he.abc fgh"))
    assert len(long.context.ids) <= 6
    assert len(chains([long])[0]) > 1
    assert DRAFT_TOKENIZER.vocabulary.spell(long.fed) == b"fgh"


def test_released_keys_are_computed_again():
    kept, released = (drafted_text(make_drafter(), prompts(1)[0]) for _ in range(2))
    chains([kept]), chains([released])
    released.release()
    assert released.model is None
    for each in (kept, released):
        each.observe([3])
    assert chains([kept]) == chains([released])


def test_noise_that_nobody_knows_is_never_looked_at():
    from omnidraft.decode.sampling.noise import ForbiddenNoise

    with pytest.raises(ContractError, match="unknown here"):
        ForbiddenNoise().exponentials(0, None)


class CountingDrafter:
    """A toy that counts its steps."""

    def __init__(self) -> None:
        self.num_calls = 0

    def instead_of(self, drafter: Drafter) -> Drafter:
        from dataclasses import replace

        assert isinstance(drafter.model, ToyDrafter)
        counting, model = self, drafter.model

        class Counted(ToyDrafter):
            def advance_all(self, requests):
                counting.num_calls += 1
                return super().advance_all(requests)

            def branch_all(self, requests):
                counting.num_calls += 1
                return super().branch_all(requests)

        return replace(drafter, model=Counted(model.table))
