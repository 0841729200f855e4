"""Texts of tenants with factors of their own are drafted for with these, and with nobody else's, whatever is reused."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.drafting.loaded_factors import LoadedFactors
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.ports import DraftTree
from omnidraft.testing.toy_models import ToyDrafter, ToyTable
from tests.unit.decode.drafting.test_many_texts import draft, request_of
from tests.unit.decode.toys import DRAFT_PIECES, make_drafter, with_unmeasured_acceptance

TENANTS = ("a", "b", "c")
"""All but `c` have factors of their own: another toy drafter each."""
MODELS = {name: ToyDrafter(ToyTable.random(len(DRAFT_PIECES), seed)) for seed, name in enumerate(TENANTS)}
TEXTS = ("abc he.\n", "abc he", "he abc", "ch. e")


def proposer_over(model: ToyDrafter, factors: LoadedFactors | None) -> TreeProposer:
    proposer = make_drafter()
    [drafter] = proposer.sources
    proposer.sources = (replace(drafter, model=model, factors=factors),)
    return with_unmeasured_acceptance(proposer)  # what is measured is everybody's


def tree_of(tenant: str, text: str) -> DraftTree:
    """What the tenant's own drafter drafts when there is no other."""
    proposer = proposer_over(MODELS[tenant], None)
    [tree] = proposer.propose_all([draft(proposer.open(request_of(text, tenant=tenant)))])
    return tree


rounds = st.lists(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.sampled_from(TEXTS)), min_size=1, max_size=5), max_size=6
)


@settings(max_examples=40)
@given(rounds=rounds, scope=st.sampled_from([None, "one for all"]))
def test_every_text_is_drafted_for_as_by_its_tenants_own_drafter(rounds, scope):
    """Ended texts leave their keys to the next ones of their scope, which may be that of all tenants."""
    proposer = proposer_over(MODELS["c"], LoadedFactors({name: MODELS[name].open for name in ("a", "b")}))
    for texts in rounds:
        sessions = [proposer.open(request_of(text, tenant=name, cache_scope=scope)) for name, text in texts]
        trees = proposer.propose_all([draft(each) for each in sessions])
        assert trees == [tree_of(*each) for each in texts]
        for each in sessions:
            each.close()


def test_the_tenants_would_draft_differently():
    assert len({tuple(tree_of(name, TEXTS[0]).tokens) for name in TENANTS}) == len(TENANTS)


def test_factors_that_are_turned_off_or_forgotten_serve_no_text_that_begins_then():
    off: set[str] = set()
    factors = LoadedFactors({name: MODELS[name].open for name in ("a", "b")}, lambda tenant: tenant not in off)
    proposer = proposer_over(MODELS["c"], factors)

    def drafted(tenant: str) -> DraftTree:
        session = proposer.open(request_of(TEXTS[0], tenant=tenant))
        [tree] = proposer.propose_all([draft(session)])
        session.close()
        return tree

    assert [drafted(name) for name in TENANTS] == [tree_of(name, TEXTS[0]) for name in TENANTS]
    off.add("a")
    factors.forget("b")
    assert [drafted(name) for name in TENANTS] == [tree_of("c", TEXTS[0])] * 3
    off.clear()
    assert drafted("a") == tree_of("a", TEXTS[0])
    assert factors.tenants == {"a"}


def test_a_running_text_keeps_the_factors_that_it_began_with():
    factors = LoadedFactors({"a": MODELS["a"].open})
    proposer = proposer_over(MODELS["c"], factors)
    session = proposer.open(request_of(TEXTS[0], tenant="a"))
    proposer.propose_all([draft(session)])
    factors.forget("a")
    session.observe([3])
    [tree] = proposer.propose_all([draft(session, position=10)])
    alone = proposer_over(MODELS["a"], None)
    other = alone.open(request_of(TEXTS[0], tenant="a"))
    alone.propose_all([draft(other)])
    other.observe([3])
    assert alone.propose_all([draft(other, position=10)]) == [tree]
    logits = session.sources[0].model.prefill_or_extend(0, [1])
    assert np.array_equal(logits, MODELS["a"].open().prefill_or_extend(0, [1]))
