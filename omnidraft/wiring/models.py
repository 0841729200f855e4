"""Models, tokenizers and snapshots from their names."""

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omnidraft.config import Settings
from omnidraft.container_limits import usable_processors
from omnidraft.errors import ConfigError, VocabularyError
from omnidraft.ports import DraftModel, Proposer, SnapshotVersion, Target
from omnidraft.wiring.drafting import memory_proposer, proposer, shared_drafting
from omnidraft.wiring.tenant_factors import load_tenant_factors

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress

    from omnidraft.decode.drafting.loaded_factors import LoadedFactors
    from omnidraft.decode.drafting.session_pool import DrafterMemory
    from omnidraft.decode.policy.cost_model import MeasuredCosts
    from omnidraft.decode.snapshot.factor_switch import FactorSwitch
    from omnidraft.decode.snapshot.fleet_memory import MemoryLoader, SnapshotMemory
    from omnidraft.decode.snapshot.slot import LoadedSnapshot
    from omnidraft.memory.recent_texts import RecentTexts
    from omnidraft.models.hf.tokenizer import HfTokenizer
    from omnidraft.models.loading import SharedDrafter
    from omnidraft.models.native.packed_cache import PackedCache
    from omnidraft.vocab.alignment import Alignment
    from omnidraft.vocab.ngram_cache import NgramCache

logger = logging.getLogger(__name__)

SnapshotLoader = Callable[[SnapshotVersion | None, Path | None], "LoadedSnapshot"]


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """The folder and tokenizer of a target, all that a worker without a drafter needs."""

    target_folder: Path
    target: "HfTokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabularies(TargetVocabulary):
    """The folders and tokenizers of a pair, and their alignment."""

    drafter_folder: Path
    drafter: "HfTokenizer"
    alignment: "Alignment"


def served_vocabularies(settings: Settings, progress: "Progress | None" = None) -> TargetVocabulary:
    """Load the tokenizers that a worker needs: Vocabularies, unless there is no drafter. Raises ModelError."""
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.tokenizer import load_tokenizer

    if settings.models.engine == "llamacpp":
        folder = store.resolve_tokenizer(settings.models.target, converts_weights=False, progress=progress)
    else:
        folder = store.resolve(settings.models.target, progress=progress)
    if settings.models.has_drafter:
        return _pair(settings, folder, progress)
    return TargetVocabulary(folder, load_tokenizer(folder, store.default_home() / "tokenizers"))


def vocabularies(settings: Settings, progress: "Progress | None" = None) -> Vocabularies:
    """Load the tokenizers of the pair, fetching models that are not installed. Another engine may run the target, so a
    repository with its tokenizer alone will do.

    Raises:
        ConfigError: there is no drafter, and what was started works on one.
        ModelError: a model cannot be had.
    """
    from omnidraft.models.catalog import store

    if not settings.models.has_drafter:
        raise ConfigError("this needs a drafter, and models.drafter is 'none': only workers go without one")
    name, converts_weights = settings.models.target, settings.models.engine != "llamacpp"
    folder = store.resolve_tokenizer(name, converts_weights=converts_weights, progress=progress)
    return _pair(settings, folder, progress)


def _pair(settings: Settings, target_folder: Path, progress: "Progress | None") -> Vocabularies:
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.tokenizer import load_tokenizer
    from omnidraft.vocab.alignment import align_cached

    drafter_folder = store.resolve(settings.models.drafter, progress=progress)
    home = store.default_home()
    target, drafter = (load_tokenizer(folder, home / "tokenizers") for folder in (target_folder, drafter_folder))
    alignment = align_cached(drafter, target, home / "alignments")
    return Vocabularies(target_folder, target, drafter_folder=drafter_folder, drafter=drafter, alignment=alignment)


def set_threads(settings: Settings) -> None:
    """Let this process compute on as many threads as the settings say, else on no more than can run at once."""
    import torch

    threads = settings.decode.threads or usable_processors()
    if settings.decode.threads is not None or threads < torch.get_num_threads():
        torch.set_num_threads(threads)


