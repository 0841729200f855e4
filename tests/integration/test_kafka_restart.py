"""A broker that dies and comes back: both ends go on, and nothing acknowledged is lost."""

import threading
import time
import uuid

import pytest
from kafka import KafkaConsumer
from kafka.errors import KafkaTimeoutError

from omnidraft.bus.kafka_log import KafkaReader, KafkaWriter
from omnidraft.errors import BusError
from omnidraft.ports import Outgoing
from tests.kafka_fixture import kafka_bootstrap, load_local_broker, skip_without_kafka  # noqa: F401  (a fixture)

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


def test_a_reader_that_cannot_be_opened_leaves_no_thread_behind(
    kafka_bootstrap: str,  # noqa: F811
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
