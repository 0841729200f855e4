"""Snapshots as folders for other engines: the drafter alone, without n-gram cache, memory or acceptance head."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omnidraft.config import Settings
from omnidraft.errors import ConfigError, RequestError, SnapshotError, StorageError, VocabularyError
from omnidraft.wiring.distiller import drafter_hash
from omnidraft.wiring.models import vocabularies
from omnidraft.wiring.named_snapshots import named_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from omnidraft.snapshots.manifest import Manifest

ExportFormat = Literal["hf", "hf-target-vocab", "gguf"]
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
    write = _writer(settings, form, folder.name)
    model = _drafter(settings, name)
    with _put_in_place(folder) as partial:
        write(model, partial)


def require_empty(folder: Path) -> None:
    """Raise RequestError unless there is nothing there, or an empty folder."""
    if folder.is_dir() and any(folder.iterdir()):
        raise RequestError(f"{folder} is not empty; give a folder that is not there yet")
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; give a folder that is not there yet")


def _writer(settings: Settings, form: ExportFormat, stem: str) -> "Callable[[PreTrainedModel, Path], None]":
    """Return what writes a model in this form. Raises ModelError when what it needs is not there."""
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.model_folder import write_folder

    match form:
        case "hf":
            own = _drafter_folder(settings)
            return lambda model, partial: write_folder(model, own, partial)
        case "hf-target-vocab":
            return _target_vocabulary_writer(settings)
        case "gguf":
            from omnidraft.models.llamacpp.gguf_export import write_gguf

            base = store.gguf_path(settings.models.drafter)

            def write(model: "PreTrainedModel", partial: Path) -> None:
                partial.mkdir()
                write_gguf(model, base, partial / f"{stem}.gguf")

            return write


def _target_vocabulary_writer(settings: Settings) -> "Callable[[PreTrainedModel, Path], None]":
    from omnidraft.models.hf.model_folder import write_folder
    from omnidraft.models.hf.target_vocabulary import adopt_target_vocabulary

    tokenizers = vocabularies(settings)

    def write(model: "PreTrainedModel", partial: Path) -> None:
        adopt_target_vocabulary(model, tokenizers.alignment, tokenizers.target.vocabulary)
        write_folder(model, tokenizers.target_folder, partial)

    return write


def _drafter(settings: Settings, name: str) -> "PreTrainedModel":
    """Load the drafter with the weights of a snapshot."""
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


@contextmanager
def _put_in_place(folder: Path) -> Iterator[Path]:
    """Yield the path of a folder to make; rename it to `folder` at the end. Raises StorageError; nothing stays then."""
    from safetensors import SafetensorError

    from omnidraft.snapshots.files import put_in_place, sync_tree

    whole = folder.absolute()
    partial = whole.with_name(f".{whole.name}.{uuid.uuid4().hex}.partial")
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        sync_tree(partial)
        put_in_place(partial, whole)
    except (OSError, SafetensorError) as exc:  # safetensors has its own error for a full disk
        raise StorageError(f"{folder} cannot be written: {exc}; free space there") from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)
