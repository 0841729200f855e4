"""Versions and aliases in plain folders, without MLflow; one lock file guards them.

<root>/<pair>/aliases.json          alias -> version
<root>/<pair>/v000001/snapshot/     the bundle, hard-linked where the disk allows it
<root>/<pair>/v000001/notes.json
A version's folder is written aside, synced and renamed, and only then named by an alias; so a visible version is
complete and an alias names an existing one, also after a power failure.
"""

import json
import logging
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from omnidraft import files
from omnidraft.errors import RegistryError
from omnidraft.files import put_in_place
from omnidraft.ports import Judgement, SnapshotVersion
from omnidraft.registry import manifest_export, staging
from omnidraft.registry.retention import Retention
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.snapshots.signing import UNSIGNED, SnapshotSigning

LOCK_TIMEOUT_S = 60.0
_VERSION_NAME = re.compile(r"v([0-9]{6}|[1-9][0-9]{6,})")
"""The name of a version's folder. Others, such as copies that somebody keeps beside them, are no versions."""

logger = logging.getLogger(__name__)


class DirectoryRegistry:
    """The snapshots of one (drafter, target) pair below a folder that all processes can reach."""

    def __init__(
        self,
        root: Path,
        drafter: str,
        target: str,
        *,
        keep_resume: int,
        keep_serving: int | None = None,
        signing: SnapshotSigning = UNSIGNED,
    ) -> None:
        """Open the registry. `keep_serving`: None keeps the weights of all versions."""
        self._root = root / manifest_export.pair_name(drafter, target)
        self._pair = (drafter, target)
        self._retention = Retention(keep_resume, keep_serving)
        self._signing = signing
        self._damaged = staging.DamagedVersions()
        self._without_notes = set[int]()  # of those whose notes are damaged, to be told once each

    def publish(self, bundle: Path, parent: int | None) -> SnapshotVersion:
        manifest = staging.check_incoming(bundle, *self._pair, self._signing)
        with self._locked():
            newest = self._newest()
            if newest is not None and staging.is_published(newest, manifest):  # the publisher never got the answer
                version, is_waiting = newest.version, staging.awaits_judgement(newest)
            else:
                staging.check_parent(newest, parent)
                version, is_waiting = max(map(_number, self._folders()), default=0) + 1, True
                self._add(bundle, version, manifest)
            if is_waiting:
                self._write_aliases(self._aliases() | {"challenger": version})
            self._prune()
        return self.resolve(str(version))

    def versions(self, newest: int | None = None) -> tuple[SnapshotVersion, ...]:
        with _translate_errors(self._root):
            aliases = self._aliases()
            found = {each.version: each for each in islice(self._newest_first(aliases), newest)}
            named = [self._find(self._folder(number), aliases) for number in aliases.values() if number not in found]
            found |= {each.version: each for each in named if each}
            return tuple(each for _, each in sorted(found.items()))

    def _newest_first(self, aliases: Mapping[str, int]) -> Iterator[SnapshotVersion]:
        for folder in reversed(self._folders()):
            if (version := self._find(folder, aliases)) is not None:
                yield version

    def _find(self, folder: Path, aliases: Mapping[str, int]) -> SnapshotVersion | None:
        return self._damaged.read(_number(folder), partial(self._read, folder, aliases))

    def resolve(self, name: str) -> SnapshotVersion:
        if name == "latest":
            return staging.latest(self.versions(1))
        with _translate_errors(self._root):
            aliases = self._aliases()
            number = aliases.get(name, int(name) if name.isdecimal() else None)
            if number is None or not self._folder(number).is_dir():
                raise staging.not_found(name, max(map(_number, self._folders()), default=0))
            return self._read(self._folder(number), aliases)

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        manifest = self.resolve(str(version)).manifest

        def download(part: str, destination: Path) -> None:
            source = self._folder(version) / "snapshot" / part
            if not source.is_dir():
                raise staging.missing_part(version, part)
            files.link_folder(source, destination / part)

        with _translate_errors(self._root):
            destination = into / manifest_export.folder_name(version, manifest)
            return staging.stage(destination, manifest, parts, download, self._signing)

    def promote(self, version: int, previous: int | None = None) -> None:
        with self._locked():
            staging.check_servable(self.resolve(str(version)))
            aliases = self._aliases()
            former = aliases.get("champion", version)
            moved = {**aliases, "champion": version}
            if (previous := previous or former) != version:
                moved["previous"] = previous
            if aliases.get("challenger") in (version, former):
                del moved["challenger"]
            self._write_aliases(moved)

    def annotate(self, version: int, notes: Mapping[str, str]) -> None:
        with self._locked():
            told = {**(self._notes(version) or {}), **notes}
            files.write_text(self._folder(version) / "notes.json", json.dumps(told, indent=2))

    def remove_files(self, version: int, parts: Sequence[str]) -> None:
        with self._locked():
            aliases = self._aliases()
            staging.check_removable(version, aliases.get("champion"), parts)
            if "serving" in parts:
                self._write_aliases({name: number for name, number in aliases.items() if number != version})
            self._delete(version, parts)

    def _folder(self, version: int) -> Path:
        return self._root / f"v{version:06d}"

    def _folders(self) -> list[Path]:
        """Return the folders of all versions, damaged ones too, oldest first."""
        return sorted((each for each in self._root.glob("v*") if _VERSION_NAME.fullmatch(each.name)), key=_number)

    def _newest(self) -> SnapshotVersion | None:
        return next(reversed(self.versions(1)), None)

    def _read(self, folder: Path, aliases: Mapping[str, int]) -> SnapshotVersion:
        manifest = bundle.read_manifest(folder / "snapshot")
        version = _number(folder)
        names = tuple(sorted(alias for alias, number in aliases.items() if number == version))
        notes = self._notes(version)
        present = {path.name for path in (folder / "snapshot").iterdir()}
        removed = tuple(part for part in bundle.parts_of(manifest) if part not in present)
        return SnapshotVersion(version, manifest, names, manifest.created_ms, Judgement.of(notes), removed)

    def _notes(self, version: int) -> dict[str, str] | None:
        """Return the notes of a version; None when they are damaged."""
        path = self._folder(version) / "notes.json"
        try:
            return {name: text for name, text in _read_json(path).items() if isinstance(text, str)}
        except ValueError as exc:
            if version not in self._without_notes:
                logger.error("%s is damaged, so version %d has no notes and is not judged: %s", path, version, exc)
                self._without_notes.add(version)
            return None

    def _add(self, source: Path, version: int, manifest: Manifest) -> None:
        for left in self._root.glob(".v*.partial"):  # by a publisher that died
            shutil.rmtree(left, ignore_errors=True)
        partial = self._root / f".v{version:06d}.{uuid.uuid4().hex}.partial"
        try:
            for part in bundle.parts_of(manifest):
                files.link_folder(source / part, partial / "snapshot" / part)
            bundle.write_manifest(partial / "snapshot", manifest)
            files.sync_tree(partial)
            put_in_place(partial, self._folder(version))
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # of a publication that the disk had no space for

    def _prune(self) -> None:
        for old, parts in self._retention.removable(self.versions(self._retention.next_examined())):
            with (
                staging.housekeeping(f"{' and '.join(parts)} of version {old.version}"),
                _translate_errors(self._root),
            ):
                self._delete(old.version, parts)

    def _delete(self, version: int, parts: Sequence[str]) -> None:
        """Delete those of these parts that are there. Raises OSError when files of one stay."""
        for part in parts:
            with suppress(FileNotFoundError):
                shutil.rmtree(self._folder(version) / "snapshot" / part)

    def _aliases(self) -> dict[str, int]:
        """Raises RegistryError when the file is damaged."""
        path = self._root / "aliases.json"
        try:
            aliases = _read_json(path)
            if not all(type(number) is int for number in aliases.values()):
                raise ValueError("what is not a version number")
        except ValueError as exc:
            advice = "move it away: the controller makes it anew, with the champion that the control log names"
            raise RegistryError(f"{path} is damaged: {exc}; {advice}") from exc
        return aliases

    def _write_aliases(self, aliases: Mapping[str, int]) -> None:
        files.write_text(self._root / "aliases.json", json.dumps(aliases, indent=2))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with _translate_errors(self._root):
            files.make_folder(self._root)
            with FileLock(self._root / ".lock", timeout=LOCK_TIMEOUT_S):
                yield


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("v"))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty when there is no file. Raises ValueError when it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except RecursionError as exc:
        raise ValueError(str(exc)) from exc
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__}")
    return content


@contextmanager
def _translate_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except Timeout as exc:
        raise RegistryError(f"{root} stays locked by another process for {LOCK_TIMEOUT_S:.0f} s; try again") from exc
    except OSError as exc:
        raise RegistryError(f"the registry at {root} cannot be used: {exc}") from exc
