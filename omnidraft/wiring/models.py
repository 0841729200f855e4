"""Models, tokenizers and snapshots from their names."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omnidraft.config import Settings
from omnidraft.errors import ConfigError
from omnidraft.ports import DraftModel, Proposer, SnapshotVersion, Target
from omnidraft.wiring.drafting import memory_proposer, proposer, shared_drafting
from omnidraft.wiring.logs import registry
from omnidraft.wiring.signing import snapshot_signing

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress

    from omnidraft.decode.policy.cost_model import MeasuredCosts
    from omnidraft.decode.snapshot.slot import LoadedSnapshot
    from omnidraft.memory.recent_texts import RecentTexts
    from omnidraft.models.hf.tokenizer import HfTokenizer
    from omnidraft.models.loading import SharedDrafter
    from omnidraft.models.native.packed_cache import PackedCache
    from omnidraft.vocab.alignment import Alignment
    from omnidraft.vocab.ngram_cache import NgramCache

logger = logging.getLogger(__name__)

UNPUBLISHED = 0
"""The version number of a snapshot in a folder outside the registry; registries count from 1."""

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

    if settings.models.has_drafter:
        return vocabularies(settings, progress)
    folder = store.resolve(settings.models.target, progress=progress)
    return TargetVocabulary(folder, load_tokenizer(folder, store.default_home() / "tokenizers"))


def vocabularies(settings: Settings, progress: "Progress | None" = None) -> Vocabularies:
    """Load the tokenizers of the pair, fetching models that are not installed.

    Raises:
        ConfigError: there is no drafter, and what was started works on one.
        ModelError: a model cannot be had.
    """
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.tokenizer import load_tokenizer
    from omnidraft.vocab.alignment import align_cached

    if not settings.models.has_drafter:
        raise ConfigError("this needs a drafter, and models.drafter is 'none': only workers go without one")
    target_folder = store.resolve(settings.models.target, progress=progress)
    drafter_folder = store.resolve(settings.models.drafter, progress=progress)
    home = store.default_home()
    target, drafter = (load_tokenizer(folder, home / "tokenizers") for folder in (target_folder, drafter_folder))
    alignment = align_cached(drafter, target, home / "alignments")
    return Vocabularies(target_folder, target, drafter_folder=drafter_folder, drafter=drafter, alignment=alignment)


def target(settings: Settings, tokenizers: TargetVocabulary) -> Target:
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


def _llamacpp_target(settings: Settings, tokenizers: TargetVocabulary) -> Target:
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
    tokenizers: TargetVocabulary,
    costs: "MeasuredCosts",
    base: "SharedDrafter | None" = None,
    recent: "RecentTexts | None" = None,
) -> SnapshotLoader:
    """Return a loader of snapshots for our own engine; see snapshot_loader_with. Without a drafter it uses none of
    theirs.

    Args:
        base: the base drafter shared with other loaders; None gives this loader its own.
        recent: what the worker said lately; None remembers nothing.
    """
    shared = shared_drafting(settings.decode, costs, recent, has_drafter=settings.models.has_drafter)
    if not isinstance(tokenizers, Vocabularies):
        return partial(_without_drafter, memory_proposer(settings.decode, tokenizers, shared))
    return snapshot_loader_with(
        settings, tokenizers, lambda model, ngrams: proposer(settings.decode, tokenizers, model, ngrams, shared), base
    )


def _without_drafter(made: Proposer, version: SnapshotVersion | None, folder: Path | None) -> "LoadedSnapshot":
    """Implement SnapshotLoader where no model drafts: a snapshot changes nothing."""
    from omnidraft.decode.snapshot.slot import LoadedSnapshot

    manifest = version.manifest if version else None
    name = manifest.snapshot_id if manifest else "base"
    return LoadedSnapshot(version.version if version else None, name, made, None, manifest)


def snapshot_loader_with(
    settings: Settings,
    tokenizers: Vocabularies,
    make: Callable[[DraftModel, "NgramCache"], Proposer],
    base: "SharedDrafter | None" = None,
) -> SnapshotLoader:
    """Return a loader of verified snapshot folders. Without a folder, or without weights in it, it uses the base
    drafter.

    Args:
        make: makes the proposer of a snapshot's weights and cache.
        base: the base drafter shared with other loaders; None gives this loader its own.
    """
    from omnidraft.decode.snapshot.slot import LoadedSnapshot
    from omnidraft.snapshots import bundle

    shared = base or base_drafter(settings, tokenizers)

    def load(version: SnapshotVersion | None, folder: Path | None) -> LoadedSnapshot:
        manifest = version.manifest if version else None
        tensors = bundle.serving_tensors(folder) if folder else None
        train: Literal["full", "lora"] = "lora" if manifest and manifest.train == "lora" else "full"
        precision = settings.models.drafter_precision
        kernels = settings.models.kernels
        if tensors is None:
            model = shared.get()
        else:
            from omnidraft.models.hf.drafter import load_drafter  # takes seconds

            model = load_drafter(tokenizers.drafter_folder, precision, tensors, train, kernels)
        ngrams = ngram_cache(settings, tokenizers, bundle.ngrams(folder) if folder else None)
        made = make(model, ngrams)
        name = manifest.snapshot_id if manifest else "base"
        return LoadedSnapshot(version.version if version else None, name, made, ngrams, manifest)

    return load


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
