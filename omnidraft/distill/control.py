"""The control of one distiller: the orders that it follows, and the status that it reports.

Orders come from the control log: to pause and resume learning, to restart it elsewhere in the trace log, to go back
to an earlier version, which tenants are to be forgotten, and whose traffic drifts. While the control log is away, the
orders read last hold.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from omnidraft.distill.evaluation.held_out import HeldOutMeasurement
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import BusError
from omnidraft.ports import ControlFollower, ControlState, Drift, Entry, Forget, Metrics, Restart, Rewind
from omnidraft.snapshots.manifest import Manifest

logger = logging.getLogger(__name__)


DRIFT_HASTE = 4
"""The factor by which snapshots are more frequent while any tenant's traffic drifts: what is learned of the new traffic
serves sooner, and registry and gate still keep up. Training does not depend on it."""


class TrainingControl:
    """The orders in force. Not thread-safe."""

    def __init__(self, follower: ControlFollower | None = None) -> None:
        """Without a follower there are never any orders."""
        self._follower = follower
        self._state = ControlState()
        self._forgets: dict[str, Forget] = {}
        self._new_drifts: list[str] = []

    def start(self, timeout_s: float) -> None:
        """Take in what was ordered before, which has to be known before anything is learned. Kafka's first answer takes
        a while. Raises BusError; then it may be repeated."""
        if self._follower is not None:
            self._apply(*self._follower.poll_all(timeout_s))

    def poll(self) -> None:
        """Take in what changed, without waiting for anything."""
        if self._follower is not None:
            with suppress(BusError):
                self._apply(*self._follower.poll(0.0))

    @property
    def is_paused(self) -> bool:
        return self._state.is_paused

    @property
    def restart(self) -> Restart | None:
        """The newest order to restart; the caller remembers whether it was carried out."""
        return self._state.value(Restart, "restart")

    @property
    def rewind(self) -> Rewind | None:
        """The newest order to go back to an earlier version, likewise."""
        return self._state.value(Rewind, "rewind")

    @property
    def forgets(self) -> dict[str, Forget]:
        """The newest order to forget each tenant."""
        return self._state.forgets

    def is_to_forget(self, manifest: Manifest) -> bool:
        """Return whether weights are to forget what this snapshot's learned from a tenant."""
        return any(order.concerns(manifest) for order in self.forgets.values())

    @property
    def is_drifting(self) -> bool:
        """Whether any tenant's traffic drifts."""
        return bool(self._state.of(Drift))

    def new_drifts(self) -> list[str]:
        """Return the tenants whose traffic began to drift since the last call."""
        drifting = {tenant for tenant, _ in self._state.of(Drift)}
        new, self._new_drifts = dict.fromkeys(self._new_drifts), []
        return [tenant for tenant in new if tenant in drifting]

    def new_forgets(self) -> dict[str, Forget]:
        """Return the orders to forget a tenant that came since the last call; at first the newest of every tenant."""
        orders, self._forgets = self._forgets, {}
        return orders

    def _apply(self, state: ControlState, changes: Sequence[Entry]) -> None:
        self._state = state
        for each in changes:
            if isinstance(each.value, Forget):
                self._forgets[each.key[1]] = each.value
            elif isinstance(each.value, Drift):
                self._new_drifts.append(each.key[1])


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a distiller. Replaced as a whole, so any thread may read it."""

    version: int | None = None
    """The newest snapshot published."""
    is_paused: bool = False
    waits_for: str | None = None
    """The decision that an operator has to make before learning goes on; None: none."""
    num_steps: int = 0
    num_records: int = 0
    num_tokens: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)
    """The losses of the last step."""
    tokens_per_s: float | None = None
    """Emitted target tokens of the last step, divided by its duration."""
    agreement: float | None = None
    """The agreement of the newest snapshot on held-out records."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)


class StatusReporter:
    """Keeps the status of one distiller, which any thread may read. Only the distiller's own thread may change it."""

    def __init__(
        self, learner: Learner, batcher: Batcher, metrics: Metrics, progress: Callable[[Status], None]
    ) -> None:
        """`progress` gets every new status, in the thread that changed it."""
        self._learner, self._batcher, self._metrics, self._progress = learner, batcher, metrics, progress
        self.status = Status()

    def update(self, **changes: Any) -> None:
        """Replace the status by one with these fields and the counters of now."""
        if changes.get("version") is not None:
            self._metrics.set("omnidraft_newest_version_info", changes["version"])
        if "waits_for" in changes:
            self._metrics.set("omnidraft_learner_blocked_info", float(changes["waits_for"] is not None))
        counters = self._learner.counters
        self.status = replace(
            self.status,
            num_steps=counters.num_steps,
            num_records=counters.num_records,
            num_tokens=counters.num_tokens,
            offsets=self._batcher.offsets(),
            skipped=counters.skipped,
            **changes,
        )
        self._progress(self.status)

    def report_snapshot(self, version: int, measured: HeldOutMeasurement, losses: Mapping[str, float]) -> None:
        """Report a snapshot that was published after steps with these mean losses."""
        agreement = measured.after
        logger.info("published snapshot %d: losses %s, agreement %s -> %s", version, losses, measured.before, agreement)
        self._metrics.add("omnidraft_snapshots_published_total")
        if agreement is not None:
            self._metrics.set("omnidraft_held_out_agreement_ratio", agreement, drafter_version=str(version))
        self.update(version=version, agreement=agreement)
