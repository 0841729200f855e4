"""Target models from their names."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.errors import VocabularyError
from omnidraft.ports import Target
from omnidraft.progress import stages
from omnidraft.system import usable_processors
from omnidraft.wiring.vocabularies import TargetVocabulary

if TYPE_CHECKING:
    from omnidraft.models.native.packed_cache import PackedCache


def set_threads(settings: Settings) -> None:
    """Let this process compute on as many threads as the settings say, else on no more than can run at once."""
    import torch

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
    return EnsembleTarget(members)


def _target_on_kernels_or_transformers(settings: Settings, folder: Path) -> Target:
    from omnidraft.models.native.target import cached_target

    section, cache = settings.models, packed_cache()
    options = {"name": _name(section.target, folder), "precision": section.precision, "kernels": section.kernels}
    if cached := cached_target(folder, **options, cache=cache):
        return cached
    from omnidraft.models.hf.target import load_target  # takes seconds

    loaded = load_target(folder, **options, cache=cache)
    gc.collect()  # of the model in torch's form, which may be gigabytes; a worker that starts collects nothing itself
    return loaded


def packed_cache() -> "PackedCache":
    """Return the cache of packed models."""
    from omnidraft.models.catalog import store
    from omnidraft.models.native.packed_cache import PackedCache

    return PackedCache(store.default_home() / "packed")


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
    return load_target(
        gguf, tokenizers.target.vocabulary, name=name, threads=settings.decode.threads, max_texts=max_texts
    )


def _name(model: str, source: Path) -> str:
    """Return what fingerprints call this model: other weights under the same name have another. Raises ModelError."""
    from omnidraft.models.catalog import store
    from omnidraft.models.weights_name import weights_digest

    return f"{model}@{weights_digest(source, store.default_home() / store.DIGESTS)}"
