"""The traffic that drifts by the announcements so far, of each tenant and kind of request."""

from dataclasses import dataclass

from omnidraft.ports.control import Announcement
from omnidraft.ports.decoding import Work


@dataclass(frozen=True, slots=True)
class DriftingTraffic:
    """The drifts that have begun and are not over. A controller of an earlier version names no kind: it means all."""

    streams: frozenset[tuple[str, Work | None]] = frozenset()

    def after(self, announcement: Announcement) -> "DriftingTraffic":
        """Return the traffic that drifts after a `drift` or `drift_over`; any other announcement changes nothing."""
        tenant, work = announcement.tenant, announcement.work
        if tenant is None:
            return self
        match announcement.kind:
            case "drift":
                return DriftingTraffic(self.streams | {(tenant, work)})
            case "drift_over" if work is None:
                return DriftingTraffic(frozenset(each for each in self.streams if each[0] != tenant))
            case "drift_over":
                return DriftingTraffic(self.streams - {(tenant, work), (tenant, None)})
        return self

    def includes(self, tenant: str, work: Work | None = None) -> bool:
        """Return whether this traffic drifts; without a kind, whether any of the tenant's does."""
        return any(each[0] == tenant and (work is None or each[1] in (work, None)) for each in self.streams)

    def __bool__(self) -> bool:
        return bool(self.streams)
