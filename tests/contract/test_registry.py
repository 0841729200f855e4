"""The contract of every registry: over plain folders, and where MLflow's own code decides over MLflow too."""

import errno
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnidraft.errors import RegistryError, SnapshotCorrupt, SnapshotError, SnapshotNotFound, SnapshotStale
from omnidraft.files import sha256_of
from omnidraft.ports import Judgement
from omnidraft.registry import mlflow_store, retention
from omnidraft.registry.manifest_export import MAX_TAG_CHARACTERS
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import TenantAgreement
from tests.contract.registries import DirectoryPair, on_mlflow_too
from tests.signed_fleet import new_signing
from tests.snapshot_folders import make_bundle

OURS, THEIRS = new_signing(), new_signing()
PROMOTED = Judgement(state="promoted", reason="better", promotion="p1", gain=0.1, gain_error=0.01)


def published(store, *, promoted=0, num=2, **options):
    """A registry with versions 1 to `num`, of which those up to `promoted` were champion."""
    registry = store.open(**options)
    for number in range(1, num + 1):
        registry.publish(store.bundle(f"s{number}"), number - 1 or None)
        if number <= promoted:
            registry.promote(number)
    return registry


def aliases(registry):
    return [version.aliases for version in registry.versions()]


@on_mlflow_too
def test_a_published_version_is_seen_by_others_as_challenger(store):
    published = store.open().publish(store.bundle("s1", offsets={0: 7}), None)
    assert (published.version, published.aliases) == (1, ("challenger",))
    for name in ("challenger", "latest", "1"):
        assert store.open().resolve(name).manifest == published.manifest
    assert published.manifest.offsets == {0: 7}


@on_mlflow_too
def test_deleted_files_are_gone_and_the_version_stays_in_the_list(store, tmp_path):
    registry = published(store, num=3, keep_resume=9)
    registry.promote(1)
    registry.promote(2)  # 1 is previous, 3 the challenger
    for _ in range(2):
        registry.remove_files(1, ("serving", "resume"))
        registry.remove_files(2, ("resume",))
    with pytest.raises(SnapshotError, match="champion"):
        registry.remove_files(2, ("serving",))
    assert aliases(store.open()) == [(), ("champion",), ("challenger",)]
    for version, part in ((1, "serving"), (1, "resume"), (2, "resume")):
        with pytest.raises(SnapshotNotFound):
            store.open().fetch(version, tmp_path / f"look-{version}-{part}", (part,))
    store.open().fetch(2, tmp_path / "look", ("serving",))
    store.open().fetch(3, tmp_path / "look", ("serving", "resume"))


@on_mlflow_too
@pytest.mark.parametrize(
    ("num", "there_are"), [(0, "are no versions yet"), (1, "is version 1 only"), (3, "are versions 1 to 3")]
)
def test_a_version_that_does_not_exist_is_told_with_those_that_do(store, num, there_are):
    registry = published(store, num=num)
    with pytest.raises(SnapshotNotFound, match=f"^there is no version 99; there {there_are}$"):
        registry.resolve("99")
    with pytest.raises(SnapshotNotFound, match="there is no snapshot called 'best'; there"):
        registry.resolve("best")


@on_mlflow_too
def test_an_empty_registry_has_nothing(store, tmp_path):
    registry = store.open()
    assert registry.versions() == ()
    for ask in (
        *(lambda name=name: registry.resolve(name) for name in ("champion", "latest", "1")),
        lambda: registry.fetch(1, tmp_path / "cache"),
        lambda: registry.promote(1),
    ):
        with pytest.raises(SnapshotNotFound):
            ask()


@on_mlflow_too
def test_promoting_remembers_the_previous_and_rolling_back_is_promoting_it(store):
    registry = published(store, promoted=2)
    registry.promote(2)  # again: nothing changes
    assert aliases(registry) == [("previous",), ("champion",)]
    registry.promote(1)
    assert aliases(registry) == [("champion",), ("previous",)]


@on_mlflow_too
def test_previous_is_what_the_promotion_says_whatever_the_aliases_were(store):
    registry = published(store, promoted=2, num=3)
    for _ in range(2):
        registry.promote(1, 3)
        assert aliases(registry) == [("champion",), (), ("challenger", "previous")]


@pytest.mark.parametrize("judgement", [None, PROMOTED])
@on_mlflow_too
def test_a_snapshot_that_is_published_again_after_its_promotion_is_no_challenger(store, judgement):
    """Its publisher never got the first answer; also after a rollback."""
    controller, publisher, folder = published(store, promoted=2), store.open(), store.folder / "bundles/s2"
    if judgement:
        controller.annotate(2, judgement.notes())
    assert publisher.publish(folder, 1).aliases == ("champion",)
    controller.promote(1)
    assert publisher.publish(folder, 1).aliases == ("previous",)


