"""What the control log says of one pair now: whether it learns, what is on trial, whose traffic drifts."""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.fleet.control_follower import LogControlFollower
from omnidraft.ports import Announcement, AnnouncementKind, LogReader, Metrics

ALL_KINDS: tuple[AnnouncementKind, ...] = ("champion", "canary", "pause", "resume", "drift", "drift_over")


@dataclass(frozen=True, slots=True)
class CanaryState:
    """A canary that is out."""

    version: int
    share: float
    """Of the requests."""


@dataclass(frozen=True, slots=True)
class DriftingTenant:
    """A tenant whose agreement fell."""

    tenant: str
    reason: str


@dataclass(frozen=True, slots=True)
class ControlState:
    """All of it."""

    is_learning_paused: bool = False
    canary: CanaryState | None = None
    drifting: tuple[DriftingTenant, ...] = ()


def read_control_state(
    reader: LogReader, metrics: Metrics, *, target: str, drafter: str, timeout_s: float
) -> ControlState:
    """Reads the whole control log. Raises BusError."""
    follower = LogControlFollower(reader, metrics, kinds=ALL_KINDS, target=target, drafter=drafter)
    return _state(follower.poll(timeout_s))


def _state(holding: Sequence[Announcement]) -> ControlState:
    """Of announcements none of which supersedes another."""
    by_kind = {each.kind: each for each in holding}
    canary = by_kind.get("canary")
    drifting = [DriftingTenant(each.tenant or "", each.reason or "") for each in holding if each.kind == "drift"]
    return ControlState(
        "pause" in by_kind,
        CanaryState(canary.version or 0, canary.share or 0.0) if canary else None,
        tuple(drifting),
    )
