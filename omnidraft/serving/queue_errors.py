"""How a request ends that the queue refuses or nobody reads, and the label under which each end is counted."""

from omnidraft.errors import OmnidraftError


class QueueFull(OmnidraftError):
    """Too many requests wait; try again after `retry_after_s` (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(OmnidraftError):
    """The worker is about to end; ask another one (HTTP 503)."""


class Abandoned(OmnidraftError):
    """The client went away; nobody reads the response."""


def end_status(error: Exception | None) -> str:
    """Return the label of the counter of requests."""
    match error:
        case None:
            return "ok"
        case Abandoned():
            return "abandoned"
        case _:
            return type(error).__name__
