"""The throttle of drafting for traffic that drifts, by tenant and kind of request."""

from omnidraft.ports import Announcement, DriftingTraffic, Work

DRIFTED_DRAFT_TOKENS = 3
"""The tokens that are drafted at most for a tenant's requests of a kind whose agreement fell, until the drift is over:
enough to see that it is."""


class DriftThrottle:
    """Drafts less for traffic that drifts, because most draft tokens would be rejected. One thread updates
    it, any thread reads it."""

    def __init__(self, num_draft_tokens: int = DRIFTED_DRAFT_TOKENS) -> None:
        """Draft at most `num_draft_tokens` per pass while traffic drifts."""
        self._num_draft_tokens = num_draft_tokens
        self._drifting = DriftingTraffic()

    def on_announcement(self, announcement: Announcement) -> None:
        """Apply a `drift` or `drift_over` announcement; ignore all others."""
        self._drifting = self._drifting.after(announcement)

    def limit(self, tenant: str, work: Work, num_draft_tokens: int) -> int:
        """Return the number of tokens, `num_draft_tokens` at most, that may be drafted for this tenant's requests of a
        kind that trace records tell (ports.recorded_work)."""
        drifts = self._drifting.includes(tenant, work)
        return min(num_draft_tokens, self._num_draft_tokens) if drifts else num_draft_tokens
