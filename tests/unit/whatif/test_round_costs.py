"""Costs of passes and steps are found in what whole rounds took."""

import numpy as np
import pytest

from omnidraft.whatif.round_costs import seconds_by_rows

KNOTS = (1, 4, 16)


def step_s(rows: int) -> float:
    return float(np.interp(rows, (1, 4, 16, 40), (0.005, 0.008, 0.02, 0.05)))


def rounds(noise: float, hiccup_s: float = 0.0) -> list[tuple[list[int], float]]:
    """Rounds of a step over the last tokens and some over one each, the first of a text with its prompt."""
    random = np.random.default_rng(1)
    found = []
    for number in range(400):
        rows = [40 if number % 20 == 0 else int(random.integers(1, 9)), *[1] * (number % 8), 0]
        spent = sum(map(step_s, filter(None, rows))) * random.gamma(1 / noise**2, noise**2)
        found.append((rows, spent + hiccup_s * (number % 50 == 7)))
    return found


@pytest.mark.parametrize(("noise", "hiccup_s", "tolerance"), [(0.01, 0.0, 0.01), (0.3, 0.0, 0.1), (0.1, 5.0, 0.12)])
def test_steps_of_rounds_are_told_apart(noise: float, hiccup_s: float, tolerance: float) -> None:
    """On average, however much their times differ, and whatever else a machine does for a moment."""
    found = seconds_by_rows(rounds(noise, hiccup_s), KNOTS)
    assert list(found) == [1, 4, 16, 40]
    for rows in (1, 4, 40):
        assert found[rows] == pytest.approx(step_s(rows), rel=tolerance)
