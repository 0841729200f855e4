"""What only MLflow can do to a registry: calls that fail half way, stores of files that refuse, publishers that die."""

import multiprocessing
import os
import re
import signal
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import ViewType
from mlflow.store.artifact import artifact_repository_registry
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from omnidraft.config import LearnerSettings, MemorySettings
from omnidraft.distill.identity import Identity
from omnidraft.distill.memory.memory_files import MemoryFiles
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.publisher import Publisher
from omnidraft.distill.retrying import retry
from omnidraft.errors import RegistryError, SnapshotCorrupt, SnapshotNotFound, SnapshotStale, StoreLibraryMissing
from omnidraft.ports import Judgement
from omnidraft.registry import mlflow_runs, mlflow_store
from omnidraft.registry.manifest_export import MANIFEST_TAG
from omnidraft.registry.mlflow_registry import READY_TAG, MlflowRegistry
from omnidraft.registry.mlflow_runs import CURVES
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from tests.contract.registries import DRAFTER

FILES = ["manifest.json", "resume", "serving"]


@contextmanager
def failing(*names, also_done=False, num_done=0):
    """Calls of MLflow's client by these names fail, after so many that were done."""
    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(MlflowClient, name, _failing(getattr(MlflowClient, name), also_done, num_done))
        yield


def _failing(call, also_done, num_done):
    left = [num_done]

    def fail(*args, **options):
        left[0] -= 1
        if left[0] >= 0:
            return call(*args, **options)
        if also_done:
            call(*args, **options)  # and only the answer is lost
        raise OSError(f"no answer to {call.__name__}")

    return fail


@contextmanager
def before_next_alias(act):
    """Something happens right before an alias moves."""
    with pytest.MonkeyPatch.context() as patched:
        move_alias = MlflowClient.set_registered_model_alias

        def act_and_move(*args):
            patched.undo()
            act()
            move_alias(*args)

        patched.setattr(MlflowClient, "set_registered_model_alias", act_and_move)
        yield


def remains(mlflow):
    """Return how many runs of the pair's experiment are not deleted, and the files of all."""
    (experiment,) = mlflow.client.search_experiments(filter_string=f"name = '{mlflow.name}'")
    runs = mlflow.client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL)
    runs = [each for each in runs if each.info.run_name != CURVES]
    files = [file.path for run in runs for file in mlflow.client.list_artifacts(run.info.run_id)]
    return sum(run.info.lifecycle_stage == "active" for run in runs), sorted(files)


def with_champion(mlflow):
    """A registry with the champion 1 and the challenger 2."""
    registry = mlflow.open()
    registry.publish(mlflow.bundle("s1"), None)
    registry.promote(1)
    registry.publish(mlflow.bundle("s2"), 1)
    return registry


def test_a_challenger_that_is_published_during_a_promotion_keeps_its_alias(mlflow):
    registry = mlflow.open()
    registry.publish(mlflow.bundle("s1"), None)
    with before_next_alias(lambda: mlflow.open().publish(mlflow.bundle("s2"), 1)):
        registry.promote(1)
    assert [version.aliases for version in registry.versions()] == [("champion",), ("challenger",)]


def test_a_champion_that_is_still_called_challenger_is_not_once_it_is_rolled_back(mlflow):
    """Its alias stayed where a publisher tried again meanwhile, or a promotion was killed half way."""
    registry = with_champion(mlflow)
    registry.promote(2)
    mlflow.client.set_registered_model_alias(mlflow.name, "challenger", "2")
    registry.promote(1)
    assert [version.aliases for version in registry.versions()] == [("champion",), ("previous",)]


