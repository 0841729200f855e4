"""The newest records of one tenant, read from the end of the log, wherever the learner stands."""

from collections import deque
from collections.abc import Callable

from omnidraft.distill import whole_log
from omnidraft.distill.source import TraceSource
from omnidraft.ports import Offsets
from omnidraft.traces.record import TraceRecord

LOOK_BACK = 400
"""Messages of each partition that are looked through."""


class Recent:
    """One pair's. One thread."""

    def __init__(self, source: TraceSource, end_offsets: Callable[[], Offsets], num_records: int) -> None:
        """
        Args:
            source: nobody else reads with it, and its dead letters are written by who learns.
        """
        self._source, self._end_offsets, self._num_records = source, end_offsets, num_records

    def of(self, tenant: str) -> list[TraceRecord]:
        """The newest of LOOK_BACK messages, oldest first. Raises BusError."""
        ends = self._end_offsets()
        self._source.seek({partition: max(0, end - LOOK_BACK) for partition, end in ends.items()})
        newest: deque[TraceRecord] = deque(maxlen=self._num_records)
        poll = whole_log.POLL_MESSAGES, whole_log.POLL_TIMEOUT_S
        for polled in whole_log.polls_until(lambda: self._source.poll(*poll), ends, idle_s=whole_log.POLL_TIMEOUT_S):
            newest.extend(record for _, _, record in polled.records if record.tenant == tenant)
        return list(newest)
