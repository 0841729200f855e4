"""The throttle of drafting for tenants whose traffic drifts."""

from omnidraft.ports import Announcement


class DriftThrottle:
    """Drafts less for tenants whose traffic drifts, because most draft tokens would be rejected. One thread updates
    it, any thread reads it."""

    def __init__(self, num_draft_tokens: int) -> None:
        """Draft at most `num_draft_tokens` per pass while traffic drifts."""
        self._num_draft_tokens = num_draft_tokens
        self._drifting: frozenset[str] = frozenset()

    def on_announcement(self, announcement: Announcement) -> None:
        """Apply a `drift` or `drift_over` announcement; ignore all others."""
        if announcement.tenant is not None and announcement.kind == "drift":
            self._drifting |= {announcement.tenant}
        elif announcement.tenant is not None and announcement.kind == "drift_over":
            self._drifting -= {announcement.tenant}

    def limit(self, tenant: str, num_draft_tokens: int) -> int:
        """Return the number of tokens, `num_draft_tokens` at most, that may be drafted for this tenant."""
        return min(num_draft_tokens, self._num_draft_tokens) if tenant in self._drifting else num_draft_tokens
