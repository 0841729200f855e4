"""Whatever bytes a topic holds, its readers reach its end, and every offset is a message, damage or a marker.

A real broker judges what is sent, and serves its own damaged files.
"""

import hashlib
import json
import struct
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from omnidraft.bus import kafka_client, kafka_log
from omnidraft.bus.kafka_log import KafkaReader, KafkaWriter
from omnidraft.distill.ingest import dead_letters, topic_scan
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.fleet.control_log import ControlLog
from omnidraft.ports import Champion, Pause
from omnidraft.telemetry.metrics import CountingMetrics
from tests import hostile_batches
from tests.kafka_fixture import load_local_broker, skip_without_kafka
from tests.raw_batches import Batch, RawProducer, batch, record

pytestmark = pytest.mark.kafka

MOST_MIB = 512
TOGETHER = 50
ROOT = Path(__file__).parents[2]


@pytest.fixture
def topic() -> str:
    return f"attack-{uuid.uuid4().hex}"


def make_topic(servers: str, name: str) -> None:
    KafkaWriter(servers, name).close()


def send(servers: str, topic: str, batches: Iterator[hostile_batches.Hostile]) -> tuple[Counter, Counter, dict]:
    """Refusals by error, what was taken by kind, and the digest of every value that has to be read, by offset."""
    refused, taken, expected = Counter[int](), Counter[str](), dict[str, str]()
    all_batches = list(batches)
    for start in range(0, len(all_batches), TOGETHER):
        together = all_batches[start : start + TOGETHER]
        with RawProducer(servers, topic) as producer:
            for each, (error, base) in zip(together, producer.produce_all([b.sent for b in together]), strict=True):
                if error:
                    refused[error] += 1
                    continue
                taken[each.kind] += 1
                for index, value in enumerate(each.values):
                    expected[str(base + index)] = hashlib.blake2b(value, digest_size=8).hexdigest()
    return refused, taken, expected


def transactions(servers: str, topic: str) -> int:
    """One that is committed and one that is not, each of two records and a marker; returns the offsets they take."""
    from kafka import KafkaProducer

    with closing(KafkaProducer(bootstrap_servers=servers, transactional_id=topic)) as producer:
        producer.init_transactions()
        for end in (producer.commit_transaction, producer.abort_transaction):
            producer.begin_transaction()
            for value in (b"a", b"b"):
                producer.send(topic, value)
            producer.flush()
            end()
    return 2


def fuzz(servers: str, topic: str, num: int, bomb_every: int) -> dict:
    """Figures; everything that must hold is checked here."""
    make_topic(servers, topic)
    refused, taken, expected = send(servers, topic, hostile_batches.batches(num, seed=num, bomb_every=bomb_every))
    num_markers = transactions(servers, topic)
    command = [sys.executable, "-m", "tests.attack.topic_reader", servers, topic]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["reached"] == told["ends"]
    assert sum(told["fates"].values()) + num_markers == told["ends"]["0"]
    assert {offset: told["digests"].get(offset) for offset in expected} == expected
    assert told["peak_mib"] < MOST_MIB
    figures = {name: told[name] for name in ("seconds", "before_mib", "peak_mib", "fates", "ends")}
    return figures | {"refused": dict(refused), "taken": dict(taken), "sound": len(expected)}


def test_raw_batches_of_every_kind_end_as_messages_or_damage(kafka_bootstrap, topic):
    """Sound records are read as they were sent, wherever they stand between the others."""
    told = fuzz(kafka_bootstrap, topic, 160, bomb_every=80)
    print(told)
    assert {"sound", "bomb", "header names", "offsets in disorder"} <= set(told["taken"])
    assert {"read", "malformed_batch"} <= set(told["fates"])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_thousand_raw_batches_end_as_messages_or_damage(kafka_bootstrap, topic):
    told = fuzz(kafka_bootstrap, topic, 20_000, bomb_every=500)
    print(told)
    assert sum(told["taken"].values()) + sum(told["refused"].values()) == 20_000


def test_a_batch_that_cannot_be_unpacked_is_one_dead_letter_of_all_its_offsets(kafka_bootstrap, topic):
    make_topic(kafka_bootstrap, topic)
    plain = b"".join(record(index, bytes(10 << 20)) for index in range(4))
    with RawProducer(kafka_bootstrap, topic) as producer:
        assert producer.produce(Batch(hostile_batches.PACKERS[4](plain), 4, attributes=4).encode()) == (0, 0)
    letters, metrics = KafkaWriter(kafka_bootstrap, f"{topic}-dead"), CountingMetrics()
    with closing(KafkaReader(kafka_bootstrap, topic)) as reader, closing(letters):
        source = TraceConsumer(reader, letters, "aligned", metrics, topic=topic)
        (polled,) = topic_scan.polls_until(lambda: source.poll(100, 1.0), reader.end_offsets())
    assert polled.skipped == ((0, 3, "malformed_batch", 4),)
    assert metrics.value("omnidraft_traces_skipped_total", reason="malformed_batch") == 4
    with closing(KafkaReader(kafka_bootstrap, f"{topic}-dead")) as reader:
        (letter,) = dead_letters.read(reader)
    assert (letter.origin, letter.num_messages) == ((0, 0), 4)
    assert letter.cut == "the value is damaged bytes of the log, not a message"


