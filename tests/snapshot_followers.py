"""A worker's snapshot updater with everything around it."""

import threading

from omnidraft.config import WorkerSettings
from omnidraft.decode.snapshot.drift_throttle import DriftThrottle
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.updater import SnapshotUpdater
from omnidraft.errors import BusError, ModelError, RegistryError
from omnidraft.ports import Announcement
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from tests.snapshot_folders import make_bundle


class Follower:
    """Tells what the test put in; an error is a log that is down."""

    def __init__(self):
        self.told = []

    def poll(self, timeout_s):
        told, self.told = self.told, []
        for each in told:
            if isinstance(each, BusError):
                raise each
        return told


class Fragile(DirectoryRegistry):
    """A registry that can be switched off."""

    is_down = False

    def resolve(self, name):
        if self.is_down:
            raise RegistryError("down")
        return super().resolve(name)


class Worker:
    """A refresher with everything around it; `loads` lists what the loader was asked for."""

    def __init__(self, folder, num_versions=4, signing_key=None):
        self.folder = folder
        self.registry = Fragile(folder / "registry", "org/small", "big", keep_resume=2, signing_key=signing_key)
        for version in range(1, num_versions + 1):
            self.registry.publish(make_bundle(folder / "bundles", f"s{version}"), version - 1 or None)
        self.slot = SnapshotSlot(LoadedSnapshot(None, "base", object(), None, None))
        self.follower, self.metrics = Follower(), CountingMetrics()
        self.caution = DriftThrottle(2)
        self.loads, self.unfit, self.now = [], set(), 0.0
        settings = WorkerSettings(poll_s=0.001)
        self.refresher = SnapshotUpdater(
            self.registry,
            self.slot,
            self.load,
            self.follower,
            self.caution,
            settings,
            self.metrics,
            target="big",
            staging=folder / "staging",
            clock=lambda: self.now,
        )

    def load(self, found, folder):
        self.loads.append(found.version)
        bundle.verify(folder, ["serving"])
        if found.version in self.unfit:
            raise ModelError("does not fit")
        return LoadedSnapshot(found.version, found.manifest.snapshot_id, object(), None, found.manifest)

    def step(self, *told):
        self.follower.told.extend(told)
        self.refresher.step(threading.Event())
        return self.slot.current.version


def champion(sequence, version):
    return Announcement(sequence, "champion", version)
