"""The trace consumer returns or dead-letters every message, and no offset runs ahead of that."""

from collections.abc import Sequence

import numpy as np
import pytest

from omnidraft.distill.ingest.trace_consumer import MAX_VALUE_BYTES, TraceConsumer
from omnidraft.errors import BusError, MessageTooLarge
from omnidraft.ports import Message, Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.traces import codec
from tests.trace_records import make_record


def outgoing(request_id: str, **fields) -> Outgoing:
    record = make_record(request_id, **fields)
    return Outgoing(codec.key(record), codec.encode(record), codec.headers(record))


def make_source(
    log: MemoryLog, dead_letters=None, expected: str | None = "aligned", metrics=None, **pair
) -> TraceConsumer:
    dead_letter_topic = dead_letters or MemoryWriter(log, "dead")
    return TraceConsumer(
        MemoryReader(log, "t"), dead_letter_topic, expected, metrics or CountingMetrics(), topic="t", **pair
    )


def dead_letters(log: MemoryLog) -> list[Message]:
    return [message for kept in log.topic("dead") for message in kept]


def read_all(source: TraceConsumer, at_once: int = 5) -> tuple[list[str], dict[int, int]]:
    """Request ids, and where to read on."""
    ids: list[str] = []
    offsets: dict[int, int] = {}
    while (polled := source.poll(at_once, timeout_s=0)).next_offsets:
        ids += [record.request_id for _, _, record in polled.records]
        offsets |= polled.next_offsets
    return ids, offsets


def test_a_broken_message_is_dead_lettered_with_its_origin_and_offsets_move_past_it():
    log, metrics = MemoryLog(), CountingMetrics()
    broken = Outgoing(b"k", b"\xff\x00junk", {"schema": b"omnidraft.trace", "schema_version": b"1"})
    MemoryWriter(log, "t").append([outgoing("a"), broken, outgoing("b")])
    assert read_all(make_source(log, metrics=metrics)) == (["a", "b"], {0: 3})
    (dead_letter,) = dead_letters(log)
    assert (dead_letter.key, dead_letter.value) == (b"k", b"\xff\x00junk")
    assert dead_letter.headers["reason"] == b"unreadable"
    assert b"payload" in dead_letter.headers["error"]
    origin = [dead_letter.headers[f"origin_{name}"] for name in ("topic", "partition", "offset")]
    assert origin == [b"t", b"0", b"1"]
    assert dead_letter.headers["original.schema_version"] == b"1"
    assert metrics.value("omnidraft_traces_skipped_total", reason="unreadable") == 1
    assert metrics.value("omnidraft_traces_read_total") == 2


def test_each_kind_of_dead_letter_has_its_reason():
    log = MemoryLog()
    other_version = outgoing("c")
    other_version = Outgoing(b"c", other_version.value, {**other_version.headers, "schema_version": b"99"})
    MemoryWriter(log, "t").append([outgoing("a", alignment="another"), Outgoing(b"", b""), other_version])
    polled = make_source(log).poll(10, timeout_s=0)
    assert polled.records == ()
    assert polled.skipped == ((0, 0, "other_alignment", 1), (0, 1, "unknown_schema", 1), (0, 2, "unknown_schema", 1))
    assert [m.headers["reason"] for m in dead_letters(log)] == [
        *(b"other_alignment", b"unknown_schema", b"unknown_schema")
    ]


def test_records_of_other_pairs_are_passed_over_and_counted_and_are_no_dead_letters():
    """Two targets of one family share an alignment, so the name decides; and a schema of theirs is their own affair."""
    log, metrics = MemoryLog(), CountingMetrics()
    theirs = outgoing("d", target="huge")
    newer = Outgoing(b"d", theirs.value, {**theirs.headers, "schema_version": b"99"})
    unnamed = Outgoing(b"e", theirs.value, {name: theirs.headers[name] for name in ("schema", "schema_version")})
    MemoryWriter(log, "t").append(
        [
            *(outgoing("a"), outgoing("b", target="huge"), outgoing("c", drafter="other", alignment="x"), newer),
            *(unnamed, outgoing("f", alignment="x")),
        ]
    )
    source = make_source(log, metrics=metrics, target="target", drafter="drafter")
    polls = [source.poll(10, timeout_s=0) for _ in range(3)]
    assert [record.request_id for polled in polls for _, _, record in polled.records] == ["a"]
    skipped = [each for polled in polls for each in polled.skipped]
    assert skipped == [*[(0, offset, "other_pair", 1) for offset in range(1, 5)], (0, 5, "other_alignment", 1)]
    assert dict(polls[1].next_offsets) == {0: 6}
    assert [dead_letter.headers["reason"] for dead_letter in dead_letters(log)] == [b"other_alignment"]
    assert metrics.value("omnidraft_traces_skipped_total", reason="other_pair") == 4


