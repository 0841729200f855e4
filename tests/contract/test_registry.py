"""The contract of every registry, over plain folders, MLflow on SQLite, and an MLflow server on PostgreSQL."""

import errno
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import stat
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from mlflow.entities import ViewType
from mlflow.store.artifact import artifact_repository_registry
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from omnidraft.config import LearnerSettings
from omnidraft.distill.publisher import Identity, Publisher
from omnidraft.distill.retrying import retry
from omnidraft.errors import (
    RegistryError,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotNotFound,
    SnapshotStale,
    StoreLibraryMissing,
)
from omnidraft.files import sha256_of
from omnidraft.registry import mlflow_runs, mlflow_store, retention
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.registry.manifest_export import MANIFEST_TAG, MAX_TAG_CHARACTERS, pair_name
from omnidraft.registry.mlflow_registry import READY_TAG, MlflowRegistry
from omnidraft.registry.mlflow_store import open_client
from omnidraft.registry.republish import republish
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import TenantAgreement
from omnidraft.snapshots.signing import UNSIGNED
from tests.signed_fleet import new_signing
from tests.snapshot_folders import make_bundle

MLFLOW_URLS = {"mlflow": "mlflow_url", "postgres": "postgres_mlflow_url"}
"""Fixtures that start them."""


@pytest.fixture(scope="module")
def mlflow_url(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(scope="module")
def targets():
    return (f"target{number}" for number in itertools.count())


def open_mlflow(url, target, keep_resume=2, signing=UNSIGNED, keep_serving=None):
    options = {"keep_resume": keep_resume, "keep_serving": keep_serving, "signing": signing}
    return MlflowRegistry(url, "org/small", target, artifacts=None, **options)


POSTGRES = pytest.param("postgres", marks=pytest.mark.long)


@pytest.fixture(params=["directory", "mlflow", POSTGRES])
def opened(request, tmp_path, targets):
    """A function that opens one empty registry, again and again, and a function that makes bundles for it."""
    return opening(request, tmp_path, next(targets))


@pytest.fixture(params=["directory", "mlflow"])
def opened_on_disk(request, tmp_path, targets):
    """The same, of those that keep files where the publisher can link to them."""
    return opening(request, tmp_path, next(targets))


def opening(request, tmp_path, target):

    def open_registry(keep_resume=2, signing=UNSIGNED, keep_serving=None):
        if request.param in MLFLOW_URLS:
            url = request.getfixturevalue(MLFLOW_URLS[request.param])
            return open_mlflow(url, target, keep_resume, signing, keep_serving)
        options = {"keep_resume": keep_resume, "keep_serving": keep_serving, "signing": signing}
        return DirectoryRegistry(tmp_path / "registry", "org/small", target, **options)

    def bundle_of(snapshot_id, **fields):
        return make_bundle(tmp_path / "bundles", snapshot_id, target=target, **fields)

    return open_registry, bundle_of


def test_a_published_version_is_seen_by_others_as_challenger(opened):
    open_registry, bundle_of = opened
    published = open_registry().publish(bundle_of("s1", offsets={0: 7}), None)
    assert (published.version, published.aliases) == (1, ("challenger",))
    for name in ("challenger", "latest", "1"):
        assert open_registry().resolve(name).manifest == published.manifest
    assert published.manifest.offsets == {0: 7}


def test_deleted_files_are_gone_and_the_version_stays_in_the_list(opened, tmp_path):
    open_registry, bundle_of = opened
    registry = open_registry(keep_resume=9)
    for number, snapshot_id in enumerate(("s1", "s2", "s3")):
        registry.publish(bundle_of(snapshot_id), number or None)
    registry.promote(1)
    registry.promote(2)  # 1 is previous, 3 the challenger
    for _ in range(2):
        registry.remove_files(1, ("serving", "resume"))
        registry.remove_files(2, ("resume",))
    with pytest.raises(SnapshotError, match="champion"):
        registry.remove_files(2, ("serving",))
    assert [(each.version, each.aliases) for each in open_registry().versions()] == [
        (1, ()),
        (2, ("champion",)),
        (3, ("challenger",)),
    ]
    for version, part in ((1, "serving"), (1, "resume"), (2, "resume")):
        with pytest.raises(SnapshotNotFound):
            open_registry().fetch(version, tmp_path / f"look-{version}-{part}", (part,))
    open_registry().fetch(2, tmp_path / "look", ("serving",))
    open_registry().fetch(3, tmp_path / "look", ("serving", "resume"))


def test_an_earlier_version_is_published_again_as_the_newest(opened, tmp_path):
    open_registry, bundle_of = opened
    registry = open_registry(keep_resume=1)
    for number, snapshot_id in enumerate(("s1", "s2", "s3")):
        continued = {"continues_id": "s1"} if snapshot_id == "s2" else {}
        registry.publish(bundle_of(snapshot_id, offsets={0: number}, **continued), number or None)
    again = republish(open_registry(), "2")
    old, new = open_registry().resolve("2").manifest, open_registry().resolve("latest").manifest
    assert (old.continues_id, new.continues_id) == ("s1", None)  # it continues its parent
    assert (old.is_republished, new.is_republished) == (False, True)
    assert (again.version, new.parent_id, new.offsets) == (4, old.snapshot_id, old.offsets)
    assert new.snapshot_id != old.snapshot_id
    assert bundle.parts_of(new) == ("serving",)  # the resume part of 2 is gone
    folders = [open_registry().fetch(version, tmp_path / "look") for version in (2, 4)]
    one, other = (bundle.serving_tensors(folder) for folder in folders)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert bundle.parts_of(republish(open_registry(), "latest").manifest) == ("serving",)


def test_an_earlier_version_that_is_published_again_has_the_orders_of_the_newest_behind_it(opened):
    """Else a distiller would carry out a restart once more that came after that version."""
    open_registry, bundle_of = opened
    registry = open_registry()
    registry.publish(bundle_of("s1", restarts=("first",)), None)
    registry.publish(bundle_of("s2", restarts=("first", "second")), 1)
    assert republish(registry, "1").manifest.restarts == ("first", "second")


def test_the_change_that_led_to_a_version_is_not_told_again_of_its_copy(opened):
    open_registry, bundle_of = opened
    tenant = TenantAgreement(tenant="t", num_requests=9, before=0.6, after=0.8, change_error=0.02)
    figures = {"agreement_before": 0.7, "agreement_after": 0.8, "agreement_change_error": 0.01}
    speeds = {"speedup_before": 1.5, "speedup_after": 2.0}
    registry = open_registry()
    registry.publish(bundle_of("s1"), None)
    registry.publish(bundle_of("s2", tenants=(tenant,), losses={"dm": 1.0}, **figures, **speeds), 1)
    copy = republish(registry, "2").manifest
    assert (copy.agreement_before, copy.agreement_after, copy.agreement_change_error) == (0.8, 0.8, 0.0)
    assert (copy.speedup_before, copy.speedup_after, copy.losses) == (2.0, 2.0, {})
    assert [(each.before, each.after, each.change_error) for each in copy.tenants] == [(0.8, 0.8, 0.0)]


def test_an_empty_registry_has_nothing(opened, tmp_path):
    registry = opened[0]()
    assert registry.versions() == ()
    for name in ("champion", "latest", "1"):
        with pytest.raises(SnapshotNotFound):
            registry.resolve(name)
    with pytest.raises(SnapshotNotFound):
        registry.fetch(1, tmp_path / "cache")
    with pytest.raises(SnapshotNotFound):
        registry.promote(1)


def test_promoting_remembers_the_previous_and_rolling_back_is_promoting_it(opened):
    open_registry, bundle_of = opened
    registry = open_registry()
    for parent, name in ((None, "s1"), (1, "s2")):
        registry.promote(registry.publish(bundle_of(name), parent).version)
    registry.promote(2)  # again: nothing changes
    assert [version.aliases for version in registry.versions()] == [("previous",), ("champion",)]
    registry.promote(1)
    assert [version.aliases for version in registry.versions()] == [("champion",), ("previous",)]


def judged(opened):
    """A registry with the champion 1 and the challenger 2, and a fence that a controller took before it fell asleep."""
    open_registry, bundle_of = opened
    registry = open_registry()
    registry.promote(registry.publish(bundle_of("s1"), None).version)
    registry.publish(bundle_of("s2"), 1)
    return registry, open_registry(), registry.fence()


def test_a_decision_that_nothing_overtook_is_carried_out(opened):
    controller, _, fence = judged(opened)
    assert controller.fence() == fence
    controller.promote_unless_changed(2, fence)
    assert [version.aliases for version in controller.versions()] == [("previous",), ("champion",)]
    assert controller.fence() != fence


def test_a_controller_that_slept_undoes_no_promotion_and_no_rollback_of_an_operator(opened):
    """Also where the champion is the one that it had seen: there and back, or promoted once more."""
    controller, operator, fence = judged(opened)
    operator.promote(2)
    operator.promote(1)
    with pytest.raises(SnapshotStale, match="an operator promoted"):
        controller.promote_unless_changed(2, fence)
    assert operator.resolve("champion").version == 1
    fence = controller.fence()
    operator.promote(1)  # it shall stay
    with pytest.raises(SnapshotStale):
        controller.promote_unless_changed(2, fence)
    assert (operator.resolve("champion").version, operator.resolve("previous").version) == (1, 2)


def test_of_two_controllers_with_one_fence_one_promotes(opened):
    first, second, fence = judged(opened)
    first.promote_unless_changed(2, fence)
    with pytest.raises(SnapshotStale):
        second.promote_unless_changed(1, fence)
    assert second.resolve("champion").version == 2


def test_a_decision_that_was_carried_out_while_its_answer_was_lost_may_be_told_once_more(opened):
    controller, operator, fence = judged(opened)
    for _ in range(2):
        controller.promote_unless_changed(2, fence)
    assert [version.aliases for version in controller.versions()] == [("previous",), ("champion",)]
    operator.promote(1)
    with pytest.raises(SnapshotStale):
        controller.promote_unless_changed(2, fence)
    assert operator.resolve("champion").version == 1


def test_a_version_that_is_not_there_is_not_promoted_by_a_decision(opened):
    registry, _, fence = judged(opened)
    with pytest.raises(SnapshotNotFound):
        registry.promote_unless_changed(7, fence)
    assert registry.resolve("champion").version == 1


@pytest.mark.parametrize("judgement", [None, "promoted: better"])
def test_a_snapshot_that_is_published_again_after_its_promotion_is_no_challenger_also_after_a_rollback(
    opened, tmp_path, judgement
):
    """The publisher never got its first answer."""
    controller, operator, fence = judged(opened)
    publisher, folder = opened[0](), tmp_path / "bundles/s2"
    controller.promote_unless_changed(2, fence)
    if judgement:
        controller.annotate(2, {"judgement": judgement})
    assert publisher.publish(folder, 1).aliases == ("champion",)
    operator.promote(1)
    assert publisher.publish(folder, 1).aliases == ("previous",)


def test_a_snapshot_that_was_judged_is_no_challenger_when_it_is_published_again(opened):
    controller, operator, _ = judged(opened)
    folder = opened[1]("s3")
    controller.publish(folder, 2)
    for version in (3, 2, 1):
        operator.promote(version)  # in the end 3 has no alias any more
    controller.annotate(3, {"judgement": "promoted by an operator"})
    assert opened[0]().publish(folder, 2).aliases == ()


def test_a_champion_that_is_still_called_challenger_is_not_once_it_is_rolled_back(opened):
    """Its alias stayed where a publisher tried again meanwhile, or a promotion in MLflow was killed half way."""
    controller, operator, fence = judged(opened)
    controller.promote_unless_changed(2, fence)
    if isinstance(controller, MlflowRegistry):
        controller._client.set_registered_model_alias(controller._name, "challenger", "2")
    else:
        controller._write_state(controller._state() | {"challenger": 2})
    operator.promote(1)
    assert [version.aliases for version in operator.versions()] == [("champion",), ("previous",)]


class Sleepy(MlflowRegistry):
    """Falls asleep between its look at the operator's tag and its move of the alias."""

    def _move_champion(self, version):
        open_mlflow(self._url, self._pair[1]).promote(1)
        super()._move_champion(version)


def test_mlflow_gives_way_to_an_operator_who_came_between_the_look_and_the_move(mlflow_url, targets, tmp_path):
    target = next(targets)
    registry = open_mlflow(mlflow_url, target)
    for parent, name in ((None, "s1"), (1, "s2")):
        registry.publish(make_bundle(tmp_path, name, target=target), parent)
    registry.promote(1)
    sleepy = Sleepy(mlflow_url, "org/small", target, artifacts=None, keep_resume=2)
    with pytest.raises(SnapshotStale, match="gives way to 1"):
        sleepy.promote_unless_changed(2, sleepy.fence())
    assert registry.resolve("champion").version == 1


def test_a_challenger_that_is_published_during_a_promotion_in_mlflow_keeps_its_alias(mlflow_url, targets, tmp_path):
    target = next(targets)
    registry, publisher = (open_mlflow(mlflow_url, target) for _ in range(2))
    registry.publish(make_bundle(tmp_path, "s1", target=target), None)
    move_alias = registry._client.set_registered_model_alias

    def move_and_publish(*args):
        move_alias(*args)
        publisher.publish(make_bundle(tmp_path, "s2", target=target), 1)

    registry._client.set_registered_model_alias = move_and_publish
    registry.promote(1)
    assert [version.aliases for version in publisher.versions()] == [("champion",), ("challenger",)]


def damage_manifest(registry, version):
    if isinstance(registry, MlflowRegistry):
        registry._client.set_model_version_tag(registry._name, str(version), MANIFEST_TAG, "{")
    else:
        (registry._folder(version) / "snapshot" / "manifest.json").write_bytes(b"\xff{")


def test_a_version_whose_manifest_is_damaged_is_left_out_told_and_never_numbered_again(opened, caplog):
    open_registry, bundle_of = opened
    registry = open_registry()
    for parent, name in ((None, "s1"), (1, "s2")):
        registry.promote(registry.publish(bundle_of(name), parent).version)
    damage_manifest(registry, 2)
    for _ in range(2):
        assert [version.version for version in registry.versions()] == [1]
    assert caplog.text.count("version 2 is damaged and left out") == 1
    assert registry.resolve("latest").version == 1
    for name in ("champion", "2"):  # not one that nobody promoted, and not the first of its pair
        with pytest.raises(SnapshotCorrupt):
            registry.resolve(name)
    assert registry.publish(bundle_of("s3"), 1).version == 3
    with pytest.raises(SnapshotStale):
        open_registry().publish(bundle_of("zombie"), 1)
    registry.promote(3)
    assert open_registry().resolve("champion").version == 3


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"champion": "two"}', '{"champion": 1.5}', "\xff" * 9, "[" * 9999]
)
def test_aliases_that_cannot_be_read_are_an_error_of_the_registry_until_somebody_mends_them(tmp_path, content):
    registry = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=2)
    registry.publish(make_bundle(tmp_path, "s1"), None)
    aliases = next((tmp_path / "registry").rglob("aliases.json"))
    aliases.write_text(content)
    for use in (registry.versions, registry.fence, lambda: registry.resolve("champion"), lambda: registry.promote(1)):
        with pytest.raises(RegistryError, match="is damaged"):
            use()
    aliases.unlink()
    registry.promote(1)
    assert registry.resolve("champion").version == 1


