"""Record batches that nobody should send, and sound ones between them. A seed gives the same."""

import gzip
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from kafka.record.util import calc_crc32c

from tests.raw_batches import CONTROL, GZIP, LZ4, PACKERS, SNAPPY, TRANSACTIONAL, ZSTD, Batch, record

BOMB_BYTES = 300 << 20
CODECS = (0, GZIP, LZ4, ZSTD)
HEADER_BYTES, CHECKED_FROM = 61, 21


@dataclass(frozen=True)
class Hostile:
    """A batch as it is sent."""

    kind: str
    sent: bytes
    values: tuple[bytes, ...] = ()
    """Of a sound one: what has to be read again."""


def batches(num: int, *, seed: int, bomb_every: int) -> Iterator[Hostile]:
    """`num` of them; a bomb is one that unpacks to BOMB_BYTES."""
    dice = random.Random(seed)
    kinds: tuple[Callable[[random.Random, int], Hostile], ...] = (
        *(_sound, _names, _fields, _deltas, _compression, _truncated),
        *(_noise, _says, _mutated, _large, _older),
    )
    for number in range(num):
        if number % bomb_every == bomb_every - 1:
            codec = (GZIP, LZ4, ZSTD)[number // bomb_every % 3]
            yield Hostile("bomb", _bomb(codec))
        else:
            yield dice.choice(kinds)(dice, number)


def _records(dice: random.Random, number: int) -> list[tuple[bytes, bytes]]:
    """(record, value)."""
    values = [b"%d-%d-" % (number, index) + dice.randbytes(dice.randrange(200)) for index in range(dice.randint(1, 5))]
    return [(record(index, value, headers=[(b"n", b"%d" % number)]), value) for index, value in enumerate(values)]


def _packed(dice: random.Random, records: list[bytes], codec: int | None = None) -> Batch:
    codec = dice.choice(CODECS) if codec is None else codec
    return Batch(PACKERS[codec](b"".join(records)), len(records), attributes=codec)


def _sound(dice: random.Random, number: int) -> Hostile:
    made = _records(dice, number)
    packed = _packed(dice, [each for each, _ in made])
    return Hostile("sound", packed.encode(), tuple(value for _, value in made))


def _names(dice: random.Random, number: int) -> Hostile:
    names = [dice.choice((b"\xff\xfe", b"", b"\xc3", b"\xed\xa0\x80", b"n", dice.randbytes(600))) for _ in range(3)]
    made = [record(index, b"v", headers=[(name, dice.choice((None, b"x")))]) for index, name in enumerate(names)]
    return Hostile("header names", _packed(dice, made).encode())


def _fields(dice: random.Random, number: int) -> Hostile:
    many = [(b"%d" % index, b"") for index in range(dice.choice((0, 1, 1001, 20_000)))]
    return Hostile("null fields, many headers", _packed(dice, [record(0, None, None, many), record(1, b"")]).encode())


def _deltas(dice: random.Random, number: int) -> Hostile:
    made = [record(dice.choice((index, 0, -1, 7, 1 << 30, -(1 << 31))), b"v") for index in range(3)]
    return Hostile("offsets in disorder", _packed(dice, made, 0).encode())


def _compression(dice: random.Random, number: int) -> Hostile:
    plain = record(0, b"v")
    snappy = bytes([len(plain), (len(plain) - 1) << 2]) + plain
    codec, packed = dice.choice(((SNAPPY, snappy), (SNAPPY, b"\xff" * 9), (5, plain), (7, plain), (GZIP, plain)))
    return Hostile("compression that nobody knows", Batch(packed, 1, attributes=codec).encode())


def _truncated(dice: random.Random, number: int) -> Hostile:
    packed = _packed(dice, [record(index, dice.randbytes(300)) for index in range(3)])
    cut = dice.randrange(1, len(packed.records))
    behind = dice.choice((b"", dice.randbytes(20), gzip.compress(b"more")))
    return Hostile("truncated or with more behind", replace(packed, records=packed.records[:cut] + behind).encode())


def _noise(dice: random.Random, number: int) -> Hostile:
    codec = dice.choice((*CODECS, SNAPPY))
    packed = PACKERS.get(codec, bytes)(dice.randbytes(dice.randrange(400)))
    return Hostile("noise for records", Batch(packed, dice.choice((0, 1, 5, 1 << 30, -1)), attributes=codec).encode())


def _says(dice: random.Random, number: int) -> Hostile:
    """A header that is not true, checksummed."""
    name, values = dice.choice(
        (
            ("attributes", (TRANSACTIONAL, CONTROL, TRANSACTIONAL | CONTROL, 0x7F00, 0x08, -1)),
            ("last_delta", (0, 1, 9, 1 << 30, -1)),
            ("num_records", (0, 1, 9, 1 << 30, -1)),
            ("base_offset", (-1, 1 << 40)),
            ("leader_epoch", (99, -5)),
            ("producer_id", (0, 1 << 40)),
            ("base_sequence", (0, 1 << 30)),
            ("timestamp_ms", (0, -1, -(1 << 62), 1 << 62)),
        )
    )
    made = _packed(dice, [record(0, b"v"), record(1, b"w")], 0)
    return Hostile(f"says {name}", replace(made, **{name: dice.choice(values)}).encode())


def _mutated(dice: random.Random, number: int) -> Hostile:
    """Bytes changed anywhere behind the length; the checksum is right in two of three."""
    changed = bytearray(_packed(dice, [each for each, _ in _records(dice, number)]).encode())
    for _ in range(dice.randint(1, 6)):
        changed[dice.randrange(HEADER_BYTES if dice.random() < 0.7 else 12, len(changed))] = dice.randrange(256)
    if dice.random() < 0.67:
        struct.pack_into(">I", changed, 17, calc_crc32c(memoryview(changed)[CHECKED_FROM:]))
    return Hostile("mutated", bytes(changed))


def _large(dice: random.Random, number: int) -> Hostile:
    """Records larger than any writer of ours sends, packed small enough for the broker."""
    made = [record(index, bytes(dice.choice((10, 1 << 20, 3 << 20, 5 << 20)))) for index in range(3)]
    return Hostile("large records", _packed(dice, made, dice.choice((GZIP, ZSTD))).encode())


def _older(dice: random.Random, number: int) -> Hostile:
    return Hostile("another format", Batch(record(0, b"v"), 1, magic=dice.choice((0, 1, 3, -1))).encode())


@cache
def _bomb(codec: int) -> bytes:
    return Batch(PACKERS[codec](record(0, bytes(BOMB_BYTES))), 1, attributes=codec).encode()
