"""Hostile bytes through the real source over SQLite: each message has one disposition, and nothing raises."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.distill.ingest import dead_letters, topic_scan
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.ports import OTHER_PAIR, REJECT_REASONS, Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from tests.soak import fuzz
from tests.soak.part import SoakPlan
from tests.trace_records import make_record

SOUND = codec.encode(make_record())
HEADERS = codec.headers(make_record())

cut = st.integers(0, len(SOUND)).map(lambda end: SOUND[:end])
longer = st.binary(min_size=1, max_size=40).map(lambda tail: SOUND + tail)
mutated = st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=6).map(
    lambda changes: _with_bytes(SOUND, changes)
)
huge = st.sampled_from([1 << 20, (1 << 20) + 1, 2_000_000]).map(bytes)
values = st.one_of(st.just(SOUND), cut, longer, mutated, st.binary(max_size=200), huge)
odd_headers = st.dictionaries(st.text(max_size=20), st.binary(max_size=600), max_size=20)
known = st.sampled_from([*HEADERS, "schema", "schema_version"])
changed = st.dictionaries(known, st.one_of(st.sampled_from([b"", b"2", b"-1", b"\xff"]), st.binary()), max_size=3)
headers = st.one_of(st.just(HEADERS), changed.map(lambda some: HEADERS | some), odd_headers)
hostile = st.builds(Outgoing, key=st.binary(max_size=600), value=values, headers=headers)


def _with_bytes(value: bytes, changes: list[tuple[int, int]]) -> bytes:
    changed = bytearray(value)
    for at, byte in changes:
        changed[at] = byte
    return bytes(changed)


@given(messages=st.lists(hostile, min_size=1, max_size=12), at_once=st.integers(1, 7))
@settings(max_examples=60)
def test_every_message_is_returned_or_dead_lettered_or_of_another_pair_and_never_two_of_these(messages, at_once):
    with TemporaryDirectory() as folder:
        path = Path(folder, "log.db")
        SqliteWriter(path, "t", partitions=2).append(messages)
        reader, metrics = SqliteReader(path, "t"), CountingMetrics()
        pair = {"target": "target", "drafter": "drafter"}
        source = TraceConsumer(reader, SqliteWriter(path, "dead"), "aligned", metrics, topic="t", **pair)
        places: Counter[tuple[int, int]] = Counter()
        ends = reader.end_offsets()
        for polled in topic_scan.polls_until(lambda: source.poll(at_once, 0), ends, idle_s=0):
            places.update((partition, offset) for partition, offset, _ in polled.records)
            places.update(each[:2] for each in polled.skipped if each[2] == OTHER_PAIR)
        letters = list(dead_letters.read(SqliteReader(path, "dead"), idle_s=0))
    places.update(letter.origin for letter in letters)
    assert places == Counter((partition, offset) for partition, end in ends.items() for offset in range(end))
    assert {letter.reason for letter in letters} <= set(REJECT_REASONS)


def test_the_soaks_hostile_records_meet_every_disposition_once(tmp_path: Path):
    result = fuzz.run(SoakPlan(tmp_path, fuzzed=1_200, seed=3, threads=1))
    assert all(result.assertions.values())
    assert sum(result.figures["fates"].values()) == 1_200
    assert {"returned", *REJECT_REASONS} <= set(result.figures["fates"])