def test_a_snapshot_that_was_judged_is_no_challenger_when_it_is_published_again(store):
    controller = published(store, num=3, promoted=3)
    for version in (2, 1):
        controller.promote(version)  # 3 has no alias any more
    controller.annotate(3, PROMOTED.notes())
    assert store.open().publish(store.folder / "bundles/s3", 2).aliases == ()


@on_mlflow_too
def test_a_version_whose_manifest_is_damaged_is_left_out_told_and_never_numbered_again(store, caplog):
    registry = published(store, promoted=2)
    store.write_manifest(2, "{")
    for _ in range(2):
        assert [version.version for version in registry.versions()] == [1]
    assert caplog.text.count("version 2 is damaged and left out") == 1
    assert registry.resolve("latest").version == 1
    for name in ("champion", "2"):  # not one that nobody promoted, and not the first of its pair
        with pytest.raises(SnapshotCorrupt):
            registry.resolve(name)
    assert registry.publish(store.bundle("s3"), 1).version == 3
    with pytest.raises(SnapshotStale):
        store.open().publish(store.bundle("zombie"), 1)
    registry.promote(3)
    assert store.open().resolve("champion").version == 3


@pytest.mark.parametrize("content", ["", "[1]", '{"champion": "two"}', '{"champion": 1.5}', "\xff" * 9, "[" * 9999])
def test_aliases_that_cannot_be_read_are_an_error_of_the_registry_until_somebody_mends_them(tmp_path, content):
    registry = published(DirectoryPair(tmp_path), num=1)
    aliases = next((tmp_path / "registry").rglob("aliases.json"))
    aliases.write_text(content)
    for use in (registry.versions, lambda: registry.resolve("champion"), lambda: registry.promote(1)):
        with pytest.raises(RegistryError, match="is damaged"):
            use()
    aliases.unlink()
    registry.promote(1)
    assert registry.resolve("champion").version == 1


@on_mlflow_too
def test_a_judgement_is_kept_for_programs_and_in_words(store):
    registry = published(store, num=1)
    assert registry.resolve("1").judgement is None
    for judgement, words in (
        (PROMOTED, "promoted: better"),
        (PROMOTED.model_copy(update={"is_ordered": True, "reason": ""}), "promoted by an operator"),
        (Judgement(state="canary", reason="better", was_canary=True), "on trial: better"),
    ):
        registry.annotate(1, judgement.notes())
        assert store.open().resolve("1").judgement == judgement
        assert (str(judgement), judgement.notes()["judgement"]) == (words, words)


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"omnidraft.judgement": "{}"}', '{"omnidraft.judgement": "promoted"}']
)
def test_a_version_whose_notes_cannot_be_read_counts_as_refused_until_others_are_written(tmp_path, caplog, content):
    """They may have held a decision against it."""
    registry = published(store := DirectoryPair(tmp_path), num=1)
    registry.annotate(1, PROMOTED.notes())
    (store.version_folder(1) / "notes.json").write_text(content)
    for _ in range(2):
        (version,) = registry.versions()
        assert str(version.judgement) == "refused: its notes are damaged"
    assert registry.publish(store.bundle("s2"), 1).version == 2
    assert caplog.text.count("so version 1 has no notes and is not judged") == ("omnidraft" not in content)
    registry.annotate(1, PROMOTED.notes())
    assert registry.resolve("1").judgement == PROMOTED


@pytest.mark.parametrize("name", ["v000001.bak1", "vacation2"])
def test_folders_that_somebody_keeps_beside_the_versions_are_no_versions(tmp_path, name):
    registry = published(store := DirectoryPair(tmp_path), num=1)
    shutil.copytree(store.version_folder(1), store.version_folder(1).with_name(name))
    assert [version.version for version in registry.versions()] == [1]
    assert registry.publish(store.bundle("s2"), 1).version == 2


@on_mlflow_too
def test_of_two_publishers_with_one_parent_the_second_is_stale(store):
    published(store)
    second = store.open()
    for name, parent in (("zombie", 1), ("newcomer", None)):
        with pytest.raises(SnapshotStale):
            second.publish(store.bundle(name), parent)
    assert [version.manifest.snapshot_id for version in second.versions()] == ["s1", "s2"]
    third = store.bundle("s3")
    for _ in range(2):  # its publisher never got the first answer
        again = store.open().publish(third, 2)
        assert (again.version, again.aliases) == (3, ("challenger",))


