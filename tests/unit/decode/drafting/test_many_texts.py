"""One proposer drafts for many texts: as for each alone, in common steps, whatever becomes of the others."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.common_prefix import common_prefix
from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator
from omnidraft.decode.drafting.safe_drafting import (
    DraftingFailures,
    SafeSession,
    propose_all,
    require_harmless,
)
from omnidraft.decode.drafting.session_pool import DrafterMemory, SessionPool
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.chain import FixedPolicy, ThresholdPolicy
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import NO_OTHERS, DraftRequest, OtherTexts, Policy, Request, Sampling, TreeLimits
from omnidraft.testing.toy_models import ToyDrafter, ToyTable
from tests.unit.decode.toys import (
    DRAFT_PIECES,
    DRAFT_TOKENIZER,
    NOISE,
    TARGET_PIECES,
    TARGET_TOKENIZER,
    Strict,
    T,
    make_drafter,
    make_request,
)

TEXTS = ["abc he.\n", "he abc", "ch. e", "gh ab", "abc abc ab", "\u20ac he"]
LONG = "abc he.\n" * 560
"""Nearly 4,000 of the drafter's ids."""


class Counting(ToyDrafter):
    """Counts its steps and their rows; raises in those of a text that has this id."""

    def __init__(self, poison: int | None = None) -> None:
        super().__init__(ToyTable.random(len(DRAFT_PIECES), seed=3))
        self.advanced: list[list[int]] = []
        self.branched: list[list[int]] = []
        self._poison = poison

    def prefill_or_extend_all(self, requests):
        if any(self._poison in (*session.held[:keep], *ids) for session, keep, ids in requests):
            raise RuntimeError("this text is poison")
        self.advanced.append([len(ids) for *_, ids in requests])
        return super().prefill_or_extend_all(requests)

    def branch_all(self, requests):
        self.branched.append([len(ids) for _, ids, _ in requests])
        return super().branch_all(requests)


class Fixed(CostCurve):
    """A second for a thousand rows, however fast the toys are."""

    def __init__(self) -> None:
        super().__init__({1: 0.1, 1000: 1.0})

    def update(self, rows: int, seconds: float) -> None:
        pass


def proposer_over(
    model: ToyDrafter,
    policy: Policy | None = None,
    memory: DrafterMemory | None = None,
    *,
    has_lookup: bool = True,
    **fields: object,
) -> TreeProposer:
    proposer = make_drafter(policy=policy, has_lookup=has_lookup)
    *others, drafter = proposer.sources
    proposer.sources = (*others, replace(drafter, model=model, pool=SessionPool(memory), **fields))
    return proposer


def request_of(text: str, **fields: object) -> Request:
    request = make_request(Sampling(0.0), **fields)
    ids, drafter_ids = TARGET_TOKENIZER.encode(text), DRAFT_TOKENIZER.encode(text)
    return replace(request, prompt_ids=tuple(ids), drafter_prompt_ids=tuple(drafter_ids))


def draft(session, position: int = 9, limits: TreeLimits = TreeLimits(5)) -> DraftRequest:  # noqa: B008
    return DraftRequest(session, position, limits, NOISE)


def cost_policy(num_candidates: int = 4) -> CostPolicy:
    return CostPolicy(CostCurve({1: 1.0, 16: 1.2}), CostCurve({1: 0.03, 4: 0.035, 64: 0.1}), num_candidates)


@pytest.mark.parametrize("policy", [FixedPolicy(), ThresholdPolicy(0.05)], ids=["fixed", "threshold"])
@pytest.mark.parametrize("limits", [TreeLimits(5), TreeLimits(4, 1)], ids=["tree", "chain"])
def test_a_text_is_drafted_for_as_if_it_were_alone_in_any_order(policy, limits, monkeypatch):
    """Texts emit the same ids in each world; acceptance is measured in each world, so that it is not compared."""
    monkeypatch.setattr(AcceptanceCalibrator, "update", lambda *args, **options: None)
    worlds = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], *([at] for at in range(len(TEXTS)))):
        proposer = proposer_over(Counting(), policy)
        sessions = {at: proposer.open(request_of(TEXTS[at])) for at in order}
        drafted = {at: [] for at in order}
        for emitted in ([3, 4], [5], [6, 7, 8]):
            trees = proposer.propose_all([draft(session, limits=limits) for session in sessions.values()])
            for at, tree in zip(sessions, trees, strict=True):
                drafted[at].append(tree)
            for session in sessions.values():
                session.observe(emitted)
        worlds.append(drafted)
    together, shuffled, *alone = worlds
    assert together == shuffled
    assert all(together[at] == world[at] for world in alone for at in world)
    assert all(any(len(tree) > 1 for tree in trees) for trees in together.values())


