"""Snapshots as folders for other engines: the drafter alone, without n-gram cache, memory or acceptance head."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omnidraft.config import Settings
from omnidraft.errors import ConfigError, RequestError, SnapshotError, VocabularyError
from omnidraft.files import whole_folder
from omnidraft.wiring.named_snapshots import named_folder
from omnidraft.wiring.vocabularies import Vocabularies, drafter_hash, vocabularies

if TYPE_CHECKING:
    from omnidraft.snapshots.manifest import Manifest

Writer = Callable[[Any, Path], None]
"""Makes a folder with a transformers model in it."""
ExportFormat = Literal["hf", "hf-target-vocab", "gguf", "gguf-target-vocab"]
BASE = "base"
"""Names the base drafter as it comes."""


def export_snapshot(settings: Settings, name: str, form: ExportFormat, folder: Path) -> None:
    """Write the drafter of a snapshot into a folder, which appears whole or not at all.

    Args:
        name: a snapshot's folder, version or alias, or `base`.
        form: see `omnidraft snapshots export --help`.

    Raises:
        RequestError: the folder has something in it.
        SnapshotError: there is no such snapshot, or it has no weights of its own.
        VocabularyError: the snapshot is of another drafter.
        ModelError: the drafter cannot be had, or not be written in this form.
        StorageError: the disk is full, or cannot be written for another reason.
    """
    require_empty(folder)
    write = _writer(settings, form, folder.absolute().name)
    model = _drafter(settings, name)
    with whole_folder(folder.absolute(), str(folder)) as partial:
        write(model, partial)


def require_empty(folder: Path) -> None:
    """Raise RequestError unless there is nothing there, or an empty folder."""
    if folder.is_dir() and any(folder.iterdir()):
        raise RequestError(f"{folder} is not empty; give a folder that is not there yet")
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; give a folder that is not there yet")


def _writer(settings: Settings, form: ExportFormat, stem: str) -> Writer:
    """Return what writes a model in this form. Raises ModelError when what it needs is not there."""
    match form:
        case "hf":
            return _hf_writer(_drafter_folder(settings))
        case "gguf":
            return _gguf_writer(settings, f"{stem}.gguf", tokenizer=None)
        case "hf-target-vocab":
            tokenizers = vocabularies(settings)
            return _with_target_vocabulary(tokenizers, _hf_writer(tokenizers.target_folder))
        case "gguf-target-vocab":
            write = _gguf_writer(settings, f"{stem}.gguf", tokenizer=settings.models.target)
            return _with_target_vocabulary(vocabularies(settings), write)


def _hf_writer(tokenizer_folder: Path) -> Writer:
    from omnidraft.models.hf.pretrained import write_folder

    return lambda model, partial: write_folder(model, tokenizer_folder, partial)


def _gguf_writer(settings: Settings, name: str, *, tokenizer: str | None) -> Writer:
    """`tokenizer`: the model whose tokenizer the file has; None: the drafter."""
    from omnidraft.models.catalog import store
    from omnidraft.models.llamacpp.gguf_export import write_gguf

    base = store.gguf_path(settings.models.drafter)
    spelling = None if tokenizer is None else store.gguf_path(tokenizer)

    def write(model: Any, partial: Path) -> None:
        partial.mkdir()
        write_gguf(model, base, partial / name, tokenizer=spelling)

    return write


def _with_target_vocabulary(tokenizers: Vocabularies, write: Writer) -> Writer:
    from omnidraft.models.hf.target_vocabulary import adopt_target_vocabulary

    def adopt_and_write(model: Any, partial: Path) -> None:
        adopt_target_vocabulary(model, tokenizers.alignment, tokenizers.target.vocabulary)
        write(model, partial)

    return adopt_and_write


def _drafter(settings: Settings, name: str) -> Any:
    """Load the transformers model of the drafter with the weights of a snapshot."""
    from omnidraft.models.hf.drafter import load_learned
    from omnidraft.snapshots import bundle

    own = _drafter_folder(settings)
    if name == BASE:
        return load_learned(own, None, "full")[0]
    with named_folder(settings, name) as (version, snapshot):
        _require_drafter(settings, version.manifest, own)
        tensors = bundle.serving_tensors(snapshot)
        if tensors is None:
            raise SnapshotError(
                f"snapshot {name} has no weights of its own, it drafts with {settings.models.drafter} as it comes; "
                f"give '{BASE}' to export that"
            )
        return load_learned(own, tensors, "lora" if version.manifest.train == "lora" else "full")[0]


def _drafter_folder(settings: Settings) -> Path:
    from omnidraft.models.catalog import store

    if not settings.models.has_drafter:
        raise ConfigError("models.drafter is 'none': there is no drafter to export; name the one that learned")
    return store.resolve(settings.models.drafter)


def _require_drafter(settings: Settings, manifest: "Manifest", folder: Path) -> None:
    """Raise VocabularyError unless the snapshot's weights belong into the drafter of this folder."""
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.tokenizer import load_tokenizer

    here = drafter_hash(folder, load_tokenizer(folder, store.default_home() / "tokenizers"))
    if manifest.drafter_hash != here:
        raise VocabularyError(
            f"the snapshot was learned from {manifest.drafter} ({manifest.drafter_hash[:12]}), models.drafter is "
            f"{settings.models.drafter} ({here[:12]}); name the drafter that it belongs to"
        )