def test_a_version_that_is_not_ready_is_invisible_and_an_abandoned_one_gives_way(mlflow):
    registry, client, name = mlflow.open(), mlflow.client, mlflow.name
    registry.publish(mlflow.bundle("s1"), None)
    experiment = client.get_run(client.get_model_version(name, "1").run_id).info.experiment_id
    run = client.create_run(experiment).info  # what a publisher that died leaves behind:
    client.create_model_version(name, f"{run.artifact_uri}/snapshot", run.run_id, await_creation_for=0)
    assert [version.version for version in registry.versions()] == [1]
    with pytest.raises(SnapshotNotFound, match="still being published"):
        registry.resolve("2")
    with pytest.raises(SnapshotStale):  # it is seconds old: its publisher may be alive, and was first
        registry.publish(mlflow.bundle("s2"), 1)
    assert mlflow.open(abandoned_ms=0).publish(mlflow.bundle("s3"), 1).version == 4
    assert sorted(int(each.version) for each in client.search_model_versions(f"name='{name}'")) == [1, 4]
    assert READY_TAG in client.get_model_version(name, "4").tags


def test_how_a_snapshot_was_learned_and_its_story_are_shown(mlflow, tmp_path):
    settings = LearnerSettings(train="lora", lora_rank=8)
    learned_with = {name: str(value) for name, value in settings.model_dump().items()}
    registry, client = mlflow.open(), mlflow.client
    identity = Identity(mlflow.target, DRAFTER, "hash", "alignment", "lora", "1.0", learned_with)
    memory = TextMemory(MemorySettings(), vocabulary_size=9)
    files = MemoryFiles(memory, tmp_path / "memory", CountingMetrics())
    publisher = Publisher(registry, identity, tmp_path / "staging", files)
    publisher.publish({}, {"train": "base"})
    publisher.publish({bundle.DRAFTER: {"w": torch.zeros(2)}}, {})
    told = {"agreement_before": 0.7, "agreement_after": 0.8, "held_out_records": 9, "losses": {"dm": 0.5}}
    told |= {"counts": {"held_out": 14, "inside_a_draft_token": 67}}
    told["parent_id"] = registry.resolve("2").manifest.snapshot_id
    registry.publish(mlflow.bundle("s3", **told), 2)
    registry.annotate(3, Judgement(state="promoted", reason="well").notes())
    versions = [client.get_model_version(mlflow.name, number) for number in "123"]
    base, learned, run = (client.get_run(each.run_id) for each in versions)
    assert (base.data.params["train"], base.data.params.get("loss")) == ("base", None)
    names = ("train", "loss", "learning_rate", "lora_rank")
    assert [learned.data.params[name] for name in names] == ["lora", "dm + 0.2 ngram", "auto", "8"]
    assert "0.7000 to 0.8000 (+0.1000) on 9 records" in versions[2].description
    assert "| Records left out | 14 held_out |" in versions[2].description
    assert "| Positions left out | 67 inside_a_draft_token |" in versions[2].description
    assert "| Parent | version 2 |" in versions[2].description
    assert versions[2].description.endswith("To serve it: `omnidraft snapshots promote 3`\n")
    (curves,) = client.search_runs([run.info.experiment_id], f"attributes.run_name = '{CURVES}'")
    points = client.get_metric_history(curves.info.run_id, "num_records")
    assert ([each.step for each in points], curves.info.status) == ([1, 2, 3], "FINISHED")
    assert (run.info.run_name, run.info.status, run.data.metrics["loss/dm"]) == ("v3 s3", "FINISHED", 0.5)
    assert versions[2].tags["judgement"] == "promoted: well"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {"manifest.json", "serving"}


@pytest.mark.parametrize(
    "name", ["log_batch", "log_text", "set_terminated", "create_model_version", "set_model_version_tag"]
)
@pytest.mark.parametrize("also_done", [False, True], ids=["refused", "answer lost"])
def test_a_publication_that_fails_leaves_no_files_and_succeeds_when_it_is_tried_again(mlflow, name, also_done):
    folder, registry = mlflow.bundle("s1"), mlflow.open()
    with failing(name, also_done=also_done), pytest.raises(RegistryError, match=f"no answer to {name}"):
        registry.publish(folder, None)
    is_ready = name == "set_terminated" or (name, also_done) == ("set_model_version_tag", True)
    assert remains(mlflow) == ((1, FILES) if is_ready else (0, []))
    again = mlflow.open().publish(folder, None)
    assert (again.aliases, len(mlflow.open().versions())) == (("challenger",), 1)
    assert remains(mlflow) == (1, FILES)


