"""Statistics of newly served requests from the trace log: agreement and seconds of each.

Every trace record is one served request, or a segment of a long one.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from omnidraft.errors import WireError
from omnidraft.ports import LogReader, Message, Work, recorded_work
from omnidraft.threads import started
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord

HISTORY_MESSAGES = 500
"""The number of messages of each partition that are read again after a start."""
MAX_MESSAGES = 500
MOST_MESSAGES = 10_000
"""The number of messages that one call of `new` reads at most."""
ANSWER_S = 1.0
"""The wait for the log and the key store of its records; what they answer later is taken by a later call."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Statistics of one record."""

    time_ms: int
    """The time at which it ended, Unix milliseconds."""
    tenant: str
    version: int | None
    """The snapshot that drafted."""
    num_tokens: int
    seconds: float
    """Time spent on drafting and on the target's passes."""
    num_drafted: int
    """The number of passes with a draft."""
    num_agreed: int
    """The number of those in which the target drew the first candidate. It does not depend on the policy."""
    work: Work = "text"
    """The kind of the request; calls of tools count with other text under a grammar."""
    is_past: bool = False
    """Whether it was in the log before this reader started: nothing is announced because of it alone. Judged by its
    offset, since the clocks of workers may be wrong."""


def request_stats(record: TraceRecord) -> RequestStats:
    """Return the statistics of a record."""
    rounds = record.rounds
    first_agreed = rounds.first_agreed
    return RequestStats(
        time_ms=record.time_ms,
        tenant=record.tenant,
        version=record.snapshot_version,
        num_tokens=len(record.emitted_ids),
        seconds=float(rounds.draft_s_R.sum() + rounds.target_s_R.sum()),
        num_drafted=len(first_agreed),
        num_agreed=int(first_agreed.sum()),
        work=recorded_work(has_grammar=record.has_grammar),
    )


class RequestStatsReader:
    """Reads the newest records of one pair, each at most once, from one thread. Its construction raises BusError when
    the log cannot be reached."""

    def __init__(self, reader: LogReader, *, target: str, drafter: str) -> None:
        self._reader = reader
        self._target, self._drafter = target, drafter
        self._start_offsets = dict(reader.end_offsets())
        self._next_offsets = {each: max(0, end - HISTORY_MESSAGES) for each, end in self._start_offsets.items()}
        self._is_positioned = False
        """Whether the log's reader stands at the next offsets; not after a call that did not come to its end."""
        self._came_to_end = False
        self._reading: Future[None] | None = None
        self._unread = deque[RequestStats]()

    @property
    def is_at_end(self) -> bool:
        """Whether the last call of `new` yielded all that the log held by then."""
        return self._came_to_end and self._reading is None and not self._unread

    def new(self) -> Iterator[RequestStats]:
        """Yield the records since the last call, from at most MOST_MESSAGES messages; none where the log is silent.
        Raises BusError; the next call continues behind the last record that was yielded."""
        if self._reading is None and not self._unread:
            self._reading = started(self._read)
        if self._reading is not None and wait([self._reading], ANSWER_S).done:
            answer, self._reading = self._reading, None
            if not self._unread:
                answer.result()
        while self._reading is None and self._unread:
            yield self._unread.popleft()

    def _read(self) -> None:
        if not self._is_positioned:
            self._seek()
        self._is_positioned = self._came_to_end = False
        num_read = 0
        while num_read < MOST_MESSAGES and (polled := self._reader.poll(MAX_MESSAGES, 0.0)).messages:
            num_read += len(polled.messages)
            for message in polled.messages:
                self._next_offsets[message.partition] = message.next_offset
                record = self._decode(message.value, message.headers)
                if record is not None:
                    self._unread.append(replace(request_stats(record), is_past=self._is_past(message)))
            self._next_offsets |= polled.next_offsets
        self._is_positioned, self._came_to_end = True, num_read < MOST_MESSAGES

    def _seek(self) -> None:
        """Seek to the next offsets: to the oldest message where retention passed them, and to the end of a log that is
        shorter, since it lost its end or was created anew."""
        firsts, ends = self._reader.first_offsets(), self._reader.end_offsets()
        self._start_offsets = {each: min(self._start_offsets.get(each, 0), end) for each, end in ends.items()}
        self._next_offsets = {
            each: min(max(self._next_offsets.get(each, 0), firsts.get(each, 0)), end) for each, end in ends.items()
        }
        self._reader.seek(self._next_offsets)

    def _is_past(self, message: Message) -> bool:
        return message.offset < self._start_offsets.get(message.partition, 0)

    def _decode(self, value: bytes, headers: Mapping[str, bytes]) -> TraceRecord | None:
        """Return the record, or None for one of another pair or one that is unreadable, which the distiller reports."""
        if headers.get("target") != self._target.encode():
            return None
        try:
            record = codec.decode(value, headers)
        except WireError:
            return None
        return record if record.drafter == self._drafter else None
