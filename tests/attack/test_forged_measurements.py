"""Who can write to the registry cannot change what a decision rests on, and a lost log does not keep an operator from
going back."""

import pytest

from omnidraft import assembly
from omnidraft.bus.sqlite_log import SqliteReader
from omnidraft.errors import BusError
from omnidraft.fleet.controller import Controller
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from tests.signed_fleet import Keys, Worker, settings_of
from tests.snapshot_folders import make_bundle, version_folder

MEASURED = {"held_out_records": 8, "agreement_change_error": 0.001}


class Fleet:
    """A distiller that publishes, and the controller."""

    def __init__(self, keys, folder):
        self.keys, self.folder = keys, folder
        self.registry = assembly.registry(settings_of(keys, folder, "distiller"))
        self.metrics = CountingMetrics()
        self.controller: Controller = assembly.controller(settings_of(keys, folder, "controller"), self.metrics)

    def publish(self, snapshot_id, parent, before, after):
        parent_id = parent and self.registry.resolve(str(parent)).manifest.snapshot_id
        measured = {"agreement_before": before, "agreement_after": after, "parent_id": parent_id, **MEASURED}
        self.registry.publish(make_bundle(self.folder / "bundles", snapshot_id, **measured), parent)
        self.controller.step()
        return self.registry.resolve("champion").version

    def forge(self, version, **fields):
        folder = version_folder(self.folder / "registry", version) / "snapshot"
        bundle.write_manifest(folder, bundle.read_manifest(folder).model_copy(update=fields))


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(Keys(), tmp_path)
    assert made.publish("s1", None, 0.6, 0.7) == 1
    assert made.publish("s2", 1, 0.7, 0.8) == 2
    return made


def test_a_worse_snapshot_gets_no_better_by_a_forged_ancestor(fleet):
    assert fleet.publish("s3", 2, 0.8, 0.6) == 2
    fleet.forge(3, agreement_after=0.99)
    assert fleet.publish("s4", 3, 0.6, 0.61) == 2


def test_nothing_is_compared_with_a_forged_champion(fleet):
    fleet.forge(2, agreement_after=0.1)
    assert fleet.publish("s3", 2, 0.1, 0.2) == 2
    assert fleet.metrics.value("omnidraft_champions_refused_total", target="big") == 1


def test_a_better_snapshot_is_still_promoted_over_honest_ancestors(fleet):
    assert fleet.publish("s3", 2, 0.8, 0.79) == 2
    assert fleet.publish("s4", 3, 0.79, 0.85) == 4


def test_an_operator_goes_back_while_the_log_is_away(fleet, tmp_path, monkeypatch):
    worker = Worker(settings_of(fleet.keys, tmp_path), tmp_path / "staging")
    assert worker.step() == 2

    def is_away(self, *args, **options):
        raise BusError("the log is away")

    monkeypatch.setattr(SqliteReader, "__init__", is_away)
    assembly.registry(settings_of(fleet.keys, tmp_path, "operator")).promote(1)
    assert worker.step() == 1
