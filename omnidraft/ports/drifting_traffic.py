"""The traffic that drifts by the announcements so far, of each tenant and kind of request."""

from dataclasses import dataclass

from omnidraft.ports.control import Announcement
from omnidraft.ports.decoding import Work


@dataclass(frozen=True, slots=True)
class DriftingTraffic:
    """The drifts that have begun and are not over. A controller of an earlier version names no kind and means all
    kinds, until one that names a kind announces anything about the tenant."""

    streams: frozenset[tuple[str, Work | None]] = frozenset()

    def after(self, announcement: Announcement) -> "DriftingTraffic":
        """Return the traffic that drifts after a `drift` or `drift_over`; any other announcement changes nothing."""
        tenant, work, kind = announcement.tenant, announcement.work, announcement.kind
        if tenant is None or kind not in ("drift", "drift_over"):
            return self
        kept = {
            each for each in self.streams if each[0] != tenant or (work is not None and each[1] not in (work, None))
        }
        return DriftingTraffic(frozenset(kept | {(tenant, work)} if kind == "drift" else kept))

    def includes(self, tenant: str, work: Work | None = None) -> bool:
        """Return whether this traffic drifts; without a kind, whether any of the tenant's does."""
        return any(each[0] == tenant and (work is None or each[1] in (work, None)) for each in self.streams)

    def __bool__(self) -> bool:
        return bool(self.streams)
