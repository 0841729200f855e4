"""The parts of a chat request and of its answer that are about tools, in OpenAI's shape."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag

from omnidraft.serving.strict_model import TEXT_OR_OBJECT, JsonObject, StrictModel
from omnidraft.tools.tool_use import MAX_TOOLS, NAME_PATTERN, Choice, Tool, ToolUse


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

    def tool(self) -> Tool:
        """Return the tool. Its schema is checked when it is offered."""
        function = self.function
        return Tool(function.name, function.description, function.parameters, bool(function.strict))


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


def tool_use(tools: list[ToolDefinition] | None, choice: ToolChoice | None, *, is_parallel: bool) -> ToolUse | None:
    """Return what a request says about tools; None where it offers none. Raises RequestError."""
    if not tools:
        return None
    offered = tuple(each.tool() for each in tools)
    if isinstance(choice, NamedToolChoice):
        return ToolUse(offered, named=choice.function.name, is_parallel=False)
    return ToolUse(offered, choice or "auto", is_parallel=is_parallel)


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


def _refuse_deprecated(value: Any) -> None:
    if value is not None:
        raise ValueError("`functions` and `function_call` are deprecated; send `tools` and `tool_choice`")


Deprecated = Annotated[None, BeforeValidator(_refuse_deprecated)]
