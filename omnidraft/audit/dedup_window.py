"""The record keys that the newest snapshot holds for deduplication, compared with the log.

They are those of the last SEEN_RECORDS records learned or held out. Within a partition records go through in order, so
behind the oldest one whose key is held, every key of the partition is held, however the partitions took turns.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Set

from omnidraft.distill.ingest.record_disposition import SEEN_RECORDS
from omnidraft.distill.ingest.trace_consumer import PartitionOffset


class DedupWindow:
    """Gets every record that was learned or held out, in offset order within each partition."""

    def __init__(self, keys: Set[int]) -> None:
        self._keys = keys
        self._seen: set[int] = set()
        self._newest: defaultdict[int, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=SEEN_RECORDS))

    def update(self, position: PartitionOffset, key: int) -> None:
        partition, offset = position
        self._newest[partition].append((offset, key))
        if key in self._keys:
            self._seen.add(key)

    def num_unknown_keys(self) -> int:
        """Return the number of keys held of which no record was seen."""
        return len(self._keys) - len(self._seen)

    def forgotten(self) -> Iterator[PartitionOffset]:
        """Yield the positions of records whose keys should be held and are not."""
        for partition, newest in self._newest.items():
            last = {key: offset for offset, key in newest}  # the later one of a record learned twice
            held = [offset for key, offset in last.items() if key in self._keys]
            if not held:
                continue
            for offset, key in newest:
                if offset > min(held) and last[key] == offset and key not in self._keys:
                    yield partition, offset
