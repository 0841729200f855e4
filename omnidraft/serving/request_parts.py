"""The parts of requests to OpenAI's API: messages, tools, the form of the answer; and the calls in answers."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag, model_validator

from omnidraft.params import Grammar, given_grammar
from omnidraft.serving.strict_model import (
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    JsonObject,
    StrictModel,
    Text,
    refuse,
    refuse_kinds,
)
from omnidraft.tools.tool_use import MAX_TOOLS, NAME_PATTERN, Choice, ToolUse, tool_use


class FunctionDefinition(StrictModel):
    model_config = ConfigDict(use_attribute_docstrings=True)
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: JsonObject | None = None
    """The JSON schema of the arguments, an object's."""
    strict: bool | None = None
    """Whether arguments always match the schema; where a call is required they do anyway, if it can be compiled."""


class ToolDefinition(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Annotated[Choice, Tag("text")] | Annotated[NamedToolChoice, Tag("object")],
    TEXT_OR_OBJECT,
]


def tools_offered(
    tools: list[ToolDefinition] | None, choice: ToolChoice | None, *, is_parallel: bool
) -> ToolUse | None:
    """Return what a request says about tools; None where it offers none. Raises RequestError."""
    if not tools:
        return None
    named = choice.model_dump() if isinstance(choice, NamedToolChoice) else choice
    return tool_use([each.model_dump() for each in tools], named, is_parallel=is_parallel)


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    name: str
    arguments: str
    """A JSON object; a model that is not held to it may write something else."""


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(BaseModel):
    name: str | None = None
    """It is set in the first delta of a call."""
    arguments: str


class ToolCallDelta(BaseModel):
    """The part of a call that a chunk adds; id, type and name are set in the first delta of the call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


Deprecated = Annotated[
    None,
    refuse(
        lambda value: value is not None,
        "`functions` and `function_call` are deprecated; send `tools` and `tool_choice`",
    ),
]


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


class JsonSchema(StrictModel):
    """OpenAI's wrapping; the schema is always kept to, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject = Field(alias="schema")


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type json_schema, and only then")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return Grammar("json_schema", json.dumps(self.json_schema.schema_ if self.json_schema else {"type": "object"}))


class StructuredOutputs(StrictModel):
    """vLLM's own way to ask for a grammar."""

    regex: str | None = None
    json_: JsonObject | None = Field(None, alias="json")

    def grammar(self) -> Grammar | None:
        return given_grammar(self.json_, self.regex, "structured_outputs: give either regex or json")
