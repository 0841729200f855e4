"""Versions and aliases in plain folders, for people who want no MLflow; one lock file guards them.

<root>/<pair>/aliases.json
<root>/<pair>/v000001/snapshot/     the bundle, hard-linked where the disk allows it
<root>/<pair>/v000001/notes.json, metrics.jsonl, reports/
A version's folder is made aside and renamed, so a version that can be seen is whole.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from omnidraft.errors import RegistryError, SnapshotNotFound
from omnidraft.ports import SnapshotVersion
from omnidraft.registry import staging, story
from omnidraft.snapshots import bundle
from omnidraft.snapshots.files import link_folder
from omnidraft.snapshots.manifest import Manifest

LOCK_TIMEOUT_S = 60.0


class DirectoryRegistry:
    """The snapshots of one (drafter, target) pair below a folder that all processes can reach."""

    def __init__(
        self, root: Path, drafter: str, target: str, *, keep_resume: int, signing_key: str | None = None
    ) -> None:
        self._root = root / story.pair_name(drafter, target)
        self._pair = (drafter, target)
        self._keep_resume = keep_resume
        self._signing_key = signing_key

    def publish(self, bundle: Path, parent: int | None) -> SnapshotVersion:
        manifest = staging.check_incoming(bundle, *self._pair, self._signing_key)
        with self._locked():
            newest = self._newest()
            if newest is not None and staging.is_published(newest, manifest):
                version = newest.version  # the answer was lost
            else:
                staging.check_parent(newest, parent)
                version = newest.version + 1 if newest else 1
                self._add(bundle, version, manifest)
            self._write_aliases(self._aliases() | {"challenger": version})
            self._prune()
        return self.resolve(str(version))

    def versions(self) -> tuple[SnapshotVersion, ...]:
        aliases = self._aliases()
        return tuple(self._read(folder, aliases) for folder in sorted(self._root.glob("v*[0-9]")))

    def resolve(self, name: str) -> SnapshotVersion:
        return staging.pick(self.versions(), name)

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        manifest = self.resolve(str(version)).manifest

        def download(part: str, destination: Path) -> None:
            source = self._folder(version) / "snapshot" / part
            if not source.is_dir():
                raise SnapshotNotFound(f"version {version} has no {part} part any more (registry.keep_resume)")
            link_folder(source, destination / part)

        with _translated(self._root):
            place = into / story.folder_name(version, manifest)
            return staging.stage(place, manifest, parts, download, self._signing_key)

    def promote(self, version: int) -> None:
        with self._locked():
            self.resolve(str(version))
            aliases = self._aliases()
            champion = aliases.get("champion")
            if champion is not None and champion != version:
                aliases["previous"] = champion
            if aliases.get("challenger") == version:
                del aliases["challenger"]
            self._write_aliases(aliases | {"champion": version})

    def annotate(self, version: int, notes: Mapping[str, str]) -> None:
        with self._locked():
            path = self._folder(version) / "notes.json"
            known = json.loads(path.read_text()) if path.exists() else {}
            _write_aside(path, json.dumps({**known, **notes}, indent=2))

    def log_metrics(self, version: int, metrics: Mapping[str, float], step: int) -> None:
        with self._locked(), (self._folder(version) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def log_file(self, version: int, path: Path) -> None:
        with self._locked():
            reports = self._folder(version) / "reports"
            reports.mkdir(exist_ok=True)
            shutil.copyfile(path, reports / path.name)

    def _folder(self, version: int) -> Path:
        return self._root / f"v{version:06d}"

    def _newest(self) -> SnapshotVersion | None:
        versions = self.versions()
        return versions[-1] if versions else None

    def _read(self, folder: Path, aliases: Mapping[str, int]) -> SnapshotVersion:
        manifest = bundle.read_manifest(folder / "snapshot")
        version = int(folder.name.removeprefix("v"))
        names = tuple(sorted(alias for alias, number in aliases.items() if number == version))
        return SnapshotVersion(version, manifest, names, manifest.created_ms)

    def _add(self, source: Path, version: int, manifest: Manifest) -> None:
        partial = self._root / f".v{version:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a publisher that died
        for part in bundle.parts_of(manifest):
            link_folder(source / part, partial / "snapshot" / part)
        bundle.write_manifest(partial / "snapshot", manifest)
        partial.rename(self._folder(version))

    def _prune(self) -> None:
        for version in self.versions()[: -self._keep_resume]:
            shutil.rmtree(self._folder(version.version) / "snapshot" / "resume", ignore_errors=True)

    def _aliases(self) -> dict[str, int]:
        path = self._root / "aliases.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _write_aliases(self, aliases: Mapping[str, int]) -> None:
        _write_aside(self._root / "aliases.json", json.dumps(aliases, indent=2))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with _translated(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            with FileLock(self._root / ".lock", timeout=LOCK_TIMEOUT_S):
                yield


def _write_aside(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


@contextmanager
def _translated(root: Path) -> Iterator[None]:
    try:
        yield
    except Timeout as exc:
        raise RegistryError(f"{root} stays locked by another process for {LOCK_TIMEOUT_S:.0f} s; try again") from exc
    except OSError as exc:
        raise RegistryError(f"the registry at {root} cannot be used: {exc}") from exc
