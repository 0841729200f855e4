"""The snapshot that serves new requests, the previous one for a rollback, and the canary."""

import hashlib
from dataclasses import dataclass, replace

from omnidraft.decode.drafting.loaded_factors import LoadedFactors
from omnidraft.decode.snapshot.tenant_rules import TenantRules
from omnidraft.ports import Proposer
from omnidraft.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class LoadedSnapshot:
    """Weights, n-gram cache and alignment in memory, made for each other and swapped together."""

    version: int | None
    """None for the base drafter that a worker starts with when the registry is empty."""
    snapshot_id: str
    proposer: Proposer
    cache: object
    """The proposer's n-gram cache."""
    manifest: Manifest | None
    """None for the base drafter."""
    factors: LoadedFactors | None = None
    """The tenants whose own factors the proposer uses; None: there are none."""

    def forget_factors(self, rules: TenantRules) -> None:
        """Free the factors of tenants that were forgotten since the snapshot was made."""
        if self.factors is not None and self.manifest is not None:
            for tenant in self.factors.tenants:
                if rules.is_forgotten(tenant, self.manifest):
                    self.factors.forget(tenant)


@dataclass(frozen=True, slots=True)
class Canary:
    """A snapshot that serves a share of the requests on trial."""

    snapshot: LoadedSnapshot
    share: float
    """Share of requests, from 0 to 1."""

    def takes(self, request_id: str) -> bool:
        """Return whether it serves this request; the same on every worker."""
        drawn = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") / 2**64
        return drawn < self.share


@dataclass(frozen=True, slots=True)
class _SlotState:
    current: LoadedSnapshot
    previous: LoadedSnapshot | None = None
    canary: Canary | None = None


class SnapshotSlot:
    """One reference, swapped whole. A request takes its snapshot once and uses it to its last token.

    Swapping is one attribute assignment, so readers need no lock and can never see half a snapshot. One thread swaps,
    any thread reads. The snapshot before the previous one is freed when the last request that holds it ends.
    """

    def __init__(self, first: LoadedSnapshot, rules: TenantRules | None = None) -> None:
        """`rules` are those of the loader of its snapshots."""
        self._state = _SlotState(first)
        self.rules = rules or TenantRules()

    @property
    def current(self) -> LoadedSnapshot:
        return self._state.current

    @property
    def previous(self) -> LoadedSnapshot | None:
        """Still loaded, so that a rollback is a swap."""
        return self._state.previous

    @property
    def canary(self) -> Canary | None:
        return self._state.canary

    @property
    def serving(self) -> tuple[LoadedSnapshot, ...]:
        """The snapshots of new requests."""
        state = self._state
        return (state.current,) if state.canary is None else (state.current, state.canary.snapshot)

    @property
    def loaded(self) -> tuple[LoadedSnapshot, ...]:
        """All snapshots in memory."""
        state = self._state
        return tuple(each for each in (state.current, state.previous, state.canary and state.canary.snapshot) if each)

    def snapshot_for(self, request_id: str) -> LoadedSnapshot:
        """Return the snapshot of this request, the same for all texts of one id."""
        state = self._state
        return state.canary.snapshot if state.canary and state.canary.takes(request_id) else state.current

    def swap(self, offered: LoadedSnapshot) -> None:
        """Serve this snapshot, which ends any canary."""
        offered.forget_factors(self.rules)  # of who was forgotten during its load
        self._state = _SlotState(offered, self._state.current)

    def forget_factors(self) -> None:
        """Free the factors of tenants that were forgotten."""
        for each in self.loaded:
            each.forget_factors(self.rules)

    def drop_previous(self) -> None:
        """Free the previous snapshot; a rollback has to load it again."""
        self._state = replace(self._state, previous=None)

    def set_canary(self, canary: Canary | None) -> None:
        """Serve a share of requests with the canary; None ends the trial."""
        if canary is not None:
            canary.snapshot.forget_factors(self.rules)
        self._state = replace(self._state, canary=canary)
