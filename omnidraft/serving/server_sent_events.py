"""Server-sent events: with a name those of the page, of OpenAI's Responses and of Anthropic's Messages, without one
those of OpenAI's completions."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

EVENT_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
DONE = b"data: [DONE]\n\n"
"""The last event of a stream of completions."""


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return f"event: {name}\ndata: {json.dumps(data, default=BaseModel.model_dump)}\n\n".encode()


def unnamed_event(data: str) -> bytes:
    """Return one event of a stream of completions, given its JSON."""
    return f"data: {data}\n\n".encode()


def last_error_events(content: Mapping[str, Any]) -> bytes:
    """Return the events that end a stream of completions with an error."""
    return unnamed_event(json.dumps(content)) + DONE
