"""The content blocks of Anthropic's messages, and the same as messages of OpenAI's chat."""

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from omnidraft.serving.strict_model import TEXT_OR_LIST, DirectCaller, JsonObject, StrictModel, Text, refuse_kinds


class CacheControl(StrictModel):
    """It is taken and changes nothing: the keys of a common beginning are reused without being asked for."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ToolUseBlock(StrictModel):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    """What Anthropic's client adds to a block; there are no programs and toolsets here."""
    toolset_name: None = None

    def chat_call(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


TextOnly = Annotated[TextBlock, refuse_kinds("image", "document", "search_result", "container_upload")]
Texts = Annotated[Text | Annotated[list[TextOnly], Field(fail_fast=True), Tag("list")], TEXT_OR_LIST]


class ToolResultBlock(StrictModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""
    is_error: bool | None = None
    """The model reads the content of an error as it reads any other."""
    cache_control: CacheControl | None = None
    toolset_name: None = None


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return str(kind) if kind in ("tool_use", "tool_result") else "text"


ContentBlock = Annotated[
    Annotated[TextOnly, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind),
]


class InputMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Text | Annotated[list[ContentBlock], Field(min_length=1, fail_fast=True), Tag("list")], TEXT_OR_LIST
    ]

    @model_validator(mode="after")
    def _fits_its_role(self) -> "InputMessage":
        for index, block in enumerate(self.blocks):
            if isinstance(block, ToolUseBlock) and self.role != "assistant":
                raise ValueError(f"content.{index}: only an assistant uses tools, not {self.role!r}")
            if isinstance(block, ToolResultBlock) and self.role != "user":
                raise ValueError(f"content.{index}: results of tools are messages of the user, not of {self.role!r}")
        return self

    @property
    def blocks(self) -> list[TextBlock | ToolUseBlock | ToolResultBlock]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)

    def chat_messages(self) -> list[dict[str, Any]]:
        """Return the same as messages of a chat: results first, each a message of its own, then text and calls."""
        results = [block for block in self.blocks if isinstance(block, ToolResultBlock)]
        calls = [block.chat_call() for block in self.blocks if isinstance(block, ToolUseBlock)]
        texts = [block.text for block in self.blocks if isinstance(block, TextBlock)]
        answered = [
            {"role": "tool", "tool_call_id": each.tool_use_id, "content": plain_text(each.content)} for each in results
        ]
        if not texts and not calls:
            return answered
        said: dict[str, Any] = {"role": self.role, "content": "".join(texts) if texts else None}
        return [*answered, said | ({"tool_calls": calls} if calls else {})]


def plain_text(content: str | list[TextBlock]) -> str:
    """Return the text of a text or of blocks of it."""
    return content if isinstance(content, str) else "".join(block.text for block in content)
