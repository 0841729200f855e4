"""Samples of the distribution pass at any shape, others do not; every error probability is stated."""

from collections import Counter

import numpy as np
import pytest

from omnidraft.exactness.distribution_test import Cell, total_variation, tv_limit

LAWS = {
    "one cell": np.array([1.0]),
    "nearly one cell": np.array([0.99, 0.01]),
    "two": np.array([0.5, 0.5]),
    "zipf": 1 / np.arange(1, 51) / (1 / np.arange(1, 51)).sum(),
    "flat": np.full(100, 0.01),
}


def cells(p_C: np.ndarray) -> dict[Cell, float]:
    return {(index,): float(p) for index, p in enumerate(p_C)}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("num_samples", [100, 1000])
def test_honest_samples_stay_below_the_limit(name: str, num_samples: int) -> None:
    """10,000 draws of multinomial counts; one is above the limit with probability below 1e-6 (seeds are fixed). And
    the limit is no empty promise: it is at most 3.5 times what the worst of them showed, plus 15 samples."""
    p_C = LAWS[name]
    counts_MC = np.random.default_rng(0).multinomial(num_samples, p_C, size=10_000)
    tv_M = np.abs(counts_MC / num_samples - p_C).sum(axis=1) / 2
    allowed = tv_limit(cells(p_C), num_samples)
    assert tv_M.max() <= allowed
    assert allowed <= 3.5 * tv_M.max() + 15 / num_samples


def test_the_distance_counts_cells_that_were_not_expected() -> None:
    p = {(1,): 0.5, (2,): 0.25}
    assert total_variation(p, Counter({(1,): 50, (2,): 25, (3,): 25}), 100) == pytest.approx(0.0)
    assert total_variation(p, Counter({(1,): 50, (3,): 50}), 100) == pytest.approx(0.25)
    assert total_variation(p, Counter({(3,): 100}), 100) == pytest.approx(0.75)


def test_a_distribution_off_by_a_quarter_is_detected_with_a_thousand_samples() -> None:
    """A Zipf distribution at total variation 0.25 fails in 100 of 100 experiments (each misses with p below 1e-3)."""
    p_C = LAWS["zipf"]
    other_C = p_C.copy()
    other_C[0] += 0.25
    other_C[1:] *= (1 - other_C[0]) / other_C[1:].sum()
    allowed = tv_limit(cells(p_C), 1000)
    for counts_C in np.random.default_rng(1).multinomial(1000, other_C, size=100):
        counts = Counter({(index,): int(count) for index, count in enumerate(counts_C)})
        assert total_variation(cells(p_C), counts, 1000) > allowed


def test_lower_odds_and_fewer_samples_allow_more() -> None:
    p = cells(LAWS["zipf"])
    assert tv_limit(p, 1000, 1e-9) > tv_limit(p, 1000, 1e-6) > tv_limit(p, 4000, 1e-6)
