"""Pipelines refuse before they work, keep what they have until it is safe, and say what a snapshot learned already."""

import errno
import json
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from omnidraft import assembly, config, files
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.errors import ConfigError, ModelError, RequestError, StorageError
from omnidraft.ports import Outgoing
from omnidraft.snapshots import bundle
from omnidraft.traces import archive, codec
from pipelines import evaluate, learn, record, replay
from pipelines.lib import recording
from tests.cli_runs import Environ, made_once
from tests.cli_runs import run_pipeline as run

NUM_ANSWERS = 24
EVERY = 2
"""One request in so many is held out."""


@pytest.fixture(autouse=True)
def environ(pipeline_environ: Environ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline_environ(
        {
            "OMNIDRAFT_LEARNER__HELD_OUT_EVERY": str(EVERY),
            "MLFLOW_TRACKING_URI": f"directory:///{tmp_path}/registry",
        }
    )
    monkeypatch.delenv("OMNIDRAFT_MODELS__DRAFTER")  # each test gives its own


@pytest.fixture
def good(tmp_path: Path, tiny_models: tuple[Path, Path]) -> Path:
    """Settings of the tiny pair; the environment, which would win, has no drafter."""
    path = tmp_path / "good.toml"
    path.write_text(f'[models]\ndrafter = "{tiny_models[1]}"\n')
    return path


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"Question {n}", "answer": "She sold 48 clips in April."} for n in range(NUM_ANSWERS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def archives() -> dict[str, bytes]:
    """What was recorded once, for all tests."""
    return {}


@pytest.fixture
def recorded(answers: Path, good: Path, tmp_path: Path, archives: dict[str, bytes]) -> Path:
    return made_once(archives, tmp_path / "traces.avro", record.main, "--answers", answers, "--config", good)


@pytest.mark.parametrize(
    ("settings", "error"),
    [('[learner]\nloss = "magic"\n', ConfigError), ('[models]\ndrafter = "no-such-drafter"\n', ModelError)],
)
def test_a_replay_checks_all_configurations_before_the_first_learns(
    recorded: Path, good: Path, tmp_path: Path, settings: str, error: type[Exception]
) -> None:
    """The good one, which is first, has written no figures."""
    (tmp_path / "bad.toml").write_text(settings)
    out = tmp_path / "replay.json"
    with pytest.raises(error):
        run(replay.main, "--log", recorded, "--config", good, tmp_path / "bad.toml", "--json", out)
    assert not out.exists()


def test_a_replay_writes_over_no_snapshot_and_says_so_before_it_learns(
    recorded: Path, good: Path, tmp_path: Path
) -> None:
    (tmp_path / "snapshots" / "good").mkdir(parents=True)
    out = tmp_path / "replay.json"
    with pytest.raises(RequestError, match="good exists"):
        run(replay.main, "--log", recorded, "--config", good, "--json", out, "--snapshots", tmp_path / "snapshots")
    assert not out.exists()


def test_a_replays_figures_outlive_a_snapshot_that_cannot_be_written(
    recorded: Path, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(replay, "write_snapshot", fails)
    out = tmp_path / "replay.json"
    asked = ("--log", recorded, "--config", good, "--held-out-every", EVERY, "--json", out)
    with pytest.raises(StorageError):
        run(replay.main, *asked, "--snapshots", tmp_path / "snapshots")
    assert "agreement_after" in json.loads(out.read_text())["configs"]["good"]


def test_recorded_answers_are_kept_until_their_snapshot_is_written(
    answers: Path, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--answers", answers, "--out", tmp_path / "warm", "--config", good, "--held-out-every", EVERY)
    with monkeypatch.context() as patch:
        patch.setattr(learn, "learn", _dies)
        with pytest.raises(MemoryError):
            run(learn.main, *asked)
    assert len(list((tmp_path / "warm.parts").glob("*.avro"))) == NUM_ANSWERS
    monkeypatch.setattr(recording, "force", _dies)
    run(learn.main, *asked)
    assert bundle.read_manifest(tmp_path / "warm").num_records > 0
    assert not (tmp_path / "warm.parts").exists()


@pytest.mark.parametrize(
    ("out", "reason"),
    [("folder", "it is a folder"), ("answers.jsonl/traces.avro", "answers.jsonl is no folder")],
)
@pytest.mark.parametrize("source", ["--answers", "--from-api"])
def test_a_recording_that_cannot_be_written_is_refused_before_anything_is_read(
    answers: Path, tmp_path: Path, source: str, out: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError, match=f"cannot write {tmp_path}/{out}: .*{reason}"):
        run(record.main, source, tmp_path / "missing.jsonl", "--out", tmp_path / out)
    assert sorted(tmp_path.iterdir()) == [answers, tmp_path / "folder"]


def test_an_archive_that_the_system_does_not_write_is_told_in_one_line(
    answers: Path, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are kept for the next try."""
    out = tmp_path / "new" / "traces.avro"

    def replaced_file(path: Path, *rights: int) -> AbstractContextManager[BinaryIO]:
        if path == out:
            raise OSError(errno.ENOSPC, "No space left on device")
        return files.replaced_file(path, *rights)

    monkeypatch.setattr(archive, "replaced_file", replaced_file)
    with pytest.raises(RequestError, match=r"^cannot write .*traces\.avro: No space left on device; [^\n]*$"):
        run(record.main, "--answers", answers, "--out", out, "--config", good)
    assert len(list(out.with_suffix(".parts").glob("*.avro"))) == NUM_ANSWERS


def _dies(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("option", [("--split", "train"), ("--tenant", "team"), ("--max-new-tokens", 8)])
def test_options_that_an_archive_cannot_follow_are_refused(
    recorded: Path, good: Path, tmp_path: Path, option: tuple[object, ...]
) -> None:
    with pytest.raises(RequestError, match=f"{option[0]} is for texts"):
        run(learn.main, "--answers", recorded, "--out", tmp_path / "warm", "--config", good, *option)


def test_evaluation_says_how_much_a_snapshot_learned_of_its_records_and_can_leave_that_out(
    recorded: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm, out, log = tmp_path / "warm", tmp_path / "evaluated.json", f"sqlite:///{tmp_path}/log.db"
    run(learn.main, "--answers", recorded, "--out", warm, "--config", good, "--held-out-every", EVERY)
    records = list(archive.read(recorded))
    num_learnable = sum(not is_held_out(each, EVERY) for each in records)
    _publish_as_if_learned_from(log, records, warm)

    def evaluated(source: object, *options: object) -> tuple[int, int | None, str]:
        capsys.readouterr()
        named = ("--snapshot", "base", warm)
        run(evaluate.main, "--log", source, *named, "--config", good, "--json", out, *options)
        report = json.loads(out.read_text())
        assert report["snapshots"]["base"]["learned_records"] == 0
        return report["records"], report["snapshots"][str(warm)]["learned_records"], capsys.readouterr().err

    num_records, num_learned, said = evaluated(log)
    assert (num_records, num_learned) == (len(records), num_learnable)
    assert f"has learned up to {num_learnable} of these {len(records)} records" in said
    num_records, num_learned, said = evaluated(log, "--held-out")
    assert (num_records, num_learned) == (len(records) - num_learnable, 0)
    assert "learned" not in said
    num_records, num_learned, said = evaluated(recorded)
    assert (num_records, num_learned) == (len(records), None)
    assert "cannot tell what it learned" in said


def _publish_as_if_learned_from(log: str, records: list[Any], folder: Path) -> None:
    """Write the records into a log, and its end into the snapshot's manifest, as a distiller does."""
    settings = config.load(None, log={"url": log})
    writer = assembly.log_writer(settings, settings.log.traces_topic)
    writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in records])
    writer.close()
    with closing(assembly.log_reader(settings, settings.log.traces_topic)) as reader:
        read = {"offsets": reader.end_offsets(), "log_id": reader.identity()}
    bundle.write_manifest(folder, bundle.read_manifest(folder).model_copy(update=read))


def test_figures_of_an_evaluation_are_told_though_they_cannot_be_saved(
    recorded: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        run(evaluate.main, "--log", recorded, "--config", good, "--json", tmp_path / ("x" * 300))
    assert "base" in capsys.readouterr().out


def test_an_evaluation_without_held_out_records_is_refused(
    recorded: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_LEARNER__HELD_OUT_EVERY", "0")
    with pytest.raises(RequestError, match="held_out_every = 0"):
        run(evaluate.main, "--log", recorded, "--config", good, "--held-out")