@pytest.mark.parametrize(
    ("content", "judgement"),
    [(damaged, "void: its notes are damaged") for damaged in ("", "{", "[1]")] + [('{"judgement": 5}', None)],
)
def test_a_version_whose_notes_cannot_be_read_is_void_until_others_are_written(tmp_path, caplog, content, judgement):
    registry = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=2)
    registry.publish(make_bundle(tmp_path, "s1"), None)
    registry.annotate(1, {"judgement": "refused"})
    (registry._folder(1) / "notes.json").write_text(content)
    for _ in range(2):
        assert [version.judgement for version in registry.versions()] == [judgement]
    assert registry.publish(make_bundle(tmp_path, "s2"), 1).version == 2
    assert caplog.text.count("so version 1 has no notes and is not judged") == (judgement is not None)
    registry.annotate(1, {"drift": "of a tenant"})
    assert registry.resolve("1").judgement is None
    registry.annotate(1, {"judgement": "promoted"})
    assert registry.resolve("1").judgement == "promoted"


@pytest.mark.parametrize("name", ["v000001.bak1", "vacation2"])
def test_folders_that_somebody_keeps_beside_the_versions_are_no_versions(tmp_path, name):
    registry = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=2)
    registry.publish(make_bundle(tmp_path, "s1"), None)
    shutil.copytree(registry._folder(1), registry._root / name)
    assert [version.version for version in registry.versions()] == [1]
    assert registry.publish(make_bundle(tmp_path, "s2"), 1).version == 2


