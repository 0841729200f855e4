"""The parts of requests to OpenAI's API: messages, tools, the form of the answer; and the calls in answers."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, Tag, model_validator

from omnidraft.errors import RequestError
from omnidraft.params import Grammar, given_grammar
from omnidraft.serving.body_model import (
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    BodyModel,
    ExactModel,
    JsonObject,
    Text,
    ignore,
    kind_of,
    one_of,
    plain_text,
    refuse,
    refuse_kinds,
)
from omnidraft.tools.tool_use import MAX_TOOLS, NAME_PATTERN, Choice, ToolUse, tool_use

MAX_CHOICES_OF_TEXT = 1_000


class FunctionDefinition(BodyModel):
    model_config = ConfigDict(use_attribute_docstrings=True)
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: JsonObject | None = None
    """The JSON schema of the arguments, an object's."""
    strict: bool | None = None
    """Whether arguments always match the schema; where a call is required they do anyway, if it can be compiled."""


class ToolDefinition(BodyModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


def only_tools(*kinds: str | None) -> BeforeValidator:
    """Return an annotation of a list of tools that leaves out those of other types: nobody runs them here."""

    def kept(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        for index, tool in enumerate(tools):
            if isinstance(tool, dict) and kind_of(tool) not in kinds:
                ignore(f"tools.{index} ({kind_of(tool)})")
        return [tool for tool in tools if not isinstance(tool, dict) or kind_of(tool) in kinds]

    return BeforeValidator(kept)


class FunctionName(BodyModel):
    name: str


class NamedToolChoice(BodyModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(BodyModel):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]


class AllowedToolChoice(BodyModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> set[str]:
        return {each.get("function", each).get("name") for each in self.allowed_tools.tools}


Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True), only_tools(None, "function")]
ToolChoice = Annotated[
    Annotated[Choice, BeforeValidator(lambda choice: "required" if choice == "any" else choice), Tag("text")]
    | Annotated[
        Annotated[NamedToolChoice, Tag("function")] | Annotated[AllowedToolChoice, Tag("allowed_tools")],
        one_of("function", "allowed_tools"),
        Tag("object"),
    ],
    TEXT_OR_OBJECT,
]


def tools_offered(
    tools: list[ToolDefinition] | None, choice: ToolChoice | None, *, is_parallel: bool
) -> ToolUse | None:
    """Return what a request says about tools; None where it offers none. Raises RequestError."""
    if not tools:
        return None
    if isinstance(choice, AllowedToolChoice):
        tools = [each for each in tools if each.function.name in choice.names]
        choice = choice.allowed_tools.mode
    named = choice.model_dump() if isinstance(choice, NamedToolChoice) else choice
    return tool_use([each.model_dump() for each in tools], named, is_parallel=is_parallel)


Arguments = Annotated[
    str,
    BeforeValidator(lambda given: given if isinstance(given, str) else json.dumps({} if given is None else given)),
]
"""A JSON object; a model that is not held to it may write something else, and clients send objects as they are."""


class FunctionCall(BaseModel):
    name: str
    arguments: Arguments = ""


class ToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


Deprecated = Annotated[
    None,
    refuse(
        lambda value: value is not None,
        "`functions` and `function_call` are deprecated; send `tools` and `tool_choice`",
    ),
]


class TextPart(BodyModel):
    """A part of a message that is text, whatever its type is called."""

    type: str = "text"
    text: str = Field("", validation_alias=AliasChoices("text", "refusal", "content"))


TextOnly = Annotated[
    TextPart, refuse_kinds("image_url", "input_image", "image", "input_audio", "file", "audio_url", "video_url")
]
Texts = Annotated[Text | Annotated[list[TextOnly], Field(fail_fast=True), Tag("list")], TEXT_OR_LIST]


class RequestMessage(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Texts | None = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    """What the assistant thought, for templates that read it."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    """What the assistant called."""
    tool_call_id: str | None = None
    """The call whose result a message of role `tool` is."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> "RequestMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: only an assistant calls tools, not {self.role!r}")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message for a chat template; the role `developer` becomes `system`, as at OpenAI."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": plain_text(self.content)}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if role == "tool":
            message["tool_call_id"] = self.tool_call_id or ""
        return message


class JsonSchema(ExactModel):
    """OpenAI's wrapping; the schema is always kept to, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject = Field(alias="schema")


class ResponseFormat(ExactModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    """llama.cpp's way to give a schema."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None) and self.schema_ is None:
            raise ValueError("json_schema is given with type json_schema, and only then")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else self.schema_
        return Grammar("json_schema", json.dumps({"type": "object"} if schema is None else schema))


class StructuredOutputs(ExactModel):
    """vLLM's own way to ask for a grammar: one of these."""

    regex: str | None = None
    json_: JsonObject | str | None = Field(None, alias="json")
    json_object: bool | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES_OF_TEXT)] | None = None
    grammar_: str | None = Field(None, alias="grammar")
    """In llguidance's language, a dialect of Lark."""

    def grammar(self) -> Grammar | None:
        choices = None if self.choice is None else "|".join(map(re.escape, self.choice))
        schema = {"type": "object"} if self.json_object and self.json_ is None else self.json_
        if sum(each is not None for each in (self.regex, schema, choices, self.grammar_)) > 1:
            raise RequestError("structured_outputs: give one of regex, json, json_object, choice and grammar")
        if self.grammar_ is not None:
            return Grammar("lark", self.grammar_)
        return given_grammar(schema, self.regex if choices is None else choices)


GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "json_schema": "json",
}
"""vLLM's earlier names and those of SGLang and llama.cpp, and those of StructuredOutputs."""
