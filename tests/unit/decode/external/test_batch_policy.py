"""Drafts that pay, for all sequences of a pass together."""

import pytest

from omnidraft.decode.external.batch_policy import CostBatchPolicy, ThresholdBatchPolicy


def paying(pass_s, step_s=lambda rows: 0.001) -> CostBatchPolicy:
    policy = CostBatchPolicy(pass_s, step_s)
    policy.start(2)
    return policy


def test_free_rows_are_all_taken():
    policy = paying(lambda rows: 1.0)
    assert policy.select_expansions([1.0, 1.0], 0) == 2
    assert policy.prune([0.9, 0.5, 0.1, 0.01]) == 4


def test_rows_that_cost_as_much_as_a_pass_are_not():
    policy = paying(lambda rows: float(rows))
    assert policy.prune([0.9, 0.5]) == 0


def test_of_two_texts_the_likelier_nodes_are_kept():
    """Rows cost a fifth of a pass for two: a node pays when it is likelier than what the time gives without it."""
    policy = paying(lambda rows: 1.0 + 0.2 * max(rows - 2, 0))
    assert policy.prune([0.9, 0.5, 0.3, 0.2]) == 2


def test_a_drafter_slower_than_the_target_does_not_draft():
    policy = paying(lambda rows: 1.0, lambda rows: 3.0)
    assert policy.select_expansions([1.0, 1.0], 0) == 0


def test_drafting_that_loses_is_given_up_and_tried_again_for_a_small_share_of_the_time():
    policy = paying(lambda rows: 1.0 + 0.2 * max(rows - 2, 0), lambda rows: 0.05)
    num_drafted = 0
    for _ in range(3000):
        policy.start(2)
        if policy.should_draft(2):
            policy.select_expansions([1.0, 1.0], 0)
            policy.update(2, policy.prune([0.6, 0.6]), [2])  # thought to be right, and never are
            num_drafted += 1
        else:
            policy.update(2, 0, [])
    assert 8 < num_drafted < 200


def test_drafting_that_gains_goes_on():
    policy = paying(lambda rows: 1.0 + 0.01 * rows, lambda rows: 0.01)
    for _ in range(200):
        policy.start(2)
        assert policy.should_draft(2)
        policy.select_expansions([1.0, 1.0], 0)
        policy.update(6, 6, [2, 2, 2])
    assert policy.speedup == pytest.approx(2.8, abs=0.2)


def test_a_prompt_is_read_when_the_answer_will_pay_for_it():
    policy = paying(lambda rows: 1.0, lambda rows: 0.01 * rows)
    assert policy.should_draft(100)
    assert not policy.should_draft(10_000)


def test_chains_end_where_they_are_unlikely():
    assert ThresholdBatchPolicy(0.2).select_expansions([0.9, 0.3, 0.1], 0) == 2