def test_of_two_publishers_with_one_parent_the_second_is_stale(opened):
    open_registry, bundle_of = opened
    first, second = open_registry(), open_registry()
    first.publish(bundle_of("s1"), None)
    first.publish(bundle_of("s2"), 1)
    with pytest.raises(SnapshotStale):
        second.publish(bundle_of("zombie"), 1)
    with pytest.raises(SnapshotStale):
        second.publish(bundle_of("newcomer"), None)
    assert [version.manifest.snapshot_id for version in second.versions()] == ["s1", "s2"]
    assert second.publish(bundle_of("s3"), 2).aliases == ("challenger",)


def test_publishing_a_snapshot_again_gives_the_version_it_has(opened):
    open_registry, bundle_of = opened
    folder = bundle_of("s1")
    assert open_registry().publish(folder, None).version == 1
    assert open_registry().publish(folder, None).version == 1


def test_only_the_parts_asked_for_are_fetched_and_later_the_others(opened, tmp_path):
    open_registry, bundle_of = opened
    registry = open_registry()
    registry.publish(bundle_of("s1"), None)
    folder = registry.fetch(1, tmp_path / "cache")
    assert bundle.ngrams(folder)["keys"].tolist() == [0, 1, 2]
    assert not (folder / "resume").exists()
    assert registry.fetch(1, tmp_path / "cache", ("serving", "resume")) == folder
    bundle.verify(folder, ["serving", "resume"])


def test_publishing_and_fetching_on_one_disk_makes_no_copy(opened_on_disk, tmp_path):
    open_registry, bundle_of = opened_on_disk
    source = bundle_of("s1")
    open_registry().publish(source, None)
    fetched = open_registry().fetch(1, tmp_path / "cache")
    assert (fetched / bundle.DRAFTER).stat().st_ino == (source / bundle.DRAFTER).stat().st_ino


