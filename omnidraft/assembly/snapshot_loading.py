"""Base drafters and snapshots in memory: weights, n-gram cache, the fleet's memory and tenants' factors."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from omnidraft.assembly.drafting import SharedDrafting, memory_proposer, proposer
from omnidraft.assembly.logs import record_cipher
from omnidraft.assembly.models import TargetVocabulary, Vocabularies, drafter_hash, packed_cache
from omnidraft.assembly.recording import recorded_as
from omnidraft.assembly.registries import UNPUBLISHED, fetched, named_folder, registry
from omnidraft.config import Settings
from omnidraft.decode.drafting.loaded_factors import LoadedFactors
from omnidraft.decode.snapshot.fleet_memory import MemoryLoader
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.decode.snapshot.tenant_rules import TenantRules
from omnidraft.distill.resume_encryption import decrypt_records
from omnidraft.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotNotFound
from omnidraft.memory.memory_file import Owners
from omnidraft.models.kv_session import KvDrafter
from omnidraft.models.loading import SharedDrafter
from omnidraft.models.native.drafter import cached_drafter
from omnidraft.ports import DraftModel, Metrics, RecordCipher, SnapshotVersion
from omnidraft.progress import stages
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.snapshots.tenant_factors import from_tensor, weights_digest
from omnidraft.vocab.ngram_cache import NgramCache

logger = logging.getLogger(__name__)

SnapshotLoader = Callable[[SnapshotVersion | None, Path | None], LoadedSnapshot]


def ngram_cache(settings: Settings, tokenizers: Vocabularies, arrays: Mapping[str, np.ndarray] | None) -> NgramCache:
    """Return the cache of a snapshot's arrays; without arrays an empty one. Raises VocabularyError."""
    vocabs = (tokenizers.alignment.fingerprint, tokenizers.drafter.vocabulary, tokenizers.target.vocabulary)
    bounds = (settings.cache.capacity, settings.cache.mode)
    return NgramCache.from_arrays(arrays, *vocabs, *bounds) if arrays else NgramCache(*vocabs, *bounds)


def base_drafter(settings: Settings, tokenizers: Vocabularies) -> SharedDrafter:
    """Return the base drafter, loaded when first needed and shared by all targets."""
    return SharedDrafter(lambda: _load_base_drafter(settings, tokenizers.drafter_folder))


def _load_base_drafter(settings: Settings, folder: Path) -> DraftModel:
    section, cache = settings.models, packed_cache()
    stages.info("loading %s", section.drafter)
    if cached := cached_drafter(folder, section.drafter_precision, section.kernels, cache):
        return cached
    from omnidraft.models.hf.drafter import load_drafter  # takes seconds

    return load_drafter(folder, section.drafter_precision, None, "full", section.kernels, cache)


def snapshot_loader(
    settings: Settings,
    tokenizers: TargetVocabulary,
    shared: SharedDrafting,
    base: SharedDrafter | None = None,
    memories: MemoryLoader | None = None,
    rules: TenantRules | None = None,
    *,
    is_external: bool = False,
) -> SnapshotLoader:
    """Return a loader of verified snapshot folders. Without a folder, or weights in it, it uses the base drafter;
    where no model drafts, a snapshot's memory alone.

    Args:
        base: the base drafter shared with other loaders; None gives this loader its own.
        memories: loads the fleet's memory; None: there is none.
        rules: tell whose factors are off; None loads no factors.
        is_external: see proposer.
    """
    drafters = base
    if drafters is None and isinstance(tokenizers, Vocabularies):
        drafters = base_drafter(settings, tokenizers)

    def load(version: SnapshotVersion | None, folder: Path | None) -> LoadedSnapshot:
        manifest = version.manifest if version else None
        fleet = None if memories is None else memories.load(version, folder)
        ngrams = factors = None
        if drafters is None or not isinstance(tokenizers, Vocabularies):
            made = memory_proposer(settings.decode, tokenizers, shared, fleet)
        else:
            if manifest is not None:
                _warn_of_other_drafter(manifest, tokenizers)
            tensors = bundle.serving_tensors(folder) if folder else None
            model = drafters.get() if tensors is None else _learned(settings, tokenizers, tensors, manifest)
            ngrams = ngram_cache(settings, tokenizers, bundle.ngrams(folder) if folder else None)
            factors = load_tenant_factors(settings, manifest, folder, model, tensors, rules)
            made = proposer(settings.decode, tokenizers, shared, model, ngrams, fleet, factors, is_external=is_external)
        name, number = (manifest.snapshot_id if manifest else "base"), (version.version if version else None)
        return LoadedSnapshot(number, name, made, ngrams, manifest, factors=factors)

    return load


