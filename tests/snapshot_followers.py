"""A worker's snapshot updater with everything around it."""

import threading

from omnidraft.config import WorkerSettings
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.tenant_rules import TenantRules
from omnidraft.decode.snapshot.updater import SnapshotUpdater
from omnidraft.errors import BusError, ModelError, RegistryError
from omnidraft.ports import Canary, Champion, ControlValue, Key
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.snapshots.signing import UNSIGNED
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog
from tests.control_logs import control_over
from tests.snapshot_folders import make_bundle

Put = tuple[Key, ControlValue | None]


class FragileControl:
    """Follows the control log of a fleet, unless it is down."""

    def __init__(self, log):
        self._control, self.is_down = control_over(log), False

    def poll(self, timeout_s):
        if self.is_down:
            raise BusError("down")
        return self._control.poll(0)


class Fragile(DirectoryRegistry):
    """A registry that can be switched off."""

    is_down = False

    def resolve(self, name):
        if self.is_down:
            raise RegistryError("down")
        return super().resolve(name)


class Worker:
    """An updater with everything around it; `loads` lists the versions that were loaded."""

    def __init__(self, folder, num_versions=4, signing=UNSIGNED, **options):
        self.folder = folder
        self.registry = Fragile(folder / "registry", "org/small", "big", keep_resume=2, signing=signing)
        for version in range(1, num_versions + 1):
            self.registry.publish(make_bundle(folder / "bundles", f"s{version}"), version - 1 or None)
        self.slot = SnapshotSlot(LoadedSnapshot(None, "base", object(), None, None), TenantRules(2))
        self.log, self.metrics = MemoryLog(), CountingMetrics()
        self.control, self.fleet = FragileControl(self.log), control_over(self.log)
        self.loads, self.unfit, self.now = [], set(), 0.0
        self.updater = SnapshotUpdater(
            self.registry,
            self.slot,
            self.load,
            self.control,
            WorkerSettings(poll_s=0.001),
            self.metrics,
            target="big",
            staging=folder / "staging",
            clock=lambda: self.now,
            **options,
        )

    def load(self, snapshot_version, folder):
        self.loads.append(snapshot_version.version)
        bundle.verify(folder, ["serving"])
        if snapshot_version.version in self.unfit:
            raise ModelError("does not fit")
        return LoadedSnapshot(
            snapshot_version.version, snapshot_version.manifest.snapshot_id, object(), None, snapshot_version.manifest
        )

    def step(self, *puts: Put):
        """Make a step after these were put on the control log; return the version that serves."""
        for key, value in puts:
            self.fleet.put(key, value)
        self.updater.step(threading.Event())
        return self.slot.current.version


def champion(version, **fields) -> Put:
    return ("champion",), Champion(version=version, **fields)


def canary(version, share=0.5) -> Put:
    return ("canary",), Canary(version=version, share=share)
