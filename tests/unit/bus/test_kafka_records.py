"""Any bytes of a fetch: nothing raises, and every offset comes out once, in order."""

import random
import struct
from collections import Counter
from dataclasses import replace

import pytest

from omnidraft.bus.kafka_records import FetchedRecords, Marker
from omnidraft.ports import Message
from tests import hostile_batches
from tests.raw_batches import CONTROL, Batch, batch, record

FAR = 1 << 40


def placed(sent: bytes, base_offset: int) -> bytes:
    """Return the batch as a broker stores it; the checksum does not cover the offset."""
    return struct.pack(">q", base_offset) + sent[8:]


def read(data: bytes, start: int = 0, end: int = FAR) -> list[Message | Marker]:
    items = list(FetchedRecords(data, 0, start).items(end))
    position = start
    for item in items:
        assert item.offset == position < item.next_offset
        position = item.next_offset
    return items


def lost(items: list[Message | Marker]) -> list[tuple[int, int, str]]:
    damaged = [each for each in items if isinstance(each, Message) and each.damage]
    return [(each.offset, each.damage.num_messages, each.damage.reason) for each in damaged if each.damage]


def three(value: bytes = b"v") -> bytes:
    return batch([record(index, value) for index in range(3)])


def test_fetches_of_mutated_bytes_never_raise_and_leave_no_offset_out():
    dice = random.Random(0)
    for number, hostile in enumerate(hostile_batches.batches(120, seed=1, bomb_every=FAR)):
        if hostile.kind == "large records":
            continue
        sent = placed(three(), 0) + placed(hostile.sent, 3) + placed(three(), 9)
        for _ in range(4):
            changed = bytearray(sent)
            for _ in range(dice.randrange(4)):
                changed[dice.randrange(len(changed))] = dice.randrange(256)
            read(bytes(changed[: dice.randint(len(sent) // 2, len(sent))]), dice.randrange(4), end=12 + number % 3)


def test_sound_batches_of_every_codec_come_out_as_they_were_written():
    sound = [each for each in hostile_batches.batches(100, seed=2, bomb_every=FAR) if each.kind == "sound"]
    data, expected = b"", list[bytes]()
    for each in sound:
        data += placed(each.sent, len(expected))
        expected += each.values
    assert [item.value for item in read(data)] == expected


def test_a_fetch_from_the_middle_of_a_batch_begins_there():
    assert [item.offset for item in read(placed(three(), 10), start=11)] == [11, 12]


@pytest.mark.parametrize("end", range(7))
def test_what_was_written_while_a_broker_answered_is_read_although_the_end_that_it_names_is_older(end: int):
    """A broker looks up the high watermark first, and reads up to a newer one."""
    items = read(placed(three(), 0) + placed(three(), 3), end=end)
    assert (lost(items), [item.offset for item in items]) == ([], [0, 1, 2, 3, 4, 5])


def test_markers_and_emptied_batches_are_passed():
    """Compaction can leave a batch without records; the records that it held are missing."""
    marker = Batch(record(0, b"", b"\0\0\0\1"), 1, attributes=CONTROL).encode()
    emptied = Batch(b"", 0, last_delta=4).encode()
    items = read(marker + placed(emptied, 1) + placed(three(), 6))
    assert isinstance(items[0], Marker)
    assert lost(items) == [(1, 5, "missing")]
    assert [item.offset for item in items[2:]] == [6, 7, 8]


def test_an_emptied_batch_at_the_end_of_a_fetch_is_passed_too():
    assert lost(read(Batch(b"", 0, last_delta=4).encode(), end=5)) == [(0, 5, "missing")]


@pytest.mark.parametrize(
    ("field", "value"), [("last_delta", 30), ("num_records", 1 << 30), ("magic", 9), ("crc_change", 1)]
)
def test_a_batch_with_a_wrong_header_costs_its_own_offsets_only(field: str, value: int):
    sound = Batch(b"".join(record(index, b"v") for index in range(3)), 3, crc_change=1)
    bad = replace(sound, **{field: value}).encode()
    items = read(placed(three(), 0) + placed(bad, 3) + placed(three(), 6))
    assert lost(items) == [(3, 3, "corrupt_batch")]
    assert len(items) == 7


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\xff\xff\xff\x0f",
        record(0, b"v"),
        record(7, b"v"),
        record(1, b"v", headers=[(b"\xff", b"1")]),
        record(1, bytes(3 << 20)),
        record(1, b"v", headers=[(b"n", b"")] * 1001),
    ],
    ids=["no end", "offset of another", "offset beyond", "header name", "too large", "headers"],
)
def test_a_malformed_record_and_those_behind_it_are_lost_together(bad: bytes):
    items = read(Batch(record(0, b"v") + bad + record(2, b"v") + record(3, b"v"), 4).encode())
    assert lost(items) == [(1, 3, "malformed_batch")]
    assert items[0].value == b"v"
    assert len(items[1].value) <= 1 << 20


def test_a_batch_of_many_records_without_content_is_read_one_by_one():
    """Nothing of a batch is held but its bytes: the first of 5,000 records comes before the others are made."""
    items = FetchedRecords(batch([record(index, None, None) for index in range(5_000)], codec=1), 0, 0).items(FAR)
    assert next(items).offset == 0
    assert Counter(type(item).__name__ for item in items) == {"Message": 4_999}
