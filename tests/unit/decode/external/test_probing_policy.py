"""Rounds that measure passes cost little more than the passes."""

import pytest

from omnidraft.decode.external.probing_policy import ProbingPolicy
from omnidraft.decode.external.step_time_model import StepTimeModel
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import RoundPlan, RoundText, TextOutcome

NUM_TEXTS = 8
TEXTS = [RoundText("default", 100)] * NUM_TEXTS
UNREAD, READ = 80, 2


@pytest.fixture
def passes() -> StepTimeModel:
    """Plain passes are known; eight prompts take the drafter three of them."""
    known = StepTimeModel()
    for _ in range(2):
        known.update(NUM_TEXTS, 0.2)
    return known


@pytest.fixture
def inner(passes: StepTimeModel) -> CostPolicy:
    """What the drafter gains is known to be little."""
    policy = CostPolicy(passes, CostCurve({1: 0.001, 64: 0.064}))
    policy.streams.of("default", num_texts=NUM_TEXTS).gain = -0.1
    return policy


def round_of(probing: ProbingPolicy, num_ids: list[int]) -> tuple[RoundPlan, int]:
    """Run a round over texts of which so many ids are unread; return its plan and what its first step extends."""
    plan = probing.start_round(TEXTS)
    drafted = [plan.should_draft(at, num) for at, num in enumerate(num_ids)]
    num_selected = plan.select_expansions([1.0] * sum(drafted), 0) if any(drafted) else 0
    num_nodes = [int(each) for each in drafted] if num_selected else [0] * NUM_TEXTS
    probing.update([TextOutcome("default", 1, num, [num]) for num in num_nodes])
    return plan, num_selected


def test_a_measurement_drafts_for_texts_that_are_read(passes: StepTimeModel, inner: CostPolicy) -> None:
    plan, num_selected = round_of(ProbingPolicy(inner, passes, lambda: 3), [READ] * NUM_TEXTS)
    assert num_selected == NUM_TEXTS
    assert plan.prune([0.5] * 24) == NUM_TEXTS


def test_a_measurement_reads_no_prompts_that_would_not_be_read_anyway(passes: StepTimeModel, inner: CostPolicy) -> None:
    probing = ProbingPolicy(inner, passes, lambda: 3)
    for _ in range(50):  # more rounds than a size has measurements
        plan, num_selected = round_of(probing, [READ] + [UNREAD] * (NUM_TEXTS - 1))
        assert num_selected <= 1  # the text that is read is tried now and then
    assert not plan.should_read(0, 300, 64)
    assert round_of(probing, [READ] * NUM_TEXTS)[1] == NUM_TEXTS
    inner.streams.of("default", num_texts=NUM_TEXTS).num_drafted = 1
    inner.streams.of("default", num_texts=NUM_TEXTS).gain = 2.0
    assert round_of(probing, [UNREAD] * NUM_TEXTS)[1] == NUM_TEXTS


def test_a_size_that_is_never_seen_is_given_up(passes: StepTimeModel, inner: CostPolicy) -> None:
    """Its passes also read prompts, so none is a sample."""
    probing = ProbingPolicy(inner, passes, lambda: 1)
    drafted = [round_of(probing, [READ] * NUM_TEXTS)[1] for _ in range(50)]
    assert drafted[:8] == [NUM_TEXTS] * 8
    assert sum(drafted) < 20 * NUM_TEXTS
