"""Request bodies of Anthropic's Messages API, and their translation into chat requests."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from omnidraft.params import MAX_COUNT
from omnidraft.serving.body_model import (
    BodyModel,
    JsonObject,
    RequestFields,
    Texts,
    as_list,
    ignore,
    only,
    with_sampling,
)
from omnidraft.serving.generation_fields import MAX_STOPS, Prediction
from omnidraft.serving.request_parts import Chosen, ResponseFormat, ToolChoice, ToolList
from omnidraft.serving.request_schemas import ChatRequest, chat_request, same_fields

BILLING = "x-anthropic-billing-header:"
"""How coding agents begin a block that differs from call to call, before thousands of tokens that do not."""


KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class ContentBlock(BodyModel):
    """A text, a thought, a call of a tool by the assistant, or the result of one."""

    type: str = "text"
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: JsonObject = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Texts = ""

    def call(self) -> dict[str, Any]:
        return {"id": self.id, "function": {"name": self.name, "arguments": self.input}}


class InputMessage(BodyModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[ContentBlock],
        Field(fail_fast=True),
        only("content", None, *KINDS),
        as_list(str | list[ContentBlock], lambda text: {"type": "text", "text": text}),
    ]

    def chat_messages(self) -> list[dict[str, Any]]:
        """Return the same as messages of a chat: results first, each a message of its own, then text and calls."""
        results = [
            {"role": "tool", "tool_call_id": each.tool_use_id, "content": each.content}
            for each in self.content
            if each.type == "tool_result"
        ]
        if results and len(results) == len(self.content):
            return results
        said = {
            "role": self.role,
            "content": "".join(each.text for each in self.content),
            "reasoning_content": "".join(each.thinking for each in self.content),
            "tool_calls": [each.call() for each in self.content if each.type == "tool_use"],
        }
        return [*results, said]


class OutputConfig(BodyModel):
    format: ResponseFormat | None = None
    """The answer is JSON that matches a schema."""
    effort: str | None = None
    """It reaches the chat template."""


class Metadata(BodyModel):
    user_id: str | None = None
    """Whose the request is, unless the API key says it: `user` of a chat request."""


class Thinking(BodyModel):
    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    """The tokens of thoughts after which the model has to answer."""


def _without_billing(system: Any) -> Any:
    """Leave out a first block that only counts calls: what follows is in the cache of prefixes then."""
    match system:
        case [{"text": str(text)}, *others] if text.startswith(BILLING):
            ignore(f"system.0 ({BILLING[:-1]})")
            return others
    return system


class CountTokensRequest(BodyModel):
    """The fields that make the prompt."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Annotated[Texts, BeforeValidator(_without_billing)] = ""
    tools: Annotated[ToolList, only("tools", None, "custom")] | None = None
    tool_choice: ToolChoice = Chosen()
    output_config: OutputConfig = OutputConfig()
    thinking: Thinking | None = None

    def chat_request(self) -> ChatRequest:
        """Return the same as a chat request. Raises RequestError."""
        return chat_request(self._chat_fields())

    def _chat_fields(self) -> Mapping[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *(each for message in self.messages for each in message.chat_messages())],
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "response_format": self.output_config.format,
            "continue_final_message": self.messages[-1].role == "assistant",
            "reasoning_effort": self.output_config.effort,
            "thinking_token_budget": self.thinking.budget_tokens if self.thinking else None,
            "chat_template_kwargs": {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else None,
        }


@with_sampling("messages")
class MessagesRequest(CountTokensRequest, RequestFields):
    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    metadata: Metadata = Metadata()
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
            "user": self.metadata.user_id,
        }
