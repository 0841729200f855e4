"""Record batches of Kafka's format v2 made by hand, and written as they are: only the broker judges them.

The layout is that of https://kafka.apache.org/documentation/#recordbatch.
"""

import gzip
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import lz4.frame
import zstandard
from kafka.record.util import calc_crc32c, encode_varint

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
TRANSACTIONAL, CONTROL = 0x10, 0x20
PACKERS = {
    0: bytes,
    GZIP: lambda plain: gzip.compress(plain, compresslevel=1),
    LZ4: lambda plain: lz4.frame.compress(plain, block_linked=False),
    ZSTD: zstandard.ZstdCompressor().compress,
}
AFTER_LENGTH = struct.Struct(">ibI")
"""Leader epoch, magic, checksum."""
CHECKED = struct.Struct(">hiqqqhii")
"""Attributes, last offset delta, first and greatest timestamp, producer id, epoch and sequence, number of records."""
NOW_MS = 1_790_000_000_000


def varint(value: int) -> bytes:
    made = bytearray()
    encode_varint(value, made.append)
    return bytes(made)


def _nullable(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


def record(
    delta: int,
    value: bytes | None,
    key: bytes | None = b"k",
    headers: Sequence[tuple[bytes, bytes | None]] = (),
) -> bytes:
    """One record with its length; header names are any bytes."""
    named = b"".join(_nullable(name) + _nullable(content) for name, content in headers)
    body = b"\0" + varint(0) + varint(delta) + _nullable(key) + _nullable(value) + varint(len(headers)) + named
    return varint(len(body)) + body


@dataclass(frozen=True)
class Batch:
    """What a batch says of itself; by default that is true."""

    records: bytes
    num_records: int
    last_delta: int | None = None
    attributes: int = 0
    magic: int = 2
    base_offset: int = 0
    leader_epoch: int = -1
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    timestamp_ms: int = NOW_MS
    crc_change: int = field(default=0)

    def encode(self) -> bytes:
        last_delta = self.num_records - 1 if self.last_delta is None else self.last_delta
        producer = self.producer_id, self.producer_epoch, self.base_sequence
        times = self.timestamp_ms, self.timestamp_ms
        checked = CHECKED.pack(self.attributes, last_delta, *times, *producer, self.num_records) + self.records
        crc = calc_crc32c(checked) ^ self.crc_change
        rest = AFTER_LENGTH.pack(self.leader_epoch, self.magic, crc) + checked
        return struct.pack(">qi", self.base_offset, len(rest)) + rest


def batch(records: Sequence[bytes], codec: int = 0) -> bytes:
    """A sound one of these records, packed."""
    return Batch(PACKERS[codec](b"".join(records)), len(records), attributes=codec).encode()


class RawProducer:
    """Writes bytes as record batches into one topic; the connection is its own."""

    def __init__(self, bootstrap: str, topic: str, timeout_s: float = 60.0) -> None:
        host, port = bootstrap.split(":")
        self._topic = topic.encode()
        self._socket = socket.create_connection((host, int(port)), timeout_s)

    def __enter__(self) -> "RawProducer":
        return self

    def __exit__(self, kind: type | None, exc: BaseException | None, where: TracebackType | None) -> None:
        self._socket.close()

    def produce(self, records: bytes, partition: int = 0) -> tuple[int, int]:
        """(error code, base offset)."""
        self._send(records, partition)
        return self._answer()

    def produce_all(self, batches: Sequence[bytes], partition: int = 0) -> list[tuple[int, int]]:
        """Each by itself, all sent before the first answer is read."""
        for each in batches:
            self._send(each, partition)
        return [self._answer() for _ in batches]

    def _send(self, records: bytes, partition: int) -> None:
        header = struct.pack(">hhih", 0, 8, 1, -1)  # Produce v8, correlation id 1, no client id
        topic = struct.pack(">h", len(self._topic)) + self._topic
        one = struct.pack(">iii", 1, partition, len(records)) + records
        body = struct.pack(">hhii", -1, -1, 30_000, 1) + topic + one
        self._socket.sendall(struct.pack(">i", len(header) + len(body)) + header + body)

    def _answer(self) -> tuple[int, int]:
        (length,) = struct.unpack(">i", self._read(4))
        answer = self._read(length)
        at = 4 + 4 + 2 + len(self._topic) + 4 + 4  # correlation id, one topic, its name, one partition, its number
        error, offset = struct.unpack_from(">hq", answer, at)
        return error, offset

    def _read(self, size: int) -> bytes:
        made = b""
        while len(made) < size:
            if not (piece := self._socket.recv(size - len(made))):
                raise ConnectionError("the broker closed the connection")
            made += piece
        return made
