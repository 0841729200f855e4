"""Memory beside a drafter, by simulated costs: it takes nothing from text that does not repeat, the drafter's gain is
what it adds to memory, and a long prompt is read from as near its end as pays."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.suffix_source import SuffixSource
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.ports import NO_OTHERS, OtherTexts, Request, Sampling, TextOutcome, TreeLimits
from omnidraft.testing.toy_models import ToyTable, ToyTarget
from omnidraft.traces.record import DRAFTER_SOURCES
from tests.unit.decode.checks import spied
from tests.unit.decode.drafting.test_golden_drafts import drafter_table, target_table
from tests.unit.decode.toys import (
    DRAFT_PIECES,
    DRAFT_TOKENIZER,
    NOISE,
    TARGET_PIECES,
    TARGET_TOKENIZER,
    D,
    Strict,
    T,
    emitted,
    known_costs,
    make_drafter,
    make_request,
    slow_decode,
    table_of,
)

AVX2 = {1: 0.055, 2: 0.057, 4: 0.066, 6: 0.082, 8: 0.100, 16: 0.170, 32: 0.300}
STEP = {1: 0.005, 2: 0.0055, 4: 0.007, 64: 0.074}
SCOPE = ("default", None)


class TimedPolicy(CostPolicy):
    """Adds up what the rounds cost by its own curves, reading included."""

    def __init__(self) -> None:
        super().__init__(known_costs(AVX2), known_costs(STEP))
        self.seconds, self.outcomes = 0.0, list[TextOutcome]()

    def update(self, outcomes: Sequence[TextOutcome], others: OtherTexts = NO_OTHERS) -> None:
        super().update(outcomes, others)
        for each in outcomes:
            self.outcomes.append(each)
            self.seconds += self.pass_s(1 + each.num_nodes) + sum(map(self.step_s, filter(None, each.step_rows)))


def beside(drafter: TreeProposer, policy: CostPolicy, recent: RecentTexts | None = None) -> TreeProposer:
    """The same drafter beside a suffix memory."""
    memory = SuffixSource(len(TARGET_PIECES), recent or RecentTexts(0))
    return TreeProposer((memory, *drafter.sources), lambda mode: policy)


def fresh_text(seed: int) -> Request:
    """A text of 26 letters' noise: every pair of ids was seen before, and says next to nothing of what follows."""
    request = make_request(Sampling(1.0), seed=seed, num_draft_tokens=15, num_memory_tokens=31, max_new_tokens=150)
    letters = TARGET_TOKENIZER.encode("abc he.\n" + "hgfedcba"[seed % 8 :])
    spelled = DRAFT_TOKENIZER.encode("abc he.\n" + "hgfedcba"[seed % 8 :])
    return replace(request, prompt_ids=tuple(letters), drafter_prompt_ids=tuple(spelled))


def tokens_per_s(policy: TimedPolicy, proposer: TreeProposer, recent: RecentTexts | None = None) -> float:
    decoder = Decoder(ToyTarget(target_table()), TARGET_TOKENIZER.vocabulary, failures=Strict())
    num_tokens = 0
    for seed in range(8):
        text = emitted(decoder.decode(fresh_text(seed), proposer))
        num_tokens += len(text)
        if recent is not None:
            recent.add(SCOPE, text)
    return num_tokens / policy.seconds


def test_memory_takes_nothing_from_text_that_does_not_repeat() -> None:
    alone, both, recent = TimedPolicy(), TimedPolicy(), RecentTexts(100_000)
    speed_alone = tokens_per_s(alone, make_drafter(drafter_table(), policy=alone))
    speed_both = tokens_per_s(both, beside(make_drafter(drafter_table()), both, recent), recent)
    assert speed_both > 0.98 * speed_alone


