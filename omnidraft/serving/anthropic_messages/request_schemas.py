"""Request bodies of Anthropic's Messages API, and their translation into chat requests."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag, model_validator

from omnidraft.params import MAX_COUNT
from omnidraft.serving.body_model import (
    TEXT_OR_LIST,
    BodyModel,
    JsonObject,
    RequestFields,
    Text,
    one_of,
    plain_text,
    refuse_kinds,
    with_sampling,
)
from omnidraft.serving.generation_fields import MAX_STOPS, MAX_USER_CHARACTERS, NO_ZERO_BYTE, Prediction
from omnidraft.serving.request_parts import only_tools
from omnidraft.serving.request_schemas import ChatRequest, chat_request, same_fields
from omnidraft.tools.tool_use import MAX_TOOLS, NAME_PATTERN


class TextBlock(BodyModel):
    type: Literal["text"]
    text: str


class ToolUseBlock(BodyModel):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject

    def chat_call(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


class ThinkingBlock(BodyModel):
    """A thought of the assistant."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


TextOnly = Annotated[TextBlock, refuse_kinds("image", "document", "search_result", "container_upload")]
Texts = Annotated[Text | Annotated[list[TextOnly], Field(fail_fast=True), Tag("list")], TEXT_OR_LIST]


class ToolResultBlock(BodyModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""


ContentBlock = Annotated[
    Annotated[TextOnly, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ThinkingBlock, Tag("redacted_thinking")],
    one_of("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]


class InputMessage(BodyModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[list[ContentBlock], Field(fail_fast=True), Tag("list")], TEXT_OR_LIST]

    @model_validator(mode="after")
    def _fits_its_role(self) -> "InputMessage":
        for index, block in enumerate(self.blocks):
            if isinstance(block, ToolUseBlock) and self.role != "assistant":
                raise ValueError(f"content.{index}: only an assistant uses tools, not {self.role!r}")
            if isinstance(block, ToolResultBlock) and self.role != "user":
                raise ValueError(f"content.{index}: results of tools are messages of the user, not of {self.role!r}")
        return self

    @property
    def blocks(self) -> list[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)

    def chat_messages(self) -> list[dict[str, Any]]:
        """Return the same as messages of a chat: results first, each a message of its own, then text and calls."""
        results = [block for block in self.blocks if isinstance(block, ToolResultBlock)]
        calls = [block.chat_call() for block in self.blocks if isinstance(block, ToolUseBlock)]
        texts = [block.text for block in self.blocks if isinstance(block, TextBlock)]
        thoughts = "".join(block.thinking for block in self.blocks if isinstance(block, ThinkingBlock))
        answered = [
            {"role": "tool", "tool_call_id": each.tool_use_id, "content": plain_text(each.content)} for each in results
        ]
        if not texts and not calls:
            return answered
        said: dict[str, Any] = {"role": self.role, "content": "".join(texts) if texts else None}
        if thoughts:
            said["reasoning_content"] = thoughts
        return [*answered, said | ({"tool_calls": calls} if calls else {})]


class ToolParam(BodyModel):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    input_schema: JsonObject
    """The JSON schema of the arguments, an object's."""
    strict: bool | None = None

    def chat_tool(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**function, "strict": self.strict}}


class ToolChoiceParam(BodyModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool of type `tool`."""
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_its_name(self) -> "ToolChoiceParam":
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("name is given with type tool, and only then")
        return self

    def chat_choice(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class JsonFormat(BodyModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(BodyModel):
    format: JsonFormat | None = None
    """The answer is JSON that matches a schema."""
    effort: str | None = None
    """It reaches the chat template."""


class Metadata(BodyModel):
    user_id: str | None = Field(None, max_length=MAX_USER_CHARACTERS, pattern=NO_ZERO_BYTE)
    """Whose the request is, unless the API key says it: `user` of a chat request."""


class Thinking(BodyModel):
    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    """The tokens of thoughts after which the model has to answer."""


Tools = Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True), only_tools(None, "custom")]


class CountTokensRequest(BodyModel):
    """The fields that make the prompt."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None

    def chat_request(self) -> ChatRequest:
        """Return the same as a chat request. Raises RequestError."""
        return chat_request(self._chat_fields())

    def _chat_fields(self) -> Mapping[str, Any]:
        messages = [each for message in self.messages for each in message.chat_messages()]
        if plain_text(self.system):
            messages.insert(0, {"role": "system", "content": self.model_dump(include={"system"})["system"]})
        choice = self.tool_choice
        return {
            "model": self.model,
            "messages": messages,
            "tools": [tool.chat_tool() for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.chat_choice(),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "response_format": self._response_format(),
            "continue_final_message": self.messages[-1].role == "assistant",
            "reasoning_effort": self.output_config.effort if self.output_config else None,
            "thinking_token_budget": self.thinking.budget_tokens if self.thinking else None,
            "chat_template_kwargs": {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else None,
        }

    def _response_format(self) -> dict[str, Any] | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        return {"type": "json_schema", "json_schema": {"schema": self.output_config.format.schema_}}


@with_sampling("messages")
class MessagesRequest(CountTokensRequest, RequestFields):
    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    metadata: Metadata | None = None
    prediction: Prediction | None = None
    """What the answer will probably be: an extension of ours."""
    thread: Any = None
    """Conversations are not kept here: a thread is refused in the way that lets Anthropic's client send them whole."""

    def _chat_fields(self) -> Mapping[str, Any]:
        return {
            **super()._chat_fields(),
            **same_fields(self, RequestFields),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "prediction": self.prediction,
            "user": self.metadata.user_id if self.metadata else None,
        }
