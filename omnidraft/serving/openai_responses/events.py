"""The events of a response's stream: each has its name and its number in its data."""

from collections.abc import Mapping
from typing import Any

from omnidraft.serving.event_stream import event
from omnidraft.serving.openai_responses.response_schemas import ResponseBody, ResponseError

PATH = "/v1/responses"


def response_event(name: str, number: int, content: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return event(name, {"type": name, "sequence_number": number, **content})


def failed_event(response: ResponseBody, error: ResponseError, number: int) -> bytes:
    """Return the event that ends the stream of a response that failed."""
    failed = response.model_copy(update={"status": "failed", "error": error})
    return response_event("response.failed", number, {"response": failed})
