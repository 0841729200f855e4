"""Models, tokenizers and snapshots from their names."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omnidraft.config import DecodeSettings, Settings
from omnidraft.errors import ConfigError
from omnidraft.ports import DraftModel, Mode, Policy, Proposer, SnapshotVersion, Target
from omnidraft.wiring.logs import registry
from omnidraft.wiring.signing import snapshot_signing
from omnidraft.wiring.tenant_factors import load_tenant_factors

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress

    from omnidraft.decode.drafting.session_pool import DrafterMemory
    from omnidraft.decode.drafting.tenant_factors import TenantFactors
    from omnidraft.decode.policy.cost import Seconds
    from omnidraft.decode.policy.cost_model import MeasuredCosts, StepCosts
    from omnidraft.decode.snapshot.factor_switch import FactorSwitch
    from omnidraft.decode.snapshot.slot import LoadedSnapshot
    from omnidraft.models.hf.tokenizer import HfTokenizer
    from omnidraft.models.loading import SharedDrafter
    from omnidraft.models.native.packed_cache import PackedCache
    from omnidraft.vocab.alignment import Alignment
    from omnidraft.vocab.ngram_cache import NgramCache

logger = logging.getLogger(__name__)

_DRAFTER_IDS = 65_536
"""The ids whose keys the drafter holds for all texts of a target, running and ended; 23 kB each for SmolLM2-135M."""

UNPUBLISHED = 0
"""The version number of a snapshot in a folder outside the registry; registries count from 1."""

SnapshotLoader = Callable[[SnapshotVersion | None, Path | None], "LoadedSnapshot"]


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """The folders and tokenizers of a pair, and their alignment."""

    target_folder: Path
    drafter_folder: Path
    target: "HfTokenizer"
    drafter: "HfTokenizer"
    alignment: "Alignment"


def vocabularies(settings: Settings, progress: "Progress | None" = None) -> Vocabularies:
    """Load the tokenizers of the pair, fetching models that are not installed. Raises ModelError."""
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.tokenizer import load_tokenizer
    from omnidraft.vocab.alignment import align_cached

    target_folder = store.resolve(settings.models.target, progress=progress)
    drafter_folder = store.resolve(settings.models.drafter, progress=progress)
    home = store.default_home()
    target, drafter = (load_tokenizer(folder, home / "tokenizers") for folder in (target_folder, drafter_folder))
    alignment = align_cached(drafter, target, home / "alignments")
    return Vocabularies(target_folder, drafter_folder, target, drafter, alignment)


def target(settings: Settings, tokenizers: Vocabularies) -> Target:
    """Load the target. Raises ConfigError, ModelError, VocabularyError."""
    match settings.models.engine:
        case "transformers":
            return _target_on_kernels_or_transformers(settings, tokenizers.target_folder)
        case "llamacpp":
            return _llamacpp_target(settings, tokenizers)


def _target_on_kernels_or_transformers(settings: Settings, folder: Path) -> Target:
    from omnidraft.models.native.target import cached_target

    section, cache = settings.models, packed_cache(settings)
    options = {"name": section.target, "precision": section.precision, "kernels": section.kernels}
    if cache is not None and (cached := cached_target(folder, **options, cache=cache)):
        return cached
    from omnidraft.models.hf.target import load_target  # takes seconds

    return load_target(folder, settings.decode, **options, cache=cache)


def packed_cache(settings: Settings) -> "PackedCache | None":
    """Return the cache of packed models, None if the settings want none."""
    from omnidraft.models.catalog import store
    from omnidraft.models.native.packed_cache import PackedCache

    max_bytes = int(settings.models.packed_cache_gib * 2**30)
    return PackedCache(store.default_home() / "packed", max_bytes) if max_bytes else None


def _llamacpp_target(settings: Settings, tokenizers: Vocabularies) -> Target:
    from omnidraft.models.catalog import store
    from omnidraft.models.llamacpp.context import library
    from omnidraft.models.llamacpp.crash_probe import require_surviving_build
    from omnidraft.models.llamacpp.target import load_target

    if settings.models.precision != "auto":
        raise ConfigError("models.precision is for transformers; with models.engine = 'llamacpp' the GGUF file says it")
    library()
    gguf = store.gguf_path(settings.models.target)
    require_surviving_build(gguf, store.default_home())
    max_texts = settings.scheduler.max_num_seqs
    return load_target(
        gguf, tokenizers.target.vocabulary, settings.decode, name=settings.models.target, max_texts=max_texts
    )


def ngram_cache(
    settings: Settings, tokenizers: Vocabularies, arrays: "Mapping[str, np.ndarray] | None"
) -> "NgramCache":
    """Return the cache of a snapshot's arrays; without arrays a new one, cold or warm. Raises VocabularyError."""
    from omnidraft.vocab.ngram_cache import NgramCache

    vocabs = (tokenizers.alignment.fingerprint, tokenizers.drafter.vocabulary, tokenizers.target.vocabulary)
    if arrays:
        return NgramCache.from_arrays(arrays, *vocabs, settings.cache.capacity, settings.cache.eviction)
    cache = NgramCache(*vocabs, settings.cache.capacity, settings.cache.eviction)
    if settings.cache.warm:
        cache.warm(tokenizers.alignment)
    return cache