def test_a_message_comes_back_until_its_dead_letter_is_acknowledged():
    class DownOnce(MemoryWriter):
        is_down = True

        def append(self, messages: Sequence[Outgoing]) -> None:
            if self.is_down:
                self.is_down = False
                raise BusError("the dead-letter topic is down")
            super().append(messages)

    log = MemoryLog()
    MemoryWriter(log, "t").append([outgoing("a"), Outgoing(b"k", b"junk")])
    source = make_source(log, DownOnce(log, "dead"))
    with pytest.raises(BusError):
        source.poll(10, timeout_s=0)
    assert read_all(source) == (["a"], {0: 2})
    assert [m.value for m in dead_letters(log)] == [b"junk"]


def test_seeking_forgets_what_a_failed_poll_had_in_hand():
    class Down(MemoryWriter):
        def append(self, messages: Sequence[Outgoing]) -> None:
            raise BusError("down")

    log = MemoryLog()
    MemoryWriter(log, "t").append([Outgoing(b"k", b"junk"), outgoing("a")])
    source = make_source(log, Down(log, "dead"))
    with pytest.raises(BusError):
        source.poll(1, timeout_s=0)
    source.seek({0: 1})
    assert read_all(source) == (["a"], {0: 2})


def test_a_dead_letter_is_cut_to_fit_and_says_so():
    log = MemoryLog()
    headers = {f"header-{number}": bytes(5000) for number in range(100)}
    MemoryWriter(log, "t").append([Outgoing(b"k" * 5000, bytes(MAX_VALUE_BYTES + 9), headers)])
    make_source(log).poll(1, timeout_s=0)
    (dead_letter,) = dead_letters(log)
    assert dead_letter.headers["cut_from_bytes"] == str(MAX_VALUE_BYTES + 9).encode()
    size = (
        len(dead_letter.key)
        + len(dead_letter.value)
        + sum(len(name) + len(value) for name, value in dead_letter.headers.items())
    )
    assert size < 1_000_000


class NarrowWriter(MemoryWriter):
    """Its topic takes messages of up to 100 bytes."""

    def append(self, messages: Sequence[Outgoing]) -> None:
        if any(len(message.value) > 100 for message in messages):
            raise MessageTooLarge("max.message.bytes")
        super().append(messages)


def test_a_dead_letter_that_its_topic_does_not_take_is_cut_until_it_does_and_stops_nobody():
    log = MemoryLog()
    MemoryWriter(log, "t").append([Outgoing(b"k", b"junk"), Outgoing(b"k", bytes(1000)), outgoing("a")])
    assert read_all(make_source(log, NarrowWriter(log, "dead"))) == (["a"], {0: 3})
    short, long = dead_letters(log)
    assert (short.value, long.value) == (b"junk", bytes(62))
    assert "cut_from_bytes" not in short.headers
    assert long.headers["cut_from_bytes"] == b"1000"


def test_a_topic_that_takes_not_even_the_headers_of_a_dead_letter_is_an_error():
    class Closed(MemoryWriter):
        def append(self, messages: Sequence[Outgoing]) -> None:
            raise MessageTooLarge("max.message.bytes")

    log = MemoryLog()
    MemoryWriter(log, "t").append([Outgoing(b"k", b"junk")])
    with pytest.raises(MessageTooLarge):
        make_source(log, Closed(log, "dead")).poll(10, timeout_s=0)


def test_a_poison_record_larger_than_any_that_is_written_is_dead_lettered():
    log = MemoryLog()
    make_source(log).dead_letter([(0, 7, make_record(prompt_ids=np.zeros(255_000, np.uint32)))])
    (dead_letter,) = dead_letters(log)
    assert dead_letter.headers["reason"] == b"poison"
    assert len(dead_letter.value) == MAX_VALUE_BYTES < int(dead_letter.headers["cut_from_bytes"])
