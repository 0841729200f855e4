"""The names of records that the newest snapshot remembers, against the log.

They are the last SEEN_RECORDS that were learned or held out. Within a partition records go through in order, so behind
the oldest remembered one of a partition every record is remembered, however the partitions took turns.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Set

from omnidraft.distill.ingest.record_disposition import SEEN_RECORDS

Place = tuple[int, int]
"""(partition, offset)."""


class DedupWindow:
    """Told every record that was learned or held out, in offset order within each partition."""

    def __init__(self, names: Set[int]) -> None:
        self._names = names
        self._found: set[int] = set()
        self._newest: defaultdict[int, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=SEEN_RECORDS))

    def update(self, place: Place, name: int) -> None:
        partition, offset = place
        self._newest[partition].append((offset, name))
        if name in self._names:
            self._found.add(name)

    def num_unknown(self) -> int:
        """Remembered records that were never seen."""
        return len(self._names) - len(self._found)

    def forgotten(self) -> Iterator[Place]:
        """Records that should be remembered and are not."""
        for partition, newest in self._newest.items():
            last = {name: offset for offset, name in newest}  # of a record learned twice the later one counts
            remembered = [offset for name, offset in last.items() if name in self._names]
            if not remembered:
                continue
            for offset, name in newest:
                if offset > min(remembered) and last[name] == offset and name not in self._names:
                    yield partition, offset
