"""Snapshots as folders for other engines: the drafter alone, without n-gram cache, memory or acceptance head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from omnidraft.assembly.models import drafter_hash, vocabularies
from omnidraft.assembly.registries import named_folder
from omnidraft.config import Settings
from omnidraft.errors import ConfigError, SnapshotError, VocabularyError
from omnidraft.files import require_empty, whole_folder
from omnidraft.models.catalog import store
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.system import default_home

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


def _writer(settings: Settings, form: ExportFormat, stem: str) -> Writer:
    """Return what writes a model in this form. Raises ModelError when what it needs is not there."""
    from omnidraft.models.hf.pretrained import write_folder
    from omnidraft.models.hf.target_vocabulary import adopt_target_vocabulary
    from omnidraft.models.llamacpp.gguf_export import write_gguf

    adopted = vocabularies(settings) if form in ("hf-target-vocab", "gguf-target-vocab") else None
    is_gguf = form in ("gguf", "gguf-target-vocab")
    base = store.gguf_path(settings.models.drafter) if is_gguf else _drafter_folder(settings)
    spelling = store.gguf_path(settings.models.target) if is_gguf and adopted else None

    def write(model: Any, partial: Path) -> None:
        if adopted is not None:
            adopt_target_vocabulary(model, adopted.alignment, adopted.target.vocabulary)
        if is_gguf:
            partial.mkdir()
            write_gguf(model, base, partial / f"{stem}.gguf", tokenizer=spelling)
        else:
            write_folder(model, base if adopted is None else adopted.target_folder, partial)

    return write


def _drafter(settings: Settings, name: str) -> Any:
    """Load the transformers model of the drafter with the weights of a snapshot."""
    from omnidraft.models.hf.drafter import load_learned

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
    if not settings.models.has_drafter:
        raise ConfigError("models.drafter is 'none': there is no drafter to export; name the one that learned")
    return store.resolve(settings.models.drafter)


def _require_drafter(settings: Settings, manifest: Manifest, folder: Path) -> None:
    """Raise VocabularyError unless the snapshot's weights belong into the drafter of this folder."""
    from omnidraft.models.hf.tokenizer import load_tokenizer

    here = drafter_hash(folder, load_tokenizer(folder, default_home() / "tokenizers"))
    if manifest.drafter_hash != here:
        raise VocabularyError(
            f"the snapshot was learned from {manifest.drafter} ({manifest.drafter_hash[:12]}), models.drafter is "
            f"{settings.models.drafter} ({here[:12]}); name the drafter that it belongs to"
        )
