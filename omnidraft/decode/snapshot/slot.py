"""The snapshot that new requests take, the one before it, ready for a rollback, and the one that is on trial."""

import hashlib
from dataclasses import dataclass, replace

from omnidraft.errors import SnapshotStale
from omnidraft.ports import Proposer
from omnidraft.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class LoadedSnapshot:
    """Weights, n-gram cache and alignment in memory, made for each other and swapped together."""

    version: int | None
    """None for the base drafter that a worker starts with when the registry has nothing."""
    snapshot_id: str
    proposer: Proposer
    cache: object
    """The n-gram cache the proposer translates with."""
    manifest: Manifest | None
    """None for the base drafter."""
    sequence: int = 0
    """Of the announcement it was put in place for; set by who swaps, loaders leave it."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A snapshot on trial."""

    snapshot: LoadedSnapshot
    share: float
    """Of the requests, that it serves."""

    def takes(self, request_id: str) -> bool:
        """The same on every worker."""
        drawn = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") / 2**64
        return drawn < self.share


@dataclass(frozen=True, slots=True)
class _Held:
    current: LoadedSnapshot
    previous: LoadedSnapshot | None = None
    canary: Canary | None = None


class SnapshotSlot:
    """One reference, swapped whole. A request is given its snapshot once and keeps it to its last token.

    Swapping is one attribute assignment, so readers need no lock and can never see half a snapshot. One thread swaps,
    any thread reads. The snapshot before the previous one is freed when the last request that holds it ends.
    """

    def __init__(self, first: LoadedSnapshot) -> None:
        self._held = _Held(first)

    @property
    def current(self) -> LoadedSnapshot:
        return self._held.current

    @property
    def previous(self) -> LoadedSnapshot | None:
        """Still loaded, so that a rollback is a swap."""
        return self._held.previous

    @property
    def canary(self) -> Canary | None:
        return self._held.canary

    @property
    def loaded(self) -> tuple[LoadedSnapshot, ...]:
        """All that are in memory."""
        held = self._held
        return tuple(each for each in (held.current, held.previous, held.canary and held.canary.snapshot) if each)

    def serving(self, request_id: str) -> LoadedSnapshot:
        """The snapshot of this request, the same for all texts of one id."""
        held = self._held
        return held.canary.snapshot if held.canary and held.canary.takes(request_id) else held.current

    def swap(self, offered: LoadedSnapshot) -> None:
        """Put it in place, which ends any canary; the same version again only takes the later sequence.

        Raises:
            SnapshotStale: a later announcement is in place: two loaders raced, keep the winner.
        """
        held = self._held
        if offered.sequence < held.current.sequence:
            raise SnapshotStale(f"have announcement {held.current.sequence}, was offered {offered.sequence}")
        if offered.version == held.current.version:
            self._held = replace(held, current=offered)
        else:
            self._held = _Held(offered, held.current)

    def try_out(self, canary: Canary | None) -> None:
        """Serve its share with it; None ends the trial."""
        self._held = replace(self._held, canary=canary)
