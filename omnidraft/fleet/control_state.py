"""The state of one pair by the control log: whether it learns, its canary, the tenants whose traffic drifts."""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.fleet.control_follower import LogControlFollower
from omnidraft.ports import Announcement, AnnouncementKind, LogReader, Metrics

ALL_KINDS: tuple[AnnouncementKind, ...] = ("champion", "canary", "pause", "resume", "drift", "drift_over")


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


@dataclass(frozen=True, slots=True)
class ControlState:
    """The state of one pair."""

    is_learning_paused: bool = False
    canary: CanaryState | None = None
    drifting: tuple[DriftingTenant, ...] = ()


def read_control_state(
    reader: LogReader, metrics: Metrics, *, target: str, drafter: str, timeout_s: float
) -> ControlState:
    """Read the whole control log. Raises BusError."""
    follower = LogControlFollower(reader, metrics, kinds=ALL_KINDS, target=target, drafter=drafter)
    return _state(follower.poll(timeout_s))


def _state(announcements: Sequence[Announcement]) -> ControlState:
    """Return the state that announcements describe, none of which supersedes another."""
    by_kind = {each.kind: each for each in announcements}
    canary = by_kind.get("canary")
    drifting = [DriftingTenant(each.tenant or "", each.reason or "") for each in announcements if each.kind == "drift"]
    return ControlState(
        "pause" in by_kind,
        CanaryState(canary.version or 0, canary.share or 0.0) if canary else None,
        tuple(drifting),
    )
