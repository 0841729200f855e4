"""W3C trace context as it stands in an HTTP or Kafka header: https://www.w3.org/TR/trace-context/, version 00.

Only `traceparent` is carried on; `tracestate`, which is for vendors, is not.
"""

import re

_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(header: str | None) -> str | None:
    """What a stranger sent, if it is a traceparent; None otherwise, as the standard asks."""
    return header if header is not None and _FORM.fullmatch(header) else None


def is_sampled(traceparent: str) -> bool:
    """Whether its trace is kept; otherwise nobody will find what it names."""
    return bool(int(traceparent[-2:], 16) & 1)
