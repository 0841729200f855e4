"""A worker's snapshot updater with everything around it."""

import threading

from omnidraft.config import WorkerSettings
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.updater import DriftThrottle, SnapshotUpdater
from omnidraft.errors import BusError, ModelError, RegistryError
from omnidraft.ports import Announcement
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.snapshots.signing import UNSIGNED
from omnidraft.telemetry.metrics import CountingMetrics
from tests.snapshot_folders import make_bundle


class Follower:
    """Tells what the test put in; an error is a log that is down."""

    def __init__(self):
        self.announcements = []

    def poll(self, timeout_s):
        announcements, self.announcements = self.announcements, []
        for each in announcements:
            if isinstance(each, BusError):
                raise each
        return announcements


class Fragile(DirectoryRegistry):
    """A registry that can be switched off."""

    is_down = False

    def resolve(self, name):
        if self.is_down:
            raise RegistryError("down")
        return super().resolve(name)


class Worker:
    """An updater with everything around it; `loads` lists the versions that were loaded."""

    def __init__(self, folder, num_versions=4, signing=UNSIGNED):
        self.folder = folder
        self.registry = Fragile(folder / "registry", "org/small", "big", keep_resume=2, signing=signing)
        for version in range(1, num_versions + 1):
            self.registry.publish(make_bundle(folder / "bundles", f"s{version}"), version - 1 or None)
        self.slot = SnapshotSlot(LoadedSnapshot(None, "base", object(), None, None))
        self.follower, self.metrics = Follower(), CountingMetrics()
        self.drift_throttle = DriftThrottle(2)
        self.loads, self.unfit, self.now = [], set(), 0.0
        settings = WorkerSettings(poll_s=0.001)
        self.refresher = SnapshotUpdater(
            self.registry,
            self.slot,
            self.load,
            self.follower,
            self.drift_throttle,
            settings,
            self.metrics,
            target="big",
            staging=folder / "staging",
            clock=lambda: self.now,
        )

    def load(self, snapshot_version, folder):
        self.loads.append(snapshot_version.version)
        bundle.verify(folder, ["serving"])
        if snapshot_version.version in self.unfit:
            raise ModelError("does not fit")
        return LoadedSnapshot(
            snapshot_version.version, snapshot_version.manifest.snapshot_id, object(), None, snapshot_version.manifest
        )

    def step(self, *announcements):
        self.follower.announcements.extend(announcements)
        self.refresher.step(threading.Event())
        return self.slot.current.version


def champion(sequence, version):
    return Announcement(sequence, "champion", version)
