"""The parts of requests to OpenAI's API: messages, tools, the form of the answer; and the calls in answers."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from omnidraft.errors import RequestError
from omnidraft.params import Grammar, given_grammar
from omnidraft.serving.body_model import BodyModel, ExactModel, JsonObject, Texts, only, refuse
from omnidraft.tools.tool_use import MAX_TOOLS, NAME_PATTERN, Choice, ToolUse, tool_use

MAX_CHOICES_OF_TEXT = 1_000


class FunctionDefinition(BodyModel):
    model_config = ConfigDict(use_attribute_docstrings=True)
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: JsonObject | None = Field(None, validation_alias=AliasChoices("parameters", "input_schema"))
    """The JSON schema of the arguments, an object's."""
    strict: bool | None = None
    """Whether arguments always match the schema; where a call is required they do anyway, if it can be compiled."""


class ToolDefinition(BodyModel):
    """A function that may be called, in the shape of any API: Responses and Messages have no `function` around it."""

    type: Literal["function"] = "function"
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _as_in_chats(cls, value: Any) -> Any:
        is_flat = isinstance(value, dict) and "function" not in value
        return {"function": {name: each for name, each in value.items() if name != "type"}} if is_flat else value

    def flat(self) -> dict[str, Any]:
        """Return the tool as in Responses."""
        return {"type": self.type, **self.function.model_dump()}


ToolList = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]
Tools = Annotated[ToolList, only("tools", None, "function")]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What an answer has to do with the tools."""

    mode: Choice = "auto"
    name: str | None = None
    """The only tool that may be called, and that is called."""
    allowed: tuple[str, ...] | None = None
    """The tools that may be called; None: all."""
    is_parallel: bool = True

    def shown(self) -> str | dict[str, str]:
        """Return the choice as in Responses."""
        return self.mode if self.name is None else {"type": "function", "name": self.name}


def _chosen(value: Any) -> Any:
    """Return the fields of a choice, which has the shape of any API. Raises ValueError."""
    match value:
        case Chosen():
            return value
        case str():
            return {"mode": _MODES.get(value, value)}
        case {"type": "function" | "tool"}:
            return {"mode": "required", "name": _name(value), "is_parallel": False}
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*tools]} as inner} | (
            {"type": "allowed_tools", "tools": [*tools]} as inner
        ):
            return {"mode": inner.get("mode", "auto"), "allowed": tuple(map(_name, tools))}
        case {"type": "auto" | "any" | "none" as mode}:
            return {"mode": _MODES.get(mode, mode), "is_parallel": not value.get("disable_parallel_tool_use")}
    raise ValueError("it is auto, none, required, a tool by its name, or allowed_tools with a list of tools")


_MODES = {"any": "required"}


def _name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool in the shape of any API. Raises ValueError."""
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise ValueError("a tool is given by its `name`")


ToolChoice = Annotated[Chosen, BeforeValidator(_chosen, json_schema_input_type=Choice | JsonObject)]


def tools_offered(tools: list[ToolDefinition] | None, choice: Chosen, *, is_parallel: bool) -> ToolUse | None:
    """Return what a request says about tools; None where it offers none. Raises RequestError."""
    if not tools:
        return None
    offered = [each.model_dump() for each in tools if choice.allowed is None or each.function.name in choice.allowed]
    named = {"type": "function", "function": {"name": choice.name}}
    return tool_use(offered, named if choice.name else choice.mode, is_parallel=is_parallel and choice.is_parallel)


Arguments = Annotated[str, BeforeValidator(lambda given: given if isinstance(given, str) else json.dumps(given or {}))]
"""A JSON object; a model that is not held to it may write something else, and clients send objects as they are."""


class FunctionCall(BaseModel):
    name: str
    arguments: Arguments = ""


class ToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


DEPRECATED = "`functions` and `function_call` are deprecated; send `tools` and `tool_choice`"
Deprecated = Annotated[None, refuse(lambda value: value is not None, DEPRECATED)]


class RequestMessage(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Texts = ""
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
        message: dict[str, Any] = {"role": role, "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if role == "tool":
            message["tool_call_id"] = self.tool_call_id or ""
        return message


class JsonSchema(ExactModel):
    """A schema that the answer is always kept to, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject = Field(alias="schema")


class ResponseFormat(JsonSchema):
    """The form of an answer; chats wrap the schema, and llama.cpp and all other APIs do not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: JsonObject | None = Field(None, alias="schema")  # type: ignore[assignment]

    def grammar(self) -> Grammar | None:
        """Return what the answer keeps to. Raises RequestError."""
        if self.type == "text":
            return None
        schema = (self.json_schema or self).schema_
        if self.type == "json_schema" and schema is None:
            raise RequestError("a format of type json_schema has a schema")
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


GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
GUIDED |= {"regex": "regex", "json_schema": "json"}
"""vLLM's earlier names and those of SGLang and llama.cpp, and those of StructuredOutputs."""
