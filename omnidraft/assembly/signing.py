"""How processes sign and verify: private keys, trusted keys, and the age that signed values may have."""

from collections.abc import Sequence
from math import inf

from omnidraft.config import Settings
from omnidraft.decode.receipt import ModelIdentity, ReceiptSigner
from omnidraft.fleet.control_signing import MAX_AGE_S, ControlSigning
from omnidraft.snapshots.keys import PrivateKey, Role, TrustedKeys
from omnidraft.snapshots.signing import SnapshotSigning


def snapshot_signing(settings: Settings) -> SnapshotSigning:
    """Return how this process signs and verifies snapshots."""
    return SnapshotSigning(_private_key(settings), _trusted_keys(settings))


def control_signing(settings: Settings) -> ControlSigning | None:
    """Return how this process signs and verifies values of the control log; None without keys."""
    trusted = _trusted_keys(settings)
    return None if trusted is None else ControlSigning(_private_key(settings), trusted)


def receipt_signer(settings: Settings, identity: ModelIdentity) -> ReceiptSigner | None:
    """Return what signs receipts of a model's answers; None without a key."""
    secret = settings.worker.receipt_key
    return None if secret is None else ReceiptSigner(PrivateKey(secret.get_secret_value()), identity)


def require_signer(settings: Settings, roles: Sequence[Role]) -> None:
    """Raise ConfigError where keys are set and this process has none with one of these roles."""
    if (signing := control_signing(settings)) is not None:
        signing.require_signer(roles)


def follows_registry(settings: Settings) -> bool:
    """Return whether a worker takes the registry's word for the champion, until the control log names one."""
    return not settings.registry.trusted_keys


def restate_s(settings: Settings) -> float:
    """Return the age at which the controller puts the champion again; inf: never, nothing is signed."""
    return MAX_AGE_S / 4 if settings.registry.trusted_keys else inf


def _private_key(settings: Settings) -> PrivateKey | None:
    secret = settings.registry.private_key
    return None if secret is None else PrivateKey(secret.get_secret_value())


def _trusted_keys(settings: Settings) -> TrustedKeys | None:
    keys = settings.registry.trusted_keys
    return TrustedKeys(keys) if keys else None
