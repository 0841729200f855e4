"""Request bodies of OpenAI's Responses API, and their translation into chat requests.

As everywhere here, a field without a counterpart is refused by name, or taken with the values that change nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from omnidraft.params import require_text
from omnidraft.serving.request_parts import FunctionDefinition, FunctionName
from omnidraft.serving.request_schemas import (
    NULL_OF_OPENAI,
    ChatRequest,
    MaxTokens,
    OpenAIFields,
    chat_request,
    same_fields,
)
from omnidraft.serving.strict_model import (
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    DirectCaller,
    JsonObject,
    StrictModel,
    Text,
    kind_of,
    one_of,
    refuse,
    refuse_kinds,
    with_null,
    with_sampling,
)
from omnidraft.tools.messages import strings_of
from omnidraft.tools.tool_use import MAX_TOOLS, Choice

_ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(StrictModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    """Of an `output_text` that an earlier response wrote; there are none here."""
    logprobs: list[Any] | None = None
    parsed: Any = None
    """What `responses.parse` and `responses.stream` of OpenAI's client add to an answer."""


TextOnly = Annotated[InputText, refuse_kinds("input_image", "input_file", "input_audio")]
Texts = Annotated[Text | Annotated[list[TextOnly], Field(fail_fast=True), Tag("list")], TEXT_OR_LIST]


class MessageItem(StrictModel):
    """A message; those of earlier responses carry an id and a status."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    id: str | None = None
    status: _ItemStatus | None = None
    phase: str | None = None


class FunctionCallItem(StrictModel):
    """A call that an earlier response made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None
    """Likewise."""
    id: str | None = None
    status: _ItemStatus | None = None
    caller: DirectCaller | None = None
    """What OpenAI's client adds to an item; there are no programs and namespaces here."""
    namespace: None = None


class FunctionResultItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    id: str | None = None
    status: _ItemStatus | None = None
    caller: DirectCaller | None = None
    """Likewise."""
    name: None = None
    namespace: None = None


_ITEM_KINDS = ("message", "function_call", "function_call_output")
InputItem = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionResultItem, Tag("function_call_output")],
        one_of(*_ITEM_KINDS),
    ],
    refuse(
        lambda value: kind_of(value) not in (None, *_ITEM_KINDS),
        "an item of type {kind} is not taken: send messages, calls of functions and their outputs",
    ),
]


def chat_messages(items: Sequence[MessageItem | FunctionCallItem | FunctionResultItem]) -> list[dict[str, Any]]:
    """Return the items as messages. Calls belong to the message of the assistant before them, if there is one."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem():
                messages.append({"role": item.role, "content": _plain(item.content)})
            case FunctionResultItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _plain(item.output)})
            case FunctionCallItem():
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _plain(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionTool(FunctionDefinition):
    type: Literal["function"]

    def chat_tool(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class NamedFunction(FunctionName):
    type: Literal["function"]


class TextFormat(StrictModel):
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


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """It is taken and changes nothing."""


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = None
    """It is taken and changes nothing: events are not padded."""


STATELESS = "the server is stateless and keeps no response: send the whole conversation as `input`"


ECHOED = {"instructions", "metadata", "text", "tool_choice", "tools"}
"""Fields that the response tells back, so that their strings must be text."""

State = Annotated[None, refuse(lambda value: value is not None, STATELESS)]


@with_null("reasoning", "prompt", "max_tool_calls", "context_management", *NULL_OF_OPENAI)
@with_sampling("responses")
class ResponsesRequest(OpenAIFields):
    input: Annotated[Text | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("list")], TEXT_OR_LIST]
    instructions: str | None = None
    """A message of the system before all others."""
    max_output_tokens: MaxTokens = None
    tools: (
        Annotated[
            list[
                Annotated[
                    FunctionTool,
                    refuse(
                        lambda value: isinstance(value, dict) and value.get("type") != "function",
                        "tools of type {kind} are not run here; offer functions",
                    ),
                ]
            ],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[Annotated[Choice, Tag("text")] | Annotated[NamedFunction, Tag("object")], TEXT_OR_OBJECT] | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    """The format of the answer."""
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = None
    """The models here write no reasoning, so there is none to include."""
    top_logprobs: Literal[0] | None = None
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
            }
        )

    def _chat_choice(self) -> Any:
        if isinstance(self.tool_choice, NamedFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice
