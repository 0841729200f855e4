"""Which messages of a topic are a tenant's: readable, damaged, without content, or of its keys."""

from dataclasses import replace

import pytest

from omnidraft.distill.ingest.tenant_messages import TenantMatcher, mark
from omnidraft.ports import Message
from omnidraft.traces import codec
from tests.trace_records import make_record

MINE, YOURS = make_record("a", tenant="team-a"), make_record("b", tenant="team-ab")
YOURS_LATER = replace(YOURS, time_ms=YOURS.time_ms + 1)


def message(offset: int, value: bytes, headers: dict[str, bytes], partition: int = 0) -> Message:
    return Message(partition, offset, b"k", value, headers, 1000 + offset)


def of(record, **headers: bytes) -> tuple[bytes, dict[str, bytes]]:
    return codec.encode(record), codec.headers(record) | headers


def dead(record, **headers: bytes) -> tuple[bytes, dict[str, bytes]]:
    original = {f"original.{name}": value for name, value in codec.headers(record).items()}
    return codec.encode(record), {"reason": b"poison", **original, **headers}


@pytest.mark.parametrize(
    ("value", "headers", "is_mine"),
    [
        (*of(MINE), True),
        (*of(YOURS), False),
        (*dead(MINE), True),
        (*dead(YOURS), False),
        (codec.encode(MINE)[:60], {"original.schema": b"omnidraft.trace"}, True),
        (codec.encode(YOURS)[:60], {"original.schema": b"omnidraft.trace"}, False),
        (b"", {"forgotten": b"1", "encryption_key_id": b"id-1"}, True),
        (b"", {"forgotten": b"1", "encryption_key_id": b"id-2"}, False),
        (b"", {"forgotten": mark("team-a")}, True),
        (b"", {"forgotten": mark("team-b")}, False),
        (b"closed", {"encryption": b"fernet", "encryption_key_id": b"id-1"}, True),
        (b"closed", {"encryption": b"fernet"}, False),
        (b"closed", {"original.encryption": b"fernet", "original.encryption_key_id": b"id-1"}, True),
        (b"closed", {"original.encryption": b"fernet", "original.encryption_key_id": b"id-2"}, False),
        (b"..\x0cteam-a..", {"schema": b"omnidraft.trace"}, True),
        (b"..\x0cteam-a..", {"schema": b"omnidraft.trace", "encryption": b"fernet"}, False),
        (b"..\x0cteam-a..", {"original.schema": b"omnidraft.trace", "original.encryption": b"fernet"}, False),
        (b"", {}, False),
    ],
)
def test_a_message_is_the_tenants_or_not(value, headers, is_mine):
    found = TenantMatcher("team-a", ["id-1"]).find([message(0, value, headers)])
    assert bool(found.positions) is is_mine


def test_it_is_told_what_no_key_protects_and_where_the_first_one_is():
    messages = [
        message(0, *of(YOURS_LATER)),
        message(1, *of(MINE, encryption_key_id=b"id-1")),
        message(2, *of(MINE)),
        message(7, *of(MINE, encryption_key_id=b"id-of-nobody"), partition=1),
        message(3, b"", {"forgotten": b"1", "encryption_key_id": b"id-1"}),
        message(4, b"closed", {"original.encryption": b"fernet", "original.encryption_key_id": b"id-1"}),
    ]
    found = TenantMatcher("team-a", ["id-1"]).find(messages)
    assert found.first_offsets == {0: 1, 1: 7}
    assert (found.num_readable, found.num_with_master_key) == (3, 2)


def test_what_no_key_opens_and_may_be_anybodys_is_counted():
    messages = [
        message(0, *of(MINE)),
        message(1, b"closed", {"encryption": b"fernet", "encryption_key_id": b"id-1"}),
        message(2, b"closed", {"encryption": b"fernet", "encryption_key_id": b"id-of-nobody"}),
        message(3, b"closed", {"encryption": b"fernet"}),
        message(4, b"closed", {"original.encryption": b"fernet"}),
        message(5, codec.encode(MINE)[:60], {}),
        message(6, b"closed", {"encryption": b"fernet", "encryption_key_id": b"id-2"}),
        message(7, b"closed", {"original.encryption": b"fernet", "original.encryption_key_id": b"id-2"}),
    ]
    found = TenantMatcher("team-a", ["id-1"], other_key_ids=["id-2"]).find(messages)
    assert found.num_unopened == 3
    assert found.positions == [(0, 0), (0, 1), (0, 5)]


@pytest.mark.parametrize(
    ("value", "headers", "newest_ms"),
    [
        (*of(MINE), MINE.time_ms),
        (*of(MINE, encryption_key_id=b"id-1"), MINE.time_ms),
        (*dead(MINE), MINE.time_ms),
        (*of(replace(MINE, time_ms=5)), 1007),
        (b"", {"forgotten": mark("team-a")}, 1007),
        (codec.encode(MINE)[:60], {}, 1007),
    ],
)
def test_the_newest_is_as_new_as_the_clock_of_its_worker_or_of_the_log_says(value, headers, newest_ms):
    messages = [message(7, value, headers), message(8, *of(YOURS_LATER))]
    assert TenantMatcher("team-a", ["id-1"]).find(messages).newest_ms == newest_ms