def _learned(
    settings: Settings, tokenizers: Vocabularies, tensors: dict[str, Tensor], manifest: Manifest | None
) -> DraftModel:
    """Load the drafter with the weights of a snapshot."""
    from omnidraft.models.hf.drafter import load_drafter  # takes seconds

    section = settings.models
    stages.info("loading snapshot %s of %s", manifest.snapshot_id if manifest else "without manifest", section.drafter)
    train: Literal["full", "lora"] = "lora" if manifest and manifest.train == "lora" else "full"
    return load_drafter(tokenizers.drafter_folder, section.drafter_precision, tensors, train, section.kernels)


def _warn_of_other_drafter(manifest: Manifest, tokenizers: Vocabularies) -> None:
    """Log that a snapshot was learned from another base drafter than this worker's, with which it may draft worse."""
    here = drafter_hash(tokenizers.drafter_folder, tokenizers.drafter)
    if manifest.drafter_hash != here:
        logger.warning(
            "snapshot %s was learned from %s (%s), this worker has another base drafter (%s) and may draft worse "
            "with it; install the one that it was learned from, or roll back to a snapshot of this one",
            manifest.snapshot_id,
            manifest.drafter,
            manifest.drafter_hash[:12],
            here[:12],
        )


def load_tenant_factors(
    settings: Settings,
    manifest: Manifest | None,
    folder: Path | None,
    model: DraftModel,
    weights: Mapping[str, Tensor] | None,
    rules: TenantRules | None,
) -> LoadedFactors | None:
    """Return the tenants of a verified snapshot folder that draft with factors of their own; None if it has none, is
    the base drafter, or no factors are wanted (no rules).

    Those of forgotten tenants, those that were fitted on other weights, and those that cannot be decrypted are left
    out: these tenants draft with the shared weights.

    Args:
        weights: the serving tensors that the model was made of.

    Raises:
        SnapshotCorrupt: factors do not fit the model.
        KeyStoreError: the key store does not answer.
    """
    if manifest is None or folder is None or weights is None or rules is None:
        return None
    files = {each.tenant: each for each in manifest.tenant_factors if each.file is not None}
    known = {tenant: each for tenant, each in files.items() if not rules.is_forgotten(tenant, manifest)}
    if not known or not isinstance(model, KvDrafter):
        return None
    base = weights_digest(weights)
    openers, cipher = {}, record_cipher(settings)
    for tenant, each in known.items():
        if each.base != base:
            logger.warning("the factors of a tenant in snapshot %s fit other weights", manifest.snapshot_id)
        elif (tensors := _read(folder, each.file or "", tenant, cipher)) is not None:
            openers[tenant] = model.with_factors(tensors)
    logger.info("snapshot %s: %d tenants draft with factors of their own", manifest.snapshot_id, len(openers))
    return LoadedFactors(openers, lambda tenant: rules.serves_factors(tenant, manifest), recorded_as(settings))


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


def memory_loader(settings: Settings, metrics: Metrics, rules: TenantRules | None = None) -> MemoryLoader:
    """Return the loader of the memory in a worker's snapshots of one pair. `rules` tell who was forgotten."""
    return MemoryLoader(
        Owners(settings.memory.groups),
        metrics,
        target=settings.models.target,
        cipher=record_cipher(settings),
        recorded_as=recorded_as(settings),
        rules=rules,
    )


def named_or_base(settings: Settings, load: SnapshotLoader, name: str | None) -> LoadedSnapshot:
    """Load the snapshot of this name, the base drafter without one. Raises SnapshotError, or VocabularyError when it
    belongs to another pair."""
    if name is None:
        return load(None, None)
    with named_folder(settings, name) as (version, folder):
        loaded = load(version, folder)
    return replace(loaded, version=None) if version.version == UNPUBLISHED else loaded


def champion_or_base(settings: Settings, load: SnapshotLoader) -> LoadedSnapshot:
    """Load the champion; the base drafter where there is none, or none that can be read."""
    try:
        with fetched(registry(settings), "champion") as (version, folder):
            return load(version, folder)
    except SnapshotNotFound:
        pass
    except SnapshotError as exc:
        logger.warning("%s begins without its champion: %s", settings.models.target, exc)
    return load(None, None)
