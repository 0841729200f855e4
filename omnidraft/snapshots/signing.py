"""Who signs and who verifies the snapshots of a registry."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnidraft.errors import SignatureRefused, SnapshotCorrupt
from omnidraft.snapshots.manifest import Manifest, signed_payload

if TYPE_CHECKING:
    from omnidraft.snapshots.keys import PrivateKey, Role, TrustedKeys

PAYLOAD_TYPE = "application/vnd.omnidraft.snapshot+json"
SIGNERS: "tuple[Role, ...]" = ("distiller", "operator")


@dataclass(frozen=True, slots=True)
class SnapshotSigning:
    """The keys of one process. Without trusted keys nothing is signed and nothing verified."""

    private_key: "PrivateKey | None" = None
    trusted_keys: "TrustedKeys | None" = None

    def sign(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the signature of this process.

        Raises:
            ConfigError: the private key may not sign snapshots.
            SnapshotCorrupt: it has no trusted signature, and this process has no private key to give it one.
        """
        if (key := self._allowed_key()) is None:
            self.require(manifest)
            return manifest
        signature = {key.key_id: key.sign(signed_payload(manifest), PAYLOAD_TYPE)}
        return manifest.model_copy(update={"signatures": manifest.signatures | signature})

    def envelope(self, payload: bytes, payload_type: str) -> dict[str, Any]:
        """Return a payload about snapshots in a DSSE envelope, as JSON has it, with the signature of this process if it
        has a key. Raises ConfigError: the private key may not sign snapshots."""
        from omnidraft.snapshots.keys import envelope

        return envelope(payload, payload_type, self._allowed_key())

    def _allowed_key(self) -> "PrivateKey | None":
        """Return the key of this process; None where nothing is signed. Raises ConfigError."""
        if self.private_key is None or self.trusted_keys is None:
            return None
        self.trusted_keys.require_role(self.private_key, SIGNERS)
        return self.private_key

    def require(self, manifest: Manifest) -> None:
        """Raise SnapshotCorrupt unless the manifest has a signature that this process trusts."""
        if self.trusted_keys is None:
            return
        name = f"snapshot {manifest.snapshot_id}"
        if not manifest.signatures:
            raise SnapshotCorrupt(
                f"{name} has no signature, and registry.trusted_keys asks for one; publish it where "
                "registry.private_key is set, or sign it: `omnidraft snapshots sign VERSION`"
            )
        try:
            self.trusted_keys.verify(signed_payload(manifest), PAYLOAD_TYPE, manifest.signatures, SIGNERS)
        except SignatureRefused as exc:
            raise SnapshotCorrupt(f"{name} is refused: {exc}; publish it again from a copy that you trust") from exc

    def trusts(self, manifest: Manifest) -> bool:
        """Return whether `require` takes the manifest."""
        try:
            self.require(manifest)
        except SnapshotCorrupt:
            return False
        return True


UNSIGNED = SnapshotSigning()
"""No keys."""
