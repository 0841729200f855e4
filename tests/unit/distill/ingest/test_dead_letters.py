"""Redriving appends the message as it was, once, and never a part of one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from omnidraft.bus.encryption import EncryptedReader, EncryptedWriter, new_key
from omnidraft.bus.key_store import KeyStore
from omnidraft.bus.tenant_keys import TenantKeys
from omnidraft.distill.ingest import dead_letters
from omnidraft.distill.ingest.dead_letters import (
    BATCH_MESSAGES,
    REDRIVEN_FROM,
    Choice,
    Redrive,
    Redriven,
    redriven_before,
)
from omnidraft.distill.ingest.trace_consumer import MAX_HEADER_BYTES, MAX_HEADERS, MAX_VALUE_BYTES, TraceConsumer
from omnidraft.errors import BusError
from omnidraft.ports import Message, Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.traces import codec
from tests.trace_records import make_record

EVERYTHING = Choice(everything=True)
MASTER = new_key()


def outgoing(request_id: str, **headers: bytes) -> Outgoing:
    record = make_record(request_id)
    return Outgoing(codec.key(record), codec.encode(record), codec.headers(record) | headers)


def lettered(*messages: Outgoing, partitions: int = 1) -> MemoryLog:
    """A log whose source has read these messages."""
    log = MemoryLog(partitions)
    MemoryWriter(log, "t").append(messages)
    read(log)
    return log


def read(log: MemoryLog) -> list[str]:
    """Request ids that a fresh source returns of all of the topic; the rest becomes dead letters."""
    writer, metrics = MemoryWriter(log, "dead"), CountingMetrics()
    source = TraceConsumer(MemoryReader(log, "t"), writer, "aligned", metrics, topic="t")
    ids = []
    while (polled := source.poll(5, timeout_s=0)).next_offsets:
        ids += [record.request_id for _, _, record in polled.records]
    return ids


def redrive(log: MemoryLog, choice: Choice = EVERYTHING, *, again: bool = False, writer=None) -> Redriven:
    done = frozenset() if again else redriven_before(MemoryReader(log, "t"))
    driving = Redrive(writer or MemoryWriter(log, "t"), topic="t", dead_letters_topic="dead")
    return driving.run(dead_letters.read(MemoryReader(log, "dead")), choice, done)


def topic(log: MemoryLog, name: str = "t") -> list[Message]:
    return [message for kept in log.topic(name) for message in kept]


def test_a_letter_goes_back_as_it_was_and_says_where_it_comes_from():
    broken = outgoing("a", schema_version=b"99")
    log = lettered(broken)
    assert redrive(log).num_redriven == 1
    first, second = topic(log)
    assert (second.key, second.value) == (first.key, first.value)
    assert second.headers == {**first.headers, REDRIVEN_FROM: b"dead/0/0"}


def test_poison_that_is_redriven_keeps_its_tenants_key(tmp_path: Path) -> None:
    """A dead letter of poison is the record encoded anew, with the key in its own headers alone."""
    keys, log = TenantKeys(KeyStore(f"sqlite:///{tmp_path}/keys.db"), [MASTER]), MemoryLog()
    letters = EncryptedWriter(MemoryWriter(log, "dead"), [MASTER], tenant_keys=keys)
    source = TraceConsumer(MemoryReader(log, "t"), letters, None, CountingMetrics(), topic="t")
    source.dead_letter([(0, 0, make_record("r", tenant="alice"))])
    reader = EncryptedReader(MemoryReader(log, "dead"), [MASTER], tenant_keys=keys)
    origin = EncryptedWriter(MemoryWriter(log, "t"), [MASTER], tenant_keys=keys)
    driven = Redrive(origin, topic="t", dead_letters_topic="dead").run(
        dead_letters.read(reader), EVERYTHING, frozenset()
    )
    assert driven.num_redriven == 1
    (message,) = topic(log)
    assert message.headers["encryption_key_id"].decode() == keys.current("alice")[0]


def test_what_was_redriven_is_not_redriven_twice_unless_asked():
    log = lettered(outgoing("a", schema=b"x"), outgoing("b", schema=b"x"))
    assert redrive(log, Choice(positions=frozenset({(0, 0)}))).num_redriven == 1
    second = redrive(log)
    assert (second.num_redriven, second.num_done_before) == (1, 1)
    assert redrive(log).num_redriven == 0
    assert redrive(log, again=True).num_redriven == 2


def test_a_redrive_that_died_halfway_goes_on_where_it_stopped():
    class DiesAfterOne(MemoryWriter):
        num_appends = 0

        def append(self, messages: Sequence[Outgoing]) -> None:
            self.num_appends += 1
            if self.num_appends > 1:
                raise BusError("away")
            super().append(messages)

    log = lettered(*(outgoing(f"r{number}", schema=b"x") for number in range(BATCH_MESSAGES + 3)))
    with pytest.raises(BusError):
        redrive(log, writer=DiesAfterOne(log, "t"))
    again = redrive(log)
    assert (again.num_redriven, again.num_done_before) == (3, BATCH_MESSAGES)
    names = [message.headers[REDRIVEN_FROM] for message in topic(log) if REDRIVEN_FROM in message.headers]
    assert sorted(names) == sorted(set(names))
    assert len(names) == BATCH_MESSAGES + 3


def test_letters_that_were_cut_are_refused_and_counted_by_what_is_missing():
    headers = {f"h{number}": b"x" for number in range(MAX_HEADERS + 3)}
    log = lettered(
        Outgoing(b"k", bytes(MAX_VALUE_BYTES + 1)),
        Outgoing(b"k" * (MAX_HEADER_BYTES + 1), b"junk"),
        Outgoing(b"k", b"junk", headers),
        Outgoing(b"k", b"junk", {"h": b"x" * (MAX_HEADER_BYTES + 1)}),
        Outgoing(b"k", b"junk", {"h": b"x" * (MAX_HEADER_BYTES - 1)}),
    )
    result = redrive(log)
    assert result.num_redriven == 1
    assert sorted(result.refused) == [
        "a header is cut at 512 bytes",
        "headers behind the first 16 are missing",
        "the key is cut at 512 bytes",
        "the value has 950000 of 950001 bytes",
    ]
    assert len(topic(log)) == 6


def test_a_letter_of_another_topic_is_refused():
    log = MemoryLog()
    MemoryWriter(log, "dead").append([Outgoing(b"k", b"v", {"reason": b"unreadable", "origin_topic": b"elsewhere"})])
    result = redrive(log)
    assert (result.num_redriven, dict(result.refused)) == (0, {"comes from another topic than t": 1})


@pytest.mark.parametrize("headers", [{}, {"origin_partition": b"-1", "origin_offset": b"\xff"}, {"reason": b"\xff"}])
def test_a_letter_with_any_headers_can_be_looked_at(headers):
    log = MemoryLog()
    MemoryWriter(log, "dead").append([Outgoing(b"", b"", headers)])
    (dead_letter,) = dead_letters.read(MemoryReader(log, "dead"))
    assert dead_letter.origin is None
    assert isinstance(dead_letter.reason + dead_letter.error + dead_letter.origin_topic, str)
