"""Request bodies of OpenAI's Responses API, and their translation into chat requests."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, Tag

from omnidraft.params import require_text
from omnidraft.serving.body_model import (
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    BodyModel,
    JsonObject,
    Text,
    ignore,
    kind_of,
    one_of,
    plain_text,
    refuse,
    refuse_kinds,
    with_sampling,
)
from omnidraft.serving.generation_fields import MaxTokens, OpenAIFields
from omnidraft.serving.request_parts import FunctionDefinition, FunctionName, only_tools
from omnidraft.serving.request_schemas import ChatRequest, chat_request, same_fields
from omnidraft.tools.messages import strings_of
from omnidraft.tools.tool_use import MAX_TOOLS, Choice


class InputText(BodyModel):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = Field("", validation_alias=AliasChoices("text", "refusal"))


TextOnly = Annotated[InputText, refuse_kinds("input_image", "input_file", "input_audio")]
Texts = Annotated[Text | Annotated[list[TextOnly], Field(fail_fast=True), Tag("list")], TEXT_OR_LIST]


class MessageItem(BodyModel):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class FunctionCallItem(BodyModel):
    """A call that an earlier response made; that of a custom tool has an `input` that is no JSON."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    arguments: str = ""
    input: str = ""


class FunctionResultItem(BodyModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Texts


class ReasoningItem(BodyModel):
    """A thought of the assistant."""

    type: Literal["reasoning"]
    content: list[InputText] | None = None
    summary: list[InputText] = Field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


Item = MessageItem | FunctionCallItem | FunctionResultItem | ReasoningItem
_ITEM_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


def _known_items(items: Any) -> Any:
    """Leave out items of other types: what a hosted tool did, references to what is kept elsewhere."""
    if not isinstance(items, list):
        return items
    for index, item in enumerate(items):
        if isinstance(item, dict) and kind_of(item) not in (None, *_ITEM_KINDS):
            ignore(f"input.{index} ({kind_of(item)})")
    return [item for item in items if not isinstance(item, dict) or kind_of(item) in (None, *_ITEM_KINDS)]


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallItem, Tag("custom_tool_call")]
    | Annotated[FunctionResultItem, Tag("function_call_output")]
    | Annotated[FunctionResultItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    one_of(*_ITEM_KINDS),
]


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the items as messages. Calls belong to the message of the assistant before them, if there is one, and
    thoughts to the one behind them."""
    messages: list[dict[str, Any]] = []
    thoughts: dict[str, str] = {}
    for item in items:
        match item:
            case ReasoningItem():
                thoughts = {"reasoning_content": item.text} if item.text else {}
            case MessageItem():
                said = thoughts if item.role == "assistant" else {}
                messages.append({"role": item.role, "content": plain_text(item.content), **said})
                thoughts = {}
            case FunctionResultItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": plain_text(item.output)})
            case FunctionCallItem():
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None, **thoughts})
                    thoughts = {}
                is_custom = item.type == "custom_tool_call"
                function = {"name": item.name, "arguments": {"input": item.input} if is_custom else item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


class FunctionTool(FunctionDefinition):
    type: Literal["function"]

    def chat_tool(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class NamedFunction(FunctionName):
    type: Literal["function"]


class TextFormat(BodyModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    """The schema of type json_schema; it is always kept to, whatever `strict` says."""

    def chat_format(self) -> dict[str, Any]:
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextConfig(BodyModel):
    format: TextFormat | None = None


class Reasoning(BodyModel):
    effort: str | None = None
    """It reaches the chat template."""


STATELESS = "the server is stateless and keeps no response: send the whole conversation as `input`"


ECHOED = {"instructions", "metadata", "text", "tool_choice", "tools"}
"""Fields that the response tells back, so that their strings must be text."""

State = Annotated[None, refuse(lambda value: value is not None, STATELESS)]


@with_sampling("responses")
class ResponsesRequest(OpenAIFields):
    input: Annotated[
        Text
        | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), BeforeValidator(_known_items), Tag("list")],
        TEXT_OR_LIST,
    ]
    instructions: str | None = None
    """A message of the system before all others."""
    max_output_tokens: MaxTokens = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True), only_tools("function")] | None = (
        None
    )
    reasoning: Reasoning | None = None
    tool_choice: (
        Annotated[Annotated[Choice, Tag("text")] | Annotated[NamedFunction, Tag("object")], TEXT_OR_OBJECT] | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    """The format of the answer."""
    previous_response_id: State = None
    conversation: State = None
    store: Annotated[Literal[False] | None, refuse(lambda value: value is True, STATELESS)] = None
    """False keeps the request out of the traces the drafter learns from. No response is kept in any case."""
    background: Annotated[
        Literal[False] | None,
        refuse(lambda value: value is True, "there are no background responses: ask with stream: true"),
    ] = None

    def chat_request(self) -> ChatRequest:
        """Return the same as a chat request. Raises RequestError."""
        require_text({name: strings_of(value) for name, value in self.model_dump(include=ECHOED).items()})
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else chat_messages(self.input)
        if self.instructions:
            items.insert(0, {"role": "system", "content": self.instructions})
        form = self.text.format if self.text else None
        return chat_request(
            {
                **same_fields(self, OpenAIFields),
                "messages": items,
                "max_completion_tokens": self.max_output_tokens,
                "tools": [tool.chat_tool() for tool in self.tools or ()] or None,
                "tool_choice": self._chat_choice(),
                "response_format": None if form is None else form.chat_format(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            }
        )

    def _chat_choice(self) -> Any:
        if isinstance(self.tool_choice, NamedFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice
