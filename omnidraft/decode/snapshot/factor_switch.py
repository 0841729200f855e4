"""Which tenants draft with factors of their own: all that a snapshot has some for, but those that were turned off by an
operator, and those that were forgotten since the factors were made."""

from collections import defaultdict

from omnidraft.ports import Announcement
from omnidraft.snapshots.manifest import Manifest


class FactorSwitch:
    """Follows announcements. One thread updates it, any thread reads it."""

    def __init__(self) -> None:
        self._off: frozenset[str] = frozenset()
        self._forgets: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        """The orders to forget each tenant."""

    def on_announcement(self, announcement: Announcement) -> None:
        """Apply `factors_off`, `factors_on` and `forget`; ignore all others."""
        tenant = announcement.tenant
        if tenant is None:
            return
        match announcement.kind:
            case "factors_off":
                self._off |= {tenant}
            case "factors_on":
                self._off -= {tenant}
            case "forget" if announcement.forget_id is not None:
                self._forgets[tenant] |= {announcement.forget_id}

    def serves(self, tenant: str, manifest: Manifest) -> bool:
        """Return whether the tenant may draft with the factors of this snapshot."""
        return tenant not in self._off and not self.is_forgotten(tenant, manifest)

    def is_forgotten(self, tenant: str, manifest: Manifest) -> bool:
        """Return whether the snapshot was made before an order to forget the tenant was carried out."""
        return any(order not in manifest.forgets for order in self._forgets.get(tenant, ()))
