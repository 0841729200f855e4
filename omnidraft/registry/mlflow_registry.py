"""Versions and aliases in MLflow: one registered model and one experiment per (drafter, target), one run per version.

Order of a publish: files into a fresh run, then the version, then the tag `ready`, then the run's end, then the alias.
Only a ready version is visible; a publish that fails before that deletes its version and run, and what a killed one
left is deleted a day later. A publish does not fail because of old files that cannot be deleted.
MLflow numbers versions atomically and never twice, so among publishers with one parent the lowest number wins; the
others delete theirs. A version that stays unready for ABANDONED_MS belongs to a publisher that died.
An alias cannot be moved on a condition, so only the controller moves `champion` and `previous` (fleet/controller.py).
Files of a local store are hard-linked in and out; through a server they travel over HTTP.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft.errors import SnapshotNotFound, SnapshotStale
from omnidraft.ports import Judgement, SnapshotVersion
from omnidraft.registry import manifest_export, staging
from omnidraft.registry.manifest_export import from_tags, to_tags
from omnidraft.registry.mlflow_runs import Runs
from omnidraft.registry.mlflow_store import (
    create_model,
    find_model,
    newest_first,
    open_client,
    translate_errors,
    undo_on_failure,
    versions_of_run,
)
from omnidraft.registry.retention import Retention
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.snapshots.signing import UNSIGNED, SnapshotSigning

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ABANDONED_MS = 60_000
READY_TAG = "ready"
REMOVED = "removed"
"""The value of the tag that is named after a part, once its files are deleted."""


class MlflowRegistry:
    """The snapshots of one (drafter, target) pair in an MLflow store, which the first call opens, for importing MLflow
    takes seconds; an opening that failed is tried again by the next call."""

    def __init__(
        self,
        url: str,
        drafter: str,
        target: str,
        *,
        artifacts: str | None,
        keep_resume: int,
        keep_serving: int | None = None,
        signing: SnapshotSigning = UNSIGNED,
        abandoned_ms: int = ABANDONED_MS,
    ) -> None:
        """`keep_serving`: None keeps the weights of all versions."""
        self._url, self._artifacts = url, artifacts
        self._pair = (drafter, target)
        self._name = manifest_export.pair_name(drafter, target)
        self._retention = Retention(keep_resume, keep_serving)
        self._signing = signing
        self._abandoned_ms = abandoned_ms
        self._damaged = staging.DamagedVersions()
        self._own_runs = set[str]()  # of which some may have failed, without being withdrawn

    @cached_property
    def _client(self) -> "MlflowClient":
        return open_client(self._url)

    @cached_property
    def _runs(self) -> Runs:
        return Runs(self._client, self._url, self._name, self._artifacts)

    def publish(self, bundle: Path, parent: int | None) -> SnapshotVersion:
        manifest = staging.check_incoming(bundle, *self._pair, self._signing)
        with self._translate_errors("publishing a snapshot"):
            newest = next(reversed(self.versions(1)), None)
            if newest is not None and staging.is_published(newest, manifest):  # the publisher never got the answer
                version, is_waiting = newest.version, staging.awaits_judgement(newest)
            else:
                staging.check_parent(newest, parent)
                version, is_waiting = self._add(bundle, manifest, parent), True
                with self._housekeeping("a point of the pair's curves", "logged"):
                    self._runs.log_point(manifest_export.metrics(manifest), version)
            if is_waiting:
                self._client.set_registered_model_alias(self._name, "challenger", str(version))
        with self._housekeeping("what is kept no longer"):
            self._prune()
            self._clear_up()
        return self.resolve(str(version))

    def versions(self, newest: int | None = None) -> tuple[SnapshotVersion, ...]:
        with self._translate_errors("listing snapshots"):
            ready = filter(self._is_ready, newest_first(self._client, self._name))
            found = {int(each.version): each for each in islice(ready, newest)}
            aliases = self._aliases() if found else {}
            found |= {number: each for number in set(aliases.values()) - set(found) if (each := self._find(number))}
            return tuple(self._snapshot_version(found[number], aliases) for number in sorted(found))

    def resolve(self, name: str) -> SnapshotVersion:
        if name == "latest":
            return staging.latest(self.versions(1))
        with self._translate_errors(f"resolving {name}"):
            aliases = self._aliases()
            number = aliases.get(name, int(name) if name.isdecimal() else None)
            newest = int(next((each.version for each in newest_first(self._client, self._name)), 0))
            if number is None or number > newest:
                raise staging.not_found(name, newest)
            return self._snapshot_version(self._get(number), aliases)

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        with self._translate_errors(f"fetching version {version}"):
            registered = self._get(version)
            manifest = _manifest_of(registered)

            def download(part: str, destination: Path) -> None:
                self._runs.download(version, _run_id(registered), part, destination)

            destination = into / manifest_export.folder_name(version, manifest)
            return staging.stage(destination, manifest, parts, download, self._signing)

    def promote(self, version: int, previous: int | None = None) -> None:
        with self._translate_errors(f"promoting version {version}"):
            staging.check_servable(self.resolve(str(version)))
            former = self._aliases().get("champion", version)
            if (previous := previous or former) != version:
                self._client.set_registered_model_alias(self._name, "previous", str(previous))
            self._client.set_registered_model_alias(self._name, "champion", str(version))
            if self._aliases().get("challenger") in (version, former):  # read again: a publication may have moved it
                self._client.delete_registered_model_alias(self._name, "challenger")

    def annotate(self, version: int, notes: Mapping[str, str]) -> None:
        with self._translate_errors(f"annotating version {version}"):
            for name, text in notes.items():
                self._client.set_model_version_tag(self._name, str(version), name, text)

    def remove_files(self, version: int, parts: Sequence[str]) -> None:
        with self._translate_errors(f"deleting files of version {version}"):
            registered, aliases = self._get(version), self._aliases()
            staging.check_removable(version, aliases.get("champion"), parts)
            for alias in [name for name, number in aliases.items() if "serving" in parts and number == version]:
                self._client.delete_registered_model_alias(self._name, alias)
            self._remove(registered, parts)

    def _add(self, folder: Path, manifest: Manifest, parent: int | None) -> int:
        text = f"Snapshots of {' drafting for '.join(self._pair)}. `champion` serves, `challenger` waits for judgement."
        create_model(self._client, self._name, text)
        run_id, artifact_uri = self._runs.upload(folder, manifest)
        self._own_runs.add(run_id)
        with undo_on_failure(partial(self._withdraw, run_id)):
            created = self._client.create_model_version(
                self._name,
                source=artifact_uri,
                run_id=run_id,
                tags=manifest_export.tags(manifest) | to_tags(manifest),
                await_creation_for=0,
            )
            number = int(created.version)
            self._check_won(created, parent or 0)
            text = manifest_export.description(manifest, number, self._number_of(manifest.parent_id))
            self._client.update_model_version(self._name, created.version, text)
            self._client.set_tag(run_id, "mlflow.note.content", text)
            self._mark_ready(number)
            self._client.update_run(run_id, name=f"v{number} {manifest.snapshot_id}")
            self._runs.finish(run_id)
        return number

    def _number_of(self, snapshot_id: str | None) -> int | None:
        """Return the newest version with this snapshot; None: there is none."""
        versions = newest_first(self._client, self._name) if snapshot_id is not None else ()
        return next((int(each.version) for each in versions if each.tags.get("snapshot_id") == snapshot_id), None)

    def _check_won(self, created: "ModelVersion", parent: int) -> None:
        """Raise SnapshotStale when another publisher's version lies between the parent and ours."""
        versions = newest_first(self._client, self._name)
        for rival in list(takewhile(lambda each: int(each.version) > parent, versions)):
            if int(rival.version) > int(created.version) or rival.run_id == created.run_id:
                continue  # younger, or ours: a retried request created it twice
            if READY_TAG in rival.tags and not self._is_ready(rival):
                continue  # damaged since then; the publisher continued from an earlier one
            age_ms = abs(created.creation_timestamp - rival.creation_timestamp)  # clocks may go back
            if READY_TAG in rival.tags or (age_ms < self._abandoned_ms and rival.run_id not in self._own_runs):
                raise SnapshotStale(f"version {rival.version} was published since {parent}; resume from it")
            self._client.delete_model_version(self._name, str(rival.version))

    def _mark_ready(self, version: int) -> None:
        """Make the version visible. Raises SnapshotStale when another publisher took it for abandoned meanwhile."""
        try:
            with self._translate_errors(f"finishing version {version}"):
                self._client.set_model_version_tag(self._name, str(version), READY_TAG, "true")
        except SnapshotNotFound as exc:
            raise SnapshotStale(f"publishing version {version} took too long, another publisher went ahead") from exc

    def _withdraw(self, run_id: str) -> None:
        """Delete a run and its version, unless that is visible already: then publishing again finds it, finished."""
        versions = versions_of_run(self._client, self._name, run_id)
        if any(READY_TAG in each.tags for each in versions):
            return self._runs.finish(run_id)
        for each in versions:
            with suppress(SnapshotNotFound), self._translate_errors(f"withdrawing version {each.version}"):
                self._client.delete_model_version(self._name, str(each.version))
        self._runs.discard(run_id)

    def _prune(self) -> None:
        for old, parts in self._retention.removable(self.versions(self._retention.next_examined())):
            with self._housekeeping(f"{' and '.join(parts)} of version {old.version}"):
                registered = self._get(old.version)
                if self._snapshot_version(registered, self._aliases()).aliases == old.aliases:  # nobody chose it since
                    self._remove(registered, parts)

    def _clear_up(self) -> None:
        """Withdraw what publishers that died have left."""
        for run_id in self._runs.abandoned():
            with self._housekeeping(f"the abandoned run {run_id}"):
                self._withdraw(run_id)

    @contextmanager
    def _housekeeping(self, what: str, done: str = "deleted") -> Iterator[None]:
        with staging.housekeeping(what, done), self._translate_errors("housekeeping"):
            yield

    def _remove(self, registered: "ModelVersion", parts: Sequence[str]) -> None:
        """Remove those of these parts that are still there."""
        for part in set(parts) & set(bundle.parts_of(_manifest_of(registered))):
            if registered.tags.get(part) != REMOVED:
                self._runs.remove(_run_id(registered), part)
                self._client.set_model_version_tag(self._name, str(registered.version), part, REMOVED)

    def _get(self, version: int) -> "ModelVersion":
        """Return a ready version. Raises SnapshotNotFound."""
        registered = self._client.get_model_version(self._name, str(version))
        if READY_TAG not in registered.tags:
            raise SnapshotNotFound(f"version {version} of {self._name} is still being published")
        return registered

    def _find(self, version: int) -> "ModelVersion | None":
        """Return a ready version with a readable manifest, if it is one."""
        with suppress(SnapshotNotFound), self._translate_errors(f"reading version {version}"):
            if self._is_ready(registered := self._get(version)):
                return registered
        return None

    def _is_ready(self, version: "ModelVersion") -> bool:
        """Return whether it is ready and its manifest readable."""
        is_shown = READY_TAG in version.tags
        return is_shown and self._damaged.read(int(version.version), partial(_manifest_of, version)) is not None

    def _aliases(self) -> dict[str, int]:
        model = find_model(self._client, self._url, self._name)
        return {name: int(version) for name, version in model.aliases.items()} if model else {}

    def _snapshot_version(self, registered: "ModelVersion", aliases: Mapping[str, int]) -> SnapshotVersion:
        number = int(registered.version)
        names = tuple(sorted(alias for alias, version in aliases.items() if version == number))
        manifest, tags = _manifest_of(registered), registered.tags
        removed = tuple(part for part in bundle.parts_of(manifest) if tags.get(part) == REMOVED)
        return SnapshotVersion(number, manifest, names, registered.creation_timestamp, Judgement.of(tags), removed)

    def _translate_errors(self, action: str) -> AbstractContextManager[None]:
        return translate_errors(self._url, action)


def _manifest_of(version: Any) -> Manifest:
    return from_tags(version.tags)


def _run_id(version: Any) -> str:
    return str(version.run_id)  # every version that `publish` makes has one
