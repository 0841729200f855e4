"""A challenger is promoted when held-out records show that it is not worse, as surely as is asked."""

import random

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.fleet.promotion import decide
from omnidraft.snapshots.manifest import TenantAgreement
from tests.snapshot_folders import manifest

BASE = manifest("base")
EXACT = ControllerSettings()
SURE = ControllerSettings(confidence=0.95)


def measured(snapshot_id, parent_id, before, after):
    told = {"agreement_before": before, "agreement_after": after, "held_out_records": 8}
    return manifest(snapshot_id, parent_id=parent_id, **told)


@pytest.mark.parametrize(
    ("after", "tolerance", "promote"), [(0.71, 0, True), (0.70, 0.01, True), (0.69, 0, False), (0.69, 0.01, True)]
)
def test_a_child_must_not_fall_by_more_than_the_tolerance(after, tolerance, promote):
    assert decide(measured("s1", "base", 0.70, after), BASE, ControllerSettings(tolerance=tolerance)).promote is promote


@pytest.mark.parametrize("error", [0.0, None])
def test_a_gain_of_nothing_promotes_nothing(error):
    """On a pair that learns nothing, one version after the other would become champion."""
    same = unsure("s1", "base", 0.70, 0.70, error)
    decision = decide(same, BASE, EXACT)
    assert (decision.promote, decision.is_setback) == (False, False)
    assert decision.reason.endswith("no difference")
    assert decide(unsure("s2", "s1", 0.70, 0.71, 0.01), BASE, EXACT, between=[same]).promote
    assert decide(unsure("s1", "base", 0.70, 0.70, 0.01), BASE, EXACT).promote  # some records fell, others gained
    assert decide(same, BASE, ControllerSettings(tolerance=0.01)).promote
    assert decide(same.model_copy(update={"forgets": ("order",)}), BASE, EXACT).promote


def test_a_challenger_that_was_not_measured_is_refused_and_says_why():
    decision = decide(manifest("s1", parent_id="base"), BASE, ControllerSettings(tolerance=0.5))
    assert not decision.promote
    assert "no held-out records" in decision.reason


def test_better_than_a_refused_parent_is_not_enough():
    refused = measured("s1", "base", 0.80, 0.70)
    assert not decide(measured("s2", "s1", 0.70, 0.75), BASE, EXACT, between=[refused]).promote
    assert decide(measured("s2", "s1", 0.70, 0.81), BASE, EXACT, between=[refused]).promote


def unsure(snapshot_id, parent_id, before, after, error):
    return measured(snapshot_id, parent_id, before, after).model_copy(update={"agreement_change_error": error})


@pytest.mark.parametrize(("error", "promote"), [(0.01, True), (0.0242, True), (0.0244, False), (None, False)])
def test_where_confidence_is_asked_for_the_gain_must_exceed_its_error(error, promote):
    """1.645 standard errors at 95 %."""
    decision = decide(unsure("s1", "base", 0.70, 0.74, error), BASE, ControllerSettings(confidence=0.95))
    assert decision.promote is promote
    assert decide(unsure("s1", "base", 0.70, 0.74, error), BASE, EXACT).promote
    assert ("too few" in decision.reason) == (error is None)
    assert error is None or f"+- {1.96 * error:.4f}" in decision.reason


def test_a_challenger_whose_foretold_speed_falls_is_refused_however_well_it_agrees():
    def foretold(snapshot_id, parent, before, after):
        told = {"speedup_before": before, "speedup_after": after}
        return measured(snapshot_id, parent, 0.70, 0.75).model_copy(update=told)

    assert decide(foretold("s1", "base", 1.80, 1.78), BASE, EXACT).promote
    slow = decide(foretold("s1", "base", 1.80, 1.70), BASE, EXACT)
    assert not slow.promote
    assert "foretold speed 0.944 of before" in slow.reason
    first = foretold("s1", "base", 1.80, 1.78)
    assert not decide(foretold("s2", "s1", 1.78, 1.76), BASE, EXACT, between=[first]).promote


def test_gains_of_several_snapshots_in_a_row_make_sure_together():
    careful = ControllerSettings(confidence=0.95)
    first, second = unsure("s1", "base", 0.70, 0.72, 0.015), unsure("s2", "s1", 0.72, 0.74, 0.015)
    assert not decide(first, BASE, careful).promote
    assert decide(second, BASE, careful, between=[first]).promote


def test_a_stranger_is_compared_with_the_champion_itself():
    champion = measured("s5", "s4", 0.79, 0.80)
    assert not decide(measured("x", None, 0.60, 0.70), champion, EXACT).promote
    assert decide(measured("x", None, 0.60, 0.81), champion, EXACT).promote
    incomparable = decide(measured("x", None, 0.60, 0.81), manifest("s5", train="full"), EXACT)
    assert (incomparable.promote, incomparable.is_setback) == (False, True)  # else none would be promoted ever after


def stranger(after, *, num_requests=24):
    """One that does not descend from the champion, whose agreement on 24 requests was 0.52."""
    return manifest("r9", parent_id="c5", agreement_before=0.5, agreement_after=after, held_out_records=num_requests)


CHAMPION = manifest("c8", parent_id="c7", agreement_before=0.5, agreement_after=0.52, held_out_records=24)


@pytest.mark.parametrize(
    ("after", "promote", "is_setback"), [(0.9, True, False), (0.6, False, False), (0.5, False, True)]
)
def test_where_confidence_is_asked_for_a_stranger_needs_a_gain_beyond_the_errors_of_both(after, promote, is_setback):
    """Of 24 requests each agreement has an error of .10 at most, the difference one of .14; 1.28 of them at 90 %."""
    decision = decide(stranger(after), CHAMPION, ControllerSettings(confidence=0.9))
    assert (decision.promote, decision.is_setback) == (promote, is_setback)
    assert "no ancestor, on other records (24 and 24 requests)" in decision.reason
    assert "too few" not in decision.reason
    assert ("promote it by hand" in decision.reason) is (not promote and not is_setback)


def test_a_strangers_error_is_by_requests_and_not_by_their_records():
    told = TenantAgreement(tenant=None, num_requests=4, before=0.5, after=0.8, change_error=0.01)
    few = stranger(0.8).model_copy(update={"tenants": (told,)})
    sure = ControllerSettings(confidence=0.9)
    assert decide(stranger(0.8), CHAMPION, sure).promote
    assert not decide(few, CHAMPION, sure).promote
    assert not decide(stranger(1.0, num_requests=1), CHAMPION, sure).promote


def test_a_stranger_no_better_than_the_champion_is_promoted_less_often_than_asked():
    """20 requests of 40 positions, whose agreements differ by .1 and lie around .6, for each side."""
    dice, promoted = random.Random(0), 0
    for _ in range(500):
        measured = []
        for _ in range(2):
            shares = [min(max(dice.gauss(0.6, 0.1), 0), 1) for _ in range(20)]
            measured.append(sum(sum(dice.random() < share for _ in range(40)) for share in shares) / 800)
        champion = CHAMPION.model_copy(update={"agreement_after": measured[0], "held_out_records": 20})
        promoted += decide(stranger(measured[1], num_requests=20), champion, ControllerSettings(confidence=0.9)).promote
    assert promoted <= 50


def test_what_was_learned_offline_is_judged_against_the_base_drafter_it_began_with():
    assert decide(measured("x", None, 0.60, 0.81), BASE, EXACT).promote
    assert not decide(measured("x", None, 0.60, 0.59), BASE, EXACT).promote
    assert not decide(measured("x", None, 0.60, 0.81), manifest("base", drafter_hash="other"), EXACT).promote