def control_at(servers: str, topic: str, metrics: CountingMetrics) -> ControlLog:
    opened = [partial(kind, servers, topic, is_compacted=True) for kind in (KafkaReader, KafkaWriter)]
    return ControlLog(*opened, metrics, target="big", drafter="small")


def test_a_control_topic_with_a_broken_record_still_tells_what_serves(kafka_bootstrap, topic):
    metrics = CountingMetrics()
    with closing(control_at(kafka_bootstrap, topic, CountingMetrics())) as control:
        control.put(("champion",), Champion(version=1))
        with RawProducer(kafka_bootstrap, topic) as producer:
            producer.produce(batch([record(0, b"{}", b"pause/big/small", [(b"\xff", b"")])]))
        control.put(("champion",), Champion(version=2))
    with closing(control_at(kafka_bootstrap, topic, metrics)) as follower:
        assert follower.read_whole(5.0).champion == Champion(version=2)
    assert metrics.value("omnidraft_control_messages_refused_total") == 1


def add_partitions(servers: str, topic: str, num: int) -> None:
    from kafka import KafkaAdminClient

    with closing(KafkaAdminClient(bootstrap_servers=servers)) as admin:
        admin.create_partitions({topic: num})


def polled_until(reader, num: int) -> list[bytes]:
    found: list[bytes] = []
    deadline = time.monotonic() + 20
    while len(found) < num and time.monotonic() < deadline:
        found += [message.value for message in reader.poll(100, 0.3).messages]
    return found


def test_partitions_that_are_added_are_read_from_their_first_message(kafka_bootstrap, topic, monkeypatch):
    monkeypatch.setattr(kafka_log, "METADATA_MAX_AGE_S", 1)
    make_topic(kafka_bootstrap, topic)
    with closing(KafkaReader(kafka_bootstrap, topic)) as reader:
        with RawProducer(kafka_bootstrap, topic) as producer:
            producer.produce(batch([record(0, b"old")]))
            assert polled_until(reader, 1) == [b"old"]
            add_partitions(kafka_bootstrap, topic, 3)
            until_taken(producer, batch([record(0, b"added")]), partition=2)
            producer.produce(batch([record(0, b"old too")]))
        assert sorted(polled_until(reader, 2)) == [b"added", b"old too"]
        assert reader.partitions() == (0, 1, 2)
        assert reader.end_offsets() == {0: 2, 1: 0, 2: 1}


