"""A real broker that wants logins, by passwords, tokens or certificates: the services' own clients work with theirs and
with nothing more, are served while they log in again, and show no secret."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
from omnidraft.bus.kafka_client import connection
from omnidraft.errors import BusError
from omnidraft.ports import LogReader, Message, Outgoing, Pause, WorkerNews
from omnidraft.telemetry.metrics import CountingMetrics
from tests.kafka_logins import KINDS, REAUTH_MS, Cluster, cluster
from tests.tiny_engine import PATIENCE_S

ROLES = ("worker", "distiller", "controller", "operator")
DENIED = "AuthorizationFailed"


@pytest.fixture(scope="module", params=KINDS)
def logins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A broker with the users and rights of the table."""
    with cluster(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture
def fleet(logins: Cluster) -> Mapping[str, config.Settings]:
    """The settings of each service."""
    return {role: logins.settings(f"omnidraft-{role}") for role in ROLES}


NEWS = WorkerNews(address=None, release="1", serves={})


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
    state = assembly.control_log(worker, CountingMetrics(), hears_workers=True).read_whole()
    assert (state.is_paused, state.of(WorkerNews)) == (True, {("w",): NEWS})
    producer = trace_producer(worker, CountingMetrics())
    assert producer is not None
    producer.close(5.0)


def test_traces_flow_while_their_writer_and_reader_log_in_again(
    logins: Cluster, fleet: Mapping[str, config.Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker ends what does not log in again in time; the reader is always at the end of what is being written."""
    topic, times_s, found, sent = topic_of(fleet["worker"], "traces"), 3 * REAUTH_MS / 1000, list[Message](), 0
    if logins.endpoint is not None:
        monkeypatch.setattr(logins.endpoint, "life_s", REAUTH_MS / 1000)
    writer, reader = (assembly.log_writer(fleet["worker"], topic), assembly.log_reader(fleet["distiller"], topic))
    with closing(writer), closing(reader), ThreadPoolExecutor(1) as pool:
        reader.seek(reader.end_offsets())
        begun = logins.endpoint.issued.copy() if logins.endpoint else Counter[str]()
        until = time.monotonic() + times_s
        while time.monotonic() < until:
            writing = pool.submit(writer.append, [Outgoing(b"key", b"%d" % (sent + each), {}) for each in range(10)])
            while not writing.done():
                found += reader.poll(100, 0.0).messages
            writing.result()
            sent += 10
        until = time.monotonic() + PATIENCE_S
        while len(found) < sent and time.monotonic() < until:
            found += reader.poll(100, 0.1).messages
    assert [(message.damage, message.value) for message in found] == [(None, b"%d" % each) for each in range(sent)]
    if logins.endpoint is not None:
        again = logins.endpoint.issued - begun
        assert min(again["omnidraft-worker"], again["omnidraft-distiller"]) > 0


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


def test_a_topic_that_is_gone_is_said_to_be_to_who_may_not_make_it(
    logins: Cluster, fleet: Mapping[str, config.Settings]
) -> None:
    admin, topic = logins.settings("admin"), topic_of(fleet["worker"], "traces")
    with closing(assembly.log_writer(fleet["worker"], topic)) as writer:
        with connection(logins.servers, 5.0, admin.log.kafka) as shared, closing(KafkaAdminClient(**shared)) as client:
            client.delete_topics([topic])
        with pytest.raises(BusError, match=r"the topic is gone, .*: run deploy/kafka/grant\.py"):
            writer.append([Outgoing(b"key", b"value", {})])
        assembly.log_writer(admin, topic).close()
        writer.append([Outgoing(b"key", b"value", {})])
    assert [message.value for message in read(fleet["distiller"], "traces")] == [b"value"]


@pytest.mark.parametrize("wrong", ["password", "broker", "no login", "another's"])
def test_wrong_credentials_get_nowhere_and_are_not_shown(logins: Cluster, wrong: str) -> None:
    """Without CA_FILE the system's authorities are asked, which do not know the broker."""
    has_certificate = logins.kind == "certificates"
    if wrong == "broker" and logins.kind == "passwords":
        pytest.skip("without TLS there is nobody to know")
    nobody = {"CERT_FILE": "", "KEY_FILE": "", "KEY_PASSWORD": ""}
    changed = {
        "password": {"KEY_PASSWORD" if has_certificate else "PASSWORD": "wrong-horse"},
        "broker": {"CA_FILE": ""},
        "no login": {**nobody, "SECURITY": "", "USERNAME": "", "PASSWORD": "", "CA_FILE": "", "TOKEN_URL": ""},
        "another's": nobody if has_certificate else {"USERNAME": "omnidraft-distiller"},
    }[wrong]
    with pytest.raises(BusError) as refused:
        write(logins.settings("omnidraft-operator", **changed), "traces")
    assert "wrong-horse" not in str(refused.value)
    assert logins.secret_of("omnidraft-operator") not in str(refused.value)


def test_no_log_line_shows_a_secret(logins: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    settings, endpoint = logins.settings("omnidraft-operator"), logins.endpoint
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("kafka").setLevel(logging.NOTSET)
        assert logging.getLogger("kafka").isEnabledFor(logging.DEBUG)
        write(settings, "traces")
        assert read(settings, "traces")
    shown = caplog.text + repr(settings) + settings.model_dump_json()
    assert logins.secret_of("omnidraft-operator") not in shown
    assert endpoint is None or endpoint.last_token not in shown


def test_rights_that_the_table_does_not_name_are_taken_away(logins: Cluster) -> None:
    """And what it names may be granted again, for another prefix too; another's rights stay."""
    with connection(logins.servers, 5.0, logins.settings("admin").log.kafka) as shared:
        admin = KafkaAdminClient(**shared)
    everything = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
    surplus = [
        (user, ResourcePattern(kind, name))
        for user in ("worker", "stranger")
        for kind in (ResourceType.TOPIC, ResourceType.GROUP)
        for name in ("omnidraft.snapshots.v1", "eu.west.snapshots.v1", "other", "*")
    ]

    def granted(user: str) -> set[tuple[str, str]]:
        wanted = ACLFilter(f"User:omnidraft-{user}", None, ACLOperation.ANY, ACLPermissionType.ANY, everything)
        return {(each.resource_pattern.resource_name, each.operation.name) for each in admin.describe_acls(wanted)[0]}

    with closing(admin):
        admin.create_acls(
            [
                ACL(f"User:omnidraft-{user}", "*", ACLOperation.ALL, ACLPermissionType.ALLOW, pattern)
                for user, pattern in surplus
            ]
        )
        for prefix in ("omnidraft", "eu.west"):
            logins.grant(prefix)
        assert granted("worker") == {
            (f"{prefix}.{topic}.v1", operation)
            for prefix in ("omnidraft", "eu.west")
            for topic, operation in (("traces", "WRITE"), ("snapshots", "READ"), ("snapshots", "WRITE"))
        }
        assert len(granted("stranger")) == 4