@on_mlflow_too
def test_only_the_parts_asked_for_are_fetched_and_later_the_others_without_a_copy(store, tmp_path):
    """On one disk, publishing and fetching link."""
    registry = published(store, num=1)
    folder = registry.fetch(1, tmp_path / "cache")
    assert bundle.ngrams(folder)["keys"].tolist() == [0, 1, 2]
    assert not (folder / "resume").exists()
    assert registry.fetch(1, tmp_path / "cache", ("serving", "resume")) == folder
    bundle.verify(folder, ["serving", "resume"])
    if not getattr(store, "url", "").startswith("http"):
        source = tmp_path / "bundles/s1"
        assert (folder / bundle.DRAFTER).stat().st_ino == (source / bundle.DRAFTER).stat().st_ino


def test_a_file_that_rotted_in_the_store_is_never_handed_out(store, tmp_path):
    registry = published(store, num=1)
    (tmp_path / "bundles/s1" / bundle.DRAFTER).write_bytes(b"rotten")  # hard-linked: the store's file is the same one
    for _ in range(2):
        with pytest.raises(SnapshotCorrupt, match="sha256"):
            registry.fetch(1, tmp_path / "cache")


def test_a_disk_that_was_full_takes_the_version_once_it_has_space(store, tmp_path, monkeypatch):
    registry = published(store, num=1)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", _write_until_full)
        with pytest.raises(RegistryError, match="No space left"):
            registry.fetch(1, tmp_path / "cache")
    assert [path.stat().st_size for path in (tmp_path / "cache").rglob("manifest.json")] == [0]
    bundle.verify(registry.fetch(1, tmp_path / "cache"), ["serving"])


def _write_until_full(path, text):
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@on_mlflow_too
def test_a_broken_bundle_one_of_another_pair_and_one_that_somebody_else_signed_are_not_published(store, tmp_path):
    broken, foreign = store.bundle("s1"), store.bundle("s3")
    (broken / bundle.DRAFTER).write_bytes(b"")
    bundle.write_manifest(foreign, THEIRS.sign(bundle.read_manifest(foreign)))
    with pytest.raises(SnapshotCorrupt):
        store.open().publish(broken, None)
    with pytest.raises(RegistryError, match="stranger"):
        store.open().publish(make_bundle(tmp_path, "s2", target="stranger"), None)
    with pytest.raises(SnapshotCorrupt, match="not signed by"):
        store.open(signing=OURS).publish(foreign, None)
    assert store.open().versions() == ()


@on_mlflow_too
def test_of_many_versions_the_newest_and_those_with_an_alias_are_listed(store, monkeypatch):
    monkeypatch.setattr(mlflow_store, "PAGE_SIZE", 2)
    registry = published(store, num=5, keep_resume=9)
    registry.promote(2)
    assert [each.version for each in registry.versions()] == [1, 2, 3, 4, 5]
    assert [each.version for each in registry.versions(1)] == [2, 5]
    assert [each.version for each in registry.versions(2)] == [2, 4, 5]
    assert [each.aliases for each in registry.versions(1)] == [("champion",), ("challenger",)]
    with pytest.raises(SnapshotStale, match="newest version is 5"):
        store.open().publish(store.bundle("late"), 3)


def test_an_old_version_that_lost_its_alias_loses_its_weights_when_all_versions_are_looked_at(store, monkeypatch):
    monkeypatch.setattr(retention, "ALL_EVERY", 4)
    registry = published(store, num=7, promoted=1, keep_resume=1, keep_serving=2)
    registry.promote(6)
    registry.promote(7)  # 6 is previous, 1 nothing
    registry.publish(store.bundle("s8"), 7)
    assert registry.resolve("1").is_servable
    registry.publish(store.bundle("s9"), 8)  # the ninth looks at all
    assert not registry.resolve("1").is_servable


def has_weights(registry, version, cache):
    try:
        registry.fetch(version, cache)
    except SnapshotNotFound:
        return False
    return True


@on_mlflow_too
def test_old_weights_are_removed_but_for_those_that_have_an_alias_and_manifests_stay(store, tmp_path):
    registry = published(store, num=6, promoted=3, keep_resume=1, keep_serving=2)  # 3 is champion, 2 previous
    kept = [has_weights(registry, number, tmp_path / "cache") for number in range(1, 7)]
    assert kept == [False, True, True, False, True, True]
    assert [each.is_servable for each in store.open().versions()] == kept
    with pytest.raises(SnapshotNotFound, match=r"version 1 has no serving part any more \(registry\.keep_serving\)"):
        store.open().fetch(1, tmp_path / "cache")
    with pytest.raises(SnapshotNotFound, match="keep_resume"):
        registry.fetch(5, tmp_path / "cache", ("resume",))
    bundle.verify(registry.fetch(6, tmp_path / "cache", ("resume",)), ["resume"])
    assert [each.manifest.snapshot_id for each in registry.versions()] == ["s1", "s2", "s3", "s4", "s5", "s6"]
    registry.promote(2)  # a rollback, after which 3 is previous
    registry.publish(store.bundle("s7"), 6)
    assert all(has_weights(store.open(), number, tmp_path / "rolled back") for number in (2, 3, 6, 7))


