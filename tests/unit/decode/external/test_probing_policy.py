"""Rounds that measure passes cost little more than the passes."""

from omnidraft.decode.external.probing_policy import ProbingPolicy
from omnidraft.decode.external.step_time_model import StepTimeModel
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.ports import RoundText


def test_a_measurement_reads_no_prompts_that_would_not_be_read_anyway():
    """Eight prompts take the drafter three plain passes, and what they would gain is known to be little."""
    passes = StepTimeModel()
    for _ in range(2):
        passes.update(8, 0.2)
    inner = CostPolicy(passes, lambda rows: 0.001 * rows)
    probing = ProbingPolicy(inner, passes, lambda: 3)
    texts = [RoundText("default", 100)] * 8
    inner.stats("default", num_texts=8).gain = -0.1
    plan = probing.start_round(texts)
    assert plan.prune([0.5] * 24) == 8  # one token for each: it measures
    assert [plan.should_draft(at, num_ids) for at, num_ids in enumerate([80, 2])] == [False, True]
    inner.stats("default", num_texts=8).gain = 2.0
    assert probing.start_round(texts).should_draft(0, 80)
