"""The newest records of one tenant, read from the end of the log, wherever the learner stands."""

from collections import deque
from collections.abc import Callable
from contextlib import closing

from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.ports import LogReader
from omnidraft.traces.record import TraceRecord

LOOK_BACK = 400
"""Messages of each partition that are looked through."""


class RecentRecords:
    """One pair's. One thread."""

    def __init__(
        self, open_reader: Callable[[], LogReader], source_over: Callable[[LogReader], TraceConsumer], num_records: int
    ) -> None:
        """
        Args:
            open_reader: a reader of the trace topic; there is one only while records are looked for.
            source_over: its dead letters are written by who learns.
        """
        self._open_reader, self._source_over, self._num_records = open_reader, source_over, num_records

    def of(self, tenant: str) -> list[TraceRecord]:
        """The newest of LOOK_BACK messages, oldest first. Raises BusError."""
        newest: deque[TraceRecord] = deque(maxlen=self._num_records)
        poll = topic_scan.POLL_MESSAGES, topic_scan.POLL_TIMEOUT_S
        with closing(self._open_reader()) as reader:
            source = self._source_over(reader)
            ends = source.end_offsets()
            source.seek_back(LOOK_BACK)
            for polled in topic_scan.polls_until(lambda: source.poll(*poll), ends, idle_s=topic_scan.POLL_TIMEOUT_S):
                newest.extend(record for _, _, record in polled.records if record.tenant == tenant)
        return list(newest)
