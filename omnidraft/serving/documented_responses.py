"""Responses as the OpenAPI document shows them: exactly the statuses that an endpoint answers with."""

from typing import Any

from pydantic import BaseModel

from omnidraft.serving.response_schemas import ErrorBody

Responses = dict[int | str, dict[str, Any]]

DESCRIPTIONS = {
    400: "A field is missing, unknown or out of its range, or the body is no JSON.",
    401: "No such key, or none.",
    403: "`user` names the tenant of another API key.",
    404: "No such model here.",
    413: "The body is larger than worker.max_body_bytes.",
    429: "Too many requests wait; Retry-After says when to come again.",
    500: "Decoding failed.",
    503: "The worker is stopping; ask another one.",
}


def error_responses(*statuses: int, error: type[BaseModel] = ErrorBody) -> Responses:
    """Return the responses that are errors, in OpenAI's shape or in another one."""
    return {status: {"model": error, "description": DESCRIPTIONS[status]} for status in statuses}


def generation_responses(whole: type[BaseModel], events: str, error: type[BaseModel] = ErrorBody) -> Responses:
    """Return the responses of an endpoint that answers whole or streamed; of a stream, the schema of each event.

    Args:
        events: what a stream has, in words.
    """
    fields = {"event": {"type": "string"}, "data": {"type": "string"}}
    event = {"type": "object", "required": ["data"], "properties": fields, "description": f"Of a stream: {events}."}
    ok = {"model": whole, "description": "The answer.", "content": {"text/event-stream": {"schema": event}}}
    return {200: ok, **error_responses(400, 404, 413, 429, 500, 503, error=error)}
