"""The page's operator reads the fleet and orders about it as the command line does, over a real log and registry."""

from pathlib import Path

import pytest

from omnidraft import config
from omnidraft.errors import RequestError
from omnidraft.hosts.fleet_access import SettingsFleet
from omnidraft.serving.page.fleet_stream import FleetOrder
from omnidraft.snapshots import keys
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.wiring.controller import control_follower
from tests.page_fleet import fleet_settings, following, publish_two


@pytest.fixture
def settings(tmp_path: Path) -> config.Settings:
    return fleet_settings(tmp_path)


@pytest.fixture
def fleet(settings: config.Settings, tmp_path: Path) -> SettingsFleet:
    """Version 1 is champion, version 2 challenger."""
    publish_two(settings, tmp_path)
    return SettingsFleet(settings)


def order(kind: str, **fields: object) -> FleetOrder:
    return FleetOrder.model_validate({"kind": kind, "target": "some-target", **fields})


def aliases(fleet: SettingsFleet) -> dict[int, tuple[str, ...]]:
    (target,) = fleet.read()["targets"]
    return {each["version"]: tuple(each["aliases"]) for each in target["history"]}


def test_every_version_is_told_with_what_it_learned(fleet: SettingsFleet) -> None:
    (target,) = fleet.read()["targets"]
    newest = target["history"][-1]
    assert (newest["version"], newest["agreement_before"], newest["agreement_after"]) == (2, 0.5, 0.625)
    assert newest["losses"] == {"forward_kl": 1.25}
    assert fleet.read()["registry"] is None


def test_promoting_and_rolling_back_move_the_champion(fleet: SettingsFleet) -> None:
    fleet.obey(order("promote", version=2))
    assert aliases(fleet) == {1: ("previous",), 2: ("champion",)}
    fleet.obey(order("rollback"))
    assert "champion" in aliases(fleet)[1]


def test_an_operator_without_a_drafter_sees_and_orders_the_pair_that_is_followed(
    fleet: SettingsFleet, settings: config.Settings
) -> None:
    without = following(settings)
    assert SettingsFleet(without).read()["targets"] == fleet.read()["targets"]
    SettingsFleet(without).obey(order("promote", version=2))
    (champion,) = control_follower(without, CountingMetrics(), ("champion",)).poll(0)
    assert (champion.version, champion.drafter) == (2, settings.models.drafter)


def test_learning_is_paused_and_resumed(fleet: SettingsFleet) -> None:
    for kind, is_paused in (("pause", True), ("resume", False)):
        fleet.obey(order(kind))
        (target,) = fleet.read()["targets"]
        assert target["is_learning_paused"] is is_paused


def test_an_order_about_what_is_not_here_is_refused(fleet: SettingsFleet) -> None:
    with pytest.raises(RequestError, match="'other' is none of 'some-target'"):
        fleet.obey(order("pause", target="other"))
    with pytest.raises(RequestError, match="9"):
        fleet.obey(order("promote", version=9))
    assert aliases(fleet)[1] == ("champion",)


def test_a_worker_that_cannot_sign_gives_no_orders(fleet: SettingsFleet, settings: config.Settings) -> None:
    public = keys.PrivateKey(keys.new_private_key()).public_text("operator")
    signed = settings.registry.model_copy(update={"trusted_keys": (public,)})
    guarded = SettingsFleet(settings.model_copy(update={"registry": signed}))
    with pytest.raises(RequestError, match=r"set registry\.private_key"):
        guarded.obey(order("promote", version=2))
    assert aliases(fleet)[1] == ("champion",)
