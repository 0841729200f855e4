"""Server-sent events with a name and JSON: those of the page, of OpenAI's Responses and of Anthropic's Messages."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

EVENT_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return f"event: {name}\ndata: {json.dumps(data, default=BaseModel.model_dump)}\n\n".encode()
