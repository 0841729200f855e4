"""Request bodies of OpenAI's Responses API, and their translation into chat requests."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from omnidraft.params import require_text
from omnidraft.serving.body_model import BodyModel, Texts, as_list, only, refuse, with_sampling
from omnidraft.serving.generation_fields import MaxTokens, OpenAIFields
from omnidraft.serving.request_parts import Chosen, ResponseFormat, ToolChoice, Tools
from omnidraft.serving.request_schemas import ChatRequest, chat_request, same_fields
from omnidraft.tools.messages import strings_of

KINDS = (
    "message", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output", "reasoning",
)  # fmt: skip


class InputItem(BodyModel):
    """A message, a call that an earlier response made, its result, or a thought."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Texts = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""
    """Of a custom tool's call, and no JSON."""
    output: Texts = ""
    summary: Texts = ""


def chat_messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the items as messages. Calls belong to the message of the assistant before them, if there is one, and
    thoughts to the one behind them."""
    messages: list[dict[str, Any]] = []
    thoughts: dict[str, str] = {}
    for item in items:
        match item.type:
            case "reasoning":
                thoughts = {"reasoning_content": item.content or item.summary}
            case "message":
                messages.append({"role": item.role, "content": item.content})
                messages[-1] |= thoughts if item.role == "assistant" else {}
                thoughts = {}
            case "function_call_output" | "custom_tool_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            case "function_call" | "custom_tool_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", **thoughts})
                    thoughts = {}
                arguments = {"input": item.input} if item.type == "custom_tool_call" else item.arguments
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


class TextConfig(BodyModel):
    format: ResponseFormat = ResponseFormat(type="text")


class Reasoning(BodyModel):
    effort: str | None = None
    """It reaches the chat template."""


STATELESS = "the server is stateless and keeps no response: send the whole conversation as `input`"
State = Annotated[None, refuse(lambda value: value is not None, STATELESS)]
ECHOED = {"instructions", "metadata", "text", "tool_choice", "tools"}
"""Fields that the response tells back, so that their strings must be text."""


@with_sampling("responses")
class ResponsesRequest(OpenAIFields):
    input: Annotated[
        list[InputItem],
        Field(min_length=1, fail_fast=True),
        only("input", None, *KINDS),
        as_list(str | list[InputItem], lambda text: {"role": "user", "content": text}),
    ]
    instructions: str | None = None
    """A message of the system before all others."""
    max_output_tokens: MaxTokens = None
    tools: Tools | None = None
    reasoning: Reasoning = Reasoning()
    tool_choice: ToolChoice = Chosen()
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    """The format of the answer."""
    previous_response_id: State = None
    conversation: State = None
    background: Annotated[bool, refuse(bool, "there are no background responses: ask with stream: true")] = False

    def chat_request(self) -> ChatRequest:
        """Return the same as a chat request. Raises RequestError."""
        require_text({name: strings_of(value) for name, value in self.model_dump(include=ECHOED).items()})
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return chat_request(
            {
                **same_fields(self, OpenAIFields),
                "messages": [*system, *chat_messages(self.input)],
                "max_completion_tokens": self.max_output_tokens,
                "tools": self.tools,
                "tool_choice": self.tool_choice,
                "response_format": self.text.format,
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": self.reasoning.effort,
            }
        )
