"""A broker that dies and comes back, a topic that takes less than a record may have, and how long an append takes."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka.errors import KafkaTimeoutError

from omnidraft.bus.kafka_log import KafkaReader, KafkaWriter
from omnidraft.config import RecorderSettings
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.errors import BusError, OffsetOutOfRange
from omnidraft.ports import Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from tests.kafka_fixture import load_local_broker, skip_without_kafka
from tests.trace_records import make_record

pytestmark = pytest.mark.kafka


def append_until_acknowledged(writer, value: bytes) -> None:
    deadline = time.monotonic() + 40
    while True:
        try:
            writer.append([Outgoing(b"k", value)])
            return
        except BusError:
            if time.monotonic() > deadline:
                raise


def read_until(reader, number: int) -> list[bytes]:
    """At least `number` values, through any outage."""
    found: list[bytes] = []
    deadline = time.monotonic() + 40
    while len(found) < number and time.monotonic() < deadline:
        try:
            found += [message.value for message in reader.poll(10, timeout_s=0.5).messages]
        except BusError:
            continue
    return found


def poll_ten_times(reader) -> None:
    for _ in range(10):
        reader.poll(10, timeout_s=0.5)


def test_both_ends_go_on_after_the_broker_was_killed_and_started_again(tmp_path):
    local_broker = load_local_broker()
    tmp_path.chmod(0o755)
    try:
        broker = local_broker.start(0, tmp_path)
    except local_broker.BrokerError as exc:
        skip_without_kafka(f"no Kafka broker: {exc}")
    try:
        KafkaWriter(broker.bootstrap, "t").close()  # a broker that has just started may take longer than 2 s
        writer = KafkaWriter(broker.bootstrap, "t", request_timeout_s=2)
        reader = KafkaReader(broker.bootstrap, "t", request_timeout_s=2)
        append_until_acknowledged(writer, b"before")
        assert set(read_until(reader, 1)) == {b"before"}
        assert not tmp_path.stat().st_mode & 0o077
        assert [path for path in (tmp_path / "logs").rglob("*") if path.stat().st_mode & 0o077] == []  # users' words
        broker.stop()
        with pytest.raises(BusError, match=broker.bootstrap):
            writer.append([Outgoing(b"k", b"lost")])
        with pytest.raises(BusError, match=broker.bootstrap):
            poll_ten_times(reader)
        broker = local_broker.start(broker.port, tmp_path)
        append_until_acknowledged(writer, b"after")
        assert read_until(reader, 1)[-1] == b"after"
        reader.seek({})
        assert read_until(reader, 2)[0] == b"before"
        writer.close()
        reader.close()
    finally:
        broker.kill()


@pytest.fixture
def deleted(kafka_bootstrap: str) -> Iterator[tuple[KafkaWriter, KafkaReader]]:
    """A writer and a reader, who read two messages, of a topic that was deleted then."""
    topic = f"t-{uuid.uuid4().hex}"
    with (
        closing(KafkaWriter(kafka_bootstrap, topic, request_timeout_s=2)) as writer,
        closing(KafkaReader(kafka_bootstrap, topic, request_timeout_s=2)) as reader,
        closing(KafkaAdminClient(bootstrap_servers=kafka_bootstrap)) as admin,
    ):
        writer.append([Outgoing(b"k", b"before"), Outgoing(b"k", b"before")])
        assert read_until(reader, 2) == [b"before", b"before"]
        admin.delete_topics([topic])
        yield writer, reader


def test_a_topic_that_was_deleted_is_made_again_and_not_read_on_from_where_the_old_one_was(
    deleted: tuple[KafkaWriter, KafkaReader],
) -> None:
    writer, reader = deleted
    assert reader.poll(10, timeout_s=0.5).messages == ()
    with pytest.raises(BusError, match="the topic was deleted; it is made again"):
        writer.append([Outgoing(b"k", b"lost")])
    writer.append([Outgoing(b"k", b"after %d" % number) for number in range(4)])
    for _ in range(3):
        with pytest.raises(OffsetOutOfRange):
            poll_ten_times(reader)
    reader.seek({})
    assert read_until(reader, 4) == [b"after 0", b"after 1", b"after 2", b"after 3"]


@pytest.mark.parametrize("ask", [poll_ten_times, KafkaReader.identity, KafkaReader.end_offsets])
def test_a_reader_makes_a_topic_again_that_nobody_writes_to(
    deleted: tuple[KafkaWriter, KafkaReader], ask: Callable[[KafkaReader], object]
) -> None:
    with pytest.raises(BusError, match="the topic was deleted; it is made again"):
        ask(deleted[1])
    assert deleted[1].end_offsets() == {0: 0}


def test_a_reader_that_cannot_be_opened_leaves_no_thread_behind(
    kafka_bootstrap: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader that is away is asked again and again, for as long as it is."""

    def leaderless(*args: object, **options: object) -> None:
        raise KafkaTimeoutError("no leader")

    KafkaWriter(kafka_bootstrap, topic := f"t-{uuid.uuid4().hex}").close()
    before = threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(KafkaConsumer, "beginning_offsets", leaderless)
        for _ in range(3):
            with pytest.raises(BusError, match="no leader"):
                KafkaReader(kafka_bootstrap, topic)
    assert threading.active_count() <= before
    KafkaReader(kafka_bootstrap, topic).close()


