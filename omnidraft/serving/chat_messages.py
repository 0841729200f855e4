"""The messages of OpenAI's chat, as clients send them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag, model_validator

from omnidraft.serving.strict_model import TEXT_OR_LIST, StrictModel, Text, refuse_kinds
from omnidraft.serving.tool_schemas import ToolCall


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


TextOnly = Annotated[TextPart, refuse_kinds("image_url", "input_audio", "file", "audio_url", "video_url")]
Texts = Annotated[Text | Annotated[list[TextOnly], Field(min_length=1, fail_fast=True), Tag("list")], TEXT_OR_LIST]


class RequestMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Texts | None = None
    """Only an assistant that called tools may have said nothing."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """What the assistant called."""
    tool_call_id: str | None = None
    """The call whose result a message of role `tool` is."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> "RequestMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: only an assistant calls tools, not {self.role!r}")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: only an assistant with tool_calls may leave it out")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id: a message of role 'tool' has one, and no other")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message for a chat template; the role `developer` becomes `system`, as at OpenAI."""
        role = "system" if self.role == "developer" else self.role
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        called = {"tool_calls": [call.model_dump() for call in self.tool_calls]} if self.tool_calls else {}
        answered = {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return {"role": role, "content": text or "", **called, **answered}
