"""Parse any fetched bytes: every offset becomes a message, damage, or a marker.

Kafka's format v2, https://kafka.apache.org/documentation/#recordbatch. kafka-python's parser raises at the first
invalid record, again at every poll, so one record would stop its readers for good. The checksum covers all of a batch
but its first 17 bytes: length, base offset and leader epoch are trusted only as far as they fit the neighbouring
batches.

Batches are decompressed here up to a limit, as 10 kB can become 300 MB; not Snappy, which no writer of ours makes.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO

import lz4.frame
import zstandard
from kafka.record.util import calc_crc32c, decode_varint

from omnidraft.ports import Damage, DamageReason, Message

MAX_OUTPUT_BYTES = 32 << 20
"""Sixteen times the largest message that our writers send."""


class DecompressionError(Exception):
    """The bytes cannot be decompressed within the limit; the message says why."""


def decompress(codec: int, packed: bytes) -> bytes:
    """Decompress with the codec of this number in a batch's attributes, 0 for none. Raises DecompressionError."""
    if codec == 0:
        return packed
    if codec not in _DECOMPRESSORS:
        raise DecompressionError(f"compression {_NAMES.get(codec, codec)} is not read; write with lz4, zstd or gzip")
    try:
        plain = _DECOMPRESSORS[codec](packed)
    except (zlib.error, RuntimeError, zstandard.ZstdError, MemoryError) as exc:
        raise DecompressionError(f"{_NAMES[codec]}: {exc}") from exc
    if len(plain) > MAX_OUTPUT_BYTES:
        raise DecompressionError(f"{_NAMES[codec]}: {len(packed):,} bytes unpack to more than {MAX_OUTPUT_BYTES:,}")
    return plain


def _gzip(packed: bytes) -> bytes:
    """Decompress the first member and ignore what follows it, as Kafka's own clients do."""
    return zlib.decompressobj(wbits=31).decompress(packed, MAX_OUTPUT_BYTES + 1)


def _lz4(packed: bytes) -> bytes:
    plain: bytes = lz4.frame.LZ4FrameDecompressor().decompress(packed, max_length=MAX_OUTPUT_BYTES + 1)
    return plain


def _zstd(packed: bytes) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_OUTPUT_BYTES)
    with decompressor.stream_reader(BytesIO(packed), read_across_frames=True) as reader:
        return reader.read(MAX_OUTPUT_BYTES + 1)


_NAMES: Mapping[int, str] = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
_DECOMPRESSORS: Mapping[int, Callable[[bytes], bytes]] = {1: _gzip, 3: _lz4, 4: _zstd}


HEADER = struct.Struct(">qiibIhiqqqhii")
LENGTH = struct.Struct(">qi")
"""Base offset, and the number of bytes that follow this field."""
CHECKSUM_START = struct.calcsize(">qiibI")
MAGIC_OFFSET = struct.calcsize(">qii")
MIN_BATCH_BYTES = LENGTH.size + 14
"""Smallest size of a batch of any format."""
CODEC, APPEND_TIME, CONTROL = 0x07, 0x08, 0x20
MAX_RECORD_BYTES = 2 << 20
"""Largest record that our writers send; a compressed batch can hold far larger ones."""
MAX_HEADERS = 1_000
MAX_DAMAGE_BYTES = 1 << 20
"""Damaged bytes that are kept in memory; a dead letter holds less."""


@dataclass(frozen=True, slots=True)
class Marker:
    """An offset that Kafka uses itself: the end of a transaction."""

    offset: int
    value: bytes = b""

    @property
    def next_offset(self) -> int:
        return self.offset + 1


