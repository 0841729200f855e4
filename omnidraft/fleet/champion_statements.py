"""Signed statements in the registry, and a registry that makes them.

An alias can be moved by whoever can write to the registry. So each version that becomes champion gets a statement
beside it: the signed announcement that it is the champion, as a DSSE envelope, made before the alias moves. A reader of
the alias follows it only with a statement that is about this snapshot and not older than the last one accepted.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SigningError
from securesystemslib.signer import Signature

from omnidraft.errors import SignatureRefused, SnapshotCorrupt, SnapshotStale, WireError
from omnidraft.fleet.accepted_announcements import AcceptedAnnouncements
from omnidraft.fleet.authentication import (
    PAYLOAD_TYPE,
    AnnouncementSigner,
    SignedLog,
    champion_key,
    content,
    open_signed,
    require_fresh,
    subject_key,
)
from omnidraft.fleet.control_log import announcement_json
from omnidraft.ports import CHAMPION_STATEMENT, Announcement, Registry, SnapshotVersion
from omnidraft.snapshots.keys import TrustedKeys
from omnidraft.snapshots.manifest import digest
from omnidraft.snapshots.signing import SnapshotSigning

ADVICE = "an operator who wants it to serve promotes it: `omnidraft snapshots promote`"
_VOID = "void"


class ChampionStatements:
    """The signed statements of one pair, kept in the registry beside each version, that the version is the champion.

    Args:
        snapshots: verifies a snapshot before it is stated to be the champion.
        max_age_s: the age from which a statement is refused; None: any age, for who reads `log` as well.
        signer: None only checks.
        log: the control log, whose newest champion no statement may be older than. None: what this process accepted
            is all that it knows; a follower of the log shares it.
    """

    def __init__(
        self,
        trusted_keys: TrustedKeys,
        accepted: AcceptedAnnouncements,
        snapshots: SnapshotSigning,
        *,
        scope: str,
        target: str,
        drafter: str,
        max_age_s: float | None,
        signer: AnnouncementSigner | None = None,
        log: SignedLog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._trusted_keys, self._accepted, self._scope = trusted_keys, accepted, scope
        self._snapshots, self._target, self._drafter = snapshots, target, drafter
        self._max_age_s, self._signer, self._log, self._clock = max_age_s, signer, log, clock

    def check(self, champion: SnapshotVersion) -> int:
        """See ports.ChampionStatements. Raises BusError too, when the control log is read and is away."""
        if self._log is not None and (announced := self._log.champion(self._target, self._drafter)) is not None:
            self._record(announced)
        try:
            announcement = self._open(champion)
            self._accepted.check(champion_key(self._scope), announcement.sequence, content(announcement))
        except SignatureRefused as exc:
            raise SignatureRefused(
                f"version {champion.version} is called champion, which nobody vouches for: {exc}; {ADVICE}"
            ) from exc
        self._record(announcement)
        return announcement.sequence

    def is_signed(self, version: SnapshotVersion) -> bool:
        """See ports.ChampionStatements."""
        try:
            self._snapshots.require(version.manifest)
        except SnapshotCorrupt:
            return False
        return True

    def make(self, champion: SnapshotVersion) -> str:
        """See ports.ChampionStatements."""
        if self._signer is None:
            raise AssertionError("made without a signer")
        self._snapshots.require(champion.manifest)
        wire = announcement_json(
            "champion", champion.version, target=self._target, drafter=self._drafter, digest=digest(champion.manifest)
        )
        payload, signatures = self._signer.sign(wire)
        envelope = Envelope(payload, PAYLOAD_TYPE, {name: Signature(name, sig) for name, sig in signatures.items()})
        return json.dumps(envelope.to_dict())

    def _record(self, announcement: Announcement) -> None:
        """Remember it. A new champion also supersedes a canary announced before; the same one again does not."""
        said, key = content(announcement), champion_key(self._scope)
        if not self._accepted.holds(key, said):
            self._accepted.record(subject_key(self._scope, announcement), announcement.sequence, said)
        self._accepted.record(key, announcement.sequence, said)

    def _open(self, champion: SnapshotVersion) -> Announcement:
        if champion.statement is None or champion.statement == _VOID:
            raise SignatureRefused("it has no signed statement")
        try:
            envelope = Envelope.from_dict(json.loads(champion.statement))
            signatures = {name: signature.signature for name, signature in envelope.signatures.items()}
        except (SigningError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise SignatureRefused("its statement cannot be read") from exc
        try:
            announcement = open_signed(envelope.payload, signatures, self._trusted_keys)
        except WireError as exc:
            raise SignatureRefused(f"its statement is refused: {exc}") from exc
        self._require_about(announcement, champion)
        if self._max_age_s is not None:
            require_fresh(announcement, self._max_age_s, self._clock())
        return announcement

    def _require_about(self, announcement: Announcement, champion: SnapshotVersion) -> None:
        stated = (announcement.kind, announcement.target, announcement.drafter, announcement.version)
        if stated != ("champion", self._target, self._drafter, champion.version):
            raise SignatureRefused("its statement is about another version or pair")
        if announcement.digest != digest(champion.manifest):
            raise SignatureRefused("its statement is about another snapshot than the registry has under this version")


class AttestedRegistry(Registry):
    """A registry in which every promotion leaves a signed statement beside the version, before the alias moves."""

    def __init__(self, registry: Registry, statements: ChampionStatements) -> None:
        self._registry, self._statements = registry, statements

    def promote(self, version: int) -> None:
        """See ports.Registry. Raises ConfigError, SnapshotCorrupt when no statement can be made."""
        self._attest(version)
        self._registry.promote(version)

    def promote_unless_changed(self, version: int, fence: str) -> None:
        """See ports.Registry. Raises ConfigError, SnapshotCorrupt when no statement can be made."""
        before = self._registry.resolve(str(version)).statement
        self._attest(version)
        try:
            self._registry.promote_unless_changed(version, fence)
        except SnapshotStale:
            self._registry.annotate(version, {CHAMPION_STATEMENT: before or _VOID})
            raise

    def _attest(self, version: int) -> None:
        statement = self._statements.make(self._registry.resolve(str(version)))
        self._registry.annotate(version, {CHAMPION_STATEMENT: statement})

    def resolve(self, name: str) -> SnapshotVersion:
        return self._registry.resolve(name)

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        return self._registry.fetch(version, into, parts)

    def publish(self, bundle: Path, parent: int | None) -> SnapshotVersion:
        return self._registry.publish(bundle, parent)

    def versions(self, newest: int | None = None) -> tuple[SnapshotVersion, ...]:
        return self._registry.versions(newest)

    def fence(self) -> str:
        return self._registry.fence()

    def annotate(self, version: int, notes: Mapping[str, str]) -> None:
        self._registry.annotate(version, notes)

    def log_metrics(self, version: int, metrics: Mapping[str, float], step: int) -> None:
        self._registry.log_metrics(version, metrics, step)

    def log_file(self, version: int, path: Path) -> None:
        self._registry.log_file(version, path)

    def remove_files(self, version: int, parts: Sequence[str]) -> None:
        self._registry.remove_files(version, parts)