def test_what_a_publisher_could_not_withdraw_is_no_rival_of_its_own_when_it_tries_again(mlflow):
    folder, registry = mlflow.bundle("s1"), mlflow.open()
    with (
        failing("create_model_version", also_done=True),
        failing("delete_model_version", "delete_run"),
        pytest.raises(RegistryError, match="no answer to create_model_version"),
    ):
        registry.publish(folder, None)
    assert registry.publish(folder, None).aliases == ("challenger",)
    assert len(mlflow.open().versions()) == 1


def test_a_clean_up_that_fails_too_does_not_hide_why_the_publication_failed(mlflow, caplog):
    with failing("create_model_version", "delete_run"), pytest.raises(RegistryError, match="create_model_version"):
        mlflow.open().publish(mlflow.bundle("s1"), None)
    assert "no answer to delete_run" in caplog.text
    assert remains(mlflow) == (1, [])  # the files, which are large, went first


@pytest.mark.parametrize("name", ["log_text", "create_model_version", "set_model_version_tag", "set_terminated"])
def test_what_a_killed_publisher_left_is_deleted_a_day_later(mlflow, monkeypatch, name):
    """It dies at this call. A version that was ready stays, and its run is finished."""
    mlflow.open().publish(mlflow.bundle("s1"), None)
    publisher = multiprocessing.get_context("fork").Process(target=publish_until, args=(mlflow, name))
    publisher.start()
    publisher.join(60)
    assert publisher.exitcode == -signal.SIGKILL
    assert remains(mlflow)[0] == 2
    num_ready = 2 if name == "set_terminated" else 1
    successor = mlflow.open(abandoned_ms=0)
    assert len(successor.versions()) == num_ready
    successor.publish(mlflow.bundle("s3"), num_ready)
    assert remains(mlflow)[0] == 3  # the publisher may be alive
    monkeypatch.setattr(mlflow_runs, "ABANDONED_MS", -1000)
    successor.publish(mlflow.bundle("s4"), successor.versions()[-1].version)
    assert remains(mlflow)[0] == num_ready + 2


