"""Runs the operator's redactor on a record before it is logged: its result is written, and no failure stops serving."""

import logging
from collections.abc import Callable

from omnidraft.ports import DropReason
from omnidraft.traces.record import TraceRecord

logger = logging.getLogger(__name__)

Redactor = Callable[[TraceRecord], TraceRecord | None]


class SafeRedactor:
    """A redactor that never raises: it returns the reason why a record is dropped instead. One thread at a time."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._logged_failures: set[str] = set()

    def __call__(self, record: TraceRecord) -> TraceRecord | DropReason:
        """Return the record to write, or the reason why it is dropped."""
        try:
            redacted = self._redactor(record)
        except Exception as exc:  # not our code: it may raise anything
            return self._failed(type(exc).__name__)
        if redacted is None:
            return "redacted"
        return redacted if isinstance(redacted, TraceRecord) else self._failed(f"it returned {type(redacted).__name__}")

    def _failed(self, failure: str) -> DropReason:
        """Log one line for each kind of failure, without its message, which may contain the record's text."""
        if failure not in self._logged_failures:
            self._logged_failures.add(failure)
            logger.warning("recorder.redactor failed, the record is dropped: %s", failure)
        return "redactor_failed"
