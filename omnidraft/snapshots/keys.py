"""Key pairs that sign snapshots, control values and receipts, and the roles of their owners.

Signatures are Ed25519 over DSSE's pre-authentication encoding (https://github.com/secure-systems-lab/dsse), made and
verified by securesystemslib, the signer of TUF and in-toto: the type of what is signed is signed with it, so that a
signature of one kind never passes for one of another.
A private key is `ed25519-private:KEY`, a public one `ROLE:ed25519:KEY`, both 32 bytes in URL-safe base64.
"""

import base64
import copy
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SigningError
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey

from omnidraft.config.secrets import PRIVATE_KEY_PREFIX
from omnidraft.errors import ConfigError, SignatureRefused

END_MS = 253_402_300_800_000
"""Unix milliseconds at which the year 10000 begins, of which no date can be shown."""
Role = Literal["distiller", "controller", "operator", "worker"]


class PrivateKey:
    """Signs. Whoever holds one is what the role of its public key says."""

    def __init__(self, text: str) -> None:
        """`text` is a private key that the settings accept."""
        secret = Ed25519PrivateKey.from_private_bytes(_decode(text.removeprefix(PRIVATE_KEY_PREFIX)))
        self.signer = CryptoSigner(secret, _public_key(secret.public_key().public_bytes_raw()))

    @property
    def key_id(self) -> str:
        """The id of its public key."""
        return self.signer.public_key.keyid

    def public_text(self, role: Role) -> str:
        """Return the public key for `registry.trusted_keys`."""
        public = bytes.fromhex(self.signer.public_key.keyval["public"])
        return f"{role}:ed25519:{base64.urlsafe_b64encode(public).decode()}"

    def sign(self, payload: bytes, payload_type: str) -> str:
        """Return the signature in hex."""
        return Envelope(payload, payload_type, {}).sign(self.signer).signature


def envelope(payload: bytes, payload_type: str, key: PrivateKey | None) -> dict[str, Any]:
    """Return a payload as DSSE has it in JSON, with the signature by this key if there is one."""
    made = Envelope(payload, payload_type, {})
    if key is not None:
        made.signatures[key.key_id] = made.sign(key.signer)
    document: dict[str, Any] = made.to_dict()
    return document


def read_envelope(document: Mapping[str, Any], payload_type: str) -> tuple[bytes, dict[str, str]]:
    """Return the payload of a DSSE envelope of this type, not verified, and its signatures (key id -> hex).

    Raises:
        SignatureRefused: it is none.
    """
    try:
        envelope = Envelope.from_dict(copy.deepcopy(dict(document)))
    except (SigningError, LookupError, TypeError, ValueError, AttributeError) as exc:
        raise SignatureRefused(f"it is no signed document: {exc!r}") from exc
    if envelope.payload_type != payload_type:
        raise SignatureRefused(f"it is signed as {envelope.payload_type}, not as {payload_type}")
    return envelope.payload, {key_id: each.signature for key_id, each in envelope.signatures.items()}


def new_private_key() -> str:
    """Return a fresh private key."""
    secret = Ed25519PrivateKey.generate().private_bytes_raw()
    return PRIVATE_KEY_PREFIX + base64.urlsafe_b64encode(secret).decode()


class TrustedKeys:
    """The public keys of those who may sign. It verifies and cannot sign."""

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts` are public keys that the settings accept."""
        self._keys: dict[str, SSlibKey] = {}
        self._roles: dict[str, set[Role]] = {}
        for text in texts:
            role, _, encoded = text.split(":")
            key = _public_key(_decode(encoded))
            self._keys[key.keyid] = key
            self._roles.setdefault(key.keyid, set()).add(cast(Role, role))

    def verify(self, payload: bytes, payload_type: str, signatures: Mapping[str, str], roles: Collection[Role]) -> None:
        """Raise SignatureRefused unless one of these signatures (key id -> hex) is of a trusted key with one of these
        roles."""
        keys = [key for key_id, key in self._keys.items() if self._roles[key_id].intersection(roles)]
        envelope = Envelope(payload, payload_type, {name: Signature(name, sig) for name, sig in signatures.items()})
        try:
            envelope.verify(list(keys), threshold=1)
        except (SigningError, ValueError) as exc:
            wanted = " or ".join(f"a trusted {role}" for role in roles)
            raise SignatureRefused(f"it was changed, or not signed by {wanted} (registry.trusted_keys)") from exc

    def require_role(self, key: PrivateKey, roles: Collection[Role]) -> None:
        """Raise ConfigError unless this key may sign what these roles sign."""
        has = self._roles.get(key.key_id, set())
        if not has:
            raise ConfigError("the public key of registry.private_key is not one of registry.trusted_keys; add it")
        if not has.intersection(roles):
            needed = " or ".join(roles)
            raise ConfigError(f"registry.private_key is a {'/'.join(sorted(has))}'s key, this needs that of {needed}")


def _public_key(raw: bytes) -> SSlibKey:
    return SSlibKey(hashlib.sha256(raw).hexdigest(), "ed25519", "ed25519", {"public": raw.hex()})


def _decode(encoded: str) -> bytes:
    return base64.b64decode(encoded, altchars=b"-_", validate=True)
