"""kafka-python's fetcher with our own record parser; sessions, leaders and positions remain its own."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from kafka.consumer.fetcher import CompletedFetch, Fetcher
from kafka.errors import CorruptRecordError, KafkaError
from kafka.record import MemoryRecords

from omnidraft.bus.kafka_records import FetchedRecords, Marker
from omnidraft.ports import Message

MAX_POLL_BYTES = 32 << 20
"""Bytes of one poll: a fetch of 2 MiB can decompress to a thousand times as much."""


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
    """Returns everything that a broker sends, at most MAX_POLL_BYTES and one message at once. Where a broker cannot
    read its own files it raises, or returns nothing; see kafka_gaps.py."""

    PartitionRecords = TolerantRecords

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
