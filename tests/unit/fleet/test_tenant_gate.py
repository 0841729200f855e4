"""No tenant's gain pays for another's loss: the gate's rules on measurements by tenant and on the pinned file."""

import random
from math import sqrt

import pytest

from omnidraft.config import ControllerSettings
from omnidraft.fleet.promotion import decide
from omnidraft.fleet.tenant_gate import equal_weight_change, fallen_tenants
from omnidraft.snapshots.manifest import Manifest, PinnedAgreement, TenantAgreement
from tests.snapshot_folders import manifest

SETTINGS = ControllerSettings()
BASE = manifest("base")


def tenant(name: str | None, change: float, error: float | None = 0.01, *, num: int = 12) -> TenantAgreement:
    return TenantAgreement(tenant=name, num_requests=num, before=0.6, after=0.6 + change, change_error=error)


def snapshot(number: int, *tenants: TenantAgreement, parent: str = "base", **fields: object) -> Manifest:
    """Pooled, its agreement rose: one tenant has most of the records."""
    told = {"agreement_before": 0.6, "agreement_after": 0.7, "agreement_change_error": 0.01, "held_out_records": 24}
    return manifest(f"s{number}", parent_id=parent, tenants=tenants, **(told | fields))


def test_a_gain_of_the_largest_tenant_does_not_pay_for_the_fall_of_a_small_one() -> None:
    challenger = snapshot(1, tenant("mallory", 0.3, num=200), tenant("acme", -0.05, num=5))
    decision = decide(challenger, BASE, SETTINGS)
    assert (decision.promote, decision.is_setback) == (False, True)
    assert "tenant 'acme' fell by 0.0500" in decision.reason
    assert "mallory" not in decision.reason


def test_each_tenant_weighs_alike() -> None:
    challenger = snapshot(
        1, tenant("mallory", 0.02, num=200), tenant("acme", -0.015, 0.05), tenant("bolt", -0.015, 0.05)
    )
    change = equal_weight_change(challenger)
    assert change is not None
    assert change.estimate == pytest.approx(-0.01 / 3)
    assert change.error == pytest.approx(sqrt(0.01**2 + 2 * 0.05**2) / 3)
    assert not decide(challenger, BASE, SETTINGS).promote
    assert decide(challenger, BASE, ControllerSettings(tolerance=0.02)).promote


def test_a_gain_however_large_pays_for_no_loss_that_is_too_small_to_show() -> None:
    """The flooder's constant token is learned at once. Neither fall is beyond its error."""
    falls = [tenant("acme", -0.03, 0.05), tenant("bolt", -0.02, 0.05)]
    decision = decide(snapshot(1, tenant("mallory", 0.9), *falls), BASE, SETTINGS)
    assert not decision.promote
    assert "without the tenant that gained most the mean fell by 0.0250" in decision.reason
    assert not decision.is_setback  # too little to go back for
    gained = [tenant("acme", -0.03, 0.05), tenant("bolt", 0.04, 0.05)]
    assert decide(snapshot(1, tenant("mallory", 0.9), *gained), BASE, SETTINGS).promote


def test_small_tenants_together_have_a_vote_when_they_are_enough() -> None:
    few, enough = (snapshot(1, tenant("acme", 0.02), tenant(None, -0.01, 0.2, num=num)) for num in (3, 4))
    assert decide(few, BASE, SETTINGS).promote
    assert not decide(enough, BASE, SETTINGS).promote
    assert not decide(snapshot(1, tenant(None, -0.05, 0.2, num=2)), BASE, SETTINGS).promote


def test_one_tenant_is_judged_as_ever() -> None:
    for change, promote in ((0.01, True), (0.0, True), (-0.001, False)):
        assert decide(snapshot(1, tenant("acme", change)), BASE, SETTINGS).promote is promote


@pytest.mark.parametrize("num_tenants", [1, 3, 12])
def test_where_nothing_fell_a_refusal_is_as_rare_as_the_confidence_says(num_tenants: int) -> None:
    """2,000 snapshots without any change, at 0.8 for all tenants together. The binomial share is within 4 standard
    deviations (0.036) of 0.2 with odds of 15,000 to one; Student's small samples and Holm's levels only lower it. Seeds
    are fixed."""
    dice = random.Random(num_tenants)

    def change(name: str) -> TenantAgreement:
        draws = [dice.gauss(0, 0.05) for _ in range(6)]
        mean = sum(draws) / 6
        error = sqrt(sum((draw - mean) ** 2 for draw in draws) / 5 / 6)
        return tenant(name, mean, error, num=6)

    refused = sum(
        bool(fallen_tenants([snapshot(1, *map(change, map(str, range(num_tenants))))], [], tolerance=0, confidence=0.8))
        for _ in range(2_000)
    )
    assert refused / 2_000 < 0.2 + 0.036
    assert refused / 2_000 > 0.1