def test_a_registry_that_may_delete_no_weights_and_one_that_keeps_more_resume_parts_keep_them(store, tmp_path):
    published(store, keep_resume=1)
    generous = store.open(keep_resume=3, keep_serving=1)
    for number in (3, 4):
        generous.publish(store.bundle(f"s{number}"), number - 1)
    assert [has_weights(generous, number, tmp_path / "cache") for number in range(1, 5)] == [False, True, True, True]


@on_mlflow_too
def test_a_version_without_weights_is_promoted_by_nobody(store):
    registry = published(store, promoted=1, keep_resume=1, keep_serving=1)
    registry.publish(store.bundle("s3"), 2)
    with pytest.raises(SnapshotNotFound, match="version 2 has no serving part any more"):
        registry.promote(2)
    assert aliases(store.open()) == [("champion",), (), ("challenger",)]


def test_a_snapshot_is_published_although_files_of_an_old_one_stay_on_the_disk(tmp_path, caplog):
    registry = published(store := DirectoryPair(tmp_path), num=1, keep_resume=1)
    with undeletable_resume(store):
        assert registry.publish(store.bundle("s2"), 1).aliases == ("challenger",)
        assert "resume of version 1 could not be deleted; the next publication tries again" in caplog.text
        with pytest.raises(RegistryError, match="link"):
            registry.remove_files(1, ("resume",))  # and they are not said to be deleted
    registry.publish(store.bundle("s3"), 2)
    assert [each.removed_parts for each in registry.versions()] == [("resume",), ("resume",), ()]


@contextmanager
def undeletable_resume(store):
    """Stands for a disk that does not let go of files, also of root's: the resume part of version 1 is a link to a
    folder, which `rmtree` refuses."""
    part = store.version_folder(1) / "snapshot/resume"
    elsewhere = part.rename(store.folder / "elsewhere")
    part.symlink_to(elsewhere)
    try:
        yield
    finally:
        part.unlink()
        elsewhere.rename(part)


@on_mlflow_too
def test_a_signed_manifest_that_is_longer_than_one_tag_of_mlflow_is_fetched_with_its_key_only(store, tmp_path):
    row = {"num_requests": 9, "before": 0.5, "after": 0.6, "change_error": 0.01}
    tenants = tuple(TenantAgreement(tenant=f"{number:0240}", **row) for number in range(900))
    folder = store.bundle("s1", tenants=tenants)
    assert len(bundle.read_manifest(folder).model_dump_json()) > 2 * MAX_TAG_CHARACTERS
    published = store.open(signing=OURS).publish(folder, None)
    assert published.manifest.signatures
    for name in ("1", "latest", "challenger"):
        assert store.open().resolve(name).manifest == published.manifest
    for number, registry in enumerate((store.open(signing=OURS), store.open())):
        fetched = registry.fetch(1, tmp_path / str(number))
        assert bundle.verify(fetched, ["serving"]) == published.manifest
    with pytest.raises(SnapshotCorrupt, match="not signed by a trusted distiller"):
        store.open(signing=THEIRS).fetch(1, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_forgery_with_fitting_checksums_is_refused_where_signatures_are_asked_for(store, tmp_path):
    source = store.bundle("s1")
    store.open(signing=OURS).publish(source, None)
    store.open(signing=OURS).fetch(1, tmp_path / "before")
    weights = source / bundle.DRAFTER  # hard-linked: the store's file is the same one
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    told = store.open().resolve("1").manifest
    forged = told.model_copy(update={"sha256": {**told.sha256, bundle.DRAFTER: sha256_of(weights)}})
    store.write_manifest(1, forged.model_dump_json())
    store.open().fetch(1, tmp_path / "trusting")  # checksums alone say nothing against it
    for cache in ("fresh", "before"):
        with pytest.raises(SnapshotCorrupt, match="was changed, or not signed by"):
            store.open(signing=OURS).fetch(1, tmp_path / cache)


def test_a_snapshot_from_before_the_key_is_refused_until_it_is_published_again(store, tmp_path):
    published(store, num=1)
    signing = store.open(signing=OURS)
    with pytest.raises(SnapshotCorrupt, match="has no signature"):
        signing.fetch(1, tmp_path / "cache")
    for _ in range(2):
        assert signing.publish(tmp_path / "bundles/s1", 1).version == 2
    signing.fetch(2, tmp_path / "cache")