def test_a_file_that_rotted_in_the_store_is_never_handed_out(opened_on_disk, tmp_path):
    open_registry, bundle_of = opened_on_disk
    source = bundle_of("s1")
    open_registry().publish(source, None)
    (source / bundle.DRAFTER).write_bytes(b"rotten")  # hard-linked: the store's file is the same one
    for _ in range(2):
        with pytest.raises(SnapshotCorrupt, match="sha256"):
            open_registry().fetch(1, tmp_path / "cache")


def test_a_disk_that_was_full_takes_the_version_once_it_has_space(opened, tmp_path, monkeypatch):
    open_registry, bundle_of = opened
    registry = open_registry()
    registry.publish(bundle_of("s1"), None)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", _write_until_full)
        with pytest.raises(RegistryError, match="No space left"):
            registry.fetch(1, tmp_path / "cache")
    assert [path.stat().st_size for path in (tmp_path / "cache").rglob("manifest.json")] == [0]
    bundle.verify(registry.fetch(1, tmp_path / "cache"), ["serving"])


def _write_until_full(path, text):
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_broken_bundle_and_one_of_another_pair_are_not_published(opened, tmp_path):
    open_registry, bundle_of = opened
    broken = bundle_of("s1")
    (broken / bundle.DRAFTER).write_bytes(b"")
    with pytest.raises(SnapshotCorrupt):
        open_registry().publish(broken, None)
    with pytest.raises(RegistryError, match="stranger"):
        open_registry().publish(make_bundle(tmp_path, "s2", target="stranger"), None)
    assert open_registry().versions() == ()


def test_old_resume_parts_are_removed_and_serving_parts_stay(opened, tmp_path):
    open_registry, bundle_of = opened
    registry = open_registry(keep_resume=1)
    registry.publish(bundle_of("s1"), None)
    registry.publish(bundle_of("s2"), 1)
    with pytest.raises(SnapshotNotFound, match="keep_resume"):
        registry.fetch(1, tmp_path / "cache", ("resume",))
    bundle.verify(registry.fetch(1, tmp_path / "cache"), ["serving"])
    bundle.verify(registry.fetch(2, tmp_path / "cache", ("resume",)), ["resume"])


def test_of_many_versions_the_newest_and_those_with_an_alias_are_listed(opened, monkeypatch):
    monkeypatch.setattr(mlflow_store, "PAGE_SIZE", 2)
    open_registry, bundle_of = opened
    registry = open_registry(keep_resume=9)
    for number in range(1, 6):
        registry.publish(bundle_of(f"s{number}"), number - 1 or None)
    registry.promote(2)
    assert [each.version for each in registry.versions()] == [1, 2, 3, 4, 5]
    assert [each.version for each in registry.versions(1)] == [2, 5]
    assert [each.version for each in registry.versions(2)] == [2, 4, 5]
    assert [each.aliases for each in registry.versions(1)] == [("champion",), ("challenger",)]
    with pytest.raises(SnapshotStale, match="newest version is 5"):
        open_registry().publish(bundle_of("late"), 3)


def test_an_old_version_that_lost_its_alias_loses_its_weights_when_all_versions_are_looked_at(opened, monkeypatch):
    monkeypatch.setattr(retention, "ALL_EVERY", 4)
    open_registry, bundle_of = opened
    registry = open_registry(keep_resume=1, keep_serving=2)
    registry.publish(bundle_of("s1"), None)
    registry.promote(1)
    for number in range(2, 8):
        registry.publish(bundle_of(f"s{number}"), number - 1)
    registry.promote(6)
    registry.promote(7)  # 6 is previous, 1 nothing
    registry.publish(bundle_of("s8"), 7)
    assert registry.resolve("1").is_servable
    registry.publish(bundle_of("s9"), 8)  # the ninth looks at all
    assert not registry.resolve("1").is_servable


def has_weights(registry, version, cache):
    try:
        registry.fetch(version, cache)
    except SnapshotNotFound:
        return False
    return True


def test_old_weights_are_removed_but_for_those_that_have_an_alias_and_manifests_stay(opened, tmp_path):
    open_registry, bundle_of = opened
    registry = open_registry(keep_resume=1, keep_serving=2)
    for number in range(1, 4):
        registry.promote(registry.publish(bundle_of(f"s{number}"), number - 1 or None).version)
    for number in range(4, 7):  # 3 is champion, 2 previous
        registry.publish(bundle_of(f"s{number}"), number - 1)
    kept = [has_weights(registry, number, tmp_path / "cache") for number in range(1, 7)]
    assert kept == [False, True, True, False, True, True]
    assert [each.is_servable for each in open_registry().versions()] == kept
    with pytest.raises(SnapshotNotFound, match=r"version 1 has no serving part any more \(registry\.keep_serving\)"):
        open_registry().fetch(1, tmp_path / "cache")
    assert [each.manifest.snapshot_id for each in registry.versions()] == ["s1", "s2", "s3", "s4", "s5", "s6"]
    registry.promote(2)  # a rollback, after which 3 is previous
    registry.publish(bundle_of("s7"), 6)
    assert all(has_weights(open_registry(), number, tmp_path / "rolled back") for number in (2, 3, 6, 7))


def test_a_registry_that_may_delete_no_weights_and_one_that_keeps_more_resume_parts_keep_them(opened, tmp_path):
    open_registry, bundle_of = opened
    for number, options in enumerate(({"keep_resume": 1}, {"keep_resume": 3, "keep_serving": 1}), start=1):
        registry = open_registry(**options)
        for parent in ((None, 1), (2, 3))[number - 1]:
            registry.publish(bundle_of(f"s{parent}"), parent)
    assert [has_weights(registry, number, tmp_path / "cache") for number in range(1, 5)] == [False, True, True, True]


def test_a_version_without_weights_is_promoted_by_nobody(opened):
    """The champion stays, and a decision about such a version is void: its canary was on trial for too long."""
    open_registry, bundle_of = opened
    registry = open_registry(keep_resume=1, keep_serving=1)
    registry.promote(registry.publish(bundle_of("s1"), None).version)
    registry.publish(bundle_of("s2"), 1)
    fence = registry.fence()
    registry.publish(bundle_of("s3"), 2)
    with pytest.raises(SnapshotNotFound, match="version 2 has no serving part any more"):
        registry.promote(2)
    with pytest.raises(SnapshotStale, match="keep_serving"):
        registry.promote_unless_changed(2, fence)
    assert [each.aliases for each in open_registry().versions()] == [("champion",), (), ("challenger",)]
    assert registry.fence() == fence


