"""Bodies and errors of Anthropic's Messages API; the OpenAPI document shows these models, and responses are made of
them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from omnidraft.serving.event_stream import event

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ToolUseContent(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    input_tokens: int
    """Prompt tokens that were read for this message; those of the two fields below are not among them."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    """Tokens that were not read again, since an earlier request began with them."""
    output_tokens: int


class Message(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Annotated[TextContent | ToolUseContent, Field(discriminator="type")]]
    stop_reason: StopReason | None
    """Only the first event of a stream has none."""
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


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
