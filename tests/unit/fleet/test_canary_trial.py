"""A canary is promoted when it is not slower than the champion, as surely as is asked."""

import random

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.fleet.canary_trial import CanaryTrial
from tests.unit.fleet.served import requests

SURE = ControllerSettings(canary_share=0.1, confidence=0.95, canary_tolerance=0.05)


def verdict(settings, canary_ms, *, seed=0, number=60, tenants=("t",)):
    dice = random.Random(seed)
    trial = CanaryTrial(2, 1, settings, 0.0, "fence")
    for version, ms in ((1, 20.0), (2, canary_ms)):
        for request in requests(dice, 0.7, number, version=version, ms=ms):
            trial.update(request)
    return trial.verdict(1.0)


@pytest.mark.parametrize(("canary_ms", "promote"), [(20.0, True), (19.0, True), (22.0, False), (40.0, False)])
def test_time_per_token_decides(canary_ms, promote):
    decision = verdict(SURE, canary_ms)
    assert decision.promote is promote
    assert "60 requests, champion" in decision.reason
    assert "agreement 0.697" in decision.reason


def test_an_equal_canary_passes_and_one_ten_percent_slower_does_not_nearly_every_time():
    """Requests' time per token has a relative standard deviation of 3 percent here, so each verdict is certain."""
    assert all(verdict(SURE, 20.0, seed=seed).promote for seed in range(40))
    assert not any(verdict(SURE, 22.0, seed=seed).promote for seed in range(40))


def test_too_few_requests_give_no_verdict_until_time_is_up():
    trial = CanaryTrial(2, 1, ControllerSettings(canary_requests=50, canary_timeout_s=600), 100.0, "fence")
    for request in requests(random.Random(1), 0.7, 49, version=2):
        trial.update(request)
    for request in requests(random.Random(1), 0.7, 80, version=1):
        trial.update(request)
    assert trial.verdict(699.0) is None
    assert trial.verdict(701.0).promote
    for request in requests(random.Random(1), 0.7, 1, version=2):
        trial.update(request)
    assert "50 requests, champion" in trial.verdict(200.0).reason


def test_without_traffic_nothing_speaks_against_it():
    trial = CanaryTrial(2, 1, SURE, 0.0, "fence")
    assert trial.verdict(1.0) is None
    assert "0 requests in time" in trial.verdict(601.0).reason


def test_requests_of_other_snapshots_count_for_nobody():
    trial = CanaryTrial(2, 1, ControllerSettings(canary_requests=2), 0.0, "fence")
    for request in requests(random.Random(1), 0.7, 10, version=3):
        trial.update(request)
    assert trial.verdict(1.0) is None
