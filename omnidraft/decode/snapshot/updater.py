"""Updates the served snapshot: follows the control log, loads beside the old snapshot, then swaps or starts a canary.

The log says which version is champion. Until it has named one, the registry's alias `champion` is read every `poll_s`,
unless values are signed: that is nobody's word.
Orders wait neither for the registry nor for a load: these run beside the thread that follows the log.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omnidraft.config import WorkerSettings
from omnidraft.decode.snapshot.loading import Loader, SnapshotLoading, is_expected
from omnidraft.decode.snapshot.slot import Canary, LoadedSnapshot, SnapshotSlot
from omnidraft.errors import BusError, OmnidraftError, SnapshotCorrupt, SnapshotError, SnapshotNotFound
from omnidraft.ports import Champion, ControlFollower, ControlState, Entry, Metrics, SnapshotReader, Tracing
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
        target: name of the slot's target, for log lines and metrics.
        forget: called after an order to forget a tenant; drops what this process keeps of earlier texts.
        staging: a folder of this process alone; the files of snapshots that are no longer loaded are removed.
        follows_registry: False where values of the log are signed, and the registry's alias is nobody's word.
    """

    def __init__(
        self,
        registry: SnapshotReader,
        slot: SnapshotSlot,
        loader: Loader,
        control: ControlFollower,
        settings: WorkerSettings,
        metrics: Metrics,
        *,
        target: str,
        staging: Path,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        forget: Callable[[], None] = lambda: None,
        follows_registry: bool = True,
    ) -> None:
        self._registry = registry
        self._slot = slot
        self._loading = SnapshotLoading(
            registry, loader, staging, self._follow, metrics, target=target, clock=clock, tracing=tracing
        )
        self._control = control
        self._settings = settings
        self._metrics = metrics
        self._target = target
        self._clock = clock
        self._forget = forget
        self._follows_registry = follows_registry
        self._champion: Champion | None = None
        """What is to serve, by the log or the registry."""
        self._is_told = False
        """Whether the log has named a champion."""
        self._has_news = False
        """Whether something came during a load that may have to be loaded too."""
        self._failures: dict[int, _Failure] = {}
        self._is_connected = True

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; return within `poll_s`, or when the current load ends."""
        while not stop.is_set():
            self.step(stop)

    def step(self, stop: threading.Event) -> None:
        """Wait for a change for up to `poll_s`, then serve the version that the log, or else the registry, names."""
        try:
            self._apply(*self._control.poll(0.0 if self._has_news else self._settings.poll_s))
        except BusError as exc:
            self._report_disconnected(exc)
            stop.wait(self._settings.poll_s)
        self._has_news = False
        if self._follows_registry and not self._is_told:
            self._ask_registry()
        self._serve_champion()
        self._serve_canary()

    def _follow(self) -> None:
        """Carry out what was ordered, except a load, which waits for the one under way."""
        with suppress(BusError):
            self._apply(*self._control.poll(0.0))

    def _apply(self, state: ControlState, changes: Sequence[Entry]) -> None:
        self._slot.rules.state = state
        kinds = {each.kind for each in changes}
        self._is_told |= state.champion is not None
        if state.champion not in (None, self._champion):
            self._champion = state.champion
            if (slotted := self._slotted(state.champion)) is not None:
                self._swap(slotted)
        if self._slot.canary is not None and state.canary is None:
            self._slot.set_canary(None)
        if "forget" in kinds:
            self._slot.forget_factors()
            self._forget()
        if kinds:
            self._has_news = self._is_connected = True
            self._remove_unloaded_files()

    def _ask_registry(self) -> None:
        """Take the registry's champion, for as long as the log names none."""
        try:
            answer = beside(self._follow, partial(self._registry.resolve, "champion"))
        except SnapshotNotFound:
            pass
        except SnapshotError as exc:
            self._report_disconnected(exc)
            if isinstance(exc, SnapshotCorrupt):
                self._serve_previous()
        else:
            self._is_connected = True
            if not self._is_told:
                self._champion = Champion(version=answer.version)

    def _serve_champion(self) -> None:
        champion = self._champion
        if champion is None:
            return
        loaded = self._loaded(champion)
        if loaded is not None and self._champion is champion:  # else another one was told during its load
            self._swap(loaded)
        if champion.version in self._failures:
            self._serve_previous()

    def _serve_previous(self) -> None:
        """Serve the previous champion rather than the base drafter while the champion cannot be loaded. Where values
        are signed the base drafter serves: nobody vouches for what the registry calls previous."""
        if self._slot.current.version is not None or not self._follows_registry:
            return
        champion = self._champion
        try:
            previous = beside(self._follow, partial(self._registry.resolve, "previous")).version
        except SnapshotError:
            return
        logger.warning(
            "%s: the champion cannot be loaded; the previous one, snapshot %d, serves", self._target, previous
        )
        loaded = self._loaded(Champion(version=previous))
        if loaded is not None and self._champion is champion:
            self._swap(loaded)

    def _serve_canary(self) -> None:
        """Serve a canary, unless it is on trial already or serves as the champion."""
        canary, on_trial = self._slot.rules.state.canary, self._slot.canary and self._slot.canary.snapshot.version
        if canary is None or canary.version in (on_trial, self._slot.current.version):
            return
        loaded = self._loaded(canary)
        if loaded is not None and self._slot.rules.state.canary == canary:  # else it ended during its load
            self._slot.set_canary(Canary(loaded, canary.share))
            self._remove_unloaded_files()
            logger.info("%s: snapshot %d serves %.1f %% of requests", self._target, canary.version, canary.share * 100)

    def _loaded(self, wanted: Champion) -> LoadedSnapshot | None:
        """Return this version, loaded if it is not in memory. This is the refresh boundary: whatever is wrong with it,
        the old snapshot keeps serving."""
        failure = self._failures.get(wanted.version)
        if failure and self._clock() < failure.retry_at:
            return None
        try:
            loaded = self._slotted(wanted) or self._loading.load(wanted.version, wanted.digest)
        except Exception as exc:  # whatever the registry or the loader raises must not end this thread
            self._record_failure(wanted.version, exc)
            return None
        self._failures.pop(wanted.version, None)
        return loaded

    def _slotted(self, wanted: Champion) -> LoadedSnapshot | None:
        """Return the snapshot if it is still loaded, so that a rollback is a swap."""
        for slotted in self._slot.loaded:
            if slotted.version == wanted.version and is_expected(slotted.manifest, wanted.digest):
                return slotted
        return None

    def _swap(self, loaded: LoadedSnapshot) -> None:
        before = self._slot.current
        if loaded is before:
            return
        started = self._clock()
        self._slot.swap(loaded)
        swap_s = self._clock() - started
        self._metrics.observe("omnidraft_snapshot_swap_seconds", swap_s, target=self._target)
        if _forgets(loaded) - _forgets(self._slot.previous):
            self._slot.drop_previous()  # it knows what this one has forgotten
        if loaded.version is not None and (manifest := loaded.manifest) is not None:
            labels = {"target": manifest.target, "drafter": manifest.drafter}
            self._metrics.set("omnidraft_snapshot_version_info", loaded.version, **labels)
        swapped = (before.version, loaded.version, swap_s * 1000)
        logger.info("%s: swapped snapshot %s -> %s in %.3f ms", self._target, *swapped)
        self._remove_unloaded_files()

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