def target(settings: Settings, tokenizers: TargetVocabulary) -> Target:
    """Load the target, to compute on the threads of `set_threads`. Raises ConfigError, ModelError, VocabularyError."""
    set_threads(settings)
    match settings.models.engine:
        case "transformers":
            return _target_on_kernels_or_transformers(settings, tokenizers.target_folder)
        case "llamacpp":
            return _llamacpp_target(settings, tokenizers)
        case "ensemble":
            return _ensemble_target(settings, tokenizers)


def _ensemble_target(settings: Settings, tokenizers: TargetVocabulary) -> Target:
    """Load the target and its members. Raises VocabularyError where a member has another tokenizer."""
    from omnidraft.models.catalog import store
    from omnidraft.models.ensemble import EnsembleTarget
    from omnidraft.models.hf.tokenizer import load_tokenizer

    section, members = settings.models, []
    for name in (section.target, *section.members):
        folder = store.resolve(name)
        own = load_tokenizer(folder, store.default_home() / "tokenizers").vocabulary
        if own.token_bytes != tokenizers.target.vocabulary.token_bytes:
            raise VocabularyError(f"{name} has another tokenizer than {section.target}; see omnidraft transfer")
        named = settings.model_copy(update={"models": section.model_copy(update={"target": name})})
        members.append(_target_on_kernels_or_transformers(named, folder))
    return EnsembleTarget(members, section.member_weights or (1.0,) * len(members), section.member_mean)


def _target_on_kernels_or_transformers(settings: Settings, folder: Path) -> Target:
    from omnidraft.models.native.target import cached_target

    section, cache = settings.models, packed_cache(settings)
    options = {"name": _name(section.target, folder), "precision": section.precision, "kernels": section.kernels}
    if cache is not None and (cached := cached_target(folder, **options, cache=cache)):
        return cached
    from omnidraft.models.hf.target import load_target  # takes seconds

    loaded = load_target(folder, settings.decode, **options, cache=cache)
    gc.collect()  # of the model in torch's form, which may be gigabytes; a worker that starts collects nothing itself
    return loaded


def packed_cache(settings: Settings) -> "PackedCache | None":
    """Return the cache of packed models, None if the settings want none."""
    from omnidraft.models.catalog import store
    from omnidraft.models.native.packed_cache import PackedCache

    max_bytes = int(settings.models.packed_cache_gib * 2**30)
    return PackedCache(store.default_home() / "packed", max_bytes) if max_bytes else None


def _llamacpp_target(settings: Settings, tokenizers: TargetVocabulary) -> Target:
    from omnidraft.models.catalog import store
    from omnidraft.models.llamacpp.context import library
    from omnidraft.models.llamacpp.crash_probe import require_surviving_build
    from omnidraft.models.llamacpp.target import load_target

    library()
    gguf = store.gguf_path(settings.models.target)
    require_surviving_build(gguf, store.default_home())
    max_texts = settings.scheduler.max_num_seqs
    name = _name(settings.models.target, gguf)
    return load_target(gguf, tokenizers.target.vocabulary, settings.decode, name=name, max_texts=max_texts)


def _name(model: str, source: Path) -> str:
    """Return what fingerprints call this model: other weights under the same name have another. Raises ModelError."""
    from omnidraft.models.catalog import store
    from omnidraft.models.weights_name import weights_digest

    return f"{model}@{weights_digest(source, store.default_home() / store.DIGESTS)}"


def ngram_cache(
    settings: Settings, tokenizers: Vocabularies, arrays: "Mapping[str, np.ndarray] | None"
) -> "NgramCache":
    """Return the cache of a snapshot's arrays; without arrays a new one, cold or warm. Raises VocabularyError."""
    from omnidraft.vocab.ngram_cache import NgramCache

    vocabs = (tokenizers.alignment.fingerprint, tokenizers.drafter.vocabulary, tokenizers.target.vocabulary)
    section = settings.cache
    if arrays:
        return NgramCache.from_arrays(arrays, *vocabs, section.capacity, section.eviction, section.mode)
    cache = NgramCache(*vocabs, section.capacity, section.eviction, section.mode)
    if section.warm:
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
    make = partial(proposer, settings.decode, tokenizers, shared, max_read_s=settings.scheduler.max_prefill_s)
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
        made = make(model, ngrams, None if memories is None else memories.load(version, folder), factors)
        name, number = (manifest.snapshot_id if manifest else "base"), (version.version if version else None)
        return LoadedSnapshot(number, name, made, ngrams, manifest, factors=factors)

    return load
