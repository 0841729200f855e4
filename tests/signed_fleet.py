"""A fleet that signs: its keys, its settings by role, and a worker that follows it with public keys only."""

import threading
from pathlib import Path

from omnidraft import assembly, config
from omnidraft.assembly.registries import snapshot_reader
from omnidraft.assembly.signing import follows_registry
from omnidraft.config import WorkerSettings
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.updater import SnapshotUpdater
from omnidraft.files import sha256_of
from omnidraft.ports import Champion, ControlValue
from omnidraft.snapshots import bundle
from omnidraft.snapshots.keys import PrivateKey, Role, TrustedKeys, new_private_key
from omnidraft.snapshots.manifest import digest
from omnidraft.snapshots.signing import SnapshotSigning
from omnidraft.telemetry.metrics import CountingMetrics

TARGET, DRAFTER = "big", "org/small"


class Keys:
    """A key pair for each role, and one that nobody trusts."""

    def __init__(self) -> None:
        self.texts = {role: new_private_key() for role in ("distiller", "controller", "operator", "stranger")}
        roles: tuple[Role, ...] = ("distiller", "controller", "operator")
        self.public = tuple(self[role].public_text(role) for role in roles)
        self.trusted = TrustedKeys(self.public)

    def __getitem__(self, owner: str) -> PrivateKey:
        return PrivateKey(self.texts[owner])


def new_signing() -> SnapshotSigning:
    """How a distiller with a key pair of its own signs, and who trusts no other verifies."""
    key = PrivateKey(new_private_key())
    return SnapshotSigning(key, TrustedKeys([key.public_text("distiller")]))


def settings_of(
    keys: Keys, folder: Path, role: str = "worker", registry_url: str | None = None, **registry: object
) -> config.Settings:
    """Settings of one process; a worker has no private key."""
    private = {} if role == "worker" else {"private_key": keys.texts[role]}
    url = registry_url or f"directory:///{folder}/registry"
    section = {"url": url, "trusted_keys": keys.public, "keep_resume": 3}
    return config.load(
        None,
        {},
        models={"target": TARGET, "drafter": DRAFTER},
        log={"url": f"sqlite:///{folder}/log.db"},
        registry=section | private | registry,
    )


class Worker:
    """A worker's updater, wired as in a worker's process; `loads` lists versions and hashes of what was loaded."""

    def __init__(self, settings: config.Settings, staging: Path) -> None:
        self.loads: list[tuple[int, str]] = []
        self.metrics = CountingMetrics()
        self.slot = SnapshotSlot(LoadedSnapshot(None, "base", object(), None, None))
        self.updater = SnapshotUpdater(
            snapshot_reader(settings),
            self.slot,
            self._load,
            assembly.control_log(settings, self.metrics),
            WorkerSettings(poll_s=0.001),
            self.metrics,
            target=TARGET,
            staging=staging,
            follows_registry=follows_registry(settings),
        )

    def _load(self, version, folder):
        self.loads.append((version.version, sha256_of(folder / bundle.DRAFTER)))
        return LoadedSnapshot(version.version, version.manifest.snapshot_id, object(), None, version.manifest)

    def step(self) -> int | None:
        self.updater.step(threading.Event())
        return self.slot.current.version


def promote(settings: config.Settings, version: int) -> None:
    """What `omnidraft snapshots promote` does."""
    registry = assembly.registry(settings)
    registry.promote(version)
    put(settings, ("champion",), Champion(version=version, digest=digest(registry.resolve(str(version)).manifest)))


def put(settings: config.Settings, key: tuple[str, ...], value: ControlValue | None) -> None:
    """Put this on the control log, as the process with these settings does."""
    assembly.control_log(settings, CountingMetrics()).put(key, value)
