"""What the control log tells a distiller: whether to learn, where to go on, and whose traffic drifts.

While the log is down, what was heard last holds.
"""

from contextlib import suppress

from omnidraft.errors import BusError
from omnidraft.ports import Announcement, ControlFollower


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
