"""The topics keep messages as long as the settings say, on SQLite and on a real broker, and the doctor checks topics of
others."""

import json
import sqlite3
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from omnidraft import assembly, config
from omnidraft.doctor import log as checkup
from omnidraft.doctor.finding import Verdict
from omnidraft.errors import BusError, ConfigError
from omnidraft.ports import LogReader, Outgoing
from omnidraft.traces import codec
from tests.cli_runs import run_cli
from tests.trace_records import make_record

HOUR_MS = 3_600_000


@pytest.fixture
def kafka(kafka_bootstrap: str) -> dict[str, Any]:
    """Log settings: a broker, and a topic prefix of its own."""
    return {"url": f"kafka://{kafka_bootstrap}", "topic_prefix": f"retention-{uuid.uuid4().hex}"}


def topics_made(settings: config.Settings) -> tuple[str, ...]:
    log = settings.log
    names = (log.traces_topic, log.dead_letters_topic, log.control_topic)
    for number, name in enumerate(names):  # whoever comes first makes a topic, a reader too
        (assembly.log_reader if number % 2 else assembly.log_writer)(settings, name).close()
    return names


def topic_configs(servers: str, names: tuple[str, ...]) -> Mapping[str, Mapping[str, str]]:
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigFilterType, ConfigResource, ConfigResourceType

    with closing(KafkaAdminClient(bootstrap_servers=servers)) as admin:
        asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        told = admin.describe_configs(asked, config_filter=ConfigFilterType.ALL)["topic"]
    return {name: {key: value["value"] for key, value in told[name].items()} for name in names}


@pytest.mark.kafka
def test_topics_that_we_make_keep_messages_as_long_as_the_settings_say(kafka_bootstrap: str, kafka: dict[str, Any]):
    settings = config.load(None, {}, log=kafka | {"retention_hours": 0.5, "dead_letters_retention_hours": 720})
    made = topic_configs(kafka_bootstrap, names := topics_made(settings))
    assert [made[name]["retention.ms"] for name in names[:2]] == [str(HOUR_MS // 2), str(720 * HOUR_MS)]
    assert [made[name]["segment.ms"] for name in names[:2]] == [str(HOUR_MS // 16), str(90 * HOUR_MS)]
    assert [made[name]["cleanup.policy"] for name in names] == ["delete", "delete", "compact"]
    facts = assembly.topics(settings)
    assert [facts[name].retention_ms for name in names] == [HOUR_MS // 2, 720 * HOUR_MS, None]
    assert [checkup.topic(settings, name).verdict for name in names] == [Verdict.OK] * 3


@pytest.mark.kafka
def test_a_reader_of_a_broker_is_told_that_what_it_reads_next_is_gone(kafka_bootstrap: str, kafka: dict[str, Any]):
    """The broker deletes records as its retention does, without the wait of minutes between its looks."""
    from kafka import KafkaAdminClient, TopicPartition

    settings = config.load(None, {}, log=kafka)
    topic = settings.log.traces_topic
    with (
        closing(assembly.log_writer(settings, topic)) as writer,
        closing(assembly.log_reader(settings, topic)) as reader,
        closing(KafkaAdminClient(bootstrap_servers=kafka_bootstrap)) as admin,
    ):
        writer.append([Outgoing(b"k", b"v") for _ in range(3)])
        reader.seek({0: 0})
        admin.delete_records({TopicPartition(topic, 0): 2})
        with pytest.raises(BusError):
            poll_for(reader, 10.0)
        with pytest.raises(BusError, match="outside the log"):
            reader.seek({0: 1})
        reader.seek_back(3)
        assert [message.offset for message in reader.poll(10, timeout_s=10.0).messages] == [2]


def poll_for(reader: LogReader, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reader.poll(10, timeout_s=0.5)


def test_an_sqlite_log_expires_traces_and_letters_by_their_settings_and_what_holds_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    environ = {
        "OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db",
        "OMNIDRAFT_LOG__RETENTION_HOURS": "1",
        "OMNIDRAFT_LOG__DEAD_LETTERS_RETENTION_HOURS": "100",
    }
    settings = config.load(None, environ)
    names = (settings.log.traces_topic, settings.log.dead_letters_topic, settings.log.control_topic)
    for aged_hours in (50, 0):
        for name in names:
            record = make_record(f"{aged_hours} hours old")
            with closing(assembly.log_writer(settings, name)) as writer:
                writer.append([Outgoing(record.request_id.encode(), codec.encode(record), codec.headers(record))])
        with closing(sqlite3.connect(tmp_path / "log.db")) as connection, connection:
            connection.execute("UPDATE messages SET timestamp_ms = timestamp_ms - ?", (aged_hours * HOUR_MS,))
            connection.execute("UPDATE topics SET held_from_ms = -1000000000")  # and the clock has said so for long
    with closing(sqlite3.connect(tmp_path / "log.db")) as connection:
        held = dict(connection.execute("SELECT topic, COUNT(*) FROM messages GROUP BY topic"))
    assert [held[name] for name in names] == [1, 2, 2]
    assert [checkup.topic(settings, name).verdict for name in names] == [Verdict.OK] * 3
    done = run_cli(("traces", "tail"), monkeypatch, capsys, environ)
    assert [json.loads(line)["request_id"] for line in done.stdout.splitlines()] == ["0 hours old"]


@pytest.mark.parametrize("name", ["retention_hours", "dead_letters_retention_hours"])
@pytest.mark.parametrize("value", ["0", "-1", "for ever"])
def test_a_retention_that_is_none_is_refused_by_name(name: str, value: str):
    with pytest.raises(ConfigError, match=f"log.{name}"):
        config.load(None, {f"OMNIDRAFT_LOG__{name.upper()}": value})