def base_drafter(settings: Settings, tokenizers: Vocabularies) -> "SharedDrafter":
    """Return the base drafter, loaded when first needed and shared by all targets."""
    from omnidraft.models.loading import SharedDrafter

    return SharedDrafter(lambda: _load_base_drafter(settings, tokenizers.drafter_folder))


def _load_base_drafter(settings: Settings, folder: Path) -> DraftModel:
    from omnidraft.models.native.drafter import cached_drafter

    section, cache = settings.models, packed_cache(settings)
    if cache is not None and (cached := cached_drafter(folder, section.drafter_precision, section.kernels, cache)):
        return cached
    from omnidraft.models.hf.drafter import load_drafter  # takes seconds

    return load_drafter(folder, section.drafter_precision, None, "full", section.kernels, cache)


def snapshot_loader(
    settings: Settings,
    tokenizers: Vocabularies,
    costs: "MeasuredCosts",
    base: "SharedDrafter | None" = None,
    switch: "FactorSwitch | None" = None,
) -> SnapshotLoader:
    """Return a loader of snapshots for our own engine; see snapshot_loader_with."""
    make = partial(proposer, settings.decode, tokenizers, shared=shared_drafting(settings.decode, costs))
    return snapshot_loader_with(settings, tokenizers, make, base, switch)


def snapshot_loader_with(
    settings: Settings,
    tokenizers: Vocabularies,
    make: Callable[[DraftModel, "NgramCache", "TenantFactors | None"], Proposer],
    base: "SharedDrafter | None" = None,
    switch: "FactorSwitch | None" = None,
) -> SnapshotLoader:
    """Return a loader of verified snapshot folders. Without a folder, or weights in it, it uses the base drafter.

    Args:
        make: makes the proposer of a snapshot's weights, cache, and tenants with factors of their own.
        base: the base drafter shared with other loaders; None gives this loader its own.
        switch: turns tenants' factors off; None loads no factors.
    """
    from omnidraft.decode.snapshot.slot import LoadedSnapshot
    from omnidraft.snapshots import bundle

    shared = base or base_drafter(settings, tokenizers)

    def load(version: SnapshotVersion | None, folder: Path | None) -> LoadedSnapshot:
        manifest = version.manifest if version else None
        tensors = bundle.serving_tensors(folder) if folder else None
        train: Literal["full", "lora"] = "lora" if manifest and manifest.train == "lora" else "full"
        precision, kernels = settings.models.drafter_precision, settings.models.kernels
        if tensors is None:
            model = shared.get()
        else:
            from omnidraft.models.hf.drafter import load_drafter  # takes seconds

            model = load_drafter(tokenizers.drafter_folder, precision, tensors, train, kernels)
        ngrams = ngram_cache(settings, tokenizers, bundle.ngrams(folder) if folder else None)
        factors = load_tenant_factors(settings, manifest, folder, model, tensors, switch)
        name, number = (manifest.snapshot_id if manifest else "base"), (version.version if version else None)
        return LoadedSnapshot(number, name, make(model, ngrams, factors), ngrams, manifest, factors=factors)

    return load


