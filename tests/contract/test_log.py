"""The contract of every log, over memory, SQLite (encrypted too) and a real Kafka broker."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import pytest

from omnidraft.bus.encryption import EncryptedReader, EncryptedWriter, new_key
from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.errors import OffsetOutOfRange
from omnidraft.ports import LogReader, LogWriter, Message, Outgoing
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter

PARTITIONS = 3
PATIENCE_S = 15.0


@dataclass
class Log:
    """Opens ends of fresh topics of one implementation, and closes them after the test."""

    name: str
    open_writer: Callable[[str, int], LogWriter]
    open_reader: Callable[[str, int], LogReader]
    ends: ExitStack = field(default_factory=ExitStack)
    topic: str = field(default_factory=lambda: f"topic-{uuid.uuid4().hex}")

    def writer(self, partitions: int = 1) -> LogWriter:
        return self.ends.enter_context(closing(self.open_writer(self.topic, partitions)))

    def reader(self, partitions: int = 1) -> LogReader:
        return self.ends.enter_context(closing(self.open_reader(self.topic, partitions)))


def memory_log(partitions: int) -> Log:
    shared = MemoryLog(partitions)
    return Log("memory", lambda topic, _: MemoryWriter(shared, topic), lambda topic, _: MemoryReader(shared, topic))


def sqlite_log(path) -> Log:
    return Log(
        "sqlite",
        lambda topic, partitions: SqliteWriter(path, topic, partitions=partitions),
        lambda topic, partitions: SqliteReader(path, topic, partitions=partitions),
    )


def encrypted_log(path) -> Log:
    keys = (new_key(),)
    plain = sqlite_log(path)
    return Log(
        "encrypted",
        lambda topic, partitions: EncryptedWriter(plain.open_writer(topic, partitions), keys, sealed_prefixes=("a",)),
        lambda topic, partitions: EncryptedReader(plain.open_reader(topic, partitions), keys),
    )


def kafka_log(servers: str) -> Log:
    from omnidraft.bus.kafka_log import KafkaReader, KafkaWriter

    return Log(
        "kafka",
        lambda topic, partitions: KafkaWriter(servers, topic, partitions=partitions),
        lambda topic, partitions: KafkaReader(servers, topic, partitions=partitions),
    )


@pytest.fixture(params=["memory", "sqlite", "encrypted", pytest.param("kafka", marks=pytest.mark.kafka)])
def make_log(request, tmp_path) -> Iterator[Callable[[int], Log]]:
    """A function from a number of partitions to a log."""
    made: list[Log] = []

    def make(partitions: int = 1) -> Log:
        match request.param:
            case "memory":
                log = memory_log(partitions)
            case "sqlite":
                log = sqlite_log(tmp_path / "deep" / "log.db")
            case "encrypted":
                log = encrypted_log(tmp_path / "log.db")
            case _:
                log = kafka_log(request.getfixturevalue("kafka_bootstrap"))
        made.append(log)
        return log

    yield make
    for log in made:
        log.ends.close()


def message(value: str, key: str = "k") -> Outgoing:
    return Outgoing(key.encode(), value.encode())


def read(reader: LogReader, number: int, at_once: int = 100) -> list[Message]:
    """Exactly `number` messages, in however many polls."""
    found: list[Message] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < number and time.monotonic() < deadline:
        found += reader.poll(min(at_once, number - len(found)), timeout_s=1.0).messages
    assert len(found) == number
    return found


def values(messages: Sequence[Message]) -> list[str]:
    return [message.value.decode() for message in messages]


def test_messages_of_a_key_come_in_the_order_of_their_writing(make_log):
    log = make_log(PARTITIONS)
    writer, reader = log.writer(PARTITIONS), log.reader(PARTITIONS)
    keys = [f"key-{number}" for number in range(8)]
    for turn in range(4):
        writer.append([message(f"{key} {turn}", key) for key in keys])
    found = read(reader, 32)
    for key in keys:
        assert values([m for m in found if m.key == key.encode()]) == [f"{key} {turn}" for turn in range(4)]


def test_a_key_stays_in_one_partition_and_keys_spread(make_log):
    log = make_log(PARTITIONS)
    writer, reader = log.writer(PARTITIONS), log.reader(PARTITIONS)
    assert reader.partitions() == (0, 1, 2)
    writer.append([message("x", f"key-{number % 30}") for number in range(60)])
    places = {(m.key, m.partition) for m in read(reader, 60)}
    assert len(places) == 30
    assert {partition for _, partition in places} == {0, 1, 2}


def test_offsets_of_a_partition_start_at_zero_and_have_no_gaps(make_log):
    log = make_log()
    log.writer().append([message(str(number)) for number in range(10)])
    assert [m.offset for m in read(log.reader(), 10)] == list(range(10))


def test_seek_to_next_offsets_reads_the_record_after(make_log):
    log = make_log()
    writer, reader = log.writer(), log.reader()
    writer.append([message(name) for name in "abc"])
    first = reader.poll(1, timeout_s=PATIENCE_S)
    assert values(first.messages) == ["a"]
    read(reader, 2)
    reader.seek(first.next_offsets)
    assert values(read(reader, 2)) == ["b", "c"]


def test_a_poll_gives_no_more_than_asked_and_leaves_the_rest(make_log):
    log = make_log()
    log.writer().append([message(str(number)) for number in range(7)])
    reader = log.reader()
    polled = reader.poll(2, timeout_s=PATIENCE_S)
    assert 1 <= len(polled.messages) <= 2
    rest = read(reader, 7 - len(polled.messages))
    assert values(polled.messages) + values(rest) == [str(number) for number in range(7)]


def test_partitions_that_are_not_named_start_at_their_first_message(make_log):
    log = make_log(PARTITIONS)
    writer, reader = log.writer(PARTITIONS), log.reader(PARTITIONS)
    writer.append([message(str(number), f"key-{number}") for number in range(30)])
    found = read(reader, 30)
    ends = reader.end_offsets()
    reader.seek({1: ends[1]})
    assert sorted(values(read(reader, 30 - ends[1]))) == sorted(values([m for m in found if m.partition != 1]))


def test_first_and_end_offsets_are_those_of_the_oldest_and_one_past_the_last_message(make_log):
    log = make_log(PARTITIONS)
    writer, reader = log.writer(PARTITIONS), log.reader(PARTITIONS)
    assert reader.end_offsets() == {0: 0, 1: 0, 2: 0}
    writer.append([message("x", f"key-{number}") for number in range(30)])
    assert sum(reader.end_offsets().values()) == 30
    assert reader.first_offsets() == {0: 0, 1: 0, 2: 0}
    last = {m.partition: m.offset for m in read(reader, 30)}
    assert reader.end_offsets() == {partition: offset + 1 for partition, offset in last.items()}


def test_seeking_outside_the_log_is_an_error_and_never_a_silent_reset(make_log):
    log = make_log()
    log.writer().append([message("a")])
    reader = log.reader()
    for offsets in ({0: 2}, {5: 0}):
        with pytest.raises(OffsetOutOfRange, match="outside the log"):
            reader.seek(offsets)
    reader.seek({0: 1})
    assert reader.poll(10, timeout_s=0.2).messages == ()


def test_seeking_back_gives_the_newest_of_every_partition_or_all_there_is(make_log):
    log = make_log(PARTITIONS)
    writer, reader = log.writer(PARTITIONS), log.reader(PARTITIONS)
    reader.seek_back(5)
    assert reader.poll(10, timeout_s=0.2).messages == ()
    writer.append([message(str(number), f"key-{number}") for number in range(30)])
    ends = reader.end_offsets()
    reader.seek_back(2)
    found = sorted((m.partition, m.offset) for m in read(reader, 2 * PARTITIONS))
    assert found == [(partition, end - back) for partition, end in sorted(ends.items()) for back in (2, 1)]
    reader.seek_back(1000)
    assert sorted(values(read(reader, 30))) == sorted(str(number) for number in range(30))


def test_keys_values_and_headers_are_any_bytes(make_log):
    log = make_log()
    every = bytes(range(256))
    log.writer().append([Outgoing(every, every[::-1], {"a": every, "empty": b""}), Outgoing(b"", b"", {})])
    first, second = read(log.reader(), 2)
    assert (first.key, first.value, dict(first.headers)) == (every, every[::-1], {"a": every, "empty": b""})
    assert (second.key, second.value, dict(second.headers)) == (b"", b"", {})


def test_a_message_that_names_its_partition_is_written_there_whatever_its_key(make_log):
    log = make_log(PARTITIONS)
    writer, reader = log.writer(PARTITIONS), log.reader(PARTITIONS)
    writer.append([Outgoing(b"k", b"%d" % number, partition=number % PARTITIONS) for number in range(6)])
    assert reader.end_offsets() == {0: 2, 1: 2, 2: 2}
    assert {(m.partition, int(m.value)) for m in read(reader, 6)} == {(n % PARTITIONS, n) for n in range(6)}


def test_a_message_tells_when_it_was_written(make_log):
    log = make_log()
    log.writer().append([message("a")])
    assert abs(read(log.reader(), 1)[0].timestamp_ms / 1000 - time.time()) < 60


def test_two_readers_do_not_disturb_each_other(make_log):
    log = make_log()
    log.writer().append([message(name) for name in "abc"])
    first, second = log.reader(), log.reader()
    assert values(read(first, 3)) == values(read(second, 3)) == ["a", "b", "c"]


def test_topics_do_not_mix(make_log):
    log = make_log()
    log.writer().append([message("a")])
    log.topic += "-other"
    log.writer().append([message("b")])
    assert values(read(log.reader(), 1)) == ["b"]


def test_a_large_message_arrives_whole(make_log):
    log = make_log()
    value = bytes(range(250)) * 3600  # 900 kB
    log.writer().append([Outgoing(b"k", value)])
    assert read(log.reader(), 1)[0].value == value


def test_an_empty_poll_takes_its_time_and_moves_nothing(make_log):
    reader = make_log().reader()
    started_s = time.monotonic()
    polled = reader.poll(10, timeout_s=0.3)
    assert 0.2 < time.monotonic() - started_s < 5
    assert (polled.messages, dict(polled.next_offsets)) == ((), {})


def test_messages_written_after_a_poll_are_found_by_the_next(make_log):
    log = make_log()
    writer, reader = log.writer(), log.reader()
    for name in "abc":
        writer.append([message(name)])
        assert values(read(reader, 1)) == [name]


def test_closing_both_ends_and_opening_them_again_loses_nothing(make_log):
    log = make_log(PARTITIONS)
    if log.name == "memory":
        pytest.skip("the memory log promises to forget")
    writer = log.open_writer(log.topic, PARTITIONS)
    writer.append([message("a"), message("b")])
    writer.close()
    log.writer(1).append([message("c")])  # an existing topic keeps its partitions
    reader = log.reader(1)
    assert len(reader.partitions()) == PARTITIONS
    assert values(read(reader, 3)) == ["a", "b", "c"]


def test_a_topic_has_one_identity_for_all_who_ask_and_another_has_another(make_log):
    log = make_log()
    log.writer().append([message("a")])
    identity = log.reader().identity()
    assert identity == log.reader().identity() != ""
    log.topic += "-other"
    log.writer()
    assert log.reader().identity() != identity
