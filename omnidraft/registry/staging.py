"""Checks of published snapshots and staging of fetched ones, which all registries share."""

import atexit
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from omnidraft import files
from omnidraft.errors import (
    RegistryError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    SnapshotStale,
    StorageError,
)
from omnidraft.ports import SnapshotVersion
from omnidraft.private_files import PRIVATE
from omnidraft.snapshots import bundle
from omnidraft.snapshots.bundle import is_private, setting_of
from omnidraft.snapshots.manifest import Manifest
from omnidraft.snapshots.signing import SnapshotSigning

logger = logging.getLogger(__name__)


PREFIX = "omnidraft-snapshots-"
LOCK = ".lock"


def own_folder(within: Path | None = None) -> Path:
    """Return a new folder, which nobody else may enter, for as long as this process lives.

    Args:
        within: None: the system's folder for temporary files.

    Raises:
        StorageError: the disk is full, or none can be made for another reason.
    """
    try:
        remove_abandoned(within)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=within))
        lock = FileLock(_lock_of(folder), thread_local=False)
        lock.acquire()
    except OSError as exc:
        raise StorageError(f"no folder for snapshots can be made: {exc}; free space there") from exc
    atexit.register(_remove, folder, lock)
    return folder


def remove_abandoned(within: Path | None = None) -> None:
    """Remove the folders of processes that were killed; those of others stay."""
    for path in (within or Path(tempfile.gettempdir())).glob(f"{PREFIX}*{LOCK}"):
        lock = FileLock(path, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except (Timeout, OSError):
            continue  # it lives, or is another user's
        _remove(path.with_name(path.name.removesuffix(LOCK)), lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _remove(folder: Path, lock: FileLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
    lock.release()


_T = TypeVar("_T")


class DamagedVersions:
    """Versions with unreadable manifests, which are left out of every list and logged once each."""

    def __init__(self) -> None:
        self._reported: set[int] = set()

    def read(self, version: int, read: Callable[[], _T]) -> _T | None:
        """Return what `read` does, None where the version is damaged."""
        try:
            return read()
        except SnapshotCorrupt as exc:
            if version not in self._reported:
                logger.error("version %d is damaged and left out: %s", version, exc)
                self._reported.add(version)
            return None


def check_incoming(folder: Path, drafter: str, target: str, signing: SnapshotSigning) -> Manifest:
    """Return the manifest of a complete, intact snapshot of this pair, signed when there is a key.

    Raises:
        SnapshotCorrupt: a file does not match the manifest, or the manifest its signature; or it has to be signed, and
            this process cannot.
        ConfigError: the private key may not sign snapshots.
        RegistryError: it belongs to another pair.
    """
    manifest = bundle.verify(folder, bundle.parts_of(bundle.read_manifest(folder)))
    if (manifest.drafter, manifest.target) != (drafter, target):
        raise RegistryError(
            f"{folder} is of {manifest.drafter} for {manifest.target}, this registry keeps {drafter} for {target}"
        )
    if manifest.signatures:
        signing.require(manifest)
    return signing.sign(manifest)


def is_published(newest: SnapshotVersion, manifest: Manifest) -> bool:
    """Return whether this snapshot is the newest version. One that is signed now and was not then is a new one."""
    known = newest.manifest
    return known.snapshot_id == manifest.snapshot_id and known.signatures == manifest.signatures


def awaits_judgement(version: SnapshotVersion) -> bool:
    """Return whether nothing was decided about a version: else its publisher's next try would have it judged again, and
    undo an operator's rollback from it."""
    return version.judgement is None and not {"champion", "previous"} & set(version.aliases)


def check_parent(newest: SnapshotVersion | None, parent: int | None) -> None:
    """Raise SnapshotStale unless `parent` is the newest version."""
    actual = newest.version if newest else None
    if actual != parent:
        raise SnapshotStale(f"the newest version is {actual}, the publisher knows {parent}; resume from {actual}")


def check_removable(version: int, champion: int | None, parts: Sequence[str]) -> None:
    """Raise SnapshotError when these parts of a version must stay."""
    if version == champion and "serving" in parts:
        raise SnapshotError(f"version {version} is the champion, whose weights serve; promote another one first")


@contextmanager
def housekeeping(what: str, done: str = "deleted") -> Iterator[None]:
    """Log that something could not be done, instead of raising SnapshotError: what was published before is."""
    try:
        yield
    except SnapshotError as exc:
        logger.warning("%s could not be %s; the next publication tries again: %s", what, done, exc)


def missing_part(version: int, part: str) -> SnapshotNotFound:
    """Return the error for a part whose files were deleted."""
    return SnapshotNotFound(f"version {version} has no {part} part any more ({setting_of(part)})")


def check_servable(version: SnapshotVersion) -> None:
    """Raise SnapshotNotFound when the version's weights were deleted, so that no worker could load it."""
    if not version.is_servable:
        raise missing_part(version.version, "serving")


def not_found(name: str, newest: int) -> SnapshotNotFound:
    """Return the error for a version or alias that does not exist, where this is the newest version, 0 without any."""
    there_are = f"versions 1 to {newest}" if newest > 1 else "version 1 only" if newest else "no versions yet"
    what = f"version {name}" if name.isdecimal() else f"snapshot called {name!r}"
    return SnapshotNotFound(f"there is no {what}; there {'is' if newest == 1 else 'are'} {there_are}")


def latest(versions: Sequence[SnapshotVersion]) -> SnapshotVersion:
    """Return the last of these versions. Raises SnapshotNotFound when there is none."""
    if not versions:
        raise SnapshotNotFound("no snapshot is called 'latest': there are no versions yet")
    return versions[-1]


def stage(
    destination: Path,
    manifest: Manifest,
    parts: Sequence[str],
    download: Callable[[str, Path], None],
    signing: SnapshotSigning,
) -> Path:
    """Make a local snapshot folder with these parts at `destination`; parts that are there and intact are kept.

    Args:
        download: puts a part's folder into a folder.

    Raises:
        SnapshotCorrupt: the manifest lacks a trusted signature, or a download does not match it and is deleted.
    """
    signing.require(manifest)
    is_shared = signing.trusted_keys is None
    destination.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(destination.with_name(f".{destination.name}.lock")):
        if not _has_manifest(destination, manifest):
            bundle.write_manifest(destination, manifest)
        for part in sorted(set(parts) & set(bundle.parts_of(manifest))):
            if not _is_intact(destination, part, is_shared=is_shared):
                _replace_part(destination, part, download, is_shared=is_shared)
    return destination


def _has_manifest(folder: Path, manifest: Manifest) -> bool:
    """Return whether a folder has this manifest, and not none, another, or a piece from when the disk was full."""
    try:
        return bundle.read_manifest(folder) == manifest
    except SnapshotCorrupt:
        return False


def _is_intact(folder: Path, part: str, *, is_shared: bool) -> bool:
    try:
        bundle.verify(folder, [part])
    except SnapshotCorrupt:
        return False
    return is_shared or not files.has_links(folder / part)


def _replace_part(folder: Path, part: str, download: Callable[[str, Path], None], *, is_shared: bool) -> None:
    """Download a part and verify it. `is_shared`: its files may be hard links into the registry; otherwise whoever can
    write there could change them after they were verified."""
    shutil.rmtree(folder / part, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
        download(part, Path(partial))
        if not is_shared:
            files.separate(Path(partial))
        for path in Path(partial, part).rglob("*.*"):
            if is_private(path.relative_to(partial).as_posix()) and path.stat().st_mode & ~PRIVATE & 0o777:
                path.chmod(PRIVATE)
        (Path(partial) / part).rename(folder / part)
    try:
        bundle.verify(folder, [part])
    except SnapshotCorrupt:
        shutil.rmtree(folder / part)
        raise
