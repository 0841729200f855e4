"""Base drafters and snapshots in memory: weights, n-gram cache, the fleet's memory and tenants' factors."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omnidraft.config import Settings
from omnidraft.decode.prefill_chunk import MAX_PREFILL_S
from omnidraft.ports import DraftModel, Proposer, SnapshotVersion
from omnidraft.progress import stages
from omnidraft.wiring.drafting import memory_proposer, proposer, shared_drafting
from omnidraft.wiring.models import packed_cache
from omnidraft.wiring.tenant_factors import load_tenant_factors
from omnidraft.wiring.vocabularies import TargetVocabulary, Vocabularies, drafter_hash

if TYPE_CHECKING:
    import numpy as np

    from omnidraft.decode.drafting.loaded_factors import LoadedFactors
    from omnidraft.decode.drafting.session_pool import DrafterMemory
    from omnidraft.decode.policy.cost_model import MeasuredCosts
    from omnidraft.decode.snapshot.fleet_memory import MemoryLoader, SnapshotMemory
    from omnidraft.decode.snapshot.slot import FactorSwitch, LoadedSnapshot
    from omnidraft.memory.recent_texts import RecentTexts
    from omnidraft.models.loading import SharedDrafter
    from omnidraft.snapshots.manifest import Manifest
    from omnidraft.vocab.ngram_cache import NgramCache

logger = logging.getLogger(__name__)

SnapshotLoader = Callable[[SnapshotVersion | None, Path | None], "LoadedSnapshot"]


def ngram_cache(
    settings: Settings, tokenizers: Vocabularies, arrays: "Mapping[str, np.ndarray] | None"
) -> "NgramCache":
    """Return the cache of a snapshot's arrays; without arrays an empty one. Raises VocabularyError."""
    from omnidraft.vocab.ngram_cache import NgramCache

    vocabs = (tokenizers.alignment.fingerprint, tokenizers.drafter.vocabulary, tokenizers.target.vocabulary)
    bounds = (settings.cache.capacity, settings.cache.mode)
    return NgramCache.from_arrays(arrays, *vocabs, *bounds) if arrays else NgramCache(*vocabs, *bounds)


def base_drafter(settings: Settings, tokenizers: Vocabularies) -> "SharedDrafter":
    """Return the base drafter, loaded when first needed and shared by all targets."""
    from omnidraft.models.loading import SharedDrafter

    return SharedDrafter(lambda: _load_base_drafter(settings, tokenizers.drafter_folder))


def _load_base_drafter(settings: Settings, folder: Path) -> DraftModel:
    from omnidraft.models.native.drafter import cached_drafter

    section, cache = settings.models, packed_cache()
    stages.info("loading %s", section.drafter)
    if cached := cached_drafter(folder, section.drafter_precision, section.kernels, cache):
        return cached
    from omnidraft.models.hf.drafter import load_drafter  # takes seconds

    return load_drafter(folder, section.drafter_precision, None, "full", section.kernels, cache)


def snapshot_loader(
    settings: Settings,
    tokenizers: TargetVocabulary,
    costs: "MeasuredCosts",
    base: "SharedDrafter | None" = None,
    recent: "RecentTexts | None" = None,
    memories: "MemoryLoader | None" = None,
    switch: "FactorSwitch | None" = None,
    drafter_memory: "DrafterMemory | None" = None,
) -> SnapshotLoader:
    """Return a loader of snapshots for our own engine; see snapshot_loader_with. Without a drafter it uses none of
    theirs.

    Args:
        base: the base drafter shared with other loaders; None gives this loader its own.
        recent: what the worker said lately; None remembers nothing.
        memories: loads the fleet's memory; None: there is none.
        switch: turns tenants' factors off; None loads no factors.
        drafter_memory: holds the drafters' keys; None gives this loader its own.
    """
    has_drafter = settings.models.has_drafter
    shared = shared_drafting(settings.decode, costs, recent, drafter_memory, has_drafter=has_drafter)
    if not isinstance(tokenizers, Vocabularies):
        return _loader_without_drafter(
            lambda memory: memory_proposer(settings.decode, tokenizers, shared, memory), memories
        )
    make = partial(proposer, settings.decode, tokenizers, shared, max_read_s=MAX_PREFILL_S)
    return snapshot_loader_with(settings, tokenizers, make, base, memories, switch)


def _loader_without_drafter(
    make: "Callable[[SnapshotMemory | None], Proposer]", memories: "MemoryLoader | None"
) -> SnapshotLoader:
    """Return a loader for where no model drafts: it takes a snapshot's memory alone."""
    from omnidraft.decode.snapshot.slot import LoadedSnapshot

    def load(version: SnapshotVersion | None, folder: Path | None) -> LoadedSnapshot:
        manifest = version.manifest if version else None
        made = make(None if memories is None else memories.load(version, folder))
        name = manifest.snapshot_id if manifest else "base"
        return LoadedSnapshot(version.version if version else None, name, made, None, manifest)

    return load


def snapshot_loader_with(
    settings: Settings,
    tokenizers: Vocabularies,
    make: "Callable[[DraftModel, NgramCache, SnapshotMemory | None, LoadedFactors | None], Proposer]",
    base: "SharedDrafter | None" = None,
    memories: "MemoryLoader | None" = None,
    switch: "FactorSwitch | None" = None,
) -> SnapshotLoader:
    """Return a loader of verified snapshot folders. Without a folder, or weights in it, it uses the base drafter.

    Args:
        make: makes the proposer of a snapshot's weights, cache, memory, and tenants with factors of their own.
        base: the base drafter shared with other loaders; None gives this loader its own.
        memories: loads the fleet's memory; None: there is none.
        switch: turns tenants' factors off; None loads no factors.
    """
    from omnidraft.decode.snapshot.slot import LoadedSnapshot
    from omnidraft.snapshots import bundle

    shared = base or base_drafter(settings, tokenizers)

    def load(version: SnapshotVersion | None, folder: Path | None) -> LoadedSnapshot:
        manifest = version.manifest if version else None
        if manifest is not None:
            _warn_of_other_drafter(manifest, tokenizers)
        tensors = bundle.serving_tensors(folder) if folder else None
        train: Literal["full", "lora"] = "lora" if manifest and manifest.train == "lora" else "full"
        precision, kernels = settings.models.drafter_precision, settings.models.kernels
        if tensors is None:
            model = shared.get()
        else:
            from omnidraft.models.hf.drafter import load_drafter  # takes seconds

            stages.info(
                "loading snapshot %s of %s", manifest.snapshot_id if manifest else folder, settings.models.drafter
            )
            model = load_drafter(tokenizers.drafter_folder, precision, tensors, train, kernels)
        ngrams = ngram_cache(settings, tokenizers, bundle.ngrams(folder) if folder else None)
        factors = load_tenant_factors(settings, manifest, folder, model, tensors, switch)
        made = make(model, ngrams, None if memories is None else memories.load(version, folder), factors)
        name, number = (manifest.snapshot_id if manifest else "base"), (version.version if version else None)
        return LoadedSnapshot(number, name, made, ngrams, manifest, factors=factors)

    return load


def _warn_of_other_drafter(manifest: "Manifest", tokenizers: Vocabularies) -> None:
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
