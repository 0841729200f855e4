"""Errors in Anthropic's shape, for its paths only."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from omnidraft.serving.event_stream import event

PATH = "/v1/messages"

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


THREAD_REFUSED = "thread_unsupported_request"
"""The code by which Anthropic's client knows that it has to send conversations whole."""


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None
    """Of a refused thread: `error_code` and `unsupported`, as Anthropic's client reads them."""


class AnthropicError(BaseModel):
    """The body of every 4xx and 5xx of Anthropic's paths."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


def is_anthropic(path: str) -> bool:
    """Return whether clients of Anthropic's ask this path."""
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_error(status: int, content: Mapping[str, Any]) -> dict[str, object]:
    """Return an error of OpenAI's shape in Anthropic's."""
    detail = AnthropicErrorDetail(type=_TYPES.get(status, "invalid_request_error"), message=content["error"]["message"])
    if content["error"].get("code") == THREAD_REFUSED:
        detail.details = {"error_code": THREAD_REFUSED, "unsupported": ["thread"]}
    return AnthropicError(error=detail).model_dump(exclude_none=True)


def anthropic_error_event(status: int, content: Mapping[str, Any]) -> bytes:
    """Return the event that ends a stream with an error of OpenAI's shape."""
    return event("error", anthropic_error(status, content))
