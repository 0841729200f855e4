"""Target models, and the tokenizers of a target and its drafter, from their names."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnidraft.config import Settings
from omnidraft.decode.receipt import ModelIdentity
from omnidraft.errors import ConfigError, VocabularyError
from omnidraft.models.catalog import store
from omnidraft.models.catalog.install import read_origin
from omnidraft.models.ensemble import EnsembleTarget
from omnidraft.models.llamacpp.context import library
from omnidraft.models.llamacpp.crash_probe import require_surviving_build
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.target import cached_target
from omnidraft.models.weights_name import SHORT, weights_digest
from omnidraft.ports import Target
from omnidraft.progress import stages
from omnidraft.system import default_home, usable_processors
from omnidraft.vocab.alignment import Alignment, align_cached

if TYPE_CHECKING:
    from rich.progress import Progress

    from omnidraft.models.hf.tokenizer import HfTokenizer


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
    alignment: Alignment


def served_vocabularies(settings: Settings, progress: "Progress | None" = None) -> TargetVocabulary:
    """Load the tokenizers that a worker needs: Vocabularies, unless there is no drafter. Raises ModelError."""
    from omnidraft.models.hf.tokenizer import load_tokenizer

    if settings.models.engine == "llamacpp":
        folder = store.resolve_tokenizer(settings.models.target, converts_weights=False, progress=progress)
    else:
        folder = store.resolve(settings.models.target, progress=progress)
    if settings.models.has_drafter:
        return _pair(settings, folder, progress)
    stages.info("reading the tokenizer of %s", settings.models.target)
    return TargetVocabulary(folder, load_tokenizer(folder, default_home() / "tokenizers"))


def vocabularies(settings: Settings, progress: "Progress | None" = None) -> Vocabularies:
    """Load the tokenizers of the pair, fetching models that are not installed. Another engine may run the target, so a
    repository with its tokenizer alone will do.

    Raises:
        ConfigError: there is no drafter, and what was started works on one.
        ModelError: a model cannot be had.
    """
    if not settings.models.has_drafter:
        raise ConfigError("this needs a drafter, and models.drafter is 'none': only workers go without one")
    name, converts_weights = settings.models.target, settings.models.engine != "llamacpp"
    folder = store.resolve_tokenizer(name, converts_weights=converts_weights, progress=progress)
    return _pair(settings, folder, progress)


def _pair(settings: Settings, target_folder: Path, progress: "Progress | None") -> Vocabularies:
    from omnidraft.models.hf.tokenizer import load_tokenizer

    stages.info("reading the tokenizers of %s and %s", settings.models.target, settings.models.drafter)
    own = load_tokenizer(target_folder, default_home() / "tokenizers")
    return aligned(settings, target_folder, own, progress)


def aligned(
    settings: Settings, target_folder: Path, target: "HfTokenizer", progress: "Progress | None" = None
) -> Vocabularies:
    """Load the drafter's tokenizer, fetching a drafter that is not installed, and align it with the target's."""
    from omnidraft.models.hf.tokenizer import load_tokenizer

    folder, home = store.resolve(settings.models.drafter, progress=progress), default_home()
    drafter = load_tokenizer(folder, home / "tokenizers")
    alignment = align_cached(drafter, target, home / "alignments")
    return Vocabularies(target_folder, target, drafter_folder=folder, drafter=drafter, alignment=alignment)


def drafter_hash(folder: Path, tokenizer: "HfTokenizer") -> str:
    """Return what tells this base drafter from others: where its weights came from, else its tokenizer."""
    made = read_origin(folder)
    return made.fingerprint if made else tokenizer.fingerprint


def set_threads(settings: Settings) -> None:
    """Let this process compute on as many threads as the settings say, else on no more than can run at once."""
    threads = settings.decode.threads or usable_processors()
    if settings.decode.threads is not None or threads < torch.get_num_threads():
        torch.set_num_threads(threads)


def target(settings: Settings, tokenizers: TargetVocabulary) -> Target:
    """Load the target, to compute on the threads of `set_threads`. Raises ConfigError, ModelError, VocabularyError."""
    set_threads(settings)
    stages.info("loading %s", settings.models.target)
    match settings.models.engine:
        case "transformers":
            return _target_on_kernels_or_transformers(settings, tokenizers.target_folder)
        case "llamacpp":
            return _llamacpp_target(settings, tokenizers)
        case "ensemble":
            return _ensemble_target(settings, tokenizers)


def _ensemble_target(settings: Settings, tokenizers: TargetVocabulary) -> Target:
    """Load the target and its members. Raises VocabularyError where a member has another tokenizer."""
    from omnidraft.models.hf.tokenizer import load_tokenizer

    section, members = settings.models, []
    for name in (section.target, *section.members):
        folder = store.resolve(name)
        own = load_tokenizer(folder, default_home() / "tokenizers").vocabulary
        if own.token_bytes != tokenizers.target.vocabulary.token_bytes:
            raise VocabularyError(f"{name} has another tokenizer than {section.target}; see omnidraft transfer")
        named = settings.model_copy(update={"models": section.model_copy(update={"target": name})})
        members.append(_target_on_kernels_or_transformers(named, folder))
    return EnsembleTarget(members)


def _target_on_kernels_or_transformers(settings: Settings, folder: Path) -> Target:
    section, cache = settings.models, packed_cache()
    options = {"name": _name(section.target, folder), "precision": section.precision, "kernels": section.kernels}
    if cached := cached_target(folder, **options, cache=cache):
        return cached
    from omnidraft.models.hf.target import load_target  # takes seconds

    loaded = load_target(folder, **options, cache=cache)
    gc.collect()  # of the model in torch's form, which may be gigabytes; a worker that starts collects nothing itself
    return loaded


def packed_cache() -> PackedCache:
    """Return the cache of packed models."""
    return PackedCache(default_home() / "packed")


def _llamacpp_target(settings: Settings, tokenizers: TargetVocabulary) -> Target:
    from omnidraft.models.llamacpp.target import load_target

    library()
    gguf = store.gguf_path(settings.models.target)
    require_surviving_build(gguf, default_home())
    max_texts = settings.scheduler.max_num_seqs
    name = _name(settings.models.target, gguf)
    return load_target(
        gguf, tokenizers.target.vocabulary, name=name, threads=settings.decode.threads, max_texts=max_texts
    )


def _name(model: str, source: Path) -> str:
    """Return what fingerprints call this model: other weights under the same name have another. Raises ModelError."""
    return f"{model}@{_weights(source)[:SHORT]}"


def _weights(source: Path) -> str:
    return weights_digest(source, default_home() / store.DIGESTS)


def identity(settings: Settings, tokenizers: TargetVocabulary, loaded: Target) -> ModelIdentity:
    """Return what receipts say of a target that was loaded with these settings. Raises ModelError."""
    section = settings.models
    names = (section.target, *section.members) if section.engine == "ensemble" else (section.target,)
    find = store.gguf_path if section.engine == "llamacpp" else store.resolve
    sources = {name: find(name) for name in names}
    kernels = loaded.fingerprint
    for name, source in sources.items():
        kernels = kernels.replace(f"{_name(name, source)}-", "")
    weights = "+".join(map(_weights, sources.values()))
    return ModelIdentity(name=section.target, weights=weights, kernels=kernels, tokenizer=tokenizers.target.fingerprint)
