"""The tokenizers of a target and its drafter, and what tells the drafter from others."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.errors import ConfigError
from omnidraft.models.catalog import store
from omnidraft.models.catalog.install import read_origin
from omnidraft.progress import stages
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
    return TargetVocabulary(folder, load_tokenizer(folder, store.default_home() / "tokenizers"))


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

    drafter_folder = store.resolve(settings.models.drafter, progress=progress)
    home = store.default_home()
    stages.info("reading the tokenizers of %s and %s", settings.models.target, settings.models.drafter)
    target, drafter = (load_tokenizer(folder, home / "tokenizers") for folder in (target_folder, drafter_folder))
    alignment = align_cached(drafter, target, home / "alignments")
    return Vocabularies(target_folder, target, drafter_folder=drafter_folder, drafter=drafter, alignment=alignment)


def drafter_hash(folder: Path, tokenizer: "HfTokenizer") -> str:
    """Return what tells this base drafter from others: where its weights came from, else its tokenizer."""
    made = read_origin(folder)
    return made.fingerprint if made else tokenizer.fingerprint
