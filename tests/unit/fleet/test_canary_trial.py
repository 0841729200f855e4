"""A canary is promoted when live requests show that it is not slower, as surely as is asked."""

import random
from dataclasses import replace

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.fleet.canary_trial import CanaryTrial
from omnidraft.fleet.request_stats import RequestStats
from tests.unit.fleet.served import requests

SURE = ControllerSettings(canary_share=0.1, confidence=0.95)
UNEVEN = ControllerSettings(canary_share=0.1, confidence=0.9, canary_requests=50)
"""For requests whose times per token have a relative standard deviation of 26 percent."""


def verdict(settings, canary_ms, *, seed=0, number=60):
    dice = random.Random(seed)
    trial = CanaryTrial(2, 1, settings, 0.0)
    for version, ms in ((1, 20.0), (2, canary_ms)):
        for request in requests(dice, 0.7, number, version=version, ms=ms):
            trial.update(request)
    return trial.verdict(1.0)


def serve_unevenly(trial, dice, number, *, slower=0.0):
    """So many requests by each snapshot."""
    for _ in range(number):
        for version, seconds in ((1, 0.8), (2, 0.8 * (1 + slower))):
            trial.update(RequestStats(0, "t", version, 40, seconds * dice.uniform(0.55, 1.45), 30, 20))


def test_an_equal_canary_passes_and_one_ten_percent_slower_does_not_nearly_every_time():
    """Requests' time per token has a relative standard deviation of 3 percent here, so each verdict is certain."""
    assert all(verdict(SURE, 20.0, seed=seed).promote for seed in range(40))
    assert not any(verdict(SURE, 22.0, seed=seed).promote for seed in range(40))


def test_what_a_first_comparison_leaves_open_the_requests_until_the_time_is_up_decide():
    trial, dice = CanaryTrial(2, 1, UNEVEN, 0.0), random.Random(5)
    serve_unevenly(trial, dice, 50)
    assert trial.verdict(1.0) is None
    serve_unevenly(trial, dice, 600)
    assert trial.verdict(2.0) is None  # it is not looked at again and again
    decision = trial.verdict(601.0)
    assert decision.promote
    assert "650 requests, champion" in decision.reason


def test_a_canary_that_is_only_uncertain_when_the_time_is_up_is_refused_and_not_taken_for_worse():
    """Of 40 equal ones with 50 requests each, 27 are refused, 11 of them since they measured slower by chance."""
    decisions = []
    for seed in range(40):
        trial = CanaryTrial(2, 1, UNEVEN, 0.0)
        serve_unevenly(trial, random.Random(seed), 50)
        decisions.append(trial.verdict(601.0))
    uncertain = [each for each in decisions if not each.promote and not each.is_setback]
    assert len(uncertain) > 10
    assert all("too few requests to be sure" in each.reason for each in uncertain)


@pytest.mark.parametrize(("slower", "least", "most"), [(0.0, 85, 100), (0.05, 0, 15), (0.1, 0, 5)])
def test_a_canary_at_the_tolerance_is_promoted_no_oftener_than_the_confidence_says_however_often_it_is_asked(
    slower, least, most
):
    """Of 100 with 500 requests each. An honest rule with 10 percent exceeds 15 in 4 of 100 tests (and the seeds are
    fixed); one that decides at any of the 450 calls promotes more than a third."""
    num_promoted = 0
    for seed in range(100):
        trial, dice, decision = CanaryTrial(2, 1, UNEVEN, 0.0), random.Random(seed), None
        for _ in range(500):
            serve_unevenly(trial, dice, 1, slower=slower)
            decision = decision or trial.verdict(1.0)
        num_promoted += (decision or trial.verdict(601.0)).promote
    assert least <= num_promoted <= most


def test_too_few_requests_give_no_verdict_until_time_is_up():
    trial = CanaryTrial(2, 1, ControllerSettings(canary_requests=50), 100.0)
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
    trial = CanaryTrial(2, 1, SURE, 0.0)
    assert trial.verdict(1.0) is None
    decision = trial.verdict(601.0)
    assert decision.promote
    assert "0 requests in time" in decision.reason


@pytest.mark.parametrize(
    ("share", "num_served", "promote"), [(0.1, 0, False), (0.1, 1, False), (0.01, 0, True)], ids=str
)
def test_a_canary_that_no_worker_serves_though_many_requests_were_due_to_it_is_refused(share, num_served, promote):
    """With 200 requests of the champion 22 are due to a share of 10 percent, and 2 to one of 1 percent."""
    trial = CanaryTrial(2, 1, ControllerSettings(canary_share=share), 0.0)
    for version, number in ((1, 200), (2, num_served)):
        for request in requests(random.Random(1), 0.7, number, version=version):
            trial.update(request)
    decision = trial.verdict(601.0)
    assert (decision.promote, decision.is_setback) == (promote, False)
    assert ("omnidraft_snapshot_load_failures_total" in decision.reason) is not promote


def test_requests_of_other_snapshots_count_for_nobody():
    trial = CanaryTrial(2, 1, ControllerSettings(canary_requests=2), 0.0)
    for request in requests(random.Random(1), 0.7, 10, version=3):
        trial.update(request)
    assert trial.verdict(1.0) is None


def test_requests_without_times_end_no_trial():
    """Anybody who may write traces can send them."""
    trial = CanaryTrial(2, 1, ControllerSettings(canary_requests=50), 0.0)
    for version in (1, 2):
        for request in requests(random.Random(1), 0.7, 60, version=version):
            trial.update(replace(request, seconds=0.0))
    assert trial.verdict(1.0) is None
