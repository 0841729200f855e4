"""Request bodies of Anthropic's Messages API, and their translation into chat requests.

As everywhere here, a field without a counterpart is refused by name, or taken with the values that change nothing.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag, model_validator

from omnidraft.params import MAX_COUNT
from omnidraft.serving.request_schemas import (
    MAX_STOPS,
    MAX_USER_CHARACTERS,
    NO_ZERO_BYTE,
    ChatRequest,
    chat_request,
    same_fields,
)
from omnidraft.serving.strict_model import (
    TEXT_OR_LIST,
    DirectCaller,
    JsonObject,
    RequestFields,
    StrictModel,
    Text,
    kind_of,
    one_of,
    refuse,
    refuse_kinds,
    with_null,
    with_sampling,
)
from omnidraft.tools.tool_use import MAX_TOOLS, NAME_PATTERN


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


ContentBlock = Annotated[
    Annotated[TextOnly, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    one_of("text", "tool_use", "tool_result"),
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


class ToolParam(StrictModel):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    input_schema: JsonObject
    """The JSON schema of the arguments, an object's."""
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def chat_tool(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**function, "strict": self.strict}}


class ToolChoiceParam(StrictModel):
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


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(StrictModel):
    format: JsonFormat | None = None
    """The answer is JSON that matches a schema."""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """It is taken and changes nothing: the models here do not think first."""


class Metadata(StrictModel):
    user_id: str | None = Field(None, max_length=MAX_USER_CHARACTERS, pattern=NO_ZERO_BYTE)
    """Whose the request is, unless the API key says it: `user` of a chat request."""


class Thinking(StrictModel):
    type: Literal["disabled"]


Tools = Annotated[
    list[
        Annotated[
            ToolParam,
            refuse(
                lambda value: kind_of(value) not in (None, "custom"),
                "there are no server tools such as {kind} here; offer tools of your own",
            ),
        ]
    ],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


class CountTokensRequest(StrictModel):
    """The fields that make the prompt."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> "CountTokensRequest":
        if self.messages[-1].role == "assistant":
            raise ValueError(
                "messages: the last one is the assistant's, and answers cannot be begun for the model here"
            )
        return self

    def chat_request(self) -> ChatRequest:
        """Return the same as a chat request. Raises RequestError."""
        return chat_request(self._chat_fields())

    def _chat_fields(self) -> Mapping[str, Any]:
        messages = [each for message in self.messages for each in message.chat_messages()]
        if system := plain_text(self.system or ""):
            messages.insert(0, {"role": "system", "content": system})
        choice = self.tool_choice
        return {
            "model": self.model,
            "messages": messages,
            "tools": [tool.chat_tool() for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.chat_choice(),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "response_format": self._response_format(),
        }

    def _response_format(self) -> dict[str, Any] | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        return {"type": "json_schema", "json_schema": {"schema": self.output_config.format.schema_}}


@with_null("container", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id")
@with_sampling("messages")
class MessagesRequest(CountTokensRequest, RequestFields):
    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: Any = None
    """Conversations are not kept here: a thread is refused in the way that lets Anthropic's client send them whole."""

    def _chat_fields(self) -> Mapping[str, Any]:
        return {
            **super()._chat_fields(),
            **same_fields(self, RequestFields),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "user": self.metadata.user_id if self.metadata else None,
        }
