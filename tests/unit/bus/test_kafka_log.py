"""The errors of the Kafka log without a broker. With one: tests/contract and tests/integration."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from omnidraft.errors import BusError, LogTruncated, MessageTooLarge

kafka_log = pytest.importorskip("omnidraft.bus.kafka_log", reason="the kafka extra is not installed")
kafka_errors = pytest.importorskip("kafka.errors")
TopicPartition = kafka_log.TopicPartition


@pytest.mark.parametrize("end", [kafka_log.KafkaWriter, kafka_log.KafkaReader])
def test_a_broker_that_is_not_there_is_named_quickly(end):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        servers = f"127.0.0.1:{free.getsockname()[1]}"
    started_s = time.monotonic()
    with pytest.raises(BusError, match=servers):
        end(servers, "t", request_timeout_s=0.3)
    assert time.monotonic() - started_s < 2


def test_a_host_that_accepts_and_never_answers_is_named_quickly():
    with socket.socket() as unresponsive:
        unresponsive.bind(("127.0.0.1", 0))
        unresponsive.listen()
        servers = f"127.0.0.1:{unresponsive.getsockname()[1]}"
        started_s = time.monotonic()
        with pytest.raises(BusError, match=servers):
            kafka_log.KafkaWriter(servers, "t", request_timeout_s=0.5)
        assert time.monotonic() - started_s < 5


def test_a_host_name_that_does_not_resolve_is_a_bus_error():
    with pytest.raises(BusError, match=r"no-such-host\.invalid"):
        kafka_log.KafkaWriter("no-such-host.invalid:9092", "t", request_timeout_s=0.3)


def test_trying_again_during_an_outage_leaves_no_threads_behind():
    before = threading.active_count()
    for _ in range(2):
        with pytest.raises(BusError):
            kafka_log.KafkaWriter("127.0.0.1:1", "t", request_timeout_s=0.1)
    assert threading.active_count() <= before


def test_a_producer_that_is_given_up_with_unsent_messages_leaves_no_thread_behind():
    writer = object.__new__(kafka_log.KafkaWriter)
    writer._producer = kafka_log.KafkaProducer(
        bootstrap_servers="127.0.0.1:1", api_version=(2, 6), metrics_enabled=False
    )
    writer._producer._accumulator.append(TopicPartition("traces", 0), None, b"k", b"v", [])
    sender = writer._producer._sender
    assert sender.is_alive()
    writer._abandon()
    assert writer._producer is None
    assert not sender.is_alive()


@pytest.mark.parametrize("name", ["MessageSizeTooLargeError", "RecordListTooLargeError"])
def test_a_message_that_the_topic_never_takes_is_no_outage(name):
    with (
        pytest.raises(MessageTooLarge, match=r"appending to traces: .*max\.message\.bytes"),
        kafka_log.translate_errors("appending to traces", "host:9092"),
    ):
        raise getattr(kafka_errors, name)("larger than the topic takes")


def test_a_partition_without_a_leader_is_an_outage():
    """The client leaves it out of its answer, and dies of that."""
    reader = object.__new__(kafka_log.KafkaReader)
    reader._topic, reader._servers, reader._timeout_s = "traces", "host:9092", 10.0
    reader._ensure = lambda timeout_s: False

    def ask(partitions):
        return {each: 7 for each in partitions if each.partition != 1}[TopicPartition("traces", 1)]

    with pytest.raises(BusError, match="has no leader, or is gone"):
        reader._offsets("end", ask, (0, 1))
    assert reader._offsets("end", lambda partitions: dict.fromkeys(partitions, 7), (0, 1)) == {0: 7, 1: 7}


class Truncated:
    """A client of a partition that lost its newest messages, as after an unclean election of a leader."""

    _cluster = SimpleNamespace(topic_id=lambda topic: "the same", partitions_for_topic=lambda topic: {0})

    def poll(self, timeout_ms: int, max_records: int) -> None:
        raise kafka_errors.LogTruncationError({})


def test_a_partition_that_lost_messages_that_were_read_is_no_outage():
    reader = object.__new__(kafka_log.KafkaReader)
    reader._topic, reader._servers, reader._consumer = "traces", "host:9092", Truncated()
    reader._partitions, reader._timeout_s, reader._checked_s = {0: TopicPartition("traces", 0)}, 10.0, time.monotonic()
    reader._topic_id = "the same"
    with pytest.raises(LogTruncated, match="polling traces: LogTruncationError"):
        reader.poll(1, 0.1)
