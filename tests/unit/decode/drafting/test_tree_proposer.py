"""Trees from several proposers: readings side by side, runners-up, branches, copies; and what is learned of them."""

from dataclasses import replace

import pytest
import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.prompt_lookup import PromptLookup
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.ports import Sampling, Source, TreeLimits
from omnidraft.testing.toy_models import ToyTable, ToyTarget
from tests.unit.decode.checks import spied
from tests.unit.decode.toys import (
    DRAFT_PIECES,
    NOISE,
    TABLE,
    TARGET_TOKENIZER,
    D,
    T,
    Wide,
    emitted,
    known_costs,
    make_cache,
    make_drafter,
    make_request,
    slow_decode,
    table_of,
    toy_decoder,
)


def grow(proposer, limits=TreeLimits(30), sampling=None):  # noqa: B008
    return proposer.open(make_request(sampling or Sampling(0.0))).propose(8, limits, NOISE)


def test_merged_and_direct_readings_of_the_same_text_stand_side_by_side():
    cache = make_cache()
    cache.insert((D[b"h"], D[b"e"]), T[b"he"])
    table = table_of(len(DRAFT_PIECES), {D[b"\n"]: D[b"h"], D[b"h"]: D[b"e"], D[b"e"]: D[b"g"]}, D[b" "])
    tree = grow(make_drafter(table, cache=cache, policy=Wide(1, 1, 3)))
    children = {tree.tokens[node]: node for node in range(1, len(tree)) if tree.parents[node] == 0}
    assert set(children) == {T[b"h"], T[b"he"]}
    assert tree.sources[children[T[b"he"]]] == Source.MERGE
    assert tree.child(children[T[b"he"]], T[b"g"]) is not None
    direct = tree.child(children[T[b"h"]], T[b"e"])
    assert direct is not None
    assert tree.child(direct, T[b"g"]) is not None


def test_runners_up_are_siblings_in_the_order_of_their_chance():
    logits = torch.full((1, len(DRAFT_PIECES)), -20.0)
    for piece, value in {b"a": 3.0, b"g": 2.0, b"f": 1.0}.items():
        logits[0, D[piece]] = value
    tree = grow(make_drafter(ToyTable(logits), policy=Wide(3, 1, 1)))
    assert tree.tokens[1:] == (T[b"a"], T[b"g"], T[b"f"])
    assert tree.parents == (0, 0, 0, 0)


def test_several_branches_are_gone_on_from_in_one_step():
    policy = Wide(2, 2, 3)
    proposer, spy = spied(make_drafter(policy=policy))
    session = proposer.open(make_request(Sampling(0.0)))
    tree = session.propose(8, TreeLimits(30), NOISE)
    session.observe([T[b"a"]])
    assert policy.seen[0][2][1:] == [2, 2]
    assert max(tree.depths) >= 3
    assert len(spy.texts) == 5


def test_copied_text_is_proposed_from_where_it_stood_last():
    request = replace(make_request(Sampling(0.0)), prompt_ids=(3, 4, 5, 6, 7, 3, 4, 5))
    session = TreeProposer((PromptLookup(),), lambda mode: Wide(1, 1, 1)).open(request)
    tree = session.propose(8, TreeLimits(4), NOISE)
    assert tree.tokens == (5, 6, 7, 3, 4)
    assert set(tree.sources[1:]) == {Source.LOOKUP}
    session.observe([9, 8, 9])
    assert len(session.propose(11, TreeLimits(4), NOISE)) == 1
    session.observe([6, 7])
    assert session.propose(13, TreeLimits(2), NOISE).tokens == (7, 3, 4)


class Keeping(Wide):
    """As many nodes are kept as a test says."""

    num_kept = 0

    def prune(self, values, acceptances=None):
        return self.num_kept


def test_guesses_that_were_not_scored_are_judged_too():
    """Nothing is kept, and still the table learns that the drafter is always wrong."""
    policy = Keeping(1, 1, 1)
    proposer = make_drafter(table_of(len(DRAFT_PIECES), {}, D[b"f"]), policy=policy)
    for _ in range(20):
        session = proposer.open(make_request(Sampling(0.0)))
        assert len(session.propose(8, TreeLimits(5), NOISE)) == 1
        session.observe([T[b"a"]])
    policy.num_kept = 1
    assert grow(proposer).acceptance[1] < 0.3