def publish_until(mlflow, name):
    """Publish, and die of SIGKILL at the call of this name."""
    registry, folder = mlflow.open(), mlflow.bundle("s2")
    setattr(MlflowClient, name, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
    registry.publish(folder, 1)


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
def in_bucket(mlflow, monkeypatch):
    """What `--no-serve-artifacts --default-artifact-root s3://` does: every process reaches the store itself."""
    registered = artifact_repository_registry._artifact_repository_registry._registry
    monkeypatch.setitem(registered, "bucket", Bucket)
    for names in ("denied", "ignored"):
        monkeypatch.setattr(Bucket, names, ())
    mlflow.artifacts = f"bucket://name{mlflow.folder}/bucket"
    return mlflow


@pytest.mark.parametrize("name", ["log_artifacts", "log_artifact"])
def test_a_store_of_files_that_refuses_an_upload_is_a_registry_error_and_the_next_try_succeeds(in_bucket, name):
    folder, Bucket.denied = in_bucket.bundle("s1"), (name,)
    with pytest.raises(RegistryError, match=f"BucketError: {name}: AccessDenied"):
        in_bucket.open().publish(folder, None)
    Bucket.denied = ()
    assert in_bucket.open().publish(folder, None).version == 1


def test_a_store_of_files_that_refuses_anything_else_is_a_registry_error(in_bucket, tmp_path):
    registry = in_bucket.open()
    registry.publish(in_bucket.bundle("s1"), None)
    bundle.verify(registry.fetch(1, tmp_path / "cache"), ["serving"])
    Bucket.ignored = ("delete_artifacts",)
    with pytest.raises(RegistryError, match="keeps files"):
        registry.remove_files(1, ("resume",))
    assert registry.resolve("1").removed_parts == ()
    Bucket.ignored = ()
    registry.remove_files(1, ("resume",))
    assert registry.resolve("1").removed_parts == ("resume",)
    with pytest.raises(SnapshotNotFound, match="keep_resume"):
        registry.fetch(1, tmp_path / "cache", ("resume",))
    Bucket.denied = ("list_artifacts", "delete_artifacts")
    for use in (
        lambda: registry.fetch(1, tmp_path / "other"),
        lambda: registry.remove_files(1, ("serving",)),
    ):
        with pytest.raises(RegistryError, match="BucketError"):
            use()


@pytest.mark.skipif(find_spec("boto3") is not None, reason="boto3 is installed here")
def test_a_store_whose_library_is_missing_is_said_at_once_and_not_waited_for(mlflow):
    registry = mlflow.open(artifacts="s3://bucket/folder")
    folder, attempts = mlflow.bundle("s1"), []
    with pytest.raises(StoreLibraryMissing, match="No module named 'boto3'; install it"):
        retry(lambda: registry.publish(folder, None), lambda: False, lambda: attempts.append(1))
    assert (attempts, registry.versions()) == ([], ())


def test_a_snapshot_is_published_although_what_is_kept_no_longer_cannot_be_deleted(in_bucket, monkeypatch, caplog):
    """And the next publication deletes it: the parts of an old version, and what a killed publisher left."""
    registry = in_bucket.open(keep_resume=1)
    registry.publish(in_bucket.bundle("s1"), None)
    with failing("log_text", "delete_run"), pytest.raises(RegistryError):
        registry.publish(in_bucket.bundle("left"), 1)
    monkeypatch.setattr(mlflow_runs, "ABANDONED_MS", -1000)
    Bucket.denied = ("delete_artifacts",)
    assert registry.publish(in_bucket.bundle("s2"), 1).aliases == ("challenger",)
    for what in ("resume of version 1", "the abandoned run [0-9a-f]+"):
        assert re.search(f"{what} could not be deleted; the next publication tries again", caplog.text)
    assert "AccessDenied" in caplog.text
    Bucket.denied = ()
    assert remains(in_bucket)[0] == 3
    registry.publish(in_bucket.bundle("s3"), 2)
    assert remains(in_bucket)[0] == 3
    assert [each.removed_parts for each in registry.versions()] == [("resume",), ("resume",), ()]


def test_a_snapshot_is_published_although_mlflow_fails_in_housekeeping(mlflow, caplog):
    registry = mlflow.open()
    with failing("search_runs"):
        registry.publish(mlflow.bundle("s1"), None)
    assert "what is kept no longer could not be deleted" in caplog.text
    assert [each.aliases for each in registry.versions()] == [("challenger",)]


def test_a_manifest_of_which_a_tag_is_missing_is_damaged(mlflow):
    registry = mlflow.open()
    registry.publish(mlflow.bundle("s1", settings={str(number): "x" * 1000 for number in range(101)}), None)
    mlflow.client.delete_model_version_tag(mlflow.name, "1", f"{MANIFEST_TAG}.2")
    assert registry.versions() == ()
    with pytest.raises(SnapshotCorrupt, match="not a manifest"):
        registry.resolve("1")


def open_registry(url):
    MlflowRegistry(url, DRAFTER, "t", artifacts=None, keep_resume=2).versions()


def test_an_opening_that_failed_is_tried_again_by_the_next_call_and_no_other(mlflow, monkeypatch):
    registry = mlflow.open()
    with monkeypatch.context() as away:
        away.setattr(mlflow_store, "_open", _failing(mlflow_store._open, also_done=False, num_done=0))
        with pytest.raises(RegistryError, match="check that"):
            registry.versions()
    assert registry.versions() == ()
    monkeypatch.setattr(mlflow_store, "_open", None)
    assert registry.versions() == ()


def test_three_processes_open_a_fresh_store_together(tmp_path, mlflow_url):
    open_registry(mlflow_url)  # mlflow is imported once, here; the forks start at the migration
    fork = multiprocessing.get_context("fork")
    openers = [fork.Process(target=open_registry, args=(f"sqlite:///{tmp_path}/fresh/mlflow.db",)) for _ in range(3)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(90)
    assert [opener.exitcode for opener in openers] == [0, 0, 0]


def test_a_file_that_is_no_database_is_a_registry_error(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is not a database" * 100)
    with pytest.raises(RegistryError):
        open_registry(f"sqlite:///{tmp_path}/mlflow.db")
