"""Who signs and who verifies the snapshots of a registry."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnidraft.errors import SignatureRefused, SnapshotCorrupt
from omnidraft.snapshots.manifest import Manifest, require_signature, sign, signed_payload

if TYPE_CHECKING:
    from omnidraft.snapshots.keys import PrivateKey, Role, TrustedKeys

PAYLOAD_TYPE = "application/vnd.omnidraft.snapshot+json"
SIGNERS: "tuple[Role, ...]" = ("distiller", "operator")


@dataclass(frozen=True, slots=True)
class SnapshotSigning:
    """The keys of one process. Without any, nothing is signed and nothing verified."""

    shared_key: str | None = None
    """`registry.signing_key`. Beside trusted keys it only verifies, and only snapshots that nobody signed with a
    private key."""
    private_key: "PrivateKey | None" = None
    trusted_keys: "TrustedKeys | None" = None

    def sign(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the signature of this process.

        Raises:
            ConfigError: the private key may not sign snapshots.
            SnapshotCorrupt: it has no trusted signature, and this process has no private key to give it one.
        """
        if self.trusted_keys is None:
            return sign(manifest, self.shared_key)
        if self.private_key is None:
            self.require(manifest)
            return manifest
        self.trusted_keys.require_role(self.private_key, SIGNERS)
        signature = self.private_key.sign(signed_payload(manifest), PAYLOAD_TYPE)
        return manifest.model_copy(
            update={"signature": None, "signatures": manifest.signatures | {self.private_key.key_id: signature}}
        )

    def require(self, manifest: Manifest) -> None:
        """Raise SnapshotCorrupt unless the manifest has a signature that this process trusts."""
        if self.trusted_keys is None:
            require_signature(manifest, self.shared_key)
        elif manifest.signatures:
            self._require_trusted(manifest, self.trusted_keys)
        elif manifest.signature is not None and self.shared_key is not None:
            require_signature(manifest, self.shared_key)
        else:
            raise SnapshotCorrupt(f"snapshot {manifest.snapshot_id} {_what_is_missing(manifest)}")

    def _require_trusted(self, manifest: Manifest, trusted_keys: "TrustedKeys") -> None:
        try:
            trusted_keys.verify(signed_payload(manifest), PAYLOAD_TYPE, manifest.signatures, SIGNERS)
        except SignatureRefused as exc:
            advice = "publish it again from a copy that you trust"
            raise SnapshotCorrupt(f"snapshot {manifest.snapshot_id} is refused: {exc}; {advice}") from exc


def _what_is_missing(manifest: Manifest) -> str:
    if manifest.signature is None:
        return (
            "has no signature, and registry.trusted_keys asks for one; publish it where registry.private_key is "
            "set, or sign it: `omnidraft snapshots sign VERSION`"
        )
    return (
        "has only a signature with a shared registry.signing_key, which registry.trusted_keys replaced; sign it again "
        "with `omnidraft snapshots sign VERSION`, or keep registry.signing_key configured until no such snapshot serves"
    )


UNSIGNED = SnapshotSigning()
"""No keys."""
