"""Who can write to the registry cannot change what a decision rests on."""

import pytest

from omnidraft import assembly
from omnidraft.fleet.controller import Controller
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from tests.signed_fleet import Keys, settings_of
from tests.snapshot_folders import make_bundle, version_folder

MEASURED = {"held_out_records": 8, "agreement_change_error": 0.001}


class Fleet:
    """A distiller that publishes, and the controller."""

    def __init__(self, keys, folder):
        self.folder = folder
        self.registry = assembly.registry(settings_of(keys, folder, "distiller"))
        self.controller: Controller = assembly.controller(settings_of(keys, folder, "controller"), CountingMetrics())

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


def test_a_better_snapshot_is_still_promoted_over_honest_ancestors(fleet):
    assert fleet.publish("s3", 2, 0.8, 0.79) == 2
    assert fleet.publish("s4", 3, 0.79, 0.85) == 4