def test_an_earlier_version_without_weights_is_not_published_again(opened):
    open_registry, bundle_of = opened
    registry = open_registry(keep_resume=1, keep_serving=1)
    for parent in (None, 1):
        registry.publish(bundle_of(f"s{parent}"), parent)
    with pytest.raises(SnapshotNotFound, match="keep_serving"):
        republish(registry, "1")
    assert len(registry.versions()) == 2


def test_notes_curves_and_reports_are_taken(opened, tmp_path):
    open_registry, bundle_of = opened
    registry = open_registry()
    registry.publish(bundle_of("s1", losses={"dm": 0.5}, agreement_before=0.7, agreement_after=0.8), None)
    report = tmp_path / "report.txt"
    report.write_text("well")
    registry.annotate(1, {"judgement": "promoted"})
    registry.log_metrics(1, {"loss/dm": 0.4}, step=2)
    registry.log_file(1, report)
    assert open_registry().resolve("1").judgement == "promoted"


def test_a_version_that_is_not_ready_is_invisible_and_an_abandoned_one_gives_way(mlflow_url, targets, tmp_path):
    target = next(targets)
    registry = open_mlflow(mlflow_url, target)
    registry.publish(make_bundle(tmp_path, "s1", target=target), None)
    client, name = open_client(mlflow_url), pair_name("org/small", target)  # what a publisher that died leaves behind
    run_id = client.get_model_version(name, "1").run_id
    client.create_model_version(name, "file:///nowhere", run_id + "x", await_creation_for=0)
    assert [version.version for version in registry.versions()] == [1]
    with pytest.raises(SnapshotNotFound, match="still being published"):
        registry.resolve("2")
    with pytest.raises(SnapshotStale):  # it is seconds old: its publisher may be alive, and was first
        registry.publish(make_bundle(tmp_path, "s2", target=target), 1)
    impatient = MlflowRegistry(mlflow_url, "org/small", target, artifacts=None, keep_resume=2, abandoned_ms=0)
    assert impatient.publish(make_bundle(tmp_path, "s3", target=target), 1).version == 4
    assert sorted(int(each.version) for each in client.search_model_versions(f"name='{name}'")) == [1, 4]
    assert READY_TAG in client.get_model_version(name, "4").tags


def test_mlflow_shows_how_a_snapshot_of_an_online_distiller_was_learned(mlflow_url, targets, tmp_path):
    settings, target = LearnerSettings(train="lora", lora_rank=8), next(targets)
    learned_with = {name: str(value) for name, value in settings.model_dump().items()}
    registry = open_mlflow(mlflow_url, target)
    identity = Identity(target, "org/small", "hash", "alignment", "lora", "1.0", learned_with)
    publisher = Publisher(registry, identity, tmp_path / "staging")
    publisher.publish(publisher.stage({}, train="base"))
    publisher.publish(publisher.stage({bundle.DRAFTER: {"w": torch.zeros(2)}}))
    runs = [
        registry._client.get_run(registry._client.get_model_version(registry._name, number).run_id) for number in "12"
    ]
    assert (runs[0].data.params["train"], runs[0].data.params.get("loss")) == ("base", None)
    shown = runs[1].data.params
    names = ("train", "loss", "learning_rate", "lora_rank")
    assert [shown[name] for name in names] == ["lora", "dm + 0.2 ngram", "auto", "8"]


def test_mlflow_shows_figures_and_story_of_a_version(mlflow_url, targets, tmp_path):
    target = next(targets)
    registry = open_mlflow(mlflow_url, target)
    told = {"agreement_before": 0.7, "agreement_after": 0.8, "held_out_records": 9, "losses": {"dm": 0.5}}
    registry.publish(make_bundle(tmp_path, "s1", target=target, **told), None)
    registry.annotate(1, {"judgement": "promoted: well"})
    registry.log_metrics(1, {"promoted": 1.0}, step=1)
    registry.log_file(1, tmp_path / "s1/manifest.json")
    client = open_client(mlflow_url)
    shown = client.get_model_version(pair_name("org/small", target), "1")
    run = client.get_run(shown.run_id)
    assert "0.7000 to 0.8000 (+0.1000) on 9 records" in shown.description
    assert (run.info.run_name, run.info.status) == ("v1 s1", "FINISHED")
    assert (run.data.metrics["loss/dm"], run.data.params["train"]) == (0.5, "base")
    assert (shown.tags["judgement"], run.data.metrics["promoted"]) == ("promoted: well", 1.0)
    assert [file.path for file in client.list_artifacts(run.info.run_id, "reports")] == ["reports/manifest.json"]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {"manifest.json", "serving"}


@pytest.fixture(params=list(MLFLOW_URLS))
def opened_mlflow(request, tmp_path, targets):
    """The same as `opened`, of MLflow alone, local and behind a server."""
    return opening(request, tmp_path, next(targets))


class Unwilling:
    """A client of MLflow's whose calls of these names fail, after so many that were done."""

    def __init__(self, client, *names, also_done=False, num_done=0):
        self._client, self._names, self._also_done, self._num_done = client, names, also_done, num_done

    def __getattr__(self, name):
        call = getattr(self._client, name)
        return partial(self._fail, call) if name in self._names else call

    def _fail(self, call, *args, **options):
        if self._num_done:
            self._num_done -= 1
            return call(*args, **options)
        if self._also_done:
            call(*args, **options)  # and only the answer is lost
        raise OSError(f"no answer to {call.__name__}")


def unwilling(registry, *names, **options):
    """The same registry, whose client fails."""
    registry._client = registry._runs._client = Unwilling(registry._client, *names, **options)
    return registry


class BucketError(Exception):
    """An error of the library of an artifact store, as boto3's are: of no kind that anybody else knows."""


class Bucket(LocalArtifactRepository):
    """The artifact store of bucket://name/folder, whose calls in `denied` fail, and in `ignored` do nothing."""

    denied: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __init__(self, artifact_uri, *args, **options):
        super().__init__(urlsplit(artifact_uri).path)

    def log_artifacts(self, *args, **options):
        self._call("log_artifacts", *args, **options)

    def log_artifact(self, *args, **options):
        self._call("log_artifact", *args, **options)

    def list_artifacts(self, *args, **options):
        return self._call("list_artifacts", *args, **options)

    def delete_artifacts(self, *args, **options):
        self._call("delete_artifacts", *args, **options)

    def _call(self, name, *args, **options):
        if name in self.denied:
            raise BucketError(f"{name}: AccessDenied")
        return None if name in self.ignored else getattr(super(), name)(*args, **options)