def test_unlikely_nodes_of_a_memory_make_no_step_of_the_drafter_dearer() -> None:
    """The next node costs what a row beside those that will be scored costs, not beside all that were drafted."""
    asked: list[int] = []

    class Asked(CostPolicy):
        def start_round(self, texts, others=NO_OTHERS):  # type: ignore[no-untyped-def]
            plan = super().start_round(texts, others)
            select = plan.select_expansions
            plan.select_expansions = lambda values, num: asked.append(num) or select(values, num)  # type: ignore
            return plan

    policy = Asked(CostCurve({1: 1.0, 2: 1.01, 3: 2.0, 32: 31.0}), CostCurve({1: 0.01}))
    recent = RecentTexts(10_000)
    for token in range(3, 20):
        recent.add(SCOPE, [T[b"e"], T[b"\n"], token, *range(3, 20)])
    request = replace(make_request(Sampling(0.0), num_draft_tokens=31), prompt_ids=(T[b"e"], T[b"\n"]))
    beside(make_drafter(), policy, recent).open(request).propose(8, TreeLimits(31), NOISE)
    assert asked
    assert max(asked) <= 1


def test_a_drafter_that_only_says_what_memory_knows_gains_nothing() -> None:
    """Memory repeats the text alone; the drafter is right as well, and its steps are lost time."""
    policy, phrase = TimedPolicy(), [T[b"a"], T[b"g"], T[b"f"], T[b"h"], T[b" "]]
    cycle = {b"a": b"g", b"g": b"f", b"f": b"h", b"h": b" ", b" ": b"a"}
    drafter = make_drafter(table_of(len(DRAFT_PIECES), {D[one]: D[two] for one, two in cycle.items()}, D[b"a"]))
    proposer = beside(drafter, policy)
    target = ToyTarget(table_of(len(TARGET_PIECES), {T[one]: T[two] for one, two in cycle.items()}, T[b"a"]))
    decoder = Decoder(target, TARGET_TOKENIZER.vocabulary, failures=Strict())
    for _ in range(6):
        request = make_request(Sampling(0.0), num_draft_tokens=15, num_memory_tokens=31, max_new_tokens=200)
        text = emitted(decoder.decode(replace(request, prompt_ids=(*request.prompt_ids, *phrase * 9)), proposer))
        assert set(text) == set(phrase)
    assert policy.streams.of("default").gain <= 0.2
    with_drafter = [any(each.step_rows) for each in policy.outcomes]
    assert sum(with_drafter[-10:]) <= 5


def long_prompt(num_ids: int) -> Request:
    text = "abcd ef gh. " * (num_ids // 9)
    request = make_request(Sampling(0.0), num_draft_tokens=5, max_new_tokens=40)
    prompt, drafter_prompt = TARGET_TOKENIZER.encode(text), DRAFT_TOKENIZER.encode(text)
    return replace(request, prompt_ids=tuple(prompt), drafter_prompt_ids=tuple(drafter_prompt))


def test_of_a_prompt_too_long_to_be_worth_reading_the_drafter_reads_the_end_at_once() -> None:
    policy, request = TimedPolicy(), long_prompt(1500)
    proposer, spy = spied(make_drafter(ToyTable.random(len(DRAFT_PIECES), seed=3), policy=policy))
    tree = proposer.open(request).propose(len(request.prompt_ids), TreeLimits(5), NOISE)
    assert len(tree) > 1
    text = spy.texts[0]
    assert 40 <= len(text) <= 64 + 8
    assert tuple(text) == request.drafter_prompt_ids[-len(text) :]


def test_a_prompt_that_is_cheap_to_read_and_one_under_another_policy_are_read_as_a_whole() -> None:
    for policy, request in ((TimedPolicy(), long_prompt(100)), (FixedPolicy(), long_prompt(1500))):
        proposer, spy = spied(make_drafter(ToyTable.random(len(DRAFT_PIECES), seed=3), policy=policy))
        proposer.open(request).propose(len(request.prompt_ids), TreeLimits(5), NOISE)
        assert tuple(spy.texts[0]) == request.drafter_prompt_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_late_beginning_changes_no_text(temperature: float) -> None:
    request, policy = long_prompt(1500), TimedPolicy()
    request = replace(request, sampling=Sampling(temperature))
    decoder = Decoder(ToyTarget(target_table()), TARGET_TOKENIZER.vocabulary, failures=Strict())
    steps = list(decoder.decode(request, beside(make_drafter(drafter_table()), policy)))
    assert emitted(steps) == slow_decode(target_table(), request)
    assert any(source in DRAFTER_SOURCES for step in steps for source in step.tree.sources)
