"""Updates the served snapshot: follows announcements, loads beside the old snapshot, then swaps or starts a canary.

An announcement names the version to serve at once; the registry's alias `champion` is read whenever no announcement
came for `poll_s`, and is authoritative. A champion read from the registry takes the sequence of the newest announcement
received, so every later announcement still wins over it.
Orders wait neither for the registry nor for a load: these run beside the thread that follows announcements.
With `check_champion`, a champion is taken from the registry only with a signed statement about that very snapshot, and
what an announcement names is loaded only if it is the snapshot that was announced.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from omnidraft.config import WorkerSettings
from omnidraft.decode.snapshot.drift_throttle import DriftThrottle
from omnidraft.decode.snapshot.loading import Loader, SnapshotLoading, is_expected
from omnidraft.decode.snapshot.slot import Canary, LoadedSnapshot, SnapshotSlot
from omnidraft.errors import (
    BusError,
    OmnidraftError,
    SignatureRefused,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    SnapshotStale,
)
from omnidraft.ports import (
    Announcement,
    ControlFollower,
    Metrics,
    SnapshotReader,
    SnapshotVersion,
    Tracing,
)
from omnidraft.snapshots.manifest import digest
from omnidraft.threads import beside

logger = logging.getLogger(__name__)

MAX_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class _Failure:
    retry_s: float
    retry_at: float


class SnapshotUpdater:
    """Keeps a slot at the fleet's champion and canary, from a thread of its own, and never stops serving.

    A snapshot that cannot be fetched or loaded leaves the old one in place, is counted, and is retried with growing
    pauses; another version is tried at once. Where the old one is the base drafter, because the process has just
    started, the previous champion serves meanwhile. A registry or log that is down is retried; nothing is raised.

    Args:
        drift_throttle: receives the announcements of drift.
        target: name of the slot's target, for log lines and metrics.
        forget: called with an order to forget a tenant; drops what this process keeps of earlier texts.
        staging: a folder of this process alone; the files of snapshots that are no longer loaded are removed.
        check_champion: returns the sequence of the signed statement about a champion, or raises SignatureRefused;
            None takes the registry's word for it.
    """

    def __init__(
        self,
        registry: SnapshotReader,
        slot: SnapshotSlot,
        loader: Loader,
        follower: ControlFollower,
        drift_throttle: DriftThrottle,
        settings: WorkerSettings,
        metrics: Metrics,
        *,
        target: str,
        staging: Path,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        forget: Callable[[Announcement], None] = lambda order: None,
        check_champion: Callable[[SnapshotVersion], int] | None = None,
    ) -> None:
        self._registry = registry
        self._slot = slot
        self._loading = SnapshotLoading(
            registry, loader, staging, self._follow, metrics, target=target, clock=clock, tracing=tracing
        )
        self._follower = follower
        self._drift_throttle = drift_throttle
        self._settings = settings
        self._metrics = metrics
        self._target = target
        self._clock = clock
        self._forget = forget
        self._check_champion = check_champion
        self._sequence = slot.current.sequence
        self._canary: Announcement | None = None
        self._waiting: Announcement | None = None
        """The champion or canary that was announced during a load, if it has to be loaded too."""
        self._failures: dict[int, _Failure] = {}
        self._is_connected = True

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; return within `poll_s`, or when the current load ends."""
        while not stop.is_set():
            self.step(stop)

    def step(self, stop: threading.Event) -> None:
        """Wait for announcements for up to `poll_s`, then serve the version that they, or else the registry, name."""
        announcements = self._poll(stop) if self._waiting is None else (self._waiting,)
        self._waiting = None
        for each in announcements:
            self._on_announcement(each)
        if not any(each.kind == "champion" for each in announcements):
            self._serve_champion()
        if self._canary is not None:
            self._start_canary(self._canary)

    def _poll(self, stop: threading.Event) -> Sequence[Announcement]:
        try:
            return self._follower.poll(self._settings.poll_s)
        except BusError as exc:
            self._report_disconnected(exc)
            stop.wait(self._settings.poll_s)
            return ()

    def _follow(self) -> None:
        """Carry out what was announced, except a load, which waits for the one under way."""
        with suppress(BusError):
            for each in self._follower.poll(0.0):
                if each.kind not in ("champion", "canary"):
                    self._on_announcement(each)
                    continue
                self._waiting = None if self._slotted(each.version, each.digest) else each
                if self._waiting is None:
                    self._on_announcement(each)

    def _on_announcement(self, announcement: Announcement) -> None:
        self._slot.on_announcement(announcement)
        if announcement.kind == "champion" and announcement.version is not None:
            self._sequence, self._canary = announcement.sequence, None
            self._serve(announcement.version, announcement.digest, announcement.sequence)
            self._slot.set_canary(None)
            self._remove_unloaded_files()
        elif announcement.kind == "canary":
            self._sequence, self._canary = announcement.sequence, announcement
        elif announcement.kind == "forget":
            self._forget(announcement)
            self._remove_unloaded_files()
        else:
            self._drift_throttle.on_announcement(announcement)

    def _serve_champion(self) -> None:
        """Serve the champion, unless nothing was promoted yet, the registry is down, or nobody vouches for it."""
        sequence = self._sequence  # what is announced meanwhile is later than what the registry answers
        try:
            champion = beside(self._follow, partial(self._registry.resolve, "champion"))
            if self._check_champion is not None:
                sequence = max(sequence, self._check_champion(champion))
                self._sequence = max(self._sequence, sequence)
        except SignatureRefused as exc:
            self._metrics.add("omnidraft_champions_refused_total", target=self._target)
            self._report_disconnected(exc)
        except SnapshotNotFound:
            pass
        except SnapshotCorrupt as exc:
            self._report_disconnected(exc)
            self._serve_previous(sequence)
        except SnapshotError as exc:
            self._report_disconnected(exc)
        else:
            self._is_connected = True
            self._serve(champion.version, None if self._check_champion is None else digest(champion.manifest), sequence)

    def _serve(self, version: int, expected: str | None, sequence: int) -> None:
        """Serve this version. `expected`: the digest of its manifest; None: whatever the registry has."""
        self._load_and(version, expected, partial(self._swap, sequence=sequence))
        if version in self._failures:
            self._serve_previous(sequence)

    def _serve_previous(self, sequence: int) -> None:
        """Serve the previous champion rather than the base drafter while the champion cannot be loaded. Where champions
        are checked the base drafter serves: nobody vouches for what the registry calls previous."""
        if self._slot.current.version is not None or self._check_champion is not None:
            return
        try:
            previous = beside(self._follow, partial(self._registry.resolve, "previous")).version
        except SnapshotError:
            return
        logger.warning(
            "%s: the champion cannot be loaded; the previous one, snapshot %d, serves", self._target, previous
        )
        self._load_and(previous, None, partial(self._swap, sequence=sequence))

    def _start_canary(self, announcement: Announcement) -> None:
        """Serve a canary, unless it is on trial already or serves as the champion."""
        on_trial = self._slot.canary and self._slot.canary.snapshot.version
        if (
            announcement.version is None
            or announcement.share is None
            or announcement.version in (on_trial, self._slot.current.version)
        ):
            return
        share = announcement.share

        def begin(loaded: LoadedSnapshot) -> None:
            if self._canary is announcement:  # else it ended during its load
                self._slot.set_canary(Canary(loaded, share))

        self._load_and(announcement.version, announcement.digest, begin)
        if self._slot.canary:
            logger.info("%s: snapshot %d serves %.1f %% of requests", self._target, announcement.version, share * 100)

    def _load_and(self, version: int, expected: str | None, apply: Callable[[LoadedSnapshot], None]) -> None:
        """Load a version and apply it. This is the refresh boundary: whatever is wrong with it, the old snapshot keeps
        serving."""
        failure = self._failures.get(version)
        if failure and self._clock() < failure.retry_at:
            return
        try:
            apply(self._slotted(version, expected) or self._loading.load(version, expected))
            self._failures.pop(version, None)
            self._remove_unloaded_files()
        except SnapshotStale as exc:
            logger.info("%s: kept the later snapshot: %s", self._target, exc)
        except Exception as exc:  # whatever the registry or the loader raises must not end this thread
            self._record_failure(version, exc)

    def _slotted(self, version: int | None, expected: str | None) -> LoadedSnapshot | None:
        """Return the snapshot if it is still loaded, so that a rollback is a swap."""
        for slotted in self._slot.loaded:
            if slotted.version == version and is_expected(slotted.manifest, expected):
                return slotted
        return None

    def _swap(self, loaded: LoadedSnapshot, *, sequence: int) -> None:
        before = self._slot.current.version
        started = self._clock()
        self._slot.swap(replace(loaded, sequence=sequence))
        swap_s = self._clock() - started
        if loaded.version == before:
            return
        self._metrics.observe("omnidraft_snapshot_swap_seconds", swap_s, target=self._target)
        if _forgets(loaded) - _forgets(self._slot.previous):
            self._slot.drop_previous()  # it knows what this one has forgotten
        if loaded.version is not None and (manifest := loaded.manifest) is not None:
            labels = {"target": manifest.target, "drafter": manifest.drafter}
            self._metrics.set("omnidraft_snapshot_version_info", loaded.version, **labels)
        logger.info("%s: swapped snapshot %s -> %s in %.3f ms", self._target, before, loaded.version, swap_s * 1000)

    def _remove_unloaded_files(self) -> None:
        self._loading.remove_files(but={each.version for each in self._slot.loaded})

    def _record_failure(self, version: int, exc: BaseException) -> None:
        known = self._failures.get(version)
        retry_s = min(known.retry_s * 2 if known else self._settings.poll_s, MAX_RETRY_S)
        self._failures[version] = _Failure(retry_s, self._clock() + retry_s)
        self._metrics.add("omnidraft_snapshot_load_failures_total", target=self._target)
        logger.warning(
            "%s: snapshot %d cannot be loaded, %s keeps serving, next try in %.0f s: %s",
            self._target,
            version,
            self._slot.current.version,
            retry_s,
            exc,
        )

    def _report_disconnected(self, exc: OmnidraftError) -> None:
        self._metrics.add("omnidraft_refresh_errors_total", target=self._target)
        if self._is_connected:
            version = self._slot.current.version
            logger.warning("%s: cannot receive new snapshots, %s keeps serving: %s", self._target, version, exc)
        self._is_connected = False


def _forgets(snapshot: LoadedSnapshot | None) -> frozenset[str]:
    """Return the orders to forget a tenant that were carried out in this snapshot."""
    return frozenset(snapshot.manifest.forgets if snapshot and snapshot.manifest else ())