@pytest.fixture
def bucket(monkeypatch):
    """What `--no-serve-artifacts --default-artifact-root s3://` does: every process reaches the store itself."""
    registered = artifact_repository_registry._artifact_repository_registry._registry
    monkeypatch.setitem(registered, "bucket", Bucket)
    for names in ("denied", "ignored"):
        monkeypatch.setattr(Bucket, names, ())
    return Bucket


def open_with_bucket(mlflow_url, target, tmp_path, keep_resume=2):
    return MlflowRegistry(
        mlflow_url, "org/small", target, artifacts=f"bucket://name{tmp_path}/bucket", keep_resume=keep_resume
    )


@pytest.mark.parametrize("name", ["log_artifacts", "log_artifact"])
def test_an_artifact_store_that_refuses_an_upload_is_a_registry_error_and_the_next_try_succeeds(
    mlflow_url, targets, tmp_path, bucket, name
):
    registry = open_with_bucket(mlflow_url, target := next(targets), tmp_path)
    folder = make_bundle(tmp_path, "s1", target=target)
    bucket.denied = (name,)
    with pytest.raises(RegistryError, match=f"BucketError: {name}: AccessDenied"):
        registry.publish(folder, None)
    bucket.denied = ()
    assert open_with_bucket(mlflow_url, target, tmp_path).publish(folder, None).version == 1


@pytest.mark.skipif(find_spec("boto3") is not None, reason="boto3 is installed here")
def test_a_store_whose_library_is_missing_is_said_at_once_and_not_waited_for(mlflow_url, targets, tmp_path):
    target = next(targets)
    registry = MlflowRegistry(mlflow_url, "org/small", target, artifacts="s3://bucket/folder", keep_resume=2)
    folder, attempts = make_bundle(tmp_path, "s1", target=target), []
    with pytest.raises(StoreLibraryMissing, match="No module named 'boto3'; install it"):
        retry(lambda: registry.publish(folder, None), lambda: False, lambda: attempts.append(1))
    assert (attempts, registry.versions()) == ([], ())


def test_an_artifact_store_that_refuses_anything_else_is_a_registry_error(mlflow_url, targets, tmp_path, bucket):
    registry = open_with_bucket(mlflow_url, target := next(targets), tmp_path)
    registry.publish(make_bundle(tmp_path, "s1", target=target), None)
    bundle.verify(registry.fetch(1, tmp_path / "cache"), ["serving"])
    registry.remove_files(1, ("resume",))
    with pytest.raises(SnapshotNotFound, match="keep_resume"):
        registry.fetch(1, tmp_path / "cache", ("resume",))
    bucket.denied = ("list_artifacts", "log_artifact", "delete_artifacts")
    for use in (
        lambda: registry.fetch(1, tmp_path / "other"),
        lambda: registry.remove_files(1, ("serving",)),
        lambda: registry.log_file(1, tmp_path / "s1/manifest.json"),
    ):
        with pytest.raises(RegistryError, match="BucketError"):
            use()


def test_a_snapshot_is_published_although_what_is_kept_no_longer_cannot_be_deleted(
    mlflow_url, targets, tmp_path, bucket, monkeypatch, caplog
):
    """And the next publication deletes it: the parts of an old version, and what a killed publisher left."""
    registry = open_with_bucket(mlflow_url, target := next(targets), tmp_path, keep_resume=1)
    registry.publish(make_bundle(tmp_path, "s1", target=target), None)
    registry._runs.upload(make_bundle(tmp_path, "left", target=target), bundle.read_manifest(tmp_path / "left"))
    monkeypatch.setattr(mlflow_runs, "ABANDONED_MS", -1000)
    bucket.denied = ("delete_artifacts",)
    assert registry.publish(make_bundle(tmp_path, "s2", target=target), 1).aliases == ("challenger",)
    (abandoned,) = registry._runs.abandoned()
    for what in ("resume of version 1", f"the abandoned run {abandoned}"):
        assert f"{what} could not be deleted; the next publication tries again" in caplog.text
    assert "AccessDenied" in caplog.text
    bucket.denied = ()
    registry.publish(make_bundle(tmp_path, "s3", target=target), 2)
    assert not registry._runs.abandoned()
    assert [each.removed_parts for each in registry.versions()] == [("resume",), ("resume",), ()]


def test_a_snapshot_is_published_although_mlflow_fails_in_housekeeping(mlflow_url, targets, tmp_path, caplog):
    registry = open_mlflow(mlflow_url, target := next(targets))
    unwilling(registry, "search_runs").publish(make_bundle(tmp_path, "s1", target=target), None)
    assert "what is kept no longer could not be deleted" in caplog.text
    assert [each.aliases for each in registry.versions()] == [("challenger",)]


def test_a_snapshot_is_published_although_files_of_an_old_one_stay_on_the_disk(tmp_path, caplog):
    registry = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=1)
    registry.publish(make_bundle(tmp_path, "s1"), None)
    with undeletable(registry, 1):
        assert registry.publish(make_bundle(tmp_path, "s2"), 1).aliases == ("challenger",)
        assert "resume of version 1 could not be deleted; the next publication tries again" in caplog.text
    registry.publish(make_bundle(tmp_path, "s3"), 2)
    assert [each.removed_parts for each in registry.versions()] == [("resume",), ("resume",), ()]


def test_parts_whose_files_stay_are_not_said_to_be_deleted(tmp_path):
    registry = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=9)
    registry.publish(make_bundle(tmp_path, "s1"), None)
    with undeletable(registry, 1), pytest.raises(RegistryError, match="link"):
        registry.remove_files(1, ("serving", "resume"))
    registry.remove_files(1, ("serving", "resume"))
    assert set(registry.resolve("1").removed_parts) == {"serving", "resume"}


def test_parts_that_an_artifact_store_keeps_without_an_error_are_not_said_to_be_deleted(
    mlflow_url, targets, tmp_path, bucket
):
    registry = open_with_bucket(mlflow_url, target := next(targets), tmp_path)
    registry.publish(make_bundle(tmp_path, "s1", target=target), None)
    bucket.ignored = ("delete_artifacts",)
    with pytest.raises(RegistryError, match="keeps files"):
        registry.remove_files(1, ("resume",))
    assert registry.resolve("1").removed_parts == ()
    bucket.ignored = ()
    registry.remove_files(1, ("resume",))
    assert registry.resolve("1").removed_parts == ("resume",)


