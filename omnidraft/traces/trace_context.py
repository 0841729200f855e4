"""The W3C trace context in an HTTP or Kafka header: https://www.w3.org/TR/trace-context/, version 00.

Only `traceparent` is propagated; `tracestate`, which is for vendors, is not.
"""

import re

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(header: str | None) -> str | None:
    """Return the header if it is a valid traceparent; None otherwise, as the standard requires."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else None


def is_sampled(traceparent: str) -> bool:
    """Return whether the trace is sampled; the spans of others are not stored."""
    return bool(int(traceparent[-2:], 16) & 1)
