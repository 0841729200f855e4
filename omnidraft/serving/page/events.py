"""Server-sent events as the page reads them: each has a name and JSON."""

import json
from collections.abc import Mapping
from typing import Any

EVENT_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