@contextmanager
def undeletable(registry, version):
    """Stands for a disk that does not let go of files, also of root's: the resume part of a version of a registry of
    folders is a link to a folder, which `rmtree` refuses."""
    part = registry._folder(version) / "snapshot" / "resume"
    elsewhere = part.rename(registry._root / "elsewhere")
    part.symlink_to(elsewhere)
    try:
        yield
    finally:
        part.unlink()
        elsewhere.rename(part)


def remains(registry):
    """Return how many runs of the pair's experiment are not deleted, and the files of all."""
    client = open_client(registry._url)
    (experiment,) = client.search_experiments(filter_string=f"name = '{registry._name}'")
    runs = client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL)
    files = [file.path for run in runs for file in client.list_artifacts(run.info.run_id)]
    return sum(run.info.lifecycle_stage == "active" for run in runs), sorted(files)


@pytest.mark.parametrize(
    "name", ["log_batch", "log_text", "set_terminated", "create_model_version", "set_model_version_tag"]
)
@pytest.mark.parametrize("also_done", [False, True], ids=["refused", "answer lost"])
def test_a_publication_that_fails_in_mlflow_leaves_no_files_and_succeeds_when_it_is_tried_again(
    opened_mlflow, name, also_done
):
    open_registry, bundle_of = opened_mlflow
    folder, failing = bundle_of("s1"), unwilling(open_registry(), name, also_done=also_done)
    with pytest.raises(RegistryError, match=f"no answer to {name}"):
        failing.publish(folder, None)
    is_ready = name == "set_terminated" or (name, also_done) == ("set_model_version_tag", True)
    assert remains(failing) == ((1, ["manifest.json", "resume", "serving"]) if is_ready else (0, []))
    again = open_registry().publish(folder, None)
    assert (again.aliases, len(open_registry().versions())) == (("challenger",), 1)
    assert remains(failing) == (1, ["manifest.json", "resume", "serving"])


@pytest.mark.parametrize("num_done", [0, 1])
def test_a_rollback_that_fails_half_way_and_is_tried_again_ends_at_the_version_before(opened_mlflow, num_done):
    """Not at the suspect, which `previous` would name if it had moved first."""
    open_registry, bundle_of = opened_mlflow
    registry = open_registry()
    for number, name in enumerate(("s1", "s2")):
        registry.publish(bundle_of(name), number or None)
        registry.promote(number + 1)
    failing = unwilling(open_registry(), "set_registered_model_alias", num_done=num_done)
    with pytest.raises(RegistryError, match="no answer to set_registered_model_alias"):
        failing.promote_unless_changed(failing.resolve("previous").version, failing.fence())
    registry.promote_unless_changed(registry.resolve("previous").version, registry.fence())
    assert registry.resolve("champion").version == 1


def test_a_promotion_in_mlflow_whose_answer_is_lost_gives_way_to_an_operator_when_it_is_told_once_more(
    mlflow_url, targets, tmp_path
):
    target = next(targets)
    registry = open_mlflow(mlflow_url, target)
    for parent, name in ((None, "s1"), (1, "s2")):
        registry.publish(make_bundle(tmp_path, name, target=target), parent)
    registry.promote(1)
    fence = registry.fence()
    sleepy = Sleepy(mlflow_url, "org/small", target, artifacts=None, keep_resume=2)
    with pytest.raises(RegistryError, match="no answer"):
        unwilling(sleepy, "set_registered_model_alias", also_done=True, num_done=1).promote_unless_changed(2, fence)
    assert registry.resolve("champion").version == 2
    with pytest.raises(SnapshotStale, match="gives way to 1"):
        registry.promote_unless_changed(2, fence)
    assert registry.resolve("champion").version == 1


def test_what_a_publisher_could_not_withdraw_is_no_rival_of_its_own_when_it_tries_again(opened_mlflow):
    open_registry, bundle_of = opened_mlflow
    folder, registry = bundle_of("s1"), open_registry()
    client = registry._client
    lost = Unwilling(client, "create_model_version", also_done=True)
    registry._client = registry._runs._client = Unwilling(lost, "delete_model_version", "delete_run")
    with pytest.raises(RegistryError, match="no answer to create_model_version"):
        registry.publish(folder, None)
    registry._client = registry._runs._client = client
    assert registry.publish(folder, None).aliases == ("challenger",)
    assert len(open_registry().versions()) == 1


def test_a_clean_up_that_fails_too_does_not_hide_why_the_publication_failed(opened_mlflow, caplog):
    open_registry, bundle_of = opened_mlflow
    failing = unwilling(open_registry(), "create_model_version", "delete_run")
    with pytest.raises(RegistryError, match="no answer to create_model_version"):
        failing.publish(bundle_of("s1"), None)
    assert "no answer to delete_run" in caplog.text
    assert remains(failing) == (1, [])  # the files, which are large, went first


@pytest.mark.parametrize("name", ["log_text", "create_model_version", "set_model_version_tag", "set_terminated"])
def test_what_a_killed_publisher_left_in_mlflow_is_deleted_a_day_later(opened_mlflow, monkeypatch, name):
    """It dies at this call. A version that was ready stays, and its run is finished."""
    open_registry, bundle_of = opened_mlflow
    open_registry().publish(bundle_of("s1"), None)
    killed, folder = open_registry(), bundle_of("s2")
    publisher = multiprocessing.get_context("fork").Process(target=publish_until, args=(killed, folder, name))
    publisher.start()
    publisher.join(60)
    assert publisher.exitcode == -signal.SIGKILL
    assert remains(killed)[0] == 2
    num_ready = 2 if name == "set_terminated" else 1
    successor = open_registry()
    successor._abandoned_ms = 0
    assert len(successor.versions()) == num_ready
    successor.publish(bundle_of("s3"), num_ready)
    assert remains(killed)[0] == 3  # the publisher may be alive
    monkeypatch.setattr(mlflow_runs, "ABANDONED_MS", -1000)
    successor.publish(bundle_of("s4"), successor.versions()[-1].version)
    assert remains(killed)[0] == num_ready + 2
    assert not successor._runs.abandoned()


