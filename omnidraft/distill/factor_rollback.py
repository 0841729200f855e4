"""Takes back an earlier fit of one tenant's factors: an edit of a snapshot that registry/republish.py publishes again.

Factors fit the weights that they were fitted on and no others, so only a snapshot with the same weights can have them
back. The learner goes on from them, too: else its next snapshot would bring back what was refused.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from omnidraft.distill.publisher import LEARNER
from omnidraft.distill.resume_encryption import decrypt_records, encrypt_records
from omnidraft.errors import SnapshotError, SnapshotNotFound
from omnidraft.ports import RecordCipher, Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest, TenantFactors
from omnidraft.snapshots.tenant_factors import (
    FACTORS,
    FittedFactors,
    file_name,
    from_tensor,
    tensor_name,
    to_tensor,
    weights_digest,
)

_ADVICE = "`omnidraft tenants factors off` turns them off, `omnidraft snapshots rollback` takes all weights back"


class FactorRollback:
    """The rollback of one tenant's factors to those of an earlier version."""

    def __init__(self, registry: Registry, tenant: str, to: str | None, cipher: RecordCipher | None = None) -> None:
        """
        Args:
            to: a version or an alias. None: the newest one whose factors of the tenant serve it, are still there, fit
                the same weights and are another fit.
            cipher: of the keys of the log; None leaves plain what is plain.
        """
        self._registry, self._tenant, self._to, self._cipher = registry, tenant, to, cipher

    def __call__(self, folder: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, Path | bundle.Tensors]]:
        """See republish.Edit.

        Raises:
            SnapshotNotFound: no version has such factors, or their key is destroyed.
            SnapshotError: they fit other weights, or were learned before a tenant was forgotten.
            ConfigError: they are encrypted with a key that is not known here.
        """
        version, fit = self._choose(manifest, weights_digest(bundle.serving_tensors(folder) or {}))
        earlier = self._registry.fetch(version.version, folder.parent / "earlier")
        name = file_name(self._tenant)
        files: dict[str, Path | bundle.Tensors] = {name: earlier / name}
        if (folder / LEARNER).exists():
            files[LEARNER] = self._learner_state(folder, earlier)
        others = [each for each in manifest.tenant_factors if each.tenant != self._tenant]
        return {"tenant_factors": tuple(sorted([*others, fit], key=lambda each: each.tenant))}, files

    def _choose(self, manifest: Manifest, base: str) -> tuple[SnapshotVersion, TenantFactors]:
        """Return the version to take the factors from, and what its manifest says of them."""
        if self._to is not None:
            version = self._registry.resolve(self._to)
            return version, _usable_fit(version, self._tenant, manifest, base)
        present = {each.tenant: each.version for each in manifest.tenant_factors}.get(self._tenant)
        for version in reversed([each for each in self._registry.versions() if each.is_servable]):
            with suppress(SnapshotError):
                fit = _usable_fit(version, self._tenant, manifest, base)
                if fit.version != present:
                    return version, fit
        raise SnapshotNotFound(
            f"no version has another fit of the factors of {self._tenant} to the newest weights; {_ADVICE}"
        )

    def _learner_state(self, folder: Path, earlier: Path) -> bundle.Tensors:
        """Return the learner's state with the earlier factors in the place of the tenant's own."""
        state, fitted = self._read(folder, LEARNER)
        _, taken_back = self._read(earlier, file_name(self._tenant))
        if self._tenant not in taken_back:
            raise SnapshotNotFound(f"the key of the factors of {self._tenant} is destroyed")
        factors = taken_back[self._tenant]
        exact = {name: tensor.float() for name, tensor in factors.tensors.items()}
        fitted[self._tenant] = replace(factors, tensors=exact)
        state |= {tensor_name(at): to_tensor(fitted[tenant]) for at, tenant in enumerate(sorted(fitted))}
        return state if self._cipher is None else encrypt_records(state, self._cipher)

    def _read(self, folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, FittedFactors]]:
        """Return the tensors of a file that are no factors, and the factors by tenant, decrypted."""
        tensors, _ = decrypt_records(bundle.tensors(folder, name), self._cipher)
        factors = [from_tensor(tensor) for each, tensor in tensors.items() if each.startswith(FACTORS)]
        others = {each: tensor for each, tensor in tensors.items() if not each.startswith(FACTORS)}
        return others, {each.tenant: each for each in factors}


def _usable_fit(version: SnapshotVersion, tenant: str, newest: Manifest, base: str) -> TenantFactors:
    """Return the fit of a tenant's factors in this version. Raises SnapshotError when the newest weights cannot have
    it."""
    fit = next((each for each in version.manifest.tenant_factors if each.tenant == tenant and each.file), None)
    if fit is None:
        raise SnapshotNotFound(f"version {version.version} has no factors that serve {tenant}")
    if fit.base != base:
        raise SnapshotError(f"the factors of version {version.version} fit other weights than the newest; {_ADVICE}")
    if not set(newest.forgets) <= set(version.manifest.forgets):
        raise SnapshotError(f"a tenant was forgotten since version {version.version}, it may be this one; {_ADVICE}")
    return fit