def until_taken(producer: RawProducer, sent: bytes, partition: int) -> None:
    """A partition that was just made has no leader for a moment."""
    deadline = time.monotonic() + 10
    while producer.produce(sent, partition)[0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_values_count_in_whatever_partition_they_are(kafka_bootstrap, topic, monkeypatch):
    monkeypatch.setattr(kafka_log, "METADATA_MAX_AGE_S", 1)
    wire = {"key": "champion/big/small", "sequence": 10**15, "at_ms": 1, "value": {"version": 2}}
    with (
        closing(control_at(kafka_bootstrap, topic, CountingMetrics())) as control,
        closing(control_at(kafka_bootstrap, topic, CountingMetrics())) as follower,
    ):
        control.put(("champion",), Champion(version=1))
        assert follower.poll(5.0)[0].champion == Champion(version=1)
        add_partitions(kafka_bootstrap, topic, 5)
        late = record(0, json.dumps(wire).encode(), wire["key"].encode())
        with RawProducer(kafka_bootstrap, topic) as producer:
            until_taken(producer, batch([late]), partition=4)
        assert is_told(follower, 2)
        assert is_told(control, 2)
        control.put(("champion",), Champion(version=3))
        assert is_told(follower, 3)


def is_told(follower: ControlLog, version: int) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if follower.poll(0.3)[0].champion == Champion(version=version):
            return True
    return False


def test_a_compacted_topic_is_read_over_the_gaps_that_compaction_leaves(kafka_bootstrap, topic, monkeypatch):
    """The broker compacts closed segments, here at once."""
    monkeypatch.setattr(kafka_client, "COMPACTION_LAG_S", 0.1)
    with closing(control_at(kafka_bootstrap, topic, CountingMetrics())) as control:
        control.put(("pause",), Pause())
        for version in range(1, 30):
            control.put(("champion",), Champion(version=version))
        deadline = time.monotonic() + 90
        while num_messages(kafka_bootstrap, topic) > 20 and time.monotonic() < deadline:
            time.sleep(1)
            control.put(("champion",), Champion(version=30))  # closes a segment
        assert num_messages(kafka_bootstrap, topic) <= 20
        metrics = CountingMetrics()
        with closing(control_at(kafka_bootstrap, topic, metrics)) as follower:
            state = follower.read_whole(5.0)
    assert (state.is_paused, state.champion) == (True, Champion(version=30))
    assert metrics.value("omnidraft_control_messages_refused_total") == 0


def num_messages(servers: str, topic: str) -> int:
    with closing(KafkaReader(servers, topic)) as reader:
        polls = topic_scan.polls_until(lambda: reader.poll(100, 1.0), reader.end_offsets())
        return sum(message.damage is None for polled in polls for message in polled.messages)


def put(segment: Path, number: int, at: int, layout: str, value: int) -> None:
    """Write over a field of so many-th batch of a stopped broker's segment."""
    held, start = bytearray(segment.read_bytes()), 0
    for _ in range(number):
        start += 12 + struct.unpack_from(">i", held, start + 8)[0]
    struct.pack_into(layout, held, start + at, value)
    segment.write_bytes(held)


NUM_BATCHES, PER_BATCH, BAD = 60, 3, 20
AT_ONCE = {
    "checksum": (17, ">I", 1),
    "base_offset_low": (0, ">q", 3),
    "base_offset_high": (0, ">q", BAD * PER_BATCH + 5),
    "base_offset_far": (0, ">q", 1 << 50),
    "leader_epoch": (12, ">i", 77),
    "format": (16, ">b", 1),
    "last_offset": (23, ">i", 40),
    "num_records": (57, ">i", 1 << 30),
    "length_small": (8, ">i", 60),
    "length_negative": (8, ">i", -7),
}
SLOWLY = {"length_large": (8, ">i", 5_000_000)}
"""The broker gives nothing, and says nothing."""


def corrupted(folder: Path, faults: dict[str, tuple[int, str, int]]) -> dict[str, tuple[list[int], Counter[str]]]:
    """What is read of a topic for each fault: offsets of sound messages, and of damage by reason."""
    local_broker = load_local_broker()
    try:
        broker = local_broker.start(0, folder)
    except local_broker.BrokerError as exc:
        skip_without_kafka(f"no Kafka broker: {exc}")
    for name in faults:
        make_topic(broker.bootstrap, name)
        with RawProducer(broker.bootstrap, name) as producer:
            sound = batch([record(index, bytes(300)) for index in range(PER_BATCH)])
            producer.produce_all([sound] * NUM_BATCHES)
    broker.stop()
    for name, fault in faults.items():
        (segment,) = (folder / "logs" / f"{name}-0").glob("*.log")
        put(segment, BAD, *fault)
    broker = local_broker.start(broker.port, folder)
    try:
        return {name: read_all(broker.bootstrap, name) for name in faults}
    finally:
        broker.kill()


def read_all(servers: str, topic: str) -> tuple[list[int], Counter[str]]:
    offsets, lost = list[int](), Counter[str]()
    with closing(KafkaReader(servers, topic, request_timeout_s=3)) as reader:
        for polled in topic_scan.polls_until(lambda: reader.poll(50, 1.0), reader.end_offsets(), idle_s=60):
            for message in polled.messages:
                if message.damage is None:
                    offsets.append(message.offset)
                else:
                    lost[message.damage.reason] += message.damage.num_messages
    return offsets, lost


def require_all_accounted(found: dict[str, tuple[list[int], Counter[str]]]) -> None:
    """Nothing twice, nothing missing, and damage does not go beyond what an entry of the broker's index spans."""
    for name, (offsets, lost) in found.items():
        assert offsets == sorted(set(offsets)), name
        assert len(offsets) + lost.total() == NUM_BATCHES * PER_BATCH, (name, lost)
        assert lost.total() <= 20, (name, lost)


def test_segments_with_a_corrupt_batch_are_read_to_their_end(tmp_path):
    found = corrupted(tmp_path, AT_ONCE)
    require_all_accounted(found)
    lost = {name: dict(each) for name, (_, each) in found.items()}
    assert lost["leader_epoch"] == {}
    assert lost["checksum"] == lost["last_offset"] == lost["base_offset_high"] == {"corrupt_batch": PER_BATCH}
    assert lost["base_offset_low"] == {"missing": PER_BATCH}


@pytest.mark.long
def test_a_broker_that_gives_nothing_for_damaged_offsets_is_passed(tmp_path):
    require_all_accounted(corrupted(tmp_path, SLOWLY))