class _MalformedRecord(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class _Batch:
    """The header of one batch."""

    raw: memoryview
    following: int | None
    """Base offset of the next batch, where it was fetched too."""
    base_offset: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_delta: int
    first_ms: int
    last_ms: int
    num_records: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_delta + 1

    def fault(self, position: int, end: int) -> tuple[DamageReason, str] | None:
        """Return why the header cannot be trusted, None when it can. `end` is the end of the partition."""
        if self.magic in (0, 1):
            return (
                "malformed_batch",
                f"record format v{self.magic} is not read; write with a client of Kafka 0.11 or later",
            )
        if self.magic != 2 or calc_crc32c(self.raw[CHECKSUM_START:]) != self.crc:
            return "corrupt_batch", "wrong checksum"
        if not 0 <= self.num_records <= self.last_delta + 1:
            return "malformed_batch", f"{self.num_records} records for {self.last_delta + 1} offsets"
        if self.base_offset <= position:  # what was asked for: a neighbour may be wrong, and the end is an older one
            return None
        if self.next_offset > (end if self.following is None else min(end, self.following)):
            return "corrupt_batch", f"offsets to {self.next_offset} overlap what follows"
        return None

    def resume_offset(self, position: int, end: int) -> int:
        """Return the offset to continue from when the header is not trusted: the nearest one with other evidence."""
        if self.following is not None and position < self.following <= end:
            return self.following
        is_likely = self.num_records == self.last_delta + 1 and position < self.next_offset <= end
        return self.next_offset if is_likely else position + 1


class FetchedRecords:
    """The records of one fetch of one partition; iterate once."""

    def __init__(self, data: bytes, partition: int, start: int) -> None:
        """`start` is the requested offset; records before it are skipped."""
        self._data, self._partition, self._start = memoryview(data), partition, start
        self.leader_epoch = -1
        """Leader epoch of the newest valid batch."""

    def items(self, end: int) -> Iterator[Message | Marker]:
        """Yield items in offset order without a gap, at least one if a batch was fetched. `end` is the partition's."""
        position = self._start
        for raw, following in self._slices():
            for item in self._batch_items(_parse_batch(raw, following), position, end):
                if item.next_offset <= position:
                    continue
                if item.offset > position:
                    yield self._missing(position, item.offset)
                yield _trimmed(position, item)
                position = item.next_offset
        if position == self._start and len(self._data):
            yield self._damaged(position, position + 1, "corrupt_batch", "no batch can be made out", self._data)

    def _slices(self) -> Iterator[tuple[memoryview, int | None]]:
        """Yield complete batches, each with the base offset of the next; the last of a fetch may be cut off."""
        at = 0
        while at + MIN_BATCH_BYTES <= len(self._data):
            _, length = LENGTH.unpack_from(self._data, at)
            until = at + LENGTH.size + length
            if not at + MIN_BATCH_BYTES <= until <= len(self._data):
                return
            has_next = until + MIN_BATCH_BYTES <= len(self._data)
            yield self._data[at:until], LENGTH.unpack_from(self._data, until)[0] if has_next else None
            at = until

    def _batch_items(self, batch: _Batch, position: int, end: int) -> Iterator[Message | Marker]:
        if fault := batch.fault(position, end):
            yield self._damaged(position, batch.resume_offset(position, end), *fault, batch.raw)
            return
        self.leader_epoch = batch.leader_epoch
        if batch.attributes & CONTROL:
            yield from map(Marker, range(max(position, batch.base_offset), batch.next_offset))
            return
        try:
            plain = decompress(batch.attributes & CODEC, bytes(batch.raw[HEADER.size :]))
        except DecompressionError as exc:
            first = max(position, batch.base_offset)
            yield self._damaged(first, batch.next_offset, "malformed_batch", str(exc), batch.raw)
            return
        yield from self._records(batch, plain)

    def _records(self, batch: _Batch, plain: bytes) -> Iterator[Message]:
        """Yield the records up to the first that is malformed, and the rest as one: a batch has one writer, and nobody
        else loses a record by it."""
        at, delta = 0, -1
        for _ in range(batch.num_records):
            try:
                message, end = _parse_record(plain, at, batch, self._partition)
                if not batch.base_offset + delta < message.offset < batch.next_offset:
                    raise _MalformedRecord(f"says that it is number {message.offset - batch.base_offset}")
            except (IndexError, ValueError) as exc:
                first, rest = batch.base_offset + delta + 1, memoryview(plain)[at:]
                yield self._damaged(first, batch.next_offset, "malformed_batch", f"record {delta + 1}: {exc}", rest)
                return
            at, delta = end, message.offset - batch.base_offset
            yield message
        if delta < batch.last_delta:
            yield self._missing(batch.base_offset + delta + 1, batch.next_offset)

    def _missing(self, first: int, until: int) -> Message:
        """Report offsets without records, as compaction leaves them; a log of ours has none."""
        return self._damaged(first, until, "missing", "the log holds nothing at these offsets", b"")

    def _damaged(self, first: int, until: int, reason: DamageReason, error: str, raw: memoryview | bytes) -> Message:
        size = f" ({len(raw):,} bytes)" if len(raw) else ""
        damage = Damage(reason, f"{error}{size}", until - first)
        return Message(self._partition, first, b"", bytes(raw[:MAX_DAMAGE_BYTES]), {}, 0, damage)


def _trimmed(position: int, item: Message | Marker) -> Message | Marker:
    """Return the item without its part before this offset."""
    if isinstance(item, Marker) or item.damage is None or item.offset >= position:
        return item
    damage = replace(item.damage, num_messages=item.next_offset - position)
    return replace(item, offset=position, damage=damage)


def _parse_batch(raw: memoryview, following: int | None) -> _Batch:
    if len(raw) < HEADER.size:  # of an older format, or not a batch
        base, _ = LENGTH.unpack_from(raw)
        return _Batch(raw, following, base, -1, min(raw[MAGIC_OFFSET], 1), 0, 0, 0, 0, 0, 0)
    base, _, epoch, magic, crc, attributes, last_delta, first_ms, last_ms, _, _, _, number = HEADER.unpack_from(raw)
    return _Batch(raw, following, base, epoch, magic, crc, attributes, last_delta, first_ms, last_ms, number)


def _parse_record(plain: bytes, at: int, batch: _Batch, partition: int) -> tuple[Message, int]:
    """Return the record that begins there, and where it ends. Raises IndexError, ValueError."""
    length, at = decode_varint(plain, at)
    until = at + length
    if not 0 <= length <= min(len(plain) - at, MAX_RECORD_BYTES):
        raise _MalformedRecord(f"{length:,} bytes are not there, or more than {MAX_RECORD_BYTES:,}")
    later_ms, at = decode_varint(plain, at + 1)  # behind the attributes, which have no meaning yet
    delta, at = decode_varint(plain, at)
    key, at = _parse_field(plain, at, until)
    value, at = _parse_field(plain, at, until)
    headers, at = _parse_headers(plain, at, until)
    if at != until:
        raise _MalformedRecord(f"its fields end {until - at} bytes before it does")
    timestamp_ms = batch.last_ms if batch.attributes & APPEND_TIME else batch.first_ms + later_ms
    return Message(partition, batch.base_offset + delta, key, value, headers, timestamp_ms), until


def _parse_headers(plain: bytes, at: int, until: int) -> tuple[dict[str, bytes], int]:
    """Return the headers and where they end."""
    number, at = decode_varint(plain, at)
    if not 0 <= number <= MAX_HEADERS:
        raise _MalformedRecord(f"it has {number} headers, {MAX_HEADERS} are read")
    headers = {}
    for _ in range(number):
        name, at = _parse_field(plain, at, until)
        headers[name.decode()], at = _parse_field(plain, at, until)
    return headers, at


def _parse_field(plain: bytes, at: int, until: int) -> tuple[bytes, int]:
    """Return a field and where it ends; null is the same as empty."""
    length, at = decode_varint(plain, at)
    if length < 0:
        return b"", at
    if at + length > until:
        raise _MalformedRecord("one of its fields is longer")
    return plain[at : at + length], at + length
