"""The items of a response's `input`, and the same as messages of OpenAI's chat."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from omnidraft.serving.strict_model import TEXT_OR_LIST, DirectCaller, StrictModel, Text, refuse_kinds

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


def _refuse_unknown(value: Any) -> Any:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("message", "function_call", "function_call_output"):
        raise ValueError(f"an item of type {kind!r} is not taken: send messages, calls of functions and their outputs")
    return value


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return str(kind) if kind in ("function_call", "function_call_output") else "message"


InputItem = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionResultItem, Tag("function_call_output")],
        Discriminator(_kind),
    ],
    BeforeValidator(_refuse_unknown),
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
