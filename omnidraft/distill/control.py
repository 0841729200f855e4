"""What the control log tells a distiller: whether to learn, where to go on, and whose traffic drifts.

While the log is down, what was heard last holds.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from omnidraft.errors import BusError
from omnidraft.ports import Announcement


class ControlFollower(Protocol):
    """The reading end of the announcements; see fleet/control_follower.py."""

    def poll(self, timeout_s: float) -> Sequence[Announcement]:
        """What holds and was not told yet, waiting so long for any. Raises BusError."""


class TrainingControl:
    """One thread."""

    def __init__(self, follower: ControlFollower | None = None) -> None:
        """Without a follower nothing is ever told."""
        self._follower = follower
        self.is_paused = False
        self.restart: Announcement | None = None
        """The newest order to go on elsewhere; whoever carries it out remembers that."""
        self._drifting: dict[str, bool] = {}
        """Tenant -> whether somebody took note."""

    def listen(self) -> None:
        """Hear what is new."""
        if self._follower is None:
            return
        with suppress(BusError):
            for told in self._follower.poll(0.0):
                self._take(told)

    @property
    def is_drifting(self) -> bool:
        return bool(self._drifting)

    def new_drifts(self) -> list[str]:
        """Tenants whose traffic began to drift since this was asked."""
        new = [tenant for tenant, is_noted in self._drifting.items() if not is_noted]
        self._drifting = dict.fromkeys(self._drifting, True)
        return new

    def _take(self, told: Announcement) -> None:
        match told.kind:
            case "pause" | "resume":
                self.is_paused = told.kind == "pause"
            case "restart":
                self.restart = told
            case "drift" if told.tenant is not None:
                self._drifting[told.tenant] = False
            case "drift_over":
                self._drifting.pop(told.tenant or "", None)


@dataclass(frozen=True, slots=True)
class Status:
    """Replaced whole, so any thread may read it."""

    version: int | None = None
    """Newest snapshot published."""
    is_paused: bool = False
    waits_for: str | None = None
    """What an operator has to decide before learning goes on; None: nothing."""
    num_steps: int = 0
    num_records: int = 0
    num_tokens: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)
    """Of the last step."""
    tokens_per_s: float | None = None
    """Emitted target tokens of the last step, by its duration."""
    agreement: float | None = None
    """Of the newest snapshot, on held-out records."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