def publish_until(registry, folder, name):
    """Publish, and die of SIGKILL at the call of this name."""
    setattr(registry._client, name, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
    registry.publish(folder, 1)


def test_a_manifest_that_is_longer_than_one_tag_of_mlflow_is_published_and_read_back_whole(opened, tmp_path):
    open_registry, bundle_of = opened
    row = {"num_requests": 9, "before": 0.5, "after": 0.6, "change_error": 0.01}
    tenants = tuple(TenantAgreement(tenant=f"{number:0240}", **row) for number in range(900))
    folder = bundle_of("s1", tenants=tenants)
    assert len(bundle.read_manifest(folder).model_dump_json()) > 2 * MAX_TAG_CHARACTERS
    published = open_registry(signing=OURS).publish(folder, None)
    for name in ("1", "latest", "challenger"):
        assert open_registry().resolve(name).manifest == published.manifest
    fetched = open_registry(signing=OURS).fetch(1, tmp_path / "cache")
    assert bundle.verify(fetched, ["serving"]).tenants == tenants


def test_a_manifest_of_which_a_tag_is_missing_is_damaged(mlflow_url, targets, tmp_path):
    registry = open_mlflow(mlflow_url, target := next(targets))
    settings = {str(number): "x" * 1000 for number in range(101)}
    registry.publish(make_bundle(tmp_path, "s1", target=target, settings=settings), None)
    registry._client.delete_model_version_tag(registry._name, "1", f"{MANIFEST_TAG}.2")
    assert registry.versions() == ()
    with pytest.raises(SnapshotCorrupt, match="not a manifest"):
        registry.resolve("1")


def open_fresh_store(url):
    open_mlflow(url, "t").versions()


def test_three_processes_open_a_fresh_mlflow_store_together(tmp_path, mlflow_url):
    open_mlflow(mlflow_url, "warm-up")  # mlflow is imported once, here; the forks start at the migration
    fork = multiprocessing.get_context("fork")
    url = f"sqlite:///{tmp_path}/fresh/mlflow.db"
    openers = [fork.Process(target=open_fresh_store, args=(url,)) for _ in range(3)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(90)
    assert [opener.exitcode for opener in openers] == [0, 0, 0]


def test_a_server_that_is_down_is_a_registry_error_that_names_it():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RegistryError, match=f"{url}.*MLFLOW_TRACKING_URI"):
            open_mlflow(url, "t")


def test_a_file_that_is_no_database_is_a_registry_error(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is not a database" * 100)
    with pytest.raises(RegistryError):
        open_mlflow(f"sqlite:///{tmp_path}/mlflow.db", "t")


OURS, THEIRS = new_signing(), new_signing()


def forge(registry, cache, source):
    """Weights of a version are changed where they are kept, and so are the checksums that are kept beside them."""
    weights = source / bundle.DRAFTER  # hard-linked: the store's file is the same one
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    told = registry.resolve("1").manifest
    forged = told.model_copy(update={"sha256": {**told.sha256, bundle.DRAFTER: sha256_of(weights)}})
    if isinstance(registry, MlflowRegistry):
        registry._client.set_model_version_tag(registry._name, "1", MANIFEST_TAG, forged.model_dump_json())
    else:
        bundle.write_manifest(registry._folder(1) / "snapshot", forged)
    assert registry.resolve("1").manifest == forged


def test_a_signed_snapshot_is_fetched_with_its_key_only(opened, tmp_path):
    open_registry, bundle_of = opened
    published = open_registry(signing=OURS).publish(bundle_of("s1"), None)
    assert published.manifest.signatures
    for number, signing in enumerate((OURS, UNSIGNED)):
        fetched = open_registry(signing=signing).fetch(1, tmp_path / str(number))
        assert bundle.read_manifest(fetched) == published.manifest
    with pytest.raises(SnapshotCorrupt, match="not signed by a trusted distiller"):
        open_registry(signing=THEIRS).fetch(1, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_forgery_with_fitting_checksums_is_refused_where_signatures_are_asked_for(opened_on_disk, tmp_path):
    open_registry, bundle_of = opened_on_disk
    source = bundle_of("s1")
    open_registry(signing=OURS).publish(source, None)
    open_registry(signing=OURS).fetch(1, tmp_path / "before")
    forge(open_registry(), tmp_path, source)
    open_registry().fetch(1, tmp_path / "trusting")  # checksums alone say nothing against it
    for cache in ("fresh", "before"):
        with pytest.raises(SnapshotCorrupt, match="was changed, or not signed by"):
            open_registry(signing=OURS).fetch(1, tmp_path / cache)


def test_a_snapshot_from_before_the_key_is_refused_until_it_is_published_again(opened, tmp_path):
    open_registry, bundle_of = opened
    folder = bundle_of("s1")
    open_registry().publish(folder, None)
    signing = open_registry(signing=OURS)
    with pytest.raises(SnapshotCorrupt, match="has no signature"):
        signing.fetch(1, tmp_path / "cache")
    assert signing.publish(folder, 1).version == 2
    assert signing.publish(folder, 1).version == 2  # the same again
    signing.fetch(2, tmp_path / "cache")


def test_a_folder_that_somebody_else_signed_is_not_published(opened, tmp_path):
    open_registry, bundle_of = opened
    folder = bundle_of("s1")
    bundle.write_manifest(folder, THEIRS.sign(bundle.read_manifest(folder)))
    with pytest.raises(SnapshotCorrupt, match="not signed by"):
        open_registry(signing=OURS).publish(folder, None)
    assert open_registry().versions() == ()


def test_records_that_a_snapshot_goes_on_with_are_their_owners_alone(opened_on_disk, tmp_path, monkeypatch):
    """Also where files are copied from disk to disk, whatever the umask; what workers load may be read as it says."""
    open_registry, bundle_of = opened_on_disk
    before = os.umask(0)
    try:
        source = bundle_of("s1")
        monkeypatch.setattr(os, "link", _cannot_link)
        registry = open_registry()
        staged = registry.fetch(registry.publish(source, None).version, tmp_path / "staged", ("serving", "resume"))
    finally:
        os.umask(before)
    rights = {path.parent.name: stat.S_IMODE(path.stat().st_mode) for path in staged.rglob("*.safetensors")}
    assert rights == {"serving": 0o666, "resume": 0o600}


def _cannot_link(*args):
    raise OSError("another disk")
