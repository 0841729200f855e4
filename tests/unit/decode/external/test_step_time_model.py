"""The cost of a pass is learned from passes alone."""

from collections.abc import Callable

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


def probed(costs: StepTimeModel, num_seqs: int, pass_s: Callable[[int], float]) -> list[int]:
    """Return the lengths that are probed, where passes of so many rows take `pass_s` seconds."""
    lengths = []
    while (length := costs.probe_length(num_seqs, 7)) is not None:
        lengths.append(length)
        costs.update(num_seqs * (1 + length), pass_s(num_seqs * (1 + length)))
    return lengths


def test_a_size_by_which_even_a_good_drafter_loses_is_not_tried():
    def pass_s(rows: int) -> float:
        return 0.14 + 0.01 * max(rows - 8, 0)  # memory is the limit up to eight rows, arithmetic beyond

    costs = StepTimeModel()
    assert set(probed(costs, 16, pass_s)) == {
        0,
        1,
    }  # 64 rows take 0.7 s, in which plain passes give 3.2 tokens for each text
    assert set(probed(costs, 1, pass_s)) == {0, 1, 3, 7}


def test_sizes_between_near_ones_are_not_tried():
    costs = StepTimeModel()
    assert set(probed(costs, 4, lambda rows: 0.1)) == {0, 1, 3, 7}
    assert probed(costs, 3, lambda rows: 0.1) == [0, 0]  # 6, 12 and 24 rows lie between 4, 8, 16 and 32
    assert not probed(costs, 3, lambda rows: 0.1)


def test_a_slow_first_pass_of_a_size_ends_no_measurement():
    costs, seen = StepTimeModel(), set()

    def pass_s(rows: int) -> float:
        """Each size has something to warm up."""
        is_first = rows not in seen
        seen.add(rows)
        return 0.5 if is_first else 0.1

    assert probed(costs, 4, pass_s) == [0, 0, 1, 1, 3, 3, 7, 7]
    assert costs(32) == pytest.approx(0.1)


def test_one_token_is_measured_however_many_sequences_there_are():
    costs = StepTimeModel()
    assert 1 in probed(costs, 256, lambda rows: 0.1)


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
