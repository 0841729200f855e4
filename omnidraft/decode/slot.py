"""The snapshot that new requests take, and the one before it, ready for a rollback."""

from dataclasses import dataclass

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
class _Held:
    current: LoadedSnapshot
    previous: LoadedSnapshot | None


class SnapshotSlot:
    """One reference, swapped whole. A request takes `current` once and keeps it to its last token.

    Swapping is one attribute assignment, so readers need no lock and can never see half a snapshot. One thread swaps,
    any thread reads. The snapshot before the previous one is freed when the last request that holds it ends.
    """

    def __init__(self, first: LoadedSnapshot) -> None:
        self._held = _Held(first, None)

    @property
    def current(self) -> LoadedSnapshot:
        return self._held.current

    @property
    def previous(self) -> LoadedSnapshot | None:
        """Still loaded, so that a rollback is a swap."""
        return self._held.previous

    def swap(self, offered: LoadedSnapshot) -> None:
        """Put it in place; the same version again only takes the later sequence, and `previous` stays.

        Raises:
            SnapshotStale: a later announcement is in place: two loaders raced, keep the winner.
        """
        held = self._held
        if offered.sequence < held.current.sequence:
            raise SnapshotStale(f"have announcement {held.current.sequence}, was offered {offered.sequence}")
        is_same = offered.version == held.current.version
        self._held = _Held(offered, held.previous if is_same else held.current)