LINGER_MS = 3_000


def test_an_append_does_not_linger_for_messages_that_nobody_can_send_meanwhile(
    kafka_bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch waits so long to be filled; an append has given all it has, so it is sent at once."""
    monkeypatch.setattr("omnidraft.bus.kafka_log.LINGER_MS", LINGER_MS)
    topic = f"latency-{uuid.uuid4().hex[:8]}"
    writer = KafkaWriter(kafka_bootstrap, topic)
    writer.append([Outgoing(b"k", b"first")])
    started = time.monotonic()
    for number in range(3):
        writer.append([Outgoing(b"k", b"%d" % number), Outgoing(b"l", b"more")])
    assert time.monotonic() - started < LINGER_MS / 1000
    reader = KafkaReader(kafka_bootstrap, topic)
    assert reader.end_offsets() == {0: 7}
    writer.close()
    reader.close()


@pytest.fixture
def narrow(kafka_bootstrap: str) -> str:
    """A topic that takes batches of 20,000 bytes."""
    topic = f"narrow-{uuid.uuid4().hex}"
    with closing(KafkaAdminClient(bootstrap_servers=kafka_bootstrap)) as admin:
        configs = {"num_partitions": 1, "configs": {"max.message.bytes": "20000"}}
        admin.create_topics({topic: configs}, wait_for_metadata=True)
    return topic


def test_an_append_that_the_topic_takes_only_in_parts_is_written_once(kafka_bootstrap: str, narrow: str) -> None:
    values = [np.random.default_rng(seed).bytes(15_000) for seed in range(3)]
    with closing(KafkaWriter(kafka_bootstrap, narrow)) as writer:
        writer.append([Outgoing(b"k", value) for value in values])
    with closing(KafkaReader(kafka_bootstrap, narrow)) as reader:
        assert reader.end_offsets() == {0: 3}
        found = [message.value for _ in values for message in reader.poll(1, timeout_s=5.0).messages]
    assert sorted(found) == sorted(values)


def test_a_record_that_the_topic_never_takes_is_dropped_and_the_others_arrive(
    kafka_bootstrap: str, narrow: str
) -> None:
    metrics = CountingMetrics()
    prompt_ids = np.random.default_rng(0).integers(0, 150_000, 50_000, dtype=np.uint32)
    producer = TraceProducer(lambda: KafkaWriter(kafka_bootstrap, narrow), RecorderSettings(), metrics)
    names = [f"r{number:03d}" for number in range(200)]
    for name in names:
        producer.emit(make_record(name))
        if name == "r050":
            producer.emit(make_record("long", prompt_ids=prompt_ids))
    assert producer.close(60.0) == 0
    assert metrics.value("omnidraft_traces_dropped_total", reason="too_large") == 1
    assert metrics.value("omnidraft_traces_acknowledged_total") == len(names)
    arrived = set[str]()
    with closing(KafkaReader(kafka_bootstrap, narrow)) as reader:
        while messages := reader.poll(500, timeout_s=2.0).messages:
            arrived |= {message.key.decode() for message in messages}
    assert sorted(arrived) == names
