"""The control log: announcements from one process to all others, and the protocols of its producer and consumer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict, Unpack

from omnidraft.ports.decoding import Work
from omnidraft.ports.registry import SnapshotVersion

AnnouncementKind = Literal[
    "champion",
    "canary",
    "pause",
    "resume",
    "restart",
    "rewind",
    "drift",
    "drift_over",
    "best",
    "forget",
    "factors_off",
    "factors_on",
]


@dataclass(frozen=True, slots=True)
class Announcement:
    """A message on the control log. Of several about the same subject the one with the highest sequence holds."""

    sequence: int
    """The offset of this message in the control log; of a signed one, the sequence that was signed."""
    kind: AnnouncementKind
    version: int | None = None
    target: str | None = None
    """The target of the pair it is about; a message that names neither target nor drafter is about every pair."""
    drafter: str | None = None
    share: float | None = None
    """The share of the requests that a canary serves."""
    tenant: str | None = None
    """The tenant whose traffic changed, who is to be forgotten, or whose factors are turned off or on."""
    reason: str | None = None
    """A sentence for operators."""
    start: str | None = None
    """The position at which learning continues: `earliest`, `latest`, or offsets such as `0:120 1:96`."""
    restart_id: str | None = None
    """Names one restart or rewind, so that no process carries it out twice; a rewind has the refused snapshot's id."""
    forget_id: str | None = None
    """Names one order to forget a tenant, so that manifests can say that it was carried out."""
    until_ms: int | None = None
    """Unix milliseconds: the order concerns the tenant's records up to then, the newest that there was when it was
    given."""
    fence: str | None = None
    """The registry's fence from before the version was chosen; see Registry.fence."""
    digest: str | None = None
    """The digest of the snapshot's manifest: whatever the registry has under this version, it must be that one."""
    issued_ms: int | None = None
    """When it was signed; None: it is not signed."""
    work: Work | None = None
    """The kind of request whose agreement changed; None: every kind, as controllers before this field announced."""
    level: float | None = None
    """The mean agreement before it fell, for a drift and its end; None: not known, as before this field."""


class AnnouncementFields(TypedDict, total=False):
    """Optional fields of an announcement about one pair; see Announcement."""

    share: float
    tenant: str
    reason: str
    fence: str
    restart_id: str
    digest: str
    work: Work
    level: float | None


class Announcer(Protocol):
    """Publishes announcements about one pair."""

    def publish(self, kind: AnnouncementKind, version: int | None = None, **fields: Unpack[AnnouncementFields]) -> None:
        """Publish to every process. Repeating an announcement does no harm.

        Raises:
            BusError: the log cannot be written.
            ValueError: this kind needs another field, or has none of these.
        """


class ControlFollower(Protocol):
    """Consumes the announcements that concern one process."""

    def poll(self, timeout_s: float) -> Sequence[Announcement]:
        """Return the announcements in force that were not returned before, waiting up to `timeout_s` for one.

        Raises:
            BusError: the log cannot be read; polling again may succeed, and nothing is lost.
        """

    def poll_all(self, timeout_s: float) -> Sequence[Announcement]:
        """Do what `poll` does, for a start: nothing that the log holds by now is missing.

        Raises:
            BusError: the log cannot be read, or gave nothing for `timeout_s` before its end; then it may be repeated,
                and nothing is lost.
        """


class ChampionStatements(Protocol):
    """The signed statements, kept in the registry beside each version, that the version is the champion. They bind a
    reader of the alias to what a controller or an operator decided."""

    def check(self, champion: SnapshotVersion) -> int:
        """Return the sequence of the statement about this champion, and remember it.

        Raises:
            SignatureRefused: there is none, nobody who may sign one did, it is about another snapshot, or it is older
                than one accepted before.
        """

    def is_signed(self, version: SnapshotVersion) -> bool:
        """Return whether somebody who may sign snapshots signed this one, with all that its manifest says."""

    def make(self, champion: SnapshotVersion) -> str:
        """Return a new statement that this version is the champion.

        Raises:
            ConfigError: this process has no private key, or one that may not sign announcements.
            SnapshotCorrupt: nobody who may sign snapshots signed this one.
        """


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
