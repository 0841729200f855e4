"""The state of one pair by the control log: whether it learns, its canary, the tenants whose traffic drifts, and what
brought it there."""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.fleet.authentication import Authenticator
from omnidraft.fleet.control_follower import LogControlFollower
from omnidraft.fleet.control_history import EVENT_KINDS, ControlEvent, ControlHistory
from omnidraft.fleet.control_log import PARTITION
from omnidraft.ports import Announcement, LogReader, Metrics, Work


@dataclass(frozen=True, slots=True)
class CanaryState:
    """A canary that serves now."""

    version: int
    share: float
    """The share of the requests it serves."""


@dataclass(frozen=True, slots=True)
class DriftingTenant:
    """A tenant on whose traffic agreement fell."""

    tenant: str
    reason: str
    work: Work | None = None
    """The kind of request; None: every kind."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """The state of one pair."""

    is_learning_paused: bool = False
    canary: CanaryState | None = None
    drifting: tuple[DriftingTenant, ...] = ()
    events: tuple[ControlEvent, ...] = ()
    """What brought it there, oldest first."""


def read_control_state(
    reader: LogReader,
    metrics: Metrics,
    *,
    target: str,
    drafter: str,
    timeout_s: float,
    authenticator: Authenticator | None = None,
) -> ControlState:
    """Read the whole control log. Raises BusError."""
    history = ControlHistory(is_whole=not reader.first_offsets().get(PARTITION, 0))
    follower = LogControlFollower(
        reader,
        metrics,
        kinds=EVENT_KINDS,
        target=target,
        drafter=drafter,
        authenticator=authenticator,
        on_genuine=history.take,
    )
    return _state(follower.read_whole(timeout_s), history)


def _state(announcements: Sequence[Announcement], history: ControlHistory) -> ControlState:
    """Return the state that announcements describe, none of which supersedes another, and what brought it there."""
    by_kind = {each.kind: each for each in announcements}
    canary = by_kind.get("canary")
    drifting = [
        DriftingTenant(each.tenant or "", each.reason or "", each.work)
        for each in announcements
        if each.kind == "drift"
    ]
    return ControlState(
        "pause" in by_kind,
        CanaryState(canary.version or 0, canary.share or 0.0) if canary else None,
        tuple(drifting),
        history.events,
    )
