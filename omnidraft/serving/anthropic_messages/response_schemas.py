"""Response bodies of Anthropic's Messages API; the OpenAPI document shows these models, and responses are made of
them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

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
