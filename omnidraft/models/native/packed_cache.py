"""The folder of packed models: each model folder is packed once per precision, for all processes of a user.

A file belongs to one state of the model's folder (names, sizes and times of config.json and *.safetensors) and to one
layout; any other is packed anew. When the files exceed their bound, those whose last use is longest ago are deleted,
but none that a process has mapped.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft.errors import ModelCorrupt
from omnidraft.files import file_states
from omnidraft.models.native import library as native
from omnidraft.models.native.packed_file import PackedFile, is_in_use, write
from omnidraft.models.native.packed_model import ModelSizes, PackedModel, Part
from omnidraft.private_files import make_folder, require_unshared_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUFFIX = ".safetensors"
FolderState = dict[str, Any]
"""Everything that the packed bytes of a model folder depend on."""
MAX_BYTES = 20 * 2**30
"""As much disk as the packed files of a user may take: two models of 7 billion weights in int8, with drafters."""
_REPORT_S = 3.0
"""Time between two reports of a first packing."""

logger = logging.getLogger(__name__)


class PackedCache:
    """The packed files in one folder."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def find(self, source: Path, precision: str) -> PackedModel | None:
        """Return the weights of this model folder; None if it is not packed, or not as it should be."""
        path = self._path(source, precision)
        try:
            require_unshared_folder(self.folder)
            file = PackedFile(path)
            is_current = file.description["key"] == _state(source, precision)
        except FileNotFoundError:
            return None
        except (OSError, ModelCorrupt) as exc:
            logger.warning("packing %s anew: %s", source.name, exc)
            return None
        if not is_current:
            return None
        _mark_used(path)
        return _model(file)

    def state(self, source: Path, precision: str) -> FolderState | None:
        """Return the state that a model folder has now, None if it cannot be read."""
        with contextlib.suppress(OSError):
            return _state(source, precision)
        return None

    def packed(
        self, source: Path, state: FolderState | None, model: "PreTrainedModel", precision: str, library: ctypes.CDLL
    ) -> PackedModel:
        """Return the weights of a model that is not packed yet, or that another process is packing.

        They are those of their new file; where no file can be written they are in memory alone.

        Args:
            state: of the folder, from before the model was loaded: it may have changed since.
        """
        from filelock import FileLock

        from omnidraft.models.native import weights

        path = self._path(source, precision)
        try:
            make_folder(self.folder)
            require_unshared_folder(self.folder)
            with FileLock(path.with_suffix(".lock")):
                found = self.find(source, precision)
                if found is not None:
                    return found
                if state is None:
                    raise OSError("the folder cannot be read")
                new = weights.ModelParts(model, precision, library)
                self._make_space(sum(part.padded_bytes for part in new.parts))
                return _model(_write(path, state, source.name, new.sizes, new.parts))
        except (OSError, ModelCorrupt) as exc:
            logger.warning("the next start has to pack %s again: %s", source.name, exc)
        return weights.packed_in_memory(model, precision, library)

    def files(self) -> list[Path]:
        """Return all complete files, that of the oldest last use first."""
        return list(self._sizes())

    def _sizes(self) -> dict[Path, int]:
        """Return the bytes of all complete files, in the order of `files`."""
        found = sorted(_listed(self.folder, f"*{SUFFIX}").items(), key=lambda each: each[1].st_atime_ns)
        return {path: status.st_size for path, status in found}

    def _make_space(self, needed_bytes: int) -> None:
        """Delete what killed processes left, then the files of the oldest last use, as many as needed. Raises OSError,
        and deletes no complete file, where that would not be enough."""
        for path in _listed(self.folder, ".*.partial"):
            _delete_unused(path)
        sizes = self._sizes()
        unused = [path for path in sizes if not is_in_use(path)]
        excess_bytes = needed_bytes + sum(sizes.values()) - self._max_bytes
        if excess_bytes > sum(sizes[path] for path in unused):
            bound = f"the {self._max_bytes / 2**30:.1f} GiB of {self.folder}"
            raise OSError(f"{needed_bytes / 2**30:.1f} GiB more than what is in use do not fit into {bound}")
        for path in unused:
            if excess_bytes > 0 and _delete_unused(path):
                excess_bytes -= sizes[path]

    def _path(self, source: Path, precision: str) -> Path:
        resolved = source.resolve()
        digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
        return self.folder / f"{resolved.name}-{precision}-{digest}{SUFFIX}"


def _state(source: Path, precision: str) -> FolderState:
    """Return the state that a folder has now. Raises OSError."""
    read = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    files = file_states(read)
    return {"folder": str(source.resolve()), "files": files, "precision": precision, "layout": native.LAYOUT}


def _model(file: PackedFile) -> PackedModel:
    file.copy()
    sizes = ModelSizes.read(file.description["sizes"])
    return PackedModel(sizes, file.description["key"]["precision"], file.addresses, file)


def _write(path: Path, state: FolderState, name: str, sizes: ModelSizes, parts: Sequence[Part]) -> PackedFile:
    logger.info("packing %s as %s, once", name, state["precision"])
    started = time.perf_counter()
    file = write(path, {"key": state, "sizes": asdict(sizes)}, parts, _reporter(name))
    logger.info("packed %s in %.1f s", path, time.perf_counter() - started)
    return file


def _reporter(name: str) -> Callable[[int, int], None]:
    """Return a function that logs the progress every few seconds."""
    reported_s = time.monotonic()

    def report(written_bytes: int, total_bytes: int) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s > _REPORT_S:
            reported_s = time.monotonic()
            logger.info("packing %s: %d %%", name, 100 * written_bytes // total_bytes)

    return report


def _listed(folder: Path, pattern: str) -> dict[Path, os.stat_result]:
    """Return the states of a folder's files but those that another process deletes meanwhile."""
    found = {}
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[path] = path.stat()
    return found


def _mark_used(path: Path) -> None:
    """Set the time of the last use, which not every file system sets itself."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _delete_unused(path: Path) -> bool:
    """Delete a file unless a process uses it; return whether it is gone."""
    if is_in_use(path):
        return False
    path.unlink(missing_ok=True)
    return True
