"""`omnidraft traces`: `verify` has exit code 0 when all is accounted for, 1 when not; what is not there is refused."""

import json
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.ports import Outgoing
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.traces import archive, codec
from tests.cli_runs import run_cli
from tests.snapshot_folders import make_bundle
from tests.trace_records import make_record


def learned(tmp_path: Path, num_learned: int) -> dict[str, str]:
    """A log of five records, and a snapshot that says how many of the first three were learned; the environment."""
    environ = {
        "OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db",
        "OMNIDRAFT_REGISTRY__URL": f"directory:///{tmp_path}/registry",
        "OMNIDRAFT_MODELS__DRAFTER": "drafter",
        "OMNIDRAFT_LEARNER__HELD_OUT_EVERY": "0",
        "COLUMNS": "200",
    }
    settings = config.load(None, environ, models={"target": "target"})
    records = [make_record(f"r{number}", alignment="a") for number in range(5)]
    writer = assembly.log_writer(settings, settings.log.traces_topic)
    writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in records])
    registry = DirectoryRegistry(tmp_path / "registry", "drafter", "target", keep_resume=2)
    pair = {"target": "target", "drafter": "drafter"}
    registry.publish(make_bundle(tmp_path, "base", **pair), None)
    registry.publish(make_bundle(tmp_path, "next", offsets={0: 3}, num_records=num_learned, **pair), 1)
    return environ


@pytest.mark.parametrize(("num_learned", "code"), [(3, 0), (2, 1), (4, 1)])
def test_the_exit_code_says_whether_every_record_was_learned_once(
    num_learned: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = learned(tmp_path, num_learned)
    asked = ("traces", "verify", "--target", "target", "--json", tmp_path / "out.json")
    done = run_cli(asked, monkeypatch, capsys, environ)
    assert done.returncode == code, done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["num_lost"], told["num_learned_twice"]) == (max(0, 3 - num_learned), max(0, num_learned - 3))
    assert told["num_to_learn"] == 2
    assert "up to snapshot 2" in done.stdout


def test_a_report_that_cannot_be_written_is_printed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = learned(tmp_path, 3)
    done = run_cli(("traces", "verify", "--target", "target", "--json", "x" * 300), monkeypatch, capsys, environ)
    told = f"omnidraft: cannot write {'x' * 300}: File name too long; name another file, or make it writable\n"
    assert (done.returncode, done.stderr) == (2, told)
    assert "up to snapshot 2" in done.stdout


@pytest.mark.parametrize("command", [("verify", "--json"), ("export",)])
def test_a_file_in_a_folder_that_is_not_there_is_refused_before_the_log_is_read(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"OMNIDRAFT_LOG": "kafka://127.0.0.1:1"}
    done = run_cli(("traces", *command, "/nonexistent/out"), monkeypatch, capsys, environ)
    assert done.returncode == 2
    assert done.stderr == "omnidraft: cannot write /nonexistent/out: there is no folder /nonexistent\n"


@pytest.mark.parametrize(
    "command",
    [
        "traces tail",
        "traces tail --follow",
        "traces export out.avro",
        "traces verify",
        "traces dead-letters list",
        "traces dead-letters show 0 0",
        "traces dead-letters redrive --all",
        "snapshots list",
        "snapshots show champion",
        "snapshots promote latest",
        "tenants factors list",
    ],
)
@pytest.mark.parametrize("registry", ["sqlite:///mlflow.db", "directory:///registry"])
def test_in_an_empty_folder_a_command_that_reads_is_refused_and_makes_nothing(
    command: str, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"OMNIDRAFT_LOG": "sqlite:///runs/log.db", "MLFLOW_TRACKING_URI": registry}
    done = run_cli(command.split(), monkeypatch, capsys, environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert " yet: " in done.stderr
    assert done.stderr.endswith("run this where the services run, or name --config\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("tail",), ("dead-letters", "list")])
def test_a_log_without_the_topic_is_refused_and_gets_none(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db"}
    settings = config.load(None, environ)
    assembly.log_writer(settings, settings.log.control_topic)
    done = run_cli(("traces", *command), monkeypatch, capsys, environ)
    assert done.returncode == 2
    assert f"at {settings.log.url} yet: " in done.stderr
    assert assembly.topic_names(settings) == {settings.log.control_topic}


def test_the_newest_records_of_a_target_become_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What learner.pinned_held_out names; messages that are unreadable or of another target are left out."""
    environ = {"OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db", "OMNIDRAFT_MODELS__DRAFTER": "drafter"}
    settings = config.load(None, environ, models={"target": "target"})
    records = [make_record(f"r{number}", tenant=("acme", "bolt")[number % 2]) for number in range(9)]
    records[4] = make_record("r4", target="other")
    writer = assembly.log_writer(settings, settings.log.traces_topic)
    writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in records])
    writer.append([Outgoing(b"", b"no record")])
    for options, expected in (((), "r3 r5 r6 r7 r8"), (("--tenant", "acme"), "r6 r8")):
        asked = ("traces", "export", tmp_path / "out.avro", "-n", "7", "--target", "target", *options)
        assert run_cli(asked, monkeypatch, capsys, environ).returncode == 0
        assert [each.request_id for each in archive.read(tmp_path / "out.avro")] == expected.split()
    (folder := tmp_path / "folder").mkdir()
    refused = run_cli(("traces", "export", folder, "--target", "target"), monkeypatch, capsys, environ)
    told = f"omnidraft: cannot write {folder}: it is a folder; name a file\n"
    assert (refused.returncode, refused.stderr) == (2, told)
    asked = ("traces", "export", tmp_path / "none.avro", "--target", "target", "--tenant", "nobody")
    assert run_cli(asked, monkeypatch, capsys, environ).returncode == 2
    assert not (tmp_path / "none.avro").exists()