@dataclass(frozen=True, slots=True)
class SharedDrafting:
    """The part of drafting that outlives the snapshots of one target."""

    policy_for: Callable[[Mode], Policy]
    step_s: "StepCosts"
    memory: "DrafterMemory"


def shared_drafting(settings: DecodeSettings, costs: "MeasuredCosts") -> SharedDrafting:
    """Return policies, costs and memory for our own engine. A mode is measured when the policy first needs it."""
    from omnidraft.decode.drafting.session_pool import DrafterMemory

    @cache
    def policy_for(mode: Mode) -> Policy:
        return policy(settings, lambda rows: costs.passes(mode)(rows), costs.step_s)

    return SharedDrafting(policy_for, costs.step_s, DrafterMemory(_DRAFTER_IDS))


def proposer(
    settings: DecodeSettings,
    tokenizers: Vocabularies,
    model: DraftModel,
    ngrams: "NgramCache",
    factors: "TenantFactors | None" = None,
    *,
    shared: SharedDrafting,
    is_external: bool = False,
) -> Proposer:
    """Return a proposer that drafts with the model and prompt lookup; for an external engine, whose noise is unknown,
    without noise."""
    from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
    from omnidraft.decode.drafting.drafter import Drafter
    from omnidraft.decode.drafting.prompt_lookup import PromptLookup
    from omnidraft.decode.drafting.session_pool import SessionPool
    from omnidraft.decode.drafting.tree_proposer import TreeProposer

    weights = (0.0, 0.5, 1.0) if settings.noise_weight is None else (settings.noise_weight,)
    drafter = Drafter(
        model,
        tokenizers.drafter,
        tokenizers.target.vocabulary,
        tokenizers.alignment,
        ngrams,
        NoiseCoupling((0.0,) if is_external else weights),
        shared.step_s.measured(model) if settings.policy == "cost" else None,
        SessionPool(shared.memory),
        factors,
        extends_to_depth=is_external,
    )
    sources = (PromptLookup(), drafter) if settings.lookup else (drafter,)
    if settings.policy == "acceptance" and not model.has_head:
        logger.info("this drafter has no acceptance head: its chains end by measured agreement")
    return TreeProposer(sources, shared.policy_for)


def policy(settings: DecodeSettings, pass_s: "Seconds", step_s: "Seconds", num_candidates: int = 4) -> Policy:
    """Return a new policy of the kind that the settings name."""
    from omnidraft.decode.policy.chain import AcceptancePolicy, FixedPolicy, ThresholdPolicy
    from omnidraft.decode.policy.cost import CostPolicy

    match settings.policy:
        case "fixed":
            return FixedPolicy()
        case "acceptance":
            return AcceptancePolicy(settings.max_rejection)
        case "threshold":
            return ThresholdPolicy(settings.min_path_probability)
        case "cost":
            return CostPolicy(pass_s, step_s, num_candidates)


@contextmanager
def named_folder(settings: Settings, name: str) -> Iterator[tuple[SnapshotVersion, Path]]:
    """Yield the verified snapshot in the folder of this name, else the version or alias of the registry, fetched into a
    temporary folder.

    Raises:
        SnapshotError: there is none of that name, or it lacks the signature of who this process trusts.
    """
    from omnidraft.snapshots import bundle

    folder = Path(name).expanduser()
    if folder.is_dir():
        manifest = bundle.verify(folder, ("serving",))
        snapshot_signing(settings).require(manifest)
        yield SnapshotVersion(UNPUBLISHED, manifest, aliases=(), created_ms=manifest.created_ms), folder
        return
    snapshots = registry(settings)
    version = snapshots.resolve(name)
    with tempfile.TemporaryDirectory(prefix="omnidraft-snapshot-") as staging:
        yield version, snapshots.fetch(version.version, Path(staging))


def named_snapshot(settings: Settings, load: SnapshotLoader, name: str) -> "LoadedSnapshot":
    """Load the snapshot of this name. Raises SnapshotError, or VocabularyError when it belongs to another pair."""
    with named_folder(settings, name) as (version, folder):
        loaded = load(version, folder)
    return replace(loaded, version=None) if version.version == UNPUBLISHED else loaded
