"""The factors of tenants in a snapshot, as a worker drafts with them."""

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from omnidraft.assembly.record_cipher import record_cipher
from omnidraft.assembly.recording import recorded_as
from omnidraft.config import Settings
from omnidraft.decode.drafting.loaded_factors import LoadedFactors
from omnidraft.decode.snapshot.slot import FactorSwitch
from omnidraft.distill.resume_encryption import decrypt_records
from omnidraft.errors import ConfigError, SnapshotCorrupt
from omnidraft.models.kv_session import BatchingDrafter
from omnidraft.ports import DraftModel, RecordCipher
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.snapshots.tenant_factors import from_tensor, weights_digest

logger = logging.getLogger(__name__)


def load_tenant_factors(
    settings: Settings,
    manifest: Manifest | None,
    folder: Path | None,
    model: DraftModel,
    weights: Mapping[str, Tensor] | None,
    switch: FactorSwitch | None,
) -> LoadedFactors | None:
    """Return the tenants of a verified snapshot folder that draft with factors of their own; None if it has none, is
    the base drafter, or no factors are wanted (no switch).

    Those of forgotten tenants, those that were fitted on other weights, and those that cannot be decrypted are left
    out: these tenants draft with the shared weights.

    Args:
        weights: the serving tensors that the model was made of.

    Raises:
        SnapshotCorrupt: factors do not fit the model.
        KeyStoreError: the key store does not answer.
    """
    if manifest is None or folder is None or weights is None or switch is None:
        return None
    files = {each.tenant: each for each in manifest.tenant_factors if each.file is not None}
    known = {tenant: each for tenant, each in files.items() if not switch.is_forgotten(tenant, manifest)}
    if not known or not isinstance(model, BatchingDrafter):
        return None
    base = weights_digest(weights)
    openers, cipher = {}, record_cipher(settings)
    for tenant, each in known.items():
        if each.base != base:
            logger.warning("the factors of a tenant in snapshot %s fit other weights", manifest.snapshot_id)
        elif (tensors := _read(folder, each.file or "", tenant, cipher)) is not None:
            openers[tenant] = model.with_factors(tensors)
    logger.info("snapshot %s: %d tenants draft with factors of their own", manifest.snapshot_id, len(openers))
    return LoadedFactors(openers, lambda tenant: switch.serves(tenant, manifest), recorded_as(settings))


def _read(folder: Path, name: str, tenant: str, cipher: RecordCipher | None) -> Mapping[str, Tensor] | None:
    """Return the factors in a file; None when their key is destroyed or not known here."""
    try:
        decrypted, _ = decrypt_records(bundle.tensors(folder, name), cipher)
    except ConfigError as exc:
        logger.warning("a tenant drafts without its factors: %s", exc)
        return None
    for tensor in decrypted.values():
        factors = from_tensor(tensor)
        if factors.tenant != tenant:
            raise SnapshotCorrupt(f"{name} has the factors of another tenant than the manifest says")
        return factors.tensors
    return None
