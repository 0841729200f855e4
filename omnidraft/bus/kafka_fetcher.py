"""Read a topic whose files or messages are damaged: kafka-python's fetcher with our own record parser, which returns
everything that a broker sends, and a search for what lies behind the offsets that the broker itself cannot read.

The broker answers a fetch at such an offset with an error, or with nothing, for ever. An offset counts as unreadable
only when it was fetched alone and gave nothing twice, before and after a later one was read: a slow broker, or one
whose disk is gone, does not behave like that. One that throttles us does: it answers with nothing until the quota
suffices, and says so. A search during which it did finds nothing.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.fetcher import CompletedFetch, Fetcher
from kafka.errors import CorruptRecordError, KafkaError, OffsetOutOfRangeError
from kafka.record import MemoryRecords

from omnidraft.bus.kafka_records import FetchedRecords, Marker
from omnidraft.ports import Message

MAX_POLL_BYTES = 32 << 20
"""Bytes of one poll: a fetch of 2 MiB can decompress to a thousand times as much."""
UNREADABLE_ERRORS = (CorruptRecordError, OffsetOutOfRangeError)
"""Errors that a fetch raises at such an offset, although it lies between the ends of its partition."""
START_TIMEOUT_MS = 2_000
"""Timeout of each fetch at the first offset."""
PROBE_TIMEOUT_MS = 300
"""Timeout of a fetch at a later offset."""
STRIDE_DIVISOR = 8
"""The step to the next probe grows by the distance so far, divided by this."""


class TolerantRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """The records of one fetch of a partition: a Message or a Marker, where kafka-python has a ConsumerRecord."""

    end_offset: int
    """End offset of the partition when it was fetched."""
    newest_epoch: int
    """Newest leader epoch of the partition; no checksum covers the one in a batch."""
    num_bytes_taken = 0
    """Bytes that the last call of `take` returned."""

    def take(self, n: int | None = None) -> list[Message | Marker]:
        taken, self.num_bytes_taken = [], 0
        for item in islice(self.record_iterator, n):
            taken.append(item)
            self.num_bytes_taken += len(item.value)
            if self.num_bytes_taken >= MAX_POLL_BYTES:
                break
        return taken

    def _unpack_records(self, tp: Any, records: MemoryRecords, *deserializers: Any) -> Iterator[Message | Marker]:
        fetched = FetchedRecords(records._buffer, tp.partition, self.fetch_offset)
        for item in fetched.items(self.end_offset):
            self.leader_epoch = min(fetched.leader_epoch, self.newest_epoch)
            self.next_fetch_offset = item.next_offset
            yield item
        self.bytes_read = records.size_in_bytes()  # it counts as read among the partitions
        self.drain()


class TolerantFetcher(Fetcher):  # type: ignore[misc]
    """Returns everything that a broker sends, at most MAX_POLL_BYTES and one message at once; sessions, leaders and
    positions remain the client's own. Where a broker cannot read its own files this raises, or returns nothing."""

    PartitionRecords = TolerantRecords
    was_throttled = False
    """Whether a fetch exceeded a quota, and was answered with nothing for that reason."""

    def _handle_fetch_response(self, node_id: Any, fetch_offsets: Any, send_time: float, response: Any) -> None:
        self.was_throttled |= response.throttle_time_ms > 0
        super()._handle_fetch_response(node_id, fetch_offsets, send_time, response)

    def fetched_records(self, max_records: int | None = None, update_offsets: bool = True) -> Any:
        self._num_bytes = 0
        return super().fetched_records(max_records, update_offsets)

    def _append(self, drained: Any, part: TolerantRecords, max_records: int, update_offsets: bool) -> int:
        """Return `max_records` once MAX_POLL_BYTES are reached, which ends the caller's loop."""
        num_taken: int = super()._append(drained, part, max_records, update_offsets)
        self._num_bytes += part.num_bytes_taken
        return max_records if self._num_bytes >= MAX_POLL_BYTES else num_taken

    def _parse_fetched_data(self, completed_fetch: CompletedFetch) -> TolerantRecords | None:
        try:
            parsed = super()._parse_fetched_data(completed_fetch)
        except KafkaError as exc:
            if type(exc) is KafkaError:  # bytes that hold no whole batch
                raise CorruptRecordError(str(exc)) from exc
            raise
        if parsed is not None:
            parsed.end_offset = completed_fetch.partition_data.high_watermark
            epoch = self._manager.cluster.leader_epoch_for_partition(completed_fetch.topic_partition)
            parsed.newest_epoch = -1 if epoch is None else epoch
        return parsed


def first_readable_offset(consumer: KafkaConsumer, partition: TopicPartition, start: int, end: int) -> int:
    """Return the first readable offset from `start` on, or `start` when none before `end` can be read, or the broker
    throttled us meanwhile.

    Args:
        consumer: new, with a TolerantFetcher; it is assigned and sought.

    Raises:
        KafkaError: the broker cannot be reached.
    """
    consumer.assign([partition])
    if _is_readable(consumer, partition, start, START_TIMEOUT_MS) or consumer._fetcher.was_throttled:
        return start
    unreadable, readable = _next_readable(consumer, partition, start, end)
    while readable - unreadable > 1:
        middle = (unreadable + readable) // 2
        if _is_readable(consumer, partition, middle, PROBE_TIMEOUT_MS):
            readable = middle
        else:
            unreadable = middle
    if _is_readable(consumer, partition, start, START_TIMEOUT_MS) or consumer._fetcher.was_throttled:
        return start
    return readable


def _next_readable(consumer: KafkaConsumer, partition: TopicPartition, start: int, end: int) -> tuple[int, int]:
    """Return the last unreadable offset that was probed and a readable one; `start` twice when there is none."""
    unreadable, probe = start, start + 1
    while probe < end:
        if _is_readable(consumer, partition, probe, PROBE_TIMEOUT_MS):
            return unreadable, probe
        unreadable, probe = probe, probe + 1 + (probe - start) // STRIDE_DIVISOR
    return start, start


def _is_readable(consumer: KafkaConsumer, partition: TopicPartition, offset: int, timeout_ms: int) -> bool:
    consumer.seek(partition, offset)
    with suppress(*UNREADABLE_ERRORS):
        return bool(consumer.poll(timeout_ms=timeout_ms, max_records=1))
    return False