def test_the_noise_pays_when_the_drafter_is_the_target():
    """Weights 0, a half and 1 are compared at every position; at T = 1 the whole noise wins, as theory says."""
    proposer = make_drafter(policy=Wide(1, 1, 3))
    drafter = proposer.sources[0]
    drafter = replace(drafter, noise_coupling=type(drafter.noise_coupling)((0.0, 0.5, 1.0)))
    rows = [[TABLE.logits_SV[state, T[piece]] if piece in T else -9.0 for piece in DRAFT_PIECES] for state in range(64)]
    drafter = replace(drafter, model=type(drafter.model)(ToyTable(torch.tensor(rows), order=0)))
    proposer.sources = (drafter,)
    flat = ToyTable(TABLE.logits_SV[:1], order=0)
    decoder = Decoder(ToyTarget(flat), TARGET_TOKENIZER.vocabulary)
    for seed in range(30):
        list(decoder.decode(make_request(Sampling(1.0), seed=seed, max_new_tokens=30), proposer))
    assert drafter.noise_coupling.best(1.0) == 1.0


def test_drafting_stops_for_the_tenant_whose_texts_it_loses_on_and_goes_on_for_the_other():
    """The same prompt and the same drafts; one tenant's target draws them, the other's never does."""
    pass_s, step_s = known_costs({1: 1.0, 6: 1.3}), known_costs({1: 0.1, 4: 0.12})
    proposer = make_drafter(table_of(len(DRAFT_PIECES), {}, D[b"g"]), policy=CostPolicy(pass_s, step_s))
    sizes: dict[str, list[int]] = {"agrees": [], "differs": []}
    for _ in range(60):
        for tenant, sized in sizes.items():
            session = proposer.open(make_request(Sampling(0.0), tenant=tenant))
            sized.append(len(session.propose(8, TreeLimits(5), NOISE)) - 1)
            session.observe([T[b"g"]] * (sized[-1] + 1) if tenant == "agrees" else [T[b"a"]])
    assert sum(sizes["differs"][-20:]) <= 5  # one trial
    assert min(sizes["agrees"][-20:]) >= 1


def test_what_fails_in_one_text_is_doubted_there_at_once_and_believed_in_the_next():
    """Fifty texts agree with every guess, one with none."""
    proposer = make_drafter(table_of(len(DRAFT_PIECES), {}, D[b"g"]), policy=Wide(1, 1, 1))
    for _ in range(50):
        session = proposer.open(make_request(Sampling(0.0)))
        for position in range(4):
            session.observe([T[b"g"]] * len(session.propose(8 + position, TreeLimits(1), NOISE)))
    doubted = []
    session = proposer.open(make_request(Sampling(0.0)))
    for position in range(10):
        doubted.append(session.propose(8 + position, TreeLimits(1), NOISE).acceptance[1])
        session.observe([T[b"a"]])
    assert doubted[0] > 0.9
    assert doubted[-1] < 0.4
    assert grow(proposer).acceptance[1] > 0.85


def test_two_proposers_that_agree_share_a_node_and_the_rest_are_siblings():
    table = table_of(len(DRAFT_PIECES), {D[b"\n"]: D[b"a"]}, D[b"g"])
    last = T[b"\n"]
    request = replace(make_request(Sampling(0.0)), prompt_ids=(3, last, T[b"a"], T[b"f"], 3, last))
    tree = make_drafter(table, policy=Wide(1, 1, 2), has_lookup=True).open(request).propose(6, TreeLimits(9), NOISE)
    first = tree.child(0, T[b"a"])
    assert tree.sources[first] == Source.LOOKUP
    assert {tree.tokens[node] for node in range(len(tree)) if tree.parents[node] == first} >= {T[b"f"], T[b"g"]}


@pytest.mark.parametrize(
    ("temperature", "limits"), [(0.0, TreeLimits(6, 2, 3)), (0.7, TreeLimits(5, 1)), (1.0, TreeLimits(20))], ids=str
)
def test_whatever_grows_the_text_is_the_targets_own(temperature, limits):
    proposer = make_drafter(policy=Wide(3, 2, 4), has_lookup=True)
    decoder = Decoder(ToyTarget(TABLE, limits=limits), TARGET_TOKENIZER.vocabulary)
    for seed in range(6):
        request = make_request(Sampling(temperature), seed=seed, num_draft_tokens=20, max_new_tokens=40)
        assert emitted(decoder.decode(request, proposer)) == slow_decode(TABLE, request)


def test_a_bad_drafter_is_left_alone_by_the_cost_policy_and_probed_now_and_then():
    policy = CostPolicy(known_costs({1: 0.18, 16: 0.3}), known_costs({1: 0.05}))
    proposer, spy = spied(make_drafter(table_of(len(DRAFT_PIECES), {}, D[b"q"]), policy=policy))
    list(toy_decoder().decode(make_request(Sampling(1.0), max_new_tokens=400), proposer))
    assert 3 < len(spy.texts) < 60
