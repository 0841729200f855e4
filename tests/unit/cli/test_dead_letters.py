"""`omnidraft traces dead-letters` over a log in SQLite: what is listed, shown and sent back."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from omnidraft import assembly, config
from omnidraft.distill.ingest.trace_consumer import MAX_VALUE_BYTES, TraceConsumer
from omnidraft.ports import Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from tests.cli_runs import run_cli
from tests.trace_records import make_record

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def settings(tmp_path: Path) -> config.Settings:
    """Settings of a log with five consumed messages: one intact, four dead-lettered."""
    settings = config.load(None, {}, log={"url": f"sqlite:///{tmp_path}/log.db"})
    log, whole = settings.log, make_record("sound")
    payload, headers = codec.encode(whole), codec.headers(whole)
    writer = assembly.log_writer(settings, log.traces_topic)
    writer.append(
        [
            Outgoing(b"sound", payload, headers),
            Outgoing(b"\x1b[2J", b"\x1b]0;owned\x07", {"schema": b"\x1b[31m"}),
            Outgoing(b"cut-off", payload[:100], headers),
            Outgoing(b"newer", payload, headers | {"schema_version": b"99"}),
            Outgoing(b"huge", bytes(MAX_VALUE_BYTES + 1), headers),
        ]
    )
    reader, letters = (
        assembly.log_reader(settings, log.traces_topic),
        assembly.log_writer(settings, log.dead_letters_topic),
    )
    TraceConsumer(reader, letters, None, CountingMetrics(), topic=log.traces_topic).poll(9, timeout_s=0)
    return settings


@pytest.fixture
def command(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    monkeypatch.chdir(tmp_path)
    environ = {"OMNIDRAFT_LOG": settings.log.url, "COLUMNS": "250"}
    return lambda *arguments: run_cli(("traces", "dead-letters", *arguments), monkeypatch, capsys, environ)


def listed(command: Run, *arguments: object) -> list[dict]:
    return [json.loads(line) for line in command("list", "--json", *arguments).stdout.splitlines()]


def test_letters_are_listed_with_reason_and_origin(command: Run) -> None:
    rows = listed(command)
    assert [(row["offset"], row["reason"], row["origin_offset"]) for row in rows] == [
        (0, "unknown_schema", 1),
        (1, "unreadable", 2),
        (2, "unknown_schema", 3),
        (3, "unreadable", 4),
    ]
    assert rows[3]["bytes"] == MAX_VALUE_BYTES + 1
    assert [bool(row["cut"]) for row in rows] == [False, False, False, True]
    assert [row["offset"] for row in listed(command, "--reason", "unreadable", "-n", 1)] == [3]
    table = command("list").stdout
    assert "0:3" in table
    assert "omnidraft.traces.v1 0:4" in table
    assert "950001" in table


def test_nothing_from_a_letter_commands_the_terminal(command: Run) -> None:
    said = command("list").stdout + command("show", 0, 0).stdout + command("redrive", "--all").stdout
    assert "\x1b" not in said
    assert "\x07" not in said


def test_a_letter_is_shown_as_far_as_it_can_be_read(command: Run) -> None:
    strange, cut_off, newer = (json.loads(command("show", 0, offset).stdout) for offset in range(3))
    assert bytes.fromhex(strange["first_bytes"]) == b"\x1b]0;owned\x07"
    assert cut_off["readable_fields"]["request_id"] == "sound"
    assert "emitted_ids" not in cut_off["readable_fields"]
    assert "payload" in cut_off["error"]
    assert newer["headers"]["schema_version"] == "99"
    refused = command("show", 0, 99)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no dead letter at 0:99" in refused.stderr


def test_redrive_says_how_many_went_were_refused_and_were_done_already(command: Run, settings: config.Settings) -> None:
    assert "1 redriven, 0 redriven before, 0 refused" in command("redrive", "--offset", "0:2").stdout
    said = command("redrive", "--all").stdout
    assert "2 redriven, 1 redriven before, 1 refused" in said
    assert "the value has 950000 of 950001 bytes" in said
    assert "1 redriven, 0 redriven before" in command("redrive", "--offset", "0:2", "--again").stdout
    reader = assembly.log_reader(settings, settings.log.traces_topic)
    assert reader.end_offsets() == {0: 9}
    reader.seek({0: 5})
    redriven = reader.poll(1, timeout_s=0).messages[0]
    assert (redriven.key, redriven.headers["redriven_from"]) == (b"newer", b"omnidraft.dead-letters.v1/0/2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "--all"), (("--offset", "7"), "PARTITION:OFFSET"), (("--offset", "0:77"), "no dead letter at 0:77")],
)
def test_redrive_refuses_in_one_line(command: Run, arguments: tuple[str, ...], words: str) -> None:
    done = command("redrive", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
