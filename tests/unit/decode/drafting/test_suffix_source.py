"""Drafts from memory: long chains, three memories, each tenant its own, and nothing that does not pay."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.suffix_source import FleetMemory, SuffixSession, SuffixSource, no_fleet_memory
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.memory.suffix_index import SuffixIndex
from omnidraft.ports import DraftTree, ProposerSession, Request, RoundText, Sampling, Source, TreeLimits
from omnidraft.testing.toy_models import ToyTarget
from tests.unit.decode.toys import (
    NOISE,
    TABLE,
    TARGET_TOKENIZER,
    Strict,
    emitted,
    hostile_memory,
    make_request,
    slow_decode,
)
from tests.unit.decode.toys import memory_proposer as make_proposer

SCOPE = ("default", None)


def request_for(prompt_ids: Sequence[int], **fields: object) -> Request:
    return replace(make_request(Sampling(0.0)), prompt_ids=tuple(prompt_ids), **fields)  # type: ignore[arg-type]


def propose(session: ProposerSession, num_nodes: int = 30) -> DraftTree:
    return session.propose(8, TreeLimits(num_nodes), NOISE)


def fleet_of(**texts: Sequence[Sequence[int]]) -> FleetMemory:
    indexes = {tenant: SuffixIndex.build(said) for tenant, said in texts.items()}
    return indexes.get


def test_a_long_match_is_drafted_as_far_as_there_are_rows() -> None:
    text = list(range(3, 20))
    session = make_proposer().open(request_for([*text, 2, *text[:5]]))
    tree = propose(session, 12)
    assert tree.tokens == tuple(text[4:])[:13]
    assert tree.is_chain
    assert set(tree.sources[1:]) == {Source.SUFFIX}


def test_the_text_goes_on_to_be_remembered_while_it_grows() -> None:
    session = make_proposer().open(request_for([3, 4]))
    assert len(propose(session)) == 1
    session.observe([5, 6, 3, 4])
    assert propose(session).tokens[:3] == (4, 5, 6)


def test_each_memory_drafts_what_it_knows() -> None:
    recent = RecentTexts(1000)
    recent.add(SCOPE, [5, 6, 11, 12])
    proposer = make_proposer(fleet_of(default=[[5, 6, 13, 14]]), recent=recent)
    tree = propose(proposer.open(request_for([5, 6, 9, 10, 5, 6])))
    assert {tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0} == {9, 11, 13}
    assert {9, 10, 11, 12, 13, 14} <= set(tree.tokens)


def test_a_running_text_drafts_nothing_more_from_a_fleets_memory_that_is_forgotten() -> None:
    said = {"default": SuffixIndex.build([[5, 6, 13, 14]])}
    session = make_proposer(said.get).open(request_for([5, 6]))
    assert 13 in propose(session).tokens
    said.clear()
    session.observe([9, 5, 6])
    assert 13 not in propose(session).tokens


def test_memories_that_agree_share_their_nodes_and_are_both_calibrated() -> None:
    proposer = make_proposer(fleet_of(default=[[5, 6, 9, 10]]))
    session = proposer.open(request_for([5, 6, 9, 10, 5, 6]))
    tree = propose(session)
    assert tree.tokens[1:3] == (9, 10)
    assert len(set(zip(tree.parents[1:], tree.tokens[1:], strict=True))) == len(tree) - 1
    for _ in range(50):
        session.observe([11])
        session = proposer.open(request_for([5, 6, 9, 10, 5, 6]))
        propose(session)
    only_fleet, only_text = (propose(proposer.open(request_for(ids))) for ids in ([3, 5, 6], [7, 8, 9, 10, 7, 8]))
    assert only_fleet.acceptance[1] < 0.15
    assert only_text.acceptance[1] < 0.15


INDENT, NEWLINE, NEW_INDENTS = 3, 5, (4, 6, 7)
LINES = [[8, 9, 10], [11, 12, 13], [14, 15, 16]]
CODE = [token for line in LINES for token in (INDENT, *line, NEWLINE)]


def first_path(tree: DraftTree) -> list[int]:
    """The ids of the path along the first child of each node."""
    node, ids = 0, []
    while node in tree.parents[1:]:
        node = tree.parents.index(node, 1)
        ids.append(tree.tokens[node])
    return ids


def test_a_text_that_is_repeated_with_a_change_is_drafted_behind_the_change() -> None:
    """Where the indentation changes, no end of the text that holds the change stood before."""
    first, second, third = NEW_INDENTS
    session = make_proposer().open(request_for([*CODE, first, *LINES[0], NEWLINE, second]))
    tree = propose(session, 8)
    assert first_path(tree)[:3] == LINES[1]
    assert set(tree.sources[1:]) == {Source.SUFFIX}
    session.observe([*LINES[1], NEWLINE, third])
    assert first_path(propose(session, 8))[:3] == LINES[2]


def test_nothing_is_drafted_behind_the_end_of_a_text() -> None:
    stop = 1
    session = make_proposer().open(request_for([5, 6, stop, 7, 8, 5, 6], stop_ids=frozenset({stop})))
    assert propose(session).tokens == (6, stop)


@pytest.mark.parametrize(
    ("temperature", "limits"), [(0.0, TreeLimits(20)), (0.7, TreeLimits(5, 1)), (1.0, TreeLimits(6, 2, 3))], ids=str
)
def test_a_hostile_memory_changes_no_text(temperature: float, limits: TreeLimits) -> None:
    recent = RecentTexts(10_000)
    proposer = make_proposer(hostile_memory, recent=recent)
    decoder = Decoder(ToyTarget(TABLE, limits=limits), TARGET_TOKENIZER.vocabulary, failures=Strict())
    for seed in range(6):
        request = make_request(Sampling(temperature), seed=seed, num_draft_tokens=20, max_new_tokens=60)
        text = emitted(decoder.decode(request, proposer))
        assert text == slow_decode(TABLE, request)
        recent.add(SCOPE, text)


def extended(session: SuffixSession, num_nodes: int) -> DraftTreeBuilder:
    tree = DraftTreeBuilder(0, TreeLimits(num_nodes), NOISE)
    session.extend(tree, FixedPolicy())
    return tree


def acceptance_of(proposer_calibrator: AcceptanceCalibrator, length: int) -> float:
    """What the first node of a match of this length is expected to be worth."""
    prompt = list(range(3, 3 + length))
    source = SuffixSource(25, fleet=no_fleet_memory)
    tree = extended(SuffixSession(source, request_for([*prompt, 2, 24, *prompt]), proposer_calibrator), 5)
    return tree.nodes[1].acceptance


def test_long_matches_are_trusted_more_before_anything_was_measured() -> None:
    assert acceptance_of(AcceptanceCalibrator(), 2) < 0.7 < acceptance_of(AcceptanceCalibrator(), 12)


def test_what_the_text_itself_said_is_trusted_more_than_other_texts_and_often_said_more_than_once_said() -> None:
    once, often = RecentTexts(1000), RecentTexts(1000)
    once.add(SCOPE, [5, 6, 9])
    for number in range(10):
        often.add(SCOPE, [10 + number, 5, 6, 9])
    texts = ((None, [5, 6, 9, 3, 5, 6]), (once, [3, 5, 6]), (often, [3, 5, 6]))
    own, others, of_many = (
        propose(make_proposer(recent=recent).open(request_for(ids))).acceptance[1] for recent, ids in texts
    )
    assert others < 0.45 < own < 0.7 < of_many


def test_what_one_length_of_match_achieved_says_nothing_of_another() -> None:
    proposer = make_proposer()
    before = acceptance_of(proposer.calibrators.of("default", "text"), 12)
    for _ in range(50):
        session = proposer.open(request_for([5, 6, 9, 10, 5, 6]))
        propose(session)
        session.observe([11])
    assert acceptance_of(proposer.calibrators.of("default", "text"), 2) < 0.1
    assert acceptance_of(proposer.calibrators.of("default", "text"), 12) == before


def test_a_stale_memory_switches_itself_off_by_what_it_costs_and_comes_back_when_it_is_right() -> None:
    policy = CostPolicy(CostCurve({1: 1.0, 32: 4.0}), CostCurve({1: 1e-9}))
    proposer = make_proposer(fleet_of(default=[[5, 6, 7, 8, 9, 10, 11, 12]]), policy=policy)

    def rows(answer: Sequence[int]) -> int:
        session = proposer.open(request_for([3, 5, 6, 7, 8]))
        tree = propose(session)
        session.observe(answer)
        return len(tree) - 1

    assert rows([9, 10, 13]) > 0
    assert [rows([14]) for _ in range(60)][-20:] == [0] * 20
    assert [rows([9]) for _ in range(60)][-1] > 0


@pytest.mark.parametrize(("pass_s", "is_searched"), [(1e-6, False), (10.0, True)])
def test_a_memory_that_is_never_right_is_searched_no_more_where_a_pass_takes_no_longer(
    pass_s: float, is_searched: bool
) -> None:
    policy = CostPolicy(CostCurve({1: pass_s, 32: 1.5 * pass_s}), CostCurve({1: pass_s}))
    proposer = make_proposer(fleet_of(default=[[5, 6, 7, 8, 9, 10, 11, 12]]), policy=policy)
    for _ in range(20):
        session = proposer.open(request_for([3, 5, 6, 7, 8]))
        propose(session)
        session.observe([14])
    assert policy.start_round([RoundText("default", 100)]).should_search(0) is is_searched


def test_texts_of_one_tenant_that_may_not_share_keys_share_no_memory() -> None:
    recent = RecentTexts(1000)
    recent.add(("default", "one address"), [5, 6, 9, 10])
    for cache_scope, is_drafted in (("one address", True), ("another", False)):
        session = make_proposer(recent=recent).open(request_for([3, 5, 6], cache_scope=cache_scope))
        assert (len(propose(session)) > 1) == is_drafted


def test_a_planted_secret_of_one_tenant_is_drafted_for_no_other_in_2000_requests() -> None:
    """Every tenant's texts begin alike and go on with ids that only this tenant has; memories of all kinds hold them,
    and every prompt ends where they go on."""
    draws, tenants = Random(3), [f"tenant {number}" for number in range(20)]
    shared, secret_of = [5, 6, 7, 8], {tenant: 100 + number for number, tenant in enumerate(tenants)}
    recent = RecentTexts(100_000)
    indexes = {tenant: SuffixIndex.build([[*shared, secret_of[tenant], 9]]) for tenant in tenants[:10]}
    source, calibrator, num_drafted = SuffixSource(200, recent, indexes.get), AcceptanceCalibrator(), 0
    for number in range(2000):
        tenant = draws.choice(tenants)
        request = request_for([draws.randrange(20), *shared[: draws.randrange(2, 5)]], tenant=tenant)
        tree = extended(SuffixSession(source, request, calibrator), 8)
        drafted = {node.token for node in tree.nodes[1:]}
        assert not drafted & (set(secret_of.values()) - {secret_of[tenant]}), number
        num_drafted += secret_of[tenant] in drafted
        recent.add((tenant, None), [*shared, secret_of[tenant], draws.randrange(20)])
    assert num_drafted > 1800