def test_without_the_correction_many_tenants_would_be_refused_by_chance() -> None:
    """Twelve tenants, one of which fell by 1.2 errors: nothing unusual among twelve, and much for a single one."""
    others = [tenant(f"t{number}", 0.01) for number in range(11)]
    unlucky = tenant("acme", -0.012, num=100)
    assert not fallen_tenants([snapshot(1, unlucky, *others)], [], tolerance=0, confidence=0.8)
    assert fallen_tenants([snapshot(1, unlucky)], [], tolerance=0, confidence=0.8)


def test_few_requests_show_less_than_many() -> None:
    fell = {
        num: fallen_tenants([snapshot(1, tenant("acme", -0.0105, num=num))], [], tolerance=0, confidence=0.84)
        for num in (4, 400)
    }
    assert (bool(fell[4]), bool(fell[400])) == (False, True)


def test_a_tenant_without_an_error_is_not_tested_apart() -> None:
    assert fallen_tenants([snapshot(1, tenant(None, -0.4, None, num=1))], [], tolerance=0, confidence=0.8) == []


def test_many_falls_too_small_to_show_are_seen_together() -> None:
    """Half an error each: promoted at first, since the other tenants' gain is larger, and refused before long."""
    lineage, champion, parent = [BASE], BASE, "base"
    for number in range(1, 30):
        gaining = [tenant(name, 0.02) for name in ("mallory", "bolt")]
        made = snapshot(number, *gaining, tenant("acme", -0.01, 0.02, num=100), parent=parent)
        decision = decide(made, champion, SETTINGS, history=lineage[:16])
        if not decision.promote:
            break
        lineage.insert(0, made)
        champion, parent = made, made.snapshot_id
    assert "tenant 'acme' fell" in decision.reason
    assert 2 < number <= 17
    recovering = snapshot(
        99, tenant("mallory", 0.0), tenant("bolt", 0.0), tenant("acme", 0.01, 0.02, num=100), parent=parent
    )
    assert decide(recovering, champion, SETTINGS, history=lineage[:16]).promote


def pinned(before: float, after: float, sha256: str = "a") -> PinnedAgreement:
    return PinnedAgreement(sha256=sha256, num_records=8, before=before, after=after)


@pytest.mark.parametrize(
    ("of_champion", "of_challenger", "promote"),
    [
        (pinned(0.5, 0.6), pinned(0.6, 0.6), True),
        (pinned(0.5, 0.6), pinned(0.6, 0.59), False),
        (pinned(0.5, 0.6), pinned(0.5, 0.59), False),
        (None, pinned(0.6, 0.59), False),
        (None, pinned(0.6, 0.61), True),
        (pinned(0.5, 0.6), pinned(0.6, 0.59, "b"), True),
        (pinned(0.5, 0.6), None, True),
    ],
    ids=["equal", "fell", "fell below the champion, not its parent", "champion before the file", "rose", "another file",
         "no file any more"],
)  # fmt: skip
def test_what_agrees_less_with_the_pinned_file_is_refused(of_champion, of_challenger, promote: bool) -> None:
    champion = manifest("base", pinned=of_champion)
    challenger = snapshot(1, tenant("acme", 0.1), pinned=of_challenger)
    decision = decide(challenger, champion, SETTINGS)
    assert decision.promote is promote
    assert ("pinned file fell by" in decision.reason) is not promote
    assert decide(challenger, champion, ControllerSettings(tolerance=0.05)).promote


def test_manifests_that_tell_no_tenants_are_judged_by_all_records() -> None:
    assert decide(snapshot(1), BASE, SETTINGS).promote
    mixed = [snapshot(1, agreement_after=0.55), snapshot(2, tenant("acme", 0.06), parent="s1")]
    assert decide(mixed[1], BASE, SETTINGS, between=mixed[:1]).promote
    assert not decide(snapshot(2, tenant("acme", 0.04), parent="s1"), BASE, SETTINGS, between=mixed[:1]).promote
