"""Parse any fetched bytes: every offset becomes a message, damage, or a marker.

Kafka's format v2, https://kafka.apache.org/documentation/#recordbatch. kafka-python raises at the first invalid record,
again at every poll, so one record would stop its readers for good; here it costs the rest of its batch. The checksum
covers all of a batch but its first 17 bytes: length, base offset and leader epoch are trusted only as far as they fit
the neighbouring batches.

Batches are decompressed here up to a limit, as 10 kB can become 300 MB; not Snappy, which no writer of ours makes.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO

import lz4.frame
import zstandard
from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch

from omnidraft.ports import Damage, DamageReason, Message

MAX_OUTPUT_BYTES = 32 << 20
"""Sixteen times the largest message that our writers send."""
LENGTH = struct.Struct(">qi")
"""Base offset, and the number of bytes that follow this field."""
MIN_BATCH_BYTES = LENGTH.size + 14
"""Smallest size of a batch of any format."""
MAX_RECORD_BYTES = 2 << 20
"""Largest record that our writers send; a compressed batch can hold far larger ones."""
MAX_HEADERS = 1_000
MAX_DAMAGE_BYTES = 1 << 20
"""Damaged bytes that are kept in memory; a dead letter holds less."""


def decompress(codec: int, packed: bytes) -> bytes:
    """Decompress with the codec of this number in a batch's attributes, 0 for none. Raises CorruptRecordError where
    that cannot be done within the limit."""
    if codec == 0:
        return packed
    if codec not in _DECOMPRESSORS:
        raise CorruptRecordError(f"compression {_NAMES.get(codec, codec)} is not read; write with lz4, zstd or gzip")
    try:
        plain = _DECOMPRESSORS[codec](packed)
    except (zlib.error, RuntimeError, zstandard.ZstdError, MemoryError) as exc:
        raise CorruptRecordError(f"{_NAMES[codec]}: {exc}") from exc
    if len(plain) > MAX_OUTPUT_BYTES:
        raise CorruptRecordError(f"{_NAMES[codec]}: {len(packed):,} bytes unpack to more than {MAX_OUTPUT_BYTES:,}")
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


@dataclass(frozen=True, slots=True)
class Marker:
    """An offset that Kafka uses itself: the end of a transaction."""

    offset: int
    value: bytes = b""

    @property
    def next_offset(self) -> int:
        return self.offset + 1


class _Batch(DefaultRecordBatch):  # type: ignore[misc]
    """A batch that may say anything of itself."""

    _decompressed: bool

    def __init__(self, raw: memoryview, following: int | None) -> None:
        """`following`: base offset of the next batch, where it was fetched too."""
        super().__init__(bytes(raw).ljust(self.HEADER_STRUCT.size, b"\0"))  # one of an older format may be shorter
        self.raw, self._following = raw, following

    @property
    def unread(self) -> memoryview:
        """The bytes of the records that were not read yet, compressed if none was."""
        return memoryview(self._buffer)[self._pos :]

    def fault(self, position: int, end: int) -> tuple[DamageReason, str] | None:
        """Return why the header cannot be trusted, None when it can. `end` is the end of the partition."""
        if self.magic in (0, 1):
            return (
                "malformed_batch",
                f"record format v{self.magic} is not read; write with a client of Kafka 0.11 or later",
            )
        if self.magic != 2 or not self.validate_crc():
            return "corrupt_batch", "wrong checksum"
        if not 0 <= self.records_count <= self.last_offset_delta + 1:
            return "malformed_batch", f"{self.records_count} records for {self.last_offset_delta + 1} offsets"
        if self.base_offset <= position:  # what was asked for: a neighbour may be wrong, and the end is an older one
            return None
        if self.next_offset > (end if self._following is None else min(end, self._following)):
            return "corrupt_batch", f"offsets to {self.next_offset} overlap what follows"
        return None

    def resume_offset(self, position: int, end: int) -> int:
        """Return the offset to continue from when the header is not trusted: the nearest one with other evidence."""
        if self._following is not None and position < self._following <= end:
            return self._following
        is_likely = self.records_count == self.last_offset_delta + 1 and position < self.next_offset <= end
        return int(self.next_offset) if is_likely else position + 1

    def _maybe_uncompress(self) -> None:
        """Decompress within our limit, where kafka-python has none."""
        if not self._decompressed:
            self._buffer, self._pos = decompress(self.compression_type, bytes(self.unread)), 0
            self._decompressed = True


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
            for item in self._batch_items(_Batch(raw, following), position, end):
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
        if batch.is_control_batch:
            yield from map(Marker, range(max(position, batch.base_offset), batch.next_offset))
        else:
            yield from self._records(batch)

    def _records(self, batch: _Batch) -> Iterator[Message]:
        """Yield the records up to the first that is malformed, and the rest as one: a batch has one writer, and nobody
        else loses a record by it."""
        expected, end, rest = batch.base_offset, batch.next_offset, batch.unread
        try:
            records = iter(batch)
            for _ in range(batch.records_count):
                rest = batch.unread
                record = next(records)
                if not expected <= record.offset < end:
                    raise CorruptRecordError(f"a record says that it is number {record.offset - batch.base_offset}")
                if record.size_in_bytes > MAX_RECORD_BYTES or len(record.headers) > MAX_HEADERS:
                    limits = f"{MAX_RECORD_BYTES:,} bytes and {MAX_HEADERS} headers"
                    raise CorruptRecordError(f"a record of more than {limits} is not read")
                expected = record.offset + 1
                headers = {name: content or b"" for name, content in record.headers}
                key, value = record.key or b"", record.value or b""
                yield Message(self._partition, record.offset, key, value, headers, record.timestamp)
        except CorruptRecordError as exc:
            yield self._damaged(expected, end, "malformed_batch", str(exc), rest)
            return
        if expected < end:
            yield self._missing(expected, end)

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