@pytest.mark.parametrize("policy", [FixedPolicy(), cost_policy()], ids=["fixed", "cost"])
def test_one_step_serves_all_texts_with_four_rows_of_each_at_most(policy):
    model = Counting()
    proposer = proposer_over(model, policy, has_lookup=False)
    sessions = [proposer.open(request_of(text)) for text in TEXTS]
    proposer.propose_all([draft(session) for session in sessions])
    assert len(model.advanced) == 1
    assert len(model.advanced[0]) == len(TEXTS)
    assert 1 <= len(model.branched) <= 6
    assert max(map(len, model.branched)) > 1
    assert max(max(rows) for rows in model.branched) <= 4


def test_long_prompts_are_read_in_pieces_beside_other_texts_and_drafted_for_as_if_they_had_been_read_at_once():
    """The others wait for a thousand ids in a round, and are drafted for in each."""
    texts, worlds = (TEXTS[0], LONG, LONG), []
    for max_read_s in (None, 1.0):
        model = Counting()
        proposer = proposer_over(model, has_lookup=False, step_s=Fixed(), max_read_s=max_read_s)
        sessions, rounds, num_read = [proposer.open(request_of(text)) for text in texts], [], []
        for _ in range(10):
            model.advanced.clear()
            rounds.append(proposer.propose_all([draft(session, position=3000) for session in sessions]))
            for session in sessions:
                session.observe([3, 4])
            num_read.append(sum(map(sum, model.advanced)))
        assert all(len(tree) > 1 for tree, *_ in rounds)
        worlds.append((max(num_read), sum(num_read), rounds[-1]))
    at_once, in_pieces = worlds
    assert at_once[0] > 7000
    assert in_pieces[0] <= 1000 + len(texts) * 64
    assert abs(in_pieces[1] - at_once[1]) < 64
    assert in_pieces[2] == at_once[2]


def test_a_long_prompt_is_read_at_once_where_no_other_text_waits():
    model = Counting()
    proposer = proposer_over(model, has_lookup=False, step_s=Fixed(), max_read_s=1.0)
    tree = proposer.open(request_of(LONG)).propose(9, TreeLimits(5), NOISE)
    assert (len(model.advanced), len(tree)) == (1, 6)


def test_texts_of_two_modes_have_the_policy_of_each():
    proposer, asked = make_drafter(), []
    proposer.policy_for = lambda mode: asked.append(mode) or FixedPolicy()
    requests = [request_of(TEXTS[0], mode=mode) for mode in ("fast", "reproducible", "fast")]
    sessions = [SafeSession(proposer, each, len(TARGET_PIECES), Strict()) for each in requests]
    assert [len(tree) for tree in propose_all([draft(session) for session in sessions])] == [6, 6, 6]
    assert asked == ["fast", "reproducible"]


def test_the_policy_learns_once_a_round_from_the_texts_that_went_on():
    policy = FixedPolicy()
    policy.update = lambda outcomes, others=NO_OTHERS: seen.append((len(outcomes), others))
    seen, proposer = [], make_drafter(policy=policy)
    first, second, third = (proposer.open(request_of(text)) for text in TEXTS[:3])
    proposer.propose_all([draft(first), draft(second), draft(third)], others=OtherTexts(1, 2, 7))
    first.observe([3])
    second.observe([3])
    assert seen == []
    third.close()
    assert seen == [(2, OtherTexts(1, 2, 7))]


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from(["fixed", "cost"]))
def test_texts_that_begin_end_and_fail_in_any_order_have_harmless_trees(seed, has_limit, policy_name):
    """A text with a euro sign breaks every step that it takes part in: it is found, and the others go on."""
    rng, errors = random.Random(seed), []
    failures = DraftingFailures()
    failures.report = errors.append
    memory = DrafterMemory(60 if has_limit else 10**6)
    poison = DRAFT_TOKENIZER.encode("\u20ac")[0]
    policy = FixedPolicy() if policy_name == "fixed" else cost_policy()
    proposer = proposer_over(Counting(poison), policy, memory)
    texts, num_poisoned = [], 0
    for _ in range(25):
        if rng.random() < 0.5 and len(texts) < 6:
            text = rng.choice(TEXTS)
            num_poisoned += "\u20ac" in text
            request = request_of(text, tenant=rng.choice("ab"), max_new_tokens=rng.randint(1, 40))
            safe = SafeSession(proposer, request, len(TARGET_PIECES), failures)
            texts.append((safe, len(request.prompt_ids)))
        rng.shuffle(texts)
        taking_part = texts[: rng.randint(0, len(texts))]
        limits = TreeLimits(rng.randint(0, 6), rng.choice([None, 1, 2]), rng.choice([None, 3]))
        requests = [DraftRequest(text, position, limits, NOISE) for text, position in taking_part]
        trees = propose_all(requests, OtherTexts(rng.randint(0, 9)))
        for request, tree in zip(requests, trees, strict=True):
            require_harmless(tree, request.session.root, limits, len(TARGET_PIECES))
        for at, (text, position) in enumerate(taking_part):
            emitted = [rng.choice([T[b"a"], T[b"he"], T[b"."], T[b"ab"]]) for _ in range(rng.randint(1, 3))]
            text.observe(emitted)
            texts[at] = (text, position + len(emitted))
        for text, _ in [each for each in texts if rng.random() < 0.1]:
            rng.choice([text.close, text.pause])()
            texts = [each for each in texts if each[0] is not text]
    assert all(str(error) == "this text is poison" for error in errors)
    assert num_poisoned or not errors
    assert len([text for text, _ in texts if text.session is None]) <= num_poisoned


