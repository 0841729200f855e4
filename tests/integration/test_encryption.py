"""Encrypted traces end to end, over SQLite and a real broker: what lies in the log, who can read it, what becomes of
records whose key is missing, and every command that looks into the log."""

import json
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnidraft import assembly, config
from omnidraft.distill.ingest import dead_letters, topic_scan
from omnidraft.ports import LogReader, Outgoing
from omnidraft.traces import codec
from tests.cli_runs import run_cli
from tests.integration.settings_runs import environ, learn, record
from tests.trace_records import make_record

WORDS = np.arange(16_000_000, 16_000_008, dtype=np.uint32)
OLD, NEW = ("b2xk" * 10 + "b2w=", "bmV3" * 10 + "bmU=")

Settings = Callable[..., config.Settings]


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Of one log, with the keys that are asked for."""
    is_kafka = request.param == "kafka"
    url = f"kafka://{request.getfixturevalue('kafka_bootstrap')}" if is_kafka else f"sqlite:///{tmp_path}/log.db"
    prefix = f"encrypted-{uuid.uuid4().hex}"

    def make(*keys: str, **log: Any) -> config.Settings:
        log = {"url": url, "topic_prefix": prefix, "encryption_keys": keys, **log}
        return config.load(None, {}, log=log, registry={"url": "directory:///registry"})

    return make


def stored(settings: config.Settings, topic: str) -> list[bytes]:
    """Keys, values and headers as they lie in the log, read without any key."""
    plain = settings.model_copy(update={"log": settings.log.model_copy(update={"encryption_keys": ()})})
    with closing(assembly.log_reader(plain, topic)) as reader:
        return [b"".join([each.value, *each.headers.values()]) for each in topic_scan.messages(reader)]


def test_what_users_said_lies_in_the_log_only_without_a_key(settings: Settings) -> None:
    for keys, is_readable in [((), True), ((NEW,), False)]:
        asked = settings(*keys, topic_prefix=f"words-{uuid.uuid4().hex}")
        record(asked, "a", prompt_ids=WORDS)
        assert learn(asked) == (["a"], [])
        (lying,) = stored(asked, asked.log.traces_topic)
        assert (WORDS.tobytes() in lying) is is_readable


@pytest.mark.parametrize(("keys", "is_readable"), [((), True), ((NEW,), False)])
def test_no_file_of_an_sqlite_log_holds_what_users_said(tmp_path: Path, keys: tuple[str, ...], is_readable: bool):
    asked = config.load(None, {}, log={"url": f"sqlite:///{tmp_path}/log.db", "encryption_keys": keys})
    record(asked, *"abc", prompt_ids=WORDS)
    assert any(WORDS.tobytes() in path.read_bytes() for path in tmp_path.iterdir()) is is_readable


def test_a_record_without_its_key_is_a_dead_letter_that_goes_back_when_the_key_is_there(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    record(settings(OLD), "a", prompt_ids=WORDS)
    record(settings(NEW), "b", prompt_ids=WORDS)
    assert learn(settings(NEW)) == (["b"], ["unknown_key"])
    letters = run(settings(NEW), monkeypatch, capsys, "dead-letters", "list", "--json")
    (letter,) = map(json.loads, letters.splitlines())
    assert letter["error"] == "payload: encrypted with a key that is not among log.encryption_keys"
    assert "first_bytes" in run(settings(NEW), monkeypatch, capsys, "dead-letters", "show", "0", "0")
    told = run(settings(NEW, OLD), monkeypatch, capsys, "dead-letters", "redrive", "--reason", "unknown_key")
    assert told.startswith("1 redriven")
    assert learn(settings(NEW, OLD)) == (["a", "b", "a"], [])


def test_letters_are_closed_too_and_their_messages_go_back_readable(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    asked, traces = settings(NEW), settings(NEW).log.traces_topic
    whole = make_record("a", prompt_ids=WORDS)
    broken = Outgoing(b"a", WORDS.tobytes(), codec.headers(whole) | {"quoted": WORDS.tobytes()})
    with closing(assembly.log_writer(asked, traces)) as writer:
        writer.append([broken])
    assert learn(asked) == ([], ["unreadable"])
    assert all(WORDS.tobytes() not in lying for lying in stored(asked, asked.log.dead_letters_topic))
    with closing(assembly.log_reader(asked, asked.log.dead_letters_topic)) as reader:
        (letter,) = dead_letters.read(reader)
    assert letter.message.value == WORDS.tobytes()
    assert dict(letter.original_headers) == dict(broken.headers)
    assert "payload" in letter.error
    locked = run(settings(OLD), monkeypatch, capsys, "dead-letters", "redrive", "--all")
    assert "refused 1: encrypted with a key that is not among log.encryption_keys" in locked
    assert run(asked, monkeypatch, capsys, "dead-letters", "redrive", "--all").startswith("1 redriven")
    with closing(assembly.log_reader(asked, traces)) as reader:
        assert [each.value for each in topic_scan.messages(reader)] == [WORDS.tobytes()] * 2


def test_tail_and_verify_read_what_is_encrypted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = settings(NEW)
    record(asked, "a", "b", prompt_ids=WORDS)
    shown = [json.loads(line) for line in run(asked, monkeypatch, capsys, "tail").splitlines()]
    assert [each["prompt_ids"] for each in shown] == [WORDS.tolist()] * 2
    shown = [json.loads(line) for line in run(settings(OLD), monkeypatch, capsys, "tail").splitlines()]
    assert [each["error"] for each in shown] == [
        "payload: encrypted with a key that is not among log.encryption_keys"
    ] * 2
    assert "no snapshot yet" in run(asked, monkeypatch, capsys, "verify")


def run(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str
) -> str:
    """What `omnidraft traces ...` prints; the keys come as an operator gives them."""
    done = run_cli(("traces", *command), monkeypatch, capsys, environ(settings))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_key_is_one_that_the_settings_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [run_cli(("traces", "new-key"), monkeypatch, capsys).stdout.strip() for _ in range(2)]
    loaded = config.load(None, {}, log={"encryption_keys": keys})
    assert [key.get_secret_value() for key in loaded.log.encryption_keys] == keys
    assert keys[0] != keys[1]


def test_the_control_log_stays_readable_without_a_key(settings: Settings) -> None:
    asked = settings(NEW)
    with closing(assembly.log_writer(asked, asked.log.control_topic)) as writer:
        writer.append([Outgoing(b"k", b"champion")])
    assert stored(asked, asked.log.control_topic) == [b"champion"]
    reader: LogReader = assembly.log_reader(asked, asked.log.control_topic)
    reader.close()
