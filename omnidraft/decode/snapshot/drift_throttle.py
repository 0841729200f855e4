"""Whose traffic drifted: little is drafted for them until that is over, for most of it would be wrong."""

from omnidraft.ports import Announcement


class DriftThrottle:
    """One thread hears, any thread asks."""

    def __init__(self, num_draft_tokens: int) -> None:
        """`num_draft_tokens` per pass at most, while traffic drifts."""
        self._num_draft_tokens = num_draft_tokens
        self._drifting: frozenset[str] = frozenset()

    def on_announcement(self, told: Announcement) -> None:
        """Takes in `drift` and `drift_over`; anything else says nothing to it."""
        if told.tenant is not None and told.kind == "drift":
            self._drifting |= {told.tenant}
        elif told.tenant is not None and told.kind == "drift_over":
            self._drifting -= {told.tenant}

    def limit(self, tenant: str, num_draft_tokens: int) -> int:
        """Of these, as many as may be drafted for this tenant."""
        return min(num_draft_tokens, self._num_draft_tokens) if tenant in self._drifting else num_draft_tokens