# ---------------------------------------------------------------- keys of ended texts


def ended_text(proposer: TreeProposer, text: str, **fields: object) -> None:
    session = proposer.open(request_of(text, **fields))
    session.propose(len(text), TreeLimits(3), NOISE)
    session.observe([T[b"a"]])
    session.close()


def num_read(model: Counting, proposer: TreeProposer, text: str, **fields: object) -> int:
    """The ids that the drafter reads of a new text."""
    session = proposer.open(request_of(text, **fields))
    session.propose(len(text), TreeLimits(3), NOISE)
    return model.advanced[-1][0]


def test_the_next_text_of_the_tenant_that_begins_alike_is_read_from_where_it_differs():
    model = Counting()
    proposer = proposer_over(model, has_lookup=False)
    ended_text(proposer, "abc he.\nabc he.", tenant="a")
    assert num_read(model, proposer, "abc he.\nabc he.gh", tenant="b") > 8
    assert num_read(model, proposer, "abc he.\nabc he.gh", tenant="a") == 2


def test_a_text_that_shares_little_with_an_ended_one_leaves_its_keys_to_others():
    model = Counting()
    proposer = proposer_over(model, has_lookup=False)
    ended_text(proposer, "abc he.\nabc he.")
    num_ids = len(DRAFT_TOKENIZER.encode("abc .gh"))
    assert num_read(model, proposer, "abc .gh") == num_ids
    assert num_read(model, proposer, "abc he.\nabc he.gh") == 2


def test_of_ended_texts_the_least_recently_used_gives_way_also_to_running_ones():
    model, memory = Counting(), DrafterMemory(30)
    proposer, other = (proposer_over(model, memory=memory, has_lookup=False) for _ in range(2))
    ended_text(proposer, "he he he he")
    ended_text(other, "gh gh gh gh")
    assert memory.num_ids == 22
    ended_text(proposer, ".\n.\n.\n.\n.\n.")
    assert memory.num_ids <= 30
    assert num_read(model, proposer, "he he he he.") == 12  # gone
    assert memory.num_ids <= 30


def test_without_memory_only_what_costs_none_is_drafted():
    proposer = proposer_over(Counting(), memory=DrafterMemory(3))
    repeated, other = (proposer.open(request_of(text)) for text in ("abc he.abc he.", "gh ab"))
    trees = proposer.propose_all([draft(repeated), draft(other)])
    assert [len(tree) > 1 for tree in trees] == [True, False]


@pytest.mark.parametrize("why", ["unspellable", "no room"])
def test_a_trial_is_not_left_to_a_text_that_cannot_be_drafted_for(why):
    policy = cost_policy()
    policy.streams.of("default", num_texts=2).gain, policy.streams.of(None, num_texts=2).idle_s = -0.1, 1e6
    proposer = proposer_over(Counting(), policy, DrafterMemory(20), has_lookup=False)
    blocked, other = [proposer.open(request_of(text)) for text in ("abc he." * 6, "gh ab")]
    blocked.sources[-1].context._is_unspellable = why == "unspellable"
    num_drafted = [0, 0]
    for position in range(50, 53):
        trees = proposer.propose_all([draft(each, position) for each in (blocked, other)])
        num_drafted = [num + len(tree) - 1 for num, tree in zip(num_drafted, trees, strict=True)]
        for session in (blocked, other):
            session.observe([T[b"a"]])
    assert num_drafted[0] == 0
    assert num_drafted[1] > 0


def test_keys_are_forgotten_after_a_failure_and_kept_over_a_pause():
    model = Counting()
    proposer = proposer_over(model, has_lookup=False)
    session = proposer.open(request_of("abc he.\n"))
    for interrupt, is_read_again in ((session.pause, False), (session.reset, True)):
        session.propose(8, TreeLimits(1), NOISE)
        session.observe([T[b"."]])
        interrupt()
        session.propose(9, TreeLimits(1), NOISE)
        assert (model.advanced[-1][0] > 3) == is_read_again


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_shared_ids_are_counted_from_the_beginning(left, right):
    slow = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
    assert common_prefix(left, right) == (min(len(left), len(right)) if slow is None else slow)
