"""A real broker with passwords and rights: the services' own clients work with theirs, and with nothing more."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)

from omnidraft import assembly, config
from omnidraft.assembly.recording import trace_producer
from omnidraft.errors import BusError
from omnidraft.ports import LogReader, Message, Outgoing, Pause, WorkerNews
from omnidraft.telemetry.metrics import CountingMetrics
from tests.kafka_fixture import load_local_broker, skip_without_kafka

ROOT = Path(__file__).parents[2]
ROLES = ("worker", "distiller", "controller", "operator")
DENIED = "AuthorizationFailed"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The file that deploy/new_secrets.py writes."""
    file = tmp_path_factory.mktemp("secrets") / "env"
    subprocess.run([sys.executable, ROOT / "deploy/new_secrets.py", file], check=True, timeout=60)
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, secrets: dict[str, str]) -> Iterator[str]:
    """host:port of a broker with the users and rights of the table."""
    local_broker = load_local_broker()
    try:
        broker = local_broker.start_secured(0, tmp_path_factory.mktemp("rights"), secrets)
    except local_broker.BrokerError as exc:
        skip_without_kafka(f"no Kafka broker: {exc}")
    yield broker.bootstrap
    broker.kill()


@pytest.fixture
def fleet(servers: str, secrets: dict[str, str]) -> Mapping[str, config.Settings]:
    """The settings of each service."""
    return {role: settings_of(role, servers, secrets[f"OMNIDRAFT_KAFKA_{role.upper()}_PASSWORD"]) for role in ROLES}


NEWS = WorkerNews(address=None, release="1", serves={})


def settings_of(role: str, servers: str, password: str) -> config.Settings:
    account = {"SECURITY": "sasl_plaintext", "USERNAME": f"omnidraft-{role}", "PASSWORD": password}
    environ = {f"OMNIDRAFT_LOG__KAFKA__{name}": value for name, value in account.items()}
    return config.load(
        None, {**environ, "OMNIDRAFT_LOG__URL": f"kafka://{servers}", "OMNIDRAFT_LOG__REQUEST_TIMEOUT_S": "5"}
    )


def topic_of(settings: config.Settings, name: str) -> str:
    log = settings.log
    return {"traces": log.traces_topic, "dead letters": log.dead_letters_topic, "control": log.control_topic}[name]


def write(settings: config.Settings, name: str, value: bytes = b"value") -> None:
    writer = assembly.log_writer(settings, topic_of(settings, name))
    try:
        writer.append([Outgoing(b"key", value, {})])
    finally:
        writer.close()


def read(settings: config.Settings, name: str) -> list[Message]:
    reader = assembly.log_reader(settings, topic_of(settings, name))
    try:
        return _first_messages(reader)
    finally:
        reader.close()


def _first_messages(reader: LogReader) -> list[Message]:
    reader.seek({})
    found: list[Message] = []
    until = time.monotonic() + 15
    while not found and time.monotonic() < until:
        found += reader.poll(10, 1.0).messages
    return found


def test_each_service_does_its_work_with_its_rights_alone(fleet: Mapping[str, config.Settings]) -> None:
    worker, distiller, controller, operator = (fleet[role] for role in ROLES)
    write(worker, "traces", b"a trace")
    assert b"a trace" in [message.value for message in read(distiller, "traces")]
    assert read(controller, "traces")
    write(distiller, "dead letters", b"a dead letter")
    assert read(operator, "dead letters")
    assembly.control_log(controller, CountingMetrics()).put(("pause",), Pause())
    assembly.control_log(worker, CountingMetrics()).put(("worker", "w"), NEWS)
    for role in (worker, distiller, controller, operator):
        assert read(role, "control")
    assert set(assembly.topics(operator)) == {
        topic_of(operator, name) for name in ("traces", "dead letters", "control")
    }
    assert topic_of(worker, "dead letters") not in assembly.topic_names(worker)
    for role in (worker, distiller, controller):
        assert topic_of(role, "traces") in assembly.topic_names(role)
        with pytest.raises(BusError, match=r"may not read the settings of .*: use that of omnidraft-operator"):
            assembly.topics(role)
    state = assembly.control_log(worker, CountingMetrics()).read_whole()
    assert (state.is_paused, state.of(WorkerNews)) == (True, {("w",): NEWS})
    producer = trace_producer(worker, CountingMetrics())
    assert producer is not None
    producer.close(5.0)


def test_dead_letters_that_a_login_may_not_see_are_unknown_and_not_zero(
    fleet: Mapping[str, config.Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without a registry
    write(fleet["distiller"], "dead letters")
    assert assembly.overview(fleet["worker"]).dead_letters is None
    seen = assembly.overview(fleet["operator"]).dead_letters
    assert seen is not None
    assert seen.number > 0


@pytest.mark.parametrize(
    ("role", "topic"),
    [("worker", "dead letters"), ("distiller", "traces"), ("controller", "traces")],
)
def test_nobody_writes_what_is_not_his_to_write(fleet: Mapping[str, config.Settings], role: str, topic: str) -> None:
    with pytest.raises(BusError, match=DENIED):
        write(fleet[role], topic)


@pytest.mark.parametrize(
    ("role", "topic"), [("worker", "traces"), ("worker", "dead letters"), ("distiller", "dead letters")]
)
def test_nobody_reads_what_is_not_his_to_read(fleet: Mapping[str, config.Settings], role: str, topic: str) -> None:
    write(fleet["operator"], topic)
    with pytest.raises(BusError, match=DENIED):
        read(fleet[role], topic)


def test_a_wrong_password_and_no_password_get_nowhere(servers: str) -> None:
    for settings in (
        settings_of("operator", servers, "wrong"),
        config.load(None, {"OMNIDRAFT_LOG__URL": f"kafka://{servers}", "OMNIDRAFT_LOG__REQUEST_TIMEOUT_S": "3"}),
    ):
        with pytest.raises(BusError):
            write(settings, "traces")


def test_rights_that_the_table_does_not_name_are_taken_away(servers: str, secrets: dict[str, str]) -> None:
    """And what it names may be granted again."""
    password = secrets["OMNIDRAFT_KAFKA_ADMIN_PASSWORD"]
    account = {"SECURITY": "sasl_plaintext", "MECHANISM": "PLAIN", "USERNAME": "admin", "PASSWORD": password}
    environ = {f"OMNIDRAFT_LOG__KAFKA__{name}": value for name, value in account.items()}
    environ["OMNIDRAFT_LOG__URL"] = f"kafka://{servers}"
    admin = KafkaAdminClient(
        bootstrap_servers=servers,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_plain_username="admin",
        sasl_plain_password=password,
    )
    control = ResourcePattern(ResourceType.TOPIC, "omnidraft.snapshots.v1")
    admin.create_acls([ACL("User:omnidraft-worker", "*", ACLOperation.ALL, ACLPermissionType.ALLOW, control)])
    command = [sys.executable, ROOT / "deploy/kafka/grant.py"]
    subprocess.run(command, env={**os.environ, **secrets, **environ}, check=True, timeout=60)
    everything = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
    wanted = ACLFilter("User:omnidraft-worker", None, ACLOperation.ANY, ACLPermissionType.ANY, everything)
    found, _ = admin.describe_acls(wanted)
    admin.close()
    granted = {(each.resource_pattern.resource_name, each.operation.name) for each in found}
    control = {("omnidraft.snapshots.v1", operation) for operation in ("READ", "WRITE")}
    assert granted == {("omnidraft.traces.v1", "WRITE")} | control
