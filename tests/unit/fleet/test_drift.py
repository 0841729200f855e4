"""A fall of agreement is told from noise, and so is its end."""

import random
from dataclasses import replace

import pytest

from omnidraft.fleet.drift import RECENT, SETTLED_VALUES, AgreementStream, DriftDetector
from omnidraft.fleet.request_stats import RequestStats
from tests.unit.fleet.served import requests


def changes(watch, *parts, seed=0, **told):
    """(index of the request, change) for each change; a part is (agreement, number of requests, version)."""
    dice, found, index = random.Random(seed), [], 0
    for agreement, number, version in parts:
        for request in requests(dice, agreement, number, version=version, **told):
            change = watch.update(request)
            if change is not None:
                found.append((index, change))
            index += 1
    return found


def test_a_fall_and_its_recovery_are_told_once_each():
    watch = DriftDetector()
    (fell_at, fall), (back_at, back) = changes(watch, (0.75, 120, 1), (0.5, 100, 1), (0.74, 60, 1))
    assert (fall.kind, back.kind) == ("drift", "drift_over")
    assert 120 <= fell_at < 140
    assert 220 < back_at < 235
    assert fall.level == pytest.approx(0.75, abs=0.03)
    assert fall.suspect is None
    assert "fell: 0.7" in str(fall)
    assert "was back: 0.7" in str(back)


def test_stationary_traffic_raises_an_alarm_less_than_once_in_ten_thousand_requests():
    found = [changes(DriftDetector(), (0.72, 1000, 1), seed=seed) for seed in range(10)]
    assert sum(len(each) for each in found) <= 1


def test_a_rise_is_no_drift_and_the_fall_from_it_is():
    found = changes(DriftDetector(), (0.6, 200, 1), (0.8, 200, 1), (0.6, 60, 1))
    assert [change.kind for _, change in found[:1]] == ["drift"]
    assert 400 <= found[0][0] < 430
    assert found[0][1].level == pytest.approx(0.8, abs=0.03)


def test_what_stays_low_becomes_normal():
    found = changes(DriftDetector(), (0.75, 100, 1), (0.5, 400, 1))
    (fell_at, _), (over_at, over) = found
    assert over_at - fell_at == SETTLED_VALUES
    assert "stayed" in str(over)


def test_a_fall_after_a_snapshot_served_well_is_not_put_down_to_it():
    ((_, fall),) = changes(DriftDetector(), (0.75, 100, 1), (0.75, 15, 2), (0.5, 30, 2))
    assert fall.suspect is None


def test_a_fall_with_the_first_requests_of_a_snapshot_names_it():
    ((_, fall),) = changes(DriftDetector(), (0.75, 100, 1), (0.5, 30, 2))
    assert fall.suspect == 2
    ((_, later),) = changes(DriftDetector(), (0.75, 100, 1), (0.75, 100, 2), (0.5, 30, 2))
    assert later.suspect is None


def test_a_fall_of_all_snapshots_that_have_long_served_side_by_side_is_put_down_to_none():
    """As where a worker could not load the champion."""
    parts = [(agreement, 1, version) for agreement in [0.75] * 60 + [0.5] * 20 for version in (1, 2)]
    ((_, fall),) = changes(DriftDetector(), *parts)
    assert fall.suspect is None


@pytest.mark.parametrize(("beside", "suspect"), [(0.75, 2), (0.5, None)], ids=["it alone fell", "both fell"])
def test_a_fall_while_workers_swap_one_after_the_other_is_put_down_to_the_snapshot_that_fell_alone(beside, suspect):
    swapping = [(0.5, 1, 2), (beside, 1, 1)] * 20
    found = changes(DriftDetector(), (0.75, 100, 1), *swapping)
    assert found[0][1].suspect == suspect


def test_tenants_are_watched_apart():
    watch, dice = DriftDetector(), random.Random(3)
    falls = set()
    for agreement in (0.75, 0.5):
        both = zip(requests(dice, agreement, 60, tenant="a"), requests(dice, 0.75, 60, tenant="b"), strict=True)
        for pair in both:
            falls |= {change.tenant for request in pair if (change := watch.update(request))}
    assert falls == {"a"}
    assert watch.is_drifting("a")
    assert not watch.is_drifting("b")


def test_kinds_of_requests_are_watched_apart():
    """Free text falls while structured text, which agrees more often, becomes more: the mean hardly changes."""
    watch, dice, changed = DriftDetector(), random.Random(3), []
    for free, num_free, num_constrained in ((0.75, 60, 20), (0.5, 60, 60)):
        mixed = [replace(each, work="text") for each in requests(dice, free, num_free)]
        mixed += [replace(each, work="constrained") for each in requests(dice, 0.95, num_constrained)]
        dice.shuffle(mixed)
        changed += [change for request in mixed if (change := watch.update(request))]
    assert [(change.kind, change.work) for change in changed] == [("drift", "text")]
    assert changed[0].level == pytest.approx(0.75, abs=0.05)


def test_requests_without_a_draft_say_nothing():
    watch = DriftDetector()
    assert changes(watch, (0.75, 200, 1)) == []
    assert changes(watch, (0.0, 200, 1), passes=0) == []


def test_short_requests_count_together():
    watch = DriftDetector()
    assert changes(watch, (0.75, 1000, 1), passes=3) == []
    ((fell_at, fall),) = changes(watch, (0.5, 300, 1), passes=3)
    assert fell_at < 200
    assert fall.num_values < 130


def test_recovery_needs_full_recent_values_after_the_fall():
    stream = AgreementStream("t")
    good, bad = (RequestStats(0, "t", 1, 54, 1.0, 30, right) for right in (24, 12))
    for _ in range(60):
        stream.update(good)
    while not stream.is_drifting:
        stream.update(bad)
    told = [stream.update(good) for _ in range(RECENT)]
    assert told[:-1] == [None] * (RECENT - 1)
    assert told[-1].kind == "drift_over"
