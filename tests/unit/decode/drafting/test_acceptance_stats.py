"""Estimated acceptance and the weight of the noise: priors at first, then the measured agreement."""

import numpy as np
import pytest

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, Calibrators, CandidateKind, NoiseCoupling
from omnidraft.ports import Source

KIND = CandidateKind(Source.DIRECT, 0)


def seen(
    table: AcceptanceCalibrator, share: float, num: int, *, q: float = 0.9, kind: CandidateKind = KIND, depth: int = 1
) -> None:
    rng = np.random.default_rng(0)
    for is_right in rng.random(num) < share:
        table.update(kind, q, depth, is_right=bool(is_right))


def test_depths_share_what_they_know_until_each_knows_better():
    table = AcceptanceCalibrator()
    seen(table, 0.3, 200, depth=1)
    assert table.estimate(KIND, 0.9, 6) == pytest.approx(0.33, abs=0.08)
    seen(table, 0.9, 200, depth=6)
    assert table.estimate(KIND, 0.9, 6) > 0.8
    assert table.estimate(KIND, 0.9, 1) < 0.4


def test_traffic_that_changes_is_followed():
    table = AcceptanceCalibrator()
    seen(table, 0.95, 5000)
    seen(table, 0.1, 1200)
    assert table.estimate(KIND, 0.9, 1) < 0.2


def test_no_guess_is_certain_or_hopeless():
    table = AcceptanceCalibrator()
    seen(table, 1.0, 3000, q=0.99)
    seen(table, 0.0, 3000, q=0.01)
    assert 0 < table.estimate(KIND, 0.01, 1) < table.estimate(KIND, 0.99, 1) < 1


def test_temperatures_are_kept_apart():
    weights = NoiseCoupling((0.0, 1.0))
    weights.update(1.0, [4, 5], 5)
    assert weights.best(0.3) == 0.0


def test_what_was_right_long_ago_fades():
    weights = NoiseCoupling((0.0, 1.0))
    for _ in range(1000):
        weights.update(1.0, [4, None], 4)
    for _ in range(200):
        weights.update(1.0, [4, 5], 5)
    assert weights.best(1.0) == 1.0


def test_what_fails_for_one_tenant_is_not_given_up_for_another() -> None:
    calibrators, kind = Calibrators(), CandidateKind(Source.SUFFIX, 0)
    for _ in range(100):
        calibrators.of("gains", "text").update(kind, 0.6, 1, is_right=True)
        calibrators.of("loses", "text").update(kind, 0.6, 1, is_right=False)
    assert calibrators.of("gains", "text").estimate(kind, 0.6, 1) > 0.9
    assert calibrators.of("loses", "text").estimate(kind, 0.6, 1) < 0.1


def test_a_new_tenant_begins_with_what_all_tenants_showed() -> None:
    calibrators, kind = Calibrators(), CandidateKind(Source.SUFFIX, 0)
    for _ in range(100):
        calibrators.of("old", "text").update(kind, 0.9, 1, is_right=False)
    assert calibrators.of("new", "text").estimate(kind, 0.9, 1) < 0.2
    assert calibrators.of("new", "tools").estimate(kind, 0.9, 1) == pytest.approx(0.9)
