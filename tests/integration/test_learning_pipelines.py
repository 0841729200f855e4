"""The pipelines around learning, as a user runs them: record, learn, check, replay, on tiny real models."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnidraft import assembly, config
from omnidraft.cli.replay import AS_SET, replay
from omnidraft.config import ControllerSettings
from omnidraft.errors import RequestError
from omnidraft.fleet.promotion import decide
from omnidraft.ports import Outgoing
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import archive, codec
from omnidraft.whatif import log_slice
from pipelines import record
from pipelines.bench import __main__ as bench
from pipelines.lib import recording
from tests.cli_runs import Environ, made_once, run_cli
from tests.cli_runs import run_pipeline as run
from tests.tiny_fleet import memory_in, memory_of

ANSWERS = ["She sold 48 clips in April.", "A number: 10 11 12", "Natalia sold half as many in May.", "How many? 3"]


@pytest.fixture(autouse=True)
def environ(pipeline_environ: Environ, tmp_path: Path) -> None:
    pipeline_environ(
        {
            "OMNIDRAFT_LEARNER__LEARNING_RATE": "3e-3",
            "OMNIDRAFT_DECODE__POLICY": "fixed",
            "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        }
    )


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"Question {n}: how many clips?", "answer": ANSWERS[n % len(ANSWERS)]} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def archives() -> dict[str, bytes]:
    """What was recorded once, for all tests."""
    return {}


@pytest.fixture
def recorded(answers: Path, tmp_path: Path, archives: dict[str, bytes]) -> Path:
    return made_once(archives, tmp_path / "traces.avro", record.main, "--answers", answers, "--tenant", "clips")


def warmed(archive_path: Path, tmp_path: Path, *options: object, every: int = 4) -> Path:
    """The snapshot's folder of a drafter that learned the archive; `tmp_path / "curve.json"` has its figures."""
    curve = ("--json", tmp_path / "curve.json")
    run(replay, "--log", archive_path, "--snapshots", tmp_path / "made", "--held-out-every", every, *curve, *options)
    return tmp_path / "made" / AS_SET


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_given_texts_are_recorded_as_they_are(recorded: Path) -> None:
    tokenizers = assembly.vocabularies(config.load())
    records = list(archive.read(recorded))
    texts = [tokenizers.target.vocabulary.spell(each.emitted_ids.tolist()).decode() for each in records]
    assert texts == [ANSWERS[n % len(ANSWERS)] for n in range(24)]
    assert {each.tenant for each in records} == {"clips"}
    assert all(each.beliefs is not None for each in records)
    assert not recorded.with_suffix(".parts").exists()


