"""Code of the operator's between a record and the log: what it returns is written, and no failure stops serving."""

import logging
from collections.abc import Callable

from omnidraft.ports.trace_reasons import DropReason
from omnidraft.traces.record import TraceRecord

logger = logging.getLogger(__name__)

Redactor = Callable[[TraceRecord], TraceRecord | None]


class SafeRedactor:
    """A redactor that cannot fail: it says why a record was lost instead. One thread at a time."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._told: set[str] = set()

    def __call__(self, record: TraceRecord) -> TraceRecord | DropReason:
        """What may be written, or the reason why nothing may."""
        try:
            redacted = self._redactor(record)
        except Exception as exc:  # not our code: it may raise anything
            return self._failed(type(exc).__name__)
        if redacted is None:
            return "redacted"
        return redacted if isinstance(redacted, TraceRecord) else self._failed(f"it returned {type(redacted).__name__}")

    def _failed(self, what: str) -> DropReason:
        """One line for each kind of failure, without its message, which may hold what the record holds."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("recorder.redactor failed, the record is dropped: %s", what)
        return "redactor_failed"
