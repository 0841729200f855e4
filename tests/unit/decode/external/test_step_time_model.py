"""The cost of a pass is learned from passes alone."""

import pytest

from omnidraft.decode.external.step_time_model import StepTimeModel


def test_every_size_of_interest_is_tried_and_then_no_more():
    costs, tried = StepTimeModel(), []
    while (length := costs.probe_length(1, 5)) is not None:
        tried.append(length)
        costs.update(1 + length, 1.0 + 0.1 * length)
    assert set(tried) == {5, 0, 2, 1}
    assert costs(1) == pytest.approx(1.0)
    assert costs(6) == pytest.approx(1.5)
    assert costs(4) == pytest.approx(1.3, abs=0.01)


def test_sizes_that_are_never_seen_are_given_up():
    costs = StepTimeModel()
    assert sum(costs.probe_length(64, 5) is not None for _ in range(1000)) < 50


def test_more_rows_never_cost_less():
    costs = StepTimeModel()
    for rows, seconds in ((1, 0.2), (2, 0.1), (4, 0.15), (8, 0.12), (40, 0.5)):
        costs.update(rows, seconds)
    predicted = [costs(rows) for rows in range(1, 80)]
    assert predicted == sorted(predicted)
    assert predicted[-1] > predicted[40]


def test_a_machine_that_slows_down_does_so_for_all_sizes():
    costs = StepTimeModel()
    for _ in range(3):
        costs.update(1, 0.1)
        costs.update(6, 0.12)
    for _ in range(60):
        costs.update(6, 0.24)
    assert costs(6) == pytest.approx(0.24, rel=0.05)
    assert costs(1) == pytest.approx(0.2, rel=0.5)


def test_one_pass_that_was_held_up_changes_little():
    costs = StepTimeModel()
    for _ in range(10):
        costs.update(1, 0.1)
    costs.update(1, 60.0)
    assert costs(1) < 0.12
