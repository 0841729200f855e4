"""Take up new snapshots while serving: follow the announcements, stage beside the old one, swap or try out.

The announcement says at once which version serves; the registry's alias `champion` is asked whenever no announcement
came for `poll_s`, and is the truth. A champion found by asking takes the sequence of the newest announcement heard, so
every later announcement still wins over it.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omnidraft import throttle
from omnidraft.config import WorkerSettings
from omnidraft.decode.snapshot.drift_throttle import DriftThrottle
from omnidraft.decode.snapshot.slot import Canary, LoadedSnapshot, SnapshotSlot
from omnidraft.errors import BusError, OmnidraftError, SnapshotCorrupt, SnapshotError, SnapshotNotFound, SnapshotStale
from omnidraft.ports import Announcement, ControlFollower, Metrics, NoopTracing, Registry, SnapshotVersion, Tracing

logger = logging.getLogger(__name__)

MAX_RETRY_S = 300.0

Loader = Callable[[SnapshotVersion, Path], LoadedSnapshot]
"""From a verified snapshot folder. Raises an OmnidraftError when it does not fit."""


@dataclass(frozen=True, slots=True)
class _Failure:
    retry_s: float
    retry_at: float


class SnapshotUpdater:
    """Keeps a slot at the fleet's champion and canary, from a thread of its own, and never stops serving.

    A snapshot that cannot be had or loaded leaves the old one in place, is counted, and is tried again with growing
    pauses; another version is tried at once. Where that old one is the base drafter, because the process has just
    begun, the champion before serves meanwhile. A registry or log that is down is asked again; nothing is raised.

    Args:
        caution: told of traffic that drifts.
        target: of this slot, for log lines and metrics.
        staging: a folder of this process alone; of a snapshot that is no longer loaded the files are removed.
    """

    def __init__(
        self,
        registry: Registry,
        slot: SnapshotSlot,
        loader: Loader,
        follower: ControlFollower,
        caution: DriftThrottle,
        settings: WorkerSettings,
        metrics: Metrics,
        *,
        target: str,
        staging: Path,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
    ) -> None:
        self._registry = registry
        self._slot = slot
        self._loader = loader
        self._follower = follower
        self._caution = caution
        self._settings = settings
        self._metrics = metrics
        self._target = target
        self._staging = staging
        self._clock = clock
        self._tracing = tracing or NoopTracing()
        self._sequence = slot.current.sequence
        self._canary: Announcement | None = None
        self._failures: dict[int, _Failure] = {}
        self._folders: dict[int, Path] = {}
        self._is_connected = True

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; returns within `poll_s`, or when the load under way ends."""
        while not stop.is_set():
            self.step(stop)

    def step(self, stop: threading.Event) -> None:
        """Wait for announcements for up to `poll_s`, then serve what they, or else the registry, name."""
        told = self._on_announcement(stop)
        for each in told:
            self._hear(each)
        if not any(each.kind == "champion" for each in told) and (champion := self._champion()) is not None:
            self._take(champion)
        if self._canary is not None:
            self._try_out(self._canary)

    def _on_announcement(self, stop: threading.Event) -> Sequence[Announcement]:
        try:
            return self._follower.poll(self._settings.poll_s)
        except BusError as exc:
            self._disconnected(exc)
            stop.wait(self._settings.poll_s)
            return ()

    def _hear(self, told: Announcement) -> None:
        if told.kind == "champion" and told.version is not None:
            self._sequence, self._canary = told.sequence, None
            self._take(told.version)
            self._slot.try_out(None)
            self._forget()
        elif told.kind == "canary":
            self._sequence, self._canary = told.sequence, told
        else:
            self._caution.on_announcement(told)

    def _champion(self) -> int | None:
        """None: nobody has been promoted yet, or the registry is down."""
        try:
            champion = self._registry.resolve("champion").version
        except SnapshotNotFound:
            return None
        except SnapshotCorrupt as exc:
            self._disconnected(exc)
            self._take_previous()
            return None
        except SnapshotError as exc:
            self._disconnected(exc)
            return None
        self._is_connected = True
        return champion

    def _take(self, version: int) -> None:
        self._put(version, self._swap)
        if version in self._failures:
            self._take_previous()

    def _take_previous(self) -> None:
        """Rather than the base drafter: the champion before the one that cannot be had."""
        if self._slot.current.version is not None:
            return
        try:
            previous = self._registry.resolve("previous").version
        except SnapshotError:
            return
        logger.warning(
            "%s: the champion cannot be had; snapshot %d, which was before it, serves", self._target, previous
        )
        self._put(previous, self._swap)

    def _try_out(self, told: Announcement) -> None:
        """Nothing to do when it is on trial already, or serves as the champion."""
        on_trial = self._slot.canary and self._slot.canary.snapshot.version
        if told.version is None or told.share is None or told.version in (on_trial, self._slot.current.version):
            return
        share = told.share
        self._put(told.version, lambda loaded: self._slot.try_out(Canary(loaded, share)))
        if self._slot.canary:
            logger.info("%s: snapshot %d serves %.1f %% of the requests", self._target, told.version, share * 100)

    def _put(self, version: int, put: Callable[[LoadedSnapshot], None]) -> None:
        """The refresh boundary: whatever is wrong with this snapshot, the old one goes on serving."""
        failure = self._failures.get(version)
        if failure and self._clock() < failure.retry_at:
            return
        try:
            put(self._loaded(version))
            self._failures.pop(version, None)
            self._forget()
        except SnapshotStale as exc:
            logger.info("%s: kept the later snapshot: %s", self._target, exc)
        except Exception as exc:  # of the registry's or the loader's parts: none of it may end this thread
            self._failed(version, exc)

    def _loaded(self, version: int) -> LoadedSnapshot:
        """From memory when it is there, so that a rollback is a swap."""
        for held in self._slot.loaded:
            if held.version == version:
                return held
        started = self._clock()
        found = self._registry.resolve(str(version))
        made_by = found.manifest.traceparent
        span = self._tracing.begin("load snapshot", links=[made_by] if made_by else [], version=version)
        try:
            with throttle.throttled():
                folder = self._folders[version] = self._registry.fetch(version, self._staging)
            loaded = self._loader(found, folder)
        except Exception as exc:
            span.end(model=self._target, error=type(exc).__name__)
            raise
        self._metrics.observe("omnidraft_snapshot_load_seconds", self._clock() - started, target=self._target)
        span.end(model=self._target)
        return loaded

    def _swap(self, loaded: LoadedSnapshot) -> None:
        before = self._slot.current.version
        started = self._clock()
        self._slot.swap(replace(loaded, sequence=self._sequence))
        swap_s = self._clock() - started
        if loaded.version == before:
            return
        self._metrics.observe("omnidraft_snapshot_swap_seconds", swap_s, target=self._target)
        if loaded.version is not None and (told := loaded.manifest) is not None:
            labels = {"target": told.target, "drafter": told.drafter}
            self._metrics.set("omnidraft_snapshot_version_info", loaded.version, **labels)
        logger.info("%s: swapped snapshot %s -> %s in %.3f ms", self._target, before, loaded.version, swap_s * 1000)

    def _forget(self) -> None:
        """Remove the files of snapshots that are no longer loaded."""
        held = {each.version for each in self._slot.loaded}
        for version in [version for version in self._folders if version not in held]:
            shutil.rmtree(self._folders.pop(version), ignore_errors=True)

    def _failed(self, version: int, exc: BaseException) -> None:
        known = self._failures.get(version)
        retry_s = min(known.retry_s * 2 if known else self._settings.poll_s, MAX_RETRY_S)
        self._failures[version] = _Failure(retry_s, self._clock() + retry_s)
        self._metrics.add("omnidraft_snapshot_load_failures_total", target=self._target)
        logger.warning(
            "%s: snapshot %d cannot be loaded, %s goes on serving, next try in %.0f s: %s",
            self._target,
            version,
            self._slot.current.version,
            retry_s,
            exc,
        )

    def _disconnected(self, exc: OmnidraftError) -> None:
        self._metrics.add("omnidraft_refresh_errors_total", target=self._target)
        if self._is_connected:
            version = self._slot.current.version
            logger.warning("%s: cannot hear of new snapshots, %s goes on serving: %s", self._target, version, exc)
        self._is_connected = False
