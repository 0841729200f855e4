"""What holds for tenants by the control log: whose traffic drifts, whose own factors serve, and who was forgotten."""

from omnidraft.ports import ControlState, Work
from omnidraft.snapshots.manifest import Manifest

DRIFTED_DRAFT_TOKENS = 3
"""The tokens that are drafted at most for a tenant's requests of a kind whose agreement fell, until the drift is over:
enough to see that it is."""


class TenantRules:
    """One thread replaces the state, any thread asks."""

    def __init__(self, num_draft_tokens: int = DRIFTED_DRAFT_TOKENS) -> None:
        """Draft at most `num_draft_tokens` per pass while traffic drifts: most would be rejected."""
        self._num_draft_tokens = num_draft_tokens
        self.state = ControlState()

    def limit(self, tenant: str, work: Work, num_draft_tokens: int) -> int:
        """Return the number of tokens, `num_draft_tokens` at most, that may be drafted for this tenant's requests of a
        kind that trace records tell (ports.recorded_work)."""
        drifts = self.state.is_drifting(tenant, work)
        return min(num_draft_tokens, self._num_draft_tokens) if drifts else num_draft_tokens

    def serves_factors(self, tenant: str, manifest: Manifest) -> bool:
        """Return whether the tenant may draft with the factors of this snapshot."""
        return not self.state.has_factors_off(tenant) and not self.is_forgotten(tenant, manifest)

    def is_forgotten(self, tenant: str, manifest: Manifest) -> bool:
        """Return whether the snapshot was made before the order to forget the tenant was carried out."""
        order = self.state.forget(tenant)
        return order is not None and order.id not in manifest.forgets

    def was_forgotten_since(self, tenant: str, time_ms: int) -> bool:
        """Return whether the tenant was forgotten after this time, Unix milliseconds."""
        order = self.state.forget(tenant)
        return order is not None and time_ms <= order.until_ms
