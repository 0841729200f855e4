"""Keys of snapshots and announcements, and what signs and verifies with them. Without keys all of it is None."""

from collections.abc import Callable, Sequence

from omnidraft.config import Settings
from omnidraft.errors import ConfigError
from omnidraft.fleet.accepted_announcements import AcceptedAnnouncements
from omnidraft.fleet.authentication import AnnouncementSigner, Authenticator, SignedLog, SigningWriter
from omnidraft.fleet.champion_statements import AttestedRegistry, ChampionStatements
from omnidraft.ports import LogReader, LogWriter, Registry, SnapshotVersion
from omnidraft.snapshots.keys import PrivateKey, Role, TrustedKeys
from omnidraft.snapshots.signing import SnapshotSigning

OpenReader = Callable[[], LogReader]
MAX_AGE_S = 7 * 24 * 3600.0
"""The age from which workers take no champion or canary from an announcement, so that old ones cannot be replayed, nor
does a controller that was away over a weekend leave them without. It announces the champion again four times as
often."""


def snapshot_signing(settings: Settings) -> SnapshotSigning:
    """Return how this process signs and verifies snapshots."""
    return SnapshotSigning(_private_key(settings), _trusted_keys(settings))


def authenticator(settings: Settings, *, is_remembering: bool = True) -> Authenticator | None:
    """Return what verifies the announcements about `models.target` and its drafter.

    Args:
        is_remembering: whether what is accepted is remembered, and nothing older accepted afterwards.

    Raises:
        StorageError: `registry.accepted_file` cannot be used.
    """
    if (trusted := _trusted_keys(settings)) is None:
        return None

    accepted = AcceptedAnnouncements(settings.registry.accepted_file) if is_remembering else None
    return Authenticator(trusted, accepted, scope=_scope(settings), max_age_s=MAX_AGE_S)


def signing_writer(settings: Settings, writer: LogWriter, open_reader: OpenReader) -> LogWriter:
    """Return a writer of the control topic that signs, or the same writer without keys."""
    if (trusted := _trusted_keys(settings)) is None:
        return writer

    return SigningWriter(writer, _signer(settings, trusted, SignedLog(open_reader, trusted)))


def champion_statements(settings: Settings, open_reader: OpenReader | None = None) -> ChampionStatements | None:
    """Return what checks, and with a reader of the control topic also makes, the statements about champions.

    Raises:
        StorageError: `registry.accepted_file` cannot be used.
    """
    if (trusted := _trusted_keys(settings)) is None:
        return None

    log = None if open_reader is None else SignedLog(open_reader, trusted)
    return ChampionStatements(
        trusted,
        AcceptedAnnouncements(settings.registry.accepted_file),
        snapshot_signing(settings),
        scope=_scope(settings),
        target=settings.models.target,
        drafter=settings.models.followed_drafter,
        max_age_s=MAX_AGE_S if log is None else None,
        signer=None if log is None else _signer(settings, trusted, log),
        log=log,
    )


def champion_check(settings: Settings) -> Callable[[SnapshotVersion], int] | None:
    """Return what checks the statement about a champion; see ChampionStatements.check."""
    statements = champion_statements(settings)
    return None if statements is None else statements.check


def attested(settings: Settings, registry: Registry, open_reader: OpenReader) -> Registry:
    """Return a registry whose promotions leave signed statements, or the same registry without keys."""
    statements = champion_statements(settings, open_reader)
    if statements is None:
        return registry

    return AttestedRegistry(registry, statements)


def require_signer(settings: Settings, roles: Sequence[Role]) -> None:
    """Raise ConfigError where keys are set and this process has none with one of these roles."""
    if (trusted := _trusted_keys(settings)) is None:
        return
    if (key := _private_key(settings)) is None:
        raise ConfigError(
            f"registry.trusted_keys is set, so this process has to sign: set registry.private_key, that of a trusted "
            f"{' or '.join(roles)}"
        )
    trusted.require_role(key, roles)


def restate_s(settings: Settings) -> float | None:
    """Return the seconds after which the controller announces the champion again; None: never, nothing is signed."""
    return MAX_AGE_S / 4 if settings.registry.trusted_keys else None


def _signer(settings: Settings, trusted: TrustedKeys, log: SignedLog) -> AnnouncementSigner:
    return AnnouncementSigner(_private_key(settings), trusted, log)


def _private_key(settings: Settings) -> PrivateKey | None:
    secret = settings.registry.private_key
    if secret is None:
        return None

    return PrivateKey(secret.get_secret_value())


def _trusted_keys(settings: Settings) -> TrustedKeys | None:
    if not settings.registry.trusted_keys:
        return None

    return TrustedKeys(settings.registry.trusted_keys)


def _scope(settings: Settings) -> str:
    return f"{settings.models.followed_drafter} {settings.models.target}"