def test_an_interrupted_recording_goes_on_where_it_was(
    answers: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force, calls = recording.force, []

    def dies(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 10:
            raise MemoryError
        return force(*arguments)

    def dies_at_the_end(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(recording, "force", dies)
    again = tmp_path / "again.avro"
    arguments = ("--answers", answers, "--out", again, "--tenant", "clips")
    with pytest.raises(MemoryError):
        run(record.main, *arguments)
    with monkeypatch.context() as patch:
        patch.setattr(record, "_write", dies_at_the_end)
        with pytest.raises(MemoryError):
            run(record.main, *arguments)
    assert not again.exists()
    run(record.main, *arguments)
    assert len(calls) == 10 + 24 - 9
    again_records, expected = (list(archive.read(path)) for path in (again, recorded))
    assert [each.emitted_ids.tolist() for each in again_records] == [each.emitted_ids.tolist() for each in expected]


def test_a_target_answers_prompts_as_plain_decoding_would(answers: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.avro"
    run(record.main, "--prompts", answers, "--num-prompts", 3, "--max-new-tokens", 12, "--out", out)
    for each in archive.read(out):
        likeliest = each.beliefs.top_ids_EK[:, 0] if each.beliefs is not None else None
        assert (each.emitted_ids == likeliest).all()


def test_learning_writes_a_snapshot_that_check_takes_and_that_agrees_more(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, made = warmed(recorded, tmp_path, "--num-passes", 8, every=2), tmp_path / "curve.json"
    points = load(made)["runs"][AS_SET]["curve"]
    assert points[-1]["agreement"] > points[0]["agreement"]
    assert points[-1]["tokens_per_pass"]["4"] > points[0]["tokens_per_pass"]["4"]
    manifest = bundle.verify(out, ("serving",))
    before, after, error = manifest.agreement_before, manifest.agreement_after, manifest.agreement_change_error
    assert after > before
    assert error > 0
    assert manifest.held_out_records >= sum(each.num_requests for each in manifest.tenants) > 1
    base = manifest.model_copy(update={"train": "base", "tenants": (), "agreement_after": None})
    assert decide(manifest, base, ControllerSettings(confidence=0.6)).promote
    arguments = ("--temperature", 0, "--num-prompts", 2, "--max-new-tokens", 8, "--law-samples", 100)
    checked = run_cli(("check", "--snapshot", out, *arguments), monkeypatch, capsys)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_worker_serves_the_folder_it_is_told_whatever_is_champion(recorded: Path, tmp_path: Path) -> None:
    warm, log = warmed(recorded, tmp_path), {"url": f"sqlite:///{tmp_path}/log.db"}
    worker = assembly.worker(config.load(None, log=log, worker={"snapshot": str(warm)}), CountingMetrics())
    try:
        (served,) = worker.served
        assert served.updater is None
        assert served.engine.slot.current.snapshot_id == bundle.read_manifest(warm).snapshot_id
        memory = memory_of(worker)
        learned = memory("clips")
        assert learned is not None
        said = assembly.vocabularies(config.load()).target.encode(ANSWERS[0])
        assert learned.longest_match(said[:4]).continuations(1)[0][0] == said[4]
        assert memory("somebody else") is None
    finally:
        assert worker.producer is not None
        worker.producer.close(5.0)


@pytest.mark.long
def test_a_model_that_is_loaded_with_transformers_is_drafted_from_a_snapshots_memory(
    answers: Path, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    run(record.main, "--answers", answers, "--out", said := tmp_path / "said.avro", "--tenant", "default")
    warm = warmed(said, tmp_path)
    model, tokenizer = (kind.from_pretrained(tiny_models[0]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    loaded = assembly.loaded_model(model, tokenizer, config.load(), CountingMetrics(), snapshot=str(warm))
    assert memory_in(loaded.proposer)("default") is not None
    assert memory_in(loaded.proposer)("somebody else") is None


@pytest.mark.long
def test_the_benchmark_drafts_from_a_snapshots_memory_also_without_a_drafter(answers: Path, tmp_path: Path) -> None:
    """The method is the tenant, and it is asked again what the target has answered to this tenant before."""
    said, options = tmp_path / "said.avro", ("--max-new-tokens", 40)
    run(record.main, "--prompts", answers, "--out", said, "--tenant", "suffix", *options)
    warm = warmed(said, tmp_path)
    num_passes = {}
    for name, chosen in {"without": (), "with": ("--snapshot", warm)}.items():
        found = tmp_path / f"{name}.json"
        asked = ("--prompts", answers, "--num-prompts", 4, "--methods", "plain,suffix", "--mode", "reproducible")
        run(bench.main, *asked, "--json", found, *options, *chosen)
        (row,) = [row for row in load(found)["rows"] if row["method"] == "suffix"]
        assert row["share_identical_to_plain"] == 1.0
        num_passes[name] = sum(each["num_passes"] for each in load(found)["runs"] if each["method"] == "suffix")
    assert num_passes["with"] < 0.8 * num_passes["without"]


@pytest.mark.long
def test_another_drafter_learns_from_an_archive_with_prompts_in_its_own_ids(
    recorded: Path, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The target drafts for itself here: its prompts are its own again, to the last id."""
    name = str(tiny_models[0])
    settings = config.load(None, models={"drafter": name})
    tokenizers, everything = assembly.vocabularies(settings), log_slice.parse_filter(None, None, [])
    records = list(archive.read(recorded))
    adopted = log_slice.of_pair(recorded, settings, tokenizers, everything).records
    for before, after in zip(records, adopted, strict=True):
        assert before.drafter_prompt_ids.tolist() != before.prompt_ids.tolist()
        assert after.drafter_prompt_ids.tolist() == after.prompt_ids.tolist()
        assert (after.drafter, after.alignment) == (name, tokenizers.alignment.fingerprint)
    other = config.load(None, models={"target": "another", "drafter": name})
    assert log_slice.of_pair(recorded, other, tokenizers, everything).skipped == {"other_target": len(records)}
    out = warmed(recorded, tmp_path, "--drafter", name, every=2)
    assert bundle.read_manifest(out).drafter == name


@pytest.fixture
def log(recorded: Path, tmp_path: Path) -> str:
    """A trace topic with sound records, one of another tenant, one of another pair and one that nobody can read."""
    url = f"sqlite:///{tmp_path}/log.db"
    settings = config.load(None, log={"url": url})
    writer = assembly.log_writer(settings, settings.log.traces_topic)
    records = list(archive.read(recorded))
    others = [replace(records[0], request_id="t", tenant="other"), replace(records[1], request_id="p", target="x")]
    writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in [*records, *others]])
    writer.append([Outgoing(b"k", b"junk", codec.headers(records[0]))])
    writer.close()
    return url


def test_replays_compare_settings_as_mlflow_runs_and_leave_the_log_alone(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "log.db"
    before = sqlite3.connect(database).execute("SELECT count(*) FROM messages").fetchone()
    monkeypatch.setenv("OMNIDRAFT_LEARNER__LEARNING_RATE", "1e-6")
    out, drawn, fast = tmp_path / "replay.json", tmp_path / "curves.png", "learner.learning_rate=3e-3"
    arguments = ("--log", log, "--held-out-every", 4, "--num-passes", 4, "--filter", "tenant=clips", "--json", out)
    arguments += ("--vary", fast, "--picture", drawn)
    done = run_cli(("replay", *arguments, "--snapshots", tmp_path / "made"), monkeypatch, capsys)
    assert done.returncode == 0, done.stderr
    first = load(out)["runs"]
    slow, quick = first[AS_SET], first[fast]
    assert quick["curve"][-1]["agreement"] > slow["curve"][-1]["agreement"]
    assert quick["beside"] == quick["curve"][-1]["agreement"] - slow["curve"][-1]["agreement"]
    assert quick["beside_error"] > 0 == slow["beside"]
    assert f"{quick['beside']:+.3f}" in done.stdout
    assert slow["curve"][0] == quick["curve"][0]
    assert slow["passed_over"] == {"unreadable": 1, "other_tenant": 1, "other_target": 1}
    assert slow["records"] + slow["held_out_records"] == 24
    assert bundle.verify(tmp_path / "made" / fast, ("serving",)).settings["learning_rate"] == "0.003"
    assert drawn.stat().st_size
    refused = run_cli(("replay", *arguments, "--snapshots", tmp_path / "made"), monkeypatch, capsys)
    assert refused.returncode == 2
    assert "exists; a snapshot is written once" in refused.stderr
    run_cli(("replay", *arguments), monkeypatch, capsys)
    again = load(out)["runs"]
    assert [row["curve"] for row in again.values()] == [row["curve"] for row in first.values()]
    assert sqlite3.connect(database).execute("SELECT count(*) FROM messages").fetchone() == before
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    history = client.get_metric_history(again[fast]["mlflow_run"], "agreement")
    assert [point.value for point in history] == [point["agreement"] for point in again[fast]["curve"]]
    assert client.get_run(again[fast]["mlflow_run"]).info.status == "FINISHED"


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
