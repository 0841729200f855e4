"""Statistics of newly served requests from the trace log: agreement and seconds of each.

Every trace record is one served request, or a segment of a long one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from omnidraft.errors import BusError, WireError
from omnidraft.ports import LogReader, Message, Offsets, Work, recorded_work
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord

HISTORY_MESSAGES = 500
"""The number of messages of each partition that are read again after a start."""
MAX_MESSAGES = 500
MOST_MESSAGES = 10_000
"""The number of messages that one call of `new` reads at most."""


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
    """Whether it was in the log before this reader started: it only sets the normal level. Judged by its offset, since
    the clocks of workers may be wrong."""


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
    """Reads the newest records of one pair, each once, from one thread. Its construction raises BusError when the log
    cannot be reached."""

    def __init__(self, reader: LogReader, *, target: str, drafter: str) -> None:
        self._reader = reader
        self._target, self._drafter = target, drafter
        self._has_position = False
        self._start_offsets: Offsets = reader.end_offsets()

    def new(self) -> Iterator[RequestStats]:
        """Yield the records since the last call, from at most MOST_MESSAGES messages. Raises BusError; then some may
        be skipped."""
        try:
            self._seek_to_history()
            num_read = 0
            while num_read < MOST_MESSAGES and (messages := self._reader.poll(MAX_MESSAGES, 0.0).messages):
                num_read += len(messages)
                for message in messages:
                    record = self._decode(message.value, message.headers)
                    if record is not None:
                        yield replace(request_stats(record), is_past=self._is_past(message))
        except BusError:
            self._has_position = False
            raise

    def _seek_to_history(self) -> None:
        """Seek to HISTORY_MESSAGES before the end, once."""
        if not self._has_position:
            self._reader.seek_back(HISTORY_MESSAGES)
            self._has_position = True

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
