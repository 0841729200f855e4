"""Signed values of the control log: who may sign which, and how old they may be.

The signatures are in the message's header `signatures`, as JSON from key id to hex, over its whole value, so that what
is signed has its key, sequence and time in it. A process follows the newest of each key, so an old one that is written
again is refused; one that serves is refused after MAX_AGE_S, for who starts beside a log that lost the newer ones.
"""

import json
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from omnidraft.errors import ConfigError, SignatureRefused
from omnidraft.ports import Champion, Entry
from omnidraft.snapshots.keys import PrivateKey, Role, TrustedKeys

HEADER = "signatures"
PAYLOAD_TYPE = "application/vnd.omnidraft.control+json"
MAX_AGE_S = 7 * 24 * 3600.0
"""The age from which no champion or canary is taken up, so that old ones cannot be replayed to who starts, nor does a
controller that was away over a weekend leave workers without. It puts the champion again four times as often."""
UNSIGNED_KINDS = frozenset({"worker"})
"""What anybody may write: each says something of itself alone."""
SIGNERS: Mapping[str, tuple[Role, ...]] = {
    **dict.fromkeys(("champion", "canary", "drift", "rewind", "order", "lease"), ("controller", "operator")),
    "best": ("distiller", "operator"),
}

_SIGNATURES = TypeAdapter(dict[str, str])


class ControlSigning:
    """Signs what this process puts, and tells genuine values from others.

    Args:
        private_key: without one, whatever has to be signed is a ConfigError.
    """

    def __init__(self, private_key: PrivateKey | None, trusted_keys: TrustedKeys) -> None:
        self._private_key, self._trusted_keys = private_key, trusted_keys

    def headers(self, kind: str, payload: bytes) -> dict[str, bytes]:
        """Return the headers of a message with this value. Raises ConfigError when this process may not sign it."""
        if kind in UNSIGNED_KINDS:
            return {}
        key = self.require_signer(signers(kind))
        return {HEADER: json.dumps({key.key_id: key.sign(payload, PAYLOAD_TYPE)}).encode()}

    def require_signer(self, roles: Sequence[Role]) -> PrivateKey:
        """Return the private key. Raises ConfigError where this process has none with one of these roles."""
        if self._private_key is None:
            raise ConfigError(
                f"registry.trusted_keys is set, so this process has to sign: set registry.private_key, that of a "
                f"trusted {' or '.join(roles)}"
            )
        self._trusted_keys.require_role(self._private_key, roles)
        return self._private_key

    def check(self, entry: Entry, payload: bytes, headers: Mapping[str, bytes], now_s: float) -> None:
        """Raise SignatureRefused unless somebody who may signed the entry, and not too long ago."""
        if entry.kind in UNSIGNED_KINDS:
            return
        try:
            signatures = _SIGNATURES.validate_json(headers.get(HEADER, b"{}"))
        except ValidationError as exc:
            raise SignatureRefused(f"its header {HEADER} holds no signatures") from exc
        if not signatures:
            raise SignatureRefused("it has no signature, and registry.trusted_keys asks for one")
        self._trusted_keys.verify(payload, PAYLOAD_TYPE, signatures, signers(entry.kind))
        if isinstance(entry.value, Champion):  # or a canary
            _require_fresh(entry, now_s)
            if entry.value.digest is None:
                raise SignatureRefused("it was signed without the digest of its snapshot")


def signers(kind: str) -> tuple[Role, ...]:
    """Return the roles that may put this kind; an operator's alone unless another is named."""
    return SIGNERS.get(kind, ("operator",))


def _require_fresh(entry: Entry, now_s: float) -> None:
    age_s = now_s - entry.at_ms / 1000
    if age_s > MAX_AGE_S:
        raise SignatureRefused(
            f"it was signed {age_s / 3600:.1f} hours ago, more than {MAX_AGE_S / 3600:.0f}; the "
            "controller puts the champion again: see that it runs, and that clocks agree"
        )
