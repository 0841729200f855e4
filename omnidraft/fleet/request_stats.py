"""What the fleet served lately, from the trace log: how often drafters were right, and what it cost.

Every trace record is one served request, or a stretch of a long one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from omnidraft.errors import BusError, WireError
from omnidraft.ports import LogReader, Message, Offsets
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord

HISTORY_MESSAGES = 500
"""Of each partition, that are read again after a start."""
MAX_MESSAGES = 500
MOST_MESSAGES = 10_000
"""Read in one go."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One record in figures."""

    time_ms: int
    """When it ended, Unix milliseconds."""
    tenant: str
    version: int | None
    """Snapshot that drafted."""
    num_tokens: int
    seconds: float
    """Spent on drafting and on the target's passes."""
    num_drafted: int
    """Passes for which something had been drafted."""
    num_agreed: int
    """... and the first candidate behind the text was what the target drew; what the policy drafts changes nothing."""
    is_past: bool = False
    """Whether it was in the log before anybody watched: it only says what is normal. Told by its place in the log,
    since the clocks of workers may be wrong."""


def request_stats(record: TraceRecord) -> RequestStats:
    """Return the stats of one record."""
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
    )


class RequestStatsReader:
    """The newest records of one pair, each once. One thread. Making it raises BusError when the log is away."""

    def __init__(self, reader: LogReader, *, target: str, drafter: str) -> None:
        self._reader = reader
        self._target, self._drafter = target, drafter
        self._is_placed = False
        self._past: Offsets = reader.end_offsets()

    def new(self) -> Iterator[RequestStats]:
        """What came since the last call, MOST_MESSAGES of it at most. Raises BusError; then some may be lost."""
        try:
            self._place()
            num_read = 0
            while num_read < MOST_MESSAGES and (messages := self._reader.poll(MAX_MESSAGES, 0.0).messages):
                num_read += len(messages)
                for message in messages:
                    record = self._ours(message.value, message.headers)
                    if record is not None:
                        yield replace(request_stats(record), is_past=self._is_past(message))
        except BusError:
            self._is_placed = False
            raise

    def _place(self) -> None:
        """Near the end."""
        if not self._is_placed:
            self._reader.seek_back(HISTORY_MESSAGES)
            self._is_placed = True

    def _is_past(self, message: Message) -> bool:
        return message.offset < self._past.get(message.partition, 0)

    def _ours(self, value: bytes, headers: Mapping[str, bytes]) -> TraceRecord | None:
        """None: of another pair, or not readable, which is the distiller's to tell."""
        if headers.get("target") != self._target.encode():
            return None
        try:
            record = codec.decode(value, headers)
        except WireError:
            return None
        return record if record.drafter == self._drafter else None
